"""Proofs, made in this process with the installed torch, torchvision and Pillow, of a plan's bits.

Note [A plan proves itself]
    Everything that depends on a version or on the processor is measured where it is used: how torch
    scales its draws, what ``torch.exp`` gives, which pass of a resize Pillow runs first, and, at
    last, the whole plan on a few small files. A new version can make us refuse a plan, never be
    wrong.
"""

from __future__ import annotations

import ctypes
import io
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import default_collate

from stoker.augmentations import Augment, AutoAugment, Choice, ColorJitter, Sampling
from stoker.draws import generators_kept, seed_generators
from stoker.engine import ExpTable, Generator, moved_by, result_size, run_encoded
from stoker.plan import Plan, RandomCrop, Refusal, Size, Tail

_DRAWS = 1 << 24  # torch's float32 draws have 24 bits
_BLOCK = 1 << 19
_PIECE = 1 << 11  # torch shares longer tensors out to threads, which costs more than it gains here
_PATIENCE_SECONDS = 0.02


@lru_cache(maxsize=1)
def fused_uniform() -> bool | None:
    """Whether torch scales uniform draws with one rounding; None where they are not as expected."""
    seed, scale = 20_240_229, (0.08, 1.0)
    torch_generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(2048, dtype=torch.float32).uniform_(*scale, generator=torch_generator)
    for fused in (True, False):
        generator = Generator(seed)
        if drawn.tolist() == [generator.uniform(*scale, fused) for _ in range(2048)]:
            for bound in (1, 2, 3, 77, 1000, 65_537, 12_345_678):
                one = torch.empty(1, dtype=torch.float32)
                ours = generator.uniform(*scale, fused), generator.below(bound), generator.uniform()
                if ours != (
                    one.uniform_(*scale, generator=torch_generator).item(),
                    torch.randint(0, bound, (1,), generator=torch_generator).item(),
                    torch.rand(1, dtype=torch.float32, generator=torch_generator).item(),
                ):
                    return None
            return fused
    return None


def translations(bins: int, index: int, sizes: int) -> list[int]:
    """How far the native core moves images of widths 1 to ``sizes`` in a policy's translation."""
    choice = Choice("TranslateX", False, True, (math.nan,))
    move = Augment("", 1, 1, Sampling("nearest", (0, 0, 0)), False, bins, index, (choice,))
    plan = Plan((move,), Tail("uint8", 3, b""), "horizontal_first")
    return [moved_by(plan, size) for size in range(1, sizes + 1)]


def prove_exponentials(low: float, high: float, fused: bool) -> bool:
    """Proves ``torch.exp`` of every float32 draw from [low, high], in 0.1 s; see native/random.hpp.

    Returns:
        False where torch's values cannot be reproduced.
    """
    if ExpTable.published(low, high, fused):
        return True
    table = ExpTable(low, high, fused)
    arguments, values = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
    whole = torch.from_numpy(arguments), torch.from_numpy(values)
    parts = [slice(i, i + _PIECE) for i in range(0, _BLOCK, _PIECE)]
    pieces = [(whole[0][part], whole[1][part]) for part in parts]
    with torch.inference_mode():
        for first in range(0, _DRAWS, _BLOCK):
            table.arguments(first, arguments)
            started = time.perf_counter()
            for argument, value in pieces:
                torch.exp(argument, out=value)
            if time.perf_counter() - started > _PATIENCE_SECONDS:
                # torch.set_num_threads was called: now Intel's MKL shares out every piece.
                pieces = [whole]
            if not table.check(first, arguments, values):
                return False
        # One number at a time, as transforms ask, torch must not answer differently.
        for draw in range(12_345, _DRAWS, _DRAWS // 64):
            table.arguments(draw, arguments[:1])
            if torch.exp(torch.from_numpy(arguments[:1].copy())).item() != table.value(draw):
                return False
    return bool(table.publish())


_VERTICAL_FIRST: dict[str, Callable[[int, int, int, int], bool]] = {
    "horizontal_first": lambda w, h, to_w, to_h: False,
    "tall_vertical": lambda w, h, to_w, to_h: h > 100 * w and to_h < h,
    "cheaper_first": lambda w, h, to_w, to_h: to_h < h and h - to_h > 2 * (w - to_w),
}

# width, height, width after, height after: on both sides of each rule's limits
_RESIZES = [
    (40, 60, 60, 30),
    (60, 40, 30, 60),
    (40, 40, 20, 20),
    (40, 60, 30, 40),
    (40, 61, 30, 40),
    (61, 40, 20, 39),
    (2, 200, 1, 100),
    (2, 201, 1, 150),
    (3, 301, 2, 300),
]


@lru_cache(maxsize=1)
def pass_order() -> str | None:
    """Which pass of a resize Pillow runs first, one of ``PASS_ORDERS``; None if none fits."""
    noise = np.random.default_rng(1)
    seen = []
    for w, h, to_w, to_h in _RESIZES:
        image = Image.fromarray(noise.integers(0, 256, (h, w, 3), np.uint8))

        def resized(*sizes: Size, image: Image.Image = image) -> bytes:
            for size in sizes:
                image = image.resize(size, Image.Resampling.BICUBIC)
            return image.tobytes()

        whole = resized((to_w, to_h))
        horizontal = whole == resized((to_w, h), (to_w, to_h))
        vertical = whole == resized((w, to_h), (to_w, to_h))
        if horizontal == vertical:
            return None
        seen.append(vertical)
    for name, rule in _VERTICAL_FIRST.items():
        if seen == [rule(*sizes) for sizes in _RESIZES]:
            return name
    return None


# width, height, JPEG subsampling (Pillow's number; None: gray)
_FILES = [(97, 64, 2), (64, 113, 0), (83, 83, 1), (70, 66, None), (9, 7, 2), (31, 250, 2)]
_LARGEST_CROP = 1024


@lru_cache(maxsize=8)
def _files(least: int) -> list[tuple[Size, bytes]]:
    """Sizes and JPEG files, all but the last two with edges of at least ``least`` pixels."""
    noise = np.random.default_rng(2)
    made = []
    for width, height, subsampling in _FILES:
        if min(width, height) >= 64:
            more = max(0, least - 64)
            width, height = width + more, height + more
        y, x = np.mgrid[:height, :width]
        slopes = np.stack([x * 255 / width, y * 255 / height, (x + y) * 3 % 256], axis=-1)
        pixels = (slopes * 0.6 + noise.integers(0, 103, slopes.shape)).astype(np.uint8)
        image, file = Image.fromarray(pixels), io.BytesIO()
        if subsampling is None:
            image.convert("L").save(file, "JPEG", quality=90)
        else:
            image.save(file, "JPEG", quality=90, subsampling=subsampling)
        made.append(((height, width), file.getvalue()))
    return made


def small_files() -> list[bytes]:
    """JPEG files of every kind that is decoded natively."""
    return [data for _, data in _files(0)]


@contextmanager
def _serially() -> Iterator[None]:
    """Keeps torch from sharing images out to threads, in this thread, where that is possible.

    Waking a thread takes milliseconds on a busy machine. ``torch.set_num_threads`` would do, but
    leaves traces: from then on Intel's MKL shares out everything, however small.
    """
    try:
        openmp = ctypes.CDLL(torch._C.__file__)
        threads = openmp.omp_get_max_threads()
        openmp.omp_set_num_threads(1)
    except (OSError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        openmp.omp_set_num_threads(threads)


_outcomes: dict[Plan, Refusal | None] = {}


def prove(plan: Plan, transform: Any) -> Refusal | None:
    """Runs ``transform`` and ``plan`` on a few files with the same keys; None if bits are equal.

    Once per plan and process; tens of milliseconds. The generators are left as they were.
    """
    if plan not in _outcomes:
        with warnings.catch_warnings(), generators_kept(), _serially():
            warnings.simplefilter("ignore")
            difference = _difference(plan, transform)
        _outcomes[plan] = None
        if difference is not None:
            _outcomes[plan] = Refusal(
                type(transform).__name__,
                f"the native plan differs from it: {difference}",
                "please report it with your versions of torch, torchvision and Pillow",
            )
    return _outcomes[plan]


def _difference(plan: Plan, transform: Any) -> str | None:
    crops = [max(op.size) for op in plan.ops if isinstance(op, RandomCrop)]
    files = _files(min(max(crops, default=0), _LARGEST_CROP))
    if any(isinstance(op, Augment | AutoAugment | ColorJitter) for op in plan.ops):
        files = files * 5
    elif plan.draws:
        files = files + files[:2]
    compared = 0
    keys = random.Random(3).sample(range(2**32), len(files))
    for (size, data), key in zip(files, keys, strict=True):
        expected = _expected(transform, data, key)
        size_of_result = result_size(plan, size, key)
        if size_of_result is None:
            continue  # such samples go through the transform itself
        where = f"a {size[1]}x{size[0]} JPEG under key {key}"
        if isinstance(expected, str):
            return f"{where}: {expected}"
        status, tensor = run_encoded(plan, data, key, size_of_result)
        if tensor is None:
            return f"{where}: {status}"
        if tensor.shape != expected.shape:
            return f"{where}: shape {tensor.shape}, not {expected.shape}"
        if tensor.dtype != expected.dtype or tensor.tobytes() != expected.tobytes():
            return f"{where}: other values"
        compared += 1
    return None if compared else "none of its images could be compared"


def _expected(transform: Any, data: bytes, key: int) -> NDArray[Any] | str:
    """What the transform and collation give for a file; a text where they raise."""
    seed_generators(key)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    try:
        batch = default_collate([transform(image)])
    except Exception as error:  # noqa: BLE001  whatever the transform raises, the plan must not go on
        return f"{type(error).__name__}: {error}"
    if type(batch) is not torch.Tensor:
        return f"a {type(batch).__name__}"
    if batch.dtype in (torch.float16, torch.bfloat16):
        batch = batch.view(torch.int16)
        return batch[0].numpy().view(np.uint16)
    array: NDArray[Any] = batch[0].numpy()
    return array
