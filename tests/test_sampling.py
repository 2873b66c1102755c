"""Weighted, balanced, mixed, repeated and run-wise orders in real loaders, ranks and restarts."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections import Counter
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torchvision import transforms as T

import stoker
from pictures import class_folder
from stoker import order as order_module
from stoker import sampling
from stoker.draws import Draw, seed_generators
from stoker.rules import ByRuns
from stoker.samplers import OrderedSampler, ShardedSampler
from test_sharding import Recorded, Values
from test_sharding import on_rank as on_rank  # a fixture

SAMPLES, SHARDS, PARTS = 24, 4, (5, 19)
TRAIN = T.Compose([T.RandomResizedCrop(20), T.RandomHorizontalFlip(), T.ToTensor()])
WEIGHTS = [0.0, 1.0, 5.0] * 8
CLASSES = [0] * 3 + [1] * 14 + [2] * 7

DESCRIPTIONS: dict[str, Callable[[], Any]] = {
    "runs": lambda: stoker.Runs(window=8, strands=2),
    "weighted": lambda: stoker.Weighted(WEIGHTS, num_samples=31),
    "balanced": lambda: stoker.ClassBalanced(CLASSES),
    "mixture": lambda: stoker.Mixture([2, 1], num_samples=29),
    "repeated": lambda: stoker.RepeatedAugmentation(3, num_samples=40),
}
EACH = pytest.mark.parametrize("name", DESCRIPTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("folder"), SAMPLES)


@pytest.fixture(scope="module")
def shards(folder: Path) -> Path:
    """Four tar shards of six samples; the label of a sample is its index."""
    place = folder.parent / "shards"
    place.mkdir(exist_ok=True)
    paths = [path for path, _ in torchvision.datasets.ImageFolder(folder).samples]
    for number in range(SHARDS):
        with tarfile.open(place / f"{number}.tar", "w") as tar:
            for i in range(number * 6, number * 6 + 6):
                tar.add(paths[i], f"{i:04}{Path(paths[i]).suffix}")
                label = tarfile.TarInfo(f"{i:04}.cls")
                label.size = len(str(i))
                tar.addfile(label, io.BytesIO(str(i).encode()))
    return place


def dataset_of(name: str, tier: str, folder: Path, shards: Path) -> Any:
    if name == "mixture":
        whole: Any = Recorded(folder) if tier == "recorded" else stoker.ImageFolder(folder, TRAIN)
        parts: list[Any] = [Subset(whole, range(samples)) for samples in PARTS]
        return ConcatDataset(parts)
    if tier == "recorded" and name != "runs":
        return Recorded(folder)
    return stoker.open(str(shards / "{0..3}.tar"), TRAIN)


def loader_of(dataset: Any, given: Any, **options: Any) -> Any:
    options = {"batch_size": 3, "seed": 5, "num_workers": 0, **options}
    return stoker.DataLoader(dataset, sampler=given, **options)


def keyed_sample(dataset: Any, epoch: int, index: int, draw: int) -> Any:
    """The definition: dataset[index] with all generators seeded by the key."""
    kept = torch.get_rng_state()
    seed_generators(int(order_module.keys(5, epoch, np.array([index]), draw)[0]))
    image = dataset[index][0]
    torch.set_rng_state(kept)
    return image


def expected(loader: Any, epoch: int) -> list[tuple[int, int]]:
    """Index and draw of each position."""
    order = loader.sampler.order
    indices, draws = order.drawn(epoch, np.arange(order.samples))
    return list(zip(indices.tolist(), np.broadcast_to(draws, indices.shape).tolist(), strict=True))


def same(images: list[Any], dataset: Any, epoch: int, wanted: list[tuple[int, int]]) -> bool:
    return len(images) == len(wanted) and all(
        torch.equal(image, keyed_sample(dataset, epoch, *pair))
        for image, pair in zip(images, wanted, strict=True)
    )


def images_of(batches: Any) -> list[Any]:
    return [image for batch in batches for image in batch[0]]


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        (name, tier)
        for name in DESCRIPTIONS
        for tier in ("lowered", "recorded", "keyed")
        if (name, tier) != ("runs", "recorded")  # a user's dataset has no runs that are known
    ],
)
@pytest.mark.filterwarnings("ignore:num_workers")
def test_every_tier_serves_the_order_under_its_keys(
    name: str, tier: str, folder: Path, shards: Path
) -> None:
    dataset = dataset_of(name, tier, folder, shards)
    options = {"tier": "stock"} if tier == "keyed" else {}
    loader = loader_of(dataset, DESCRIPTIONS[name](), num_workers=1, **options)
    assert len(loader) == -(-loader.sampler.order.samples // 3)
    for epoch in range(2):
        wanted = expected(loader, epoch)
        assert same(images_of(loader), dataset, epoch, wanted)
    assert expected(loader, 0) != expected(loader, 1)
    assert loader.explain().tier == tier
    loader.close()


@EACH
@pytest.mark.parametrize("kind", ["lowered", "keyed"])
def test_ranks_share_it_and_others_go_on(
    name: str, kind: str, folder: Path, shards: Path, on_rank: Any
) -> None:
    """Two ranks do two steps; three ranks with another batch size serve the rest, each once."""
    dataset = dataset_of(name, kind, folder, shards)
    options = {"tier": "stock"} if kind == "keyed" else {}
    served: dict[int, Any] = {}
    states, begun = [], 0

    def take(loader: Any, rank: int, world: int, steps: int | None) -> None:
        loader.set_epoch(1)
        for step, (images, *_, valid) in enumerate(islice(loader, steps)):
            at = begun + rank + world * (step * loader.batch_size + np.arange(len(images)))
            for position, image in zip(at[valid.numpy()].tolist(), images[valid], strict=True):
                assert position not in served
                served[position] = image

    for rank in range(2):
        on_rank(rank, 2)
        loader = loader_of(dataset, DESCRIPTIONS[name](), shard=True, uneven="exact", **options)
        assert type(loader.sampler) is ShardedSampler
        take(loader, rank, 2, 2)
        text = json.dumps(loader.state_dict())
        assert len(text) < 400
        states.append(json.loads(text))
    assert states[0] == states[1]
    begun = states[0]["position"]
    assert begun == 12
    for rank in range(3):
        on_rank(rank, 3)
        loader = loader_of(
            dataset, DESCRIPTIONS[name](), batch_size=4, shard=True, uneven="exact", **options
        )
        loader.load_state_dict(states[0])
        take(loader, rank, 3, None)
    wanted = expected(loader, 1)
    assert sorted(served) == list(range(len(wanted)))
    assert same([served[position] for position in sorted(served)], dataset, 1, wanted)


@EACH
def test_goes_on_in_mid_epoch_in_one_process(name: str, folder: Path, shards: Path) -> None:
    dataset = dataset_of(name, "lowered", folder, shards)
    first = loader_of(dataset, DESCRIPTIONS[name]())
    first.set_epoch(1)
    whole = images_of(first)
    first = loader_of(dataset, DESCRIPTIONS[name]())
    list(first)
    list(islice(first, 3))
    state = json.loads(json.dumps(first.state_dict()))
    assert state["order"].startswith(name)
    again = loader_of(dataset, DESCRIPTIONS[name](), batch_size=5, num_workers=1, seed=None)
    again.load_state_dict(state)
    rest = images_of(again)
    assert len(rest) == len(whole) - 9
    assert all(torch.equal(a, b) for a, b in zip(rest, whole[9:], strict=True))


OTHERS: list[tuple[str, Any, Any, str]] = [
    ("runs", None, {"order": "full"}, "order"),
    ("runs", stoker.Runs(window=9, strands=2), {}, "order"),
    ("runs", stoker.Runs(window=8, strands=3), {}, "order"),
    ("weighted", stoker.Weighted([0.0, 1.0, 5.5] * 8, 31), {}, "order"),
    ("weighted", stoker.Weighted(WEIGHTS, 30), {}, "samples"),
    ("balanced", stoker.ClassBalanced([0] * 4 + CLASSES[4:]), {}, "order"),
    ("balanced", None, {"shuffle": True}, "order"),
    ("mixture", stoker.Mixture([1, 1], num_samples=29), {}, "order"),
    ("repeated", stoker.RepeatedAugmentation(2, num_samples=40), {}, "order"),
    ("repeated", stoker.RepeatedAugmentation(3, 40, shuffle=False), {}, "order"),
]


@pytest.mark.parametrize(("name", "other", "options", "field"), OTHERS)
@pytest.mark.parametrize("shard", [False, True])
def test_other_orders_are_refused(
    name: str, other: Any, options: Any, field: str, shard: bool, folder: Path, shards: Path
) -> None:
    dataset = dataset_of(name, "lowered", folder, shards)
    loaders = [
        loader_of(dataset, DESCRIPTIONS[name](), shard=shard),
        loader_of(dataset, other, shard=shard, **options),
    ]
    for one, two in (loaders, loaders[::-1]):
        with pytest.raises(stoker.ResumeError, match=field) as caught:
            two.load_state_dict(one.state_dict())
        assert caught.value.field == field
        assert caught.value.in_state != caught.value.here


@EACH
def test_samples_that_are_excluded_do_not_come(name: str, folder: Path, shards: Path) -> None:
    dataset = dataset_of(name, "lowered", folder, shards)
    out = [1, 2, 6, 23]
    loader = loader_of(dataset, DESCRIPTIONS[name](), exclude=out)
    wanted = expected(loader, 0)
    served = Counter(index for index, _ in wanted)
    assert not served.keys() & set(out)
    assert same(images_of(loader), dataset, 0, wanted)
    if name == "runs":
        assert served == Counter(set(range(SAMPLES)) - set(out))
    if name == "weighted":
        assert {WEIGHTS[index] for index in served} == {1.0, 5.0}
    if name == "balanced":
        classes = Counter(CLASSES[index] for index in served.elements())
        assert len(wanted) == 20 and set(classes.values()) == {6, 7}
    if name == "mixture":
        assert sum(served[index] for index in range(5)) in (19, 20)
    if name == "repeated":
        assert set(served.values()) <= {3, 1} and len(served) == 14
    other = loader_of(dataset, DESCRIPTIONS[name]())
    assert loader.state_dict()["order"] != other.state_dict()["order"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", [name for name in DESCRIPTIONS if name != "runs"])
def test_the_next_of_the_order_takes_a_bad_ones_place(name: str, workers: int) -> None:
    class Bad(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            if index % 4 == 2:
                raise OSError("broken")
            return index

    bad: Any = ConcatDataset([Bad()]) if name == "mixture" else Bad()
    given = DESCRIPTIONS[name]()
    if name == "mixture":
        given = stoker.Mixture([1], num_samples=29)
    loader = loader_of(bad, given, num_workers=workers, on_error="skip", tier="stock")
    wanted = [index for index, _ in expected(loader, 0)]
    found = torch.cat(list(loader)).tolist()
    for place, index in enumerate(wanted):
        after = [*wanted[place:], *wanted]
        assert found[place] == next(i for i in after if i % 4 != 2), index


def test_draws_are_sent_to_workers_without_tables() -> None:
    given = stoker.Weighted(np.ones(200_000))
    loader = loader_of(Values(200_000), given, tier="stock")
    order = loader.sampler.order
    positions = np.arange(4)
    draw = Draw(5, 0, positions, order.at(0, positions), 0, order)
    assert len(pickle.dumps(draw)) < 2000
    assert len(pickle.dumps(order)) > 10**6
    assert len(json.dumps(loader.state_dict())) < 400


# What each of them means, in a loader


def test_runs_over_shards(shards: Path) -> None:
    dataset = stoker.open(str(shards / "{0..3}.tar"), TRAIN)
    loader = loader_of(dataset, None, order="runs", batch_size=None)
    assert isinstance(loader.sampler, OrderedSampler)
    assert sorted(loader.sampler) == list(range(SAMPLES))
    loader = loader_of(dataset, stoker.Runs(window=1))
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        shard = [index // 6 for index in loader.sampler]
        assert [shard[i] for i in range(0, 24, 6)] == list(dict.fromkeys(shard))
        assert list(loader.sampler) != list(range(SAMPLES))
    # Parts of it in any order, and several of it, have the same runs.
    chosen = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))[:17]
    subset: Any = Subset(dataset, chosen.tolist())
    joined: Any = ConcatDataset([subset, dataset])
    for data, samples in ((subset, 17), (joined, 17 + SAMPLES)):
        rule = stoker.Runs(window=1).rule(data, None)
        order = rule.drawn(5, 0, np.arange(samples))[0].tolist()
        assert sorted(order) == list(range(samples))
        index = [int(chosen[i]) if i < 17 else i - 17 for i in order]
        shard = [(i >= 17, index[place] // 6) for place, i in enumerate(order)]
        changes = sum(a != b for a, b in pairwise(shard))
        assert changes == len(set(shard)) - 1


def test_large_shards_are_several_runs(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = stoker.open(str(shards / "0.tar"), TRAIN)
    whole = stoker.Runs().rule(dataset, None)
    assert isinstance(whole, ByRuns) and whole.starts.tolist() == [0, 6]
    extents = dataset.files.extents
    assert extents is not None
    size = int((extents.begin + extents.length).max())
    monkeypatch.setattr(sampling, "_SMALLEST_RUN_BYTES", size // 3 + 1)
    third = stoker.Runs().rule(dataset, None)
    assert isinstance(third, ByRuns)
    runs = len(third.starts) - 1
    assert 2 <= runs <= 3 and third.starts[-1] == 6
    monkeypatch.setattr(sampling, "_SMALLEST_RUN_BYTES", 1)
    monkeypatch.setattr(sampling, "_LARGEST_RUN_BYTES", 1)
    single = stoker.Runs().rule(dataset, None)
    assert isinstance(single, ByRuns) and single.starts.tolist() == list(range(7))


def test_no_runs_no_order_by_runs(folder: Path) -> None:
    for dataset in (stoker.ImageFolder(folder, TRAIN), Values(), TensorDataset(torch.arange(4))):
        with pytest.raises(ValueError, match=r"samples in shards.*order='full'"):
            stoker.DataLoader(dataset, order="runs")


def test_class_balance_by_the_datasets_own_labels(folder: Path) -> None:
    own = stoker.ImageFolder(folder, TRAIN)
    theirs = torchvision.datasets.ImageFolder(folder, TRAIN)
    few = [i for i, (_, label) in enumerate(theirs.samples) if label != 1 or i % 5 == 0]
    targets = torch.tensor(theirs.targets)
    with_targets: Any = Values()
    with_targets.samples, with_targets.targets = SAMPLES, targets
    for dataset in (Subset(own, few), Subset(theirs, few), Subset(with_targets, few)):
        loader = loader_of(dataset, stoker.ClassBalanced(num_samples=90))
        counts = Counter(theirs.targets[few[index]] for index in loader.sampler)
        assert counts == {0: 30, 1: 30, 2: 30}
    joined: Any = ConcatDataset([own, with_targets])
    assert sampling.labels_of(joined).tolist() == theirs.targets * 2
    with pytest.raises(ValueError, match="labels of Values are not known: give labels"):
        loader_of(Values(), stoker.ClassBalanced())


def test_classes_of_few_samples_in_an_epoch_take_turns() -> None:
    loader = loader_of(Values(100), stoker.ClassBalanced(np.arange(100) // 5, num_samples=7))
    seen = Counter[int]()
    for epoch in range(400):
        loader.sampler.set_epoch(epoch)
        classes = [index // 5 for index in loader.sampler]
        assert len(set(classes)) == 7
        seen.update(classes)
    # 7 of 20 classes in each of 400 epochs: 140, give or take 5 deviations of less than 9.6 each.
    assert all(abs(seen[one] - 140) < 48 for one in range(20))


def test_repeats_are_on_different_ranks_at_the_same_step(on_rank: Any) -> None:
    steps: list[list[Any]] = [[] for _ in range(4)]
    for rank in range(3):
        on_rank(rank, 3)
        loader = loader_of(
            Values(12), stoker.RepeatedAugmentation(3, num_samples=36), shard=True, tier="stock"
        )
        for step, (values, indices) in enumerate(loader):
            steps[step] += zip(values[:, 0].tolist(), indices.tolist(), strict=True)
    for served in steps:
        assert len(served) == 9
        assert set(Counter(index for _, index in served).values()) == {3}
        assert len({value for value, _ in served}) == 9
    assert sorted(index for served in steps for _, index in served) == sorted([*range(12)] * 3)
    assert len(loader_of(Values(12), stoker.RepeatedAugmentation())) == 4


def test_weights_as_torch_takes_them() -> None:
    weights = [0.5, 0, 3]
    found = []
    for given in (weights, tuple(weights), np.array(weights), torch.tensor(weights)):
        loader = loader_of(Values(3), stoker.Weighted(given, num_samples=300))
        found.append(list(loader.sampler))
        assert 1 not in found[-1]
    assert all(other == found[0] for other in found)
    assert len(loader_of(Values(3), stoker.Weighted(weights), batch_size=1)) == 3
    kept = np.array(weights)
    loader = loader_of(Values(3), stoker.Weighted(kept, num_samples=300))
    kept[:] = [0, 1, 0]
    assert list(loader.sampler) == found[0], "what is done to the array later must not count"


def test_filter(folder: Path, shards: Path) -> None:
    dataset = stoker.ImageFolder(folder, TRAIN)
    kept = stoker.filter(dataset, lambda name, label: label == 2 and not name.endswith(".png"))
    paths = [dataset.samples[index][0] for index in kept.indices]
    every = [path for path, _ in dataset.samples]
    assert paths == [p for p in every if "/class_2/" in p and not p.endswith(".png")]
    loader = stoker.DataLoader(kept, 4, True, num_workers=0, seed=1)
    assert loader.explain().tier == "lowered"
    assert {int(label) for _, labels in loader for label in labels} == {2}
    again = stoker.filter(kept, lambda name, label: name.endswith(".webp"))
    assert [kept.indices[i] for i in again.indices] == [
        i for i in kept.indices if dataset.samples[i][0].endswith(".webp")
    ]
    other = stoker.DataLoader(
        Subset(dataset, [i for i in range(24) if i % 3 == 1][:7]), 4, True, num_workers=0, seed=1
    )
    with pytest.raises(stoker.ResumeError, match="source"):
        other.load_state_dict(loader.state_dict())
    tar = stoker.open(str(shards / "{0..3}.tar"), TRAIN)
    assert stoker.filter(tar, lambda name, label: name < "0003").indices.tolist() == [0, 1, 2]  # type: ignore[attr-defined] # an array
    with pytest.raises(ValueError, match="names of Values are not known"):
        stoker.filter(Values(), lambda name, label: True)


def test_a_mixture_of_shards_is_lowered(folder: Path, shards: Path) -> None:
    parts: list[Any] = [
        stoker.open(str(shards / "{0..1}.tar"), TRAIN),
        Subset(stoker.open(str(shards / "3.tar"), TRAIN), [5, 0, 2]),
        stoker.open(str(shards / "2.tar"), TRAIN),
    ]
    dataset: Any = ConcatDataset(parts)
    loader = loader_of(dataset, stoker.Mixture([1, 2, 0], num_samples=30), num_workers=1)
    wanted = expected(loader, 0)
    counts = Counter(int(np.searchsorted([12, 15], index, "right")) for index, _ in wanted)
    assert counts == {0: 10, 1: 20}
    batches = list(loader)
    assert loader.explain().tier == "lowered"
    assert same(images_of(batches), dataset, 0, wanted)
    labels = torch.cat([labels for _, labels in batches]).tolist()
    assert labels == [[*range(12), 23, 18, 20][index] for index, _ in wanted]
    other: Any = ConcatDataset([parts[0], stoker.ImageFolder(folder, TRAIN)])
    assert loader_of(other, stoker.Mixture([1, 1])).explain().tier == "traced"


# Loaders and frameworks


@EACH
def test_a_loader_that_is_built_anew_from_its_parts(name: str, folder: Path, shards: Path) -> None:
    dataset = dataset_of(name, "lowered", folder, shards)
    loader = loader_of(dataset, DESCRIPTIONS[name]())
    whole = images_of(loader)
    for arguments in (
        {"batch_size": 3, "sampler": loader.sampler},
        {"batch_sampler": loader.batch_sampler},
        {"batch_size": 3, "sampler": pickle.loads(pickle.dumps(loader.sampler))},
    ):
        again = stoker.DataLoader(dataset, num_workers=0, **arguments)
        again.set_epoch(0)
        assert all(torch.equal(a, b) for a, b in zip(images_of(again), whole, strict=True))
        assert again.state_dict()["order"] == loader.state_dict()["order"]
    indices = list(loader.sampler)
    assert not isinstance(loader.sampler, RandomSampler | SequentialSampler)
    assert len(indices) == len(loader.sampler)
    plain: Any = torch.utils.data.DataLoader(Values(), 3, sampler=loader.sampler)
    assert torch.cat([batch[1] for batch in plain]).tolist() == indices


def test_lightning_shares_it_among_ranks() -> None:
    pytest.importorskip("lightning")
    from lightning.fabric.utilities.data import _update_dataloader
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    loader = loader_of(Values(), stoker.Weighted(np.arange(17), num_samples=20), tier="stock")
    order = loader.sampler.order
    for epoch in range(2):
        served = []
        for rank in range(2):
            wrapped = DistributedSamplerWrapper(
                loader.sampler, num_replicas=2, rank=rank, shuffle=False
            )
            rebuilt: Any = _update_dataloader(loader, wrapped)
            rebuilt.set_epoch(epoch)
            served += torch.cat([indices for _, indices in rebuilt]).tolist()
        assert sorted(served) == sorted(order.indices(epoch, 0, 20).tolist())


def test_accelerate_resumes_it(folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)

    def prepared(weights: Any) -> Any:
        loader = loader_of(Recorded(folder), stoker.Weighted(weights))
        return stoker.accelerate(accelerator.prepare(loader))

    first = prepared(WEIGHTS)
    order = first.base_dataloader.batch_sampler.sampler.order
    epochs = [order.indices(epoch, 0, SAMPLES).tolist() for epoch in range(2)]
    assert [int(y) for _, labels in first for y in labels] == epochs[0]
    list(islice(first, 3))
    state = json.loads(json.dumps(first.state_dict()))
    again = prepared(WEIGHTS)
    again.load_state_dict(state)
    assert [int(y) for _, labels in again for y in labels] == epochs[1][9:]
    with pytest.raises(stoker.ResumeError, match="order"):
        prepared(WEIGHTS[::-1]).load_state_dict(state)


def test_follows_a_dataset_that_grows() -> None:
    dataset = Values(4)
    loader = loader_of(dataset, stoker.RepeatedAugmentation(2, num_samples=8), tier="stock")
    assert max(index for batch in loader for index in batch[1].tolist()) == 3
    dataset.samples = 400
    assert max(index for batch in loader for index in batch[1].tolist()) > 3
    weighted = loader_of(dataset, stoker.Weighted(np.ones(400)))
    dataset.samples = 401
    with pytest.raises(ValueError, match="400 weights for 401 samples"):
        next(iter(weighted))


def test_ranks_that_nobody_has_divided_are_warned_of(on_rank: Any) -> None:
    on_rank(1, 2)
    loader = loader_of(Values(4), stoker.Weighted(np.ones(4)))
    with pytest.warns(stoker.StokerWarning, match="give shard=True"):
        iter(loader)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_wrong_arguments(folder: Path) -> None:
    weighted = stoker.Weighted(np.ones(5))
    two: Any = ConcatDataset([Values(), Values()])
    and_none: Any = ConcatDataset([Values(), Values(0)])
    repeated = stoker.RepeatedAugmentation(3, 40)
    one = stoker.Mixture([1])
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("weights must be", lambda: stoker.Weighted([1, -1])),
        ("weights must be", lambda: stoker.Weighted([1, float("nan")])),
        ("weights must be", lambda: stoker.Weighted([1, float("inf")])),
        ("weights must be", lambda: stoker.Weighted([[1, 1]])),
        ("weights must be", lambda: stoker.Mixture([1, -1])),
        ("labels must be", lambda: stoker.ClassBalanced([0.5])),
        ("num_samples=0", lambda: stoker.Weighted([1], num_samples=0)),
        ("num_samples=True", lambda: stoker.ClassBalanced(num_samples=True)),
        ("num_repeats=0", lambda: stoker.RepeatedAugmentation(0)),
        ("window=0", lambda: stoker.Runs(window=0)),
        ("strands=0", lambda: stoker.Runs(strands=0)),
        ("no sample has any weight", lambda: loader_of(Values(2), stoker.Weighted([0, 0]))),
        ("any weight", lambda: loader_of(Values(2), stoker.Weighted([1, 0]), exclude=[0])),
        ("5 weights for 17 samples", lambda: loader_of(Values(), weighted)),
        ("5 weights for 17 samples", lambda: loader_of(Values(), weighted, shard=True)),
        ("2 labels for 17 samples", lambda: loader_of(Values(), stoker.ClassBalanced([0, 1]))),
        ("there are no samples", lambda: loader_of(Values(0), stoker.Weighted([]))),
        ("0 of 0 samples", lambda: loader_of(Values(0), stoker.ClassBalanced([]))),
        ("parts of a ConcatDataset, not of Values", lambda: loader_of(Values(), one)),
        ("1 weights for 2 parts", lambda: loader_of(two, one)),
        ("part 1 of the mixture", lambda: loader_of(and_none, stoker.Mixture([1, 1]))),
        ("num_samples=40 of 5 samples, 3", lambda: loader_of(Values(5), repeated)),
        ("Weighted and shuffle exclude", lambda: loader_of(Values(5), weighted, shuffle=True)),
        ("Weighted needs a map-style", lambda: loader_of(Values(5), weighted, randomness="torch")),
        ("Weighted needs a map-style", lambda: loader_of(Stream(), weighted)),
        ("Runs needs a map-style", lambda: loader_of(Stream(), None, order="runs")),
        ("contradict", lambda: loader_of(Values(5), None, order="runs", shuffle=False)),
        ("mutually exclusive", lambda: loader_of(Values(5), weighted, batch_sampler=[[1]])),
        ("uneven='drop' needs shard", lambda: loader_of(Values(5), weighted, uneven="drop")),
    ]
    for text, make in wrong:
        with pytest.raises(ValueError, match=text):
            make()
    no_labels = stoker.ImageFolder(folder, TRAIN)
    assert no_labels.files.labels is not None
    no_labels.files.labels[3:5] = -1
    with pytest.raises(ValueError, match="2 of 24 samples have no label"):
        loader_of(no_labels, stoker.ClassBalanced())
    assert len(loader_of(no_labels, stoker.ClassBalanced(), exclude=[3, 4], batch_size=1)) == 22
    with pytest.warns(stoker.StokerWarning, match="order='runs' has no effect"):
        loader_of(Values(5), weighted, order="runs")
    theirs: Any = DistributedSampler(Values(5), 2, 1)
    with pytest.warns(stoker.StokerWarning, match="order='runs' has no effect"):
        loader_of(Values(5), theirs, order="runs")


def test_a_batch_sampler_around_it_tells_repeats_apart() -> None:
    given = loader_of(Values(4), stoker.Weighted([0, 1, 0, 0], num_samples=6)).sampler
    batches: Any = BatchSampler(given, 3, False)

    class Own(BatchSampler):
        pass

    for batcher in (batches, Own(given, 3, False)):
        loader = stoker.DataLoader(
            Values(4), batch_sampler=batcher, num_workers=0, seed=5, tier="stock"
        )
        values = [value for batch in loader for value in batch[0][:, 0].tolist()]
        assert len(set(values)) == 6
