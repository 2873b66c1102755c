"""`stoker verify`: verdicts are Pillow's, faults are found in all formats, nothing is written."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import PIL
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import ConcatDataset, Subset
from torchvision import transforms as T
from typer.testing import CliRunner

import stoker
from pictures import class_folder, picture, save
from stoker import cache, header
from stoker.bad_samples import BadSample, write
from stoker.cli import app
from stoker.errors import SourceError
from stoker.pack import pack
from stoker.sources import open_whole
from stoker.verify import FINDINGS, Report, _groups, opened, verify

MANIFEST_PILLOW = "13.0.0"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return class_folder(tmp_path / "classes", 24)


def content_of(root: Path) -> dict[str, tuple[str, int, int]]:
    """The digest of each file below a folder, its time of change and its mode."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.stat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(root))] = (digest, status.st_mtime_ns, status.st_mode)
    return found


def count(report: Report, kind: str) -> int:
    found = report[kind]
    return 0 if found is None else found.count


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verify", *arguments])


def pillow_error(data: bytes) -> str:
    """What Pillow raises for an image; "" if nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Image.open(io.BytesIO(data)).convert("RGB")
        except Exception as error:  # noqa: BLE001  a dozen kinds
            return str(error).partition(" <_io.")[0] or type(error).__name__
    return ""


def listed(root: Path, names: list[str], table: Path) -> stoker.ImageDataset:
    """The files, each labelled by its place."""
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "label"])
        writer.writerows((name, place) for place, name in enumerate(names))
    return stoker.ImageDataset(root, table)


# Verdicts


def test_a_clean_set(folder: Path) -> None:
    report = verify(stoker.ImageFolder(folder))
    assert report.good and not report.bad and not report.lost
    assert report.samples == 24
    assert report.bytes == sum(path.stat().st_size for path in folder.rglob("*.*"))
    assert report.formats == {"JPEG": 18, "PNG": 3, "WEBP": 3}
    assert [finding.kind for finding in report.findings] == ["gray"]


@pytest.mark.parametrize("kind", range(7))
def test_truncated_anywhere(tmp_path: Path, kind: int) -> None:
    """As Pillow judges: wherever a file is cut, and whoever decodes it."""
    from pictures import KINDS

    extension, options = KINDS[kind]
    whole = save(tmp_path / f"whole.{extension}", picture(75, 61), **options).read_bytes()
    rng = random.Random(kind)
    cuts = sorted({*range(3), *(rng.randrange(len(whole)) for _ in range(60)), len(whole) - 1})
    for cut in cuts:
        path = tmp_path / "cut" / "x" / f"{cut:06}.{extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole[:cut])
    report = verify(stoker.ImageFolder(tmp_path / "cut"), jobs=2)
    expected = {i: text for i, cut in enumerate(cuts) if (text := pillow_error(whole[:cut]))}
    assert {sample.index: sample.reason for sample in report.bad} == expected
    assert expected


@pytest.mark.parametrize("kind", range(5))
def test_flipped_bits_anywhere(tmp_path: Path, kind: int) -> None:
    from pictures import KINDS

    extension, options = KINDS[kind]
    whole = save(tmp_path / f"whole.{extension}", picture(75, 61), **options).read_bytes()
    rng = random.Random(kind)
    (tmp_path / "flipped" / "x").mkdir(parents=True)
    expected = []
    for number in range(120):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(min(len(data), rng.choice([600, 1 << 20])))] ^= 1 << rng.randrange(8)
        (tmp_path / "flipped" / "x" / f"{number:04}.{extension}").write_bytes(data)
        expected.append(pillow_error(bytes(data)))
    report = verify(stoker.ImageFolder(tmp_path / "flipped"))
    found = {sample.index: sample.reason for sample in report.bad}
    assert found == {place: text for place, text in enumerate(expected) if text}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["broken", "odd"])
def test_files_of_the_manifest(data: Path, part: str, tmp_path: Path) -> None:
    with (data / "MANIFEST.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    rows = [row for row in rows if row["path"].startswith(f"{part}/")]
    # HEIF needs its extra; two sizes of 150 million pixels need more memory than others may spare.
    rows = [
        row for row in rows if "/heif/" not in row["path"] and "bomb range" not in row["special"]
    ]
    names = [row["path"] for row in rows]
    before = content_of(data / part)
    report = verify(listed(data, names, tmp_path / "labels.csv"))
    assert content_of(data / part) == before
    bad = {sample.index: sample.reason for sample in report.bad}
    for index, row in enumerate(rows):
        expected = pillow_error((data / row["path"]).read_bytes())
        assert bool(bad.get(index)) == bool(expected), row["path"]
    if PIL.__version__ != MANIFEST_PILLOW:
        return
    told = {index for index, row in enumerate(rows) if row["pillow_strict_error"]}
    # The manifest has pixels of some broken PNG files that Pillow refuses at first asking.
    assert told <= set(bad) if part == "broken" else told == set(bad)
    good = [(index, row) for index, row in enumerate(rows) if index not in bad]
    tiny = [i for i, row in good if min(int(row["width"]), int(row["height"])) < 32]
    for kind, expected_indices in (
        ("tiny", tiny),
        ("cmyk", [i for i, row in good if row["mode"] == "CMYK"]),
        ("palette", [i for i, row in good if row["mode"] in ("P", "PA")]),
    ):
        found = report[kind]
        assert found is not None and found.samples is not None
        assert found.samples.tolist() == expected_indices, kind
    turned = report["rotated"]
    assert turned is not None and turned.samples is not None
    stored = {i for i, row in good if row["exif_orientation"] not in ("", "1", "0")}
    assert {i for i in stored if int(rows[i]["exif_orientation"]) <= 8} <= set(
        turned.samples.tolist()
    )


def test_names_that_lie(data: Path, tmp_path: Path) -> None:
    names = [f"odd/lying/{name}" for name in sorted(os.listdir(data / "odd" / "lying"))]
    report = verify(listed(data, names, tmp_path / "labels.csv"))
    found = report["misnamed"]
    assert found is not None
    assert sorted(found.examples) == [
        f"odd/lying/{name}"
        for name in (
            "anim.jpeg",
            "avif_named.jpg",
            "bee_0001.png",
            "n02105855_2933.JPEG",
            "web_photo.jpg",
        )
    ]


def test_oddities(tmp_path: Path) -> None:
    root = tmp_path / "classes" / "x"
    image = picture(64, 48)
    exif = Image.Exif()
    exif[0x0112] = 6
    save(root / "a_turned.jpg", image, exif=exif)
    save(root / "b_turned.png", image, exif=exif)
    save(root / "c_cmyk.jpg", image.convert("CMYK"))
    save(root / "d_gray.jpg", image.convert("L"))
    Image.fromarray(np.full((40, 40), 40_000, np.uint16)).save(root / "e_deep.png")
    save(root / "f_palette.png", image.convert("P"))
    save(root / "g_alpha.png", image.convert("RGBA"))
    save(root / "h_animated.webp", image, save_all=True, append_images=[picture(64, 48, 1)])
    save(root / "i_tiny.png", picture(64, 31))
    Image.new("1", (8000, 6251)).save(root / "j_huge.png")
    save(root / "k_png.png", image)
    (root / "k_png.png").rename(root / "k_named.jpg")
    save(root / "l_usual.jpg", image)
    report = verify(stoker.ImageFolder(tmp_path / "classes"))
    assert report.good
    found = {finding.kind: finding.examples for finding in report.findings}
    assert found == {
        "rotated": ["x/a_turned.jpg", "x/b_turned.png"],
        "cmyk": ["x/c_cmyk.jpg"],
        "gray": ["x/d_gray.jpg", "x/e_deep.png", "x/j_huge.png"],
        "deep": ["x/e_deep.png"],
        "palette": ["x/f_palette.png"],
        "alpha": ["x/g_alpha.png"],
        "animated": ["x/h_animated.webp"],
        "tiny": ["x/i_tiny.png"],
        "huge": ["x/j_huge.png"],
        "misnamed": ["x/k_named.jpg"],
    }
    assert set(found) <= set(FINDINGS)


def test_limits_and_files_that_vanish(folder: Path) -> None:
    dataset = stoker.ImageFolder(folder, max_pixels=20_000, max_bytes=100_000)
    path = Path(dataset.samples[3][0])
    path.unlink()
    report = verify(dataset)
    expected = {}
    for index in range(len(dataset)):
        try:
            dataset[index]
        except stoker.DecodeError as error:
            expected[index] = error.reason
    assert {sample.index: sample.reason for sample in report.bad} == expected
    assert 3 in expected and len(expected) > 1


# Formats


def encoded(folder: Path) -> list[bytes]:
    return [Path(path).read_bytes() for path, _ in stoker.ImageFolder(folder).samples]


def in_lmdb(folder: Path, target: Path) -> Path:
    environment = lmdb.open(str(target), map_size=1 << 26)
    with environment.begin(write=True) as transaction:
        for place, (data, (_, label)) in enumerate(
            zip(encoded(folder), stoker.ImageFolder(folder).samples, strict=True)
        ):
            transaction.put(f"{place:06}".encode(), pickle.dumps((data, label)))
    environment.close()
    return target


def in_mds(folder: Path, target: Path) -> Path:
    """One shard of columns image and label, by the format's description."""
    target.mkdir()
    labels = [label for _, label in stoker.ImageFolder(folder).samples]
    bodies = [
        struct.pack("<I", len(data)) + data + struct.pack("<q", label)
        for data, label in zip(encoded(folder), labels, strict=True)
    ]
    places = np.cumsum([4 * (len(bodies) + 2), *map(len, bodies)])
    data = struct.pack(f"<{len(places) + 1}I", len(bodies), *places) + b"".join(bodies)
    (target / "shard.00000.mds").write_bytes(data)
    shard = {
        "column_encodings": ["jpeg", "int"],
        "column_names": ["image", "label"],
        "column_sizes": [None, 8],
        "compression": None,
        "format": "mds",
        "raw_data": {
            "basename": "shard.00000.mds",
            "bytes": len(data),
            "hashes": {"sha1": hashlib.sha1(data).hexdigest()},
        },
        "samples": len(bodies),
        "zip_data": None,
    }
    (target / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return target


def packed(folder: Path, target: Path) -> Path:
    pack(stoker.ImageFolder(folder), target)
    return target


FORMATS: dict[str, Callable[[Path, Path], Path]] = {
    "folder": lambda folder, target: folder,
    "tar": lambda folder, target: packed(folder, target / "x.tar"),
    "tfrecord": lambda folder, target: packed(folder, target / "x.tfrecord"),
    "lmdb": lambda folder, target: in_lmdb(folder, target / "x.lmdb"),
    "mds": lambda folder, target: in_mds(folder, target / "mds"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_planted_faults_in_every_format(folder: Path, tmp_path: Path, kind: str) -> None:
    """Bad images are found and, excluded, leave an epoch without errors; nothing is written."""
    names = [path for path, _ in stoker.ImageFolder(folder).samples]
    for place in (2, 11):
        path = Path(names[place])
        path.write_bytes(path.read_bytes()[:-400] if place == 2 else bytes(range(256)) * 4)
    copy = Path(names[5])
    copy.with_name("copy" + copy.suffix).write_bytes(copy.read_bytes())
    (tmp_path / "shards").mkdir()
    source = FORMATS[kind](folder, tmp_path / "shards")
    before = content_of(folder), content_of(tmp_path / "shards")
    out = tmp_path / "bad.jsonl"
    if kind == "lmdb":  # what does not look like an image is none there
        data = encoded(folder)
        assert sum(pillow_error(one) != "" for one in data) == 2
    done = run(str(source), "--out", str(out), "--json")
    assert done.exit_code == 1, done.output
    assert (content_of(folder), content_of(tmp_path / "shards")) == before
    told = json.loads(done.stdout)
    dataset = stoker.open(source, T.Compose([T.Resize((24, 24)), T.ToTensor()]))
    bad = []
    for index in range(len(dataset)):
        try:
            dataset[index]
        except stoker.DecodeError as error:
            bad.append((index, error.location, error.reason))
    assert len(bad) == 2
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["index"], line["location"], line["reason"]) for line in lines] == bad
    assert told["bad"] == lines
    assert all(line["location"].endswith(line["name"]) for line in lines)
    assert all(("shard" in line) == (kind != "folder") for line in lines)
    assert told["findings"]["duplicates"]["count"] == 1
    for workers in (0, 2):
        loader = stoker.DataLoader(dataset, 4, True, num_workers=workers, seed=1, exclude=out)
        labels = torch.cat([labels for _, labels in loader])
        assert len(labels) == len(dataset) - 2
        assert len(loader) == -(-(len(dataset) - 2) // 4)
        assert not loader.bad_samples
    clean = run(str(source), "--json")
    assert clean.exit_code == 1


def test_damaged_shards_are_told(folder: Path, tmp_path: Path) -> None:
    shard = packed(folder, tmp_path / "x.tfrecord")
    os.utime(shard, (1e9, 1e9))  # long ago, so that its index is kept
    whole = stoker.open(shard)
    assert verify(shard).good
    extents = whole.files.extents
    assert extents is not None
    data = bytearray(shard.read_bytes())
    at = int(extents.begin[7]) + int(extents.length[7]) - 5
    data[at] ^= 1
    status = shard.stat()
    shard.write_bytes(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    # The time is as it was, and the index is kept: only who looks again sees it.
    assert len(stoker.open(shard)) == 24
    report = verify(shard)
    assert not report.good and report.samples == 23 and not report.bad
    assert len(report.lost) == 1
    assert "record 7 has a wrong CRC" in report.lost[0]
    done = run(str(shard))
    assert done.exit_code == 1
    assert "record 7 has a wrong CRC" in done.stdout


def test_damaged_mds_is_an_error(folder: Path, tmp_path: Path) -> None:
    shard = in_mds(folder, tmp_path / "mds") / "shard.00000.mds"
    assert verify(tmp_path / "mds").good
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    with pytest.raises(SourceError, match=r"shard.00000.mds: its sha1"):
        verify(tmp_path / "mds")


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("webdataset/truncated.tar", 2),
        ("webdataset/bad_header.tar", 1),
        ("tfrecord/truncated.tfrecord", 1),
        ("tfrecord/bad_data_crc.tfrecord", 1),
        ("tfrecord/bad_length.tfrecord", 1),
        ("webdataset/wds_photos/train-{000000..000002}.tar", 0),
        ("tfrecord/imagenet_style/train-*", 0),
        ("tfrecord/gzip.tfrecord.gz", 0),
        ("lmdb/str_style.lmdb", 0),
        ("mds/plain", 0),
        ("parquet/hf_imagefolder", 0),
        ("parquet/plain_binary.parquet", 0),
        ("arrow/hf_save_to_disk", 0),
    ],
)
@pytest.mark.filterwarnings("ignore::stoker.errors.StokerWarning")
def test_containers_of_other_tools(data: Path, name: str, lost: int) -> None:
    report = verify(data / "formats" / name)
    assert len(report.lost) == lost
    assert report.good == (lost == 0)
    assert report.samples == sum(report.formats.values()) > 0


def test_lines_without_their_files_are_lost(folder: Path, tmp_path: Path) -> None:
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.png"))]
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"{name} 1\n" for name in [*names, "class_0/none.png"]))
    done = run(str(folder), "--labels", str(labels), "--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert told["samples"] == len(names)
    assert "class_0/none.png" in told["lost"][0]


def test_boxes(data: Path, tmp_path: Path) -> None:
    table, images = data / "formats" / "csv" / "raccoon_labels.csv", tmp_path / "images"
    shutil.copytree(data / "datasets" / "raccoon_voc" / "images", images)
    (images / "raccoon-7.jpg").unlink()
    (images / "raccoon-9.jpg").write_bytes((images / "raccoon-9.jpg").read_bytes()[:-3000])
    done = run(str(images), "--labels", str(table), "--json")
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)
    assert "raccoon-7.jpg" in told["lost"][0] and len(told["lost"]) == 1
    assert [line["name"] for line in told["bad"]] == ["raccoon-9.jpg"]
    assert told["samples"] == 199
    assert "unlabelled" not in told["findings"]


def test_subsets_and_joined_sets(folder: Path) -> None:
    whole = torchvision.datasets.ImageFolder(str(folder))
    Path(whole.samples[4][0]).write_bytes(b"")
    subset = Subset(whole, [9, 4, 4, 1])
    report = verify(ConcatDataset([subset, whole]))
    assert [sample.index for sample in report.bad] == [1, 2, 8]
    assert count(report, "duplicates") == 2
    assert verify(Subset(stoker.ImageFolder(folder), [0, 1])).samples == 2


def test_unknown_datasets_are_refused() -> None:
    with pytest.raises(SourceError, match="its files are not known"):
        verify(torch.utils.data.TensorDataset(torch.zeros(3)))
    with pytest.raises(ValueError, match="expected some of unlabelled"):
        verify(torch.utils.data.TensorDataset(torch.zeros(3)), also=["everything"])
    with pytest.raises(ValueError, match="jobs=0"):
        verify(torch.utils.data.TensorDataset(torch.zeros(3)), jobs=0)


def test_jobs_and_progress_change_nothing(folder: Path) -> None:
    Path(stoker.ImageFolder(folder).samples[4][0]).write_bytes(b"no image")
    told: list[tuple[int, int]] = []
    reports = [
        verify(
            ConcatDataset([stoker.ImageFolder(folder)] * 9),
            jobs=jobs,
            progress=lambda samples, size: told.append((samples, size)),
        )
        for jobs in (1, 5)
    ]
    assert reports[0].bad == reports[1].bad
    assert [sample.index for sample in reports[0].bad] == [4 + 24 * part for part in range(9)]
    assert [f.examples for f in reports[0].findings] == [f.examples for f in reports[1].findings]
    assert told == sorted(told[: len(told) // 2]) * 2
    assert told[-1] == (9 * 24, reports[0].bytes)


# Labels, copies, leaks


def test_labels(tmp_path: Path) -> None:
    class_folder(tmp_path / "files", 12)
    (tmp_path / "files" / "empty").mkdir()
    save(tmp_path / "files" / "lonely" / "one.jpg", picture(50, 50, 77))
    report = verify(tmp_path / "files")
    found = {finding.kind: finding.examples for finding in report.findings}
    assert found["empty_classes"] == ["empty"]
    assert found["single_classes"] == ["lonely"]
    assert report.good
    dataset = stoker.ImageFolder(tmp_path / "files", allow_empty=True)
    assert dataset.files.labels is not None
    dataset.files.labels[:4] = -1, -1, 9, -3
    report = verify(dataset)
    assert count(report, "unlabelled") == 2
    assert count(report, "outside") == 2
    report = verify(dataset, also=["unlabelled", "outside"])
    assert [sample.index for sample in report.bad] == [0, 1, 2, 3]
    assert "without a label" in report.bad[0].reason
    dataset.files.labels[:] = -1  # labels are not told at all
    assert not {"unlabelled", "empty_classes"} & {one.kind for one in verify(dataset).findings}


def test_copies_conflicts_and_leaks(tmp_path: Path) -> None:
    for name, classes in (("train", ["ant", "bee", "cat"]), ("val", ["ant", "cat", "dog"])):
        for number, kind in enumerate(classes):
            for place in range(3):
                seed = hash((name == "val", number, place)) % 1000
                save(tmp_path / name / kind / f"{place}.png", picture(40, 40, seed))

    def copied(source: str, target: str) -> None:
        shutil.copy(tmp_path / source, tmp_path / target)

    copied("train/ant/0.png", "train/ant/9.png")
    copied("train/ant/0.png", "train/bee/8.png")
    copied("train/bee/1.png", "val/cat/1.png")
    copied("train/cat/2.png", "val/cat/2.png")
    report = verify(tmp_path / "train", against=tmp_path / "val")
    assert report.good
    found = {finding.kind: finding for finding in report.findings}
    assert {kind: finding.examples for kind, finding in found.items()} == {
        "duplicates": ["ant/9.png = ant/0.png", "bee/8.png = ant/0.png"],
        "conflicts": ["bee/8.png (bee) = ant/0.png (ant)"],
        "leaks": ["bee/1.png = cat/1.png", "cat/2.png = cat/2.png"],
        "leak_conflicts": ["bee/1.png (bee) = cat/1.png (cat)"],
        "moved_classes": ["cat: 2 here, 1 there"],
        "classes_missing_there": ["bee"],
        "classes_missing_here": ["dog"],
    }
    also = verify(tmp_path / "train", against=tmp_path / "val", also=["duplicates", "leaks"])
    names = [sample.name for sample in also.bad]
    assert names == ["ant/9.png", "bee/1.png", "bee/8.png", "cat/2.png"]
    done = run(str(tmp_path / "train"), "--against", str(tmp_path / "val"))
    assert done.exit_code == 0
    assert "cat: 2 here, 1 there" in done.stdout
    done = run(str(tmp_path / "train"), "--against", str(tmp_path / "val"), "--also", "leaks")
    assert done.exit_code == 1


def test_sets_without_names_are_compared_by_number(folder: Path, tmp_path: Path) -> None:
    shard = packed(folder, tmp_path / "x.tar")
    (tmp_path / "other").mkdir()
    for name in ("class_0", "class_1"):
        shutil.copytree(folder / name, tmp_path / "other" / name)
    report = verify(shard, against=tmp_path / "other")
    assert count(report, "leaks") == 16
    found = report["classes_missing_there"]
    assert found is not None and found.examples == ["2"]
    assert report["leak_conflicts"] is None


def test_groups_against_a_dictionary() -> None:
    rng = np.random.default_rng(4)
    for samples in (0, 1, 2, 50, 700):
        digests = rng.integers(0, 6, (samples, 2)).astype(np.uint64)
        order, group = _groups(digests)
        expected: dict[tuple[int, int], list[int]] = {}
        for place, pair in enumerate(map(tuple, digests.tolist())):
            expected.setdefault(pair, []).append(place)
        found: dict[int, list[int]] = {}
        for place, number in zip(order.tolist(), group.tolist(), strict=True):
            found.setdefault(number, []).append(place)
        assert sorted(found.values()) == sorted(expected.values())


# The list, the command line


def test_a_list_never_replaces_another_file(folder: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("a.jpg 1\n")
    done = CliRunner().invoke(app, ["verify", str(folder), "--out", str(labels)])
    assert done.exit_code == 1
    assert isinstance(done.exception, SourceError)
    assert "no list of bad samples" in str(done.exception)
    assert labels.read_text() == "a.jpg 1\n"
    with pytest.raises(SourceError, match="is no file"):
        write(tmp_path, [])
    with pytest.raises(SourceError, match="No such file"):
        write(tmp_path / "none" / "x", [])
    out = tmp_path / "bad.jsonl"
    write(out, [BadSample(3, "a:b", "why", name="b", shard="a")])
    line = {"index": 3, "location": "a:b", "reason": "why", "name": "b", "shard": "a"}
    assert json.loads(out.read_text()) == line
    write(out, [])
    assert out.read_text() == ""
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".part"]


def test_data_that_may_not_be_written_to(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = content_of(folder)
    assert run(str(folder)).exit_code == 0
    assert content_of(folder) == before
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_arguments_of_the_command_line(folder: Path, tmp_path: Path) -> None:
    for arguments in (
        ["--also", "nonsense"],
        ["--against-labels", "x.csv"],
        ["--image", "jpg"],
        ["--labels", "x.csv", "--label", "cls"],
    ):
        assert run(str(folder), *arguments).exit_code == 2, arguments
    done = run(str(tmp_path / "nowhere"))
    assert done.exit_code == 1
    assert "no such folder" in str(done.exception)


def test_as_a_program(folder: Path) -> None:
    (folder / "class_0" / "0000.jpg").write_bytes(b"\xff\xd8\xff no photo")
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "verify", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "bad: " in done.stdout and "class_0/0000.jpg: " in done.stdout
    assert "24 samples" in done.stdout and "1 bad" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("default")
def test_opening_tells_what_is_lost_apart(folder: Path, tmp_path: Path) -> None:
    shard = packed(folder, tmp_path / "x.tar")
    shard.write_bytes(shard.read_bytes()[:-30_000])
    dataset, lost = opened(lambda: open_whole(shard, anew=True))
    assert len(dataset) < 24 and "is truncated" in lost[0]

    def noisy() -> int:
        warnings.warn("something else", UserWarning, stacklevel=1)
        return 3

    with pytest.warns(UserWarning, match="something else"):
        assert opened(noisy) == (3, [])


def test_headers(tmp_path: Path) -> None:
    for quality in (10, 50, 75, 92, 100):
        for place, subsampling in enumerate(("4:4:4", "4:2:2", "4:2:0")):
            path = save(tmp_path / "a.jpg", picture(33, 20), quality=quality, subsampling=place)
            with path.open("rb") as file:
                head = header.read(file)
            assert (head.quality, head.subsampling) == (quality, subsampling)
            assert (head.width, head.height, head.mode, head.format) == (33, 20, "RGB", "JPEG")
