"""Operations that are recorded: the pixels of Pillow and torchvision, and really recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as F
from PIL import Image, ImageEnhance, ImageOps
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms import _functional_pil as on_images

from pictures import picture, save
from stoker.trace import check, functions, hooks
from stoker.trace import file as lazy_file
from stoker.trace import image as lazy_image
from stoker.trace.image import LazyImage
from stoker.trace.node import Tracing
from stoker.trace.scope import IMAGES, Scope, recording
from tracing import canonical, lazily, outcome

Draw = random.Random

SIZES = [(1, 1), (2, 3), (3, 2), (7, 1), (40, 40), (61, 47), (130, 97)]


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    assert check.impossible() is None


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """JPEGs of odd sizes; a gray one; one of a single colour."""
    root = tmp_path_factory.mktemp("photos")
    made = [
        save(root / f"{width}x{height}.jpg", picture(width, height, seed=width), quality=93)
        for width, height in SIZES
    ]
    made.append(save(root / "gray.jpg", picture(53, 38, seed=5).convert("L"), quality=95))
    made.append(save(root / "plain.jpg", Image.new("RGB", (33, 20), (90, 40, 200)), quality=95))
    return made


def _enhanced(name: str) -> Callable[[Any, Draw], Any]:
    def case(image: Any, draw: Draw) -> Any:
        factor = draw.choice([0, 0.0, 1, 1.0, -0.7, 0.3, draw.uniform(0, 2), draw.uniform(0, 40)])
        return getattr(ImageEnhance, name)(image).enhance(factor)

    return case


def _fill(image: Any, draw: Draw) -> Any:
    fill = tuple(draw.randrange(256) for _ in range(3))
    return draw.choice([0, None, fill if image.mode == "RGB" else fill[0]])


def _transformed(image: Any, draw: Draw) -> Any:
    linear = [draw.uniform(-1.5, 1.5) for _ in range(4)]
    if draw.random() < 0.3:
        linear[1] = linear[2] = 0  # axes are kept
    moves = draw.uniform(-9, image.width), draw.uniform(-9, image.height)
    matrix = [linear[0], linear[1], moves[0], linear[2], linear[3], moves[1]]
    size = draw.choice([image.size, (draw.randrange(1, 90), draw.randrange(1, 90))])
    chosen: Any = draw.choice([0, 2, 3])
    method: Any = draw.choice([0, Image.Transform.AFFINE])
    return image.transform(size, method, matrix, chosen, fillcolor=_fill(image, draw))


def _rotated(image: Any, draw: Draw) -> Any:
    return image.rotate(
        draw.choice([0, 90, 180, 270, -90, 45, draw.uniform(-400, 400)]),
        draw.choice([Image.Resampling.NEAREST, Image.Resampling.BILINEAR, 3]),
        draw.choice([False, True, 1]),
        draw.choice([None, None, (3, 5.5)]),
        draw.choice([None, None, (2, -3)]),
        _fill(image, draw),
    )


def _affine_of_torchvision(image: Any, draw: Draw) -> Any:
    return F.affine(
        image,
        draw.uniform(-180, 180),
        [draw.randrange(-9, 9), draw.randrange(-9, 9)],
        draw.uniform(0.5, 2),
        [draw.uniform(-40, 40), draw.uniform(-40, 40)],
        draw.choice([InterpolationMode.NEAREST, InterpolationMode.BILINEAR]),
        [draw.randrange(256)],
    )


def _perspective(image: Any, draw: Draw) -> Any:
    width, height = image.size
    corners = [[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]]
    moved = [[x + draw.uniform(-9, 9), y + draw.uniform(-9, 9)] for x, y in corners]
    if min(width, height) < 40:  # hardly any four corners of it make a perspective
        coefficients = [draw.uniform(-1, 2) for _ in range(6)] + [draw.uniform(0, 0.01)] * 2
        perspective: Any = draw.choice([2, Image.Transform.PERSPECTIVE])
        chosen: Any = draw.choice([0, 2, 3])
        return image.transform((21, 34), perspective, coefficients, chosen)
    return F.perspective(
        image,
        corners,
        moved,
        draw.choice(
            [InterpolationMode.NEAREST, InterpolationMode.BILINEAR, InterpolationMode.BICUBIC]
        ),
        [draw.randrange(256)],
    )


def _bordered(image: Any, draw: Draw) -> Any:
    border: Any = draw.choice([0, 4, (2, 5), (1, 0, 3, 6)])
    fill = _fill(image, draw) or 0
    return ImageOps.expand(image, border, fill)


def _sides(draw: Draw, most: int) -> Any:
    sides = [draw.randrange(most + 1) for _ in range(4)]
    return draw.choice([sides, tuple(sides), sides[:2], sides[:1], sides[0]])


def _padded(image: Any, draw: Draw) -> Any:
    mode = draw.choice(["constant", "edge", "reflect", "symmetric"])
    most = min(image.size) - (mode == "reflect")
    fill = draw.choice([0, draw.randrange(256), [draw.randrange(256)]])
    return F.pad(image, _sides(draw, min(most, 20)), fill, mode)


def _solarized(image: Any, draw: Draw) -> Any:
    threshold: Any = draw.choice([0, 256, draw.randrange(256), draw.uniform(0, 256)])
    return ImageOps.solarize(image, threshold)


def _pointwise(image: Any, draw: Draw) -> Any:
    table = [draw.randrange(256) for _ in range(256 * len(image.getbands()))]
    floats = [min(x + 0.5, 255.2) for x in table]
    choices: list[Any] = [table, tuple(table), floats, lambda x: 255 - x // 2, lambda x: x * 0.7]
    return image.point(draw.choice(choices))


def _hue(image: Any, draw: Draw) -> Any:
    return F.adjust_hue(image, draw.choice([0.0, 0.5, -0.5, draw.uniform(-0.5, 0.5)]))


OPERATIONS: dict[str, Callable[[Any, Draw], Any]] = {
    **{name: _enhanced(name) for name in ("Brightness", "Contrast", "Color", "Sharpness")},
    "autocontrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "invert": lambda image, _: ImageOps.invert(image),
    "posterize": lambda image, draw: ImageOps.posterize(image, draw.randrange(1, 9)),
    "solarize": _solarized,
    "point": _pointwise,
    "gamma": lambda image, draw: F.adjust_gamma(image, draw.uniform(0.2, 3)),
    "hue": _hue,
    "hue of v2": lambda image, draw: v2.functional.adjust_hue(image, draw.uniform(-0.5, 0.5)),
    "grayscale": lambda image, draw: F.to_grayscale(image, draw.choice([1, 3])),
    "grayscale of v2": lambda image, draw: v2.functional.rgb_to_grayscale(
        image, draw.choice([1, 3])
    ),
    "rotate": _rotated,
    "transform": _transformed,
    "affine": _affine_of_torchvision,
    "perspective": _perspective,
    "transpose": lambda image, draw: image.transpose(draw.choice(list(Image.Transpose))),
    "transpose, crop": lambda image, draw: image.transpose(draw.choice(list(Image.Transpose))).crop(
        (1, 2, 30, 20)
    ),
    "expand": _bordered,
    "pad": _padded,
    "pad of v2": lambda image, draw: v2.functional.pad(
        image, [1, 0, 0, 1], padding_mode=draw.choice(["edge", "symmetric"])
    ),
}

STARTS: dict[str, Callable[[Any], Any]] = {
    "RGB": lambda path: Image.open(path).convert("RGB"),
    "L": lambda path: Image.open(path).convert("L"),
    "file": Image.open,
    "resized": lambda path: Image.open(path).convert("RGB").resize((37, 29)),
    "cropped outside": lambda path: Image.open(path).convert("RGB").crop((-3, 2, 25, 40)),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_recorded_and_exact(name: str, start: str, photos: list[Path]) -> None:
    for number, path in enumerate(photos):
        for trial in range(3):

            def code(drawing: int = 100 * number + trial, path: Path = path) -> Any:
                return OPERATIONS[name](STARTS[start](path), random.Random(drawing))

            expected = outcome(code)
            assert expected[0] == "image"
            result, scope = lazily(code)
            assert result == expected, f"{path.name}, trial {trial}"
            assert scope.undone is None
            if name.startswith("pad") and expected[1] == "L":
                continue  # of one channel, only constant borders are recorded
            assert (scope.counts.pixels, scope.counts.declined) == (1, 0)
            assert all("in canonical" in line for line in scope.counts.lines), scope.counts.lines


@pytest.mark.parametrize("orientation", range(2, 9))
def test_turned_photos_are_recorded(orientation: int, tmp_path: Path) -> None:
    image = picture(90, 61, seed=orientation)
    exif = image.getexif()
    exif[0x0112] = orientation
    path = save(tmp_path / "turned.jpg", image, exif=exif.tobytes(), quality=90)

    def code() -> Any:
        upright: Any = ImageOps.exif_transpose(Image.open(path))
        return upright.convert("RGB").crop((5, 3, 50, 44)).resize((20, 30))

    result, scope = lazily(code)
    assert result == outcome(code)
    assert (scope.counts.pixels, scope.counts.declined) == (1, 0)


def test_chains_are_recorded_and_exact(photos: list[Path]) -> None:
    def chain(path: Path, drawing: int) -> Any:
        draw = random.Random(drawing)
        image: Any = STARTS[draw.choice(list(STARTS))](path)
        for _ in range(draw.randrange(2, 9)):
            image = OPERATIONS[draw.choice(list(OPERATIONS))](image, draw)
            if draw.random() < 0.2:
                image = image.resize((draw.randrange(1, 60), draw.randrange(1, 60)))
        return image

    recorded = 0
    for drawing in range(150):
        code = partial(chain, photos[drawing % len(photos)], drawing)
        expected = outcome(code)
        result, scope = lazily(code)
        assert result == expected, f"chain {drawing}"
        recorded += scope.counts.pixels <= 1
    assert recorded > 120  # the others were padded beyond what is native


def test_more_steps_than_are_recorded(photos: list[Path]) -> None:
    def code() -> Any:
        image: Any = STARTS["RGB"](photos[-3])
        for _ in range(lazy_image._MOST_STEPS + 9):
            image = ImageOps.invert(ImageOps.posterize(image, 7))
        return image

    result, scope = lazily(code)
    assert result == outcome(code)
    assert scope.counts.pixels >= 1
    assert scope.undone is None


ODD: dict[str, Callable[[Any], Any]] = {
    "cutoff": lambda i: ImageOps.autocontrast(i, 2),
    "ignored": lambda i: ImageOps.autocontrast(i, ignore=3),
    "tone": lambda i: ImageOps.autocontrast(i, preserve_tone=True),
    "mask": lambda i: ImageOps.equalize(i, _lower_half(i.size)),
    "no bits": lambda i: ImageOps.posterize(i, 0),
    "half a bit": lambda i: ImageOps.posterize(i, 2.5),  # type: ignore[arg-type]
    "no threshold": lambda i: ImageOps.solarize(i, float("nan")),  # type: ignore[arg-type]
    "keywords": lambda i: (ImageOps.invert(image=i), ImageOps.posterize(image=i, bits=4)),
    "factor of NumPy": lambda i: ImageEnhance.Color(i).enhance(np.float32(0.3)),  # type: ignore[arg-type]
    "factor of torch": lambda i: ImageEnhance.Color(i).enhance(torch.tensor(0.3)),  # type: ignore[arg-type]
    "infinite factor": lambda i: ImageEnhance.Contrast(i).enhance(float("inf")),
    "no factor": lambda i: ImageEnhance.Contrast(i).enhance("a"),  # type: ignore[arg-type]
    "other blends": lambda i: (
        Image.blend(i, ImageOps.invert(i), 0.3),
        Image.blend(ImageEnhance.Color(i).enhance(0.5), i, 0.3),
        Image.blend(ImageOps.invert(i), i, 1.0),
        Image.blend(i, i, 0.3),
        Image.blend(ImageEnhance.Color(i).degenerate, i, 1.4),
        Image.blend(i, ImageEnhance.Color(i).degenerate, 1.4),
    ),
    "tables": lambda i: (
        i.point(lambda x: x * 2),
        i.point(lambda x: x - 9),
        i.point(np.arange(256 * len(i.getbands())) % 256),
    ),
    "short table": lambda i: i.point([1] * 255),
    "table of text": lambda i: i.point(["a"] * 768),
    "table to another mode": lambda i: i.point(lambda x: x > 99, "1"),
    "blend of two sizes": lambda i: Image.blend(i, i.crop((0, 0, 9, 9)), 0.3),
    "blend of two modes": lambda i: Image.blend(i, i.convert("L"), 0.3),
    "blend with colours": lambda i: Image.blend(i, i.convert("RGB"), 0.3),
    "border by name": lambda i: ImageOps.expand(i, 3, "red"),
    "negative border": lambda i: ImageOps.expand(i, (-3, 2)),
    "border of three": lambda i: ImageOps.expand(i, (3, 2, 1)),
    "fill of two": lambda i: ImageOps.expand(i, 2, (3, 2)),
    "number as fill": lambda i: ImageOps.expand(i, 2, 300),
    "negative padding": lambda i: F.pad(i, [-3, 2, 4, 1], padding_mode="edge"),
    "repeated reflections": lambda i: F.pad(i, [300, 2, 4, 1], padding_mode="reflect"),
    "reflection of the edge": lambda i: F.pad(i, [i.width, 0, 0, 0], padding_mode="reflect"),
    "padding of floats": lambda i: on_images.pad(i, 2.5, padding_mode="edge"),
    "unknown padding": lambda i: on_images.pad(i, 2, padding_mode="what"),
    "hue out of range": lambda i: F.adjust_hue(i, 0.7),
    "two channels": lambda i: F.to_grayscale(i, 2),
    "fill by name": lambda i: i.rotate(12, fillcolor="red"),
    "fill of floats": lambda i: i.rotate(12, fillcolor=(1.5, 2.0, 3.0)),
    "other transforms": lambda i: (
        i.transform((30, 20), Image.Transform.EXTENT, (3, 3, 40, 40)),
        i.transform((30, 20), Image.Transform.QUAD, (0, 0, 3, 30, 30, 30, 33, 0)),
        i.transform((30, 20), Image.Transform.MESH, [((0, 0, 9, 9), (0, 0, 3, 30, 30, 30, 33, 0))]),
    ),
    "through infinity": lambda i: i.transform(
        (30, 20), Image.Transform.PERSPECTIVE, (1, 0.1, 2, 0, 1, 1, -1 / 15.5, 1e-3), 2
    ),
    "far away": lambda i: i.transform((30, 20), Image.Transform.AFFINE, (1, 0, 1e9, 0, 1, 0)),
    "short matrix": lambda i: i.transform((30, 20), Image.Transform.AFFINE, (1, 0, 3, 0, 1)),
    "no matrix": lambda i: i.transform((30, 20), Image.Transform.AFFINE),
    "array as matrix": lambda i: i.transform(
        (30, 20), Image.Transform.AFFINE, np.array([1, 0, 3, 0, 1, 2.0])
    ),
    "wrong filter": lambda i: i.transform((30, 20), Image.Transform.AFFINE, (1, 0, 3, 0, 1, 2), 1),
    "no size": lambda i: i.transform((0, 20), Image.Transform.AFFINE, (1, 0, 3, 0, 1, 2)),
    "info": lambda i: (_with_info(i), ImageOps.expand(_with_info(i), 2), _colour_of(_with_info(i))),
}


def _lower_half(size: tuple[int, int]) -> Image.Image:
    return Image.linear_gradient("L").resize(size).convert("1", dither=Image.Dither.NONE)


def _with_info(image: Any) -> Any:
    image.info["transparency"] = (1, 2, 3)
    return image


def _colour_of(image: Any) -> Any:
    return ImageEnhance.Color(image).enhance(0.4)


@pytest.mark.parametrize("start", ["RGB", "L", "file"])
@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_recorded_is_stock(name: str, start: str, photos: list[Path]) -> None:
    for path in photos[4:]:

        def code(path: Path = path) -> Any:
            return ODD[name](STARTS[start](path))

        result, scope = lazily(code)
        assert result == outcome(code), path.name
        assert scope.undone is None


@pytest.mark.parametrize("name", functions.ENHANCERS)
@pytest.mark.parametrize("start", ["RGB", "L"])
def test_enhancers_have_their_attributes(name: str, start: str, photos: list[Path]) -> None:
    def code() -> Any:
        image: Any = STARTS[start](photos[-3])
        enhancer: Any = getattr(ImageEnhance, name)(image)
        facts = enhancer.image is image, getattr(enhancer, "intermediate_mode", None)
        before = enhancer.enhance(0.3)
        image.paste((9, 9, 9) if start == "RGB" else 9, (2, 2, 20, 20))
        return facts, enhancer.degenerate, before, enhancer.enhance(1.6), sorted(vars(enhancer))

    result, _ = lazily(code)
    assert result == outcome(code)


def test_an_enhancer_that_is_kept_outlives_the_batch(photos: list[Path]) -> None:
    expected = canonical(ImageEnhance.Contrast(STARTS["RGB"](photos[-3])).enhance(0.3))
    scope = Scope(IMAGES, set())
    with hooks.installed(), recording(scope):
        enhancer = ImageEnhance.Contrast(STARTS["RGB"](photos[-3]))
        lazy_file.settle(scope)
    assert canonical(enhancer.enhance(0.3)) == expected
    assert type(enhancer.degenerate) is Image.Image


def test_all_functions_are_put_back() -> None:
    owners: list[Any] = [Image, ImageOps, on_images, ImageEnhance.Color, ImageEnhance.Contrast]
    before = [dict(vars(owner)) for owner in owners]
    with hooks.installed():
        assert ImageOps.invert is not before[1]["invert"]
        assert on_images.pad is not before[2]["pad"]
        assert ImageOps.invert.__name__ == "invert"
    assert [dict(vars(owner)) for owner in owners] == before


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (ImageOps, "invert"),
        (ImageOps, "expand"),
        (ImageEnhance.Color, "__init__"),
        (ImageEnhance, "Color"),
        (Image, "blend"),
        (Image.Image, "transform"),
        (Image.Image, "rotate"),
        (on_images, "adjust_hue"),
    ],
)
def test_patches_prevent_tracing(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.patched() is None

    def patch(*arguments: Any, **options: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(owner, name, patch)
    assert check.patched() is not None


def test_operations_that_pillow_does_otherwise_are_its_own(
    photos: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert functions.unlike() == frozenset()
    adjusted = LazyImage.adjusted

    def other(image: Any, kind: str, amount: float = 0.0, **changes: Any) -> Any:
        return adjusted(image, kind, amount + 1 if kind == "posterize" else amount, **changes)

    with monkeypatch.context() as patch:
        patch.setattr(LazyImage, "adjusted", other)
        assert functions.unlike.__wrapped__() == {"posterize"}

    def code() -> Any:
        image, other_image = STARTS["RGB"](photos[-3]), STARTS["RGB"](photos[-3])
        return ImageOps.invert(image), ImageOps.posterize(image, 3), other_image.rotate(20)

    monkeypatch.setattr(Tracing, "unlike", frozenset())  # put back
    monkeypatch.setattr(functions, "unlike", lambda: frozenset(["posterize", "look_up", "affine"]))
    result, scope = lazily(code)
    assert result == outcome(code)
    lines = [line for line in scope.counts.lines if "in canonical" not in line]
    assert len(lines) == 2  # the stock functions looked at pixels
    assert "point" in lines[0]
    assert "transform" in lines[1]


def test_a_function_of_another_kind_is_not_recorded(
    photos: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(img: Any, hue_factor: Any) -> Any:
        return img

    other.__module__, other.__name__ = functions._MODULE, "adjust_hue"
    assert functions.torchvisions("adjust_hue", on_images.adjust_hue) is not None
    assert functions.torchvisions("adjust_hue", other) is None
    mine = dict(v2.functional._utils._KERNEL_REGISTRY)[v2.functional.pad]
    monkeypatch.setitem(mine, Image.Image, lambda image, **options: image)
    with hooks.installed(), recording(Scope(IMAGES, set())):
        image = STARTS["RGB"](photos[-3])
        assert type(image) is LazyImage
        assert v2.functional.pad(image, [3], padding_mode="edge") is image
