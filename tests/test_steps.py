"""Which steps a loop over `steps()` has, however it is left, and whatever its body calls."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from conftest import installed
from fake_gpu import STEP_MS, steps
from fake_loop import Loop, hooks, timed_indices
from torch import Tensor

from lightning_gputime import GPUPhaseHooks


def first(batches: Iterator[Tensor], n: int) -> Iterator[Tensor]:
    for number, x in enumerate(batches, 1):
        yield x
        if number == n:
            break


@pytest.mark.parametrize("options", [{}, {"_lag": 0}, {"every_n_steps": 1, "log_every_n_steps": 1}])
@pytest.mark.parametrize(
    "taken",
    [
        first,
        islice,
        lambda batches, n: (x for _, x in zip(range(n), batches, strict=False)),
        lambda batches, n: (x for x, _ in zip(batches, range(n), strict=False)),
        lambda batches, n: (next(batches) for _ in range(n)),
    ],
    ids=["break", "islice", "zip(range, steps)", "zip(steps, range)", "next"],
)
def test_loop_that_is_left_keeps_its_last_step(
    loop: Loop, taken: Callable[..., Iterator[Tensor]], options: dict[str, Any]
) -> None:
    bare = installed(*loop.model.modules(), loop.optimizer)
    with hooks(loop, **options) as timer:
        for _ in range(2):
            for x in taken(timer.steps(loop.batches(9)), 3):
                loop.train(x)
            loop.gpu.work(99.0)
    assert steps(timer) == [STEP_MS] * 6
    assert timer.history()["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert timer.summary().skipped_updates == 0
    assert installed(*loop.model.modules(), loop.optimizer) == bare


def test_the_last_step_of_a_loop_that_is_left_ends_with_its_update(loop: Loop) -> None:
    with hooks(loop) as timer:
        batches = timer.steps(loop.batches(9))
        for _ in range(2):
            loop.train(next(batches))
            loop.gpu.work(1.0)
        loop.gpu.work(99.0)
        batches.close()
        batches.close()
    assert steps(timer) == [{**STEP_MS, "other": 1.125}, STEP_MS]


@pytest.mark.parametrize("part", ["nothing", "forward", "backward", "next forward"])
def test_step_left_before_its_update_is_not_timed(loop: Loop, part: str) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(9))):
            if number == 2:
                if part == "forward":
                    loop.model(x)
                elif part == "backward":
                    loop.micro_batch(x)
                elif part == "next forward":
                    loop.train(x)
                    loop.model(x)
                break
            loop.train(x)
    assert steps(timer) == [STEP_MS] * 2


def test_sampled_steps_of_a_loop_that_is_left_keep_their_numbers(loop: Loop) -> None:
    with hooks(loop, every_n_steps=3) as timer:
        for _ in range(4):
            for x in islice(timer.steps(loop.batches(9)), 3):
                loop.train(x)
    assert timer.history()["step"].tolist() == timed_indices(3, 12)
    assert steps(timer) == [STEP_MS] * 4


def test_an_inference_loop_that_is_left_has_its_last_step(loop: Loop) -> None:
    with GPUPhaseHooks(loop.model, _clock=loop.gpu) as timer, torch.no_grad():
        for x in islice(timer.steps(loop.batches(9)), 3):
            loop.model(x)
            loop.gpu.work(0.5)
    whole = {"data": 1.0, "forward": 4.0, "other": 0.5}
    assert steps(timer) == [whole, whole, {**whole, "other": 0.0}]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_called_inside_steps_ends_each_step_once(loop: Loop, accumulate: int) -> None:
    with hooks(loop, accumulate_grad_batches=accumulate) as timer:
        for number, x in enumerate(timer.steps(loop.batches(4)), 1):
            loop.micro_batch(x)
            if number % accumulate == 0:
                loop.update()
            timer.step()
    n = 4 // accumulate
    once = {name: accumulate * STEP_MS[name] for name in STEP_MS if name != "optimizer"}
    assert steps(timer) == [{**once, "optimizer": 2.0}] * n
    assert timer.history()["step"].tolist() == list(range(n))
    assert timer.summary().skipped_updates == 0


def test_two_calls_of_step_inside_one_batch_are_two_steps(loop: Loop) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(2)):
            for _ in range(2):
                loop.train(x)
                timer.step()
    again = {**STEP_MS, "data": 0.125, "other": 0.0}
    assert steps(timer) == [STEP_MS, again] * 2


def test_steps_around_steps_end_each_step_once(loop: Loop) -> None:
    with hooks(loop) as timer:
        for _ in timer.steps(range(2)):
            for x in timer.steps(loop.batches(2)):
                loop.train(x)
            loop.gpu.work(99.0)
        for x in timer.steps(timer.steps(loop.batches(2))):
            loop.train(x)
    assert steps(timer) == [STEP_MS] * 6
    assert timer.history()["step"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_loop_that_is_left_after_an_update_by_hand_has_its_last_step(loop: Loop) -> None:
    with GPUPhaseHooks(loop.model, _clock=loop.gpu, warmup_steps=0) as timer:
        for _ in range(2):
            for number, x in enumerate(timer.steps(loop.batches(9))):
                loop.micro_batch(x)
                loop.gpu.work(2.0)
                if number == 2:
                    break
            loop.gpu.work(99.0)
    by_hand = {name: ms for name, ms in STEP_MS.items() if name != "optimizer"}
    assert steps(timer) == [{**by_hand, "other": 2.125}] * 6
