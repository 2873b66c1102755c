"""`stoker.diagnose`: what a user's own loop waits for, seen from outside of its loader.

Note [Seen from outside]
    While a loop is watched, the ``__iter__`` of its loader's class hands out an iterator that reads
    the clock before and after each ``next``. Between two of them is the user's code. A loader in a
    worker process, or inside another watched loader, is not watched. Watching costs a microsecond a
    batch, and starts no thread: the GPU is asked at most twice a second, by the loop itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from stoker import ceilings, machine, verdict, vitals
from stoker.ceilings import Effort
from stoker.verdict import Ceilings, Figure, Finding, Loop, Settings, Verdict
from stoker.vitals import Vitals

Clock = Callable[[], float]

_GPU_SECONDS = 0.5


@dataclass
class Watched:
    """Loaders that are alike, such as those that a script makes anew each epoch, and their times.

    Attributes:
        name: for people.
        settings: of the first; None where it is no torch loader.
    """

    name: str
    settings: Settings | None = None
    batches: int = 0
    samples: int = 0
    epochs: int = 0
    wait_seconds: float = 0.0
    first_seconds: float = 0.0
    step_seconds: float = 0.0

    def loop(self) -> Loop:
        """The times as a judge takes them."""
        return Loop(
            self.name,
            self.batches,
            self.samples,
            self.epochs,
            self.wait_seconds,
            self.first_seconds,
            self.step_seconds,
        )


class _Timed:
    """An iterator with a clock at each ``next``; everything else is the iterator's own."""

    def __init__(self, inner: Iterator[Any], watched: Watched, watch: Watch) -> None:
        self._inner, self._watched, self._watch = inner, watched, watch
        self._given: float | None = None
        self._batches = 0

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        clock, watched = self._watch.clock, self._watched
        asked = clock()
        if self._given is not None:
            watched.step_seconds += asked - self._given
            self._given = None
        try:
            batch = next(self._inner)
        except StopIteration:
            watched.wait_seconds += clock() - asked
            raise
        self._given = given = clock()
        if self._batches:
            watched.wait_seconds += given - asked
        else:
            watched.epochs += 1
            watched.first_seconds += given - asked
        self._batches += 1
        watched.batches += 1
        watched.samples += samples_of(batch)
        self._watch.gpu(given)
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type] # as the user asks for it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def samples_of(batch: Any) -> int:
    """How many samples a batch has: the length of the first thing in it that has one."""
    for _ in range(8):
        if isinstance(batch, dict) and batch:
            batch = next(iter(batch.values()))
        elif isinstance(batch, tuple | list) and batch and hasattr(batch[0], "__len__"):
            first = batch[0]
            if isinstance(batch, list) and isinstance(first, tuple | list | dict | str):
                return len(batch)  # not collated
            batch = first
        else:
            break
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    return len(batch) if hasattr(batch, "__len__") else 1


def name_of(loader: Any) -> str:
    """What a loader is called: by what it loads, and how."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return type(loader).__name__
    samples = f"{len(dataset):,} samples, " if hasattr(dataset, "__len__") else ""
    return (
        f"{type(loader).__name__}({type(dataset).__name__}: {samples}"
        f"batch_size={getattr(loader, 'batch_size', None)}, "
        f"num_workers={getattr(loader, 'num_workers', None)})"
    )


class Watch:
    """Loaders whose iterations are timed, and how busy the system is meanwhile.

    Args:
        clock: tells the time, in seconds.
        only: the one loader to watch; None watches all of a watched class.
    """

    def __init__(self, clock: Clock = time.perf_counter, only: Any = None) -> None:
        self.clock, self.only = clock, only
        self.watched: dict[str, Watched] = {}
        self._process = os.getpid()
        self._before = vitals.look()
        self._gpu = vitals.gpu_reader()
        self._gpu_samples: list[float] = []
        self._gpu_at = 0.0
        self._patched: list[tuple[type, Any]] = []

    def patch(self, cls: type) -> bool:
        """Watches the loaders of a class; False where its ``__iter__`` cannot be replaced."""
        before = cls.__iter__  # type: ignore[attr-defined] # checked by the caller
        own = "__iter__" in vars(cls)

        def watched_iter(loader: Any) -> Any:
            found = before(loader)
            if self.only is not None and loader is not self.only:
                return found
            return self.timed(loader, found)

        try:
            cls.__iter__ = watched_iter  # type: ignore[attr-defined] # see above
        except TypeError:
            return False
        self._patched.append((cls, before if own else None))
        return True

    def unpatch(self) -> None:
        """Watches no more. Idempotent."""
        while self._patched:
            cls, before = self._patched.pop()
            if before is None:
                del cls.__iter__  # type: ignore[attr-defined] # put there above
            else:
                cls.__iter__ = before  # type: ignore[attr-defined] # as it was

    def timed(self, loader: Any, inner: Iterator[Any]) -> Iterator[Any]:
        """``inner`` with a clock, unless it has one."""
        if isinstance(inner, _Timed) or os.getpid() != self._process:
            return inner
        name = name_of(loader)
        watched = self.watched.get(name)
        if watched is None:
            # The loader itself is not held: its workers are to end when the script drops it.
            watched = self.watched[name] = Watched(name, settings_of(loader))
        return _Timed(inner, watched, self)

    def gpu(self, now: float) -> None:
        """Asks the GPU how busy it is, if the last time is long ago."""
        if self._gpu is not None and now - self._gpu_at >= _GPU_SECONDS:
            self._gpu_at = now
            self._gpu_samples.append(self._gpu())

    def vitals(self) -> Vitals:
        """How busy the system has been since the watch began."""
        return vitals.between(self._before, vitals.look(), self._gpu_samples or None)


@dataclass(frozen=True)
class Report:
    """What was found out about one loader.

    Attributes:
        loop: the times of the user's loop.
        verdict: what binds in it.
        findings: settings that could be better.
        ceilings: of the loader's stages; None where they cannot be told.
    """

    loop: Loop
    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    ceilings: Ceilings | None = None

    def __str__(self) -> str:
        lines = [self.verdict.sentence]
        lines += [f"{action.gain:5.1f}x  {action.what}" for action in self.verdict.actions]
        for one in self.findings:
            effect = f" ({one.effect})" if one.effect else ""
            lines.append(f"{one.setting}={one.given}: better {one.advised}: {one.why}{effect}")
        lines += [f"note: {note}" for note in self.verdict.notes]
        return "\n".join(lines)


def settings_of(loader: Any) -> Settings | None:
    """How a loader is set; None where it is no torch loader."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(loader, torch.utils.data.DataLoader):
        return None
    explain = getattr(loader, "explain", None)
    return Settings(
        workers=loader.num_workers,
        native=explain is not None and explain().tier == "lowered",
        cores=machine.usable_cores(),
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        cuda=torch.cuda.is_available(),
        ranks=machine.local_world_size(),
    )


def report_of(watched: Watched, system: Vitals, found: Ceilings | None = None) -> Report:
    """Judges a loop by its times, and by the ceilings of its loader where there are some."""
    loop = watched.loop()
    findings = []
    if watched.settings is not None:
        settings = replace(watched.settings, epochs=loop.epochs)
        findings = verdict.judge_settings(settings, loop)
    judged = verdict.judge_loop(loop, system)
    if found is not None and judged.stage != "consumer":
        told = verdict.judge(found, system)
        if told.stage != "consumer":
            # The times of the real loop come first; what the ceilings say explains them.
            sentence = f"{judged.sentence.partition(' (')[0]}: {told.sentence}"
            sentence += f". In the loop itself it waited {loop.waits:.0%} of the time"
            judged = replace(told, sentence=sentence)
    return Report(loop, judged, tuple(findings), found)


class diagnose:  # noqa: N801  used as a function
    """Watches a loop over a loader: ``with stoker.diagnose(loader) as d:`` around it; then ``d``.

    The loop runs as it is, over ``loader``. Where that is a generator or a list, whose iterations
    cannot be seen from outside, it has to be ``for batch in d:``. When the block ends, the ceilings
    of the loader's stages are measured, for some seconds; ``print(d)`` shows what was found.

    Args:
        loader: whatever can be iterated over: ours, torch's, or any other.
        step: the loop's step as a function of a batch: it is measured alone, on a batch that is
            there.
        measure: measure ceilings where the loader is ours or torch's.
        effort: how long is measured.
        clock: tells the time, in seconds.
    """

    def __init__(
        self,
        loader: Any,
        *,
        step: Callable[[Any], Any] | None = None,
        measure: bool = True,
        effort: Effort | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        if not hasattr(loader, "__iter__"):
            raise TypeError(f"{type(loader).__qualname__} cannot be iterated over")
        self.loader = loader
        self.report: Report | None = None
        self.vitals: Vitals | None = None
        self._step, self._measure = step, measure
        self._effort = effort or Effort()
        self._clock = clock
        self._watch: Watch | None = None
        self._last: Any = None

    def __enter__(self) -> diagnose:
        self._watch = Watch(self._clock, only=self.loader)
        self._watch.patch(type(self.loader))
        return self

    def __iter__(self) -> Iterator[Any]:
        if self._watch is None:
            raise RuntimeError("iterate over it inside of `with stoker.diagnose(loader) as d:`")
        return self._watch.timed(self.loader, iter(self.loader))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        watch = self._watch
        assert watch is not None
        watch.unpatch()
        self.vitals = watch.vitals()
        watched = next(iter(watch.watched.values()), None)
        if kind is not None:
            return
        if watched is None or not watched.batches:
            raise RuntimeError(
                "nothing was taken from the loader inside of the block; of what cannot be seen "
                "from outside, write `for batch in d:`"
            )
        found = self._ceilings(watched) if self._measure else None
        self.report = report_of(watched, self.vitals, found)

    def _ceilings(self, watched: Watched) -> Ceilings | None:
        torch = sys.modules.get("torch")
        loader = self.loader
        if torch is None or not isinstance(loader, torch.utils.data.DataLoader):
            return None
        dataset = loader.dataset
        batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if not hasattr(dataset, "__len__") or not isinstance(batch_size, int) or not len(dataset):
            return None
        found, _ = ceilings.measure(
            dataset,
            threads=loader.num_workers,
            batch_size=batch_size,
            collate_fn=loader.collate_fn,
            theirs=type(loader).__module__.partition(".")[0] != "stoker",
            effort=self._effort,
        )
        loop = watched.loop()
        per_batch = loop.samples / max(1, loop.batches)
        rate = loop.samples / max(loop.step_seconds, 1e-9)
        consumer = Figure(rate, rate, rate)
        if self._step is not None:
            batch = next(iter(loader))
            consumer = ceilings.consumer(self._step, batch, round(per_batch), self._effort)
        total = loop.samples / max(loop.wait_seconds + loop.first_seconds + loop.step_seconds, 1e-9)
        return replace(found, consumer=consumer, loop=Figure(total, total, total))

    def __str__(self) -> str:
        return (
            "nothing is known before the block has ended"
            if self.report is None
            else str(self.report)
        )


def watch_script() -> Watch:
    """Watches every loader of torch's and ours that this process makes; torch is imported."""
    import torch

    from stoker.loader import DataLoader

    watch = Watch()
    watch.patch(torch.utils.data.DataLoader)
    watch.patch(DataLoader)
    return watch
