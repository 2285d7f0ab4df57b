"""The self-check: what a timer reports of a loop that it cannot see, or that looks wrong."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import fake_lightning
import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import Adder, FakeGPU, Layer, work
from fake_lightning import Loader, timer_of
from fake_loop import Loop, hooks
from fake_loop import train as train_loop
from processes import run
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._compat import lightning_
from lightning_gputime._instrumentation import optimizer as optimizer_boundary

WARMUP = 5


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of the package."""
    records = [record for record in caplog.records if record.name == "lightning_gputime"]
    return [record.getMessage() for record in records]


def test_self_check_reports_20_steps_after_the_warm_up(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    timer = hooks(loop, warmup_steps=WARMUP, _lag=0, observers=[id]).attach()
    numbers = []
    for number in range(100):
        if messages(caplog):
            numbers.append(number)
        timer.step()
    timer.remove()
    assert numbers[0] == WARMUP + 20
    assert len(messages(caplog)) == 3


@pytest.mark.parametrize("unused", [True, False])
def test_selected_modules_that_are_never_called_warn(
    loop: Loop, unused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop.model.add_module("unused", nn.Linear(1, 1))
    modules = ["unused"] if unused else ["unused", "linear"]
    train_loop(loop, 60, warmup_steps=WARMUP, modules=modules)
    assert [message[:45] for message in messages(caplog)] == [
        "None of the modules that `modules` selects wa"
    ] * unused


def test_model_that_is_never_called_warns(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    other = nn.Linear(1, 1)
    with GPUPhaseHooks(other, loop.optimizer, _clock=loop.gpu) as timer:
        for x in timer.steps(loop.batches(60)):
            loop.train(x)
        [odd, message] = messages(caplog)
    assert odd.startswith("None of the parameters that Adder updates")
    assert message.startswith("No model call was recorded, so its time is in `other`.")
    assert 'phase("forward")' in message
    assert len(messages(caplog)) == 2


def test_model_that_replaces_call_is_reported(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    class WithoutHooks(nn.Module):  # As gpytorch's modules.
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer(gpu, 4.0, 8.0)

        def __call__(self, x: Tensor) -> Any:
            gpu.work(16.0)
            return self.inner(x)

    class WithHooks(WithoutHooks):
        def __call__(self, x: Tensor) -> Any:
            return nn.Module.__call__(self, x)

        forward = WithoutHooks.__call__

    def train(model: nn.Module) -> GPUPhaseHooks:
        optimizer = Adder(model.parameters(), gpu, 2.0)
        with GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0) as timer:
            for x in timer.steps([torch.ones(1, 2)] * 60):
                model(x).sum().backward()
                optimizer.step()
        return timer

    assert not train(WithHooks()).summary().not_measured
    assert "replaces" not in caplog.text
    summary = train(WithoutHooks()).summary()
    assert caplog.text.count("`WithoutHooks` replaces __call__ of torch.nn.Module") == 1
    assert summary.blurred == ("forward", "loss", "other")


def test_missing_backward_warns(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    run_backward = torch.autograd.Variable._execution_engine.run_backward
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(60)):
            loss = loop.loss(x)
            run_backward(
                (loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True
            )
            loop.optimizer.step()
    [message] = messages(caplog)
    assert message.startswith("No backward was recorded, so its time is in `other`.")


def test_missing_updates_warn(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(60)):
            loop.micro_batch(x)
            loop.gpu.work(2.0)  # An update that is no optimizer's.
    [message] = messages(caplog)
    assert message.startswith("No update of an optimizer was recorded in 25 steps, so its time is")


@pytest.mark.parametrize("loss_ms", [0.5, 1.25])
def test_long_other_next_to_a_short_forward_warns(
    gpu: FakeGPU, loss_ms: float, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(gpu)
    loop.model = Layer(gpu, 0.5, 7.75)
    loop.optimizer.param_groups[0]["params"] = [*loop.model.parameters()]
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(60)):
            gpu.work(4.0)  # A method of another module, or what a Trainer does there.
            work(loop.model(x), gpu, loss_ms, 0.25).sum().backward()
            loop.update()
    began = "`other` takes 4 ms per step, and `forward` little compared with `backward`"
    assert [message[: len(began)] for message in messages(caplog)] == [began] * (loss_ms < 1)


@pytest.mark.parametrize("n", [2, 4])
def test_undeclared_accumulation_warns_with_the_option(
    loop: Loop, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(80)), 1):
            loop.micro_batch(x)
            if number % n == 0:
                loop.update()
    [message] = messages(caplog)
    assert f"have no update. If gradients accumulate, pass accumulate_grad_batches={n}" in message
    assert f"; {80 - 80 // n} of 80 timed steps have no update" in str(timer.summary())


def test_few_skipped_updates_are_not_accumulation(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(60))):
            loop.micro_batch(x)
            if number >= 8:
                loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert messages(caplog) == []
    assert "; 8 updates skipped" in str(timer.summary())


def test_model_called_in_another_thread_warns(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with hooks(loop) as timer, ThreadPoolExecutor(1) as pool:
        for x in timer.steps(loop.batches(60)):
            pool.submit(loop.train, x).result()
    assert messages(caplog)[0].startswith("The model is called in another thread than step()")


@pytest.mark.parametrize("asks", [True, False])
def test_training_without_an_optimizer_warns_with_the_first_times(
    loop: Loop, asks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    timer = GPUPhaseHooks(loop.model, _clock=loop.gpu).attach()
    for x in timer.steps(loop.batches(3)):
        loop.train(x)
    assert messages(caplog) == []
    if asks:
        timer.flush()
        assert len(messages(caplog)) == 1
    timer.remove()
    [message] = messages(caplog)
    assert message.endswith("Write GPUPhaseHooks(model, optimizer).")


@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_with_gradients_warns(
    loop: Loop, grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(30)):
            loop.train(x)
            loop.model.eval()
            with torch.set_grad_enabled(grad):
                loop.model(x)
            loop.model.train()
    start = "The model is also called in eval mode with gradients on, which counts as part"
    assert [message[: len(start)] for message in messages(caplog)] == [start] * grad
    assert timer.summary().rows["forward"].mean_ms == (8.0 if grad else 4.0)


def test_summary_without_a_timed_step_names_the_reason(loop: Loop) -> None:
    timer = hooks(loop)
    assert str(timer.summary()) == (
        "No step was timed. The timer was never attached: call attach(),"
        " or use 'with GPUPhaseHooks(...) as timer:'."
    )
    with timer:
        pass
    assert str(timer.summary()) == "No step was timed."
    timer = train_loop(loop, 5, every_n_steps=1000)
    text = "No step was timed. 1 of every 1,000 steps is timed (every_n_steps)."
    assert str(timer.summary()) == text


@pytest.mark.slow
def test_message_names_the_package_without_logging_configuration() -> None:
    code = """
import logging, os, sys
sys.stderr = sys.stdout
import torch
from lightning_gputime import GPUPhaseHooks
from lightning_gputime._messages import messages
# Each process reports once. The parent waits for the other one.
if os.fork():
    os.wait()
    logging.basicConfig(format="%(name)s - %(message)s", stream=sys.stdout)
GPUPhaseHooks(torch.nn.Linear(1, 1)).attach().remove()
print(len(messages.handlers), len(logging.getLogger().handlers))
"""
    lines = run("-c", code).splitlines()
    for separator, handlers in ((": ", 0), (" - ", 1)):
        first, second, last, *lines = lines
        assert first.startswith(f"lightning_gputime{separator}The model is on the CPU")
        assert second.startswith(f"lightning_gputime{separator}No step has ended")
        assert last == f"0 {handlers}"


def test_skipped_batches_in_an_accumulation_warn_with_the_option(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    def train(accumulate: Any) -> int:
        trained = 0
        with hooks(loop, accumulate_grad_batches=accumulate) as timer:
            for number, x in enumerate(timer.steps(loop.batches(240))):
                if number % 2:
                    continue  # A bad batch.
                loop.micro_batch(x)
                trained += 1
                if trained % 4 == 0:
                    loop.update()
        return len(timer.history())

    assert train(4) == 60
    [message] = messages(caplog)
    assert 'pass accumulate_grad_batches="auto": a step ends with the update' in message
    caplog.clear()
    assert train("auto") == 30
    assert not messages(caplog)


# The first steps


@pytest.mark.parametrize(
    ("action", "feature", "hidden"),
    [
        ("fetch_action", "separate times of data/fetch and callbacks", {"data", "callbacks"}),
        ("copy_action", "separate times of data/copy and data/fetch", {"data"}),
    ],
)
def test_self_check_finds_an_action_under_another_name(
    gpu: FakeGPU,
    action: str,
    feature: str,
    hidden: set[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Slow(Loader):
        def __iter__(self) -> Iterator[Tensor]:
            for x in super().__iter__():
                gpu.host_work(100.0)
                yield x

    def train() -> GPUPhaseTimer:
        timer = timer_of(gpu)
        fake_lightning.trainer(timer).fit(fake_lightning.Model(gpu), Slow(gpu, 8))
        return timer

    before = train().summary()
    assert "input-bound" in before.verdict
    assert not before.not_measured
    caplog.clear()
    monkeypatch.setattr(lightning_, action, lambda trainer: "another name")
    summary = train().summary()
    [text] = summary.not_measured
    assert text.startswith(
        f"not measured: {feature}, because lightning {version('lightning')} reported"
    )
    assert {*summary.blurred} == hidden
    assert summary.verdict == ""
    assert summary.advice == ()
    assert caplog.text.count(f"Not measured: {feature}") == 1


def test_self_check_finds_steps_that_the_trainer_does_not_count(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lightning_, "step_counter", lambda trainer: lambda: 7)
    timer = fake_lightning.fit(gpu, fake_lightning.Model(gpu), 6)
    text = "not measured: single steps, because the trainer counts 1, and the timer 6"
    assert timer.summary().not_measured == (text,)
    assert "The trainer counts 1 steps, and the timer counts 6." in caplog.text


def test_self_check_finds_steps_that_end_inside_a_batch(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(gpu)
    timer = GPUPhaseHooks(loop.model, loop.optimizer, warmup_steps=0, _clock=gpu).attach()
    for x in loop.batches(8):
        out = loop.model(x)
        timer.step()
        work(out, gpu, 0.5, 0.25).sum().backward()
        loop.update()
    timer.remove()
    [text] = timer.summary().not_measured
    assert text == "not measured: single batches, because backward precedes forward"
    assert caplog.text.count("backward precedes forward") == 1


class TwoForwards(fake_lightning.Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch) + self.loss(batch)


class Gan(fake_lightning.Model):
    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)
        self.critic = Layer(gpu, 1.0, 2.0)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer, net in zip(optimizers, (self.net, self.critic), strict=True):
            optimizer.zero_grad()
            self.manual_backward(work(net(batch), self.gpu, 0.5, 0.25).sum())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [Adder(net.parameters(), self.gpu, 2.0) for net in (self.net, self.critic)]


class WithLbfgs(fake_lightning.Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class ReturnsNone(fake_lightning.Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if batch_idx % 2 else loss


class SkipsBatches(fake_lightning.Model):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.number = getattr(self, "number", 0) + 1
        return None if self.number % 5 == 0 else batch


class SkipsUpdates(fake_lightning.Model):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@pytest.mark.filterwarnings("ignore")  # Lightning's, of batches that are None
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "kind",
    [fake_lightning.Model, TwoForwards, Gan, WithLbfgs, ReturnsNone, SkipsBatches, SkipsUpdates],
)
def test_self_check_finds_nothing_in_loops_that_are_right(
    gpu: FakeGPU,
    kind: type[fake_lightning.Model],
    accumulate: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {} if kind is Gan else {"accumulate_grad_batches": accumulate}
    timer = timer_of(gpu)
    others = [HasHooks(), timer]
    fake_lightning.trainer(*others, **options).fit(kind(gpu), Loader(gpu, 90))
    assert timer.summary().steps > 5
    assert timer.summary().not_measured == ()
    assert messages(caplog) == []


class HasHooks(pl.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        pass


def test_self_check_finds_updates_whose_hooks_do_not_fire(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    for when in ("pre", "post"):
        register = f"register_optimizer_step_{when}_hook"
        monkeypatch.setattr(optimizer_boundary, register, lambda hook: contextlib.nullcontext)
        monkeypatch.setattr(contextlib.nullcontext, "remove", lambda: None, raising=False)
    timer = fake_lightning.fit(gpu, fake_lightning.Model(gpu), 130)
    text = "not measured: updates, because no update was recorded"
    assert timer.summary().not_measured == (text,)
    assert {*timer.summary().blurred} == {"optimizer", "other"}


WAYS = ("usual", "two forwards", "LBFGS", "GAN", "skipped batches", "accumulates")


@pytest.mark.parametrize("options", [{}, {"_lag": 0}, {"every_n_steps": 3}])
@pytest.mark.parametrize("way", WAYS)
def test_self_check_finds_nothing_in_plain_loops_that_are_right(
    loop: Loop, way: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    critic = Layer(loop.gpu, 1.0, 2.0)
    model = nn.ModuleList([loop.model, critic]) if way == "GAN" else loop.model
    optimizers: list[Any] = [loop.optimizer]
    if way == "GAN":
        optimizers.append(Adder(critic.parameters(), loop.gpu, 2.0))
    if way == "LBFGS":
        optimizers = [torch.optim.LBFGS(loop.model.parameters(), max_iter=3)]
    every = 4 if way == "accumulates" else 1

    def loss(x: Tensor, net: nn.Module = loop.model) -> Tensor:
        total = work(net(x), loop.gpu, 0.5, 0.25).sum()
        total.backward()
        return total

    options = {"warmup_steps": WARMUP, "accumulate_grad_batches": every, **options}
    with GPUPhaseHooks(model, optimizers, _clock=loop.gpu, **options) as timer:
        for number, x in enumerate(timer.steps(loop.batches(200))):
            if way == "skipped batches" and number % 3 == 0:
                continue
            if way == "LBFGS":
                optimizers[0].step(lambda x=x: loss(x))
                continue
            if way == "two forwards":
                loop.model(x)
            loss(x)
            if (number + 1) % every == 0:
                loop.update()
            if way == "GAN":
                loss(x, critic)
                optimizers[1].step()
    assert timer.summary().steps >= 10
    assert timer.summary().not_measured == ()
    assert messages(caplog) == []
