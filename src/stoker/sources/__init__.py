"""How bytes are laid out: one module for each format, its reader and its description."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.sources.filelist import ImageDataset as ImageDataset
    from stoker.sources.folder import ImageFolder as ImageFolder

_PUBLIC = {"ImageDataset": "filelist", "ImageFolder": "folder"}


def __getattr__(name: str) -> object:
    """Imports the module of a format when it is first asked for."""
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(f"stoker.sources.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
