"""Where the fields of a protocol buffer lie, without its schema.

A message is fields one after the other: a varint, number times 8 plus wire type; then a varint
(type 0), 8 bytes (1), a varint length and that many bytes (2), or 4 bytes (5). A varint has seven
bits in each byte, the lowest first, and the top bit set in all but its last. (protobuf.dev,
encoding.)
"""

from __future__ import annotations

from collections.abc import Iterator

Span = tuple[int, int]
"""Begin and end in the bytes that are looked at."""


class ProtobufError(ValueError):
    """These bytes are no protocol buffer."""


def messages_of(data: bytes, span: Span, wanted: int) -> Iterator[Span]:
    """Where the fields of this number with a length lie in a message."""
    for number, kind, start, end in fields_of(data, span):
        if number == wanted and kind == 2:
            yield start, end


def fields_of(data: bytes, span: Span) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type, begin and end of each field of a message; of a varint its value twice."""
    at, end = span
    while at < end:
        tag, at = varint(data, at, end)
        kind = tag & 7
        if kind == 0:
            value, at = varint(data, at, end)
            yield tag >> 3, kind, value, value
            continue
        if kind == 2:
            length, at = varint(data, at, end)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ProtobufError("no protocol buffer")
        if at + length > end:
            raise ProtobufError("no protocol buffer")
        yield tag >> 3, kind, at, at + length
        at += length


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of up to 64 bits, seven in a byte, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
        shift += 7
    raise ProtobufError("no protocol buffer")


def field(number: int, value: bytes | int) -> bytes:
    """A field that holds some bytes or an integer."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value & (1 << 64) - 1)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
