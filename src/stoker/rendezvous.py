"""Whether the ranks of a job can meet, and how fast they reach each other: checks on facts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from stoker.environment import Facts
from stoker.finding import Finding

if TYPE_CHECKING:
    from stoker.links import Links  # needs torch, which may be what is broken


def ranks(facts: Facts) -> Finding | None:
    """Whether the numbers of ranks agree with each other; None without any."""
    given = facts.environment
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not any(name in given for name in names[:3]):
        return None
    remedy = (
        "let torchrun set them all (torchrun --nproc_per_node=N ...), or unset them to run alone"
    )
    missing = [name for name in names[:2] if name not in given]
    if missing:
        has = ", ".join(f"{name}={given[name]}" for name in names if name in given)
        return Finding("ranks", "fault", f"{has}, but no {' and no '.join(missing)}", remedy)
    faulty = [
        f"{name}={given[name]}" for name in names if name in given and facts.whole(name) is None
    ]
    if faulty:
        return Finding("ranks", "fault", f"{', '.join(faulty)}: not a number", remedy)
    numbers = {name: facts.whole(name) for name in names}
    for rank, of in (names[:2], names[2:], ("LOCAL_WORLD_SIZE", "WORLD_SIZE")):
        low, high = numbers[rank], numbers[of]
        if (
            low is not None
            and high is not None
            and (low > high or (low == high and rank != names[3]))
        ):
            what = f"{rank}={low} and {of}={high} contradict each other"
            return Finding("ranks", "fault", what, remedy)
    return Finding("ranks", "ok", f"{numbers['WORLD_SIZE']}, as torchrun numbers them")


def rendezvous(facts: Facts) -> Finding | None:
    """Whether the place where the ranks meet can be the one; None for one rank."""
    given = facts.environment
    if (facts.whole("WORLD_SIZE") or 1) < 2 or "RANK" not in given:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not given.get(name)]
    if missing:
        return Finding(
            "rendezvous",
            "fault",
            f"WORLD_SIZE={given['WORLD_SIZE']}, but {' and '.join(missing)} not set",
            "start it with torchrun --nnodes=N --rdzv-backend=c10d --rdzv-endpoint=HOST:29400, or "
            "set both to the machine of rank 0 and a free port of it",
        )
    place = f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
    port = facts.whole("MASTER_PORT")
    if port is None or not 0 < port < 65536:
        return Finding("rendezvous", "fault", f"{place} has no port", "MASTER_PORT is 1 to 65535")
    if facts.master_found is False:
        return Finding(
            "rendezvous",
            "fault",
            f"MASTER_ADDR={given['MASTER_ADDR']} stands for no address on this machine",
            "give an address, or a name that every machine knows (in Kubernetes that of the "
            "headless service)",
        )
    if _machines(facts) > 1 and re.match(r"localhost$|127\.|::1$", given["MASTER_ADDR"]):
        return Finding(
            "rendezvous",
            "fault",
            f"there are {_machines(facts)} machines, and MASTER_ADDR={given['MASTER_ADDR']} is to "
            "each of them itself",
            "set it to the address of rank 0's machine (torchrun --rdzv-endpoint=HOST:29400)",
        )
    return Finding("rendezvous", "ok", place)


def gpus_of_ranks(facts: Facts) -> Finding | None:
    """That there are more ranks than GPUs on this machine; None where there are not."""
    ranks, gpus = facts.whole("LOCAL_WORLD_SIZE"), len(facts.gpus)
    if ranks is None or not gpus or ranks <= gpus:
        return None
    return Finding(
        "GPU per rank",
        "fault",
        f"{ranks} ranks on a machine with {gpus} GPUs, and NCCL wants one for each",
        f"torchrun --nproc_per_node={gpus}",
    )


def interfaces(facts: Facts) -> Finding | None:
    """Whether what NCCL and gloo are told of the network is there, and leads outside."""
    given = facts.environment
    for name, prefix in (("NCCL_SOCKET_IFNAME", True), ("GLOO_SOCKET_IFNAME", False)):
        value = given.get(name, "")
        wanted = [word.strip() for word in value.lstrip("=").split(",") if word.strip()]
        if not wanted or (prefix and value.startswith("^")):
            continue
        exact = not prefix or value.startswith("=")
        for word in wanted:
            if exact and word in facts.interfaces:
                continue
            if not exact and any(other.startswith(word) for other in facts.interfaces):
                continue
            return Finding(
                "network interface",
                "fault",
                f"{name}={value}, and there is no interface {word}",
                f"unset {name}, or name one of {', '.join(_outward(facts)) or 'this machine'}",
            )
        if _machines(facts) > 1 and all(re.match("lo$|docker|veth|br-", word) for word in wanted):
            return Finding(
                "network interface",
                "fault",
                f"{name}={value} does not reach the other machines",
                f"unset {name}, or name one of {', '.join(_outward(facts))}",
            )
    local = not facts.host_address or re.match(r"127\.|::1$", facts.host_address)
    if _machines(facts) > 1 and local and not given.get("GLOO_SOCKET_IFNAME"):
        shown = facts.host_address or "no address"
        return Finding(
            "network interface",
            "fault",
            f"this machine's own name stands for {shown}, which gloo gives to the other machines",
            f"set GLOO_SOCKET_IFNAME to one of {', '.join(_outward(facts))}, or mend /etc/hosts",
        )
    return Finding("network interface", "ok", ", ".join(facts.interfaces))


_SWITCHES: dict[str, tuple[str, str]] = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of one machine exchange through memory instead of directly"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one machine exchange through the network"),
    "NCCL_IB_DISABLE": ("1", "machines exchange through TCP, even where there is InfiniBand"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "every exchange makes the CPU wait"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "a lost rank makes the others wait for ever"),
    "NCCL_ASYNC_ERROR_HANDLING": ("0", "a lost rank makes the others wait for ever"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the CPU waits for each kernel; it is for looking for errors"),
}


def switches(facts: Facts) -> Finding | None:
    """Variables that make training slow, or hang; None where there are none."""
    given = facts.environment
    found = [
        (f"{name}={given[name]}", why)
        for name, (value, why) in _SWITCHES.items()
        if given.get(name) == value
    ]
    if not found:
        return None
    return Finding(
        "switches",
        "warning",
        "; ".join(f"{setting}: {why}" for setting, why in found),
        f"unset {' '.join(setting.partition('=')[0] for setting, _ in found)}, unless it is there "
        "for a known reason",
    )


def of_versions(versions: Sequence[Mapping[str, str]]) -> Finding:
    """Whether all ranks have the same versions of everything."""
    for name in sorted({name for each in versions for name in each}):
        seen = [each.get(name, "none") for each in versions]
        if len(set(seen)) > 1:
            other = next(rank for rank, text in enumerate(seen) if text != seen[0])
            return Finding(
                "same versions",
                "fault" if name in ("torch", "stoker", "nccl") else "warning",
                f"{name} is {seen[0]} on rank 0 and {seen[other]} on rank {other}",
                "start all ranks from one image, or install from one list of versions",
            )
    return Finding("same versions", "ok", f"on {len(versions)} ranks")


def of_links(links: Links) -> Finding:
    """Latency and bandwidth between the ranks; one with a third of the others' is slow."""
    what = (
        f"{links.backend}, {links.ranks} ranks: {links.seconds * 1e6:,.0f} us for an all-reduce of "
        f"one number, {links.bytes_per_second / 2**20:,.0f} MiB/s on the bus"
    )
    if not links.pairs:
        return Finding("links", "ok", what)
    slowest = min(links.pairs, key=lambda pair: pair.bytes_per_second)
    shown = (
        f"; slowest is rank {slowest.ranks[0]} to {slowest.ranks[1]}: {slowest.seconds * 1e6:,.0f} "
        f"us, {slowest.bytes_per_second / 2**20:,.0f} MiB/s"
    )
    usual = median(pair.bytes_per_second for pair in links.pairs)
    if slowest.bytes_per_second < usual / 3:
        return Finding(
            "links",
            "warning",
            f"{what}{shown}, where the median is {usual / 2**20:,.0f}",
            "between machines: look at cable, port and interface of the two; within one: at the "
            "slot of the GPUs (nvidia-smi topo -m)",
        )
    return Finding("links", "ok", what + shown)


def of_meeting(facts: Facts, error: Exception) -> Finding:
    """That the ranks did not find each other, which the variables alone do not show."""
    place = f"{facts.environment.get('MASTER_ADDR')}:{facts.environment.get('MASTER_PORT')}"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return Finding(
        "rendezvous",
        "fault",
        f"the ranks do not meet at {place}: {reason}",
        "check that every rank was started, that the port is open between the machines (firewall, "
        "network policy), and GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; see NCCL_DEBUG=INFO",
    )


def _machines(facts: Facts) -> int:
    """Machines of the job, as torchrun says, or as the numbers of ranks show."""
    groups = facts.whole("GROUP_WORLD_SIZE")
    world, here = facts.whole("WORLD_SIZE") or 1, facts.whole("LOCAL_WORLD_SIZE")
    return groups or (ceil(world / here) if here else 1)


def _outward(facts: Facts) -> list[str]:
    return [name for name in facts.interfaces if not re.match("lo$|docker|veth|br-|ifb", name)]
