"""Slowdowns: lasting changes of the step time since the start of a run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simulated_runs
import torch
from fake_gpu import FakeGPU
from fake_lightning import Model, fit, timer_of
from fake_loop import Logger, Loop, hooks
from simulated_runs import PLANTED, STEADY, correlated, white

import lightning_gputime
from lightning_gputime._measurement.changes import Slowdown, StepSeries


def windows(steps_ms: Any, phases_ms: Mapping[str, float] | None = None) -> StepSeries:
    """Return a run with a mean step time for each window of 50 steps."""
    series = StepSeries()
    for window, step_ms in enumerate(steps_ms):
        phases = {"forward": step_ms - 1.0, "data": 1.0} if phases_ms is None else phases_ms
        series.add(50 * window + 49, 50, 50 * step_ms, phases)
    return series


def found_in(series: StepSeries) -> Slowdown:
    found = series.find()
    assert found is not None
    return found


def level(before: float, after: float, at: int, n: int = 40) -> Any:
    """Return n windows of `before` ms per step, and of `after` ms from window `at` on."""
    return np.where(np.arange(n) < at, before, after)


def ramp(n: int, start: float, full: float, size: float) -> Any:
    """Return n windows of 10 ms per step that grow by `size` from window `start` to `full`."""
    progress = (np.arange(n) + 0.5 - start) / (full - start)
    return 10.0 * (1.0 + size * np.clip(progress, 0.0, 1.0))


@pytest.mark.parametrize(
    ("steps_ms", "kind", "since_step", "change"),
    [
        (level(10.0, 13.3, 20), "jump", 1000, 0.33),
        (level(10.0, 6.7, 8), "jump", 400, -0.33),
        (level(10.0, 13.3, 2, n=10), "jump", 100, 0.33),
        (level(10.0, 6.7, 5, n=10), "jump", 250, -0.33),
        (level(10.0, 50.0, 4, n=8), "jump", 200, 4.0),
        (ramp(28, 0, 28, 4.0), "trend", 0, 4.0),
        (ramp(40, 16, 40, 1.0), "trend", 800, 1.0),  # Starts late.
        (ramp(40, 0, 20, 1.0), "trend", 0, 1.0),  # Saturates.
        ([80.0, *level(10.0, 13.3, 20)], "jump", 1050, 0.33),  # Compilation in the first window.
        ([300.0, 100.0, 30.0, *level(10.0, 13.3, 20)], "jump", 1150, 0.33),  # In the first three.
        # Validations, checkpoints.
        (np.where(np.arange(40) % 9 == 4, 60.0, level(10.0, 13.3, 20)), "jump", 1000, 0.33),
    ],
)
def test_slowdown_has_its_kind_start_and_size(
    steps_ms: Any, kind: str, since_step: int, change: float
) -> None:
    found = found_in(windows(steps_ms))
    assert (found.kind, found.since_step, found.phase) == (kind, since_step, "forward")
    assert found.before_ms == pytest.approx(10.0, rel=0.01)
    assert found.change == pytest.approx(change, abs=max(found.error, 1e-6))
    assert found.error < 0.1


@pytest.mark.parametrize("n", [20, 26, 29, 40])
@pytest.mark.parametrize("noise", [white, correlated(0.8)])
def test_change_far_above_the_noise_is_found_at_any_length(
    n: int, noise: simulated_runs.Make
) -> None:
    random = np.random.default_rng(n)
    for changed in (ramp(n, 0, n, 0.24), level(10.0, 11.5, n // 2, n)):
        # Noise of 0.5 %.
        found = found_in(windows(changed * noise(random, n) ** 0.1))
        assert found.change == pytest.approx(max(changed) / 10.0 - 1.0, abs=0.04)


@pytest.mark.parametrize(
    "steps_ms",
    [
        level(10.0, 10.7, 20),  # Not more than when a GPU warms up.
        level(10.0, 20.0, 38),  # Not lasting yet.
        level(20.0, 10.0, 1),  # Warm-up.
        [40.0, 20.0, *np.full(38, 10.0)],
        [300.0, 100.0, 30.0, *np.full(9, 10.0)],  # Long warm-up of a short run.
        [100.0, 30.0, *np.full(6, 10.0)],
        np.full(40, 10.0),
        level(10.0, 17.0, 5, n=9),  # Too few windows for this change.
        level(10.0, 50.0, 3, n=6),
        np.zeros(40),
    ],
)
def test_small_or_short_change_is_no_slowdown(steps_ms: Any) -> None:
    assert windows(steps_ms).find() is None


@pytest.mark.parametrize(("start", "end"), [(20, 28), (16, 30), (25, 32)])
@pytest.mark.parametrize("change", [0.125, -0.25])
def test_temporary_slowdown_has_a_start_and_an_end(start: int, end: int, change: float) -> None:
    is_changed = (np.arange(40) >= start) & (np.arange(40) < end)
    found = found_in(windows(np.where(is_changed, 10.0 * (1.0 + change), 10.0)))
    assert (found.kind, found.since_step, found.until_step) == ("stretch", 50 * start, 50 * end)
    assert found.change == pytest.approx(change)
    assert found.lost_share == pytest.approx(
        max(0.0, change * (end - start) / (40 + change * (end - start)))
    )


def test_slowdown_names_the_smallest_part_that_grew() -> None:
    series = StepSeries()
    for window in range(40):
        grown = float(window >= 20)
        data = {"data/fetch": 1.0 + 2.5 * grown, "data/copy": 1.0 + 0.5 * grown}
        phases = {"data": 2.0 + 3.0 * grown, **data, "forward": 5.0 - grown}
        # Some windows have no timed step.
        series.add(50 * window + 49, 50, 350.0 + 100.0 * grown, phases if window % 3 else {})
    found = found_in(series)
    assert (found.since_step, found.phase) == (1000, "data/fetch")
    assert (found.before_ms, found.phase_change_ms) == pytest.approx((7.0, 2.5))
    assert str(found) == (
        "steps got slower: from 7 ms at the start to 9 ms (+28.6 % ± 0.0 %), since step 1,000,"
        " most of it in `data/fetch`"
    )
    # No phase is named if none was timed, or none grew.
    for phases_ms in ({}, {"forward": 5.0}):
        found = found_in(windows(level(10.0, 13.3, 20), phases_ms))
        assert (found.phase, found.phase_change_ms) == ("", 0.0)
        assert str(found).endswith("since step 1,000")


def test_series_of_steps_has_bounded_memory() -> None:
    series, sizes = StepSeries(), []
    for first in range(0, 1_000_000, 25):
        step_ms = 100.0 if first < 600_000 else 120.0
        series.add(first + 24, 25, 25 * step_ms, {"forward": step_ms})
        sizes.append(len(series._segments))
    assert max(sizes) == 256
    found = found_in(series)
    assert found.change == pytest.approx(0.2, rel=1e-2)
    assert found.phase_change_ms == pytest.approx(20.0, rel=1e-2)
    assert found.since_step == pytest.approx(600_000, abs=8000)


def test_slowdown_search_runs_each_time_the_run_grows_by_a_quarter() -> None:
    series = StepSeries()
    due = [window + 1 for window in range(30) if series.add(50 * window + 49, 50, 500.0, {})]
    assert due == [10, 13, 17, 22, 28]


@pytest.mark.parametrize("length", [1, 130, 1000, 1_000_000])
def test_slowdown_has_the_epoch_of_its_start(length: int) -> None:
    series, epoch, sizes = StepSeries(), 0, []
    for first in range(0, 100_000, 25):
        # The next epoch starts before the last steps of this one are added.
        while epoch * length <= first + 25:
            series.start_epoch(epoch * length, epoch)
            epoch += 1
        series.add(first + 24, 25, 2500.0 if first < 60_000 else 3000.0, {})
        sizes.append(len(series._later_epochs))
    found = found_in(series)
    assert found.since_step == pytest.approx(60_000, abs=1000)
    assert found.since_epoch == found.since_step // length
    assert max(sizes) <= 25


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {},
            "steps got slower: from 10 ms at the start to 11.4 ms (+14 % ± 2 %), since step 8,400"
            " (epoch 3), most of it in `forward`",
        ),
        (
            {"change": 1.7, "error": 4.6, "detail": "a cause"},
            "steps got slower: from 10 ms at the start to 27 ms (about +170 %), since step 8,400"
            " (epoch 3), part of it in `forward` (a cause)",
        ),
        (
            {"change": -0.25, "error": 0.005, "phase": "", "since_epoch": None},
            "steps got faster: from 10 ms at the start to 7.5 ms (-25.0 % ± 0.5 %), since step"
            " 8,400",
        ),
        (
            {"kind": "stretch", "until_step": 9000},
            "steps were slower from step 8,400 (epoch 3) to 9,000: 11.4 ms instead of 10 ms"
            " (+14 % ± 2 %), most of it in `forward`",
        ),
    ],
)
def test_slowdown_is_described_in_one_sentence(changes: dict[str, Any], text: str) -> None:
    jump = Slowdown(
        "jump", since_step=8400, change=0.14, error=0.02, before_ms=10.0,
        phase="forward", phase_change_ms=1.4, since_epoch=3,
    )  # fmt: skip
    assert str(replace(jump, **changes)) == text


class GrowingModel(Model):
    """A model whose forward takes twice as long from epoch 5 on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.trainer.current_epoch >= 5:
            self.gpu.work(4.0)
        return super().forward(x)


def test_fit_reports_the_epoch_of_a_slowdown_and_notifies_once(gpu: FakeGPU) -> None:
    notified: list[Slowdown] = []
    observer = SimpleNamespace(on_slowdown=notified.append)
    timer = timer_of(gpu, every_n_steps=1, observers=[observer], warmup_steps=5)
    fit(gpu, GrowingModel(gpu), 60, timer=timer, max_epochs=11)
    found = timer.summary().slowdown
    assert found is not None
    assert (found.kind, found.since_step, found.since_epoch) == ("jump", 300, 5)
    assert "since step 300 (epoch 5)" in str(timer.summary())
    assert [slowdown.since_epoch for slowdown in notified] == [5]


@pytest.mark.parametrize("name", STEADY)
def test_steady_runs_have_no_slowdown(name: str) -> None:
    found = [
        slowdown
        for n in (10, 20, 40, 200)
        for slowdown in simulated_runs.find(STEADY[name], runs=10, n=n, seed=5)
    ]
    assert found == [None] * 40


@pytest.mark.parametrize("name", PLANTED)
def test_planted_slowdowns_are_found(name: str) -> None:
    planted = PLANTED[name]
    for n in (28, 200) if "stretch" in name else (10, 28, 200):
        found = simulated_runs.find(planted.make, runs=10, n=n, seed=5)
        checked = simulated_runs.check(planted, found, n)
        assert checked["found"] >= 90, (n, checked)
        assert checked["phase"] >= 90, (n, checked)
        assert checked["start"] >= (80 if n > 10 else 60), (n, checked)
        if n == 200 and "AR" not in name:
            assert checked["size"] >= 90, checked


def train(loop: Loop, data: Any, forward_ms: Callable[[int], float], **options: Any) -> Any:
    """Train with an additional phase named `forward` that takes `forward_ms` of the step."""
    with hooks(loop, every_n_steps=1, **options) as timer:
        for number, x in enumerate(timer.steps(data)):
            with timer.phase("forward"):
                loop.gpu.work(forward_ms(number))
            loop.train(x)
    return timer


@pytest.mark.parametrize(
    ("fetch_ms", "forward_ms", "text"),
    [
        (
            lambda i: 20.0 + 40.0 * i / 1400,
            lambda i: 0.0,
            "steps got slower: from 20 ms at the start to 59.7 ms (+198.9 % ± 0.1 %), gradually"
            " since step 0, most of it in `data`",
        ),
        (
            lambda i: 10.0,
            lambda i: 5.0 * (i >= 700),
            "steps got slower: from 14.6 ms at the start to 19.6 ms (+34.2 % ± 0.0 %), since step"
            " 700, most of it in `forward`",
        ),
        (lambda i: 50.0 if i % 8 == 3 else 10.0, lambda i: 0.0, ""),  # Only every 8th step is slow.
    ],
)
def test_loop_reports_its_slowdown(
    loop: Loop,
    fetch_ms: Callable[[int], float],
    forward_ms: Callable[[int], float],
    text: str,
    tmp_path: Path,
) -> None:
    def fetch() -> Iterator[torch.Tensor]:
        for number in range(1400):
            loop.gpu.host_work(fetch_ms(number))
            yield torch.ones(1, 2)

    timer = train(loop, fetch(), forward_ms)
    summary = timer.summary()
    assert str(summary.slowdown or "") == text
    if text:
        assert any(text in line for line in str(summary).splitlines())
    assert ("slowdown" in summary.to_dict()) is bool(text)
    timer.save(tmp_path / "run.json")
    assert lightning_gputime.load(tmp_path / "run.json").summary().slowdown == summary.slowdown


def test_slowdown_is_logged_and_notified_once(loop: Loop) -> None:
    notified: list[Slowdown] = []
    observer, logger = SimpleNamespace(on_slowdown=notified.append), Logger()
    options = {"logger": logger, "log": ["default", "slow"], "log_every_n_steps": 250}
    options |= {"observers": [observer]}
    train(loop, loop.batches(2000), lambda i: 8.0 if i >= 1250 else 4.0, **options)
    [slowdown] = notified
    assert (slowdown.kind, slowdown.since_step, slowdown.phase) == ("jump", 1250, "forward")
    logged = [metrics.get("phase_time/lasting_change_ms") for _, metrics in logger.calls]
    assert logged[:5] == [None] * 5
    assert logged[-1] == pytest.approx(4.0, rel=0.01)
