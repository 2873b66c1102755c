r"""Images in LitData's chunks: a folder with ``index.json`` and the chunks.

The index has ``chunks``, each with ``filename`` and ``chunk_size``, its number of samples, and
``config``: ``data_format``, the formats of a sample's leaves in order, such as jpeg, bytes, int or
``image:png``; ``data_spec``, a tree as JSON that names them, ``[version, {"type", "context",
"children_spec"}]``, where a dict's context has its keys and a leaf has no type; ``compression``.

A chunk is, little-endian, uint32 throughout: the number of samples n; n + 1 places, where each
sample begins and the last ends; the samples. A sample is the sizes of its leaves, then the leaves.
Numbers are int64, texts UTF-8. Leaves of format pil are pixels: Note [PIL columns] in
`stoker.sources.expanded`.

Where samples are dicts of plain values, the samples of newer chunks are empty. Then their rows
follow as an Arrow file or stream, its length as uint32, and ``LDARW01\0``. (litdata 0.2.76,
litdata/streaming/writer.py, item_loader.py and serializers.py.)

Chunks that are compressed as a whole are expanded into the cache folder, once.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.errors import SourceError
from stoker.sources.expanded import decompress, expand_pil, once
from stoker.sources.shards import Cache, Found, Index, Sharded, indexes

_IMAGE_FORMATS = ("jpeg", "image", "bytes", "tifffile", "pil")
_LABEL_FORMATS = ("int", "str", "bool")
_LABELS = ("label", "class", "cls", "target")
_NAMES = ("name", "filename", "file_name", "key", "id")
_ROWS_MAGIC = b"LDARW01\0"
_ROWS_END_BYTES = 4 + len(_ROWS_MAGIC)
_LARGEST_BYTES = 1 << 32
_MOST_GROWTH = 100

Label = Mapping[str, Any] | str | None


@dataclass(frozen=True)
class _Leaf:
    """A part of each sample: its name, and its format without what follows a colon."""

    name: str
    format: str


@dataclass(frozen=True)
class _Wanted:
    """Which leaves are looked for, by their names; None where there is none."""

    image: str
    label: str | None
    name: str | None


class LitData(Sharded):
    """A map-style dataset of the images in LitData's chunks, at random access.

    Args:
        path: the folder of ``index.json``.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        image: the leaf with the image, by its key, or by its place where samples are tuples; left
            out, the first of format jpeg, image, bytes, tifffile or pil.
        label: the leaf with the label, an integer or text; a mapping of names to labels; None for
            no labels. ``"auto"`` is the first of ``label``, ``class``, ``cls``, ``target``, else
            the first integer leaf, if there is any.
        classes: names of classes, each at its label, for labels that are texts; left out, all,
            sorted.
        damaged: ``"raise"``, or ``"skip"`` to leave damaged samples out, with a warning.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.
        cache: keep the chunks' indexes between runs, ``"beside"`` them if asked; see Note [Kept
            indexes].

    Raises:
        SourceError: the index or a chunk is absent or damaged, of another layout, or there is no
            such leaf.
        ImportError: chunks hold Arrow rows, and the extra ``stoker[parquet]`` is not installed, or
            are compressed, and ``stoker[mds]`` is not.
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
        chunks, config = _read_index(folder)
        leaves = _leaves(folder, config)
        wanted = _choose(folder, leaves, image, label)
        compression = _compression(folder, config)
        counts = {
            _plain(chunk, compression) if compression else chunk: count
            for chunk, count in chunks.items()
        }

        def scan(file: str) -> Index:
            return _scan(file, counts[file], leaves, wanted)

        what = json.dumps(["litdata", repr(leaves), repr(wanted)])
        read, told = indexes(list(counts), scan, what, damaged, cache)
        found, before = Found(told=told), 0
        for number, (index, count) in enumerate(zip(read, counts.values(), strict=True)):
            for name, begin, length, text in index.entries():
                key = name if wanted.name else str(before + int(name))
                value: Any = None if text is None else text.decode(errors="replace")
                if not isinstance(label, str):
                    value = None if label is None else label.get(key)
                found.add(key, number, begin, length, value)
            before += count
        paths = list(counts)
        if any((leaf.name, leaf.format) == (wanted.image, "pil") for leaf in leaves):
            paths = expand_pil(paths, found)
        super().__init__(
            paths, found, classes, transform, target_transform, exif, max_pixels, max_bytes
        )


def recognises(path: str, _: bytes) -> bool:
    """Whether a folder holds an index of LitData's chunks."""
    if not os.path.isfile(os.path.join(path, "index.json")):
        return False
    try:
        return bool(_read_index(path))
    except SourceError as error:
        return error.path != path  # there is one, with something else wrong


# The index


def _read_index(folder: str) -> tuple[dict[str, int], dict[str, Any]]:
    """The chunks that a folder's index names, with their numbers of samples, and its config.

    Raises:
        SourceError: of the folder: there is no index. Of the index: it is damaged.
    """
    path = os.path.join(folder, "index.json")
    try:
        with open(path, "rb") as file:
            content = json.load(file)
        chunks, config = content["chunks"], content["config"]
        if not isinstance(chunks, list) or not isinstance(config, dict):
            raise TypeError("its chunks or config are of another kind")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise SourceError(folder, f"has no index of LitData's chunks: {error}") from error
    found: dict[str, int] = {}
    for number, chunk in enumerate(chunks):
        try:
            name, count = chunk["filename"], int(chunk["chunk_size"])
            if os.path.basename(name) != name or name in ("", "..", ".") or count < 0:
                raise ValueError(f"{name!r} of {count} samples")
        except (ValueError, TypeError, KeyError) as error:
            raise SourceError(path, f"chunk {number}: {error}") from error
        found[os.path.join(folder, name)] = count
    if not found:
        raise SourceError(path, "names no chunk")
    return found, config


def _leaves(folder: str, config: Mapping[str, Any]) -> list[_Leaf]:
    """The leaves of each sample."""
    formats = config.get("data_format")
    if not isinstance(formats, list) or not formats:
        raise SourceError(folder, f"has samples of data_format {formats!r}, which are not read")
    if config.get("encryption"):
        raise SourceError(folder, "has encrypted chunks, which are not read")
    loader = config.get("item_loader") or "PyTreeLoader"
    if loader != "PyTreeLoader":
        raise SourceError(folder, f"has chunks for {loader}, which are not read")
    names = _names(config.get("data_spec")) or []
    if len(names) != len(formats):
        names = [str(place) for place in range(len(formats))]
    pairs = zip(names, formats, strict=True)
    return [_Leaf(name, str(kind).partition(":")[0]) for name, kind in pairs]


def _names(spec: object) -> list[str] | None:
    """The names of the leaves: their keys and places, joined by dots; None if it is damaged."""
    try:
        waiting = [("", json.loads(str(spec))[1])]
        names = []
        while waiting:
            name, node = waiting.pop()
            children = node["children_spec"]
            if node["type"] is None:
                names.append(name)
                continue
            keys: Sequence[object] = range(len(children))
            if node["type"].endswith("dict"):
                keys = json.loads(node["context"])
            pairs = zip(keys, children, strict=True)
            inside = [(f"{name}.{key}" if name else str(key), child) for key, child in pairs]
            waiting += reversed(inside)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
    return names


def _choose(folder: str, leaves: Sequence[_Leaf], image: str | None, label: Label) -> _Wanted:
    images = [leaf for leaf in leaves if image in (None, leaf.name)]
    there = ", ".join(f"{leaf.name} ({leaf.format})" for leaf in leaves)
    chosen = next((leaf for leaf in images if leaf.format in _IMAGE_FORMATS), None)
    if chosen is None:
        kinds = " or ".join(_IMAGE_FORMATS)
        raise SourceError(folder, f"no leaf {image or 'image'!r} of {kinds}; its leaves: {there}")
    wanted = None
    if isinstance(label, str):
        labels = [leaf for leaf in leaves if leaf.format in _LABEL_FORMATS]
        named = [leaf for leaf in labels if leaf.name in (_LABELS if label == "auto" else (label,))]
        if not named and label == "auto":
            named = [leaf for leaf in labels if leaf.format == "int"]
        if not named and label != "auto":
            raise SourceError(folder, f"no leaf {label!r} of integers or texts; {there}")
        wanted = named[0].name if named else None
    texts = (leaf.name for leaf in leaves if leaf.format == "str" and leaf.name in _NAMES)
    return _Wanted(chosen.name, wanted, next(texts, None))


def _compression(folder: str, config: Mapping[str, Any]) -> str:
    """How chunks are compressed as a whole; empty where they aren't."""
    compression = config.get("compression")
    if not compression:
        return ""
    level = config.get("compression_level") or "chunk"
    if level != "chunk":
        raise SourceError(
            folder,
            f"has chunks compressed {level} by {level}, which are not read: write them with "
            "compression_level='chunk' or without compression",
        )
    return str(compression).partition(":")[0]


def _plain(path: str, compression: str) -> str:
    """The path of what a chunk is expanded to."""
    try:
        with open(path, "rb") as file:
            most = min(_LARGEST_BYTES, _MOST_GROWTH * os.fstat(file.fileno()).st_size)
            return once(path, "", lambda out: decompress(compression, file, out, most))
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, error.strerror or str(error)) from error


# Chunks


def _scan(path: str, count: int, leaves: Sequence[_Leaf], wanted: _Wanted) -> Index:
    """Reads a chunk; see `shards.Index`: the text of an entry is its label.

    Its name is that of the leaf for it or, if there is none, the sample's number in the chunk.
    """
    index, damage = Index(), list[str]()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(4 * (count + 2)) if 4 * (count + 2) <= size else b""
            if not head:
                raise SourceError(path, "is shorter than its samples' places")
            told, *places = np.frombuffer(head, "<u4").tolist()
            if told != count:
                raise SourceError(path, f"has {told:,} samples, and {count:,} in the index")
            file.seek(max(size - _ROWS_END_BYTES, len(head)))
            end = file.read()
            if count and places[0] == places[-1] and end.endswith(_ROWS_MAGIC):
                file.seek(0)
                rows = size - _ROWS_END_BYTES - struct.unpack_from("<I", end)[0]
                _scan_rows(path, file.read(), rows, count, wanted, index, damage)
            else:
                for number in range(count):
                    begin, stop = places[number], places[number + 1]
                    spans = None
                    if len(head) <= begin <= stop <= size:
                        file.seek(begin)
                        spans = _spans(leaves, file.read(4 * len(leaves)), begin, stop)
                    if spans is None:
                        damage.append(f"sample {number:,} is damaged")
                        continue
                    texts: dict[str | None, bytes] = {}
                    for leaf in leaves:
                        if leaf.name in (wanted.label, wanted.name):
                            start, last = spans[leaf.name]
                            file.seek(start)
                            texts[leaf.name] = _text(leaf.format, file.read(last - start))
                    start, last = spans[wanted.image]
                    name = texts[wanted.name] if wanted.name else b"%d" % number
                    label = texts[wanted.label] if wanted.label else None
                    index.add(name, start, last - start, label)
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, error.strerror or str(error)) from error
    index.damage = "; ".join(damage[:3]) + "; ..." * (len(damage) > 3)
    return index


def _spans(
    leaves: Sequence[_Leaf], head: bytes, begin: int, end: int
) -> dict[str, tuple[int, int]] | None:
    """Where each leaf of a sample lies; None where they are not all of it."""
    if len(head) < 4 * len(leaves):
        return None
    at, spans = begin + len(head), {}
    for leaf, size in zip(leaves, struct.unpack(f"<{len(leaves)}I", head), strict=True):
        spans[leaf.name] = at, at + size
        at += size
    return spans if at == end else None


def _text(kind: str, value: bytes) -> bytes:
    if kind == "bool":
        return b"1" if value.strip(b"\0") else b"0"
    if kind == "int" and len(value) == 8:
        return b"%d" % struct.unpack("<q", value)[0]
    return value


def _scan_rows(
    path: str,
    content: bytes,
    begin: int,
    count: int,
    wanted: _Wanted,
    index: Index,
    damage: list[str],
) -> None:
    """Reads the Arrow rows that lie in a chunk from ``begin`` on."""
    pyarrow = _pyarrow()
    buffer = pyarrow.py_buffer(content)
    if begin < 0:
        raise SourceError(path, "is damaged: its Arrow rows are longer than it")
    rows = buffer.slice(begin, len(content) - _ROWS_END_BYTES - begin)
    number = 0
    try:
        for batch in _batches(pyarrow, rows):
            batch.validate(full=True)
            labels = batch.column(wanted.label).to_pylist() if wanted.label else None
            names = batch.column(wanted.name).to_pylist() if wanted.name else None
            spans = _cells(pyarrow, batch.column(wanted.image), buffer)
            for row, span in enumerate(spans):
                if span is None or number >= count:
                    damage.append(f"sample {number:,} is damaged")
                else:
                    label = None if labels is None else _encoded(labels[row])
                    name = b"%d" % number if names is None else _encoded(names[row]) or b""
                    index.add(name, span[0], span[1] - span[0], label)
                number += 1
    except (pyarrow.ArrowException, ValueError, TypeError, KeyError, OSError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, f"its Arrow rows cannot be read: {error}") from error
    if number < count:
        damage.append(f"the samples from {number:,} to {count - 1:,} are not there")


def _batches(pyarrow: Any, rows: Any) -> Iterator[Any]:
    if rows.slice(0, 6).to_pybytes() == b"ARROW1":
        reader = pyarrow.ipc.open_file(rows)
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(rows)


def _cells(pyarrow: Any, column: Any, whole: Any) -> Iterator[tuple[int, int] | None]:
    """Where each value of a column of bytes lies in ``whole``."""
    kinds = {pyarrow.binary(): "<i4", pyarrow.large_binary(): "<i8"}
    if column.type not in kinds:
        raise TypeError(f"its images are of type {column.type}")
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, kinds[column.type])[column.offset :][: len(column) + 1].tolist()
    base = 0 if data is None else data.address - whole.address
    if data is not None and not 0 <= base <= base + data.size <= whole.size:
        raise ValueError("they are compressed: write them without compression")
    nulls = column.is_null().to_pylist()
    for row, null in enumerate(nulls):
        yield None if null else (base + ends[row], base + ends[row + 1])


def _encoded(value: Any) -> bytes | None:
    if isinstance(value, bool | int):
        return b"%d" % value
    return value.encode() if isinstance(value, str) else None


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise ImportError(
            "chunks of Arrow rows need an extra: pip install 'stoker[parquet]'"
        ) from error
    return pyarrow
