"""Images made smaller before they are stored: only those that are larger, everything else as it is.

What is decoded anew changes pixels, so this is done on request only. An image is resized with
Pillow's Lanczos filter, in RGB or gray, and written as JPEG if it came in a format with losses, as
PNG if in one without. Its EXIF data and colour profile stay, so an orientation counts as before.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import BinaryIO

from PIL import Image

_WITH_LOSSES = ("JPEG", "MPO", "WEBP", "AVIF", "HEIF", "JPEG2000")
_GRAY = ("1", "L")


@dataclass(frozen=True)
class Shrink:
    """How large stored images may be.

    Attributes:
        shorter: most pixels of the shorter side, or None.
        longer: most pixels of the longer side, or None.
        quality: of JPEGs, 1 to 100.
    """

    shorter: int | None = None
    longer: int | None = None
    quality: int = 90

    def __post_init__(self) -> None:
        for name in ("shorter", "longer"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive or None, got {value}")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"quality must be from 1 to 100, got {self.quality}")

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that an image of these gets."""
        scale = 1.0
        if self.shorter is not None:
            scale = min(scale, self.shorter / min(width, height))
        if self.longer is not None:
            scale = min(scale, self.longer / max(width, height))
        return max(1, round(width * scale)), max(1, round(height * scale))

    def estimate(self, file: BinaryIO, length: int) -> int:
        """About how many bytes an image of ``length`` bytes will have; reads its header.

        Raises:
            OSError, ValueError, SyntaxError: Pillow does not know it.
        """
        with Image.open(file) as image:
            width, height = self.size(*image.size)
            return max(1, length * width * height // (image.width * image.height))

    def apply(self, name: str, content: bytes) -> tuple[str, bytes]:
        """Name and content of an image, made smaller if it is too large.

        Raises:
            OSError, ValueError, SyntaxError: Pillow cannot decode it.
        """
        with Image.open(io.BytesIO(content)) as image:
            size = self.size(*image.size)
            if size == image.size:
                return name, content
            with_losses = image.format in _WITH_LOSSES
            pixels = image.convert("L" if image.mode in _GRAY else "RGB")
            kept = {"exif": image.getexif().tobytes()} if image.getexif() else {}
            if pixels.mode == image.mode and "icc_profile" in image.info:
                kept["icc_profile"] = image.info["icc_profile"]
            pixels = pixels.resize(size, Image.Resampling.LANCZOS)
        out = io.BytesIO()
        if with_losses:
            pixels.save(out, "JPEG", quality=self.quality, **kept)
        else:
            pixels.save(out, "PNG", **kept)
        stem, suffix = os.path.splitext(name)
        fits = (".jpg", ".jpeg", ".jpe", ".jfif") if with_losses else (".png",)
        if suffix.lower() not in fits:
            name = (stem if suffix else name) + fits[0]
        return name, out.getvalue()
