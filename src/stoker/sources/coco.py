"""Images with boxes in COCO's JSON, also as Roboflow, CVAT and others export it.

The file is one object. ``images`` is a list of objects with ``id``, an integer, and ``file_name``,
and perhaps ``width`` and ``height``. ``annotations`` is a list of objects with ``image_id``,
``category_id`` and ``bbox``: left, top, width, height in pixels; perhaps with ``area``,
``iscrowd`` (0 or 1) and ``segmentation``. ``categories`` is a list of objects with ``id`` and
``name``; their ids may have gaps. (cocodataset.org, "Data format".)

A segmentation is a list of polygons, x and y in turn, or an object with ``size``, height and width,
and ``counts``: the lengths of runs, without and with the thing in turn, down one column after the
other. They are a list, or a text of the same in which a number is 5 bits a character, the lowest
first, from ``0`` on: the sixth bit says that more follow, the fifth of the last is the sign; from
the fourth number on, what is added to the number two before. (pycocotools, ``maskApi.c``.)
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import DecodeError, SourceError
from stoker.sources.detection import Detection, Found

_INT64 = 1 << 63
_MOST = 1e9
_MOST_AREA = 1e18
_MOST_STEPS = 2_000_000
_BEGINS = re.compile(
    rb"\s*\{\s*(?:\"(?:info|licenses)\"\s*:|.*?\"(?:images|annotations|categories)\"\s*:\s*\[)",
    re.DOTALL,
)
"""How such a file begins: its first key, or one of those that it must have."""


class COCO(Detection):
    """A map-style dataset of the images and boxes in a COCO annotation file, by the images' ids.

    Labels are the file's category ids, unless ``classes`` is given.

    Args:
        path: the annotation file.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each target, see Note [Targets].
        root: the folder that ``file_name`` is relative to; left out, that of the file.
        transforms: called with image and target, in place of those two.
        classes: names of categories, each at its label.
        masks: targets have ``masks``, too, uint8 of shape (boxes, height, width).
        damaged: ``"raise"``, or ``"skip"`` to leave damaged annotations out, with a warning.
        missing: ``"raise"``, or ``"skip"`` to leave out, with a warning, images without a file.
        exif: turn images as their EXIF orientation says; boxes stay as they are.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: a file of more raises DecodeError instead of being read.

    Raises:
        SourceError: the file cannot be read or is damaged, or images are missing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
        transforms: Callable[[Any, Any], Any] | None = None,
        classes: Sequence[str] | None = None,
        masks: bool = False,
        damaged: str = "raise",
        missing: str = "raise",
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        path = os.path.expanduser(os.fspath(path))
        folder = os.path.dirname(path) if root is None else os.path.expanduser(os.fspath(root))
        segments = _Texts() if masks else None
        found = _read(path, os.path.join(os.path.abspath(folder), ""), segments)
        super().__init__(
            found,
            folder,
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
        self.segments = None if segments is None else segments.select(found.order)

    def target(self, row: int, size: tuple[int, int]) -> dict[str, Any]:
        """The target of an image of ``size`` (height, width), before any transform.

        Raises:
            DecodeError: a segmentation is damaged or of an image of another size.
            ImportError: one is of polygons, and pycocotools is not installed.
        """
        target = super().target(row, size)
        if self.segments is None:
            return target
        begin, end = self.boxes.begins[row : row + 2].tolist()
        masks = torch.zeros((end - begin, *size), dtype=torch.uint8)
        for place in range(begin, end):
            try:
                segment = json.loads(self.segments[place])
                masks[place - begin] = torch.from_numpy(_mask(segment, size))
            except (ValueError, RecursionError) as error:
                where = f"{self.files.path(row)}, segmentation {place - begin}"
                raise DecodeError(row, where, str(error)) from error
        try:
            from torchvision import tv_tensors
        except ImportError:
            return {**target, "masks": masks}
        return {**target, "masks": tv_tensors.Mask(masks)}


def recognises(_: str, head: bytes) -> bool:
    """Whether a file that begins with ``head`` is such a file."""
    return _BEGINS.match(head.removeprefix(b"\xef\xbb\xbf")) is not None


class _Texts:
    """Many short texts as one, which forked workers share."""

    def __init__(self) -> None:
        self.whole, self.ends = bytearray(), array("q", [0])

    def add(self, text: bytes) -> None:
        self.whole += text
        self.ends.append(len(self.whole))

    def __getitem__(self, row: int) -> bytes:
        return bytes(self.whole[self.ends[row] : self.ends[row + 1]])

    def select(self, rows: NDArray[np.int64]) -> _Texts:
        """Those of some rows, in the order of ``rows``."""
        chosen = _Texts()
        for row in rows.tolist():
            chosen.add(self[row])
        return chosen


def _read(path: str, root: str, segments: _Texts | None) -> Found:
    """What an annotation file says; ``root`` is absolute and ends with a slash.

    Raises:
        SourceError: it cannot be read, or is no such file.
    """
    try:
        with open(path, "rb") as file:
            content = json.load(file)
    except OSError as error:
        raise SourceError(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise SourceError(path, f"is no JSON: {error}") from error
    lists: dict[str, list[Any]] = {}
    for key in ("images", "annotations", "categories"):
        values = content.get(key, []) if isinstance(content, dict) else None
        if not isinstance(values, list):
            raise SourceError(path, f"has no list of {key}, as COCO's files have")
        lists[key] = values
    if not lists["images"] and lists["annotations"]:
        raise SourceError(path, "has annotations, but no images")
    found = Found(path, spans=True, texts=None)
    for number, category in enumerate(lists["categories"]):
        _take(found, f"category {number:,}", _category, category)
    places: dict[int, int] = {}
    for number, image in enumerate(lists["images"]):
        _take(found, f"image {number:,}", _image, image, root, places)
    for number, annotation in enumerate(lists["annotations"]):
        _take(found, f"annotation {number:,}", _annotation, annotation, places, segments)
    return found


def _take(found: Found, where: str, take: Callable[..., str], value: Any, *others: Any) -> None:
    """Has something taken into ``found``, or counts it as damaged."""
    reason = take(found, value, *others) if type(value) is dict else "is no object"
    if reason:
        found.damage(where, reason)


def _category(found: Found, value: dict[str, Any]) -> str:
    number, name = value.get("id"), value.get("name")
    if not _is_id(number) or not isinstance(name, str):
        return f"its id is {number!r} and its name {name!r}: expected an integer and a text"
    found.named[number] = name
    return ""


def _image(found: Found, value: dict[str, Any], root: str, places: dict[int, int]) -> str:
    number, name = value.get("id"), value.get("file_name")
    if not _is_id(number):
        return f"its id {number!r} is no integer"
    if number in places:
        return f"its id {number} is that of another"
    if not isinstance(name, str) or not name:
        return f"its file_name {name!r} is no name"
    height, width = value.get("height"), value.get("width")
    size = (height, width) if _is_number(height) and _is_number(width) else (0, 0)
    reason = found.image(name, number, size, root)
    if not reason:
        places[number] = len(found.ids) - 1
    return reason


def _annotation(
    found: Found, value: dict[str, Any], places: dict[int, int], segments: _Texts | None
) -> str:
    image, label, box = value.get("image_id"), value.get("category_id"), value.get("bbox")
    if not _is_id(image) or image not in places:
        return f"its image_id {image!r} is that of no image"
    if not _is_id(label) or (found.named and label not in found.named):
        return f"its category_id {label!r} is that of no category"
    if type(box) is not list or len(box) != 4 or not all(map(_is_number, box)):
        return f"its bbox {box!r:.80} is not four numbers"
    area, crowd = value.get("area"), value.get("iscrowd")
    if area is not None and not (_is_number(area, _MOST_AREA) and area >= 0):
        return f"its area {area!r:.80} is none"
    if crowd not in (None, 0, 1):
        return f"its iscrowd {crowd!r:.80} is neither 0 nor 1"
    segment = value.get("segmentation")
    if segments is not None and not segment:
        return "has no segmentation, and masks=True"
    left, top, width, height = box
    corners = left, top, width, height
    reason = found.box(
        places[image], label, corners, math.nan if area is None else area, bool(crowd)
    )
    if not reason and segments is not None:
        segments.add(json.dumps(segment).encode())
    return reason


def _is_id(value: Any) -> TypeGuard[int]:
    return type(value) is int and -_INT64 <= value < _INT64


def _is_number(value: Any, most: float = _MOST) -> TypeGuard[float]:
    return type(value) in (int, float) and -most < value < most


# Masks


def _mask(segment: Any, size: tuple[int, int]) -> NDArray[np.uint8]:
    """The mask of a segmentation, uint8 of shape ``size`` (height, width).

    Raises:
        ValueError: it is damaged.
    """
    if isinstance(segment, list):
        segment = _drawn(segment, size)
    if not isinstance(segment, dict):
        raise ValueError("is neither polygons nor runs")
    counts = segment.get("counts")
    if segment.get("size") != list(size):
        raise ValueError(f"is of size {segment.get('size')!r:.80}, the image of {list(size)}")
    runs = _uncompressed(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(_is_id(run) and run >= 0 for run in runs):
        raise ValueError("its runs are no lengths")
    if sum(runs) != size[0] * size[1]:
        raise ValueError(f"its runs are of {sum(runs):,} pixels, not {size[0] * size[1]:,}")
    values = (np.arange(len(runs)) % 2).astype(np.uint8)
    return np.repeat(values, runs).reshape(size[::-1]).T


def _uncompressed(text: str) -> list[int]:
    """The runs that a text stands for."""
    runs: list[int] = []
    value = shift = 0
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64 or shift > 60:
            raise ValueError("its runs are damaged")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (bits & 16) << shift - 4
            runs.append(value + runs[-2] if len(runs) > 2 else value)
            value = shift = 0
    if shift:
        raise ValueError("its runs are cut off")
    return runs


def _drawn(polygons: list[Any], size: tuple[int, int]) -> dict[str, Any]:
    """The union of polygons as runs, drawn by pycocotools, which trusts what it is given."""
    try:
        from pycocotools import mask
    except ImportError as error:
        raise ImportError("polygons need an extra: pip install 'stoker[coco]'") from error
    steps = 0.0
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) % 2 or len(polygon) < 6:
            raise ValueError("a polygon is no list of three or more points")
        if not all(map(_is_number, polygon)):
            raise ValueError("a polygon has a point that is none")
        points = np.array(polygon, np.float64).reshape(-1, 2)
        if (np.abs(points) > 2 * max(size)).any():
            raise ValueError("a polygon leads far out of its image")
        steps += float(np.abs(np.diff(points, axis=0, append=points[:1])).max(1).sum())
    if not polygons or steps > _MOST_STEPS:
        raise ValueError("has no polygons, or endless ones")
    drawn = mask.merge(mask.frPyObjects(polygons, *size))
    return {"size": list(size), "counts": drawn["counts"].decode()}
