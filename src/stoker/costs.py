"""What each step of a recipe costs per sample, on one thread: decoding, ops, steps in Python."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stoker import order, vitals
from stoker.engine import decodes, needed, result_size, run_encoded
from stoker.errors import DecodeError
from stoker.lower import lower_transform
from stoker.plan import Plan, Refusal, Size
from stoker.sources.index import Images
from stoker.stock import identify, surroundings
from stoker.verdict import OpCost

_COSTED = 48


def costs(inner: Images) -> tuple[tuple[OpCost, ...], float, Any]:
    """The cost of each step, decoding's share of all, and the transform without Python steps.

    The last is None where there are none, or where the rest cannot run natively.
    """
    plan = lower_transform(inner.transform)
    if isinstance(plan, Plan):
        ops, decode_share = _native_costs(inner, plan)
        return ops, decode_share, None
    return _python_costs(inner)


def _native_costs(inner: Images, plan: Plan) -> tuple[tuple[OpCost, ...], float]:
    """CPU seconds of decoding and of each op, from growing prefixes of the plan."""
    prefixes = [replace(plan, ops=plan.ops[:count]) for count in range(len(plan.ops) + 1)]
    totals = np.zeros(len(prefixes))
    decode, counted, fallback = 0.0, 0, 0.0
    few = range(min(len(inner), _COSTED))
    keys = order.keys(0, 0, np.arange(len(few)))
    for row, key in zip(few, keys.tolist(), strict=True):
        with inner.files.opened(row) as file:
            data = file.read()
        begun = time.thread_time()
        if not decodes(data, inner.files.upright):
            with suppress(DecodeError):
                inner.files.open(row)
            fallback += time.thread_time() - begun
            continue
        with suppress(Exception):  # Pillow's, of a header that only the native decoder takes
            size = inner.files.size(row)
            parts = [_cpu_of(prefix, data, key, size) for prefix in prefixes]
            if all(part is not None for part in parts):
                totals += np.array(parts, np.float64)
                decode += _fastest(
                    lambda data=data, size=size, key=key: decodes(  # type: ignore[misc] # bound now
                        data, False, needed(plan, size, key)
                    )
                )
                counted += 1
    if not counted:
        whole = fallback / max(1, len(few))
        return (OpCost("decode (Pillow)", whole),), 0.8 if whole else 0.0
    totals /= counted
    decode /= counted
    names = [str(op) for op in plan.ops]
    costs = [OpCost("decode all", float(totals[0]))]
    for place, name in enumerate(names):
        costs.append(OpCost(name, float(totals[place + 1] - totals[place])))
    of_fallback = fallback / len(few)
    of_native = float(totals[-1]) * counted / len(few)
    share = (decode * counted / len(few) + of_fallback) / max(of_native + of_fallback, 1e-12)
    return tuple(costs), min(1.0, share)


def _cpu_of(plan: Plan, data: bytes, key: int, size: Size) -> float | None:
    result = result_size(plan, size, key)
    if result is None:
        return None
    status, _ = run_encoded(plan, data, key, result)
    if status != "ok":
        return None
    return _fastest(lambda: run_encoded(plan, data, key, result))


def _fastest(run: Callable[[], object]) -> float:
    """CPU seconds of the faster of two runs."""
    taken = []
    for _ in range(2):
        begun = time.thread_time()
        run()
        taken.append(time.thread_time() - begun)
    return min(taken)


def _python_costs(inner: Images) -> tuple[tuple[OpCost, ...], float, Any]:
    """Seconds of each transform by itself, as Python runs it, and which of them are stock."""
    surroundings()  # so that stock transforms are known
    steps = list(getattr(inner.transform, "transforms", None) or [inner.transform])
    python = [isinstance(identify(step), Refusal) for step in steps]
    if not any(python):  # stock, but not natively: one of them cannot be lowered
        python = [isinstance(lower_transform(_compose([step])), Refusal) for step in steps]
    taken: list[list[float]] = [[] for _ in steps]
    decoded: list[float] = []
    with one_torch_thread():
        for row in range(min(len(inner), _COSTED)):
            begun = time.thread_time()
            try:
                value: Any = inner.files.open(row)
            except DecodeError:
                continue
            decoded.append(time.thread_time() - begun)
            for times, step in zip(taken, steps, strict=True):
                begun, waited = time.perf_counter(), vitals.queued_seconds()
                value = step(value)
                took = time.perf_counter() - begun - (vitals.queued_seconds() - waited)
                times.append(max(0.0, took))
    if not decoded:
        return (), 0.0, None
    decode = statistics.median(decoded)
    seconds = [statistics.median(times) for times in taken]
    ops = [OpCost("decode all", decode)]
    for step, one, own in zip(steps, seconds, python, strict=True):
        ops.append(OpCost(_name(step), one, own))
    rest = _compose([step for step, own in zip(steps, python, strict=True) if not own])
    native = any(python) and isinstance(lower_transform(rest), Plan)
    share = decode / max(decode + sum(seconds), 1e-12)
    return tuple(ops), share, rest if native else None


def timed(run: Callable[[], object]) -> float:
    """Seconds of a call, without those in which other processes had its core."""
    begun, waited = time.perf_counter(), vitals.queued_seconds()
    run()
    return max(1e-9, time.perf_counter() - begun - (vitals.queued_seconds() - waited))


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """As in worker processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _compose(steps: list[Any]) -> Any:
    from torchvision.transforms import Compose

    return Compose(steps)


def _name(step: Any) -> str:
    return str(getattr(step, "__qualname__", type(step).__qualname__))
