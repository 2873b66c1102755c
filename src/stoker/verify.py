"""Checks a data set before a training does: images, labels, duplicates, leaks and oddities.

Every image is decoded, as a loader would. Shards are read anew, so what has a checksum is compared
with it. Images are the same if their encoded bytes have the same BLAKE2b. Nothing is written.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.bad_samples import BadSample
from stoker.contents import HUGE_PIXELS, ODDITIES, TINY_PIXELS, Progress, Reader
from stoker.errors import SourceError
from stoker.machine import most_workers
from stoker.sources import open_whole
from stoker.sources.dataset import Rows, class_names, rows_of

T = TypeVar("T")

_EXAMPLES = 5

FINDINGS = {
    "unlabelled": "samples without a label, -1",
    "outside": "samples whose label is that of no class",
    "empty_classes": "classes without a sample",
    "single_classes": "classes of one sample",
    "duplicates": "samples with the bytes of an earlier one",
    "conflicts": "samples with the bytes of an earlier one, and another label",
    "leaks": "samples that are in the other set, too",
    "leak_conflicts": "samples that are in the other set with another label",
    "moved_classes": "classes with another label in the other set",
    "classes_missing_there": "classes that the other set lacks",
    "classes_missing_here": "classes that only the other set has",
    "rotated": "turned by EXIF",
    "cmyk": "CMYK",
    "gray": "gray",
    "deep": "more than 8 bits a channel",
    "palette": "with a palette",
    "alpha": "transparent",
    "animated": "of several frames; the first is taken",
    "huge": f"of more than {HUGE_PIXELS // 10**6} million pixels",
    "tiny": f"of less than {TINY_PIXELS} pixels a side",
    "misnamed": "with the extension of another format",
}
"""What may be found, and what that means."""


@dataclass
class Finding:
    """Something about some samples or classes that is worth knowing, and may be intended.

    Attributes:
        kind: one of ``FINDINGS``.
        count: of how many.
        examples: some of them.
        samples: their indices; None of classes.
    """

    kind: str
    count: int
    examples: list[str]
    samples: NDArray[np.int64] | None = None

    @property
    def what(self) -> str:
        """It in words."""
        return FINDINGS[self.kind]


@dataclass
class Report:
    """What was found.

    Attributes:
        samples: how many were checked.
        bytes: of their encoded images.
        seconds: that took.
        formats: samples of each encoded format, bad ones left out.
        bad: samples that cannot be used, by index.
        lost: what is damaged or absent, and so no sample at all.
        findings: what else there is, in the order of ``FINDINGS``.
    """

    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0
    formats: dict[str, int] = field(default_factory=dict)
    bad: list[BadSample] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """True where every sample can be used, and none is lost."""
        return not self.bad and not self.lost

    def __getitem__(self, kind: str) -> Finding | None:
        """The finding of a kind; None where there is nothing to tell."""
        return next((finding for finding in self.findings if finding.kind == kind), None)


def verify(
    source: Any,
    *,
    against: Any = None,
    also: Sequence[str] = (),
    lost: Sequence[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """What is wrong with ``source``, and what is odd about it. Every byte of it is read.

    Args:
        source: a dataset of image files or shards, or what `stoker.open` takes for a path.
        against: another, such as the validation set of a training set: are classes the same, and
            are there images in both?
        also: kinds of ``FINDINGS`` whose samples are bad ones, too.
        lost: what is known to be lost already; see ``opened``.
        jobs: threads; one per usable core, if left out.
        progress: is called now and then, on the calling thread.

    Raises:
        SourceError: nothing can be read.
        ValueError: an argument is out of its range.
    """
    for kind in also:
        if kind not in FINDINGS:
            raise ValueError(f"also={kind!r}: expected some of {', '.join(FINDINGS)}")
    jobs = most_workers() if jobs is None else jobs
    if jobs < 1:
        raise ValueError(f"jobs={jobs}: must be positive")
    begun = time.monotonic()
    report = Report(lost=list(lost))
    rows, classes = _table(source, report)
    other, its_classes = (None, []) if against is None else _table(against, report)
    shown = _Shown(rows, classes)
    # Of Pillow's, about odd files: a loader would show the first of each.
    with warnings.catch_warnings(), ThreadPoolExecutor(jobs, "stoker-verify") as pool:
        warnings.simplefilter("ignore")
        reader = Reader(pool, jobs, progress)
        found = reader.contents(rows)
        report.samples, report.bytes = len(rows), found.bytes
        report.formats = dict(found.formats.most_common())
        report.bad = [shown.bad(index, reason) for index, reason in found.bad]
        good = np.ones(len(rows), np.bool_)
        good[[index for index, _ in found.bad]] = False
        _labels(shown, report)
        _duplicates(shown, found.digests, good, report)
        if other is not None:
            its = _Shown(other, its_classes)
            _classes(shown, its, report)
            _leaks(shown, found.digests, good, its, *reader.digests(other), report)
    for place, kind in enumerate(ODDITIES):
        odd = np.flatnonzero(found.odd & np.uint16(1 << place))
        report.findings += _finding(kind, odd, map(shown.name, odd[:_EXAMPLES].tolist()))
    _add_bad(shown, also, report)
    report.seconds = time.monotonic() - begun
    return report


def opened(make: Callable[[], T]) -> tuple[T, list[str]]:
    """What ``make`` returns, and its warnings of what is left out; others are passed on."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = make()
    lost = []
    for one in told:
        if "left out" in str(one.message):  # the words of all readers for it
            lost.append(str(one.message))
        else:
            warnings.warn(one.message, one.category, stacklevel=3)
    return made, lost


def _table(source: Any, report: Report) -> tuple[Rows, list[str]]:
    """Files and labels of a dataset or of what is at a path, and the names of its classes."""
    if isinstance(source, str | os.PathLike | list | tuple):
        paths = source
        source, lost = opened(lambda: open_whole(paths, anew=True))
        report.lost += lost
    rows = rows_of(source)
    if not isinstance(rows, Rows):
        raise SourceError(rows.op, f"{rows.why}, so its files are not known; {rows.instead}")
    return rows, class_names(source)


class _Shown:
    """Samples and labels, as people know them."""

    def __init__(self, rows: Rows, classes: list[str]) -> None:
        self.rows, self.classes = rows, classes

    def name(self, index: int) -> str:
        """Name of a sample; before it, that of its shard."""
        location, name = self.rows.location(index), self.rows.name(index)
        if self.rows.files.extents is None:
            return name
        return f"{os.path.basename(location.removesuffix(name))}{name}"

    def label(self, index: int) -> str:
        """Its class or label."""
        return self.class_name(int(self.rows.labels[index]))

    def class_name(self, label: int) -> str:
        """The class of a label."""
        return self.classes[label] if 0 <= label < len(self.classes) else str(label)

    def bad(self, index: int, reason: str) -> BadSample:
        """A sample of the list."""
        extents = self.rows.files.extents
        shard = None
        if extents is not None:
            row = int(self.rows.rows_of(np.array([index]))[0])
            shard = extents.shards.path(int(extents.shard[row]))
        name = self.rows.name(index)
        return BadSample(index, self.rows.location(index), reason, name=name, shard=shard)


# Judging


def _finding(
    kind: str, samples: NDArray[np.int64], examples: Iterator[str] | Sequence[str]
) -> list[Finding]:
    """A finding about samples, if there are any."""
    found = samples.astype(np.int64)
    return [Finding(kind, len(found), list(examples), found)] if len(found) else []


def _of_classes(kind: str, classes: Sequence[str]) -> list[Finding]:
    return [Finding(kind, len(classes), list(classes[:_EXAMPLES]))] if classes else []


def _labels(shown: _Shown, report: Report) -> None:
    labels, classes = shown.rows.labels, shown.classes
    if not len(labels) or (labels == -1).all():
        return
    lacking = np.flatnonzero(labels == -1)
    wrong = (labels < -1) | (labels >= len(classes)) if classes else np.zeros_like(labels, np.bool_)
    outside = np.flatnonzero(wrong)
    for kind, found in (("unlabelled", lacking), ("outside", outside)):
        report.findings += _finding(kind, found, map(shown.name, found[:_EXAMPLES].tolist()))
    values, counts = np.unique(labels[(labels >= 0) & ~wrong], return_counts=True)
    used = set(values.tolist())
    most = len(classes) or (max(used, default=-1) + 1)
    if len(classes) or most <= 2 * len(labels):  # numbers that count classes, and no identifiers
        empty = [shown.class_name(label) for label in range(most) if label not in used]
        report.findings += _of_classes("empty_classes", empty)
        single = [shown.class_name(label) for label in values[counts == 1].tolist()]
        report.findings += _of_classes("single_classes", single)


def _groups(digests: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of digests so that the same ones are neighbours, ascending; the group of each."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    other = np.zeros(len(order), np.int64)
    other[1:] = (digests[order[1:]] != digests[order[:-1]]).any(axis=1)
    return order.astype(np.int64), np.cumsum(other)


def _duplicates(
    shown: _Shown, digests: NDArray[np.uint64], good: NDArray[np.bool_], report: Report
) -> None:
    rows = np.flatnonzero(good)
    if not len(rows):
        return
    order, group = _groups(digests[rows])
    order = rows[order]
    firsts = order[np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))][group]
    by_index = np.argsort(order)
    copies, firsts = order[by_index], firsts[by_index]
    copies, firsts = copies[copies != firsts], firsts[copies != firsts]
    labels = shown.rows.labels
    differ = labels[copies] != labels[firsts]
    for kind, which in (("duplicates", np.ones_like(differ)), ("conflicts", differ)):
        pairs = zip(copies[which][:_EXAMPLES].tolist(), firsts[which].tolist(), strict=False)
        told = [_pair(shown, copy, shown, first, kind == "conflicts") for copy, first in pairs]
        report.findings += _finding(kind, copies[which], told)


def _pair(shown: _Shown, here: int, its: _Shown, there: int, labels: bool) -> str:
    if labels:
        one, two = shown.label(here), its.label(there)
        return f"{shown.name(here)} ({one}) = {its.name(there)} ({two})"
    return f"{shown.name(here)} = {its.name(there)}"


def _classes(shown: _Shown, its: _Shown, report: Report) -> None:
    if shown.classes and its.classes:
        places = {name: label for label, name in enumerate(its.classes)}
        moved = [
            f"{name}: {label} here, {places[name]} there"
            for label, name in enumerate(shown.classes)
            if name and places.get(name, label) != label
        ]
        report.findings += _of_classes("moved_classes", moved)
        here, there = shown.classes, its.classes
    else:  # numbers are all that can be compared
        here, there = (
            [str(label) for label in np.unique(one.rows.labels).tolist() if label >= 0]
            for one in (shown, its)
        )
    for kind, some, others in (
        ("classes_missing_there", here, set(there)),
        ("classes_missing_here", there, set(here)),
    ):
        report.findings += _of_classes(kind, [one for one in some if one and one not in others])


def _leaks(
    shown: _Shown,
    digests: NDArray[np.uint64],
    good: NDArray[np.bool_],
    its: _Shown,
    its_digests: NDArray[np.uint64],
    readable: NDArray[np.bool_],
    report: Report,
) -> None:
    rows, its_rows = np.flatnonzero(good), np.flatnonzero(readable)
    if not len(rows) or not len(its_rows):
        return
    order, group = _groups(np.concatenate([digests[rows], its_digests[its_rows]]))
    there = np.full(int(group[-1]) + 1, -1, np.int64)
    is_its = order >= len(rows)
    there[group[is_its][::-1]] = its_rows[order[is_its] - len(rows)][::-1]  # the first stays
    here, there = rows[order[~is_its]], there[group[~is_its]]
    by_index = np.argsort(here)
    here, there = here[by_index], there[by_index]
    here, there = here[there >= 0], there[there >= 0]
    its_labels, labels = its.rows.labels[there], shown.rows.labels[here]
    if shown.classes and its.classes:  # names count, whatever their numbers are
        pairs = zip(labels.tolist(), its_labels.tolist(), strict=True)
        names = [shown.class_name(one) != its.class_name(two) for one, two in pairs]
        differ = np.array(names, np.bool_)
    else:
        differ = labels != its_labels
    for kind, which in (("leaks", np.ones_like(differ)), ("leak_conflicts", differ)):
        some = zip(here[which][:_EXAMPLES].tolist(), there[which].tolist(), strict=False)
        told = [_pair(shown, one, its, two, kind == "leak_conflicts") for one, two in some]
        report.findings += _finding(kind, here[which], told)


def _add_bad(shown: _Shown, also: Sequence[str], report: Report) -> None:
    """Makes the samples of some findings bad ones."""
    known = {sample.index for sample in report.bad}
    for finding in report.findings:
        if finding.kind in also and finding.samples is not None:
            for index in finding.samples.tolist():
                if index not in known:
                    known.add(index)
                    report.bad.append(shown.bad(index, f"is one of {finding.what}"))
    report.bad.sort(key=lambda sample: sample.index)
