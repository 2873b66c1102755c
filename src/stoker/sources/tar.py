"""Images in tar shards, as WebDataset lays them out: members that share a key are one sample.

The key of a member is its path up to the first dot of its last part, without a leading ``./``; what
follows that dot, in lower case, is the field: ``a/0001.left.jpg`` is field ``left.jpg`` of sample
``a/0001``. A sample's members may lie anywhere in its shard. Members without a field (``README``,
``.hidden``), folders and links are no samples' members.

A shard is a plain tar (POSIX 1003.1-1988 and its ustar, pax and GNU extensions): blocks of 512
bytes, each member a header block, which holds its name, its size in octal or base 256, its type and
a checksum, and then its content, padded to whole blocks. A pax header (type ``x``) or a GNU long
name (type ``L``) before a member replaces its name and size. Two blocks of zeros end the archive.
Sparse and multi-volume members are refused, and so are compressed archives, which cannot be read at
random.
"""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from stoker.copies import at_hand
from stoker.errors import SourceError
from stoker.sources.shards import (
    WRITTEN_SUFFIXES,
    Cache,
    Found,
    Index,
    Sample,
    Sharded,
    Written,
    indexes,
    paths_of,
    some,
)

_BLOCK = 512
_SMALL = 64
_LARGEST_NAME = 1 << 20

_IMAGE_FIELDS = frozenset(suffix.removeprefix(".") for suffix in WRITTEN_SUFFIXES)
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}

Label = str | Mapping[str, Any] | None


class Tar(Sharded):
    """A map-style dataset of the images in tar shards, at random access.

    Args:
        shards: paths of shards, or one path; ``{000000..000099}`` and ``{a,b}`` stand for several,
            ``*``, ``?`` and ``[...]`` for what is there.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        image: the field of the images, such as ``"left.jpg"``. Left out: the field whose name is
            that of an image format; of several in a sample the shortest, with a warning.
        label: what labels are: the name of a field of texts, such as ``"cls"``; ``"json:KEY"``, a
            key of the field ``json``; ``"folder"``, the folder that an image lies in; a mapping of
            keys to labels; None for no labels. ``"auto"`` is ``"cls"`` where there is such a field,
            else ``"folder"`` where images lie in several, else None.
        classes: names of classes, each at its label, for labels that are names; left out, all
            names, sorted.
        damaged: ``"raise"``, or ``"skip"`` to leave out, with a warning, what of a damaged shard
            cannot be read.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.
        cache: keep the shards' indexes between runs, ``"beside"`` them if asked; see Note [Kept
            indexes].

    Attributes:
        shards: the shards' paths.
        classes: names of the classes, each at its label; none where labels are integers.
        targets: the labels; -1 where a sample has none.

    Raises:
        SourceError: a shard is absent, no tar, compressed or damaged; there is no image; a label
            cannot be read.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        image: str | None = None,
        label: Label = "auto",
        classes: Sequence[str] | None = None,
        damaged: str = "raise",
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
        cache: Cache = True,
    ) -> None:
        paths = paths_of(shards)
        found, told = indexes(paths, scan, "tar", damaged, cache)
        samples = _Samples(image, label)
        for number, (path, index) in enumerate(zip(paths, found, strict=True)):
            samples.add(number, path, index)
        super().__init__(
            paths,
            samples.found(paths[0], told),
            classes,
            transform,
            target_transform,
            exif,
            max_pixels,
            max_bytes,
        )


# From members to samples


def split(name: str) -> tuple[str, str] | None:
    """Key and field of a member; None where it has none."""
    while name.startswith("./"):
        name = name[2:]
    folder, slash, base = name.rpartition("/")
    stem, dot, kind = base.partition(".")
    return (folder + slash + stem, kind.lower()) if stem and dot and kind else None


class _Samples:
    """Members, gathered to samples."""

    def __init__(self, image: str | None, label: Label) -> None:
        self.image, self.label = image, label
        self._found = Found()
        self._folders: list[str] = []
        self._fields: set[str] = set()
        self._without: list[str] = []
        self._several: list[str] = []

    def add(self, number: int, path: str, index: Index) -> None:
        """Adds the samples of a shard."""
        samples: dict[str, dict[str, tuple[str, int, int, bytes | None]]] = {}
        for member in index.entries():
            key_and_field = split(member[0])
            if key_and_field is not None:
                key, kind = key_and_field
                # Of two members with one name the last counts, as where a tar is unpacked.
                samples.setdefault(key, {})[kind] = member
                self._fields.add(kind)
        for key, fields in samples.items():
            chosen = self._choose(key, fields)
            if chosen is None:
                self._without.append(key)
                continue
            name, begin, length, _ = fields[chosen]
            self._found.add(name, number, begin, length, self._text(path, key, fields))
            self._folders.append(key.rpartition("/")[0].rpartition("/")[2])

    def _choose(self, key: str, fields: Mapping[str, object]) -> str | None:
        if self.image is not None:
            return self.image if self.image in fields else None
        images = [kind for kind in fields if kind.rpartition(".")[2] in _IMAGE_FIELDS]
        if len(images) > 1:
            self._several.append(f"{key} ({', '.join(images)})")
        return min(images, key=len, default=None)

    def _text(
        self, path: str, key: str, fields: Mapping[str, tuple[str, int, int, bytes | None]]
    ) -> Any:
        """The label of a sample as its shard tells it; None where it has none."""
        label = self.label
        if label is None or label == "folder":
            return None
        if isinstance(label, Mapping):
            return label.get(key)
        kind, _, entry = ("cls" if label == "auto" else label).partition(":")
        if kind not in fields:
            return None
        _, begin, length, content = fields[kind]
        if content is None:
            with at_hand(path), open(path, "rb") as shard:
                shard.seek(begin)
                content = shard.read(length)
        try:
            text = content.decode().strip()
            value = json.loads(text)[entry] if entry else text
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise SourceError(path, f"label of sample {key}: {kind}: {what}") from error
        if not isinstance(value, str | int | None):
            raise SourceError(path, f"label of sample {key}: a {type(value).__name__}")
        return value

    def found(self, path: str, told: list[str]) -> Found:
        """All samples; ``path`` is that of the first shard."""
        found = self._found
        found.told += told
        if not found.names and self._fields:
            fields = ", ".join(sorted(self._fields)[:10])
            wanted = f"no field {self.image}" if self.image else "no image"
            raise SourceError(path, f"{wanted} in any sample; there are: {fields}")
        if self.label == "folder" or (
            self.label == "auto" and "cls" not in self._fields and len(set(self._folders)) > 1
        ):
            found.labels = [folder or None for folder in self._folders]
        if (
            self.label not in ("auto", None)
            and found.names
            and not any(label is not None for label in found.labels)
        ):
            raise SourceError(path, f"no sample has a label {self.label!r}")
        if self._without and found.names:
            found.told.append(f"{some(self._without)} without an image: left out")
        if self._several:
            found.told.append(
                f"{some(self._several)} with several images: the one of the shortest field is "
                "taken; image= chooses"
            )
        return found


# The members


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
                content = os.pread(fd, length, begin) if length <= _SMALL else None
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
        if len(header) < _BLOCK:  # it has shrunk meanwhile
            damage.append(f"is truncated at byte {at:,}")
            return
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
        if len(header) == _BLOCK and header[257:262] == b"ustar" and _checks(header):
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


# Writing


def member_name(sample: Sample) -> str:
    """The name of a sample's image in its shard."""
    return f"{sample.position:09}{sample.suffix}"


def write(file: BinaryIO, samples: Iterator[Sample]) -> None:
    """Writes a shard: of each sample the image, its label, and where it came from as JSON."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as out:
        for sample in samples:
            key = f"{sample.position:09}"
            origin = {"name": sample.name} | (
                {"class": sample.class_name} if sample.class_name else {}
            )
            members = {member_name(sample): sample.content}
            if sample.label != -1:
                members[f"{key}.cls"] = b"%d" % sample.label
            members[f"{key}.json"] = json.dumps(origin).encode()
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                out.addfile(info, io.BytesIO(content))


def written(path: str) -> Iterator[Written]:
    """The images in a shard that ``write`` wrote.

    Raises:
        SourceError: it is damaged.
    """
    index = scan(path)
    if index.damage:
        raise SourceError(path, index.damage)
    labels, images = {}, []
    for name, begin, length, text in index.entries():
        stem, suffix = os.path.splitext(name)
        if suffix == ".cls":
            labels[stem] = (text or b"").decode(errors="replace")
        elif suffix != ".json":
            images.append((stem, name, begin, length))
    return (
        Written(name, path, begin, length, labels.get(stem, "-1"))
        for stem, name, begin, length in images
    )
