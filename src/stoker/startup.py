"""Why worker processes did not start, in the user's words; torch and Python name the symptom.

Note [Starting workers]
    With "fork" a worker is a copy of the process. With "spawn" and "forkserver" it is a new one
    that imports the user's script under another name, then unpickles dataset, collate_fn and
    worker_init_fn. So it fails where the script starts workers while it is imported, and where
    something cannot be pickled, or is found by its name nowhere but in a notebook. Python 3.14
    made "forkserver" the default.
"""

from __future__ import annotations

import ast
import errno
import io
import multiprocessing
import os
import pickle
import pickletools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import context, process, spawn
from multiprocessing.reduction import ForkingPickler
from typing import Any

from stoker.errors import WorkerError

_DEPTH = 6
"""So many attributes deep an object is searched for what cannot be pickled."""

_FORK = (
    'or pass multiprocessing_context="fork", which copies the process (not where it has used CUDA)'
)


@dataclass(frozen=True)
class Starting:
    """The workers of a loader, about to start.

    Attributes:
        method: "fork", "spawn" or "forkserver".
        workers: so many.
        parts: what each is sent, by the names that users know.
    """

    method: str
    workers: int
    parts: dict[str, Any]

    @classmethod
    def of(cls, loader: Any) -> Starting:
        """Those of ``loader``, which may know its `parts` better than by its attributes."""
        start = loader.multiprocessing_context or multiprocessing
        return cls(
            start.get_start_method(),
            loader.num_workers,
            getattr(loader, "parts", None) or parts_of(loader),
        )

    def prevented(self) -> WorkerError | None:
        """What is known to prevent workers before any is started."""
        current = process.current_process()
        if self.method != "fork" and getattr(current, "_inheriting", False):
            _read_to_the_end()
            return _unguarded(self.method)
        if self.method != "fork" and _script() is None:
            named = _defined_in_main(self.parts)
            if named:
                return WorkerError(
                    f"{', '.join(named)}: defined in a notebook or at the prompt, where a worker "
                    f'that is started by "{self.method}" does not find it',
                    f"Move it into a module (a .py file) and import it, {_FORK}",
                )
        if current.daemon:
            return WorkerError(
                "this process is a worker itself, and those may not start workers",
                "Use num_workers=0 for a loader that is used inside of a Dataset",
            )
        return None

    def failed(self, error: Exception) -> WorkerError | None:
        """Why a worker could not be started; None where ``error`` has other reasons."""
        if isinstance(error, OSError) and error.errno in _LIMITS:
            return WorkerError(
                f"the system refuses to start {self.workers} worker processes: "
                f"{error.strerror or error} ({errno.errorcode[error.errno]})",
                _LIMITS[error.errno],
            )
        if self.method == "fork":
            return None
        if isinstance(error, OSError | EOFError):
            return self.died()
        found = _unpicklable(self.parts)
        if found is None:
            return None
        where, value, reason = found
        return WorkerError(
            f"{where} is {_described(value)} and cannot be sent to a worker that is started by "
            f'"{self.method}": {reason}',
            f"{_instead(value)}, {_FORK}",
        )

    def died(self) -> WorkerError:
        """Why a worker ended before its first batch."""
        script = _script()
        if script is not None and not _is_guarded(script):
            return _unguarded(self.method)
        return WorkerError(
            f'a worker that was started by "{self.method}" ended before its first batch; its own '
            "error stands above",
            "It imports the script anew and unpickles the dataset: whatever either needs must be "
            "there in a new process, too. num_workers=0 shows errors of the dataset itself",
        )


def parts_of(loader: Any) -> dict[str, Any]:
    """What the workers of ``loader`` are sent, by the names of its attributes."""
    names = ("dataset", "collate_fn", "worker_init_fn")
    return {name: getattr(loader, name) for name in names if getattr(loader, name) is not None}


_LIMITS = {
    errno.EAGAIN: "Lower num_workers, or raise the limit on processes (ulimit -u; in a container, "
    "--pids-limit)",
    errno.ENOMEM: "Lower num_workers, or free memory in this process",
    errno.EMFILE: "Lower num_workers, or raise the limit on open files (ulimit -n)",
    errno.ENOSPC: "/dev/shm is full: free space there, or give the container more "
    "(docker run --shm-size=8g)",
}


def _read_to_the_end() -> None:
    """Reads, in a process that Python starts with "spawn", what its parent still writes to it.

    The parent holds the other end of that pipe, too: it would wait for ever for one that has died.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is spawn._main.__code__:
            pipe = frame.f_locals.get("from_parent")
            if pipe is not None:
                # Without tell(), which pipes do not have. Nothing is unpickled.
                stream: Any = types.SimpleNamespace(read=pipe.read, readline=pipe.readline)
                for _ in pickletools.genops(stream):
                    pass
            return
        frame = frame.f_back


def _unguarded(method: str) -> WorkerError:
    script = _script() or "the script"
    return WorkerError(
        f'{script} starts workers while it is imported: with "{method}" every worker imports it '
        "first, and would start workers in turn",
        'Put the code that runs under `if __name__ == "__main__":`, ' + _FORK,
    )


def _script() -> str | None:
    """The file that workers import first, or a module's name; None where there is none."""
    main = sys.modules.get("__mp_main__") or sys.modules["__main__"]  # the first is a worker's
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    path = getattr(main, "__file__", None)
    return path if path is not None and os.path.exists(path) else None


def _is_guarded(script: str) -> bool:
    """True unless the file is known to run all of itself when it is imported."""
    if not script.endswith(".py"):
        return True  # a module that was run with -m: its file is not worth looking for
    try:
        with open(script, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return True
    return any(
        isinstance(node, ast.If)
        and any(
            isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test)
        )
        for node in tree.body
    )


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)

    def writable(self) -> bool:
        return True


def _defined_in_main(parts: dict[str, Any]) -> list[str]:
    """What of ``parts`` only `__main__` has."""
    found: list[str] = []

    class Finder(ForkingPickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
                found.append(obj.__qualname__)
            return NotImplemented

    for part in parts.values():
        _pickling_error(part, Finder)
    return list(dict.fromkeys(found))


@contextmanager
def _as_if_starting() -> Iterator[None]:
    """Lets objects be pickled that only a worker's start may pickle; nothing waits for a reader."""
    popen: Any = types.SimpleNamespace(duplicate_for_child=int, DupFd=int)
    context.set_spawning_popen(popen)
    try:
        yield
    finally:
        context.set_spawning_popen(None)


def _pickling_error(value: Any, pickler: Any = ForkingPickler) -> Exception | None:
    try:
        with _as_if_starting():
            pickler(_Nowhere(), pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # noqa: BLE001  user code pickles, and may raise anything
        return error
    return None


def _unpicklable(parts: dict[str, Any]) -> tuple[str, Any, str] | None:
    """The innermost thing that cannot be pickled: its name, itself, the reason."""
    for name, part in parts.items():
        error = _pickling_error(part)
        if error is not None:
            return _innermost(name, part, error)
    return None


def _innermost(name: str, value: Any, error: Exception) -> tuple[str, Any, str]:
    for _ in range(_DEPTH):
        for inner_name, inner in _inside(name, value):
            inner_error = _pickling_error(inner)
            if inner_error is not None:
                name, value, error = inner_name, inner, inner_error
                break
        else:
            break
    return name, value, f"{type(error).__name__}: {error}"


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", item) for key, item in list(value.items())[:1000]]
    if isinstance(value, list | tuple):
        return [(f"{name}[{place}]", item) for place, item in enumerate(value[:1000])]
    if isinstance(value, type | types.FunctionType):
        return []
    if isinstance(value, types.MethodType):
        return [(f"{name}.__self__", value.__self__)]
    return [(f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items()]


def _described(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        code = value.__code__
        what = "a lambda" if value.__name__ == "<lambda>" else f"the function {value.__qualname__}"
        return f"{what} ({code.co_filename}:{code.co_firstlineno})"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _instead(value: Any) -> str:
    if isinstance(value, types.FunctionType | type):
        return "Define it at the top of a module, with def or class"
    if "<locals>" in type(value).__qualname__:
        return "Define its class at the top of a module"
    return "Make it when it is first used in the worker instead of in __init__"
