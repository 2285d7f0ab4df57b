"""Libraries without one of their private names: less is measured, which a message reports."""

import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_lightning import trainer
from fake_loop import training_arguments
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import _compat as compat
from lightning_gputime._compat import NAMES, Name, lightning_, torch_, transformers_  # fill NAMES

transformers: Any = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Transformers warns.
    pytest.mark.usefixtures("one_thread"),
]


def rows() -> Any:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(24, 4), torch.randn(24, 1))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


Losses = list[float]
Training = Callable[[Any, Path], tuple[Any, Losses]]
"""Takes the package (None: train without a timer) and a folder; returns the timer and losses."""


def plain(
    package: Any, _: Path, model: Any = None, *, by_hand: bool = False, workers: int = 0
) -> tuple[Any, Losses]:
    """Train in a plain loop, without a timer if `package` is None."""
    model, losses = model or net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(rows(), batch_size=2, num_workers=workers)
    timer = None
    if package is not None:
        timer = package.GPUPhaseHooks(model, optimizer, warmup_steps=0).attach()
        loader = loader if by_hand else timer.steps(loader)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if timer is not None and by_hand:
            timer.step()
    if timer is not None:
        timer.remove()
    return timer, losses


def plain_by_hand(package: Any, folder: Path) -> tuple[Any, Losses]:
    """Train in a plain loop that calls `step()`."""
    return plain(package, folder, by_hand=True)


def plain_with_workers(package: Any, folder: Path) -> tuple[Any, Losses]:
    return plain(package, folder, workers=1)


def compiled_net() -> Any:
    return torch.compile(net(), backend="eager")


def compiled(package: Any, folder: Path) -> tuple[Any, Losses]:
    return plain(package, folder, compiled_net())


def ranks(package: Any, folder: Path) -> tuple[Any, Losses]:
    """Train as the first of two ranks, whose collectives do nothing."""
    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        return plain(package, folder)
    finally:
        destroy_process_group()


class Net(pl.LightningModule):
    def __init__(self, is_manual: bool) -> None:
        super().__init__()
        self.net, self.losses = net(), Losses()
        self.automatic_optimization = not is_manual

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lightning_manual(package: Any, folder: Path) -> tuple[Any, Losses]:
    """Train in Lightning's Trainer with manual optimization."""
    return lightning(package, folder, is_manual=True)


def lightning(package: Any, _: Path, is_manual: bool = False) -> tuple[Any, Losses]:
    """Train in Lightning's Trainer, with a validation in the middle."""
    model = Net(is_manual)
    timers = [] if package is None else [package.GPUPhaseTimer(warmup_steps=0)]
    runner = trainer(*timers, val_check_interval=6)
    runner.fit(model, DataLoader(rows(), batch_size=2), DataLoader(rows(), batch_size=8))
    return (timers or [None])[0], model.losses


class NetWithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = net(), Losses()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(self.net(x), labels)
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss}


def hugging_face(package: Any, folder: Path) -> tuple[Any, Losses]:
    """Train in transformers' Trainer, with an evaluation and a checkpoint in the middle."""
    model, data = NetWithLoss(), [{"x": x, "labels": y} for x, y in rows()]
    timers = []
    if package is not None:
        front = importlib.import_module(f"{package.__name__}.huggingface")
        timers.append(front.TransformersPhaseTimer(warmup_steps=0))
    schedule = {"eval_strategy": "steps", "eval_steps": 6, "save_strategy": "steps"}
    arguments = training_arguments(
        folder, max_steps=12, per_device_train_batch_size=2, save_steps=6, **schedule
    )
    transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, callbacks=timers
    ).train()
    return (timers or [None])[0], model.losses


TRAININGS = (plain, plain_by_hand, ranks, lightning, lightning_manual, hugging_face)

USES: dict[str, tuple[Training, ...]] = {
    "torch": TRAININGS,
    "lightning": (lightning, lightning_manual),
    "transformers": (hugging_face,),
    "torch._dynamo.utils.counters": (plain, ranks, compiled),
    "torch.autograd.Variable._execution_engine": (ranks,),
    "torch.distributed.ProcessGroup.allreduce": (ranks,),
    "torch.distributed.Work.wait": (ranks,),
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": (ranks,),
    "torch.distributed.distributed_c10d._get_default_store": (ranks,),
    "torch.utils.data._utils.fetch._MapDatasetFetcher": (plain_with_workers,),
    "torch.nn.parallel.DistributedDataParallel.will_sync_module_buffers": (ranks,),
}
"""Trainings that use a name, by the path of the name or else by its library."""

BROADCAST = (
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor"
)
REWARDS = "trl.trainer.grpo_trainer.GRPOTrainer._calculate_rewards"
VLLM = "trl.trainer.grpo_trainer.GRPOTrainer.vllm_generation"
TESTED_ALONE = {
    BROADCAST,
    REWARDS,
    VLLM,
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
    "torch.autocast._enabled",
    "torch.cuda._sleep",
    "torch.utils.data._utils.pin_memory._pin_memory_loop",
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "transformers.PreTrainedModel._loss_function",
    "transformers.trainer.DEFAULT_CALLBACKS",
}
"""Names that these trainings do not use, and that have separate tests."""


def users_of(name: Name) -> tuple[Training, ...]:
    if name.path in TESTED_ALONE or not name.feature:
        return ()
    return USES.get(name.path, USES[name.library])


CASES = [
    pytest.param(name, train, id=f"{name.path}-{train.__name__}")
    for name in NAMES.values()
    for train in users_of(name)
]


def is_of(library: str, owner: Any) -> bool:
    """Return whether a module, a class or an object belongs to a library."""
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    modules = [getattr(owner, "__name__", ""), *(kind.__module__ for kind in kinds)]
    return any(str(module).partition(".")[0] == library for module in modules)


@pytest.fixture
def no_gaps(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Forget the names that were missing so far."""
    monkeypatch.setattr(compat, "_not_measured", {})
    return monkeypatch


@pytest.fixture
def no_names(no_gaps: pytest.MonkeyPatch) -> None:
    """Hide all private names of other libraries."""
    no_gaps.setattr(compat, "read", lambda owner, attribute: compat.MISSING)


@pytest.fixture(autouse=True)
def _imported_packages_are_not_collected() -> None:
    # The libraries keep parts of each imported package.
    gc.collect()
    gc.freeze()


@contextmanager
def package_without(*missing: Name) -> Iterator[Any]:
    """Import the package again as if the libraries lacked private names."""

    def is_of_package(module: str) -> bool:
        return module.partition(".")[0] == "lightning_gputime"

    before = {module: sys.modules.pop(module) for module in [*sys.modules] if is_of_package(module)}
    try:
        reimported: Any = importlib.import_module("lightning_gputime._compat")
        read = reimported.read
        reimported.read = lambda owner, attribute: (
            reimported.MISSING
            if any(attribute == name.attribute and is_of(name.library, owner) for name in missing)
            else read(owner, attribute)
        )
        yield importlib.import_module("lightning_gputime")
    finally:
        for module in [*filter(is_of_package, sys.modules)]:
            del sys.modules[module]
        sys.modules.update(before)


LOSSES: dict[Training, Losses] = {}


@pytest.fixture
def train_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., Any]:
    """Return a function that trains without private names, and returns the summary and warnings.

    It checks that the training does not change, and that all steps are timed.
    """

    def train_without(train: Training, *missing: Name) -> tuple[Any, list[str]]:
        if train not in LOSSES:
            LOSSES[train] = train(None, tmp_path / "alone")[1]
        with package_without(*missing) as package, caplog.at_level(logging.WARNING):
            timer, losses = train(package, tmp_path)
            summary = timer.summary()
        assert losses == LOSSES[train]
        assert summary.step.n == 12
        records = [record for record in caplog.records if record.name == "lightning_gputime"]
        warnings = [record.getMessage() for record in records]
        assert not [text for text in warnings if "failed" in text]
        return summary, [text for text in warnings if text.startswith("Not measured: ")]

    return train_without


@pytest.mark.parametrize(("name", "train"), CASES)
def test_training_without_a_private_name_reports_what_is_not_measured(
    name: Name, train: Training, train_without: Any
) -> None:
    summary, gaps = train_without(train, name)
    assert len(gaps) == 1
    [text] = summary.to_dict()["not_measured"]
    assert text.startswith(f"not measured: {name.feature}, because {name.library} ")
    assert text.endswith(f" has no {name.attribute}")
    assert text in str(summary)
    assert not [phase for phase in name.blurred if f"`{phase}`" in summary.verdict]


@pytest.mark.parametrize("train", TRAININGS)
def test_training_does_not_report_names_that_it_does_not_use(
    train: Training, train_without: Any
) -> None:
    others = [name for name in NAMES.values() if train not in users_of(name)]
    summary, gaps = train_without(train, *others)
    assert not gaps
    assert "not_measured" not in summary.to_dict()


class WithLoss(nn.Module):
    """A model whose attribute for the loss function has another name than in transformers."""

    loss_function = property(lambda self: self._loss_fn, lambda self, value: None)

    def __init__(self) -> None:
        super().__init__()
        self._loss_fn = nn.functional.mse_loss


def test_renamed_loss_function_is_not_separated_from_forward(no_gaps: Any) -> None:
    model = WithLoss()
    assert transformers_.has_inner_loss(model)
    transformers_.check_inner_loss(model)
    [found] = compat.not_measured(["transformers"])
    assert found.blurred == ("forward", "loss")


def test_clock_of_the_gpu_is_not_measured_without_its_kernel(no_names: None) -> None:
    assert torch_.spin_kernel() is None
    [found] = compat.not_measured(["torch"])
    assert found.text.startswith("not measured: the clock of the GPU, because torch ")


def test_autocast_is_assumed_on_if_its_state_is_unreadable(request: pytest.FixtureRequest) -> None:
    assert not torch_.enables_autocast(torch.autocast("cpu", enabled=False))
    request.getfixturevalue("no_names")
    assert torch_.enables_autocast(torch.autocast("cpu", enabled=False))
    assert len(compat.not_measured(["torch"])) == 1


@pytest.mark.parametrize(
    ("find", "missing"),
    [
        (torch_.loader_next, "the fetches of a plain loop"),
        (torch_.pin_loop, "the pin-memory thread"),
        (lambda: torch_.compiled_module(compiled_net()), "the modules inside a compiled model"),
    ],
)
def test_missing_internals_are_reported_when_they_are_needed(
    no_names: None, find: Callable[[], object], missing: str
) -> None:
    assert find() is None
    [found] = compat.not_measured(["torch"])
    assert found.text.startswith(f"not measured: {missing}, because torch ")


def test_trainer_with_reward_functions_reports_missing_rewards_and_vllm(no_gaps: Any) -> None:
    class Trainer(transformers.Trainer):  # type: ignore[misc]  # has no types
        reward_funcs = ()
        use_vllm = True
        callback_handler = None

        def __init__(self) -> None:
            pass

    transformers_.report_missing_names(Trainer())
    assert [*compat._not_measured] == [REWARDS, VLLM]


@pytest.mark.parametrize(("lightning_version", "is_reported"), [("2.5.6", False), ("2.7.0", True)])
def test_missing_sigterm_broadcast_is_reported_since_lightning_2_6(
    no_gaps: pytest.MonkeyPatch, lightning_version: str, is_reported: bool
) -> None:
    def read_others(owner: Any, name: str) -> Any:
        return compat.MISSING if name == BROADCAST.rpartition(".")[2] else read(owner, name)

    read, runner = compat.read, trainer()
    no_gaps.setattr(pl.Trainer, "world_size", 2)
    no_gaps.setattr(sys.modules["lightning"], "__version__", lightning_version)
    no_gaps.setattr(compat, "read", read_others)
    lightning_.report_missing_names(runner, Net(is_manual=False))
    assert (BROADCAST in compat._not_measured) == is_reported
    assert lightning_.sigterm_broadcast(runner) is None


def test_run_without_default_callbacks_reports_that_trainers_have_no_timer(no_names: None) -> None:
    transformers_.default_callbacks().append(None)
    assert [*compat._not_measured] == ["transformers.trainer.DEFAULT_CALLBACKS"]
