"""The native core under sanitizers, as `scripts/fuzz` and `scripts/stress` run it for anyone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _run(*command: str, seconds: int) -> str:
    done = subprocess.run(
        [str(ROOT / "scripts" / command[0]), *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.mark.slow
def test_mutated_images_under_address_and_undefined_behaviour_sanitizers() -> None:
    _run("fuzz", "--seconds", "60", seconds=600)


@pytest.mark.slow
def test_engine_under_thread_sanitizer() -> None:
    _run("stress", seconds=600)
