"""Images with boxes in Pascal VOC's layout, also as labelImg, Roboflow and others export it.

A folder has ``Annotations``, with an XML file for each image; ``JPEGImages``, with the images; and
perhaps ``ImageSets/Main``, with a text file for each split: the names of its images, one a line,
without an extension. Or the XML files lie beside the images. Folders' names may be in lower case,
and that of the images ``images``; XML files and images may lie in folders below, of equal names.

An XML file is an ``annotation`` with ``filename`` and perhaps ``size`` (``width`` and ``height``).
Each ``object`` in it has ``name`` and ``bndbox`` (``xmin``, ``ymin``, ``xmax``, ``ymax``, in
pixels; VOC's own count from 1), perhaps ``difficult``, 0 or 1. Everything else is left alone. (The
VOC2012 development kit, section 8.)

The image of an XML file is the one of its name, as in VOC's own tools, or else, that of
``filename``; in equal case or else, in any.

Document types, hence entities, are refused: none of this needs them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pyexpat import ExpatError, ParserCreate
from typing import Any

from stoker.errors import SourceError
from stoker.sources.detection import BACKGROUND, Detection, Found
from stoker.sources.labels import LOOKS_LIKE_IMAGE

_CLASSES = (  # noqa: SIM905 - a list of quoted words is harder to read
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike "
    "person pottedplant sheep sofa train tvmonitor"
).split()
_IMAGE_FOLDERS = ("jpegimages", "images", "image", "imgs")
_MOST_BYTES = 64 << 20
_MOST_DEPTH = 64
_MOST_LISTED = 1000
_MOST_TRIED = 10
_CORNERS = ("bndbox/xmin", "bndbox/ymin", "bndbox/xmax", "bndbox/ymax")
_OBJECT = "annotation/object/"


class VOC(Detection):
    """A map-style dataset of images and boxes in Pascal VOC's layout.

    Targets also have ``difficult``, bool of shape (boxes,). Labels are places in ``classes``:
    those of VOC where there are no others, else all, sorted, behind ``"__background__"``.

    Args:
        path: the folder of ``Annotations`` and ``JPEGImages``, or one of XML files.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each target, see Note [Targets].
        root: the folder of the images; left out, it is found.
        transforms: called with image and target, in place of those two.
        split: the name of a file in ``ImageSets/Main``; left out, all XML files count, sorted.
        classes: names of classes, each at its label.
        damaged: ``"raise"``, or ``"skip"`` to leave damaged files and boxes out, with a warning.
        missing: ``"raise"``, or ``"skip"`` to leave out, with a warning, annotations without image.
        exif: turn images as their EXIF orientation says; boxes stay as they are.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: a file of more raises DecodeError instead of being read.

    Raises:
        SourceError: files cannot be read or are damaged, or images are missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
        transforms: Callable[[Any, Any], Any] | None = None,
        split: str | None = None,
        classes: Sequence[str] | None = None,
        damaged: str = "raise",
        missing: str = "raise",
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        path = os.path.expanduser(os.fspath(path))
        annotations = _annotations(path) or path
        listed = sorted((name[:-4], name) for name in _below(annotations) if _is_xml(name))
        stems = dict(listed)
        folder = _images(path, annotations) if root is None else os.path.expanduser(root)
        images = _Named(_below(folder))
        inside = os.path.join(os.path.abspath(folder), "")
        found = Found(path, difficult=bytearray())
        for stem in stems if split is None else _split(path, split):
            where = os.path.join(annotations, stems.get(stem, f"{stem}.xml"))
            _take(found, stem, where, images, inside)
        texts = found.texts or {}
        if classes is None and texts and set(texts) <= set(_CLASSES):
            classes = [BACKGROUND, *_CLASSES]
        super().__init__(
            found,
            os.fspath(folder),
            classes,
            transform,
            target_transform,
            transforms,
            damaged,
            missing,
            exif,
            max_pixels,
            max_bytes,
        )


def recognises(path: str, _: bytes) -> bool:
    """Whether there is a folder of such XML files, or one with a folder ``Annotations`` of them."""
    return os.path.isdir(path) and (_annotations(path) is not None or _has_annotation(path, 1))


# Which files


def _annotations(path: str) -> str | None:
    """The folder ``Annotations`` of a folder, if it has one of XML files."""
    for name in _entries(path):
        folder = os.path.join(path, name)
        if name.lower() == "annotations" and os.path.isdir(folder) and _has_annotation(folder):
            return folder
    return None


def _has_annotation(folder: str, most: int = _MOST_LISTED) -> bool:
    """Whether the first folder with files, of ``most`` from ``folder`` down, has such XML files."""
    for place, _, names in islice(os.walk(folder), most):
        if names:
            found = [os.path.join(place, name) for name in names if _is_xml(name)]
            return any(b"<annotation" in _begin(path) for path in found[:_MOST_TRIED])
    return False


def _is_xml(name: str) -> bool:
    return name.lower().endswith(".xml") and not os.path.basename(name).startswith("._")


def _begin(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(4096)
    except OSError:
        return b""


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise SourceError(folder, error.strerror or str(error)) from error


def _images(path: str, annotations: str) -> str:
    """The folder of the images: beside the annotations by one of its usual names, or theirs."""
    beside = path if annotations != path else os.path.dirname(os.path.abspath(path))
    known = {name.lower(): name for name in reversed(_entries(beside))}
    for name in _IMAGE_FOLDERS:
        folder = os.path.join(beside, known.get(name, name))
        if os.path.isdir(folder) and not _holds_images(annotations):
            return folder
    return annotations if _holds_images(annotations) else path


def _holds_images(folder: str) -> bool:
    return any(name.lower().endswith(LOOKS_LIKE_IMAGE) for name in _entries(folder))


def _below(folder: str) -> list[str]:
    """The files below a folder, relative to it."""
    found = []

    def refuse(error: OSError) -> None:
        raise SourceError(str(error.filename), error.strerror or str(error)) from error

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders.sort()
        inside = os.path.relpath(place, folder)
        found += names if inside == "." else [f"{inside}/{name}" for name in names]
    return found


class _Named:
    """Images, by name with or without an extension, in equal case or else, in any."""

    def __init__(self, names: list[str]) -> None:
        self.names: dict[str, str] = {}
        images = sorted(name for name in names if name.lower().endswith(LOOKS_LIKE_IMAGE))
        for fold in (str, str.lower):
            for cut in (str, _stem):
                for name in images:
                    self.names.setdefault(fold(cut(name)), name)

    def get(self, name: str) -> str | None:
        """The image of that name, if there is one."""
        return self.names.get(name) or self.names.get(name.lower())


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _split(path: str, split: str) -> list[str]:
    """The names in a split's file, without what VOC's files for each class have behind them."""
    file = os.path.join(path, "ImageSets", "Main", f"{split}.txt")
    try:
        with open(file, encoding="utf-8-sig") as lines:
            names = [re.sub(r"\s+-?[01]$", "", line.strip()) for line in lines]
    except OSError as error:
        raise SourceError(file, f"there is no such split: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SourceError(file, "is not UTF-8") from error
    return [name for name in names if name]


# What is in them


def _take(found: Found, stem: str, path: str, images: _Named, inside: str) -> None:
    """Takes an XML file's image and boxes into ``found``, or counts what is damaged."""
    name = f"{stem}.xml"
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise ValueError("is too large")
            fields, objects = _parsed(file.read())
    except OSError as error:
        found.damage(name, error.strerror or str(error))
        return
    except (ValueError, LookupError, ExpatError) as error:
        found.damage(name, str(error))
        return
    given = fields.get("annotation/filename", "").replace("\\", "/")
    tried = [stem, os.path.join(os.path.dirname(stem), os.path.basename(given)), given]
    image = next((known for each in tried if each and (known := images.get(each))), None)
    size = [_number(fields.get(f"annotation/size/{side}", "")) for side in ("height", "width")]
    stated = (size[0], size[1]) if min(size) > 0 else (0.0, 0.0)
    number = len(found.ids)
    reason = found.image(image or os.path.basename(given) or stem, number, stated, inside)
    if reason:
        found.damage(name, reason)
        return
    for place, each in enumerate(objects):
        left, top, right, bottom = (_number(each.get(corner, "")) for corner in _CORNERS)
        text = each.get("name")
        reason = "has no name"
        if text:
            difficult = each.get("difficult", "0").lower() in ("1", "true", "yes")
            corners = left, top, right, bottom
            reason = found.box(number, text, corners, difficult=difficult)
        if reason:
            found.damage(f"{name}, object {place}", reason)


def _number(text: str) -> float:
    """What a text says; NaN where that is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _parsed(data: bytes) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The texts in an XML file, by path, and those of each object, by path in it.

    Raises:
        ValueError: it has a document type, or is no annotation, or is nested too deeply.
        ExpatError, LookupError: it is no XML.
    """
    fields: dict[str, str] = {}
    objects: list[dict[str, str]] = []
    path: list[str] = []
    texts: list[str] = []

    def refuse(*_: object) -> None:
        raise ValueError("has a document type, which is refused")

    def start(name: str, _: object) -> None:
        path.append(name)
        texts.clear()
        if len(path) > _MOST_DEPTH or path[0] != "annotation":
            raise ValueError("is no annotation" if len(path) == 1 else "is nested too deeply")
        if path == ["annotation", "object"]:
            objects.append({})

    def end(_: object) -> None:
        where, text = "/".join(path), "".join(texts).strip()
        texts.clear()
        path.pop()
        if where.startswith(_OBJECT):
            objects[-1].setdefault(where[len(_OBJECT) :], text)
        else:
            fields.setdefault(where, text)

    parser = ParserCreate()
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = texts.append
    parser.Parse(data, True)
    return fields, objects
