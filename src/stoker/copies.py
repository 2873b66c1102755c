"""Remote objects that are the shards of a dataset, and their copies in the cache folder.

Note [Copies]
    An object is copied to the cache folder in parts that are read side by side, under a name made
    from where it is and what it is known by, with a time of change made from the same: a copy that
    was written to has another, and is made anew. Its checksum is compared where the store gives
    one of the whole object: the ETag of S3 where that is an MD5, x-amz-checksum, the MD5 of Google,
    or Repr-Digest of HTTP.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, nullcontext
from errno import ENOSPC
from typing import Any, BinaryIO

from stoker import cache
from stoker.errors import SourceError
from stoker.storage import DiskError, GivenUpError, Store
from stoker.transport import CONNECTIONS, Object, shown

_COPIES_AT_ONCE = 8
_UNSEEN_SECONDS = 2


class Copies:
    """Remote objects that are the shards of a dataset, and their copies in the cache folder.

    The copies are in use, so that no process removes them, until this is collected. It pickles:
    a process that unpickles it uses the same copies, and makes those that are not there.

    With ``ranged``, copies are made only while someone looks for what is in a shard (`at_hand`);
    the samples' bytes are read from the objects (`read`).

    Args:
        store: where the objects are.
        objects: as they were looked up.
        group: they need their own names, in one folder.
        limit: bytes that the cache may have; None leaves a part of the disk free.
        ranged: samples are read from the objects; of a group, the first is copied all the same.

    Raises:
        SourceError: an object cannot be had, has changed, or does not fit; or cannot be read by
            ranges.
    """

    def __init__(
        self,
        store: Store,
        objects: Sequence[Object],
        group: bool,
        limit: int | None,
        ranged: bool = False,
    ) -> None:
        self.store, self.objects, self.group, self.limit = store, list(objects), group, limit
        self.ranged, self.folder = ranged, str(cache.place(""))
        for thing in self.objects if ranged else ():
            if not thing.ranges:
                raise SourceError(
                    shown(thing.url), "its server gives no parts of it: leave remote='ranges' out"
                )
        self.names, self.stamps = self._named()
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        here = str(cache.place(""))
        if here != self.folder:  # the table of its dataset has the paths of the copies
            raise SourceError(
                self.urls[0],
                f"was opened with the cache folder {self.folder}, and that of this process is "
                f"{here}: set XDG_CACHE_HOME alike, or open it here",
            )
        self._begin()

    def _begin(self) -> None:
        paths = self.paths
        self._url_of = dict(zip(paths, self.urls, strict=True))
        self._number_of = {path: number for number, path in enumerate(paths)}
        if not self.ranged:
            self._fetch(list(range(len(paths))))
            return
        if self.group:
            self._fetch([0])
        _ranged.update((path, self) for path in paths[self.group :])

    @property
    def urls(self) -> list[str]:
        """The objects' URLs, without what may be secret."""
        return [shown(thing.url) for thing in self.objects]

    def __contains__(self, path: str) -> bool:
        """Whether ``path`` is that of a copy."""
        return path in self._number_of

    def url_of(self, path: str) -> str:
        """The URL of what ``path`` is a copy of; ``path`` where it is none."""
        return self._url_of.get(path, path)

    @property
    def paths(self) -> list[str]:
        """Where the copies are."""
        return [str(cache.place(name)) for name in self.names]

    def _named(self) -> tuple[list[str], list[int]]:
        """Names in the cache, and times of change; see Note [Copies]."""
        hashes = []
        for thing in self.objects:
            known = [self.store.place(thing.url), thing.url, thing.size, thing.identity]
            hashes.append(hashlib.blake2b(json.dumps(known).encode(), digest_size=16).hexdigest())
        stamps = [(946_684_800 + 2 * (int(name, 16) % (1 << 28))) * 10**9 for name in hashes]
        bases = [shown(thing.url).removesuffix("?...").rpartition("/")[2] for thing in self.objects]
        if self.group:
            whole = hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()
            return [f"remote/{whole}/{base}" for base in bases], stamps
        bases = [re.sub(r"[^\w.=-]+", "_", base, flags=re.ASCII)[-80:] for base in bases]
        return [f"remote/{name}-{base}" for name, base in zip(hashes, bases, strict=True)], stamps

    def read(
        self, path: str, begin: int, length: int, stop: threading.Event | None = None
    ) -> bytes:
        """Bytes of the object that ``path`` would be a copy of.

        Raises:
            SourceError: they cannot be had, or it has changed.
        """
        return self.store.read(self.objects[self._number_of[path]], begin, length, stop)

    def state_of(self, path: str) -> tuple[int, int]:
        """Size, and time of change in ns, that the copy at ``path`` has where it is there."""
        number = self._number_of[path]
        return self.objects[number].size, self.stamps[number]

    @contextmanager
    def made(self, path: str) -> Iterator[None]:
        """Has a copy there for as long as it lasts; it may wait for others to last no longer."""
        number, turns = self._number_of[path], _turns
        while True:
            ended = turns.begin()
            try:
                with ThreadPoolExecutor(_COPIES_AT_ONCE, "stoker-parts") as parts:
                    self._copy(number, parts, threading.Event(), lambda _: None)
                break
            except BaseException as error:
                cause = error.__cause__
                full = isinstance(cause, OSError) and cause.errno == ENOSPC
                if turns.give_up() == 0 or not full:
                    raise
                turns.wait(ended)
        try:
            yield
        finally:
            cache.release(self.names[number])
            turns.end()

    def _fetch(self, numbers: list[int]) -> None:
        """Makes the copies that are not there, with progress, and uses all from now on."""
        lacking = numbers
        names = [self.names[number] for number in numbers]
        try:
            cache.use(*names)
            weakref.finalize(self, cache.release, *names).atexit = False
            lacking = [number for number in numbers if not self._is_whole(number)]
            if not lacking:
                return
            sizes = {self.names[number]: self.objects[number].size for number in lacking}
            cache.require_room(sizes, self.limit)
        except OSError as error:
            raise self._no_copy(lacking[0], error) from error
        stop, done = threading.Event(), [0]

        def told(count: int) -> None:
            done[0] += count

        with (
            ThreadPoolExecutor(CONNECTIONS, "stoker-parts") as parts,
            ThreadPoolExecutor(_COPIES_AT_ONCE, "stoker-copies") as pool,
        ):
            jobs = [pool.submit(self._copy, number, parts, stop, told) for number in lacking]
            try:
                total = sum(self.objects[number].size for number in lacking)
                _show_progress(jobs, total, done)
                _raise_first(jobs)
                cache.release(*(self.names[number] for number in lacking))  # now used twice
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _is_whole(self, number: int) -> bool:
        size = self.objects[number].size
        return cache.is_whole(self.names[number], size, self.stamps[number])

    def _copy(
        self,
        number: int,
        parts: ThreadPoolExecutor,
        stop: threading.Event,
        told: Callable[[int], None],
    ) -> None:
        """Makes a copy, or waits for the process that does; it is in use then."""
        thing, name = self.objects[number], self.names[number]
        counted = [0]

        def tell(count: int) -> None:
            counted[0] += count
            told(count)

        def write(out: BinaryIO) -> None:
            self.store.download(thing, out, parts, stop, tell)

        try:
            stamp = self.stamps[number]
            cache.file(name, write, size=thing.size, stamp=stamp, limit=self.limit, stop=stop)
            told(thing.size - counted[0])
        except (SourceError, InterruptedError):
            raise
        except DiskError as error:
            raise self._no_copy(number, error.error) from error
        except OSError as error:
            raise self._no_copy(number, error) from error

    def _no_copy(self, number: int, error: OSError) -> SourceError:
        """The error of a copy that cannot be made."""
        folder = cache.place("remote").parent
        return SourceError(
            self.urls[number],
            f"cannot be copied to the cache folder {folder}: {error.strerror or error}. Free space "
            "there, set XDG_CACHE_HOME to a larger disk, raise cache_bytes=, or read samples from "
            "where they are, with remote='ranges'",
        )


class _Turns:
    """Copies that are made and soon go again: where there is no room, one waits for others.

    Attributes:
        at_work: how many there are.
        ended: how many there were.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.at_work = self.ended = 0

    def begin(self) -> int:
        """Notes that one more is at work; how many there were before."""
        with self.changed:
            self.at_work += 1
            return self.ended

    def end(self) -> None:
        """Notes that one is no more."""
        with self.changed:
            self.at_work -= 1
            self.ended += 1
            self.changed.notify_all()

    def give_up(self) -> int:
        """Notes that one could not be made; how many others are at work."""
        with self.changed:
            self.at_work -= 1
            if self.at_work == 0:  # who waits waits for nobody
                self.ended += 1
                self.changed.notify_all()
            return self.at_work

    def wait(self, ended: int) -> None:
        """Returns when one more has ended than had when this was begun."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended != ended)


_turns = _Turns()

_ranged: weakref.WeakValueDictionary[str, Copies] = weakref.WeakValueDictionary()
"""By their paths, whose copies need not be there."""


def ranged(path: str) -> Copies | None:
    """Whose copy is at ``path``, if it need not be there."""
    return _ranged.get(path)


@contextmanager
def at_hand(path: str) -> Iterator[None]:
    """Has the file at ``path`` there, for as long as it lasts, even a copy that need not be."""
    copies = ranged(path)
    with nullcontext() if copies is None else copies.made(path):
        yield


def _raise_first(jobs: Sequence[Future[None]]) -> None:
    """Waits for ``jobs``; raises what one of them did, rather than what others gave up for."""
    given_up: BaseException | None = None
    for job in jobs:
        error = job.exception()
        if isinstance(error, GivenUpError | InterruptedError):
            given_up = error
        elif error is not None:
            raise error
    if given_up is not None:
        raise given_up


def _show_progress(jobs: Sequence[Future[None]], total: int, done: Sequence[int]) -> None:
    """Waits for ``jobs`` or the first that fails; on a terminal, shows bytes once that is long."""
    pending = wait_for(jobs, _UNSEEN_SECONDS, "FIRST_EXCEPTION")
    if not pending.not_done or not sys.stderr.isatty():
        wait_for(jobs, None, "FIRST_EXCEPTION")
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("Copying shards"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        while pending.not_done and not any(job.done() and job.exception() for job in jobs):
            pending = wait_for(pending.not_done, 0.2, "FIRST_EXCEPTION")
            progress.update(task, completed=done[0])
