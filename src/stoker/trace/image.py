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

import io
import math
import os
import weakref
from typing import Any

from PIL import Image, ImageFile, JpegImagePlugin

from stoker.augmentations import ADJUSTMENTS, AFFINE_FILTERS
from stoker.engine import OPERATIONS, Code, native_image, run_recorded
from stoker.plan import FILTERS
from stoker.trace.node import MODES, Node, Source, Tracing, identity_of
from stoker.trace.scope import DECODE, IMAGES, Scope, current, note

_END = b"\xff\xd9"
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
_PAD, _ADJUST, _AFFINE = OPERATIONS["pad"], OPERATIONS["adjust"], OPERATIONS["affine"]
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
        """Pillow's; of affine ones recorded."""
        color = self.color(0 if fillcolor is None else fillcolor)
        if (
            isinstance(method, int)
            and method == Image.Transform.AFFINE
            and isinstance(resample, int)
            and resample in _AFFINE_FILTERS
            and color is not None
            and type(size) in (tuple, list)
            and len(size) == 2
            and all(type(side) is int for side in size)
            and type(data) in (tuple, list)
            and len(data) >= 6
            and all(_is_number(x) for x in data[:6])
        ):
            matrix = map(float, data[:6])
            sizes = map(float, size)
            code = (_AFFINE, *sizes, *matrix, _AFFINE_FILTERS[int(resample)], *color)
            lazy = self._record(code, tuple(size))
            if lazy is not None:
                return lazy
        made = self.made("transform")
        return made.transform(size, method, data, resample, fill, fillcolor)

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
        if not _is_number(amount):
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.fabs(value) < _MOST_AMOUNT


class LazyAccess:
    """What ``load()`` of a lazily opened file gives: its pixels, when they are looked at."""

    __slots__ = ("_access", "_image")

    def __init__(self, image: LazyJpegImageFile) -> None:
        self._image, self._access = image, None

    def _real(self) -> Any:
        if self._access is None:
            self._image.made("load()")
            self._access = Image.Image.load(self._image)  # type: ignore[assignment]
        return self._access

    def __getitem__(self, place: Any) -> Any:
        return self._real()[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._real()[place] = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)


class LazyJpegImageFile(JpegImagePlugin.JpegImageFile):
    """A JPEG opened in a scope: Pillow has parsed its header; what is made of it is lazy."""

    @property
    def _im(self) -> Any:
        if "_node" in self.__dict__:
            self.made("pixels")
        return self.__dict__.get("_im")

    @_im.setter
    def _im(self, core: Any) -> None:
        self.__dict__.pop("_node", None)
        self.__dict__["_im"] = core

    def made(self, what: str) -> Image.Image:
        """This image with its pixels; a genuine JpegImageFile from then on."""
        node = self.__dict__.pop("_node")
        scope = current()
        if scope is not None:
            scope.counts.pixels += 1
            note(scope, what)
        core = node.core(scope)
        self.__class__ = JpegImagePlugin.JpegImageFile  # type: ignore[assignment]
        self.__dict__["_im"] = core
        return self

    def _lazy(self) -> LazyImage | None:
        """This image as one that records; None where it must be loaded now."""
        scope = current()
        if scope is None or scope.depth < IMAGES:
            return None
        node = self._recorded(scope)
        if node is None:
            return None
        # No copy: it lives as long as the operation that is recorded on it.
        return LazyImage.of(node, self.info, scope)

    def _recorded(self, scope: Scope) -> Node | None:
        values = self.__dict__
        if "_node" in values:
            node: Node = values["_node"]
            return node
        if not self._deferrable():
            return None
        source = _source(self, scope)
        if source is None:
            return None
        # What load() does, except for the pixels.
        self.tile = []
        self.readonly = 0
        if getattr(self, "_exclusive_fp", False) and self.fp is not None:
            self.fp.close()
        self.fp = None
        scope.counts.opened += 1
        scope.live.append(weakref.ref(self))
        node = values["_node"] = Node(source, (), 0, self._mode, self._size)
        return node

    def _deferrable(self) -> bool:
        return (
            self.__dict__.get("_im") is None
            and len(self.tile) == 1
            and not self.decoderconfig
            and self._mode in MODES
            and self.fp is not None
            and not ImageFile.LOAD_TRUNCATED_IMAGES
        )

    def load(self) -> Any:
        """Pillow's; of a lazy image, makes it."""
        scope = current()
        if "_node" in self.__dict__:
            return LazyAccess(self)
        if scope is not None:
            if scope.depth >= IMAGES:
                if self._recorded(scope) is not None:
                    return LazyAccess(self)
            elif scope.depth == DECODE:
                self._decode_now(scope)
        return JpegImagePlugin.JpegImageFile.load(self)

    def _decode_now(self, scope: Scope) -> None:
        """Decodes natively, now, where that gives pixels; else leaves everything to Pillow."""
        if not self._deferrable():
            return
        source = _source(self, scope)
        if source is None:
            return
        try:
            data = source.read()
        except OSError:
            return
        ending = native_image(MODES[self._mode], Tracing.order)
        status, pixels = run_recorded(ending, (), data, (self._size[1], self._size[0]))
        if status != "ok" or pixels is None:
            return
        self.tile = []
        self.readonly = 0
        if getattr(self, "_exclusive_fp", False) and self.fp is not None:
            self.fp.close()
        self.fp = None
        scope.counts.opened += 1
        scope.counts.pixels += 1
        core = Image.frombytes(self._mode, self._size, pixels).im
        self.__dict__["_im"] = core

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.load()
        if "_node" in self.__dict__:
            self.made("pickling")
        self.__class__ = JpegImagePlugin.JpegImageFile  # type: ignore[assignment]
        return self.__reduce_ex__(protocol)

    def __eq__(self, other: object) -> bool:
        for image in (self, other):
            if isinstance(image, LazyJpegImageFile):
                image.load()
                if "_node" in image.__dict__:
                    image.made("==")
                image.__class__ = JpegImagePlugin.JpegImageFile  # type: ignore[assignment]
            elif isinstance(image, LazyImage):
                image.made("==")
        return self.__eq__(other)

    __hash__ = JpegImagePlugin.JpegImageFile.__hash__

    def copy(self) -> Any:
        """Pillow's, recorded."""
        lazy = self._lazy()
        return super().copy() if lazy is None else lazy.copy()

    __copy__ = copy

    def convert(self, mode: Any = None, *args: Any, **options: Any) -> Any:
        """Pillow's; between RGB and L recorded."""
        lazy = None if args or options or mode not in ("RGB", "L", None, "") else self._lazy()
        return super().convert(mode, *args, **options) if lazy is None else lazy.convert(mode)

    def crop(self, box: Any = None) -> Any:
        """Pillow's, recorded."""
        if box is not None and (box[2] < box[0] or box[3] < box[1]):
            return super().crop(box)  # raises
        lazy = self._lazy()
        return super().crop(box) if lazy is None else lazy.crop(box)

    def resize(
        self, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None
    ) -> Any:
        """Pillow's; of the whole image recorded."""
        lazy = None if reducing_gap is not None else self._lazy()
        if lazy is None:
            return super().resize(size, resample, box, reducing_gap)
        return lazy.resize(size, resample, box)

    def transpose(self, method: Any) -> Any:
        """Pillow's, recorded."""
        lazy = self._lazy()
        return super().transpose(method) if lazy is None else lazy.transpose(method)

    def transform(
        self,
        size: Any,
        method: Any,
        data: Any = None,
        resample: Any = Image.Resampling.NEAREST,
        fill: Any = 1,
        fillcolor: Any = None,
    ) -> Any:
        """Pillow's; of affine ones recorded."""
        lazy = None
        if isinstance(method, int) and method == Image.Transform.AFFINE:
            lazy = self._lazy()
        if lazy is None:
            return super().transform(size, method, data, resample, fill, fillcolor)
        return lazy.transform(size, method, data, resample, fill, fillcolor)


def lazy(image: Any) -> LazyImage | None:
    """``image`` as one that records; None where it must be real."""
    if type(image) is LazyImage:
        return image
    return image._lazy() if type(image) is LazyJpegImageFile else None


def _source(image: LazyJpegImageFile, scope: Scope) -> Source | None:
    """Where the bytes of an opened file are, without keeping it open; None where it isn't plain.

    A file that does not end in an end-of-image marker may be truncated, which Pillow must say at
    this very place.
    """
    fp = image.fp
    assert fp is not None
    mode, size = image.mode, image.size
    try:
        fd = fp.fileno()
    except (AttributeError, OSError):
        return _bytes_source(image)
    try:
        found = os.fstat(fd)
        if os.pread(fd, 2, max(0, found.st_size - 2)) != _END:
            return None
        name = image.filename or getattr(fp, "name", None)
        if isinstance(name, bytes):
            name = os.fsdecode(name)
        if not isinstance(name, str) or not name:
            return None
        path = name if name.startswith("/") else os.path.abspath(name)
        if path in scope.eager:
            return None
        identity = identity_of(found)
        if not getattr(image, "_exclusive_fp", False):
            # The user's own file object: its name must lead to this very file.
            if identity_of(os.stat(path)) != identity:
                return None
            fp.seek(0, os.SEEK_END)  # where reading it has led
        return Source(path, identity, None, mode, size)
    except (OSError, ValueError):
        return None


def _bytes_source(image: LazyJpegImageFile) -> Source | None:
    fp: Any = image.fp
    if type(fp) is not io.BytesIO:
        return None
    data = fp.getvalue()
    if data[-2:] != _END:
        return None
    fp.seek(0, os.SEEK_END)
    return Source(None, None, data, image.mode, image.size)


def settle(scope: Scope) -> None:
    """Makes every image that outlives its batch, such as those that a dataset keeps."""
    for reference in scope.live:
        image = reference()
        if isinstance(image, LazyImage | LazyJpegImageFile) and "_node" in image.__dict__:
            image.made("an image kept after its batch")
