"""Images in Arrow IPC files, such as Hugging Face's ``save_to_disk`` writes, and in ``Dataset``s.

A folder of ``save_to_disk`` has ``state.json``, whose ``_data_files[i].filename`` are Arrow files;
one of a ``DatasetDict`` has ``dataset_dict.json``, whose ``splits`` are such folders. An Arrow file
is a stream, or ``ARROW1`` and a stream and a footer. A stream is messages, the schema first, then
batches of rows: uint32 0xFFFFFFFF, int32 length of the metadata, that, and a body of buffers; it
ends with 0xFFFFFFFF and a zero. The values of a binary column lie one after the other in a buffer,
and another says where each begins. (Arrow, format/Columnar.rst; datasets, arrow_dataset.py.)

Files are mapped into memory while pyarrow finds out where values lie, and not afterwards. Images in
compressed batches, and those that are in memory alone, are expanded into the cache folder, once.

What is read of columns and their metadata is in `stoker.sources.columns`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker import cache as kept
from stoker.errors import SourceError
from stoker.sources import columns as cols
from stoker.sources.columns import Columns, Gathered, Label, Names, Rows
from stoker.sources.shards import Cache, Index, Sharded, paths_of

if TYPE_CHECKING:
    from datasets import Dataset

_FILE_MAGIC, _STREAM_MAGIC = b"ARROW1", b"\xff\xff\xff\xff"
_END = _STREAM_MAGIC + bytes(4)
_COMPARED_BYTES = 4096
_ROWS_AT_ONCE = 64


class Arrow(cols.ColumnSet):
    """A map-style dataset of the images in Arrow IPC files, at random access.

    Args:
        shards: the folder that ``save_to_disk`` wrote, or paths of files, or one path;
            ``{000000..000099}`` and ``{a,b}`` stand for several, ``*``, ``?`` and ``[...]`` for
            what is there.
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
        SourceError: a file is absent, no Arrow file, or damaged, or has no such column.
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
        given, features = _paths(shards)
        columns = _columns(given[0], features, image, label)

        def scan(path: str) -> Index:
            its = columns if path == given[0] else _columns(path, features, image, label)
            return _scan(path, columns, its)

        wanted = json.dumps(["arrow", *map(str, vars(columns).values())])
        found = cols.gathered(given, columns, scan, wanted, label, classes, damaged, root, cache)
        super().__init__(
            given, found, classes, transform, target_transform, exif, max_pixels, max_bytes
        )


def recognises(path: str, head: bytes) -> bool:
    """Whether a file is in Arrow's IPC format, or a folder is one of ``save_to_disk``."""
    if head.startswith((_FILE_MAGIC, _STREAM_MAGIC)):
        return True
    return any(
        os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json")
    )


def _paths(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> tuple[list[str], Any]:
    """The files that are meant, and the features that their folder says they have.

    Raises:
        SourceError: there are none, or those of a folder are several splits.
    """
    single = os.path.expanduser(os.fspath(shards)) if isinstance(shards, str | os.PathLike) else ""
    if not os.path.isdir(single):
        return paths_of(shards), None
    if os.path.isfile(os.path.join(single, "dataset_dict.json")):
        splits = _json(single, "dataset_dict.json").get("splits")
        named = ", ".join(map(str, splits)) if isinstance(splits, list) else "unknown"
        raise SourceError(single, f"holds several splits ({named}): open the folder of one")
    state = _json(single, "state.json")
    if state.get("_indices_data_files"):
        raise SourceError(single, "has an order of its own: load it with datasets, and open that")
    try:
        names = [file["filename"] for file in state["_data_files"]]
        if not names or not all(os.path.basename(name) == name != ".." for name in names):
            raise ValueError(f"names the files {names}")
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(single, f"its state.json names no data files: {error}") from error
    there = os.path.isfile(os.path.join(single, "dataset_info.json"))
    info = _json(single, "dataset_info.json") if there else {}
    return [os.path.join(single, name) for name in names], info.get("features")


def _json(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            content = json.load(file)
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        told = getattr(error, "strerror", None) or error
        raise SourceError(path, f"cannot be read: {told}") from error
    return content


# Files


@contextmanager
def _mapped(path: str, fields: Sequence[str] = ()) -> Iterator[tuple[Any, Any]]:
    """A mapped file, and pyarrow's reader of it; of some columns only, if any are named."""
    arrow = cols.pyarrow()
    from pyarrow import ipc

    try:
        with arrow.memory_map(os.fsencode(path)) as mapped:
            is_file = mapped.read(len(_FILE_MAGIC)) == _FILE_MAGIC
            opened = ipc.open_file if is_file else ipc.open_stream
            mapped.seek(0)
            reader = opened(mapped)
            if fields and not is_file:  # of a file that has a footer, pyarrow would copy them
                numbers = [reader.schema.get_field_index(name) for name in fields]
                options = ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
                mapped.seek(0)
                reader = opened(mapped, options=options)
            yield mapped, reader
    except cols.problems() as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, f"cannot be read as Arrow: {cols.reason(error)}") from error


def _batches(mapped: Any, reader: Any, damage: list[str]) -> Iterator[Any]:
    """The batches of a file, as far as they can be read."""
    rows = 0
    try:
        if hasattr(reader, "get_batch"):
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch.validate(full=True)
                yield batch
                rows += batch.num_rows
            return
        for batch in reader:
            batch.validate(full=True)
            yield batch
            rows += batch.num_rows
        end = mapped.tell()
        mapped.seek(max(0, end - len(_END)))
        if mapped.read(len(_END)) != _END:
            damage.append(f"ends without an end mark, after {rows:,} rows")
    except cols.problems() as error:
        damage.append(f"is damaged after {rows:,} rows: {cols.reason(error)}")


def _columns(path: str, features: Any, image: str | None, label: Label) -> Columns:
    """The columns of a file; see `columns.columns_of`."""
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        raise SourceError(path, "is no file, or empty" if os.path.exists(path) else "No such file")
    with _mapped(path) as (mapped, reader):
        schema = reader.schema
        if features is not None and b"huggingface" not in (schema.metadata or {}):
            text = json.dumps({"info": {"features": features}})
            schema = schema.with_metadata({"huggingface": text})

        probed: list[Any] = []

        def beginnings(names: Names) -> list[bytes]:
            probed.extend([] if probed else [next(_batches(mapped, reader, []), None)])
            return [] if probed[0] is None else cols.some_beginnings(probed[0], names)

        return cols.columns_of(path, schema, image, label, beginnings)


def _scan(path: str, columns: Columns, its: Columns) -> Index:
    """Reads where the images of a file lie, and names and labels; see Note [Rows of columns]."""
    if its.classes != columns.classes or its.integers != columns.integers:
        raise SourceError(path, "has other classes than the first file: open them one by one")
    index, damage = Index(), list[str]()
    parts: list[Rows] = []
    fields = list(dict.fromkeys(names[0] for names in [its.image, *its.others]))
    with _mapped(path, fields) as (mapped, reader):
        size = mapped.size()
        start = mapped.tell()
        mapped.seek(0)
        first = mapped.read_buffer(1).address
        mapped.seek(start)
        for batch in _batches(mapped, reader, damage):
            none: list[bytes | None] = [None] * batch.num_rows
            rows = Rows(none, none)
            if its.path is not None:
                rows.names = cols.texts(cols.taken(batch, its.path))
            if its.label is not None:
                rows.labels = cols.texts(cols.taken(batch, its.label))
            found = _in_place(cols.taken(batch, its.image), first, size)
            rows.expanded = found is None
            if found is not None:
                rows.begins, rows.lengths = found[0].tolist(), found[1].tolist()
            parts.append(rows)
    if any(rows.expanded for rows in parts):
        _expand(path, its.image, fields, parts, cols.expansion(path, columns))
    at = 0
    for rows in parts:
        cols.add_rows(index, at, rows, damage)
        at += len(rows.names)
    index.damage = cols.summary(damage)
    return index


def _expand(path: str, image: Names, fields: list[str], parts: list[Rows], name: str) -> None:
    """Expands the images of those batches that need it."""

    def batches() -> Iterator[Any]:
        with _mapped(path, fields) as (mapped, reader):
            for batch, rows in zip(_batches(mapped, reader, []), parts, strict=False):
                if rows.expanded:
                    yield cols.taken(batch, image)

    lengths = cols.expand(path, name, batches)
    begins, at = cols.begins_of(lengths), 0
    for rows in parts:
        if rows.expanded:
            end = at + len(rows.names)
            rows.begins, rows.lengths = begins[at:end], lengths[at:end]
            at = end


def _in_place(values: Any, first: int, size: int) -> cols.Spans | None:
    """Where binary values lie in ``size`` bytes at the address ``first``; None: not all do."""
    types = cols.pyarrow().types
    wide = types.is_large_binary(values.type)
    if not wide and not types.is_binary(values.type):
        return None
    count = len(values)
    begins, lengths = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    present = values.is_valid().to_numpy(zero_copy_only=False)
    if not present.any():
        return begins, lengths
    _, places, data = values.buffers()
    kind = np.dtype(np.int64 if wide else np.int32)
    offsets = np.frombuffer(places, kind, count + 1, values.offset * kind.itemsize)
    offsets = offsets.astype(np.int64)
    start = data.address - first if data is not None else 0
    if not 0 <= start <= start + int(offsets[-1]) <= size:
        return None
    begins[present] = (start + offsets[:-1])[present]
    lengths[present] = np.diff(offsets)[present]
    return begins, lengths


# Datasets


def of_dataset(
    dataset: Dataset,
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
) -> Sharded:
    """The samples of a Hugging Face ``Dataset``, in its order; arguments as those of ``Arrow``.

    Images are read from the Arrow files that it maps, and those that are not in such a file are
    written into the cache folder, once. Without ``root``, paths are opened as the dataset itself
    would do.

    Raises:
        SourceError: it has no such column; a row has no image.
        ValueError: it is several splits, a stream, or has a transform of its own.
    """
    table = _table(dataset)
    if damaged not in ("raise", "skip"):
        raise ValueError(f"damaged must be 'raise' or 'skip', got {damaged!r}")

    def beginnings(names: Names) -> list[bytes]:
        return cols.some_beginnings(table.slice(0, _ROWS_AT_ONCE), names)

    what = "a datasets.Dataset"
    columns = cols.columns_of(what, dataset.features.arrow_schema, image, label, beginnings)
    found = Gathered([], columns, label, classes)
    shards, begins, lengths = _places(what, cols.taken(table, columns.image), dataset, found)
    none: list[bytes | None] = [None] * table.num_rows
    names = none if columns.path is None else cols.texts(cols.taken(table, columns.path))
    labels = none if columns.label is None else cols.texts(cols.taken(table, columns.label))
    base = os.getcwd() if root is None else os.path.abspath(os.path.expanduser(root))
    limit, damage = "/" if root is None else base, list[str]()
    order = dataset._indices
    rows = range(table.num_rows) if order is None else order.column(0).to_numpy().tolist()
    for row in rows:
        name = names[row]
        if begins[row] >= 0:
            shown = os.fsdecode(name or b"%d" % row)
            found.add(shown, shards[row], begins[row], lengths[row], labels[row])
            continue
        told = "has no image"
        if name:
            told = found.add_file(os.fsdecode(name), base, limit, labels[row])
        if told:
            damage.append(f"row {row:,} {told}")
    if damage and (damaged == "raise" or not found.found.names):
        raise SourceError(what, cols.summary(damage))
    if damage:
        found.found.told.append(f"{what}: {cols.summary(damage)}; what is damaged is left out")
    images = Sharded(
        found.files, found.found, classes, transform, target_transform, exif, max_pixels, max_bytes
    )
    images.classes = found.classes or images.classes
    return images


def _table(dataset: Any) -> Any:
    """The table of a ``Dataset``.

    Raises:
        ValueError: it is none, or cannot be opened.
    """
    import datasets

    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        names = ", ".join(map(str, dataset))
        raise ValueError(
            f"has several splits ({names}): open one, as dataset[{next(iter(dataset), '')!r}]"
        )
    if isinstance(dataset, datasets.IterableDataset):
        raise ValueError("is a stream, without random access: load it without streaming=True")
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(f"a {type(dataset).__name__} is no datasets.Dataset")
    if dataset.format["type"] == "custom":
        raise ValueError(
            "has a transform of its own: open dataset.with_format(None), with transform="
        )
    return dataset.data.table


def _places(
    what: str, images: Any, dataset: Any, found: Gathered
) -> tuple[list[int], list[int], list[int]]:
    """File, begin and length of each row's image, begin -1 where there is none."""
    chunks = images.chunks if hasattr(images, "chunks") else [images]
    paths = [file["filename"] for file in dataset.cache_files]
    shards, begins, lengths = list[int](), list[int](), list[int]()
    odd: list[tuple[int, Any]] = []
    for chunk in chunks:
        path, spans = _in_a_file(chunk, paths)
        if spans is None:
            odd.append((len(begins), chunk))
            spans = np.full(len(chunk), -1, np.int64), np.zeros(len(chunk), np.int64)
        shards += [found.number(path) if path else 0] * len(chunk)
        begins += spans[0].tolist()
        lengths += spans[1].tolist()
    if odd:
        digest = hashlib.blake2b(digest_size=16)
        for _, chunk in odd:
            for value in chunk.cast(cols.pyarrow().large_binary()):
                content = value.as_buffer()
                digest.update(b"-" if content is None else b"+%d:" % content.size)
                digest.update(content or b"")
        name = f"expanded/{digest.hexdigest()}-dataset"
        sizes = cols.expand(what, name, lambda: iter([chunk for _, chunk in odd]))
        number, starts, at = found.number(str(kept.place(name))), cols.begins_of(sizes), 0
        for row, chunk in odd:
            to, part = slice(row, row + len(chunk)), slice(at, at + len(chunk))
            shards[to] = [number] * len(chunk)
            begins[to], lengths[to] = starts[part], sizes[part]
            at += len(chunk)
    return shards, begins, lengths


def _in_a_file(values: Any, paths: list[str]) -> tuple[str, cols.Spans | None]:
    """The file that is mapped where binary values are, and where in it they lie; None: nowhere.

    A buffer knows the one that it is a part of, and the last of these is the whole mapping.
    """
    whole = values.buffers()[-1]
    while whole is not None and whole.parent is not None:
        whole = whole.parent
    if whole is None:
        return "", None
    for path in paths:
        try:
            if os.path.getsize(path) != whole.size:
                continue
            spans = _in_place(values, whole.address, whole.size)
            with open(path, "rb", buffering=0) as file:
                if spans is not None and _same(file.fileno(), whole, values, spans):
                    return path, spans
        except OSError:  # it has been removed since
            continue
    return "", None


def _same(fd: int, whole: Any, values: Any, spans: cols.Spans) -> bool:
    """Whether a file holds what is mapped: at its ends, and of the first and last of the values."""
    size = min(_COMPARED_BYTES, whole.size)
    compared: list[tuple[int, Any]] = [
        (0, whole.slice(0, size)),
        (whole.size - size, whole.slice(whole.size - size, size)),
    ]
    there: NDArray[np.int64] = np.flatnonzero(spans[0] >= 0)
    ends = there[[0, -1]].tolist() if len(there) else []
    compared += [(int(spans[0][row]), values[row].as_buffer()) for row in ends]
    return all(
        os.pread(fd, content.size, begin) == content.to_pybytes() for begin, content in compared
    )
