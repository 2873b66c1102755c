"""Batches of a lowered dataset: submitted ahead, taken in order, bad samples dealt with.

Note [No feeder thread]
    The consumer's own thread submits: asking for a batch first submits the one that is `depth`
    further on, then waits for its own. Index arithmetic for a batch takes some 0.2 ms; decoding
    runs in native threads meanwhile. So nothing of Python runs beside the user's code.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from stoker.draws import TRIES, Draw
from stoker.engine import Batch, Failure, Session, image_size, native_files, result_size
from stoker.errors import DecodeError
from stoker.fallback import Decode, Fallback
from stoker.plan import Plan, Size
from stoker.ranges import Batch as Fetched
from stoker.ranges import Contents, Ranges
from stoker.slots import Slot, Slots
from stoker.sources.dataset import Rows
from stoker.sources.index import Files

if TYPE_CHECKING:
    from stoker import _native


@dataclass
class Job:
    """A batch on its way.

    Attributes:
        served: the indices whose images are in the slot; not those of `draw` where a bad sample was
            replaced.
    """

    draw: Draw
    served: NDArray[np.int64]
    slot: Slot
    batch: Batch
    size: Size


class Feed:
    """One loader's engine: plan, rows, threads, memory.

    Args:
        plan: what to do to a sample.
        rows: which samples there are.
        threads: native threads; 0 runs everything on the calling thread.
        depth: batches ahead.
        pinned: hand out page-locked memory.
    """

    def __init__(
        self,
        plan: Plan,
        rows: Rows,
        threads: int,
        depth: int,
        pinned: bool,
    ) -> None:
        self.plan, self.rows, self.depth = plan, rows, depth if threads else 1
        self.slots = Slots(plan.tail.dtype, plan.tail.channels, keep=self.depth + 2, pinned=pinned)
        self._most_pixels = _most_pixels(files := rows.files)
        paths, extents = files.paths()
        self._files = native_files(
            paths.root,
            paths.names,
            paths.offsets,
            files.max_bytes,
            self._most_pixels,
            files.upright,
            extents=extents,
        )
        self.session = Session(threads)
        self._fetched: dict[int, Fetched] = {}
        self.fallback = Fallback(self.session, _decoder(rows, self._fetched))
        copies = None if files.extents is None else files.extents.copies
        self._ranges = Ranges(rows) if copies is not None and copies.ranged else None
        self._finalizer = weakref.finalize(self, _close, self.session, self.fallback, self._ranges)

    def fits(self, plan: Plan, rows: Rows, threads: int, depth: int, pinned: bool) -> bool:
        """True where this feed can serve on: it is what these would make, and not closed."""
        return (
            self.session.usable
            and (self.session.threads, self.slots.pinned) == (threads, pinned)
            and self.depth == (depth if threads else 1)
            and self.plan == plan
            and self._most_pixels == _most_pixels(rows.files)
            and self.rows.same_as(rows)
        )

    def ahead(self, draws: Iterator[Draw]) -> Iterator[Draw]:
        """``draws``, which are to be submitted; samples that are read by ranges are read early."""
        return draws if self._ranges is None else self._ranges.ahead(draws)

    def submit(self, draw: Draw, size: Size | None = None) -> Job:
        """Starts a batch; if no ``size`` is given, all must come out in that of the first image.

        Raises:
            SourceError: a remote shard cannot be read.
        """
        rows, keys = self.rows.rows_of(draw.indices), draw.keys()
        files, places, fetched = self._files, rows, None
        if self._ranges is not None:
            fetched = self._ranges.take(draw)
            files, places = self._in_memory(fetched.wait()), np.arange(len(rows), dtype=np.int64)
        size = size or self.plan.output_size or self._first_size(files, places, rows, keys)
        try:
            slot = self.slots.take(len(rows), size)
        except MemoryError:
            if self.plan.output_size is not None:
                raise
            # A broken header may claim any size. No image fits this one, so that the dataset's own
            # code comes to tell which it was.
            size = 1, 1
            slot = self.slots.take(len(rows), size)
        batch = self.session.drawn(self.plan, files, places, keys, slot.memory, size)
        if fetched is not None:  # before a thread may decline one of its samples
            self._fetched[id(batch.native)] = fetched
        self.session.start(batch)
        return Job(draw, draw.indices, slot, batch, size)

    def _in_memory(self, contents: Contents) -> _native.Files:
        """The native view of samples whose bytes are in memory."""
        files, count = self.rows.files, len(contents[1])
        return native_files(
            "",
            np.zeros(0, np.uint8),
            np.zeros(count, np.uint64),
            files.max_bytes,
            self._most_pixels,
            files.upright,
            contents=contents,
        )

    def _first_size(
        self,
        files: _native.Files,
        places: NDArray[np.int64],
        rows: NDArray[np.int64],
        keys: NDArray[np.uint32],
    ) -> Size:
        """(height, width) of the result of the first sample whose header can be read."""
        numbers = zip(places.tolist(), rows.tolist(), keys.tolist(), strict=True)
        for place, row, key in numbers:
            image = image_size(files, place)
            try:
                image = image or self.rows.files.size(row)
            except Exception:  # noqa: BLE001  a broken file: its turn comes when it is decoded
                continue
            if size := result_size(self.plan, image, key):
                return size
        return 1, 1  # no sample will succeed

    def finish(self, job: Job, timeout: float) -> list[Failure]:
        """Waits for a batch; returns the samples that failed.

        Raises:
            RuntimeError: ``timeout`` seconds (0: no limit) have passed, as torch's loader does; or
                the loader was closed meanwhile.
        """
        if self.session.threads == 0:
            while self.fallback.serve_one(0.0):
                pass
            self._fetched.pop(id(job.batch.native), None)
            return job.batch.failures()
        deadline = time.monotonic() + timeout if timeout else float("inf")
        while not self.session.wait(job.batch, 1.0, watch=not self.fallback.started):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"DataLoader timed out after {timeout} seconds")
            if not self.fallback.started and self.session.declines():
                self.fallback.start()
        self._fetched.pop(id(job.batch.native), None)
        return job.batch.failures()

    def error(self, job: Job, failure: Failure) -> DecodeError:
        """The error of a failed sample, from Pillow's own where there is one."""
        cause: BaseException | None = self.fallback.error(job.batch, failure.place)
        index = int(job.draw.indices[failure.place])
        if isinstance(cause, DecodeError):
            error, cause = self.decode_error(index, cause.reason), cause.__cause__
        else:
            error = self.decode_error(index, str(cause) if cause else failure.reason)
        error.__cause__ = cause
        return error

    def decode_error(self, index: int, reason: str) -> DecodeError:
        """The error of sample ``index``, with its path."""
        return DecodeError(index, self.rows.location(index), reason)

    def repair(self, job: Job, failure: Failure) -> bool:
        """Puts the next good sample at the place of a failed one; False after `TRIES`."""
        for k in range(1, TRIES + 1):
            after = job.draw.after(failure.place, k)
            if after is None:
                return False
            index, draw = after
            alone = np.array([index])
            one = Draw(job.draw.seed, job.draw.epoch, np.zeros_like(alone), alone, draw)
            retry = self.submit(one, job.size)
            failures = self.finish(retry, 0)
            if not failures:
                job.slot.images[failure.place].copy_(retry.slot.images[0])
                if job.served is job.draw.indices:
                    job.served = job.served.copy()
                job.served[failure.place] = index
                return True
            self.fallback.forget(retry.batch)
        return False

    def blank(self, job: Job, failure: Failure, image: Any) -> None:
        """Puts ``image``, what the transform makes of black pixels, at the place of a failed one.

        Where the size of results depends on the image, what the plan's tail makes of black.
        """
        place = job.slot.images[failure.place]
        if image.shape == place.shape:
            place.copy_(image)
            return
        for channel, value in enumerate(self.plan.tail.black()):
            place[channel].fill_(value)

    def labels(self, job: Job) -> torch.Tensor:
        """int64 of shape (batch,), page-locked where the images are."""
        labels = torch.from_numpy(self.rows.labels[job.served])
        return labels.pin_memory() if self.slots.pinned else labels

    def cancel(self, jobs: deque[Job]) -> None:
        """Throws batches away; returns when nothing writes to their memory any more."""
        if self.session.usable:
            batches = [job.batch for job in jobs]
            self.fallback.elsewhere(_cancel, self.session, self.fallback, batches)
        for job in jobs:
            self._fetched.pop(id(job.batch.native), None)
        jobs.clear()

    def close(self) -> None:
        """Gives threads and memory back. Idempotent."""
        self._finalizer()


def _decoder(rows: Rows, fetched: dict[int, Fetched]) -> Decode:
    """What the fallback asks; it holds the rows, not the feed, which its threads would keep."""
    decode = rows.decode

    def of_batch(batch: object, row: int) -> NDArray[np.uint8]:
        if (memory := fetched.get(id(batch))) is None:
            return decode(row)
        return decode(int(memory.rows[row]), memory.content(row))

    return of_batch


def _most_pixels(files: Files) -> int | None:
    # Above its own limit, as it is now, Pillow warns or refuses, so it must see such files.
    limits = [limit for limit in (files.max_pixels, Image.MAX_IMAGE_PIXELS) if limit]
    return min(limits, default=None)


def _cancel(session: Session, fallback: Fallback, batches: list[Batch]) -> None:
    session.cancel(batches)
    for batch in batches:
        fallback.forget(batch)


def _close(session: Session, fallback: Fallback, ranges: Ranges | None) -> None:
    if ranges is not None:
        ranges.close()
    fallback.elsewhere(_close_here, session, fallback)


def _close_here(session: Session, fallback: Fallback) -> None:
    session.close()
    fallback.close()
