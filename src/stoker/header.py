"""What an image's header says of it, read by Pillow without decoding a pixel."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO

from PIL import ExifTags, Image, JpegImagePlugin

# Table K.1 of the JPEG standard (ITU-T T.81), which libjpeg scales by its quality.
_LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_SUBSAMPLING = {0: "4:4:4", 1: "4:2:2", 2: "4:2:0"}
_BITS_PER_SAMPLE = 258
"""TIFF's tag."""


@dataclass(frozen=True, slots=True)
class Header:
    """What an image is.

    Attributes:
        format: Pillow's name for it.
        mode: Pillow's, such as "RGB", "L", "CMYK", "P", "I;16".
        width, height: in pixels, as it is stored.
        orientation: EXIF's, 1 to 8; 1 where there is none.
        alpha: it has an alpha channel, or a transparent colour.
        deep: it has more than 8 bits a channel.
        animated: it has several frames.
        quality: of a JPEG, the quality of libjpeg that comes nearest; else None.
        subsampling: of a JPEG with colours, such as "4:2:0", or "other"; else None.
    """

    format: str
    mode: str
    width: int
    height: int
    orientation: int
    alpha: bool
    deep: bool
    animated: bool
    quality: int | None
    subsampling: str | None

    @property
    def pixels(self) -> int:
        """How many there are."""
        return self.width * self.height

    def misnamed(self, name: str) -> bool:
        """True where the name's extension is that of another format."""
        suffix = os.path.splitext(name)[1].lower()
        expected = "JPEG" if suffix == ".mpo" else _extensions().get(suffix)
        return expected is not None and expected != self.format


@lru_cache(maxsize=1)
def _extensions() -> dict[str, str]:
    return Image.registered_extensions()


def read(file: BinaryIO) -> Header:
    """The header of an image; raises what Pillow raises, of a dozen kinds."""
    with Image.open(file) as image:
        kind = image.format or "?"
        jpeg = isinstance(image, JpegImagePlugin.JpegImageFile)
        return Header(
            "JPEG" if kind == "MPO" else kind,  # a JPEG with further ones behind it
            image.mode,
            image.width,
            image.height,
            _orientation(image),
            image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info,
            _is_deep(image, file),
            not jpeg and _is_animated(image),
            _quality(image) if jpeg else None,
            _subsampling(image) if jpeg and image.mode != "L" else None,
        )


def _orientation(image: Image.Image) -> int:
    if not hasattr(image, "tag_v2") and not {"exif", "xmp", "Raw profile type exif"} & set(
        image.info
    ):
        return 1
    try:
        # Not PNG's own, which decodes the whole image in search of a late EXIF.
        found = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001  damaged EXIF turns nothing
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _is_animated(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # noqa: BLE001  a GIF is asked for its second frame, which may be damaged
        return True


def _is_deep(image: Image.Image, file: BinaryIO) -> bool:
    if image.mode.startswith(("I", "F")):
        return True
    if image.format == "PNG":  # Pillow gives 16-bit colours as 8-bit ones
        file.seek(24)  # of the IHDR, which comes first
        return file.read(1) == b"\x10"
    if image.format == "TIFF":
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, ())
        return any(isinstance(one, int) and one > 8 for one in bits)
    return False


def _subsampling(image: Image.Image) -> str:
    return _SUBSAMPLING.get(JpegImagePlugin.get_sampling(image), "other")


@lru_cache(maxsize=1)
def _sums() -> list[int]:
    """The sum of libjpeg's luminance table at each quality from 1 to 100."""
    sums = []
    for quality in range(1, 101):
        scale = 5000 // quality if quality < 50 else 200 - 2 * quality
        values = (value for row in _LUMINANCE for value in row)
        sums.append(sum(min(max((value * scale + 50) // 100, 1), 255) for value in values))
    return sums


def _quality(image: Image.Image) -> int | None:
    tables = getattr(image, "quantization", None)
    if not tables:
        return None
    total, sums = sum(tables[min(tables)]), _sums()
    return 1 + min(range(100), key=lambda place: abs(sums[place] - total))
