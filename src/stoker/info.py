"""What a data set consists of: classes, sizes, formats, bytes; from its labels and its headers.

Labels are all looked at. Of a big set, the headers of a random sample are read; every figure that
comes from them is one of those samples.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker import header
from stoker.errors import DecodeError, SourceError
from stoker.header import Header
from stoker.order import Order
from stoker.sources import format_of, open_whole
from stoker.sources.dataset import Rows, class_names, rows_of
from stoker.sources.detection import Detection

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Of which `Spread` tells the values."""

_THREADS = 8
_BINS = 24
_THUMBNAIL = 160
_GRID = 6, 4


@dataclass
class Spread:
    """How values are distributed.

    Attributes:
        quantiles: at ``QUANTILES``.
        mean: of all.
        edges, counts: a histogram; one more edge than counts.
    """

    quantiles: list[float]
    mean: float
    edges: list[float]
    counts: list[int]

    @classmethod
    def of(cls, values: NDArray[Any]) -> Spread | None:
        """That of some values; None if there are none."""
        if not len(values):
            return None
        # Edges in equal ratios: sizes differ by factors.
        low, high = float(values.min()), float(values.max())
        edges = np.geomspace(low, high, _BINS + 1) if 0 < low < high else np.array([low, high])
        edges[0], edges[-1] = low, high
        counts = [len(values)] if low == high else np.histogram(values, edges)[0].tolist()
        found = np.quantile(values, QUANTILES).tolist()
        return cls(found, float(values.mean()), edges.tolist(), counts)


@dataclass
class Info:
    """What a data set consists of.

    Attributes:
        format: how it is stored.
        shards: how many files hold its images; None where each has its own.
        samples: how many.
        unlabelled: how many of them have the label -1.
        classes: name or number of each class, and how many samples it has, by label; of images with
            boxes, how many boxes.
        read: how many headers were read; all figures below are of those.
        unreadable: some that have no header that Pillow reads, with the reason.
        unreadable_count: how many.
        formats, modes, subsamplings: how many of each; of JPEGs, the last.
        rotated: how many EXIF turns.
        total_bytes: of all images; an estimate where not all were read.
        bytes, widths, heights, megapixels, aspects, qualities: distributions; None without any.
    """

    format: str
    shards: int | None
    samples: int
    unlabelled: int
    classes: dict[str, int]
    read: int = 0
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    unreadable_count: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    subsamplings: dict[str, int] = field(default_factory=dict)
    rotated: int = 0
    total_bytes: int = 0
    bytes: Spread | None = None
    widths: Spread | None = None
    heights: Spread | None = None
    megapixels: Spread | None = None
    aspects: Spread | None = None
    qualities: Spread | None = None

    @property
    def sampled(self) -> bool:
        """True where headers of some samples were read, not those of all."""
        return self.read < self.samples

    @property
    def imbalance(self) -> float | None:
        """Samples of the largest class to those of the smallest that has any; None without."""
        counts = [count for count in self.classes.values() if count]
        return max(counts) / min(counts) if counts else None


def info(source: Any, *, sample: int = 10_000, seed: int = 0) -> Info:
    """What ``source`` consists of.

    Args:
        source: a dataset of image files or shards, or what `stoker.open` takes for a path.
        sample: of how many samples headers are read at most; 0 for all.
        seed: chooses them.

    Raises:
        SourceError: nothing can be read.
        ValueError: ``sample`` is negative.
    """
    if sample < 0:
        raise ValueError(f"sample={sample}: must not be negative")
    dataset, rows = _table(source)
    shards = rows.files.extents
    # Of images with boxes, the boxes have the classes.
    labels = dataset.boxes.labels if isinstance(dataset, Detection) else rows.labels
    names = class_names(dataset)
    found = Info(
        format_of(dataset),
        None if shards is None else len(shards.shards),
        len(rows),
        int((labels == -1).sum()),
        _classes(labels, names),
    )
    chosen = _chosen(len(rows), sample or len(rows), seed)
    table = rows.rows_of(chosen)

    def work(row: int) -> tuple[Header | str, int]:
        try:
            size = _size(rows, row)
            with rows.files.opened(row) as file:
                return header.read(file), size
        except Exception as error:  # noqa: BLE001  a thread hands over; Pillow raises a dozen kinds
            return str(error) or type(error).__name__, 0

    # Of Pillow's, about odd files: a loader would show the first of each.
    with warnings.catch_warnings(), ThreadPoolExecutor(_THREADS, "stoker-info") as pool:
        warnings.simplefilter("ignore")
        read = list(pool.map(work, table.tolist(), chunksize=64))
    _summarise(found, rows, table, read)
    return found


def _table(source: Any) -> tuple[Any, Rows]:
    dataset = open_whole(source) if isinstance(source, str | os.PathLike | list | tuple) else source
    rows = rows_of(dataset)
    if not isinstance(rows, Rows):
        raise SourceError(rows.op, f"{rows.why}, so its files are not known; {rows.instead}")
    return dataset, rows


def _classes(labels: NDArray[np.int64], names: Sequence[str]) -> dict[str, int]:
    values, counts = np.unique(labels, return_counts=True)
    by_label = dict(zip(values.tolist(), counts.tolist(), strict=True))
    by_label.pop(-1, None)
    if not names:
        return {str(label): count for label, count in by_label.items()}
    found: dict[str, int] = {}
    for label, name in enumerate(names):
        count = by_label.pop(label, 0)
        if name or count:  # a label without a class has no name
            found[name if name and name not in found else f"{name} ({label})".strip()] = count
    return found | {str(label): count for label, count in by_label.items()}


def _chosen(samples: int, most: int, seed: int) -> NDArray[np.int64]:
    """Random indices, ascending; all, where there are not more."""
    if samples <= most:
        return np.arange(samples, dtype=np.int64)
    return np.sort(Order(samples, seed, True).indices(0, 0, most))


def _size(rows: Rows, row: int) -> int:
    extents = rows.files.extents
    if extents is not None:
        return int(extents.length[row])
    return os.stat(rows.files.path(row)).st_size


def _summarise(
    found: Info, rows: Rows, table: NDArray[np.int64], read: list[tuple[Header | str, int]]
) -> None:
    heads = [head for head, _ in read if isinstance(head, Header)]
    sizes = np.array([size for head, size in read if isinstance(head, Header)], np.int64)
    bad = [(place, head) for place, (head, _) in enumerate(read) if isinstance(head, str)]
    found.read, found.unreadable_count = len(read), len(bad)
    found.unreadable = [(rows.files.path(int(table[place])), reason) for place, reason in bad[:10]]
    found.formats = dict(Counter(head.format for head in heads).most_common())
    found.modes = dict(Counter(head.mode for head in heads).most_common())
    found.subsamplings = dict(
        Counter(head.subsampling for head in heads if head.subsampling).most_common()
    )
    found.rotated = sum(head.orientation != 1 for head in heads)
    extents = rows.files.extents
    if extents is not None:
        lengths = extents.length if rows.rows is None else extents.length[rows.rows]
        found.total_bytes = int(lengths.sum())
    elif len(sizes):
        found.total_bytes = round(float(sizes.mean()) * found.samples)
        if not found.sampled:
            found.total_bytes = int(sizes.sum())
    widths = np.array([head.width for head in heads], np.float64)
    heights = np.array([head.height for head in heads], np.float64)
    found.bytes = Spread.of(sizes)
    found.widths, found.heights = Spread.of(widths), Spread.of(heights)
    found.megapixels = Spread.of(widths * heights / 1e6)
    found.aspects = Spread.of(widths / np.maximum(heights, 1))
    qualities = [head.quality for head in heads if head.quality is not None]
    found.qualities = Spread.of(np.array(qualities, np.float64))


# Pictures


def draw(source: Any, found: Info, path: str | os.PathLike[str], *, seed: int = 0) -> None:
    """Writes a PNG: a contact sheet of random samples with their labels, and plots of ``found``.

    Raises:
        ImportError: the extra ``stoker[plot]`` is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullFormatter
    except ImportError as error:
        raise ImportError("pictures need an extra: pip install 'stoker[plot]'") from error

    dataset, rows = _table(source)
    names = class_names(dataset)
    columns, lines = _GRID
    chosen = _chosen(len(rows), columns * lines, seed)
    sheet_lines = -(-len(chosen) // columns)
    figure = Figure(figsize=(12, 2.1 * sheet_lines + 8), dpi=100, layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(2.1 * max(sheet_lines, 1), 8))
    top, bottom = halves
    for place, index in enumerate(chosen.tolist()):
        axes = top.add_subplot(sheet_lines, columns, place + 1)
        axes.set_axis_off()
        label = int(rows.labels[index])
        name = names[label] if 0 <= label < len(names) else str(label)
        axes.set_title(_plain("" if label == -1 else name), fontsize=8)
        image = _thumbnail(rows, index)
        if image is None:
            axes.text(0.5, 0.5, "cannot be\ndecoded", ha="center", va="center", color="red")
        else:
            axes.imshow(np.asarray(image))
    counts = sorted(found.classes.values(), reverse=True)
    plots = bottom.subplots(2, 3)
    plots[0, 0].stairs(counts, fill=True)
    plots[0, 0].set_title(f"samples of {len(counts):,} classes, largest first")
    for axes, title, spread in (
        (plots[0, 1], "bytes", found.bytes),
        (plots[0, 2], "megapixels", found.megapixels),
        (plots[1, 0], "width", found.widths),
        (plots[1, 1], "height", found.heights),
        (plots[1, 2], "JPEG quality, about", found.qualities),
    ):
        axes.set_title(title)
        if spread is not None and len(spread.counts) > 1:
            axes.stairs(spread.counts, spread.edges, fill=True)
            if spread.edges[-1] > 20 * spread.edges[0] > 0:
                axes.set_xscale("log")
                axes.xaxis.set_minor_formatter(NullFormatter())
        elif spread is not None:
            axes.text(0.5, 0.5, f"all {spread.mean:g}", ha="center", transform=axes.transAxes)
    figure.suptitle(_plain(_title(found)))
    figure.savefig(path, format="png")


def _title(found: Info) -> str:
    of = f"; plots of a random {found.read:,}" if found.sampled else ""
    return f"{found.samples:,} samples, {found.format}{of}"


def _plain(text: str) -> str:
    """A text without matplotlib's markup, short enough for a title, whatever is in it."""
    shown = text if len(text) <= 60 else text[:57] + "..."
    printable = "".join(c if c.isprintable() else "?" for c in shown)
    return printable.replace("$", r"\$")


def _thumbnail(rows: Rows, index: int) -> Image.Image | None:
    try:
        image = rows.files.open(int(rows.rows_of(np.array([index]))[0]), index)
    except DecodeError:
        return None
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    return image
