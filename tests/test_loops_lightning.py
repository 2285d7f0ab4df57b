"""Features of Lightning's loop, with the exact times of every phase."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from conftest import hooks_of
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, between_batches, steps
from fake_lightning import Loader, Model, fit, timer_of, trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor


@pytest.fixture(autouse=True)
def _nothing_is_left_on_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares what hangs on a model before and after each fit of a test."""
    run = pl.Trainer.fit

    def checked(self: pl.Trainer, model: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        before = hooks_of(model)
        run(self, model, *args, **kwargs)
        assert hooks_of(model) == before
        assert not any("zero_grad" in vars(optimizer) for optimizer in self.optimizers)

    monkeypatch.setattr(pl.Trainer, "fit", checked)


# Precision and clipping


def fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "32-true"},
        {"precision": "bf16-mixed"},
        {"plugins": [fp16]},
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    ],
    ids=["fp32", "bf16", "fp16", "clipping by norm", "clipping by value"],
)
def test_precision_and_clipping_keep_the_phases(gpu: FakeGPU, options: dict[str, Any]) -> None:
    options = {
        **options,
        **({"plugins": [make() for make in options["plugins"]]} if "plugins" in options else {}),
    }
    timer = fit(gpu, Model(gpu), **options)
    assert steps(timer) == [STEP_MS] * 3
    assert timer.summary().skipped_updates == 0


def test_configure_gradient_clipping_is_optimizer(gpu: FakeGPU) -> None:
    class Clips(Model):
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            gpu.work(3.0)

    assert steps(fit(gpu, Clips(gpu))) == [{**STEP_MS, "optimizer": 5.0}] * 3


def test_skipped_update_is_marked_and_counted(gpu: FakeGPU) -> None:
    class Overflows(Model):
        def loss(self, x: Tensor) -> Tensor:
            loss = super().loss(x)
            return loss * float("inf") if self.global_step == 1 else loss

    timer = timer_of(gpu, _lag=0)
    skipped: list[bool] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            assert timer.last_step is not None
            skipped.append(timer.last_step.skipped_update)

    fit(gpu, Overflows(gpu), timer=timer, callbacks=[Look()], plugins=[fp16()])
    assert skipped == [False, True, False]
    without_update = {name: ms for name, ms in STEP_MS.items() if name != "optimizer"}
    assert steps(timer) == [STEP_MS, without_update, STEP_MS]
    assert timer.summary().skipped_updates == 1
    assert "; 1 updates skipped" in str(timer.summary())


@pytest.mark.parametrize("fused", [False, True])
def test_fused_optimizer_is_timed(fused: bool) -> None:
    class Fused(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), fused=fused)

    gpu = FakeGPU()
    assert steps(fit(gpu, Fused(gpu))) == [{**STEP_MS, "optimizer": 0.0}] * 3


# Accumulation, and steps without a backward


ONE = {name: ms for name, ms in STEP_MS.items() if name != "optimizer"}


def micro_batches(n: int) -> dict[str, float]:
    return {**{name: n * ms for name, ms in ONE.items()}, "optimizer": 2.0}


@pytest.mark.parametrize(("every", "groups"), [(2, [2, 2, 1]), (3, [3, 2]), (5, [5]), (7, [5])])
@pytest.mark.parametrize("plugins", [None, fp16])
def test_accumulation_with_a_short_last_group(
    gpu: FakeGPU, every: int, groups: list[int], plugins: Any
) -> None:
    plugin = [plugins()] if plugins else None
    timer = fit(gpu, Model(gpu), n=5, accumulate_grad_batches=every, plugins=plugin, max_epochs=2)
    assert steps(timer) == [micro_batches(n) for n in groups] * 2
    assert timer.history()["step"].tolist() == list(range(2 * len(groups)))
    assert timer.summary().skipped_updates == 0


def test_gradient_accumulation_scheduler_changes_the_steps(gpu: FakeGPU) -> None:
    scheduler = GradientAccumulationScheduler({0: 2, 1: 3})
    timer = fit(gpu, Model(gpu), n=6, max_epochs=2, callbacks=[scheduler])
    assert steps(timer) == [micro_batches(2)] * 3 + [micro_batches(3)] * 2


# Manual optimization


class Manual(Model):
    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)
        self.automatic_optimization = False
        self.critic = Layer(gpu, 1.0, 2.0)

    def configure_optimizers(self) -> Any:
        first = Adder(self.net.parameters(), self.gpu, 2.0)
        second = Adder(self.critic.parameters(), self.gpu, 4.0)
        return [first, second], []


def test_skipped_update_in_manual_optimization_ends_the_step(gpu: FakeGPU) -> None:
    class Overflows(Manual):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()[0]  # type: ignore[index]
            loss = self.loss(batch) * (float("inf") if batch_idx == 1 else 1.0)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    timer = fit(gpu, Overflows(gpu), plugins=[fp16()])
    assert len(timer.history()) == 3
    assert timer.summary().skipped_updates == 1


# The course of a run


def test_fetch_of_a_dataloader_iter_step_is_other(gpu: FakeGPU) -> None:
    class Fetches(Model):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    with pytest.warns(UserWarning, match="dataloader_iter"):
        timer = fit(gpu, Fetches(gpu))
    # The first batch is fetched before the step, to learn whether it is the last.
    assert len(timer.history()) == 3
    for step in steps(timer):
        assert {name: step[name] for name in ("forward", "loss", "backward", "optimizer")} == {
            name: STEP_MS[name] for name in ("forward", "loss", "backward", "optimizer")
        }


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_lr_scheduler_is_data(gpu: FakeGPU, interval: str) -> None:
    class Schedules(Model):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.param_groups[0]["lr"] = 1.0
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            return [optimizer], [{"scheduler": scheduler, "interval": interval}]

    assert steps(fit(gpu, Schedules(gpu), max_epochs=2)) == [STEP_MS] * 6


INSIDE = {
    "on_before_zero_grad": 1.0,
    "on_before_backward": 32.0,
    "on_after_backward": 64.0,
    "on_before_optimizer_step": 128.0,
}


@pytest.mark.parametrize("first", [True, False])
def test_work_of_other_callbacks_in_the_same_hooks(gpu: FakeGPU, first: bool) -> None:
    class Works(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            gpu.work(16.0)

        def on_before_zero_grad(self, *_: Any) -> None:
            gpu.work(1.0)

        def on_before_backward(self, *_: Any) -> None:
            gpu.work(32.0)

        def on_after_backward(self, *_: Any) -> None:
            gpu.work(64.0)

        def on_before_optimizer_step(self, *_: Any) -> None:
            gpu.work(128.0)

        def on_train_batch_end(self, *_: Any) -> None:
            gpu.work(256.0)

    timer = timer_of(gpu)
    callbacks = [Works(), timer] if first else [timer, Works()]
    trainer(*callbacks).fit(Model(gpu), Loader(gpu, 3))
    # Callbacks before the timer belong to the step, the others to the next step.
    took = [497.0 if first else 241.0, 497.0, 497.0]
    assert steps(timer) == [{**STEP_MS, "callbacks": ms} for ms in took]
    history = timer.history()
    for hook, ms in INSIDE.items():
        assert history[f"callbacks/Works.{hook}_ms"].tolist() == [ms] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
        pytest.param(
            lambda: pl.callbacks.WeightAveraging(),
            marks=pytest.mark.skipif(
                not hasattr(pl.callbacks, "WeightAveraging"), reason="new in Lightning 2.6"
            ),
        ),
    ],
    ids=["SWA", "EMA"],
)
def test_weight_averaging_copies_the_model_without_our_hooks(
    gpu: FakeGPU, make: Callable[[], pl.Callback]
) -> None:
    class Plain(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    timer = fit(gpu, Plain(gpu), max_epochs=3, callbacks=[make()])
    assert steps(timer) == [{**STEP_MS, "optimizer": 0.0}] * 9


def test_limits_of_a_fit_keep_the_last_step(gpu: FakeGPU) -> None:
    assert steps(fit(gpu, Model(gpu), n=5, max_epochs=-1, max_steps=7)) == [STEP_MS] * 7

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step >= 3

    assert steps(fit(gpu, Model(gpu), n=5, max_epochs=4, callbacks=[Stops()])) == [STEP_MS] * 3

    timer = timer_of(gpu)
    data: Any = torch.ones(8, 2)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)
    trainer(timer, overfit_batches=2, max_epochs=3).fit(Model(gpu), loader)
    assert steps(timer) == [{**STEP_MS, "data": 0.0}] * 6


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
def test_trainer_profilers_run_at_the_same_time(
    gpu: FakeGPU, profiler: str, tmp_path: Path
) -> None:
    timer = fit(gpu, Model(gpu), profiler=profiler, default_root_dir=tmp_path)
    assert steps(timer) == [STEP_MS] * 3


class Sized(Model):
    """A model with what the finders tune, on real data."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)
        self.batch_size, self.lr = 2, 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        data: Any = torch.ones(32, 2)
        return torch.utils.data.DataLoader(data, batch_size=self.batch_size)

    val_dataloader = train_dataloader


@pytest.mark.parametrize(
    "make",
    [
        lambda: BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=2),
        lambda: LearningRateFinder(num_training_steps=5),
    ],
    ids=["BatchSizeFinder", "LearningRateFinder"],
)
@pytest.mark.filterwarnings("ignore")
def test_finders_trials_are_not_steps(
    gpu: FakeGPU, make: Callable[[], pl.Callback], tmp_path: Path
) -> None:
    timer = timer_of(gpu)
    runner = trainer(timer, make(), default_root_dir=tmp_path, enable_checkpointing=True)
    model = Sized(gpu)
    runner.fit(model)
    assert len(timer.history()) == runner.num_training_batches
    assert steps(timer)[-1] == {**STEP_MS, "data": 0.0, "optimizer": 0.0}


def test_pytorch_lightning_trainer_is_timed(gpu: FakeGPU) -> None:
    class Net(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Layer(gpu, 4.0, 8.0)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch).sum()
            return loss

        def configure_optimizers(self) -> Any:
            return Adder(self.parameters(), gpu, 2.0)

    class Other(pytorch_lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            gpu.work(0.5)

    timer = timer_of(gpu)
    pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[timer, Other()],  # type: ignore[list-item]
    ).fit(Net(), Loader(gpu, 3))
    phases = [{name: ms for name, ms in step.items() if "/" not in name} for step in steps(timer)]
    expected = {
        "data": 1.0,
        "callbacks": 0.5,
        "forward": 4.0,
        "loss": 0.0,
        "backward": 8.0,
        "optimizer": 2.0,
    }
    assert phases == [{**expected, "other": 0.0}] * 3


@pytest.mark.parametrize("is_first", [True, False])
def test_optimizer_of_a_callback_ends_no_step(gpu: FakeGPU, is_first: bool) -> None:
    class Probed(Model):
        def configure_optimizers(self) -> Any:
            return Adder(self.net.parameters(), gpu, 2.0)

    model = Probed(gpu)
    model.probe = Layer(gpu, 2.0, 1.0)
    optimizer = Adder(model.probe.parameters(), gpu, 5.0)

    class Probe(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            optimizer.step()

    timer = timer_of(gpu)
    callbacks = [Probe(), timer] if is_first else [timer, Probe()]
    trainer(*callbacks, accumulate_grad_batches=3).fit(model, Loader(gpu, 6))
    assert timer.history()["step"].tolist() == [0, 1]
    assert [(step["forward"], step["optimizer"]) for step in steps(timer)] == [(12.0, 2.0)] * 2


def test_module_hook_at_an_epoch_start_is_not_data_fetch(gpu: FakeGPU) -> None:
    class Clusters(Model):
        def on_train_epoch_start(self) -> None:
            gpu.work(200.0)

    timer = fit(gpu, Clusters(gpu), n=3)
    assert [parts["data/fetch"] for parts in between_batches(timer)] == [1.0] * 3


def test_manual_accumulation_reaches_across_epochs(gpu: FakeGPU) -> None:
    class Manual(Model):
        batches = 0

        def __init__(self) -> None:
            super().__init__(gpu)
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            self.batches += 1
            if self.batches % 4 == 0:
                optimizer: Any = self.optimizers()
                optimizer.step()

    class Slow(pl.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            gpu.work(1000.0)

    timer = fit(gpu, Manual(), n=6, max_epochs=2, callbacks=[Slow()])
    assert [step["forward"] for step in steps(timer)] == [16.0] * 3
    assert timer.history()["step_ms"].max() < 100.0


def test_model_call_between_the_backward_and_the_update(gpu: FakeGPU) -> None:
    class Looks(Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            with torch.no_grad():
                self.net(torch.ones(1, 2))

    phases = [
        {name: item for name, item in step.items() if "/" not in name}
        for step in steps(fit(gpu, Looks(gpu)))
    ]
    assert phases == [{**STEP_MS, "forward": 8.0}] * 3


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_loss_of_a_micro_batch_without_a_backward_is_not_forward(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning warns once in a process, and another test wants to see it.
    monkeypatch.setattr(Closure, "warning_cache", WarningCache())

    class Skips(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 2 == 0 else loss

    timer = fit(gpu, Skips(gpu), n=4, accumulate_grad_batches=2)
    assert [(step["forward"], step["loss"]) for step in steps(timer)] == [(8.0, 0.5)] * 2


def test_wrapper_that_calls_the_training_step_is_not_a_model_call(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Redirects(Model):
        """As under DDP, whose forward calls the training step."""

        redirects = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.redirects = True
            loss: Tensor = wrapper(batch)
            return loss

        def forward(self, x: Tensor) -> Tensor:
            if not self.redirects:
                return super().forward(x)
            self.redirects = False
            gpu.work(0.125)
            return self.loss(x)

    model = Redirects(gpu)
    wrapper = torch.nn.Sequential(model)
    monkeypatch.setattr("lightning_gputime.callback._wrapper_of", lambda _: wrapper)
    assert steps(fit(gpu, model)) == [STEP_MS] * 3
