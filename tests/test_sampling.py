"""Estimates over all steps if only some are timed, in loops of known times."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from fake_gpu import STEP_MS
from fake_loop import Logger, Loop, timed_indices
from fake_loop import train as train_loop
from sampling import BASE_MS, train

SHORT_MS = sum(BASE_MS.values())
Extra = Callable[[int], float]
"""A function that returns by how many ms a step is longer."""


def every(period: int, ms: float, offset: int = 0) -> Extra:
    return lambda i: ms if (i + offset) % period == 0 else 0.0


CASES: dict[str, tuple[str, Extra]] = {
    "a fetch after each log": ("fetch", every(50, 8.0, 1)),
    "a fetch in 1 of 10 steps": ("fetch", every(10, 20.0)),
    "a jump at step 110": ("body", lambda i: 3.5 if i >= 110 else 0.0),
    "a logger at i % 50": ("logger", every(50, 20.0)),
    "a logger at (i + 1) % 50": ("logger", every(50, 20.0, 1)),
}
"""Places at which some steps take longer, and by how many ms."""


@pytest.mark.parametrize("case", CASES)
def test_sampled_shares_estimate_those_of_all_steps(case: str) -> None:
    trained = train(3000, *CASES[case], lines=False)
    summary = trained.timer.summary()
    assert summary.steps < len(trained.steps_ms)
    all_ms = sum(trained.phases_ms.values())
    for name, ms in trained.phases_ms.items():
        row = summary.rows[name]
        # `share_error` is half of a 95 % interval.
        assert abs(row.share - ms / all_ms) <= max(0.03, row.share_error), name
        assert abs(row.share - ms / all_ms) <= row.share_error + 0.01, name
    # Recording events adds time to the loop, but not to its steps.
    assert summary.step.mean_ms == pytest.approx(trained.steps_ms.mean(), rel=0.02)


@pytest.mark.parametrize(("period", "offset"), [(10, 1), (50, 0), (51, 13)])
def test_periodic_work_is_not_a_slowdown(period: int, offset: int) -> None:
    trained = train(600, "fetch", every(period, 0.64 * period, offset), lines=False)
    assert trained.timer.summary().slowdown is None


def test_sampled_percentiles_estimate_those_of_all_steps() -> None:
    trained = train(3000, *CASES["a fetch in 1 of 10 steps"], lines=False)
    summary = trained.timer.summary()
    assert summary.step.p5_ms == pytest.approx(SHORT_MS, rel=0.05)
    assert summary.step.p50_ms == pytest.approx(SHORT_MS, rel=0.05)
    assert summary.step.p95_ms == pytest.approx(SHORT_MS + 20.0, rel=0.02)
    assert summary.step.max_ms == pytest.approx(SHORT_MS + 20.0, rel=0.02)


def test_long_untimed_step_is_reported_as_not_sampled() -> None:
    # A single long step after the first steps is timed only by chance.
    runs = [
        train(2000, "fetch", every(10_000, 400.0, -at), lines=False) for at in (1203, 1437, 1666)
    ]
    summaries = [(run, run.timer.summary()) for run in runs]
    reported = [pair for pair in summaries if pair[1].measurement.not_sampled_steps]
    assert reported
    for run, summary in reported:
        assert summary.measurement.not_sampled_steps == 1
        long_share = (400.0 + SHORT_MS) / run.steps_ms.sum()
        assert summary.measurement.not_sampled_share == pytest.approx(long_share, rel=0.03)
        assert summary.step.mean_ms == pytest.approx(run.steps_ms.mean(), rel=0.02)
        assert summary.step.max_ms == pytest.approx(400.0 + SHORT_MS, rel=0.02)
        shares = sum(row.share for name, row in summary.rows.items() if "/" not in name)
        assert shares + summary.measurement.not_sampled_share == pytest.approx(1.0)


# Step 29 is examined, so the device has no work queued at the start of step 30.
@pytest.mark.parametrize(("long_step", "max_ms"), [(30, 100.0), (31, 3000.0), (43, 3000.0)])
def test_only_the_step_after_an_examined_step_is_left_out(long_step: int, max_ms: float) -> None:
    trained = train(60, "fetch", lambda i: 3000.0 if i == long_step else 100.0, every_n_steps=30)
    assert trained.timer.summary().step.max_ms == pytest.approx(max_ms, rel=0.02)


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_host_wait_does_not_grow_with_untimed_steps(n: int, lag: int, loop: Loop) -> None:
    summary = train_loop(loop, 100, every_n_steps=n, _lag=lag).summary()
    assert summary.measurement.host_wait_mean_ms == sum(STEP_MS.values())


@pytest.mark.parametrize("every_n_steps", [7, 10, 50])
def test_sampled_logs_estimate_all_steps_and_come_when_due(every_n_steps: int) -> None:
    logger = Logger()
    options: dict[str, Any] = {
        "every_n_steps": every_n_steps,
        "logger": logger,
        "log_every_n_steps": 20,
    }
    trained = train(1000, "fetch", every(10, 20.0), lines=False, **options)
    # The first log comes after the first timed step.
    first = timed_indices(every_n_steps, 50)[0]
    due = [number for number in range(19, 1000, 20) if number >= first]
    assert [step for step, _ in logger.calls] == due
    # All logs have the same keys, because a CSV file has the columns of its first row.
    assert len({frozenset(metrics) for _, metrics in logger.calls}) == 1
    means = [metrics["phase_time/step_ms"] for _, metrics in logger.calls[1:]]
    assert math.fsum(means) / len(means) == pytest.approx(trained.steps_ms.mean(), rel=0.02)
