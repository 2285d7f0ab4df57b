"""A plain loop and its logger that take known times on a fake GPU."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fake_gpu import Adder, FakeGPU, Layer, batches, work
from torch import Tensor

from lightning_gputime import GPUPhaseHooks, Run, SlowStep
from lightning_gputime._measurement.measurement import Environment
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.slow import SlowEvidence
from lightning_gputime._output.summary import PhaseSummary, summary_of
from lightning_gputime._phases import StepRecord
from lightning_gputime._session.schedule import Schedule, Windows


class Loop:
    """A model, its optimizer, and a standard step on them that takes `STEP_MS`."""

    def __init__(self, gpu: FakeGPU, model: Any = None) -> None:
        self.gpu = gpu
        self.model: Any = Layer(gpu, 4.0, 7.75) if model is None else model
        self.optimizer: Any = Adder(self.model.parameters(), gpu, 2.0)
        self.optimizers: list[Any] = []  # Replaces `optimizer` if there are several.
        self.other: Any = None  # An object that the timer is not given.
        self.number = 0  # Number of the batch.

    def batches(self, n: int) -> Any:
        return batches(self.gpu, n, copy_ms=1.0)

    def tail(self, out: Tensor) -> Tensor:
        return work(out, self.gpu, 0.5, 0.25).sum()

    def loss(self, x: Tensor) -> Tensor:
        return self.tail(self.model(x))

    def micro_batch(self, x: Tensor) -> None:
        self.gpu.work(0.125)
        self.loss(x).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, x: Tensor) -> None:
        self.micro_batch(x)
        self.update()

    def train_all(self, batches: Iterable[Tensor]) -> None:
        for x in batches:
            self.train(x)

    def train_on(self, x: Tensor) -> None:
        """Train without the 0.125 ms of other work before the model."""
        self.loss(x).backward()
        self.update()


class Logger:
    """A logger that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append((step, metrics))


def with_facts(summary: PhaseSummary, **facts: Any) -> PhaseSummary:
    """Return a summary with other values of some fields of its measurement."""
    return replace(summary, measurement=replace(summary.measurement, **facts))


def evidence(*steps: SlowStep) -> list[SlowEvidence]:
    """Return evidence on slow steps with given causes."""
    return [SlowEvidence(step.excess_ms, partial(replace, step)) for step in steps]


def hooks(loop: Loop, **options: Any) -> GPUPhaseHooks:
    """Return a timer of the loop, on its fake GPU and without a warm-up."""
    return GPUPhaseHooks(
        loop.model,
        loop.optimizer,
        _clock=loop.gpu,
        # Without examined steps, all of the first steps are timed.
        **{"warmup_steps": 0, "lines": False, **options},
    )


def train(loop: Loop, n: int, **options: Any) -> GPUPhaseHooks:
    """Train on `n` batches, and return the timer."""
    with hooks(loop, **options) as timer:
        loop.train_all(timer.steps(loop.batches(n)))
    return timer


def timed_indices(every: int, n: int) -> list[int]:
    """Return which of the first `n` steps are timed if no long step recurs."""
    schedule = Schedule(Windows(interval=every))
    return [index for index in range(n) if schedule.next_timed(index) == index]


def run_of(
    records: Iterable[StepRecord], *, warmup_steps: int = 0, on_host_clock: bool = False
) -> Run:
    """Return a run of these steps, as a timer saves it."""
    results = Results(10_000, warmup_steps, on_host_clock)
    if steps := [*records]:
        results.add(steps)
    return Run(Environment(), *results.history_and_warmup(), summary_of(results))


def training_arguments(path: Path, **options: Any) -> Any:
    """Return arguments of transformers' Trainer for 4 steps on the CPU, without any output."""
    import transformers

    defaults: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
        "max_grad_norm": 0.0,
        "logging_nan_inf_filter": False,
    }
    return transformers.TrainingArguments(str(path), **{**defaults, **options})
