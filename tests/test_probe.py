"""Probes: steps that run without launch gaps, because they are launched behind a spin kernel."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, batches, steps
from fake_lightning import Loader, Model, timer_of, trainer
from fake_loop import Logger, timed_indices
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, StepTimes
from lightning_gputime._session.probe import is_probed

PROBED = (2, 5, 13, 16, 20, 27, 31, 38)
"""Steps that are probed with `probe_every_n_steps=5`: 1 of every 5."""

BUSY_MS = {"data": 0.5, "forward": 0.25, "loss": 0.125, "backward": 0.5, "optimizer": 0.0625}


class Slow(nn.Module):
    """A layer whose launches take the host longer than the device."""

    def __init__(self, gpu: FakeGPU, host_ms: float, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self._gpu, self._host_ms = gpu, host_ms
        self.layer = Layer(gpu, forward_ms, backward_ms)

    def forward(self, x: Tensor) -> Tensor:
        self._gpu.host_work(self._host_ms)
        result: Tensor = self.layer(x)
        self._gpu.host_work(self._host_ms)
        return result


class Loop:
    """A loop whose step takes the host 10 ms, and the device `BUSY_MS`."""

    def __init__(self, gpu: FakeGPU, host_ms: float = 1.0) -> None:
        self.gpu, self.host_ms = gpu, host_ms
        self.model: nn.Module = Slow(gpu, host_ms, 0.25, 0.5)
        self.optimizer = Adder(self.model.parameters(), gpu, 0.0625)

    def batches(self, n: int) -> Iterator[Tensor]:
        return batches(self.gpu, n, 4 * self.host_ms, 0.5)

    def train(self, x: Tensor, wait_in_loss: bool = False) -> None:
        loss = self.model(x).sum()
        self.gpu.work(0.125, host_ms=2 * self.host_ms)
        if wait_in_loss:
            self.gpu.now = max(self.gpu.now, self.gpu.free_at)
        loss.backward()
        self.gpu.host_work(2 * self.host_ms)
        self.optimizer.step()
        self.optimizer.zero_grad()


def probing(loop: Loop, **options: Any) -> GPUPhaseHooks:
    options = {"warmup_steps": 0, "probe_every_n_steps": 5, "_clock": loop.gpu, **options}
    return GPUPhaseHooks(loop.model, loop.optimizer, **options)


def run(
    loop: Loop,
    n: int,
    wait_in_loss: bool = False,
    pauses_ms: Mapping[int, float] | None = None,
    **options: Any,
) -> GPUPhaseHooks:
    """Train `n` steps, some of which begin with a pause on the host."""
    with probing(loop, **options) as timer:
        for i, x in enumerate(timer.steps(loop.batches(n))):
            loop.gpu.host_work((pauses_ms or {}).get(i, 0.0))
            loop.train(x, wait_in_loss)
    return timer


def test_probed_step_has_the_gpu_busy_time(gpu: FakeGPU) -> None:
    summary = run(Loop(gpu), 20).summary()
    busy = {name: row.gpu_busy_mean_ms for name, row in summary.rows.items()}
    assert busy == {**BUSY_MS, "other": 0.0}
    assert summary.step.gpu_busy_mean_ms == sum(BUSY_MS.values())
    assert summary.probed_steps == 4
    assert summary.step.mean_ms == pytest.approx(10.0, rel=0.01)


def test_probed_steps_and_the_steps_after_them_are_in_no_other_statistics(gpu: FakeGPU) -> None:
    observed: list[StepTimes] = []
    timer = run(Loop(gpu), 20, observers=[observed.append])
    without = run(Loop(FakeGPU()), 20, probe_every_n_steps=0)
    kept = [n for n in range(20) if n not in PROBED and n - 1 not in PROBED]
    assert timer.history()["step"].tolist() == kept == [step.step for step in observed]
    assert steps(timer) == [step for n, step in enumerate(steps(without)) if n in kept]
    assert timer.summary().steps == len(kept)


def test_summary_has_the_share_of_launch_gaps(gpu: FakeGPU) -> None:
    summary = run(Loop(gpu), 20).summary()
    # Without `data`, which lasts 4 ms.
    as_run = sum(row.mean_ms for name, row in summary.rows.items() if name != "data")
    busy = sum(BUSY_MS.values()) - BUSY_MS["data"]
    assert summary.launch_gap_share == pytest.approx((as_run - busy) / summary.step.mean_ms)
    breakdown = summary.time_breakdown
    assert breakdown is not None
    # Share of the training, which is slightly longer than its steps.
    gaps = pytest.approx(summary.launch_gap_share, rel=0.001)
    assert breakdown["launch gaps"].share == gaps
    assert summary.advice[:3] == ("use a larger batch", "use torch.compile", "use CUDA graphs")
    header = str(summary).rpartition("Time per step")[2].splitlines()[2].split()
    assert header == ["phase", "mean", "share", "p50", "p95", "max", "host", "steps", "busy"]
    assert summary.to_dict()["rows"]["forward"]["gpu_busy_mean_ms"] == BUSY_MS["forward"]
    # A GPU-bound loop has no launch gaps.
    summary = run(Loop(FakeGPU(), host_ms=0.0625), 20).summary()
    assert summary.launch_gap_share == pytest.approx(0.0, abs=0.01)
    assert summary.time_breakdown is not None
    assert summary.time_breakdown["launch gaps"].share == pytest.approx(summary.launch_gap_share)


def test_busy_times_and_the_gap_are_logged_with_the_means(gpu: FakeGPU) -> None:
    logger = Logger()
    run(Loop(gpu), 20, logger=logger, log_every_n_steps=5)
    assert [step for step, _ in logger.calls] == [4, 9, 14, 19]
    for _, metrics in logger.calls:
        assert metrics["phase_time/forward_gpu_busy_ms"] == BUSY_MS["forward"]
        assert metrics["phase_time/step_gpu_busy_ms"] == sum(BUSY_MS.values())
        gap = metrics["phase_time/step_ms"] - metrics["phase_time/data_ms"]
        gap -= sum(BUSY_MS.values()) - BUSY_MS["data"]
        assert metrics["phase_time/step_launch_gap_ms"] == pytest.approx(gap)


def test_spin_lasts_as_long_as_the_launches_with_a_margin(gpu: FakeGPU) -> None:
    run(Loop(gpu), 20)
    # 1.5 times the 10 ms of a step. The first spin assumes 2 GHz, later spins the measured 1 GHz.
    assert gpu.spins == [30.0, 15.0, 15.0, 15.0, 15.0]


def test_step_that_cannot_be_probed_yet_is_not_timed(gpu: FakeGPU) -> None:
    # Step 5 is the first after the warm-up, when the time of launches is not measured yet.
    timer = run(Loop(gpu), 25, warmup_steps=5, every_n_steps=5)
    assert 5 not in timer.history()["step"].tolist()


class Waiting(Slow):
    """A layer that waits for the GPU."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self._gpu.now = max(self._gpu.now, self._gpu.free_at)
        return result


@pytest.mark.parametrize("phase", ["loss", "forward"])
def test_host_wait_inside_the_step_ends_the_probing_with_a_warning(
    gpu: FakeGPU, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop, options = Loop(gpu), dict[str, Any]()
    if phase == "forward":
        loop.model, options = nn.Sequential(Waiting(gpu, 1.0, 0.25, 0.5)), {"modules": ["0"]}
    summary = run(loop, 40, wait_in_loss=phase == "loss", **options).summary()
    assert len(gpu.spins) == 3
    assert summary.probed_steps == 0
    assert summary.launch_gap_share is None
    reason = f"the host waits for the GPU inside probed steps, in `{phase}`"
    assert reason in caplog.text
    assert f"no step can be probed: {reason}" in str(summary)
    assert all(row.gpu_busy_mean_ms is None for row in summary.rows.values())


@pytest.mark.parametrize(
    ("host_ms", "options", "patched", "reason"),
    [
        (
            1.0,
            {"sync_ranks": False},
            {"lightning_gputime._session.probe.is_distributed": lambda: True},
            "ranks would wait for each other's spins; probe",
        ),
        (100.0, {}, {}, "the host takes 1000 ms to launch a step"),
        (1.0, {"_clock": None}, {}, "probes need a GPU, and it must be the current device"),
        (
            1.0,
            {},
            {"fake_gpu.FakeGPU.spin": Mock(side_effect=RuntimeError("no such kernel"))},
            "the device cannot be kept busy: RuntimeError('no such kernel')",
        ),
    ],
    ids=["several ranks", "too long to launch", "no queue", "spin that raises"],
)
def test_summary_gives_the_reason_if_no_step_can_be_probed(
    gpu: FakeGPU,
    host_ms: float,
    options: dict[str, Any],
    patched: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for path, replacement in patched.items():
        monkeypatch.setattr(path, replacement)
    summary = run(Loop(gpu, host_ms), 20, **options).summary()
    assert gpu.spins == []
    assert summary.probed_steps == 0
    assert summary.probe_failure.startswith(f"no step can be probed: {reason}")
    assert summary.steps == (18 if "no such kernel" in reason else 20)


def test_probing_adds_no_host_wait(gpu: FakeGPU) -> None:
    run(Loop(gpu), 20)
    assert len(gpu.waits) <= 20
    created = gpu.created
    run(Loop(gpu), 200)
    assert len(gpu.waits) <= 220
    assert gpu.created < 2 * created + 10


def test_probed_step_with_a_validation_is_dropped(gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    with probing(loop) as timer:
        for i, x in enumerate(loop.batches(20)):
            if i in PROBED:
                loop.model.eval()
                with torch.inference_mode():
                    loop.model(x)
                gpu.host_work(200.0)
                loop.model.train()
            loop.train(x)
            timer.step()
    summary = timer.summary()
    reason = "an evaluation runs inside every probed step"
    assert summary.probe_failure == f"no step can be probed: {reason}"
    assert (len(gpu.spins), summary.probed_steps, summary.steps) == (3, 0, 14)


def test_sampled_and_probed_steps_are_separate(gpu: FakeGPU) -> None:
    timer = run(Loop(gpu), 24, every_n_steps=4)
    # Skip probed steps and the steps after them.
    kept = [n for n in timed_indices(4, 24) if n not in PROBED and n - 1 not in PROBED]
    assert timer.history()["step"].tolist() == kept == [10, 15]
    assert timer.summary().probed_steps == 5
    assert len(gpu.waits) <= 10


def test_probes_work_in_lightning_across_epochs_and_validations(gpu: FakeGPU) -> None:
    class LaunchBound(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.gpu.host_work(20.0)  # In `other`.
            return super().training_step(batch, batch_idx)

    timer = timer_of(gpu, probe_every_n_steps=4)
    runner = trainer(timer, max_epochs=2, val_check_interval=4)
    runner.fit(LaunchBound(gpu), Loader(gpu, 8), Loader(gpu, 2))
    summary = timer.summary()
    assert timer.history()["step"].tolist() == [0, 3, 6, 7, 8, 9, 12, 15]
    assert summary.probed_steps == 3  # Step 4 contains a validation.
    assert summary.probe_failure == ""
    busy = {name: row.gpu_busy_mean_ms for name, row in summary.rows.items() if "/" not in name}
    assert busy == {**STEP_MS, "callbacks": 0.0}
    assert runner.callback_metrics["phase_time/forward_gpu_busy_ms"] == STEP_MS["forward"]


def probed_steps(every: int) -> list[int]:
    """Return the probed steps of the first 100 windows."""
    return [index for index in range(100 * every) if is_probed(index, every)]


@pytest.mark.parametrize("every", [3, 4, 5, 10, 50, 100, 1000])
def test_probed_step_of_each_window_varies(every: int) -> None:
    probed = probed_steps(every)
    assert [index // every for index in probed] == list(range(100))
    assert all(second - first >= 2 for first, second in pairwise(probed))


@pytest.mark.parametrize("period", [2, 5, 10])
@pytest.mark.parametrize("every", [50, 100, 1000])
def test_probes_are_spread_evenly_over_any_period(every: int, period: int) -> None:
    shares = Counter(index % period for index in probed_steps(every))
    assert sum(shares.values()) == 100
    assert max(shares.values()) <= 2 * 100 / period


def test_slow_host_does_not_end_the_probing(gpu: FakeGPU) -> None:
    pauses_ms = {i: 400.0 for i in range(100) if i % 5 in (0, 2)}
    summary = run(Loop(gpu), 100, pauses_ms=pauses_ms).summary()
    assert summary.probe_failure == ""
    assert 0 < summary.probed_steps < 20
    assert summary.rows["forward"].gpu_busy_mean_ms == BUSY_MS["forward"]


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_host_wait_does_not_grow_with_untimed_steps(n: int, lag: int) -> None:
    loop = Loop(FakeGPU(), host_ms=0.0625)
    timer = run(loop, 100, probe_every_n_steps=0, every_n_steps=n, _lag=lag)
    wait_ms = sum(BUSY_MS.values()) - 10 * loop.host_ms  # GPU time minus host time of a step
    assert timer.summary().host_wait_mean_ms == pytest.approx(wait_ms, rel=0.05)
