"""Samples' bytes of remote shards, read by ranges ahead of the batches that need them.

Note [Reading ahead]
    The order is known, so the draws of coming batches are taken early, and threads read their
    samples: of so many batches that what is not yet used stays within `_MOST_BYTES`, but of
    one batch at least. Samples that lie close together in a shard are read at once. The threads are
    daemons: nobody waits for a silent server when a process ends.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from stoker.copies import Copies
from stoker.draws import Draw
from stoker.sources.dataset import Rows
from stoker.sources.index import Extents, Files

_MOST_BYTES = 256 << 20
_MOST_BATCHES = 64
_GAP_BYTES = 64 << 10
_READ_BYTES = 8 << 20
_THREADS = 32

Contents = tuple[NDArray[np.uint8], NDArray[np.uint64]]
"""Bytes of samples, one after the other, and where each begins and the last ends."""


class Batch:
    """The bytes of one batch's samples, on their way.

    Attributes:
        rows: which they are.
        contents: as the native core reads them. A sample without bytes, or with more than are
            allowed, has one, which is no image: Pillow's side comes to tell what is wrong with it.
    """

    def __init__(self, files: Files, rows: NDArray[np.int64]) -> None:
        self.rows = rows
        extents = files.extents
        assert extents is not None
        lengths = extents.length[rows]
        most = files.max_bytes
        self.lacking = (lengths == 0) | (lengths > (lengths if most is None else most))
        lengths = np.where(self.lacking, 1, lengths)
        offsets = np.zeros(len(rows) + 1, np.uint64)
        np.cumsum(lengths, out=offsets[1:], dtype=np.uint64)
        self.contents: Contents = np.zeros(int(offsets[-1]), np.uint8), offsets
        self.stop = threading.Event()
        self.jobs: list[Future[None]] = []

    def content(self, place: int) -> bytes | None:
        """The bytes of the sample at a place; None where there are none or too many."""
        data, offsets = self.contents
        if self.lacking[place]:
            return None
        return data[int(offsets[place]) : int(offsets[place + 1])].tobytes()

    def wait(self) -> Contents:
        """All bytes, once they are there.

        Raises:
            SourceError: some cannot be had.
        """
        for job in self.jobs:
            job.result()
        return self.contents


class Ranges:
    """Reads the samples of a dataset whose shards are remote.

    Args:
        rows: the dataset.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads = 0
        self._begun: dict[int, tuple[Draw, Batch]] = {}
        self._finalizer = weakref.finalize(self, _end, self._tasks, self._begun)

    def ahead(self, draws: Iterator[Draw]) -> Iterator[Draw]:
        """``draws``, taken early so that their samples are being read when they are asked for."""
        waiting: deque[Draw] = deque()
        held = 0
        error: Exception | None = None
        ended = False
        try:
            while True:
                while not ended and len(waiting) < _MOST_BATCHES and held < _MOST_BYTES:
                    try:
                        draw = next(draws, None)
                        if draw is not None:
                            batch = self._begin(draw)
                    except Exception as raised:  # noqa: BLE001  raised when its turn has come
                        error, draw = raised, None
                    if draw is None:
                        ended = True
                        break
                    held += len(batch.contents[0])
                    waiting.append(draw)
                if not waiting:
                    if error is not None:
                        raise error
                    return
                draw = waiting.popleft()
                held -= len(self._begun[id(draw)][1].contents[0])
                yield draw
        finally:
            for draw in waiting:
                self.take(draw).stop.set()

    def take(self, draw: Draw) -> Batch:
        """The batch of a draw, which is being read already if it came from `ahead`."""
        if id(draw) not in self._begun:
            self._begin(draw)
        return self._begun.pop(id(draw))[1]

    def _begin(self, draw: Draw) -> Batch:
        """Starts to read the samples of a draw."""
        files = self.rows.files
        batch = Batch(files, self.rows.rows_of(draw.indices))
        extents = files.extents
        assert extents is not None
        assert extents.copies is not None
        for places in _together(extents, batch):
            task = _Task(extents, extents.copies, batch, places)
            batch.jobs.append(task.done)
            self._tasks.put(task)
        while self._threads < min(_THREADS, len(batch.jobs)):
            name = f"stoker-ranges-{self._threads}"
            threading.Thread(target=_serve, args=(self._tasks,), name=name, daemon=True).start()
            self._threads += 1
        self._begun[id(draw)] = draw, batch
        return batch

    def close(self) -> None:
        """Ends the threads, as soon as what they are at is done. Idempotent."""
        self._finalizer()


def _end(tasks: queue.SimpleQueue[_Task | None], begun: dict[int, tuple[Draw, Batch]]) -> None:
    for _, batch in begun.values():
        batch.stop.set()
    for _ in range(_THREADS):
        tasks.put(None)


def _together(extents: Extents, batch: Batch) -> Iterator[NDArray[np.int64]]:
    """Places of samples that are read at once, in the order in which they lie in their shard."""
    places = np.flatnonzero(~batch.lacking)
    rows = batch.rows[places]
    shard, begin, length = extents.shard[rows], extents.begin[rows], extents.length[rows]
    order = np.lexsort((begin, shard))
    first = 0
    end = 0
    for at, number in enumerate(order.tolist()):
        start = int(begin[order[first]])
        if at > first and (
            shard[number] != shard[order[first]]
            or begin[number] > end + _GAP_BYTES
            or begin[number] + length[number] - start > _READ_BYTES
        ):
            yield places[order[first:at]]
            first, end = at, 0
        end = max(end, int(begin[number] + length[number]))
    if len(order):
        yield places[order[first:]]


class _Task:
    """Samples that are read at once, by their places in a batch."""

    def __init__(
        self, extents: Extents, copies: Copies, batch: Batch, places: NDArray[np.int64]
    ) -> None:
        self.extents, self.copies, self.batch, self.places = extents, copies, batch, places
        self.done: Future[None] = Future()

    def run(self) -> None:
        rows = self.batch.rows[self.places]
        begins, lengths = self.extents.begin[rows], self.extents.length[rows]
        start, end = int(begins.min()), int((begins + lengths).max())
        path = self.extents.shards.path(int(self.extents.shard[rows[0]]))
        data = self.copies.read(path, start, end - start, self.batch.stop)
        contents, offsets = self.batch.contents
        numbers = zip(self.places.tolist(), begins.tolist(), lengths.tolist(), strict=True)
        for place, begin, length in numbers:
            at = int(offsets[place])
            contents[at : at + length] = np.frombuffer(data, np.uint8, length, begin - start)


def _serve(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task.run()
            task.done.set_result(None)
        except BaseException as error:  # noqa: BLE001  a thread hands over: the consumer raises it
            task.done.set_exception(error)
