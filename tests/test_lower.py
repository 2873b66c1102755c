"""Lowering: whole transforms bit for bit, and everything that must not be lowered."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import torch
import torchvision.transforms as v1
import torchvision.transforms.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms import _functional_pil, v2

from oracle import bits, jpeg, noise, transformed
from stoker import plan as ops
from stoker import proof
from stoker.engine import result_size, run_encoded
from stoker.lower import RULES, documentation, lower_transform, prove
from stoker.plan import Plan, Refusal, Tail

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = pytest.mark.parametrize("T", [v1, v2], ids=["v1", "v2"])
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
MODE = v1.InterpolationMode

pytestmark = pytest.mark.filterwarnings("ignore:The transform `ToTensor:UserWarning")


def tensor(T: Any) -> list[Any]:
    return [v1.ToTensor()] if T is v1 else [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


def plan_of(transform: Any) -> Plan:
    plan = lower_transform(transform)
    assert isinstance(plan, Plan), plan
    return plan


def refusal(transform: Any) -> Refusal:
    refused = lower_transform(transform)
    assert isinstance(refused, Refusal), refused
    assert refused.op
    assert refused.why
    assert refused.instead
    return refused


# Whole transforms

RECIPES: dict[str, Callable[[Any], list[Any]]] = {
    "seed": lambda T: [T.Resize((64, 64)), T.RandomHorizontalFlip(), *tensor(T)],
    "train": lambda T: [
        T.RandomResizedCrop(64),
        T.RandomHorizontalFlip(),
        *tensor(T),
        T.Normalize(MEAN, STD),
    ],
    "val": lambda T: [T.Resize(72), T.CenterCrop(64), *tensor(T), T.Normalize(MEAN, STD)],
    "bicubic": lambda T: [
        T.RandomResizedCrop((48, 80), (0.3, 0.9), interpolation=MODE.BICUBIC),
        T.RandomVerticalFlip(),
        *tensor(T),
    ],
    "lanczos": lambda T: [T.Resize((40, 50), MODE.LANCZOS), *tensor(T)],
    "hamming": lambda T: [T.Resize(40, MODE.HAMMING), T.CenterCrop(30), *tensor(T)],
    "nearest": lambda T: [T.Resize(90, MODE.NEAREST), T.RandomCrop(70), T.PILToTensor()],
    "max_size": lambda T: [T.Resize(60, max_size=64), T.CenterCrop(64), T.PILToTensor()],
    "cifar": lambda T: [
        T.Resize((32, 32)),
        T.RandomCrop(32, padding=4),
        T.RandomHorizontalFlip(),
        *tensor(T),
        T.Normalize(MEAN, STD),
    ],
    "reflect": lambda T: [T.RandomCrop(40, padding=6, padding_mode="reflect"), *tensor(T)],
    "edge": lambda T: [
        T.RandomCrop(99, pad_if_needed=True, padding_mode="edge"),
        T.Resize(50, MODE.BOX),
        *tensor(T),
    ],
    "gray": lambda T: [T.Resize(50), T.Grayscale(1), T.RandomCrop(44), *tensor(T)],
    "gray padded": lambda T: [
        T.Grayscale(1),
        T.Pad(5, fill=77),
        T.RandomResizedCrop(40),
        *tensor(T),
        T.Normalize([0.5], [0.25]),
    ],
    "gray in colour": lambda T: [T.Grayscale(3), T.Pad(3, fill=(1, 2, 3)), *tensor(T)],
    "random gray": lambda T: [
        T.RandomGrayscale(0.5),
        T.RandomResizedCrop(40),
        T.RandomGrayscale(0.5),
        *tensor(T),
    ],
    "padded": lambda T: [
        T.Resize((30, 31)),
        T.Pad((1, 2, 3, 4), fill=(9, 8, 7)),
        T.Pad(3, padding_mode="symmetric"),
        T.RandomHorizontalFlip(),
        *tensor(T),
    ],
    "flips behind": lambda T: [
        T.Resize((33, 34)),
        *tensor(T),
        T.RandomHorizontalFlip(),
        T.Normalize(MEAN, STD),
        T.RandomVerticalFlip(),
    ],
    "two resizes": lambda T: [T.Resize(80), T.CenterCrop(70), T.Resize((40, 30)), *tensor(T)],
    "center beyond": lambda T: [T.CenterCrop((200, 55)), T.Resize((50, 51)), *tensor(T)],
    "nested": lambda T: [
        v1.Compose([T.Resize(40), nn.Sequential(T.CenterCrop(32), v2.Identity())]),
        nn.Identity(),
        v2.Compose([T.RandomHorizontalFlip()]),
        *tensor(T),
    ],
    "as it is": lambda T: [*tensor(T)],
}

FILES = [
    jpeg(noise(130, 97), quality=92),
    jpeg(noise(75, 118), quality=80, subsampling=0),
    jpeg(noise(101, 101), quality=95, subsampling=1),
    jpeg(noise(111, 91).convert("L"), quality=90),
]


def compare(transform: Any, keys: int = 6) -> None:
    """Proves the plan of ``transform`` and compares it on more files and keys."""
    plan = plan_of(transform)
    assert prove(plan, transform) is None
    for data in FILES:
        for key in range(keys if plan.draws else 1):
            image = Image.open(io.BytesIO(data)).convert("RGB")
            expected = bits(default_collate([transformed(transform, image, key)])[0])
            size = result_size(plan, (image.height, image.width), key)
            assert size == expected.shape[1:]
            status, result = run_encoded(plan, data, key, size)
            assert status == "ok"
            assert result is not None
            assert result.dtype == expected.dtype
            assert result.tobytes() == expected.tobytes()


@VERSIONS
@pytest.mark.parametrize("name", RECIPES)
def test_recipes(T: Any, name: str) -> None:
    compare(T.Compose(RECIPES[name](T)))


TAILS: dict[str, Callable[[], list[Any]]] = {
    "ToTensor": lambda: [v1.ToTensor()],
    "v2.ToTensor": lambda: [v2.ToTensor()],
    "PILToTensor": lambda: [v1.PILToTensor()],
    "ToImage": lambda: [v2.ToImage()],
    "pure": lambda: [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()],
    "unscaled": lambda: [v2.ToImage(), v2.ToDtype(torch.float32)],
    "same dtype": lambda: [v1.PILToTensor(), v2.ToDtype(torch.uint8, scale=True)],
    "by type": lambda: [
        v2.ToImage(),
        v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}),
    ],
    "half": lambda: [v1.PILToTensor(), v1.ConvertImageDtype(torch.float16)],
    "bfloat16": lambda: [
        v2.PILToTensor(),
        v2.ToDtype(torch.bfloat16, scale=True),
        v2.Normalize(MEAN, STD),
    ],
    "v1 bfloat16": lambda: [
        v1.ToTensor(),
        v1.Normalize(MEAN, STD),
        v1.ConvertImageDtype(torch.bfloat16),
    ],
    "tensors": lambda: [v1.ToTensor(), v1.Normalize(torch.tensor(MEAN), torch.tensor(STD))],
    "twice": lambda: [v1.ToTensor(), v1.Normalize(MEAN, STD), v1.Normalize(STD, MEAN)],
    "one for all": lambda: [v1.ToTensor(), v2.Normalize([0.5], [0.2])],
    "in place": lambda: [v1.ToTensor(), v1.Normalize(MEAN, STD, inplace=True)],
    "back to bytes": lambda: [v1.ToTensor(), v1.ConvertImageDtype(torch.uint8)],
}


@pytest.mark.parametrize("name", TAILS)
def test_tails(name: str) -> None:
    compare(v1.Compose([v1.Resize((20, 24)), *TAILS[name]()]))


def test_gray_is_broadcast_by_v2_normalize() -> None:
    transform = v2.Compose(
        [v2.Resize((9, 9)), v2.Grayscale(1), *tensor(v2), v2.Normalize(MEAN, STD)]
    )
    assert plan_of(transform).tail.channels == 3
    compare(transform)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_default_dtype(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        compare(v1.Compose([v1.Resize((20, 24)), v1.ToTensor()]))
        why = refusal(v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor()])).op
        assert why == "torch's default dtype"
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize": False},
        {"use_prefetcher": True},
        {"crop_mode": "squash", "interpolation": "bicubic"},
        {"img_size": 96, "crop_pct": 1.0, "interpolation": "lanczos"},
    ],
)
def test_timm_evaluation(options: dict[str, Any]) -> None:
    factory = pytest.importorskip("timm.data.transforms_factory")
    compare(factory.transforms_imagenet_eval(**{"img_size": 64, **options}))


@pytest.mark.parametrize(
    "options", [{"crop_mode": "border"}, {"img_size": (64, 96)}, {"crop_border_pixels": 3}]
)
def test_timm_transforms_of_its_own_are_refused(options: dict[str, Any]) -> None:
    factory = pytest.importorskip("timm.data.transforms_factory")
    name = refusal(factory.transforms_imagenet_eval(**{"img_size": 64, **options})).op
    assert name.startswith("timm.data.transforms.")


# What must be refused


def with_tensor(*transforms: Any) -> Any:
    return v1.Compose([*transforms, v1.ToTensor()])


class Harmless(v1.Resize):  # type: ignore[misc] # torchvision is not typed
    """Only another constructor."""

    def __init__(self) -> None:
        super().__init__((10, 12))
        self.remark = "mine"

    def remarks(self) -> str:
        return self.remark


def test_a_subclass_that_changes_nothing_is_stock() -> None:
    compare(with_tensor(Harmless()))


def _method(self: Any, *args: Any, **kwargs: Any) -> Any:
    return args[0]


@pytest.mark.parametrize("name", ["forward", "__call__", "__getattribute__", "__getattr__"])
@pytest.mark.parametrize("base", [v1.Resize, v2.Resize])
def test_subclass_with_a_method(base: Any, name: str) -> None:
    def method(self: Any, *args: Any) -> Any:
        return object.__getattribute__(self, *args)

    cls: Any = type("Mine", (base,), {name: method})
    transform = cls.__new__(cls) if "attr" in name else cls((3, 4))
    assert "Mine" in refusal(with_tensor(transform)).op


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (v1.RandomResizedCrop, "get_params"),
        (v2.RandomResizedCrop, "make_params"),
        (v2.RandomHorizontalFlip, "transform"),
        (v2.CenterCrop, "_call_kernel"),
        (v2.CenterCrop, "_transformed_types"),
        (v1.CenterCrop, "_call_impl"),
    ],
)
def test_subclass_with_an_inner_method(base: type, name: str) -> None:
    cls = type("Mine", (base,), {name: _method})
    transform = cls() if "Flip" in base.__name__ else cls(8)
    assert f"changes {name}" in refusal(with_tensor(transform)).why


def test_subclass_with_a_property() -> None:
    class Mine(v1.CenterCrop):  # type: ignore[misc] # torchvision is not typed
        size = property(lambda self: (5, 5), lambda self, value: None)

    assert "size" in refusal(with_tensor(Mine(8))).why


def test_subclass_of_two() -> None:
    class Mixin:
        def forward(self, image: Any) -> Any:
            return image

    class Mine(Mixin, v1.CenterCrop):  # type: ignore[misc] # torchvision is not typed
        pass

    assert "Mine" in refusal(with_tensor(Mine(8))).op


@pytest.mark.parametrize("name", ["forward", "get_params", "_call_impl"])
def test_attribute_of_the_object(name: str) -> None:
    transform = v1.RandomCrop(5)
    setattr(transform, name, lambda *args: args[0])
    assert name in refusal(with_tensor(transform)).why


def test_unknown_attribute() -> None:
    transform = v1.CenterCrop(5)
    transform.rotate = 3
    assert "rotate" in refusal(with_tensor(transform)).why


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks(register: str) -> None:
    transform = v1.CenterCrop(5)
    handle = getattr(transform, register)(lambda *args: None)
    assert "hooks" in refusal(with_tensor(transform)).why
    handle.remove()
    assert isinstance(lower_transform(with_tensor(transform)), Plan)


def test_hook_of_a_container() -> None:
    transform = v2.Compose([v2.CenterCrop(5), *tensor(v2)])
    transform.register_forward_hook(lambda *args: None)
    assert "hooks" in refusal(transform).why


def test_global_hooks() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert "hooks" in refusal(with_tensor()).why
    finally:
        handle.remove()


def test_default_device_and_modes() -> None:
    with torch.device("meta"):
        assert "default device" in refusal(with_tensor()).why
    with torch.overrides.BaseTorchFunctionMode():
        assert "mode" in refusal(with_tensor()).why


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    had = name in vars(owner)
    kept = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, kept)
        else:
            delattr(owner, name)


PATCHES: list[tuple[Any, str]] = [
    (v1.CenterCrop, "forward"),
    (v1.CenterCrop, "__call__"),
    (v1.RandomCrop, "get_params"),
    (v1.Compose, "__call__"),
    (v2.Transform, "forward"),
    (v2.RandomResizedCrop, "make_params"),
    (F, "resize"),
    (F, "_compute_resized_output_size"),
    (v2.functional, "horizontal_flip"),
    (_functional_pil, "crop"),
    (nn.Module, "__call__"),
    (nn.Module, "__getattribute__"),
    (nn.Sequential, "forward"),
    (torch, "rand"),
    (torch.Tensor, "uniform_"),
    (Image.Image, "resize"),
    (Image, "fromarray"),
    (np, "pad"),
]


@pytest.mark.parametrize(("owner", "name"), PATCHES, ids=lambda v: getattr(v, "__name__", v))
def test_patches(owner: Any, name: str) -> None:
    transform = with_tensor(v1.CenterCrop(5))
    plan_of(transform)

    def mine(*args: Any, **kwargs: Any) -> Any:
        return object.__getattribute__(*args) if name == "__getattribute__" else args[0]

    with patched(owner, name, mine):
        assert refusal(transform).op.endswith(name)
    plan_of(transform)


def test_patched_code() -> None:
    transform = with_tensor(v1.CenterCrop(5))
    kept = v1.CenterCrop.forward.__code__
    v1.CenterCrop.forward.__code__ = (lambda self, img: img).__code__
    try:
        assert refusal(transform).op == "CenterCrop.forward"
    finally:
        v1.CenterCrop.forward.__code__ = kept
    F.pad.__defaults__, defaults = (1, "constant"), F.pad.__defaults__
    try:
        assert refusal(transform).op.endswith("functional.pad")
    finally:
        F.pad.__defaults__ = defaults


EARLY = """
import torchvision.transforms as v1, torchvision.transforms.functional as F
{patch}
from stoker.lower import lower_transform
print(lower_transform(v1.Compose([v1.CenterCrop(4), v1.ToTensor()])))
"""


@pytest.mark.parametrize(
    ("patch", "told"),
    [
        ("", "CenterCrop(4x4) > "),
        ("v1.CenterCrop.forward = lambda self, image: image", "is not the package's own code"),
        ("F.hflip = lambda image: image", "is not the package's own code"),
        (
            "import functools; old = F.crop\n"
            "@functools.wraps(old)\ndef crop(*args): return old(*args)\nF.crop = crop",
            "is not the package's own code",
        ),
    ],
    ids=["none", "method", "function", "wrapper"],
)
def test_patches_made_before_stoker_looked(patch: str, told: str) -> None:
    code = [sys.executable, "-c", EARLY.format(patch=patch)]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert told in done.stdout


class Own:
    """Somebody's transform."""

    def __call__(self, image: Any) -> Any:
        return image


@pytest.mark.parametrize(
    ("transform", "told"),
    [
        (None, "transform=None"),
        (v1.CenterCrop(5), "transform: does not end in a tensor"),
        (v1.Compose([]), "transform: does not end in a tensor"),
        (lambda image: image, "Python function"),
        (with_tensor(lambda image: image), "Python function"),
        (with_tensor(F.hflip), "hflip"),
        (with_tensor(Own()), "test_lower.Own"),
        (with_tensor(v1.Lambda(lambda image: image)), "Lambda"),
        (with_tensor(v1.GaussianBlur(3)), "GaussianBlur"),
        (with_tensor(v1.RandomApply([v1.CenterCrop(5)])), "RandomApply"),
        (v1.Compose([v2.ToImage(), v2.Resize(5)]), "Resize: after ToImage"),
        (v1.Compose([v1.ToTensor(), v1.CenterCrop(5)]), "CenterCrop: after ToTensor"),
        (v1.Compose([v1.PILToTensor(), v2.RandomResizedCrop(5)]), "after PILToTensor"),
        (v1.Compose([v1.Normalize(MEAN, STD), v1.ToTensor()]), "Normalize: comes before"),
        (with_tensor(v1.ConvertImageDtype(torch.float32)), "ConvertImageDtype: comes before"),
        (v1.Compose([v1.ToTensor(), v1.ToTensor()]), "raises TypeError"),
        (v1.Compose([v1.PILToTensor(), v1.Normalize(MEAN, STD)]), "raises TypeError"),
        (v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, [0, 1, 1])]), "raises ValueError"),
        (v1.Compose([v1.ToTensor(), v1.ConvertImageDtype(torch.float64)]), "float64"),
        (v1.Compose([v1.ToTensor(), v1.ConvertImageDtype(torch.int32)]), "int32"),
        (v1.Compose([v1.PILToTensor(), v1.ConvertImageDtype(torch.int16)]), "int16"),
        (v2.Compose([v2.PILToTensor(), v2.ToDtype({"others": torch.float64})]), "float64"),
        (with_tensor(v1.CenterCrop((5, 2.5))), "size=2.5"),
        (with_tensor(v1.Resize((5, 6), max_size=7)), "torchvision raises"),
        (with_tensor(v1.Resize(5, max_size=5)), "torchvision raises"),
        (with_tensor(v1.RandomHorizontalFlip(2)), "p=2"),
        (with_tensor(v1.RandomVerticalFlip(True)), "p=True"),
        (with_tensor(v1.RandomHorizontalFlip(float("nan"))), "p=nan"),
        (with_tensor(v1.Pad(-1)), "padding=-1"),
        (with_tensor(v1.Pad(1, fill=300)), "fill=300"),
        (with_tensor(v1.Pad(1, fill=(1, 2))), "fill=(1, 2)"),
        (with_tensor(v2.Pad(1, fill={Image.Image: 3, "others": 0})), "fill={"),
        (with_tensor(v1.Grayscale(1), v1.Pad(1, fill=(1, 2, 3))), "fill=(1, 2, 3)"),
        (with_tensor(v1.RandomResizedCrop(5, ratio=(0.0, 1.0))), "ratio=0.0"),
        (with_tensor(v1.RandomResizedCrop(5, scale=(-1, 1))), "scale=-1"),
        (with_tensor(*[v1.Pad(1)] * 9), "more than 8 operations"),
    ],
)
def test_refused(transform: Any, told: str) -> None:
    assert told in str(refusal(transform))


@pytest.mark.filterwarnings("ignore:Scale and ratio")
def test_descending_ranges_are_refused() -> None:
    assert "descends" in refusal(with_tensor(v1.RandomResizedCrop(5, scale=(1.0, 0.5)))).why


def test_changes_after_construction_count() -> None:
    crop = v1.CenterCrop(5)
    transform = v1.Compose([crop, v1.ToTensor()])
    assert plan_of(transform).output_size == (5, 5)
    crop.size = (6, 7)
    assert plan_of(transform).output_size == (6, 7)
    transform.transforms.insert(1, v1.Pad(1))
    assert plan_of(transform).output_size == (8, 9)
    transform.transforms = (crop, Own())
    assert "Own" in refusal(transform).op


def test_v2_keeps_the_logarithms_of_the_first_ratio() -> None:
    crop = v2.RandomResizedCrop(16, ratio=(0.9, 1.1))
    crop.ratio = (0.5, 2.0)
    compare(v2.Compose([crop, *tensor(v2)]))


def test_subclassed_tensors_are_refused() -> None:
    transform = v2.Compose([v2.CenterCrop(5), *tensor(v2)])
    pure = v2.Compose([transform, v2.ToPureTensor()])
    with tv_tensors.set_return_type("TVTensor"):
        assert "ToPureTensor" in refusal(transform).instead
        plan_of(pure)
    plan_of(transform)


# Proofs


def test_a_wrong_plan_is_found_out() -> None:
    transform = with_tensor(v1.Resize((20, 20)), v1.RandomHorizontalFlip())
    right = plan_of(transform)
    assert prove(right, transform) is None
    resize, flip = right.ops
    wrong: list[tuple[Plan, str]] = [
        (Plan((ops.Resize((20, 20), None, "bicubic"), flip), right.tail, right.order), "values"),
        (Plan((resize, ops.RandomVerticalFlip(0.5)), right.tail, right.order), "values"),
        (Plan((resize,), right.tail, right.order), "values"),
        (Plan((ops.CenterCrop((20, 21)), flip), right.tail, right.order), "shape"),
        (Plan(right.ops, Tail("uint8", 3, b""), right.order), "values"),
        (Plan(right.ops, Tail("float32", 1, right.tail.table), right.order), "shape"),
    ]
    for plan, told in wrong:
        refused = prove(plan, transform)
        assert refused is not None
        assert told in refused.why
        assert prove(plan, transform) is refused


def test_a_plan_of_a_transform_that_raises_is_found_out() -> None:
    def transform(image: Any) -> Any:
        raise ZeroDivisionError

    plan = plan_of(with_tensor(v1.CenterCrop(11)))
    refused = prove(
        Plan((*plan.ops, ops.Pad((0, 0, 0, 1), "edge", (0, 0, 0))), plan.tail, plan.order),
        transform,
    )
    assert refused is not None
    assert "ZeroDivisionError" in refused.why


def test_proofs_leave_the_generators() -> None:
    transform = with_tensor(v1.RandomCrop(13, padding=2))
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    assert prove(plan_of(transform), transform) is None
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_crops_larger_than_the_files_are_proven() -> None:
    compare_large = with_tensor(v1.RandomCrop(300))
    assert prove(plan_of(compare_large), compare_large) is None
    too_large = with_tensor(v1.RandomCrop(3000))
    refused = prove(plan_of(too_large), too_large)
    assert refused is not None
    assert "none of its images" in refused.why


def test_pass_order_is_found() -> None:
    assert proof.pass_order() in ops.PASS_ORDERS
    version = int(PIL.__version__.split(".")[0])
    assert (proof.pass_order() == "cheaper_first") == (version >= 13)


# Documentation


def test_documentation_is_up_to_date() -> None:
    assert (ROOT / "docs" / "transforms.md").read_text(encoding="utf-8") == documentation()


def test_every_rule_names_a_class() -> None:
    for name, rule in RULES.items():
        for version in rule.versions.split(", "):
            module = {"v1": v1, "v2": v2, "torch": nn}.get(version)
            assert module is None or hasattr(module, name)
