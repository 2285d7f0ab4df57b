"""A timer that is read, flushed and removed by other threads than the training thread."""

import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_gpu import STEP_MS, FakeGPU, steps
from fake_loop import Loop, hooks

from lightning_gputime import GPUPhaseHooks

IN_STEP_LOOP = {**STEP_MS, "data": 1.125, "other": 0.0}


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def look(timer: GPUPhaseHooks, path: Path) -> None:
    """Reads all that can be read of a timer, and checks that it goes together."""
    timer.flush()
    summary, history = timer.summary(), timer.history()
    timer.save(path)
    numbers = history["step"].tolist()
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    assert {row.n for row in summary.rows.values()} <= {summary.steps}
    assert timer.last_step is None or timer.last_step.phase_ms == STEP_MS
    assert len(pickle.loads(pickle.dumps(timer)).history()) >= len(numbers)


def looking(timer: GPUPhaseHooks, done: threading.Event, path: Path) -> Callable[[], int]:
    def run() -> int:
        looks = 0
        # Once at least, however late this thread gets its turn.
        while not looks or not done.is_set():
            look(timer, path)
            looks += 1
        return looks

    return run


@pytest.mark.usefixtures("_threads_take_turns_often")
def test_other_threads_read_a_timer_while_one_trains(tmp_path: Path) -> None:
    waits = []
    for readers in (0, 3):
        loop, done = Loop(FakeGPU()), threading.Event()
        with hooks(loop, history_size=100) as timer, ThreadPoolExecutor() as pool:
            looks = [pool.submit(looking(timer, done, tmp_path / str(i))) for i in range(readers)]
            try:
                loop.train_all(timer.steps(loop.batches(400)))
            finally:
                done.set()
        assert all(item.result() for item in looks)
        assert steps(timer) == [STEP_MS] * 100
        assert timer.summary().steps == 400
        waits.append(loop.gpu.waits)
    # The loop's thread has the same waits.
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
    # The first step began in the thread that attached, and is not timed.
    assert steps(timer) == [IN_STEP_LOOP] * 29
