"""What the system counts, read from trees of files as the kernel shows them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from stoker import vitals
from stoker.vitals import Counters, Place


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


STAT = """cpu  300 0 100 1600 0 0 0 0 0 0
cpu0 {} 0 0 {} 0 0 0 0 0 0
cpu1 100 0 0 900 50 0 0 0 0 0
intr 1 2 3
"""
DISKS = "   8 0 sda 10 0 {} 5 0 0 0 0 0 {} 9 0 0 0 0 0 0\n   7 0 loop0 0 0 0 0 0 0 0 0 0 0 0\n"


def tree(tmp_path: Path) -> tuple[Path, Path]:
    write(tmp_path / "proc/self/cgroup", "0::/box\n")
    return tmp_path / "proc", tmp_path / "sys"


def test_nothing_is_there(tmp_path: Path) -> None:
    counters = vitals.look(tmp_path, tmp_path, lambda: 5.0)
    assert counters == Counters(5.0)
    assert vitals.between(counters, counters).cpu is None
    assert vitals.memory(tmp_path, tmp_path, str(tmp_path / "none")).limit is None
    assert vitals.place_of(str(tmp_path), tmp_path, tmp_path) == Place()
    assert vitals.queued_seconds(tmp_path) == 0


def test_cores_disks_and_version_2(tmp_path: Path) -> None:
    proc, sys_ = tree(tmp_path)
    box = sys_ / "fs/cgroup/box"
    pressure = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0 total=7\n"
    stat = "usage_usec 9\nnr_periods {}\nnr_throttled {}\nthrottled_usec {}\n"
    write(proc / "stat", STAT.format(100, 900))
    write(proc / "diskstats", DISKS.format(1000, 100))
    write(box / "cpu.stat", stat.format(10, 2, 1_000_000))
    write(box / "memory.pressure", pressure.format(0))
    before = vitals.look(proc, sys_, lambda: 0.0)
    write(proc / "stat", STAT.format(190, 910))
    write(proc / "diskstats", DISKS.format(21000, 1600))
    write(box / "cpu.stat", stat.format(30, 17, 4_500_000))
    write(box / "memory.pressure", pressure.format(500_000))
    found = vitals.between(before, vitals.look(proc, sys_, lambda: 2.0), [0.2, 0.6])
    assert found.seconds == 2
    assert found.cores == pytest.approx((0.9, 0.0))
    assert found.cpu == pytest.approx(0.45)
    assert found.throttled == pytest.approx(0.75)
    assert found.throttled_seconds == pytest.approx(3.5)
    assert found.memory_stalled == pytest.approx(0.25)
    assert found.disk_bytes_per_second == {"sda": 20000 * 512 / 2}
    assert found.disk_busy == {"sda": pytest.approx(0.75)}
    assert found.gpu_busy == pytest.approx(0.4)


def test_version_1(tmp_path: Path) -> None:
    proc, sys_ = tmp_path / "proc", tmp_path / "sys"
    write(proc / "self/cgroup", "4:cpu,cpuacct:/box\n3:memory:/box\n0::/\n")
    write(
        sys_ / "fs/cgroup/cpu/box/cpu.stat",
        "nr_periods 4\nnr_throttled 1\nthrottled_time 5000000\n",
    )
    box = sys_ / "fs/cgroup/memory/box"
    write(box / "memory.limit_in_bytes", "1000\n")
    write(box / "memory.usage_in_bytes", "700\n")
    write(box / "memory.stat", "cache 1\ntotal_cache 300\n")
    write(box.parent / "memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(proc / "meminfo", "MemTotal:       8 kB\nMemAvailable:       4 kB\n")
    counters = vitals.look(proc, sys_, lambda: 0.0)
    assert counters.periods == (4, 1)
    assert counters.throttled_seconds == pytest.approx(0.005)
    memory = vitals.memory(proc, sys_, str(tmp_path / "none"))
    assert (memory.limit, memory.room, memory.shm) == (1000, 600, None)


def test_memory_of_version_2_and_of_the_machine(tmp_path: Path) -> None:
    proc, sys_ = tree(tmp_path)
    write(proc / "meminfo", "MemTotal: 1000 kB\nMemAvailable: 1 kB\n")
    box = sys_ / "fs/cgroup/box"
    write(box / "memory.max", "max\n")
    write(box.parent / "memory.max", "500000\n")
    write(box.parent / "memory.current", "400000\n")
    write(box.parent / "memory.stat", "anon 9\nfile 50000\n")
    memory = vitals.memory(proc, sys_, "/")
    assert (memory.limit, memory.room) == (500000, 1024)
    assert memory.shm is not None


@pytest.mark.parametrize("text", ["", "cpu0\n", "cpu0 x y\n", "some total=\n", "nr_periods -\n"])
def test_files_of_nonsense(tmp_path: Path, text: str) -> None:
    proc, sys_ = tree(tmp_path)
    for name in ("stat", "diskstats", "mounts", "meminfo", "pressure/memory"):
        write(proc / name, text)
    write(sys_ / "fs/cgroup/box/cpu.stat", text)
    counters = vitals.look(proc, sys_, lambda: 0.0)
    assert vitals.between(counters, counters).throttled is None
    assert vitals.memory(proc, sys_).limit is None


def test_where_a_path_is_stored(tmp_path: Path) -> None:
    proc, sys_ = tmp_path / "proc", tmp_path / "sys"
    data = tmp_path / "my data"
    data.mkdir()
    escaped = str(data).replace(" ", r"\040")
    write(proc / "mounts", f"/dev/sda1 / ext4 rw 0 0\nserver:/x {escaped} nfs4 rw 0 0\n")
    assert vitals.place_of(str(data / "a.jpg"), proc, sys_).filesystem == "nfs4"
    assert vitals.place_of(f"{data}2", proc, sys_).filesystem == "ext4"
    device = os.stat(data).st_dev
    partition = sys_ / "devices/sda/sda1"
    write(partition / "partition", "1\n")
    write(sys_ / "devices/sda/queue/rotational", "1\n")
    block = sys_ / "dev/block"
    block.mkdir(parents=True)
    (block / f"{os.major(device)}:{os.minor(device)}").symlink_to(partition)
    assert vitals.place_of(str(data), proc, sys_) == Place("nfs4", "sda", True)


@pytest.mark.parametrize(
    ("place", "latency", "kind"),
    [
        (Place("ext4", "sda", True), 0.012, "hdd"),
        (Place("ext4", "vda", True), 0.0002, "ssd"),  # virtual disks say anything
        (Place("ext4", "nvme0n1", False), 0.0001, "ssd"),
        (Place("ext4", "vda", False), 0.006, "network"),
        (Place("nfs4"), 0.0001, "network"),
        (Place("fuse.gcsfuse"), 0.05, "network"),
        (Place("tmpfs"), 0.00001, "memory"),
        (Place(), 0.012, "hdd"),
    ],
)
def test_kind_of_storage(place: Place, latency: float, kind: str) -> None:
    assert place.kind(latency) == kind


class _Error(Exception):
    pass


@pytest.mark.parametrize(("gpus", "busy"), [([20, 90], 0.9), ([], None)])
def test_gpus(monkeypatch: pytest.MonkeyPatch, gpus: list[int], busy: float | None) -> None:
    nvml = ModuleType("pynvml")
    vars(nvml).update(
        NVMLError=_Error,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUtilizationRates=lambda number: SimpleNamespace(gpu=gpus[number]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reader = vitals.gpu_reader()
    assert (None if reader is None else reader()) == busy


def test_without_nvml_or_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert vitals.gpu_reader() is None

    def fails() -> None:
        raise _Error

    nvml = ModuleType("pynvml")
    vars(nvml).update(NVMLError=_Error, nvmlInit=fails)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert vitals.gpu_reader() is None
