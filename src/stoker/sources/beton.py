"""Images in an FFCV file (``.beton``): JPEGs in place, raw pixels written out once.

A file is, little-endian:

- the head, 24 bytes: version uint16, which is 2; number of fields uint16; size of a page uint32;
  number of samples n uint64; where the table of allocations begins, uint64;
- a description of each field, 1,041 bytes: its type, a byte; its name, 16 bytes, filled up with
  zeros; arguments of its type, 1,024 bytes;
- a row for each sample with a cell for each field, laid out as C lays out a struct of them. A cell
  is, by the field's type: 0, a float64; 1, an int64; 2, an image: mode uint8, width uint16, height
  uint16, place uint64, without gaps or alignment; 3, bytes, and 5, JSON: place and size, uint64
  each, without alignment; 4, an array, and 6, a tensor: place uint64. Type 255 is of the user's own
  and has an unknown size;
- pages, in which the samples' bytes lie at their places, counted from the file's beginning;
- the table of allocations, to the file's end: sample, place, size, uint64 each.

An image of mode 0 is a JPEG, whose size is in the table of allocations; one of mode 1 is RGB pixels
of uint8, row by row. (ffcv 1.0, ffcv/types.py, writer.py and fields.)

Raw pixels are written into the cache folder once: Note [Raw pixels] in `stoker.sources.expanded`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.sources.expanded import DamagedError, images
from stoker.sources.shards import Found, Sharded, some

_HEAD = struct.Struct("<HHIQQ")
_VERSION = 2
_FIELD_BYTES = 1041
_NAME_BYTES = 16
_MOST_FIELDS = 1024
_INTEGER, _IMAGE = 1, 2
_KINDS: dict[int, tuple[str, Any]] = {
    0: ("float", "<f8"),
    1: ("integer", "<i8"),
    2: ("image", [("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("place", "<u8")]),
    3: ("bytes", [("place", "<u8"), ("size", "<u8")]),
    4: ("array", "<u8"),
    5: ("JSON", [("place", "<u8"), ("size", "<u8")]),
    6: ("tensor", "<u8"),
}
_ALLOCATION = np.dtype([("sample", "<u8"), ("place", "<u8"), ("size", "<u8")])
_JPEG, _RAW = 0, 1
_LABELS = ("label", "class", "cls", "target")

Label = Mapping[str, Any] | str | None


class Beton(Sharded):
    """A map-style dataset of the images in an FFCV file, at random access.

    Samples have no names but their numbers.

    Args:
        path: the file.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        image: the field of the images; left out, the first one of that type.
        label: the field of the labels, of type integer; a mapping of numbers, as texts, to labels;
            None for no labels. ``"auto"`` is the first of ``label``, ``class``, ``cls``,
            ``target``, else the first integer field, if there is any.
        damaged: ``"raise"``, or ``"skip"`` to leave damaged samples out, with a warning.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.

    Raises:
        SourceError: the file is absent, damaged or unfinished, or has no such fields.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        image: str | None = None,
        label: Label = "auto",
        damaged: str = "raise",
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        if damaged not in ("raise", "skip"):
            raise ValueError(f"damaged must be 'raise' or 'skip', got {damaged!r}")
        file = os.path.expanduser(os.fspath(path))
        table = _read(file)
        cells = table.rows[table.place(image, _IMAGE)]
        labels: NDArray[np.int64] | None = None
        if isinstance(label, str) and (label != "auto" or _INTEGER in table.kinds):
            named = next((name for name in table.names if name in _LABELS), None)
            wanted = named if label == "auto" and table.is_(named, _INTEGER) else label
            labels = table.rows[table.place(None if wanted == "auto" else wanted, _INTEGER)]
        sizes = _sizes(table, cells)
        whole = sizes >= 0
        found = Found()
        if not whole.all():
            lost = some([str(number) for number in np.flatnonzero(~whole)])
            if damaged == "raise":
                raise SourceError(file, f"{lost} damaged; damaged='skip' keeps the others")
            found.told.append(f"{file}: {lost} damaged; left out")
        numbers = np.flatnonzero(whole)
        begins, lengths = cells["place"].astype(np.int64), sizes.copy()
        raw = np.flatnonzero(whole & (cells["mode"] == _RAW))
        shards = [file]
        if len(raw):
            made, starts, counts = _expand(file, f"beton {image}", cells, raw)
            shards.append(made)
            begins[raw], lengths[raw] = starts, counts
        found.names = [str(number) for number in numbers]
        found.shards = (cells["mode"][numbers] == _RAW).astype(int).tolist()
        found.begins, found.lengths = begins[numbers].tolist(), lengths[numbers].tolist()
        found.labels = [None] * len(numbers)
        if isinstance(label, Mapping):
            found.labels = [label.get(name) for name in found.names]
        elif labels is not None:
            found.labels = labels[numbers].tolist()
        super().__init__(
            shards, found, None, transform, target_transform, exif, max_pixels, max_bytes
        )


def recognises(_: str, head: bytes) -> bool:
    """Whether a file that begins with ``head`` is an FFCV file."""
    if len(head) < _HEAD.size + 1 + _NAME_BYTES:
        return False
    version, fields, page, *_rest = _HEAD.unpack_from(head)
    kind, name = head[_HEAD.size], head[_HEAD.size + 1 :][:_NAME_BYTES]
    return (
        version == _VERSION
        and 1 <= fields <= _MOST_FIELDS
        and page >= 1 << 12
        and page & (page - 1) == 0
        and (kind in _KINDS or kind == 255)
        and name.rstrip(b"\0").isascii()
    )


@dataclass(frozen=True)
class _Table:
    """What a file says of its samples.

    Attributes:
        path: the file.
        size: of the file, in bytes.
        names: of the fields.
        kinds: types of the fields.
        rows: the cells of each field, which are called "f0", "f1", ...
        allocations: the table of allocations.
    """

    path: str
    size: int
    names: list[str]
    kinds: list[int]
    rows: NDArray[Any]
    allocations: NDArray[Any]

    def is_(self, name: str | None, kind: int) -> bool:
        """Whether a field is of a type."""
        return any(pair == (name, kind) for pair in zip(self.names, self.kinds, strict=True))

    def place(self, name: str | None, kind: int) -> str:
        """Where in a row the first field of a type is, of that name if one is given."""
        for place, (its_name, its_kind) in enumerate(zip(self.names, self.kinds, strict=True)):
            if its_kind == kind and name in (None, its_name):
                return f"f{place}"
        fields = ", ".join(
            f"{its_name} ({_KINDS[its_kind][0]})"
            for its_name, its_kind in zip(self.names, self.kinds, strict=True)
        )
        wanted = "" if name is None else f" {name!r}"
        raise SourceError(
            self.path, f"has no field{wanted} of type {_KINDS[kind][0]}; its fields: {fields}"
        )


def _read(path: str) -> _Table:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise SourceError(path, "is no FFCV file, or truncated in its first bytes")
            version, count, _, samples, table = _HEAD.unpack(head)
            if version != _VERSION or not 1 <= count <= _MOST_FIELDS:
                raise SourceError(path, f"is no FFCV file of version {_VERSION}")
            fields = file.read(count * _FIELD_BYTES)
            if len(fields) < count * _FIELD_BYTES:
                raise SourceError(path, "is truncated in the description of its fields")
            starts = range(0, len(fields), _FIELD_BYTES)
            kinds = [fields[start] for start in starts]
            names = [
                fields[start + 1 : start + 1 + _NAME_BYTES].rstrip(b"\0").decode(errors="replace")
                for start in starts
            ]
            for name, kind in zip(names, kinds, strict=True):
                if kind not in _KINDS:
                    raise SourceError(path, f"has a field {name!r} of unknown type {kind}")
            row = np.dtype(
                # Each cell is a type of its own, as only the row is aligned.
                [(f"f{place}", np.dtype(_KINDS[kind][1])) for place, kind in enumerate(kinds)],
                align=True,
            )
            if samples > size or file.tell() + samples * row.itemsize > size:
                raise SourceError(path, f"is truncated in the rows of its {samples:,} samples")
            rows = np.frombuffer(file.read(samples * row.itemsize), row)
            if table == 0 and samples:
                raise SourceError(path, "was not finished: it has no table of allocations")
            if table > size:
                raise SourceError(path, f"is truncated: it has {size:,} bytes of over {table:,}")
            file.seek(table)
            content = file.read()
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, error.strerror or str(error)) from error
    except ValueError as error:  # it has shrunk meanwhile
        raise SourceError(path, f"is truncated: {error}") from error
    whole = len(content) // _ALLOCATION.itemsize
    allocations = np.frombuffer(content, _ALLOCATION, whole)
    return _Table(path, size, names, kinds, rows, allocations)


def _sizes(table: _Table, cells: NDArray[Any]) -> NDArray[np.int64]:
    """How many bytes each image has; -1 where a sample is damaged."""
    size = np.uint64(table.size)
    # What is empty has the place of what comes next: the greatest first.
    order = np.lexsort((~table.allocations["size"], table.allocations["place"]))
    places = table.allocations["place"][order]
    at = np.searchsorted(places, cells["place"])
    known = at < len(places)
    known[known] = places[at[known]] == cells["place"][known]
    sizes = np.zeros(len(cells), np.uint64)
    sizes[known] = table.allocations["size"][order][at[known]]
    fits = known & (cells["place"] <= size) & (sizes <= size)
    fits[fits] = cells["place"][fits] + sizes[fits] <= size
    pixels = cells["width"].astype(np.uint64) * cells["height"].astype(np.uint64) * np.uint64(3)
    fits &= (cells["mode"] == _JPEG) | ((cells["mode"] == _RAW) & (pixels == sizes))
    fits &= sizes > 0
    return np.where(fits, sizes, 0).astype(np.int64) - ~fits


def _expand(
    path: str, what: str, cells: NDArray[Any], numbers: NDArray[np.int64]
) -> tuple[str, list[int], list[int]]:
    """The file of the raw pixels of the samples ``numbers``, begin and length of each."""
    shapes = [(int(cells["height"][n]), int(cells["width"][n]), 3) for n in numbers]

    def read(number: int) -> NDArray[np.uint8]:
        height, width, channels = shapes[number]
        with open(path, "rb") as file:
            file.seek(int(cells["place"][numbers[number]]))
            content = file.read(height * width * channels)
        if len(content) < height * width * channels:  # it has shrunk meanwhile
            raise DamagedError(f"is truncated in sample {numbers[number]:,}")
        return np.frombuffer(content, np.uint8)

    return images(path, what, shapes, read)
