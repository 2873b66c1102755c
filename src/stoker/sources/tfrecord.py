"""Images in TFRecord shards of ``tf.train.Example`` messages; no TensorFlow is needed.

A shard is records one after the other, each, little-endian: its length, uint64; the masked CRC of
those 8 bytes, uint32; its bytes; their masked CRC, uint32. The CRC is CRC-32C (Castagnoli), masked
by turning it right by 15 bits and adding 0xa282ead8. (TensorFlow, core/lib/io/record_writer.h and
core/lib/hash/crc32c.h.)

A record is a protocol buffer, ``Example{1: Features{1: map<string, Feature>}}``, of whose features
each has one list: ``1: BytesList{1: repeated bytes}``, ``2: FloatList``, ``3: Int64List{1: repeated
varint}``. (TensorFlow, core/example/feature.proto.) Where an image's bytes lie in it is what the
index holds, so that only they are read later. All CRCs are checked when it is made.

Shards compressed with GZIP or ZLIB are expanded into the cache folder, once.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, BinaryIO

from stoker.copies import ranged
from stoker.errors import SourceError
from stoker.sources.expanded import inflate, once
from stoker.sources.protobuf import ProtobufError, Span, field, fields_of, messages_of, varint
from stoker.sources.shards import (
    Cache,
    Found,
    Index,
    Sample,
    Sharded,
    Written,
    indexes,
    paths_of,
)
from stoker.sources.shards import written as images_of

IMAGE_FEATURES = ("image/encoded", "image")
LABEL_FEATURES = ("image/class/label", "label")
_NAME_FEATURES = ("image/filename", "filename", "file_name", "image/source_id")

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_HEAD_BYTES = 4096

Label = str | Mapping[str, Any] | None


class TFRecord(Sharded):
    """A map-style dataset of the images in TFRecord shards, at random access.

    Args:
        shards: paths of shards, or one path; ``{000000..000099}`` and ``{a,b}`` stand for several,
            ``*``, ``?`` and ``[...]`` for what is there.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        image: the feature with the encoded image; left out, the first of ``IMAGE_FEATURES``.
        label: the feature with the label, one integer or text; a mapping of names to labels; None
            for no labels. ``"auto"`` is the first of ``LABEL_FEATURES``, if there is any.
        label_offset: added to labels that are integers: -1 where classes count from 1.
        classes: names of classes, each at its label, for labels that are texts; left out, all,
            sorted.
        damaged: ``"raise"``, or ``"skip"`` to leave damaged records out, with a warning.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.
        cache: keep the shards' indexes between runs, ``"beside"`` them if asked; see Note [Kept
            indexes].

    Raises:
        SourceError: a shard is absent, no TFRecord, or damaged; a record has no image.
        ImportError: the extra ``stoker[tfrecord]`` is not installed.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        image: str | None = None,
        label: Label = "auto",
        label_offset: int = 0,
        classes: Sequence[str] | None = None,
        damaged: str = "raise",
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
        cache: Cache = True,
    ) -> None:
        crc32c = _crc32c()
        given = paths_of(shards)
        paths = [_plain(path) for path in given]
        images = IMAGE_FEATURES if image is None else (image,)
        labels: tuple[str, ...] = LABEL_FEATURES if label == "auto" else ()
        if isinstance(label, str) and label != "auto":
            labels = (label,)

        def scan(path: str) -> Index:
            return _scan(path, images, labels, crc32c)

        wanted = "\0".join(["tfrecord", *images, "", *labels])
        read, told = indexes(paths, scan, wanted, damaged, cache)
        found = Found(told=told)
        for number, index in enumerate(read):
            for name, begin, length, text in index.entries():
                value: Any = None if text is None else text.decode(errors="replace")
                if isinstance(label, Mapping):
                    value = label.get(name)
                elif value is not None and value.removeprefix("-").isdecimal():
                    value = int(value) + label_offset
                found.add(name, number, begin, length, value)
        if read and not found.names and any(index.damage for index in read):
            raise SourceError(given[0], next(index.damage for index in read if index.damage))
        none = all(value is None for value in found.labels)
        if found.names and none and labels == (label,):
            raise SourceError(given[0], f"no record has one integer or text in feature {label!r}")
        super().__init__(
            paths, found, classes, transform, target_transform, exif, max_pixels, max_bytes
        )
        self.shards = given


def recognises(_: str, head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a TFRecord, perhaps a compressed one."""
    if _is_compressed(head):
        try:
            head = zlib.decompressobj(47).decompress(head, _HEAD.size)
        except zlib.error:
            return False
    return len(head) >= _HEAD.size and _fits(head[: _HEAD.size])


def _crc32c() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError as error:
        raise ImportError("TFRecord needs an extra: pip install 'stoker[tfrecord]'") from error
    value: Callable[[bytes], int] = google_crc32c.value
    return value


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@lru_cache(maxsize=1)
def _table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


def _fits(head: bytes) -> bool:
    """Whether the CRC of a record's length is right."""
    crc, table = 0xFFFFFFFF, _table()
    for byte in head[:8]:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return bool(_HEAD.unpack(head)[1] == _masked(crc ^ 0xFFFFFFFF))


# Expanding


def _is_compressed(head: bytes) -> bool:
    return head[:2] == b"\x1f\x8b" or (
        head[:1] == b"\x78" and len(head) > 1 and int.from_bytes(head[:2], "big") % 31 == 0
    )


def _plain(path: str) -> str:
    """The path of the shard or, of a compressed one, of what it was expanded to."""
    if (copies := ranged(path)) is not None:
        head = copies.read(path, 0, min(_HEAD_BYTES, copies.state_of(path)[0]))
        if _is_compressed(head) and recognises(path, head):
            raise SourceError(path, "is compressed, so it has no ranges: leave remote='ranges' out")
        return path
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise SourceError(path, "is no file")
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
            if not _is_compressed(head) or not recognises(path, head):
                return path
            file.seek(0)
            return once(path, "", lambda out: inflate(file, out))
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, error.strerror or str(error)) from error


# Records


class _Damaged(Exception):  # noqa: N818  not an error yet: the other records may be wanted
    """Why a record cannot be used."""


def _scan(
    path: str, images: Sequence[str], labels: Sequence[str], crc32c: Callable[[bytes], int]
) -> Index:
    """Reads the records of a shard; see `shards.Index`: the text of an entry is its label."""
    index, damage = Index(), list[str]()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            at = number = 0
            while at < size:
                file.seek(at)
                head = file.read(_HEAD.size)
                if len(head) < _HEAD.size or not _fits(head):
                    if at == 0:
                        raise SourceError(path, "is no TFRecord")
                    what = "truncated" if len(head) < _HEAD.size else "damaged"
                    damage.append(f"is {what} at byte {at:,}, after {number:,} records")
                    break
                length = _HEAD.unpack(head)[0]
                begin = at + _HEAD.size
                at = begin + length + _CRC.size
                if at > size:
                    damage.append(f"is truncated in record {number:,}")
                    break
                data = file.read(length + _CRC.size)
                if len(data) < length + _CRC.size:  # it has shrunk meanwhile
                    damage.append(f"is truncated in record {number:,}")
                    break
                record = data[:length]
                try:
                    if _CRC.unpack(data[length:])[0] != _masked(crc32c(record)):
                        raise _Damaged("has a wrong CRC")
                    name, span, text = _read(record, images, labels)
                    name = name or b"%d" % number
                    index.add(name, begin + span[0], span[1] - span[0], text)
                except _Damaged as reason:
                    damage.append(f"record {number:,} {reason}")
                except ProtobufError:
                    damage.append(f"record {number:,} is no tf.train.Example")
                number += 1
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, error.strerror or str(error)) from error
    index.damage = "; ".join(damage[:3]) + "; ..." * (len(damage) > 3)
    return index


def _read(
    record: bytes, images: Sequence[str], labels: Sequence[str]
) -> tuple[bytes | None, Span, bytes | None]:
    """Name, place of the image's bytes, and label as a text, of an Example."""
    features = _features(record)
    image = next((features[name] for name in images if name in features), None)
    span = None if image is None else _single(record, image)
    if span is None or not isinstance(span, tuple):
        there = ", ".join(sorted(features)[:10]) or "none"
        raise _Damaged(f"has no image in a feature {' or '.join(images)}; its features: {there}")
    name = text = None
    for wanted in _NAME_FEATURES:
        value = _single(record, features[wanted]) if wanted in features else None
        if isinstance(value, tuple):
            name = record[slice(*value)]
            break
    for wanted in labels:
        if wanted in features:
            value = _single(record, features[wanted])
            text = record[slice(*value)] if isinstance(value, tuple) else None
            text = b"%d" % value if isinstance(value, int) else text
            break
    return name, span, text


def _features(record: bytes) -> dict[str, Span]:
    """Where each feature of an Example lies."""
    found: dict[str, Span] = {}
    for features in messages_of(record, (0, len(record)), 1):
        for entry in messages_of(record, features, 1):
            keys = list(messages_of(record, entry, 1))
            values = list(messages_of(record, entry, 2))
            if keys and values:
                found[record[slice(*keys[-1])].decode(errors="replace")] = values[-1]
    return found


def _single(record: bytes, feature: Span) -> Span | int | None:
    """The one value of a feature: where its bytes lie, or an integer; None of others."""
    for values in messages_of(record, feature, 1):
        found = list(messages_of(record, values, 1))
        return found[0] if len(found) == 1 else None
    for values in messages_of(record, feature, 3):
        numbers: list[int] = []
        for number, kind, start, end in fields_of(record, values):
            if number == 1 and kind == 0:
                numbers.append(start)
            elif number == 1 and kind == 2:
                while start < end:
                    value, start = varint(record, start, end)
                    numbers.append(value)
        if len(numbers) != 1:
            return None
        return numbers[0] - (1 << 64) if numbers[0] >= 1 << 63 else numbers[0]
    return None


# Writing


def write(file: BinaryIO, samples: Iterator[Sample]) -> None:
    """Writes a shard, with the names of features that ImageNet's shards have."""
    crc32c = _crc32c()
    for sample in samples:
        features: dict[str, bytes | int] = {
            "image/encoded": sample.content,
            "image/filename": os.fsencode(sample.name),
        }
        if sample.label != -1:
            features["image/class/label"] = sample.label
        if sample.class_name:
            features["image/class/text"] = sample.class_name.encode()
        entries = b"".join(
            field(1, field(1, name.encode()) + field(2, _feature(value)))
            for name, value in features.items()
        )
        record = field(1, entries)
        length = struct.pack("<Q", len(record))
        file.write(length + _CRC.pack(_masked(crc32c(length))))
        file.write(record)
        file.write(_CRC.pack(_masked(crc32c(record))))


def _feature(value: bytes | int) -> bytes:
    return field(1 if isinstance(value, bytes) else 3, field(1, value))


def written(path: str) -> Iterator[Written]:
    """The images in a shard that ``write`` wrote.

    Raises:
        SourceError: it is damaged.
    """
    return images_of(path, _scan(path, IMAGE_FEATURES[:1], LABEL_FEATURES[:1], _crc32c()))
