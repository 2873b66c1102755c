"""The short recipes: under Slurm's commands, by Lightning and by Ray Train."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from pictures import picture, save

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SAMPLES = 23
SMALL = ["--model", "mobilenet_v3_small", "--size", "32", "--batch-size", "4"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number in range(SAMPLES):
        save(folder / "train" / str(number % 2) / f"{number}.jpg", picture(48, 40, number))
    (folder / "val").symlink_to("train")
    return folder


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(stoker.__file__).parents[1]), *filter(None, sys.path)])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def run(command: list[str], folder: Path) -> str:
    """What ``command``, which must succeed, prints."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Slurm

FAKES = {
    # As one machine's task; the real one passes signals on, too.
    "srun": '#!/bin/bash\nshift\nexport SLURM_GPUS_ON_NODE=2\nexec "$@"\n',
    "scontrol": '#!/bin/bash\nif [ $1 = show ]; then echo localhost; else echo "$@" >> asked; fi\n',
    "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
}
RANK = """
import os, signal, sys, threading
signal.signal(signal.SIGUSR1, lambda number, _: sys.exit(128 + number))
if sys.argv[1] == "fails":
    sys.exit(1)
open(f"rank-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}", "w").close()
print("ready", flush=True)
if sys.argv[1] == "waits":
    signal.pause()
"""


def submitted(folder: Path, what: str) -> subprocess.Popen[str]:
    """The batch script of recipes/slurm on two ranks of a script that does ``what``."""
    for name, text in FAKES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "rank.py").write_text(RANK)
    env = environment(
        PATH=f"{folder}:{os.environ['PATH']}",
        RECIPE="rank.py",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="localhost",
        SLURM_NNODES="1",
        SLURM_GPUS_ON_NODE="2",
        PORT="0",
    )
    command = ["bash", str(RECIPES / "slurm" / "train.sbatch"), what]
    return subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["ends", "fails"])
def test_slurm_leaves_with_the_status(tmp_path: Path, what: str) -> None:
    job = submitted(tmp_path, what)
    job.communicate(timeout=120)
    assert job.returncode == (what == "fails")
    assert len(list(tmp_path.glob("rank-?-of-2"))) == (0 if what == "fails" else 2)
    assert not (tmp_path / "asked").exists()


@pytest.mark.slow
def test_slurm_puts_the_job_back_when_its_time_ends(tmp_path: Path) -> None:
    job = submitted(tmp_path, "waits")
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=120)
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


# Lightning


@pytest.mark.exhaustive
def test_lightning_trains_and_goes_on_in_mid_epoch(images: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    recipe = str(RECIPES / "lightning" / "train.py")
    given = [sys.executable, recipe, str(images), *SMALL, "--epochs", "2"]
    given += ["--checkpoint-steps", "1"]
    run([*given, "--output", "whole"], tmp_path)
    run([*given, "--output", "half", "--steps", "3"], tmp_path)
    run([*given, "--output", "rest", "--resume", "half/last.ckpt"], tmp_path)

    def losses(output: str) -> dict[str, str]:
        (path,) = (tmp_path / output).glob("**/metrics.csv")
        with path.open() as file:
            return {row["step"]: row["loss"] for row in csv.DictReader(file) if row["loss"]}

    # Five full batches of each epoch. Dropout draws from torch's generator, which Lightning
    # does not save.
    assert list(losses("whole")) == [str(step) for step in range(10)]
    assert losses("half") == dict(list(losses("whole").items())[:3])
    assert list(losses("rest")) == [str(step) for step in range(3, 10)]


# Ray

NO_CLUSTER = 77
CLUSTER = f"""
import runpy, sys, ray
try:
    ray.init(num_cpus=2, include_dashboard=False)
except Exception as error:
    print(error)
    sys.exit({NO_CLUSTER})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def on_ray(images: Path, ranks: int, output: Path) -> list[str]:
    given = [str(RECIPES / "ray" / "train.py"), str(images), *SMALL, "--ranks", str(ranks)]
    return [*given, "--epochs", "1", "--checkpoint-steps", "2", "--output", str(output)]


@pytest.mark.exhaustive
def test_ray_trains_without_a_cluster(images: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    printed = run([sys.executable, *on_ray(images, 0, tmp_path / "out")], tmp_path)
    assert f"'images': {float(SAMPLES)}" in printed and "'step': 5" in printed


@pytest.mark.exhaustive
def test_ray_trains_on_two_ranks(images: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    command = [sys.executable, str(script), *on_ray(images, 2, tmp_path / "out")]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment()
    )
    if done.returncode == NO_CLUSTER:
        pytest.skip(f"Ray does not start here: {done.stdout}")
    assert done.returncode == 0, done.stderr
    assert f"'images': {float(SAMPLES)}" in done.stdout and "'step': 2" in done.stdout
    assert list((tmp_path / "out").glob("**/state.pt"))
