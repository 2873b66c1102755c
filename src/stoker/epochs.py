"""Which epoch an iteration is, where in it it begins, and how far the newest one has come."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from stoker.errors import StokerWarning
from stoker.iterate import Batches, ForeignBatches, OrderedBatches, Progress
from stoker.order import Order, Share
from stoker.plan import Refusal
from stoker.samplers import (
    Ordered,
    OrderedRandomSampler,
    OrderedSequentialSampler,
    ShardedSampler,
    draw_seed,
    rank_and_world,
)
from stoker.sources.dataset import Rows, rows_of
from stoker.state import State


class Identity:
    """What tells a dataset from others, hashed once as long as it does not change."""

    def __init__(self) -> None:
        self._hashed: tuple[Rows, str] | None = None

    def of(self, dataset: Any) -> tuple[int | None, str | None]:
        """How many samples there are, and the hash of their names and labels, None if unknown."""
        samples = len(dataset) if hasattr(dataset, "__len__") else None
        rows = rows_of(dataset)
        if isinstance(rows, Refusal):
            return samples, None
        if self._hashed is None or not self._hashed[0].same_as(rows):
            self._hashed = rows, rows.fingerprint()
        return samples, self._hashed[1]

    def __getstate__(self) -> dict[str, Any]:
        return {"_hashed": None}


class Epochs:
    """The epochs of one loader, whoever makes their order.

    Args:
        sampler: the loader's.
        batch_sampler: the loader's; None where it does not batch.
        seed: the loader's; None draws that of a user's sampler's keys from ``generator``.
        generator: None for torch's default one.

    Attributes:
        sampler: what decides the order; beside a given batch sampler, the loader's is a dummy.
        progress: of the iteration that was begun last.
    """

    def __init__(
        self,
        sampler: Any,
        batch_sampler: Any,
        seed: int | None,
        generator: torch.Generator | None,
    ) -> None:
        self.sampler: Any = getattr(batch_sampler, "sampler", sampler)
        self.batch_sampler = batch_sampler
        self.progress: Progress | None = None
        self._index_sampler: Iterable[Any] = sampler if batch_sampler is None else batch_sampler
        self._seed, self._seed_given, self._generator = seed, seed is not None, generator
        self._epoch, self._told = 0, True
        self._epoch_there: int | None = None
        self._epoch_begun: int | None = None
        self._resumed: State | None = None
        self._warned = False
        self._identity = Identity()

    @property
    def own(self) -> Ordered | None:
        """The sampler, where it yields our order."""
        return self.sampler if isinstance(self.sampler, Ordered) else None

    @property
    def seed(self) -> int:
        """Of order and keys; reading it draws one where none was given."""
        if self.own is not None:
            return self.own.seed
        if self._seed is None:
            self._seed = draw_seed(self._generator)
        return self._seed

    # Which epoch

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration is; without it each iteration is one further."""
        self._epoch, self._told = epoch, True
        for sampler in (self.sampler, self.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        self._epoch_there = getattr(self.sampler, "epoch", None)

    def _told_by_sampler(self) -> bool:
        """True where somebody has set the epoch of a user's sampler, which knows better than us."""
        there = getattr(self.sampler, "epoch", None)
        return isinstance(there, int) and there != self._epoch_there

    def _next(self) -> tuple[int, bool]:
        """The epoch of the next iteration, and whether somebody has said so."""
        if self.own is not None:
            return self.own.next_epoch(), self.own.told
        if self._told_by_sampler():
            return int(self.sampler.epoch), True
        return self._epoch, self._told

    def told_other(self) -> bool:
        """True where another epoch was set than that of the newest iteration, after it began."""
        epoch, told = self._next()
        return told and self.progress is not None and epoch != self.progress.batches.epoch

    def begin(self, in_order: bool) -> Progress:
        """Begins the next epoch, or goes on with the one that a state was in.

        Args:
            in_order: its batches will be handed out in order.
        """
        epoch, _ = self._next()
        self._warn_if_repeated(epoch)
        if self.own is not None:
            self.own.begin_epoch()
        self._epoch, self._told = epoch + 1, False
        self._epoch_there = self._epoch_begun = getattr(self.sampler, "epoch", None)
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.epoch != epoch:
            _warn_of_the_rest(resumed, epoch)
            resumed = None
        batches = self._batches(epoch, resumed)
        self.progress = Progress(batches, in_order)
        return self.progress

    def nothing_left(self) -> bool:
        """True where the newest iteration goes on at the end of its epoch."""
        assert self.progress is not None
        batches = self.progress.batches
        if isinstance(batches, OrderedBatches):
            return 0 < batches.share.start == batches.share.samples
        try:
            return 0 < batches.skip >= len(batches.sampler)  # type: ignore[arg-type]
        except TypeError:  # it has no length: asking it for more is as good
            return False

    def _batches(self, epoch: int, resumed: State | None) -> Batches:
        own, batcher = self.own, self.batch_sampler
        exact = isinstance(own, ShardedSampler) and own.uneven == "exact"
        if own is not None and type(batcher) in (BatchSampler, type(None)):
            start = 0 if resumed is None else resumed.position or 0
            share = own.share() if isinstance(own, ShardedSampler) else Share(own.order.samples)
            if batcher is not None:
                size, drop = batcher.batch_size, batcher.drop_last
                share = replace(share, batch_size=size, drop_last=drop)
            return OrderedBatches(own.order, epoch, replace(share, start=start), exact)
        if exact:
            raise ValueError(
                f"uneven='exact' and the batch sampler {type(batcher).__qualname__}: nobody knows "
                "which of its samples only fill a batch; give a batch_size instead"
            )
        skip = 0 if resumed is None else resumed.batches or 0
        return ForeignBatches(self._index_sampler, self.seed, epoch, not self._serves_once(), skip)

    def _serves_once(self) -> bool:
        """True where the sampler is known to give each index at most once in an epoch."""
        sampler = self.sampler
        if type(self.batch_sampler) not in (BatchSampler, type(None)):
            return False
        if type(sampler) in (RandomSampler, OrderedRandomSampler):
            return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
        return type(sampler) in (SequentialSampler, OrderedSequentialSampler)

    def _warn_if_repeated(self, epoch: int) -> None:
        before = self.progress
        if self._warned or before is None or not before.ended:
            return
        if self.own is not None:
            same = before.batches.epoch == epoch and self.own.order.shuffle
        else:
            same = getattr(self.sampler, "shuffle", False) and hasattr(self.sampler, "set_epoch")
            same = same and getattr(self.sampler, "epoch", None) == self._epoch_begun
        if same:
            self._warned = True
            warnings.warn(
                f"the order of the epoch before comes again: {type(self.sampler).__qualname__} is "
                "still in the same epoch; call loader.set_epoch(epoch) with each epoch's number",
                StokerWarning,
                stacklevel=4,
            )

    # The state

    def state(self, dataset: Any) -> State:
        """Where the iteration that was begun last is; the next one's beginning where it has ended.

        Args:
            dataset: the loader's.
        """
        samples, source = self._identity.of(dataset)
        progress, own = self.progress, self.own
        epoch, told = self._next()
        position = batches = 0
        if self._resumed is not None and (not told or epoch == self._resumed.epoch):
            epoch = self._resumed.epoch
            position, batches = self._resumed.position or 0, self._resumed.batches or 0
        elif progress is not None and not progress.ended and not self.told_other():
            epoch = progress.batches.epoch
            if isinstance(progress.batches, OrderedBatches):
                position = progress.batches.share.after(progress.steps)
            else:
                batches = progress.batches.skip + progress.steps
            if progress.beyond:
                warnings.warn(
                    f"in_order=False: {len(progress.beyond)} batches were handed out after one "
                    "that was not; they come again when this state is resumed",
                    StokerWarning,
                    stacklevel=3,
                )
        if own is not None:
            samples, source = own.order.samples, _without(own.order, source)
        if own is not None and type(self.batch_sampler) in (BatchSampler, type(None)):
            uneven = own.uneven if isinstance(own, ShardedSampler) else None
            shuffle, rule = own.order.shuffle, own.order.rule
            name = None if rule is None else rule.name
            return State(epoch, position, self.seed, shuffle, uneven, samples, source, order=name)
        there = getattr(self.sampler, "epoch", None)
        return State(
            epoch,
            None,
            self.seed,
            None,
            None,
            samples,
            source,
            batches,
            getattr(self.batch_sampler, "batch_size", None),
            rank_and_world()[1],
            there if isinstance(there, int) else None,
            None if own is None or own.order.rule is None else own.order.rule.name,
        )

    def load(self, state: State, dataset: Any) -> None:
        """Makes the next iteration go on where ``state`` was.

        Raises:
            ResumeError: it is not one of a loader like this.
        """
        own = self.own
        given = self._seed_given if own is None else getattr(own, "seed_given", True)
        state.require_same(self.state(dataset), given)
        if own is None:
            self._seed = state.seed
        elif not isinstance(own, ShardedSampler):
            own.take_over(state.seed)
        self.progress = None
        self.set_epoch(state.epoch)
        if state.sampler_epoch not in (None, state.epoch) and own is None:
            self.sampler.set_epoch(state.sampler_epoch)
            self._epoch_there = state.sampler_epoch
        self._resumed = state


def _without(order: Order, source: str | None) -> str | None:
    """The hash of what is left where samples are excluded from the order."""
    if order.gaps is None:
        return source
    left_out = hashlib.blake2b((source or "").encode(), digest_size=16)
    left_out.update(order.gaps.astype("<i8").data)
    return left_out.hexdigest()


def _warn_of_the_rest(resumed: State, epoch: int) -> None:
    left = (resumed.samples or 0) - (resumed.position or 0)
    if resumed.batches or (resumed.position and left):
        rest = "the rest" if resumed.position is None else f"{left} samples"
        warnings.warn(
            f"epoch {epoch} begins, and {rest} of epoch {resumed.epoch}, which the state was in, "
            "will not be served: call set_epoch with the state's epoch to go on there",
            StokerWarning,
            stacklevel=4,
        )
