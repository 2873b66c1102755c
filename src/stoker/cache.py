"""Bytes that stoker keeps between runs, in the user's cache folder.

A file appears whole or not at all: it is written under another name and renamed. What is read back
may be anything, as any program can write there: whoever asks for it checks it. A folder that cannot
be written to means that things are kept in memory until the process ends, and one warning.

Note [Budget]
    What ``file`` makes in ``expanded/`` and ``remote/`` may be large. Before more is written there,
    the files that were asked for least recently (their time of access, which ``file`` sets) are
    removed until the new one fits: into the limit that was given or else, so that a tenth of the
    file system, at most 50 GiB, stays free. Files in use by a living process are never removed.
    What does not fit all the same is an error, and then nothing is removed for it.

Note [Who uses what]
    Each process has one file in ``leases/``, under a lock (flock) as long as it lives, with a line
    for each name that it begins (+) or ceases (-) to use. The kernel gives the lock of a dead
    process back, so a file there whose lock is free means nothing any more. Forked children share
    their parent's lock, so what it used before stays in use while one of them lives; what they ask
    for themselves they note in files of their own. Names are added, and files removed, under the
    lock of the file ``lock``, so nothing is removed between being asked for and being noted.
    Once a child was forked, the parent begins another file, too: what was in the first is both's.

Note [One maker]
    A file is written as ``.new-NAME`` beside its place, under a lock (flock) on that very file:
    others who want it wait for the lock and find it made. One that a dead process left behind
    has a free lock; whoever gets that begins anew, and making room removes it. Whoever gets a lock
    looks whether the file still has its name: it may have been renamed or removed before.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import platformdirs

from stoker.errors import StokerWarning

_LARGE = ("expanded", "remote")
_PARTIAL = ".new-"
_MOST_KEPT_FREE = 50 << 30
_PAUSE_SECONDS = 0.05

_in_memory: dict[str, bytes] = {}
_warned = False


def place(name: str) -> Path:
    """Where ``name``, which may hold slashes, is kept; a path from the root on is that place."""
    return platformdirs.user_cache_path("stoker", appauthor=False) / name


def load(name: str) -> bytes | None:
    """What was stored as ``name``, or whatever else is there now; None if nothing can be read."""
    if name in _in_memory:
        return _in_memory[name]
    path = place(name)
    try:
        # Opening a pipe would wait for a writer.
        return path.read_bytes() if stat.S_ISREG(path.stat().st_mode) else None
    except OSError:
        return None


def store(name: str, parts: Sequence[bytes | memoryview]) -> None:
    """Keeps ``parts``, one after the other, as ``name``."""
    global _warned
    path = place(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_PARTIAL)
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(parts)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _in_memory[name] = b"".join(parts)
        if not _warned:
            _warned = True
            warnings.warn(
                f"can't write to {path.parent} ({error.strerror or error}): what would be kept "
                "there is made anew by every process",
                StokerWarning,
                stacklevel=2,
            )


# Large files


def file(
    name: str,
    write: Callable[[BinaryIO], None],
    *,
    size: int | None = None,
    stamp: int | None = None,
    limit: int | None = None,
    stop: threading.Event | None = None,
) -> Path:
    """The path of the file ``name``, which ``write`` makes if it isn't there: whole or not at all.

    It is in use by this process from now on, until `release`. Of several processes and threads that
    ask for it, one makes it and the others wait.

    Args:
        name: begins with a folder of `_LARGE`.
        write: is given a file for reading and writing, of ``size`` bytes if that is known.
        size: in bytes; one of another size is made anew.
        stamp: time of change that it gets, in ns, a multiple of two seconds as some file systems
            know no others; one with another was changed, and is made anew.
        limit: bytes that all large files together may have; None leaves a part of the disk free.
        stop: set by another thread to give up waiting.

    Raises:
        OSError: it cannot be written. ENOSPC: there is no room, and none can be made.
        InterruptedError: ``stop`` was set.
    """
    use(name)
    try:
        while not is_whole(name, size, stamp):
            if _make(name, write, size, stamp, limit, stop):
                break
        return place(name)
    except BaseException:
        release(name)
        raise


def is_whole(name: str, size: int | None, stamp: int | None) -> bool:
    """Whether a file is there as `file` made it; if so, it counts as asked for just now."""
    path = place(name)
    try:
        status = path.stat()
    except OSError:
        return False
    if not stat.S_ISREG(status.st_mode) or size not in (None, status.st_size):
        return False
    if stamp not in (None, status.st_mtime_ns):
        return False
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
    return True


def _make(
    name: str,
    write: Callable[[BinaryIO], None],
    size: int | None,
    stamp: int | None,
    limit: int | None,
    stop: threading.Event | None,
) -> bool:
    """Makes a file; False where another did meanwhile, or gave up. See Note [One maker]."""
    path = place(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(_PARTIAL + path.name)
    handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "r+b") as out:
        while not _lock(handle):
            if stop is not None and stop.is_set():
                raise InterruptedError(errno.EINTR, "given up")
            time.sleep(_PAUSE_SECONDS)
        if not _has_name(handle, partial):
            return False
        try:
            if is_whole(name, size, stamp):
                os.unlink(partial)
                return False
            os.ftruncate(handle, 0)
            if size is not None:
                path.unlink(missing_ok=True)  # it was changed
            with _folder_locked():
                _make_room(size, limit)
                if size:
                    _reserve(handle, size)
            write(out)
            out.flush()
            os.fsync(handle)  # before it has its name, by which it is trusted
            if stamp is not None:
                os.utime(handle, ns=(time.time_ns(), stamp))
            with _folder_locked():  # who counts what there is finds it, under one name
                os.replace(partial, path)
            return True
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise


def _reserve(handle: int, size: int) -> None:
    """Gives a file its size, and the space for it where the file system can."""
    os.ftruncate(handle, size)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise


def _lock(handle: int) -> bool:
    """Takes the lock of a file; False where another has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_name(handle: int, path: str | Path) -> bool:
    """Whether an open file is what is at ``path``."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def _folder_locked() -> Iterator[None]:
    """Holds the lock under which names come into use and files are removed; briefly."""
    path = place("lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing would not, if a child was forked meanwhile
        os.close(handle)


# Room


def require_room(sizes: Mapping[str, int], limit: int | None) -> None:
    """Checks that files of these names and sizes can be had, without removing anything yet.

    Raises:
        OSError: ENOSPC, with the sizes.
    """
    with _folder_locked():
        _removable(sum(sizes.values()), limit, strict=True, making=sizes)


def _make_room(size: int | None, limit: int | None) -> None:
    """Removes what was used least recently until ``size`` bytes more fit; see Note [Budget]."""
    for path in _removable(size or 0, limit, strict=size is not None):
        with suppress(OSError):
            os.unlink(path)


def _removable(
    size: int, limit: int | None, strict: bool, making: Collection[str] = ()
) -> list[Path]:
    """What must go so that ``size`` bytes more fit; the folder's lock is held.

    What there is of the files ``making``, by whoever makes them, is part of ``size``.

    Raises:
        OSError: ENOSPC and ``strict``: even that would not do.
    """
    disk = shutil.disk_usage(place("lock").parent)
    kept_free = min(disk.total // 10, _MOST_KEPT_FREE) if limit is None else 0
    if limit is None and size <= disk.free - kept_free:
        return []
    _remove_dead_partials()
    disk = shutil.disk_usage(place("lock").parent)
    found = list(_large_files())
    used = sum(status.st_size for _, _, status in found)
    size -= sum(status.st_size for name, _, status in found if _finally(name) in making)
    lacking = size - disk.free + kept_free
    if limit is not None:
        lacking = max(lacking, used + size - limit)
    in_use = _in_use() if lacking > 0 else set()
    going = []
    for name, path, status in sorted(found, key=lambda entry: entry[2].st_atime_ns):
        if lacking > 0 and name not in in_use and not path.name.startswith(_PARTIAL):
            going.append(path)
            lacking -= status.st_size
    if lacking > 0 and strict:
        kept = f"{kept_free:,} stay so" if limit is None else f"cache_bytes={limit:,}"
        raise OSError(
            errno.ENOSPC,
            f"{lacking:,} bytes are lacking for {size:,} more, even without what nobody uses: "
            f"{disk.free:,} bytes of the disk are free, {kept}",
        )
    return going


def _large_files() -> Iterator[tuple[str, Path, os.stat_result]]:
    """Name, path and status of each large file, those that are being made included."""
    for top in _LARGE:
        for folder, _, names in os.walk(place(top)):
            for name in names:
                path = Path(folder, name)
                with suppress(OSError):
                    yield path.relative_to(place("")).as_posix(), path, path.lstat()


def _finally(name: str) -> str:
    """The name that a file has, or that one that is being made will have."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.removeprefix(_PARTIAL)


def _remove_dead_partials() -> None:
    for _, path, _ in list(_large_files()):
        if path.name.startswith(_PARTIAL):
            _remove_if_free(path)


def _remove_if_free(path: Path) -> bytes:
    """Removes a file whose lock nobody has; the content of one that somebody has."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(handle, "rb") as file:
        if not _lock(handle):
            return b"" if path.name.startswith(_PARTIAL) else file.read()
        if _has_name(handle, path):
            with suppress(OSError):
                path.unlink()
        return b""


# Use


class _Lease:
    """What a process uses of a folder; see Note [Who uses what]. Made under the folder's lock.

    Attributes:
        handle: of its file.
        names: how often each was asked for.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _in_use()  # clears away what dead processes left
        self.handle, _ = tempfile.mkstemp(dir=folder, prefix=f"{os.getpid()}-")
        fcntl.flock(self.handle, fcntl.LOCK_EX)
        self.names: Counter[str] = Counter()

    def note(self, sign: str, names: Sequence[str]) -> None:
        """Writes lines about names."""
        lines = b"".join(f"{sign}{json.dumps(name)}\n".encode() for name in names)
        while lines:
            lines = lines[os.write(self.handle, lines) :]


_leases: dict[Path, _Lease] = {}
_shared: list[_Lease] = []  # with forked children or parents: none of their names is released
_guard = threading.RLock()  # collecting garbage may release while names come into use


def _share() -> None:
    """Leaves what is in use for good, as parent and child may use it; later names are apart."""
    _shared.extend(_leases.values())
    _leases.clear()


def _share_in_child() -> None:
    global _guard
    _guard = threading.RLock()
    _share()


os.register_at_fork(after_in_parent=_share, after_in_child=_share_in_child)


def use(*names: str) -> None:
    """Notes that this process uses files, until it ends or they are released as often.

    Raises:
        OSError: the cache folder cannot be written to.
    """
    folder = place("leases")
    with _guard, _folder_locked():
        lease = _leases.get(folder) or _Lease(folder)
        _leases[folder] = lease
        new = []
        for name in names:
            lease.names[name] += 1
            if lease.names[name] == 1:
                new.append(name)
        lease.note("+", new)


def release(*names: str) -> None:
    """Notes that this process no longer uses files that it has asked for."""
    with _guard:
        lease = _leases.get(place("leases"))
        if lease is None:
            return
        old = []
        for name in names:
            if lease.names[name] == 1:
                old.append(name)
            if lease.names[name] > 0:
                lease.names[name] -= 1
        lease.note("-", old)


def _in_use() -> set[str]:
    """The names that living processes use; the folder's lock is held."""
    found: set[str] = set()
    folder = place("leases")
    for name in os.listdir(folder) if folder.is_dir() else ():
        noted: set[str] = set()
        for line in _remove_if_free(folder / name).splitlines():
            with suppress(ValueError, TypeError):  # not ours
                (noted.add if line[:1] == b"+" else noted.discard)(json.loads(line[1:]))
        found |= noted
    return found
