"""How bytes are laid out: one module for each format, its reader and its description."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from stoker.errors import SourceError

if TYPE_CHECKING:
    from datasets import Dataset

    from stoker.sources.filelist import ImageDataset as ImageDataset
    from stoker.sources.folder import ImageFolder as ImageFolder
    from stoker.sources.index import Images

    Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_PUBLIC = {"ImageDataset": "filelist", "ImageFolder": "folder"}


def __getattr__(name: str) -> object:
    """Imports the module of a format when it is first asked for."""
    if name in _PUBLIC:
        return getattr(import_module(f"stoker.sources.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def open(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Dataset,
    transform: Callable[[Any], Any] | None = None,
    target_transform: Callable[[Any], Any] | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    transforms: Callable[[Any, Any], Any] | None = None,
    split: str | None = None,
    masks: bool = False,
    missing: str = "raise",
    image: str | None = None,
    label: str | Mapping[str, Any] | None = "auto",
    label_offset: int = 0,
    classes: Sequence[str] | None = None,
    damaged: str = "raise",
    exif: bool = False,
    max_pixels: int | None = None,
    max_bytes: int | None = None,
    cache: bool | Literal["beside"] = True,
    storage: Mapping[str, Any] | None = None,
    cache_bytes: int | None = None,
    remote: str = "copy",
) -> Images:
    """The map-style dataset of the images at ``path``; its content says in which format they are.

    =====================================================  =========================================
    a folder with a folder for each class                  `stoker.ImageFolder`
    a label file: text, a table, JSON; images in ``root``  `stoker.ImageDataset`
    boxes in COCO's JSON; images in ``root``               `stoker.sources.coco.COCO`
    boxes in Pascal VOC's XML: the folder of it            `stoker.sources.voc.VOC`
    a table with a row for each box; images in ``root``    `stoker.sources.boxtable.BoxTable`
    tar shards, as WebDataset writes them                  `stoker.sources.tar.Tar`
    an LMDB environment: its folder or file                `stoker.sources.lmdb.LMDB`
    MosaicML's MDS: the folder of its ``index.json``       `stoker.sources.mds.MDS`
    LitData's chunks: the folder of their ``index.json``   `stoker.sources.litdata.LitData`
    TFRecord shards of ``tf.train.Example``                `stoker.sources.tfrecord.TFRecord`
    Parquet files with a column of images                  `stoker.sources.parquet.Parquet`
    Arrow files; the folder of ``save_to_disk``            `stoker.sources.arrow.Arrow`
    a ``datasets.Dataset`` of Hugging Face                 `stoker.sources.arrow.of_dataset`
    zip archives                                           `stoker.sources.zip.Zip`
    an FFCV file, ``.beton``                               `stoker.sources.beton.Beton`
    idx files, MNIST's; labels are found beside            `stoker.sources.idx.IDX`
    CIFAR batches, or the folder of the training batches   `stoker.sources.cifar.CIFAR`
    =====================================================  =========================================

    Shards may be at URLs: ``s3://``, ``gs://``, ``http://``, ``https://``. They are copied to the
    cache folder first, see docs/remote.md.

    Args:
        path: a folder or file, or several shards: a list, or a pattern with ``{000000..000099}``,
            ``{a,b}`` or ``*``; or a ``datasets.Dataset``.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        root: of labels and boxes in a file, and of a column of paths, the folder that these are
            relative to; else that of the file.
        transforms: of boxes, called with image and target, in place of ``transform`` and
            ``target_transform``.
        split: of Pascal VOC, the name of a file in ``ImageSets/Main``.
        masks: of COCO, the targets have masks, too.
        missing: of labels and boxes in a file, ``"raise"``, or ``"skip"`` to leave out images
            without a file.
        image: of shards, the field or feature of the images.
        label: of shards, what labels are.
        label_offset: of TFRecord shards, what is added to labels: -1 where classes count from 1.
        classes: of shards and boxes, the names of the classes, each at its label.
        damaged: of shards and boxes, ``"raise"``, or ``"skip"`` to leave out what cannot be read.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.
        cache: keep what a listing or an index took to make: in the user's cache folder, or of
            shards ``"beside"`` them, where all machines that see them find it.
        storage: of URLs, what fsspec's file system of their kind is to know: keys, endpoints.
        cache_bytes: of URLs, how many bytes the cache folder may have; left out, what leaves a
            tenth of its disk free.
        remote: of URLs, ``"copy"`` to copy shards to the cache folder, ``"ranges"`` to read each
            sample from its shard.

    Raises:
        SourceError: it cannot be read.
        ImportError: of URLs, the extra ``stoker[remote]`` is not installed.
        ValueError: an argument says nothing to this format.
    """
    options = {
        "root": (root, None),
        "transforms": (transforms, None),
        "split": (split, None),
        "masks": (masks, False),
        "missing": (missing, "raise"),
        "image": (image, None),
        "label": (label, "auto"),
        "label_offset": (label_offset, 0),
        "classes": (classes, None),
        "damaged": (damaged, "raise"),
        "exif": (exif, False),
        "max_pixels": (max_pixels, None),
        "max_bytes": (max_bytes, None),
        "cache": (cache, True),
    }
    given = {
        name: value
        for name, (value, default) in options.items()
        if type(value) is not type(default) or value != default
    }
    from stoker.sources.remote import is_url, opened

    def make(local: Paths | Dataset) -> Images:
        return _opened(local, transform, target_transform, given, {}, is_url(path))

    if remote not in ("copy", "ranges"):
        raise ValueError(f"remote must be 'copy' or 'ranges', got {remote!r}")
    if is_url(path):
        if cache == "beside":
            raise ValueError("cache='beside' says nothing to URLs: nothing is written there")
        return opened(path, storage or {}, cache_bytes, remote == "ranges", make)
    if (storage, cache_bytes, remote) != (None, None, "copy"):
        raise ValueError("storage=, cache_bytes= and remote= say nothing to a local path")
    return make(path)


def open_whole(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Dataset,
    *,
    root: str | os.PathLike[str] | None = None,
    image: str | None = None,
    label: str | Mapping[str, Any] | None = "auto",
    anew: bool = False,
) -> Images:
    """`open` for those who report on data: of what is whole, with warnings about the rest.

    Damaged parts of shards, lines without their file and classes without samples are no errors.

    Args:
        path: as for ``open``.
        root: as for ``open``.
        image: as for ``open``.
        label: as for ``open``.
        anew: read everything again, checksums included, whatever indexes are kept.

    Raises:
        SourceError: nothing of it can be read.
        ValueError: an argument says nothing to this format.
    """
    options = {"root": root, "image": image}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if label != "auto":
        given["label"] = label
    known_to_some = _LENIENT | (_ANEW if anew else {})
    from stoker.sources.remote import is_url, opened

    def make(local: Paths | Dataset) -> Images:
        return _opened(local, None, None, given, known_to_some, is_url(path))

    return opened(path, {}, None, False, make) if is_url(path) else make(path)


_ANEW = {"cache": False, "checksums": True}
_LENIENT = {"damaged": "skip", "missing": "skip", "allow_empty": True}


def _opened(
    path: Paths | Dataset,
    transform: Callable[[Any], Any] | None,
    target_transform: Callable[[Any], Any] | None,
    given: Mapping[str, Any],
    known_to_some: Mapping[str, Any],
    remote: bool,
) -> Images:
    """The dataset of what is at a local path.

    Args:
        path: one or several.
        transform: of images.
        target_transform: of labels.
        given: options that its format must know.
        known_to_some: options that its format may know.
        remote: it is what was copied from a URL.
    """
    kind = _format_of(path)
    if remote:
        _require_shards(kind, os.fspath(path if isinstance(path, str | os.PathLike) else path[0]))
    dataset = getattr(import_module(f"stoker.sources.{kind.module}"), kind.dataset)
    known = inspect.signature(dataset).parameters
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{name}={value!r} says nothing to {kind.what}")
    if not kind.shards and not isinstance(path, str | os.PathLike):
        raise ValueError(f"several paths, and {kind.what} is one: {', '.join(map(str, path))}")
    options = {name: value for name, value in known_to_some.items() if name in known}
    images: Images = dataset(path, transform, target_transform, **{**options, **given})
    return images


def _require_shards(kind: _Format, first: str) -> None:
    """Raises SourceError where a format cannot be read from what is at URLs, as it is asked for."""
    from stoker.copies import ranged

    if kind.apart:
        raise SourceError(
            first,
            f"is {kind.what}, which needs files beside it: of URLs, only shards are read. Make "
            "some with stoker pack, and copy those there",
        )
    if not kind.ranges and ranged(first) is not None:
        raise SourceError(
            first, f"is {kind.what}, which is not read by ranges: leave remote='ranges' out"
        )


def format_of(dataset: object) -> str:
    """What the format of a dataset is called: ``tar shards``; of others, the name of its class."""
    module = type(dataset).__module__.removeprefix("stoker.sources.")
    found = (kind.what for kind in (*_FORMATS, _OTHERS) if kind.module == module)
    return next(found, f"{type(dataset).__module__}.{type(dataset).__qualname__}")


@dataclass(frozen=True)
class _Format:
    """A format that `open` knows.

    Attributes:
        what: it is called.
        module: of this package, with a function ``recognises(path, head)``: whether what is at a
            path, of a file beginning with ``head``, is in this format.
        dataset: the class, or the function that makes one, in that module.
        shards: it may be several files.
        apart: it needs files beside it, its images or its labels.
        ranges: whoever reads its shards has them at hand first, see `stoker.copies.at_hand`.
    """

    what: str
    module: str
    dataset: str
    shards: bool = False
    apart: bool = False
    ranges: bool = False


# In the order in which they are asked; the last are the least particular.
_FORMATS = (
    _Format("an LMDB environment", "lmdb", "LMDB", ranges=True),
    _Format("MDS shards", "mds", "MDS", ranges=True),
    _Format("LitData's chunks", "litdata", "LitData"),
    _Format("TFRecord shards", "tfrecord", "TFRecord", shards=True, ranges=True),
    _Format("a folder of Pascal VOC's annotations", "voc", "VOC", apart=True),
    _Format("Arrow files", "arrow", "Arrow", shards=True),
    _Format("Parquet files", "parquet", "Parquet", shards=True),
    _Format("zip archives", "zip", "Zip", shards=True),
    _Format("an FFCV file", "beton", "Beton"),
    _Format("an idx file", "idx", "IDX", apart=True),
    _Format("CIFAR batches", "cifar", "CIFAR"),
    _Format("a folder of classes", "folder", "ImageFolder", apart=True),
    _Format("a COCO annotation file", "coco", "COCO", apart=True),
    _Format("a table of boxes", "boxtable", "BoxTable", apart=True),
    _Format("a label file", "filelist", "labelled", apart=True),
)
_DATASET = _Format("a datasets.Dataset", "arrow", "of_dataset", shards=True)
_OTHERS = _Format("tar shards", "tar", "Tar", shards=True, ranges=True)


def _format_of(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Dataset,
) -> _Format:
    """The format of what is at ``path``; of several shards, that of the first.

    Raises:
        SourceError: nothing fits a pattern.
    """
    from stoker.sources.shards import paths_of

    if type(path).__module__.partition(".")[0] == "datasets":
        return _DATASET
    single = os.path.expanduser(os.fspath(path)) if isinstance(path, str | os.PathLike) else ""
    first = single if os.path.exists(single) else paths_of(path)[0]
    head = _head(first)
    for kind in _FORMATS:
        if import_module(f"stoker.sources.{kind.module}").recognises(first, head):
            return kind
    return _OTHERS


def _head(path: str) -> bytes:
    """How a file begins; nothing where it is none, which its reader will say."""
    from builtins import open as open_file

    from stoker.copies import ranged

    if (copies := ranged(path)) is not None:
        return copies.read(path, 0, min(4096, copies.state_of(path)[0]))
    if not os.path.isfile(path):
        return b""
    with open_file(path, "rb") as file:
        return file.read(4096)
