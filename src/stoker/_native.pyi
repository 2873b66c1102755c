"""Types of the native core. What the functions mean stands in native/*.hpp."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def levels() -> list[str]: ...
def allocations() -> int: ...
def decode_jpeg(
    data: bytes, region: tuple[int, int, int, int] | None = None, *, level: str, upright: bool = False
) -> tuple[str, NDArray[np.uint8] | None]: ...
def resize(
    image: NDArray[np.uint8],
    out_size: tuple[int, int],
    window: tuple[int, int, int, int] | None = None,
    filter: str = "bilinear",
    *,
    order: str,
    flip_x: bool = False,
    flip_y: bool = False,
    gray: bool = False,
    level: str,
) -> NDArray[np.uint8]: ...
def convert(
    image: NDArray[np.uint8],
    table: NDArray[Any],
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    channels: int = 3,
    flip_x: bool = False,
    flip_y: bool = False,
    gray: bool = False,
    *,
    level: str,
) -> NDArray[Any]: ...
def formula(
    table: NDArray[Any], mean: tuple[float, float, float], std: tuple[float, float, float]
) -> str: ...
def resolve(
    plan: Plan, width: int, height: int, key: int
) -> tuple[str, list[dict[str, Any]], int]: ...

class Plan:
    def __init__(self) -> None: ...
    def add(self, op: str, numbers: Sequence[float]) -> None: ...
    def set_order(self, order: str) -> None: ...
    def set_tail(
        self,
        channels: int,
        table: NDArray[Any] | None,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
    ) -> None: ...
    def run_encoded(
        self, data: bytes, key: int, height: int, width: int, level: str
    ) -> tuple[str, NDArray[Any] | None]: ...

class Files:
    def __init__(
        self,
        root: bytes,
        names: NDArray[np.uint8],
        offsets: NDArray[np.uint64],
        max_bytes: int | None,
        max_pixels: int | None,
        upright: bool,
    ) -> None: ...

class Batch:
    @staticmethod
    def new(
        plan: Plan,
        files: Files,
        rows: NDArray[np.int64],
        keys: NDArray[np.uint32],
        out: NDArray[np.uint8],
        channels: int,
        height: int,
        width: int,
    ) -> Batch: ...
    def failures(self) -> list[tuple[int, str, int]]: ...
    @property
    def done(self) -> bool: ...

class Session: ...

class Pool:
    def __init__(self, level: str | None = None) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def level(self) -> str: ...
    def open_session(self, threads: int) -> Session: ...
    def close_session(self, session: Session) -> None: ...
    def submit(self, session: Session, batch: Batch) -> None: ...
    def run_here(self, session: Session, batch: Batch) -> None: ...
    def wait(self, session: Session, batch: Batch, seconds: float, watch: bool) -> bool: ...
    def declines(self, session: Session) -> bool: ...
    def cancel(self, session: Session, batch: Batch) -> None: ...
    def take_declined(self, session: Session, seconds: float) -> tuple[Batch, int, int] | None: ...
    def finish_pixels(
        self, session: Session, batch: Batch, sample: int, image: NDArray[np.uint8]
    ) -> str: ...
    def finish_failed(self, session: Session, batch: Batch, sample: int) -> None: ...
    def abandon(self) -> None: ...
