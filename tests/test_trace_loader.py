"""Traced loaders: the batches, exceptions and side effects of torch's own."""

from __future__ import annotations

import contextlib
import io
import os
import random
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchvision
import torchvision.transforms as v1
from PIL import Image
from torch.utils import data as D  # noqa: N812
from torchvision.transforms import v2

import stoker
from pictures import picture, save
from stoker import order as order_module
from tracing import canonical, seed

pytestmark = pytest.mark.filterwarnings("ignore")

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty JPEGs, native ones but for two, with a label file."""
    root = tmp_path_factory.mktemp("images")
    lines = []
    for i in range(20):
        image = picture(110 + 13 * (i % 5), 100 + 11 * (i % 4), seed=i)
        options: dict[str, Any] = {"progressive": True} if i in (6, 13) else {"subsampling": i % 3}
        if i == 9:
            image = image.convert("L")
        save(root / f"{i:02}.jpg", image, quality=85, **options)
        lines.append(f"{i:02}.jpg {i % 7}")
    (root / "labels.txt").write_text("\n".join(lines))
    return root


class ImageDataset(D.Dataset[Any]):
    """As in every tutorial."""

    def __init__(self, root: Path, transform: Any = None) -> None:
        self.root, self.transform = root, transform
        self.labels = {}
        for line in (root / "labels.txt").read_text().splitlines():
            name, label = line.split()
            self.labels[name] = int(label)
        self.names = list(self.labels)

    def __len__(self) -> int:
        return len(self.names)

    def image(self, index: int) -> Any:
        return Image.open(os.path.join(self.root, self.names[index])).convert("RGB")

    def __getitem__(self, index: int) -> Any:
        image = self.image(index)
        if self.transform:
            image = self.transform(image)
        return image, self.labels[self.names[index]]


def noisy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + torch.randn_like(tensor) * 0.1


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2 - 1


def _chains() -> dict[str, list[Any]]:
    chains: dict[str, list[Any]] = {
        "lambda on tensors": [v1.Resize((48, 48)), v1.ToTensor(), doubled],
        "noise": [v1.Resize((48, 48)), v1.ToTensor(), noisy],
        "v2 on tensors": [
            v2.ToImage(),
            v2.RandomResizedCrop(48, antialias=True),
            v2.ToDtype(torch.float32, scale=True),
        ],
        "v1 half": [v1.Resize((40, 40)), v1.PILToTensor(), v1.ConvertImageDtype(torch.float16)],
        "v2 bfloat16": [v2.Resize((40, 40)), v2.ToImage(), v2.ToDtype(torch.bfloat16, scale=True)],
        "v2 unscaled": [v2.Resize((40, 40)), v2.ToImage(), v2.ToDtype(torch.float32)],
    }
    for name, T in (("v1", v1), ("v2", v2)):
        tensor = [T.ToTensor()] if T is v1 else [T.ToImage(), T.ToDtype(torch.float32, scale=True)]
        normalize = T.Normalize(MEAN, STD)
        train = [T.RandomResizedCrop(48), T.RandomHorizontalFlip()]
        chains |= {
            f"{name} train": [*train, *tensor, normalize],
            f"{name} eval": [T.Resize(56), T.CenterCrop(48), *tensor, normalize],
            f"{name} bytes": [*train, T.PILToTensor()],
            f"{name} erasing": [*train, *tensor, normalize, T.RandomErasing(0.7)],
            f"{name} colours": [
                *train,
                T.ColorJitter(0.4, 0.4, 0.4, 0.1),
                T.RandomGrayscale(0.2),
                *tensor,
                normalize,
            ],
            f"{name} RandAugment": [*train, T.RandAugment(), *tensor, normalize],
            f"{name} TrivialAugmentWide": [*train, T.TrivialAugmentWide(), *tensor],
            f"{name} AutoAugment": [*train, T.AutoAugment(), *tensor, T.RandomErasing(0.5)],
            f"{name} rotation and affine": [
                T.RandomRotation(180, expand=True, fill=(9, 8, 7)),
                *train,
                T.RandomAffine(10, (0.1, 0.1), (0.8, 1.3), 9, T.InterpolationMode.BILINEAR),
                *tensor,
                normalize,
            ],
            f"{name} single operations": [
                *train,
                T.RandomInvert(),
                T.RandomPosterize(3),
                T.RandomSolarize(120),
                T.RandomAdjustSharpness(1.8),
                T.RandomAutocontrast(),
                T.RandomEqualize(),
                *tensor,
            ],
            f"{name} reflected crop": [
                T.Resize((48, 48)),
                T.RandomCrop(48, padding=6, padding_mode="reflect"),
                *tensor,
            ],
            f"{name} twelve operations": [*train, T.RandAugment(num_ops=12), *tensor],
            f"{name} many operations": [*train, T.RandAugment(num_ops=30), *tensor],
            f"{name} perspective": [T.Resize((48, 48)), T.RandomPerspective(p=1.0), *tensor],
            f"{name} AugMix": [T.Resize((32, 32)), T.AugMix(), *tensor],
            f"{name} blur": [T.Resize((48, 48)), T.GaussianBlur(5), *tensor],
            f"{name} padded crop": [T.Resize((48, 48)), T.RandomCrop(48, padding=6), *tensor],
            f"{name} gray": [*train, T.Grayscale(), *tensor, T.Normalize([0.5], [0.5])],
        }
    return chains


CHAINS = _chains()
RECORDED = {
    f"{name} {kind}"
    for name in ("v1", "v2")
    for kind in (
        "train",
        "eval",
        "bytes",
        "erasing",
        "colours",
        "RandAugment",
        "TrivialAugmentWide",
        "AutoAugment",
        "rotation and affine",
        "perspective",
        "twelve operations",
        "single operations",
        "padded crop",
        "reflected crop",
        "gray",
    )
} | {"v1 half", "v2 bfloat16", "v2 unscaled"}


def batches(loader_class: Any, dataset: Any, **options: Any) -> Any:
    """All batches under fixed seeds, or the exception that ends them."""
    options = {"batch_size": 6, "shuffle": True, "num_workers": 2, **options}
    if options["batch_size"] is None or isinstance(dataset, D.IterableDataset):
        options.pop("shuffle")
    seed(7)
    loader = loader_class(dataset, **options)
    found = []
    try:
        for batch in loader:
            found.append(canonical(batch))
            if options["num_workers"] == 0:  # the consumer draws, too
                found.append((torch.rand(2).tolist(), random.random(), np.random.rand()))
    except Exception as error:  # noqa: BLE001  whatever it is, both loaders must raise it
        found.append((type(error).__name__, str(error).strip().splitlines()[-1]))
    return found, loader


def same(dataset: Any, **options: Any) -> stoker.DataLoader[Any]:
    """Asserts that stoker's batches are torch's; returns stoker's loader."""
    expected, _ = batches(D.DataLoader, dataset, **options)
    result, loader = batches(stoker.DataLoader, dataset, randomness="torch", **options)
    assert len(result) == len(expected)
    for one, other in zip(result, expected, strict=True):
        assert one == other
    return loader  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CHAINS)
def test_batches_are_torchs(name: str, folder: Path) -> None:
    dataset = ImageDataset(folder, v1.Compose(CHAINS[name]))
    explained = same(dataset).explain()
    assert explained.tier in ("recorded", "materialised")
    if name in RECORDED:
        assert explained.tier == "recorded"
        assert explained.facts["samples"] == "20 recorded"


@pytest.mark.parametrize("name", ["v1 train", "v2 train", "v1 erasing", "v2 bytes", "noise"])
def test_batches_of_the_calling_thread_are_torchs(name: str, folder: Path) -> None:
    dataset = ImageDataset(folder, v1.Compose(CHAINS[name]))
    same(dataset, num_workers=0)


def test_keyed_batches_follow_the_definition(folder: Path) -> None:
    dataset = ImageDataset(folder, v1.Compose(CHAINS["v1 train"]))
    for workers in (0, 2):
        loader = stoker.DataLoader(dataset, 6, shuffle=True, num_workers=workers, seed=5)
        images = torch.cat([x for x, _ in loader])
        sampler: Any = loader.sampler
        order = list(sampler.order.indices(0, 0, 20))
        for place, index in enumerate(order):
            key = int(order_module.keys(5, 0, np.array([index]), 0)[0])
            seed_all(key)
            assert torch.equal(images[place], dataset[int(index)][0])
        assert loader.explain().tier == "recorded"


def seed_all(key: int) -> None:
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key)


# Collating, and what a dataset may give


def mixup(samples: list[Any]) -> Any:
    images = torch.stack([image for image, _ in samples])
    labels = torch.tensor([label for _, label in samples])
    share = np.random.beta(1.0, 1.0)
    other = torch.randperm(len(samples))
    return share * images + (1 - share) * images[other], labels, labels[other], share


def as_dict(samples: list[Any]) -> Any:
    return {
        "pixel_values": torch.stack([image for image, _ in samples]),
        "labels": torch.tensor([label for _, label in samples]),
    }


def torchvision_mixup(samples: list[Any]) -> Any:
    return v2.RandomChoice([v2.MixUp(num_classes=7), v2.CutMix(num_classes=7)])(
        *D.default_collate(samples)
    )


def as_list(samples: list[Any]) -> Any:
    return [image for image, _ in samples], [label for _, label in samples]


class Pair(NamedTuple):
    image: Any
    label: Any


class TwoViews(ImageDataset):
    def __getitem__(self, index: int) -> Any:
        image = self.image(index)
        return {"views": (self.transform(image), self.transform(image)), "label": Pair(index, 3.5)}


class Masked(ImageDataset):
    def __getitem__(self, index: int) -> Any:
        image, mask = self.image(index), Image.open(self.root / self.names[index]).convert("L")
        top, left, height, width = v1.RandomCrop.get_params(image, (64, 64))
        image = v1.functional.crop(image, top, left, height, width)
        mask = v1.functional.crop(mask, top, left, height, width)
        mask = mask.resize((32, 32), Image.Resampling.NEAREST)
        return v1.functional.to_tensor(image), v1.functional.pil_to_tensor(mask)


class Cached(ImageDataset):
    """Keeps its decoded images."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cache: dict[int, Any] = {}

    def image(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = super().image(index)
        return self.cache[index]


class CachedTensors(Cached):
    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = self.transform(ImageDataset.image(self, index))
        return self.cache[index], index


class InMemory(ImageDataset):
    """From bytes, as from an archive."""

    def image(self, index: int) -> Any:
        data = (self.root / self.names[index]).read_bytes()
        return Image.open(io.BytesIO(data)).convert("RGB")


class FromZip(ImageDataset):
    """From members of an archive, opened for each image."""

    def __init__(self, root: Path, transform: Any = None) -> None:
        super().__init__(root, transform)
        self.archive = root / "images.zip"
        if not self.archive.exists():
            with zipfile.ZipFile(self.archive, "w", zipfile.ZIP_DEFLATED) as archive:
                for name in self.names:
                    archive.write(root / name, name)

    def image(self, index: int) -> Any:
        with zipfile.ZipFile(self.archive) as archive, archive.open(self.names[index]) as file:
            return Image.open(file).convert("RGB")


class FromTar(ImageDataset):
    def __init__(self, root: Path, transform: Any = None) -> None:
        super().__init__(root, transform)
        self.archive = root / "images.tar"
        if not self.archive.exists():
            with tarfile.open(self.archive, "w") as archive:
                for name in self.names:
                    archive.add(root / name, name)

    def image(self, index: int) -> Any:
        with tarfile.open(self.archive) as archive:
            file = archive.extractfile(self.names[index])
            assert file is not None
            return Image.open(file).convert("RGB")


class PartlyInMemory(InMemory):
    def image(self, index: int) -> Any:
        return super().image(index) if index % 3 else ImageDataset.image(self, index)


class FromTemporaryFiles(ImageDataset):
    def image(self, index: int) -> Any:
        with tempfile.NamedTemporaryFile(suffix=".jpg") as file:
            file.write((self.root / self.names[index]).read_bytes())
            file.flush()
            return Image.open(file.name).convert("RGB")


class SometimesValues(ImageDataset):
    """Looks at every third sample."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        if index % 3 == 0:
            image = image.clamp(-1, 1)
        return image, label


class Images(ImageDataset):
    def __getitem__(self, index: int) -> Any:
        return np.asarray(self.image(index).resize((30, 30)), dtype=np.float32), index


class Itemwise(ImageDataset):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Streamed(D.IterableDataset[Any]):
    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        info = D.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, len(self.dataset), step):
            with contextlib.suppress(OSError):
                yield self.dataset[index]


KINDS: dict[str, tuple[Callable[[Path, Any], Any], dict[str, Any], str]] = {
    "mixup": (ImageDataset, {"collate_fn": mixup}, "materialised"),
    "torchvision's mixup": (ImageDataset, {"collate_fn": torchvision_mixup}, "materialised"),
    "dict": (ImageDataset, {"collate_fn": as_dict}, "recorded"),
    "list": (ImageDataset, {"collate_fn": as_list}, "recorded"),
    "drop_last": (ImageDataset, {"drop_last": True}, "recorded"),
    "no batches": (ImageDataset, {"batch_size": None}, "recorded"),
    "out of order": (ImageDataset, {"in_order": False, "num_workers": 1}, "recorded"),
    "two views": (TwoViews, {}, "recorded"),
    "mask": (Masked, {}, "recorded"),
    "cached images": (Cached, {}, ""),
    "cached tensors": (CachedTensors, {}, "materialised"),
    "in memory": (InMemory, {}, "recorded"),
    "partly in memory": (PartlyInMemory, {}, "recorded"),
    "zip": (FromZip, {}, "recorded"),
    "tar": (FromTar, {}, "recorded"),
    "temporary files": (FromTemporaryFiles, {}, ""),
    "some values": (SometimesValues, {}, "recorded"),
    "arrays": (Images, {}, "materialised"),
    "__getitems__": (Itemwise, {}, "recorded"),
    "Subset": (lambda root, t: D.Subset(ImageDataset(root, t), range(3, 17)), {}, "recorded"),
    "ConcatDataset": (
        lambda root, t: D.ConcatDataset([ImageDataset(root, t), TwoViewsless(root, t)]),
        {},
        "recorded",
    ),
    "IterableDataset": (lambda root, t: Streamed(ImageDataset(root, t)), {}, "materialised"),
    "batch_sampler": (
        ImageDataset,
        {
            "batch_sampler": D.BatchSampler(D.SequentialSampler(range(20)), 5, False),
            "batch_size": 1,
            "shuffle": None,
        },
        "recorded",
    ),
}


class TwoViewsless(ImageDataset):
    """Another class of the same samples."""


@pytest.mark.parametrize("chain", ["v1 train", "v2 train"])
@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_datasets_and_collating(name: str, chain: str, folder: Path) -> None:
    make, options, tier = KINDS[name]
    loader = same(make(folder, v1.Compose(CHAINS[chain])), **options)
    assert not tier or loader.explain().tier == tier


@pytest.mark.parametrize(
    "name", ["mask", "two views", "in memory", "partly in memory", "IterableDataset", "mixup"]
)
def test_kinds_on_the_calling_thread(name: str, folder: Path) -> None:
    make, options, _ = KINDS[name]
    same(make(folder, v1.Compose(CHAINS["v2 train"])), **options, num_workers=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_files_in_memory_cross_where_they_are_smaller_than_their_tensors(
    workers: int, folder: Path
) -> None:
    pixels = v1.Compose([v1.Resize((60, 60)), v1.PILToTensor()])
    facts = same(InMemory(folder, pixels), num_workers=workers).explain().facts
    assert facts["samples"] == "20 recorded"
    few = v1.Compose([v1.Resize((12, 12)), v1.PILToTensor()])
    facts = same(InMemory(folder, few), num_workers=workers).explain().facts
    assert ("recorded" in facts["samples"]) == (workers == 0)


def test_a_torchvision_folder(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "class"
    place.mkdir()
    for path in sorted(folder.glob("*.jpg")):
        (place / path.name).symlink_to(path)
    dataset = torchvision.datasets.ImageFolder(str(tmp_path), v1.Compose(CHAINS["v1 train"]))
    assert same(dataset).explain().tier == "recorded"


def test_persistent_workers_over_epochs(folder: Path) -> None:
    dataset = ImageDataset(folder, v1.Compose(CHAINS["v1 train"]))
    runs = []
    both: list[tuple[Any, dict[str, Any]]] = [
        (D.DataLoader, {}),
        (stoker.DataLoader, {"randomness": "torch"}),
    ]
    for loader_class, options in both:
        seed(3)
        loader = loader_class(
            dataset, 6, shuffle=True, num_workers=2, persistent_workers=True, **options
        )
        runs.append([canonical(batch) for _ in range(3) for batch in loader])
    assert runs[0] == runs[1]


class Facts(D.Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        info = D.get_worker_info()
        assert info is not None
        return index, info.id, info.num_workers, info.seed, type(info.dataset).__name__, STARTED


STARTED: list[int] = []


def started(worker: int) -> None:
    STARTED.append(worker)


def test_worker_info_and_init_function(folder: Path) -> None:
    del folder
    same(Facts(), worker_init_fn=started, collate_fn=list)


# What goes wrong


def broken(folder: Path, root: Path, how: Callable[[bytes], bytes], numbers: list[int]) -> Path:
    for path in folder.iterdir():
        data = path.read_bytes()
        if path.suffix == ".jpg" and int(path.stem) in numbers:
            data = how(data)
        (root / path.name).write_bytes(data)
    return root


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_table(data: bytes) -> bytes:
    at = data.find(b"\xff\xc4") + 5
    return data[:at] + b"\xff" * 16 + data[at + 16 :]


class NarrowHandler(ImageDataset):
    def image(self, index: int) -> Any:
        try:
            return super().image(index)
        except OSError:
            return Image.new("RGB", (120, 110), (1, 2, 3))


class NextOnError(ImageDataset):
    def __getitem__(self, index: int) -> Any:
        try:
            return super().__getitem__(index)
        except OSError:
            return self[(index + 1) % len(self)]


class NextInMemoryOnError(InMemory, NextOnError):
    pass


class BareHandler(ImageDataset):
    def __getitem__(self, index: int) -> Any:
        try:
            image = self.image(index)
            return torch.from_numpy(np.array(image.resize((20, 20)))), 1
        except:  # noqa: E722  what user code does
            return torch.zeros(20, 20, 3, dtype=torch.uint8), 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", [truncated, without_table])
@pytest.mark.parametrize(
    "kind",
    [
        ImageDataset,
        NarrowHandler,
        NextOnError,
        BareHandler,
        InMemory,
        NextInMemoryOnError,
        FromZip,
        FromTar,
    ],
)
def test_broken_files(kind: Any, how: Any, workers: int, folder: Path, tmp_path: Path) -> None:
    root = broken(folder, tmp_path, how, [3, 11, 12])
    same(kind(root, v1.Compose(CHAINS["v1 train"])), num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_archive(workers: int, folder: Path, tmp_path: Path) -> None:
    root = broken(folder, tmp_path, bytes, [])
    (root / "labels.txt").write_text((folder / "labels.txt").read_text())
    with zipfile.ZipFile(root / "images.zip", "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(root.glob("*.jpg")):
            archive.write(path, path.name)
    data = bytearray((root / "images.zip").read_bytes())
    data[len(data) // 2] ^= 255
    (root / "images.zip").write_bytes(data)
    same(FromZip(root, v1.Compose(CHAINS["v1 train"])), num_workers=workers)


def test_broken_files_in_a_stream(folder: Path, tmp_path: Path) -> None:
    root = broken(folder, tmp_path, without_table, [3, 11])
    same(Streamed(NarrowHandler(root, v1.Compose(CHAINS["v1 train"]))))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_skipped(workers: int, folder: Path, tmp_path: Path) -> None:
    root = broken(folder, tmp_path, without_table, [3, 11])
    dataset = ImageDataset(root, v1.Compose(CHAINS["v1 train"]))
    runs = []
    for tier in ("auto", "stock"):
        loader = stoker.DataLoader(
            dataset, 6, num_workers=workers, seed=1, on_error="skip", tier=tier
        )
        runs.append([canonical(batch) for batch in loader])
        assert [sample.index for sample in loader.bad_samples] == [3, 11]
    assert runs[0] == runs[1]


class Raising(ImageDataset):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("seven")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_exceptions_of_user_code(workers: int, folder: Path) -> None:
    same(Raising(folder, v1.Compose(CHAINS["v1 train"])), num_workers=workers)


class Varied(ImageDataset):
    def __getitem__(self, index: int) -> Any:
        return v1.functional.to_tensor(self.image(index)), index


def test_sizes_that_do_not_stack(folder: Path) -> None:
    same(Varied(folder))


class Dying(ImageDataset):
    def __getitem__(self, index: int) -> Any:
        if index == 13:
            os._exit(3)
        return super().__getitem__(index)


def test_a_killed_worker(folder: Path) -> None:
    loader = stoker.DataLoader(
        Dying(folder, v1.Compose(CHAINS["v1 train"])), 4, num_workers=2, randomness="torch"
    )
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader)


def test_explain_names_the_users_line(folder: Path) -> None:
    dataset = ImageDataset(folder, v1.Compose(CHAINS["lambda on tensors"]))
    loader = same(dataset)
    text = str(loader.explain())
    assert "test_trace_loader.py" in text
    assert "in doubled" in text


def test_explain_shows_what_crossed_and_its_cost(folder: Path) -> None:
    chain = v1.Compose([v1.CenterCrop(20), v1.RandomHorizontalFlip(1.0), v1.ToTensor()])
    loader = same(ImageDataset(folder, chain))
    facts = loader.explain().facts
    assert facts["recorded"] == "crop, mirror_x; to float32 3x20x20"
    assert facts["cost"].count("ms of CPU a sample") == 2


def test_explain_names_colours(folder: Path) -> None:
    chain = v1.Compose([v1.CenterCrop(20), v1.ColorJitter(brightness=(2, 2)), v1.ToTensor()])
    facts = same(ImageDataset(folder, chain)).explain().facts
    assert facts["recorded"] == "crop, brightness; to float32 3x20x20"


def test_nothing_is_left_behind(folder: Path, request: pytest.FixtureRequest) -> None:
    dataset = ImageDataset(folder, v1.Compose(CHAINS["v1 train"]))

    def run() -> None:
        for workers in (0, 2):
            loader = stoker.DataLoader(dataset, 6, num_workers=workers)
            list(loader)
            for _ in loader:
                break
            loader.close()

    run()
    request.getfixturevalue("no_leaks")
    for _ in range(2):
        run()


def test_stock_tier_traces_nothing(folder: Path) -> None:
    dataset = ImageDataset(folder, v1.Compose(CHAINS["v1 train"]))
    loader = stoker.DataLoader(dataset, 6, num_workers=0, tier="stock")
    list(loader)
    assert loader.explain().tier == "keyed"


def test_unknown_versions_of_torch_trace_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.trace import iterators

    monkeypatch.setattr(torch, "__version__", "9.9.0")
    iterators.unknown.cache_clear()
    try:
        dataset = ImageDataset(folder, v1.Compose(CHAINS["v1 train"]))
        loader = stoker.DataLoader(dataset, 6, num_workers=0, seed=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(stoker.StokerWarning, match=r"torch 9\.9\.0"):
                iter(loader)
        assert len(list(loader)) == 4
        assert loader.explain().tier == "keyed"
        assert "torch 9.9.0" in str(loader.explain())
    finally:
        iterators.unknown.cache_clear()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_ways_to_start_workers(method: str, folder: Path) -> None:
    dataset = ImageDataset(folder, v1.Compose(CHAINS["v1 train"]))
    loader = same(dataset, multiprocessing_context=method, num_workers=1)
    assert loader.explain().tier == "recorded"


# Patches of the user's


def _upside_down(function: Callable[..., Any]) -> Callable[..., Any]:
    def mine(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        if isinstance(result, torch.Tensor):
            return result.flip(-2)
        return result.transpose(Image.Transpose.FLIP_TOP_BOTTOM)

    return mine


PATCHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "Image.open": lambda m: m.setattr(Image, "open", _upside_down(Image.open)),
    "convert": lambda m: m.setattr(Image.Image, "convert", _upside_down(Image.Image.convert)),
    "resize": lambda m: m.setattr(Image.Image, "resize", _upside_down(Image.Image.resize)),
    "crop": lambda m: m.setattr(Image.Image, "crop", _upside_down(Image.Image.crop)),
    "to_tensor": lambda m: m.setattr(
        v1.functional, "to_tensor", _upside_down(v1.functional.to_tensor)
    ),
    "normalize": lambda m: m.setattr(
        v1.functional, "normalize", _upside_down(v1.functional.normalize)
    ),
    "stack": lambda m: m.setattr(torch, "stack", _upside_down(torch.stack)),
    "collate": lambda m: m.setitem(
        D._utils.collate.default_collate_fn_map,
        torch.Tensor,
        lambda batch, *, collate_fn_map=None: torch.stack(list(batch)) * 2,
    ),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", PATCHES)
def test_patches_are_not_passed_over(
    name: str, workers: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ImageDataset(folder, v1.Compose(CHAINS["v1 eval"]))
    plain, _ = batches(D.DataLoader, dataset, num_workers=workers)
    PATCHES[name](monkeypatch)
    changed, _ = batches(D.DataLoader, dataset, num_workers=workers)
    assert changed != plain or name in ("crop", "stack")
    same(dataset, num_workers=workers)
