"""`DataLoader(exclude=...)`: what is left out, in every tier, and lists that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torchvision import datasets
from torchvision import transforms as T

import stoker
from pictures import class_folder
from stoker import order as order_module
from stoker.draws import seed_generators
from stoker.errors import SourceError
from stoker.order import Order

TRAIN = T.Compose([T.RandomResizedCrop(24), T.RandomHorizontalFlip(), T.ToTensor()])
SAMPLES = 30
OUT = [0, 7, 8, 9, 21, 29]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("folder"), SAMPLES)


class Own(Dataset[Any]):
    """A class of the user's."""

    def __init__(self, folder: Path, transform: Any) -> None:
        self.samples = datasets.ImageFolder(str(folder)).samples
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, _ = self.samples[index]
        return self.transform(Image.open(path).convert("RGB")), index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def indexed(folder: Path) -> stoker.ImageFolder:
    """A folder whose labels are the samples' indices."""
    dataset = stoker.ImageFolder(folder, TRAIN)
    assert dataset.files.labels is not None
    dataset.files.labels[:] = np.arange(len(dataset))
    return dataset


TIERS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "lowered": (indexed, {}),
    "recorded": (lambda folder: Own(folder, TRAIN), {}),
    "keyed": (lambda folder: Own(folder, TRAIN), {"tier": "stock"}),
}


def sample_of(dataset: Any, seed: int, epoch: int, index: int) -> torch.Tensor:
    """The definition: dataset[index] with all generators seeded by the key."""
    seed_generators(int(order_module.keys(seed, epoch, np.array([index]))[0]))
    image: torch.Tensor = dataset[index][0]
    return image


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_are_left_out_in_every_tier(
    folder: Path, tier: str, workers: int, shuffle: bool
) -> None:
    make, arguments = TIERS[tier]
    dataset = make(folder)
    loader = stoker.DataLoader(
        dataset, 7, shuffle, num_workers=workers, seed=3, exclude=OUT, **arguments
    )
    left = [index for index in range(SAMPLES) if index not in OUT]
    assert len(loader) == 4
    assert loader.dataset is dataset
    orders = []
    for epoch in range(2):
        batches = list(loader)
        assert len(batches) == 4
        images = torch.cat([images for images, _ in batches])
        indices = torch.cat([labels for _, labels in batches]).tolist()
        assert sorted(indices) == left
        assert shuffle or indices == left
        for image, index in zip(images, indices, strict=True):
            assert torch.equal(image, sample_of(dataset, 3, epoch, index))
        orders.append(indices)
    assert loader.explain().tier == tier
    assert (orders[0] != orders[1]) == shuffle
    dropping = stoker.DataLoader(
        dataset, 7, num_workers=workers, seed=3, exclude=OUT, drop_last=True, **arguments
    )
    assert len(list(dropping)) == len(dropping) == 3


@pytest.mark.parametrize("shuffle", [False, True])
def test_orders_with_gaps(shuffle: bool) -> None:
    rng = np.random.default_rng(2)
    for samples in (1, 2, 9, 300):
        for _ in range(20):
            out = np.flatnonzero(rng.random(samples) < rng.random())
            left = np.setdiff1d(np.arange(samples), out)
            order = Order(len(left), 5, shuffle, out - np.arange(len(out)))
            plain = Order(len(left), 5, shuffle)
            found = order.indices(1, 0, len(left))
            assert found.tolist() == left[plain.indices(1, 0, len(left))].tolist()
            assert sorted(found.tolist()) == left.tolist()


def test_bad_samples_keep_their_indices(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    dataset = stoker.ImageFolder(tmp_path / "copy", TRAIN)
    for index in (5, 12, 20):
        Path(dataset.samples[index][0]).write_bytes(b"no image")
    out = tmp_path / "bad.jsonl"
    first = stoker.DataLoader(dataset, 8, num_workers=0, seed=1, exclude=[12, 0], on_error="skip")
    first.log_bad_samples(out)
    assert len(first) == 4
    list(first)
    told = {one.index: one.location for one in first.bad_samples}
    assert told == {index: dataset.samples[index][0] for index in (5, 20)}
    # What a loader has reported is what another leaves out; a list may have lines twice.
    list(first)
    second = stoker.DataLoader(dataset, 8, num_workers=0, seed=1, exclude=out, on_error="skip")
    labels = torch.cat([labels for _, labels in second])
    assert len(labels) == SAMPLES - 2
    assert [one.index for one in second.bad_samples] == [12]
    with pytest.raises(stoker.DecodeError) as caught:
        list(stoker.DataLoader(dataset, 8, num_workers=0, seed=1, exclude=out))
    assert caught.value.index == 12


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_of_own_datasets(folder: Path, tmp_path: Path, workers: int) -> None:
    dataset = Own(folder, TRAIN)
    dataset.samples[11] = (str(tmp_path / "nowhere.jpg"), 0)
    out = tmp_path / "bad.jsonl"
    first = stoker.DataLoader(
        dataset, 8, num_workers=workers, seed=1, exclude=[0, 1], on_error="skip"
    )
    first.log_bad_samples(out)
    list(first)
    assert [one.index for one in first.bad_samples] == [11]
    second = stoker.DataLoader(dataset, 8, num_workers=workers, seed=1, exclude=out)
    indices = torch.cat([labels for _, labels in second]).tolist()
    assert indices == [index for index in range(SAMPLES) if index != 11]


def test_names(folder: Path, tmp_path: Path) -> None:
    dataset = indexed(folder)
    names = [path.removeprefix(f"{folder}/") for path, _ in dataset.samples]
    out = tmp_path / "names.jsonl"
    out.write_text(json.dumps({"name": names[4]}) + "\n\n" + json.dumps({"index": 2}) + "\n")
    ways: list[Any] = [[names[4], 2], out, str(out), {2, names[4]}, iter([2, names[4]])]
    for exclude in ways:
        loader = stoker.DataLoader(dataset, 8, num_workers=0, exclude=exclude)
        indices = torch.cat([labels for _, labels in loader]).tolist()
        assert indices == [index for index in range(SAMPLES) if index not in (2, 4)]
    assert stoker.DataLoader(dataset, 8, exclude=np.array([3, 3])).sampler.order.samples == 29  # type: ignore[attr-defined] # ours
    assert len(stoker.DataLoader(dataset, 1, exclude=[])) == SAMPLES
    joined: Any = ConcatDataset([dataset, dataset])
    with pytest.raises(ValueError, match=r"2 samples are called .*: give indices"):
        stoker.DataLoader(joined, 8, exclude=[names[4]])
    with pytest.raises(ValueError, match="there is no sample 'nowhere'"):
        stoker.DataLoader(dataset, 8, exclude=["nowhere"])
    with pytest.raises(ValueError, match="have no names: give indices"):
        stoker.DataLoader(Own(folder, TRAIN), 8, exclude=[names[4]])


def test_lists_for_other_data(folder: Path, tmp_path: Path) -> None:
    dataset = stoker.ImageFolder(folder, TRAIN)
    right = dataset.samples[3][0]
    moved = f"/elsewhere/{right.removeprefix(f'{folder}/')}"
    out = tmp_path / "bad.jsonl"
    for line, error in (
        ({"index": 3, "location": right}, None),
        ({"index": 3, "location": moved, "reason": "x"}, None),
        ({"index": 3, "name": right.removeprefix(f"{folder}/")}, None),
        ({"index": 3, "location": "sample 3"}, None),
        ({"index": 4, "location": right}, "made for other data"),
        ({"index": 3, "name": "0001.jpg.png"}, "made for other data"),
        ({"index": SAMPLES}, "there are 30"),
        ({"index": -1}, "there are 30"),
        ({"index": 1 << 80}, "there are 30"),
        ({"index": True}, "its index is True"),
        ({"index": "3"}, "its index is '3'"),
        ({"name": 3}, "its name is 3"),
        ({"location": right}, "neither index nor name"),
        ({"name": "nowhere.jpg"}, "line 2: there is no sample"),
        ([3], "it is no object"),
    ):
        out.write_text("\n" + json.dumps(line) + "\n")
        if error is None:
            assert len(stoker.DataLoader(dataset, 1, exclude=out)) == SAMPLES - 1
            continue
        with pytest.raises(SourceError, match=error) as caught:
            stoker.DataLoader(dataset, 1, exclude=out)
        assert caught.value.path == str(out)
    for content in (b"\xff\xfe\0\0", b"[" * 100_000, b'{"index": ', b"0000.jpg 3\n"):
        out.write_bytes(content)
        with pytest.raises(SourceError, match="line 1 names no bad sample"):
            stoker.DataLoader(dataset, 1, exclude=out)
    with pytest.raises(SourceError, match="No such file"):
        stoker.DataLoader(dataset, 1, exclude=tmp_path / "none.jsonl")
    out.write_text("")
    assert len(stoker.DataLoader(dataset, 1, exclude=out)) == SAMPLES


def test_wrong_arguments(folder: Path) -> None:
    dataset = stoker.ImageFolder(folder, TRAIN)
    for wrong in ([SAMPLES], [-1], [True]):
        with pytest.raises(ValueError, match="there is no sample"):
            stoker.DataLoader(dataset, 1, exclude=wrong)
    with pytest.raises(TypeError, match="expected a path, or indices and names"):
        stoker.DataLoader(dataset, 1, exclude=[1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="leaves none of 30 samples"):
        stoker.DataLoader(dataset, 1, exclude=range(SAMPLES))
    for arguments in (
        {"sampler": RandomSampler(range(30))},
        {"sampler": [1, 2]},
        {"batch_sampler": BatchSampler(SequentialSampler(range(30)), 2, False)},
        {"randomness": "torch"},
    ):
        with pytest.raises(ValueError, match="no sampler or batch_sampler of your own"):
            stoker.DataLoader(dataset, exclude=[1], **arguments)
    with pytest.raises(ValueError, match="map-style"):
        stoker.DataLoader(Stream(), exclude=[1])


def test_a_loader_that_is_built_anew_from_its_parts(folder: Path) -> None:
    """As frameworks do: with its own arguments, and its sampler."""
    dataset = indexed(folder)
    loader = stoker.DataLoader(dataset, 8, True, num_workers=0, seed=4, exclude=OUT)
    expected = [labels.tolist() for _, labels in loader]
    for arguments in ({"sampler": loader.sampler}, {"batch_sampler": loader.batch_sampler}):
        again = stoker.DataLoader(
            dataset,
            8 if "sampler" in arguments else 1,
            num_workers=0,
            exclude=loader.exclude,
            **arguments,
        )
        again.set_epoch(0)
        assert [labels.tolist() for _, labels in again] == expected


def test_subsets_and_what_has_no_files() -> None:
    dataset = TensorDataset(torch.arange(10))
    loader = stoker.DataLoader(Subset(dataset, range(2, 8)), 2, num_workers=0, exclude=[0, 5])
    assert torch.cat([x for (x,) in loader]).tolist() == [3, 4, 5, 6]
    single = stoker.DataLoader(dataset, None, num_workers=0, exclude=[9])
    assert len(single) == len(list(single)) == 9
