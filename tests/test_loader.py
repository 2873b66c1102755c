"""`stoker.DataLoader`: bits, order, epochs, errors, arguments, and what it leaves behind."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch.utils.data import BatchSampler, ConcatDataset, Dataset, Subset, WeightedRandomSampler
from torchvision import transforms as T
from torchvision.transforms import v2

import stoker
from pictures import class_folder, picture, save
from stoker import _native, machine
from stoker import order as order_module
from stoker.engine import pool_threads

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TRAIN = T.Compose(
    [T.RandomResizedCrop(48), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)]
)
VAL = T.Compose([T.Resize(64), T.CenterCrop(48), T.ToTensor(), T.Normalize(MEAN, STD)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("folder"), 40)


def keyed_sample(dataset: Any, seed: int, epoch: int, index: int, draw: int = 0) -> Any:
    """The definition: dataset[index] with all generators seeded by the key."""
    key = int(order_module.keys(seed, epoch, np.array([index]), draw)[0])
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key)
    return dataset[index]


def collected(loader: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(loader)
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def tier(loader: Any) -> str:
    return str(loader.explain().tier)


@pytest.mark.parametrize("transform", [TRAIN, VAL], ids=["train", "val"])
@pytest.mark.parametrize("workers", [0, 1, 2, 8])
@pytest.mark.filterwarnings("ignore:num_workers")
def test_bits_equal_the_definition(folder: Path, transform: Any, workers: int) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, transform)
    loader = stoker.DataLoader(dataset, batch_size=7, num_workers=workers, seed=11)
    assert tier(loader) == "lowered"
    for epoch in range(2):
        images, labels = collected(loader)
        assert len(images) == len(dataset)
        for i in range(len(dataset)):
            image, label = keyed_sample(dataset, 11, epoch, i)
            assert torch.equal(images[i], image), (epoch, i)
            assert labels[i] == label


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_tier_gives_the_same_bits(folder: Path, workers: int) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    native = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=2, seed=3)
    stock = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=workers, seed=3, tier="stock")
    assert (tier(native), tier(stock)) == ("lowered", "keyed")
    for _ in range(2):
        for ours, theirs in zip(native, stock, strict=True):
            assert isinstance(ours, list) and isinstance(theirs, list)
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_threads_batch_size_and_prefetch_change_nothing(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    seen = []
    for workers, batch_size, prefetch in ((1, 5, 2), (2, 8, 4), (2, 40, 8), (0, 3, None)):
        loader = stoker.DataLoader(
            dataset, batch_size, True, num_workers=workers, prefetch_factor=prefetch, seed=5
        )
        seen.append(collected(loader))
    for images, labels in seen[1:]:
        assert torch.equal(images, seen[0][0]) and torch.equal(labels, seen[0][1])


def test_every_index_once_per_epoch_and_orders_differ(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=1, seed=1)
    orders = []
    for _ in range(2):
        _, labels = collected(loader)
        orders.append(list(loader.sampler))  # that of the epoch that the loader is in
        assert labels.tolist() == [dataset.targets[i] for i in orders[-1]]
    assert orders[0] != orders[1]
    assert all(sorted(order) == list(range(len(dataset))) for order in orders)


def test_randomness_torch_gives_torchs_batches(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    for workers in (0, 2):
        results = []
        kinds: list[tuple[Any, dict[str, Any]]] = [
            (torch.utils.data.DataLoader, {}),
            (stoker.DataLoader, {"randomness": "torch"}),
        ]
        for kind, more in kinds:
            torch.manual_seed(4)
            results.append(collected(kind(dataset, 8, shuffle=True, num_workers=workers, **more)))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_manual_seed_repeats_a_run(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    runs = []
    for _ in range(2):
        torch.manual_seed(9)
        runs.append(collected(stoker.DataLoader(dataset, 8, shuffle=True, num_workers=1)))
    torch.manual_seed(10)
    other = collected(stoker.DataLoader(dataset, 8, shuffle=True, num_workers=1))
    assert torch.equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][0], other[0])


def test_set_epoch_and_automatic_advance(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    loader = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=1, seed=2)
    epochs = [collected(loader)[0] for _ in range(3)]
    loader.set_epoch(1)
    assert torch.equal(collected(loader)[0], epochs[1])
    assert torch.equal(collected(loader)[0], epochs[2])
    assert not torch.equal(epochs[0], epochs[1])


def test_users_generators_are_left_alone(folder: Path) -> None:
    for given in ({"num_workers": 0, "tier": "stock"}, {"num_workers": 0}, {"num_workers": 1}):
        dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
        loader = stoker.DataLoader(dataset, 8, shuffle=True, seed=0, **given)
        loader.explain()
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        expected = torch.rand(3), random.random(), np.random.rand()
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        list(loader)
        assert torch.equal(torch.rand(3), expected[0])
        assert random.random() == expected[1] and np.random.rand() == expected[2]


def test_two_iterators_and_breaking_out(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    loader = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=2, seed=0)
    whole = [collected(loader) for _ in range(3)]
    loader.set_epoch(0)
    first, second = iter(loader), iter(loader)
    a = [next(first), next(second), next(first)]
    assert torch.equal(a[0][0], whole[0][0][:8]) and torch.equal(a[2][0], whole[0][0][8:16])
    assert torch.equal(a[1][0], whole[1][0][:8])
    del first, second
    for images, _ in loader:
        assert torch.equal(images, whole[2][0][:8])
        break
    loader.set_epoch(1)
    assert torch.equal(collected(loader)[0], whole[1][0])


def test_persistent_epochs_prepare_the_next_one_and_drop_it_when_it_does_not_fit(
    folder: Path,
) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    plain = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=2, seed=0)
    epochs = [collected(plain)[0] for _ in range(4)]
    loader = stoker.DataLoader(
        dataset, 8, shuffle=True, num_workers=2, seed=0, persistent_workers=True
    )
    assert torch.equal(collected(loader)[0], epochs[0])
    assert loader._ahead and loader._ahead[0]._jobs
    assert torch.equal(collected(loader)[0], epochs[1])
    loader.set_epoch(3)
    assert torch.equal(collected(loader)[0], epochs[3])
    dataset.transform = VAL
    images = collected(loader)[0]
    expected = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=1, seed=0)
    expected.set_epoch(4)
    assert torch.equal(images, collected(expected)[0])


def test_asking_an_exhausted_iterator_again_prepares_nothing_more(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    loader = stoker.DataLoader(dataset, 8, num_workers=1, seed=0, persistent_workers=True)
    iterator = iter(loader)
    list(iterator)
    assert next(iterator, None) is None and len(loader._ahead) == 1


def test_changes_to_the_dataset_are_honoured(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    loader = stoker.DataLoader(dataset, 8, num_workers=1, seed=0)
    assert len(collected(loader)[0]) == 40
    dataset.samples = dataset.samples[::2]
    assert tier(loader) == "lowered"
    fresh = stoker.DataLoader(dataset, 8, num_workers=1, seed=0)
    assert len(collected(fresh)[0]) == 20


def test_subset_and_concatenation(folder: Path) -> None:
    whole = torchvision.datasets.ImageFolder(folder, TRAIN)
    dataset: Any = ConcatDataset(
        [Subset(whole, [5, 3, 9]), whole, Subset(Subset(whole, range(10)), [7])]
    )
    loader = stoker.DataLoader(dataset, 4, num_workers=2, seed=1)
    assert tier(loader) == "lowered"
    images, labels = collected(loader)
    for i in range(len(dataset)):
        image, label = keyed_sample(dataset, 1, 0, i)
        assert torch.equal(images[i], image) and labels[i] == label


def test_users_samplers_are_honoured(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    weights = [1.0] * len(dataset)
    torch.manual_seed(0)
    expected = list(WeightedRandomSampler(weights, 50))
    torch.manual_seed(0)
    loader = stoker.DataLoader(
        dataset, 8, sampler=WeightedRandomSampler(weights, 50), num_workers=2, seed=6
    )
    images, labels = collected(loader)
    assert len(images) == 50 and len(loader) == 7
    for position, index in enumerate(expected):
        # An index may come again, so the position tells its draws apart.
        image, label = keyed_sample(dataset, 6, 0, index, draw=position)
        assert torch.equal(images[position], image) and labels[position] == label
    batches = [[1, 2, 3], [4], [0, 5, 6, 7, 8]]
    loader = stoker.DataLoader(dataset, batch_sampler=batches, num_workers=2, seed=6)
    assert tier(loader) == "lowered"
    assert [len(x) for x, _ in loader] == [3, 1, 5]


def test_samplers_are_recognised_when_handed_back(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    loader = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=1, seed=6)
    assert isinstance(loader.sampler, torch.utils.data.RandomSampler)
    again = stoker.DataLoader(dataset, 8, sampler=loader.sampler, num_workers=1)
    other = stoker.DataLoader(
        dataset, batch_sampler=BatchSampler(loader.sampler, 8, False), num_workers=1
    )
    expected = collected(stoker.DataLoader(dataset, 8, shuffle=True, num_workers=1, seed=6))
    for rebuilt in (again, other):
        rebuilt.set_epoch(0)
        assert torch.equal(collected(rebuilt)[0], expected[0])
    plain = stoker.DataLoader(dataset, 8, num_workers=1)
    assert isinstance(plain.sampler, torch.utils.data.SequentialSampler)


class ByName(Dataset[Any]):
    def __getitem__(self, name: Any) -> Any:
        return str(name)


@pytest.mark.filterwarnings("ignore:not run natively")
@pytest.mark.parametrize("names", [["a", "b"], [(0, 1), (2, 3)], [(0,), (1, 2)], [1.5]], ids=str)
def test_indices_that_are_no_integers_need_torchs_randomness(names: list[Any]) -> None:
    with pytest.raises(TypeError, match="randomness='torch'"):
        list(stoker.DataLoader(ByName(), 2, sampler=names, num_workers=0))
    loader = stoker.DataLoader(ByName(), 2, sampler=names, num_workers=0, randomness="torch")
    assert list(loader) == [[str(name) for name in names]]


class Pairs(BatchSampler):
    """A user's own batch sampler."""


def test_the_loaders_epoch_is_the_samplers_whoever_batches() -> None:
    dataset = UsersDataset()
    given: list[dict[str, Any]] = [{"batch_size": 2}, {"batch_size": None}]
    for epoch in range(2):
        seen = []
        for options in given:
            loader = stoker.DataLoader(dataset, shuffle=True, seed=6, tier="stock", **options)
            loader.set_epoch(epoch)
            seen.append(torch.cat([torch.as_tensor(y).reshape(-1) for _, y in loader]).tolist())
        sampler = stoker.DataLoader(dataset, shuffle=True, seed=6).sampler
        loader = stoker.DataLoader(dataset, batch_sampler=Pairs(sampler, 2, False), tier="stock")
        loader.set_epoch(epoch)
        seen.append(torch.cat([y for _, y in loader]).tolist())
        assert seen[0] == seen[1] == seen[2] == list(sampler)


class TransformOfTheUser:
    def __call__(self, image: Any) -> torch.Tensor:
        pixels: torch.Tensor = T.functional.to_tensor(image.resize((8, 8)))
        return pixels * torch.rand(())


class UsersDataset(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(2) + random.random() + np.random.rand(), index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_dataset_runs_keyed(workers: int) -> None:
    dataset = UsersDataset()
    loader = stoker.DataLoader(dataset, 4, shuffle=True, num_workers=workers, seed=8)
    values, indices = collected(loader)
    for value, index in zip(values, indices, strict=True):
        expected, _ = keyed_sample(dataset, 8, 0, int(index))
        assert torch.equal(value, expected)
    assert sorted(indices.tolist()) == list(range(10))
    assert tier(loader) == "keyed"
    assert "UsersDataset" in str(loader.explain())


class InBulk(UsersDataset):
    """Fetches a whole batch at once, as Hugging Face's datasets do."""

    calls = 0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls += 1
        values = torch.rand(len(indices))
        return list(zip(values, indices, strict=True))


def test_a_dataset_that_fetches_in_bulk_is_asked_once_per_batch() -> None:
    dataset = InBulk()
    loader = stoker.DataLoader(dataset, 4, num_workers=0, seed=8, tier="stock")
    values, indices = collected(loader)
    assert dataset.calls == 3 and indices.tolist() == list(range(10))
    for start in (0, 4, 8):
        torch.manual_seed(int(order_module.keys(8, 0, np.array([start]))[0]))
        assert torch.equal(values[start : start + 4], torch.rand(len(values[start : start + 4])))


def test_collate_is_keyed_whatever_the_workers() -> None:
    def collate(samples: list[Any]) -> torch.Tensor:
        return torch.rand(3) + torch.stack([x for x, _ in samples]).sum()

    runs = [
        list(
            stoker.DataLoader(
                UsersDataset(), 4, num_workers=n, seed=8, collate_fn=collate, tier="stock"
            )
        )
        for n in (0, 1, 2)
    ]
    assert all(torch.equal(torch.stack(runs[0]), torch.stack(run)) for run in runs[1:])


def test_strict_refuses_by_name(folder: Path) -> None:
    with pytest.raises(stoker.UnsupportedError, match="TransformOfTheUser"):
        stoker.DataLoader(
            torchvision.datasets.ImageFolder(folder, TransformOfTheUser()), strict=True
        )
    with pytest.raises(stoker.UnsupportedError, match="UsersDataset"):
        stoker.DataLoader(UsersDataset(), strict=True)
    with pytest.raises(stoker.UnsupportedError, match="collate_fn"):
        stoker.DataLoader(
            torchvision.datasets.ImageFolder(folder, VAL), strict=True, collate_fn=lambda b: b
        )


@pytest.mark.filterwarnings("ignore:not run natively")
def test_without_fast_kernels_torch_serves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    native = collected(stoker.DataLoader(dataset, 8, num_workers=1, seed=4))
    monkeypatch.setattr("stoker.tiers.level", lambda: "scalar")
    loader = stoker.DataLoader(dataset, 8, seed=4)
    assert loader.num_workers == 0 and loader.explain().op == "processor"
    assert torch.equal(collected(loader)[0], native[0])


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"randomness": "numpy"}, "randomness='numpy'"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"tier": "native"}, "tier='native'"),
        ({"order": "random"}, "order='random'"),
        ({"num_workers": -1}, "num_workers"),
        ({"order": "full", "shuffle": False}, "contradict"),
        ({"shuffle": True, "sampler": [1]}, "exclusive"),
        ({"batch_size": None, "drop_last": True}, "drop_last"),
        ({"timeout": -1}, "timeout"),
        ({"on_error": "skip", "randomness": "torch"}, "keyed randomness"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(folder: Path, wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        stoker.DataLoader(torchvision.datasets.ImageFolder(folder, VAL), **wrong)


def test_every_parameter_is_an_attribute(folder: Path) -> None:
    import inspect

    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    loader = stoker.DataLoader(dataset, 8, num_workers=1)
    for name in inspect.signature(stoker.DataLoader.__init__).parameters:
        if name != "self":
            assert hasattr(loader, name), name
    theirs = list(inspect.signature(torch.utils.data.DataLoader.__init__).parameters)
    ours = list(inspect.signature(stoker.DataLoader.__init__).parameters)
    assert ours[: len(theirs)] == theirs


def test_workers_left_out_and_too_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 9.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    assert stoker.DataLoader(dataset, 8).num_workers == 3
    assert stoker.DataLoader(UsersDataset(), 8).num_workers == 0
    loader = stoker.DataLoader(UsersDataset(), 8, persistent_workers=True, tier="stock")
    assert len(list(loader)) == 2
    with pytest.warns(stoker.StokerWarning, match="num_workers=6.* 5 "):
        assert stoker.DataLoader(dataset, 8, num_workers=6).num_workers == 6
    with pytest.warns(stoker.StokerWarning, match="calling thread"):
        loader = stoker.DataLoader(
            dataset, 8, num_workers=0, persistent_workers=True, prefetch_factor=4
        )
    assert len(collected(loader)[0]) == 40


@pytest.mark.parametrize("given", [{}, {"tier": "stock"}, {"randomness": "torch"}], ids=str)
def test_too_many_workers_are_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in stoker.DataLoader(dataset, 40, num_workers=2, **given):
            pass
    assert [warning.category for warning in told] == [stoker.StokerWarning]


def test_length_and_drop_last(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    assert [len(stoker.DataLoader(dataset, 7, drop_last=drop)) for drop in (False, True)] == [6, 5]
    sizes = [len(x) for x, _ in stoker.DataLoader(dataset, 7, drop_last=True, num_workers=1)]
    assert sizes == [7] * 5


# Bad samples


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    root = class_folder(tmp_path / "damaged", 12)
    whole = sorted(root.rglob("*.jpg"))[0]
    whole.write_bytes(whole.read_bytes()[:300])
    (root / "class_1" / "empty.png").write_bytes(b"")
    return root


@pytest.mark.parametrize(
    "given", [{"num_workers": 2}, {"num_workers": 0}, {"num_workers": 1, "tier": "stock"}]
)
def test_raise_names_the_file_and_the_loader_goes_on(damaged: Path, given: Any) -> None:
    dataset = stoker.ImageFolder(damaged, TRAIN)
    loader = stoker.DataLoader(dataset, 1, seed=0, **given)
    bad: list[stoker.DecodeError] = []
    good = 0
    iterator = iter(loader)
    while True:
        try:
            next(iterator)
            good += 1
        except StopIteration:
            break
        except stoker.DecodeError as error:
            bad.append(error)
    for one in bad:
        assert one.location == dataset.samples[one.index][0] and one.reason
    assert good == 11 and len(bad) == 2 and any(one.location.endswith("empty.png") for one in bad)
    listed = [(one.index, one.location, one.position) for one in loader.bad_samples]
    assert listed == [(one.index, one.location, one.index) for one in bad]  # batches of one
    if "tier" not in given:
        with pytest.raises(stoker.DecodeError):
            list(loader)


def test_no_error_is_kept_that_nobody_will_ask_for(damaged: Path) -> None:
    loader = stoker.DataLoader(stoker.ImageFolder(damaged, TRAIN), 13, num_workers=1, seed=0)
    with pytest.raises(stoker.DecodeError):
        list(loader)  # for the first of the two bad samples in the batch
    assert loader._feed is not None and not loader._feed.fallback._errors


@pytest.mark.parametrize(
    "given", [{"num_workers": 2}, {"num_workers": 0}, {"num_workers": 2, "tier": "stock"}]
)
def test_skip_puts_the_next_good_sample_there(damaged: Path, tmp_path: Path, given: Any) -> None:
    dataset = stoker.ImageFolder(damaged, TRAIN)
    loader = stoker.DataLoader(dataset, 4, shuffle=True, seed=3, on_error="skip", **given)
    loader.log_bad_samples(tmp_path / "bad.jsonl")
    positions = list(loader.sampler)
    images, labels = collected(loader)
    assert len(images) == len(dataset) == 13
    bad = {sample.index for sample in loader.bad_samples}
    assert len(bad) == 2
    for position, index in enumerate(positions):
        k = position
        while positions[k % 13] in bad:
            k += 1
        source = positions[k % 13]
        image, label = keyed_sample(dataset, 3, 0, source)
        assert torch.equal(images[position], image) and labels[position] == label
        assert (index in bad) == (source != index)
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert {line["index"] for line in lines} == bad
    assert all(line["reason"] and line["location"] for line in lines)


def test_skip_leaves_the_users_batches_alone(damaged: Path) -> None:
    batches: list[Any] = [np.arange(7), np.arange(7, 13)]
    dataset = stoker.ImageFolder(damaged, TRAIN)
    loader = stoker.DataLoader(
        dataset, batch_sampler=batches, num_workers=1, seed=3, on_error="skip"
    )
    for epoch in range(1, 3):
        list(loader)
        assert np.concatenate(batches).tolist() == list(range(13))
        assert len(loader.bad_samples) == 2 * epoch


@pytest.mark.parametrize("given", [{"num_workers": 2}, {"num_workers": 0, "tier": "stock"}])
def test_blank_keeps_label_and_shape(damaged: Path, given: Any) -> None:
    dataset = stoker.ImageFolder(damaged, TRAIN)
    loader = stoker.DataLoader(dataset, 4, seed=3, on_error="blank", **given)
    images, labels = collected(loader)
    black = T.Normalize(MEAN, STD)(torch.zeros(3, 48, 48))
    bad = {sample.index for sample in loader.bad_samples}
    assert len(bad) == 2
    for i in range(13):
        assert labels[i] == dataset.targets[i]
        assert torch.equal(images[i], black) == (i in bad)


@pytest.mark.parametrize("pad", [0, 3])
def test_blank_is_the_same_in_both_tiers(damaged: Path, pad: int) -> None:
    transform = T.Compose(
        [T.Resize((20, 24)), T.Pad(pad, fill=200), T.RandomCrop((20, 20)), T.ToTensor()]
    )
    dataset = stoker.ImageFolder(damaged, transform)
    tiers: list[Any] = [{}, {"tier": "stock"}]
    both = [
        collected(stoker.DataLoader(dataset, 4, num_workers=1, seed=3, on_error="blank", **more))
        for more in tiers
    ]
    assert torch.equal(both[0][0], both[1][0]) and torch.equal(both[0][1], both[1][1])


@pytest.mark.filterwarnings("ignore:not run natively")
@pytest.mark.parametrize("more", [{}, {"tier": "stock"}])
def test_several_bad_samples_under_a_foreign_sampler(damaged: Path, more: Any) -> None:
    dataset = stoker.ImageFolder(damaged, TRAIN)
    bad = {i for i, (path, _) in enumerate(dataset.samples) if os.path.getsize(path) <= 300}
    first, second = sorted(bad)
    batch = [first, 5, second, first, 3]
    loader = stoker.DataLoader(
        dataset, batch_sampler=[batch], num_workers=1, seed=3, on_error="skip", **more
    )
    images, labels = next(iter(loader))
    for place, good in enumerate([1, 1, 4, 4, 4]):
        image, label = keyed_sample(dataset, 3, 0, batch[good], draw=good)
        assert torch.equal(images[place], image) and labels[place] == label


def test_an_error_of_the_sampler_waits_for_its_turn(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    loader = stoker.DataLoader(
        dataset, batch_sampler=[[0], [1], [99], [2]], num_workers=1, prefetch_factor=8, seed=0
    )
    iterator = iter(loader)
    assert [len(next(iterator)[1]) for _ in range(2)] == [1, 1]
    with pytest.raises(IndexError):
        next(iterator)
    assert next(iterator)[1].tolist() == [dataset.targets[2]]


def test_workers_left_out_where_there_are_none_to_ask_for() -> None:
    with pytest.warns(stoker.StokerWarning, match="calling thread"):
        loader = stoker.DataLoader(UsersDataset(), 4, persistent_workers=True, tier="stock")
    assert loader.num_workers == 0 and not loader.persistent_workers


def test_a_prepared_epoch_follows_what_the_loader_says_now(damaged: Path) -> None:
    dataset = stoker.ImageFolder(damaged, TRAIN)
    loader = stoker.DataLoader(
        dataset, 4, num_workers=1, seed=3, on_error="skip", persistent_workers=True
    )
    list(loader)
    loader.on_error = "raise"
    with pytest.raises(stoker.DecodeError):
        list(loader)


def test_all_bad_is_an_error_not_a_hang(tmp_path: Path) -> None:
    root = tmp_path / "a"
    for i in range(3):
        save(root / f"{i}.jpg", picture(20, 20)).write_bytes(b"\xff\xd8nothing")
    loader = stoker.DataLoader(
        stoker.ImageFolder(tmp_path, VAL), 2, num_workers=1, on_error="skip", seed=0
    )
    with pytest.raises(stoker.DecodeError):
        list(loader)


def test_geometry_that_torchvision_refuses_raises_its_words(folder: Path) -> None:
    transform = T.Compose([T.RandomCrop(300), T.ToTensor()])
    dataset = torchvision.datasets.ImageFolder(folder, transform)
    loader = stoker.DataLoader(dataset, 4, num_workers=1, seed=0)
    with pytest.raises(stoker.DecodeError, match="Required crop size"):
        list(loader)


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    dataset = stoker.ImageFolder(class_folder(tmp_path, 6), VAL)
    gone = Path(dataset.samples[2][0])
    gone.unlink()
    with pytest.raises(stoker.DecodeError, match=gone.name):
        list(stoker.DataLoader(dataset, 2, num_workers=1, seed=0))


def test_no_stale_pixels_in_reused_memory(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    loader = stoker.DataLoader(dataset, 8, num_workers=2, seed=0)
    expected = [dataset[i][0] for i in range(len(dataset))]
    for _ in range(3):
        for b, (images, _) in enumerate(loader):
            for i, image in enumerate(images):
                assert torch.equal(image, expected[8 * b + i])
            images.fill_(float("nan"))


def test_kept_batches_are_never_overwritten(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    loader = stoker.DataLoader(dataset, 4, num_workers=2, seed=0)
    kept = [batch[0][1] for batch in loader]  # views of one sample keep their whole batch alive
    copies = [image.clone() for image in kept]
    for _ in range(3):
        list(loader)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


# What is left behind


@pytest.fixture
def warm(folder: Path) -> None:
    list(stoker.DataLoader(torchvision.datasets.ImageFolder(folder, VAL), 8, num_workers=1))


def test_nothing_is_left_behind(folder: Path, warm: None, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("no_leaks")
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    for persistent in (False, True):
        loader = stoker.DataLoader(
            dataset, 4, shuffle=True, num_workers=2, persistent_workers=persistent, seed=0
        )
        list(loader)
        for _ in loader:
            break
        one, two = iter(loader), iter(loader)
        next(one), next(two)
        assert pool_threads() >= 2
        del loader, one, two
        gc.collect()
        assert pool_threads() == 0


@pytest.mark.parametrize("whole", [True, False], ids=["loader", "iterator"])
def test_garbage_may_be_collected_in_a_decoding_thread(
    tmp_path: Path, warm: None, request: pytest.FixtureRequest, whole: bool
) -> None:
    request.getfixturevalue("no_leaks")
    for i in range(8):
        save(tmp_path / "a" / f"{i}.png", picture(20, 20, seed=i))
    loader = stoker.DataLoader(stoker.ImageFolder(tmp_path, VAL), 2, num_workers=1, seed=0)
    list(loader)  # starts the threads
    assert loader._feed is not None
    fallback, ready, collected_there = loader._feed.fallback, threading.Event(), threading.Event()
    decode = fallback.decode

    def decode_and_collect(batch: object, row: int) -> Any:
        ready.wait(30)
        gc.collect()
        collected_there.set()
        return decode(batch, row)

    fallback.decode = decode_and_collect
    iterator: Any = iter(loader)
    iterator.source._start(2)
    cycle = [iterator, loader if whole else None]
    cycle.append(cycle)
    gc.disable()
    try:
        kept = None if whole else loader
        del cycle, iterator, loader
        ready.set()
        assert collected_there.wait(10)
    finally:
        gc.enable()
    if kept is not None:
        kept.close()


def test_threads_and_memory_stand_still_over_epochs(tmp_path: Path) -> None:
    for i in range(24):
        save(tmp_path / "class" / f"{i}.jpg", picture(120, 100, seed=i), quality=90)
    dataset = torchvision.datasets.ImageFolder(tmp_path, VAL)
    loader = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=1, seed=0)

    def epochs(count: int) -> tuple[int, int, int, int]:
        for _ in range(count):
            for _ in loader:
                pass
        assert loader._feed is not None
        return (
            _native.allocations(),
            loader._feed.slots.allocated,
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
        )

    assert epochs(2) == epochs(6), "an allocation, thread or descriptor per epoch or sample"


def test_threads_start_after_the_last_loader_without_threads_closed(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    loader = stoker.DataLoader(dataset, 8, num_workers=0)
    list(loader)
    loader.close()
    assert len(list(stoker.DataLoader(dataset, 8, num_workers=1, timeout=30))) == 5


def test_the_class_takes_a_type_argument(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    assert stoker.DataLoader[tuple[torch.Tensor, int]](dataset, num_workers=1).num_workers == 1


def test_close_is_idempotent_and_the_loader_goes_on(folder: Path) -> None:
    loader = stoker.DataLoader(torchvision.datasets.ImageFolder(folder, VAL), 8, num_workers=2)
    list(loader)
    loader.close()
    loader.close()
    assert len(list(loader)) == 5


def test_an_iterator_of_a_closed_loader_says_so(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    loader = stoker.DataLoader(dataset, 8, num_workers=1, timeout=30)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(iterator)


def test_interrupt_leaves_a_loader_that_works(folder: Path) -> None:
    script = f"""
import os, signal, sys, threading, time, torchvision, stoker
from torchvision import transforms as T
# Python's own handler, also where the tests were started in the background, which ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
dataset = torchvision.datasets.ImageFolder({str(folder)!r}, T.Compose(
    [T.RandomResizedCrop(1500), T.ToTensor()]))
loader = stoker.DataLoader(dataset, 40, num_workers=1, seed=0)
iterator = iter(loader)
threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    next(iterator)
    time.sleep(5)
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
del iterator
dataset.transform = T.Compose([T.Resize((9, 9)), T.ToTensor()])
print(len(list(loader)))
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.split() == ["interrupted", "1"], result.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_its_own_engine(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, TRAIN)
    loader = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=2, seed=0)
    expected = [images.numpy() for images, _ in loader]
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        loader.set_epoch(0)
        # By NumPy: torch's own threads (OpenMP's) do not survive a fork.
        same = all(
            np.array_equal(images.numpy(), other)
            for (images, _), other in zip(loader, expected, strict=True)
        )
        del iterator, loader
        gc.collect()
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(iterator)) == 4


def test_loaders_pickle(folder: Path) -> None:
    dataset = stoker.ImageFolder(folder, VAL)
    loader = stoker.DataLoader(dataset, 8, num_workers=1, seed=0)
    expected = collected(loader)[0]
    again = pickle.loads(pickle.dumps(loader))
    again.set_epoch(0)
    assert torch.equal(collected(again)[0], expected)


def test_explain_names_what_matters(folder: Path) -> None:
    loader = stoker.DataLoader(
        torchvision.datasets.ImageFolder(folder, TRAIN),
        8,
        num_workers=2,
        prefetch_factor=3,
        worker_init_fn=lambda worker: None,
    )
    for _ in loader:
        pass
    text = str(loader.explain())
    for word in (
        "lowered",
        "RandomResizedCrop",
        "40 samples",
        "3 batches",
        "MiB",
        "ms of CPU",
        "worker_init_fn",
    ):
        assert word in text, text


def test_batch_types_are_torchs(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(
        folder,
        v2.Compose([v2.Resize((32, 40)), v2.ToImage(), v2.ToDtype(torch.float16, scale=True)]),
    )
    ours = next(iter(stoker.DataLoader(dataset, 4, num_workers=1)))
    theirs = next(iter(torch.utils.data.DataLoader(dataset, 4)))
    assert type(ours) is type(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        assert a.stride() == b.stride() and torch.equal(a, b)


@pytest.fixture(autouse=True)
def quiet_loader_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="num_workers=")
        yield


# Results whose size depends on the image


def test_images_of_one_size_need_no_resize(tmp_path: Path) -> None:
    for i, (extension, options) in enumerate([("jpg", {}), ("png", {}), ("jpg", {"quality": 60})]):
        save(tmp_path / "a" / f"{i}.{extension}", picture(50, 40, seed=i), **options)
    dataset = stoker.ImageFolder(tmp_path, T.Compose([T.RandomHorizontalFlip(), T.ToTensor()]))
    loader = stoker.DataLoader(dataset, 3, num_workers=1, seed=0)
    assert tier(loader) == "lowered"
    images, _ = next(iter(loader))
    assert images.shape == (3, 3, 40, 50)
    assert all(torch.equal(images[i], keyed_sample(dataset, 0, 0, i)[0]) for i in range(3))


@pytest.mark.parametrize("workers", [0, 1])
def test_images_of_several_sizes(folder: Path, workers: int) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, T.PILToTensor())
    one_by_one = stoker.DataLoader(dataset, num_workers=workers, seed=0)
    assert tier(one_by_one) == "lowered"
    for i, (image, label) in enumerate(one_by_one):
        assert torch.equal(image[0], dataset[i][0]) and label.tolist() == [dataset[i][1]]
    with pytest.raises(RuntimeError, match="equal size"):
        list(torch.utils.data.DataLoader(dataset, 4))
    with pytest.raises(RuntimeError, match="equal size"):
        list(stoker.DataLoader(dataset, 4, num_workers=workers, seed=0))


def test_bad_samples_among_images_without_a_fixed_size(tmp_path: Path) -> None:
    for i in range(4):
        save(tmp_path / "a" / f"{i}.jpg", picture(50, 40, seed=i))
    (tmp_path / "a" / "0.jpg").write_bytes(b"\xff\xd8 nothing")
    dataset = stoker.ImageFolder(tmp_path, T.ToTensor())
    loader = stoker.DataLoader(dataset, 2, num_workers=1, seed=0, on_error="skip")
    images, _ = collected(loader)
    assert torch.equal(images[0], dataset[1][0]) and len(images) == 4
    assert [sample.index for sample in loader.bad_samples] == [0]
