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
import os
import weakref
from typing import Any

from PIL import Image, ImageFile, JpegImagePlugin

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
_CROP, _RESIZE, _GRAY = OPERATIONS["crop"], OPERATIONS["resize"], OPERATIONS["gray"]
_TRANSPOSES: dict[int, Code] = {
    int(Image.Transpose.FLIP_LEFT_RIGHT): (OPERATIONS["mirror_x"],),
    int(Image.Transpose.FLIP_TOP_BOTTOM): (OPERATIONS["mirror_y"],),
    int(Image.Transpose.ROTATE_180): (OPERATIONS["mirror_x"], OPERATIONS["mirror_y"]),
}


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
            changes.get("resized", node.resized),
        )
        return LazyImage.of(new, self._copied_info(), scope)

    def _copied_info(self) -> dict[Any, Any]:
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
            elif not node.resized:
                # After a resize the pixels are kept: image enhancers make a gray copy of an image
                # and go on with the image itself.
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
            lazy = self._record(code, wanted, resized=True)
            if lazy is not None:
                return lazy
        return self.made("resize").resize(size, resample, box, reducing_gap)

    def transpose(self, method: Any) -> Any:
        """Pillow's; flips and the half turn recorded."""
        code = _TRANSPOSES.get(method) if isinstance(method, int) else None
        lazy = None if code is None else self._record(code, self._size, len(code))
        return self.made("transpose").transpose(method) if lazy is None else lazy


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
        """Pillow's; flips and the half turn recorded."""
        lazy = self._lazy()
        return super().transpose(method) if lazy is None else lazy.transpose(method)


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
