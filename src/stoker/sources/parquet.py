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
from stoker.sources.parquet_pages import OddPagesError, Spans, spans
from stoker.sources.shards import Index, Sample, Sharded, paths_of

_MAGICS = (b"PAR1", b"PARE")
_SPLIT = re.compile(r"(train|valid|val|dev|test|eval)(?:ing|idation|uation)?(?![a-zA-Z])")
_BUFFER_BYTES = 1 << 20
_ROWS_AT_ONCE = 64
_MOST_ROWS_ANYWAY = 1 << 20
_GROUP_ROWS = 100
_GROUP_BYTES = 64 << 20
_INTEGER = {"dtype": "int64", "_type": "Value"}
_WRITTEN = ("image", "bytes"), ("image", "path"), ("label",)


class Parquet(Sharded):
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
        cache: keep the shards' indexes between runs; see Note [Kept indexes].

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
        cache: bool = True,
    ) -> None:
        given = _paths(shards)
        columns = _columns(given[0], image, label)

        def scan(path: str) -> Index:
            its = columns if path == given[0] else _columns(path, image, label)
            return _scan(path, columns, its)

        wanted = json.dumps(["parquet", *map(str, vars(columns).values())]) if cache else None
        found = cols.gathered(given, columns, scan, wanted, label, classes, damaged, root)
        super().__init__(
            found.files,
            found.found,
            classes,
            transform,
            target_transform,
            exif,
            max_pixels,
            max_bytes,
        )
        self.shards = given
        self.classes = found.classes or self.classes


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
def _opened(path: str) -> Iterator[Any]:
    """A file, opened by pyarrow."""
    arrow = cols.pyarrow()
    import pyarrow.parquet

    try:
        with arrow.OSFile(os.fsencode(path)) as raw:
            yield pyarrow.parquet.ParquetFile(
                raw, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
            )
    except cols.problems() as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, f"cannot be read as Parquet: {cols.reason(error)}") from error


def _columns(path: str, image: str | None, label: Label) -> Columns:
    """The columns of a file; see `columns.columns_of`."""
    if not os.path.isfile(path):
        raise SourceError(path, "is no file" if os.path.exists(path) else "No such file")
    with _opened(path) as file:

        def beginnings(names: Names) -> list[bytes]:
            if file.metadata.num_row_groups == 0:
                return []
            groups = file.iter_batches(
                _ROWS_AT_ONCE, row_groups=[0], columns=[".".join(names)], use_threads=False
            )
            return [start for batch in groups for start in cols.some_beginnings(batch, names)][:1]

        return cols.columns_of(path, file.schema_arrow, image, label, beginnings)


def _scan(path: str, columns: Columns, its: Columns) -> Index:
    """Reads where the images of a file lie, and names and labels; see Note [Rows of columns]."""
    if its.classes != columns.classes or its.integers != columns.integers:
        raise SourceError(path, "has other classes than the first file: open them one by one")
    index, damage = Index(), list[str]()
    groups: dict[int, Rows] = {}
    with _opened(path) as file, open(path, "rb", buffering=0) as raw:
        meta, size = file.metadata, os.fstat(raw.fileno()).st_size
        counts = [meta.row_group(number).num_rows for number in range(meta.num_row_groups)]
        if min(counts, default=0) < 0 or sum(counts) > max(size, _MOST_ROWS_ANYWAY):
            raise SourceError(path, f"says that it has {sum(counts):,} rows in {size:,} bytes")
        leaf = _leaf(file, its.image)
        for number in range(meta.num_row_groups):
            try:
                groups[number] = _others(file, number, its)
            except cols.problems() as error:
                damage.append(f"row group {number:,} is damaged: {cols.reason(error)}")
                continue
            try:
                begins, lengths = _in_place(raw.fileno(), size, file, number, leaf)
                groups[number].begins = begins.tolist()
                groups[number].lengths = lengths.tolist()
            except OddPagesError:
                groups[number].expanded = True
        _expand(path, file, its.image, groups, damage, cols.expansion(path, columns))
    for number, rows in groups.items():
        cols.add_rows(index, sum(counts[:number]), rows, damage)
    index.damage = cols.summary(damage)
    return index


def _others(file: Any, number: int, columns: Columns) -> Rows:
    """Names and labels of a row group."""
    count = file.metadata.row_group(number).num_rows
    rows = Rows([None] * count, [None] * count)
    if columns.others:
        wanted = [".".join(names) for names in columns.others]
        table = file.read_row_group(number, columns=wanted, use_threads=False)
        if table.num_rows != count:
            raise ValueError(f"{table.num_rows:,} rows, and {count:,} in the footer")
        if columns.path is not None:
            rows.names = cols.texts(cols.taken(table, columns.path))
        if columns.label is not None:
            rows.labels = cols.texts(cols.taken(table, columns.label))
    return rows


def _leaf(file: Any, names: Names) -> int | None:
    """The number of a column among those that the file stores; None where it isn't certain."""
    path = ".".join(names)
    fitting = [n for n in range(len(file.schema)) if file.schema.column(n).path == path]
    return fitting[0] if len(fitting) == 1 else None


def _in_place(fd: int, size: int, file: Any, number: int, leaf: int | None) -> Spans:
    """Where the values of a column lie in a row group.

    Raises:
        OddPagesError: they do not lie there as they are.
    """
    if leaf is None:
        raise OddPagesError("another column has that name")
    column, group = file.schema.column(leaf), file.metadata.row_group(number)
    chunk, rows = group.column(leaf), group.num_rows
    if (
        chunk.compression != "UNCOMPRESSED"
        or chunk.physical_type != "BYTE_ARRAY"
        or column.max_repetition_level != 0
        or chunk.num_values != rows
        or chunk.file_path
    ):
        raise OddPagesError("stored otherwise")
    begin, length = chunk.data_page_offset, chunk.total_compressed_size
    if chunk.dictionary_page_offset and chunk.dictionary_page_offset < begin:
        begin = chunk.dictionary_page_offset
    if not 0 <= begin <= begin + length <= size:
        raise OddPagesError("outside the file")
    return spans(fd, begin, length, rows, column.max_definition_level)


def _expand(
    path: str, file: Any, image: Names, groups: dict[int, Rows], damage: list[str], name: str
) -> None:
    """Expands the images of those row groups that need it, as far as they can be read."""
    odd = [number for number, rows in groups.items() if rows.expanded]
    read: dict[int, int] = {}
    broken: dict[int, str] = {}

    def batches() -> Iterator[Any]:
        for number in odd:
            read[number] = 0
            try:
                for batch in file.iter_batches(
                    _ROWS_AT_ONCE,
                    row_groups=[number],
                    columns=[".".join(image)],
                    use_threads=False,
                ):
                    read[number] += batch.num_rows
                    yield cols.taken(batch, image)
            except cols.problems() as error:
                broken[number] = cols.reason(error)

    if not odd:
        return
    lengths = cols.expand(path, name, batches)
    begins, at = cols.begins_of(lengths), 0
    for number in odd:
        rows, count = groups[number], min(read[number], len(groups[number].names))
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


def scan_written(path: str) -> Index:
    """What is in a file that ``write`` wrote."""
    columns = Columns(*_WRITTEN, True, ())
    return _scan(path, columns, columns)


def written(index: Index) -> list[tuple[str, int, int, str]]:
    """Name, begin, length and label of each image in such a file."""
    return [
        (name, begin, length, (text or b"")[2:].decode(errors="replace") or "-1")
        for name, begin, length, text in index.entries()
    ]
