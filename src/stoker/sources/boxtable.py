"""Images with boxes in a table: a row for each box, as TensorFlow's tutorials and Open Images have.

The table (CSV, TSV: separated by comma, semicolon, tab or bar) has a header that names the columns
of the image, of the class and of four corners: see ``_CORNERS``, and ``NAME_HEADERS`` and
``LABEL_HEADERS`` of ``sources/labels.py``. It may have ``width`` and ``height`` of the images, and
``IsGroupOf`` or ``iscrowd``. A row whose corners and class are empty is of an image without boxes.

Corners are pixels or, where all are at most about 1, shares of the image's width and height.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stoker.errors import SourceError
from stoker.sources.detection import Detection, Found
from stoker.sources.labels import LABEL_HEADERS, NAME_HEADERS

_CORNERS = (
    ("xmin", "x1", "left"),
    ("ymin", "y1", "top"),
    ("xmax", "x2", "right"),
    ("ymax", "y2", "bottom"),
)
_SEPARATORS = ",;\t|"


class BoxTable(Detection):
    """A map-style dataset of the images and boxes in a table with a row for each box.

    Labels that are integers stay what they are. Others become places in ``classes``: all, sorted,
    behind ``"__background__"``, unless it is given.

    Args:
        path: the table.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each target, see Note [Targets].
        root: the folder that names in the table are relative to; left out, that of the table.
        transforms: called with image and target, in place of those two.
        classes: names of classes, each at its label.
        damaged: ``"raise"``, or ``"skip"`` to leave damaged rows out, with a warning.
        missing: ``"raise"``, or ``"skip"`` to leave out, with a warning, images without a file.
        exif: turn images as their EXIF orientation says; boxes stay as they are.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: a file of more raises DecodeError instead of being read.

    Raises:
        SourceError: the table cannot be read or is damaged, or images are missing.
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
        damaged: str = "raise",
        missing: str = "raise",
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        path = os.path.expanduser(os.fspath(path))
        folder = os.path.dirname(path) if root is None else os.path.expanduser(os.fspath(root))
        super().__init__(
            _read(path, os.path.join(os.path.abspath(folder), "")),
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


def recognises(_: str, head: bytes) -> bool:
    """Whether a file that begins with ``head`` has the header of such a table."""
    line = head.split(b"\n", 1)[0].removeprefix(b"\xef\xbb\xbf")
    return _layout(line.decode(errors="replace")) is not None


def _layout(header: str) -> tuple[str, dict[str, int]] | None:
    """The separator, and the columns: name, class, 0 to 3 and those that may be absent."""
    for separator in _SEPARATORS:
        try:
            cells = next(csv.reader([header.strip("\r\n")], delimiter=separator), [])
        except csv.Error:
            continue
        words = [re.sub(r"[\s_-]", "", cell).lower() for cell in cells]
        corners = {str(place): names for place, names in enumerate(_CORNERS)}
        wanted = {"name": NAME_HEADERS, "class": LABEL_HEADERS, **corners}
        columns = _columns(words, wanted)
        if len(columns) == len(wanted):
            others = {"width": ["width"], "height": ["height"], "crowd": ["isgroupof", "iscrowd"]}
            return separator, columns | _columns(words, others)
    return None


def _columns(words: list[str], wanted: Mapping[str, Sequence[str]]) -> dict[str, int]:
    found = {}
    for what, names in wanted.items():
        places = [words.index(name) for name in names if name in words]
        if places:
            found[what] = places[0]
    return found


def _read(path: str, root: str) -> Found:
    """What a table says; ``root`` is absolute and ends with a slash.

    Raises:
        SourceError: it cannot be read.
    """
    found = Found(path)
    places: dict[str, int] = {}
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            layout = _layout(file.readline())
            if layout is None:
                raise SourceError(path, "has no header of a table of boxes")
            separator, columns = layout
            rows = csv.reader(file, delimiter=separator)
            while True:
                where = f"line {rows.line_num + 2:,}"
                try:
                    cells = next(rows)
                except StopIteration:
                    return found
                except csv.Error as error:
                    found.damage(where, str(error))
                    continue
                if any(cells):
                    reason = _row(found, cells, columns, places, root)
                    if reason:
                        found.damage(where, reason)
    except UnicodeDecodeError as error:
        raise SourceError(path, "is not UTF-8; save it as UTF-8") from error
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, error.strerror or str(error)) from error


def _row(
    found: Found, cells: list[str], columns: dict[str, int], places: dict[str, int], root: str
) -> str:
    """Takes a row into ``found``; what is wrong with it, or nothing."""
    values = {
        what: cells[place].strip() if place < len(cells) else "" for what, place in columns.items()
    }
    name = values["name"]
    if not name:
        return "names no image"
    if name not in places:
        size = _number(values.get("height", "")), _number(values.get("width", ""))
        reason = found.image(name, len(found.ids), size if min(size) > 0 else (0, 0), root)
        if reason:
            return reason
        places[name] = len(found.ids) - 1
    texts = [values[str(place)] for place in range(4)]
    if not any(texts) and not values["class"]:
        return ""
    if not values["class"]:
        return "has no class"
    left, top, right, bottom = map(_number, texts)
    crowd = values.get("crowd", "").lower() in ("1", "true")
    return found.box(places[name], values["class"], (left, top, right, bottom), crowd=crowd)


def _number(text: str) -> float:
    """What a text says; NaN where that is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
