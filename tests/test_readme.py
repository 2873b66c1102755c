"""README and docs say what is true: commands exist, the example runs, links lead somewhere."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import stoker

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def _commands() -> list[str]:
    lines = "".join(_blocks("console")).splitlines()
    return [line.removeprefix("$ ").split("#")[0].strip() for line in lines if line[:1] == "$"]


def test_the_two_commands_stand_there() -> None:
    assert {"scripts/demo", "scripts/test"} <= set(_commands())


@pytest.mark.parametrize("command", _commands())
def test_command_exists(command: str) -> None:
    program, *arguments = command.split()
    if program == "pip":
        assert arguments[0] == "install"
        # Not on PyPI yet: only a path may be installed.
        assert arguments[1].strip('"').startswith(".")
    elif program == "docker":
        # There is no container engine here: what it is given must be there.
        assert arguments[0] in ("build", "run") and (ROOT / "deploy/Dockerfile").is_file()
        tag = next(argument for argument in arguments if argument.startswith("stoker:torch"))
        version = tag.removeprefix("stoker:torch")
        assert (ROOT / f"deploy/requirements/torch-{version}.txt").is_file()
    elif program == "stoker":
        done = subprocess.run(
            [str(Path(sys.executable).with_name("stoker")), arguments[0], "--help"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        options = [argument for argument in arguments if argument.startswith("--")]
        assert all(option in done.stdout for option in options)
    else:
        path = ROOT / program
        assert path.is_file()
        assert path.stat().st_mode & 0o100


def test_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as it stands, on five photos, with as many workers as are sensible here."""
    example = _blocks("python")[0]
    (tmp_path / "photos").mkdir()
    for number in range(5):
        image = Image.effect_noise((320, 240), 80).convert("RGB")
        image.save(tmp_path / "photos" / f"{number}.jpg")
    lines = "".join(f"{number}.jpg {number % 2}\n" for number in range(5))
    (tmp_path / "labels.txt").write_text(lines)
    (tmp_path / "example.py").write_text(example.replace("num_workers=8", "num_workers=1"))
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path("example.py")
    assert names["images"].shape == (5, 3, 224, 224)
    assert names["images"].dtype == torch.float32
    assert sorted(names["labels"].tolist()) == [0, 0, 0, 1, 1]
    assert names["labels"].dtype == torch.int64
    assert names["loader"].explain().tier == "lowered"


def test_example_is_short() -> None:
    example = _blocks("python")[0]
    assert len(example.splitlines()) <= 12


def test_formats_are_opened_as_open_takes_them() -> None:
    known = inspect.signature(stoker.open).parameters
    lines = ast.parse(_blocks("python")[1]).body
    assert len(lines) > 10
    for line in lines:
        assert isinstance(line, ast.Expr) and isinstance(line.value, ast.Call)
        assert ast.unparse(line.value.func) == "stoker.open"
        assert {keyword.arg for keyword in line.value.keywords} <= set(known)


def test_tables_are_rendered_not_typed() -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"], check=True, timeout=60
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # Images and links, without those in code blocks.
    targets = re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    broken = [
        target
        for target in targets
        if not target.startswith(("http://", "https://")) and not (page.parent / target).exists()
    ]
    assert not broken
