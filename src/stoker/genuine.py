"""Whether code is still what its package shipped: finds overrides, patches and hidden methods.

Note [Genuine code]
    A plan replaces Python code, so that code must be the one that the plan was written for. Three
    things are looked at, without calling anything. A class is stock where every method it runs is
    the package's: a subclass may add names and redefine the harmless ones, no more. An object is
    stock where nothing hides a method of its class. And classes and modules are stock where every
    watched function is the object that was found when stoker first looked, and came from a file of
    the package then; a function written elsewhere is somebody's patch, whenever it was made.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

_HARMLESS = frozenset(
    [
        "__init__",
        "__repr__",
        "__str__",
        "extra_repr",
        "__module__",
        "__doc__",
        "__qualname__",
        "__dict__",
        "__weakref__",
        "__slots__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__firstlineno__",
        "__static_attributes__",
        "__slotnames__",
        "__orig_bases__",
        "__parameters__",
        "__abstractmethods__",
        "_abc_impl",
    ]
)
"""What a subclass may define without changing what an object does to a sample."""

_MISSING = object()


def overridden(cls: type, base: type) -> str | None:
    """The first name with which ``cls`` may change what ``base`` does; None where there is none."""
    if type(cls) is not type(base):
        return f"metaclass {type(cls).__qualname__}"
    mro = cls.__mro__
    above = mro[mro.index(base) :]
    if above != base.__mro__:
        return f"bases {', '.join(b.__qualname__ for b in cls.__bases__)}"
    for between in mro[: mro.index(base)]:
        for name in between.__dict__:
            dunder = name.startswith("__") and name.endswith("__")
            if name not in _HARMLESS and (dunder or hasattr(base, name)):
                return name
    return None


def hidden(obj: object) -> str | None:
    """The first attribute of ``obj`` itself that hides one of its class, or None."""
    cls = type(obj)
    for name in vars(obj):
        if inspect.getattr_static(cls, name, _MISSING) is not _MISSING:
            return name
    return None


@lru_cache(maxsize=1024)
def _real_path(path: str) -> str:
    return os.path.realpath(path)


class Watch:
    """Functions as they were first seen.

    Args:
        packages: modules; functions from files in their folders are trusted, and those of Python
            itself.
    """

    def __init__(self, packages: Iterable[ModuleType]) -> None:
        self._standard = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
        self._roots: tuple[str, ...] = ()
        self._values: list[tuple[Mapping[str, Any], str, Any, str]] = []
        self._functions: list[tuple[FunctionType, CodeType, Any, Any, str]] = []
        self._names: list[tuple[type, frozenset[str]]] = []
        self._seen: set[tuple[int, str]] = set()
        self._foreign: str | None = None
        for package in packages:
            self.trust(package)

    def trust(self, package: ModuleType) -> None:
        """Trusts functions from files in the folder of ``package``."""
        if package.__file__:
            root = os.path.dirname(os.path.realpath(package.__file__)) + os.sep
            if root not in self._roots:
                self._roots += (root,)

    def functions(self, owner: type | ModuleType, names: Iterable[str] | None = None) -> None:
        """Watches the functions of a class or module: all that it defines, or those named."""
        if names is not None:
            for name in names:
                for holder in getattr(owner, "__mro__", (owner,)):
                    self._take(holder, name)
                    if name in vars(holder):
                        break
            return
        if isinstance(owner, type) and (id(owner), "") not in self._seen:
            self._seen.add((id(owner), ""))
            self._names.append((owner, frozenset(vars(owner))))
        for name, value in list(vars(owner).items()):
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType | BuiltinFunctionType | type):
                self._take(owner, name)

    def _take(self, owner: type | ModuleType, name: str) -> None:
        if (id(owner), name) in self._seen:
            return
        self._seen.add((id(owner), name))
        value, shown = vars(owner).get(name, _MISSING), f"{owner.__name__}.{name}"
        self._values.append((vars(owner), name, value, shown))
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            self._functions.append(
                (function, function.__code__, function.__defaults__, function.__kwdefaults__, shown)
            )
            if not self._trusted(function):
                self._foreign = self._foreign or shown

    def _trusted(self, function: FunctionType) -> bool:
        path = _real_path(function.__code__.co_filename)
        # Other packages may lie inside the folder of Python's own modules.
        standard = path.startswith(self._standard) and "-packages" + os.sep not in path
        return standard or path.startswith(self._roots)

    def changed(self) -> str | None:
        """The first watched function that is not the package's own; None where all are."""
        if self._foreign is not None:
            return self._foreign
        for names, name, value, shown in self._values:
            if names.get(name, _MISSING) is not value:
                return shown
        for function, code, defaults, keyword_defaults, shown in self._functions:
            if (
                function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not keyword_defaults
            ):
                return shown
        for cls, known in self._names:
            if vars(cls).keys() != known:
                different = sorted((vars(cls).keys() ^ known) - _HARMLESS)
                if different:
                    return f"{cls.__name__}.{different[0]}"
        return None
