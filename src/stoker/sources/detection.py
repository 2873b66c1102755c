"""Images with boxes: what the annotation files of any format become, and the dataset of them.

Note [Targets]
    A target is a dict as torchvision's detection models take it, and as its
    ``wrap_dataset_for_transforms_v2`` makes it:

    - ``image_id``: an integer;
    - ``boxes``: left, top, right, bottom in pixels, float32 of shape (boxes, 4): with torchvision,
      a ``tv_tensors.BoundingBoxes`` whose ``canvas_size`` is the image's, else a plain tensor;
    - ``labels``: int64 of shape (boxes,);
    - ``area``: in pixels, float32 of shape (boxes,);
    - ``iscrowd``: 1 for a box around several things, int64 of shape (boxes,).

    An image without boxes has tensors of no rows. Numbers are as in the file: nothing is clipped to
    the image, and no pixel is added or taken away.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.sources.filelist import exist
from stoker.sources.index import Files, Images, Names, row_of, warn
from stoker.sources.labels import INTEGER, SHOWN, Lines, checked

BACKGROUND = "__background__"
"""The class of label 0, which torchvision's models keep for what is in no box."""

_MOST = 1e9
_MOST_CLASSES = 1_000_000
_SHOWN_NAMES = 3


@dataclass(frozen=True, eq=False)
class Boxes:
    """The boxes of all images; those of image i are rows ``begins[i]`` to ``begins[i + 1]``.

    Attributes:
        begins: int64 of shape (images + 1,).
        corners: left, top, right, bottom, float32 of shape (n, 4).
        labels: int64 of shape (n,).
        areas: float32 of shape (n,); NaN where it is that of the box.
        crowds: whether around several things, of shape (n,).
        difficult: whether marked as difficult, of shape (n,); None where the format has no such
            mark.
        relative: corners are shares of the image's width and height, not pixels.
    """

    begins: NDArray[np.int64]
    corners: NDArray[np.float32]
    labels: NDArray[np.int64]
    areas: NDArray[np.float32]
    crowds: NDArray[np.bool_]
    difficult: NDArray[np.bool_] | None
    relative: bool

    def target(self, image: int, size: tuple[int, int]) -> dict[str, torch.Tensor]:
        """The boxes of an image of ``size`` (height, width), by names of Note [Targets]."""
        rows = slice(int(self.begins[image]), int(self.begins[image + 1]))
        corners = torch.tensor(self.corners[rows])
        if self.relative:
            corners *= torch.tensor([size[1], size[0]] * 2)
        spans = corners[:, 2:] - corners[:, :2]
        areas = torch.tensor(self.areas[rows])
        target = {
            "boxes": _bounding(corners, size),
            "labels": torch.tensor(self.labels[rows]),
            "area": torch.where(areas.isnan(), spans[:, 0] * spans[:, 1], areas),
            "iscrowd": torch.tensor(self.crowds[rows], dtype=torch.int64),
        }
        if self.difficult is not None:
            target["difficult"] = torch.tensor(self.difficult[rows])
        return target


def _bounding(corners: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """``corners`` as torchvision's transforms know them, where torchvision is installed."""
    try:
        from torchvision import tv_tensors
    except ImportError:
        return corners
    boxes: torch.Tensor = tv_tensors.BoundingBoxes(corners, format="XYXY", canvas_size=size)
    return boxes


class Detection(Images):
    """A map-style dataset of (image, target), see Note [Targets].

    Args:
        found: what the annotation files say.
        root: the folder that names in them are relative to.
        classes: names of the classes, each at its label.
        transform: called with the image, a PIL image in mode RGB.
        target_transform: called with the target.
        transforms: called with both, in place of those two.
        damaged: ``"raise"``, or ``"skip"`` to leave out, with a warning, what is damaged.
        missing: ``"raise"``, or ``"skip"`` to leave out, with a warning, images that are not there.
        exif, max_pixels, max_bytes: as in ``Files``.

    Attributes:
        boxes: the boxes of all images.
        ids: each image's ``image_id``, int64.
        classes: names of the classes, each at its label; "" for a label without a class. Empty
            where labels have no names, or are negative or huge.

    Raises:
        SourceError: something is damaged or missing, or there are no images.
    """

    def __init__(
        self,
        found: Found,
        root: str,
        classes: Sequence[str] | None,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
        transforms: Callable[[Any, Any], Any] | None,
        damaged: str,
        missing: str,
        exif: bool,
        max_pixels: int | None,
        max_bytes: int | None,
    ) -> None:
        if transforms is not None and (transform is not None or target_transform is not None):
            raise ValueError("give transforms, or transform and target_transform, not both")
        told = found.judged(damaged)
        files, self.ids = found.files(os.path.join(root, ""), missing, told)
        labels, self.classes = found.labelled(classes)
        self.boxes = found.boxes(labels, told)
        files = replace(files, upright=exif, max_pixels=max_pixels, max_bytes=max_bytes)
        super().__init__(files, transform, target_transform)
        self.transforms = transforms
        for warning in told:
            warn(f"{found.path}: {warning}")

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """The image and target of sample ``index``, transformed.

        Raises:
            DecodeError: the image cannot be opened or decoded, or exceeds a limit.
        """
        row = row_of(index, len(self))
        image: Any = self.files.open(row)
        target: Any = self.target(row, (image.height, image.width))
        if self.transforms is not None:
            both: tuple[Any, Any] = self.transforms(image, target)
            return both
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def target(self, row: int, size: tuple[int, int]) -> dict[str, Any]:
        """The target of an image of ``size`` (height, width), before any transform."""
        return {"image_id": int(self.ids[row]), **self.boxes.target(row, size)}

    @property
    def names(self) -> Names:
        """Each image's name, relative to the folder of the images."""
        return Names(self.files)

    @property
    def targets(self) -> NoReturn:
        """None: an image has as many labels as boxes."""
        raise AttributeError("an image has several labels: they are in boxes.labels")

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class name to label."""
        return {name: label for label, name in enumerate(self.classes) if name}


@dataclass
class Found:
    """Images and boxes, gathered from annotation files.

    Attributes:
        path: the file or folder of the annotations.
        lines: the images' names.
        ids: the images' ids.
        sizes: height and width of each image as the annotations have it, one after the other; 0
            where they do not.
        images: of each box, the image's place in ``lines``.
        codes: of each box, the label, or the class's place in ``texts``.
        corners, areas, crowds, difficult: of the boxes; ``corners`` four for each.
        spans: the latter two corners are width and height.
        texts: names of classes to their codes; of formats whose codes are labels, None.
        named: labels to their names, of those formats.
        bad: the first things that cannot be read, and how many there are.
        kept: places of the images that are there, in the order of their ids.
        order: the boxes of those, in that order.
    """

    path: str
    lines: Lines = field(init=False)
    ids: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[float] = field(default_factory=lambda: array("d"))
    images: array[int] = field(default_factory=lambda: array("q"))
    codes: array[int] = field(default_factory=lambda: array("q"))
    corners: array[float] = field(default_factory=lambda: array("f"))
    areas: array[float] = field(default_factory=lambda: array("f"))
    crowds: bytearray = field(default_factory=bytearray)
    difficult: bytearray | None = None
    spans: bool = False
    texts: dict[str, int] | None = field(default_factory=dict)
    named: dict[int, str] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    bad_count: int = 0
    kept: NDArray[np.int64] = field(init=False)
    order: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = Lines(self.path)

    def damage(self, where: str, reason: str) -> None:
        """Counts something that cannot be read."""
        self.bad_count += 1
        if len(self.bad) < SHOWN:
            self.bad.append(f"{where}: {reason}")

    def image(self, name: str, image_id: int, size: tuple[float, float], root: str) -> str:
        """Adds an image; what is wrong with its name, or nothing."""
        name, reason = checked(name, root)
        if not reason:
            self.lines.add(len(self.ids), name, "")
            self.ids.append(image_id)
            self.sizes.extend(size)
        return reason

    def box(
        self,
        image: int,
        code: int | str,
        corners: tuple[float, float, float, float],
        area: float = math.nan,
        crowd: bool = False,
        difficult: bool = False,
    ) -> str:
        """Adds a box, of an image and a class; what is wrong with its corners, or nothing."""
        left, top, right, bottom = corners
        if not all(-_MOST < corner < _MOST for corner in corners):
            return f"a box {corners} of numbers that are none, or huge"
        if (min(right, bottom) < 0) if self.spans else (right < left or bottom < top):
            return f"a box {corners} of a negative size"
        if isinstance(code, str):
            assert self.texts is not None
            code = self.texts.setdefault(code, len(self.texts))
        self.images.append(image)
        self.codes.append(code)
        self.corners.extend(corners)
        self.areas.append(area)
        self.crowds.append(crowd)
        if self.difficult is not None:
            self.difficult.append(difficult)
        return ""

    # What becomes of them

    def judged(self, damaged: str) -> list[str]:
        """Warnings about what is damaged.

        Raises:
            SourceError: something is, and ``damaged`` is "raise".
        """
        if damaged not in ("raise", "skip"):
            raise ValueError(f"damaged must be 'raise' or 'skip', got {damaged!r}")
        if not self.bad_count:
            return []
        shown = self.bad if damaged == "raise" else self.bad[:_SHOWN_NAMES]
        rest = [f"... and {self.bad_count - len(shown):,} more"] * (self.bad_count > len(shown))
        text = "\n  ".join([*shown, *rest])
        if damaged == "raise":
            raise SourceError(
                self.path,
                f"{self.bad_count:,} annotations can't be used; damaged='skip' leaves them out:\n"
                f"  {text}",
            )
        return [f"{self.bad_count:,} annotations can't be used and are left out:\n  {text}"]

    def files(self, root: str, missing: str, told: list[str]) -> tuple[Files, NDArray[np.int64]]:
        """The images that are there, in the order of their ids, and these.

        Raises:
            SourceError: there are none, or some are missing and ``missing`` is "raise".
        """
        if missing not in ("raise", "skip"):
            raise ValueError(f"missing must be 'raise' or 'skip', got {missing!r}")
        total = len(self.lines)
        if not total:
            raise SourceError(self.path, "names no image")
        there = exist(self.lines, root)
        absent = np.flatnonzero(~there).tolist()
        if absent:
            some = [repr(os.fsdecode(self.lines.encoded_name(i))) for i in absent[:_SHOWN_NAMES]]
            names = ", ".join(some) + ", ..." * (len(absent) > _SHOWN_NAMES)
            text = f"{len(absent):,} of {total:,} images are not in {root or '.'}: {names}"
            if missing == "raise" or len(absent) == total:
                remedy = "root= says where they are"
                remedy += ", missing='skip' leaves them out" * (len(absent) < total)
                raise SourceError(self.path, f"{text}; {remedy}")
            told.append(f"{text}; they are left out")
        ids = np.array(self.ids, np.int64)
        kept = np.flatnonzero(there)
        self.kept = kept[np.argsort(ids[kept], kind="stable")]
        return Files(root, *self.lines.table()).select(self.kept), ids[self.kept]

    def labelled(self, classes: Sequence[str] | None) -> tuple[NDArray[np.int64], list[str]]:
        """The label of each box, and the names of the classes.

        Names that are integers are labels. Others become their places in ``classes`` or else, in
        the sorted list of all behind ``BACKGROUND``.

        Raises:
            ValueError: a box is of none of ``classes``.
        """
        codes = np.array(self.codes, np.int64)
        distinct, places = np.unique(codes, return_inverse=True)
        if self.texts is not None:
            texts = list(self.texts)
            used = [texts[code] for code in distinct.tolist()]
        else:
            used = [self.named.get(code, "") for code in distinct.tolist()]
        values: list[int] = distinct.tolist()
        if classes is None and self.texts is not None:
            short = [text for text in texts if INTEGER.fullmatch(text) and len(text) < 18]
            whole = [int(text.partition(".")[0]) for text in short]
            if texts and len(whole) == len(texts):
                values, self.named = whole, {value: str(value) for value in whole}
            else:
                classes = [BACKGROUND, *sorted(set(texts) - {BACKGROUND})]
        if classes is not None:
            known = {name: label for label, name in enumerate(classes)}
            unknown = sorted({repr(text) for text in used if text not in known})
            if unknown:
                raise ValueError(f"classes lack {', '.join(unknown[:5])}")
            values, names = [known[text] for text in used], list(classes)
        else:
            low, high = min(self.named, default=0), max(self.named, default=-1)
            usual = low >= 0 and high < _MOST_CLASSES
            names = [self.named.get(label, "") for label in range(high + 1)] if usual else []
        return np.array(values, np.int64)[places.ravel()], names

    def boxes(self, labels: NDArray[np.int64], told: list[str]) -> Boxes:
        """The boxes of the images that are there."""
        images = np.array(self.images, np.int64)
        place = np.full(len(self.lines), -1, np.int64)
        place[self.kept] = np.arange(len(self.kept))
        rows = np.argsort(place[images], kind="stable")
        self.order = rows = rows[place[images][rows] >= 0]
        counts = np.bincount(place[images][rows], minlength=len(self.kept))
        corners = np.array(self.corners, np.float32).reshape(-1, 4)[rows]
        if self.spans:
            corners[:, 2:] += corners[:, :2]
        sizes = np.array(self.sizes).reshape(-1, 2)[images[rows]]
        relative = bool(len(corners)) and float(corners.max()) <= 2 and bool((corners % 1).any())
        empty = int((corners[:, 2:] <= corners[:, :2]).any(1).sum())
        # A pixel more is no slip: some count from 1.
        limits = np.where(sizes > 0, np.ones_like(sizes) if relative else sizes + 1, np.inf)
        outside = (corners[:, :2] < -1) | (corners[:, 2:] > limits[:, ::-1])
        odd = [
            f"{number:,} {what}"
            for number, what in (
                (empty, "without an area"),
                (int(outside.any(1).sum()), "not within their images"),
            )
            if number
        ]
        if odd:
            told.append(f"of {len(corners):,} boxes, {' and '.join(odd)}; they are kept")
        return Boxes(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            corners,
            labels[rows],
            np.array(self.areas, np.float32)[rows],
            np.frombuffer(bytes(self.crowds), np.bool_)[rows],
            None
            if self.difficult is None
            else np.frombuffer(bytes(self.difficult), np.bool_)[rows],
            relative,
        )
