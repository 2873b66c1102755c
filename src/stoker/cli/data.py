"""What DATA means on the command line: the same for every command.

- a class folder: one subfolder per label, as torchvision's ImageFolder reads it;
- `DIR --labels FILE`: images below DIR, a text file with "name label" lines, or a CSV;
- a tar shard as WebDataset writes them, or a pattern like `train-{000..099}.tar`;
- `file.py:name`: a Dataset in a Python file, or a function without arguments that makes one.

Data without a transform of its own gets one of the RECIPES.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from torch.utils.data import Dataset, IterableDataset, Subset

from stoker import ImageDataset, ImageFolder
from stoker import open as open_source
from stoker.errors import SourceError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Recipe(StrEnum):
    """The transforms that data without one gets; all end in normalised float32."""

    resize = "resize"
    train = "train"
    val = "val"


# What every command takes.
DataArgument = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="A class folder, an image folder with --labels, tar shards (a{00..99}.tar), or "
        "file.py:name (a Dataset, or a function that makes one).",
        show_default=False,
    ),
]
LabelsOption = Annotated[
    Path | None,
    typer.Option(
        "--labels", metavar="FILE", help='Label file of an image folder: "name label" lines or CSV.'
    ),
]
RecipeOption = Annotated[
    Recipe | None,
    typer.Option(
        help="Transform for data that has none (train, if left out). resize: Resize((224, 224)), "
        "flip; train: RandomResizedCrop(224), flip; val: Resize(256), CenterCrop(224).",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Data:
    """A map-style dataset and how to speak of it.

    Attributes:
        dataset: what was found, with its transform.
        name: DATA as the user gave it.
        recipe: the recipe that was put in, or None where the data has its own transform.
    """

    dataset: Dataset[Any]
    name: str
    recipe: Recipe | None

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def spread(self, limit: int) -> Dataset[Any]:
        """At most `limit` samples, evenly spread over the dataset; 0 means all of them."""
        total = len(self)
        if limit == 0 or total <= limit:
            return self.dataset
        return Subset(self.dataset, [position * total // limit for position in range(limit)])


def resolve(data: str, labels: Path | None, recipe: Recipe | None) -> Data:
    """Returns the dataset that DATA names.

    Raises:
        SourceError: there is nothing there, or it is no dataset.
        typer.BadParameter: the options do not fit the data.
    """
    file, colon, name = data.rpartition(":")
    if colon and file.endswith(".py"):
        if labels is not None:
            raise typer.BadParameter("--labels belongs to an image folder, not to file.py:name")
        return _with_recipe(_load(Path(file), name), data, recipe)
    folder = Path(data)
    if folder.suffix == ".py" and folder.is_file():
        raise typer.BadParameter(f"say which dataset of the file is meant: {data}:NAME")
    wanted = recipe or Recipe.train
    transform = transform_of_recipe(wanted)
    if not folder.is_dir():
        if labels is not None:
            raise SourceError(data, "no such folder")
        if not folder.exists() and not any(sign in data for sign in "{*?["):
            raise SourceError(data, "no such folder")
        found = open_source(data, transform)
        if found.files.labels is None:
            raise SourceError(data, "has boxes; give a file.py:name with your own transforms")
        return Data(found, data, wanted)
    if labels is not None:
        if not labels.is_file():
            raise SourceError(str(labels), "no such label file")
        return Data(ImageDataset(data, str(labels), transform), data, wanted)
    with os.scandir(folder) as entries:
        if not any(entry.is_dir() for entry in entries):
            raise SourceError(
                data, "no subfolders, so no classes; give the labels of its images: --labels FILE"
            )
    return Data(ImageFolder(data, transform), data, wanted)


def transform_of_recipe(recipe: Recipe) -> Callable[[Any], Any]:
    """The transform that ``recipe`` stands for.

    Raises:
        SourceError: torchvision is not installed.
    """
    try:
        from torchvision import transforms
    except ImportError:
        raise SourceError(
            "torchvision", "not installed, and the transforms come from it: pip install torchvision"
        ) from None
    head = {
        Recipe.resize: [transforms.Resize((224, 224)), transforms.RandomHorizontalFlip()],
        Recipe.train: [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()],
        Recipe.val: [transforms.Resize(256), transforms.CenterCrop(224)],
    }[recipe]
    tail = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    made: Callable[[Any], Any] = transforms.Compose(head + tail)
    return made


def with_transform(dataset: Dataset[Any], transform: Callable[[Any], Any]) -> Dataset[Any]:
    """Returns a copy of a dataset that has a `transform`, with another one; files are shared."""
    import copy

    changed = copy.copy(dataset)
    if isinstance(dataset, Subset):
        changed.dataset = with_transform(dataset.dataset, transform)  # type: ignore[attr-defined]
        return changed
    changed.transform = transform  # type: ignore[attr-defined]
    # torchvision's datasets keep it a second time, joined with the target's.
    if getattr(dataset, "transforms", None) is not None:
        joined = copy.copy(dataset.transforms)  # type: ignore[attr-defined]
        joined.transform = transform
        changed.transforms = joined  # type: ignore[attr-defined]
    return changed


def transform_of(dataset: Dataset[Any]) -> Callable[[Any], Any] | None:
    """The `transform` attribute of a dataset, or of what a Subset was made of; None without one."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    found: Callable[[Any], Any] | None = getattr(dataset, "transform", None)
    return found


def _with_recipe(dataset: Dataset[Any], name: str, recipe: Recipe | None) -> Data:
    if transform_of(dataset) is not None:
        if recipe is not None:
            raise typer.BadParameter(f"{name} has a transform of its own; leave --recipe out")
        return Data(dataset, name, None)
    if recipe is None:
        return Data(dataset, name, None)
    if not hasattr(dataset, "transform"):
        raise typer.BadParameter(
            f"{name} has no attribute `transform` for --recipe to set; leave --recipe out"
        )
    return Data(with_transform(dataset, transform_of_recipe(recipe)), name, recipe)


def _import(file: Path) -> ModuleType:
    if not file.is_file():
        raise SourceError(str(file), "no such file")
    file = file.resolve()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise SourceError(str(file), "not a Python file")
    module = importlib.util.module_from_spec(spec)
    # As `python file.py` would: neighbours can be imported, and workers find the module by name.
    sys.path.insert(0, str(file.parent))
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SourceError(
            str(file), f"its import failed with {type(error).__name__}: {error}"
        ) from error
    return module


def _load(file: Path, name: str) -> Dataset[Any]:
    module = _import(file)
    found = getattr(module, name, None)
    if found is None:
        names = [
            key
            for key, value in vars(module).items()
            if isinstance(value, Dataset)
            or (callable(value) and getattr(value, "__module__", None) == module.__name__)
        ]
        raise SourceError(
            str(file), f"has no {name!r}; it has {', '.join(sorted(names)) or 'no dataset'}"
        )
    if not isinstance(found, Dataset) and callable(found):
        try:
            found = found()
        except Exception as error:
            raise SourceError(
                f"{file}:{name}", f"the call {name}() failed with {type(error).__name__}: {error}"
            ) from error
    if isinstance(found, IterableDataset):
        raise SourceError(
            f"{file}:{name}", "an iterable dataset; a map-style one (len and []) is needed"
        )
    can_be_read = hasattr(found, "__len__") and hasattr(found, "__getitem__")
    if not can_be_read or isinstance(found, str | bytes):
        raise SourceError(
            f"{file}:{name}",
            f"a {type(found).__name__}, not a dataset with len() and []; name a Dataset or a "
            "function that returns one",
        )
    if len(found) == 0:
        raise SourceError(f"{file}:{name}", "the dataset is empty")
    dataset: Dataset[Any] = found
    return dataset
