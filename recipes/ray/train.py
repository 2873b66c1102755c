"""Trains an image classifier on the machines of a Ray cluster, with Ray Train.

    python train.py /shared/DATA --ranks 16 --gpus --output /shared/runs/ray

Install `stoker[vision]` and `ray[train]`. Every machine reads DATA, which holds `train` and `val`:
class folders, or anything else that `stoker.open` takes, and writes to OUTPUT. Ray starts the ranks
and their process group, and starts them anew where a machine is lost; each rank reads its share of
one order, and the loader's state in the checkpoint lets any number of ranks go on in mid-epoch.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn
from torchvision import models, transforms

import stoker


def train_on_a_rank(options: dict[str, Any]) -> None:
    """What each rank does."""
    size, data = options["size"], Path(options["data"])
    ending = [
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    crop = transforms.RandomResizedCrop(size)
    training = transforms.Compose([crop, transforms.RandomHorizontalFlip(), *ending])
    middle = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)]
    train_set: Any = stoker.open(str(data / "train"), training)
    val_set = stoker.open(str(data / "val"), transforms.Compose([*middle, *ending]))
    loader = stoker.DataLoader(
        train_set, options["batch_size"], shuffle=True, shard=True, seed=0, drop_last=True
    )
    validation = stoker.DataLoader(val_set, options["batch_size"], shard=True, uneven="exact")

    torch.manual_seed(0)
    device = get_device()
    model = prepare_model(models.get_model(options["model"], num_classes=len(train_set.classes)))
    optimizer = torch.optim.SGD(model.parameters(), options["lr"], 0.9, weight_decay=2e-5)
    epoch = step = 0
    given = train.get_checkpoint()
    if given is not None:
        with given.as_directory() as folder:
            content = torch.load(Path(folder, "state.pt"), map_location="cpu", weights_only=True)
        getattr(model, "module", model).load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        loader.load_state_dict(content["loader"])
        epoch, step = content["epoch"], content["step"]

    def report(**figures: float) -> None:
        """Gives Ray the figures, and a checkpoint of the first rank; all ranks call it."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                content = {
                    "model": getattr(model, "module", model).state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),
                    "epoch": epoch,
                    "step": step,
                }
                torch.save(content, Path(folder, "state.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            train.report({"epoch": epoch, "step": step, **figures}, checkpoint=checkpoint)

    while epoch < options["epochs"]:
        loader.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            loss: Any = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % options["checkpoint_steps"] == 0:
                report(loss=loss.item())

        model.eval()
        counts = torch.zeros(2, device=device)  # right ones, and all
        with torch.inference_mode():
            for images, labels, valid in validation:
                right = model(images.to(device)).argmax(1).cpu() == labels
                counts += torch.stack([(right & valid).sum(), valid.sum()]).to(device)
        if dist.is_initialized():
            dist.all_reduce(counts)
        epoch += 1
        loader.set_epoch(epoch)
        report(top1=(counts[0] / counts[1]).item(), images=counts[1].item())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", type=Path, help="folder with train and val")
    add("--output", type=Path, default=Path("runs/ray"))
    add("--ranks", type=int, default=1, help="0: in this process, without a cluster")
    add("--gpus", action="store_true", help="one for each rank")
    add("--model", default="resnet50", help="of torchvision")
    add("--epochs", type=int, default=90)
    add("--batch-size", type=int, default=256, help="images per rank")
    add("--lr", type=float, default=0.1)
    add("--size", type=int, default=224, help="pixels")
    add("--checkpoint-steps", type=int, default=1000)
    options = parser.parse_args()

    settings = vars(options) | {"data": str(options.data.resolve())}
    trainer = TorchTrainer(
        train_on_a_rank,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=options.ranks, use_gpu=options.gpus),
        run_config=RunConfig(
            name=options.output.name,
            storage_path=str(options.output.resolve().parent),
            failure_config=FailureConfig(max_failures=10),
        ),
    )
    result = trainer.fit()
    print(result.metrics)


if __name__ == "__main__":
    main()
