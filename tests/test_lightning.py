"""Lightning's training loop and its features: the exact time of every phase."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from conftest import hooks_of
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, between_batches, steps
from fake_lightning import Loader, MemoryLogger, Model, callback, changed, fit, timer_of, trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor

from lightning_gputime import GPUPhaseTimer

STEP_TOTAL_MS = sum(STEP_MS.values())
WITHOUT_UPDATE = {name: ms for name, ms in STEP_MS.items() if name != "optimizer"}

either_order = pytest.mark.parametrize("first", [True, False], ids=["before timer", "after timer"])
"""Runs a test with another callback on either side of the timer."""


@pytest.fixture(autouse=True)
def _no_hook_is_left_on_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the hooks of a model before and after each fit of a test."""
    run = pl.Trainer.fit

    def checked(self: pl.Trainer, model: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        before = hooks_of(model)
        run(self, model, *args, **kwargs)
        assert hooks_of(model) == before
        assert not any("zero_grad" in vars(optimizer) for optimizer in self.optimizers)

    monkeypatch.setattr(pl.Trainer, "fit", checked)


def steps_of(*numbers: int) -> list[dict[str, float]]:
    """Return one step per number: the phases of that many micro-batches and of one update."""
    return [{**{name: n * ms for name, ms in STEP_MS.items()}, "optimizer": 2.0} for n in numbers]


# Fits and the phases of their steps


def taking(ms: float) -> Callable[..., None]:
    """Return a method of a `Model` that takes `ms` on the GPU."""

    def method(model: Model, *_: Any, **__: Any) -> None:
        model.gpu.work(ms)

    return method


def augment(model: Model, batch: Tensor, dataloader_idx: int) -> Tensor:
    model.net(batch)
    return batch


def call_without_grad(model: Model, *_: Any) -> None:
    with torch.no_grad():
        model.net(torch.ones(1, 2))


def update(model: Model, *_: Any) -> None:
    optimizer: Any = model.optimizers()
    optimizer.step()
    optimizer.zero_grad()


def train_by_hand(model: Model, batch: Tensor, batch_idx: int) -> None:
    model.gpu.work(0.125)
    model.loss(batch).backward()


def train_and_update(model: Model, batch: Tensor, batch_idx: int) -> None:
    """Update by hand after every second batch."""
    train_by_hand(model, batch, batch_idx)
    if batch_idx % 2:
        update(model)


def update_after_every_third_batch(
    model: Model, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
) -> None:
    if batch_idx % 3 == 2:
        optimizer.step(closure=optimizer_closure)
    else:
        optimizer_closure()


def update_after_every_fourth_batch(model: Model, batch: Tensor, batch_idx: int) -> None:
    train_by_hand(model, batch, batch_idx)
    if (6 * model.current_epoch + batch_idx) % 4 == 3:
        update(model)


def call_closure(model: Model, epoch: int, i: int, optimizer: Any, closure: Any) -> None:
    closure()


def train_on_iterator(model: Model, dataloader_iter: Any) -> Tensor:
    batch, _, _ = next(dataloader_iter)
    return model.loss(batch)


def stop_after_three_steps(_: object, runner: pl.Trainer, *__: Any) -> None:
    runner.should_stop = runner.global_step >= 3


def fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))


MANUAL = {"automatic_optimization": False, "training_step": train_by_hand}


@dataclass(frozen=True)
class Fit:
    """A fit of `n` batches per epoch, and the phases of its steps."""

    steps: list[dict[str, float]]
    methods: dict[str, Any] = field(default_factory=dict)  # Methods that the model overrides.
    options: dict[str, Any] = field(default_factory=dict)  # Options of the trainer.
    n: int = 3
    numbers: list[int] | None = None  # Numbers of the steps; None: 0, 1, 2, ...
    skipped_updates: int = 0


ITERATED = {"forward": 4.0, "loss": 0.5, "backward": 8.0, "optimizer": 2.0, "other": 1.0}

FITS = {
    **{
        f"augmentation in {hook}": Fit([{**STEP_MS, "data": 1.0 + 4.0}] * 3, {hook: augment})
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer")
    },
    # Precision and clipping
    "bf16": Fit([STEP_MS] * 3, options={"precision": "bf16-mixed"}),
    "fp16": Fit([STEP_MS] * 3, options={"plugins": fp16}),
    "clipping by the module": Fit(
        [{**STEP_MS, "optimizer": 2.0 + 3.0}] * 3, {"configure_gradient_clipping": taking(3.0)}
    ),
    # The end of a step
    "model call between the backward and the update": Fit(
        [{**STEP_MS, "forward": 8.0}] * 3, {"on_before_optimizer_step": call_without_grad}
    ),
    **{
        f"{name}, accumulation of {every} with a short last group": Fit(
            steps_of(*groups) * 2,
            options={"accumulate_grad_batches": every, "max_epochs": 2, **options},
            n=5,
        )
        for name, options in {"fp32": {}, "fp16": {"plugins": fp16}}.items()
        for every, groups in ((2, [2, 2, 1]), (3, [3, 2]), (5, [5]), (7, [5]))
    },
    # The end of the epoch also ends the last step, which has no update.
    "updates that the module leaves out": Fit(
        [*steps_of(3, 3), WITHOUT_UPDATE],
        {"optimizer_step": update_after_every_third_batch},
        n=7,
        numbers=[2, 5, 6],
        skipped_updates=1,
    ),
    # Manual optimization
    "update in the hook at the end of its batch": Fit(
        [STEP_MS] * 6, {**MANUAL, "on_train_batch_end": update}, {"max_epochs": 2}
    ),
    **{
        f"update at an epoch end, {validation} validation batches": Fit(
            steps_of(2, 1) * 2,
            {**MANUAL, "training_step": train_and_update, "on_train_epoch_end": update},
            {"max_epochs": 2, "validation": validation},
            numbers=[1, 2, 4, 5],
        )
        for validation in (0, 2)
    },
    "accumulation by hand across epochs": Fit(
        steps_of(4, 4, 4),
        {
            **MANUAL,
            "training_step": update_after_every_fourth_batch,
            "on_train_epoch_end": taking(1000.0),
        },
        {"max_epochs": 2},
        n=6,
        numbers=[3, 7, 11],
    ),
    "no optimizer": Fit(
        [{"data": 1.0, "forward": 4.0, "other": 0.0}] * 6,
        {**MANUAL, "training_step": call_without_grad, "configure_optimizers": lambda _: None},
        {"max_epochs": 2},
    ),
    # The first step has all batches before it is clear that no update is visible.
    "updates without hooks": Fit(
        [{name: 101 * ms for name, ms in WITHOUT_UPDATE.items()}, *[WITHOUT_UPDATE] * 3],
        {"optimizer_step": call_closure},
        n=104,
        numbers=[*range(100, 104)],
        skipped_updates=4,
    ),
    "fetch inside the training step": Fit(
        [{"data": 0.0, **ITERATED}, ITERATED, ITERATED], {"training_step": train_on_iterator}
    ),
    # The course of a run
    "max_steps": Fit([STEP_MS] * 7, options={"max_epochs": -1, "max_steps": 7}, n=5),
    "should_stop": Fit(
        [STEP_MS] * 3,
        options={
            "max_epochs": 4,
            "callbacks": [callback(on_train_batch_end=stop_after_three_steps)],
        },
        n=5,
    ),
    **{
        f"{profiler} profiler": Fit([STEP_MS] * 3, options={"profiler": profiler})
        for profiler in ("simple", "advanced", "pytorch")
    },
}


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
@pytest.mark.filterwarnings("ignore:.*configure_optimizers.*", "ignore:.*dataloader_iter.*")
@pytest.mark.parametrize("case", FITS.values(), ids=FITS)
def test_steps_of_a_fit_have_the_listed_phases(gpu: FakeGPU, case: Fit, tmp_path: Path) -> None:
    options = {**case.options, "default_root_dir": tmp_path}
    if "plugins" in options:
        options["plugins"] = [options["plugins"]()]
    timer = fit(gpu, changed(gpu, **case.methods), case.n, **options)
    assert steps(timer) == case.steps
    numbers = [*range(len(case.steps))] if case.numbers is None else case.numbers
    assert timer.history()["step"].tolist() == numbers
    assert timer.summary().skipped_updates == case.skipped_updates


def test_fit_with_overfit_batches_times_every_step(gpu: FakeGPU) -> None:
    timer = timer_of(gpu)
    data: Any = torch.ones(8, 2)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)
    trainer(timer, overfit_batches=2, max_epochs=3).fit(Model(gpu), loader)
    assert steps(timer) == [{**STEP_MS, "data": 0.0}] * 6


def test_pytorch_lightning_trainer_is_timed(gpu: FakeGPU) -> None:
    class Net(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Layer(gpu, 4.0, 8.0)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch).sum()
            return loss

        def configure_optimizers(self) -> Any:
            return Adder(self.parameters(), gpu, 2.0)

    class Other(pytorch_lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            gpu.work(0.5)

    model, other = cast("Any", Net()), cast("Any", Other())
    timer = fit(gpu, model, callbacks=[other], kind=pytorch_lightning.Trainer)
    expected = {"data": 1.0, "callbacks": 0.5, "forward": 4.0, "loss": 0.0, "backward": 8.0}
    assert steps(timer) == [{**expected, "optimizer": 2.0, "other": 0.0}] * 3


def test_wrapper_call_is_not_a_model_call(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    class Redirects(Model):
        """Its forward calls the training step, as DDP does under Lightning."""

        redirects = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.redirects = True
            loss: Tensor = wrapper(batch)
            return loss

        def forward(self, x: Tensor) -> Tensor:
            if not self.redirects:
                return super().forward(x)
            self.redirects = False
            gpu.work(0.125)
            return self.loss(x)

    model = Redirects(gpu)
    wrapper = torch.nn.Sequential(model)
    monkeypatch.setattr("lightning_gputime.callback._wrapper_of", lambda _: wrapper)
    assert steps(fit(gpu, model)) == [STEP_MS] * 3


# Epochs


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("max_epochs", [1, 2])
def test_resumed_fit_times_all_of_its_steps(gpu: FakeGPU, max_epochs: int, tmp_path: Path) -> None:
    save = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer(save, enable_checkpointing=True).fit(Model(gpu), Loader(gpu, 5))
    timer = timer_of(gpu)
    runner = trainer(timer, max_epochs=max_epochs)
    runner.fit(Model(gpu), Loader(gpu, 5), ckpt_path=tmp_path / "step=2.ckpt")
    numbers = list(range(2, 5 * max_epochs))
    assert timer.history()["step"].tolist() == numbers
    assert steps(timer) == [STEP_MS] * len(numbers)


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
@either_order
@pytest.mark.parametrize(("every", "logged"), [(2, [1, 3, 5]), (3, [2, 5]), (50, [5]), (0, [])])
def test_epoch_end_hooks_find_the_logged_means_in_any_callback_order(
    gpu: FakeGPU, hook: str, every: int, logged: list[int], first: bool
) -> None:
    found: list[float] = []

    def read(_: object, runner: pl.Trainer, *__: Any) -> None:
        found.append(float(runner.callback_metrics["phase_time/step_ms"]))

    logger = MemoryLogger()
    options: Any = {"log_every_n_steps": every, "max_epochs": 2, "logger": logger}
    reader = callback(**{hook: read})
    timer = fit(gpu, Model(gpu), callbacks=[reader], first=first, validation=1, **options)
    assert found == [STEP_TOTAL_MS] * 2
    assert steps(timer) == [STEP_MS] * 6
    # The ends of epochs add no log. The remaining steps are logged when the training ends.
    of_training = [step for step, log in logger.phase_times() if "phase_time/step_ms" in log]
    assert of_training == logged


# Validation


def test_hooks_and_loggers_before_a_validation_belong_to_the_step(gpu: FakeGPU) -> None:
    class Logs(MemoryLogger):
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            gpu.work(0.5)

    class Validated(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            gpu.work(0.25)

        def val_dataloader(self) -> Any:
            gpu.work(100.0)  # Belongs to the validation.
            return Loader(gpu, 2)

        def on_validation_model_eval(self) -> None:
            gpu.work(100.0)  # Belongs to the validation.
            super().on_validation_model_eval()

    options: Any = {"val_check_interval": 2, "logger": Logs(), "log_every_n_steps": 1}
    timer = fit(gpu, Validated(gpu), 6, **options)
    # 0.25 ms in the hook, 0.5 ms for the model's log, and 0.5 ms for the timer's log, which before
    # a validation is not part of the step.
    callbacks = [1.25, 0.75, 1.25, 0.75]
    assert timer.history()["callbacks_ms"].tolist()[2:] == callbacks
    assert timer.history()["step_ms"].tolist()[2:] == [STEP_TOTAL_MS + ms for ms in callbacks]


@pytest.mark.parametrize(("accumulate", "every"), [(2, 1), (3, 2), (4, 3)])
def test_hooks_before_a_validation_inside_an_accumulation_belong_to_the_step(
    gpu: FakeGPU, accumulate: int, every: int
) -> None:
    model = changed(gpu, on_train_batch_end=taking(0.25))
    options: Any = {"val_check_interval": every, "accumulate_grad_batches": accumulate}
    timer = fit(gpu, model, 12, validation=2, **options)
    # Callbacks after the last batch of a step belong to the next step.
    callbacks = [0.25 * (accumulate - 1), *[0.25 * accumulate] * (12 // accumulate - 1)]
    assert timer.history()["callbacks_ms"].tolist() == callbacks
    step_ms = [STEP_TOTAL_MS * accumulate - 2.0 * (accumulate - 1) + ms for ms in callbacks]
    assert timer.history()["step_ms"].tolist() == step_ms


@pytest.mark.parametrize("fails", [False, True], ids=["validation ends", "validation fails"])
@either_order
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_validation_by_another_trainer_during_a_fit_loses_no_step(
    gpu: FakeGPU, hook: str, first: bool, fails: bool
) -> None:
    timer, calls = timer_of(gpu), list[None]()

    def validate_once(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            with contextlib.suppress(ZeroDivisionError):
                failing = callback(on_validation_batch_end=lambda *_: 1 / 0)
                runner = trainer(timer, *[failing] * fails)
                runner.validate(Model(gpu), Loader(gpu, 2), verbose=False)

    validator = callback(**{hook: validate_once})
    fit(gpu, Model(gpu), 4, timer=timer, callbacks=[validator], first=first)
    assert timer.history()["step"].tolist() == [0, 1, 2, 3]
    assert steps(timer) == [STEP_MS] * 4


# Callbacks and other hooks


def call_model(_: object, runner: pl.Trainer, model: pl.LightningModule, *__: Any) -> None:
    """Call the model in a hook, like a callback that samples images."""
    loss = model(torch.ones(1, 2)).sum()
    if loss.requires_grad:
        loss.backward()


@either_order
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_model_call_in_a_callback_is_not_forward(gpu: FakeGPU, hook: str, first: bool) -> None:
    timer = fit(gpu, Model(gpu), callbacks=[callback(**{hook: call_model})], first=first)
    with_callback = {**STEP_MS, "callbacks": 4.0 + 7.75}
    is_in_next_step = hook == "on_train_batch_end" and not first
    first_step = STEP_MS if is_in_next_step else with_callback
    assert steps(timer) == [first_step, with_callback, with_callback]


def test_model_calls_between_validation_batches_are_not_forward(gpu: FakeGPU) -> None:
    logger = MemoryLogger()
    runner = trainer(timer_of(gpu), callback(on_validation_batch_end=call_model), logger=logger)
    runner.validate(Model(gpu), Loader(gpu, 3), verbose=False)
    [(_, metrics)] = logger.phase_times()
    assert metrics["phase_time/val/forward_ms"] == 4.0


@either_order
def test_callback_time_is_named_by_hook_in_any_callback_order(gpu: FakeGPU, first: bool) -> None:
    inside = {
        "on_before_zero_grad": 1.0,
        "on_before_backward": 32.0,
        "on_after_backward": 64.0,
        "on_before_optimizer_step": 128.0,
    }
    hooks_ms = {"on_train_batch_start": 16.0, **inside, "on_train_batch_end": 256.0}
    methods = {name: lambda *_, ms=ms: gpu.work(ms) for name, ms in hooks_ms.items()}
    timer = fit(gpu, Model(gpu), callbacks=[callback("Works", **methods)], first=first)
    # Callbacks before the timer belong to the step, the others to the next step.
    total_ms = sum(hooks_ms.values())
    first_ms = total_ms if first else total_ms - hooks_ms["on_train_batch_end"]
    callbacks_ms = [first_ms, total_ms, total_ms]
    assert steps(timer) == [{**STEP_MS, "callbacks": ms} for ms in callbacks_ms]
    history = timer.history()
    for hook, ms in inside.items():
        assert history[f"callbacks/Works.{hook}_ms"].tolist() == [ms] * 3


def slow_callback(gpu: FakeGPU, name: str = "Slow") -> pl.Callback:
    """Return a callback that takes 10 ms after each batch."""
    return callback(name, on_train_batch_end=lambda *_: gpu.work(10.0))


class Transfers(Model):
    """A model that takes 2 ms to copy a batch to the device, and 3 ms to augment it there."""

    def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
        self.gpu.work(2.0)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.gpu.work(3.0)
        return batch


@either_order
def test_data_is_split_into_fetch_and_copy_under_lightning(gpu: FakeGPU, first: bool) -> None:
    timer = fit(gpu, Transfers(gpu), callbacks=[slow_callback(gpu)], first=first)
    parts = {"data": 6.0, "data/fetch": 1.0, "data/copy": 2.0}
    split = {**parts, "callbacks": 10.0, "callbacks/Slow.on_train_batch_end": 10.0}
    without = {**parts, "callbacks": 0.0}
    assert between_batches(timer) == [split if first else without, split, split]
    assert steps(timer)[1] == {**STEP_MS, "data": 6.0, "callbacks": 10.0}


def test_start_of_loader_workers_is_part_of_data_fetch(gpu: FakeGPU) -> None:
    class Starts(Loader):
        def __iter__(self) -> Any:
            gpu.work(32.0)
            return super().__iter__()

    timer = timer_of(gpu)
    trainer(timer, max_epochs=2).fit(Model(gpu), Starts(gpu, 2))
    # In the first epoch the workers start before the training.
    assert [step["data/fetch"] for step in between_batches(timer)] == [1.0, 1.0, 33.0, 1.0]


def test_module_hook_at_an_epoch_start_is_not_part_of_data_fetch(gpu: FakeGPU) -> None:
    timer = fit(gpu, changed(gpu, on_train_epoch_start=taking(200.0)))
    assert [parts["data/fetch"] for parts in between_batches(timer)] == [1.0] * 3


def test_slow_callback_is_named_in_the_advice(gpu: FakeGPU) -> None:
    timer, logger = timer_of(gpu, warmup_steps=1), MemoryLogger()
    fit(gpu, Model(gpu), timer=timer, callbacks=[slow_callback(gpu)], logger=logger)
    summary = timer.summary()
    assert summary.verdict == (
        "GPU-bound: `Slow.on_train_batch_end` takes 10 ms of 25.6 ms per step (39 % of the fit);"
        " without it the training is up to 1.64x as fast"
    )
    assert any("`Slow.on_train_batch_end` takes 10" in advice for advice in summary.advice)
    assert "callbacks/" not in str(summary)
    assert not any("Slow" in key for _, metrics in logger.calls for key in metrics)


def test_slash_in_a_callback_name_is_replaced(gpu: FakeGPU) -> None:
    timer = fit(gpu, Model(gpu), callbacks=[slow_callback(gpu, "Odd/Name")])
    assert between_batches(timer)[1]["callbacks/Odd_Name.on_train_batch_end"] == 10.0


def test_fit_inside_a_callback_is_time_of_the_callback(gpu: FakeGPU) -> None:
    def train(*_: Any) -> None:
        trainer().fit(Model(gpu), Loader(gpu, 2))

    timer = fit(gpu, Model(gpu), callbacks=[callback("Nested", on_before_zero_grad=train)])
    name = "callbacks/Nested.on_before_zero_grad"
    assert [step[name] for step in between_batches(timer)] == [2 * STEP_TOTAL_MS] * 3
    assert [step["forward"] for step in steps(timer)] == [4.0] * 3


def test_nested_fit_with_another_timer_is_timed(gpu: FakeGPU) -> None:
    def train(*_: Any) -> None:
        fit(gpu, Model(gpu), 2, timer=inner)

    inner = timer_of(gpu)
    outer = fit(gpu, Model(gpu), callbacks=[callback(on_train_epoch_end=train)], max_epochs=2)
    assert steps(outer) == [STEP_MS] * 6
    assert steps(inner) == [STEP_MS] * 2


def test_checkpoint_in_every_step_should_be_saved_less_often(gpu: FakeGPU, tmp_path: Path) -> None:
    save = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1)
    model = changed(gpu, on_save_checkpoint=taking(20.0))
    timer = timer_of(gpu, warmup_steps=1)
    fit(gpu, model, timer=timer, callbacks=[save], enable_checkpointing=True)
    summary = timer.summary()
    assert "`checkpoints` takes 20 ms of 35.6 ms per step (56 % of the fit)" in summary.verdict
    assert summary.advice[0].startswith("save less often: every_n_train_steps")
    # The table of phases has a row for checkpoints, like the time breakdown.
    assert re.search(r"^  checkpoints +20\.000 ", str(summary), re.MULTILINE)


def test_sigterm_broadcast_is_data_comm(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as EpochLoop

    advance = EpochLoop.advance

    def broadcast_and_advance(loop: EpochLoop, *args: Any) -> None:
        loop._broadcast_sigterm_tensor()
        advance(loop, *args)

    monkeypatch.setattr(EpochLoop, "advance", broadcast_and_advance)
    monkeypatch.setattr(EpochLoop, "_broadcast_sigterm_tensor", lambda _: gpu.work(32.0))
    monkeypatch.setattr(
        "lightning_gputime._compat.lightning_.sigterm_broadcast",
        lambda trainer: (trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"),
    )
    timer = timer_of(gpu)
    runner = trainer(timer)
    runner.fit(Model(gpu), Loader(gpu, 3))
    parts = {"data": 33.0, "data/fetch": 1.0, "data/copy": 0.0, "data/comm": 32.0}
    assert between_batches(timer) == [{**parts, "callbacks": 0.0}] * 3
    assert timer.summary().verdict == (
        "straggler-bound: `other ranks` takes 32 ms of 47.6 ms per step (67 % of the fit); without"
        " it the training is up to 3.05x as fast"
    )
    assert "_broadcast_sigterm_tensor" not in vars(runner.fit_loop.epoch_loop)


@either_order
def test_optimizer_of_a_callback_ends_no_step(gpu: FakeGPU, first: bool) -> None:
    model = changed(
        gpu, configure_optimizers=lambda model: Adder(model.net.parameters(), model.gpu, 2.0)
    )
    model.probe = Layer(gpu, 2.0, 1.0)
    optimizer = Adder(model.probe.parameters(), gpu, 5.0)
    probe = callback(on_train_batch_end=lambda *_: optimizer.step())
    timer = fit(gpu, model, 6, callbacks=[probe], first=first, accumulate_grad_batches=3)
    assert timer.history()["step"].tolist() == [0, 1]
    assert [(step["forward"], step["optimizer"]) for step in steps(timer)] == [(12.0, 2.0)] * 2


# The end of a step


@either_order
def test_step_ends_at_the_update_when_accumulation_changes(gpu: FakeGPU, first: bool) -> None:
    def change(_: object, runner: pl.Trainer, *rest: Any) -> None:
        if rest[-1] == 1:
            runner.accumulate_grad_batches = 3

    changes = callback(on_train_batch_end=change)
    timer = fit(gpu, Model(gpu), 7, callbacks=[changes], first=first, accumulate_grad_batches=2)
    assert steps(timer) == steps_of(2, 1, 3, 1)
    assert timer.summary().skipped_updates == 0


def test_skipped_update_is_marked_and_counted(gpu: FakeGPU) -> None:
    def loss(model: Model, x: Tensor) -> Tensor:
        return Model.loss(model, x) * (float("inf") if model.global_step == 1 else 1.0)

    def read(*_: Any) -> None:
        assert timer.last_step is not None
        skipped.append(timer.last_step.skipped_update)

    timer, skipped = timer_of(gpu, _lag=0), list[bool]()
    reader = callback(on_train_batch_end=read)
    fit(gpu, changed(gpu, loss=loss), timer=timer, callbacks=[reader], plugins=[fp16()])
    assert skipped == [False, True, False]
    assert steps(timer) == [STEP_MS, WITHOUT_UPDATE, STEP_MS]
    assert timer.summary().skipped_updates == 1
    assert "; 1 updates skipped" in str(timer.summary())


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_loss_time_of_a_skipped_micro_batch_does_not_count_as_forward(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning warns once per process, and another test expects the warning.
    monkeypatch.setattr(Closure, "warning_cache", WarningCache())

    def training_step(model: Model, batch: Tensor, batch_idx: int) -> Any:
        loss = Model.training_step(model, batch, batch_idx)
        return None if batch_idx % 2 == 0 else loss

    timer = fit(gpu, changed(gpu, training_step=training_step), 4, accumulate_grad_batches=2)
    assert [(step["forward"], step["loss"]) for step in steps(timer)] == [(8.0, 0.5)] * 2


# Manual optimization


def test_batches_end_steps_if_manual_updates_call_no_hooks(gpu: FakeGPU) -> None:
    def training_step(model: Model, batch: Tensor, batch_idx: int) -> None:
        model.manual_backward(model.loss(batch))
        optimizer: Any = model.optimizers()
        type(optimizer.optimizer).step.__wrapped__(optimizer.optimizer)

    timer = fit(gpu, changed(gpu, automatic_optimization=False, training_step=training_step), n=60)
    # The first step has all batches before that is clear.
    assert [step["forward"] for step in steps(timer)] == [84.0, *[4.0] * 39]


# Several timers of one Trainer


@pytest.mark.parametrize("is_twice", [True, False])
def test_two_timers_with_the_same_keys_are_refused(gpu: FakeGPU, is_twice: bool) -> None:
    timer = timer_of(gpu)
    with pytest.raises(ValueError, match=r"prefix='phase_time' twice: .* pass different prefixes"):
        fit(gpu, Model(gpu), timer=timer, callbacks=[timer if is_twice else timer_of(gpu)])
    assert not steps(timer)


# Other parts of Lightning that copy or run the model


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("copy", "trainer"),
        ("copy", "profiler"),
        ("pickle", "profiler"),
        ("cloudpickle", "trainer"),
        ("cloudpickle", "profiler"),
    ],
)
def test_trainer_and_its_profiler_can_be_cloned_during_a_fit(how: str, name: str) -> None:
    module = pytest.importorskip(how)

    def clone(_: object, runner: Any, *__: Any) -> None:
        item = runner if name == "trainer" else runner.profiler
        clones.append(module.deepcopy(item) if how == "copy" else module.loads(module.dumps(item)))

    timer, clones = GPUPhaseTimer(print_summary=False, warmup_steps=0), list[Any]()
    trainer(callback(on_train_batch_end=clone), timer, limit_train_batches=2).fit(BoringModel())
    assert clones  # Clones by cloudpickle append to a copy of this list.
    assert len(timer.history()) == 2
    if name == "profiler":
        with clones[0].profile("[Strategy]SingleDeviceStrategy.batch_to_device"):
            pass  # The clone does not call the timer.


class Tunable(Model):
    """A model with the attributes that finders tune, on real data."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)
        self.batch_size, self.lr = 2, 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        data: Any = torch.ones(32, 2)
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    val_dataloader = train_dataloader


@pytest.mark.parametrize(
    "finder",
    [
        BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=2),
        LearningRateFinder(num_training_steps=5),
    ],
    ids=["BatchSizeFinder", "LearningRateFinder"],
)
@pytest.mark.filterwarnings("ignore")
def test_trials_of_finders_are_not_steps(gpu: FakeGPU, finder: pl.Callback, tmp_path: Path) -> None:
    timer = timer_of(gpu)
    runner = trainer(timer, finder, default_root_dir=tmp_path, enable_checkpointing=True)
    runner.fit(Tunable(gpu))
    assert len(timer.history()) == runner.num_training_batches
    assert steps(timer)[-1] == {**STEP_MS, "data": 0.0, "optimizer": 0.0}
