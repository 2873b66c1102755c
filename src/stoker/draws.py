"""The samples of one batch and the seeds of their generators: what every tier is told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import order
from stoker.order import Order

TRIES = 100
"""How many following samples `on_error="skip"` tries before it gives up."""


@dataclass(frozen=True)
class Draw:
    """Who is in a batch, and under which seeds.

    Attributes:
        seed: the loader's.
        epoch: the epoch.
        positions: places of the samples in the epoch's order, int64 of shape (batch,).
        indices: the samples, int64 of shape (batch,).
        draws: tells repeats of an index in one epoch apart; 0 where there are none.
        order: the order that `indices` come from; None where a foreign sampler made them, and in
            worker processes: it may hold tables of all samples, and a draw is sent with each batch.
        step: which batch of its iteration this is, from 0.
    """

    seed: int
    epoch: int
    positions: NDArray[np.int64]
    indices: NDArray[np.int64]
    draws: NDArray[np.int64] | int = 0
    order: Order | None = None
    step: int = 0

    def keys(self) -> NDArray[np.uint32]:
        """The 32-bit seeds of the samples' generators, shape (batch,)."""
        return order.keys(self.seed, self.epoch, self.indices, self.draws)

    def collate_key(self) -> int:
        """The 32-bit seed under which the batch is collated."""
        first = int(self.positions[0]) if len(self.positions) else 0
        return order.collate_key(self.seed, self.epoch, first)

    def after(self, place: int, k: int) -> tuple[int, int] | None:
        """Index and draw of the sample k positions after ``place``; after the last comes the first.

        A foreign sampler isn't asked ahead of time: there, only this batch is looked at, and None
        says that it has no more.
        """
        if self.order is not None:
            position = (int(self.positions[place]) + k) % self.order.samples
            indices, draws = self.order.drawn(self.epoch, np.array([position]))
            return int(indices[0]), _one(draws, 0)
        if k >= len(self.indices):
            return None
        at = (place + k) % len(self.indices)
        return int(self.indices[at]), _one(self.draws, at)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "order": None}


def _one(draws: NDArray[np.int64] | int, place: int) -> int:
    return draws if isinstance(draws, int) else int(draws[place])


def seed_generators(key: int) -> None:
    """Seeds torch's default CPU generator, ``random`` and ``numpy.random`` with a 32-bit key."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Gives the three generators back as they were."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])
