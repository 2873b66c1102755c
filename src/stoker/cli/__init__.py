"""The command line: `stoker bench`, `parity`, `verify` and so on, each in a file of its own.

Exit status: 0 done, 1 the data or the machine would not do (the message names file, reason and
remedy), `parity` found a difference or `verify` bad samples, 2 wrong arguments.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.text import Text

from stoker.cli.bench import bench
from stoker.cli.diagnose import diagnose
from stoker.cli.doctor import doctor
from stoker.cli.info import info
from stoker.cli.pack import pack
from stoker.cli.parity import parity
from stoker.cli.run import run
from stoker.cli.verify import verify
from stoker.errors import StokerError

app = typer.Typer(
    name="stoker",
    help="Your own data: how fast and exact stoker is with it, what is in it, what is wrong.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(bench)
app.command()(diagnose)
app.command()(parity)
app.command()(verify)
app.command()(info)
app.command()(pack)
app.command()(doctor)
app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(run)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"stoker {version('stoker')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that stand before the command; the help text is the app's."""


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as a line for people, without a source line of ours."""
    Console(stderr=True).print(f"note: {message}", highlight=False, markup=False)


def main() -> None:
    """Entry point of the `stoker` command."""
    warnings.showwarning = _show_warning
    try:
        app()
    except StokerError as error:
        text = Text.assemble(("error: ", "red"), str(error))
        Console(stderr=True).print(text, soft_wrap=True)
        raise SystemExit(1) from None
