"""Is every tensor, bit for bit, what ``dataset[index]`` gives under keyed seeds?

    python benchmarks/exactness.py FOLDER [FOLDER ...] --limit 100 --output exactness.jsonl

For every recipe and epoch, a plain loop over ``dataset[index]`` on the calling thread is the truth;
it seeds the generators by its own implementation of the key. Then each SIMD level and thread count
serves the same epochs, shuffled. A tensor counts as identical if its bits and its label are, and if
no batch was handed back to the dataset's own code. seed, train and val run five whole epochs in
every configuration. Of the others, a configuration runs one of the five epochs, unless
``--complete`` is given. At last, ``randomness="torch"`` is compared with torch's own loader.

Exits with 1 if a tensor differs or something was not lowered.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torchvision.transforms as v1
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import stoker
from measure import header, note, write
from stoker import _native, engine
from stoker.iterate import LoweredIterator

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MODE = v1.InterpolationMode
FILTERS = ["NEAREST", "NEAREST_EXACT", "BOX", "BILINEAR", "HAMMING", "BICUBIC", "LANCZOS"]
PADDINGS = ["constant", "edge", "reflect", "symmetric"]
LEVELS: list[str] = _native.levels()
MAIN = ("seed", "train", "val")
_SEED = 2_718_281_828
_SAMPLES_AT_ONCE = 300  # their references for five epochs are held in memory
_MASK = 0xFFFFFFFF


# What is compared


def recipes() -> dict[str, Any]:
    """Every transform and option of docs/transforms.md, by version and name."""
    found = {}
    for version, T in (("v1", v1), ("v2", v2)):
        for name, parts in _recipes(T).items():
            found[f"{version} {name}"] = T.Compose(parts)
    found["v2 resize, no size"] = v2.Compose(
        [v2.Resize(None, max_size=100), v2.CenterCrop(100), *_tensor(v2)]
    )
    found["v2 ToPureTensor"] = v2.Compose([v2.CenterCrop(64), v2.ToImage(), v2.ToPureTensor()])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.uint8):
        for scale in (False, True):
            parts = [v2.CenterCrop(64), v2.ToImage(), v2.ToDtype(dtype, scale=scale)]
            found[f"v2 to {dtype}, scale={scale}".replace("torch.", "")] = v2.Compose(parts)
    found["nested"] = v1.Compose(
        [
            torch.nn.Sequential(v2.Identity(), torch.nn.Identity(), v2.Resize((60, 70))),
            v2.Compose([v2.RandomVerticalFlip(), v1.RandomHorizontalFlip()]),
            *_tensor(v1),
        ]
    )
    try:
        from timm.data.transforms_factory import create_transform
    except ImportError:
        note("timm is not installed: its evaluation transform is left out")
        return found
    found["timm eval"] = create_transform(224, is_training=False)
    found["timm eval, bilinear"] = create_transform(128, interpolation="bilinear", crop_pct=0.9)
    found["timm eval, squash"] = create_transform(96, interpolation="bicubic", crop_mode="squash")
    return found


def _tensor(T: Any, mean: Any = MEAN, std: Any = STD) -> list[Any]:
    if T is v1:
        return [v1.ToTensor(), v1.Normalize(mean, std)]
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]


def _recipes(T: Any) -> dict[str, list[Any]]:
    end = _tensor(T)
    flip, to_bytes = T.RandomHorizontalFlip(), T.PILToTensor()
    found = {
        "seed": [T.Resize((224, 224)), flip, *end],
        "train": [T.RandomResizedCrop(224), flip, *end],
        "val": [T.Resize(256), T.CenterCrop(224), *end],
        "whole image": [to_bytes],
        "whole image, flipped": [flip, T.RandomVerticalFlip(0.4), to_bytes],
        "max_size": [T.Resize(64, max_size=80), T.CenterCrop(80), *end],
        "enlarged": [T.CenterCrop(40), T.Resize((97, 131), MODE.BICUBIC), *end],
        "twice": [T.Resize(120), T.RandomCrop(100), T.Resize((50, 60), MODE.LANCZOS), *end],
        "CenterCrop": [T.CenterCrop((101, 67)), *end],
        "CenterCrop with a border": [T.Resize(64), T.CenterCrop((96, 140)), to_bytes],
        "RandomCrop": [T.RandomCrop((61, 83), pad_if_needed=True, padding_mode="edge"), *end],
        "RandomCrop, pad_if_needed": [
            T.Resize(64),
            T.RandomCrop((80, 120), 3, True, fill=(9, 99, 200)),
            to_bytes,
        ],
        "RandomResizedCrop, range": [T.RandomResizedCrop((48, 80), (0.3, 0.9), (0.5, 3)), *end],
        "RandomResizedCrop, narrow": [T.RandomResizedCrop(40, (1.5, 2.0), (4, 5)), *end],
        "RandomHorizontalFlip": [T.CenterCrop(80), T.RandomHorizontalFlip(0.3), *end],
        "RandomVerticalFlip": [T.CenterCrop(80), T.RandomVerticalFlip(0.7), *end],
        "flips of the tensor": [T.CenterCrop(80), *end, flip, T.RandomVerticalFlip()],
        "Grayscale 3": [T.RandomResizedCrop(64), T.Grayscale(3), *end],
        "Grayscale 1": [T.RandomResizedCrop(64), T.Grayscale(1), *_tensor(T, [0.5], [0.25])],
        "Grayscale first": [T.Grayscale(3), T.Resize((40, 50)), flip, *end],
        "RandomGrayscale": [T.RandomResizedCrop(64, (0.3, 1)), T.RandomGrayscale(0.5), *end],
        "RandomGrayscale first": [T.RandomGrayscale(0.5), T.Resize((40, 50)), *end],
        "Pad, fill": [T.Resize((60, 70)), T.Pad([3, 5], fill=(200, 100, 7)), *end],
        "Pad, gray": [T.Resize((60, 70)), T.Grayscale(1), T.Pad(4, fill=77), to_bytes],
        "PILToTensor": [T.Resize((64, 64)), to_bytes],
        "Normalize with tensors": [
            T.CenterCrop(64),
            *_tensor(T, torch.tensor(MEAN), torch.tensor(STD)),
        ],
        "eight ops": [
            T.Pad((1, 2, 3, 4), padding_mode="symmetric"),
            T.RandomResizedCrop((90, 100)),
            flip,
            T.RandomCrop((80, 85), 6, padding_mode="reflect"),
            T.RandomVerticalFlip(),
            T.RandomGrayscale(0.3),
            T.Resize((60, 64), MODE.HAMMING),
            T.CenterCrop((50, 70)),
            *end,
        ],
    }
    for name in FILTERS:
        found[f"Resize {name}"] = [T.Resize((72, 90), MODE[name]), *end]
        found[f"RandomResizedCrop {name}"] = [
            T.RandomResizedCrop(72, interpolation=MODE[name]),
            flip,
            *end,
        ]
    for mode in PADDINGS:
        found[f"Pad {mode}"] = [
            T.Resize((60, 70)),
            T.Pad((3, 11, 7, 0), padding_mode=mode),
            to_bytes,
        ]
        found[f"RandomCrop {mode}"] = [
            T.Resize((40, 40)),
            T.RandomCrop(40, (7, 5), padding_mode=mode),
            *end,
        ]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.uint8):
        found[f"ConvertImageDtype {dtype}".replace("torch.", "")] = [
            T.CenterCrop(64),
            to_bytes,
            T.ConvertImageDtype(dtype),
        ]
    found["float16, normalised"] = [
        T.RandomCrop(64, pad_if_needed=True),
        to_bytes,
        T.ConvertImageDtype(torch.float16),
        T.Normalize(MEAN, STD),
    ]
    return found


# The truth


def key(seed: int, epoch: int, index: int, draw: int = 0) -> int:
    """The first word of Philox4x32-10 with key = seed, counter = (index low, high, epoch, draw)."""
    a, b, c, d = index & _MASK, index >> 32, epoch, draw
    low, high = seed & _MASK, seed >> 32
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            (right >> 32) ^ b ^ low,
            right & _MASK,
            (left >> 32) ^ d ^ high,
            left & _MASK,
        )
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    return a


def _states() -> tuple[Any, ...]:
    drawn = np.random.get_state(legacy=False)["state"]
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        drawn["key"].tobytes(),
        drawn["pos"],
    )


class Reference:
    """The plain loop over a dataset, one epoch after the other, each computed once.

    Where no sample moved a generator, its bits cannot depend on the epoch, and one epoch is all.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._epochs: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._drew = False

    def epoch(self, epoch: int) -> list[tuple[torch.Tensor, int]]:
        """Tensor and label of every sample, in the order of the dataset."""
        if self._epochs and not self._drew:
            return next(iter(self._epochs.values()))
        if epoch not in self._epochs:
            self._epochs[epoch] = [self._sample(epoch, i) for i in range(len(self.dataset))]
        return self._epochs[epoch]

    def _sample(self, epoch: int, index: int) -> tuple[torch.Tensor, int]:
        seed = key(self.seed, epoch, index)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = _states()
        image, label = self.dataset[index]
        self._drew = self._drew or before != _states()
        return image, label


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True where kind, shape and every bit are the same: 0 and -0 differ, NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # Not torch.equal: it would wake torch's threads for every sample.
    first, second = (tensor.contiguous().view(torch.uint8).numpy() for tensor in (one, other))
    return first.tobytes() == second.tobytes()


# Stoker


@contextmanager
def at_level(level: str) -> Iterator[None]:
    """Loaders that begin here run on threads of their own at this SIMD level."""
    with patch.object(engine, "_pool", _native.Pool(level)):
        yield


@dataclass
class Count:
    """What was compared."""

    compared: int = 0
    identical: int = 0
    by_pillow: int = 0
    handed_back: int = 0
    not_lowered: str = ""

    @property
    def good(self) -> bool:
        """True where everything ran natively and all bits were the same."""
        whole = 0 < self.compared == self.identical
        return whole and not self.handed_back and not self.not_lowered

    def add(self, other: Count) -> None:
        """Adds what another comparison counted."""
        for name in ("compared", "identical", "by_pillow", "handed_back"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.not_lowered = self.not_lowered or other.not_lowered


def compare(reference: Reference, epochs: list[int], **arguments: Any) -> Count:
    """Serves ``epochs`` with a loader of these arguments, shuffled; counts identical samples."""
    count = Count()
    dataset = reference.dataset
    whole_batch = LoweredIterator._as_the_dataset_does

    def handed_back(iterator: LoweredIterator, draw: Any) -> Any:
        count.handed_back += 1
        return whole_batch(iterator, draw)

    loader = stoker.DataLoader(dataset, shuffle=True, seed=reference.seed, **arguments)
    with patch.object(LoweredIterator, "_as_the_dataset_does", handed_back):
        for epoch in epochs:
            loader.set_epoch(epoch)
            order = list(loader.sampler)
            truth, place = reference.epoch(epoch), 0
            for images, labels in loader:
                for image, label in zip(images, labels.tolist(), strict=True):
                    expected, expected_label = truth[order[place]]
                    count.identical += same_bits(image, expected) and label == expected_label
                    place += 1
            count.compared += len(truth)
            if place != len(truth) or sorted(order) != list(range(len(truth))):
                raise RuntimeError(f"{place} samples came instead of {len(truth)}")
    explanation = loader.explain()
    if explanation.tier != "lowered":
        count.not_lowered = f"{explanation.op}: {explanation.why}"
    count.by_pillow = int(explanation.facts.get("by Pillow", "0").split()[0])
    loader.close()
    return count


def compare_with_torch(dataset: Any, workers: int, epochs: int) -> Count:
    """``randomness="torch"`` against torch's loader, from the same seed."""
    loaders: list[Any] = [
        torch.utils.data.DataLoader(dataset, 16, shuffle=True, num_workers=workers),
        stoker.DataLoader(dataset, 16, shuffle=True, num_workers=workers, randomness="torch"),
    ]
    count = Count()
    for epoch in range(epochs):
        iterators = []
        for loader in loaders:
            torch.manual_seed(epoch)
            random.seed(epoch)
            np.random.seed(epoch)
            iterators.append(list(loader))
        for (theirs, their_labels), (ours, labels) in zip(*iterators, strict=True):
            for image, expected in zip(ours, theirs, strict=True):
                count.compared += 1
                count.identical += same_bits(image, expected) and torch.equal(labels, their_labels)
    return count


def configurations(levels: list[str], threads: list[int]) -> list[tuple[str, dict[str, Any]]]:
    """SIMD levels with arguments of loaders: each thread count, batch sizes that differ."""
    found = []
    for level in levels:
        for place, count in enumerate(threads):
            arguments: dict[str, Any] = {
                "num_workers": count,
                "batch_size": (16, 7, 32, 11)[place % 4],
            }
            if count:
                arguments |= {"prefetch_factor": 2 + place, "persistent_workers": place % 2 == 1}
            found.append((level, arguments))
    return found


def examine(
    dataset: Any,
    name: str,
    configs: list[tuple[str, dict[str, Any]]],
    epochs: int,
    complete: bool,
) -> dict[str, Count]:
    """One recipe in every configuration; counts by SIMD level."""
    counts = {level: Count() for level, _ in configs}
    for start in range(0, len(dataset), _SAMPLES_AT_ONCE):
        part = Subset(dataset, range(start, min(start + _SAMPLES_AT_ONCE, len(dataset))))
        reference = Reference(part, _SEED + start)
        for place, (level, arguments) in enumerate(configs):
            chosen = list(range(epochs))
            if not complete and name.split()[-1] not in MAIN:
                chosen = [place % epochs]
            if "whole image" in name:
                arguments = arguments | {"batch_size": 1}
            with at_level(level):
                counts[level].add(compare(reference, chosen, **arguments))
    return counts


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", help="photos, one subfolder per class")
    parser.add_argument("--limit", type=int, help="that many samples of each folder, spread evenly")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", default="0,1,2,8")
    parser.add_argument("--levels", default=",".join(LEVELS))
    parser.add_argument("--recipes", default="", help="only those whose names contain this")
    parser.add_argument("--complete", action="store_true", help="every epoch in every run")
    parser.add_argument("--output", type=Path, help="JSON lines go here, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    configs = configurations(options.levels.split(","), list(map(int, options.threads.split(","))))
    rows: list[dict[str, Any]] = []
    total, good = Count(), True
    for folder in options.folders:
        rows.append(header("exactness", argparse.Namespace(folder=folder)))
        for name, transform in recipes().items():
            if options.recipes not in name:
                continue
            started = time.perf_counter()
            dataset = ImageFolder(folder, transform)
            if options.limit:
                step = max(1, len(dataset) // options.limit)
                dataset.samples = dataset.samples[::step][: options.limit]
            counts = examine(dataset, name, configs, options.epochs, options.complete)
            if name.split()[-1] in MAIN:
                few = Subset(dataset, range(min(len(dataset), _SAMPLES_AT_ONCE)))
                for workers in (0, 2):
                    counts[f"randomness=torch, {workers} workers"] = compare_with_torch(
                        few, workers, 2
                    )
            for level, count in counts.items():
                rows.append({"recipe": name, "level": level, **vars(count)})
                total.add(count)
                if not count.good:
                    good = False
                    note(f"DIFFERS: {name}, {level}: {count}")
            note(f"{name}: {time.perf_counter() - started:.1f} s, so far {total}")
    rows.append({"recipe": "all", "level": "all", **vars(total)})
    write(options.output, rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
