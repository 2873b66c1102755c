"""Samplers that yield an order, of the classes by which frameworks tell shuffling from not.

A framework that finds one in ``loader.sampler`` sees a ``RandomSampler`` or ``SequentialSampler``,
may iterate it, wrap it, pickle it or pass it to another loader. Iterating does not advance the
epoch: a loader calls ``begin_epoch`` at each of its iterations, anyone else ``set_epoch``; until
then every iteration gives the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import RandomSampler, SequentialSampler

from stoker.order import Order

_BLOCK = 4096


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed in [0, 2**63) from ``generator``, or from torch's default one."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _blocks(order: Order, epoch: int) -> Iterator[int]:
    """The whole order of ``epoch`` as Python integers, a few thousand at a time."""
    for start in range(0, order.samples, _BLOCK):
        yield from order.indices(epoch, start, min(start + _BLOCK, order.samples)).tolist()


class _Epoch:
    """Which epoch a sampler is in.

    Attributes:
        epoch: what an iteration yields.
    """

    epoch = 0
    _told = True
    _gaps: NDArray[np.int64] | None = None

    def _leave_out(self, excluded: NDArray[np.int64] | None) -> None:
        """Takes ascending indices out of the order; see `Order.gaps`."""
        if excluded is not None and len(excluded):
            self._gaps = excluded - np.arange(len(excluded))

    def _left(self, samples: int) -> int:
        """How many of ``samples`` are in the order."""
        return samples if self._gaps is None else samples - len(self._gaps)

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch an iteration yields from now on."""
        self.epoch, self._told = epoch, True

    def begin_epoch(self) -> int:
        """The epoch that was set, once; then the one after the last."""
        if not self._told:
            self.epoch += 1
        self._told = False
        return self.epoch


class OrderedRandomSampler(_Epoch, RandomSampler):
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
        self._leave_out(excluded)
        super().__init__(data_source, generator=generator)
        self._seed = seed

    @property
    def seed(self) -> int:
        """The seed of the order; reading it draws one where none was given."""
        if self._seed is None:
            self._seed = draw_seed(self.generator)
        return self._seed

    @property
    def order(self) -> Order:
        """What an iteration yields, epoch by epoch."""
        return Order(self.num_samples, self.seed, True, self._gaps)

    @property
    def num_samples(self) -> int:
        """How many an iteration yields."""
        return self._left(len(self.data_source))

    def __iter__(self) -> Iterator[int]:
        return _blocks(self.order, self.epoch)


class OrderedSequentialSampler(_Epoch, SequentialSampler):
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
        self._leave_out(excluded)
        super().__init__(data_source)
        self.generator = generator
        self._seed = seed

    @property
    def seed(self) -> int:
        """The seed of the samples' keys; reading it draws one where none was given."""
        if self._seed is None:
            self._seed = draw_seed(self.generator)
        return self._seed

    @property
    def order(self) -> Order:
        """What an iteration yields, epoch by epoch."""
        return Order(len(self), self.seed, False, self._gaps)

    def __len__(self) -> int:
        return self._left(len(self.data_source))

    def __iter__(self) -> Iterator[int]:
        # The seed is for keys: none is drawn from the user's generator for an order without chance.
        return _blocks(Order(len(self), 0, False, self._gaps), self.epoch)
