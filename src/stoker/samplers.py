"""Samplers that yield an order, of the classes by which frameworks tell shuffling from not.

A framework that finds one in ``loader.sampler`` sees a ``RandomSampler`` or ``SequentialSampler``,
may iterate it, wrap it, pickle it or pass it to another loader. Iterating does not advance the
epoch: the loader does, or whoever calls ``set_epoch``; until then every iteration gives the same
order.
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


class OrderedRandomSampler(RandomSampler):
    """Yields each index once per epoch, shuffled by ``Order``.

    Args:
        data_source: what is sampled; its length is asked anew for each epoch.
        seed: of the order; None draws it from ``generator`` when it is first needed.
        generator: as torch's RandomSampler has it; used for the seed and for nothing else.

    Attributes:
        epoch: which epoch an iteration yields.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(data_source, generator=generator)
        self.epoch = 0
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

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch an iteration yields from now on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return _blocks(self.order, self.epoch)


class OrderedSequentialSampler(SequentialSampler):
    """Yields the indices as they are; the seed is that of the samples' keys.

    Args:
        data_source: what is sampled; its length is asked anew for each epoch.
        seed: of the keys; None draws it from ``generator`` when it is first needed.
        generator: where the seed comes from; None for torch's default one.

    Attributes:
        epoch: which epoch an iteration is; the indices are the same in all.
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
        self.epoch = 0
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

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch an iteration is from now on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))
