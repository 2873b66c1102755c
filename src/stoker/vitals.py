"""What the system counts while something runs: CPU, quota, memory, disks and GPUs.

Two looks at the counters (`look`) and their difference (`between`). Everything is read from files
below /proc and /sys, which tests put elsewhere; where a system does not tell something, it is None.

Sources: proc(5) for stat, meminfo, mounts and diskstats (whose sectors are of 512 bytes on every
disk); the kernel's admin-guide/cgroup-v1 and cgroup-v2 for quotas and memory, accounting/psi for
pressure.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stoker.machine import cgroup_folders

PROC, SYS = Path("/proc"), Path("/sys")
_SECTOR_BYTES = 512
_NO_LIMIT = 1 << 60
_NETWORK = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs",
    "afs", "gfs2", "ocfs2", "orangefs", "wekafs", "virtiofs",
)  # fmt: skip
_REMOTE_FUSE = re.compile(
    r"fuse\.(sshfs|s3fs|gcsfuse|goofys|rclone|juicefs|glusterfs|mount-s3|.*s3)"
)
_HDD_SECONDS = 3e-3


@dataclass(frozen=True)
class Counters:
    """What the system has counted up to a moment.

    Attributes:
        seconds: the clock.
        cores: busy and all ticks of each core.
        periods: scheduling periods of the CPU quota, and those in which it was used up.
        throttled_seconds: how long this cgroup's threads were stopped by it.
        stalled_seconds: how long some task waited for memory (PSI).
        disks: of each, bytes read and seconds busy.
    """

    seconds: float
    cores: tuple[tuple[float, float], ...] = ()
    periods: tuple[int, int] | None = None
    throttled_seconds: float | None = None
    stalled_seconds: float | None = None
    disks: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Vitals:
    """How busy the system was between two looks.

    Attributes:
        seconds: between them.
        cores: busy share of each core, of all processes.
        throttled: share of the quota's periods in which it was used up.
        throttled_seconds: how long threads were stopped by the quota.
        memory_stalled: share of the time in which some task waited for memory.
        disk_bytes_per_second, disk_busy: of each disk that was read from.
        gpu_busy: mean share of the samples of the busiest GPU.
    """

    seconds: float
    cores: tuple[float, ...] = ()
    throttled: float | None = None
    throttled_seconds: float | None = None
    memory_stalled: float | None = None
    disk_bytes_per_second: dict[str, float] = field(default_factory=dict)
    disk_busy: dict[str, float] = field(default_factory=dict)
    gpu_busy: float | None = None

    @property
    def cpu(self) -> float | None:
        """Busy share of all cores together."""
        return sum(self.cores) / len(self.cores) if self.cores else None


@dataclass(frozen=True)
class Memory:
    """Memory in bytes.

    Attributes:
        limit: the smaller of the machine's and the cgroup's.
        room: for caching files without anything being pushed out: free or a cache already.
        shm: size of /dev/shm; None where there is none.
    """

    limit: int | None
    room: int | None
    shm: int | None


@dataclass(frozen=True)
class Place:
    """Where a path is stored.

    Attributes:
        filesystem: its type; "" if not known.
        disk: the name of its disk; "" where there is none.
        rotational: what the disk says of itself; virtual ones say anything.
    """

    filesystem: str = ""
    disk: str = ""
    rotational: bool | None = None

    def kind(self, latency_seconds: float) -> str:
        """One of "memory", "network", "hdd", "ssd": by filesystem, and by latency of a cold read.

        What is measured decides where the disk says otherwise: a "rotational" one that answers at
        once is no HDD to a loader, and a flash disk that takes milliseconds is behind a network.
        """
        if self.filesystem in ("tmpfs", "ramfs"):
            return "memory"
        if self.filesystem in _NETWORK or _REMOTE_FUSE.fullmatch(self.filesystem):
            return "network"
        if latency_seconds < _HDD_SECONDS:
            return "ssd"
        return "network" if self.rotational is False else "hdd"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a file of "name number" lines."""
    found = {}
    for line in _text(path).splitlines():
        name, _, value = line.replace(":", " ").partition(" ")
        number = value.split()[:1]
        if number and number[0].isdigit():
            found[name] = int(number[0])
    return found


def look(
    proc: Path = PROC, sys: Path = SYS, clock: Callable[[], float] = time.monotonic
) -> Counters:
    """The counters now."""
    cores = []
    for line in _text(proc / "stat").splitlines():
        if re.match(r"cpu\d", line):
            ticks = [int(number) for number in line.split()[1:9] if number.isdigit()]
            if len(ticks) >= 5:
                cores.append((float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))))
    periods, throttled = None, None
    for folder in cgroup_folders("cpu", proc, sys / "fs/cgroup"):
        numbers = _numbers(folder / "cpu.stat")
        if numbers.get("nr_periods"):  # the nearest that has a quota
            periods = numbers["nr_periods"], numbers.get("nr_throttled", 0)
            throttled = numbers.get("throttled_usec", 0) / 1e6
            throttled += numbers.get("throttled_time", 0) / 1e9
            break
    stalled = None
    pressures = [folder / "memory.pressure" for folder in _folders("memory", proc, sys)[:1]]
    for path in [*pressures, proc / "pressure/memory"]:
        found = re.search(r"^some .*total=(\d+)", _text(path), re.MULTILINE)
        if found:
            stalled = int(found[1]) / 1e6
            break
    disks = {}
    for line in _text(proc / "diskstats").splitlines():
        fields = line.split()
        if len(fields) >= 13 and fields[5].isdigit() and fields[12].isdigit():
            disks[fields[2]] = int(fields[5]) * _SECTOR_BYTES, int(fields[12]) / 1e3
    return Counters(clock(), tuple(cores), periods, throttled, stalled, disks)


def _folders(controller: str, proc: Path, sys: Path) -> list[Path]:
    return cgroup_folders(controller, proc, sys / "fs/cgroup")


def queued_seconds(proc: Path = PROC) -> float:
    """How long the calling thread was ready to run and had no core, so far; 0 if not told."""
    fields = _text(proc / "thread-self/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) == 3 and fields[1].isdigit() else 0.0


def between(before: Counters, after: Counters, gpu: list[float] | None = None) -> Vitals:
    """What happened between two looks; ``gpu`` has samples of the busy share."""
    seconds = max(after.seconds - before.seconds, 1e-9)
    cores = tuple(
        min(1.0, max(0.0, (busy - busy_before) / max(1.0, ticks - ticks_before)))
        for (busy_before, ticks_before), (busy, ticks) in zip(
            before.cores, after.cores, strict=False
        )
    )
    throttled = stopped = stalled = None
    if after.periods and after.throttled_seconds is not None:
        first = before.periods or (0, 0)
        throttled = (after.periods[1] - first[1]) / max(1, after.periods[0] - first[0])
        stopped = after.throttled_seconds - (before.throttled_seconds or 0.0)
    if after.stalled_seconds is not None and before.stalled_seconds is not None:
        stalled = min(1.0, (after.stalled_seconds - before.stalled_seconds) / seconds)
    rates, busy_disks = {}, {}
    for name, (bytes_read, busy_seconds) in after.disks.items():
        old_bytes, old_busy = before.disks.get(name, (0, 0.0))
        if bytes_read > old_bytes:
            rates[name] = (bytes_read - old_bytes) / seconds
            busy_disks[name] = min(1.0, (busy_seconds - old_busy) / seconds)
    mean = sum(gpu) / len(gpu) if gpu else None
    return Vitals(seconds, cores, throttled, stopped, stalled, rates, busy_disks, mean)


def memory(proc: Path = PROC, sys: Path = SYS, shm: str = "/dev/shm") -> Memory:
    """How much memory there is, and how much of it may cache files."""
    machine = {name: 1024 * kib for name, kib in _numbers(proc / "meminfo").items()}
    limits = [machine["MemTotal"]] if "MemTotal" in machine else []
    rooms = [machine["MemAvailable"]] if "MemAvailable" in machine else []
    for folder in _folders("memory", proc, sys):
        for limit_name, usage_name, cache in (
            ("memory.max", "memory.current", "file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
        ):
            limit = _text(folder / limit_name).strip()
            if limit.isdigit() and int(limit) < _NO_LIMIT:
                limits.append(int(limit))
                usage = _text(folder / usage_name).strip()
                if usage.isdigit():
                    cached = _numbers(folder / "memory.stat").get(cache, 0)
                    rooms.append(max(0, int(limit) - int(usage) + cached))
    try:
        found = os.statvfs(shm)
        shm_bytes: int | None = found.f_frsize * found.f_blocks
    except (OSError, AttributeError):
        shm_bytes = None
    return Memory(min(limits, default=None), min(rooms, default=None), shm_bytes)


def place_of(path: str, proc: Path = PROC, sys: Path = SYS) -> Place:
    """Where ``path`` is stored."""
    real = os.path.realpath(path)
    filesystem, longest = "", -1
    for line in _text(proc / "mounts").splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[1])
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= longest:  # of two at one place, the later covers the earlier
            filesystem, longest = fields[2], len(mount)
    try:
        device = os.stat(real).st_dev
    except OSError:
        return Place(filesystem)
    block = sys / "dev/block" / f"{os.major(device)}:{os.minor(device)}"
    if not block.exists():
        return Place(filesystem)
    block = block.resolve()
    disk = block.parent if (block / "partition").exists() else block
    rotational = _text(disk / "queue/rotational").strip()
    return Place(filesystem, disk.name, None if not rotational else rotational == "1")


def gpu_reader() -> Callable[[], float] | None:
    """A function that gives the busy share of the busiest GPU; None without NVML or without a GPU.

    NVML is that of the extra ``stoker[nvml]``.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(number)
            for number in range(pynvml.nvmlDeviceGetCount())
        ]
    except pynvml.NVMLError:
        return None
    if not handles:
        return None

    def busy() -> float:
        try:
            return float(max(pynvml.nvmlDeviceGetUtilizationRates(h).gpu for h in handles)) / 100
        except pynvml.NVMLError:
            return 0.0

    return busy
