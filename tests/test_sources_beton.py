"""FFCV's files: as their description says, as FFCV itself wrote them, and damaged."""

from __future__ import annotations

import io
import json
import random
import struct
import warnings
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
from stoker.sources.beton import Beton

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
# Type, size and alignment of a cell.
CELLS = {"float": (0, 8, 8), "int": (1, 8, 8), "image": (2, 13, 1), "bytes": (3, 16, 1)}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


def layout(kinds: list[str]) -> tuple[list[int], int]:
    """Where each cell of a row begins, and the row's size."""
    at, starts = 0, []
    for kind in kinds:
        _, size, alignment = CELLS[kind]
        at = -(-at // alignment) * alignment
        starts.append(at)
        at += size
    most = max(CELLS[kind][2] for kind in kinds)
    return starts, -(-at // most) * most


def write(path: Path, fields: dict[str, str], samples: list[list[Any]]) -> Path:
    """Writes samples by the format's description; an image is bytes of a JPEG or an array."""
    starts, row_bytes = layout(list(fields.values()))
    head_bytes = 24 + 1041 * len(fields)
    pages = head_bytes + row_bytes * len(samples)
    body, rows, table = bytearray(), bytearray(), bytearray()
    for number, sample in enumerate(samples):
        row = bytearray(row_bytes)
        for start, kind, value in zip(starts, fields.values(), sample, strict=True):
            if kind in ("float", "int"):
                struct.pack_into("<d" if kind == "float" else "<q", row, start, value)
                continue
            place, content = pages + len(body), bytes(value)
            if kind == "image" and isinstance(value, bytes):
                width, height = Image.open(io.BytesIO(value)).size
                struct.pack_into("<BHHQ", row, start, 0, width, height, place)
            elif kind == "image":
                content = value.tobytes()
                struct.pack_into("<BHHQ", row, start, 1, value.shape[1], value.shape[0], place)
            else:
                struct.pack_into("<QQ", row, start, place, len(content))
            body += content
            table += struct.pack("<QQQ", number, place, len(content))
        rows += row
    head = struct.pack("<HHIQQ", 2, len(fields), 1 << 21, len(samples), pages + len(body))
    for name, kind in fields.items():
        head += bytes([CELLS[kind][0]]) + name.encode().ljust(16, b"\0") + bytes(1024)
    path.write_bytes(head + rows + body + table)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes"), 24)


@pytest.fixture(scope="module")
def pictures(folder: Path) -> list[tuple[bytes, int]]:
    samples = stoker.ImageFolder(folder, cache=False).samples
    return [(Path(path).read_bytes(), label) for path, label in samples]


def array(content: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def mixed(pictures: list[tuple[bytes, int]]) -> list[list[Any]]:
    """Every third image raw."""
    return [
        [0.5, content if number % 3 else array(content), label, b"x" * number]
        for number, (content, label) in enumerate(pictures)
    ]


FIELDS = {"weight": "float", "picture": "image", "label": "int", "more": "bytes"}


@pytest.mark.parametrize("threads", [0, 2])
def test_batches_are_those_of_the_folder(
    tmp_path: Path, folder: Path, pictures: list[tuple[bytes, int]], threads: int
) -> None:
    def epoch(dataset: Any) -> list[Any]:
        loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5)
        assert loader.explain().tier == "lowered"
        return list(loader)

    path = write(tmp_path / "x.beton", FIELDS, mixed(pictures))
    ours = stoker.open(path, TRAIN)
    assert isinstance(ours, Beton) and ours.shards[0] == str(path) and len(ours.shards) == 2
    theirs = stoker.ImageFolder(folder, TRAIN)
    assert ours.targets == list(theirs.targets)
    for one, two in zip(epoch(ours), epoch(theirs), strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_jpegs_stay_in_place(tmp_path: Path, pictures: list[tuple[bytes, int]], kept: Path) -> None:
    path = write(tmp_path / "x", {"image": "image", "n": "int"}, [list(p) for p in pictures])
    dataset = Beton(path)
    assert dataset.shards == [str(path)] and not kept.exists()
    assert [dataset.files.opened(n).read() for n in range(24)] == [c for c, _ in pictures]


def test_fields(tmp_path: Path, pictures: list[tuple[bytes, int]]) -> None:
    one, two = pictures[0][0], array(pictures[1][0])
    fields = {"n": "int", "a": "image", "class": "int", "w": "float", "b": "image"}
    path = write(tmp_path / "x", fields, [[5, one, 7, 0.5, two], [6, one, 8, 0.5, two]])
    assert Beton(path).targets == [7, 8] and list(Beton(path).names) == ["0", "1"]
    assert Beton(path, label="n").targets == [5, 6]
    assert Beton(path, label=None).targets == [-1, -1]
    assert Beton(path, label={"0": 1, "1": 0}).targets == [1, 0]
    assert np.array_equal(np.asarray(Beton(path, image="b")[1][0]), two)
    first = write(tmp_path / "y", {"n": "int", "a": "image", "m": "int"}, [[5, one, 7]])
    assert Beton(first).targets == [5]
    none = write(tmp_path / "z", {"a": "image"}, [[one]])
    assert Beton(none).targets == [-1]
    for wrong in ({"image": "n"}, {"image": "c"}, {"label": "w"}, {"label": "c"}):
        with pytest.raises(SourceError, match=r"no field '\w' of type \w+; .* a \(image\), class"):
            Beton(path, **wrong)  # type: ignore[arg-type]


def _changed(path: Path, at: int, value: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + len(value)] = value
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("at", "value", "told"),
    [
        (0, b"\3\0", "is no FFCV file of version 2"),
        (2, b"\0\0", "is no FFCV file of version 2"),
        (2, b"\xff\3", "truncated in the description of its fields"),
        (8, struct.pack("<Q", 1 << 62), "truncated in the rows of its"),
        (8, struct.pack("<Q", (1 << 64) - 1), "truncated in the rows of its"),
        (16, bytes(8), "was not finished"),
        (16, struct.pack("<Q", 1 << 63), "is truncated: it has"),
        (24, b"\xff", "a field 'weight' of unknown type 255"),
        (24, b"\x07", "a field 'weight' of unknown type 7"),
    ],
)
def test_damaged_heads(
    tmp_path: Path, pictures: list[tuple[bytes, int]], at: int, value: bytes, told: str
) -> None:
    path = write(tmp_path / "x", FIELDS, mixed(pictures[:6]))
    with pytest.raises(SourceError, match=told):
        Beton(_changed(path, at, value))


def test_damaged_samples_are_lost_alone(tmp_path: Path, pictures: list[tuple[bytes, int]]) -> None:
    starts, row_bytes = layout(list(FIELDS.values()))
    rows = 24 + 1041 * len(FIELDS)

    def cell(number: int) -> int:
        return rows + number * row_bytes + starts[1]

    path = write(tmp_path / "x", FIELDS, mixed(pictures[:9]))
    _changed(path, cell(1) + 5, struct.pack("<Q", 1 << 63))  # a place outside
    _changed(path, cell(2), b"\2")  # an unknown mode
    _changed(path, cell(3) + 1, struct.pack("<H", 65535))  # pixels that are more than its bytes
    _changed(path, cell(4) + 5, struct.pack("<Q", 30))  # a place of nothing
    with pytest.raises(SourceError, match=r"4 samples \(1, 2, 3, \.\.\.\) damaged; damaged='skip'"):
        Beton(path)
    with pytest.warns(StokerWarning, match=r"4 samples \(1, 2, 3, \.\.\.\) damaged; left out"):
        dataset = Beton(path, damaged="skip")
    assert list(dataset.names) == ["0", "5", "6", "7", "8"]
    for row, number in enumerate([0, 5, 6, 7, 8]):
        assert np.array_equal(np.asarray(dataset[row][0]), array(pictures[number][0]))
        assert dataset[row][1] == pictures[number][1]


def test_raw_samples_that_overlap_fill_no_disk(tmp_path: Path, kept: Path) -> None:
    """A thousand samples that are all the same megabyte."""
    big = np.zeros((600, 600, 3), np.uint8)
    small = np.zeros((1, 1, 3), np.uint8)
    path = write(tmp_path / "x", {"image": "image"}, [[big], *[[small]] * 999])
    data = bytearray(path.read_bytes())
    for number in range(1, 1000):
        first = 24 + 1041
        data[first + 13 * number : first + 13 * (number + 1)] = data[first : first + 13]
    path.write_bytes(data)
    with pytest.raises(SourceError, match="is damaged: 1,080,000,000 bytes of pixels in a file of"):
        Beton(path)
    assert not kept.exists()


def test_truncated_files(tmp_path: Path, pictures: list[tuple[bytes, int]]) -> None:
    path = write(tmp_path / "x", FIELDS, mixed(pictures[:6]))
    whole = path.read_bytes()
    table = len(whole) - 24 * 12
    for end in [*range(0, len(whole), 997), table, table + 24, len(whole) - 1]:
        path.write_bytes(whole[:end])
        if end < table:
            with pytest.raises(SourceError):
                Beton(path, damaged="skip")
        elif end < len(whole) - 1:
            with pytest.raises(SourceError, match="damaged='skip' keeps the others"):
                Beton(path)
        else:  # of the last sample's bytes, which are no image
            assert len(Beton(path)) == 6


def test_no_damage_crashes_or_reads_outside(
    tmp_path: Path, pictures: list[tuple[bytes, int]]
) -> None:
    path = write(tmp_path / "x", FIELDS, mixed(pictures[:6]))
    whole, rng, read = path.read_bytes(), random.Random(3), 0
    rows = 24 + 1041 * len(FIELDS)
    places = [*range(24), *range(rows, rows + 6 * 48), *range(len(whole) - 24 * 12, len(whole))]
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            data[rng.choice(places)] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dataset = Beton(path, damaged="skip")
            except SourceError:
                continue
        read += 1
        extents = dataset.files.extents
        assert extents is not None
        ends = extents.begin + extents.length
        assert (extents.begin >= 0).all() and (extents.length > 0).all()
        assert ((ends <= len(data)) | (extents.shard == 1)).all()
    assert read > 100


def test_a_file_of_ffcv(data: Path) -> None:
    formats = data / "formats"
    dataset = stoker.open(formats / "ffcv" / "jpg_q90.beton")
    assert isinstance(dataset, Beton)
    wanted = json.loads((formats / "EXPECT_ffcv_jpg_q90.json").read_text())
    assert dataset.targets == [one["label"] for one in wanted] and len(wanted) == 30
    for row, one in enumerate(wanted):
        width, height = one["src_size"]
        factor = min(1, 256 / max(width, height))
        image = dataset[row][0]
        assert image.size == (int(factor * width), int(factor * height))
        assert dataset.files.opened(row).read()[:2] == b"\xff\xd8"
        assert np.asarray(image).std() > 10
