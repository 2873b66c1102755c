"""Images in CIFAR batches, of Python and binary, and in those that others wrote in their layout.

A Python batch is a pickled dict: ``data``, an array uint8 of shape (n, 3 * side * side), of each
image its red, green and blue plane, row by row; ``labels``, or ``fine_labels`` and
``coarse_labels``, n integers; perhaps ``filenames``. CIFAR-10's training batches are
``data_batch_1`` and so on, with ``test_batch``; CIFAR-100's are ``train`` and ``test``. The names
of the classes are in ``batches.meta`` or ``meta``, pickled dicts with ``label_names``, or
``fine_label_names`` and ``coarse_label_names``. Downsampled ImageNet has ``train_data_batch_1`` and
larger sides. Pickles are read without running anything: `stoker.sources.pickled`.

A binary batch, known by its name as it has no header, is records of the label, or of CIFAR-100 the
coarse and the fine label, one byte each, and 3,072 bytes of pixels. Names of classes are lines in
``batches.meta.txt``, ``fine_label_names.txt`` and ``coarse_label_names.txt``. (A. Krizhevsky, "The
CIFAR-10 dataset", https://www.cs.toronto.edu/~kriz/cifar.html.)

The pixels are written into the cache folder once: Note [Raw pixels] in `stoker.sources.expanded`.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.sources import pickled
from stoker.sources.expanded import images
from stoker.sources.shards import Found, Sharded

_FIELDS = ("labels", "fine_labels", "coarse_labels")
_TRAINING = re.compile(r"(?:train_)?data_batch_(\d+)(?:\.bin)?|train(?:\.bin)?")
_BINARY = re.compile(r"data_batch_\d+\.bin|test_batch\.bin|train\.bin|test\.bin")
_BINARY_PIXELS = 3 * 32 * 32
_OF_100 = ("train.bin", "test.bin")
_METAS = ("batches.meta", "meta")
_HEAD_BYTES = 256

Label = Mapping[str, Any] | str | None


@dataclass(frozen=True)
class _Batch:
    """A batch.

    Attributes:
        path: its file.
        data: the pixels, uint8 of shape (n, 3 * side * side).
        labels: by the names of their fields.
        names: of the images; empty where it has none.
        damage: what cannot be read; empty where nothing is wrong.
    """

    path: str
    data: NDArray[np.uint8]
    labels: dict[str, list[int]]
    names: list[str] = field(default_factory=list)
    damage: str = ""

    def pixels(self, number: int) -> NDArray[np.uint8]:
        """Those of an image, of shape (side, side, 3)."""
        side = math.isqrt(self.data.shape[1] // 3)
        row: NDArray[np.uint8] = self.data[number]
        return row.reshape(3, side, side).transpose(1, 2, 0)


class CIFAR(Sharded):
    """A map-style dataset of the images in CIFAR batches.

    Args:
        path: a batch, or a folder, of which the training batches are taken.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label.
        label: ``"labels"``, ``"fine_labels"`` or ``"coarse_labels"``; ``"auto"`` is the first that
            there is; a mapping of names to labels; None for no labels.
        damaged: ``"raise"``, or ``"skip"`` to leave damaged batches out, and of a truncated binary
            one what is not there, with a warning.
        exif: turn images as their EXIF orientation says.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: an image of more raises DecodeError instead of being read.

    Raises:
        SourceError: a batch is absent or damaged, or has no such labels.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        label: Label = "auto",
        damaged: str = "raise",
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        if damaged not in ("raise", "skip"):
            raise ValueError(f"damaged must be 'raise' or 'skip', got {damaged!r}")
        if isinstance(label, str) and label not in ("auto", *_FIELDS):
            raise ValueError(
                f"label must be 'auto', {', '.join(map(repr, _FIELDS))}, a mapping "
                f"or None, got {label!r}"
            )
        given = os.path.expanduser(os.fspath(path))
        batches = _training_batches(given) if os.path.isdir(given) else [given]
        if not batches:
            raise SourceError(given, "has no training batches")
        found, shards, chosen = Found(), list[str](), None
        for file in batches:
            try:
                batch = _read(file)
                if batch.damage and damaged == "raise":
                    raise SourceError(file, f"{batch.damage}; damaged='skip' keeps the others")
                wanted = _field(batch, label)
                if chosen not in (None, wanted):
                    raise SourceError(file, f"has no {chosen}, as the batches before")
            except SourceError as error:
                if damaged == "raise" or len(batches) == 1:
                    raise
                found.told.append(f"{error}; the batch is left out")
                continue
            chosen = wanted
            if batch.damage:
                found.told.append(f"{file}: {batch.damage}; what is damaged is left out")
            count, side = len(batch.data), math.isqrt(batch.data.shape[1] // 3)
            made, begins, lengths = images(file, "cifar", [(side, side, 3)] * count, batch.pixels)
            names = batch.names or [str(len(found.names) + number) for number in range(count)]
            labels: list[Any] = [None] * count
            if isinstance(label, Mapping):
                labels = [label.get(name) for name in names]
            elif wanted is not None:
                labels = list(batch.labels[wanted])
            found.names += names
            found.shards += [len(shards)] * count
            found.begins += begins
            found.lengths += lengths
            found.labels += labels
            shards.append(made)
        if not shards:
            raise SourceError(given, "; ".join(found.told))
        classes: list[str] = []
        if chosen is not None:
            try:
                classes = _class_names(os.path.dirname(batches[0]), chosen)
            except SourceError as error:
                if damaged == "raise":
                    raise
                found.told.append(f"{error}; its names of classes are left out")
        super().__init__(
            shards, found, None, transform, target_transform, exif, max_pixels, max_bytes
        )
        if len(classes) > max(self.targets, default=-1):
            self.classes = classes


def recognises(path: str, head: bytes) -> bool:
    """Whether a folder has CIFAR's training batches, or a file that begins with ``head`` is one."""
    if os.path.isdir(path):
        batches = _training_batches(path)
        if not batches:
            return False
        path = batches[0]
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    name = os.path.basename(path)
    if _BINARY.fullmatch(name):
        most = (20, 100) if name in _OF_100 else (10,)
        return len(head) > len(most) and all(map(operator.lt, head, most))
    start = head[:_HEAD_BYTES]
    return start.startswith((b"\x80", b"(dp")) and any(
        key in start for key in (b"batch_label", b"labels", b"filenames", b"data")
    )


def _training_batches(folder: str) -> list[str]:
    """The training batches in a folder, in the order of their numbers."""
    found = []
    try:
        names = os.listdir(folder)
    except OSError:  # which the reader of folders will say
        return []
    for name in names:
        match = _TRAINING.fullmatch(name)
        if match and os.path.isfile(os.path.join(folder, name)):
            found.append((int(match[1] or 0), name))
    return [os.path.join(folder, name) for _, name in sorted(found)]


def _field(batch: _Batch, label: Label) -> str | None:
    """The field of a batch that its labels are from."""
    if not isinstance(label, str):
        return None
    wanted = _FIELDS if label == "auto" else (label,)
    there = [name for name in wanted if name in batch.labels]
    if not there:
        fields = ", ".join(batch.labels) or "none"
        raise SourceError(batch.path, f"has no {' or '.join(wanted)}; its labels: {fields}")
    return there[0]


def _read(path: str) -> _Batch:
    content = _content(path)
    if _BINARY.fullmatch(os.path.basename(path)):
        return _binary(path, content)
    value = _unpickled(path, content)
    data = value.get("data")
    pixels = data.pixels() if isinstance(data, pickled.Array) else None
    if pixels is None or pixels.ndim != 2 or not _is_square(pixels.shape[1]):
        raise SourceError(path, "has no data of uint8 and shape (n, 3 * side * side)")
    labels = {}
    for name in _FIELDS:
        numbers = value.get(name)
        if numbers is None:
            continue
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise SourceError(path, f"its {name} are no list of integers")
        if len(numbers) != len(pixels):
            raise SourceError(path, f"has {len(pixels):,} images and {len(numbers):,} {name}")
        labels[name] = numbers
    names = _texts(value.get("filenames"))
    return _Batch(path, pixels, labels, names if len(names) == len(pixels) else [])


def _binary(path: str, content: bytes) -> _Batch:
    of_100 = os.path.basename(path) in _OF_100
    fields = ["coarse_labels", "fine_labels"] if of_100 else ["labels"]
    each = len(fields) + _BINARY_PIXELS
    count, rest = divmod(len(content), each)
    records = np.frombuffer(content, np.uint8, count * each).reshape(count, each)
    labels = {name: records[:, place].tolist() for place, name in enumerate(fields)}
    damage = f"is truncated in image {count:,}" if rest or not count else ""
    return _Batch(path, records[:, len(fields) :], labels, damage=damage)


def _unpickled(path: str, content: bytes) -> dict[str, Any]:
    """The dict in a pickle, its keys as texts."""
    try:
        value = pickled.load(content)
    except pickled.PickleError as error:
        raise SourceError(path, f"cannot be unpickled safely: {error}") from error
    if not isinstance(value, dict):
        raise SourceError(path, f"is no pickled dict, but a {type(value).__name__}")
    return {_text(key): item for key, item in value.items()}


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _texts(values: object) -> list[str]:
    """A list of texts; empty if it is anything else."""
    if not isinstance(values, list) or not all(isinstance(v, str | bytes) for v in values):
        return []
    return [_text(value) for value in values]


def _is_square(size: int) -> bool:
    side = math.isqrt(size // 3)
    return size > 0 and 3 * side * side == size


def _class_names(folder: str, label: str) -> list[str]:
    """The names of the classes that ``label`` counts; none where they are not there."""
    single = label.removesuffix("s")
    text = "batches.meta.txt" if label == "labels" else f"{single}_names.txt"
    for name in (*_METAS, text):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            content = _content(path)
            if name == text:
                lines = content.decode(errors="replace").splitlines()
                return [line.strip() for line in lines if line.strip()]
            return _texts(_unpickled(path, content).get(f"{single}_names"))
    return []


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise SourceError(path, error.strerror or str(error)) from error
