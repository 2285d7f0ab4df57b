"""Bounds on what steps that never end and unused timers keep."""

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

IN_STEP_LOOP = {**STEP_MS, "data": 1.125, "other": 0.0}


def told(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.message for record in caplog.records)


@pytest.fixture
def _bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_MARKS", 500)


@pytest.mark.usefixtures("_bounds")
@pytest.mark.parametrize("lag", [0, 1, 4])
def test_loop_without_step_holds_a_bounded_number_of_events_and_warns(
    loop: Loop, lag: int, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop, _lag=lag) as timer:
        for number, x in enumerate(loop.batches(1000)):
            loop.train(x)
            if number < 10:
                timer.step()
        # The ten steps before may still hold their events.
        assert 500 <= loop.gpu.created <= 500 + 7 * 10
        assert told(caplog, "A step with more than 500 boundaries is dropped. If no step ends") == 1
        assert "call step()" in caplog.text
        timer.step()
        # It continues.
        for x in loop.batches(10):
            loop.train(x)
            timer.step()
    assert steps(timer) == [IN_STEP_LOOP] * 20
    assert len(caplog.records) == 1


def test_unreferenced_timer_is_detached(gpu: FakeGPU) -> None:
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


def test_timer_in_a_reference_cycle_is_detached(gpu: FakeGPU) -> None:
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
def test_forked_process_destroys_no_event(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_forked_process_holds_no_events_and_keeps_training(gpu: FakeGPU) -> None:
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
def test_unseen_updates_hold_a_bounded_number_of_events(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    unseen = Adder(torch.nn.Linear(1, 1).parameters(), loop.gpu, 2.0)
    options: dict[str, Any] = {"_clock": loop.gpu, "accumulate_grad_batches": 10_000}
    with GPUPhaseHooks(loop.model, unseen, **options) as timer:
        for x in timer.steps(loop.batches(1000)):
            loop.micro_batch(x)
            loop.gpu.work(2.0)  # An update that is no optimizer's.
        assert loop.gpu.created == 500
    assert told(caplog, "A step with more than 500 boundaries is dropped") == 1
