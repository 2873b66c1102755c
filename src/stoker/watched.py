"""`stoker diagnose -- python train.py`: a script as it is, its loaders watched from outside."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stoker.run import run_as_main

if TYPE_CHECKING:
    from stoker.diagnosis import Watch

_USAGE = "stoker diagnose [--json] -- [python] SCRIPT ARGUMENTS..., or -m MODULE ARGUMENTS..."


def run_watched(options: list[str], command: list[str]) -> None:
    """Runs ``command`` with its loaders watched; reports at its end, however it ends.

    The report goes to stderr; with ``--json`` it is the last line of stdout.
    """
    if command and os.path.basename(command[0]).startswith("python"):
        command = command[1:]
    if set(options) - {"--json"} or not command:
        sys.stderr.write(f"error: {_USAGE}; no other options\n")
        raise SystemExit(2)
    watches: list[Watch] = []
    process = os.getpid()

    def watch() -> None:
        if not watches and os.getpid() == process:
            from stoker.diagnosis import watch_script

            watches.append(watch_script())

    try:
        run_as_main(command, watch)
    finally:
        if os.getpid() == process:
            for one in watches:
                one.unpatch()
            _tell(watches, "--json" in options)


def _tell(watches: list[Watch], as_json: bool) -> None:
    """Says what was seen: the loader that the script waited for longest comes first."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    system = watches[0].vitals() if watches else None
    if system is not None:
        from stoker.diagnosis import report_of

        seen = [one for one in watches[0].watched.values() if one.batches]
        seen.sort(key=lambda one: one.wait_seconds + one.first_seconds, reverse=True)
        for one in seen:
            report = report_of(one, system)
            found.append({**asdict(report), "waits": report.loop.waits})
            texts.append(str(report))
    if as_json:
        told = {"loaders": found, "vitals": None if system is None else asdict(system)}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        return
    text = "\n\n".join(texts) or "no batch was taken from a loader of torch's or stoker's"
    sys.stderr.write(f"\nstoker diagnose\n{text}\n")
