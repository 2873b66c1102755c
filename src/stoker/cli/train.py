"""`stoker train DATA`: the recipe of recipes/imagenet, one process per GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

import stoker


def recipe() -> Path:
    """The file of the recipe: installed with the package, or that of the clone it is run from."""
    package = Path(stoker.__file__).resolve().parent
    name = Path("recipes", "imagenet", "train.py")
    installed = package / name
    return installed if installed.exists() else package.parents[1] / name


def train(
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A folder that holds the sets train and val.")
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OPTIONS OF THE RECIPE]",
            help="Such as --model vit_b_16 --epochs 30; stoker train DATA --help lists them.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes; one per GPU, or one on the CPU, if left out.",
            show_default=False,
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the command instead of running it.")
    ] = False,
) -> None:
    """Train a classifier, as torchrun with recipes/imagenet/train.py does.

    DATA/train and DATA/val are class folders, or what stoker pack made of them. Killed at any
    moment, the same command goes on. Checkpoints and logs go to runs/NAME, where DATA is called
    NAME; --output says where else.
    """
    given = ["--data", data, "--output", f"runs/{Path(data).resolve().name}", *(options or [])]
    command = [sys.executable, str(recipe()), *given]
    count = ranks or max(1, torch.cuda.device_count())
    if count > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        command[1:1] = launch
    if show:
        print(*command)
        return
    # In the place of this process: signals reach it, and its exit status is the command's.
    os.execv(sys.executable, command)
