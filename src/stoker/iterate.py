"""How an epoch is walked: its batches, how far they were handed out, and who makes them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate
from torch.utils.data._utils import pin_memory

from stoker.bad_samples import BadSample, BadSamples
from stoker.draws import Draw, generators_kept, seed_generators
from stoker.engine import Failure
from stoker.errors import DecodeError
from stoker.feed import Feed, Job
from stoker.keyed import KeyedDataset, Reporting
from stoker.order import Order, Share


@dataclass(frozen=True)
class OrderedBatches:
    """This rank's batches of one epoch of our own order: arithmetic, so any can be walked ahead.

    Args:
        share: which positions.
        marked: each batch gains ``valid``, which is False for samples that only fill it.
    """

    order: Order
    epoch: int
    share: Share
    marked: bool = False

    def __iter__(self) -> Iterator[Draw]:
        for step in range(self.share.steps):
            positions, _ = self.share.positions(step)
            indices, draws = self.order.drawn(self.epoch, positions)
            yield Draw(self.order.seed, self.epoch, positions, indices, draws, self.order, step)

    def next_epoch(self) -> OrderedBatches:
        """Those of the epoch after this one."""
        return replace(self, epoch=self.epoch + 1, share=replace(self.share, start=0))

    def with_valid(self, batch: Any, step: int, pinned: bool) -> Any:
        """``batch`` and, where that is wanted, which of its samples are not fillers."""
        if not self.marked:
            return batch
        valid = torch.from_numpy(self.share.positions(step)[1])
        valid = valid.pin_memory() if pinned else valid
        if isinstance(batch, Mapping):
            if "valid" in batch:
                raise ValueError("uneven='exact' adds a key 'valid', which the batch has already")
            with_key = copy.copy(batch)
            cast(Any, with_key)["valid"] = valid
            return with_key
        return (*batch, valid) if isinstance(batch, tuple) else [*_listed(batch), valid]


def _listed(batch: Any) -> list[Any]:
    return batch if isinstance(batch, list) else [batch]


@dataclass(frozen=True)
class ForeignBatches:
    """The batches that a user's sampler or batch sampler makes, asked one by one as torch asks.

    Args:
        sampler: yields lists of indices, or single indices where the loader does not batch.
        repeats: an index may come twice in an epoch, so the position tells its draws apart.
        skip: so many batches were handed out before.
    """

    sampler: Iterable[Any]
    seed: int
    epoch: int
    repeats: bool
    skip: int = 0

    def __iter__(self) -> Iterator[Draw]:
        position = 0
        for number, batch in enumerate(self.sampler):
            # A copy: a bad sample's index is replaced, and the user's array must stay as it is.
            indices = _integers(batch).astype(np.int64)
            positions = position + np.arange(len(indices))
            position += len(indices)
            if number >= self.skip:
                draws = positions & 0xFFFFFFFF if self.repeats else 0
                step = number - self.skip
                yield Draw(self.seed, self.epoch, positions, indices, draws, step=step)

    def with_valid(self, batch: Any, step: int, pinned: bool) -> Any:
        """``batch``: nobody knows of a user's sampler what fills it."""
        return batch


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


@dataclass
class Progress:
    """How far an iteration has come.

    Attributes:
        batches: what it walks.
        in_order: batches are handed out in order, so those before one that was are done.
        steps: so many batches were handed out.
        beyond: steps that were handed out after one that was not.
        ended: the loop has been told that there are no more.
    """

    batches: Batches
    in_order: bool
    steps: int = 0
    beyond: set[int] = field(default_factory=set)
    ended: bool = False

    def handed(self, step: int) -> None:
        """Takes note that a batch was handed out."""
        if self.in_order:
            self.steps = step + 1
            return
        self.beyond.add(step)
        while self.steps in self.beyond:
            self.beyond.remove(self.steps)
            self.steps += 1


class Handing:
    """The iterator that a user's loop sees: hands over what another makes, and counts it.

    Args:
        source: yields the step of each batch, and the batch.
        progress: where it is counted.
        pinned: batches are in page-locked memory.
        instead: asked once, before the first batch, for an iterator to hand over from instead.
    """

    def __init__(
        self,
        source: Iterator[tuple[int, Any]],
        progress: Progress,
        pinned: bool,
        instead: Callable[[Progress], Handing | None] | None,
    ) -> None:
        self.source, self._progress, self._pinned = source, progress, pinned
        self._instead = instead

    def __iter__(self) -> Handing:
        return self

    def __next__(self) -> Any:
        instead, self._instead = self._instead, None
        if instead is not None and (other := instead(self._progress)) is not None:
            self.source, self._progress = other.source, other._progress
        try:
            step, batch = next(self.source)
        except StopIteration:
            self._progress.ended = True
            raise
        batch = self._progress.batches.with_valid(batch, step, self._pinned)
        self._progress.handed(step)
        return batch


@dataclass
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
    """One epoch from the native engine: steps and batches.

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
        self._draws = feed.ahead(iter(batches))
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

    def __next__(self) -> tuple[int, Any]:
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
                return job.draw.step, self._as_the_dataset_does(job.draw)
            for failure in failures:
                self._deal_with(job, failure, self.feed.error(job, failure))
        finally:
            if failures:
                self.feed.fallback.forget(job.batch)
        return job.draw.step, [job.slot.images, self.feed.labels(job)]

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
            BadSample(
                error.index, error.location, error.reason, draw.epoch, int(draw.positions[place])
            )
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
            _, reports, ended, batch = Reporting(default_collate, keyed)(samples)
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
    """One epoch from torch's machinery under keyed seeds: steps and batches.

    Args:
        source: yields what `Reporting` collates.
        report: index, position and reason of a bad sample to the loader's list.
    """

    def __init__(self, source: Iterator[Any], report: Callable[[int, int, str], None]) -> None:
        self._source, self._report = source, report

    def __iter__(self) -> KeyedIterator:
        return self

    def __next__(self) -> tuple[int, Any]:
        step, reports, error, batch = next(self._source)
        for report in reports:
            self._report(*report)
        if error is not None:
            try:
                raise error
            finally:
                error = None  # no cycle of exception and frame, which would keep the workers
        return step, batch


def _page_locked(batch: Any) -> Any:
    return pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call] # torch's own


Fetch = Callable[[Any], Any]


class OnCallingThread:
    """What torch's loader does with ``num_workers=0``; the caller's generators stay as they are.

    Args:
        keyed: the dataset.
        draws: its batches.
        collate: makes a batch of samples.
        batched: False where each draw is a single sample.
        pin: give page-locked memory.
        record: makes the batch of a draw with the function that fetches it, and page-locks it.
    """

    def __init__(
        self,
        keyed: KeyedDataset,
        draws: Iterable[Draw],
        collate: Reporting,
        batched: bool,
        pin: bool,
        record: Callable[[Fetch, Draw], Any] | None = None,
    ) -> None:
        self._fetched = keyed.__getitems__ if batched else keyed.__getitem__
        self._draws, self._collate, self._pin, self._record = iter(draws), collate, pin, record

    def __iter__(self) -> OnCallingThread:
        return self

    def __next__(self) -> Any:
        draw = next(self._draws)
        with generators_kept():
            if self._record is not None:
                return self._record(self._fetch, draw)
            batch = self._fetch(draw)
        return _page_locked(batch) if self._pin else batch

    def _fetch(self, draw: Draw) -> Any:
        return self._collate(self._fetched(draw))
