"""Untimed steps: hooks are removed, and the estimates are those of a timer that times each step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import Adder, FakeEvent, FakeGPU, Layer
from fake_lightning import Loader, Model, fit
from fake_loop import Logger, Loop, hooks, timed_indices
from processes import finish, start
from torch import Tensor

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

EVERY, N = 5, 43
AUTOGRAD: Any = torch.autograd
ENGINE = AUTOGRAD._engine_run_backward
HAS_COMPILED = "lightning_gputime._session.hooks_off.has_compiled"


def installed(loop: Loop) -> list[bool]:
    """Return whether the model, torch and the optimizer are hooked or patched."""
    return [
        bool(loop.model._forward_hooks or loop.model._forward_pre_hooks),
        AUTOGRAD._engine_run_backward is not ENGINE,
        "zero_grad" in vars(loop.optimizer),
    ]


def test_between_timed_steps_nothing_is_installed(loop: Loop) -> None:
    on = []
    with hooks(loop, every_n_steps=10) as timer:
        for step, x in enumerate(timer.steps(loop.batches(60))):
            if any(is_on := installed(loop)):
                assert all(is_on)
                on.append(step)
            loop.train(x)
    # At first, while it is found out what the loop calls; then the timed steps, and one before
    # each, which tells an evaluation from a part of every step.
    timed = timed_indices(10, 60)
    late = {index - back for index in timed for back in (0, 1) if index - back >= 20}
    assert on == [*range(20), *sorted(late)]
    assert timer.history()["step"].tolist() == timed
    assert {*timer.history()["backward_ms"].tolist()} == {8.0}


def test_detached_timer_is_woken_when_another_attaches(loop: Loop) -> None:
    other = Loop(loop.gpu)
    on = []
    with hooks(loop, every_n_steps=30) as timer:
        second = hooks(other)
        for step, x in enumerate(timer.steps(loop.batches(40))):
            if step == 35:
                second.attach()
            if all(installed(loop)):
                on.append(step)
            loop.train(x)
        second.remove()
    timed = timed_indices(30, 40)
    late = {index - back for index in timed for back in (0, 1)}
    assert on == sorted({*range(20), *late, *range(36, 40)})
    assert timer.history()["step"].tolist() == timed


# Loops of Lightning


class Accumulates(Model):
    """Updates by hand, after every second batch."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Skips(Model):
    """Leaves every seventh update out."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if args[1] % 7:
            super().optimizer_step(*args, **kwargs)
        else:
            args[-1]()


class Samples(pl.Callback):
    """Calls the model between the batches."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        if batch is not None:
            pl_module(batch)


class Validates(Model):
    """Also validates, for a while."""

    def val_dataloader(self) -> Any:
        return Loader(self.gpu, 2)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.gpu.host_work(3.0)


class Gaps(Model):
    """Makes each eighth batch None, on which Lightning does not train."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)
        self.fetched = 0

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor | None:
        self.fetched += 1
        return batch if self.fetched % 8 else None


class ValidatesInside(Validates):
    """Also runs a validation by itself, inside of a batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx % 10 == 7:
            validate(self.trainer)
        return super().training_step(batch, batch_idx)


def validate(trainer: Any) -> None:
    connector = trainer._logger_connector
    is_first, trainer.validating = connector._first_loop_iter, True
    trainer.fit_loop.epoch_loop.val_loop.run()
    connector._first_loop_iter, trainer.training = is_first, True


OPTIONS: list[tuple[type[Model], dict[str, Any], type[pl.Callback] | None]] = [
    (Model, {}, None),
    (Model, {"max_epochs": 3}, Samples),
    (Model, {"max_epochs": 3, "accumulate_grad_batches": 2}, None),
    (Validates, {"max_epochs": 2, "val_check_interval": 4}, Samples),
    (
        Validates,
        {"check_val_every_n_epoch": None, "val_check_interval": 3, "max_epochs": 2},
        None,
    ),
    (Accumulates, {"max_epochs": 2}, Samples),
    (Skips, {"max_epochs": 2}, None),
    (Gaps, {"max_epochs": 2}, Samples),
    (Gaps, {"max_epochs": 2, "accumulate_grad_batches": 2}, None),
    (ValidatesInside, {"max_epochs": 2}, Samples),
]


def found(
    gpu: FakeGPU, model: type[Model], callback: Callable[[], pl.Callback] | None, **how: Any
) -> Any:
    """Trains, and returns all that the timer knows."""
    options: dict[str, Any] = {"warmup_steps": 0, "every_n_steps": EVERY}
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, **options)
    fit(gpu, model(gpu), N, timer=timer, callbacks=[callback()] if callback else [], **how)
    summary = timer.summary()
    assert summary.wall_clock is not None
    # As text, in which NaN equals NaN.
    return [*map(str, timer.history())], str(summary), summary.wall_clock.entries_s


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize(("model", "how", "callback"), OPTIONS)
def test_detaching_between_timed_steps_changes_no_result(
    model: type[Model],
    how: dict[str, Any],
    callback: Callable[[], pl.Callback] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Both read steps at other times, and would look for causes in different long steps.
    path = "lightning_gputime._measurement.untimed.UntimedSteps.next_long"
    monkeypatch.setattr(path, lambda self: None)
    off = found(FakeGPU(), model, callback, **how)
    monkeypatch.setattr(HAS_COMPILED, lambda: True)
    assert off == found(FakeGPU(), model, callback, **how)
    assert len(off[0]) > 1


# The number of timed steps that costs less than 1 %


class DearGPU(FakeGPU):
    """A fake GPU whose events cost the host a known time to record."""

    def __init__(self, record_us: float) -> None:
        super().__init__()
        self.record_ns = round(record_us * 1000)

    def event(self) -> FakeEvent:
        self.created += 1
        return DearEvent(self)


class DearEvent(FakeEvent):
    def record(self) -> None:
        assert isinstance(self._gpu, DearGPU)
        self._gpu.now += self._gpu.record_ns
        super().record()


def train(
    gpu: FakeGPU, n: int, *, host_ms: float = 2.0, device_ms: float = 0.0, **options: Any
) -> GPUPhaseHooks:
    """Trains a loop whose steps take the host and the device known times."""
    model = Layer(gpu, 0.0)
    optimizer = Adder(model.parameters(), gpu, 0.0)
    options.setdefault("warmup_steps", 0)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, **options) as timer:
        for x in timer.steps([torch.ones(1, 2)] * n):
            gpu.work(device_ms, host_ms=host_ms)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return timer


def numbers(timer: GPUPhaseHooks) -> list[int]:
    return [int(step) for step in timer.history()["step"]]


def test_default_sampling_costs_less_than_1_percent() -> None:
    gpu, bare = DearGPU(20.0), DearGPU(0.0)
    timer = train(gpu, 2000)
    train(bare, 2000)
    timed = numbers(timer)
    assert timed[:100] == [*range(100)]
    share = timer.summary().timing_share
    assert share is not None
    assert 0.05 < share < 0.08  # seven marks of 20 us in 2 ms
    # Without the first steps, which are all timed, and those in which it was measured.
    first = [gpu.now, bare.now]
    longer = train(longer_gpu := DearGPU(20.0), 4000)
    train(bare_longer := DearGPU(0.0), 4000)
    with_timer, without = longer_gpu.now - first[0], bare_longer.now - first[1]
    assert 0.002 < with_timer / without - 1 < 0.01
    said = str(longer.summary())
    assert ", then 1 of every " in said
    assert "log_every_n_steps" not in said
    assert "timing every step would add" in str(longer.summary())


@pytest.mark.parametrize(
    ("n", "options", "over"),
    [
        (57, {"every_n_steps": 10}, "over 6 of 57 steps\n"),
        (57, {"every_n_steps": 10, "warmup_steps": 20}, "over 4 of 55 steps (2 warm-up"),
        (57, {"every_n_steps": 1}, "over 57 steps\n"),
        (100, {}, "over 100 steps\n"),
        # It tries on two windows what timing costs, before it can say so.
        (170, {}, "over 134 of 170 steps\n"),
        (400, {"host_ms": 60.0}, "over 400 steps\n"),
    ],
)
def test_title_says_how_many_of_all_steps_were_timed(
    n: int, options: dict[str, Any], over: str
) -> None:
    timer = train(DearGPU(20.0), n, **options)
    assert over in str(timer.summary())
    untimed = timer.summary().untimed_steps
    assert (untimed > 0) == (" of " in over)
    assert untimed == n - len(timer.history())


def test_too_expensive_timing_is_reported() -> None:
    timer = train(DearGPU(40.0), 1000, host_ms=0.2)
    assert timer.summary().timed_every_n_steps == 50
    said = "to a step of 0.248 ms; increase log_every_n_steps to time fewer"
    assert said in str(timer.summary())


@pytest.mark.parametrize("window", [10, 50, 400])
def test_each_window_between_two_logs_has_a_block(window: int) -> None:
    logger = Logger()
    timer = train(DearGPU(20.0), 2000, logger=logger, log_every_n_steps=window)
    assert [step for step, _ in logger.calls] == [*range(window - 1, 2000, window)]
    assert len(timer.history()) < 1000 if window > 10 else True


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("observers=", {"observers": [lambda times: None]}),
        ("lag=0", {"_lag": 0}),
        ("annotate=True", {"annotate": True}),
        ("a log at each step", {"log_every_n_steps": 1}),
    ],
)
def test_consumer_of_each_step_times_all_steps_with_a_note(
    reason: str, options: dict[str, Any]
) -> None:
    timer = train(DearGPU(20.0), 400, **options)
    assert len(timer.history()) == 400
    said = f"every step is timed because of {reason}, which takes the CPU about 0.14 ms of 2.14 ms"
    assert said in str(timer.summary())
    # Nothing is lost where the host waits for the GPU, in long steps, and where a number is given.
    others = ({"host_ms": 1.0, "device_ms": 4.0}, {"host_ms": 60.0}, {"every_n_steps": 1})
    for other in others:
        hidden = train(DearGPU(20.0), 100, **(options | other))
        assert "each step is timed" not in str(hidden.summary())


def test_gpu_bound_loop_times_all_steps() -> None:
    timer = train(DearGPU(20.0), 600, host_ms=1.0, device_ms=4.0)
    assert numbers(timer) == [*range(600)]
    assert timer.summary().timed_every_n_steps == 1


def test_cheap_timing_times_all_steps_again() -> None:
    timed = numbers(train(FakeGPU(), 1000, host_ms=4.0))
    assert timed[:100] == [*range(100)]
    assert timed[-300:] == [*range(700, 1000)]


@pytest.mark.slow
def test_real_ranks_time_the_same_steps(tmp_path: Path) -> None:
    script = Path(__file__).parent / "untimed_run.py"
    printed = finish(*(start(script, rank, tmp_path / "store") for rank in range(2)))
    mine, other = map(json.loads, printed)
    assert mine == other
    assert mine[1][:100] == [*range(100)]
    assert mine[0] > 2


@pytest.mark.parametrize("last_ms", [0.0, 6.0])
def test_sampled_mean_is_that_of_all_steps(last_ms: float) -> None:
    gpu, n = DearGPU(20.0), 1500
    model = Layer(gpu, 0.0)
    optimizer = Adder(model.parameters(), gpu, 0.0)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0) as timer:
        for i, x in enumerate(timer.steps([torch.ones(1, 2)] * n)):
            gpu.work(0.0, host_ms=2.0 + last_ms * i / n)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    summary = timer.summary()
    assert summary.step.mean_ms == pytest.approx(2.0 + last_ms / 2, rel=0.02)
