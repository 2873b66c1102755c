"""Does `stoker diagnose` find planted bottlenecks, and does what it advises gain what it predicts?

    python benchmarks/diagnose.py FOLDER --rounds 3

For each planted bottleneck: the verdict, the first action that is applied here, its predicted gain,
and the gain that a loader has after it was applied, over epochs of the whole set, before and after
in turn. Slow storage and the CPU quota are planted with cgroups (version 1), which needs root; a
case that cannot be planted is left out.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.transforms as T
from PIL import Image

import stoker
from measure import arguments, header, note, write
from stoker import ceilings
from stoker.ceilings import Effort
from stoker.machine import most_workers
from stoker.pack import pack
from stoker.shrink import Shrink
from stoker.verdict import Figure, judge

CROP = T.RandomResizedCrop(224)
TAIL = [
    T.RandomHorizontalFlip(),
    T.ToTensor(),
    T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
]
TRAIN = T.Compose([CROP, *TAIL])
BATCH = 32


def slow(image: Any) -> Any:
    """A step in Python that takes 10 ms of CPU."""
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        pass
    return image


@contextmanager
def cgroup(controller: str, settings: dict[str, str]) -> Iterator[None]:
    """This process in a cgroup of version 1 of its own.

    Raises:
        OSError: that cannot be had here.
    """
    root = Path("/sys/fs/cgroup") / controller
    place = root / "stoker-diagnose"
    place.mkdir()
    try:
        for name, value in settings.items():
            (place / name).write_text(value)
        (place / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        place.rmdir()


def throttled_disk(folder: Path) -> Any:
    """A disk of ``folder`` that reads 400 times a second."""
    device = os.stat(folder).st_dev
    limit = f"{os.major(device)}:{os.minor(device)} 400"
    return cgroup("blkio", {"blkio.throttle.read_iops_device": limit})


def quota() -> Any:
    """Half a core."""
    return cgroup("cpu", {"cpu.cfs_quota_us": "50000"})


@dataclass
class Case:
    """A planted bottleneck.

    Attributes:
        name: what is planted.
        dataset: on which.
        threads: with how many.
        action: what is applied.
        after: the dataset then, and how many threads.
        planted: in which surroundings the loader runs before.
        step_seconds: what a step takes.
        cold: the bytes are dropped from the page cache before each epoch, before the action.
        theirs: before, torch's own loader.
    """

    name: str
    dataset: Any
    threads: int
    action: str
    after: tuple[Any, int]
    planted: Callable[[], Any] = nullcontext
    step_seconds: float = 0.0
    cold: bool = False
    theirs: bool = False


def rate(case: Case, dataset: Any, threads: int, cold: bool, theirs: bool) -> float:
    """Images/s of an epoch; the loader is made anew, and a first batch is not timed."""
    kind: Any = torch.utils.data.DataLoader if theirs else stoker.DataLoader
    loader = kind(dataset, BATCH, shuffle=True, num_workers=threads, drop_last=True)
    if cold:
        for folder in {Path(dataset.files.path(0)).parents[1]}:
            drop(folder)
    images, begun = 0, time.perf_counter()
    for number, (pictures, _) in enumerate(loader):
        if number == 0:
            begun = time.perf_counter()
            continue
        images += len(pictures)
        if case.step_seconds:
            time.sleep(case.step_seconds)
    return images / (time.perf_counter() - begun)


def drop(folder: Path) -> None:
    """Has the kernel forget the bytes of all files."""
    for path in folder.rglob("*.*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def copied(folder: Path, target: Path, images: int, longer: int | None) -> Any:
    """A class folder of copies of photos, scaled up on request."""
    photos = sorted(path for path in folder.rglob("*") if path.is_file())
    for number in range(images):
        photo = photos[number % len(photos)]
        place = target / photo.parent.name / f"{number:05}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        if longer is None:
            place.write_bytes(photo.read_bytes())
            continue
        with Image.open(photo) as image:
            scale = longer / max(image.size)
            size = round(image.width * scale), round(image.height * scale)
            image.convert("RGB").resize(size).save(place, quality=90)
    return stoker.ImageFolder(target, TRAIN)


def cases(folder: Path, place: Path) -> list[Case]:
    """What is planted, each with a remedy."""
    cores = most_workers()
    plain = copied(folder, place / "plain", 600, None)
    big = copied(folder, place / "big", 300, 1600)
    pack(big, place / "small" / "a.tar", shrink=Shrink(shorter=256))
    small = stoker.open(place / "small" / "a.tar", TRAIN)
    with_slow = stoker.ImageFolder(place / "plain", T.Compose([slow, CROP, *TAIL]))
    return [
        Case("too few threads", plain, 1, "threads", (plain, cores)),
        Case("photos of 1,600 px", big, cores, "smaller", (small, cores)),
        Case("a step in Python of 10 ms", with_slow, cores, "stock", (plain, cores)),
        Case("torch's loader", plain, cores, "stoker", (plain, cores), theirs=True),
        Case("a step of 50 ms", plain, cores, "", (plain, cores), step_seconds=0.05),
        Case("a quota of half a core", plain, cores, "quota", (plain, cores), quota),
        Case(
            "a disk of 400 reads a second",
            plain,
            cores,
            "cache",
            (plain, cores),
            lambda: throttled_disk(place),
            cold=True,
        ),
    ]


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """The verdict of a case, and what its action gains in fact.

    Raises:
        OSError: it cannot be planted here.
    """
    with case.planted():
        found, system = ceilings.measure(
            case.dataset,
            threads=case.threads,
            batch_size=BATCH,
            theirs=case.theirs,
            stays_cached=not case.cold,
            effort=Effort(0.5, 5),
        )
    if case.step_seconds:
        consumer = BATCH / case.step_seconds
        found = replace(found, consumer=Figure(consumer, consumer, consumer))
    judged = judge(found, system)
    before, after = list[float](), list[float]()
    dataset, threads = case.after
    for _ in range(rounds):
        with case.planted():
            before.append(rate(case, case.dataset, case.threads, case.cold, case.theirs))
        after.append(rate(case, dataset, threads, False, False))
    action = next((one for one in judged.actions if one.name == case.action), None)
    return {
        "case": case.name,
        "stage": judged.stage,
        "sentence": judged.sentence,
        "action": "nothing" if action is None else action.what,
        "predicted_gain": 1.0 if action is None else round(action.gain, 2),
        "measured_gain": round(
            statistics.median(b / a for a, b in zip(before, after, strict=True)), 2
        ),
        "before_images_per_second": round(statistics.median(before)),
        "after_images_per_second": round(statistics.median(after)),
    }


def main() -> None:
    """Command line."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    np.random.seed(0)
    with tempfile.TemporaryDirectory(prefix="stoker-diagnose-", dir=".") as place:
        for case in cases(Path(options.folder), Path(place).resolve()):
            try:
                row = measure(case, options.rounds)
            except OSError as error:
                note(f"{case.name} is left out: {error}")
                continue
            rows.append(row)
            gains = f"predicted {row['predicted_gain']}x, measured {row['measured_gain']}x"
            note(f"{case.name}: {row['stage']}, {gains}: {row['sentence']}")
    write(options.output, [{**header("diagnose", options), "rounds": options.rounds}, *rows])


if __name__ == "__main__":
    main()
