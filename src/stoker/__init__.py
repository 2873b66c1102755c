"""stoker: a drop-in PyTorch DataLoader for images, with a native engine and the same pixels."""

from stoker.errors import (
    DecodeError,
    SourceError,
    StokerError,
    StokerWarning,
    UnsupportedError,
)
from stoker.loader import DataLoader
from stoker.sources import ImageDataset, ImageFolder, open

__version__ = "0.1.0"

__all__ = [
    "DataLoader",
    "DecodeError",
    "ImageDataset",
    "ImageFolder",
    "SourceError",
    "StokerError",
    "StokerWarning",
    "UnsupportedError",
    "__version__",
    "open",
]
