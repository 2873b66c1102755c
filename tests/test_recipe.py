"""The recipe among real processes: what it refuses, killed at any moment, elastic."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import stoker
from pictures import picture, save
from stoker.cli.train import recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "imagenet" / "train.py"
SAMPLES, EPOCHS = 46, 3
# Two ranks of four images make six steps of an epoch, the last of which is not full. The model has
# batch norm, and dropout, which draws.
SMALL = ["--model", "mobilenet_v3_small", "--size", "32", "--val-resize", "36", "--batch-size", "4"]
OFTEN = ["--checkpoint-steps", "2", "--signal-steps", "1", "--log-steps", "1"]
OPTIONS = [*SMALL, *OFTEN, "--epochs", str(EPOCHS), "--warmup-epochs", "1", "--ema", "0.9"]
STEPS = 6 * EPOCHS


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(stoker.__file__).parents[1]), *filter(None, sys.path)])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def recorded(launch: list[str], recipe: list[str], place: Path, **asked: Any) -> list[str]:
    """The command by which torchrun runs the recipe; ``asked`` as in recorded_recipe.py."""
    place.mkdir(exist_ok=True)
    script = str(Path(__file__).with_name("recorded_recipe.py"))
    return [
        *(sys.executable, "-m", "torch.distributed.run", *launch),
        *(script, json.dumps({"folder": str(place), **asked}), str(RECIPE), *recipe),
    ]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """What came of ``command``, started in ``folder``."""
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, env=environment()
    )


def on_ranks(world: int) -> list[str]:
    return ["--standalone", f"--nproc_per_node={world}"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set in which every image is a class of its own: the label says which it is."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(SAMPLES):
        save(folder / "train" / f"{number:03}" / "x.jpg", picture(48, 40, number), quality=80)
    (folder / "val").symlink_to("train")
    return folder


# What it refuses


def test_missing_data_is_told(tmp_path: Path) -> None:
    done = run([sys.executable, str(RECIPE)], tmp_path)
    assert done.returncode == 1
    looked = "there is no train set in data or /workspace/data"
    assert done.stderr == f"{looked}: say where train and val are, --data FOLDER\n"


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, images: Path) -> None:
    given = ["--data", str(images), *OPTIONS]
    done = run(recorded(on_ranks(2), given, tmp_path / "handed", gpus=1), tmp_path)
    assert done.returncode != 0
    assert "2 processes on a machine with 1 GPUs: torchrun --nproc_per_node=1\n" in done.stderr


def test_fewer_images_than_a_step_are_told(tmp_path: Path, images: Path) -> None:
    given = ["--data", str(images), *SMALL, "--accumulate", "12"]
    done = run([sys.executable, str(RECIPE), *given], tmp_path)
    assert done.returncode == 1
    assert done.stderr == "46 images are less than a step of 48: --batch-size\n"


# Killed, and gone on with


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def handed_out(folder: Path) -> tuple[Counter[tuple[int, int]], list[int]]:
    """How often each sample of each epoch counts, and the ranks of each start.

    Of each start counts what was handed out up to the position that the next one went on from.
    """
    starts: dict[str, list[list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        starts.setdefault(path.stem.split("-")[0], []).append(lines_of(path))
    begun = [ranks[0][0] for ranks in starts.values()]
    cuts = [(first["epoch"], first["position"]) for first in begun[1:]] + [(EPOCHS, 0)]
    counted = Counter[tuple[int, int]]()
    for ranks, cut in zip(starts.values(), cuts, strict=True):
        for batch in (line for lines in ranks for line in lines[1:]):
            if (batch["epoch"], batch["position"]) <= cut:
                counted.update((batch["epoch"], label) for label in batch["labels"])
    return counted, [first["world"] for first in begun]


def figures(output: Path) -> list[tuple[Any, ...]]:
    """Step, loss and accuracy of each step and evaluation, without what was taken back."""
    lines: list[dict[str, Any]] = []
    for line in lines_of(output / "log.jsonl"):
        if line["kind"] == "resumed":
            lines = [before for before in lines if before["step"] <= line["step"]]
        lines.append(line)
    kinds = ("train", "val")
    # An evaluation that was killed before the checkpoint after it comes again, the same.
    return sorted(
        {(x["step"], x["kind"], x["loss"], x["top1"]) for x in lines if x["kind"] in kinds}
    )


def once_each() -> Counter[tuple[int, int]]:
    return Counter((epoch, label) for epoch in range(EPOCHS) for label in range(SAMPLES))


@pytest.fixture(scope="module")
def undisturbed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The figures of two ranks that nobody disturbs."""
    place = tmp_path_factory.mktemp("undisturbed")
    given = ["--data", str(images), "--output", str(place / "out"), *OPTIONS]
    done = run(recorded(on_ranks(2), given, place / "handed"), place)
    assert done.returncode == 0, done.stderr
    assert handed_out(place / "handed") == (once_each(), [2])
    found = figures(place / "out")
    assert [kind for _, kind, _, _ in found].count("train") == STEPS
    assert [step for step, kind, _, _ in found if kind == "val"] == [6, 12, 18]
    return found


def kill_and_go_on(
    number: int, images: Path, place: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    """Kills the ``number``th time: a rank, or the job, somewhere; then goes on to the end."""
    draw = random.Random(number)
    kill = {
        "rank": draw.randrange(2),
        "batch": draw.randrange(STEPS - 4),
        "seconds": draw.uniform(0, 0.3),
        **(
            [
                {"whom": ["rank"], "signal": signal.SIGKILL},
                {"whom": ["job"], "signal": signal.SIGTERM},
            ]
        )[number % 2],
    }
    given = ["--data", str(images), "--output", str(place / "out"), *OPTIONS]
    done = run(recorded(on_ranks(2), given, place / "handed", kill=kill), place)
    assert done.returncode != 0, (kill, done.stdout)
    lines = lines_of(place / "out" / "log.jsonl")
    stopped = [line for line in lines if line["kind"] == "stopped"]
    assert len(stopped) == number % 2, (kill, done.stdout, done.stderr)
    if stopped:
        assert stopped[0]["signal"] == signal.SIGTERM
        # Nothing that was done is lost.
        assert (place / "out" / f"step-{lines[-1]['step']}.pt").exists()
    world = (2, 1, 3)[number // 2 % 3]
    again = run(recorded(on_ranks(world), given, place / "handed"), place)
    assert again.returncode == 0, (kill, again.stderr)
    counted, worlds = handed_out(place / "handed")
    assert counted == once_each(), kill
    assert worlds == [2, world]
    if world == 2:
        assert figures(place / "out") == undisturbed, kill
    assert len(list((place / "out").glob("step-*.pt"))) == 3
    assert not list((place / "out").glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_killed_and_gone_on(
    number: int, images: Path, tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    kill_and_go_on(number, images, tmp_path, undisturbed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(2, 20))
def test_killed_at_many_moments(
    number: int, images: Path, tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    kill_and_go_on(number, images, tmp_path, undisturbed)


# Elastic


def lose_an_agent(images: Path, place: Path, whom: list[str]) -> None:
    """Three agents of one rank each; ``whom`` of the third is killed in the second epoch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = ["--data", str(images), "--output", str(place / "out"), *OPTIONS]
    kill = {"rank": None, "batch": 5, "seconds": 0.1, "signal": signal.SIGKILL, "whom": whom}
    agents = []
    for number in range(3):
        meeting = {
            "is_host": int(number == 0),
            "last_call_timeout": 1,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 3,
        }
        launch = [
            *("--nnodes=2:3", "--nproc_per_node=1", "--max-restarts=10", "--rdzv-backend=c10d"),
            *("--rdzv-id=elastic", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"),
            "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in meeting.items()),
        ]
        asked = {"kill": kill} if number == 2 else {}
        command = recorded(launch, given, place / "handed", **asked)
        with (place / f"agent-{number}.log").open("w") as log:
            agents.append(
                subprocess.Popen(
                    command, cwd=place, stdout=log, stderr=subprocess.STDOUT, env=environment()
                )
            )
    try:
        codes = [agent.wait(timeout=400) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    told = (place / "agent-0.log").read_text()
    assert codes == [0, 0, -signal.SIGKILL], told
    counted, worlds = handed_out(place / "handed")
    assert counted == once_each()
    assert worlds[0] == 3 and worlds[-1] == 2
    assert figures(place / "out")[-1][1] == "val"


@pytest.mark.exhaustive
def test_a_machine_is_lost_and_two_go_on(images: Path, tmp_path: Path) -> None:
    lose_an_agent(images, tmp_path, ["job", "rank"])


@pytest.mark.exhaustive
def test_an_agent_is_lost_and_its_rank_leaves(images: Path, tmp_path: Path) -> None:
    lose_an_agent(images, tmp_path, ["job"])
    lines = lines_of(tmp_path / "out" / "log.jsonl")
    assert [line["signal"] for line in lines if line["kind"] == "stopped"] == [signal.SIGHUP]


# stoker train


def stoker_train(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stoker", "train", *arguments]


def test_the_command_runs_the_recipe_of_this_repository() -> None:
    assert recipe().read_bytes() == RECIPE.read_bytes()


@pytest.mark.exhaustive
def test_the_command_passes_options_on(images: Path, tmp_path: Path) -> None:
    shown = run(stoker_train("--ranks", "3", "--show", str(images), "--epochs", "7"), tmp_path)
    assert "torch.distributed.run --standalone --nproc_per_node=3 " in shown.stdout
    assert shown.stdout.endswith(
        f"train.py --data {images} --output runs/{images.name} --epochs 7\n"
    )
    own = run(stoker_train(str(images), "--help"), tmp_path)
    assert "--accumulate" in own.stdout and own.returncode == 0
    wrong = run(stoker_train(str(tmp_path)), tmp_path)
    assert wrong.returncode == 1 and "--data FOLDER" in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_command_trains(images: Path, tmp_path: Path, ranks: int) -> None:
    given = [str(images), *SMALL, "--epochs", "1", "--log-steps", "5"]
    done = run(stoker_train("--ranks", str(ranks), *given), tmp_path)
    assert done.returncode == 0, done.stderr
    lines = lines_of(tmp_path / "runs" / images.name / "log.jsonl")
    assert [line["images"] for line in lines if line["kind"] == "val"] == [SAMPLES]
