"""Datasets as people write them: the batches of torch's loader, in the tier that is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils import data as D  # noqa: N812
from torchvision import tv_tensors
from torchvision.transforms import v2

import stoker
from tracing import canonical, outcome, seed
from user_datasets import (
    SAMPLES,
    STYLES,
    LabelFileDataset,
    Style,
    label_file,
    write_files,
)

pytestmark = pytest.mark.filterwarnings("ignore:num_workers=:stoker.StokerWarning")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


def styled(name: str) -> Style:
    style = STYLES[name]
    if style.needs:
        pytest.importorskip(style.needs)
    return style


def epochs(kind: Any, dataset: Any, workers: int, **options: Any) -> tuple[list[list[Any]], Any]:
    """The batches of two epochs under fixed seeds, and the loader that gave them."""
    seed(5)
    options["shuffle"] = None if isinstance(dataset, D.IterableDataset) else True
    loader = kind(dataset, 4, num_workers=workers, **options)
    return [[canonical(batch) for batch in loader] for _ in range(2)], loader


TIERS = ["keyed", "torch", "materialised", "recorded", "lowered"]


def check(loader: stoker.DataLoader[Any], style: Style) -> None:
    """The tier that is expected or a faster one, by what explain() says and by the counters."""
    counts, tier = loader._trace.counts, loader.explain().tier
    assert TIERS.index(tier) >= TIERS.index(style.tier), str(loader.explain())
    assert bool(counts.opened) == (tier != "torch")
    if style.recorded is not None and hasattr(loader.dataset, "__len__"):
        assert counts.recorded >= round(style.recorded * 2 * len(loader.dataset))
    assert not counts.replayed


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", STYLES)
def test_batches_are_torchs(name: str, workers: int, files: Path) -> None:
    style = styled(name)
    options = {**style.options, "persistent_workers": workers > 0}
    expected, _ = epochs(D.DataLoader, style.make(files), workers, **options)
    options["randomness"] = "torch"
    found, loader = epochs(stoker.DataLoader, style.make(files), workers, **options)
    assert [len(epoch) for epoch in found] == [len(epoch) for epoch in expected]
    assert all(mine == theirs for mine, theirs in zip(found, expected, strict=True))
    check(loader, style)


@pytest.mark.parametrize("name", ["label file", "stream"])
def test_workers_that_are_spawned(name: str, files: Path) -> None:
    style = styled(name)
    options: dict[str, Any] = {"persistent_workers": True}
    expected, _ = epochs(D.DataLoader, style.make(files), 1, **options)
    options |= {"multiprocessing_context": "spawn", "randomness": "torch"}
    found, loader = epochs(stoker.DataLoader, style.make(files), 1, **options)
    assert found == expected
    check(loader, style)


@pytest.mark.parametrize(
    "name", [name for name, style in STYLES.items() if name != "stream" and not style.needs]
)
def test_keyed_batches_are_those_of_the_stock_tier(name: str, files: Path) -> None:
    style = styled(name)
    runs = {}
    for tier in ("auto", "stock"):
        runs[tier], loader = epochs(
            stoker.DataLoader, style.make(files), 0, **style.options, seed=3, tier=tier
        )
        if tier == "stock" or style.tier == "torch":
            assert loader.explain().tier == "keyed"
        else:
            expected = TIERS.index(style.keyed or style.tier)
            assert TIERS.index(loader.explain().tier) >= expected
    assert runs["auto"] == runs["stock"]


BY_KIND = {tv_tensors.Image: 200, Image.Image: 100, torch.Tensor: 50, "others": 10}
BY_TYPE: dict[str, list[Any]] = {
    "fill of a file": [v2.RandomRotation(30, fill={Image.Image: 9, "others": 77}), v2.ToImage()],
    "fill of an image": [v2.RandomRotation(30, fill=BY_KIND), v2.ToImage()],
    "fill of a tv_tensor": [v2.ToImage(), v2.RandomRotation(30, fill=BY_KIND)],
    "fill of a tensor": [v2.PILToTensor(), v2.Pad(3, fill=BY_KIND)],
    "dtype of a tv_tensor": [
        v2.ToImage(),
        v2.ToDtype({tv_tensors.Image: torch.float16, "others": torch.float32}, scale=True),
    ],
    "dtype of a tensor": [
        v2.PILToTensor(),
        v2.ToDtype({torch.Tensor: torch.float16, "others": torch.float32}, scale=True),
    ],
    "dtype of others": [v2.ToImage(), v2.ToDtype({"others": torch.float32}, scale=True)],
    "no dtype": [v2.ToImage(), v2.ToDtype({tv_tensors.Mask: None, "others": None})],
    "dtype of another": [v2.ToImage(), v2.ToDtype({tv_tensors.Mask: torch.int64})],
}


@pytest.mark.parametrize("name", BY_TYPE)
def test_what_torchvision_is_told_by_type(name: str, files: Path) -> None:
    """Fills and dtypes that are given for each type of image find the type behind a lazy one."""

    def run(kind: Any, **options: Any) -> Any:
        transform = v2.Compose([v2.Resize((32, 32)), *BY_TYPE[name]])
        dataset = label_file(LabelFileDataset, transform)(files)
        return outcome(lambda: epochs(kind, dataset, 0, **options)[0])

    assert run(stoker.DataLoader, randomness="torch") == run(D.DataLoader)


def test_every_sample_is_served(files: Path) -> None:
    loader: Any = stoker.DataLoader(STYLES["label file"].make(files), 5, shuffle=True)
    labels = sorted(label for _, batch in loader for label in batch.tolist())
    assert labels == sorted(i % 3 for i in range(SAMPLES))
