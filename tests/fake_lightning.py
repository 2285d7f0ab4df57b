"""A LightningModule and its data that take known times on a fake GPU."""

from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
from fake_gpu import Adder, FakeGPU, Layer, batches, work
from torch import Tensor

from lightning_gputime import GPUPhaseTimer


class Loader:
    """A loader whose batches take the device 1 ms each to copy."""

    def __init__(self, gpu: FakeGPU, n: int) -> None:
        self.gpu, self.n = gpu, n

    def __iter__(self) -> Iterator[Tensor]:
        return batches(self.gpu, self.n, copy_ms=1.0)

    def __len__(self) -> int:
        return self.n


class Model(pl.LightningModule):
    """A model whose step takes `STEP_MS`."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.net = Layer(gpu, 4.0, 7.75)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.gpu.work(0.125)
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def loss(self, x: Tensor) -> Tensor:
        return work(self(x), self.gpu, 0.5, 0.25).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch).sum())

    def configure_optimizers(self) -> Any:
        return Adder(self.parameters(), self.gpu, 2.0)


class MemoryLogger(pl.loggers.logger.DummyLogger):
    """A logger that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, dict(metrics)))

    def phase_times(self) -> list[tuple[int | None, dict[str, float]]]:
        return [
            (step, metrics)
            for step, metrics in self.calls
            if any(key.startswith("phase_time/") for key in metrics)
            and "phase_time/fit/wall_s" not in metrics
        ]


class SavingTrainer(pl.Trainer):
    """A trainer whose checkpoints take the host 40 ms."""

    gpu: FakeGPU

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        profiler: Any = self.profiler  # type: ignore[attr-defined]  # has no hint
        with profiler.profile("save_checkpoint"):  # as in Lightning
            self.gpu.host_work(40.0)


def timer_of(gpu: FakeGPU, **options: Any) -> GPUPhaseTimer:
    """Return a timer that prints nothing and has no warm-up."""
    return GPUPhaseTimer(
        _clock=gpu, print_summary=False, **{"warmup_steps": 0, "lines": False, **options}
    )


def trainer(*callbacks: pl.Callback, kind: Any = pl.Trainer, **options: Any) -> pl.Trainer:
    made: pl.Trainer = kind(
        **{
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
            "callbacks": list(callbacks),
            **options,
        }
    )
    return made


def fit(
    gpu: FakeGPU,
    model: pl.LightningModule,
    n: int = 3,
    *,
    timer: GPUPhaseTimer | None = None,
    callbacks: Iterable[pl.Callback] = (),
    first: bool = False,
    validation: int = 0,
    **options: Any,
) -> GPUPhaseTimer:
    """Train a model on `n` batches and return its timer.

    Other callbacks follow the timer, or precede it if `first`.
    """
    timer = timer_of(gpu) if timer is None else timer
    ordered = [*callbacks, timer] if first else [timer, *callbacks]
    validation_loader = Loader(gpu, validation) if validation else None
    trainer(*ordered, **options).fit(model, Loader(gpu, n), validation_loader)
    return timer


def changed(gpu: FakeGPU, /, **methods: Any) -> Model:
    """Return a model in which some methods are replaced."""
    model: Model = type("Changed", (Model,), methods)(gpu)
    return model


def callback(name: str = "Other", /, **hooks: Any) -> pl.Callback:
    """Return a callback with these hooks."""
    made: pl.Callback = type(name, (pl.Callback,), hooks)()
    return made
