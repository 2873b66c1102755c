"""What users can reach: exported names, versions, the command line's help."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch.utils.data

import stoker

ROOT = Path(__file__).resolve().parents[1]
STOKER = str(Path(sys.executable).with_name("stoker"))


def test_exported_names() -> None:
    assert sorted(stoker.__all__) == [
        "DataLoader",
        "DecodeError",
        "ImageDataset",
        "ImageFolder",
        "ResumeError",
        "SourceError",
        "StokerError",
        "StokerWarning",
        "UnsupportedError",
        "WorkerError",
        "__version__",
        "accelerate",
        "diagnose",
        "explain",
        "open",
        "patch",
        "unpatch",
    ]
    assert all(hasattr(stoker, name) for name in stoker.__all__)


def test_versions_agree() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["version"]
    assert stoker.__version__ == declared == importlib.metadata.version("stoker")


def test_package_is_typed() -> None:
    assert (importlib.resources.files(stoker) / "py.typed").is_file()


def test_loader_has_torchs_parameters_in_torchs_order() -> None:
    theirs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    ours = inspect.signature(stoker.DataLoader.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
    added = list(ours)[len(theirs) :]
    assert added == [
        "seed",
        "randomness",
        "on_error",
        "exclude",
        "tier",
        "order",
        "strict",
        "shard",
        "uneven",
    ]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in added)


def test_loader_keeps_torchs_defaults() -> None:
    theirs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    ours = inspect.signature(stoker.DataLoader.__init__).parameters
    changed = {name for name in theirs if ours[name].default != theirs[name].default}
    # Left out, it is chosen for the machine.
    assert changed <= {"num_workers"}


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], []),
        (["bench"], ["--labels", "--recipe", "--json"]),
        (["parity"], ["--labels", "--recipe", "--json"]),
        (["run"], ["SCRIPT"]),
        (["verify"], ["--labels", "--against", "--out", "--jobs", "--json"]),
        (["doctor"], ["--json"]),
        (["info"], ["--labels", "--sample", "--png", "--json"]),
        (["diagnose"], ["--labels", "--recipe", "--step-ms", "--against", "--png", "--json"]),
        (["pack"], ["--labels", "--shard-size", "--shuffle", "--jobs"]),
    ],
)
def test_help(arguments: list[str], options: list[str]) -> None:
    done = subprocess.run(
        [STOKER, *arguments, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "Usage" in done.stdout
    assert all(option in done.stdout for option in options)


def test_version_option() -> None:
    done = subprocess.run(
        [STOKER, "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"stoker {stoker.__version__}\n"


@pytest.mark.parametrize("name", ["check", "test", "demo", "docs", "fuzz", "stress", "bench"])
def test_scripts_explain_themselves(name: str) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / name), "--help"],
        capture_output=True,
        text=True,
        check=name != "check",
        timeout=60,
    )
    assert f"scripts/{name}" in done.stdout


@pytest.mark.parametrize("name", ["nonsense --option", "fuzz --nonsense", "fuzz --seconds x"])
def test_scripts_refuse_nonsense(name: str) -> None:
    script, *arguments = name.split()
    if script == "nonsense":
        script = "check"
    done = subprocess.run(
        [str(ROOT / "scripts" / script), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
