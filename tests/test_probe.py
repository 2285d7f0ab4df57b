from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, raw, steps
from fake_lightning import Loader, Model, trainer
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, StepTimes, _probe
from lightning_gputime._events import HostClock
from lightning_gputime._probe import Probe
from lightning_gputime._raw import Sums

BUSY = {"data": 0.5, "forward": 0.25, "loss": 0.125, "backward": 0.5, "optimizer": 0.0625}


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
    """A loop that needs the host 10 ms a step, and the device `BUSY`."""

    def __init__(self, gpu: FakeGPU, host_ms: float = 1.0) -> None:
        self.gpu = gpu
        self.host_ms = host_ms
        self.model = Slow(gpu, host_ms, 0.25, 0.5)
        self.optimizer = Adder(self.model.parameters(), gpu, 0.0625)

    def batches(self, n: int) -> Iterator[Tensor]:
        for _ in range(n):
            self.gpu.work(0.5, host_ms=4 * self.host_ms)
            yield torch.ones(1, 2)

    def train(self, x: Tensor, wait_in_loss: bool = False) -> None:
        loss = self.model(x).sum()
        self.gpu.work(0.125, host_ms=2 * self.host_ms)
        if wait_in_loss:
            self.gpu.now = max(self.gpu.now, self.gpu.free_at)
        loss.backward()
        self.gpu.host_work(2 * self.host_ms)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Logger:
    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append((step, metrics))


def run(loop: Loop, n: int, wait_in_loss: bool = False, **options: Any) -> GPUPhaseHooks:
    options = {"warmup_steps": 0, "probe_every_n_steps": 5, "clock": loop.gpu, **options}
    with GPUPhaseHooks(loop.model, loop.optimizer, **options) as timer:
        for x in timer.steps(loop.batches(n)):
            loop.train(x, wait_in_loss)
    return timer


def test_a_probed_step_is_the_work_alone(gpu: FakeGPU) -> None:
    summary = run(Loop(gpu), 20).summary()
    busy = {name: row.busy_mean_ms for name, row in summary.rows.items()}
    assert busy == {**BUSY, "other": 0.0}
    assert summary.step.busy_mean_ms == sum(BUSY.values())
    assert summary.probed_steps == 4
    assert summary.step.mean_ms == pytest.approx(10.0, rel=0.01)


def test_probed_steps_are_in_no_other_statistics_and_neither_are_those_after(gpu: FakeGPU) -> None:
    seen: list[StepTimes] = []
    timer = run(Loop(gpu), 20, on_step=seen.append)
    without = run(Loop(FakeGPU()), 20, probe_every_n_steps=0)
    # Steps 2, 7, 12, 17 are probed.
    kept = [n for n in range(20) if n % 5 not in (2, 3)]
    assert timer.history()["step"].tolist() == kept == [step.step for step in seen]
    assert steps(timer) == [step for n, step in enumerate(steps(without)) if n in kept]
    assert timer.summary().steps == len(kept)


def test_the_share_of_launch_gaps_is_told(gpu: FakeGPU) -> None:
    summary = run(Loop(gpu), 20).summary()
    # All but `data`, which lasts 4 ms.
    as_run = sum(row.mean_ms for name, row in summary.rows.items() if name != "data")
    busy = sum(BUSY.values()) - BUSY["data"]
    assert summary.gap_share == pytest.approx((as_run - busy) / summary.step.mean_ms)
    sentence = "of this step is launch gaps: batch more, use CUDA graphs or torch.compile"
    assert f"{summary.gap_share:.0%} {sentence}" in str(summary)
    header = str(summary).splitlines()[2].split()
    assert header == ["phase", "mean", "share", "p50", "p95", "max", "host", "steps", "busy"]
    assert summary.to_dict()["rows"]["forward"]["busy_mean_ms"] == BUSY["forward"]


def test_a_device_that_is_busy_anyway_has_no_gaps(gpu: FakeGPU) -> None:
    summary = run(Loop(gpu, host_ms=0.0625), 20).summary()
    assert summary.gap_share == pytest.approx(0.0, abs=0.01)
    assert "0% of this step is launch gaps\n" in f"{summary}\n"


def test_busy_times_and_the_gap_are_logged_beside_the_means(gpu: FakeGPU) -> None:
    logger = Logger()
    run(Loop(gpu), 20, logger=logger, log_every_n_steps=5)
    assert [step for step, _ in logger.calls] == [4, 9, 14, 19]
    for _, metrics in logger.calls:
        assert metrics["phase_time/forward_busy_ms"] == BUSY["forward"]
        assert metrics["phase_time/step_busy_ms"] == sum(BUSY.values())
        gap = metrics["phase_time/step_ms"] - sum(BUSY.values())
        assert metrics["phase_time/step_gap_ms"] == pytest.approx(gap)


def test_the_spin_is_as_long_as_the_launches_with_a_margin(gpu: FakeGPU) -> None:
    run(Loop(gpu), 20)
    # The first spin assumes 2 GHz, the later ones know that it is 1.
    assert gpu.spins == [30.0, 15.0, 15.0, 15.0]


def test_warm_up_is_not_probed(gpu: FakeGPU) -> None:
    timer = run(Loop(gpu), 20, warmup_steps=8)
    assert timer.summary().probed_steps == 2


def test_a_host_wait_inside_the_step_is_told_and_ends_the_probing(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    summary = run(Loop(gpu), 40, wait_in_loss=True).summary()
    assert len(gpu.spins) == 3
    assert summary.probed_steps == 0
    assert summary.gap_share is None
    told = "the host waits for the GPU inside them, in `loss`"
    assert told in caplog.text
    assert f"no step can be probed: {told}" in str(summary)
    assert all(row.busy_mean_ms is None for row in summary.rows.values())


def test_steps_that_other_ranks_may_probe_are_left_out(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_probe, "is_distributed", lambda: True)
    timer = run(Loop(gpu), 25, wait_in_loss=True, sync_ranks=False)
    assert len(gpu.spins) == 3
    kept = [n for n in range(25) if n % 5 != 2 and n not in (3, 8, 13)]
    assert timer.history()["step"].tolist() == kept


def test_a_host_that_is_slow_once_is_no_wait(gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    with GPUPhaseHooks(
        loop.model, loop.optimizer, clock=gpu, warmup_steps=0, probe_every_n_steps=5
    ) as timer:
        for i, x in enumerate(timer.steps(loop.batches(20))):
            gpu.host_work(100.0 if i == 7 else 0.0)
            loop.train(x)
    summary = timer.summary()
    assert summary.probed_steps == 3
    assert summary.probe_failure == ""
    assert summary.rows["forward"].busy_mean_ms == BUSY["forward"]


def test_a_step_too_long_to_launch_is_not_probed(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    summary = run(Loop(gpu, host_ms=100.0), 10).summary()
    assert gpu.spins == []
    assert summary.probe_failure == "no step can be probed: the host takes 1000 ms to launch one"


def test_without_a_queue_no_step_is_probed(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGPU()
    summary = run(Loop(gpu), 10, clock=HostClock()).summary()
    assert summary.probed_steps == 0
    assert "this device has no queue that could be filled" in caplog.text


def test_the_one_wait_of_a_step_stays_one(gpu: FakeGPU) -> None:
    run(Loop(gpu), 20)
    assert len(gpu.waits) <= 20
    assert gpu.created < 50


def test_a_validation_inside_a_probed_step_counts_neither_way(gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    with GPUPhaseHooks(
        loop.model, loop.optimizer, clock=gpu, warmup_steps=0, probe_every_n_steps=5
    ) as timer:
        for i, x in enumerate(loop.batches(20)):
            if i % 5 == 2:
                loop.model.eval()
                with torch.no_grad():
                    loop.model(x)
                gpu.host_work(200.0)
                loop.model.train()
            loop.train(x)
            timer.step()
    summary = timer.summary()
    assert summary.probed_steps == 0
    assert summary.probe_failure == ""
    assert summary.steps == 12


def test_one_step_in_n_and_probed_ones(gpu: FakeGPU) -> None:
    timer = run(Loop(gpu), 24, every_n_steps=4)
    assert timer.history()["step"].tolist() == [11, 15, 19]  # Not 3, 7, 23: after a probed one.
    assert timer.summary().probed_steps == 5


@pytest.mark.parametrize("every", [1, 2, -1])
def test_too_many_probes_are_refused(every: int) -> None:
    with pytest.raises(ValueError, match=f"probe_every_n_steps must be 0 or .*, got {every}"):
        GPUPhaseTimer(probe_every_n_steps=every)


class LaunchBound(Model):
    """A model whose step takes the host 20 ms, in `other`."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.gpu.host_work(20.0)
        return super().training_step(batch, batch_idx)


def test_in_lightning_across_epochs_and_validations(gpu: FakeGPU) -> None:
    timer = GPUPhaseTimer(clock=gpu, summary=False, warmup_steps=0, probe_every_n_steps=4)
    runner = trainer(timer, max_epochs=2, val_check_interval=4)
    runner.fit(LaunchBound(gpu), Loader(gpu, 8), Loader(gpu, 2))
    summary = timer.summary()
    assert timer.history()["step"].tolist() == [0, 1, 2, 5, 6, 9, 10, 13, 14]
    assert summary.probed_steps == 4
    assert summary.probe_failure == ""
    assert {name: row.busy_mean_ms for name, row in summary.rows.items()} == STEP_MS
    assert runner.callback_metrics["phase_time/forward_busy_ms"] == STEP_MS["forward"]


@pytest.mark.parametrize("every", [3, 4, 5, 10, 50, 75, 100, 150, 1000])
def test_steps_after_a_log_are_not_probed(every: int) -> None:
    probe = Probe(FakeGPU(), every, 0, 50)
    probe.enter(0)
    due = [number for number in range(10 * every) if probe.is_due(number)]
    assert len(due) == 10
    assert [number for number in due if number % 50 == 0] == []


def test_a_wait_names_the_phase_that_took_the_host_longest() -> None:
    probe, normal = Probe(FakeGPU(), 5, 0, 50), Sums()
    normal.add([raw(0, forward=1.0, loss=1.0)])
    probe.number = 2
    for number in (2, 7, 12):
        step = raw(number, forward=1.0, loss=3.0)._replace(filled=False)
        assert probe.take([step], normal) == []
    assert "in `loss`" in probe.failure
