"""What a Thrift struct holds, by the numbers of its fields, without its definition.

In Thrift's compact protocol a struct is its fields and a zero byte. A field is a byte, the distance
of its number from the one before (4 bits; 0: the number follows) and its kind (4 bits), then its
value: nothing for true (1) and false (2), a byte (3), a zigzag varint (4, 5, 6), 8 bytes (7), a
varint length and that many bytes (8), a list (9) or set (10), or a struct (12). A list is a byte,
how many there are (4 bits; 15: a varint follows) and the kind of all, then the values; true and
false are a byte here. (apache/thrift, doc/specs/thrift-compact-protocol.md.)
"""

from __future__ import annotations

from typing import Any

from stoker.sources.protobuf import ProtobufError, varint

Struct = dict[int, Any]
"""Values by the numbers of their fields; a struct in it is such a dict, a list a list."""

_MOST_DEPTH = 12
_TRUE, _FALSE, _BYTE, _DOUBLE, _BYTES, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)


class ThriftError(ValueError):
    """These bytes are no such struct, or not all of one."""


def struct(data: bytes, at: int = 0) -> tuple[Struct, int]:
    """The struct that begins at ``at``, and where it ends.

    Raises:
        ThriftError: there is none.
    """
    try:
        return _struct(data, at, 0)
    except (ProtobufError, IndexError) as error:
        raise ThriftError("it ends too early") from error


def _struct(data: bytes, at: int, depth: int) -> tuple[Struct, int]:
    found: Struct = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        kind = head & 15
        if kind in (_TRUE, _FALSE):
            found[number] = kind == _TRUE
        else:
            found[number], at = _value(data, at, kind, depth + 1)
    return found, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in _INTEGERS:
        return _integer(data, at)
    if kind == _BYTE:
        return data[at], at + 1
    if kind == _DOUBLE:
        return None, _within(data, at + 8)
    if kind == _BYTES:
        size, at = varint(data, at, len(data))
        return data[at : at + size], _within(data, at + size)
    if depth > _MOST_DEPTH:
        raise ThriftError("it is nested too deeply")
    if kind == _STRUCT:
        return _struct(data, at, depth)
    if kind not in (_LIST, _SET):
        raise ThriftError(f"a value of kind {kind}")
    head = data[at]
    count, kind, at = head >> 4, head & 15, at + 1
    if count == 15:
        count, at = varint(data, at, len(data))
    _within(data, at + count)  # a value is a byte at least
    values = []
    for _ in range(count):
        if kind in (_TRUE, _FALSE):
            value, at = data[at] == _TRUE, at + 1
        else:
            value, at = _value(data, at, kind, depth + 1)
        values.append(value)
    return values, at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = varint(data, at, len(data))
    return value >> 1 ^ -(value & 1), at


def _within(data: bytes, at: int) -> int:
    if at > len(data):
        raise IndexError(at)
    return at
