"""How tensors cross from a worker where shared memory is too small: through its pipe.

Note [Small shared memory]
    torch's workers hand tensors over in files in /dev/shm, of which a container has 64 MiB unless
    its owner asked for more: less than a batch of 256 images. Where the batches in flight do not
    fit into what was free when the workers started, a tensor's bytes go through the pipe that
    carries the rest of the batch; so they do where making the file fails. torch reserves the space
    when it makes one, so that is an error and not a SIGBUS.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.multiprocessing import reductions

_PLACE = "/dev/shm"


def free_bytes() -> int | None:
    """What is free in shared memory; None where it has no bound of its own."""
    try:
        found = os.statvfs(_PLACE)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


class Piped:
    """What this process has received through pipes.

    Attributes:
        storages: so many.
        told: the user knows.
    """

    storages = 0
    told = False

    @classmethod
    def warning(cls) -> str | None:
        """What to tell the user, once."""
        if not cls.storages or cls.told:
            return None
        cls.told = True
        return (
            f"the batches in flight do not fit into {_PLACE}, so they come through pipes, which "
            "takes more time. Give the container more shared memory (docker run --shm-size=8g, or "
            "--ipc=host), or lower num_workers, prefetch_factor or batch_size"
        )


@dataclass(frozen=True)
class Room:
    """What a worker may put into shared memory.

    Args:
        free: bytes that were free before the workers started; None sets no bound.
        batches: so many may be there at once.
    """

    free: int | None
    batches: int

    def has(self, size: int) -> bool:
        """True if a tensor of ``size`` bytes of each batch in flight fits."""
        return self.free is None or size * self.batches <= self.free

    def keep(self) -> None:
        """Makes this process, a worker, keep to it."""
        if self.free is None:
            return
        torch.UntypedStorage._new_shared = _new_shared(self)  # type: ignore[method-assign]
        ForkingPickler.register(torch.UntypedStorage, _storage_reducer(self))
        ForkingPickler.register(torch.Tensor, _tensor_reducer(self))


def _new_shared(room: Room) -> Any:
    """`torch.UntypedStorage._new_shared`, in which workers collate, with memory of their own."""
    stock: Any = torch.UntypedStorage._new_shared

    def new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        if torch.device(device).type != "cpu":
            return stock(size, device=device)
        if room.has(size):
            try:
                return stock(size, device=device)
            except RuntimeError:  # no space left
                pass
        return cls(size)

    return classmethod(new_shared)


def _crosses_by_pipe(storage: Any, room: Room) -> bool:
    return (
        storage.device.type == "cpu" and not storage.is_shared() and not room.has(storage.nbytes())
    )


def _storage_reducer(room: Room) -> Any:
    def reduce(storage: Any) -> Any:
        if not _crosses_by_pipe(storage, room):
            try:
                return reductions.reduce_storage(storage)  # type: ignore[no-untyped-call]
            except RuntimeError:
                if storage.device.type != "cpu" or storage.is_shared():
                    raise
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        return _received, (flat.numpy(),)

    return reduce


def _received(data: NDArray[np.uint8]) -> Any:
    """A storage that came through a pipe."""
    Piped.storages += 1
    return torch.from_numpy(data).untyped_storage()


def _tensor_reducer(room: Room) -> Any:
    def reduce(tensor: Any) -> Any:
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.requires_grad:
            storage = tensor.untyped_storage()
            # Of a view only what it shows: it may be one row of a whole dataset.
            if _crosses_by_pipe(storage, room) and tensor.numel() * tensor.element_size() < (
                storage.nbytes()
            ):
                tensor = _compact(tensor)
        return reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]

    return reduce


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides whose storage holds little else."""
    if tensor.numel() == 0:
        return tensor.clone()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride())
