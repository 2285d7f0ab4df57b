"""Bounds on the events of steps that never end, and on what unused timers keep."""

import gc
import os

import pytest
import torch
from conftest import hooks_of
from fake_gpu import STEP_MS, Adder, FakeEvent, FakeGPU, steps
from fake_loop import Loop, hooks

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._record import recorder

IN_STEP_LOOP = {**STEP_MS, "data": 1.125, "other": 0.0}  # Without `steps()`.
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def train(loop: Loop, timer: GPUPhaseHooks, n: int) -> None:
    for x in timer.steps(loop.batches(n)):
        loop.train(x)


def train_calling_step(loop: Loop, timer: GPUPhaseHooks, n: int) -> None:
    for x in loop.batches(n):
        loop.train(x)
        timer.step()


DROPPED = "A step with more than 500 boundaries between phases is dropped: it is in no result."


@pytest.fixture
def max_marks_500(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_MARKS", 500)


@pytest.mark.usefixtures("max_marks_500")
@pytest.mark.parametrize("lag", [0, 1, 4])
def test_loop_that_never_ends_a_step_bounds_its_events_and_warns(
    loop: Loop, lag: int, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop, _lag=lag) as timer:
        for number, x in enumerate(loop.batches(1000)):
            loop.train(x)
            if number < 10:
                timer.step()
        # The ten steps that ended may still hold their seven events each.
        assert 500 <= loop.gpu.created <= 500 + 10 * 7
        [message] = caplog.messages
        assert message.startswith(DROPPED)
        assert "call step()" in message
        timer.step()
        train_calling_step(loop, timer, 10)
    assert steps(timer) == [IN_STEP_LOOP] * 20
    assert len(caplog.records) == 1


def test_unreferenced_timer_is_detached(loop: Loop) -> None:
    bare = hooks_of(loop.model)
    timer = hooks(loop).attach()
    timer = hooks(loop).attach()  # Like a notebook cell that is run again.
    train_calling_step(loop, timer, 1000)
    assert loop.gpu.created < 200
    timer.remove()
    assert steps(timer) == [IN_STEP_LOOP] * 1000
    hooks(loop).attach().remove()
    assert hooks_of(loop.model) == bare


def test_timer_referenced_only_by_a_reference_cycle_is_detached(loop: Loop) -> None:
    bare = hooks_of(loop.model)
    cycle: list[object] = [hooks(loop).attach()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    hooks(loop).attach().remove()
    assert hooks_of(loop.model) == bare


def test_timer_can_be_deleted_after_the_globals_of_its_module(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = hooks(loop)
    with monkeypatch.context() as finalizing:
        finalizing.setattr("lightning_gputime._timer.sys", None)
        timer.__del__()


@needs_fork
def test_forked_process_destroys_no_event(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a DataLoader worker, torch would abort with "CUDA error: initialization error".
    destroyed: list[int] = []
    monkeypatch.setattr(FakeEvent, "__del__", lambda _: destroyed.append(1), raising=False)
    loop = Loop(gpu)
    timer = hooks(loop).attach()
    train(loop, timer, 3)
    child = os.fork()
    if not child:
        del timer, loop
        gc.collect()
        os._exit(1 if destroyed else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    timer.remove()
    del timer, loop
    gc.collect()
    assert destroyed


@needs_fork
def test_forked_process_records_no_events_and_keeps_training(loop: Loop) -> None:
    gpu = loop.gpu
    with hooks(loop) as timer:
        train(loop, timer, 3)
        created, waits = gpu.created, len(gpu.waits)
        child = os.fork()
        if not child:
            is_right = False
            try:
                train(loop, timer, 100)
                train_calling_step(loop, timer, 100)
                timer.flush()
                timer.summary()
                timer.remove()
                # Another timer can be attached in the forked process.
                with hooks(loop) as second:
                    train(loop, second, 2)
                # Only the second timer records events, and waits once per step.
                is_right = gpu.created < created + 30 and len(gpu.waits) == waits + 2
                is_right &= steps(second) == [STEP_MS] * 2
            finally:
                os._exit(0 if is_right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        train(loop, timer, 3)
    assert steps(timer) == [STEP_MS] * 6


@pytest.mark.usefixtures("max_marks_500")
def test_long_accumulation_bounds_its_events(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    loop.optimizer = Adder(torch.nn.Linear(1, 1).parameters(), loop.gpu, 2.0)
    with hooks(loop, accumulate_grad_batches=10_000, warmup_steps=5) as timer:
        for x in timer.steps(loop.batches(1000)):
            loop.micro_batch(x)
            loop.gpu.work(2.0)  # An update without an optimizer.
        assert loop.gpu.created == 500
    assert caplog.text.count(DROPPED) == 1
