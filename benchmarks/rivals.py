"""Runs one loader over a class folder and prints one JSON line: images/s and CPU per image.

    python benchmarks/rivals.py LOADER WORKLOAD FOLDER [--threads 2] [--images 3000] [--batch 64]

Every loader is set up as its documentation recommends for that many threads, and ends in float32
NCHW with ImageNet's mean and deviation. Only `stoker` and `torch-pil` make the same pixels. The
first epoch warms the page cache and is not counted; as many follow as hold `--images` images.
`loaders.py` runs several in turn; use that for comparisons.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from typing import Any

from measure import cpu_seconds

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
WORKLOADS = {
    "train": "RandomResizedCrop(224), flip",
    "val": "Resize(256), CenterCrop(224)",
    "seed": "Resize((224, 224)), flip",
}
NEEDS = {
    "stoker": "stoker",
    "dali": "nvidia.dali",
    "ffcv": "ffcv",
    "spdl": "spdl.io",
    "torch-v2": "torchvision",
    "torch-cv2": "cv2",
    "torch-pil": "torchvision",
}

Epoch = Callable[[], Iterable[Sized]]


class NotComparableError(Exception):
    """The loader has nothing that does this workload."""


def missing(loader: str) -> str | None:
    """The module that a loader lacks here, or None."""
    module = NEEDS[loader]
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    return None if found else module


def pil_transform(workload: str) -> Callable[[Any], Any]:
    """The workload as users of torchvision write it."""
    from torchvision import transforms

    head = {
        "seed": [transforms.Resize((224, 224)), transforms.RandomHorizontalFlip()],
        "train": [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()],
        "val": [transforms.Resize(256), transforms.CenterCrop(224)],
    }[workload]
    tail = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    made: Callable[[Any], Any] = transforms.Compose(head + tail)
    return made


def _one_torch_thread(_worker: int) -> None:
    import torch

    torch.set_num_threads(1)


def _torch_loader(dataset: Any, options: argparse.Namespace) -> Epoch:
    import torch

    torch.set_num_threads(1)
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        dataset,
        batch_size=options.batch,
        shuffle=True,
        num_workers=options.threads,
        persistent_workers=options.threads > 0,
        worker_init_fn=_one_torch_thread,
    )
    return lambda: (images for images, _ in loader)


def stoker(options: argparse.Namespace) -> Epoch:
    """stoker.DataLoader on torchvision's ImageFolder."""
    from torchvision.datasets import ImageFolder

    import stoker as package

    dataset = ImageFolder(options.folder, pil_transform(options.workload))
    loader = package.DataLoader(
        dataset,
        batch_size=options.batch,
        shuffle=True,
        num_workers=options.threads,
        persistent_workers=True,
    )
    return lambda: (images for images, _ in loader)


def torch_pil(options: argparse.Namespace) -> Epoch:
    """torch's DataLoader on the same dataset and transform."""
    from torchvision.datasets import ImageFolder

    return _torch_loader(ImageFolder(options.folder, pil_transform(options.workload)), options)


def torch_v2(options: argparse.Namespace) -> Epoch:
    """torchvision.io decoding and v2 transforms on tensors: the quickest that torch offers."""
    import torch
    import torchvision
    from torchvision.transforms import v2

    head = {
        "seed": [v2.Resize((224, 224)), v2.RandomHorizontalFlip()],
        "train": [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()],
        "val": [v2.Resize(256), v2.CenterCrop(224)],
    }[options.workload]
    tail = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]

    def read(path: str) -> Any:
        return torchvision.io.decode_image(torchvision.io.read_file(path), mode="RGB")

    transform = v2.Compose(head + tail)
    return _torch_loader(
        torchvision.datasets.ImageFolder(options.folder, transform, loader=read), options
    )


def torch_cv2(options: argparse.Namespace) -> Epoch:
    """OpenCV in a Dataset, with its area filter; other pixels than Pillow's."""
    import cv2
    import torch
    import torchvision

    cv2.setNumThreads(0)
    crop = torchvision.transforms.RandomResizedCrop
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def read(path: str) -> Any:
        return cv2.cvtColor(cv2.imread(path, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)

    def transform(image: Any) -> Any:
        height, width = image.shape[:2]
        if options.workload == "val":
            scale = 256 / min(height, width)
            size = (round(width * scale), round(height * scale))
            image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
            top, left = (image.shape[0] - 224) // 2, (image.shape[1] - 224) // 2
            image = image[top : top + 224, left : left + 224]
        else:
            if options.workload == "train":
                empty = torch.empty(3, height, width)
                top, left, h, w = crop.get_params(empty, (0.08, 1.0), (3 / 4, 4 / 3))
                image = image[top : top + h, left : left + w]
            image = cv2.resize(image, (224, 224), interpolation=cv2.INTER_AREA)
            if torch.rand(()) < 0.5:
                image = image[:, ::-1]
        pixels = torch.from_numpy(image.transpose(2, 0, 1).copy()).float().div_(255)
        return pixels.sub_(mean).div_(std)

    return _torch_loader(
        torchvision.datasets.ImageFolder(options.folder, transform, loader=read), options
    )


def dali(options: argparse.Namespace) -> Epoch:
    """DALI on the CPU, with its fused random-crop decoder for training."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=options.batch,
        num_threads=options.threads,
        device_id=None,
        prefetch_queue_depth=2,
    )
    def build() -> Any:
        files, labels = fn.readers.file(
            file_root=options.folder, random_shuffle=True, name="reader"
        )
        mirror: Any = 0
        if options.workload == "train":
            images = fn.decoders.image_random_crop(
                files,
                device="cpu",
                output_type=types.RGB,
                random_area=[0.08, 1.0],
                random_aspect_ratio=[3 / 4, 4 / 3],
            )
        else:
            images = fn.decoders.image(files, device="cpu", output_type=types.RGB)
        if options.workload == "val":
            images = fn.resize(images, resize_shorter=256, antialias=True)
        else:
            images = fn.resize(images, size=[224, 224], antialias=True)
            mirror = fn.random.coin_flip()
        images = fn.crop_mirror_normalize(
            images,
            crop=(224, 224),
            mean=[value * 255 for value in MEAN],
            std=[value * 255 for value in STD],
            mirror=mirror,
            dtype=types.FLOAT,
        )
        return images, labels

    pipe = build()
    pipe.build()
    batches = -(-pipe.epoch_size("reader") // options.batch)

    def epoch() -> Iterable[Sized]:
        # Its reader goes round, so the last batch is a full one.
        for _ in range(batches):
            yield range(len(pipe.run()[0]))

    return epoch


def ffcv(options: argparse.Namespace) -> Epoch:
    """FFCV on its own file of full-size JPEGs, quality 90, written before the clock starts."""
    if options.workload == "seed":
        raise NotComparableError("ffcv has no decoder for a plain Resize")
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import (
        CenterCropRGBImageDecoder,
        RandomResizedCropRGBImageDecoder,
    )
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import (
        NormalizeImage,
        RandomHorizontalFlip,
        Squeeze,
        ToTensor,
        ToTorchImage,
    )
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    path = Path(tempfile.gettempdir(), f"stoker-bench-{Path(options.folder).resolve().name}.beton")
    if not path.exists():
        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
        writer = DatasetWriter(str(path), fields, num_workers=options.threads)
        writer.from_indexed_dataset(ImageFolder(options.folder))
    if options.workload == "train":
        image = [RandomResizedCropRGBImageDecoder((224, 224)), RandomHorizontalFlip()]
    else:
        image = [CenterCropRGBImageDecoder((224, 224), ratio=224 / 256)]
    mean, std = np.array(MEAN) * 255, np.array(STD) * 255
    image += [NormalizeImage(mean, std, np.float32), ToTensor(), ToTorchImage()]
    loader = Loader(
        str(path),
        batch_size=options.batch,
        num_workers=options.threads,
        order=OrderOption.RANDOM,
        os_cache=True,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor(), Squeeze()]},
    )
    return lambda: (images for images, _ in loader)


def spdl(options: argparse.Namespace) -> Epoch:
    """SPDL's threads over FFmpeg's decoder and scaler, uint8 to float left out."""
    if options.workload != "seed":
        raise NotComparableError("written for the seed workload only")
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    files = [str(path) for path in sorted(Path(options.folder).glob("*/*"))]
    scale = spdl.io.get_video_filter_desc(scale_width=224, scale_height=224, pix_fmt="rgb24")

    def decode(paths: list[str]) -> Any:
        frames = [
            spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=scale) for path in paths
        ]
        return spdl.io.to_torch(spdl.io.convert_frames(frames))

    # Here an error is seen; within the pipeline it would only mean fewer images.
    decode(files[:1])

    def epoch() -> Iterable[Sized]:
        random.shuffle(files)
        batches = [files[i : i + options.batch] for i in range(0, len(files), options.batch)]
        builder = PipelineBuilder().add_source(batches)
        builder = builder.pipe(decode, concurrency=options.threads).add_sink(3)
        pipeline = builder.build(num_threads=options.threads)
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


LOADERS: dict[str, Callable[[argparse.Namespace], Epoch]] = {
    "stoker": stoker,
    "dali": dali,
    "ffcv": ffcv,
    "spdl": spdl,
    "torch-v2": torch_v2,
    "torch-cv2": torch_cv2,
    "torch-pil": torch_pil,
}


def main() -> None:
    """Command line."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loader", choices=list(LOADERS))
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=3000, help="to count, in whole epochs")
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()

    # The time to the first batch leaves the imports out.
    for module in ("torchvision", NEEDS[options.loader]):
        importlib.import_module(module)
    begun = time.perf_counter()
    epoch = LOADERS[options.loader](options)
    rates: list[float] = []
    cpus: list[float] = []
    first, counted, warm = 0.0, 0, False
    while counted < options.images:
        start, cpu, images = time.perf_counter(), cpu_seconds(), 0
        for batch in epoch():
            first = first or time.perf_counter() - begun
            images += len(batch)
        if images == 0:
            raise SystemExit(f"{options.loader} gave no images")
        if warm:
            counted += images
            rates.append(images / (time.perf_counter() - start))
            cpus.append((cpu_seconds() - cpu) / images * 1e3)
        warm = True
    row = {
        "loader": options.loader,
        "workload": options.workload,
        "threads": options.threads,
        "images_per_second": round(statistics.median(rates), 1),
        "cpu_ms_per_image": round(statistics.median(cpus), 3),
        "first_batch_seconds": round(first, 2),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
