"""What was recorded of an image: where its file is, and native code for what was done to it."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.engine import Code, native_image, run_recorded
from stoker.trace.scope import Scope, recording

MODES = {"L": 1, "RGB": 3}
"""Pillow's modes that are recorded, with their channels."""

Identity = tuple[int, int, int, int]
"""Device, inode, size and time of change in ns of a file."""


class Tracing:
    """What the installed Pillow does, proven before anything is deferred."""

    order = ""
    """Which pass of a resize runs first, one of `PASS_ORDERS`."""

    unlike: frozenset[str] = frozenset()
    """Operations that it does otherwise than the native engine."""


class Source:
    """An encoded image that was opened: where its bytes are.

    Attributes:
        path: absolute; None where `data` holds the bytes.
        identity: of the file at `path`, which must not have changed when it is read again.
        mode, size: as Pillow gives them; size is (width, height).
    """

    __slots__ = ("data", "identity", "mode", "path", "pixels", "size", "uses")

    def __init__(
        self,
        path: str | None,
        identity: Identity | None,
        data: bytes | None,
        mode: str,
        size: tuple[int, int],
    ) -> None:
        self.path, self.identity, self.data, self.mode, self.size = path, identity, data, mode, size
        self.uses = 0
        self.pixels: NDArray[np.uint8] | None = None

    def read(self) -> bytes:
        """The file's bytes.

        Raises:
            OSError: they are not there any more.
        """
        if self.data is not None:
            return self.data
        assert self.path is not None
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if identity_of(found) != self.identity:
                raise OSError(f"{self.path} has changed since it was opened")
            data = os.read(fd, found.st_size)
            while len(data) < found.st_size and (more := os.read(fd, found.st_size - len(data))):
                data += more
            return data
        finally:
            os.close(fd)


def identity_of(found: os.stat_result) -> Identity:
    """What tells one state of a file from another."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class Node:
    """What was recorded of an image: a source, the native code for the rest, and what comes out."""

    __slots__ = ("code", "mode", "size", "source", "steps")

    def __init__(
        self,
        source: Source,
        code: Code,
        steps: int,
        mode: str,
        size: tuple[int, int],
    ) -> None:
        self.source, self.code, self.steps = source, code, steps
        self.mode, self.size = mode, size

    def run(
        self, ending: Any, out: NDArray[np.uint8] | None, scope: Scope | None
    ) -> NDArray[Any] | None:
        """The image in the native form ``ending`` gives it, on the calling thread.

        Raises:
            Undone: a broken file, inside of a scope.
            OSError: a broken file elsewhere.
        """
        source, size = self.source, (self.size[1], self.size[0])
        source.uses += 1
        try:
            # The third time the same picture is asked for, it is decoded whole and kept.
            data = source.pixels if source.pixels is not None else source.read()
            if source.uses > 2 and isinstance(data, bytes):
                data = source.pixels = _whole(source, data, scope)
            status, result = run_recorded(ending, self.code, data, size, out)
            if status != "ok" and isinstance(data, bytes):
                pixels = _by_pillow(data, scope)
                status, result = run_recorded(ending, self.code, pixels, size, out)
            if status != "ok":
                raise OSError(f"cannot be made natively: {status}")
        except Exception as error:
            if scope is None:
                raise
            if source.path is not None:
                scope.eager.add(source.path)
            raise scope.undo(f"{source.path or 'an image'}: {error}") from error
        return result

    def core(self, scope: Scope | None) -> Any:
        """Pillow's core image of what was recorded."""
        ending = native_image(MODES[self.mode], Tracing.order)
        pixels = self.run(ending, None, scope)
        assert pixels is not None
        with recording(None):
            return Image.frombytes(self.mode, self.size, pixels).im


def _whole(source: Source, data: bytes, scope: Scope | None) -> NDArray[np.uint8]:
    size = source.size[1], source.size[0]
    status, pixels = run_recorded(native_image(3, Tracing.order), (), data, size)
    if status != "ok" or pixels is None:
        return _by_pillow(data, scope)
    return pixels


def _by_pillow(data: bytes, scope: Scope | None) -> NDArray[np.uint8]:
    """RGB pixels of an image that the native decoder declined; gray ones have equal channels."""
    if scope is not None:
        scope.counts.declined += 1
    with recording(None):
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
