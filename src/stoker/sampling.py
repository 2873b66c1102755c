"""What ``sampler=`` takes beside torch's samplers: descriptions of orders, made into rules.

A description says what is wanted. The loader makes of it and its dataset a rule (``rules.py``), and
of the rule a sampler for one process or, with ``shard=True``, for many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from stoker.order import Int64, Rule
from stoker.plan import Refusal
from stoker.rules import ByGroup, ByRepeat, ByRuns, ByWeight
from stoker.sources.dataset import Rows, rows_of
from stoker.sources.index import Images

_WINDOW = 65_536
_FEWEST_RUNS = 64
_SMALLEST_RUN_BYTES = 16 << 20
_LARGEST_RUN_BYTES = 1 << 30
_LARGEST = 1 << 48


@dataclass(frozen=True)
class Runs:
    """Each sample once: shards in random order, and their samples shuffled within a window.

    For shards that are far away, or on disks that turn: few of them are read at a time. A run is a
    shard; where there are few shards, large ones are several runs.

    Args:
        window: how many samples are shuffled at a time, in all strands together.
        strands: into so many parts of equal length the shards are divided, which are served in
            turn. With a multiple of the number of ranks, each rank reads shards of its own.
    """

    window: int = _WINDOW
    strands: int = 1

    def __post_init__(self) -> None:
        _require_counts(window=self.window, strands=self.strands)

    def rule(self, dataset: Any, excluded: Int64 | None) -> Rule:
        """The rule for a dataset without the samples ``excluded``.

        Raises:
            ValueError: its samples lie in no shards.
        """
        runs = _left(_runs(dataset), excluded)
        begins = np.flatnonzero(np.diff(runs, prepend=-1))
        members = None
        if len(np.unique(runs[begins])) < len(begins):
            members = np.argsort(runs, kind="stable")
            begins = np.flatnonzero(np.diff(runs[members], prepend=-1))
        return ByRuns(np.append(begins, len(runs)), self.window, self.strands, members)


@dataclass(frozen=True, eq=False)
class Weighted:
    """Samples drawn by weight, with replacement, as by torch's ``WeightedRandomSampler``.

    Args:
        weights: one for each sample of the dataset, from 0; they need not sum to anything.
        num_samples: positions of an epoch, on all ranks together; None: as many as there are
            samples.
    """

    weights: Any
    num_samples: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", _weights(self.weights))
        _require_counts(num_samples=self.num_samples)

    def rule(self, dataset: Any, excluded: Int64 | None) -> Rule:
        """The rule for a dataset without the samples ``excluded``.

        Raises:
            ValueError: the dataset has another number of samples, or nothing has any weight.
        """
        _require_length("weights", self.weights, len(dataset), "samples")
        weights = _left(self.weights, excluded)
        return ByWeight(self.num_samples or len(weights), _shares(weights))


@dataclass(frozen=True, eq=False)
class ClassBalanced:
    """As many samples of each class, those of small classes repeated.

    In an epoch the classes differ by at most one sample, and so do the repeats in a class.

    Args:
        labels: one integer for each sample of the dataset; None: the dataset's own.
        num_samples: positions of an epoch, on all ranks together; None: as many as there are
            samples.
    """

    labels: Any = None
    num_samples: int | None = None

    def __post_init__(self) -> None:
        if self.labels is not None:
            object.__setattr__(self, "labels", _labels(self.labels))
        _require_counts(num_samples=self.num_samples)

    def rule(self, dataset: Any, excluded: Int64 | None) -> Rule:
        """The rule for a dataset without the samples ``excluded``.

        Raises:
            ValueError: the labels are not known, or of another number of samples.
        """
        labels = labels_of(dataset) if self.labels is None else self.labels
        _require_length("labels", labels, len(dataset), "samples")
        labels = _left(labels, excluded)
        without = int((labels < 0).sum()) if self.labels is None else 0
        if without or not len(labels):
            raise ValueError(
                f"{without:,} of {len(labels):,} samples have no label: give labels, or leave them "
                "out"
            )
        members = np.argsort(labels, kind="stable")
        ordered = labels[members]
        begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        starts = np.append(begins, len(labels))
        equal = np.ones(len(begins))
        return _grouped("balanced", equal, self.num_samples or len(labels), starts, members)


@dataclass(frozen=True, eq=False)
class Mixture:
    """The parts of a ``ConcatDataset`` in given proportions, those of small parts repeated.

    Args:
        weights: one for each part, from 0; they need not sum to anything.
        num_samples: positions of an epoch, on all ranks together; None: as many as there are
            samples.
    """

    weights: Any
    num_samples: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", _weights(self.weights))
        _require_counts(num_samples=self.num_samples)

    def rule(self, dataset: Any, excluded: Int64 | None) -> Rule:
        """The rule for a dataset without the samples ``excluded``.

        Raises:
            ValueError: the dataset has other parts, or one that has a weight is empty.
        """
        if not isinstance(dataset, ConcatDataset):
            raise ValueError(
                f"a mixture is one of the parts of a ConcatDataset, not of {_kind(dataset)}"
            )
        _require_length("weights", self.weights, len(dataset.datasets), "parts")
        starts = np.array([0, *dataset.cumulative_sizes], np.int64)
        if excluded is not None:
            starts -= np.searchsorted(excluded, starts)
        for part in np.flatnonzero((np.diff(starts) == 0) & (self.weights > 0)).tolist():
            raise ValueError(f"part {part} of the mixture has no samples: give it the weight 0")
        samples = self.num_samples or int(starts[-1])
        return _grouped("mixture", self.weights, samples, starts, None)


@dataclass(frozen=True)
class RepeatedAugmentation:
    """Each sample ``num_repeats`` times in a row, with other augmentations each time.

    With ``shard=True`` the repeats are on different ranks at the same step, as with timm's
    ``RepeatAugSampler`` and torchvision's ``RASampler``; on one rank they are in the same batch.

    Args:
        num_repeats: how often each comes.
        num_samples: positions of an epoch, on all ranks together; None: as many as there are
            samples, so that an epoch is as long as without repeats and has one in ``num_repeats``
            of the samples. ``num_repeats * len(dataset)`` serves them all.
        shuffle: shuffle them.
    """

    num_repeats: int = 3
    num_samples: int | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        _require_counts(num_repeats=self.num_repeats, num_samples=self.num_samples)

    def rule(self, dataset: Any, excluded: Int64 | None) -> Rule:
        """The rule for a dataset without the samples ``excluded``.

        Raises:
            ValueError: ``num_samples`` is more than all of its samples' repeats.
        """
        distinct = len(dataset) - (0 if excluded is None else len(excluded))
        samples = self.num_samples or distinct
        if not samples <= distinct * self.num_repeats:
            raise ValueError(
                f"num_samples={samples:,} of {distinct:,} samples, {self.num_repeats} times each"
            )
        return ByRepeat(samples, distinct, self.num_repeats, self.shuffle)


Sampling = Runs | Weighted | ClassBalanced | Mixture | RepeatedAugmentation
"""The descriptions."""


def asked_for(
    sampler: Any, order: str | None, shuffle: bool | None, keyed: bool
) -> Sampling | None:
    """The description that a loader's arguments ask for; None without one.

    Raises:
        ValueError: the other arguments do not allow it.
    """
    found = Runs() if sampler is None and order == "runs" else sampler
    if not isinstance(found, Sampling):
        return None
    if shuffle and found is sampler:
        raise ValueError(f"sampler={_kind(found)} and shuffle exclude each other")
    if not keyed:
        raise ValueError(f"{_kind(found)} needs a map-style dataset and keyed randomness")
    return found


def filter(dataset: Any, keep: Callable[[str, int], bool]) -> Subset[Any]:
    """Those samples of ``dataset`` of whose name and label ``keep`` says True; none is read.

    Args:
        dataset: one that stoker knows: its own, torchvision's folders, what `stoker.open` gives,
            or a ``Subset`` or ``ConcatDataset`` of them.
        keep: called with each sample's name (its path below the folder of all, or its name in its
            shard) and its label.

    Raises:
        ValueError: the dataset's names and labels are not known.
    """
    rows = rows_of(dataset)
    if isinstance(rows, Refusal):
        raise ValueError(
            f"the names of {_kind(dataset)} are not known ({rows.op}: {rows.why}): give a Subset "
            "with the indices"
        )
    kept = [
        index for index, label in enumerate(rows.labels.tolist()) if keep(rows.name(index), label)
    ]
    return Subset(dataset, np.array(kept, np.int64))  # type: ignore[arg-type] # as good as a list


def labels_of(dataset: Any) -> Int64:
    """The label of each sample, int64 of shape (n,), -1 where it has none; no sample is read.

    Raises:
        ValueError: they are not known.
    """
    rows = rows_of(dataset)
    if isinstance(rows, Rows):
        return rows.labels
    if isinstance(dataset, Subset):
        return labels_of(dataset.dataset)[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([labels_of(part) for part in dataset.datasets])
    if getattr(dataset, "targets", None) is None:
        raise ValueError(f"the labels of {_kind(dataset)} are not known: give labels")
    return _labels(dataset.targets)


def _runs(dataset: Any) -> Int64:
    """Number of the run that each sample is in, int64 of shape (n,)."""
    if isinstance(dataset, Subset):
        return _runs(dataset.dataset)[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts, after = [], 0
        for part in dataset.datasets:
            parts.append(_runs(part) + after)
            after = int(parts[-1].max(initial=after - 1)) + 1
        return np.concatenate(parts)
    extents = dataset.files.extents if isinstance(dataset, Images) else None
    if extents is None:
        raise ValueError(
            f"runs are those of samples in shards, and {_kind(dataset)} is none: a shuffle of all "
            "(order='full') costs no more there; `stoker pack` writes shards"
        )
    sizes = np.zeros(len(extents.shards), np.int64)
    np.maximum.at(sizes, extents.shard, extents.begin + extents.length)
    most = int(sizes.sum()) // _FEWEST_RUNS
    most = min(max(most, _SMALLEST_RUN_BYTES), _LARGEST_RUN_BYTES)
    pieces = np.maximum(-(-sizes // most), 1)
    steps = np.maximum(-(-sizes // pieces), 1)
    before = np.cumsum(pieces) - pieces
    return before[extents.shard] + extents.begin // steps[extents.shard]


def _grouped(
    word: str, weights: NDArray[np.float64], samples: int, starts: Int64, members: Int64 | None
) -> ByGroup:
    ends = samples * np.append(0.0, _shares(weights))
    return ByGroup(word, ends, starts, members)


def _shares(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Running sums of weights, of which the last is 1.

    Raises:
        ValueError: they sum to nothing.
    """
    ends: NDArray[np.float64] = np.cumsum(weights)
    if not len(ends) or not 0 < ends[-1] < np.inf:
        raise ValueError("no sample has any weight" if len(ends) else "there are no samples")
    ends /= ends[-1]
    return ends


def _left(values: Any, excluded: Int64 | None) -> Any:
    return values if excluded is None else np.delete(values, excluded)


def _weights(given: Any) -> NDArray[np.float64]:
    found = np.array(_array(given), np.float64)
    if found.ndim != 1 or not np.isfinite(found).all() or (found < 0).any():
        raise ValueError("weights must be finite numbers from 0, in one dimension")
    return found


def _labels(given: Any) -> Int64:
    found = _array(given)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iub"):
        raise ValueError("labels must be integers, in one dimension")
    return found.astype(np.int64)


def _array(given: Any) -> NDArray[Any]:
    return given.numpy(force=True) if isinstance(given, torch.Tensor) else np.asarray(given)


def _require_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and not (type(count) is int and 1 <= count <= _LARGEST):
            raise ValueError(f"{name}={count!r}: expected a number from 1 to 2**48")


def _require_length(what: str, given: NDArray[Any], wanted: int, of: str) -> None:
    if len(given) != wanted:
        raise ValueError(f"{len(given):,} {what} for {wanted:,} {of}")


def _kind(dataset: Any) -> str:
    return type(dataset).__name__
