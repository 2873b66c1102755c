"""Pickles read without running anything: plain values out of bytes that anybody may have written.

Built are None, booleans, numbers, texts, bytes, tuples, lists, dicts with plain keys, and NumPy's
arrays and integers, which become an `Array` and an int. Whatever else a pickle asks for, be it a
global or an instruction, is refused by name. Nothing is called but what is in this module, no
object's own methods run, and nothing is allocated that the bytes do not hold themselves.

Python's own unpickler is not used: with every global forbidden it still hashes what it is told to
hash, which nested tuples make endless, and makes room for a memo of the size that it is told.

A pickle is instructions of one byte, with their arguments, for a machine with a stack and a memo.
(Python, Lib/pickletools.py.) Protocols 0 to 5; what Python 2 pickled as ``str`` comes out as bytes.
"""

from __future__ import annotations

import io
import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_INSTRUCTIONS = 4_000_000
_KEYS = (int, str, bytes)
_CONSTANTS = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_TUPLE": (),
}
_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_BYTES = ("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
_VALUES = frozenset([*_NUMBERS, *_TEXTS, *_BYTES])
_OLD_TEXTS = frozenset(["STRING", "BINSTRING", "SHORT_BINSTRING"])
_MARK = object()


class PickleError(Exception):
    """Why a pickle cannot be read, or will not be."""


@dataclass
class Array:
    """What stands for a NumPy array.

    Attributes:
        data: its elements' bytes; None until they are known.
        shape: as pickled.
        kind: NumPy's name of its type, such as "u1".
        columns_first: whether the bytes are in Fortran's order.
    """

    data: bytes | None = None
    shape: tuple[int, ...] = ()
    kind: str = ""
    columns_first: bool = False

    def pixels(self) -> NDArray[np.uint8] | None:
        """The array, if it is one of bytes and has as many as its shape says."""
        if self.kind != "u1" or self.data is None or math.prod(self.shape) != len(self.data):
            return None
        order: Any = "F" if self.columns_first else "C"
        return np.frombuffer(self.data, np.uint8).reshape(self.shape, order=order)


@dataclass
class _Dtype:
    """What stands for a `numpy.dtype`."""

    kind: str
    big: bool = False


@dataclass(frozen=True)
class _Global:
    """What a pickle names, which is never looked up."""

    module: str
    name: str


def load(data: bytes) -> Any:
    """The value that ``data`` begins with.

    Raises:
        PickleError: it is damaged, or asks for something else than plain values.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        argument: Any
        for number, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data))):
            name = opcode.name
            if number == _MOST_INSTRUCTIONS:
                raise PickleError(f"more than {_MOST_INSTRUCTIONS:,} instructions")
            if name in _VALUES:
                stack.append(_small(argument))
            elif name in _OLD_TEXTS:
                stack.append(argument.encode("latin-1"))
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
                memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET", "GET"):
                stack.append(memo[argument])
            elif name == "STOP":
                if len(stack) != 1 or isinstance(_plain(stack[0]), _Global):
                    raise PickleError("its end leaves no value")
                return stack[0]
            elif name not in ("PROTO", "FRAME"):
                _build(name, argument, stack)
    except (ValueError, IndexError, KeyError, OverflowError, DeprecationWarning) as error:
        # A wrong escape in a text is a warning, which may be made an error.
        raise PickleError(f"damaged: {str(error) or type(error).__name__}") from error
    raise PickleError("damaged: it has no end")


def _build(name: str, argument: Any, stack: list[Any]) -> None:
    """Carries out an instruction that makes a value of others."""
    if name == "MARK":
        stack.append(_MARK)
    elif name == "EMPTY_LIST":
        stack.append([])
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name == "GLOBAL":
        stack.append(_Global(*argument.split(" ", 1)))
    elif name == "STACK_GLOBAL":
        last, module = stack.pop(), stack.pop()
        if not isinstance(module, str) or not isinstance(last, str):
            raise ValueError("a global without a name")
        stack.append(_Global(module, last))
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        parts = [stack.pop() for _ in range(count)]
        stack.append(tuple(_plain(part) for part in reversed(parts)))
    elif name == "TUPLE":
        stack.append(tuple(_marked(stack)))
    elif name == "LIST":
        stack.append(_marked(stack))
    elif name == "DICT":
        parts = _marked(stack)
        stack.append({})
        _set(stack[-1], parts)
    elif name == "APPEND":
        part = _plain(stack.pop())
        _of(stack, list).append(part)
    elif name == "APPENDS":
        parts = _marked(stack)
        _of(stack, list).extend(parts)
    elif name == "SETITEM":
        parts = [_plain(stack.pop()), _plain(stack.pop())][::-1]
        _set(_of(stack, dict), parts)
    elif name == "SETITEMS":
        parts = _marked(stack)
        _set(_of(stack, dict), parts)
    elif name == "REDUCE":
        arguments, called = stack.pop(), stack.pop()
        stack.append(_called(called, arguments))
    elif name == "BUILD":
        state = stack.pop()
        _set_state(stack[-1], state)
    else:
        raise PickleError(f"the instruction {name} is asked for")


def _plain(part: Any) -> Any:
    """``part``, if it is a value, or a global that may be named as an argument."""
    if part is _MARK:
        raise ValueError("a mark is out of place")
    if isinstance(part, _Global) and not _is_numpys(part, "ndarray"):
        raise PickleError(f"{part.module}.{part.name} is asked for")
    return part


def _marked(stack: list[Any]) -> list[Any]:
    """Takes what lies above the last mark, and the mark."""
    parts = []
    while (part := stack.pop()) is not _MARK:
        parts.append(_plain(part))
    return parts[::-1]


def _of(stack: list[Any], kind: type) -> Any:
    if type(stack[-1]) is not kind:
        raise ValueError(f"a {type(stack[-1]).__name__} is no {kind.__name__}")
    return stack[-1]


def _set(target: dict[Any, Any], parts: list[Any]) -> None:
    if len(parts) % 2:
        raise ValueError("a key without a value")
    for key, value in zip(parts[::2], parts[1::2], strict=True):
        if type(key) not in _KEYS:
            raise PickleError(f"a {type(key).__name__} as a key is asked for")
        target[key] = value


def _small(argument: Any) -> Any:
    if type(argument) is int and argument.bit_length() > 64:
        raise PickleError("a number of more than 64 bits is asked for")
    return argument


# What stands for calls


def _is_numpys(called: _Global, name: str) -> bool:
    package = called.module.split(".")
    return called.name == name and (
        package == ["numpy"] or package[:2] in (["numpy", "core"], ["numpy", "_core"])
    )


def _called(called: Any, arguments: Any) -> Any:
    """What a call of a global gives that is one of a few."""
    if not isinstance(called, _Global):
        raise ValueError("what is called is no global")
    if not isinstance(arguments, tuple):
        raise ValueError("a call without arguments")
    if called == _Global("_codecs", "encode"):  # how Python 3 pickles bytes for Python 2
        text, codec = arguments
        if codec in ("latin1", b"latin1") and isinstance(text, str):
            return text.encode("latin-1")
    elif called.module in ("builtins", "__builtin__") and called.name == "bytes":
        if not arguments:
            return b""
    elif _is_numpys(called, "dtype"):
        return _Dtype(_text(arguments[0]))
    elif _is_numpys(called, "_reconstruct"):
        return Array()
    elif _is_numpys(called, "_frombuffer"):
        buffer, dtype, shape, order = arguments
        array = Array()
        columns_first = _text(order) == "F"
        _set_state(array, (1, shape, dtype, columns_first, bytes(_bytes(buffer))))
        return array
    elif _is_numpys(called, "scalar"):
        return _integer(*arguments)
    raise PickleError(f"{called.module}.{called.name} is asked for")


def _set_state(target: Any, state: Any) -> None:
    if not isinstance(state, tuple):
        raise ValueError("a state that is no tuple")
    if isinstance(target, _Dtype):
        target.big = len(state) > 1 and _text(state[1]) == ">"
        return
    if not isinstance(target, Array):
        raise PickleError(f"a state for a {type(target).__name__} is asked for")
    _, shape, dtype, columns_first, data = state
    if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple):
        raise ValueError("an array without type or shape")
    if not all(type(length) is int and 0 <= length < 1 << 62 for length in shape):
        raise ValueError("an array of no shape")
    target.shape, target.kind, target.columns_first = shape, dtype.kind, bool(columns_first)
    target.data = data if isinstance(data, bytes) else None


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("ascii")
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} is no text")
    return value


def _bytes(value: Any) -> bytes | bytearray:
    if not isinstance(value, bytes | bytearray):
        raise ValueError(f"a {type(value).__name__} is no buffer")
    return value


def _integer(dtype: Any, data: Any) -> int:
    if not isinstance(dtype, _Dtype) or dtype.kind[:1] not in ("i", "u"):
        raise PickleError("a NumPy scalar that is no integer is asked for")
    if len(_bytes(data)) > 8:
        raise ValueError("an integer of more than 8 bytes")
    order: Any = "big" if dtype.big else "little"
    return int.from_bytes(data, order, signed=dtype.kind[0] == "i")
