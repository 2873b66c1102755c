"""Renders benchmarks/results/*.jsonl into docs/benchmarks.md and tables of three other pages.

    python benchmarks/render.py           writes
    python benchmarks/render.py --check   exit status 1 where the pages are not what it would write

So no figure in the documentation is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
FORMATS = ROOT / "docs" / "formats.md"
DIAGNOSE = ROOT / "docs" / "diagnose.md"
ORDER = ROOT / "docs" / "order.md"
BEGIN = "<!-- benchmarks/render.py begins -->"
END = "<!-- benchmarks/render.py ends -->"

Row = dict[str, Any]

INTRODUCTION = """\
# Benchmarks

Every table on this page is rendered by `benchmarks/render.py` from `benchmarks/results/`, which
`scripts/bench FOLDER` writes. Machines are noisy: trust the ratios, which are taken in turn within
one run, more than the rates. Only stoker and torch (PIL) give the same pixels; the others resize or
decode differently.

A rival that is not installed is left out. `pip install ".[bench]"` brings all but FFCV, which needs
system libraries (on Debian: libopencv-dev, libturbojpeg0-dev, pkg-config) and then
`pip install ffcv`, and the libraries of SPDL (on Debian: ffmpeg). FFCV reads a file of its own,
into which the photos are encoded again before the clock starts.
"""

LOADER_NAMES = {
    "stoker": "**stoker**",
    "dali": "DALI (CPU)",
    "ffcv": "FFCV (its own re-encoded file)",
    "spdl": "SPDL",
    "torch-v2": "torch, v2 on tensors",
    "torch-cv2": "torch, OpenCV (other pixels)",
    "torch-pil": "torch, PIL",
}
WORKLOAD_NAMES = {
    "train": "train: RandomResizedCrop(224), flip",
    "val": "val: Resize(256), CenterCrop(224)",
    "seed": "seed: Resize((224, 224)), flip",
}


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    names = list(columns)
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def conditions(head: Row) -> str:
    """One paragraph: machine, versions, data, command."""
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    return (
        f"{head['date']}; {head['machine']}; SIMD level {head['simd']}; {head['images']} files of "
        f"{head['bytes_per_image'] // 1000} kB on average; {versions}.\n\n"
        f"    {head['command']}\n"
    )


def by_workload(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of each workload, in the order measured."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["workload"], []).append(row)
    return found


def loaders(head: Row, rows: list[Row]) -> str:
    """The section about whole loaders."""
    parts = [f"## Loaders\n\n{conditions(head)}"]
    for workload, measured in by_workload(rows).items():
        threads = measured[0]["threads"]
        body = table(
            [
                WORKLOAD_NAMES[workload],
                "images/s",
                "CPU ms/image",
                "stoker is",
                "first batch s",
                "peak MiB",
            ],
            [
                [
                    LOADER_NAMES[row["loader"]],
                    f"{row['images_per_second']:,.0f}",
                    f"{row['cpu_ms_per_image']:.2f}",
                    f"{row['first_over_this']:.2f}x",
                    f"{row['first_batch_seconds']:.2f}",
                    f"{row['peak_rss_mib']:.0f}",
                ]
                for row in measured
            ],
        )
        parts.append(
            f"{threads} threads or worker processes, batches of 64, medians of "
            f"{measured[0]['rounds']} rounds:\n\n{body}"
        )
    parts.append(
        "CPU counts worker processes; the peak is of the main process; the first batch includes "
        "making the loader, not the imports.\n"
    )
    return "\n".join(parts)


def decode(head: Row, rows: list[Row]) -> str:
    """The section about decoding alone."""
    body = table(
        ["decoder", "microseconds", "images/s", f"over {head['baseline']}", "equal to Pillow"],
        [
            [
                row["decoder"],
                f"{row['microseconds']:.0f}",
                f"{row['images_per_second']:,.0f}",
                f"{row['over_baseline']:.2f}x",
                row["identical"],
            ]
            for row in rows
        ],
    )
    return (
        f"## Decoding alone, one core\n\n{conditions(head)}\nPer photo, in memory. A region is "
        f"what RandomResizedCrop draws.\n\n{body}"
    )


def resize(head: Row, rows: list[Row]) -> str:
    """The section about resizing alone."""
    parts = [
        f"## Resizing alone, one core\n\n{conditions(head)}\nFrom decoded pixels to normalised "
        "float32 NCHW, microseconds per photo.\n"
    ]
    for workload, measured in by_workload(rows).items():
        parts.append(
            table(
                [workload, "microseconds", "stoker is", "equal to Pillow"],
                [
                    [
                        row["resizer"],
                        f"{row['microseconds']:.0f}",
                        f"{row['first_over_this']:.2f}x",
                        row["identical"],
                    ]
                    for row in measured
                ],
            )
        )
    return "\n".join(parts)


def scaling(head: Row, rows: list[Row]) -> str:
    """The section about threads."""
    body = table(
        ["loader", "threads", "images/s", "CPU ms/image"],
        [
            [
                LOADER_NAMES[row["loader"]],
                row["threads"],
                f"{row['images_per_second']:,.0f}",
                f"{row['cpu_ms_per_image']:.2f}",
            ]
            for row in rows
        ],
    )
    return (
        f"## Threads\n\n{conditions(head)}\n{WORKLOAD_NAMES[head['workload']]}. 0 works on the "
        f"calling thread.\n\n{body}"
    )


def memory(head: Row, rows: list[Row]) -> str:
    """The section about memory over epochs."""
    shown = [row for row in rows if row["epoch"] in (0, 1, 4, 9, 14, rows[-1]["epoch"])]
    body = table(
        ["epoch", "resident MiB", "threads", "descriptors"],
        [
            [row["epoch"] + 1, f"{row['resident_mib']:.0f}", row["threads"], row["descriptors"]]
            for row in shown
        ],
    )
    return (
        f"## Memory over epochs\n\n{conditions(head)}\nFrom the second to the last epoch resident "
        f"memory changed by {head['growth']:+.1%}.\n\n{body}"
    )


SECTIONS = {
    "loaders": loaders,
    "decode": decode,
    "resize": resize,
    "scaling": scaling,
    "memory": memory,
}


def load(name: str) -> tuple[Row, list[Row]] | None:
    """Header and rows of one result, or None where it was not measured."""
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        return None
    head, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return head, rows


def page() -> str:
    """docs/benchmarks.md."""
    parts = [INTRODUCTION]
    for name, section in SECTIONS.items():
        result = load(name)
        if result is not None:
            parts.append(section(*result))
    return "\n".join(parts)


def summary() -> str:
    """The README's table: images/s of every loader and workload."""
    result = load("loaders")
    if result is None:
        return "Not measured yet: `scripts/bench` fills this in.\n"
    head, rows = result
    workloads = by_workload(rows)
    rates = {(row["loader"], row["workload"]): row for row in rows}
    names = list(dict.fromkeys(row["loader"] for row in rows))

    def cell(loader: str, workload: str) -> str:
        row = rates.get((loader, workload))
        if row is None:
            return "-"
        shown = f"{row['images_per_second']:,.0f}"
        return shown if loader == "stoker" else f"{shown} ({row['first_over_this']:.1f}x)"

    body = table(
        ["images/s (stoker is ... times as fast)", *workloads],
        [[LOADER_NAMES[name], *[cell(name, workload) for workload in workloads]] for name in names],
    )
    return (
        f"{body}\n{rows[0]['threads']} threads or worker processes; {head['machine']}; "
        f"{head['images']} photos of {head['bytes_per_image'] // 1000} kB on average. Only stoker "
        "and torch with PIL give the same pixels. More, with versions and commands: "
        "[docs/benchmarks.md](docs/benchmarks.md).\n"
    )


def formats() -> str:
    """The table of formats.md: how fast each format is read."""
    result = load("formats")
    if result is None:
        return "Not measured yet: `scripts/bench FOLDER formats` fills this in.\n"
    head, rows = result
    body = table(
        [
            "format",
            "warm, images/s",
            "of the folder's",
            "cold, images/s",
            "of the folder's",
            "first opening",
            "later",
            "kB/image",
        ],
        [
            [
                row["format"],
                f"{row['warm_images_per_second']:,}",
                f"{row['warm_over_folder']:.2f}x",
                f"{row['cold_images_per_second']:,}",
                f"{row['cold_over_folder']:.2f}x",
                f"{row['first_open_seconds']:.2f} s",
                f"{row['open_seconds']:.2f} s",
                f"{row['bytes_per_image'] / 1000:.0f}",
            ]
            for row in rows
        ],
    )
    return (
        f"{body}\n{head['measured']:,} photos, RandomResizedCrop(224) and flip, shuffled, medians "
        "of rounds in turn. Warm: from the page cache; cold: after the kernel was told to drop it. "
        f"{conditions(head)}"
    )


def diagnose() -> str:
    """The worked example of diagnose.md: what was planted, found, predicted and measured."""
    result = load("diagnose")
    if result is None:
        return "Not measured yet: `scripts/bench FOLDER diagnose` fills this in.\n"
    head, rows = result
    body = table(
        ["planted", "what binds", "predicted", "measured", "images/s before", "after"],
        [
            [
                row["case"],
                row["stage"],
                f"{row['predicted_gain']:.2f}x",
                f"{row['measured_gain']:.2f}x",
                f"{row['before_images_per_second']:,}",
                f"{row['after_images_per_second']:,}",
            ]
            for row in rows
        ],
    )
    told = "".join(
        f"- {row['case']}: {row['sentence']}. Applied: {row['action']}.\n" for row in rows
    )
    return (
        f"{body}\nWhat `stoker diagnose` said of each, and what was applied:\n\n{told}\n"
        f"Medians of {head['rounds']} rounds. {conditions(head)}"
    )


def order_name(row: Row) -> str:
    """What an order is called in the table of order.md."""
    if row["order"] == "buffer":
        return f"a buffer of {row['size']:,}"
    if row["order"] != "runs":
        return f'`order="{row["order"]}"`'
    strands = f", strands={row['strands']}" if row["strands"] > 1 else ""
    return f"`Runs(window={row['size']:_}{strands})`"


def shuffles() -> str:
    """The table of order.md: how well orders mix."""
    result = load("shuffles")
    if result is None:
        return "Not measured yet: `scripts/bench FOLDER shuffles` fills this in.\n"
    head, rows = result
    body = table(
        [
            "order",
            "same shard",
            "bits, sorted",
            "bits, packed shuffled",
            "neighbours apart",
            "shards per 1,000",
            f"of a rank of {head['ranks']}",
        ],
        [
            [
                order_name(row),
                f"{row['same_shard']:.1%}",
                f"{row['bits_sorted']:.2f}",
                f"{row['bits_mixed']:.2f}",
                f"{row['apart']:.1%}",
                f"{row['shards_per_thousand']:.0f}",
                "-" if row["order"] == "buffer" else f"{row['shards_of_a_rank']:,.0f}",
            ]
            for row in rows
        ],
    )
    return (
        f"{body}\n{head['samples']:,} samples of {head['classes']:,} classes in "
        f"{head['shards']:,} shards, batches of {head['batch']}; `{head['command']}` gives the "
        "same figures on any machine.\n"
    )


def between_marks(path: Path, rendered: str) -> str:
    """A page with what is between its marks replaced."""
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{rendered}\n{END}{after}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    wanted = {
        PAGE: page(),
        README: between_marks(README, summary()),
        FORMATS: between_marks(FORMATS, formats()),
        DIAGNOSE: between_marks(DIAGNOSE, diagnose()),
        ORDER: between_marks(ORDER, shuffles()),
    }
    stale = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if options.check:
        if stale:
            sys.exit(f"not as rendered: {', '.join(path.name for path in stale)}")
        return
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
