"""The places of a Lightning run at which the timer must begin, read, or keep out."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, between_batches, steps
from fake_lightning import Loader, MemoryLogger, Model, fit, timer_of, trainer
from torch import Tensor

from lightning_gputime import GPUPhaseTimer

# Start of an epoch


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("max_epochs", [1, 2])
def test_run_resumed_within_an_epoch_is_timed_from_its_first_fetch(
    gpu: FakeGPU, max_epochs: int, tmp_path: Path
) -> None:
    saves = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer(saves, enable_checkpointing=True).fit(Model(gpu), Loader(gpu, 5))
    timer = timer_of(gpu)
    runner = trainer(timer, max_epochs=max_epochs)
    runner.fit(Model(gpu), Loader(gpu, 5), ckpt_path=tmp_path / "step=2.ckpt")
    numbers = list(range(2, 5 * max_epochs))
    assert timer.history()["step"].tolist() == numbers
    assert steps(timer) == [STEP_MS] * len(numbers)


# Means for other callbacks


class Finds(pl.Callback):
    """Notes the value that a callback finds in a hook."""

    def __init__(self, hook: str) -> None:
        self.found: list[float | None] = []
        setattr(self, hook, self._look)

    def _look(self, trainer: pl.Trainer, *_: Any) -> None:
        value = trainer.callback_metrics.get("phase_time/step_ms")
        self.found.append(None if value is None else float(value))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("log_every_n_steps", [2, 3, 50])
def test_epoch_end_hooks_find_the_means_in_any_callback_order(
    gpu: FakeGPU, log_every_n_steps: int, first: bool
) -> None:
    finds, timer = Finds("on_train_epoch_end"), timer_of(gpu)
    callbacks = [finds, timer] if first else [timer, finds]
    logger = MemoryLogger()
    runner = trainer(*callbacks, log_every_n_steps=log_every_n_steps, max_epochs=2, logger=logger)
    runner.fit(Model(gpu), Loader(gpu, 3))
    assert finds.found == [sum(STEP_MS.values())] * 2
    # The loggers get what they would get without epochs, and the rest when training ends.
    logged = {2: [1, 3, 5], 3: [2, 5], 50: [5]}
    assert [step for step, _ in logger.phase_times()] == logged[log_every_n_steps]


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("first", [False, True])
def test_early_stopping_and_checkpoints_monitor_a_phase_from_the_first_epoch(
    gpu: FakeGPU, hook: str, first: bool, tmp_path: Path
) -> None:
    at_epoch_end = hook == "on_train_epoch_end"
    stop = pl.callbacks.EarlyStopping(
        "phase_time/step_ms", patience=1, check_on_train_epoch_end=at_epoch_end
    )
    save = pl.callbacks.ModelCheckpoint(
        tmp_path, monitor="phase_time/step_ms", save_on_train_epoch_end=at_epoch_end
    )
    timer = timer_of(gpu)
    callbacks = [stop, save, timer] if first else [timer, stop, save]
    runner = trainer(*callbacks, max_epochs=9, enable_checkpointing=True, val_check_interval=2)
    runner.fit(Model(gpu), Loader(gpu, 4), Loader(gpu, 1))
    assert steps(timer) == [STEP_MS] * (8 if at_epoch_end else 4)
    assert save.best_model_score == sum(STEP_MS.values())


def test_steps_resolved_at_an_epoch_end_are_counted_once(gpu: FakeGPU) -> None:
    class Slower(Loader):
        def __iter__(self) -> Any:
            for i, batch in enumerate(super().__iter__()):
                gpu.work(float(i))
                yield batch

    logger = MemoryLogger()
    runner = trainer(timer_of(gpu), log_every_n_steps=4, max_epochs=3, logger=logger)
    runner.fit(Model(gpu), Slower(gpu, 3))
    own = sum(STEP_MS.values())
    means = [(step, metrics["phase_time/step_ms"]) for step, metrics in logger.phase_times()]
    # Over the steps 0 to 3, 4 to 7, and 8.
    assert means == [(3, own + 3 / 4), (7, own + (1 + 2 + 0 + 1) / 4), (8, own + 2.0)]


# Start of a validation


def test_hooks_and_loggers_before_a_validation_belong_to_the_step(gpu: FakeGPU) -> None:
    class Logs(MemoryLogger):
        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            gpu.work(0.5)

    class Long(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            gpu.work(0.25)

        def val_dataloader(self) -> Any:
            gpu.work(100.0)  # It is the validation's, as what follows.
            return Loader(gpu, 2)

        def on_validation_model_eval(self) -> None:
            gpu.work(100.0)
            super().on_validation_model_eval()

    timer = timer_of(gpu)
    options: Any = {"val_check_interval": 2, "logger": Logs(), "log_every_n_steps": 1}
    trainer(timer, **options).fit(Long(gpu), Loader(gpu, 6))
    # With the log of the model, and the timer's own, but where a validation begins with that.
    callbacks = [1.25, 0.75, 1.25, 0.75]
    assert timer.history()["callbacks_ms"].tolist()[2:] == callbacks
    step_ms = [sum(STEP_MS.values()) + ms for ms in callbacks]
    assert timer.history()["step_ms"].tolist()[2:] == step_ms


@pytest.mark.parametrize(("accumulate", "every"), [(2, 1), (3, 2), (4, 3)])
def test_hooks_before_a_validation_inside_an_accumulation_belong_to_the_step(
    gpu: FakeGPU, accumulate: int, every: int
) -> None:
    class Long(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            gpu.work(0.25)

    timer = timer_of(gpu)
    options: Any = {"val_check_interval": every, "accumulate_grad_batches": accumulate}
    trainer(timer, **options).fit(Long(gpu), Loader(gpu, 12), Loader(gpu, 2))
    # Callbacks after the last batch of a step belong to the next step.
    callbacks = [0.25 * (accumulate - 1), *[0.25 * accumulate] * (12 // accumulate - 1)]
    assert timer.history()["callbacks_ms"].tolist() == callbacks
    step_ms = [sum(STEP_MS.values()) * accumulate - 2.0 * (accumulate - 1) + ms for ms in callbacks]
    assert timer.history()["step_ms"].tolist() == step_ms


class Works(pl.Callback):
    """Takes 0.25 ms after each batch, and validates after the fourth."""

    def __init__(self, gpu: FakeGPU, validate: Callable[[pl.Trainer], object]) -> None:
        self.gpu, self.validate = gpu, validate

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.gpu.work(0.25)
        if args[-1] == 3:
            self.validate(trainer)
            self.gpu.work(32.0)


@pytest.mark.parametrize("by_another", [False, True])
def test_callback_time_around_its_validation_belongs_to_the_step(
    gpu: FakeGPU, by_another: bool
) -> None:
    timer, model = timer_of(gpu), Model(gpu)

    def validate(runner: pl.Trainer) -> None:
        if by_another:
            trainer(timer).validate(model, Loader(gpu, 2), verbose=False)
            model.trainer = runner
        else:
            loggers = runner._logger_connector
            first = loggers._first_loop_iter
            runner.validating = True
            runner.fit_loop.epoch_loop.val_loop.run()
            runner.training, loggers._first_loop_iter = True, first

    runner = trainer(timer, Works(gpu, validate), check_val_every_n_epoch=100)
    runner.fit(model, Loader(gpu, 6), Loader(gpu, 2))
    step_ms = sum(STEP_MS.values())
    assert timer.history()["step_ms"].tolist() == [
        step_ms + ms for ms in (0.0, 0.25, 0.25, 0.25, 32.25, 0.25)
    ]


# Model calls that are no `forward`


class Samples(pl.Callback):
    """Calls the model in a hook, as a callback does that samples images."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._sample)

    def _sample(self, trainer: pl.Trainer, model: pl.LightningModule, *_: Any) -> None:
        loss = model(torch.ones(1, 2)).sum()
        if loss.requires_grad:
            loss.backward()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_model_calls_of_other_callbacks_are_not_forward(
    gpu: FakeGPU, hook: str, first: bool
) -> None:
    timer, samples = timer_of(gpu), Samples(hook)
    trainer(*([samples, timer] if first else [timer, samples])).fit(Model(gpu), Loader(gpu, 3))
    took = {**STEP_MS, "callbacks": 4.0 + 7.75}
    is_later = hook == "on_train_batch_end" and not first  # Then it is the next step's.
    assert steps(timer) == [STEP_MS if is_later else took, took, took]


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
def test_module_that_augments_batches_is_data(gpu: FakeGPU, hook: str) -> None:
    class Augments(Model):
        def augment(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            self.net(batch)
            return batch

    setattr(Augments, hook, Augments.augment)
    timer = fit(gpu, Augments(gpu))
    assert steps(timer) == [{**STEP_MS, "data": 1.0 + 4.0}] * 3


def test_model_calls_between_validation_batches_are_not_forward(
    gpu: FakeGPU,
) -> None:
    logger = MemoryLogger()
    runner = trainer(timer_of(gpu), Samples("on_validation_batch_end"), logger=logger)
    runner.validate(Model(gpu), Loader(gpu, 3), verbose=False)
    [(_, metrics)] = logger.phase_times()
    assert metrics["phase_time/val/forward_ms"] == 4.0


# The parts of `data`


class Slow(pl.Callback):
    """Takes 10 ms after each batch."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu

    def on_train_batch_end(self, *_: Any) -> None:
        self.gpu.work(10.0)


class Transfers(Model):
    """A model whose batches take 2 ms to the device, and 3 ms to be augmented there."""

    def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
        self.gpu.work(2.0)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.gpu.work(3.0)
        return batch


@pytest.mark.parametrize("first", [True, False])
def test_data_is_split_into_fetch_and_copy_under_lightning(gpu: FakeGPU, first: bool) -> None:
    timer, slow = timer_of(gpu), Slow(gpu)
    trainer(*([slow, timer] if first else [timer, slow])).fit(Transfers(gpu), Loader(gpu, 3))
    parts = {"data/fetch": 1.0, "data/copy": 2.0}
    slow_excess_ms = {"callbacks": 10.0, "callbacks/Slow.on_train_batch_end": 10.0}
    split = {"data": 6.0, **parts, **slow_excess_ms}
    none_yet = {"data": 6.0, **parts, "callbacks": 0.0}
    assert between_batches(timer) == [split if first else none_yet, split, split]
    assert steps(timer)[1] == {**STEP_MS, "data": 6.0, "callbacks": 10.0}


def test_start_of_the_loader_workers_is_data_fetch(gpu: FakeGPU) -> None:
    class Starts(Loader):
        def __iter__(self) -> Any:
            gpu.work(32.0)
            return super().__iter__()

    timer = timer_of(gpu)
    trainer(timer, max_epochs=2).fit(Model(gpu), Starts(gpu, 2))
    # The first epoch's are started before training.
    assert [step["data/fetch"] for step in between_batches(timer)] == [1.0, 1.0, 33.0, 1.0]


def test_slow_callback_is_named_and_not_input_bound(gpu: FakeGPU) -> None:
    timer, logger = timer_of(gpu, warmup_steps=1), MemoryLogger()
    trainer(timer, Slow(gpu), logger=logger).fit(Model(gpu), Loader(gpu, 3))
    summary = timer.summary()
    assert summary.verdict == (
        "callback-bound: `callbacks` takes 39 % of the fit; without it the training is up to 1.64x"
        " as fast"
    )
    table = str(summary)
    assert any("`Slow.on_train_batch_end` takes 10" in advice for advice in summary.advice)
    assert "callbacks/" not in table
    assert not any("Slow" in key for _, metrics in logger.calls for key in metrics)


def test_callback_whose_state_key_changes_keeps_its_name(gpu: FakeGPU) -> None:
    class Renamed(Slow):
        @property
        def state_key(self) -> str:
            return f"renamed {self.epochs}"

        epochs = 0

        def on_train_epoch_start(self, *_: Any) -> None:
            self.epochs += 1

    timer = timer_of(gpu)
    trainer(timer, Renamed(gpu), max_epochs=3).fit(Model(gpu), Loader(gpu, 2))
    name = "callbacks/Renamed.on_train_batch_end"
    # Callbacks after the last batch of an epoch belong to no step.
    assert [step.get(name, 0.0) for step in between_batches(timer)] == [0.0, 10.0] * 3


class OfAnother(pl.LightningModule):
    """Another model, which a callback of the training trains."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu, self.net = gpu, Layer(gpu, 3.0, 6.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Adder(self.parameters(), self.gpu, 1.5)


def test_fit_inside_a_callback_counts_for_the_callback(gpu: FakeGPU) -> None:
    class Nested(pl.Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            trainer().fit(OfAnother(gpu), Loader(gpu, 2))

    timer = fit(gpu, Model(gpu), callbacks=[Nested()])
    name = "callbacks/Nested.on_before_zero_grad"
    assert [step[name] for step in between_batches(timer)] == [23.0] * 3
    assert [step["forward"] for step in steps(timer)] == [4.0] * 3


def test_checkpoint_in_every_step_is_not_input_bound(gpu: FakeGPU, tmp_path: Path) -> None:
    class Saves(Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            gpu.work(20.0)

    save = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1)
    timer = timer_of(gpu, warmup_steps=1)
    trainer(timer, save, enable_checkpointing=True).fit(Saves(gpu), Loader(gpu, 3))
    assert timer.summary().verdict.startswith("callback-bound: `callbacks` takes 56 %")
    advice = timer.summary().advice[0]
    assert advice.startswith("save less often: every_n_train_steps")
    # The table of phases has a row of them, as the losses have.
    assert re.search(r"^  checkpoints +20\.000 ", str(timer.summary()), re.MULTILINE)


def test_sigterm_broadcast_is_a_wait_for_other_ranks(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as EpochLoop

    advance = EpochLoop.advance

    def asks(loop: EpochLoop, *args: Any) -> None:
        loop._broadcast_sigterm_tensor()
        advance(loop, *args)

    monkeypatch.setattr(EpochLoop, "advance", asks)
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
    assert timer.summary().verdict.startswith("rank-bound: `other ranks` takes 67 % of the fit; ")
    assert "_broadcast_sigterm_tensor" not in vars(runner.fit_loop.epoch_loop)


# End of a step


def micro_batches(*numbers: int) -> list[dict[str, float]]:
    """Steps of several micro-batches, each with an update."""
    return [
        {name: ms * (1 if name == "optimizer" else n) for name, ms in STEP_MS.items()}
        for n in numbers
    ]


@pytest.mark.parametrize("first", [True, False])
def test_step_ends_at_the_update_when_a_callback_changes_the_accumulation(
    gpu: FakeGPU, first: bool
) -> None:
    class Changes(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
            trainer.accumulate_grad_batches = (
                3 if rest[-1] == 1 else trainer.accumulate_grad_batches
            )

    timer, changes = timer_of(gpu), Changes()
    callbacks = [changes, timer] if first else [timer, changes]
    trainer(*callbacks, accumulate_grad_batches=2).fit(Model(gpu), Loader(gpu, 7))
    assert steps(timer) == micro_batches(2, 1, 3, 1)
    assert timer.summary().skipped_updates == 0


def test_step_ends_at_the_update_when_the_module_leaves_updates_out(gpu: FakeGPU) -> None:
    class Seldom(Model):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            if batch_idx % 3 == 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    timer = fit(gpu, Seldom(gpu), n=7)
    last = {name: ms for name, ms in STEP_MS.items() if name != "optimizer"}
    assert steps(timer) == [*micro_batches(3, 3), last]
    assert timer.history()["step"].tolist() == [2, 5, 6]
    # The last one was due to end with its epoch.
    assert timer.summary().skipped_updates == 1


def test_steps_follow_the_trainer_when_no_update_is_visible(gpu: FakeGPU) -> None:
    class Hides(Model):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            optimizer_closure()

    timer = fit(gpu, Hides(gpu), n=104)
    assert timer.history()["step"].tolist() == [100, 101, 102, 103]


# Evaluations inside a fit


class Validates(pl.Callback):
    """Lets another trainer validate another model in a hook, with the same timer, once."""

    def __init__(self, hook: str, gpu: FakeGPU, timer: GPUPhaseTimer, *others: pl.Callback) -> None:
        setattr(self, hook, self._validate)
        self.gpu, self.callbacks = gpu, (timer, *others)
        self.calls = 0

    def _validate(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            with contextlib.suppress(ZeroDivisionError):
                runner = trainer(*self.callbacks)
                runner.validate(Model(self.gpu), Loader(self.gpu, 2), verbose=False)


class Breaks(pl.Callback):
    def on_validation_batch_end(self, *_: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("others", [[], [Breaks()]], ids=["it ends", "it fails"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_validation_by_another_trainer_inside_a_fit_loses_no_step(
    gpu: FakeGPU, hook: str, first: bool, others: list[pl.Callback]
) -> None:
    timer = timer_of(gpu)
    validates = Validates(hook, gpu, timer, *others)
    trainer(*([validates, timer] if first else [timer, validates])).fit(Model(gpu), Loader(gpu, 4))
    assert timer.history()["step"].tolist() == [0, 1, 2, 3]
    assert steps(timer) == [STEP_MS] * 4


# From a file, and in a dry run


class Plain(pl.LightningModule):
    """A model that needs no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        data: Any = torch.ones(4, 2)
        return torch.utils.data.DataLoader(data, batch_size=2)


CONFIG = """
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_checkpointing: false
  callbacks:
    - class_path: lightning_gputime.GPUPhaseTimer
      init_args:
        warmup_steps: 0
        observers: %s
"""


@pytest.mark.filterwarnings("ignore")  # jsonargparse and Lightning warn of themselves
@pytest.mark.parametrize(
    "options",
    [
        "{items: 2.5, flops: [1.0, 2.0], modules: [net], every_n_steps: auto, sync_ranks: log}",
        "{items: 4, flops: 3000000000.0, modules: net, every_n_steps: 1, save_path: null}",
    ],
)
def test_file_that_a_lightning_cli_saves_can_be_run_again(
    options: str, tmp_path: Path, gpu: FakeGPU
) -> None:
    cli = pytest.importorskip("lightning.pytorch.cli")
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("jsonargparse")
    config = yaml.safe_load(CONFIG % "[]")
    [callback] = config["trainer"]["callbacks"]
    own = yaml.safe_load(options)
    callback["init_args"] |= own
    config["trainer"]["default_root_dir"] = str(tmp_path)
    path = tmp_path / "first.yaml"
    path.write_text(yaml.safe_dump(config))
    for _ in range(2):
        made = cli.LightningCLI(
            Plain, args=["fit", "--config", str(path)], save_config_kwargs={"overwrite": True}
        )
        [timer] = [item for item in made.trainer.callbacks if isinstance(item, GPUPhaseTimer)]
        taken = {name: getattr(timer._options, name) for name in own if name != "save_path"}
        assert taken == {name: entry for name, entry in own.items() if name != "save_path"}
        assert len(timer.history()) > 0
        path = tmp_path / "config.yaml"


def test_run_of_warm_up_steps_prints_a_labelled_table(
    gpu: FakeGPU, capsys: pytest.CaptureFixture[str]
) -> None:
    timer = GPUPhaseTimer(_clock=gpu)
    runner = trainer(timer, fast_dev_run=True)
    runner.fit(Model(gpu), Loader(gpu, 3))
    printed = capsys.readouterr().out
    assert "Time per step in ms over 1 step of the warm-up; no other step was timed" in printed
    assert "forward     4.000   25.6%" in printed
    assert "bound" not in printed  # A warm-up says nothing about the training.
    assert (timer.summary().steps, timer.summary().is_warmup) == (1, True)
    assert timer.summary().verdict == ""


# Copies and scripts in the middle of a fit


class Calls(pl.Callback):
    """Calls a function in the middle of a fit, and at its end before the timer hears of that."""

    def __init__(self, call: Callable[[pl.Trainer, pl.LightningModule], Any]) -> None:
        self.call = call
        self.results: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *rest: Any) -> None:
        self.results.append(self.call(trainer, pl_module))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.results.append(self.call(trainer, pl_module))


class Scripted(Plain):
    """A model that can be scripted."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


@pytest.mark.filterwarnings("ignore:.*to_torchscript.*", "ignore:.*torch.jit.*")
@pytest.mark.parametrize("method", ["script", "trace"])
def test_model_is_scripted_in_the_middle_of_a_fit(gpu: FakeGPU, method: str) -> None:
    def script(trainer: pl.Trainer, model: pl.LightningModule) -> Any:
        scripted = model.to_torchscript(method=method, example_inputs=torch.ones(1, 2))
        assert model.training
        return scripted

    timer, calls = timer_of(gpu), Calls(script)
    model = Scripted()
    trainer(calls, timer, max_epochs=2).fit(model)
    x = torch.ones(1, 2)
    assert len(calls.results) == 5
    assert torch.equal(calls.results[-1](x), model(x))
    assert [sorted(step) for step in steps(timer)] == [sorted(STEP_MS)] * 4


@pytest.mark.parametrize("name", ["pickle", "cloudpickle", "copy"])
@pytest.mark.parametrize("of", ["trainer", "profiler"])
def test_trainer_and_its_profiler_are_copied_in_the_middle_of_a_fit(
    gpu: FakeGPU, name: str, of: str
) -> None:
    how = pytest.importorskip(name)
    if (name, of) == ("pickle", "trainer"):
        pytest.skip("Trainer holds functions of its own that cannot be pickled")

    def twin(trainer: pl.Trainer, model: pl.LightningModule) -> Any:
        kept = trainer if of == "trainer" else trainer.profiler  # type: ignore[attr-defined]
        return how.deepcopy(kept) if name == "copy" else how.loads(how.dumps(kept))

    timer, calls = GPUPhaseTimer(print_summary=False, warmup_steps=0), Calls(twin)
    trainer(calls, timer).fit(Plain())
    assert len(calls.results) == 3
    assert len(timer.history()) == 2
    if of == "profiler":
        with calls.results[0].profile("[Strategy]SingleDeviceStrategy.batch_to_device"):
            pass  # It tells nobody.


# Manual optimization


class ByHand(Model):
    """A model whose micro-batches are two a step; the last update of an epoch comes at its end."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.gpu.work(0.125)
        self.loss(batch).backward()
        if batch_idx % 2:
            self.update()

    def on_train_epoch_end(self) -> None:
        self.update()

    def update(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("validates", [False, True])
def test_update_at_an_epoch_end_ends_the_step_of_its_batches(gpu: FakeGPU, validates: bool) -> None:
    timer = timer_of(gpu)
    validation = Loader(gpu, 2) if validates else None
    trainer(timer, max_epochs=2).fit(ByHand(gpu), Loader(gpu, 3), validation)
    assert steps(timer) == micro_batches(2, 1) * 2
    assert timer.history()["step"].tolist() == [1, 2, 4, 5]
    assert timer.summary().skipped_updates == 0


class UpdatesLate(ByHand):
    """Updates after each batch, in the hook at its end."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.gpu.work(0.125)
        self.loss(batch).backward()

    def on_train_batch_end(self, *_: Any) -> None:
        self.update()

    def on_train_epoch_end(self) -> None:
        pass


def test_update_in_the_hook_at_the_end_of_its_batch_ends_the_step(gpu: FakeGPU) -> None:
    timer = fit(gpu, UpdatesLate(gpu), max_epochs=2)
    assert steps(timer) == [{**STEP_MS}] * 6
    assert timer.history()["step"].tolist() == [*range(6)]


class WithoutOptimizer(ByHand):
    """Trains by hand what needs no optimizer, such as statistics."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.no_grad():
            self(batch)

    def on_train_epoch_end(self) -> None:
        pass

    def configure_optimizers(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore:.*configure_optimizers.*")
def test_every_batch_is_a_step_without_an_optimizer(gpu: FakeGPU) -> None:
    timer = fit(gpu, WithoutOptimizer(gpu), max_epochs=2)
    assert [step["forward"] for step in steps(timer)] == [4.0] * 6
    assert timer.summary().skipped_updates == 0


# Several timers of one Trainer


@pytest.mark.parametrize("is_twice", [True, False])
def test_two_timers_with_the_same_keys_are_refused_before_training(
    gpu: FakeGPU, is_twice: bool
) -> None:
    timer = timer_of(gpu)
    with pytest.raises(ValueError, match=r"prefix='phase_time' twice: .* give each its own prefix"):
        trainer(timer, timer if is_twice else timer_of(gpu)).fit(Model(gpu), Loader(gpu, 2))
    assert not steps(timer)


# Fits one after another, and inside one another


def test_nested_fit_with_another_timer_is_timed(gpu: FakeGPU) -> None:
    class Fits(pl.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            trainer(inner).fit(Model(gpu), Loader(gpu, 2))

    inner, outer = timer_of(gpu), timer_of(gpu)
    trainer(outer, Fits(), max_epochs=2).fit(Model(gpu), Loader(gpu, 3))
    assert steps(outer) == [STEP_MS] * 6
    assert steps(inner) == [STEP_MS] * 2


# Words


def test_slash_in_a_callback_name_is_replaced(gpu: FakeGPU) -> None:
    timer = timer_of(gpu)
    odd = type("Odd/Name", (Slow,), {})
    trainer(timer, odd(gpu)).fit(Model(gpu), Loader(gpu, 8))
    assert "`Odd_Name.on_train_batch_" in str(timer.summary())
