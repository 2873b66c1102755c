"""Orders by rule: what they serve, how often, and that chance is spread as it should be."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.order import Order, Rule, permuted, shuffled, uniforms
from stoker.rules import ByGroup, ByRepeat, ByRuns, ByWeight
from test_order import BITS_32, BITS_64, philox, z_score

sizes_of_runs = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def runs(sizes: list[int], window: int, strands: int, moved: bool = False) -> ByRuns:
    starts = np.cumsum([0, *sizes])
    members = np.random.default_rng(len(sizes)).permutation(starts[-1]) if moved else None
    return ByRuns(starts, window, strands, members)


def groups(weights: list[float], sizes: list[int], samples: int) -> ByGroup:
    ends = np.cumsum([0.0, *weights])
    return ByGroup("mixture", samples * (ends / ends[-1]), np.cumsum([0, *sizes]))


def drawn(rule: Rule, epoch: int, seed: int = 5) -> list[list[int]]:
    """Index and draw of each position of an epoch."""
    positions = np.arange(rule.samples)
    indices, draws = rule.drawn(seed, epoch, positions)
    assert indices.dtype == np.int64 and len(indices) == rule.samples
    found = np.stack([indices, np.broadcast_to(draws, indices.shape)], 1)
    return [[int(index), int(draw)] for index, draw in found]


RULES: dict[str, Rule] = {
    "runs": runs([5, 1, 9, 4, 4, 7], 8, 3),
    "moved": runs([5, 1, 9, 4, 4, 7], 8, 1, moved=True),
    "weight": ByWeight(50, np.cumsum([0.25, 0, 0.5, 0.25])),
    "group": groups([1, 0, 2.5], [3, 4, 20], 40),
    "repeat": ByRepeat(50, 20, 3, True),
}


# What is common to all


@given(st.sampled_from(sorted(RULES)), BITS_64, BITS_32, st.data())
def test_any_positions_in_any_order(name: str, seed: int, epoch: int, data: st.DataObject) -> None:
    order = Order(RULES[name].samples, seed, True, None, RULES[name])
    whole = order.indices(epoch, 0, order.samples)
    _, all_draws = order.drawn(epoch, np.arange(order.samples))
    some = np.array(data.draw(st.lists(st.integers(0, order.samples - 1), max_size=20)), np.int64)
    assert order.at(epoch, some).tolist() == whole[some].tolist()
    draws = np.broadcast_to(order.drawn(epoch, some)[1], some.shape)
    assert draws.tolist() == np.broadcast_to(all_draws, whole.shape)[some].tolist()
    start = data.draw(st.integers(0, order.samples))
    assert order.indices(epoch, start, order.samples).tolist() == whole[start:].tolist()


@pytest.mark.parametrize("name", RULES)
def test_epochs_and_seeds_differ_and_nothing_else_counts(name: str) -> None:
    rule = RULES[name]
    first = drawn(rule, 0)
    assert first != drawn(rule, 1) != drawn(rule, 2)
    assert first != drawn(rule, 0, seed=6)
    copy = pickle.loads(pickle.dumps(rule))
    assert drawn(copy, 0) == first and copy.name == rule.name
    # An index comes once with each draw: no two samples of an epoch share a key.
    assert len({tuple(pair) for pair in first}) == rule.samples


def test_names_tell_rules_apart() -> None:
    starts = np.array([0, 3, 9])
    rules = [
        *RULES.values(),
        ByRuns(starts, 8, 1),
        ByRuns(starts, 9, 1),
        ByRuns(starts, 8, 2),
        ByRuns(np.array([0, 4, 9]), 8, 1),
        ByRuns(starts, 8, 1, np.arange(9)),
        ByWeight(50, np.cumsum([0.25, 0.25, 0.5])),
        ByWeight(51, np.cumsum([0.25, 0.25, 0.5])),
        groups([1, 0, 2], [3, 4, 20], 40),
        groups([1, 0, 2], [3, 4, 21], 40),
        groups([1, 0, 2], [3, 4, 20], 41),
        ByRepeat(50, 20, 4, True),
        ByRepeat(50, 20, 3, False),
        ByRepeat(50, 21, 3, True),
        ByRepeat(49, 20, 3, True),
    ]
    assert len({rule.name for rule in rules}) == len(rules)
    assert all(len(rule.name) < 30 for rule in rules)


def test_goldens() -> None:
    """What a saved state depends on: other numbers need another ALGORITHM."""
    assert {name: [i for i, _ in drawn(rule, 1)[:8]] for name, rule in RULES.items()} == GOLDENS
    expected = [philox(7 ^ int.from_bytes(b"uniform", "little"), (p, 0, 3, 0)) for p in range(9)]
    found = uniforms(7, 3, np.arange(9))
    assert found.tolist() == [((a << 32 | b) >> 11) / 2**53 for a, b, _, _ in expected]


GOLDENS = {
    "runs": [16, 12, 0, 15, 13, 29, 17, 5],
    "moved": [29, 18, 24, 22, 11, 21, 28, 20],
    "weight": [2, 0, 0, 2, 0, 3, 3, 3],
    "group": [20, 1, 23, 2, 21, 7, 18, 1],
    "repeat": [17, 17, 17, 4, 4, 4, 10, 10],
}


# The shuffles of many sets


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6), BITS_64, BITS_32, st.integers(0, 2**40)
)
def test_each_set_is_permuted(sizes: list[int], seed: int, epoch: int, first: int) -> None:
    values = np.concatenate([np.arange(size) for size in sizes])
    repeated = np.repeat(sizes, sizes)
    sets = np.repeat(first + np.arange(len(sizes)), sizes)
    found = permuted(seed, epoch, values, repeated, sets, 3)
    for number in range(len(sizes)):
        mine = found[sets == first + number]
        assert sorted(mine.tolist()) == list(range(sizes[number]))
        alone = permuted(seed, epoch, values[sets == first + number], np.full(len(mine), len(mine)),
                         np.full(len(mine), first + number), 3)  # fmt: skip
        assert alone.tolist() == mine.tolist()


@pytest.mark.parametrize("vary", ["set", "kind", "epoch"])
def test_every_order_of_a_small_set_is_equally_likely(vary: str) -> None:
    rounds, size = (2_400 if vary == "epoch" else 12_000), 5
    values = np.tile(np.arange(size), rounds)
    numbers = np.repeat(np.arange(rounds), size)
    if vary == "epoch":
        parts = [
            permuted(1, e, np.arange(size), np.full(size, size), np.zeros(size, np.int64))
            for e in range(rounds)
        ]
        found = np.stack(parts)
    else:
        sets, kind = (numbers, 0) if vary == "set" else (np.zeros_like(numbers), numbers)
        found = permuted(1, 0, values, np.full(len(values), size), sets, kind).reshape(-1, size)
    seen = Counter(map(tuple, found.tolist()))
    counts = np.array([seen[order] for order in permutations(range(size))])
    assert abs(z_score(counts, rounds / len(counts), len(counts) - 1)) < 5
    # A set says nothing of the next one.
    pairs = np.zeros((size, size))
    np.add.at(pairs, (found[:-1, 0], found[1:, 0]), 1)
    assert abs(z_score(pairs, (rounds - 1) / size**2, size**2 - 1)) < 5


@pytest.mark.parametrize("size", [30, 1500])
def test_places_and_neighbours_in_larger_sets_are_uniform(size: int) -> None:
    rounds = 1000 if size < 100 else 100
    values, numbers = np.tile(np.arange(size), rounds), np.repeat(np.arange(rounds), size)
    found = permuted(2, 0, values, np.full(len(values), size), numbers).reshape(rounds, size)
    tenths = np.zeros((10, 10))
    np.add.at(
        tenths, (np.tile(np.arange(size), rounds) * 10 // size, found.ravel() * 10 // size), 1
    )
    assert abs(z_score(tenths, found.size / 100, 81)) < 5
    steps = np.array([np.corrcoef(row[:-1], row[1:])[0, 1] for row in found])
    assert abs(steps.mean() + 1 / (size - 1)) < 5 / math.sqrt(found.size) + 1 / size**1.5


# Runs


@settings(max_examples=200, deadline=None)
@given(sizes_of_runs, st.integers(1, 60), st.integers(1, 7), st.booleans(), BITS_64, BITS_32)
def test_runs_serve_each_sample_once(
    sizes: list[int], window: int, strands: int, moved: bool, seed: int, epoch: int
) -> None:
    rule = runs(sizes, window, strands, moved)
    found = [index for index, _ in drawn(rule, epoch, seed)]
    assert sorted(found) == list(range(sum(sizes)))


@given(sizes_of_runs, st.integers(1, 30), st.integers(1, 5), BITS_32)
def test_runs_are_as_note_runs_says(
    sizes: list[int], window: int, strands: int, epoch: int
) -> None:
    starts = np.cumsum([0, *sizes])
    taken = shuffled(5, epoch, len(sizes), np.arange(len(sizes))).tolist()
    line = [index for run in taken for index in range(starts[run], starts[run + 1])]
    found = [index for index, _ in drawn(runs(sizes, window, strands), epoch)]
    begin = 0
    for strand in range(strands):
        mine = found[strand::strands]
        piece, begin = line[begin : begin + len(mine)], begin + len(mine)
        each = max(1, window // strands)
        for at in range(0, len(mine), each):
            assert sorted(mine[at : at + each]) == sorted(piece[at : at + each])
    assert begin == len(line)


def test_ranks_read_their_own_strands() -> None:
    rule = runs([100] * 80, 800, 8)
    shards = [{index // 100 for index, _ in drawn(rule, 0)[rank::4]} for rank in range(4)]
    shared = Counter(shard for mine in shards for shard in mine)
    # 80 runs in 8 strands of 10 runs each: no run is cut.
    assert set(shared.values()) == {1} and len(shared) == 80


def test_batches_that_are_windows_are_stretches_of_a_run() -> None:
    world, batch = 4, 32
    rule = runs([320] * 40, world * batch, world)
    for rank in range(world):
        mine = np.array([index for index, _ in drawn(rule, 0)[rank::world]]).reshape(-1, batch)
        assert (mine.max(1) - mine.min(1) == batch - 1).all()
        assert (np.diff(mine, axis=1) != 1).any()


def test_every_order_of_runs_is_equally_likely() -> None:
    rule = runs([1, 1, 1, 1], 1, 1)
    seen = Counter(tuple(index for index, _ in drawn(rule, epoch)) for epoch in range(2400))
    counts = np.array([seen[order] for order in permutations(range(4))])
    assert abs(z_score(counts, 100, 23)) < 5


def test_no_position_of_many_runs_costs_more_than_another() -> None:
    rule = ByRuns(np.arange(0, 10**12 + 1, 10**9), 10**6, 4)
    found = rule.drawn(1, 2, np.arange(9 * 10**11, 9 * 10**11 + 1000))[0]
    assert len(np.unique(found)) == 1000 and found.min() >= 0 and found.max() < 10**12


# Weights


def test_weights_are_proportions() -> None:
    weights = np.array([0, 5, 1, 0, 0, 3, 0.5, 0])
    rule = ByWeight(40_000, np.cumsum(weights) / weights.sum())
    counts = np.zeros((3, 8))
    for epoch in range(3):
        counts[epoch] = np.bincount([i for i, _ in drawn(rule, epoch)], minlength=8)
    assert not counts[:, weights == 0].any()
    expected = (weights / weights.sum() * rule.samples)[weights > 0]
    for row in counts[:, weights > 0]:
        assert abs(z_score(row, expected, 3)) < 5
    # Drawn one by one: what comes next does not depend on what came.
    found = np.array([i for i, _ in drawn(rule, 0)])
    pairs = np.zeros((8, 8))
    np.add.at(pairs, (found[:-1], found[1:]), 1)
    used = pairs[weights > 0][:, weights > 0]
    expected_pairs = np.outer(expected, expected) / rule.samples
    assert abs(z_score(used, expected_pairs, used.size - 1)) < 5  # type: ignore[arg-type] # as above


def test_uniform_numbers_are_uniform() -> None:
    found = np.concatenate([uniforms(3, epoch, np.arange(50_000)) for epoch in range(2)])
    assert found.min() >= 0 and found.max() < 1
    assert abs(z_score(np.bincount((found * 100).astype(int), minlength=100), 1000, 99)) < 5
    low = np.bincount((found * 2**20 % 1 * 100).astype(int), minlength=100)
    assert abs(z_score(low, 1000, 99)) < 5


# Groups


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 12)), min_size=1, max_size=6),
    st.integers(1, 200),
    BITS_64,
)
def test_groups_have_their_proportions_exactly(
    parts: list[tuple[float, int]], samples: int, seed: int
) -> None:
    weights = [weight for weight, _ in parts]
    sizes = [size for _, size in parts]
    if not sum(weights) > 1e-6:
        weights[0] = 1
    rule = groups(weights, sizes, samples)
    found = drawn(rule, 3, seed)
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    counts = np.bincount(group_of[[i for i, _ in found]], minlength=len(sizes))
    expected = samples * np.array(weights) / sum(weights)
    assert counts.sum() == samples
    # Below what is rounded, floor and ceiling of a whole number are the two beside it.
    assert (counts >= np.floor(expected - 1e-6)).all()
    assert (counts <= np.ceil(expected + 1e-6)).all()
    each = np.bincount([i for i, _ in found], minlength=sum(sizes))
    for group in range(len(sizes)):
        mine = each[group_of == group]
        assert mine.max() - mine.min() <= 1
    assert len({tuple(pair) for pair in found}) == samples
    for index, draw in found:
        assert draw < each[group_of == group_of[index]].max()


def test_groups_mean_their_proportions() -> None:
    rule = groups([1, 2, 4], [9, 9, 9], 10)
    rounds = 1000
    counts = np.zeros((rounds, 3))
    for epoch in range(rounds):
        counts[epoch] = np.bincount([i // 9 for i, _ in drawn(rule, epoch)], minlength=3)
    expected = 10 * np.array([1, 2, 4]) / 7
    # The fraction f of an expected count is rounded up with probability f.
    fractions = expected % 1
    deviations = np.sqrt(fractions * (1 - fractions) / rounds)
    assert (np.abs(counts.mean(0) - expected) < 5 * deviations).all()


def test_groups_are_spread_and_extras_are_drawn() -> None:
    rule = groups([3, 1], [40, 7], 400)
    rounds = 300
    early, extra = np.zeros(rounds), np.zeros(7)
    for epoch in range(rounds):
        found = np.array([i for i, _ in drawn(rule, epoch)])
        early[epoch] = (found[:100] >= 40).sum()
        each = np.bincount(found, minlength=47)[40:]
        assert sorted(each.tolist()) == [14, 14, 14, 14, 14, 15, 15]
        extra += each == 15
    # Hypergeometric: 100 of 400 positions, 100 of which are the second group's.
    variance = 100 * 0.25 * 0.75 * 300 / 399
    assert abs(early.mean() - 25) < 5 * math.sqrt(variance / rounds)
    assert 0.7 < early.var() / variance < 1.4
    # Two of seven are drawn: less variance than chi-square's by 5/6.
    assert abs(z_score(extra, rounds * 2 / 7, 6)) < 5


# Repeats


@given(st.integers(1, 30), st.integers(1, 5), st.booleans(), st.data())
def test_repeats(distinct: int, repeats: int, shuffle: bool, data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, distinct * repeats))
    found = drawn(ByRepeat(samples, distinct, repeats, shuffle), 1)
    order = Order(distinct, 5, shuffle).indices(1, 0, distinct).tolist()
    expected = [[index, draw] for index in order for draw in range(repeats)]
    assert found == expected[:samples]
