"""Collate functions of others that would look at values, and need not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from stoker.trace.tensor import DeferredTensor, stack

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class FastCollate:
    """timm's `fast_collate`, which copies images of bytes into a batch one by one.

    Attributes:
        stock: timm's; it still makes the targets, and whatever is not deferred.
    """

    stock: Collate

    def __call__(self, batch: list[Any]) -> Any:
        """(images, targets) of tuples that begin with an image and a target."""
        if not all(type(sample) is tuple and _is_deferred(sample[0]) for sample in batch):
            return self.stock(batch)
        images = stack([sample[0] for sample in batch])
        if images is None:
            return self.stock(batch)
        nothing = torch.zeros(1, dtype=torch.uint8)
        _, targets = self.stock([(nothing, *sample[1:]) for sample in batch])
        return images, targets


def _is_deferred(image: Any) -> bool:
    return isinstance(image, DeferredTensor) and image._real is None and image.dtype is torch.uint8


def recordable(collate: Collate) -> Collate:
    """``collate``, or what does the same without needing values."""
    timm = sys.modules.get("timm.data.loader")
    return FastCollate(collate) if timm and collate is timm.fast_collate else collate
