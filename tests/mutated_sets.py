"""Opens mutated copies of a set, and reads them: whatever is in them, only some errors may come.

    python tests/mutated_sets.py SET --first 0 --inputs 1000 [--shards '*.tar']

Prints what went wrong with which input, which has the same bytes each time. Exit status 1 then.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import stoker
from stoker import cache

SECONDS = 20
MOST_BYTES = 1 << 30
"""What an input may take beyond what Python with torch takes; mutations must not ask for more."""

NUMBERS = [
    b"\0",
    b"\xff",
    b"\x7f",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\0" * 8,
    b"\0\0\0\x80",
    b"\x80" * 10,
]


def mutated(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Some bytes with one to eight things changed: bits, numbers, pieces, ends."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        if not changed:
            break
        # What describes the data lies at the ends and is small.
        span = rng.choice([64, 512, 4096, len(changed)])
        at = min(rng.randrange(span), len(changed) - 1)
        if rng.random() < 0.4:
            at = len(changed) - 1 - at
        kind = rng.randrange(7)
        if kind == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            number = rng.choice(NUMBERS)
            changed[at : at + len(number)] = number
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            del changed[at : at + rng.choice([1, 4, 100, 5000])]
        elif kind == 4:
            changed[at:at] = rng.randbytes(rng.choice([1, 4, 100]))
        elif kind == 5:
            other = rng.choice(others)
            begin = rng.randrange(max(1, len(other)))
            piece = other[begin : begin + rng.choice([4, 100, 5000])]
            changed[at : at + len(piece)] = piece
        else:
            value = rng.choice([0, 1, 2, 127, 255, 65535, 1 << 31, (1 << 32) - 1, 1 << 62])
            size = rng.choice([1, 2, 4, 8])
            number = (value % (1 << 8 * size)).to_bytes(size, rng.choice(["little", "big"]))
            changed[at : at + size] = number
    return bytes(changed)


def read(dataset: Any) -> int:
    """Reads every sample's bytes and decodes some; returns how many could be read."""
    sound = 0
    for row in range(min(len(dataset), 200)):
        # Images may be damaged, of course, and then say so.
        with suppress(stoker.DecodeError, OSError, ValueError):
            with dataset.files.opened(row) as file:
                file.read()
            sound += 1
        with suppress(stoker.DecodeError):
            dataset[row]
    return sound


def try_input(original: Path, place: Path, pattern: str, number: int) -> str | None:
    """Opens and reads an input; what must not have happened, or None."""
    rng = random.Random(number)
    shutil.rmtree(place, ignore_errors=True)
    target = place / original.name
    if original.is_dir():
        shutil.copytree(original, target)
        files = sorted(path for path in target.rglob("*") if path.is_file())
    else:
        place.mkdir()
        shutil.copyfile(original, target)
        files = [target]
    victim = rng.choice(files)
    others = [path.read_bytes() for path in files]
    victim.write_bytes(mutated(victim.read_bytes(), rng, others))
    signal.alarm(SECONDS)
    try:
        damaged = rng.choice(["raise", "skip"])
        path = str(target / pattern) if pattern else str(target)
        with suppress(stoker.SourceError):
            try:
                dataset = stoker.open(path, damaged=damaged)
            except ValueError as error:
                if "says nothing to" not in str(error):
                    raise
                dataset = stoker.open(path)  # it was taken for a format without damage to skip
            read(dataset)
        return None
    except BaseException:  # noqa: BLE001  whatever it is, it is what we are looking for
        return f"input {number}, {victim.relative_to(place)}:\n{traceback.format_exc()}"
    finally:
        signal.alarm(0)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("set", type=Path)
    parser.add_argument("--shards", default="", help="pattern of what is opened in it")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=1000)
    options = parser.parse_args()

    def late(*_: object) -> None:
        raise TimeoutError(f"{SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    warnings.simplefilter("ignore")
    stoker.open(options.set / options.shards if options.shards else options.set)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MOST_BYTES, in_use + MOST_BYTES))
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        cache.place = lambda name: Path(folder, "cache") / name
        for number in range(options.first, options.first + options.inputs):
            told = try_input(options.set, Path(folder, "input"), options.shards, number)
            if told is not None:
                print(told)
                wrong += 1
            written = {path.name for path in Path(folder).iterdir()}
            if not written <= {"cache", "input"}:
                print(f"input {number} wrote {written}")
                wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
