"""Images in Parquet files: Hugging Face's, img2dataset's, or any with a column of encoded images.

A file is ``PAR1``; row groups, of each a chunk of pages for every column; the footer, which says
where these are; its uint32 length; ``PAR1``. pyarrow reads the footer, names and labels; images
that are neither compressed nor encoded otherwise than as bytes are read where they lie, which
`stoker.sources.parquet_pages` finds out. Hugging Face's own files are so. Of row groups that are
not, the images are expanded into the cache folder, once. (apache/parquet-format, README.md.)

What is read of columns and their metadata is in `stoker.sources.columns`.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from stoker.errors import SourceError
from stoker.sources import columns as cols
from stoker.sources.columns import Columns, Label, Names, Rows
from stoker.sources.parquet_footer import Group, groups
from stoker.sources.parquet_pages import OddPagesError, Spans, check, spans
from stoker.sources.shards import Cache, Index, Sample, Written, paths_of

_MAGICS = (b"PAR1", b"PARE")
_SPLIT = re.compile(r"(train|valid|val|dev|test|eval)(?:ing|idation|uation)?(?![a-zA-Z])")
_BUFFER_BYTES = 1 << 20
_ROWS_AT_ONCE = 64
_TEXTS_AT_ONCE = 1 << 14
_BYTE_ARRAYS = 6
_GROUP_ROWS = 100
_GROUP_BYTES = 64 << 20
_INTEGER = {"dtype": "int64", "_type": "Value"}
_WRITTEN = ("image", "bytes"), ("image", "path"), ("label",)


class Parquet(cols.ColumnSet):
    """A map-style dataset of the images in Parquet files, at random access.

    Args:
        shards: paths of files, or one path, or a folder with files; ``{000000..000099}`` and
            ``{a,b}`` stand for several, ``*``, ``?`` and ``[...]`` for what is there.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        image: the column with the encoded images, a dot before what is in a struct; left out, the
            first of Hugging Face's images, else the first that holds images.
        label: the column with the label, an integer or text; a mapping of names to labels; None for
            no labels. ``"auto"`` is the first with names of classes, else of ``label``, ``class``,
            ``cls``, ``target``, if there is any.
        classes: names of classes, each at its label, for labels that are texts or have names; left
            out, those that the file names, else all, sorted.
        damaged: ``"raise"``, or ``"skip"`` to leave out what cannot be read, with a warning.
        root: the folder that paths are relative to, and must not leave, where rows name files
            instead of holding images; left out, that of the file.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.
        cache: keep the shards' indexes between runs, ``"beside"`` them if asked; see Note [Kept
            indexes].

    Raises:
        SourceError: a file is absent, no Parquet, or damaged, or has no such column.
        ImportError: the extra ``stoker[parquet]`` is not installed.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        image: str | None = None,
        label: Label = "auto",
        classes: Sequence[str] | None = None,
        damaged: str = "raise",
        root: str | os.PathLike[str] | None = None,
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
        cache: Cache = True,
    ) -> None:
        given = _paths(shards)
        columns = _columns(given[0], image, label)

        def scan(path: str) -> Index:
            its = columns if path == given[0] else _columns(path, image, label)
            return _scan(path, columns, its)

        wanted = json.dumps(["parquet", *map(str, vars(columns).values())])
        found = cols.gathered(given, columns, scan, wanted, label, classes, damaged, root, cache)
        super().__init__(
            given, found, classes, transform, target_transform, exif, max_pixels, max_bytes
        )


def recognises(path: str, head: bytes) -> bool:
    """Whether a file that begins with ``head`` is Parquet, or a folder holds such files."""
    return head.startswith(_MAGICS) or bool(os.path.isdir(path) and _inside(path))


def _inside(folder: str) -> list[str]:
    """The Parquet files in a folder or in its ``data``, unless there are tar shards beside them."""
    if glob.glob(os.path.join(glob.escape(folder), "*.tar")):
        return []
    for place in (folder, os.path.join(folder, "data")):
        found = sorted(glob.glob(os.path.join(glob.escape(place), "*.parquet")))
        if found:
            return found
    return []


def _paths(shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """The files that are meant.

    Raises:
        SourceError: there are none, or those of a folder are several splits.
    """
    single = os.path.expanduser(os.fspath(shards)) if isinstance(shards, str | os.PathLike) else ""
    if not os.path.isdir(single):
        return paths_of(shards)
    found = _inside(single)
    if not found:
        raise SourceError(single, "holds no Parquet files")
    splits: dict[str, str] = {}
    for path in found:
        split = _SPLIT.match(os.path.basename(path))
        splits.setdefault(split[1] if split else "", path)
    if len(splits) > 1:
        shown = os.path.join(os.path.dirname(found[0]), min(s for s in splits if s) + "*.parquet")
        names = ", ".join(os.path.basename(path) for path in splits.values())
        raise SourceError(single, f"holds several splits ({names}): open one, as with {shown!r}")
    return found


# Reading


@contextmanager
def _opened(path: str) -> Iterator[tuple[Any, int]]:
    """A file, opened by pyarrow, and as a descriptor."""
    arrow = cols.pyarrow()
    import pyarrow.parquet

    try:
        with arrow.OSFile(os.fsencode(path)) as raw, open(path, "rb", buffering=0) as own:
            file = pyarrow.parquet.ParquetFile(
                raw, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
            )
            yield file, own.fileno()
    except cols.problems() as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, f"cannot be read as Parquet: {cols.reason(error)}") from error


def _columns(path: str, image: str | None, label: Label) -> Columns:
    """The columns of a file; see `columns.columns_of`."""
    if not os.path.isfile(path):
        raise SourceError(path, "is no file" if os.path.exists(path) else "No such file")
    with _opened(path) as (file, fd):
        found = groups(path, fd)

        def beginnings(names: Names) -> list[bytes]:
            try:
                batches = (
                    _read(file, fd, found[0], 0, [names], _ROWS_AT_ONCE) if found else iter([])
                )
                starts = (some for batch in batches for some in cols.some_beginnings(batch, names))
                return list(itertools.islice(starts, 1))
            except OddPagesError:
                return []

        return cols.columns_of(path, file.schema_arrow, image, label, beginnings)


def _read(
    file: Any, fd: int, group: Group, number: int, columns: list[Names], rows: int
) -> Iterator[Any]:
    """Batches of so many rows of some columns of a row group, whose pages are looked at first.

    Raises:
        OddPagesError: they are not as a sound file has them.
    """
    for names in columns:
        chunk = group.chunks.get(names)
        if chunk is None or chunk.repeated or chunk.values != group.rows:
            raise OddPagesError(f"column {'.'.join(names)!r} has not a value for each row")
        check(fd, chunk.begin, chunk.size, group.rows, chunk.codec != 0)
    wanted = [".".join(names) for names in columns]
    yield from file.iter_batches(rows, row_groups=[number], columns=wanted, use_threads=False)


def _scan(path: str, columns: Columns, its: Columns) -> Index:
    """Reads where the images of a file lie, and names and labels; see Note [Rows of columns]."""
    if its.classes != columns.classes or its.integers != columns.integers:
        raise SourceError(path, "has other classes than the first file: open them one by one")
    index, damage = Index(), list[str]()
    parts: dict[int, Rows] = {}
    with _opened(path) as (file, fd):
        found = groups(path, fd)
        for number, group in enumerate(found):
            if group.rows == 0:  # there may be pages of no values, or none
                continue
            try:
                parts[number] = _others(file, fd, group, number, its)
            except cols.problems() as error:
                damage.append(f"row group {number:,} is damaged: {cols.reason(error)}")
                continue
            try:
                begins, lengths = _in_place(fd, group, its.image)
                parts[number].begins = begins.tolist()
                parts[number].lengths = lengths.tolist()
            except OddPagesError:
                parts[number].expanded = True

        def read(number: int) -> Iterator[Any]:
            return _read(file, fd, found[number], number, [its.image], _ROWS_AT_ONCE)

        _expand(path, read, its.image, parts, damage, cols.expansion(path, columns))
    first = 0
    for number, group in enumerate(found):
        cols.add_rows(index, first, parts.get(number, Rows()), damage)
        first += group.rows
    index.damage = cols.summary(damage)
    return index


def _others(file: Any, fd: int, group: Group, number: int, columns: Columns) -> Rows:
    """Names and labels of a row group."""
    count = group.rows
    rows = Rows()
    if columns.others:
        for batch in _read(file, fd, group, number, columns.others, _TEXTS_AT_ONCE):
            if columns.path is not None:
                rows.names += cols.texts(cols.taken(batch, columns.path))
            if columns.label is not None:
                rows.labels += cols.texts(cols.taken(batch, columns.label))
    rows.names += [None] * (0 if columns.path else count)
    rows.labels += [None] * (0 if columns.label else count)
    if not len(rows.names) == len(rows.labels) == count:
        raise ValueError(f"it has not the {count:,} rows that the footer says")
    return rows


def _in_place(fd: int, group: Group, image: Names) -> Spans:
    """Where the images of a row group lie.

    Raises:
        OddPagesError: they do not lie there as they are.
    """
    chunk = group.chunks.get(image)
    if (
        chunk is None
        or chunk.repeated
        or chunk.codec != 0
        or chunk.type != _BYTE_ARRAYS
        or chunk.values != group.rows
    ):
        raise OddPagesError("stored otherwise")
    return spans(fd, chunk.begin, chunk.size, group.rows, chunk.levels)


def _expand(
    path: str,
    groups_read: Callable[[int], Iterator[Any]],
    image: Names,
    parts: dict[int, Rows],
    damage: list[str],
    name: str,
) -> None:
    """Expands the images of those row groups that need it, as far as they can be read."""
    odd = [number for number, rows in parts.items() if rows.expanded]
    read: dict[int, int] = {}
    broken: dict[int, str] = {}

    def batches() -> Iterator[Any]:
        for number in odd:
            read[number] = 0
            try:
                for batch in groups_read(number):
                    read[number] += batch.num_rows
                    yield cols.taken(batch, image)
            except cols.problems() as error:
                broken[number] = cols.reason(error)

    if not odd:
        return
    lengths = cols.expand(path, name, batches)
    begins, at = cols.begins_of(lengths), 0
    for number in odd:
        rows = parts[number]
        count = min(read[number], len(rows.names))
        if number in broken or read[number] != len(rows.names):
            told = broken.get(number, "another number of rows than the footer says")
            damage.append(f"row group {number:,} is damaged after {count:,} rows: {told}")
        rows.names, rows.labels = rows.names[:count], rows.labels[:count]
        rows.begins, rows.lengths = begins[at : at + count], lengths[at : at + count]
        at += read[number]


# Writing


def write(file: BinaryIO, samples: Iterator[Sample]) -> None:
    """Writes a file, as Hugging Face's datasets write images; images lie in it as they are."""
    arrow = cols.pyarrow()
    import pyarrow.parquet

    first = next(samples, None)
    classes = list(first.classes) if first is not None else []
    label = {"names": classes, "_type": "ClassLabel"} if classes else _INTEGER
    features = {"image": {"_type": "Image"}, "label": label}
    image = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    schema = arrow.schema(
        [("image", image), ("label", arrow.int64())],
        {"huggingface": json.dumps({"info": {"features": features}})},
    )
    with pyarrow.parquet.ParquetWriter(
        file,
        schema,
        compression="none",
        use_dictionary=False,
        write_statistics=["label"],
        write_page_index=True,
        write_batch_size=1,  # a page ends with the image that makes it a mebibyte
    ) as writer:
        rows: list[dict[str, Any]] = []
        size = 0
        for sample in itertools.chain([] if first is None else [first], samples):
            if rows and (len(rows) == _GROUP_ROWS or size + len(sample.content) > _GROUP_BYTES):
                writer.write_table(arrow.Table.from_pylist(rows, schema))
                rows, size = [], 0
            image = {"bytes": sample.content, "path": path_of(sample)}
            rows.append({"image": image, "label": None if sample.label == -1 else sample.label})
            size += len(sample.content)
        if rows:
            writer.write_table(arrow.Table.from_pylist(rows, schema))


def path_of(sample: Sample) -> str:
    """The path of a sample in a file that ``write`` writes."""
    return os.fsencode(sample.name).decode(errors="replace")


def written(path: str) -> Iterator[Written]:
    """The images in a file that ``write`` wrote.

    Raises:
        SourceError: it is damaged, or another file.
    """
    columns = Columns(*_WRITTEN, True, ())
    index = _scan(path, columns, columns)
    if index.damage:
        raise SourceError(path, index.damage)
    return cols.written(path, index)
