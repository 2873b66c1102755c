"""What is in the bytes of each sample: whether they can be decoded, what is odd, and their digest.

Whether an image is good is what a loader would say: the native decoder decodes all of it or,
wherever that declines, Pillow does. For a sample, 18 bytes are held.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker import header
from stoker.engine import decodes
from stoker.errors import DecodeError
from stoker.header import Header
from stoker.sources.dataset import Rows
from stoker.sources.index import Files

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Is told samples and bytes that are done."""

HUGE_PIXELS = 50_000_000
TINY_PIXELS = 32
_BLOCK = 64
_DIGEST_BYTES = 16

ODDITIES: dict[str, Callable[[Header, str], bool]] = {
    "rotated": lambda head, _: head.orientation != 1,
    "cmyk": lambda head, _: head.mode == "CMYK",
    "gray": lambda head, _: head.mode.startswith(("1", "LA", "I", "F")) or head.mode == "L",
    "deep": lambda head, _: head.deep,
    "palette": lambda head, _: head.mode in ("P", "PA"),
    "alpha": lambda head, _: head.alpha,
    "animated": lambda head, _: head.animated,
    "huge": lambda head, _: head.pixels > HUGE_PIXELS,
    "tiny": lambda head, _: min(head.width, head.height) < TINY_PIXELS,
    "misnamed": lambda head, name: head.misnamed(name),
}
"""Whether an image of some header and name is odd in one way."""


@dataclass
class Contents:
    """What was found out about some samples, one after the other.

    Attributes:
        digests: BLAKE2b of 16 bytes of the encoded bytes, uint64 of shape (n, 2).
        odd: bit i is set for the i-th of ``ODDITIES``, uint16 of shape (n,).
        bad: place and reason of those that cannot be decoded.
        formats: how many are in each encoded format; bad ones are left out.
        bytes: of all encoded images.
    """

    digests: NDArray[np.uint64]
    odd: NDArray[np.uint16]
    bad: list[tuple[int, str]] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    @classmethod
    def of(cls, samples: int) -> Contents:
        """Nothing found out yet."""
        return cls(np.zeros((samples, 2), np.uint64), np.zeros(samples, np.uint16))


class Reader:
    """Threads that read samples.

    Args:
        pool: they.
        jobs: how many.
        progress: is called now and then, on the calling thread.
    """

    def __init__(self, pool: ThreadPoolExecutor, jobs: int, progress: Progress | None) -> None:
        self._pool, self._jobs, self._progress = pool, jobs, progress
        self._samples = self._bytes = 0

    def contents(self, rows: Rows) -> Contents:
        """Decodes every sample."""
        whole = Contents.of(len(rows))

        def work(begin: int, end: int) -> Contents:
            block = Contents.of(end - begin)
            for place, row in enumerate(rows.rows_of(np.arange(begin, end)).tolist()):
                _sample(rows.files, row, place, block)
            return block

        for begin, end, block in self._blocks(len(rows), work):
            whole.digests[begin:end], whole.odd[begin:end] = block.digests, block.odd
            whole.formats.update(block.formats)
            whole.bad += [(begin + place, reason) for place, reason in block.bad]
            whole.bytes += block.bytes
            self._done(end - begin, block.bytes)
        return whole

    def digests(self, rows: Rows) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """The digest of every sample, and which can be read; nothing is decoded."""
        digests = np.zeros((len(rows), 2), np.uint64)
        readable = np.zeros(len(rows), np.bool_)

        def work(begin: int, end: int) -> int:
            size = 0
            for index, row in enumerate(rows.rows_of(np.arange(begin, end)).tolist(), begin):
                data = _read(rows.files, row)
                if data is not None:  # each thread writes to places of its own
                    digests[index], readable[index] = _digest(data), True
                    size += len(data)
            return size

        for begin, end, size in self._blocks(len(rows), work):
            self._done(end - begin, size)
        return digests, readable

    def _blocks(self, samples: int, work: Callable[[int, int], T]) -> Iterator[tuple[int, int, T]]:
        """Begin, end and result of each block, in order; a few are worked on ahead."""
        waiting: deque[tuple[int, int, Future[T]]] = deque()
        for begin in range(0, samples, _BLOCK):
            end = min(begin + _BLOCK, samples)
            waiting.append((begin, end, self._pool.submit(work, begin, end)))
            if len(waiting) > 2 * self._jobs:
                start, stop, job = waiting.popleft()
                yield start, stop, job.result()
        for start, stop, job in waiting:
            yield start, stop, job.result()

    def _done(self, samples: int, size: int) -> None:
        self._samples += samples
        self._bytes += size
        if self._progress is not None:
            self._progress(self._samples, self._bytes)


def _sample(files: Files, row: int, place: int, block: Contents) -> None:
    data, head = _read(files, row), None
    if data is not None:
        block.bytes += len(data)
        block.digests[place] = _digest(data)
        try:
            head = header.read(io.BytesIO(data))
        except Exception:  # noqa: BLE001  whatever Pillow raises of it, the loader has the last word
            head = None
    limits = [limit for limit in (files.max_pixels, Image.MAX_IMAGE_PIXELS) if limit]
    if (
        data is None
        or head is None
        or head.format != "JPEG"
        or any(head.pixels > limit for limit in limits)
        or not decodes(data, files.upright)
    ):
        try:
            files.open(row)
        except DecodeError as error:
            block.bad.append((place, error.reason))
            return
    if head is not None:
        name = files.name(row)
        block.odd[place] = sum(odd(head, name) << bit for bit, odd in enumerate(ODDITIES.values()))
        block.formats[head.format] += 1


def _read(files: Files, row: int) -> bytes | None:
    """The encoded bytes; None where they cannot be read."""
    try:
        with files.opened(row) as file:
            return file.read()
    except Exception:  # noqa: BLE001  a thread hands over: decoding tells what is wrong
        return None


def _digest(data: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest(), np.uint64)
