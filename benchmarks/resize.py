"""How long does it take from decoded pixels to a normalised float32 tensor, on one core?

    python benchmarks/resize.py FOLDER --limit 100 --rounds 3

"train" starts from the crop that RandomResizedCrop draws, cut beforehand for all. Per resizer: the
sum over the photos of the smallest CPU time of the rounds, the resizers in turn. Whether the
tensors are those of Pillow and torchvision is checked and shown.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

from decode import draw_regions
from measure import arguments, header, note, write
from rivals import MEAN, STD
from stoker import _native, engine
from stoker.lower import lower_transform
from stoker.plan import Refusal

Pixels = NDArray[np.uint8]
Resizer = Callable[[int], Any]

GEOMETRY = {
    "train: crop to 224x224": (transforms.Resize((224, 224)),),
    "val: Resize(256), CenterCrop(224)": (transforms.Resize(256), transforms.CenterCrop(224)),
    "seed: whole photo to 224x224": (transforms.Resize((224, 224)),),
}


class Stoker:
    """Runs a plan on decoded photos, one after the other, as the engine's fallback does."""

    def __init__(self, level: str, transform: Callable[[Any], Any], photos: list[Pixels]) -> None:
        plan = lower_transform(transform)
        if isinstance(plan, Refusal):
            raise SystemExit(f"not lowered: {plan}")
        self._photos = photos
        self._pool = _native.Pool(level)
        self._session = self._pool.open_session(1)
        self._plan, count = engine.native_plan(plan), len(photos)
        # The batch wants files; none of these is ever read.
        self._files = _native.Files(
            b"", np.zeros(1, np.uint8), np.zeros(count + 1, np.uint64), None, None, False
        )
        self._rows = np.arange(count), np.zeros(count, np.uint32)
        self.results = np.zeros((count, 3, 224, 224), np.float32)
        self._batch = self._new_batch()

    def _new_batch(self) -> _native.Batch:
        memory = self.results.reshape(-1).view(np.uint8)
        return _native.Batch.new(self._plan, self._files, *self._rows, memory, 3, 224, 224)

    def __call__(self, i: int) -> NDArray[np.float32]:
        """The tensor of photo `i`; photos are asked for in turn, from 0 on."""
        if i == 0:
            self._batch = self._new_batch()
        self._pool.finish_pixels(self._session, self._batch, i, self._photos[i])
        result: NDArray[np.float32] = self.results[i]
        return result


def rivals(workload: str, photos: list[Pixels]) -> dict[str, Resizer]:
    """Resizers by name; each takes the number of a photo. The last one's tensors are the truth."""
    tail = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    pil = transforms.Compose([*GEOMETRY[workload], *tail])
    images = [Image.fromarray(photo) for photo in photos]
    found: dict[str, Resizer] = {
        f"stoker {level}": Stoker(level, pil, photos) for level in reversed(_native.levels())
    }

    size = 256 if workload.startswith("val") else (224, 224)
    on_tensors = v2.Compose(
        [
            v2.Resize(size),
            *([v2.CenterCrop(224)] if workload.startswith("val") else []),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    tensors = [torch.from_numpy(photo).permute(2, 0, 1).contiguous() for photo in photos]
    found["torchvision v2, tensors"] = lambda i: on_tensors(tensors[i])
    try:
        import cv2
    except ImportError:
        note("OpenCV is left out: opencv-python-headless is not installed")
    else:
        cv2.setNumThreads(0)
        mean, std = (np.array(values, np.float32) for values in (MEAN, STD))

        def opencv(i: int) -> Any:
            image = photos[i]
            if workload.startswith("val"):
                height, width = image.shape[:2]
                scale = 256 / min(height, width)
                wanted = (round(width * scale), round(height * scale))
                image = cv2.resize(image, wanted, interpolation=cv2.INTER_AREA)
                top, left = (image.shape[0] - 224) // 2, (image.shape[1] - 224) // 2
                image = image[top : top + 224, left : left + 224]
            else:
                image = cv2.resize(image, (224, 224), interpolation=cv2.INTER_AREA)
            values = (image.astype(np.float32) * np.float32(1 / 255) - mean) / std
            return np.ascontiguousarray(values.transpose(2, 0, 1))

        found["OpenCV, area"] = opencv
    found["Pillow and torchvision"] = lambda i: pil(images[i])
    return found


def measure(workload: str, photos: list[Pixels], rounds: int) -> list[dict[str, Any]]:
    """One row per resizer."""
    found = rivals(workload, photos)
    truth = [found["Pillow and torchvision"](i) for i in range(len(photos))]
    same = {
        name: sum(np.array_equal(resizer(i), truth[i]) for i in range(len(photos)))
        for name, resizer in found.items()
    }
    best = {name: np.full(len(photos), np.inf) for name in found}
    for _ in range(rounds):
        for i in range(len(photos)):
            for name, resizer in found.items():
                start = time.thread_time()
                resizer(i)
                best[name][i] = min(best[name][i], time.thread_time() - start)
    first = next(iter(best.values())).sum()
    return [
        {
            "workload": workload,
            "resizer": name,
            "microseconds": round(float(times.mean()) * 1e6, 1),
            "first_over_this": round(float(times.sum() / first), 2),
            "identical": f"{same[name]}/{len(photos)}",
        }
        for name, times in best.items()
    ]


def main() -> None:
    """Command line."""
    parser = arguments(__doc__)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)

    files = [path for path in sorted(Path(options.folder).rglob("*")) if path.is_file()]
    photos = [
        np.array(Image.open(io.BytesIO(path.read_bytes())).convert("RGB"))
        for path in files[:: max(1, len(files) // options.limit)][: options.limit]
    ]
    regions = draw_regions([(photo.shape[1], photo.shape[0]) for photo in photos])
    crops = [
        np.ascontiguousarray(photo[y : y + height, x : x + width])
        for photo, (x, y, width, height) in zip(photos, regions, strict=True)
    ]
    rows = [{**header("resize", options), "photos": len(photos)}]
    for workload in GEOMETRY:
        note(workload)
        rows += measure(workload, crops if workload.startswith("train") else photos, options.rounds)
    write(options.output, rows)


if __name__ == "__main__":
    main()
