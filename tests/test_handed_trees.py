"""Label files, trees, box tables and annotations that others wrote, as MANIFEST.tsv has them."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torchvision
from PIL import Image

import stoker
from stoker.errors import DecodeError, SourceError, StokerWarning
from stoker.sources import labels
from tracing import canonical

FOLDERS = ("coco", "csv", "imagefolder", "labels", "trees")


@pytest.fixture(scope="module")
def manifest(data: Path) -> dict[str, dict[str, str]]:
    """The lines about what is tested here, by path."""
    with (data / "MANIFEST.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    places = (*(f"formats/{folder}/" for folder in FOLDERS), "datasets/")
    return {row["path"]: row for row in rows if row["path"].startswith(places)}


def number(text: str, what: str) -> int:
    """The number before a word of the manifest."""
    found = re.search(rf"([\d,]+) {what}", text)
    assert found is not None, (what, text)
    return int(found[1].replace(",", ""))


def same_images(dataset: Any, paths: list[Path]) -> None:
    """Every sample is what Pillow makes of its file."""
    assert len(dataset) == len(paths)
    for index, path in enumerate(paths):
        with Image.open(path) as image:
            assert canonical(dataset[index][0]) == canonical(image.convert("RGB")), path


def test_every_line_is_tested(manifest: dict[str, dict[str, str]]) -> None:
    source = Path(__file__).read_text()
    others = {"formats/labels/names", "datasets/raccoon_voc"}  # test_sources_filelist and _voc
    untested = [path for path in manifest if path.rpartition("/")[2] not in source]
    assert set(untested) <= others, "a handed set that no test here names"


# Trees


@pytest.mark.parametrize("name", ["datasets/flowers128", "datasets/hymenoptera"])
def test_trees_of_classes(data: Path, manifest: dict[str, dict[str, str]], name: str) -> None:
    told = manifest[name]["expect"]
    dataset: Any = stoker.open(data / name / "train")
    assert len(dataset.classes) == number(told, "classes")
    theirs = torchvision.datasets.ImageFolder(data / name / "train")
    assert list(dataset.samples) == theirs.samples
    counts = dict(re.findall(r"'train/(\w+)': (\d+)", manifest[name]["special"]))
    mine = Counter(dataset.classes[label] for label in dataset.targets)
    if counts:
        assert mine == {kind: int(count) for kind, count in counts.items()}
        assert ",".join(dataset.classes) in told
    else:
        assert "ants=0 bees=1" in told and dataset.classes == ["ants", "bees"]
        # Of the photos that the manifest counts, every second is there; the GIF is none.
        both = len(dataset) + len(stoker.open(data / name / "val"))
        assert both == len(list((data / name).rglob("*.jpg"))) > 0


def test_awkward_tree(data: Path, manifest: dict[str, dict[str, str]], tmp_path: Path) -> None:
    told = manifest["formats/imagefolder/awkward_tree.tar"]["expect"]
    with tarfile.open(data / "formats" / "imagefolder" / "awkward_tree.tar") as archive:
        archive.extractall(tmp_path, filter="tar")
    root = tmp_path / "awkward_tree" / "train"
    with pytest.raises(SourceError, match=r"no image .* 1 of 6 classes: 'empty class'"):
        stoker.open(root)
    dataset = stoker.ImageFolder(root, allow_empty=True, cache=False)
    # As torchvision has them: hidden folders and links to folders are classes, too.
    others = {".hidden_class", "alias_of_daisy", "empty class"}
    assert set(dataset.classes) - others == {"daisy", "red rose", "tulpe ü"}
    whole: Counter[str] = Counter()
    bad = set()
    for index, (path, label) in enumerate(dataset.samples):
        try:
            dataset[index]
        except DecodeError:
            bad.add(Path(path).name)
        else:
            whole[dataset.classes[label]] += 1
    assert bad == {"._1.jpg", "dangling.jpg"}
    assert whole["daisy"] == whole["alias_of_daisy"] == number(told, "daisy")
    assert whole["red rose"] == number(told, "rose") + 1
    assert whole["tulpe ü"] == number(told, "tulip")
    loader = stoker.DataLoader(
        dataset, 4, collate_fn=list, on_error="skip", num_workers=0, shuffle=True
    )
    assert sum(map(len, loader)) == len(dataset)
    assert {Path(sample.location).name for sample in loader.bad_samples} == bad


@pytest.mark.parametrize(
    "name", ["mmagic_coco", "mmagic_image", "mmagic_paired", "mmagic_unpaired"]
)
def test_images_of_trees_without_classes(
    data: Path, manifest: dict[str, dict[str, str]], name: str
) -> None:
    assert "images load" in manifest[f"formats/trees/{name}"]["expect"]
    root = data / "formats" / "trees" / name
    paths = sorted(path for path in root.rglob("*") if path.suffix in (".jpg", ".jpeg", ".png"))
    dataset = stoker.ImageFolder(root, allow_empty=True, cache=False)
    found = [Path(path) for path, _ in dataset.samples]
    assert sorted(found) == paths
    same_images(dataset, found)


# Label files


def test_table_of_identifiers(data: Path, manifest: dict[str, dict[str, str]]) -> None:
    folder = data / "formats" / "csv" / "kaggle_dog_breed"
    row = manifest["formats/csv/kaggle_dog_breed"]
    rows, present = number(row["special"], "rows"), number(row["special"], "of the images")
    missing = number(row["expect"], "rows whose")
    assert rows - present == missing
    with pytest.raises(SourceError) as caught:
        stoker.open(folder / "labels.csv", root=folder / "train")
    lines = str(caught.value).splitlines()
    assert f"{missing:,} of {rows:,} lines" in lines[0] and "missing='skip'" in lines[0]
    assert len(lines) == 5
    with pytest.warns(StokerWarning, match=f"{missing:,} of {rows:,} lines") as warned:
        dataset: Any = stoker.open(folder / "labels.csv", root=folder / "train", missing="skip")
    assert len(warned) == 1 and len(dataset) == present
    assert len(dataset.classes) == number(row["special"], "breeds")
    with (folder / "labels.csv").open(newline="") as file:
        breeds = {line["id"]: line["breed"] for line in csv.DictReader(file)}
    for name, label in dataset.labels.items():
        assert dataset.classes[label] == breeds[name.removesuffix(".jpg")]


def test_table_of_boxes(data: Path, manifest: dict[str, dict[str, str]]) -> None:
    told = manifest["formats/csv/raccoon_labels.csv"]["expect"]
    path = data / "formats" / "csv" / "raccoon_labels.csv"
    dataset: Any = stoker.open(path, root=data / "datasets" / "raccoon_voc" / "images")
    assert len(dataset.boxes.corners) == number(told, "rows")


def test_coco(data: Path, manifest: dict[str, dict[str, str]]) -> None:
    row = manifest["formats/coco/rabbit_cut"]
    path = data / "formats" / "coco" / "rabbit_cut" / "train" / "_annotations.coco.json"
    with pytest.warns(StokerWarning, match=f"{number(row['expect'], 'missing')} of 17 images"):
        dataset: Any = stoker.open(path, missing="skip")
    same_images(dataset, [Path(dataset.files.path(i)) for i in range(len(dataset))])
    assert len(dataset) == number(row["expect"], "images load")


@pytest.mark.parametrize("name", ["list_space.txt", "list_tab.tsv", "labels.csv"])
def test_hard_names(data: Path, name: str) -> None:
    folder = data / "formats" / "labels" / "names"
    expected = json.loads((data / "formats" / "EXPECT_labels_names.json").read_text())
    dataset: Any = stoker.open(folder / name, root=folder / "img")
    assert len(dataset) == len(expected)
    for row, entry in enumerate(expected):
        assert dataset.files.name(row) == entry["file"]
        with dataset.files.opened(row) as file:
            assert hashlib.sha256(file.read()).hexdigest() == entry["sha256"]
        label = dataset.targets[row]
        wanted = entry["index"] if name == "list_space.txt" else entry["label"]
        assert wanted == (label if name == "list_space.txt" else dataset.classes[label])


@pytest.mark.parametrize("name", ["old_label.txt", "old_label.jsonl", "labels.json"])
def test_texts(data: Path, manifest: dict[str, dict[str, str]], name: str) -> None:
    folder = data / "formats" / "trees" / "mmocr_rec_toy"
    told = manifest["formats/trees/mmocr_rec_toy"]["expect"]
    dataset: Any = stoker.open(folder / name, root=folder / "imgs")
    assert len(dataset) == number(told, "images")
    lines = (folder / "old_label.txt").read_text().splitlines()
    found = [f"{n} {dataset.classes[label]}" for n, label in dataset.labels.items()]
    assert found == lines
    same_images(dataset, [folder / "imgs" / line.split()[0] for line in lines])


@pytest.mark.parametrize(
    "name",
    [
        "imagenet1k_sample_labels.txt",
        "imagenet_synset_to_lemma.txt",
        "imagenet_synsets.txt",
        "mini_imagenet_indices.txt",
        "mini_imagenet_synsets.txt",
    ],
)
def test_lists_of_imagenet(
    data: Path, manifest: dict[str, dict[str, str]], tmp_path: Path, name: str
) -> None:
    row = manifest[f"formats/labels/imagenet/{name}"]
    path = data / "formats" / "labels" / "imagenet" / name
    given = path.read_text().splitlines()
    assert len(given) == number(row["expect"] + row["special"], "lines")
    lines = labels.read(str(path), str(tmp_path))
    if "\t" not in given[0] and " " not in given[0]:
        # A list of names or numbers alone labels nothing, and that is said.
        assert (len(lines), lines.bad_count) == (0, len(given))
        with pytest.raises(SourceError, match=r"line 1: needs a name and a label, has"):
            stoker.open(path, root=tmp_path)
        return
    assert (len(lines), lines.bad_count) == (len(given), 0)
    texts = list(lines.texts)
    separator = "\t" if "\t" in given[0] else " "
    for number_of, line in enumerate(given):
        name_of = lines.encoded_name(number_of).decode()
        assert separator.join([name_of, texts[lines.codes[number_of]]]) == line.rstrip(" ")
    with pytest.raises(SourceError, match=r"for want of their files"):
        stoker.open(path, root=tmp_path)


def test_labels_of_imagenet_fit_the_photos(data: Path, tmp_path: Path) -> None:
    path = data / "formats" / "labels" / "imagenet" / "imagenet1k_sample_labels.txt"
    with pytest.warns(StokerWarning, match="700 of 1,000 lines are left out"):
        dataset: Any = stoker.open(path, root=data / "photos", missing="skip")
    shutil.copy(data / "photos-labels.txt", tmp_path / "labels.txt")
    listed: Any = stoker.open(tmp_path / "labels.txt", root=data / "photos")
    assert list(dataset.img_names) == sorted(listed.img_names) and len(listed) == 300
