"""Where bytes are: remote objects through fsspec, listed, looked up, read by ranges, downloaded.

Note [Faults]
    Whatever passes by itself is tried again, up to `_TRIES` times, after a random pause of up to
    0.2, 0.4, 0.8, ... seconds: connections that break or stay silent, answers that are too short or
    too long, statuses 408, 425, 429 and 5xx, and a copy whose checksum is wrong. What does not pass
    is an error at once: an object that is not there, access that is denied. The libraries' own
    attempts are turned off, so that these are all there are.

Note [Secrets]
    Options and URLs may hold credentials: keys, passwords before an ``@``, signatures behind a
    ``?``. Messages therefore show URLs without these, and none of the libraries' own texts.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, BinaryIO, TypeVar

from stoker.errors import SourceError
from stoker.transport import HTTP, S3, Object, Other, Put, Wrong, shown

T = TypeVar("T")

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://[^/]", re.IGNORECASE)
_TRIES = 6
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 20.0
_PIECE_BYTES = 1 << 20
_PART_BYTES = 8 << 20

# Of the libraries' exceptions, by their or a base's name, those that another attempt may help.
_PASSING = {
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "FlexibleChecksumError",
    "HTTPClientError",
    "IncompleteRead",
    "IncompleteReadError",
    "ProtocolError",
    "ResponseParserError",
}
_PASSING_STATUSES = (408, 425, 429)

# Not the generator that a user may have seeded.
_dice = random.Random()


def is_remote(path: object) -> bool:
    """Whether a path is a URL."""
    return isinstance(path, str) and _URL.match(path) is not None


class Store:
    """The objects of one scheme.

    Args:
        scheme: of their URLs.
        options: fsspec's, for its file system of that scheme.
    """

    def __init__(self, scheme: str, options: Mapping[str, Any]) -> None:
        self.scheme, self.options = scheme.lower(), dict(options)
        self._reached: S3 | HTTP | Other | None = None
        self._process = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc] # the same two

    def _reach(self, url: str) -> S3 | HTTP | Other:
        """What talks to the store in this process; connections do not survive a fork."""
        reached = self._reached
        if reached is not None and self._process == os.getpid():
            return reached  # without the lock, which a thread may hold while its process forks
        with self._lock:
            if self._reached is None or self._process != os.getpid():
                kinds: dict[str, type[S3 | HTTP | Other]]
                kinds = {"s3": S3, "s3a": S3, "http": HTTP, "https": HTTP}
                try:
                    self._reached = kinds.get(self.scheme, Other)(self.scheme, self.options)
                except ImportError as error:
                    extra = {"gs": "gcsfs", "gcs": "gcsfs"}.get(self.scheme, "'stoker[remote]'")
                    text = f"{self.scheme}:// needs an extra: pip install {extra}"
                    raise ImportError(text) from error
                except ValueError as error:
                    known = "s3://, gs://, http:// and https:// are known, and what fsspec knows"
                    raise SourceError(shown(url), f"cannot be reached: {known}") from error
                self._process = os.getpid()
            return self._reached

    def place(self, url: str) -> str:
        """What tells this store from others in which objects have the same URLs."""
        return self._reach(url).place

    def list(self, pattern: str) -> list[str]:
        """The URLs of the objects that fit a pattern with ``*``, ``?`` and ``[...]``, sorted.

        Raises:
            SourceError: they cannot be listed.
        """
        store = self._reach(pattern)
        if isinstance(store, HTTP):
            raise SourceError(
                shown(pattern), "HTTP has no listing: name the shards, as in {000000..000099}"
            )
        return _tried(pattern, lambda: store.list(pattern))

    def look_up(self, url: str) -> Object:
        """The object at ``url``.

        Raises:
            SourceError: it is not there, or cannot be had.
        """
        store = self._reach(url)
        return _tried(url, lambda: store.look_up(url))

    def read(
        self, thing: Object, begin: int, length: int, stop: threading.Event | None = None
    ) -> bytes:
        """``length`` bytes of an object, as it was looked up.

        Raises:
            SourceError: they cannot be had, or it has changed.
        """
        data = bytearray(length)

        def put(at: int, piece: bytes) -> None:
            data[at : at + len(piece)] = piece

        self._get(thing, begin, length, put, stop)
        return bytes(data)

    def _get(
        self, thing: Object, begin: int, length: int, put: Put, stop: threading.Event | None
    ) -> None:
        if not 0 <= begin <= begin + length <= thing.size:
            raise SourceError(shown(thing.url), f"has {thing.size:,} bytes, more are asked for")
        store = self._reach(thing.url)
        if length:
            _tried(thing.url, lambda: store.get(thing, begin, length, put), stop)

    def download(
        self,
        thing: Object,
        out: BinaryIO,
        parts: ThreadPoolExecutor,
        stop: threading.Event,
        told: Callable[[int], None],
    ) -> None:
        """Writes an object to ``out`` and compares its checksum.

        Args:
            thing: the object.
            out: a file, which may be written to at any place.
            parts: threads for its parts.
            stop: set to give up, by another thread or here.
            told: called with numbers of bytes as they come; negative where they were in vain.

        Raises:
            SourceError: it cannot be had, has changed, or its checksum is wrong.
        """
        handle = out.fileno()

        def part(begin: int, length: int) -> None:
            self._get(
                thing, begin, length, lambda at, piece: _write(handle, begin + at, piece), stop
            )
            told(length)

        def whole() -> None:
            step = _PART_BYTES if thing.ranges else max(thing.size, 1)
            begins = range(0, thing.size, step)
            jobs = [parts.submit(part, at, min(step, thing.size - at)) for at in begins]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                stop.set()
                for job in jobs:
                    job.cancel()
                wait_for(jobs)  # nothing is written once the file is given up
                raise
            for kind, digest in thing.digests:
                if _digest(out, kind) != digest:
                    told(-thing.size)
                    raise Wrong(f"came with another {kind.upper()} than its store says")

        _tried(thing.url, whole, stop)


class GivenUpError(Exception):
    """Another thread has set the event that says so."""


class DiskError(Exception):
    """What was downloaded cannot be written: carries an OSError past the attempts."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


def _write(handle: int, at: int, piece: bytes) -> None:
    try:
        while piece:
            written = os.pwrite(handle, piece, at)
            piece, at = piece[written:], at + written
    except OSError as error:
        raise DiskError(error) from error


def _digest(file: BinaryIO, kind: str) -> str:
    """The checksum of a file, in hexadecimal."""
    file.seek(0)
    crc, known = 0, None if kind == "crc32" else hashlib.new(kind, usedforsecurity=False)
    while piece := file.read(_PIECE_BYTES):
        if known is None:
            crc = zlib.crc32(piece, crc)
        else:
            known.update(piece)
    return f"{crc:08x}" if known is None else known.hexdigest()


# Faults


def _tried(url: str, call: Callable[[], T], stop: threading.Event | None = None) -> T:
    """What ``call`` gives; see Note [Faults].

    Raises:
        SourceError: it fails for good.
        GivenUpError: ``stop`` is set.
    """
    stop = stop or threading.Event()
    for number in range(_TRIES):
        if stop.is_set():
            raise GivenUpError
        try:
            return call()
        except (SourceError, ImportError, DiskError, GivenUpError):
            raise
        except Exception as error:  # noqa: BLE001  each library behind fsspec has its own kinds
            reason, passes = _judged(error)
        if not passes:
            raise SourceError(shown(url), reason)
        if number < _TRIES - 1:
            most = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**number)
            stop.wait(_dice.uniform(0, most))
    raise SourceError(shown(url), f"{reason}, {_TRIES} times in a row")


def _judged(error: Exception) -> tuple[str, bool]:
    """What an exception says, without the words of who raised it, and whether it passes."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = _status(error)
    if isinstance(error, Wrong):
        return str(error), True
    if isinstance(error, TimeoutError):
        return "does not answer in time", True
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return "is not there", False
    if isinstance(error, PermissionError) or status in (401, 403):
        return f"access is denied (HTTP {status or 403}): see the credentials in storage=", False
    if "NoCredentialsError" in kinds:
        return (
            "there are no credentials for it: give storage={'key': ..., 'secret': ...}, or "
            "storage={'anon': True} for what is public",
            False,
        )
    name = type(error).__name__
    if kinds & _PASSING or isinstance(error, ConnectionError | EOFError):
        return f"the connection broke ({name})", True
    if status is not None:
        return f"HTTP {status}", status >= 500 or status in _PASSING_STATUSES
    return f"cannot be read ({name})", isinstance(error, OSError) and error.errno is not None


def _status(error: BaseException | None) -> int | None:
    """The HTTP status that an exception, or its cause, tells of."""
    for _ in range(3):
        for name in ("status", "code", "status_code"):
            value = getattr(error, name, None)
            if isinstance(value, int) and 100 <= value < 600:
                return value
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(value, int):
                return value
        error = getattr(error, "__cause__", None)
    return None
