"""Operations of a plan that change colours, rotate, choose from a policy, or erase.

The native core draws and computes from their numbers; native/plan.cpp lists them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

OPERATIONS = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
    "Invert",
)
"""What policies choose from, by torchvision's names; the native core knows one by its place."""

AFFINE_FILTERS = {"nearest": 0, "bilinear": 2, "bicubic": 4}
"""The filters that Pillow rotates with, and their numbers in the native core."""

Range = tuple[float, float]
"""From and to."""


@dataclass(frozen=True)
class Sampling:
    """How rotations and shears sample an image.

    Attributes:
        filter: one of ``AFFINE_FILTERS``.
        fill: red, green, blue of what comes from outside.
    """

    filter: str
    fill: tuple[int, int, int]

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return [AFFINE_FILTERS[self.filter], *self.fill]


ADJUSTMENTS = {
    "brightness": 6,
    "contrast": 7,
    "saturation": 8,
    "hue": 9,
    "sharpness": 10,
    "invert": 11,
    "posterize": 12,
    "solarize": 13,
    "auto_contrast": 14,
    "equalize": 15,
}
"""Changes of colours and their numbers in the native core."""


@dataclass(frozen=True)
class Adjust:
    """Changes colours by a known amount.

    Attributes:
        kind: one of ``ADJUSTMENTS``.
        amount: the factor; for "hue" what is added to Pillow's hue byte; bits kept or threshold; 0
            where there is none.
    """

    name: ClassVar[str] = "adjust"
    draws: ClassVar[bool] = False
    kind: str
    amount: float = 0.0

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return [ADJUSTMENTS[self.kind], self.amount]

    def __str__(self) -> str:
        return f"Adjust({self.kind}, {self.amount:g})"


@dataclass(frozen=True)
class Affine:
    """Moves pixels by a known matrix, as Pillow's ``Image.transform`` does.

    Attributes:
        size: (height, width) of the result.
        matrix: six numbers; where each pixel of the result comes from.
        sampling: filter and fill.
    """

    name: ClassVar[str] = "affine"
    draws: ClassVar[bool] = False
    size: tuple[int, int]
    matrix: tuple[float, float, float, float, float, float]
    sampling: Sampling

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return [self.size[1], self.size[0], *self.matrix, *self.sampling.numbers()]

    def __str__(self) -> str:
        return f"Affine({self.size[0]}x{self.size[1]}, {self.sampling.filter})"


@dataclass(frozen=True)
class ColorJitter:
    """Changes brightness, contrast, saturation and hue in random order.

    Attributes:
        brightness, contrast, saturation: from which range the factor is drawn; None: left alone.
        hue: the same for the share of the colour circle that hues turn by.
        fused: torch rounds once where it scales a draw, see native/random.hpp.
    """

    name: ClassVar[str] = "color_jitter"
    draws: ClassVar[bool] = True
    brightness: Range | None
    contrast: Range | None
    saturation: Range | None
    hue: Range | None
    fused: bool

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        parts = (self.brightness, self.contrast, self.saturation, self.hue)
        return [x for part in parts for x in (part is not None, *(part or (0, 0)))] + [self.fused]

    def __str__(self) -> str:
        names = ("brightness", "contrast", "saturation", "hue")
        given = [f"{n}={_interval(getattr(self, n))}" for n in names if getattr(self, n)]
        return f"ColorJitter({', '.join(given)})"


def _interval(values: Range) -> str:
    return f"{values[0]:g}..{values[1]:g}"


@dataclass(frozen=True)
class RandomOperation:
    """Applies one operation with a probability.

    Attributes:
        p: the probability.
        exact: the draw is compared with ``p`` in double precision, else in float32.
        operation: one of ``OPERATIONS``.
        magnitude: bits, threshold or factor; 0 where the operation has none.
    """

    name: ClassVar[str] = "random_operation"
    draws: ClassVar[bool] = True
    p: float
    exact: bool
    operation: str
    magnitude: float

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return [self.p, self.exact, OPERATIONS.index(self.operation), self.magnitude]

    def __str__(self) -> str:
        magnitude = f"{self.magnitude:g}, " if self.magnitude else ""
        return f"Random{self.operation}({magnitude}p={self.p:g})"


@dataclass(frozen=True)
class Choice:
    """An operation that a policy may choose.

    Attributes:
        operation: one of ``OPERATIONS``.
        signed: its magnitude may be negated.
        graded: it has magnitudes.
        magnitudes: NaN is torchvision's share of the size that images are moved by.
    """

    operation: str
    signed: bool
    graded: bool
    magnitudes: tuple[float, ...] = field(repr=False)

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return [OPERATIONS.index(self.operation), self.signed, self.graded, *self.magnitudes]


@dataclass(frozen=True)
class Augment:
    """RandAugment, or TrivialAugmentWide: a few operations, each drawn from all.

    Attributes:
        title: the transform's name.
        version: 1 or 2; torchvision.transforms and its v2 draw differently.
        rounds: how many operations.
        sampling: of those that move pixels.
        drawn: the magnitude is drawn, too.
        bins, index: which magnitude a NaN stands for.
        choices: what is drawn from, with equally many magnitudes.
    """

    name: ClassVar[str] = "augment"
    draws: ClassVar[bool] = True
    title: str
    version: int
    rounds: int
    sampling: Sampling
    drawn: bool
    bins: int
    index: int
    choices: tuple[Choice, ...] = field(repr=False)

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        count = len(self.choices[0].magnitudes)
        head = [self.version, self.rounds, *self.sampling.numbers(), self.drawn]
        head += [self.bins, self.index, count, len(self.choices)]
        return head + [number for choice in self.choices for number in choice.numbers()]

    def __str__(self) -> str:
        details = "" if self.drawn else f"num_ops={self.rounds}, magnitude={self.index}, "
        return f"{self.title}({details}{self.sampling.filter})"


@dataclass(frozen=True)
class PolicyStep:
    """One of the two operations of a policy; see ``Choice``.

    Attributes:
        p: its probability.
        index: which magnitude a NaN stands for.
    """

    operation: str
    p: float
    signed: bool
    magnitude: float
    index: int

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        place = OPERATIONS.index(self.operation)
        return [place, self.p, self.signed, self.magnitude, self.index]


@dataclass(frozen=True)
class AutoAugment:
    """Draws one of many policies: two operations, each with a probability.

    Attributes:
        version: 1 or 2; torchvision.transforms and its v2 draw differently.
        sampling: of those that move pixels.
        bins: see ``PolicyStep.index``.
        policies: what is drawn from.
    """

    name: ClassVar[str] = "auto_augment"
    draws: ClassVar[bool] = True
    version: int
    sampling: Sampling
    bins: int
    policies: tuple[tuple[PolicyStep, PolicyStep], ...] = field(repr=False)

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        head = [self.version, *self.sampling.numbers(), self.bins, len(self.policies)]
        return head + [n for policy in self.policies for step in policy for n in step.numbers()]

    def __str__(self) -> str:
        return f"AutoAugment({len(self.policies)} policies, {self.sampling.filter})"


@dataclass(frozen=True)
class RandomRotation:
    """Rotates by a random angle.

    Attributes:
        degrees: from which range the angle is drawn.
        expand: the result holds the whole rotated image.
        center: x and y of what stays in place; None: the middle.
        sampling: filter and fill.
        fused: see ``ColorJitter``.
    """

    name: ClassVar[str] = "random_rotation"
    draws: ClassVar[bool] = True
    degrees: Range
    expand: bool
    center: Range | None
    sampling: Sampling
    fused: bool

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        place = [self.center is not None, *(self.center or (0, 0))]
        return [*self.degrees, self.fused, self.expand, *place, *self.sampling.numbers()]

    def __str__(self) -> str:
        expand = ", expand" if self.expand else ""
        return f"RandomRotation({_interval(self.degrees)}{expand}, {self.sampling.filter})"


@dataclass(frozen=True)
class RandomAffine:
    """Rotates, moves, scales and shears by random amounts.

    Attributes:
        degrees: from which range the angle is drawn.
        translate: greatest shares of width and height to move by; None: not at all.
        scale: from which range the scale is drawn; None: 1.
        shear: ranges of the angles in x, or in x and y; or none.
        center: x and y of what stays in place; None: the middle.
        sampling: filter and fill.
        fused: see ``ColorJitter``.
        version: 1 or 2; torchvision.transforms and its v2 round matrices differently.
    """

    name: ClassVar[str] = "random_affine"
    draws: ClassVar[bool] = True
    degrees: Range
    translate: Range | None
    scale: Range | None
    shear: tuple[float, ...]
    center: Range | None
    sampling: Sampling
    fused: bool
    version: int

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        numbers: list[float] = [*self.degrees]
        for pair in (self.translate, self.scale):
            numbers += [pair is not None, *(pair or (0, 0))]
        numbers += [len(self.shear), *(self.shear + (0.0,) * 4)[:4]]
        numbers += [self.center is not None, *(self.center or (0, 0))]
        return [*numbers, *self.sampling.numbers(), self.fused, self.version]

    def __str__(self) -> str:
        return f"RandomAffine({_interval(self.degrees)}, {self.sampling.filter})"


@dataclass(frozen=True)
class RandomErasing:
    """Overwrites a random rectangle of the tensor, with a probability.

    Attributes:
        p: the probability.
        scale: least and greatest share of the area.
        log_ratio: logarithms of the least and the greatest ratio of height to width, in float32.
        fused: see ``ColorJitter``.
        bits: what is written into each of 3 channels: the bits of a number of the tail's type.
    """

    name: ClassVar[str] = "random_erasing"
    draws: ClassVar[bool] = True
    p: float
    scale: Range
    log_ratio: Range
    fused: bool
    bits: tuple[int, int, int] = (0, 0, 0)

    def numbers(self) -> list[float]:
        """Its parameters in the order that the native core reads."""
        return [self.p, *self.scale, *self.log_ratio, self.fused, *self.bits]

    def __str__(self) -> str:
        ratio = _interval((math.exp(self.log_ratio[0]), math.exp(self.log_ratio[1])))
        return f"RandomErasing(p={self.p:g}, scale={_interval(self.scale)}, ratio={ratio})"


Augmentation = (
    Adjust
    | Affine
    | ColorJitter
    | RandomOperation
    | Augment
    | AutoAugment
    | RandomRotation
    | RandomAffine
    | RandomErasing
)
"""Any of these operations."""
