"""What Pillow, NumPy and torchvision make of an image: the truth that plans are compared with."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from stoker import _native
from stoker.draws import seed_generators
from stoker.engine import native_plan
from stoker.plan import Plan

Step = dict[str, Any]


def transformed(transform: Callable[[Any], Any], image: Image.Image, key: int) -> Any:
    """``transform(image)`` with all generators seeded by ``key``."""
    seed_generators(key)
    return transform(image)


def steps_of(plan: Plan, image: Image.Image, key: int) -> tuple[str, list[Step], int]:
    """Status, steps, and how many 32-bit words were drawn."""
    status, steps, drawn = _native.resolve(native_plan(plan), *image.size, key)
    return status, steps, drawn


def applied(steps: Sequence[Step], image: Image.Image) -> Image.Image:
    """The steps of a plan, done by Pillow and NumPy one after the other."""
    for step in steps:
        x, y, width, height = step["x"], step["y"], step["width"], step["height"]
        match step["kind"]:
            case "crop":
                image = image.crop((x, y, x + width, y + height))
            case "resize":
                image = image.resize((width, height), Image.Resampling[step["filter"].upper()])
            case "flip_x":
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            case "flip_y":
                image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
            case "gray":
                image = image.convert("L").convert("RGB")
            case "pad":
                sides = x, y, width - image.width - x, height - image.height - y
                image = _padded(image, sides, step["mode"], step["fill"])
        assert image.size == (width, height)
    return image


def _padded(
    image: Image.Image, sides: tuple[int, int, int, int], mode: str, fill: tuple[int, int, int]
) -> Image.Image:
    if mode == "constant":
        return ImageOps.expand(image, sides, fill)
    left, top, right, bottom = sides
    pixels = np.pad(np.asarray(image), ((top, bottom), (left, right), (0, 0)), mode)  # type: ignore[call-overload] # a literal
    return Image.fromarray(pixels)


def words_drawn(key: int, count: int) -> float:
    """What ``torch.rand(1)`` gives after ``count`` words of a generator seeded with ``key``."""
    generator = _native.Generator(key)
    for _ in range(count):
        generator.next()
    return float(generator.uniform())


def coordinates(width: int, height: int) -> Image.Image:
    """An RGB image whose pixels tell where they are, for edges up to 4096, and are never black."""
    y, x = np.mgrid[:height, :width]
    high = 16 * (x // 256) + y // 256
    return Image.fromarray(np.stack([x % 256, y % 256, 255 - high], axis=-1).astype(np.uint8))


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB image of slopes and noise."""
    y, x = np.mgrid[:height, :width]
    slopes = np.stack([x * 150 / width, y * 150 / height, (x + y) % 150], axis=-1)
    random = np.random.default_rng(seed).integers(0, 106, slopes.shape)
    return Image.fromarray((slopes + random).astype(np.uint8))


def jpeg(image: Image.Image, **options: Any) -> bytes:
    """The image as a JPEG file."""
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    """The values of a tensor as NumPy has them; 16-bit floats as uint16."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
    array: NDArray[Any] = tensor.numpy()
    return array
