"""Bounds on the events of steps that never end, and on what unused timers keep."""

import gc
import io
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import hooks_of
from fake_gpu import STEP_MS, FakeEvent, FakeGPU, steps
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
    assert loop.gpu.created < 400  # Seven in each of the 50 steps that are read together.
    timer.remove()
    assert steps(timer) == [IN_STEP_LOOP] * 1000
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


# Threads


@pytest.fixture
def _threads_switch_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def read(timer: GPUPhaseHooks, path: Path) -> None:
    """Read all results of a timer, and check that they are consistent."""
    timer.flush()
    summary, history = timer.summary(), timer.history()
    timer.save(path)
    numbers = history["step"].tolist()
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    assert {row.n for row in summary.rows.values()} <= {summary.steps}
    assert timer.last_step is None or timer.last_step.phase_ms == STEP_MS
    assert len(pickle.loads(pickle.dumps(timer)).history()) >= len(numbers)


def read_until(done: threading.Event, timer: GPUPhaseHooks, path: Path) -> int:
    """Read a timer until the event is set, but at least once, and return how often."""
    reads = 0
    while not reads or not done.is_set():
        read(timer, path)
        reads += 1
    return reads


@pytest.mark.usefixtures("_threads_switch_often")
def test_other_threads_read_a_timer_while_one_trains(tmp_path: Path) -> None:
    waits = []
    for readers in (0, 3):
        loop, done = Loop(FakeGPU()), threading.Event()
        with hooks(loop, history_size=100) as timer, ThreadPoolExecutor() as pool:
            paths = [tmp_path / str(i) for i in range(readers)]
            reads = [pool.submit(read_until, done, timer, path) for path in paths]
            try:
                loop.train_all(timer.steps(loop.batches(400)))
            finally:
                done.set()
        assert all(item.result() for item in reads)
        assert steps(timer) == [STEP_MS] * 100
        assert timer.summary().steps == 400
        waits.append(loop.gpu.waits)
    # Readers do not change the waits of the training thread.
    assert waits[0] == waits[1]


class Queues(pickle.Pickler):
    """Keeps each queue that it pickles."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, deque):
            self.found = [*vars(self).get("found", []), (value, [*value])]
        return NotImplemented


@pytest.mark.parametrize("every_n_steps", [1, 5])
def test_steps_change_nothing_that_a_copy_of_the_timer_reads(
    loop: Loop, every_n_steps: int
) -> None:
    # Otherwise a copy in another thread could fail.
    with hooks(loop, every_n_steps=every_n_steps) as timer:
        loop.train_all(timer.steps(loop.batches(200)))
        timer.summary()
        queues = Queues(io.BytesIO())
        queues.dump(timer)
        loop.train_all(timer.steps(loop.batches(200)))
        timer.flush()
    assert len(queues.found) > 5
    assert all([*queue] == before for queue, before in queues.found)


def test_flush_in_another_thread_reads_nothing_while_the_loop_runs(loop: Loop) -> None:
    with hooks(loop) as timer, ThreadPoolExecutor() as pool:
        for x in loop.batches(3):
            loop.train(x)
            timer.step()
            waits = [*loop.gpu.waits]
            pool.submit(timer.flush).result()
            assert loop.gpu.waits == waits
        timer.flush()
        assert len(loop.gpu.waits) == 3


@pytest.mark.parametrize("thread_is_alive", [True, False])
def test_removal_in_another_thread_loses_no_step(loop: Loop, thread_is_alive: bool) -> None:
    timer = hooks(loop).attach()

    def train() -> None:
        for x in loop.batches(30):
            loop.train(x)
            timer.step()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(train).result()
        if thread_is_alive:
            timer.remove()
    timer.remove()
    # The first step began in the thread that attached the timer, so it is not timed.
    assert steps(timer) == [IN_STEP_LOOP] * 29
