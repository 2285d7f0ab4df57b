"""Slow steps among those that are not timed, by the host's clock, with exact times."""

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from fake_gpu import FakeGPU, batches
from fake_lightning import Model, fit
from fake_loop import Logger, Loop, hooks
from test_budget import DearGPU
from test_slow_steps import collect

from lightning_gputime import Cause, GPUPhaseHooks, GPUPhaseTimer, SlowStep, phase

STEPS, EVERY = 300, 10
HOST_MS = 31.25
"""What the host takes for a step: twice as long as the device."""


def train(
    loop: Loop,
    late: Mapping[int, Callable[[], object]],
    host_ms: float = HOST_MS,
    steps: int = STEPS,
    **options: Any,
) -> GPUPhaseHooks:
    """Trains with a standard step, and something else before the model of some."""
    with hooks(loop, **{"every_n_steps": EVERY, **options}) as timer:
        for number, x in enumerate(timer.steps(batches(loop.gpu, steps, host_ms))):
            late.get(number, lambda: None)()
            loop.train(x)
    return timer


def test_a_collection_in_a_step_that_is_not_timed_is_found(loop: Loop) -> None:
    late = {STEPS - EVERY: lambda: collect(loop.gpu, 40.0)}
    [slow] = train(loop, late).slowest()
    assert slow == SlowStep(
        STEPS - EVERY,
        HOST_MS + 40.0,
        HOST_MS,
        "",
        (Cause("garbage", 40.0, 40.0, "generation 2"),),
        0.0,
    )
    assert str(slow) == (
        "step 290 took 71.2 ms, usually 31.2, by the host's clock:"
        " 40 ms garbage collection (generation 2)"
    )
    assert pickle.loads(pickle.dumps(slow)) == slow


@pytest.mark.parametrize("place", range(EVERY))
def test_a_delay_is_found_once_wherever_it_falls(loop: Loop, place: int) -> None:
    number = STEPS - 2 * EVERY + place
    [slow] = train(loop, {number: lambda: loop.gpu.host_work(40.0)}).slowest()
    assert (slow.step, slow.excess_ms, slow.causes, slow.unexplained_ms) == (number, 40.0, (), 40.0)
    # One in ten is timed, the last.
    assert slow.phase == ("other" if place == EVERY - 1 else "")


def test_where_the_device_sets_the_pace_the_hosts_clock_says_nothing(loop: Loop) -> None:
    late = {STEPS - EVERY: lambda: loop.gpu.host_work(40.0)}
    assert [*train(loop, late, host_ms=1.0).slowest()] == []


@pytest.mark.parametrize("item_every", [0, 50])
@pytest.mark.parametrize("every", [EVERY, 100])
@pytest.mark.parametrize("host_ms", [13.5, 14.0, 14.25])
def test_no_step_is_slow_where_the_host_makes_up_for_the_lead_it_had(
    loop: Loop, host_ms: float, every: int, item_every: int
) -> None:
    # A little faster than the device, which takes 14.625 ms: over many steps that adds up.
    n, gpu = 15 * every, loop.gpu
    late = {number: gpu_is_awaited(gpu) for number in range(0, n if item_every else 0, 50)}
    timer = train(loop, late, host_ms, n, every_n_steps=every)
    assert [*timer.slowest()] == []


def gpu_is_awaited(gpu: FakeGPU) -> Callable[[], None]:
    return lambda: gpu.host_work(max(gpu.free_at - gpu.now, 0) / 1e6)


@pytest.mark.parametrize("log_every", [50, 1000])
@pytest.mark.parametrize("item_every", [10, 20, 50, STEPS])
def test_where_the_device_takes_over_the_pace_the_hosts_clock_says_nothing_any_more(
    loop: Loop, item_every: int, log_every: int
) -> None:
    gpu, change = loop.gpu, 205
    with hooks(loop, every_n_steps=EVERY, log_every_n_steps=log_every, logger=Logger()) as timer:
        for number, x in enumerate(timer.steps(batches(gpu, 2 * STEPS, HOST_MS))):
            if number >= change:
                gpu.work(50.0)
                if number % item_every == 0:
                    gpu_is_awaited(gpu)()
            loop.train(x)
    # Those that are timed did get slower.
    assert [slow.step for slow in timer.slowest(100) if not slow.phase] == []


def test_before_enough_steps_were_timed_none_is_judged(loop: Loop) -> None:
    late = {9 * EVERY - 5: lambda: loop.gpu.host_work(40.0)}
    timer = train(loop, late, steps=9 * EVERY)
    assert "No step was judged yet" in str(timer.slowest())


def test_what_it_takes_to_read_the_timed_ones_makes_no_step_slow(loop: Loop) -> None:
    loop.gpu.read_ms = 0.5  # 87.5 ms for 25 steps
    assert [*train(loop, {}, steps=600).slowest()] == []


def evaluate(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        for _ in range(4):
            loop.model(torch.ones(1, 2))
            loop.gpu.host_work(100.0)
    loop.model.train()


def test_an_evaluation_is_no_slow_step(loop: Loop) -> None:
    late = {number: lambda: evaluate(loop) for number in range(STEPS // 2, STEPS, 11)}
    assert [*train(loop, late).slowest()] == []


def test_a_rollout_with_a_name_is_a_part_of_its_step(loop: Loop) -> None:
    def roll_out(n: int = 4) -> None:
        loop.model.eval()
        with phase("rollout"), torch.no_grad():
            for _ in range(n):
                loop.model(torch.ones(1, 2))
                loop.gpu.host_work(10.0)
        loop.model.train()

    late: dict[int, Callable[[], object]] = dict.fromkeys(range(STEPS), roll_out)
    [slow] = train(loop, {**late, STEPS - EVERY: lambda: roll_out(8)}).slowest()
    assert (slow.step, slow.excess_ms, slow.phase) == (STEPS - EVERY, 40.0, "")


class ShortQueue(FakeGPU):
    """A GPU that holds its host up when more than 10 ms of work are queued."""

    def work(self, device_ms: float, host_ms: float = 0.0) -> None:
        super().work(device_ms, host_ms)
        self.now = max(self.now, self.free_at - 10_000_000)


@pytest.mark.parametrize("every", [3, 10])
@pytest.mark.parametrize("place", [0, 3, 7, 8, 9])
def test_where_a_full_queue_holds_the_host_up_a_wait_is_no_slow_step(
    every: int, place: int
) -> None:
    loop = Loop(gpu := ShortQueue())
    with hooks(loop, every_n_steps=every) as timer:
        for number, x in enumerate(timer.steps(batches(gpu, 600, 1.0))):
            loop.train(x)
            if number % 50 == place:
                gpu.now = max(gpu.now, gpu.free_at)
    assert [*timer.slowest()] == []


def test_a_pause_by_hand_is_no_slow_step_however_long_it_lasts(loop: Loop) -> None:
    with hooks(loop, every_n_steps=EVERY) as timer:
        pause = timer.paused()
        for number, x in enumerate(timer.steps(batches(loop.gpu, STEPS, HOST_MS))):
            if number == STEPS - 26:
                pause.__enter__()
            if STEPS - 26 <= number <= STEPS - 24:
                loop.gpu.host_work(100.0)
            if number == STEPS - 24:
                pause.__exit__(None, None, None)
            loop.train(x)
    assert [*timer.slowest()] == []


def test_what_lies_between_epochs_is_no_slow_step(loop: Loop) -> None:
    with hooks(loop, every_n_steps=EVERY) as timer:
        for _ in range(30):
            for x in timer.steps(batches(loop.gpu, 15, HOST_MS)):
                loop.train(x)
            loop.gpu.host_work(100.0)
    assert [*timer.slowest()] == []


def test_a_loop_that_is_left_and_begun_anew_has_no_slow_step(loop: Loop) -> None:
    with hooks(loop, every_n_steps=EVERY) as timer:
        for _ in range(30):
            for number, x in enumerate(timer.steps(batches(loop.gpu, 100, HOST_MS))):
                loop.train(x)
                if number == 14:
                    break
            loop.gpu.host_work(100.0)
    assert [*timer.slowest()] == []


def test_they_count_among_all_steps_that_were_judged(loop: Loop) -> None:
    late = {number: lambda: loop.gpu.host_work(40.0) for number in (STEPS - 5, STEPS - 15)}
    summary = train(loop, late).summary()
    # Those that are timed all count, of the others those since the tenth of them was read; the
    # first of each ten belongs to the reading of those before.
    timed, slow = STEPS // EVERY, summary.slow
    assert slow is not None
    assert slow.n == 2
    assert timed < slow.steps <= STEPS
    assert slow.share == pytest.approx(80.0 / (slow.steps * HOST_MS + 80.0))
    assert f"2 of {slow.steps} steps were slow" in str(summary)


def test_their_excess_is_logged_per_step_of_the_window(loop: Loop) -> None:
    logger = Logger()
    late = {STEPS - 15: lambda: collect(loop.gpu, 40.0)}
    train(loop, late, logger=logger, log_every_n_steps=50)
    logged = {step: metrics.get("phase_time/slow/garbage_ms") for step, metrics in logger.calls}
    assert [*logged.values()][:-1] == [None] * 5
    # Those of the last log are the 50 of the window.
    assert logged[STEPS - 1] == pytest.approx(40.0 / 50, rel=0.05)


def test_on_slow_step_gets_each_and_may_remove_the_timer(loop: Loop) -> None:
    told: list[SlowStep] = []

    def tell(slow: SlowStep) -> None:
        told.append(slow)
        loop.gpu.host_work(60.0)
        if len(told) == 2:
            timer.remove()

    timer = hooks(loop, every_n_steps=EVERY, on_slow_step=tell).attach()
    for number, x in enumerate(timer.steps(batches(loop.gpu, STEPS, HOST_MS))):
        if number in (250, 253, 260):
            loop.gpu.host_work(40.0)
        loop.train(x)
    # What the function itself takes makes no step slow.
    assert [slow.step for slow in told] == [250, 253]


def test_with_a_budget_they_are_seen_too() -> None:
    loop = Loop(DearGPU(200.0))
    late = {number: lambda: loop.gpu.host_work(40.0) for number in range(900, 1000, 7)}
    timer = train(loop, late, steps=1000, every_n_steps=1, max_overhead=0.01)
    assert timer.summary().one_in > 2
    # The first step makes the events.
    found = {slow.step: slow for slow in timer.slowest(100) if slow.step}
    assert found.keys() == late.keys()
    assert all(slow.excess_ms == pytest.approx(40.0, abs=2.0) for slow in found.values())
    assert {slow.phase for slow in found.values()} == {"", "other"}


def test_in_lightning_a_validation_and_the_end_of_an_epoch_are_no_slow_steps(gpu: FakeGPU) -> None:
    class Late(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.gpu.host_work(HOST_MS + (40.0 if self.global_step == 255 else 0.0))

        def on_train_epoch_end(self) -> None:
            self.gpu.host_work(500.0)

    timer = GPUPhaseTimer(clock=gpu, summary=False, warmup_steps=0, every_n_steps=EVERY)
    model = Late(gpu)
    fit(gpu, model, 100, timer=timer, max_epochs=3, val_check_interval=15)
    assert [slow.step for slow in timer.slowest()] == [255]
