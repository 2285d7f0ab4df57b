"""Several timers that are attached at the same time."""

from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, steps
from fake_loop import Loop, hooks


def test_nested_and_sequential_timers_measure_the_same(loop: Loop) -> None:
    with hooks(loop) as outer:
        loop.train_all(outer.steps(loop.batches(2)))
        with hooks(loop) as inner:
            loop.train_all(outer.steps(inner.steps(loop.batches(3))))
    assert steps(outer) == [STEP_MS] * 5
    assert steps(inner) == [STEP_MS] * 3


def time_two(gpu: FakeGPU, n: int, *options: dict[str, Any]) -> list[list[dict[str, float]]]:
    """Train two models alternately, each with its timer, and return the steps of both."""
    loops = [Loop(gpu) for _ in options]
    timers = [hooks(loop, **each).attach() for loop, each in zip(loops, options, strict=True)]
    for _ in range(n):
        for loop, timer in zip(loops, timers, strict=True):
            loop.train(torch.ones(1, 2))
            timer.step()
    for timer in timers:
        timer.remove()
    return [steps(timer) for timer in timers]


def test_two_timers_on_two_models_do_not_mix(gpu: FakeGPU) -> None:
    first, second = time_two(gpu, 3, {}, {})
    # Each step of the other model counts as `data` of this timer.
    other = sum(STEP_MS.values()) - STEP_MS["data"] + 0.125
    alone = {**STEP_MS, "data": 0.125, "other": 0.0}
    assert first == [alone, *[{**alone, "data": other}] * 2]
    assert second == [{**alone, "data": other}] * 3


@pytest.mark.parametrize(
    "options",
    [
        ({}, {"every_n_steps": 4}),
        ({"every_n_steps": 4}, {}),
        ({"every_n_steps": 2}, {"every_n_steps": 2}),
        ({"every_n_steps": 3}, {"every_n_steps": 2}),
        ({}, {"lines": True}),
        ({"lines": True}, {"lines": True}),
    ],
)
def test_two_timers_with_sampled_steps_do_not_mix(
    gpu: FakeGPU, options: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    for timed in time_two(gpu, 24, *options):
        assert len(timed) >= 6
        assert {phases["backward"] for phases in timed} == {STEP_MS["backward"]}
