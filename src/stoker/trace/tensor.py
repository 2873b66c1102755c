"""Deferred tensors: shape and dtype of an image's tensor, and values as soon as somebody looks.

They are tensors without storage. `__torch_function__` answers what shape and dtype answer, makes
`torch.stack` of deferred tensors one deferred batch, and gives everything else the values: from the
native engine, at once. Reading memory that is not there raises; it never gives wrong values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from stoker.engine import native_ending, native_image
from stoker.plan import Tail
from stoker.trace.image import LazyImage
from stoker.trace.node import Node, Tracing
from stoker.trace.scope import TENSORS, Scope, current, note, recording

Ending = tuple[tuple[Any, ...], ...]
"""From an image to its tensor: names in `ENDINGS`, each with its hashable arguments."""

ENDINGS: dict[str, Callable[..., torch.Tensor]] = {}
"""torchvision's own functions, filled by `hooks`: they say what a deferred tensor's values are."""

_DTYPES = {
    torch.uint8: "uint8",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

_CPU = torch.device("cpu")
_plainly = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True)
class Erasure:
    """A rectangle of one value per channel that is written over a finished tensor."""

    top: int
    left: int
    height: int
    width: int
    shape: tuple[int, ...]
    values: tuple[float, ...]

    def apply(self, image: torch.Tensor) -> None:
        """Writes over ``image``, of shape (channels, height, width)."""
        value = torch.tensor(self.values, dtype=image.dtype).view(self.shape)
        bottom, right = self.top + self.height, self.left + self.width
        image[..., self.top : bottom, self.left : right] = value


@lru_cache(maxsize=256)
def tail_of(mode: str, ending: Ending) -> Tail:
    """The table of ``ending``: what it makes of each byte in each channel of an image."""
    channels = 3 if mode == "RGB" else 1
    ramp = np.arange(256, dtype=np.uint8)
    pixels = np.stack([ramp] * channels, axis=-1)[None] if channels > 1 else ramp[None]
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    value: Any = Image.fromarray(pixels)
    with recording(None), torch.no_grad():
        for name, *arguments in ending:
            value = ENDINGS[name](value, *arguments)
            if name.startswith("normalize") and channels == 3:
                mean, std = arguments[0], arguments[1]
    table = value.as_subclass(torch.Tensor)[:, 0, :].contiguous()
    dtype = _DTYPES[table.dtype]
    if dtype == "uint8":
        if not torch.equal(table, torch.from_numpy(ramp).expand(channels, 256)):
            raise ValueError("bytes that are not the image's own")
        return Tail("uint8", channels, b"")
    if channels == 1:
        table = table.expand(3, 256).contiguous()
    return Tail(dtype, channels, bytes(table.view(torch.uint8).numpy().tobytes()), mean, std)


def dtype_name(dtype: torch.dtype) -> str | None:
    """The engine's name of ``dtype``; None where it has none."""
    return _DTYPES.get(dtype)


class Promise:
    """What a deferred image tensor will be."""

    __slots__ = ("ending", "erasures", "node")

    def __init__(self, node: Node, ending: Ending, erasures: tuple[Erasure, ...] = ()) -> None:
        self.node, self.ending, self.erasures = node, ending, erasures

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return 3 if self.node.mode == "RGB" else 1, self.node.size[1], self.node.size[0]

    @property
    def interleaved(self) -> bool:
        """True where the stock tensor is a view of the image's rows, channels last in memory.

        Of a single channel `contiguous()` leaves the view as it is.
        """
        return self.ending[0][0] == "pil_to_tensor" or self.node.mode == "L"

    def fill(self, out: torch.Tensor, scope: Scope | None) -> None:
        """Makes the values in ``out``, contiguous, of `shape`."""
        native = native_ending(tail_of(self.node.mode, self.ending), Tracing.order)
        self.node.run(native, out.view(-1).view(torch.uint8).numpy(), scope)
        for erasure in self.erasures:
            erasure.apply(out)

    def make(self, dtype: torch.dtype, scope: Scope | None) -> torch.Tensor:
        """The tensor, with the strides that it has in torchvision."""
        if self.ending == (("pil_to_tensor",),):
            channels, height, width = self.shape
            rows = torch.empty((height, width, channels), dtype=torch.uint8)
            self.node.run(native_image(channels, Tracing.order), rows.view(-1).numpy(), scope)
            image = rows.permute(2, 0, 1)
            for erasure in self.erasures:
                erasure.apply(image)
            return image
        out = torch.empty(self.shape, dtype=dtype)
        self.fill(out, scope)
        return interleave(out) if self.interleaved else out


def interleave(image: torch.Tensor) -> torch.Tensor:
    """A contiguous image of (channels, height, width) with its channels last in memory."""
    channels, height, width = image.shape
    if channels == 1:
        return image.as_strided((1, height, width), (1, width, 1))
    return image.permute(1, 2, 0).contiguous().permute(2, 0, 1)


class Stack:
    """What a deferred batch will be: promises, and tensors of samples that were made already."""

    __slots__ = ("dtype", "items", "shape")

    def __init__(
        self, items: list[Promise | torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.items, self.shape, self.dtype = items, shape, dtype

    def make(self, scope: Scope | None) -> torch.Tensor:
        """The batch, of shape (samples, channels, height, width)."""
        out = torch.empty((len(self.items), *self.shape), dtype=self.dtype)
        for row, item in zip(out, self.items, strict=True):
            if isinstance(item, Promise):
                item.fill(row, scope)
            else:
                row.copy_(item)
        return out


class DeferredTensor(torch.Tensor):
    """A tensor whose values are a promise, or a stack of promises."""

    _promise: Promise | Stack
    _real: torch.Tensor | None

    @classmethod
    def of(cls, promise: Promise | Stack, dtype: torch.dtype, scope: Scope) -> DeferredTensor:
        """A deferred tensor of ``dtype``."""
        if isinstance(promise, Stack):
            shape: tuple[int, ...] = (len(promise.items), *promise.shape)
            self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=_CPU)
        else:
            shape = promise.shape
            strides = None
            if promise.interleaved:
                strides = (1, shape[2] * shape[0], shape[0])
            self = torch.Tensor._make_wrapper_subclass(
                cls, shape, strides=strides, dtype=dtype, device=_CPU
            )
        self._promise, self._real = promise, None
        scope.live.append(weakref.ref(self))
        return self

    def made(self, what: str) -> torch.Tensor:
        """The tensor itself; made now if it was not yet."""
        if self._real is None:
            scope = current()
            if scope is not None:
                scope.counts.values += 1
                note(scope, what)
            with recording(None), _plainly(), torch.no_grad():
                if isinstance(self._promise, Stack):
                    self._real = self._promise.make(scope)
                else:
                    self._real = self._as(self._promise.make(self.dtype, scope))
        return self._real

    def _as(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` as the class that stands behind this one."""
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredTensor) and first._real is None:
            if func in _FACTS:
                with _plainly():
                    return func(*args, **kwargs)
            if (
                func in _UNCHANGED
                and len(args) == 1
                and not kwargs
                and (func is not torch.Tensor.contiguous or first.is_contiguous())
            ):
                return first
            if func is torch.Tensor.as_subclass and args[1] is torch.Tensor:
                return plain(first)
        if func is torch.stack and kwargs.get("out") is None:
            stacked = stack(args[0] if args else kwargs.get("tensors"), *_dim(args, kwargs))
            if stacked is not None:
                return stacked
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        with _plainly():
            args, kwargs = real(args, name), real(kwargs, name)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*real(args, str(func)), **real(kwargs or {}, str(func)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.made("pickling").__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        return self.made("copying").__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __repr__(self, **options: Any) -> Any:  # type: ignore[override]
        return self.made("printing").__repr__(**options)  # type: ignore[no-untyped-call]


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return args[1:2] if len(args) > 1 else (kwargs.get("dim", 0),)


def plain(tensor: DeferredTensor) -> DeferredTensor | None:
    """A deferred tensor without tv_tensors' class."""
    scope = current()
    if type(tensor) is DeferredTensor or scope is None:
        return tensor
    return DeferredTensor.of(tensor._promise, tensor.dtype, scope)


_TENSOR = torch.Tensor
_FACTS = {
    _TENSOR.shape.__get__,  # type: ignore[attr-defined]
    _TENSOR.dtype.__get__,  # type: ignore[attr-defined]
    _TENSOR.device.__get__,
    _TENSOR.ndim.__get__,  # type: ignore[attr-defined]
    _TENSOR.layout.__get__,  # type: ignore[attr-defined]
    _TENSOR.is_sparse.__get__,  # type: ignore[attr-defined]
    _TENSOR.requires_grad.__get__,  # type: ignore[attr-defined]
    _TENSOR.is_cuda.__get__,  # type: ignore[attr-defined]
    _TENSOR.is_quantized.__get__,  # type: ignore[attr-defined]
    _TENSOR.is_nested.__get__,  # type: ignore[attr-defined]
    _TENSOR.is_meta.__get__,  # type: ignore[attr-defined]
    _TENSOR.is_leaf.__get__,  # type: ignore[attr-defined]
    _TENSOR.size,
    _TENSOR.dim,
    _TENSOR.ndimension,
    _TENSOR.numel,
    _TENSOR.nelement,
    _TENSOR.element_size,
    _TENSOR.is_floating_point,
    _TENSOR.is_complex,
    _TENSOR.is_contiguous,
    _TENSOR.stride,
    _TENSOR.__len__,
    _TENSOR.get_device,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_tensor,
    torch.numel,
}
_UNCHANGED = {_TENSOR.contiguous, _TENSOR.cpu, _TENSOR.detach}


def real(value: Any, what: str) -> Any:
    """``value`` with the values of every deferred tensor in it."""
    if isinstance(value, DeferredTensor):
        return value.made(what)
    if type(value) in (list, tuple):
        return type(value)(real(item, what) for item in value)
    if type(value) is dict:
        return {key: real(item, what) for key, item in value.items()}
    return value


def stack(tensors: Any, dim: Any = 0) -> DeferredTensor | None:
    """A deferred batch; None where torch itself must stack, or say what is wrong."""
    scope = current()
    if scope is None or scope.depth < TENSORS or dim != 0 or type(tensors) not in (list, tuple):
        return None
    items: list[Promise | torch.Tensor] = []
    ending: Ending | None = None
    with _plainly():
        if not tensors or not isinstance(tensors[0], torch.Tensor):
            return None
        shape, dtype = tuple(tensors[0].shape), tensors[0].dtype
        for tensor in tensors:
            if (
                not isinstance(tensor, torch.Tensor)
                or tuple(tensor.shape) != shape
                or tensor.dtype != dtype
                or tensor.requires_grad
                or tensor.device.type != "cpu"
                or len(shape) != 3
            ):
                return None
            if isinstance(tensor, DeferredTensor):
                promise = tensor._promise
                if isinstance(promise, Stack):
                    return None
                if tensor._real is not None:
                    items.append(tensor._real.as_subclass(_TENSOR))
                elif ending is None or promise.ending == ending:
                    ending = promise.ending
                    items.append(promise)
                else:
                    items.append(tensor.made("another ending").as_subclass(_TENSOR))
            else:
                items.append(tensor.as_subclass(_TENSOR))
    if ending is None:
        return None
    return DeferredTensor.of(Stack(items, shape, dtype), dtype, scope)


def defer(
    cls: type[DeferredTensor], image: Any, name: str, dtype: torch.dtype
) -> DeferredTensor | None:
    """A deferred tensor of a lazy image; None where torchvision itself must make it."""
    scope = current()
    if scope is None or scope.depth < TENSORS or type(image) is not LazyImage:
        return None
    node: Node = image.__dict__["_node"]
    return cls.of(Promise(node, ((name,),)), dtype, scope)


def extend(tensor: Any, dtype: torch.dtype, name: str, *arguments: Any) -> DeferredTensor | None:
    """A deferred tensor with one more step at its end; None where it must be taken on values."""
    scope = current()
    if scope is None or scope.depth < TENSORS or not isinstance(tensor, DeferredTensor):
        return None
    promise = tensor._promise
    if tensor._real is not None or isinstance(promise, Stack) or promise.erasures:
        return None
    if dtype not in _DTYPES or (dtype is torch.uint8):
        return None
    ending = (*promise.ending, (name, *arguments))
    return type(tensor).of(Promise(promise.node, ending), dtype, scope)


def erase(tensor: Any, erasure: Erasure) -> DeferredTensor | None:
    """A deferred tensor with a rectangle written over; None where it must be done on values."""
    scope = current()
    if scope is None or not isinstance(tensor, DeferredTensor) or tensor._real is not None:
        return None
    promise = tensor._promise
    if isinstance(promise, Stack) or len(erasure.values) > 3:
        return None
    new = Promise(promise.node, promise.ending, (*promise.erasures, erasure))
    return type(tensor).of(new, tensor.dtype, scope)


def settle(scope: Scope) -> None:
    """Makes every tensor that outlives its batch."""
    for reference in scope.live:
        tensor = reference()
        if isinstance(tensor, DeferredTensor):
            tensor.made("a tensor kept after its batch")
