"""`stoker doctor [DATA]`: what is wrong with this environment, and how to mend it."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from stoker.doctor import findings
from stoker.environment import Facts, facts_of
from stoker.finding import Finding, failed
from stoker.links import Links, joined, measure, of_all
from stoker.rendezvous import of_links, of_meeting, of_versions

_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}
_UNMET = ("ranks", "rendezvous", "network interface", "GPU per rank")
"""Faults with which the ranks would wait for each other in vain."""


def doctor(
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="Where the images are: is it there, may it be read, on what storage is it?",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check this environment in seconds, and say how to mend what is wrong.

    Versions, GPUs and driver, cores, memory, shared memory, open files, storage. Under torchrun
    (torchrun OPTIONS -m stoker doctor) also the ranks: what each has found, and latency and
    bandwidth between them. Exit status 1 if there is a fault.
    """
    facts = facts_of(data)
    found = findings(facts)
    alone = (facts.whole("WORLD_SIZE") or 1) < 2
    if alone or any(finding.state == "fault" and finding.name in _UNMET for finding in found):
        _report([(socket.gethostname(), facts, found)], None, [], as_json)
        return
    try:
        with joined(len(facts.gpus)) as backend:
            links = measure(backend)
            everyone = of_all((socket.gethostname(), facts, found))
    except (RuntimeError, ValueError, OSError) as error:
        _report([(socket.gethostname(), facts, found)], None, [of_meeting(facts, error)], as_json)
        return
    together = [of_versions([facts.versions for _, facts, _ in everyone]), of_links(links)]
    # Every rank ends alike, or torchrun would report a failure of its own.
    _report(everyone, links, together, as_json, silent=os.environ["RANK"] != "0")


def _report(
    everyone: list[tuple[str, Facts, list[Finding]]],
    links: Links | None,
    together: list[Finding],
    as_json: bool,
    silent: bool = False,
) -> None:
    """Prints what the ranks have found, each finding once, and ends with the exit status."""
    told: dict[Finding, list[int]] = {}
    for rank, (_, _, found) in enumerate(everyone):
        for finding in found:
            told.setdefault(finding, []).append(rank)
    told |= {finding: list(range(len(everyone))) for finding in together}
    if silent:
        pass
    elif as_json:
        print(json.dumps(_as_dict(everyone, links, told)))
    else:
        _show(everyone, told)
    if failed(list(told)):
        raise typer.Exit(1)


def _as_dict(
    everyone: list[tuple[str, Facts, list[Finding]]],
    links: Links | None,
    told: dict[Finding, list[int]],
) -> dict[str, Any]:
    facts = everyone[0][1]
    return {
        "good": not failed(list(told)),
        "versions": dict(facts.versions),
        "cuda_available": bool(facts.gpus),
        "device_count": len(facts.gpus),
        "gpus": list(facts.gpus),
        "cores": facts.cores,
        "hosts": [host for host, _, _ in everyone],
        "findings": [{**asdict(finding), "ranks": ranks} for finding, ranks in told.items()],
        "links": None if links is None else asdict(links),
    }


def _show(everyone: list[tuple[str, Facts, list[Finding]]], told: dict[Finding, list[int]]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    facts = everyone[0][1]
    console.print(", ".join(f"{name} {number}" for name, number in facts.versions.items()))
    console.print(f"torch.cuda.is_available() {bool(facts.gpus)}, device_count() {len(facts.gpus)}")
    for finding, ranks in told.items():
        some = len(ranks) < len(everyone)
        where = f" (rank {', '.join(map(str, ranks))})" if some else ""
        console.print(
            Text.assemble(
                (f"{finding.state:8}", _COLOURS[finding.state]),
                (finding.name, "bold"),
                f"{where}: {finding.what}",
            )
        )
        if finding.remedy:
            console.print(f"        -> {finding.remedy}")
