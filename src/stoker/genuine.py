"""Whether code is still what its package shipped: overrides, monkeypatches and hooks, found without calling anything.

Note [Genuine code]
    A plan replaces Python code, so that code must be the one the plan was written for. Three things
    are looked at. A class is stock where every method it runs comes from the package: a subclass may add
    names and redefine the harmless ones, no more. An object is stock where nothing hides a method of its
    class. And classes and modules are stock where every watched function is the object that was found when
    stoker first looked, and came from a file of the package then; a function written elsewhere is
    somebody's patch, whenever it was made.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_HARMLESS = frozenset(
    "__init__ __module__ __doc__ __qualname__ __annotations__ __dict__ __weakref__ __slots__ __repr__ __str__ "
    "__firstlineno__ __static_attributes__ __annotate__ __annotate_func__ __annotations_cache__ "
    "__orig_bases__ __parameters__ __abstractmethods__ _abc_impl __len__ extra_repr".split()
)
"""What a subclass may define without changing what an object does to a sample."""

_MISSING = object()


def overridden(cls: type, base: type, harmless: frozenset[str] = _HARMLESS) -> str | None:
    """The first name with which ``cls`` may change the behaviour of ``base``; None where there is none."""
    if type(cls) is not type(base):
        return f"metaclass {type(cls).__qualname__}"
    mro = cls.__mro__
    above = mro[mro.index(base) :]
    if above != base.__mro__:
        return f"bases {', '.join(b.__qualname__ for b in cls.__bases__)}"
    for between in mro[: mro.index(base)]:
        for name in between.__dict__:
            dunder = name.startswith("__") and name.endswith("__")
            if name not in harmless and (dunder or hasattr(base, name)):
                return name
    return None


def hidden(obj: object) -> str | None:
    """The first attribute of ``obj`` itself that hides one of its class; None where there is none."""
    cls = type(obj)
    for name in vars(obj):
        if inspect.getattr_static(cls, name, _MISSING) is not _MISSING:
            return name
    return None


def _code(value: Any) -> tuple[object, ...]:
    """What makes a function act as it does, for comparison by identity."""
    function = getattr(value, "__func__", value)
    if isinstance(function, FunctionType):
        return function, function.__code__, function.__defaults__, function.__kwdefaults__
    return (value,)


class Watch:
    """Functions as they were first seen.

    Args:
        packages: modules; only functions from files in their folders, or of Python itself, are trusted.
    """

    def __init__(self, packages: Iterable[ModuleType]) -> None:
        roots = {os.path.dirname(os.path.realpath(p.__file__)) for p in packages if p.__file__}
        roots.add(os.path.realpath(sysconfig.get_paths()["stdlib"]))
        self._roots = tuple(root + os.sep for root in roots)
        self._entries: list[tuple[Any, str, tuple[object, ...]]] = []
        self._names: list[tuple[type, frozenset[str]]] = []
        self._foreign: str | None = None
        self._seen: set[tuple[int, str]] = set()

    def functions(self, owner: type | ModuleType, names: Iterable[str] | None = None) -> None:
        """Watches the functions of a class or module: all, or those named."""
        if isinstance(owner, type) and names is None and (id(owner), "") not in self._seen:
            self._seen.add((id(owner), ""))
            self._names.append((owner, frozenset(owner.__dict__)))
        for name in list(owner.__dict__) if names is None else names:
            value = inspect.getattr_static(owner, name, _MISSING)
            if value is _MISSING or (id(owner), name) in self._seen:
                continue
            function = getattr(value, "__func__", value)
            if names is None and not isinstance(function, FunctionType | BuiltinFunctionType | type):
                continue
            self._seen.add((id(owner), name))
            self._entries.append((owner, name, _code(value)))
            if isinstance(function, FunctionType) and not self._trusted(function):
                self._foreign = self._foreign or f"{owner.__name__}.{name}"

    def _trusted(self, function: FunctionType) -> bool:
        return os.path.realpath(function.__code__.co_filename).startswith(self._roots)

    def changed(self) -> str | None:
        """The first watched function that is not the package's own; None where all are."""
        if self._foreign is not None:
            return self._foreign
        for owner, name, code in self._entries:
            value = owner.__dict__.get(name, _MISSING)
            if value is _MISSING:
                value = inspect.getattr_static(owner, name, _MISSING)
            now = _code(value)
            if len(now) != len(code) or any(a is not b for a, b in zip(now, code, strict=True)):
                return f"{owner.__name__}.{name}"
        for cls, names in self._names:
            if cls.__dict__.keys() != names:
                added = sorted(cls.__dict__.keys() ^ names)
                return f"{cls.__name__}.{added[0]}"
        return None
