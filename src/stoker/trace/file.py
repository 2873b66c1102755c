"""JPEG files that were opened in a scope: Pillow has parsed the header, and the rest is lazy."""

from __future__ import annotations

import io
import os
import tarfile
import weakref
import zipfile
from typing import Any

from PIL import Image, ImageFile, JpegImagePlugin

from stoker.engine import native_image, run_recorded
from stoker.trace.image import TRANSFORMS, LazyImage
from stoker.trace.node import MODES, Node, Source, Tracing, identity_of
from stoker.trace.scope import DECODE, IMAGES, Scope, current, note

_END = b"\xff\xd9"
_MEMBERS = zipfile.ZipExtFile, tarfile.ExFileObject


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

    def point(self, lut: Any, mode: Any = None) -> Any:
        """Pillow's; tables of bytes recorded."""
        lazy = None if mode is not None else self._lazy()
        return super().point(lut, mode) if lazy is None else lazy.point(lut)

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
        lazy = self._lazy() if isinstance(method, int) and method in TRANSFORMS else None
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
    if type(fp) is io.BytesIO:
        data = fp.getvalue()
    elif type(fp) in _MEMBERS:
        place = fp.tell()
        try:
            fp.seek(0)
            data = fp.read()
        except Exception:  # noqa: BLE001  of a broken archive: Pillow meets it again, and raises it
            data = b""
        fp.seek(place)
    else:
        return None
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
