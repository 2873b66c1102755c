"""What Parquet and Arrow share: the columns of images and labels, and where the rows' bytes lie.

An image column is binary, or a struct with ``bytes``, binary, and ``path``, a text, of which one
may be null: Hugging Face's. Its metadata is the value ``huggingface`` of the schema's, a JSON
``{"info": {"features": {COLUMN: {"_type": "Image"}}}}``; a label's ``_type`` is ``ClassLabel``, and
``names`` are those of the classes. (datasets, features/features.py and features/image.py.)

Note [Rows of columns]
    Where the bytes of a row lie is kept in the text of its entry in a shard's index. The first byte
    says where: ``=`` in the shard, at the entry's place; ``>`` in the file that the images of the
    shard were expanded to, at the place that follows, two int64, little-endian; ``/`` in a file of
    their own, whose path is the entry's name. Then comes ``-``, or ``+`` and the label.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stoker import cache as kept
from stoker.errors import SourceError
from stoker.sources.shards import Cache, Found, Index, Sharded, Written, indexes

Spans = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Begin and length of each value; begin is -1 where there is none."""

Label = str | Mapping[str, Any] | None
Names = tuple[str, ...]
"""Those of a column and, where that is a struct, of what is meant within it."""

_LABELS = ("label", "class", "cls", "target")
_HERE, _EXPANDED, _FILE = b"=", b">", b"/"
_PLACE = struct.Struct("<2q")
_BEGINNINGS = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF"),
    *(b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51", b"P5", b"P6"),
)
_MOST_PROBED = 8
_MOST_NAME = 50  # characters of up to four bytes, of the 255 bytes that a name may have


def pyarrow() -> Any:
    """The package.

    Raises:
        ImportError: the extra ``stoker[parquet]`` is not installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(
            "Parquet and Arrow need an extra: pip install 'stoker[parquet]'"
        ) from error
    return pyarrow


def problems() -> tuple[type[Exception], ...]:
    """What pyarrow raises for damaged files."""
    return (pyarrow().ArrowException, OSError, ValueError)


def reason(error: Exception) -> str:
    """What such an error says, in one line."""
    return (str(error) or type(error).__name__).splitlines()[0]


# Which columns


@dataclass(frozen=True)
class Columns:
    """Which columns of a schema are read.

    Attributes:
        image: the encoded images.
        path: their paths, if there are any.
        label: the labels, if there are any.
        integers: whether labels are integers, and not texts.
        classes: what the integers stand for, if the schema says so.
    """

    image: Names
    path: Names | None
    label: Names | None
    integers: bool
    classes: tuple[str, ...]

    @property
    def others(self) -> list[Names]:
        """Those besides the images."""
        return [names for names in (self.path, self.label) if names is not None]


def columns_of(
    path: str,
    schema: Any,
    image: str | None,
    label: Label,
    beginnings: Callable[[Names], list[bytes]],
) -> Columns:
    """Finds the columns that are asked for.

    Args:
        path: of the file or folder, for errors.
        schema: pyarrow's.
        image: the name of the image column; None finds one.
        label: as `stoker.open` takes it.
        beginnings: of a binary column, the first bytes of some values.

    Raises:
        SourceError: there are none.
    """
    features = _features(schema)

    def kind(names: Names) -> Any:
        found: Any = features
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found.get("_type") if isinstance(found, dict) else None

    if image is not None:
        names = _resolved(path, schema, image)
        images = [] if names is None else [names]
    else:
        images = [(name,) for name in dict.fromkeys(schema.names)]
        images.sort(key=lambda names: (kind(names) != "Image", not _is_struct(schema, names)))
    fitting = [found for names in images if (found := _image(schema, names)) is not None]
    if len(fitting) > 1 and kind(fitting[0][0][:1]) != "Image":
        fitting = [found for found in fitting if any(map(_is_image, beginnings(found[0])))]
    if not fitting:
        what = "no column of encoded images" if image is None else f"no image column {image!r}"
        raise SourceError(path, f"has {what}: image= names one; {_listed(schema)}")
    encoded, paths = fitting[0]
    labels: list[Names] = []
    if isinstance(label, str) and label != "auto":
        names = _resolved(path, schema, label)
        labels = [] if names is None or not _is_label(_type(schema, names)) else [names]
        if not labels:
            raise SourceError(
                path, f"has no column {label!r} of integers or texts; {_listed(schema)}"
            )
    elif label == "auto":
        labels = [(name,) for name in _LABELS]
        labels.sort(key=lambda names: kind(names) != "ClassLabel")
        named = [(name,) for name in schema.names if kind((name,)) == "ClassLabel"]
        labels = [*(n for n in labels if n in named), *named, *labels]
        labels = [n for n in labels if schema.names.count(n[0]) == 1]
        labels = [n for n in labels if _is_label(_type(schema, n))]
    chosen = labels[0] if labels else None
    integers = chosen is not None and not _is_text(_plain(_type(schema, chosen)))
    return Columns(encoded, paths, chosen, integers, _classes(features, chosen) if integers else ())


def _features(schema: Any) -> Any:
    try:
        found = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        return found["info"]["features"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}


def _classes(features: Any, names: Names | None) -> tuple[str, ...]:
    for name in names or ():
        features = features.get(name) if isinstance(features, dict) else None
    if not isinstance(features, dict) or features.get("_type") != "ClassLabel":
        return ()
    found = features.get("names")
    texts = isinstance(found, list) and all(isinstance(name, str) for name in found)
    return tuple(found) if texts and isinstance(found, list) else ()


def _resolved(path: str, schema: Any, name: str) -> Names | None:
    """The column of a name, or, with dots in it, what is in a struct."""
    if schema.names.count(name) > 1:
        raise SourceError(path, f"has several columns {name!r}")
    for names in ((name,), tuple(name.split("."))):
        if _type(schema, names) is not None:
            return names
    return None


def _type(schema: Any, names: Names) -> Any:
    """The type of what is in a schema under some names; None if there is nothing."""
    if schema.names.count(names[0]) != 1:
        return None
    found = schema.field(names[0]).type
    for name in names[1:]:
        if not pyarrow().types.is_struct(found) or found.get_field_index(name) < 0:
            return None
        found = found.field(name).type
    return found


def _plain(kind: Any) -> Any:
    """A type, or that of a dictionary's values."""
    return kind.value_type if pyarrow().types.is_dictionary(kind) else kind


def _is_struct(schema: Any, names: Names) -> bool:
    return _type(schema, (*names, "bytes")) is not None


def _is_binary(kind: Any) -> bool:
    if kind is None:
        return False
    types, kind = pyarrow().types, _plain(kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _is_text(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_label(kind: Any) -> bool:
    if kind is None:
        return False
    types, kind = pyarrow().types, _plain(kind)
    return bool(types.is_integer(kind) or types.is_boolean(kind) or _is_text(kind))


def _image(schema: Any, names: Names) -> tuple[Names, Names | None] | None:
    """Where in an image column the bytes and the paths are; None if it is none."""
    if _is_binary(_type(schema, names)):
        return names, None
    inner = (*names, "bytes"), (*names, "path")
    if not _is_binary(_type(schema, inner[0])):
        return None
    kind = _type(schema, inner[1])
    return inner[0], inner[1] if kind is not None and _is_text(_plain(kind)) else None


def _is_image(beginning: bytes) -> bool:
    return beginning.startswith(_BEGINNINGS) or beginning[4:8] == b"ftyp"


def _listed(schema: Any) -> str:
    shown = [f"{column.name} ({column.type})" for column in list(schema)[:20]]
    return "columns: " + ", ".join(shown) + ", ..." * (len(schema) > len(shown))


# Values


def taken(table: Any, names: Names) -> Any:
    """What is in a table or batch under some names, a pyarrow array of one piece or several."""
    column = table.column(names[0])
    if len(names) > 1:
        import pyarrow.compute

        column = pyarrow.compute.struct_field(column, list(names[1:]))
    return column


def texts(column: Any) -> list[bytes | None]:
    """Integers and texts of an array, as texts."""
    arrow = pyarrow()
    if arrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if _is_text(column.type):
        found: list[bytes | None] = column.cast(arrow.large_binary()).to_pylist()
        return found
    return [None if value is None else b"%d" % value for value in column.to_pylist()]


def some_beginnings(batch: Any, names: Names) -> list[bytes]:
    """How some values of a binary column begin."""
    column = taken(batch, names).cast(pyarrow().large_binary())
    column = column.drop_null()[:_MOST_PROBED]
    return [value.as_buffer()[:16].to_pybytes() for value in column]


# Where the bytes of rows are


@dataclass
class Rows:
    """The rows of a shard: names, labels, and where their bytes are."""

    names: list[bytes | None] = field(default_factory=list)
    labels: list[bytes | None] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    expanded: bool = False


def add_rows(index: Index, first: int, rows: Rows, damage: list[str]) -> None:
    """Adds rows to an index; ``first`` is the number of the first. See Note [Rows of columns]."""
    columns = zip(rows.names, rows.labels, rows.begins, rows.lengths, strict=True)
    for number, (name, label, begin, length) in enumerate(columns, first):
        tail = b"-" if label is None else b"+" + label
        if begin >= 0 and rows.expanded:
            index.add(name or b"%d" % number, 0, 0, _EXPANDED + _PLACE.pack(begin, length) + tail)
        elif begin >= 0:
            index.add(name or b"%d" % number, begin, length, _HERE + tail)
        elif name:
            index.add(name, 0, 0, _FILE + tail)
        else:
            damage.append(f"row {number:,} has no image")


def written(path: str, index: Index) -> Iterator[Written]:
    """The images of a shard that hold them as they are.

    Raises:
        SourceError: others do not.
    """
    for name, begin, length, text in index.entries():
        if text is None or text[:1] != _HERE:
            raise SourceError(path, f"{name!r} is stored otherwise than it would be written")
        yield Written(name, path, begin, length, text[2:].decode(errors="replace") or "-1")


def summary(damage: list[str]) -> str:
    """What is damaged, in short."""
    return "; ".join(damage[:3]) + "; ..." * (len(damage) > 3)


class Gathered:
    """The samples of a set, and the files that they lie in.

    Attributes:
        files: the shards and, after them, what else is read.
        found: the samples.
        classes: their names, where labels are integers with names.
    """

    def __init__(
        self, files: Sequence[str], columns: Columns, label: Label, classes: Sequence[str] | None
    ) -> None:
        self.files = list(files)
        self.found = Found()
        self._columns = columns
        self._label = label
        self._named = columns.classes if classes is not None else ()
        self._numbers = {name: number for number, name in enumerate(files)}
        named = classes is None and isinstance(label, str)
        self.classes = list(columns.classes) if named else []

    def number(self, path: str) -> int:
        """That of a file, which is added if it is not there yet."""
        if path not in self._numbers:
            self._numbers[path] = len(self.files)
            self.files.append(path)
        return self._numbers[path]

    def add(self, name: str, file: int, begin: int, length: int, label: bytes | None) -> None:
        """Adds a sample."""
        value: Any = None if label is None else label.decode(errors="replace")
        if not isinstance(self._label, str):
            value = None if self._label is None else self._label.get(name)
        elif value is not None and self._columns.integers:
            value = int(value)
            if 0 <= value < len(self._named):
                value = self._named[value]
            elif (
                value == -1 and self._columns.classes
            ):  # Hugging Face's datasets write it where a label is missing
                value = None
        self.found.add(name, file, begin, length, value)

    def add_file(self, name: str, base: str, limit: str, label: bytes | None) -> str:
        """Adds a sample that is a file of its own; says what prevents that.

        Args:
            name: its path.
            base: the folder that this is relative to.
            limit: the folder that it must not leave.
            label: that of the sample.
        """
        path = os.path.normpath(os.path.join(base, name))
        inside = os.path.join(os.path.normpath(limit), "")
        if not path.startswith(inside) or "\0" in name:
            return f"names an image {name!r} outside of {limit}: root= allows for another folder"
        try:
            status = os.stat(path)
        except OSError as error:
            return f"names an image {name!r}: {error.strerror or error}"
        if not stat.S_ISREG(status.st_mode):
            return f"names an image {name!r} that is no file"
        self.add(name, self.number(path), 0, status.st_size, label)
        return ""

    def add_index(
        self, number: int, index: Index, base: str, expanded: Callable[[], str]
    ) -> list[str] | None:
        """Adds the samples of a shard; says which cannot be, or None where the index is not right.

        Args:
            number: of the shard.
            index: with texts as Note [Rows of columns] says.
            base: the folder of files, which they must not leave.
            expanded: the path of the file that images of this shard were expanded to.
        """
        damage = []
        entries = list(index.entries())
        other, size = -1, 0
        if any(text is not None and text[:1] == _EXPANDED for *_, text in entries):
            path = expanded()
            other, size = self.number(path), os.path.getsize(path) if os.path.exists(path) else -1
        places = []
        for name, begin, length, text in entries:
            at = 1 + _PLACE.size * (text is not None and text[:1] == _EXPANDED)
            if text is None or text[at : at + 1] not in (b"-", b"+"):
                return None
            if text[:1] == _EXPANDED:
                begin, length = _PLACE.unpack_from(text, 1)
                if not 0 <= begin <= begin + length <= size:
                    return None
            value = text[at + 1 :] if text[at : at + 1] == b"+" else None
            if value is not None and self._columns.integers and not _is_integer(value):
                return None
            places.append((name, text[:1], begin, length, value))
        for row, (name, where, begin, length, value) in enumerate(places):
            if where == _FILE:
                told = self.add_file(name, base, base, value)
                if told:
                    damage.append(f"row {row:,} {told}")
            else:
                self.add(name, number if where == _HERE else other, begin, length, value)
        return damage


class ColumnSet(Sharded):
    """A map-style dataset of the images in shards with columns; arguments as those of `Sharded`."""

    def __init__(
        self,
        given: list[str],
        found: Gathered,
        classes: Sequence[str] | None,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
        exif: bool,
        max_pixels: int | None,
        max_bytes: int | None,
    ) -> None:
        files, samples = found.files, found.found
        super().__init__(
            files, samples, classes, transform, target_transform, exif, max_pixels, max_bytes
        )
        self.shards = given
        self.classes = found.classes or self.classes


def gathered(
    paths: list[str],
    columns: Columns,
    scan: Callable[[str], Index],
    wanted: str,
    label: Label,
    classes: Sequence[str] | None,
    damaged: str,
    root: str | os.PathLike[str] | None,
    cache: Cache,
) -> Gathered:
    """The samples of shards.

    Args:
        paths: of the shards.
        columns: that are read.
        scan: reads a shard.
        wanted: see `shards.indexes`.
        label: as `stoker.open` takes it.
        classes: as `stoker.open` takes them.
        damaged: "raise", or "skip" to warn of what is damaged.
        root: the folder that paths in the shards are relative to; None: that of each shard.
        cache: see `shards.indexes`.

    Raises:
        SourceError: a shard cannot be read, or is damaged.
    """
    read, told = indexes(paths, scan, wanted, damaged, cache)
    found = Gathered(paths, columns, label, classes)
    found.found.told += told
    for number, (path, index) in enumerate(zip(paths, read, strict=True)):
        base = os.path.abspath(os.path.expanduser(root or os.path.dirname(path)))

        def expanded(path: str = path) -> str:
            return str(kept.place(expansion(path, columns)))

        damage = found.add_index(number, index, base, expanded)
        if damage is None:  # what was kept isn't right, or the expanded file is gone
            damage = found.add_index(number, scan(path), base, expanded) or []
        if damage and (damaged == "raise" or not found.found.names):
            raise SourceError(path, summary(damage))
        if damage:
            found.found.told.append(f"{path}: {summary(damage)}; what is damaged is left out")
    if not found.found.names and told:
        raise SourceError(paths[0], next(index.damage for index in read if index.damage))
    return found


def _is_integer(text: bytes) -> bool:
    return text.removeprefix(b"-").isdigit() and len(text) < 21


# Expanding


def expansion(path: str, columns: Columns) -> str:
    """The name of the file in the cache that the images of a shard are expanded to.

    Raises:
        SourceError: the shard is not there.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise SourceError(path, error.strerror or str(error)) from error
    state = [os.path.abspath(path), str(status.st_size), str(status.st_mtime_ns), *columns.image]
    digest = hashlib.blake2b(os.fsencode("\0".join(state)), digest_size=16).hexdigest()
    return f"expanded/{digest}-{os.path.basename(path)[-_MOST_NAME:]}"


def expand(path: str, name: str, batches: Callable[[], Iterator[Any]]) -> list[int]:
    """Writes binary arrays into a file of the cache, if they are not there yet.

    Args:
        path: of the shard, for errors.
        name: of the file.
        batches: makes the arrays, each time from the first on.

    Returns:
        How long each value is, one after the other; -1 where it is null.

    Raises:
        SourceError: it cannot be written.
    """
    lengths: list[int] = []

    def write(out: BinaryIO) -> None:
        lengths.clear()
        for batch in batches():
            for value in batch.cast(pyarrow().large_binary()):
                content = value.as_buffer()
                lengths.append(-1 if content is None else content.size)
                if content is not None:
                    out.write(content)

    try:
        file = str(kept.file(name, write))
        if not lengths:
            with open(os.devnull, "wb") as nowhere:
                write(nowhere)
        if os.path.getsize(file) != sum(length for length in lengths if length > 0):
            raise SourceError(file, "is not what was written: remove it")
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise SourceError(path, f"{error.strerror or error}{where}") from error
    return lengths


def begins_of(lengths: Sequence[int]) -> list[int]:
    """Where values of these lengths begin, one after the other; -1 where the length is."""
    sizes = np.array(lengths, np.int64)
    sums = np.cumsum(np.maximum(sizes, 0)) - np.maximum(sizes, 0)
    begins: list[int] = np.where(sizes < 0, -1, sums).tolist()
    return begins
