"""Collate functions for samples of several sizes: as lists, or padded and with masks.

Both are for a loader's ``collate_fn``, this one's or torch's. Options are given with
`functools.partial`, which every way to start workers can pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

Number = int | float


class Padded(NamedTuple):
    """Tensors of several sizes as one.

    Attributes:
        values: the samples' dtype, of shape (batch, *largest), each sample at the begin of its row.
        mask: bool, True where a sample is; of shape (batch, height, width) for tensors of three
            and more dimensions, the last two of them, else (batch, longest) for the first one.
        sizes: int64 of shape (batch, dimensions), the samples' shapes.
    """

    values: torch.Tensor
    mask: torch.Tensor
    sizes: torch.Tensor

    def unpadded(self) -> list[torch.Tensor]:
        """The samples' tensors, as views of ``values``."""
        rows = zip(self.values, self.sizes.tolist(), strict=True)
        return [row[tuple(slice(length) for length in size)] for row, size in rows]


def list_collate(samples: Sequence[Any]) -> Any:
    """The samples field by field, nothing stacked.

    Samples that are dicts give a dict of lists, named tuples one of lists, others a tuple of lists.
    What is recorded of an image stays recorded.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: [_field(sample, key) for sample in samples] for key in first}
    if not isinstance(first, Sequence) or isinstance(first, str | bytes):
        return list(samples)
    fields = _fields(samples)
    return type(first)(*fields) if hasattr(first, "_fields") else tuple(fields)


def pad_collate(samples: Sequence[Any], *, value: Number = 0, multiple: int = 1) -> Any:
    """What ``default_collate`` gives, but tensors of one and more dimensions as `Padded`.

    Those are filled up at their ends (right and bottom of an image) to the batch's largest in each
    dimension, whether their sizes differ or not. Numbers, strings and tensors without dimensions
    are collated as by default; objects of other kinds, such as None, become lists.

    Args:
        samples: of equal structure.
        value: what the rest of ``values`` is filled with.
        multiple: height and width of tensors of three and more dimensions are filled up to a
            multiple of it.

    Raises:
        ValueError: the samples' structure, dtypes or numbers of dimensions differ.
    """
    if multiple < 1:
        raise ValueError(f"multiple={multiple}: expected at least 1")
    first = samples[0]
    if isinstance(first, np.ndarray):
        return pad_collate(
            [torch.as_tensor(one) for one in samples], value=value, multiple=multiple
        )
    if isinstance(first, torch.Tensor) and first.dim():
        return _padded(samples, value, multiple)
    if isinstance(first, torch.Tensor | np.generic | int | float | str | bytes):
        return default_collate(list(samples))

    def padded(field: Sequence[Any]) -> Any:
        return pad_collate(field, value=value, multiple=multiple)

    if isinstance(first, Mapping):
        return {key: padded([_field(sample, key) for sample in samples]) for key in first}
    if isinstance(first, Sequence):
        fields = [padded(field) for field in _fields(samples)]
        return type(first)(*fields) if hasattr(first, "_fields") else fields
    return list(samples)


def _field(sample: Any, key: Any) -> Any:
    if key not in sample:
        raise ValueError(f"samples of different structure: one has {key!r}, another has not")
    return sample[key]


def _fields(samples: Sequence[Any]) -> list[list[Any]]:
    lengths = {len(sample) for sample in samples}
    if len(lengths) > 1:
        raise ValueError(
            f"samples of different structure: {sorted(lengths)} fields; lists of several lengths "
            "must be tensors to be padded"
        )
    return [list(field) for field in zip(*samples, strict=True)]


def _padded(tensors: Sequence[torch.Tensor], value: Number, multiple: int) -> Padded:
    first = tensors[0]
    for tensor in tensors:
        if tensor.dim() != first.dim() or tensor.dtype != first.dtype:
            raise ValueError(
                f"tensors of {first.dim()} and {tensor.dim()} dimensions, {first.dtype} and "
                f"{tensor.dtype}: expected the same of all; no boxes at all are torch.zeros(0, 4)"
            )
    sizes = torch.tensor([list(tensor.shape) for tensor in tensors], dtype=torch.int64)
    largest: list[int] = sizes.amax(0).tolist()
    image = len(largest) >= 3
    if image:
        largest[-2:] = [-(-length // multiple) * multiple for length in largest[-2:]]
    values = torch.full((len(tensors), *largest), value, dtype=first.dtype)
    mask = torch.zeros((len(tensors), *(largest[-2:] if image else largest[:1])), dtype=torch.bool)
    for tensor, row, there in zip(tensors, values, mask, strict=True):
        row[tuple(slice(length) for length in tensor.shape)].copy_(tensor)
        there[tuple(slice(n) for n in (tensor.shape[-2:] if image else tensor.shape[:1]))] = True
    return Padded(values, mask, sizes)
