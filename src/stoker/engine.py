"""The only importer of the native core: plans, the process's thread pool, batches in flight.

Note [One pool per process]
    All loaders share one native thread pool; each has a session on it that says how many threads
    may serve it. The threads stop when the last session closes. A forked child cannot use its
    parent's threads: the pool is abandoned there (its locks may be held for ever) and a new one is
    made when a loader asks.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker import _native
from stoker.augmentations import ADJUSTMENTS
from stoker.plan import Plan, Size, Tail

STATUS_REASONS = {
    "not_jpeg": "is not a JPEG",
    "unsupported": "is a JPEG of a kind that is not decoded natively",
    "truncated": "is truncated",
    "corrupt": "has corrupt data",
    "oriented": "has an EXIF orientation",
    "open_failed": "cannot be opened",
    "read_failed": "cannot be read",
    "changed": "has changed since it was opened",
    "too_large": "is larger than max_bytes",
    "out_of_memory": "needs more memory than there is",
    "bad_geometry": "has a size that the transform cannot be applied to",
    "fallback_failed": "cannot be decoded",
}


@lru_cache(maxsize=64)
def native_plan(plan: Plan) -> _native.Plan:
    """The native form of ``plan``, made once per plan."""
    native = _native.Plan()
    for op in plan.ops:
        native.add(op.name, op.numbers())
    native.set_order(plan.order)
    tail = plan.tail
    native.set_tail(tail.channels, tail.array(), tail.mean, tail.std)
    return native


OPERATIONS = {name: float(place) for place, (name, _) in enumerate(_native.operations())}
"""The first number of each operation in the code of a recorded sample; its own numbers follow."""

_ADJUSTMENTS = {number: name for name, number in ADJUSTMENTS.items()}

Code = tuple[float, ...]
"""The operations of a recorded sample, see native/plan.cpp."""


def names_of(code: Code) -> list[str]:
    """The operations of ``code``, by name; adjustments by theirs."""
    known, names, at = _native.operations(), list[str](), 0
    while at < len(code):
        name, numbers = known[int(code[at])]
        names.append(_ADJUSTMENTS[int(code[at + 1])] if name == "adjust" else name)
        at += 1 + numbers
    return names


def per_sample(seconds: float, samples: int) -> str:
    """A cost in words."""
    return f"{seconds / samples * 1e3:.2f} ms of CPU a sample"


@lru_cache(maxsize=64)
def native_ending(tail: Tail, order: str) -> _native.Plan:
    """The native form of what all recorded samples of a batch end in."""
    return native_plan(Plan((), tail, order))


@lru_cache(maxsize=8)
def native_image(channels: int, order: str) -> _native.Plan:
    """A native plan that ends in an image of 1 or 3 interleaved channels."""
    native = _native.Plan()
    native.set_order(order)
    native.set_tail(channels, None, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    native.set_interleaved()
    return native


def run_recorded(
    ending: _native.Plan,
    code: Code,
    data: bytes | NDArray[np.uint8],
    size: Size,
    out: NDArray[np.uint8] | None = None,
) -> tuple[str, NDArray[Any] | None]:
    """Runs recorded operations on a file's bytes or on RGB pixels, on the calling thread.

    Args:
        ending: what the result is made to.
        code: the operations.
        data: a file, or pixels of shape (height, width, 3).
        size: (height, width) of the result.
        out: bytes to write the result to; None makes an array.
    """
    status, result = ending.run_recorded(code, data, *size, out)
    return status, result


_pool: _native.Pool | None = None
_pool_lock = threading.Lock()


def _the_pool() -> _native.Pool:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = _native.Pool()
        return _pool


def _abandon_after_fork() -> None:
    global _pool, _pool_lock
    _pool_lock = threading.Lock()
    if _pool is not None:
        _pool.abandon()
        _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_after_fork)


@dataclass(frozen=True)
class Failure:
    """A sample that is not ok: its place in the batch, the native status and its detail."""

    place: int
    status: str
    detail: int

    @property
    def reason(self) -> str:
        """What is wrong, in words."""
        text = STATUS_REASONS[self.status]
        if self.status in ("open_failed", "read_failed") and self.detail:
            return f"{text}: {os.strerror(self.detail)}"
        return f"{text}: it has {self.detail} bytes" if self.status == "too_large" else text


class Batch:
    """One batch in flight. Its memory is not to be looked at before ``Session.wait`` is True."""

    __slots__ = ("memory", "native", "rows")

    def __init__(
        self, native: _native.Batch, rows: NDArray[np.int64], memory: NDArray[np.uint8]
    ) -> None:
        self.native, self.rows, self.memory = native, rows, memory

    def failures(self) -> list[Failure]:
        """The samples that are not ok, in order. Only for a finished batch."""
        return [Failure(*failure) for failure in self.native.failures()]


_exiting = False


def _note_exit() -> None:
    global _exiting
    _exiting = True


# Finalisers close the sessions at exit. The first in a process registers them all, and what was
# registered later runs earlier.
weakref.finalize(_note_exit, int)
atexit.register(_note_exit)


def _end_daemon_at_exit() -> None:
    """Ends a daemon thread that still loops while the interpreter exits, without a traceback."""
    if _exiting and threading.current_thread().daemon:
        raise SystemExit


class Session:
    """One loader's share of the pool.

    Args:
        threads: native threads that may serve it at once; 0 runs batches in ``submit``.
    """

    def __init__(self, threads: int) -> None:
        _end_daemon_at_exit()
        self.threads = threads
        self._pool = _the_pool()
        self._native = self._pool.open_session(threads)
        self._process = os.getpid()
        self._live: set[Batch] = set()
        self.closed = False

    def is_ours(self) -> bool:
        """False in a child forked after the session was made."""
        return self._process == os.getpid()

    @property
    def usable(self) -> bool:
        """False once closed, and in a child forked after it was made."""
        return not self.closed and self.is_ours()

    def cost(self) -> str:
        """What native code costs per sample, on average so far; "" before the first."""
        samples = self._native.samples
        return per_sample(self._native.cpu_seconds, samples) if samples else ""

    def require_usable(self) -> None:
        """Raises RuntimeError where nothing can be had from the session any more."""
        if not self.usable:
            _end_daemon_at_exit()
            raise RuntimeError(
                "the loader was closed, or this process was forked, since this iterator was made; "
                "ask for iter(loader) again"
            )

    def drawn(
        self,
        plan: Plan,
        files: _native.Files,
        rows: NDArray[np.int64],
        keys: NDArray[np.uint32],
        memory: NDArray[np.uint8],
        size: tuple[int, int],
    ) -> Batch:
        """A batch, not started: row ``rows[i]`` under ``keys[i]`` goes to place i of ``memory``.

        Args:
            plan: what to do to each sample.
            files: where they are.
            rows: which of the files, shape (batch,).
            keys: the seeds of their generators, shape (batch,).
            memory: writable bytes, at least ``len(rows) * channels * height * width`` elements.
            size: (height, width) of the result.
        """
        native = _native.Batch.new(
            native_plan(plan), files, rows, keys, memory, plan.tail.channels, *size
        )
        return Batch(native, rows, memory)

    def start(self, batch: Batch) -> None:
        """Starts a prepared batch; runs it now where there are no threads."""
        if self.threads == 0:
            try:
                self._pool.run_here(self._native, batch.native)
            except BaseException:  # Ctrl-C: nobody will ask for what it has declined
                self._pool.cancel(self._native, batch.native)
                raise
        else:
            self._live.add(batch)
            self._pool.submit(self._native, batch.native)

    def prepare(
        self,
        ending: _native.Plan,
        files: _native.Files,
        code: NDArray[np.float64],
        ends: NDArray[np.uint64],
        memory: NDArray[np.uint8],
        size: Size,
    ) -> Batch:
        """A batch of recorded samples, not started; file i under ``code[ends[i - 1]:ends[i]]``."""
        native = _native.Batch.recorded(ending, files, code, ends, memory, *size)
        return Batch(native, np.arange(len(ends), dtype=np.int64), memory)

    def wait(self, batch: Batch, seconds: float, watch: bool) -> bool:
        """True when ``batch`` is finished; ``watch`` returns early when a declined sample waits.

        Raises:
            RuntimeError: the session was closed, so the batch was cancelled.
        """
        done: bool = self._pool.wait(self._native, batch.native, seconds, watch)
        self.require_usable()
        if done:
            self._live.discard(batch)
        return done

    def declines(self) -> bool:
        """True while samples that the native decoder declined wait."""
        return bool(self._pool.declines(self._native))

    def take_declined(self, seconds: float) -> tuple[_native.Batch, int, int] | None:
        """The next sample that was declined: batch, place, row; None after ``seconds``."""
        taken: tuple[_native.Batch, int, int] | None = self._pool.take_declined(
            self._native, seconds
        )
        return taken

    def finish_pixels(self, batch: _native.Batch, place: int, pixels: NDArray[np.uint8]) -> None:
        """Finishes a sample from its ``pixels``, uint8 of shape (height, width, 3)."""
        self._pool.finish_pixels(self._native, batch, place, pixels)

    def finish_failed(self, batch: _native.Batch, place: int) -> None:
        """Finishes a declined sample as failed."""
        self._pool.finish_failed(self._native, batch, place)

    def cancel(self, batches: Sequence[Batch]) -> None:
        """Returns when nothing works on ``batches`` any more; waits for samples at work only."""
        for batch in batches:
            if batch in self._live:
                self._live.discard(batch)
                self._pool.cancel(self._native, batch.native)

    def close(self) -> None:
        """Cancels what is in flight and gives the threads back. Idempotent."""
        if self.closed:
            return
        self.closed = True  # first, for a thread that waits for one of the batches
        if self.is_ours():
            self.cancel(list(self._live))
            self._pool.close_session(self._native)


def native_files(
    root: str,
    names: NDArray[np.uint8],
    offsets: NDArray[np.uint64],
    max_bytes: int | None,
    max_pixels: int | None,
    upright: bool,
    identities: NDArray[np.int64] | None = None,
    extents: tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]] | None = None,
    contents: tuple[NDArray[np.uint8], NDArray[np.uint64]] | None = None,
) -> _native.Files:
    """The native view of a path table; keeps the arrays alive, copies nothing.

    Args:
        root: what every path begins with.
        names: the rest of all paths.
        offsets: where each begins in ``names``, and where the last ends.
        max_bytes: larger files fail.
        max_pixels: larger images are declined.
        upright: images that EXIF turns are declined.
        identities: of shape (files, 4): device, inode, size and time of change in ns that a file
            must have.
        extents: of each row, in which file its bytes are, where they begin, and how many they are;
            left out, a row is a whole file.
        contents: bytes of rows that are in memory, and where each begins and the last ends; rows
            without any are read from their files.
    """
    return _native.Files(
        os.fsencode(root),
        names,
        offsets,
        max_bytes,
        max_pixels,
        upright,
        identities,
        extents,
        contents,
    )


def image_size(files: _native.Files, row: int) -> Size | None:
    """(height, width) from the header of a file; None where the native decoder declines it."""
    return _native.image_size(files, row)


def pool_threads() -> int:
    """Native threads alive in this process."""
    return 0 if _pool is None else int(_pool.threads)


def level() -> str:
    """The SIMD level in use: "scalar", "avx2" or "avx512"."""
    return str(_native.levels()[-1])


def decodes(data: bytes, upright: bool, region: tuple[int, int, int, int] | None = None) -> bool:
    """True where the native decoder decodes a JPEG, on the calling thread, without the GIL.

    Args:
        data: the file.
        upright: decline images that EXIF turns.
        region: x, y, width and height of a part inside the image; None decodes all of it.
    """
    return _native.decode_jpeg(data, region, level=level(), upright=upright)[0] == "ok"


def needed(plan: Plan, size: Size, key: int) -> tuple[int, int, int, int]:
    """x, y, width and height of the part of an image of ``size`` that ``plan`` looks at.

    About: the few pixels that filters look at beyond it are left out.
    """
    whole = 0, 0, size[1], size[0]
    status, steps, _ = _native.resolve(native_plan(plan), size[1], size[0], key)
    if status != "ok" or not steps:
        return whole
    left, top, right, bottom = 0.0, 0.0, float(steps[-1]["width"]), float(steps[-1]["height"])
    befores = [{"width": size[1], "height": size[0]}, *steps[:-1]]
    for step, before in zip(reversed(steps), reversed(befores), strict=True):
        width, height = before["width"], before["height"]
        match step["kind"]:
            case "crop":
                left, right = left + step["x"], right + step["x"]
                top, bottom = top + step["y"], bottom + step["y"]
            case "resize":
                across, down = width / step["width"], height / step["height"]
                left, right, top, bottom = left * across, right * across, top * down, bottom * down
            case "flip_x":
                left, right = width - right, width - left
            case "flip_y":
                top, bottom = height - bottom, height - top
            case "gray" | "erase" | "adjust":
                pass
            case _:  # turned, warped or padded: any part may be needed
                left, top, right, bottom = 0.0, 0.0, float(width), float(height)
        left, top = max(0.0, left), max(0.0, top)
        right, bottom = min(float(width), right), min(float(height), bottom)
    x, y = int(left), int(top)
    inside = x, y, math.ceil(right) - x, math.ceil(bottom) - y
    return inside if inside[2] > 0 and inside[3] > 0 else whole


def run_encoded(plan: Plan, data: bytes, key: int, size: Size) -> tuple[str, NDArray[Any] | None]:
    """Runs ``plan`` on an encoded image on the calling thread.

    Args:
        plan: any plan.
        data: the file.
        key: seed of the generator.
        size: (height, width) that the plan gives for this image.

    Returns:
        The status and, where it is "ok", the tensor of shape (channels, height, width); 16-bit
        floats as uint16.
    """
    status, tensor = native_plan(plan).run_encoded(data, key, *size, level())
    return status, tensor


def result_size(plan: Plan, size: Size, key: int) -> Size | None:
    """(height, width) of the result for an image of ``size``; None where there is none."""
    status, steps, _ = _native.resolve(native_plan(plan), size[1], size[0], key)
    if status != "ok":
        return None
    return (steps[-1]["height"], steps[-1]["width"]) if steps else size


def moved_by(plan: Plan, width: int) -> int:
    """Pixels by which ``plan`` moves an image of this width and one row to the right."""
    _, steps, _ = _native.resolve(native_plan(plan), width, 1, 0)
    return -int(steps[0]["matrix"][2]) if steps else 0


# The native emulation of torch's generator, for those who prove it.
Generator = _native.Generator
ExpTable = _native.ExpTable
