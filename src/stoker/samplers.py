"""Samplers that yield an order, of the classes by which frameworks tell shuffling from not.

A framework that finds one in ``loader.sampler`` sees a ``RandomSampler`` or ``SequentialSampler``,
may iterate it, wrap it, pickle it or pass it to another loader. Iterating does not advance the
epoch: a loader calls ``begin_epoch`` at each of its iterations, anyone else ``set_epoch``; until
then every iteration gives the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
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
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
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
        return Order(len(self.data_source), self.seed, True)

    def __iter__(self) -> Iterator[int]:
        return _blocks(self.order, self.epoch)


class OrderedSequentialSampler(_Epoch, SequentialSampler):
    """Yields the indices as they are; the seed is that of the samples' keys.

    Args:
        data_source: what is sampled; its length is asked anew for each epoch.
        seed: of the keys; None draws it from ``generator`` when it is first needed.
        generator: where the seed comes from; None for torch's default one.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
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
        return Order(len(self.data_source), self.seed, False)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))
