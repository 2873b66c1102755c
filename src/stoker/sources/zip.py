"""Images in zip archives, each a sample, their folders the classes: as the folder that was packed.

An archive ends with a directory of its members: names, sizes, CRC-32s, methods of compression, and
where the header of each lies. A header is, little-endian, at its byte 26 the length of the member's
name and at byte 28 that of its extra field, uint16 each, and 30 bytes long before those two; then
the content follows. (PKWARE, APPNOTE.TXT.) The directory is read by Python's `zipfile`.

Members that are stored are read in place. Those that are deflated are expanded into an archive of
stored ones in the cache folder, once, and their sizes and CRCs checked meanwhile. Archives that
would grow out of proportion, and members that overlap, are refused. Names are only names: nothing
is written under them. Folders, names with a dot in front, and ``__MACOSX`` are no samples.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO

from stoker.errors import SourceError
from stoker.sources.expanded import once
from stoker.sources.shards import (
    WRITTEN_SUFFIXES,
    Cache,
    Found,
    Index,
    Sharded,
    indexes,
    paths_of,
    some,
)

_HEADER = struct.Struct("<4s22xHH")
_SIGNATURE = b"PK\3\4"
_SIGNATURES = (_SIGNATURE, b"PK\5\6", b"PK\7\x08")
_DEFLATED = struct.Struct("<QI")
_ENCRYPTED, _UTF_8 = 1, 1 << 11
_LARGEST_BYTES = 1 << 30
_PIECE_BYTES = 1 << 20
_MOST_GROWTH = 100
_BAD = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, EOFError)

Label = Mapping[str, Any] | str | None


class Zip(Sharded):
    """A map-style dataset of the images in zip archives, at random access.

    Samples are in the order of their folders and names, archive by archive.

    Args:
        shards: paths of archives, or one path; ``{000000..000099}`` and ``{a,b}`` stand for
            several, ``*``, ``?`` and ``[...]`` for what is there.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        label: what labels are: ``"folder"``, the folder that an image lies in; a mapping of names
            in the archive to labels; None for no labels. ``"auto"`` is ``"folder"`` where images
            lie in several, else None.
        classes: names of classes, each at its label, for labels that are names; left out, all
            names, sorted.
        damaged: ``"raise"``, or ``"skip"`` to leave out, with a warning, what cannot be read.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.
        cache: keep the archives' indexes between runs, ``"beside"`` them if asked; see Note [Kept
            indexes].
        checksums: compare all members with their CRCs, which reads everything.

    Raises:
        SourceError: an archive is absent, damaged, encrypted, grows out of proportion, or has no
            image.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        label: Label = "auto",
        classes: Sequence[str] | None = None,
        damaged: str = "raise",
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
        cache: Cache = True,
        checksums: bool = False,
    ) -> None:
        if isinstance(label, str) and label not in ("auto", "folder"):
            raise ValueError(f"label must be 'auto', 'folder', a mapping or None, got {label!r}")
        given = paths_of(shards)
        judge = _scan_checked if checksums else scan
        read, told = indexes(given, judge, "zip", damaged, cache and not checksums)
        paths = list(given)
        found = Found(told=told)
        folders: list[str] = []
        for number, (path, index) in enumerate(zip(given, read, strict=True)):
            samples: list[tuple[str, str, str, int, int, int]] = []
            deflated = []
            for name, begin, length, text in index.entries():
                if text is None:
                    samples.append((*_split(name), name, number, begin, length))
                else:
                    deflated.append((name, begin, length, *_DEFLATED.unpack(text)))
            if deflated:
                made = once(path, "zip", partial(_expand, path, deflated))
                ((inside,), _) = indexes([made], scan, "zip", "raise", bool(cache))
                entries = list(inside.entries())
                lost = sorted({name for name, *_ in deflated} - {name for name, *_ in entries})
                if lost:
                    what = f"{some(lost)} cannot be expanded: other sizes or CRCs than it says"
                    if damaged == "raise":
                        raise SourceError(path, f"{what}; damaged='skip' keeps the others")
                    found.told.append(f"{path}: {what}; left out")
                samples += [
                    (*_split(name), name, len(paths), begin, length)
                    for name, begin, length, _ in entries
                ]
                paths.append(made)
            for folder, _, name, shard, begin, length in sorted(samples):
                value = label.get(name) if isinstance(label, Mapping) else None
                found.add(name, shard, begin, length, value)
                folders.append(folder.rpartition("/")[2])
        if not found.names:
            raise SourceError(given[0], "; ".join(found.told) or "has no image")
        if label == "folder" or (label == "auto" and len(set(folders)) > 1):
            found.labels = [folder or None for folder in folders]
            if classes is None:  # names, even if they are digits, as of a folder of classes
                classes = sorted({folder for folder in folders if folder})
        super().__init__(
            paths, found, classes, transform, target_transform, exif, max_pixels, max_bytes
        )


def recognises(_: str, head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a zip archive."""
    return head.startswith(_SIGNATURES)


def _split(name: str) -> tuple[str, str]:
    """Folder and last part of a name; some programs write backslashes."""
    plain = name if "/" in name else name.replace("\\", "/")
    folder, _, base = plain.removeprefix("./").rpartition("/")
    return folder, base


def _is_image(name: str) -> bool:
    folder, base = _split(name)
    parts = [*folder.split("/"), base]
    return base.lower().endswith(WRITTEN_SUFFIXES) and not any(
        part == "__MACOSX" or (part.startswith(".") and part not in (".", "..")) for part in parts
    )


def _scan_checked(path: str) -> Index:
    """As ``scan``, with the CRCs of members that are stored."""
    return scan(path, checksums=True)


def scan(path: str, checksums: bool = False) -> Index:
    """Reads the directory of an archive; see `shards.Index`: entries are images.

    The text of one that is deflated is its size and CRC, uint64 and uint32, and its bytes are the
    compressed ones; one that is stored has no text.

    Raises:
        SourceError: it cannot be read, is no zip archive, or grows out of proportion.
    """
    index, damage = Index(), list[str]()
    spans: list[tuple[int, int]] = []
    total = 0
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # Of two members with one name the last counts, as where an archive is unpacked.
            members = {info.filename: info for info in _members(file)}
            for name, info in members.items():
                if not _is_image(name):
                    continue
                try:
                    begin = _begin(file.fileno(), info, size)
                    if checksums and info.compress_type == zipfile.ZIP_STORED:
                        _check(file.fileno(), begin, info)
                except _Damaged as reason:
                    damage.append(f"{name!r} {reason}")
                    continue
                text = None
                if info.compress_type == zipfile.ZIP_DEFLATED:
                    text = _DEFLATED.pack(info.file_size, info.CRC)
                    total += info.file_size
                spans.append((begin, begin + info.compress_size))
                index.add(os.fsencode(name), begin, info.compress_size, text)
    except _BAD as error:
        raise SourceError(
            path, f"is truncated or damaged: {error}; 'zip -FF' may repair it"
        ) from error
    except OSError as error:
        raise SourceError(path, error.strerror or str(error)) from error
    if total > max(_LARGEST_BYTES, _MOST_GROWTH * size):
        raise SourceError(
            path, f"would grow from {size:,} to {total:,} bytes, which is out of proportion"
        )
    end = 0
    for begin, stop in sorted(spans):
        if begin < end:
            raise SourceError(path, f"has members that overlap at byte {begin:,}")
        end = stop
    index.damage = "; ".join(damage[:3]) + "; ..." * (len(damage) > 3)
    return index


def _members(file: BinaryIO) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(file) as archive:
        return archive.infolist()


class _Damaged(Exception):  # noqa: N818  not an error yet: the other members may be wanted
    """Why a member cannot be read."""


def _begin(fd: int, info: zipfile.ZipInfo, size: int) -> int:
    """Where a member's content begins, in an archive of ``size`` bytes."""
    if info.flag_bits & _ENCRYPTED:
        raise _Damaged("is encrypted: unpack the archive first")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise _Damaged(f"is compressed by method {info.compress_type}: only deflate is read")
    if info.file_size > _LARGEST_BYTES:
        raise _Damaged(f"has {info.file_size:,} bytes, more than {_LARGEST_BYTES:,}")
    if info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size:
        raise _Damaged("has two sizes")
    if not 0 <= info.header_offset <= size - _HEADER.size:
        raise _Damaged("lies outside")
    header = os.pread(fd, _HEADER.size, info.header_offset)
    if len(header) < _HEADER.size:  # it has shrunk meanwhile
        raise _Damaged("lies outside")
    signature, name_bytes, extra_bytes = _HEADER.unpack_from(header)
    begin: int = info.header_offset + _HEADER.size + name_bytes + extra_bytes
    name = os.pread(fd, name_bytes, info.header_offset + _HEADER.size)
    encoding = "utf-8" if info.flag_bits & _UTF_8 else "cp437"
    if signature != _SIGNATURE or name.decode(encoding, "replace") != info.orig_filename:
        raise _Damaged("has a damaged header")
    if begin + info.compress_size > size:
        raise _Damaged("lies outside")
    return begin


def _check(fd: int, begin: int, info: zipfile.ZipInfo) -> None:
    """Compares a stored member with its CRC."""
    crc = 0
    for at in range(begin, begin + info.compress_size, _PIECE_BYTES):
        piece = os.pread(fd, min(_PIECE_BYTES, begin + info.compress_size - at), at)
        crc = zlib.crc32(piece, crc)
    if crc != info.CRC:
        raise _Damaged("has a wrong CRC")


def _expand(path: str, members: list[tuple[str, int, int, int, int]], out: BinaryIO) -> None:
    """Writes an archive of the deflated members of another, without those that are damaged."""
    with open(path, "rb") as file, zipfile.ZipFile(out, "w") as archive:
        for name, content in _inflated(file, members):
            archive.writestr(zipfile.ZipInfo(name), content)


def _inflated(
    file: BinaryIO, members: list[tuple[str, int, int, int, int]]
) -> Iterator[tuple[str, bytes]]:
    for name, begin, length, size, crc in members:
        file.seek(begin)
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            content = stream.decompress(file.read(length), size + 1)
        except zlib.error:
            continue
        if len(content) == size and stream.eof and zlib.crc32(content) == crc:
            yield name, content
