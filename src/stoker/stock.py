"""Which stock transform an object is, proven to behave as its package shipped it.

Note [Genuine code] says what is looked at. Nothing is imported here: an object of torchvision
exists only where the user has imported it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps, ImageStat
from torch import nn

from stoker.genuine import Watch, hidden, overridden
from stoker.plan import Refusal

_VERSIONS = {"torchvision.transforms": 1, "torchvision.transforms.v2": 2}
_TIMM = "timm.data.transforms"
_TIMM_CLASSES = ("MaybeToTensor", "MaybePILToTensor")

# What the transforms call outside of their package. Other libraries patch some of torch's rest.
_TENSOR = """
    uniform_ item to div div_ sub sub_ mul mul_ permute contiguous view flip __lt__ __le__ __ge__
    as_subclass clone round int __getitem__ __setitem__ __float__ __int__ __rsub__ __truediv__
"""
_TORCH = """
    rand empty randint randperm linspace arange exp log tensor as_tensor from_numpy stack is_tensor
"""
_IMAGE = """
    resize crop transpose convert copy paste load tobytes getbands _new _crop __array_interface__
    rotate transform _Image__transformer point histogram filter split
"""
_ENHANCERS = ("Brightness", "Contrast", "Color", "Sharpness")
_CALLED: list[tuple[Any, str]] = [
    (nn.Module, "__call__ _wrapped_call_impl _call_impl __getattr__ __getattribute__"),
    (nn.Sequential, "forward __iter__ __getitem__ __len__"),
    (nn.Identity, "forward"),
    (torch, _TORCH),
    (torch.Tensor, _TENSOR),
    (Image, "new merge fromarray blend"),
    (Image.Image, _IMAGE),
    (ImageOps, "expand invert posterize solarize autocontrast equalize _lut"),
    (ImageEnhance._Enhance, "enhance"),
    *((getattr(ImageEnhance, name), "__init__") for name in _ENHANCERS),
    (ImageFilter.Kernel, "filter"),
    (ImageStat.Stat, "__init__ mean sum count"),
    (np, "array asarray dstack pad minimum maximum"),
]


@dataclass(frozen=True)
class Stock:
    """A stock transform.

    Attributes:
        name: its class in the package, without the module.
        version: 1 or 2: torchvision.transforms or its v2; 0: torch or timm.
        exact: False for a subclass that changes nothing but the constructor.
    """

    name: str
    version: int
    exact: bool


class _Catalogue:
    """The classes of the packages that are imported so far, and the watch over them."""

    def __init__(self) -> None:
        self.imported = 0
        self.modules: frozenset[str] = frozenset()
        self.classes: dict[type, tuple[str, int]] = {}
        self.watch: Watch | None = None

    def refresh(self) -> None:
        """Takes up modules that were imported since the last call."""
        if len(sys.modules) == self.imported:
            return
        self.imported = len(sys.modules)
        names = frozenset(
            name
            for name in list(sys.modules)
            if name.startswith(("torchvision.transforms", "torchvision.tv_tensors"))
            or name == _TIMM
        )
        if self.watch is not None and names == self.modules:
            return
        self.modules = names
        if self.watch is None:
            self.watch = Watch([torch, np, *filter(None, map(sys.modules.get, _PACKAGES))])
            for owner, called in _CALLED:
                self.watch.functions(owner, called.split())
            self.classes = {nn.Sequential: ("Sequential", 0), nn.Identity: ("Identity", 0)}
        for name in names:
            module = sys.modules[name]
            self.watch.trust(module)
        for name in sorted(names):
            self._take(sys.modules[name], name)

    def _take(self, module: ModuleType, name: str) -> None:
        assert self.watch is not None
        if name != _TIMM:
            self.watch.functions(module)
        for value in list(vars(module).values()):
            if not isinstance(value, type) or not value.__module__.startswith(name):
                continue
            if name == _TIMM and value.__name__ not in _TIMM_CLASSES:
                continue
            for cls in value.__mro__:
                if cls.__module__.startswith(("torchvision.", "timm.")):
                    self.watch.functions(cls)
            if name in _VERSIONS or name == _TIMM:
                self.classes.setdefault(value, (value.__name__, _VERSIONS.get(name, 0)))


_PACKAGES = ("PIL", "torchvision", "timm", "fastai")  # the last wraps Tensor.as_subclass
_catalogue = _Catalogue()


def surroundings() -> Refusal | None:
    """What in this process changes every transform; None where nothing does."""
    _catalogue.refresh()
    assert _catalogue.watch is not None
    changed = _catalogue.watch.changed()
    if changed is not None:
        return Refusal(changed, "is not the package's own code", "remove the patch")
    modules = nn.modules.module
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
        if getattr(modules, name, None):
            return Refusal("torch.nn", "global module hooks are registered", "remove them")
    if torch.get_default_device().type != "cpu" or torch._C._len_torch_function_stack() > 0:
        return Refusal("torch", "a default device or function mode is set", "iterate without it")
    return None


def identify(transform: Any) -> Stock | Refusal:
    """The stock transform that an object is, or why it is none. Call ``surroundings`` first."""
    cls = type(transform)
    name = f"{cls.__module__}.{cls.__qualname__}"
    base = next((b for b in cls.__mro__ if b in _catalogue.classes), None)
    if base is None:
        kind = (
            "a Python function"
            if callable(transform) and hasattr(transform, "__code__")
            else "not stock"
        )
        shown = getattr(transform, "__qualname__", name)
        return Refusal(shown, f"is {kind}", "use the transforms listed in docs/transforms.md")
    if cls is not base:
        override = overridden(cls, base)
        if override is not None:
            return Refusal(name, f"changes {override} of {base.__name__}", f"use {base.__name__}")
    hiding = hidden(transform)
    if hiding is not None:
        return Refusal(name, f"its attribute {hiding} hides a method", "leave it out")
    if isinstance(transform, nn.Module):
        for attribute, value in vars(transform).items():
            if attribute.startswith(("_forward", "_backward")) and "hooks" in attribute and value:
                return Refusal(name, "has hooks", "remove them")
    return Stock(*_catalogue.classes[base], cls is base)
