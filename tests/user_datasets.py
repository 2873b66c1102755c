"""Dataset classes as people write them, each with the tier that stoker has for it.

The styles are those of classes found in public repositories; the code is new.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.transforms as T
from PIL import Image, ImageDraw, ImageFilter, ImageOps
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, get_worker_info
from torch.utils.data import default_collate as collate
from torchvision import tv_tensors
from torchvision.datasets import DatasetFolder, ImageFolder
from torchvision.transforms import functional as TF  # noqa: N812  the name in every tutorial
from torchvision.transforms import v2

from pictures import picture, save

SAMPLES = 12
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def write_files(root: Path) -> Path:
    """Twelve small photos with label files, masks, boxes and a folder per class."""
    rows, boxes = [], {}
    for i in range(SAMPLES):
        name = f"img_{i:02}.jpg"
        width, height = 96 + 16 * (i % 4), 80 + 12 * (i % 3)
        image = picture(width, height, seed=i)
        options: dict[str, Any] = {"quality": 88, "subsampling": i % 3}
        if i == 4:
            options = {"quality": 80, "progressive": True}
        if i in (5, 9):
            exif = image.getexif()
            exif[0x0112] = 6 if i == 5 else 3
            options["exif"] = exif.tobytes()
        if i == 7:
            image = image.convert("L")
        save(root / "images" / name, image, **options)
        save(root / "classes" / "abc"[i % 3] / name, image, **options)
        mask = Image.new("L", image.size, 0)
        ImageDraw.Draw(mask).rectangle((10, 12, width // 2, height // 2), fill=1 + i % 3)
        save(root / "masks" / f"img_{i:02}.png", mask)
        rows.append([name, str(i % 3), f"{i / 7:.3f}"])
        boxes[name] = [[10, 12, width // 2, height // 2], [3, 5, 30, 40]][: 1 + i % 2]
    with (root / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["filename", "class", "score"], *rows])
    (root / "train.txt").write_text("".join(f"{name} {label}\n" for name, label, _ in rows))
    (root / "boxes.json").write_text(json.dumps(boxes))
    return root


def train_transform() -> Any:
    return T.Compose(
        [
            T.RandomResizedCrop(32),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize(MEAN, STD),
        ]
    )


class LabelFileDataset(Dataset[Any]):
    """The tutorial's: a text file of names and labels."""

    def __init__(self, img_dir: str, label_file: str, transform: Any = None) -> None:
        self.img_dir = img_dir
        self.transform = transform
        self.labels = {}
        with open(label_file) as f:
            for line in f:
                name, label = line.strip().split()
                self.labels[name] = int(label)
        self.img_names = list(self.labels.keys())

    def __len__(self) -> int:
        return len(self.img_names)

    def path(self, idx: int) -> str:
        return f"{self.img_dir}/{self.img_names[idx]}"

    def __getitem__(self, idx: int) -> Any:
        image = Image.open(self.path(idx)).convert("RGB")
        if self.transform:
            image = self.transform(image)
        return image, self.labels[self.img_names[idx]]


class CsvDataset(Dataset[Any]):
    """A data frame's rows, looked up by place; a dict with a tensor target."""

    def __init__(self, csv_file: str, root_dir: str, transform: Any = None) -> None:
        with open(csv_file, newline="") as f:
            self.frame = list(csv.DictReader(f))
        self.root_dir, self.transform = root_dir, transform

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, idx: Any) -> Any:
        if torch.is_tensor(idx):
            idx = idx.tolist()
        row = self.frame[idx]
        image: Image.Image = Image.open(Path(self.root_dir) / row["filename"])
        if image.mode != "RGB":
            image = image.convert("RGB")
        target = torch.tensor(float(row["score"]), dtype=torch.float32)
        return {"image": self.transform(image), "target": target, "name": row["filename"]}


class NoConvert(LabelFileDataset):
    """Opens without converting; its transform makes every image gray."""

    def __getitem__(self, idx: int) -> Any:
        with open(self.path(idx), "rb") as f:
            img = Image.open(f)
            img = self.transform(img)
        return img, idx


class Compose:
    """Augmentations on arrays, called with named arguments."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Any, mask: Any) -> Any:
        top = random.randint(0, image.shape[0] - self.size)
        left = np.random.randint(0, image.shape[1] - self.size + 1)
        place = (slice(top, top + self.size), slice(left, left + self.size))
        image, mask = image[place], mask[place]
        if random.random() < 0.5:
            image, mask = image[:, ::-1], mask[:, ::-1]
        return {"image": image.copy(), "mask": mask.copy()}


class ArraySegmentation(Dataset[Any]):
    """As of a well-known U-Net: arrays of image and mask through augmentations on arrays."""

    def __init__(self, root: Path, transform: Any = None) -> None:
        self.images = sorted((root / "images").iterdir())
        self.masks = root / "masks"
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = np.array(Image.open(self.images[index]).convert("RGB"))
        mask = np.array(Image.open(self.masks / f"{self.images[index].stem}.png").convert("L"))
        augmented = self.transform(image=image, mask=mask.astype(np.float32))
        image = augmented["image"].astype(np.float32) / 255.0
        image = (image - np.array(MEAN, np.float32)) / np.array(STD, np.float32)
        return torch.from_numpy(image.transpose(2, 0, 1)), torch.from_numpy(augmented["mask"])


class Cv2Dataset(LabelFileDataset):
    """cv2.imread, colours swapped."""

    def __getitem__(self, idx: int) -> Any:
        import cv2

        image: Any = cv2.imread(self.path(idx))
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        image = cv2.resize(image, (40, 40), interpolation=cv2.INTER_LINEAR)
        return torch.from_numpy(image).permute(2, 0, 1).float().div(255), idx


class TwoCrops:
    """The transform of contrastive learning."""

    def __init__(self, base_transform: Any) -> None:
        self.base_transform = base_transform

    def __call__(self, x: Any) -> Any:
        return [self.base_transform(x), self.base_transform(x)]


class ContrastivePair(LabelFileDataset):
    """Asserts what it opened, concatenates its two views."""

    def __getitem__(self, idx: int) -> Any:
        image = Image.open(self.path(idx)).convert("RGB")
        assert isinstance(image, Image.Image)
        one, two = self.transform(image), self.transform(image)
        return torch.cat([one.unsqueeze(0), two.unsqueeze(0)], dim=0), idx


class SegmentationDataset(Dataset[Any]):
    """Image and mask, cropped and flipped together through the functional transforms."""

    def __init__(self, root: Path, train: bool = True) -> None:
        self.root, self.train = root, train
        self.ids = sorted(path.stem for path in (root / "images").iterdir())

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Any:
        image = Image.open(self.root / "images" / f"{self.ids[i]}.jpg").convert("RGB")
        mask = Image.open(self.root / "masks" / f"{self.ids[i]}.png")
        image = TF.resize(image, [72, 90])
        mask = TF.resize(mask, [72, 90], interpolation=T.InterpolationMode.NEAREST)
        place = T.RandomCrop.get_params(image, (64, 64))
        image, mask = TF.crop(image, *place), TF.crop(mask, *place)
        if random.random() > 0.5:
            image, mask = TF.hflip(image), TF.hflip(mask)
        image = TF.normalize(TF.to_tensor(image), MEAN, STD)
        return image, torch.as_tensor(np.array(mask), dtype=torch.long)


class DetectionDataset(Dataset[Any]):
    """Images of their own sizes with a dict of boxes, flipped together."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.boxes: dict[str, Any] = json.loads((root / "boxes.json").read_text())
        self.names = sorted(self.boxes)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, idx: int) -> Any:
        img = Image.open(self.root / "images" / self.names[idx]).convert("RGB")
        boxes = torch.as_tensor(self.boxes[self.names[idx]], dtype=torch.float32)
        if torch.rand(1) < 0.5:
            width, _ = img.size
            img = TF.hflip(img)
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        target = {
            "boxes": boxes,
            "labels": torch.ones(len(boxes), dtype=torch.int64),
            "image_id": torch.tensor([idx]),
            "area": (boxes[:, 3] - boxes[:, 1]) * (boxes[:, 2] - boxes[:, 0]),
        }
        return TF.to_tensor(img), target


def zipped(batch: Any) -> Any:
    """The collate function of every detection tutorial."""
    return tuple(zip(*batch, strict=True))


@dataclass
class NestedTensor:
    """A padded batch with its mask, in a class of the user's."""

    tensors: torch.Tensor
    mask: torch.Tensor

    def pin_memory(self) -> NestedTensor:
        return NestedTensor(self.tensors.pin_memory(), self.mask.pin_memory())


def nested(batch: Any) -> Any:
    """Pads by hand, as transformers for detection do."""
    images = [image for image, _ in batch]
    height, width = (max(image.shape[d] for image in images) for d in (1, 2))
    tensors = torch.zeros(len(images), 3, height, width)
    mask = torch.ones(len(images), height, width, dtype=torch.bool)
    for image, row, hidden in zip(images, tensors, mask, strict=True):
        row[:, : image.shape[1], : image.shape[2]].copy_(image)
        hidden[: image.shape[1], : image.shape[2]] = False
    found = NestedTensor(tensors, mask)
    return {"images": found.tensors, "mask": found.mask, "targets": [t for _, t in batch]}


class TripletDataset(LabelFileDataset):
    """Anchor, positive and negative; the latter two are drawn."""

    def open(self, idx: int) -> Any:
        return self.transform(Image.open(self.path(idx)).convert("RGB"))

    def __getitem__(self, idx: int) -> Any:
        label = self.labels[self.img_names[idx]]
        same = [i for i, name in enumerate(self.img_names) if self.labels[name] == label]
        others = [i for i in range(len(self)) if i not in same]
        return self.open(idx), self.open(random.choice(same)), self.open(random.choice(others))


class MultiLabelDataset(LabelFileDataset):
    """A dict with a vector of labels and the path."""

    def __getitem__(self, idx: int) -> Any:
        sample: dict[str, Any] = {
            "image": Image.open(self.path(idx)).convert("RGB"),
            "path": self.path(idx),
        }
        sample["labels"] = torch.zeros(3)
        sample["labels"][self.labels[self.img_names[idx]]] = 1.0
        if self.transform is not None:
            sample["image"] = self.transform(sample["image"])
        return sample


class StoreDataset(Dataset[Any]):
    """Encoded bytes by key, as from LMDB or HDF5; opened lazily in each worker."""

    def __init__(self, root: Path, transform: Any) -> None:
        self.root, self.transform = root, transform
        self.env: dict[bytes, bytes] | None = None

    def __len__(self) -> int:
        return SAMPLES

    def _init_db(self) -> None:
        paths = sorted((self.root / "images").iterdir())
        self.env = {f"{i:08}".encode(): path.read_bytes() for i, path in enumerate(paths)}

    def __getitem__(self, index: int) -> Any:
        if self.env is None:
            self._init_db()
        assert self.env is not None
        buf = io.BytesIO()
        buf.write(self.env[f"{index:08}".encode()])
        buf.seek(0)
        return self.transform(Image.open(buf).convert("RGB")), index


class ColumnsDataset(LabelFileDataset):
    """Rows come by the batch, as columns, through a transform that was set."""

    def _rows(self, indices: list[int]) -> Any:
        columns: dict[str, Any] = {
            "image": [Image.open(self.path(i)) for i in indices],
            "label": [self.labels[self.img_names[i]] for i in indices],
        }
        images = [self.transform(image.convert("RGB")) for image in columns["image"]]
        return {"pixel_values": images, "label": columns["label"]}

    def __getitem__(self, idx: Any) -> Any:
        return {key: values[0] for key, values in self._rows([idx]).items()}

    def __getitems__(self, indices: list[int]) -> Any:
        columns = self._rows(indices)
        return [{key: columns[key][i] for key in columns} for i in range(len(indices))]


class FileObjectDataset(LabelFileDataset):
    """Opens through a file object that is closed before the image is used."""

    def __getitem__(self, idx: int) -> Any:
        with open(self.path(idx), "rb") as f:
            img: Image.Image = Image.open(f)
            img = img.convert("RGB")
        return self.transform(img), idx


class RamCacheDataset(LabelFileDataset):
    """Keeps every image that it has opened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, idx: int) -> Any:
        if idx not in self.cache:
            self.cache[idx] = Image.open(self.path(idx)).convert("RGB")
        return self.transform(self.cache[idx]), idx


class PathFolder(ImageFolder):  # type: ignore[misc]
    """An ImageFolder that gives the path, too."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), self.imgs[index][0])


def bgr_loader(path: str) -> Any:
    image = Image.open(path).convert("RGB")
    return image.crop((2, 2, image.width - 2, image.height - 2))


class NextOnError(LabelFileDataset):
    """Gives another sample where a file cannot be read."""

    def __getitem__(self, idx: int) -> Any:
        try:
            image = Image.open(self.path(idx)).convert("RGB")
        except Exception as e:  # noqa: BLE001  what people write
            self.last_error = e
            return self[(idx + 1) % len(self)]
        return self.transform(image), self.labels[self.img_names[idx]]


class NoneOnError(LabelFileDataset):
    """Gives None where a file cannot be read; its collate function drops those."""

    def __getitem__(self, idx: int) -> Any:
        try:
            return super().__getitem__(idx)
        except OSError:
            return None


def without_none(batch: Any) -> Any:
    return collate([sample for sample in batch if sample is not None])


class Transformed(Dataset[Any]):
    """Gives a subset a transform of its own."""

    def __init__(self, subset: Any, transform: Any) -> None:
        self.subset, self.transform = subset, transform

    def __len__(self) -> int:
        return len(self.subset)

    def __getitem__(self, index: int) -> Any:
        x, y = self.subset[index]
        return self.transform(x), y


def wrapped(root: Path) -> Any:
    """A subset of a concatenation of wrappers of a split."""
    base = label_file(LabelFileDataset)(root)
    base.transform = None
    halves = [Subset(base, range(6)), Subset(base, range(6, SAMPLES))]
    parts: list[Dataset[Any]] = [Transformed(half, train_transform()) for half in halves]
    return Subset(ConcatDataset(parts), [1, 0, 5, 7, 11, 9, 8, 2, 3, 4])


class ShardedStream(IterableDataset[Any]):
    """A stream that each worker takes its share of, shuffled in a buffer."""

    def __init__(self, root: Path, transform: Any) -> None:
        self.paths = sorted(str(path) for path in (root / "images").iterdir())
        self.transform = transform

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        paths = self.paths if info is None else self.paths[info.id :: info.num_workers]
        buffer: list[str] = []
        for path in [*paths, *paths]:
            buffer.append(path)
            if len(buffer) > 3:
                yield self._load(buffer.pop(random.randrange(len(buffer))))
        yield from map(self._load, buffer)

    def _load(self, path: str) -> Any:
        return self.transform(Image.open(path).convert("RGB")), path


class UprightDataset(LabelFileDataset):
    """Turns photos as their EXIF data says."""

    def __getitem__(self, idx: int) -> Any:
        image: Any = Image.open(self.path(idx))
        image = ImageOps.exif_transpose(image)
        return self.transform(image.convert("RGB")), idx


class StatisticsDataset(LabelFileDataset):
    """Drops flat images after a look at their values."""

    def __getitem__(self, idx: int) -> Any:
        image: Any = Image.open(self.path(idx)).convert("RGB")
        flat = all(low == high for low, high in image.getextrema())
        histogram = torch.tensor(image.histogram(), dtype=torch.float32)
        gray = image.convert("L").resize((8, 8))
        return self.transform(image), flat, histogram, gray.getpixel((3, 4))


class TvTensorsDataset(DetectionDataset):
    """Image, boxes and mask as tv_tensors through one v2 transform."""

    def __init__(self, root: Path, transforms: Any) -> None:
        super().__init__(root)
        self.transforms = transforms

    def __getitem__(self, idx: int) -> Any:
        name = self.names[idx]
        img = Image.open(self.root / "images" / name).convert("RGB")
        mask = Image.open(self.root / "masks" / name.replace("jpg", "png"))
        target = {
            "boxes": tv_tensors.BoundingBoxes(
                self.boxes[name],
                format=tv_tensors.BoundingBoxFormat.XYXY,
                canvas_size=(img.height, img.width),
            ),
            "masks": tv_tensors.Mask(v2.functional.pil_to_tensor(mask)),
            "labels": torch.arange(len(self.boxes[name])),
        }
        return self.transforms(img, target)


class TilesDataset(LabelFileDataset):
    """A stack of tiles of one image."""

    def __getitem__(self, idx: int) -> Any:
        image = Image.open(self.path(idx)).convert("RGB").resize((64, 64))
        tiles = [image.crop((x, y, x + 32, y + 32)) for y in (0, 32) for x in (0, 32)]
        return torch.stack([TF.to_tensor(tile) for tile in tiles]), idx


class PyramidDataset(LabelFileDataset):
    """One image in several sizes."""

    def __getitem__(self, idx: int) -> Any:
        image = Image.open(self.path(idx)).convert("RGB")
        sizes = (48, 24, 12)
        levels = [image.resize((size, size), Image.Resampling.BICUBIC) for size in sizes]
        return {size: TF.to_tensor(level) for size, level in zip(sizes, levels, strict=True)}


class ThumbnailDataset(LabelFileDataset):
    """Makes thumbnails and pads them to a square."""

    def __getitem__(self, idx: int) -> Any:
        image = Image.open(self.path(idx))
        image.draft("RGB", (48, 48))
        image.thumbnail((48, 48))
        square = Image.new("RGB", (48, 48), (124, 116, 104))
        square.paste(image, ((48 - image.width) // 2, (48 - image.height) // 2))
        return TF.to_tensor(square), idx


class MosaicDataset(LabelFileDataset):
    """Pastes four photos into one, draws and blurs."""

    def __getitem__(self, idx: int) -> Any:
        canvas = Image.new("RGB", (64, 64))
        for place, i in enumerate([idx, *random.choices(range(len(self)), k=3)]):
            part = Image.open(self.path(i)).convert("RGB").resize((32, 32))
            canvas.paste(part, (32 * (place % 2), 32 * (place // 2)))
        ImageDraw.Draw(canvas).line((0, 0, 63, 63), fill=(255, 0, 0))
        if random.random() < 0.5:
            canvas = canvas.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))
        return TF.to_tensor(canvas), idx


class VerifyingDataset(LabelFileDataset):
    """Verifies a file before it opens it again; looks at what Pillow says about it."""

    def __getitem__(self, idx: int) -> Any:
        with Image.open(self.path(idx)) as image:
            image.verify()
        with Image.open(self.path(idx)) as image:
            facts = (image.format, image.size, image.info.get("jfif"), len(image.getbands()))
            return self.transform(image.convert("RGB")), str(facts)


class ImagesDataset(LabelFileDataset):
    """Gives images; collating is the processor's business."""

    def __getitem__(self, idx: int) -> Any:
        return Image.open(self.path(idx)).convert("RGB"), idx


def processor(batch: Any) -> Any:
    """Like an image processor of a model: resizes and rescales the images of a batch."""
    arrays = [np.asarray(image.resize((32, 32)), np.float32) / 255 for image, _ in batch]
    pixels = np.stack([array.transpose(2, 0, 1) for array in arrays])
    return {"pixel_values": torch.from_numpy(pixels), "labels": torch.tensor([y for _, y in batch])}


class ArrayMemoryDataset(Dataset[Any]):
    """CIFAR-like: arrays in memory, made images."""

    def __init__(self, root: Path, transform: Any) -> None:
        self.data = [
            np.asarray(Image.open(path).convert("RGB").resize((40, 40)))
            for path in sorted((root / "images").iterdir())
        ]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.transform(Image.fromarray(self.data[index])), index


class Pseudolabels(LabelFileDataset):
    """Weak and strong views, then arithmetic on the tensor."""

    def __getitem__(self, idx: int) -> Any:
        image = Image.open(self.path(idx)).convert("RGB")
        weak = self.transform(image)
        strong = self.transform(image)
        return {"weak": weak, "strong": (strong * 0.9).clamp(-2, 2), "index": idx}


class ClipDataset(LabelFileDataset):
    """Frames of a clip, channels first."""

    def __getitem__(self, idx: int) -> Any:
        places = [min(idx + step, len(self) - 1) for step in range(3)]
        frames = [Image.open(self.path(i)).convert("RGB").resize((32, 24)) for i in places]
        clip = torch.stack([TF.to_tensor(frame) for frame in frames])
        return clip.permute(1, 0, 2, 3), idx


def albumentations(root: Path) -> Any:
    """A well-known library of augmentations on arrays."""
    import albumentations as A  # noqa: N812  as its users know it
    from albumentations.pytorch import ToTensorV2

    steps = [A.RandomCrop(48, 48), A.HorizontalFlip(p=0.5), A.Normalize(), ToTensorV2()]
    compose = A.Compose(steps, seed=1)

    class Albumentations(LabelFileDataset):
        def __getitem__(self, idx: int) -> Any:
            image = np.array(Image.open(self.path(idx)).convert("RGB"))
            return compose(image=image)["image"], idx

    return label_file(Albumentations)(root)


def hugging_face(root: Path) -> Any:
    """A Hugging Face dataset with an Image feature and a transform; it turns photos upright."""
    import datasets

    transform = train_transform()

    def apply(rows: Any) -> Any:
        rows["pixel_values"] = [transform(image.convert("RGB")) for image in rows.pop("image")]
        return rows

    rows = datasets.load_dataset(
        "imagefolder",
        data_dir=str(root / "classes"),
        split="train",
        cache_dir=str(root / "cache"),
    )
    return rows.with_transform(apply)


@dataclass
class Style:
    """A class with what is expected of it.

    Attributes:
        make: the dataset, from the folder of `write_files`.
        tier: what explain() says of an epoch.
        recorded: tensors per sample that are made in native threads; None: it depends.
        options: the loader's.
        keyed: the tier under keyed randomness where it is another.
        needs: a module.
    """

    make: Callable[[Path], Any]
    tier: str
    recorded: float | None = 0
    options: dict[str, Any] = field(default_factory=dict)
    keyed: str | None = None
    needs: str | None = None


def label_file(kind: Any, transform: Any = None) -> Callable[[Path], Any]:
    """A dataset of a class that takes what the tutorial's takes."""

    def make(root: Path) -> Any:
        arguments = str(root / "images"), str(root / "train.txt")
        return kind(*arguments, transform or train_transform())

    return make


def joint_transform() -> Any:
    return v2.Compose(
        [
            v2.RandomHorizontalFlip(),
            v2.Resize((48, 56), antialias=True),
            v2.ToImage(),
            v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
        ]
    )


GRAY = T.Compose([T.Grayscale(), T.Resize((32, 32)), T.ToTensor()])

STYLES: dict[str, Style] = {
    "label file": Style(label_file(LabelFileDataset), "recorded", 1),
    "csv": Style(
        lambda root: CsvDataset(str(root / "train.csv"), str(root / "images"), train_transform()),
        "recorded",
        1,
    ),
    "no convert": Style(label_file(NoConvert, GRAY), "recorded", 1),
    "array segmentation": Style(lambda root: ArraySegmentation(root, Compose(48)), "materialised"),
    "cv2": Style(label_file(Cv2Dataset), "torch", needs="cv2"),
    "two crops": Style(label_file(LabelFileDataset, TwoCrops(train_transform())), "recorded", 2),
    "contrastive pair": Style(label_file(ContrastivePair), "materialised"),
    "segmentation": Style(SegmentationDataset, "recorded", 1),
    "detection": Style(DetectionDataset, "recorded", 1, {"collate_fn": zipped}),
    "nested tensor": Style(DetectionDataset, "materialised", 0, {"collate_fn": nested}),
    "triplets": Style(label_file(TripletDataset), "recorded", 3),
    "multi-label": Style(label_file(MultiLabelDataset), "recorded", 1),
    "store": Style(lambda root: StoreDataset(root, train_transform()), "materialised"),
    "columns": Style(label_file(ColumnsDataset), "recorded", 1),
    "file object": Style(label_file(FileObjectDataset), "recorded", 1),
    "RAM cache": Style(label_file(RamCacheDataset), "recorded", None),
    "folder": Style(
        lambda root: ImageFolder(str(root / "classes"), train_transform()),
        "recorded",
        1,
        keyed="lowered",
    ),
    "folder with paths": Style(
        lambda root: PathFolder(str(root / "classes"), train_transform()), "recorded", 1
    ),
    "folder with a loader": Style(
        lambda root: ImageFolder(str(root / "classes"), train_transform(), loader=bgr_loader),
        "recorded",
        1,
    ),
    "DatasetFolder": Style(
        lambda root: DatasetFolder(str(root / "classes"), bgr_loader, (".jpg",), train_transform()),
        "recorded",
        1,
    ),
    "next on error": Style(label_file(NextOnError), "recorded", 1),
    "None on error": Style(label_file(NoneOnError), "recorded", 1, {"collate_fn": without_none}),
    "wrapped": Style(wrapped, "recorded", 1),
    "stream": Style(lambda root: ShardedStream(root, train_transform()), "materialised"),
    "upright": Style(label_file(UprightDataset), "recorded", 11 / 12),
    "statistics": Style(label_file(StatisticsDataset), "materialised"),
    "tv_tensors": Style(
        lambda root: TvTensorsDataset(root, joint_transform()),
        "recorded",
        1,
        {"collate_fn": zipped},
    ),
    "tiles": Style(label_file(TilesDataset), "materialised"),
    "pyramid": Style(label_file(PyramidDataset), "recorded", 3),
    "thumbnail": Style(label_file(ThumbnailDataset), "torch"),
    "mosaic": Style(label_file(MosaicDataset), "materialised"),
    "verifying": Style(label_file(VerifyingDataset), "recorded", 1),
    "images": Style(label_file(ImagesDataset), "materialised", 0, {"collate_fn": processor}),
    "plain images": Style(label_file(ImagesDataset), "materialised", 0, {"collate_fn": zipped}),
    "arrays in memory": Style(lambda root: ArrayMemoryDataset(root, train_transform()), "torch"),
    "pseudolabels": Style(label_file(Pseudolabels), "materialised", 1),
    "albumentations": Style(albumentations, "materialised", needs="albumentations"),
    "Hugging Face": Style(hugging_face, "recorded", 11 / 12, needs="datasets"),
    "clip": Style(label_file(ClipDataset), "materialised"),
}
