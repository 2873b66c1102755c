"""TFRecord shards: as TensorFlow and the tfrecord package write them, sound and damaged."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.transforms as v1

import stoker
from pictures import class_folder
from stoker import cache
from stoker.errors import DecodeError, SourceError, StokerWarning
from stoker.sources import tfrecord
from stoker.sources.tfrecord import TFRecord, recognises

writers = pytest.importorskip("tfrecord")

Feature = tuple[Any, str]
Record = dict[str, Feature]

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


def write(path: Path, records: list[Record]) -> Path:
    writer = writers.TFRecordWriter(str(path))
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes"), 24)


@pytest.fixture(scope="module")
def records(folder: Path) -> list[Record]:
    """The pictures of the folder, in its order, as ImageNet's records are."""
    return [
        {
            "image/height": (1, "int"),
            "image/encoded": (Path(path).read_bytes(), "byte"),
            "image/class/label": (label + 1, "int"),
            "image/filename": (os.path.basename(path).encode(), "byte"),
            "image/object/bbox/xmin": ([0.5, 0.25], "float"),
        }
        for path, label in stoker.ImageFolder(folder, cache=False).samples
    ]


@pytest.fixture
def shards(tmp_path: Path, records: list[Record]) -> str:
    for number in range(3):
        write(tmp_path / f"train-{number}", records[number * 8 : number * 8 + 8])
    return f"{tmp_path}/train-{{0..2}}"


@pytest.mark.parametrize("threads", [0, 2])
def test_batches_are_those_of_the_folder(folder: Path, shards: str, threads: int) -> None:
    def epoch(dataset: Any) -> list[Any]:
        loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5)
        assert loader.explain().tier == "lowered"
        return list(loader)

    ours = epoch(stoker.open(shards, TRAIN, label_offset=-1))
    theirs = epoch(stoker.ImageFolder(folder, TRAIN))
    assert len(ours) == 4
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_names_and_facts(shards: str, records: list[Record]) -> None:
    dataset = stoker.open(shards)
    assert isinstance(dataset, TFRecord)
    assert list(dataset.names) == [record["image/filename"][0].decode() for record in records]
    assert dataset.shards == [shards.replace("{0..2}", str(n)) for n in range(3)]
    assert dataset.targets == [record["image/class/label"][0] for record in records]


IMAGE: Feature = (b"\xff\xd8 no more", "byte")
LABELS: dict[str, tuple[list[Record], dict[str, Any], list[int], list[str]]] = {
    "of TFDS": ([{"image": IMAGE, "label": (7, "int")}], {}, [7], []),
    "negative": ([{"image": IMAGE, "label": (-7, "int")}], {"label_offset": 2}, [-5], []),
    "64 bits": ([{"image": IMAGE, "label": (-(2**63), "int")}], {}, [-(2**63)], []),
    "a text": (
        [{"image": IMAGE, "label": (text, "byte")} for text in (b"emu", b"cat")],
        {},
        [1, 0],
        ["cat", "emu"],
    ),
    "another feature": ([{"image": IMAGE, "kind": (3, "int")}], {"label": "kind"}, [3], []),
    "given classes": (
        [{"image": IMAGE, "label": (b"emu", "byte")}],
        {"classes": ["cat", "emu"]},
        [1],
        ["cat", "emu"],
    ),
    "a mapping": (
        [{"image": IMAGE, "filename": (b"a.jpg", "byte")}],
        {"label": {"a.jpg": 4}},
        [4],
        [],
    ),
    "none": ([{"image": IMAGE, "label": (7, "int")}], {"label": None}, [-1], []),
    "there is none": ([{"image": IMAGE, "other": (7.0, "float")}], {}, [-1], []),
    "a list": ([{"image": IMAGE, "label": ([1, 2], "int")}], {}, [-1], []),
}


@pytest.mark.parametrize("case", LABELS.values(), ids=LABELS)
def test_labels(tmp_path: Path, case: tuple[Any, ...]) -> None:
    written, options, labels, classes = case
    dataset = TFRecord(write(tmp_path / "a", written), **options)
    assert dataset.targets == labels and dataset.classes == classes


def test_labels_that_are_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [{"image": IMAGE, "label": ([1, 2], "int")}])
    with pytest.raises(SourceError, match="no record has one integer or text in feature 'label'"):
        TFRecord(path, label="label")
    path = write(tmp_path / "a", [{"image": IMAGE}, {"image": IMAGE, "label": (3, "int")}])
    with pytest.warns(StokerWarning, match="sample 0 without a label"):
        assert TFRecord(path).targets == [-1, 3]


def test_no_image(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [{"picture": IMAGE, "label": (3, "int")}])
    for damaged in ("raise", "skip"):
        with pytest.raises(SourceError, match="image/encoded or image; its features: label, pict"):
            stoker.open(path, damaged=damaged)
    assert len(stoker.open(path, image="picture")) == 1


def test_a_broken_image_has_the_name_of_shard_and_record(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [{"image": IMAGE, "filename": (b"x.jpg", "byte")}])
    with pytest.raises(DecodeError, match=r"/a:x\.jpg"):
        list(stoker.DataLoader(stoker.open(path, TRAIN), 1, num_workers=1))


# Compressed


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "two gzip members": lambda data: gzip.compress(data[:777]) + gzip.compress(data[777:]),
}


@pytest.mark.parametrize("compress", COMPRESS.values(), ids=COMPRESS)
def test_compressed_shards_are_expanded_once(
    shards: str, kept: Path, compress: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shards.replace("{0..2}", "0"))
    plain = TFRecord(path)
    packed = path.with_suffix(".gz")
    packed.write_bytes(compress(path.read_bytes()))
    dataset = stoker.open(packed)
    assert isinstance(dataset, TFRecord) and dataset.shards == [str(packed)]
    monkeypatch.setattr(tfrecord, "inflate", None)
    again = stoker.open(packed)
    for one in (dataset, again):
        assert one.targets == plain.targets
        contents = [one.files.opened(i).read() for i in range(len(one))]
        assert contents == [plain.files.opened(i).read() for i in range(len(plain))]
    assert len(list((kept / "expanded").iterdir())) == 1


def test_a_truncated_compressed_shard_leaves_nothing(shards: str, kept: Path) -> None:
    path = Path(shards.replace("{0..2}", "0"))
    path.write_bytes(gzip.compress(path.read_bytes())[:-300])
    with pytest.raises(SourceError, match="compressed data is truncated"):
        stoker.open(path)
    assert list((kept / "expanded").iterdir()) == []


def test_an_unwritable_cache_says_where(shards: str, tmp_path: Path) -> None:
    path = Path(shards.replace("{0..2}", "0"))
    path.write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(SourceError, match=r"train-0: .*cache"):
        stoker.open(path)


# Damage


def _damage(path: Path, place: int, value: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ value]))


def _begins(path: Path) -> list[int]:
    data, at, begins = path.read_bytes(), 0, []
    while at < len(data):
        begins.append(at)
        at += 16 + struct.unpack_from("<Q", data, at)[0]
    return begins


def test_a_wrong_crc_loses_its_record_only(shards: str) -> None:
    path = Path(shards.replace("{0..2}", "1"))
    whole = list(TFRecord(path).names)
    _damage(path, _begins(path)[3] + 40)
    with pytest.raises(SourceError, match=r"train-1: record 3 has a wrong CRC; 7 are whole"):
        TFRecord(path)
    with pytest.warns(StokerWarning, match="record 3"):
        assert list(TFRecord(path, damaged="skip").names) == whole[:3] + whole[4:]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda path, at: _damage(path, at + 6, 0x7F), "is damaged at byte"),
        (lambda path, at: os.truncate(path, at + 5), "is truncated at byte"),
        (lambda path, at: os.truncate(path, at + 200), "is truncated in record 3"),
    ],
)
def test_the_rest_is_lost(shards: str, spoil: Callable[[Path, int], None], told: str) -> None:
    path = Path(shards.replace("{0..2}", "1"))
    spoil(path, _begins(path)[3])
    with pytest.raises(SourceError, match=told):
        TFRecord(path)
    with pytest.warns(StokerWarning, match=told):
        assert len(TFRecord(path, damaged="skip")) == 3


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    for content in (bytes(100), b"ab"):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(SourceError, match="is no TFRecord"):
            TFRecord(tmp_path / "x")
        assert not recognises("", content)
    with pytest.raises(SourceError, match="No such file"):
        TFRecord(tmp_path / "absent")
    with pytest.raises(SourceError, match="is no file"):
        TFRecord(tmp_path)


def test_hostile_records_crash_nothing_and_lead_nowhere(shards: str) -> None:
    path = Path(shards.replace("{0..2}", "0"))
    whole, rng, begins = path.read_bytes(), random.Random(3), _begins(path)
    crc32c = tfrecord._crc32c()
    kept = 0
    for _ in range(300):
        data = bytearray(whole)
        for begin, end in pairwise([*begins, len(data)]):
            for _ in range(rng.randrange(3)):
                place = begin + 12 + rng.randrange(min(120, end - begin - 16))
                data[place] = rng.choice([0, 1, 8, 10, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            # As one who knows the format would.
            crc = tfrecord._masked(crc32c(bytes(data[begin + 12 : end - 4])))
            data[end - 4 : end] = struct.pack("<I", crc)
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dataset = TFRecord(path, damaged="skip", cache=False)
            except (SourceError, ValueError):
                continue
        kept += len(dataset)
        extents = dataset.files.extents
        assert extents is not None
        assert (extents.begin >= 0).all() and (extents.length >= 0).all()
        assert (extents.begin + extents.length <= len(data)).all()
    assert 300 < kept < 2400


# The handed shards


@pytest.mark.parametrize(
    ("shards", "expected", "offset"),
    [
        ("imagenet_style/*", "tfrecord_imagenet_style", -1),
        ("gzip.tfrecord.gz", "tfrecord_gzip", -1),
        ("raccoon_test.record", "tfrecord_raccoon_test", 0),
    ],
)
def test_tensorflows_own_shards(data: Path, shards: str, expected: str, offset: int) -> None:
    formats = data / "formats"
    dataset = stoker.open(formats / "tfrecord" / shards, label_offset=offset)
    assert isinstance(dataset, TFRecord)
    wanted = json.loads((formats / f"EXPECT_{expected}.json").read_text())
    assert len(dataset) == len(wanted)
    for row, one in enumerate(wanted):
        content = dataset.files.opened(row).read()
        assert hashlib.sha256(content).hexdigest() == one["sha256"]
        assert dataset.files.name(row) == one["key"]
        assert dataset.files.size(row) == (one["height"], one["width"])
        assert dataset.targets[row] == one.get("label", -1)


@pytest.mark.parametrize(
    ("name", "whole", "told"),
    [
        ("bad_data_crc", 9, "record 0 has a wrong CRC"),
        ("bad_length", 1, "is damaged at byte 24,449"),
        ("truncated", 4, "is truncated in record 4"),
    ],
)
def test_handed_damage(data: Path, name: str, whole: int, told: str) -> None:
    path = data / "formats" / "tfrecord" / f"{name}.tfrecord"
    with pytest.raises(SourceError, match=told):
        stoker.open(path)
    with pytest.warns(StokerWarning, match=told):
        assert len(stoker.open(path, damaged="skip")) == whole


def test_without_its_extra_it_says_so(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(ImportError, match=r"stoker\[tfrecord\]"):
        stoker.open(shards)
