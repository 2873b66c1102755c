"""Images in an LMDB environment, found without LMDB: its pages are read once, its values by offset.

An environment is a folder with a file ``data.mdb``, or that file alone. It is pages of equal size,
little-endian: ``number u64, pad u16, flags u16, lower u16, upper u16``, or a count u32 in place of
the last two. Pages 0 and 1 are meta pages (flag 8), of which that with the greater transaction
counts: ``magic u32, version u32, address u64, map size u64``, two databases of 48 bytes (free pages
and main: ``pad u32, flags u16, depth u16``, four counts u64, ``root u64``), ``last page u64,
transaction u64``; the pad of the first database is the page size. Branch pages (flag 1) and leaf
pages (flag 2) hold offsets u16 of nodes: ``low u16, high u16, flags u16, key size u16``, the key.
In a branch the first three make the child's page number; in a leaf the first two make the value's
size, and the value follows the key or, with flag 1, the number of the first of its own pages (flag
4). (LMDB 0.9, mdb.c: MDB_page, MDB_meta, MDB_db, MDB_node.)

A file shorter than its last page is refused before a page is read, and nothing is mapped into
memory, so a damaged environment is an error and never a signal. Nothing is locked: the environment
must not be written to while it is read.

Values are encoded images; or pickled tuples or lists of an encoded image and a label, read without
running anything (`stoker.sources.pickled`); or Caffe's ``Datum`` messages with an encoded image,
or with pixels, uint8 in the planes blue, green and red, or one of gray. Pixels are written into the
cache folder once: Note [Raw pixels] in `stoker.sources.expanded`. Where keys are ``image-...``, the
label is the value of ``label-...``. Keys that are all numbers count in the order of the numbers,
others in that of their bytes.

Written are ``image-000000001`` and so on, ``label-000000001`` where there is a label, and
``num-samples``: the layout of text recognition's data sets.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.sources import pickled
from stoker.sources.expanded import DamagedError, images
from stoker.sources.protobuf import ProtobufError, fields_of
from stoker.sources.shards import Cache, Found, Index, Sample, Sharded, Written, indexes
from stoker.sources.shards import written as images_of

_PAGE = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQ")
_DATABASE = struct.Struct("<IHHQQQQQ")
_NODE = struct.Struct("<HHHH")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_NONE = (1 << 64) - 1
_BRANCH, _LEAF, _OVERFLOW, _METAPAGE = 1, 2, 4, 8
_BIG, _SUB, _DUPLICATES = 1, 2, 4
_PAGE_SIZES = tuple(1 << shift for shift in range(8, 17))
_DEEPEST = 64
_LARGEST_LABEL = 4096

_IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*")

Label = Mapping[str, Any] | str | None


class LMDB(Sharded):
    """A map-style dataset of the images in an LMDB environment, at random access.

    Args:
        path: the environment's folder, or its file.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        label: a mapping of keys to labels, or None for no labels; ``"auto"`` takes the labels that
            are in the environment.
        classes: names of classes, each at its label, for labels that are texts; left out, all,
            sorted.
        damaged: ``"raise"``, or ``"skip"`` to leave damaged values out, with a warning.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.
        cache: keep the index between runs, ``"beside"`` it if asked; see Note [Kept indexes].

    Raises:
        SourceError: it is absent, no LMDB environment, truncated, or has no images.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
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
    ) -> None:
        if isinstance(label, str) and label != "auto":
            raise ValueError(f"label must be 'auto', a mapping or None, got {label!r}")
        file = file_of(os.path.expanduser(os.fspath(path)))
        (index,), told = indexes([file], scan, "lmdb 2", damaged, cache)
        found = Found(told=told)
        raw: dict[int, tuple[int, int, int]] = {}
        for name, begin, length, text in index.entries():
            shape, text = _shape(text, length)
            if shape is not None:
                raw[len(found.names)] = shape
            value: Any = None if text is None else text.decode(errors="replace").strip()
            if not isinstance(label, str):
                value = None if label is None else label.get(name)
            found.add(name, 0, begin, length, value)
        if not found.names:
            raise SourceError(file, "has no image in any value")
        shards = [file]
        if raw:
            shards.append(_expand(file, found, raw))
        super().__init__(
            shards, found, classes, transform, target_transform, exif, max_pixels, max_bytes
        )


def file_of(path: str) -> str:
    """The file of an environment, which may be given as a folder."""
    return os.path.join(path, "data.mdb") if os.path.isdir(path) else path


def recognises(path: str, head: bytes) -> bool:
    """Whether a folder, or a file that begins with ``head``, is an LMDB environment."""
    if os.path.isdir(path):
        try:
            with open(file_of(path), "rb") as file:
                head = file.read(_PAGE.size + _META.size)
        except OSError:
            return False
    return _has_meta(head)


def _has_meta(head: bytes) -> bool:
    """Whether a page that begins with ``head`` is a meta page."""
    if len(head) < _PAGE.size + _META.size:
        return False
    flags = _PAGE.unpack_from(head)[2]
    magic, version, *_ = _META.unpack_from(head, _PAGE.size)
    return bool(flags & _METAPAGE and magic == _MAGIC and version == _VERSION)


def scan(path: str) -> Index:
    """Reads an environment; see `shards.Index`: the text of an entry is its label.

    Raises:
        SourceError: it cannot be read, is none, is truncated, or its tree is damaged.
    """
    index, damage = Index(), list[str]()
    try:
        with open(path, "rb", buffering=0) as file:
            pages = _Pages(file.fileno(), os.fstat(file.fileno()).st_size)
            values = list(pages.values())
            images: list[tuple[bytes, int, int, bytes | None]] = []
            labels = {
                key[len(b"label-") :]: pages.read(begin, min(length, _LARGEST_LABEL))
                for key, begin, length in values
                if key.startswith(b"label-")
            }
            for key, begin, length in values:
                try:
                    span, text = _image(pages, begin, length)
                except _Damaged as reason:
                    damage.append(f"value of {os.fsdecode(key)!r}: {reason}")
                    continue
                if span is not None:
                    number = key.removeprefix(b"image-")
                    if number != key:
                        text = labels.get(number, text)
                    images.append((key, *span, text))
            if all(key.isdigit() and len(key) < 20 for key, *_ in images):
                images.sort(key=lambda image: int(image[0]))
            for image in images:
                index.add(*image)
    except _Unfit as unfit:
        raise SourceError(path, str(unfit)) from None
    except OSError as error:
        raise SourceError(path, error.strerror or str(error)) from error
    index.damage = "; ".join(damage[:3]) + "; ..." * (len(damage) > 3)
    return index


class _Unfit(Exception):  # noqa: N818  becomes a SourceError, with the path
    """Why a file is no environment that can be read."""


class _Damaged(Exception):  # noqa: N818  not an error yet: the other values may be wanted
    """Why a value cannot be used."""


# Pages


@dataclass
class _Pages:
    """The pages of an open file of ``size`` bytes."""

    fd: int
    size: int

    def __post_init__(self) -> None:
        head = self.read(0, 1 << 17)
        if not _has_meta(head):
            raise _Unfit("is no LMDB environment")
        first = _PAGE.size + _META.size
        if len(head) < first + 2 * _DATABASE.size + 16:
            raise _Unfit("is truncated in its first page")
        self.page_size = _DATABASE.unpack_from(head, first)[0]
        if self.page_size not in _PAGE_SIZES or 2 * self.page_size > self.size:
            raise _Unfit("is truncated or damaged: its first page does not say what it should")
        metas = []
        for at in (0, self.page_size):
            if _has_meta(head[at:]) and len(head) >= at + first + 2 * _DATABASE.size + 16:
                last, transaction = struct.unpack_from("<QQ", head, at + first + 2 * _DATABASE.size)
                main = _DATABASE.unpack_from(head, at + first + _DATABASE.size)
                metas.append((transaction, last, main))
        _, last, (_, flags, _, *_, self.entries, self.root) = max(metas)
        if (last + 1) * self.page_size > self.size:
            needed = (last + 1) * self.page_size
            raise _Unfit(f"is truncated: it has {self.size:,} bytes of {needed:,}")
        if flags & _DUPLICATES:
            raise _Unfit("has several values to a key, which is not supported")
        self.last = last

    def read(self, begin: int, length: int) -> bytes:
        """Some bytes of the file; fewer at its end."""
        return os.pread(self.fd, length, begin)

    def _page(self, number: int) -> tuple[bytes, int]:
        """A branch or leaf page and its flags."""
        if not 2 <= number <= self.last:
            raise _Unfit(f"is damaged: there is no page {number:,}")
        page = self.read(number * self.page_size, self.page_size)
        if len(page) < self.page_size:
            raise _Unfit(f"is truncated in page {number:,}")
        return page, _PAGE.unpack_from(page)[2]

    def values(self) -> Iterator[tuple[bytes, int, int]]:
        """Key, begin and length of each value, in the order of the keys."""
        waiting = [] if self.root == _NONE else [(self.root, 0)]
        seen = 0
        while waiting:
            number, depth = waiting.pop()
            seen += 1
            if seen > self.last or depth > _DEEPEST:
                raise _Unfit("is damaged: its pages lead in a circle")
            page, flags = self._page(number)
            nodes = list(self._nodes(page, number))
            if flags & _BRANCH:
                children = [low | high << 16 | kind << 32 for low, high, kind, *_ in nodes]
                waiting += [(child, depth + 1) for child in reversed(children)]
            elif flags & _LEAF:
                for low, high, kind, key, at in nodes:
                    yield self._value(number, page, low | high << 16, kind, key, at)
            else:
                raise _Unfit(f"is damaged: page {number:,} is neither branch nor leaf")

    def _nodes(self, page: bytes, number: int) -> Iterator[tuple[int, int, int, bytes, int]]:
        """Low, high, flags, key of each node, and where its value is in the page."""
        lower = _PAGE.unpack_from(page)[3]
        for place in range(_PAGE.size, min(lower, len(page) - 1), 2):
            at = int.from_bytes(page[place : place + 2], "little")
            if at + _NODE.size > len(page):
                raise _Unfit(f"is damaged in page {number:,}")
            low, high, flags, size = _NODE.unpack_from(page, at)
            at += _NODE.size
            yield low, high, flags, page[at : at + size], at + size

    def _value(
        self, number: int, page: bytes, length: int, kind: int, key: bytes, at: int
    ) -> tuple[bytes, int, int]:
        if kind & (_SUB | _DUPLICATES):
            raise _Unfit("holds named databases or several values to a key: not supported")
        if kind & _BIG:
            first = int.from_bytes(page[at : at + 8], "little")
            begin = first * self.page_size + _PAGE.size
            if not 2 <= first <= self.last or begin + length > (self.last + 1) * self.page_size:
                raise _Unfit(f"is damaged: a value of page {number:,} lies outside")
            return key, begin, length
        if at + length > len(page):
            raise _Unfit(f"is damaged in page {number:,}")
        return key, number * self.page_size + at, length


# Values


def _image(pages: _Pages, begin: int, length: int) -> tuple[tuple[int, int] | None, bytes | None]:
    """Where a value's image lies, begin and length, if it has one, and its label as a text."""
    head = pages.read(begin, min(length, 16))
    if head.startswith(_IMAGE_STARTS) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return (begin, length), None
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return _pickled(pages.read(begin, length), begin)
    if head[:1] == b"\x08":  # a Datum begins with its number of channels
        return _datum(pages.read(begin, length), begin)
    return None, None


def _datum(value: bytes, begin: int) -> tuple[tuple[int, int] | None, bytes | None]:
    """Caffe's Datum: channels 1, height 2, width 3, data 4, label 5, encoded 7.

    See Caffe's src/caffe/proto/caffe.proto. The label of pixels begins with a zero byte and their
    three dimensions.
    """
    span, label, encoded, dimensions = None, None, False, [0, 0, 0]
    try:
        for number, kind, start, end in fields_of(value, (0, len(value))):
            if (number, kind) == (4, 2):
                span = start, end
            elif (number, kind) == (5, 0):
                label = b"%d" % (start - (1 << 64) if start >= 1 << 63 else start)
            elif (number, kind) == (7, 0):
                encoded = bool(start)
            elif number in (1, 2, 3) and kind == 0:
                dimensions[number - 1] = start
    except ProtobufError:
        return None, None
    if span is None:
        return None, None
    if not encoded:
        if dimensions[0] not in (1, 3) or not 0 < math.prod(dimensions) == span[1] - span[0]:
            raise _Damaged("a Datum without an image of one or three channels")
        label = b"\0%d %d %d " % tuple(dimensions) + (label or b"")
    return (begin + span[0], span[1] - span[0]), label


def _shape(text: bytes | None, length: int) -> tuple[tuple[int, int, int] | None, bytes | None]:
    """Channels, height and width of a Datum's pixels, if an entry's text has them; the label."""
    parts = text[1:].split(b" ", 3) if text is not None and text[:1] == b"\0" else []
    if len(parts) != 4 or not all(part.isdigit() and len(part) < 10 for part in parts[:3]):
        return None, text
    channels, height, width = map(int, parts[:3])
    if channels not in (1, 3) or channels * height * width != length:
        return None, text
    return (channels, height, width), parts[3] or None


def _expand(file: str, found: Found, raw: Mapping[int, tuple[int, int, int]]) -> str:
    """The file of the pixels of the samples ``raw``, which then are in a second shard."""
    rows = list(raw)
    spans = [(found.begins[row], found.lengths[row]) for row in rows]

    def read(number: int) -> NDArray[np.uint8]:
        begin, length = spans[number]
        with open(file, "rb") as source:
            source.seek(begin)
            content = source.read(length)
        if len(content) < length:  # it has shrunk meanwhile
            raise DamagedError(f"is truncated in the value of {found.names[rows[number]]!r}")
        # Caffe's planes are OpenCV's: blue, green, red.
        return np.frombuffer(content, np.uint8).reshape(raw[rows[number]])[::-1].transpose(1, 2, 0)

    shapes = [(height, width, channels) for channels, height, width in raw.values()]
    made, begins, lengths = images(file, "lmdb", shapes, read)
    for row, begin, length in zip(rows, begins, lengths, strict=True):
        found.shards[row], found.begins[row], found.lengths[row] = 1, begin, length
    return made


def _pickled(value: bytes, begin: int) -> tuple[tuple[int, int] | None, bytes | None]:
    """A tuple or list of encoded image and label, in any order, or an encoded image alone."""
    try:
        found = pickled.load(value)
    except pickled.PickleError as error:
        raise _Damaged(f"cannot be unpickled safely: {error}") from error
    parts = list(found) if isinstance(found, tuple | list) else [found]
    images = [bytes(p) for p in map(_encoded, parts) if p is not None and len(p) > 8]
    labels = [part for part in parts if type(part) in (int, str)]
    if not images:
        return None, None
    place = value.find(images[0])
    if place < 0:
        raise _Damaged("its image is pickled in an encoding of its own, which is not supported")
    label = str(labels[0]).encode() if len(labels) == 1 else None
    return (begin + place, len(images[0])), label


def _encoded(part: object) -> bytes | None:
    if isinstance(part, pickled.Array):
        return part.data if part.kind == "u1" and len(part.shape) == 1 else None
    return bytes(part) if isinstance(part, bytes | bytearray) else None


# Writing

_COMMITTED_BYTES = 64 << 20
_FIRST_MAP_BYTES = 1 << 30


def key_of(sample: Sample) -> str:
    """The key of a sample's image."""
    return f"image-{sample.position + 1:09}"


def write(path: str, samples: Callable[[int], Iterator[Sample]]) -> None:
    """Writes an environment, or goes on with one whose writing was interrupted.

    Args:
        path: its folder.
        samples: gives those from a place on.

    Raises:
        ImportError: the extra ``stoker[lmdb]`` is not installed.
        SourceError: it cannot be written.
    """
    lmdb = _lmdb()
    try:
        try:
            environment = lmdb.open(path, map_size=_FIRST_MAP_BYTES, lock=False)
        except lmdb.Error:  # what was interrupted is no environment yet
            shutil.rmtree(path)
            environment = lmdb.open(path, map_size=_FIRST_MAP_BYTES, lock=False)
        with environment:
            with environment.begin() as transaction:
                count = transaction.get(b"num-samples") or b""
                done = int(count) if count.isdigit() else 0
            values: dict[bytes, bytes] = {}
            waiting_bytes = 0
            for sample in samples(done):
                key = key_of(sample).encode()
                values[key] = sample.content
                if sample.label != -1:
                    values[key.replace(b"image", b"label")] = b"%d" % sample.label
                done += 1
                waiting_bytes += len(sample.content)
                if waiting_bytes >= _COMMITTED_BYTES:
                    _commit(environment, values, done)
                    values, waiting_bytes = {}, 0
            _commit(environment, values, done)
    except lmdb.Error as error:  # of a full disk it says EIO
        free = shutil.disk_usage(os.path.dirname(path) or ".").free
        raise SourceError(path, f"{error}; {free:,} bytes are free there") from error


def _commit(environment: Any, values: Mapping[bytes, bytes], done: int) -> None:
    """Adds values, all or none, to an environment that then holds ``done`` samples."""
    full = _lmdb().MapFullError
    while True:
        try:
            with environment.begin(write=True) as transaction:
                for key, value in values.items():
                    transaction.put(key, value)
                transaction.put(b"num-samples", b"%d" % done)
            return
        except full:
            environment.set_mapsize(2 * environment.info()["map_size"])


def _lmdb() -> Any:
    try:
        import lmdb
    except ImportError as error:
        raise ImportError("writing LMDB needs an extra: pip install 'stoker[lmdb]'") from error
    return lmdb


def written(path: str) -> Iterator[Written]:
    """The images in an environment that ``write`` wrote.

    Raises:
        SourceError: it is damaged.
    """
    file = file_of(path)
    return images_of(file, scan(file))
