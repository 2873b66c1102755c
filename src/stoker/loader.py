"""`DataLoader`: torch's, with a native engine where dataset and transform are proven stock."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from stoker import machine
from stoker.bad_samples import BadSample, BadSamples, excluded_samples
from stoker.engine import level
from stoker.epochs import Epochs
from stoker.errors import StokerWarning, UnsupportedError
from stoker.explanation import Explanation
from stoker.feed import Feed
from stoker.iterate import (
    Batches,
    Draws,
    Handing,
    KeyedIterator,
    LoweredIterator,
    OnCallingThread,
    OrderedBatches,
    Policy,
    Progress,
)
from stoker.keyed import KeyedDataset, Reporting, WorkerInit
from stoker.lower import Refusal
from stoker.samplers import (
    Ordered,
    OrderedRandomSampler,
    OrderedSampler,
    OrderedSequentialSampler,
    ShardedSampler,
    rank_and_world,
)
from stoker.sampling import Sampling, asked_for
from stoker.slots import accelerator_pins
from stoker.startup import parts_of
from stoker.state import VERSION, from_dict
from stoker.tiers import Lowered, blank_sample, lower, sample_location
from stoker.trace.collate import recordable
from stoker.trace.iterators import Here, Trace, TracedLoader, inside, iterator, refused


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


_T_co = TypeVar("_T_co", covariant=True)


class _Workers(TracedLoader):
    """torch's machinery for a loader that has judged the number of workers already.

    Attributes:
        parts: what workers are sent, without what `KeyedDataset` and the like put around it.
    """

    parts: dict[str, Any] | None = None

    def check_worker_number_rationality(self) -> None:
        """Says nothing: torch knows neither this rank nor the cgroup's quota."""


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """Combines a dataset and a sampler, and yields batches: torch's ``DataLoader``, fed natively.

    Arguments up to ``in_order`` are torch's, in torch's order. Where the dataset is a folder or
    label file dataset and its transform consists of stock torchvision transforms, native threads
    read, decode and transform into the batch's memory, and the tensors are bit for bit those of
    ``dataset[index]``. Everything else runs on torch's own machinery; ``explain()`` says why.

    Args:
        sampler: one of torch's or yours; or a `Weighted`, `ClassBalanced`, `Mixture`,
            `RepeatedAugmentation` or `Runs`, of which the loader makes its order.
        num_workers: native threads, or worker processes where torch's machinery runs. Left out:
            three quarters of the usable cores per rank for native threads, 0 for torch's
            machinery. 0 works on the calling thread.
        prefetch_factor: natively, ``max(2, prefetch_factor)`` batches are prepared ahead in total.
        seed: of the order and of every random transform; left out, taken from ``generator`` or
            torch's default generator at the first iteration.
        randomness: "keyed": order and draws are a pure function of seed, epoch and position, the
            same with any number of workers. "torch": exactly the batches that torch's loader gives
            for the same ``torch.manual_seed``; nothing runs natively.
        on_error: what becomes of a sample that cannot be decoded. "raise": ``DecodeError``. "skip":
            the next good sample of the order takes its place. "blank": black pixels, the label
            stays.
        exclude: samples that are left out of the order, and of ``len(loader)``: the path of a list
            of bad samples, of ``stoker verify`` or `log_bad_samples`; or indices or names.
        tier: "stock" switches the native engine off.
        order: None: as ``shuffle`` says. "full" shuffles, "none" does not, "runs" is short for
            ``sampler=Runs()``: shards in random order, shuffled within a window.
        strict: raise ``UnsupportedError`` where the native engine cannot be used.
        shard: serve this rank's share of one order: position p is rank p % world's. Rank and world
            are those of the process group, else RANK and WORLD_SIZE, when an iteration begins.
            ``seed`` left out is then 0.
        uneven: what is done where the ranks do not divide the order. "pad": it is repeated from its
            start. "drop": it is cut. "exact": copies of position 0 fill it, and each batch gains
            ``valid``, a last element or key, bool of shape (batch,), False for those.

    Raises:
        ValueError: an argument is out of its range, or arguments exclude each other, as in torch.
        UnsupportedError: ``strict`` and something prevents the native engine.
        SourceError: the list of ``exclude`` cannot be read, or was made for other data.
    """

    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | Sampling | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        randomness: Literal["keyed", "torch"] = "keyed",
        on_error: Literal["raise", "skip", "blank"] = "raise",
        exclude: str | os.PathLike[str] | Iterable[int | str] | None = None,
        tier: Literal["auto", "stock"] = "auto",
        order: Literal["full", "runs", "none"] | None = None,
        strict: bool = False,
        shard: bool = False,
        uneven: Literal["pad", "drop", "exact"] = "pad",
    ) -> None:
        _choice("randomness", randomness, ("keyed", "torch"))
        _choice("on_error", on_error, ("raise", "skip", "blank"))
        _choice("tier", tier, ("auto", "stock"))
        _choice("order", order, (None, "full", "runs", "none"))
        _choice("uneven", uneven, ("pad", "drop", "exact"))
        given = sampler if sampler is not None else batch_sampler
        # No errors: frameworks rebuild a loader with its own arguments and a sampler of theirs.
        sharded = isinstance(getattr(given, "sampler", given), ShardedSampler)
        if given is not None and not sharded:
            for name, value, idle in (
                ("order", order, order is not None and not isinstance(sampler, Ordered)),
                ("shard", shard, shard and not isinstance(sampler, Sampling)),
            ):
                if idle:
                    warnings.warn(
                        f"{name}={value!r} has no effect: the given sampler decides",
                        StokerWarning,
                        stacklevel=2,
                    )
        elif given is None and order is not None:
            if shuffle is not None and shuffle != (order != "none"):
                raise ValueError(f"order={order!r} and shuffle={shuffle} contradict each other")
            shuffle = order != "none"
        if num_workers == 0 and (prefetch_factor is not None or persistent_workers):
            self._warn_no_workers(stacklevel=3)
            prefetch_factor, persistent_workers = None, False
        keyed = randomness == "keyed" and not isinstance(dataset, IterableDataset)
        if on_error != "raise" and not keyed:
            raise ValueError(
                f"on_error={on_error!r} needs a map-style dataset and keyed randomness"
            )
        sampling = asked_for(given, order, shuffle, keyed)
        own = keyed and (given is None or sampling is not None)
        excluded = None
        if exclude is not None:
            if not own and not isinstance(getattr(given, "sampler", given), Ordered):
                raise ValueError(
                    "exclude needs a map-style dataset, keyed randomness and no sampler or "
                    "batch_sampler of your own: leave samples out there, or give a Subset"
                )
            excluded = excluded_samples(dataset, exclude)
        if given is None or sampling is not None:
            self._check_sharding(shard, uneven, keyed, drop_last, batch_size)
        if own and shard:
            sampler = ShardedSampler(
                cast(Sized, dataset),
                shuffle=bool(shuffle) or sampling is not None,
                seed=0 if seed is None else seed,
                uneven=uneven,
                excluded=excluded,
                sampling=sampling,
            )
        elif own and sampling is not None:
            sampler = OrderedSampler(
                cast(Sized, dataset), sampling, seed=seed, generator=generator, excluded=excluded
            )
        elif own:
            kind = OrderedRandomSampler if shuffle else OrderedSequentialSampler
            sampler = kind(cast(Sized, dataset), seed=seed, generator=generator, excluded=excluded)
        super().__init__(
            dataset,
            batch_size,
            None if own else shuffle,
            cast(Any, sampler),
            batch_sampler,
            # Left out: 1 until the tier is known, so that torch refuses nothing that needs any.
            1 if num_workers is None else num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.shuffle, self.seed, self.randomness, self.on_error = (
            shuffle,
            seed,
            randomness,
            on_error,
        )
        self.tier, self.order, self.strict, self.exclude = tier, order, strict, excluded
        self.shard, self.uneven = shard, uneven
        self.bad_samples = BadSamples()
        self._keyed = keyed
        self._epochs = Epochs(self.sampler, self.batch_sampler, seed, generator)
        self._feed: Feed | None = None
        self._ahead: list[LoweredIterator] = []
        self._inner: torch.utils.data.DataLoader[Any] | None = None
        self._warned = self._warned_of_ranks = False
        self._trace = Trace()
        self._here: Here | None = None
        if num_workers is None:
            self._choose_workers(prefetch_factor is not None or persistent_workers)
        elif num_workers > machine.most_workers():
            warnings.warn(
                f"num_workers={num_workers}: this process may use {machine.most_workers()} cores; "
                "more workers than that take time from each other",
                StokerWarning,
                stacklevel=2,
            )
        if strict:
            self._lowered()

    def check_worker_number_rationality(self) -> None:
        """Says nothing: the constructor warns, and knows this rank and the cgroup's quota."""

    # Which tier

    def _choose_workers(self, asked_for_workers: bool) -> None:
        """Says how many workers there are where ``num_workers`` was left out."""
        if isinstance(self._lowered(), Lowered):
            self.num_workers = machine.default_threads()
            return
        self.num_workers = 0
        if asked_for_workers:
            self._warn_no_workers(stacklevel=4)
        self.prefetch_factor = None
        object.__setattr__(self, "persistent_workers", False)  # torch's guard is for users

    @staticmethod
    def _warn_no_workers(stacklevel: int) -> None:
        warnings.warn(
            "num_workers=0 works on the calling thread: prefetch_factor and persistent_workers "
            "have no effect",
            StokerWarning,
            stacklevel=stacklevel,
        )

    def _lowered(self) -> Lowered | Refusal:
        """The plan for dataset and transform as they are now, or what prevents one."""
        lowered = self._prevented() or lower(self.dataset)
        if isinstance(lowered, Refusal) and self.strict:
            raise UnsupportedError(lowered.op, lowered.why, lowered.instead)
        return lowered

    def _prevented(self) -> Refusal | None:
        """What keeps this loader's arguments from the native engine, whatever the dataset is."""
        if isinstance(self.dataset, IterableDataset):
            return Refusal(
                "IterableDataset", "it decides itself what comes next", "use a map-style dataset"
            )
        if self.randomness == "torch":
            return Refusal(
                "randomness='torch'", "asks for torch's own streams", "leave it at 'keyed'"
            )
        if self.tier == "stock":
            return Refusal("tier='stock'", "switches the native engine off", "leave it at 'auto'")
        if not self._auto_collation:
            return Refusal("batch_size=None", "there are no batches to fill", "give a batch_size")
        if self.collate_fn is not default_collate:
            name = getattr(self.collate_fn, "__qualname__", type(self.collate_fn).__qualname__)
            return Refusal(f"collate_fn {name}", "it is the user's code", "leave collate_fn out")
        return None

    # The order

    @staticmethod
    def _check_sharding(
        shard: bool, uneven: str, keyed: bool, drop_last: bool, batch_size: int | None
    ) -> None:
        """Refuses what cannot be, where the order is to be our own."""
        if shard and not keyed:
            raise ValueError(
                "shard=True needs a map-style dataset and keyed randomness: an iterable dataset "
                "splits itself by rank, randomness='torch' needs a DistributedSampler"
            )
        if uneven != "pad" and not shard:
            raise ValueError(f"uneven={uneven!r} needs shard=True")
        if uneven == "exact" and drop_last:
            raise ValueError("uneven='exact' serves every sample: drop_last=True contradicts it")
        if uneven == "exact" and batch_size is None:
            raise ValueError("uneven='exact' marks the samples of a batch: it needs a batch_size")

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration is; without it each iteration is one further."""
        self._epochs.set_epoch(epoch)

    def _warn_of_ranks(self) -> None:
        """Says once that every rank serves everything, where nobody has divided it."""
        stock = (
            RandomSampler,
            SequentialSampler,
            SubsetRandomSampler,
            WeightedRandomSampler,
            OrderedSampler,
        )
        if (
            self._warned_of_ranks
            or inside()
            or not isinstance(self._epochs.sampler, stock)
            or type(self.batch_sampler) not in (BatchSampler, type(None))
        ):
            return
        try:
            _, world = rank_and_world()
        except ValueError:  # somebody else's variables: nothing here depends on them
            return
        if world > 1:
            self._warned_of_ranks = True
            warnings.warn(
                f"every one of the {world} ranks serves all samples: give shard=True, or a "
                "DistributedSampler",
                StokerWarning,
                stacklevel=3,
            )

    # The state

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is, for JSON: what was handed out counts, what was prepared does not.

        The same on all ranks that have done the same number of steps.
        """
        if not self._keyed:
            return {"version": VERSION, "randomness": "torch"}
        return self._epochs.state(self.dataset).as_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next iteration go on where ``state_dict`` was.

        Ranks, threads, batch size and prefetching may be others.

        Raises:
            ResumeError: it is the state of other data, another order or another version.
        """
        if self._keyed:
            self._epochs.load(from_dict(state_dict), self.dataset)
        else:
            warnings.warn(
                "torch's own order has no position: an epoch begins anew, with whatever the random "
                "generators give",
                StokerWarning,
                stacklevel=2,
            )

    # The loop

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._warn_of_ranks()
        if not self._keyed:
            self._warn_if_slower(self._prevented())
            return super().__iter__()
        lowered = self._lowered()
        native = isinstance(lowered, Lowered)
        progress = self._epochs.begin(native or self.in_order or self.num_workers == 0)
        pinned = self.pin_memory and accelerator_pins()
        source: Iterator[tuple[int, Any]]
        if self._epochs.nothing_left():
            source = iter(())
        elif isinstance(lowered, Lowered):
            source = self._iterate_lowered(lowered, progress.batches)
        else:
            self._warn_if_slower(lowered)
            source = self._iterate_keyed(progress.batches)
        return Handing(source, progress, pinned, self._of_another_epoch)

    def _of_another_epoch(self, progress: Progress) -> Handing | None:
        """The iterator of an epoch that was set after that of ``progress`` was begun.

        Lightning makes an iterator first and says then which epoch it is.
        """
        if self._epochs.progress is not progress or not self._epochs.told_other():
            return None
        return cast(Handing, iter(self))

    def _get_iterator(self) -> Any:
        return iterator(self, self._tracing())

    def _tracing(self) -> Trace | None:
        """Records what the dataset's code does to images; None where everything must be stock."""
        if self.tier == "stock" or inside() or refused() is not None:
            return None
        return self._trace

    def _warn_if_slower(self, refusal: Refusal | None) -> None:
        if inside():
            return
        reason = refused()
        if refusal is not None and reason and not self._warned and self.tier != "stock":
            self._warned = True
            warnings.warn(
                f"not run natively: {refusal.op}: {refusal.why} (instead: {refusal.instead}); "
                f"not traced: {reason}; torch's own machinery serves this loader",
                StokerWarning,
                stacklevel=3,
            )

    def _pins(self) -> bool:
        if self.pin_memory and not accelerator_pins():
            warnings.warn(
                "'pin_memory' argument is set as true but no accelerator is found, then device "
                "pinned memory won't be used.",
                stacklevel=4,
            )
            return False
        return self.pin_memory

    def _iterate_lowered(self, lowered: Lowered, batches: Batches) -> LoweredIterator:
        feed = self._feed
        arguments = (
            lowered.plan,
            lowered.rows,
            self.num_workers,
            max(2, self.prefetch_factor or 2),
            self._pins(),
        )
        if feed is None or not feed.fits(*arguments):
            feed = self._feed = Feed(*arguments)
        then = None
        if self.persistent_workers and isinstance(batches, OrderedBatches):
            then = batches.next_epoch()
        policy = Policy(self.on_error, self.bad_samples, self.timeout, self.dataset, self._blank())
        ahead = self._ahead.pop() if self._ahead else None
        if ahead is not None:
            if ahead.feed is feed and ahead.batches == batches:
                return ahead.resume(policy, then, self._ahead)
            ahead.close()
        return LoweredIterator(feed, batches, policy, then, self._ahead)

    def _blank(self) -> Callable[[int], Any] | None:
        if self.on_error != "blank":
            return None
        blank = blank_sample(self.dataset)
        if isinstance(blank, Refusal):
            raise UnsupportedError(f"on_error='blank' and {blank.op}", blank.why, "use 'skip'")
        return blank

    def _iterate_keyed(self, batches: Batches) -> KeyedIterator:
        blank = self._blank()
        if self.num_workers == 0:
            keyed = KeyedDataset(self.dataset, self.on_error, blank)
            collate = Reporting(recordable(self.collate_fn), keyed)
            trace, pins = self._tracing(), self._pins()
            if trace is not None and self._here is None:
                self._here = Here(trace, pins)
            record = None if trace is None or self._here is None else self._here.fetch
            batched = self._auto_collation
            source: Iterator[Any] = OnCallingThread(keyed, batches, collate, batched, pins, record)
        else:
            if self._inner is None or not self.persistent_workers:
                self._inner_draws = Draws(batches)
                self._inner = self._make_inner(self._inner_draws, blank)
            self._inner_draws.batches = batches
            source = iter(self._inner)

        def report(index: int, position: int, reason: str) -> None:
            location = sample_location(self.dataset, index)
            self.bad_samples.report(BadSample(index, location, reason, batches.epoch, position))

        return KeyedIterator(source, report)

    def _make_inner(self, draws: Draws, blank: Any) -> torch.utils.data.DataLoader[Any]:
        """torch's loader over `KeyedDataset`; it lives as long as its workers shall."""
        order = draws.batches.order if isinstance(draws.batches, OrderedBatches) else None
        keyed = KeyedDataset(
            self.dataset, self.on_error, blank, order if self.on_error == "skip" else None
        )
        inner = _Workers(
            keyed,
            sampler=None if self._auto_collation else draws,
            batch_sampler=cast(Any, draws) if self._auto_collation else None,
            batch_size=1 if self._auto_collation else None,
            num_workers=self.num_workers,
            collate_fn=Reporting(recordable(self.collate_fn), keyed),
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=WorkerInit(self.worker_init_fn),
            multiprocessing_context=self.multiprocessing_context,
            generator=self.generator,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            pin_memory_device=self.pin_memory_device,
            in_order=self.in_order,
        )
        inner.trace, inner.parts = self._tracing(), parts_of(self)
        return inner

    # What the user may ask

    def explain(self) -> Explanation:
        """Which tier serves this loader, what prevents a faster one, and what is held in memory."""
        lowered = self._lowered()
        if isinstance(lowered, Refusal):
            facts = {"workers": f"{self.num_workers} processes" if self.num_workers else "none"}
            tier, trace = "keyed" if self._keyed else "torch", self._tracing()
            if trace is not None:
                tier = trace.tier() or tier
                facts["workers"] += f", and {trace.threads} native threads"
                facts.update(trace.facts())
            elif self.tier != "stock":
                facts["not traced"] = refused() or ""
            return Explanation(tier, lowered.op, lowered.why, lowered.instead, facts)
        plan, rows = lowered.plan, lowered.rows
        depth = max(2, self.prefetch_factor or 2) if self.num_workers else 1
        batch_size = getattr(self.batch_sampler, "batch_size", None)
        facts = {
            "dataset": f"{type(self.dataset).__name__}, {len(rows.labels)} samples",
            "transform": str(plan),
            "threads": f"{self.num_workers} native, {level()}"
            if self.num_workers
            else "the caller's",
        }
        if isinstance(batch_size, int) and plan.output_size is not None:
            held = plan.sample_bytes * batch_size * depth
            facts["held ahead"] = f"{depth} batches, {held / 2**20:.1f} MiB"
        idle = [
            name
            for name, given in (
                ("worker_init_fn", self.worker_init_fn is not None),
                ("multiprocessing_context", self.multiprocessing_context is not None),
                ("in_order=False", not self.in_order),
            )
            if given
        ]
        if idle:
            facts["no effect"] = f"{', '.join(idle)}: there are no worker processes"
        if self._feed is not None and (cost := self._feed.session.cost()):
            facts["cost"] = cost
        if self._feed is not None and self._feed.fallback.decoded:
            facts["by Pillow"] = f"{self._feed.fallback.decoded} samples decoded so far"
        return Explanation("lowered", facts=facts)

    def log_bad_samples(self, path: str | Path) -> None:
        """Appends every bad sample from now on to a JSON-lines file."""
        self.bad_samples.path = Path(path)

    def close(self) -> None:
        """Gives threads, workers and memory back now. The loader can be used again. Idempotent."""
        while self._ahead:
            self._ahead.pop().close()
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()
        self._inner = None
        here, self._here = self._here, None
        if here is not None:
            here.close()

    def __getstate__(self) -> dict[str, Any]:
        gone = {"_feed": None, "_inner": None, "_iterator": None, "_here": None}
        return {**vars(self), **gone, "_ahead": []}
