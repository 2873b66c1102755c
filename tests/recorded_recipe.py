"""A script for torchrun: runs a recipe, writes down what its ranks are handed, and may be killed.

Arguments: a JSON object, the recipe, and the recipe's own arguments. Into the object's `folder`
each rank of each start writes a file, named by when the first rank began, and the rank. Its first
line is the `epoch` and `position` that the shuffled loader begins at, and the number of ranks; then
comes one for each batch, before it is handed out: `epoch`, `position` after it, and the `labels`
that count. Where there is a `kill` of `rank`, `batch`, `seconds`, `signal` and `whom` ("rank" and
"job"), the signal is sent so long after that rank (None: any) was handed that batch of a start.
`gpus` is what `torch.cuda.device_count` says.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stoker


class Recorder:
    """Writes down what the shuffled loader of this rank hands out."""

    def __init__(self, folder: Path, kill: dict[str, Any] | None) -> None:
        self.folder, self.kill = folder, kill
        self.path: Path | None = None
        self.count = 0

    def write(self, **line: Any) -> None:
        if self.path is None:
            began: list[Any] = [time.time_ns()]
            if dist.is_initialized():
                dist.broadcast_object_list(began, 0)
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.path = self.folder / f"{began[0]}-{rank}.jsonl"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def handed(self, loader: Any, source: Iterator[Any]) -> Iterator[Any]:
        for images, labels, valid in source:
            state = loader.state_dict()
            counted = labels[valid].tolist()
            self.write(epoch=state["epoch"], position=state["position"], labels=counted)
            kill, rank = self.kill, int(os.environ.get("RANK", 0))
            if kill and kill["rank"] in (None, rank) and self.count == kill["batch"]:
                timer = threading.Timer(kill["seconds"], send, (kill["whom"], kill["signal"]))
                timer.daemon = True
                timer.start()
            self.count += 1
            yield images, labels, valid


def send(whom: list[str], number: int) -> None:
    """A signal to torchrun, to this process, or to both."""
    if "job" in whom:
        os.kill(os.getppid(), number)
    if "rank" in whom:
        os.kill(os.getpid(), number)


def main() -> None:
    given = json.loads(sys.argv[1])
    if "gpus" in given:
        torch.cuda.device_count = lambda: given["gpus"]
    recorder = Recorder(Path(given["folder"]), given.get("kill"))
    begin: Any = stoker.DataLoader.__iter__

    def iterate(loader: Any) -> Iterator[Any]:
        state = loader.state_dict()
        source = begin(loader)
        if not loader.shuffle:
            return source  # type: ignore[no-any-return]
        if recorder.path is None:
            world = dist.get_world_size() if dist.is_initialized() else 1
            recorder.write(epoch=state["epoch"], position=state["position"], world=world)
        return recorder.handed(loader, source)

    stoker.DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


main()
