"""Class folders list as torchvision lists them, and listings that are kept stay right."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import tarfile
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from pictures import picture, save
from stoker import cache
from stoker.errors import DecodeError, SourceError, StokerWarning
from stoker.sources import folder as module
from stoker.sources.folder import ImageFolder
from stoker.sources.index import Samples


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test; listings are kept however fresh the folders are."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setattr(module, "_SETTLED_SECONDS", -3600)
    return tmp_path / "cache" / "listings"


def make(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make(tmp_path / "tree", "b/2.jpg", "b/10.jpg", "a/x.PNG", "a/deep/er/y.webp", "a/no.txt")


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The roots that were walked."""
    roots: list[str] = []

    class Counted(module._Walk):
        def __init__(self, root: str, extensions: tuple[str, ...]) -> None:
            roots.append(root)
            super().__init__(root, extensions)

    monkeypatch.setattr(module, "_Walk", Counted)
    return roots


def assert_like_torchvision(root: str | Path, **options: Any) -> ImageFolder:
    theirs = torchvision.datasets.ImageFolder(root, allow_empty=True, **options)
    for _ in range(2):  # the second time from the cache
        ours = ImageFolder(root, allow_empty=True, **options)
        assert ours.classes == theirs.classes
        assert ours.class_to_idx == theirs.class_to_idx
        assert list(ours.samples) == list(ours.imgs) == theirs.samples
        assert ours.targets == theirs.targets
        assert (ours.root, ours.extensions) == (str(theirs.root), theirs.extensions)
    return ours


# As torchvision


def test_lists_as_torchvision(tree: Path) -> None:
    make(tree, "a.b/1.jpeg", "a b/1.tiff", "a-/z.bmp", "ünï/ß.jpg", "A/.jpg", "A/jpg", "a/deep.jpg")
    make(tree, "a/deep!/1.jpg", "a/deep/0.jpg", "😀/a.jpg", "\ufffd/b.jpg", "top.jpg")
    make(tree, "b/folder.jpg/in.jpg")
    (tree / "b" / "link.jpg").symlink_to("2.jpg")
    (tree / "b" / "dangling.jpg").symlink_to("nowhere")
    (tree / "b" / "circle.jpg").symlink_to("circle.jpg")
    (tree / "c").symlink_to("a", target_is_directory=True)
    (tree / "b" / "to a").symlink_to("../a", target_is_directory=True)
    (tree / "empty").mkdir()
    assert len(assert_like_torchvision(tree)) > 20


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes are Linux's")
def test_names_that_are_not_utf8(tree: Path) -> None:
    root = os.fsencode(tree)
    os.mkdir(root + b"/caf\xe9")
    for name in (b"\xff.jpg", b"z.jpg", "😀.jpg".encode(), "\ue000.jpg".encode()):
        with open(root + b"/caf\xe9/" + name, "wb"):
            pass
    assert "caf\udce9" in assert_like_torchvision(tree).classes


@pytest.mark.parametrize("form", ["tree", "tree/", "./tree", ".//tree//", "tree/.", "tree/a/.."])
def test_paths_begin_as_the_root_was_given(
    tree: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree.parent)
    assert_like_torchvision(form)


def test_home_is_expanded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tree.parent))
    assert_like_torchvision("~/tree")


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.lists(
            st.text("aA.-_ é😀0", min_size=1, max_size=4).filter(lambda s: s not in (".", "..")),
            min_size=2,
            max_size=4,
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_tree(tmp_path_factory: pytest.TempPathFactory, paths: list[list[str]]) -> None:
    root = tmp_path_factory.mktemp("any")
    for parts in paths:
        path = root.joinpath(*parts[:-1])
        if not any(parent.is_file() for parent in (path, *path.parents)):
            path.mkdir(parents=True, exist_ok=True)
            if not (path / f"{parts[-1]}.jpg").is_dir():
                (path / f"{parts[-1]}.jpg").touch()
    assert_like_torchvision(root)


def test_awkward_tree(data: Path, tmp_path: Path) -> None:
    with tarfile.open(data / "formats" / "imagefolder" / "awkward_tree.tar") as archive:
        archive.extractall(tmp_path, filter="tar")
    root = tmp_path / "awkward_tree"
    dataset = assert_like_torchvision(root / "train")
    assert "alias_of_daisy" in dataset.classes
    assert_like_torchvision(root / "val")
    assert_like_torchvision(root)
    dangling = [path for path, _ in dataset.samples].index(
        str(root / "train" / "daisy" / "dangling.jpg")
    )
    with pytest.raises(DecodeError, match="No such file"):
        dataset[dangling]


@pytest.mark.parametrize(
    "name", ["formats/trees/mmagic_image", "formats/trees/mmagic_coco", "datasets/hymenoptera"]
)
def test_real_trees(data: Path, name: str) -> None:
    assert_like_torchvision(data / name)


def test_gives_the_same_images_and_labels(tmp_path: Path) -> None:
    for i in range(4):
        save(tmp_path / "set" / f"c{i % 2}" / f"{i}.png", picture(20, 10, seed=i))
    theirs = torchvision.datasets.ImageFolder(tmp_path / "set", np.asarray, str)
    ours = ImageFolder(tmp_path / "set", np.asarray, str)
    for i in range(4):
        assert np.array_equal(ours[i][0], theirs[i][0])
        assert ours[i][1] == theirs[i][1]
    loader: DataLoader[Any] = DataLoader(ours, batch_size=3, collate_fn=list, num_workers=1)
    assert [label for batch in loader for _, label in batch] == ["0", "0", "1", "1"]
    copy = pickle.loads(pickle.dumps(ours))
    assert list(copy.samples) == theirs.samples


def test_options_reach_the_table(tree: Path) -> None:
    files = ImageFolder(tree, exif=True, max_pixels=5, max_bytes=6).files
    assert (files.upright, files.max_pixels, files.max_bytes) == (True, 5, 6)
    assert len(ImageFolder(tree, extensions=(".txt",), allow_empty=True)) == 1


def test_samples_can_be_replaced(tree: Path) -> None:
    dataset = ImageFolder(tree, exif=True)
    everything = list(dataset.samples)
    dataset.samples = dataset.samples[::2]
    assert list(dataset.samples) == everything[::2]
    assert isinstance(dataset.samples, Samples)
    dataset.samples = [("/x/1.jpg", 3), ("/y/2.jpg", 1)]
    assert list(dataset.imgs) == [("/x/1.jpg", 3), ("/y/2.jpg", 1)]
    assert dataset.targets == [3, 1]
    assert dataset.files.upright


# What torchvision does not say


def test_empty_classes_are_an_error_unless_allowed(tree: Path) -> None:
    (tree / "none").mkdir()
    (tree / "a.none").mkdir()
    with pytest.raises(SourceError, match=r"2 of 4 classes: 'a.none', 'none'; allow_empty=True"):
        ImageFolder(tree)
    dataset = ImageFolder(tree, allow_empty=True)
    assert dataset.classes == ["a", "a.none", "b", "none"]
    assert dataset.targets == [0, 0, 2, 2]


def test_roots_without_classes(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        ImageFolder(tmp_path / "absent")
    with pytest.raises(SourceError, match=r"has no folders.*stoker.ImageDataset"):
        ImageFolder(make(tmp_path / "flat", "1.jpg"))
    with pytest.raises(SourceError, match="Not a directory"):
        ImageFolder(tmp_path / "flat" / "1.jpg")


def test_links_that_lead_back_are_not_followed(tree: Path, kept: Path) -> None:
    (tree / "a" / "deep" / "up").symlink_to("../..", target_is_directory=True)
    (tree / "b" / "self").symlink_to(".", target_is_directory=True)
    with pytest.warns(StokerWarning) as caught:
        dataset = ImageFolder(tree)
    assert sorted(str(warning.message).removeprefix(f"{tree}: ") for warning in caught) == [
        "'a/deep/up' leads back to a folder it lies in: not followed",
        "'b/self' leads back to a folder it lies in: not followed",
    ]
    assert len(dataset) == 4
    assert not kept.exists(), "what was warned of once would then be silent"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may do anything")
def test_unreadable_folders_are_told(tree: Path) -> None:
    (tree / "a" / "deep").chmod(0)
    with pytest.warns(StokerWarning, match=r"'a/deep' can't be listed"):
        ImageFolder(tree)
    (tree / "a" / "deep").chmod(0o700)


def test_a_folder_that_vanishes_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).endswith("er"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.warns(StokerWarning, match=r"'a/deep/er' can't be listed and is left out: Perm"):
        assert len(ImageFolder(tree)) == 3


def test_progress_is_shown_on_terminals_only(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ImageFolder(tree, cache=False)
    assert capsys.readouterr().err == ""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "wait_for", _slow(wait))
    assert len(ImageFolder(tree, cache=False)) == 4
    assert "Listing" in terminal.getvalue()
    assert "4 images" in terminal.getvalue()


def _slow(real: Any) -> Any:
    """A wait that at first finds nothing done, as if the listing took long."""
    calls = []

    def slow(jobs: Any, timeout: float | None = None) -> Any:
        calls.append(timeout)
        return (set(), jobs) if len(calls) == 1 else real(jobs, None)

    return slow


# Kept listings


def test_listing_is_kept_and_used(tree: Path, walks: list[str], kept: Path) -> None:
    first = ImageFolder(tree)
    assert len(os.listdir(kept)) == 1
    second = ImageFolder(tree)
    assert walks == [str(tree)]
    assert list(first.samples) == list(second.samples)
    assert ImageFolder(tree, extensions=(".txt", ".jpg")).targets == [0, 1, 1]
    assert len(walks) == 2
    ImageFolder(tree, cache=False)
    assert len(walks) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "b" / "3.jpg").touch(),
        lambda tree: (tree / "a" / "deep" / "er" / "z.jpg").touch(),
        lambda tree: (tree / "b" / "2.jpg").unlink(),
        lambda tree: (tree / "b" / "2.jpg").rename(tree / "b" / "4.jpg"),
        lambda tree: make(tree, "new/1.jpg"),
        lambda tree: (tree / "a" / "deep").rename(tree / "b" / "deep"),
        lambda tree: (tree / "a").rename(tree / "z"),
        lambda tree: (tree / "a" / "link").symlink_to("../b", target_is_directory=True),
    ],
)
def test_changes_are_noticed(tree: Path, change: Any) -> None:
    ImageFolder(tree)
    times = {path: path.stat() for path in (tree, *tree.rglob("*")) if path.is_dir()}
    change(tree)
    for path, status in times.items():
        if path.exists():  # as tools do that restore times
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_like_torchvision(tree)


def test_fresh_folders_are_not_trusted(
    tree: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLED_SECONDS", 2)
    ImageFolder(tree)
    assert not kept.exists()


def test_an_unwritable_cache_is_memory_and_one_warning(
    tree: Path, walks: list[str], kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_warned", False)
    kept.parent.write_text("in the way")
    with pytest.warns(StokerWarning, match="can't write"):
        ImageFolder(tree)
    assert len(ImageFolder(tree)) == 4
    assert len(walks) == 1


def _damaged(data: bytes, at: int, value: int, cut: int) -> bytes:
    changed = bytearray(data)
    changed[at % len(data)] ^= value
    return bytes(changed[: len(changed) - cut])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 10**6), st.integers(0, 255), st.just(0) | st.integers(0, 700), st.booleans())
def test_damaged_and_hostile_listings_are_harmless(
    tree: Path, kept: Path, at: int, value: int, cut: int, resealed: bool
) -> None:
    for old in kept.glob("*") if kept.exists() else ():
        old.unlink()
    expected = list(ImageFolder(tree).samples)
    (file,) = kept.iterdir()
    data = _damaged(file.read_bytes(), at, value, cut)
    if resealed:
        data = _sealed(data[: -module._DIGEST_BYTES])
    listing = module._unpacked(data)
    if listing is not None:
        for row in range(len(listing.offsets) - 1):
            begin, end = listing.offsets[row : row + 2].tolist()
            name = listing.names[begin:end].tobytes()
            assert b"\0" not in name
            assert b".." not in name.split(b"/")
            assert not name.startswith(b"/")
    file.write_bytes(data)
    found = ImageFolder(tree, allow_empty=True)
    if not resealed:
        assert list(found.samples) == expected


def _sealed(body: bytes) -> bytes:
    return body + hashlib.blake2b(body, digest_size=module._DIGEST_BYTES).digest()


def _listing(**changes: Any) -> bytes:
    parts: dict[str, Any] = {
        "counts": np.array([1, 1]),
        "offsets": np.array([0, 7, 14], np.uint64),
        "times": np.zeros(6, np.int64),
        "names": np.frombuffer(b"a/1.jpgb/2.jpg", np.uint8),
        "classes": b"a\0b\0",
        "folders": b"\0a\0b\0",
    } | changes
    return b"".join(module._packed(module._Listing(**parts)))


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": np.array([3, -1])},
        {"counts": np.array([2, 1])},
        {"counts": np.array([2])},
        {"counts": np.array([2**62, 2**62])},
        {"counts": np.zeros(0, np.int64), "classes": b""},
        {"offsets": np.array([0, 2**63, 14], np.uint64)},
        {"offsets": np.array([0, 15, 14], np.uint64)},
        {"offsets": np.array([1, 7, 14], np.uint64)},
        {"offsets": np.array([0, 7, 13], np.uint64)},
        {"offsets": np.array([0, 14, 14], np.uint64)},
        {"offsets": np.zeros(0, np.uint64)},
        {"times": np.zeros(5, np.int64)},
        {"names": np.frombuffer(b"a/1\0jpgb/2.jpg", np.uint8)},
        {"names": np.frombuffer(b"/etc/xxb/2.jpg", np.uint8)},
        {"names": np.frombuffer(b"a/../xxb/2.jpg", np.uint8)},
        {"names": np.frombuffer(b"../1.jpb/2.jpg", np.uint8), "classes": b"..\0b\0"},
        {"classes": b"a\0b"},
        {"classes": b"a\0c\0"},
        {"folders": b"\0a\0../../etc\0"},
        {"folders": b"x\0a\0b\0"},
    ],
    ids=str,
)
def test_unsound_listings_are_not_believed(changes: dict[str, Any]) -> None:
    assert module._unpacked(_listing()) is not None
    assert module._unpacked(_listing(**changes)) is None


@pytest.mark.parametrize("content", [b"", module._MAGIC, module._MAGIC + b"\xff" * 64, b"PK" * 500])
def test_anything_else_in_the_cache_is_ignored(tree: Path, kept: Path, content: bytes) -> None:
    ImageFolder(tree)
    (file,) = kept.iterdir()
    file.write_bytes(content)
    assert len(ImageFolder(tree)) == 4


def test_the_native_core_can_read_kept_arrays(tree: Path) -> None:
    ImageFolder(tree)
    files = ImageFolder(tree).files
    for array in (files.names, files.offsets, files.labels):
        assert array is not None
        assert array.flags.c_contiguous
        assert array.flags.aligned
    assert files.names.dtype == np.uint8
    assert files.offsets.dtype == np.uint64
    assert Image.MAX_IMAGE_PIXELS  # importing any of this leaves Pillow's own guard alone
