"""How many images per second does each loader give, and at what CPU cost?

    python benchmarks/loaders.py FOLDER --workloads train,val,seed --rounds 3

Each loader runs in a process of its own, in turn (A B C A B C ...). Machines are noisy: trust the
ratios, which are taken round by round, not the rates. A loader that is not installed is skipped and
named.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import arguments, header, note, write
from rivals import LOADERS, WORKLOADS, missing


def run(loader: str, workload: str, folder: str, threads: int, images: int) -> dict[str, Any] | str:
    """One loader's row, or why there is none."""
    command = [sys.executable, str(Path(__file__).with_name("rivals.py")), loader, workload, folder]
    command += ["--threads", str(threads), "--images", str(images)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        return (done.stderr.strip().splitlines() or ["no output"])[-1][:160]
    row: dict[str, Any] = json.loads(rows[-1])
    return row


def summary(rows: list[dict[str, Any]], first: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one loader's rounds, and of the first loader's rates over its own."""
    medians = {
        key: statistics.median(row[key] for row in rows)
        for key in ("images_per_second", "cpu_ms_per_image", "first_batch_seconds", "peak_rss_mib")
    }
    ratios = [
        a["images_per_second"] / b["images_per_second"] for a, b in zip(first, rows, strict=False)
    ]
    return {
        **{key: rows[0][key] for key in ("workload", "loader", "threads")},
        **medians,
        "first_over_this": round(statistics.median(ratios), 2),
        "rounds": len(rows),
    }


def main() -> None:
    """Command line."""
    parser = arguments(__doc__)
    parser.add_argument("--loaders", default=",".join(LOADERS))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=3000)
    options = parser.parse_args()

    names = []
    for name in options.loaders.split(","):
        lacks = missing(name)
        if lacks:
            note(f"{name} is left out: {lacks} is not installed")
        else:
            names.append(name)
    rows = [header("loaders", options)]
    for workload in options.workloads.split(","):
        seen: dict[str, list[dict[str, Any]]] = {}
        excluded: set[str] = set()
        for round_number in range(options.rounds):
            for name in names:
                if name in excluded:
                    continue
                row = run(name, workload, options.folder, options.threads, options.images)
                if isinstance(row, str):
                    note(f"{workload}, {name} is left out: {row}")
                    excluded.add(name)
                    seen.pop(name, None)
                    continue
                rate = row["images_per_second"]
                note(f"{workload}, round {round_number + 1}, {name}: {rate} images/s")
                seen.setdefault(name, []).append(row)
        if seen:
            first = next(iter(seen.values()))
            rows += [summary(rounds, first) for rounds in seen.values()]
    write(options.output, rows)


if __name__ == "__main__":
    main()
