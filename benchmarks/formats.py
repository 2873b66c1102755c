"""How fast is each format read, from memory and from the disk, and how long does opening it take?

    python benchmarks/formats.py FOLDER --images 3000 --rounds 3

The photos of FOLDER are copied until there are as many images as asked for, and packed into each
format. A loader then reads every set with the recipe for training, shuffled. Warm: all bytes are in
the page cache. Cold: the kernel was told to drop them (posix_fadvise) before each epoch; disks of
virtual machines may have caches of their own, which nobody can drop. The formats are read in turn;
trust the ratios to the folder, which are taken round by round, not the rates.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torchvision.transforms as T

import stoker
from measure import arguments, cpu_seconds, header, note, write
from stoker import cache
from stoker.pack import pack

TRAIN = T.Compose(
    [
        T.RandomResizedCrop(224),
        T.RandomHorizontalFlip(),
        T.ToTensor(),
        T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
)


def copied(folder: Path, target: Path, images: int) -> None:
    """Copies photos in their class folders until there are ``images``."""
    photos = sorted(path for path in folder.rglob("*") if path.is_file())
    for number, photo in zip(range(images), itertools.cycle(photos), strict=False):
        place = target / photo.parent.name / f"{number:06}-{photo.name}"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(photo, place)


def zipped(source: Any, place: Path) -> None:
    """Writes a zip of stored members."""
    with zipfile.ZipFile(place / "a.zip", "w", zipfile.ZIP_STORED) as out:
        for row in range(len(source)):
            out.write(source.files.path(row), source.files.name(row))


def mds(source: Any, place: Path) -> None:
    """Writes MDS shards with mosaicml-streaming."""
    from streaming import MDSWriter

    columns = {"image": "jpeg", "label": "int"}
    with MDSWriter(out=str(place / "mds"), columns=columns) as out:
        for row in range(len(source)):
            with source.files.opened(row) as file:
                content = file.read()
            out.write({"image": content, "label": int(source.files.labels[row])})


def packed(name: str) -> Callable[[Any, Path], None]:
    """Writes what ``stoker pack`` makes of a target of that name."""

    def write_set(source: Any, place: Path) -> None:
        pack(source, place / name, shard_bytes=64 << 20)

    return write_set


@dataclass
class Format:
    """A set in a format, and its figures, one for each round."""

    name: str
    opened: str
    make: Callable[[Any, Path], None] | None
    first_open_seconds: float = 0.0
    open_seconds: float = 0.0
    stored_bytes: int = 0
    warm: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def formats() -> list[Format]:
    """The formats, the folder first, as others are compared with it."""
    return [
        Format("folder of classes", "folder", None),
        Format("label file", "labelled/labels.csv", packed("labelled/labels.csv")),
        Format("tar", "tar/a-*.tar", packed("tar/a-%06d.tar")),
        Format("LMDB", "a.lmdb", packed("a.lmdb")),
        Format("TFRecord", "tfrecord/a-*.tfrecord", packed("tfrecord/a-%06d.tfrecord")),
        Format("Parquet", "parquet/a-*.parquet", packed("parquet/a-%06d.parquet")),
        Format("MDS", "mds", mds),
        Format("zip", "a.zip", zipped),
    ]


def files_of(kind: Format, place: Path) -> list[Path]:
    """The files of a set."""
    top = place / Path(kind.opened).parts[0]
    return [path for path in top.rglob("*") if path.is_file()] if top.is_dir() else [top]


def drop(files: list[Path]) -> None:
    """Has the kernel forget the files' bytes."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)  # what isn't written yet, can't be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read(dataset: Any, options: argparse.Namespace) -> tuple[float, float]:
    """Images/s, and CPU ms per image, of an epoch; the loader is made anew."""
    cpu, begun = cpu_seconds(), time.perf_counter()
    loader = stoker.DataLoader(
        dataset, options.batch_size, shuffle=True, num_workers=options.threads
    )
    images = sum(len(labels) for _, labels in loader)
    seconds = time.perf_counter() - begun
    loader.close()
    assert images == len(dataset)
    return images / seconds, (cpu_seconds() - cpu) / images * 1e3


def measure(options: argparse.Namespace, place: Path) -> list[dict[str, Any]]:
    """A row for each format that can be written here."""
    copied(Path(options.folder), place / "folder", options.images)
    source = stoker.ImageFolder(place / "folder")
    made = []
    for kind in formats():
        try:
            if kind.make is not None:
                kind.make(source, place)
            stoker.open(place / kind.opened)
        except (ImportError, ValueError, stoker.SourceError) as error:
            note(f"{kind.name} is left out: {error}")
            continue
        kind.stored_bytes = sum(path.stat().st_size for path in files_of(kind, place))
        made.append(kind)
    os.sync()
    time.sleep(3)  # an index of what was changed just now is not kept
    sets = {}
    shutil.rmtree(place / "cache", ignore_errors=True)
    for kind in made:
        for name in ("first_open_seconds", "open_seconds"):
            begun = time.perf_counter()
            sets[kind.name] = stoker.open(place / kind.opened, TRAIN)
            setattr(kind, name, time.perf_counter() - begun)
        read(sets[kind.name], options)  # imports, threads, proof
    for number in range(options.rounds):
        for kind in made:
            rate, cpu = read(sets[kind.name], options)
            kind.warm.append(rate)
            kind.cpu.append(cpu)
            drop(files_of(kind, place))
            kind.cold.append(read(sets[kind.name], options)[0])
            rates = f"{rate:,.0f} warm, {kind.cold[-1]:,.0f} images/s cold"
            note(f"round {number + 1}, {kind.name}: {rates}")
    return [row(kind, made[0], options.images) for kind in made]


def row(kind: Format, folder: Format, images: int) -> dict[str, Any]:
    """Medians of a format, and of its rates over the folder's."""
    return {
        "format": kind.name,
        "first_open_seconds": round(kind.first_open_seconds, 3),
        "open_seconds": round(kind.open_seconds, 3),
        "bytes_per_image": kind.stored_bytes // images,
        "warm_images_per_second": round(statistics.median(kind.warm)),
        "cold_images_per_second": round(statistics.median(kind.cold)),
        "cpu_ms_per_image": round(statistics.median(kind.cpu), 3),
        "warm_over_folder": round(
            statistics.median(a / b for a, b in zip(kind.warm, folder.warm, strict=True)), 3
        ),
        "cold_over_folder": round(
            statistics.median(a / b for a, b in zip(kind.cold, folder.cold, strict=True)), 3
        ),
    }


def main() -> None:
    """Command line."""
    parser = arguments(__doc__)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-formats-", dir=".") as place:
        # Indexes of these sets are of no use to anyone later.
        kept = Path(place, "cache").resolve()
        cache.place = lambda name: kept / name
        rows = measure(options, Path(place).resolve())
    write(options.output, [{**header("formats", options), "measured": options.images}, *rows])


if __name__ == "__main__":
    main()
