"""Attributes of stock transforms, read as what they must be."""

from __future__ import annotations

import enum
from typing import Any

from stoker.plan import FILTERS, PADDING_MODES, Size

_LARGEST_SIDE = 1 << 20
_PILLOW_NUMBERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


class UnfitError(Exception):
    """An attribute that the native core cannot honour: why, and what to do instead."""


class Fields:
    """The attributes of one transform, read as what they must be.

    Args:
        transform: a stock transform.
        version: 1 or 2, see ``Stock``.
        bands: "RGB", or "L" after Grayscale(1).
        size: (height, width) of the image that it gets, where that is fixed.
    """

    def __init__(self, transform: Any, version: int, bands: str, size: Size | None = None) -> None:
        self.transform, self.values = transform, vars(transform)
        self.version, self.bands, self.size = version, bands, size

    def get(self, name: str) -> Any:
        """The value of an attribute of the object itself."""
        if name not in self.values:
            raise UnfitError(f"has no attribute {name}", "use an attribute that torchvision sets")
        return self.values[name]

    def whole(self, value: Any, name: str, least: int = 1) -> int:
        """``value`` if it is an integer of at least ``least``."""
        if type(value) is not int or not least <= value <= _LARGEST_SIDE:
            raise UnfitError(f"{name}={value!r}", f"give integers from {least} to {_LARGEST_SIDE}")
        return value

    def sequence(self, name: str, lengths: tuple[int, ...]) -> tuple[Any, ...]:
        """A list or tuple of one of these lengths."""
        value = self.get(name)
        if not isinstance(value, list | tuple) or len(value) not in lengths:
            raise UnfitError(f"{name}={value!r}", f"give a sequence of length {lengths}")
        return tuple(value)

    def pair(self, name: str) -> Size:
        """Height and width."""
        height, width = self.sequence(name, (2,))
        return self.whole(height, name), self.whole(width, name)

    def number(self, value: Any, name: str, least: float, greatest: float) -> float:
        """``value`` as a float if it is in range."""
        if type(value) not in (int, float) or not least <= value <= greatest:
            raise UnfitError(f"{name}={value!r}", f"give a number from {least:g} to {greatest:g}")
        return float(value)

    def range(self, name: str, least: float, greatest: float) -> tuple[float, float]:
        """Two numbers in ascending order."""
        low, high = (self.number(v, name, least, greatest) for v in self.sequence(name, (2,)))
        if low > high:
            raise UnfitError(f"{name}={self.get(name)!r} descends", "give (least, greatest)")
        return low, high

    def probability(self) -> float:
        """The attribute ``p``."""
        return self.number(self.get("p"), "p", 0.0, 1.0)

    def filter(self) -> str:
        """The interpolation, one of ``FILTERS``."""
        value = self.get("interpolation")
        if isinstance(value, enum.Enum) and not isinstance(value, int):
            value = value.value
        if isinstance(value, int) and not isinstance(value, bool):
            value = _PILLOW_NUMBERS.get(int(value))
        name = "nearest" if value == "nearest-exact" else value
        if name not in FILTERS:
            raise UnfitError(
                f"interpolation={self.get('interpolation')!r}", f"use one of {FILTERS}"
            )
        return str(name)

    def padding(self) -> tuple[int, int, int, int]:
        """Left, top, right, bottom."""
        value = self.get("padding")
        if isinstance(value, int):
            value = (value,)
        if not isinstance(value, list | tuple) or len(value) not in (1, 2, 4):
            raise UnfitError(f"padding={value!r}", "give 1, 2 or 4 integers")
        sides = [self.whole(side, "padding", 0) for side in value]
        left, top, right, bottom = (sides * 4)[:4]
        return left, top, right, bottom

    def mode(self) -> str:
        """The padding mode, one of ``PADDING_MODES``."""
        value = self.get("padding_mode")
        if value not in PADDING_MODES:
            raise UnfitError(f"padding_mode={value!r}", f"use one of {PADDING_MODES}")
        return str(value)

    def fill(self) -> tuple[int, int, int]:
        """What is padded with: red, green, blue."""
        return self.colour() if self.mode() == "constant" else (0, 0, 0)

    def colour(self) -> tuple[int, int, int]:
        """The attribute ``fill``: red, green, blue; torchvision truncates numbers to integers."""
        value = self.get("fill")
        if value is None:
            return 0, 0, 0
        if self.version == 2:
            effective = self.get("_fill")
            if isinstance(value, dict) or set(effective) != {"others"}:
                raise UnfitError(f"fill={value!r}", "give a number or three")
            value = effective["others"]
        parts = list(value) if isinstance(value, list | tuple) else [value]
        if len(parts) not in (1, 3) or (self.bands == "L" and len(parts) == 3):
            raise UnfitError(
                f"fill={value!r} for {len(self.bands)} channels", "give a single number"
            )
        red, green, blue = (int(self.number(part, "fill", 0, 255)) for part in (parts * 3)[:3])
        return red, green, blue
