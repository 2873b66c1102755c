"""Images in tar shards, as WebDataset lays them out: members that share a key are one sample.

The key of a member is its path up to the first dot of its last part, without a leading ``./``; what
follows that dot, in lower case, is the field: ``a/0001.left.jpg`` is field ``left.jpg`` of sample
``a/0001``. A sample's members may lie anywhere in its shard. Members without a field (``README``,
``.hidden``), folders and links are no samples' members.
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.sources.index import IMAGE_EXTENSIONS, Extents, Files, Images, Names, warn
from stoker.sources.tar_index import Index, index_of

_MOST_SHARDS = 1_000_000
_THREADS = 8
_SILENT_SECONDS = 2

_IMAGE_FIELDS = frozenset(
    extension.removeprefix(".")
    for extension in (*IMAGE_EXTENSIONS, ".gif", ".avif", ".jp2", ".jpe", ".jfif")
)

Label = str | Mapping[str, Any] | None


class Tar(Images):
    """A map-style dataset of the images in tar shards, at random access.

    Args:
        shards: paths of shards, or one path; ``{000000..000099}`` and ``{a,b}`` stand for several,
            ``*``, ``?`` and ``[...]`` for what is there.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        image: the field of the images, such as ``"left.jpg"``. Left out: the field whose name is
            that of an image format; of several in a sample the shortest, with a warning.
        label: what labels are: the name of a field of texts, such as ``"cls"``; ``"json:KEY"``, a
            key of the field ``json``; ``"folder"``, the folder that an image lies in; a mapping of
            keys to labels; None for no labels. ``"auto"`` is ``"cls"`` where there is such a field,
            else ``"folder"`` where images lie in several, else None.
        classes: names of classes, each at its label, for labels that are names; left out, all
            names, sorted.
        damaged: ``"raise"``, or ``"skip"`` to leave out, with a warning, what of a damaged shard
            cannot be read.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.
        cache: keep the shards' indexes between runs; see ``tar_index``.

    Attributes:
        shards: the shards' paths.
        classes: names of the classes, each at its label; none where labels are integers.
        targets: the labels; -1 where a sample has none.

    Raises:
        SourceError: a shard is absent, no tar, compressed or damaged; there is no image; a label
            cannot be read.
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
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
        cache: bool = True,
    ) -> None:
        if damaged not in ("raise", "skip"):
            raise ValueError(f"damaged must be 'raise' or 'skip', got {damaged!r}")
        self.shards = paths_of(shards)
        told: list[str] = []
        indexes = _indexes(self.shards, damaged == "skip", cache, told)
        table = _Table(image, label)
        for number, (path, index) in enumerate(zip(self.shards, indexes, strict=True)):
            table.add(number, path, index)
        if not table.names and table.fields:
            some = ", ".join(sorted(table.fields)[:10])
            wanted = f"no field {image}" if image else "no image"
            raise SourceError(self.shards[0], f"{wanted} in any sample; there are: {some}")
        labels, self.classes = table.labelled(classes, told)
        names = [os.fsencode(name) for name in table.names]
        offsets = np.zeros(len(names) + 1, np.uint64)
        np.cumsum([len(name) for name in names], out=offsets[1:])
        files = Files(
            "",
            np.frombuffer(b"".join(names), np.uint8),
            offsets,
            labels,
            exif,
            max_pixels,
            max_bytes,
            Extents(
                Files.from_paths(self.shards),
                np.array(table.shards, np.uint32),
                np.array(table.begins, np.int64),
                np.array(table.lengths, np.int64),
            ),
        )
        super().__init__(files, transform, target_transform)
        for warning in told + table.told():
            warn(warning)

    @property
    def names(self) -> Names:
        """Name of each sample's image in its shard."""
        return Names(self.files)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class name to label."""
        return {name: label for label, name in enumerate(self.classes)}


# Which shards


def paths_of(shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """The shards that patterns stand for, in the order of the patterns; those of a ``*`` sorted.

    Raises:
        SourceError: nothing fits a pattern.
    """
    patterns = [shards] if isinstance(shards, str | os.PathLike) else list(shards)
    found: list[str] = []
    for pattern in patterns:
        for path in _expanded(os.path.expanduser(os.fspath(pattern))):
            if len(found) >= _MOST_SHARDS:
                raise SourceError(str(pattern), f"stands for more than {_MOST_SHARDS:,} shards")
            if not glob.has_magic(path) or os.path.exists(path):
                found.append(path)
                continue
            fitting = sorted(glob.glob(path, recursive=True))
            if not fitting:
                raise SourceError(path, "no file fits this pattern")
            found += fitting
    if not found:
        raise SourceError(str(shards), "names no shard")
    return found


_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def _expanded(pattern: str) -> Iterator[str]:
    """What the braces in a pattern stand for, as in a shell."""
    brace = re.search(r"\{([^{}]*)\}", pattern)
    if brace is None:
        yield pattern
        return
    numbers = _RANGE.fullmatch(brace[1])
    if numbers is None and "," not in brace[1]:
        yield pattern
        return
    if numbers is None:
        texts: Iterator[str] = iter(brace[1].split(","))
    else:
        first, last = int(numbers[1]), int(numbers[2])
        step = 1 if first <= last else -1
        width = max(map(len, numbers.groups())) if "0" in (numbers[1][0], numbers[2][0]) else 0
        texts = (f"{number:0{width}}" for number in range(first, last + step, step))
    for text in texts:
        yield from _expanded(pattern[: brace.start()] + text + pattern[brace.end() :])


# All shards


def _indexes(paths: list[str], skip: bool, cache: bool, told: list[str]) -> list[Index]:
    """The indexes of shards; raises, or tells, what is wrong with them."""
    with ThreadPoolExecutor(_THREADS, "stoker-indexing") as pool:
        jobs = [pool.submit(index_of, path, cache) for path in paths]
        try:
            _show_progress(jobs)
            indexes = [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for path, index in zip(paths, indexes, strict=True):
        if not index.damage:
            continue
        if not skip:
            whole = f"{len(index.begins):,} members are whole"
            raise SourceError(path, f"{index.damage}; {whole}: damaged='skip' keeps those")
        told.append(f"{path}: {index.damage}; what is damaged is left out")
    return indexes


def _show_progress(jobs: list[Future[Index]]) -> None:
    """Waits for ``jobs``; on a terminal, shows how far they are once that takes long."""
    _, left = wait_for(jobs, _SILENT_SECONDS)
    if not left or not sys.stderr.isatty():
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("Indexing shards"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        while left:
            _, left = wait_for(left, 0.2)
            progress.update(task, completed=len(jobs) - len(left))


# From members to samples


def split(name: str) -> tuple[str, str] | None:
    """Key and field of a member; None where it has none."""
    while name.startswith("./"):
        name = name[2:]
    folder, slash, base = name.rpartition("/")
    stem, dot, kind = base.partition(".")
    return (folder + slash + stem, kind.lower()) if stem and dot and kind else None


class _Table:
    """Samples, gathered shard by shard."""

    def __init__(self, image: str | None, label: Label) -> None:
        self.image, self.label = image, label
        self.names: list[str] = []
        self.keys: list[str] = []
        self.shards: list[int] = []
        self.begins: list[int] = []
        self.lengths: list[int] = []
        self.texts: list[Any] = []
        self.fields: set[str] = set()
        self._without: list[str] = []
        self._several: list[str] = []

    def add(self, number: int, path: str, index: Index) -> None:
        """Adds the samples of a shard."""
        samples: dict[str, dict[str, tuple[str, int, int, bytes | None]]] = {}
        for member in index.members():
            key_and_field = split(member[0])
            if key_and_field is not None:
                key, kind = key_and_field
                # Of two members with one name the last counts, as where a tar is unpacked.
                samples.setdefault(key, {})[kind] = member
                self.fields.add(kind)
        for key, fields in samples.items():
            chosen = self._choose(key, fields)
            if chosen is None:
                self._without.append(key)
                continue
            name, begin, length, _ = fields[chosen]
            self.names.append(name)
            self.keys.append(key)
            self.shards.append(number)
            self.begins.append(begin)
            self.lengths.append(length)
            self.texts.append(self._text(path, key, fields))

    def _choose(self, key: str, fields: Mapping[str, object]) -> str | None:
        if self.image is not None:
            return self.image if self.image in fields else None
        images = [kind for kind in fields if kind.rpartition(".")[2] in _IMAGE_FIELDS]
        if len(images) > 1:
            self._several.append(f"{key} ({', '.join(images)})")
        return min(images, key=len, default=None)

    def _text(
        self, path: str, key: str, fields: Mapping[str, tuple[str, int, int, bytes | None]]
    ) -> Any:
        """The label of a sample as its shard tells it; None where it has none."""
        label = self.label
        if label is None or label == "folder":
            return None
        if isinstance(label, Mapping):
            return label.get(key)
        kind, _, entry = ("cls" if label == "auto" else label).partition(":")
        if kind not in fields:
            return None
        _, begin, length, content = fields[kind]
        if content is None:
            with open(path, "rb") as shard:
                shard.seek(begin)
                content = shard.read(length)
        try:
            text = content.decode().strip()
            value = json.loads(text)[entry] if entry else text
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise SourceError(path, f"label of sample {key}: {kind}: {what}") from error
        if not isinstance(value, str | int | None):
            raise SourceError(path, f"label of sample {key}: a {type(value).__name__}")
        return value

    def labelled(
        self, classes: Sequence[str] | None, told: list[str]
    ) -> tuple[NDArray[np.int64], list[str]]:
        """Label of each sample, -1 where it has none, and the names of the classes."""
        texts = self.texts
        folders = [key.rpartition("/")[0].rpartition("/")[2] for key in self.keys]
        if self.label == "folder" or (
            self.label == "auto" and "cls" not in self.fields and len(set(folders)) > 1
        ):
            texts = [folder or None for folder in folders]
        given = {text for text in texts if text is not None}
        lacking = [key for key, text in zip(self.keys, texts, strict=True) if text is None]
        if lacking and given:
            told.append(f"{_some(lacking)} without a label: -1 is theirs")
        elif lacking and self.label not in ("auto", None):
            raise SourceError(self.names[0], f"no sample has a label {self.label!r}")
        whole = {text: _integer(text) for text in given}
        integers = None not in whole.values() and classes is None
        names: list[str] = []
        if not integers:
            names = list(classes) if classes is not None else sorted(set(map(str, given)))
            places = {name: place for place, name in enumerate(names)}
            whole = {text: places.get(str(text)) for text in given}
            unknown = sorted(str(text) for text, place in whole.items() if place is None)
            if unknown:
                raise ValueError(f"classes lack {', '.join(map(repr, unknown[:5]))}")
        labels = [-1 if text is None else whole[text] for text in texts]
        return np.array(labels, np.int64), names

    def told(self) -> list[str]:
        """Warnings about what was chosen or left out."""
        told = []
        if self._without and self.names:
            told.append(f"{_some(self._without)} without an image: left out")
        if self._several:
            told.append(
                f"{_some(self._several)} with several images: the one of the shortest field is "
                "taken; image= chooses"
            )
        return told


def _some(keys: list[str]) -> str:
    shown = ", ".join(keys[:3]) + ", ..." * (len(keys) > 3)
    return f"{len(keys):,} samples ({shown})" if len(keys) > 1 else f"sample {shown}"


def _integer(text: Any) -> int | None:
    """The integer that a label is; None for others and those beyond 64 bits."""
    if isinstance(text, bool) or not isinstance(text, int | str):
        return None
    if isinstance(text, str) and not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        return None
    value = int(text)
    return value if -(1 << 63) <= value < 1 << 63 else None
