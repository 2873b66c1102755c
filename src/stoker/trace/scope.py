"""Where recording is on: one batch of one loader, in one thread; and what is counted there."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

DECODE, IMAGES, TENSORS = 1, 2, 3
"""How far a scope defers: it only decodes natively; images are lazy; tensors are deferred, too."""

_LINES = 16
"""Source lines are looked up for so many reasons; more are only counted."""


_PLANS = 64
"""So many kinds of samples are told apart: random operations give ever new ones."""


class Undone(BaseException):
    """What was deferred cannot be done: the batch must run again with nothing deferred.

    No `Exception`: user code that handles those must not take it for its own. It may still be
    swallowed by a bare except, so the scope remembers it, too.
    """


@dataclass
class Counts:
    """What became of samples; adds up over batches and workers.

    Attributes:
        recorded: tensors that crossed to the main process unmade.
        opened: lazily opened images.
        pixels: images that were made in a worker because code needed their pixels.
        values: tensors that were made in a worker because code needed their values.
        replayed: batches that ran a second time.
        declined: images that Pillow decoded after the native decoder had declined.
        samples: that were asked for.
        seconds: of CPU that the worker's thread spent on them.
        plans: what crossed, in words; counted once a batch.
        lines: reasons, with the user's source line.
    """

    recorded: int = 0
    opened: int = 0
    pixels: int = 0
    values: int = 0
    replayed: int = 0
    declined: int = 0
    samples: int = 0
    seconds: float = 0.0
    plans: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        """Adds what was counted elsewhere."""
        self.recorded += other.recorded
        self.opened += other.opened
        self.pixels += other.pixels
        self.values += other.values
        self.replayed += other.replayed
        self.declined += other.declined
        self.samples += other.samples
        self.seconds += other.seconds
        for plan, batches in other.plans.items():
            if plan in self.plans or len(self.plans) < _PLANS:
                self.plans[plan] += batches
        self.lines.update(other.lines)

    def __bool__(self) -> bool:
        return bool(self.opened or self.recorded or self.replayed or self.pixels or self.values)


class Scope:
    """One batch being recorded.

    Attributes:
        depth: DECODE, IMAGES or TENSORS.
        counts: of this batch.
        live: the lazy objects made in it.
        undone: why the batch must run again, if it must.
        eager: files, by path, that are never deferred.
    """

    __slots__ = ("counts", "depth", "eager", "live", "undone")

    def __init__(self, depth: int, eager: set[str]) -> None:
        self.depth, self.eager = depth, eager
        self.counts = Counts()
        self.live: list[weakref.ref[Any]] = []
        self.undone: str | None = None

    def undo(self, reason: str) -> Undone:
        """The exception to raise when something deferred cannot be done."""
        self.undone = reason
        return Undone(reason)


class _Local(threading.local):
    scope: Scope | None = None


_local = _Local()


def current() -> Scope | None:
    """The scope of this thread, or None where everything is stock."""
    return _local.scope


@contextmanager
def recording(scope: Scope | None) -> Iterator[None]:
    """Makes ``scope`` this thread's; None switches recording off."""
    before, _local.scope = _local.scope, scope
    try:
        yield
    finally:
        _local.scope = before


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


def _is_users(name: str) -> bool:
    return not (
        name.startswith((_PACKAGE, _STANDARD, "<frozen"))
        or f"{os.sep}site-packages{os.sep}" in name
    )


def note(scope: Scope, what: str) -> None:
    """Remembers that ``what`` was needed, with the user's line that needed it."""
    counts = scope.counts
    if sum(counts.lines.values()) >= _LINES:
        counts.lines["more"] += 1
        return
    frame: FrameType | None = sys._getframe(1)
    via = ""
    while frame is not None:
        code = frame.f_code
        if _is_users(code.co_filename):
            name = os.path.basename(code.co_filename)
            counts.lines[f"{what} at {name}:{frame.f_lineno} in {code.co_qualname}{via}"] += 1
            return
        if not via and not code.co_filename.startswith(_PACKAGE):
            via = f" (through {frame.f_globals.get('__name__', '?')}.{code.co_qualname})"
        frame = frame.f_back
    counts.lines[what + via] += 1
