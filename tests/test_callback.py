"""`GPUPhaseTimer`: what it logs, errors, options, and evaluations."""

import pickle
from collections import UserList
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, steps
from fake_lightning import Loader, MemoryLogger, Model, callback, changed, fit, timer_of, trainer
from fake_loop import timed_indices
from torch import Tensor

from lightning_gputime import GPUPhaseTimer, load


def test_means_are_logged_under_the_number_of_their_newest_step(gpu: FakeGPU) -> None:
    logger = MemoryLogger()
    fit(gpu, Model(gpu), n=5, logger=logger, log_every_n_steps=2)
    total = sum(STEP_MS.values())
    # The host does no work, so it waits for all work of the GPU.
    phases = {**STEP_MS, "callbacks": 0.0, "step": total, "host_wait": total}
    means = {f"phase_time/{name}_ms": ms for name, ms in phases.items()}
    means |= {"phase_time/items_per_sec": 1000 / total, "phase_time/estimated": 0, "epoch": 0}
    assert logger.phase_times() == [(step, means) for step in (1, 3, 4)]
    # Lightning logs its metrics under the same step numbers.
    assert [step for step, metrics in logger.calls if "loss" in metrics] == [1, 3]


PHASES = {f"{name}_ms" for name in (*STEP_MS, "callbacks", "step")} | {"estimated"}
DEFAULT = PHASES | {"host_wait_ms", "items_per_sec"}
FETCH = {"data/fetch_ms", "data/copy_ms"}
FIT = {"fit/wall_s", "fit/steps_share"}  # Keys that each fit has; others depend on the fit.


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ({}, DEFAULT),
        ({"log": ["default", "fit"]}, DEFAULT | FIT),
        ({"log": ["phases", "comm"]}, PHASES),
        ({"log": "all"}, DEFAULT | FETCH | FIT | {"slow_excess_ms"}),
        ({"log": [], "observers": [SimpleNamespace(metrics=lambda _: {"a": 1.0})]}, {"a"}),
        ({"log": []}, set()),
    ],
)
def test_log_option_selects_the_logged_keys(
    gpu: FakeGPU, options: dict[str, Any], logged: set[str], tmp_path: Path
) -> None:
    logger, timer = MemoryLogger(), timer_of(gpu, **options)
    runner = trainer(timer, logger=logger, log_every_n_steps=20)
    runner.fit(Model(gpu), Loader(gpu, 20), Loader(gpu, 1))
    prefixed_keys = {key for _, row in logger.calls for key in row if "phase_time" in key}
    keys = {key.removeprefix("phase_time/") for key in prefixed_keys}
    of_training = {key for key in keys if not key.startswith("val/")}
    assert {key for key in of_training if not key.startswith("fit/") or key in FIT} == logged
    evaluation_phases = {f"{name}_ms" for name in ("data", "forward", "other")}
    of_validation = {key.removeprefix("val/") for key in keys - of_training}
    assert of_validation & evaluation_phases == logged & evaluation_phases
    assert {*runner.callback_metrics} & {f"phase_time/{key}" for key in DEFAULT} == {
        f"phase_time/{key}" for key in logged & DEFAULT
    }
    # Keys that are not logged are still saved.
    timer.save(tmp_path / "run.json")
    assert evaluation_phases < {*load(tmp_path / "run.json").evaluations[0]}


def test_custom_profiler_keeps_its_start_method(gpu: FakeGPU) -> None:
    profiler = pl.profilers.PassThroughProfiler()
    started: list[str] = []
    start = profiler.start = started.append  # type: ignore[assignment]
    timer = timer_of(gpu)
    runner = trainer(timer, profiler=profiler, val_check_interval=2)
    runner.fit(Model(gpu), Loader(gpu, 4), Loader(gpu, 2))
    assert vars(profiler)["start"] is start
    assert started
    assert steps(timer) == [STEP_MS] * 4


class Wrapped:
    """A wrapper in the style of Lookahead or DeepSpeed, which has no hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register_"):
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


class WrapOptimizer(pl.Callback):
    """Replaces the optimizer by a wrapper."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy._optimizers = [Wrapped(trainer.optimizers[0])]  # type: ignore[list-item]


def test_optimizer_inside_a_foreign_wrapper_is_timed(gpu: FakeGPU) -> None:
    timer = fit(gpu, Model(gpu), callbacks=[WrapOptimizer()])
    assert steps(timer) == [STEP_MS] * 3
    assert timer.summary().skipped_updates == 0


def test_table_is_printed_once(gpu: FakeGPU, capsys: pytest.CaptureFixture[str]) -> None:
    timer = GPUPhaseTimer(_clock=gpu, warmup_steps=1)
    fit(gpu, Model(gpu), timer=timer)
    printed = capsys.readouterr().out
    assert printed.count(str(timer.summary())) == 1
    assert "over 2 steps (1 warm-up step excluded)" in printed


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "training_step", "on_train_epoch_end"])
def test_exception_keeps_the_measurement_and_leaves_no_hooks(
    gpu: FakeGPU, error: type[BaseException], hook: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def fail(model: Model, *args: Any) -> Any:
        calls.append(args)
        gpu.host_work(100.0)
        if len(calls) == 3 or hook == "on_train_epoch_end":
            raise error
        return getattr(Model, hook)(model, *args)

    model, logger = changed(gpu, **{hook: fail}), MemoryLogger()
    timer = GPUPhaseTimer(_clock=gpu, warmup_steps=0)
    runner = trainer(timer, logger=logger)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        runner.fit(model, Loader(gpu, 4))
    finished = 4 if hook == "on_train_epoch_end" else 2
    assert timer.history()["step"].tolist() == list(range(finished))
    assert logger.phase_times()[-1][0] == timer.history()["step"][-1]
    assert "forward" in capsys.readouterr().out
    assert all(not module._forward_hooks for module in model.modules())
    [optimizer] = runner.optimizers
    assert "zero_grad" not in vars(optimizer)
    # The timer can be used again.
    assert steps(fit(gpu, Model(gpu), timer=timer)) == [STEP_MS] * 3


def test_checkpoint_contains_no_state_of_the_timer(gpu: FakeGPU, tmp_path: Any) -> None:
    runner = trainer(timer_of(gpu))
    runner.fit(Model(gpu), Loader(gpu, 2))
    runner.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["callbacks"] == {}


def test_skipped_batches_and_none_batches_end_no_step(gpu: FakeGPU) -> None:
    class WithNone(Loader):
        def __iter__(self) -> Any:
            for i, batch in enumerate(super().__iter__()):
                yield None if i == 1 else batch

    model = changed(gpu, on_train_batch_start=lambda model, batch, i: -1 if i == 3 else None)
    timer = timer_of(gpu)
    with pytest.warns(UserWarning, match="yielded None"):
        trainer(timer, max_epochs=2).fit(model, WithNone(gpu, 5))
    # The copy of the batch that became None is part of the next batch's `data`.
    assert steps(timer) == [STEP_MS, {**STEP_MS, "data": 2.0}] * 2


@pytest.mark.parametrize(
    ("option", "converted"),
    [
        ({"warmup_steps": "3"}, 3),
        ({"history_size": 1e4}, 10_000),
        ({"every_n_steps": np.int64(2)}, 2),
        ({"items": "32"}, 32),
        ({"flops": "3e9"}, 3_000_000_000),
        ({"flops": UserList(["1.5", 2])}, [1.5, 2]),
        ({"log": UserList(["default", "slow"])}, ["default", "slow"]),
    ],
)
def test_options_of_config_files_are_converted(option: dict[str, Any], converted: Any) -> None:
    timer = GPUPhaseTimer(**option)
    [name] = option
    assert getattr(timer._options, name) == converted


# Evaluation


EVALUATION_MS = {"data": 1.0, "forward": 4.0, "other": 0.5}


class Evaluated(Model):
    """A model whose evaluation steps take `EVALUATION_MS`."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        self.gpu.work(0.25)
        self(batch)
        self.gpu.work(0.25)
        return batch

    test_step = predict_step = validation_step


def evaluations(logger: MemoryLogger, stage: str) -> list[tuple[int | None, dict[str, float]]]:
    prefix = f"phase_time/{stage}/"
    return [
        (step, {key.removeprefix(prefix): value for key, value in metrics.items()})
        for step, metrics in logger.calls
        if any(key.startswith(prefix) for key in metrics)
    ]


@pytest.mark.parametrize(
    ("stage", "method", "name"),
    [
        ("val", "validate", "validation"),
        ("test", "test", "test"),
        ("predict", "predict", "prediction"),
    ],
)
def test_evaluation_without_a_fit_is_logged_and_summarized(
    gpu: FakeGPU, stage: str, method: str, name: str
) -> None:
    logger, timer, model = MemoryLogger(), GPUPhaseTimer(_clock=gpu), Evaluated(gpu)
    runner = trainer(timer, logger=logger)
    getattr(runner, method)(model, Loader(gpu, 4))
    [(step, metrics)] = evaluations(logger, stage)
    assert step == 0
    assert metrics == {
        **{f"{name}_ms": ms for name, ms in EVALUATION_MS.items()},
        "step_ms": 5.5,
        "host_wait_ms": 5.5,
        "epoch": 0,
        "items_per_sec": 1000 / 5.5,
    }
    assert runner.callback_metrics[f"phase_time/{stage}/forward_ms"] == 4.0
    assert timer.last_step is None
    assert not any(module._forward_hooks for module in model.modules())
    summary = timer.summary()
    assert {name: row.mean_ms for name, row in summary.rows.items()} == EVALUATION_MS
    assert summary == timer.summary(stage)
    assert summary.step.p95_ms == 5.5
    assert "items per second, counted by the first dimension of the" in str(summary)
    assert f"Time per {name} step in ms over 4 steps" in str(summary).splitlines()
    assert "Time per" in pickle.loads(pickle.dumps(timer)).summary()._repr_html_()
    # The summary is that of the newest evaluation, and no training was timed.
    trainer(timer).validate(model, Loader(gpu, 2), verbose=False)
    assert "Time per validation step in ms over 2 steps" in str(timer.summary())
    assert timer.summary("fit").steps == 0
    assert str(timer.summary("fit")).startswith("No step was timed")


def test_summary_after_a_fit_describes_the_fit(gpu: FakeGPU) -> None:
    timer, model = timer_of(gpu), Evaluated(gpu)
    trainer(timer).test(model, Loader(gpu, 3))
    runner = trainer(timer, val_check_interval=2)
    runner.fit(model, Loader(gpu, 4), Loader(gpu, 3))
    assert str(timer.summary("test")).endswith("No test loop has run since the last fit began.")
    runner.test(model, Loader(gpu, 2))
    assert timer.summary() == timer.summary("fit") == timer.summary(None)
    assert (timer.summary().steps, timer.summary().measurement.stage) == (4, "")
    assert timer.summary("val").steps == 3
    assert timer.summary("validation") == timer.summary("val")
    assert timer.summary("test").rows["forward"].mean_ms == 4.0
    assert timer.summary("test").steps == 2
    assert str(timer.summary("predict")).startswith("No step was timed")
    message = "stage must be one of fit, val, test, predict, got 'val_'"
    with pytest.raises(ValueError, match=message):
        timer.summary("val_")


def test_validation_belongs_to_no_step_and_is_logged_under_the_training_step(gpu: FakeGPU) -> None:
    saves = callback(on_validation_end=lambda *_: gpu.work(1000.0))
    logger, timers = MemoryLogger(), [timer_of(gpu, prefix=name) for name in ("phase_time", "b")]
    options: dict[str, Any] = {"val_check_interval": 2, "num_sanity_val_steps": 2}
    runner = trainer(*timers, saves, max_epochs=2, logger=logger, **options)
    runner.fit(Evaluated(gpu), Loader(gpu, 4), Loader(gpu, 3))
    assert [steps(timer) for timer in timers] == [[STEP_MS] * 8] * 2
    assert [timer.history()["step"].tolist() for timer in timers] == [[*range(8)]] * 2
    assert "start" not in vars(runner.profiler)  # type: ignore[attr-defined]
    logged = evaluations(logger, "val")
    assert [(step, metrics["forward_ms"]) for step, metrics in logged] == [
        (step, 4.0) for step in (1, 3, 5, 7)
    ]


def test_every_n_steps_counts_across_epochs_and_validations(gpu: FakeGPU) -> None:
    timer = timer_of(gpu, every_n_steps=4)
    fit(gpu, Model(gpu), 6, timer=timer, validation=2, max_epochs=2, val_check_interval=3)
    assert timer.history()["step"].tolist() == timed_indices(4, 12)
    assert steps(timer) == [STEP_MS] * 3


@pytest.mark.parametrize("every_n_steps", [1, 10])
def test_graph_capture_in_a_validation_is_not_broken(gpu: FakeGPU, every_n_steps: int) -> None:
    def validation_step(model: Model, batch: Tensor, batch_idx: int) -> None:
        with gpu.capture():
            Model.validation_step(model, batch, batch_idx)

    model = changed(gpu, validation_step=validation_step)
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, every_n_steps=every_n_steps)
    fit(gpu, model, 30, timer=timer, validation=1, val_check_interval=15)
    assert not gpu.capture_broken
    assert timer.summary().steps


def test_nested_fit_with_its_timer_warns(gpu: FakeGPU, caplog: pytest.LogCaptureFixture) -> None:
    def train(_: object, runner: pl.Trainer, *__: Any) -> None:
        if runner.current_epoch == 0:
            fit(gpu, Model(gpu), 2, timer=timer)

    timer, nested = timer_of(gpu), callback(on_train_epoch_end=train)
    fit(gpu, Model(gpu), timer=timer, callbacks=[nested], max_epochs=2)
    message = "A training inside another training has ended the timing of the outer training"
    assert caplog.text.count(message) == 1
