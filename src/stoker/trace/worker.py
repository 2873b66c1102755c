"""One batch in a worker: fetched while everything records, packed, and run again if it must be.

Note [Replays]
    A broken file shows when it is decoded, which for a recorded sample is after the user's code has
    run. Then the batch runs again from the same states of torch's, Python's and NumPy's generators
    with nothing deferred, in the same worker, so exceptions are raised where they always were. The
    file is remembered and not deferred again. The code's other side effects happen twice. So runs a
    batch again in which the code raises after it has opened images lazily.

    Where the main process found the failure, the worker has gone on to later batches. If the second
    run has drawn other random numbers than the first (an exception came before the transform drew,
    or a handler draws), they are recorded again, too, from the states that it left.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
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
        later: of a batch that ran again: what takes the place of the later ones, by their tickets.
    """

    batch: Any
    ticket: int
    counts: Counts
    later: dict[int, Delivery] = field(default_factory=dict)


def states() -> tuple[Any, Any, Any]:
    """Of torch's, Python's and NumPy's generators."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def restore(kept: tuple[Any, Any, Any]) -> None:
    """Puts the generators back into ``states()``."""
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    np.random.set_state(kept[2])


def _equal(one: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> bool:
    """True where all generators are in the same states."""
    arrays = all(np.array_equal(a, b) for a, b in zip(one[2], other[2], strict=True))
    return torch.equal(one[0], other[0]) and one[1] == other[1] and arrays


class Recorder:
    """Records the batches of one worker, or of the caller's thread.

    Args:
        depth: how far to defer.
        keep: batches that may be asked for again.
        caught: in an except block, what stands for the exception in a delivery; without it,
            exceptions are raised.
    """

    def __init__(self, depth: int, keep: int, caught: Callable[[], Any] | None = None) -> None:
        self.depth, self.keep, self.caught = depth, keep, caught
        self.once = depth == DECODE  # a stream cannot be asked again
        self.eager: set[str] = set()
        self.total = Counts()
        self.batches = 0
        self._tickets: OrderedDict[int, tuple[Any, tuple[Any, Any, Any] | None]] = OrderedDict()
        self._next = 0

    def fetch(self, fetch: Callable[[Any], Any], index: Any) -> Delivery:
        """Runs ``fetch(index)``, recording."""
        begun = time.thread_time()
        try:
            delivery = self._fetch(fetch, index)
        except Exception:
            if self.caught is None or self.once:
                raise
            delivery = Delivery(self.caught(), self._next, Counts())
        delivery.counts.seconds = time.thread_time() - begun
        delivery.counts.samples = _samples(index)
        return delivery

    def _fetch(self, fetch: Callable[[Any], Any], index: Any) -> Delivery:
        if isinstance(index, Replay):
            return self._again(fetch, index)
        if self.once:
            scope = Scope(DECODE, self.eager)
            with recording(scope):
                return Delivery(fetch(index), -1, scope.counts)
        # Under keyed seeds each sample begins with its own states.
        kept = None if isinstance(index, Draw) else states()
        self._next += 1
        self._tickets[self._next] = index, kept
        while len(self._tickets) > self.keep:
            self._tickets.popitem(last=False)
        scope = Scope(self.depth, self.eager)
        try:
            with recording(scope):
                batch = wire.pack(fetch(index), scope)
                if scope.undone is None:
                    wire.settle(scope)
        except Undone:
            pass
        except Exception as error:
            # An image before it may be broken, which its own exception would have told first.
            if scope.undone is None and (scope.depth == DECODE or not scope.counts.opened):
                raise
            scope.undone = scope.undone or type(error).__name__
        if scope.undone is not None:
            if kept is not None:
                restore(kept)
            scope.counts.replayed += 1
            scope.counts.lines[f"ran again: {scope.undone}"] += 1
            batch = self._eagerly(fetch, index)
        self._learn(scope.counts)
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
        self.eager.update(replay.broken)
        counts = Counts(replayed=1)
        self.total.add(counts)
        (index, kept), now = self._tickets[replay.ticket], states()
        later = [ticket for ticket in self._tickets if ticket > replay.ticket]
        before = self._tickets[later[0]][1] if later else now
        if kept is not None:
            restore(kept)
        try:
            batch = self._eagerly(fetch, index)
        except Exception:
            if self.caught is None:
                raise
            batch = self.caught()
        delivery = Delivery(batch, replay.ticket, counts)
        if kept is None or before is None or _equal(states(), before):
            restore(now)
        else:
            for ticket in later:
                delivery.later[ticket] = self.fetch(fetch, self._tickets.pop(ticket)[0])
        return delivery

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
