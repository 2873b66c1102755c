"""Orders that are no shuffle of all: by runs, by weight, by group, or each sample several times.

Each is a `stoker.order.Rule`: tables that the user's data or weights say, and arithmetic on (seed,
epoch, position). So whatever works on an order (shares of ranks, states, prefetching, the sample
that takes a bad one's place) works on these. ``sampling.py`` makes them of datasets.

Note [Runs]
    Samples that are cheap to read together form a run. The runs are shuffled and laid end to end,
    and that line of samples is cut into ``strands`` of equal length. Position p is in strand p %
    strands, at place p // strands of it; each strand is cut into windows, and in each the samples
    are shuffled. Where the number of ranks divides that of strands, a rank reads the runs of its
    own strands alone.

Note [Exact proportions]
    Positions are divided among groups so that in each epoch a group has as many as its proportion
    says, rounded up or down: group g has the whole numbers in [e(g) - u, e(g + 1) - u), where e are
    the running sums of what the proportions ask for, and u is uniform in [0, 1), one number an
    epoch, so that the mean over epochs is exact. A shuffle of all positions spreads the groups. In
    a group, no sample comes twice more often than another; which of them come once more is drawn.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.order import Int64, permuted, shuffled, uniforms

_MASK32 = 0xFFFFFFFF
_HEX_DIGITS = 16


def _named(word: str, *parts: Any) -> str:
    """``word`` and a hash of numbers and arrays of them."""
    digest = hashlib.blake2b(digest_size=_HEX_DIGITS // 2)
    for part in parts:
        array = np.asarray(part)
        digest.update(np.int64(array.size).tobytes())
        digest.update(np.ascontiguousarray(array, f"<{array.dtype.kind}8").data)
    return f"{word} {digest.hexdigest()}"


@dataclass(frozen=True, eq=False)
class ByRuns:
    """Each sample once, runs in random order, shuffled within windows: Note [Runs].

    Attributes:
        starts: place of the first sample of each run, ascending, and the number of samples.
        window: samples of all strands together that are shuffled at a time.
        strands: parts that a line of runs is cut into.
        members: the sample at each place; None where sample i is at place i.
    """

    starts: Int64
    window: int
    strands: int
    members: Int64 | None = None

    @property
    def samples(self) -> int:
        """How many positions an epoch has."""
        return int(self.starts[-1])

    @cached_property
    def name(self) -> str:
        """What it is, and a hash of its tables."""
        tables = [self.starts] if self.members is None else [self.starts, self.members]
        return _named("runs", self.window, self.strands, *tables)

    def drawn(self, seed: int, epoch: int, positions: Int64) -> tuple[Int64, int]:
        """The samples at ``positions``, and 0."""
        # So many samples are in a strand, and the first strands have one more.
        least, more = divmod(self.samples, self.strands)
        window = max(1, self.window // self.strands)
        places, strands = np.divmod(positions, self.strands)
        windows, within = np.divmod(places, window)
        begins = windows * window
        sizes = np.minimum(window, least + (strands < more) - begins)
        begins += strands * least + np.minimum(strands, more)
        line = begins + permuted(seed, epoch, within, sizes, windows, strands)
        ends, shifts = _line(self, seed, epoch)
        line += shifts[np.searchsorted(ends, line, "right")]
        return line if self.members is None else self.members[line], 0


@lru_cache(maxsize=4)
def _line(rule: ByRuns, seed: int, epoch: int) -> tuple[Int64, Int64]:
    """Where each run ends in the line of an epoch, and how far from there its samples are."""
    runs = len(rule.starts) - 1
    taken = shuffled(seed, epoch, runs, np.arange(runs, dtype=np.int64))
    begins = rule.starts[taken]
    sizes = rule.starts[taken + 1] - begins
    ends = np.cumsum(sizes)
    return ends, begins - (ends - sizes)


@dataclass(frozen=True, eq=False)
class ByWeight:
    """Each position draws a sample by weight, whatever the others have drawn.

    Attributes:
        samples: how many positions an epoch has.
        ends: running sums of the samples' weights, of which the last is 1.
    """

    samples: int
    ends: NDArray[np.float64]

    @cached_property
    def name(self) -> str:
        """What it is, and a hash of the weights."""
        return _named("weighted", self.samples, self.ends)

    def drawn(self, seed: int, epoch: int, positions: Int64) -> tuple[Int64, Int64]:
        """The samples at ``positions``, and the positions mod 2**32."""
        found = np.searchsorted(self.ends, uniforms(seed, epoch, positions), "right")
        return found.astype(np.int64), positions & _MASK32


@dataclass(frozen=True, eq=False)
class ByGroup:
    """Groups of samples in exact proportions, small ones repeated: Note [Exact proportions].

    Attributes:
        word: what it is called.
        ends: running sums of the positions that each group asks for, from 0 to their number.
        starts: place of the first sample of each group, ascending, and the number of samples.
        members: the sample at each place; None where sample i is at place i.
    """

    word: str
    ends: NDArray[np.float64]
    starts: Int64
    members: Int64 | None = None

    @property
    def samples(self) -> int:
        """How many positions an epoch has."""
        return int(self.ends[-1])

    @cached_property
    def name(self) -> str:
        """What it is, and a hash of groups and proportions."""
        tables = [self.starts] if self.members is None else [self.starts, self.members]
        return _named(self.word, self.ends, *tables)

    def drawn(self, seed: int, epoch: int, positions: Int64) -> tuple[Int64, Int64]:
        """The samples at ``positions``, and which of its repeats each is."""
        chance = uniforms(seed, epoch, np.zeros(1, np.int64))
        bounds = np.ceil(self.ends - chance).astype(np.int64)
        slots = shuffled(seed, epoch, self.samples, positions)
        groups = np.searchsorted(bounds, slots, "right") - 1
        starts = self.starts[groups]
        sizes = self.starts[groups + 1] - starts
        draws, places = np.divmod(slots - bounds[groups], sizes)
        found = starts + permuted(seed, epoch, places, sizes, groups)
        return found if self.members is None else self.members[found], draws


@dataclass(frozen=True, eq=False)
class ByRepeat:
    """Each sample several times in a row, so that ranks have it at the same step.

    Attributes:
        samples: how many positions an epoch has, at most those of all samples.
        distinct: how many samples there are.
        num_repeats: how often each comes.
        shuffle: their order is a shuffle of all.
    """

    samples: int
    distinct: int
    num_repeats: int
    shuffle: bool

    @cached_property
    def name(self) -> str:
        """What it is, and a hash of its numbers."""
        numbers = self.samples, self.distinct, self.num_repeats, int(self.shuffle)
        return _named("repeated", *numbers)

    def drawn(self, seed: int, epoch: int, positions: Int64) -> tuple[Int64, Int64]:
        """The samples at ``positions``, and which of its repeats each is."""
        places, draws = np.divmod(positions, self.num_repeats)
        if self.shuffle:
            places = shuffled(seed, epoch, self.distinct, places)
        return places, draws
