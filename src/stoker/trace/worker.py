"""One batch in a worker: fetched while everything records, packed, and run again if it must be.

Note [Replays]
    A broken file shows when it is decoded, which for a recorded sample is after the user's code has
    run. Then the batch runs again from the same states of torch's, Python's and NumPy's generators
    with nothing deferred, in the same worker, so exceptions are raised where they always were. The
    file is remembered and not deferred again. The code's other side effects happen twice; and where
    the main process found the failure, later batches of that worker have drawn already.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stoker.draws import Draw
from stoker.trace import wire
from stoker.trace.scope import DECODE, Counts, Scope, Undone, recording

_PATIENCE = 4
"""So many replays are put up with before their share of all batches is looked at."""


@dataclass(frozen=True)
class Replay:
    """Asks a worker to run a batch again.

    Attributes:
        ticket: of its delivery.
        broken: files that could not be decoded.
    """

    ticket: int
    broken: tuple[str, ...]


@dataclass
class Delivery:
    """What a worker sends for a batch.

    Attributes:
        batch: with `Recording`s in it, or `Pending`s later.
        ticket: by which the batch can be asked for again.
        counts: what happened in making it.
    """

    batch: Any
    ticket: int
    counts: Counts


def states() -> tuple[Any, Any, Any]:
    """Of torch's, Python's and NumPy's generators."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def restore(kept: tuple[Any, Any, Any]) -> None:
    """Puts the generators back into ``states()``."""
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    np.random.set_state(kept[2])


class Recorder:
    """Records the batches of one worker, or of the caller's thread.

    Args:
        depth: how far to defer.
        keep: batches that may be asked for again.
    """

    def __init__(self, depth: int, keep: int) -> None:
        self.depth, self.keep = depth, keep
        self.eager: set[str] = set()
        self.total = Counts()
        self.batches = 0
        self._tickets: OrderedDict[int, tuple[Any, tuple[Any, Any, Any] | None]] = OrderedDict()
        self._next = 0

    def fetch(self, fetch: Callable[[Any], Any], index: Any) -> Delivery:
        """Runs ``fetch(index)``, recording; raises what it raises."""
        begun = time.thread_time()
        delivery = self._fetch(fetch, index)
        delivery.counts.seconds = time.thread_time() - begun
        delivery.counts.samples = _samples(index)
        return delivery

    def _fetch(self, fetch: Callable[[Any], Any], index: Any) -> Delivery:
        if isinstance(index, Replay):
            return self._again(fetch, index)
        if self.depth == DECODE:
            scope = Scope(DECODE, self.eager)
            with recording(scope):
                return Delivery(fetch(index), -1, scope.counts)
        # Under keyed seeds each sample begins with its own states.
        kept = None if isinstance(index, Draw) else states()
        scope = Scope(self.depth, self.eager)
        try:
            with recording(scope):
                batch = wire.pack(fetch(index), scope)
                if scope.undone is None:
                    wire.settle(scope)
        except Undone:
            pass
        except Exception:
            if scope.undone is None:
                raise
        if scope.undone is not None:
            if kept is not None:
                restore(kept)
            scope.counts.replayed += 1
            scope.counts.lines[f"ran again: {scope.undone}"] += 1
            batch = self._eagerly(fetch, index)
        self._learn(scope.counts)
        self._next += 1
        self._tickets[self._next] = index, kept
        while len(self._tickets) > self.keep:
            self._tickets.popitem(last=False)
        return Delivery(batch, self._next, scope.counts)

    def give_up(self, ticket: int, broken: tuple[str, ...]) -> None:
        """Puts the generators back to before the batch that was delivered last."""
        kept = self._tickets[ticket][1]
        self.eager.update(broken)
        self.total.add(Counts(replayed=1))
        if kept is not None:
            restore(kept)

    def _eagerly(self, fetch: Callable[[Any], Any], index: Any) -> Any:
        with recording(None):
            return fetch(index)

    def _again(self, fetch: Callable[[Any], Any], replay: Replay) -> Delivery:
        index, kept = self._tickets[replay.ticket]
        self.eager.update(replay.broken)
        counts = Counts(replayed=1)
        self.total.add(counts)
        now = states()
        try:
            if kept is not None:
                restore(kept)
            return Delivery(self._eagerly(fetch, index), replay.ticket, counts)
        finally:
            restore(now)

    def _learn(self, counts: Counts) -> None:
        """Defers nothing any more where batches keep running again.

        To have deferred what is made at once costs nothing: it is made natively, in one go.
        """
        self.batches += 1
        self.total.add(counts)
        total = self.total
        if total.replayed > _PATIENCE and 4 * total.replayed > self.batches:
            self.depth = DECODE


def _samples(index: Any) -> int:
    """How many samples are asked for."""
    if isinstance(index, Draw):
        return len(index.indices)
    return sum(map(_samples, index)) if isinstance(index, list) else 1
