"""The state of a loader that Accelerate has prepared.

Note [Prepared loaders]
    Accelerate's loader holds torch's, asks it for one batch ahead, and takes its ``state_dict``, if
    it has one, before it does. So torch's loader gets ``state_dict`` and ``load_state_dict`` here,
    and what is taken counts what the user has been handed. Accelerate counts epochs in
    ``iteration``, by which it also sets the sampler's. To go on in mid-epoch, so many batches of
    the batch sampler are passed over, of which no sample is read.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, RandomSampler

from stoker.epochs import Identity
from stoker.errors import StokerWarning
from stoker.samplers import Ordered, ShardedSampler, rank_and_world
from stoker.state import State, from_dict


class Prepared:
    """The epochs of torch's loader inside of one that Accelerate has prepared.

    Args:
        wrapper: Accelerate's ``DataLoaderShard``.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper, self._inner = wrapper, wrapper.base_dataloader
        self._identity = Identity().of(self._inner.dataset)  # once: the state is for each batch
        self._resumed: State | None = None
        # What Accelerate's own skip_first_batches leaves out of every epoch.
        self._without = getattr(self._inner.batch_sampler, "skip_batches", 0)
        self._skipped = self._without
        self._iterator: Callable[[], Any] = _nothing
        self._inner.state_dict = self.state_dict
        self._inner.load_state_dict = self.load_state_dict
        wrapper.dl_state_dict = self.state_dict()
        if isinstance(getattr(self._batcher, "sampler", None), ShardedSampler):
            warnings.warn(
                "shard=True: Accelerate shards what it prepares, so each rank gets a part of its "
                "share; leave shard out",
                StokerWarning,
                stacklevel=4,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_iterator": _nothing}

    def __getattr__(self, name: str) -> Any:
        """What torch's iterator reads of its loader."""
        if name in ("_inner", "__setstate__"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def _index_sampler(self) -> Prepared:
        return self

    def __iter__(self) -> Iterator[Any]:
        """The batches of indices of the epoch that begins, from where a state was.

        A generator: torch makes two at once, and asks one.
        """
        resumed, self._resumed = self._resumed, None
        batches: Iterator[Any] = iter(self._inner._index_sampler)
        self._skipped = self._without
        if resumed is not None and resumed.epoch == self._wrapper.iteration:
            while self._skipped < (resumed.batches or 0) and next(batches, None) is not None:
                self._skipped += 1
        yield from batches

    def __len__(self) -> int:
        return len(self._inner._index_sampler)

    def watch(self, iterator: Any) -> Any:
        """Counts what ``iterator`` hands out."""
        self._iterator = weakref.ref(iterator)
        return iterator

    @property
    def _batcher(self) -> Any:
        """The batch sampler that Accelerate has wrapped."""
        found = self._inner.batch_sampler
        while hasattr(found, "batch_sampler"):
            found = found.batch_sampler
        return found

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iteration is; at its last batch, the next one's beginning."""
        return self._state().as_dict()

    def _state(self) -> State:
        iterator, resumed = self._iterator(), self._resumed
        sampler = getattr(self._batcher, "sampler", None)
        epoch, batches = self._wrapper.iteration, self._without
        if resumed is not None:
            epoch, batches = resumed.epoch, resumed.batches or 0
        elif iterator is not None and self._wrapper.end_of_dataloader:
            epoch, batches = epoch + 1, 0
        elif iterator is not None:
            batches = self._skipped + iterator._num_yielded
        rule = sampler.order.rule if isinstance(sampler, Ordered) else None
        return State(
            epoch,
            None,
            sampler.seed if isinstance(sampler, Ordered) else 0,
            None,
            None,
            *self._identity,
            batches,
            getattr(self._batcher, "batch_size", None),
            rank_and_world()[1],
            order=None if rule is None else rule.name,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next iteration go on where ``state_dict`` was.

        Raises:
            ResumeError: it is the state of other data, batches or numbers of processes.
        """
        state = from_dict(state_dict)
        sampler: Any = getattr(self._batcher, "sampler", None)
        state.require_same(self._state(), getattr(sampler, "seed_given", False))
        if hasattr(sampler, "take_over"):
            sampler.take_over(state.seed)
        if state.batches and type(sampler) is RandomSampler:
            warnings.warn(
                "RandomSampler draws another order from torch's generator: prepare a "
                "stoker.DataLoader, or set use_seedable_sampler=True",
                StokerWarning,
                stacklevel=3,
            )
        self._resumed, self._wrapper.iteration = state, state.epoch
        self._wrapper.dl_state_dict = state.as_dict()


def _nothing() -> None:
    return None


def prepare(loader: Any) -> Prepared | None:
    """Gives a loader that Accelerate has prepared for this process its state; None for others."""
    inner: Any = vars(loader).get("base_dataloader")
    if type(loader).__name__ != "DataLoaderShard" or hasattr(inner, "state_dict"):
        return None  # torchdata's has one
    return None if isinstance(inner.dataset, IterableDataset) else Prepared(loader)
