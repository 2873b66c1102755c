"""The members of a tar: where each begins, and how long it is.

A shard is a plain tar (POSIX 1003.1-1988 and its ustar, pax and GNU extensions): blocks of 512
bytes, each member a header block, which holds its name, its size in octal or base 256, its type and
a checksum, and then its content, padded to whole blocks. A pax header (type ``x``) or a GNU long
name (type ``L``) before a member replaces its name and size. Two blocks of zeros end the archive.
Sparse and multi-volume members are refused, and so are compressed archives, which cannot be read at
random.

Note [Kept indexes]
    The members of a shard are kept in the cache folder, under a hash of the shard's path, and serve
    as long as the shard has its size and time of change. That of a shard that was changed in the
    two seconds before isn't kept, as a further change could leave the time as it is. On disk it
    is, little-endian: ``_MAGIC``; int64 size and time of the shard in ns, number of members, bytes
    of names, bytes of contents; where each member begins and how long it is, int64; where each name
    ends, uint32; the names; the contents of members of up to ``_SMALL`` bytes, one after the other;
    a BLAKE2b of 16 bytes over all that.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from stoker import cache as kept
from stoker.errors import SourceError

_BLOCK = 512
_MAGIC = b"stoker tar index 1"
_HEAD = struct.Struct("<5q")
_DIGEST_BYTES = 16
_SMALL = 64
_LARGEST_NAME = 1 << 20
_SETTLED_SECONDS = 2

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


@dataclass
class Index:
    """The members of a shard that are files.

    Attributes:
        begins, lengths: of their contents in the shard, in bytes.
        names: one after the other.
        ends: where each name ends.
        contents: those of members of up to `_SMALL` bytes, one after the other.
        damage: what cannot be read; empty where nothing is wrong.
    """

    begins: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("I"))
    names: bytearray = field(default_factory=bytearray)
    contents: bytearray = field(default_factory=bytearray)
    damage: str = ""

    def add(self, name: bytes, begin: int, length: int, content: bytes) -> None:
        """Adds a member."""
        self.begins.append(begin)
        self.lengths.append(length)
        self.names += name
        self.ends.append(len(self.names))
        self.contents += content

    def members(self) -> Iterator[tuple[str, int, int, bytes | None]]:
        """Name, begin, length and, of small ones, content of each member."""
        at = 0
        bounds = pairwise([0, *self.ends])
        for (start, end), begin, length in zip(bounds, self.begins, self.lengths, strict=True):
            content = None
            if length <= _SMALL:
                content = bytes(self.contents[at : at + length])
                at += length
            yield os.fsdecode(bytes(self.names[start:end])), begin, length, content


class _Damaged(Exception):  # noqa: N818  not an error yet: the other members may be wanted
    """Why a member cannot be read."""


class _Unfit(Exception):  # noqa: N818  becomes a SourceError, with the path
    """Why a file is no shard that can be read."""


def scan(path: str) -> Index:
    """Reads the headers of a shard.

    Raises:
        SourceError: it cannot be read, is no tar, or one that cannot be read at random.
    """
    index, damage = Index(), list[str]()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _Unfit("is no file")
            for name, begin, length in _members(fd, status.st_size, damage):
                content = os.pread(fd, length, begin) if length <= _SMALL else b""
                index.add(name, begin, length, content)
        finally:
            os.close(fd)
    except _Unfit as unfit:
        raise SourceError(path, str(unfit)) from None
    except OSError as error:
        raise SourceError(path, error.strerror or str(error)) from error
    index.damage = "; ".join(damage[:3]) + "; ..." * (len(damage) > 3)
    return index


def _members(fd: int, size: int, damage: list[str]) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin and length of each file in a tar of ``size`` bytes.

    What cannot be read is told in ``damage``; after a damaged header the next sound one is sought.
    """
    if size == 0:
        raise _Unfit("is empty")
    at = 0
    long = _Long()
    while at + _BLOCK <= size:
        header = os.pread(fd, _BLOCK, at)
        if header.count(0) == _BLOCK:
            return
        try:
            if not _checks(header):
                if at == 0:
                    raise _Unfit(_other_format(header))
                raise _Damaged(f"has a damaged header at byte {at:,}")
            kind = header[156:157]
            length = _number(header[124:136])
            if long.size is not None and kind not in b"xg":
                length = long.size
            begin = at + _BLOCK
            if begin + length > size:
                damage.append(f"is truncated in the member at byte {at:,}")
                return
            if kind in b"xL":
                if length > _LARGEST_NAME:
                    raise _Damaged(f"has a name of {length:,} bytes at byte {at:,}")
                long.read(kind, os.pread(fd, length, begin))
            elif kind in b"SM":
                raise _Unfit("has sparse or split members: write it anew with plain tar")
            elif kind not in b"gK":
                name = long.name or _name(header)
                long = _Long()
                if kind in b"0\0007" and not name.endswith(b"/"):
                    yield name, begin, length
        except _Damaged as reason:
            damage.append(str(reason))
            at = _next_header(fd, at + _BLOCK, size)
            long = _Long()
            continue
        at = begin + -(-length // _BLOCK) * _BLOCK
    if at != size:
        damage.append(f"is truncated at byte {min(at, size):,}")


def _next_header(fd: int, at: int, size: int) -> int:
    """Where the next sound header with a mark of its format is; ``size`` where there is none."""
    while at + _BLOCK <= size:
        header = os.pread(fd, _BLOCK, at)
        if header[257:262] == b"ustar" and _checks(header):
            return at
        at += _BLOCK
    return size


@dataclass
class _Long:
    """What an extended header says of the member after it."""

    name: bytes | None = None
    size: int | None = None

    def read(self, kind: bytes, text: bytes) -> None:
        """Takes over a GNU long name or a pax header."""
        if kind == b"L":
            self.name = text.partition(b"\0")[0]
            return
        while text:
            length, blank, _ = text.partition(b" ")
            if not blank or not length.isdigit() or not len(length) < int(length[:9]) <= len(text):
                raise _Damaged("has a damaged pax header")
            record, text = text[: int(length)], text[int(length) :]
            key, _, value = record[len(length) + 1 : -1].partition(b"=")
            if key == b"path":
                self.name = value
            elif key == b"size" and value.isdigit() and len(value) < 19:
                self.size = int(value)
            elif key.startswith(b"GNU.sparse."):
                raise _Unfit("has sparse members: write it anew with plain tar")


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if header[257:263] == b"ustar\0" and prefix else name


def _checks(header: bytes) -> bool:
    """Whether the checksum in a header is right; some old programs took bytes for signed."""
    try:
        told = _number(header[148:156])
    except _Damaged:
        return False
    rest = header[:148] + b" " * 8 + header[156:]
    total = sum(rest)
    return told == total or told == total - 256 * sum(byte > 127 for byte in rest)


def _number(text: bytes) -> int:
    if text[0] == 0x80:
        return int.from_bytes(text[1:], "big")
    digits = text.partition(b"\0")[0].strip()
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        raise _Damaged("has a header without a size") from None


def _other_format(head: bytes) -> str:
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            return f"is compressed with {name}, so it cannot be read at random: unpack it first"
    return "is no tar"


# Keeping


def index_of(path: str, cache: bool) -> Index:
    """The index of a shard, from the cache if that is still right."""
    if not cache:
        return scan(path)
    place = os.path.abspath(path)
    name = f"tar/{hashlib.blake2b(os.fsencode(place), digest_size=16).hexdigest()}"
    try:
        before = os.stat(path)
    except OSError as error:
        raise SourceError(path, error.strerror or str(error)) from error
    state = before.st_size, before.st_mtime_ns
    if (data := kept.load(name)) is not None and (index := _unpacked(data, state)) is not None:
        return index
    settled = time.time_ns() - int(_SETTLED_SECONDS * 1e9)
    index = scan(path)
    if not index.damage and before.st_mtime_ns < settled:
        kept.store(name, _packed(index, state))
    return index


def _packed(index: Index, state: tuple[int, int]) -> list[bytes]:
    """An index as Note [Kept indexes] describes it."""
    head = _HEAD.pack(*state, len(index.begins), len(index.names), len(index.contents))
    arrays = [
        np.array(values, kind).tobytes()
        for values, kind in ((index.begins, "<i8"), (index.lengths, "<i8"), (index.ends, "<u4"))
    ]
    parts = [_MAGIC, head, *arrays, bytes(index.names), bytes(index.contents)]
    digest = hashlib.blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).digest()
    return [*parts, digest]


def _unpacked(data: bytes, state: tuple[int, int]) -> Index | None:
    """The index in ``data``; None if it is not of that state, or anything about it is odd."""
    start = len(_MAGIC) + _HEAD.size
    if len(data) < start + _DIGEST_BYTES or not data.startswith(_MAGIC):
        return None
    *found, count, names, contents = _HEAD.unpack_from(data, len(_MAGIC))
    if tuple(found) != state or min(count, names, contents) < 0:
        return None
    if start + 20 * count + names + contents + _DIGEST_BYTES != len(data):
        return None
    body = data[:-_DIGEST_BYTES]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != data[-_DIGEST_BYTES:]:
        return None
    begins = np.frombuffer(data, "<i8", count, start)
    lengths = np.frombuffer(data, "<i8", count, start + 8 * count)
    ends = np.frombuffer(data, "<u4", count, start + 16 * count)
    small = lengths[lengths <= _SMALL]
    if count and not (
        begins.min() >= 0
        and lengths.min() >= 0
        and int((begins + lengths).max()) <= state[0]
        and int(begins.max()) <= state[0]
        and (ends[1:] >= ends[:-1]).all()
        and int(ends[-1]) == names
        and int(small.sum()) == contents
    ):
        return None
    at = start + 20 * count
    return Index(
        array("q", begins.astype(np.int64).tobytes()),
        array("q", lengths.astype(np.int64).tobytes()),
        array("I", ends.astype(np.uint32).tobytes()),
        bytearray(data[at : at + names]),
        bytearray(data[at + names : at + names + contents]),
    )
