"""`stoker verify DATA`: which samples are bad, and what is odd about labels, images and copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from stoker.bad_samples import write
from stoker.cli.data import DataArgument, ImageOption, LabelOption, LabelsOption, resolve_files
from stoker.verify import FINDINGS, Finding, Report, opened
from stoker.verify import verify as verify_data

_SHOWN = 10


class _Rate(ProgressColumn):
    """Images a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} images/s" if task.speed else "")


def verify(
    data: DataArgument,
    labels: LabelsOption = None,
    image: ImageOption = None,
    label: LabelOption = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER",
            help="Another set, such as the validation set: are the classes the same, are images "
            "in both?",
            show_default=False,
        ),
    ] = None,
    against_labels: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Label file of OTHER.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the bad samples there, one JSON object a line, for "
            "DataLoader(exclude=FILE).",
            show_default=False,
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help=f"Samples of these findings are bad, too: {', '.join(FINDINGS)}.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Threads; one per usable core, if left out.", metavar="N"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Decode every image of DATA, and look for wrong labels, copies, leaks and odd images.

    DATA is read to the last byte, checksums included, and never changed. Exit status 1 if there are
    bad samples.
    """
    if against is None and against_labels is not None:
        raise typer.BadParameter("--against-labels belongs to --against")
    if unknown := [kind for kind in also or () if kind not in FINDINGS]:
        raise typer.BadParameter(f"--also {unknown[0]}: expected one of {', '.join(FINDINGS)}")
    dataset, lost = opened(lambda: resolve_files(data, labels, image, label, anew=True))
    other, its_lost = None, list[str]()
    if against is not None:
        other, its_lost = opened(lambda: resolve_files(against, against_labels, anew=True))
    total = len(dataset) + (0 if other is None else len(other))  # type: ignore[arg-type] # sized
    with Progress(
        TextColumn("verifying"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("", total=total)
        report = verify_data(
            dataset,
            against=other,
            also=also or (),
            lost=lost + its_lost,
            jobs=jobs,
            progress=lambda done, _: progress.update(task, completed=done),
        )
    if out is not None:
        write(out, report.bad)
    if as_json:
        print(json.dumps({"data": data, "against": against, **as_dict(report)}))
    else:
        _show(report, data, out)
    if not report.good:
        raise typer.Exit(1)


def as_dict(report: Report) -> dict[str, Any]:
    """A report as `--json` shows it."""
    return {
        "samples": report.samples,
        "bytes": report.bytes,
        "seconds": round(report.seconds, 3),
        "formats": report.formats,
        "bad": [json.loads(sample.line()) for sample in report.bad],
        "lost": report.lost,
        "findings": {
            finding.kind: {"count": finding.count, "examples": finding.examples}
            for finding in report.findings
        },
    }


def _show(report: Report, data: str, out: Path | None) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for text in report.lost:
        console.print(Text.assemble(("lost: ", "red"), text))
    for sample in report.bad[:_SHOWN]:
        console.print(Text.assemble(("bad: ", "red"), f"{sample.location}: {sample.reason}"))
    if len(report.bad) > _SHOWN:
        where = f"all are in {out}" if out is not None else "--out FILE takes all"
        console.print(f"... and {len(report.bad) - _SHOWN:,} more bad samples; {where}")
    width = max((len(f"{finding.count:,}") for finding in report.findings), default=0)
    for finding in report.findings:
        console.print(f"{finding.count:>{width},} {finding.what}: {_examples(finding)}")
    rate = report.samples / max(report.seconds, 1e-9)
    formats = ", ".join(f"{count:,} {name}" for name, count in report.formats.items())
    console.print(
        f"{data}: {report.samples:,} samples ({formats or 'none good'}), "
        f"{report.bytes / 2**20:,.1f} MiB, "
        f"{len(report.bad):,} bad; {report.seconds:.1f} s, {rate:,.0f} images/s"
    )


def _examples(finding: Finding) -> str:
    shown = finding.examples[:3]
    return ", ".join(shown) + ", ..." * (finding.count > len(shown))
