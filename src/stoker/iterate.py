"""How an epoch is walked: its batches, and the iterators that a user's loop sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate
from torch.utils.data._utils import pin_memory

from stoker.bad_samples import BadSample, BadSamples
from stoker.draws import Draw, generators_kept, seed_generators
from stoker.engine import Failure
from stoker.errors import DecodeError
from stoker.feed import Feed, Job
from stoker.keyed import KeyedDataset, Reporting
from stoker.order import Order


@dataclass(frozen=True)
class OrderedBatches:
    """The batches of one epoch of our own order: arithmetic, so any can be walked ahead of time.

    Args:
        batch_size: samples per batch.
        drop_last: leave out the last batch where it isn't full.
    """

    order: Order
    epoch: int
    batch_size: int
    drop_last: bool

    def __iter__(self) -> Iterator[Draw]:
        samples = self.order.samples
        end = samples - samples % self.batch_size if self.drop_last else samples
        for start in range(0, end, self.batch_size):
            indices = self.order.indices(self.epoch, start, min(start + self.batch_size, end))
            yield Draw(self.order.seed, self.epoch, start, indices, order=self.order)


@dataclass(frozen=True)
class ForeignBatches:
    """The batches that a user's sampler or batch sampler makes, asked one by one as torch asks.

    Args:
        sampler: yields lists of indices, or single indices where the loader does not batch.
        repeats: an index may come twice in an epoch, so the position tells its draws apart.
    """

    sampler: Iterable[Any]
    seed: int
    epoch: int
    repeats: bool

    def __iter__(self) -> Iterator[Draw]:
        position = 0
        for batch in self.sampler:
            # A copy: a bad sample's index is replaced, and the user's array must stay as it is.
            indices = _integers(batch).astype(np.int64)
            draws = (position + np.arange(len(indices))) & 0xFFFFFFFF if self.repeats else 0
            yield Draw(self.seed, self.epoch, position, indices, draws)
            position += len(indices)


def _integers(batch: Any) -> NDArray[Any]:
    """What a user's sampler gave for a batch, shape (n,); keys are made from integers alone."""
    try:
        found = np.atleast_1d(np.asarray(batch))
    except ValueError:  # tuples of several lengths
        found = np.empty((0, 0))
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iub"):
        raise TypeError(
            f"the sampler gave {batch!r}: keyed randomness needs integer indices; "
            "randomness='torch' takes any"
        )
    return found


Batches = OrderedBatches | ForeignBatches


class Draws:
    """What torch's loader takes for its batch sampler: the `Draw`s of whatever epoch is set."""

    batches: Batches

    def __iter__(self) -> Iterator[Draw]:
        return iter(self.batches)


@dataclass(frozen=True)
class Policy:
    """What a loader's iterators do about bad samples and slow ones."""

    on_error: str
    bad_samples: BadSamples
    timeout: float
    dataset: Any
    blank: Callable[[int], Any] | None = None


class LoweredIterator:
    """One epoch from the native engine.

    Args:
        feed: the loader's engine.
        batches: this epoch's batches.
        then: the next epoch's, prepared while this one's last are consumed; None prepares nothing.
        ahead: where the iterator of the next epoch is put.
    """

    def __init__(
        self,
        feed: Feed,
        batches: Batches,
        policy: Policy,
        then: OrderedBatches | None = None,
        ahead: list[LoweredIterator] | None = None,
    ) -> None:
        self.feed, self.batches, self.policy = feed, batches, policy
        self._then, self._ahead = then, ahead
        self._draws: Iterator[Draw] = iter(batches)
        self._jobs: deque[Job] = deque()
        self._next: LoweredIterator | None = None
        self._error: Exception | None = None

    def __iter__(self) -> LoweredIterator:
        return self

    def resume(
        self, policy: Policy, then: OrderedBatches | None, ahead: list[LoweredIterator]
    ) -> LoweredIterator:
        """This iterator, prepared during the epoch before, as that of the epoch that begins."""
        self.policy, self._then, self._ahead = policy, then, ahead
        return self

    def _start(self, room: int) -> None:
        """Submits batches until ``room`` are on their way, then those of the next epoch.

        An error of the sampler, or an index that the dataset has not, waits for its turn.
        """
        while len(self._jobs) < room and self._error is None:
            try:
                draw = next(self._draws, None)
                if draw is not None:
                    self._jobs.append(self.feed.submit(draw))
                    continue
            except Exception as error:  # noqa: BLE001  raised where its batch would have been
                self._error = error
                return
            if self._then is not None and self._ahead is not None and self._next is None:
                self._next = LoweredIterator(self.feed, self._then, self.policy)
                self._ahead.append(self._next)
            if self._next is not None:
                self._next._start(room - len(self._jobs))
            return

    def __next__(self) -> Any:
        self.feed.session.require_usable()
        self._start(self.feed.depth)
        if not self._jobs:
            error, self._error = self._error, None
            if error is not None:
                raise error
            self._next = self._then = None  # it belongs to the loader now, and is made once
            raise StopIteration
        job = self._jobs[0]
        failures = self.feed.finish(job, self.policy.timeout)
        self._jobs.popleft()
        if self.feed.session.threads:
            self._start(self.feed.depth)  # so many are ahead while the user works
        try:
            if any(failure.status == "bad_geometry" for failure in failures):
                return self._as_the_dataset_does(job.draw)
            for failure in failures:
                self._deal_with(job, failure, self.feed.error(job, failure))
        finally:
            if failures:
                self.feed.fallback.forget(job.batch)
        return [job.slot.images, self.feed.labels(job)]

    def _deal_with(self, job: Job, failure: Failure, error: DecodeError) -> None:
        draw, place = job.draw, failure.place
        self._report(draw, place, error)
        if self.policy.on_error == "raise":
            raise error
        if self.policy.on_error == "blank":
            assert self.policy.blank is not None
            with generators_kept():
                seed_generators(int(draw.keys()[place]))
                image, _ = self.policy.blank(error.index)
            self.feed.blank(job, failure, image)
        elif not self.feed.repair(job, failure):
            raise error

    def _report(self, draw: Draw, place: int, error: DecodeError) -> None:
        self.policy.bad_samples.report(
            BadSample(error.index, error.location, error.reason, draw.epoch, draw.position + place)
        )

    def _as_the_dataset_does(self, draw: Draw) -> Any:
        """The batch by the dataset's own code.

        For batches with a sample that the plan cannot be applied to, such as an image smaller than
        the crop, or with images of several sizes: what torchvision and torch do, or say, then.
        """
        policy = self.policy
        keyed = KeyedDataset(policy.dataset, policy.on_error, policy.blank)
        with generators_kept():
            try:
                samples = keyed.__getitems__(draw)
            except Exception as cause:
                reason = f"{type(cause).__name__}: {cause}"
                error = self.feed.decode_error(int(draw.indices[keyed.place]), reason)
                self._report(draw, keyed.place, error)
                raise error from cause
            reports, ended, batch = Reporting(default_collate, keyed)(samples)
        for index, position, reason in reports:
            location = self.feed.rows.location(index)
            policy.bad_samples.report(BadSample(index, location, reason, draw.epoch, position))
        if ended is not None:
            raise self.feed.decode_error(ended.index, ended.reason) from ended
        return _page_locked(batch) if self.feed.slots.pinned else batch

    def close(self) -> None:
        """Throws away what is in flight. Idempotent."""
        self._draws = iter(())
        self._then = None
        self.feed.cancel(self._jobs)

    def __del__(self) -> None:
        if getattr(self, "_jobs", None):
            self.close()


class KeyedIterator:
    """One epoch from torch's machinery under keyed seeds.

    Args:
        source: yields what `Reporting` collates.
        report: index, position and reason of a bad sample to the loader's list.
    """

    def __init__(self, source: Iterator[Any], report: Callable[[int, int, str], None]) -> None:
        self._source, self._report = source, report

    def __iter__(self) -> KeyedIterator:
        return self

    def __next__(self) -> Any:
        reports, error, batch = next(self._source)
        for report in reports:
            self._report(*report)
        if error is not None:
            try:
                raise error
            finally:
                error = None  # no cycle of exception and frame, which would keep the workers
        return batch


def _page_locked(batch: Any) -> Any:
    return pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call] # torch's own


Fetch = Callable[[Any], Any]


def on_calling_thread(
    keyed: KeyedDataset,
    draws: Iterable[Draw],
    collate: Reporting,
    batched: bool,
    pin: bool,
    record: Callable[[Fetch, Draw], Any] | None = None,
) -> Iterator[Any]:
    """What torch's loader does with ``num_workers=0``; the caller's generators stay as they are.

    Args:
        keyed: the dataset.
        draws: its batches.
        collate: makes a batch of samples.
        batched: False where each draw is a single sample.
        pin: give page-locked memory.
        record: makes the batch of a draw with the function that fetches it, and page-locks it.
    """

    def fetch(draw: Draw) -> Any:
        return collate(keyed.__getitems__(draw) if batched else keyed[draw])

    for draw in draws:
        with generators_kept():
            batch = fetch(draw) if record is None else record(fetch, draw)
        yield _page_locked(batch) if pin and record is None else batch
