"""Pascal VOC's annotations and tables of boxes: as torchvision reads them; what is damaged."""

from __future__ import annotations

import csv
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.datasets import VOCDetection, wrap_dataset_for_transforms_v2
from torchvision.transforms import v2

import stoker
from pictures import picture, save
from stoker.collate import list_collate
from stoker.errors import SourceError, StokerWarning
from stoker.sources.boxtable import BoxTable
from stoker.sources.voc import VOC
from tracing import canonical

SIZES = {"2008_000001": (90, 60), "2008_000007": (64, 64), "2007_000032": (41, 83)}


def xml(name: str, size: tuple[int, int], objects: list[tuple[str, int, list[Any]]]) -> str:
    """An annotation as VOC's own are."""
    parts = [
        f"<object><name>{kind}</name><pose>Left</pose><truncated>0</truncated>"
        f"<difficult>{difficult}</difficult><bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin>"
        f"<xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox><part><name>head</name><bndbox>"
        "<xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part></object>"
        for kind, difficult, box in objects
    ]
    return (
        f"<annotation><folder>VOC2012</folder><filename>{name}</filename><source/>"
        f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>\n"
        f"<segmented>1</segmented>{''.join(parts)}</annotation>"
    )


OBJECTS: dict[str, list[tuple[str, int, list[Any]]]] = {
    "2008_000001": [("dog", 0, [3, 4, 50, 60]), ("person", 1, [1, 1, 90, 60])],
    "2008_000007": [("aeroplane", 0, [10, 11, 12, 13])],
    "2007_000032": [("tvmonitor", 0, [3, 5, 40, 80]), ("dog", 0, [7, 7, 9, 9])],
}


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    """A folder as the development kit has them, with two splits."""
    root = tmp_path / "VOCdevkit" / "VOC2012"
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for i, (name, size) in enumerate(SIZES.items()):
        save(root / "JPEGImages" / f"{name}.jpg", picture(*size, seed=i))
        (root / "Annotations" / f"{name}.xml").write_text(xml(f"{name}.jpg", size, OBJECTS[name]))
    main = root / "ImageSets" / "Main"
    (main / "train.txt").write_text("2008_000007\n2007_000032\n")
    (main / "val.txt").write_text("2008_000001\n")
    (main / "dog_train.txt").write_text("2008_000007 -1\n2007_000032  1\n")
    return root


def edit(voc: Path, name: str, change: Callable[[str], str]) -> None:
    path = voc / "Annotations" / f"{name}.xml"
    path.write_text(change(path.read_text()))


@pytest.mark.parametrize("split", ["train", "val"])
def test_samples_are_torchvisions(voc: Path, split: str) -> None:
    mine: Any = stoker.open(voc, split=split)
    assert isinstance(mine, VOC)
    plain = VOCDetection(voc.parents[1], image_set=split)
    other = wrap_dataset_for_transforms_v2(plain, target_keys=["boxes", "labels", "annotation"])
    assert len(mine) == len(other)
    for index in range(len(mine)):
        (image, target), (expected, wanted) = mine[index], other[index]
        assert canonical(image) == canonical(expected)
        for key in ("boxes", "labels"):
            theirs = wanted[key].to(target[key].dtype)
            assert torch.equal(target[key], theirs), key
        assert target["boxes"].dtype == torch.float32
        assert target["boxes"].canvas_size == wanted["boxes"].canvas_size
        objects = wanted["annotation"]["object"]
        assert [bool(int(each["difficult"])) for each in objects] == target["difficult"].tolist()
        assert [mine.classes[label] for label in target["labels"]] == [o["name"] for o in objects]
        assert target["image_id"] == index
    assert len(mine.classes) == 21 and mine.classes[0] == "__background__"


def test_splits(voc: Path) -> None:
    def names(**options: Any) -> list[str]:
        return list(VOC(voc, **options).names)

    assert names() == ["2007_000032.jpg", "2008_000001.jpg", "2008_000007.jpg"]
    assert names(split="train") == ["2008_000007.jpg", "2007_000032.jpg"]
    assert names(split="dog_train") == names(split="train")
    with pytest.raises(SourceError, match=r"Main/test\.txt: there is no such split"):
        VOC(voc, split="test")
    with (voc / "ImageSets" / "Main" / "val.txt").open("a") as file:
        file.write("gone\n")
    with pytest.raises(SourceError, match=r"gone\.xml: No such file"):
        VOC(voc, split="val")


def test_the_handed_set_and_its_table(data: Path) -> None:
    folder = data / "datasets" / "raccoon_voc"
    sets: list[Any] = [
        stoker.open(folder),
        stoker.open(folder / "annotations", root=folder / "images"),
        stoker.open(folder / "annotations"),
        stoker.open(data / "formats" / "csv" / "raccoon_labels.csv", root=folder / "images"),
    ]
    assert [type(each) for each in sets] == [VOC, VOC, VOC, BoxTable]
    tables = []
    for each in sets:
        assert (len(each), len(each.boxes.corners)) == (200, 217)
        assert each.classes == ["__background__", "raccoon"]
        rows = {}
        for row, name in enumerate(each.names):
            with Image.open(folder / "images" / name) as image:
                target = each.target(row, (image.height, image.width))
            rows[name] = sorted(target["boxes"].tolist())
        tables.append(rows)
    assert tables[0] == tables[1] == tables[2] == tables[3]


# Which image


def test_images_by_name_or_by_what_the_file_says(voc: Path) -> None:
    images = voc / "JPEGImages"
    (images / "2008_000001.jpg").rename(images / "Photo One.JPEG")
    edit(voc, "2008_000001", lambda t: t.replace("2008_000001.jpg", r"C:\x\photo one.jpeg"))
    edit(voc, "2008_000007", lambda t: t.replace("2008_000007.jpg", "2007_000032.jpg"))
    (images / "2007_000032.jpg").rename(images / "2007_000032.PNG")
    dataset: Any = stoker.open(voc)
    assert list(dataset.names) == ["2007_000032.PNG", "Photo One.JPEG", "2008_000007.jpg"]


def test_xml_beside_the_images(voc: Path, tmp_path: Path) -> None:
    flat = tmp_path / "train"
    flat.mkdir()
    for path in [*(voc / "Annotations").iterdir(), *(voc / "JPEGImages").iterdir()]:
        shutil.copy(path, flat)
    (flat / "._2008_000001.xml").write_bytes(b"\0\5\26\7Mac OS X")
    dataset: Any = stoker.open(flat)
    assert isinstance(dataset, VOC) and len(dataset) == 3
    assert dataset[1][1]["boxes"].tolist() == [[3, 4, 50, 60], [1, 1, 90, 60]]


def test_folders_below(voc: Path) -> None:
    for name, suffix in (("Annotations", ".xml"), ("JPEGImages", ".jpg")):
        for i, stem in enumerate(SIZES):
            place = voc / name / f"n{i % 2}"
            place.mkdir(exist_ok=True)
            (voc / name / (stem + suffix)).rename(place / (stem + suffix))
    dataset: Any = stoker.open(voc)
    assert list(dataset.names) == [
        "n0/2007_000032.jpg",
        "n0/2008_000001.jpg",
        "n1/2008_000007.jpg",
    ]


def test_missing_images(voc: Path) -> None:
    (voc / "JPEGImages" / "2008_000001.jpg").unlink()
    with pytest.raises(SourceError, match=r"1 of 3 images are not in .*: '2008_000001.jpg'"):
        stoker.open(voc)
    with pytest.warns(StokerWarning, match="1 of 3 images are not in"):
        dataset: Any = stoker.open(voc, missing="skip")
    assert len(dataset) == 2 and len(dataset.boxes.corners) == 3


def test_other_folders_are_class_folders(tmp_path: Path) -> None:
    for i, name in enumerate(("annotations", "b")):
        save(tmp_path / name / "x.jpg", picture(20, 20, seed=i))
    (tmp_path / "b" / "x.xml").write_text("<svg/>")
    assert type(stoker.open(tmp_path)) is stoker.ImageFolder
    # Boxes in a folder of classes do not make it another set.
    (tmp_path / "b" / "x.xml").write_text(xml("x.jpg", (20, 20), []))
    assert type(stoker.open(tmp_path)) is stoker.ImageFolder


# Labels


def test_names_become_labels(voc: Path) -> None:
    edit(voc, "2008_000007", lambda t: t.replace("aeroplane", "blimp"))
    dataset: Any = stoker.open(voc)
    assert dataset.classes == ["__background__", "blimp", "dog", "person", "tvmonitor"]
    assert dataset.boxes.labels.tolist() == [4, 2, 2, 3, 1]
    names = ["person", "dog", "blimp", "tvmonitor"]
    assert VOC(voc, classes=names).boxes.labels.tolist() == [3, 1, 1, 0, 2]
    with pytest.raises(ValueError, match="classes lack 'blimp', 'dog'"):
        VOC(voc, classes=["person", "tvmonitor"])


def test_names_that_are_integers_are_labels(voc: Path) -> None:
    numbers = {"dog": "10", "person": "2", "aeroplane": "0", "tvmonitor": "2"}
    for stem in SIZES:
        for kind, number in numbers.items():
            edit(voc, stem, lambda t, k=kind, n=number: t.replace(k, n))  # type: ignore[misc]
    dataset: Any = stoker.open(voc)
    assert dataset.boxes.labels.tolist() == [2, 10, 10, 2, 0]
    assert dataset.classes[10] == "10" and len(dataset.classes) == 11


# What is wrong


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE annotation [<!ENTITY a "dog"><!ENTITY b "&a;&a;&a;">]>'
    "<annotation><filename>&b;</filename></annotation>"
)
OUTSIDE = (
    '<!DOCTYPE annotation [<!ENTITY x SYSTEM "file:///etc/passwd">]>'
    "<annotation><filename>&x;</filename></annotation>"
)
DAMAGES: dict[str, tuple[Callable[[str], str], str, int]] = {
    "entities": (lambda t: BOMB, "has a document type, which is refused", 2),
    "file entity": (lambda t: OUTSIDE, "has a document type, which is refused", 2),
    "not XML": (lambda t: t[: len(t) // 2], "no element found|unclosed token", 2),
    "empty": (lambda t: "", "no element found", 2),
    "other XML": (lambda t: "<svg></svg>", "is no annotation", 2),
    "deep": (lambda t: "<annotation>" + "<a>" * 100_000, "is nested too deeply", 2),
    "encoding": (lambda t: '<?xml version="1.0" encoding="nonsense"?>' + t, "unknown encoding", 2),
    "no number": (lambda t: t.replace("<xmin>10<", "<xmin>ten<"), "numbers that are none", 3),
    "nan": (lambda t: t.replace("<xmin>10<", "<xmin>nan<"), "numbers that are none", 3),
    "huge": (lambda t: t.replace("<xmax>12<", "<xmax>1e99<"), "numbers that are none, or huge", 3),
    "no corner": (lambda t: t.replace("<ymin>11</ymin>", ""), "numbers that are none", 3),
    "reversed": (lambda t: t.replace("<xmin>10<", "<xmin>13<"), "of a negative size", 3),
    "no name": (lambda t: t.replace("<name>aeroplane</name>", ""), "object 0: has no name", 3),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_told_or_left_out(voc: Path, name: str) -> None:
    change, told, images = DAMAGES[name]
    edit(voc, "2008_000007", change)
    with pytest.raises(SourceError, match=told) as caught:
        stoker.open(voc)
    assert "2008_000007.xml" in str(caught.value) and "damaged='skip'" in str(caught.value)
    with pytest.warns(StokerWarning, match="1 annotations can't be used and are left out"):
        dataset: Any = stoker.open(voc, damaged="skip")
    assert (len(dataset), len(dataset.boxes.corners)) == (images, 4)


def test_odd_boxes_are_kept_and_counted(voc: Path) -> None:
    edit(voc, "2008_000007", lambda t: t.replace("<xmin>10<", "<xmin>12<"))
    edit(voc, "2008_000001", lambda t: t.replace("<xmax>90<", "<xmax>95<"))
    with pytest.warns(StokerWarning, match="of 5 boxes, 1 without an area and 1 not within their"):
        dataset: Any = stoker.open(voc)
    assert dataset[1][1]["boxes"][1].tolist() == [1, 1, 95, 60]


def test_stated_sizes_count_for_nothing_else(voc: Path) -> None:
    for stem in SIZES:
        edit(voc, stem, lambda t: t.replace("<width>", "<width>-").replace("<height>", "<height>x"))
    dataset: Any = stoker.open(voc)
    assert dataset[1][1]["boxes"].canvas_size == (60, 90)


def test_mutations(voc: Path) -> None:
    path = voc / "Annotations" / "2008_000001.xml"
    original = path.read_bytes()
    draw = random.Random(3)
    read = 0
    for _ in range(300):
        mutated = bytearray(original)
        for _ in range(draw.choice([1, 1, 4])):
            mutated[draw.randrange(len(mutated))] = draw.choice(b"<>/&;!0123456789-.aex \x00\xff")
        if draw.random() < 0.2:
            del mutated[draw.randrange(len(mutated)) :]
        path.write_bytes(mutated)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StokerWarning)
            try:
                dataset = VOC(voc, damaged="skip", missing="skip")
            except SourceError:
                continue
        read += 1
        for index in range(len(dataset)):
            target = dataset[index][1]
            assert len(target["boxes"]) == len(target["labels"]) == len(target["difficult"])
            assert bool(torch.isfinite(target["boxes"]).all())
    assert read > 50


# Tables


def table(folder: Path, header: str, *rows: str) -> Path:
    for i, (name, size) in enumerate(SIZES.items()):
        save(folder / f"{name}.jpg", picture(*size, seed=i))
    path = folder / "boxes.csv"
    path.write_text("\n".join([header, *rows]))
    return path


@pytest.mark.parametrize("separator", list(",;\t|"))
def test_tables(tmp_path: Path, separator: str) -> None:
    lines = [
        "filename,width,height,class,xmin,ymin,xmax,ymax",
        "2008_000007.jpg,64,64,dog,1,2,3,4.5",
        "2008_000001.jpg,90,60,cat,5,6,7,8",
        "2008_000007.jpg,64,64,cat,0,0,64,64",
        "2007_000032.jpg,41,83,,,,,",
    ]
    path = table(tmp_path, *(line.replace(",", separator) for line in lines))
    dataset: Any = stoker.open(path)
    assert isinstance(dataset, BoxTable)
    assert list(dataset.names) == [
        f"{n}.jpg" for n in ("2008_000007", "2008_000001", "2007_000032")
    ]
    target = dataset[0][1]
    assert target["boxes"].tolist() == [[1, 2, 3, 4.5], [0, 0, 64, 64]]
    assert target["labels"].tolist() == [2, 1] and target["area"].tolist() == [5, 4096]
    assert dataset[2][1]["boxes"].shape == (0, 4)


def test_integer_labels_of_tables(tmp_path: Path) -> None:
    rows = ["2008_000007,3.0,1,2,3,4", "2008_000007,0,1,2,3,4", "2008_000001,-7,1,2,3,4"]
    dataset: Any = stoker.open(table(tmp_path, "id,label,x1,y1,x2,y2", *rows))
    assert dataset.boxes.labels.tolist() == [3, 0, -7] and dataset.classes == []
    dataset = stoker.open(table(tmp_path, "id,label,x1,y1,x2,y2", *rows[:2]))
    assert dataset.boxes.labels.tolist() == [3, 0] and dataset.classes == ["0", "", "", "3"]


def test_open_images(tmp_path: Path) -> None:
    """Names without an extension, shares of the image, and other columns in between."""
    path = table(
        tmp_path,
        "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsGroupOf",
        "2008_000001,xclick,/m/0cmf2,1,0.1,0.5,0.25,1,0,1",
        "2007_000032,xclick,/m/01g317,1,0,1,0,0.5,0,0",
    )
    dataset: Any = stoker.open(path)
    assert list(dataset.names) == ["2008_000001.jpg", "2007_000032.jpg"]
    assert dataset.classes == ["__background__", "/m/01g317", "/m/0cmf2"]
    target = dataset[0][1]
    assert torch.allclose(target["boxes"], torch.tensor([[9, 15, 45, 60.0]]))
    assert torch.allclose(target["area"], torch.tensor([36 * 45.0]))
    assert target["iscrowd"].tolist() == [1]
    assert dataset[1][1]["boxes"].tolist() == [[0, 0, 41, 41.5]]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("2008_000001.jpg,dog,1,2,3", "line 3: a box .* numbers that are none"),
        ("2008_000001.jpg,dog,1,2,0,5", "line 3: a box .* of a negative size"),
        ("2008_000001.jpg,dog,1,2,3,1e300", "line 3: a box"),
        ("2008_000001.jpg,,1,2,3,4", "line 3: has no class"),
        (",dog,1,2,3,4", "line 3: names no image"),
        ("../2008_000001.jpg,dog,1,2,3,4", "line 3: the name leads out"),
        ("x" * 200_000, "line 3"),
    ],
)
def test_damaged_rows(tmp_path: Path, row: str, told: str) -> None:
    header = "image,label,x1,y1,x2,y2"
    path = table(tmp_path, header, "2008_000001.jpg,dog,1,2,3,4", row)
    with pytest.raises(SourceError, match=told):
        stoker.open(path)
    with pytest.warns(StokerWarning, match="1 annotations can't be used and are left out"):
        assert len(stoker.open(path, damaged="skip").boxes.corners) == 1  # type: ignore[attr-defined]


def test_mutated_tables(tmp_path: Path) -> None:
    rows = [f"{name}.jpg,{i},2.5,3,{i + 40}.25,44" for i, name in enumerate(SIZES)]
    path = table(tmp_path, "image,label,x1,y1,x2,y2", *rows)
    original, draw, read = path.read_bytes(), random.Random(1), 0
    for _ in range(300):
        mutated = bytearray(original)
        for _ in range(draw.choice([1, 1, 4])):
            mutated[draw.randrange(len(mutated))] = draw.choice(b'",;.-0129eni\n\r\0\xff')
        path.write_bytes(mutated)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StokerWarning)
            try:
                dataset = BoxTable(path, damaged="skip", missing="skip")
            except SourceError:
                continue
        read += 1
        for index in range(len(dataset)):
            assert bool(torch.isfinite(dataset[index][1]["boxes"]).all())
    assert read > 50


def test_a_label_file_is_none(tmp_path: Path) -> None:
    path = table(tmp_path, "filename,class,xmin,ymin", "2008_000001.jpg,dog,1,2")
    assert type(stoker.open(path)) is stoker.ImageDataset
    with pytest.raises(SourceError, match="no header of a table of boxes"):
        BoxTable(path)
    path.write_bytes(b"image,label,x1,y1,x2,y2\n\xff\xfe")
    with pytest.raises(SourceError, match="is not UTF-8"):
        BoxTable(path)
    with pytest.raises(SourceError, match="No such file"):
        BoxTable(tmp_path / "gone.csv")


# As a dataset


@pytest.mark.filterwarnings("ignore:num_workers=:stoker.StokerWarning")
def test_batches_under_keyed_seeds(voc: Path) -> None:
    joint = v2.Compose(
        [
            v2.RandomHorizontalFlip(),
            v2.RandomResizedCrop((40, 40)),
            v2.ToImage(),
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
        ]
    )
    dataset = stoker.open(voc, transforms=joint)
    runs = {}
    for tier in ("stock", "auto"):
        options: Any = {"shuffle": True, "seed": 9, "tier": tier, "collate_fn": list_collate}
        loader = stoker.DataLoader(dataset, 2, num_workers=2, **options)
        runs[tier] = [[canonical(batch) for batch in loader] for _ in range(2)]
    assert runs["auto"] == runs["stock"]
    assert loader.explain().tier == "recorded"


def test_a_broken_image_has_its_name(voc: Path) -> None:
    (voc / "JPEGImages" / "2008_000001.jpg").write_bytes(b"\xff\xd8broken")
    dataset = stoker.open(voc, transforms=lambda image, target: (np.asarray(image), target))
    options: Any = {"collate_fn": list_collate}
    with pytest.raises(stoker.DecodeError, match="2008_000001"):
        list(stoker.DataLoader(dataset, 1, **options))
    loader = stoker.DataLoader(dataset, 1, on_error="skip", **options)
    assert [targets[0]["image_id"] for _, targets in loader] == [0, 2, 2]
    assert [bad.index for bad in loader.bad_samples] == [1]


def test_limits_and_exif(voc: Path) -> None:
    path = voc / "JPEGImages" / "2008_000001.jpg"
    with Image.open(path) as image:
        exif = image.getexif()
        exif[0x0112] = 6
        image.save(path, exif=exif.tobytes())
    dataset: Any = stoker.open(voc, exif=True)
    image, target = dataset[1]
    assert image.size == (60, 90) and target["boxes"].canvas_size == (90, 60)
    with pytest.raises(stoker.DecodeError, match="max_pixels"):
        stoker.open(voc, max_pixels=100)[0]


def test_csv_module_limits_are_left_alone() -> None:
    assert csv.field_size_limit() == 131_072


def test_paths_of_every_kind(voc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(voc)
    assert len(stoker.open(".")) == 3
    assert len(stoker.open("Annotations")) == 3
    assert os.path.isfile(stoker.open(voc / "Annotations").files.path(0))
