"""How well do orders mix, and how many shards do they read at a time?

    python benchmarks/shuffles.py --output benchmarks/results/shuffles.jsonl

Arithmetic on a set of ImageNet's size in shards of 1,000: no photo is read, and every machine gives
the same figures. Beside stoker's orders stands a shuffle buffer, as readers of shards have it that
can only read on: shards in random order, and of the buffer's samples a random one comes next.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from measure import note, write
from stoker.order import Order, shuffled
from stoker.rules import ByRuns

SAMPLES, CLASSES, SHARD, BATCH, RANKS = 1_281_167, 1000, 1000, 256, 8
SEED = 1
RUNS = [(262_144, 1), (65_536, 1), (65_536, 8), (16_384, 1), (4_096, 1)]
BUFFERS = [65_536, 16_384, 4_096]

Indices = NDArray[np.int64]


def by_runs(window: int, strands: int = 1) -> Callable[[int], Indices]:
    """The order of an epoch, by `stoker.Runs`."""
    starts = np.append(np.arange(0, SAMPLES, SHARD), SAMPLES)
    order = Order(SAMPLES, SEED, True, None, ByRuns(starts, window, strands))
    return lambda epoch: order.indices(epoch, 0, SAMPLES)


def plain(shuffle: bool) -> Callable[[int], Indices]:
    """The order of an epoch: a shuffle of all, or none."""
    order = Order(SAMPLES, SEED, shuffle)
    return lambda epoch: order.indices(epoch, 0, SAMPLES)


def by_buffer(size: int) -> Callable[[int], Indices]:
    """The order of an epoch: shards in random order through a buffer of ``size`` samples."""
    line = by_runs(1)

    def epoch_of(epoch: int) -> Indices:
        rng = np.random.default_rng((SEED, epoch))
        coming = line(epoch)
        buffer = coming[:size].tolist()
        served = []
        for index, place in zip(
            coming[size:].tolist(), rng.integers(0, size, SAMPLES - size).tolist(), strict=True
        ):
            served.append(buffer[place])
            buffer[place] = index
        return np.array(served + rng.permutation(buffer).tolist(), np.int64)

    return epoch_of


Way = Callable[[int], Indices]
ORDERS: list[tuple[str, int, int, Way, Way]] = [
    # Name, window or buffer, strands, what is served, what is read.
    ("full", 0, 0, plain(True), plain(True)),
    *(("runs", w, s, by_runs(w, s), by_runs(w, s)) for w, s in RUNS),
    *(("buffer", size, 0, by_buffer(size), by_runs(1)) for size in BUFFERS),
    ("none", 0, 0, plain(False), plain(False)),
]


def counts(of: Indices, kinds: int) -> NDArray[np.int64]:
    """How often each kind is in each full batch, int64 of shape (batches, kinds)."""
    batches = len(of) // BATCH
    number = np.repeat(np.arange(batches), BATCH) * kinds + of[: batches * BATCH]
    return np.bincount(number, minlength=batches * kinds).reshape(batches, kinds)


def entropy(of: Indices) -> float:
    """Bits of the classes of a batch, on average."""
    shares = counts(of, CLASSES) / BATCH
    logarithms = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return float(-(shares * logarithms).sum(1).mean())


def measured(order: Way, read: Way) -> dict[str, Any]:
    """The figures of an order, whose samples are read in the order ``read``."""
    first, second = order(0), order(1)
    shards = first // SHARD
    in_batch = counts(shards, int(shards.max()) + 1)
    pairs = (in_batch * (in_batch - 1)).sum(1) / (BATCH * (BATCH - 1))
    place = np.empty(SAMPLES, np.int64)
    place[second] = np.arange(SAMPLES)
    apart = np.abs(np.diff(place[first]))
    mixed = shuffled(SEED, 99, SAMPLES, np.arange(SAMPLES))  # as the set was packed
    files = read(0) // SHARD
    thousands = [len(np.unique(files[at : at + 1000])) for at in range(0, SAMPLES - 1000, 9_777)]
    ranks = [len(np.unique(files[rank::RANKS])) for rank in range(RANKS)]
    return {
        "same_shard": float(pairs.mean()),
        "bits_sorted": entropy(first * CLASSES // SAMPLES),
        "bits_mixed": entropy(mixed[first] * CLASSES // SAMPLES),
        "apart": float(np.median(apart)) / SAMPLES,
        "shards_per_thousand": float(np.mean(thousands)),
        "shards_of_a_rank": float(np.mean(ranks)),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", help="not used: there is nothing to read")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = [
        {
            "benchmark": "shuffles",
            "command": "python benchmarks/shuffles.py",
            "samples": SAMPLES,
            "classes": CLASSES,
            "shard": SHARD,
            "shards": -(-SAMPLES // SHARD),
            "batch": BATCH,
            "ranks": RANKS,
        }
    ]
    for name, size, strands, order, read in ORDERS:
        found = {key: round(value, 5) for key, value in measured(order, read).items()}
        rows.append({"order": name, "size": size, "strands": strands, **found})
        note(str(rows[-1]))
    write(options.output, rows)


if __name__ == "__main__":
    main()
