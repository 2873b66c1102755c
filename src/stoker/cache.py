"""Bytes that stoker keeps between runs, in the user's cache folder.

A file appears whole or not at all: it is written under another name and renamed. What is read back
may be anything, as any program can write there: whoever asks for it checks it. A folder that cannot
be written to means that things are kept in memory until the process ends, and one warning.
"""

from __future__ import annotations

import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import platformdirs

from stoker.errors import StokerWarning

_in_memory: dict[str, bytes] = {}
_warned = False


def place(name: str) -> Path:
    """Where ``name``, which may hold slashes, is kept; a path from the root on is that place."""
    return platformdirs.user_cache_path("stoker", appauthor=False) / name


def load(name: str) -> bytes | None:
    """What was stored as ``name``, or whatever else is there now; None if nothing can be read."""
    if name in _in_memory:
        return _in_memory[name]
    path = place(name)
    try:
        # Opening a pipe would wait for a writer.
        return path.read_bytes() if stat.S_ISREG(path.stat().st_mode) else None
    except OSError:
        return None


def store(name: str, parts: Sequence[bytes | memoryview]) -> None:
    """Keeps ``parts``, one after the other, as ``name``."""
    global _warned
    path = place(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(parts)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        _in_memory[name] = b"".join(parts)
        if not _warned:
            _warned = True
            warnings.warn(
                f"can't write to {path.parent} ({error.strerror or error}): what would be kept "
                "there is made anew by every process",
                StokerWarning,
                stacklevel=2,
            )


def file(name: str, write: Callable[[BinaryIO], None]) -> Path:
    """The path of the file ``name``, which ``write`` makes if it isn't there: whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path = place(name)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as out:
            write(out)
            out.flush()
            os.fsync(out.fileno())  # before it has its name, by which it is trusted
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
