"""The example that measures energy, with a fake counter in place of the GPU's."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_loop import Logger, Loop, hooks

WATTS = 400.0


class Counter(SimpleNamespace):
    """A fake NVML of a GPU that always draws `WATTS`."""

    calls: list[str]

    def __init__(self, loop: Loop) -> None:
        super().__init__(
            calls=[],
            nvmlInit=lambda: self.calls.append("open"),
            nvmlShutdown=lambda: self.calls.append("close"),
            nvmlDeviceGetHandleByUUID={"GPU-abc": 7}.__getitem__,
            nvmlDeviceGetTotalEnergyConsumption=self.read_mj,
        )
        self.gpu = loop.gpu

    def read_mj(self, handle: int) -> float:
        assert handle == 7
        self.calls.append("read")
        return self.gpu.host_ns() / 1e6 * WATTS


@pytest.fixture
def energy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    return importlib.import_module("energy_meter")


@pytest.fixture
def counter(loop: Loop, energy: Any, monkeypatch: pytest.MonkeyPatch) -> Counter:
    found = Counter(loop)
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(energy, "time", SimpleNamespace(monotonic=lambda: loop.gpu.host_ns() / 1e9))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    properties = {1: SimpleNamespace(uuid="abc")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    return found


def train(loop: Loop, n: int, **options: Any) -> tuple[list[dict[str, float]], str]:
    logger, meter = Logger(), sys.modules["energy_meter"].EnergyMeter()
    with hooks(loop, observers=[meter], logger=logger, **options) as timer:
        for x in timer.steps(loop.batches(n)):
            loop.train(x)
            loop.gpu.host_work(15.625)
    return [metrics for _, metrics in logger.calls], str(timer.summary())


def test_energy_of_a_step_follows_from_the_mean_power(loop: Loop, counter: Counter) -> None:
    logs, summary = train(loop, 400, log_every_n_steps=100)
    for metrics in logs:
        assert metrics["phase_time/power_w"] == pytest.approx(WATTS)
        step_ms, items_per_sec = metrics["phase_time/step_ms"], metrics["phase_time/items_per_sec"]
        assert metrics["phase_time/energy_j"] == pytest.approx(WATTS * step_ms / 1e3)
        assert metrics["phase_time/items_per_j"] == pytest.approx(items_per_sec / WATTS)
    assert "6.25 J per step, at 400 W, 0.16 items per joule" in summary
    # The counter is read at the start and at each log, but in no step.
    assert (counter.calls, len(logs)) == (["open", *["read"] * 5, "close"], 4)


def test_window_too_short_to_measure_repeats_the_last_power(loop: Loop, counter: Counter) -> None:
    # Steps of 16 ms: most have no new reading.
    logs, _ = train(loop, 200, log_every_n_steps=1)
    assert {round(log.get("phase_time/power_w", WATTS), 6) for log in logs} == {WATTS}
    assert "phase_time/power_w" not in logs[0]
    assert "phase_time/power_w" in logs[-1]


@pytest.mark.filterwarnings("ignore")
def test_energy_without_a_gpu_warns_and_logs_nothing(
    loop: Loop, counter: Counter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "current_device", fail)
    logs, summary = train(loop, 100, log_every_n_steps=50)
    assert not any("power" in name for metrics in logs for name in metrics)
    assert " J per step" not in summary
    assert caplog.text.count("No CUDA GPUs are available") == 1


def test_energy_names_the_missing_package(energy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError, match="pip install nvidia-ml-py"):
        energy.EnergyMeter()
