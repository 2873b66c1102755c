"""What to do to one sample: operations with their parameters, and the tail that makes the tensor.

A plan says what torchvision's transforms say, as numbers: the native core draws and computes from
it alone. Operations have torchvision's names; sizes are (height, width).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stoker.augmentations import Affine, Augmentation, RandomRotation

Size = tuple[int, int]
"""(height, width) of an image."""

FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
"""Pillow's resampling filters; the native core knows a filter by its place."""

PADDING_MODES = ("constant", "edge", "reflect", "symmetric")
"""The ways to pad; the native core knows a mode by its place."""

PASS_ORDERS = ("horizontal_first", "tall_vertical", "cheaper_first")
"""Which pass of a resize Pillow runs first; it depends on its version."""


@dataclass(frozen=True)
class Refusal:
    """Why something cannot run natively.

    Attributes:
        op: the transform, dataset class or setting that prevents it.
        why: the reason.
        instead: what to do about it.
    """

    op: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.op}: {self.why}; {self.instead}"


@dataclass(frozen=True)
class Resize:
    """Scales an image.

    Attributes:
        size: height and width; or the shorter edge alone; or nothing, and then ``max_size`` is the
            longer edge.
        max_size: the most that the longer edge may have.
        filter: one of ``FILTERS``.
    """

    name: ClassVar[str] = "resize"
    draws: ClassVar[bool] = False
    size: tuple[int, ...]
    max_size: int | None
    filter: str

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        first, second = (*self.size, 0, 0)[:2]
        return [len(self.size), first, second, self.max_size or 0, FILTERS.index(self.filter)]

    def __str__(self) -> str:
        size = "x".join(map(str, self.size)) or "any"
        limit = f", max_size={self.max_size}" if self.max_size else ""
        return f"Resize({size}{limit}, {self.filter})"


@dataclass(frozen=True)
class CenterCrop:
    """Cuts the middle out of an image; zeros where the image is smaller."""

    name: ClassVar[str] = "center_crop"
    draws: ClassVar[bool] = False
    size: Size

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return [*self.size]

    def __str__(self) -> str:
        return f"CenterCrop({self.size[0]}x{self.size[1]})"


@dataclass(frozen=True)
class RandomCrop:
    """Cuts a random part of fixed size out of a padded image.

    Attributes:
        size: of the result.
        padding: left, top, right, bottom.
        pad_if_needed: pad images that are too small further.
        mode: one of ``PADDING_MODES``.
        fill: red, green, blue.
        version: 1 or 2; torchvision.transforms and its v2 draw differently.
    """

    name: ClassVar[str] = "random_crop"
    draws: ClassVar[bool] = True
    size: Size
    padding: tuple[int, int, int, int]
    pad_if_needed: bool
    mode: str
    fill: tuple[int, int, int]
    version: int

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        look = [PADDING_MODES.index(self.mode), *self.fill]
        return [*self.size, *self.padding, self.pad_if_needed, *look, self.version]

    def __str__(self) -> str:
        padding = f", padding={self.padding} {self.mode}" if any(self.padding) else ""
        return f"RandomCrop({self.size[0]}x{self.size[1]}{padding})"


@dataclass(frozen=True)
class RandomResizedCrop:
    """Cuts a random part of random size out of an image and scales it.

    Attributes:
        size: of the result.
        scale: least and greatest share of the area.
        log_ratio: logarithms of the least and the greatest ratio of width to height, in float32.
        ratio: the same, as they were given; for images that no draw fits.
        filter: one of ``FILTERS``.
        fused: torch rounds once where it scales a draw, see native/random.hpp.
    """

    name: ClassVar[str] = "random_resized_crop"
    draws: ClassVar[bool] = True
    size: Size
    scale: tuple[float, float]
    log_ratio: tuple[float, float]
    ratio: tuple[float, float]
    filter: str
    fused: bool

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        look = [FILTERS.index(self.filter), self.fused]
        return [*self.size, *self.scale, *self.log_ratio, *self.ratio, *look]

    def __str__(self) -> str:
        return f"RandomResizedCrop({self.size[0]}x{self.size[1]}, {self.filter})"


@dataclass(frozen=True)
class RandomHorizontalFlip:
    """Mirrors left and right with probability ``p``."""

    name: ClassVar[str] = "flip_x"
    draws: ClassVar[bool] = True
    p: float

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return [self.p]

    def __str__(self) -> str:
        return f"RandomHorizontalFlip(p={self.p:g})"


@dataclass(frozen=True)
class RandomVerticalFlip:
    """Mirrors top and bottom with probability ``p``."""

    name: ClassVar[str] = "flip_y"
    draws: ClassVar[bool] = True
    p: float

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return [self.p]

    def __str__(self) -> str:
        return f"RandomVerticalFlip(p={self.p:g})"


@dataclass(frozen=True)
class RandomGrayscale:
    """Replaces colours by their luma with probability ``p``."""

    name: ClassVar[str] = "random_gray"
    draws: ClassVar[bool] = True
    p: float

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return [self.p]

    def __str__(self) -> str:
        return f"RandomGrayscale(p={self.p:g})"


@dataclass(frozen=True)
class Pad:
    """Adds a border.

    Attributes:
        padding: left, top, right, bottom.
        mode: one of ``PADDING_MODES``.
        fill: red, green, blue.
    """

    name: ClassVar[str] = "pad"
    draws: ClassVar[bool] = False
    padding: tuple[int, int, int, int]
    mode: str
    fill: tuple[int, int, int]

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return [*self.padding, PADDING_MODES.index(self.mode), *self.fill]

    def __str__(self) -> str:
        return f"Pad({self.padding}, {self.mode})"


@dataclass(frozen=True)
class Grayscale:
    """Replaces colours by their luma; how many channels come out, the tail says."""

    name: ClassVar[str] = "gray"
    draws: ClassVar[bool] = False

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return []

    def __str__(self) -> str:
        return "Grayscale()"


Op = (
    Resize
    | CenterCrop
    | RandomCrop
    | RandomResizedCrop
    | RandomHorizontalFlip
    | RandomVerticalFlip
    | RandomGrayscale
    | Pad
    | Grayscale
    | Augmentation
)


def size_after(op: Op, size: Size | None) -> Size | None:
    """Size of an image of ``size`` after ``op``; None where it depends on the image."""
    match op:
        case CenterCrop() | RandomCrop() | RandomResizedCrop() | Affine():
            return op.size
        case Resize(size=(height, width)):
            return height, width
        case Pad(padding=(left, top, right, bottom)) if size is not None:
            return size[0] + top + bottom, size[1] + left + right
        case Resize() if size is not None:
            return _scaled(op, size)
        case RandomRotation(expand=True):
            return None
        case _:
            return size


def _scaled(op: Resize, size: Size) -> Size:
    shorter, longer = min(size), max(size)
    if not op.size:
        assert op.max_size is not None
        new = int(op.max_size * shorter / longer), op.max_size
    else:
        new = op.size[0], int(op.size[0] * longer / shorter)
        if op.max_size is not None and new[1] > op.max_size:
            new = int(op.max_size * new[0] / new[1]), op.max_size
    return (new[1], new[0]) if size[1] <= size[0] else new


_ITEM_BYTES = {"uint8": 1, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Tail:
    """From finished bytes to the tensor, which is (channels, height, width) in memory.

    Attributes:
        dtype: "uint8", "float32", "float16" or "bfloat16".
        channels: 3, or 1: the first channel alone.
        table: the value of each of 256 bytes in each of 3 channels, as bytes in ``dtype`` (16-bit
            floats as their bits); empty for "uint8", which keeps the bytes.
        mean, std: what the transform normalises with; a hint for faster formulas, which are taken
            only where they give the table.
    """

    dtype: str
    channels: int
    table: bytes = field(repr=False)
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        wanted = 0 if self.dtype == "uint8" else 768 * _ITEM_BYTES[self.dtype]
        if len(self.table) != wanted or self.channels not in (1, 3):
            raise ValueError(
                f"a tail of dtype {self.dtype} has 1 or 3 channels and a table of {wanted} bytes, "
                f"not {self.channels} and {len(self.table)}"
            )

    def array(self) -> NDArray[np.float32] | NDArray[np.uint16] | None:
        """The table, of shape (3, 256): float32, or the bits of 16-bit floats; None for "uint8"."""
        if self.dtype == "uint8":
            return None
        if self.dtype == "float32":
            return np.frombuffer(self.table, np.float32).reshape(3, 256)
        return np.frombuffer(self.table, np.uint16).reshape(3, 256)

    def black(self) -> tuple[float, ...]:
        """What a black pixel becomes, one value per channel."""
        table = self.array()
        if table is None:
            return (0.0,) * self.channels
        first = table[: self.channels, 0]
        if self.dtype == "bfloat16":
            values = (first.astype(np.uint32) << 16).view(np.float32)
        else:
            values = first.view(np.float16 if self.dtype == "float16" else np.float32)
        return tuple(float(value) for value in values)

    def __str__(self) -> str:
        kind = f"{self.dtype} of {self.channels} channel" + ("s" if self.channels > 1 else "")
        normalised = self.mean != (0.0, 0.0, 0.0) or self.std != (1.0, 1.0, 1.0)
        return kind + (", normalised" if normalised else "")


@dataclass(frozen=True)
class Plan:
    """All that is done to one sample. Hashable: equal plans give equal bits.

    Attributes:
        ops: in their order.
        tail: makes the tensor.
        order: one of ``PASS_ORDERS``, as the installed Pillow has it.
    """

    ops: tuple[Op, ...]
    tail: Tail
    order: str

    @property
    def draws(self) -> bool:
        """True where the result depends on the sample's key."""
        return any(op.draws for op in self.ops)

    @property
    def output_size(self) -> Size | None:
        """(height, width) of every result; None where it depends on the image."""
        size: Size | None = None
        for op in self.ops:
            size = size_after(op, size)
        return size

    @property
    def sample_bytes(self) -> int:
        """Memory of one result; 0 where its size depends on the image."""
        height, width = self.output_size or (0, 0)
        return height * width * self.tail.channels * _ITEM_BYTES[self.tail.dtype]

    def __str__(self) -> str:
        return " > ".join([*map(str, self.ops), str(self.tail)])
