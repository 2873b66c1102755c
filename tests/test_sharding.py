"""Which rank has which sample: as arithmetic, in every tier, and among real processes."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset
from torchvision import transforms as T

import stoker
from pictures import class_folder
from stoker.order import Order, Share

SAMPLES = 17
VAL = T.Compose([T.Resize(24), T.CenterCrop(20), T.ToTensor()])
UNEVEN = ("pad", "drop", "exact")

ranks = st.integers(1, 7)
batch_sizes = st.integers(1, 9)
modes = st.sampled_from([("pad", False), ("pad", True), ("drop", False), ("drop", True)])
any_mode = modes | st.just(("exact", False))


def shares(samples: int, start: int, world: int, batch_size: int, mode: Any) -> list[Share]:
    return [Share(samples, start, rank, world, batch_size, *mode) for rank in range(world)]


def walked(share: Share) -> list[list[tuple[int, bool]]]:
    """Position and mark of each sample, batch by batch."""
    steps = [share.positions(step) for step in range(share.steps)]
    return [list(zip(p.tolist(), own.tolist(), strict=True)) for p, own in steps]


def specified(samples: int, start: int, world: int, size: int, mode: Any) -> list[Any]:
    """The same for each rank, from a list of all that is left: docs/distributed.md in code."""
    uneven, drop_last = mode
    left = [(position, True) for position in range(start, samples)]
    while len(left) % world:
        if uneven == "drop":
            left.pop()
        else:
            more = (start + len(left)) % samples if uneven == "pad" else 0
            left.append((more, False))
    found = []
    for rank in range(world):
        mine = left[rank::world]
        batches = [mine[at : at + size] for at in range(0, len(mine), size)]
        found.append([batch for batch in batches if len(batch) == size or not drop_last])
    return found


@given(st.integers(0, 60), st.integers(0, 60), ranks, batch_sizes, any_mode)
def test_shares_are_as_specified(
    samples: int, start: int, world: int, size: int, mode: Any
) -> None:
    start = min(start, samples)
    found = shares(samples, start, world, size, mode)
    assert [walked(share) for share in found] == specified(samples, start, world, size, mode)
    assert len({share.steps for share in found}) == 1


@given(st.integers(0, 10**12), st.integers(0, 200), ranks, batch_sizes, any_mode)
def test_the_end_of_large_orders(samples: int, left: int, world: int, size: int, mode: Any) -> None:
    start = max(0, samples - left)
    found = [walked(share) for share in shares(samples, start, world, size, mode)]
    assert found == specified(samples, start, world, size, mode)


@given(st.integers(1, 10**12), ranks, st.integers(1, 5000), any_mode, st.data())
def test_any_step_of_large_orders(
    samples: int, world: int, size: int, mode: Any, data: st.DataObject
) -> None:
    found = shares(samples, 0, world, size, mode)
    steps = found[0].steps
    assert all(share.steps == steps and len(share) == len(found[0]) for share in found)
    total = len(found[0]) * world
    if mode == ("drop", False):
        assert 0 <= samples - total < world
    elif not mode[1]:
        assert 0 <= total - samples < world
    assert found[0].after(steps) == (samples if steps else 0)
    if steps > 1:
        step = data.draw(st.integers(0, steps - 2))
        served = sorted(p for share in found for p in share.positions(step)[0].tolist())
        begin = step * world * size
        assert served == list(range(begin, begin + world * size))
        assert (found[0].after(step), found[0].after(step + 1)) == (begin, begin + world * size)


@given(
    st.integers(0, 80),
    st.lists(st.tuples(ranks, batch_sizes, st.integers(0, 6)), max_size=5),
    ranks,
    any_mode,
)
def test_whatever_the_worlds_were_the_rest_is_served(
    samples: int, before: list[tuple[int, int, int]], world: int, mode: Any
) -> None:
    uneven, drop_last = mode
    position, own, copies = 0, Counter[int](), 0
    for ranks_then, size, steps in [*before, (world, 3, 10**6)]:
        found = shares(samples, position, ranks_then, size, (uneven, drop_last))
        steps = min(steps, found[0].steps)
        for share in found:
            for batch in walked(share)[:steps]:
                own.update(p for p, mark in batch if mark)
                copies += sum(not mark for _, mark in batch)
        position = found[0].after(steps)
    assert set(own.values()) <= {1}
    missing = samples - len(own)
    if uneven == "exact" or mode == ("pad", False):
        assert missing == 0 and copies < 7
    if mode == ("drop", False):
        assert missing < 7 and copies == 0


@given(st.integers(1, 40), ranks)
def test_pad_and_drop_are_those_of_distributed_sampler(samples: int, world: int) -> None:
    data: Any = range(samples)
    for rank in range(world):
        for uneven, drop in (("pad", False), ("drop", True)):
            theirs: Any = DistributedSampler(data, world, rank, shuffle=False, drop_last=drop)
            share = Share(samples, 0, rank, world, 1000, uneven)
            assert [p for batch in walked(share) for p, _ in batch] == list(theirs)
            assert len(share) == len(theirs)


# Loaders, told of their rank by the environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("folder"), SAMPLES)


class Recorded(Dataset[Any]):
    """As a user writes it; its samples are recorded."""

    def __init__(self, folder: Path) -> None:
        self.paths = [path for path, _ in torchvision.datasets.ImageFolder(folder).samples]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return VAL(Image.open(self.paths[index]).convert("RGB")), index


class Values(Dataset[Any]):
    def __init__(self, samples: int = SAMPLES, kind: type = tuple) -> None:
        self.samples, self.kind = samples, kind

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if self.kind is dict:
            return {"value": torch.rand(2), "index": index}
        return index if self.kind is int else (torch.rand(2), index)


def lowered(folder: Path) -> Any:
    dataset = torchvision.datasets.ImageFolder(folder, VAL)
    dataset.samples = [(path, i) for i, (path, _) in enumerate(dataset.samples)]
    return dataset


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    def told(rank: int, world: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))

    return told


TIERS = [("lowered", 0), ("lowered", 2), ("recorded", 0), ("recorded", 1), ("keyed", 0)]


@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize(("tier", "workers"), TIERS, ids=str)
@pytest.mark.filterwarnings("ignore:num_workers")
def test_every_tier_serves_the_ranks_share(
    folder: Path, on_rank: Any, tier: str, workers: int, uneven: Any
) -> None:
    dataset: Any = {"lowered": lowered(folder), "recorded": Recorded(folder)}.get(tier, Values())
    alone = stoker.DataLoader(dataset, 1, shuffle=True, seed=4, num_workers=0)
    world, size = 3, 4
    for rank in range(world):
        on_rank(rank, world)
        loader = stoker.DataLoader(
            dataset, size, shuffle=True, seed=4, num_workers=workers, shard=True, uneven=uneven
        )
        batches = list(loader)
        if tier != "keyed":
            assert loader.explain().tier == tier
        expected = specified(SAMPLES, 0, world, size, (uneven, False))[rank]
        order = Order(SAMPLES, 4, True).indices(0, 0, SAMPLES).tolist()
        assert [b[1].tolist() for b in batches] == [[order[p] for p, _ in e] for e in expected]
        assert len(loader) == len(batches)
        if uneven == "exact":
            assert [b[2].tolist() for b in batches] == [[mark for _, mark in e] for e in expected]
            assert all(b[2].dtype == torch.bool for b in batches)
        if rank == 2:
            on_rank(0, 1)
            alone.set_epoch(0)
            whole = [x[0] for x, _ in alone]
            for batch, positions in zip(batches, expected, strict=True):
                assert type(batch) is list and len(batch) == 2 + (uneven == "exact")
                for image, (position, _) in zip(batch[0], positions, strict=True):
                    assert torch.equal(image, whole[position])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("uneven", UNEVEN)
def test_length_is_the_number_of_steps(on_rank: Any, uneven: Any, drop_last: bool) -> None:
    if drop_last and uneven == "exact":
        with pytest.raises(ValueError, match="contradicts"):
            stoker.DataLoader(Values(), 4, shard=True, uneven="exact", drop_last=True)
        return
    for samples in (0, 1, 2, 5, 12, 13):
        for world in (1, 2, 3, 5):
            for rank in {0, world - 1}:
                on_rank(rank, world)
                loader = stoker.DataLoader(
                    Values(samples), 2, shard=True, uneven=uneven, drop_last=drop_last
                )
                steps = len(specified(samples, 0, world, 2, (uneven, drop_last))[rank])
                assert len(loader) == len(list(loader)) == steps


def test_a_sampler_that_yields_the_share(on_rank: Any) -> None:
    on_rank(1, 3)
    loader = stoker.DataLoader(Values(), 4, shuffle=True, shard=True)
    sampler: Any = loader.sampler
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.rank, sampler.num_replicas, sampler.seed) == (1, 3, 0)
    assert (len(sampler), sampler.num_samples, sampler.total_size) == (6, 6, 18)
    assert list(sampler) == torch.cat([index for _, index in loader]).tolist()
    again = stoker.DataLoader(Values(), 4, sampler=pickle.loads(pickle.dumps(sampler)))
    again.set_epoch(1)
    assert [y.tolist() for _, y in again] == [y.tolist() for _, y in loader]
    on_rank(0, 1)
    assert len(sampler) == SAMPLES and len(loader) == 5


def test_samples_that_are_left_out_have_no_position(on_rank: Any) -> None:
    found = []
    for rank in range(3):
        on_rank(rank, 3)
        loader = stoker.DataLoader(
            Values(), 2, shuffle=True, shard=True, uneven="exact", exclude=[0, 5, 16]
        )
        assert len(loader) == 3 and len(list(loader.sampler)) == 5
        for _, index, valid in loader:
            found += index[valid].tolist()
    assert sorted(found) == sorted({*range(SAMPLES)} - {0, 5, 16})


def test_batches_of_one_and_of_none(on_rank: Any) -> None:
    on_rank(2, 3)
    loader = stoker.DataLoader(Values(), None, shard=True, seed=1)
    assert [index for _, index in loader] == [2, 5, 8, 11, 14, 0]
    with pytest.raises(ValueError, match="batch_size"):
        stoker.DataLoader(Values(), None, shard=True, uneven="exact")


@pytest.mark.parametrize("workers", [0, 1])
def test_valid_in_batches_of_other_kinds(on_rank: Any, workers: int) -> None:
    on_rank(1, 2)
    given: dict[str, Any] = {"shard": True, "uneven": "exact", "num_workers": workers}
    batch = list(stoker.DataLoader(Values(3, dict), 2, **given))[-1]
    assert set(batch) == {"value", "index", "valid"} and batch["valid"].tolist() == [True, False]
    assert batch["index"].tolist() == [1, 0]
    index, valid = list(stoker.DataLoader(Values(3, int), 2, **given))[-1]
    assert index.tolist() == [1, 0] and valid.tolist() == [True, False]
    pair = list(stoker.DataLoader(Values(3), 2, collate_fn=tuple, **given))[-1]
    assert type(pair) is tuple and pair[-1].tolist() == [True, False]
    on_rank(0, 1)
    assert [batch[-1].tolist() for batch in stoker.DataLoader(Values(3), 2, **given)] == [
        [True, True],
        [True],
    ]


def test_a_key_of_that_name_is_not_overwritten() -> None:
    def collate(samples: list[Any]) -> dict[str, int]:
        return {"valid": 1}

    loader = stoker.DataLoader(Values(), 2, shard=True, uneven="exact", collate_fn=collate)
    with pytest.raises(ValueError, match="'valid'"):
        next(iter(loader))


class Pairs(BatchSampler):
    """A user's own batch sampler."""


def test_what_excludes_each_other() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    for dataset, options, word in (
        (Stream(), {"shard": True}, "map-style"),
        (Values(), {"shard": True, "randomness": "torch"}, "DistributedSampler"),
        (Values(), {"uneven": "exact"}, "shard=True"),
        (Values(), {"shard": True, "uneven": "even"}, "uneven='even'"),
    ):
        with pytest.raises(ValueError, match=word):
            stoker.DataLoader(dataset, **options)
    sampler = stoker.DataLoader(Values(), shard=True, uneven="exact").sampler
    loader = stoker.DataLoader(Values(), batch_sampler=Pairs(sampler, 2, False))
    with pytest.raises(ValueError, match="Pairs"):
        iter(loader)


@pytest.mark.parametrize(
    ("rank", "world"), [("2", "2"), ("x", "2"), ("0", "0"), ("-1", "2"), ("0", "")]
)
def test_nonsense_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, rank: str, world: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    loader = stoker.DataLoader(Values(), 4, shard=True)
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        iter(loader)
    assert len(list(stoker.DataLoader(Values(), 4))) == 5


def test_the_process_group_knows_better_than_the_environment(on_rank: Any, tmp_path: Path) -> None:
    on_rank(2, 3)
    loader = stoker.DataLoader(Values(), 4, shard=True)
    assert len(loader) == 2
    meeting = f"file://{tmp_path / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        assert len(loader) == len(list(loader)) == 5
    finally:
        torch.distributed.destroy_process_group()


def test_a_rank_that_reads_everything_is_told_once(on_rank: Any) -> None:
    on_rank(0, 2)
    loader = stoker.DataLoader(Values(), 4)
    with pytest.warns(stoker.StokerWarning, match="every one of the 2 ranks"):
        assert len(list(loader)) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
        list(stoker.DataLoader(Values(), 4, shard=True))
        list(stoker.DataLoader(Values(), 4, sampler=DistributedSampler(Values(), 2, 0)))
        list(stoker.DataLoader(Values(), batch_sampler=[[0, 1], [2]]))
        on_rank(0, 1)
        list(stoker.DataLoader(Values(), 4))


def test_a_given_sampler_decides(on_rank: Any) -> None:
    on_rank(1, 2)
    sampler: Any = DistributedSampler(Values(), 2, 1, seed=3)
    with pytest.warns(stoker.StokerWarning, match="shard=True has no effect"):
        loader = stoker.DataLoader(Values(), 4, sampler=sampler, shard=True)
    assert torch.cat([y for _, y in loader]).tolist() == list(sampler)


def test_an_order_that_repeats_is_told_once() -> None:
    sampler: Any = DistributedSampler(Values(), 2, 1)
    loader = stoker.DataLoader(Values(), 4, sampler=sampler)
    list(loader)
    with pytest.warns(stoker.StokerWarning, match="comes again"):
        list(loader)
    list(loader)  # once is enough
    own = stoker.DataLoader(Values(), 4, shuffle=True)
    for _ in range(2):
        own.set_epoch(3)
        next(iter(own))  # a look at a batch is no epoch
    list(own)
    own.set_epoch(4)
    with pytest.warns(stoker.StokerWarning, match="comes again"):
        list(own)
    for told in (stoker.DataLoader(Values(), 4), stoker.DataLoader(Values(), 4, sampler=sampler)):
        for epoch in range(3):
            told.set_epoch(epoch)
            list(told)
    plain = stoker.DataLoader(Values(), 4)
    for _ in range(2):
        plain.set_epoch(0)
        list(plain)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_changes_no_ranks_steps(folder: Path, on_rank: Any, workers: int) -> None:
    dataset = lowered(folder)
    bad = {5, 11, 12}
    dataset.samples = [
        (path if i not in bad else f"{path}.gone", label)
        for i, (path, label) in enumerate(dataset.samples)
    ]
    order = Order(SAMPLES, 0, True).indices(0, 0, SAMPLES).tolist()

    def replaced(position: int) -> int:
        while order[position % SAMPLES] in bad:
            position += 1
        return int(order[position % SAMPLES])

    for rank in range(3):
        on_rank(rank, 3)
        loader = stoker.DataLoader(
            dataset, 4, shuffle=True, shard=True, num_workers=workers, on_error="skip"
        )
        expected = specified(SAMPLES, 0, 3, 4, ("pad", False))[rank]
        found = [y.tolist() for _, y in loader]
        assert found == [[replaced(p) for p, _ in batch] for batch in expected]
        assert {b.position for b in loader.bad_samples} == {
            p for batch in expected for p, _ in batch if order[p] in bad
        }


# Real processes


CHAIN = [2, 3, 1, 4]
"""Numbers of ranks, each of which goes on where the one before left."""

WORLDS = [2, 3, *(pytest.param(world, marks=pytest.mark.slow) for world in CHAIN[2:])]
SIZES = [(17, 4), (3, 2), (13, 5), (12, 2)]
CASES = [(uneven, samples, size) for uneven in UNEVEN for samples, size in SIZES]


def torchrun(world: int, script: list[str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(stoker.__file__).parents[1]), *sys.path])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, f"--nproc_per_node={world}", *script],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )


def launched(place: Path, folder: Path, world: int, cases: list[Any]) -> list[Any]:
    """What each rank under torchrun reports of each case."""
    out, script = str(place / f"report-{world}"), str(Path(__file__).with_name("sharded.py"))
    done = torchrun(world, [script, str(folder), out, json.dumps(cases)])
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world)]


class Runs:
    """Runs of each number of ranks: whole epochs, and what the number before it has left."""

    def __init__(self, place: Path, folder: Path) -> None:
        self.place, self.folder = place, folder
        self.found: dict[int, tuple[list[Any], list[Any]]] = {}

    def __getitem__(self, world: int) -> tuple[list[Any], list[Any]]:
        """What each rank reports, and the state of each case after a step."""
        if world not in self.found:
            cases: list[dict[str, Any]] = [
                {"uneven": uneven, "samples": samples, "batch_size": size, "leave": 1}
                for uneven, samples, size in CASES
            ]
            left = [None] * len(cases) if world == CHAIN[0] else self[before(world)][1]
            more = [{**case, "state": state} for case, state in zip(cases, left, strict=True)]
            cases = [{**case, "state": None} for case in cases]
            reports = launched(self.place, self.folder, world, cases + more)
            self.found[world] = reports, [r["halfway"] for r in reports[0][: len(cases)]]
        return self.found[world]


def before(world: int) -> int:
    return CHAIN[CHAIN.index(world) - 1]


@pytest.fixture(scope="module")
def runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), folder)


def check(case: Any, expected: list[Any], order: list[int], uneven: str) -> None:
    assert [step[0] for step in case["steps"]] == [[order[p] for p, _ in b] for b in expected]
    if uneven == "exact":
        assert [step[1] for step in case["steps"]] == [[mark for _, mark in b] for b in expected]


@pytest.mark.parametrize("world", WORLDS)
def test_processes(runs: Runs, world: int) -> None:
    reports, _ = runs[world]
    for number, (uneven, samples, size) in enumerate(CASES):
        order = Order(samples, 0, True).indices(0, 0, samples).tolist()
        expected = specified(samples, 0, world, size, (uneven, False))
        for report, batches in zip(reports, expected, strict=True):
            check(report[number], batches, order, uneven)
            assert report[number]["length"] == len(batches)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_processes_go_on_where_others_left(runs: Runs, world: int) -> None:
    reports, (_, left) = runs[world][0], runs[before(world)]
    for number, (uneven, samples, size) in enumerate(CASES):
        start = 0 if left[number] is None else left[number]["position"]
        assert start == (min(before(world) * size, samples) if left[number] else 0)
        order = Order(samples, 0, True).indices(0, 0, samples).tolist()
        expected = specified(samples, start, world, size, (uneven, False))
        for report, batches in zip(reports, expected, strict=True):
            case = report[len(CASES) + number]
            check(case, batches, order, uneven)
            assert case["length"] == len(specified(samples, 0, world, size, (uneven, False))[0])


SNIPPET = """
import sys, torchvision
from torchvision import transforms as T

def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 3))

train_set = validation_set = torchvision.datasets.ImageFolder(
    sys.argv[1], T.Compose([T.Resize((16, 16)), T.ToTensor()]))
"""


@pytest.mark.slow
def test_the_pages_snippet_runs(folder: Path, tmp_path: Path) -> None:
    page = Path(__file__).parents[1] / "docs" / "distributed.md"
    text = page.read_text(encoding="utf-8")
    (snippet,) = re.findall(r"## The whole snippet\n.*?```python\n(.*?)```", text, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{SNIPPET}\n{snippet}\nprint('counted', int(counts[1]))\n")
    done = torchrun(2, [str(script), str(folder)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"counted {SAMPLES}\n") == 2
    assert "Warning" not in done.stderr
