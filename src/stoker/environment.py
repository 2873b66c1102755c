"""What an environment is: versions, GPUs, cores, memory, storage, ranks; facts without judgement.

Everything that may be broken is read so that the failure is a fact, too: torch, torchvision and the
native engine are imported only inside of functions.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import socket
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from stoker.machine import usable_cores

_PROC, _SYS = Path("/proc"), Path("/sys")
_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS", "NVIDIA_VISIBLE_DEVICES"),
)
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_")
_NETWORK = frozenset(
    [
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "beegfs", "glusterfs"),
        *("afs", "orangefs", "9p", "virtiofs"),
    ]
)
_MEMORY = frozenset(("tmpfs", "ramfs", "hugetlbfs"))


@dataclass(frozen=True)
class Storage:
    """Where data lies.

    Attributes:
        path: as the user gave it.
        kind: "SSD", "HDD", "virtual" (disk), "network", "overlay", "memory", "remote" (an
            address), "missing", "unreadable", or "unknown".
        filesystem: its type, such as "ext4"; empty where there is none.
        mount: where it is mounted.
        owner: user and group id of the path; None where they are unknown.
    """

    path: str
    kind: str
    filesystem: str = ""
    mount: str = ""
    owner: tuple[int, int] | None = None


@dataclass(frozen=True)
class Facts:
    """An environment, as one process sees it.

    Attributes:
        versions: of Python, the packages, CUDA, cuDNN, NCCL and the driver, where they are there.
        broken: modules that cannot be imported, and why.
        torchvision_needs: the version of torch that torchvision says it needs, as "==2.8.0".
        torch_cuda: (major, minor) of the CUDA that torch is built for; None: for none.
        driver_cuda: (major, minor) of the newest CUDA that the driver serves; None: no driver.
        devices: files of NVIDIA's devices.
        gpus: names of those that torch can use.
        cuda_message: what torch said when it looked for them.
        cores: that this process may use.
        machine_cores: that the machine has.
        torch_threads: that torch computes with on the CPU.
        memory_bytes: free below the tightest limit; None where it is unknown.
        shared_memory_bytes: free in /dev/shm; None: there is none.
        open_files: the soft and the hard limit; -1: none.
        storage: of the data; None where no data is named.
        interfaces: of the network.
        host_address: what this machine's name stands for; empty: nothing.
        master_found: MASTER_ADDR stands for an address; None: there is no MASTER_ADDR.
        environment: the variables that torch, NCCL and gloo read.
        level: of SIMD, as the engine finds it; empty where there is no engine.
        pillow_differs: why native decoding is not what this Pillow gives; empty: it is.
        user: id of the user and of the group.
    """

    versions: Mapping[str, str]
    broken: Mapping[str, str]
    torchvision_needs: str
    torch_cuda: tuple[int, int] | None
    driver_cuda: tuple[int, int] | None
    devices: tuple[str, ...]
    gpus: tuple[str, ...]
    cuda_message: str
    cores: float
    machine_cores: int
    torch_threads: int
    memory_bytes: int | None
    shared_memory_bytes: int | None
    open_files: tuple[int, int]
    storage: Storage | None
    interfaces: tuple[str, ...]
    host_address: str
    master_found: bool | None
    environment: Mapping[str, str]
    level: str
    pillow_differs: str
    user: tuple[int, int]

    def whole(self, name: str) -> int | None:
        """The number that an environment variable holds; None where it holds none."""
        value = self.environment.get(name, "")
        return int(value) if value.isascii() and value.isdigit() else None


def facts_of(data: str | None = None) -> Facts:
    """The environment of this process; takes about as long as importing torch."""
    broken: dict[str, str] = {}
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("stoker", "torch", "torchvision", "numpy", "pillow"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    torch = _imported("torch", broken)
    if "torchvision" in versions:
        _imported("torchvision", broken)
    engine = _imported("stoker.engine", broken)
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith(_PREFIXES)
    }
    cuda, gpus, message = _cuda(torch, versions)
    driver = _driver(versions)
    master = variables.get("MASTER_ADDR")
    return Facts(
        versions=versions,
        broken=broken,
        torchvision_needs=_needs("torchvision", "torch"),
        torch_cuda=cuda,
        driver_cuda=driver,
        devices=tuple(sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))),
        gpus=gpus,
        cuda_message=message,
        cores=usable_cores(),
        machine_cores=os.cpu_count() or 1,
        torch_threads=1 if torch is None else torch.get_num_threads(),
        memory_bytes=free_memory(),
        shared_memory_bytes=_free("/dev/shm"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        storage=None if data is None else storage_of(data),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        host_address=_address(socket.gethostname()) or "",
        master_found=None if master is None else _address(master) is not None,
        environment=variables,
        level="" if engine is None else engine.level(),
        pillow_differs="" if torch is None or engine is None else _pillow_differs(),
        user=(os.getuid(), os.getgid()),
    )


def _imported(name: str, broken: dict[str, str]) -> Any:
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # as torchvision's do
        broken[name] = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        return None


def _needs(package: str, other: str) -> str:
    """The version of ``other`` that the metadata of ``package`` asks for; empty: any."""
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        return ""
    for line in lines:
        if found := re.match(rf"{re.escape(other)}(?![\w.-])\s*\(?([^;)]*)", line):
            return found[1].strip()
    return ""


def _cuda(torch: Any, versions: dict[str, str]) -> tuple[tuple[int, int] | None, Any, str]:
    if torch is None or torch.version.cuda is None:
        return None, (), ""
    versions["cuda"] = torch.version.cuda
    if torch.backends.cudnn.is_available():
        versions["cudnn"] = str(torch.backends.cudnn.version())
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
            names = tuple(torch.cuda.get_device_name(number) for number in range(usable))
            message = " ".join(str(warning.message).split(" (Triggered")[0] for warning in told)
        except RuntimeError as error:
            names, message = (), str(error)
    major, minor = (*torch.version.cuda.split("."), "0")[:2]
    return (int(major), int(minor)), names, message


def _driver(versions: dict[str, str]) -> tuple[int, int] | None:
    """(major, minor) of the CUDA that the driver serves, as its own library says."""
    with suppress(OSError, IndexError, StopIteration):
        words = (_PROC / "driver/nvidia/version").read_text().split("Kernel Module")[1].split()
        versions["driver"] = next(word for word in words if word[0].isdigit())
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def free_memory(proc: Path = _PROC, cgroups: Path = _SYS / "fs/cgroup") -> int | None:
    """Bytes free below the tightest of the machine's memory and the cgroups' limits."""
    found, lines = list[int](), list[str]()
    with suppress(OSError, ValueError, LookupError):
        known = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        found.append(int(known["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError):
        lines = (proc / "self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            base, limit, used = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base = cgroups / "memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = base / path.lstrip("/")
        for folder in [inside, *inside.parents]:
            with suppress(OSError, ValueError):  # without a limit: "max", or beyond any memory
                found.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
            if folder == base:
                break
    return max(0, min(found)) if found else None


def _free(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _address(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return None


def storage_of(path: str, proc: Path = _PROC, system: Path = _SYS) -> Storage:
    """Where ``path`` lies, by the table of mounts; a pattern's folder, where it is one."""
    if "://" in path:
        return Storage(path, "remote")
    place = Path(os.path.abspath(path.partition(":")[0] if ".py:" in path else path))
    while any(letter in place.name for letter in "*?[{") and place != place.parent:
        place = place.parent
    try:
        known = place.stat()
        os.listdir(place) if place.is_dir() else open(place, "rb").close()
    except PermissionError:
        try:
            owner = place.stat()
        except OSError:
            return Storage(path, "unreadable")
        return Storage(path, "unreadable", owner=(owner.st_uid, owner.st_gid))
    except OSError:
        return Storage(path, "missing")
    mount, kind, source, device = _mount(os.path.realpath(place), proc)
    if kind in _NETWORK or kind.startswith("fuse."):
        sort = "network"
    elif kind in _MEMORY:
        sort = "memory"
    elif kind == "overlay":
        sort = "overlay"
    else:
        sort = _disk(device, source, system)
    return Storage(path, sort, kind, mount, (known.st_uid, known.st_gid))


def _mount(path: str, proc: Path) -> tuple[str, str, str, str]:
    """Mount point, type, source and device number of the file system that ``path`` is on."""
    best = ("", "", "", "")
    try:
        lines = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return best
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, more = before.split(), after.split()
        if len(fields) < 5 or len(more) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):  # the last of equal ones lies on top
            best = (point, more[0], more[1], fields[2])
    return best


def _disk(device: str, source: str, system: Path) -> str:
    """Whether a block device turns: "SSD", "HDD" or "unknown"; "virtual" disks cannot know."""
    if Path(source).name.startswith(("vd", "xvd")):
        return "virtual"
    for folder in (system / "dev/block" / device, system / "class/block" / Path(source).name):
        for queue in (folder / "queue", folder.resolve().parent / "queue"):  # a partition's disk
            try:
                turns = (queue / "rotational").read_text().strip()
            except OSError:
                continue
            return "HDD" if turns == "1" else "SSD"
    return "unknown"


def _pillow_differs() -> str:
    """Why the native decoder and resize do not give the installed Pillow's bits; empty: they do."""
    from stoker.plan import Plan, Resize, Tail

    try:
        import numpy as np
        import torch
        from PIL import Image

        from stoker.proof import pass_order, prove
    except ImportError as error:
        return str(error)
    order = pass_order()
    if order is None:
        return "its resize runs its passes in an order that is not known"

    def stock(image: Image.Image) -> torch.Tensor:
        pixels = np.array(image.resize((48, 40), Image.Resampling.BILINEAR))
        return torch.from_numpy(pixels).permute(2, 0, 1)

    plan = Plan((Resize((40, 48), None, "bilinear"),), Tail("uint8", 3, b""), order)
    refusal = prove(plan, stock)
    return "" if refusal is None else refusal.why
