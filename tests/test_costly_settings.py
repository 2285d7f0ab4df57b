"""Costly settings, and the advice on the entries of the time breakdown that they inflate."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_gpu import FakeGPU
from fake_lightning import MemoryLogger, Model, fit
from fake_loop import Loop, hooks, train
from lightning.pytorch.callbacks import LambdaCallback
from test_diagnosis import on_gpu, timed
from torch import nn

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._diagnosis import Advice, Diagnosis
from lightning_gputime._diagnosis.diagnose import diagnose
from lightning_gputime._instrumentation import loop as boundaries
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._measurement.measurement import CostlySetting, Environment, TrainingSetup
from lightning_gputime._measurement.wall_clock import WallClockBreakdown
from lightning_gputime._output.summary import PhaseSummary
from lightning_gputime._runs.environment import CostlySettings


@pytest.fixture(autouse=True)
def _no_setting_is_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "high")
    monkeypatch.setattr("torch.backends.cudnn.benchmark", True)


@dataclass(frozen=True)
class Training:
    """A training on a GPU in float32, with the settings of a case."""

    patches: Mapping[str, Any] = field(default_factory=dict)  # Values, or results of functions.
    variables: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    loop: Mapping[str, Any] = field(default_factory=dict)
    setup: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, monkeypatch: pytest.MonkeyPatch) -> tuple[CostlySetting, ...]:
        for target, value in self.patches.items():
            is_function = callable(resolve_name(target))
            monkeypatch.setattr(target, Mock(return_value=value) if is_function else value)
        for variable, value in self.variables.items():
            monkeypatch.setenv(variable, value)
        model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(1, 1))
        defaults = {"device_type": "cuda", "precision": "float32"}
        reader = CostlySettings.of(
            Environment(**{**defaults, **self.environment}),
            boundaries.Loop(model, **self.loop),
        )
        return reader.read(replace(TrainingSetup(), **self.setup))


DETERMINISTIC = {"torch.are_deterministic_algorithms_enabled": True}
BENCHMARK = {"torch.backends.cudnn.benchmark": False}
PRECISION = {"torch.get_float32_matmul_precision": "highest"}
LIGHTNING_PRECISION = Training(PRECISION, environment={"precision": "32-true"})
LOGS_EACH_STEP = Training(loop={"every_step_log": "log_every_n_steps"})
CPU = {"device_type": "cpu"}
THREADS = {"torch.get_num_threads": 16}


BLOCKING = Training(variables={"CUDA_LAUNCH_BLOCKING": "1"})
MODEL = "Net.forward (net.py:3)"
CASES = [
    (Training({"torch.is_anomaly_enabled": True}), "detect_anomaly", MODEL),
    (Training(BENCHMARK), "cudnn.benchmark", MODEL),
    (Training(PRECISION), "float32_matmul_precision", MODEL),
    (LIGHTNING_PRECISION, "float32_matmul_precision", MODEL),
    (LOGS_EACH_STEP, "log_every_n_steps", "callbacks"),
    (BLOCKING, "CUDA_LAUNCH_BLOCKING", MODEL),
    (Training(THREADS, environment=CPU, setup={"cores": 2}), "num_threads", MODEL),
]


NET = timed("Net.forward", "net.py:3", gpu={"forward": 4.0, "backward": 3.0}, convolves=True)
HEAD = timed("Head.forward", "net.py:9", gpu={"forward": 4.0, "backward": 5.0})


def diagnosis_of(
    settings: tuple[CostlySetting, ...], *lines: LineRow, **entries_s: float
) -> Diagnosis:
    """Return the diagnosis of a fit whose first step takes as long as all other steps."""
    phases_ms = {"data": 7.0, "data/fetch": 7.0, "callbacks": 7.0, "backward/comm": 5.0}
    clock = WallClockBreakdown({"steps": 10.0, "first step": 10.0, **entries_s})
    measured = on_gpu(phases_ms, *lines, wall_clock=clock)
    setup = TrainingSetup(has_loader=True, num_workers=2, costly_settings=settings)
    return diagnose(measured, setup)


def entries_with(setting: CostlySetting, diagnosis: Diagnosis) -> list[str]:
    """Return the entries of the time breakdown that have advice on a setting."""
    assert diagnosis.time_breakdown is not None
    advice = Advice("costly_setting", setting.text, {"setting": setting.name})
    return [row.name for row in diagnosis.time_breakdown.rows if advice in row.advice]


@pytest.mark.parametrize(("training", "name", "entry"), CASES)
def test_costly_setting_is_reported_under_the_entry_it_inflates(
    training: Training, name: str, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [setting] = training.settings(monkeypatch)
    assert setting.name == name
    assert "may cost time" in setting.text
    found = diagnosis_of((setting,), replace(NET, multiplies_float32=True))
    assert entries_with(setting, found) == [entry]
    assert [advice.text for advice in found.advice].count(setting.text) == 1


@pytest.mark.parametrize(
    ("training", "lines", "is_reported"),
    [
        (Training(BENCHMARK), [NET], True),
        # Another line of the model takes longer.
        (Training(BENCHMARK), [NET, HEAD], True),
        # The line multiplies no float32 matrices, or waits for the host.
        (Training(PRECISION), [NET], False),
        (Training(BENCHMARK), [timed("Net.forward", host={"forward": 4.0}, convolves=True)], False),
        # Logs are code of callbacks.
        (LOGS_EACH_STEP, [timed("Uploads.log_metrics", host={"callbacks": 7.0})], True),
    ],
)
def test_costly_setting_is_reported_at_the_line_that_it_slows_down(
    training: Training, lines: list[LineRow], is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    [setting] = training.settings(monkeypatch)
    names = [str(lines[0]).replace("`", "")]
    assert entries_with(setting, diagnosis_of((setting,), *lines)) == names * is_reported


def test_costly_setting_is_not_reported_below_five_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diagnosis_of(Training(BENCHMARK).settings(monkeypatch), NET, validation=1000.0)
    assert found.time_breakdown is not None
    assert 0 < found.time_breakdown[MODEL].share < 0.05
    assert [advice.code for advice in found.advice] == ["evaluate_less"]


@pytest.mark.parametrize(
    "training",
    [
        Training(),
        # cuDNN is disabled, or results must be reproducible.
        Training({**DETERMINISTIC, **BENCHMARK}),
        Training({**BENCHMARK, "torch.backends.cudnn.enabled": False}),
        Training({**BENCHMARK, "torch.backends.cudnn.deterministic": True}),
        # TF32 exists on NVIDIA GPUs from Ampere on, and only float32 products use it.
        Training(PRECISION, environment={"precision": "bf16-mixed"}),
        Training({**PRECISION, "torch.cuda.get_device_capability": (7, 5)}),
        Training({**PRECISION, "torch.version.hip": "6.4"}),
        Training(THREADS, environment=CPU, setup={"cores": 16}),
        Training(THREADS, environment=CPU),  # The number of cores is unknown.
        Training(THREADS, setup={"cores": 2}),  # Operations on a GPU use no threads.
        Training(variables={"CUDA_LAUNCH_BLOCKING": "0"}),
        # There is no GPU.
        replace(BLOCKING, environment=CPU),
        Training(BENCHMARK, environment=CPU),
        Training(PRECISION, environment=CPU),
    ],
)
def test_cheap_setting_is_not_reported(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    assert training.settings(monkeypatch) == ()


def test_tf32_is_read_from_the_newer_torch_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    reader = CostlySettings(Environment(device_type="cuda", precision="float32"))
    monkeypatch.setattr("torch.get_float32_matmul_precision", fail)
    names = []
    for precision in ("ieee", "tf32"):
        matmul = type("Matmul", (), {"fp32_precision": precision})
        monkeypatch.setattr("torch.backends.cuda.matmul", matmul)
        names.append([setting.name for setting in reader.read(TrainingSetup())])
    assert names == [["float32_matmul_precision"], []]


def test_unreadable_setting_has_no_advice(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.is_anomaly_enabled", lambda: True)
    unreadable = Mock(side_effect=RuntimeError("not yet"))
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", unreadable)
    summary = train(loop, 3).summary()
    assert summary.steps == 3
    assert names_in(summary) == ["detect_anomaly"]


# Through the public API


def names_in(summary: PhaseSummary) -> list[str]:
    """Return the costly settings in the JSON of a summary."""
    advice = summary.to_dict()["diagnosis"]["advice"]
    return [item["parameters"]["setting"] for item in advice if item["code"] == "costly_setting"]


def test_plain_loop_reports_its_costly_settings(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.is_anomaly_enabled", lambda: True)
    monkeypatch.setattr("torch.get_num_threads", lambda: 10_000)
    summary = train(loop, 3).summary()
    assert names_in(summary) == ["num_threads", "detect_anomaly"]
    assert "detect_anomaly=True may cost time" in str(summary)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_costly_setting_is_read_inside_the_loop(loop: Loop) -> None:
    def run(timer: GPUPhaseHooks, turn_on_after: int | None = None) -> None:
        for n, x in enumerate(timer.steps(loop.batches(3))):
            loop.train(x)
            if n == turn_on_after:
                torch.autograd.set_detect_anomaly(True)

    with hooks(loop) as around_the_loop, torch.autograd.detect_anomaly():
        run(around_the_loop)
    with torch.autograd.detect_anomaly():
        before_the_loop = hooks(loop).attach()
    run(before_the_loop)
    before_the_loop.remove()
    with hooks(loop) as from_the_middle:
        run(from_the_middle, turn_on_after=1)
    torch.autograd.set_detect_anomaly(False)
    timers = (around_the_loop, before_the_loop, from_the_middle)
    found = [names_in(timer.summary()) for timer in timers]
    assert found == [["detect_anomaly"], [], ["detect_anomaly"]]


@pytest.mark.parametrize(
    ("every_n_steps", "logs", "callback_ms", "names"),
    [
        (1, True, 20.0, ["log_every_n_steps"]),
        (1, True, 0.0, []),
        (2, True, 20.0, []),
        (1, False, 20.0, []),
    ],
)
def test_lightning_reports_costly_logs_of_each_step(
    every_n_steps: int, logs: bool, callback_ms: float, names: list[str], gpu: FakeGPU
) -> None:
    slow = LambdaCallback(on_train_batch_end=lambda *_: gpu.host_work(callback_ms))
    logger = MemoryLogger() if logs else False
    options: dict[str, Any] = {"log_every_n_steps": every_n_steps, "logger": logger}
    options["callbacks"] = [slow]
    assert names_in(fit(gpu, Model(gpu), 6, **options).summary()) == names


@pytest.mark.filterwarnings("ignore")  # Transformers warns.
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"logging_steps": 2}, set()),
        ({"logging_steps": 1}, {"logging_steps"}),
        ({"logging_steps": 1, "logging_strategy": "epoch"}, set()),
    ],
)
def test_transformers_reports_its_costly_options(
    options: dict[str, Any], names: set[str], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from test_huggingface import train_gpt

    from lightning_gputime.huggingface import TransformersPhaseTimer

    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    train_gpt([timer], tmp_path, **options)
    assert {setting.name for setting in timer.summary().setup.costly_settings} == names
