"""`stoker bench DATA`: images/s and CPU per image of stoker and of torch's DataLoader."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import stoker
from stoker.cli.data import (
    Data,
    DataArgument,
    ImageOption,
    LabelOption,
    LabelsOption,
    RecipeOption,
    resolve,
)
from stoker.machine import most_workers, usable_cores


@dataclass
class Measured:
    """One loader's figures; the lists have one number per round."""

    name: str
    tier: str
    reason: str = ""
    first_batch_seconds: float = 0.0
    images_per_second: list[float] = field(default_factory=list)
    cpu_ms_per_image: list[float | None] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Medians over the rounds, as `--json` shows them."""
        cpu = [value for value in self.cpu_ms_per_image if value is not None]
        return {
            **asdict(self),
            "images_per_second": round(statistics.median(self.images_per_second), 1),
            "cpu_ms_per_image": round(statistics.median(cpu), 3) if cpu else None,
            "first_batch_seconds": round(self.first_batch_seconds, 3),
        }


def cpu_seconds() -> float | None:
    """CPU time of this process, of its ended children and of its running ones.

    None where running children cannot be asked (no /proc).
    """
    total = sum(os.times()[:4])
    ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0
    for child in multiprocessing.active_children():
        try:
            text = Path(f"/proc/{child.pid}/stat").read_text()
        except OSError:
            if not Path("/proc/self/stat").exists():
                return None
            continue
        # The name in brackets may hold spaces; user and system time are fields 14 and 15.
        fields = text.rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def bench(
    data: DataArgument,
    labels: LabelsOption = None,
    image: ImageOption = None,
    label: LabelOption = None,
    recipe: RecipeOption = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    num_workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="For both loaders; one per usable core, if left out.", metavar="N"
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Samples per epoch, evenly spread over DATA; 0: all.")
    ] = 2000,
    rounds: Annotated[
        int, typer.Option(min=1, help="Epochs of each loader, in turn, after one to warm up.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure images/s and CPU ms per image of stoker and torch's DataLoader on DATA.

    Both loaders read the same dataset object, shuffled, in turn; the CPU of worker processes
    counts. The figures are medians; machines are noisy, so trust the ratio more than the rate.
    """
    resolved = resolve(data, labels, recipe, image, label)
    workers = most_workers() if num_workers is None else num_workers
    results, speedup = _run(resolved, batch_size, workers, limit, rounds)
    samples = min(len(resolved), limit) if limit else len(resolved)
    if as_json:
        print(
            json.dumps(
                {
                    "data": data,
                    "recipe": resolved.recipe,
                    "samples": samples,
                    "batch_size": batch_size,
                    "num_workers": workers,
                    "rounds": rounds,
                    "loaders": [result.summary() for result in results],
                    "speedup": round(speedup, 2),
                    "machine": platform.processor() or platform.machine(),
                    "cores": usable_cores(),
                    "versions": {"stoker": stoker.__version__, "torch": torch.__version__},
                }
            )
        )
        return
    title = (
        f"{data}, {resolved.recipe or 'own transform'}: {samples} samples an epoch, batches of "
        f"{batch_size}, {workers} workers"
    )
    table = Table(title=escape(title), title_justify="left")
    table.add_column("loader")
    for column in ("images/s", "CPU ms/image", "first batch s"):
        table.add_column(column, justify="right")
    table.add_column("tier")
    for result in results:
        figures = result.summary()
        cpu = figures["cpu_ms_per_image"]
        table.add_row(
            result.name,
            f"{figures['images_per_second']:.0f}",
            "-" if cpu is None else f"{cpu:.2f}",
            f"{figures['first_batch_seconds']:.2f}",
            result.tier,
        )
    console = Console()
    console.print(table)
    for result in results:
        if result.reason:
            console.print(f"not native because of {result.reason}", markup=False, highlight=False)
    console.print(f"stoker gives {speedup:.2f} times the images/s (median of {rounds} rounds)")


def _run(
    data: Data, batch_size: int, workers: int, limit: int, rounds: int
) -> tuple[list[Measured], float]:
    """Runs both loaders in turn; returns their figures and the median of the rounds' ratios."""
    dataset = data.spread(limit)
    samples = len(dataset)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {
        "batch_size": batch_size,
        "shuffle": True,
        "num_workers": workers,
        "persistent_workers": workers > 0,
    }
    loaders: dict[str, torch.utils.data.DataLoader[Any]] = {
        "stoker": stoker.DataLoader(dataset, **arguments),
        "torch": torch.utils.data.DataLoader(dataset, **arguments),
    }
    results = {name: Measured(name, "-") for name in loaders}
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("", total=(rounds + 1) * len(loaders) * samples)
        for round_number in range(rounds + 1):
            for name, loader in loaders.items():
                label = "warming up" if round_number == 0 else f"round {round_number}"
                progress.update(task, description=f"{label}, {name:6}")
                result = results[name]
                start, cpu, first = time.perf_counter(), cpu_seconds(), None
                for _ in loader:
                    if first is None:
                        first = time.perf_counter() - start
                    progress.advance(task, batch_size)
                seconds, cpu_after = time.perf_counter() - start, cpu_seconds()
                if round_number == 0:
                    result.first_batch_seconds = first or 0.0
                    continue
                result.images_per_second.append(samples / seconds)
                result.cpu_ms_per_image.append(
                    None if cpu is None or cpu_after is None else (cpu_after - cpu) / samples * 1e3
                )
    ours = loaders["stoker"]
    assert isinstance(ours, stoker.DataLoader)
    explained = ours.explain()
    results["stoker"].tier = explained.tier
    if explained.op:
        results["stoker"].reason = f"{explained.op}: {explained.why}; {explained.instead}"
    ratios = [
        mine / theirs
        for mine, theirs in zip(
            results["stoker"].images_per_second, results["torch"].images_per_second, strict=True
        )
    ]
    return list(results.values()), statistics.median(ratios)
