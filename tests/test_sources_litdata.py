"""LitData's chunks: as their description says, as LitData itself wrote them, and damaged."""

from __future__ import annotations

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
from stoker.sources import litdata
from stoker.sources.litdata import LitData

pa = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
FORMATS = {"image": "jpeg", "label": "int", "name": "str"}
LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


def spec(names: list[str] | None, count: int) -> str:
    """Of a dict with ``names`` or, without, of a tuple."""
    kind, context = ("builtins.tuple", None) if names is None else ("builtins.dict", names)
    node = {"type": kind, "context": json.dumps(context), "children_spec": [LEAF] * count}
    return json.dumps([1, node])


def leaf(kind: str, value: Any) -> bytes:
    if kind == "int":
        return struct.pack("<q", value)
    if kind == "bool":
        return bytes([value])
    return value.encode() if kind == "str" else bytes(value)


def chunk(formats: list[str], samples: list[list[Any]]) -> bytes:
    bodies = []
    for sample in samples:
        parts = [leaf(kind, value) for kind, value in zip(formats, sample, strict=True)]
        bodies.append(struct.pack(f"<{len(parts)}I", *map(len, parts)) + b"".join(parts))
    places = np.cumsum([4 * (len(bodies) + 2), *map(len, bodies)])
    return struct.pack(f"<{len(places) + 1}I", len(bodies), *places) + b"".join(bodies)


def arrow_chunk(rows: list[dict[str, Any]], stream: bool = False, **options: Any) -> bytes:
    table, sink = pa.Table.from_pylist(rows), io.BytesIO()
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in table.to_batches(max_chunksize=4):
            writer.write_batch(batch)
    begin = 4 * (len(rows) + 2)
    head = struct.pack(f"<{len(rows) + 2}I", len(rows), *[begin] * (len(rows) + 1))
    return head + sink.getvalue() + struct.pack("<I", len(sink.getvalue())) + b"LDARW01\0"


def write(
    folder: Path,
    samples: list[list[Any]],
    formats: dict[str, str] | list[str] = FORMATS,
    make: Callable[[list[list[Any]]], bytes] | None = None,
    **config: Any,
) -> Path:
    """Writes samples, nine in a chunk; ``make`` is one that gives a chunk's bytes."""
    folder.mkdir()
    kinds = list(formats.values()) if isinstance(formats, dict) else formats
    names = list(formats) if isinstance(formats, dict) else None
    chunks = []
    for number, first in enumerate(range(0, len(samples), 9)):
        part = samples[first : first + 9]
        data = make(part) if make else chunk([kind.partition(":")[0] for kind in kinds], part)
        name = f"chunk-0-{number}.bin"
        (folder / name).write_bytes(data)
        size = {"chunk_bytes": len(data), "chunk_size": len(part), "dim": None}
        chunks.append({"filename": name, **size})
    whole = {
        "compression": None,
        "data_format": kinds,
        "data_spec": spec(names, len(kinds)),
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": whole | config}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes"), 24)


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[list[Any]]:
    return [
        [Path(path).read_bytes(), label, f"n{i}"]
        for i, (path, label) in enumerate(stoker.ImageFolder(folder, cache=False).samples)
    ]


def as_rows(part: list[list[Any]], **options: Any) -> bytes:
    return arrow_chunk([dict(zip(FORMATS, sample, strict=True)) for sample in part], **options)


LAYOUTS: dict[str, Callable[[list[list[Any]]], bytes] | None] = {
    "leaves": None,
    "Arrow file": as_rows,
    "Arrow stream": lambda part: as_rows(part, stream=True),
}


def contents(dataset: Any) -> list[tuple[str, bytes, int]]:
    rows = range(len(dataset))
    names = list(dataset.names)
    return [(names[n], dataset.files.opened(n).read(), dataset.targets[n]) for n in rows]


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("threads", [0, 2])
def test_batches_are_those_of_the_folder(
    tmp_path: Path, folder: Path, samples: list[list[Any]], make: Any, threads: int, kept: Path
) -> None:
    def epoch(dataset: Any) -> list[Any]:
        loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5)
        assert loader.explain().tier == "lowered"
        return list(loader)

    path = write(tmp_path / "x", samples, make=make)
    dataset = stoker.open(path, TRAIN)
    assert isinstance(dataset, LitData) and not (kept / "expanded").exists()
    assert contents(dataset) == [(name, image, label) for image, label, name in samples]
    ours, theirs = epoch(dataset), epoch(stoker.ImageFolder(folder, TRAIN))
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_leaves(tmp_path: Path) -> None:
    formats = {"x": "tensor", "a": "jpeg", "b": "image:png", "kind": "str", "n": "int", "t": "bool"}
    given = [[b"1", b"AA", b"BBB", kind, n, n > 1] for kind, n in (("emu", 2), ("cat", 1))]
    path = write(tmp_path / "x", given, formats)
    assert contents(stoker.open(path)) == [("0", b"AA", 2), ("1", b"AA", 1)]
    other = LitData(path, image="b", label="kind")
    assert (other.targets, other.classes) == ([1, 0], ["cat", "emu"])
    assert other.files.opened(1).read() == b"BBB"
    assert LitData(path, label="t").targets == [1, 0]
    assert LitData(path, label={"0": 5, "1": 6}).targets == [5, 6]
    assert LitData(path, label=None).targets == [-1, -1]
    for wrong in ({"image": "x"}, {"image": "c"}, {"label": "x"}, {"label": "c"}):
        with pytest.raises(SourceError, match=r"no leaf '\w'.* x \(tensor\), a \(jpeg\)"):
            LitData(path, **wrong)  # type: ignore[arg-type]
    plain = write(tmp_path / "y", [[b"AA", 7], [b"B", 8]], ["bytes", "int"])
    assert contents(LitData(plain)) == [("0", b"AA", 7), ("1", b"B", 8)]
    assert LitData(plain, image="0", label="1").targets == [7, 8]
    unknown = write(tmp_path / "z", [[b"AA", 7]], {"image": "hologram", "label": "int"})
    with pytest.raises(SourceError, match=r"its leaves: image \(hologram\), label \(int\)"):
        LitData(unknown)


def test_nested_trees(tmp_path: Path) -> None:
    inner = {"type": "builtins.dict", "context": '["b", "class"]', "children_spec": [LEAF] * 2}
    tree = {"type": "builtins.tuple", "context": "null", "children_spec": [inner, LEAF]}
    given = [[b"AA", 3, 9]]
    formats = ["jpeg", "int", "int"]
    path = write(tmp_path / "x", given, formats, data_spec=json.dumps([1, tree]))
    assert LitData(path, image="0.b", label="0.class").targets == [3]
    assert LitData(path, label="1").targets == [9]
    for number, damaged in enumerate(("", "[]", "[1, 5]", "[" * 100_000, '[1, {"type": 1}]', None)):
        path = write(tmp_path / f"y{number}", given, formats, data_spec=damaged)
        assert LitData(path, image="0").targets == [3]


def test_pil_leaves(tmp_path: Path, samples: list[list[Any]]) -> None:
    opened = [Image.open(io.BytesIO(image)) for image, *_ in samples]
    images = [image.convert("L" if n % 3 else "RGB") for n, image in enumerate(opened)]
    given = [
        [struct.pack("<III", *i.size, len(i.mode)) + i.mode.encode() + i.tobytes(), n]
        for n, i in enumerate(images)
    ]
    dataset = LitData(write(tmp_path / "x", given, ["pil", "int"]))
    for row, image in enumerate(images):
        found, label = dataset[row]
        assert label == row and np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))


def test_compressed_chunks_are_expanded_once(
    tmp_path: Path, samples: list[list[Any]], kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = zstandard.ZstdCompressor(3).compress
    path = write(
        tmp_path / "x",
        samples,
        make=lambda part: pack(chunk(list(FORMATS.values()), part)),
        compression="zstd:3",
    )
    dataset = LitData(path)
    assert contents(dataset) == [(name, image, label) for image, label, name in samples]
    assert sorted(dataset.shards) == sorted(map(str, (kept / "expanded").iterdir()))
    monkeypatch.setattr(litdata, "decompress", None)
    assert len(LitData(path)) == 24
    monkeypatch.undo()
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    last = path / "chunk-0-2.bin"
    last.write_bytes(pack(bytes(1 << 26)))
    with pytest.raises(SourceError, match=r"chunk-0-2\.bin: the compressed data gives more than"):
        LitData(path)
    last.write_bytes(b"no zstd")
    with pytest.raises(SourceError, match=r"chunk-0-2\.bin: the compressed data is damaged"):
        LitData(path)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"compression": "zstd", "compression_level": "batch"}, "compressed batch by batch"),
        ({"compression": "lz77"}, "compressed with lz77, which is not read"),
        ({"encryption": {"a": 1}}, "has encrypted chunks"),
        ({"item_loader": "TokensLoader"}, "has chunks for TokensLoader, which are not read"),
        ({"data_format": None}, "has samples of data_format None"),
    ],
)
def test_other_layouts(
    tmp_path: Path, samples: list[list[Any]], config: dict[str, Any], told: str
) -> None:
    with pytest.raises(SourceError, match=told):
        stoker.open(write(tmp_path / "x", samples, **config))


def _edited(folder: Path, edit: Callable[[Any], object]) -> Path:
    path = folder / "index.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda i: i["chunks"][1].update(filename="../x.bin"), r"chunk 1: '\.\./x\.bin' of 9"),
        (lambda i: i["chunks"][1].update(filename="/etc/x"), "chunk 1: '/etc/x' of 9"),
        (lambda i: i["chunks"][1].pop("chunk_size"), "chunk 1: 'chunk_size'"),
        (lambda i: i["chunks"][1].update(chunk_size="many"), "chunk 1: invalid literal"),
        (lambda i: i["chunks"][1].update(chunk_size=-1), "chunk 1: .* of -1 samples"),
        (lambda i: i["chunks"][1].update(chunk_size=8), "has 9 samples, and 8 in the index"),
        (lambda i: i["chunks"][1].update(chunk_size=10**9), "shorter than its samples' places"),
        (lambda i: i["chunks"][1].update(filename="x"), "x: No such file"),
        (lambda i: i["chunks"].clear(), "names no chunk"),
        (lambda i: i.update(config=3), "has no index of LitData's chunks"),
    ],
)
def test_a_damaged_index(
    tmp_path: Path, samples: list[list[Any]], edit: Callable[[Any], object], told: str
) -> None:
    with pytest.raises(SourceError, match=told):
        LitData(_edited(write(tmp_path / "x", samples), edit))


def test_compressed_rows_and_others(tmp_path: Path, samples: list[list[Any]]) -> None:
    packed = write(tmp_path / "x", samples, make=lambda part: as_rows(part, compression="zstd"))
    with pytest.raises(SourceError, match=r"chunk-0-0\.bin: its Arrow rows .* are compressed"):
        LitData(packed)
    texts = write(
        tmp_path / "y",
        samples,
        make=lambda part: arrow_chunk([{"image": "x", "label": 1, "name": "y"} for _ in part]),
    )
    with pytest.raises(SourceError, match="its images are of type string"):
        LitData(texts)
    nulls = write(
        tmp_path / "z",
        samples,
        make=lambda part: as_rows(
            [[None if n == 3 else i, k, m] for n, (i, k, m) in enumerate(part)]
        ),
    )
    with pytest.raises(SourceError, match="sample 3 is damaged; 8 are whole"):
        LitData(nulls)
    with pytest.warns(StokerWarning, match="sample 3 is damaged"):
        dataset = LitData(nulls, damaged="skip")
    assert contents(dataset) == [(m, i, k) for n, (i, k, m) in enumerate(samples) if n % 9 != 3]


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_truncated_chunks(tmp_path: Path, samples: list[list[Any]], make: Any) -> None:
    path = write(tmp_path / "x", samples, make=make)
    file = path / "chunk-0-1.bin"
    whole = file.read_bytes()
    wanted = {name: (image, label) for image, label, name in samples}
    for end in [*range(0, len(whole), len(whole) // 40), len(whole) - 1]:
        file.write_bytes(whole[:end])
        with pytest.raises(SourceError, match=r"chunk-0-1\.bin"):
            LitData(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dataset = LitData(path, damaged="skip")
            except SourceError:
                assert end < 44 or make is not None
                continue
        assert 15 <= len(dataset) < 24
        for name, image, label in contents(dataset):
            assert wanted[name] == (image, label)


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_no_damage_crashes_or_reads_outside(
    tmp_path: Path, samples: list[list[Any]], make: Any
) -> None:
    small = [[image[: 20 + n], label, name] for n, (image, label, name) in enumerate(samples)]
    path = write(tmp_path / "x", small, make=make)
    file, rng, kept, refused = path / "chunk-0-1.bin", random.Random(3), 0, 0
    whole = file.read_bytes()
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        file.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dataset = LitData(path, damaged="skip", cache=False)
            except SourceError:
                refused += 1
                continue
        kept += len(dataset) - 15
        extents = dataset.files.extents
        assert extents is not None
        mine = extents.shard == 1
        assert (extents.begin[mine] >= 0).all() and (extents.length[mine] >= 0).all()
        assert ((extents.begin + extents.length)[mine] <= len(data)).all()
    assert kept > 500 and refused > 3


def test_folders_that_are_none(tmp_path: Path) -> None:
    for content in ("", "[]", "{}", '{"chunks": [1]}', "[" * 100_000):
        (tmp_path / "index.json").write_text(content)
        with pytest.raises(SourceError, match="has no index of LitData's chunks"):
            LitData(tmp_path)
    os.remove(tmp_path / "index.json")
    with pytest.raises(SourceError, match="has no index"):
        LitData(tmp_path)


def test_litdatas_own_chunks(data: Path) -> None:
    formats = data / "formats"
    dataset = stoker.open(formats / "litdata" / "bytes")
    assert isinstance(dataset, LitData)
    wanted = json.loads((formats / "EXPECT_litdata_bytes.json").read_text())
    found = {
        (name, hashlib.sha256(content).hexdigest(), label)
        for name, content, label in contents(dataset)
    }
    assert found == {(one["key"], one["sha256"], one["label"]) for one in wanted}
    assert len(dataset) == len(wanted) == 36
