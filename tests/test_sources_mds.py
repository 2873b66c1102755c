"""MDS shards: as mosaicml-streaming writes them, sound and damaged."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import os
import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from PIL import Image

import stoker
from pictures import class_folder
from stoker import cache
from stoker.errors import SourceError, StokerWarning
from stoker.sources import mds
from stoker.sources.mds import MDS

zstandard = pytest.importorskip("zstandard")

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
COLUMNS = {"id": "int16", "image": "jpeg", "label": "int", "name": "str"}
SIZES = {"int": 8, "int16": 2, "uint8": 1}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


def encoded(kind: str, value: Any) -> bytes:
    if kind in SIZES:
        return np.array(value, {"int": "<i8", "int16": "<i2", "uint8": "u1"}[kind]).tobytes()
    return value.encode() if kind == "str" else bytes(value)


def write(
    folder: Path, samples: list[dict[str, Any]], columns: dict[str, str] = COLUMNS, each: int = 9
) -> Path:
    """Writes samples by the format's description, ``each`` in a shard."""
    folder.mkdir()
    shards = []
    for number, first in enumerate(range(0, len(samples), each)):
        bodies = []
        for sample in samples[first : first + each]:
            parts = {name: encoded(kind, sample[name]) for name, kind in columns.items()}
            sizes = [len(parts[name]) for name, kind in columns.items() if kind not in SIZES]
            bodies.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(parts.values()))
        shape = {
            "column_encodings": list(columns.values()),
            "column_names": list(columns),
            "column_sizes": [SIZES.get(kind) for kind in columns.values()],
            "compression": None,
            "format": "mds",
            "hashes": ["sha1"],
            "version": 2,
        }
        begin = 4 * (len(bodies) + 2) + len(json.dumps(shape))
        places = np.cumsum([begin, *map(len, bodies)])
        data = struct.pack(f"<{len(places) + 1}I", len(bodies), *places)
        data += json.dumps(shape).encode() + b"".join(bodies)
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(data)
        raw = {
            "basename": name,
            "bytes": len(data),
            "hashes": {"sha1": hashlib.sha1(data).hexdigest()},
        }
        shards.append({**shape, "raw_data": raw, "samples": len(bodies), "zip_data": None})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes"), 24)


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[dict[str, Any]]:
    return [
        {"id": i, "image": Path(path).read_bytes(), "label": label, "name": f"n{i}"}
        for i, (path, label) in enumerate(stoker.ImageFolder(folder, cache=False).samples)
    ]


@pytest.fixture
def shards(tmp_path: Path, samples: list[dict[str, Any]]) -> Path:
    return write(tmp_path / "mds", samples)


@pytest.mark.parametrize("threads", [0, 2])
def test_batches_are_those_of_the_folder(folder: Path, shards: Path, threads: int) -> None:
    def epoch(dataset: Any) -> list[Any]:
        loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5)
        assert loader.explain().tier == "lowered"
        return list(loader)

    ours, theirs = epoch(stoker.open(shards, TRAIN)), epoch(stoker.ImageFolder(folder, TRAIN))
    assert len(ours) == 4
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_columns(tmp_path: Path) -> None:
    columns = {"a": "jpeg", "b": "bytes", "kind": "str", "n": "uint8", "pixels": "ndarray"}
    given = [
        {"a": b"AA", "b": b"BBB", "kind": kind, "n": n, "pixels": b"1234"}
        for kind, n in (("emu", 200), ("cat", 3), ("emu", 0))
    ]
    path = write(tmp_path / "x", given, columns)
    plain = stoker.open(path)
    assert isinstance(plain, MDS)
    assert plain.files.opened(0).read() == b"AA" and plain.targets == [-1] * 3
    assert list(plain.names) == ["0", "1", "2"]
    other = MDS(path, image="b", label="kind")
    assert other.files.opened(1).read() == b"BBB"
    assert (other.targets, other.classes) == ([1, 0, 1], ["cat", "emu"])
    assert MDS(path, label="n").targets == [200, 3, 0]
    assert MDS(path, label={"0": 5, "1": 6, "2": 7}).targets == [5, 6, 7]
    assert MDS(path, label=None).targets == [-1] * 3
    for wrong in ({"image": "kind"}, {"image": "c"}, {"label": "pixels"}, {"label": "c"}):
        with pytest.raises(SourceError, match=r"no column .*; columns: a \(jpeg\), b \(bytes\)"):
            MDS(path, **wrong)  # type: ignore[arg-type]


def _edited(folder: Path, edit: Callable[[Any], object]) -> Path:
    path = folder / "index.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda i: i["shards"][1]["raw_data"].update(basename="../x.mds"), "shard 1: has a shard"),
        (lambda i: i["shards"][1]["raw_data"].update(basename="/etc/x"), "shard 1: has a shard"),
        (lambda i: i["shards"][1].update(format="xyz"), "of format xyz"),
        (lambda i: i["shards"][1].pop("samples"), "shard 1: 'samples'"),
        (lambda i: i["shards"][1].update(samples="many"), "shard 1: invalid literal"),
        (lambda i: i["shards"][1].update(samples=8), "has 9 samples, and 8 in the index"),
        (lambda i: i["shards"][1].update(samples=10**9), "shorter than its samples' places"),
        (lambda i: i["shards"][1].update(column_sizes=[2, None, 8]), "shard 1: zip"),
        (lambda i: i["shards"][1].update(column_sizes=[2, None, 8, -1]), "negative size"),
        (lambda i: i["shards"][1].update(column_names=["a", "b", "c", "d"]), "different columns"),
        (lambda i: i["shards"][1]["raw_data"].update(bytes=5), "and 5 in the index"),
        (lambda i: i["shards"][1]["raw_data"]["hashes"].update(sha1="0"), "its sha1 is not"),
        (lambda i: i["shards"].clear(), "has no"),
    ],
)
def test_a_damaged_index(shards: Path, edit: Callable[[Any], object], told: str) -> None:
    with pytest.raises(SourceError, match=told):
        MDS(_edited(shards, edit))


def test_hashes_that_nobody_knows_are_no_hindrance(shards: Path) -> None:
    folder = _edited(shards, lambda i: i["shards"][0]["raw_data"].update(hashes={"xxh64": "0"}))
    assert len(MDS(folder)) == 24


def test_absent_shards(shards: Path) -> None:
    os.rename(shards / "shard.00001.mds", shards / "shard.00001.mds.zstd")
    with pytest.raises(SourceError, match=r"shard\.00001\.mds: No such file"):
        stoker.open(shards)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "zstd:3": lambda data: zstandard.ZstdCompressor(3).compress(data),
    "gz:9": gzip.compress,
    "bz2": bz2.compress,
    "snappy": bytes,
}


def compress(folder: Path, kind: str) -> Path:
    """Replaces the shards by compressed ones."""

    def edit(index: Any) -> None:
        for shard in index["shards"]:
            plain = folder / shard["raw_data"]["basename"]
            data = COMPRESS[kind](plain.read_bytes())
            packed = plain.with_name(f"{plain.name}.{kind.partition(':')[0]}")
            packed.write_bytes(data)
            plain.unlink()
            hashes = {"sha256": hashlib.sha256(data).hexdigest()}
            shard["zip_data"] = {"basename": packed.name, "bytes": len(data), "hashes": hashes}
            shard["compression"] = kind

    return _edited(folder, edit)


@pytest.mark.parametrize("kind", ["zstd:3", "gz:9", "bz2"])
def test_compressed_shards_are_expanded_once(
    shards: Path, kept: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = MDS(shards)
    wanted = [(plain.files.opened(row).read(), plain.targets[row]) for row in range(24)]
    half = shards / "shard.00000.mds"
    content = half.read_bytes()
    compress(shards, kind)
    packed = stoker.open(shards)
    assert [(packed.files.opened(n).read(), packed.targets[n]) for n in range(24)] == wanted
    made = list((kept / "expanded").iterdir())
    assert sorted(map(str, made)) == sorted(packed.shards) and len(made) == 3  # type: ignore[attr-defined]
    monkeypatch.setattr(mds, "decompress", None)
    assert len(MDS(shards)) == 24
    half.write_bytes(content)
    both = MDS(shards)
    assert both.shards[0] == str(half) and both.shards[1:] == packed.shards[1:]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", COMPRESS)
def test_damaged_compressed_shards(shards: Path, kept: Path, kind: str) -> None:
    compress(shards, kind)
    (path,) = shards.glob("shard.00001*")
    whole = path.read_bytes()
    if kind == "snappy":
        with pytest.raises(SourceError, match="compressed with snappy, which is not read"):
            MDS(shards)
        return
    path.write_bytes(whole[:-1])
    with pytest.raises(
        SourceError, match=r"00001\.mds.*: has [\d,]+ bytes, and [\d,]+ in the index"
    ):
        MDS(shards)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0x55
    path.write_bytes(damaged)
    with pytest.raises(SourceError, match="its sha256 is not that of the index"):
        MDS(shards)
    rng = random.Random(5)
    _edited(shards, lambda i: [s["zip_data"].update(hashes={}) for s in i["shards"]])
    for _ in range(20):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            dataset = MDS(shards)
        except SourceError:
            continue
        assert len(dataset) == 24  # a flag that does not count

    def cached() -> set[Path]:
        return set((kept / "expanded").iterdir())

    # More than the index says: no byte of it stays.
    before = cached()
    path.write_bytes(COMPRESS[kind](bytes(1 << 25)))
    size = path.stat().st_size
    _edited(shards, lambda i: i["shards"][1]["zip_data"].update(bytes=size))
    with pytest.raises(SourceError, match="the compressed data gives more than"):
        MDS(shards)
    assert cached() == before
    _edited(shards, lambda i: i["shards"][1]["zip_data"].update(basename="../x"))
    with pytest.raises(SourceError, match=r"has a shard '\.\./x', which is no name of a file"):
        MDS(shards)


def test_pil_columns(tmp_path: Path, samples: list[dict[str, Any]]) -> None:
    def raw(image: Image.Image) -> bytes:
        mode = image.mode.encode()
        return struct.pack("<III", *image.size, len(mode)) + mode + image.tobytes()

    opened = [Image.open(io.BytesIO(sample["image"])) for sample in samples]
    images = [image.convert("L" if n % 3 else "RGB") for n, image in enumerate(opened)]
    given = [{"image": raw(image), "label": n} for n, image in enumerate(images)]
    columns = {"image": "pil", "label": "int"}
    dataset = MDS(write(tmp_path / "x", given, columns))
    for row, image in enumerate(images):
        found, label = dataset[row]
        assert label == row and np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))
    given[3] = {"image": raw(Image.new("RGBA", (3, 3))), "label": 3}
    with pytest.raises(SourceError, match="sample 3 is no PIL image of mode L or RGB, but 'RGBA'"):
        MDS(write(tmp_path / "y", given, columns))
    given[3] = {"image": raw(Image.new("RGB", (3, 3)))[:-1], "label": 3}
    with pytest.raises(SourceError, match="sample 3 is no PIL image"):
        MDS(write(tmp_path / "z", given, columns))


@pytest.mark.parametrize("compression", [None, "zstd:3", "gz", "bz2:9"])
@pytest.mark.parametrize("encoding", ["jpeg", "pil", "bytes"])
def test_what_the_streaming_package_writes(
    tmp_path: Path, samples: list[dict[str, Any]], compression: str | None, encoding: str
) -> None:
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    images = [Image.open(io.BytesIO(sample["image"])).convert("RGB") for sample in samples[:9]]
    jpegs = [tmp_path / f"{number}.jpg" for number in range(9)]
    for image, file in zip(images, jpegs, strict=True):
        image.save(file)
    with streaming.MDSWriter(
        out=str(tmp_path / "x"),
        columns={"image": encoding, "label": "int"},
        compression=compression,
        hashes=["sha1", "xxh64"],
        size_limit=100_000,
        progress_bar=False,
    ) as writer:
        for number, (image, file) in enumerate(zip(images, jpegs, strict=True)):
            value: Any = file.read_bytes() if encoding == "bytes" else image
            with Image.open(file) as opened:
                value = opened if encoding == "jpeg" else value
                writer.write({"image": value, "label": number})
    dataset = stoker.open(tmp_path / "x")
    assert isinstance(dataset, MDS) and dataset.targets == list(range(9))
    for row, (image, file) in enumerate(zip(images, jpegs, strict=True)):
        with Image.open(file) as opened:
            wanted = np.asarray(image if encoding == "pil" else opened)
        assert np.array_equal(np.asarray(dataset[row][0]), wanted)


def test_folders_that_are_none(tmp_path: Path, folder: Path) -> None:
    for content in ("", "[]", "{}", '{"shards": [1]}', "[" * 100_000):
        (tmp_path / "index.json").write_text(content)
        with pytest.raises(SourceError, match="has no index of MDS shards"):
            MDS(tmp_path)
    (folder / "index.json").write_text('{"shards": []}')
    assert type(stoker.open(folder)) is stoker.ImageFolder
    (folder / "index.json").unlink()


def test_no_damage_crashes_or_reads_outside(shards: Path) -> None:
    _edited(shards, lambda i: [s["raw_data"].update(hashes={}) for s in i["shards"]])
    path, rng, kept = shards / "shard.00001.mds", random.Random(3), 0
    whole = path.read_bytes()
    places = struct.unpack_from("<10I", whole, 4)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            place = rng.choice([rng.randrange(4, 44), rng.choice(places[:-1]) + rng.randrange(8)])
            data[place] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dataset = MDS(shards, damaged="skip", cache=False)
        kept += len(dataset) - 15
        extents = dataset.files.extents
        assert extents is not None
        assert (extents.begin >= 0).all() and (extents.length >= 0).all()
        others = extents.shard != 1
        assert ((extents.begin + extents.length <= len(data)) | others).all()
    assert 300 < kept < 2700
    data = bytearray(whole)
    data[places[2] : places[2] + 4] = b"\xff" * 4
    path.write_bytes(data)
    with pytest.warns(StokerWarning, match=r"sample \d is damaged|lies outside"):
        assert len(MDS(shards, damaged="skip")) == 23


def test_the_streaming_packages_own_shards(data: Path) -> None:
    formats = data / "formats"
    dataset = stoker.open(formats / "mds" / "plain")
    assert isinstance(dataset, MDS)
    wanted = json.loads((formats / "EXPECT_mds_plain.json").read_text())
    assert len(dataset) == len(wanted) == 40
    for row, one in enumerate(wanted):
        content = dataset.files.opened(row).read()
        assert hashlib.sha256(content).hexdigest() == one["sha256"]
        assert (dataset.files.name(row), dataset.targets[row]) == (one["key"], one["label"])
    with pytest.raises(SourceError, match=r"shard\.00002\.mds: No such file"):
        stoker.open(formats / "mds" / "missing_shard")
