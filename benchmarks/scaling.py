"""How do images/s and CPU per image change with the number of threads?

    python benchmarks/scaling.py FOLDER --threads 0,1,2,4 --rounds 3

Threads for stoker, worker processes for torch's DataLoader. Where there are fewer cores than
threads, the CPU per image still tells what a thread costs. 0 works on the calling thread.
"""

from __future__ import annotations

import statistics
from typing import Any

from loaders import run
from measure import arguments, header, note, write


def main() -> None:
    """Command line."""
    parser = arguments(__doc__)
    parser.add_argument("--threads", default="0,1,2,4")
    parser.add_argument("--workload", default="train")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    seen: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for round_number in range(options.rounds):
        for threads in map(int, options.threads.split(",")):
            for loader in ("stoker", "torch-pil"):
                row = run(loader, options.workload, options.folder, threads, options.epochs)
                if isinstance(row, str):
                    raise SystemExit(f"{loader} with {threads} threads failed: {row}")
                seen.setdefault((loader, threads), []).append(row)
                rate = row["images_per_second"]
                note(f"round {round_number + 1}, {loader}, {threads} threads: {rate} images/s")
    rows = [{**header("scaling", options), "workload": options.workload}]
    for (loader, threads), rounds in sorted(seen.items()):
        rows.append(
            {
                "loader": loader,
                "threads": threads,
                **{
                    key: statistics.median(row[key] for row in rounds)
                    for key in ("images_per_second", "cpu_ms_per_image")
                },
            }
        )
    write(options.output, rows)


if __name__ == "__main__":
    main()
