"""The native resize against Pillow, bit for bit: every filter, pass order and SIMD level."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from numpy.typing import NDArray
from PIL import Image

from stoker import _native

Pixels = NDArray[np.uint8]
Size = tuple[int, int]
Window = tuple[int, int, int, int]
CompareImages = Callable[[object, object], None]

LEVELS = _native.levels()
FILTERS = ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
ORDERS = ["horizontal_first", "tall_vertical", "cheaper_first"]


def order_of_installed_pillow() -> str:
    version = tuple(int(part) for part in PIL.__version__.split(".")[:2])
    if version >= (13, 0):
        return "cheaper_first"
    return "tall_vertical" if version >= (12, 2) else "horizontal_first"


def noise(height: int, width: int, seed: int = 0, kind: str = "noise") -> Pixels:
    if kind == "white":  # sums reach their limit
        return np.full((height, width, 3), 255, np.uint8)
    rng = np.random.default_rng(seed)
    if kind == "extremes":  # overshoot of the signed filters is clipped
        return rng.integers(0, 2, (height, width, 3), np.uint8) * np.uint8(255)
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def by_pillow(image: Pixels, size: Size, filter: str) -> Pixels:
    """Pillow's resize; size is (height, width), as in stoker."""
    resample = Image.Resampling[filter.upper()]
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), resample))


def vertical_first(height: int, width: int, size: Size, order: str) -> bool:
    if size[0] >= height or order == "horizontal_first":
        return False
    if order == "tall_vertical":
        return height > 100 * width
    return height - size[0] > 2 * (width - size[1])


def by_two_resizes(image: Pixels, size: Size, filter: str, order: str) -> Pixels:
    """Pillow's resize in a given order of passes: two resizes of one axis each."""
    height, width = image.shape[:2]
    if vertical_first(height, width, size, order):
        middle = (size[0], width)
    else:
        middle = (height, size[1])
    return by_pillow(by_pillow(image, middle, filter), size, filter)


def windowed(
    image: Pixels, window: Window | None, flip_x: bool, flip_y: bool, gray: bool
) -> Pixels:
    """What is left to do after a whole resize."""
    if window is not None:
        x, y, width, height = window
        image = image[y : y + height, x : x + width]
    image = image[:: -1 if flip_y else 1, :: -1 if flip_x else 1]
    if gray:
        luma = np.asarray(Image.fromarray(np.ascontiguousarray(image)).convert("L"))
        image = np.repeat(luma[..., None], 3, axis=2)
    return image


@some.composite
def resizes(draw: some.DrawFn, most: int = 90) -> tuple[Size, Size, Window | None]:
    """Size before, size after, window of the result."""
    height, width, out_height, out_width = (draw(some.integers(1, most)) for _ in range(4))
    if draw(some.booleans()) and draw(some.booleans()):
        out_height = height
    if draw(some.booleans()) and draw(some.booleans()):
        out_width = width
    if draw(some.booleans()):
        return (height, width), (out_height, out_width), None
    x, y = draw(some.integers(0, out_width - 1)), draw(some.integers(0, out_height - 1))
    window = (
        x,
        y,
        draw(some.integers(1, out_width - x)),
        draw(some.integers(1, out_height - y)),
    )
    return (height, width), (out_height, out_width), window


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("filter", FILTERS)
@settings(max_examples=100, deadline=None)
@given(data=some.data())
def test_any_window_of_any_resize(filter: str, level: str, data: some.DataObject) -> None:
    size, out_size, window = data.draw(resizes())
    kind = data.draw(some.sampled_from(["noise", "extremes", "white"]))
    flip_x, flip_y, gray = (data.draw(some.booleans()) for _ in range(3))
    image = noise(*size, kind=kind)
    whole = by_pillow(image, out_size, filter)
    result = _native.resize(
        image,
        out_size,
        window,
        filter,
        order=order_of_installed_pillow(),
        flip_x=flip_x,
        flip_y=flip_y,
        gray=gray,
        level=level,
    )
    np.testing.assert_array_equal(result, windowed(whole, window, flip_x, flip_y, gray))


def photo_sizes() -> Iterator[tuple[Size, Size, Window | None]]:
    """Sizes before and after as training meets them."""
    yield (375, 500), (224, 224), None
    yield (375, 500), (256, 341), (58, 16, 224, 224)
    yield (500, 333), (384, 256), (16, 80, 224, 224)
    yield (333, 181), (224, 224), None
    yield (96, 128), (224, 224), None
    yield (1200, 1600), (224, 299), (37, 0, 224, 224)
    yield (32, 32), (64, 64), None
    yield (700, 60), (90, 75), None
    yield (224, 300), (224, 224), None  # one axis only
    yield (300, 224), (224, 224), None
    yield (224, 224), (224, 224), (3, 5, 100, 77)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("filter", FILTERS)
def test_photo_sizes(filter: str, level: str, same_image: CompareImages) -> None:
    for size, out_size, window in photo_sizes():
        if level == "scalar" and size[0] > 1000:
            continue  # slow; the other levels cover the ratio
        image = noise(*size, seed=size[0])
        result = _native.resize(
            image, out_size, window, filter, order=order_of_installed_pillow(), level=level
        )
        whole = by_pillow(image, out_size, filter)
        same_image(result, windowed(whole, window, False, False, False))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_the_passes(order: str, level: str, same_image: CompareImages) -> None:
    sizes = [(90, 70, 40, 45), (90, 70, 39, 45), (91, 70, 40, 45), (60, 80, 50, 90)]
    sizes += [(200, 2, 50, 3), (201, 2, 50, 3), (201, 2, 50, 1), (150, 150, 149, 149)]
    told_apart = 0
    for (height, width, *out), filter in product(sizes, ["bilinear", "bicubic", "lanczos"]):
        image = noise(height, width, kind="extremes")
        size = (out[0], out[1])
        expected = by_two_resizes(image, size, filter, order)
        same_image(_native.resize(image, size, None, filter, order=order, level=level), expected)
        others = [by_two_resizes(image, size, filter, other) for other in ORDERS]
        told_apart += any(not np.array_equal(expected, other) for other in others)
    assert told_apart > 5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("filter", FILTERS)
def test_extreme_ratios(filter: str, level: str, same_image: CompareImages) -> None:
    sizes: list[tuple[Size, Size]] = [
        ((1, 1), (3, 4000)),
        ((3, 4000), (1, 1)),
        ((1, 65535), (2, 7)),
        ((65535, 2), (1, 1)),
        ((65535, 2), (65534, 3)),
        ((2, 65535), (2, 224)),
        ((1, 1), (65535, 1)),
        ((5, 5), (700, 700)),
    ]
    for size, out_size in sizes:
        image = noise(*size)
        result = _native.resize(
            image, out_size, None, filter, order=order_of_installed_pillow(), level=level
        )
        same_image(result, by_pillow(image, out_size, filter))


@pytest.mark.parametrize("level", LEVELS)
def test_a_window_at_the_far_end_of_a_huge_result(level: str) -> None:
    image = noise(2, 3)
    window = (65500, 1, 35, 1)
    for filter in FILTERS:
        result = _native.resize(
            image, (2, 65535), window, filter, order=order_of_installed_pillow(), level=level
        )
        whole = by_pillow(image, (2, 65535), filter)
        np.testing.assert_array_equal(result, windowed(whole, window, False, False, False))


@pytest.mark.parametrize("level", LEVELS)
def test_luma_of_every_gray_and_many_colours(level: str) -> None:
    ramp = np.arange(256, dtype=np.uint8)
    grays = np.repeat(ramp[None, :, None], 3, axis=2)
    for image in (grays, noise(64, 256, seed=5), noise(16, 256, kind="extremes")):
        size = (image.shape[0], image.shape[1])
        result = _native.resize(
            np.ascontiguousarray(image),
            size,
            order=order_of_installed_pillow(),
            gray=True,
            level=level,
        )
        np.testing.assert_array_equal(result, windowed(image, None, False, False, True))
