"""Which files a data set has: a compact table of paths and labels, and opening one of them.

A million paths as Python strings cost over 100 MB and are touched, hence copied, by every forked
worker. Here they are three arrays: one blob of encoded names, 8 bytes of offset and 8 of label per
sample. What users expect to be lists (`img_names`, `samples`) are views that make a string when
asked for one.

Note [Tables in spawned workers]
    A worker that is spawned gets its dataset pickled. While a process is being spawned, a table of
    more than a megabyte pickles as the name of a temporary file, written once and removed with the
    table; workers map it. At any other time, and below that size, a table pickles by value.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.context import get_spawning_popen
from typing import Any, BinaryIO, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps
from torch.utils.data import Dataset

from stoker.copies import Copies
from stoker.errors import DecodeError, StokerWarning

T = TypeVar("T")

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""What torchvision's ImageFolder takes for an image."""

_HEIF_EXTENSIONS = (".heic", ".heif")
_SHARED_BYTES = 1 << 20
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class Extents:
    """Where the bytes of each row of a table are, if many lie in one file.

    Attributes:
        shards: the files.
        shard: which of them, uint32 of shape (n,).
        begin: where in it, int64 of shape (n,).
        length: how many bytes, int64 of shape (n,).
        copies: the remote objects that the files are copies of; None where they are none.
    """

    shards: Files
    shard: NDArray[np.uint32]
    begin: NDArray[np.int64]
    length: NDArray[np.int64]
    copies: Copies | None = None

    def select(self, rows: NDArray[np.int64]) -> Extents:
        """Those of some rows, in the order of ``rows``."""
        return replace(
            self, shard=self.shard[rows], begin=self.begin[rows], length=self.length[rows]
        )

    def same_as(self, other: Extents) -> bool:
        """True where both name the same bytes, of the same remote objects if they are remote."""
        mine, its = self.shards, other.shards
        if self.copies is not other.copies:
            return False
        return (mine.root, mine.names.tobytes()) == (its.root, its.names.tobytes()) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("shard", "begin", "length")
        )


@dataclass(frozen=True, eq=False)
class Files:
    """A table of images: path of row i = ``root`` + name i, or the bytes that ``extents`` says.

    Attributes:
        root: what all paths begin with; a folder with its final slash, or empty.
        names: the rest of each path as ``os.fsencode`` gives it, one after the other, uint8.
        offsets: where each name begins and, one longer, ends; ascending, uint64 of shape (n + 1,).
        labels: int64 of shape (n,), or None.
        upright: turn images as their EXIF orientation says.
        max_pixels: refuse to decode images of more.
        max_bytes: refuse to read files of more.
        extents: where the rows' bytes are, which then have names, but no files of their own.
    """

    root: str
    names: NDArray[np.uint8]
    offsets: NDArray[np.uint64]
    labels: NDArray[np.int64] | None = None
    upright: bool = False
    max_pixels: int | None = None
    max_bytes: int | None = None
    extents: Extents | None = None

    def __post_init__(self) -> None:
        for limit in ("max_pixels", "max_bytes"):
            value = getattr(self, limit)
            if value is not None and value < 1:
                raise ValueError(f"{limit} must be positive or None, got {value!r}")

    @classmethod
    def from_paths(cls, paths: Sequence[str], labels: Sequence[int] | None = None) -> Files:
        """The table of ``paths``, which it gives back exactly as they are."""
        # The folder that the first and the last in order share is shared by all between them.
        first, last = (min(paths), max(paths)) if paths else ("", "")
        same = next((i for i in range(len(first)) if first[: i + 1] != last[: i + 1]), len(first))
        root = first[: first.rfind("/", 0, same) + 1]
        encoded = [os.fsencode(path[len(root) :]) for path in paths]
        offsets = np.zeros(len(paths) + 1, np.uint64)
        np.cumsum([len(name) for name in encoded], out=offsets[1:])
        names = np.frombuffer(bytearray().join(encoded), np.uint8)
        table = None if labels is None else np.array(labels, np.int64)
        return cls(root, names, offsets, table)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def encoded_name(self, row: int) -> bytes:
        """Name of ``row``, which must be in [0, n), without ``root``."""
        return self.names[int(self.offsets[row]) : int(self.offsets[row + 1])].tobytes()

    def name(self, row: int) -> str:
        """Name of ``row``, which must be in [0, n), without ``root``."""
        return os.fsdecode(self.encoded_name(row))

    def path(self, row: int) -> str:
        """Path of ``row``, which must be in [0, n); of its shard, a colon and its name there."""
        if self.extents is None:
            return self.root + self.name(row)
        shard, copies = int(self.extents.shard[row]), self.extents.copies
        path = self.extents.shards.path(shard)
        return f"{path if copies is None else copies.url_of(path)}:{self.name(row)}"

    def paths(
        self,
    ) -> tuple[Files, tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]] | None]:
        """The files that are read, and which bytes of which; None: row i is all of file i."""
        extents = self.extents
        if extents is None:
            return self, None
        return extents.shards, (extents.shard, extents.begin, extents.length)

    def select(self, rows: NDArray[np.int64]) -> Files:
        """The table of some rows, in the order of ``rows``."""
        starts = self.offsets[:-1][rows].astype(np.int64)
        lengths = self.offsets[1:][rows].astype(np.int64) - starts
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        names = np.empty(int(offsets[-1]), np.uint8)
        for begin in range(0, len(rows), _ROWS_AT_ONCE):
            end = min(begin + _ROWS_AT_ONCE, len(rows))
            shift = np.repeat(starts[begin:end] - offsets[begin:end], lengths[begin:end])
            to = slice(int(offsets[begin]), int(offsets[end]))
            names[to] = self.names[np.arange(to.start, to.stop) + shift]
        return replace(
            self,
            names=names,
            offsets=offsets.astype(np.uint64),
            labels=None if self.labels is None else self.labels[rows],
            extents=None if self.extents is None else self.extents.select(rows),
        )

    def opened(self, row: int) -> BinaryIO:
        """The bytes of ``row``, as a file.

        Raises:
            OSError: they cannot be read.
            ValueError: they are more than ``max_bytes``.
        """
        extents = self.extents
        if extents is None:
            path = self.path(row)
            if path.lower().endswith(_HEIF_EXTENSIONS):
                _register_heif()
            file: BinaryIO = open(path, "rb")  # noqa: SIM115  the caller's to close
            try:
                self._check(os.fstat(file.fileno()).st_size)
            except ValueError:
                file.close()
                raise
            return file
        length = int(extents.length[row])
        self._check(length)
        path, begin = extents.shards.path(int(extents.shard[row])), int(extents.begin[row])
        if extents.copies is not None and extents.copies.ranged:
            return io.BytesIO(extents.copies.read(path, begin, length))
        with open(path, "rb") as shard:
            shard.seek(begin)
            return io.BytesIO(shard.read(length))

    def _check(self, size: int) -> None:
        if self.max_bytes is not None and size > self.max_bytes:
            raise ValueError(f"{size:,} bytes, more than max_bytes={self.max_bytes:,}")

    def open(self, row: int, index: int | None = None, content: bytes | None = None) -> Image.Image:
        """The image of ``row``, decoded, mode RGB: what torchvision's default loader gives.

        ``index`` is the sample's, if not ``row``; ``content`` its bytes, where they are at hand.

        Raises:
            DecodeError: it cannot be opened or decoded, or it exceeds a limit.
        """
        try:
            with self.opened(row) if content is None else io.BytesIO(content) as file:
                image: Image.Image = Image.open(file)
                pixels = image.width * image.height
                if self.max_pixels is not None and pixels > self.max_pixels:
                    raise ValueError(
                        f"{image.width} x {image.height} pixels, more than "
                        f"max_pixels={self.max_pixels:,}"
                    )
                if self.upright:
                    image = ImageOps.exif_transpose(image)
                return image.convert("RGB")
        except Exception as error:  # Pillow's codecs raise a dozen kinds for damaged files
            # Pillow names the file object, too, and where that is in memory.
            reason = str(error).partition(" <_io.")[0] or type(error).__name__
            place = row if index is None else index
            raise DecodeError(place, self.path(row), reason) from error

    def size(self, row: int) -> tuple[int, int]:
        """(height, width) of ``open(row)``, from the header alone; raises what Pillow raises."""
        with self.opened(row) as file, Image.open(file) as image:
            turned = self.upright and image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
            return image.size if turned else (image.height, image.width)

    def __getstate__(self) -> dict[str, Any]:
        """The fields; while a process is spawned, big arrays by the name of a file they are in."""
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if get_spawning_popen() is None or self.names.nbytes < _SHARED_BYTES:
            return state
        for name in ("names", "offsets", "labels"):
            if state[name] is not None:
                state[name] = _shared(self, name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if isinstance(value, str) and name != "root":
                value = np.load(value, mmap_mode="r", allow_pickle=False)
            object.__setattr__(self, name, value)


def _shared(files: Files, name: str) -> str:
    """Path of a temporary file with one array of ``files``; Note [Tables in spawned workers]."""
    written: dict[str, str] = files.__dict__.setdefault("_written", {})
    if name not in written:
        handle, path = tempfile.mkstemp(prefix="stoker-", suffix=".npy")
        weakref.finalize(files, _remove, path, os.getpid())
        with os.fdopen(handle, "wb") as file:
            np.save(file, getattr(files, name), allow_pickle=False)
        written[name] = path
    return written[name]


def _remove(path: str, process: int) -> None:
    """Removes a shared file in the process that wrote it, not in its forked children."""
    if os.getpid() == process:
        with suppress(OSError):  # someone tidied up, or a worker still maps it (Windows)
            os.unlink(path)


@lru_cache(maxsize=1)
def _register_heif() -> None:
    """Makes Pillow read HEIC and HEIF."""
    try:
        import pillow_heif
    except ImportError as error:
        raise ImportError("HEIC needs an extra: pip install 'stoker[heif]'") from error
    pillow_heif.register_heif_opener()


class _View(Sequence[T]):
    """A sequence that is made from the rows of a table, element by element."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def _at(self, row: int) -> T:
        raise IndexError(row)

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            rows = np.arange(*index.indices(len(self)), dtype=np.int64)
            return type(self)(self.files.select(rows))
        return self._at(row_of(index, len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment] # as list: it compares by its elements

    def __repr__(self) -> str:
        shown = ", ".join(repr(self[i]) for i in range(min(3, len(self))))
        return f"<{len(self):,} {type(self).__name__.lower()}: {shown}{', ...' * (len(self) > 3)}>"


class Names(_View[str]):
    """The names of a table, without the root."""

    def _at(self, row: int) -> str:
        return self.files.name(row)


class Samples(_View[tuple[str, int]]):
    """The (path, label) pairs of a table that has labels."""

    def _at(self, row: int) -> tuple[str, int]:
        assert self.files.labels is not None
        return self.files.path(row), int(self.files.labels[row])


class Labels(Mapping[str, int]):
    """Name to label; for 16 bytes a sample, spent at the first look-up."""

    def __init__(self, files: Files) -> None:
        self.files = files
        # Hashes of bytes differ from process to process: made anew in each, never pickled.
        self._sorted: NDArray[np.int64] | None = None
        self._rows: NDArray[np.int64] | None = None

    def __getitem__(self, name: str) -> int:
        assert self.files.labels is not None
        if self._sorted is None or self._rows is None:
            hashes = (hash(self.files.encoded_name(row)) for row in range(len(self)))
            table = np.fromiter(hashes, np.int64, len(self))
            self._rows = np.argsort(table)
            self._sorted = table[self._rows]
        if isinstance(name, str):
            encoded = os.fsencode(name)
            place = int(np.searchsorted(self._sorted, hash(encoded)))
            while place < len(self) and self._sorted[place] == hash(encoded):
                row = int(self._rows[place])
                if self.files.encoded_name(row) == encoded:
                    return int(self.files.labels[row])
                place += 1
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(Names(self.files))

    def __len__(self) -> int:
        return len(self.files)

    def __repr__(self) -> str:
        return f"<labels of {len(self):,} names>"

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "_sorted": None, "_rows": None}


def warn(text: str) -> None:
    """Warns where the user's code called the package."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "stoker":
        level, frame = level + 1, frame.f_back
    warnings.warn(text, StokerWarning, stacklevel=level)


def row_of(index: int, rows: int) -> int:
    """``index``, counted from the end if negative, as one of ``rows`` rows; raises IndexError."""
    row = int(index)
    row += rows if row < 0 else 0
    if not 0 <= row < rows:
        raise IndexError(f"index {index} is out of range for {rows} samples")
    return row


class Images(Dataset[tuple[Any, Any]]):
    """A map-style dataset of (image, label) over a table with labels.

    Attributes:
        files: the table.
        transform: called with the image, a PIL image in mode RGB.
        target_transform: called with the label.
    """

    def __init__(
        self,
        files: Files,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.files = files
        self.transform = transform
        self.target_transform = target_transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """The transformed image and label of sample ``index``.

        Raises:
            DecodeError: the image cannot be opened or decoded, or exceeds a limit.
        """
        assert self.files.labels is not None
        row = row_of(index, len(self))
        image: Any = self.files.open(row)
        if self.transform is not None:
            image = self.transform(image)
        label: Any = int(self.files.labels[row])
        if self.target_transform is not None:
            label = self.target_transform(label)
        return image, label

    @property
    def targets(self) -> list[int]:
        """The labels, before any target_transform; a fresh list."""
        assert self.files.labels is not None
        labels: list[int] = self.files.labels.tolist()
        return labels
