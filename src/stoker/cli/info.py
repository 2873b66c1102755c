"""`stoker info DATA`: what a data set consists of, as a table, JSON or a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.cli.data import DataArgument, ImageOption, LabelOption, LabelsOption, resolve_files
from stoker.errors import SourceError
from stoker.info import QUANTILES, Info, Spread, draw
from stoker.info import info as info_of

_SHOWN = 5
_COLUMNS = (0.0, 0.05, 0.5, 0.95, 1.0)
_BLOCKS = " ▁▂▃▄▅▆▇█"


def info(
    data: DataArgument,
    labels: LabelsOption = None,
    image: ImageOption = None,
    label: LabelOption = None,
    sample: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Headers to read, of random samples; 0: all."),
    ] = 10_000,
    seed: Annotated[int, typer.Option(help="Chooses the random samples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a picture: random samples with their labels, and plots.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Tell what DATA consists of: samples, classes and balance, formats, sizes and bytes.

    No image is decoded, except for --png.
    """
    dataset = resolve_files(data, labels, image, label)
    found = info_of(dataset, sample=sample, seed=seed)
    if png is not None:
        try:
            draw(dataset, found, png, seed=seed)
        except ImportError as error:
            raise SourceError("--png", str(error)) from error
        except OSError as error:
            raise SourceError(str(png), error.strerror or str(error)) from error
    if as_json:
        extra = {"data": data, "sampled": found.sampled, "imbalance": found.imbalance}
        print(json.dumps({**extra, "quantiles_at": QUANTILES, **asdict(found)}))
    else:
        _show(found, data)


def _show(found: Info, data: str) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    shards = "" if found.shards is None else f", {found.shards:,} file{'s' * (found.shards != 1)}"
    about = "about " if found.sampled and found.shards is None else ""
    for name, value in (
        ("format", f"{found.format}{shards}"),
        ("samples", f"{found.samples:,}, {about}{found.total_bytes / 2**20:,.1f} MiB"),
        ("classes", _classes(found)),
        ("encoded as", _counts(found.formats)),
        ("modes", _counts(found.modes)),
        ("JPEG subsampling", _counts(found.subsamplings)),
        ("turned by EXIF", f"{found.rotated:,}" if found.rotated else ""),
        ("unreadable", f"{found.unreadable_count:,}" if found.unreadable_count else ""),
    ):
        if value:
            table.add_row(name, Text(value))
    console.print(data)
    console.print(table)
    if found.sampled:
        console.print(
            f"From the headers of {found.read:,} random samples of {found.samples:,} "
            "(--sample 0 reads all):"
        )
    _show_spreads(console, found)
    for path, reason in found.unreadable[:_SHOWN]:
        console.print(Text.assemble(("unreadable: ", "red"), f"{path}: {reason}"))


def _show_spreads(console: Console, found: Info) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for quantile in _COLUMNS:
        named = {0.0: "least", 0.5: "median", 1.0: "most"}
        table.add_column(named.get(quantile, f"{quantile:.0%}"), justify="right")
    table.add_column("least to most", no_wrap=True)
    for name, spread, form in (
        ("bytes", found.bytes, "{:,.0f}"),
        ("width", found.widths, "{:,.0f}"),
        ("height", found.heights, "{:,.0f}"),
        ("megapixels", found.megapixels, "{:,.2f}"),
        ("width / height", found.aspects, "{:,.2f}"),
        ("JPEG quality", found.qualities, "{:.0f}"),
    ):
        if spread is not None:
            at = dict(zip(QUANTILES, spread.quantiles, strict=True))
            values = (form.format(at[quantile]) for quantile in _COLUMNS)
            table.add_row(name, *values, _bars(spread))
    if table.rows:
        console.print(table)


def _bars(spread: Spread) -> str:
    most = max(spread.counts)
    return "".join(_BLOCKS[-(-count * (len(_BLOCKS) - 1) // most)] for count in spread.counts)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _classes(found: Info) -> str:
    lacking = f"; {found.unlabelled:,} samples without a label" if found.unlabelled else ""
    if not found.classes:
        return f"none{lacking}"
    ordered = sorted(found.classes.items(), key=lambda pair: -pair[1])
    text = f"{len(ordered):,}"
    if found.imbalance is not None and sum(map(bool, found.classes.values())) > 1:
        text += f", the largest has {found.imbalance:,.1f} times the samples of the smallest"
    ends = ordered if len(ordered) <= 2 * _SHOWN else [*ordered[:_SHOWN], *ordered[-_SHOWN:]]
    shown = [f"{name} {count:,}" for name, count in ends]
    if len(ends) < len(ordered):
        shown.insert(_SHOWN, "...")
    return f"{text}: {', '.join(shown)}{lacking}"
