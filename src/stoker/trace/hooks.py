"""What is put in place of Pillow's and torchvision's functions while a scope may be open.

Every replacement does its own thing for lazy images and deferred tensors in a scope, and calls what
it replaces for everything else. Without a hook, an operation would be right, too: it would be done
on values. Workers keep the hooks; in the caller's process they are there while a batch is made.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from PIL import Image, ImageEnhance, ImageOps, JpegImagePlugin
from torch.utils.data._utils import collate

from stoker.trace import functions
from stoker.trace import tensor as deferred
from stoker.trace.file import LazyJpegImageFile
from stoker.trace.image import LazyImage
from stoker.trace.node import Tracing
from stoker.trace.scope import current
from stoker.trace.tensor import DeferredTensor, Erasure, Promise

Hook = tuple[Any, Any, Any]
"""Owner (a module, a class, or a dict), name or key, and what is put there."""


def _set(owner: Any, name: Any, value: Any) -> None:
    if not isinstance(owner, dict):
        setattr(owner, name, value)
    elif value is None:
        owner.pop(name, None)
    else:
        owner[name] = value


def _get(owner: Any, name: Any) -> Any:
    return owner.get(name) if isinstance(owner, dict) else getattr(owner, name)


def _pillow() -> list[Hook]:
    """The registry entry by which `Image.open` finds the JPEG plugin; what looks at pixels."""
    Tracing.unlike = functions.unlike()
    Image.preinit()
    stock, accept = Image.OPEN["JPEG"]

    def open_jpeg(fp: Any, filename: Any) -> Any:
        image = stock(fp, filename)
        if type(image) is JpegImagePlugin.JpegImageFile and current() is not None:
            image.__class__ = LazyJpegImageFile
        return image

    hooks: list[Hook] = [(Image.OPEN, "JPEG", (open_jpeg, accept))]
    hooks.append((Image, "blend", functions.blend()))
    hooks += [
        (getattr(ImageEnhance, name), "__init__", functions.enhancer(name))
        for name in functions.ENHANCERS
    ]
    return hooks + [
        (ImageOps, name, functions.recording_version(getattr(ImageOps, name), recorder))
        for name, recorder in functions.IMAGE_OPS.items()
    ]


def _torch() -> list[Hook]:
    """default_collate's entry for tensors."""
    entries = collate.default_collate_fn_map
    stock = entries[torch.Tensor]

    def collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
        if current() is not None and any(isinstance(x, DeferredTensor) for x in batch):
            stacked = deferred.stack(list(batch))
            if stacked is not None:
                return stacked
            batch = [deferred.real(x, "default_collate") for x in batch]
        return stock(batch, collate_fn_map=collate_fn_map)

    return [(entries, torch.Tensor, collate_tensors)]


def _numbers(values: Any) -> tuple[float, ...] | None:
    """Mean or std as hashable numbers; None where they are of another kind."""
    if isinstance(values, torch.Tensor):
        if isinstance(values, DeferredTensor) or values.dim() != 1 or not _is_float(values):
            return None
        values = values.tolist()
    if type(values) not in (list, tuple):
        return None
    if not all(isinstance(x, int | float) for x in values):
        return None
    return tuple(float(x) for x in values)


def _is_float(values: torch.Tensor) -> bool:
    return values.dtype in (torch.float32, torch.float64) and values.device.type == "cpu"


def _normalized(tensor: Any, mean: Any, std: Any, inplace: bool, name: str) -> Any:
    if inplace or not isinstance(tensor, DeferredTensor) or not tensor.is_floating_point():
        return None
    means, stds = _numbers(mean), _numbers(std)
    if means is None or stds is None or not all(stds):
        return None
    if not len(means) == len(stds) == tensor.shape[0]:
        return None
    return deferred.extend(tensor, tensor.dtype, name, means, stds)


def _erased(tensor: Any, i: int, j: int, h: int, w: int, v: Any, inplace: bool) -> Any:
    if inplace or not isinstance(tensor, DeferredTensor) or type(v) is not torch.Tensor:
        return None
    if v.numel() > 3 or v.dim() > 3 or not v.is_floating_point():
        return None
    values = tuple(v.flatten().tolist())
    return deferred.erase(tensor, Erasure(i, j, h, w, tuple(v.shape), values))


def _v1() -> list[Hook]:
    from torchvision.transforms import _functional_pil as on_images
    from torchvision.transforms import functional as f

    stock = {
        name: getattr(f, name)
        for name in ("to_tensor", "pil_to_tensor", "normalize", "convert_image_dtype", "erase")
    }
    deferred.ENDINGS.update(
        {name: stock[name] for name in ("to_tensor", "pil_to_tensor", "normalize")}
    )
    deferred.ENDINGS["convert_image_dtype"] = stock["convert_image_dtype"]

    def to_tensor(pic: Any) -> Any:
        lazy = None
        if torch.get_default_dtype() is torch.float32:
            lazy = deferred.defer(DeferredTensor, pic, "to_tensor", torch.float32)
        return stock["to_tensor"](pic) if lazy is None else lazy

    def pil_to_tensor(pic: Any) -> Any:
        lazy = deferred.defer(DeferredTensor, pic, "pil_to_tensor", torch.uint8)
        return stock["pil_to_tensor"](pic) if lazy is None else lazy

    def normalize(tensor: Any, mean: Any, std: Any, inplace: bool = False) -> Any:
        lazy = _normalized(tensor, mean, std, inplace, "normalize")
        return stock["normalize"](tensor, mean, std, inplace) if lazy is None else lazy

    def convert_image_dtype(image: Any, dtype: torch.dtype = torch.float) -> Any:
        lazy = None
        if isinstance(image, DeferredTensor) and image.dtype is torch.uint8:
            lazy = deferred.extend(image, dtype, "convert_image_dtype", dtype)
        return stock["convert_image_dtype"](image, dtype) if lazy is None else lazy

    def erase(img: Any, i: Any, j: Any, h: Any, w: Any, v: Any, inplace: bool = False) -> Any:
        lazy = _erased(img, i, j, h, w, v, inplace)
        return stock["erase"](img, i, j, h, w, v, inplace) if lazy is None else lazy

    ours: list[Callable[..., Any]] = [
        to_tensor,
        pil_to_tensor,
        normalize,
        convert_image_dtype,
        erase,
    ]
    hooks: list[Hook] = [(f, function.__name__, function) for function in ours]
    for name in functions.TORCHVISION:
        recorded = functions.torchvisions(name, getattr(on_images, name))
        if recorded is not None:
            hooks.append((on_images, name, recorded))
    return hooks


def _v2() -> list[Hook]:
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import ToDtype
    from torchvision.transforms.v2 import _utils as utils
    from torchvision.transforms.v2 import functional as f
    from torchvision.transforms.v2.functional._utils import _KERNEL_REGISTRY as KERNELS

    image_class = deferred_image(tv_tensors.Image)
    deferred.ENDINGS["to_dtype"] = f.to_dtype_image
    deferred.ENDINGS["normalize_v2"] = f.normalize_image
    stock_to_image, stock_to_tensor, stock_fill = f.to_image, f.pil_to_tensor, utils._get_fill
    stock_by_type = ToDtype.transform
    # Where the exact type of an image decides in torchvision: fills and dtypes given by type.
    genuine: dict[type, type] = {
        LazyImage: Image.Image,
        LazyJpegImageFile: JpegImagePlugin.JpegImageFile,
        DeferredTensor: torch.Tensor,
        image_class: tv_tensors.Image,
    }

    def to_image(inpt: Any) -> Any:
        lazy = deferred.defer(image_class, inpt, "pil_to_tensor", torch.uint8)
        return stock_to_image(inpt) if lazy is None else lazy

    def pil_to_tensor(pic: Any) -> Any:
        lazy = deferred.defer(DeferredTensor, pic, "pil_to_tensor", torch.uint8)
        return stock_to_tensor(pic) if lazy is None else lazy

    def get_fill(fills: Any, kind: Any) -> Any:
        return stock_fill(fills, genuine.get(kind, kind))

    def by_type(self: Any, inpt: Any, params: Any) -> Any:
        kinds, kind = self.dtype, genuine.get(type(inpt))
        if kind is not None and isinstance(kinds, dict):
            if kind in kinds:
                self = copy.copy(self)
                self.dtype = {type(inpt): kinds[kind]}
            elif "others" not in kinds:
                inpt = inpt.made("ToDtype")  # raises, with its type
        return stock_by_type(self, inpt, params)

    def to_dtype(image: Any, dtype: torch.dtype = torch.float, scale: bool = False) -> Any:
        lazy = None
        if image.dtype is dtype:
            return image
        if image.dtype is torch.uint8:
            lazy = deferred.extend(image, dtype, "to_dtype", dtype, scale)
        return f.to_dtype(image.made("to_dtype"), dtype, scale) if lazy is None else lazy

    def normalize(image: Any, mean: Any, std: Any, inplace: bool = False) -> Any:
        lazy = _normalized(image, mean, std, inplace, "normalize_v2")
        return f.normalize(image.made("normalize"), mean, std, inplace) if lazy is None else lazy

    def erase(image: Any, i: Any, j: Any, h: Any, w: Any, v: Any, inplace: bool = False) -> Any:
        lazy = _erased(image, i, j, h, w, v, inplace)
        return f.erase(image.made("erase"), i, j, h, w, v, inplace) if lazy is None else lazy

    recorded: dict[Any, Any] = {
        f.to_dtype: to_dtype,
        f.normalize: normalize,
        f.erase: erase,
        f.get_dimensions: lambda image: list(image.shape[-3:]),
        f.get_size: lambda image: list(image.shape[-2:]),
        f.get_num_channels: lambda image: image.shape[-3],
    }

    def on_values(function: Any) -> Any:
        def kernel(image: Any, *arguments: Any, **options: Any) -> Any:
            return function(image.made(function.__name__), *arguments, **options)

        return kernel

    hooks: list[Hook] = [(f, "to_image", to_image), (f, "pil_to_tensor", pil_to_tensor)]
    hooks.append((ToDtype, "transform", by_type))
    for function, kernels in KERNELS.items():
        kernel = recorded.get(function) or on_values(function)
        hooks += [(kernels, cls, kernel) for cls in (DeferredTensor, image_class)]
    for name in functions.KERNELS:
        # These are called through the registry, where they stand as they were imported.
        kernels = KERNELS[getattr(f, name)]
        recorded_kernel = functions.torchvisions(name, kernels[Image.Image])
        if recorded_kernel is not None:
            hooks += [(kernels, cls, recorded_kernel) for cls in (LazyImage, LazyJpegImageFile)]
    for module in list(sys.modules.values()):
        if getattr(module, "_get_fill", None) is stock_fill:
            hooks.append((module, "_get_fill", get_fill))
    return hooks


@lru_cache(maxsize=1)
def deferred_image(image_class: Any) -> type[DeferredTensor]:
    """The deferred form of torchvision's `tv_tensors.Image`."""

    class DeferredImage(DeferredTensor, image_class):  # type: ignore[misc]
        def _as(self, tensor: torch.Tensor) -> torch.Tensor:
            return image_class(tensor)  # type: ignore[no-any-return]

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return DeferredTensor.__torch_function__.__func__(  # type: ignore[attr-defined]
                cls, func, types, args, kwargs
            )

    return DeferredImage


def is_image(tensor: DeferredTensor) -> bool:
    """True for the deferred form of `tv_tensors.Image`."""
    return type(tensor) is not DeferredTensor


def promise(tensor: DeferredTensor) -> Promise | None:
    """What a single deferred tensor will be."""
    return tensor._promise if isinstance(tensor._promise, Promise) else None


_lock = threading.Lock()
_users = 0
_installed: list[Hook] = []
_versions: list[int] = []


def install() -> None:
    """Puts the hooks in place, if they are not; torchvision's only where it is imported."""
    global _users
    with _lock:
        _users += 1
        _bring_up_to_date()


def _bring_up_to_date() -> None:
    stages: list[tuple[int, Callable[[], list[Hook]], bool]] = [
        (0, _pillow, True),
        (1, _torch, True),
        (2, _v1, "torchvision.transforms.functional" in sys.modules),
        (3, _v2, "torchvision.transforms.v2" in sys.modules),
    ]
    for number, make, wanted in stages:
        if wanted and number not in _versions:
            _versions.append(number)
            for owner, name, ours in make():
                _installed.append((owner, name, _get(owner, name)))
                _set(owner, name, ours)


def refresh() -> None:
    """Adds torchvision's hooks where it was imported after the others were put in place."""
    if len(_versions) < 4 and "torchvision" in sys.modules:
        with _lock:
            _bring_up_to_date()


def uninstall() -> None:
    """Puts everything back when as many have asked for it as have installed."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            for owner, name, stock in reversed(_installed):
                _set(owner, name, stock)
            _installed.clear()
            _versions.clear()


@contextmanager
def installed() -> Iterator[None]:
    """The hooks are in place inside of this block."""
    install()
    try:
        yield
    finally:
        uninstall()
