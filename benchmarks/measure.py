"""What every benchmark needs: the machine's facts, CPU time with children, JSON lines."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

PACKAGES = [
    "stoker",
    "torch",
    "torchvision",
    "pillow",
    "numpy",
    "opencv-python-headless",
    "nvidia-dali-cuda130",
    "simplejpeg",
    "spdl",
    "ffcv",
]


def processor() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def simd_level() -> str:
    """The widest instruction set that stoker uses here."""
    from stoker import engine

    return engine.level()


def header(benchmark: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The first line of a result: what ran where."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    folder = Path(arguments.folder)
    images = [path for path in folder.rglob("*") if path.is_file()]
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *shown_arguments(sys.argv)]),
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.system()}",
        "simd": simd_level(),
        "images": len(images),
        "bytes_per_image": sum(path.stat().st_size for path in images) // max(1, len(images)),
        "versions": versions,
    }


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without the places on this machine that mean nothing to a reader."""
    shown, skip = [f"benchmarks/{Path(arguments[0]).name}"], False
    for argument in arguments[1:]:
        if skip or argument.startswith("--output"):
            skip = not skip and argument == "--output"
            continue
        shown.append("FOLDER" if Path(argument).is_dir() else argument)
    return shown


def cpu_seconds() -> float:
    """User and system time of this process and of all its children, running or ended."""
    here = os.times()
    total = sum(here[:4])
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def resident_bytes() -> int:
    """Resident memory of this process and its children; shared pages count in each."""
    total: int = psutil.Process().memory_info().rss
    for child in psutil.Process().children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="photos, one subfolder per class")
    parser.add_argument("--output", type=Path, help="JSON lines go here, too")
    return parser


def write(output: Path | None, rows: list[dict[str, Any]]) -> None:
    """Prints the rows as JSON lines, and keeps them in a file if asked."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    sys.stdout.write(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")


def note(text: str) -> None:
    """A line for the person who watches."""
    print(f"# {text}", file=sys.stderr, flush=True)
