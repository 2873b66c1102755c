"""Datasets as tables: what is read, what is honoured, what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
from torchvision.datasets import DatasetFolder, EuroSAT, Flowers102, ImageFolder, Imagenette
from torchvision.datasets import folder as torchvision_folder
from torchvision.transforms import ToTensor

from oracle import noise
from stoker.plan import Refusal
from stoker.sources.dataset import Rows, read
from stoker.sources.filelist import ImageDataset
from stoker.sources.folder import ImageFolder as OurFolder
from test_lower import patched

TRANSFORM = ToTensor()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 images in 3 classes, and a label file for all."""
    root = tmp_path_factory.mktemp("tree")
    lines = []
    for number in range(12):
        name = f"class {number % 3}/ä{number}.png"
        (root / name).parent.mkdir(exist_ok=True)
        noise(5 + number, 4, number).save(root / name)
        lines.append(f"{name} {number % 3}\n")
    root.with_suffix(".txt").write_text("".join(lines), encoding="utf-8")
    return root


def rows_of(dataset: Any) -> Rows:
    rows = read(dataset)
    assert isinstance(rows, Rows), rows
    return rows


def refusal(dataset: Any) -> Refusal:
    refused = read(dataset)
    assert isinstance(refused, Refusal), refused
    assert refused.instead
    return refused


def check(dataset: Any) -> Rows:
    """Every sample as the dataset itself gives it."""
    rows = rows_of(dataset)
    assert len(rows) == len(dataset)
    assert rows.labels.dtype == np.int64
    for index in [*range(len(dataset)), -1, -len(dataset)]:
        image, label = dataset[index]
        row = int(rows.rows_of(np.array([index]))[0])
        pixels = np.moveaxis(rows.decode(row), -1, 0)
        assert torch.equal(image, torch.from_numpy(pixels.copy()).float().div(255))
        assert rows.labels[index] == label
        with Image.open(rows.location(index)) as opened:
            assert opened.size == pixels.shape[:0:-1]
    for outside in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            rows.rows_of(np.array([0, outside]))
    return rows


MAKERS: dict[str, Callable[[Path], Any]] = {
    "ImageFolder": lambda tree: ImageFolder(tree, TRANSFORM),
    "relative": lambda tree: ImageFolder(str(tree) + "/../" + tree.name, TRANSFORM),
    "pil_loader": lambda tree: ImageFolder(tree, TRANSFORM, loader=torchvision_folder.pil_loader),
    "DatasetFolder": lambda tree: DatasetFolder(
        str(tree), torchvision_folder.default_loader, (".png",), TRANSFORM
    ),
    "ours": lambda tree: OurFolder(tree, TRANSFORM),
    "label file": lambda tree: ImageDataset(tree, tree.with_suffix(".txt"), TRANSFORM),
    "Subset": lambda tree: Subset(ImageFolder(tree, TRANSFORM), [3, 1, 1, -2]),
    "array": lambda tree: Subset(OurFolder(tree, TRANSFORM), np.arange(4)[::-1]),  # type: ignore[arg-type] # works
    "tensor": lambda tree: Subset(OurFolder(tree, TRANSFORM), torch.tensor([5, 2])),  # type: ignore[arg-type] # works
    "random_split": lambda tree: random_split(ImageFolder(tree, TRANSFORM), [5, 7])[0],
    "nested": lambda tree: Subset(Subset(ImageFolder(tree, TRANSFORM), range(2, 11)), [4, 0]),
    "twice": lambda tree: _twice(ImageFolder(tree, TRANSFORM)),
    "mixed": lambda tree: ConcatDataset(
        [
            Subset(ImageFolder(tree, TRANSFORM), [7, 2]),
            ImageDataset(tree, tree.with_suffix(".txt"), TRANSFORM),
            ConcatDataset([OurFolder(tree, TRANSFORM)]),
        ]
    ),
    "subset of mixed": lambda tree: Subset(
        ConcatDataset([ImageFolder(tree, TRANSFORM), OurFolder(tree, TRANSFORM)]), [13, 2, -1]
    ),
    "dict": lambda tree: ImageFolder(tree, TRANSFORM, {0: 7, 1: -3, 2: 2**40}.__getitem__),
    "get": lambda tree: ImageFolder(tree, TRANSFORM, {0: 7, 1: 5, 2: 5}.get),
    "list": lambda tree: OurFolder(tree, TRANSFORM, [5, 4, 3].__getitem__),
    "tuple": lambda tree: Subset(OurFolder(tree, TRANSFORM, (5, 4, 3).__getitem__), [2, 8]),
}


def _twice(dataset: Any) -> Any:
    return ConcatDataset([dataset, Subset(dataset, [5])])


@pytest.mark.parametrize("name", MAKERS)
def test_recognised(tree: Path, name: str) -> None:
    dataset = MAKERS[name](tree)
    rows = check(dataset)
    assert rows.transform is TRANSFORM
    assert rows.same_as(rows_of(dataset))


def bare(cls: Any, **attributes: Any) -> Any:
    """A dataset whose constructor would want a download."""
    dataset = cls.__new__(cls)
    vars(dataset).update(
        {
            "loader": torchvision_folder.default_loader,
            "transform": TRANSFORM,
            "target_transform": None,
            **attributes,
        }
    )
    return dataset


def test_families_of_torchvision(tree: Path) -> None:
    samples = ImageFolder(tree).samples
    paths, labels = [Path(path) for path, _ in samples], [label for _, label in samples]
    check(bare(EuroSAT, samples=samples))
    check(bare(Imagenette, _samples=samples))
    check(bare(Flowers102, _image_files=paths, _labels=labels))


def test_changes_count(tree: Path) -> None:
    dataset = ImageFolder(tree, TRANSFORM)
    before = check(dataset)
    dataset.samples = dataset.samples[::2]
    halved = check(dataset)
    assert not halved.same_as(before)
    dataset.samples[1] = dataset.samples[4]
    changed = check(dataset)
    assert not changed.same_as(halved)
    assert changed.location(1) == changed.location(4)
    dataset.transform = ToTensor()
    assert check(dataset).same_as(changed) and check(dataset).transform is dataset.transform
    dataset.target_transform = {0: 1, 1: 2, 2: 0}.__getitem__
    assert not np.array_equal(check(dataset).labels, changed.labels)
    ours = OurFolder(tree, TRANSFORM)
    before = check(ours)
    ours.files = ours.files.select(np.array([4, 1]))
    assert not check(ours).same_as(before)


def test_pairs_that_are_lists_are_read_again(tree: Path) -> None:
    dataset = ImageFolder(tree, TRANSFORM)
    pairs: Any = [list(pair) for pair in dataset.samples]
    dataset.samples = pairs
    assert check(dataset).labels[3] == pairs[3][1]
    pairs[3][1] = 99
    assert check(dataset).labels[3] == 99


def test_changed_indices_count(tree: Path) -> None:
    indices = [1, 2, 3]
    dataset = Subset(ImageFolder(tree, TRANSFORM), indices)
    before = check(dataset)
    indices[0] = 5
    assert not check(dataset).same_as(before)


class Overriding(ImageFolder):  # type: ignore[misc] # torchvision is not typed
    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), index)


class OfOtherLength(OurFolder):
    def __len__(self) -> int:
        return 2


class InBatches(OurFolder):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return []


class WithProperty(ImageFolder):  # type: ignore[misc] # torchvision is not typed
    samples = property(lambda self: [], lambda self, value: None)


class OtherConstructor(ImageFolder):  # type: ignore[misc] # torchvision is not typed
    """Finds classes in its own way, which is over when it is read."""

    def find_classes(self, directory: Any) -> Any:
        classes, _ = super().find_classes(directory)
        return classes, {name: 40 + place for place, name in enumerate(classes)}


class Mine(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return index


class MySubset(Subset[Any]):
    """Nothing but another name, and yet not known."""


def test_a_subclass_that_only_constructs_is_recognised(tree: Path) -> None:
    assert check(OtherConstructor(tree, TRANSFORM)).labels.min() == 40


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda tree: Mine(), "test_dataset.Mine"),
        (lambda tree: TensorDataset(torch.zeros(3)), "TensorDataset"),
        (lambda tree: [1, 2], "builtins.list"),
        (lambda tree: Overriding(tree, TRANSFORM), "Overriding.__getitem__"),
        (lambda tree: OfOtherLength(tree, TRANSFORM), "OfOtherLength.__len__"),
        (lambda tree: InBatches(tree, TRANSFORM), "InBatches.__getitems__"),
        (lambda tree: WithProperty(tree, TRANSFORM), "WithProperty.samples"),
        (lambda tree: MySubset(OurFolder(tree, TRANSFORM), [0]), "MySubset"),
        (lambda tree: Subset(Mine(), [0]), "Mine"),
        (lambda tree: ImageFolder(tree, TRANSFORM, loader=Image.open), "loader=open"),
        (lambda tree: ImageFolder(tree, TRANSFORM, lambda label: label), "target_transform"),
        (lambda tree: ImageFolder(tree, TRANSFORM, {0: 1}.__getitem__), "KeyError"),
        (lambda tree: ImageFolder(tree, TRANSFORM, {0: 1}.get), "not integers"),
        (lambda tree: ImageFolder(tree, TRANSFORM, [1.0, 2.0, 3.0].__getitem__), "integers"),
        (lambda tree: ImageFolder(tree, TRANSFORM, str), "target_transform=str"),
        (
            lambda tree: ConcatDataset([OurFolder(tree, TRANSFORM), OurFolder(tree, ToTensor())]),
            "different transforms",
        ),
        (
            lambda tree: ConcatDataset(
                [OurFolder(tree, TRANSFORM), OurFolder(tree, TRANSFORM, exif=True)]
            ),
            "different limits",
        ),
        (lambda tree: Subset(OurFolder(tree, TRANSFORM), [0, 12]), "out of range"),
        (lambda tree: Subset(OurFolder(tree, TRANSFORM), [0.5]), "not integers"),  # type: ignore[list-item] # the point
        (lambda tree: bare(ImageFolder, samples=[("a", "b")]), "labels"),
        (lambda tree: bare(ImageFolder, samples=[("a", True)]), "labels"),
        (lambda tree: bare(ImageFolder, samples=[("a", np.int64(1))]), "labels"),
        (lambda tree: bare(ImageFolder, samples=[("a", 2**70)]), "int"),
        (lambda tree: bare(ImageFolder, samples=[("a", 1, 2)]), "pairs"),
        (lambda tree: bare(ImageFolder, samples=[("a\0b", 1)]), "null"),
        (lambda tree: bare(ImageFolder, samples=iter([])), "not a list"),
        (lambda tree: bare(Flowers102, _image_files=["a"], _labels=[]), "more paths"),
    ],
)
def test_refused(tree: Path, make: Callable[[Path], Any], told: str) -> None:
    assert told in str(refusal(make(tree)))


def test_a_method_of_the_object_is_refused(tree: Path) -> None:
    for dataset in (OurFolder(tree, TRANSFORM), Subset(OurFolder(tree, TRANSFORM), [1])):
        vars(dataset)["__getitems__"] = lambda indices: []
        assert "__getitems__" in refusal(dataset).op


def test_image_backend(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision, "_image_backend", "accimage")
    assert "accimage" in refusal(ImageFolder(tree, TRANSFORM)).op


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (DatasetFolder, "__getitem__"),
        (torchvision_folder, "pil_loader"),
        (Image, "open"),
        (Subset, "__getitems__"),
    ],
)
def test_patches(tree: Path, owner: Any, name: str) -> None:
    dataset = ImageFolder(tree, TRANSFORM)
    rows_of(dataset)
    with patched(owner, name, lambda *args: None):
        assert refusal(dataset).op.endswith(name)
    rows_of(dataset)


def test_a_concatenation_whose_part_changed(tree: Path) -> None:
    part = ImageFolder(tree, TRANSFORM)
    dataset: Any = ConcatDataset([part, part])
    check(dataset)
    part.samples = part.samples[1:]
    assert "changed its length" in refusal(dataset).why


def test_unions_are_made_once(tree: Path) -> None:
    dataset: Any = ConcatDataset([ImageFolder(tree, TRANSFORM), OurFolder(tree, TRANSFORM)])
    assert rows_of(dataset).files is rows_of(dataset).files


@pytest.mark.slow
def test_a_million_samples_are_read_quickly() -> None:
    samples = [(f"/data/train/n{i % 1000:08d}/n{i:08d}.JPEG", i % 1000) for i in range(1_000_000)]
    dataset = bare(ImageFolder, samples=samples)
    started = time.process_time()
    rows = rows_of(dataset)
    first = time.process_time() - started
    started = time.process_time()
    assert rows_of(dataset).same_as(rows)
    again = time.process_time() - started
    assert first < 3  # 0.7 s on an idle core
    assert again < first / 10
