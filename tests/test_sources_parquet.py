"""Parquet files: as pyarrow and Hugging Face's datasets write them, sound and damaged."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torchvision.transforms as v1

import stoker
from pictures import class_folder
from stoker import cache
from stoker import pack as packing
from stoker.errors import SourceError, StokerWarning
from stoker.sources import columns, parquet_pages, shards
from stoker.sources import parquet as parquet_source
from stoker.sources.index import Images
from stoker.sources.parquet import Parquet

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
HF_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes"), 24)


@pytest.fixture(scope="module")
def table(folder: Path) -> pa.Table:
    samples = stoker.ImageFolder(folder, cache=False).samples
    names = ["class_0", "class_1", "class_2"]
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    images = [{"bytes": Path(path).read_bytes(), "path": Path(path).name} for path, _ in samples]
    return pa.table(
        {
            "n": pa.array(range(24)),
            "image": pa.array(images, HF_IMAGE),
            "label": pa.array([label for _, label in samples]),
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def content(dataset: Images) -> list[bytes]:
    found = []
    for row in range(len(dataset)):
        with dataset.files.opened(row) as file:
            found.append(file.read())
    return found


def in_place(dataset: Images) -> list[bool]:
    """Of which samples the bytes are read from the files that were given."""
    assert isinstance(dataset, Parquet)
    assert dataset.files.extents is not None
    return [shard < len(dataset.shards) for shard in dataset.files.extents.shard.tolist()]


def inside(dataset: Images) -> bool:
    """Whether all extents lie inside of their files."""
    extents = dataset.files.extents
    assert extents is not None
    sizes = [Path(extents.shards.path(i)).stat().st_size for i in range(len(extents.shards))]
    ends = extents.begin + extents.length
    within = ends <= np.array(sizes or [0])[extents.shard] if len(ends) else ends
    return bool((extents.begin >= 0).all() and (extents.length >= 0).all() and np.all(within))


def values(count: int, seed: int, most: int = 3000) -> list[bytes]:
    """Bytes of many lengths, some empty and some more than once."""
    rng = random.Random(seed)
    found = [rng.randbytes(rng.choice([0, 1, rng.randrange(40), rng.randrange(most)]))]
    for _ in range(count - 1):
        again = rng.random() < 0.3
        found.append(rng.choice(found) if again else rng.randbytes(rng.randrange(most)))
    return found


# Batches


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_batches_are_those_of_the_folder(
    folder: Path, table: pa.Table, tmp_path: Path, threads: int, compression: str
) -> None:
    for part in range(2):
        rows = table.slice(12 * part, 12)
        pq.write_table(rows, tmp_path / f"{part}.parquet", 5, compression=compression)

    def epoch(dataset: Any) -> list[Any]:
        loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5)
        assert loader.explain().tier == "lowered"
        return list(loader)

    dataset = stoker.open(tmp_path / "{0,1}.parquet", TRAIN)
    assert set(in_place(dataset)) == {compression == "none"}
    ours, theirs = epoch(dataset), epoch(stoker.ImageFolder(folder, TRAIN))
    assert len(ours) == 4
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert dataset.classes == ["class_0", "class_1", "class_2"]  # type: ignore[attr-defined]


def test_spawned_workers(table: pa.Table, tmp_path: Path) -> None:
    pq.write_table(table, tmp_path / "x.parquet", compression="gzip")
    dataset = stoker.open(tmp_path / "x.parquet", v1.Compose([v1.Resize((20, 20)), v1.ToTensor()]))
    loader = torch.utils.data.DataLoader(dataset, 8, num_workers=1, multiprocessing_context="spawn")
    for number, (images, labels) in enumerate(loader):
        for place in range(8):
            image, label = dataset[8 * number + place]
            assert torch.equal(images[place], image) and int(labels[place]) == label


# Where values lie


SETTINGS = list(
    itertools.product(
        ["none", "snappy", "zstd", "gzip"],
        [False, True],
        ["1.0", "2.0"],
        [None, 700],
        [1000, 37],
    )
)


@pytest.mark.parametrize(("compression", "dictionary", "version", "page", "group"), SETTINGS)
@pytest.mark.parametrize("kind", ["binary", "required", "large_binary", "struct", "nested"])
def test_every_value_is_what_pyarrow_gives(
    tmp_path: Path,
    kind: str,
    compression: str,
    dictionary: bool,
    version: str,
    page: int | None,
    group: int,
) -> None:
    rng = random.Random(str((kind, compression, dictionary, version, page, group)))
    given: list[Any] = values(160, rng.randrange(1 << 30))
    if kind != "required":
        given = [None if rng.random() < 0.2 else value for value in given]
    binary = pa.large_binary() if kind == "large_binary" else pa.binary()
    array, field, name = pa.array(given, binary), pa.field("x", binary), "x"
    if kind == "required":
        field = pa.field("x", binary, nullable=False)
    for depth in range({"struct": 1, "nested": 2}.get(kind, 0)):
        mask = pa.array([rng.random() < 0.1 for _ in given])
        child = pa.field("bytes" if depth == 0 else "x", field.type)
        array = pa.StructArray.from_arrays([array], fields=[child], mask=mask)
        field = pa.field("x", array.type)
        name = "x" if depth == 0 else "x.x"
    lists = pa.array([[1, 2]] * len(given))
    whole = pa.table([lists, array], schema=pa.schema([pa.field("lists", lists.type), field]))
    path = tmp_path / "x.parquet"
    pq.write_table(
        whole,
        path,
        group,
        compression=compression,
        use_dictionary=dictionary,
        data_page_version=version,
        data_page_size=page,
        write_batch_size=11 if page else None,
        dictionary_pagesize_limit=9000 if page else None,
        write_page_index=bool(page),
        write_page_checksum=rng.random() < 0.5,
    )
    wanted = []
    for value in pq.read_table(path)["x"].to_pylist():
        for inner in {"struct": ["bytes"], "nested": ["x", "bytes"]}.get(kind, []):
            value = value and value[inner]
        wanted.append(value)
    lacking = wanted.count(None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dataset = Parquet(path, image=name, damaged="skip")
    assert content(dataset) == [value for value in wanted if value is not None]
    assert list(dataset.names) == [str(i) for i, v in enumerate(wanted) if v is not None]
    assert set(in_place(dataset)) == {compression == "none"}
    assert len(told) == (lacking > 0)
    if lacking:
        with pytest.raises(SourceError, match=r"x\.parquet: row \d+ has no image"):
            Parquet(path, image=name)


def test_other_encodings_are_expanded(tmp_path: Path) -> None:
    given = values(60, 3)
    table = pa.table({"jpg": given, "n": range(60)})
    for encoding in ("DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"):
        path = tmp_path / f"{encoding}.parquet"
        pq.write_table(
            table,
            path,
            20,
            compression="none",
            use_dictionary=False,
            column_encoding={"jpg": encoding},
        )
        dataset = stoker.open(path)
        assert content(dataset) == given and not any(in_place(dataset))
    path = tmp_path / "brotli.parquet"
    pq.write_table(table, path, compression="brotli")
    assert content(stoker.open(path)) == given


def test_row_groups_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file whose row groups are not alike, only those that need it are expanded."""
    given = values(90, 7)
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"jpg": given}), path, 30, compression="none", use_dictionary=False)
    real, calls = parquet_pages.spans, 0

    def odd(*arguments: Any) -> parquet_pages.Spans:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise parquet_pages.OddPagesError("odd")
        return real(*arguments)

    monkeypatch.setattr(parquet_source, "spans", odd)
    dataset = stoker.open(path)
    assert content(dataset) == given
    assert in_place(dataset) == [True] * 30 + [False] * 30 + [True] * 30


def test_runs_of_levels_and_places() -> None:
    """Hybrid runs as the format describes them, written here by that description."""
    rng = random.Random(1)

    def varint(value: int) -> bytes:
        found = bytearray()
        while value >= 128:
            found.append(value & 127 | 128)
            value >>= 7
        return bytes([*found, value])

    for width in [1, 2, 3, 7, 8, 9, 17, 31, 32]:
        wanted: list[int] = []
        data = b""
        while len(wanted) < 150_000 // width:
            if rng.random() < 0.5:
                value, count = rng.getrandbits(width), rng.randrange(1, 70)
                data += varint(count << 1) + value.to_bytes((width + 7) // 8, "little")
                wanted += [value] * count
            else:
                groups = rng.choice([1, 2, rng.randrange(1, 3000)])
                packed = [rng.getrandbits(width) for _ in range(8 * groups)]
                number = sum(value << (width * i) for i, value in enumerate(packed))
                data += varint(groups << 1 | 1) + number.to_bytes(groups * width, "little")
                wanted += packed
        count = len(wanted) - rng.randrange(7)
        assert parquet_pages._runs(data, count, width).tolist() == wanted[:count]
        for end in range(0, len(data) - 8, len(data) // 50 + 1):
            with pytest.raises(parquet_pages.OddPagesError):
                parquet_pages._runs(data[:end], len(wanted), width)


# Columns


def test_which_column_holds_the_images(tmp_path: Path, folder: Path) -> None:
    photos = [Path(p).read_bytes() for p, _ in stoker.ImageFolder(folder, cache=False).samples[:4]]
    others = [b"no image"] * 4
    path = tmp_path / "x.parquet"

    def opened(columns: dict[str, Any], **options: Any) -> Images:
        pq.write_table(pa.table(columns), path)
        return stoker.open(path, **options)

    assert content(opened({"embedding": others, "photo": photos})) == photos
    assert content(opened({"x": others})) == others  # the only one
    assert content(opened({"photo": photos, "x": others}, image="x")) == others
    kinds = {"a": others, "b": pa.array([{"bytes": p, "path": None} for p in photos], HF_IMAGE)}
    assert content(opened(kinds)) == photos
    with pytest.warns(StokerWarning, match="row 0 has no image"):
        dataset = opened({"b": [None, *photos[1:]], "a": others}, damaged="skip")
    assert content(dataset) == photos[1:]
    for columns_, options in (
        ({"x": others, "y": others}, {}),
        ({"x": ["a"] * 4}, {}),
        ({"x": photos}, {"image": "y"}),
        ({"x": photos, "n": range(4)}, {"image": "n"}),
        ({"x": [[p] for p in photos]}, {}),
    ):
        with pytest.raises(SourceError, match=r"has no .*image.*; columns: x \("):
            opened(columns_, **options)
    dotted = {"a.b": photos, "c": pa.array([{"d.e": p} for p in others])}
    assert content(opened(dotted, image="a.b")) == photos
    twice = pa.table([pa.array(photos), pa.array(others)], names=["x", "x"])
    pq.write_table(twice, path)
    with pytest.raises(SourceError, match="several columns 'x'"):
        stoker.open(path, image="x")
    with pytest.raises(SourceError, match="has no column of encoded images"):
        stoker.open(path)


LABELS: list[tuple[Any, list[int], list[str]]] = [
    (pa.array([3, None, 0], pa.int8()), [3, -1, 0], []),
    (pa.array([3, 200, 0], pa.uint8()), [3, 200, 0], []),
    (pa.array([True, False, None]), [1, 0, -1], []),
    (["emu", "cat", None], [1, 0, -1], ["cat", "emu"]),
    (pa.array(["emu", "cat", "emu"], pa.large_string()), [1, 0, 1], ["cat", "emu"]),
    (pa.array(["emu", None, "emu"]).dictionary_encode(), [0, -1, 0], ["emu"]),
]


@pytest.mark.filterwarnings("ignore:.*without a label")
@pytest.mark.parametrize(("given", "labels", "classes"), LABELS)
def test_labels(tmp_path: Path, given: Any, labels: list[int], classes: list[str]) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"jpg": [b"a", b"b", b"c"], "cls": given}), path)
    for _ in range(2):
        dataset = Parquet(path)
        assert (dataset.targets, dataset.classes) == (labels, classes)
    if classes:
        dataset = Parquet(path, classes=["x", *classes])
        assert dataset.targets == [label + (label >= 0) for label in labels]
    assert Parquet(path, label={"0": 5, "2": 7}).targets == [5, -1, 7]
    assert Parquet(path, label=None).targets == [-1] * 3
    with pytest.raises(SourceError, match="has no column 'jpg' of integers or texts"):
        Parquet(path, label="jpg")


@pytest.mark.filterwarnings("ignore:.*without a label")
def test_names_of_classes(tmp_path: Path) -> None:
    features: dict[str, Any] = {
        "coarse": {"_type": "ClassLabel", "names": ["x", "y", "z"]},
        "label": {"_type": "Value", "dtype": "int64"},
    }

    def opened(**options: Any) -> Parquet:
        text = json.dumps({"info": {"features": features}})
        table = pa.table({"jpg": [b"a"] * 4, "label": [9, 8, 7, 6], "coarse": [2, 0, None, -1]})
        pq.write_table(table.replace_schema_metadata({"huggingface": text}), tmp_path / "x.parquet")
        return Parquet(tmp_path / "x.parquet", **options)

    dataset = opened()
    assert (dataset.targets, dataset.classes) == ([2, 0, -1, -1], ["x", "y", "z"])
    assert opened(classes=["z", "y", "x"]).targets == [0, 2, -1, -1]
    with pytest.raises(ValueError, match="classes lack 'z'"):
        opened(classes=["x", "y"])
    assert (opened(label="label").targets, opened(label="label").classes) == ([9, 8, 7, 6], [])
    features["label"] = {"_type": "ClassLabel", "names": [f"n{i}" for i in range(10)]}
    assert opened().targets == [9, 8, 7, 6] and opened().classes[9] == "n9"
    odds: list[Any] = [{"_type": "ClassLabel", "names": 5}, {"_type": "ClassLabel"}, [], 7, None]
    for odd in odds:
        features["label"] = features["coarse"] = odd
        assert opened().targets == [9, 8, 7, 6] and opened().classes == []
    for text in (b"[" * 100_000, b"{", b"\xff", b"[1]", b'{"info": 3}'):
        table = pa.table({"jpg": [b"a"]}).replace_schema_metadata({b"huggingface": text})
        pq.write_table(table, tmp_path / "y.parquet")
        assert len(stoker.open(tmp_path / "y.parquet")) == 1


def test_files_with_other_classes(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table, tmp_path / "0.parquet")
    other = table.replace_schema_metadata({})
    pq.write_table(other, tmp_path / "1.parquet")
    with pytest.raises(SourceError, match=r"1\.parquet: has other classes than the first file"):
        stoker.open(tmp_path / "*.parquet")


# Paths


def test_rows_that_name_files(tmp_path: Path, folder: Path, table: pa.Table) -> None:
    home = tmp_path / "set"
    (home / "images").mkdir(parents=True)
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    (home / "images" / "a.jpg").write_bytes(b"AA")

    def opened(*paths: str | None, **options: Any) -> Images:
        rows = [{"bytes": None, "path": path} for path in paths]
        images = pa.array([*rows, {"bytes": b"in", "path": "../../x.jpg"}], HF_IMAGE)
        pq.write_table(pa.table({"image": images, "label": range(len(images))}), home / "x.parquet")
        return stoker.open(home / "x.parquet", **options)

    dataset = opened("images/a.jpg", "images/../images/a.jpg")
    assert content(dataset) == [b"AA", b"AA", b"in"]
    assert dataset.files.name(0) == "images/a.jpg"
    assert content(opened("a.jpg", root=home / "images")) == [b"AA", b"in"]
    secret = str(tmp_path / "secret.jpg")
    for path in (
        "../secret.jpg",
        "images/../../secret.jpg",
        secret,
        "../set",
        "a\0b",
        "/",
        "..",
        ".",
    ):
        with pytest.raises(SourceError, match=r"row 1 names an image .* outside of|row 1 names"):
            opened("images/a.jpg", path)
        with pytest.warns(StokerWarning, match="row 1 names an image"):
            assert content(opened("images/a.jpg", path, damaged="skip")) == [b"AA", b"in"]
    assert content(opened(secret, root=tmp_path)) == [b"secret", b"in"]
    with pytest.raises(SourceError, match=r"'images/b\.jpg': No such file"):
        opened("images/b.jpg")
    with pytest.raises(SourceError, match="'images' that is no file"):
        opened("images")
    with pytest.raises(SourceError, match="row 0 has no image"):
        opened(None)


# Folders


def test_folders_and_splits(tmp_path: Path, table: pa.Table) -> None:
    for place in ("a", "b/data"):
        (tmp_path / place).mkdir(parents=True)
        for name in ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet"):
            pq.write_table(table, tmp_path / place / name)
    for top in ("a", "b"):
        dataset = stoker.open(tmp_path / top)
        assert isinstance(dataset, Parquet) and len(dataset) == 48
    pq.write_table(table, tmp_path / "b/data/test-00000-of-00001.parquet")
    with pytest.raises(SourceError, match=r"several splits \(test-.*train-.*as with '.*test\*"):
        stoker.open(tmp_path / "b")
    assert len(stoker.open(tmp_path / "b/data/train-*.parquet")) == 48
    (tmp_path / "c").mkdir()
    for name in ("part-00000-4f2.c000.parquet", "part-00001-4f2.c000.parquet", "trains.parquet"):
        pq.write_table(table, tmp_path / "c" / name)
    assert len(stoker.open(tmp_path / "c")) == 72
    (tmp_path / "d").mkdir()
    with pytest.raises(SourceError, match="holds no Parquet files"):
        Parquet(tmp_path / "d")


def test_odd_paths(tmp_path: Path, table: pa.Table) -> None:
    name = tmp_path / ("\udcff" + "ü" * 120 + ".parquet")
    pq.write_table(table, tmp_path / "x.parquet")
    (tmp_path / "x.parquet").rename(name)
    assert len(stoker.open(name)) == 24
    pq.write_table(pa.table({"jpg": pa.array([], pa.binary())}), tmp_path / "empty.parquet")
    assert len(stoker.open(tmp_path / "empty.parquet")) == 0
    with pytest.raises(SourceError, match="No such file"):
        Parquet(tmp_path / "absent.parquet")


# Kept indexes


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_the_index_is_kept(
    tmp_path: Path, table: pa.Table, monkeypatch: pytest.MonkeyPatch, compression: str, kept: Path
) -> None:
    monkeypatch.setattr(shards, "_SETTLED_SECONDS", 0)
    for number in range(3):
        pq.write_table(table, tmp_path / f"{number}.parquet", 7, compression=compression)
    scans: list[str] = []
    real = parquet_source._scan

    def counted(path: str, *others: Any) -> Any:
        scans.append(path)
        return real(path, *others)

    monkeypatch.setattr(parquet_source, "_scan", counted)
    pattern = tmp_path / "*.parquet"
    first = stoker.open(pattern)
    assert len(scans) == 3
    second = stoker.open(pattern)
    assert len(scans) == 3
    assert content(first) == content(second) and first.targets == second.targets
    assert stoker.open(pattern, label=None).targets == [-1] * 72 and len(scans) == 6
    # What is expanded is made anew where it is gone.
    expanded = sorted((kept / "expanded").iterdir()) if compression != "none" else []
    assert len(expanded) == 3 * (compression != "none")
    for path in expanded:
        path.unlink()
    assert content(stoker.open(pattern)) == content(first)
    assert len(scans) == 6 + len(expanded)
    for path in expanded:
        path.write_bytes(b"short")
        with pytest.raises(SourceError, match="is not what was written: remove it"):
            stoker.open(pattern)
        path.unlink()
    pq.write_table(table.slice(0, 5), tmp_path / "1.parquet")
    assert len(stoker.open(pattern)) == 53


def test_hostile_indexes(tmp_path: Path) -> None:
    index = shards.Index()
    place = columns._PLACE
    cols = columns.Columns(("x",), None, ("y",), True, ())
    for text in (
        *(None, b"", b"=", b"?", b"=+x", b"=?1", b"=+", b">", b">+1", b"=+--1"),
        *(b">" + place.pack(-1, 5) + b"-", b">" + place.pack(1 << 62, 1 << 62) + b"-"),
        b"=+" + b"9" * 5000,
    ):
        index = shards.Index()
        index.add(b"n", 0, 1, text)
        found = columns.Gathered(["x"], cols, "auto", None)
        (tmp_path / "e").write_bytes(b"abc")
        assert found.add_index(0, index, "/", lambda: str(tmp_path / "e")) is None
        assert not found.found.names


# Damage


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Small files of many kinds."""
    folder = tmp_path_factory.mktemp("small")
    table = pa.table(
        {
            "image": pa.array(
                [{"bytes": value, "path": f"{i}.jpg"} for i, value in enumerate(values(40, 9, 60))],
                HF_IMAGE,
            ),
            "label": range(40),
        }
    )
    paths: list[Path] = []
    for compression, dictionary, version, checksum in itertools.product(
        ["none", "snappy", "zstd"], [True, False], ["1.0", "2.0"], [False, True]
    ):
        paths.append(folder / f"{len(paths)}.parquet")
        pq.write_table(
            table,
            paths[-1],
            15,
            compression=compression,
            use_dictionary=dictionary,
            data_page_version=version,
            data_page_size=200,
            write_batch_size=4,
            write_page_checksum=checksum,
        )
    return paths


def mutations(whole: bytes, count: int, rng: random.Random) -> Iterator[bytes]:
    for _ in range(count):
        data = bytearray(whole)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
            if rng.random() < 0.5:  # the footer again, at another place
                data += whole[-rng.randrange(8, 900) :]
        for _ in range(rng.randrange(1, 5)):
            if data:
                data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
        yield bytes(data)


def test_no_damage_crashes_or_reads_outside(small: list[Path], tmp_path: Path) -> None:
    rng, served, refused, told = random.Random(11), 0, 0, set[str]()
    path = tmp_path / "x.parquet"
    for source in small:
        for data in mutations(source.read_bytes(), 40, rng):
            path.write_bytes(data)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    dataset = Parquet(path, damaged="skip", cache=False)
                except SourceError as error:
                    told.add(Path(error.path).name)
                    refused += 1
                    continue
            assert inside(dataset) and len(dataset) <= 200
            served += len(dataset)
    assert served > 5000 and refused > 200 and told == {"x.parquet"}


def test_checksums_are_checked(tmp_path: Path, table: pa.Table) -> None:
    for compression in ("none", "snappy"):
        path = tmp_path / f"{compression}.parquet"
        pq.write_table(
            table,
            path,
            8,
            compression=compression,
            write_page_checksum=True,
            use_dictionary=False,
        )
        assert len(stoker.open(path)) == 24
        data = bytearray(path.read_bytes())
        meta = pq.ParquetFile(path).metadata.row_group(1).column(1)
        assert meta.path_in_schema == "image.bytes"
        data[meta.data_page_offset + meta.total_compressed_size - 1] ^= 1
        path.write_bytes(data)
        with pytest.raises(
            SourceError, match=r"row group 1 is damaged after 0 rows: .*CRC.*16 are"
        ):
            stoker.open(path)
        with pytest.warns(StokerWarning, match="row group 1 is damaged"):
            dataset = stoker.open(path, damaged="skip")
        assert list(dataset.names)[8] == table["image"][16]["path"].as_py()  # type: ignore[attr-defined]
        wanted = [row["bytes"] for row in table["image"].to_pylist()]
        assert content(dataset) == wanted[:8] + wanted[16:]


def test_truncated_anywhere(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table.slice(0, 6), tmp_path / "whole.parquet", 2, compression="none")
    whole = (tmp_path / "whole.parquet").read_bytes()
    path = tmp_path / "x.parquet"
    for end in [4, 5, 8, 12, *range(16, len(whole), len(whole) // 60), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(SourceError, match=r"x\.parquet: "):
            stoker.open(path)


def test_rows_that_take_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"jpg": pa.nulls(2 << 20, pa.binary())}), path)
    assert path.stat().st_size < 100_000
    with pytest.raises(SourceError, match=r"says that it has 2,097,152 rows in [\d,]+ bytes"):
        stoker.open(path)


def test_numbers_that_cannot_be(tmp_path: Path) -> None:
    """What makes pyarrow end the process, or ask for memory without end, is refused before."""
    given = {"jpg": [b"abc"] * 9}
    for compression in ("none", "zstd"):
        path = tmp_path / f"{compression}.parquet"
        pq.write_table(pa.table(given), path, compression=compression, use_dictionary=False)
        whole = path.read_bytes()
        begin = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
        for at in [*range(4, begin), *range(begin, len(whole))]:
            for value in (0x00, 0x7F, 0x80, 0xFF, whole[at] ^ 1):
                data = whole[:at] + bytes([value]) + whole[at + 1 :]
                path.write_bytes(data)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        dataset = Parquet(path, damaged="skip", cache=False)
                    except SourceError:
                        continue
                assert inside(dataset) and len(dataset) <= 9


# Writing


def test_packed_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import datasets

    source = stoker.ImageFolder(folder, cache=False)
    target = str(tmp_path / "out/train-%03d.parquet")
    packed = packing.pack(source, target, shard_bytes=100_000)
    assert len(packed.shards) > 2
    again = str(tmp_path / "again/train-%03d.parquet")
    for one, two in zip(
        packed.shards, packing.pack(source, again, shard_bytes=100_000).shards, strict=True
    ):
        assert Path(one).read_bytes() == Path(two).read_bytes()
    assert packing.pack(source, target, shard_bytes=100_000).found == len(packed.shards)
    dataset = stoker.open(tmp_path / "out")
    assert isinstance(dataset, Parquet) and all(in_place(dataset))
    assert content(dataset) == content(source)
    assert (dataset.targets, dataset.classes) == (source.targets, source.classes)
    loaded = datasets.load_dataset(
        "parquet", data_files=packed.shards, split="train", cache_dir=str(tmp_path / "hf")
    )
    assert loaded.features["label"].names == source.classes
    assert isinstance(loaded.features["image"], datasets.Image)
    for row, sample in enumerate(loaded):
        image, label = source[row]
        assert np.array_equal(np.asarray(sample["image"].convert("RGB")), np.asarray(image))
        assert sample["label"] == label


def test_packed_without_classes(tmp_path: Path) -> None:
    def samples() -> Iterator[shards.Sample]:
        for position in range(250):
            yield shards.Sample(
                position, f"{position}\udcff.jpg", b"x" * position, position - 1, ""
            )

    path = tmp_path / "x.parquet"
    with path.open("wb") as file:
        parquet_source.write(file, samples())
    meta = pq.ParquetFile(path).metadata
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [100, 100, 50]
    table = pq.read_table(path)
    assert table["label"].to_pylist() == [None, *range(249)]
    images = list(parquet_source.written(str(path)))
    assert [image.label for image in images] == [str(label) for label in range(-1, 249)]
    assert [image.name for image in images] == [parquet_source.path_of(s) for s in samples()]
    data = path.read_bytes()
    for number, image in enumerate(images):
        assert data[image.begin : image.begin + image.length] == b"x" * number
    pq.write_table(table, path, compression="zstd")
    with pytest.raises(SourceError, match="is stored otherwise than it would be written"):
        list(parquet_source.written(str(path)))
    with path.open("wb") as file:
        parquet_source.write(file, iter([]))
    assert len(stoker.open(path)) == 0


# Files of others


def test_hugging_faces_own_files(data: Path) -> None:
    formats = data / "formats"
    wanted = json.loads((formats / "EXPECT_parquet_hf.json").read_text())
    for path in ("parquet/hf_imagefolder", "parquet/hf_imagefolder/data/*.parquet"):
        dataset = stoker.open(formats / path)
        assert isinstance(dataset, Parquet) and dataset.classes == ["ants", "bees"]
        assert len(dataset) == len(wanted) == 40 and all(in_place(dataset))
        for row, (one, found) in enumerate(zip(wanted, content(dataset), strict=True)):
            assert hashlib.sha256(found).hexdigest() == one["sha256"]
            assert (dataset.files.name(row), dataset.targets[row]) == (one["key"], one["label"])
            assert dataset.files.size(row) == (one["height"], one["width"])


def test_img2datasets_files(data: Path) -> None:
    path = data / "formats/parquet/plain_binary.parquet"
    table = pq.read_table(path)
    for options in ({}, {"image": "jpg", "label": "cls"}):
        dataset = stoker.open(path, **options)  # type: ignore[arg-type]
        assert content(dataset) == table["jpg"].to_pylist()
        assert dataset.targets == table["cls"].to_pylist()
    with pytest.raises(SourceError, match=r"truncated\.parquet: cannot be read as Parquet"):
        stoker.open(data / "formats/parquet/truncated.parquet")


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'stoker\[parquet\]'"):
        stoker.open(tmp_path / "x.parquet")
