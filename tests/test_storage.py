"""Remote objects: whatever goes wrong, the bytes are right or a SourceError names the URL."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from faulty import FAULTS, FaultyServer, serving
from stoker import storage, transport
from stoker.errors import SourceError
from stoker.storage import Store, is_remote
from stoker.transport import Object, shown

SECRETS = ("AKIAEXAMPLE", "verysecret", "signature123", "password1")
CONTENT = random.Random(0).randbytes(20_000)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr(storage, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(storage, "_PART_BYTES", 3_000)
    monkeypatch.setattr(transport, "_SILENT_SECONDS", 0.2)
    with serving() as server:
        server.objects["/bucket/a.tar"] = CONTENT
        yield server


def s3_options(server: FaultyServer) -> dict[str, Any]:
    return {"endpoint_url": server.url, "key": SECRETS[0], "secret": SECRETS[1]}


class Reached:
    """A store and the URL of the server's object in it."""

    def __init__(self, server: FaultyServer, scheme: str) -> None:
        self.server = server
        if scheme == "s3":
            self.store, self.url = Store("s3", s3_options(server)), "s3://bucket/a.tar"
        else:
            place = server.url.replace("//", "//user:password1@")
            self.store = Store("http", {})
            self.url = f"{place}/bucket/a.tar?X-Amz-Signature=signature123"

    def look_up(self) -> Object:
        return self.store.look_up(self.url)

    def download(self, thing: Object, path: Path) -> bytes:
        with open(path, "w+b") as out, ThreadPoolExecutor(4) as parts:
            self.store.download(thing, out, parts, threading.Event(), lambda _: None)
        return path.read_bytes()


@pytest.fixture(params=["s3", "http"])
def reached(server: FaultyServer, request: pytest.FixtureRequest) -> Reached:
    return Reached(server, request.param)


def check_error(error: SourceError, reached: Reached) -> None:
    assert error.path == shown(reached.url)
    assert "/bucket/a.tar" in error.path or error.path == "s3://bucket/a.tar"
    for secret in SECRETS:
        assert secret not in f"{error} {error!r}"
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("s3://bucket/a.tar", True),
        ("https://host/a", True),
        ("gs://b/c", True),
        ("/data/a.tar", False),
        ("a.tar", False),
        ("C:/x", False),
        ("a/b://c", False),
        ("zip://x::s3://bucket/a.zip", True),
        (b"s3://bucket", False),
    ],
)
def test_what_is_remote(path: object, remote: bool) -> None:
    assert is_remote(path) == remote


@pytest.mark.parametrize(
    ("url", "without"),
    [
        ("s3://bucket/a@b/c.tar", "s3://bucket/a@b/c.tar"),
        ("https://user:pass@host:1/a.tar?sig=x&y=z", "https://host:1/a.tar?..."),
        ("https://us@er:pass@host", "https://host"),
        ("http://host/a#sig", "http://host/a#sig"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, without: str) -> None:
    assert shown(url) == without


def test_looks_up_reads_and_downloads(reached: Reached, tmp_path: Path) -> None:
    thing = reached.look_up()
    assert (thing.size, thing.ranges) == (len(CONTENT), True)
    assert reached.store.read(thing, 5, 10) == CONTENT[5:15]
    assert reached.store.read(thing, 0, len(CONTENT)) == CONTENT
    assert reached.store.read(thing, 7, 0) == b""
    assert reached.download(thing, tmp_path / "a") == CONTENT
    with pytest.raises(SourceError, match="more are asked for"):
        reached.store.read(thing, 1, len(CONTENT))
    again = pickle.loads(pickle.dumps(reached.store))
    assert again.read(thing, 5, 10) == CONTENT[5:15]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_pass_are_overcome(reached: Reached, fault: str, tmp_path: Path) -> None:
    thing = reached.look_up()
    reached.server.faults["/bucket/a.tar"] = [fault] * 3
    assert reached.store.read(thing, 10, 5_000) == CONTENT[10:5_010]
    reached.server.faults["/bucket/a.tar"] = [fault] * 9
    assert reached.download(thing, tmp_path / "a") == CONTENT


@pytest.mark.parametrize("fault", sorted({*FAULTS, "403", "404", "400"} - {"whole"}))
def test_faults_that_stay_are_errors(reached: Reached, fault: str, tmp_path: Path) -> None:
    thing = reached.look_up()
    reached.server.always["/bucket/a.tar"] = fault
    before = reached.server.asked["/bucket/a.tar"]
    with pytest.raises(SourceError) as caught:
        reached.store.read(thing, 10, 100)
    check_error(caught.value, reached)
    tries = 1 if fault in ("400", "403", "404") else storage._TRIES
    assert reached.server.asked["/bucket/a.tar"] - before == tries
    with pytest.raises(SourceError) as caught:
        reached.download(thing, tmp_path / "a")
    check_error(caught.value, reached)


@pytest.mark.parametrize(("fault", "text"), [("403", "denied"), ("404", "not there")])
def test_what_cannot_be_looked_up_is_asked_for_once(
    reached: Reached, fault: str, text: str
) -> None:
    reached.server.always["/bucket/a.tar"] = fault
    with pytest.raises(SourceError, match=text) as caught:
        reached.look_up()
    check_error(caught.value, reached)


def test_random_faults_never_give_wrong_bytes(reached: Reached, tmp_path: Path) -> None:
    dice = random.Random(4)
    thing = reached.look_up()
    served = 0
    for _ in range(25):
        reached.server.faults["/bucket/a.tar"] = [
            dice.choice(
                [*(set(FAULTS) - {"silent", "mute"}), "", "", "404" if dice.random() < 0.1 else ""]
            )
            for _ in range(12)
        ]
        begin = dice.randrange(len(CONTENT))
        length = dice.randrange(len(CONTENT) - begin)
        try:
            assert reached.store.read(thing, begin, length) == CONTENT[begin : begin + length]
            assert reached.download(thing, tmp_path / "a") == CONTENT
            served += 1
        except SourceError as error:
            check_error(error, reached)
    assert served > 5


def test_a_changed_object_is_an_error(reached: Reached, tmp_path: Path) -> None:
    thing = reached.look_up()
    reached.server.objects["/bucket/a.tar"] = CONTENT[::-1]  # as long as before
    with pytest.raises(SourceError, match="has changed") as caught:
        reached.store.read(thing, 10, 100)
    check_error(caught.value, reached)
    with pytest.raises(SourceError, match="has changed") as caught:
        reached.download(thing, tmp_path / "a")
    check_error(caught.value, reached)
    reached.server.objects["/bucket/a.tar"] = CONTENT[:50]
    with pytest.raises(SourceError):
        reached.store.read(thing, 100, 100)


def test_an_object_that_changes_in_the_middle_of_a_download(
    reached: Reached, tmp_path: Path
) -> None:
    thing = reached.look_up()
    left = [3]

    def change() -> None:
        left[0] -= 1
        if left[0] == 0:
            reached.server.objects["/bucket/a.tar"] = bytes(len(CONTENT))

    reached.server.on_part = change
    with pytest.raises(SourceError, match="has changed"):
        reached.download(thing, tmp_path / "a")


def test_servers_without_ranges_are_read_from_the_beginning(
    server: FaultyServer, tmp_path: Path
) -> None:
    server.ranges = False
    reached = Reached(server, "http")
    thing = reached.look_up()
    assert not thing.ranges
    assert reached.store.read(thing, 10, 100) == CONTENT[10:110]
    server.faults["/bucket/a.tar"] = ["reset", "short", "500", "lying"]
    with pytest.raises(SourceError, match="has changed"):  # it says another length
        reached.download(thing, tmp_path / "a")
    server.faults["/bucket/a.tar"] = ["reset", "short", "500"]
    assert reached.download(thing, tmp_path / "a") == CONTENT


def test_a_wrong_checksum_is_an_error(server: FaultyServer, tmp_path: Path) -> None:
    server.etags["/bucket/a.tar"] = hashlib.md5(b"something else").hexdigest()
    reached = Reached(server, "s3")
    with pytest.raises(SourceError, match="MD5") as caught:
        reached.download(reached.look_up(), tmp_path / "a")
    check_error(caught.value, reached)


def test_http_checksums_are_compared(server: FaultyServer, tmp_path: Path) -> None:
    reached = Reached(server, "http")
    for content, right in ((CONTENT, True), (b"", False)):
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        server.headers["Repr-Digest"] = f"md5=:nonsense:, sha-256=:{digest}:"
        thing = reached.look_up()
        assert thing.digests == (("sha256", hashlib.sha256(content).hexdigest()),)
        if right:
            assert reached.download(thing, tmp_path / "a") == CONTENT
        else:
            with pytest.raises(SourceError, match="SHA256"):
                reached.download(thing, tmp_path / "a")


def test_other_etags_are_no_checksums(server: FaultyServer, tmp_path: Path) -> None:
    server.etags["/bucket/a.tar"] = "9bb58f26192e4ba00f01e2e7b136bbd8-5"  # of a multipart upload
    reached = Reached(server, "s3")
    thing = reached.look_up()
    assert thing.digests == ()
    assert reached.download(thing, tmp_path / "a") == CONTENT


def test_an_empty_object(reached: Reached, tmp_path: Path) -> None:
    reached.server.objects["/bucket/a.tar"] = b""
    thing = reached.look_up()
    assert thing.size == 0
    assert reached.download(thing, tmp_path / "a") == b""


def test_http_has_no_listing(server: FaultyServer) -> None:
    with pytest.raises(SourceError, match="no listing"):
        Store("http", {}).list(f"{server.url}/bucket/*.tar")


def test_unknown_schemes_and_lacking_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec.registry  # noqa: F401

    with pytest.raises(SourceError, match="cannot be reached"):
        Store("nonsense", {}).look_up("nonsense://a/b")
    with pytest.raises(ImportError, match="pip install gcsfs"):
        Store("gs", {}).look_up("gs://a/b")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'stoker\[remote\]'"):
        Store("s3", {}).look_up("s3://a/b")


def test_other_stores_are_asked_again_after_each_read(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/a.tar", CONTENT)
    try:
        store = Store("memory", {})
        (url,) = store.list("memory://bucket/*.tar")
        thing = store.look_up(url)
        assert store.read(thing, 3, 9) == CONTENT[3:12]
        memory.pipe("/bucket/a.tar", CONTENT[::-1])
        with pytest.raises(SourceError, match="has changed"):
            store.read(thing, 3, 9)
        memory.rm("/bucket/a.tar")
        with pytest.raises(SourceError, match="not there"):
            store.read(thing, 3, 9)
    finally:
        memory.store.clear()


def test_a_full_disk_is_no_fault_of_the_network(reached: Reached) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    thing = reached.look_up()
    before = reached.server.asked["/bucket/a.tar"]
    with open("/dev/full", "wb", buffering=0) as full, ThreadPoolExecutor(1) as parts:
        out = io.FileIO(full.fileno(), "wb", closefd=False)
        with pytest.raises(storage.DiskError):
            reached.store.download(thing, out, parts, threading.Event(), lambda _: None)
    assert reached.server.asked["/bucket/a.tar"] - before <= 2


def test_the_users_generator_is_left_alone(reached: Reached) -> None:
    thing = reached.look_up()
    reached.server.faults["/bucket/a.tar"] = ["500"] * 3
    random.seed(1)
    expected = random.Random(1).random()
    reached.store.read(thing, 0, 10)
    assert random.random() == expected
