"""`stoker pack DATA TARGET`: encoded images and labels of any source into a packed set."""

from __future__ import annotations

import re
import time
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from stoker import DataLoader
from stoker import open as open_source
from stoker.cli.data import (
    DataArgument,
    ImageOption,
    LabelOption,
    LabelsOption,
    Recipe,
    resolve,
    transform_of_recipe,
    with_transform,
)
from stoker.errors import SourceError
from stoker.machine import most_workers
from stoker.pack import pack as pack_shards
from stoker.shrink import Shrink
from stoker.sources.index import Images

_WARM_SECONDS, _MEASURED_SECONDS = 0.5, 2.0
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Where(StrEnum):
    """Who does the work."""

    threads = "threads"
    ray = "ray"


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found or not int(found[1]):
        raise typer.BadParameter(f"{text!r} is no size; write 256M, or 1G")
    return int(found[1]) * _UNITS[found[2].upper()]


def pack(
    data: DataArgument,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Where it goes: out/train-%06d.tar, .tfrecord or .parquet, of which without %06d "
            "there is one; out/train.lmdb; or out/, a folder of images with labels.csv.",
            show_default=False,
        ),
    ],
    labels: LabelsOption = None,
    image: ImageOption = None,
    label: LabelOption = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of each shard.")] = "256M",
    shuffle: Annotated[
        int | None,
        typer.Option(metavar="SEED", help="Random order under this seed.", show_default=False),
    ] = None,
    resize_shorter: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Make images smaller whose shorter side has more than N pixels.",
            show_default=False,
        ),
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Make images smaller whose longer side has more than N pixels.",
            show_default=False,
        ),
    ] = None,
    quality: Annotated[
        int, typer.Option(min=1, max=100, help="Of JPEGs that are made smaller.")
    ] = 90,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Shards worked on at once; one per usable core, if left out."),
    ] = None,
    on: Annotated[
        Where,
        typer.Option(help="Threads here, or tasks of a Ray cluster (RAY_ADDRESS, else started)."),
    ] = Where.threads,
    part: Annotated[
        str,
        typer.Option(
            metavar="K/N",
            help="Of the shards only every N-th, from number K on: N machines, with K from 0 on, "
            "write the set together.",
        ),
    ] = "0/1",
    measure: Annotated[
        bool,
        typer.Option(help="Then read both as for training, for some seconds, and say how fast."),
    ] = True,
) -> None:
    """Pack the encoded images of DATA, byte for byte, and their labels into shards.

    It may be interrupted at any moment; the same command goes on from there, with the same result.
    Every shard is read again and compared before it gets its name. DATA is never changed.
    """
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and int(number) < int(parts)):
        raise typer.BadParameter(f"--part {part}: expected K/N with K from 0 to N - 1, such as 0/8")
    shrink = None
    if resize_shorter or max_size:
        shrink = Shrink(resize_shorter, max_size, quality)
    source = resolve(data, labels, None, image, label).dataset
    if not isinstance(source, Images):
        raise SourceError(data, "is no set of image files, whose bytes could be packed")
    size = None if shrink else _bytes_of(source)
    with Progress(
        TextColumn("packing"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("", total=size)
        packed = pack_shards(
            source,
            target,
            shard_bytes=_bytes(shard_size),
            shuffle=shuffle,
            shrink=shrink,
            jobs=jobs or most_workers(),
            on=on.value,
            part=(int(number), int(parts)),
            progress=lambda _, done: progress.update(task, completed=done),
        )
    rate = packed.samples / max(packed.seconds, 1e-9)
    there = f", {packed.found:,} of them found there" if packed.found else ""
    console = Console()
    shards = f"{len(packed.shards):,} shard{'s' * (len(packed.shards) > 1)}"
    shards = f"in {shards} of {packed.shard_bytes / 2**20:,.1f} MiB"
    if packed.shards and packed.shards[0].endswith(".csv"):
        shards = f"beside {packed.shards[0]}"
    _say(
        console,
        f"{packed.samples:,} images, {packed.image_bytes / 2**20:,.1f} MiB, {shards}{there}; "
        f"compared with their source; {packed.seconds:.1f} s, {rate:,.0f} images/s",
    )
    if measure and packed.samples:
        result = open_source(packed.shards if len(packed.shards) > 1 else packed.shards[0])
        before, after = (_images_per_second(dataset) for dataset in (source, result))
        _say(
            console,
            f"read as for training on this machine, from memory as far as it is cached: "
            f"{before:,.0f} images/s from {data}, {after:,.0f} from the result",
        )


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _bytes_of(source: Images) -> int | None:
    """Bytes of all images; None where that would have to be asked file by file."""
    extents = source.files.extents
    return None if extents is None else int(extents.length.sum())


def _images_per_second(dataset: Images) -> float:
    """How fast a loader reads, for some seconds after as many images to warm up."""
    recipe = with_transform(dataset, transform_of_recipe(Recipe.train))
    loader = DataLoader(recipe, 64, shuffle=True, num_workers=most_workers())
    for seconds in (_WARM_SECONDS, _MEASURED_SECONDS):
        images, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            for batch, _ in loader:
                images += len(batch)
                if time.perf_counter() - begun >= seconds:
                    break
    loader.close()
    return images / (time.perf_counter() - begun)
