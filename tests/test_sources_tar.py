"""Tar shards: read as Python's tarfile reads them, served as the same files in a folder are."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from pictures import class_folder
from stoker import cache
from stoker.engine import native_files
from stoker.errors import DecodeError, SourceError, StokerWarning
from stoker.sources import shards as sources_shards
from stoker.sources import tar
from stoker.sources.shards import paths_of
from stoker.sources.tar import Tar, split

Members = dict[str, bytes]

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test; indexes are kept however fresh the shards are."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    monkeypatch.setattr(sources_shards, "_SETTLED_SECONDS", -10)
    return tmp_path / "cache" / "shards"


def pack(path: Path, members: Members, kind: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=kind) as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes"), 40)


@pytest.fixture(scope="module")
def pictures(folder: Path) -> list[tuple[bytes, str, int]]:
    """Content, extension and label of each picture of the folder, in its order."""
    samples = stoker.ImageFolder(folder, cache=False).samples
    return [(Path(p).read_bytes(), Path(p).suffix, label) for p, label in samples]


@pytest.fixture
def shards(tmp_path: Path, pictures: list[tuple[bytes, str, int]]) -> str:
    """Four shards of the same pictures, as WebDataset writes them; the pattern of their names."""
    for number in range(4):
        members: Members = {}
        for place in range(number * 10, number * 10 + 10):
            content, suffix, label = pictures[place]
            members[f"{place:06}{suffix}"] = content
            members[f"{place:06}.cls"] = str(label).encode()
            members[f"{place:06}.json"] = json.dumps({"class": label, "name": "x" * 80}).encode()
        pack(tmp_path / f"train-{number:03}.tar", members)
    return f"{tmp_path}/train-{{000..003}}.tar"


def by_tarfile(path: Path) -> list[tuple[str, int, int]]:
    with tarfile.open(path) as file:
        return [(m.name, m.offset_data, m.size) for m in file if m.isreg()]


def scanned(path: Path) -> list[tuple[str, int, int]]:
    index = tar.scan(str(path))
    assert not index.damage
    return [member[:3] for member in index.entries()]


# Served like a folder


@pytest.mark.parametrize("threads", [0, 2])
def test_batches_are_those_of_the_folder(folder: Path, shards: str, threads: int) -> None:
    def epochs(dataset: Any) -> list[Any]:
        loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5)
        assert loader.explain().tier == "lowered"
        return [batch for _ in range(2) for batch in loader]

    ours = epochs(stoker.open(shards, TRAIN))
    theirs = epochs(stoker.ImageFolder(folder, TRAIN))
    assert len(ours) == 12
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_samples_in_torchs_own_workers(shards: str, folder: Path, method: str) -> None:
    chain = v1.Compose([v1.Resize((20, 20)), v1.ToTensor()])
    batches = [
        list(torch.utils.data.DataLoader(dataset, 9, num_workers=1, multiprocessing_context=method))
        for dataset in (stoker.open(shards, chain), stoker.ImageFolder(folder, chain))
    ]
    for one, two in zip(*batches, strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_subset_and_pickle(shards: str, pictures: list[tuple[bytes, str, int]]) -> None:
    dataset = stoker.open(shards, TRAIN)
    copy = pickle.loads(pickle.dumps(dataset))
    chosen = [31, 3, 17, -1]
    loader = stoker.DataLoader(torch.utils.data.Subset(copy, chosen), 4, num_workers=1)
    assert loader.explain().tier == "lowered"
    ((_, labels),) = list(loader)
    assert labels.tolist() == [pictures[i][2] for i in chosen]
    part = dataset.files.select(np.array(chosen[:3]))
    assert [part.opened(i).read() for i in range(3)] == [pictures[i][0] for i in chosen[:3]]


def test_a_broken_image_has_the_name_of_shard_and_member(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.tar", {"x.jpg": b"\xff\xd8\xff nothing", "x.cls": b"1"})
    dataset = stoker.open(path, TRAIN)
    with pytest.raises(DecodeError, match=r"a\.tar:x\.jpg"):
        dataset[0]
    with pytest.raises(DecodeError, match=r"a\.tar:x\.jpg"):
        list(stoker.DataLoader(dataset, 1, num_workers=1))


@pytest.mark.parametrize("threads", [0, 1])
def test_a_shard_that_shrank_is_an_error(shards: str, threads: int) -> None:
    dataset = stoker.open(shards, TRAIN)
    with open(dataset.files.extents.shards.path(2), "r+b") as file:  # type: ignore[union-attr]
        file.truncate(2000)
    loader = stoker.DataLoader(dataset, 40, num_workers=threads)
    with pytest.raises(DecodeError, match=r"train-002\.tar:0000"):
        list(loader)


def test_limits(tmp_path: Path, pictures: list[tuple[bytes, str, int]]) -> None:
    content, suffix, _ = pictures[0]
    path = pack(tmp_path / "a.tar", {f"x{suffix}": content})
    with pytest.raises(DecodeError, match="more than max_bytes"):
        stoker.open(path, max_bytes=len(content) - 1)[0]
    assert stoker.open(path, max_bytes=len(content))[0][1] == -1
    with pytest.raises(DecodeError, match="more than max_pixels"):
        next(iter(stoker.DataLoader(stoker.open(path, TRAIN, max_pixels=100), 1, num_workers=1)))


def test_extents_are_checked_before_native_code_sees_them() -> None:
    names, offsets = np.frombuffer(b"ab", np.uint8), np.array([0, 1, 2], np.uint64)

    def make(shard: list[int], begin: list[int], length: list[int]) -> object:
        extents = np.array(shard, np.uint32), np.array(begin), np.array(length)
        return native_files("", names, offsets, None, None, False, extents=extents)

    make([1, 0], [0, 5], [3, 0])
    for wrong in (([2], [0], [0]), ([0], [-1], [0]), ([0], [0], [-1]), ([0, 1], [0], [0, 0])):
        with pytest.raises(ValueError, match="shard"):
            make(*wrong)


# Layouts


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
paths = st.lists(names.filter(lambda n: "/" not in n), min_size=1, max_size=4).map("/".join)


@given(
    st.lists(st.tuples(paths, st.integers(0, 1500)), max_size=12),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
@settings(max_examples=60, deadline=None)
def test_members_are_those_of_tarfile(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, int]], kind: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "members.tar"
    with tarfile.open(path, "w", format=kind) as file:
        for name, size in members:
            info = tarfile.TarInfo(name)
            info.size = size
            file.addfile(info, io.BytesIO(b"x" * size))
    assert scanned(path) == by_tarfile(path)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_folders_and_links(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=kind) as file:
        for name, type_ in (
            ("d", tarfile.DIRTYPE),
            ("d/link.jpg", tarfile.SYMTYPE),
            ("d/hard.jpg", tarfile.LNKTYPE),
            ("d/pipe.jpg", tarfile.FIFOTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = type_, "x.jpg"
            file.addfile(info)
        for name in (f"{'d' * 90}/{'e' * 60}/x.jpg", "y.jpg"):
            info = tarfile.TarInfo(name)
            info.size = 5
            file.addfile(info, io.BytesIO(b"hello"))
    assert scanned(path) == by_tarfile(path)
    assert len(scanned(path)) == 2


def test_sizes_in_base_256_and_unaligned_checksums(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.jpg")
    info.size = 1000
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    header[124:136] = b"\x80" + (1000).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%6o\0 " % sum(header)
    path = tmp_path / "a.tar"
    path.write_bytes(bytes(header) + bytes(1024 + 1024))
    assert scanned(path) == by_tarfile(path) == [("a.jpg", 512, 1000)]


@pytest.mark.parametrize(
    ("name", "key_and_field"),
    [
        ("a/0001.JPG", ("a/0001", "jpg")),
        ("./a/0001.cls", ("a/0001", "cls")),
        ("././x.left.jpg", ("x", "left.jpg")),
        ("a.b/c.seg.PNG", ("a.b/c", "seg.png")),
        ("README", None),
        ("a/.hidden", None),
        ("a/x.", None),
        ("a.b/c", None),
    ],
)
def test_keys_and_fields(name: str, key_and_field: tuple[str, str] | None) -> None:
    assert split(name) == key_and_field


def test_members_of_a_sample_may_lie_apart(
    tmp_path: Path, pictures: list[tuple[bytes, str, int]]
) -> None:
    image = pictures[0][0]
    path = pack(
        tmp_path / "a.tar",
        {"1.cls": b"4", "2.jpg": image, "README": b"", "1.jpg": image, "2.cls": b" 7\n"},
    )
    dataset = Tar(path)
    assert list(dataset.names) == ["1.jpg", "2.jpg"] and dataset.targets == [4, 7]


def test_several_images_in_a_sample(tmp_path: Path, pictures: list[tuple[bytes, str, int]]) -> None:
    first, second = pictures[0][0], pictures[1][0]
    path = pack(tmp_path / "a.tar", {"1.left.jpg": first, "1.right.jpg": second, "2.jpg": first})
    with pytest.warns(StokerWarning, match=r"sample 1 \(left.jpg, right.jpg\)") as caught:
        dataset = stoker.open(path)
    assert caught[0].filename == __file__
    assert dataset.files.opened(0).read() == first
    with pytest.warns(StokerWarning, match="sample 2 without an image"):
        dataset = stoker.open(path, image="right.jpg")
    assert len(dataset) == 1 and dataset.files.opened(0).read() == second
    with pytest.raises(SourceError, match="no field png"):
        stoker.open(path, image="png")


LABELS: dict[str, tuple[Members, dict[str, Any], list[int], list[str]]] = {
    "numbers": ({"1.cls": b"3", "2.cls": b"-2\n"}, {}, [3, -2], []),
    "names": ({"1.cls": b"dog", "2.cls": b"cat"}, {}, [1, 0], ["cat", "dog"]),
    "names and a number": ({"1.cls": b"dog", "2.cls": b"10"}, {}, [1, 0], ["10", "dog"]),
    "given classes": (
        {"1.cls": b"dog", "2.cls": b"cat"},
        {"classes": ["dog", "emu", "cat"]},
        [0, 2],
        ["dog", "emu", "cat"],
    ),
    "another field": ({"1.txt": b"5", "2.txt": b"6"}, {"label": "txt"}, [5, 6], []),
    "a key of JSON": (
        {"1.json": b'{"y": 5, "z": [1]}', "2.json": b'{"y": 6}' + b" " * 100},
        {"label": "json:y"},
        [5, 6],
        [],
    ),
    "a mapping": ({}, {"label": {"1": "b", "2": "a"}}, [1, 0], ["a", "b"]),
    "none": ({"1.cls": b"3", "2.cls": b"4"}, {"label": None}, [-1, -1], []),
    "there are none": ({}, {}, [-1, -1], []),
}


@pytest.mark.parametrize("case", LABELS.values(), ids=LABELS)
def test_labels(
    tmp_path: Path, pictures: list[tuple[bytes, str, int]], case: tuple[Any, ...]
) -> None:
    members, options, labels, classes = case
    image = pictures[0][0]
    dataset = Tar(pack(tmp_path / "a.tar", {"1.jpg": image, "2.jpg": image, **members}), **options)
    assert dataset.targets == labels and dataset.classes == classes
    assert dataset.class_to_idx == {name: place for place, name in enumerate(classes)}


def test_folders_are_classes_where_nothing_else_tells(
    tmp_path: Path, pictures: list[tuple[bytes, str, int]]
) -> None:
    image = pictures[0][0]
    members = {"set/emu/1.jpg": image, "set/cat/1.jpg": image, "set/emu/2.jpg": image}
    dataset = stoker.open(pack(tmp_path / "a.tar", members))
    assert isinstance(dataset, Tar)
    assert dataset.targets == [1, 0, 1] and dataset.classes == ["cat", "emu"]
    assert Tar(pack(tmp_path / "b.tar", {"set/1.jpg": image})).targets == [-1]


@pytest.mark.parametrize(
    ("members", "options", "told"),
    [
        ({"1.json": b"{"}, {"label": "json:y"}, "label of sample 1: json"),
        ({"1.json": b'{"z": 1}'}, {"label": "json:y"}, "no 'y'"),
        ({"1.json": b'{"y": [1]}'}, {"label": "json:y"}, "a list"),
        ({"1.json": b"[" * 100_000}, {"label": "json:y"}, "label of sample 1"),
        ({"1.cls": b"\xff\xfe"}, {}, "label of sample 1"),
        ({}, {"label": "txt"}, "no sample has a label 'txt'"),
    ],
)
def test_labels_that_cannot_be_read(
    tmp_path: Path,
    pictures: list[tuple[bytes, str, int]],
    members: Members,
    options: dict[str, Any],
    told: str,
) -> None:
    path = pack(tmp_path / "a.tar", {"1.jpg": pictures[0][0], **members})
    with pytest.raises(SourceError, match=told):
        Tar(path, **options)


def test_classes_that_lack_one(tmp_path: Path, pictures: list[tuple[bytes, str, int]]) -> None:
    path = pack(tmp_path / "a.tar", {"1.jpg": pictures[0][0], "1.cls": b"emu"})
    with pytest.raises(ValueError, match="classes lack 'emu'"):
        Tar(path, classes=["cat"])


# Patterns


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a{0..2}", ["a0", "a1", "a2"]),
        ("a{2..0}", ["a2", "a1", "a0"]),
        ("a{008..011}", ["a008", "a009", "a010", "a011"]),
        ("{a,b}{0..1}", ["a0", "a1", "b0", "b1"]),
        ("a{x}", ["a{x}"]),
        ("plain", ["plain"]),
    ],
)
def test_braces_are_a_shells(pattern: str, found: list[str]) -> None:
    assert paths_of(pattern) == found


def test_stars_lists_and_nothing(tmp_path: Path) -> None:
    for name in ("b-1.tar", "b-0.tar", "a.tar", "odd[1].tar"):
        (tmp_path / name).touch()
    fit = [str(tmp_path / name) for name in ("b-0.tar", "b-1.tar")]
    assert paths_of(tmp_path / "b-*.tar") == fit
    assert paths_of([tmp_path / "a.tar", f"{tmp_path}/b-?.tar"]) == [f"{tmp_path}/a.tar", *fit]
    assert paths_of(tmp_path / "odd[1].tar") == [f"{tmp_path}/odd[1].tar"]
    with pytest.raises(SourceError, match="no file fits"):
        paths_of(tmp_path / "c-*.tar")
    with pytest.raises(SourceError, match="more than"):
        paths_of("x{0..99999999}")
    with pytest.raises(SourceError, match="names no shard"):
        paths_of([])


# Damage


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b"\x1f\x8b" + bytes(600), "compressed with gzip"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "compressed with zstd"),
        (b"PK\x03\x04" + bytes(600), "is truncated or damaged: File is not a zip file"),
        (b"\x00\x01" * 400, "is no tar"),
    ],
)
def test_files_that_are_no_shards(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(SourceError, match=told):
        stoker.open(tmp_path / "x.tar")


def test_absent_shards_and_pipes(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        stoker.open(tmp_path / "x.tar")
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(SourceError, match="is no file"):
        Tar(tmp_path / "pipe.tar")


def test_sparse_members_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a.jpg")
    info.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "old.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    info = tarfile.TarInfo("a.jpg")
    info.pax_headers = {"GNU.sparse.major": "1"}
    (tmp_path / "pax.tar").write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    for name in ("old.tar", "pax.tar"):
        with pytest.raises(SourceError, match="sparse"):
            Tar(tmp_path / name)


def test_a_truncated_shard_keeps_what_is_whole(shards: str, kept: Path) -> None:
    path = Path(shards.replace("{000..003}", "001"))
    whole = by_tarfile(path)
    with path.open("r+b") as file:
        file.truncate(whole[-6][1] + 1)
    with pytest.raises(SourceError, match=r"train-001\.tar: is truncated.*24 are whole"):
        Tar(path)
    with pytest.warns(StokerWarning, match="is truncated"):
        assert len(Tar(path, damaged="skip")) == 8
    assert not kept.exists(), "what was warned of once would then be silent"
    with pytest.raises(ValueError, match="damaged must be"):
        Tar(path, damaged="ignore")


def test_a_shard_that_shrinks_while_it_is_read(
    shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shards.replace("{000..003}", "001")
    size, pread = os.path.getsize(path), os.pread

    def shrunk(fd: int, length: int, at: int) -> bytes:
        return pread(fd, min(length, max(0, size // 2 + 100 - at)), at)

    monkeypatch.setattr(os, "pread", shrunk)
    with pytest.raises(SourceError, match="is truncated"):
        Tar(path, cache=False)


def test_a_damaged_header_loses_its_member_only(shards: str) -> None:
    path = Path(shards.replace("{000..003}", "001"))
    members = by_tarfile(path)
    images = [member for member in members if not member[0].endswith((".cls", ".json"))]
    with path.open("r+b") as file:
        file.seek(images[4][1] - 512 + 130)
        file.write(b"7")
    with pytest.raises(SourceError, match=r"damaged header.*29 are"):
        Tar(path)
    with pytest.warns(StokerWarning) as caught:
        dataset = Tar(path, damaged="skip")
    assert list(dataset.names) == [name for name, *_ in images if name != images[4][0]]
    told = " ".join(str(warning.message) for warning in caught)
    assert f"sample {images[4][0][:6]} without an image" in told


def test_no_damage_crashes_or_reads_outside(shards: str) -> None:
    path = Path(shards.replace("{000..003}", "000"))
    whole, rng = path.read_bytes(), random.Random(7)
    places = [place for _, begin, _ in by_tarfile(path) for place in (begin - 512, begin - 1536)]
    for _ in range(300):
        data = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
        for _ in range(rng.randrange(1, 6)):
            place = rng.choice(places) + rng.randrange(512)
            if 0 <= place < len(data):
                data[place] = rng.choice([0, 0x20, 0x30, 0x37, 0x80, 0xFF, rng.randrange(256)])
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dataset = Tar(path, damaged="skip", cache=False)
            except (SourceError, ValueError):
                continue
        extents = dataset.files.extents
        assert extents is not None
        assert (extents.begin >= 0).all() and (extents.length >= 0).all()
        assert (extents.begin + extents.length <= len(data)).all()


# Kept indexes


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Shards whose headers were read."""
    scanned: list[str] = []
    scan: Callable[[str], sources_shards.Index] = tar.scan

    def noted(path: str) -> sources_shards.Index:
        scanned.append(path)
        return scan(path)

    monkeypatch.setattr(tar, "scan", noted)
    return scanned


def _same(one: Tar, two: Tar) -> bool:
    return (
        one.targets == two.targets
        and list(one.names) == list(two.names)
        and one.files.extents is not None
        and two.files.extents is not None
        and one.files.extents.same_as(two.files.extents)
    )


def test_an_index_is_kept_until_its_shard_changes(shards: str, scans: list[str]) -> None:
    first = Tar(shards)
    assert len(scans) == 4
    assert _same(Tar(shards), first)
    assert len(scans) == 4
    path = shards.replace("{000..003}", "002")
    os.utime(path, ns=(1, 1))
    assert _same(Tar(shards), first)
    assert scans[4:] == [path]
    assert _same(Tar(shards, cache=False), first)
    assert len(scans) == 9


@pytest.mark.filterwarnings("ignore::stoker.StokerWarning")
def test_whatever_lies_in_the_cache_the_index_is_right(
    shards: str, kept: Path, scans: list[str]
) -> None:
    path = shards.replace("{000..003}", "000")
    first = Tar(path)
    (file,) = kept.iterdir()
    good, rng = file.read_bytes(), random.Random(1)
    for _ in range(100):
        bad = bytearray(good[: rng.choice([len(good), rng.randrange(len(good))])])
        if bad and rng.random() < 0.8:
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.5 and len(bad) > 16:  # as one who knows the format would
            bad[-16:] = hashlib.blake2b(bytes(bad[:-16]), digest_size=16).digest()
        file.write_bytes(bad)
        dataset = Tar(path, label=None)
        extents = dataset.files.extents
        assert extents is not None
        ends = extents.begin + extents.length
        assert (extents.begin >= 0).all() and (ends <= os.path.getsize(path)).all()
        if len(scans) > 1:
            assert _same(dataset, Tar(path, label=None, cache=False))
            scans.clear()
            scans.append("")
    assert len(first) == 10


def test_an_index_of_many_members_is_small(tmp_path: Path, kept: Path) -> None:
    header = bytearray(tarfile.TarInfo("n" * 10 + ".jpg").tobuf(tarfile.USTAR_FORMAT))
    begin = sum(header) - sum(header[148:156]) + 256 - sum(header[:10])
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        for i in range(100_000):
            header[:10] = b"%010d" % i
            header[148:156] = b"%06o\0 " % (begin + sum(header[:10]))
            file.write(header)
        file.write(bytes(1024))
    dataset = Tar(path)
    assert len(dataset) == 100_000 and dataset.names[99_999] == "0000099999.jpg"
    (index,) = kept.iterdir()
    assert index.stat().st_size < 5_000_000


# The handed shards


def test_webdatasets_own_shards(data: Path) -> None:
    formats = data / "formats"
    dataset = stoker.open(f"{formats}/webdataset/wds_photos/train-{{000000..000002}}.tar", TRAIN)
    expected = json.loads((formats / "EXPECT_webdataset_wds_photos.json").read_text())
    assert len(dataset) == len(expected) == 36
    for row, wanted in enumerate(expected):
        content = dataset.files.opened(row).read()
        assert hashlib.sha256(content).hexdigest().startswith(wanted["sha256"])
        assert len(content) == wanted["bytes"]
        assert dataset.files.size(row) == (wanted["height"], wanted["width"])
        assert dataset.files.name(row).startswith(wanted["key"])
    assert dataset.targets == [wanted["label"] for wanted in expected]


@pytest.mark.filterwarnings("ignore::stoker.StokerWarning")
def test_other_handed_shards(data: Path) -> None:
    shards = data / "formats" / "webdataset"
    odd = stoker.open(shards / "gnutar_odd.tar")
    keys = [split(name) for name in odd.names]  # type: ignore[attr-defined]
    assert [key_and_field[0] for key_and_field in keys if key_and_field] == [
        "a/0001",
        "a/0002",
        "a/b.c/0003",
        "a/0004",
        "a/0005",
        "ünïcödé/ant 6",
        "a/0007",
    ]
    assert odd.targets[4] == -1
    with pytest.raises(DecodeError, match="0007"):
        odd[6]
    fields = stoker.open(shards / "dataset_shard_000000.tar")
    assert [fields[i][0].mode for i in range(3)] == ["RGB"] * 3
    assert len(stoker.open(shards / "no_members.tar")) == 0
    assert len(stoker.open(shards / "truncated.tar", damaged="skip")) == 7
    assert len(stoker.open(shards / "bad_header.tar", damaged="skip")) >= 12
    for name in ("tendata.tar", "compressed.tar"):
        with pytest.raises(SourceError, match="no image in any sample"):
            stoker.open(shards / name)
    folders = stoker.open(shards / "class_folders_101_ObjectCategories.tar.gz")
    assert folders.classes == [  # type: ignore[attr-defined]
        "BACKGROUND_Google",
        "Faces",
        "helicopter",
        "yin_yang",
    ]


# stoker.open


def test_open_tells_formats_by_their_content(folder: Path, tmp_path: Path, shards: str) -> None:
    assert type(stoker.open(folder)) is stoker.ImageFolder
    label_file = tmp_path / "labels.tar"
    label_file.write_text("".join(f"{p.relative_to(folder)} 1\n" for p in folder.glob("*/*")))
    labelled = stoker.open(label_file, root=folder)
    assert type(labelled) is stoker.ImageDataset and len(labelled) == 40
    (folder / "labels.csv").write_text(label_file.read_text())
    assert len(stoker.open(str(folder / "labels.csv"))) == 40
    (folder / "labels.csv").unlink()
    os.rename(shards.replace("{000..003}", "000"), tmp_path / "labels.txt")
    assert type(stoker.open(tmp_path / "labels.txt")) is Tar


def test_indexes_beside_their_shards(
    tmp_path: Path, shards: str, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stoker.open(shards, cache=False)
    made = stoker.open(shards, cache="beside")
    hidden = sorted(path.name for path in tmp_path.glob(".*.stoker"))
    assert [name.rsplit(".", 2)[0] for name in hidden] == [f".train-{i:03}.tar" for i in range(4)]
    assert not kept.exists()
    monkeypatch.setattr(tar, "_members", None)  # nothing is read anew
    for how in ("beside", True):  # another machine, that has nothing in its cache
        found = stoker.open(f"{tmp_path}/train-*", cache=how)
        for dataset in (made, found):
            extents, others = dataset.files.extents, expected.files.extents
            assert extents is not None and others is not None and extents.same_as(others)
            assert dataset.targets == expected.targets
    monkeypatch.undo()
    with pytest.raises(ValueError, match="cache must be"):
        Tar(shards, cache="elsewhere")  # type: ignore[arg-type]


def test_an_index_beside_that_is_not_right(tmp_path: Path, shards: str) -> None:
    expected = stoker.open(shards, cache="beside").targets
    for path in tmp_path.glob(".*.stoker"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert stoker.open(shards, cache="beside").targets == expected
    first, second = (tmp_path / f"train-{i:03}.tar" for i in (0, 1))
    content = second.read_bytes()
    first.write_bytes(content)
    assert len(stoker.open(str(first), cache="beside")) == 10
    assert stoker.open(str(first), cache="beside").targets == stoker.open(str(second)).targets


def test_open_refuses_what_says_nothing_to_a_format(folder: Path, shards: str) -> None:
    with pytest.raises(ValueError, match="label='txt' says nothing to a folder of classes"):
        stoker.open(folder, label="txt")
    with pytest.raises(ValueError, match="a folder is no shard"):
        stoker.open(folder, cache="beside")
    with pytest.raises(ValueError, match=r"root=.* says nothing to tar shards"):
        stoker.open(shards, root=folder)
