"""Images in a tree with a folder for each class, as torchvision's ImageFolder reads it.

Classes are the folders in the root, sorted; links to folders count. The samples of a class are all
files below its folder with an image's extension, in torchvision's order: sorted by folder, then by
name. A link that leads back to a folder it lies in is not followed, with a warning (torchvision
follows it some forty times).

Note [Kept listings]
    A listing of many files is kept in the cache folder, under a hash of the root's path and the
    extensions. It holds the times of all folders and serves as long as they are the same: adding,
    removing or renaming anything changes the times of its folder. It isn't kept when a folder was
    changed in the two seconds before, as a further change could then leave the times as they are.
    On disk it is, little-endian: ``_MAGIC``; six uint64, the sizes of ``_Listing``'s parts in
    bytes; the parts; a BLAKE2b of 16 bytes over all that. The texts in a part are told apart by
    zero bytes, which names can't hold.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker import cache as kept
from stoker.errors import SourceError
from stoker.sources.index import IMAGE_EXTENSIONS, Files, Images, Samples, warn

_MAGIC = b"stoker listing 1"
_DIGEST_BYTES = 16
_SETTLED_SECONDS = 2
_SILENT_SECONDS = 2
_THREADS = 8


class ImageFolder(Images):
    """A map-style dataset of the images in a tree with a folder for each class.

    Args:
        root: the folder of the classes' folders.
        transform: called with each image, a PIL image in mode RGB.
        target_transform: called with each label, the index of the class.
        extensions: what files end with, in lower case, to be taken for images.
        allow_empty: accept classes without images.
        exif: turn images as their EXIF orientation says; off, as in torchvision.
        max_pixels: an image of more raises DecodeError instead of being decoded.
        max_bytes: a file of more raises DecodeError instead of being read.
        cache: keep the listing between runs; see Note [Kept listings].

    Attributes:
        classes: names of the classes, sorted.
        class_to_idx: class name to label.

    Raises:
        SourceError: there are no classes or, unless ``allow_empty``, some have no images.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        extensions: tuple[str, ...] = IMAGE_EXTENSIONS,
        allow_empty: bool = False,
        exif: bool = False,
        max_pixels: int | None = None,
        max_bytes: int | None = None,
        cache: bool = True,
    ) -> None:
        if not isinstance(cache, bool):
            raise ValueError(f"cache must be True or False, as a folder is no shard, got {cache!r}")
        self.root = os.path.expanduser(os.fspath(root))
        self.extensions = extensions
        listing, told = _list(self.root, tuple(extensions), cache)
        self.classes = listing.class_names()
        self.class_to_idx = {name: label for label, name in enumerate(self.classes)}
        empty = [name for name, n in zip(self.classes, listing.counts, strict=True) if not n]
        if empty and not allow_empty:
            shown = ", ".join(map(repr, empty[:20])) + ", ..." * (len(empty) > 20)
            raise SourceError(
                self.root,
                f"no image ({', '.join(extensions)}) in the folder of {len(empty):,} of "
                f"{len(self.classes):,} classes: {shown}; allow_empty=True accepts that",
            )
        labels = np.repeat(np.arange(len(self.classes)), listing.counts)
        super().__init__(
            Files(
                os.path.join(self.root, ""),
                listing.names,
                listing.offsets,
                labels,
                exif,
                max_pixels,
                max_bytes,
            ),
            transform,
            target_transform,
        )
        for warning in told:
            warn(f"{self.root}: {warning}")

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """The (path, label) pairs; a view. Others may be assigned, a list or a slice of a view."""
        return Samples(self.files)

    @samples.setter
    def samples(self, samples: Sequence[tuple[str, int]]) -> None:
        if isinstance(samples, Samples):
            self.files = samples.files
            return
        new = Files.from_paths([path for path, _ in samples], [label for _, label in samples])
        self.files = replace(
            self.files, root=new.root, names=new.names, offsets=new.offsets, labels=new.labels
        )

    @property
    def imgs(self) -> Sequence[tuple[str, int]]:
        """As ``samples``."""
        return self.samples


@dataclass(frozen=True)
class _Listing:
    """What is in a tree of class folders.

    Attributes:
        counts: samples of each class, int64.
        offsets: where each name in ``names`` begins and, one longer, ends, uint64.
        times: when each folder's content and attributes changed, ns, int64, two for each.
        names: the samples' paths relative to the root, one after the other, uint8.
        classes: names of the classes, encoded, each with a final zero byte.
        folders: the root, which is an empty text, and all folders below, encoded likewise.
    """

    counts: NDArray[np.int64]
    offsets: NDArray[np.uint64]
    times: NDArray[np.int64]
    names: NDArray[np.uint8]
    classes: bytes
    folders: bytes

    def class_names(self) -> list[str]:
        """The names of the classes."""
        return [os.fsdecode(name) for name in self.classes.split(b"\0")[:-1]]


def recognises(path: str, _: bytes) -> bool:
    """Whether there is a folder."""
    return os.path.isdir(path)


def _list(root: str, extensions: tuple[str, ...], cache: bool) -> tuple[_Listing, list[str]]:
    """The listing of a tree, from the cache if that is still right, and warnings about it."""
    identity = "\0".join([os.path.abspath(root), *extensions])
    name = f"listings/{hashlib.blake2b(os.fsencode(identity), digest_size=16).hexdigest()}"
    if cache and (data := kept.load(name)) is not None:
        listing = _unpacked(data)
        if listing is not None and _is_current(listing, root):
            return listing, []
    started = time.time_ns()
    listing, told = _Walk(root, extensions).run()
    settled = started - int(_SETTLED_SECONDS * 1e9)
    if cache and not told and int(listing.times.max()) < settled:
        kept.store(name, _packed(listing))
    return listing, told


# Walking


@dataclass
class _Class:
    """The samples and folders of one class: paths relative to the root, encoded, in order."""

    names: bytes
    lengths: NDArray[np.int64]
    folders: list[bytes]
    times: list[tuple[int, int]]


class _Walk:
    """One listing of a tree; threads list a class each."""

    def __init__(self, root: str, extensions: tuple[str, ...]) -> None:
        self.root, self.extensions = root, extensions
        self.told: list[str] = []
        self.found = 0
        self._counting = threading.Lock()

    def run(self) -> tuple[_Listing, list[str]]:
        """The listing, and warnings about what was left out."""
        try:
            status = os.stat(self.root)
            with os.scandir(self.root) as entries:
                classes = sorted(entry.name for entry in entries if _is_folder(entry))
        except OSError as error:
            raise SourceError(self.root, error.strerror or str(error)) from error
        if not classes:
            why = "has no folders, of which each would be a class"
            raise SourceError(self.root, f"{why}; with a label file, use stoker.ImageDataset")
        with ThreadPoolExecutor(_THREADS, "stoker-listing") as pool:
            above = [(status.st_dev, status.st_ino)]
            jobs = [pool.submit(self._class, name, above) for name in classes]
            try:
                self._show_progress(jobs)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            done = [job.result() for job in jobs]
        lengths = np.concatenate([one.lengths for one in done])
        offsets = np.zeros(len(lengths) + 1, np.uint64)
        np.cumsum(lengths, out=offsets[1:])
        folders = [b"", *(folder for one in done for folder in one.folders)]
        times = [_times(status), *(pair for one in done for pair in one.times)]
        listing = _Listing(
            np.array([len(one.lengths) for one in done], np.int64),
            offsets,
            np.array(times, np.int64).ravel(),
            np.frombuffer(b"".join(one.names for one in done), np.uint8),
            b"".join(os.fsencode(name) + b"\0" for name in classes),
            b"".join(folder + b"\0" for folder in folders),
        )
        return listing, sorted(self.told)

    def _class(self, name: str, above: list[tuple[int, int]]) -> _Class:
        """Lists one class; ``above`` are device and inode of the folders that it lies in."""
        found: dict[str, list[str]] = {}
        times: dict[str, tuple[int, int]] = {}
        waiting = [(name, above)]
        while waiting:
            folder, above = waiting.pop()
            path = os.path.join(self.root, folder)
            try:
                status = os.stat(path)
                here = (status.st_dev, status.st_ino)
                if here in above:
                    self.told.append(f"{folder!r} leads back to a folder it lies in: not followed")
                    continue
                with os.scandir(path) as entries:
                    files = found[folder] = []
                    times[folder] = _times(status)
                    for entry in entries:
                        if _is_folder(entry):
                            waiting.append((f"{folder}/{entry.name}", [*above, here]))
                        elif entry.name.lower().endswith(self.extensions):
                            files.append(entry.name)
            except OSError as error:
                self.told.append(f"{folder!r} can't be listed and is left out: {error.strerror}")
            else:
                with self._counting:
                    self.found += len(files)
        order = sorted(found)
        encoded = [os.fsencode(f"{at}/{file}") for at in order for file in sorted(found[at])]
        return _Class(
            b"".join(encoded),
            np.fromiter(map(len, encoded), np.int64, len(encoded)),
            [os.fsencode(folder) for folder in times],
            list(times.values()),
        )

    def _show_progress(self, jobs: list[Future[_Class]]) -> None:
        """Waits for ``jobs``; on a terminal, shows how far they are once that takes long."""
        left = set(jobs)
        _, left = wait_for(left, _SILENT_SECONDS)
        if not left or not sys.stderr.isatty():
            wait_for(left)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("Listing: {task.fields[images]:,} images"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("classes"),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=len(jobs), images=self.found)
            while left:
                _, left = wait_for(left, 0.2)
                progress.update(task, completed=len(jobs) - len(left), images=self.found)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one; else it is a file, as in os.walk."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _times(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_ctime_ns


# Keeping


def _packed(listing: _Listing) -> list[bytes | memoryview]:
    """A listing as Note [Kept listings] describes it."""
    parts = [_bytes_of(getattr(listing, field.name)) for field in fields(listing)]
    head = _MAGIC + struct.pack(f"<{len(parts)}Q", *map(len, parts))
    digest = hashlib.blake2b(head, digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return [head, *parts, digest.digest()]


def _bytes_of(part: NDArray[Any] | bytes) -> bytes | memoryview:
    if isinstance(part, bytes):
        return part
    little = part.astype(part.dtype.newbyteorder("<"), copy=False)
    return little.tobytes()


def _unpacked(data: bytes) -> _Listing | None:
    """The listing in ``data``, whose arrays are views of it; None if anything about it is odd."""
    head = len(_MAGIC) + 8 * len(fields(_Listing))
    if len(data) < head + _DIGEST_BYTES or not data.startswith(_MAGIC):
        return None
    sizes = struct.unpack_from(f"<{len(fields(_Listing))}Q", data, len(_MAGIC))
    whole = memoryview(data)[:-_DIGEST_BYTES]
    if head + sum(sizes) != len(whole) or any(size % 8 for size in sizes[:3]):
        return None
    if hashlib.blake2b(whole, digest_size=_DIGEST_BYTES).digest() != data[-_DIGEST_BYTES:]:
        return None
    parts, at = [], head
    for size in sizes:
        parts.append(whole[at : at + size])
        at += size
    listing = _Listing(
        np.frombuffer(parts[0], "<i8"),
        np.frombuffer(parts[1], "<u8"),
        np.frombuffer(parts[2], "<i8"),
        np.frombuffer(parts[3], np.uint8),
        bytes(parts[4]),
        bytes(parts[5]),
    )
    return listing if _is_sound(listing) else None


def _is_sound(listing: _Listing) -> bool:
    """Whether the parts fit each other and no path leads out of the root."""
    counts, offsets, names = listing.counts, listing.offsets, listing.names
    classes, folders = listing.classes.split(b"\0"), listing.folders.split(b"\0")
    if classes.pop() or folders.pop() or not classes or folders[:1] != [b""]:
        return False
    fits = (
        len(counts) == len(classes)
        and len(listing.times) == 2 * len(folders)
        and len(offsets) > 0
        and int(counts.min()) >= 0
        and int(counts.max()) < len(offsets)
        and int(counts.sum()) == len(offsets) - 1
        and int(offsets[0]) == 0
        and int(offsets[-1]) == len(names)
        and bool((offsets[1:] > offsets[:-1]).all())
        and bool(names.all())
    )
    if not fits:
        return False
    # Every name is "class/...": that also keeps absolute paths out.
    begins = np.concatenate([[0], np.cumsum(counts)])
    for name, begin, end in zip(classes, begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        prefix = name + b"/"
        starts = offsets[begin:end].astype(np.int64)
        lengths = offsets[begin + 1 : end + 1] - offsets[begin:end]
        if end > begin and int(lengths.min()) <= len(prefix):
            return False
        if any((names[starts + place] != byte).any() for place, byte in enumerate(prefix)):
            return False
    detours = [b"/" + text + b"/" for text in (*classes, *folders)]
    whole = names.tobytes()
    return not any(b"/../" in text for text in detours) and b"/../" not in whole


def _is_current(listing: _Listing, root: str) -> bool:
    """Whether all folders of a listing have the times they had."""
    folders = [os.fsdecode(folder) for folder in listing.folders.split(b"\0")[:-1]]
    times = listing.times.reshape(-1, 2).tolist()

    def same(pair: tuple[str, list[int]]) -> bool:
        try:
            return list(_times(os.stat(os.path.join(root, pair[0])))) == pair[1]
        except (OSError, ValueError):
            return False

    with ThreadPoolExecutor(_THREADS, "stoker-listing") as pool:
        return all(pool.map(same, zip(folders, times, strict=True)))
