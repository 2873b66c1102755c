"""Shards at URLs: the batches of local ones, from S3's own protocol, copied or read by ranges."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import pickle
import re
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from moto.server import ThreadedMotoServer
from torch.utils.data import Dataset, Subset

import stoker
from faulty import FaultyServer, serving
from pictures import class_folder
from stoker import ranges, storage
from stoker.draws import Draw
from stoker.errors import DecodeError, SourceError, StokerWarning
from stoker.pack import pack
from stoker.sources import remote, tar
from stoker.sources.dataset import read
from stoker.storage import Store
from test_sources_mds import write as write_mds

TRAIN = v1.Compose([v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()])
MODES = ("copy", "ranges")
SECRET = "verysecret"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "_FIRST_PAUSE_SECONDS", 0.001)
    return tmp_path / "cache" / "stoker"


class Bucket:
    """A bucket of a real S3 server on loopback."""

    def __init__(self, endpoint: str) -> None:
        self.options = {"endpoint_url": endpoint, "key": "AKIAEXAMPLE", "secret": SECRET}
        self.client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="AKIAEXAMPLE",
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket="bucket")

    def put(self, name: str, content: bytes) -> str:
        """Puts an object there; its URL."""
        self.client.put_object(Bucket="bucket", Key=name, Body=content)
        return f"s3://bucket/{name}"

    def put_folder(self, name: str, folder: Path) -> str:
        """Puts the files of a folder there; its URL."""
        for path in sorted(folder.iterdir()):
            self.put(f"{name}/{path.name}", path.read_bytes())
        return f"s3://bucket/{name}"

    def open(self, url: Any, *args: Any, **options: Any) -> Any:
        """Opens what is at a URL."""
        return stoker.open(url, *args, storage=self.options, **options)


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield Bucket(f"http://{host}:{port}")
    finally:
        server.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("classes"), 24)


@pytest.fixture(scope="module")
def tars(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of the folder's images."""
    target = tmp_path_factory.mktemp("tars")
    pack(stoker.ImageFolder(folder, cache=False), target / "train-%06d.tar", shard_bytes=60_000)
    assert len(list(target.iterdir())) > 2
    return target


def epoch(dataset: Any, threads: int = 2) -> list[Any]:
    loader = stoker.DataLoader(dataset, 7, shuffle=True, num_workers=threads, seed=5)
    assert loader.explain().tier == "lowered"
    return list(loader)


def check_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs) > 1
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize("remote", MODES)
@pytest.mark.parametrize("threads", [0, 2])
def test_batches_of_tar_shards(
    bucket: Bucket, folder: Path, tars: Path, remote: str, threads: int
) -> None:
    bucket.put_folder("tars", tars)
    ours = bucket.open("s3://bucket/tars/train-*.tar", TRAIN, remote=remote)
    last = len(list(tars.iterdir())) - 1
    assert ours.shards == [f"s3://bucket/tars/train-{i:06}.tar" for i in range(last + 1)]
    assert ours.files.path(0) == "s3://bucket/tars/train-000000.tar:000000000.jpg"
    check_same(epoch(ours, threads), epoch(stoker.ImageFolder(folder, TRAIN, cache=False)))
    braces = bucket.open(f"s3://bucket/tars/train-{{000000..{last:06}}}.tar", remote=remote)
    assert braces.shards == ours.shards and braces.targets == ours.targets
    listed = bucket.open(ours.shards[1:], remote=remote)
    assert len(listed) < len(ours)
    alone = bucket.open(ours.shards[0], remote=remote)
    assert alone.shards == ours.shards[:1]


@pytest.mark.parametrize("remote", MODES)
def test_batches_of_other_formats(
    bucket: Bucket, folder: Path, tmp_path: Path, remote: str
) -> None:
    source = stoker.ImageFolder(folder, cache=False)
    pack(source, tmp_path / "a-%d.tfrecord", shard_bytes=90_000)
    pack(source, tmp_path / "a.lmdb")
    samples = [
        {"id": i, "image": Path(path).read_bytes(), "label": label, "name": f"n{i}"}
        for i, (path, label) in enumerate(source.samples)
    ]
    mds = write_mds(tmp_path / "mds", samples)
    base = f"formats-{remote}"
    for path in tmp_path.glob("*.tfrecord"):
        bucket.put(f"{base}/{path.name}", path.read_bytes())
    database = tmp_path / "a.lmdb"
    database = database / "data.mdb" if database.is_dir() else database
    bucket.put(f"{base}/lmdb/data.mdb", database.read_bytes())
    bucket.put_folder(f"{base}/mds", mds)
    expected = epoch(stoker.ImageFolder(folder, TRAIN, cache=False))
    for url in ("*.tfrecord", "lmdb", "lmdb/data.mdb", "mds", "mds/"):
        ours = bucket.open(f"s3://bucket/{base}/{url}", TRAIN, remote=remote)
        check_same(epoch(ours), expected)
        assert all(shard.startswith("s3://bucket/") for shard in ours.shards)
        assert ours.files.path(0).startswith(f"s3://bucket/{base}/{url.partition('*')[0]}"[:25])


def test_the_checksums_that_s3_gives(bucket: Bucket, tmp_path: Path) -> None:
    content = bytes(range(256)) * 50
    store = Store("s3", bucket.options)
    url = bucket.put("plain", content)
    assert dict(store.look_up(url).digests)["md5"] == hashlib.md5(content).hexdigest()
    for kind in ("SHA256", "SHA1", "CRC32"):
        put: dict[str, Any] = {"Bucket": "bucket", "Key": kind, "Body": content}
        bucket.client.put_object(ChecksumAlgorithm=kind, **put)
        thing = store.look_up(f"s3://bucket/{kind}")
        assert [name for name, _ in thing.digests] == [kind.lower(), "md5"]
        with open(tmp_path / kind, "w+b") as out, ThreadPoolExecutor(2) as parts:
            store.download(thing, out, parts, threading.Event(), lambda _: None)
        assert (tmp_path / kind).read_bytes() == content
    upload = bucket.client.create_multipart_upload(Bucket="bucket", Key="parts")
    named: dict[str, Any] = {"Bucket": "bucket", "Key": "parts", "UploadId": upload["UploadId"]}
    part = bucket.client.upload_part(PartNumber=1, Body=content, **named)
    told = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    bucket.client.complete_multipart_upload(MultipartUpload=told, **named)
    thing = store.look_up("s3://bucket/parts")
    assert "md5" not in dict(thing.digests) and thing.identity.endswith("-1")
    assert store.read(thing, 256, 256) == content[:256]


def test_a_version_of_an_object(bucket: Bucket) -> None:
    bucket.client.create_bucket(Bucket="versions")
    bucket.client.put_bucket_versioning(
        Bucket="versions", VersioningConfiguration={"Status": "Enabled"}
    )
    put: dict[str, Any] = {"Bucket": "versions", "Key": "a"}
    first = bucket.client.put_object(Body=b"first", **put)["VersionId"]
    bucket.client.put_object(Body=b"second", **put)
    store = Store("s3", bucket.options)
    for url, content in (
        (f"s3://versions/a?versionId={first}", b"first"),
        ("s3://versions/a", b"second"),
    ):
        thing = store.look_up(url)
        assert store.read(thing, 0, thing.size) == content


def test_compressed_tfrecords(bucket: Bucket, folder: Path, tmp_path: Path) -> None:
    pack(stoker.ImageFolder(folder, cache=False), tmp_path / "a.tfrecord")
    url = bucket.put("a.tfrecord.gz", gzip.compress((tmp_path / "a.tfrecord").read_bytes()))
    ours = bucket.open(url, TRAIN)
    check_same(epoch(ours), epoch(stoker.open(tmp_path / "a.tfrecord", TRAIN)))
    assert ours.shards == [url]
    with pytest.raises(SourceError, match=r"^s3://bucket/a.tfrecord.gz: .*remote='ranges'"):
        bucket.open(url, remote="ranges")


@pytest.mark.parametrize("remote", MODES)
def test_zip(bucket: Bucket, folder: Path, tmp_path: Path, remote: str) -> None:
    shutil.make_archive(str(tmp_path / "a"), "zip", folder)
    url = bucket.put("a.zip", (tmp_path / "a.zip").read_bytes())
    if remote == "ranges":
        with pytest.raises(SourceError, match=r"^s3://bucket/a.zip: .*not read by ranges"):
            bucket.open(url, remote=remote)
        return
    ours, local = bucket.open(url, TRAIN), stoker.open(tmp_path / "a.zip", TRAIN)
    assert ours.targets == local.targets and ours.shards[0] == url
    check_same(epoch(ours), epoch(local))


@pytest.mark.slow
@pytest.mark.parametrize("remote", MODES)
def test_it_pickles_and_goes_to_workers(
    bucket: Bucket, folder: Path, tars: Path, kept: Path, remote: str
) -> None:
    bucket.put_folder("tars", tars)
    ours = bucket.open("s3://bucket/tars/train-*.tar", remote=remote)
    state = pickle.dumps(ours)
    shutil.rmtree(kept / "remote")  # as on another node
    again = pickle.loads(state)
    local = stoker.ImageFolder(folder, cache=False)
    with again.files.opened(3) as one, local.files.opened(3) as two:
        assert one.read() == two.read()
    loader = stoker.DataLoader(
        Own(again, TRAIN), 6, num_workers=2, seed=3, multiprocessing_context="spawn"
    )
    theirs = stoker.DataLoader(Own(local, TRAIN), 6, num_workers=0, seed=3)
    for one, two in zip(loader, theirs, strict=True):
        assert torch.equal(one, two)


class Own(Dataset[Any]):
    """A user's dataset around one of stoker's."""

    def __init__(self, images: Any, transform: Callable[[Any], Any]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index][0])


def test_ranges_keep_the_cache_within_its_budget(
    bucket: Bucket, folder: Path, tars: Path, kept: Path
) -> None:
    """A set that does not fit is read all the same, and its indexes are made once."""
    bucket.put_folder("tars", tars)
    most = max(path.stat().st_size for path in tars.iterdir())
    with pytest.raises(SourceError, match="remote='ranges'"):
        bucket.open("s3://bucket/tars/train-*.tar", cache_bytes=most)
    everything = [path.stat().st_size for path in tars.iterdir()]
    limit = sum(everything) - min(everything)
    ours = bucket.open("s3://bucket/tars/train-*.tar", TRAIN, cache_bytes=limit, remote="ranges")
    assert sum(path.stat().st_size for path in kept.glob("remote/*")) <= limit
    check_same(epoch(ours), epoch(stoker.ImageFolder(folder, TRAIN, cache=False)))
    shutil.rmtree(kept / "remote")
    again = bucket.open("s3://bucket/tars/train-*.tar", TRAIN, remote="ranges")
    assert again.targets == ours.targets
    assert not (kept / "remote").exists(), "what the indexes say was looked for again"


@pytest.fixture
def server(tars: Path) -> Iterator[FaultyServer]:
    with serving() as server:
        for path in tars.iterdir():
            server.objects[f"/{path.name}"] = path.read_bytes()
        yield server


def test_ranges_join_neighbours_and_look_ahead(server: FaultyServer, folder: Path) -> None:
    url = f"{server.url}/train-000000.tar"
    ours = stoker.open(url, TRAIN, remote="ranges")
    server.asked.clear()
    list(stoker.DataLoader(ours, len(ours)))
    assert server.asked["/train-000000.tar"] == 1  # all of the shard's images, at once
    server.asked.clear()
    batches = iter(stoker.DataLoader(ours, 1, num_workers=1))
    next(batches)
    assert server.asked["/train-000000.tar"] >= len(ours) - 1
    del batches


def test_bytes_in_flight_are_bounded(
    server: FaultyServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_MOST_BYTES", 1)
    names = "{000000..000002}"
    ours = stoker.open(f"{server.url}/train-{names}.tar", remote="ranges")
    rows = read(ours)
    reader = ranges.Ranges(rows)  # type: ignore[arg-type]
    draws = [Draw(0, 0, np.array([place]), np.array([place])) for place in range(len(ours))]
    taken = []

    def given() -> Iterator[Any]:
        for draw in draws:
            taken.append(draw)
            yield draw

    for number, draw in enumerate(reader.ahead(given())):
        assert len(taken) == number + 1
        contents, _ = reader.take(draw).wait()
        assert contents.tobytes() == ours.files.opened(number).read()
    reader.close()


@pytest.mark.parametrize("remote", MODES)
def test_faults_on_the_way(server: FaultyServer, folder: Path, remote: str) -> None:
    for path in server.objects:
        server.faults[path] = ["reset", "503", "short", "429", "lying"]
    ours = stoker.open(f"{server.url}/train-{{000000..000002}}.tar", TRAIN, remote=remote)
    for path in server.objects:
        server.faults[path] = ["500", "reset", "other", "short"]
    indices = range(len(ours))
    local = Subset(stoker.ImageFolder(folder, TRAIN, cache=False), indices)
    check_same(epoch(Subset(ours, indices)), epoch(local))


def test_an_object_that_changes_while_training(server: FaultyServer) -> None:
    ours = stoker.open(f"{server.url}/train-000000.tar", TRAIN, remote="ranges")
    server.objects["/train-000000.tar"] = server.objects["/train-000000.tar"][::-1]
    for threads in (0, 2):
        with pytest.raises(SourceError, match="has changed") as caught:
            list(stoker.DataLoader(ours, 2, num_workers=threads, on_error="skip"))
        assert caught.value.path == f"{server.url}/train-000000.tar"
    with pytest.raises(DecodeError, match="has changed"):
        ours[0]


def test_copies_serve_on_when_the_object_is_gone(server: FaultyServer) -> None:
    ours = stoker.open(f"{server.url}/train-000000.tar", TRAIN)
    server.objects.clear()
    assert len(list(stoker.DataLoader(ours, 2))) > 1
    with pytest.raises(SourceError, match="is not there"):
        stoker.open(f"{server.url}/train-000000.tar", TRAIN)


def test_ranges_need_a_server_that_has_them(server: FaultyServer) -> None:
    server.ranges = False
    assert len(stoker.open(f"{server.url}/train-000000.tar")) > 1
    with pytest.raises(SourceError, match="gives no parts"):
        stoker.open(f"{server.url}/train-000000.tar", remote="ranges")


@pytest.mark.parametrize("remote", MODES)
def test_bad_samples_are_told_by_their_urls(
    server: FaultyServer, tmp_path: Path, remote: str
) -> None:
    out = io.BytesIO()
    good = (class_folder(tmp_path / "c", 1) / "class_0" / "0000.jpg").read_bytes()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in (("a", good), ("b", b""), ("c", b"junk"), ("d", good * 30)):
            member = tarfile.TarInfo(f"{name}.jpg")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    server.objects["/bad.tar"] = out.getvalue()
    options: Any = {"max_bytes": 10 * len(good)}
    ours = stoker.open(f"{server.url}/bad.tar", TRAIN, remote=remote, **options)
    loader = stoker.DataLoader(ours, 4, on_error="skip", num_workers=1)
    ((images, _),) = loader
    assert len(images) == 4
    assert [(bad.index, bad.location) for bad in loader.bad_samples][:3] == [
        (i, f"{server.url}/bad.tar:{name}.jpg") for i, name in ((1, "b"), (2, "c"), (3, "d"))
    ]
    (tmp_path / "bad.tar").write_bytes(out.getvalue())
    local = stoker.open(tmp_path / "bad.tar", TRAIN, **options)
    for index in (1, 2, 3):
        texts = []
        for dataset in (ours, local):
            with pytest.raises(DecodeError) as caught:
                dataset[index]
            texts.append(re.sub("0x[0-9a-f]+", "", caught.value.reason))
        assert texts[0] == texts[1]


@pytest.mark.parametrize("remote", MODES)
def test_damage_is_told_by_the_url(server: FaultyServer, remote: str) -> None:
    whole = server.objects["/train-000001.tar"]
    server.objects["/train-000001.tar"] = whole[: len(whole) // 2]
    url = f"{server.url}/train-{{000000..000002}}.tar"
    with pytest.raises(SourceError, match="truncated") as caught:
        stoker.open(url, remote=remote)
    assert caught.value.path == f"{server.url}/train-000001.tar"
    with pytest.warns(StokerWarning) as told:
        stoker.open(url, remote=remote, damaged="skip")
    assert str(told[0].message).startswith(f"{server.url}/train-000001.tar: is truncated")
    assert told[0].filename == __file__


def test_labels_that_are_long_texts(server: FaultyServer, tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(3):
            for kind, content in (("jpg", b"x"), ("json", b'{"a": %d%s}' % (number, b" " * 99))):
                member = tarfile.TarInfo(f"{number}.{kind}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    server.objects["/json.tar"] = out.getvalue()
    for mode in MODES:
        ours = stoker.open(f"{server.url}/json.tar", label="json:a", remote=mode)
        assert ours.targets == [0, 1, 2]


def test_what_is_not_in_shards_is_refused(bucket: Bucket, folder: Path) -> None:
    url = bucket.put("labels.csv", b"name,label\na.jpg,1\n")
    with pytest.raises(SourceError, match="stoker pack"):
        bucket.open(url)
    bucket.put("images/class_0/a.jpg", b"x")
    with pytest.raises(SourceError, match="stoker pack") as caught:
        bucket.open("s3://bucket/images")
    assert caught.value.path == "s3://bucket/images"
    with pytest.raises(SourceError, match="no object fits"):
        bucket.open("s3://bucket/none-*.tar")
    with pytest.raises(SourceError, match="is not there"):
        bucket.open("s3://nobody/a-*.tar")


@pytest.mark.parametrize(
    "index",
    [
        b"{}",
        b"[]",
        b'{"shards": []}',
        b"\xff",
        b'{"shards": [{"raw_data": {"basename": "../x"}}]}',
        b'{"shards": [{"raw_data": {"basename": ".new-x"}}]}',
        b'{"shards": [{"raw_data": {"basename": 3}}]}',
        b'{"shards": [{"raw_data": {"basename": "a\\u0000"}}]}',
        b'{"shards": 3}',
        b"[" * 100_000,
    ],
)
def test_hostile_indexes(bucket: Bucket, index: bytes) -> None:
    bucket.put("hostile/index.json", index)
    with pytest.raises(SourceError, match=r"^s3://bucket/hostile/index\.json: "):
        bucket.open("s3://bucket/hostile")


def test_arguments(bucket: Bucket, tars: Path) -> None:
    path = tars / "train-000000.tar"
    wrong: dict[str, Any]
    for wrong in ({"storage": {}}, {"cache_bytes": 5}, {"remote": "ranges"}):
        with pytest.raises(ValueError, match="local path"):
            stoker.open(path, **wrong)
    with pytest.raises(ValueError, match="'copy' or 'ranges'"):
        stoker.open("s3://bucket/a.tar", remote="x")
    with pytest.raises(ValueError, match="nothing is written"):
        stoker.open("s3://bucket/a.tar", cache="beside")
    with pytest.raises(ValueError, match="several kinds"):
        stoker.open(["s3://bucket/a.tar", str(path)])
    bucket.put_folder("tars", tars)
    with pytest.raises(ValueError, match="says nothing"):
        bucket.open("s3://bucket/tars/train-000000.tar", label_offset=1)


def test_secrets_are_nowhere(
    bucket: Bucket, tars: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.put_folder("tars", tars)
    caplog.set_level(logging.WARNING)
    ours = bucket.open("s3://bucket/tars/train-*.tar")
    for path in kept.rglob("*"):
        assert SECRET not in str(path)
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()
    for url in ("s3://bucket/no", "s3://nobody/a-*.tar"):
        with pytest.raises(SourceError) as caught:
            bucket.open(url)
        assert SECRET not in repr(caught.value)
    assert SECRET not in caplog.text + repr(ours) + repr(stoker.DataLoader(ours).explain())


def test_local_paths_are_read_as_ever(tars: Path) -> None:
    assert not remote.is_url(tars)
    assert isinstance(stoker.open(tars / "train-000000.tar"), tar.Tar)
