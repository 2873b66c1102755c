"""What cannot be read in place, made once into a file of the cache folder that can.

Such a file serves as long as the one that it was made of has its size and time of change.

Note [Raw pixels]
    Formats that hold pixels instead of encoded images get a file with an image of Netpbm's for each
    sample, one after the other: "P6" of three channels or "P5" of one, width, height, 255, and the
    pixels. (netpbm, ppm(5) and pgm(5).) It is a few bytes larger than the pixels, and its samples
    are read and decoded as any others.

Note [PIL columns]
    MDS and LitData keep a PIL image as width, height and length of its mode, uint32, little-endian;
    its mode; its pixels, row by row. Modes L and RGB are read.
"""

from __future__ import annotations

import bz2
import hashlib
import math
import os
import stat
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stoker import cache as kept
from stoker.copies import ranged
from stoker.errors import SourceError
from stoker.sources.shards import Found

_PIECE_BYTES = 1 << 20
_MOST_NAME = 50  # characters, of at most 4 bytes: file systems allow 255
_PIL = struct.Struct("<III")
_LONGEST_MODE = 16
_CHANNELS = {b"L": 1, b"RGB": 3}


class DamagedError(Exception):
    """Why something cannot be expanded."""


def once(path: str, what: str, write: Callable[[BinaryIO], None], size: int | None = None) -> str:
    """The path of what ``write`` makes of the file at ``path``, which is made if it isn't there.

    Args:
        path: the file.
        what: tells apart several things that are made of one file.
        write: writes it.
        size: its bytes, where they are known; what has others is made anew.

    Raises:
        SourceError: the file cannot be read, ``write`` finds it damaged, or there is no space.
    """
    if ranged(path) is not None:
        raise SourceError(path, "is expanded first, so it has no ranges: leave remote='ranges' out")
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(path, "is no file")
        state = [os.path.abspath(path), str(status.st_size), str(status.st_mtime_ns)]
        identity = "\0".join([*state, what] if what else state)
        digest = hashlib.blake2b(os.fsencode(identity), digest_size=16).hexdigest()
        name = f"expanded/{digest}-{os.path.basename(path)[-_MOST_NAME:]}"
        place = kept.place(name)
        if size is not None and place.is_file() and place.stat().st_size != size:
            place.unlink()
        return str(kept.file(name, write))
    except (DamagedError, zlib.error) as error:
        raise SourceError(path, str(error)) from error
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        where = f" ({error.filename})" if error.filename and error.filename != path else ""
        raise SourceError(path, f"{error.strerror or error}{where}") from error


def inflate(file: BinaryIO, out: BinaryIO, most: int | None = None) -> None:
    """Writes the content of ``file``, compressed with GZIP or ZLIB.

    Raises:
        DamagedError: it is truncated, or gives more than ``most`` bytes.
        zlib.error: it is damaged.
    """
    # A GZIP file may be several, one after the other.
    unused = file.read(_PIECE_BYTES)
    done = 0
    while unused:
        stream = zlib.decompressobj(47)
        while not stream.eof:
            data = stream.unconsumed_tail or unused or file.read(_PIECE_BYTES)
            unused = b""
            if not data:
                raise DamagedError("the compressed data is truncated")
            piece = stream.decompress(data, _PIECE_BYTES)
            done += len(piece)
            if most is not None and done > most:
                raise DamagedError(f"the compressed data gives more than {most:,} bytes")
            out.write(piece)
        unused = stream.unused_data or file.read(_PIECE_BYTES)


def decompress(kind: str, file: BinaryIO, out: BinaryIO, most: int) -> None:
    """Writes the content of ``file``, which is compressed with ``kind``: "gz", "bz2" or "zstd".

    Raises:
        DamagedError: it is damaged, gives more than ``most`` bytes, or ``kind`` is another.
        ImportError: the extra ``stoker[mds]``, which zstd needs, is not installed.
    """
    if kind == "gz":
        inflate(file, out, most)
        return
    if kind == "bz2":
        damages: tuple[type[Exception], ...] = (EOFError, OSError, ValueError)
        source: Any = bz2.BZ2File(file)
    elif kind == "zstd":
        zstandard = _zstandard()
        damages = (zstandard.ZstdError,)
        source = zstandard.ZstdDecompressor().stream_reader(
            file, read_across_frames=True, closefd=False
        )
    else:
        raise DamagedError(f"is compressed with {kind}, which is not read: decompress it first")
    done = 0
    try:
        with source:
            while piece := source.read(_PIECE_BYTES):
                done += len(piece)
                if done > most:
                    raise DamagedError(f"the compressed data gives more than {most:,} bytes")
                out.write(piece)
    except damages as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise DamagedError(f"the compressed data is damaged: {error}") from error


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError("zstd needs an extra: pip install 'stoker[mds]'") from error
    return zstandard


def images(
    path: str,
    what: str,
    shapes: Sequence[tuple[int, int, int]],
    read: Callable[[int], NDArray[np.uint8]],
) -> tuple[str, list[int], list[int]]:
    """The file of a format's pixels as Note [Raw pixels] says; begin and length of each image.

    Args:
        path: the file that the pixels are from.
        what: as for `once`.
        shapes: height, width and channels, 1 or 3, of each.
        read: gives the pixels of one, uint8 of that shape; called if there is no such file yet.

    Raises:
        SourceError: the pixels are more than the file has bytes, or as of `once`.
    """
    try:
        available = os.stat(path).st_size
    except OSError as error:
        raise SourceError(path, error.strerror or str(error)) from error
    pixels = [height * width * channels for height, width, channels in shapes]
    if sum(pixels) > available:
        raise SourceError(
            path, f"is damaged: {sum(pixels):,} bytes of pixels in a file of {available:,}"
        )
    heads = [
        b"P%d\n%d %d\n255\n" % (6 if channels == 3 else 5, width, height)
        for height, width, channels in shapes
    ]
    lengths = [len(head) + size for head, size in zip(heads, pixels, strict=True)]
    ends = np.cumsum([0, *lengths])

    def write(out: BinaryIO) -> None:
        for number, (head, size) in enumerate(zip(heads, pixels, strict=True)):
            content = read(number).tobytes()
            if len(content) != size:
                raise DamagedError(f"is truncated in sample {number:,}")
            out.write(head + content)

    made = once(path, f"{what} pixels", write, int(ends[-1]))
    return made, ends[:-1].tolist(), lengths


def expand_pil(paths: Sequence[str], found: Found) -> list[str]:
    """The files of the pixels of samples that are as Note [PIL columns] says, one for each shard.

    Args:
        paths: of the shards.
        found: the samples, whose bytes are then in those files.

    Raises:
        SourceError: something else lies there, or as of `images`.
    """
    made = []
    shards = np.array(found.shards, np.int64)
    for number, path in enumerate(paths):
        rows = np.flatnonzero(shards == number).tolist()
        spans = [(found.begins[row], found.lengths[row]) for row in rows]
        file, begins, lengths = _pil_images(path, spans)
        made.append(file)
        for row, begin, length in zip(rows, begins, lengths, strict=True):
            found.begins[row], found.lengths[row] = begin, length
    return made


def _pil_images(path: str, spans: Sequence[tuple[int, int]]) -> tuple[str, list[int], list[int]]:
    begins, shapes = [], []
    try:
        with open(path, "rb") as file:
            for number, (begin, length) in enumerate(spans):
                file.seek(begin)
                head = file.read(min(length, _PIL.size + _LONGEST_MODE))
                width, height, mode_bytes = _PIL.unpack(head[: _PIL.size].ljust(_PIL.size, b"\0"))
                mode = head[_PIL.size :][:mode_bytes]
                channels = _CHANNELS.get(mode, 0)
                start = _PIL.size + mode_bytes
                if not channels or start + width * height * channels != length:
                    name = mode.decode("ascii", "replace")
                    raise SourceError(
                        path, f"sample {number:,} is no PIL image of mode L or RGB, but {name!r}"
                    )
                begins.append(begin + start)
                shapes.append((height, width, channels))
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(path, error.strerror or str(error)) from error

    def read(number: int) -> NDArray[np.uint8]:
        with open(path, "rb") as file:
            file.seek(begins[number])
            return np.frombuffer(file.read(math.prod(shapes[number])), np.uint8)

    # Another column, or damaged samples that are left out, make another file.
    what = hashlib.blake2b(np.array(spans, np.int64).tobytes(), digest_size=8).hexdigest()
    return images(path, f"PIL {what}", shapes, read)
