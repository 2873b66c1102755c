"""How fast the ranks of a job reach each other: latency and bandwidth, by torch.distributed.

Note [What is measured]
    An all-reduce of one number, as often as it takes for a median: what every step pays at least.
    An all-reduce of many, which gives the bandwidth of the bus: each of n ranks moves 2 (n - 1) / n
    times the bytes. Then each rank and the next one throw a ball to and fro, one pair at a time: a
    cable, a switch or a GPU that is slower than the others shows there.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE = datetime.timedelta(seconds=60)
_BYTES = {"gloo": 8 * 2**20, "nccl": 64 * 2**20}
_MOST_PAIRS = 32
_LATENCIES, _TRANSFERS = 20, 3


@dataclass(frozen=True)
class Pair:
    """Two ranks: seconds for one number one way, and bytes a second of many."""

    ranks: tuple[int, int]
    seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Links:
    """What lies between the ranks.

    Attributes:
        backend: "gloo" or "nccl".
        ranks: so many.
        seconds: of an all-reduce of one number, the median.
        bytes_per_second: of the bus, in an all-reduce of many numbers.
        pairs: neighbours; none where there are more than 32 ranks.
    """

    backend: str
    ranks: int
    seconds: float
    bytes_per_second: float
    pairs: tuple[Pair, ...]


@contextmanager
def joined(gpus: int) -> Iterator[str]:
    """Joins the ranks that torchrun has started, with NCCL where each has a GPU; gives the backend.

    Raises:
        RuntimeError: the others were not found within a minute.
        ValueError: the variables of the environment do not say where to meet.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    backend = "nccl" if gpus >= here and dist.is_nccl_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield backend
    finally:
        dist.destroy_process_group()


def of_all(value: Any) -> list[Any]:
    """What every rank gives, by rank."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def measure(backend: str) -> Links:
    """Latency and bandwidth between the ranks that have joined; the same numbers on all of them."""
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    one = torch.zeros(1, device=device)
    many = torch.zeros(_BYTES[backend] // 4, device=device)

    def timed(
        action: Callable[[torch.Tensor], Any], tensor: torch.Tensor, times: int
    ) -> list[float]:
        seconds = []
        for _ in range(times + 1):
            if backend == "nccl":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            action(tensor)
            if backend == "nccl":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        return seconds[1:]  # the first one connects

    latency = median(timed(dist.all_reduce, one, _LATENCIES))
    moved = 2 * (ranks - 1) / ranks * many.nbytes
    bandwidth = moved / min(timed(dist.all_reduce, many, _TRANSFERS))

    mine: list[Pair] = []
    for first in range(ranks if 2 < ranks <= _MOST_PAIRS else int(ranks == 2)):
        second = (first + 1) % ranks
        dist.barrier()
        if rank not in (first, second):
            continue

        def there_and_back(tensor: torch.Tensor, first: int = first, second: int = second) -> None:
            if rank == first:
                dist.send(tensor, second)
                dist.recv(tensor, second)
            else:
                dist.recv(tensor, first)
                dist.send(tensor, first)

        seconds = median(timed(there_and_back, one, _LATENCIES)) / 2
        transfer = min(timed(there_and_back, many, _TRANSFERS)) / 2
        if rank == first:
            mine.append(Pair((first, second), seconds, many.nbytes / transfer))
    everyone = of_all((latency, bandwidth, mine))
    pairs = tuple(pair for _, _, measured in everyone for pair in measured)
    return Links(backend, ranks, everyone[0][0], everyone[0][1], pairs)
