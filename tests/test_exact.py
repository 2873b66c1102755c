"""Whole loaders, bit for bit: every recipe, SIMD level, thread count; and attempts to break them.

The recipes and the plain loop that is the truth are those of benchmarks/exactness.py.
"""

from __future__ import annotations

import io
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageChops, ImageFile, ImageOps, JpegImagePlugin
from torch.utils.data import Subset
from torchvision import transforms as T
from torchvision.transforms import v2

import stoker
from pictures import class_folder, picture, save
from stoker import order as order_module

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from exactness import (
    LEVELS,
    MAIN,
    Reference,
    at_level,
    compare,
    compare_with_torch,
    configurations,
    examine,
    key,
    recipes,
    same_bits,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:num_workers"),
    pytest.mark.filterwarnings("ignore:The transform `ToTensor:UserWarning"),
]

RECIPES = recipes()
TRAIN, VAL = RECIPES["v1 train"], RECIPES["v1 val"]
SEED = 99


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen pictures of all kinds and, where they are, some of the test photos."""
    root = class_folder(tmp_path_factory.mktemp("exact"), 9)
    photos = Path(__file__).resolve().parents[2] / "shared" / "data" / "photos"
    for photo in sorted(photos.glob("*.JPEG"))[::75]:
        shutil.copy(photo, root / "class_1")
    return root


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folder(tmp_path_factory.mktemp("small"), 8)


def assert_exact(loader: Any, dataset: Any, epoch: int = 0, lowered: bool = True) -> None:
    """Serves an epoch of an unshuffled loader and compares it with the plain loop."""
    assert (loader.explain().tier == "lowered") == lowered, loader.explain()
    loader.set_epoch(epoch)
    truth, place = Reference(dataset, SEED).epoch(epoch), 0
    for images, labels in loader:
        for image, label in zip(images, labels.tolist(), strict=True):
            assert same_bits(image, truth[place][0]), f"sample {place} of epoch {epoch}"
            assert label == truth[place][1]
            place += 1
    assert place == len(truth)


# Every recipe, level, thread count


def test_the_key_is_the_orders() -> None:
    for seed, epoch, index, draw in ((0, 0, 0, 0), (2**63 + 5, 7, 2**33 + 1, 2**32 - 1)):
        theirs = order_module.keys(seed, epoch, np.array([index]), draw)
        assert key(seed, epoch, index, draw) == int(theirs[0])


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(folder: Path, name: str) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, RECIPES[name])
    configs = configurations(LEVELS, [0, 1, 2, 8])
    main = name.split()[-1] in MAIN
    if not main:  # each level, and among them each way of sharing out
        configs = [(level, {"num_workers": i, "batch_size": 5}) for i, level in enumerate(LEVELS)]
    for level, count in examine(dataset, name, configs, 2, False).items():
        assert count.good, f"{level}: {count}"


def test_five_epochs_by_one_loader(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder, RECIPES["v2 train"])
    count = compare(
        Reference(dataset, SEED),
        list(range(5)),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
    )
    assert count.good and count.compared == 5 * len(dataset)


def test_the_comparison_notices(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = torchvision.datasets.ImageFolder(small, TRAIN)
    configs = configurations(LEVELS[-1:], [2])
    monkeypatch.setattr("exactness.key", lambda *counter: key(*counter) ^ (counter[2] == 3))
    (count,) = examine(dataset, "v1 train", configs, 2, True).values()
    assert (count.compared, count.identical) == (2 * len(dataset), 2 * len(dataset) - 2)
    assert not count.good


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", MAIN)
def test_torchs_randomness(small: Path, name: str, workers: int) -> None:
    dataset = torchvision.datasets.ImageFolder(small, RECIPES[f"v2 {name}"])
    assert compare_with_torch(dataset, workers, 2).good


# Images at the edge


def _bytes_of(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()


def _rotated(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return _bytes_of(picture(61, 40), format="JPEG", exif=exif)


def _gray16() -> Image.Image:
    return Image.fromarray(np.arange(70 * 50, dtype=np.uint16).reshape(50, 70) * 18)


def _palette() -> Image.Image:
    return picture(70, 50).quantize(64)


ODD: dict[str, Callable[[], bytes]] = {
    **{
        f"{w}x{h}": lambda w=w, h=h: _bytes_of(picture(w, h), format="JPEG", quality=90)  # type: ignore[misc] # a loop's values
        for w, h in ((1, 1), (1, 2), (2, 1), (3, 3), (7, 8), (9, 17), (1, 60), (70, 1), (5, 300))
    },
    **{
        f"1x1 subsampled {s}": lambda s=s: _bytes_of(picture(1, 1), format="JPEG", subsampling=s)  # type: ignore[misc] # a loop's values
        for s in (0, 1)
    },
    "gray": lambda: _bytes_of(picture(70, 50).convert("L"), format="JPEG"),
    "gray 1x40": lambda: _bytes_of(picture(1, 40).convert("L"), format="JPEG"),
    "cmyk": lambda: _bytes_of(picture(70, 50).convert("CMYK"), format="JPEG"),
    "progressive": lambda: _bytes_of(picture(70, 50), format="JPEG", progressive=True),
    "restarts": lambda: _bytes_of(picture(70, 50), format="JPEG", restart_marker_blocks=3),
    "quality 1": lambda: _bytes_of(picture(70, 50), format="JPEG", quality=1),
    "quality 100": lambda: _bytes_of(picture(70, 50), format="JPEG", quality=100),
    "rotated": lambda: _rotated(6),
    "mpo": lambda: _bytes_of(
        picture(70, 50), format="MPO", save_all=True, append_images=[picture(70, 50, 1)]
    ),
    "png 16 bits": lambda: _bytes_of(_gray16(), format="PNG"),
    "png palette": lambda: _bytes_of(_palette(), format="PNG"),
    "png transparent palette": lambda: _bytes_of(
        _palette(), format="PNG", transparency=bytes(range(0, 256, 4))
    ),
    "png 1 bit": lambda: _bytes_of(picture(70, 50).convert("1"), format="PNG"),
    "png gray and alpha": lambda: _bytes_of(picture(70, 50).convert("LA"), format="PNG"),
    "png alpha": lambda: _bytes_of(picture(70, 50).convert("RGBA"), format="PNG"),
    "webp": lambda: _bytes_of(picture(70, 50), format="WEBP", lossless=True),
    "gif": lambda: _bytes_of(_palette(), format="GIF"),
    "tiff": lambda: _bytes_of(picture(70, 50), format="TIFF"),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("odd")
    for place, make in enumerate(ODD.values()):
        path = root / "class" / f"{place:03}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(make())
    return root


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("v1")])
def test_odd_images(odd: Path, name: str) -> None:
    # One by one, so that images and results that torchvision refuses fail on their own.
    dataset = torchvision.datasets.ImageFolder(odd, RECIPES[name])
    loader = stoker.DataLoader(dataset, 1, num_workers=0, seed=SEED)
    batches = iter(loader)
    for index, kind in enumerate(ODD):
        expected: Any
        try:
            expected = Reference(dataset, SEED)._sample(0, index)[0]
        except Exception as error:  # noqa: BLE001  whatever torchvision says
            expected = error
        if isinstance(expected, Exception):
            with pytest.raises(stoker.DecodeError, match=type(expected).__name__):
                next(batches)
        else:
            assert same_bits(next(batches)[0][0], expected), kind
    assert next(batches, None) is None


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["v1 Resize LANCZOS", "v2 train", "v1 Resize NEAREST", "v2 seed"])
def test_odd_images_in_batches(odd: Path, name: str, level: str) -> None:
    dataset = torchvision.datasets.ImageFolder(odd, RECIPES[name])
    with at_level(level):
        loader = stoker.DataLoader(dataset, 5, num_workers=2, seed=SEED)
        assert_exact(loader, dataset)
        loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_upright_images(tmp_path: Path, workers: int) -> None:
    for orientation in range(10):
        path = tmp_path / "class" / f"{orientation}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(_rotated(orientation))
    (tmp_path / "class" / "none.jpg").write_bytes(_bytes_of(picture(61, 40), format="JPEG"))
    dataset = stoker.ImageFolder(tmp_path, T.PILToTensor(), exif=True)
    loader = stoker.DataLoader(dataset, 1, num_workers=workers, seed=SEED)
    assert_exact(loader, dataset)
    for (images, _), (name, _) in zip(loader, dataset.samples, strict=True):
        upright = ImageOps.exif_transpose(Image.open(name)).convert("RGB")
        assert torch.equal(images[0], T.functional.pil_to_tensor(upright))
    for transform in (TRAIN, VAL):
        dataset.transform = transform
        assert_exact(stoker.DataLoader(dataset, 4, num_workers=workers, seed=SEED), dataset)


@pytest.mark.parametrize("extension", ["jpg", "png"])
def test_pixel_limit(tmp_path: Path, extension: str) -> None:
    save(tmp_path / "class" / f"a.{extension}", picture(80, 50))
    for limit in (4000, 3999):
        dataset = stoker.ImageFolder(tmp_path, T.PILToTensor(), max_pixels=limit)
        loader = stoker.DataLoader(dataset, 1, num_workers=1, seed=SEED)
        if limit == 4000:
            assert_exact(loader, dataset)
        else:
            with pytest.raises(stoker.DecodeError, match="3,999"):
                next(iter(loader))


def test_huge_headers(tmp_path: Path) -> None:
    """Dimensions that a header claims are not believed before there are as many bytes for them."""
    data = bytearray(_bytes_of(picture(64, 64), format="JPEG"))
    at = data.index(b"\xff\xc0") + 5
    for place, (height, width) in enumerate([(65535, 65535), (13377, 13377), (9000, 9000)]):
        data[at : at + 4] = struct.pack(">HH", height, width)
        path = tmp_path / "class" / f"{place}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    dataset = stoker.ImageFolder(tmp_path, VAL, max_pixels=9000 * 9000 - 1)
    iterator = iter(stoker.DataLoader(dataset, 1, num_workers=1))
    for _ in range(3):
        with pytest.raises(stoker.DecodeError):
            next(iterator)


def test_a_header_that_claims_more_than_there_is_memory(tmp_path: Path) -> None:
    """What one of a batch claims, the memory of the whole batch would be made for."""
    data = bytearray(_bytes_of(picture(64, 64), format="JPEG"))
    (tmp_path / "class").mkdir()
    for place in range(1, 1000):
        (tmp_path / "class" / f"{place:03}.jpg").write_bytes(data)
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 4000, 4000)
    (tmp_path / "class" / "000.jpg").write_bytes(data[:-200])
    dataset = stoker.ImageFolder(tmp_path, T.ToTensor())
    loader = stoker.DataLoader(dataset, 1000, num_workers=1, seed=SEED, on_error="skip")
    ((images, _),) = loader
    assert images.shape == (1000, 3, 64, 64) and same_bits(images[0], images[1])
    assert [sample.index for sample in loader.bad_samples] == [0]


# What users change


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore:not run natively")
@pytest.mark.parametrize("name", ["v1 val", "v2 val", "v1 train"])
def test_default_dtype(small: Path, default_dtype: None, name: str) -> None:
    dataset = torchvision.datasets.ImageFolder(small, RECIPES[name])
    loader = stoker.DataLoader(dataset, 4, num_workers=1, seed=SEED)
    assert_exact(loader, dataset)
    for dtype in (torch.float64, torch.float16):
        torch.set_default_dtype(dtype)
        loader.num_workers = 0
        assert_exact(loader, dataset, 1, lowered=loader.explain().tier == "lowered")
        loader = stoker.DataLoader(dataset, 4, num_workers=0, seed=SEED)
    torch.set_default_dtype(torch.float32)
    assert_exact(loader, dataset, 2)


def _upside_down(function: Callable[..., Any]) -> Callable[..., Any]:
    def mine(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return result.transpose(Image.Transpose.FLIP_TOP_BOTTOM)

    return mine


_load = ImageFile.ImageFile.load


def _loads_negative(image: ImageFile.ImageFile) -> Any:
    fresh = image.tile
    result = _load(image)
    if fresh:
        image.im = ImageChops.invert(Image.Image()._new(image.im)).im
    return result


class _Negative(JpegImagePlugin.JpegImageFile):
    load = _loads_negative


PATCHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "Image.open": lambda m: m.setattr(Image, "open", _upside_down(Image.open)),
    "convert": lambda m: m.setattr(Image.Image, "convert", _upside_down(Image.Image.convert)),
    "resize": lambda m: m.setattr(Image.Image, "resize", _upside_down(Image.Image.resize)),
    "crop": lambda m: m.setattr(Image.Image, "crop", _upside_down(Image.Image.crop)),
    "ImageFile.load": lambda m: m.setattr(ImageFile.ImageFile, "load", _loads_negative),
    "JpegImageFile.load": lambda m: m.setattr(
        JpegImagePlugin.JpegImageFile, "load", _loads_negative, raising=False
    ),
    "a plugin for JPEG": lambda m: m.setitem(
        Image.OPEN, "JPEG", (_Negative, Image.OPEN["JPEG"][1])
    ),
    "pil_loader": lambda m: m.setattr(
        torchvision.datasets.folder,
        "pil_loader",
        _upside_down(torchvision.datasets.folder.pil_loader),
    ),
    "F.resize": lambda m: m.setattr(T.functional, "resize", _upside_down(T.functional.resize)),
}


@pytest.mark.filterwarnings("ignore:not run natively")
@pytest.mark.parametrize("name", PATCHES)
def test_patched_between_epochs(small: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    dataset = torchvision.datasets.ImageFolder(small, VAL)
    loader = stoker.DataLoader(
        dataset, 4, num_workers=1, seed=SEED, persistent_workers=True, prefetch_factor=4
    )
    plain = list(loader)
    PATCHES[name](monkeypatch)
    before, loader.num_workers = loader.num_workers, 0
    truth = Reference(dataset, SEED).epoch(1)
    changed = not same_bits(truth[0][0], plain[0][0][0])
    assert changed or name == "crop"
    images = torch.cat([images for images, _ in loader])
    for image, (expected, _) in zip(images, truth, strict=True):
        assert same_bits(image, expected)
    monkeypatch.undo()
    loader.num_workers = before
    assert_exact(loader, dataset, 2)


def test_pillows_pixel_limit_between_epochs(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = torchvision.datasets.ImageFolder(small, VAL)
    loader = stoker.DataLoader(dataset, 4, num_workers=1, seed=SEED, persistent_workers=True)
    assert_exact(loader, dataset)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(Image.DecompressionBombError):
        dataset[0]
    with pytest.raises(stoker.DecodeError, match="decompression bomb"):
        next(iter(loader))


class _Get(T.RandomResizedCrop):  # type: ignore[misc] # torchvision has no types
    @staticmethod
    def get_params(*_: Any) -> tuple[int, int, int, int]:
        return 1, 2, 30, 40


class _Forward(T.Resize):  # type: ignore[misc] # torchvision has no types
    def forward(self, img: Any) -> Any:
        return super().forward(img.transpose(Image.Transpose.ROTATE_180))


class _Transform(v2.RandomHorizontalFlip):  # type: ignore[misc] # torchvision has no types
    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return v2.functional.vertical_flip(inpt)


class _Params(v2.RandomCrop):  # type: ignore[misc] # torchvision has no types
    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return dict(super().make_params(flat_inputs)) | {"top": 0, "left": 0}


class _Call(T.Compose):  # type: ignore[misc] # torchvision has no types
    def __call__(self, img: Any) -> Any:
        return super().__call__(img) * 2


class _Constructed(T.Resize):  # type: ignore[misc] # torchvision has no types
    def __init__(self) -> None:
        super().__init__((40, 50))


SUBCLASSED: dict[str, tuple[Any, bool]] = {
    "get_params": (T.Compose([_Get(50), T.ToTensor()]), False),
    "forward": (T.Compose([_Forward((40, 50)), T.ToTensor()]), False),
    "transform": (v2.Compose([v2.Resize((40, 50)), _Transform(1), v2.PILToTensor()]), False),
    "make_params": (v2.Compose([_Params(40), v2.PILToTensor()]), False),
    "__call__": (_Call([T.Resize((40, 50)), T.ToTensor()]), False),
    "__init__": (T.Compose([_Constructed(), T.ToTensor()]), True),
}


@pytest.mark.filterwarnings("ignore:not run natively")
@pytest.mark.parametrize("name", SUBCLASSED)
def test_subclassed_transforms(small: Path, name: str) -> None:
    transform, lowered = SUBCLASSED[name]
    dataset = torchvision.datasets.ImageFolder(small, transform)
    loader = stoker.DataLoader(dataset, 4, num_workers=0, seed=SEED)
    assert_exact(loader, dataset, lowered=lowered)


def test_plans_that_alternate(small: Path) -> None:
    names = ["v1 train", "v2 Resize LANCZOS", "v1 Grayscale 1", "v2 to float16, scale=True"]
    datasets = [torchvision.datasets.ImageFolder(small, RECIPES[name]) for name in names]
    loaders = [
        stoker.DataLoader(
            dataset, 3, num_workers=threads, seed=SEED, persistent_workers=threads > 0
        )
        for dataset, threads in zip(datasets, (2, 1, 0, 3), strict=True)
    ]
    for epoch in range(2):
        truths = [Reference(dataset, SEED).epoch(epoch) for dataset in datasets]
        for step, batches in enumerate(zip(*loaders, strict=True)):
            for truth, (images, _) in zip(truths, batches, strict=True):
                for place, image in enumerate(images):
                    assert same_bits(image, truth[3 * step + place][0])


def _reverse(dataset: Any) -> None:
    dataset.samples.reverse()


def _relabel(dataset: Any) -> None:
    dataset.samples[:] = [(path, 7 - label) for path, label in dataset.samples]


def _drop(dataset: Any) -> None:
    del dataset.samples[5:]


def _replace(dataset: Any) -> None:
    dataset.transform = T.Compose([T.Resize((30, 40)), T.ToTensor()])


def _resize(dataset: Any) -> None:
    dataset.transform.transforms[0].size = 200


def _interpolate(dataset: Any) -> None:
    dataset.transform.transforms[0].interpolation = T.InterpolationMode.BICUBIC


def _normalise(dataset: Any) -> None:
    dataset.transform.transforms[-1].mean[1] = 0.9


def _append(dataset: Any) -> None:
    dataset.transform.transforms.append(T.RandomHorizontalFlip())


def _look_up(dataset: Any) -> None:
    dataset.target_transform = {0: 5, 1: 4, 2: 3}.get


@pytest.mark.parametrize(
    "change",
    [_reverse, _relabel, _drop, _replace, _resize, _interpolate, _normalise, _append, _look_up],
)
def test_mutated_between_epochs(small: Path, change: Callable[[Any], None]) -> None:
    parts = [T.Resize(90), T.CenterCrop(64), T.ToTensor(), T.Normalize([0.5] * 3, [0.2] * 3)]
    dataset = torchvision.datasets.ImageFolder(small, T.Compose(parts))
    loader = stoker.DataLoader(dataset, 4, num_workers=1, seed=SEED, persistent_workers=True)
    assert_exact(loader, dataset)
    change(dataset)
    if change is _drop:
        loader = stoker.DataLoader(dataset, 4, num_workers=1, seed=SEED)
    assert_exact(loader, dataset, 1)


def test_subset_and_files_changed_between_epochs(tmp_path: Path) -> None:
    root = class_folder(tmp_path / "tree", 9)
    whole = torchvision.datasets.ImageFolder(root, TRAIN)
    indices = [3, 1, -1, 4, 4]
    dataset = Subset(whole, indices)
    loader = stoker.DataLoader(dataset, 2, num_workers=1, seed=SEED)
    assert_exact(loader, dataset)
    indices[:] = [0, 2, 5, 7, 8]
    for path, _ in whole.samples:
        save(Path(path), picture(random.randrange(60, 200), 90, seed=5))
    assert_exact(loader, dataset, 1)
