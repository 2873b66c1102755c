"""`stoker diagnose DATA`: what each stage of a loader gives, which one binds, and what to do."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stoker import ceilings, machine, verdict, vitals
from stoker.ceilings import Effort, Reads
from stoker.cli.data import (
    DataArgument,
    ImageOption,
    LabelOption,
    LabelsOption,
    RecipeOption,
    resolve,
    resolve_files,
)
from stoker.errors import SourceError
from stoker.plan import Refusal
from stoker.sources.dataset import Rows, rows_of
from stoker.verdict import Ceilings, Figure, Settings, Verdict
from stoker.vitals import Vitals

_AGAINST_SAMPLES = 384


def diagnose(
    data: DataArgument,
    labels: LabelsOption = None,
    image: ImageOption = None,
    label: LabelOption = None,
    recipe: RecipeOption = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    num_workers: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Of your loader; 3/4 of the usable cores, if left out."
        ),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="MS",
            help="What your training step takes for a batch, without waiting for data.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER",
            help="The same data at another place or in another format: both are read, cold.",
            show_default=False,
        ),
    ] = None,
    against_labels: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Label file of OTHER.", show_default=False),
    ] = None,
    cold: Annotated[
        bool | None,
        typer.Option(
            "--cold/--warm",
            help="Judge by reads from the disk, or from memory; by the sizes, if left out.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Of each round.")] = 0.5,
    rounds: Annotated[int, typer.Option(min=1, help="Of each ceiling.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the ceilings.", show_default=False),
    ] = None,
) -> None:
    """Measure the ceiling of each stage on DATA, name the one that binds, and say what to do.

    `stoker diagnose -- python train.py ARGUMENTS` runs a script and says how long it waits for its
    loaders. Figures are medians of rounds; machines are noisy.
    """
    if against is None and against_labels is not None:
        raise typer.BadParameter("--against-labels belongs to --against")
    effort = Effort(seconds, rounds)
    resolved = resolve(data, labels, recipe, image, label)
    threads = machine.default_threads() if num_workers is None else num_workers
    with Console(stderr=True).status("measuring") as status:
        found, system = ceilings.measure(
            resolved.dataset,
            threads=threads,
            batch_size=batch_size,
            stays_cached=None if cold is None else not cold,
            effort=effort,
            say=lambda what: status.update(f"measuring {what}"),
        )
        if step_ms is not None:
            rate = batch_size / step_ms * 1e3
            found = replace(found, consumer=Figure(rate, rate, rate))
        here = there = None
        if against is not None:
            status.update("measuring reads of both")
            here, there = _both(
                _rows(data, labels, image, label), _rows(against, against_labels), threads, effort
            )
    judged = verdict.judge(found, system)
    settings = Settings(
        threads, found.tier == "lowered", machine.usable_cores(), ranks=machine.local_world_size()
    )
    judged = replace(judged, findings=tuple(verdict.judge_settings(settings)))
    if png is not None:
        _draw(found, judged, data, png)
    if as_json:
        told = as_dict(found, judged, system)
        told["against"] = None
        if here is not None and there is not None:
            told["against"] = {
                "data": against,
                "here": asdict(here),
                "there": asdict(there),
                "gain": _gain(found, here, there),
            }
        print(json.dumps({"data": data, "recipe": resolved.recipe, **told}))
        return
    _show(data, found, judged, system)
    if here is not None and there is not None and against is not None:
        _show_both(data, against, found, here, there)


def as_dict(found: Ceilings, judged: Verdict, system: Vitals) -> dict[str, Any]:
    """What was found, as `--json` shows it."""
    memory = vitals.memory()
    return {
        "verdict": asdict(judged),
        "ceilings": {**asdict(found), "decode": found.decode, "transform": found.transform},
        "vitals": asdict(system),
        "memory": asdict(memory),
    }


def _rows(
    data: str, labels: Path | None, image: str | None = None, label: str | None = None
) -> Rows:
    rows = rows_of(resolve_files(data, labels, image, label))
    if isinstance(rows, Refusal):
        raise SourceError(data, f"{rows.why}, so its files are not known; {rows.instead}")
    return rows


def _both(here: Rows, there: Rows, threads: int, effort: Effort) -> tuple[Reads, Reads]:
    """Cold reads of as many samples of both, the same ones where both have as many."""
    generator = np.random.default_rng(2)
    count = min(len(here), len(there), _AGAINST_SAMPLES)
    indices = generator.choice(min(len(here), len(there)), count, replace=False).astype(np.int64)
    return (
        ceilings.reads(here, indices, max(1, threads), effort),
        ceilings.reads(there, indices, max(1, threads), effort),
    )


def _gain(found: Ceilings, here: Reads, there: Reads) -> float:
    """Images/s of the whole from there over those from here, both read cold."""
    made = found.made_here.median
    most = found.consumer.median if found.consumer else float("inf")
    assert found.storage is not None  # both are tables of files
    alone = found.storage.alone
    from_there, from_here = (
        min(most, found.produced(alone(one.images), made)) for one in (there, here)
    )
    return from_there / from_here


def _figure(figure: Figure | None, sample_bytes: float) -> tuple[str, str, str]:
    if figure is None:
        return "-", "", ""
    spread = f"{figure.low:,.0f} - {figure.high:,.0f}"
    rate = f"{figure.median * sample_bytes / 1e6:,.0f}" if sample_bytes else ""
    return f"{figure.median:,.0f}", spread, rate


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def stages(found: Ceilings) -> list[tuple[str, Figure]]:
    """The ceilings that were measured, by name, in the order of the data's way."""

    def share(rate: float | None) -> Figure | None:
        if rate is None:
            return None
        factor = rate / found.made_here.median
        made = found.made_here
        return Figure(made.median * factor, made.low * factor, made.high * factor)

    storage = found.storage
    rows: list[tuple[str, Figure | None]] = []
    if storage is not None:
        rows += [
            (f"storage, cold, random ({storage.kind})", storage.cold_random),
            ("storage, cold, in sequence", storage.cold_sequential),
            ("storage, warm", storage.warm),
        ]
    rows += [("decode alone", share(found.decode)), ("transform alone", share(found.transform))]
    rows += [
        (f"from memory, {_threads(threads)}", figure)
        for threads, figure in sorted(found.made.items())
    ]
    rows += [
        ("the loader, warm", found.loader),
        ("torch's loader, warm", found.theirs),
        ("the consumer", found.consumer),
        ("the loop", found.loop),
    ]
    return [(name, figure) for name, figure in rows if figure is not None]


def _show(data: str, found: Ceilings, judged: Verdict, system: Vitals) -> None:
    console = Console()
    console.print(f"{judged.sentence}.", markup=False, highlight=False)
    title = f"{data}: ceilings with {_threads(found.threads)} on {found.cores:g} cores"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("alone")
    for column in ("images/s", "lowest - highest", "MB/s"):
        table.add_column(column, justify="right")
    for name, figure in stages(found):
        with_bytes = found.sample_bytes if name.startswith("storage") else 0.0
        table.add_row(name, *_figure(figure, with_bytes))
    console.print(table)
    if found.ops:
        costs = Table(title="Cost of each step, one thread", title_justify="left")
        costs.add_column("step")
        costs.add_column("ms a sample", justify="right")
        for op in found.ops:
            kind = " (Python)" if op.python else ""
            note = " (it saves decoding)" if op.seconds < 0 else ""
            costs.add_row(escape(f"{op.name}{kind}{note}"), f"{op.seconds * 1e3:.3f}")
        console.print(costs)
    plain = Console(markup=False, highlight=False, soft_wrap=True)
    for place, action in enumerate(judged.actions, 1):
        pixels = ", other pixels" if action.changes_pixels else ""
        after = f", on top of {action.after}" if action.after else ""
        plain.print(f"{place}. {action.gain:.2f}x{pixels}{after}: {action.what}")
    if not judged.actions:
        plain.print("no action is predicted to gain 3 % or more")
    for one in judged.findings:
        plain.print(f"{one.setting}={one.given}: better {one.advised}: {one.why}")
    memory = vitals.memory()
    facts = [f"{found.cores:g} cores"]
    if system.cpu is not None:
        facts.append("busy " + "/".join(f"{core:.0%}" for core in system.cores[:16]))
    if memory.limit is not None:
        facts.append(f"memory {memory.limit / 2**30:,.1f} GiB")
    if memory.shm is not None:
        facts.append(f"/dev/shm {memory.shm / 2**30:,.2f} GiB")
    for disk, rate in system.disk_bytes_per_second.items():
        facts.append(f"{disk} {rate / 1e6:,.0f} MB/s, {system.disk_busy[disk]:.0%} busy")
    if system.gpu_busy is not None:
        facts.append(f"GPU {system.gpu_busy:.0%} busy")
    plain.print("meanwhile: " + "; ".join(facts))
    for note in judged.notes:
        plain.print(f"note: {note}")


def _show_both(data: str, against: str, found: Ceilings, here: Reads, there: Reads) -> None:
    console = Console()
    table = Table(title="Read cold", title_justify="left")
    table.add_column("from")
    for column in ("images/s", "lowest - highest", "MB/s", "ms a read"):
        table.add_column(column, justify="right")
    for name, one in ((data, here), (against, there)):
        latency = f"{one.latency_seconds * 1e3:.2f}"
        table.add_row(
            escape(f"{name} ({one.kind})"), *_figure(one.images, one.sample_bytes), latency
        )
    console.print(table)
    reads = there.images.median / here.images.median
    console.print(
        f"{against} gives {reads:.2f} times the reads, and the whole "
        f"{_gain(found, here, there):.2f} times the images/s",
        markup=False,
        highlight=False,
    )
    if abs(here.sample_bytes / there.sample_bytes - 1) > 1e-6:
        console.print("note: the samples differ in size, so they are not the same bytes")


def _draw(found: Ceilings, judged: Verdict, data: str, path: Path) -> None:
    """Draws the ceilings as bars, with their spread, to a PNG file."""
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError:
        raise SourceError("--png", "needs an extra: pip install 'stoker[plot]'") from None
    rows = stages(found)[::-1]
    picture = Picture(figsize=(10, 1.5 + 0.45 * len(rows)), dpi=100, layout="constrained")
    axes = picture.subplots()
    medians = [figure.median for _, figure in rows]
    below = [figure.median - figure.low for _, figure in rows]
    above = [figure.high - figure.median for _, figure in rows]
    names = [name for name, _ in rows]
    axes.barh(names, medians, xerr=[below, above], color="#4c78a8", ecolor="#333333")
    axes.set_xlabel("images/s; lines from the lowest to the highest round")
    axes.axvline(judged.images_per_second, color="#e45756", label="the whole, predicted")
    axes.legend()
    shown = "".join(c if c.isprintable() else "?" for c in data[-60:]).replace("$", r"\$")
    axes.set_title(f"{shown}; what binds: {judged.stage}")
    try:
        picture.savefig(path, format="png")
    except OSError as error:
        raise SourceError(str(path), error.strerror or str(error)) from error
