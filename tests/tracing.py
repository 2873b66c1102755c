"""What the tests of tracing share: pictures of every kind, comparable forms of results, seeds."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pictures import picture, save
from stoker.trace import hooks
from stoker.trace.check import impossible
from stoker.trace.scope import IMAGES, Scope, Undone, recording
from stoker.trace.tensor import DeferredTensor


def files(root: Path) -> list[Path]:
    """JPEG files: each sampling, gray, turned by EXIF, progressive; some are small."""
    made = []
    for i, (size, options) in enumerate(
        [
            ((220, 167), {"subsampling": 2, "quality": 88}),
            ((151, 203), {"subsampling": 0, "quality": 92}),
            ((128, 128), {"subsampling": 1, "quality": 70}),
            ((97, 301), {"subsampling": 2, "optimize": True}),
            ((240, 135), {"subsampling": 2, "progressive": True}),
        ]
    ):
        made.append(save(root / f"photo_{i}.jpg", picture(*size, seed=i), **options))
    made.append(save(root / "gray.jpg", picture(180, 140, seed=8).convert("L")))
    for turn in (3, 6, 1):
        image = picture(200, 150, seed=turn)
        exif = image.getexif()
        exif[0x0112] = turn
        made.append(save(root / f"turned_{turn}.jpg", image, exif=exif.tobytes()))
    made.append(save(root / "with_icc.jpg", picture(160, 120, seed=9), icc_profile=b"x" * 300))
    return made


def canonical(value: Any) -> Any:
    """A form of a result that is equal exactly where all bits and kinds are."""
    if isinstance(value, Image.Image):
        info = {key: value.info[key] for key in value.info}
        return "image", value.mode, value.size, value.tobytes(), info, value.readonly
    if isinstance(value, DeferredTensor):
        value = value.made("the test looks")
    if isinstance(value, torch.Tensor):
        plain = value.as_subclass(torch.Tensor)
        bits = plain.contiguous().view(torch.uint8).numpy().tobytes()
        return type(value).__name__, str(plain.dtype), tuple(plain.shape), plain.stride(), bits
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(canonical(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, canonical(item)) for key, item in value.items())
    return value


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def outcome(code: Callable[[], Any]) -> Any:
    """What ``code`` gives, or the exception that it raises."""
    try:
        return canonical(code())
    except Exception as error:  # noqa: BLE001  whatever it is, both ways must raise it
        return type(error).__name__, str(error)


def told(stderr: str) -> str:
    """What a process told, without the notes of Python's resource tracker.

    It may note semaphores that a queue's own thread was about to sign off as the process ended; so
    it may with torch's loader.
    """
    return re.sub(r"[^\n]*resource_tracker[^\n]*\n(  warnings\.warn[^\n]*\n)?", "", stderr)


def lazily(code: Callable[[], Any], depth: int = IMAGES) -> tuple[Any, Scope]:
    """What ``code`` gives on lazy images; again with nothing deferred where a batch would be."""
    assert impossible() is None
    scope = Scope(depth, set())
    with hooks.installed():
        try:
            with recording(scope):
                result = outcome(code)
        except Undone:
            pass
    if scope.undone is not None:
        result = outcome(code)
    return result, scope
