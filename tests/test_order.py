"""The order is a permutation that looks random, and its keys are Philox's."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import order
from stoker.order import Order, collate_key, keys

GOLDENS = Path(__file__).parent / "goldens" / "order.json"
BITS_64 = st.integers(0, 2**64 - 1)
BITS_32 = st.integers(0, 2**32 - 1)


def philox(key: int, counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x32-10 in whole numbers, as its paper states it."""
    c, k = list(counter), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def z_score(counts: np.ndarray, expected: float, freedom: int) -> float:
    """Standard deviations that chi-square lies above its mean; 5 or more is no accident."""
    chi_square = float((np.square(counts - expected) / expected).sum())
    return (chi_square - freedom) / math.sqrt(2 * freedom)


def test_philox_agrees_with_the_published_vectors() -> None:
    # The known answers of the authors' Random123 distribution.
    assert philox(0, (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert keys(0, 0, np.array([0])).tolist() == [0x6627E8D5]
    ones = 0xFFFFFFFF
    assert philox((ones << 32) | ones, (ones, ones, ones, ones))[0] == 0x408F276D
    wide = np.array([-1]).view(np.int64)  # every bit set: only the words matter
    assert keys(-1, ones, wide, ones).tolist() == [0x408F276D]


@given(BITS_64, BITS_32, st.lists(st.integers(0, 2**48), min_size=1, max_size=5), BITS_32)
def test_keys_are_the_first_word_of_philox(
    seed: int, epoch: int, indices: list[int], draw: int
) -> None:
    expected = [philox(seed, (i & 0xFFFFFFFF, i >> 32, epoch, draw))[0] for i in indices]
    found = keys(seed, epoch, np.array(indices), draw)
    assert found.dtype == np.uint32
    assert found.tolist() == expected


def test_each_index_has_its_draw() -> None:
    draws = np.array([0, 3, 1])
    found = keys(9, 2, np.array([5, 5, 6]), draws)
    assert found.tolist() == [philox(9, (i, 0, 2, d))[0] for i, d in ((5, 0), (5, 3), (6, 1))]


def test_seeds_are_taken_mod_2_to_the_64() -> None:
    indices = np.arange(4)
    assert keys(-1, 0, indices).tolist() == keys(2**64 - 1, 0, indices).tolist()
    assert Order(50, -1, True).indices(0, 0, 50).tolist() == (
        Order(50, 2**64 - 1, True).indices(0, 0, 50).tolist()
    )


def test_collate_keys_have_their_own_domain() -> None:
    at_zero = {collate_key(seed, epoch, 0) for seed in range(20) for epoch in range(20)}
    assert len(at_zero) == 400
    assert at_zero.isdisjoint(
        int(keys(s, e, np.array([0]))[0]) for s in range(20) for e in range(20)
    )
    word = int.from_bytes(b"collate", "little")
    assert collate_key(7, 3, 2**32 + 5) == philox(7 ^ word, (5, 1, 3, 0))[0]


def test_order_is_a_permutation_for_every_small_size() -> None:
    for samples in range(1, 2001):
        found = Order(samples, samples * 31, True).indices(samples % 5, 0, samples)
        assert np.array_equal(np.sort(found), np.arange(samples)), samples


@settings(max_examples=20, deadline=None)
@given(st.integers(2001, 300_000), BITS_64, BITS_32)
def test_order_is_a_permutation_for_bigger_sizes(samples: int, seed: int, epoch: int) -> None:
    found = Order(samples, seed, True).indices(epoch, 0, samples)
    assert np.array_equal(np.sort(found), np.arange(samples))


@pytest.mark.parametrize("samples", [10**12, 10**12 - 1, 2**40 + 1, 2**48])
def test_order_of_huge_sets_is_distinct_and_covers_the_range(samples: int) -> None:
    huge = Order(samples, 1, True)
    starts = [0, samples // 3, samples - 100_000]
    found = np.concatenate([huge.indices(4, start, start + 100_000) for start in starts])
    assert len(np.unique(found)) == found.size
    assert found.min() >= 0
    assert found.max() < samples
    tenths = np.bincount(found * 10 // samples, minlength=10)
    assert z_score(tenths, found.size / 10, 9) < 5


@given(st.integers(0, 5000), BITS_32, st.data(), st.booleans())
def test_slices_agree_with_the_whole(
    samples: int, epoch: int, data: st.DataObject, shuffle: bool
) -> None:
    start = data.draw(st.integers(0, samples))
    stop = data.draw(st.integers(start, samples))
    one = Order(samples, 3, shuffle)
    whole = one.indices(epoch, 0, samples)
    assert np.array_equal(one.indices(epoch, start, stop), whole[start:stop])
    backwards = np.arange(stop - 1, start - 1, -1)
    assert np.array_equal(one.at(epoch, backwards), whole[start:stop][::-1])


def test_without_shuffle_position_is_index() -> None:
    found = Order(10, 5, False).indices(3, 2, 7)
    assert found.dtype == np.int64
    assert found.tolist() == [2, 3, 4, 5, 6]


def test_epochs_seeds_and_sizes_differ() -> None:
    first = Order(1000, 5, True).indices(0, 0, 1000)
    for other in (
        Order(1000, 5, True).indices(1, 0, 1000),
        Order(1000, 6, True).indices(0, 0, 1000),
    ):
        # Two random permutations agree in one place on average.
        assert int((first == other).sum()) < 10


@pytest.mark.parametrize(("samples", "vary"), [(4, "epoch"), (5, "seed"), (6, "epoch")])
def test_every_order_of_few_samples_is_equally_likely(samples: int, vary: str) -> None:
    rounds = 6000
    make: Callable[[int], np.ndarray] = (
        (lambda i: Order(samples, i, True).indices(0, 0, samples))
        if vary == "seed"
        else (lambda i: Order(samples, 77, True).indices(i, 0, samples))
    )
    seen = Counter(tuple(make(i).tolist()) for i in range(rounds))
    counts = np.array([seen[order_] for order_ in permutations(range(samples))])
    assert counts.sum() == rounds
    assert abs(z_score(counts, rounds / len(counts), len(counts) - 1)) < 5


@pytest.mark.parametrize("samples", [7, 37, 1024])
def test_positions_and_neighbours_are_uniform(samples: int) -> None:
    rounds = 3000 if samples < 100 else 300
    places = np.zeros((samples, samples))
    neighbours = np.zeros((samples, samples))
    steps = []
    for seed in range(rounds):
        found = Order(samples, seed, True).indices(seed % 3, 0, samples)
        places[np.arange(samples), found] += 1
        neighbours[found[:-1], found[1:]] += 1
        steps.append(np.corrcoef(found[:-1], found[1:])[0, 1])
    assert abs(z_score(places, rounds / samples, (samples - 1) ** 2)) < 5
    pairs = neighbours[~np.eye(samples, dtype=bool)]
    assert abs(z_score(pairs, rounds / samples, pairs.size - 1)) < 5
    # Without replacement neighbours correlate by -1 / (n - 1), give or take 1 / sqrt(n).
    deviation = 1 / math.sqrt(samples * rounds)
    assert abs(float(np.mean(steps)) + 1 / (samples - 1)) < 5 * deviation + 1 / samples**1.5


def test_first_position_is_uniform_for_a_large_set() -> None:
    first = [int(Order(1_281_167, seed, True).indices(0, 0, 1)[0]) for seed in range(5000)]
    counts = np.bincount(np.array(first) * 50 // 1_281_167, minlength=50)
    assert abs(z_score(counts, 100, 49)) < 5


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 11)])
def test_positions_outside_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="0 <= start <= stop <= 10"):
        Order(10, 0, True).indices(0, start, stop)


@pytest.mark.parametrize("samples", [-1, 2**48 + 1])
def test_sizes_outside_are_refused(samples: int) -> None:
    with pytest.raises(ValueError, match="samples"):
        Order(samples, 0, True)


def goldens() -> dict[str, object]:
    """What is checked in: recompute with ``python tests/test_order.py`` when ALGORITHM changes."""
    return {
        "algorithm": order.ALGORITHM,
        "keys": [
            [seed, epoch, index, draw, int(keys(seed, epoch, np.array([index]), draw)[0])]
            for seed in (0, 7, 2**63 + 11)
            for epoch in (0, 1, 90)
            for index in (0, 1, 2**32 - 1, 10**12)
            for draw in (0, 3)
        ],
        "collate": [
            [seed, epoch, position, collate_key(seed, epoch, position)]
            for seed in (0, 7, 2**63 + 11)
            for epoch in (0, 90)
            for position in (0, 256, 2**33)
        ],
        "order": [
            [
                n,
                seed,
                epoch,
                start,
                Order(n, seed, True).indices(epoch, start, min(n, start + 8)).tolist(),
            ]
            for n in (1, 2, 3, 5, 10, 1000, 1023, 1024, 50_000, 1_281_167, 10**12)
            for seed, epoch in ((0, 0), (7, 0), (7, 1), (2**63 + 11, 90))
            for start in (0, n // 2)
        ],
    }


def test_goldens() -> None:
    assert goldens() == json.loads(GOLDENS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    lines = json.dumps(goldens()).replace("], [", "],\n[").replace(', "', ',\n"')
    GOLDENS.write_text(lines + "\n", encoding="utf-8")
