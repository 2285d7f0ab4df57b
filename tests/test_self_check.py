"""The self-check: warnings about loops whose boundaries are missing or look wrong."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import fake_lightning
import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import Adder, FakeGPU, Layer, batches, work
from fake_lightning import Loader, timer_of
from fake_loop import Loop, hooks
from fake_loop import train as train_loop
from processes import run
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._compat import lightning_
from lightning_gputime._instrumentation import optimizer as optimizer_boundary

WARMUP = 5
Warnings = Callable[[], list[str]]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Warnings:
    """Return a function that returns the messages of the package so far."""

    def messages() -> list[str]:
        records = [record for record in caplog.records if record.name == "lightning_gputime"]
        return [record.getMessage() for record in records]

    return messages


def test_self_check_reports_20_steps_after_the_warm_up(loop: Loop, warnings: Warnings) -> None:
    # With an observer, the timer reads each step when it ends.
    timer = hooks(loop, warmup_steps=WARMUP, _lag=0, observers=[id]).attach()
    steps_with_warnings = []
    for number in range(100):
        if warnings():
            steps_with_warnings.append(number)
        timer.step()
    timer.remove()
    assert steps_with_warnings[0] == WARMUP + 20
    assert len(warnings()) == 3  # No model call, no backward and no update.


def test_self_check_finds_a_model_that_is_never_called(loop: Loop, warnings: Warnings) -> None:
    with GPUPhaseHooks(nn.Linear(1, 1), loop.optimizer, _clock=loop.gpu) as timer:
        for x in timer.steps(loop.batches(60)):
            loop.train(x)
        [of_optimizer, message] = warnings()
    assert of_optimizer.startswith("None of the parameters that Adder updates")
    assert message.startswith("No model call was recorded, so its time is in `other`.")
    assert 'phase("forward")' in message
    assert len(warnings()) == 2


def test_self_check_finds_a_replaced_call(gpu: FakeGPU, caplog: pytest.LogCaptureFixture) -> None:
    class WithoutHooks(nn.Module):  # Like the modules of gpytorch.
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

    assert not train_loop(Loop(gpu, WithHooks()), 60).summary().not_measured
    assert "replaces" not in caplog.text
    summary = train_loop(Loop(gpu, WithoutHooks()), 60).summary()
    assert caplog.text.count("`WithoutHooks` replaces __call__ of torch.nn.Module") == 1
    assert summary.measurement.blurred == ("forward", "loss", "other")


def update_without_backward(loop: Loop, x: Tensor, number: int) -> None:
    loss = loop.loss(x)
    run_backward = torch.autograd.Variable._execution_engine.run_backward
    gradients = (torch.ones_like(loss),)
    run_backward((loss,), gradients, False, False, (), True, accumulate_grad=True)
    loop.optimizer.step()


def update_without_optimizer(loop: Loop, x: Tensor, number: int) -> None:
    loop.micro_batch(x)
    loop.gpu.work(2.0)


def update_after_8_steps(loop: Loop, x: Tensor, number: int) -> None:
    loop.micro_batch(x)
    if number >= 8:
        loop.optimizer.step()
    loop.optimizer.zero_grad()


def train_in_a_thread(loop: Loop, x: Tensor, number: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loop.train, x).result()


def evaluate_with_grad(loop: Loop, x: Tensor, number: int, grad: bool = True) -> None:
    loop.train(x)
    loop.model.eval()
    with torch.set_grad_enabled(grad):
        loop.model(x)
    loop.model.train()


def evaluate(loop: Loop, x: Tensor, number: int) -> None:
    evaluate_with_grad(loop, x, number, grad=False)


@pytest.mark.parametrize(
    ("train_step", "start", "forward_ms"),
    [
        (update_without_backward, "No backward was recorded, so its time is in `other`.", 4.0),
        (update_without_optimizer, "No update of an optimizer was recorded in 50 steps, so", 4.0),
        (update_after_8_steps, "", 4.0),
        (train_in_a_thread, "The model is called in a different thread than step()", None),
        (evaluate_with_grad, "The model is also called in eval mode with gradients enabled,", 8.0),
        (evaluate, "", 4.0),
    ],
)
def test_self_check_names_the_action_that_a_loop_lacks_or_has(
    loop: Loop, train_step: Any, start: str, forward_ms: float | None, warnings: Warnings
) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(60))):
            train_step(loop, x, number)
    # Other warnings follow if the model is called in another thread.
    found = warnings()[:1] if train_step is train_in_a_thread else warnings()
    assert [message[: len(start)] for message in found] == [start] * bool(start)
    rows = timer.summary().rows
    assert (rows["forward"].mean_ms if "forward" in rows else None) == forward_ms
    assert ("; 8 updates skipped" in str(timer.summary())) == (train_step is update_after_8_steps)


@pytest.mark.parametrize(
    ("loss_ms", "other_ms", "every", "warns"),
    [(0.5, 4.0, 1, True), (1.25, 4.0, 1, False), (0.5, 400.0, 20, False)],
)
def test_self_check_finds_a_long_other_next_to_a_short_forward(
    gpu: FakeGPU, loss_ms: float, other_ms: float, every: int, warns: bool, warnings: Warnings
) -> None:
    loop = Loop(gpu, Layer(gpu, 0.5, 7.75))
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(60))):
            if number % every == 0:
                gpu.work(other_ms)  # A method of another module, or code of a trainer.
            work(loop.model(x), gpu, loss_ms, 0.25).sum().backward()
            loop.update()
    start = "`other` takes 4 ms per step, and `forward` is short compared with `backward`"
    assert [message[: len(start)] for message in warnings()] == [start] * warns
    assert any("forward, because the loop" in gap for gap in timer.summary().not_measured) == warns


@pytest.mark.parametrize("n", [2, 4])
def test_self_check_finds_undeclared_accumulation_and_names_the_option(
    loop: Loop, n: int, warnings: Warnings
) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(80)), 1):
            loop.micro_batch(x)
            if number % n == 0:
                loop.update()
    [message] = warnings()
    advice = f"have no update. If you accumulate gradients, pass accumulate_grad_batches={n}"
    assert advice in message
    assert f"; {80 - 80 // n} of 80 timed steps have no update" in str(timer.summary())


@pytest.mark.parametrize("is_flushed", [True, False])
def test_training_without_an_optimizer_warns_when_times_are_first_requested(
    loop: Loop, is_flushed: bool, warnings: Warnings
) -> None:
    timer = GPUPhaseHooks(loop.model, _clock=loop.gpu).attach()
    for x in timer.steps(loop.batches(3)):
        loop.train(x)
    assert warnings() == []
    if is_flushed:
        timer.flush()
        assert len(warnings()) == 1
    timer.remove()
    [message] = warnings()
    assert message.endswith("Pass the optimizer: GPUPhaseHooks(model, optimizer).")


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
def test_messages_name_the_package_with_and_without_logging_configuration() -> None:
    code = """
import logging, os, sys
sys.stderr = sys.stdout
import torch
from lightning_gputime import GPUPhaseHooks
from lightning_gputime._messages import messages
# The child reports first, while the parent waits for it.
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


def test_self_check_finds_skipped_batches_in_accumulation(loop: Loop, warnings: Warnings) -> None:
    def train(accumulate: Any) -> int:
        with hooks(loop, accumulate_grad_batches=accumulate) as timer:
            for number, x in enumerate(timer.steps(loop.batches(240))):
                if number % 2 == 0:  # Every other batch is skipped.
                    loop.micro_batch(x)
                if number % 8 == 6:
                    loop.update()
        return len(timer.history())

    assert train(4) == 60
    [message] = warnings()
    assert 'pass accumulate_grad_batches="auto": a step ends with the update' in message
    assert train("auto") == 30
    assert len(warnings()) == 1


# The first steps


@pytest.mark.parametrize(
    ("action", "feature", "hidden"),
    [
        ("fetch_action", "separate times of data/fetch and callbacks", {"data", "callbacks"}),
        ("copy_action", "separate times of data/copy and data/fetch", {"data"}),
    ],
)
def test_self_check_finds_a_renamed_profiler_action(
    gpu: FakeGPU,
    action: str,
    feature: str,
    hidden: set[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Slow(Loader):
        def __iter__(self) -> Iterator[Tensor]:
            return batches(gpu, 8, host_ms=100.0, copy_ms=1.0)

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
    reason = f"because lightning {version('lightning')} reported"
    assert text.startswith(f"not measured: {feature}, {reason}")
    assert {*summary.measurement.blurred} == hidden
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
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop) as timer:
        for x in loop.batches(8):
            out = loop.model(x)
            timer.step()
            loop.tail(out).backward()
            loop.update()
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
    number = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.number += 1
        return None if self.number % 5 == 0 else batch


class SkipsUpdates(fake_lightning.Model):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class OtherCallback(pl.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore")  # Lightning warns about batches that are None.
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "kind",
    [fake_lightning.Model, TwoForwards, Gan, WithLbfgs, ReturnsNone, SkipsBatches, SkipsUpdates],
)
def test_self_check_finds_nothing_in_correct_lightning_modules(
    gpu: FakeGPU, kind: type[fake_lightning.Model], accumulate: int, warnings: Warnings
) -> None:
    options = {} if kind is Gan else {"accumulate_grad_batches": accumulate}
    timer = timer_of(gpu)
    fake_lightning.trainer(OtherCallback(), timer, **options).fit(kind(gpu), Loader(gpu, 90))
    assert timer.summary().steps > 5
    assert timer.summary().not_measured == ()
    assert warnings() == []


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
    assert {*timer.summary().measurement.blurred} == {"optimizer", "other"}


@pytest.mark.parametrize(
    ("options", "skips", "every"),
    [
        ({}, False, 1),
        ({"_lag": 0}, True, 1),
        ({"every_n_steps": 3}, True, 1),
        ({"every_n_steps": 3}, False, 4),
    ],
    ids=["usual", "skipped batches", "untimed skipped batches", "accumulates"],
)
def test_self_check_finds_nothing_in_correct_plain_loops(
    loop: Loop, options: dict[str, Any], skips: bool, every: int, warnings: Warnings
) -> None:
    options = {"warmup_steps": WARMUP, "accumulate_grad_batches": every, **options}
    with hooks(loop, **options) as timer:
        for number, x in enumerate(timer.steps(loop.batches(200)), 1):
            if skips and number % 3 == 1:
                continue
            loop.micro_batch(x)
            if number % every == 0:
                loop.update()
    assert timer.summary().steps >= 10
    assert timer.summary().not_measured == ()
    assert warnings() == []
