"""Images in few large files, whatever their format: patterns, indexes, labels, the dataset.

Note [Kept indexes]
    What is in a shard is kept in the cache folder, under a hash of the shard's path and of what was
    looked for, or on request beside the shard, in a hidden file; it is looked for in both places.
    It serves as long as the shard has its size and time of change. It isn't kept when
    something is damaged, nor when the shard was changed in the two seconds before, as a further
    change could leave the time as it is. On disk it is, little-endian: ``_MAGIC``; int64 size and
    time of the shard in ns, number of entries, bytes of names, bytes of texts; where each entry
    begins and how long it is, int64; where each name ends, uint32; how long each text is, or -1,
    int32; the names; the texts; a BLAKE2b of 16 bytes over all that.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import struct
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker import cache as kept
from stoker.copies import at_hand, ranged
from stoker.errors import SourceError
from stoker.sources.index import IMAGE_EXTENSIONS, Extents, Files, Images, Names, warn

MOST_SHARDS = 1_000_000

WRITTEN_SUFFIXES = (*IMAGE_EXTENSIONS, ".gif", ".avif", ".jp2", ".jpe", ".jfif")
"""What the name of an image in a shard ends with."""

_MAGICS = {b"\xff\xd8": ".jpg", b"\x89PNG": ".png", b"GIF8": ".gif", b"BM": ".bmp", b"II*": ".tif"}
_PIXELS = {b"P5\n": ".pgm", b"P6\n": ".ppm"}
_MAGIC = b"stoker index 1"
_HEAD = struct.Struct("<5q")
_DIGEST_BYTES = 16
_THREADS = 8
_SILENT_SECONDS = 2
_SETTLED_SECONDS = 2


class Sharded(Images):
    """A map-style dataset of images in shards, at random access.

    Attributes:
        shards: the shards' paths.
        classes: names of the classes, each at its label; none where labels are integers.
        targets: the labels; -1 where a sample has none.
    """

    def __init__(
        self,
        shards: list[str],
        found: Found,
        classes: Sequence[str] | None,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
        exif: bool,
        max_pixels: int | None,
        max_bytes: int | None,
    ) -> None:
        self.shards = shards
        labels, self.classes = found.labelled(classes)
        names = [os.fsencode(name) for name in found.names]
        offsets = np.zeros(len(names) + 1, np.uint64)
        np.cumsum([len(name) for name in names], out=offsets[1:])
        extents = Extents(
            Files.from_paths(shards),
            np.array(found.shards, np.uint32),
            np.array(found.begins, np.int64),
            np.array(found.lengths, np.int64),
        )
        blob = np.frombuffer(b"".join(names), np.uint8)
        files = Files("", blob, offsets, labels, exif, max_pixels, max_bytes, extents)
        super().__init__(files, transform, target_transform)
        for warning in found.told:
            warn(warning)

    @property
    def names(self) -> Names:
        """Name of each sample's image in its shard."""
        return Names(self.files)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class name to label."""
        return {name: label for label, name in enumerate(self.classes)}


@dataclass
class Found:
    """Samples, gathered shard by shard.

    Attributes:
        names: of the images.
        shards, begins, lengths: where their bytes are.
        labels: as they were found, text or integer; None where there is none.
        told: warnings.
    """

    names: list[str] = field(default_factory=list)
    shards: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    labels: list[str | int | None] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def add(self, name: str, shard: int, begin: int, length: int, label: str | int | None) -> None:
        """Adds a sample."""
        self.names.append(name)
        self.shards.append(shard)
        self.begins.append(begin)
        self.lengths.append(length)
        self.labels.append(label)

    def labelled(self, classes: Sequence[str] | None) -> tuple[NDArray[np.int64], list[str]]:
        """Label of each sample, -1 where it has none, and the names of the classes."""
        given = {label for label in self.labels if label is not None}
        pairs = zip(self.names, self.labels, strict=True)
        lacking = [name for name, label in pairs if label is None]
        if lacking and given:
            self.told.append(f"{some(lacking)} without a label: -1 is theirs")
        places = {label: _integer(label) for label in given}
        names: list[str] = []
        if None in places.values() or classes is not None:
            names = list(classes) if classes is not None else sorted(set(map(str, given)))
            known = {name: place for place, name in enumerate(names)}
            places = {label: known.get(str(label)) for label in given}
            unknown = sorted(str(label) for label, place in places.items() if place is None)
            if unknown:
                raise ValueError(f"classes lack {', '.join(map(repr, unknown[:5]))}")
        labels = [-1 if label is None else places[label] for label in self.labels]
        return np.array(labels, np.int64), names


@dataclass(frozen=True)
class Sample:
    """A sample that is to be written.

    Attributes:
        position: its place in the whole set.
        name: of its image, where it came from.
        content: the encoded image.
        label: -1 where it has none.
        class_name: that of the label; "" where it has none.
        classes: the names of all classes, each at its label.
    """

    position: int
    name: str
    content: bytes
    label: int
    class_name: str
    classes: Sequence[str] = ()

    @property
    def suffix(self) -> str:
        """That of its format: by its name or else, by its content, of the usual ones."""
        suffix = os.path.splitext(self.name)[1].lower()
        if self.content[:3] in _PIXELS:  # of which the name says what they were before
            return _PIXELS[self.content[:3]]
        if suffix in WRITTEN_SUFFIXES:
            return suffix
        head = self.content[:12]
        fits = (suffix for magic, suffix in _MAGICS.items() if head.startswith(magic))
        return ".webp" if head[:4] == b"RIFF" and head[8:] == b"WEBP" else next(fits, ".jpg")


@dataclass(frozen=True, slots=True)
class Written:
    """An image of a written set.

    Attributes:
        name: what it is called there.
        file: where its bytes are.
        begin: where in it.
        length: how many.
        label: as a text; "-1" where it has none.
    """

    name: str
    file: str
    begin: int
    length: int
    label: str


def written(file: str, index: Index) -> Iterator[Written]:
    """The images in a shard whose entries are images with their label as a text.

    Raises:
        SourceError: it is damaged.
    """
    if index.damage:
        raise SourceError(file, index.damage)
    return (
        Written(name, file, begin, length, "-1" if text is None else text.decode(errors="replace"))
        for name, begin, length, text in index.entries()
    )


def some(keys: list[str]) -> str:
    """How many samples, and which."""
    shown = ", ".join(keys[:3]) + ", ..." * (len(keys) > 3)
    return f"{len(keys):,} samples ({shown})" if len(keys) > 1 else f"sample {shown}"


def _integer(text: Any) -> int | None:
    """The integer that a label is; None for others and those beyond 64 bits."""
    if isinstance(text, bool) or not isinstance(text, int | str):
        return None
    if isinstance(text, str) and not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        return None
    value = int(text)
    return value if -(1 << 63) <= value < 1 << 63 else None


# Which shards


def paths_of(shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """The shards that patterns stand for, in the order of the patterns; those of a ``*`` sorted.

    Raises:
        SourceError: nothing fits a pattern.
    """
    patterns = [shards] if isinstance(shards, str | os.PathLike) else list(shards)
    found: list[str] = []
    for pattern in patterns:
        for path in expanded(os.path.expanduser(os.fspath(pattern))):
            if len(found) >= MOST_SHARDS:
                raise SourceError(str(pattern), f"stands for more than {MOST_SHARDS:,} shards")
            if not glob.has_magic(path) or os.path.exists(path):
                found.append(path)
                continue
            fitting = sorted(glob.glob(path, recursive=True))
            if not fitting:
                raise SourceError(path, "no file fits this pattern")
            found += fitting
    if not found:
        raise SourceError(str(shards), "names no shard")
    return found


_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expanded(pattern: str) -> Iterator[str]:
    """What the braces in a pattern stand for, as in a shell."""
    brace = re.search(r"\{([^{}]*)\}", pattern)
    if brace is None:
        yield pattern
        return
    numbers = _RANGE.fullmatch(brace[1])
    if numbers is None and "," not in brace[1]:
        yield pattern
        return
    if numbers is None:
        texts: Iterator[str] = iter(brace[1].split(","))
    else:
        first, last = int(numbers[1]), int(numbers[2])
        step = 1 if first <= last else -1
        width = max(map(len, numbers.groups())) if "0" in (numbers[1][0], numbers[2][0]) else 0
        texts = (f"{number:0{width}}" for number in range(first, last + step, step))
    for text in texts:
        yield from expanded(pattern[: brace.start()] + text + pattern[brace.end() :])


# What is in them


@dataclass
class Index:
    """What is in a shard: entries with a name, some bytes and perhaps a text.

    Attributes:
        begins, lengths: of the entries' bytes.
        names: one after the other.
        ends: where each name ends.
        texts: one after the other.
        text_lengths: how long each text is; -1 where there is none.
        damage: what cannot be read; empty where nothing is wrong.
    """

    begins: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("I"))
    text_lengths: array[int] = field(default_factory=lambda: array("i"))
    names: bytearray = field(default_factory=bytearray)
    texts: bytearray = field(default_factory=bytearray)
    damage: str = ""

    def add(self, name: bytes, begin: int, length: int, text: bytes | None) -> None:
        """Adds an entry."""
        self.begins.append(begin)
        self.lengths.append(length)
        self.names += name
        self.ends.append(len(self.names))
        self.text_lengths.append(-1 if text is None else len(text))
        self.texts += text or b""

    def entries(self) -> Iterator[tuple[str, int, int, bytes | None]]:
        """Name, begin, length and text of each entry."""
        at = 0
        bounds = pairwise([0, *self.ends])
        numbers = zip(bounds, self.begins, self.lengths, self.text_lengths, strict=True)
        for (start, end), begin, length, text_length in numbers:
            text = None
            if text_length >= 0:
                text = bytes(self.texts[at : at + text_length])
                at += text_length
            yield os.fsdecode(bytes(self.names[start:end])), begin, length, text


Cache = bool | Literal["beside"]
"""Whether indexes are kept: in the cache folder, or beside their shards."""


def indexes(
    paths: list[str], scan: Callable[[str], Index], wanted: str, damaged: str, cache: Cache
) -> tuple[list[Index], list[str]]:
    """What is in each shard, read in threads, with progress; and warnings about it.

    Args:
        paths: the shards.
        scan: reads one.
        wanted: what ``scan`` looks for, as part of the kept index's name.
        damaged: "raise", or "skip" to warn of what is damaged.
        cache: keep them.

    Raises:
        SourceError: a shard cannot be read, or is damaged.
    """
    if damaged not in ("raise", "skip"):
        raise ValueError(f"damaged must be 'raise' or 'skip', got {damaged!r}")
    if cache not in (True, False, "beside"):
        raise ValueError(f"cache must be True, False or 'beside', got {cache!r}")
    with ThreadPoolExecutor(_THREADS, "stoker-indexing") as pool:
        jobs = [pool.submit(_index, path, scan, wanted, cache) for path in paths]
        try:
            _show_progress(jobs)
            found = [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    told = []
    for path, index in zip(paths, found, strict=True):
        if index.damage and damaged == "raise":
            whole = f"{len(index.begins):,} are whole, damaged='skip' keeps those"
            raise SourceError(path, f"{index.damage}; {whole}")
        if index.damage:
            told.append(f"{path}: {index.damage}; what is damaged is left out")
    return found, told


def _show_progress(jobs: list[Future[Index]]) -> None:
    """Waits for ``jobs``; on a terminal, shows how far they are once that takes long."""
    _, left = wait_for(jobs, _SILENT_SECONDS)
    if not left or not sys.stderr.isatty():
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("Indexing shards"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        while left:
            _, left = wait_for(left, 0.2)
            progress.update(task, completed=len(jobs) - len(left))


# Keeping


def _index(path: str, scan: Callable[[str], Index], wanted: str, cache: Cache) -> Index:
    """The index of a shard, from where it is kept if that is still right."""
    if not cache:
        with at_hand(path):
            return scan(path)
    absolute = os.path.abspath(path)
    folder, name = os.path.split(absolute)
    beside = os.path.join(folder, f".{name}.{_hashed(wanted)[:8]}.stoker")
    central = "shards/" + _hashed(f"{absolute}\0{wanted}")
    state = _state(path)
    for place in (beside,) if cache == "beside" else (central, beside):
        if (data := kept.load(place)) is not None and (index := _unpacked(data, state)) is not None:
            return index
    settled = time.time_ns() - int(_SETTLED_SECONDS * 1e9)
    with at_hand(path):
        index = scan(path)
    if not index.damage and state[1] < settled:
        kept.store(beside if cache == "beside" else central, _packed(index, state))
    return index


def _hashed(text: str) -> str:
    return hashlib.blake2b(os.fsencode(text), digest_size=16).hexdigest()


def _state(path: str) -> tuple[int, int]:
    """Size of a shard, and its time of change in ns."""
    if (copies := ranged(path)) is not None:
        return copies.state_of(path)
    try:
        status = os.stat(path)
    except OSError as error:
        raise SourceError(path, error.strerror or str(error)) from error
    return status.st_size, status.st_mtime_ns


def _packed(index: Index, state: tuple[int, int]) -> list[bytes]:
    """An index as Note [Kept indexes] describes it."""
    head = _HEAD.pack(*state, len(index.begins), len(index.names), len(index.texts))
    columns = (
        (index.begins, "<i8"),
        (index.lengths, "<i8"),
        (index.ends, "<u4"),
        (index.text_lengths, "<i4"),
    )
    arrays = [np.array(values, kind).tobytes() for values, kind in columns]
    parts = [_MAGIC, head, *arrays, bytes(index.names), bytes(index.texts)]
    digest = hashlib.blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).digest()
    return [*parts, digest]


def _unpacked(data: bytes, state: tuple[int, int]) -> Index | None:
    """The index in ``data``; None if it is not of that state, or anything about it is odd."""
    start = len(_MAGIC) + _HEAD.size
    if len(data) < start + _DIGEST_BYTES or not data.startswith(_MAGIC):
        return None
    *found, count, names, texts = _HEAD.unpack_from(data, len(_MAGIC))
    if tuple(found) != state or min(count, names, texts) < 0:
        return None
    if start + 24 * count + names + texts + _DIGEST_BYTES != len(data):
        return None
    body = data[:-_DIGEST_BYTES]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != data[-_DIGEST_BYTES:]:
        return None
    begins = np.frombuffer(data, "<i8", count, start)
    lengths = np.frombuffer(data, "<i8", count, start + 8 * count)
    ends = np.frombuffer(data, "<u4", count, start + 16 * count)
    text_lengths = np.frombuffer(data, "<i4", count, start + 20 * count)
    if count and not (
        0 <= begins.min() <= begins.max() <= state[0]
        and 0 <= lengths.min() <= lengths.max() <= state[0]
        and int((begins + lengths).max()) <= state[0]
        and (ends[1:] >= ends[:-1]).all()
        and int(ends[-1]) == names
        and int(text_lengths.min()) >= -1
        and int(np.maximum(text_lengths, 0).sum(dtype=np.int64)) == texts
    ):
        return None
    at = start + 24 * count
    return Index(
        array("q", begins.astype(np.int64).tobytes()),
        array("q", lengths.astype(np.int64).tobytes()),
        array("I", ends.astype(np.uint32).tobytes()),
        array("i", text_lengths.astype(np.int32).tobytes()),
        bytearray(data[at : at + names]),
        bytearray(data[at + names : at + names + texts]),
    )
