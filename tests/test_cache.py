"""What is kept between runs appears whole, or is kept in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker import cache
from stoker.errors import StokerWarning


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "kept" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setattr(cache, "_warned", False)
    return tmp_path / "kept"


def test_gives_back_what_was_stored(folder: Path) -> None:
    assert cache.load("a/b") is None
    cache.store("a/b", [b"one", memoryview(b"two")])
    assert cache.load("a/b") == b"onetwo"
    cache.store("a/b", [b"three"])
    assert cache.load("a/b") == b"three"
    assert os.listdir(folder / "a") == ["b"], "a temporary file was left"


def test_place_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert "stoker" in cache.place("x").parts


def test_unwritable_means_memory_and_one_warning(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    with pytest.warns(StokerWarning, match="can't write"):
        cache.store("a", [b"1", b"2"])
    cache.store("b", [b"3"])  # a second warning would be an error
    assert cache.load("a") == b"12"
    assert cache.load("b") == b"3"


def test_failing_halfway_leaves_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store("a", [b"old"])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(StokerWarning, match="No space left"):
        cache.store("a", [b"new"])
    assert (folder / "a").read_bytes() == b"old"
    assert os.listdir(folder) == ["a"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes are made with mkfifo")
def test_does_not_wait_for_a_pipe(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "a")
    (folder / "b").mkdir()
    assert cache.load("a") is None
    assert cache.load("b") is None
