"""COCO's annotations: as pycocotools and torchvision read them; what is damaged; masks."""

from __future__ import annotations

import copy
import json
import pickle
import random
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as their_mask
from torchvision import tv_tensors
from torchvision.datasets import CocoDetection, wrap_dataset_for_transforms_v2
from torchvision.transforms import v2

import stoker
from pictures import picture, save
from stoker.collate import list_collate, pad_collate
from stoker.errors import DecodeError, SourceError, StokerWarning
from stoker.sources.coco import COCO
from stoker.sources.coco import _mask as mask_of
from tracing import canonical

# pycocotools, which torchvision decodes masks with, has not heard of NumPy 2's arrays.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

KEYS = ["image_id", "boxes", "labels", "area", "iscrowd", "masks"]
SIZES = [(90, 60), (64, 64), (41, 83), (120, 70), (55, 44)]


def content(seed: int = 0) -> dict[str, Any]:
    """Annotations of five images, one of them without boxes; ids have gaps."""
    draw = random.Random(seed)
    images: list[dict[str, Any]] = [
        {"id": 30 - 7 * i, "file_name": f"p{i}.jpg", "width": w, "height": h}
        for i, (w, h) in enumerate(SIZES)
    ]
    annotations = []
    for number in range(14):
        image = images[draw.randrange(4)]
        w, h = image["width"], image["height"]
        x, y = round(draw.uniform(0, w - 9), 2), round(draw.uniform(0, h - 9), 2)
        box = [x, y, round(draw.uniform(3, 9), 2), round(draw.uniform(3, 9), 2)]
        crowd = number % 3 == 0
        dense = (np.random.default_rng(number).random((h, w)) < 0.4).astype(np.uint8)
        segments: list[Any] = [
            [[x, y, x + 8.5, y, x + 8.5, y + 7.25, x, y + 3], [1, 1, 9, 2, 4, 8.5]],
            {"size": [h, w], "counts": runs(dense)},
            their_mask.encode(np.asfortranarray(dense)),
        ]
        segment = segments[1 + number % 2] if crowd else segments[0]
        if isinstance(segment, dict) and isinstance(segment["counts"], bytes):
            segment["counts"] = segment["counts"].decode()
        annotations.append(
            {
                "id": number,
                "image_id": image["id"],
                "category_id": draw.choice([1, 3, 90]),
                "bbox": box,
                "area": round(box[2] * box[3] / 2, 3),
                "iscrowd": int(crowd),
                "segmentation": segment,
            }
        )
    names = {1: "person", 3: "car", 90: "tooth brush"}
    categories = [{"id": number, "name": name} for number, name in names.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def runs(mask: np.ndarray) -> list[int]:
    """Lengths of runs, without and with the thing in turn, down the columns."""
    flat = mask.T.ravel().tolist()
    lengths = [len(list(run)) for _, run in groupby(flat)]
    return [0, *lengths] if flat[0] else lengths


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for i, size in enumerate(SIZES):
        save(folder / f"p{i}.jpg", picture(*size, seed=i))
    return folder


def written(folder: Path, value: Any) -> Path:
    path = folder / "instances.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def theirs(images: Path, path: Path, *keys: str) -> Any:
    dataset = CocoDetection(images, str(path))
    return wrap_dataset_for_transforms_v2(dataset, target_keys=keys)


@pytest.mark.parametrize("seed", range(3))
def test_samples_are_torchvisions(images: Path, tmp_path: Path, seed: int) -> None:
    path = written(tmp_path, content(seed))
    mine, other = stoker.open(path, root=images, masks=True), theirs(images, path, *KEYS)
    assert isinstance(mine, COCO) and len(mine) == len(other) == 5
    assert mine.ids.tolist() == [2, 9, 16, 23, 30]
    boxes = 0
    for index in range(5):
        (image, target), (expected, wanted) = mine[index], other[index]
        assert canonical(image) == canonical(expected)
        assert list(target) == KEYS[:3] + KEYS[3:]
        if "boxes" not in wanted:  # torchvision gives an image without boxes nothing else
            assert target["boxes"].shape == (0, 4) and len(target["labels"]) == 0
            assert target["masks"].shape == (0, image.height, image.width)
            assert target["image_id"] == wanted["image_id"]
            continue
        assert target["image_id"] == wanted["image_id"]
        assert type(target["boxes"]) is tv_tensors.BoundingBoxes
        assert target["boxes"].canvas_size == wanted["boxes"].canvas_size
        assert target["boxes"].format == wanted["boxes"].format
        assert target["boxes"].dtype == torch.float32
        for key in ("boxes", "masks", "labels"):
            assert canonical(target[key]) == canonical(wanted[key]), key
        assert target["area"].tolist() == torch.tensor(wanted["area"]).tolist()
        assert target["iscrowd"].tolist() == wanted["iscrowd"]
        boxes += len(target["boxes"])
    assert boxes == 14
    assert mine.classes[1] == "person" and mine.classes[2] == "" and len(mine.classes) == 91
    assert mine.class_to_idx == {"person": 1, "car": 3, "tooth brush": 90}


def test_the_handed_file(data: Path) -> None:
    folder = data / "formats" / "coco" / "rabbit_cut" / "train"
    path = folder / "_annotations.coco.json"
    with pytest.raises(SourceError, match=r"3 of 17 images are not in .*missing='skip'"):
        stoker.open(path)
    with pytest.warns(StokerWarning, match="3 of 17 images are not in") as caught:
        dataset = stoker.open(path, missing="skip")
    assert len(caught) == 1
    assert isinstance(dataset, COCO) and len(dataset) == 14
    assert dataset.classes == ["z", "rabbit"] and set(dataset.boxes.labels.tolist()) == {1}
    given = json.loads(path.read_text())
    wrapped = theirs(folder, path, "image_id", "boxes", "labels")
    places = {image["id"]: i for i, image in enumerate(sorted(given["images"], key=_id))}
    for index in range(14):
        image, target = dataset[index]
        expected, wanted = wrapped[places[target["image_id"]]]
        assert canonical(image) == canonical(expected)
        assert torch.equal(target["boxes"], wanted["boxes"].float())
        assert torch.equal(target["labels"], wanted["labels"])


def _id(image: dict[str, Any]) -> int:
    number: int = image["id"]
    return number


def test_captions_are_no_boxes(data: Path) -> None:
    path = data / "formats" / "trees" / "mmagic_coco" / "annotations" / "captions_train2014.json"
    with pytest.raises(SourceError, match="has annotations, but no images"):
        stoker.open(path)


# Transforms


def joint() -> Any:
    return v2.Compose(
        [
            v2.RandomHorizontalFlip(),
            v2.RandomIoUCrop(),
            v2.Resize((48, 56)),
            v2.SanitizeBoundingBoxes(
                labels_getter=lambda both: [both[1][key] for key in ("labels", "area", "iscrowd")]
            ),
            v2.ToImage(),
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
        ]
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [list_collate, partial(pad_collate, multiple=32)])
@pytest.mark.filterwarnings("ignore:num_workers=:stoker.StokerWarning")
def test_joint_transforms_are_recorded(
    images: Path, tmp_path: Path, collate: Callable[..., Any], workers: int
) -> None:
    path = written(tmp_path, content())
    dataset = stoker.open(path, root=images, transforms=joint())

    def epochs(tier: Any) -> Any:
        loader = stoker.DataLoader(
            dataset, 2, shuffle=True, num_workers=workers, collate_fn=collate, seed=4, tier=tier
        )
        return [[canonical(batch) for batch in loader] for _ in range(2)], loader

    expected, _ = epochs("stock")
    found, loader = epochs("auto")
    assert found == expected
    tier = loader.explain().tier
    assert tier == ("recorded" if collate is list_collate else "materialised")
    assert loader._trace.counts.opened >= 10 and not loader._trace.counts.replayed


def test_which_transforms_are_called(images: Path, tmp_path: Path) -> None:
    path = written(tmp_path, content())
    image, target = stoker.open(path, np.asarray, len, root=images)[0]
    assert isinstance(image, np.ndarray) and target == 5  # its fields
    both: Any = stoker.open(path, root=images, transforms=lambda image, target: (target, image))[0]
    assert both[0]["image_id"] == 2
    with pytest.raises(ValueError, match="not both"):
        stoker.open(path, np.asarray, root=images, transforms=joint())
    with pytest.raises(ValueError, match=r"transforms=.* says nothing to a folder of classes"):
        stoker.open(tmp_path, transforms=len)  # type: ignore[arg-type]


def test_is_not_lowered_nor_packed(images: Path, tmp_path: Path) -> None:
    dataset: Any = stoker.open(written(tmp_path, content()), root=images)
    assert not hasattr(dataset, "targets")
    loader = stoker.DataLoader(dataset, 2)
    assert "COCO: has targets that are no labels" in str(loader.explain()).replace("  ", " ")
    from stoker.pack import pack

    with pytest.raises(ValueError, match="have boxes"):
        pack(dataset, tmp_path / "x.tar")
    clone = pickle.loads(pickle.dumps(dataset))
    assert canonical(clone[3][1]) == canonical(dataset[3][1])


def test_without_torchvision_boxes_are_plain(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = stoker.open(written(tmp_path, content()), root=images, masks=True)
    expected = dataset[1][1]
    monkeypatch.setitem(sys.modules, "torchvision", None)
    target = dataset[1][1]
    for key in ("boxes", "masks"):
        assert type(target[key]) is torch.Tensor
        assert torch.equal(target[key], expected[key].as_subclass(torch.Tensor))


# Labels


def test_classes_make_labels(images: Path, tmp_path: Path) -> None:
    path = written(tmp_path, content())
    plain: Any = stoker.open(path, root=images)
    names = ["tooth brush", "car", "bus", "person"]
    dataset: Any = stoker.open(path, root=images, classes=names)
    assert dataset.classes == names
    assert [names[i] for i in dataset.boxes.labels] == [
        plain.classes[i] for i in plain.boxes.labels
    ]
    with pytest.raises(ValueError, match="classes lack 'car'"):
        stoker.open(path, root=images, classes=["tooth brush", "person"])


def test_without_categories_labels_are_ids(images: Path, tmp_path: Path) -> None:
    value = content()
    del value["categories"]
    value["annotations"][0]["category_id"] = -5
    dataset: Any = stoker.open(written(tmp_path, value), root=images)
    assert dataset.classes == [] and -5 in dataset.boxes.labels


def test_huge_ids(images: Path, tmp_path: Path) -> None:
    value = content()
    value["images"][0]["id"] = 2**63 - 1
    value["annotations"] = [{"image_id": 2**63 - 1, "category_id": 2**62, "bbox": [0, 0, 1, 1]}]
    value["categories"] = [{"id": 2**62, "name": "x"}]
    dataset: Any = stoker.open(written(tmp_path, value), root=images)
    assert dataset.classes == [] and dataset[4][1]["labels"].tolist() == [2**62]
    assert dataset[4][1]["image_id"] == 2**63 - 1
    assert (dataset[4][1]["area"].tolist(), dataset[4][1]["iscrowd"].tolist()) == ([1], [0])


# What is wrong


def test_odd_boxes_are_kept_and_counted(images: Path, tmp_path: Path) -> None:
    value = content()
    value["annotations"][0]["bbox"] = [3, 4, 0, 5]
    value["annotations"][1]["bbox"] = [3, 4, 500, 5]
    value["annotations"][2]["bbox"] = [-3, 4, 4, 5]
    with pytest.warns(
        StokerWarning, match="of 14 boxes, 1 without an area and 2 not within their images"
    ):
        dataset: Any = stoker.open(written(tmp_path, value), root=images)
    assert len(dataset.boxes.corners) == 14


def _damages() -> dict[str, tuple[Callable[[Any], object], str]]:
    def note(**changes: Any) -> Callable[[Any], object]:
        return lambda v: v["annotations"][3].update(changes)

    def image(**changes: Any) -> Callable[[Any], object]:
        return lambda v: v["images"][4].update(changes)

    return {
        "no image": (note(image_id=5), "annotation 3: its image_id 5 is that of no image"),
        "image of another kind": (note(image_id=[2]), "its image_id"),
        "no category": (note(category_id=2), "its category_id 2 is that of no category"),
        "category is true": (note(category_id=True), "its category_id True"),
        "three numbers": (note(bbox=[1, 2, 3]), "not four numbers"),
        "a text": (note(bbox=[1, 2, 3, "4"]), "not four numbers"),
        "no box": (lambda v: v["annotations"][3].pop("bbox"), "its bbox None"),
        "negative": (note(bbox=[1, 2, -3, 4]), "of a negative size"),
        "nan": (note(bbox=[1, 2, float("nan"), 4]), "not four numbers"),
        "infinite": (note(bbox=[1, 2, float("inf"), 4]), "not four numbers"),
        "huge": (note(bbox=[10**300, 2, 3, 4]), "not four numbers"),
        "area": (note(area=-1), "its area -1 is none"),
        "area of nothing": (note(area=float("nan")), "its area nan is none"),
        "crowd": (note(iscrowd=2), "its iscrowd 2"),
        "not an object": (lambda v: v["annotations"].append([]), "annotation 14: is no object"),
        "id of an image": (image(id="7"), "image 4: its id '7' is no integer"),
        "id beyond": (image(id=2**63), "is no integer"),
        "same id": (image(id=30), "its id 30 is that of another"),
        "no name": (image(file_name=""), "its file_name '' is no name"),
        "name of a number": (image(file_name=5), "its file_name 5 is no name"),
        "leads out": (image(file_name="../x.jpg"), "leads out of the image folder"),
        "absolute": (image(file_name="/etc/passwd"), "leads out of the image folder"),
        "zero byte": (image(file_name="a\0b"), "a control character"),
        "half a character": (image(file_name="\ud800"), "a name that is no text"),
        "category": (lambda v: v["categories"].append({"id": 5}), "category 3: its id is 5"),
    }


@pytest.mark.parametrize("name", _damages())
def test_what_is_damaged_is_told_or_left_out(images: Path, tmp_path: Path, name: str) -> None:
    edit, told = _damages()[name]
    value = content()
    edit(value)
    path = written(tmp_path, value)
    with pytest.raises(SourceError) as caught:
        stoker.open(path, root=images)
    assert told in caught.value.reason and "1 annotations can't be used" in caught.value.reason
    with pytest.warns(StokerWarning, match="left out"):
        dataset: Any = stoker.open(path, root=images, damaged="skip")
    # Nothing else is lost: the image without boxes, or the box.
    lost = (len(dataset), len(dataset.boxes.corners))
    assert lost in ((4, 14), (5, 13), (5, 14))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"images": [', "is no JSON"),
        ('{"images": 5}', "has no list of images"),
        ('{"images": [], "categories": {}}', "has no list of categories"),
        ('{"images": [], "annotations": []}', "names no image"),
        ('{"images": [' + "[" * 100_000, "is no JSON"),
        ('{"images": [1' + "0" * 5000 + "]}", "is no JSON"),
    ],
)
def test_other_content(tmp_path: Path, text: str, told: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SourceError, match=told):
        COCO(path)


def test_mutations(images: Path, tmp_path: Path) -> None:
    """Flipped bytes and cuts: the errors of this package, or a dataset whose samples are whole."""
    original = json.dumps(content()).encode()
    draw = random.Random(7)
    read = 0
    for _ in range(400):
        mutated = bytearray(original)
        for _ in range(draw.choice([1, 1, 3])):
            mutated[draw.randrange(len(mutated))] = draw.choice(b'0123456789-."[]{},:eN \x00\xff')
        if draw.random() < 0.2:
            del mutated[draw.randrange(len(mutated)) :]
        (tmp_path / "x.json").write_bytes(mutated)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StokerWarning)
            try:
                dataset = COCO(
                    tmp_path / "x.json", root=images, masks=True, damaged="skip", missing="skip"
                )
            except SourceError:
                continue
        read += 1
        for index in range(len(dataset)):
            try:
                target = dataset[index][1]
            except DecodeError:
                continue
            n = len(target["boxes"])
            assert all(len(target[key]) == n for key in ("labels", "area", "iscrowd", "masks"))
            assert bool(torch.isfinite(target["boxes"]).all())
    assert read > 50


def test_values_of_every_kind(images: Path, tmp_path: Path) -> None:
    """Every value in the file is replaced by those of other kinds, one after the other."""
    whole = content()
    others: list[Any] = [None, True, -1, 0.5, 1e308, "x", [], {}, [[]], float("nan"), 2**70]
    for key in whole:
        for field in whole[key][0]:
            for other in others:
                value = copy.deepcopy(whole)
                value[key][0][field] = other
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", StokerWarning)
                    try:
                        dataset = COCO(written(tmp_path, value), root=images, masks=True)
                        for index in range(len(dataset)):
                            dataset[index]
                    except (SourceError, DecodeError):
                        continue


# Masks


def test_masks_that_cannot_be(images: Path, tmp_path: Path) -> None:
    h, w = 60, 90
    bad: list[tuple[Any, str]] = [
        ("x", "neither polygons nor runs"),
        ({"size": [h, w + 1], "counts": [h * w + h]}, "is of size"),
        ({"size": [h, w], "counts": [h * w - 1]}, "its runs are of 5,399 pixels"),
        ({"size": [h, w], "counts": [-1, h * w + 1]}, "no lengths"),
        ({"size": [h, w], "counts": [True, h * w - 1]}, "no lengths"),
        ({"size": [h, w], "counts": 2.5}, "no lengths"),
        ({"size": [h, w], "counts": "~~~"}, "runs are damaged"),
        ({"size": [h, w], "counts": "o" * 100}, "runs are damaged"),
        ({"size": [h, w], "counts": "P"}, "runs are cut off"),
        ([[1, 2, 3, 4]], "three or more points"),
        ([1, 2, 3, 4, 5, 6], "three or more points"),
        ([[1, 2, 3, 4, 5, "6"]], "a point that is none"),
        ([[1, 2, 3, 4, 5, 1e8]], "far out of its image"),
        ([[0, 0, 100, 100] * 200_000], "endless"),
    ]
    for segment, told in bad:
        with pytest.raises(ValueError, match=told):
            mask_of(segment, (h, w))
    value = content()
    image = value["annotations"][2]["image_id"]
    value["annotations"][2]["segmentation"] = "x"
    dataset: Any = stoker.open(written(tmp_path, value), root=images, masks=True)
    index = dataset.ids.tolist().index(image)
    with pytest.raises(DecodeError, match=r"segmentation .*neither polygons nor runs"):
        dataset[index]
    empty: list[Any] = [[], None, {}]
    for none in empty:
        value["annotations"][2]["segmentation"] = none
        with pytest.raises(SourceError, match="annotation 2: has no segmentation"):
            stoker.open(written(tmp_path, value), root=images, masks=True)


def test_polygons_without_pycocotools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(ImportError, match=r"pip install 'stoker\[coco\]'"):
        mask_of([[1, 2, 3, 4, 5, 6]], (10, 10))
    assert mask_of({"size": [2, 3], "counts": [2, 3, 1]}, (2, 3)).tolist() == [[0, 1, 1], [0, 1, 0]]


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_runs_are_pycocotools(height: int, width: int, share: float, seed: int) -> None:
    dense = (np.random.default_rng(seed).random((height, width)) < share).astype(np.uint8)
    encoded = their_mask.encode(np.asfortranarray(dense))
    text = {"size": [height, width], "counts": encoded["counts"].decode()}
    assert np.array_equal(mask_of(text, (height, width)), dense)
    numbers = {"size": [height, width], "counts": runs(dense)}
    assert np.array_equal(mask_of(numbers, (height, width)), dense)
