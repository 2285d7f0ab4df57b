"""Calls of a model in eval mode without gradients: part of the step, or an evaluation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, batches, steps, work
from fake_loop import Loop, hooks, timed_indices
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks

FETCH_MS = 7.0
IN_STEP_LOOP = {**STEP_MS, "data": 1.125, "other": 0.0}


class Encoded(nn.Module):
    """A head on a frozen encoder."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.encoder, self.head = Layer(gpu, 10.0), Layer(gpu, 4.0, 8.0)
        self.encoder.requires_grad_(False)

    def train(self, mode: bool = True) -> "Encoded":
        super().train(mode)
        self.encoder.eval()
        return self


def each_batch(timer: GPUPhaseHooks, loader: Iterator[Tensor], how: str) -> Iterator[Tensor]:
    """The batches of a loop of either kind."""
    if how == "steps":
        yield from timer.steps(loader)
        return
    for x in loader:
        yield x
        timer.step()


@pytest.mark.parametrize("how", ["step", "steps"])
@pytest.mark.parametrize("calls", [1, 5])
@pytest.mark.parametrize("every", [1, 20])
def test_frozen_encoder_before_training_is_other_and_the_fetch_is_data(
    gpu: FakeGPU, how: str, calls: int, every: int
) -> None:
    model = Encoded(gpu).train()
    optimizer = Adder(model.head.parameters(), gpu, 2.0)
    options: dict[str, Any] = {"_clock": gpu, "every_n_steps": every, "warmup_steps": 0}
    with GPUPhaseHooks(model, optimizer, **options) as timer:
        for x in each_batch(timer, batches(gpu, 3 * every, copy_ms=FETCH_MS), how):
            with torch.no_grad():
                for _ in range(calls):
                    hidden = model.encoder(x)
            work(model.head(hidden), gpu, 0.5).sum().backward()
            optimizer.step()
    expected = {"data": FETCH_MS, "other": 10.0 * calls, "forward": 4.0, "loss": 0.5}
    assert steps(timer) == [{**expected, "backward": 8.0, "optimizer": 2.0}] * 3


@pytest.mark.parametrize("how", ["step", "steps"])
@pytest.mark.parametrize("calls", [1, 5])
@pytest.mark.parametrize("every", [1, 20])
def test_pseudo_labels_are_other_and_the_fetch_is_data(
    loop: Loop, how: str, calls: int, every: int
) -> None:
    with hooks(loop, every_n_steps=every) as timer:
        for x in each_batch(timer, batches(loop.gpu, 3 * every, copy_ms=FETCH_MS), how):
            loop.model.eval()
            with torch.no_grad():
                for _ in range(calls):
                    loop.model(x)
            loop.model.train()
            loop.train(x)
    expected = {**STEP_MS, "data": FETCH_MS, "other": 4.0 * calls + 0.125}
    assert steps(timer) == [expected] * 3


def validate(loop: Loop, n: int = 3) -> None:
    loop.model.eval()
    with torch.no_grad():
        for x in loop.batches(n):
            loop.model(x)
    loop.model.train()


def evaluate(loop: Loop, n: int) -> None:
    """Call the model in eval mode without gradients `n` times, for 34 ms each."""
    loop.model.eval()
    with torch.no_grad():
        for _ in range(n):
            loop.model(torch.ones(1, 2))
            loop.gpu.work(30.0)
    loop.model.train()


def test_validation_every_few_steps_of_a_loop_over_steps_belongs_to_no_step(loop: Loop) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(40)), 1):
            loop.train(x)
            if number % 20 == 0:
                validate(loop)
    # Nothing tells the fetch of its first batch from other code of the body.
    assert steps(timer) == ([STEP_MS] * 19 + [{**STEP_MS, "other": 1.125}]) * 2


@pytest.mark.parametrize("calls_step", [False, True])
def test_validation_inside_an_accumulation_belongs_to_no_step(loop: Loop, calls_step: bool) -> None:
    with hooks(loop, accumulate_grad_batches=4) as timer:
        loader = loop.batches(160)
        for number, x in enumerate(loader if calls_step else timer.steps(loader), 1):
            loop.micro_batch(x)
            if number % 4 == 0:
                loop.update()
            if number % 50 == 0:  # Also after a backward that no update follows.
                evaluate(loop, 6)
            if calls_step:
                timer.step()
    batch = IN_STEP_LOOP if calls_step else STEP_MS
    step = {name: ms * (1 if name == "optimizer" else 4) for name, ms in batch.items()}
    assert steps(timer) == [step] * 40


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("per_epoch", [1, 3, 20])
def test_validation_after_each_short_epoch_belongs_to_no_step(
    loop: Loop, per_epoch: int, n: int
) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(loop.batches(60), 1):
            loop.train(x)
            timer.step()
            if number % per_epoch == 0:
                validate(loop, n)
    after = {name: ms for name, ms in IN_STEP_LOOP.items() if name != "data"}
    starts = range(per_epoch, 60, per_epoch)
    assert steps(timer) == [after if number in starts else IN_STEP_LOOP for number in range(60)]


@pytest.mark.parametrize("where", ["before step()", "after step()"])
def test_validation_after_an_update_by_hand_belongs_to_no_step(gpu: FakeGPU, where: str) -> None:
    net = Layer(gpu, 4.0, 8.0)

    def evaluate() -> None:
        net.eval()
        with torch.no_grad():
            for _ in range(4):
                net(torch.ones(1, 2))
        net.train()

    with GPUPhaseHooks(net, _clock=gpu, warmup_steps=0) as timer:
        for number, x in enumerate(batches(gpu, 36, copy_ms=1.0), 1):
            work(net(x), gpu, 0.5).sum().backward()
            gpu.work(2.0)
            if number % 6 == 0 and where == "before step()":
                evaluate()
            timer.step()
            if number % 6 == 0 and where == "after step()":
                evaluate()
    step = {"data": 1.0, "forward": 4.0, "loss": 0.5, "backward": 8.0, "other": 2.0}
    after = step if where == "before step()" else {**step, "data": 0.0}
    found = [{"data": 0.0, **row} for row in steps(timer)]
    assert found == [after if number and number % 6 == 0 else step for number in range(36)]


def test_pseudo_labels_between_two_updates_are_part_of_the_step(loop: Loop) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(12)):
            loop.train(x)
            loop.model.eval()
            with torch.no_grad():
                loop.model(x)
            loop.model.train()
            loop.train(x)
    assert [sum(step.values()) for step in steps(timer)] == [34.25] * 12


@pytest.mark.parametrize("how", ["step", "steps"])
def test_evaluations_inside_steps_are_an_entry_of_the_time_breakdown(loop: Loop, how: str) -> None:
    n = 60
    with hooks(loop) as timer:
        for x in each_batch(timer, loop.batches(n), how):
            loop.train(x)
            validate(loop, 5)
    breakdown = timer.summary().diagnosis.time_breakdown
    assert breakdown is not None
    # Without the fetch of the first batch. The end of the last step is read after the loop.
    assert breakdown["evaluation"].seconds == pytest.approx(0.024 * n, rel=0.02)
    assert timer.summary().diagnosis.code == "evaluation-bound"


def test_eval_calls_before_each_step_warn_and_have_no_verdict(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop) as timer:
        for x in loop.batches(100):
            evaluate(loop, 2)
            loop.train(x)
            timer.step()
    [record] = caplog.records
    assert record.getMessage() == (
        "Before the training part of a step, the model runs in eval mode without gradients for"
        " 68.1 ms. That counts as `other`. If it is an evaluation, put it into"
        " `with timer.paused()` or iterate over timer.steps(loader)."
    )
    assert timer.summary().diagnosis.code == "GPU-bound"
    assert "not measured: evaluations, because they may be a part" in str(timer.summary())


@pytest.mark.parametrize("how", ["step", "steps"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_pause_belongs_to_no_step_and_the_phase_continues(loop: Loop, how: str, where: str) -> None:
    def paused(timer: GPUPhaseHooks) -> None:
        with timer.paused(), timer.paused():
            loop.gpu.work(64.0)
            loop.train(torch.ones(1, 2))
            validate(loop)

    with hooks(loop) as timer:
        for x in each_batch(timer, loop.batches(3), how):
            if where == "before":
                paused(timer)
            loop.train(x)
            if where == "after":
                paused(timer)
                loop.gpu.work(1.0)
    expected = STEP_MS if how == "steps" else IN_STEP_LOOP
    late_ms = 1.0 if where == "after" else 0.0
    assert steps(timer) == [{**expected, "other": expected["other"] + late_ms}] * 3


def test_named_phase_continues_after_a_pause(loop: Loop) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(2)):
            with timer.phase("augment"):
                loop.gpu.work(1.0)
                with timer.paused(), timer.phase("unseen"):
                    loop.gpu.work(64.0)
                loop.gpu.work(2.0)
            loop.train(x)
    assert steps(timer) == [{**STEP_MS, "augment": 3.0}] * 2


def test_steps_that_end_inside_a_pause_are_not_timed(loop: Loop) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(2)):
            loop.train(x)
        with timer.paused():
            for x in timer.steps(loop.batches(2)):
                loop.train(x)
        for x in timer.steps(loop.batches(2)):
            loop.train(x)
    assert steps(timer) == [STEP_MS] * 4
    assert timer.history()["step"].tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize("every", [10, 50])
def test_evaluation_before_the_first_timed_step_has_no_steps(loop: Loop, every: int) -> None:
    n = every // 2
    timed = timed_indices(every, 3 * every)
    assert timed[0] >= n
    with hooks(loop, every_n_steps=every) as timer:
        for x in timer.steps(loop.batches(n)):
            loop.train(x)
        loop.model.eval()
        with torch.no_grad():
            for x in timer.steps(loop.batches(5)):
                loop.model(x)
        loop.model.train()
        for x in timer.steps(loop.batches(3 * every - n)):
            loop.train(x)
    assert timer.history()["step"].tolist() == timed
    assert steps(timer) == [STEP_MS] * len(timed)
    assert timer.summary().untimed_steps == 3 * every - len(timed)


@pytest.mark.parametrize("every", [1, 2, 10, 50])
def test_validation_on_timed_steps_is_excluded_from_them(loop: Loop, every: int) -> None:
    with hooks(loop, every_n_steps=every) as timer:
        for number, x in enumerate(timer.steps(loop.batches(300)), 1):
            loop.train(x)
            if number % 50 == 0:
                evaluate(loop, 6)
    assert timer.summary().step.max_ms == pytest.approx(sum(STEP_MS.values()), abs=1.0)
