"""Where the values of a Parquet column lie in their file, if they lie there as they are.

A column chunk is pages, one after the other: at most one with a dictionary, then those with data.
A page is a header and its body. The header is a Thrift struct, ``PageHeader``: 1 kind of page (0
data, 1 index, 2 dictionary, 3 data v2), 2 and 3 bytes of the body, expanded and as it is, 4 CRC-32
of the body, and a struct by the kind:

    5 data        1 values, 2 encoding, 3 encoding of definition levels
    7 dictionary  1 values, 2 encoding
    8 data v2     1 values, 4 encoding, 5 and 6 bytes of definition and of repetition levels

The body of a data page is the definition levels, which say how much of each row's path is there,
and the values of those rows of which all is. Levels are preceded by their uint32 length, except in
v2, and are runs: a varint, then, if it is even, a value that comes half as often, else half as many
groups of eight values, packed bit by bit. PLAIN values (encoding 0) are a uint32 length and that
many bytes each; RLE_DICTIONARY (8, formerly 2) is a byte with a width, and runs of places in the
dictionary, which is PLAIN. All little-endian. (apache/parquet-format: README.md, Encodings.md,
parquet.thrift.)

Only what is exactly so is taken: no repetition, no compression, no other encoding, lengths that
fill each page, and right CRCs where there are any.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.sources.protobuf import ProtobufError, varint
from stoker.sources.thrift import Struct, ThriftError
from stoker.sources.thrift import struct as thrift

Spans = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Begin and length of each value; begin is -1 where there is none."""

_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)
_PLAIN, _PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 0, 2, 3, 8
_FIELDS = {_DATA: 5, _INDEX: 6, _DICTIONARY: 7, _DATA_V2: 8}
_HEADER_BYTES = 1 << 10
_MOST_HEADER_BYTES = 1 << 24
_MOST_EXPANDED_BYTES = 64 << 20
_MOST_RATIO = 256
_MOST_WIDTH = 32
_AT_ONCE_BYTES = 1 << 20
_AT_ONCE = 1 << 16


class OddPagesError(ValueError):
    """Why the values of a column chunk cannot be found where they lie."""


def spans(fd: int, begin: int, size: int, rows: int, levels: int) -> Spans:
    """Where the value of each row lies, from the pages of an uncompressed chunk of byte arrays.

    Args:
        fd: the file.
        begin: where in it the chunk begins.
        size: its bytes.
        rows: in it; the caller has made sure that so many fit into memory.
        levels: the definition level of a row of which all is there; the most there is.

    Raises:
        OddPagesError: they do not lie there as they are, or the pages are damaged.
        OSError: the file cannot be read.
    """
    begins, lengths = np.full(rows, -1, np.int64), np.zeros(rows, np.int64)
    dictionary: Spans | None = None
    row = 0
    for page in _pages(fd, begin, begin + size):
        if page.expanded != page.end - page.begin:
            raise OddPagesError("a page does not fit")
        _check_crc(fd, page)
        if page.kind == _DICTIONARY:
            if dictionary is not None or page.number(2) not in (_PLAIN, _PLAIN_DICTIONARY):
                raise OddPagesError("an unknown dictionary")
            dictionary = _plain(fd, page.begin, page.end, page.count)
        elif page.kind in (_DATA, _DATA_V2):
            count = page.count
            if not 0 <= count <= rows - row:
                raise OddPagesError("more values than rows")
            start, present = _levels(fd, page, levels)
            encoding = page.number(2 if page.kind == _DATA else 4)
            some = int(present.sum())
            if encoding == _PLAIN:
                values = _plain(fd, start, page.end, some)
            elif encoding in (_RLE_DICTIONARY, _PLAIN_DICTIONARY) and dictionary is not None:
                places = _places(_read(fd, start, page.end), some, len(dictionary[0]))
                values = dictionary[0][places], dictionary[1][places]
            else:
                raise OddPagesError("an unknown encoding")
            begins[row : row + count][present], lengths[row : row + count][present] = values
            row += count
    if row != rows:
        raise OddPagesError("fewer values than rows")
    return begins, lengths


def check(fd: int, begin: int, size: int, rows: int, compressed: bool) -> None:
    """Makes sure that the pages of a chunk ask for no more memory than a sound file does.

    Raises:
        OddPagesError: they do.
        OSError: the file cannot be read.
    """
    row = 0
    for page in _pages(fd, begin, begin + size):
        body = page.end - page.begin
        most = max(_MOST_EXPANDED_BYTES, _MOST_RATIO * body) if compressed else body
        if page.expanded > most or page.expanded < 0:
            raise OddPagesError(f"a page of {body:,} bytes would have {page.expanded:,}")
        if page.kind == _DICTIONARY and page.count > page.expanded:
            raise OddPagesError("more values than fit")
        if page.kind in (_DATA, _DATA_V2):
            row += page.count
            if not 0 <= page.count <= row <= rows:
                raise OddPagesError("more values than rows")
    if row != rows:
        raise OddPagesError("fewer values than rows")


def _read(fd: int, begin: int, end: int) -> bytes:
    data = os.pread(fd, end - begin, begin)
    if len(data) != end - begin:
        raise OddPagesError("the file ends within a page")
    return data


def _check_crc(fd: int, page: _Page) -> None:
    """Raises OddPagesError where a page's CRC, if it has one, is wrong."""
    if page.crc is None:
        return
    crc = 0
    for at in range(page.begin, page.end, _AT_ONCE_BYTES):
        crc = zlib.crc32(_read(fd, at, min(at + _AT_ONCE_BYTES, page.end)), crc)
    if crc != page.crc & 0xFFFFFFFF:
        raise OddPagesError("a page has a wrong CRC")


@dataclass(frozen=True)
class _Page:
    """A page: its kind, body, CRC, and the fields of its kind by their numbers."""

    kind: int
    begin: int
    end: int
    expanded: int
    crc: int | None
    fields: Struct

    def number(self, field: int) -> int:
        """That of a field; -1 where it is none."""
        value = self.fields.get(field)
        return value if isinstance(value, int) else -1

    @property
    def count(self) -> int:
        """Of the values, with those that are null."""
        return self.number(1)


def _pages(fd: int, at: int, end: int) -> Iterator[_Page]:
    """The pages of a chunk that lies between ``at`` and ``end``."""
    while at < end:
        header, at = _header(fd, at, end)
        kind, expanded, body, crc = (header.get(number) for number in (1, 2, 3, 4))
        if not isinstance(kind, int) or kind not in _FIELDS:
            raise OddPagesError("a page of an unknown kind")
        if not isinstance(body, int) or not 0 <= body <= end - at or not isinstance(expanded, int):
            raise OddPagesError("a page does not fit")
        fields = header.get(_FIELDS[kind], {})
        if not isinstance(fields, dict) or not isinstance(crc, int | None):
            raise OddPagesError("a page's header is damaged")
        yield _Page(kind, at, at + body, expanded, crc, fields)
        at += body


def _header(fd: int, at: int, end: int) -> tuple[Struct, int]:
    """The header of a page, and where the body begins."""
    size = _HEADER_BYTES
    while True:
        data = os.pread(fd, min(size, end - at), at)
        try:
            header, length = thrift(data)
            return header, at + length
        except ThriftError as error:  # there may be more of it
            if len(data) < size or size >= _MOST_HEADER_BYTES:
                raise OddPagesError("a page's header is damaged") from error
        size *= 8


def _levels(fd: int, page: _Page, levels: int) -> tuple[int, NDArray[np.bool_]]:
    """Where the values of a data page begin, and which rows have one."""
    at, count = page.begin, page.count
    if page.kind == _DATA_V2:
        size = page.number(5)
        if page.number(6) != 0 or (size != 0 and levels == 0):
            raise OddPagesError("levels that do not fit")
    elif levels == 0:
        size = 0
    elif page.number(3) == _RLE and page.end - at >= 4:
        size = int.from_bytes(_read(fd, at, at + 4), "little")
        at += 4
    else:
        raise OddPagesError("levels of an unknown encoding")
    if not 0 <= size <= page.end - at:
        raise OddPagesError("levels that do not fit")
    if levels == 0:
        return at, np.ones(count, np.bool_)
    found = _runs(_read(fd, at, at + size), count, levels.bit_length())
    if count and int(found.max()) > levels:
        raise OddPagesError("levels that do not fit")
    return at + size, found == levels


def _places(data: bytes, count: int, known: int) -> NDArray[np.int64]:
    """The places in a dictionary of ``known`` values that a page of them says."""
    if count == 0:
        return np.zeros(0, np.int64)
    if not data or data[0] > _MOST_WIDTH:
        raise OddPagesError("places of an unknown width")
    places = _runs(data[1:], count, data[0])
    if int(places.max()) >= known:
        raise OddPagesError("places outside the dictionary")
    return places


def _runs(data: bytes, count: int, width: int) -> NDArray[np.int64]:
    """``count`` values of ``width`` bits from runs."""
    values, at, done = np.zeros(count, np.int64), 0, 0
    while done < count:
        try:
            head, at = varint(data, at, len(data))
        except ProtobufError as error:
            raise OddPagesError("runs that end too early") from error
        size = (head >> 1) * width if head & 1 else (width + 7) // 8
        if size > len(data) - at:
            raise OddPagesError("runs that end too early")
        part = data[at : at + size]
        at += size
        if head & 1:
            many = min(8 * (head >> 1), count - done)
            for first in range(0, many, _AT_ONCE):
                some = min(_AT_ONCE, many - first)
                packed = np.frombuffer(part, np.uint8)[first * width // 8 :]
                bits = np.unpackbits(packed, count=some * width, bitorder="little")
                value = bits.reshape(some, width) @ (1 << np.arange(width, dtype=np.int64))
                values[done + first : done + first + some] = value
        else:
            many = min(head >> 1, count - done)
            values[done : done + many] = int.from_bytes(part, "little")
        done += many
    return values


def _plain(fd: int, begin: int, end: int, count: int) -> Spans:
    """Where ``count`` values lie that fill what is between ``begin`` and ``end``."""
    if not 0 <= count <= (end - begin) // 4:
        raise OddPagesError("more values than fit")
    begins, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
    for number in range(count):
        if end - begin < 4:
            raise OddPagesError("values that do not fit")
        length = int.from_bytes(_read(fd, begin, begin + 4), "little")
        begin += 4
        if length > end - begin:
            raise OddPagesError("values that do not fit")
        begins[number], lengths[number] = begin, length
        begin += length
    if begin != end:
        raise OddPagesError("values that do not fill their page")
    return begins, lengths
