"""idx files: torchvision's MNIST reads the same ones."""

from __future__ import annotations

import gzip
import math
import random
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from torchvision.datasets import MNIST

import stoker
from stoker import cache
from stoker.errors import SourceError, StokerWarning
from stoker.sources.idx import IDX

TYPES = {"u1": 8, "i1": 9, ">i2": 11, ">i4": 12, ">f4": 13}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


def encoded(array: Any, kind: str = "u1") -> bytes:
    head = struct.pack(f">HBB{array.ndim}I", 0, TYPES[kind], array.ndim, *array.shape)
    return head + np.asarray(array).astype(kind).tobytes()


def pixels(count: int = 30, shape: tuple[int, ...] = (28, 28)) -> Any:
    values = np.random.default_rng(4).integers(0, 256, (count, *shape))
    return values.astype(np.uint8)


def numbers(count: int = 30) -> Any:
    return np.arange(count, dtype=np.uint8) % 7


def write(folder: Path, array: Any, labels: Any, start: str = "train", gz: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    end, packed = (".gz", gzip.compress) if gz else ("", bytes)
    path = folder / f"{start}-images-idx{array.ndim}-ubyte{end}"
    path.write_bytes(packed(encoded(array)))
    (folder / f"{start}-labels-idx1-ubyte{end}").write_bytes(packed(encoded(labels)))
    return path


@pytest.mark.parametrize("gz", [False, True])
def test_torchvision_reads_the_same(tmp_path: Path, gz: bool, kept: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    for start, count in (("train", 30), ("t10k", 11)):
        write(folder, pixels(count), numbers(count), start)
    theirs = MNIST(tmp_path, train=True)
    if gz:
        for path in list(folder.iterdir()):
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    for place in (tmp_path / "MNIST", folder, next(folder.glob("train-images*"))):
        ours = stoker.open(place)
        assert isinstance(ours, IDX)
        assert ours.targets == theirs.targets.tolist()
        assert len(ours) == len(theirs)
        for number, (wanted, wanted_label) in enumerate(theirs):
            image, label = ours[number]
            assert image.mode == "RGB" and label == wanted_label
            assert np.array_equal(np.asarray(image), np.asarray(wanted.convert("RGB")))
    assert len(list((kept / "expanded").glob("*images*"))) == 1 + gz
    (test,) = folder.glob("t10k-images*")
    assert len(stoker.open(test)) == len(MNIST(tmp_path, train=False) if not gz else range(11))


@pytest.mark.parametrize("threads", [0, 2])
def test_batches(tmp_path: Path, threads: int) -> None:
    transform = v1.Compose([v1.RandomCrop(20), v1.RandomHorizontalFlip(), v1.ToTensor()])
    dataset = stoker.open(write(tmp_path, pixels(), numbers()), transform)
    loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5)
    assert loader.explain().tier == "lowered"
    plain = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=0, seed=5, tier="stock")
    for one, two in zip(loader, plain, strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize("shape", [(5, 6), (5, 6, 3), (5, 6, 1), (3, 5, 6), (1, 1), (3, 3, 3)])
def test_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = pixels(4, shape)
    dataset = IDX(write(tmp_path, array, numbers(4)))
    for number, wanted in enumerate(array):
        if wanted.ndim == 2:
            wanted = wanted[..., None]
        elif shape == (3, 5, 6):
            wanted = np.moveaxis(wanted, 0, 2)
        image = np.asarray(dataset[number][0])
        assert np.array_equal(image, np.broadcast_to(wanted, image.shape))
        assert dataset[number][1] == number


def test_labels(tmp_path: Path) -> None:
    path = write(tmp_path, pixels(4), numbers(4))
    assert IDX(path, label=None).targets == [-1] * 4
    assert IDX(path, label={"0": 5, "1": 6, "2": 7, "3": 8}).targets == [5, 6, 7, 8]
    with pytest.raises(ValueError, match="label must be"):
        IDX(path, label="cls")
    beside = tmp_path / "train-labels-idx1-ubyte"
    beside.unlink()
    with pytest.warns(StokerWarning, match="no file of labels lies beside"):
        assert IDX(path).targets == [-1] * 4
    wide = np.arange(4 * 8).reshape(4, 8) + 1000
    (tmp_path / "train-labels-idx2-int.gz").write_bytes(gzip.compress(encoded(wide, ">i4")))
    assert IDX(path).targets == [1000, 1008, 1016, 1024]
    for labels, told in (
        (encoded(numbers(5)), "no labels of 4 images"),
        (encoded(numbers(4))[:-1], "is truncated"),
        (encoded(np.zeros((4, 0))), "is truncated"),
        (b"", "is no idx file"),
        (b"\0\0\x08\x01\0", "truncated in its first bytes"),
    ):
        beside.write_bytes(labels)
        with pytest.raises(SourceError, match=f"train-labels-idx1-ubyte: .*{told}"):
            IDX(path)


def test_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content, told in (
        (encoded(numbers()), "holds no images, but numbers of type u1 .* file of the images"),
        (encoded(pixels(3).astype(float), ">i4"), "holds no images, but numbers of type i4"),
        (encoded(np.zeros((3, 0, 4))), "holds no images"),
        (encoded(np.zeros((3, 4, 4, 4))), "holds no images"),
        (gzip.compress(encoded(pixels(3)))[:-9], "truncated"),
        (gzip.compress(encoded(pixels(3)) + b"more"), "gives more than"),
        (gzip.compress(encoded(np.zeros((1, 1, 1))))[:-8] + bytes(8), "incorrect data check"),
    ):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=told):
            stoker.open(path)
    for name in ("emnist-mnist", "emnist-letters"):
        write(tmp_path / "raw", pixels(3), numbers(3), f"{name}-train")
    with pytest.raises(
        SourceError, match=r"several files .*: emnist-letters-train.*, emnist-mnist"
    ):
        stoker.open(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="has no file of training images"):
        IDX(tmp_path / "empty")
    with pytest.raises(SourceError, match="No such file"):
        IDX(tmp_path / "absent")


def test_truncated_files_lose_what_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path, pixels(), numbers())
    whole = path.read_bytes()
    for end in (17, 16 + 784, 16 + 784 * 20 + 5, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(SourceError, match="is truncated: the images from"):
            IDX(path)
        with pytest.warns(StokerWarning, match=f"from {(end - 16) // 784} to 29 are not there"):
            dataset = IDX(path, damaged="skip")
        assert len(dataset) == (end - 16) // 784
        for number in range(len(dataset)):
            image, label = dataset[number]
            assert np.array_equal(np.asarray(image)[..., 0], pixels()[number])
            assert label == number % 7


def test_no_damage_crashes(tmp_path: Path) -> None:
    path = write(tmp_path, pixels(), numbers(), gz=True)
    plain = write(tmp_path, pixels(), numbers())
    rng, read = random.Random(3), 0
    for file in (path, plain):
        whole = file.read_bytes()
        for _ in range(150):
            data = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
            for _ in range(rng.randrange(1, 4)):
                if data:
                    data[rng.choice([rng.randrange(min(20, len(data))), -1])] = rng.randrange(256)
            file.write_bytes(data)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    dataset = IDX(file, damaged="skip")
                except SourceError:
                    continue
            assert all(dataset[i] for i in range(0, len(dataset), 9))
            read += 1
    assert read > 30


def test_pixels_are_written_once(tmp_path: Path, kept: Path) -> None:
    path = write(tmp_path, pixels(), numbers())
    first = IDX(path)
    (made,) = (kept / "expanded").iterdir()
    assert first.shards == [str(made)]
    state = made.stat()
    assert state.st_size == 30 * (784 + len(b"P5\n28 28\n255\n"))
    IDX(path)
    assert made.stat().st_mtime_ns == state.st_mtime_ns
    made.write_bytes(b"short")
    assert np.array_equal(np.asarray(IDX(path)[3][0])[..., 0], pixels()[3])


def test_the_handed_file(data: Path) -> None:
    path = data / "formats" / "idx" / "test-images-idx3-ubyte"
    dataset = stoker.open(path)
    assert isinstance(dataset, IDX) and len(dataset) == 100 and dataset.targets == [1] * 100
    content = path.read_bytes()
    for number in range(100):
        image = dataset[number][0]
        assert image.size == (28, 28)
        begin = 16 + number * math.prod(image.size)
        assert np.asarray(image)[..., 0].tobytes() == content[begin : begin + 784]
