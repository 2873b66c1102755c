"""`stoker pack DATA TARGET`: encoded images and labels into tar or TFRecord shards."""

from __future__ import annotations

import re
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

from stoker.cli.data import DataArgument, LabelsOption, resolve
from stoker.errors import SourceError
from stoker.machine import most_workers
from stoker.pack import pack as pack_shards
from stoker.sources.index import Images

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


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
            help="Where the shards go: out/train-%06d.tar, or .tfrecord; without %06d, one shard.",
            show_default=False,
        ),
    ],
    labels: LabelsOption = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of each shard.")] = "256M",
    shuffle: Annotated[
        int | None,
        typer.Option(metavar="SEED", help="Random order under this seed.", show_default=False),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Shards worked on at once; one per usable core, if left out."),
    ] = None,
) -> None:
    """Pack the encoded images of DATA, byte for byte, and their labels into shards.

    It may be interrupted at any moment; the same command goes on from there, with the same result.
    Every shard is read again and compared before it gets its name. DATA is never changed.
    """
    source = resolve(data, labels, None).dataset
    if not isinstance(source, Images):
        raise SourceError(data, "is no set of image files, whose bytes could be packed")
    size = sum_of(source)
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
            jobs=jobs or most_workers(),
            progress=lambda _, done: progress.update(task, completed=done),
        )
    rate = packed.samples / max(packed.seconds, 1e-9)
    there = f", {packed.found:,} of them found there" if packed.found else ""
    console = Console()
    console.print(
        f"{packed.samples:,} images, {packed.image_bytes / 2**20:,.1f} MiB, in "
        f"{len(packed.shards):,} shard{'s' * (len(packed.shards) > 1)} of "
        f"{packed.shard_bytes / 2**20:,.1f} MiB{there}; compared with their source; {packed.seconds:.1f} s, {rate:,.0f} images/s",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def sum_of(source: Images) -> int | None:
    """Bytes of all images; None where that would have to be asked file by file."""
    extents = source.files.extents
    return None if extents is None else int(extents.length.sum())
