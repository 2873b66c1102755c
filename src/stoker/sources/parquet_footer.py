"""Where the columns of a Parquet file lie: its footer, checked before anything trusts it.

A file ends with the footer, its uint32 length, little-endian, and ``PAR1``. The footer is a Thrift
struct ``FileMetaData{2: list<SchemaElement>, 4: list<RowGroup>}``. The schema is a tree, each node
before its children: ``SchemaElement{3: repetition (0 required, 1 optional, 2 repeated), 4: name,
5: children}``. A row group has a chunk for each leaf, in that order:

    RowGroup{1: list<ColumnChunk>, 3: rows}
    ColumnChunk{1: another file, 3: ColumnMetaData}
    ColumnMetaData{1: type (6 byte arrays), 2: encodings, 3: path, 4: codec (0 none), 5: values,
                   7: bytes, 9: where the first page of data is, 11: where the dictionary is}

(apache/parquet-format, parquet.thrift.) pyarrow ends the process where some of these are out of
their range, so that they are read here and not there.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from dataclasses import dataclass
from typing import Any

from stoker.errors import SourceError
from stoker.sources.thrift import Struct, ThriftError
from stoker.sources.thrift import struct as thrift

_TAIL = struct.Struct("<I4s")
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_MOST_ROWS_ANYWAY = 1 << 20
_REPEATED = 2
_TYPES, _CODECS = range(8), range(8)

_Leaf = tuple[tuple[str, ...], int, bool]


@dataclass(frozen=True)
class Chunk:
    """A column in a row group.

    Attributes:
        type: of the values, as stored; 6 are byte arrays.
        codec: how pages are compressed; 0 is not at all.
        values: how many, with those that are null.
        begin: where in the file.
        size: bytes.
        levels: the definition level of a value of whose path all is there.
        repeated: it is in a list.
    """

    type: int
    codec: int
    values: int
    begin: int
    size: int
    levels: int
    repeated: bool


@dataclass(frozen=True)
class Group:
    """A row group: its rows, and by their names, from the root down, columns that share no name."""

    rows: int
    chunks: dict[tuple[str, ...], Chunk]


def groups(path: str, fd: int) -> list[Group]:
    """The row groups of a file.

    Raises:
        SourceError: the footer is damaged, or says what cannot be.
        OSError: the file cannot be read.
    """
    size = os.fstat(fd).st_size
    tail = os.pread(fd, _TAIL.size, max(0, size - _TAIL.size))
    if len(tail) < _TAIL.size or tail[4:] not in (_MAGIC, _ENCRYPTED):
        raise SourceError(path, "does not end as a Parquet file: it is truncated, or none")
    length, magic = _TAIL.unpack(tail)
    if magic == _ENCRYPTED:
        raise SourceError(path, "is encrypted")
    if length > size - _TAIL.size - len(_MAGIC):
        raise SourceError(path, "its footer is longer than the file")
    try:
        footer, _ = thrift(os.pread(fd, length, size - _TAIL.size - length))
        leaves = _leaves(footer[2])
        found = [_group(group, leaves, size) for group in footer[4]]
    except (ThriftError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise SourceError(path, f"its footer is damaged: {error}") from error
    rows = sum(group.rows for group in found)
    if rows > max(size, _MOST_ROWS_ANYWAY):
        raise SourceError(path, f"says that it has {rows:,} rows in {size:,} bytes")
    return found


def _leaves(schema: list[Struct]) -> list[_Leaf]:
    """Names, definition level and whether it is in a list, of each leaf of a schema."""
    found: list[_Leaf] = []
    within: list[tuple[tuple[str, ...], int, bool, list[int]]] = []
    for node in schema:
        names, levels, repeated = ((), 0, False) if not within else within[-1][:3]
        if within:  # the root has neither a name that counts nor a repetition
            names = (*names, _text(node[4]))
            levels += node.get(3, 0) != 0
            repeated |= node.get(3, 0) == _REPEATED
        elif found:
            raise ValueError("it has several roots")
        children = _number(node.get(5, 0), len(schema))
        if children:
            within.append((names, levels, repeated, [children]))
            continue
        found.append((names, levels, repeated))
        while within:
            within[-1][3][0] -= 1
            if within[-1][3][0]:
                break
            within.pop()
    if within:
        raise ValueError("its schema is not whole")
    return found


def _group(group: Struct, leaves: list[_Leaf], size: int) -> Group:
    chunks: dict[tuple[str, ...], Chunk] = {}
    for (names, levels, repeated), column in zip(leaves, group[1], strict=True):
        meta = column.get(3)
        if meta is None or column.get(1):
            raise ValueError("a column is encrypted, or in another file")
        if tuple(map(_text, meta[3])) != names:
            raise ValueError(f"column {'.'.join(names)!r} is another")
        begin = _number(meta[9], size)
        if meta.get(11):  # some write a zero where there is none
            begin = min(begin, _number(meta[11], size))
        length = _number(meta[7], size - begin)
        values = _number(meta[5], 1 << 62)
        if meta[1] not in _TYPES or meta[4] not in _CODECS:
            raise ValueError(f"column {'.'.join(names)!r} is of an unknown type or codec")
        chunks[names] = Chunk(meta[1], meta[4], values, begin, length, levels, repeated)
    counts = Counter(names for names, *_ in leaves)
    unique = {names: chunk for names, chunk in chunks.items() if counts[names] == 1}
    return Group(_number(group[3], 1 << 62), unique)


def _number(value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"a number {value!r} that cannot be")
    return value


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
