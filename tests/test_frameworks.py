"""Training frameworks take the loader as it is, and the native engine serves their batches."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import DistributedSampler, SequentialSampler
from torchvision import transforms as T

import stoker
from pictures import KINDS, class_folder
from stoker.engine import Batch, Session, pool_threads
from stoker.samplers import OrderedRandomSampler, ShardedSampler
from tracing import canonical

TRAIN = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToTensor()])
SAMPLES, BATCH = 24, 6


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = class_folder(tmp_path_factory.mktemp("folder"), SAMPLES, KINDS[:4])
    return torchvision.datasets.ImageFolder(folder, TRAIN)


@dataclass
class Served:
    """What the engine was asked for."""

    threads: list[int] = field(default_factory=list)
    samples: int = 0

    def natively(self, samples: int) -> bool:
        """True if the engine's threads, and no worker process, served at least so many samples."""
        native = bool(self.threads) and min(self.threads) > 0
        return native and self.samples >= samples and not multiprocessing.active_children()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    record, drawn = Served(), Session.drawn

    def recorded(self: Session, *args: Any) -> Batch:
        batch = drawn(self, *args)
        record.threads.append(pool_threads())
        record.samples += len(batch.rows)
        return batch

    monkeypatch.setattr(Session, "drawn", recorded)
    return record


def epoch(loader: stoker.DataLoader[Any], number: int) -> list[Any]:
    """The batches of an epoch."""
    loader.set_epoch(number)
    return list(loader)


def same_batches(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) and torch.equal(x, y) for (a, x), (b, y) in pairs)


# Lightning


lightning = pytest.importorskip("lightning")

quiet = pytest.mark.filterwarnings(
    # Lightning's own: advice for larger machines, and its and torch's use of older Python.
    "ignore:.*does not have many workers",
    "ignore:.*number of training batches",
    "ignore:.*have no .val_dataloader",
    "ignore:.*isinstance.treespec, LeafSpec.",
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
)


class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined] # untyped
    """Keeps the batches it was given."""

    def __init__(self, make_loader: Callable[[], stoker.DataLoader[Any]] | None = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3 * 32 * 32, 3)
        self.make_loader = make_loader
        self.epochs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        self.epochs.setdefault(self.current_epoch, []).append((images.clone(), labels.clone()))
        return torch.nn.functional.cross_entropy(self.linear(images.flatten(1)), labels)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log(
            "accuracy", (self.linear(batch[0].flatten(1)).argmax(1) == batch[1]).float().mean()
        )

    def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return batch[1]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self) -> stoker.DataLoader[Any]:
        assert self.make_loader is not None
        return self.make_loader()


def trainer(**given: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


@quiet
@pytest.mark.parametrize("persistent", [False, True])
def test_lightning_trains_on_the_engine(dataset: Any, served: Served, persistent: bool) -> None:
    given: dict[str, Any] = {"batch_size": BATCH, "num_workers": 2, "seed": 3}
    loader = stoker.DataLoader(dataset, shuffle=True, persistent_workers=persistent, **given)
    validation = stoker.DataLoader(dataset, **given)
    model = Classifier()
    trainer(max_epochs=2).fit(model, loader, validation)
    assert loader.explain().tier == "lowered"
    assert served.natively(4 * SAMPLES)
    expected = stoker.DataLoader(dataset, shuffle=True, **given)
    for number in range(2):
        assert same_batches(model.epochs[number], epoch(expected, number))


@quiet
def test_lightning_predicts_on_the_engine(dataset: Any, served: Served) -> None:
    loader = stoker.DataLoader(dataset, BATCH, num_workers=2, drop_last=True)
    labels = torch.cat(trainer().predict(Classifier(), loader))
    assert labels.tolist() == dataset.targets
    assert served.natively(SAMPLES)


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    """torch.distributed among one process, without a network."""
    environment = dict(os.environ)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
    os.environ.clear()  # Lightning leaves its ranks there
    os.environ.update(environment)


def distributed(strategy: Any) -> Any:
    """A strategy that tells its trainer of two ranks, of which this process is the second."""
    strategy.__class__ = type(
        "OneOfTwo",
        (type(strategy),),
        {"distributed_sampler_kwargs": property(lambda _: {"num_replicas": 2, "rank": 1})},
    )
    return strategy


def kept(loader: stoker.DataLoader[Any]) -> dict[str, Any]:
    """What a rebuilt loader must have kept."""
    names = ["dataset", "num_workers", "seed", "randomness", "on_error", "tier", "strict", "shard"]
    names += ["timeout", "collate_fn", "generator", "persistent_workers", "prefetch_factor"]
    return {name: getattr(loader, name) for name in names}


@quiet
@pytest.mark.filterwarnings("ignore:order='full' has no effect:stoker.StokerWarning")
@pytest.mark.parametrize("order", [{"shuffle": True}, {"shuffle": False}, {"order": "full"}, {}])
@pytest.mark.parametrize("iterated", [False, True])
@pytest.mark.parametrize("hook", [False, True], ids=["attributes", "saved arguments"])
def test_lightning_rebuilds_the_loader_for_its_rank(
    dataset: Any, served: Served, order: dict[str, Any], iterated: bool, hook: bool
) -> None:
    from lightning.fabric.utilities.data import _replace_dunder_methods
    from lightning.pytorch.utilities.data import _update_dataloader

    def make() -> stoker.DataLoader[Any]:
        loader = stoker.DataLoader(
            dataset, BATCH, num_workers=2, seed=5, on_error="skip", strict=True, **order
        )
        if iterated:
            list(loader)
        return loader

    if hook:
        # What Lightning does around a module's train_dataloader().
        with _replace_dunder_methods(torch.utils.data.DataLoader, "dataset"):
            loader = make()
    else:
        loader = make()
    sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=1, seed=1)
    rebuilt = _update_dataloader(loader, sampler)
    assert type(rebuilt) is stoker.DataLoader
    assert rebuilt.sampler is sampler
    assert rebuilt.batch_size == BATCH
    assert kept(rebuilt) == kept(loader)
    served.samples = 0
    expected = list(sampler)
    labels = torch.cat([labels for _, labels in rebuilt]).tolist()
    assert labels == [dataset.targets[i] for i in expected]
    assert rebuilt.explain().tier == "lowered"
    assert served.natively(len(expected))


@quiet
@pytest.mark.usefixtures("one_process_group")
def test_lightning_injects_its_distributed_sampler(dataset: Any, served: Served) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    def make() -> stoker.DataLoader[Any]:
        return stoker.DataLoader(dataset, BATCH, shuffle=True, num_workers=2, seed=5)

    model = Classifier(make)
    strategy = distributed(DDPStrategy(process_group_backend="gloo"))
    runner = trainer(max_epochs=2, strategy=strategy, use_distributed_sampler=True)
    runner.fit(model)
    loader = runner.train_dataloader
    assert type(loader) is stoker.DataLoader
    assert type(loader.sampler) is DistributedSampler
    assert loader.explain().tier == "lowered"
    assert served.natively(SAMPLES)
    expected = stoker.DataLoader(
        dataset,
        BATCH,
        sampler=DistributedSampler(dataset, num_replicas=2, rank=1, seed=loader.sampler.seed),
        num_workers=2,
        seed=5,
    )
    for number in range(2):
        assert same_batches(model.epochs[number], epoch(expected, number))
    assert not same_batches(model.epochs[0], model.epochs[1])


@quiet
@pytest.mark.usefixtures("one_process_group")
def test_lightning_leaves_a_sharded_loader_as_it_is(dataset: Any, served: Served) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    loader = stoker.DataLoader(dataset, BATCH, shuffle=True, shard=True, num_workers=2)
    model = Classifier()
    strategy = distributed(DDPStrategy(process_group_backend="gloo"))
    runner = trainer(max_epochs=2, strategy=strategy, use_distributed_sampler=True)
    runner.fit(model, loader)
    assert runner.train_dataloader is loader
    assert type(loader.sampler) is ShardedSampler
    for number in range(2):
        expected = stoker.DataLoader(dataset, BATCH, shuffle=True, shard=True, num_workers=2)
        assert same_batches(model.epochs[number], epoch(expected, number))
    assert served.natively(SAMPLES)


@quiet
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.usefixtures("one_process_group")
def test_fabric(dataset: Any, served: Served, replicas: int) -> None:
    from lightning.fabric.strategies.ddp import DDPStrategy

    strategy: Any = "auto"
    if replicas > 1:
        strategy = distributed(DDPStrategy(process_group_backend="gloo"))
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    if replicas > 1:
        fabric.launch()
    loader = stoker.DataLoader(dataset, BATCH, shuffle=True, num_workers=2, seed=5)
    wrapped = fabric.setup_dataloaders(loader)
    epochs = [[(x.clone(), y.clone()) for x, y in wrapped] for _ in range(2)]
    assert served.natively(2 * SAMPLES // replicas)
    inner: Any = wrapped._dataloader
    assert type(inner) is stoker.DataLoader
    assert inner.explain().tier == "lowered"
    given: dict[str, Any] = {"shuffle": True}
    if replicas > 1:
        given = {"sampler": DistributedSampler(dataset, 2, 1)}
    expected = stoker.DataLoader(dataset, BATCH, num_workers=0, seed=5, **given)
    for number in range(2):
        assert same_batches(epochs[number], epoch(expected, number))


# timm


def test_timm_evaluates_on_the_engine(dataset: Any, served: Served) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3).eval()
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    evaluated = torchvision.datasets.ImageFolder(dataset.root, transform)
    loader = stoker.DataLoader(evaluated, BATCH, num_workers=2, strict=True)
    theirs = torch.utils.data.DataLoader(evaluated, BATCH)

    def validate(batches: Any) -> tuple[float, float]:
        losses, top1 = timm.utils.AverageMeter(), timm.utils.AverageMeter()
        with torch.inference_mode():
            for images, target in batches:
                output = model(images)
                accuracy, _ = timm.utils.accuracy(output, target, topk=(1, 2))
                losses.update(torch.nn.functional.cross_entropy(output, target).item(), len(images))
                top1.update(accuracy.item(), len(images))
        return losses.avg, top1.avg

    ours = validate(loader)
    assert served.natively(SAMPLES)
    assert loader.explain().tier == "lowered"
    assert ours == validate(theirs)
    assert same_batches(loader, theirs)


# Accelerate builds a torch loader of its own from the parts of ours.


def test_accelerate_gets_what_it_asks_for(dataset: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    prepare = accelerate.data_loader.prepare_data_loader
    loader = stoker.DataLoader(dataset, BATCH, shuffle=True, num_workers=0, seed=5)
    epochs = []
    for rank in range(2):
        prepared = prepare(loader, num_processes=2, process_index=rank, put_on_device=False)
        assert isinstance(prepared, torch.utils.data.DataLoader)
        epochs.append([[y.tolist() for _, y in prepared] for _ in range(2)])
    assert isinstance(loader.sampler, OrderedRandomSampler)
    order = loader.sampler.order
    for number in range(2):
        labels = [dataset.targets[i] for i in order.indices(number, 0, SAMPLES)]
        batches = [labels[i : i + BATCH] for i in range(0, SAMPLES, BATCH)]
        assert [epochs[rank][number] for rank in range(2)] == [batches[0::2], batches[1::2]]


# Frameworks that build torch's loaders, with a Dataset of the user's


class Labelled(torch.utils.data.Dataset[Any]):
    """As in every tutorial."""

    def __init__(self, folder: Any, named: bool = False) -> None:
        self.samples = list(folder.samples)
        self.named = named

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        image = TRAIN(Image.open(path).convert("RGB"))
        return {"pixel_values": image, "labels": label} if self.named else (image, label)


@pytest.fixture(scope="module")
def labelled(dataset: Any) -> Labelled:
    return Labelled(dataset)


@pytest.fixture
def patched() -> Iterator[None]:
    with stoker.patch():
        yield


def tensors(batches: Any) -> list[Any]:
    """What a loop got, so that it can be compared."""
    return [
        canonical(list(batch.values()) if isinstance(batch, dict) else batch) for batch in batches
    ]


def served_recorded(loader: Any, samples: int) -> bool:
    """True if so many samples, at least, were made by native threads of this process."""
    counted = stoker.explain(loader).facts["samples"]
    return counted.endswith(" recorded") and int(counted.split()[0]) >= samples


def torchs(dataset: Any, **given: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, BATCH, num_workers=1, **given)


@quiet
@pytest.mark.usefixtures("patched")
def test_lightning_with_torchs_loaders(labelled: Labelled) -> None:
    torch.manual_seed(1)
    model = Classifier(lambda: torchs(labelled, shuffle=True))
    runner = trainer(max_epochs=1)
    runner.fit(model)
    loader = runner.train_dataloader
    assert type(loader) is torch.utils.data.DataLoader
    assert served_recorded(loader, SAMPLES)
    assert len(model.epochs[0]) == SAMPLES // BATCH


@quiet
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("how", ["accelerate", "patch"])
def test_accelerate_trains(labelled: Labelled, how: str, dispatch: bool, replicas: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(
        cpu=True,
        dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=dispatch),
    )
    model = torch.nn.Linear(3 * 32 * 32, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01))

    def prepared() -> Any:
        if replicas == 1:
            return accelerator.prepare(torchs(labelled, shuffle=True))
        prepare = accelerate.data_loader.prepare_data_loader
        options = {"num_processes": replicas, "process_index": 1, "put_on_device": False}
        return prepare(torchs(labelled, shuffle=True), **options)

    if replicas > 1 and dispatch:
        pytest.skip("the batches of one process are dispatched to others")
    torch.manual_seed(2)
    expected = tensors(prepared())
    torch.manual_seed(2)
    loader = prepared()
    batches = []
    with stoker.patch() if how == "patch" else contextlib.nullcontext():
        if how == "accelerate":
            assert stoker.accelerate(loader) is loader
        for images, labels in loader:
            batches.append((images.clone(), labels.clone()))
            loss = torch.nn.functional.cross_entropy(model(images.flatten(1)), labels)
            accelerator.backward(loss)
            optimizer.step()
        assert served_recorded(loader, SAMPLES // replicas)
    assert [canonical(list(batch)) for batch in batches] == expected
    assert len(batches) == SAMPLES // BATCH // replicas


def hugging_faces(place: Path) -> dict[str, Any]:
    """A small model, and how to train it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=32,
        patch_size=16,
        num_labels=3,
    )
    arguments = transformers.TrainingArguments(
        str(place),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        dataloader_num_workers=1,
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    return {"vit": transformers.ViTForImageClassification(config), "training_arguments": arguments}


@quiet
@pytest.mark.filterwarnings("ignore")
def test_hugging_faces_trainer(labelled: Labelled, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made = hugging_faces(tmp_path)
    names = Labelled(labelled, named=True)

    def run() -> tuple[Any, list[Any]]:
        seen: list[Any] = []

        class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined] # untyped
            def get_train_dataloader(self) -> Any:
                self.loader = super().get_train_dataloader()
                return self.loader

            def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
                seen.append({name: value.clone() for name, value in inputs.items()})
                return super().training_step(model, inputs, *rest)

        runner = Trainer(made["vit"], made["training_arguments"], None, names)
        runner.train()
        return runner.loader, tensors(seen)

    _, expected = run()
    with stoker.patch():
        loader, batches = run()
        assert served_recorded(loader, SAMPLES)
    assert batches == expected
    assert len(batches) == SAMPLES // BATCH


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prefetcher", [False, True])
@pytest.mark.parametrize("epochs", [False, True], ids=["plain", "multi epochs"])
def test_timm_trains(labelled: Labelled, prefetcher: bool, epochs: bool) -> None:
    timm = pytest.importorskip("timm")
    root = str(Path(labelled.samples[0][0]).parents[1])

    def make(**given: Any) -> Any:
        torch.manual_seed(4)
        return timm.data.create_loader(
            timm.data.create_dataset("", root=root),
            (3, 32, 32),
            BATCH,
            num_workers=1,
            use_prefetcher=prefetcher,
            use_multi_epochs_loader=epochs,
            persistent_workers=False,
            device=torch.device("cpu"),
            **given,
        )

    for given in ({"is_training": True, "no_aug": True}, {"is_training": True}, {}):
        expected = tensors(make(**given))
        loader = stoker.accelerate(make(**given))
        assert tensors(loader) == expected
        explained = stoker.explain(loader)
        assert explained.tier in ("recorded", "materialised")
        if given.get("no_aug", not given):
            assert served_recorded(loader, SAMPLES)
    model = timm.create_model("test_vit", num_classes=3, img_size=32)
    with stoker.patch():
        loader = make(is_training=True)
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call] # torch's own
        assert stoker.explain(loader).tier in ("recorded", "materialised")


PAGE = (Path(__file__).resolve().parents[1] / "docs" / "frameworks.md").read_text(encoding="utf-8")


@quiet
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", ["Lightning", "Accelerate", "Hugging Face Trainer", "timm"])
def test_the_pages_snippets_run(
    title: str,
    labelled: Labelled,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (snippet,) = re.findall(rf"## {title}\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 3))
    names: dict[str, Any] = {
        "torch": torch,
        "stoker": stoker,
        "dataset": labelled,
        "folder": str(Path(labelled.samples[0][0]).parents[1]),
        "lightning_module": Classifier(),
        "model": linear,
        "optimizer": torch.optim.SGD(linear.parameters(), 0.01),
    }
    if "transformers" in snippet:
        names |= hugging_faces(tmp_path)
        names["dataset_of_dicts"] = Labelled(labelled, named=True)
    exec(compile(snippet, title, "exec"), names)
    printed = capsys.readouterr().out
    assert re.search("tier +(recorded|materialised)", printed) or "explain" not in snippet


FASTAI = """
import sys
import torch
import stoker
from fastai.vision.all import ImageDataLoaders, Learner, Resize, set_seed

folder = sys.argv[1]
small_model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 3))
exec(sys.argv[2])

def batches(loaders):
    set_seed(3)
    loaders.train.rng.seed(3)
    return [(x.clone(), y.clone()) for loader in loaders for x, y in loader]

def make(workers):
    set_seed(5)
    return ImageDataLoaders.from_folder(
        sys.argv[1], valid_pct=0.25, seed=1, item_tfms=Resize(32), bs=4, num_workers=workers,
        device="cpu",
    )

for workers in (0, 1):
    expected, loaders = batches(make(workers)), make(workers)
    assert stoker.accelerate(loaders) is loaders
    for (x, y), (a, b) in zip(batches(loaders), expected, strict=True):
        assert type(x) is type(a) and torch.equal(x, a) and torch.equal(y, b)
    before = stoker.explain(loaders).facts["samples"]
    learner = Learner(loaders, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 3)))
    with learner.no_bar(), learner.no_logging():
        learner.fit(1)
    explained = stoker.explain(loaders.train)
    assert explained.facts["samples"] != before
    print(explained.tier, stoker.explain(loaders.valid).tier)
"""


def test_fastai(labelled: Labelled, tmp_path: Path) -> None:
    """In a process of its own: fastai changes torch's and Pillow's classes."""
    pytest.importorskip("fastai")
    (snippet,) = re.findall(r"## fastai\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "script.py").write_text(FASTAI)
    path = os.pathsep.join(
        [str(Path(stoker.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "script.py", str(Path(labelled.samples[0][0]).parents[1]), snippet],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split()[-4:] == ["materialised"] * 4, done.stderr
    assert "tier     materialised" in done.stdout


# torch itself


@pytest.mark.parametrize("drop_last", [False, True])
def test_distributed_sampler_and_set_epoch(dataset: Any, served: Served, drop_last: bool) -> None:
    replicas = 5
    for rank in range(replicas):
        sampler: Any = DistributedSampler(dataset, replicas, rank, seed=7, drop_last=drop_last)
        loader = stoker.DataLoader(dataset, 2, sampler=sampler, num_workers=1, seed=9)
        twin: Any = DistributedSampler(dataset, replicas, rank, seed=7, drop_last=drop_last)
        epochs = []
        for number in range(3):
            sampler.set_epoch(number)
            twin.set_epoch(number)
            epochs.append(list(loader))
            labels = torch.cat([y for _, y in epochs[-1]]).tolist()
            assert labels == [dataset.targets[i] for i in twin]
        sampler.set_epoch(1)
        assert same_batches(loader, epochs[1])
    assert served.natively(1)


def test_torchdata_is_not_needed() -> None:
    script = (
        "import sys; sys.modules['torchdata'] = None\n"
        "import stoker; print(stoker.DataLoader.__name__, 'torchdata.nodes' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["DataLoader", "False"], run.stderr


# Attributes


class UsersLoader(stoker.DataLoader[Any]):
    """As a framework's subclass: what it is given goes on."""


def parameters(loader: stoker.DataLoader[Any]) -> dict[str, Any]:
    names = set(inspect.signature(type(loader).__init__).parameters) - {"self"}
    return {name: getattr(loader, name) for name in names}


@pytest.mark.parametrize("kind", [stoker.DataLoader, UsersLoader])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"shuffle": True},
        {"shuffle": False, "num_workers": 2, "prefetch_factor": 3, "persistent_workers": True},
        {"order": "full", "num_workers": 1},
        {"order": "none", "drop_last": True},
        {"shard": True, "uneven": "drop", "shuffle": True},
        {"shard": True, "uneven": "exact"},
        {"sampler": SequentialSampler(range(SAMPLES))},
        {"randomness": "torch", "num_workers": 0},
        {"tier": "stock", "on_error": "skip", "timeout": 30, "num_workers": 1},
        {"in_order": False, "pin_memory": True, "collate_fn": lambda samples: samples},
    ],
    ids=lambda given: ",".join(given) or "nothing",
)
def test_a_loader_is_rebuilt_from_its_attributes(
    dataset: Any, kind: type[stoker.DataLoader[Any]], given: dict[str, Any]
) -> None:
    loader = kind(dataset, BATCH, seed=1, **given)
    found = parameters(loader)
    # torch's constructor makes one from the other, and takes only one of them.
    found["batch_sampler"] = None
    found["shuffle"] = None if found["sampler"] is not None else found["shuffle"]
    again = kind(**found)
    for name, value in parameters(loader).items():
        if name not in ("batch_sampler", "shuffle"):
            assert getattr(again, name) == value, name
    assert type(again.batch_sampler) is type(loader.batch_sampler)
    assert again.explain() == loader.explain()
    if loader.collate_fn is torch.utils.data.default_collate and loader.uneven != "exact":
        torch.manual_seed(0)
        before = epoch(loader, 0)
        torch.manual_seed(0)
        assert same_batches(epoch(again, 0), before)
