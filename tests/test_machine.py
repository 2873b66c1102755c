"""Usable cores: affinity, cgroup v1 and v2 quotas, processes on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker import machine


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowed: int) -> float:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
    return machine.usable_cores(tmp_path / "proc", tmp_path / "cgroup")


def test_affinity_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cores(monkeypatch, tmp_path, 6) == 6


def test_version_2_takes_the_smallest_quota_on_the_way_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path / "cgroup/a/b/cpu.max", "max 100000\n")
    write(tmp_path / "cgroup/a/cpu.max", "250000 100000\n")
    write(tmp_path / "cgroup/cpu.max", "800000 100000\n")
    assert cores(monkeypatch, tmp_path, 16) == 2.5
    assert cores(monkeypatch, tmp_path, 2) == 2


def test_in_a_container_the_mount_is_the_cgroup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/host/path/unseen\n")
    write(tmp_path / "cgroup/cpu.max", "50000 100000\n")
    assert cores(monkeypatch, tmp_path, 16) == 0.5


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
def test_version_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mount: str) -> None:
    write(tmp_path / "proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/x\n")
    write(tmp_path / f"cgroup/{mount}/x/cpu.cfs_quota_us", "300000\n")
    write(tmp_path / f"cgroup/{mount}/x/cpu.cfs_period_us", "100000\n")
    assert cores(monkeypatch, tmp_path, 16) == 3
    write(tmp_path / f"cgroup/{mount}/x/cpu.cfs_quota_us", "-1\n")
    assert cores(monkeypatch, tmp_path, 16) == 16


def test_unreadable_quotas_are_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "cgroup/cpu.max", "what is this\n")
    assert cores(monkeypatch, tmp_path, 4) == 4


@pytest.mark.parametrize(
    ("usable", "ranks", "threads", "most"),
    [(8.0, "", 6, 8), (8.0, "4", 1, 2), (2.0, "", 1, 2), (0.5, "", 1, 1), (96.0, "8", 9, 12)],
)
def test_defaults(
    monkeypatch: pytest.MonkeyPatch, usable: float, ranks: str, threads: int, most: int
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: usable)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert (machine.default_threads(), machine.most_workers()) == (threads, most)
