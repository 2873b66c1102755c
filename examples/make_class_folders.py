"""Makes a small data set to try a training on: coloured noise, four classes, train and val.

python examples/make_class_folders.py FOLDER
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from PIL import Image

IMAGES = {"train": 64, "val": 16}  # of each class
COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0), "white": (255, 255, 255)}


def main(folder: Path) -> None:
    """Writes FOLDER/train and FOLDER/val, class folders of JPEGs."""
    draws = random.Random(0)
    for part, images in IMAGES.items():
        for name, colour in COLOURS.items():
            place = folder / part / name
            place.mkdir(parents=True, exist_ok=True)
            for number in range(images):
                size = draws.randint(200, 400), draws.randint(200, 400)
                noise = Image.effect_noise(size, 80).convert("RGB")
                Image.blend(noise, Image.new("RGB", size, colour), 0.3).save(
                    place / f"{number:03d}.jpg"
                )
    total = len(COLOURS) * sum(IMAGES.values())
    print(f"{total} images below {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
