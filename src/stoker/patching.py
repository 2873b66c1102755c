"""`patch`, `accelerate` and `explain`: for loaders of torch's own that a framework builds.

Note [Patching]
    Both put one function in the place of `torch.utils.data.DataLoader._get_iterator`. For every
    loader, or for those that were accelerated, it gives an iterator that traces, with torch's order
    and random streams, sharding and number of workers. For all others, and inside of worker
    processes, it calls what was there before. A subclass with an iterator of its own keeps it.
    fastai has loaders that are not torch's but use its iterators: those are named in one tuple.
"""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import Any, TypeVar

import torch

from stoker.errors import StokerWarning
from stoker.explanation import Explanation
from stoker.loader import DataLoader
from stoker.prepared import prepare
from stoker.trace.iterators import (
    Trace,
    inside,
    iterator,
    iterator_of_fields,
    refused,
    stock_iterator,
)

_T = TypeVar("_T")

_TRACE = "_stoker_trace"
"""The attribute of a loader that holds its `Trace`: it is pickled and copied with it."""

_PREPARED = "_stoker_prepared"
"""The attribute of a loader inside of Accelerate's that holds its `Prepared`."""

_WRAPPERS = ("base_dataloader", "loader", "_dataloader")
"""Attributes by which Accelerate's, timm's and Fabric's loaders hold another."""


class _State:
    patched = False
    accelerated = False
    told = False
    before: Any = stock_iterator
    before_in_fastai: Any = None


class Patched:
    """What `patch` returns: leaving it as a context manager undoes what that call did."""

    def __init__(self, undoes: bool) -> None:
        self._undoes = undoes

    def __enter__(self) -> Patched:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._undoes:
            unpatch()


def patch() -> Patched:
    """Makes every torch ``DataLoader`` of this process trace, whoever builds it.

    Batches, order, sharding and workers stay torch's, bit for bit under the same seeds. Affected
    are iterations that begin later. Worker processes are not patched. Idempotent.

    Returns:
        A context manager, for ``with stoker.patch():``. Otherwise `unpatch` undoes it.
    """
    if not _install():
        return Patched(undoes=False)
    undoes, _State.patched = not _State.patched, True
    return Patched(undoes)


def unpatch() -> None:
    """Undoes `patch`. Iterations under way, and accelerated loaders, go on. Idempotent."""
    _State.patched = False
    here: Any = torch.utils.data.DataLoader
    if not _State.accelerated and here._get_iterator is _get_iterator:
        here._get_iterator = _State.before


def accelerate(loader: _T) -> _T:
    """Makes an existing loader trace; gives back the same object.

    One that Accelerate has prepared gets a ``state_dict`` and ``load_state_dict``, too.

    Args:
        loader: torch's ``DataLoader``, or what holds one: a loader that Accelerate has prepared,
            timm's ``PrefetchLoader``, Fabric's loaders; fastai's ``DataLoader`` or ``DataLoaders``.
            A `stoker.DataLoader` is handed back.

    Raises:
        TypeError: it is none of these.
    """
    for inner in _held(loader):
        if isinstance(inner, DataLoader):
            continue
        if _is_fastai(inner):
            _install_in_fastai()
            vars(inner.fake_l).setdefault(_TRACE, Trace())
            continue
        if not _install():
            continue
        _State.accelerated = True
        if type(inner)._get_iterator is not _get_iterator:
            _warn(f"{type(inner).__qualname__} has an iterator of its own, which stays as it is")
        elif vars(inner).get("_iterator") is not None and _TRACE not in vars(inner):
            _warn("its workers run already, and go on as they are: accelerate it before it is used")
        vars(inner).setdefault(_TRACE, Trace())
        if _PREPARED not in vars(inner) and (prepared := prepare(loader)) is not None:
            vars(inner)[_PREPARED] = prepared
    return loader


def explain(loader: Any) -> Explanation:
    """Which tier serves a patched or accelerated loader, and what became of its samples so far.

    Raises:
        TypeError: it is no loader, and holds none.
    """
    inner = _held(loader)[0]
    if isinstance(inner, DataLoader):
        return inner.explain()
    trace = _trace_of(inner)
    facts = {
        "workers": f"{workers} processes" if (workers := _fields(inner).num_workers) else "none"
    }
    if trace is None:
        op, why = type(inner).__qualname__, "neither patched nor accelerated"
        return Explanation("torch", op, why, "call stoker.accelerate(loader)", facts)
    reason = refused()
    if reason is not None:
        return Explanation("torch", "not traced", reason, "", facts)
    facts["workers"] += f", and {trace.threads} native threads"
    facts.update(trace.facts())
    return Explanation(trace.tier() or "torch", facts=facts)


def _warn(text: str) -> None:
    warnings.warn(text, StokerWarning, stacklevel=3)


def _install() -> bool:
    """Puts `_get_iterator` in its place; False where somebody else's function is."""
    here: Any = torch.utils.data.DataLoader
    found = here._get_iterator
    if found is _get_iterator:
        return True
    if found is not stock_iterator:
        warnings.warn(
            f"DataLoader._get_iterator was replaced by {found.__module__}.{found.__qualname__}, "
            "which stays: torch's loaders are not traced",
            StokerWarning,
            stacklevel=3,
        )
        return False
    _State.before, here._get_iterator = found, _get_iterator
    return True


def _trace_of(loader: Any) -> Trace | None:
    """Where ``loader`` counts; None where it is not to be traced."""
    attributes = vars(_fields(loader))
    if _State.patched and not _is_fastai(loader):
        attributes.setdefault(_TRACE, Trace())
    found: Trace | None = attributes.get(_TRACE)
    return found


def _allowed() -> bool:
    """False where nothing can be traced; says so once."""
    reason = refused()
    if reason is not None and not _State.told:
        _State.told = True
        warnings.warn(f"loaders are not traced: {reason}", StokerWarning, stacklevel=4)
    return reason is None


def _get_iterator(self: Any) -> Any:
    """For `torch.utils.data.DataLoader`; see Note [Patching]."""
    trace = None if inside() else _trace_of(self)
    if trace is None:
        return _State.before(self)
    prepared = vars(self).get(_PREPARED)
    if prepared is None:
        return iterator(self, trace if _allowed() else None)
    return prepared.watch(iterator(prepared, trace if _allowed() else None))


def _held(loader: Any) -> list[Any]:
    """The loaders that ``loader`` is or holds."""
    if isinstance(loader, DataLoader) or _is_fastai(loader):
        return [loader]
    attributes = getattr(loader, "__dict__", {})
    for name in _WRAPPERS:
        if name in attributes and attributes[name] is not loader:
            return _held(attributes[name])
    if isinstance(loader, torch.utils.data.DataLoader):
        return [loader]
    several = attributes.get("loaders")
    if several is not None:
        return [inner for one in several for inner in _held(one)]
    raise TypeError(
        f"{type(loader).__module__}.{type(loader).__qualname__}: expected torch's DataLoader, or a "
        "loader of Accelerate, timm, Fabric or fastai that holds one"
    )


# fastai


def _is_fastai(loader: Any) -> bool:
    load = sys.modules.get("fastai.data.load")
    return load is not None and isinstance(loader, load.DataLoader)


def _fields(loader: Any) -> Any:
    """What torch's iterator reads its arguments from."""
    return loader.fake_l if _is_fastai(loader) else loader


def _install_in_fastai() -> None:
    load: Any = sys.modules["fastai.data.load"]
    if load._loaders[0] is not _of_fastai:
        _State.before_in_fastai = load._loaders
        load._loaders = (_of_fastai, _of_fastai)


def _of_fastai(fields: Any) -> Any:
    trace = vars(fields).get(_TRACE)
    if trace is None or inside() or not _allowed():
        return _State.before_in_fastai[fields.num_workers == 0](fields)
    return iterator_of_fields(fields, trace)
