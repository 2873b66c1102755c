"""What goes wrong in traced and stock loaders: policies for bad samples, and torch's behaviour."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data as D  # noqa: N812

import stoker
from stoker import order as order_module
from stoker.draws import seed_generators
from tracing import canonical, seed
from user_datasets import SAMPLES, LabelFileDataset, label_file, write_files

# Pillow leaves a file open when it cannot read it, with any loader; pytest notices at any time.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collects those files here, where their warnings are ignored."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


def without_table(data: bytes) -> bytes:
    """Found out only when it is decoded."""
    at = data.find(b"\xff\xc4") + 5
    return data[:at] + b"\xff" * 16 + data[at + 16 :]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers 2 and 3 are broken inside, 8 is cut off, 10 is no image."""
    root = write_files(tmp_path_factory.mktemp("damaged"))
    ways: dict[int, Callable[[bytes], bytes]] = {
        2: without_table,
        3: without_table,
        8: lambda data: data[: len(data) // 2],
        10: lambda data: b"no image",
    }
    for number, how in ways.items():
        path = root / "images" / f"img_{number:02}.jpg"
        path.write_bytes(how(path.read_bytes()))
    return root


class Raising(LabelFileDataset):
    """Its own code raises for some samples, before or after it has opened the image."""

    def __getitem__(self, idx: int) -> Any:
        if idx == 4:
            raise KeyError("four")
        sample = super().__getitem__(idx)
        if idx == 5:
            raise ValueError("five")
        return sample


class InBulk(Raising):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[i] for i in indices]


# Policies


def expected(dataset: Any, indices: list[int], seed: int, epoch: int, positions: Any) -> Any:
    """Index and sample of each place, by the definition of on_error="skip"; and the bad ones."""

    def sample(index: int) -> Any:
        seed_generators(int(order_module.keys(seed, epoch, np.array([index]), 0)[0]))
        return dataset[index]

    good: dict[int, Any] = {}
    for index in set(indices):
        try:
            good[index] = sample(index)
        except Exception:  # noqa: BLE001  any: that is the policy
            continue
    served, bad = [], []
    for position in positions:
        if indices[position] not in good:
            bad.append((indices[position], position))
        k = position
        while indices[k % len(indices)] not in good:
            k += 1
        served.append(good[indices[k % len(indices)]])
    return served, bad


@pytest.mark.parametrize("tier", ["auto", "stock"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [LabelFileDataset, Raising, InBulk])
def test_bad_samples_are_skipped_in_every_tier(
    kind: Any, workers: int, tier: Any, damaged: Path, tmp_path: Path
) -> None:
    dataset = label_file(kind)(damaged)
    loader: Any = stoker.DataLoader(
        dataset,
        5,
        shuffle=True,
        num_workers=workers,
        seed=9,
        on_error="skip",
        tier=tier,
        persistent_workers=workers > 0,
    )
    loader.log_bad_samples(tmp_path / "bad.jsonl")
    told = []
    for epoch in range(2):
        indices = loader.sampler.order.indices(epoch, 0, SAMPLES).tolist()
        served, bad = expected(dataset, indices, 9, epoch, range(SAMPLES))
        images, labels = (torch.cat(part) for part in zip(*loader, strict=True))
        assert torch.equal(images, torch.stack([image for image, _ in served]))
        assert labels.tolist() == [label for _, label in served]
        told += [(index, epoch, position) for index, position in bad]
    assert [(one.index, one.epoch, one.position) for one in loader.bad_samples] == told
    lines = (tmp_path / "bad.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [index for index, _, _ in told]
    reasons = {one.index: one.reason for one in loader.bad_samples}
    assert set(reasons) == {2, 3, 8, 10} | (set() if kind is LabelFileDataset else {4, 5})
    if kind is not LabelFileDataset:
        assert reasons[4] == "KeyError: 'four'"
        assert reasons[5] == "ValueError: five"
    if tier == "auto":
        assert loader.explain().tier == "recorded"


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_samples_without_batches_and_under_a_foreign_sampler(
    workers: int, damaged: Path
) -> None:
    dataset: Any = label_file(Raising)(damaged)
    options: dict[str, Any] = {"num_workers": workers, "seed": 9, "on_error": "skip"}
    single = stoker.DataLoader(dataset, batch_size=None, **options)
    served, bad = expected(dataset, list(range(SAMPLES)), 9, 0, range(SAMPLES))
    # torch makes lists of what is not batched.
    assert canonical(list(single)) == canonical([list(sample) for sample in served])
    assert [one.index for one in single.bad_samples] == [index for index, _ in bad]
    # A foreign sampler isn't asked for more: only number 6, at place 2, is good.
    foreign = stoker.DataLoader(dataset, batch_sampler=[[3, 4, 6, 5]], **options)
    seed_generators(int(order_module.keys(9, 0, np.array([6]), 2)[0]))
    four = [D.default_collate([dataset[6]] * 4)]
    assert canonical(list(foreign)) == canonical(four)
    assert [one.index for one in foreign.bad_samples] == [3, 4, 5]


class AllBad(LabelFileDataset):
    def __getitem__(self, idx: int) -> Any:
        raise LookupError(f"no {idx}")


@pytest.mark.parametrize("tier", ["auto", "stock"])
@pytest.mark.parametrize("workers", [0, 1])
def test_nothing_good_is_an_error(workers: int, tier: Any, files: Path) -> None:
    loader = stoker.DataLoader(
        label_file(AllBad)(files), 4, num_workers=workers, seed=1, on_error="skip", tier=tier
    )
    told = None
    try:  # pytest.raises would keep the exception, and that the workers
        list(loader)
    except stoker.DecodeError as error:
        told = error.index, error.location, error.reason.split(",")[0]
    text = "LookupError: no 0; none of those that follow it is good"
    assert told == (0, "AllBad[0]", text)
    assert [one.index for one in loader.bad_samples] == [0]


def test_policies_that_there_is_no_ground_for(files: Path) -> None:
    dataset = label_file(LabelFileDataset)(files)
    blank = stoker.DataLoader(dataset, 4, num_workers=0, on_error="blank")
    with pytest.raises(stoker.UnsupportedError, match=r"on_error='blank'.*use 'skip'"):
        iter(blank)
    with pytest.raises(ValueError, match="keyed randomness"):
        stoker.DataLoader(dataset, 4, on_error="skip", randomness="torch")


# As torch does


class NoneOnError(LabelFileDataset):
    """Its transform draws nothing for a file that cannot be read."""

    def __getitem__(self, idx: int) -> Any:
        try:
            return super().__getitem__(idx)
        except OSError:
            return torch.zeros(3, 32, 32), -1


class DrawsOnError(LabelFileDataset):
    """Gives a random other sample where a file cannot be read."""

    def __getitem__(self, idx: int) -> Any:
        try:
            return super().__getitem__(idx)
        except OSError:
            return self[random.randrange(len(self))]


class Unlucky(LabelFileDataset):
    """Raises by chance, so exceptions depend on every draw before them."""

    def __getitem__(self, idx: int) -> Any:
        try:
            sample = super().__getitem__(idx)
        except OSError:
            if idx == 3:
                raise
            return torch.rand(3, 32, 32), -1
        if random.random() < 0.2:
            raise ValueError(f"bad luck with {idx}")
        return sample


def walked(
    kind: Any, dataset: Any, epochs: int = 2, size: int = 2, start: int = 11, **options: Any
) -> Any:
    """The batches and exceptions of some epochs, gone on with after exceptions."""
    seed(start)
    loader = kind(dataset, size, shuffle=True, **options)
    found = []
    for _ in range(epochs):
        batches = iter(loader)
        while True:
            try:
                found.append(canonical(next(batches)))
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001  whatever it is, both must raise it
                found.append((type(error).__name__, str(error).splitlines()[-1]))
    return found, loader


@pytest.mark.parametrize(
    ("kind", "persistent"),
    [  # torch's persistent workers take ten seconds to end after an exception
        (LabelFileDataset, False),
        (Raising, False),
        (NoneOnError, False),
        (NoneOnError, True),
        (DrawsOnError, True),
        (Unlucky, False),
    ],
)
def test_batches_after_a_broken_file(kind: Any, persistent: bool, damaged: Path) -> None:
    """Later batches of that worker have been recorded, with other draws, when it is found."""
    dataset = label_file(kind)(damaged)
    options = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": persistent}
    theirs, _ = walked(D.DataLoader, dataset, **options)
    mine, loader = walked(stoker.DataLoader, dataset, randomness="torch", **options)
    assert mine == theirs
    counts = loader._trace.counts
    assert counts.replayed and counts.recorded > counts.values


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_exceptions_beside_broken_files(workers: int, damaged: Path) -> None:
    """Which exception comes first, and what is drawn until then."""
    dataset = label_file(Unlucky)(damaged)
    for size in (1, 3, 5):
        options = {"num_workers": workers, "epochs": 1, "size": size, "start": 0}
        theirs, _ = walked(D.DataLoader, dataset, **options)
        mine, _ = walked(stoker.DataLoader, dataset, randomness="torch", **options)
        assert mine == theirs


def test_epochs_that_are_broken_off_leave_nothing(files: Path) -> None:
    dataset = label_file(LabelFileDataset)(files)
    loader: Any = stoker.DataLoader(
        dataset, 1, num_workers=2, persistent_workers=True, randomness="torch", prefetch_factor=4
    )
    for epoch in range(6):
        for number, _ in enumerate(loader):
            if number == epoch:
                break
    list(loader)
    receiver = loader._iterator._receiver
    assert not receiver._recordings and not receiver.session._live


@pytest.mark.parametrize("randomness", ["keyed", "torch"])
@pytest.mark.parametrize("kind", [Raising, LabelFileDataset, AllBad])
def test_an_exception_does_not_keep_the_workers(kind: Any, randomness: Any, damaged: Path) -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    if kind is AllBad and randomness == "keyed":
        options["on_error"] = "skip"
    loader: Any = stoker.DataLoader(label_file(kind)(damaged), 4, randomness=randomness, **options)
    with contextlib.suppress(Exception):
        list(loader)
    inner = loader if randomness == "torch" else loader._inner
    workers = list(inner._iterator._workers)
    assert all(worker.is_alive() for worker in workers)
    gc.disable()
    try:
        del inner, loader
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


BOTH: dict[str, Any] = {
    "torch": D.DataLoader,
    "stoker": functools.partial(stoker.DataLoader, randomness="torch"),
    "keyed": functools.partial(stoker.DataLoader, seed=1),
}


def users_lines(error: BaseException) -> list[str]:
    """The first line of an exception's text and the lines of the user's code in it."""
    lines = str(error).splitlines()
    text = [
        f"{line} {code}"
        for line, code in itertools.pairwise(lines)
        if Path(__file__).name in line or "user_datasets.py" in line
    ]
    return [type(error).__name__, lines[0], *text, lines[-1]]


@pytest.mark.parametrize("broken", [False, True], ids=["raised", "found later"])
def test_exceptions_tell_where_they_were_raised(broken: bool, files: Path, damaged: Path) -> None:
    kind, root = (LabelFileDataset, damaged) if broken else (Raising, files)
    told = []
    for name in ("torch", "stoker"):
        loader = BOTH[name](label_file(kind)(root), 3, num_workers=1)
        try:
            list(loader)
        except (KeyError, OSError) as error:
            told.append(users_lines(error))
    theirs, mine = told
    assert mine == theirs
    assert theirs[1].endswith("in DataLoader worker process 0.") and len(theirs) >= 4


class Slow(LabelFileDataset):
    def __getitem__(self, idx: int) -> Any:
        sample = super().__getitem__(idx)
        time.sleep(0.02 if idx < SAMPLES - 1 else 2.5)
        return sample


@pytest.mark.parametrize("name", BOTH)
def test_a_worker_that_is_killed_while_it_records(name: str, files: Path) -> None:
    before = set(multiprocessing.active_children())
    loader = BOTH[name](label_file(Slow)(files), 2, num_workers=2)

    def walk(loader: Any) -> None:
        for _ in loader:
            workers = set(multiprocessing.active_children()) - before
            os.kill(next(iter(workers)).pid or 0, signal.SIGKILL)
            time.sleep(0.1)

    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        walk(loader)
    del loader
    gc.collect()
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("name", BOTH)
def test_a_slow_sample_and_a_timeout(name: str, files: Path) -> None:
    loader = BOTH[name](label_file(Slow)(files), 2, num_workers=2, timeout=1)
    found: list[Any] = []
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        found.extend(loader)
    assert len(found) == SAMPLES // 2 - 1


@pytest.mark.parametrize("name", BOTH)
def test_epochs_cost_nothing_more(name: str, files: Path) -> None:
    """Descriptors, threads and memory of this process and its workers stay."""

    def held(process: Any) -> tuple[int, int, int]:
        memory = process.memory_info()
        return process.num_fds(), process.num_threads(), memory.rss - memory.shared

    psutil = pytest.importorskip("psutil")
    loader = BOTH[name](
        label_file(LabelFileDataset)(files), 2, num_workers=2, persistent_workers=True
    )
    before = set(multiprocessing.active_children())
    figures = []
    for epoch in range(20):
        assert len(list(loader)) == 6
        workers = sorted(w.pid or 0 for w in set(multiprocessing.active_children()) - before)
        assert len(workers) == 2
        if epoch in (4, 19):
            figures.append([held(psutil.Process(pid)) for pid in (os.getpid(), *workers)])
    for early, late in zip(*figures, strict=True):
        assert late[0] <= early[0] + 2 and late[1] <= early[1]
        assert late[2] < early[2] + (8 << 20)


@pytest.mark.parametrize("name", BOTH)
def test_two_iterators_at_once_and_one_left_early(name: str, files: Path) -> None:
    loader = BOTH[name](label_file(LabelFileDataset)(files), 4, num_workers=2)
    first, second = iter(loader), iter(loader)
    pairs = [(next(first), next(second)) for _ in range(2)]
    labels = [[label.tolist() for _, label in pair] for pair in pairs]
    assert labels == [[[0, 1, 2, 0]] * 2, [[1, 2, 0, 1]] * 2]
    del first
    assert next(second)[1].tolist() == [2, 0, 1, 2]
