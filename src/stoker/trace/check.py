"""Whether tracing is possible here: Pillow's ways, measured before they are relied on."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import PIL
from PIL import Image

from stoker.plan import FILTERS
from stoker.proof import pass_order, small_files
from stoker.trace.image import LazyJpegImageFile
from stoker.trace.node import Tracing
from stoker.trace.scope import IMAGES, Scope, recording


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
    turns = [small.transpose(Image.Transpose(method)) for method in (0, 1, 3)]
    results += [turned.crop((2, 3, 20, 19)) for turned in turns]
    gray = image.convert("L")
    results += [gray, gray.resize((25, 13)), gray.convert("RGB").crop(box)]
    return results
