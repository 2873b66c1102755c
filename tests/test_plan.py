"""Plans: torchvision's draws and geometry, number for number, over random sizes and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import v2

from oracle import applied, coordinates, noise, steps_of, transformed, words_drawn
from stoker import plan as ops
from stoker import proof
from stoker.engine import ExpTable, Generator, native_plan, result_size
from stoker.lower import lower_transform
from stoker.plan import Plan, Refusal, Tail

VERSIONS = pytest.mark.parametrize("T", [v1, v2], ids=["v1", "v2"])
BYTES = Tail("uint8", 3, b"")


def lowered(*transforms: Any) -> Plan:
    """The plan of these transforms, made a uint8 tensor at the end."""
    plan = lower_transform(v1.Compose([*transforms, v1.PILToTensor()]))
    assert isinstance(plan, Plan), plan
    return plan


# The generator


@pytest.mark.parametrize("seed", [0, 1, 77, 2**31, 2**32 - 1])
def test_generator_gives_mt19937(seed: int) -> None:
    reference = np.random.MT19937()
    reference._legacy_seeding(seed)
    generator = Generator(seed)
    assert [generator.next() for _ in range(3000)] == reference.random_raw(3000).tolist()


@pytest.mark.parametrize("seed", [0, 5, 4_000_000_000])
def test_generator_draws_as_torch(seed: int) -> None:
    fused = proof.fused_uniform()
    assert fused is not None
    torch.default_generator.manual_seed(seed)
    generator = Generator(seed)
    for bound in [1, 2, 3, 224, 65_537, 2**28 - 1] * 60:
        assert generator.uniform() == torch.rand(1).item()
        expected = torch.empty(1).uniform_(0.08, 1.0).item()
        assert generator.uniform(0.08, 1.0, fused) == expected
        assert generator.below(bound) == torch.randint(0, bound, (1,)).item()


def test_fused_and_plain_draws_differ() -> None:
    one, other = Generator(3), Generator(3)
    assert [one.uniform(0.08, 1.0, True) for _ in range(99)] != [
        other.uniform(0.08, 1.0, False) for _ in range(99)
    ]


# Exponentials


def test_exponentials_are_those_of_torch() -> None:
    low, high = torch.log(torch.tensor([0.6, 1.9])).tolist()
    fused = proof.fused_uniform()
    assert fused is not None
    assert not ExpTable.published(low, high, fused)
    assert proof.prove_exponentials(low, high, fused)
    assert ExpTable.published(low, high, fused)


Change = Callable[[NDArray[np.float32], NDArray[np.float32]], None]


def _checked(change: Change) -> tuple[ExpTable, bool]:
    """A table that was shown torch's values, some of them changed; and what it said at last."""
    table, good, size = ExpTable(-0.3, 0.4, True), True, 1 << 20
    for first in range(0, 1 << 24, size):
        arguments = np.empty(size, np.float32)
        table.arguments(first, arguments)
        values = torch.exp(torch.from_numpy(arguments)).numpy()
        if first == 3 * size:
            change(arguments, values)
        good = table.check(first, arguments, values)
    return table, good


def _one_step_up(arguments: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    exact = np.exp(arguments[:5000].astype(np.float64)).astype(np.float32)
    values[:5000] = np.nextafter(exact, np.float32(9))


def test_exponentials_one_step_away_are_kept() -> None:
    table, good = _checked(_one_step_up)
    assert good
    assert table.proven
    argument = np.empty(1, np.float32)
    for draw in (3 << 20, (3 << 20) + 4999):
        table.arguments(draw, argument)
        assert table.value(draw) == np.nextafter(np.float32(math.exp(argument[0])), np.float32(9))
    for draw in (0, (3 << 20) + 5000, (1 << 24) - 1):
        table.arguments(draw, argument)
        assert table.value(draw) == torch.exp(torch.from_numpy(argument)).item()


def _further_up(arguments: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    values[7] *= np.float32(1.000001)


def test_exponentials_further_away_are_refused() -> None:
    table, good = _checked(_further_up)
    assert not good
    assert not table.proven
    assert not table.publish()


def test_an_unproven_ratio_has_no_plan() -> None:
    op = ops.RandomResizedCrop((9, 9), (0.1, 1), (-0.11, 0.12), (0.9, 1.1), "bilinear", True)
    with pytest.raises(ValueError, match="not proven"):
        native_plan(Plan((op,), BYTES, "horizontal_first"))


# Draws and geometry


def _sizes(count: int, most: int, seed: int = 1) -> list[tuple[int, int, int]]:
    random = np.random.default_rng(seed)
    edges = np.exp(random.uniform(0, math.log(most), (count, 2))).astype(int) + 1
    return [(int(w), int(h), int(random.integers(2**32))) for w, h in edges]


RATIOS = [(3 / 4, 4 / 3), (0.5, 2.0), (1.0, 1.0), (0.1, 0.11)]


@VERSIONS
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.5, 3.0)])
def test_random_resized_crop_draws(
    T: Any, ratio: tuple[float, float], scale: tuple[float, float]
) -> None:
    transform = T.RandomResizedCrop(7, scale, ratio)
    plan = lowered(transform)
    for width, height, key in _sizes(1000, 5000):
        image = Image.new("1", (width, height))
        torch.default_generator.manual_seed(key)
        if T is v1:
            top, left, crop_height, crop_width = transform.get_params(image, scale, ratio)
        else:
            drawn = transform.make_params([image])
            top, left = drawn["top"], drawn["left"]
            crop_height, crop_width = drawn["height"], drawn["width"]
        after = torch.rand(1).item()
        status, steps, words = steps_of(plan, image, key)
        if crop_width == 0 or crop_height == 0:
            assert status == "bad_geometry"
            continue
        assert status == "ok"
        crop = next((s for s in steps if s["kind"] == "crop"), None)
        got = (
            (0, 0, height, width)
            if crop is None
            else tuple(crop[name] for name in ("y", "x", "height", "width"))
        )
        assert got == (top, left, crop_height, crop_width), (width, height, key)
        assert words_drawn(key, words) == after


GEOMETRY = [
    lambda T: T.CenterCrop(64),
    lambda T: T.CenterCrop((1, 31)),
    lambda T: T.RandomHorizontalFlip(),
    lambda T: T.RandomVerticalFlip(0.3),
    lambda T: T.RandomHorizontalFlip(0.0),
    lambda T: T.RandomVerticalFlip(1.0),
    lambda T: T.RandomGrayscale(0.5),
    lambda T: T.Grayscale(3),
    lambda T: T.Pad(3),
    lambda T: T.Pad((1, 2), fill=(7, 8, 9)),
    lambda T: T.Pad([4, 0, 2, 1], fill=200, padding_mode="constant"),
    lambda T: T.Pad((0, 3, 1, 2), padding_mode="edge"),
    lambda T: T.Pad((5, 3), padding_mode="reflect"),
    lambda T: T.Pad(2, padding_mode="symmetric"),
    lambda T: T.RandomCrop(1),
    lambda T: T.RandomCrop((12, 20)),
    lambda T: T.RandomCrop(24, padding=4),
    lambda T: T.RandomCrop(24, padding=(1, 2, 3, 4), fill=(5, 6, 7)),
    lambda T: T.RandomCrop(30, padding=2, padding_mode="reflect"),
    lambda T: T.RandomCrop(40, padding=(3, 0), padding_mode="edge", pad_if_needed=True),
    lambda T: T.RandomCrop((64, 50), pad_if_needed=True, fill=9),
    lambda T: T.RandomCrop(64, pad_if_needed=True, padding_mode="symmetric"),
    lambda T: T.RandomCrop((1, 64), padding=[2], pad_if_needed=True, padding_mode="reflect"),
    lambda T: T.Compose(
        [T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.RandomGrayscale(0.2)]
    ),
    lambda T: T.Compose([T.CenterCrop(50), T.RandomVerticalFlip(), T.RandomCrop(40), T.Pad(2)]),
]


@VERSIONS
@pytest.mark.parametrize("make", GEOMETRY, ids=lambda make: repr(make(v1)).replace("\n", ""))
def test_geometry(T: Any, make: Callable[[Any], Any]) -> None:
    transform = make(T)
    plan = lowered(transform)
    native = 0
    for width, height, key in _sizes(400, 150):
        image = coordinates(width, height)
        status, steps, words = steps_of(plan, image, key)
        try:
            expected = transformed(transform, image, key)
        except ValueError:
            assert status == "bad_geometry"
            continue
        after = torch.rand(1).item()
        if status == "bad_geometry":
            # Only reflections of reflections are left to Pillow and NumPy.
            assert "reflect" in repr(plan) or "symmetric" in repr(plan)
            continue
        assert status == "ok"
        assert applied(steps, image).tobytes() == expected.tobytes(), (width, height, key)
        assert words_drawn(key, words) == after
        assert result_size(plan, (height, width), key) == (expected.height, expected.width)
        assert plan.output_size in (None, (expected.height, expected.width))
        native += 1
    assert native > 20


RESIZES: list[tuple[Any, int | None]] = [
    (17, None),
    (100, None),
    (100, 120),
    ([64], 65),
    ((30, 41), None),
    ([1, 90], None),
]


@VERSIONS
@pytest.mark.parametrize(("size", "max_size"), RESIZES)
def test_resize_sizes(T: Any, size: Any, max_size: int | None) -> None:
    transform = T.Resize(size, v1.InterpolationMode.NEAREST, max_size=max_size)
    _same_sizes(transform)


def test_resize_by_the_longer_edge() -> None:
    _same_sizes(v2.Resize(None, v2.InterpolationMode.NEAREST, max_size=77))


def _same_sizes(transform: Any) -> None:
    plan = lowered(transform)
    compared = 0
    for width, height, key in _sizes(1500, 900):
        if max(width, height) > 90 * min(width, height):
            continue  # results of millions of pixels
        image = Image.new("1", (width, height))
        try:
            expected: Image.Image | None = transform(image)
        except ValueError:  # Pillow: an edge of 0 pixels
            expected = None
        size = result_size(plan, (height, width), key)
        assert size == (expected and (expected.height, expected.width)), (width, height)
        fixed = Plan((ops.CenterCrop((height, width)), *plan.ops), plan.tail, plan.order)
        if size is not None:
            assert fixed.output_size == size
            compared += 1
    assert compared > 1000


@VERSIONS
@pytest.mark.parametrize("mode", list(v1.InterpolationMode), ids=lambda mode: mode.value)
def test_every_interpolation(T: Any, mode: v1.InterpolationMode) -> None:
    image = noise(50, 41)
    for transform in (T.Resize(33, mode), T.RandomResizedCrop(20, interpolation=mode)):
        status, steps, _ = steps_of(lowered(transform), image, 5)
        assert status == "ok"
        assert applied(steps, image).tobytes() == transformed(transform, image, 5).tobytes()


# Plans as values


def test_plans_compare_by_value() -> None:
    one, other = (lowered(v1.RandomCrop(9, padding=1), v1.RandomHorizontalFlip(0.25)) for _ in "12")
    assert one == other
    assert hash(one) == hash(other)
    assert native_plan(one) is native_plan(other)
    assert one != lowered(v1.RandomCrop(9, padding=1), v1.RandomHorizontalFlip(0.26))
    assert one.draws
    assert not lowered(v1.CenterCrop(3)).draws
    assert str(one) == (
        "RandomCrop(9x9, padding=(1, 1, 1, 1) constant) > RandomHorizontalFlip(p=0.25) > "
        "uint8 of 3 channels"
    )


def test_size_is_known_only_where_it_is_fixed() -> None:
    assert lowered(v1.Resize(9)).output_size is None
    assert lowered(v1.Resize(9), v1.CenterCrop((3, 4)), v1.Pad(1)).output_size == (5, 6)
    assert lowered(v1.Resize((9, 8)), v1.Resize(4)).output_size == (4, 4)
    assert lowered(v1.Resize((9, 8))).sample_bytes == 9 * 8 * 3
    assert lowered(v1.Resize(9)).sample_bytes == 0


def test_tails() -> None:
    floats = np.arange(768, dtype=np.float32).reshape(3, 256)
    tail = Tail("float32", 3, floats.tobytes())
    assert np.array_equal(tail.array(), floats)  # type: ignore[arg-type] # not None here
    assert tail.black() == (0.0, 256.0, 512.0)
    halves = torch.full((3, 256), -1.5, dtype=torch.bfloat16).view(torch.int16).numpy()
    assert Tail("bfloat16", 1, halves.tobytes()).black() == (-1.5,)
    halves = torch.full((3, 256), 0.25, dtype=torch.float16).view(torch.int16).numpy()
    assert Tail("float16", 3, halves.tobytes()).black() == (0.25,) * 3
    assert BYTES.black() == (0.0,) * 3
    with pytest.raises(ValueError, match="table"):
        Tail("float32", 3, b"")
    with pytest.raises(ValueError, match="channels"):
        Tail("uint8", 2, b"")


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("rotate", []),
        ("resize", [2, 5, 5, 0]),
        ("resize", [2, 0, 5, 0, 2]),
        ("resize", [1, 5, 0, 5, 2]),
        ("resize", [0, 0, 0, 0, 2]),
        ("resize", [2, 5, 5, 0, 6]),
        ("center_crop", [2.5, 3]),
        ("flip_x", [math.nan]),
        ("pad", [-1, 0, 0, 0, 0, 0, 0, 0]),
        ("pad", [0, 0, 0, 0, 4, 0, 0, 0]),
        ("pad", [0, 0, 0, 0, 0, 0, 0, 256]),
        ("random_crop", [4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]),
        ("random_resized_crop", [4, 4, 0.5, 0.2, -1, 1, 0.5, 2, 2, 1]),
    ],
)
def test_native_plans_refuse_bad_numbers(name: str, numbers: list[float]) -> None:
    from stoker import _native

    with pytest.raises(ValueError, match=name):
        _native.Plan().add(name, numbers)


def test_huge_results_are_left_to_pillow() -> None:
    assert result_size(lowered(v1.Resize(30_000)), (100, 100), 0) is None
    assert result_size(lowered(v1.Resize(500)), (1, 1000), 0) == (500, 500_000)
    assert not isinstance(lower_transform(v1.PILToTensor()), Refusal)
