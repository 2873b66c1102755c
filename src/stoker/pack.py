"""Images of any source into packed sets: written whole or not at all, read again before they count.

Note [Interrupted packing]
    What is in which shard follows from the source and the arguments alone, and so do the bytes of
    each shard. A shard is written under another name, flushed to the disk, read again and compared
    with its source, and only then renamed. So whenever packing is stopped, whatever carries a final
    name is whole; packing again compares it with the source and writes what is missing. A file in
    the way that is not what would be written is an error, and stays as it is. An LMDB environment
    and a folder of images, which are one shard, go on where they were, and are compared as a whole.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.order import Order
from stoker.shrink import Shrink
from stoker.sources import filelist, lmdb, parquet, tar, tfrecord
from stoker.sources.index import Files, Images
from stoker.sources.shards import Sample, Written

Progress = Callable[[int, int], None]
"""Is told samples and bytes that are done."""

_Samples = Callable[[int], Iterator[Sample]]
"""The samples of a shard, from a place on."""

_DIGEST_BYTES = 16
_NUMBER = re.compile(r"%0?\d*d")


@dataclass(frozen=True)
class _Format:
    """A format that can be written.

    Attributes:
        write: a shard at a path.
        written: the images of such a shard.
        name: of a sample's image in its shard.
        shards: whether a set may be several shards.
    """

    write: Callable[[str, _Samples], None]
    written: Callable[[str], Iterator[Written]]
    name: Callable[[Sample], str]
    shards: bool = True


def _file(write: Callable[[BinaryIO, Iterator[Sample]], None]) -> Callable[[str, _Samples], None]:
    """Writes a shard that is a file."""

    def to(path: str, samples: _Samples) -> None:
        with open(path, "wb") as file:
            write(file, samples(0))
            file.flush()
            os.fsync(file.fileno())

    return to


FORMATS = {
    ".tar": _Format(_file(tar.write), tar.written, tar.member_name),
    ".tfrecord": _Format(_file(tfrecord.write), tfrecord.written, lambda sample: sample.name),
    ".parquet": _Format(_file(parquet.write), parquet.written, parquet.path_of),
    ".lmdb": _Format(lmdb.write, lmdb.written, lmdb.key_of, shards=False),
    ".csv": _Format(filelist.write, filelist.written, filelist.name_of, shards=False),
}
"""The formats by the suffix of their shards."""


@dataclass(frozen=True)
class Packed:
    """What was packed.

    Attributes:
        shards: paths, in order; of a part only its own.
        samples: how many.
        image_bytes: of encoded images, as they were written.
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
    shrink: Shrink | None = None,
    jobs: int = 2,
    on: Literal["threads", "ray"] = "threads",
    part: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
) -> Packed:
    """Writes the encoded images of ``source``, byte for byte, and their labels into a packed set.

    Args:
        source: images with labels; their transforms play no part.
        target: the path of the shards, with a ``%06d`` or the like for their number; without, one
            shard takes all. Its suffix says the format, see ``FORMATS``; without one, or with a
            final slash, it is a folder for images and their label file, ``labels.csv``.
        shard_bytes: a shard ends before the image that would make its images more than that.
        shuffle: the seed of a random order; left out, the order is the source's.
        shrink: how large images may be; larger ones are encoded anew. Shards then get about
            ``shard_bytes``.
        jobs: shards that are worked on at once.
        on: ``"threads"`` of this process, or ``"ray"``: tasks of a Ray cluster, which must see the
            paths of source and target; the one that ``RAY_ADDRESS`` names, else one that is started
            here.
        part: ``(k, n)``: of the shards only every n-th, from number k on; n machines that are told
            0 to n - 1 write the whole set, in any order and each for itself.
        progress: is called now and then, from several threads.

    Raises:
        SourceError: an image cannot be read; a file is in the way.
        OSError: a shard cannot be written. Packing again goes on from there.
        ValueError: the arguments do not fit.
        ImportError: the format, or Ray, needs an extra.
    """
    begun = time.monotonic()
    target = os.path.expanduser(os.fspath(target))
    suffix = os.path.splitext(target)[1]
    if not suffix or target.endswith("/"):
        target, suffix = os.path.join(target, "labels.csv"), ".csv"
    kind = FORMATS.get(suffix)
    if kind is None:
        known = ", ".join(FORMATS)
        raise ValueError(f"{target!r} must end in one of {known}, or be a folder: end in /")
    if len(_NUMBER.findall(os.path.basename(target))) != target.count("%"):
        raise ValueError(f"{target!r} must hold one %06d or the like in its file name, or none")
    if "%" in target and not kind.shards:
        raise ValueError(f"a set in {suffix} is one, so {target!r} must hold no number")
    if shard_bytes < 1 or jobs < 1:
        raise ValueError(f"shard_bytes={shard_bytes} and jobs={jobs} must be positive")
    if on not in ("threads", "ray"):
        raise ValueError(f"on={on!r}: expected 'threads' or 'ray'")
    if not 0 <= part[0] < part[1] or (part[1] > 1 and "%" not in target):
        raise ValueError(f"part={part}: expected (k, n) with 0 <= k < n, and a %06d in the target")
    if source.files.labels is None:
        raise ValueError("the images have boxes, and shards have room for one label each")
    rows = np.arange(len(source), dtype=np.int64)
    if shuffle is not None:
        rows = Order(len(source), shuffle, True).indices(0, 0, len(source))
    lengths = _lengths(source.files, shrink, jobs)[rows]
    parts = _parts(rows, lengths, shard_bytes if "%" in target else None)
    paths = [target % number if "%" in target else target for number in range(len(parts))]
    _refuse_others(target, paths)
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    mine = slice(part[0], None, part[1])
    _refuse_a_full_disk(target, paths, parts, lengths, mine)
    work = _Work(source.files, list(getattr(source, "classes", [])), suffix, shrink)
    firsts = np.cumsum([0, *map(len, parts)]).tolist()
    tasks = list(zip(paths, parts, firsts, strict=False))[mine]
    run = _in_threads if on == "threads" else _on_ray
    done = run(work, tasks, jobs, _Told(progress))
    return Packed(
        paths[mine],
        sum(map(len, parts[mine])),
        sum(shard.image_bytes for shard in done),
        sum(map(_size, paths[mine])),
        sum(shard.found for shard in done),
        time.monotonic() - begun,
    )


def _lengths(files: Files, shrink: Shrink | None, jobs: int) -> NDArray[np.int64]:
    """Bytes of each sample's image, or about so many where they are made smaller."""
    if files.extents is not None and shrink is None:
        return files.extents.length

    def length(row: int) -> int:
        try:
            if shrink is None:
                return os.stat(files.path(row)).st_size
            with files.opened(row) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                return shrink.estimate(file, size)
        except Exception as error:  # Pillow raises a dozen kinds for damaged files
            raise _unreadable(files, row, error) from error

    with ThreadPoolExecutor(4 * jobs, "stoker-pack") as pool:
        return np.fromiter(pool.map(length, range(len(files))), np.int64, len(files))


def _unreadable(files: Files, row: int, error: Exception) -> SourceError:
    return SourceError(files.path(row), getattr(error, "strerror", None) or str(error))


def _size(path: str) -> int:
    """Bytes of a shard, a file or a folder with files."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path))


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
    target: str,
    paths: list[str],
    parts: list[NDArray[np.int64]],
    lengths: NDArray[np.int64],
    mine: slice,
) -> None:
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    shards = list(zip(paths, ends, ends[1:], strict=False))[mine]
    needed = sum(
        int(lengths[first:end].sum()) for path, first, end in shards if not os.path.exists(path)
    )
    free = shutil.disk_usage(os.path.dirname(target) or ".").free
    if needed > free:
        raise SourceError(target, f"needs {needed:,} bytes, and {free:,} are free there")


@dataclass(frozen=True)
class _Shard:
    """What became of a shard.

    Attributes:
        samples: in it.
        image_bytes: of them.
        found: it was there already.
    """

    samples: int
    image_bytes: int
    found: bool


class _Told:
    """Adds up what is done, for ``progress``."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._samples = self._bytes = 0
        self._counting = threading.Lock()

    def add(self, samples: int, image_bytes: int) -> None:
        """Tells of some more."""
        with self._counting:
            self._samples += samples
            self._bytes += image_bytes
            if self._progress is not None:
                self._progress(self._samples, self._bytes)


_Task = tuple[str, NDArray[np.int64], int]
"""A shard's path, its rows, and the position of its first sample."""


def _in_threads(work: _Work, tasks: list[_Task], jobs: int, told: _Told) -> list[_Shard]:
    """Does the tasks in threads of this process."""
    with ThreadPoolExecutor(jobs, "stoker-pack") as pool:
        waiting = [pool.submit(work.shard, *task, told) for task in tasks]
        try:
            return [job.result() for job in waiting]
        except BaseException:
            work.stopped = True
            pool.shutdown(cancel_futures=True)
            raise


def _on_ray(work: _Work, tasks: list[_Task], jobs: int, told: _Told) -> list[_Shard]:
    """Does the tasks on a Ray cluster, ``jobs`` at once, in any order."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("packing on Ray needs an extra: pip install 'stoker[ray]'") from error
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False)
    try:
        shared = ray.put(work)
        remote: Any = ray.remote(_shard)
        left = list(enumerate(tasks))[::-1]
        running: dict[Any, int] = {}
        done: dict[int, _Shard] = {}
        while left or running:
            while left and len(running) < jobs:
                number, (path, rows, first) = left.pop()
                path = os.path.abspath(path)  # tasks run in folders of their own
                running[remote.remote(shared, path, rows, first)] = number
            (ready,), _ = ray.wait(list(running))
            number = running.pop(ready)
            try:
                done[number] = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            told.add(done[number].samples, done[number].image_bytes)
        return [done[number] for number in range(len(tasks))]
    finally:
        if started:
            ray.shutdown()


def _shard(work: _Work, path: str, rows: NDArray[np.int64], first: int) -> _Shard:
    return work.shard(path, rows, first, _Told(None))


@dataclass
class _Work:
    """What all shards of a packing have in common.

    Attributes:
        files: the source's images.
        classes: names of its labels.
        suffix: of the format.
        shrink: how large images may be.
        stopped: samples are no longer wanted.
    """

    files: Files
    classes: list[str]
    suffix: str
    shrink: Shrink | None
    stopped: bool = False

    def shard(self, path: str, rows: NDArray[np.int64], first: int, told: _Told) -> _Shard:
        """Writes a shard, or finds it there."""
        if os.path.exists(path):
            difference, image_bytes = self._compare(path, rows, first, _Digests(len(rows)), told)
            if difference:
                raise SourceError(
                    path,
                    f"is in the way, and not what would be written ({difference}): remove it, or "
                    "choose another name",
                )
            return _Shard(len(rows), image_bytes, True)
        temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.part")
        digests = _Digests(0)

        def samples(place: int) -> Iterator[Sample]:
            digests.first = place
            for sample in self._samples(rows[place:], first + place):
                digests.all += self._digest(sample)
                yield sample

        try:
            FORMATS[self.suffix].write(temporary, samples)
            difference, image_bytes = self._compare(temporary, rows, first, digests, told)
            if difference:
                if os.path.isdir(temporary):
                    shutil.rmtree(temporary)
                raise SourceError(path, f"was read back otherwise than written: {difference}")
            os.replace(temporary, path)
            _flush_folder(os.path.dirname(path) or ".")
        except BaseException:
            if os.path.isfile(temporary):  # a folder is gone on with
                os.unlink(temporary)
            raise
        return _Shard(len(rows), image_bytes, False)

    def _samples(self, rows: NDArray[np.int64], first: int) -> Iterator[Sample]:
        files = self.files
        assert files.labels is not None
        for position, row in enumerate(rows.tolist(), first):
            if self.stopped:
                raise InterruptedError
            try:
                with files.opened(row) as file:
                    content = file.read()
                if files.extents is not None and len(content) != files.extents.length[row]:
                    raise OSError("its shard is shorter than when it was opened")
                name = files.name(row)
                if self.shrink is not None:
                    name, content = self.shrink.apply(name, content)
            except Exception as error:  # Pillow raises a dozen kinds for damaged files
                raise _unreadable(files, row, error) from error
            label = int(files.labels[row])
            named = 0 <= label < len(self.classes)
            class_name = self.classes[label] if named else ""
            yield Sample(position, name, content, label, class_name, self.classes)

    def _digest(self, sample: Sample) -> bytes:
        """What a sample must be in its shard."""
        return _digest(FORMATS[self.suffix].name(sample), str(sample.label), sample.content)

    def _compare(
        self, path: str, rows: NDArray[np.int64], first: int, digests: _Digests, told: _Told
    ) -> tuple[str, int]:
        """How a shard differs from its source, "" if it does not, and the bytes of its images."""
        try:
            images = FORMATS[self.suffix].written(path)
        except SourceError as error:
            return error.reason, 0
        number = image_bytes = 0
        with ExitStack() as stack:
            file: BinaryIO | None = None
            for number, image in enumerate(images, 1):
                if number > len(rows):
                    return f"more than {len(rows):,} samples", 0
                if file is None or file.name != image.file:
                    stack.close()
                    file = stack.enter_context(open(image.file, "rb"))
                file.seek(image.begin)
                found = _digest(image.name, image.label, file.read(image.length))
                expected = digests.at(number - 1)
                if expected is None:  # not written now
                    row = rows[number - 1 : number]
                    expected = self._digest(next(self._samples(row, first + number - 1)))
                if found != expected:
                    return f"another image, label or name: {image.name}", 0
                image_bytes += image.length
                told.add(1, image.length)
        if number < len(rows):
            return f"{number:,} samples, and not {len(rows):,}", 0
        return "", image_bytes


@dataclass
class _Digests:
    """Of the samples of a shard, from the place ``first`` on, what they must be."""

    first: int
    all: bytearray = field(default_factory=bytearray)

    def at(self, place: int) -> bytes | None:
        """That of a place; None before the first."""
        begin = _DIGEST_BYTES * (place - self.first)
        return bytes(self.all[begin : begin + _DIGEST_BYTES]) if begin >= 0 else None


def _digest(name: str, label: str, content: bytes) -> bytes:
    digest = hashlib.blake2b(
        f"{name}\0{label}\0".encode(errors="surrogateescape"), digest_size=_DIGEST_BYTES
    )
    digest.update(content)
    return digest.digest()


def _flush_folder(folder: str) -> None:
    """Makes a rename last over a crash of the machine."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
