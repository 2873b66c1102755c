"""What each stage of a loader gives alone, measured in short rounds: storage, pixels, all together.

Note [What is measured, and how]
    Storage: threads open and read samples, as the native reader does; cold after
    ``posix_fadvise(DONTNEED)`` on just the bytes to be read. From memory: the encoded bytes are
    copied to a file in memory (memfd), over which a loader of the same arguments runs, with the
    present number of threads and others. Costs of the single steps are CPU seconds of one thread
    (wall seconds of steps in Python, which may wait), from growing prefixes of the recipe.
    A round ends with the clock, not with the data, so that slow stages take no longer.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from stoker import tiers, vitals
from stoker.costs import costs, one_torch_thread, timed
from stoker.errors import SourceError, StokerWarning
from stoker.loader import DataLoader
from stoker.machine import usable_cores
from stoker.plan import Refusal
from stoker.shrink import Shrink
from stoker.sources.dataset import Rows, read
from stoker.sources.index import Extents, Files, Images
from stoker.verdict import Ceilings, Figure, OpCost, Smaller, Storage
from stoker.vitals import Vitals

Say = Callable[[str], None]
"""Is told what is measured next."""

_SAMPLES = 512
_BYTES = 256 << 20
_LONG = 1 << 20
_ROUND = 64
_COSTED = 48
_SMALLER = 256
_AHEAD = 32
"""Threads that read remote shards by ranges, see `stoker.ranges`."""


@dataclass(frozen=True)
class Effort:
    """How long is measured.

    Attributes:
        seconds: of each round.
        rounds: of each ceiling.
        clock: tells the time, in seconds.
    """

    seconds: float = 0.5
    rounds: int = 3
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class Reads:
    """The same samples, or as many, read from one place, cold.

    Attributes:
        images: images/s.
        sample_bytes: the mean.
        latency_seconds: of one read, the median.
        kind: "hdd", "ssd", "network" or "memory".
    """

    images: Figure
    sample_bytes: float
    latency_seconds: float
    kind: str


def measure(
    dataset: Any,
    *,
    threads: int,
    batch_size: int = 64,
    collate_fn: Any = None,
    theirs: bool = False,
    stays_cached: bool | None = None,
    smaller: bool = True,
    effort: Effort = Effort(),
    say: Say = lambda _: None,
) -> tuple[Ceilings, Vitals]:
    """The ceilings of a map-style dataset, without a consumer, and how busy the system was.

    Args:
        dataset: with its transform; what a loader would be given.
        threads: of that loader, or its worker processes.
        batch_size: of that loader.
        collate_fn: of that loader.
        theirs: it is torch's own loader: measure that, too.
        stays_cached: all bytes stay in the page cache, from the second epoch on; None: judge by
            their size and the memory there is.
        smaller: see what images stored smaller would give, too.
        effort: how long is measured.
        say: is told what is measured.

    Raises:
        SourceError: nothing can be read.
        ValueError: the dataset is empty.
    """
    samples = len(dataset)
    if samples == 0:
        raise ValueError("the dataset is empty: there is nothing to measure")
    rows = read(dataset)
    arguments = {"batch_size": batch_size, "collate_fn": collate_fn}
    before = vitals.look()
    if isinstance(rows, Refusal):
        ceilings = _of_own_code(dataset, threads, arguments, effort, say)
        if theirs:
            ceilings = replace(ceilings, theirs=_rate_of_torch(dataset, threads, arguments, effort))
        return ceilings, vitals.between(before, vitals.look())
    chosen = _chosen(rows)
    say("storage")
    storage, sample_bytes = _storage(rows, chosen, threads, stays_cached, effort)
    with _in_memory(rows.files, _contents(rows, chosen)) as files:
        every = np.arange(len(files))
        memory = Figure.of(_read_rounds(files, every, threads, effort, False, []))
        if not storage.ahead:
            storage = replace(storage, memory=memory)
        inner = Images(files, rows.transform)
        busy = vitals.look()
        made = {threads: _rate(inner, threads, arguments, effort, say)}
        system = vitals.between(busy, vitals.look())
        for other in _other_counts(threads):
            made[other] = _rate(inner, other, arguments, effort, say)
        say("each step of the recipe")
        ops, decode_share, stock_transform = costs(inner)
        stock = None
        if stock_transform is not None:
            stock = _rate(Images(files, stock_transform), threads, arguments, effort, say)
        shrunk = None
        if smaller and decode_share > 0.3:
            shrunk = _smaller(inner, sample_bytes, threads, arguments, effort, say)
        tier = "lowered" if isinstance(tiers.lower(inner), tiers.Lowered) else "Python"
    say("the whole loader")
    several = Subset(dataset, chosen.tolist())
    loader = _rate(several, threads, arguments, effort, lambda _: None)
    found = Ceilings(
        threads=threads,
        cores=usable_cores(),
        batch_size=batch_size,
        sample_bytes=sample_bytes,
        made=made,
        loader=loader,
        decode_share=decode_share,
        ops=ops,
        storage=storage,
        stock=stock,
        smaller=shrunk,
        theirs=_rate_of_torch(several, threads, arguments, effort) if theirs else None,
        tier=tier,
    )
    return found, system


def consumer(step: Callable[[Any], Any], batch: Any, samples: int, effort: Effort) -> Figure:
    """Images/s of a step alone, on a batch of ``samples`` that is there already.

    A step on a GPU is waited for.
    """

    def wait() -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's own
            torch.cuda.synchronize()

    step(batch)
    wait()
    rounds = []
    for _ in range(effort.rounds):
        begun, done = effort.clock(), 0
        while True:
            step(batch)
            done += samples
            wait()
            seconds = effort.clock() - begun
            if seconds >= effort.seconds:
                break
        rounds.append(done / max(seconds, 1e-9))
    return Figure.of(rounds)


def reads(rows: Rows, indices: NDArray[np.int64], threads: int, effort: Effort) -> Reads:
    """How fast some samples are read from where they are, cold."""
    chosen = rows.rows_of(indices)
    files, latencies = rows.files, list[float]()
    rates = _read_rounds(files, chosen, threads, effort, cold=True, latencies=latencies)
    latency = statistics.median(latencies) if latencies else 0.0
    sizes = [_size(files, int(row)) for row in chosen]
    return Reads(
        Figure.of(rates),
        statistics.fmean(sizes),
        latency,
        _kind(files, int(chosen[0]), latency),
    )


# Samples


def _chosen(rows: Rows) -> NDArray[np.int64]:
    """Random samples, no more than may be held in memory."""
    generator = np.random.default_rng(0)
    count = min(len(rows), _SAMPLES)
    indices = generator.choice(len(rows), count, replace=False).astype(np.int64)
    held, few = 0, list[int]()
    for index, row in zip(indices.tolist(), rows.rows_of(indices).tolist(), strict=True):
        size = _size(rows.files, row)
        if size == 0 or (few and held + size > _BYTES):
            continue  # what cannot be read is the matter of `stoker verify`
        held += size
        few.append(index)
    if not few:
        raise SourceError(rows.location(int(indices[0])), "none of the samples can be read")
    return np.array(few, np.int64)


def _size(files: Files, row: int) -> int:
    if files.extents is not None:
        return int(files.extents.length[row])
    try:
        return os.stat(files.path(row)).st_size
    except OSError:
        return 0


def _remote(files: Files) -> bool:
    """True where samples are read by ranges of remote objects."""
    extents = files.extents
    return extents is not None and extents.copies is not None and extents.copies.ranged


def _kind(files: Files, row: int, latency: float) -> str:
    return "network" if _remote(files) else vitals.place_of(_path(files, row)).kind(latency)


def _path(files: Files, row: int) -> str:
    if files.extents is None:
        return files.path(row)
    return files.extents.shards.path(int(files.extents.shard[row]))


def _contents(rows: Rows, indices: NDArray[np.int64]) -> list[bytes]:
    found = []
    for row in rows.rows_of(indices).tolist():
        with suppress(OSError, ValueError), rows.files.opened(row) as file:
            content = file.read()
            if content:
                found.append(content)
    if not found:
        raise SourceError(rows.location(int(indices[0])), "none of the samples can be read")
    return found


@contextmanager
def _in_memory(like: Files, contents: Sequence[bytes]) -> Iterator[Files]:
    """A table of ``contents``, over and over, in a file that is in memory, with limits as given."""
    with _memory_file() as file:
        file.write(b"".join(contents))
        file.flush()
        lengths = np.array([len(content) for content in contents], np.int64)
        begins = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        # Other processes see it, too, where workers are not forked.
        name = file.name if isinstance(file.name, str) else f"/proc/{os.getpid()}/fd/{file.name}"
        n = len(contents)
        whole = replace(
            like,
            root="",
            names=np.full(n, ord("x"), np.uint8),
            offsets=np.arange(n + 1, dtype=np.uint64),
            labels=np.zeros(n, np.int64),
            extents=Extents(Files.from_paths([name]), np.zeros(n, np.uint32), begins, lengths),
        )
        yield whole


@contextmanager
def _memory_file() -> Iterator[BinaryIO]:
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("stoker-diagnose"), "wb") as file:
            yield file
        return
    with tempfile.NamedTemporaryFile(prefix="stoker-diagnose-") as named:
        yield named  # type: ignore[misc] # a BinaryIO to all that is done with it


# Storage


def _storage(
    rows: Rows, chosen: NDArray[np.int64], threads: int, stays: bool | None, effort: Effort
) -> tuple[Storage, float]:
    """How fast samples are read, and how many bytes they have on average."""
    files, random = rows.files, rows.rows_of(chosen)
    sizes = [_size(files, int(row)) for row in random]
    mean = statistics.fmean(sizes)
    latencies: list[float] = []
    cold = in_sequence = None
    if _remote(files):  # there is no cache to drop, and other threads read
        one = _read_rounds(files, random, _AHEAD, effort, False, latencies)
        return Storage(
            "network", statistics.median(latencies), Figure.of(one), packed=True, ahead=True
        ), mean
    if hasattr(os, "posix_fadvise"):
        cold = Figure.of(_read_rounds(files, random, threads, effort, True, latencies))
        begin = int(np.random.default_rng(1).integers(max(1, len(rows) - len(chosen) + 1)))
        successive = np.sort(rows.rows_of(np.arange(begin, begin + len(chosen))))
        in_sequence = Figure.of(_read_rounds(files, successive, threads, effort, True, []))
    warm = Figure.of(_read_rounds(files, random, threads, effort, False, []))
    latency = statistics.median(latencies) if latencies else threads / warm.median
    if stays is None:
        room = vitals.memory().room
        stays = room is not None and mean * len(rows) < 0.8 * room
    kind = _kind(files, int(random[0]), latency)
    packed = files.extents is not None
    return Storage(kind, latency, warm, cold, in_sequence, None, stays, packed), mean


def _read_rounds(
    files: Files,
    rows: NDArray[np.int64],
    threads: int,
    effort: Effort,
    cold: bool,
    latencies: list[float],
) -> list[float]:
    """Samples read a second in each round; adds what each read took to ``latencies``."""
    parts = [part for part in np.array_split(rows, effort.rounds) if len(part)]
    rates = []
    with ThreadPoolExecutor(max(1, threads), "stoker-diagnose") as pool:
        for part in parts:
            if cold:
                for row in part.tolist():
                    _forget(files, row)
            begun = effort.clock()

            def work(row: int, end: float = begun + 2 * effort.seconds) -> float | None:
                if effort.clock() > end:
                    return None
                start = effort.clock()
                _fetch(files, row)
                return effort.clock() - start

            if not cold and not _remote(files):
                list(pool.map(work, part.tolist()))  # so that it is warm
                begun = effort.clock()
            took = [one for one in pool.map(work, part.tolist()) if one is not None]
            seconds = effort.clock() - begun
            latencies += took
            rates.append(max(1, len(took)) / max(seconds, 1e-9))
    return rates


def _fetch(files: Files, row: int) -> int:
    """Reads a sample as the native reader does; returns how many bytes it got."""
    if _remote(files):
        with suppress(OSError, ValueError), files.opened(row) as file:
            return len(file.read())
        return 0
    begin, size = 0, -1
    if files.extents is not None:
        begin, size = int(files.extents.begin[row]), int(files.extents.length[row])
    try:
        fd = os.open(_path(files, row), os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return 0
    try:
        size = os.fstat(fd).st_size if size < 0 else size
        got = 0
        while got < size:
            data = os.pread(fd, size - got, begin + got)
            if not data:
                break
            got += len(data)
        return got
    except OSError:
        return 0
    finally:
        os.close(fd)


def _forget(files: Files, row: int) -> None:
    """Has the kernel drop a sample's bytes from its cache; data that is not written yet stays."""
    if _remote(files):
        return
    begin, size = 0, 0
    if files.extents is not None:
        begin, size = int(files.extents.begin[row]), int(files.extents.length[row])
    with suppress(OSError):
        fd = os.open(_path(files, row), os.O_RDONLY)
        try:
            os.posix_fadvise(fd, begin, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


# Loaders


def _other_counts(threads: int) -> list[int]:
    """Numbers of threads that might be better: a thread per core, and 3/4 of that."""
    cores = usable_cores()
    return sorted({max(1, int(0.75 * cores)), max(1, int(cores))} - {threads})


def _rate(
    dataset: Any, threads: int, arguments: dict[str, Any], effort: Effort, say: Say
) -> Figure:
    """Images/s of a loader over ``dataset``, repeated until the clock has run."""
    say(f"decoding and transforming, with {threads} threads")
    with warnings.catch_warnings():
        # Of more workers than cores and the like: that is what is judged here.
        warnings.simplefilter("ignore", StokerWarning)
        loader: DataLoader[Any] = DataLoader(
            _repeated(dataset), num_workers=threads, seed=0, on_error="skip", **arguments
        )
    try:
        return _windows(iter(loader), arguments["batch_size"], max(1, threads), effort)
    finally:
        loader.close()


def _rate_of_torch(dataset: Any, threads: int, arguments: dict[str, Any], effort: Effort) -> Figure:
    """Images/s of torch's own loader with the same arguments."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            _repeated(dataset), num_workers=threads, **arguments
        )
    return _windows(iter(loader), arguments["batch_size"], max(1, threads), effort)


def _repeated(dataset: Any) -> Subset[Any]:
    """A dataset over and over, so that no epoch ends while the clock runs."""
    samples = len(dataset)
    return Subset(dataset, np.tile(np.arange(samples), max(1, _LONG // samples)))  # type: ignore[arg-type] # it may be any that has numbers


def _windows(batches: Iterator[Any], samples: int, workers: int, effort: Effort) -> Figure:
    """Images/s of an iterator in steady state: what was made ahead is taken before the clock."""
    for _ in range(2 * workers + 1):
        if next(batches, None) is None:
            break
    rounds = []
    for _ in range(effort.rounds):
        begun, done = effort.clock(), 0
        while True:
            if next(batches, None) is None:
                break
            done += 1
            seconds = effort.clock() - begun
            # Workers finish side by side: whole turns of them count.
            if seconds >= effort.seconds and (done % workers == 0 or seconds >= 4 * effort.seconds):
                break
        rounds.append(done * samples / max(effort.clock() - begun, 1e-9))
    return Figure.of(rounds)


def _smaller(
    inner: Images,
    sample_bytes: float,
    threads: int,
    arguments: dict[str, Any],
    effort: Effort,
    say: Say,
) -> Smaller | None:
    """What the images give when their shorter side is ``_SMALLER`` pixels at most."""
    shrink, contents, changed = Shrink(shorter=_SMALLER), list[bytes](), 0
    for row in range(min(len(inner), _ROUND)):
        with inner.files.opened(row) as file:
            content = file.read()
        with suppress(Exception):  # whatever Pillow raises of a broken one: it stays as it is
            _, less = shrink.apply("x.jpg", content)
            changed += less is not content
            content = less
        contents.append(content)
    if changed < len(contents) / 2:
        return None
    with _in_memory(inner.files, contents) as files:
        made = _rate(Images(files, inner.transform), threads, arguments, effort, say)
    before = sum(_size(inner.files, row) for row in range(len(contents)))
    return Smaller(_SMALLER, made, sum(map(len, contents)) / before)


def _of_own_code(
    dataset: Any, threads: int, arguments: dict[str, Any], effort: Effort, say: Say
) -> Ceilings:
    """The ceilings where the dataset's own code reads: that code, and the loader over it."""
    say("the dataset's own code")
    indices = np.random.default_rng(0).permutation(len(dataset))[:_SAMPLES].tolist()
    took, cpu = list[float](), 0.0
    begun = effort.clock()
    with one_torch_thread():
        dataset[indices[0]]  # imports and caches of its own
        for index in indices[1:_COSTED] or indices:
            busy, seconds = time.thread_time(), timed(lambda index=index: dataset[index])  # type: ignore[misc] # bound now
            took.append(seconds)
            cpu += time.thread_time() - busy
            if effort.clock() - begun > 4 * effort.seconds:
                break
    few = Subset(dataset, indices)
    smaller_batch = {**arguments, "batch_size": min(arguments["batch_size"], 16)}
    made = {threads: _rate(few, threads, smaller_batch, effort, say)}
    for other in _other_counts(threads):
        made[other] = _rate(few, other, smaller_batch, effort, say)
    name = f"{type(dataset).__name__}.__getitem__"
    op = OpCost(name, statistics.median(took), python=True)
    return Ceilings(
        threads=threads,
        cores=usable_cores(),
        batch_size=arguments["batch_size"],
        sample_bytes=0.0,
        made=made,
        loader=made[threads],
        ops=(op,),
        waiting=max(0.0, 1 - cpu / max(sum(took), 1e-9)),
        tier="Python",
    )
