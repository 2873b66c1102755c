"""Lazy images: whatever code does with them, it gets what it gets from genuine ones."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
import torchvision.transforms.functional as F
from PIL import (
    Image,
    ImageChops,
    ImageCms,
    ImageDraw,
    ImageEnhance,
    ImageFilter,
    ImageOps,
    ImageStat,
    JpegImagePlugin,
)
from torchvision.transforms import InterpolationMode, v2

from pictures import picture, save
from stoker.trace import file as lazy_file
from stoker.trace import hooks, node
from stoker.trace.check import impossible
from stoker.trace.file import LazyJpegImageFile
from stoker.trace.image import LazyImage
from stoker.trace.scope import DECODE, IMAGES, Scope, recording
from tracing import files, lazily, outcome, seed

Case = Callable[[Any], Any]


@pytest.fixture(scope="module")
def photos_of_all_kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    assert impossible() is None
    return files(tmp_path_factory.mktemp("jpegs"))


def opened(path: Any) -> Any:
    return Image.open(path).convert("RGB")


def _with_file(path: Any) -> Any:
    with open(path, "rb") as file:
        image = Image.open(file)
        return image.convert("RGB")


def _with_image(path: Any) -> Any:
    with Image.open(path) as image:
        return image.convert("RGB")


def _from_memory(path: Any) -> Any:
    return Image.open(io.BytesIO(Path(path).read_bytes())).convert("RGB")


def _file_position(path: Any) -> Any:
    with open(path, "rb") as file:
        image = Image.open(file)
        image.load()
        return file.tell(), file.closed


def _verified(path: Any) -> Any:
    Image.open(path).verify()
    image: Any = Image.open(path)
    image.load()
    return image.convert("RGB")


def _as_hugging_face(path: Any) -> Any:
    image: Any = Image.open(io.BytesIO(Path(path).read_bytes()))
    image.load()
    if image.getexif().get(0x0112) is not None:
        image = ImageOps.exif_transpose(image)
    return image.convert("RGB") if image.mode != "RGB" else image


def _thumbnail(image: Any) -> Any:
    image.thumbnail((100, 100))
    return image


def _draft(path: Any) -> Any:
    image = Image.open(path)
    image.draft("RGB", (60, 60))
    return image.convert("RGB")


def _drawn(path: Any) -> Any:
    image = opened(path)
    ImageDraw.Draw(image).rectangle((5, 5, 50, 50), fill=(255, 0, 0))
    return image


def _pasted(path: Any) -> Any:
    canvas = Image.new("RGB", (400, 400))
    canvas.paste(opened(path), (3, 3))
    return canvas


def _paste_target(path: Any) -> Any:
    image = opened(path)
    image.paste((9, 9, 9), (3, 3, 20, 20))
    return image


def _pixels(path: Any) -> Any:
    image = opened(path)
    image.putpixel((1, 1), (1, 2, 3))
    return image.getpixel((1, 1)), image.load()[2, 2], image


def _mutated_parent(path: Any) -> Any:
    image = opened(path)
    part = image.crop((0, 0, 30, 30))
    image.paste((7, 7, 7), (0, 0, 30, 30))
    return part, image


def _loaded_after_convert(path: Any) -> Any:
    image = Image.open(path)
    converted = image.convert("RGB")
    image.load()
    return converted, image


def _many_views(path: Any) -> Any:
    image = opened(path)
    return image.crop((0, 0, 30, 30)), image.resize((20, 20)), image, image.crop((5, 5, 60, 70))


def _closed(path: Any) -> Any:
    image = Image.open(path)
    converted = image.convert("RGB")
    image.close()
    return converted.resize((20, 20))


def _used_after_close(path: Any) -> Any:
    image = opened(path)
    image.close()
    return image.resize((20, 20))


def _size_after_with(path: Any) -> Any:
    with Image.open(path) as image:
        converted = image.convert("RGB")
    return converted.resize((20, 20)), image.size


def _pixel_after_with(path: Any) -> Any:
    with Image.open(path) as image:
        image.convert("RGB")
    return image.getpixel((0, 0))


def _never_loaded_after_with(path: Any) -> Any:
    with Image.open(path) as image:
        pass
    return image.getpixel((0, 0))


def _exif_in_place(path: Any) -> Any:
    image = Image.open(path)
    ImageOps.exif_transpose(image, in_place=True)
    return image


def _random_filter(path: Any) -> Any:
    image = opened(path)
    box = v1.RandomResizedCrop.get_params(image, [0.08, 1.0], [0.75, 4 / 3])
    mode = random.choice([InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
    return F.resized_crop(image, *box, [96, 96], mode)


def _to_numpy(path: Any) -> Any:
    array = np.array(opened(path).resize((64, 64), Image.Resampling.BICUBIC), dtype=np.uint8)
    return np.rollaxis(array, 2)


def _transposed_after_file_edit(path: Any) -> Any:
    image = Image.open(path)
    image.info["mine"] = [1, 2]
    part = image.convert("RGB")
    image.info["mine"].append(3)
    return part


def _saved(path: Any) -> Any:
    file = io.BytesIO()
    opened(path).save(file, "PNG")
    return file.getvalue()


def _profile(path: Any) -> Any:
    srgb = ImageCms.createProfile("sRGB")
    # The profile that it adds tells the time.
    result: Any = ImageCms.profileToProfile(opened(path).resize((30, 30)), srgb, srgb)
    return result.tobytes()


PLAIN: dict[str, Case] = {
    "open, convert": opened,
    "with open(file)": _with_file,
    "with Image.open": _with_image,
    "BytesIO": _from_memory,
    "position of the file": _file_position,
    "open only": lambda p: np.array(Image.open(p)),
    "np.array": lambda p: np.array(opened(p)),
    "np.asarray": lambda p: np.asarray(opened(p)),
    "random filter": _random_filter,
    "to NumPy": _to_numpy,
    "exif_transpose": lambda p: ImageOps.exif_transpose(Image.open(p)).convert("RGB"),
    "exif_transpose after convert": lambda p: ImageOps.exif_transpose(opened(p)),
    "exif_transpose in place": _exif_in_place,
    "facts of a file": lambda p: (
        lambda i: (i.size, i.mode, i.format, i.getbands(), i.width, repr(i.info), dict(i.getexif()))
    )(Image.open(p)),
    "facts after convert": lambda p: (
        lambda i: (i.size, i.mode, i.format, i.getbands(), i.height, repr(i.info), i.readonly)
    )(opened(p)),
    "exif after convert": lambda p: dict(opened(p).getexif()),
    "thumbnail": lambda p: _thumbnail(opened(p)),
    "thumbnail of a file": lambda p: _thumbnail(Image.open(p)),
    "draft": _draft,
    "ImageOps geometry": lambda p: (
        ImageOps.fit(opened(p), (64, 64)),
        ImageOps.pad(opened(p), (64, 64)),
        ImageOps.contain(opened(p), (64, 64)),
        ImageOps.mirror(opened(p)),
        ImageOps.flip(opened(p)),
        ImageOps.expand(opened(p), 4),
    ),
    "ImageOps colours": lambda p: (
        ImageOps.grayscale(opened(p)),
        ImageOps.equalize(opened(p)),
        ImageOps.autocontrast(opened(p)),
        ImageOps.invert(opened(p)),
        ImageOps.posterize(opened(p), 3),
        ImageOps.solarize(opened(p), 99),
    ),
    "ImageEnhance": lambda p: tuple(
        kind(opened(p).resize((40, 40))).enhance(0.7)
        for kind in (
            ImageEnhance.Color,
            ImageEnhance.Contrast,
            ImageEnhance.Brightness,
            ImageEnhance.Sharpness,
        )
    ),
    "ImageDraw": _drawn,
    "pasted": _pasted,
    "target of paste": _paste_target,
    "single pixels": _pixels,
    "filter, point, split, merge": lambda p: (
        opened(p).filter(ImageFilter.BoxBlur(2)),
        opened(p).point(lambda value: 255 - value),
        Image.merge("RGB", opened(p).split()[::-1]),
    ),
    "blend, ImageChops, ImageStat": lambda p: (
        Image.blend(opened(p).resize((50, 50)), opened(p).resize((50, 50)), 0.3),
        ImageChops.invert(opened(p)),
        ImageStat.Stat(opened(p)).mean,
        opened(p).getbbox(),
        opened(p).getextrema(),
        opened(p).histogram(),
    ),
    "tobytes, save": lambda p: (opened(p).tobytes(), _saved(p)),
    "other modes": lambda p: tuple(
        opened(p).convert(mode) for mode in ("L", "RGBA", "HSV", "YCbCr", "1", "P", "F", "CMYK")
    ),
    "modes of a file": lambda p: tuple(
        Image.open(p).convert(mode) for mode in ("L", "RGB", "RGBA", "1", None)
    ),
    "gray and back": lambda p: opened(p).convert("L").convert("RGB").resize((33, 44)),
    "convert with arguments": lambda p: (
        opened(p).convert("L", dither=Image.Dither.NONE),
        opened(p).convert("L", (0.3, 0.4, 0.3, 0)),
        opened(p).convert("P", palette=Image.Palette.ADAPTIVE, colors=8),
    ),
    "rotate, transform, reduce": lambda p: (
        opened(p).rotate(90, expand=True),
        opened(p).rotate(180),
        opened(p).rotate(33),
        opened(p).transform((50, 50), Image.Transform.AFFINE, (1, 0, 3, 0, 1, 4)),
        opened(p).reduce(2),
    ),
    "transposes": lambda p: tuple(opened(p).transpose(way) for way in Image.Transpose),
    "resize with a box": lambda p: (
        opened(p).resize((50, 60), Image.Resampling.LANCZOS, box=(3.5, 4, 70, 60.25)),
        opened(p).resize((50, 60), box=(0, 0, *opened(p).size)),
        opened(p).resize((50, 60), reducing_gap=2.0),
        opened(p).resize([50, 60]),
        opened(p).resize(opened(p).size),
    ),
    "crops outside": lambda p: (
        opened(p).crop((-5, -7, 500, 400)),
        opened(p).crop((-50, -50, -10, -10)),
        opened(p).crop((5.4, 5.5, 50.5, 60.6)),
        opened(p).crop((10, 10, 10, 30)),
        opened(p).crop(),
    ),
    "crop of a file": lambda p: Image.open(p).crop((3, 4, 50, 60)),
    "invalid crop": lambda p: opened(p).crop((50, 0, 20, 10)),
    "invalid crop of a file": lambda p: Image.open(p).crop((0, 50, 10, 20)),
    "invalid size": lambda p: opened(p).resize((0, 10)),
    "invalid filter": lambda p: opened(p).resize((10, 10), 77),
    "invalid transpose": lambda p: opened(p).transpose(99),
    "invalid mode": lambda p: opened(p).convert("nonsense"),
    "pickle, copies": lambda p: (
        pickle.loads(pickle.dumps(opened(p))),
        pickle.loads(pickle.dumps(Image.open(p))),
        copy.deepcopy(opened(p)),
        copy.copy(opened(p)),
        type(pickle.loads(pickle.dumps(opened(p)))).__name__,
    ),
    "comparison": lambda p: (
        opened(p) == opened(p),
        opened(p) == opened(p).crop((0, 0, 5, 5)),
        Image.open(p) == Image.open(p),
        opened(p) != 3,
    ),
    "hash": lambda p: _hash(p),
    "parent changed": _mutated_parent,
    "file loaded after convert": _loaded_after_convert,
    "many views": _many_views,
    "file closed": _closed,
    "image closed": _used_after_close,
    "size after with": _size_after_with,
    "pixel after with": _pixel_after_with,
    "never loaded after with": _never_loaded_after_with,
    "info": _transposed_after_file_edit,
    "kinds": lambda p: (
        isinstance(Image.open(p), JpegImagePlugin.JpegImageFile),
        isinstance(opened(p), Image.Image),
        hasattr(opened(p), "filename"),
        Image.open(p).filename,
    ),
    "core": lambda p: (opened(p).im.size, opened(p).getim() is not None, opened(p)._im.mode),
    "colour profile": _profile,
    "from_numpy": lambda p: torch.from_numpy(np.array(opened(p))).permute(2, 0, 1),
    "names": lambda p: sorted(name for name in vars(opened(p)) if not name.startswith("_")),
    "Hugging Face": _as_hugging_face,
    "verify": _verified,
    "load of a file": lambda p: (lambda i: (i.load()[3, 4], i))(_any(p)),
    "load, then use": lambda p: (
        lambda i: (i.load(), i.getpixel((1, 1)), i.crop((0, 0, 9, 9)), i.tobytes())[1:]
    )(Image.open(p)),
    "file of the user's": lambda p: Image.open(open(p, "rb")).convert("RGB"),  # noqa: SIM115
}


def _any(path: Any) -> Any:
    return Image.open(path)


def _hash(path: Any) -> Any:
    try:
        return hash(opened(path)) is not None
    except TypeError:
        return "unhashable"


def _chain(transform: Any) -> Case:
    return lambda path: transform(opened(path))


def _transforms(name: str, T: Any) -> dict[str, Case]:
    tensor = [T.ToTensor()] if T is v1 else [T.ToImage(), T.ToDtype(torch.float32, scale=True)]
    normalize = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    nearest, bicubic = InterpolationMode.NEAREST, InterpolationMode.BICUBIC
    chains: dict[str, list[Any]] = {
        "train": [T.RandomResizedCrop(64), T.RandomHorizontalFlip(), *tensor, normalize],
        "images": [T.RandomResizedCrop(64), T.RandomHorizontalFlip()],
        "eval": [T.Resize(80), T.CenterCrop(64), *tensor, normalize],
        "bicubic": [T.Resize(72, interpolation=bicubic), T.CenterCrop(64), *tensor, normalize],
        "nearest": [T.Resize((64, 64), interpolation=nearest), *tensor],
        "larger crop": [T.CenterCrop(400)],
        "padded crop": [T.Resize((40, 40)), T.RandomCrop(32, padding=4)],
        "reflected": [T.Resize((40, 40)), T.RandomCrop(32, padding=4, padding_mode="reflect")],
        "jitter": [T.RandomResizedCrop(48), T.ColorJitter(0.4, 0.4, 0.4, 0.1), *tensor],
        "gray": [T.Resize(48), T.RandomGrayscale(0.5), T.Grayscale(3), *tensor],
        "one channel": [T.Grayscale(1), T.Resize((40, 50)), *tensor, T.Normalize([0.5], [0.25])],
        "RandAugment": [T.RandomResizedCrop(48), T.RandAugment(), *tensor],
        "TrivialAugmentWide": [T.RandomResizedCrop(48), T.TrivialAugmentWide(), *tensor],
        "AutoAugment": [T.RandomResizedCrop(48), T.AutoAugment(), *tensor],
        "AugMix": [T.RandomResizedCrop(32), T.AugMix(), *tensor],
        "blur": [T.Resize(48), T.GaussianBlur(5), *tensor],
        "rotation": [T.RandomRotation(30), T.Resize((64, 64))],
        "affine": [T.Resize((64, 64)), T.RandomAffine(20, (0.1, 0.1), (0.8, 1.2), 5)],
        "perspective": [T.Resize((64, 64)), T.RandomPerspective(p=1.0)],
        "erasing": [T.Resize((64, 64)), *tensor, normalize, T.RandomErasing(1.0)],
        "five crops": [T.Resize(80), T.FiveCrop(48)],
        "choices": [
            T.Lambda(lambda image: image.crop((3, 3, 90, 80))),
            T.RandomApply([T.RandomVerticalFlip(1.0)], 0.5),
            T.RandomChoice([T.Resize(32), T.CenterCrop(40)]),
        ],
        "bytes": [T.Resize((64, 64)), T.PILToTensor(), T.ConvertImageDtype(torch.float32)],
        "bytes only": [T.Resize((64, 64)), T.PILToTensor()],
    }
    return {f"{name} {title}": _chain(T.Compose(chain)) for title, chain in chains.items()}


CASES = {
    **PLAIN,
    **_transforms("v1", v1),
    **_transforms("v2", v2),
    "v2 on tensors": lambda p: v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(64, antialias=True),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )(opened(p)),
    "v2 with a label": lambda p: v2.Compose([v2.RandomResizedCrop(64), v2.RandomHorizontalFlip()])(
        opened(p), 3
    ),
    "v2 fill by type": lambda p: v2.Pad(
        5,
        fill={Image.Image: (255, 0, 0), "others": 0},
    )(opened(p)),
}


@pytest.mark.parametrize("depth", [DECODE, IMAGES, IMAGES + 1])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_code_gets_what_it_gets_from_genuine_images(
    name: str, depth: int, photos_of_all_kinds: list[Path]
) -> None:
    for number, path in enumerate(photos_of_all_kinds):
        seed(number)
        code = partial(CASES[name], path)
        expected = outcome(code)
        state = torch.get_rng_state(), random.getstate()
        seed(number)
        result, scope = lazily(code, depth)
        assert result == expected, path.name
        assert torch.equal(torch.get_rng_state(), state[0])
        assert random.getstate() == state[1]
        assert scope.undone is None


@pytest.mark.filterwarnings("ignore")
def test_the_two_known_differences(photos_of_all_kinds: list[Path]) -> None:
    path = photos_of_all_kinds[0]
    with hooks.installed(), recording(Scope(IMAGES, set())):
        assert type(opened(path)) is LazyImage
        assert type(Image.open(path)) is LazyJpegImageFile
        made = opened(path)
        made.load()
        assert type(made) is Image.Image


def _try_open(path: Any) -> Any:
    try:
        return Image.open(path).convert("RGB")
    except OSError:
        return Image.new("RGB", (10, 10))


def _broken(data: bytes, how: str) -> bytes:
    if how == "truncated":
        return data[: len(data) // 2]
    if how == "garbage":
        noise = np.random.default_rng(1).integers(0, 256, 300, np.uint8).tobytes()
        middle = len(data) * 2 // 3
        return data[:middle] + noise + data[middle + 300 :]
    if how == "no table":
        at = data.find(b"\xff\xc4") + 5
        return data[:at] + b"\xff" * 16 + data[at + 16 :]
    if how == "trailing bytes":
        return data + b"more"
    return b"hello" * 100


@pytest.mark.parametrize("how", ["truncated", "garbage", "no table", "trailing bytes", "text"])
@pytest.mark.parametrize("depth", [DECODE, IMAGES])
@pytest.mark.filterwarnings("ignore")
def test_broken_files_are_noticed_where_they_always_were(
    how: str, depth: int, tmp_path: Path, photos_of_all_kinds: list[Path]
) -> None:
    for number, path in enumerate(photos_of_all_kinds[:6]):
        broken = tmp_path / f"{number}.jpg"
        broken.write_bytes(_broken(path.read_bytes(), how))
        for code in (_try_open, opened, lambda p: np.array(opened(p)).shape):
            expected = outcome(partial(code, broken))
            result, _ = lazily(partial(code, broken), depth)
            assert result == expected


def test_a_file_that_changes_is_not_read_again(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", picture(90, 80, seed=1), quality=90)
    kept = path.read_bytes()
    other = save(tmp_path / "b.jpg", picture(90, 80, seed=2), quality=90).read_bytes()

    def code() -> Any:
        path.write_bytes(kept)
        image = opened(path)
        path.write_bytes(other)
        return image

    expected = outcome(code)
    result, scope = lazily(code)
    assert result == expected
    assert scope.undone is not None


def test_lazy_images_keep_no_file_open(photos_of_all_kinds: list[Path]) -> None:
    with hooks.installed(), recording(Scope(IMAGES, set())):
        opened(photos_of_all_kinds[0])
        before = len(os.listdir("/proc/self/fd"))
        kept = [(Image.open(path), opened(path)) for path in photos_of_all_kinds]
        del kept[:0]
        converted = [opened(path) for path in photos_of_all_kinds]
        for image, _ in kept:
            image.load()
        assert len(os.listdir("/proc/self/fd")) == before
        assert all(type(image) is LazyImage for image in converted)


def test_threads_share_a_lazy_image(photos_of_all_kinds: list[Path]) -> None:
    path = photos_of_all_kinds[0]
    expected = [opened(path).crop((i, i, i + 40, i + 30)).tobytes() for i in range(16)]
    scope = Scope(IMAGES, set())
    with hooks.installed(), recording(scope):
        image = opened(path)
        parts = [image.crop((i, i, i + 40, i + 30)) for i in range(16)]
    results: list[Any] = [None] * 32

    def work(number: int) -> None:
        for i in range(number, 16, 4):
            results[i] = parts[i].tobytes()
        results[16 + number] = image.tobytes()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[:16] == expected
    assert set(results[16:20]) == {opened(path).tobytes()}


def test_images_that_a_dataset_keeps_are_made_when_its_batch_ends(
    photos_of_all_kinds: list[Path],
) -> None:
    scope, kept = Scope(IMAGES, set()), []
    with hooks.installed(), recording(scope):
        kept = [opened(path) for path in photos_of_all_kinds]
        loaded = Image.open(photos_of_all_kinds[0])
        loaded.load()
        lazy_file.settle(scope)
    assert {type(image) for image in kept} == {Image.Image}
    assert type(loaded) is JpegImagePlugin.JpegImageFile
    assert kept[1].tobytes() == opened(photos_of_all_kinds[1]).tobytes()


@pytest.mark.filterwarnings("ignore")
def test_outside_of_a_scope_everything_is_stock(photos_of_all_kinds: list[Path]) -> None:
    before = Image.OPEN["JPEG"], F.to_tensor, torch.utils.data._utils.collate.default_collate_fn_map
    with hooks.installed():
        assert Image.OPEN["JPEG"] is not before[0]
        assert type(opened(photos_of_all_kinds[0])) is Image.Image
        assert type(Image.open(photos_of_all_kinds[0])) is JpegImagePlugin.JpegImageFile
    assert (Image.OPEN["JPEG"], F.to_tensor) == before[:2]
    gc.collect()


def test_a_picture_that_is_asked_for_often_is_decoded_once(
    photos_of_all_kinds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    read = node.Source.read

    def counted(source: node.Source) -> bytes:
        reads.append(source)
        return read(source)

    monkeypatch.setattr(node.Source, "read", counted)
    with hooks.installed(), recording(Scope(IMAGES, set())):
        crops = v1.TenCrop(40)(opened(photos_of_all_kinds[0]))
        for crop in crops:
            crop.load()
    assert len(reads) <= 3
