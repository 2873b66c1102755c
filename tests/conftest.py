"""Fixtures for every test: random generators put back, leaks noticed, images kept on failure."""

from __future__ import annotations

import gc
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
FAILURES = ROOT / "test-failures"

CompareImages = Callable[[object, object], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-cuda",
        action="store_true",
        help="fail tests marked needs_cuda where there is no CUDA device, instead of skipping them",
    )
    parser.addoption(
        "--slow",
        action="store_true",
        help="run tests marked exhaustive, too, which take minutes each",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_cuda") and not torch.cuda.is_available():
        if item.config.getoption("--require-cuda"):
            pytest.fail("there is no CUDA device, and --require-cuda was given")
        pytest.skip("there is no CUDA device")
    if item.get_closest_marker("exhaustive") and not item.config.getoption("--slow"):
        pytest.skip("takes minutes: run with --slow")


@pytest.fixture(autouse=True)
def restored_generators() -> Iterator[None]:
    """Puts torch's, Python's and NumPy's generators back after each test."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of test images beside the repository (shared/data)."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"the test images are not there ({folder})")
    return folder


@pytest.fixture(scope="session")
def photos(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class folder of the 300 test photos: one subfolder for each, named by its class."""
    folder = tmp_path_factory.mktemp("photos")
    for path in sorted((data / "photos").iterdir()):
        place = folder / path.name.split("_")[0]
        place.mkdir()
        (place / path.name).symlink_to(path)
    return folder


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _descriptors() -> set[str]:
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        # The descriptor of this very listing is gone by now.
        try:
            found.add(f"{entry} -> {os.readlink(f'/proc/self/fd/{entry}')}")
        except FileNotFoundError:
            continue
    return found


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails the test if it leaves threads or open files behind.

    What a process makes once and keeps (stoker's own thread pool, torch's) must exist before: a
    test runs its subject once, then asks for this with `request.getfixturevalue("no_leaks")`.
    """
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("threads and descriptors are counted through /proc")
    gc.collect()
    threads, descriptors, names = _threads(), _descriptors(), set(threading.enumerate())
    yield
    gc.collect()
    # Threads that were told to stop may still be on their way out.
    deadline = time.monotonic() + 5
    while _threads() > threads and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    left = [thread.name for thread in threading.enumerate() if thread not in names]
    assert _threads() <= threads, f"{_threads() - threads} threads were left, of Python: {left}"
    opened = _descriptors() - descriptors
    assert len(_descriptors()) <= len(descriptors), f"descriptors were left: {sorted(opened)}"


def _as_picture(image: object) -> np.ndarray:
    """Returns uint8 (height, width, 3) of a PIL image, an array or a CHW/HWC tensor."""
    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    array = image.detach().cpu().numpy() if isinstance(image, torch.Tensor) else np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    elif array.shape[0] in (1, 3) and array.shape[-1] not in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.dtype != np.uint8:
        low, high = float(array.min()), float(array.max())
        array = ((array - low) * (255 / max(high - low, 1e-12))).round().astype(np.uint8)
    return np.broadcast_to(array, (*array.shape[:2], 3))


@pytest.fixture
def same_image(request: pytest.FixtureRequest) -> CompareImages:
    """A function that asserts bit-identical images: `same_image(result, expected)`.

    Where they differ, both and ten times their difference are written as PNGs into test-failures/.
    """

    def compare(result: object, expected: object) -> None:
        if isinstance(result, torch.Tensor) and isinstance(expected, torch.Tensor):
            assert result.dtype == expected.dtype
        ours, theirs = (
            x.numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (result, expected)
        )
        if ours.shape == theirs.shape and np.array_equal(ours, theirs):
            return
        folder = FAILURES / re.sub(r"[^\w.-]+", "-", request.node.name)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_as_picture(result)).save(folder / "result.png")
        Image.fromarray(_as_picture(expected)).save(folder / "expected.png")
        assert ours.shape == theirs.shape, f"shapes differ, see {folder}"
        difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
        scale = 1 if ours.dtype == np.uint8 else 255
        shown = np.minimum(difference * scale * 10, 255).astype(np.uint8)
        Image.fromarray(_as_picture(shown)).save(folder / "difference-x10.png")
        share = float((difference > 0).mean())
        raise AssertionError(
            f"{share:.3%} of the values differ, by up to {difference.max():g}; see {folder}"
        )

    return compare
