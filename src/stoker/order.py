"""Which sample comes when, and which random key it gets: arithmetic on ``(seed, epoch, position)``.

Pure functions of integers, without state and with memory that does not depend on the number of
samples:

- ``keys(seed, epoch, indices, draws)``: the 32-bit seed of the generators before sample ``index``.
- ``Order(samples, seed, shuffle).indices(epoch, start, stop)``: the samples at ``[start, stop)``.
- ``Share(samples, start, rank, world, ...).positions(step)``: which positions a rank has in a step.

An order may go by a rule instead of a shuffle of all: `rules.py` has them, and makes them of
``shuffled``, ``permuted`` and ``uniforms``.

All but the share rest on Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), a block function from a 64-bit key and a 128-bit counter to 128 bits
that passes TestU01's BigCrush.

Note [Domains]
    Philox serves several purposes, kept apart by a constant xored into the key: sample keys (no
    constant), collate keys, the round keys of the shuffle, uniform numbers, and what tells the
    permutations of a family apart. The constants are arbitrary; they are the ASCII bytes of a word.

Note [Shuffle]
    ``n`` samples are shuffled by a Feistel network on pairs (left, right) of Z_a x Z_b with ``a * b
    >= n``: rounds alternate between ``left += f(right) mod a`` and ``right += f(left) mod b``. Each
    round can be undone, so the network permutes the ``a * b`` pairs whatever ``f`` is. A pair that
    encodes a number >= n is put through the network again until it does not ("cycle walking"),
    which restricts the permutation to [0, n). Both constructions are from Black and Rogaway,
    "Ciphers with arbitrary finite domains", CT-RSA 2002. With ``a`` and ``b`` near sqrt(n) fewer
    than ``a`` of the pairs lie outside, so walking is rare; a power of two as the domain would send
    up to half of the positions through again, some of them many times.

    ``a`` is even: with both odd every round, hence the whole, would be an even permutation, and
    half of the orders could not occur.

    ``f`` of round r is a keyed hash of at most 32 bits to [0, a) or [0, b): add a 64-bit key,
    multiply by an odd 64-bit key, fold the upper half into the lower, multiply by a constant, take
    the upper 32 bits and scale them. Keys come from Philox on (n, epoch, r). Four rounds of random
    functions already look random to anyone who sees few positions (Luby and Rackoff), but of a
    small set all positions are seen. With random functions instead of hashes, a million orders of
    4 to 7 samples are distinguishable from uniform ones after 16 rounds, not after 20; hashes give
    the same figures. So there are 24 rounds below 1024 samples and 12 above, where no statistic of
    a few positions shows anything. This is a statistical shuffle, not a cipher.

Note [Families]
    Many small sets (the windows of an order, the classes of a set) are each shuffled by a network
    of their own. Keys for each of them would cost a Philox block per round and sample; so all share
    the 24 rounds of size 0, and what is hashed is shifted by 64 bits of Philox on the set's number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import isqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]

ALGORITHM = 1
"""Version of all that a saved state depends on here: keys, collate keys and the shuffle."""

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_LARGEST = 1 << 48
_COLLATE_DOMAIN = int.from_bytes(b"collate\0", "little")
_SHUFFLE_DOMAIN = int.from_bytes(b"shuffle\0", "little")
_UNIFORM_DOMAIN = int.from_bytes(b"uniform\0", "little")
_FAMILY_DOMAIN = int.from_bytes(b"family\0\0", "little")
_ROUNDS = 12
_ROUNDS_OF_FEW = 24
_FEW = 1024


def _constant(value: int) -> UInt64:
    """A 0-d array: numpy combines it with a short array in half the time of a scalar."""
    return np.array(value, np.uint64)


_LOW32 = _constant(_MASK32)
_SHIFT32 = _constant(32)
_SHIFT11 = _constant(11)
_MULTIPLIER_0 = _constant(0xD2511F53)
_MULTIPLIER_2 = _constant(0xCD9E8D57)
_FINISH = _constant(0x9E3779B97F4A7C15)


@lru_cache(maxsize=64)
def _philox_round_keys(key: int) -> tuple[tuple[UInt64, UInt64], ...]:
    """The ten round keys of a 64-bit ``key``, each (low, high)."""
    low, high = key & _MASK32, key >> 32
    return tuple(
        (_constant(low + r * 0x9E3779B9 & _MASK32), _constant(high + r * 0xBB67AE85 & _MASK32))
        for r in range(10)
    )


def _philox(
    key: int, c0: UInt64, c1: UInt64, c2: UInt64, c3: UInt64
) -> tuple[UInt64, UInt64, UInt64, UInt64]:
    """The four output words of Philox4x32-10, each uint64 of shape (n,).

    The counter words ``c0`` to ``c3`` are below 2**32, of shape (n,), and are overwritten. A batch
    is a few hundred counters, so the time is that of numpy's calls: no temporaries, and ``out`` is
    given by position.
    """
    product_0, product_2 = np.empty_like(c0), np.empty_like(c0)
    for low, high in _philox_round_keys(key):
        np.multiply(c0, _MULTIPLIER_0, product_0)
        np.multiply(c2, _MULTIPLIER_2, product_2)
        np.right_shift(product_2, _SHIFT32, c0)
        np.bitwise_xor(c0, c1, c0)
        np.bitwise_xor(c0, low, c0)
        np.right_shift(product_0, _SHIFT32, c2)
        np.bitwise_xor(c2, c3, c2)
        np.bitwise_xor(c2, high, c2)
        np.bitwise_and(product_2, _LOW32, c1)
        np.bitwise_and(product_0, _LOW32, c3)
    return c0, c1, c2, c3


def _counters(
    values: Int64, epoch: int, last: Int64 | int
) -> tuple[UInt64, UInt64, UInt64, UInt64]:
    """The counters' words (value low, value high, epoch, last), fresh arrays of shape (n,)."""
    wide = values.astype(np.uint64)
    words = np.empty((4, wide.size), np.uint64)
    np.bitwise_and(wide, _LOW32, words[0])
    np.right_shift(wide, _SHIFT32, words[1])
    words[2] = epoch & _MASK32
    words[3] = last & _MASK32
    return words[0], words[1], words[2], words[3]


def keys(seed: int, epoch: int, indices: Int64, draws: Int64 | int = 0) -> UInt32:
    """The seeds of the samples' generators, uint32 of shape (n,).

    The key of a sample is the first word of Philox4x32-10 with key = ``seed`` (mod 2**64, low word
    first) and counter = (index low, index high, epoch, draw), each word mod 2**32.

    Args:
        seed: the loader's seed.
        epoch: the epoch.
        indices: non-negative sample indices, shape (n,).
        draws: how often the index was served before in this epoch; one number or one per index.
    """
    return _philox(seed & _MASK64, *_counters(indices, epoch, draws))[0].astype(np.uint32)


def collate_key(seed: int, epoch: int, position: int) -> int:
    """The 32-bit seed of the generators before the batch that starts at ``position`` is collated.

    As ``keys`` with the position for the index, draw 0, and the bytes of "collate" xored into the
    seed.
    """
    counters = _counters(np.array([position]), epoch, 0)
    return int(_philox((seed ^ _COLLATE_DOMAIN) & _MASK64, *counters)[0][0])


@lru_cache(maxsize=64)
def _shuffle_round_keys(seed: int, epoch: int, samples: int) -> tuple[tuple[UInt64, UInt64], ...]:
    """What each round adds and multiplies by: 128 bits of Philox at (samples, epoch, round)."""
    rounds = _ROUNDS_OF_FEW if samples < _FEW else _ROUNDS
    counters = _counters(np.full(rounds, samples, np.int64), epoch, np.arange(rounds))
    words = _philox((seed ^ _SHUFFLE_DOMAIN) & _MASK64, *counters)
    w0, w1, w2, w3 = (word.tolist() for word in words)
    return tuple(
        (_constant(w0[r] << 32 | w1[r]), _constant(w2[r] << 32 | w3[r] | 1)) for r in range(rounds)
    )


def shuffled(seed: int, epoch: int, samples: int, positions: Int64) -> Int64:
    """Where a shuffle of ``samples`` puts ``positions``, each in [0, samples); a fresh array."""
    round_keys = _shuffle_round_keys(seed & _MASK64, epoch & _MASK32, samples)
    sides = _sides(samples)
    values = _permute(positions.astype(np.uint64), sides, round_keys)
    outside = np.flatnonzero(values >= samples)
    while outside.size:
        walked = _permute(values[outside], sides, round_keys)
        values[outside] = walked
        outside = outside[walked >= samples]
    return values.view(np.int64)


def permuted(
    seed: int, epoch: int, values: Int64, sizes: Int64, sets: Int64, kind: Int64 | int = 0
) -> Int64:
    """Where the shuffles of many sets put ``values``: Note [Families]; int64 of shape (n,).

    Args:
        seed: the loader's.
        epoch: the epoch.
        values: places in their sets, each in [0, size), shape (n,).
        sizes: of their sets, shape (n,).
        sets: numbers of the sets, shape (n,).
        kind: the upper part of such a number.
    """
    high, low, _, _ = _philox((seed ^ _FAMILY_DOMAIN) & _MASK64, *_counters(sets, epoch, kind))
    shifts = high << _SHIFT32 | low
    round_keys = _shuffle_round_keys(seed & _MASK64, epoch & _MASK32, 0)
    distinct, which = np.unique(sizes, return_inverse=True)
    sides = np.array([_sides(size) for size in distinct.tolist()], np.uint64).reshape(-1, 2)[which]
    found, left = values.astype(np.uint64), np.arange(len(values))
    while left.size:
        shift = shifts[left]
        shifted = tuple((add + shift, multiply) for add, multiply in round_keys)
        walked = _permute(found[left], (sides[left, 0], sides[left, 1]), shifted)
        found[left] = walked
        left = left[walked >= sizes[left].astype(np.uint64)]
    return found.view(np.int64)


def uniforms(seed: int, epoch: int, positions: Int64) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), multiples of 2**-53, one for each of ``positions``."""
    high, low, _, _ = _philox((seed ^ _UNIFORM_DOMAIN) & _MASK64, *_counters(positions, epoch, 0))
    return ((high << _SHIFT32 | low) >> _SHIFT11).astype(np.float64) * 2.0**-53


class Rule(Protocol):
    """What decides, instead of a shuffle of all, which sample is at which position."""

    @property
    def samples(self) -> int:
        """How many positions an epoch has."""

    @property
    def name(self) -> str:
        """What it is and a hash of all that it decides by, for the state."""

    def drawn(self, seed: int, epoch: int, positions: Int64) -> tuple[Int64, Int64 | int]:
        """The samples at ``positions``, a fresh int64 array of shape (n,), and their draws."""


@dataclass(frozen=True, slots=True)
class Order:
    """Which sample is at which position of an epoch.

    Attributes:
        samples: number of positions, at most 2**48.
        seed: any integer; equal mod 2**64 is equal.
        shuffle: ``False`` for position = index.
        gaps: of each sample that has no position, ascending, how many before it have one; None
            without such samples.
        rule: decides instead of a shuffle of all; it sees the samples without those gaps.
    """

    samples: int
    seed: int
    shuffle: bool
    gaps: Int64 | None = field(default=None, compare=False)
    rule: Rule | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.samples <= _LARGEST:
            raise ValueError(f"samples must be in [0, 2**48], got {self.samples}")

    def __len__(self) -> int:
        return self.samples

    def indices(self, epoch: int, start: int, stop: int) -> Int64:
        """The samples at positions ``[start, stop)`` of ``epoch``, a fresh int64 array.

        Raises:
            ValueError: not ``0 <= start <= stop <= samples``.
        """
        if not 0 <= start <= stop <= self.samples:
            raise ValueError(
                f"need 0 <= start <= stop <= {self.samples}, got start={start}, stop={stop}"
            )
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, epoch: int, positions: Int64) -> Int64:
        """The samples at ``positions``, each in [0, samples), of ``epoch``; a fresh int64 array."""
        return self.drawn(epoch, positions)[0]

    def drawn(self, epoch: int, positions: Int64) -> tuple[Int64, Int64 | int]:
        """The samples at ``positions``, as ``at`` gives them, and the draw of each of them."""
        draws: Int64 | int = 0
        if self.rule is not None:
            values, draws = self.rule.drawn(self.seed, epoch, positions)
        elif self.shuffle:
            values = shuffled(self.seed, epoch, self.samples, positions)
        else:
            values = positions.astype(np.int64)
        if self.gaps is not None:
            values += np.searchsorted(self.gaps, values, "right")
        return values, draws


@lru_cache(maxsize=4096)
def _sides(samples: int) -> tuple[UInt64, UInt64]:
    """The ``a`` and ``b`` of Note [Shuffle]: of 16 even ``a``, that with the least ``a * b``.

    They start at the square root; ``b`` stays at least half of ``a``, as a short side mixes slowly.
    """
    smallest = isqrt(max(samples - 1, 0)) + 1
    smallest += smallest & 1
    pairs = [(a, -(-max(samples, 1) // a)) for a in range(smallest, smallest + 32, 2)]
    near_square = [pair for pair in pairs if pair[0] <= 2 * pair[1]]
    a, b = min(near_square, key=lambda pair: pair[0] * pair[1])
    return _constant(a), _constant(b)


def _permute(
    values: UInt64, sides: tuple[UInt64, UInt64], round_keys: tuple[tuple[UInt64, UInt64], ...]
) -> UInt64:
    """One pass of the Feistel network of Note [Shuffle]; sides and keys may differ by value."""
    changed_size, other_size = sides
    changed, other = np.divmod(values, other_size)
    hashed, spare = np.empty_like(values), np.empty_like(values)
    for add, multiply in round_keys:
        np.add(other, add, hashed)
        np.multiply(hashed, multiply, hashed)
        np.right_shift(hashed, _SHIFT32, spare)
        np.bitwise_xor(hashed, spare, hashed)
        np.multiply(hashed, _FINISH, hashed)
        np.right_shift(hashed, _SHIFT32, hashed)
        np.multiply(hashed, changed_size, hashed)
        np.right_shift(hashed, _SHIFT32, hashed)
        np.add(changed, hashed, changed)
        # Reduce a sum below twice the size: below the size, the difference wraps and is larger.
        np.subtract(changed, changed_size, spare)
        np.minimum(changed, spare, out=changed)
        changed, other = other, changed
        changed_size, other_size = other_size, changed_size
    # The number of rounds is even: both names are back where they began.
    np.multiply(changed, other_size, changed)
    return np.add(changed, other, changed)


@dataclass(frozen=True, slots=True)
class Share:
    """Which positions of an epoch one rank has, in which batches.

    Attributes:
        samples: of the order.
        start: positions below it were handed out before.
        rank: this one, in [0, world).
        world: number of ranks.
        batch_size: samples per batch.
        uneven: "pad", "drop" or "exact": what becomes of what ``world`` does not divide.
        drop_last: leave out the last batch where it isn't full.
    """

    samples: int
    start: int = 0
    rank: int = 0
    world: int = 1
    batch_size: int = 1
    uneven: str = "pad"
    drop_last: bool = False

    def __len__(self) -> int:
        """How many positions this rank has, and so has every other."""
        left = self.samples - self.start
        most = left // self.world if self.uneven == "drop" else -(-left // self.world)
        return most - most % self.batch_size if self.drop_last else most

    @property
    def steps(self) -> int:
        """How many batches this rank has, and so has every other."""
        return -(-len(self) // self.batch_size)

    def positions(self, step: int) -> tuple[Int64, NDArray[np.bool_]]:
        """The positions of batch ``step``, and whether each is one of its own.

        Both of shape (b,). A position that fills or pads is not; it is below ``samples``, too.
        """
        begin = step * self.batch_size
        end = min(begin + self.batch_size, len(self))
        found = self.start + self.rank + self.world * np.arange(begin, end, dtype=np.int64)
        own = found < self.samples
        if not own.all():
            found = found % self.samples if self.uneven == "pad" else np.where(own, found, 0)
        return found, own

    def after(self, steps: int) -> int:
        """The position when so many batches were handed out; ``samples`` after the last."""
        if 0 < self.steps <= steps:
            return self.samples
        return self.start + steps * self.batch_size * self.world
