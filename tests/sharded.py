"""A script for torchrun: walks sharded loaders on its rank, and writes what it was served.

Arguments: folder of images, file to write (the rank is put after it), and cases as JSON: for each
the loader's options, `samples`, the `state` to begin with and the number of steps to `leave` after.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torchvision import transforms as T

import stoker


def walked(folder: str, samples: int, leave: int | None, state: Any, **options: Any) -> Any:
    dataset = torchvision.datasets.ImageFolder(
        folder, T.Compose([T.Resize((16, 16)), T.ToTensor()])
    )
    dataset.samples = [(path, i) for i, (path, _) in enumerate(dataset.samples[:samples])]
    loader = stoker.DataLoader(dataset, shuffle=True, shard=True, num_workers=1, **options)
    if state is not None:
        loader.load_state_dict(state)
    steps, halfway = [], None
    for images, labels, *valid in loader:
        # A collective in each step hangs where a rank has another number of them.
        total = torch.tensor(len(images))
        dist.all_reduce(total)
        assert int(total) == len(images) * dist.get_world_size()
        steps.append([labels.tolist(), *(mark.tolist() for mark in valid)])
        if len(steps) == leave:
            halfway = loader.state_dict()
    states: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(states, (halfway, loader.state_dict()))
    assert all(other == states[0] for other in states)
    return {"steps": steps, "length": len(loader), "halfway": halfway}


def main() -> None:
    dist.init_process_group("gloo")
    folder, out, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    report = [walked(folder, **case) for case in cases]
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(report))
    dist.destroy_process_group()


main()
