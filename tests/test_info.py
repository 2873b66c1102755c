"""`stoker info`: figures that can be counted otherwise, for every kind of source."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset, TensorDataset
from typer.testing import CliRunner

import stoker
from pictures import class_folder, picture, save
from stoker import cache
from stoker.cli import app
from stoker.errors import SourceError
from stoker.info import QUANTILES, Spread, draw, info
from stoker.pack import pack


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(cache, "_in_memory", {})
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return class_folder(tmp_path / "classes", 40)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["info", *arguments])


def test_figures_are_those_of_the_files(folder: Path) -> None:
    paths = sorted(folder.rglob("*.*"))
    images = []
    for path in paths:
        with Image.open(path) as image:
            images.append(image)
    found = info(folder)
    assert (found.format, found.shards, found.samples) == ("a folder of classes", None, 40)
    assert found.classes == dict(Counter(path.parent.name for path in paths))
    assert found.formats == dict(Counter(str(image.format) for image in images))
    assert found.modes == dict(Counter(image.mode for image in images))
    assert found.imbalance == 14 / 13
    sizes = [path.stat().st_size for path in paths]
    assert found.total_bytes == sum(sizes)
    assert not found.sampled and found.read == 40
    for spread, values in (
        (found.bytes, sizes),
        (found.widths, [image.width for image in images]),
        (found.heights, [image.height for image in images]),
        (found.megapixels, [image.width * image.height / 1e6 for image in images]),
    ):
        assert spread is not None
        assert spread.quantiles == pytest.approx(np.quantile(values, QUANTILES).tolist())
        assert spread.mean == pytest.approx(np.mean(values))
        assert sum(spread.counts) == 40
        assert len(spread.edges) == len(spread.counts) + 1
    assert found.qualities is not None
    assert found.qualities.quantiles[0] == 75 and found.qualities.quantiles[-1] == 95


def test_a_spread_of_one_value() -> None:
    spread = Spread.of(np.array([5, 5, 5]))
    assert spread is not None and spread.counts == [3] and spread.edges == [5, 5]
    assert Spread.of(np.array([])) is None
    zero = Spread.of(np.array([0, 0, 4]))
    assert zero is not None and sum(zero.counts) == 3


def test_a_random_sample_is_read_and_said(folder: Path) -> None:
    first, again, other = (info(folder, sample=10, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.sampled and first.read == 10 == sum(first.formats.values())
    assert first.samples == 40 == sum(first.classes.values())
    assert not info(folder, sample=0).sampled
    done = run(str(folder), "--sample", "10")
    assert done.exit_code == 0
    assert "From the headers of 10 random samples of 40" in done.stdout
    with pytest.raises(ValueError, match="sample=-1"):
        info(folder, sample=-1)


@pytest.mark.parametrize("suffix", ["tar", "tfrecord"])
def test_shards_hold_what_their_source_held(folder: Path, tmp_path: Path, suffix: str) -> None:
    pack(stoker.ImageFolder(folder), tmp_path / f"x-%02d.{suffix}", shard_bytes=200_000)
    expected, found = info(folder), info(f"{tmp_path}/x-*.{suffix}")
    assert found.shards is not None and found.shards > 1
    assert found.format == {"tar": "tar shards", "tfrecord": "TFRecord shards"}[suffix]
    assert sorted(found.classes.values()) == sorted(expected.classes.values())
    for name in ("formats", "modes", "subsamplings", "total_bytes", "bytes", "megapixels"):
        assert getattr(found, name) == getattr(expected, name), name


@pytest.mark.parametrize(
    ("name", "format_name", "samples"),
    [
        ("webdataset/wds_photos/train-{000000..000002}.tar", "tar shards", 36),
        ("webdataset/truncated.tar", "tar shards", 7),
        ("tfrecord/imagenet_style/train-*", "TFRecord shards", None),
        ("lmdb/str_style.lmdb", "an LMDB environment", 30),
        ("mds/plain", "MDS shards", 40),
        ("parquet/hf_imagefolder", "Parquet files", 40),
        ("arrow/hf_save_to_disk", "Arrow files", 12),
    ],
)
@pytest.mark.filterwarnings("ignore::stoker.errors.StokerWarning")
def test_containers_of_other_tools(
    data: Path, name: str, format_name: str, samples: int | None
) -> None:
    found = info(data / "formats" / name)
    assert found.format == format_name
    assert samples in (None, found.samples)
    assert found.formats == {"JPEG": found.samples}


def test_boxes_have_the_classes(data: Path) -> None:
    found = info(data / "datasets" / "raccoon_voc")
    assert found.samples == 200 and found.formats == {"JPEG": 200}
    assert found.classes == {"__background__": 0, "raccoon": 217}
    done = run(str(data / "datasets" / "raccoon_voc"))
    assert "raccoon 217" in done.stdout and "times the samples" not in done.stdout


@pytest.mark.filterwarnings("ignore::stoker.errors.StokerWarning")
def test_unreadable_files_are_named(folder: Path) -> None:
    path = folder / "class_0" / "0000.jpg"
    path.write_bytes(b"no image")
    found = info(folder)
    assert found.unreadable == [(str(path), found.unreadable[0][1])]
    assert found.unreadable_count == 1 and sum(found.formats.values()) == 39
    done = run(str(folder))
    assert f"unreadable: {path}" in done.stdout


def test_datasets_that_are_given_directly(folder: Path) -> None:
    found = info(Subset(stoker.ImageFolder(folder), [0, 1, 39]))
    assert found.samples == 3 and list(found.classes) == ["class_0", "class_1", "class_2"]
    assert found.classes == {"class_0": 2, "class_1": 0, "class_2": 1}
    assert found.format == "torch.utils.data.dataset.Subset"
    with pytest.raises(SourceError, match="its files are not known"):
        info(TensorDataset(torch.zeros(3)))


def test_json(folder: Path) -> None:
    save(folder / "class_0" / "turned.jpg", picture(40, 30), exif=_exif(6))
    done = run(str(folder), "--json")
    assert done.exit_code == 0
    told = json.loads(done.stdout)
    assert told["samples"] == 41 and told["rotated"] == 1 and told["sampled"] is False
    assert told["classes"]["class_0"] == 15
    assert len(told["quantiles_at"]) == len(told["widths"]["quantiles"])


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_a_table(folder: Path) -> None:
    (folder / "empty").mkdir()
    done = run(str(folder))
    assert done.exit_code == 0, done.output
    for text in ("a folder of classes", "40, ", "empty 0", "JPEG", "megapixels", "4:2:0"):
        assert text in done.stdout


def test_a_picture(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (folder / "class_0" / "0000.jpg").write_bytes(b"no image")
    shutil.move(folder / "class_1", folder / "$x^2_\\frac{")
    target = tmp_path / "picture.png"
    done = run(str(folder), "--png", str(target))
    assert done.exit_code == 0, done.output
    with Image.open(target) as image:
        assert image.format == "PNG" and image.width > 800 and image.height > 800
        colours = np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)
    assert len(colours) > 5_000  # photos, and not only axes
    draw(folder, info(Subset(stoker.ImageFolder(folder), [3])), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1_000


def test_a_picture_without_the_extra(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return genuine(name, *arguments)

    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    done = run(str(folder), "--png", str(tmp_path / "x.png"))
    assert done.exit_code == 1
    assert "stoker[plot]" in str(done.exception)
    assert not (tmp_path / "x.png").exists()
