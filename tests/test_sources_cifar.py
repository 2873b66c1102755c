"""CIFAR batches: torchvision's CIFAR10 and CIFAR100 read the same ones."""

from __future__ import annotations

import os
import pickle
import random
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from torchvision.datasets import CIFAR10, CIFAR100, cifar

import stoker
from stoker import cache
from stoker.errors import SourceError, StokerWarning
from stoker.pack import pack
from stoker.sources.cifar import CIFAR

COUNT = 12
WORDS = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test; torchvision does not insist on the original files."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)
    return tmp_path / "cache"


def pixels(seed: int, count: int = COUNT, side: int = 32) -> Any:
    values = np.random.default_rng(seed).integers(0, 256, (count, 3 * side * side))
    return values.astype(np.uint8)


def fine(seed: int, most: int = 10) -> list[int]:
    return [(7 * number + seed) % most for number in range(COUNT)]


def write_10(folder: Path, protocol: int = 2, old: bool = False) -> Path:
    folder.mkdir(parents=True)
    key: Any = str.encode if old else str
    for seed, name in enumerate([*(f"data_batch_{n}" for n in (1, 2, 3, 4, 5)), "test_batch"]):
        names = [f"{name}_{number}.png" for number in range(COUNT)]
        batch = {"batch_label": name, "labels": fine(seed), "data": pixels(seed)}
        content = {key(k): v for k, v in (batch | {"filenames": names}).items()}
        (folder / name).write_bytes(pickle.dumps(content, protocol))
    meta = {key("label_names"): list(WORDS), key("num_vis"): 3072}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta, protocol))
    return folder


def write_100(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for seed, name in enumerate(["train", "test"]):
        labels = {"fine_labels": fine(seed, 100), "coarse_labels": fine(seed, 20)}
        names = [f"{name}_{number}.png" for number in range(COUNT)]
        batch = {"filenames": names, **labels, "data": np.asfortranarray(pixels(seed))}
        (folder / name).write_bytes(pickle.dumps(batch, 4))
    meta = {
        "fine_label_names": [f"fine {n}" for n in range(100)],
        "coarse_label_names": [f"coarse {n}" for n in range(20)],
    }
    (folder / "meta").write_bytes(pickle.dumps(meta, 4))
    return folder


def same(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs) and ours.targets == list(theirs.targets)
    for number in range(len(ours)):
        (image, label), (wanted, wanted_label) = ours[number], theirs[number]
        assert label == wanted_label and image.mode == "RGB"
        assert np.array_equal(np.asarray(image), np.asarray(wanted))


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("old", [False, True])
def test_torchvision_reads_the_same(tmp_path: Path, protocol: int, old: bool) -> None:
    folder = write_10(tmp_path / "cifar-10-batches-py", protocol, old)
    ours, test = stoker.open(folder), stoker.open(folder / "test_batch")
    assert isinstance(ours, CIFAR) and isinstance(test, CIFAR)
    assert ours.classes == list(WORDS) == test.classes and len(ours.shards) == 5
    assert ours.class_to_idx["bird"] == 2
    assert list(ours.names)[11:13] == ["data_batch_1_11.png", "data_batch_2_0.png"]
    if not old:
        same(ours, CIFAR10(tmp_path, train=True))
        same(test, CIFAR10(tmp_path, train=False))


def test_torchvision_reads_the_same_100(tmp_path: Path) -> None:
    folder = write_100(tmp_path / "cifar-100-python")
    ours = stoker.open(folder)
    assert isinstance(ours, CIFAR)
    theirs = CIFAR100(tmp_path, train=True)
    same(ours, theirs)
    assert ours.classes == theirs.classes
    same(stoker.open(folder / "test"), CIFAR100(tmp_path, train=False))
    coarse = stoker.open(folder, label="coarse_labels")
    assert isinstance(coarse, CIFAR)
    assert coarse.targets == fine(0, 20) and coarse.classes[19] == "coarse 19"


def test_labels(tmp_path: Path) -> None:
    folder = write_10(tmp_path / "x")
    assert CIFAR(folder, label=None).targets == [-1] * 60
    names = {f"test_batch_{n}.png": n + 100 for n in range(COUNT)}
    assert CIFAR(folder / "test_batch", label=names).targets == list(range(100, 112))
    with pytest.raises(SourceError, match=r"has no fine_labels; its labels: labels"):
        CIFAR(folder, label="fine_labels")
    with pytest.raises(ValueError, match="label must be"):
        CIFAR(folder, label="cls")
    (folder / "batches.meta").unlink()
    assert CIFAR(folder).classes == []


@pytest.mark.parametrize("threads", [0, 2])
def test_batches(tmp_path: Path, threads: int) -> None:
    transform = v1.Compose([v1.RandomCrop(32, padding=4), v1.RandomHorizontalFlip(), v1.ToTensor()])
    folder = write_10(tmp_path / "cifar-10-batches-py")

    def epoch(tier: Literal["auto", "stock"]) -> list[Any]:
        dataset = stoker.open(folder, transform)
        loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5, tier=tier)
        assert loader.explain().tier == ("lowered" if tier == "auto" else "keyed")
        return list(loader)

    for one, two in zip(epoch("auto"), epoch("stock"), strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize("of", [10, 100])
def test_binary_batches(tmp_path: Path, of: int) -> None:
    """The same content in both versions gives the same samples."""
    write = write_10 if of == 10 else write_100
    python = write(tmp_path / "python")
    binary = tmp_path / "binary"
    binary.mkdir()
    files = [f"data_batch_{n}" for n in (1, 2, 3, 4, 5)] if of == 10 else ["train"]
    for seed, name in enumerate(files):
        columns = [fine(seed)] if of == 10 else [fine(seed, 20), fine(seed, 100)]
        records = np.concatenate([np.array(columns, np.uint8).T, pixels(seed)], 1)
        (binary / f"{name}.bin").write_bytes(records.tobytes())
    if of == 10:
        (binary / "batches.meta.txt").write_text("\n".join(WORDS) + "\n\n")
    else:
        names = "\n".join(f"fine {n}" for n in range(100))
        (binary / "fine_label_names.txt").write_text(names)
    ours, theirs = stoker.open(binary), stoker.open(python)
    assert isinstance(ours, CIFAR) and isinstance(theirs, CIFAR)
    same(ours, theirs)
    assert ours.classes == theirs.classes
    last = binary / f"{files[-1]}.bin"
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(SourceError, match="is truncated in image 11; damaged='skip'"):
        CIFAR(binary)
    with pytest.warns(StokerWarning, match="is truncated in image 11; what is damaged"):
        assert CIFAR(binary, damaged="skip").targets == theirs.targets[:-1]


def test_packing(tmp_path: Path) -> None:
    """What is packed has the suffix of what it is."""
    dataset = stoker.open(write_10(tmp_path / "cifar-10-batches-py") / "test_batch")
    pack(dataset, str(tmp_path / "out" / "a-%d.tar"))
    packed = stoker.open(tmp_path / "out" / "a-0.tar")
    assert packed.files.name(0) == "000000000.ppm"
    same(packed, dataset)


def test_other_sides(tmp_path: Path) -> None:
    """Downsampled ImageNet's batches."""
    for number in (10, 9):
        content = {"data": pixels(number, 3, 16), "labels": [1, 2, 3], "mean": np.zeros(768)}
        (tmp_path / f"train_data_batch_{number}").write_bytes(pickle.dumps(content))
    dataset = stoker.open(tmp_path)
    assert isinstance(dataset, CIFAR) and len(dataset) == 6
    wanted = pixels(10, 3, 16)[1].reshape(3, 16, 16).transpose(1, 2, 0)
    assert np.array_equal(np.asarray(dataset[4][0]), wanted)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo was run",)


def _pickle(**changed: Any) -> bytes:
    return pickle.dumps({"batch_label": "x", "labels": fine(0), "data": pixels(0)} | changed, 2)


DAMAGED = {
    "code": (_pickle(labels=Evil()), r"safely: posix\.system is asked for"),
    "no dict": (pickle.dumps(["data", 1]), "is no pickled dict, but a list"),
    "no data": (_pickle(data=b"abc"), "has no data of uint8"),
    "floats": (_pickle(data=np.zeros((12, 3072))), "has no data of uint8"),
    "no square": (_pickle(data=pixels(0)[:, :3071]), "has no data of uint8"),
    "one dimension": (_pickle(data=pixels(0)[0]), "has no data of uint8"),
    "texts": (_pickle(labels=["a"] * 12), "its labels are no list of integers"),
    "too few labels": (_pickle(labels=[1]), "has 12 images and 1 labels"),
    "truncated": (_pickle()[:-100], "cannot be unpickled safely: damaged"),
}


@pytest.mark.parametrize(("content", "told"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_batches(
    tmp_path: Path, content: bytes, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "system", None)
    folder = write_10(tmp_path / "x")
    (folder / "data_batch_3").write_bytes(content)
    for path in (folder, folder / "data_batch_3"):
        with pytest.raises(SourceError, match=f"data_batch_3: .*{told}"):
            stoker.open(path)
    with pytest.warns(StokerWarning, match=f"data_batch_3: .*{told}.*the batch is left out"):
        dataset = stoker.open(folder, damaged="skip")
    assert len(dataset) == 4 * COUNT


def test_no_damage_crashes(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    whole, rng, read = _pickle(filenames=["a"] * 12), random.Random(3), 0
    interesting = [i for i in range(len(whole)) if i < 400 or i > len(whole) - 400]
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.choice(interesting)] = rng.choice([0, 0xFF, 0x7F, rng.randrange(256)])
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dataset = CIFAR(path)
            except SourceError:
                continue
        assert dataset[0][0].mode == dataset[len(dataset) - 1][0].mode == "RGB"
        read += 1
    assert read > 20


def test_a_damaged_meta(tmp_path: Path) -> None:
    folder = write_10(tmp_path / "x")
    (folder / "batches.meta").write_bytes(b"\x80\x02}")
    with pytest.raises(SourceError, match=r"batches\.meta: cannot be unpickled safely"):
        CIFAR(folder)
    with pytest.warns(StokerWarning, match="its names of classes are left out"):
        assert CIFAR(folder, damaged="skip").classes == []


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no training batches"):
        CIFAR(tmp_path)
    (tmp_path / "train").write_text("cat/1.jpg 0\n")
    with pytest.raises(SourceError, match="for want of their files"):
        stoker.open(tmp_path / "train")
    (tmp_path / "train.bin").write_bytes(bytes([200, 200]) * 5000)
    with pytest.raises(SourceError, match="is no tar"):
        stoker.open(tmp_path / "train.bin")


def test_the_handed_batches(data: Path) -> None:
    folder = data / "formats" / "cifar" / "cifar-10-batches-py"
    dataset = stoker.open(folder)
    assert isinstance(dataset, CIFAR)
    assert dataset.classes == ["daisy", "dandelion", "rose", "sunflower", "tulip"]
    batches = [path for path in sorted(folder.iterdir()) if path.name.startswith("data_batch")]
    assert len(dataset) == 300 * len(batches) and set(dataset.targets) == {0, 1, 2, 3, 4}
    begin = 0
    for path in batches:
        with path.open("rb") as file:
            batch = pickle.load(file)  # our own test data
        assert dataset.targets[begin : begin + 300] == batch[b"labels"]
        for number, row in enumerate(batch[b"data"]):
            image = np.asarray(dataset[begin + number][0])
            assert np.array_equal(image, row.reshape(3, 32, 32).transpose(1, 2, 0))
        begin += 300
    names = [name.decode() for name in batch[b"filenames"]]
    assert list(dataset.names)[-300:] == names
