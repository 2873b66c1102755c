"""Zip archives: as the folder that was packed; damaged, hostile and odd ones."""

from __future__ import annotations

import io
import os
import random
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1

import stoker
from pictures import class_folder
from stoker import cache
from stoker.errors import SourceError, StokerWarning
from stoker.sources import zip as module
from stoker.sources.zip import Zip

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
JPEG = b"\xff\xd8\xff no more than that"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes"), 24)


def pack(path: Path, folder: Path, method: int = zipfile.ZIP_STORED) -> Path:
    """Packs a folder in no particular order; method 255 is any of the two, by turns."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    random.Random(5).shuffle(files)
    with zipfile.ZipFile(path, "w") as archive:
        archive.mkdir("photos")
        for number, file in enumerate(files):
            kind = (0, 8)[number % 2] if method == 255 else method
            archive.write(file, f"photos/{file.relative_to(folder)}", kind)
    return path


def write(path: Path, members: dict[str, bytes], method: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def contents(dataset: Any) -> dict[str, bytes]:
    return {name: dataset.files.opened(row).read() for row, name in enumerate(dataset.names)}


@pytest.mark.parametrize("method", [0, 8, 255])
@pytest.mark.parametrize("threads", [0, 2])
def test_batches_are_those_of_the_folder(
    tmp_path: Path, folder: Path, method: int, threads: int
) -> None:
    def epoch(dataset: Any) -> list[Any]:
        loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5)
        assert loader.explain().tier == "lowered"
        return list(loader)

    ours = stoker.open(pack(tmp_path / "photos.dat", folder, method), TRAIN)
    theirs = stoker.ImageFolder(folder, TRAIN)
    assert isinstance(ours, Zip) and ours.classes == theirs.classes
    assert ours.targets == list(theirs.targets)
    for one, two in zip(epoch(ours), epoch(theirs), strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_stored_members_are_read_in_place(tmp_path: Path, folder: Path, kept: Path) -> None:
    path = pack(tmp_path / "x.zip", folder)
    dataset = Zip(path)
    assert dataset.shards == [str(path)] and not (kept / "expanded").exists()
    with zipfile.ZipFile(path) as archive:
        wanted = {n: archive.read(n) for n in archive.namelist() if not n.endswith("/")}
    assert contents(dataset) == wanted


def test_deflated_members_are_expanded_once(
    tmp_path: Path, folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(tmp_path / "x.zip", folder, 255)
    first = Zip(path)
    (made,) = (kept / "expanded").iterdir()
    assert first.shards == [str(path), str(made)]
    with zipfile.ZipFile(made) as archive:
        assert len(archive.namelist()) == 12 and archive.testzip() is None
    monkeypatch.setattr(module, "_inflated", None)
    assert contents(Zip(path)) == contents(first) == contents(Zip(path, cache=False))


def test_labels(tmp_path: Path) -> None:
    names = ["train/dog/1.jpg", "train/cat/1.jpg", "train/cat/1.png", "train/emu/IMG.2.b.JPEG"]
    path = write(tmp_path / "x", dict.fromkeys(names, JPEG) | {"labels.csv": b"a,b"})
    dataset = Zip(path)
    assert dataset.classes == ["cat", "dog", "emu"]
    assert list(dataset.names) == [names[1], names[2], names[0], names[3]]
    assert dataset.targets == [0, 0, 1, 2]
    assert Zip(path, classes=["emu", "dog", "cat"]).targets == [2, 2, 1, 0]
    assert Zip(path, label=None).targets == [-1] * 4
    assert Zip(path, label={name: 9 - n for n, name in enumerate(names)}).targets == [8, 7, 9, 6]
    flat = write(tmp_path / "y", {"a/1.jpg": JPEG, "a/2.jpg": JPEG})
    assert Zip(flat).targets == [-1, -1] and Zip(flat, label="folder").targets == [0, 0]
    both = Zip([path, flat])
    assert len(both) == 6 and both.classes == ["a", "cat", "dog", "emu"]
    with pytest.raises(ValueError, match="label must be"):
        Zip(path, label="cls")


def test_names(tmp_path: Path, kept: Path) -> None:
    """What is no sample, and names that would be dangerous where they are unpacked."""
    samples = ["a/1.jpg", "../../b/2.jpg", "/c/3.jpg", "d\\4.jpg", "é/ü ☃.jpg", "./e/5.jpg"]
    others = ["__MACOSX/a/._1.jpg", "a/._1.jpg", ".git/x.jpg", "a/Thumbs.db", "readme.txt", "jpg"]
    for method in (0, 8):
        path = write(tmp_path / f"{method}.zip", dict.fromkeys(samples + others, JPEG), method)
        dataset = Zip(path)
        assert sorted(dataset.names) == sorted(samples)
        assert dataset.classes == ["a", "b", "c", "d", "e", "é"]
    assert sorted(os.listdir(tmp_path)) == ["0.zip", "8.zip", "cache"]
    assert sorted(os.listdir(kept)) == ["expanded", "shards"] or not (kept / "shards").exists()


def test_old_encodings_and_large_archives(tmp_path: Path) -> None:
    """Names in code page 437, sizes in zip64 fields, data descriptors, bytes in front."""
    info = zipfile.ZipInfo("x/1.jpg")
    info.flag_bits = 0
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        with archive.open(info, "w", force_zip64=True) as member:
            member.write(JPEG)
        archive.writestr("caf\u00e9/1.jpg", JPEG)
    data = (
        raw.getvalue()
        .replace("caf\u00e9".encode(), b"caf\x82\x20")
        .replace(b"PK\3\4\x14\0\0\x08", b"PK\3\4\x14\0\0\0")
    )
    data = data.replace(b"PK\1\2\x14\x03\x14\0\0\x08", b"PK\1\2\x14\x03\x14\0\0\0")
    path = tmp_path / "x"
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == ["caf\u00e9 /1.jpg", "x/1.jpg"]
    assert sorted(Zip(path).names) == ["caf\u00e9 /1.jpg", "x/1.jpg"]

    class Stream(io.RawIOBase):
        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, part: Any) -> int:
            self.data += part
            return len(part)

    stream = Stream()
    with zipfile.ZipFile(stream, "w") as archive:
        for n in range(3):
            archive.writestr(zipfile.ZipInfo(f"{n}.jpg"), JPEG + bytes(n), n % 2 * 8)
    path.write_bytes(b"#!/bin/sh\n" + stream.data)
    with zipfile.ZipFile(path) as archive:
        wanted = {name: archive.read(name) for name in archive.namelist()}
    assert contents(Zip(path)) == wanted


def test_of_two_members_with_one_name_the_last_counts(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for content in (JPEG, JPEG + b"2"):
            archive.writestr("1.jpg", content)
    assert contents(Zip(tmp_path / "x")) == {"1.jpg": JPEG + b"2"}


def _central(data: bytearray, number: int) -> int:
    """Where the directory's entry of a member is."""
    at = -1
    for _ in range(number + 1):
        at = data.index(b"PK\1\2", at + 1)
    return at


# Offsets in an entry of the directory: flags 8, method 10, CRC 16, sizes 20 and 24, header 42.
DAMAGED = {
    "encrypted": (8, b"\1\0", "is encrypted: unpack the archive first"),
    "bzip2": (10, b"\x0c\0", "is compressed by method 12: only deflate is read"),
    "large": (24, struct.pack("<I", (1 << 30) + 1), "has 1,073,741,825 bytes, more than"),
    "outside": (42, struct.pack("<I", 1 << 30), "lies outside"),
    "elsewhere": (42, b"\0\0\0\0", "has a damaged header"),
    "long": (20, struct.pack("<I", 1 << 29), "(lies outside|has two sizes)"),
}


@pytest.mark.parametrize(("at", "value", "told"), DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("method", [0, 8])
def test_damaged_members_are_lost_alone(
    tmp_path: Path, at: int, value: bytes, told: str, method: int
) -> None:
    members = {f"{n}.jpg": JPEG * (n + 3) for n in range(5)}
    path = write(tmp_path / "x", members, method)
    data = bytearray(path.read_bytes())
    entry = _central(data, 2)
    data[entry + at : entry + at + len(value)] = value
    path.write_bytes(data)
    with pytest.raises(SourceError, match=rf"'2\.jpg' ({told}).*damaged='skip' keeps"):
        Zip(path)
    with pytest.warns(StokerWarning, match=rf"'2\.jpg' ({told})"):
        dataset = Zip(path, damaged="skip")
    del members["2.jpg"]
    assert contents(dataset) == members


@pytest.mark.parametrize("what", ["content", "CRC", "size", "smaller size"])
def test_deflated_members_are_checked(tmp_path: Path, what: str) -> None:
    members = {f"{n}.jpg": bytes(range(100)) * (n + 3) for n in range(5)}
    path = write(tmp_path / "x", members, 8)
    data = bytearray(path.read_bytes())
    entry = _central(data, 2)
    if what == "content":
        data[data.index(b"2.jpg") + 12] ^= 0x55
    elif what == "CRC":
        data[entry + 16] ^= 1
    else:
        size = len(members["2.jpg"])
        struct.pack_into("<I", data, entry + 24, size + 9 if what == "size" else size - 9)
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(SourceError, match=r"x: sample 2\.jpg cannot be expanded"):
            Zip(path)
        with pytest.warns(StokerWarning, match=r"sample 2\.jpg cannot be expanded"):
            assert list(Zip(path, damaged="skip").names) == ["0.jpg", "1.jpg", "3.jpg", "4.jpg"]


def test_stored_members_are_checked_on_request(tmp_path: Path, folder: Path) -> None:
    path = pack(tmp_path / "a.zip", folder)
    assert len(Zip(path, checksums=True)) == 24
    whole = Zip(path)
    extents = whole.files.extents
    assert extents is not None
    data = bytearray(path.read_bytes())
    data[int(extents.begin[5] + extents.length[5] // 2)] ^= 1
    path.write_bytes(data)
    assert len(Zip(path)) == 24
    with pytest.raises(SourceError, match="has a wrong CRC"):
        Zip(path, checksums=True)
    with pytest.warns(StokerWarning, match="left out"):
        checked = Zip(path, checksums=True, damaged="skip")
    lost = whole.files.name(5)
    assert list(checked.names) == [name for name in whole.names if name != lost]


def test_bombs(tmp_path: Path, kept: Path) -> None:
    """Members that grow out of proportion, that say less than they are, and that overlap."""
    path = tmp_path / "x"
    with zipfile.ZipFile(path, "w", 8) as archive:
        for n in range(4):
            with archive.open(f"{n}.jpg", "w") as member:
                for _ in range(300):
                    member.write(bytes(1 << 20))
    with pytest.raises(SourceError, match=r"would grow from [\d,]+ to 1,258,291,200 bytes"):
        Zip(path)
    data = bytearray(path.read_bytes())
    for n in range(4):  # the same, under false sizes
        struct.pack_into("<I", data, _central(data, n) + 24, 100)
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"4 samples .* cannot be expanded"):
        Zip(path)
    assert sum(file.stat().st_size for file in kept.rglob("*") if file.is_file()) < 10_000
    quoted = write(tmp_path / "y", {"1.jpg": JPEG * 9, "2.jpg": JPEG})
    data = bytearray(quoted.read_bytes())
    struct.pack_into("<II", data, _central(data, 0) + 20, 260, 260)
    quoted.write_bytes(data)
    with pytest.raises(SourceError, match="has members that overlap"):
        Zip(quoted)


def test_archives_that_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a.txt": b"x", "a.jpg/b": b""})
    with pytest.raises(SourceError, match="has no image"):
        stoker.open(path)
    whole = write(path, {f"{n}.jpg": JPEG for n in range(20)}).read_bytes()
    for end in (4, 10, 40, len(whole) // 2, len(whole) - 22, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(SourceError, match=r"x: is truncated or damaged: .* may repair it"):
            stoker.open(path)
    write(path, {})
    with pytest.raises(SourceError, match="has no image"):
        stoker.open(path)
    with pytest.raises(SourceError, match="No such file"):
        Zip(tmp_path / "absent")
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    with pytest.raises(SourceError, match="has no image"):
        stoker.open(tmp_path / "x.npz")


@pytest.mark.parametrize("method", [0, 8])
def test_no_damage_crashes_or_reads_outside(tmp_path: Path, method: int) -> None:
    members = {f"c{n % 3}/{n}.jpg": bytes(random.Random(n).randbytes(40)) * 5 for n in range(12)}
    path = write(tmp_path / "x", members, method)
    whole, rng, whole_ones, refused = path.read_bytes(), random.Random(3), 0, 0
    directory = whole.index(b"PK\1\2")
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            place = rng.choice([rng.randrange(directory, len(data)), rng.randrange(len(data))])
            data[place] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dataset = Zip(path, damaged="skip", cache=False)
            except SourceError:
                refused += 1
                continue
        for name, content in contents(dataset).items():
            assert len(content) < 1 << 20
            whole_ones += members.get(name) == content
            if method == 8 and name in members:
                assert members[name] == content
    assert whole_ones > 400 and refused > 10


def test_many_members(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with zipfile.ZipFile(path, "w") as archive:
        for n in range(70_000):  # which takes zip64
            archive.writestr(f"{n % 100}/{n}.jpg", b"%d" % n)
    dataset = Zip(path)
    assert len(dataset) == 70_000
    assert dataset.classes == sorted(map(str, range(100)))  # of digits too
    names = list(dataset.names)
    for row in (0, 7, 69_999):
        number = int(dataset.files.opened(row).read())
        assert names[row] == f"{number % 100}/{number}.jpg"
        assert dataset.classes[dataset.targets[row]] == str(number % 100)
