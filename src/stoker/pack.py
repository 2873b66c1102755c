"""Images of any source into shards: written whole or not at all, and read again before they count.

Note [Interrupted packing]
    What is in which shard follows from the source and the arguments alone, and so do the bytes of
    each shard. A shard is written under another name, flushed to the disk, read again and compared
    with its source, and only then renamed. So whenever packing is stopped, whatever carries a final
    name is whole; packing again compares it with the source and writes what is missing. A file in
    the way that is not what would be written is an error, and stays as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.order import Order
from stoker.sources import tar, tfrecord
from stoker.sources.index import Images
from stoker.sources.shards import Index, Sample

Progress = Callable[[int, int], None]
"""Is told samples and bytes that are done."""

_NUMBER = re.compile(r"%0?\d*d")


@dataclass(frozen=True)
class _Format:
    """A format that can be written.

    Attributes:
        write: the samples of a shard.
        scan: what is in a shard.
        entries: name, begin, length and label of each image in it.
        name: of a sample's image in its shard.
    """

    write: Callable[[BinaryIO, Iterator[Sample]], None]
    scan: Callable[[str], Index]
    entries: Callable[[Index], list[tuple[str, int, int, str]]]
    name: Callable[[Sample], str]


FORMATS = {
    ".tar": _Format(tar.write, tar.scan, tar.written, tar.member_name),
    ".tfrecord": _Format(
        tfrecord.write, tfrecord.scan_written, tfrecord.written, lambda sample: sample.name
    ),
}
"""The formats by the suffix of their shards."""


@dataclass(frozen=True)
class Packed:
    """What was packed.

    Attributes:
        shards: paths, in order.
        samples: how many.
        image_bytes: of encoded images.
        shard_bytes: of all shards.
        found: shards that were there already.
        seconds: that it took.
    """

    shards: list[str]
    samples: int
    image_bytes: int
    shard_bytes: int
    found: int
    seconds: float


def pack(
    source: Images,
    target: str | os.PathLike[str],
    *,
    shard_bytes: int = 256 << 20,
    shuffle: int | None = None,
    jobs: int = 2,
    progress: Progress | None = None,
) -> Packed:
    """Writes the encoded images of ``source``, byte for byte, and their labels into shards.

    Args:
        source: images with labels; their transforms play no part.
        target: the path of the shards, with a ``%06d`` or the like for their number; without, one
            shard takes all. Its suffix says the format, see ``FORMATS``.
        shard_bytes: a shard ends before the image that would make its images more than that.
        shuffle: the seed of a random order; left out, the order is the source's.
        jobs: shards that are worked on at once.
        progress: is called now and then, from several threads.

    Raises:
        SourceError: an image cannot be read; a file is in the way.
        OSError: a shard cannot be written. Packing again goes on from there.
        ValueError: the arguments do not fit.
    """
    begun = time.monotonic()
    target = os.path.expanduser(os.fspath(target))
    kind = FORMATS.get(os.path.splitext(target)[1])
    if kind is None:
        raise ValueError(f"the shards' names must end in {' or '.join(FORMATS)}, not {target!r}")
    if len(_NUMBER.findall(os.path.basename(target))) != target.count("%"):
        raise ValueError(f"{target!r} must hold one %06d or the like in its file name, or none")
    if shard_bytes < 1 or jobs < 1:
        raise ValueError(f"shard_bytes={shard_bytes} and jobs={jobs} must be positive")
    rows = np.arange(len(source), dtype=np.int64)
    if shuffle is not None:
        rows = Order(len(source), shuffle, True).indices(0, 0, len(source))
    lengths = _lengths(source, jobs)[rows]
    parts = _parts(rows, lengths, shard_bytes if "%" in target else None)
    paths = [target % number if "%" in target else target for number in range(len(parts))]
    _refuse_others(target, paths)
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    _refuse_a_full_disk(target, paths, parts, lengths)
    work = _Work(source, kind, progress)
    with ThreadPoolExecutor(jobs, "stoker-pack") as pool:
        firsts = np.cumsum([0, *map(len, parts)]).tolist()
        waiting = [
            pool.submit(work.shard, path, part, first)
            for path, part, first in zip(paths, parts, firsts, strict=False)
        ]
        try:
            for job in waiting:
                job.result()
        except BaseException:
            work.stopped = True
            pool.shutdown(cancel_futures=True)
            raise
    return Packed(
        paths,
        len(rows),
        int(lengths.sum()),
        sum(os.path.getsize(path) for path in paths),
        work.found,
        time.monotonic() - begun,
    )


def _lengths(source: Images, jobs: int) -> NDArray[np.int64]:
    """Bytes of each sample's image."""
    files = source.files
    if files.extents is not None:
        return files.extents.length

    def length(row: int) -> int:
        try:
            return os.stat(files.path(row)).st_size
        except OSError as error:
            raise SourceError(files.path(row), error.strerror or str(error)) from error

    with ThreadPoolExecutor(4 * jobs, "stoker-pack") as pool:
        return np.fromiter(pool.map(length, range(len(files))), np.int64, len(files))


def _parts(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], most: int | None
) -> list[NDArray[np.int64]]:
    """The rows of each shard; one shard, if ``most`` is None."""
    if most is None:
        return [rows]
    ends, first = [], 0
    sums = np.cumsum(lengths)
    while first < len(rows):
        before = int(sums[first - 1]) if first else 0
        first = max(first + 1, int(np.searchsorted(sums, before + most, "right")))
        ends.append(first)
    return np.split(rows, ends[:-1]) if ends else [rows]


def _refuse_others(target: str, paths: list[str]) -> None:
    """Raises SourceError where a shard that the pattern fits would not be one of ``paths``."""
    folder, name = os.path.split(target)
    if "%" not in name or not os.path.isdir(folder or "."):
        return
    fits = re.compile(r"\d+".join(map(re.escape, _NUMBER.split(name))))
    ours = set(map(os.path.basename, paths))
    for other in sorted(os.listdir(folder or ".")):
        if fits.fullmatch(other) and other not in ours:
            raise SourceError(
                os.path.join(folder, other),
                f"would be read with the {len(paths):,} shards of this set, and is none of them: "
                "remove it, or choose another name",
            )


def _refuse_a_full_disk(
    target: str, paths: list[str], parts: list[NDArray[np.int64]], lengths: NDArray[np.int64]
) -> None:
    needed, first = 0, 0
    for path, part in zip(paths, parts, strict=True):
        if not os.path.exists(path):
            needed += int(lengths[first : first + len(part)].sum())
        first += len(part)
    free = shutil.disk_usage(os.path.dirname(target) or ".").free
    if needed > free:
        raise SourceError(target, f"needs {needed:,} bytes, and {free:,} are free there")


class _Work:
    """One packing: what all its shards have in common."""

    def __init__(self, source: Images, kind: _Format, progress: Progress | None) -> None:
        self.source, self.kind, self.progress = source, kind, progress
        self.stopped = False
        self.found = 0
        self._done = self._bytes = 0
        self._counting = threading.Lock()

    def shard(self, path: str, rows: NDArray[np.int64], first: int) -> None:
        """Writes a shard, or finds it there."""
        if os.path.exists(path):
            difference = self._difference(path, rows, first)
            if difference:
                raise SourceError(
                    path,
                    f"is in the way, and not what would be written ({difference}): remove it, or "
                    "choose another name",
                )
            with self._counting:
                self.found += 1
            return
        temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.part")
        try:
            with open(temporary, "wb") as file:
                self.kind.write(file, self._samples(rows, first))
                file.flush()
                os.fsync(file.fileno())
            difference = self._difference(temporary, rows, first)
            if difference:
                raise SourceError(path, f"was read back otherwise than written: {difference}")
            os.replace(temporary, path)
            _flush_folder(os.path.dirname(path) or ".")
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise

    def _samples(
        self, rows: NDArray[np.int64], first: int, count: bool = False
    ) -> Iterator[Sample]:
        files, classes = self.source.files, getattr(self.source, "classes", [])
        assert files.labels is not None
        for position, row in enumerate(rows.tolist(), first):
            if self.stopped:
                raise InterruptedError
            try:
                with files.opened(row) as file:
                    content = file.read()
            except OSError as error:
                raise SourceError(files.path(row), error.strerror or str(error)) from error
            label = int(files.labels[row])
            named = 0 <= label < len(classes)
            yield Sample(position, files.name(row), content, label, classes[label] if named else "")
            if count:
                with self._counting:
                    self._done += 1
                    self._bytes += len(content)
                    if self.progress is not None:
                        self.progress(self._done, self._bytes)

    def _difference(self, path: str, rows: NDArray[np.int64], first: int) -> str:
        """How a shard differs from its source; "" if it does not."""
        try:
            index = self.kind.scan(path)
        except SourceError as error:
            return error.reason
        if index.damage:
            return index.damage
        entries = self.kind.entries(index)
        if len(entries) != len(rows):
            return f"{len(entries):,} samples, and not {len(rows):,}"
        with open(path, "rb") as file:
            samples = self._samples(rows, first, count=True)
            for (name, begin, length, label), sample in zip(entries, samples, strict=True):
                file.seek(begin)
                if name != self.kind.name(sample) or label != str(sample.label):
                    return f"another name or label of {name}"
                if length != len(sample.content) or file.read(length) != sample.content:
                    return f"another image {name}"
        return ""


def _flush_folder(folder: str) -> None:
    """Makes a rename last over a crash of the machine."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
