"""Any map-style dataset on torch's own machinery, with our order and keyed seeds.

Note [Keyed workers]
    torch's workers are told what to fetch by whatever its batch sampler yields. Ours yields a
    `Draw`, and `KeyedDataset`, which torch sees as the dataset, seeds the generators before each
    sample and before the batch is collated. The user's dataset, collate_fn, worker_init_fn and
    get_worker_info() see nothing of it. A dataset with a ``__getitems__`` of its own is asked for
    the whole batch, under the key of its first sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset, get_worker_info

from stoker import order
from stoker.draws import TRIES, Draw, seed_generators
from stoker.errors import DecodeError
from stoker.order import Order

Report = tuple[int, int, str]
"""A bad sample: index, position, reason."""


class KeyedDataset(Dataset[Any]):
    """`dataset` under keyed seeds, asked by `Draw`.

    Args:
        dataset: the user's.
        on_error: "raise", "skip" or "blank".
        blank: index to a sample with black pixels, for on_error="blank".
        order: that of the draws, for on_error="skip" in worker processes.
    """

    def __init__(
        self,
        dataset: Any,
        on_error: str = "raise",
        blank: Callable[[int], Any] | None = None,
        order: Order | None = None,
    ) -> None:
        self.dataset, self.on_error, self.blank, self.order = dataset, on_error, blank, order
        self.reports: list[Report] = []
        self.error: DecodeError | None = None
        self.place = self.step = 0
        """Place in its batch of the sample that was asked for last, and that batch's step."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, draw: Draw) -> list[Any]:
        """The samples of a batch; leaves the generators seeded for collating it."""
        keys = draw.keys()
        self.reports, self.error, self.step = [], None, draw.step  # anew if a batch is run again
        # A Subset only hands on to its dataset, so there each sample can have its own key.
        bulk = type(self.dataset) is not Subset and getattr(self.dataset, "__getitems__", None)
        try:
            if bulk and self.on_error == "raise":
                seed_generators(int(keys[0]))
                samples: list[Any] = bulk(draw.indices.tolist())
            else:
                samples = [
                    self._sample(draw, place, int(index), int(keys[place]))
                    for place, index in enumerate(draw.indices)
                ]
        except DecodeError as error:
            self.error = error
            return []
        seed_generators(draw.collate_key())
        return samples

    def __getitem__(self, draw: Draw) -> Any:
        """The one sample of a loader without batches."""
        self.reports, self.error, self.step = [], None, draw.step
        try:
            return self._sample(draw, 0, int(draw.indices[0]), int(draw.keys()[0]))
        except DecodeError as error:
            self.error = error
            return None

    def _sample(self, draw: Draw, place: int, index: int, key: int) -> Any:
        seed_generators(key)
        self.place = place
        try:
            return self.dataset[index]
        except Exception as error:  # whatever the user's code raises, the policy decides
            if self.on_error == "raise" and not isinstance(error, DecodeError):
                raise  # of the user's own code, as torch does
            reason = error.reason if isinstance(error, DecodeError) else _text(error)
            self.reports.append((index, int(draw.positions[place]), reason))
            if self.on_error == "raise":
                raise
            if self.on_error == "blank" and self.blank is not None:
                seed_generators(key)
                return self.blank(index)
            return self._next_good(draw, place, index, error)

    def _next_good(self, draw: Draw, place: int, bad: int, cause: Exception) -> Any:
        error = cause
        if draw.order is None and self.order is not None:
            draw = replace(draw, order=replace(self.order, seed=draw.seed))
        for k in range(1, TRIES + 1):
            after = draw.after(place, k)
            if after is None:
                break
            index, repeat = after
            indices = np.array([index], np.int64)
            seed_generators(int(order.keys(draw.seed, draw.epoch, indices, repeat)[0]))
            try:
                return self.dataset[index]
            except Exception as next_error:  # noqa: BLE001  the last one is told
                error = next_error
        if isinstance(cause, DecodeError):
            raise cause
        reason = f"{_text(cause)}; none of those that follow it is good, the last: {_text(error)}"
        raise DecodeError(bad, f"{type(self.dataset).__name__}[{bad}]", reason) from cause


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Reporting:
    """A collate_fn that hands over, with the batch, its step and its bad samples or a DecodeError.

    An exception that leaves a worker is made anew by torch from its text alone and would lose its
    attributes.
    """

    def __init__(self, collate: Callable[[Any], Any], keyed: KeyedDataset) -> None:
        self.collate, self.keyed = collate, keyed

    def __call__(self, samples: Any) -> tuple[int, list[Report], DecodeError | None, Any]:
        """Step, reports, the error that ended the batch if one did, and the batch if none did."""
        error, self.keyed.error = self.keyed.error, None
        reports, self.keyed.reports = self.keyed.reports, []
        batch = self.collate(samples) if error is None else None
        return self.keyed.step, reports, error, batch


class WorkerInit:
    """A worker_init_fn after which ``get_worker_info().dataset`` is the user's dataset.

    Args:
        user: the user's, called with the worker's number.
    """

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user

    def __call__(self, worker: int) -> None:
        """Runs in the worker, before it fetches anything."""
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, KeyedDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # its own refuses
        if self.user is not None:
            self.user(worker)
