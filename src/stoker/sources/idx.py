"""Images in idx files, as MNIST and its kin have them: pixels in one file, labels in another.

A file is an array, big-endian: two bytes 0, the type of its numbers (8: uint8, 9: int8, 11: int16,
12: int32), the number of its dimensions, each dimension as uint32, the numbers, the last dimension
the fastest. (Y. LeCun, "The MNIST database of handwritten digits", the IDX file format.) Images are
uint8 of shape (n, height, width), of (n, height, width, 3) or (n, height, width, 1), or of
(n, 3, height, width). Labels are integers of shape (n,), or of (n, k), as QMNIST has them, whose
first number counts. Either may be compressed with GZIP.

Labels lie beside images under the same name, but for ``images`` and ``idx3``: that of
``train-images-idx3-ubyte.gz`` are ``train-labels-idx1-ubyte``, with or without ``.gz``.

The pixels are written into the cache folder once: Note [Raw pixels] in `stoker.sources.expanded`.
"""

from __future__ import annotations

import glob
import math
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.sources.expanded import DamagedError, images, inflate, once
from stoker.sources.shards import Found, Sharded

_KINDS = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4"}
_GZIP = b"\x1f\x8b"
_MOST_DIMENSIONS = 4

Label = Mapping[str, Any] | str | None


class IDX(Sharded):
    """A map-style dataset of the images in an idx file.

    Args:
        path: the file of the images, or a folder, or its folder ``raw``, with a
            ``train-images-idx3-ubyte``.
        transform: called with each image, a PIL image in mode RGB, gray ones too.
        target_transform: called with each label.
        label: ``"auto"`` takes the labels that lie beside; a mapping of numbers, as texts, to
            labels; None for no labels.
        damaged: ``"raise"``, or ``"skip"`` to leave out, with a warning, what a truncated file
            lacks.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.

    Raises:
        SourceError: a file is absent, damaged, or holds no images; labels and images do not agree.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        label: Label = "auto",
        damaged: str = "raise",
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        if isinstance(label, str) and label != "auto":
            raise ValueError(f"label must be 'auto', a mapping or None, got {label!r}")
        if damaged not in ("raise", "skip"):
            raise ValueError(f"damaged must be 'raise' or 'skip', got {damaged!r}")
        given = os.path.expanduser(os.fspath(path))
        if os.path.isdir(given):
            given = _images_in(given)
        array = _opened(given)
        shape = _shape(array)
        found = Found()
        whole = min(array.shape[0], (array.size - array.begin) // math.prod(shape))
        if whole < array.shape[0]:
            lost = (
                f"is truncated: the images from {whole:,} to {array.shape[0] - 1:,} are not there"
            )
            if damaged == "raise":
                raise SourceError(given, f"{lost}; damaged='skip' keeps the {whole:,} before")
            found.told.append(f"{given}: {lost}")
        made, begins, lengths = images(
            array.path, "idx", [shape] * whole, lambda number: array.image(number, shape)
        )
        names = [str(number) for number in range(whole)]
        labels: list[Any] = [None] * whole
        if isinstance(label, Mapping):
            labels = [label.get(name) for name in names]
        elif label is not None:
            beside = _labels_beside(given)
            if beside is None:
                found.told.append(f"{given}: no file of labels lies beside it: -1 is theirs")
            else:
                labels = _labels(beside, array.shape[0])[:whole]
        found.names, found.shards, found.labels = names, [0] * whole, labels
        found.begins, found.lengths = begins, lengths
        super().__init__(
            [made], found, None, transform, target_transform, exif, max_pixels, max_bytes
        )


def recognises(path: str, head: bytes) -> bool:
    """Whether a file that begins with ``head`` is an idx file, or a folder has one of images."""
    if os.path.isdir(path):
        return bool(_all_images_in(path))
    if head.startswith(_GZIP):
        try:
            head = zlib.decompressobj(47).decompress(head, 4)
        except zlib.error:
            return False
    return len(head) >= 4 and _is_head(head)


def _is_head(head: bytes) -> bool:
    return head[:2] == b"\0\0" and head[2] in _KINDS and 1 <= head[3] <= _MOST_DIMENSIONS


# Which files


def _all_images_in(folder: str) -> list[str]:
    """The files of training images in a folder or in its folder ``raw``."""
    for place in (folder, os.path.join(folder, "raw")):
        pattern = os.path.join(glob.escape(place), "*train-images*idx[34]*")
        names = {path.removesuffix(".gz"): path for path in sorted(glob.glob(pattern))[::-1]}
        if names:
            return sorted(names.values())
    return []


def _images_in(folder: str) -> str:
    found = _all_images_in(folder)
    if not found:
        raise SourceError(folder, "has no file of training images: name the file")
    if len(found) > 1:
        names = ", ".join(os.path.basename(path) for path in found[:10])
        raise SourceError(folder, f"has several files of training images, name one: {names}")
    return found[0]


def _labels_beside(path: str) -> str | None:
    """The file of the labels of the images at ``path``."""
    folder, name = os.path.split(path.removesuffix(".gz"))
    stem = name.replace("images", "labels")
    if stem == name:
        return None
    for kind in ("idx1-ubyte", "idx2-int", "idx1-int"):
        wanted = stem.replace("idx3-ubyte", kind).replace("idx4-ubyte", kind)
        for end in ("", ".gz"):
            beside = os.path.join(folder, wanted + end)
            if os.path.isfile(beside):
                return beside
    return None


# Arrays


@dataclass(frozen=True)
class _Array:
    """An array in a file that is not compressed.

    Attributes:
        path: the file, which may be in the cache.
        size: of the file, in bytes.
        given: the file that the user has.
        kind: NumPy's name of the type.
        shape: as the file says it.
        begin: where the numbers begin.
    """

    path: str
    size: int
    given: str
    kind: str
    shape: tuple[int, ...]
    begin: int

    def image(self, number: int, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
        """The pixels of an image of ``shape``, (height, width, channels)."""
        size = math.prod(shape)
        with open(self.path, "rb") as file:
            file.seek(self.begin + number * size)
            content = file.read(size)
        if len(content) < size:  # it has shrunk meanwhile
            raise DamagedError(f"is truncated in image {number:,}")
        pixels = np.frombuffer(content, np.uint8)
        if self.shape[1:] != shape and len(self.shape) == 4:
            return pixels.reshape(self.shape[1:]).transpose(1, 2, 0)
        return pixels.reshape(shape)


def _opened(path: str) -> _Array:
    """The array in a file, expanded if it is compressed.

    Raises:
        SourceError: it cannot be read, or is none.
    """
    try:
        with open(path, "rb") as file:
            if file.read(2) == _GZIP:
                file.seek(0)
                start = zlib.decompressobj(47).decompress(file.read(4096), 4 + 4 * _MOST_DIMENSIONS)
                array = _array(path, path, len(start), start)
                wanted = array.begin + math.prod(array.shape) * np.dtype(array.kind).itemsize
                file.seek(0)
                plain = once(path, "", lambda out: inflate(file, out, wanted))
            else:
                plain = path
        with open(plain, "rb") as file:
            head = file.read(4 + 4 * _MOST_DIMENSIONS)
            return _array(plain, path, os.fstat(file.fileno()).st_size, head)
    except zlib.error as error:
        raise SourceError(path, str(error)) from error
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, error.strerror or str(error)) from error


def _array(path: str, given: str, size: int, head: bytes) -> _Array:
    if len(head) < 4 or not _is_head(head):
        raise SourceError(given, "is no idx file")
    begin = 4 + 4 * head[3]
    if len(head) < begin:
        raise SourceError(given, "is truncated in its first bytes")
    shape = struct.unpack_from(f">{head[3]}I", head, 4)
    return _Array(path, size, given, _KINDS[head[2]], shape, begin)


def _shape(array: _Array) -> tuple[int, int, int]:
    """Height, width and channels of the images in an array."""
    shape = array.shape[1:]
    if array.kind == ">u1" and len(array.shape) in (3, 4) and math.prod(shape) > 0:
        if len(shape) == 2:
            return shape[0], shape[1], 1
        if shape[2] in (1, 3):
            return shape[0], shape[1], shape[2]
        if shape[0] == 3:
            return shape[1], shape[2], 3
    what = f"numbers of type {array.kind[1:]} and shape {array.shape}"
    hint = "; its labels? Name the file of the images" if len(array.shape) < 3 else ""
    raise SourceError(array.given, f"holds no images, but {what}{hint}")


def _labels(path: str, count: int) -> list[int]:
    array = _opened(path)
    if len(array.shape) not in (1, 2) or array.shape[0] != count:
        raise SourceError(path, f"has no labels of {count:,} images, but shape {array.shape}")
    numbers = math.prod(array.shape)
    wanted = array.begin + numbers * np.dtype(array.kind).itemsize
    if array.size < wanted or not numbers:
        raise SourceError(path, f"is truncated: it has {array.size:,} bytes of {wanted:,}")
    with open(array.path, "rb") as file:
        values = np.fromfile(file, array.kind, numbers, offset=array.begin)
    if len(values) < numbers:
        raise SourceError(path, "is truncated")
    first: list[int] = values.reshape(count, -1)[:, 0].tolist()
    return first
