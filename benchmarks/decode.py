"""How long does decoding a JPEG take, alone, on one core?

    python benchmarks/decode.py FOLDER --limit 300 --rounds 3

The files are in memory. "region" is what RandomResizedCrop draws; the others decode whole images
and would have to crop. Per decoder: the sum over the photos of the smallest CPU time of the rounds,
the decoders in turn. Whether the pixels are Pillow's is checked and shown.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from measure import arguments, header, note, write
from stoker import _native

Decode = Callable[[int], Any]


def decoders(files: list[bytes], regions: list[tuple[int, int, int, int]]) -> dict[str, Decode]:
    """Decoders by name; each takes the number of a photo and returns its pixels."""
    found: dict[str, Decode] = {}
    for level in _native.levels():
        found[f"stoker {level}, full"] = partial(decode_natively, files, None, level)
        found[f"stoker {level}, region"] = partial(decode_natively, files, regions, level)
    try:
        import simplejpeg

        found["libjpeg-turbo (simplejpeg), full"] = lambda i: simplejpeg.decode_jpeg(files[i])
    except ImportError:
        note("libjpeg-turbo is left out: simplejpeg is not installed")
    found["Pillow, full"] = lambda i: np.asarray(Image.open(io.BytesIO(files[i])).convert("RGB"))
    try:
        import torchvision

        tensors = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]
        found["torchvision.io, full"] = lambda i: torchvision.io.decode_jpeg(
            tensors[i], mode=torchvision.io.ImageReadMode.RGB
        )
    except ImportError:
        note("torchvision.io is left out: torchvision is not installed")
    try:
        import cv2

        cv2.setNumThreads(0)
        arrays = [np.frombuffer(data, np.uint8) for data in files]
        found["OpenCV, full"] = lambda i: cv2.imdecode(arrays[i], cv2.IMREAD_COLOR)
    except ImportError:
        note("OpenCV is left out: opencv-python-headless is not installed")
    return found


def decode_natively(
    files: list[bytes], regions: list[tuple[int, int, int, int]] | None, level: str, i: int
) -> NDArray[np.uint8] | None:
    """Photo `i`, or its region, as stoker decodes it."""
    return _native.decode_jpeg(files[i], regions[i] if regions else None, level=level)[1]


def draw_regions(sizes: list[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """(x, y, width, height) as RandomResizedCrop draws them, one per (width, height)."""
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    regions = []
    for width, height in sizes:
        top, left, h, w = RandomResizedCrop.get_params(
            torch.empty(1, height, width), [0.08, 1.0], [3 / 4, 4 / 3]
        )
        regions.append((left, top, w, h))
    return regions


def accepted(folder: str, limit: int) -> list[bytes]:
    """The bytes of the JPEGs that stoker decodes natively; the rest are Pillow's anyway."""
    files: list[bytes] = []
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and len(files) < limit:
            data = path.read_bytes()
            if _native.decode_jpeg(data, level=_native.levels()[-1])[0] == "ok":
                files.append(data)
    return files


def main() -> None:
    """Command line."""
    parser = arguments(__doc__)
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)

    files = accepted(options.folder, options.limit)
    pixels = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in files]
    regions = draw_regions([(image.shape[1], image.shape[0]) for image in pixels])
    found = decoders(files, regions)
    identical = {}
    for name, decode in found.items():
        same = 0
        for i, image in enumerate(pixels):
            x, y, width, height = regions[i] if "region" in name else (0, 0, *image.shape[1::-1])
            result = np.asarray(decode(i))
            if "torchvision" in name:
                result = result.transpose(1, 2, 0)
            elif "OpenCV" in name:
                result = result[..., ::-1]
            same += np.array_equal(result, image[y : y + height, x : x + width])
        identical[name] = same
    del pixels

    best = {name: np.full(len(files), np.inf) for name in found}
    for round_number in range(options.rounds):
        note(f"round {round_number + 1} of {options.rounds}")
        for i in range(len(files)):
            for name, decode in found.items():
                start = time.thread_time()
                decode(i)
                best[name][i] = min(best[name][i], time.thread_time() - start)
    baseline = next((n for n in found if n.startswith("libjpeg-turbo")), "Pillow, full")
    rows = [{**header("decode", options), "baseline": baseline, "photos": len(files)}]
    for name, times in best.items():
        rows.append(
            {
                "decoder": name,
                "microseconds": round(float(times.mean()) * 1e6, 1),
                "images_per_second": round(1 / float(times.mean()), 1),
                "over_baseline": round(float(best[baseline].sum() / times.sum()), 2),
                "identical": f"{identical[name]}/{len(files)}",
            }
        )
    write(options.output, rows)


if __name__ == "__main__":
    main()
