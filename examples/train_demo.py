"""Trains a small network on the demo photos through stoker, then compares with torch's loader.

    python examples/train_demo.py demo-photos

Only the import differs from an ordinary PyTorch script.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision import transforms

import stoker
from stoker.draws import seed_generators
from stoker.order import keys

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def open_dataset(folder: Path) -> stoker.ImageDataset:
    """The photos with their labels and the usual training transform."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(*IMAGENET),
        ]
    )
    return stoker.ImageDataset(str(folder / "images"), str(folder / "labels.txt"), transform)


def network(classes: int) -> nn.Module:
    """Three strided convolutions and a linear layer: enough for fourteen motifs."""
    layers: list[nn.Module] = [nn.AvgPool2d(4)]
    channels = [3, 32, 64, 64]
    for before, after in pairwise(channels):
        layers += [
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def train(loader: stoker.DataLoader[Any], model: nn.Module, epochs: int) -> None:
    """Trains with AdamW, and prints loss, accuracy and images/s of every epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        start, loss_sum, right, seen = time.perf_counter(), 0.0, 0, 0
        for images, labels in loader:
            logits = model(images)
            loss = nn.functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss_sum += loss.item() * len(labels)
            right += int((logits.argmax(1) == labels).sum())
            seen += len(labels)
        rate = seen / (time.perf_counter() - start)
        print(
            f"epoch {epoch + 1}: loss {loss_sum / seen:.3f}, accuracy {right / seen:.1%}, "
            f"{rate:.0f} images/s with the training step"
        )


def images_per_second(loader: torch.utils.data.DataLoader[Any]) -> float:
    """One epoch without a training step."""
    start = time.perf_counter()
    seen = sum(len(labels) for _, labels in loader)
    return seen / (time.perf_counter() - start)


def equals_torch(dataset: stoker.ImageDataset, batches: int = 4) -> bool:
    """Whether `randomness="torch"` gives the batches of torch's DataLoader, bit for bit."""
    taken = []
    for make in (
        torch.utils.data.DataLoader,
        lambda *args, **kwargs: stoker.DataLoader(*args, **kwargs, randomness="torch"),
    ):
        torch.manual_seed(3)
        loader = make(dataset, batch_size=32, shuffle=True, num_workers=2)
        taken.append([batch for batch, _ in zip(loader, range(batches), strict=False)])
    return all(
        torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        for ours, theirs in zip(*taken, strict=True)
    )


def equals_dataset(dataset: stoker.ImageDataset, samples: int = 128) -> bool:
    """Whether the keyed batches equal `dataset[index]` with the generators seeded per sample."""
    loader = stoker.DataLoader(dataset, batch_size=32, num_workers=2, seed=7)
    index = 0
    for images, labels in loader:
        for image, label in zip(images, labels, strict=True):
            seed_generators(int(keys(7, 0, np.array([index]))[0]))
            expected, expected_label = dataset[index]
            if not torch.equal(image, expected) or int(label) != expected_label:
                return False
            index += 1
        if index >= samples:
            break
    return True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the speed comparison")
    parser.add_argument("--num-workers", type=int, default=2)
    options = parser.parse_args()

    torch.manual_seed(0)
    dataset = open_dataset(options.folder)
    arguments = {
        "batch_size": 64,
        "shuffle": True,
        "num_workers": options.num_workers,
        "persistent_workers": options.num_workers > 0,
    }
    loader = stoker.DataLoader(dataset, **arguments)
    print(loader.explain(), end="\n\n")
    train(loader, network(len(set(dataset.labels.values()))), options.epochs)

    print("\nwithout a training step, in turn, first epochs not counted:")
    rivals = {"stoker": loader, "torch": torch.utils.data.DataLoader(dataset, **arguments)}
    for rival in rivals.values():
        images_per_second(rival)
    rates: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(options.rounds):
        for name, rival in rivals.items():
            rates[name].append(images_per_second(rival))
    for name, seen in rates.items():
        print(f"  {name:6} {statistics.median(seen):6.0f} images/s")
    ratio = statistics.median(a / b for a, b in zip(rates["stoker"], rates["torch"], strict=True))
    print(f"  stoker gives {ratio:.1f} times the images of torch's DataLoader\n")
    del rivals, rival

    same_torch, same_keyed = equals_torch(dataset), equals_dataset(dataset)
    print(f'tensors equal torch\'s DataLoader (randomness="torch"):        {same_torch}')
    print(f"tensors equal dataset[index] with keyed seeds (the default):  {same_keyed}")
    if not (same_torch and same_keyed):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
