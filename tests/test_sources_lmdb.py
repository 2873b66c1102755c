"""LMDB environments: as LMDB itself writes and reads them, sound and damaged."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import stoker
from pictures import class_folder
from stoker import cache
from stoker.errors import DecodeError, SourceError, StokerWarning
from stoker.sources.lmdb import LMDB, _Pages

lmdb = pytest.importorskip("lmdb")

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
JPEG = b"\xff\xd8\xff no more than that"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


def write(path: Path, values: dict[bytes, bytes], **options: Any) -> Path:
    environment = lmdb.open(str(path), map_size=1 << 28, **options)
    with environment.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key, value)
    environment.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes"), 24)


@pytest.fixture(scope="module")
def pictures(folder: Path) -> list[tuple[bytes, int]]:
    samples = stoker.ImageFolder(folder, cache=False).samples
    return [(Path(path).read_bytes(), label) for path, label in samples]


def datum(image: bytes, label: int, encoded: bool = True) -> bytes:
    """Caffe's message, built by hand."""

    def varint(value: int) -> bytes:
        out = b""
        while value > 127:
            out += bytes([value & 127 | 128])
            value >>= 7
        return out + bytes([value])

    head = b"\x08\x03\x10" + varint(90) + b"\x18" + varint(300)
    return (
        head
        + b"\x22"
        + varint(len(image))
        + image
        + b"\x28"
        + varint(label)
        + b"\x38"
        + varint(encoded)
    )


STYLES = {
    "pickled tuples": lambda i, image, label: (b"%d" % i, pickle.dumps((image, label))),
    "pickled arrays": lambda i, image, label: (
        b"%d" % i,
        pickle.dumps([np.frombuffer(image, np.uint8), np.int64(label)], 4),
    ),
    "pickled arrays, protocol 5": lambda i, image, label: (
        b"%05d" % i,
        pickle.dumps((np.int32(label), np.frombuffer(image, np.uint8)), 5),
    ),
    "Datum": lambda i, image, label: (b"%08d" % i, datum(image, label)),
}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("threads", [0, 2])
def test_batches_are_those_of_the_folder(
    tmp_path: Path, folder: Path, pictures: list[tuple[bytes, int]], style: Any, threads: int
) -> None:
    values = dict(style(i, *picture) for i, picture in enumerate(pictures))
    path = write(tmp_path / "x.lmdb", values | {b"__len__": pickle.dumps(24)})

    def epoch(dataset: Any) -> list[Any]:
        loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5)
        assert loader.explain().tier == "lowered"
        return list(loader)

    ours, theirs = epoch(stoker.open(path, TRAIN)), epoch(stoker.ImageFolder(folder, TRAIN))
    assert len(ours) == 4
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_numbered_images_and_labels(tmp_path: Path, pictures: list[tuple[bytes, int]]) -> None:
    values = {b"num-samples": b"24"}
    for i, (image, label) in enumerate(pictures, 1):
        values[b"image-%09d" % i] = image
        values[b"label-%09d" % i] = (b"cat", b"emu", b"owl")[label]
    dataset = stoker.open(write(tmp_path / "x", values, subdir=False))
    assert isinstance(dataset, LMDB)
    assert dataset.classes == ["cat", "emu", "owl"]
    assert dataset.targets == [label for _, label in pictures]
    contents = [dataset.files.opened(i).read() for i in range(24)]
    assert contents == [image for image, _ in pictures]


def test_names_and_other_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {b"b.jpg": JPEG, b"a/c.jpg": JPEG, b"readme": b"hello"})
    dataset = stoker.open(path)
    assert isinstance(dataset, LMDB)
    assert list(dataset.names) == ["a/c.jpg", "b.jpg"] and dataset.targets == [-1, -1]
    assert LMDB(path, label={"b.jpg": 4, "a/c.jpg": 2}).targets == [2, 4]
    with pytest.warns(StokerWarning, match=r"sample a/c\.jpg without a label"):
        assert LMDB(path, label={"b.jpg": "owl"}, classes=["emu", "owl"]).targets == [-1, 1]
    assert LMDB(path, label=None).targets == [-1, -1]
    with pytest.raises(ValueError, match="label must be"):
        LMDB(path, label="cls")
    with pytest.raises(ValueError, match="image='x' says nothing to an LMDB environment"):
        stoker.open(path, image="x")
    with pytest.raises(DecodeError, match=r"data\.mdb:b\.jpg"):
        dataset[1]


def test_numbers_count_as_numbers(tmp_path: Path) -> None:
    values = {b"%d" % i: JPEG + bytes([i]) for i in range(30)} | {b"__keys__": b"x"}
    assert list(LMDB(write(tmp_path / "x", values)).names) == [str(i) for i in range(30)]


@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=200),
        st.one_of(st.binary(max_size=50), st.integers(0, 9000).map(bytes)),
        max_size=150,
    ),
    st.lists(st.integers(0, 149), max_size=40),
)
@settings(max_examples=40, deadline=None)
def test_values_are_those_of_lmdb(
    tmp_path_factory: pytest.TempPathFactory, values: dict[bytes, bytes], removed: list[int]
) -> None:
    path = write(tmp_path_factory.mktemp("lmdb") / "x", values)
    environment = lmdb.open(str(path), map_size=1 << 28)
    with environment.begin(write=True) as transaction:
        for place in removed:
            for key in list(values)[place : place + 1]:
                transaction.delete(key)
    with environment.begin() as transaction:
        expected = [(bytes(key), bytes(value)) for key, value in transaction.cursor()]
    environment.close()
    with open(path / "data.mdb", "rb") as file:
        pages = _Pages(file.fileno(), os.path.getsize(path / "data.mdb"))
        found = [(key, pages.read(begin, length)) for key, begin, length in pages.values()]
    assert found == expected and pages.entries == len(expected)


# What is refused


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo this must never run",)


@pytest.mark.parametrize(
    "value", [Evil(), (JPEG, Evil()), [np.random.default_rng()], (JPEG, stoker.DataLoader)]
)
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_pickles_run_nothing(
    tmp_path: Path, value: Any, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = pickle.dumps(value, protocol)
    monkeypatch.setattr(os, "system", None)
    path = write(tmp_path / "x", {b"1": content, b"2": pickle.dumps((JPEG, 1), protocol)})
    with pytest.raises(SourceError, match="value of '1': cannot be unpickled safely"):
        LMDB(path)
    with pytest.warns(StokerWarning, match="value of '1'"):
        assert list(LMDB(path, damaged="skip").names) == ["2"]


def test_old_pickles(tmp_path: Path) -> None:
    # Python 2 wrote texts of bytes; Python 3 under its protocol writes bytes as a call to a codec.
    two = b"\x80\x02(T" + struct.pack("<I", len(JPEG)) + JPEG + b"K\x07t."
    dataset = LMDB(write(tmp_path / "x", {b"1": two}))
    assert dataset.targets == [7] and dataset.files.opened(0).read() == JPEG
    with pytest.raises(SourceError, match="an encoding of its own"):
        LMDB(write(tmp_path / "y", {b"1": pickle.dumps((JPEG, 1), 2)}))


def test_datums_of_pixels(tmp_path: Path, kept: Path) -> None:
    """Planes of blue, green, red, as OpenCV gives them to Caffe, among encoded images."""
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 256, (3, 90, 300)).astype(np.uint8)
    gray = rng.integers(0, 256, (1, 90, 300)).astype(np.uint8)
    whole = io.BytesIO()
    Image.fromarray(pixels[0]).save(whole, "png")
    one = datum(gray.tobytes(), 8, encoded=False).replace(b"\x08\x03\x10", b"\x08\x01\x10", 1)
    values = {
        b"0": datum(whole.getvalue(), 5),
        b"1": datum(pixels.tobytes(), 7, encoded=False),
        b"2": one,
        b"3": datum(whole.getvalue(), 6),
    }
    path = write(tmp_path / "x", values)
    os.utime(path / "data.mdb", (1, 1))  # so that the index is kept
    for _ in range(2):
        dataset = LMDB(path)
        assert dataset.targets == [5, 7, 8, 6] and len(dataset.shards) == 2
        wanted = [pixels[[0, 0, 0]], pixels[::-1], gray[[0, 0, 0]], pixels[[0, 0, 0]]]
        for row, planes in enumerate(wanted):
            assert np.array_equal(np.asarray(dataset[row][0]), planes.transpose(1, 2, 0))
        assert len(list((kept / "expanded").iterdir())) == 1
    assert LMDB(tmp_path / "x", label={"1": 3, "0": 0, "2": 2, "3": 9}).targets == [0, 3, 2, 9]
    wrong = write(tmp_path / "y", values | {b"4": datum(bytes(300), 1, encoded=False)})
    with pytest.raises(SourceError, match="value of '4': a Datum without an image of one or three"):
        LMDB(wrong)


@pytest.mark.parametrize("options", [{"max_dbs": 2}, {}])
def test_other_databases(tmp_path: Path, options: dict[str, Any]) -> None:
    environment = lmdb.open(str(tmp_path / "x"), map_size=1 << 24, **options)
    if options:
        database = environment.open_db(b"inner", dupsort=True)
        with environment.begin(write=True, db=database) as transaction:
            transaction.put(b"1", b"2")
            transaction.put(b"1", b"3")
    environment.close()
    told = "named databases" if options else "no image in any value"
    with pytest.raises(SourceError, match=told):
        stoker.open(tmp_path / "x")


def test_absent_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        LMDB(tmp_path / "x")
    for content in (b"", b"\0" * 5000, struct.pack("<QHHHH", 0, 0, 8, 0, 0)):
        (tmp_path / "data.mdb").write_bytes(content)
        with pytest.raises(SourceError, match="is no LMDB environment"):
            LMDB(tmp_path)


@pytest.mark.parametrize("size", [40, 50, 100, 151, 152, 4096, 8191])
def test_truncated_in_its_first_pages(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "x", {b"1": JPEG})
    os.truncate(path / "data.mdb", size)
    with pytest.raises(SourceError, match="is truncated"):
        stoker.open(path)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_truncated(tmp_path: Path, pictures: list[tuple[bytes, int]], share: float) -> None:
    path = write(tmp_path / "x", {b"%d" % i: image for i, (image, _) in enumerate(pictures)})
    file = path / "data.mdb"
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(SourceError, match="is truncated: it has"):
        stoker.open(path)


def test_no_damage_crashes_or_reads_outside(tmp_path: Path) -> None:
    values = {b"%d" % i: pickle.dumps((JPEG * (i % 90), i)) for i in range(300)}
    file = write(tmp_path / "x", values) / "data.mdb"
    whole, rng, outcomes = file.read_bytes(), random.Random(5), []
    used = [at for at in range(0, len(whole), 4096) if any(whole[at : at + 4096])]
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            place = rng.choice(used) + rng.choice([rng.randrange(200), rng.randrange(4096)])
            data[place] = rng.choice([0, 1, 2, 0x10, 0x7F, 0xFF, rng.randrange(256)])
        file.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dataset = LMDB(file, damaged="skip", cache=False)
            except (SourceError, ValueError) as error:
                outcomes.append(str(error))
                continue
        outcomes.append("")
        extents = dataset.files.extents
        assert extents is not None
        assert (extents.begin >= 0).all() and (extents.length >= 0).all()
        assert (extents.begin + extents.length <= len(data)).all()
    assert 20 < outcomes.count("") < 300


# The handed environments


def test_handed_environments(data: Path) -> None:
    formats = data / "formats"
    dataset = stoker.open(formats / "lmdb" / "str_style.lmdb")
    assert isinstance(dataset, LMDB) and dataset.classes == ["ants", "bees"]
    wanted = json.loads((formats / "EXPECT_lmdb_str_style.json").read_text())
    assert len(dataset) == len(wanted) == 30
    for row, one in enumerate(wanted):
        content = dataset.files.opened(row).read()
        assert hashlib.sha256(content).hexdigest() == one["sha256"]
        assert dataset.files.name(row) == one["key"]
        assert dataset.files.size(row) == (one["height"], one["width"])
        assert dataset.targets[row] == one["label"]
    assert len(stoker.open(formats / "lmdb" / "mmocr_imgs.lmdb")) == 10
    with pytest.raises(SourceError, match="no image in any value"):
        stoker.open(formats / "lmdb" / "mmocr_label.lmdb")
    with pytest.raises(SourceError, match="is truncated"):
        stoker.open(formats / "lmdb" / "truncated.lmdb")
