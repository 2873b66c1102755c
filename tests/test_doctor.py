"""`stoker doctor`: planted faults are told by name with their remedy, and no others.

The faults are planted in the facts, and where that can be done, in a real process.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker import engine, proof
from stoker.doctor import findings
from stoker.environment import Facts, Storage, _needs, facts_of, free_memory, storage_of
from stoker.finding import as_text
from stoker.links import Links, Pair
from stoker.rendezvous import of_links, of_versions

HEALTHY = Facts(
    versions={"python": "3.12.3", "torch": "2.8.0", "torchvision": "0.23.0", "pillow": "12.0.0"},
    broken={},
    torchvision_needs="==2.8.0",
    torch_cuda=(12, 8),
    driver_cuda=(12, 9),
    devices=("/dev/nvidia0", "/dev/nvidia1"),
    gpus=("NVIDIA H200", "NVIDIA H200"),
    cuda_message="",
    cores=16.0,
    machine_cores=64,
    torch_threads=8,
    memory_bytes=64 * 2**30,
    shared_memory_bytes=8 * 2**30,
    open_files=(65536, 65536),
    storage=Storage("/data", "SSD", "ext4", "/data", (1000, 1000)),
    interfaces=("lo", "eth0"),
    host_address="10.1.0.7",
    master_found=True,
    environment={
        **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        **{"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "trainer-0", "MASTER_PORT": "29400"},
    },
    level="avx2",
    pillow_differs="",
    user=(1000, 1000),
)


def within(facts: Facts, **environment: str | None) -> Facts:
    """The facts with other variables; None takes one away."""
    changed = {**facts.environment, **environment}
    return replace(facts, environment={k: v for k, v in changed.items() if v is not None})


def test_a_healthy_environment() -> None:
    found = findings(HEALTHY)
    assert [finding.state for finding in found] == ["ok"] * len(found), as_text(found)
    assert len(found) == 15 and not any(finding.remedy for finding in found)


ALONE = replace(HEALTHY, environment={})
EIGHT_GPUS = replace(HEALTHY, gpus=("NVIDIA H200",) * 8, torch_threads=1)
NO_GPU = replace(ALONE, gpus=(), devices=(), driver_cuda=None)

# name of the check, its state, what is planted, what is told, what the remedy says
PLANTED: list[tuple[str, str, Facts, str, str]] = [
    (
        "torchvision",
        "fault",
        replace(HEALTHY, torchvision_needs="==2.7.1"),
        "built for torch==2.7.1, and this is torch 2.8.0",
        "pip install torch==2.8.0 torchvision",
    ),
    (
        "torchvision",
        "fault",
        replace(HEALTHY, broken={"torchvision": "operator torchvision::nms does not exist"}),
        "nms does not exist",
        "both in one command",
    ),
    (
        "torchvision",
        "fault",
        replace(
            HEALTHY,
            versions={**HEALTHY.versions, "torch": "2.8.0+cu128", "torchvision": "0.23.0+cpu"},
        ),
        "builds for different devices",
        "same index",
    ),
    (
        "torch",
        "fault",
        replace(HEALTHY, broken={"torch": "libcudnn.so.9: cannot open shared object file"}),
        "libcudnn.so.9",
        "--force-reinstall torch",
    ),
    (
        "native engine",
        "fault",
        replace(HEALTHY, level="", broken={"stoker.engine": "cannot import name '_native'"}),
        "cannot import name '_native'",
        "C++20 compiler",
    ),
    ("SIMD", "warning", replace(HEALTHY, level="scalar"), "neither AVX2", "-cpu host"),
    (
        "Pillow",
        "warning",
        replace(HEALTHY, pillow_differs="its resize has another order"),
        "12.0.0 is not known",
        "pip install --force-reinstall 'pillow>=11'",
    ),
    (
        "CUDA",
        "fault",
        replace(ALONE, gpus=(), torch_cuda=None),
        "built for CPUs only",
        "pip install --force-reinstall torch torchvision",
    ),
    (
        "CUDA",
        "fault",
        within(replace(ALONE, gpus=()), CUDA_VISIBLE_DEVICES=""),
        "CUDA_VISIBLE_DEVICES='' hides them",
        "from 0 to 1",
    ),
    (
        "CUDA",
        "fault",
        replace(ALONE, gpus=(), cuda_message="forward compatibility was attempted"),
        "forward compatibility was attempted",
        "nvidia-smi",
    ),
    ("CUDA", "warning", NO_GPU, "runs on the CPU", "--gpus all"),
    (
        "driver",
        "fault",
        replace(ALONE, gpus=(), driver_cuda=(11, 4)),
        "serves CUDA up to 11.4, and torch is built for CUDA 12.8",
        "install a driver",
    ),
    ("driver", "fault", replace(ALONE, driver_cuda=None), "libcuda.so.1", "compute,utility"),
    (
        "cores",
        "warning",
        replace(ALONE, cores=4.0, torch_threads=64),
        "4 of 64 cores, for 1 rank, and torch computes with 64 threads",
        "OMP_NUM_THREADS=4",
    ),
    ("cores", "warning", replace(HEALTHY, cores=1.5), "1.5 of 64", "resources.limits.cpu"),
    ("memory", "warning", replace(HEALTHY, memory_bytes=3 * 2**30), "less than 2 GiB", "--memory"),
    (
        "shared memory",
        "warning",
        replace(HEALTHY, shared_memory_bytes=64 * 2**20),
        "64 MiB free",
        "--shm-size=8g",
    ),
    (
        "shared memory",
        "warning",
        replace(HEALTHY, shared_memory_bytes=None),
        "no /dev/shm",
        "Memory",
    ),
    ("open files", "fault", replace(HEALTHY, open_files=(128, -1)), "128 files", "ulimit -n 65536"),
    ("open files", "warning", replace(HEALTHY, open_files=(512, 512)), "512", "--ulimit nofile"),
    (
        "data",
        "warning",
        replace(HEALTHY, storage=Storage("/d", "network", "nfs4", "/d")),
        "nfs4, network storage",
        "stoker pack",
    ),
    ("data", "warning", replace(HEALTHY, storage=Storage("/d", "HDD", "xfs")), "turns", "SSD"),
    (
        "data",
        "warning",
        replace(HEALTHY, storage=Storage("/d", "overlay", "overlay")),
        "lost",
        "-v",
    ),
    (
        "data",
        "fault",
        replace(HEALTHY, storage=Storage("/workspace/data", "unreadable", owner=(1234, 5))),
        "user 1000:1000 may not read it, which belongs to 1234:5",
        "docker run --user 1234:5",
    ),
    ("data", "fault", replace(HEALTHY, storage=Storage("/d", "missing")), "no such", "mounted"),
    ("ranks", "fault", within(HEALTHY, RANK="4"), "RANK=4 and WORLD_SIZE=4", "torchrun"),
    ("ranks", "fault", within(HEALTHY, LOCAL_RANK="2"), "LOCAL_RANK=2", "torchrun"),
    ("ranks", "fault", within(EIGHT_GPUS, LOCAL_WORLD_SIZE="8"), "contradict", "torchrun"),
    ("ranks", "fault", within(HEALTHY, WORLD_SIZE=None), "no WORLD_SIZE", "torchrun"),
    ("ranks", "fault", within(HEALTHY, RANK="two"), "RANK=two: not a number", "torchrun"),
    ("rendezvous", "fault", within(HEALTHY, MASTER_ADDR=None), "MASTER_ADDR not set", "--rdzv-"),
    ("rendezvous", "fault", within(HEALTHY, MASTER_PORT="0"), "no port", "1 to 65535"),
    ("rendezvous", "fault", replace(HEALTHY, master_found=False), "stands for no", "headless"),
    (
        "rendezvous",
        "fault",
        within(HEALTHY, MASTER_ADDR="127.0.0.1"),
        "2 machines, and MASTER_ADDR=127.0.0.1",
        "rank 0's machine",
    ),
    (
        "GPU per rank",
        "fault",
        within(replace(HEALTHY, torch_threads=1), WORLD_SIZE="8", LOCAL_WORLD_SIZE="4"),
        "4 ranks on a machine with 2 GPUs",
        "--nproc_per_node=2",
    ),
    (
        "network interface",
        "fault",
        within(HEALTHY, NCCL_SOCKET_IFNAME="ib0"),
        "there is no interface ib0",
        "name one of eth0",
    ),
    (
        "network interface",
        "fault",
        within(HEALTHY, NCCL_SOCKET_IFNAME="lo"),
        "does not reach",
        "name one of eth0",
    ),
    (
        "network interface",
        "fault",
        within(HEALTHY, GLOO_SOCKET_IFNAME="eth"),  # NCCL takes beginnings, gloo does not
        "there is no interface eth",
        "unset GLOO_SOCKET_IFNAME",
    ),
    (
        "network interface",
        "fault",
        replace(HEALTHY, host_address="127.0.1.1"),
        "own name stands for 127.0.1.1",
        "GLOO_SOCKET_IFNAME to one of eth0",
    ),
    (
        "switches",
        "warning",
        within(HEALTHY, NCCL_P2P_DISABLE="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="0"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: a lost rank",
        "unset NCCL_P2P_DISABLE TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
]


@pytest.mark.parametrize(
    ("name", "state", "facts", "told", "remedy"), PLANTED, ids=[f"{p[0]}: {p[3]}" for p in PLANTED]
)
def test_a_planted_fault(name: str, state: str, facts: Facts, told: str, remedy: str) -> None:
    found = {finding.name: finding for finding in findings(facts)}
    assert found[name].state == state
    assert told in found[name].what
    assert remedy in found[name].remedy
    # Nothing else is blamed, but what one cause breaks twice.
    others = {finding.name for finding in found.values() if finding.state != "ok"} - {name}
    assert others <= {"CUDA", "driver"} and (not others or name in ("CUDA", "driver")), others


@pytest.mark.parametrize(
    "facts",
    [
        within(HEALTHY, NCCL_SOCKET_IFNAME="eth"),
        within(HEALTHY, NCCL_SOCKET_IFNAME="^docker,lo"),
        within(HEALTHY, NCCL_SOCKET_IFNAME="=eth0"),
        within(HEALTHY, GLOO_SOCKET_IFNAME="eth0"),
        within(replace(HEALTHY, host_address="127.0.1.1"), GLOO_SOCKET_IFNAME="eth0"),
        within(HEALTHY, NCCL_P2P_DISABLE="0"),
        replace(HEALTHY, open_files=(-1, -1)),
        replace(HEALTHY, driver_cuda=(12, 4)),  # minor versions are compatible
        replace(HEALTHY, driver_cuda=(13, 0)),
        replace(HEALTHY, torchvision_needs=">=2.8.0"),
        replace(HEALTHY, torchvision_needs=""),
        replace(ALONE, torch_threads=16),
        replace(HEALTHY, storage=Storage("s3://bucket/train", "remote")),
    ],
)
def test_what_is_no_fault(facts: Facts) -> None:
    found = findings(facts)
    assert {finding.state for finding in found} == {"ok"}, as_text(found)


def test_what_broken_torch_leaves() -> None:
    """The checks that need torch say nothing; those that do not still do."""
    broken = {"torch": "no", "torchvision": "no", "stoker.engine": "no"}
    found = {f.name: f for f in findings(replace(NO_GPU, broken=broken, level=""))}
    assert {name for name, f in found.items() if f.state == "fault"} == {"torch", "native engine"}
    assert "torchvision" not in found and "shared memory" in found


def test_ranks_that_differ() -> None:
    same = [HEALTHY.versions] * 3
    assert of_versions(same).state == "ok"
    other = {**HEALTHY.versions, "torch": "2.7.1"}
    finding = of_versions([*same, other])
    assert (
        finding.state == "fault" and "torch is 2.8.0 on rank 0 and 2.7.1 on rank 3" in finding.what
    )
    assert of_versions([*same, {**HEALTHY.versions, "numpy": "1"}]).state == "warning"


def test_a_slow_link() -> None:
    pairs = [Pair((rank, (rank + 1) % 4), 1e-4, 1e9) for rank in range(4)]
    assert of_links(Links("nccl", 4, 1e-4, 1e9, tuple(pairs))).state == "ok"
    pairs[2] = replace(pairs[2], bytes_per_second=2e8)
    finding = of_links(Links("nccl", 4, 1e-4, 1e9, tuple(pairs)))
    assert finding.state == "warning" and "rank 2 to 3" in finding.what
    assert "nvidia-smi topo -m" in finding.remedy


# Facts


def test_facts_are_those_of_this_process(tmp_path: Path) -> None:
    facts = facts_of(str(tmp_path))
    assert facts.versions["torch"] == torch.__version__.partition("+")[0] and not facts.broken
    assert facts.level == engine.level() and facts.pillow_differs == ""
    assert len(facts.gpus) == torch.cuda.device_count()
    assert facts.storage is not None and facts.storage.kind not in ("missing", "unreadable")
    assert facts.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert "lo" in facts.interfaces
    assert facts.shared_memory_bytes == pytest.approx(shutil.disk_usage("/dev/shm").free, rel=0.2)


def test_an_unknown_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder of other pixels is found out, and one whose resize is not known."""
    monkeypatch.setattr(proof, "_outcomes", {})
    expected = proof._expected

    def altered(*arguments: Any) -> Any:
        pixels = expected(*arguments)
        return pixels if isinstance(pixels, str) else pixels ^ 1

    monkeypatch.setattr(proof, "_expected", altered)
    assert "other values" in facts_of().pillow_differs
    monkeypatch.setattr(proof, "pass_order", lambda: None)
    assert "not known" in facts_of().pillow_differs


def _system(root: Path, mounts: str, turns: dict[str, str]) -> tuple[Path, Path]:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mounts)
    for device, number in turns.items():
        queue = root / "sys/dev/block" / device / "queue"
        queue.mkdir(parents=True)
        (queue / "rotational").write_text(number)
    return root / "proc", root / "sys"


@pytest.mark.parametrize(
    ("mount", "kind"),
    [
        ("8:1 / {} rw - ext4 /dev/sda1 rw", "HDD"),
        ("259:1 / {} rw - xfs /dev/nvme0n1p1 rw", "SSD"),
        ("254:0 / {} rw - ext4 /dev/vda rw", "virtual"),
        ("0:50 / {} rw shared:7 - nfs4 server:/data rw", "network"),
        ("0:51 / {} rw - fuse.s3fs s3fs rw", "network"),
        ("0:52 / {} rw - overlay overlay rw,lowerdir=/a", "overlay"),
        ("0:53 / {} rw - tmpfs tmpfs rw", "memory"),
        ("0:54 / {} rw - zfs pool rw", "unknown"),
    ],
)
def test_storage_is_told_by_its_mount(tmp_path: Path, mount: str, kind: str) -> None:
    place = tmp_path / "with space" / "data"
    place.mkdir(parents=True)
    point = str(place.parent).replace(" ", "\\040")
    lines = f"1 0 0:40 / / rw - squashfs none rw\n2 1 {mount.format(point)}\nnonsense\n"
    proc, system = _system(tmp_path, lines, {"8:1": "1\n", "259:1": "0\n"})
    found = storage_of(str(place), proc, system)
    assert (found.kind, found.mount) == (kind, str(place.parent))
    assert storage_of(f"{place}/train-{{000..009}}.tar", proc, system).kind == kind
    assert storage_of(str(tmp_path / "other"), proc, system).kind == "missing"
    assert storage_of("s3://bucket/x", proc, system).kind == "remote"


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="another user is made with setpriv")
def test_unreadable_data(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can become another user")
    code = "import sys; from stoker.environment import storage_of; print(storage_of(sys.argv[1]))"
    place = Path("/tmp") / f"unreadable-{os.getpid()}"
    place.mkdir(mode=0o700)
    try:
        # Whether that user may read this interpreter and this checkout is another matter.
        import_path = os.pathsep.join(sys.path)
        done = subprocess.run(
            ["setpriv", "--reuid=12345", "--clear-groups", sys.executable, "-c", code, str(place)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": import_path, "HOME": "/tmp"},
        )
    finally:
        place.rmdir()
    if done.returncode:
        pytest.skip(f"this Python does not run as another user: {done.stderr[-200:]}")
    assert "kind='unreadable'" in done.stdout and "owner=(0, 0)" in done.stdout


def test_free_memory(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (proc / "self/cgroup").write_text("4:memory:/job/one\n0::/job\n")
    assert free_memory(proc, cgroups) == 8000 * 1024
    v1 = cgroups / "memory/job"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("7000000\n")
    (v1 / "memory.usage_in_bytes").write_text("1000000\n")
    assert free_memory(proc, cgroups) == 6_000_000
    (cgroups / "job").mkdir()
    (cgroups / "job/memory.max").write_text("max\n")
    (cgroups / "job/memory.current").write_text("5\n")
    assert free_memory(proc, cgroups) == 6_000_000
    (cgroups / "job/memory.max").write_text("4000\n")
    assert free_memory(proc, cgroups) == 3995


@pytest.mark.parametrize(
    ("lines", "needs"),
    [
        (["numpy", "torch (==2.8.0)", "pillow"], "==2.8.0"),
        (["torch==2.8.0"], "==2.8.0"),
        (["torch-geometric==1", "torch>=2.14.0,<2.15 ; extra == 'x'"], ">=2.14.0,<2.15"),
        (["numpy"], ""),
    ],
)
def test_what_torchvision_needs(
    lines: list[str], needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.environment.requires", lambda _: lines)
    assert _needs("torchvision", "torch") == needs


# The command


def _doctor(
    *arguments: str, limit: Callable[[], None] | None = None, path: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not re.match("NCCL|GLOO", name)}
    # The package of this process, wherever it is installed.
    package = str(Path(stoker.__file__).parents[1])
    base |= {"PYTHONPATH": os.pathsep.join(filter(None, [path, package])), "COLUMNS": "1000"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=base | environment,
        timeout=240,
        preexec_fn=limit,
    )


MODULE = ("-m", "stoker", "doctor")


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    done = _doctor(*MODULE, str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("is_available()", "device_count()", f"torch {torch.__version__[:3]}", "SIMD"):
        assert text in done.stdout
    done = _doctor(*MODULE, str(tmp_path / "nowhere"), "--json")
    assert done.returncode == 1 and done.stderr == ""
    told = json.loads(done.stdout)
    assert told["good"] is False and told["links"] is None
    assert told["cuda_available"] is torch.cuda.is_available()
    (fault,) = [finding for finding in told["findings"] if finding["state"] == "fault"]
    assert fault["name"] == "data" and "nowhere" in fault["what"] and fault["remedy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "limit", "name"),
    [
        ({"NCCL_SOCKET_IFNAME": "nope0"}, None, "network interface"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None, "ranks"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None, "rendezvous"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.invalid", "MASTER_PORT": "9"},
            None,
            "rendezvous",
        ),
        ({}, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)), "open files"),
    ],
)
def test_faults_of_a_process(
    environment: dict[str, str], limit: Callable[[], None] | None, name: str
) -> None:
    done = _doctor(*MODULE, "--json", limit=limit, **environment)
    assert done.returncode == 1, done.stdout + done.stderr
    told = json.loads(done.stdout)["findings"]
    assert name in [finding["name"] for finding in told if finding["state"] == "fault"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "text", "name"),
    [
        ("torch/__init__.py", "raise ImportError('libcudart.so: cannot open')", "torch"),
        ("torchvision/__init__.py", "raise RuntimeError('operator does not exist')", "torchvision"),
    ],
)
def test_broken_packages(tmp_path: Path, module: str, text: str, name: str) -> None:
    """What the command line itself is made of may be what is broken."""
    (tmp_path / module).parent.mkdir()
    (tmp_path / module).write_text(text)
    done = _doctor(*MODULE, path=str(tmp_path))
    assert done.returncode == 1
    assert re.search(rf"fault\s+{name}: .*(libcudart|operator)", done.stdout + done.stderr)
    assert "pip install" in done.stdout + done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_missing_engine(tmp_path: Path) -> None:
    """A checkout that was never built."""
    package = Path(stoker.__file__).parent
    shutil.copytree(package, tmp_path / "stoker", ignore=shutil.ignore_patterns("*.so", "__pyc*"))
    for command in ("doctor", "bench"):
        done = _doctor("-m", "stoker", command, path=str(tmp_path))
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert re.search(r"fault\s+native engine: cannot be loaded: .*_native", done.stderr)
        assert "C++20 compiler" in done.stderr


@pytest.mark.slow
def test_between_ranks() -> None:
    run = ("-m", "torch.distributed.run", "--nproc_per_node=2")
    done = _doctor(*run, *MODULE, "--json", GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    told = json.loads(line)
    links = told["links"]
    assert links["ranks"] == 2 and links["backend"] in ("gloo", "nccl")
    assert 0 < links["seconds"] < 1 and links["bytes_per_second"] > 1e6
    assert [pair["ranks"] for pair in links["pairs"]] == [[0, 1]]
    assert len(told["hosts"]) == 2
    names = {finding["name"]: finding for finding in told["findings"]}
    assert names["links"]["ranks"] == [0, 1] and names["same versions"]["state"] == "ok"
