"""How remote objects are asked for: of S3, of HTTP servers, and of whatever else fsspec knows.

Note [The same object]
    An object is known by its size and, where its store gives one, its ETag or else its time of
    change. Every answer with some of its bytes says both again, and other ones mean that it has
    changed: bytes of two versions are never mixed. Stores other than S3 and HTTP are asked for them
    again after each read.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.errors import SourceError

Put = Callable[[int, bytes], None]
"""Takes bytes, and where they begin in the range that was asked for."""

CONNECTIONS = 32
_SILENT_SECONDS = 30.0
_SLOWEST_BYTES_PER_SECOND = 64 << 10
_PIECE_BYTES = 1 << 20


def shown(url: str) -> str:
    """A URL without what may be secret."""
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    path, mark, _ = path.partition("?")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}" + "?..." * bool(mark)


@dataclass(frozen=True)
class Object:
    """A remote object, as it was when it was looked up.

    Attributes:
        url: where it is.
        size: in bytes.
        identity: what tells it from a later version of the same size; "" where nothing does.
        ranges: whether its server gives parts of it.
        digests: kinds and values, in hexadecimal, of its checksums.
    """

    url: str
    size: int
    identity: str
    ranges: bool = True
    digests: tuple[tuple[str, str], ...] = ()


class Wrong(Exception):  # noqa: N818  not an error yet: the next attempt may be right
    """What is wrong with an answer."""


class Status(Exception):  # noqa: N818  likewise
    """An answer's HTTP status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Taken:
    """Takes the bytes of an answer, of which there must be as many as were asked for."""

    def __init__(self, put: Put, skip: int, length: int) -> None:
        self.put, self.skip, self.length, self.at = put, skip, length, 0

    def __call__(self, piece: bytes) -> bool:
        """Takes a piece; True once there are enough."""
        if self.skip:
            cut = min(self.skip, len(piece))
            self.skip, piece = self.skip - cut, piece[cut:]
        piece = piece[: self.length - self.at]
        if piece:
            self.put(self.at, piece)
            self.at += len(piece)
        return self.at == self.length

    def check(self) -> None:
        """Raises where bytes are lacking."""
        if self.at < self.length:
            raise Wrong(f"gave {self.at:,} of {self.length:,} bytes that were asked for")


def _require_same(thing: Object, identity: str, size: int) -> None:
    """Raises SourceError where an answer is about another version of an object."""
    if identity != thing.identity or size != thing.size:
        raise SourceError(
            shown(thing.url), "has changed since it was opened: open the data set again"
        )


# Stores


def _filesystem(scheme: str, options: Mapping[str, Any]) -> Any:
    """A file system of fsspec, of our own."""
    import fsspec

    return fsspec.filesystem(scheme, **{**options, "skip_instance_cache": True})


def _run(fs: Any, call: Callable[[], Any], length: int = 0) -> Any:
    """What a coroutine gives on fsspec's loop, in the time that ``length`` bytes may take."""
    from fsspec.asyn import sync

    async def timed() -> Any:
        async with asyncio.timeout(_SILENT_SECONDS + length / _SLOWEST_BYTES_PER_SECOND):
            return await call()

    return sync(fs.loop, timed)


async def _soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, _SILENT_SECONDS)


def _total(content_range: str | None) -> int:
    """The size of the whole that an answer with a part of it says."""
    found = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d{1,18})", content_range or "", re.ASCII)
    if found is None:
        raise Wrong("gave a part, and not of how many bytes")
    return int(found[1])


_DIGEST_BYTES = {"crc32": 4, "md5": 16, "sha1": 20, "sha256": 32}


def _hexadecimal(kind: str, value: Any) -> str:
    """The hexadecimal form of a checksum in base 64; "" of anything else."""
    try:
        digest = base64.b64decode(value, validate=True)
    except (ValueError, TypeError):
        return ""
    return digest.hex() if len(digest) == _DIGEST_BYTES[kind] else ""


class S3:
    """S3, through s3fs."""

    def __init__(self, scheme: str, options: Mapping[str, Any]) -> None:
        config = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 2 * CONNECTIONS}
        config |= options.get("config_kwargs") or {}
        self.fs = _filesystem(scheme, {**options, "config_kwargs": config})
        self.fs.retries = 1

    @property
    def place(self) -> str:
        """Where its endpoint is."""
        return str(self.fs.s3.meta.endpoint_url)

    def list(self, pattern: str) -> list[str]:
        """The URLs of the objects that fit a pattern."""
        found = self.fs.glob(pattern, detail=True)
        return sorted(f"s3://{name}" for name, info in found.items() if info["type"] == "file")

    def _named(self, url: str) -> dict[str, str]:
        url, _, version = url.partition("?versionId=")
        bucket, key, _ = self.fs.split_path(url)
        named = {"Bucket": bucket, "Key": key}
        return named | ({"VersionId": version} if version else {})

    def look_up(self, url: str) -> Object:
        """The object at a URL; raises whatever the library does."""
        named = self._named(url)
        if not named["Key"]:
            raise FileNotFoundError
        reply = _run(
            self.fs, lambda: self.fs._call_s3("head_object", ChecksumMode="ENABLED", **named)
        )
        etag = str(reply.get("ETag", "")).strip('"')
        digests = {
            kind: _hexadecimal(kind, reply.get(f"Checksum{kind.upper()}"))
            for kind in ("sha256", "sha1", "crc32")
            if reply.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        }
        encrypted = "kms" in reply.get("ServerSideEncryption", "") or (
            "SSECustomerAlgorithm" in reply
        )
        if re.fullmatch("[0-9a-f]{32}", etag) and not encrypted:
            digests["md5"] = etag
        kept = tuple((kind, value) for kind, value in digests.items() if value)
        return Object(url, int(reply["ContentLength"]), etag, True, kept)

    def get(self, thing: Object, begin: int, length: int, put: Put) -> None:
        """Hands a part of an object to ``put``; raises whatever the library does."""
        _run(self.fs, lambda: self._get(thing, begin, length, _Taken(put, 0, length)), length)

    async def _get(self, thing: Object, begin: int, length: int, take: _Taken) -> None:
        reply = await _soon(
            self.fs._call_s3(
                "get_object", Range=f"bytes={begin}-{begin + length - 1}", **self._named(thing.url)
            )
        )
        body = reply["Body"]
        try:
            etag = str(reply.get("ETag", "")).strip('"')
            if "ContentRange" in reply:
                size = _total(reply["ContentRange"])
            else:
                take.skip, size = begin, int(reply["ContentLength"])
            _require_same(thing, etag, size)
            while piece := await _soon(body.read(_PIECE_BYTES)):
                if take(piece):
                    break
        finally:
            body.close()
        take.check()


class HTTP:
    """HTTP, through fsspec and aiohttp."""

    place = ""

    def __init__(self, scheme: str, options: Mapping[str, Any]) -> None:
        self.fs = _filesystem(scheme, options)

    async def _asked(self, url: str, first: int, last: int) -> Any:
        """The answer to a request for bytes ``first`` to ``last``, without its body."""
        import aiohttp

        session = await self.fs.set_session()
        options = {**self.fs.kwargs, "timeout": aiohttp.ClientTimeout(total=None)}
        options["headers"] = {
            **options.get("headers", {}),
            "Range": f"bytes={first}-{last}",
            "Accept-Encoding": "identity",  # else a size could be that of compressed bytes
        }
        reply = await _soon(session.get(self.fs.encode_url(url), **options))
        if reply.status not in (200, 206, 416):
            reply.close()
            raise Status(reply.status)
        return reply

    @staticmethod
    def _state(reply: Any) -> tuple[str, int]:
        """What the whole is known by, and its size."""
        headers = reply.headers
        identity = headers.get("ETag", "").removeprefix("W/").strip('"')
        identity = identity or headers.get("Last-Modified", "")
        if reply.status != 200:
            return identity, _total(headers.get("Content-Range"))
        length = headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,18}", length, re.ASCII) or "Content-Encoding" in headers:
            raise _Unsized
        return identity, int(length)

    def look_up(self, url: str) -> Object:
        """The object at a URL; raises whatever the library does."""
        found: Object = _run(self.fs, lambda: self._look_up(url))
        return found

    async def _look_up(self, url: str) -> Object:
        reply = await self._asked(url, 0, 0)
        try:
            identity, size = self._state(reply)
        except _Unsized:
            reason = "its server does not say how many bytes it has"
            raise SourceError(shown(url), reason) from None
        finally:
            reply.close()
        digests = {}
        for header in ("Repr-Digest", "Digest", "x-goog-hash"):
            for entry in ",".join(reply.headers.getall(header, [])).split(","):
                kind, _, value = entry.strip().partition("=")
                kind = kind.lower().replace("-", "")
                if kind in ("sha256", "md5") and (value := _hexadecimal(kind, value.strip(":"))):
                    digests[kind] = value
        return Object(url, size, identity, reply.status == 206, tuple(digests.items()))

    def get(self, thing: Object, begin: int, length: int, put: Put) -> None:
        """Hands a part of an object to ``put``; raises whatever the library does."""
        _run(
            self.fs,
            lambda: self._get(thing, begin, length, put),
            length if thing.ranges else thing.size,
        )

    async def _get(self, thing: Object, begin: int, length: int, put: Put) -> None:
        reply = await self._asked(thing.url, begin, begin + length - 1)
        try:
            try:
                identity, size = self._state(reply)
            except _Unsized:
                raise Wrong("does not say how many bytes it has") from None
            if reply.status == 416 and size == thing.size:
                raise Wrong("refuses a part of it")
            _require_same(thing, identity, size)
            if reply.status == 206:
                told = reply.headers["Content-Range"].partition("-")[0]
                if told != f"bytes {begin}":
                    raise Wrong("gave another part than was asked for")
            take = _Taken(put, begin if reply.status == 200 else 0, length)
            while piece := await _soon(reply.content.read(_PIECE_BYTES)):
                if take(piece):
                    break
            take.check()
        finally:
            reply.close()


class _Unsized(Exception):  # noqa: N818  becomes a SourceError, with the URL
    """An answer does not say how many bytes the whole has."""


class Other:
    """Whatever else fsspec knows."""

    place = ""
    _VERSIONS = ("etag", "ETag", "generation", "version_id", "md5Hash", "crc32c", "sha256")
    _TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")

    def __init__(self, scheme: str, options: Mapping[str, Any]) -> None:
        self.fs = _filesystem(scheme, options)
        self.scheme = scheme
        self.place = str(options.get("endpoint_url", ""))

    def list(self, pattern: str) -> list[str]:
        """The URLs of the objects that fit a pattern."""
        self.fs.invalidate_cache()
        found = self.fs.glob(pattern, detail=True)
        names = [name for name, info in found.items() if info["type"] == "file"]
        return sorted(str(self.fs.unstrip_protocol(name)) for name in names)

    def look_up(self, url: str) -> Object:
        """The object at a URL; raises whatever the library does."""
        self.fs.invalidate_cache()
        info = self.fs.info(url)
        if info["type"] != "file" or info.get("size") is None:
            raise FileNotFoundError
        names = self._VERSIONS if any(name in info for name in self._VERSIONS) else self._TIMES
        known = {name: str(info[name]) for name in names if info.get(name) is not None}
        md5 = _hexadecimal("md5", info.get("md5Hash"))
        identity = json.dumps(known) if known else ""
        return Object(url, int(info["size"]), identity, True, (("md5", md5),) if md5 else ())

    def get(self, thing: Object, begin: int, length: int, put: Put) -> None:
        """Hands a part of an object to ``put``; raises whatever the library does."""
        data = self.fs.cat_file(thing.url, start=begin, end=begin + length)
        if len(data) != length:
            raise Wrong(f"gave {len(data):,} of {length:,} bytes that were asked for")
        now = self.look_up(thing.url)
        _require_same(thing, now.identity, now.size)
        put(0, data)
