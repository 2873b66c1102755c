"""Shards at URLs: which objects a pattern stands for, and the dataset of their copies.

Note [Opening at a URL]
    All shards are copied to the cache folder first, so that what reads local shards reads these. A
    URL that is no object may be a folder: one with ``index.json`` is MDS shards, those that the
    index names; one with ``data.mdb`` is an LMDB environment. Images that are objects of their own
    are not read: a request for each costs too much, in time and with most stores in money.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

from stoker.copies import Copies
from stoker.errors import SourceError
from stoker.sources.index import Images, warn
from stoker.sources.shards import MOST_SHARDS, expanded
from stoker.storage import Store, is_remote
from stoker.transport import Object, shown

_THREADS = 16
_LARGEST_INDEX = 1 << 30


def is_url(path: object) -> bool:
    """Whether a path, or one of several, is a URL."""
    if isinstance(path, Sequence) and not isinstance(path, str):
        return any(map(is_remote, path))
    return is_remote(path)


Copy = Callable[..., Copies]
"""Copies of objects; after a comma, whether they are a group."""

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def opened(
    path: Paths,
    options: Mapping[str, Any],
    limit: int | None,
    ranged: bool,
    make: Callable[[str | list[str]], Images],
) -> Images:
    """The dataset that ``make`` makes of the copies of what is at URLs.

    Args:
        path: a URL or several, or patterns of them.
        options: fsspec's.
        limit: bytes that the cache may have; None leaves a part of the disk free.
        ranged: read samples from the objects.
        make: makes the dataset of one local path, or of several.

    Raises:
        SourceError: an object cannot be had, or is no shard.
    """
    patterns = [path] if isinstance(path, str | os.PathLike) else list(path)
    urls = [os.fspath(pattern) for pattern in patterns]
    schemes = {url.partition("://")[0].lower() for url in urls if is_remote(url)}
    if len(schemes) != 1 or not all(map(is_remote, urls)):
        raise ValueError(f"several kinds of places: {', '.join(shown(url) for url in urls[:5])}")
    store = Store(schemes.pop(), options)

    def copy(things: Sequence[Object], group: bool = False) -> Copies:
        return Copies(store, things, group, limit, ranged)

    single = isinstance(path, str | os.PathLike) and not _is_pattern(urls[0])
    copies, local = _copied(store, urls, single, copy)
    shards, names = copies.paths, copies.urls
    places = {**dict(zip(shards, names, strict=True)), os.path.dirname(shards[0]): _above(names[0])}

    def told(text: str) -> str:
        # A copy's path holds its folder's, which is in places too, so it comes first.
        for at in shards if any(folder in text for folder in places) else ():
            text = text.replace(at, places[at])
        return text.replace(os.path.dirname(shards[0]), _above(names[0]))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            images = make(local)
        except SourceError as error:
            raise SourceError(told(error.path), told(error.reason)) from error.__cause__
    for warning in caught:
        warn(told(str(warning.message)))
    files = images.files
    if files.extents is None:
        raise SourceError(
            names[0],
            "is not in shards: its images would be objects of their own. Write shards of "
            "them with stoker pack, and copy those there",
        )
    places_of = files.extents.shards
    if ranged and not all(places_of.path(row) in copies for row in range(len(places_of))):
        raise SourceError(names[0], "is expanded, so it has no ranges: leave remote='ranges' out")
    if hasattr(images, "shards"):
        images.shards = [told(shard) for shard in images.shards]
    images.files = replace(files, extents=replace(files.extents, copies=copies))
    return images


def _above(url: str) -> str:
    return url.rpartition("/")[0]


def _is_pattern(url: str) -> bool:
    name = url.partition("?versionId=")[0]
    if url.lower().startswith(("http:", "https:")):  # where ? begins a query
        return "*" in name or "{" in name
    return any(sign in name for sign in "*?[{")


def _copied(
    store: Store, urls: list[str], single: bool, copy: Copy
) -> tuple[Copies, str | list[str]]:
    """The copies of what URLs stand for, and what of them is to be opened."""
    if single:
        url = urls[0].rstrip("/")
        try:
            if url == urls[0]:
                thing = store.look_up(url)
                copies = copy([thing])
                return copies, copies.paths[0]
        except SourceError as error:
            if not _is_absent(error):
                raise
        return _folder(store, url, copy)
    found: list[str] = []
    for pattern in urls:
        for url in islice(expanded(pattern), MOST_SHARDS + 1):
            fitting = store.list(url) if _is_pattern(url) else [url]
            if not fitting:
                raise SourceError(shown(url), "no object fits this pattern")
            found += fitting
        if len(found) > MOST_SHARDS:
            raise SourceError(shown(pattern), f"stands for more than {MOST_SHARDS:,} shards")
    copies = copy(_look_up(store, found))
    return copies, copies.paths


def _is_absent(error: SourceError) -> bool:
    return error.reason == "is not there"


def _look_up(store: Store, urls: Sequence[str]) -> list[Object]:
    with ThreadPoolExecutor(_THREADS, "stoker-looking-up") as pool:
        jobs = [pool.submit(store.look_up, url) for url in urls]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _folder(store: Store, url: str, copy: Copy) -> tuple[Copies, str]:
    """The copies of a folder that is one data set, and its path or that of its one file."""
    try:
        index = store.look_up(f"{url}/index.json")
    except SourceError as error:
        if not _is_absent(error):
            raise
        try:
            database = store.look_up(f"{url}/data.mdb")
        except SourceError as missing:
            if not _is_absent(missing):
                raise
            raise SourceError(
                shown(url),
                "is not there, as an object or as a folder of MDS shards or of an LMDB "
                "environment. Shards are named one by one or by a pattern; of single images, "
                "stoker pack makes shards",
            ) from None
        copies = copy([database])
        return copies, copies.paths[0]
    names = _shards_of(store, index)
    shards = _look_up(store, [f"{url}/{name}" for name in names])
    copies = copy([index, *shards], True)
    return copies, os.path.dirname(copies.paths[0])


def _shards_of(store: Store, index: Object) -> list[str]:
    """The names of the shards that an index of MDS shards names.

    Raises:
        SourceError: it is none.
    """
    url = shown(index.url)
    if index.size > _LARGEST_INDEX:
        raise SourceError(url, f"is no index of MDS shards: it has {index.size:,} bytes")
    try:
        shards = json.loads(store.read(index, 0, index.size))["shards"]
        names = [(shard.get("zip_data") or shard["raw_data"])["basename"] for shard in shards]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SourceError(url, "is no index of MDS shards") from error
    for name in names:
        if (
            not isinstance(name, str)
            or "/" in name
            or "?" in name
            or "\0" in name
            or name[:1] in ("", ".")
        ):
            raise SourceError(url, f"names a shard {name!r}")
    if not names:
        raise SourceError(url, "names no shard")
    return list(dict.fromkeys(names))
