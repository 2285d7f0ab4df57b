"""Versions of other libraries without a private name: less is measured, and that is reported."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fake_lightning
import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import FakeGPU, work
from fake_lightning import Loader
from fake_loop import Loop
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._compat import lightning_, torch_, transformers_  # fill NAMES
from lightning_gputime._compat.names import NAMES, Name

transformers: Any = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    pytest.mark.usefixtures("one_thread"),
]


def rows() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(24, 4), torch.randn(24, 1))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


Losses = list[float]
Training = Callable[[Any, Path], tuple[Any, Losses]]


def plain(package: Any, _: Path, model: Any = None) -> tuple[Any, Losses]:
    """Trains by a plain loop; `package` is None for no timer."""
    model, losses = model or net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(rows(), batch_size=2)
    timer = None
    if package is not None:
        timer = package.GPUPhaseHooks(model, optimizer, warmup_steps=0).attach()
        loader = timer.steps(loader)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if timer is not None:
        timer.remove()
    return timer, losses


def compiled(package: Any, _: Path) -> tuple[Any, Losses]:
    """Trains a compiled model."""
    return plain(package, _, torch.compile(net(), backend="eager"))


def ranks(package: Any, _: Path) -> tuple[Any, Losses]:
    """Trains as the first of two ranks, whose collectives do nothing."""
    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        return plain(package, _)
    finally:
        destroy_process_group()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = net(), Losses()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lightning(package: Any, _: Path) -> tuple[Any, Losses]:
    """Trains by Lightning's Trainer, with a validation in the middle."""
    model = Net()
    timers = [] if package is None else [package.GPUPhaseTimer(warmup_steps=0)]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=timers,
        val_check_interval=6,
    )
    trainer.fit(model, DataLoader(rows(), batch_size=2), DataLoader(rows(), batch_size=8))
    return (timers or [None])[0], model.losses


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = net(), Losses()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(self.net(x), labels)
        if self.training:
            self.losses.append(loss.item())
        return {"loss": loss}


def hugging_face(package: Any, folder: Path) -> tuple[Any, Losses]:
    """Trains by transformers' Trainer, with an evaluation and a checkpoint in the middle."""
    model, data = Row(), rows()
    timers = []
    if package is not None:
        timers = [package.TransformersPhaseTimer(warmup_steps=0)]
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=12,
        per_device_train_batch_size=2,
        eval_strategy="steps",
        eval_steps=6,
        save_steps=6,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        data_collator=lambda rows: {
            "x": torch.stack([row[0] for row in rows]),
            "labels": torch.stack([row[1] for row in rows]),
        },
        train_dataset=data,
        eval_dataset=data,
        callbacks=timers,
    )
    trainer.train()
    return (timers or [None])[0], model.losses


TRAININGS = (plain, ranks, lightning, hugging_face)

USES = {
    "torch": TRAININGS,
    "lightning": (lightning,),
    "transformers": (hugging_face,),
    "trl": (),
    "torch._dynamo.utils.counters": (plain, ranks, compiled),
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod": (compiled,),
    "torch.autograd.Variable._execution_engine": (ranks,),
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": (ranks,),
    "torch.distributed.distributed_c10d._get_default_store": (ranks,),
    "torch.autocast._enabled": (),  # see below
    "transformers.PreTrainedModel._loss_function": (),  # see below
}
"""The trainings that need a name, by its path or by its library."""


def users_of(name: Name) -> tuple[Training, ...]:
    return USES.get(name.path, USES[name.library]) if name.feature else ()


CASES = [
    pytest.param(name, train, id=f"{name.path}-{train.__name__}")
    for name in NAMES.values()
    for train in dict.fromkeys((*TRAININGS, *users_of(name)))
    if train in users_of(name) or name.library == "torch" or not name.feature
]


@contextmanager
def package_without(name: Name) -> Iterator[Any]:
    """Imports the package anew, with libraries that seem not to have a private name."""

    def is_own(module: str) -> bool:
        return module.partition(".")[0] == "lightning_gputime"

    before = {module: sys.modules.pop(module) for module in [*sys.modules] if is_own(module)}
    try:
        names: Any = importlib.import_module("lightning_gputime._compat.names")
        read = names.read
        names.read = lambda owner, attribute: (
            names.MISSING if attribute == name.attribute else read(owner, attribute)
        )
        yield importlib.import_module("lightning_gputime")
    finally:
        for module in [*filter(is_own, sys.modules)]:
            del sys.modules[module]
        sys.modules.update(before)


LOSSES: dict[Training, Losses] = {}


@pytest.mark.parametrize(("name", "train"), CASES)
def test_training_goes_on_where_a_library_lacks_a_name(
    name: Name, train: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if train not in LOSSES:
        LOSSES[train] = train(None, tmp_path / "alone")[1]
    with package_without(name) as package, caplog.at_level(logging.WARNING):
        timer, losses = train(package, tmp_path)
        summary = timer.summary()
    assert losses == LOSSES[train]
    assert summary.step.n == 12
    said = [one.getMessage() for one in caplog.records if one.name == "lightning_gputime"]
    assert not [text for text in said if "failed" in text]
    told = [text for text in said if text.startswith("Not measured: ")]
    found = summary.to_dict()
    if train not in users_of(name):
        assert not told
        assert "not_measured" not in found
        return
    assert len(told) == 1
    [text] = found["not_measured"]
    assert text.startswith(f"not measured: {name.feature}, because {name.library} ")
    assert text.endswith(f" has no {name.attribute}")
    assert text in str(summary)
    named = [phase for phase in name.blurred if f"`{phase}`" in summary.verdict]
    assert not named


class WithLoss(nn.Module):
    """A model that keeps its loss function under another name than transformers does."""

    loss_function = property(lambda self: self._loss_fn, lambda self, value: None)

    def __init__(self) -> None:
        super().__init__()
        self._loss_fn = nn.functional.mse_loss


def test_a_loss_function_under_another_name_is_not_separated_from_forward() -> None:
    from lightning_gputime._compat import names

    model = WithLoss()
    assert transformers_.has_inner_loss(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "_not_measured", {})
        transformers_.check_inner_loss(model, vars(model).get(transformers_.INNER_LOSS))
        [found] = names.not_measured(["transformers"])
    assert found.blurred == ("forward", "loss")


def test_an_autocast_is_on_where_that_cannot_be_read() -> None:
    from lightning_gputime._compat import names

    assert not torch_.is_autocast_on(torch.autocast("cpu", enabled=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "_not_measured", {})
        patch.setattr(names, "read", lambda owner, attribute: names.MISSING)
        assert torch_.is_autocast_on(torch.autocast("cpu", enabled=False))
        assert len(names.not_measured(["torch"])) == 1


def test_rewards_are_reported_as_missing_of_a_trainer_that_has_reward_functions() -> None:
    from lightning_gputime._compat import names

    class Trainer(transformers.Trainer):  # type: ignore[misc]  # has no types
        reward_funcs = ()

        def __init__(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "_not_measured", {})
        transformers_.report_missing_names(Trainer())
        assert [*names._not_measured] == ["trl.trainer.grpo_trainer.GRPOTrainer._calculate_rewards"]


# The self-check


@pytest.mark.parametrize(
    ("action", "feature", "hidden"),
    [
        ("fetch_action", "the fetch of batches apart from callbacks", {"data", "callbacks"}),
        ("copy_action", "copies to the device apart from the fetch of batches", {"data"}),
    ],
)
def test_an_action_under_another_name_is_found_by_the_self_check(
    gpu: FakeGPU,
    action: str,
    feature: str,
    hidden: set[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Slow(Loader):
        def __iter__(self) -> Iterator[Tensor]:
            for x in super().__iter__():
                gpu.host_work(100.0)
                yield x

    def train() -> GPUPhaseTimer:
        timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0)
        fake_lightning.trainer(timer).fit(fake_lightning.Model(gpu), Slow(gpu, 8))
        return timer

    before = train().summary()
    assert "input-bound" in before.verdict
    assert not before.not_measured
    caplog.clear()
    monkeypatch.setattr(lightning_, action, lambda trainer: "another name")
    summary = train().summary()
    [text] = summary.not_measured
    assert text.startswith(
        f"not measured: {feature}, because lightning {version('lightning')} reported"
    )
    assert {*summary.blurred} == hidden
    assert summary.verdict == ""
    assert summary.advice == ()
    assert caplog.text.count(f"Not measured: {feature}") == 1


def test_steps_that_the_trainer_does_not_count_are_found_by_the_self_check(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lightning_, "step_counter", lambda trainer: lambda: 7)
    timer = fake_lightning.fit(gpu, fake_lightning.Model(gpu), 6)
    text = "not measured: single steps, because the trainer counts 1, and 6 were seen"
    assert timer.summary().not_measured == (text,)
    assert "The trainer counts 1 steps, and the timer has seen 6" in caplog.text


def test_steps_that_end_inside_a_batch_are_found_by_the_self_check(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(gpu)
    timer = GPUPhaseHooks(loop.model, loop.optimizer, warmup_steps=0, _clock=gpu).attach()
    for x in loop.batches(8):
        out = loop.model(x)
        timer.step()
        work(out, gpu, 0.5, 0.25).sum().backward()
        loop.update()
    timer.remove()
    [text] = timer.summary().not_measured
    assert text == "not measured: single batches, because backward precedes forward"
    assert caplog.text.count("backward precedes forward") == 1
