"""Pillow decodes what the native decoder declines: its answer, or its error, is the truth.

Note [Declined samples]
    Native threads put what they decline into the session's queue. Python threads, as many as the
    loader has native ones and started at the first such sample, take from it, decode with Pillow
    (whose codecs release the GIL) and hand the pixels back to the native plan. An exception is kept
    until the consumer comes to that sample.

Note [Collected in a decoding thread]
    Garbage collection runs in whichever thread allocates, so a loader or an iterator in a cycle may
    end in one of these threads, in the middle of a sample. Waiting there for samples at work would
    be waiting for itself, and no other collection could begin: a thread of its own waits instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.engine import Batch, Session

Decode = Callable[[object, int], NDArray[np.uint8]]
"""Native batch and row to RGB pixels, uint8 of shape (height, width, 3); raises as Pillow does."""


class Fallback:
    """Decodes declined samples of one session.

    Args:
        session: where declined samples wait.
        decode: decodes one.
    """

    def __init__(self, session: Session, decode: Decode) -> None:
        self.decode = decode
        self.decoded = 0
        """Samples that Pillow has decoded."""
        self._session = session
        self._errors: dict[tuple[int, int], Exception] = {}
        self._threads: list[threading.Thread] = []
        self._starting = threading.RLock()
        self._stop = threading.Event()

    @property
    def started(self) -> bool:
        """True once the threads run."""
        return bool(self._threads)

    def start(self) -> None:
        """Starts the threads. Idempotent."""
        with self._starting:  # another thread may close meanwhile
            while len(self._threads) < self._session.threads and not self._stop.is_set():
                name = f"stoker-fallback-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)

    def _serve(self) -> None:
        while not self._stop.is_set():
            self.serve_one(0.5)

    def serve_one(self, seconds: float) -> bool:
        """Decodes one waiting sample on the calling thread; False if none came in ``seconds``."""
        taken = self._session.take_declined(seconds)
        if taken is None:
            return False
        batch, place, row = taken
        try:
            self._session.finish_pixels(batch, place, self.decode(batch, row))
            self.decoded += 1
        except Exception as error:  # noqa: BLE001  a thread hands over: the consumer raises it
            self._errors[id(batch), place] = error
            self._session.finish_failed(batch, place)
        return True

    def error(self, batch: Batch, place: int) -> Exception | None:
        """What Pillow raised for a sample of a finished batch; forgotten after it was asked for."""
        return self._errors.pop((id(batch.native), place), None)

    def forget(self, batch: Batch) -> None:
        """Drops the errors of a batch that nobody will ask for."""
        for key in list(self._errors):  # in one go: other batches' errors may come meanwhile
            if key[0] == id(batch.native):
                del self._errors[key]

    def elsewhere(self, task: Callable[..., None], *args: Any) -> None:
        """Runs a task that waits for samples; see Note [Collected in a decoding thread]."""
        if threading.current_thread() in self._threads:
            threading.Thread(target=task, args=args, name="stoker-closing").start()
        else:
            task(*args)

    def close(self) -> None:
        """Joins the threads; call after the session was closed. Idempotent."""
        self._stop.set()
        if not self._session.is_ours():
            return  # a forked child has no such threads
        with self._starting:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads = []
