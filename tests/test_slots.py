"""Batch memory: reused only when nothing sees it, page-locked memory never reused by us."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from stoker.slots import Slots


def test_memory_returns_when_the_last_view_died() -> None:
    slots = Slots("float32", 3, keep=2)
    images = slots.take(4, (5, 6)).images
    assert images.shape == (4, 3, 5, 6) and images.dtype == torch.float32
    assert images.is_contiguous() and images._base is None
    view = images[1, 2]
    address = images.data_ptr()
    del images
    gc.collect()
    other = slots.take(4, (5, 6)).images
    assert other.data_ptr() != address and slots.allocated == 2
    del view
    again = slots.take(3, (5, 6)).images
    assert again.data_ptr() == address and slots.allocated == 2
    assert again.shape == (3, 3, 5, 6)


def test_whoever_still_writes_keeps_memory_too() -> None:
    slots = Slots("float32", 3, keep=1)
    memory = slots.take(4, (5, 6)).memory  # as native threads have it when an iterator is dropped
    gc.collect()
    assert not np.shares_memory(memory, slots.take(4, (5, 6)).memory)


def test_a_numpy_view_keeps_memory_too() -> None:
    slots = Slots("uint8", 1, keep=1)
    array = slots.take(1, (2, 2)).images.numpy()
    address = array.ctypes.data
    assert slots.take(1, (2, 2)).images.data_ptr() != address
    del array
    gc.collect()
    assert slots.allocated == 2


def test_memory_grows_with_the_batch_and_begins_at_a_cache_line() -> None:
    slots = Slots("uint8", 3, keep=2)
    for samples, size in ((1, (4, 4)), (5, (7, 9)), (2, (100, 50))):
        images = slots.take(samples, size).images
        assert images.shape == (samples, 3, *size) and images.data_ptr() % 64 == 0
        del images
    assert slots.allocated == 3
    slots.take(5, (7, 9))
    assert slots.allocated == 3


def test_no_more_than_keep_are_kept() -> None:
    slots = Slots("uint8", 1, keep=2)
    held = [slots.take(1, (2, 2)) for _ in range(5)]
    assert slots.allocated == 5
    held.clear()
    held = [slots.take(1, (2, 2)) for _ in range(5)]
    assert slots.allocated == 8


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16", "bfloat16"])
def test_types(dtype: str) -> None:
    slot = Slots(dtype, 3, keep=1).take(2, (4, 4))
    slot.memory[:] = 0
    assert str(slot.images.dtype) == f"torch.{dtype}" and not slot.images.any()
    assert slot.memory.nbytes == slot.images.numel() * slot.images.element_size()


class FakeHostAllocator:
    """torch's caching host allocator as it is documented, with copies that end when told.

    A block is free again when its tensor has died and every copy that reads it has ended.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[np.ndarray, list[bool]]] = []
        self.dead: set[int] = set()

    def __call__(self, size: int) -> torch.Tensor:
        import weakref

        for number, (block, copies) in enumerate(self.blocks):
            if number in self.dead and not any(copies) and block.size >= size:
                self.dead.discard(number)
                break
        else:
            number, block = len(self.blocks), np.empty(size, np.uint8)
            self.blocks.append((block, []))
        lease = block[:size]
        weakref.finalize(lease, self.dead.add, number)
        return torch.from_numpy(lease)

    def copy_from(self, tensor: torch.Tensor) -> list[bool]:
        """Begins a non_blocking copy; set the last entry to False to end it."""
        for block, copies in self.blocks:
            if block.ctypes.data == tensor.untyped_storage().data_ptr():
                copies.append(True)
                return copies
        raise AssertionError("not page-locked memory")


def test_page_locked_memory_waits_for_copies() -> None:
    host = FakeHostAllocator()
    slots = Slots("float32", 3, keep=4, pinned=True, allocate=host)
    images = slots.take(2, (4, 4)).images
    address = images.data_ptr()
    copies = host.copy_from(images)
    del images
    gc.collect()
    second = slots.take(2, (4, 4)).images
    assert second.data_ptr() != address, "the copy has not ended"
    copies[-1] = False
    third = slots.take(2, (4, 4)).images
    assert third.data_ptr() == address
    assert len(host.blocks) == 2
