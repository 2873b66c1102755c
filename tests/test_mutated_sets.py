"""Damaged and hostile sets of every format: only the errors that say so, little memory, no hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import stoker
from pictures import class_folder
from stoker.pack import pack

HANDED = {
    "lmdb by mmocr": ("lmdb/mmocr_imgs.lmdb", ""),
    "mds": ("mds/plain", ""),
    "litdata": ("litdata/bytes", ""),
    "ffcv": ("ffcv/jpg_q90.beton", ""),
    "idx": ("idx", "test-images-idx3-ubyte"),
    "cifar": ("cifar/cifar-10-batches-py", ""),
    "arrow by datasets": ("arrow/hf_save_to_disk", ""),
    "parquet by datasets": ("parquet/hf_imagefolder", ""),
    "parquet, compressed": ("parquet/plain_binary.parquet", ""),
    "tar by webdataset": ("webdataset/wds_photos", "*.tar"),
    "tfrecord by tensorflow": ("tfrecord/imagenet_style", "*"),
    "tfrecord, gzip": ("tfrecord/gzip.tfrecord.gz", ""),
}
"""What others have written: its place below the folder of formats, and what is opened in it."""

PACKED = {
    "tar": "a-%d.tar",
    "tfrecord": "a-%d.tfrecord",
    "parquet": "a-%d.parquet",
    "lmdb": "a.lmdb",
    "folder": "out/",
}


def run(path: Path, pattern: str, first: int, inputs: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("mutated_sets.py")), str(path)]
    command += ["--first", str(first), "--inputs", str(inputs), "--shards", pattern]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set in each format that can be written."""
    root = tmp_path_factory.mktemp("packed")
    source = stoker.ImageFolder(class_folder(root / "classes", 12), cache=False)
    for kind, target in PACKED.items():
        pack(source, f"{root}/{kind}/{target}", shard_bytes=100_000)
    return root


@pytest.mark.parametrize("kind", PACKED)
def test_packed(packed: Path, kind: str) -> None:
    pattern = {"lmdb": "", "folder": "labels.csv"}.get(kind, "*")
    path = packed / kind / "a.lmdb" if kind == "lmdb" else packed / kind
    run(path / "out" if kind == "folder" else path, pattern, 0, 25)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", PACKED)
def test_packed_often(packed: Path, kind: str) -> None:
    pattern = {"lmdb": "", "folder": "labels.csv"}.get(kind, "*")
    path = packed / kind / "a.lmdb" if kind == "lmdb" else packed / kind
    run(path / "out" if kind == "folder" else path, pattern, 25, 5000)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zipped(tmp_path: Path, method: int) -> None:
    folder = class_folder(tmp_path / "classes", 6)
    with zipfile.ZipFile(tmp_path / "x.zip", "w", method) as archive:
        for path in sorted(folder.rglob("*.*")):
            archive.write(path, path.relative_to(folder))
    run(tmp_path / "x.zip", "", 0, 25)


@pytest.fixture
def handed(data: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """A copy of what others have written."""
    place, pattern = HANDED[request.param]
    path = data / "formats" / place
    if not path.exists():
        pytest.skip(f"{path} is not there")
    target = tmp_path / path.name
    if path.is_dir():
        shutil.copytree(path, target)
    else:
        shutil.copyfile(path, target)
    for folder, names, files in os.walk(tmp_path):
        for name in (*names, *files):
            os.chmod(os.path.join(folder, name), 0o755)
    return target, pattern


@pytest.mark.parametrize("handed", HANDED, indirect=True)
def test_handed(handed: tuple[Path, str]) -> None:
    run(*handed, 0, 25)


@pytest.mark.exhaustive
@pytest.mark.parametrize("handed", HANDED, indirect=True)
def test_handed_often(handed: tuple[Path, str]) -> None:
    run(*handed, 25, 5000)
