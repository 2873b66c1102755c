"""Images in a folder, with their labels in a text file: what ``sources/labels.py`` reads, checked.

Names are relative to the image folder. A name that is no file is tried with the image extensions
that occur in its folder, as tables often hold identifiers. Labels are integers if most are; then
any other label makes a bad line. Otherwise they are names of classes.

Note [Which files exist]
    A listing of their folders tells, kept as sorted 64-bit hashes of the names: 8 bytes a file.
    Python's hashes of bytes are keyed by process, so no file can be made to collide with another;
    by chance, some two of a million do once in 40 million times.
"""

from __future__ import annotations

import csv
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.sources.index import Files, Images, Labels, Names, warn
from stoker.sources.labels import INTEGER, LOOKS_LIKE_IMAGE, SHOWN, Lines, read
from stoker.sources.shards import Sample, Written

_ENCODED_EXTENSIONS = tuple(extension.encode() for extension in LOOKS_LIKE_IMAGE)
_MOST_CLASSES = 1_000_000


class ImageDataset(Images):
    """A map-style dataset of the images in ``img_dir``, labelled by ``label_file``.

    Of several lines with one name, the last gives the label and the first the place, with a
    ``StokerWarning``.

    Args:
        img_dir: the folder that names in the label file are relative to.
        label_file: text or a table, see ``sources/labels.py``.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        exif: turn images as their EXIF orientation says; off, as in torchvision.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: a file of more raises DecodeError instead of being read.
        missing: ``"raise"``, or ``"skip"`` to leave out, with a warning, lines without a file.

    Attributes:
        classes: class names, each at its label. Integer labels: their texts, from 0 to the largest;
            none where they are negative or huge, hence no class indices.

    Raises:
        SourceError: the label file can't be read or is empty, or lines are bad or name files that
            don't exist. All such lines are found before, and told by their numbers.
    """

    def __init__(
        self,
        img_dir: str | os.PathLike[str],
        label_file: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
        missing: str = "raise",
    ) -> None:
        if missing not in ("raise", "skip"):
            raise ValueError(f"missing must be 'raise' or 'skip', got {missing!r}")
        self.img_dir, self.label_file = img_dir, label_file
        if os.path.isfile(img_dir) and os.path.isdir(label_file):
            raise SourceError(
                os.fspath(img_dir), "is a file: the folder comes first, then the label file"
            )
        root = os.path.join(os.path.expanduser(os.fspath(img_dir)), "")
        lines = read(os.path.expanduser(os.fspath(label_file)), root)
        told: list[str] = []
        rows, labels, self.classes = _judge(lines, root, missing == "skip", told)
        files = Files(root, *lines.table(), None, exif, max_pixels, max_bytes)
        if len(rows) < len(files):
            files = files.select(rows)
        super().__init__(replace(files, labels=labels), transform, target_transform)
        self.labels = Labels(self.files)
        """Name to integer label, a mapping."""
        for warning in told:
            warn(f"{lines.path}: {warning}")

    @property
    def img_names(self) -> Names:
        """The names relative to ``img_dir``, in the order of the lines."""
        return Names(self.files)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class name to label."""
        return {name: label for label, name in enumerate(self.classes)}


def labelled(
    path: str | os.PathLike[str],
    transform: Callable[[Any], Any] | None = None,
    target_transform: Callable[[Any], Any] | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    exif: bool = False,
    max_pixels: int | None = None,
    max_bytes: int | None = None,
    missing: str = "raise",
) -> ImageDataset:
    """The dataset of a label file, whose names are relative to ``root`` or else, to its folder."""
    path = os.path.expanduser(os.fspath(path))
    return ImageDataset(
        os.path.dirname(path) if root is None else root,
        path,
        transform,
        target_transform,
        exif=exif,
        max_pixels=max_pixels,
        max_bytes=max_bytes,
        missing=missing,
    )


def recognises(_: str, head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a text: some bytes, none of them 0, in UTF-8."""
    if not head or 0 in head:
        return False
    try:
        head[:-3].decode()
    except UnicodeDecodeError as error:
        return error.end == len(head[:-3])  # within a character
    return True


# Which names exist


def exist(lines: Lines, root: str) -> NDArray[np.bool_]:
    """True for rows whose file exists; completes names that lack an image's extension."""
    listed = np.sort(np.concatenate([_listing(root, folder) for folder in lines.folders]))
    hashes = np.frombuffer(lines.hashes, np.int64)
    exists = _among(hashes, listed)
    bare = [
        row
        for row in np.flatnonzero(~exists).tolist()
        if not lines.encoded_name(row).lower().endswith(_ENCODED_EXTENSIONS)
    ]
    if not bare or not len(listed):
        return exists
    suffixes: dict[int, bytes] = {}
    for suffix in _extensions(lines, root):
        longer = (hash(lines.encoded_name(row) + suffix) for row in bare)
        found = _among(np.fromiter(longer, np.int64, len(bare)), listed)
        suffixes.update((row, suffix) for row, yes in zip(bare, found, strict=True) if yes)
        bare = [row for row, yes in zip(bare, found, strict=True) if not yes]
    if suffixes:
        _complete(lines, suffixes)
        exists[list(suffixes)] = True
    return exists


def _among(hashes: NDArray[np.int64], table: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of ``hashes`` are in the sorted ``table``."""
    if not len(table):
        return np.zeros(len(hashes), np.bool_)
    places = np.searchsorted(table, hashes)
    places[places == len(table)] = 0
    found: NDArray[np.bool_] = table[places] == hashes
    return found


def _entries(root: str, folder: str) -> Iterator[bytes]:
    """The files in a folder below ``root``; links count as what they lead to."""
    try:
        with os.scandir(os.fsencode(root + folder) or b".") as entries:
            for entry in entries:
                if _is_file(entry):
                    yield entry.name
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder:
            raise SourceError(root, error.strerror or "no such folder") from error
    except OSError as error:
        raise SourceError(root + folder, error.strerror or str(error)) from error


def _is_file(entry: os.DirEntry[bytes]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link in a circle, or one that may not be followed
        return False


def _listing(root: str, folder: str) -> NDArray[np.int64]:
    """The hashes of the names, relative to ``root``, of the files in a folder."""
    prefix = os.fsencode(folder)
    return np.fromiter((hash(prefix + name) for name in _entries(root, folder)), np.int64)


def _extensions(lines: Lines, root: str) -> list[bytes]:
    """The image extensions of the files in all folders, the most frequent first."""
    counts: Counter[bytes] = Counter()
    for folder in lines.folders:
        counts.update(name[max(name.rfind(b"."), 0) :] for name in _entries(root, folder))
    return [suffix for suffix, _ in counts.most_common() if suffix.lower() in _ENCODED_EXTENSIONS]


def _complete(lines: Lines, suffixes: dict[int, bytes]) -> None:
    """Appends suffixes to the names of some rows."""
    names, ends = bytearray(), array("Q", [0])
    for row in range(len(lines)):
        name = lines.encoded_name(row)
        if row in suffixes:
            name += suffixes[row]
            lines.hashes[row] = hash(name)
        names += name
        ends.append(len(names))
    lines.names, lines.ends = names, ends


# Judging


def _judge(
    lines: Lines, root: str, skip_missing: bool, told: list[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[str]]:
    """The rows that are samples, their labels, and the names of the classes.

    Args:
        lines: the label file.
        root: the image folder.
        skip_missing: leave out rows without a file.
        told: warnings are added here.

    Raises:
        SourceError: lines are bad or nothing is left.
    """
    exists = exist(lines, root) if len(lines) else np.zeros(0, np.bool_)
    codes = np.frombuffer(lines.codes, np.int32)
    counts = np.ones(len(lines), np.bool_)
    counts[[row for row in lines.comments if not exists[row]]] = False
    total = int(counts.sum()) + lines.bad_count
    if not total:
        raise SourceError(lines.path, "holds no line with a name and a label")
    values = [_integer(text) for text in lines.texts]
    whole = np.array([value is not None for value in values], np.bool_)
    integer = bool(2 * whole[codes[counts]].sum() >= counts.sum())
    misfit = counts & ~whole[codes] if integer else np.zeros(len(lines), np.bool_)
    missing = counts & ~exists
    wrong = misfit & ~missing if skip_missing else misfit | missing
    if lines.bad_count or wrong.any():
        raise SourceError(lines.path, _report(lines, root, wrong, missing & wrong, total))
    if missing.any():
        some = [repr(_name(lines, row)) for row in np.flatnonzero(missing)[:3].tolist()]
        told.append(
            f"{int(missing.sum()):,} of {total:,} lines are left out for want of their files in "
            f"{root}: {', '.join(some)}" + ", ..." * (int(missing.sum()) > 3)
        )
    rows = np.flatnonzero(counts & exists)
    if not len(rows):
        raise SourceError(lines.path, f"none of its files is in {root}")
    rows, codes = _without_duplicates(lines, rows, codes[rows], told)
    if integer:
        table = np.array([0 if value is None else value for value in values], np.int64)
        labels = table[codes]
        low, high = int(labels.min()), int(labels.max())
        usual = low >= 0 and high < _MOST_CLASSES
        return rows, labels, [str(label) for label in range(high + 1)] if usual else []
    texts = list(lines.texts)
    classes = sorted(texts[code] for code in np.unique(codes).tolist())
    place = {name: label for label, name in enumerate(classes)}
    table = np.array([place.get(text, 0) for text in texts], np.int64)
    return rows, table[codes], classes


def _integer(text: str) -> int | None:
    """The integer that a label is, also as ``3.0``; None for others and those beyond 64 bits."""
    if not INTEGER.fullmatch(text) or len(text) > 40:
        return None
    value = int(text.partition(".")[0])
    return value if -(1 << 63) <= value < 1 << 63 else None


def _name(lines: Lines, row: int) -> str:
    return os.fsdecode(lines.encoded_name(row))


def _reason(lines: Lines, root: str, row: int, missing: bool) -> str:
    """What is wrong with a row: its label, its file, or that a name with blanks has no label."""
    name, label = _name(lines, row), list(lines.texts)[lines.codes[row]]
    if missing and os.path.isfile(f"{root}{name} {label}"):
        return f"no label after {f'{name} {label}'!r}"
    if missing:
        return f"no file {name!r}"
    return f"label {label!r} is not an integer, as most are"


def _report(
    lines: Lines,
    root: str,
    wrong: NDArray[np.bool_],
    missing: NDArray[np.bool_],
    total: int,
) -> str:
    """The text of the error about all bad lines and wrong rows, some of which lack their files."""
    count, absent = int(wrong.sum()) + lines.bad_count, int(missing.sum())
    head = f"{count:,} of {total:,} lines can't be used"
    if absent:
        head += f", {absent:,} of them for want of their files in {root or '.'}"
        head += " (missing='skip' leaves those out)" * (absent < total)
    # Many missing files have one cause: more of their names would say nothing more.
    some = np.flatnonzero(missing)[: SHOWN if absent <= SHOWN else 3].tolist()
    others = np.flatnonzero(wrong & ~missing)[:SHOWN].tolist()
    told = [
        (lines.numbers[row], _reason(lines, root, row, bool(missing[row])))
        for row in (*some, *others)
    ]
    shown = sorted(told + lines.bad)[:SHOWN]
    rest = [f"... and {count - len(shown):,} more"] if count > len(shown) else []
    return "\n  ".join([head + ":", *(f"line {number}: {text}" for number, text in shown), *rest])


def _without_duplicates(
    lines: Lines, rows: NDArray[np.int64], codes: NDArray[np.int32], told: list[str]
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Rows and label codes with one row per name: in the first's place, with the last's label."""
    hashes = np.frombuffer(lines.hashes, np.int64)[rows]
    by_name = np.argsort(hashes, kind="stable")
    hashes = hashes[by_name]
    begins = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
    if len(begins) == len(rows):
        return rows, codes
    ends = np.append(begins[1:], len(rows))
    firsts, lasts = by_name[begins], by_name[ends - 1]
    several = np.flatnonzero(ends - begins > 1)
    several = several[np.argsort(firsts[several])]
    shown = []
    for group in several[:SHOWN].tolist():
        same = rows[by_name[begins[group] : ends[group]]].tolist()
        numbers = ", ".join(str(lines.numbers[row]) for row in same)
        shown.append(f"{_name(lines, same[0])!r} (lines {numbers})")
    more = f" and {len(several) - len(shown):,} more" * (len(several) > len(shown))
    told.append(
        f"{len(several):,} names are on several lines, their last label is taken: "
        f"{', '.join(shown)}{more}"
    )
    order = np.argsort(firsts)
    return rows[firsts[order]], codes[lasts[order]]


# Writing

_IN_A_FOLDER = 10_000


def name_of(sample: Sample) -> str:
    """The name of a sample's image beside a written label file."""
    return f"{sample.position // _IN_A_FOLDER:05}/{sample.position:09}{sample.suffix}"


def write(path: str, samples: Callable[[int], Iterator[Sample]]) -> None:
    """Writes a label file and, in folders beside it, the images that are not there yet.

    Its columns are ``filename``, ``label``, ``class``, and ``source``, the name that the image had;
    texts that cannot be printed are escaped as in JSON.

    Args:
        path: the label file.
        samples: gives those from a place on.

    Raises:
        SourceError: an image is in the way.
    """
    root, made = os.path.dirname(path), ""
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("filename", "label", "class", "source"))
        for sample in samples(0):
            name = name_of(sample)
            place = os.path.join(root, name)
            if os.path.dirname(place) != made:
                made = os.path.dirname(place)
                os.makedirs(made, exist_ok=True)
            _write_image(place, sample.content)
            table.writerow(
                (name, sample.label, _printable(sample.class_name), _printable(sample.name))
            )
        file.flush()
        os.fsync(file.fileno())
    os.sync()  # one by one, a million images would take hours


def _printable(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]


def _write_image(path: str, content: bytes) -> None:
    try:
        with open(path, "rb") as there:
            if there.read(len(content) + 1) == content:
                return
        raise SourceError(
            path, "is in the way, and another image: remove it, or choose another folder"
        )
    except FileNotFoundError:
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, f".{name}.part")
        try:
            with open(temporary, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):  # not even that could be made
                os.unlink(temporary)
            raise


def written(path: str) -> Iterator[Written]:
    """The images of a label file that ``write`` wrote.

    Raises:
        SourceError: it cannot be read, or lacks an image.
    """
    root, found = os.path.dirname(path), list[Written]()
    try:
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                name = row["filename"]
                place = os.path.join(root, name)
                found.append(Written(name, place, 0, os.path.getsize(place), row["label"]))
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise SourceError(path, f"is not what stoker pack writes: {error}") from error
    return iter(found)
