"""What cannot be read in place, made once into a file of the cache folder that can.

Such a file serves as long as the one that it was made of has its size and time of change.

Note [Raw pixels]
    Formats that hold pixels instead of encoded images get a file with an image of Netpbm's for each
    sample, one after the other: "P6" of three channels or "P5" of one, width, height, 255, and the
    pixels. (netpbm, ppm(5) and pgm(5).) It is a few bytes larger than the pixels, and its samples
    are read and decoded as any others.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Sequence
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from stoker import cache as kept
from stoker.errors import SourceError

_PIECE_BYTES = 1 << 20


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
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(path, "is no file")
        state = [os.path.abspath(path), str(status.st_size), str(status.st_mtime_ns)]
        identity = "\0".join([*state, what] if what else state)
        digest = hashlib.blake2b(os.fsencode(identity), digest_size=16).hexdigest()
        name = f"expanded/{digest}-{os.path.basename(path)}"
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
