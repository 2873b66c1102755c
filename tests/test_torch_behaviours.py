"""What torch documents of its DataLoader, asked of both loaders and both kinds of randomness."""

from __future__ import annotations

import os
import time
from collections import namedtuple
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)

import stoker

pytestmark = [
    pytest.mark.filterwarnings("ignore:not run natively:stoker.StokerWarning"),
    pytest.mark.filterwarnings("ignore:num_workers=:stoker.StokerWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def _torch(*args: Any, **options: Any) -> Any:
    return torch.utils.data.DataLoader(*args, **options)


def _keyed(*args: Any, **options: Any) -> Any:
    return stoker.DataLoader(*args, **options)


def _torch_streams(*args: Any, **options: Any) -> Any:
    return stoker.DataLoader(*args, randomness="torch", **options)


LOADERS = {"torch": _torch, "keyed": _keyed, "torch streams": _torch_streams}


@pytest.fixture(params=list(LOADERS))
def loader(request: pytest.FixtureRequest) -> Any:
    return LOADERS[request.param]


class Squares(Dataset[Any]):
    def __init__(self, n: int = 20) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return torch.tensor([index, index * index]), index


@pytest.mark.parametrize("workers", [0, 2])
def test_sequential_batches(loader: Any, workers: int) -> None:
    batches = list(loader(Squares(), batch_size=6, num_workers=workers))
    assert [y.tolist() for _, y in batches] == [
        list(range(i, min(i + 6, 20))) for i in range(0, 20, 6)
    ]
    assert all(isinstance(batch, list) for batch in batches)


def test_length_and_drop_last(loader: Any) -> None:
    assert len(loader(Squares(), batch_size=6)) == 4
    assert len(loader(Squares(), batch_size=6, drop_last=True)) == 3
    assert len(loader(Squares(), batch_size=None)) == 20
    assert len(list(loader(Squares(), batch_size=6, drop_last=True))) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_shuffle_serves_each_once_and_differs_between_epochs(loader: Any, workers: int) -> None:
    subject = loader(Squares(200), batch_size=50, shuffle=True, num_workers=workers)
    epochs = [torch.cat([y for _, y in subject]).tolist() for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(200))


def test_generator_decides_the_shuffle(loader: Any) -> None:
    def epoch(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        subject = loader(Squares(100), batch_size=100, shuffle=True, generator=generator)
        return next(iter(subject))[1].tolist()  # type: ignore[no-any-return]

    assert epoch(1) == epoch(1) != epoch(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_samplers(loader: Any, workers: int) -> None:
    given = [3, 1, 4, 1, 5, 9]
    found = [y.tolist() for _, y in loader(Squares(), 4, sampler=given, num_workers=workers)]
    assert found == [[3, 1, 4, 1], [5, 9]]
    subset = loader(Squares(), 5, sampler=SubsetRandomSampler(range(5, 10)), num_workers=workers)
    assert sorted(next(iter(subset))[1].tolist()) == [5, 6, 7, 8, 9]
    many = RandomSampler(Squares(), replacement=True, num_samples=50)
    assert sum(len(y) for _, y in loader(Squares(), 8, sampler=many, num_workers=workers)) == 50


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_samplers(loader: Any, workers: int) -> None:
    given = [[0], [5, 4, 3], [1, 2]]
    subject = loader(Squares(), batch_sampler=given, num_workers=workers)
    assert [y.tolist() for _, y in subject] == given and len(subject) == 3
    wrapped = BatchSampler(SequentialSampler(Squares()), 7, drop_last=True)
    subject = loader(Squares(), batch_sampler=wrapped, num_workers=workers)
    assert [len(y) for _, y in subject] == [7, 7]
    assert subject.batch_size is None


def test_distributed_sampler_with_set_epoch(loader: Any) -> None:
    def ranks(epoch: int) -> list[list[int]]:
        seen = []
        for rank in range(2):
            sampler: DistributedSampler[Any] = DistributedSampler(
                Squares(), 2, rank, shuffle=True, seed=1
            )
            subject = loader(Squares(), 5, sampler=sampler)
            sampler.set_epoch(epoch)
            seen.append(torch.cat([y for _, y in subject]).tolist())
        return seen

    first, second = ranks(0), ranks(1)
    assert sorted(first[0] + first[1]) == sorted(second[0] + second[1]) == list(range(20))
    assert first != second


Point = namedtuple("Point", "x y")


class Nested(Squares):
    def __getitem__(self, index: int) -> Any:
        return {
            "array": np.full((2, 3), index),
            "number": index / 2,
            "text": f"sample {index}",
            "point": Point(torch.tensor(index), (index, [torch.ones(2) * index])),
        }


@pytest.mark.parametrize("workers", [0, 2])
def test_nested_structures_collate(loader: Any, workers: int) -> None:
    batch = next(iter(loader(Nested(), 3, num_workers=workers)))
    expected = default_collate([Nested()[i] for i in range(3)])
    assert batch.keys() == expected.keys()
    assert torch.equal(batch["array"], expected["array"])
    assert batch["number"].dtype == torch.float64 and batch["text"] == expected["text"]
    assert type(batch["point"]) is Point and torch.equal(batch["point"].x, torch.arange(3))
    assert torch.equal(batch["point"].y[1][0], expected["point"].y[1][0])


@pytest.mark.parametrize("workers", [0, 2])
def test_collate_fn(loader: Any, workers: int) -> None:
    subject = loader(Squares(), 4, num_workers=workers, collate_fn=_labels_only)
    assert list(subject) == [list(range(i, i + 4)) for i in range(0, 20, 4)]


def _labels_only(samples: list[Any]) -> list[int]:
    return [label for _, label in samples]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_batches(loader: Any, workers: int) -> None:
    samples = list(loader(Squares(5), batch_size=None, num_workers=workers))
    assert [label for _, label in samples] == list(range(5))
    assert all(isinstance(values, torch.Tensor) and values.shape == (2,) for values, _ in samples)


class Who(Squares):
    """Says which worker fetched a sample, and what get_worker_info() shows there."""

    started: int | None = None

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return index, -1, -1, os.getpid(), 0
        same = int(info.dataset is self)
        return index, info.id, info.num_workers, os.getpid(), same + (self.started == info.id)


def _start(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    cast(Who, info.dataset).started = worker


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_worker_info_and_init(loader: Any, context: str) -> None:
    subject = loader(
        Who(), 2, num_workers=2, worker_init_fn=_start, multiprocessing_context=context
    )
    rows = [torch.stack(batch, 1) for batch in subject]
    table = torch.cat(rows)
    assert table[:, 0].tolist() == list(range(20))
    assert set(table[:, 1].tolist()) == {0, 1} and set(table[:, 2].tolist()) == {2}
    assert len(set(table[:, 3].tolist())) == 2 and os.getpid() not in table[:, 3].tolist()
    assert set(table[:, 4].tolist()) == {2}, "the dataset is the user's, and was initialised"


def test_num_workers_zero_runs_in_this_process(loader: Any) -> None:
    batch = next(iter(loader(Who(), 4, num_workers=0)))
    assert set(batch[3].tolist()) == {os.getpid()} and set(batch[1].tolist()) == {-1}


def test_persistent_workers_stay(loader: Any) -> None:
    def processes(subject: Any) -> set[int]:
        return {int(pid) for batch in subject for pid in batch[3]}

    subject = loader(Who(), 2, num_workers=2, persistent_workers=True)
    assert processes(subject) == processes(subject)
    subject = loader(Who(), 2, num_workers=2)
    assert processes(subject) != processes(subject)


class Broken(Squares):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("no such thing")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_the_dataset_reach_the_loop(loader: Any, workers: int) -> None:
    subject = loader(Broken(), 4, num_workers=workers)
    with pytest.raises(KeyError, match="no such thing"):
        list(subject)
    assert len(next(iter(subject))[1]) == 4


class Slow(Squares):
    def __getitem__(self, index: int) -> Any:
        time.sleep(30)


def test_timeout(loader: Any) -> None:
    with pytest.raises(RuntimeError, match="timed out after"):
        next(iter(loader(Slow(), 2, num_workers=1, timeout=1)))


class Stream(IterableDataset[Any]):
    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(start, self.n, step))

    def __len__(self) -> int:
        return self.n


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets(loader: Any, workers: int) -> None:
    subject = loader(Stream(), 3, num_workers=workers)
    assert sorted(torch.cat(list(subject)).tolist()) == list(range(10)) and len(subject) == 4
    for wrong in ({"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}):
        with pytest.raises(ValueError, match="IterableDataset"):
            loader(Stream(), **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"batch_size": 0},
        {"batch_size": None, "drop_last": True},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "drop_last": True},
        {"num_workers": 1, "multiprocessing_context": "thread"},
        {"num_workers": 0, "multiprocessing_context": "fork"},
        {"num_workers": 1, "prefetch_factor": -1},
    ],
    ids=str,
)
def test_refused_arguments(loader: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"option|batch_size|multiprocessing"):
        loader(Squares(), **wrong)


def test_attributes_that_are_fixed(loader: Any) -> None:
    subject = loader(Squares(), 4)
    for name in ("batch_size", "sampler", "batch_sampler", "drop_last", "dataset"):
        with pytest.raises(ValueError, match=name):
            setattr(subject, name, None)


def test_datasets_in_datasets(loader: Any) -> None:
    dataset: Any = ConcatDataset(
        [Subset(Squares(), [3, 4]), TensorDataset(torch.zeros(2, 2), torch.ones(2))]
    )
    assert sum(len(y) for _, y in loader(dataset, 3)) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_two_iterators_at_once(loader: Any, workers: int) -> None:
    subject = loader(Squares(), 10, num_workers=workers)
    first, second = iter(subject), iter(subject)
    assert next(first)[1][0] == next(second)[1][0] == 0
    assert next(first)[1][0] == next(second)[1][0] == 10


def test_dataset_with_getitems(loader: Any) -> None:
    class Many(Squares):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[i] for i in indices]

    assert torch.cat([y for _, y in loader(Many(), 6)]).tolist() == list(range(20))


def test_empty_dataset(loader: Any) -> None:
    assert list(loader(Squares(0), 4)) == []
