"""The native JPEG decoder: Pillow's pixels at every SIMD level, or a refusal."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from pictures import picture
from stoker import _native

Pixels = NDArray[np.uint8]
CompareImages = Callable[[object, object], None]

LEVELS = _native.levels()
EOI = b"\xff\xd9"


def by_pillow(encoded: bytes, upright: bool = False) -> Pixels:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image: Image.Image = Image.open(io.BytesIO(encoded))
        if upright:
            image = ImageOps.exif_transpose(image)
        return np.asarray(image.convert("RGB"))


def by_stoker(
    encoded: bytes, region: tuple[int, int, int, int] | None = None, upright: bool = False
) -> tuple[str, Pixels | None]:
    """Status and pixels, after a check that all levels agree on both."""
    results = [
        _native.decode_jpeg(encoded, region, level=level, upright=upright) for level in LEVELS
    ]
    status, pixels = results[0]
    for level, (other_status, other) in zip(LEVELS[1:], results[1:], strict=True):
        assert other_status == status, f"{level} says {other_status}, {LEVELS[0]} says {status}"
        assert (pixels is None) == (other is None) == (status != "ok")
        if pixels is not None and other is not None:
            assert np.array_equal(pixels, other), level
    return status, pixels


def encode(image: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", **options)
    return stream.getvalue()


def segments(encoded: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields marker, start and end of each segment up to the start of scan."""
    at = 2
    while True:
        marker = encoded[at + 1]
        end = at + 2 + int.from_bytes(encoded[at + 2 : at + 4], "big")
        yield marker, at, end
        if marker == 0xDA:
            return
        at = end


def find(encoded: bytes, wanted: int) -> tuple[int, int]:
    """Start and end of the first segment with this marker."""
    return next((start, end) for marker, start, end in segments(encoded) if marker == wanted)


def replaced(encoded: bytes, at: int, new: bytes) -> bytes:
    return encoded[:at] + new + encoded[at + len(new) :]


def with_segment(encoded: bytes, marker: int, payload: bytes) -> bytes:
    length = (len(payload) + 2).to_bytes(2, "big")
    return encoded[:2] + bytes([0xFF, marker]) + length + payload + encoded[2:]


def as_440(encoded_422: bytes) -> bytes:
    """Turns a 4:2:2 file into a 4:4:0 one of as many blocks: a scrambled picture, but sound."""
    start, _ = find(encoded_422, 0xC0)
    height, width = (int.from_bytes(encoded_422[start + i : start + i + 2], "big") for i in (5, 7))
    size = ((height + 7) // 8 * 16).to_bytes(2, "big") + ((width + 15) // 16 * 8).to_bytes(2, "big")
    return replaced(replaced(encoded_422, start + 5, size), start + 11, b"\x12")


def check_everywhere(encoded: bytes, rng: random.Random, same_image: CompareImages) -> None:
    """The whole image and some of its regions equal Pillow's."""
    expected = by_pillow(encoded)
    height, width = expected.shape[:2]
    status, pixels = by_stoker(encoded)
    assert status == "ok"
    same_image(pixels, expected)
    for limit in (width + height, width + height, 9):
        w, h = rng.randint(1, min(width, limit)), rng.randint(1, min(height, limit))
        x, y = rng.randint(0, width - w), rng.randint(0, height - h)
        status, pixels = by_stoker(encoded, (x, y, w, h))
        assert status == "ok"
        same_image(pixels, expected[y : y + h, x : x + w])


def test_photos(data: Path, same_image: CompareImages) -> None:
    rng = random.Random(1)
    for path in sorted((data / "photos").iterdir())[::5]:
        check_everywhere(path.read_bytes(), rng, same_image)


@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:2", "4:2:0", "4:4:0", "gray"])
def test_made_images_of_all_sizes(sampling: str, same_image: CompareImages) -> None:
    rng = random.Random(sampling)
    for size in range(1, 101):
        other = rng.randint(1, 100)
        width, height = (size, other) if size % 2 else (other, size)
        image = picture(width, height, seed=size)
        if size % 5 == 0:  # the largest coefficients that there are
            image = image.point(lambda value: 255 if value > 127 else 0)
        options: dict[str, Any] = {
            "quality": rng.choice([5, 30, 75, 90, 100]),
            "optimize": rng.random() < 0.5,
        }
        if sampling != "4:4:0" and rng.random() < 0.4:
            options["restart_marker_blocks"] = rng.randint(1, 20)
        if sampling == "gray":
            image = image.convert("L")
        else:
            options["subsampling"] = "4:2:2" if sampling == "4:4:0" else sampling
        encoded = encode(image, **options)
        if sampling == "4:4:0":
            encoded = as_440(encoded)
        check_everywhere(encoded, rng, same_image)


@pytest.mark.parametrize("folder", ["odd", "broken"])
@pytest.mark.parametrize("upright", [False, True])
def test_strange_files_give_pillows_pixels_or_a_refusal(
    folder: str, upright: bool, data: Path, same_image: CompareImages
) -> None:
    decoded = 0
    for path in sorted((data / folder).rglob("*")):
        encoded = path.read_bytes() if path.is_file() else b""
        if encoded[:2] != b"\xff\xd8":
            assert by_stoker(encoded) == ("not_jpeg", None)
            continue
        if claimed_pixels(encoded) > 12_000_000:
            continue  # some claim gigapixels, which the loader's own limits refuse
        status, pixels = by_stoker(encoded, upright=upright)
        if status == "ok":
            same_image(pixels, by_pillow(encoded, upright))
            decoded += 1
    assert decoded >= 5


def claimed_pixels(encoded: bytes | bytearray) -> int:
    """Width times height of the first frame header, 0 if there is none."""
    for i in range(2, min(len(encoded) - 9, 100_000)):
        if encoded[i] == 0xFF and encoded[i + 1] in (0xC0, 0xC1):
            height, width = (int.from_bytes(encoded[i + k : i + k + 2], "big") for k in (5, 7))
            return height * width
    return 0


def test_mutated_files_give_pillows_pixels_or_a_refusal(same_image: CompareImages) -> None:
    rng = random.Random(5)
    seeds = [
        encode(picture(w, h, seed=w), quality=q, subsampling=s, restart_marker_blocks=r)
        for w, h, q, s, r in [
            (33, 17, 75, 2, 0),
            (40, 24, 95, 0, 3),
            (50, 9, 50, 1, 2),
            (64, 48, 30, 2, 0),
        ]
    ]
    accepted = 0
    for _ in range(6000):
        encoded = bytearray(rng.choice(seeds))
        scan = encoded.index(b"\xff\xda")
        for _ in range(rng.choice([1, 1, 2, 4])):
            at = (
                rng.randrange(2, scan + 14)
                if rng.random() < 0.4
                else rng.randrange(scan, len(encoded))
            )
            change = rng.randrange(4)
            if change == 0:
                encoded[at] ^= 1 << rng.randrange(8)
            elif change == 1:
                encoded[at] = rng.choice([0x00, 0xFF, 0xD0, 0xD9, 0x01, rng.randrange(256)])
            elif change == 2:
                encoded[at:at] = rng.choice([b"\xff", b"\xff\x00", b"\xff\xd0", b"\x5a"])
            else:
                del encoded[at : at + rng.randint(1, 3)]
        if claimed_pixels(encoded) > 100_000:
            continue
        status, pixels = by_stoker(bytes(encoded))
        if status == "ok":
            accepted += 1
            same_image(pixels, by_pillow(bytes(encoded)))
    assert accepted > 500


def sound_file() -> bytes:
    return encode(picture(64, 48), quality=90, subsampling=2)


def refused_files() -> dict[str, tuple[bytes, str]]:
    """Files that the decoder must leave to Pillow, with the status that it gives."""
    sound = sound_file()
    image = picture(64, 48)
    frame, _ = find(sound, 0xC0)
    tables, _ = find(sound, 0xDB)
    codes, codes_end = find(sound, 0xC4)
    _, scan = find(sound, 0xDA)
    restarts = encode(image, quality=90, restart_marker_blocks=2)
    first_restart = restarts.index(b"\xff\xd0")
    stuffed = sound.index(b"\xff\x00", scan)
    # A length-8 code count that makes the last code all ones.
    counts = bytes([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    all_ones = b"\xff\xc4\x00\x15\x00" + b"\x02" + counts[1:] + b"\x00\x01"
    coarse = replaced(sound, tables + 5, b"\xff" * 64)
    return {
        "empty": (b"", "not_jpeg"),
        "png": (b"\x89PNG\r\n\x1a\n", "not_jpeg"),
        "signature alone": (b"\xff\xd8", "truncated"),
        "progressive": (encode(image, progressive=True), "unsupported"),
        "cmyk": (encode(image.convert("CMYK")), "unsupported"),
        "rgb": (encode(image, keep_rgb=True), "unsupported"),
        "12 bits": (replaced(sound, frame + 4, b"\x0c"), "unsupported"),
        "arithmetic": (replaced(sound, frame + 1, b"\xc9"), "unsupported"),
        "4:1:1": (replaced(sound, frame + 11, b"\x41"), "unsupported"),
        "no pixels": (replaced(sound, frame + 5, b"\0\0"), "corrupt"),
        "equal component ids": (
            replaced(sound, frame + 13, sound[frame + 10 : frame + 11]),
            "corrupt",
        ),
        "two frames": (
            sound[:frame] + sound[frame : find(sound, 0xC0)[1]] + sound[frame:],
            "corrupt",
        ),
        "no quantisation table": (sound[:tables] + sound[find(sound, 0xC0)[0] :], "corrupt"),
        "short quantisation table": (replaced(sound, tables + 2, b"\x00\x42"), "corrupt"),
        "no Huffman table": (sound[:codes] + sound[codes_end:], "corrupt"),
        "code of ones": (sound[:codes] + all_ones + sound[codes_end:], "corrupt"),
        "garbage between segments": (sound[:codes] + b"\x00" + sound[codes:], "corrupt"),
        "cut in the header": (sound[: frame + 6], "truncated"),
        "cut in the scan": (sound[: len(sound) // 2], "truncated"),
        "no end of image": (sound[:-2], "truncated"),
        "half an end of image": (sound[:-1], "truncated"),
        "restart out of order": (replaced(restarts, first_restart, b"\xff\xd3"), "corrupt"),
        "restart without interval": (sound[:-2] + b"\xff\xd0" + sound[-2:], "corrupt"),
        "second scan": (sound[:-2] + sound[find(sound, 0xDA)[0] :], "corrupt"),
        "fill byte before a stuffed zero": (sound[:stuffed] + b"\xff" + sound[stuffed:], "corrupt"),
        "short scan": (sound[: scan + 40].rstrip(b"\xff") + EOI, "corrupt"),
        "coefficients beyond the limit": (coarse, "corrupt"),
        "broken JFIF": (with_segment(sound, 0xE0, b"JFIF"), "unsupported"),
        "broken ICC profile": (with_segment(sound, 0xE2, b"ICC_PROFILE\0"), "unsupported"),
    }


@pytest.mark.parametrize("name", refused_files())
def test_refused(name: str) -> None:
    encoded, expected = refused_files()[name]
    assert by_stoker(encoded)[0] == expected


def accepted_files() -> dict[str, bytes]:
    """Unusual files that need not go to Pillow."""
    sound = sound_file()
    restarts = encode(picture(64, 48), quality=90, restart_marker_blocks=2)
    first_restart = restarts.index(b"\xff\xd0")
    codes, _ = find(sound, 0xC4)
    stream = io.BytesIO()
    pair = [picture(64, 48), picture(48, 64)]
    pair[0].save(stream, "MPO", save_all=True, append_images=pair[1:])
    return {
        "garbage after the end": sound + b"garbage \xff\xd8\xff\xff",
        "fill bytes before a segment": sound[:codes] + b"\xff\xff" + sound[codes:],
        "fill bytes before a restart marker": restarts[:first_restart]
        + b"\xff"
        + restarts[first_restart:],
        "fill bytes before the end": sound[:-2] + b"\xff\xff" + EOI,
        "empty segment": with_segment(sound, 0xE5, b""),
        "thumbnail inside a segment": with_segment(sound, 0xE5, sound),
        "several pictures": stream.getvalue(),
        "Photoshop resources": with_segment(
            sound, 0xED, b"Photoshop 3.0\x008BIM\x03\xed\0\0\0\0\0\x10" + bytes(16)
        ),
        "16-bit quantisation table": sound_with_wide_tables(),
    }


def sound_with_wide_tables() -> bytes:
    sound = sound_file()
    for start, end in [(start, end) for marker, start, end in segments(sound) if marker == 0xDB][
        ::-1
    ]:
        body = sound[start + 4 : end]
        assert len(body) == 65
        wide = bytes([body[0] | 0x10]) + b"".join(bytes([0, value]) for value in body[1:])
        sound = (
            sound[:start] + b"\xff\xdb" + (len(wide) + 2).to_bytes(2, "big") + wide + sound[end:]
        )
    return replaced(sound, find(sound, 0xC0)[0] + 1, b"\xc1")


@pytest.mark.parametrize("name", accepted_files())
def test_accepted(name: str, same_image: CompareImages) -> None:
    check_everywhere(accepted_files()[name], random.Random(name), same_image)


def test_rows_below_a_region_are_not_read(same_image: CompareImages) -> None:
    """Damage below a region doesn't matter to it, but the file must be complete."""
    sound = encode(picture(200, 300), quality=90)
    _, scan = find(sound, 0xDA)
    damaged = replaced(sound, len(sound) - 400, bytes(300))
    assert scan < len(sound) - 2000
    assert by_stoker(damaged)[0] == "corrupt"
    status, pixels = by_stoker(damaged, (10, 20, 150, 60))
    assert status == "ok"
    same_image(pixels, by_pillow(damaged)[20:80, 10:160])
    assert by_stoker(sound[:-2], (10, 20, 150, 60))[0] == "truncated"


def exif(orientation: int, order: str = "II") -> bytes:
    """An Exif payload with an orientation only."""
    little = order == "II"
    endian: Any = "little" if little else "big"

    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, endian)

    entry = number(0x0112, 2) + number(3, 2) + number(1, 4) + number(orientation, 2) + b"\0\0"
    head = order.encode() + number(42, 2) + number(8, 4)
    return b"Exif\0\0" + head + number(1, 2) + entry + number(0, 4)


def xmp(text: str) -> bytes:
    return b"http://ns.adobe.com/xap/1.0/\0" + text.encode()


@pytest.mark.parametrize("order", ["II", "MM"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientation(orientation: int, order: str, same_image: CompareImages) -> None:
    encoded = with_segment(sound_file(), 0xE1, exif(orientation, order))
    same_image(by_stoker(encoded)[1], by_pillow(encoded))
    status, pixels = by_stoker(encoded, upright=True)
    assert status == ("oriented" if 2 <= orientation <= 8 else "ok")
    if pixels is not None:
        same_image(pixels, by_pillow(encoded, upright=True))


@pytest.mark.parametrize(
    ("segment", "expected"),
    [
        ([xmp('<x tiff:Orientation="6"/>')], "oriented"),
        ([xmp("<tiff:Orientation>3</tiff:Orientation>")], "oriented"),
        ([xmp('<x tiff:Orientation="1"/>')], "ok"),
        ([xmp("<x tiff:Orientation='6'/>")], "ok"),  # not what Pillow looks for
        ([xmp('<x tiff:Orientation="6"/>'), exif(1)], "ok"),  # EXIF goes first
        ([exif(1)[:-8]], "oriented"),  # cut off: Pillow decides
        ([b"Exif\0\0garbage"], "oriented"),
    ],
)
def test_orientation_elsewhere(
    segment: list[bytes], expected: str, same_image: CompareImages
) -> None:
    encoded = encode(
        picture(40, 30), dpi=(72, 72)
    )  # with a density, Pillow itself leaves EXIF alone
    for payload in segment:
        encoded = with_segment(encoded, 0xE1, payload)
    status, pixels = by_stoker(encoded, upright=True)
    assert status == expected
    if pixels is not None:
        same_image(pixels, by_pillow(encoded, upright=True))
    assert by_stoker(encoded)[0] == "ok"
