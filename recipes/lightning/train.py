"""Trains an image classifier with Lightning; the data are stoker's, in mid-epoch, too.

    python train.py DATA --epochs 90                # on all GPUs of this machine, or the CPU
    python train.py DATA --epochs 90 --resume runs/lightning/last.ckpt

DATA holds `train` and `val`: class folders, or anything else that `stoker.open` takes. Lightning's
checkpoints call the loader's `state_dict` and `load_state_dict`: nothing else is needed to go on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchvision import models, transforms

import stoker


class Classifier(lightning.LightningModule):
    def __init__(self, model: str, classes: int, lr: float, epochs: int) -> None:
        super().__init__()
        self.model = models.get_model(model, num_classes=classes)
        self.lr, self.epochs = lr, epochs

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.log("loss", loss)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.counts = torch.zeros(2, device=self.device)  # right ones, and all

    def validation_step(self, batch: Any, _: int) -> None:
        images, labels, valid = batch  # a sample that only fills the last batch is not valid
        right = self.model(images).argmax(1) == labels
        self.counts += torch.stack([(right & valid).sum(), valid.sum()])

    def on_validation_epoch_end(self) -> None:
        counts: Any = self.all_gather(self.counts)
        right, count = counts.reshape(-1, 2).sum(0)
        self.log("top1", right / count, prog_bar=True, rank_zero_only=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, 0.9, weight_decay=2e-5)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        return [optimizer], [schedule]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("data", type=Path, help="folder with train and val")
    add("--output", type=Path, default=Path("runs/lightning"))
    add("--model", default="resnet50", help="of torchvision")
    add("--epochs", type=int, default=90)
    add("--steps", type=int, default=-1, help="leave after so many steps")
    add("--batch-size", type=int, default=256, help="images per rank")
    add("--lr", type=float, default=0.1)
    add("--size", type=int, default=224, help="pixels")
    add("--checkpoint-steps", type=int, default=1000)
    add("--resume", help="a checkpoint")
    options = parser.parse_args()

    lightning.seed_everything(0)
    ending = [
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    crop = transforms.RandomResizedCrop(options.size)
    training = transforms.Compose([crop, transforms.RandomHorizontalFlip(), *ending])
    middle = [transforms.Resize(options.size * 8 // 7), transforms.CenterCrop(options.size)]
    train_set: Any = stoker.open(str(options.data / "train"), training)
    val_set = stoker.open(str(options.data / "val"), transforms.Compose([*middle, *ending]))
    loader: Any = stoker.DataLoader(
        train_set, options.batch_size, shuffle=True, shard=True, seed=0, drop_last=True
    )
    validation: Any = stoker.DataLoader(val_set, options.batch_size, shard=True, uneven="exact")

    saved = ModelCheckpoint(
        options.output, save_last=True, every_n_train_steps=options.checkpoint_steps
    )
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        max_steps=options.steps,
        callbacks=[saved],
        logger=CSVLogger(options.output),
        log_every_n_steps=1,
        default_root_dir=options.output,
    )
    model = Classifier(options.model, len(train_set.classes), options.lr, options.epochs)
    trainer.fit(model, loader, validation, ckpt_path=options.resume)


if __name__ == "__main__":
    main()
