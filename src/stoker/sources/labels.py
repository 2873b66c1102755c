r"""The lines of a label file: a name and a label each.

The file is UTF-8, with or without a byte order mark, with any line endings. Blank lines count for
nothing, nor do lines that begin with ``#``, unless they name a file that exists. It is one of

- text: ``name label`` on a line. The label is what follows the last blank, so that names may hold
  blanks.
- a table (CSV, TSV: separated by comma, semicolon, tab or bar), with cells quoted as in CSV. With a
  header, the columns are found by it, see ``NAME_HEADERS`` and ``LABEL_HEADERS``; one that isn't
  found is the first of the others. Without one they are the first two.

- JSON: an object on each line, with a name and a label by the same words; or one list of such
  objects, perhaps within an object and with the label in a list ``instances`` of one (OpenMMLab's);
  or one object whose keys are the names. Lines are then counted by object.

Which one it is, the first 64 KiB decide: that under which most lines have a name that looks like an
image's, and a label. The suffix of the file decides ties.

A name that begins with ``/`` or holds ``..`` is taken if it leads into the image folder when
resolved as text, and makes a bad line otherwise.

Note [One pass over a million lines]
    Lines go one by one into a blob and arrays; no Python object outlives its line but the distinct
    labels and folders.
"""

from __future__ import annotations

import csv
import json
import os
import posixpath
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import StringIO
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.sources.index import IMAGE_EXTENSIONS

SHOWN = 20
"""Bad lines that an error tells one by one."""

LOOKS_LIKE_IMAGE = (*IMAGE_EXTENSIONS, ".gif", ".avif", ".heic", ".heif", ".jfif", ".jpe", ".jp2")
INTEGER = re.compile(r"[+-]?[0-9]+(\.0*)?", re.ASCII)
"""An integer label; tables that went through pandas have ``3.0`` for 3."""

# Lower case, without blanks, underscores and dashes; the first that a header has is taken.
NAME_HEADERS = (  # noqa: SIM905 - a list of quoted words is harder to read
    "filename filepath file filenames files imagename imagefile imagepath imgname imgpath imgfile "
    "image images img photo path name imageid imgid id"
).split()
LABEL_HEADERS = (  # noqa: SIM905 - likewise
    "label labels class target targets category classname labelname categoryname classid labelid "
    "categoryid classindex labelindex y gtlabel text"
).split()
_SEPARATORS = {".csv": [",", ";", "\t", "|", None], ".tsv": ["\t", ",", ";", "|", None]}
_SEPARATORS_OF_TEXT = ["\t", None, ",", ";", "|"]
_SNIFFED_CHARACTERS = 1 << 16

Cells = tuple[int, str, str]
"""Line number, name, label; what is absent is empty."""


@dataclass
class Lines:
    """What is on the lines of a label file; see Note [One pass over a million lines].

    Attributes:
        path: the label file.
        names: names of all rows, one after the other.
        ends: where each name ends, after a 0.
        hashes: of the names.
        codes: each row's label as an index of ``texts``.
        numbers: each row's line number.
        texts: the distinct labels, to their indices.
        folders: the distinct folders in names; empty for the image folder itself.
        comments: rows that begin with ``#``.
        bad: line number and reason of the first bad lines, and how many there are.
    """

    path: str
    names: bytearray = field(default_factory=bytearray)
    ends: array[int] = field(default_factory=lambda: array("Q", [0]))
    hashes: array[int] = field(default_factory=lambda: array("q"))
    codes: array[int] = field(default_factory=lambda: array("i"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    texts: dict[str, int] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    comments: list[int] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    bad_count: int = 0

    def __len__(self) -> int:
        return len(self.codes)

    def add(self, number: int, name: str, label: str) -> None:
        """Adds a row."""
        encoded = os.fsencode(name)
        self.names += encoded
        self.ends.append(len(self.names))
        self.hashes.append(hash(encoded))
        self.codes.append(self.texts.setdefault(label, len(self.texts)))
        self.numbers.append(number)
        self.folders.add(name[: name.rfind("/") + 1])
        if name.startswith("#"):
            self.comments.append(len(self) - 1)

    def add_bad(self, number: int, reason: str) -> None:
        """Counts a bad line."""
        self.bad_count += 1
        if len(self.bad) < SHOWN:
            self.bad.append((number, reason))

    def encoded_name(self, row: int) -> bytes:
        """The name of a row."""
        return bytes(self.names[self.ends[row] : self.ends[row + 1]])

    def table(self) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """Names and offsets as ``Files`` has them, without a copy."""
        return np.frombuffer(self.names, np.uint8), np.frombuffer(self.ends, np.uint64)


# Reading


@dataclass(frozen=True)
class _Layout:
    """How a line is cut: at ``separator``, or at its last blank if that is None."""

    separator: str | None
    name: int = 0
    label: int = 1
    header: bool = False

    def cells(self, lines: Iterable[str]) -> Iterator[Cells]:
        """The name and label on each line that isn't blank."""
        if self.separator is None:
            yield from _cells_of_text(lines)
            return
        reader = csv.reader(lines, delimiter=self.separator)
        last = max(self.name, self.label)
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error:
                yield number, "", ""  # a cell beyond csv's limit: no name and label, so a bad line
                continue
            if len(cells) > last:
                name, label = cells[self.name].strip(" \t"), cells[self.label].strip(" \t")
            else:
                name, label = (cells or [""])[0].strip(" \t"), ""
            if name or label or any(cell.strip() for cell in cells):
                yield number, name, label


def _cells_of_text(lines: Iterable[str]) -> Iterator[Cells]:
    for number, line in enumerate(lines, 1):
        line = line.strip(" \t\r\n")
        if line:
            cut = max(line.rfind(" "), line.rfind("\t"))
            name = line[: max(cut, 0)].rstrip(" \t") or line
            if len(name) > 2 and name[0] == name[-1] == '"':
                name = name[1:-1]
            yield number, name, line[cut + 1 :] if cut >= 0 else ""


def _layout(start: str, suffix: str) -> _Layout:
    """The layout of a label file that begins with ``start``; see the description of the module."""
    lines = list(StringIO(start, newline=""))
    if len(start) == _SNIFFED_CHARACTERS and len(lines) > 1:
        lines.pop()  # it may be cut off
    lines = [line for line in lines if not line.lstrip().startswith("#")] or lines
    best, most = _Layout(None), -1
    for separator in _SEPARATORS.get(suffix, _SEPARATORS_OF_TEXT):
        layout, certain = _columns(lines, separator)
        if certain:
            return layout
        cells = list(islice(layout.cells(lines), layout.header, None))
        usable = sum(bool(name and label) for _, name, label in cells)
        images = sum(name.lower().endswith(LOOKS_LIKE_IMAGE) for _, name, _ in cells)
        # Of few usable lines, names with an image's extension are an accident of the cut.
        score = usable + images if 2 * usable > len(cells) else 0
        if score > most:
            best, most = layout, score
    return best


def _columns(lines: list[str], separator: str | None) -> tuple[_Layout, bool]:
    """The layout with ``separator``; True if the first line is a header that names both columns."""
    if separator is None:
        head = [text for _, *pair in islice(_cells_of_text(lines), 1) for text in pair]
    else:
        head = next((row for row in csv.reader(lines, delimiter=separator) if any(row)), [])
    words = [re.sub(r"[\s_-]", "", cell).lower() for cell in head]
    if len(words) < 2:
        return _Layout(separator), False
    names = [words.index(word) for word in NAME_HEADERS if word in words]
    labels = [words.index(word) for word in LABEL_HEADERS if word in words]
    name = names[0] if names else int(bool(labels) and labels[0] == 0)
    label = labels[0] if labels else int(name == 0)
    layout = _Layout(separator, name, label, header=bool(names or labels))
    if names and labels:
        return layout, True
    cells = list(islice(layout.cells(lines), 100))
    if layout.header or len(cells) < 2:
        # A single word of a header, but beside an image's name, is chance.
        header = layout.header and not cells[0][1].lower().endswith(LOOKS_LIKE_IMAGE)
        return _Layout(separator, name, label, header) if header else _Layout(separator), False
    images = [name.lower().endswith(LOOKS_LIKE_IMAGE) for _, name, _ in cells]
    integers = [bool(INTEGER.fullmatch(label)) for _, _, label in cells]
    alone = any(not column[0] and all(column[1:]) for column in (images, integers))
    return _Layout(separator, header=alone and not images[0]), False


def _objects(path: str, start: str) -> Iterator[tuple[int, Any]] | None:
    """The objects of a JSON file that begins with ``start``; None if it is none.

    Raises:
        SourceError: it is called JSON, and is none.
    """
    if start.lstrip()[:1] not in ("{", "["):
        return None
    first = _loaded(start.lstrip().partition("\n")[0])
    if isinstance(first, dict) and _cells_of_object(first)[0]:
        return _lines_of_json(path)
    try:
        with open(path, "rb") as file:
            whole = json.load(file)
    except (ValueError, RecursionError) as error:
        if path.lower().endswith((".json", ".jsonl")):
            raise SourceError(path, f"is no JSON: {error}") from error
        return None
    if isinstance(whole, dict):
        lists = (value for value in whole.values() if isinstance(value, list))
        pairs = [{"name": name, "label": label} for name, label in whole.items()]
        whole = next(lists, pairs)
    return enumerate(whole, 1)


def _lines_of_json(path: str) -> Iterator[tuple[int, Any]]:
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _loaded(line)


def _loaded(line: str) -> Any:
    """The value of a line of JSON; None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _cells_of_object(value: Any) -> tuple[str, str]:
    """The name and label of an object; what is absent, or of another kind, is empty."""
    if not isinstance(value, dict):
        return "", ""
    words = {re.sub(r"[\s_-]", "", key).lower(): key for key in value}
    name, label = (
        next((value[words[word]] for word in known if word in words), None)
        for known in (NAME_HEADERS, LABEL_HEADERS)
    )
    inner = value.get("instances")
    if label is None and isinstance(inner, list) and len(inner) == 1:
        label = _cells_of_object(inner[0])[1]
    if type(label) is int and -(1 << 63) <= label < 1 << 63:
        label = str(label)
    return name if isinstance(name, str) else "", label if isinstance(label, str) else ""


def read(path: str, root: str) -> Lines:
    """The lines of the label file ``path``, whose names are relative to the folder ``root``.

    Raises:
        SourceError: it cannot be read or is not UTF-8.
    """
    lines = Lines(path)
    inside = os.path.join(os.path.abspath(root), "")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            start = file.read(_SNIFFED_CHARACTERS)
            objects = _objects(path, start)
            if objects is not None:
                header = False
                rows: Iterable[Cells] = ((n, *_cells_of_object(value)) for n, value in objects)
            else:
                layout = _layout(start, os.path.splitext(path)[1].lower())
                file.seek(0)
                header, rows = layout.header, layout.cells(file)
            for number, name, label in rows:
                if header and not name.startswith("#"):
                    header = False
                    continue
                if not name or not label:
                    if not name.startswith("#"):
                        lines.add_bad(number, f"needs a name and a label, has {name or label!r}")
                    continue
                name, reason = checked(name, inside)
                if reason:
                    lines.add_bad(number, reason)
                    continue
                lines.add(number, name, label)
    except UnicodeDecodeError:
        raise SourceError(path, _not_utf8(path)) from None
    except OSError as error:
        raise SourceError(path, error.strerror or str(error)) from error
    return lines


def checked(name: str, inside: str) -> tuple[str, str]:
    """``name`` without detours, relative to the image folder, and what is wrong with it, if any."""
    if name[0] in "./" or "/." in name or "//" in name:
        name = _resolved(name, inside)
        if not name:
            return "", "the name leads out of the image folder"
    if "\n" in name or "\r" in name or "\0" in name:
        return "", "an open quote, or a control character in the name"
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half a character, which JSON can say
        return "", "a name that is no text"
    return name, ""


def _resolved(name: str, inside: str) -> str:
    """``name`` without detours, relative to the image folder; empty if it leads out of that."""
    name = posixpath.normpath(name)
    if name.startswith("/"):
        name = "/" + name.lstrip("/")
        if not name.startswith(inside):
            return ""
        name = name[len(inside) :]
    return "" if name in ("", ".", "..") or name.startswith("../") else name


def _not_utf8(path: str) -> str:
    """Where a file stops being UTF-8, and what to do."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
                return "is UTF-16; save it as UTF-8"
            try:
                line.decode()
            except UnicodeDecodeError as error:
                byte = line[error.start]
                return f"line {number} is not UTF-8 (byte {byte:#04x}); save the file as UTF-8"
    return "is not UTF-8; save it as UTF-8"
