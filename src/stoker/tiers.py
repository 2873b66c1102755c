"""Which tier can serve a dataset: the proven plan for its samples, or what prevents one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image

from stoker.engine import level
from stoker.lower import Refusal, lower_transform, prove
from stoker.plan import Plan
from stoker.sources.dataset import Rows, read

_BLANK = (1024, 1024)


@dataclass(frozen=True)
class Lowered:
    """A dataset whose samples need no Python: what to do, and to which files."""

    plan: Plan
    rows: Rows


_one_at_a_time = threading.RLock()
"""Proving a plan seeds the process's generators: another thread's proof would draw from them."""


def _renew_lock() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def lower(dataset: Any) -> Lowered | Refusal:
    """The proven plan of ``dataset`` as it is now, or the first thing that prevents one."""
    with _one_at_a_time:
        return _lower(dataset)


def _lower(dataset: Any) -> Lowered | Refusal:
    if level() == "scalar":
        # The scalar kernels are the reference: a fraction of the speed of Pillow's own.
        return Refusal("processor", "there are no fast kernels for it", "use x86-64 with AVX2")
    rows = read(dataset)
    if isinstance(rows, Refusal):
        return rows
    plan = lower_transform(rows.transform)
    if isinstance(plan, Refusal):
        return plan
    return prove(plan, rows.transform) or Lowered(plan, rows)


def blank_sample(dataset: Any) -> Callable[[int], Any] | Refusal:
    """A function that gives sample ``index`` with black pixels, through the dataset's transform."""
    rows = read(dataset)
    return rows if isinstance(rows, Refusal) else _Blank(rows)


class _Blank:
    def __init__(self, rows: Rows) -> None:
        self.transform, self.labels = rows.transform, rows.labels

    def __call__(self, index: int) -> Any:
        image: Any = Image.new("RGB", _BLANK)
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.labels[index])


def sample_location(dataset: Any, index: int) -> str:
    """The path of a sample where the dataset is a known one, else its index."""
    rows = read(dataset)
    return f"sample {index}" if isinstance(rows, Refusal) else rows.location(index)
