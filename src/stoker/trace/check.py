"""Whether tracing is possible here: Pillow's ways, measured before they are relied on; patches."""

from __future__ import annotations

import io
import sys
from functools import lru_cache
from typing import Any

import PIL
import torch
from PIL import Image, ImageEnhance, ImageFile, ImageOps, JpegImagePlugin
from torch.utils.data._utils import collate

from stoker.genuine import Watch
from stoker.plan import FILTERS
from stoker.proof import pass_order, small_files
from stoker.stock import surroundings
from stoker.trace import functions
from stoker.trace.file import LazyJpegImageFile
from stoker.trace.image import LazyImage
from stoker.trace.node import Tracing
from stoker.trace.scope import IMAGES, Scope, recording


@lru_cache(maxsize=1)
def _watch() -> Watch:
    watch = Watch([PIL])
    ours = [name for name in vars(LazyImage) if name in vars(Image.Image)]
    watch.functions(Image.Image, [*ours, "_new", "tobytes", "frombytes", "getim"])
    watch.functions(Image, ["open", "frombytes", "_decompression_bomb_check", "new", "blend"])
    watch.functions(ImageEnhance, functions.ENHANCERS)
    watch.functions(ImageOps, functions.IMAGE_OPS)
    watch.functions(ImageFile.ImageFile, ["load", "load_prepare", "load_end", "__init__"])
    watch.functions(JpegImagePlugin.JpegImageFile, ["load", "load_read", "draft", "_open"])
    return watch


def patched() -> str | None:
    """What in this process is not the package's own and would be passed over; None if nothing."""
    refusal = surroundings()
    if refusal is not None:
        return f"{refusal.op} {refusal.why}"
    changed = _watch().changed()
    if changed is not None:
        return f"{changed} is not Pillow's own code"
    if collate.default_collate_fn_map.get(torch.Tensor) is not collate.collate_tensor_fn:
        return "default_collate has another entry for tensors"
    return _kernels()


def _kernels() -> str | None:
    """What of the kernels in torchvision's registry was replaced."""
    functions = sys.modules.get("torchvision.transforms.v2.functional")
    if functions is None:
        return None
    from torchvision import tv_tensors
    from torchvision.transforms.v2.functional._utils import _KERNEL_REGISTRY as KERNELS

    for name in ("to_dtype", "normalize", "erase"):
        kernels = KERNELS.get(getattr(functions, name), {})
        stock = getattr(functions, f"{name}_image")
        for kind in (tv_tensors.Image, torch.Tensor):
            found = kernels.get(kind)
            if getattr(found, "__wrapped__", found) is not stock:
                return f"another kernel for {name} is registered with torchvision"
    return None


@lru_cache(maxsize=1)
def impossible() -> str | None:
    """Why nothing can be traced in this process; None where it can. Tens of milliseconds, once."""
    if "_im" not in vars(Image.Image()) or not isinstance(vars(Image.Image).get("im"), property):
        return f"Pillow {PIL.__version__} keeps pixels elsewhere than the lazy images expect"
    order = pass_order()
    if order is None:
        return f"Pillow {PIL.__version__} orders the passes of a resize in an unknown way"
    Tracing.order = order
    try:
        functions.unlike()  # once, before workers are forked
        return _difference()
    except Exception as error:  # noqa: BLE001  a Pillow that is built otherwise may raise anything
        return f"Pillow {PIL.__version__} is built otherwise: {type(error).__name__}: {error}"


def _difference() -> str | None:
    """What is not as expected when images are made lazily."""
    for data in small_files():
        stock = [image.tobytes() for image in _results(Image.open(io.BytesIO(data)))]
        scope = Scope(IMAGES, set())
        with recording(scope):
            image = Image.open(io.BytesIO(data))
            image.__class__ = LazyJpegImageFile
            lazy = [result.tobytes() for result in _results(image)]
        if scope.counts.pixels != len(lazy) or scope.counts.declined:
            return "images that should be lazy are not"
        if stock != lazy:
            return f"Pillow {PIL.__version__} gives other pixels than the native engine"
    return None


def _results(image: Any) -> list[Any]:
    """Images made by every kind of operation that is recorded."""
    width, height = image.size
    color = image.convert("RGB")
    box = (width // 5, height // 7, width - width // 6, height - height // 9)
    results = [color, color.crop(box), color.crop((-3, -2, width - 1, height + 2))]
    for place, name in enumerate(FILTERS):
        sizes = [(31, 17), (width * 2 + 1, height // 2 + 1), (width // 2 + 1, height * 2)]
        filter_ = Image.Resampling[name.upper()]
        results.append(color.crop(box).resize(sizes[place % 3], filter_))
        results.append(image.resize(sizes[(place + 1) % 3], filter_))
    small = color.resize((24, 24))
    results += [image.resize((24, 23)).transpose(turn) for turn in Image.Transpose]
    results += [small.transpose(turn).crop((2, 3, 20, 19)) for turn in Image.Transpose]
    gray = image.convert("L")
    results += [gray, gray.resize((25, 13)), gray.convert("RGB").crop(box)]
    return results
