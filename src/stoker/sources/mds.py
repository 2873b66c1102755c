"""Images in MosaicML's MDS shards: a folder with ``index.json`` and the shards.

The index names the shards (``shards[i].raw_data.basename``, with ``bytes`` and ``hashes``), and the
columns of their samples: names, encodings, sizes (null where they vary). A shard is, little-endian,
uint32 throughout: the number of samples n; n + 1 places, where each sample begins and the last
ends; a description as JSON; the samples. A sample is the sizes of its columns that vary, then the
columns. (mosaicml-streaming, base/format/mds.)

A shard whose size or hash is not that of the index is refused; hashes that Python's hashlib does
not know are not checked. Of a compressed shard, ``compression`` names how ("zstd:3") and
``zip_data`` the file; it is expanded into the cache folder once, if the plain one is not there.
Columns of encoding pil are pixels: Note [PIL columns] in `stoker.sources.expanded`.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from stoker.errors import SourceError
from stoker.sources.expanded import decompress, expand_pil, once
from stoker.sources.shards import Cache, Found, Index, Sharded, indexes

_IMAGE_ENCODINGS = ("jpeg", "png", "bytes", "pil")
_INTEGERS = {"int": "<i8"} | {
    f"{sign}int{bits}": f"<{kind}{bits // 8}"
    for sign, kind in (("", "i"), ("u", "u"))
    for bits in (8, 16, 32, 64)
}
_LABELS = ("label", "class", "cls", "target")
_NAMES = ("name", "filename", "file_name", "key", "id")

Label = Mapping[str, Any] | str | None


@dataclass(frozen=True)
class _Column:
    """A column: its name, encoding and size in bytes; None where that varies."""

    name: str
    encoding: str
    size: int | None


@dataclass(frozen=True)
class _Shard:
    """A shard as the index describes it."""

    path: str
    columns: tuple[_Column, ...]
    samples: int
    bytes: int
    hashes: dict[str, str]
    packed: _Packed | None


@dataclass(frozen=True)
class _Packed:
    """The file of a compressed shard: its path, compression, size and hashes."""

    path: str
    compression: str
    bytes: int
    hashes: dict[str, str]


class MDS(Sharded):
    """A map-style dataset of the images in MDS shards, at random access.

    Args:
        path: the folder of ``index.json``.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        image: the column with the image; left out, the first of encoding jpeg, png, bytes or pil.
        label: the column with the label, an integer or text; a mapping of names to labels; None for
            no labels. ``"auto"`` is the first of ``label``, ``class``, ``cls``, ``target``, if
            there is any.
        classes: names of classes, each at its label, for labels that are texts; left out, all,
            sorted.
        damaged: ``"raise"``, or ``"skip"`` to leave damaged samples out, with a warning.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.
        cache: keep the shards' indexes between runs, ``"beside"`` them if asked; see Note [Kept
            indexes].

    Raises:
        SourceError: the index or a shard is absent or damaged, or compressed with something else
            than zstd, gz or bz2, or there is no such column.
        ImportError: shards are compressed with zstd, and the extra ``stoker[mds]`` is not
            installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        image: str | None = None,
        label: Label = "auto",
        classes: Sequence[str] | None = None,
        damaged: str = "raise",
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
        cache: Cache = True,
    ) -> None:
        folder = os.path.expanduser(os.fspath(path))
        described = _read_index(folder)
        columns = described[0].columns
        images = _column(folder, columns, image, _IMAGE_ENCODINGS, "image")
        labels = None
        if isinstance(label, str):
            wanted = _LABELS if label == "auto" else (label,)
            labels = next((c.name for c in columns if c.name in wanted and _is_label(c)), None)
            if labels is None and label != "auto":
                raise SourceError(
                    folder, f"no column {label!r} of integers or texts; {_of(columns)}"
                )
        names = next((c.name for c in columns if c.name in _NAMES and c.encoding == "str"), None)

        shards = {_plain(shard): shard for shard in described}

        def scan(file: str) -> Index:
            return _scan(file, shards[file], images, labels, names)

        what = json.dumps(["mds", images, labels, names])
        read, told = indexes(list(shards), scan, what, damaged, cache)
        found = Found(told=told)
        for number, index in enumerate(read):
            for name, begin, length, text in index.entries():
                value: Any = None if text is None else text.decode(errors="replace")
                if not isinstance(label, str):
                    value = None if label is None else label.get(name)
                found.add(name, number, begin, length, value)
        paths = list(shards)
        if any((column.name, column.encoding) == (images, "pil") for column in columns):
            paths = expand_pil(paths, found)
        super().__init__(
            paths, found, classes, transform, target_transform, exif, max_pixels, max_bytes
        )


def recognises(path: str, _: bytes) -> bool:
    """Whether a folder holds an index of MDS shards."""
    if not os.path.isfile(os.path.join(path, "index.json")):
        return False
    try:
        return bool(_read_index(path))
    except SourceError as error:
        return error.path != path  # there is one, with something else wrong


def _is_label(column: _Column) -> bool:
    return column.encoding in _INTEGERS or column.encoding in ("str", "str_int")


def _of(columns: Sequence[_Column]) -> str:
    return "columns: " + ", ".join(f"{column.name} ({column.encoding})" for column in columns)


def _column(
    folder: str, columns: Sequence[_Column], name: str | None, encodings: Sequence[str], what: str
) -> str:
    for column in columns:
        if column.encoding in encodings and name in (None, column.name):
            return column.name
    raise SourceError(
        folder, f"no column {name or what!r} of {' or '.join(encodings)}; {_of(columns)}"
    )


def _read_index(folder: str) -> list[_Shard]:
    """The shards that a folder's index names.

    Raises:
        SourceError: of the folder: there is no index. Of the index: it is damaged, or names shards
            that cannot be read.
    """
    path = os.path.join(folder, "index.json")
    try:
        with open(path, "rb") as file:
            content = json.load(file)
        shards = content["shards"]
        if not shards or shards[0]["format"] != "mds":
            raise SourceError(folder, "has no index of MDS shards")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(folder, f"has no index of MDS shards: {error}") from error
    found = []
    for number, shard in enumerate(shards):
        try:
            raw = shard["raw_data"]
            if shard["format"] != "mds":
                raise ValueError(f"has a shard {raw['basename']!r} of format {shard['format']}")
            columns = zip(
                shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True
            )
            found.append(
                _Shard(
                    _inside(folder, raw),
                    tuple(
                        _Column(str(n), str(e), None if s is None else int(s))
                        for n, e, s in columns
                    ),
                    int(shard["samples"]),
                    int(raw["bytes"]),
                    _hashes(raw),
                    _packed(folder, shard),
                )
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SourceError(path, f"shard {number}: {error}") from error
        if any(column.size is not None and column.size < 0 for column in found[-1].columns):
            raise SourceError(path, f"shard {number}: a column has a negative size")
    if any(shard.columns != found[0].columns for shard in found):
        raise SourceError(path, "its shards have different columns")
    return found


def _inside(folder: str, part: Mapping[str, Any]) -> str:
    """The path of a file that the index names, which lies in its folder."""
    name = part["basename"]
    if os.path.basename(name) != name or name in ("", "..", "."):
        raise ValueError(f"has a shard {name!r}, which is no name of a file")
    return os.path.join(folder, name)


def _hashes(part: Mapping[str, Any]) -> dict[str, str]:
    return {str(kind): str(value) for kind, value in part["hashes"].items()}


def _packed(folder: str, shard: Mapping[str, Any]) -> _Packed | None:
    part = shard.get("zip_data")
    if not part:
        return None
    compression = str(shard["compression"]).partition(":")[0]
    return _Packed(_inside(folder, part), compression, int(part["bytes"]), _hashes(part))


def _plain(shard: _Shard) -> str:
    """The path of a shard or, where there is only a compressed one, of what it was expanded to."""
    packed = shard.packed
    if packed is None or os.path.exists(shard.path):
        return shard.path
    try:
        with open(packed.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != packed.bytes:
                raise SourceError(
                    packed.path, f"has {size:,} bytes, and {packed.bytes:,} in the index"
                )

            def expand(out: BinaryIO) -> None:
                _check(file, packed.path, packed.hashes)
                file.seek(0)
                decompress(packed.compression, file, out, shard.bytes)

            return once(packed.path, "", expand, shard.bytes)
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(packed.path, error.strerror or str(error)) from error


def _scan(path: str, shard: _Shard, image: str, label: str | None, name: str | None) -> Index:
    """Reads a shard; see `shards.Index`: the text of an entry is its label."""
    index, damage = Index(), list[str]()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != shard.bytes:
                raise SourceError(path, f"has {size:,} bytes, and {shard.bytes:,} in the index")
            _check(file, path, shard.hashes)
            file.seek(0)
            head = file.read(4 * (shard.samples + 2))
            if len(head) < 4 * (shard.samples + 2):
                raise SourceError(path, "is shorter than its samples' places")
            count, *places = np.frombuffer(head, "<u4").tolist()
            if count != shard.samples:
                raise SourceError(
                    path, f"has {count:,} samples, and {shard.samples:,} in the index"
                )
            for number in range(count):
                begin, end = places[number], places[number + 1]
                if not len(head) <= begin <= end <= size:
                    damage.append(f"sample {number:,} lies outside")
                    continue
                file.seek(begin)
                spans = _spans(shard.columns, file.read(4 * len(shard.columns)), begin, end)
                if spans is None:
                    damage.append(f"sample {number:,} is damaged")
                    continue
                texts: dict[str | None, bytes] = {}
                for column in shard.columns:
                    if column.name in (label, name):
                        start, stop = spans[column.name]
                        file.seek(start)
                        texts[column.name] = _text(column, file.read(stop - start))
                start, stop = spans[image]
                key = texts.get(name, b"%d" % number) if name else b"%d" % number
                index.add(key, start, stop - start, texts.get(label) if label else None)
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, error.strerror or str(error)) from error
    index.damage = "; ".join(damage[:3]) + "; ..." * (len(damage) > 3)
    return index


def _check(file: Any, path: str, hashes: Mapping[str, str]) -> None:
    for kind, wanted in hashes.items():
        if kind in hashlib.algorithms_guaranteed and not kind.startswith("shake"):
            file.seek(0)
            if hashlib.file_digest(file, kind).hexdigest() != wanted:
                raise SourceError(path, f"its {kind} is not that of the index")


def _spans(
    columns: Sequence[_Column], head: bytes, begin: int, end: int
) -> dict[str, tuple[int, int]] | None:
    """Where each column of a sample lies; None where it does not fit."""
    varying = sum(column.size is None for column in columns)
    if len(head) < 4 * varying:
        return None
    sizes = iter(struct.unpack_from(f"<{varying}I", head))
    at, spans = begin + 4 * varying, {}
    for column in columns:
        size = next(sizes) if column.size is None else column.size
        spans[column.name] = at, at + size
        at += size
    return spans if at <= end else None


def _text(column: _Column, value: bytes) -> bytes:
    kind = _INTEGERS.get(column.encoding)
    if kind is None or len(value) != np.dtype(kind).itemsize:
        return value
    return b"%d" % int(np.frombuffer(value, kind)[0])
