"""Bytes to tensors against torchvision, bit for bit, at every SIMD level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import functional as v1
from torchvision.transforms.v2 import functional as v2

from stoker import _native

Pixels = NDArray[np.uint8]
Triple = tuple[float, float, float]
Transform = Callable[[Image.Image], torch.Tensor]

LEVELS = _native.levels()
NORMALIZATIONS: dict[str, tuple[Triple, Triple] | None] = {
    "none": None,
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "cifar": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "odd": ((-3.25, 1e-4, 700.0), (1e-3, 123.456, 0.7)),
}
NO_MEAN: Triple = (0.0, 0.0, 0.0)
NO_STD: Triple = (1.0, 1.0, 1.0)


def transform_v1(normalization: tuple[Triple, Triple] | None) -> Transform:
    def transform(image: Image.Image) -> torch.Tensor:
        tensor: torch.Tensor = v1.to_tensor(image)
        if normalization is None:
            return tensor
        normalized: torch.Tensor = v1.normalize(tensor, *map(list, normalization))
        return normalized

    return transform


def transform_v2(normalization: tuple[Triple, Triple] | None) -> Transform:
    def transform(image: Image.Image) -> torch.Tensor:
        tensor = v2.to_dtype(v2.to_image(image), torch.float32, scale=True)
        if normalization is None:
            return torch.as_tensor(tensor)
        return torch.as_tensor(v2.normalize(tensor, *map(list, normalization)))

    return transform


def noise(height: int, width: int) -> Pixels:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)


def table_of(transform: Transform) -> torch.Tensor:
    """The transform's answer to each of 256 bytes, (3, 256)."""
    ramp = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)
    return transform(Image.fromarray(ramp))[:, 0, :].contiguous()


def bits(array: NDArray[Any]) -> NDArray[Any]:
    """So that zeros of both signs differ and NaN equals itself."""
    return array.view(np.uint32) if array.dtype == np.float32 else array


def looked_up(table: NDArray[Any], image: Pixels, channels: int = 3) -> NDArray[Any]:
    return np.stack([table[c][image[..., c]] for c in range(channels)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NORMALIZATIONS)
@pytest.mark.parametrize(
    ("make", "formula"), [(transform_v1, "divide"), (transform_v2, "multiply")], ids=["v1", "v2"]
)
def test_torchvision(
    make: Callable[[tuple[Triple, Triple] | None], Transform], formula: str, name: str, level: str
) -> None:
    normalization = NORMALIZATIONS[name]
    transform = make(normalization)
    table = table_of(transform).numpy()
    hints = normalization or (NO_MEAN, NO_STD)
    image = noise(96, 131)
    result = _native.convert(image, table, *hints, level=level)
    np.testing.assert_array_equal(
        bits(result), bits(transform(Image.fromarray(image)).contiguous().numpy())
    )
    if name != "odd":  # the fast way is taken where it is right
        assert _native.formula(table, *hints) == formula


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_sixteen_bit_floats(dtype: torch.dtype, level: str) -> None:
    normalization = NORMALIZATIONS["imagenet"]
    assert normalization is not None
    transform = transform_v1(normalization)
    table = table_of(transform).to(dtype).view(torch.uint16).numpy()
    image = noise(50, 203)
    expected = transform(Image.fromarray(image)).to(dtype).view(torch.uint16).numpy()
    result = _native.convert(image, table, *normalization, level=level)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_width(channels: int, dtype: type, level: str) -> None:
    """Kernels take 5 to 64 pixels at a time; every remainder occurs."""
    rng = np.random.default_rng(7)
    table: NDArray[Any] = rng.integers(0, 1 << 16, (3, 256)).astype(dtype)
    for width in range(1, 140):
        image = rng.integers(0, 256, (2, width, 3), np.uint8)
        result = _native.convert(image, table, NO_MEAN, NO_STD, channels, level=level)
        np.testing.assert_array_equal(result, looked_up(table, image, channels))
        flipped = _native.convert(
            image, table, NO_MEAN, NO_STD, channels, flip_x=True, flip_y=True, level=level
        )
        expected = looked_up(table, image[::-1, ::-1], channels)
        np.testing.assert_array_equal(flipped, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [transform_v1, transform_v2], ids=["v1", "v2"])
def test_rows_of_whole_cache_lines(
    make: Callable[[tuple[Triple, Triple] | None], Transform], level: str
) -> None:
    """Such rows are written past the caches where the result starts on a line."""
    table = table_of(make(None)).numpy()
    results = []  # kept, so that they start at different places
    for width in (16, 32, 48, 112, 224, 224, 224, 224):
        image = noise(64, width)
        results.append(_native.convert(image, table, NO_MEAN, NO_STD, level=level))
        np.testing.assert_array_equal(bits(results[-1]), bits(looked_up(table, image)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("flip_x", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_gray(channels: int, flip_x: bool, level: str) -> None:
    table = table_of(transform_v1(NORMALIZATIONS["imagenet"])).numpy()
    for width in (1, 5, 15, 16, 17, 100):
        image = noise(33, width)
        luma = np.asarray(Image.fromarray(image).convert("L"))[:, :: -1 if flip_x else 1]
        expected = looked_up(table, np.repeat(luma[..., None], 3, axis=2), channels)
        result = _native.convert(
            image, table, NO_MEAN, NO_STD, channels, flip_x=flip_x, gray=True, level=level
        )
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("std", [0.0, -0.0, float("inf"), float("nan"), 1e-42, -0.5])
def test_strange_hints_do_no_harm(std: float, level: str) -> None:
    table = table_of(transform_v1(None)).numpy()
    image = noise(20, 77)
    result = _native.convert(image, table, (0.1, 0.2, float("nan")), (std, 1.0, std), level=level)
    np.testing.assert_array_equal(bits(result), bits(looked_up(table, image)))


@pytest.mark.parametrize("level", LEVELS)
def test_the_table_decides_to_the_last_bit(level: str) -> None:
    """One value that no formula gives, and the formula is not taken."""
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    original = table_of(transform_v1((mean, std))).numpy()
    image = noise(40, 64)
    for value in (np.nextafter(original[1, 200], np.float32(9)), np.float32("nan"), -0.0, np.inf):
        table = original.copy()
        table[1, 200] = value
        assert _native.formula(table, mean, std) == "table"
        result = _native.convert(image, table, mean, std, level=level)
        np.testing.assert_array_equal(bits(result), bits(looked_up(table, image)))


@pytest.mark.parametrize("level", LEVELS)
def test_zeros_keep_their_sign(level: str) -> None:
    table = table_of(transform_v1(None)).numpy()
    negative = table.copy()
    negative[:, 0] = -0.0
    image = np.zeros((3, 70, 3), np.uint8)
    for zeros in (table, negative):
        result = _native.convert(image, zeros, NO_MEAN, NO_STD, level=level)
        np.testing.assert_array_equal(bits(result), bits(looked_up(zeros, image)))
    assert _native.formula(negative, NO_MEAN, NO_STD) == "table"
