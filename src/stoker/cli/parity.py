"""`stoker parity DATA`: do stoker's tensors equal those of Pillow and torchvision, op by op?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.utils.data import Dataset, Subset, default_collate

import stoker
from stoker.cli.data import (
    DataArgument,
    ImageOption,
    LabelOption,
    LabelsOption,
    RecipeOption,
    resolve,
    transform_of,
    with_transform,
)
from stoker.draws import seed_generators
from stoker.order import keys

SEED = 7

LARGEST = 2048
"""Stages are compared within this many pixels a side, around the middle, so that batches fit."""


@dataclass
class Row:
    """How far one stage of the pipeline agrees.

    Attributes:
        op: the last op of the stage, or "whole pipeline".
        tier: who made the pixels; outside of "lowered" it was the user's own code.
        samples: how many were compared.
        identical: how many have every bit equal.
        largest: the largest absolute difference of a value.
        mean: the mean absolute difference over all values.
    """

    op: str
    tier: str
    samples: int = 0
    identical: int = 0
    largest: float = 0.0
    mean: float = 0.0


def parity(
    data: DataArgument,
    labels: LabelsOption = None,
    image: ImageOption = None,
    label: LabelOption = None,
    recipe: RecipeOption = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    num_workers: Annotated[int, typer.Option(min=0, metavar="N")] = 2,
    limit: Annotated[
        int, typer.Option(min=0, help="Samples, evenly spread over DATA; 0: all.")
    ] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Epochs, each with other random draws.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compare stoker's tensors with the dataset's own, op by op and for the whole pipeline.

    The generators are seeded per sample on both sides, so random transforms draw the same. Exit
    status 1 if anything differs.
    """
    resolved = resolve(data, labels, recipe, image, label)
    dataset = resolved.spread(limit)
    rows: list[Row] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("reading every file once", total=None)
        readable, unreadable = _readable(dataset)
        stages = [*_stages(readable), ("whole pipeline", readable)]
        progress.update(task, total=len(stages) * len(readable) * rounds)
        for op, stage in stages:
            progress.update(task, description=op)
            loader = stoker.DataLoader(
                stage,
                batch_size=batch_size if _same_size(stage) else 1,
                num_workers=num_workers,
                seed=SEED,
            )
            rows.append(_compare(loader, op, rounds, lambda n: progress.advance(task, n)))
    differ = any(row.identical < row.samples for row in rows)
    if as_json:
        print(
            json.dumps(
                {
                    "data": data,
                    "recipe": resolved.recipe,
                    "unreadable": unreadable,
                    "rows": [_as_json(row) for row in rows],
                    "identical": not differ,
                }
            )
        )
    else:
        _show(rows, f"{data}, {resolved.recipe or 'own transform'}", unreadable)
    if differ:
        raise typer.Exit(1)


def _as_json(row: Row) -> dict[str, Any]:
    # JSON has no infinity, which is the difference of tensors that cannot be subtracted.
    fields = asdict(row).items()
    return {name: None if value == float("inf") else value for name, value in fields}


def _show(rows: list[Row], title: str, unreadable: int) -> None:
    title = escape(f"{title}: stoker against dataset[index]")
    table = Table(title=title, title_justify="left")
    table.add_column("after", overflow="fold")
    table.add_column("tier")
    for column in ("samples", "identical", "largest difference", "mean difference"):
        table.add_column(column, justify="right")
    for row in rows:
        style = "" if row.identical == row.samples else "red"
        share = row.identical / row.samples if row.samples else 1.0
        # 100 % means all of them: never by rounding.
        shown = "100 %" if row.identical == row.samples else f"{min(share, 0.9999):.2%}"
        table.add_row(
            escape(row.op),
            row.tier,
            str(row.samples),
            shown,
            f"{row.largest:g}",
            f"{row.mean:.3g}",
            style=style,
        )
    console = Console()
    console.print(table)
    if unreadable:
        console.print(f"{unreadable} files that Pillow cannot read were left out")
    if any(row.tier != "lowered" for row in rows):
        console.print(
            "where the tier is not 'lowered', your own code makes the pixels on both sides"
        )


def _readable(dataset: Dataset[Any]) -> tuple[Subset[Any], int]:
    """The samples that the dataset itself can give, and how many it cannot."""
    total = len(dataset)  # type: ignore[arg-type]
    good = []
    for index in range(total):
        try:
            dataset[index]
        except Exception:  # noqa: BLE001 - whatever the user's code raises, the sample is out
            continue
        good.append(index)
    return Subset(dataset, good), total - len(good)


def _stages(dataset: Subset[Any]) -> list[tuple[str, Dataset[Any]]]:
    """The pipeline cut off after each op, from decoding on, as datasets of tensors.

    Only for a torchvision Compose whose images come from Pillow; anything else is compared as a
    whole. Stages whose images differ in size are cropped to a common one, black around the smaller:
    tensors of one size are what the native engine makes.
    """
    transform = transform_of(dataset)
    module = type(transform).__module__
    ops: list[Any] | None = getattr(transform, "transforms", None)
    if ops is None or not module.startswith("torchvision.transforms"):
        return []
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    kind = v2 if module.startswith("torchvision.transforms.v2") else v1
    stages: list[tuple[str, Dataset[Any]]] = []
    for count in range(len(ops)):
        name = type(ops[count - 1]).__name__ if count else "decode"
        images = with_transform(dataset, kind.Compose(ops[:count]) if count else _unchanged)
        sizes = {_size(images[index]) for index in range(len(dataset))}
        if None in sizes:
            # No longer Pillow's: tensors can be compared as they are.
            stages.append((name, images))
            continue
        height, width = (max(side) for side in zip(*filter(None, sizes), strict=True))
        crop = [kind.CenterCrop((min(height, LARGEST), min(width, LARGEST)))]
        ending = [*(crop if len(sizes) > 1 else []), kind.PILToTensor()]
        stages.append((name, with_transform(dataset, kind.Compose([*ops[:count], *ending]))))
    return stages


def _unchanged(image: Any) -> Any:
    return image


def _size(sample: Any) -> tuple[int, int] | None:
    """(height, width) of a sample's Pillow image; None where it has none."""
    image = sample[0] if isinstance(sample, tuple | list) else sample
    return (image.height, image.width) if isinstance(image, Image.Image) else None


def _same_size(dataset: Dataset[Any]) -> bool:
    """Whether the first samples can be stacked."""
    total = len(dataset)  # type: ignore[arg-type]
    shapes = [[leaf.shape for leaf in _leaves(dataset[index])] for index in range(min(total, 4))]
    return all(shape == shapes[0] for shape in shapes)


def _leaves(value: object) -> Iterator[torch.Tensor]:
    """Every tensor, number and array within a sample or batch, as tensors, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, int | float | np.ndarray | np.generic):
        yield torch.as_tensor(value)


def _compare(
    loader: stoker.DataLoader[Any], op: str, rounds: int, advance: Callable[[int], None]
) -> Row:
    row = Row(op, "")
    total, values = 0.0, 0
    dataset = loader.dataset
    for epoch in range(rounds):
        loader.set_epoch(epoch)
        start = 0
        for batch in loader:
            ours = list(_leaves(batch))
            count = len(ours[0])
            expected = []
            for index in range(start, start + count):
                seed_generators(int(keys(SEED, epoch, np.array([index]))[0]))
                expected.append(dataset[index])
            theirs = list(_leaves(default_collate(expected)))
            start += count
            for sample in range(count):
                same = len(ours) == len(theirs)
                for mine, wanted in zip(ours, theirs, strict=False):
                    equal, largest, summed = _difference(mine[sample], wanted[sample])
                    same &= equal
                    row.largest = max(row.largest, largest)
                    total += summed
                    values += wanted[sample].numel()
                row.identical += same
            row.samples += count
            advance(count)
    row.mean = total / values if values else 0.0
    row.tier = loader.explain().tier
    return row


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[bool, float, float]:
    """Whether all bits are equal; the largest absolute difference; their sum."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False, float("inf"), float("inf")
    # Bits, not values: 0.0 is not -0.0, and a NaN equals itself.
    bits = [value.reshape(-1).contiguous().view(torch.uint8) for value in (ours, theirs)]
    if torch.equal(*bits):
        return True, 0.0, 0.0
    difference = (ours.double() - theirs.double()).abs()
    return False, float(difference.max()), float(difference.sum())
