"""Small pictures for tests, made on the spot: colours, edges and noise, in any format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB image: gradients, a disc, stripes and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    planes = []
    for _ in range(3):
        a, b, c = rng.uniform(-1, 1, 3)
        plane = 127 + 90 * np.sin(a * x / 17 + b * y / 23 + c)
        plane[(x - width / 2) ** 2 + (y - height / 3) ** 2 < (min(width, height) / 4) ** 2] += (
            60 * b
        )
        planes.append(plane + rng.normal(0, 6, plane.shape))
    return Image.fromarray(np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8))


def save(path: Path, image: Image.Image, **options: Any) -> Path:
    """Saves and returns the path; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("jpg", {"quality": 90, "subsampling": 0}),
    ("jpg", {"quality": 75, "subsampling": 2}),
    ("jpg", {"quality": 85, "subsampling": 1}),
    ("jpg", {"quality": 95, "subsampling": 2, "optimize": True}),
    ("jpg", {"quality": 80, "progressive": True}),
    ("png", {}),
    ("webp", {"quality": 80}),
]
"""Extension and Pillow's options; the first four are decoded natively."""


def class_folder(root: Path, samples: int, kinds: list[tuple[str, dict[str, Any]]] = KINDS) -> Path:
    """A class folder of ``samples`` pictures in three classes, sizes and kinds mixed."""
    for i in range(samples):
        extension, options = kinds[i % len(kinds)]
        width, height = 90 + 37 * (i % 7), 80 + 29 * (i % 5)
        image = picture(width, height, seed=i)
        if i % 11 == 10:
            image = image.convert("L")
        save(root / f"class_{i % 3}" / f"{i:04}.{extension}", image, **options)
    return root
