"""stoker: a drop-in PyTorch DataLoader for images, with a native engine and the same pixels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stoker.errors import (
    DecodeError,
    ResumeError,
    SourceError,
    StokerError,
    StokerWarning,
    UnsupportedError,
    WorkerError,
)

if TYPE_CHECKING:
    from stoker.diagnosis import diagnose
    from stoker.loader import DataLoader
    from stoker.patching import accelerate, explain, patch, unpatch
    from stoker.sources import ImageDataset, ImageFolder, open

__version__ = "0.1.0"

__all__ = [
    "DataLoader",
    "DecodeError",
    "ImageDataset",
    "ImageFolder",
    "ResumeError",
    "SourceError",
    "StokerError",
    "StokerWarning",
    "UnsupportedError",
    "WorkerError",
    "__version__",
    "accelerate",
    "diagnose",
    "explain",
    "open",
    "patch",
    "unpatch",
]

# Found when they are asked for: `stoker run` imports torch no earlier than the script does.
_PLACES = {
    "DataLoader": "stoker.loader",
    "ImageDataset": "stoker.sources",
    "ImageFolder": "stoker.sources",
    "accelerate": "stoker.patching",
    "diagnose": "stoker.diagnosis",
    "explain": "stoker.patching",
    "open": "stoker.sources",
    "patch": "stoker.patching",
    "unpatch": "stoker.patching",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
