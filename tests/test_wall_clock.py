"""The wall clock of a training, the time outside its steps, and the file that it saves."""

import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import Adder, FakeGPU, Layer
from fake_lightning import Loader, MemoryLogger, Model, SavingTrainer, fit, timer_of, trainer
from torch import Tensor

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, load
from lightning_gputime._timer import Timer


def entries_ms(timer: Timer) -> dict[str, float]:
    """Return the entries of the wall clock, in milliseconds."""
    wall_clock = timer.summary().wall_clock
    assert wall_clock is not None
    return {name: round(1e3 * s, 6) for name, s in wall_clock.entries_s.items()}


class HostWork(pl.Callback):
    """Keeps the host busy in hooks of a trainer, for the given milliseconds."""

    def __init__(self, gpu: FakeGPU, **ms: float) -> None:
        for hook, time in ms.items():
            setattr(self, hook, lambda *_, _ms=time, **__: gpu.host_work(_ms))


class HostModel(Model):
    """A model whose step takes the host 100 ms, and the first step 500 ms."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.gpu.host_work(500.0 if self.trainer.global_step == 0 else 100.0)
        return self.loss(batch)


def fit_with_host_work(gpu: FakeGPU, **options: Any) -> GPUPhaseTimer:
    """Fit two epochs of three steps, with a validation in each and host work in all hooks."""
    timer = timer_of(gpu, **options)
    work = HostWork(
        gpu,
        on_fit_start=7.0,
        on_sanity_check_start=3.0,
        on_validation_batch_end=5.0,
        on_train_epoch_start=2.0,
        on_train_epoch_end=11.0,
        on_train_end=13.0,
    )
    saves = pl.callbacks.LambdaCallback(
        on_validation_end=lambda trainer, _: (
            trainer.sanity_checking or trainer.save_checkpoint("none")
        )
    )
    SavingTrainer.gpu = gpu
    trainer(timer, work, saves, kind=SavingTrainer, max_epochs=2, num_sanity_val_steps=1).fit(
        HostModel(gpu), Loader(gpu, 3), Loader(gpu, 2)
    )
    return timer


def test_wall_clock_entries_cover_the_fit(gpu: FakeGPU) -> None:
    found = entries_ms(fit_with_host_work(gpu))
    # In a step the host also waits for the device. All other entries have only the host work.
    assert found.pop("first step") == pytest.approx(500, abs=20)
    assert found.pop("steps") == pytest.approx(500, abs=80)
    assert found == {
        "set-up": 7,
        "sanity check": 8,
        "validation": 20,
        "checkpoints": 80,
        "epoch ends": 26,
        "tear-down": 13,
    }


# Plain loops


class HostLoop:
    """A plain loop: a fetch takes the host 1 ms, a step 5 ms, and the first step 50 ms."""

    def __init__(self, **options: Any) -> None:
        self.gpu = FakeGPU()
        self.net = Layer(self.gpu, 0.0)
        self.optimizer = Adder(self.net.parameters(), self.gpu, 0.0)
        options |= {"_clock": self.gpu, "warmup_steps": 0}
        self.timer = GPUPhaseHooks(self.net, self.optimizer, **options)
        self.next_step_ms = 50.0

    def batches(self, n: int = 4) -> Iterator[Tensor]:
        for _ in range(n):
            self.gpu.host_work(1.0)
            yield torch.ones(1, 2)

    def step(self, x: Tensor) -> None:
        self.gpu.host_work(self.next_step_ms)
        self.next_step_ms = 5.0
        self.net(x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, n: int = 4) -> None:
        for x in self.timer.steps(self.batches(n)):
            self.step(x)

    def train_calling_step(self, n: int) -> None:
        for x in self.batches(n):
            self.step(x)
            self.timer.step()


def train_between_host_work(loop: HostLoop) -> None:
    for _ in range(3):
        loop.train()
        loop.gpu.host_work(20.0)


def leave_loops_early(loop: HostLoop) -> None:
    for _ in range(3):
        for i, x in enumerate(loop.timer.steps(loop.batches(99))):
            loop.step(x)
            if i == 3:
                break
        loop.gpu.host_work(20.0)


def pause_in_a_loop(loop: HostLoop) -> None:
    for i, x in enumerate(loop.timer.steps(loop.batches(12))):
        loop.step(x)
        if i % 4 == 3:
            with loop.timer.paused(), loop.timer.paused():
                loop.gpu.host_work(20.0)


def pause_around_a_loop(loop: HostLoop) -> None:
    for _ in range(2):
        loop.train(6)
        with loop.timer.paused():
            loop.gpu.host_work(12.0)
            for _ in loop.timer.steps(range(4)):
                loop.gpu.host_work(7.0)


def evaluate_in_a_loop(loop: HostLoop) -> None:
    for i, x in enumerate(loop.timer.steps(loop.batches(12))):
        loop.step(x)
        if i in (4, 8):
            loop.net.eval()
            with torch.no_grad():
                for y in loop.timer.steps(loop.batches(2)):
                    loop.gpu.host_work(19.0)
                    loop.net(y)
            loop.net.train()


def train_once(loop: HostLoop) -> None:
    loop.gpu.host_work(30.0)
    loop.train(12)
    loop.gpu.host_work(30.0)


def train_calling_step(loop: HostLoop) -> None:
    loop.gpu.host_work(30.0)  # Part of the first step, whose start is unknown.
    loop.train_calling_step(12)
    loop.gpu.host_work(40.0)


@pytest.mark.parametrize(
    ("run_loops", "first_step_ms", "outside"),
    [
        (train_between_host_work, 51.0, {"between loops": 60.0}),
        (leave_loops_early, 51.0, {"between loops": 60.0}),
        (pause_in_a_loop, 51.0, {"paused": 60.0}),
        (pause_around_a_loop, 51.0, {"paused": 80.0}),
        (evaluate_in_a_loop, 51.0, {"evaluation": 80.0}),
        (train_once, 51.0, {"set-up": 30.0, "tear-down": 30.0}),
        (train_calling_step, 81.0, {"tear-down": 40.0}),
    ],
)
def test_wall_clock_of_plain_loops_covers_all_time_from_attach_to_remove(
    run_loops: Callable[[HostLoop], None], first_step_ms: float, outside: dict[str, float]
) -> None:
    loop = HostLoop()
    begin = loop.gpu.now
    with loop.timer:
        run_loops(loop)
    entries = {"first step": first_step_ms, "steps": 66.0, **outside}
    assert entries_ms(loop.timer) == entries
    wall_ms = sum(entries.values())
    assert wall_ms == (loop.gpu.now - begin) / 1e6
    breakdown = loop.timer.summary().time_breakdown
    assert breakdown is not None
    assert {name: round(1e3 * breakdown[name].seconds, 6) for name in outside} == outside
    assert breakdown.wall_s == pytest.approx(wall_ms / 1e3)
    assert breakdown.scope == "training"


@pytest.mark.parametrize("every_n_steps", [1, 2, "auto"])
def test_wall_clock_of_a_loop_that_calls_step_counts_each_step(every_n_steps: Any) -> None:
    loop = HostLoop(every_n_steps=every_n_steps)
    with loop.timer:
        loop.train_calling_step(20)
    assert entries_ms(loop.timer) == {"first step": 51.0, "steps": 114.0}
    # The last step counts without its call of `step()`.
    loop = HostLoop(every_n_steps=every_n_steps, accumulate_grad_batches=2)
    with loop.timer:
        for micro_batch in range(20):
            loop.gpu.host_work(5.0)
            loop.net(torch.ones(1, 2)).sum().backward()
            if micro_batch % 2:
                loop.optimizer.step()
            if micro_batch < 19:
                loop.timer.step()
    assert entries_ms(loop.timer) == {"first step": 10.0, "steps": 90.0}


@pytest.mark.parametrize("every_n_steps", [1, 20, "auto"])
@pytest.mark.parametrize(
    # With `step()`, the fetch and the work before the model call count as evaluation.
    ("calls_step", "evaluation_ms", "step_ms"),
    [(False, 80.0, 6.0), (True, 86.0, 5.4)],
)
def test_evaluations_in_untimed_steps_are_not_part_of_the_steps(
    every_n_steps: Any, calls_step: bool, evaluation_ms: float, step_ms: float
) -> None:
    loop = HostLoop(every_n_steps=every_n_steps)
    with loop.timer:
        batches = loop.batches(500)
        for i, x in enumerate(batches if calls_step else loop.timer.steps(batches)):
            loop.step(x)
            if calls_step:
                loop.timer.step()
            if i % 10 == 8:
                loop.net.eval()
                with torch.no_grad():
                    for _ in range(4):
                        loop.net(torch.ones(1, 2))
                        loop.gpu.host_work(20.0)
                loop.net.train()
    summary = loop.timer.summary()
    assert entries_ms(loop.timer)["evaluation"] == pytest.approx(50 * evaluation_ms)
    assert summary.step.p50_ms == pytest.approx(6.0, rel=0.01)
    assert summary.step.mean_ms == pytest.approx(step_ms + 45 / 500, rel=0.01)
    assert summary.time_breakdown is not None
    assert summary.time_breakdown["not sampled"].share < 0.01  # At most the first step.
    assert (summary.diagnosis.entry, summary.code) == ("evaluation", "overhead-bound")
    assert summary.slowdown is None


def test_evaluations_in_untimed_steps_are_found_without_an_optimizer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL", "lightning_gputime")  # Hides the warning about the optimizer.
    gpu = FakeGPU()
    net = Layer(gpu, 0.0)
    with GPUPhaseHooks(net, _clock=gpu, warmup_steps=0, every_n_steps=20) as timer:
        for number in range(500):
            gpu.host_work(6.0)
            net(torch.ones(1, 2)).sum().backward()
            timer.step()
            if number % 10 == 8:
                net.eval()
                with torch.no_grad():
                    net(torch.ones(1, 2))
                gpu.host_work(80.0)
                net.train()
    # The work before the next model call counts as evaluation. The first is found later.
    assert entries_ms(timer)["evaluation"] == pytest.approx(50 * 86.0, abs=100.0)
    assert timer.summary().step.mean_ms == pytest.approx(5.4, rel=0.1)


def test_summary_taken_earlier_keeps_its_wall_clock() -> None:
    loop = HostLoop()
    with loop.timer:
        train_between_host_work(loop)
    loop.train()  # Untimed.
    with loop.timer:
        loop.next_step_ms = 50.0
        train_between_host_work(loop)
        earlier = pickle.loads(pickle.dumps(loop.timer.summary()))
        loop.gpu.host_work(1000.0)
        assert loop.timer.summary().wall_clock != earlier.wall_clock
    assert entries_ms(loop.timer)["between loops"] == 1060.0
    assert earlier.wall_clock.entries_s["between loops"] == pytest.approx(0.06)


# Logs


def test_wall_clock_is_logged_once(gpu: FakeGPU) -> None:
    logger = MemoryLogger()
    timer = timer_of(gpu, log=["fit"])
    fit(gpu, HostModel(gpu), 3, timer=timer, logger=logger)
    wall_clock = timer.summary().wall_clock
    assert wall_clock is not None
    [(step, logged)] = [call for call in logger.calls if "phase_time/fit/wall_s" in call[1]]
    assert step == 2
    assert logged["phase_time/fit/wall_s"] == wall_clock.wall_s
    first_step_s = wall_clock.entries_s["first step"]
    assert logged["phase_time/fit/first_step_share"] == first_step_s / wall_clock.wall_s > 0


# The file that a fit leaves


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run.json.gz"


def test_fit_is_saved_when_it_ends(gpu: FakeGPU, path: Path) -> None:
    timer = fit_with_host_work(gpu, save_path=path)
    run = load(path)
    assert run.summary() == timer.summary()
    assert run.summary().wall_clock == timer.summary().wall_clock
    evaluated = [(evaluation["stage"], evaluation["step"]) for evaluation in run.evaluations]
    assert evaluated == [("val", 2), ("val", 5)]
    assert run.evaluations[0]["forward_ms"] == timer.summary().rows["forward"].mean_ms
    assert run.environment.precision == "32-true"
    assert run.environment.accumulate_grad_batches == 1


class Fails(Model):
    """A model whose fifth step raises."""

    def __init__(self, gpu: FakeGPU, error: BaseException) -> None:
        super().__init__(gpu)
        self.error = error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 4:
            raise self.error
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("is_open", [True, False])
def test_failed_run_saves_its_steps_even_if_stdout_is_closed(
    gpu: FakeGPU,
    error: BaseException,
    is_open: bool,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not is_open:
        closed = io.StringIO()
        monkeypatch.setattr(closed, "write", Mock(side_effect=BrokenPipeError))
        monkeypatch.setattr("lightning_gputime._output.table.sys.stdout", closed)
    timer = GPUPhaseTimer(_clock=gpu, save_path=path, warmup_steps=0, _lag=0)
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        fit(gpu, Fails(gpu, error), 9, timer=timer)
    monkeypatch.undo()
    assert load(path).history["step"].tolist() == [0, 1, 2, 3]
    assert load(path).summary().wall_clock is not None
    message = "The table could not be shown: BrokenPipeError()"
    assert (message in caplog.text) is not is_open


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start"])
def test_fit_without_steps_keeps_the_old_file(gpu: FakeGPU, hook: str, path: Path) -> None:
    fit(gpu, Model(gpu), 3, timer=timer_of(gpu, save_path=path))
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise RuntimeError(f"in {hook}")

    callback = pl.callbacks.LambdaCallback(**{hook: fail})
    with pytest.raises(RuntimeError, match=f"in {hook}"):
        fit(gpu, Model(gpu), 3, timer=timer_of(gpu, save_path=path), callbacks=[callback])
    assert path.read_bytes() == before


def test_save_path_is_relative_to_the_start_folder(
    gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    callback = pl.callbacks.LambdaCallback(on_train_start=lambda *_: os.chdir(other))
    for save_path in ("run.json.gz", "~/home.json.gz"):
        monkeypatch.chdir(tmp_path)
        fit(gpu, Model(gpu), 2, timer=timer_of(gpu, save_path=save_path), callbacks=[callback])
    assert list(other.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"other", "run.json.gz", "home.json.gz"}


def test_epochs_without_saving_read_no_clock(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests of users may replace the clock with a list of times.
    clock = Mock(return_value=0.0)
    monkeypatch.setattr("time.perf_counter", clock)
    fit(gpu, Model(gpu), 1, max_epochs=2)
    clock.assert_not_called()
