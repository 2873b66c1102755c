"""Packing: the same images and labels, whatever happens meanwhile."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import stoker
from pictures import class_folder
from stoker import cache
from stoker import pack as packing
from stoker.cli import app
from stoker.errors import SourceError
from stoker.order import Order
from stoker.pack import pack
from stoker.sources import shards as sources_shards
from stoker.sources.index import Images

SIZE = 200_000
FORMATS = ["tar", "tfrecord"]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes"), 60)


@pytest.fixture
def source(folder: Path) -> Images:
    return stoker.ImageFolder(folder, cache=False)


def image(dataset: Images, index: int) -> bytes:
    with dataset.files.opened(index) as file:
        return file.read()


def content(dataset: Images) -> list[tuple[bytes, int]]:
    return [(image(dataset, i), label) for i, label in enumerate(dataset.targets)]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shuffle", [None, 7])
def test_what_comes_out_is_what_went_in(
    tmp_path: Path, source: Images, kind: str, shuffle: int | None
) -> None:
    told: list[tuple[int, int]] = []
    packed = pack(
        source,
        tmp_path / f"out/a-%03d.{kind}",
        shard_bytes=SIZE,
        shuffle=shuffle,
        progress=lambda samples, done: told.append((samples, done)),
    )
    expected = content(source)
    if shuffle is not None:
        order = Order(60, shuffle, True).indices(0, 0, 60).tolist()
        expected = [expected[i] for i in order]
    again = stoker.open(f"{tmp_path}/out/a-*.{kind}")
    assert content(again) == expected
    assert sorted(os.listdir(tmp_path / "out")) == [os.path.basename(p) for p in packed.shards]
    assert len(packed.shards) > 4 and packed.samples == 60 and packed.found == 0
    assert packed.image_bytes == sum(len(image) for image, _ in expected)
    assert max(told) == (60, packed.image_bytes) and len(told) == 60
    extents = again.files.extents
    assert extents is not None
    sums = np.bincount(extents.shard, extents.length)
    assert (sums <= SIZE).all(), "a shard is larger than it may be"


def test_tars_are_tars_to_others(tmp_path: Path, source: Images) -> None:
    pack(source, tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as file:
        members = {m.name: file.extractfile(m).read() for m in file}  # type: ignore[union-attr]
        assert {(m.mtime, m.uid, m.uname) for m in file} == {(0, 0, "")}
    for i, (image, label) in enumerate(content(source)):
        name = source.files.name(i)
        assert members[f"{i:09}{Path(name).suffix}"] == image
        assert members[f"{i:09}.cls"] == b"%d" % label
        assert json.loads(members[f"{i:09}.json"]) == {"name": name, "class": name.split("/")[0]}
    assert len(members) == 180


def test_tfrecords_are_tfrecords_to_others(tmp_path: Path, source: Images) -> None:
    reader = pytest.importorskip("tfrecord.reader")
    pack(source, tmp_path / "a.tfrecord")
    read = list(reader.tfrecord_loader(str(tmp_path / "a.tfrecord"), None))
    assert len(read) == 60
    for i, (image, label) in enumerate(content(source)):
        assert bytes(read[i]["image/encoded"]) == image
        assert read[i]["image/class/label"] == [label]
        assert bytes(read[i]["image/filename"]).decode() == source.files.name(i)
        assert bytes(read[i]["image/class/text"]).decode() == source.files.name(i).split("/")[0]


def test_from_format_to_format(tmp_path: Path, source: Images) -> None:
    pack(source, tmp_path / "a-%d.tfrecord", shard_bytes=SIZE)
    pack(stoker.open(tmp_path / "a-*.tfrecord"), tmp_path / "b-%d.tar", shard_bytes=2 * SIZE)
    assert content(stoker.open(tmp_path / "b-*.tar")) == content(source)


def test_samples_without_label_or_known_suffix(tmp_path: Path, source: Images) -> None:
    labels = np.full(60, -1)
    labels[3] = 5
    bare = Images(replace(source.files, labels=labels))
    pack(bare, tmp_path / "a.tar")
    with pytest.warns(stoker.StokerWarning, match="without a label"):
        assert stoker.open(tmp_path / "a.tar").targets == labels.tolist()
    sample = sources_shards.Sample(0, "key 7", b"\x89PNG....", 1, "")
    assert sample.suffix == ".png"
    for head, suffix in ((b"\xff\xd8", ".jpg"), (b"RIFF....WEBP", ".webp"), (b"BM", ".bmp")):
        assert replace(sample, content=head).suffix == suffix
    assert replace(sample, name="a.JPEG").suffix == ".jpeg"


def test_the_result_depends_on_the_arguments_alone(tmp_path: Path, source: Images) -> None:
    for jobs in (1, 3):
        pack(source, tmp_path / f"{jobs}/a-%d.tar", shard_bytes=SIZE, shuffle=1, jobs=jobs)
    assert digests(tmp_path / "1") == digests(tmp_path / "3")


def test_one_image_larger_than_a_shard(tmp_path: Path, source: Images) -> None:
    packed = pack(source, tmp_path / "a-%d.tar", shard_bytes=1)
    assert len(packed.shards) == 60


# Interrupted


@pytest.mark.parametrize("kind", FORMATS)
def test_packing_again_writes_only_what_is_missing(
    tmp_path: Path, source: Images, kind: str
) -> None:
    target = tmp_path / f"out/a-%d.{kind}"
    first = pack(source, target, shard_bytes=SIZE)
    whole = digests(tmp_path / "out")
    times = {path: os.stat(path).st_mtime_ns for path in first.shards}
    for gone in first.shards[1::2]:
        os.unlink(gone)
    Path(tmp_path / f"out/.a-1.{kind}.part").write_text("left over")
    second = pack(source, target, shard_bytes=SIZE)
    assert digests(tmp_path / "out") == whole
    assert second.found == len(first.shards[::2])
    assert all(os.stat(path).st_mtime_ns == times[path] for path in first.shards[::2])


KILLED = """
import sys, stoker
from stoker.pack import pack
source = stoker.ImageFolder(sys.argv[1], cache=False)
print("begins", flush=True)
pack(source, sys.argv[2], shard_bytes=200000, jobs=2)
"""


def _killed_packing(tmp_path: Path, folder: Path, moments: int) -> None:
    pack(stoker.ImageFolder(folder, cache=False), tmp_path / "whole/a-%d.tar", shard_bytes=SIZE)
    whole = digests(tmp_path / "whole")
    rng = random.Random(moments)
    for _ in range(moments):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "out/a-%d.tar")],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if (tmp_path / "out").exists():
            named = {n: d for n, d in digests(tmp_path / "out").items() if not n.startswith(".")}
            assert named.items() <= whole.items(), "something half-written has a final name"
        if rng.random() < 0.3:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    pack(stoker.ImageFolder(folder, cache=False), tmp_path / "out/a-%d.tar", shard_bytes=SIZE)
    assert digests(tmp_path / "out") == whole


def test_killed_twice(tmp_path: Path, folder: Path) -> None:
    _killed_packing(tmp_path, folder, 2)


FULL = """
import resource, sys, stoker
from stoker.pack import pack
resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, 90_000))
try:
    pack(stoker.ImageFolder(sys.argv[1], cache=False), sys.argv[2], shard_bytes=100_000, jobs=2)
except OSError as error:
    print(error.errno)
"""


def test_a_disk_that_gets_full(tmp_path: Path, folder: Path) -> None:
    target = str(tmp_path / "out/a-%d.tar")
    run = [sys.executable, "-c", FULL, str(folder), target]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(errno.EFBIG), done.stderr
    assert not [name for name in os.listdir(tmp_path / "out") if name.endswith(".part")]
    source = stoker.ImageFolder(folder, cache=False)
    pack(source, tmp_path / "whole/a-%d.tar", shard_bytes=100_000)
    assert digests(tmp_path / "out").items() <= digests(tmp_path / "whole").items()
    pack(source, target, shard_bytes=100_000)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_disk_that_is_too_small(
    tmp_path: Path, source: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SourceError, match=r"needs .* bytes, and 1,000 are free"):
        pack(source, tmp_path / "out/a-%d.tar", shard_bytes=SIZE)
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("kind", FORMATS)
def test_what_was_written_otherwise_gets_no_name(
    tmp_path: Path, source: Images, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = packing.FORMATS[f".{kind}"]

    def spoiled(file: Any, samples: Any) -> None:
        sound.write(file, samples)
        file.seek(file.tell() // 2)
        file.write(b"spoiled here and there")

    monkeypatch.setitem(packing.FORMATS, f".{kind}", replace(sound, write=spoiled))
    with pytest.raises(SourceError, match="read back otherwise than written"):
        pack(source, tmp_path / f"out/a-%d.{kind}", shard_bytes=SIZE)
    assert os.listdir(tmp_path / "out") == []


# In the way


def test_what_is_in_the_way_stays_as_it_is(tmp_path: Path, source: Images) -> None:
    packed = pack(source, tmp_path / "a-%d.tar", shard_bytes=SIZE)
    shard = Path(packed.shards[2])
    spoiled = bytearray(shard.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    for data in (bytes(spoiled), b"something else", b""):
        shard.write_bytes(data)
        with pytest.raises(SourceError, match=r"a-2\.tar: is in the way"):
            pack(source, tmp_path / "a-%d.tar", shard_bytes=SIZE)
        assert shard.read_bytes() == data
    shard.unlink()
    (tmp_path / "a-99.tar").touch()
    with pytest.raises(SourceError, match=r"a-99\.tar: would be read with the"):
        pack(source, tmp_path / "a-%d.tar", shard_bytes=SIZE)


def test_other_labels_are_another_set(tmp_path: Path, source: Images) -> None:
    pack(source, tmp_path / "a.tar")
    assert source.files.labels is not None
    other = Images(replace(source.files, labels=source.files.labels + 1))
    with pytest.raises(SourceError, match="another name or label"):
        pack(other, tmp_path / "a.tar")


def test_a_source_that_lacks_a_file(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "classes", 12)
    source = stoker.ImageFolder(folder, cache=False)
    gone = Path(source.files.path(7))
    gone.unlink()
    with pytest.raises(SourceError, match=gone.name):
        pack(source, tmp_path / "out/a.tar")
    gone.mkdir()
    with pytest.raises(SourceError, match=gone.name):
        pack(source, tmp_path / "out/a.tar")
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("target", "options", "told"),
    [
        ("a-%d.zip", {}, r"must end in \.tar or \.tfrecord"),
        ("a-%s.tar", {}, "must hold one %06d"),
        ("%d/a.tar", {}, "must hold one %06d"),
        ("a-%d-%d.tar", {"shard_bytes": 0}, "must be positive"),
        ("a-%d.tar", {"jobs": 0}, "must be positive"),
    ],
)
def test_arguments(
    tmp_path: Path, source: Images, target: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        pack(source, tmp_path / target, **options)


# The command


def test_command(tmp_path: Path, folder: Path, source: Images) -> None:
    run = ["pack", str(folder), f"{tmp_path}/a-%06d.tar", "--shard-size", "200K", "--jobs", "2"]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.output
    assert "60 images" in done.output and "compared with their source" in done.output
    assert content(stoker.open(f"{tmp_path}/a-*.tar")) == content(source)
    assert "found there" in CliRunner().invoke(app, run).output
    wrong = CliRunner().invoke(app, [*run[:3], "--shard-size", "many"])
    assert wrong.exit_code == 2 and "no size" in wrong.output
