"""Packing: the same images and labels, whatever happens meanwhile."""

from __future__ import annotations

import csv
import errno
import gc
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torchvision.transforms as v1
import webdataset
from PIL import ExifTags, Image
from typer.testing import CliRunner

import stoker
from pictures import class_folder
from stoker import cache
from stoker import pack as packing
from stoker.cli import app
from stoker.errors import SourceError
from stoker.order import Order
from stoker.pack import pack
from stoker.shrink import Shrink
from stoker.sources import lmdb as sources_lmdb
from stoker.sources import shards as sources_shards
from stoker.sources.index import Files, Images

command = sys.modules["stoker.cli.pack"]  # the package has a function of that name
SIZE = 200_000
SHARDED = ["tar", "tfrecord", "parquet"]
FORMATS = [*SHARDED, "lmdb", "csv"]


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


def digests_below(folder: Path) -> dict[str, str]:
    """Of the files; of an LMDB environment, whose pages hold left-overs, of keys and values."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.name == "data.mdb" and not path.parent.name.startswith("."):
            with lmdb.open(str(path.parent), readonly=True, lock=False) as environment:
                digest = repr([(k, hash(v)) for k, v in environment.begin().cursor()])
        found[str(path.relative_to(folder))] = digest
    return found


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def named(folder: Path, kind: str) -> str:
    """A target in ``folder``: of several shards, if there may be several."""
    return str(folder / (f"a-%03d.{kind}" if kind in SHARDED else f"a.{kind}"))


def reopened(target: str) -> Images:
    return stoker.open(re.sub("%03d", "*", target))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shuffle", [None, 7])
def test_what_comes_out_is_what_went_in(
    tmp_path: Path, source: Images, kind: str, shuffle: int | None
) -> None:
    told: list[tuple[int, int]] = []
    target = named(tmp_path / "out", kind)
    packed = pack(
        source,
        target,
        shard_bytes=SIZE,
        shuffle=shuffle,
        progress=lambda samples, done: told.append((samples, done)),
    )
    expected = content(source)
    if shuffle is not None:
        order = Order(60, shuffle, True).indices(0, 0, 60).tolist()
        expected = [expected[i] for i in order]
    again = reopened(target)
    assert content(again) == expected
    assert packed.samples == 60 and packed.found == 0
    assert packed.image_bytes == sum(len(image) for image, _ in expected)
    assert max(told) == (60, packed.image_bytes) and len(told) == 60
    beside = {"00000"} if kind == "csv" else set()  # the images' folder
    assert set(os.listdir(tmp_path / "out")) - beside == set(map(os.path.basename, packed.shards))
    if kind in SHARDED:
        assert len(packed.shards) > 4
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tars_are_webdatasets_to_webdataset(tmp_path: Path, source: Images) -> None:
    pack(source, tmp_path / "a-%d.tar", shard_bytes=SIZE)
    paths = sorted(map(str, tmp_path.glob("a-*.tar")), key=lambda path: (len(path), path))
    read = list(webdataset.WebDataset(paths, shardshuffle=False, empty_check=False))
    gc.collect()  # it leaves its files open
    assert len(read) == 60
    for i, (image, label) in enumerate(content(source)):
        suffix = Path(source.files.name(i)).suffix[1:]
        assert read[i]["__key__"] == f"{i:09}" and read[i]["cls"] == b"%d" % label
        assert read[i][suffix] == image
        assert json.loads(read[i]["json"])["name"] == source.files.name(i)
    with webdataset.ShardWriter(f"{tmp_path}/b-%d.tar", maxcount=25, verbose=0) as out:
        for sample in read:
            out.write({key: value for key, value in sample.items() if key[:5] != "__url"})
    assert content(stoker.open(f"{tmp_path}/b-*.tar")) == content(source)


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


def test_environments_are_environments_to_others(tmp_path: Path, source: Images) -> None:
    pack(source, tmp_path / "a.lmdb")
    with lmdb.open(str(tmp_path / "a.lmdb"), readonly=True, lock=False) as environment:
        values = dict(environment.begin().cursor())
    assert values.pop(b"num-samples") == b"60"
    for i, (image, label) in enumerate(content(source), 1):
        assert values.pop(b"image-%09d" % i) == image
        assert values.pop(b"label-%09d" % i) == b"%d" % label
    assert not values


def test_folders_are_folders_to_others(tmp_path: Path, source: Images) -> None:
    assert pack(source, tmp_path / "out").shards == [str(tmp_path / "out/labels.csv")]
    pack(source, f"{tmp_path}/v1.2/")
    assert digests_below(tmp_path / "v1.2") == digests_below(tmp_path / "out")
    with (tmp_path / "out/labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60
    for i, (image, label) in enumerate(content(source)):
        assert (tmp_path / "out" / rows[i]["filename"]).read_bytes() == image
        assert rows[i]["label"] == str(label)
        assert rows[i]["source"] == source.files.name(i)
        assert rows[i]["class"] == source.files.name(i).split("/")[0]


def test_names_are_only_names(tmp_path: Path) -> None:
    """What leads elsewhere, or can't be printed, in an archive is neither followed nor lost."""
    picture = next(class_folder(tmp_path / "classes", 4).rglob("*.jpg")).read_bytes()
    hostile = ["../../up.jpg", "/tmp/absolute.jpg", "line\nbreak.jpg", "caf\udce9.jpg"]
    with tarfile.open(tmp_path / "a.tar", "w", errors="surrogateescape") as file:
        for name in hostile:
            info = tarfile.TarInfo(name)
            info.size = len(picture)
            file.addfile(info, io.BytesIO(picture))
    source = stoker.open(tmp_path / "a.tar", label=None)
    before = digests_below(tmp_path)
    for kind in FORMATS:
        target = named(tmp_path / "out", kind)
        pack(source, target)
        assert content(reopened(target)) == content(source)
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert digests_below(tmp_path) == before


def test_from_format_to_format(tmp_path: Path, source: Images) -> None:
    last = source
    for step, kind in enumerate([*FORMATS, *FORMATS[::-1]]):
        target = named(tmp_path / f"{step}", kind)
        pack(last, target, shard_bytes=(step + 1) * SIZE // 2)
        last = reopened(target)
        assert content(last) == content(source)


def test_batches_do_not_depend_on_the_format(tmp_path: Path, source: Images) -> None:
    recipe = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])

    def batches(dataset: Images) -> list[tuple[str, list[int]]]:
        dataset.transform = recipe
        loader = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=2, seed=5)
        assert loader.explain().tier == "lowered"
        made = [
            (hashlib.sha256(images.numpy().tobytes()).hexdigest(), labels.tolist())
            for _ in range(2)
            for images, labels in loader
        ]
        loader.close()
        return made

    expected = batches(source)
    assert len({digest for digest, _ in expected}) == len(expected) == 16
    for kind in FORMATS:
        pack(source, named(tmp_path, kind), shard_bytes=SIZE)
        assert batches(reopened(named(tmp_path, kind))) == expected, kind


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


@pytest.mark.parametrize("kind", SHARDED)
def test_parts_make_the_whole(tmp_path: Path, source: Images, folder: Path, kind: str) -> None:
    """Machines that each write a part write, in any order, what one machine writes."""
    whole = pack(source, named(tmp_path / "whole", kind), shard_bytes=SIZE, shuffle=3)
    assert len(whole.shards) > 3
    target = named(tmp_path / "parts", kind)
    done = [
        pack(source, target, shard_bytes=SIZE, shuffle=3, part=(number, 3)) for number in (2, 0)
    ]
    assert [len(part.shards) for part in done] == [
        len(whole.shards[number::3]) for number in (2, 0)
    ]
    arguments = ["--shard-size", str(SIZE), "--shuffle", "3", "--no-measure", "--part", "1/3"]
    told = CliRunner().invoke(app, ["pack", str(folder), target, *arguments])
    assert told.exit_code == 0, told.output
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")
    again = pack(source, target, shard_bytes=SIZE, shuffle=3, part=(1, 3))
    assert again.found == len(again.shards)
    assert sum(part.samples for part in (*done, again)) == whole.samples
    for bad in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ValueError, match="part="):
            pack(source, target, part=bad)
    with pytest.raises(ValueError, match="%06d"):
        pack(source, str(tmp_path / "one.tar"), part=(0, 2))
    assert CliRunner().invoke(app, ["pack", str(folder), target, "--part", "3/3"]).exit_code == 2


def test_the_result_depends_on_the_arguments_alone(tmp_path: Path, source: Images) -> None:
    for jobs in (1, 3):
        pack(source, tmp_path / f"{jobs}/a-%d.tar", shard_bytes=SIZE, shuffle=1, jobs=jobs)
    assert digests(tmp_path / "1") == digests(tmp_path / "3")


def test_one_image_larger_than_a_shard(tmp_path: Path, source: Images) -> None:
    packed = pack(source, tmp_path / "a-%d.tar", shard_bytes=1)
    assert len(packed.shards) == 60


# Interrupted


@pytest.mark.parametrize("kind", SHARDED)
def test_packing_again_writes_only_what_is_missing(
    tmp_path: Path, source: Images, kind: str
) -> None:
    target = named(tmp_path / "out", kind)
    first = pack(source, target, shard_bytes=SIZE)
    whole = digests(tmp_path / "out")
    times = {path: os.stat(path).st_mtime_ns for path in first.shards}
    for gone in first.shards[1::2]:
        os.unlink(gone)
    Path(tmp_path / f"out/.a-001.{kind}.part").write_text("left over")
    second = pack(source, target, shard_bytes=SIZE)
    assert digests(tmp_path / "out") == whole
    assert second.found == len(first.shards[::2])
    assert all(os.stat(path).st_mtime_ns == times[path] for path in first.shards[::2])


@pytest.mark.parametrize("kind", ["lmdb", "csv"])
def test_a_set_of_one_shard_goes_on_where_it_was(
    tmp_path: Path, source: Images, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_lmdb, "_COMMITTED_BYTES", SIZE)
    monkeypatch.setattr(sources_lmdb, "_FIRST_MAP_BYTES", 1 << 20)  # must grow
    pack(source, named(tmp_path / "whole", kind))
    sound, reads, gone = Files.opened, list[int](), [True]

    def opened(self: Files, row: int) -> Any:
        reads.append(row)
        if len(reads) == 50 and gone.pop():
            raise OSError(errno.EIO, "the disk is gone")
        return sound(self, row)

    monkeypatch.setattr(Files, "opened", opened)
    with pytest.raises(SourceError, match="the disk is gone"):
        pack(source, named(tmp_path / "out", kind))
    assert not (tmp_path / f"out/a.{kind}").exists()
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/00000").glob("*")}
    assert len(made) == (49 if kind == "csv" else 0)
    reads.clear()
    gone.append(False)
    packed = pack(source, named(tmp_path / "out", kind))
    assert (packed.samples, packed.found) == (60, 0)
    assert digests_below(tmp_path / "out") == digests_below(tmp_path / "whole")
    assert all(path.stat().st_mtime_ns == time for path, time in made.items())
    assert sorted(set(reads)) == list(range(60))
    if kind == "lmdb":  # what is there is read to be compared, not to be written again
        assert len(reads) == 60


def test_an_environment_begun_from_another_source(tmp_path: Path, source: Images) -> None:
    pack(source, tmp_path / "a.lmdb")
    os.rename(tmp_path / "a.lmdb", tmp_path / ".a.lmdb.part")
    assert source.files.labels is not None
    other = Images(replace(source.files, labels=source.files.labels + 1))
    with pytest.raises(SourceError, match="read back otherwise"):
        pack(other, tmp_path / "a.lmdb")
    pack(other, tmp_path / "a.lmdb")
    assert content(stoker.open(tmp_path / "a.lmdb")) == content(other)
    with (
        lmdb.open(str(tmp_path / ".c.lmdb.part"), lock=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        transaction.put(b"num-samples", b"several")
    pack(source, tmp_path / "c.lmdb")
    assert content(stoker.open(tmp_path / "c.lmdb")) == content(source)
    os.makedirs(tmp_path / ".b.lmdb.part")
    (tmp_path / ".b.lmdb.part/data.mdb").write_bytes(b"something else" * 1000)
    pack(source, tmp_path / "b.lmdb")
    assert content(stoker.open(tmp_path / "b.lmdb")) == content(source)


KILLED = """
import sys, stoker
from stoker.pack import pack
from stoker.sources import lmdb
lmdb._COMMITTED_BYTES = 200000
source = stoker.ImageFolder(sys.argv[1], cache=False)
print("begins", flush=True)
pack(source, sys.argv[2], shard_bytes=200000, jobs=2)
"""


def _killed_packing(
    tmp_path: Path, folder: Path, kind: str, moments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_lmdb, "_COMMITTED_BYTES", SIZE)
    source = stoker.ImageFolder(folder, cache=False)
    pack(source, named(tmp_path / "whole", kind), shard_bytes=SIZE)
    whole = digests_below(tmp_path / "whole")
    rng = random.Random(moments)
    for _ in range(moments):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder), named(tmp_path / "out", kind)],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if (tmp_path / "out").exists():
            found = digests_below(tmp_path / "out").items()
            final = {name: digest for name, digest in found if "/." not in f"/{name}"}
            assert final.items() <= whole.items(), "something half-written has a final name"
        if rng.random() < 0.3:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    pack(source, named(tmp_path / "out", kind), shard_bytes=SIZE)
    left = {n: d for n, d in digests_below(tmp_path / "out").items() if not n.endswith(".part")}
    assert left == whole


@pytest.mark.parametrize("kind", FORMATS)
def test_killed_twice(
    tmp_path: Path, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _killed_packing(tmp_path, folder, kind, 2, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FORMATS)
def test_killed_often(
    tmp_path: Path, folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _killed_packing(tmp_path, folder, kind, 50, monkeypatch)


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


SMALL_DISK = """
import errno, os, shutil, sys
import stoker
from stoker import pack as packing
from stoker.errors import SourceError
folder, target, disk = sys.argv[1:]
os.makedirs(disk)
if os.system(f"mount -t tmpfs -o size=500k tmpfs {disk}"):
    sys.exit(77)
packing._refuse_a_full_disk = lambda *_: None  # others fill it meanwhile
packing.lmdb._COMMITTED_BYTES = 200_000
source = stoker.ImageFolder(folder, cache=False)
try:
    packing.pack(source, f"{disk}/{target}", shard_bytes=200_000)
    sys.exit("the disk was too large")
except OSError as error:
    print(error)
os.system(f"mount -o remount,size=64m {disk}")
packing.pack(source, f"{disk}/{target}", shard_bytes=200_000)
shutil.copytree(disk, f"{disk}-copy")
"""


@pytest.mark.parametrize("kind", FORMATS)
def test_a_real_disk_that_gets_full(tmp_path: Path, folder: Path, kind: str) -> None:
    target = os.path.basename(named(tmp_path, kind))
    inner = [sys.executable, "-c", SMALL_DISK, str(folder), target, str(tmp_path / "disk")]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare to mount a small disk with")
    run = ["unshare", "--user", "--map-root-user", "--mount", *inner]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no disk may be mounted here")
    assert done.returncode == 0, done.stderr
    assert re.search("No space left|bytes are free", done.stdout)
    pack(stoker.ImageFolder(folder, cache=False), named(tmp_path / "whole", kind), shard_bytes=SIZE)
    assert digests_below(tmp_path / "disk-copy") == digests_below(tmp_path / "whole")


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

    def spoiled(path: str, samples: Any) -> None:
        sound.write(path, samples)
        if kind == "csv":
            path = str(next(Path(path).parent.glob("*/*")))
        path = f"{path}/data.mdb" if kind == "lmdb" else path
        with open(path, "r+b") as file:
            file.seek(os.path.getsize(path) // 2)
            file.write(b"spoiled here and there")

    monkeypatch.setitem(packing.FORMATS, f".{kind}", replace(sound, write=spoiled))
    with pytest.raises(SourceError, match="read back otherwise than written"):
        pack(source, named(tmp_path / "out", kind), shard_bytes=SIZE)
    assert set(os.listdir(tmp_path / "out")) <= {"00000"}  # the images' folder


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
    with pytest.raises(SourceError, match="another image, label or name"):
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


def test_a_source_whose_shard_shrinks(tmp_path: Path, source: Images) -> None:
    """No half of an image is packed for a whole one."""
    pack(source, tmp_path / "in.tar")
    opened = stoker.open(tmp_path / "in.tar")
    extents = opened.files.extents
    assert extents is not None
    os.truncate(tmp_path / "in.tar", int(extents.begin[40] + extents.length[40] // 2))
    with pytest.raises(SourceError, match="shorter than when it was opened"):
        pack(opened, tmp_path / "out/a.tar")
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("target", "options", "told"),
    [
        ("a-%d.zip", {}, r"must end in one of \.tar, \.tfrecord"),
        ("a-%d.lmdb", {}, "must hold no number"),
        ("a.tar", {"on": "spark"}, "expected 'threads' or 'ray'"),
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


# Made smaller


def test_larger_images_are_made_smaller(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    names = {"a.jpg": (300, 200), "b.png": (150, 300), "c.jpg": (100, 50), "d.webp": (200, 200)}
    for name, (width, height) in names.items():
        path = tmp_path / "in" / name.split(".")[1] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        smooth = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = 6
        smooth.resize((width, height)).save(path, exif=exif)
    Image.fromarray(rng.integers(0, 256, (128, 128), np.uint8)).save(tmp_path / "in/png/e.gif")
    Image.new("CMYK", (120, 90)).save(tmp_path / "in/jpg/f.jpg")
    source = stoker.ImageFolder(
        tmp_path / "in", extensions=(".jpg", ".png", ".webp", ".gif"), cache=False
    )
    pack(source, tmp_path / "out", shrink=Shrink(shorter=64, longer=128, quality=80))
    again = stoker.open(tmp_path / "out/labels.csv")
    sizes = {
        "a.jpg": (96, 64),
        "b.png": (64, 128),
        "c.jpg": (100, 50),
        "d.jpg": (64, 64),
        "e.png": (64, 64),
        "f.jpg": (85, 64),
    }
    sources = {Path(source.files.name(row)).stem: row for row in range(len(source))}
    with (tmp_path / "out/labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(Path(row["source"]).name for row in rows) == sorted(sizes)
    for place, row in enumerate(rows):
        name = Path(row["source"]).name
        whole = image(source, sources[name[0]])
        stored = image(again, place)
        with Image.open(io.BytesIO(stored)) as small, Image.open(io.BytesIO(whole)) as large:
            assert small.size == sizes[name] and Path(row["filename"]).suffix == Path(name).suffix
            assert small.mode == ("L" if name == "e.png" else "RGB")
            assert small.getexif().get(ExifTags.Base.Orientation) == large.getexif().get(
                ExifTags.Base.Orientation
            )
            if small.size == large.size:
                assert stored == whole
                continue
            fine = large.convert(small.mode).resize(small.size, Image.Resampling.LANCZOS)
            difference = np.asarray(fine, np.int16) - np.asarray(small, np.int16)
            assert np.abs(difference).mean() < (0.001 if name.endswith("png") else 8)


def test_what_was_made_smaller_is_found_again(tmp_path: Path, source: Images) -> None:
    for jobs in (1, 2):
        shrink = Shrink(shorter=40)
        packed = pack(
            source, tmp_path / "a-%d.tar", shard_bytes=SIZE // 16, shrink=shrink, jobs=jobs
        )
        assert packed.found == (len(packed.shards) if jobs == 2 else 0)
    sizes = [os.path.getsize(path) for path in packed.shards]
    assert len(sizes) > 4 and max(sizes) < SIZE
    with pytest.raises(SourceError, match="is in the way"):
        pack(source, tmp_path / "a-%d.tar", shard_bytes=SIZE // 16, shrink=Shrink(40, None, 50))


def test_an_image_that_cannot_be_made_smaller(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "classes", 12)
    source = stoker.ImageFolder(folder, cache=False)
    broken = Path(source.files.path(7))
    broken.write_bytes(broken.read_bytes()[:300])
    with pytest.raises(SourceError, match=broken.name):
        pack(source, tmp_path / "out/a.tar", shrink=Shrink(shorter=10))
    pack(source, tmp_path / "out/a.tar")


@pytest.mark.parametrize("options", [{"shorter": 0}, {"longer": -1}, {"quality": 0}])
def test_sizes_and_quality(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Shrink(**options)


# On Ray


def test_on_ray(tmp_path: Path, source: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    told: list[tuple[int, int]] = []
    monkeypatch.chdir(tmp_path)  # relative names are those of here, not of Ray's own folders
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        arguments: dict[str, Any] = {"shard_bytes": SIZE, "shuffle": 3, "shrink": Shrink(100)}
        pack(source, "threads/a-%03d.tar", **arguments)
        packed = pack(
            source,
            "ray/a-%03d.tar",
            on="ray",
            progress=lambda samples, done: told.append((samples, done)),
            **arguments,
        )
        assert digests(tmp_path / "ray") == digests(tmp_path / "threads")
        assert max(told) == (60, packed.image_bytes) and packed.found == 0
        Path(packed.shards[1]).write_bytes(b"something else")
        with pytest.raises(SourceError, match=r"a-001\.tar: is in the way"):
            pack(source, "ray/a-%03d.tar", on="ray", **arguments)
    finally:
        ray.shutdown()


# The command


def test_command(
    tmp_path: Path, folder: Path, source: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_MEASURED_SECONDS", 0.1)
    run = ["pack", str(folder), f"{tmp_path}/a-%06d.tar", "--shard-size", "200K", "--jobs", "2"]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.output
    assert "60 images" in done.output and "compared with their source" in done.output
    assert re.search(
        rf"images/s from {re.escape(str(folder))}, [\d,]+ from the result", done.output
    )
    assert content(stoker.open(f"{tmp_path}/a-*.tar")) == content(source)
    again = CliRunner().invoke(app, [*run, "--no-measure"])
    assert "found there" in again.output and "as for training" not in again.output
    wrong = CliRunner().invoke(app, [*run[:3], "--shard-size", "many"])
    assert wrong.exit_code == 2 and "no size" in wrong.output


def test_command_that_makes_images_smaller(tmp_path: Path, folder: Path) -> None:
    run = ["pack", str(folder), f"{tmp_path}/out/", "--max-size", "40", "--quality", "70"]
    done = CliRunner().invoke(app, [*run, "--no-measure"])
    assert done.exit_code == 0, done.output
    assert f"beside {tmp_path}/out/labels.csv" in done.output
    again = stoker.open(tmp_path / "out/labels.csv")
    for i in range(60):
        with Image.open(io.BytesIO(image(again, i))) as small:
            assert max(small.size) <= 40
