"""Strange, broken and hostile files through the loader: Pillow's pixels, or an error with a reason.

They are opened in child processes with a limit of memory, and of time for each file; this module is
the child's script, too. What the files should give is in their manifest, and is asked of Pillow.
"""

from __future__ import annotations

import csv
import faulthandler
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import PIL
import pytest
import torch
from PIL import Image, ImageOps
from torchvision import transforms as T

import stoker
from stoker.slots import Slot, Slots

MEMORY_BYTES = 6 << 30
FILE_SECONDS = 10
AT_ONCE = 400
MANIFEST_PILLOW = "13.0.0"
NO_HEIF = find_spec("pillow_heif") is None

pytestmark = pytest.mark.slow

Outcome = dict[str, Any]


# The child


def _dataset(
    root: Path, names: list[str], folder: str, transform: Any, exif: bool = False
) -> stoker.ImageDataset:
    """The files, each labelled by its place."""
    table = Path(folder) / "labels.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "label"])
        writer.writerows((name, place) for place, name in enumerate(names))
    return stoker.ImageDataset(root, table, transform, exif=exif)


def _tell(found: Outcome) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def _by_pillow(path: Path, exif: bool) -> torch.Tensor | str:
    try:
        with path.open("rb") as file:
            image: Image.Image = Image.open(file)
            turned = ImageOps.exif_transpose(image) if exif else image
            return torch.from_numpy(np.array(turned.convert("RGB"))).permute(2, 0, 1)
    except Exception as error:  # noqa: BLE001  Pillow raises a dozen kinds
        return f"{type(error).__name__}: {error}"


def _compared(path: Path, place: int, exif: bool, batches: Iterator[Any]) -> Outcome:
    expected = _by_pillow(path, exif)
    found: Outcome = {"exif": exif, "pillow": expected if isinstance(expected, str) else ""}
    try:
        faulthandler.dump_traceback_later(FILE_SECONDS, exit=True)
        (image,), (label,) = next(batches)
    except stoker.DecodeError as error:
        same_file = Path(error.location) == path
        return found | {"error": error.reason, "good": isinstance(expected, str) and same_file}
    finally:
        faulthandler.cancel_dump_traceback_later()
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    return (
        found
        | {
            "error": "",
            "good": not isinstance(expected, str)
            and torch.equal(image, expected)
            and int(label) == place,
            "size": [pixels.shape[1], pixels.shape[0]],
            "mean": pixels.mean((0, 1)).tolist(),  # torch's sum makes a copy of 8 bytes a pixel
            "digest": hashlib.sha256(pixels).hexdigest()[:16],
        }
    )


def compare_one_by_one(root: Path, names: list[str]) -> None:
    """Prints what comes of each file, as it is and upright."""
    with tempfile.TemporaryDirectory() as folder:
        epochs = []
        for exif in (False, True):
            dataset = _dataset(root, names, folder, T.Compose([T.PILToTensor()]), exif)
            loader = stoker.DataLoader(dataset, 1, num_workers=1, seed=1)
            assert loader.explain().tier == "lowered"
            epochs.append((exif, iter(loader)))
        for place, name in enumerate(names):
            for exif, batches in epochs:
                outcome = _compared(root / name, place, exif, batches)
                _tell({"name": name, **outcome})


def _dirty(slots: Slots, samples: int, size: tuple[int, int]) -> Slot:
    slot = _take(slots, samples, size)
    slot.memory[:] = 0xA5
    return slot


_take = Slots.take


def compare_batches(root: Path, names: list[str], on_error: str) -> None:
    """Checks batches of good and bad files in memory full of something else; prints how many."""
    with tempfile.TemporaryDirectory() as folder, patch.object(Slots, "take", _dirty):
        dataset = _dataset(root, names, folder, T.Compose([T.Resize((31, 23)), T.PILToTensor()]))
        loader: Any = stoker.DataLoader(dataset, 16, num_workers=2, seed=1, on_error=on_error)  # type: ignore[arg-type] # a literal
        assert loader.explain().tier == "lowered"
        samples: list[Any] = []
        for index in range(len(names)):
            try:
                samples.append(dataset[index])
            except stoker.DecodeError:
                samples.append(None)
        bad = [index for index, sample in enumerate(samples) if sample is None]
        place = 0
        for images, labels in loader:
            for image, label in zip(images, labels.tolist(), strict=True):
                expected = samples[place] or (torch.zeros(3, 31, 23, dtype=torch.uint8), place)
                if place in bad and on_error == "skip":
                    expected = next(filter(None, samples[place:] + samples))
                assert torch.equal(image, expected[0]) and label == expected[1], names[place]
                place += 1
        assert place == len(names)
        assert sorted(sample.index for sample in loader.bad_samples) == bad
        _tell({"good": len(names) - len(bad), "bad": len(bad)})


def child() -> None:
    """Reads the root and names below it from the standard input; does what its argument says."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    root, *names = sys.stdin.read().splitlines()
    if sys.argv[1] == "one by one":
        compare_one_by_one(Path(root), names)
    else:
        faulthandler.dump_traceback_later(120, exit=True)
        compare_batches(Path(root), names, sys.argv[1])


# The tests


def _files(data: Path, kind: str) -> list[str]:
    paths = (path for path in (data / kind).rglob("*") if path.is_file())
    return sorted(str(path.relative_to(data)) for path in paths)


def _run(task: str, data: Path, names: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, task],
        input="\n".join([str(data), *names]),
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def outcomes(data: Path) -> dict[tuple[str, bool], Outcome]:
    """By name, below the data folder, and exif."""
    names = _files(data, "odd") + _files(data, "broken")
    found: dict[tuple[str, bool], Outcome] = {}
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
        done = _run("one by one", data, some)
        lines = map(json.loads, done.stdout.splitlines())
        found.update(((line["name"], line["exif"]), line) for line in lines)
        left = [name for name in some if (name, True) not in found]
        assert not left and done.returncode == 0, (
            f"{done.returncode} at or soon after {left[:1]}: {done.stderr[-3000:]}"
        )
    return found


@pytest.fixture(scope="module")
def manifest(data: Path) -> dict[str, dict[str, str]]:
    with (data / "MANIFEST.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return {row["path"]: row for row in rows if row["path"].startswith(("odd/", "broken/"))}


def test_every_file_is_told(data: Path, manifest: dict[str, dict[str, str]]) -> None:
    assert set(_files(data, "odd") + _files(data, "broken")) == set(manifest)
    assert len(manifest) > 1000


@pytest.mark.parametrize("kind", ["odd", "broken"])
def test_pillows_pixels_or_pillows_error(
    outcomes: dict[tuple[str, bool], Outcome], kind: str
) -> None:
    seen = [outcome for (name, _), outcome in outcomes.items() if name.startswith(kind)]
    wrong = [outcome for outcome in seen if not outcome["good"]]
    assert not wrong, json.dumps(wrong[:5], indent=1)
    # Without a text of Pillow's own, the kind of the error is the reason.
    for outcome in seen:
        if NO_HEIF and outcome["name"].endswith((".heic", ".heif")):
            assert "stoker[heif]" in outcome["error"]
            continue
        kind_of_error, _, text = outcome["pillow"].partition(": ")
        told = text.partition(" <_io.")[0]  # Pillow names its file object, too
        assert outcome["error"] == (told or kind_of_error), outcome
    assert {bool(outcome["error"]) for outcome in seen} == {False, True}


# Pillow reads it, but not its EXIF, which it looks for the orientation in.
UNREADABLE_EXIF = "odd/exif/avif__paris_icc_exif_xmp.png"


@pytest.mark.skipif(PIL.__version__ != MANIFEST_PILLOW, reason="the manifest is of another Pillow")
def test_manifest(
    outcomes: dict[tuple[str, bool], Outcome], manifest: dict[str, dict[str, str]]
) -> None:
    wrong: list[tuple[Any, ...]] = []
    for name, row in manifest.items():
        if NO_HEIF and name.endswith((".heic", ".heif")):
            continue
        plain, upright = outcomes[name, False], outcomes[name, True]
        refused = row["pillow_strict_error"].partition(": ")[2]
        if refused or plain["error"]:
            # The manifest has pixels of some broken PNG files that Pillow refuses at first asking.
            good = plain["error"] and plain["error"].startswith(refused)
            if not good or not (refused or name.startswith("broken/")):
                wrong.append((name, "error", plain["error"], refused))
            continue
        if name == UNREADABLE_EXIF:
            assert "fromhex" in upright["error"]
            upright = plain
        sizes = [[int(row[f"{which}{side}"]) for side in ("width", "height")] for which in _WHICH]
        if [plain["size"], upright.get("size")] != sizes:
            wrong.append((name, "sizes", [plain["size"], upright.get("size")], sizes))
        elif not np.allclose(upright["mean"], np.fromstring(row["mean_rgb"], sep=","), 0, 0.06):
            wrong.append((name, "mean", upright["mean"], row["mean_rgb"]))
        elif row["rgb_sha256_16"] not in ("", upright["digest"]):
            wrong.append((name, "digest", upright["digest"], row["rgb_sha256_16"]))
    assert not wrong, f"{len(wrong)} differ:\n" + "\n".join(map(str, wrong[:50]))


_WHICH = ("", "upright_")


@pytest.mark.parametrize("on_error", ["skip", "blank"])
def test_bad_files_among_good_ones(data: Path, on_error: str) -> None:
    good = _files(data, "odd/jpeg")[:40] + _files(data, "odd/lying")
    bad = _files(data, "broken/jpeg") + _files(data, "broken/fuzz_zune_jpeg")[:40]
    bad += _files(data, "broken/made") + _files(data, "broken/fuzz_zune_png")[:20]
    names = [name for pair in zip_longest(bad, good) for name in pair if name]
    done = _run(on_error, data, names)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert counts["good"] + counts["bad"] == len(names)
    assert min(counts.values()) > 30


if __name__ == "__main__":
    child()
