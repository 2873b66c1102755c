"""The table of files, its views, and opening an image as torchvision does."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets.folder import IMG_EXTENSIONS, pil_loader

from pictures import KINDS, picture, save
from stoker.errors import DecodeError
from stoker.sources import index
from stoker.sources.index import IMAGE_EXTENSIONS, Files, Images, Labels, Names, Samples

# Anything a path can hold on Linux, also bytes that are not UTF-8.
PATHS = st.binary(min_size=1, max_size=20).map(lambda b: os.fsdecode(b.replace(b"\0", b"/")))


@given(st.lists(PATHS, max_size=12))
def test_paths_come_back_as_they_were(paths: list[str]) -> None:
    files = Files.from_paths(paths, list(range(len(paths))))
    assert [files.path(row) for row in range(len(files))] == paths
    assert files.root == "" or files.root.endswith("/")
    copy = pickle.loads(pickle.dumps(files))
    assert [copy.path(row) for row in range(len(copy))] == paths
    assert list(Samples(copy)) == [(path, i) for i, path in enumerate(paths)]


@given(st.lists(PATHS, min_size=1, max_size=12), st.data())
def test_selected_rows_keep_path_and_label(paths: list[str], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(paths) - 1), max_size=20))
    files = Files.from_paths(paths, [7 * i for i in range(len(paths))])
    some = files.select(np.array(rows, np.int64))
    assert list(Samples(some)) == [(paths[row], 7 * row) for row in rows]


def test_select_crosses_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_ROWS_AT_ONCE", 3)
    paths = [f"a/{'x' * (i % 5)}{i}" for i in range(10)]
    assert list(Names(Files.from_paths(paths).select(np.arange(9, -1, -1)))) == [
        path[2:] for path in reversed(paths)
    ]


def test_common_folder_is_stored_once() -> None:
    files = Files.from_paths(["/data/train/a/1.jpg", "/data/train/ab/2.jpg"])
    assert files.root == "/data/train/"
    assert bytes(files.names) == b"a/1.jpgab/2.jpg"
    assert files.offsets.tolist() == [0, 7, 15]
    assert Files.from_paths(["a/same.jpg", "a/same.jpg"]).root == "a/"


def test_a_path_costs_eight_bytes_beside_its_name() -> None:
    files = Files.from_paths([f"/photos/{i:06}.jpg" for i in range(1000)], [0] * 1000)
    assert files.labels is not None
    assert files.names.nbytes + files.offsets.nbytes + files.labels.nbytes < 1001 * (10 + 8 + 8)
    assert len(pickle.dumps(Names(files))) < 1001 * 27


def test_views_behave_as_lists() -> None:
    names = ["b.jpg", "a.jpg", "c.jpg", "d.jpg"]
    view = Names(Files.from_paths(names))
    assert view == names
    assert names == view
    assert view != names[:3]
    assert view[-1] == "d.jpg"
    assert list(view[1::2]) == ["a.jpg", "d.jpg"]
    assert isinstance(view[:2], Names)
    assert "c.jpg" in view
    assert view.index("c.jpg") == 2
    assert len(view) == 4
    assert repr(view) == "<4 names: 'b.jpg', 'a.jpg', 'c.jpg', ...>"
    for outside in (4, -5):
        with pytest.raises(IndexError):
            view[outside]


def test_labels_are_a_mapping() -> None:
    names = [f"{i}.jpg" for i in range(50)]
    labels = Labels(Files.from_paths(names, list(range(100, 150))))
    expected = dict(zip(names, range(100, 150), strict=True))
    assert dict(labels) == labels == expected
    for copy in (labels, pickle.loads(pickle.dumps(labels))):
        assert copy["49.jpg"] == 149
        assert "50.jpg" not in copy
        assert copy.get("x", -1) == -1
        with pytest.raises(KeyError):
            copy["x"]


def test_extensions_are_torchvisions() -> None:
    assert IMAGE_EXTENSIONS == IMG_EXTENSIONS


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK", "1", "I;16", "LA"])
def test_opens_every_mode_as_torchvision(tmp_path: Path, mode: str) -> None:
    suffix = {"CMYK": "jpg"}.get(mode, "png")
    image = picture(40, 30).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    path = str(save(tmp_path / f"x.{suffix}", image))
    ours, theirs = Files.from_paths([path]).open(0), pil_loader(path)
    assert ours.mode == theirs.mode == "RGB"
    assert np.array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_only_if_asked(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / "x.jpg", picture(40, 30), exif=exif, quality=95)
    table = Files.from_paths([str(path)])
    assert table.open(0).size == (40, 30)
    assert np.array_equal(np.asarray(table.open(0)), np.asarray(pil_loader(str(path))))
    upright = replace(table, upright=True).open(0)
    plain = np.asarray(pil_loader(str(path)))
    turned = {
        1: plain,
        2: plain[:, ::-1],
        3: plain[::-1, ::-1],
        4: plain[::-1],
        5: plain.transpose(1, 0, 2),
        6: plain.transpose(1, 0, 2)[:, ::-1],
        7: plain[::-1, ::-1].transpose(1, 0, 2),
        8: plain.transpose(1, 0, 2)[::-1],
    }
    assert np.array_equal(np.asarray(upright), turned[orientation])


def test_limits_are_checked_before_the_work(tmp_path: Path) -> None:
    path = str(save(tmp_path / "x.png", picture(40, 30)))
    size = os.path.getsize(path)
    fitting = replace(Files.from_paths([path]), max_pixels=1200, max_bytes=size)
    assert fitting.open(0).size == (40, 30)
    # Cut the pixels off: whoever decodes fails in another way.
    with open(path, "r+b") as file:
        file.truncate(200)
    small = Files(tmp_path.as_posix() + "/", *_table(b"x.png"), max_pixels=1199)
    with pytest.raises(DecodeError, match="40 x 30 pixels, more than max_pixels=1,199"):
        small.open(0)
    few = Files(tmp_path.as_posix() + "/", *_table(b"x.png"), max_bytes=199)
    with pytest.raises(DecodeError, match="200 bytes, more than max_bytes=199"):
        few.open(0)


def _table(name: bytes) -> tuple[Any, Any]:
    return np.frombuffer(name, np.uint8), np.array([0, len(name)], np.uint64)


@pytest.mark.parametrize("limit", [0, -1])
def test_senseless_limits_are_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="max_pixels"):
        Files("", *_table(b"x"), max_pixels=limit)
    with pytest.raises(ValueError, match="max_bytes"):
        Files("", *_table(b"x"), max_bytes=limit)


@pytest.mark.parametrize("content", [b"", b"no image", None], ids=["empty", "text", "absent"])
def test_failures_name_the_sample(tmp_path: Path, content: bytes | None) -> None:
    good, bad = save(tmp_path / "a.png", picture(8, 8)), tmp_path / "b.jpg"
    if content is not None:
        bad.write_bytes(content)
    dataset = Images(Files.from_paths([str(good), str(bad)], [0, 1]))
    with pytest.raises(DecodeError) as caught:
        dataset[-1]
    assert (caught.value.index, caught.value.location) == (1, str(bad))
    assert caught.value.reason
    assert isinstance(caught.value.__cause__, OSError)
    assert dataset[0][1] == 0


def test_heif_without_its_extra_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    index._register_heif.cache_clear()
    (tmp_path / "x.HEIC").write_bytes(b"")
    with pytest.raises(DecodeError, match=r"stoker\[heif\]"):
        Files.from_paths([str(tmp_path / "x.HEIC")]).open(0)


class TimesTen:
    def __call__(self, label: int) -> int:
        return 10 * label


class ToTensor:
    def __call__(self, image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(image))


@pytest.fixture
def dataset(tmp_path: Path) -> Images:
    paths = []
    for i, (suffix, options) in enumerate(KINDS):
        paths.append(str(save(tmp_path / f"{i}.{suffix}", picture(20, 16, seed=i), **options)))
    return Images(Files.from_paths(paths, list(range(len(paths)))), ToTensor(), TimesTen())


def test_is_a_map_style_dataset(dataset: Images) -> None:
    assert len(dataset) == len(dataset.targets) == 7
    image, label = dataset[3]
    expected = np.asarray(pil_loader(dataset.files.path(3)))
    assert np.array_equal(image.numpy(), expected)
    assert label == 30
    assert dataset.targets[3] == 3
    assert len(dataset + dataset) == 14
    with pytest.raises(IndexError):
        dataset[7]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_works_in_torchs_workers(
    dataset: Images, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_SHARED_BYTES", 0)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=3, num_workers=1, multiprocessing_context=method
    )
    batches = list(loader)
    assert torch.cat([labels for _, labels in batches]).tolist() == [0, 10, 20, 30, 40, 50, 60]
    expected = torch.stack([dataset[i][0] for i in range(7)])
    assert torch.equal(torch.cat([images for images, _ in batches]), expected)


def test_big_tables_are_shared_with_spawned_workers_only(
    dataset: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_SHARED_BYTES", 0)
    plain = pickle.dumps(dataset)
    monkeypatch.setattr(index, "get_spawning_popen", object)
    shared = pickle.dumps(dataset), pickle.dumps(dataset)
    assert shared[0] == shared[1], "written more than once"
    monkeypatch.undo()
    written = list(dataset.files.__dict__["_written"].values())
    assert len(written) == 3
    assert all(os.path.exists(path) for path in written)
    copy = pickle.loads(shared[0])
    assert list(Samples(copy.files)) == list(Samples(dataset.files))
    assert isinstance(copy.files.names, np.memmap)
    assert not isinstance(pickle.loads(plain).files.names, np.memmap)
    del copy
    dataset.files = Files.from_paths([], [])
    assert not any(os.path.exists(path) for path in written)
