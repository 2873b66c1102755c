"""Augmentations: torchvision's draws and Pillow's pixels, bit for bit, on every SIMD level."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import stoker
from oracle import bits, noise, transformed, words_drawn
from pictures import class_folder
from stoker import _native
from stoker.augmentations import (
    ADJUSTMENTS,
    AFFINE_FILTERS,
    Adjust,
    Affine,
    ColorJitter,
    RandomOperation,
    Sampling,
)
from stoker.engine import native_plan
from stoker.lower import lower_transform, prove
from stoker.plan import Op, Plan, Refusal, Tail

VERSIONS = pytest.mark.parametrize("T", [v1, v2], ids=["v1", "v2"])
LEVELS = pytest.mark.parametrize("level", _native.levels())
MODE = v1.InterpolationMode
FILTERS = [MODE.NEAREST, MODE.BILINEAR, MODE.BICUBIC]
BYTES = Tail("uint8", 3, b"")


def lowered(*transforms: Any) -> Plan:
    plan = lower_transform(v1.Compose([*transforms]))
    assert isinstance(plan, Plan), plan
    return plan


def run(plan: Plan, image: Image.Image, key: int, level: str = _native.levels()[-1]) -> Any:
    """The tensor that the plan makes of an image, and the words drawn; None where it declines."""
    native = native_plan(plan)
    status, steps, drawn = _native.resolve(native, *image.size, key)
    if status != "ok":
        return None, drawn
    height, width = (steps[-1]["height"], steps[-1]["width"]) if steps else image.size[::-1]
    pixels = np.asarray(image.convert("RGB"))
    status, tensor = native.run_pixels(pixels, key, height, width, level)
    assert status == "ok"
    return tensor, drawn


def _sizes(count: int, most: int, seed: int = 1) -> list[tuple[int, int, int]]:
    """Widths and heights from 1 to ``most``, small ones as often as large ones, and keys."""
    random = np.random.default_rng(seed)
    edges = np.exp(random.uniform(0, math.log(most), (count, 2))).astype(int)
    return [(int(w), int(h), int(random.integers(2**32))) for w, h in edges]


def compare(transform: Any, plan: Plan, sizes: list[tuple[int, int, int]]) -> None:
    """The transform and its plan, on images of these sizes under these keys."""
    levels = _native.levels()
    done = 0
    for number, (width, height, key) in enumerate(sizes):
        image = noise(width, height, seed=number)
        result, words = run(plan, image, key, levels[number % len(levels)])
        if result is None:
            continue  # such samples go through the transform itself
        expected = bits(transformed(transform, image, key))
        after = torch.rand(1).item()
        assert result.shape == expected.shape, (width, height, key)
        assert result.tobytes() == expected.tobytes(), (width, height, key)
        assert words_drawn(key, words) == after, (width, height, key)
        done += 1
    assert done > 0.9 * len(sizes)


# Kernels


def _all_colours() -> Image.Image:
    index = np.arange(1 << 24, dtype=np.uint32).reshape(4096, 4096)
    return Image.fromarray(
        np.stack([index & 255, index >> 8 & 255, index >> 16], axis=-1).astype(np.uint8)
    )


def jitter(**parts: tuple[float, float]) -> ColorJitter:
    given = {name: parts.get(name) for name in ("brightness", "contrast", "saturation", "hue")}
    return ColorJitter(**given, fused=True)


def _of_one(op: Op) -> Plan:
    return Plan((op,), BYTES, "horizontal_first")


def _planes(image: Image.Image) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


@pytest.mark.parametrize("share", [0.0, 0.37, -0.5])
def test_hue_of_all_colours(share: float) -> None:
    image = _all_colours()
    expected = _planes(F.adjust_hue(image, float(np.float32(share))))
    for level in _native.levels():
        result, _ = run(_of_one(jitter(hue=(share, share))), image, 0, level)
        assert np.array_equal(result, expected), level


@pytest.mark.parametrize("factor", [0.371, 1.9])
def test_saturation_of_all_colours(factor: float) -> None:
    image = _all_colours()
    expected = _planes(ImageEnhance.Color(image).enhance(float(np.float32(factor))))
    for level in _native.levels():
        result, _ = run(_of_one(jitter(saturation=(factor, factor))), image, 0, level)
        assert np.array_equal(result, expected), level


@LEVELS
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_factors(level: str, name: str) -> None:
    enhancer = {"brightness": "Brightness", "contrast": "Contrast", "saturation": "Color"}[name]
    image = noise(61, 37)
    for factor in [*np.linspace(0, 3, 200), 1e-7, 0.99999994, 1.0000001, 255.0, 1e4]:
        single = float(np.float32(factor))
        result, _ = run(_of_one(jitter(**{name: (single, single)})), image, 0, level)
        expected = getattr(ImageEnhance, enhancer)(image).enhance(single)
        assert np.array_equal(result, _planes(expected)), factor


@LEVELS
def test_sharpness(level: str) -> None:
    random = np.random.default_rng(3)
    for width, height in [(1, 1), (1, 9), (9, 1), (2, 2), (2, 7), (3, 3), (4, 3), (97, 64)]:
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
        for factor in (0.0, 0.1, 0.5, 1.9, 7.3):
            op = RandomOperation(1.0, True, "Sharpness", factor)
            result, _ = run(_of_one(op), image, 0, level)
            expected = ImageEnhance.Sharpness(image).enhance(factor)
            assert np.array_equal(result, _planes(expected)), (width, height, factor)


KNOWN: dict[str, tuple[float, Callable[[Image.Image], Image.Image]]] = {
    "brightness": (1.7, lambda image: F.adjust_brightness(image, 1.7)),
    "contrast": (-0.5, lambda image: ImageEnhance.Contrast(image).enhance(-0.5)),
    "saturation": (0.2, lambda image: F.adjust_saturation(image, 0.2)),
    "hue": (-51.0, lambda image: F.adjust_hue(image, -0.2)),
    "sharpness": (3.0, lambda image: F.adjust_sharpness(image, 3.0)),
    "invert": (0.0, F.invert),
    "posterize": (2.0, lambda image: F.posterize(image, 2)),
    "solarize": (77.3, lambda image: F.solarize(image, 77.3)),
    "auto_contrast": (0.0, F.autocontrast),
    "equalize": (0.0, F.equalize),
}


@LEVELS
@pytest.mark.parametrize("kind", ADJUSTMENTS)
def test_known_adjustments(level: str, kind: str) -> None:
    amount, function = KNOWN[kind]
    for seed in range(40):
        image = noise(1 + 7 * seed % 90, 1 + 13 * seed % 50, seed)
        result, _ = run(_of_one(Adjust(kind, amount)), image, 0, level)
        assert np.array_equal(result, _planes(function(image))), seed


@LEVELS
@pytest.mark.parametrize("name", AFFINE_FILTERS)
def test_known_matrices(level: str, name: str) -> None:
    random = np.random.default_rng(5)
    for seed in range(200):
        width, height, to_width, to_height = (int(n) for n in random.integers(1, 70, 4))
        a, b, c, d, e, f = random.normal(0, 1, 6) * ([1, 1, 20] * 2)
        matrix = (a, b if seed % 3 else 0.0, c, d if seed % 3 else 0.0, e, f)
        image = noise(width, height, seed)
        op = Affine((to_height, to_width), matrix, Sampling(name, (1, 2, 3)))
        result, _ = run(_of_one(op), image, 0, level)
        expected = image.transform(
            (to_width, to_height),
            Image.Transform.AFFINE,
            matrix,
            Image.Resampling[name.upper()],
            fillcolor=(1, 2, 3),
        )
        assert np.array_equal(result, _planes(expected)), seed


def _few_values(seed: int) -> Image.Image:
    """An image with a few values only, far apart, as histograms of drawings have them."""
    random = np.random.default_rng(seed)
    width, height = random.integers(1, 40, 2)
    values = random.integers(0, 256, random.integers(1, 6)).astype(np.uint8)
    return Image.fromarray(random.choice(values, (height, width, 3)))


@pytest.mark.parametrize("operation", ["AutoContrast", "Equalize"])
def test_histograms(operation: str) -> None:
    plan = _of_one(RandomOperation(1.0, True, operation, 0.0))
    function = F.equalize if operation == "Equalize" else F.autocontrast
    for seed in range(600):
        image = _few_values(seed) if seed % 2 else noise(1 + seed % 71, 1 + seed % 43, seed)
        result, _ = run(plan, image, 0)
        assert np.array_equal(result, _planes(function(image))), seed


# Transforms

SINGLE: list[Callable[[Any], Any]] = [
    lambda T: T.ColorJitter(0.4, 0.4, 0.4, 0.1),
    lambda T: T.ColorJitter(0.9, 2.0, (0.0, 5.0), (-0.5, 0.5)),
    lambda T: T.ColorJitter(contrast=0.7),
    lambda T: T.ColorJitter(saturation=0.3, hue=0.5),
    lambda T: T.ColorJitter(),
    lambda T: T.RandomInvert(0.7),
    lambda T: T.RandomPosterize(3),
    lambda T: T.RandomPosterize(8),
    lambda T: T.RandomSolarize(100.5),
    lambda T: T.RandomSolarize(0, p=1.0),
    lambda T: T.RandomAdjustSharpness(2),
    lambda T: T.RandomAdjustSharpness(0.0, 0.9),
    lambda T: T.RandomAutocontrast(),
    lambda T: T.RandomEqualize(),
]
MOVING: list[Callable[[Any, Any], Any]] = [
    lambda T, f: T.RandomRotation(180, f),
    lambda T, f: T.RandomRotation((-500, 700), f, expand=True, fill=(1, 2, 3)),
    lambda T, f: T.RandomRotation((90, 90), f),
    lambda T, f: T.RandomRotation((270, 270), f, expand=True),
    lambda T, f: T.RandomRotation((-180, -180), f),
    lambda T, f: T.RandomRotation((360, 360), f, center=(2, 3)),
    lambda T, f: T.RandomRotation(45, f, center=[3.5, -5], fill=200),
    lambda T, f: T.RandomAffine(30, (0.2, 0.3), (0.5, 2), (-10, 10, -20, 20), f, 7),
    lambda T, f: T.RandomAffine(0, None, None, 25, f, (9, 8, 7)),
    lambda T, f: T.RandomAffine(0, (0.5, 0.5), None, None, f),
    lambda T, f: T.RandomAffine(0, (1, 1), (0.05, 0.3), None, f, center=[0, 0]),
    lambda T, f: T.RandomAffine(170, None, (3, 40), (-80, 80, -80, 80), f),
    lambda T, f: T.RandAugment(interpolation=f),
    lambda T, f: T.RandAugment(5, 4, 11, f, fill=128),
    lambda T, f: T.TrivialAugmentWide(interpolation=f, fill=[1, 2, 3]),
    lambda T, f: T.AutoAugment(v1.AutoAugmentPolicy.IMAGENET, f),
    lambda T, f: T.AutoAugment(v1.AutoAugmentPolicy.CIFAR10, f),
    lambda T, f: T.AutoAugment(v1.AutoAugmentPolicy.SVHN, f, fill=9),
]


def _name(make: Any) -> str:
    arguments = (v1,) if make in SINGLE else (v1, MODE.NEAREST)
    return repr(make(*arguments)).replace("\n", "")[:70]


@VERSIONS
@pytest.mark.parametrize("make", SINGLE, ids=_name)
def test_colours(T: Any, make: Callable[[Any], Any]) -> None:
    transform = v1.Compose([make(T), v1.PILToTensor()])
    compare(transform, lowered(transform), _sizes(150, 120))


@VERSIONS
@pytest.mark.parametrize("interpolation", FILTERS, ids=lambda mode: mode.value)
@pytest.mark.parametrize("make", MOVING, ids=_name)
def test_moving(T: Any, interpolation: Any, make: Callable[[Any, Any], Any]) -> None:
    transform = v1.Compose([make(T, interpolation), v1.PILToTensor()])
    compare(transform, lowered(transform), _sizes(120, 100))


@VERSIONS
@pytest.mark.parametrize("magnitude", range(31))
def test_every_magnitude(T: Any, magnitude: int) -> None:
    # At the greatest, torchvision.transforms solarizes by 0 and posterizes to 4 bits.
    transform = v1.Compose([T.RandAugment(2, magnitude), v1.PILToTensor()])
    plan = lower_transform(transform)
    if isinstance(plan, Refusal):
        # torch.linspace rounds a few of its numbers as its vectors do.
        assert "linspace" in plan.why
        transform = v1.Compose([T.CenterCrop((31, 57)), *transform.transforms])
        plan = lowered(transform)
    compare(transform, plan, _sizes(60, 90, seed=magnitude))


@VERSIONS
def test_trivial_augment_draws_every_magnitude(T: Any) -> None:
    transform = v1.Compose([T.TrivialAugmentWide(), v1.PILToTensor()])
    compare(transform, lowered(transform), _sizes(1500, 40))


AROUND: list[Callable[[Any, Any], list[Any]]] = [
    lambda T, one: [T.Resize((40, 50)), T.RandomHorizontalFlip(), one, T.RandomCrop((11, 23))],
    lambda T, one: [T.RandomVerticalFlip(), one, T.CenterCrop((60, 20)), T.RandomHorizontalFlip()],
    lambda T, one: [T.CenterCrop(30), one, T.Resize((17, 40)), T.RandomHorizontalFlip()],
    lambda T, one: [T.RandomGrayscale(0.5), one, T.RandomGrayscale(0.5), one, T.Pad(2, fill=3)],
    lambda T, one: [T.Grayscale(1), one, T.Pad((1, 2), padding_mode="edge"), one],
]
INSIDE: list[Callable[[Any], Any]] = [
    lambda T: T.ColorJitter(0.4, 0.4, 0.4, 0.1),
    lambda T: T.RandAugment(3, 15, interpolation=MODE.BILINEAR, fill=30),
    lambda T: T.RandomEqualize(0.8),
    lambda T: T.RandomAdjustSharpness(1.7, 0.9),
    lambda T: T.RandomRotation(40, fill=5),
    lambda T: T.RandomAffine(0, (0.4, 0.4), fill=77),
]


@VERSIONS
@pytest.mark.parametrize("around", range(len(AROUND)))
@pytest.mark.parametrize("inside", range(len(INSIDE)))
def test_between_other_operations(T: Any, around: int, inside: int) -> None:
    transform = v1.Compose([*AROUND[around](T, INSIDE[inside](T)), v1.PILToTensor()])
    compare(transform, lowered(transform), _sizes(60, 110))


@pytest.mark.parametrize("interpolation", FILTERS, ids=lambda mode: mode.value)
def test_images_beyond_fixed_point(interpolation: Any) -> None:
    transform = v1.Compose(
        [v1.RandomRotation(170, interpolation, fill=(9, 9, 9)), v1.PILToTensor()]
    )
    plan = lowered(transform)
    for width, height in [(40_000, 2), (3, 33_000), (32_767, 3)]:
        compare(transform, plan, [(width, height, key) for key in range(4)])


@pytest.mark.parametrize("size", [223, 224, 331, 662, 993, 1324, 8192])
def test_translations_of_large_images(size: int) -> None:
    transform = v1.Compose([v1.RandAugment(6), v1.PILToTensor()])
    plan = lowered(transform)
    compare(transform, plan, [(size, 3, key) for key in range(25)])


def test_translations_of_larger_images_are_left_to_torchvision() -> None:
    plan = lowered(v1.RandAugment(6), v1.PILToTensor())
    image = Image.new("RGB", (8193, 1))
    assert any(run(plan, image, key)[0] is None for key in range(25))
    fixed = lowered(v1.CenterCrop((3, 9000)), v1.RandAugment(6), v1.PILToTensor())
    assert all(run(fixed, image, key)[0] is not None for key in range(25))


# Erasing


@VERSIONS
@pytest.mark.parametrize("value", [0, 7.5, (1.0, 2, -3)], ids=str)
def test_erasing(T: Any, value: Any) -> None:
    transform = v1.Compose(
        [
            v1.ToTensor(),
            T.RandomHorizontalFlip(),
            T.RandomErasing(0.8, value=value),
            T.RandomHorizontalFlip(),
            v1.Normalize([0.4] * 3, [0.2, 0.3, 0.4]),
            T.RandomErasing(0.5, (0.0, 0.01), (0.05, 20.0), value=-1),
            T.RandomVerticalFlip(),
        ]
    )
    compare(transform, lowered(transform), _sizes(500, 70))


TAILS: dict[str, list[Any]] = {
    "bytes": [v1.PILToTensor(), v1.RandomErasing(0.9, value=(1, 2.7, 255))],
    "of bytes, then float": [
        v2.ToImage(),
        v2.RandomErasing(0.9, value=99.5),
        v2.ToDtype(torch.float32, scale=True),
    ],
    "half": [v1.ToTensor(), v1.ConvertImageDtype(torch.float16), v1.RandomErasing(0.9, value=0.1)],
    "bfloat16": [
        v1.ToTensor(),
        v2.RandomErasing(0.9, value=(0.1, 0.2, 0.3), inplace=True),
        v1.ConvertImageDtype(torch.bfloat16),
    ],
    "gray": [v1.Grayscale(1), v1.ToTensor(), v1.RandomErasing(0.9, value=[3])],
    "gray, normalised to three": [
        v2.Grayscale(1),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.RandomErasing(0.9),
        v2.Normalize([0.1, 0.2, 0.3], [0.4, 0.5, 0.6]),
    ],
    "the largest rectangles": [v1.ToTensor(), v1.RandomErasing(1.0, (1.0, 1.0), (1.0, 1.0))],
}


@pytest.mark.parametrize("name", TAILS)
def test_erasing_of_every_type(name: str) -> None:
    transform = v1.Compose([v1.CenterCrop((31, 40)), *TAILS[name]])
    compare(transform, lowered(transform), _sizes(100, 60))


def test_erasing_is_compared_with_torch_in_proofs() -> None:
    transform = v1.Compose([v1.CenterCrop(20), v1.ToTensor(), v1.RandomErasing(1.0, value=2.0)])
    plan = lowered(transform)
    assert prove(plan, transform) is None
    other = v1.Compose([v1.CenterCrop(20), v1.ToTensor(), v1.RandomErasing(1.0, value=2.5)])
    refused = prove(
        Plan((*plan.ops[:-1], *lowered(other).ops[-1:]), plan.tail, plan.order), transform
    )
    assert refused is not None
    assert "values" in refused.why


# Whole loaders

STRONG = v1.Compose(
    [
        v1.RandomResizedCrop(48),
        v1.RandomHorizontalFlip(),
        v1.RandAugment(),
        v1.ColorJitter(0.4, 0.4, 0.4, 0.1),
        v1.ToTensor(),
        v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        v1.RandomErasing(0.25),
    ]
)


def test_a_loader_gives_what_torchvision_gives(tmp_path: Path) -> None:
    dataset = ImageFolder(str(class_folder(tmp_path, 40)), STRONG)
    native = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=2, seed=3)
    stock = stoker.DataLoader(dataset, 8, shuffle=True, num_workers=0, seed=3, tier="stock")
    assert native.explain().tier == "lowered"
    for (images, labels), (expected, known) in zip(native, stock, strict=True):
        assert torch.equal(images, expected)
        assert torch.equal(labels, known)


# Refusals


class Renamed(v1.TrivialAugmentWide):  # type: ignore[misc] # torchvision is not typed
    """Only another name."""


def test_a_subclass_of_a_policy_that_changes_nothing_is_stock() -> None:
    transform = v1.Compose([Renamed(), v1.PILToTensor()])
    compare(transform, lowered(transform), _sizes(40, 50))


PATCHES: list[tuple[Any, str]] = [
    (torch, "randperm"),
    (torch, "linspace"),
    (ImageOps, "equalize"),
    (ImageEnhance._Enhance, "enhance"),
    (ImageEnhance.Contrast, "__init__"),
    (Image.Image, "rotate"),
    (Image, "blend"),
    (v1.RandAugment, "_augmentation_space"),
    (v2.RandAugment, "_apply_image_or_video_transform"),
    (F, "adjust_hue"),
]


@pytest.mark.parametrize(("owner", "name"), PATCHES, ids=lambda v: getattr(v, "__name__", v))
def test_patches(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transform = [v1.RandAugment(), v1.PILToTensor()]
    lowered(*transform)
    monkeypatch.setattr(owner, name, lambda *args: args[0])
    assert "package's own code" in _told(*transform)


def _told(*transforms: Any) -> str:
    refused = lower_transform(v1.Compose([*transforms]))
    assert isinstance(refused, Refusal), refused
    return str(refused)


@pytest.mark.parametrize(
    ("transform", "told"),
    [
        (v1.RandAugment(13), "num_ops=13"),
        (v1.RandAugment(magnitude=31), "magnitude=31"),
        (v1.RandAugment(magnitude=-1), "magnitude=-1"),
        (v1.RandAugment(num_magnitude_bins=1, magnitude=0), "num_magnitude_bins=1"),
        (v2.RandAugment(interpolation=MODE.BOX), "interpolation=box"),
        (v1.TrivialAugmentWide(fill=256), "fill=256"),
        (v2.AutoAugment(fill={Image.Image: 1, "others": 0}), "fill={"),
        (v1.RandomRotation(10, MODE.LANCZOS), "interpolation=lanczos"),
        (v1.RandomRotation((20, 10)), "degrees=[20.0, 10.0] descends"),
        (v1.RandomRotation(10, expand=1), "expand=1"),
        (v1.RandomAffine(0, shear=(5, 2)), "shear=(5.0, 2.0) descends"),
        (v1.RandomAffine(0, scale=(2, 1)), "scale=(2, 1) descends"),
        (v1.RandomPosterize(0), "bits=0"),
        (v1.RandomPosterize(2.0), "bits=2.0"),
        (v1.RandomSolarize(math.nan), "threshold=nan"),
        (v1.RandomAdjustSharpness(-1), "sharpness_factor=-1"),
        (v1.GaussianBlur(3), "GaussianBlur: has no native form"),
        (v1.AugMix(), "AugMix: has no native form"),
        (v1.RandomPerspective(), "has no native form"),
        (v1.RandomErasing(), "RandomErasing: works on tensors"),
    ],
    ids=str,
)
def test_refused_on_images(transform: Any, told: str) -> None:
    assert told in _told(transform, v1.ToTensor())


@pytest.mark.parametrize(
    ("transforms", "told"),
    [
        ([v1.ToTensor(), v1.RandomErasing(value="random")], "value='random'"),
        ([v1.ToTensor(), v2.RandomErasing(value="random")], "value=None"),
        ([v1.ToTensor(), v1.RandomErasing(value=(1, 2))], "for 3 channels"),
        ([v1.Grayscale(1), v1.ToTensor(), v1.RandomErasing(value=(1, 2, 3))], "for 1 channels"),
        ([v1.PILToTensor(), v1.RandomErasing(value=256)], "for bytes"),
        ([v1.PILToTensor(), v1.RandomErasing(value=-1)], "for bytes"),
        ([v1.ToTensor(), v1.RandomErasing(value=math.inf)], "value=inf"),
        ([v1.ToTensor(), v1.ColorJitter(0.1)], "ColorJitter: after ToTensor"),
        ([v1.ToTensor(), v1.RandomErasing(), v1.CenterCrop(3)], "CenterCrop: after ToTensor"),
    ],
    ids=str,
)
def test_refused_on_tensors(transforms: list[Any], told: str) -> None:
    assert told in _told(*transforms)


def test_policies_of_ones_own_are_read_or_refused() -> None:
    transform = v1.AutoAugment()
    transform.policies = [(("Invert", 1.0, None), ("Solarize", 0.5, 9))]
    whole = v1.Compose([transform, v1.PILToTensor()])
    compare(whole, lowered(whole), _sizes(60, 50))
    transform.policies = [(("Invert", 1.0, 3), ("Solarize", 0.5, 9))]
    assert "unknown policy" in _told(transform, v1.PILToTensor())
    transform.policies = [(("Posterize", 1.0, 3), ("Solarize", 0.5, 10))]
    assert "policy" in _told(transform, v1.PILToTensor())
    transform.policies = [(("Blur", 1.0, 3), ("Solarize", 0.5, 1))]
    assert "policy" in _told(transform, v1.PILToTensor())


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("adjust", [5, 1]),
        ("adjust", [12, 0]),
        ("affine", [5, 5, 1, 0, math.nan, 0, 1, 0, 0, 0, 0, 0]),
        ("affine", [0, 5, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]),
        ("color_jitter", [1, 2, 1] + [0] * 10),
        ("color_jitter", [0] * 9 + [1, -0.6, 0, 1]),
        ("random_operation", [0.5, 1, 15, 0]),
        ("random_operation", [0.5, 1, 10, 9]),
        ("random_operation", [0.5, 1, 3, math.nan]),
        ("augment", [3, 1, 0, 0, 0, 0, 0, 31, 9, 1, 1, 0, 0, 0, 0]),
        ("augment", [1, 33, 0, 0, 0, 0, 0, 31, 9, 1, 1, 0, 0, 0, 0]),
        ("augment", [1, 1, 1, 0, 0, 0, 0, 31, 9, 1, 1, 0, 0, 0, 0]),
        ("augment", [1, 1, 0, 0, 0, 0, 0, 31, 31, 1, 1, 0, 0, 0, 0]),
        ("augment", [1, 1, 0, 0, 0, 0, 0, 31, 9, 1, 2, 0, 0, 0, 0]),
        ("augment", [1, 1, 0, 0, 0, 0, 0, 31, 9, 1, 1, 0, 0, 0, math.inf]),
        ("auto_augment", [1, 0, 0, 0, 0, 10, 1, *[0, 0.5, 0, 0, 0]]),
        ("auto_augment", [1, 0, 0, 0, 0, 10, 1, *[0, 0.5, 0, 0, 10] * 2]),
        ("auto_augment", [1, 0, 0, 0, 0, 10, 0]),
        ("random_rotation", [5, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("random_rotation", [4, 5, 1, 0, 0, 0, 0, 3, 0, 0, 0]),
        ("random_affine", [0, 0, 1, 2, 0] + [0] * 17),
        ("random_affine", [0, 0, 0, 0, 0, 1, 0, 1] + [0] * 14),
        ("random_affine", [0, 0, 0, 0, 0, 0, 0, 0, 3] + [0] * 13),
        ("random_erasing", [0.5, 0.1, 1.5, 0, 0, 1, 0, 0, 0]),
        ("random_erasing", [0.5, 0.1, 0.5, -0.123, 0.1, 1, 0, 0, 0]),
        ("random_erasing", [0.5, 0.1, 0.5, 0, 0, 1, -1, 0, 0]),
    ],
    ids=str,
)
def test_native_plans_refuse_bad_numbers(name: str, numbers: list[float]) -> None:
    with pytest.raises(ValueError, match=name):
        _native.Plan().add(name, numbers)


def test_only_flips_may_follow_an_erasing() -> None:
    lowered(v1.ToTensor(), v1.RandomErasing(ratio=(0.3, 3.3)))
    low, high = torch.log(torch.tensor((0.3, 3.3))).tolist()
    fused = lowered(v1.ToTensor(), v1.RandomErasing()).ops[0].fused  # type: ignore[union-attr] # it erases
    plan = _native.Plan()
    plan.add("random_erasing", [1, 0.1, 0.2, low, high, fused, 0, 0, 0])
    plan.add("flip_x", [0.5])
    with pytest.raises(ValueError, match="only flips"):
        plan.add("center_crop", [5, 5])


def test_too_many_steps_are_refused() -> None:
    plan = _native.Plan()
    for _ in range(32):
        plan.add("gray", [])
    with pytest.raises(ValueError, match="too many"):
        plan.add("gray", [])
