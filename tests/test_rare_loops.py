"""Loops that a reader from outside has tried, and that were once wrong."""

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from conftest import installed
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, batches, between_batches, steps, work
from fake_lightning import Loader, Model, fit, trainer
from fake_loop import Loop, hooks
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.nn.utils import parametrize

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer


def hooked(model: nn.Module, optimizer: Any, gpu: FakeGPU, **options: Any) -> GPUPhaseHooks:
    return GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0, **options)


# Plain loops


def test_a_root_that_is_its_own_loss_after_a_call_of_its_part(gpu: FakeGPU) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Layer(gpu, 1.0, 1.0), Layer(gpu, 2.0, 2.0)

        def forward(self, z: Tensor) -> Tensor:
            result: Tensor = self.decoder(z).pow(2).mean()
            return result

    model = WithLoss()
    optimizer = Adder(model.parameters(), gpu, 1.0)
    bare = installed(*model.modules())
    with hooked(model, optimizer, gpu) as timer:
        for x in timer.steps(batches(gpu, 3)):
            model(model.encoder(x)).backward()
            optimizer.step()
    assert [step["backward"] for step in steps(timer)] == [3.0] * 3
    assert installed(*model.modules()) == bare


def test_an_error_of_a_boundary_does_not_reach_the_training(
    loop: Loop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hooks(loop) as timer:
        monkeypatch.setattr(
            "lightning_gputime._boundaries.backward.BackwardBoundary.on_call_start",
            lambda *_: 1 / 0,
        )
        for x in timer.steps(loop.batches(3)):
            loop.train(x)
    assert caplog.text.count("a phase is no longer timed".capitalize()) == 1
    assert loop.model.linear.weight.grad is None or loop.model.linear.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("accumulate", [1, "auto"])
@pytest.mark.parametrize("retries", [False, True])
def test_an_update_that_raised_hides_no_other(gpu: FakeGPU, accumulate: Any, retries: bool) -> None:
    class Fails(Adder):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise torch.cuda.OutOfMemoryError("no memory")
            return super().step(closure)

    net = Layer(gpu, 4.0, 8.0)
    optimizer = Fails(net.parameters(), gpu, 2.0)
    with hooked(net, optimizer, gpu, accumulate_grad_batches=accumulate) as timer:
        for number, x in enumerate(timer.steps(batches(gpu, 8))):
            work(net(x), gpu, 0.5).sum().backward()
            optimizer.fails = number == 1
            try:
                optimizer.step()
            except torch.cuda.OutOfMemoryError:
                optimizer.fails = False
                if not retries:
                    continue
                optimizer.step()
    # Without a second try the failed batch has no update: with "auto" it joins the next one.
    assert len(steps(timer)) == (7 if accumulate == "auto" and not retries else 8)
    assert [step.get("optimizer", 0.0) for step in steps(timer)][2:] == [2.0] * (
        len(steps(timer)) - 2
    )


class Perceptual(nn.Module):
    """A loss that runs a net of its own."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.features = Layer(gpu, 3.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return work(self.features(x).pow(2).mean(), self.gpu, 0.5, 0.25)


class PerceptualLoss(Perceptual, _Loss):
    """As that, and one of torch's kind."""


@pytest.mark.parametrize("kind", [Perceptual, PerceptualLoss])
@pytest.mark.parametrize("n", [1, 2])
def test_what_a_loss_module_runs_inside_is_loss(
    gpu: FakeGPU, kind: type[Perceptual], n: int
) -> None:
    net, criterion = Layer(gpu, 4.0, 8.0), kind(gpu)
    model = nn.ModuleList([net, criterion])
    optimizer = Adder(model.parameters(), gpu, 2.0)
    with hooked(model, optimizer, gpu, accumulate_grad_batches=n) as timer:
        for number, x in enumerate(timer.steps(batches(gpu, 4 * n)), 1):
            criterion(net(x)).backward()
            if number % n == 0:
                optimizer.step()
    assert [(step["forward"], step["loss"]) for step in steps(timer)] == [(4.0 * n, 3.5 * n)] * 4


def test_a_gradient_in_the_closure_of_an_update_is_loss(gpu: FakeGPU) -> None:
    # As a physics-informed net is trained.
    net = Layer(gpu, 4.0, 8.0)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.0, max_iter=1, max_eval=1)
    with hooked(net, optimizer, gpu) as timer:
        for x in timer.steps(batches(gpu, 3)):
            x.requires_grad_()

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                u = net(x)
                [slope] = torch.autograd.grad(u.sum(), x, create_graph=True)
                residual = work(slope, gpu, 3.0)
                loss = work((residual**2).mean() + (u**2).mean(), gpu, 0.5)
                loss.backward()
                return loss

            optimizer.step(closure)
    expected = {"forward": 4.0, "loss": 11.5, "backward": 8.0, "optimizer": 0.0}
    assert [{name: step[name] for name in expected} for step in steps(timer)] == [expected] * 3


def test_an_ascent_before_the_closure_of_an_update_is_optimizer(gpu: FakeGPU) -> None:
    class SAM(Adder):
        def step(self, closure: Any = None) -> Any:
            gpu.work(0.5)
            self.zero_grad()
            return super().step(closure)

    net = Layer(gpu, 4.0, 8.0)
    optimizer = SAM(net.parameters(), gpu, 2.0)
    with hooked(net, optimizer, gpu) as timer:
        for x in timer.steps(batches(gpu, 3)):

            def closure(x: Tensor = x) -> None:
                work(net(x), gpu, 0.5).sum().backward()

            closure()
            optimizer.step(closure)
    expected = {"forward": 8.0, "loss": 1.0, "backward": 16.0, "optimizer": 2.5, "other": 0.0}
    assert [{name: step[name] for name in expected} for step in steps(timer)] == [expected] * 3


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_gradient_that_an_update_takes_itself_is_optimizer(
    gpu: FakeGPU, with_closure: bool
) -> None:
    class Hessian(Adder):
        """As AdaHessian: takes the product of the Hessian and a vector."""

        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                closure()
            weights = net.linear.weight
            torch.autograd.grad(weights.grad.sum(), weights)  # type: ignore[union-attr]
            weights.grad = None
            return super().step()

    net = Layer(gpu, 4.0, 8.0)
    optimizer = Hessian(net.parameters(), gpu, 2.0)
    with hooked(net, optimizer, gpu) as timer:
        for x in timer.steps(batches(gpu, 3)):

            def closure(x: Tensor = x) -> None:
                loss = work(net(x), gpu, 0.5).pow(2).sum()
                loss.backward(create_graph=True)

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    expected = {"forward": 4.0, "loss": 0.5, "backward": 8.0, "optimizer": 10.0}
    assert [{name: step[name] for name in expected} for step in steps(timer)] == [expected] * 3


def test_updates_in_the_backward_that_clear_their_gradients_are_optimizer(gpu: FakeGPU) -> None:
    net = nn.Sequential(Layer(gpu, 1.0, 2.0), Layer(gpu, 1.0, 2.0))
    optimizers = {one: Adder(iter([one]), gpu, 0.5) for one in net.parameters()}

    def update(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with hooked(net, [*optimizers.values()], gpu) as timer:
        for x in timer.steps(batches(gpu, 3)):
            work(net(x), gpu, 0.5).sum().backward()
    assert [(step["backward"], step["optimizer"]) for step in steps(timer)] == [(4.0, 2.0)] * 3


def test_a_copy_of_accelerates_optimizer_leaves_the_gradients_of_the_original(loop: Loop) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    model, prepared = accelerate.Accelerator(cpu=True).prepare(loop.model, optimizer)
    with GPUPhaseHooks(model, prepared, _clock=loop.gpu) as timer:
        for x in timer.steps(loop.batches(1)):
            model(x).sum().backward()
            copy.deepcopy(prepared).zero_grad()
            assert all(one.grad is not None for one in model.parameters())
            prepared.step()


def test_a_cell_that_is_run_twice_leaves_nothing_behind(loop: Loop) -> None:
    bare = installed(loop.model, loop.optimizer)
    timer = hooks(loop).attach()
    timer = hooks(loop).attach()
    timer.remove()
    assert installed(loop.model, loop.optimizer) == bare


def test_a_loss_is_found_behind_a_long_sum(gpu: FakeGPU) -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(21)), Layer(gpu, 4.0, 8.0))

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return work(x, gpu, 0.5, 0.25).sum()

    model = nn.ModuleDict({"net": net, "criterion": Own()})
    optimizer = Adder(model.parameters(), gpu, 2.0)
    with hooked(model, optimizer, gpu) as timer:
        for x in timer.steps(batches(gpu, 3)):
            loss = model["criterion"](model["net"](x))
            for parameter in model.parameters():
                loss = loss + 1e-4 * parameter.abs().sum()
            loss.backward()
            optimizer.step()
    assert [(step["forward"], step["loss"]) for step in steps(timer)] == [(4.0, 0.5)] * 3


def test_a_weight_that_is_computed_is_no_model_call(gpu: FakeGPU) -> None:
    class Scaled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            gpu.work(0.25)
            return weight

    net = Layer(gpu, 4.0, 8.0)
    parametrize.register_parametrization(net.linear, "weight", Scaled())
    optimizer = Adder(net.parameters(), gpu, 2.0)
    with hooked(net, optimizer, gpu) as timer:
        for x in timer.steps(batches(gpu, 3)):
            loss = work(net(x), gpu, 3.0).sum()
            (loss + net.linear.weight.pow(2).sum()).backward()
            optimizer.step()
    assert [(step["forward"], step["loss"]) for step in steps(timer)] == [(4.25, 3.25)] * 3


def test_an_update_inside_a_model_call_does_not_end_it(gpu: FakeGPU) -> None:
    class Local(nn.Module):
        """Greedy local learning: the first layer is trained before the second one runs."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Layer(gpu, 1.0, 1.0), Layer(gpu, 3.0, 3.0)
            self.optimizer = Adder(self.one.parameters(), gpu, 2.0)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x)
            hidden.sum().backward()
            self.optimizer.step()
            result: Tensor = self.two(hidden.detach())
            return result

    model = Local()
    optimizer = Adder(model.two.parameters(), gpu, 2.0)
    with hooked(model, optimizer, gpu) as timer:
        for x in timer.steps(batches(gpu, 3)):
            model(x).sum().backward()
            optimizer.step()
    expected = {"forward": 4.0, "backward": 4.0, "optimizer": 4.0}
    assert [{name: step[name] for name in expected} for step in steps(timer)] == [expected] * 3


def test_rollouts_of_varying_length_are_part_of_their_step(gpu: FakeGPU) -> None:
    net = Layer(gpu, 1.0, 8.0)
    optimizer = Adder(net.parameters(), gpu, 2.0)
    lengths = [10, 11, 14, 9, 20, 8, 12]
    with hooked(net, optimizer, gpu) as timer:
        for length, x in zip(lengths, timer.steps(batches(gpu, 7)), strict=True):
            net.eval()
            with torch.no_grad():
                for _ in range(length):
                    net(x)
            net.train()
            work(net(x), gpu, 0.5).sum().backward()
            optimizer.step()
    took_ms = [sum(one for name, one in step.items() if "/" not in name) for step in steps(timer)]
    assert took_ms == [11.5 + length for length in lengths]


# Lightning


def test_callbacks_of_pytorch_lightning_end_where_its_batch_begins(gpu: FakeGPU) -> None:
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

    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0)
    pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[timer, Other()],  # type: ignore[list-item]
    ).fit(Net(), Loader(gpu, 3))
    phases = [{name: ms for name, ms in one.items() if "/" not in name} for one in steps(timer)]
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
def test_the_optimizer_of_a_callback_ends_no_step(gpu: FakeGPU, is_first: bool) -> None:
    class Probed(Model):
        def configure_optimizers(self) -> Any:
            return Adder(self.net.parameters(), gpu, 2.0)

    model = Probed(gpu)
    model.probe = Layer(gpu, 2.0, 1.0)
    optimizer = Adder(model.probe.parameters(), gpu, 5.0)

    class Probe(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            optimizer.step()

    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0)
    callbacks = [Probe(), timer] if is_first else [timer, Probe()]
    trainer(*callbacks, accumulate_grad_batches=3).fit(model, Loader(gpu, 6))
    assert timer.history()["step"].tolist() == [0, 1]
    assert [(step["forward"], step["optimizer"]) for step in steps(timer)] == [(12.0, 2.0)] * 2


def test_what_the_module_does_where_an_epoch_begins_is_no_fetch(gpu: FakeGPU) -> None:
    class Clusters(Model):
        def on_train_epoch_start(self) -> None:
            gpu.work(200.0)

    timer = fit(gpu, Clusters(gpu), n=3)
    assert [parts["data/fetch"] for parts in between_batches(timer)] == [1.0] * 3


def test_a_manual_accumulation_reaches_across_epochs(gpu: FakeGPU) -> None:
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


def test_a_model_call_between_the_backward_and_the_update(gpu: FakeGPU) -> None:
    class Looks(Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            with torch.no_grad():
                self.net(torch.ones(1, 2))

    phases = [
        {name: one for name, one in step.items() if "/" not in name}
        for step in steps(fit(gpu, Looks(gpu)))
    ]
    assert phases == [{**STEP_MS, "forward": 8.0}] * 3


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_the_loss_of_a_micro_batch_without_a_backward_is_no_forward(
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


def test_a_copy_of_a_timer_holds_no_model(gpu: FakeGPU) -> None:
    timer = fit(gpu, Model(gpu))
    assert not {"log", "log_dict"} & vars(copy.deepcopy(timer)).keys()
    assert not {"log", "log_dict"} & timer.__getstate__().keys()


def test_a_fit_inside_a_fit_with_the_same_timer_is_told(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    class Nested(pl.Callback):
        done = False

        def on_train_epoch_end(self, *_: Any) -> None:
            if not self.done:
                self.done = True
                trainer(timer).fit(Model(gpu), Loader(gpu, 2))

    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0)
    trainer(timer, Nested(), max_epochs=2).fit(Model(gpu), Loader(gpu, 3))
    assert (
        caplog.text.count("A training inside another one has ended the timing of the outer one")
        == 1
    )


def test_a_trainer_that_logs_nothing_still_shows_the_means_to_others(gpu: FakeGPU) -> None:
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0)
    stopping = pl.callbacks.EarlyStopping("phase_time/step_ms", check_on_train_epoch_end=True)
    runner = trainer(timer, stopping, log_every_n_steps=0)
    runner.fit(Model(gpu), Loader(gpu, 3))
    assert runner.callback_metrics["phase_time/forward_ms"] == torch.tensor(4.0)
