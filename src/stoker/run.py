"""A script as Python itself would run it, with something done once it has torch.

`stoker run` patches then, `stoker diagnose -- SCRIPT` begins to watch.

Neither torch nor NumPy is imported before the script does: it may set environment variables that
they read. The script's module is `__main__`, so workers that are spawned import the right one;
they are not patched, and need not be.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from typing import Any, NoReturn


class _AfterTorch(MetaPathFinder):
    """Calls ``then`` when `torch` has been imported."""

    _searching = False

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with a loader that calls ``then`` at its end."""
        if fullname != "torch" or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._searching = False
        loader: Any = spec and spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self._then()

        loader.exec_module = exec_module
        return spec


def patched() -> None:
    """What `stoker run` does once torch is there."""
    from stoker.patching import patch

    patch()


def run_as_main(arguments: list[str], then: Callable[[], object] = patched) -> None:
    """Runs ``SCRIPT ARGUMENTS...`` or ``-m MODULE ARGUMENTS...`` and does not return.

    ``then`` is called when torch has been imported. Exit status, `sys.argv`, `sys.path` and
    tracebacks are those of ``python ARGUMENTS...``.
    """
    if arguments[0] == "-m":
        if len(arguments) < 2:
            _fail("-m needs the name of a module")
        code, main = _module(arguments[1])
        sys.argv = [str(main.__file__), *arguments[2:]]
    elif arguments[0].startswith("-"):
        _fail(f"unknown option {arguments[0]}: options of the script come after its name")
    else:
        code, main = _script(arguments[0])
        sys.argv = list(arguments)
    sys.modules["__main__"] = main
    sys.meta_path.insert(0, _AfterTorch(then))
    if "torch" in sys.modules:
        then()
    try:
        exec(code, main.__dict__)
    except Exception as error:
        _show_without_our_frames(error)
        raise
    except KeyboardInterrupt as interrupt:
        _show_without_our_frames(interrupt)
        raise


def _fail(reason: str) -> NoReturn:
    sys.stderr.write(f"error: stoker {sys.argv[1]}: {reason}\n")
    raise SystemExit(2)


def _script(path: str) -> tuple[types.CodeType, types.ModuleType]:
    """The code of a file, and an empty module for it."""
    found = os.path.abspath(path)
    try:
        with io.open_code(found) as file:
            source = file.read()
    except OSError as error:
        reason = f"can't open file {found!r}: [Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: {reason}\n")
        raise SystemExit(2) from None
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    main = types.ModuleType("__main__")
    main.__file__ = found
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", found)
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__cached__"] = None
    try:
        return compile(source, found, "exec", dont_inherit=True), main
    except (SyntaxError, ValueError) as error:
        _show_without_our_frames(error)
        raise


def _module(name: str) -> tuple[types.CodeType, types.ModuleType]:
    """The code of a module, or of a package's `__main__`, and an empty module for it."""
    import runpy

    _first_on_path(os.getcwd())
    get: Any = runpy._get_module_details  # type: ignore[attr-defined] # what `python -m` calls
    try:
        _, spec, code = get(name)
    except ImportError as error:
        sys.stderr.write(f"{sys.executable}: {error}\n")
        raise SystemExit(1) from None
    main = types.ModuleType("__main__")
    main.__file__, main.__loader__, main.__spec__ = spec.origin, spec.loader, spec
    main.__package__ = spec.parent
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__cached__"] = spec.cached
    return code, main


def _first_on_path(folder: str) -> None:
    """Puts ``folder`` where Python had put the folder of its own script, or the working one."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _show_without_our_frames(error: BaseException) -> None:
    """Lets the traceback that Python prints at its end begin in the script."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        while traceback is not None and _is_ours(traceback.tb_frame.f_code.co_filename):
            traceback = traceback.tb_next
        error.__traceback__ = traceback
        shown(kind, error, traceback)

    sys.excepthook = show


_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _is_ours(name: str) -> bool:
    return name.startswith((_FOLDER, "<frozen runpy>"))
