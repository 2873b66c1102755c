"""Arrow files and Hugging Face's datasets: sound, rearranged, in memory, and damaged."""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torchvision.transforms as v1

import stoker
from pictures import class_folder
from stoker import cache
from stoker.errors import SourceError, StokerWarning
from stoker.sources import arrow as arrow_source
from stoker.sources import shards
from stoker.sources.arrow import Arrow
from stoker.sources.index import Images

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
HF_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
CLASSES = ["class_0", "class_1", "class_2"]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test; Hugging Face's, too, and no network."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    return tmp_path / "cache"


@pytest.fixture
def hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package `datasets`."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    return datasets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes"), 24)


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, Any]]:
    samples = stoker.ImageFolder(folder, cache=False).samples
    return [
        {"image": {"bytes": Path(path).read_bytes(), "path": Path(path).name}, "label": label}
        for path, label in samples
    ]


@pytest.fixture
def in_memory(hf: Any, rows: list[dict[str, Any]]) -> Any:
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=CLASSES)})
    return hf.Dataset.from_list(rows, features=features)


@pytest.fixture
def saved(in_memory: Any, tmp_path: Path) -> Path:
    in_memory.save_to_disk(tmp_path / "saved", num_shards=3)
    return tmp_path / "saved"


@pytest.fixture
def mapped(hf: Any, saved: Path) -> Any:
    return hf.load_from_disk(saved)


def content(dataset: Images) -> list[bytes]:
    found = []
    for row in range(len(dataset)):
        with dataset.files.opened(row) as file:
            found.append(file.read())
    return found


def sources(dataset: Images) -> set[str]:
    """The suffixes of the files that samples are read from."""
    extents = dataset.files.extents
    assert extents is not None
    return {Path(extents.shards.path(i)).suffix for i in set(extents.shard.tolist())}


def own(hf: Any, dataset: Any, column: str = "image") -> list[bytes]:
    """The encoded images that a `Dataset` itself gives."""
    plain = dataset.cast_column(column, hf.Image(decode=False))
    return [sample[column]["bytes"] for sample in plain]


def same_as(hf: Any, dataset: Any) -> Images:
    """What is opened, compared with what the dataset itself gives."""
    ours = stoker.open(dataset)
    assert content(ours) == own(hf, dataset)
    assert ours.targets == [-1 if label is None else label for label in dataset["label"]]
    return ours


# Batches


@pytest.mark.parametrize("threads", [0, 2])
def test_batches_are_those_of_the_folder(
    folder: Path, saved: Path, mapped: Any, in_memory: Any, threads: int
) -> None:
    def epoch(dataset: Any) -> list[Any]:
        loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5)
        assert loader.explain().tier == "lowered"
        return list(loader)

    theirs = epoch(stoker.ImageFolder(folder, TRAIN))
    for source in (saved, mapped, in_memory):
        ours = epoch(stoker.open(source, TRAIN))
        assert len(ours) == 4
        for one, two in zip(ours, theirs, strict=True):
            assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_spawned_workers(mapped: Any) -> None:
    dataset = stoker.open(mapped.shuffle(seed=3), v1.Compose([v1.Resize((20, 20)), v1.ToTensor()]))
    loader = torch.utils.data.DataLoader(dataset, 8, num_workers=1, multiprocessing_context="spawn")
    for number, (images, labels) in enumerate(loader):
        for place in range(8):
            image, label = dataset[8 * number + place]
            assert torch.equal(images[place], image) and int(labels[place]) == label


# Folders of save_to_disk


def test_a_saved_dataset(saved: Path, rows: list[dict[str, Any]]) -> None:
    dataset = stoker.open(saved)
    assert isinstance(dataset, Arrow)
    assert content(dataset) == [row["image"]["bytes"] for row in rows]
    assert dataset.targets == [row["label"] for row in rows]
    assert list(dataset.names) == [row["image"]["path"] for row in rows]
    assert dataset.classes == CLASSES and len(dataset.shards) == 3
    assert sources(dataset) == {".arrow"}
    assert ".arrow" not in Path("/proc/self/maps").read_text()
    assert Arrow(saved, label=None).targets == [-1] * 24
    assert Arrow(saved, classes=CLASSES[::-1]).targets == [2 - row["label"] for row in rows]
    assert content(stoker.open(saved / "data-*.arrow")) == content(dataset)


def test_splits(hf: Any, in_memory: Any, tmp_path: Path) -> None:
    splits = in_memory.train_test_split(0.25, seed=1)
    splits.save_to_disk(tmp_path / "dict")
    with pytest.raises(SourceError, match=r"dict: holds several splits \(train, test\): open"):
        stoker.open(tmp_path / "dict")
    assert content(stoker.open(tmp_path / "dict" / "test")) == own(hf, splits["test"])
    with pytest.raises(ValueError, match=r"several splits \(train, test\): .*dataset\['train'\]"):
        stoker.open(splits)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("state.json", "{", "state.json: cannot be read"),
        ("state.json", "[" * 100_000, "state.json: cannot be read"),
        ("state.json", "[]", "state.json: cannot be read: no JSON object"),
        ("state.json", "{}", "names no data files"),
        ("state.json", '{"_data_files": []}', "names no data files"),
        ("state.json", '{"_data_files": [{"filename": "../x"}]}', "names no data files"),
        ("state.json", '{"_data_files": [{"filename": "/x"}]}', "names no data files"),
        ("state.json", '{"_data_files": [{"filename": 5}]}', "names no data files"),
        ("state.json", '{"_data_files": [{"filename": ".."}]}', "names no data files"),
        ("state.json", '{"_data_files": [{"filename": "x.arrow"}]}', "x.arrow: No such file"),
        ("state.json", '{"_indices_data_files": [{}]}', "has an order of its own"),
        ("dataset_info.json", "5", "dataset_info.json: cannot be read"),
    ],
)
def test_a_damaged_folder(saved: Path, name: str, text: str, told: str) -> None:
    (saved / name).write_text(text)
    with pytest.raises(SourceError, match=told):
        stoker.open(saved)


def test_features_of_the_folder_alone(tmp_path: Path) -> None:
    table = pa.table({"jpg": [b"a", b"b"], "label": [1, 0]})
    with pa.ipc.new_stream(tmp_path / "d.arrow", table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "d.arrow"}]}')
    assert Arrow(tmp_path).classes == []
    features = {"label": {"_type": "ClassLabel", "names": ["x", "y"]}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"features": features}))
    assert (Arrow(tmp_path).classes, Arrow(tmp_path).targets) == (["x", "y"], [1, 0])


# Arrow files


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda array: array,
    "large": lambda array: array.cast(pa.large_binary()),
    "view": lambda array: array.cast(pa.binary_view()),
    "dictionary": lambda array: array.dictionary_encode(),
    "struct": lambda array: pa.StructArray.from_arrays([array], ["bytes"]),
    "hidden": lambda array: pa.StructArray.from_arrays(
        [array], ["bytes"], mask=pa.array([i % 3 == 0 for i in range(len(array))])
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("opened", [pa.ipc.new_stream, pa.ipc.new_file])
def test_every_value_is_what_pyarrow_gives(
    tmp_path: Path, kind: str, compression: str | None, opened: Any
) -> None:
    rng = random.Random(f"{kind}{compression}")
    given = [rng.randbytes(rng.choice([0, 9, rng.randrange(3000)])) for _ in range(100)]
    array = pa.array([None if rng.random() < 0.1 else value for value in given], pa.binary())
    whole = KINDS[kind](array)
    table = pa.table({"other": [[1, 2]] * 100, "x": whole, "label": range(100)}).slice(3)
    path = tmp_path / "x.arrow"
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with opened(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=13)
    values = table["x"].to_pylist()
    if kind in ("struct", "hidden"):
        values = [value and value["bytes"] for value in values]
    wanted = {str(i): value for i, value in enumerate(values) if value is not None}
    with pytest.warns(StokerWarning, match=r"row \d+ has no image"):
        dataset = Arrow(path, damaged="skip")
    assert dict(zip(dataset.names, content(dataset), strict=True)) == wanted
    assert dataset.targets == [int(name) + 3 for name in wanted]
    in_place = compression is None and kind not in ("view", "dictionary")
    assert (dataset.files.extents is not None) and (
        set(dataset.files.extents.shard.tolist()) == {0 if in_place else 1}
    )
    with pytest.raises(SourceError, match=r"x\.arrow: row \d+ has no image"):
        Arrow(path)


def test_which_column_holds_the_images(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    photos = [row["image"]["bytes"] for row in rows]
    table = pa.table({"a": [b"no image"] * 24, "b": photos, "c": photos[::-1]})
    with pa.ipc.new_stream(tmp_path / "x", table.schema) as writer:
        writer.write_table(table)
    assert content(stoker.open(tmp_path / "x")) == photos
    assert content(stoker.open(tmp_path / "x", image="c")) == photos[::-1]
    with pytest.raises(SourceError, match=r"no image column 'd'.*; columns: a \(binary\)"):
        stoker.open(tmp_path / "x", image="d")


def test_the_index_is_kept(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_SETTLED_SECONDS", 0)
    scans: list[str] = []
    real = arrow_source._scan

    def counted(path: str, *others: Any) -> Any:
        scans.append(path)
        return real(path, *others)

    monkeypatch.setattr(arrow_source, "_scan", counted)
    first = stoker.open(saved)
    assert len(scans) == 3
    second = stoker.open(saved)
    assert len(scans) == 3
    assert content(first) == content(second) and first.targets == second.targets


# Datasets


def test_datasets_in_any_order(hf: Any, mapped: Any) -> None:
    other = mapped.select(range(4, 9))
    for dataset in (
        mapped,
        mapped.shuffle(seed=1),
        mapped.select([7, 7, 0]),
        other,
        other.select([]),
        other.shuffle(seed=2),
        mapped.train_test_split(0.3, seed=1)["test"],
        hf.concatenate_datasets([mapped.shuffle(seed=5), other, mapped]),
        mapped.shard(3, 1),
        mapped.select(range(3)).repeat(2),
        mapped.filter(lambda label: label == 1, input_columns="label").shuffle(seed=1),
        mapped.with_format("torch"),
        mapped.flatten_indices(),
        mapped.remove_columns([]),
    ):
        ours = same_as(hf, dataset)
        assert sources(ours) <= {".arrow"}
        assert ours.classes == CLASSES  # type: ignore[attr-defined]
    renamed = mapped.rename_columns({"image": "photo", "label": "kind"}).shuffle(seed=4)
    assert content(stoker.open(renamed)) == own(hf, renamed, "photo")
    assert stoker.open(renamed).targets == renamed["kind"][:]
    pairs = mapped.add_column("second", mapped["label"])
    assert (
        stoker.open(pairs.shuffle(seed=1), label="second").targets
        == (pairs.shuffle(seed=1)["second"][:])
    )


def test_datasets_in_memory(
    hf: Any, in_memory: Any, mapped: Any, saved: Path, kept: Path, tmp_path: Path
) -> None:
    for dataset in (in_memory, in_memory.select([3, 1, 1]), in_memory.shuffle(seed=1).select([2])):
        assert sources(same_as(hf, dataset)) == {""}
    assert len(list((kept / "expanded").iterdir())) == 1  # of the same content
    both = hf.concatenate_datasets([mapped, in_memory.select(range(5))])
    assert sources(same_as(hf, both.shuffle(seed=2))) == {".arrow", ""}
    # Files that are gone, or are others by now, are not taken for those that are mapped.
    shutil.copytree(saved, tmp_path / "gone")
    gone = hf.load_from_disk(tmp_path / "gone")
    wanted = own(hf, gone)
    (tmp_path / "gone" / "data-00000-of-00003.arrow").unlink()
    other = tmp_path / "gone" / "data-00001-of-00003.arrow"
    size = other.stat().st_size
    other.unlink()
    other.write_bytes(bytes(size))
    ours = stoker.open(gone)
    assert content(ours) == wanted and sources(ours) == {".arrow", ""}


def test_datasets_from_parquet_and_generators(
    hf: Any, in_memory: Any, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    in_memory.to_parquet(tmp_path / "x.parquet", batch_size=5)
    loaded = hf.Dataset.from_parquet(str(tmp_path / "x.parquet"), cache_dir=str(tmp_path / "c"))
    assert sources(same_as(hf, loaded.shuffle(seed=1))) == {".arrow"}
    assert content(stoker.open(tmp_path / "x.parquet")) == own(hf, in_memory)
    made = hf.Dataset.from_generator(
        lambda: iter(rows), features=in_memory.features, cache_dir=str(tmp_path / "c")
    )
    same_as(hf, made)


def test_datasets_whose_images_are_files(hf: Any, folder: Path, tmp_path: Path) -> None:
    loaded = hf.load_dataset(
        "imagefolder", data_dir=str(folder), split="train", cache_dir=str(tmp_path / "c")
    )
    assert loaded.data.column("image")[0]["bytes"].as_py() is None
    dataset = stoker.open(loaded.shuffle(seed=1))
    wanted = loaded.shuffle(seed=1)
    paths = [
        sample["image"]["path"] for sample in wanted.cast_column("image", hf.Image(decode=False))
    ]
    assert list(dataset.names) == paths  # type: ignore[attr-defined]
    assert content(dataset) == [Path(path).read_bytes() for path in paths]
    assert dataset.targets == wanted["label"][:]
    with pytest.raises(SourceError, match=r"outside of .*: root= allows for another folder"):
        stoker.open(loaded, root=tmp_path / "c")
    assert content(stoker.open(loaded, root=folder)) == content(stoker.open(loaded))
    moved = hf.Dataset.from_dict(
        {"image": [{"path": path, "bytes": None} for path in ("/absent.jpg", paths[0])]},
        features=hf.Features({"image": hf.Image()}),
    )
    with pytest.raises(SourceError, match=r"row 0 names an image '/absent\.jpg': No such file"):
        stoker.open(moved)
    with pytest.warns(StokerWarning, match="row 0 names"):
        assert len(stoker.open(moved, damaged="skip")) == 1


def test_datasets_that_cannot_be_opened(hf: Any, mapped: Any) -> None:
    with pytest.raises(ValueError, match=r"is a stream, .*load it without streaming=True"):
        stoker.open(mapped.to_iterable_dataset())
    with pytest.raises(ValueError, match=r"several splits \(a\)"):
        stoker.open(hf.IterableDatasetDict({"a": mapped.to_iterable_dataset()}))
    with pytest.raises(
        ValueError, match=r"transform of its own: open dataset\.with_format\(None\)"
    ):
        stoker.open(mapped.with_transform(lambda batch: batch))
    with pytest.raises(ValueError, match=r"says nothing to a datasets\.Dataset"):
        stoker.open(mapped, label_offset=1)
    with pytest.raises(ValueError, match="damaged must be"):
        stoker.open(mapped, damaged="no")
    with pytest.raises(ValueError, match=r"a Features is no datasets\.Dataset"):
        stoker.open(mapped.features)
    with pytest.raises(SourceError, match=r"a datasets.Dataset: has no image column 'x'"):
        stoker.open(mapped, image="x")
    lacking = hf.Dataset.from_dict({"image": [None], "label": [1]}, features=mapped.features)
    with pytest.raises(SourceError, match="row 0 has no image"):
        stoker.open(lacking)


# Damage


def test_no_damage_crashes_or_reads_outside(tmp_path: Path) -> None:
    rng, served, refused, told = random.Random(7), 0, 0, set[str]()
    images = [{"bytes": rng.randbytes(rng.randrange(80)), "path": f"{i}.jpg"} for i in range(40)]
    table = pa.table({"image": pa.array(images, HF_IMAGE), "label": ["a", "b"] * 20})
    path = tmp_path / "x.arrow"
    for opened in (pa.ipc.new_stream, pa.ipc.new_file):
        for compression in (None, "zstd"):
            sink = io.BytesIO()
            options = pa.ipc.IpcWriteOptions(compression=compression)
            with opened(sink, table.schema, options=options) as writer:
                writer.write_table(table, max_chunksize=9)
            for data in _mutations(sink.getvalue(), 150, rng):
                path.write_bytes(data)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        dataset = Arrow(path, damaged="skip", cache=False)
                    except SourceError as error:
                        told.add(Path(error.path).name)
                        refused += 1
                        continue
                extents = dataset.files.extents
                assert extents is not None
                ends = extents.begin + extents.length
                assert (extents.begin >= 0).all() and (extents.length >= 0).all()
                sizes = [
                    Path(extents.shards.path(i)).stat().st_size for i in range(len(extents.shards))
                ]
                assert (ends <= np.array(sizes)[extents.shard]).all()
                served += len(dataset)
    assert served > 3000 and refused > 50 and told == {"x.arrow"}


def _mutations(whole: bytes, count: int, rng: random.Random) -> Iterator[bytes]:
    for _ in range(count):
        data = bytearray(whole)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.randrange(1, 4)):
            if data:
                data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 255, rng.randrange(256)])
        yield bytes(data)


def test_truncated_anywhere(saved: Path, rows: list[dict[str, Any]]) -> None:
    path = saved / "data-00001-of-00003.arrow"
    whole = path.read_bytes()
    for end in [0, 1, 4, 8, 12, *range(16, len(whole), len(whole) // 50), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(SourceError, match=r"data-00001-of-00003\.arrow: "):
            stoker.open(saved)
    path.write_bytes(whole[:-8])  # all batches are there, but nothing says that these are all
    with pytest.raises(SourceError, match="ends without an end mark, after 8 rows"):
        stoker.open(saved)
    with pytest.warns(StokerWarning, match="end mark"):
        assert len(stoker.open(saved, damaged="skip")) == 24


def test_the_handed_folder(hf: Any, data: Path) -> None:
    path = data / "formats/arrow/hf_save_to_disk"
    dataset = stoker.open(path)
    assert isinstance(dataset, Arrow) and dataset.classes == ["ants", "bees"]
    loaded = hf.load_from_disk(path)
    assert len(dataset) == 12
    assert content(dataset) == own(hf, loaded) == content(same_as(hf, loaded))
    assert dataset.targets == loaded["label"][:]
    assert dataset[0][0].size == loaded[0]["image"].size


def test_without_pyarrow(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'stoker\[parquet\]'"):
        stoker.open(saved)
