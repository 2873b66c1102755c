"""What is wrong with an environment, and how to mend it: one small function per check.

Every check looks at `Facts` alone and gives one `Finding`, or none where it has nothing to look at.
A fault keeps training from running, or from being right; a warning costs speed or may stop a run
later.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import ceil, floor

from stoker import rendezvous
from stoker.environment import Facts
from stoker.finding import Finding

_MIB = 2**20


def findings(facts: Facts) -> list[Finding]:
    """What every check says of an environment, in the order in which to mend it."""
    return [finding for check in _CHECKS if (finding := check(facts)) is not None]


# Packages


def _engine(facts: Facts) -> Finding:
    if reason := facts.broken.get("stoker.engine"):
        return Finding(
            "native engine",
            "fault",
            f"cannot be loaded: {reason}",
            "install stoker again with the Python that runs it: pip install --force-reinstall "
            "--no-deps stoker, or `.` in a clone, which needs a C++20 compiler",
        )
    return Finding("native engine", "ok", "built, and can be loaded")


def _simd(facts: Facts) -> Finding | None:
    if not facts.level:
        return None
    if facts.level == "scalar":
        return Finding(
            "SIMD",
            "warning",
            "this processor shows neither AVX2 nor AVX-512, so nothing runs natively",
            "use a machine with AVX2; in a virtual machine pass the host's processor through "
            "(qemu: -cpu host). Loaders work meanwhile, on torch's own machinery",
        )
    return Finding("SIMD", "ok", facts.level)


def _pillow(facts: Facts) -> Finding | None:
    name = facts.versions.get("pillow", "")
    if "PIL" in facts.broken or not name:
        return Finding("Pillow", "fault", "is not installed", "pip install 'pillow>=11'")
    if facts.pillow_differs:
        return Finding(
            "Pillow",
            "warning",
            f"{name} is not known: native decoding does not give its pixels "
            f"({facts.pillow_differs}), so nothing runs natively",
            "install a release of Pillow from PyPI, 11 or newer (pip install --force-reinstall "
            "'pillow>=11'); a Pillow built otherwise, as pillow-simd is, gives other pixels",
        )
    return Finding("Pillow", "ok", f"{name}, with the pixels that native decoding gives")


def _torch(facts: Facts) -> Finding:
    if reason := facts.broken.get("torch"):
        return Finding(
            "torch",
            "fault",
            f"cannot be imported: {reason}",
            "pip install --force-reinstall torch torchvision, both in one command",
        )
    return Finding("torch", "ok", facts.versions.get("torch", ""))


def _torchvision(facts: Facts) -> Finding | None:
    ours, torch = facts.versions.get("torchvision"), facts.versions.get("torch", "")
    if ours is None or "torch" in facts.broken:
        return None
    remedy = (
        f"install both in one command: pip install torch=={torch.partition('+')[0]} torchvision"
    )
    if facts.torchvision_needs and not _fits(torch, facts.torchvision_needs):
        what = f"{ours} is built for torch{facts.torchvision_needs}, and this is torch {torch}"
        return Finding("torchvision", "fault", what, remedy)
    builds = [text.partition("+")[2] for text in (ours, torch)]
    if all(builds) and builds[0] != builds[1]:
        what = f"{ours} and torch {torch} are builds for different devices"
        return Finding("torchvision", "fault", what, f"{remedy}, from the same index")
    if reason := facts.broken.get("torchvision"):
        return Finding("torchvision", "fault", f"{ours} cannot be imported: {reason}", remedy)
    return Finding("torchvision", "ok", f"{ours}, made for torch {torch}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def _fits(found: str, needs: str) -> bool:
    """Whether a version fits the bounds ``needs``: "==2.8.0" or ">=2.14.0,<2.15"."""
    ours = _numbers(found)
    for bound in needs.split(","):
        parts = re.fullmatch(r"\s*(==|>=|<=|>|<|~=|!=)\s*([\w.+]+)(?:\.\*)?\s*", bound)
        if parts is None:
            continue
        theirs = _numbers(parts[2])
        cut = ours[: len(theirs)] if parts[1] in ("==", "!=") else ours
        right = {
            "==": cut == theirs,
            "!=": cut != theirs,
            ">=": ours >= theirs,
            "<=": ours <= theirs,
            ">": ours > theirs,
            "<": ours < theirs,
            "~=": ours >= theirs and ours[: len(theirs) - 1] == theirs[:-1],
        }[parts[1]]
        if not right:
            return False
    return True


# GPUs


def _cuda(facts: Facts) -> Finding | None:
    if "torch" in facts.broken:
        return None
    there = len(facts.devices)
    if facts.gpus:
        shown = f"{len(facts.gpus)} of {there}" if there > len(facts.gpus) else len(facts.gpus)
        return Finding("CUDA", "ok", f"torch can use {shown}: {', '.join(sorted(set(facts.gpus)))}")
    if there and facts.torch_cuda is None:
        return Finding(
            "CUDA",
            "fault",
            f"there are {there} NVIDIA devices, and this torch is built for CPUs only",
            "pip install --force-reinstall torch torchvision, from PyPI: builds for CUDA",
        )
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if there and visible is not None:
        return Finding(
            "CUDA",
            "fault",
            f"there are {there} NVIDIA devices, and CUDA_VISIBLE_DEVICES={visible!r} hides them",
            f"unset CUDA_VISIBLE_DEVICES, or name devices from 0 to {there - 1}",
        )
    if there:
        message = facts.cuda_message or "torch.cuda.is_available() is False"
        return Finding(
            "CUDA",
            "fault",
            f"there are {there} NVIDIA devices that torch cannot use: {message}",
            "look at what nvidia-smi says; a new driver needs a restart of the machine, and of the "
            "container",
        )
    return Finding(
        "CUDA",
        "warning",
        "no NVIDIA device is visible here, so training runs on the CPU",
        "start the container with --gpus all (Docker with nvidia-container-toolkit) or with "
        "resources.limits nvidia.com/gpu (Kubernetes); on the machine itself install its driver",
    )


def _driver(facts: Facts) -> Finding | None:
    if not facts.devices or facts.torch_cuda is None:
        return None
    wants = ".".join(map(str, facts.torch_cuda))
    if facts.driver_cuda is None:
        return Finding(
            "driver",
            "fault",
            "the driver's library libcuda.so.1 is not here or does not answer",
            "in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility and the NVIDIA runtime; "
            "on the machine itself: install the driver",
        )
    has = ".".join(map(str, facts.driver_cuda))
    # Within one major version newer libraries run on older drivers.
    if facts.driver_cuda[0] < facts.torch_cuda[0]:
        return Finding(
            "driver",
            "fault",
            f"it serves CUDA up to {has}, and torch is built for CUDA {wants}",
            f"install a driver that serves CUDA {wants}, or a torch that is built for CUDA {has} "
            "or older",
        )
    return Finding("driver", "ok", f"serves CUDA {has}; torch is built for {wants}")


# What the machine gives


def _cores(facts: Facts) -> Finding:
    ranks = facts.whole("LOCAL_WORLD_SIZE") or 1
    share = facts.cores / ranks
    has = (
        f"{_plain(facts.cores)} of {facts.machine_cores} cores, for {ranks} rank{'s' * (ranks > 1)}"
    )
    if share < 1:
        return Finding(
            "cores",
            "warning",
            f"{has}: less than one for each",
            "raise the CPU quota (docker run --cpus, resources.limits.cpu), or start fewer ranks",
        )
    if facts.torch_threads > ceil(share):
        threads = max(1, floor(share))
        return Finding(
            "cores",
            "warning",
            f"{has}, and torch computes with {facts.torch_threads} threads in each: they wait for "
            "each other and for the quota",
            f"set OMP_NUM_THREADS={threads}, or raise the CPU quota (docker run --cpus, "
            "resources.limits.cpu)",
        )
    return Finding("cores", "ok", has)


def _memory(facts: Facts) -> Finding | None:
    if facts.memory_bytes is None:
        return None
    ranks = facts.whole("LOCAL_WORLD_SIZE") or 1
    free = f"{facts.memory_bytes / 2**30:.1f} GiB free"
    if facts.memory_bytes < 2 * 2**30 * ranks:
        return Finding(
            "memory",
            "warning",
            f"{free} for {ranks} rank{'s' * (ranks > 1)}: less than 2 GiB each, and whoever goes "
            "over the limit is killed",
            "raise the memory limit (docker run --memory, resources.limits.memory), or lower "
            "batch_size, num_workers and prefetch_factor",
        )
    return Finding("memory", "ok", free)


def _shared_memory(facts: Facts) -> Finding:
    free = facts.shared_memory_bytes
    if free is None or free < 1024 * _MIB:
        shown = "there is no /dev/shm" if free is None else f"{free / _MIB:,.0f} MiB free"
        return Finding(
            "shared memory",
            "warning",
            f"{shown}: batches from worker processes come through pipes, which takes more time, "
            "and other programs may end in a bus error",
            "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory "
            "at /dev/shm. Datasets that run natively need none",
        )
    return Finding("shared memory", "ok", f"{free / 2**30:.1f} GiB free in /dev/shm")


def _open_files(facts: Facts) -> Finding:
    soft, hard = facts.open_files
    if 0 <= soft < 1024:
        enough = (
            "ulimit -n 65536" if hard < 0 or hard >= 65536 else "docker run --ulimit nofile=65536"
        )
        return Finding(
            "open files",
            "fault" if soft < 256 else "warning",
            f"a process may open {soft} files: worker processes, shards and tensors each take some",
            f"{enough}, or LimitNOFILE= of the service that starts it",
        )
    return Finding("open files", "ok", "without limit" if soft < 0 else f"up to {soft:,}")


_STORAGE: dict[str, tuple[str, str]] = {
    "network": (
        "network storage: each small file costs a round trip",
        "`stoker pack` the images into shards, or copy them to a disk of this machine",
    ),
    "HDD": (
        "a disk that turns: random reads of small files are slow",
        "copy the images to an SSD, or `stoker pack` them and let memory keep them",
    ),
    "overlay": (
        "inside of the container's own layers, which are slow and lost with it",
        "mount the folder: docker run -v /data:/workspace/data, or a volume in Kubernetes",
    ),
}


def _data(facts: Facts) -> Finding | None:
    storage = facts.storage
    if storage is None:
        return None
    kind, path = storage.kind, storage.path
    if kind == "missing":
        return Finding(
            "data",
            "fault",
            f"{path}: there is no such file or folder",
            "check the path; in a container, that it is mounted: docker run -v FOLDER:" + path,
        )
    if kind == "unreadable":
        owner = "" if storage.owner is None else f", which belongs to {_ids(storage.owner)}"
        user = _ids(storage.owner or facts.user)
        return Finding(
            "data",
            "fault",
            f"{path}: user {_ids(facts.user)} may not read it{owner}",
            f"docker run --user {user} (Kubernetes: runAsUser, fsGroup), or chmod -R a+rX there",
        )
    where = f"{path}: {storage.filesystem}" if storage.filesystem else path
    if kind in _STORAGE:
        what, remedy = _STORAGE[kind]
        return Finding("data", "warning", f"{where}, {what}", remedy)
    named = {"remote": "an address", "memory": "in memory", "virtual": "a virtual disk"}
    told = named.get(kind, "an SSD" if kind == "SSD" else "on a disk of unknown kind")
    return Finding("data", "ok", f"{where}, {told}")


def _plain(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _ids(pair: tuple[int, int]) -> str:
    return f"{pair[0]}:{pair[1]}"


_CHECKS: tuple[Callable[[Facts], Finding | None], ...] = (
    _torch,
    _torchvision,
    _pillow,
    _engine,
    _simd,
    _cuda,
    _driver,
    _cores,
    _memory,
    _shared_memory,
    _open_files,
    _data,
    rendezvous.ranks,
    rendezvous.rendezvous,
    rendezvous.gpus_of_ranks,
    rendezvous.interfaces,
    rendezvous.switches,
)
