"""What is held of steps that never end, and of timers that nobody uses any more."""

import gc
import os
from typing import Any

import pytest
import torch
from conftest import hooks_of
from fake_gpu import STEP_MS, Adder, FakeEvent, FakeGPU, steps
from fake_loop import Loop, hooks

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._record import recorder
from lightning_gputime._record.recorder import MANY_MARKS, MOST_EVENTS

IN_STEP_LOOP = {**STEP_MS, "data": 1.125, "other": 0.0}


def told(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.message for record in caplog.records)


def test_the_real_bounds() -> None:
    assert (MANY_MARKS, MOST_EVENTS) == (20_000, 100_000)


@pytest.fixture
def _bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MANY_MARKS", 100)
    monkeypatch.setattr(recorder, "MOST_EVENTS", 500)


@pytest.mark.usefixtures("_bounds")
@pytest.mark.parametrize("lag", [0, 1, 4])
def test_a_loop_without_step_holds_a_bounded_number_of_events_and_is_told(
    loop: Loop, lag: int, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop, _lag=lag) as timer:
        for number, x in enumerate(loop.batches(1000)):
            loop.train(x)
            if number < 10:
                timer.step()
            if number == 30:
                assert told(caplog, "A step has 100 boundaries, and with 500 it is dropped") == 1
                assert "call step()" in caplog.text
        assert loop.gpu.created == 500
        assert told(caplog, "A step has 100 boundaries, and with 500 it is dropped") == 1
        assert told(caplog, "left out: TooManyEventsError('it has ") == 1
        timer.step()
        # It goes on.
        for x in loop.batches(10):
            loop.train(x)
            timer.step()
    assert steps(timer) == [IN_STEP_LOOP] * 20
    assert len(caplog.records) == 2


@pytest.mark.usefixtures("_bounds")
def test_a_large_lag_holds_a_bounded_number_of_events_and_loses_no_step(loop: Loop) -> None:
    with hooks(loop, _lag=10_000, every_n_steps=1) as timer:
        for x in timer.steps(loop.batches(1000)):
            loop.gpu.host_work(15.625)
            loop.train(x)
    assert loop.gpu.created == 500
    assert len(timer.history()) == 1000
    assert len(loop.gpu.waits) <= 1  # At the end.


@pytest.mark.usefixtures("_bounds")
def test_a_long_step_that_ends_is_timed_and_told_of(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop, accumulate_grad_batches=30) as timer:
        for number, x in enumerate(timer.steps(loop.batches(120)), 1):
            loop.micro_batch(x)
            if number % 30 == 0:
                loop.update()
    micro = {name: 30 * ms for name, ms in STEP_MS.items() if name != "optimizer"}
    assert steps(timer) == [{**micro, "optimizer": 2.0}] * 4
    assert told(caplog, "A step has 100 boundaries") == len(caplog.records) == 1


def test_a_timer_that_nobody_has_any_more_does_nothing_and_comes_off(gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    bare = hooks_of(loop.model)

    def cell(**options: Any) -> GPUPhaseHooks:
        return hooks(loop, **options).attach()

    timer = cell()
    timer = cell()  # The cell is run twice.
    for x in loop.batches(1000):
        loop.train(x)
        timer.step()
    assert gpu.created < 200
    timer.remove()
    assert steps(timer) == [IN_STEP_LOOP] * 1000
    timer = cell()
    timer.remove()
    assert hooks_of(loop.model) == bare


def test_a_timer_that_only_refers_to_itself_comes_off(gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    bare = hooks_of(loop.model)
    timer = hooks(loop)
    timer = hooks(loop, observers=[lambda _, timers=[timer]: timers[0].flush()]).attach()
    timer = hooks(loop)
    gc.collect()
    timer.attach().remove()
    assert hooks_of(loop.model) == bare


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_forked_off_destroys_no_event(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In a worker of a loader torch would abort, with "CUDA error: initialization error".
    destroyed: list[int] = []
    monkeypatch.setattr(FakeEvent, "__del__", lambda _: destroyed.append(1), raising=False)
    loop = Loop(gpu)
    timer = hooks(loop).attach()
    for x in timer.steps(loop.batches(3)):
        loop.train(x)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_is_forked_off_holds_no_events_and_keeps_training(gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(3)):
            loop.train(x)
        created, waits = gpu.created, [*gpu.waits]
        child = os.fork()
        if not child:
            right = False
            try:
                for x in timer.steps(loop.batches(100)):
                    loop.train(x)
                for x in loop.batches(100):
                    loop.train(x)
                    timer.step()
                timer.flush()
                timer.summary()
                timer.remove()
                # Another one can be attached there.
                with hooks(loop) as own:
                    for x in own.steps(loop.batches(2)):
                        loop.train(x)
                right = gpu.created < created + 30 and len(gpu.waits) == len(waits) + 2
                right &= steps(own) == [STEP_MS] * 2
            finally:
                os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for x in timer.steps(loop.batches(3)):
            loop.train(x)
    assert steps(timer) == [STEP_MS] * 6


@pytest.mark.usefixtures("_bounds")
def test_updates_that_no_hook_sees_hold_a_bounded_number_of_events(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    unseen = Adder(torch.nn.Linear(1, 1).parameters(), loop.gpu, 2.0)
    options: dict[str, Any] = {"_clock": loop.gpu, "accumulate_grad_batches": 10_000}
    with GPUPhaseHooks(loop.model, unseen, **options) as timer:
        for x in timer.steps(loop.batches(1000)):
            loop.micro_batch(x)
            loop.gpu.work(2.0)  # An update that is no optimizer's.
        assert loop.gpu.created == 500
    assert told(caplog, "A step has 100 boundaries, and with 500 it is dropped") == 1
