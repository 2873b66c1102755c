"""Workers that cannot start say why; batches cross where shared memory is too small for them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import functional as F

import stoker
from pictures import picture, save
from stoker import startup
from stoker.crossing import Piped
from stoker.trace import iterators
from tracing import canonical, told

TIERS: dict[str, dict[str, Any]] = {
    "keyed": {},
    "torch": {"randomness": "torch"},
    "stock": {"tier": "stock"},
    "torch's stock": {"tier": "stock", "randomness": "torch"},
}

tiers = pytest.mark.parametrize("tier", TIERS)


class Numbers(Dataset[Any]):
    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), index


class Holder:
    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def load(dataset: Any = None, **given: Any) -> list[Any]:
    given = {"batch_size": 4, "num_workers": 2, **given}
    return list(stoker.DataLoader(Numbers() if dataset is None else dataset, **given))


def message(**given: Any) -> str:
    with pytest.raises(stoker.WorkerError) as caught:
        load(**given)
    assert isinstance(caught.value, RuntimeError)
    assert str(caught.value) == f"{caught.value.cause}. {caught.value.remedy}"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.cause, again.remedy) == (caught.value.cause, caught.value.remedy)
    return str(caught.value)


# What cannot be pickled


SPAWN = multiprocessing.get_context("spawn")
WIDE = torch.arange(60_000, dtype=torch.float32).view(200, 300)


def _locals() -> dict[str, Callable[[], dict[str, Any]]]:
    class Local(Numbers):
        pass

    def initialise(worker: int) -> None:
        del worker

    deep = Holder(transforms=[Holder(), Holder(lambd=lambda tensor: tensor)])
    return {
        r"dataset.transform.transforms\[1\].lambd is a lambda \(.*test_workers.py:": lambda: {
            "dataset": Numbers(deep)
        },
        r"dataset is a .*Local": lambda: {"dataset": Local()},
        r"dataset.transform\['open'\] is a _thread.lock": lambda: {
            "dataset": Numbers({"open": threading.Lock()})
        },
        r"dataset.transform\[2\] is a lambda": lambda: {
            "dataset": Numbers([WIDE.clone(), SPAWN.Value("i", 3), lambda: None])
        },
        r"collate_fn is a lambda": lambda: {"collate_fn": lambda samples: samples},
        r"worker_init_fn is the function _locals.<locals>.initialise": lambda: {
            "worker_init_fn": initialise
        },
    }


@tiers
@pytest.mark.parametrize("wanted", _locals())
def test_what_cannot_be_sent_is_named(wanted: str, tier: str) -> None:
    given = _locals()[wanted]()
    assert len(load(**given, **TIERS[tier])) == 2  # a fork sends nothing
    method = "forkserver" if tier == "torch" else "spawn"
    with pytest.raises(stoker.WorkerError, match=wanted) as caught:
        load(**given, multiprocessing_context=method, **TIERS[tier])
    text = str(caught.value)
    assert f'started by "{method}"' in text
    assert 'multiprocessing_context="fork"' in text
    assert caught.value.__suppress_context__
    assert not multiprocessing.active_children()


def test_looking_for_names_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(startup, "_script", lambda: None)  # as at the prompt
    dataset = Numbers([WIDE.clone(), SPAWN.Value("i", 3)])
    loader = stoker.DataLoader(dataset, 4, num_workers=1, multiprocessing_context="spawn")
    assert startup.Starting.of(loader).prevented() is None  # nothing is of __main__
    request.getfixturevalue("no_leaks")
    for _ in range(3):
        assert startup.Starting.of(loader).prevented() is None


class Odd(Numbers):
    def __getstate__(self) -> Any:
        raise NotImplementedError("no state")


def test_an_exception_of_the_users_pickling() -> None:
    text = message(dataset=Odd(), multiprocessing_context="spawn")
    assert "NotImplementedError: no state" in text


class Sampler:
    def __iter__(self) -> Iterator[int]:
        raise TypeError("of the sampler")

    def __len__(self) -> int:
        return 8


def test_other_errors_are_handed_on() -> None:
    for context in ("fork", "spawn"):
        with pytest.raises(TypeError, match="of the sampler"):
            load(
                sampler=Sampler(),
                batch_size=None,
                multiprocessing_context=context,
                randomness="torch",
            )


# What the system refuses


@tiers
@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EAGAIN, "ulimit -u"), (errno.ENOMEM, "memory"), (errno.EMFILE, "ulimit -n")],
)
def test_limits_are_named(
    tier: str, number: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, left = os.fork, [1]

    def refusing() -> int:
        if left:
            left.pop()
            return fork()
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fork", refusing)  # the second worker does not start
    text = message(**TIERS[tier])
    assert "2 worker processes" in text
    assert errno.errorcode[number] in text
    assert remedy in text
    monkeypatch.undo()
    assert not multiprocessing.active_children()
    assert len(load(**TIERS[tier])) == 2


class Nested(Numbers):
    def __getitem__(self, index: int) -> Any:
        return load()


@tiers
def test_workers_of_workers(tier: str) -> None:
    with pytest.raises(RuntimeError, match="this process is a worker itself"):
        load(Nested(), **TIERS[tier])


# Scripts

DATASET = """
import sys
import torch
import stoker

class Images(torch.utils.data.Dataset):
    def __init__(self, size=0):
        self.bytes = bytes(size)
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index

def main(size=0, **given):
    loader = stoker.DataLoader(Images(size), 4, num_workers=2, **given)
    print(torch.cat(list(loader)).tolist())
"""


def run(tmp_path: Path, code: str, *, prompt: bool = False) -> subprocess.CompletedProcess[str]:
    source = DATASET + textwrap.dedent(code)
    (tmp_path / "script.py").write_text(source)
    path = os.pathsep.join(
        [str(Path(stoker.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.run(
        [sys.executable, "-" if prompt else "script.py"],
        input=source if prompt else None,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def last(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    return told(done.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize(
    "given",
    [
        'size=0, multiprocessing_context="spawn"',
        # So much does not fit into a pipe: the worker ends while it is written to.
        'size=10**7, multiprocessing_context="spawn", tier="stock"',
        'size=0, multiprocessing_context="forkserver", randomness="torch"',
    ],
)
def test_a_script_without_a_guard(given: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"main({given})")
    text = last(done)
    assert text.startswith("stoker.errors.WorkerError: ")
    assert "script.py starts workers while it is imported" in text
    assert 'if __name__ == "__main__":' in text
    assert "exited unexpectedly" not in done.stderr
    assert "BrokenPipeError" not in done.stderr


def test_a_script_with_a_guard(tmp_path: Path) -> None:
    done = run(tmp_path, 'if __name__ == "__main__": main(multiprocessing_context="spawn")')
    assert (done.returncode, told(done.stderr)) == (0, "")
    assert done.stdout == "[0, 1, 2, 3, 4, 5, 6, 7]\n"


def test_a_class_that_is_not_in_a_file(tmp_path: Path) -> None:
    done = run(tmp_path, 'main(multiprocessing_context="spawn", tier="stock")', prompt=True)
    text = last(done)
    assert "WorkerError: Images: defined in a notebook or at the prompt" in text
    assert "Move it into a module" in text


def test_a_worker_that_dies_for_another_reason(tmp_path: Path) -> None:
    code = """
    if __name__ == "__main__":
        main(multiprocessing_context="spawn")
    else:
        raise SystemExit(1)
    """
    text = last(run(tmp_path, code))
    assert "ended before its first batch; its own error stands above" in text


def test_a_notebook() -> None:
    pytest.importorskip("ipykernel")
    client = pytest.importorskip("jupyter_client")
    path = str(Path(stoker.__file__).parents[1])
    manager, kernel = client.manager.start_new_kernel(
        kernel_name="python3",
        env={**os.environ, "PYTHONPATH": path, "JPY_PARENT_PID": str(os.getpid())},
    )
    shown: list[str] = []

    def show(answer: dict[str, Any]) -> None:
        if answer["msg_type"] == "stream" and answer["content"]["name"] == "stdout":
            shown.append(answer["content"]["text"])

    try:
        cell = DATASET + "main()\nmain(multiprocessing_context='spawn')"
        answer = kernel.execute_interactive(cell, timeout=100, output_hook=show)["content"]
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "".join(shown) == "[0, 1, 2, 3, 4, 5, 6, 7]\n"  # a fork finds the class
    assert answer["ename"] == "WorkerError"
    assert "Images: defined in a notebook or at the prompt" in answer["evalue"]


# Shared memory


@pytest.fixture
def cramped(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 kB of shared memory, and workers for which using more is an error."""
    monkeypatch.setattr(iterators, "free_bytes", lambda: 100_000)
    monkeypatch.setattr(Piped, "told", False)
    monkeypatch.setattr(Piped, "storages", 0)

    def watched(function: Any, size_of: Callable[..., int]) -> Any:
        def watching(*arguments: Any) -> Any:
            assert size_of(*arguments) <= 20_000, "shared memory was used"
            return function(*arguments)

        return watching

    kind = torch.UntypedStorage
    share, new = kind._share_fd_cpu_, kind._new_using_fd_cpu
    monkeypatch.setattr(kind, "_share_fd_cpu_", watched(share, lambda self: self.nbytes()))
    monkeypatch.setattr(kind, "_new_using_fd_cpu", staticmethod(watched(new, lambda size: size)))


class Images(Dataset[Any]):
    def __init__(self, root: Path, kind: str) -> None:
        self.paths, self.kind = sorted(root.iterdir()), kind

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.paths[index]).convert("RGB").resize((64, 64))
        if self.kind == "stock":
            return torch.full((3, 64, 64), float(index)), index
        tensor = F.to_tensor(image)
        return tensor * 2 if self.kind == "materialised" else tensor, index


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for i in range(12):
        save(root / f"{i:02}.jpg", picture(90, 80, seed=i), quality=85)
    return root


@tiers
@pytest.mark.parametrize("kind", ["stock", "materialised", "recorded"])
@pytest.mark.usefixtures("cramped")
def test_batches_go_through_the_pipe(kind: str, tier: str, folder: Path) -> None:
    dataset = Images(folder, kind)
    expected = load(dataset, num_workers=0, seed=1)
    loader = stoker.DataLoader(dataset, 4, num_workers=2, seed=1, **TIERS[tier])
    crosses = kind != "recorded" or "stock" in tier
    if crosses:
        with pytest.warns(stoker.StokerWarning, match="do not fit into /dev/shm") as warned:
            result = list(loader)
        assert len(warned) == 1
    else:
        result = list(loader)  # a warning would be an error
    assert canonical(result) == canonical(expected)
    assert [images.is_shared() for images, _ in result if crosses] == [False] * 3 * crosses
    assert [labels.is_shared() for _, labels in result] == [True] * 3  # these fit
    list(loader)  # said once


class Things(Dataset[Any]):
    """What else crosses, all of it too large to be shared."""

    def __len__(self) -> int:
        return len(self.all())

    def all(self) -> list[Any]:
        image = tv_tensors.Image(torch.arange(75_000).to(torch.uint8).view(3, 50, 500))
        return [
            WIDE,
            WIDE.t(),
            WIDE[3],
            WIDE[:, 5:9],
            WIDE[::2, ::3],
            WIDE[:0],
            WIDE.to(torch.bfloat16),
            WIDE.to(torch.float64).t()[1:],
            WIDE > 7,
            torch.tensor([3.5]),
            torch.zeros(1).expand(50_000),
            WIDE.to_sparse(),
            torch.nn.Parameter(WIDE),
            image,
            image[1:],
            {"a": (WIDE, WIDE), "b": WIDE.numpy()},
        ]

    def __getitem__(self, index: int) -> Any:
        return self.all()[index]


def dense(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_sparse:
        return value.to_dense()
    return value.detach() if isinstance(value, torch.nn.Parameter) else value


@pytest.mark.usefixtures("cramped")
@pytest.mark.filterwarnings("ignore:the batches in flight:stoker.StokerWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_what_goes_through_the_pipe_arrives_as_it_was() -> None:
    things = Things()
    found = load(things, batch_size=None, num_workers=1, collate_fn=id_)
    for thing, sent in zip(things.all(), found, strict=True):
        assert canonical(dense(sent)) == canonical(dense(thing))
        assert type(sent) is type(thing)
    assert found[15]["a"][0] is found[15]["a"][1]
    assert found[2].untyped_storage().nbytes() == 1200


def id_(value: Any) -> Any:
    return value


@pytest.mark.usefixtures("cramped")
@pytest.mark.filterwarnings("ignore:the batches in flight:stoker.StokerWarning")
def test_a_full_place_is_as_a_small_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(iterators, "free_bytes", lambda: 10**12)  # it was free before
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    monkeypatch.setattr(torch.UntypedStorage, "_new_using_fd_cpu", full)
    dataset = Images(folder, "stock")
    result = load(dataset, tier="stock", num_workers=1, seed=1)
    assert canonical(result) == canonical(load(dataset, num_workers=0, seed=1))
    assert not result[0][1].is_shared()


SMALL = """
import sys
import numpy as np, torch, stoker
from PIL import Image
import torchvision.transforms.functional as F

Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(sys.argv[1])

class Images(torch.utils.data.Dataset):
    def __init__(self, kind): self.kind = kind
    def __len__(self): return 512
    def __getitem__(self, index):
        if self.kind == "stock": return torch.full((3, 224, 224), float(index)), index
        image = F.to_tensor(Image.open(sys.argv[1]).convert("RGB").resize((224, 224)))
        return image + 1 if self.kind == "materialised" else image, index

for kind, tier in [("stock", "stock"), ("materialised", "auto"), ("recorded", "auto")]:
    loader = stoker.DataLoader(Images(kind), 256, num_workers=2, tier=tier)
    print(kind, [tuple(images.shape) for images, _ in loader], loader.explain().tier)
"""


@pytest.mark.slow
def test_a_containers_shared_memory(tmp_path: Path) -> None:
    """64 MiB, in a mount namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    (tmp_path / "small.py").write_text(SMALL)
    path = os.pathsep.join(
        [str(Path(stoker.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm || exit 77; "
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount + f"exec {sys.executable} small.py x.jpg"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("mounting is not allowed here")
    shapes = "[(256, 3, 224, 224), (256, 3, 224, 224)]"
    assert done.stdout.splitlines() == [
        f"stock {shapes} keyed",
        f"materialised {shapes} materialised",
        f"recorded {shapes} recorded",
    ], done.stderr
    assert done.stderr.count("StokerWarning") == 1
