"""`stoker diagnose`: loops seen from outside, ceilings of real sets, the command line."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as T
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import stoker
from faulty import serving
from stoker import ceilings, engine, vitals
from stoker.ceilings import Effort
from stoker.diagnosis import samples_of
from stoker.lower import lower_transform
from stoker.pack import pack
from stoker.plan import Plan
from stoker.sources.dataset import Rows, read
from stoker.verdict import judge

SHORT = Effort(seconds=0.02, rounds=2)
TAIL = [T.ToTensor(), T.Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))]
TRAIN = T.Compose([T.RandomResizedCrop(64), T.RandomHorizontalFlip(), *TAIL])


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Dataset[Any]):
    """Samples that take ``seconds`` of a clock each."""

    def __init__(self, clock: Clock, seconds: float, samples: int = 32) -> None:
        self.clock, self.seconds, self.samples = clock, seconds, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.clock.now += self.seconds
        return torch.zeros(3, 4, 4), index


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class folder of 40 JPEGs whose bytes are mostly picture."""
    folder = tmp_path_factory.mktemp("classes")
    for number in range(40):
        place = folder / ("cat" if number % 3 else "dog")
        place.mkdir(exist_ok=True)
        image = Image.effect_noise((400, 300), 40).convert("RGB")
        image.save(place / f"{number:02d}.jpg", quality=90)
    return folder


# Loops


@pytest.mark.parametrize("kind", [DataLoader, stoker.DataLoader], ids=["torch", "stoker"])
def test_a_slow_dataset_is_waited_for(kind: Any) -> None:
    """Batches of 8 take 8 x 30 ms, the step 60 ms: the loop waits 80 % of the time."""
    clock = Clock()
    loader = kind(Slow(clock, 0.03), batch_size=8, num_workers=0)
    with stoker.diagnose(loader, measure=False, clock=clock) as d:
        for images, _ in loader:
            assert images.shape == (8, 3, 4, 4)
            clock.now += 0.06
    assert d.report is not None
    loop = d.report.loop
    assert (loop.batches, loop.samples, loop.epochs) == (4, 32, 1)
    assert loop.first_seconds == pytest.approx(0.24)
    assert loop.wait_seconds == pytest.approx(0.72)
    assert loop.step_seconds == pytest.approx(0.24)
    assert loop.waits == pytest.approx(0.8)
    assert d.report.verdict.stage != "consumer"
    assert d.report.verdict.actions[0].gain == pytest.approx(5)
    assert "waited 80%" in str(d)
    assert "num_workers=0" in str(d)


def test_a_slow_step_is_the_consumer() -> None:
    clock = Clock()
    loader = DataLoader(Slow(clock, 0.001), batch_size=8)
    with stoker.diagnose(loader, measure=False, clock=clock) as d:
        for _ in range(3):
            for _ in loader:
                clock.now += 0.5
    assert d.report is not None
    assert d.report.loop.epochs == 3
    assert d.report.verdict.stage == "consumer"
    assert "nothing to gain here" in str(d)


@pytest.mark.parametrize(
    "make", [lambda: [[1, 2], [3]], lambda: ([n] for n in range(2))], ids=["list", "generator"]
)
def test_what_cannot_be_seen_from_outside(make: Callable[[], Any]) -> None:
    clock = Clock()
    with stoker.diagnose(make(), clock=clock) as d:
        for _ in d:
            clock.now += 1
    assert d.report is not None
    assert d.report.loop.batches == 2
    assert d.report.ceilings is None
    with (
        pytest.raises(RuntimeError, match="for batch in d"),
        stoker.diagnose(loader := make()),
    ):
        list(loader)
    with pytest.raises(RuntimeError, match="inside of"):
        iter(stoker.diagnose(make()))
    with pytest.raises(TypeError, match="cannot be iterated"):
        stoker.diagnose(3)


def test_only_the_loader_that_was_given_is_watched() -> None:
    clock = Clock()
    one, other = (DataLoader(Slow(clock, 0.01), batch_size=8) for _ in range(2))
    before = DataLoader.__iter__
    with stoker.diagnose(one, measure=False, clock=clock) as d:
        inner = iter(other)
        assert type(inner).__module__.startswith("torch.")
        next(iter(one))
    assert d.report is not None
    assert d.report.loop.batches == 1
    assert DataLoader.__iter__ is before


def test_errors_pass_and_everything_is_put_back() -> None:
    before = DataLoader.__iter__, stoker.DataLoader.__iter__
    loader = DataLoader(Slow(Clock(), 0.1), batch_size=8)
    d = stoker.diagnose(loader)

    def loop() -> None:
        with d:
            for _ in loader:
                raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert d.report is None
    assert (DataLoader.__iter__, stoker.DataLoader.__iter__) == before


def test_a_subclass_without_an_iter_of_its_own_gets_none() -> None:
    class Sub(DataLoader[Any]):
        pass

    loader = Sub(Slow(Clock(), 0.1), batch_size=8)
    with stoker.diagnose(loader, measure=False):
        assert len(list(loader)) == 4
    assert "__iter__" not in vars(Sub)


def test_the_iterator_is_still_torchs_to_look_at() -> None:
    loader = DataLoader(Slow(Clock(), 0.1), batch_size=8)
    with stoker.diagnose(loader, measure=False):
        iterator: Any = iter(loader)
        next(iterator)
        assert len(iterator) == 4
        assert iterator._num_yielded == 1


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 3), 5),
        ([torch.zeros(5, 3), torch.zeros(5)], 5),
        ({"image": torch.zeros(7, 3), "n": 1}, 7),
        ([(torch.zeros(3), 1), (torch.zeros(3), 2)], 2),
        ({"a": {"b": np.zeros((3, 2))}}, 3),
        ((["x", "y"], torch.zeros(2)), 2),
        (torch.tensor(1.0), 1),
        (3, 1),
        ([], 0),
        ({}, 0),
    ],
)
def test_samples_of_a_batch(batch: Any, samples: int) -> None:
    assert samples_of(batch) == samples


def test_the_ceilings_of_torchs_loader(classes: Path) -> None:
    """What stoker's would give is measured beside it, and the step on a batch that is there."""
    loader = DataLoader(stoker.ImageFolder(str(classes), TRAIN), batch_size=8)
    steps = []
    with stoker.diagnose(loader, step=lambda batch: steps.append(len(batch[0])), effort=SHORT) as d:
        for _ in loader:
            pass
    assert d.report is not None
    found = d.report.ceilings
    assert found is not None
    assert found.theirs is not None and found.theirs.median > 0
    assert found.consumer is not None and set(steps) == {8}
    assert found.tier == "lowered"
    assert found.loop is not None
    assert d.report.verdict.stage != "consumer"
    assert "In the loop itself it waited" in str(d)


# Ceilings


def test_of_a_lowered_set(classes: Path, request: pytest.FixtureRequest) -> None:
    dataset = stoker.ImageFolder(str(classes), TRAIN)
    ceilings.measure(dataset, threads=1, batch_size=8, effort=SHORT)
    request.getfixturevalue("no_leaks")
    found, system = ceilings.measure(dataset, threads=1, batch_size=8, effort=SHORT)
    assert found.tier == "lowered"
    assert 0.2 < found.decode_share <= 1
    assert [op.name.partition("(")[0] for op in found.ops] == [
        "decode all",
        "RandomResizedCrop",
        "RandomHorizontalFlip",
    ]
    assert found.storage is not None
    assert not found.storage.packed
    for figure in (*found.made.values(), found.loader, found.storage.warm, found.storage.memory):
        assert figure is not None
        assert 0 < figure.low <= figure.median <= figure.high
    size = sum(path.stat().st_size for path in classes.rglob("*.jpg")) / 40
    assert found.sample_bytes == pytest.approx(size)
    if vitals.PROC.exists():
        assert len(system.cores) == os.cpu_count()


def test_of_shards(classes: Path, tmp_path: Path) -> None:
    pack(stoker.ImageFolder(str(classes)), tmp_path / "a-%06d.tar")
    dataset = stoker.open(tmp_path / "a-*.tar", TRAIN)
    found, _ = ceilings.measure(dataset, threads=1, batch_size=8, effort=SHORT)
    assert found.storage is not None and found.storage.packed
    rows = read(dataset)
    assert isinstance(rows, Rows)
    reads = ceilings.reads(rows, np.arange(20), 2, SHORT)
    assert reads.images.median > 0
    assert 0 < reads.sample_bytes < 1e6


def test_of_remote_shards(classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by ranges over the network: nothing is cached, and other threads read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pack(stoker.ImageFolder(str(classes), cache=False), tmp_path / "a.tar")
    with serving() as server:
        server.objects["/a.tar"] = (tmp_path / "a.tar").read_bytes()
        dataset = stoker.open(f"{server.url}/a.tar", TRAIN, remote="ranges")
        found, _ = ceilings.measure(dataset, threads=1, batch_size=8, effort=SHORT)
    assert found.storage is not None
    assert found.storage.ahead and found.storage.kind == "network"
    assert found.storage.cold_random is None


def _add(image: Any) -> Any:
    for _ in range(20_000):
        pass
    return image


def test_python_steps_are_told_apart(classes: Path) -> None:
    transform = T.Compose([_add, *TRAIN.transforms])
    dataset = stoker.ImageFolder(str(classes), transform)
    found, _ = ceilings.measure(dataset, threads=0, batch_size=8, effort=SHORT)
    assert [op.name for op in found.ops if op.python] == ["_add"]
    assert found.stock is not None
    assert "stock" in {action.name for action in judge(found).actions}


def test_one_transform_that_is_no_list(classes: Path) -> None:
    def own(image: Any) -> Any:
        return torch.zeros(3, image.height, image.width)

    dataset = stoker.ImageFolder(str(classes), own)
    found, _ = ceilings.measure(dataset, threads=0, batch_size=8, effort=SHORT)
    assert [op.name.rpartition(".")[2] for op in found.ops if op.python] == ["own"]


def test_own_code_that_sleeps_is_told_from_code_that_computes() -> None:
    class Sleeps(Dataset[Any]):
        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> int:
            time.sleep(0.002)  # what is measured is that it does not compute
            return index

    class Computes(Sleeps):
        def __getitem__(self, index: int) -> int:
            return sum(range(50_000)) + index

    sleeps, _ = ceilings.measure(Sleeps(), threads=0, batch_size=4, effort=SHORT)
    computes, _ = ceilings.measure(Computes(), threads=0, batch_size=4, effort=SHORT)
    assert sleeps.waiting > 0.5 > computes.waiting
    assert judge(sleeps).stage == "storage"
    assert judge(computes).stage in ("python", "threads")
    with pytest.raises(ValueError, match="empty"):
        ceilings.measure(torch.utils.data.TensorDataset(torch.zeros(0)), threads=0)


def test_broken_samples_are_no_obstacle(classes: Path, tmp_path: Path) -> None:
    for number, path in enumerate(sorted(classes.rglob("*.jpg"))[:20]):
        (tmp_path / "a").mkdir(exist_ok=True)
        content = path.read_bytes()
        (tmp_path / "a" / path.name).write_bytes(content[: (len(content), 300, 0)[number % 3]])
    dataset = stoker.ImageFolder(str(tmp_path), TRAIN)
    found, _ = ceilings.measure(dataset, threads=1, batch_size=4, effort=SHORT)
    assert found.made_here.median > 0


def test_nothing_can_be_read(classes: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.jpg").write_bytes(b"")
    with pytest.raises(stoker.SourceError, match="none of the samples"):
        ceilings.measure(stoker.ImageFolder(str(tmp_path), TRAIN), threads=0, effort=SHORT)


def test_png_is_decoded_by_pillow(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(12):
        image = Image.effect_noise((300, 200), 50).convert("RGB")
        image.save(tmp_path / "a" / f"{number}.png")
    dataset = stoker.ImageFolder(str(tmp_path), TRAIN)
    found, _ = ceilings.measure(dataset, threads=1, batch_size=4, smaller=False, effort=SHORT)
    assert found.ops[0].name == "decode (Pillow)"
    assert found.decode_share > 0.5


def test_a_step_alone_by_a_planted_clock() -> None:
    clock = Clock()

    def step(batch: int) -> None:
        clock.now += 0.05

    rate = ceilings.consumer(step, 0, 32, Effort(0.2, 3, clock))
    assert rate.median == pytest.approx(32 / 0.05)
    assert rate.low == pytest.approx(rate.high)


@pytest.mark.parametrize(
    ("transform", "region"),
    [
        (T.Compose([T.CenterCrop(100), T.ToTensor()]), (150, 100, 100, 100)),
        (T.Compose([T.Resize((150, 200)), T.CenterCrop(100), T.ToTensor()]), (100, 50, 200, 200)),
        (T.Compose([T.RandomHorizontalFlip(1.0), T.ToTensor()]), (0, 0, 400, 300)),
        (T.Compose([T.Pad(10), T.ToTensor()]), (0, 0, 400, 300)),
        (T.Compose([T.RandomRotation(30), T.ToTensor()]), (0, 0, 400, 300)),
    ],
)
def test_what_a_plan_needs_of_an_image(transform: Any, region: tuple[int, ...]) -> None:
    plan = lower_transform(transform)
    assert isinstance(plan, Plan)
    assert engine.needed(plan, (300, 400), 1) == region


def test_what_is_needed_lies_inside() -> None:
    plan = lower_transform(TRAIN)
    assert isinstance(plan, Plan)
    for key in range(200):
        for height, width in ((300, 400), (7, 900), (1, 1)):
            x, y, across, down = engine.needed(plan, (height, width), key)
            assert x >= 0 and y >= 0 and across > 0 and down > 0
            assert x + across <= width and y + down <= height


# The command line


def _run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "stoker", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "300"},
    )
    assert done.returncode == code, done.stderr
    return done


QUICK = ("--seconds", "0.02", "--rounds", "2", "--batch-size", "8")


def test_json(classes: Path, tmp_path: Path) -> None:
    pack(stoker.ImageFolder(str(classes)), tmp_path / "a-%06d.tar")
    tar, picture = str(tmp_path / "a-*.tar"), tmp_path / "a.png"
    done = _run(
        "diagnose",
        str(classes),
        "--json",
        "--png",
        str(picture),
        "--step-ms",
        "1000",
        "--against",
        tar,
        *QUICK,
    )
    told = json.loads(done.stdout)
    assert set(told) == {
        "data", "recipe", "verdict", "ceilings", "vitals", "memory", "against",
    }  # fmt: skip
    assert told["verdict"]["stage"] == "consumer"  # 8 images/s
    assert told["ceilings"]["consumer"]["median"] == pytest.approx(8)
    assert set(told["ceilings"]["storage"]) == {
        "kind", "latency_seconds", "warm", "cold_random", "cold_sequential", "memory",
        "stays_cached", "packed", "ahead",
    }  # fmt: skip
    assert told["against"]["gain"] == pytest.approx(1)
    assert told["against"]["here"]["sample_bytes"] == told["against"]["there"]["sample_bytes"]
    with Image.open(picture) as image:
        assert image.format == "PNG"


def test_table(classes: Path) -> None:
    done = _run("diagnose", str(classes), "--against", str(classes), "--cold", *QUICK)
    for text in ("images/s", "MB/s", "storage, cold, random", "ms a sample", "Read cold", "binds"):
        assert text in done.stdout, text


def test_wrong_arguments(classes: Path, tmp_path: Path) -> None:
    assert "--against" in _run("diagnose", str(classes), "--against-labels", "x", code=2).stderr
    assert "no such folder" in _run("diagnose", str(tmp_path / "none"), code=1).stderr
    assert "no other options" in _run("diagnose", "--png", "x", "--", "a.py", code=2).stderr
    assert "no other options" in _run("diagnose", "--", code=2).stderr
    assert "error: stoker diagnose: unknown option" in _run("diagnose", "--", "-x", code=2).stderr


SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
assert sys.argv[1:] == ["a", "--", "b"], sys.argv
if __name__ == "__main__":
    data = TensorDataset(torch.zeros(40, 3))
    for epoch in range(3):
        for _ in DataLoader(data, batch_size=8):
            pass
    {ending}
"""


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("raise KeyError('x')", 1)])
def test_a_script(tmp_path: Path, ending: str, code: int) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(ending=ending))
    done = _run("diagnose", "--json", "--", "python", str(path), "a", "--", "b", code=code)
    told = json.loads(done.stdout.splitlines()[-1])
    (loader,) = told["loaders"]  # made anew each epoch, and one to people
    assert (loader["loop"]["batches"], loader["loop"]["epochs"]) == (15, 3)
    assert "TensorDataset: 40 samples" in loader["loop"]["name"]
    done = _run("diagnose", "--", str(path), "a", "--", "b", code=code)
    assert "the loop waited" in done.stderr
    assert done.stdout == ""
    assert ("KeyError" in done.stderr) == (code == 1)
    assert "run.py" not in done.stderr


def test_a_script_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys; assert 'torch' not in sys.modules; print('ran')")
    done = _run("diagnose", "--", str(path))
    assert done.stdout == "ran\n"
    assert "no batch was taken" in done.stderr


def test_a_dropped_loader_is_not_kept() -> None:
    watch = stoker.diagnosis.Watch()
    watch.patch(DataLoader)
    try:
        loader = DataLoader(Slow(Clock(), 0.0), batch_size=8)
        list(loader)
        gone = weakref.ref(loader)
        del loader
        gc.collect()
        assert gone() is None
    finally:
        watch.unpatch()


# Real runs


def _photos(photos: Path, *before: Any) -> Any:
    return stoker.ImageFolder(
        str(photos), T.Compose([*before, T.RandomResizedCrop(224), T.RandomHorizontalFlip(), *TAIL])
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", range(5))
def test_real_decode(photos: Path, run: int) -> None:
    found, system = ceilings.measure(
        _photos(photos), threads=_cores(), batch_size=32, stays_cached=True
    )
    assert judge(found, system).stage == "decode"


def _cores() -> int:
    """How many there are."""
    return os.cpu_count() or 1


def _slow(image: Any) -> Any:
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        pass
    return image


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", range(5))
def test_real_python(photos: Path, run: int) -> None:
    """The gain of leaving the step out is measured, and was predicted within 25 %."""
    threads = _cores()
    found, system = ceilings.measure(_photos(photos, _slow), threads=threads, batch_size=32)
    judged = judge(found, system)
    assert judged.stage == "python"
    after, _ = ceilings.measure(_photos(photos), threads=threads, batch_size=32, smaller=False)
    predicted = next(action.gain for action in judged.actions if action.name == "stock")
    assert predicted == pytest.approx(after.loader.median / found.loader.median, rel=0.25)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", range(5))
def test_real_too_few_threads(photos: Path, run: int) -> None:
    if _cores() < 2:
        pytest.skip("needs two cores")
    found, system = ceilings.measure(
        _photos(photos), threads=1, batch_size=32, stays_cached=True, smaller=False
    )
    if (system.cpu or 0.0) > 0.9:
        pytest.skip("other processes use the cores that more threads are to use")
    judged = judge(found, system)
    assert judged.stage == "threads"
    (action,) = judged.actions
    number = int(action.what.partition("num_workers=")[2].split()[0])
    after, _ = ceilings.measure(
        _photos(photos), threads=number, batch_size=32, stays_cached=True, smaller=False
    )
    assert action.gain == pytest.approx(after.loader.median / found.loader.median, rel=0.25)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", range(5))
def test_real_consumer(photos: Path, run: int) -> None:
    loader = stoker.DataLoader(_photos(photos), batch_size=32, num_workers=1)
    with stoker.diagnose(loader, effort=SHORT) as d:
        for _ in loader:
            time.sleep(0.2)  # the planted step
    assert d.report is not None
    assert d.report.verdict.stage == "consumer"


@contextlib.contextmanager
def _limited(controller: str, name: str, value: str) -> Iterator[None]:
    """This process in a cgroup (version 1) with a limit; skips where that cannot be set."""
    root = Path("/sys/fs/cgroup") / controller
    place = root / "stoker-test"
    try:
        place.mkdir(exist_ok=True)
        (place / name).write_text(value)
        (place / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        pytest.skip(f"{name} cannot be set here: {error}")
    try:
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        place.rmdir()


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", range(5))
def test_real_storage(photos: Path, data: Path, run: int) -> None:
    """A disk that reads 100 times a second."""
    device = os.stat(data).st_dev
    limit = f"{os.major(device)}:{os.minor(device)} 100"
    with _limited("blkio", "blkio.throttle.read_iops_device", limit):
        found, system = ceilings.measure(
            _photos(photos), threads=_cores(), batch_size=32, stays_cached=False, smaller=False
        )
    judged = judge(found, system)
    assert judged.stage == "storage"
    assert found.storage is not None
    assert judged.actions[0].name == "cache"
    expected = found.storage.warm.median / found.storage.steady.median
    assert 1.5 < judged.actions[0].gain <= expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", range(5))
def test_real_quota(photos: Path, run: int) -> None:
    dataset = _photos(photos)
    with _limited("cpu", "cpu.cfs_quota_us", "50000"):
        found, system = ceilings.measure(
            dataset, threads=2, batch_size=32, stays_cached=True, smaller=False
        )
        judged = judge(found, system)
    assert judged.stage == "quota"
    if (system.cpu or 0.0) > 0.9:
        pytest.skip("other processes use the cores that a higher quota is to bring")
    predicted = next(action.gain for action in judged.actions if action.name == "quota")
    after, _ = ceilings.measure(dataset, threads=2, batch_size=32, stays_cached=True, smaller=False)
    assert predicted == pytest.approx(after.loader.median / found.loader.median, rel=0.25)
