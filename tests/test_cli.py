"""The command line: what DATA may be, what is reported, how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from torch.utils.data import Subset
from typer.testing import CliRunner

import stoker
from stoker.cli import app
from stoker.cli.data import Recipe, resolve, resolve_files, transform_of, with_transform
from stoker.cli.parity import _difference
from stoker.errors import SourceError
from stoker.sources.index import Images

STOKER = str(Path(sys.executable).with_name("stoker"))

OWN = """
import torch
from torch.utils.data import Dataset, IterableDataset

class Numbers(Dataset):
    def __init__(self, n=40):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, index):
        return torch.full((3, 4, 4), float(index)) + torch.rand(3, 4, 4), index

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))

numbers = Numbers()
stream = Stream()
empty = Numbers(0)
text = "no dataset"

def make():
    return Numbers(8)

def fails():
    raise RuntimeError("no such disk")
"""


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class folder of 24 small JPEGs, two sizes."""
    folder = tmp_path_factory.mktemp("classes")
    for number in range(24):
        place = folder / ("cat" if number % 3 else "dog")
        place.mkdir(exist_ok=True)
        size = (320, 240) if number % 2 else (200, 300)
        Image.effect_noise(size, 60).convert("RGB").save(place / f"{number:02d}.jpg")
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A Python file with datasets and things that are none."""
    path = tmp_path / "own_data.py"
    path.write_text(OWN)
    return path


def _json(arguments: list[str], code: int = 0) -> dict[str, object]:
    done = subprocess.run([STOKER, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


def _fails(arguments: list[str], code: int) -> str:
    # Wide enough that no line is folded.
    environment = {**os.environ, "COLUMNS": "1000"}
    done = subprocess.run(
        [STOKER, *arguments], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_bench_on_a_class_folder(classes: Path) -> None:
    result = _json(
        ["bench", str(classes), "--json", "--rounds", "2", "--num-workers", "1", "--limit", "20"]
    )
    assert result["recipe"] == "train"
    assert result["samples"] == 20
    loaders = result["loaders"]
    assert isinstance(loaders, list)
    assert [row["name"] for row in loaders] == ["stoker", "torch"]
    assert loaders[0]["tier"] == "lowered"
    for row in loaders:
        assert row["images_per_second"] > 0
        assert row["first_batch_seconds"] > 0
        if sys.platform == "linux":
            assert row["cpu_ms_per_image"] > 0


def test_bench_table(own: Path) -> None:
    done = subprocess.run(
        [STOKER, "bench", f"{own}:numbers", "--rounds", "1", "--num-workers", "0"],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert "CPU ms/image" in done.stdout
    assert "not native because of" in done.stdout
    assert "times the images/s" in done.stdout


@pytest.mark.parametrize("recipe", list(Recipe))
def test_parity_is_whole_on_every_recipe(classes: Path, recipe: Recipe) -> None:
    result = _json(["parity", str(classes), "--recipe", recipe, "--json", "--num-workers", "1"])
    assert result["identical"] is True
    assert result["unreadable"] == 0
    rows = result["rows"]
    assert isinstance(rows, list)
    assert rows[0]["op"] == "decode"
    assert rows[-1]["op"] == "whole pipeline"
    for row in rows:
        assert row["samples"] == row["identical"] == 24
        assert row["largest"] == row["mean"] == 0
        assert row["tier"] == "lowered", row["op"]


def test_parity_leaves_unreadable_files_out(classes: Path, tmp_path: Path) -> None:
    for path in classes.rglob("*.jpg"):
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        (tmp_path / path.parent.name / path.name).symlink_to(path)
    (tmp_path / "cat" / "broken.jpg").write_bytes(b"\xff\xd8\xff no photo")
    result = _json(["parity", str(tmp_path), "--recipe", "val", "--json", "--num-workers", "1"])
    assert result["unreadable"] == 1
    assert result["identical"] is True


def test_parity_of_an_own_dataset(own: Path) -> None:
    result = _json(["parity", f"{own}:make", "--json", "--num-workers", "0"])
    rows = result["rows"]
    assert isinstance(rows, list)
    assert [row["op"] for row in rows] == ["whole pipeline"]
    assert rows[0]["tier"] == "keyed"
    assert rows[0]["identical"] == 8


def test_difference() -> None:
    ones = torch.ones(2, 2)
    assert _difference(ones, ones.clone()) == (True, 0.0, 0.0)
    assert _difference(ones, ones + torch.tensor([[0, 0.5], [0, 0.25]])) == (False, 0.5, 0.75)
    assert not _difference(ones, ones.double())[0]
    assert not _difference(ones, torch.ones(2, 3))[0]
    assert not _difference(torch.tensor([0.0]), torch.tensor([-0.0]))[0]


def test_parity_fails_where_something_differs(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check can fail: a loader that adds one to every tensor is found out."""
    iterate = stoker.DataLoader.__iter__

    def altered(self: stoker.DataLoader[Any]) -> object:
        return ([images + 1, labels] for images, labels in iterate(self))

    monkeypatch.setattr(stoker.DataLoader, "__iter__", altered)
    done = CliRunner().invoke(
        app, ["parity", str(classes), "--json", "--recipe", "val", "--num-workers", "0"]
    )
    assert done.exit_code == 1
    result = json.loads(done.stdout)
    assert result["identical"] is False
    assert all(row["identical"] == 0 and row["largest"] >= 1 for row in result["rows"])


def test_labels_file(classes: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"{path.name} 1\n" for path in (classes / "cat").iterdir()))
    data = resolve(str(classes / "cat"), labels, Recipe.val)
    assert isinstance(data.dataset, stoker.ImageDataset)
    assert len(data) == 16
    image, label = data.dataset[0]
    assert image.shape == (3, 224, 224)
    assert label == 1


def test_spread_takes_samples_from_everywhere(own: Path) -> None:
    data = resolve(f"{own}:numbers", None, None)
    some = data.spread(4)
    assert isinstance(some, Subset)
    assert some.indices == [0, 10, 20, 30]
    assert data.spread(0) is data.dataset
    assert data.spread(40) is data.dataset


def test_with_transform_leaves_the_original_alone(classes: Path) -> None:
    data = resolve(str(classes), None, Recipe.val)
    own = transform_of(data.dataset)
    changed = with_transform(Subset(data.dataset, [1, 2]), lambda image: image.size)
    assert transform_of(data.dataset) is own
    assert changed[0][0] in [(320, 240), (200, 300)]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing", "has no 'nothing'; it has"),
        ("stream", "an iterable dataset"),
        ("empty", "the dataset is empty"),
        ("text", "a str, not a dataset"),
        ("fails", "RuntimeError: no such disk"),
    ],
)
def test_file_without_the_dataset(own: Path, name: str, told: str) -> None:
    with pytest.raises(SourceError, match=told) as caught:
        resolve(f"{own}:{name}", None, None)
    assert str(own) in str(caught.value)


def test_shards(classes: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a-0.tar", "w") as file:
        file.add(classes, "images")
    data = resolve(f"{tmp_path}/a-{{0..0}}.tar", None, None)
    assert len(data) == len(stoker.ImageFolder(classes)) and data.recipe == "train"
    with pytest.raises(SourceError, match="No such file"):
        resolve(f"{tmp_path}/b-{{0..1}}.tar", None, None)


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("lmdb/str_style.lmdb", 30),
        ("mds/plain", 40),
        ("tfrecord/gzip.tfrecord.gz", 12),
        ("webdataset/wds_photos/train-*.tar", 36),
    ],
)
def test_whatever_can_be_opened(data: Path, name: str, samples: int) -> None:
    found = resolve(str(data / "formats" / name), None, None)
    assert len(found) == samples and found.recipe == "train"
    assert len(resolve_files(str(data / "formats" / name), None)) == samples  # type: ignore[arg-type] # sized


def test_fields_of_shards(classes: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as file:
        for path in sorted((classes / "cat").iterdir()):
            file.add(path, f"{path.stem}.left.jpg")
            (tmp_path / "label").write_text(path.stem)
            file.add(tmp_path / "label", f"{path.stem}.kind")
    shard = str(tmp_path / "x.tar")
    data = resolve(shard, None, None, "left.jpg", "kind").dataset
    assert isinstance(data, Images)
    assert data.targets == [int(path.stem) for path in sorted((classes / "cat").iterdir())]
    unlabelled = resolve_files(shard, None, label="none")
    assert isinstance(unlabelled, Images) and set(unlabelled.targets) == {-1}
    for arguments in ((str(classes), None, "jpg"), (f"{tmp_path}/x.py:a", None, "jpg")):
        with pytest.raises(typer.BadParameter, match="says nothing to"):
            resolve_files(*arguments)


def test_a_label_file(classes: Path) -> None:
    names = [path.relative_to(classes).as_posix() for path in classes.rglob("*.jpg")]
    labels = classes / "labels.csv"
    labels.write_text("".join(f"{name},3\n" for name in names))
    assert len(resolve(str(labels), None, None)) == 24
    labels.unlink()


def test_file_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text("import no_such_module_at_all\n")
    with pytest.raises(SourceError, match="no_such_module_at_all"):
        resolve(f"{tmp_path / 'faulty.py'}:data", None, None)


def test_messages_name_file_reason_and_remedy(classes: Path, own: Path, tmp_path: Path) -> None:
    missing = _fails(["bench", str(tmp_path / "nowhere")], 1)
    assert "nowhere: no such folder" in missing
    flat = _fails(["bench", str(classes / "cat")], 1)
    assert "no subfolders" in flat
    assert "--labels FILE" in flat
    assert "no such label file" in _fails(
        ["bench", str(classes), "--labels", str(tmp_path / "l.txt")], 1
    )
    assert "NAME" in _fails(["parity", str(own)], 2)
    assert "leave --recipe out" in _fails(["parity", f"{own}:numbers", "--recipe", "val"], 2)
    assert "'test'" in _fails(["bench", str(classes), "--recipe", "test"], 2)
