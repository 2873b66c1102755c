"""Which ceiling binds, and what to do: judgement of measured numbers; nothing is measured here.

Note [How stages add up]
    A thread reads a sample, then decodes and transforms it: their times add up, and what threads
    produce is 1 / (1 / read + 1 / made), where both are images/s with the same number of threads.
    What is made from memory is read, too, from there: of reading, only what it takes longer counts.
    The consumer runs beside them: the whole is the smaller of the two. After an action one of the
    ceilings is another, and the gain is the whole then over the whole now; the next ceiling caps
    it, as in Amdahl's law. No other effects are assumed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stoker.vitals import Vitals

STAGES = {
    "storage": "reading the encoded bytes",
    "decode": "decoding images",
    "transform": "transforming decoded images",
    "python": "Python code of the dataset or of a transform",
    "threads": "too few threads: cores are idle",
    "quota": "the CPU quota of the container",
    "consumer": "the loop's own step: the GPU, or code in it",
}
"""What may bind, and what that is."""

_WORTH = 1.03
_THROTTLED = 0.1
_WAITS = 0.1
_BUSY = 0.9
_IDLE_GPU = 0.3
_LEAST, _MOST = 0.7, 0.9


@dataclass(frozen=True)
class Figure:
    """Images/s: the median of some rounds, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Figure:
        """That of measured rounds."""
        return cls(statistics.median(rounds), min(rounds), max(rounds))


@dataclass(frozen=True)
class Storage:
    """How fast encoded bytes are read, as a loader's threads do.

    Attributes:
        kind: "hdd", "ssd", "network" or "memory", as measured.
        latency_seconds: of a cold read of a sample, the median.
        cold_random, cold_sequential: after the page cache was told to drop the bytes; None where
            that cannot be done.
        warm: from the page cache.
        memory: the same reads from a file in memory, which is what the measuring itself costs.
        stays_cached: all of the data set fits in the memory that may cache it, so that only the
            first epoch is cold.
        packed: samples lie in shards.
        ahead: threads of their own read, beside those that decode; so are remote shards read.
    """

    kind: str
    latency_seconds: float
    warm: Figure
    cold_random: Figure | None = None
    cold_sequential: Figure | None = None
    memory: Figure | None = None
    stays_cached: bool = False
    packed: bool = False
    ahead: bool = False

    @property
    def steady(self) -> Figure:
        """As most epochs read."""
        return self.warm if self.stays_cached or self.cold_random is None else self.cold_random

    def alone(self, figure: Figure) -> float:
        """Images/s of the storage by itself, where ``figure`` was read."""
        seconds = 1 / figure.median - (1 / self.memory.median if self.memory else 0.0)
        return 1 / seconds if seconds > 0 else math.inf


@dataclass(frozen=True)
class OpCost:
    """What a step of the recipe costs per sample, on one thread; less than 0: it saves decoding."""

    name: str
    seconds: float
    python: bool = False


@dataclass(frozen=True)
class Smaller:
    """What the images would give, were they stored smaller.

    Attributes:
        pixels: of the shorter side.
        made: images/s from memory.
        share: their bytes over the present ones.
    """

    pixels: int
    made: Figure
    share: float


@dataclass(frozen=True)
class Ceilings:
    """What each stage gives alone.

    Attributes:
        threads: of the loader, or its worker processes.
        cores: that may be used, by affinity and quota.
        batch_size: of the loader.
        sample_bytes: of an encoded image, the mean.
        made: images/s decoded and transformed from memory, by number of threads; ``threads`` is
            one of them.
        decode_share: of the time that a sample takes from memory, that of decoding.
        ops: cost of each step of the recipe; Python's in wall time.
        waiting: of the time in the dataset's own code, the share in which it used no CPU.
        storage: None where the dataset's own code reads.
        loader: all together, on a warm cache.
        stock: images/s from memory without the steps in Python, which then run natively.
        smaller: were the images stored smaller.
        theirs: torch's own loader all together, where that is the one that is judged.
        consumer: the loop's step alone, on a batch that is there.
        loop: the user's whole loop.
        tier: which of the loader's tiers served.
    """

    threads: int
    cores: float
    batch_size: int
    sample_bytes: float
    made: dict[int, Figure]
    loader: Figure
    decode_share: float = 0.0
    ops: tuple[OpCost, ...] = ()
    waiting: float = 0.0
    storage: Storage | None = None
    stock: Figure | None = None
    smaller: Smaller | None = None
    theirs: Figure | None = None
    consumer: Figure | None = None
    loop: Figure | None = None
    tier: str = ""

    @property
    def made_here(self) -> Figure:
        """From memory, with the present number of threads."""
        return self.made[self.threads]

    def produced(self, read: float, *made: float) -> float:
        """Images/s of a loader that reads and makes so many."""
        if self.storage is not None and self.storage.ahead:
            return min(read, together(*made))
        return together(read, *made)

    @property
    def python_share(self) -> float:
        """Of the time that a sample takes from memory, that of steps in Python."""
        # Of times of single steps only: those of the whole hold what other processes took.
        of_all = sum(max(0.0, op.seconds) for op in self.ops)
        return sum(op.seconds for op in self.ops if op.python) / of_all if of_all else 0.0

    @property
    def decode(self) -> float | None:
        """Images/s of decoding alone."""
        return self.made_here.median / self.decode_share if self.decode_share else None

    @property
    def transform(self) -> float | None:
        """Images/s of the native or stock part of the transform alone."""
        share = 1 - self.decode_share - self.python_share
        return self.made_here.median / share if share > 1e-3 and self.decode_share else None


@dataclass(frozen=True)
class Loop:
    """How long a user's loop waited for its loader, and how long it worked.

    Attributes:
        name: of the loader.
        batches, samples, epochs: that were taken.
        wait_seconds: in the loader, the first batch of each epoch left out.
        first_seconds: until the first batch of each epoch, together.
        step_seconds: between batches, in the user's code.
    """

    name: str
    batches: int
    samples: int
    epochs: int
    wait_seconds: float
    first_seconds: float
    step_seconds: float

    @property
    def waits(self) -> float:
        """Share of the time that the loop waited."""
        waited = self.wait_seconds + self.first_seconds
        return waited / max(waited + self.step_seconds, 1e-9)


@dataclass(frozen=True)
class Settings:
    """How a loader is set; None where that is not known or has no meaning.

    Attributes:
        native: its workers are threads, not processes.
        cuda: there is a GPU to copy to.
        ranks: processes of the job on this machine.
    """

    workers: int
    native: bool
    cores: float
    pin_memory: bool | None = None
    non_blocking: bool | None = None
    persistent_workers: bool | None = None
    epochs: int = 1
    cuda: bool = False
    ranks: int = 1


@dataclass(frozen=True)
class Action:
    """What to do.

    Attributes:
        name: of the kind of action.
        what: in words.
        gain: predicted: images/s of the whole then over now.
        changes_pixels: the images are others afterwards.
        after: the action that comes first, on top of which this one gains.
    """

    name: str
    what: str
    gain: float
    changes_pixels: bool = False
    after: str = ""


@dataclass(frozen=True)
class Finding:
    """A setting that could be better; ``effect`` is what was measured of it, in words."""

    setting: str
    given: str
    advised: str
    why: str
    effect: str = ""


@dataclass(frozen=True)
class Verdict:
    """What binds.

    Attributes:
        stage: one of ``STAGES``.
        sentence: it in words and numbers.
        images_per_second: of the whole, predicted from the ceilings.
        headroom: the next ceiling over the one that binds; None where nothing else is known.
        actions: what to do, the best first.
        findings: settings that could be better.
        notes: what else the numbers say.
    """

    stage: str
    sentence: str
    images_per_second: float
    headroom: float | None = None
    actions: tuple[Action, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = field(default=())


def together(*rates: float) -> float:
    """Images/s of stages that one thread runs one after the other."""
    seconds = sum(1 / rate for rate in rates)
    return 1 / seconds if seconds else math.inf


def judge(ceilings: Ceilings, vitals: Vitals | None = None) -> Verdict:
    """What binds, by the ceilings of a loader and how busy the system was while they were measured.

    Without a consumer, the loader alone is judged.
    """
    storage = ceilings.storage
    read = storage.alone(storage.steady) if storage else math.inf
    made = ceilings.made_here.median
    possible = ceilings.produced(read, made)
    produced = ceilings.theirs.median if ceilings.theirs else possible
    consumer = ceilings.consumer.median if ceilings.consumer else math.inf
    whole = min(produced, consumer)
    stage, rate, others = _stage(ceilings, vitals, read, produced, consumer)
    actions = _actions(ceilings, vitals, read, consumer, min(possible, consumer))
    if ceilings.theirs is not None and min(possible, consumer) / whole >= _WORTH:
        what = f"stoker.DataLoader instead of torch's: {produced:,.0f} -> {possible:,.0f} images/s"
        actions = [replace(one, after="stoker") for one in actions]
        actions.append(Action("stoker", what, min(possible, consumer) / whole))
    # Of the same gain, what leaves the pixels alone comes first.
    actions.sort(
        key=lambda one: (not one.after, round(one.gain, 2), not one.changes_pixels), reverse=True
    )
    headroom = None
    if stage == "consumer":
        sentence = (
            f"the consumer binds: it takes {consumer:,.0f} images/s and the loader gives "
            f"{produced:,.0f}; nothing to gain here"
        )
        headroom, actions = produced / consumer, []
    else:
        sentence = f"{_binds(stage)}: {_how(stage, ceilings, vitals, rate)}"
        if math.isfinite(consumer):
            sentence += (
                f"; the loader gives {produced:,.0f} images/s and the consumer could take "
                f"{consumer:,.0f}, so it waits {1 - produced / consumer:.0%} of the time"
            )
            others = [*others, consumer]
        else:
            step = ceilings.batch_size / produced * 1e3
            sentence += (
                f"; the loader gives {produced:,.0f} images/s, which feeds steps of {step:,.0f} ms "
                f"per batch of {ceilings.batch_size}"
            )
        headroom = min(others) / rate if others else None
    notes = _notes(ceilings, vitals, made)
    return Verdict(stage, sentence, whole, headroom, tuple(actions), (), tuple(notes))


def _stage(
    ceilings: Ceilings, vitals: Vitals | None, read: float, produced: float, consumer: float
) -> tuple[str, float, list[float]]:
    """The stage that binds, its ceiling, and the ceilings of the others."""
    if consumer <= produced:
        return "consumer", consumer, []
    made, best = ceilings.made_here.median, _best(ceilings)
    if read < made:
        return "storage", read, [made]
    others = [read] if math.isfinite(read) else []
    if vitals is not None and (vitals.throttled or 0.0) >= _THROTTLED:
        return "quota", made, others
    if ceilings.waiting > 0.5:
        return "storage", made, others
    python, decode = ceilings.python_share, ceilings.decode_share
    shares = {"python": python, "decode": decode, "transform": 1 - python - decode}
    if not ceilings.decode_share:
        shares = {"python": 1.0}  # the dataset's own code does everything
    name = max(shares, key=lambda one: shares[one])
    if best > ceilings.threads and ceilings.made[best].median >= 1.25 * made:
        return "threads", made, [*others, ceilings.made[best].median]
    others += [made / share for one, share in shares.items() if one != name and share > 1e-3]
    return name, made / shares[name], others


def _best(ceilings: Ceilings) -> int:
    """The smallest number of threads that was within 3 % of the best."""
    most = max(figure.median for figure in ceilings.made.values())
    return min(n for n, figure in ceilings.made.items() if figure.median * _WORTH >= most)


def _actions(
    ceilings: Ceilings,
    vitals: Vitals | None,
    read: float,
    consumer: float,
    whole: float,
) -> list[Action]:
    made, storage = ceilings.made_here.median, ceilings.storage
    found: list[Action] = []

    def add(name: str, what: str, produced: float, changes_pixels: bool = False) -> None:
        gain = min(produced, consumer) / whole
        if gain >= _WORTH:
            found.append(Action(name, what, gain, changes_pixels))

    if storage and not storage.stays_cached and storage.cold_random and storage.cold_sequential:
        slow, fast = storage.cold_random.median, storage.cold_sequential.median
        change = f"storage {slow:,.0f} -> {fast:,.0f} images/s"
        fast = storage.alone(storage.cold_sequential)
        if storage.packed:
            add(
                "sequential",
                f"read shard by shard, with order='runs': {change}",
                ceilings.produced(fast, made),
            )
        else:
            what = f"pack to tar, read with order='runs': {change}"
            add("pack", what, ceilings.produced(fast, made))
    if storage and not storage.stays_cached and storage.cold_random:
        what = f"keep the bytes in memory or on a faster disk: {storage.warm.median:,.0f} images/s"
        add("cache", what, ceilings.produced(storage.alone(storage.warm), made))
    if ceilings.smaller is not None:
        smaller = ceilings.smaller
        add(
            "smaller",
            f"store at {smaller.pixels} px ({smaller.share:.0%} of the bytes; changes pixels): "
            f"{made:,.0f} -> {smaller.made.median:,.0f} images/s from memory",
            ceilings.produced(read, smaller.made.median),
            changes_pixels=True,
        )
    best = _best(ceilings)
    if best != ceilings.threads and ceilings.waiting <= 0.5:
        more = "more" if best > ceilings.threads else "fewer"
        change = f"{made:,.0f} -> {ceilings.made[best].median:,.0f} images/s from memory"
        what = f"{more} threads: num_workers={best} instead of {ceilings.threads}: {change}"
        add("threads", what, ceilings.produced(read, ceilings.made[best].median))
    if vitals is not None and (vitals.throttled or 0.0) >= _THROTTLED and vitals.cores:
        idle = sum(1 - busy for busy in vitals.cores)
        could = ceilings.cores + idle  # what other processes use, a higher quota does not bring
        if could > ceilings.cores * _WORTH:
            what = f"raise the CPU quota from {ceilings.cores:g} cores; {idle:.1f} are idle"
            add("quota", what, ceilings.produced(read, made * could / ceilings.cores))
    if ceilings.waiting > 0.5:
        workers = math.ceil(ceilings.cores / (1 - ceilings.waiting + 0.01))
        if workers > ceilings.threads:
            what = f"more workers, which wait side by side: num_workers={workers}"
            add("threads", what, made * workers / max(1, ceilings.threads))
    python = [op for op in ceilings.ops if op.python]
    if python and ceilings.stock is not None:
        names, stock = ", ".join(op.name for op in python), ceilings.stock.median
        what = f"write {names} with stock transforms (docs/transforms.md): {stock:,.0f} images/s"
        add("stock", what, ceilings.produced(read, stock))
        of_python = sum(op.seconds for op in python) / max(
            1.0, min(ceilings.threads, ceilings.cores)
        )
        last = ceilings.produced(read, stock, 1 / of_python)
        add("last", f"put {names} last, so that all before it runs natively", last)
    return found


def _binds(stage: str) -> str:
    names = {"threads": "too few threads bind", "quota": "the CPU quota binds"}
    return names.get(stage, f"{stage} binds")


def _how(stage: str, ceilings: Ceilings, vitals: Vitals | None, rate: float) -> str:
    storage = ceilings.storage
    match stage:
        case "storage" if storage is not None and ceilings.waiting <= 0.5:
            reads, read = "cold random reads", storage.steady.median
            if storage.stays_cached:
                reads = "reads from the page cache"
            return (
                f"{reads} give {read:,.0f} images/s "
                f"({read * ceilings.sample_bytes / 1e6:,.0f} MB/s, {storage.kind}, "
                f"{storage.latency_seconds * 1e3:.2f} ms a read)"
            )
        case "storage":
            return (
                f"the dataset's own code waits {ceilings.waiting:.0%} of its time, for reads or "
                f"whatever else it does; {ceilings.threads} workers give {rate:,.0f} images/s"
            )
        case "quota":
            assert vitals is not None
            return (
                f"{ceilings.threads} threads share {ceilings.cores:g} cores and were stopped in "
                f"{vitals.throttled or 0:.0%} of its periods"
            )
        case "threads":
            best = _best(ceilings)
            return (
                f"{ceilings.threads} of {ceilings.cores:g} cores are used; {best} threads make "
                f"{ceilings.made[best].median:,.0f} images/s instead of {rate:,.0f}"
            )
        case "python":
            costs = [op for op in ceilings.ops if op.python]
            named = max(costs, key=lambda op: op.seconds, default=None)
            if named is None:
                return f"the dataset's own code gives {rate:,.0f} images/s"
            return f"{named.name} takes {named.seconds * 1e3:.2f} ms a sample"
        case _:
            return f"{STAGES[stage]} gives {rate:,.0f} images/s from memory"


def _notes(ceilings: Ceilings, vitals: Vitals | None, made: float) -> list[str]:
    notes = []
    storage = ceilings.storage
    if storage and storage.cold_random:
        cold = storage.cold_random.median
        if storage.stays_cached:
            first = ceilings.produced(storage.alone(storage.cold_random), made)
            notes.append(
                f"the first epoch is read from the {storage.kind}, at {first:,.0f} images/s; all "
                "bytes fit in memory, so later epochs are not"
            )
        if cold > 0.8 * storage.warm.median and storage.kind != "memory":
            notes.append(
                "cold reads are as fast as warm ones: the disk, or what it stands for, has a cache "
                "of its own, which cannot be dropped from here"
            )
    if vitals is not None:
        notes += system_notes(vitals)
    return notes


def system_notes(vitals: Vitals) -> list[str]:
    """What the system's counters say, in words; nothing where all is well."""
    notes = []
    if vitals.cpu is not None and vitals.cpu >= _BUSY:
        notes.append(f"all cores were {vitals.cpu:.0%} busy, whoever used them")
    if (vitals.throttled or 0.0) >= _THROTTLED:
        notes.append(
            f"the CPU quota stopped threads in {vitals.throttled:.0%} of its periods, for "
            f"{vitals.throttled_seconds or 0:.1f} s together"
        )
    if (vitals.memory_stalled or 0.0) >= 0.05:
        notes.append(f"tasks waited for memory {vitals.memory_stalled:.0%} of the time")
    for name, busy in vitals.disk_busy.items():
        if busy >= _BUSY:
            rate = vitals.disk_bytes_per_second[name] / 1e6
            notes.append(f"disk {name} was {busy:.0%} busy at {rate:,.0f} MB/s: at its ceiling")
    return notes


def judge_loop(loop: Loop, vitals: Vitals | None = None) -> Verdict:
    """What binds in a user's loop of which only the times are known.

    What the loader spends its time with is told by what the system was busy with.
    """
    total = loop.wait_seconds + loop.first_seconds + loop.step_seconds
    rate = loop.samples / max(total, 1e-9)
    busy = vitals.gpu_busy if vitals is not None else None
    shown = f"the loop waited {loop.waits:.0%} of {total:,.1f} s for {loop.name}"
    notes = system_notes(vitals) if vitals is not None else []
    if loop.waits < _WAITS or (busy or 0.0) >= _BUSY:
        gpu = "" if busy is None else f", and the GPU was {busy:.0%} busy"
        sentence = f"the consumer binds: {shown}{gpu}; nothing to gain here"
        return Verdict("consumer", sentence, rate, notes=tuple(notes))
    stage = _blamed(vitals)
    starved = f"; the GPU is starved at {busy:.0%}" if busy is not None and busy < _IDLE_GPU else ""
    sentence = f"the loader binds ({STAGES[stage]}): {shown}{starved}"
    gain = total / max(loop.step_seconds, 1e-9)
    what = "a loader that never makes the loop wait (`stoker diagnose DATA` says how)"
    return Verdict(stage, sentence, rate, gain, (Action("loader", what, gain),), notes=tuple(notes))


def _blamed(vitals: Vitals | None) -> str:
    if vitals is None:
        return "decode"
    if (vitals.throttled or 0.0) >= _THROTTLED:
        return "quota"
    if any(busy >= _BUSY for busy in vitals.disk_busy.values()):
        return "storage"
    if vitals.cpu is not None and vitals.cpu < _LEAST:
        return "threads"
    return "decode"


def judge_settings(settings: Settings, loop: Loop | None = None) -> list[Finding]:
    """Which settings could be better, one by one, with what was measured of them."""
    found = []
    cores = settings.cores / settings.ranks
    low, high = max(1, math.floor(_LEAST * cores)), max(1, math.ceil(_MOST * cores))
    kind = "threads" if settings.native else "worker processes"
    if not low <= settings.workers <= high:
        advised = f"{low}" if low == high else f"{low} to {high}"
        why = (
            "cores are left idle"
            if settings.workers < low
            else "they take time from each other and from the loop"
        )
        if settings.workers == 0:
            why = "the loop itself makes every batch, and does nothing else meanwhile"
        found.append(
            Finding(
                "num_workers",
                str(settings.workers),
                f"{advised} {kind} (70-90 % of {cores:g} cores)",
                why,
            )
        )
    if settings.cuda and settings.pin_memory is False:
        why = "copies to the GPU from pageable memory go through a buffer, and block"
        found.append(Finding("pin_memory", "False", "True", why))
    if settings.cuda and settings.pin_memory and settings.non_blocking is False:
        why = "the loop waits for each copy"
        found.append(Finding("non_blocking", "False", ".to(device, non_blocking=True)", why))
    if settings.persistent_workers is False and settings.workers and settings.epochs > 1:
        effect = ""
        if loop is not None and loop.epochs:
            each = loop.first_seconds / loop.epochs
            effect = f"the first batch of an epoch took {each:.2f} s, {loop.epochs} times"
        why = "each epoch starts its workers anew, and nothing is ready when it begins"
        found.append(Finding("persistent_workers", "False", "True", why, effect))
    return found
