"""Label files: what real ones look like, what people get wrong, and a million lines."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchvision.datasets.folder import pil_loader

from pictures import picture, save
from stoker.errors import SourceError, StokerWarning
from stoker.sources.filelist import ImageDataset


class Folder:
    """A folder of files that may be empty, as most tests only look names up."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, *names: str) -> None:
        for name in names:
            path = self.root / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def labelled(
        self, content: str | bytes, name: str = "labels.txt", **options: Any
    ) -> ImageDataset:
        file = self.root / name
        data = content if isinstance(content, bytes) else content.encode()
        file.write_bytes(data)
        return ImageDataset(self.root / "images", file, **options)

    def pairs(self, content: str | bytes, name: str = "labels.txt") -> list[tuple[str, int | str]]:
        """Names and labels; texts where the labels are classes."""
        return pairs(self.labelled(content, name))


def pairs(dataset: ImageDataset) -> list[tuple[str, int | str]]:
    integers = all(text == str(label) for text, label in dataset.class_to_idx.items())
    labels: Sequence[int | str] = dataset.targets
    if not integers:
        labels = [dataset.classes[label] for label in dataset.targets]
    return list(zip(dataset.img_names, labels, strict=True))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.add("a.jpg", "b.jpg", "c.jpg", "my photo (1).jpg", "x,y.jpg", 'q"t.jpg', "sub/d e/f.JPG")
    made.add("#1.jpg")
    return made


def reason(folder: Folder, content: str | bytes, name: str = "labels.txt") -> str:
    with pytest.raises(SourceError) as caught:
        folder.labelled(content, name)
    assert caught.value.path == str(folder.root / name)
    return caught.value.reason


# Layouts


@pytest.mark.parametrize(
    "content",
    [
        "my photo (1).jpg 3\nb.jpg 0\n",
        "my photo (1).jpg 3\nb.jpg 0",
        "\ufeffmy photo (1).jpg 3\r\nb.jpg 0\r\n",
        "  my photo (1).jpg \t 3  \r\rb.jpg\t0\r",
        "# name label\n\nmy photo (1).jpg 3\n#nothing.jpg 4\n#\nb.jpg 0\n\n",
        "./my photo (1).jpg 3\nsub/../b.jpg 0\n",
        '"my photo (1).jpg" 3\n"b.jpg" 0\n',
        "my photo (1).jpg\t3\nb.jpg\t0\n",
        "my photo (1).jpg,3\nb.jpg,0\n",
        "filename label\nmy photo (1).jpg 3\nb.jpg 0\n",
        "my photo (1).jpg +3\nb.jpg 0.0\n",
    ],
)
def test_text(folder: Folder, content: str) -> None:
    assert folder.pairs(content) == [("my photo (1).jpg", 3), ("b.jpg", 0)]


@pytest.mark.parametrize("name", ["labels.csv", "labels.tsv", "labels.txt"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize(
    "head", ["", "filename{0}label\n", "Image_ID{0}Class\n", "# made by hand\nfile name{0}target\n"]
)
def test_tables(folder: Folder, name: str, separator: str, head: str) -> None:
    rows = io.StringIO()
    writer = csv.writer(rows, delimiter=separator)
    writer.writerows([["x,y.jpg", "cat"], ['q"t.jpg', "big dog"], ["sub/d e/f.JPG", "cat"]])
    expected = [("x,y.jpg", "cat"), ('q"t.jpg', "big dog"), ("sub/d e/f.JPG", "cat")]
    assert folder.pairs(head.format(separator) + rows.getvalue(), name) == expected


@pytest.mark.parametrize(
    "content",
    [
        "id,width,class,filename\n7,640,cat,a.jpg\n8,480,dog,b.jpg\n",
        "label,path\ncat,a.jpg\ndog,b.jpg\n",
        "kind,image\ncat,a.jpg\ndog,b.jpg\n",
        "path,breed\na.jpg,cat\nb.jpg,dog\n",
        "photograph,breed\na.jpg,cat\nb.jpg,dog\n",
        "a.jpg,cat,1,2\nb.jpg,dog,3,4\n",
        "a.jpg, cat\n b.jpg , dog\n,,\n",
        '"filename","label"\n"a.jpg","cat"\n"b.jpg","dog"\n',
    ],
)
def test_columns_are_found(folder: Folder, content: str) -> None:
    assert folder.pairs(content, "labels.csv") == [("a.jpg", "cat"), ("b.jpg", "dog")]


def test_names_without_extension_are_completed(folder: Folder) -> None:
    folder.add("00a.jpg", "00b.JPG", "sub/00c.png")
    assert folder.pairs("id,breed\n00a,pug\n00b,collie\nsub/00c,pug\n", "l.csv") == [
        ("00a.jpg", "pug"),
        ("00b.JPG", "collie"),
        ("sub/00c.png", "pug"),
    ]
    assert folder.pairs("uid,n\n00a,3\n00b,4\n", "l.csv") == [("00a.jpg", 3), ("00b.JPG", 4)]


def test_a_name_that_begins_as_a_comment_counts_if_it_exists(folder: Folder) -> None:
    assert folder.pairs("#1.jpg 5\n# a.jpg 6\n#b.jpg 7\na.jpg 1\n") == [("#1.jpg", 5), ("a.jpg", 1)]


# Labels


def test_integers_stay(folder: Folder) -> None:
    dataset = folder.labelled("a.jpg 2\nb.jpg 0\n")
    assert dataset.targets == [2, 0]
    assert dict(dataset.labels) == {"a.jpg": 2, "b.jpg": 0}
    assert dataset.classes == ["0", "1", "2"]
    assert folder.labelled("a.jpg -1\nb.jpg 9000000000\n").targets == [-1, 9_000_000_000]
    assert folder.labelled("a.jpg -1\nb.jpg 0\n").classes == []


def test_both_paths_may_begin_at_home(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.labelled("a.jpg 3\n")
    monkeypatch.setenv("HOME", str(folder.root))
    assert ImageDataset("~/images", "~/labels.txt").targets == [3]


def test_texts_are_classes(folder: Folder) -> None:
    dataset = folder.labelled("a.jpg dog\nb.jpg cat\nc.jpg 7\n")
    assert dataset.classes == ["7", "cat", "dog"]
    assert dataset.class_to_idx == {"7": 0, "cat": 1, "dog": 2}
    assert dataset.targets == [2, 1, 0]
    assert dataset.labels["b.jpg"] == 1


def test_last_label_of_a_name_wins(folder: Folder) -> None:
    with pytest.warns(StokerWarning, match="2 names are on several lines") as caught:
        dataset = folder.labelled("b.jpg 1\na.jpg 0\nc.jpg 9\na.jpg 5\nb.jpg 1\na.jpg 6\n")
    assert "'b.jpg' (lines 1, 5), 'a.jpg' (lines 2, 4, 6)" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert list(dataset.labels.items()) == [("b.jpg", 1), ("a.jpg", 6), ("c.jpg", 9)]
    assert list(dataset.img_names) == ["b.jpg", "a.jpg", "c.jpg"]


def test_duplicates_are_found_behind_detours_and_not_in_classes(folder: Folder) -> None:
    with pytest.warns(StokerWarning, match=r"a\.jpg"):
        dataset = folder.labelled("a.jpg dog\n./a.jpg cat\n")
    assert dataset.classes == ["cat"]
    assert dataset.targets == [0]


# What people get wrong


def test_all_bad_lines_are_told_at_once(folder: Folder) -> None:
    told = reason(
        folder,
        "# list\na.jpg 0\nmissing.jpg 1\nb.jpg\nc.jpg x\n\nmy photo (1).jpg\n../z.jpg 3\n"
        '/etc/passwd 3\nb.jpg 1\nc.jpg 2\nx,y.jpg 1\nq"t.jpg 0',
    )
    assert told.splitlines() == [
        f"6 of 11 lines can't be used, 2 of them for want of their files in "
        f"{folder.root / 'images'}/ (missing='skip' leaves those out):",
        "  line 3: no file 'missing.jpg'",
        "  line 4: needs a name and a label, has 'b.jpg'",
        "  line 5: label 'x' is not an integer, as most are",
        "  line 7: no label after 'my photo (1).jpg'",
        "  line 8: the name leads out of the image folder",
        "  line 9: the name leads out of the image folder",
    ]


def test_long_lists_of_bad_lines_are_cut(folder: Folder) -> None:
    told = reason(folder, "a.jpg 0\n" + "".join(f"gone{i}.jpg 1\n" for i in range(5000)))
    lines = told.splitlines()
    assert "5,000 of 5,001 lines" in lines[0]
    assert len(lines) == 5
    assert lines[1] == "  line 2: no file 'gone0.jpg'"
    assert lines[-1] == "  ... and 4,997 more"
    told = reason(folder, "a.jpg 0\nb.jpg 1\n" + "c.jpg\n" * 5000)
    lines = told.splitlines()
    assert len(lines) == 22 and lines[-1].startswith("  ... and 4,98")


def test_other_bad_lines_are_told_beside_many_missing_files(folder: Folder) -> None:
    told = reason(folder, "".join(f"gone{i}.jpg 1\n" for i in range(500)) + "a.jpg x\nb.jpg 2\n")
    assert "line 501: label 'x' is not an integer" in told and len(told.splitlines()) == 6


def test_line_numbers_count_lines_inside_quotes(folder: Folder) -> None:
    told = reason(folder, 'file,label,note\na.jpg,1,"two\nlines"\nb.jpg,2,\nz.jpg,1,\n', "l.csv")
    assert "line 5: no file 'z.jpg'" in told


def test_missing_files_can_be_skipped(folder: Folder) -> None:
    with pytest.warns(StokerWarning, match="4 of 6 lines are left out") as caught:
        dataset = folder.labelled("z.jpg 1\na.jpg 0\ny 2\nx 3\nb.jpg 1\nw 3\n", missing="skip")
    assert "'z.jpg', 'y', 'x', ..." in str(caught[0].message)
    assert pairs(dataset) == [("a.jpg", 0), ("b.jpg", 1)]
    with pytest.raises(SourceError, match="none of its files"):
        folder.labelled("z.jpg 1\n", missing="skip")
    with pytest.raises(ValueError, match="'raise' or 'skip', got 'ignore'"):
        folder.labelled("a.jpg 1\n", missing="ignore")


def test_folders_and_dangling_links_are_no_files(folder: Folder) -> None:
    images = folder.root / "images"
    (images / "dangling.jpg").symlink_to("nowhere.jpg")
    (images / "circle.jpg").symlink_to("circle.jpg")
    (images / "link.jpg").symlink_to("a.jpg")
    told = reason(folder, "sub 1\ndangling.jpg 1\ncircle.jpg 1\nlink.jpg 1\nsub/d e/f.JPG/x 1\n")
    assert "4 of 5 lines" in told
    assert folder.pairs("link.jpg 1\n") == [("link.jpg", 1)]


def test_absolute_names_inside_the_folder_are_taken(folder: Folder) -> None:
    inside = folder.root / "images"
    assert folder.pairs(f"{inside}/a.jpg 1\n{inside}/sub//d e/f.JPG 2\n") == [
        ("a.jpg", 1),
        ("sub/d e/f.JPG", 2),
    ]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds no line with a name and a label"),
        (b"\n# a.jpg 1\n\n", "holds no line"),
        (b"a.jpg 0\nb.jpg 1\ncaf\xe9.jpg 2\n", r"line 3 is not UTF-8 \(byte 0xe9\)"),
        ("a.jpg 0\n".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b'name,label\na.jpg,0\n"b.jpg,1\nc.jpg,2\n', "line 3: needs a name"),
        (b"a\0.jpg 0\n", "line 1: an open quote, or a control character"),
        (b"a.jpg 0\nb.jpg 99999999999999999999\n", "line 2: label '99999999999999999999'"),
    ],
)
def test_broken_files(folder: Folder, content: bytes, told: str) -> None:
    with pytest.raises(SourceError, match=told):
        folder.labelled(content)


def test_absent_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No such file"):
        ImageDataset(tmp_path, tmp_path / "labels.txt")
    (tmp_path / "labels.txt").write_text("a.jpg 1\n")
    with pytest.raises(SourceError, match="No such file"):
        ImageDataset(tmp_path / "images", tmp_path / "labels.txt")
    with pytest.raises(SourceError, match="the folder comes first"):
        ImageDataset(tmp_path / "labels.txt", tmp_path)


# Any names


NAMES = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1, max_size=12
).filter(lambda name: name.strip() == name and len(name.encode()) < 60)


@contextmanager
def _existing(names: list[str], root: Path) -> Iterator[Folder]:
    made = Folder(root)
    made.add(*names)
    yield made
    for name in names:
        os.unlink(root / "images" / name)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(NAMES, st.integers(0, 5)), min_size=1, max_size=6, unique_by=lambda p: p[0]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_any_names_come_back_from_text(
    tmp_path: Path, rows: list[tuple[str, int]], end: str, mark: bool
) -> None:
    rows = [(f"{name}.jpg", label) for name, label in rows]
    text = "\ufeff" * mark + "".join(f"{name} {label}{end}" for name, label in rows)
    with _existing([name for name, _ in rows], tmp_path) as folder:
        assert folder.pairs(text) == rows


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=6, unique_by=lambda p: p[0]),
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
)
def test_any_names_come_back_from_tables(
    tmp_path: Path, rows: list[tuple[str, str]], separator: str, quoting: Any
) -> None:
    rows = [(f"{name}.png", f"class {label}") for name, label in rows]
    # A quoted first cell protects what would be a comment, but csv leaves no trace of quotes.
    assume(not any(name.startswith("#") for name, _ in rows))
    text = io.StringIO()
    csv.writer(text, delimiter=separator, quoting=quoting).writerows([("file", "label"), *rows])
    with _existing([name for name, _ in rows], tmp_path) as folder:
        assert folder.pairs(text.getvalue(), "labels.csv") == rows


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.binary(max_size=200) | st.text(max_size=200).map(str.encode), st.sampled_from(["csv", "txt"])
)
def test_any_bytes_give_a_dataset_or_a_source_error(
    tmp_path: Path, content: bytes, suffix: str
) -> None:
    folder = Folder(tmp_path)
    folder.add("a.jpg")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dataset = folder.labelled(content, f"labels.{suffix}")
        except SourceError:
            return
    assert list(dataset.img_names) == ["a.jpg"]


# Real files


@pytest.mark.parametrize("name", ["list_space.txt", "list_tab.tsv", "labels.csv"])
def test_hard_names(data: Path, name: str) -> None:
    folder = data / "formats" / "labels" / "names"
    expected = json.loads((data / "formats" / "EXPECT_labels_names.json").read_text())
    dataset = ImageDataset(folder / "img", folder / name)
    assert list(dataset.img_names) == [one["file"] for one in expected]
    for i, one in enumerate(expected):
        content = Path(dataset.files.path(i)).read_bytes()
        assert hashlib.sha256(content).hexdigest() == one["sha256"]
        label = dataset.labels[one["file"]]
        assert label == dataset.targets[i]
        assert dataset.classes[label] == one["label"] or label == one["index"]
        image, _ = dataset[i]
        assert np.array_equal(np.asarray(image), np.asarray(pil_loader(dataset.files.path(i))))


def test_messy_list(data: Path) -> None:
    folder = data / "formats" / "labels" / "names"
    with pytest.raises(SourceError) as caught:
        ImageDataset(folder, folder / "list_messy.txt")
    lines = caught.value.reason.splitlines()
    assert lines[0].startswith("3 of 9 lines can't be used, 2 of them")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["line 9", "line 10", "line 11"]


def test_table_of_identifiers(data: Path) -> None:
    folder = data / "formats" / "csv" / "kaggle_dog_breed"
    with pytest.raises(SourceError, match="10,092 of 10,222 lines"):
        ImageDataset(folder / "train", folder / "labels.csv")
    with pytest.warns(StokerWarning, match="10,092 of 10,222 lines are left out"):
        dataset = ImageDataset(folder / "train", folder / "labels.csv", missing="skip")
    assert (len(dataset), len(dataset.classes)) == (130, 78)


def test_table_of_boxes(data: Path) -> None:
    with pytest.warns(StokerWarning, match="several lines"):
        dataset = ImageDataset(
            data / "datasets" / "raccoon_voc" / "images",
            data / "formats" / "csv" / "raccoon_labels.csv",
            missing="skip",
        )
    assert dataset.classes == ["raccoon"]


# JSON


PAIRS = [("a.jpg", "cat"), ("sub/d e/f.JPG", "dog"), ("my photo (1).jpg", "cat"), ("c.jpg", "a, b")]
NESTED = {"metainfo": {"n": 1}, "data_list": [{"img_path": n, "gt_label": v} for n, v in PAIRS]}
INNER = {"data_list": [{"img_path": n, "instances": [{"text": v}]} for n, v in PAIRS]}
JSON_FORMS: dict[str, Any] = {
    "lines": "".join(json.dumps({"file_name": n, "text": v}) + "\n" for n, v in PAIRS),
    "lines, escaped": "".join(json.dumps({"Label": v, "Image": n}) + "\r\n\r\n" for n, v in PAIRS),
    "list": [{"filename": n, "label": v, "extra": [1]} for n, v in PAIRS],
    "list in an object": NESTED,
    "OCR": INNER,
    "mapping": dict(PAIRS),
}


@pytest.mark.parametrize("name", JSON_FORMS)
@pytest.mark.parametrize("indent", [None, 2])
def test_json(folder: Folder, name: str, indent: int | None) -> None:
    form = JSON_FORMS[name]
    text = form if isinstance(form, str) else json.dumps(form, indent=indent)
    dataset = folder.labelled(text, "labels.json")
    assert [(n, dataset.classes[label]) for n, label in dataset.labels.items()] == PAIRS


def test_json_with_integers(folder: Folder) -> None:
    dataset = folder.labelled('{"a.jpg": 3, "b.jpg": 0}', "labels.json")
    assert dict(dataset.labels) == {"a.jpg": 3, "b.jpg": 0}
    assert dict(folder.labelled('{"image": "a", "label": -7}', "l.jsonl").labels) == {"a.jpg": -7}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"image": "a.jpg", "label": 1}\n{"image": "b.jpg"', "line 2: needs a name and a label"),
        ('{"image": "a.jpg", "label": [1]}', "line 1: needs a name and a label, has 'a.jpg'"),
        ('{"image": "a.jpg", "label": true}', "line 1: needs a name and a label"),
        ('{"image": "a.jpg", "label": 1e400}', "line 1: needs a name and a label"),
        ('[{"image": "\\ud800", "label": 1}]', "line 1: a name that is no text"),
        ('[{"image": "a\\u0000b", "label": 1}]', "a control character"),
        ('[{"image": "../a.jpg", "label": 1}]', "leads out of the image folder"),
        ("[1, null, {}]", "line 3: needs a name and a label"),
        ("[]", "holds no line"),
        ("[" * 100_000, "is no JSON"),
        ('{"image": "a.jpg",\n', "is no JSON"),
    ],
)
def test_bad_json(folder: Folder, text: str, told: str) -> None:
    assert told in reason(folder, text, "labels.json")


def test_a_text_may_begin_as_json(folder: Folder) -> None:
    (folder.root / "images" / "[1].jpg").touch()
    assert dict(folder.labelled("[1].jpg 4\na.jpg 5\n").labels) == {"[1].jpg": 4, "a.jpg": 5}


def test_mutated_label_files(folder: Folder) -> None:
    draw, read = random.Random(5), 0
    for form in JSON_FORMS.values():
        original = form.encode() if isinstance(form, str) else json.dumps(form).encode()
        for _ in range(60):
            mutated = bytearray(original)
            for _ in range(draw.choice([1, 1, 4])):
                mutated[draw.randrange(len(mutated))] = draw.choice(b'{}[]",:\\u0 .aj\n\0\xff')
            (folder.root / "x.json").write_bytes(mutated)
            with warnings.catch_warnings(), suppress(SourceError):
                warnings.simplefilter("ignore", StokerWarning)
                ImageDataset(folder.root / "images", folder.root / "x.json", missing="skip")
                read += 1
    assert read > 20


# As a dataset


def test_is_a_map_style_dataset(tmp_path: Path) -> None:
    for name in ("a b.png", "c.png"):
        save(tmp_path / "images" / name, picture(20, 10))
    file = tmp_path / "labels.txt"
    file.write_text("a b.png 4\nc.png 2\n")
    options: dict[str, Any] = {"exif": True, "max_pixels": 1000, "max_bytes": 10_000}
    dataset = ImageDataset(str(tmp_path / "images"), str(file), np.asarray, str, **options)
    assert dataset.img_dir == str(tmp_path / "images")
    assert (dataset.transform, dataset.target_transform) == (np.asarray, str)
    image, label = dataset[0]
    assert np.array_equal(image, np.asarray(pil_loader(str(tmp_path / "images" / "a b.png"))))
    assert label == "4"
    files = dataset.files
    assert (files.upright, files.max_pixels, files.max_bytes) == (True, 1000, 10_000)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.labels["c.png"] == 2
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=2, collate_fn=list)
    assert [label for _, label in next(iter(loader))] == ["4", "2"]


MILLION = """
import sys, time, torch.utils.data
from stoker.sources import filelist
def peak():
    with open("/proc/self/status") as file:
        return int(file.read().split("VmHWM:")[1].split()[0]) / 1024
before, start = peak(), time.process_time()
dataset = filelist.ImageDataset(*sys.argv[1:])
assert len(dataset) == 1_000_000, len(dataset)
assert dataset.files.path(999_999).endswith("ILSVRC2012_train_00999999 photo.JPEG")
print(peak() - before, time.process_time() - start)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
@pytest.mark.parametrize("suffix", ["txt", "csv"])
def test_a_million_lines(tmp_path: Path, suffix: str) -> None:
    """Built in under 10 s and 150 MB above the imports; the folder's listing is simulated."""
    names = (f"ILSVRC2012_train_{i:08} photo.JPEG" for i in range(1_000_000))
    separator = " " if suffix == "txt" else ","
    with (tmp_path / f"labels.{suffix}").open("w", encoding="utf-8") as file:
        file.writelines(f"{name}{separator}{i % 1000}\n" for i, name in enumerate(names))
    fake = (
        "from stoker.sources import filelist\n"
        "filelist._entries = lambda root, folder: "
        "(b'ILSVRC2012_train_%08d photo.JPEG' % i for i in range(1_000_000))\n"
    )
    command = [sys.executable, "-c", fake + MILLION, str(tmp_path), f"{tmp_path}/labels.{suffix}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    megabytes, seconds = map(float, done.stdout.split())
    assert megabytes < 150
    assert seconds < 10
