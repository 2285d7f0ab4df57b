"""What a timer says once of a loop that it does not see, or that looks wrong."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import FakeGPU, Layer, steps, work
from fake_loop import Loop, hooks
from processes import run
from torch import nn

from lightning_gputime import GPUPhaseHooks

WARMUP = 5


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("options", [{}, {"_lag": 0}, {"observers": [id]}])
def test_a_loop_that_is_right_is_told_nothing(
    loop: Loop, options: dict[str, Any], every: int, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop, warmup_steps=WARMUP, every_n_steps=every, **options) as timer:
        for x in timer.steps(loop.batches(200)):
            loop.train(x)
    assert told(caplog) == []


def test_it_is_told_when_some_steps_after_the_warm_up_are_read(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    timer = hooks(loop, warmup_steps=WARMUP, _lag=0, observers=[id]).attach()
    numbers = []
    for number in range(100):
        if told(caplog):
            numbers.append(number)
        timer.step()
    timer.remove()
    assert numbers[0] == WARMUP + 20
    assert len(told(caplog)) == 3


@pytest.mark.parametrize("unused", [True, False])
def test_modules_of_which_the_model_calls_none_are_told(
    loop: Loop, unused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop.model.add_module("unused", nn.Linear(1, 1))
    modules = ["unused"] if unused else ["unused", "linear"]
    with hooks(loop, warmup_steps=WARMUP, modules=modules) as timer:
        for x in timer.steps(loop.batches(60)):
            loop.train(x)
    assert [message[:45] for message in told(caplog)] == [
        "None of the modules that `modules` selects wa"
    ] * unused


def test_a_model_that_is_not_called_is_told_before_the_end(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    other = nn.Linear(1, 1)
    with GPUPhaseHooks(other, loop.optimizer, _clock=loop.gpu) as timer:
        for x in timer.steps(loop.batches(60)):
            loop.train(x)
        [odd, message] = told(caplog)
    assert odd.startswith("None of the parameters that Adder updates")
    assert message.startswith("No call of the model was seen, so its time is in `other`.")
    assert 'phase("forward")' in message
    assert len(told(caplog)) == 2


def test_a_backward_that_is_not_seen_is_told(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with hooks(loop, wrap_backward=False) as timer:
        for x in timer.steps(loop.batches(60)):
            loop.train(x)
    [message] = told(caplog)
    assert message.startswith("No backward was seen, so its time is in `other`.")


def test_updates_that_are_not_seen_are_told(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(60)):
            loop.micro_batch(x)
            loop.gpu.work(2.0)  # An update that is no optimizer's.
    [message] = told(caplog)
    assert message.startswith("No update of an optimizer was seen in 25 steps, so its time is")


@pytest.mark.parametrize("loss_ms", [0.5, 1.25])
def test_a_forward_that_runs_in_other_is_told_and_a_small_model_with_a_loss_is_not(
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
    began = "`other` is 4 ms a step, and `forward` little compared with `backward`"
    assert [message[: len(began)] for message in told(caplog)] == [began] * (loss_ms < 1)


@pytest.mark.parametrize("n", [2, 4])
def test_a_loop_that_accumulates_unsaid_is_told_what_to_pass(
    loop: Loop, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(80)), 1):
            loop.micro_batch(x)
            if number % n == 0:
                loop.update()
    [message] = told(caplog)
    assert f"have no update. If gradients accumulate, pass accumulate_grad_batches={n}" in message
    assert f"; {80 - 80 // n} of 80 timed steps have no update" in str(timer.summary())


def test_a_few_updates_that_a_scaler_skips_are_no_accumulation(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(60))):
            loop.micro_batch(x)
            if number >= 8:
                loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert told(caplog) == []
    assert "; 8 updates skipped" in str(timer.summary())


def test_step_called_twice_a_batch_is_told(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with hooks(loop) as timer:
        for x in loop.batches(60):
            loop.train(x)
            timer.step()
            timer.step()
    [message] = told(caplog)
    assert "steps have no call of the model. Call step() once, at the end of the" in message


def test_a_model_that_is_called_in_another_thread_is_told(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    def in_thread(call: Callable[[], object]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(60)):
            in_thread(lambda x=x: loop.train(x))  # type: ignore[misc]
    assert told(caplog)[0].startswith("The model is called in another thread than the one that")


def test_inference_is_not_told_of_a_backward(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with GPUPhaseHooks(loop.model, _clock=loop.gpu) as timer, torch.no_grad():
        for x in timer.steps(loop.batches(60)):
            loop.model(x)
    assert told(caplog) == []


@pytest.mark.parametrize("asks", [True, False])
def test_a_training_without_an_optimizer_is_told_with_the_first_times(
    loop: Loop, asks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    timer = GPUPhaseHooks(loop.model, _clock=loop.gpu).attach()
    for x in timer.steps(loop.batches(3)):
        loop.train(x)
    assert told(caplog) == []
    if asks:
        timer.flush()
        assert len(told(caplog)) == 1
    timer.remove()
    [said] = told(caplog)
    assert said.endswith("Write GPUPhaseHooks(model, optimizer).")


@pytest.mark.parametrize("grad", [True, False])
def test_an_evaluation_with_gradients_on_is_told(
    loop: Loop, grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(30)):
            loop.train(x)
            loop.model.eval()
            with torch.set_grad_enabled(grad):
                loop.model(x)
            loop.model.train()
    said = "The model is also called in eval mode with gradients on. If that is an evaluation"
    assert [message[: len(said)] for message in told(caplog)] == [said] * grad
    assert timer.summary().rows["forward"].mean_ms == (8.0 if grad else 4.0)


def test_a_timer_that_was_never_attached_says_so(loop: Loop) -> None:
    timer = hooks(loop)
    assert str(timer.summary()) == (
        "No step was timed. The timer was never attached: call attach(),"
        " or use 'with GPUPhaseHooks(...) as timer:'."
    )
    with timer:
        pass
    assert str(timer.summary()) == "No step was timed."


def test_a_run_of_too_few_steps_to_time_one_says_so(loop: Loop) -> None:
    with hooks(loop, every_n_steps=1000) as timer:
        for x in timer.steps(loop.batches(5)):
            loop.train(x)
    said = "No step was timed. Of each 1,000 steps one is timed (every_n_steps)."
    assert str(timer.summary()) == said


@pytest.mark.slow
@pytest.mark.parametrize("configured", [False, True])
def test_a_message_names_the_package_where_logging_is_not_configured(configured: bool) -> None:
    code = f"""
import logging, sys
if {configured}:
    logging.basicConfig(format="%(name)s - %(message)s", stream=sys.stdout)
sys.stderr = sys.stdout
import torch
from lightning_gputime import GPUPhaseHooks
from lightning_gputime._messages import messages
GPUPhaseHooks(torch.nn.Linear(1, 1)).attach().remove()
print(len(messages.handlers), len(logging.getLogger().handlers))
"""
    first, second, last = run("-c", code).splitlines()
    separator = " - " if configured else ": "
    assert first.startswith(f"lightning_gputime{separator}The model is on the CPU")
    assert second.startswith(f"lightning_gputime{separator}No step has ended")
    assert last == f"0 {int(configured)}"


def accumulate(loop: Loop, timer: GPUPhaseHooks, every: int) -> None:
    for number, x in enumerate(timer.steps(loop.batches(12)), 1):
        loop.micro_batch(x)
        if number % every == 0:
            loop.update()


def test_with_auto_a_step_ends_with_the_update(gpu: FakeGPU) -> None:
    read = []
    for value, every in (("auto", 1), (1, 1), ("auto", 4), (4, 4)):
        loop = Loop(gpu)
        with hooks(loop, accumulate_grad_batches=value) as timer:
            accumulate(loop, timer, every)
        assert timer.summary().skipped_updates == 0
        read.append(steps(timer))
    assert read[0] == read[1]
    assert read[2] == read[3]
    assert (len(read[0]), len(read[2])) == (12, 3)


def test_auto_needs_optimizers(loop: Loop) -> None:
    with pytest.raises(ValueError, match=r"must be a number where .* got 'auto'"):
        GPUPhaseHooks(loop.model, accumulate_grad_batches="auto")


def test_a_loop_that_leaves_batches_out_of_its_accumulation_is_told_what_to_pass(
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
    [message] = told(caplog)
    assert 'pass accumulate_grad_batches="auto": a step ends with the update' in message
    caplog.clear()
    assert train("auto") == 30
    assert not told(caplog)
