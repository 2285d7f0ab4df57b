"""Untimed steps, in which hooks are detached, and the choice of the timed steps."""

import json
import math
import re
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import MS, Adder, CostlyGPU, FakeGPU, Layer
from fake_lightning import Loader, Model, fit, timer_of
from fake_lightning import trainer as trainer_of
from fake_loop import Logger, Loop, hooks, timed_indices
from processes import finish, start
from test_self_check import SkipsBatches, SkipsUpdates
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

AUTOGRAD: Any = torch.autograd
ENGINE = AUTOGRAD._engine_run_backward


def installed(loop: Loop) -> list[bool]:
    """Return for the model, torch and the optimizer if they have hooks or patches."""
    return [
        bool(loop.model._forward_hooks or loop.model._forward_pre_hooks),
        AUTOGRAD._engine_run_backward is not ENGINE,
        "zero_grad" in vars(loop.optimizer),
    ]


def test_hooks_are_detached_between_timed_steps(loop: Loop) -> None:
    attached = []
    with hooks(loop, every_n_steps=10) as timer:
        for step, x in enumerate(timer.steps(loop.batches(60))):
            if any(installed(loop)):
                assert all(installed(loop))
                attached.append(step)
            loop.train(x)
    # Hooks stay in the first 20 steps, to learn which functions the loop calls, and in the step
    # before each timed step, to recognize evaluations.
    timed = timed_indices(10, 60)
    later = {step for index in timed for step in (index - 1, index) if step >= 20}
    assert attached == [*range(20), *sorted(later)]
    assert timer.history()["step"].tolist() == timed
    assert {*timer.history()["backward_ms"].tolist()} == {8.0}


def test_module_class_is_changed_once(loop: Loop) -> None:
    # Since 3.13, Python caches the methods of a class and its subclasses for 1,000 changes only.
    methods, original = set[object](), vars(nn.Module)["__getstate__"]
    with hooks(loop, every_n_steps=10) as timer:
        for x in timer.steps(loop.batches(60)):
            methods.add(vars(nn.Module)["__getstate__"])
            loop.train(x)
    assert len(methods) == 1
    assert vars(nn.Module)["__getstate__"] is original
    assert original not in methods


def test_hooks_stay_attached_with_a_second_timer(loop: Loop) -> None:
    attached = []
    second = hooks(Loop(loop.gpu))
    with hooks(loop, every_n_steps=30) as timer:
        for step, x in enumerate(timer.steps(loop.batches(40))):
            if step == 35:
                second.attach()
            if all(installed(loop)):
                attached.append(step)
            loop.train(x)
        second.remove()
    timed = timed_indices(30, 40)
    later = {step for index in timed for step in (index - 1, index)}
    assert attached == sorted({*range(20), *later, *range(36, 40)})
    assert timer.history()["step"].tolist() == timed


# Loops of Lightning


class Accumulates(Model):
    """A model that updates by hand after every second batch."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class CallsModel(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *outputs: Any) -> None:
        if outputs[1] is not None:
            pl_module(outputs[1])


class Validates(Model):
    def val_dataloader(self) -> Any:
        return Loader(self.gpu, 2)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.gpu.host_work(3.0)


class ValidatesInside(Validates):
    """A model that also runs a validation inside a batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx % 10 == 7:
            trainer: Any = self.trainer
            connector = trainer._logger_connector
            is_first, trainer.validating = connector._first_loop_iter, True
            trainer.fit_loop.epoch_loop.val_loop.run()
            connector._first_loop_iter, trainer.training = is_first, True
        return super().training_step(batch, batch_idx)


RUNS: list[tuple[type[Model], dict[str, Any], list[pl.Callback]]] = [
    (Model, {}, []),
    (Model, {"max_epochs": 3}, [CallsModel()]),
    (Model, {"max_epochs": 3, "accumulate_grad_batches": 2}, []),
    (Validates, {"max_epochs": 2, "val_check_interval": 4}, [CallsModel()]),
    (Validates, {"check_val_every_n_epoch": None, "val_check_interval": 3, "max_epochs": 2}, []),
    (Accumulates, {"max_epochs": 2}, [CallsModel()]),
    (SkipsUpdates, {"max_epochs": 2}, []),
    (ValidatesInside, {"max_epochs": 2}, [CallsModel()]),
    (SkipsBatches, {"max_epochs": 2}, [CallsModel()]),
    (SkipsBatches, {"max_epochs": 2, "accumulate_grad_batches": 2}, []),
]


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize(("kind", "options", "callbacks"), RUNS)
def test_detaching_between_timed_steps_changes_no_result(
    kind: type[Model], options: Any, callbacks: list[pl.Callback], monkeypatch: pytest.MonkeyPatch
) -> None:
    def results() -> list[Any]:
        gpu = FakeGPU()
        timer = timer_of(gpu, every_n_steps=5)
        fit(gpu, kind(gpu), 43, timer=timer, callbacks=callbacks, **options)
        summary = timer.summary()
        assert summary.wall_clock is not None
        # Compare as text, because NaN does not equal NaN.
        return [[*map(str, timer.history())], str(summary), summary.wall_clock.entries_s]

    # Attached hooks change when steps are resolved, and thereby which long steps are timed. So time
    # no long steps.
    path = "lightning_gputime._measurement.untimed.UntimedSteps.next_long"
    monkeypatch.setattr(path, lambda self, first: math.inf)
    detached = results()
    monkeypatch.setattr("lightning_gputime._session.session.has_compiled", lambda: True)
    assert results() == detached
    assert len(detached[0]) > 1


HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
)


class HasHooks(GPUPhaseTimer):
    """A timer of a user, with own hooks."""

    _called = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self._called += 1
        super().on_train_batch_start(*args)

    def on_before_backward(self, *args: Any) -> None:
        self._called += 1
        super().on_before_backward(*args)


class Composite(pl.Callback):
    """A callback of a user that calls the hooks of others."""

    def __init__(self, child: pl.Callback) -> None:
        self.child = child

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.child.setup(trainer, pl_module, "fit")
        self.child.on_train_start(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.child.on_train_end(trainer, pl_module)
        self.child.teardown(trainer, pl_module, "fit")

    def __getattribute__(self, name: str) -> Any:
        return getattr(self.child, name) if name in HOOKS else super().__getattribute__(name)


@pytest.mark.parametrize("place", ["callback", "subclass", "composite", "old Lightning"])
def test_trainer_calls_no_hook_that_does_nothing(
    gpu: FakeGPU, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[list[str]]()

    class Watch(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            found.append([name for name in HOOKS if getattr(timer, name) is None])
            assert not any(name in vars(copy(timer)) for name in HOOKS)

    if place == "old Lightning":
        call = lightning.pytorch.trainer.call._call_callback_hooks

        def calls_all(trainer: Any, hook: str, *args: Any, **options: Any) -> None:
            assert all(getattr(each, hook) is not None for each in trainer.callbacks)
            call(trainer, hook, *args, **options)

        monkeypatch.setattr("lightning.pytorch.trainer.call._call_callback_hooks", calls_all)
    kind = HasHooks if place == "subclass" else GPUPhaseTimer
    timer: Any = kind(
        _clock=gpu, print_summary=False, warmup_steps=0, lines=False, every_n_steps=30
    )
    first = Composite(timer) if place == "composite" else timer
    trainer_of(first, Watch(), max_epochs=1).fit(Model(gpu), Loader(gpu, 70))
    assert len(timer.history()) == len(timed_indices(30, 70))
    idle = HOOKS[1:5]
    expected = {
        "callback": [[*idle], [*HOOKS[:5]]],  # While steps are timed, and while they are not.
        "subclass": [[name for name in idle if name != "on_before_backward"]],
    }
    assert sorted(map(list, {*map(tuple, found)}), key=len) == expected.get(place, [[]])
    assert not any(name in vars(timer) for name in HOOKS)
    if place == "subclass":
        assert timer._called == 2 * 70


# Timed steps cost less than 1 %


def train(
    gpu: FakeGPU,
    n: int,
    host_ms: float = 2.0,
    device_ms: float = 0.0,
    grow_ms: float = 0.0,
    **options: Any,
) -> GPUPhaseHooks:
    """Train `n` steps with given times, on the host growing by `grow_ms` in total."""
    loop = Loop(gpu, Layer(gpu, 0.0))
    loop.optimizer = Adder(loop.model.parameters(), gpu, 0.0)
    with hooks(loop, **options) as timer:
        for number, x in enumerate(timer.steps([torch.ones(1, 2)] * n)):
            gpu.work(device_ms, host_ms=host_ms + grow_ms * number / n)
            loop.model(x).sum().backward()
            loop.update()
    return timer


def test_default_sampling_costs_less_than_1_percent() -> None:
    long_run, short_run = CostlyGPU(20.0), CostlyGPU(20.0)
    timer = train(long_run, 4000)
    train(short_run, 2000)
    assert timer.history()["step"].tolist()[:100] == [*range(100)]
    share = timer.summary().measurement.timing_share
    assert share is not None
    assert 0.05 < share < 0.08  # Seven marks of 20 us in 2 ms.
    # Leave out the first steps: these are all timed, or the cost is measured in them.
    assert 0.001 < (long_run.now - short_run.now) / (2000 * 2.0 * MS) - 1 < 0.004
    text = str(timer.summary())
    assert ", then 1 of every " in text
    assert "log_every_n_steps" not in text
    assert "timing every step would add" in text


@pytest.mark.parametrize(
    ("n", "options", "over"),
    [
        (57, {"every_n_steps": 10}, "over 6 of 57 steps\n"),
        (57, {"every_n_steps": 10, "warmup_steps": 20}, "over 4 of 55 steps (2 warm-up"),
        (57, {"every_n_steps": 1}, "over 57 steps\n"),
        (100, {}, "over 100 steps\n"),
        # The cost of timing is measured in two windows before steps are sampled.
        (170, {}, "over 134 of 170 steps\n"),
        (400, {"host_ms": 60.0}, "over 400 steps\n"),
    ],
)
def test_title_shows_how_many_steps_were_timed(n: int, options: dict[str, Any], over: str) -> None:
    timer = train(CostlyGPU(20.0), n, **options)
    assert over in str(timer.summary())
    untimed = timer.summary().measurement.untimed_steps
    assert (untimed > 0) == (" of " in over)
    assert untimed == n - len(timer.history())


@pytest.mark.parametrize(("logger", "every"), [(None, 500), (Logger(), 500)])
def test_log_intervals_that_cannot_pay_for_a_timing_window_have_none(
    logger: Logger | None, every: int
) -> None:
    summary = train(CostlyGPU(40.0), 1000, host_ms=0.2, logger=logger).summary()
    # Timing every step would add 140 %, and may add 0.4 %.
    assert summary.timed_every_n_steps == every
    # Counting takes 8 us per step, and the timed step in 500 costs twice 0.4 ms.
    assert f"then 1 of every {every}, which adds 4.6 % to the training" in str(summary)
    assert "timing every step would add 140 %" in str(summary)
    if logger is not None:
        estimated = {step: row["phase_time/estimated"] for step, row in logger.calls}
        # All steps of the first logs are timed, then those of a single step in 500.
        assert [estimated[step] for step in (49, 99)] == [0, 0]
        rows = [row for step, row in logger.calls if estimated[step]]
        assert len(rows) == 16
        for row in rows:
            phases_ms = [row[key] for key in row if re.search("(?<!step|wait)_ms$", key)]
            assert sum(phases_ms) == pytest.approx(row["phase_time/step_ms"])


@pytest.mark.parametrize("kind", ["plain", "pauses", "lines"])
def test_each_logged_row_has_the_exact_time_of_its_steps(loop: Loop, kind: str) -> None:
    logger, took_ms = Logger(), list[float]()
    options: dict[str, Any] = {"every_n_steps": 200, "logger": logger, "lines": kind == "lines"}
    with hooks(loop, log_every_n_steps=8, **options) as timer:
        for number, x in enumerate(timer.steps(loop.batches(1000))):
            since_ns = loop.gpu.now
            # Some steps are long, and steps become longer.
            loop.gpu.host_work(40.0 + 0.02 * number + 100.0 * (number % 37 == 5))
            loop.train(x)
            loop.gpu.now = max(loop.gpu.now, loop.gpu.free_at)
            took_ms.append((loop.gpu.now - since_ns) / MS)
            if kind == "pauses" and number % 90 == 50:
                with timer.paused():
                    loop.gpu.host_work(1000.0)
    assert bool(timer.summary().measurement.examined_steps) == (kind == "lines")
    rows = [(step, row) for step, row in logger.calls if row["phase_time/estimated"]]
    assert len(rows) > 90
    for step, row in rows:
        steps_ms = took_ms[step - 7 : step + 1]
        # Examined steps are not in the mean, unless they were expected to be long.
        rel = 0.001 if kind == "lines" else 1e-6
        if kind != "lines" or max(steps_ms) < 100.0:
            assert row["phase_time/step_ms"] == pytest.approx(sum(steps_ms) / 8, rel=rel), step
        if max(steps_ms) >= 100.0:
            continue  # The phases of a long step that was not timed are unknown.
        phases_ms = [row[key] for key in row if re.search("/(?!step|host_wait)[a-z]+_ms$", key)]
        assert sum(phases_ms) == pytest.approx(row["phase_time/step_ms"])
    # Rows that are not settled at once do not change the summary.
    mean_ms = timer.summary().measurement.step.mean_ms
    assert mean_ms == pytest.approx(sum(took_ms) / 1000, rel=0.01)


@pytest.mark.parametrize(
    ("consumer", "options"),
    [
        ("observers=", {"observers": [lambda times: None]}),
        ("lag=0", {"_lag": 0}),
        ("annotate=True", {"annotate": True}),
        ("a log at each step", {"log_every_n_steps": 1, "logger": Logger()}),
    ],
)
def test_consumer_of_each_step_times_all_with_a_note(
    consumer: str, options: dict[str, Any]
) -> None:
    timer = train(CostlyGPU(20.0), 400, **options)
    assert len(timer.history()) == 400
    note = f"every step is timed because of {consumer}, which takes the CPU about 0.14 ms of 2.14"
    assert note in str(timer.summary())
    # No note if the host waits for the GPU, if steps are long, or if `every_n_steps` is given.
    without_note = ({"host_ms": 1.0, "device_ms": 4.0}, {"host_ms": 60.0}, {"every_n_steps": 1})
    for changes in without_note:
        timer = train(CostlyGPU(20.0), 100, **(options | changes))
        assert "every step is timed because" not in str(timer.summary())


def test_gpu_bound_loop_times_all_steps() -> None:
    timer = train(CostlyGPU(20.0), 600, host_ms=1.0, device_ms=4.0)
    assert timer.history()["step"].tolist() == [*range(600)]
    assert timer.summary().timed_every_n_steps == 1


def test_cheap_timing_returns_to_timing_all_steps() -> None:
    timed = train(FakeGPU(), 1000, host_ms=4.0).history()["step"].tolist()
    assert timed[:100] == [*range(100)]
    assert len(timed) >= 800  # The rest are in short trials.


@pytest.mark.slow
def test_real_ranks_time_the_same_steps(tmp_path: Path) -> None:
    script = Path(__file__).parent / "untimed_run.py"
    printed = finish(*(start(script, rank, tmp_path / "store") for rank in range(2)))
    (interval, timed), second = map(json.loads, printed)
    assert second == [interval, timed]
    assert interval > 2
    # The ranks have examined the same steps, which are left out with the step after each.
    examined = [12, 15, 18, 29, 47, 76]
    left_out = {*examined, *(step + 1 for step in examined)}
    assert timed[:88] == [step for step in range(100) if step not in left_out]


# Batches of a loop whose untimed steps are unusual: all batches from number 30 on.


def calls_step(loop: Loop, timer: GPUPhaseHooks, x: Tensor, number: int) -> None:
    loop.train(x)
    if number % 7 == 3:
        timer.step()
        loop.train(x)
        timer.step()


def leaves_evaluation(loop: Loop, timer: GPUPhaseHooks, x: Tensor, number: int) -> None:
    loop.train(x)
    if number % 7 == 3:
        loop.model.eval()
        with torch.no_grad():
            evaluation = iter(timer.steps(loop.batches(3)))
            loop.model(next(evaluation))
            vars(loop).setdefault("kept", []).append(evaluation)  # It is never closed.
        loop.model.train()


def runs_inner_loop(loop: Loop, timer: GPUPhaseHooks, x: Tensor, number: int) -> None:
    loop.train(x)
    if number % 7 == 3:
        loop.train_all(timer.steps(loop.batches(2 * (number % 2 == 0))))


def accumulates(loop: Loop, timer: GPUPhaseHooks, x: Tensor, number: int) -> None:
    loop.optimizer.gradient_state.sync_gradients = number % 2 == 1
    loop.micro_batch(x)
    if number % 2:
        loop.update()


@pytest.mark.parametrize(
    "body", [calls_step, leaves_evaluation, runs_inner_loop, accumulates], ids=lambda f: f.__name__
)
def test_unusual_batches_count_in_untimed_steps_as_in_timed_steps(body: Any) -> None:
    found = []
    for every in (1, 100):
        loop = Loop(FakeGPU())
        if body is accumulates:  # As accelerate's optimizers have it.
            loop.optimizer.gradient_state = SimpleNamespace(num_steps=2, sync_gradients=True)
        with hooks(loop, every_n_steps=every) as timer:
            for number, x in enumerate(timer.steps(loop.batches(200))):
                if number >= 30 or body is accumulates:  # The first steps show what loops do.
                    body(loop, timer, x, number)
                else:
                    loop.train(x)
                loop.gpu.now = max(loop.gpu.now, loop.gpu.free_at)  # The loop waits.
        summary = timer.summary()
        wall_clock = summary.measurement.wall_clock
        assert wall_clock is not None
        found.append((summary.steps + summary.measurement.untimed_steps, wall_clock.entries_s))
    assert summary.measurement.untimed_steps > 50
    assert found[0] == found[1]


def test_without_a_logger_means_are_published_at_the_end_of_epochs(gpu: FakeGPU) -> None:
    class Watches(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            value: Any = trainer.callback_metrics.get("phase_time/step_ms")
            seen.setdefault(trainer.current_epoch, set()).add(
                value if value is None else float(value)
            )
            gpu.host_work(0.1 * trainer.global_step)  # Each step is longer than the last.

    seen: dict[int, set[float | None]] = {}
    timer = timer_of(gpu, every_n_steps=10)
    trainer_of(timer, Watches(), max_epochs=3).fit(Model(gpu), Loader(gpu, 170))
    assert seen[0] == {None}
    assert [len(seen[epoch]) for epoch in (1, 2)] == [1, 1]
    assert None not in seen[1] | seen[2]
