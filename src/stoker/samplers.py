"""Samplers that yield an order, of the classes by which frameworks tell shuffling from not.

A framework that finds one in ``loader.sampler`` sees a ``RandomSampler``, ``SequentialSampler`` or
``DistributedSampler``, may iterate it, wrap it, pickle it or pass it to another loader. Iterating
does not advance the epoch: a loader calls ``begin_epoch`` at each of its iterations, anyone else
``set_epoch``; until then every iteration gives the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from stoker import machine
from stoker.order import Order, Rule, Share
from stoker.sampling import Sampling

_BLOCK = 4096


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed in [0, 2**63) from ``generator``, or from torch's default one."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def rank_and_world() -> tuple[int, int]:
    """This rank, and how many there are: by torch's process group, else by RANK and WORLD_SIZE.

    Raises:
        ValueError: the rank is not below the number of ranks.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return machine.rank_and_world()


def _blocks(order: Order, epoch: int) -> Iterator[int]:
    """The whole order of ``epoch`` as Python integers, a few thousand at a time."""
    for start in range(0, order.samples, _BLOCK):
        yield from order.indices(epoch, start, min(start + _BLOCK, order.samples)).tolist()


class _Epoch:
    """Which epoch a sampler is in, and what it takes from which data.

    Attributes:
        epoch: what an iteration yields.
    """

    epoch = 0
    told = True
    """The epoch was set, and no iteration of it has begun."""
    data_source: Sized
    _sampling: Sampling | None = None
    _excluded: NDArray[np.int64] | None = None
    _gaps: NDArray[np.int64] | None = None
    _made: tuple[int, Rule] | None = None

    def _take(self, sampling: Sampling | None, excluded: NDArray[np.int64] | None) -> None:
        """Sets by which description to go, and takes ascending indices out; see `Order.gaps`."""
        self._sampling = sampling
        if excluded is not None and len(excluded):
            self._excluded, self._gaps = excluded, excluded - np.arange(len(excluded))

    def _rule(self) -> Rule | None:
        """What the description says of the data; anew where there are more."""
        samples = len(self.data_source)
        if self._sampling is not None and (self._made is None or self._made[0] != samples):
            self._made = samples, self._sampling.rule(self.data_source, self._excluded)
        return None if self._made is None else self._made[1]

    def _positions(self) -> int:
        """How many positions an epoch has."""
        if (rule := self._rule()) is not None:
            return rule.samples
        return len(self.data_source) - (0 if self._gaps is None else len(self._gaps))

    def _order(self, seed: int, shuffle: bool) -> Order:
        return Order(self._positions(), seed, shuffle, self._gaps, self._rule())

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch an iteration yields from now on."""
        self.epoch, self.told = epoch, True

    def next_epoch(self) -> int:
        """The epoch that `begin_epoch` will give."""
        return self.epoch if self.told else self.epoch + 1

    def begin_epoch(self) -> int:
        """The epoch that was set, once; then the one after the last."""
        self.epoch = self.next_epoch()
        self.told = False
        return self.epoch


class _Seeded(_Epoch):
    """A sampler whose seed is drawn when it is first needed, unless it was given."""

    generator: Any
    _seed: int | None
    seed_given: bool

    @property
    def seed(self) -> int:
        """The seed of order and keys; reading it draws one where none was given."""
        if self._seed is None:
            self._seed = draw_seed(self.generator)
        return self._seed

    def take_over(self, seed: int) -> None:
        """Makes ``seed`` the one that was drawn."""
        self._seed = seed


class OrderedRandomSampler(_Seeded, RandomSampler):
    """Yields each index once per epoch, shuffled by ``Order``.

    Args:
        data_source: what is sampled; its length is asked anew for each epoch.
        seed: of the order; None draws it from ``generator`` when it is first needed.
        generator: as torch's RandomSampler has it; used for the seed and for nothing else.
        excluded: ascending indices that are left out, int64.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        excluded: NDArray[np.int64] | None = None,
    ) -> None:
        self._take(None, excluded)
        super().__init__(data_source, generator=generator)
        self._seed, self.seed_given = seed, seed is not None

    @property
    def order(self) -> Order:
        """What an iteration yields, epoch by epoch."""
        return self._order(self.seed, True)

    @property
    def num_samples(self) -> int:
        """How many an iteration yields."""
        return self._positions()

    def __iter__(self) -> Iterator[int]:
        return _blocks(self.order, self.epoch)


class OrderedSequentialSampler(_Seeded, SequentialSampler):
    """Yields the indices as they are; the seed is that of the samples' keys.

    Args:
        data_source: what is sampled; its length is asked anew for each epoch.
        seed: of the keys; None draws it from ``generator`` when it is first needed.
        generator: where the seed comes from; None for torch's default one.
        excluded: ascending indices that are left out, int64.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        excluded: NDArray[np.int64] | None = None,
    ) -> None:
        self._take(None, excluded)
        super().__init__(data_source)
        self.generator = generator
        self._seed, self.seed_given = seed, seed is not None

    @property
    def order(self) -> Order:
        """What an iteration yields, epoch by epoch."""
        return self._order(self.seed, False)

    def __len__(self) -> int:
        return self._positions()

    def __iter__(self) -> Iterator[int]:
        # The seed is for keys: none is drawn from the user's generator for an order without chance.
        return _blocks(self._order(0, False), self.epoch)


class OrderedSampler(_Seeded, Sampler[int]):
    """Yields an order that a description makes; no class of torch's that frameworks replace.

    Args:
        data_source: what is sampled; the order is made anew where its length has changed.
        sampling: the description.
        seed: of order and keys; None draws it from ``generator`` when it is first needed.
        generator: where the seed comes from; None for torch's default one.
        excluded: ascending indices that are left out, int64.

    Raises:
        ValueError: the description does not fit the data.
    """

    def __init__(
        self,
        data_source: Sized,
        sampling: Sampling,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        excluded: NDArray[np.int64] | None = None,
    ) -> None:
        self._take(sampling, excluded)
        self.data_source, self.generator = data_source, generator
        self._seed, self.seed_given = seed, seed is not None
        self._rule()

    @property
    def order(self) -> Order:
        """What an iteration yields, epoch by epoch."""
        return self._order(self.seed, True)

    def __len__(self) -> int:
        return self._positions()

    def __iter__(self) -> Iterator[int]:
        return _blocks(self.order, self.epoch)


class ShardedSampler(_Epoch, DistributedSampler[int]):
    """Yields this rank's share of an order; rank and world are those of the moment.

    A ``DistributedSampler``, so that frameworks leave it where it is.

    Args:
        data_source: what is sampled; its length is asked anew for each epoch.
        shuffle: as `Order` has it.
        seed: of the order; the same on all ranks.
        uneven: as `Share` has it.
        excluded: ascending indices that are left out, int64.
        sampling: the description of the order; None: as ``shuffle`` says.

    Raises:
        ValueError: the description does not fit the data.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        shuffle: bool,
        seed: int,
        uneven: str,
        excluded: NDArray[np.int64] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self._take(sampling, excluded)
        # Not torch's, which asks for the ranks now; these are its attributes, beside those below.
        self.dataset, self.drop_last = cast(Any, data_source), uneven == "drop"
        self.shuffle, self.seed = shuffle, seed
        self.data_source, self.uneven = data_source, uneven
        self._rule()

    @property
    def order(self) -> Order:
        """What the ranks share, epoch by epoch."""
        return self._order(self.seed, self.shuffle)

    def share(self, batch_size: int = 1) -> Share:
        """This rank's part of it."""
        return Share(self._positions(), 0, *rank_and_world(), batch_size, self.uneven)

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This rank."""
        return rank_and_world()[0]

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """How many ranks there are."""
        return rank_and_world()[1]

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """How many samples each rank has in a whole epoch."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """How many samples all ranks have together."""
        return len(self) * self.num_replicas

    def __len__(self) -> int:
        return len(self.share())

    def __iter__(self) -> Iterator[int]:
        share, order = self.share(_BLOCK), self.order
        for step in range(share.steps):
            yield from order.at(self.epoch, share.positions(step)[0]).tolist()


Ordered = OrderedRandomSampler | OrderedSequentialSampler | OrderedSampler | ShardedSampler
"""The samplers that yield an order."""
