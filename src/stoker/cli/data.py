"""What DATA means on the command line: the same for every command.

- whatever `stoker.open` takes: a class folder, a label file, tar shards such as
  `train-{000..099}.tar`, LMDB, TFRecord, MDS and so on, told by content;
- `DIR --labels FILE`: images below DIR, a text file with "name label" lines, or a CSV;
- `file.py:name`: a Dataset in a Python file, or a function without arguments that makes one.

Data without a transform of its own gets one of the RECIPES.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from torch.utils.data import Dataset, IterableDataset, Subset

from stoker import ImageDataset
from stoker import open as open_source
from stoker.errors import SourceError
from stoker.sources import open_whole

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
        help="A class folder, an image folder with --labels, shards (a{00..99}.tar; TFRecord, "
        "LMDB, MDS, ...), or file.py:name (a Dataset, or a function that makes one).",
        show_default=False,
    ),
]
LabelsOption = Annotated[
    Path | None,
    typer.Option(
        "--labels", metavar="FILE", help='Label file of an image folder: "name label" lines or CSV.'
    ),
]
ImageOption = Annotated[
    str | None,
    typer.Option(
        "--image", metavar="FIELD", help="Of shards, the field of the images.", show_default=False
    ),
]
LabelOption = Annotated[
    str | None,
    typer.Option(
        "--label",
        metavar="FIELD",
        help="Of shards, the field of the labels; none: there are none.",
        show_default=False,
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


def resolve(
    data: str,
    labels: Path | None,
    recipe: Recipe | None,
    image: str | None = None,
    label: str | None = None,
) -> Data:
    """Returns the dataset that DATA names, with a transform.

    Raises:
        SourceError: there is nothing there, or it is no dataset.
        typer.BadParameter: the options do not fit the data.
    """
    file = _python_file(data, labels, image, label)
    if file is not None:
        return _with_recipe(_load(file, data.rpartition(":")[2]), data, recipe)
    wanted = recipe or Recipe.train
    transform = transform_of_recipe(wanted)
    _require_there(data, labels, image, label)
    if labels is not None:
        return Data(ImageDataset(data, str(labels), transform), data, wanted)
    given: dict[str, Any] = {} if image is None else {"image": image}
    if label is not None:
        given["label"] = None if label == "none" else label
    with _words(data):
        found = open_source(data, transform, **given)
    if found.files.labels is None:
        raise SourceError(data, "has boxes; give a file.py:name with your own transforms")
    return Data(found, data, wanted)


def resolve_files(
    data: str,
    labels: Path | None,
    image: str | None = None,
    label: str | None = None,
    anew: bool = False,
) -> Dataset[Any]:
    """Returns the dataset that DATA names, of what of it is whole, with warnings about the rest.

    ``anew`` reads what indexes are made of again.

    Raises:
        SourceError: there is nothing there, or it is no dataset.
        typer.BadParameter: the options do not fit the data.
    """
    file = _python_file(data, labels, image, label)
    if file is not None:
        return _load(file, data.rpartition(":")[2])
    _require_there(data, labels, image, label)
    field = "auto" if label is None else label
    with _words(data):
        if labels is not None:
            return open_whole(labels, root=data, anew=anew)
        return open_whole(data, image=image, label=None if field == "none" else field, anew=anew)


def _python_file(
    data: str, labels: Path | None, image: str | None, label: str | None
) -> Path | None:
    """The file of DATA that is ``file.py:name``; None for other DATA."""
    file, colon, _ = data.rpartition(":")
    if colon and file.endswith(".py"):
        for option, value in (("--labels", labels), ("--image", image), ("--label", label)):
            if value is not None:
                raise typer.BadParameter(f"{option} says nothing to file.py:name")
        return Path(file)
    if data.endswith(".py") and Path(data).is_file():
        raise typer.BadParameter(f"say which dataset of the file is meant: {data}:NAME")
    return None


def _require_there(data: str, labels: Path | None, image: str | None, label: str | None) -> None:
    """Raises in words of the command line where DATA or the label file is absent."""
    path = os.path.expanduser(data)
    if labels is not None:
        if image is not None or label is not None:
            raise typer.BadParameter("--image and --label say nothing to a label file")
        if not os.path.isdir(path):
            raise SourceError(data, "no such folder")
        if not labels.is_file():
            raise SourceError(str(labels), "no such label file")
    elif not os.path.exists(path) and "://" not in data and not any(c in data for c in "{*?["):
        raise SourceError(data, "no such folder or file")


@contextmanager
def _words(data: str) -> Iterator[None]:
    """Says what to do in words of the command line."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except ImportError as error:
        raise SourceError(data, str(error)) from error
    except SourceError as error:
        path = os.path.expanduser(data)
        if error.path == path and os.path.isdir(path):
            with os.scandir(path) as entries:
                if not any(entry.is_dir() for entry in entries):
                    raise SourceError(
                        data,
                        "no subfolders, so no classes; give the labels of its images: "
                        "--labels FILE",
                    ) from None
        raise


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
