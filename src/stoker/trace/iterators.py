"""torch's iterators with recording: the only module that uses torch's private parts.

Supported is torch from 2.6 to the newest that was tested, as long as those parts look as expected;
with any other nothing is traced.
"""

from __future__ import annotations

import inspect
import queue
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, _utils, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data._utils.pin_memory import pin_memory as _pin_memory
from torch.utils.data.dataloader import (
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from stoker import machine, startup
from stoker.crossing import Piped, Room, free_bytes
from stoker.engine import Session, per_sample
from stoker.errors import StokerWarning
from stoker.slots import accelerator_pins
from stoker.trace import hooks, wire
from stoker.trace.check import impossible, patched
from stoker.trace.collate import recordable
from stoker.trace.node import Tracing
from stoker.trace.scope import DECODE, TENSORS, Counts, current
from stoker.trace.worker import Delivery, Recorder, Replay

_OLDEST, _NEWEST = (2, 6), (2, 14)
_PATIENCE_SECONDS = 5.0


@lru_cache(maxsize=1)
def unknown() -> str | None:
    """Why torch's iterators are left as they are in this process; None where they are known."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if not _OLDEST <= version <= _NEWEST:
        return f"torch {torch.__version__} is not among the versions that tracing was tested with"
    fetch = list(inspect.signature(_MapDatasetFetcher.fetch).parameters)
    loop = list(inspect.signature(_utils.worker._worker_loop).parameters)
    names = ("_process_data", "_shutdown_workers", "_reset", "_try_get_data")
    if (
        len(fetch) != 2
        or "init_fn" not in loop
        or not all(hasattr(_MultiProcessingDataLoaderIter, name) for name in names)
        or not hasattr(_SingleProcessDataLoaderIter, "_next_data")
    ):
        return f"torch {torch.__version__} is built otherwise than expected"
    return None


def prevented() -> str | None:
    """Why no loader can be traced in this process; None where they can."""
    return unknown() or impossible()


def refused() -> str | None:
    """Why nothing is traced now: what never can be, or a patch that would be passed over."""
    return patched() or prevented()  # in this order: the proof is kept, and patches would spoil it


def inside() -> bool:
    """True in user code that makes a sample, in a worker or here: its own loaders are stock."""
    return get_worker_info() is not None or current() is not None


@dataclass
class Trace:
    """One loader's tracing: what it has counted so far.

    Attributes:
        counts: of all batches that were taken.
        threads: native threads beside the workers.
        session: the native threads' of the newest iterator.
    """

    counts: Counts = field(default_factory=Counts)
    batches: int = 0
    threads: int = 0
    session: Session | None = None

    def __post_init__(self) -> None:
        # Workers that record leave most of their time to the threads: of two cores, both decode.
        cores = machine.most_workers()
        self.threads = self.threads or max(min(2, cores), cores - 1)

    def add(self, counts: Counts) -> None:
        """Takes note of what happened in making a batch."""
        self.batches += 1
        self.counts.add(counts)

    def tier(self) -> str | None:
        """What most samples were so far; None where nothing was lazy."""
        counts = self.counts
        if counts.recorded > counts.values:
            return "recorded"
        if counts.opened:
            return "materialised"
        return None if self.batches else "traced"

    def facts(self) -> dict[str, str]:
        """The counters and the source lines behind them, by name."""
        counts = self.counts
        numbers = {
            "recorded": counts.recorded,
            "tensors made in the workers": counts.values,
            "images made in the workers": counts.pixels,
            "decoded by Pillow": counts.declined,
            "batches run again": counts.replayed,
        }
        shown = [f"{number} {name}" for name, number in numbers.items() if number]
        facts = {"samples": ", ".join(shown)} if shown else {}
        if counts.plans:
            facts["recorded"] = "; or ".join(plan for plan, _ in counts.plans.most_common(2))
        if counts.samples:
            facts["cost"] = f"{per_sample(counts.seconds, counts.samples)} in the dataset's code"
            if self.session is not None and (native := self.session.cost()):
                facts["cost"] += f", {native} in native threads"
        if counts.lines:
            facts["made early"] = "; ".join(
                f"{line} ({number}x)"
                for line, number in counts.lines.most_common(4)
                if line != "more"
            )
        return facts


def page_locked(batch: Any) -> Any:
    """``batch`` with its tensors in page-locked memory; those that are there already stay."""
    return _pin_memory(batch)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Recordings:
    """How a worker records.

    Attributes:
        depth: how far to defer.
        keep: batches that may be asked for again.
        order: Pillow's order of passes, proven in the main process.
    """

    depth: int
    keep: int
    order: str

    def start(self) -> None:
        """Makes this process, a worker, record."""
        Tracing.order = self.order
        hooks.install()
        info: Any = get_worker_info()
        caught = partial(ExceptionWrapper, where=f"in DataLoader worker process {info.id}")
        recorder = Recorder(self.depth, self.keep, caught)
        for kind in (_MapDatasetFetcher, _IterableDatasetFetcher):
            _record_fetches(kind, recorder, info.dataset)


@dataclass(frozen=True)
class WorkerStart:
    """A worker_init_fn that says how batches are made and cross, then calls the user's.

    Attributes:
        user: the loader's own.
        room: what may be put into shared memory.
        recordings: how to record; None where nothing is.
    """

    user: Callable[[int], None] | None
    room: Room
    recordings: Recordings | None

    def __call__(self, worker: int) -> None:
        """Runs in the worker, before its first batch."""
        self.room.keep()
        if self.recordings is not None:
            self.recordings.start()
        if self.user is not None:
            self.user(worker)


def _record_fetches(kind: Any, recorder: Recorder, dataset: Any) -> None:
    """Makes the worker's own fetcher record; those of loaders that user code has there do not."""
    stock, busy = kind.fetch, False

    def fetch(self: Any, index: Any) -> Any:
        nonlocal busy
        if busy or self.dataset is not dataset:
            return stock(self, index)
        busy = True
        try:
            hooks.refresh()
            return recorder.fetch(lambda asked: stock(self, asked), index)
        finally:
            busy = False

    kind.fetch = fetch


class _Tracing:
    """A loader as torch's iterator shall see it."""

    def __init__(self, loader: Any, **changes: Any) -> None:
        self.__dict__.update(changes, _loader=loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Error:
    """An exception of the thread below, for the consumer."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Relay(queue.Queue[Any]):
    """What the consumer reads instead of the workers' queue."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next of it; raises what the relay's thread could not deal with."""
        found = super().get(block, timeout)
        if isinstance(found, _Error):
            raise found.error
        return found


def _relay(
    results: Any, relay: _Relay, replays: _Relay, receiver: wire.Receiver, stop: threading.Event
) -> None:
    """Takes what the workers send and starts its decoding; a thread of its own."""
    while not stop.is_set():
        try:
            found = results.get(timeout=_PATIENCE_SECONDS)
        except queue.Empty:
            continue
        except Exception as error:  # noqa: BLE001  a thread hands over: the consumer raises it
            relay.put(_Error(error))
            if isinstance(error, OSError | EOFError | ValueError):
                return  # the queue is gone
            continue
        if found is None or stop.is_set():
            return
        _hand_over(found, relay, replays, receiver)
        del found  # the consumer's alone from now on


def _hand_over(
    found: tuple[Any, Any], relay: _Relay, replays: _Relay, receiver: wire.Receiver
) -> None:
    index, data = found
    try:
        if type(data) is Delivery:
            for one in (data, *data.later.values()):
                one.batch = receiver.submit(one.batch)
        if isinstance(index, tuple):
            replays.put(data)
        else:
            relay.put((index, data))
    except Exception as error:  # noqa: BLE001  a thread hands over: the consumer raises it
        relay.put(_Error(error))


@contextmanager
def _without_advice(method: str) -> Iterator[None]:
    """Without torch's warning of what cannot be pickled: an error that says more follows."""
    if method == "fork":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Got pickle error when attempting to start")
        yield


class WorkersIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator over worker processes that says why they do not start.

    Args:
        recordings: how the workers record; None where everything is stock.
        changes: attributes that the iterator shall see otherwise than the loader has them.
    """

    def __init__(self, loader: Any, recordings: Recordings | None, **changes: Any) -> None:
        self._starting, self._heard = startup.Starting.of(loader), False
        prevented = self._starting.prevented()
        if prevented is not None:
            raise prevented
        room = Room(free_bytes(), loader.num_workers * loader.prefetch_factor + 1)
        start = WorkerStart(loader.worker_init_fn, room, recordings)
        try:
            with _without_advice(self._starting.method):
                super().__init__(_Tracing(loader, worker_init_fn=start, **changes))
        except Exception as error:
            self._shutdown_workers()  # the error may be kept, and with it this object
            explained = self._starting.failed(error)
            if explained is None:
                raise
            raise explained from None  # it quotes what matters of the error

    def _try_get_data(self, *timeout: float) -> Any:
        try:
            found = super()._try_get_data(*timeout)  # type: ignore[no-untyped-call]
        except RuntimeError:
            spawned = self._starting.method != "fork"
            if self._heard or not (spawned and any(w.exitcode == 1 for w in self._workers)):
                raise
            raise self._starting.died() from None
        self._heard = self._heard or found[0]
        warning = Piped.warning()
        if warning is not None:
            warnings.warn(warning, StokerWarning, stacklevel=5)
        return found

    def _shutdown_workers(self) -> None:
        # Some of them may have started before one could not, and torch looks for these.
        self.__dict__.setdefault("_shutdown", True)
        if not self._shutdown:
            self.__dict__.setdefault("_workers_status", [True] * len(self._workers))
        super()._shutdown_workers()


class TracingIterator(WorkersIterator):
    """torch's iterator over worker processes that record."""

    _resetting = False

    def __init__(self, loader: Any, trace: Trace) -> None:
        depth = DECODE if loader._dataset_kind == _DatasetKind.Iterable else TENSORS
        keep = loader.num_workers * loader.prefetch_factor + 1
        self._trace, self._pins = trace, loader.pin_memory and accelerator_pins()
        super().__init__(
            loader,
            Recordings(depth, keep, Tracing.order),
            pin_memory=loader.pin_memory and not self._pins,
            collate_fn=recordable(loader.collate_fn),
        )
        # Not before: the workers are forked without our threads.
        self._receiver = wire.Receiver(trace.threads, self._pins, keep + 2)
        trace.session = self._receiver.session
        self._replays, self._asked = _Relay(), 0
        self._newer: dict[tuple[int, int], Delivery] = {}
        stop = threading.Event()
        self._data_queue = _Relay()
        self._relay_thread = threading.Thread(
            target=_relay,
            args=(
                self._worker_result_queue,
                self._data_queue,
                self._replays,
                self._receiver,
                stop,
            ),
            name="stoker-relay",
            daemon=True,
        )
        self._relay_thread.start()
        self._end = weakref.finalize(
            self, _end, self._worker_result_queue, self._relay_thread, self._receiver, stop
        )

    def _process_data(self, data: Any, *worker: int) -> Any:
        try:
            return self._made(data, *worker)
        except Exception as error:  # noqa: BLE001  it is raised again
            # Without torch's frame that raised: it holds the exception, which holds the frame, so
            # this iterator would live until garbage is collected, and could not end its workers.
            raise error.with_traceback(None) from error.__cause__

    def _made(self, data: Any, *worker: int) -> Any:
        data = super()._process_data(data, *worker)  # type: ignore[no-untyped-call]
        if type(data) is not Delivery:
            return data
        while newer := self._newer.pop((worker[0], data.ticket), None):
            self._receiver.cancel(data.batch)
            data = newer
        self._trace.add(data.counts)
        if isinstance(data.batch, ExceptionWrapper):
            data.batch.reraise()  # type: ignore[no-untyped-call]
        try:
            batch = self._receiver.finish(data.batch)
        except wire.Failed as failure:
            self._trace.counts.lines[f"ran again: {failure}"] += 1
            batch = self._again(Replay(data.ticket, failure.files), worker[0])
        return page_locked(batch) if self._pins else batch

    def _again(self, replay: Replay, worker: int) -> Any:
        """The batch as its worker makes it with nothing deferred."""
        self._asked += 1
        self._index_queues[worker].put((("again", self._asked), replay))
        while True:
            try:
                data = self._replays.get(timeout=1.0)
            except queue.Empty:
                if self._workers[worker].is_alive():
                    continue
                pid = self._workers[worker].pid
                raise RuntimeError(
                    f"DataLoader worker (pid(s) {pid}) exited unexpectedly"
                ) from None
            if type(data) is Delivery:
                self._trace.counts.add(data.counts)
                self._newer.update({(worker, one): new for one, new in data.later.items()})
                data = data.batch
            if isinstance(data, ExceptionWrapper):
                data.reraise()  # type: ignore[no-untyped-call]  # the exception of the user's code
            return data

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        # What an epoch that was not walked to its end has left is dropped: nobody waits for it.
        left = [info[1] for info in getattr(self, "_task_info", {}).values() if len(info) > 1]
        for data in (*left, *getattr(self, "_newer", {}).values()):
            self._drop(data)
        self._newer = {}
        self._resetting = not first_iter
        try:
            super()._reset(loader, first_iter)
        finally:
            self._resetting = False

    def _get_data(self) -> Any:
        found = super()._get_data()  # type: ignore[no-untyped-call]
        if self._resetting:
            self._drop(found[1])
        return found

    def _drop(self, data: Any) -> None:
        if type(data) is Delivery:
            self._receiver.cancel(data.batch)

    def _shutdown_workers(self) -> None:
        if not getattr(self, "_shutdown", True) and hasattr(self, "_end"):
            self._end()
        super()._shutdown_workers()


def _end(
    results: Any, thread: threading.Thread, receiver: wire.Receiver, stop: threading.Event
) -> None:
    """Stops the thread that reads from the workers, before they end; then the native ones."""
    if receiver.session.is_ours():
        stop.set()
        results.put(None)
        if thread is not threading.current_thread():
            # A worker that was killed while it sent may have left the queue locked.
            thread.join(2 * _PATIENCE_SECONDS)
        results.cancel_join_thread()
    receiver.close()


class TracingIteratorHere(_SingleProcessDataLoaderIter):
    """torch's iterator without workers: records on the caller's thread, decodes in the pool."""

    def __init__(self, loader: Any, trace: Trace) -> None:
        iterable = loader._dataset_kind == _DatasetKind.Iterable
        self._here = Here(trace, loader.pin_memory and accelerator_pins(), iterable)
        pin = loader.pin_memory and not self._here.pins
        collate = recordable(loader.collate_fn)
        super().__init__(_Tracing(loader, pin_memory=pin, collate_fn=collate))

    def _next_data(self) -> Any:
        index = self._next_index()  # type: ignore[no-untyped-call]
        return self._here.fetch(self._dataset_fetcher.fetch, index)


class Here:
    """Records batches on the calling thread.

    Args:
        trace: of the loader.
        pins: give page-locked memory.
        iterable: the dataset decides what comes next, so nothing can be asked for again.
    """

    def __init__(self, trace: Trace, pins: bool, iterable: bool = False) -> None:
        self.trace, self.pins = trace, pins
        self._receiver = wire.Receiver(trace.threads, pins, 3)
        trace.session = self._receiver.session
        self._recorder = Recorder(DECODE if iterable else TENSORS, 1)
        self._end = weakref.finalize(self, self._receiver.close)

    def fetch(self, fetch: Callable[[Any], Any], index: Any) -> Any:
        """The batch of ``fetch(index)``."""
        with hooks.installed():
            delivery = self._recorder.fetch(fetch, index)
        self.trace.add(delivery.counts)
        try:
            batch = self._receiver.finish(self._receiver.submit(delivery.batch))
        except wire.Failed as failure:
            self.trace.counts.lines[f"ran again: {failure}"] += 1
            self.trace.counts.replayed += 1
            self._recorder.give_up(delivery.ticket, failure.files)
            batch = fetch(index)
        return page_locked(batch) if self.pins else batch

    def close(self) -> None:
        """Gives threads back. Idempotent."""
        self._end()


stock_iterator: Callable[[Any], Any] = DataLoader._get_iterator
"""torch's own way to make one, whatever replaces it later."""


def iterator(loader: DataLoader[Any], trace: Trace | None) -> Any:
    """An iterator over ``loader``; for `DataLoader._get_iterator`.

    Args:
        loader: torch's.
        trace: records with it; None makes everything stock. The caller has asked `refused`.
    """
    if trace is None and (loader.num_workers == 0 or unknown() is not None):
        return stock_iterator(loader)
    if loader.num_workers:
        loader.check_worker_number_rationality()
    return iterator_of_fields(loader, trace)


def iterator_of_fields(loader: Any, trace: Trace | None) -> Any:
    """The same for an object with the attributes of a loader, as fastai has it."""
    if trace is None:
        return WorkersIterator(loader, None)
    return (
        TracingIterator(loader, trace) if loader.num_workers else TracingIteratorHere(loader, trace)
    )


class TracedLoader(DataLoader[Any]):
    """torch's loader whose workers record."""

    trace: Trace | None = None

    def _get_iterator(self) -> Any:
        return iterator(self, None if refused() is not None else self.trace)
