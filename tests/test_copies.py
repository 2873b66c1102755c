"""Copies of remote shards: made once on a node, whole or not at all, never removed while in use."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from faulty import FaultyServer, serving
from stoker import copies, storage, transport
from stoker.copies import Copies
from stoker.errors import SourceError
from stoker.storage import Store

SIZE = 20_000
PART = 3_000


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr(storage, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(storage, "_PART_BYTES", PART)
    monkeypatch.setattr(transport, "_SILENT_SECONDS", 5.0)
    with serving() as server:
        for number in range(4):
            server.objects[f"/{number}.tar"] = random.Random(number).randbytes(SIZE)
        yield server


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "stoker"


def of(server: FaultyServer, *numbers: int, limit: int | None = None) -> Copies:
    store = Store("http", {})
    things = [store.look_up(f"{server.url}/{number}.tar") for number in numbers]
    return Copies(store, things, False, limit)


def check(made: Copies, server: FaultyServer) -> None:
    for path, thing in zip(made.paths, made.objects, strict=True):
        assert Path(path).read_bytes() == server.objects[thing.url.removeprefix(server.url)]


def files(folder: Path) -> list[str]:
    return sorted(name.partition("-")[2] for name in os.listdir(folder / "remote"))


def parts(server: FaultyServer) -> int:
    return sum(server.asked.values())


EACH = -(-SIZE // PART)

SCRIPT = f"""
import pickle, sys
from stoker import storage
storage._PART_BYTES = {PART}
storage._FIRST_PAUSE_SECONDS = 0.001
print("ready", flush=True)
state = bytes.fromhex(sys.stdin.readline())
made = pickle.loads(state)
print("made", *made.paths, flush=True)
sys.stdin.readline()
"""


class Process:
    """Another process, which makes the same copies and uses them until it is told to end."""

    def __init__(self, made: bytes) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        )
        self.made = made
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def tell(self, text: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def begin(self) -> None:
        self.tell(self.made.hex())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def pickled(made: Copies) -> bytes:
    """As it would reach a process of another node: of this one, the copies are gone."""
    state = pickle.dumps(made)
    for path in made.paths:
        os.unlink(path)
    return state


def test_makes_copies_once(server: FaultyServer, folder: Path) -> None:
    first = of(server, 0, 1)
    check(first, server)
    assert parts(server) == 2 * EACH
    again = of(server, 1, 0)
    check(again, server)
    assert again.paths == first.paths[::-1]
    assert parts(server) == 2 * EACH
    assert files(folder) == ["0.tar", "1.tar"]
    assert not any("127.0.0.1" in name for _, _, names in os.walk(folder) for name in names)


def test_a_changed_object_is_copied_anew(server: FaultyServer) -> None:
    first = of(server, 0)
    server.objects["/0.tar"] = server.objects["/0.tar"][::-1]
    second = of(server, 0)
    assert first.paths != second.paths
    check(second, server)


@pytest.mark.parametrize("harm", ["flip", "truncate", "grow", "folder"])
def test_a_harmed_copy_is_made_anew(server: FaultyServer, harm: str) -> None:
    made = of(server, 0)
    path = Path(made.paths[0])
    if harm == "folder":
        path.unlink()
        path.mkdir()
        with pytest.raises(SourceError, match="cannot be copied"):
            of(server, 0)
        return
    with open(path, "r+b") as file:
        if harm == "flip":
            file.write(b"?")
        elif harm == "truncate":
            file.truncate(10)
        else:
            file.seek(0, 2)
            file.write(b"?")
    check(of(server, 0), server)
    assert parts(server) == 2 * EACH


def test_reading_a_copy_changes_nothing(server: FaultyServer) -> None:
    made = of(server, 0)
    before = os.stat(made.paths[0]).st_mtime_ns
    check(made, server)
    of(server, 0)
    assert os.stat(made.paths[0]).st_mtime_ns == before
    assert parts(server) == EACH


def test_processes_share_one_download(server: FaultyServer) -> None:
    made = of(server, 0, 1, 2, 3)
    state = pickled(made)
    server.asked.clear()
    processes = [Process(state) for _ in range(3)]
    try:
        for process in processes:
            process.begin()
        for process in processes:
            assert process.line().split() == ["made", *made.paths]
        check(made, server)
        assert parts(server) == 4 * EACH
    finally:
        for process in processes:
            process.end()


def test_threads_share_one_download(server: FaultyServer) -> None:
    threads = [threading.Thread(target=of, args=(server, 0, 1)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert parts(server) == 2 * EACH


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment_and_opened_again(
    server: FaultyServer, folder: Path, seed: int
) -> None:
    made = of(server, 0, 1, 2, 3)
    state = pickled(made)
    server.asked.clear()
    left = random.Random(seed).randrange(4 * EACH)
    process = Process(state)
    waiting = Process(state) if seed % 2 else None  # goes on where the first one dies
    lock = threading.Lock()

    def count() -> None:
        nonlocal left
        with lock:
            left -= 1
            if left == -1:
                process.process.send_signal(signal.SIGKILL)

    server.on_part = count
    process.begin()
    assert process.process.wait() == -signal.SIGKILL
    for path in folder.glob("remote/*"):
        assert path.name.startswith(".new-") or path.stat().st_size == SIZE
    try:
        if waiting is not None:
            waiting.begin()
            assert waiting.line().split() == ["made", *made.paths]
        again = pickle.loads(state)
        check(again, server)
        assert files(folder) == ["0.tar", "1.tar", "2.tar", "3.tar"]
    finally:
        process.end()
        if waiting is not None:
            waiting.end()


def test_the_least_recently_used_goes(server: FaultyServer, folder: Path) -> None:
    for number in (0, 1, 2):
        of(server, number, limit=3 * SIZE)
    of(server, 0, limit=3 * SIZE)
    of(server, 3, limit=3 * SIZE)
    assert files(folder) == ["0.tar", "2.tar", "3.tar"]


def test_what_is_in_use_stays(server: FaultyServer, folder: Path) -> None:
    used = of(server, 0, 1, limit=2 * SIZE + 10)
    with pytest.raises(SourceError, match="cannot be copied") as caught:
        of(server, 2, limit=2 * SIZE + 10)
    assert caught.value.path == f"{server.url}/2.tar"
    assert f"{SIZE:,} more" in str(caught.value) and "cache_bytes=40,010" in str(caught.value)
    check(used, server)
    del used
    of(server, 2, limit=2 * SIZE + 10)
    assert len(files(folder)) == 2 and "2.tar" in files(folder)


def test_what_another_process_uses_stays_until_it_is_dead(
    server: FaultyServer, folder: Path
) -> None:
    state = pickle.dumps(of(server, 0, 1))
    process = Process(state)
    try:
        process.begin()
        assert process.line().startswith("made")
        with pytest.raises(SourceError, match="cannot be copied"):
            of(server, 2, limit=2 * SIZE)
        assert files(folder) == ["0.tar", "1.tar"]
    finally:
        process.end()
    of(server, 2, limit=2 * SIZE)
    assert len(files(folder)) == 2
    assert len(os.listdir(folder / "leases")) == 1


def test_what_a_forked_child_inherited_stays_in_use(server: FaultyServer, folder: Path) -> None:
    """The parent may be gone before its workers."""
    script = (
        "import os, pickle, sys\n"
        "made = pickle.loads(bytes.fromhex(sys.stdin.readline()))\n"
        "if os.fork():\n    os._exit(0)\n"
        "print('made', os.getpid(), flush=True)\nsys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    ) as process:
        assert process.stdin and process.stdout
        process.stdin.write(f"{pickle.dumps(of(server, 0)).hex()}\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith("made")
        process.wait()
        with pytest.raises(SourceError, match="cannot be copied"):
            of(server, 1, limit=SIZE)
        process.stdin.close()
        assert process.stdout.read() == ""  # the child has ended
    of(server, 1, limit=SIZE)
    assert files(folder) == ["1.tar"]


def test_what_is_used_after_a_fork_is_released(server: FaultyServer, folder: Path) -> None:
    before = of(server, 0)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    after = of(server, 1)
    del before, after
    of(server, 2, limit=2 * SIZE)
    assert files(folder) == ["0.tar", "2.tar"]  # the child may have used the first


def test_another_cache_folder_is_told(
    server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = pickle.dumps(of(server, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    with pytest.raises(SourceError, match="XDG_CACHE_HOME alike"):
        pickle.loads(state)


def test_a_set_that_cannot_fit_is_refused_before_it_is_fetched(
    server: FaultyServer, folder: Path
) -> None:
    of(server, 3)
    server.asked.clear()
    with pytest.raises(SourceError, match="cannot be copied"):
        of(server, 0, 1, 2, limit=2 * SIZE)
    assert parts(server) == 0
    assert files(folder) == ["3.tar"], "something was removed for nothing"


def test_two_sets_of_one_limit_at_once(server: FaultyServer) -> None:
    """What one is making does not count against the other."""
    made = of(server, 0, 1, 2, 3, limit=4 * SIZE)
    state = pickled(made)
    processes = [Process(state) for _ in range(2)]
    try:
        for process in processes:
            process.begin()
        for process in processes:
            assert process.line().split() == ["made", *made.paths]
    finally:
        for process in processes:
            process.end()


def test_a_failure_leaves_nothing_and_stops_the_others(server: FaultyServer, folder: Path) -> None:
    store = Store("http", {})
    things = [store.look_up(f"{server.url}/{number}.tar") for number in range(4)]
    server.always["/2.tar"] = "403"
    with pytest.raises(SourceError, match="denied") as caught:
        Copies(store, things, False, None)
    assert caught.value.path.endswith("/2.tar")
    assert not [path for path in folder.glob("remote/*") if path.name.startswith(".new-")]


def test_an_unwritable_folder(server: FaultyServer, tmp_path: Path) -> None:
    (tmp_path / "stoker").write_text("a file where the folder should be")
    with pytest.raises(SourceError, match=r"cannot be copied to .* XDG_CACHE_HOME"):
        of(server, 0)


def test_a_disk_that_is_full(
    server: FaultyServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SourceError, match="No space left on device"):
        of(server, 0)
    assert files(folder) == []


def test_a_tenth_of_the_disk_stays_free(
    server: FaultyServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        total, free = 100_000, 40_000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk)
    of(server, 0)
    Disk.free = 20_000
    of(server, 1)
    assert files(folder) == ["1.tar"]
    used = of(server, 1)
    with pytest.raises(SourceError, match="10,000 stay so"):
        of(server, 2)
    del used


def test_hostile_leases_and_names_harm_nobody(server: FaultyServer, folder: Path) -> None:
    (folder / "leases").mkdir(parents=True)
    (folder / "leases" / "odd").write_bytes(b'+["a"]\n+{\n\xff\n-\n')
    (folder / "leases" / "folder").mkdir()
    (folder / "leases" / "link").symlink_to("/nowhere")
    (folder / "remote").mkdir()
    (folder / "remote" / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "remote" / ".new-pipe")
    os.mkfifo(folder / "leases" / "pipe")
    of(server, 0, limit=SIZE + 100)
    of(server, 1, limit=SIZE + 100)
    assert os.path.exists("/etc/passwd")


def test_copies_are_the_users_alone(server: FaultyServer) -> None:
    made = of(server, 0)
    assert stat.S_IMODE(os.stat(made.paths[0]).st_mode) & 0o077 == 0


def test_a_progress_bar_when_it_takes_long(
    server: FaultyServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(copies, "_UNSEEN_SECONDS", 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    check(of(server, 0, 1), server)
    assert "Copying shards" in capsys.readouterr().err
