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
    from stoker.sampling import (
        ClassBalanced,
        Mixture,
        RepeatedAugmentation,
        Runs,
        Weighted,
        filter,
    )
    from stoker.sources import ImageDataset, ImageFolder, open

__version__ = "0.1.0"

__all__ = [
    "ClassBalanced",
    "DataLoader",
    "DecodeError",
    "ImageDataset",
    "ImageFolder",
    "Mixture",
    "RepeatedAugmentation",
    "ResumeError",
    "Runs",
    "SourceError",
    "StokerError",
    "StokerWarning",
    "UnsupportedError",
    "Weighted",
    "WorkerError",
    "__version__",
    "accelerate",
    "diagnose",
    "explain",
    "filter",
    "open",
    "patch",
    "unpatch",
]

# Found when they are asked for: `stoker run` imports torch no earlier than the script does.
_PLACES = {
    "ClassBalanced": "stoker.sampling",
    "DataLoader": "stoker.loader",
    "ImageDataset": "stoker.sources",
    "ImageFolder": "stoker.sources",
    "Mixture": "stoker.sampling",
    "RepeatedAugmentation": "stoker.sampling",
    "Runs": "stoker.sampling",
    "Weighted": "stoker.sampling",
    "accelerate": "stoker.patching",
    "diagnose": "stoker.diagnosis",
    "explain": "stoker.patching",
    "filter": "stoker.sampling",
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
