"""Samples that cannot be used: as a loader reports them, in a file, and left out of an order.

A list of bad samples is a text file in UTF-8 with a JSON object on each line, of which ``index``,
``location`` and ``reason`` are always there: see `BadSample`. `DataLoader.log_bad_samples` and
``stoker verify`` write such files, and ``DataLoader(exclude=...)`` reads them; there, ``index`` or
``name`` is enough.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.sources.dataset import Rows, rows_of

_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be used.

    Attributes:
        index: in its dataset.
        location: the path of its file, or of its shard, a colon and its name there.
        reason: what is wrong with it.
        epoch, position: where a loader met it.
        name: that of its file relative to its folder, or in its shard, where that is known.
        shard: the path of its shard.
    """

    index: int
    location: str
    reason: str
    epoch: int | None = None
    position: int | None = None
    name: str | None = None
    shard: str | None = None

    def line(self) -> str:
        """Its line in a file."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(known) + "\n"


class BadSamples(list[BadSample]):
    """The samples that failed so far, and a JSON-lines file of them if asked for."""

    path: Path | None = None

    def report(self, sample: BadSample) -> None:
        """Adds a sample and writes its line."""
        self.append(sample)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(sample.line())


def write(path: str | os.PathLike[str], samples: Iterable[BadSample]) -> None:
    """Writes a list of bad samples, whole or not at all; it replaces another such list.

    Raises:
        SourceError: it cannot be written, or there is a file that is none.
    """
    path = os.path.expanduser(os.fspath(path))
    try:
        if os.path.lexists(path):
            _require_list(path)
        temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.part")
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.writelines(sample.line() for sample in samples)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, error.strerror or str(error)) from error


def _require_list(path: str) -> None:
    """Raises SourceError where a file is not empty and no list of bad samples."""
    if not os.path.isfile(path):
        raise SourceError(path, "is no file: choose another name")
    with open(path, "rb") as file:
        first = file.readline(_LONGEST_LINE)
    if first:
        try:
            _entry(path, 1, first)
        except SourceError:
            raise SourceError(
                path, "is there, and no list of bad samples: choose another name"
            ) from None


# Leaving out


def excluded_samples(
    dataset: Any, exclude: str | os.PathLike[str] | Iterable[int | str]
) -> NDArray[np.int64]:
    """The indices that ``exclude`` names, ascending, each once, int64.

    Args:
        dataset: the dataset that is loaded.
        exclude: the path of a list of bad samples, or indices and names.

    Raises:
        SourceError: the list cannot be read, or was made for other data.
        ValueError: an index or a name is none of the dataset's, or nothing would be left.
    """
    samples = len(dataset)
    found: set[int] = set()
    wanted: dict[str, str] = {}
    if isinstance(exclude, str | os.PathLike):
        path = os.path.expanduser(os.fspath(exclude))
        _read(path, dataset, found, wanted)
    else:
        path = ""
        for one in exclude:
            if isinstance(one, str):
                wanted[one] = ""
                continue
            try:
                index = operator.index(one)
            except TypeError:
                raise TypeError(
                    f"exclude: {one!r}: expected a path, or indices and names"
                ) from None
            if isinstance(one, bool) or not 0 <= index < samples:
                raise ValueError(f"exclude: there is no sample {one!r} of {samples:,}")
            found.add(index)
    if wanted:
        found |= _named(dataset, wanted, path)
    if found and len(found) >= samples:
        raise ValueError(f"exclude leaves none of {samples:,} samples")
    return np.array(sorted(found), np.int64)


def _read(path: str, dataset: Any, found: set[int], wanted: dict[str, str]) -> None:
    """Reads a list: the indices of samples, whose names are right, and names without an index."""
    rows = rows_of(dataset)
    samples = len(dataset)
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if not line.strip():
                    continue
                entry = _entry(path, number, line)
                if (index := entry.get("index")) is None:
                    wanted[entry["name"]] = f"line {number:,}"
                    continue
                told = entry.get("location") or entry.get("name")
                if not 0 <= index < samples:
                    raise SourceError(
                        path,
                        f"line {number:,} is sample {index:,}, and there are {samples:,}: the list "
                        "was made for other data; make it anew",
                    )
                if isinstance(rows, Rows) and told and told != f"sample {index}":
                    name = rows.name(index)
                    if not _same(told, name):
                        raise SourceError(
                            path,
                            f"line {number:,}: sample {index:,} is {told!r}, and here it is "
                            f"{name!r}: the list was made for other data; make it anew",
                        )
                found.add(index)
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, error.strerror or str(error)) from error


def _entry(path: str, number: int, line: bytes) -> dict[str, Any]:
    """A line of a list, with an ``index`` or a ``name``; raises SourceError for others."""
    try:
        entry = json.loads(line)
        if not isinstance(entry, dict):
            raise ValueError("it is no object")
        for key, kind in (("index", int), ("name", str), ("location", str)):
            value = entry.get(key)
            if value is not None and type(value) is not kind:
                raise ValueError(f"its {key} is {value!r}")
        if entry.get("index") is None and entry.get("name") is None:
            raise ValueError("it has neither index nor name")
    except (ValueError, RecursionError) as error:
        raise SourceError(path, f"line {number:,} names no bad sample: {error}") from None
    return entry


def _same(told: str, name: str) -> bool:
    """Whether one path ends in the other: a data set may have moved since."""
    if len(told) < len(name):
        told, name = name, told
    return told == name or told.endswith(("/" + name, ":" + name))


def _named(dataset: Any, wanted: dict[str, str], path: str) -> set[int]:
    """The indices of the samples of some names; each must be that of just one."""
    rows = rows_of(dataset)
    if not isinstance(rows, Rows):
        raise ValueError(
            f"exclude: samples of {type(dataset).__name__} have no names: give indices"
        )
    found: dict[str, list[int]] = {name: [] for name in wanted}
    for index, row in enumerate(rows.rows_of(np.arange(len(rows))).tolist()):
        if (name := rows.files.name(row)) in found:
            found[name].append(index)
    for name, places in found.items():
        if len(places) != 1:
            what = f"{len(places):,} samples are called {name!r}: give indices"
            what = what if places else f"there is no sample {name!r}"
            if path:
                raise SourceError(path, f"{wanted[name]}: {what}")
            raise ValueError(f"exclude: {what}")
    return {places[0] for places in found.values()}
