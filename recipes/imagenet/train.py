r"""Trains an image classifier: one file, on stoker's, torch's and torchvision's public names only.

    python train.py --data /data/imagenet                        # one device
    torchrun --nproc_per_node=4 train.py                         # four GPUs, data in ./data
    torchrun --nnodes=1:4 --nproc_per_node=8 --max-restarts=10 --rdzv-backend=c10d \
        --rdzv-endpoint=HOST:29400 train.py --data /data/imagenet   # one to four machines, elastic

DATA holds `train` and `val`: class folders, or what `stoker pack` made of them (`train-*.tar`,
`train.lmdb`, ...). `--train` and `--val` take anything that `stoker.open` takes.

Everything that is needed to go on is in the checkpoints below --output, a folder that all machines
see: killed at any moment, the same command goes on from the last one, on as many ranks as there are
then (--resume auto). SIGTERM and SIGUSR1 make it save one, and leave. Every sample of an epoch
counts once and the same, whatever the numbers of ranks: the last step of an epoch is smaller, and
weighs less. The learning rate is a function of the samples seen, and scales with those in a step.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import glob
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision import models, transforms

import stoker

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ENDINGS = ("tar", "tfrecord", "parquet")
SETS = ("{}", *(f"{{}}-*.{e}" for e in ENDINGS), *(f"{{}}.{e}" for e in ENDINGS), "{}.lmdb")
AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder with train and val; ./data or /workspace/data otherwise")
    add("--train", help="training set instead of DATA/train: whatever stoker.open takes")
    add("--val", help="validation set instead of DATA/val")
    add("--output", type=Path, default=Path("runs/imagenet"), help="checkpoints and logs")
    add("--model", default="resnet50", help="of torchvision; timm:NAME for one of timm")
    add("--epochs", type=int, default=90)
    add("--batch-size", type=int, default=256, help="images per rank and forward pass")
    add("--accumulate", type=int, default=1, help="forward passes per step of the optimizer")
    add("--lr", type=float, default=0.5, help="at its highest, for steps of 1,024 images")
    add("--warmup-epochs", type=float, default=5)
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", type=float, default=2e-5)
    add("--label-smoothing", type=float, default=0.1)
    add("--ema", type=float, default=0.0, help="decay of averaged weights, 0.9999; 0: none")
    add("--size", type=int, default=224, help="pixels of training crops")
    add("--val-resize", type=int, default=256, help="shorter side before the centre crop")
    add("--randaugment", action="store_true")
    add("--amp", choices=AMP, default="bf16", help="on GPUs; CPUs train in float32")
    add("--workers", type=int, help="threads, or worker processes, per rank")
    add("--tier", default="auto", choices=["auto", "stock"], help="stock: torch's own machinery")
    add("--seed", type=int, default=0)
    add("--resume", default="auto", help="a checkpoint to begin with where OUTPUT has none")
    add("--keep", type=int, default=3, help="checkpoints that are kept")
    add("--checkpoint-steps", type=int, default=1000, help="also at the end of each epoch")
    add("--signal-steps", type=int, default=10, help="steps between looks for a signal")
    add("--log-steps", type=int, default=50)
    return parser.parse_args()


# Ranks


class Ranks:
    """This process among those that torchrun has started; alone where it has not."""

    def __init__(self) -> None:
        local = int(os.environ.get("LOCAL_RANK", 0))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        gpus = torch.cuda.device_count()
        if gpus and here > gpus:
            sys.exit(
                f"{here} processes on a machine with {gpus} GPUs: torchrun --nproc_per_node={gpus}"
            )
        self.device = torch.device("cuda", local) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(local)  # before anything is put on a GPU
        if "RANK" in os.environ:
            dist.init_process_group(
                "nccl" if gpus else "gloo",
                timeout=datetime.timedelta(minutes=10),
                device_id=self.device if gpus else None,
            )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1

    def sum(self, *values: float) -> list[float]:
        """The sums of numbers over all ranks."""
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(sums)
        return sums.tolist()

    def of_all(self, value: Any) -> list[Any]:
        """What every rank gives."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def share_buffers(self, module: nn.Module) -> None:
        """Gives every rank the first one's statistics of batch norm, which are each rank's own."""
        if self.world > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)


# Data


def find(options: argparse.Namespace, name: str) -> str:
    """The path of the set ``train`` or ``val``."""
    if getattr(options, name):
        return str(getattr(options, name))
    folders = [options.data] if options.data else [Path("data"), Path("/workspace/data")]
    for folder in folders:
        for pattern in SETS:
            path = str(folder / pattern.format(name))
            if glob.glob(path):
                return path
    looked = " or ".join(map(str, folders))
    sys.exit(f"there is no {name} set in {looked}: say where train and val are, --data FOLDER")


def datasets(options: argparse.Namespace) -> tuple[Any, Any]:
    augment = [transforms.RandAugment()] if options.randaugment else []
    ending = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    flip = transforms.RandomHorizontalFlip()
    training = transforms.Compose(
        [transforms.RandomResizedCrop(options.size), flip, *augment, *ending]
    )
    validation = transforms.Compose(
        [transforms.Resize(options.val_resize), transforms.CenterCrop(options.size), *ending]
    )
    train = stoker.open(find(options, "train"), training)
    val = stoker.open(find(options, "val"), validation)
    names = [getattr(dataset, "classes", []) for dataset in (train, val)]
    if all(names) and names[0] != names[1]:
        sys.exit(f"train and val have different classes: {set(names[0]) ^ set(names[1])}")
    return train, val


# Model


def make_model(name: str, classes: int) -> nn.Module:
    if name.startswith("timm:"):
        import timm

        model: nn.Module = timm.create_model(name[5:], num_classes=classes)
        return model
    chosen: nn.Module = models.get_model(name, num_classes=classes)
    return chosen


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Biases and norms do without weight decay."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": weights, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def learning_rate(options: argparse.Namespace, epoch: float, images_per_step: int) -> float:
    """Linear warm-up, then half a cosine, at ``epoch`` with its fraction."""
    highest = options.lr * images_per_step / 1024
    if epoch < options.warmup_epochs:
        return float(highest * (epoch + 0.01) / options.warmup_epochs)
    left = (epoch - options.warmup_epochs) / max(1e-9, options.epochs - options.warmup_epochs)
    return float(highest * 0.5 * (1 + math.cos(math.pi * min(1.0, left))))


# Checkpoints


def checkpoints(folder: Path) -> list[Path]:
    """From the oldest to the newest."""
    found = [path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+", path.stem)]
    return sorted(found, key=lambda path: int(path.stem[5:]))


def save(folder: Path, step: int, content: dict[str, Any], keep: int) -> None:
    """Writes a checkpoint, whole or not at all, and removes the oldest."""
    path = folder / f"step-{step}.pt"
    temporary = folder / f".step-{step}.part"
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    for old in [*checkpoints(folder)[:-keep], *folder.glob(".step-*.part")]:
        old.unlink()


def load(options: argparse.Namespace, ranks: Ranks) -> dict[str, Any] | None:
    """The checkpoint to go on from, the same on all ranks; None to begin."""
    newest = [str(path) for path in checkpoints(options.output)[-1:]]
    given = None if options.resume == "auto" else options.resume
    chosen: str | None = ranks.of_all(newest[0] if newest else given)[0]  # as the first rank sees
    if chosen is None:
        return None
    # Tensors, numbers and texts only: nothing in it is executed.
    content: dict[str, Any] = torch.load(chosen, map_location="cpu", weights_only=True)
    if ranks.rank == 0:
        print(f"goes on from {chosen}", flush=True)
    return content


def random_state(ranks: Ranks) -> list[Any]:
    """The states of every rank's generators, for dropout and the like."""
    here = [torch.get_rng_state()]
    if ranks.device.type == "cuda":
        here.append(torch.cuda.get_rng_state())
    return ranks.of_all(here)


def restore_random_state(states: list[Any], ranks: Ranks) -> None:
    if len(states) == ranks.world:  # other numbers of ranks draw anew
        torch.set_rng_state(states[ranks.rank][0])
        if ranks.device.type == "cuda" and len(states[ranks.rank]) > 1:
            torch.cuda.set_rng_state(states[ranks.rank][1])


# Logs


class Log:
    """JSON lines in OUTPUT/log.jsonl, the same for TensorBoard if it is installed; of rank 0.

    A line of kind "resumed" takes back what stands before it of later steps than its own.
    """

    def __init__(self, folder: Path, ranks: Ranks, step: int) -> None:
        self.active = ranks.rank == 0
        if not self.active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        self.board = None
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, kind: str, step: int, **values: float) -> None:
        """Writes the figures of a step."""
        if not self.active:
            return
        line = {"kind": kind, "step": step, "time": time.time(), **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = ", ".join(f"{name} {value:.5g}" for name, value in values.items())
        print(f"{kind} at step {step}: {shown}", flush=True)
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(f"{kind}/{name}", value, step)


class Waited:
    """An iterator that knows how long it was waited for."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches, self.seconds = batches, 0.0

    def __iter__(self) -> Waited:
        return self

    def __next__(self) -> Any:
        begun = time.perf_counter()
        try:
            return next(self.batches)
        finally:
            self.seconds += time.perf_counter() - begun


# Training


def filled(batch: Any, size: int) -> Any:
    """Images, labels and marks of ``size`` samples: a smaller batch is repeated, without marks.

    So kernels and batch norm never see another number of images.
    """
    images, labels, valid = batch
    if len(images) == size:
        return batch
    again = torch.arange(size) % len(images)
    return images[again], labels[again], valid[again] & (torch.arange(size) < len(images))


@torch.inference_mode()
def evaluate(
    model: nn.Module, loader: Any, ranks: Ranks, forward: Callable[..., Any]
) -> dict[str, float]:
    """Accuracy over all samples of all ranks, each counted once."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=ranks.device)
    for images, labels, valid in loader:
        labels, valid = labels.to(ranks.device), valid.to(ranks.device)
        images = images.to(ranks.device, non_blocking=True, memory_format=torch.channels_last)
        with forward():
            scores = model(images).float()
        losses = nn.functional.cross_entropy(scores, labels, reduction="none")
        hits = scores.topk(min(5, scores.shape[1])).indices == labels[:, None]
        sums += torch.stack([of[valid].sum() for of in (hits[:, 0], hits.any(1), losses, valid)])
    right, right5, loss, count = ranks.sum(*sums.tolist())
    return {"top1": right / count, "top5": right5 / count, "loss": loss / count, "images": count}


def train(options: argparse.Namespace) -> None:
    asked: list[int] = []  # signals that came
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: asked.append(number))
    torchrun = os.getppid() if dist.is_torchelastic_launched() else None
    ranks = Ranks()
    cuda = ranks.device.type == "cuda"
    torch.manual_seed(options.seed)  # the same weights on all ranks
    torch.backends.cudnn.benchmark = cuda
    dtype = AMP[options.amp] if cuda else None

    def forward() -> Any:
        return torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext()

    # "exact": every sample once, and the same number of steps on all ranks. The generator is for
    # torch's own iterators, which else draw from the model's.
    given: dict[str, Any] = {"shard": True, "uneven": "exact", "pin_memory": cuda}
    given |= {"tier": options.tier, "generator": torch.Generator()}
    if options.workers is not None:
        given["num_workers"] = options.workers
    size = options.batch_size
    train_set, val_set = datasets(options)
    loader = stoker.DataLoader(train_set, size, shuffle=True, seed=options.seed, **given)
    val_loader = stoker.DataLoader(val_set, size, **given)

    samples, images_per_pass = len(train_set), size * ranks.world
    images_per_step = images_per_pass * options.accumulate
    if samples < images_per_step:
        sys.exit(f"{samples:,} images are less than a step of {images_per_step:,}: --batch-size")
    if not len(val_set):
        sys.exit("the val set is empty: --val")

    classes = len(train_set.classes) or int(max(train_set.targets)) + 1
    model = make_model(options.model, classes).to(ranks.device)
    model = model.to(memory_format=torch.channels_last)
    average = None
    if options.ema:
        average = AveragedModel(
            model,
            multi_avg_fn=get_ema_multi_avg_fn(options.ema),  # type: ignore[no-untyped-call]
            use_buffers=True,
        )
    judged: nn.Module = model if average is None else average.module
    optimizer = torch.optim.SGD(
        parameter_groups(model, options.weight_decay),
        options.lr,
        momentum=options.momentum,
        nesterov=True,
    )
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    parallel: Any = model
    if ranks.world > 1:
        parallel = nn.parallel.DistributedDataParallel(
            model, device_ids=[ranks.device.index] if cuda else None
        )
    loss_of = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing, reduction="none")

    epoch = step = 0
    checkpoint = load(options, ranks)
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
        if average is not None and checkpoint["average"] is not None:
            average.load_state_dict(checkpoint["average"])
        loader.load_state_dict(json.loads(checkpoint["loader"]))
        restore_random_state(checkpoint["random"], ranks)
        epoch, step = checkpoint["epoch"], checkpoint["step"]
    log = Log(options.output, ranks, step)
    if checkpoint is not None:
        log.write("resumed", step, epoch=epoch, ranks=ranks.world)

    def keep() -> None:
        """Saves everything that is needed to go on from here; returns when it is written."""
        states = random_state(ranks)
        if ranks.rank == 0:
            content = {
                "model": model.state_dict(),
                "average": None if average is None else average.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "loader": json.dumps(loader.state_dict()),
                "random": states,
                "epoch": epoch,
                "step": step,
            }
            save(options.output, step, content, options.keep)
        ranks.sum(0)  # a rank that left before would be a failure to torchrun, which ends the rest

    while epoch < options.epochs:
        loader.set_epoch(epoch)
        position = loader.state_dict()["position"]  # not 0 where a checkpoint was in mid-epoch
        parallel.train()
        batches = Waited(iter(loader))
        passes, begun, waited = 0, time.perf_counter(), 0.0
        sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)  # loss, right ones, all
        for batch in batches:
            images, labels, valid = filled(batch, size)
            passes, position = passes + 1, min(position + images_per_pass, samples)
            steps_now = passes % options.accumulate == 0 or position == samples
            images = images.to(ranks.device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(ranks.device, non_blocking=True)
            valid = valid.to(ranks.device, non_blocking=True)
            unsynchronised = ranks.world > 1 and not steps_now
            with parallel.no_sync() if unsynchronised else contextlib.nullcontext():
                with forward():
                    scores = parallel(images)
                    losses = loss_of(scores, labels) * valid
                # The ranks' gradients are averaged, so those of a step are sums over its images,
                # divided by those of a full step.
                scaler.scale(losses.sum() * ranks.world / images_per_step).backward()
            right = (scores.detach().argmax(1) == labels) & valid
            sums += torch.stack([losses.detach().sum().double(), right.sum(), valid.sum()])
            if not steps_now:
                continue

            rate = learning_rate(options, epoch + position / samples, images_per_step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if average is not None:
                average.update_parameters(model)
            step += 1

            ended = position == samples
            if step % options.log_steps == 0:
                loss, hits, seen = ranks.sum(*sums.tolist())
                seconds = time.perf_counter() - begun
                log.write(
                    "train",
                    step,
                    epoch=epoch + position / samples,
                    loss=loss / seen,
                    top1=hits / seen,
                    lr=rate,
                    images_per_second=seen / seconds,
                    data_wait_share=(batches.seconds - waited) / seconds,
                )
                begun, waited = time.perf_counter(), batches.seconds
                sums.zero_()
            if ended:
                ranks.share_buffers(model)
                ranks.share_buffers(judged)
            leaves = False
            if ended or step % options.signal_steps == 0:
                if torchrun not in (None, os.getppid()):
                    asked.append(signal.SIGHUP)  # it was killed: nobody would miss this process
                leaves = ranks.sum(len(asked)) != [0]  # all look, so that they leave together
            if leaves or ended or step % options.checkpoint_steps == 0:
                keep()
            if leaves:
                number = max(max(numbers) for numbers in ranks.of_all(asked) if numbers)
                log.write("stopped", step, signal=number)
                leave(128 + number)

        log.write("val", step, epoch=epoch + 1, **evaluate(judged, val_loader, ranks, forward))
        epoch += 1
        loader.set_epoch(epoch)
        keep()  # in the place of the one before, which would evaluate once more
    leave(0)


def leave(status: int) -> None:
    """Ends this process; not 0 makes Slurm and Kubernetes start it anew."""
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    train(arguments())
