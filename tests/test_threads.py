"""Timers that other threads read, flush or remove while one thread trains."""

import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_gpu import STEP_MS, FakeGPU, steps
from fake_loop import Loop, hooks

from lightning_gputime import GPUPhaseHooks

IN_STEP_LOOP = {**STEP_MS, "data": 1.125, "other": 0.0}


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
