"""`state_dict` and `load_state_dict`: the rest of an epoch, exactly, wherever it is resumed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tarfile
import tracemalloc
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
)
from torchvision import transforms as T

import stoker
from pictures import class_folder
from stoker.epochs import Epochs
from stoker.iterate import OrderedBatches, Progress
from stoker.order import Order, Share
from stoker.samplers import OrderedRandomSampler
from stoker.sources.dataset import Rows, read
from test_sharding import Recorded, Values, lowered

SAMPLES, BATCH = 17, 3
TRAIN = T.Compose([T.RandomResizedCrop(20), T.RandomHorizontalFlip(), T.ToTensor()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("folder"), SAMPLES)


def saved(loader: Any) -> Any:
    """Its state, as it comes back from a file."""
    text = json.dumps(loader.state_dict())
    assert len(text) < 400
    return json.loads(text)


def flat(batches: Any) -> list[Any]:
    """The samples of batches, each as (tensor as a list, index)."""
    return [
        (x.tolist(), int(y)) for batch in batches for x, y in zip(batch[0], batch[1], strict=True)
    ]


def loaders(dataset: Any, **given: Any) -> Any:
    return stoker.DataLoader(dataset, **{"batch_size": BATCH, "shuffle": True, "seed": 5, **given})


def dataset_of(kind: str, folder: Path) -> Any:
    if kind == "lowered":
        dataset = lowered(folder)
        dataset.transform = TRAIN
        return dataset
    return Recorded(folder) if kind == "recorded" else Values(SAMPLES)


@pytest.mark.parametrize("kind", ["lowered", "recorded", "keyed"])
@pytest.mark.parametrize("taken", [0, 1, 3, 5])
@pytest.mark.filterwarnings("ignore:num_workers")
def test_goes_on_in_mid_epoch_with_other_workers(folder: Path, kind: str, taken: int) -> None:
    dataset = dataset_of(kind, folder)
    whole = loaders(dataset, num_workers=0)
    epochs = [flat(whole) for _ in range(3)]
    first = loaders(dataset, num_workers=2, prefetch_factor=4, persistent_workers=True)
    list(first)
    iterator = iter(first)
    assert flat(islice(iterator, taken)) == epochs[1][: taken * BATCH]
    state = saved(first)
    assert (state["epoch"], state["position"]) == (1, taken * BATCH)
    del iterator
    options: list[dict[str, Any]] = [{"num_workers": 0}, {"num_workers": 1, "batch_size": 4}]
    for other in options:
        again = loaders(dataset, **other)
        again.load_state_dict(state)
        assert len(again) == -(-SAMPLES // again.batch_size)
        assert saved(again) == state
        assert flat(again) == epochs[1][taken * BATCH :]
        assert saved(again)["epoch"] == 2 and saved(again)["position"] == 0
        assert flat(again) == epochs[2]
        again.close()
    first.close()


def test_the_keys_of_a_state(folder: Path) -> None:
    dataset = lowered(folder)
    loader = loaders(dataset, shard=True, uneven="drop", num_workers=1)
    rows = read(dataset)
    assert isinstance(rows, Rows)
    assert saved(loader) == {
        "version": 1,
        "algorithm": 1,
        "epoch": 0,
        "position": 0,
        "seed": 5,
        "shuffle": True,
        "uneven": "drop",
        "samples": SAMPLES,
        "source": rows.fingerprint(),
    }


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 4)), max_size=3),
    st.integers(1, 4),
    st.sampled_from(["pad", "drop", "exact"]),
)
def test_whatever_worlds_and_batch_sizes_came_before(
    samples: int, before: list[tuple[int, int, int]], world: int, uneven: Any
) -> None:
    environment = dict(os.environ)
    state, seen, copies = None, [], 0
    try:
        for ranks, size, steps in [*before, (world, 3, 1000)]:
            states = []
            for rank in range(ranks):
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
                loader = stoker.DataLoader(
                    Values(samples, int), size, shuffle=True, shard=True, uneven=uneven,
                    tier="stock", num_workers=0,
                )  # fmt: skip
                if state is not None:
                    loader.load_state_dict(state)
                for batch in islice(loader, steps):
                    indices, valid = batch if uneven == "exact" else (batch, batch >= 0)
                    seen += indices[valid].tolist()
                    copies += int((~valid).sum())
                states.append(saved(loader))
            assert all(other == states[0] for other in states)
            state = states[0]
            if state["epoch"]:  # the loop has seen the end
                break
        order = Order(samples, 0, True).indices(0, 0, samples).tolist()
        assert uneven == "drop" or set(seen) == set(order)
        assert len(seen) >= samples - 3 if uneven == "drop" else len(seen) >= samples
        if uneven == "exact":
            assert sorted(seen) == sorted(order)
        if uneven == "drop":
            assert len(set(seen)) == len(seen)
    finally:
        os.environ.clear()
        os.environ.update(environment)


def test_before_the_first_batch_and_at_the_end() -> None:
    loader = loaders(Values(), num_workers=0)
    epochs = [flat(loaders_at(epoch)) for epoch in range(3)]
    assert where(loader) == (0, 0)
    iterator = iter(loader)
    assert where(loader) == (0, 0)
    for number, _ in enumerate(iterator):
        assert where(loader) == (0, min((number + 1) * BATCH, SAMPLES))
        last = saved(loader)
    assert where(loader) == (1, 0)
    # At the last batch, inside of the loop: what is left of the epoch is nothing.
    again = loaders(Values(), num_workers=0)
    again.load_state_dict(last)
    assert where(again) == (0, SAMPLES)
    assert flat(again) == [] and flat(again) == epochs[1]
    again = loaders(Values(), num_workers=0)
    again.load_state_dict(last)
    again.set_epoch(0)
    assert flat(again) == []
    again.set_epoch(1)
    assert flat(again) == epochs[1]
    again.load_state_dict(last)
    again.set_epoch(1)  # of a loop that counts steps and does not see the end
    assert flat(again) == epochs[1]
    again.load_state_dict(last)
    iterator = iter(again)
    assert where(again) == (0, SAMPLES)
    again.set_epoch(2)  # as Lightning does
    assert where(again) == (2, 0)
    assert flat(iterator) == epochs[2]
    assert where(again) == (3, 0)


def loaders_at(epoch: int) -> Any:
    loader = loaders(Values(), num_workers=0)
    loader.set_epoch(epoch)
    return loader


def where(loader: Any) -> tuple[int, int]:
    state = saved(loader)
    return state["epoch"], state["position"]


def test_after_break_and_set_epoch() -> None:
    loader = loaders(Values(), num_workers=0)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    assert where(loader) == (0, 6)
    state = saved(loader)
    loader.set_epoch(0)
    assert where(loader) == (0, 6)
    loader.set_epoch(4)
    assert where(loader) == (4, 0)
    assert flat(loader) == flat(loaders_at(4))
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert flat(loader) == flat(loaders_at(0))[6:]
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert where(loader) == (2, 0)
    with pytest.warns(stoker.StokerWarning, match="11 samples of epoch 0"):
        assert flat(loader) == flat(loaders_at(2))
    assert where(loader) == (3, 0)


def test_two_live_iterators() -> None:
    loader = loaders(Values(), num_workers=0)
    first, second = iter(loader), iter(loader)
    next(first)
    assert where(loader) == (1, 0)
    next(second)
    next(first)
    assert where(loader) == (1, 3)
    del second
    next(first)
    assert where(loader) == (1, 3)
    loader.load_state_dict(saved(loader))
    assert flat(first) == flat(loaders_at(0))[9:], "it goes on as it was"
    assert flat(loader) == flat(loaders_at(1))[3:]


def test_a_state_can_be_loaded_into_the_loader_itself_and_again() -> None:
    loader = loaders(Values(), num_workers=0)
    next(iter(loader))
    state = saved(loader)
    for _ in range(2):
        loader.load_state_dict(state)
        loader.load_state_dict(saved(loader))
        assert flat(loader) == flat(loaders_at(0))[3:]


def test_a_seed_that_was_left_out_is_taken_over() -> None:
    first = stoker.DataLoader(Values(), BATCH, shuffle=True, num_workers=0)
    batches = flat(islice(iter(first), 2))
    again = stoker.DataLoader(Values(), BATCH, shuffle=True, num_workers=0)
    next(iter(again))  # has drawn one
    again.load_state_dict(saved(first))
    batches += flat(again)
    assert sorted(index for _, index in batches) == list(range(SAMPLES))
    assert saved(again)["seed"] == saved(first)["seed"]
    loader = stoker.DataLoader(Values(), BATCH, shuffle=True, seed=saved(first)["seed"])
    assert batches == flat(loader)


def test_what_does_not_fit_is_named_on_both_sides(folder: Path, tmp_path: Path) -> None:
    state = saved(loaders(lowered(folder)))
    other = lowered(folder)
    other.samples[3] = (other.samples[3][0], 999)
    shorter = lowered(folder)
    shorter.samples = shorter.samples[1:]
    cases: list[tuple[str, Any, Any]] = [
        ("source", loaders(other), state),
        ("samples", loaders(shorter), state),
        ("seed", loaders(lowered(folder), seed=6), state),
        ("seed", loaders(lowered(folder), seed=None, shard=True), state),
        ("shuffle", loaders(lowered(folder), shuffle=False), state),
        ("sampler", loaders(lowered(folder), shuffle=None, sampler=list(range(SAMPLES))), state),
        ("version", loaders(lowered(folder)), {**state, "version": 2}),
        ("algorithm", loaders(lowered(folder)), {**state, "algorithm": 99}),
        ("version", loaders(lowered(folder)), {}),
        ("version", loaders(lowered(folder)), None),
        ("version", loaders(lowered(folder)), {"_snapshot": {}, "_steps_since_snapshot": 3}),
        ("position", loaders(lowered(folder)), {**state, "position": SAMPLES + 1}),
        ("position", loaders(lowered(folder)), {**state, "position": -1}),
        ("position", loaders(lowered(folder)), {**state, "position": True}),
        ("position", loaders(lowered(folder)), {**state, "position": "3"}),
        ("epoch", loaders(lowered(folder)), {**state, "epoch": 1.5}),
        ("seed", loaders(lowered(folder)), {**state, "seed": None}),
    ]
    for field, loader, wrong in cases:
        with pytest.raises(stoker.ResumeError) as raised:
            loader.load_state_dict(wrong)
        error = raised.value
        assert error.field == field
        assert repr(error.in_state) in str(error) and repr(error.here) in str(error)
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.field, copy.in_state, copy.here) == (field, error.in_state, error.here)
        assert len(list(loader)) == len(loader), "it is as it was"


def test_a_source_is_its_names_and_labels(folder: Path, tmp_path: Path) -> None:
    def source(dataset: Any) -> str:
        return str(saved(loaders(dataset))["source"])

    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    there = tmp_path / "moved" / "elsewhere"
    shutil.copytree(folder, there)
    for path in there.rglob("*.*"):
        os.utime(path, (1, 1))
    moved = torchvision.datasets.ImageFolder(there, TRAIN)
    assert source(moved) == source(dataset) == source(stoker.ImageFolder(there, TRAIN))
    path = Path(moved.samples[4][0])
    path.rename(path.with_stem("other"))
    assert source(torchvision.datasets.ImageFolder(there, TRAIN)) != source(dataset)
    parts = [source(Subset(dataset, list(part))) for part in ((0, 1), (1, 0), (0, 2), range(2))]
    assert len(set(parts)) == 3 and parts[0] == parts[3]
    assert saved(loaders(Values()))["source"] is None


def test_what_is_left_out_belongs_to_the_source(folder: Path) -> None:
    for dataset in (lowered(folder), Values()):
        given: dict[str, Any] = {"exclude": [1, 4], "num_workers": 0}
        whole, first, again = (loaders(dataset, **given) for _ in range(3))
        batches = flat(islice(iter(first), 3))
        state = saved(first)
        assert state["samples"] == SAMPLES - 2
        again.load_state_dict(state)
        assert batches + flat(again) == flat(whole)
        with pytest.raises(stoker.ResumeError, match="source"):
            loaders(dataset, exclude=[1, 5]).load_state_dict(state)
        with pytest.raises(stoker.ResumeError, match="samples is 15 in the state and 17 here"):
            loaders(dataset).load_state_dict(state)


def test_shards_and_databases(folder: Path, tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    paths = [path for path, _ in torchvision.datasets.ImageFolder(folder).samples]
    for number in range(2):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for i in range(number, SAMPLES, 2):
                label = tmp_path / f"{i:04}.cls"
                label.write_text(str(i))
                tar.add(paths[i], f"{i:04}{Path(paths[i]).suffix}")
                tar.add(label, label.name)
    caffe = tmp_path / "images.lmdb"
    with lmdb.open(str(caffe), map_size=1 << 24) as environment, environment.begin(write=True) as t:
        for i, path in enumerate(paths):
            t.put(f"{i:04}".encode(), Path(path).read_bytes())
    for name in ("{0..1}.tar", "images.lmdb"):
        dataset = stoker.open(tmp_path / name, TRAIN)
        whole = flat(loaders(dataset, num_workers=1))
        first = loaders(dataset, num_workers=1)
        batches = flat(islice(iter(first), 2))
        again = loaders(stoker.open(tmp_path / name, TRAIN), num_workers=1, batch_size=4)
        state = saved(first)
        assert state["source"]
        again.load_state_dict(state)
        assert batches + flat(again) == whole
        assert len(whole) == SAMPLES


# Samplers of the user's


@pytest.mark.parametrize("workers", [0, 1])
def test_a_distributed_sampler_is_skipped_forward(folder: Path, workers: int) -> None:
    def loader(size: int = 2, world: int = 2) -> Any:
        sampler: Any = DistributedSampler(Values(), world, 1, seed=3)
        return stoker.DataLoader(
            lowered(folder), size, sampler=sampler, num_workers=workers, seed=5
        )

    whole, first, again = loader(), loader(), loader()
    epochs = []
    for epoch in (0, 1):
        whole.set_epoch(epoch)
        epochs.append(flat(whole))
    first.set_epoch(1)
    batches = flat(islice(iter(first), 3))
    state = saved(first)
    assert (state["batches"], state["batch_size"], state["world"]) == (3, 2, 1)
    again.load_state_dict(state)
    assert saved(again) == state and len(again) == 5
    again.set_epoch(1)
    assert batches + flat(again) == epochs[1]
    assert (saved(again)["epoch"], saved(again)["batches"]) == (2, 0)
    with pytest.raises(stoker.ResumeError, match="batch_size is 2 in the state and 4 here"):
        loader(4).load_state_dict(state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "3")
        with pytest.raises(stoker.ResumeError, match="world is 1 in the state and 3 here"):
            loader().load_state_dict(state)
    # At the end, with and without another epoch being set before the first batch is asked for.
    state["batches"] = 5
    again.load_state_dict(state)
    assert flat(again) == []
    again.load_state_dict(state)
    iterator = iter(again)
    again.sampler.set_epoch(0)
    assert flat(iterator) == epochs[0]


def test_a_sampler_that_was_never_told_its_epoch() -> None:
    def loader() -> Any:
        sampler: Any = DistributedSampler(Values(), 2, 1, seed=3)
        return stoker.DataLoader(Values(), 2, sampler=sampler, num_workers=0, seed=5)

    whole, first = loader(), loader()
    with pytest.warns(stoker.StokerWarning, match="comes again"):
        epochs = [flat(whole) for _ in range(2)]
    list(first)
    with pytest.warns(stoker.StokerWarning, match="comes again"):
        batches = flat(islice(iter(first), 2))
    again = loader()
    again.load_state_dict(saved(first))
    assert batches + flat(again) == epochs[1]


class Uneven(BatchSampler):
    """Batches of 1, 2, 3, ..."""

    def __init__(self) -> None:
        super().__init__(range(15), 1, False)

    def __iter__(self) -> Any:
        return iter([list(range(n * (n + 1) // 2, n * (n + 3) // 2 + 1)) for n in range(5)])

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize("given", [{"batch_sampler": Uneven()}, {"sampler": [3, 1, 1, 2, 0]}])
def test_other_samplers_are_skipped_forward(given: dict[str, Any]) -> None:
    def loader() -> Any:
        return stoker.DataLoader(Values(), num_workers=0, seed=5, **given)

    whole = flat(loader())
    first = loader()
    batches = flat(islice(iter(first), 3))
    again = loader()
    again.load_state_dict(saved(first))
    assert batches + flat(again) == whole, "repeats have draws of their own, by their positions"


def test_our_sampler_in_a_batch_sampler_of_the_users() -> None:
    def loader() -> Any:
        sampler = OrderedRandomSampler(Values(), seed=2)
        return stoker.DataLoader(Values(), batch_sampler=Sorted(sampler, 4, False), num_workers=0)

    whole, first, again = loader(), loader(), loader()
    epochs = [flat(whole) for _ in range(2)]
    list(first)
    batches = flat(islice(iter(first), 2))
    again.load_state_dict(saved(first))
    assert batches + flat(again) == epochs[1]


class Sorted(BatchSampler):
    def __iter__(self) -> Any:
        return map(sorted, super().__iter__())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "given"),
    [(Stream(), {}), (Values(), {"randomness": "torch"})],
    ids=["stream", "torch's order"],
)
def test_torchs_order_has_no_position(dataset: Any, given: Any) -> None:
    loader = stoker.DataLoader(dataset, 2, num_workers=0, **given)
    next(iter(loader))
    state = saved(loader)
    with pytest.warns(stoker.StokerWarning, match="begins anew"):
        loader.load_state_dict(state)
    assert len(list(loader)) > 1
    with pytest.raises(stoker.ResumeError):
        stoker.DataLoader(Values()).load_state_dict(state)


# Errors


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["lowered", "recorded"])
def test_a_batch_that_raised_comes_again(folder: Path, kind: str, workers: int) -> None:
    dataset = dataset_of(kind, folder)
    bad = Order(SAMPLES, 5, True).indices(0, 4, 5)[0]
    if kind == "lowered":
        good, dataset.samples[bad] = dataset.samples[bad], ("gone.jpg", int(bad))
    else:
        good, dataset.paths[bad] = dataset.paths[bad], "gone.jpg"
    loader = loaders(dataset, num_workers=workers)
    iterator = iter(loader)
    taken = flat([next(iterator)])
    with pytest.raises(OSError, match="gone"):
        next(iterator)
    state = saved(loader)
    assert state["position"] == BATCH
    next(iterator)
    assert saved(loader)["position"] == 3 * BATCH, "it was left out"
    if kind == "lowered":
        state["source"] = None  # it changed, and so it should
        dataset.samples[bad] = good
    else:
        dataset.paths[bad] = good
    again = loaders(dataset, num_workers=workers)
    again.load_state_dict(state)
    assert taken + flat(again) == flat(loaders(dataset, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_skipped_samples_survive(folder: Path, workers: int, monkeypatch: Any) -> None:
    dataset = lowered(folder)
    for bad in (3, 8, 9):
        dataset.samples[bad] = (f"{bad}.gone", bad)
    given: dict[str, Any] = {"shard": True, "on_error": "skip", "num_workers": workers}
    served: dict[int, list[Any]] = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        whole, first, again = (loaders(dataset, **given) for _ in range(3))
        steps = [flat([batch]) for batch in whole]
        assert len(steps) == len(whole) == 3
        batches = [flat([batch]) for batch in islice(iter(first), 1)]
        state = saved(first)
        assert state["position"] == 6
        again.load_state_dict(state)
        assert batches + [flat([batch]) for batch in again] == steps
        served[rank] = [sample for step in steps for sample in step]
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    alone = flat(loaders(dataset, **given))
    assert [served[i % 2][i // 2] for i in range(SAMPLES)] == alone


def test_batches_out_of_order_are_told() -> None:
    epochs = Epochs(OrderedRandomSampler(Values(), seed=1), None, 1, None)
    batches = OrderedBatches(Order(SAMPLES, 1, True), 0, Share(SAMPLES, batch_size=3))
    epochs.own.begin_epoch()  # type: ignore[union-attr]
    epochs.progress = progress = Progress(batches, in_order=False)
    progress.handed(0)
    assert epochs.state(Values()).position == 3
    progress.handed(2)
    with pytest.warns(stoker.StokerWarning, match="in_order=False: 1 batches"):
        assert epochs.state(Values()).position == 3
    progress.handed(1)
    assert epochs.state(Values()).position == 9


# Cost


class Huge(Dataset[Any]):
    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: int) -> int:
        return index


def test_no_position_costs_more_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, drawn = [], Order.drawn

    def counted(self: Order, epoch: int, positions: Any) -> Any:
        computed.append(len(positions))
        return drawn(self, epoch, positions)

    monkeypatch.setattr(Order, "drawn", counted)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    position = 9 * 10**11
    loader = stoker.DataLoader(Huge(), 256, shuffle=True, shard=True, num_workers=0)
    state = {**saved(loader), "position": position, "epoch": 7}
    next(iter(loader))
    computed.clear()
    tracemalloc.start()
    try:
        again = stoker.DataLoader(Huge(), 256, shuffle=True, shard=True, num_workers=0)
        again.load_state_dict(state)
        iterator = iter(again)
        indices = next(iterator)
        after = saved(again)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expected = Order(10**12, 0, True).at(7, position + 3 + 8 * np.arange(256))
    assert indices.tolist() == expected.tolist()
    assert after["position"] == position + 8 * 256
    assert computed[:-1] == [256]
    assert peak < 10 * 2**20
    assert len(again) == -(-(10**12) // 8 // 256)


# Frameworks

lightning = pytest.importorskip("lightning")
quiet = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*number of training batches",
    "ignore:.*have no .val_dataloader",
    "ignore:.*isinstance.treespec, LeafSpec.",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


class Model(lightning.LightningModule):  # type: ignore[misc, name-defined] # untyped
    """Keeps what it was given, and saves once."""

    def __init__(self, save_at: Any, place: Path) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3 * 20 * 20, 1)
        self.save_at, self.place = save_at, place
        self.seen: list[tuple[int, Any]] = []

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen.append((self.current_epoch, flat([batch])))
        return self.linear(batch[0].flatten(1)).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.save_at == (self.current_epoch, index):
            self.trainer.save_checkpoint(self.place)

    def on_train_epoch_end(self) -> None:
        if self.save_at == (self.current_epoch, "end"):
            self.trainer.save_checkpoint(self.place)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def fitted(model: Model, loader: Any, **given: Any) -> list[Any]:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=3,
    )
    trainer.fit(model, loader, **given)
    return model.seen


@quiet
@pytest.mark.parametrize("sampler", [False, True], ids=["shuffle", "DistributedSampler"])
@pytest.mark.parametrize("save_at", [(0, 1), (1, 2), (1, 5), (0, "end"), (1, "end")], ids=str)
def test_lightning_resumes(folder: Path, tmp_path: Path, save_at: Any, sampler: bool) -> None:
    dataset = lowered(folder)

    def loader() -> Any:
        if sampler:
            own: Any = DistributedSampler(dataset, 1, 0, seed=2)
            return loaders(dataset, shuffle=None, sampler=own, num_workers=1)
        return loaders(dataset, num_workers=1, persistent_workers=True)

    place = tmp_path / "checkpoint"
    whole = fitted(Model(save_at, place), loader())
    assert len(whole) == 18
    rest = fitted(Model(None, place), loader(), ckpt_path=place)
    epoch, batch = save_at
    done = epoch * 6 + (6 if batch == "end" else batch + 1)
    assert rest == whole[done:]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("taken", [0, 2, 5])
def test_accelerate_resumes(folder: Path, tmp_path: Path, taken: int, workers: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    dataset = Recorded(folder)

    def prepared(seed: int | None = 5) -> Any:
        return stoker.accelerate(
            accelerator.prepare(loaders(dataset, num_workers=workers, seed=seed))
        )

    def indices(batches: Any) -> list[int]:
        return [int(y) for _, labels in batches for y in labels]

    whole, first = prepared(), prepared()
    epochs = [indices(whole) for _ in range(3)]
    orders = [Order(SAMPLES, 5, True).indices(n, 0, SAMPLES).tolist() for n in range(3)]
    assert epochs == orders
    assert indices(first) == epochs[0]
    assert (saved(first)["epoch"], saved(first)["batches"]) == (1, 0)
    batches = indices(islice(first, taken))
    state = saved(first)
    assert (state["epoch"], state["batches"]) == (1, taken)
    for again in (prepared(), prepared(seed=None)):
        again.load_state_dict(state)
        assert len(again) == 6 and saved(again) == {k: state[k] for k in saved(again)}
        assert batches + indices(again) == epochs[1]
        assert indices(again) == epochs[2]
    last = None
    for _ in first:
        last = saved(first)
    assert last is not None and (last["epoch"], last["batches"]) == (2, 0)
    if taken:
        with pytest.raises(stoker.ResumeError, match="seed"):
            prepared(6).load_state_dict(state)


@pytest.mark.parametrize("rank", [0, 1])
def test_accelerate_resumes_one_of_two_processes(folder: Path, rank: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    skip = accelerate.skip_first_batches

    def prepared(skipped: int = 0) -> Any:
        loader = accelerate.data_loader.prepare_data_loader(
            loaders(Recorded(folder), num_workers=0),
            num_processes=2,
            process_index=rank,
            put_on_device=False,
        )
        return stoker.accelerate(skip(loader, skipped) if skipped else loader)

    whole = [y.tolist() for _, y in prepared()]
    assert len(whole) == 3
    first = prepared(skipped=1)
    assert saved(first)["batches"] == 1
    batches = [y.tolist() for _, y in islice(first, 1)]
    assert batches == whole[1:2] and saved(first)["batches"] == 2
    for again in (prepared(), prepared(skipped=1)):
        again.load_state_dict(saved(first))
        assert [y.tolist() for _, y in again] == whole[2:]


def test_accelerate_takes_the_state_into_its_checkpoints(folder: Path, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    loader = stoker.accelerate(accelerator.prepare(loaders(Recorded(folder), num_workers=0)))
    accelerator.register_for_checkpointing(loader)
    batches = [y.tolist() for _, y in islice(loader, 2)]
    accelerator.save_state(str(tmp_path))
    rest = [y.tolist() for _, y in loader]
    assert len(rest) == 6, "the next epoch, without a restart"
    accelerator.load_state(str(tmp_path))
    rest = [y.tolist() for _, y in loader]
    order = Order(SAMPLES, 5, True).indices(0, 0, SAMPLES).tolist()
    assert [index for batch in batches + rest for index in batch] == order


def test_accelerate_is_not_to_shard_twice(folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = accelerate.Accelerator(cpu=True).prepare(loaders(Recorded(folder), shard=True))
    with pytest.warns(stoker.StokerWarning, match="leave shard out"):
        stoker.accelerate(loader)


def test_accelerate_with_a_stream_has_no_state() -> None:
    accelerate = pytest.importorskip("accelerate")
    loader = accelerate.Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(Stream()))
    loader = stoker.accelerate(loader)
    assert not hasattr(loader, "dl_state_dict") and len(list(loader)) == 3


def test_accelerate_with_torchs_random_sampler_is_warned_of(folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    dataset: Any = Recorded(folder)
    loader = stoker.accelerate(
        accelerator.prepare(
            torch.utils.data.DataLoader(dataset, BATCH, sampler=RandomSampler(dataset))
        )
    )
    next(iter(loader))
    state = saved(loader)
    with pytest.warns(stoker.StokerWarning, match="RandomSampler"):
        loader.load_state_dict(state)


def test_nothing_is_warned_of_on_the_ordinary_way() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = loaders(Values())
        for epoch in range(3):
            loader.set_epoch(epoch)
            for _ in loader:
                loader.state_dict()
            loader.load_state_dict(saved(loader))
