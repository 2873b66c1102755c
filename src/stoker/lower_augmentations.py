"""torchvision's augmentations, read as operations of a plan; see lower.py."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from stoker import augmentations as ops
from stoker import proof
from stoker.augmentations import AFFINE_FILTERS, OPERATIONS, Choice, PolicyStep, Sampling
from stoker.fields import Fields, UnfitError

_LARGEST_FACTOR = 1e4
_LARGEST_ANGLE = 1e5
_SIZES = 8192  # kComparedSizes of native/augment.cpp


def fused() -> bool:
    """Whether torch scales uniform draws with one rounding."""
    known = proof.fused_uniform()
    if known is None:
        raise UnfitError("torch's generator draws in an unknown way", "use another torch version")
    return known


def logarithms(fields: Fields) -> tuple[float, float]:
    """The logarithms of ``ratio`` in float32, with exponentials proven for them."""
    if fields.version == 2:
        values = fields.get("_log_ratio")
    else:
        values = torch.log(torch.tensor(fields.get("ratio")))
    if type(values) is not torch.Tensor or values.dtype != torch.float32 or values.shape != (2,):
        raise UnfitError(f"log(ratio)={values!r}", "leave torch's default dtype at float32")
    low, high = values.tolist()
    if not low <= high or not proof.prove_exponentials(low, high, fused()):
        raise UnfitError(
            "torch.exp gives values that cannot be reproduced", "use another torch version"
        )
    return low, high


def color_jitter(fields: Fields) -> ops.ColorJitter:
    """ColorJitter."""

    def part(name: str, least: float, greatest: float) -> ops.Range | None:
        return None if fields.get(name) is None else fields.range(name, least, greatest)

    brightness, contrast, saturation = (
        part(name, 0.0, _LARGEST_FACTOR) for name in ("brightness", "contrast", "saturation")
    )
    return ops.ColorJitter(brightness, contrast, saturation, part("hue", -0.5, 0.5), fused())


def random_operation(
    fields: Fields, operation: str, name: str = "", least: float = 0.0, greatest: float = 0.0
) -> ops.RandomOperation:
    """RandomInvert and the like, which apply one operation; ``name`` is that of its magnitude."""
    magnitude = fields.number(fields.get(name), name, least, greatest) if name else 0.0
    if operation == "Posterize" and type(fields.get(name)) is not int:
        raise UnfitError(f"{name}={fields.get(name)!r}", "give an integer")
    return ops.RandomOperation(fields.probability(), fields.version == 1, operation, magnitude)


def _sampling(fields: Fields) -> Sampling:
    name = fields.filter()
    if name not in AFFINE_FILTERS:
        raise UnfitError(f"interpolation={name}", f"use one of {tuple(AFFINE_FILTERS)}")
    return Sampling(name, fields.colour())


_Space = dict[str, tuple[Any, bool]]


def _space(fields: Fields, bins: int, sized: bool = True) -> _Space:
    """Magnitudes, or None, and whether they are signed, of each operation.

    Magnitudes that depend on the image's size (in policies that are ``sized``) are for the size
    known so far, else of one pixel.
    """
    height, width = fields.size or (1, 1)
    transform = fields.transform
    if fields.version == 2:
        space = {
            name: (make(bins, height, width), signed)
            for name, (make, signed) in transform._AUGMENTATION_SPACE.items()
        }
    else:
        size = ((height, width),) if sized else ()
        space = transform._augmentation_space(bins, *size)
    known: _Space = {}
    for name, (values, signed) in space.items():
        if name not in OPERATIONS or type(signed) is not bool:
            raise UnfitError(f"has an unknown operation {name}", "use torchvision's policies")
        if values is not None and values.ndim == 0:
            values = None  # torchvision.transforms gives those that need none the number 0
        if values is not None and (values.ndim != 1 or len(values) != bins):
            raise UnfitError(f"has other magnitudes of {name}", "use torchvision's policies")
        known[name] = values, signed
    return known


def _magnitude(fields: Fields, operation: str, values: Any, index: int, relative: bool) -> float:
    """One magnitude as torchvision hands it to the operation; NaN where it depends on the size."""
    if values is None:
        return 0.0
    value = float(values[index])
    if operation.startswith("Translate") and relative and fields.size is None:
        if not _translations_agree(len(values), index):
            raise UnfitError(
                "torch.linspace gives values that cannot be reproduced",
                "put it behind a crop or resize to a fixed size",
            )
        return math.nan
    if operation == "Solarize" and fields.version == 2:
        value = 255.0 * value
    if operation == "Posterize" and not 1 <= int(value) <= 8:
        raise UnfitError("posterizes to less than 1 bit", "use a smaller magnitude")
    return float(int(value)) if operation == "Posterize" else value


@lru_cache(maxsize=64)
def _translations_agree(bins: int, index: int) -> bool:
    """Whether the native core moves images of any size by as many pixels as torchvision does."""
    moved = proof.translations(bins, index, _SIZES)
    return moved == [
        int(torch.linspace(0.0, 150.0 / 331.0 * size, bins)[index].item())
        for size in range(1, _SIZES + 1)
    ]


def _bins(fields: Fields) -> int:
    return fields.whole(fields.get("num_magnitude_bins"), "num_magnitude_bins", 2)


def rand_augment(fields: Fields) -> ops.Augment:
    """RandAugment."""
    bins = _bins(fields)
    rounds = fields.whole(fields.get("num_ops"), "num_ops", 0)
    index = fields.whole(fields.get("magnitude"), "magnitude", 0)
    if index >= bins or rounds > 12:
        raise UnfitError(
            f"num_ops={rounds}, magnitude={index}", f"give at most 12 and below {bins}"
        )
    choices = tuple(
        Choice(name, signed, values is not None, (_magnitude(fields, name, values, index, True),))
        for name, (values, signed) in _space(fields, bins).items()
    )
    sampling = _sampling(fields)
    return ops.Augment("RandAugment", fields.version, rounds, sampling, False, bins, index, choices)


def trivial_augment(fields: Fields) -> ops.Augment:
    """TrivialAugmentWide."""
    bins = _bins(fields)
    choices = tuple(
        Choice(
            name,
            signed,
            values is not None,
            tuple(_magnitude(fields, name, values, i, False) for i in range(bins)),
        )
        for name, (values, signed) in _space(fields, bins, sized=False).items()
    )
    sampling = _sampling(fields)
    return ops.Augment("TrivialAugmentWide", fields.version, 1, sampling, True, bins, 0, choices)


def auto_augment(fields: Fields) -> ops.AutoAugment:
    """AutoAugment."""
    bins = 10
    space = _space(fields, bins)

    def step(given: Any) -> PolicyStep:
        known = isinstance(given, list | tuple) and len(given) == 3 and given[0] in space
        values, signed = space[given[0]] if known else (None, False)
        if not known or (given[2] is None) != (values is None) or given[2] not in _indices(values):
            raise UnfitError(f"has an unknown policy {given}", "use torchvision's policies")
        operation, p, index = given
        p = fields.number(p, "probability", 0.0, 1.0)
        magnitude = _magnitude(fields, operation, values, index, True)
        return PolicyStep(operation, p, signed, magnitude, index or 0)

    policies = fields.get("_policies" if fields.version == 2 else "policies")
    if type(policies) is not list or not all(len(pair) == 2 for pair in policies) or not policies:
        raise UnfitError("policies are not a list of pairs", "use torchvision's policies")
    pairs = tuple((step(first), step(second)) for first, second in policies)
    return ops.AutoAugment(fields.version, _sampling(fields), bins, pairs)


def _indices(values: Any) -> list[int | None]:
    return [None] if values is None else [*range(len(values))]


def _pair_or_none(fields: Fields, name: str, least: float, greatest: float) -> ops.Range | None:
    if fields.get(name) is None:
        return None
    x, y = (fields.number(v, name, least, greatest) for v in fields.sequence(name, (2,)))
    return x, y


def random_rotation(fields: Fields) -> ops.RandomRotation:
    """RandomRotation."""
    if type(fields.get("expand")) is not bool:
        raise UnfitError(f"expand={fields.get('expand')!r}", "give True or False")
    return ops.RandomRotation(
        fields.range("degrees", -_LARGEST_ANGLE, _LARGEST_ANGLE),
        fields.get("expand"),
        _pair_or_none(fields, "center", -1e5, 1e5),
        _sampling(fields),
        fused(),
    )


def random_affine(fields: Fields) -> ops.RandomAffine:
    """RandomAffine."""
    shear: tuple[float, ...] = ()
    if fields.get("shear") is not None:
        angles = fields.sequence("shear", (2, 4))
        shear = tuple(fields.number(v, "shear", -_LARGEST_ANGLE, _LARGEST_ANGLE) for v in angles)
        if any(shear[i] > shear[i + 1] for i in range(0, len(shear), 2)):
            raise UnfitError(f"shear={shear} descends", "give (least, greatest)")
    return ops.RandomAffine(
        fields.range("degrees", -_LARGEST_ANGLE, _LARGEST_ANGLE),
        _pair_or_none(fields, "translate", 0.0, 1.0),
        None if fields.get("scale") is None else fields.range("scale", 1e-3, 1e3),
        shear,
        _pair_or_none(fields, "center", -1e5, 1e5),
        _sampling(fields),
        fused(),
        fields.version,
    )


def random_erasing(fields: Fields) -> ops.RandomErasing:
    """RandomErasing, with no value yet: that depends on the transforms after it."""
    erasing_values(fields.values)
    return ops.RandomErasing(
        fields.probability(), fields.range("scale", 0.0, 1.0), logarithms(fields), fused()
    )


def erasing_values(attributes: dict[str, Any]) -> list[float]:
    """The value or values that a RandomErasing writes."""
    value = attributes.get("value")
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    if not all(type(v) in (int, float) and abs(v) < 1e9 for v in values):
        raise UnfitError(f"value={value!r}", "give a number, or one for each channel")
    return [float(v) for v in values]
