"""`stoker run`: the help of the command; `stoker.__main__` runs it before this is imported."""

from __future__ import annotations

from typing import Annotated

import typer

from stoker.run import run_as_main


def run(
    script: Annotated[
        list[str], typer.Argument(help="SCRIPT ARGUMENTS..., or -m MODULE ARGUMENTS...")
    ],
) -> None:
    """Run a training script, unchanged, with torch's own loaders traced.

    As python SCRIPT ARGUMENTS, with stoker.patch(): the same batches, bit for bit, the same exit
    status. With torchrun: torchrun OPTIONS -m stoker run SCRIPT ARGUMENTS.
    """
    run_as_main(script)
