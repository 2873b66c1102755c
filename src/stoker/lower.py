"""Stock transforms to a plan: reads torchvision's objects without running them on images.

Nothing is guessed. Every object must be a genuine stock transform with attributes of the expected
kind; whatever is not is refused by name. ``scripts/docs`` writes docs/transforms.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from stoker import lower_augmentations as more
from stoker import plan as ops
from stoker import proof
from stoker.augmentations import RandomErasing
from stoker.fields import Fields, UnfitError
from stoker.plan import Op, Plan, Size, Tail, size_after
from stoker.plan import Refusal as Refusal
from stoker.proof import prove as prove
from stoker.stock import Stock, identify, surroundings

_MOST_OPS = 8


def _resize(fields: Fields) -> Op:
    size, max_size = fields.get("size"), fields.get("max_size")
    if isinstance(size, int):
        size = (size,)
    elif size is None and fields.version == 2:
        size = ()
    else:
        size = fields.sequence("size", (1, 2))
    sides = tuple(fields.whole(side, "size") for side in size)
    if max_size is not None:
        fields.whole(max_size, "max_size")
    if (max_size is None and not sides) or (
        max_size is not None and (len(sides) == 2 or (sides and max_size <= sides[0]))
    ):
        raise UnfitError(f"size={size}, max_size={max_size}: torchvision raises", "correct them")
    return ops.Resize(sides, max_size, fields.filter())


def _random_crop(fields: Fields) -> Op:
    padding = (0, 0, 0, 0)
    if fields.get("padding") is not None:
        padding = fields.padding()
        if fields.version == 2:  # keeps it as left, right, top, bottom
            padding = padding[0], padding[2], padding[1], padding[3]
    if type(fields.get("pad_if_needed")) is not bool:
        raise UnfitError(f"pad_if_needed={fields.get('pad_if_needed')!r}", "give True or False")
    needed = fields.get("pad_if_needed")
    return ops.RandomCrop(
        fields.pair("size"), padding, needed, fields.mode(), fields.fill(), fields.version
    )


def _random_resized_crop(fields: Fields) -> Op:
    ratio = fields.range("ratio", 1e-4, 1e4)
    scale = fields.range("scale", 0.0, 1e6)
    return ops.RandomResizedCrop(
        fields.pair("size"), scale, more.logarithms(fields), ratio, fields.filter(), more.fused()
    )


def _grayscale(fields: Fields) -> Op:
    channels = fields.get("num_output_channels")
    if type(channels) is not int or channels not in (1, 3):
        raise UnfitError(f"num_output_channels={channels!r}", "give 1 or 3")
    fields.bands = "L" if channels == 1 else "RGB"
    return ops.Grayscale()


@dataclass(frozen=True)
class Rule:
    """How a stock transform is lowered.

    Attributes:
        role: "geometry" changes a Pillow image; "flip" does, and may also follow the conversion to
            a tensor; "convert" makes the tensor; "tail" maps each of its values; "erase" overwrites
            some of them; "container" holds others; "nothing" does nothing.
        versions: "v1", "v2", "torch", "timm": where the class is.
        attributes: all that it may have; others would be news.
        read: makes the operation of a geometry, a flip or an erasing.
        note: for the documentation.
    """

    role: str
    versions: str
    attributes: str = ""
    read: Callable[[Fields], Op] | None = None
    note: str = ""


_BOTH = "v1, v2"
_AFFINE = "nearest, bilinear and bicubic; `fill` a number or three from 0 to 255"
RULES: dict[str, Rule] = {
    "Compose": Rule("container", _BOTH, "transforms"),
    "Sequential": Rule("container", "torch"),
    "Identity": Rule("nothing", "v2, torch"),
    "Resize": Rule(
        "geometry",
        _BOTH,
        "size max_size interpolation antialias",
        _resize,
        "int, pair or max_size; every interpolation; `antialias` has no effect on photos",
    ),
    "CenterCrop": Rule(
        "geometry",
        _BOTH,
        "size",
        lambda fields: ops.CenterCrop(fields.pair("size")),
        "pads with zeros where the image is smaller",
    ),
    "RandomCrop": Rule(
        "geometry",
        _BOTH,
        "size padding pad_if_needed fill _fill padding_mode",
        _random_crop,
        "every padding mode; `fill` a number or three from 0 to 255",
    ),
    "RandomResizedCrop": Rule(
        "geometry",
        _BOTH,
        "size scale ratio _log_ratio interpolation antialias",
        _random_resized_crop,
        "any scale, ratios from 1e-4 to 1e4; needs torch's default dtype at float32",
    ),
    "RandomHorizontalFlip": Rule(
        "flip", _BOTH, "p", lambda fields: ops.RandomHorizontalFlip(fields.probability())
    ),
    "RandomVerticalFlip": Rule(
        "flip", _BOTH, "p", lambda fields: ops.RandomVerticalFlip(fields.probability())
    ),
    "Pad": Rule(
        "geometry",
        _BOTH,
        "padding fill _fill padding_mode",
        lambda fields: ops.Pad(fields.padding(), fields.mode(), fields.fill()),
        "every mode; no negative padding; `fill` a number or three from 0 to 255",
    ),
    "Grayscale": Rule("geometry", _BOTH, "num_output_channels", _grayscale),
    "RandomGrayscale": Rule(
        "geometry", _BOTH, "p", lambda fields: ops.RandomGrayscale(fields.probability())
    ),
    "ColorJitter": Rule("geometry", _BOTH, "brightness contrast saturation hue", more.color_jitter),
    "RandomInvert": Rule(
        "geometry", _BOTH, "p", lambda fields: more.random_operation(fields, "Invert")
    ),
    "RandomPosterize": Rule(
        "geometry",
        _BOTH,
        "bits p",
        lambda fields: more.random_operation(fields, "Posterize", "bits", 1, 8),
        "1 to 8 bits",
    ),
    "RandomSolarize": Rule(
        "geometry",
        _BOTH,
        "threshold p",
        lambda fields: more.random_operation(fields, "Solarize", "threshold", -1e4, 1e4),
    ),
    "RandomAdjustSharpness": Rule(
        "geometry",
        _BOTH,
        "sharpness_factor p",
        lambda fields: more.random_operation(fields, "Sharpness", "sharpness_factor", 0.0, 1e4),
    ),
    "RandomAutocontrast": Rule(
        "geometry", _BOTH, "p", lambda fields: more.random_operation(fields, "AutoContrast")
    ),
    "RandomEqualize": Rule(
        "geometry", _BOTH, "p", lambda fields: more.random_operation(fields, "Equalize")
    ),
    "RandomRotation": Rule(
        "geometry",
        _BOTH,
        "degrees interpolation expand center fill _fill",
        more.random_rotation,
        f"{_AFFINE}; `expand` before a resize or crop to a fixed size",
    ),
    "RandomAffine": Rule(
        "geometry",
        _BOTH,
        "degrees translate scale shear interpolation fill _fill center",
        more.random_affine,
        _AFFINE,
    ),
    "RandAugment": Rule(
        "geometry",
        _BOTH,
        "num_ops magnitude num_magnitude_bins interpolation fill _fill",
        more.rand_augment,
        f"up to 12 operations; {_AFFINE}",
    ),
    "TrivialAugmentWide": Rule(
        "geometry",
        _BOTH,
        "num_magnitude_bins interpolation fill _fill",
        more.trivial_augment,
        _AFFINE,
    ),
    "AutoAugment": Rule(
        "geometry",
        _BOTH,
        "policy policies _policies interpolation fill _fill",
        more.auto_augment,
        f"all policies; {_AFFINE}",
    ),
    "ToTensor": Rule("convert", _BOTH, note="divides by 255, in torch's default dtype"),
    "PILToTensor": Rule("convert", _BOTH),
    "ToImage": Rule("convert", "v2"),
    "MaybeToTensor": Rule("convert", "timm"),
    "MaybePILToTensor": Rule("convert", "timm"),
    "ToDtype": Rule("tail", "v2", "dtype scale", note="multiplies by 1/255 where v1 divides"),
    "ConvertImageDtype": Rule("tail", _BOTH, "dtype"),
    "Normalize": Rule("tail", _BOTH, "mean std inplace", note="also with mean and std as tensors"),
    "ToPureTensor": Rule("tail", "v2"),
    "RandomErasing": Rule(
        "erase",
        _BOTH,
        "p scale ratio _log_ratio value inplace",
        more.random_erasing,
        'with a number, or one for each channel, as value; not `"random"`',
    ),
}
"""The lowering table."""

_SEE = "use the transforms listed in docs/transforms.md"


def _flatten(transform: Any, depth: int = 0) -> Iterator[tuple[Any, Stock] | Refusal]:
    """The transforms inside of containers, in order; ends with the first that is not stock."""
    stock = identify(transform)
    if isinstance(stock, Refusal):
        yield stock
        return
    rule = RULES.get(stock.name)
    if rule is None:
        yield Refusal(stock.name, "has no native form", _SEE)
    elif rule.role == "container":
        inner = list(transform) if isinstance(transform, nn.Sequential) else transform.transforms
        if type(inner) not in (list, tuple) or depth == 32:
            yield Refusal(stock.name, "its transforms are not a list", "give a list")
            return
        for child in inner:
            yield from _flatten(child, depth + 1)
    elif rule.role != "nothing":
        known = {*rule.attributes.split(), *vars(nn.Module())}
        unknown = sorted(vars(transform).keys() - known) if stock.exact else []
        if unknown:
            yield Refusal(stock.name, f"has an unknown attribute {unknown[0]}", "leave it out")
        else:
            yield transform, stock


def lower_transform(transform: Any) -> Plan | Refusal:
    """The plan of a transform as it is now, or the first thing that prevents one.

    A millisecond, and 0.1 s once for each new ``ratio`` of RandomResizedCrop. The plan is not yet
    proven.
    """
    if transform is None:
        return Refusal(
            "transform=None", "images are not turned into tensors", "end with ToTensor()"
        )
    refusal = surroundings()
    if refusal is not None:
        return refusal
    done: list[Op] = []
    tail: list[Any] = []
    bands = "RGB"
    size: Size | None = None
    for found in _flatten(transform):
        if isinstance(found, Refusal):
            return found
        one, stock = found
        rule = RULES[stock.name]
        if rule.role == "convert" or (rule.role == "tail" and tail):
            tail.append(one)
        elif rule.read is None:
            return Refusal(
                stock.name, "comes before the conversion to a tensor", "move it to the end"
            )
        elif rule.role == "erase" and not tail:
            return Refusal(stock.name, "works on tensors", "put it after the conversion to one")
        elif tail and rule.role not in ("flip", "erase"):
            why = f"after {type(tail[0]).__name__} it works on tensors, with other results"
            return Refusal(stock.name, why, f"put it before {type(tail[0]).__name__}")
        else:
            fields = Fields(one, stock.version, bands, size)
            try:
                done.append(rule.read(fields))
            except UnfitError as unfit:
                return Refusal(stock.name, *unfit.args)
            bands, size = fields.bands, size_after(done[-1], size)
            if rule.role == "erase":
                tail.append(one)
    return _finish(tuple(done), tail, bands)


def _finish(done: tuple[Op, ...], tail: list[Any], bands: str) -> Plan | Refusal:
    if len(done) > _MOST_OPS:
        return Refusal("transform", f"has more than {_MOST_OPS} operations", "use fewer")
    if not tail:
        return Refusal("transform", "does not end in a tensor", "end with ToTensor()")
    if any(op.draws for op in done):
        if torch.get_default_dtype() != torch.float32:
            return Refusal("torch's default dtype", "changes the draws", "leave it at float32")
        if proof.fused_uniform() is None:
            return Refusal("torch", "draws in an unknown way", "use another version")
    order = "horizontal_first"
    if any(isinstance(op, ops.Resize | ops.RandomResizedCrop) for op in done):
        known = proof.pass_order()
        if known is None:
            return Refusal("Pillow", "resizes in an unknown way", "use another version")
        order = known
    table = _tail(tail, bands)
    if isinstance(table, Refusal):
        return table
    made, erased = table
    values = iter(erased)
    filled = (
        replace(op, bits=next(values)) if isinstance(op, RandomErasing) else op for op in done
    )
    return Plan(tuple(filled), made, order)


_DTYPES = {
    torch.uint8: "uint8",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


_Bits = tuple[int, int, int]


def _tail(transforms: list[Any], bands: str) -> tuple[Tail, list[_Bits]] | Refusal:
    """What the user's own transforms make of each of 256 bytes in each channel.

    And of what each RandomErasing among them writes.
    """
    from PIL import Image

    name = " > ".join(type(one).__name__ for one in transforms)
    ramp = np.arange(256, dtype=np.uint8)[None]
    image: Any = Image.fromarray(ramp if bands == "L" else np.stack([ramp] * 3, axis=-1))
    erased: list[Any] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for one in transforms:
                if _erases(one):
                    erased.append(_erased(image, vars(one)))
                else:
                    erased = [one(values) for values in erased]
                    image = one(image)
            batch = default_collate([image])
    except UnfitError as unfit:
        return Refusal("RandomErasing", *unfit.args)
    except Exception as error:  # noqa: BLE001  the user's transforms may raise anything
        return Refusal(name, f"raises {type(error).__name__}: {error}", "correct it")
    if type(batch) is not torch.Tensor:
        return Refusal(name, f"collates to {type(batch).__name__}", "end with ToPureTensor()")
    if batch.ndim != 4 or batch.shape[2:] != (1, 256) or batch.shape[1] not in (1, 3):
        return Refusal(name, f"gives the shape {tuple(batch.shape[1:])}", "give 1 or 3 channels")
    if batch.dtype not in _DTYPES or batch.requires_grad:
        return Refusal(name, f"gives {batch.dtype}", f"give one of {', '.join(_DTYPES.values())}")
    dtype, channels = _DTYPES[batch.dtype], batch.shape[1]
    written = [_bits(values) for values in erased]
    values = batch[0, :, 0].expand(3, 256).contiguous()
    if dtype == "uint8":
        if not torch.equal(values, torch.from_numpy(ramp).expand(3, 256)):
            return Refusal(name, "changes bytes", "leave bytes as they are")
        return Tail(dtype, channels, b""), written
    bits = values if dtype == "float32" else values.view(torch.int16)
    return Tail(dtype, channels, bits.numpy().tobytes(), *_normalisation(transforms)), written


def _erases(transform: Any) -> bool:
    stock = identify(transform)
    return isinstance(stock, Stock) and RULES[stock.name].role == "erase"


def _erased(image: Any, attributes: dict[str, Any]) -> Any:
    """A copy of a tensor, all of it overwritten as RandomErasing does."""
    values = more.erasing_values(attributes)
    if len(values) not in (1, image.shape[-3]):
        raise UnfitError(f"value={values} for {image.shape[-3]} channels", "give a single number")
    if not image.is_floating_point() and not all(0 <= value < 256 for value in values):
        raise UnfitError(f"value={values} for bytes", "give numbers from 0 to 255")
    image = image.clone()
    image[...] = torch.tensor(values)[:, None, None]
    return image


def _bits(image: torch.Tensor) -> _Bits:
    """The bits of the first pixel's values in 3 channels."""
    kinds = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF)}
    dtype, mask = kinds[image.element_size()]
    red, green, blue = image[:, 0, 0].expand(3).contiguous().view(dtype).tolist()
    return red & mask, green & mask, blue & mask


_Triple = tuple[float, float, float]


def _normalisation(transforms: list[Any]) -> tuple[_Triple, _Triple]:
    """Mean and standard deviation of the only Normalize; 0 and 1 where there is none or several."""
    normalising = [one for one in transforms if type(one).__name__ == "Normalize"]
    if len(normalising) == 1:
        triples = []
        for name in ("mean", "std"):
            values = torch.as_tensor(vars(normalising[0])[name], dtype=torch.float32).reshape(-1)
            if len(values) in (1, 3) and bool(torch.isfinite(values).all()):
                first, second, third = (values.tolist() * 3)[:3]
                triples.append((first, second, third))
        if len(triples) == 2:
            return triples[0], triples[1]
    return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


_INTRODUCTION = """\
# Transforms that run natively

Written by `scripts/docs` from the lowering table; a test compares the two.

A transform runs natively where every part of it is in this table, unchanged: no subclass with
methods of its own, no hook, no patch. `Compose` and `Sequential` may be nested. Everything else
runs as it does without stoker, and `loader.explain()` names the part that prevented more. Before a
plan is used it is compared, bit for bit, with the transform itself on a few small files.

| transform | in | role | remarks |
|---|---|---|---|
"""

_ROLES = {
    "container": "holds others",
    "nothing": "none",
    "geometry": "on images: before the conversion to a tensor",
    "flip": "before or after the conversion to a tensor",
    "convert": "makes the tensor",
    "tail": "after the conversion to a tensor",
    "erase": "after the conversion to a tensor",
}

_REMARKS = """
`v1` is `torchvision.transforms`, `v2` is `torchvision.transforms.v2`. A resize or crop after
`ToTensor`, `PILToTensor` or `ToImage` works on tensors, with other results than on images, and does
not run natively; nor do GaussianBlur (its bits depend on the processor), AugMix and
RandomPerspective. The result must be uint8, float32, float16 or bfloat16 with one or three
channels.
"""


def documentation() -> str:
    """The text of docs/transforms.md."""
    rows = [
        f"| `{name}` | {rule.versions} | {_ROLES[rule.role]} | {rule.note} |"
        for name, rule in RULES.items()
    ]
    return _INTRODUCTION + "\n".join(rows) + "\n" + _REMARKS
