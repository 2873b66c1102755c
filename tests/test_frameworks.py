"""Training frameworks take the loader as it is, and the native engine serves their batches."""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch.utils.data import DistributedSampler, SequentialSampler
from torchvision import transforms as T

import stoker
from pictures import KINDS, class_folder
from stoker.engine import Batch, Session, pool_threads
from stoker.samplers import OrderedRandomSampler

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
    record, submit = Served(), Session.submit

    def recorded(self: Session, *args: Any) -> Batch:
        batch = submit(self, *args)
        record.threads.append(pool_threads())
        record.samples += len(batch.rows)
        return batch

    monkeypatch.setattr(Session, "submit", recorded)
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
    names = ["dataset", "num_workers", "seed", "randomness", "on_error", "tier", "strict"]
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
    import subprocess
    import sys

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
        {"sampler": SequentialSampler(range(SAMPLES))},
        {"randomness": "torch", "num_workers": 0},
        {"tier": "stock", "on_error": "skip", "timeout": 30, "num_workers": 1},
        {"in_order": False, "pin_memory": True, "collate_fn": lambda samples: samples},
    ],
    ids=str,
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
    if loader.collate_fn is torch.utils.data.default_collate:
        torch.manual_seed(0)
        before = epoch(loader, 0)
        torch.manual_seed(0)
        assert same_batches(epoch(again, 0), before)
