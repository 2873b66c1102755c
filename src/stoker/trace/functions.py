"""Pillow's and torchvision's functions of images, recorded where their image is lazy.

Here are those that look at pixels, are found by name in their module, and are what everybody calls:
image enhancers, `ImageOps`, and three functions of torchvision's that work in NumPy. Methods of
images are in `image`. What is not recorded is done by the stock function, on real pixels.

Note [Enhancers]
    An image enhancer makes a degenerate image when it is constructed, and blends it with the image
    when it is asked to. The degenerate image is the adjustment by the factor 0 and is recorded as
    such; `Image.blend` of an image and its adjustment by 0 is the adjustment by the given factor.
    So an enhancer's attributes are what they are, and changing its image later changes the same.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from PIL import Image, ImageEnhance, ImageOps

from stoker.proof import small_files
from stoker.trace.file import LazyJpegImageFile, lazy
from stoker.trace.image import PAD_MODES, LazyImage
from stoker.trace.node import Tracing
from stoker.trace.scope import IMAGES, Scope, current, recording

Function = Callable[..., Any]

ENHANCERS = {
    "Brightness": "brightness",
    "Contrast": "contrast",
    "Color": "saturation",
    "Sharpness": "sharpness",
}
"""Pillow's enhancers and the native adjustments that they make."""


def enhancer(name: str) -> Function:
    """The constructor of an enhancer, see Note [Enhancers]."""
    stock = getattr(ImageEnhance, name).__init__

    @wraps(stock)
    def __init__(self: Any, image: Any) -> None:  # noqa: N807
        recorded = lazy(image)
        degenerate = None
        if recorded is not None and "transparency" not in recorded.info:
            if name != "Color":
                # A constant image is made anew, without the info of this one.
                info = recorded.copied_info() if name == "Sharpness" else {}
                degenerate = recorded.adjusted(ENHANCERS[name], 0.0, info=info)
            elif recorded.mode == "RGB":
                degenerate = recorded.adjusted("saturation", 0.0)
                self.intermediate_mode = "L"
        if degenerate is None:
            stock(self, image)
        else:
            self.image, self.degenerate = image, degenerate

    return __init__


def blend() -> Function:
    """``Image.blend``, see Note [Enhancers]."""
    stock = Image.blend

    @wraps(stock)
    def ours(im1: Any, im2: Any, alpha: Any) -> Any:
        one, two = lazy(im1), lazy(im2)
        recorded = None if one is None or two is None else two.blended(one, alpha)
        return stock(im1, im2, alpha) if recorded is None else recorded

    return ours


def _adjusted(image: Any, kind: str, amount: Any = 0.0) -> LazyImage | None:
    recorded = lazy(image)
    return None if recorded is None else recorded.adjusted(kind, amount)


def _sides(border: Any) -> tuple[Any, ...] | None:
    """Left, top, right, bottom."""
    if type(border) is int:
        return (border,) * 4
    if type(border) is not tuple or len(border) not in (2, 4):
        return None
    return border * 2 if len(border) == 2 else border


def _autocontrast(
    image: Any, cutoff: Any = 0, ignore: Any = None, mask: Any = None, preserve_tone: Any = False
) -> LazyImage | None:
    if cutoff or preserve_tone or ignore is not None or mask is not None:
        return None
    return _adjusted(image, "auto_contrast")


def _equalize(image: Any, mask: Any = None) -> LazyImage | None:
    return _adjusted(image, "equalize") if mask is None else None


def _invert(image: Any) -> LazyImage | None:
    return _adjusted(image, "invert")


def _posterize(image: Any, bits: Any) -> LazyImage | None:
    known = type(bits) is int and 1 <= bits <= 8
    return _adjusted(image, "posterize", bits) if known else None


def _solarize(image: Any, threshold: Any = 128) -> LazyImage | None:
    return _adjusted(image, "solarize", threshold)


def _expand(image: Any, border: Any = 0, fill: Any = 0) -> LazyImage | None:
    sides = _sides(border)
    recorded = None if sides is None else lazy(image)
    if recorded is None or "transparency" in recorded.info:
        return None
    return recorded.padded(sides, "constant", fill)


def _adjust_hue(img: Any, hue_factor: Any) -> LazyImage | None:
    recorded = lazy(img) if type(hue_factor) is float and -0.5 <= hue_factor <= 0.5 else None
    if recorded is None or recorded.mode != "RGB":
        return None
    return recorded.adjusted("hue", int(hue_factor * 255), info={})


def _to_grayscale(img: Any, num_output_channels: Any) -> LazyImage | None:
    recorded = lazy(img) if num_output_channels == 3 else None
    return None if recorded is None else recorded.gray()


def _pad(img: Any, padding: Any, fill: Any = 0, padding_mode: Any = "constant") -> LazyImage | None:
    if type(padding) is list:
        padding = tuple(padding)
    if type(padding) is tuple and len(padding) == 1:
        padding = padding[0]
    sides = _sides(padding)
    if sides is None or padding_mode not in PAD_MODES or padding_mode == "constant":
        return None  # a constant border is `ImageOps.expand`
    recorded = lazy(img)
    if recorded is None or recorded.mode != "RGB":
        return None  # a gray image made from an array shares its memory and is read-only
    return recorded.padded(sides, padding_mode)


IMAGE_OPS: dict[str, Function] = {
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "invert": _invert,
    "posterize": _posterize,
    "solarize": _solarize,
    "expand": _expand,
}
"""By the names of `ImageOps`: what they record; None where the stock function goes on."""

TORCHVISION: dict[str, tuple[Function, tuple[tuple[Any, ...], ...]]] = {
    "adjust_hue": (_adjust_hue, ((0.3,), (-0.21,), (0.0,))),
    "to_grayscale": (_to_grayscale, ((3,),)),
    "pad": (_pad, (([5, 3, 1, 7], 0, "reflect"), ([4], 0, "edge"), ([3, 2], 0, "symmetric"))),
}
"""By the names of torchvision's functions of PIL images; and arguments that they are tried with."""

_MODULE = "torchvision.transforms._functional_pil"

KERNELS = ("adjust_hue", "pad")
"""Those that are kernels of torchvision's v2 as they are."""


def recording_version(stock: Function, recorder: Function) -> Function:
    """``stock``, or what ``recorder`` gives where that is not None."""

    @wraps(stock)
    def ours(*arguments: Any, **options: Any) -> Any:
        result = None if current() is None else recorder(*arguments, **options)
        return stock(*arguments, **options) if result is None else result

    return ours


@lru_cache(maxsize=16)
def torchvisions(name: str, stock: Function) -> Function | None:
    """The recording version of a function of torchvision's; None where it isn't what it was.

    Once per function: compares the pixels of small images.
    """
    recorder, trials = TORCHVISION[name]
    if (stock.__module__, stock.__name__) != (_MODULE, name):
        return None
    ours = recording_version(stock, recorder)
    return ours if all(_agree(stock, ours, trial, ("RGB",)) for trial in trials) else None


def _enhanced(name: str) -> Function:
    return lambda image, factor: getattr(ImageEnhance, name)(image).enhance(factor)


def _recolored(kind: str) -> Function:
    return lambda image, amount=0.0: image.adjusted(kind, amount)


def _with_hue(image: Any, shift: int) -> Any:
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(i + shift) % 256 for i in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def _looked_up(image: Any, step: int) -> Any:
    return image.point([i * step % 256 for i in range(256 * len(image.getbands()))])


def _transformed(image: Any, *arguments: Any) -> Any:
    return image.transform(*arguments)


@lru_cache(maxsize=1)
def unlike() -> frozenset[str]:
    """Native operations that the installed Pillow does otherwise; tens of milliseconds, once."""
    proofs: list[tuple[str, Function, Function, list[tuple[Any, ...]]]] = [
        (kind, _enhanced(name), _recolored(kind), [(0.0,), (0.6,), (1.7,)])
        for name, kind in ENHANCERS.items()
    ]
    proofs += [
        ("auto_contrast", ImageOps.autocontrast, _recolored("auto_contrast"), [()]),
        ("equalize", ImageOps.equalize, _recolored("equalize"), [()]),
        ("invert", ImageOps.invert, _recolored("invert"), [()]),
        ("posterize", ImageOps.posterize, _recolored("posterize"), [(3,)]),
        ("solarize", ImageOps.solarize, _recolored("solarize"), [(97,), (99.5,)]),
        ("look_up", _looked_up, _looked_up, [(1,), (7,)]),
        ("hue", _with_hue, _recolored("hue"), [(25,), (-90,)]),
    ]
    filters = Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC
    affine, perspective = Image.Transform.AFFINE, Image.Transform.PERSPECTIVE
    turned = [((70, 61), affine, (0.9, 0.2, -2.3, -0.1, 1.2, 1.7), chosen) for chosen in filters]
    turned += [((50, 40), affine, (0.7, 0, 1, 0, 1.3, 2), chosen) for chosen in filters]
    tilted = [
        ((60, 61), perspective, (0.9, 0.2, -2, -0.1, 1.2, 1.7, 3e-3, -2e-3), chosen)
        for chosen in filters
    ]
    proofs += [("affine", _transformed, _transformed, turned)]
    proofs += [("perspective", _transformed, _transformed, tilted)]
    return frozenset(
        name
        for name, stock, ours, trials in proofs
        for trial in trials
        if not _agree(stock, ours, trial, ("RGB",) if name == "hue" else ("RGB", "L"))
    )


def _agree(
    stock: Function, ours: Function, arguments: tuple[Any, ...], modes: tuple[str, ...]
) -> bool:
    """True where the pixels of a small image are the same, and were recorded."""
    assert Tracing.order, "images are made before it was asked whether they can be"
    try:
        return all(_agrees(stock, ours, arguments, mode) for mode in modes)
    except Exception:  # noqa: BLE001  what is built otherwise may raise anything
        return False


@lru_cache(maxsize=1)
def _file() -> bytes:
    return small_files()[0]


def _agrees(stock: Function, ours: Function, arguments: tuple[Any, ...], mode: str) -> bool:
    with recording(None):
        expected = stock(Image.open(io.BytesIO(_file())).convert(mode), *arguments)
    with recording(Scope(IMAGES, set())):
        image = Image.open(io.BytesIO(_file()))
        image.__class__ = LazyJpegImageFile
        result = ours(image.convert(mode), *arguments)
        return (
            type(result) is LazyImage
            and result.size == expected.size
            and result.tobytes() == expected.tobytes()
        )
