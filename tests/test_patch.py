"""`patch`, `accelerate`, `explain` and `stoker run`: torch's batches, made by our threads."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.transforms as T
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset

import stoker
from pictures import picture, save
from stoker.patching import _get_iterator, _State
from stoker.trace.iterators import stock_iterator
from tracing import canonical, seed, told

TRAIN = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToTensor()])
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for i in range(12):
        save(root / f"{i:02}.jpg", picture(90 + 7 * i, 80 + 5 * i, seed=i), quality=85)
    return root


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    _State.accelerated = False
    stoker.unpatch()
    assert here()._get_iterator is stock_iterator


def here() -> Any:
    return DataLoader


class Images(Dataset[Any]):
    def __init__(self, root: Path, doubled: bool = False) -> None:
        self.paths, self.doubled = sorted(root.iterdir()), doubled

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = TRAIN(Image.open(self.paths[index]).convert("RGB"))
        return image * 2 if self.doubled else image, index


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[Any]):
    def __init__(self, root: Path) -> None:
        self.images = Images(root)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.images[index] for index in range(first, 12, step))


def epochs(loader: Any, number: int = 2) -> Any:
    seed(11)
    return [canonical(batch) for _ in range(number) for batch in loader]


KINDS: dict[str, dict[str, Any]] = {
    "two workers": {"num_workers": 2},
    "persistent": {"num_workers": 1, "persistent_workers": True},
    "no workers": {},
    "no batches": {"num_workers": 1, "batch_size": None, "shuffle": None},
    "a generator": {"num_workers": 1, "generator": "made"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_patched_loaders_give_torchs_batches(kind: str, folder: Path) -> None:
    def make() -> Any:
        given: dict[str, Any] = {"batch_size": 5, "shuffle": True, **KINDS[kind]}
        if "generator" in given:
            given["generator"] = torch.Generator().manual_seed(3)
        return DataLoader(Images(folder), **given)

    expected = epochs(make())
    with stoker.patch():
        loader = make()
        assert epochs(loader) == expected
    explained = stoker.explain(loader)
    assert explained.tier == "recorded"
    assert explained.facts["samples"] == "24 recorded"
    assert type(loader) is DataLoader
    assert loader.num_workers == KINDS[kind].get("num_workers", 0)


def test_each_tier(folder: Path) -> None:
    datasets: dict[str, Any] = {
        "recorded": Images(folder),
        "materialised": Images(folder, doubled=True),
        "torch": Numbers(),
    }
    for tier, dataset in datasets.items():
        expected = epochs(DataLoader(dataset, 5, num_workers=1))
        loader = stoker.accelerate(DataLoader(dataset, 5, num_workers=1))
        assert stoker.explain(loader).tier == "traced"
        assert epochs(loader) == expected
        assert stoker.explain(loader).tier == tier
    stream = stoker.accelerate(DataLoader(Stream(folder), 5, num_workers=2))
    assert epochs(stream) == epochs(DataLoader(Stream(folder), 5, num_workers=2))
    assert stoker.explain(stream).tier == "materialised"


def test_patching_is_undone_and_nests() -> None:
    assert here()._get_iterator is stock_iterator
    attributes = dict(vars(DataLoader))
    with stoker.patch():
        with stoker.patch():
            pass
        assert here()._get_iterator is _get_iterator
        changed = {name for name, value in vars(DataLoader).items() if attributes[name] != value}
        assert changed == {"_get_iterator"}
    assert here()._get_iterator is stock_iterator
    stoker.patch()
    stoker.patch()
    stoker.unpatch()
    assert here()._get_iterator is stock_iterator
    stoker.unpatch()


def test_a_patch_of_somebody_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(self: Any) -> Any:
        return iter("theirs")

    monkeypatch.setattr(DataLoader, "_get_iterator", theirs)
    with pytest.warns(stoker.StokerWarning, match="theirs"):
        stoker.patch()
    assert "".join(DataLoader(Numbers())) == "theirs"


class Own(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return iter(["own"])


class OwnOnTop(DataLoader[Any]):
    """Keeps torch's iterator over epochs, as timm's does."""

    iterator: Any = None

    def __iter__(self) -> Any:
        self.iterator = self.iterator or super().__iter__()
        yield next(self.iterator)
        yield "more"


def test_subclasses_keep_their_behaviour(folder: Path) -> None:
    with stoker.patch():
        assert list(Own(Numbers())) == ["own"]
        loader = OwnOnTop(Images(folder), 5)
        first, more = loader
        assert len(first[0]) == 5
        assert more == "more"
        assert stoker.explain(loader).tier == "recorded"
    with pytest.warns(stoker.StokerWarning, match="Own has an iterator of its own"):
        assert list(stoker.accelerate(Own(Numbers()))) == ["own"]


def test_stokers_own_loaders_are_not_touched(folder: Path) -> None:
    def make(**given: Any) -> Any:
        return stoker.DataLoader(Images(folder), 5, num_workers=0, **given)

    stock = epochs(make(seed=1, tier="stock"), 1)
    with stoker.patch():
        loader = make(seed=1, tier="stock", randomness="torch")
        list(loader)
        assert loader.explain().tier == "torch"
        assert stoker.explain(loader) == loader.explain()
        loader = make(seed=1, tier="stock")
        assert epochs(loader, 1) == stock
        assert loader.explain().tier == "keyed"
        assert stoker.accelerate(loader) is loader


def test_accelerating(folder: Path) -> None:
    def make(**given: Any) -> Any:
        return DataLoader(Images(folder), 5, num_workers=1, **given)

    loader = make()
    other = make()
    assert stoker.accelerate(loader) is loader
    list(loader)
    before = stoker.explain(loader)
    assert stoker.accelerate(loader) is loader
    assert stoker.explain(loader) == before  # nothing is counted anew
    list(other)
    assert stoker.explain(other).why == "neither patched nor accelerated"
    for again in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        list(again)
        assert stoker.explain(again).facts["samples"].endswith("recorded")
    stoker.unpatch()
    list(loader)
    assert stoker.explain(loader).facts["samples"] != before.facts["samples"]
    used = make(persistent_workers=True)
    list(used)
    with pytest.warns(stoker.StokerWarning, match="run already"):
        stoker.accelerate(used)
    list(used)


def test_what_is_no_loader() -> None:
    for nothing in (None, [1], Numbers()):
        with pytest.raises(TypeError, match="expected torch's DataLoader"):
            stoker.accelerate(nothing)
        with pytest.raises(TypeError, match="expected torch's DataLoader"):
            stoker.explain(nothing)


class Nested(Images):
    """Uses a loader inside of a worker."""

    def __getitem__(self, index: int) -> Any:
        inner = DataLoader(Images.__new__(Images), 4)
        vars(inner.dataset).update(paths=self.paths[:4], doubled=False)
        return next(iter(inner))[0], type(inner._get_iterator()).__name__


def test_loaders_that_user_code_has_inside_are_stock(folder: Path) -> None:
    for workers in (0, 1):
        expected = epochs(DataLoader(Nested(folder), 3, num_workers=workers), 1)
        with stoker.patch():
            assert epochs(DataLoader(Nested(folder), 3, num_workers=workers), 1) == expected


def test_what_cannot_be_traced_is_said_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_State, "told", False)
    open_ = Image.open
    monkeypatch.setattr(Image, "open", lambda *arguments: open_(*arguments))
    with stoker.patch():
        loader = DataLoader(Images(folder), 5)
        with pytest.warns(stoker.StokerWarning, match=r"open is not Pillow's own"):
            iter(loader)
        list(loader)  # a second warning would be an error
        assert "open is not Pillow's own" in stoker.explain(loader).why


# stoker run

SCRIPT = """
import os, sys
early = [name for name in ("torch", "numpy", "stoker.patching") if name in sys.modules]
print(sys.argv, sys.path[0], __file__, __name__, __spec__ and __spec__.name, __package__, early)

def fail():
    raise ValueError("in the script")

if __name__ == "__main__":
    import atexit
    atexit.register(lambda: print("at exit", fail.__name__, sys.modules["__main__"].fail is fail))
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    if what == "fail":
        fail()
    if what == "status":
        sys.exit(7)
    if what == "words":
        sys.exit("words")
    if what == "interrupt":
        import signal
        # Python's own, also where the tests were started in the background, which ignores it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
"""


def python(*arguments: str, at: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(
        [str(Path(stoker.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=at,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


RUN = ("-m", "stoker", "run")


@pytest.mark.parametrize("what", ["", "fail", "status", "words", "interrupt", "--flag -m x"])
@pytest.mark.parametrize("form", ["file", "elsewhere", "module", "package"])
def test_a_script_runs_as_python_runs_it(what: str, form: str, tmp_path: Path) -> None:
    (tmp_path / "pack" / "deep").mkdir(parents=True)
    for place in ("script.py", "pack/module.py", "pack/deep/__main__.py"):
        (tmp_path / place).write_text(SCRIPT)
    start = {
        "file": ["script.py"],
        "elsewhere": ["pack/module.py"],
        "module": ["-m", "pack.module"],
        "package": ["-m", "pack.deep"],
    }[form]
    theirs = python(*start, *what.split(), at=tmp_path)
    ours = python(*RUN, *start, *what.split(), at=tmp_path)
    assert ours.returncode == theirs.returncode
    assert ours.stdout == theirs.stdout
    # With -m, Python shows two lines of its own machinery first.
    errors = [line for line in theirs.stderr.splitlines() if "<frozen runpy>" not in line]
    assert ours.stderr.splitlines() == errors
    if what == "interrupt":
        assert ours.returncode in (-signal.SIGINT, 128 + signal.SIGINT)


@pytest.mark.parametrize("start", [["absent.py"], ["-m", "absent"], ["broken.py"]], ids=str)
def test_a_script_that_is_not_there(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = = 1\n")
    theirs, ours = python(*start, at=tmp_path), python(*RUN, *start, at=tmp_path)
    assert (ours.returncode, ours.stderr) == (theirs.returncode, theirs.stderr)
    assert ours.returncode != 0


def test_usage(tmp_path: Path) -> None:
    for wrong in (["--unknown", "x.py"], ["-m"]):
        done = python(*RUN, *wrong, at=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("error: stoker run: ")


TRAINING = """
import hashlib, os, sys
if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T

class Images(Dataset):
    def __init__(self, root):
        self.root, self.names = root, sorted(os.listdir(root))
        self.transform = T.Compose([T.RandomResizedCrop(32), T.ToTensor()])
    def __len__(self):
        return len(self.names)
    def __getitem__(self, index):
        image = Image.open(os.path.join(self.root, self.names[index])).convert("RGB")
        return self.transform(image), index

if __name__ == "__main__":
    torch.manual_seed(5)
    method = sys.argv[2]
    loader = DataLoader(
        Images(sys.argv[1]), 5, True, num_workers=1, multiprocessing_context=method
    )
    digest = hashlib.sha256()
    for images, numbers in loader:
        digest.update(images.numpy().tobytes() + numbers.numpy().tobytes())
    print(digest.hexdigest(), torch.get_num_threads(), os.environ.get("RANK"))
    if "stoker" in sys.modules:
        import stoker
        print(stoker.explain(loader).facts["samples"])
"""


@pytest.fixture(scope="module")
def training(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the script, and what it prints by itself."""
    root = tmp_path_factory.mktemp("training")
    (root / "train.py").write_text(TRAINING)
    done = python("train.py", str(folder), "fork", at=root)
    assert (done.returncode, told(done.stderr)) == (0, "")
    return root, done.stdout.strip()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_script_that_trains(method: str, folder: Path, training: tuple[Path, str]) -> None:
    root, expected = training
    done = python(*RUN, "train.py", str(folder), method, at=root)
    assert done.stdout.split("\n")[:2] == [expected, "12 recorded"]
    assert (done.returncode, told(done.stderr)) == (0, "")


def test_under_torchrun(folder: Path, training: tuple[Path, str]) -> None:
    root, expected = training
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = python(*torchrun, *RUN, "train.py", str(folder), "fork", at=root)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    # No rank is given less than the script asks for.
    digest = expected.split()[0]
    assert sorted(line.split()[2] for line in lines if line.startswith(digest)) == ["0", "1"]
    assert lines.count("12 recorded") == 2


def test_looking_for_torch_does_not_import_it(tmp_path: Path) -> None:
    script = """
        import importlib.util, sys
        assert importlib.util.find_spec("torch") is not None
        assert "torch" not in sys.modules
        import torch
        import importlib.util
        importlib.util.find_spec("torch")
        print(torch.utils.data.DataLoader._get_iterator.__module__)
    """
    (tmp_path / "look.py").write_text(textwrap.dedent(script))
    done = python(*RUN, "look.py", at=tmp_path)
    assert (done.stdout, done.stderr) == ("stoker.patching\n", "")
