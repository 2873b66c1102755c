"""torch's, torchvision's and stoker's own datasets as a table of files, labels and one transform.

A dataset is read only where its ``__getitem__`` is known: open the file with Pillow as RGB,
transform, look the label up. Its attributes are read anew each time, so what the user changes after
construction counts; an unchanged list is recognised without reading it again.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import BuiltinMethodType, MethodWrapperType
from typing import Any

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile, JpegImagePlugin
from torch.utils.data import ConcatDataset, Dataset, Subset

from stoker.genuine import Watch
from stoker.plan import Refusal
from stoker.sources import index
from stoker.sources.detection import Detection
from stoker.sources.index import Extents, Files, Images

_RUN = ("__getitem__", "__getitems__", "__len__", "__getattribute__", "__getattr__")
"""What a loader calls of a dataset."""

# Where torchvision's classes keep their (path, label) pairs, or the paths and the labels.
_PAIRS = {
    "DatasetFolder": "samples",
    "EuroSAT": "samples",
    "Imagenette": "_samples",
    "StanfordCars": "_samples",
}
_COLUMNS = ("Flowers102", "Food101", "DTD", "FGVCAircraft", "SUN397")


@dataclass(frozen=True, eq=False)
class Rows:
    """A dataset as the native core sees it.

    Attributes:
        files: the table of files.
        rows: row of each sample in ``files``, int64; None where sample i is row i.
        labels: of each sample, int64 of shape (n,), after the target transform.
        transform: what is done to each image.
    """

    files: Files
    rows: NDArray[np.int64] | None
    labels: NDArray[np.int64]
    transform: Any

    def __len__(self) -> int:
        return len(self.labels)

    def rows_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of samples, int64; negative indices count from the end.

        Raises:
            IndexError: an index is outside of the dataset.
        """
        if len(indices) and not -len(self) <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"sample index out of range for {len(self)} samples")
        if self.rows is not None:
            return self.rows[indices]
        return np.where(indices < 0, indices + len(self), indices)

    def location(self, index: int) -> str:
        """Path of a sample."""
        return self.files.path(int(self.rows_of(np.array([index]))[0]))

    def name(self, index: int) -> str:
        """Name of a sample: relative to the folder of all, or in its shard."""
        return self.files.name(int(self.rows_of(np.array([index]))[0]))

    def decode(self, row: int, content: bytes | None = None) -> NDArray[np.uint8]:
        """What Pillow makes of a file: RGB, uint8 of shape (height, width, 3).

        ``content`` are its bytes, where they are at hand.

        Raises:
            DecodeError: Pillow cannot decode it.
        """
        return np.asarray(self.files.open(row, content=content))

    def same_as(self, other: Rows) -> bool:
        """True where both name the same files in the same order, with equal labels and limits."""
        a, b = self.files, other.files
        limits = [(f.root, f.upright, f.max_pixels, f.max_bytes) for f in (a, b)]
        if limits[0] != limits[1] or (self.rows is None) != (other.rows is None):
            return False
        if a.extents is not b.extents and not (
            a.extents and b.extents and a.extents.same_as(b.extents)
        ):
            return False
        pairs: list[tuple[Any, Any]] = [
            (a.names, b.names),
            (a.offsets, b.offsets),
            (self.labels, other.labels),
            (self.rows, other.rows),
        ]
        return all(one is two or np.array_equal(one, two) for one, two in pairs)

    def fingerprint(self) -> str:
        """Hash of the number of samples, their names and labels: 32 hexadecimal digits.

        Names are those below ``files.root`` or inside of shards, so folders may move.
        """
        table = self.files
        begin, end = int(table.offsets[0]), int(table.offsets[-1])
        digest = hashlib.blake2b(len(self).to_bytes(8, "little"), digest_size=16)
        digest.update(table.names[begin:end].data)
        digest.update(np.diff(table.offsets).astype("<u8").data)
        digest.update(self.labels.astype("<i8").data)
        if self.rows is not None:
            digest.update(self.rows.astype("<i8").data)
        return digest.hexdigest()


_MISSING = object()


class _RefusedError(Exception):
    """The arguments of a Refusal."""


def read(dataset: Any) -> Rows | Refusal:
    """The files, labels and transform of a dataset as they are now, or what prevents reading them.

    A million samples take some 0.7 s the first time and 10 ms when nothing has changed.
    """
    try:
        changed = _watch(_torchvision_loaded()).changed()
        if changed is not None:
            raise _RefusedError(changed, "is not the package's own code", "remove the patch")
        # Empty before Pillow opens its first file; later plugins may take JPEG over.
        if Image.OPEN.get("JPEG", _JPEG)[0] is not _JPEG[0]:
            raise _RefusedError("Pillow's JPEG plugin", "was replaced", "leave it to Pillow")
        return _read(dataset, 0)
    except _RefusedError as unfit:
        return Refusal(*unfit.args)


def rows_of(dataset: Any) -> Rows | Refusal:
    """As ``read``, for those who only look at files: labels are -1 where there are none."""
    if isinstance(dataset, Images):
        files = dataset.files
        labels = np.full(len(files), -1, np.int64) if files.labels is None else files.labels
        return Rows(files, None, labels, dataset.transform)
    return read(dataset)


def class_names(dataset: Any) -> list[str]:
    """The names of a dataset's classes, each at its label; none where it has none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        found = [class_names(part) for part in dataset.datasets]
        return found[0] if all(names == found[0] for names in found) else []
    names = getattr(dataset, "classes", None)
    if not isinstance(names, Sequence) or isinstance(names, str):
        return []
    return [str(name) for name in names]


_JPEG = (JpegImagePlugin.jpeg_factory,)


def _torchvision_loaded() -> bool:
    return "torchvision.datasets" in sys.modules


@lru_cache(maxsize=2)
def _watch(torchvision_loaded: bool) -> Watch:
    watch = Watch([torch, PIL])
    watch.trust(sys.modules[index.__name__])
    for owner in (Subset, ConcatDataset, Dataset, Images):
        watch.functions(owner, _RUN)
    watch.functions(Files, ["open", "opened", "path", "name", "encoded_name"])
    watch.functions(index, ["row_of"])
    watch.functions(Image, ["open"])
    watch.functions(Image.Image, ["convert", "load"])
    watch.functions(ImageFile.ImageFile)
    watch.functions(JpegImagePlugin.JpegImageFile)
    if torchvision_loaded:
        datasets = sys.modules["torchvision.datasets"]
        watch.trust(sys.modules["torchvision"])
        watch.functions(
            sys.modules["torchvision.datasets.folder"], ["default_loader", "pil_loader"]
        )
        watch.functions(sys.modules["torchvision"], ["get_image_backend"])
        for name in (*_PAIRS, *_COLUMNS):
            if hasattr(datasets, name):
                watch.functions(getattr(datasets, name), _RUN)
    return watch


def _read(dataset: Any, depth: int) -> Rows:
    cls = type(dataset)
    if depth > 32:
        raise _RefusedError(cls.__name__, "is nested too deeply", "nest less")
    if "__getitems__" in getattr(dataset, "__dict__", {}):
        raise _RefusedError(f"{cls.__qualname__}.__getitems__", "is the object's own", "remove it")
    if cls is Subset:
        return _subset(_read(dataset.dataset, depth + 1), dataset.indices)
    if cls is ConcatDataset:
        return _joined(dataset, [_read(part, depth + 1) for part in dataset.datasets])
    if isinstance(dataset, Images):
        if isinstance(dataset, Detection):
            raise _RefusedError(cls.__name__, "has targets that are no labels", "leave it so")
        _require_unchanged(cls, Images, ("files", "transform", "target_transform"))
        files = vars(dataset)["files"]
        if files.labels is None:
            raise _RefusedError(cls.__name__, "has no labels", "give labels")
        return _with_targets(dataset, files, files.labels)
    return _torchvision(dataset)


def _require_unchanged(cls: type, base: type, attributes: Iterable[str]) -> None:
    """Refuses a subclass that may change what ``base`` does with a sample."""
    for name in (*_RUN, *attributes):
        ours, theirs = (inspect.getattr_static(c, name, _MISSING) for c in (cls, base))
        if ours is not theirs:
            shown = f"{cls.__qualname__}.{name}"
            raise _RefusedError(shown, f"overrides that of {base.__name__}", "leave it out")


def _subset(whole: Rows, indices: Any) -> Rows:
    if isinstance(indices, torch.Tensor):
        indices = indices.numpy(force=True)
    if isinstance(indices, range):  # as any sequence it would be read number by number
        indices = np.arange(indices.start, indices.stop, indices.step)
    chosen = np.asarray(indices)
    if chosen.ndim != 1 or (len(chosen) and chosen.dtype.kind not in "iu"):
        raise _RefusedError("Subset", "its indices are not integers", "give a list of integers")
    chosen = chosen.astype(np.int64)
    try:
        rows = whole.rows_of(chosen)
    except IndexError as error:
        raise _RefusedError("Subset", str(error), "correct its indices") from error
    return replace(whole, rows=rows, labels=whole.labels[chosen])


def _joined(dataset: ConcatDataset[Any], parts: list[Rows]) -> Rows:
    first = parts[0]
    if any(part.transform is not first.transform for part in parts):
        raise _RefusedError(
            "ConcatDataset", "its parts have different transforms", "share one object"
        )
    if dataset.cumulative_sizes != list(np.cumsum([len(part) for part in parts])):
        raise _RefusedError("ConcatDataset", "a part has changed its length", "make it anew")
    labels = np.concatenate([part.labels for part in parts])
    tables = list({id(part.files): part.files for part in parts}.values())
    starts = dict(zip(map(id, tables), np.cumsum([0, *map(len, tables)]).tolist(), strict=False))
    rows = [
        (np.arange(len(part), dtype=np.int64) if part.rows is None else part.rows)
        + starts[id(part.files)]
        for part in parts
    ]
    return Rows(_one_table(tables), np.concatenate(rows), labels, first.transform)


_tables: weakref.WeakValueDictionary[tuple[int, ...], Files] = weakref.WeakValueDictionary()


def _one_table(tables: list[Files]) -> Files:
    """The rows of several tables, one after the other; the same object for the same tables."""
    if len(tables) == 1:
        return tables[0]
    key = tuple(map(id, tables))
    table = _tables.get(key)
    if table is None:
        kinds = {(files.upright, files.max_pixels, files.max_bytes) for files in tables}
        if len(kinds) > 1:
            raise _RefusedError(
                "ConcatDataset", "its parts have different limits", "give all the same"
            )
        # What commonpath does, it does not do for a mix of absolute and relative paths.
        root = os.path.commonprefix([files.root for files in tables])  # noqa: RUF071
        root = root[: root.rfind("/") + 1]
        names, lengths = zip(*(_names_below(root, files) for files in tables), strict=True)
        offsets = np.zeros(sum(map(len, tables)) + 1, np.uint64)
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
        table = replace(
            tables[0],
            root=root,
            names=np.concatenate(names),
            offsets=offsets,
            labels=None,
            extents=_one_extents([files.extents for files in tables]),
        )
        # The parts live as long as their union, so that no other table can have their ids.
        object.__setattr__(table, "_parts", tables)
        _tables[key] = table
    return table


def _one_extents(parts: list[Extents | None]) -> Extents | None:
    """Where the rows of several tables are, one after the other."""
    extents = [part for part in parts if part is not None]
    if not extents:
        return None
    if len(extents) < len(parts) or any(part.copies is not None for part in extents):
        raise _RefusedError(
            "ConcatDataset", "has parts in shards and others, or remote ones", "open all as one"
        )
    sizes = [len(part.shards) for part in extents]
    firsts = np.repeat(np.cumsum(sizes) - sizes, [len(part.shard) for part in extents])
    return Extents(
        _one_table([part.shards for part in extents]),
        np.concatenate([part.shard for part in extents]) + firsts.astype(np.uint32),
        np.concatenate([part.begin for part in extents]),
        np.concatenate([part.length for part in extents]),
    )


def _names_below(root: str, files: Files) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Paths without ``root``, which they begin with, one after the other, and their lengths."""
    prefix = os.fsencode(files.root[len(root) :])
    whole, names = files.names.data, bytearray()
    begin = int(files.offsets[0])
    if not prefix:
        names += whole[begin : int(files.offsets[-1])]
    else:
        for end in files.offsets[1:].tolist():
            names += prefix
            names += whole[begin:end]
            begin = end
    lengths = np.diff(files.offsets) + np.uint64(len(prefix))
    return np.frombuffer(names, np.uint8), lengths


# torchvision


def _torchvision(dataset: Any) -> Rows:
    cls = type(dataset)
    known = sys.modules.get("torchvision.datasets")
    bases = {getattr(known, name, None): name for name in (*_PAIRS, *_COLUMNS)} if known else {}
    base = next((b for b in cls.__mro__ if b in bases), None)
    if base is None:
        raise _RefusedError(
            f"{cls.__module__}.{cls.__qualname__}",
            "its __getitem__ is not one that stoker knows",
            "use stoker.ImageDataset, stoker.ImageFolder or torchvision's ImageFolder",
        )
    name = bases[base]
    columns = ["_image_files", "_labels"] if name in _COLUMNS else [_PAIRS[name]]
    _require_unchanged(cls, base, ("loader", "transform", "target_transform", *columns))
    folder, values = sys.modules["torchvision.datasets.folder"], vars(dataset)
    loader = values.get("loader")
    if loader is not folder.default_loader and loader is not folder.pil_loader:
        shown = getattr(loader, "__qualname__", repr(loader))
        raise _RefusedError(f"loader={shown}", "reads images in its own way", "leave loader out")
    backend = sys.modules["torchvision"].get_image_backend()
    if backend != "PIL":
        raise _RefusedError(f"image backend {backend}", "is not Pillow", "set_image_backend('PIL')")
    lists = [values.get(column) for column in columns]
    if any(not isinstance(one, Sequence) for one in lists):
        raise _RefusedError(f"{name}.{columns[0]}", "is not a list", "leave it a list")
    files, labels = _table(dataset, lists)
    return _with_targets(dataset, files, labels)


@dataclass
class _Known:
    """A dataset that was read: copies of its lists, to see if they changed, and what they gave."""

    lists: list[list[Any]]
    files: Files
    labels: NDArray[np.int64]


_known: dict[int, _Known] = {}


def _table(dataset: Any, lists: list[Any]) -> tuple[Files, NDArray[np.int64]]:
    """Files and labels of a dataset's lists; the same objects until the lists change."""
    known = _known.get(id(dataset))
    # Comparing elements that are the same object is quick, and these cannot change in place.
    if known is not None and known.lists == lists:
        return known.files, known.labels
    name, copies = type(dataset).__name__, [list(one) for one in lists]
    if len(copies) == 2:
        paths, labels = copies
        immutable = True
    else:
        kinds = set(map(type, copies[0]))
        if not kinds <= {tuple, list} or set(map(len, copies[0])) - {2}:
            raise _RefusedError(name, "its samples are not (path, label) pairs", "make them so")
        immutable = list not in kinds
        paths, labels = [pair[0] for pair in copies[0]], [pair[1] for pair in copies[0]]
    if set(map(type, labels)) - {int}:
        raise _RefusedError(name, "its labels are not all integers", "give int labels")
    if set(map(type, paths)) - {str}:
        paths = [os.fspath(path) for path in paths]
    if len(paths) != len(labels):
        raise _RefusedError(name, "has more paths than labels", "correct its lists")
    try:
        files, table = Files.from_paths(paths), np.array(labels, np.int64)
    except (OverflowError, UnicodeError) as error:
        raise _RefusedError(name, str(error), "correct its samples") from error
    if not files.names.all():
        raise _RefusedError(name, "a path has a null character", "correct it")
    if immutable:
        if id(dataset) not in _known:
            weakref.finalize(dataset, _known.pop, id(dataset), None)
        _known[id(dataset)] = _Known(copies, files, table)
    return files, table


def _with_targets(dataset: Any, files: Files, labels: NDArray[np.int64]) -> Rows:
    """Rows with the labels that a plain look-up in a dict, list or tuple makes of them."""
    values = vars(dataset)
    look_up = values.get("target_transform")
    if look_up is not None:
        plain = isinstance(look_up, BuiltinMethodType | MethodWrapperType)
        if (
            not plain
            or type(look_up.__self__) not in (dict, list, tuple)
            or look_up.__name__ not in ("__getitem__", "get")
        ):
            shown = getattr(look_up, "__qualname__", repr(look_up))
            raise _RefusedError(
                f"target_transform={shown}", "is not a plain look-up", "give a dict's __getitem__"
            )
        before, places = np.unique(labels, return_inverse=True)
        try:
            after = [look_up(label) for label in before.tolist()]
        except (LookupError, TypeError) as error:
            raise _RefusedError(
                "target_transform", f"raises {error!r}", "let it know all labels"
            ) from error
        if set(map(type, after)) - {int}:
            raise _RefusedError(
                "target_transform", "gives labels that are not integers", "give integers"
            )
        labels = np.array(after, np.int64)[places]
    return Rows(files, None, labels, values.get("transform"))
