"""Lazy images: they record what is done to them, and are made when somebody needs their pixels.

Note [One funnel]
    Every access of Pillow to pixels, from Python or C, goes through the attribute `_im` of an
    image. On our classes it is a property that makes the image, and turns the object into a
    genuine `PIL.Image.Image`. So an operation that is not recorded here is still right. Two things
    can be told apart: `type(image) is Image.Image` and `type(image) is JpegImageFile` are False
    while an image is lazy.

    Recorded operations have value semantics: what is recorded of an image is a tuple of numbers,
    the native engine's code for it, so changing a parent later cannot change its children.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

from PIL import Image

from stoker.augmentations import ADJUSTMENTS, AFFINE_FILTERS
from stoker.engine import OPERATIONS, Code
from stoker.plan import FILTERS
from stoker.trace.node import Node, Tracing
from stoker.trace.scope import IMAGES, Scope, current, note

_MOST_STEPS = 24
_LARGEST_SIDE, _LARGEST_AREA = 1 << 20, 1 << 28

_FILTERS = {
    int(getattr(Image.Resampling, name.upper())): float(place) for place, name in enumerate(FILTERS)
}
_AFFINE_FILTERS = {
    int(getattr(Image.Resampling, name.upper())): float(number)
    for name, number in AFFINE_FILTERS.items()
}
_CROP, _RESIZE, _GRAY = OPERATIONS["crop"], OPERATIONS["resize"], OPERATIONS["gray"]
_PAD, _ADJUST = OPERATIONS["pad"], OPERATIONS["adjust"]
_LOOK_UP = OPERATIONS["look_up"]
_MIRROR_X, _MIRROR_Y = OPERATIONS["mirror_x"], OPERATIONS["mirror_y"]
_TURN = OPERATIONS["transpose"]
_TRANSPOSES: dict[int, Code] = {
    int(Image.Transpose.FLIP_LEFT_RIGHT): (_MIRROR_X,),
    int(Image.Transpose.FLIP_TOP_BOTTOM): (_MIRROR_Y,),
    int(Image.Transpose.ROTATE_180): (_MIRROR_X, _MIRROR_Y),
    int(Image.Transpose.TRANSPOSE): (_TURN,),
    int(Image.Transpose.ROTATE_90): (_TURN, _MIRROR_Y),
    int(Image.Transpose.ROTATE_270): (_TURN, _MIRROR_X),
    int(Image.Transpose.TRANSVERSE): (_TURN, _MIRROR_X, _MIRROR_Y),
}
TRANSFORMS = {
    int(Image.Transform.AFFINE): ("affine", 6),
    int(Image.Transform.PERSPECTIVE): ("perspective", 8),
}
"""Methods of ``Image.transform`` that are recorded, with how many numbers they take."""

_LEAST_DIVISOR = 1e-3
"""Perspectives with a smaller one go through infinity, or nearly."""

_MOST_AMOUNT = 1e6
"""Of factors and of numbers in matrices; beyond are overflows of Pillow's."""

PAD_MODES = {"constant": 0.0, "edge": 1.0, "reflect": 2.0, "symmetric": 3.0}
"""torchvision's padding modes, and their numbers in the native core."""


class LazyImage(Image.Image):
    """What an operation on a lazily opened image gives."""

    @classmethod
    def of(cls, node: Node, info: dict[Any, Any], scope: Scope) -> LazyImage:
        """A lazy image for what was recorded."""
        self = cls.__new__(cls)
        values = self.__dict__
        values["_node"] = node
        values["_mode"] = node.mode
        values["_size"] = node.size
        values["palette"] = None
        values["info"] = info
        values["_readonly"] = 0
        values["_exif"] = None
        scope.live.append(weakref.ref(self))
        return self

    @property
    def _im(self) -> Any:
        return self._make("pixels")

    @_im.setter
    def _im(self, core: Any) -> None:
        self._become(core)

    def _become(self, core: Any) -> None:
        values = self.__dict__
        values.pop("_node", None)
        readonly = values.pop("_readonly", 0)
        self.__class__ = Image.Image  # type: ignore[assignment]
        values["_im"] = core
        self.readonly = readonly

    def _make(self, what: str) -> Any:
        node = self.__dict__.get("_node")
        if node is None:
            return self.__dict__.get("_im")
        scope = current()
        if scope is not None:
            scope.counts.pixels += 1
            note(scope, what)
        core = node.core(scope)
        # Another thread may have been faster.
        if "_node" in self.__dict__:
            self._become(core)
        return core

    @property
    def readonly(self) -> int:
        """0: what an operation gives is never read-only."""
        return int(self.__dict__.get("_readonly", 0))

    @readonly.setter
    def readonly(self, value: int) -> None:
        self.__dict__["_readonly"] = value

    def made(self, what: str) -> Image.Image:
        """This image with its pixels."""
        self._make(what)
        return self

    def _record(self, code: Code, size: tuple[int, int], steps: int = 1, **changes: Any) -> Any:
        """The lazy result of an operation; None where it must not be lazy."""
        scope = current()
        node: Node = self.__dict__["_node"]
        if scope is None or scope.depth < IMAGES or node.steps + steps > _MOST_STEPS:
            return None
        width, height = size
        if not (
            0 < width <= _LARGEST_SIDE
            and 0 < height <= _LARGEST_SIDE
            and width * height <= _LARGEST_AREA
        ):
            return None
        new = Node(
            node.source,
            node.code + code,
            node.steps + steps,
            changes.get("mode", node.mode),
            size,
        )
        return LazyImage.of(
            new, changes["info"] if "info" in changes else self.copied_info(), scope
        )

    def copied_info(self) -> dict[Any, Any]:
        """What the result of an operation has as its info."""
        return {k: v.copy() if isinstance(v, list) else v for k, v in self.info.items()}

    def load(self) -> Any:
        """Pillow's; of a lazy image, makes it."""
        return self.made("load()").load()

    def close(self) -> None:
        """Pillow's."""
        self._become(None)
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.made("pickling").__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.copy()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyImage):
            other.made("==")
        return self.made("==").__eq__(other)

    __hash__ = Image.Image.__hash__

    def getbands(self) -> tuple[str, ...]:
        """Pillow's."""
        return ("R", "G", "B") if self._mode == "RGB" else ("L",)

    def copy(self) -> Any:
        """Pillow's, recorded."""
        lazy = self._record((), self._size, 0)
        return self.made("copy").copy() if lazy is None else lazy

    __copy__ = copy

    def convert(self, mode: Any = None, *args: Any, **options: Any) -> Any:
        """Pillow's; between RGB and L recorded."""
        node: Node = self.__dict__["_node"]
        lazy = None
        if mode in ("RGB", "L", None, "") and not args and not options:
            if "transparency" in self.info:
                pass
            elif not mode or mode == node.mode:
                lazy = self._record((), self._size, 0)
            else:
                code = (_GRAY,) if mode == "L" else ()
                lazy = self._record(code, self._size, mode=mode)
        return self.made("convert").convert(mode, *args, **options) if lazy is None else lazy

    def crop(self, box: Any = None) -> Any:
        """Pillow's, recorded."""
        if box is None or box == (0, 0, *self._size):
            return self.copy()
        if not (box[2] < box[0] or box[3] < box[1]):
            left, top, right, bottom = map(int, map(round, box))
            size = abs(right - left), abs(bottom - top)
            Image._decompression_bomb_check(size)
            if abs(left) <= _LARGEST_SIDE and abs(top) <= _LARGEST_SIDE:
                code = (_CROP, float(left), float(top), float(size[0]), float(size[1]))
                lazy = self._record(code, size)
                if lazy is not None:
                    return lazy
        return self.made("crop").crop(box)

    def resize(
        self, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None
    ) -> Any:
        """Pillow's; of the whole image recorded."""
        chosen = Image.Resampling.BICUBIC if resample is None else resample
        if (
            reducing_gap is None
            and isinstance(chosen, int)
            and chosen in _FILTERS
            and type(size) in (tuple, list)
            and len(size) == 2
            and type(size[0]) is int
            and type(size[1]) is int
            and (box is None or tuple(box) == (0, 0, *self._size))
        ):
            wanted = tuple(size)
            if wanted == self._size:
                return self.copy()
            code = (_RESIZE, 2.0, float(size[1]), float(size[0]), 0.0, _FILTERS[int(chosen)])
            lazy = self._record(code, wanted)
            if lazy is not None:
                return lazy
        return self.made("resize").resize(size, resample, box, reducing_gap)

    def transpose(self, method: Any) -> Any:
        """Pillow's, recorded."""
        code = _TRANSPOSES.get(method) if isinstance(method, int) else None
        lazy = None
        if code is not None:
            width, height = self._size
            size = (height, width) if _TURN in code else (width, height)
            lazy = self._record(code, size, len(code))
        return self.made("transpose").transpose(method) if lazy is None else lazy

    def transform(
        self,
        size: Any,
        method: Any,
        data: Any = None,
        resample: Any = Image.Resampling.NEAREST,
        fill: Any = 1,
        fillcolor: Any = None,
    ) -> Any:
        """Pillow's; affine ones and perspectives recorded."""
        lazy = self._transformed(size, method, data, resample, fillcolor)
        if lazy is not None:
            return lazy
        made = self.made("transform")
        return made.transform(size, method, data, resample, fill, fillcolor)

    def _transformed(
        self, size: Any, method: Any, data: Any, resample: Any, fillcolor: Any
    ) -> LazyImage | None:
        name, count = TRANSFORMS.get(method, ("", 0)) if isinstance(method, int) else ("", 0)
        color = self.color(0 if fillcolor is None else fillcolor)
        if (
            not name
            or name in Tracing.unlike
            or color is None
            or not (isinstance(resample, int) and resample in _AFFINE_FILTERS)
            or not (type(size) in (tuple, list) and len(size) == 2)
            or not all(type(side) is int for side in size)
            or not (type(data) in (tuple, list) and len(data) >= count)
            or not all(_is_number(x) for x in data[:count])
        ):
            return None
        width, height = size
        if name == "perspective":
            a, b = data[6:8]
            if min(1, a * width + 1, b * height + 1, a * width + b * height + 1) < _LEAST_DIVISOR:
                return None
        matrix = map(float, data[:count])
        look = _AFFINE_FILTERS[int(resample)], *color
        code = OPERATIONS[name], float(width), float(height), *matrix, *look
        lazy: LazyImage | None = self._record(code, (width, height))
        return lazy

    def point(self, lut: Any, mode: Any = None) -> Any:
        """Pillow's; tables of bytes recorded."""
        if callable(lut) and not isinstance(lut, Image.ImagePointHandler):
            lut = [lut(i) for i in range(256)] * len(self.getbands())
        table = None if mode is not None else _table(lut, len(self.getbands()))
        if table is not None and "look_up" not in Tracing.unlike:
            sixes = (table[i : i + 6] for i in range(0, len(table), 6))
            code = (_LOOK_UP, *(float(int.from_bytes(six, "big")) for six in sixes))
            lazy = self._record(code, self._size)
            if lazy is not None:
                return lazy
        return self.made("point").point(lut, mode)

    def color(self, color: Any) -> tuple[float, float, float] | None:
        """Red, green and blue of what Pillow makes of a fill; None where it is another's matter."""
        if self._mode == "RGB" and type(color) is int and color == 0:
            color = (0, 0, 0)
        if self._mode == "L":
            if type(color) is tuple and len(color) == 1:
                color = color[0]
            color = (color,) * 3
        if type(color) is not tuple or len(color) != 3:
            return None
        if not all(type(x) is int and 0 <= x <= 255 for x in color):
            return None
        return float(color[0]), float(color[1]), float(color[2])

    def adjusted(self, kind: str, amount: float = 0.0, **changes: Any) -> LazyImage | None:
        """This image with changed colours, see `stoker.augmentations.Adjust`, or None."""
        if not _is_number(amount) or kind in Tracing.unlike:
            return None
        code = _ADJUST, float(ADJUSTMENTS[kind]), float(amount)
        lazy: LazyImage | None = self._record(code, self._size, **changes)
        return lazy

    def blended(self, degenerate: LazyImage, alpha: Any) -> LazyImage | None:
        """``Image.blend(degenerate, self, alpha)``, or None.

        Of an image and its adjustment by the factor 0, this is the one by ``alpha``.
        """
        node: Node = self.__dict__["_node"]
        other: Node = degenerate.__dict__["_node"]
        if node.source is not other.source or node.mode != other.mode or not _is_number(alpha):
            return None
        if node.code != other.code[: len(node.code)]:
            return None
        info, rest = degenerate.copied_info(), other.code[len(node.code) :]
        if not rest or (alpha == 1.0 and node.size == other.size):
            unchanged: LazyImage | None = self._record((), self._size, 0, info=info)
            return unchanged
        for kind in ("brightness", "contrast", "saturation", "sharpness"):
            if rest == (_ADJUST, float(ADJUSTMENTS[kind]), 0.0):
                return self.adjusted(kind, alpha, info=info)
        return None

    def gray(self) -> LazyImage | None:
        """Its luma in each of three channels, without its info, or None."""
        lazy: LazyImage | None = self._record((_GRAY,), self._size, mode="RGB", info={})
        return lazy

    def padded(self, sides: Any, mode: str, color: Any = 0) -> LazyImage | None:
        """This image with a border around it and without its info, or None.

        Args:
            sides: pixels on the left, at the top, on the right, at the bottom.
            mode: one of `PAD_MODES`.
            color: of a constant border.
        """
        fill, (width, height) = self.color(color), self._size
        if fill is None or not all(type(x) is int and 0 <= x <= _LARGEST_SIDE for x in sides):
            return None
        left, top, right, bottom = sides
        if mode in ("reflect", "symmetric"):
            # numpy repeats reflections of reflections by rules of its own.
            missing = 1 if mode == "reflect" else 0
            if max(left, right) > width - missing or max(top, bottom) > height - missing:
                return None
        code = (_PAD, *map(float, sides), PAD_MODES[mode], *fill)
        size = left + width + right, top + height + bottom
        lazy: LazyImage | None = self._record(code, size, info={})
        return lazy


def _table(lut: Any, bands: int) -> bytes | None:
    """What replaces each byte of red, green and blue; None where that is Pillow's matter."""
    if type(lut) not in (list, tuple) or len(lut) != 256 * bands:
        return None
    if not all(type(x) in (int, float) and -0.5 < x < 255.5 for x in lut):
        return None
    return bytes(map(round, lut)) * (3 // bands)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.fabs(value) < _MOST_AMOUNT
