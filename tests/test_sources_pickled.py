"""Pickles of plain values, as the real unpickler reads them, and pickles of anything else."""

from __future__ import annotations

import collections
import os
import pickle
import random
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stoker
from stoker.sources.pickled import Array, PickleError, load

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 9) | st.binary(), inner)
    ),
    max_leaves=30,
)


@given(value=PLAIN, protocol=st.integers(0, 5))
def test_plain_values_are_those_of_the_real_unpickler(value: Any, protocol: int) -> None:
    ours = load(pickle.dumps(value, protocol))
    assert ours == value and repr(ours) == repr(value)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.uint8),
        np.arange(24, dtype=np.uint8).reshape(4, 6),
        np.asfortranarray(np.arange(24, dtype=np.uint8).reshape(4, 6)),
        np.zeros((0, 3), np.uint8),
    ],
)
def test_arrays(array: Any, protocol: int) -> None:
    found = load(pickle.dumps({"data": [array], "n": np.int64(-7), "m": np.uint8(200)}, protocol))
    pixels = found["data"][0].pixels()
    assert pixels.dtype == np.uint8 and np.array_equal(pixels, array)
    assert (found["n"], found["m"]) == (-7, 200)


def test_arrays_of_something_else() -> None:
    for other in (np.arange(5), np.array([object()]), np.zeros(3, "u1,u2")):
        try:
            found = load(pickle.dumps(other))
        except PickleError:
            continue
        assert isinstance(found, Array) and found.pixels() is None


def test_what_python_2_wrote() -> None:
    old = b"\x80\x02}q\x01(U\x05labelq\x02K\x07U\x04data(U\x01aT\x02\0\0\0\xff\xd8tu."
    assert load(old) == {b"label": 7, b"data": (b"a", b"\xff\xd8")}
    text = b"(dp1\nS'num'\np2\nL10000L\nsS'names'\np3\n(lp4\nS'cat\\x41'\np5\naI3\naI01\nas."
    assert load(text) == {b"num": 10000, b"names": [b"catA", 3, True]}


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo was run",)


class WithState:
    pass


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        Evil(),
        [1, (2, Evil())],
        WithState(),
        {1, 2},
        frozenset([1]),
        collections.OrderedDict(a=1),
        stoker.DataLoader,
        np.dtype("u1").type,
        1 << 70,
        {(1, 2): 3},
        {1.5: 3},
    ],
)
def test_anything_else_is_refused(
    value: Any, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(value, protocol)
    monkeypatch.setattr(os, "system", None)
    with pytest.raises(PickleError, match="is asked for"):
        load(data)


def test_names_like_those_of_numpy() -> None:
    for module, name in (("numpy", "load"), ("numpyx", "dtype"), ("numpy.x.core", "dtype")):
        with pytest.raises(PickleError, match=f"{module}.{name} is asked for"):
            load(f"c{module}\n{name}\n(S'u1'\ntR.".encode())
    with pytest.raises(PickleError, match="leaves no value"):
        load(b"cnumpy\nndarray\n.")


def test_bombs_are_cheap() -> None:
    """A memo of 2 ** 31 places, bytes that are not there, a key whose hash takes for ever."""
    tuples = b"K\x01" + b"q\x00h\x00\x86" * 60
    bombs = [
        b"Nr\xff\xff\xff\x7f.",
        b"\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x8a\xff" + b"\x7f" * 255 + b".",
        b"}" + tuples + b"Ns.",
        b"(" * 100_000 + b".",
    ]
    tracemalloc.start()
    try:
        for bomb in bombs:
            try:
                load(bomb)
            except PickleError:
                continue
            assert bomb is bombs[0]
        assert tracemalloc.get_traced_memory()[1] < 1 << 30
    finally:
        tracemalloc.stop()
    with pytest.raises(PickleError, match="more than 4,000,000 instructions"):
        load(b"]" * 5_000_000 + b".")


def test_no_damage_raises_anything_else() -> None:
    value = {"data": np.arange(60, dtype=np.uint8).reshape(5, 12), b"k": [1, (2, "x")], 3: b"yyy"}
    rng, read = random.Random(7), 0
    for protocol in range(6):
        whole = pickle.dumps(value, protocol)
        for end in range(len(whole)):
            with pytest.raises(PickleError):
                load(whole[:end])
        for _ in range(1500):
            data = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.choice([*b"0123(t.}]uRbcqhKX", 0, 255])
            try:
                load(bytes(data))
            except PickleError:
                continue
            read += 1
    assert read > 300
