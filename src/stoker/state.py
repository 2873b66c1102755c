"""The state of a loader: where in its order it is, and what shows whether it fits another loader.

A dict for JSON, of a few hundred bytes. What was prepared and not handed out does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stoker.errors import ResumeError
from stoker.order import ALGORITHM

VERSION = 1
"""Of the state itself; ``ALGORITHM`` is that of the order and the keys."""


@dataclass(frozen=True)
class State:
    """Where a loader is.

    Attributes:
        epoch: the epoch that the position is in.
        position: samples of its order that were handed out, by all ranks; None with a user's
            sampler.
        seed: of order and keys.
        shuffle: None with a user's sampler.
        uneven: as the loader has it; None without sharding.
        samples: of an epoch; None where the dataset has no length.
        source: hash of the samples' names and labels; None where they are not known.
        batches: with a user's sampler, those taken on this rank.
        batch_size: then, of its batches; None where it makes them itself.
        world: then, the number of ranks.
        sampler_epoch: then, the ``epoch`` that the sampler has; None where it has none.
        order: the name of the order's rule; None without one.
    """

    epoch: int
    position: int | None
    seed: int
    shuffle: bool | None
    uneven: str | None
    samples: int | None
    source: str | None
    batches: int | None = None
    batch_size: int | None = None
    world: int | None = None
    sampler_epoch: int | None = None
    order: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The state for JSON."""
        fields = asdict(self)
        if self.batches is None:
            for name in ("batches", "batch_size", "world", "sampler_epoch"):
                del fields[name]
        else:
            for name in ("position", "shuffle", "uneven"):
                del fields[name]
        if self.order is None:
            del fields["order"]
        return {"version": VERSION, "algorithm": ALGORITHM, **fields}

    def require_same(self, here: State, seed_given: bool) -> None:
        """Raises where this state is not one of a loader whose own is ``here``.

        Raises:
            ResumeError: data, order or what a user's sampler depends on differ.
        """
        kinds = ["a sampler of yours" if s.position is None else "an order" for s in (self, here)]
        if kinds[0] != kinds[1]:
            raise ResumeError("sampler", *kinds)
        names = ["samples", "order", "shuffle", "batch_size", "world"]
        for name in names + ["seed"] * seed_given:
            if getattr(self, name) != getattr(here, name):
                raise ResumeError(name, getattr(self, name), getattr(here, name))
        if self.source and here.source and self.source != here.source:
            raise ResumeError("source", self.source, here.source)


def from_dict(found: Any) -> State:
    """The state in a dict that `State.as_dict` gave; other keys are passed over.

    Raises:
        ResumeError: it is none, or one of another version.
    """
    if not isinstance(found, Mapping):
        raise ResumeError("version", type(found).__name__, VERSION)
    for name, here in (("version", VERSION), ("algorithm", ALGORITHM)):
        if found.get(name) != here:
            raise ResumeError(name, found.get(name), here)
    own = "batches" not in found
    for name in ("epoch", "position" if own else "batches"):
        _require(name, found.get(name), _is_count(found.get(name)), "a number from 0")
    _require("seed", found.get("seed"), type(found.get("seed")) is int, "an integer")
    samples = found.get("samples")
    if own:
        position = found["position"]
        fits = _is_count(samples) and position <= samples
        _require("position", position, fits, f"a number up to {samples}, its samples")
    fields: dict[str, Any] = {name: found.get(name) for name in State.__dataclass_fields__}
    return State(**fields)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _require(field: str, value: Any, fits: bool, expected: str) -> None:
    if not fits:
        raise ResumeError(field, value, expected)
