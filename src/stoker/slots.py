"""Memory of batches: handed out, and taken back only when nothing can see it any more.

Note [Slot lifetime]
    A batch that was taken is the user's. The tensor's storage owns a NumPy array (the lease) that
    looks into the slot; when the storage dies, views included, the lease dies with it and its
    finaliser puts the slot back. So ``list(loader)`` works, and a batch that is kept for long costs
    one more slot, nothing else.

    Page-locked batches are different: a ``non_blocking`` copy may still read the memory after the
    tensor has died. torch's caching host allocator knows of these copies (it records an event for
    each and reuses a block only when all have passed), so page-locked memory is always taken
    from it, batch by batch, and never kept here.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_DTYPES = {
    "uint8": (np.uint8, torch.uint8),
    "float32": (np.float32, torch.float32),
    "float16": (np.float16, torch.float16),
    "bfloat16": (np.int16, torch.bfloat16),  # NumPy has no bfloat16: its bits
}


def accelerator_pins() -> bool:
    """True where ``pin_memory=True`` has an effect: an accelerator is there."""
    return (
        torch.accelerator.is_available()
        if hasattr(torch, "accelerator")
        else (torch.cuda.is_available())
    )


def _page_locked(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _aligned(size: int) -> NDArray[np.uint8]:
    """Uninitialised bytes that begin at a cache line: the kernels then store past the cache."""
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


@dataclass
class Slot:
    """Memory of one batch: its bytes, and the tensor of them that will be handed out.

    Either keeps the memory from being used again.
    """

    memory: NDArray[np.uint8]
    images: torch.Tensor


class Slots:
    """A pool of batch memory of one loader.

    Args:
        dtype: "uint8", "float32", "float16" or "bfloat16".
        channels: of each image.
        keep: slots kept for reuse; more are freed as they come back.
        pinned: take page-locked memory from ``allocate`` instead.
        allocate: size in bytes to a page-locked uint8 tensor of shape (size,).
    """

    def __init__(
        self,
        dtype: str,
        channels: int,
        keep: int,
        pinned: bool = False,
        allocate: Callable[[int], torch.Tensor] = _page_locked,
    ) -> None:
        self.dtype, self.channels, self.pinned = dtype, channels, pinned
        self._numpy, self._torch = _DTYPES[dtype]
        self._allocate = allocate
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=keep)
        self._most_samples = 1
        self.allocated = 0
        """How often memory was asked for, since the start."""

    def take(self, samples: int, size: tuple[int, int]) -> Slot:
        """Memory for ``samples`` images of (height, width) = ``size``."""
        shape = (samples, self.channels, *size)
        needed = math.prod(shape) * np.dtype(self._numpy).itemsize
        if self.pinned:
            self.allocated += 1
            pinned = self._allocate(max(needed, 1))
            return Slot(pinned.numpy(), pinned[:needed].view(self._torch).view(shape))
        try:
            memory: NDArray[np.uint8] | None = self._free.pop()
        except IndexError:
            memory = None
        if memory is None or memory.size < needed:
            self.allocated += 1
            # For as many samples as any batch so far, since the last one of an epoch is small;
            # not for the largest size so far, which may be what one broken header claims.
            self._most_samples = max(self._most_samples, samples)
            memory = _aligned(needed // max(samples, 1) * self._most_samples)
        lease = memory[:needed].view(self._numpy).reshape(shape)
        weakref.finalize(lease, self._free.append, memory).atexit = False
        images = torch.from_numpy(lease)
        if images.dtype != self._torch:
            images = images.view(self._torch)
        # A view of the tensor: whoever writes there keeps the lease.
        return Slot(images.view(torch.uint8).reshape(-1).numpy(), images)
