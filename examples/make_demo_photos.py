"""Makes 2,000 JPEGs of about 500x375 with a label file, from photos that PyPI packages ship.

    python examples/make_demo_photos.py demo-photos

writes `demo-photos/images/*.jpg` and `demo-photos/labels.txt` ("name label" a line). Each image is
a random crop of one of fourteen real photos that scikit-image and scikit-learn bring along,
mirrored half of the time and scaled; its label says which photo. The same seed gives the same
files. A folder that already holds the wanted set is left as it is.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

PHOTOS = {
    "skimage.data": [
        "astronaut.png",
        "brick.png",
        "camera.png",
        "chelsea.png",
        "coffee.png",
        "coins.png",
        "grass.png",
        "gravel.png",
        "hubble_deep_field.jpg",
        "motorcycle_left.png",
        "moon.png",
        "rocket.jpg",
    ],
    "sklearn.datasets.images": ["china.jpg", "flower.jpg"],
}


def load_photos() -> dict[str, Image.Image]:
    """The source photos by name, as RGB."""
    photos = {}
    for package, names in PHOTOS.items():
        folder = importlib.resources.files(package)
        for name in names:
            with (folder / name).open("rb") as file, Image.open(file) as image:
                photos[Path(name).stem] = image.convert("RGB")
    return photos


def cut(photo: Image.Image, rng: random.Random) -> Image.Image:
    """A random part of `photo`, upright or lying, mirrored half of the time, about 500x375."""
    width, height = (500, 375) if rng.random() < 0.75 else (375, 500)
    width, height = width + rng.randint(-20, 20), height + rng.randint(-20, 20)
    # The largest window of this shape, or down to half of its sides.
    fit = min(photo.width / width, photo.height / height) * rng.uniform(0.5, 1)
    window = round(width * fit), round(height * fit)
    left, top = (
        rng.randint(0, photo.width - window[0]),
        rng.randint(0, photo.height - window[1]),
    )
    box = (left, top, left + window[0], top + window[1])
    image = photo.resize((width, height), Image.Resampling.BICUBIC, box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image


def make(folder: Path, count: int, seed: int) -> None:
    """Writes the set into `folder`, whole or not at all."""
    photos = load_photos()
    names = sorted(photos)
    # Labels in random order, as in a set that somebody collected.
    rng = random.Random(seed)
    labels = [number % len(names) for number in range(count)]
    rng.shuffle(labels)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "images").mkdir(parents=True)

    def write(number: int) -> str:
        own = random.Random(seed * count + number)
        label = labels[number]
        name = f"{names[label]}_{number:05d}.jpg"
        image = cut(photos[names[label]], own)
        image.save(partial / "images" / name, quality=own.randint(85, 95))
        return f"{name} {label}\n"

    # Pillow scales and encodes without the interpreter's lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        lines = list(pool.map(write, range(count)))
    (partial / "labels.txt").write_text("".join(lines), encoding="utf-8")
    (partial / "made.json").write_text(json.dumps({"count": count, "seed": seed, "names": names}))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def link_classes(folder: Path, classes: Path) -> None:
    """Makes the same images reachable as `classes/<photo>/<image>`, by links."""
    for image in sorted((folder / "images").iterdir()):
        place = classes / image.name.rsplit("_", 1)[0]
        place.mkdir(parents=True, exist_ok=True)
        if not (place / image.name).exists():
            (place / image.name).symlink_to(image.resolve())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--class-folders", type=Path, help="also link the images into one subfolder per label here"
    )
    options = parser.parse_args()
    made = options.folder / "made.json"
    wanted = {"count": options.count, "seed": options.seed}
    if made.exists() and wanted.items() <= json.loads(made.read_text()).items():
        print(f"{options.folder} is there already")
    elif options.folder.exists() and not made.exists():
        sys.exit(f"error: {options.folder} exists and was not made by this script; name another")
    else:
        make(options.folder, options.count, options.seed)
        print(f"{options.count} photos in {options.folder}/images, labels in labels.txt")
    if options.class_folders:
        link_classes(options.folder, options.class_folders)


if __name__ == "__main__":
    main()
