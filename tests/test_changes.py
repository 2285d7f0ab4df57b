"""Lasting changes: since when steps take longer, or shorter, than at the start."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import FakeGPU
from fake_lightning import Model, fit
from fake_loop import Loop, hooks

import lightning_gputime
from lightning_gputime import GPUPhaseTimer
from lightning_gputime._measurement.changes import LastingChange, LevelRecorder, find_period
from lightning_gputime._measurement.sums import PhaseSum, Sums

MADE = runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "lasting_changes.py"))
find, count, of_any_length = (MADE[name] for name in ("find", "count", "of_any_length"))
STEADY, PLANTED = MADE["STEADY"], MADE["PLANTED"]
N = 4000


def add(to: PhaseSum, device_ms: float) -> None:
    """Add a block of 25 steps."""
    to.n += 25
    to.device_ms += device_ms


def level(first: float, last: float, at: int) -> Any:
    return np.where(np.arange(N) < at, first, last)


@pytest.mark.parametrize(
    ("steps", "kind", "since_step", "change"),
    [
        (level(1.0, 1.125, 2000), "jump", 2000, 0.125),
        (level(1.0, 0.75, 2500), "jump", 2500, -0.25),
        # A trend starts where the run has settled: 3 minutes are 1,800 steps, more than a third.
        (np.linspace(1.0, 2.0, N), "trend", 1350, 0.493),
        (level(1.0, 1.015, 2000), "", 0, 0.0),  # It is too small to matter.
        (level(1.0, 2.0, 3900), "", 0, 0.0),  # It has not lasted yet.
        (level(2.0, 1.0, 300), "", 0, 0.0),  # The run settles.
        (np.ones(N), "", 0, 0.0),
        (level(1.0, 1.125, 2000)[:600], "", 0, 0.0),  # Too few blocks.
    ],
)
def test_a_change_that_lasts_is_told_with_its_start(
    steps: Any, kind: str, since_step: int, change: float
) -> None:
    found = find(steps)
    if not kind:
        assert found is None
        return
    assert found is not None
    assert (found.kind, found.since_step, found.phase) == (kind, since_step, "forward")
    assert found.change == pytest.approx(change, rel=0.02)
    assert found.phase_change_ms == pytest.approx(found.change * found.before_ms)


@pytest.mark.parametrize(("start", "end"), [(2000, 2800), (1600, 3000), (2500, 3200)])
@pytest.mark.parametrize("change", [0.125, -0.25])
def test_a_stretch_in_the_middle_is_said_with_both_ends(
    start: int, end: int, change: float
) -> None:
    steps = np.where((np.arange(N) >= start) & (np.arange(N) < end), 1.0 + change, 1.0)
    found = find(steps)
    assert found is not None
    assert (found.kind, found.since_step, found.until_step) == ("stretch", start, end)
    assert found.change == pytest.approx(change, rel=0.02)
    longer = "12.5 % ± 0.0 % longer" if change > 0.0 else "25.0 % ± 0.0 % shorter"
    steps_from = f"steps were {longer} from step {start:,} to {end:,}"
    assert str(found) == f"{steps_from}, most of it in `forward`"


def test_the_phase_that_grew_is_named_by_its_smallest_part() -> None:
    recorder, sums = LevelRecorder(), Sums()
    for number in range(100):
        grown = float(number >= 50)
        parts = {"data": 2.0 + 3.0 * grown, "data/fetch": 1.0 + 2.5 * grown, "data/copy": 1.0}
        parts |= {"data/copy": 1.0 + 0.5 * grown, "forward": 5.0 - grown}
        for name, ms in parts.items():
            add(sums.phases[name], 25 * ms)
        add(sums.step, 25 * (parts["data"] + parts["forward"]))
        recorder.note(25 * number + 24, sums)
    found = recorder.find()
    assert found is not None
    assert (found.since_step, found.phase) == (1250, "data/fetch")
    assert (found.before_ms, found.phase_change_ms) == pytest.approx((7.0, 2.5))
    assert str(found) == (
        "since step 1,250 steps are 28.6 % ± 0.0 % longer than before, most of it in `data/fetch`"
    )


def test_a_long_run_takes_no_more_memory() -> None:
    recorder, sums = LevelRecorder(), Sums()
    sizes = []
    for number in range(0, 1_000_000, 25):
        add(sums.step, 2500.0 if number < 600_000 else 3000.0)
        recorder.note(number, sums)
        sizes.append(len(recorder._totals))
    assert max(sizes) <= 513
    found = recorder.find()
    assert found is not None
    assert found.change == pytest.approx(0.2, rel=1e-3)
    # To within two blocks of 1 in 256 of the run.
    assert found.since_step == pytest.approx(600_000, abs=8000)


@pytest.mark.parametrize(
    ("length", "steps", "kept"),
    [
        (130, 100_000, 639),
        (1_000, 1_000_000, 724),
        (1_000_000, 1_000_000, 2),
        (1, 100_000, 1444),  # Each step is an epoch.
    ],
)
def test_a_lasting_change_names_its_epoch_in_bounded_memory(
    length: int, steps: int, kept: int
) -> None:
    recorder, sums, sizes, epoch = LevelRecorder(), Sums(), [], 0
    for first in range(0, steps, 25):
        number = first + 24
        # The next epoch has begun before the last steps of this one are read.
        while epoch * length <= number + 1:
            recorder.start_epoch(epoch * length, epoch)
            epoch += 1
        add(sums.step, 2500.0 if first < 0.6 * steps else 3000.0)
        recorder.note(number, sums)
        sizes.append(len(recorder._epochs))
    found = recorder.find()
    assert found is not None
    assert found.since_step == pytest.approx(0.6 * steps, abs=0.01 * steps)
    assert found.since_epoch == found.since_step // length
    assert max(sizes) == kept


@pytest.mark.parametrize(
    ("epoch", "kind", "said"),
    [
        (3, "jump", "since step 8,400 (epoch 3) steps are 14.0 % ± 2.0 % longer than before"),
        (0, "trend", "from step 8,400 (epoch 0) on steps get longer, 14.0 % ± 2.0 % until the end"),
        (3, "stretch", "steps were 14.0 % ± 2.0 % longer from step 8,400 (epoch 3) to 9,000"),
        (None, "jump", "since step 8,400 steps are 14.0 % ± 2.0 % longer than before"),
    ],
)
def test_the_sentence_of_a_lasting_change_has_its_epoch(
    epoch: int | None, kind: str, said: str
) -> None:
    until = 9000 if kind == "stretch" else None
    found = LastingChange(kind, 8400, 0.14, 0.02, 10.0, "data/fetch", 1.4, until, epoch)
    assert str(found) == f"{said}, most of it in `data/fetch`"


class Grows(Model):
    """A model whose forward is twice as long from the fifth epoch on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.trainer.current_epoch >= 5:
            self.gpu.work(4.0)
        return super().forward(x)


def test_a_fit_says_since_which_epoch(gpu: FakeGPU, tmp_path: Path) -> None:
    seen = list[LastingChange]()
    observer = SimpleNamespace(on_lasting_change=seen.append)
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, every_n_steps=1, observers=[observer])
    fit(gpu, Grows(gpu), 150, timer=timer, max_epochs=11)
    found = timer.summary().lasting_change
    assert found is not None
    assert (found.kind, found.since_step, found.since_epoch) == ("jump", 750, 5)
    assert f"since step {found.since_step} (epoch 5) steps are" in str(timer.summary())
    assert [one.since_epoch for one in seen] == [5]
    timer.save(tmp_path / "run.json")
    assert lightning_gputime.load(tmp_path / "run.json").summary().lasting_change == found


@pytest.mark.parametrize("name", STEADY)
def test_nothing_is_said_of_a_steady_run(name: str) -> None:
    assert count(of_any_length(STEADY[name]), 20) == 0


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_in_noise_is_found(name: str) -> None:
    assert count(PLANTED[name], 10) >= 9


def fetched(gpu: FakeGPU, fetch_ms: Callable[[int], float], n: int) -> Iterator[torch.Tensor]:
    for number in range(n):
        gpu.host_work(fetch_ms(number))
        yield torch.ones(1, 2)


@pytest.mark.parametrize(
    ("fetch_ms", "forward_ms", "said"),
    [
        # A dataset whose items take ever longer.
        (
            lambda i: 20.0 + 10.0 * i / N,
            lambda i: 0.0,
            "from step 1,350 on steps get longer, 27.9 % ± 0.1 % until the end, most of it in"
            " `data`",
        ),
        # What is kept alive from some step on takes time in each that follows.
        (
            lambda i: 10.0,
            lambda i: 5.0 * (i >= 2500),
            "since step 2,500 steps are 34.2 % ± 0.0 % longer than before, most of it in `forward`",
        ),
        # As many workers, of which one is slow.
        (
            lambda i: 50.0 if i % 8 == 3 else 10.0,
            lambda i: 0.0,
            "1 in 8 steps, at regular intervals, takes 35.3 ms longer, most of it in `data`",
        ),
    ],
)
def test_a_loop_says_since_when_and_in_which_phase(
    loop: Loop,
    fetch_ms: Callable[[int], float],
    forward_ms: Callable[[int], float],
    said: str,
    tmp_path: Path,
) -> None:
    with hooks(loop, every_n_steps=1) as timer:
        for number, x in enumerate(timer.steps(fetched(loop.gpu, fetch_ms, N))):
            with timer.phase("forward"):
                loop.gpu.work(forward_ms(number))
            loop.train(x)
    summary = timer.summary()
    assert any(said in line for line in str(summary).splitlines())
    assert (summary.lasting_change is None) is (summary.slow_period is not None)
    timer.save(tmp_path / "run.json")
    loaded = lightning_gputime.load(tmp_path / "run.json").summary()
    assert (loaded.lasting_change, loaded.slow_period) == (
        summary.lasting_change,
        summary.slow_period,
    )
    assert {"lasting_change", "slow_period"} - {*summary.to_dict()}


def test_a_lasting_change_is_logged_and_notified_once(loop: Loop) -> None:
    seen = list[LastingChange]()
    rows = list[dict[str, float]]()
    observer = SimpleNamespace(on_lasting_change=seen.append)
    logger = SimpleNamespace(log_metrics=lambda metrics, step: rows.append(metrics))
    options = {"logger": logger, "log": ["default", "slow"], "log_every_n_steps": 500}
    with hooks(loop, every_n_steps=1, observers=[observer], **options) as timer:
        for number, x in enumerate(timer.steps(loop.batches(N))):
            with timer.phase("forward"):
                loop.gpu.work(8.0 if number >= 2500 else 4.0)
            loop.train(x)
    [change] = seen
    assert (change.kind, change.since_step, change.phase) == ("jump", 2500, "forward")
    logged = [one.get("phase_time/lasting_change_ms") for one in rows]
    assert logged[:5] == [None] * 5
    assert logged[-1] == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(
    ("is_long", "every"),
    [
        (lambda i: i % 8 == 3, 8),
        (lambda i: i % 8 == 3 and i % 40 != 11, 8),  # One in five is missing.
        (lambda i: i % 2 == 0, None),  # Then the median says nothing.
        (lambda i: i % 100 == 0 and i < 900, None),  # Too few.
        (lambda i: (i * 7919) % 101 < 10, None),
        (lambda i: True, None),
    ],
)
def test_only_regular_distances_are_a_period(is_long: Callable[[int], bool], every: int) -> None:
    times = np.zeros(1000, [("step", int), ("step_ms", float), ("data_ms", float)])
    times["step"] = np.arange(1000)
    times["step_ms"] = times["data_ms"] = [30.0 if is_long(i) else 20.0 for i in range(1000)]
    found = find_period(times, 8)
    assert (found.every if found else None) == every
    if found:
        assert str(found) == (
            "1 in 8 steps, at regular intervals, takes 10 ms longer, most of it in `data`:"
            " as many as the loader has workers"
        )
