"""How bytes are laid out: one module for each format, its reader and its description."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.sources.filelist import ImageDataset as ImageDataset
    from stoker.sources.folder import ImageFolder as ImageFolder
    from stoker.sources.index import Images

_PUBLIC = {"ImageDataset": "filelist", "ImageFolder": "folder"}


def __getattr__(name: str) -> object:
    """Imports the module of a format when it is first asked for."""
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(f"stoker.sources.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def open(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    transform: Callable[[Any], Any] | None = None,
    target_transform: Callable[[Any], Any] | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    image: str | None = None,
    label: str | Mapping[str, Any] | None = "auto",
    label_offset: int = 0,
    classes: Sequence[str] | None = None,
    damaged: str = "raise",
    exif: bool = False,
    max_pixels: int | None = None,
    max_bytes: int | None = None,
) -> Images:
    """The map-style dataset of the images at ``path``; its content says in which format they are.

    =====================================================  =========================================
    a folder with a folder for each class                  `stoker.ImageFolder`
    a label file, text or a table; images below ``root``   `stoker.ImageDataset`
    tar shards, as WebDataset writes them                  `stoker.sources.tar.Tar`
    an LMDB environment: its folder or file                `stoker.sources.lmdb.LMDB`
    MosaicML's MDS: the folder of its ``index.json``       `stoker.sources.mds.MDS`
    TFRecord shards of ``tf.train.Example``                `stoker.sources.tfrecord.TFRecord`
    =====================================================  =========================================

    Args:
        path: a folder or file, or several shards: a list, or a pattern with ``{000000..000099}``,
            ``{a,b}`` or ``*``.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        root: of a label file, the folder that its names are relative to; else that of the file.
        image: of shards, the field or feature of the images.
        label: of shards, what labels are.
        label_offset: of TFRecord shards, what is added to labels: -1 where classes count from 1.
        classes: of shards, the names of the classes, each at its label.
        damaged: of shards, ``"raise"``, or ``"skip"`` to leave out what cannot be read.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.

    Raises:
        SourceError: it cannot be read.
        ValueError: an argument says nothing to this format.
    """
    from stoker.sources.lmdb import LMDB, file_of, is_lmdb
    from stoker.sources.mds import MDS, is_mds

    if isinstance(path, str | os.PathLike):
        single = os.path.expanduser(os.fspath(path))
        given: dict[str, object] = {"image": image, "label_offset": label_offset or None}
        if is_lmdb(_head(file_of(single))):
            _refuse(given | {"root": root}, "an LMDB environment")
            return LMDB(
                single,
                transform,
                target_transform,
                label=label,
                classes=classes,
                damaged=damaged,
                exif=exif,
                max_pixels=max_pixels,
                max_bytes=max_bytes,
            )
        if os.path.isfile(os.path.join(single, "index.json")) and is_mds(single):
            _refuse({"root": root, "label_offset": label_offset or None}, "MDS shards")
            return MDS(
                single,
                transform,
                target_transform,
                image=image,
                label=label,
                classes=classes,
                damaged=damaged,
                exif=exif,
                max_pixels=max_pixels,
                max_bytes=max_bytes,
            )
        given |= {"classes": classes, "label": label if label != "auto" else None}
        given |= {"damaged": damaged if damaged != "raise" else None}
        if os.path.isdir(single):
            _refuse(given | {"root": root}, "a folder of classes")
            from stoker.sources.folder import ImageFolder

            return ImageFolder(
                single,
                transform,
                target_transform,
                exif=exif,
                max_pixels=max_pixels,
                max_bytes=max_bytes,
            )
        if os.path.isfile(single) and _is_text(single):
            _refuse(given, "a label file")
            from stoker.sources.filelist import ImageDataset

            return ImageDataset(
                os.path.dirname(single) if root is None else root,
                single,
                transform,
                target_transform,
                exif=exif,
                max_pixels=max_pixels,
                max_bytes=max_bytes,
            )
    _refuse({"root": root}, "shards")
    from stoker.sources.shards import paths_of
    from stoker.sources.tfrecord import TFRecord, is_tfrecord

    shards = paths_of(path)
    if is_tfrecord(_head(shards[0])):
        return TFRecord(
            shards,
            transform,
            target_transform,
            image=image,
            label=label,
            label_offset=label_offset,
            classes=classes,
            damaged=damaged,
            exif=exif,
            max_pixels=max_pixels,
            max_bytes=max_bytes,
        )
    _refuse({"label_offset": label_offset or None}, "tar shards")
    from stoker.sources.tar import Tar

    return Tar(
        shards,
        transform,
        target_transform,
        image=image,
        label=label,
        classes=classes,
        damaged=damaged,
        exif=exif,
        max_pixels=max_pixels,
        max_bytes=max_bytes,
    )


def _head(path: str) -> bytes:
    """How a file begins; nothing where it is none, which its reader will say."""
    from builtins import open as open_file

    if not os.path.isfile(path):
        return b""
    with open_file(path, "rb") as file:
        return file.read(4096)


def _refuse(given: Mapping[str, object], what: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} says nothing to {what}")


def _is_text(path: str) -> bool:
    """Whether a file begins like a text: with some bytes, of which none is 0, in UTF-8."""
    head = _head(path)
    if not head or 0 in head:
        return False
    try:
        head[:-3].decode()
    except UnicodeDecodeError as error:
        return error.end == len(head[:-3])  # within a character
    return True
