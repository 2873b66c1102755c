"""The samplers yield the order, and are what frameworks take them for."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from stoker.order import Order
from stoker.samplers import OrderedRandomSampler, OrderedSequentialSampler

DATA = list(range(10_000))
Kind = type[OrderedRandomSampler] | type[OrderedSequentialSampler]
KINDS = pytest.mark.parametrize("kind", [OrderedRandomSampler, OrderedSequentialSampler])


def test_random_yields_the_order_of_its_epoch() -> None:
    sampler = OrderedRandomSampler(DATA, seed=5)
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        found = list(sampler)
        assert found == Order(10_000, 5, True).indices(epoch, 0, 10_000).tolist()
        assert all(type(index) is int for index in found[:10])
        assert list(sampler) == found, "iterating must not advance the epoch"


def test_sequential_yields_the_indices() -> None:
    sampler = OrderedSequentialSampler(DATA, seed=5)
    sampler.set_epoch(2)
    assert list(sampler) == DATA
    assert sampler.order == Order(10_000, 5, False)


def test_classes_and_attributes_are_torchs() -> None:
    shuffled, plain = OrderedRandomSampler(DATA), OrderedSequentialSampler(DATA)
    assert isinstance(shuffled, RandomSampler)
    assert isinstance(plain, SequentialSampler)
    theirs = RandomSampler(DATA)
    assert shuffled.replacement is theirs.replacement is False
    assert shuffled.num_samples == theirs.num_samples == len(shuffled) == len(plain) == 10_000
    assert shuffled.generator is theirs.generator is None
    assert shuffled.data_source is plain.data_source is DATA


@KINDS
def test_seed_comes_once_from_torchs_generator(kind: Kind) -> None:
    torch.manual_seed(3)
    first = kind(DATA)
    assert first.seed == first.seed
    torch.manual_seed(3)
    assert kind(DATA).seed == first.seed
    assert kind(DATA).seed != first.seed
    own = kind(DATA, generator=torch.Generator().manual_seed(9))
    state = torch.get_rng_state()
    assert own.seed == kind(DATA, generator=torch.Generator().manual_seed(9)).seed
    assert torch.equal(torch.get_rng_state(), state), "the default generator was touched"


@KINDS
def test_a_seed_that_is_given_draws_nothing(kind: Kind) -> None:
    state = torch.get_rng_state()
    list(kind(DATA, seed=0))
    assert torch.equal(torch.get_rng_state(), state)


@KINDS
def test_pickles_with_its_seed_and_epoch(kind: Kind) -> None:
    sampler = kind(DATA)
    sampler.set_epoch(4)
    expected = list(sampler), sampler.seed
    copy = pickle.loads(pickle.dumps(sampler))
    assert type(copy) is kind
    assert (list(copy), copy.seed) == expected


def test_follows_a_dataset_that_grows() -> None:
    data = [0, 1, 2]
    sampler = OrderedRandomSampler(data, seed=1)
    data.append(3)
    assert sorted(sampler) == [0, 1, 2, 3]
    assert len(sampler) == 4


@KINDS
def test_works_in_torchs_loader(kind: Kind) -> None:
    data: Any = DATA
    loader: DataLoader[int] = DataLoader(data, batch_size=64, sampler=kind(DATA, seed=1))
    assert torch.cat(list(loader)).sort().values.tolist() == DATA
    assert len(BatchSampler(kind(DATA, seed=1), 64, True)) == 10_000 // 64


def test_an_empty_dataset_is_refused_as_torch_does() -> None:
    with pytest.raises(ValueError, match="num_samples"):
        OrderedRandomSampler([])
    assert list(OrderedSequentialSampler([])) == []
