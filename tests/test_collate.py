"""Collating samples of several sizes, beside torch's and torchvision's own ways."""

from __future__ import annotations

import functools
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils import data as D  # noqa: N812
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.models.detection.transform import GeneralizedRCNNTransform

import stoker
from stoker.collate import Padded, list_collate, pad_collate
from tracing import canonical, seed
from user_datasets import SAMPLES, DetectionDataset, write_files


def images(*sizes: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [(torch.rand(3, *size) * 255).to(dtype) for size in sizes]


@pytest.mark.parametrize("multiple", [1, 8, 32])
def test_images_are_padded_as_torchvisions_detectors_do(multiple: int) -> None:
    given = images((30, 41), (25, 64), (33, 7))
    detector = GeneralizedRCNNTransform(10, 20, [0.0], [1.0])
    padded = pad_collate(given, multiple=multiple)
    assert torch.equal(padded.values, detector.batch_images(given, size_divisible=multiple))
    assert padded.sizes.tolist() == [[3, 30, 41], [3, 25, 64], [3, 33, 7]]
    for image, mask in zip(given, padded.mask, strict=True):
        height, width = image.shape[1:]
        assert mask.dtype == torch.bool and mask.sum() == height * width
        assert mask[:height, :width].all()
    assert padded.mask.shape == (3, *padded.values.shape[-2:])
    assert all(map(torch.equal, padded.unpadded(), given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_boxes_and_labels_are_padded_as_pad_sequence_does(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    given = [(torch.rand(n, *shape) * 90).to(dtype) for n in (3, 0, 5, 1)]
    padded = pad_collate(given, value=7)
    expected = pad_sequence(given, batch_first=True, padding_value=7)
    assert torch.equal(padded.values, expected) and padded.values.dtype == dtype
    assert padded.mask.sum(1).tolist() == [3, 0, 5, 1]
    lengths = pad_sequence([torch.ones(n, dtype=torch.bool) for n in (3, 0, 5, 1)], True)
    assert torch.equal(padded.mask, lengths)


Pair = namedtuple("Pair", "first second")


def test_structures() -> None:
    samples = [
        {
            "image": image,
            "target": {"boxes": torch.rand(n, 4), "masks": torch.ones(n, 6, 8 + n)},
            "id": n,
            "area": n / 2,
            "name": str(n),
            "scale": torch.tensor(n),
            "pair": Pair(np.arange(n), [n, torch.zeros(n)]),
            "nothing": None,
        }
        for n, image in enumerate(images((5, 6), (7, 4)), 1)
    ]
    batch = pad_collate(samples)
    assert batch["image"].values.shape == (2, 3, 7, 6)
    assert batch["target"]["masks"].values.shape == (2, 2, 6, 10)
    assert batch["target"]["masks"].mask.shape == (2, 6, 10)
    assert type(batch["pair"]) is Pair and type(batch["pair"].second) is list
    assert batch["pair"].first.values.tolist() == [[0, 0], [0, 1]]
    assert batch["nothing"] == [None, None] and batch["name"] == ["1", "2"]
    for name in ("id", "area", "scale"):
        expected = default_collate([sample[name] for sample in samples])
        assert canonical(batch[name]) == canonical(expected)
    listed = list_collate(samples)
    assert listed.keys() == batch.keys() and listed["id"] == [1, 2]
    assert list_collate([(1, "a"), (2, "b")]) == ([1, 2], ["a", "b"])
    assert list_collate([Pair(1, 2), Pair(3, 4)]) == Pair([1, 3], [2, 4])
    assert list_collate(["a", "b"]) == ["a", "b"]


def test_tv_tensors_become_tensors() -> None:
    given = [tv_tensors.Image(image) for image in images((3, 4), (5, 2), dtype=torch.uint8)]
    values = pad_collate(given).values
    assert type(values) is torch.Tensor and values.dtype == torch.uint8


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([torch.zeros(2, 4), torch.zeros(0)], r"2 and 1 dimensions.*torch\.zeros\(0, 4\)"),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], "float32 and torch.int64"),
        ([{"a": 1}, {"b": 1}], "one has 'a', another has not"),
        ([[1, 2], [1]], r"\[1, 2\] fields"),
    ],
)
def test_what_does_not_belong_together(samples: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pad_collate(samples)


def test_multiple_is_checked() -> None:
    with pytest.raises(ValueError, match="multiple=0"):
        pad_collate([1], multiple=0)


@pytest.mark.parametrize("collate", [list_collate, functools.partial(pad_collate, multiple=32)])
def test_in_loaders(collate: Any, tmp_path: Path) -> None:
    """The same batches from torch's loader and from a traced one; lists stay recorded."""
    dataset = DetectionDataset(write_files(tmp_path))
    runs = []
    loaders: list[Any] = [
        D.DataLoader,
        functools.partial(stoker.DataLoader, randomness="torch"),
    ]
    for kind in loaders:
        seed(2)
        loader = kind(dataset, 4, shuffle=True, num_workers=2, collate_fn=collate)
        runs.append([canonical(batch) for batch in loader])
    assert runs[0] == runs[1]
    counts = loader._trace.counts
    assert counts.recorded == (SAMPLES if collate is list_collate else 0)
    if collate is not list_collate:
        images, targets = next(iter(loader))
        assert type(images) is Padded and type(targets["boxes"]) is Padded
