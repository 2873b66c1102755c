"""Deferred tensors on their way to the main process, and what its native threads make of them.

A `Recording` holds, for one tensor of a batch, the paths of its samples with their identities, or
their files if they were opened from memory; the native code of each; and the tensors of samples
that had to be made in the worker. Python touches nothing of it per sample in the main process.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import get_worker_info

from stoker.engine import Batch, Session, names_of, native_ending, native_files
from stoker.fallback import Fallback
from stoker.plan import Tail
from stoker.slots import Slot, Slots
from stoker.trace.file import settle as settle_images
from stoker.trace.hooks import is_image
from stoker.trace.node import Tracing, identity_of
from stoker.trace.scope import Scope
from stoker.trace.tensor import DeferredTensor, Erasure, Promise, Stack, interleave, tail_of
from stoker.trace.tensor import settle as settle_tensors


@dataclass
class Recording:
    """A tensor that is still to be made.

    Attributes:
        tail: how every sample of it ends.
        size: (height, width).
        samples: how many; 1 with `single`.
        single: an image, not a batch of them.
        interleaved: a single image whose channels lie last in memory.
        is_image: a `tv_tensors.Image`.
        names, offsets, identities, code, ends: of the recorded samples, as the engine reads them.
        contents, content_offsets: their files where they are in memory; None where none is.
        places: of the recorded samples; None where all are.
        made: the other samples, stacked.
        erasures: (place, rectangle) to be written over.
    """

    tail: Tail
    order: str
    size: tuple[int, int]
    samples: int
    single: bool
    interleaved: bool
    is_image: bool
    names: NDArray[np.uint8]
    offsets: NDArray[np.uint64]
    identities: NDArray[np.int64]
    code: NDArray[np.float64]
    ends: NDArray[np.uint64]
    contents: torch.Tensor | None
    content_offsets: NDArray[np.uint64] | None
    places: list[int] | None
    made: torch.Tensor | None
    erasures: list[tuple[int, Erasure]]

    def path(self, row: int) -> str:
        """The file of recorded sample ``row``; "" where it is in memory."""
        begin, end = int(self.offsets[row]), int(self.offsets[row + 1])
        return os.fsdecode(self.names[begin:end].tobytes())

    def memory(self) -> tuple[NDArray[np.uint8], NDArray[np.uint64]] | None:
        """The files that are in memory, as the engine reads them."""
        if self.contents is None or self.content_offsets is None:
            return None
        return self.contents.numpy(), self.content_offsets

    def content(self, row: int) -> bytes:
        """The bytes of recorded sample ``row`` where they are in memory; else none."""
        memory = self.memory()
        if memory is None:
            return b""
        contents, offsets = memory
        return contents[int(offsets[row]) : int(offsets[row + 1])].tobytes()


def _crosses(promise: Promise, dtype: torch.dtype) -> bool:
    """True where the main process will have the file that was recorded."""
    source = promise.node.source
    if source.data is not None:
        # Shared memory may be scarce: a worker's batch takes no more of it than it does in torch.
        most = math.prod(promise.shape) * dtype.itemsize
        return get_worker_info() is None or len(source.data) <= most
    assert source.path is not None
    try:
        return identity_of(os.stat(source.path)) == source.identity
    except OSError:
        return False


def record(tensor: DeferredTensor, scope: Scope) -> Any:
    """What crosses for a deferred tensor: a `Recording`, or the tensor if it must be made here."""
    promise = tensor._promise
    if tensor._real is not None:
        return tensor._real
    items = promise.items if isinstance(promise, Stack) else [promise]
    names, identities, contents, ends = [], [], [], []
    code: list[float] = []
    places: list[int] = []
    made: list[torch.Tensor] = []
    erasures: list[tuple[int, Erasure]] = []
    sample: Promise | None = None
    for place, item in enumerate(items):
        if isinstance(item, Promise) and _crosses(item, tensor.dtype):
            sample = item
            source = item.node.source
            names.append(os.fsencode(source.path or ""))
            identities.append(source.identity or (0, 0, 0, 0))
            contents.append(source.data or b"")
            code.extend(item.node.code)
            ends.append(len(code))
            places.append(place)
            erasures += [(place, erasure) for erasure in item.erasures]
        elif isinstance(item, Promise):
            made.append(item.make(tensor.dtype, scope))
        else:
            made.append(item)
    if sample is None:
        return tensor.made("a file that is gone")
    height, width = sample.shape[1:]
    scope.counts.recorded += len(places)
    tail = tail_of(sample.node.mode, sample.ending)
    steps = ", ".join(names_of(sample.node.code)) or "nothing"
    scope.counts.plans[f"{steps}; to {tail.dtype} {tail.channels}x{height}x{width}"] += 1
    return Recording(
        tail,
        Tracing.order,
        (height, width),
        len(items),
        not isinstance(promise, Stack),
        not isinstance(promise, Stack) and promise.interleaved,
        is_image(tensor),
        np.frombuffer(b"".join(names), np.uint8),
        np.cumsum([0, *map(len, names)]).astype(np.uint64),
        np.array(identities, np.int64),
        np.array(code, np.float64),
        np.array(ends, np.uint64),
        *_joined(contents),
        places if made else None,
        torch.stack(made) if made else None,
        erasures,
    )


def _joined(contents: list[bytes]) -> tuple[torch.Tensor | None, NDArray[np.uint64] | None]:
    """All bytes in a tensor, which crosses in shared memory, and where each of them begin."""
    offsets = np.cumsum([0, *map(len, contents)]).astype(np.uint64)
    if not offsets[-1]:
        return None, None
    joined = torch.empty(int(offsets[-1]), dtype=torch.uint8)
    memory = joined.numpy()
    for content, begin in zip(contents, offsets.tolist(), strict=False):
        memory[begin : begin + len(content)] = np.frombuffer(content, np.uint8)
    return joined, offsets


def replaced(value: Any, kind: type | tuple[type, ...], make: Callable[[Any], Any]) -> Any:
    """``value`` with every object of ``kind`` in its containers replaced by what ``make`` gives.

    Containers without one are handed on as they are.
    """
    if isinstance(value, kind):
        return make(value)
    cls = type(value)
    if cls in (list, tuple):
        items = [replaced(item, kind, make) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return cls(items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [replaced(item, kind, make) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return cls(*items)
    if isinstance(value, dict):
        new = {key: replaced(item, kind, make) for key, item in value.items()}
        if all(new[key] is item for key, item in value.items()):
            return value
        if cls is dict:
            return new
        # A mapping with a class of its own, such as a BatchEncoding: the same object, new values.
        value.update(new)
        return value
    return value


def pack(batch: Any, scope: Scope) -> Any:
    """A batch with every deferred tensor replaced by what crosses for it."""
    return replaced(batch, DeferredTensor, lambda tensor: record(tensor, scope))


def settle(scope: Scope) -> None:
    """Makes what outlives the batch, such as images that a dataset keeps."""
    settle_images(scope)
    settle_tensors(scope)


@dataclass
class Pending:
    """A recording at work."""

    recording: Recording
    slot: Slot
    memory: torch.Tensor
    batch: Batch


class Failed(Exception):  # noqa: N818  not an error: the batch is made in another way
    """Recorded samples could not be made: the batch must run again.

    Attributes:
        files: with which it has to do.
    """

    def __init__(self, files: list[str], reason: str) -> None:
        super().__init__(reason)
        self.files = tuple(files)


class Receiver:
    """Makes recordings in native threads.

    Args:
        threads: native threads; 0 works on the calling thread.
        pinned: hand out page-locked memory.
    """

    def __init__(self, threads: int, pinned: bool, keep: int) -> None:
        self.session = Session(threads)
        self.fallback = Fallback(self.session, self._decode)
        self.pinned, self.keep = pinned, keep
        self._slots: dict[tuple[str, int], Slots] = {}
        self._recordings: dict[int, Recording] = {}

    def _decode(self, batch: object, row: int) -> NDArray[np.uint8]:
        recording = self._recordings[id(batch)]
        content = recording.content(row)
        if content:
            return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
        path = recording.path(row)
        with open(path, "rb") as file:
            if identity_of(os.fstat(file.fileno())) != tuple(recording.identities[row].tolist()):
                raise OSError(f"{path} has changed since it was opened")
            return np.asarray(Image.open(file).convert("RGB"))

    def submit(self, batch: Any) -> Any:
        """A batch with its recordings at work."""
        return replaced(batch, Recording, self._start)

    def _start(self, recording: Recording) -> Pending:
        tail = recording.tail
        kind = tail.dtype, tail.channels
        if kind not in self._slots:
            self._slots[kind] = Slots(*kind, keep=self.keep, pinned=self.pinned)
        slot = self._slots[kind].take(recording.samples, recording.size)
        target = slot
        if recording.places is not None:
            target = Slots(*kind, keep=0).take(len(recording.places), recording.size)
        files = native_files(
            "",
            recording.names,
            recording.offsets,
            None,
            None,
            False,
            recording.identities,
            contents=recording.memory(),
        )
        batch = self.session.prepare(
            native_ending(tail, recording.order),
            files,
            recording.code,
            recording.ends,
            target.memory,
            recording.size,
        )
        self._recordings[id(batch.native)] = recording
        self.session.start(batch)
        return Pending(recording, slot, target.images, batch)

    def finish(self, batch: Any) -> Any:
        """The batch, when everything in it is made.

        Raises:
            Failed: a sample could not be made.
        """
        failed: list[tuple[str, str]] = []

        def tensor(pending: Pending) -> torch.Tensor:
            return self._finish(pending, failed)

        result = replaced(batch, Pending, tensor)
        if failed:
            files = [path for path, _ in failed if path]
            raise Failed(files, f"{failed[0][0] or 'an image in memory'} {failed[0][1]}")
        return result

    def _finish(self, pending: Pending, failed: list[tuple[str, str]]) -> torch.Tensor:
        recording, images = pending.recording, pending.slot.images
        if self.session.threads == 0:
            while self.fallback.serve_one(0.0):
                pass
        while not self.session.wait(pending.batch, 1.0, watch=not self.fallback.started):
            if not self.fallback.started and self.session.declines():
                self.fallback.start()
        failures = pending.batch.failures()
        failed.extend((recording.path(failure.place), failure.reason) for failure in failures)
        self.fallback.forget(pending.batch)
        del self._recordings[id(pending.batch.native)]
        if failed:
            return images
        if recording.places is not None and recording.made is not None:
            rest = [i for i in range(recording.samples) if i not in set(recording.places)]
            images[recording.places] = pending.memory
            images[rest] = recording.made
        for place, erasure in recording.erasures:
            erasure.apply(images[place])
        if recording.single:
            images = images[0]
        if recording.interleaved:
            images = interleave(images)
        return _as_image(images) if recording.is_image else images

    def cancel(self, batch: Any) -> None:
        """Drops a batch that nobody will ask for."""
        replaced(batch, Pending, self._cancel)

    def _cancel(self, pending: Pending) -> None:
        if self.session.usable:
            self.session.cancel([pending.batch])
        self._recordings.pop(id(pending.batch.native), None)

    def close(self) -> None:
        """Gives threads back. Idempotent."""
        self.fallback.elsewhere(_close, self.session, self.fallback)
        self._recordings.clear()


def _close(session: Session, fallback: Fallback) -> None:
    session.close()
    fallback.close()


def _as_image(tensor: torch.Tensor) -> torch.Tensor:
    from torchvision import tv_tensors

    return tv_tensors.Image(tensor)  # type: ignore[no-any-return]
