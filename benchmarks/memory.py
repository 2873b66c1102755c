"""Do memory, threads and descriptors stay the same over the epochs?

    python benchmarks/memory.py FOLDER --epochs 20

One stoker loader with the training recipe; a line after every epoch. `growth` compares the last
epoch with the second: the first still fills pools.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import psutil
import torch
from torchvision.datasets import ImageFolder

import stoker
from measure import arguments, header, note, resident_bytes, write
from rivals import pil_transform


def main() -> None:
    """Command line."""
    parser = arguments(__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dataset = ImageFolder(options.folder, pil_transform("train"))
    loader = stoker.DataLoader(
        dataset,
        batch_size=options.batch,
        shuffle=True,
        num_workers=options.threads,
        persistent_workers=options.threads > 0,
    )
    process = psutil.Process()
    rows: list[dict[str, Any]] = []
    for epoch in range(options.epochs):
        images = sum(len(labels) for _, labels in loader)
        gc.collect()
        rows.append(
            {
                "epoch": epoch,
                "images": images,
                "resident_mib": round(resident_bytes() / 2**20, 1),
                "threads": process.num_threads(),
                "descriptors": len(os.listdir("/proc/self/fd")),
            }
        )
        note(f"epoch {epoch}: {rows[-1]['resident_mib']} MiB")
    compared = rows[1] if len(rows) > 1 else rows[0]
    growth = rows[-1]["resident_mib"] / compared["resident_mib"] - 1
    write(
        options.output,
        [{**header("memory", options), "growth": round(growth, 4)}, *rows],
    )


if __name__ == "__main__":
    main()
