"""What this process may use of the machine: cores, and how many processes share them."""

from __future__ import annotations

import os
from math import ceil, floor
from pathlib import Path


def _quota_v2(text: str) -> float | None:
    quota, period = [*text.split(), "100000"][:2]
    return None if quota == "max" else int(quota) / int(period)


def cgroup_folders(
    controller: str, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[Path]:
    """The folders of this process's cgroup (v1 or v2) and of those above it, nearest first.

    Args:
        controller: of version 1: "cpu", "memory".
        proc: where the system shows processes.
        cgroups: where it shows cgroups.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base = cgroups
        elif controller in controllers.split(","):
            base = cgroups / controllers
            if not base.is_dir():
                base = cgroups / controller
        else:
            continue
        # In a container the path is the host's and may not exist: there the mount is the cgroup.
        inside = base / path.lstrip("/")
        for folder in [inside, *inside.parents]:
            found.append(folder)
            if folder == base:
                break
    return found


def _cgroup_cores(proc: Path, cgroups: Path) -> float | None:
    """The smallest CPU quota, in cores, of this process's cgroup (v1 or v2) and those above it."""
    found: list[float] = []
    for folder in cgroup_folders("cpu", proc, cgroups):
        try:
            if (folder / "cpu.max").is_file():
                cores = _quota_v2((folder / "cpu.max").read_text())
            elif (folder / "cpu.cfs_quota_us").is_file():
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
                cores = quota / period if quota > 0 else None
            else:
                cores = None
        except (OSError, ValueError):
            cores = None
        if cores:
            found.append(cores)
    return min(found) if found else None


def usable_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that this process may use, by its affinity mask and its cgroup's CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        cores: float = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_cores(proc, cgroups)
    return min(cores, quota) if quota else cores


def local_world_size() -> int:
    """Processes of this job on this machine, as torchrun says (LOCAL_WORLD_SIZE), else 1."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(value)) if value.isdigit() else 1


def default_threads() -> int:
    """Native threads where ``num_workers`` is left out: 3/4 of this rank's cores, at least 1."""
    return max(1, floor(0.75 * usable_cores() / local_world_size()))


def most_workers() -> int:
    """More workers than this only take cores from each other."""
    return max(1, ceil(usable_cores() / local_world_size()))


def rank_and_world() -> tuple[int, int]:
    """Rank and number of processes of this job by RANK and WORLD_SIZE, as torchrun sets them.

    One process where either is missing.

    Raises:
        ValueError: they are no numbers, or the rank is not below the number of processes.
    """
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world is None:
        return 0, 1
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise ValueError(f"RANK={rank} and WORLD_SIZE={world}: expected 0 <= RANK < WORLD_SIZE")
    return int(rank), int(world)
