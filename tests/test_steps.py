"""Steps of plain loops, whatever drives them, and the warnings where that is uncertain."""

import copy
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import torch
from conftest import installed
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, batches, steps
from fake_loop import Loop, hooks, timed_indices
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, phase


def total(timer: GPUPhaseHooks) -> list[float]:
    """Time of each step, in ms."""
    timer.flush()
    return [round(float(ms), 3) for ms in timer.history()["step_ms"]]


def ms(timer: GPUPhaseHooks, phase: str) -> list[float]:
    """Time of a phase in each step, in ms."""
    return [step.get(phase, 0.0) for step in steps(timer)]


def validate(loop: Loop, n: int) -> None:
    loop.model.eval()
    with torch.no_grad():
        for _ in range(n):
            loop.model(torch.ones(1, 2))
    loop.model.train()


def graph_of(loop: Loop) -> Callable[[], None]:
    """Capture work of 14 ms, and return what replays it."""
    with loop.gpu.capture() as replay:
        loop.gpu.work(14.0)
    return replay


# Loops that are left, and calls of step()


def first(batches: Iterator[Tensor], n: int) -> Iterator[Tensor]:
    for number, x in enumerate(batches, 1):
        yield x
        if number == n:
            break


@pytest.mark.parametrize(
    "taken",
    [
        first,
        islice,
        lambda batches, n: (x for _, x in zip(range(n), batches, strict=False)),
        lambda batches, n: (x for x, _ in zip(batches, range(n), strict=False)),
        lambda batches, n: (next(batches) for _ in range(n)),
    ],
    ids=["break", "islice", "zip(range, steps)", "zip(steps, range)", "next"],
)
def test_loop_that_is_left_keeps_its_last_step(
    loop: Loop, taken: Callable[..., Iterator[Tensor]]
) -> None:
    bare = installed(*loop.model.modules(), loop.optimizer)
    with hooks(loop) as timer:
        for _ in range(2):
            for x in taken(timer.steps(loop.batches(9)), 3):
                loop.train(x)
            loop.gpu.work(99.0)
    assert steps(timer) == [STEP_MS] * 6
    assert timer.history()["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert timer.summary().skipped_updates == 0
    assert installed(*loop.model.modules(), loop.optimizer) == bare


def test_last_step_of_a_loop_that_is_left_ends_with_its_update(loop: Loop) -> None:
    with hooks(loop) as timer:
        batches = timer.steps(loop.batches(9))
        for _ in range(2):
            loop.train(next(batches))
            loop.gpu.work(1.0)
        loop.gpu.work(99.0)
        batches.close()
        batches.close()
    assert steps(timer) == [{**STEP_MS, "other": 1.125}, STEP_MS]


@pytest.mark.parametrize("part", ["nothing", "forward", "backward", "next forward"])
def test_step_left_before_its_update_is_not_timed(loop: Loop, part: str) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(9))):
            if number == 2:
                if part == "forward":
                    loop.model(x)
                elif part == "backward":
                    loop.micro_batch(x)
                elif part == "next forward":
                    loop.train(x)
                    loop.model(x)
                break
            loop.train(x)
    assert steps(timer) == [STEP_MS] * 2


def test_inference_loop_that_is_left_has_its_last_step(loop: Loop) -> None:
    with GPUPhaseHooks(loop.model, _clock=loop.gpu) as timer, torch.no_grad():
        for x in islice(timer.steps(loop.batches(9)), 3):
            loop.model(x)
            loop.gpu.work(0.5)
    whole = {"data": 1.0, "forward": 4.0, "other": 0.5}
    assert steps(timer) == [whole, whole, {**whole, "other": 0.0}]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_called_inside_steps_ends_each_step_once(loop: Loop, accumulate: int) -> None:
    with hooks(loop, accumulate_grad_batches=accumulate) as timer:
        for number, x in enumerate(timer.steps(loop.batches(4)), 1):
            loop.micro_batch(x)
            if number % accumulate == 0:
                loop.update()
            timer.step()
    n = 4 // accumulate
    once = {name: accumulate * STEP_MS[name] for name in STEP_MS if name != "optimizer"}
    assert steps(timer) == [{**once, "optimizer": 2.0}] * n
    assert timer.history()["step"].tolist() == list(range(n))
    assert timer.summary().skipped_updates == 0


def test_steps_around_steps_end_each_step_once(loop: Loop) -> None:
    with hooks(loop) as timer:
        for _ in timer.steps(range(2)):
            for x in timer.steps(loop.batches(2)):
                loop.train(x)
            loop.gpu.work(99.0)
        for x in timer.steps(timer.steps(loop.batches(2))):
            loop.train(x)
    assert steps(timer) == [STEP_MS] * 6
    assert timer.history()["step"].tolist() == [0, 1, 2, 3, 4, 5]


# Iterators


@pytest.mark.parametrize("tasks", [2, 3])
@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("every", [1, 10])
def test_interleaved_iterators_time_every_step(
    loop: Loop, tasks: int, is_random: bool, every: int
) -> None:
    order = [number % tasks for number in range(60)]
    if is_random:
        random.Random(1).shuffle(order)
    with hooks(loop, every_n_steps=every) as timer:
        iterators = [iter(timer.steps(loop.batches(60))) for _ in range(tasks)]
        for which in order:
            loop.train(next(iterators[which]))
    assert steps(timer) == [STEP_MS] * (60 // every)


def test_abandoned_iterator_ends_no_step_of_another(loop: Loop) -> None:
    with hooks(loop) as timer:
        iterators = [iter(timer.steps(loop.batches(10))) for _ in "ab"]
        for number in (0, 1, 0, 1):
            loop.train(next(iterators[number]))
        del iterators[0]
        loop.train(next(iterators[0]))
    assert steps(timer) == [STEP_MS] * 5


def test_zipped_loaders_have_one_step_per_pair(loop: Loop) -> None:
    with hooks(loop) as timer:
        pairs = [timer.steps(loop.batches(6)) for _ in "ab"]
        for x, _ in zip(*pairs, strict=False):
            loop.train(x)
    assert [step["forward"] for step in steps(timer)] == [4.0] * 6
    assert ms(timer, "data")[1:] == [2.0] * 5


def ahead(items: Any) -> Iterator[Tensor]:
    """Yield the items, fetching one ahead to know which is the last."""
    items = iter(items)
    item = next(items)
    for following in items:
        yield item
        item = following
    yield item


@pytest.mark.parametrize("end", ["remove", "epoch"])
def test_look_ahead_iterators_keep_each_step(loop: Loop, end: str) -> None:
    with hooks(loop) as timer:
        for _ in range(2):
            for x in ahead(timer.steps(loop.batches(4))):
                loop.train(x)
            if end == "epoch":
                loop.gpu.work(100.0)
    epoch = [{**STEP_MS, "data": 2.0}, STEP_MS, STEP_MS, {**STEP_MS, "data": 0.0}]
    assert steps(timer) == epoch * 2


def test_warns_about_cycle_around_steps(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with hooks(loop) as timer:
        cycle = itertools.cycle(timer.steps(loop.batches(10)))
        for _ in range(25):
            loop.train(next(cycle))
    assert steps(timer) == [STEP_MS] * 10
    assert "timer.steps(itertools.cycle(loader))" in caplog.text


@pytest.mark.parametrize("how", ["step", "steps"])
def test_validation_over_steps_inside_a_loop_has_no_steps(loop: Loop, how: str) -> None:
    with hooks(loop) as timer:
        loader = loop.batches(12)
        for number, x in enumerate(timer.steps(loader) if how == "steps" else loader, 1):
            loop.train(x)
            if how == "step":
                timer.step()
            if number % 4 == 0:
                loop.model.eval()
                with torch.no_grad():
                    for y in timer.steps(loop.batches(5)):
                        loop.model(y)
                loop.model.train()
    expected = STEP_MS if how == "steps" else {**STEP_MS, "data": 1.125, "other": 0.0}
    assert steps(timer) == [expected] * 12


def test_model_called_in_the_loader_is_data(loop: Loop) -> None:
    def mining() -> Iterator[Tensor]:
        for x in loop.batches(6):
            with torch.no_grad():
                loop.model(x)
            yield x

    with hooks(loop) as timer:
        for x in timer.steps(mining()):
            loop.train(x)
    assert steps(timer) == [{**STEP_MS, "data": 5.0}] * 6


# Accumulation


@pytest.mark.parametrize("per_epoch", [3, 10])
def test_accumulation_that_counts_batches_across_epochs(loop: Loop, per_epoch: int) -> None:
    epochs, k = 48 // per_epoch + 1, 0
    with hooks(loop, accumulate_grad_batches="auto") as timer:
        for _ in range(epochs):
            for x in timer.steps(loop.batches(per_epoch)):
                loop.micro_batch(x)
                k += 1
                if k % 8 == 0:
                    loop.update()
            loop.gpu.work(50.0)
            validate(loop, 3)
    step = {name: 8 * time for name, time in STEP_MS.items()}
    assert steps(timer) == [{**step, "optimizer": 2.0}] * (epochs * per_epoch // 8)


@pytest.mark.parametrize("n", ["auto", 4])
def test_update_after_the_loop_ends_the_last_step(loop: Loop, n: Any) -> None:
    with hooks(loop, accumulate_grad_batches=n) as timer:
        for _ in range(2):
            for number, x in enumerate(timer.steps(loop.batches(6)), 1):
                loop.micro_batch(x)
                if number % 4 == 0:
                    loop.update()
            loop.update()
            loop.gpu.work(50.0)
    assert ms(timer, "forward") == [16.0, 8.0] * 2
    assert ms(timer, "optimizer") == [2.0] * 4
    assert total(timer) == [4 * 13.625 + 2.0, 2 * 13.625 + 2.0] * 2


# Loops without an optimizer, and unusual updates


class ByHand(Loop):
    """A loop that updates without an optimizer."""

    def update(self) -> None:
        self.gpu.work(2.0)


def test_loop_without_an_optimizer_has_its_last_step_and_no_validation(gpu: FakeGPU) -> None:
    loop = ByHand(gpu)
    with GPUPhaseHooks(loop.model, _clock=gpu, warmup_steps=0) as timer:
        for _ in range(2):
            for number, x in enumerate(timer.steps(loop.batches(40)), 1):
                loop.train(x)
                if number % 10 == 0:
                    validate(loop, 20)
                if number == 25:
                    break
            gpu.work(99.0)
    by_hand = {name: ms for name, ms in STEP_MS.items() if name != "optimizer"}
    assert steps(timer) == [{**by_hand, "other": 2.125}] * 50


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("calls_step", [False, True])
def test_zeroth_order_training_in_eval_mode_is_forward(
    loop: Loop, grad: Callable[..., Any], calls_step: bool
) -> None:
    loop.model.eval()
    with hooks(loop) as timer, grad():
        for x in timer.steps(loop.batches(12)):
            for _ in range(2):
                loop.gpu.work(0.5)  # perturbs
                loop.model(x)
            if calls_step:
                loop.optimizer.step()
            else:
                loop.gpu.work(2.0)
    assert ms(timer, "forward")[1:] == [8.5] * 11
    assert total(timer)[1:] == [12.0] * 11


@pytest.mark.parametrize("every", [1, 30])
def test_step_called_in_an_optimizer_hook_ends_an_accumulation(loop: Loop, every: int) -> None:
    with hooks(loop, accumulate_grad_batches="auto", every_n_steps=every) as timer:
        loop.optimizer.register_step_post_hook(lambda *_: timer.step())
        for number, x in enumerate(loop.batches(240)):
            loop.micro_batch(x)
            if number % 2:
                loop.update()
    assert set(ms(timer, "forward")) == {8.0}
    # If the first step is not timed, the timer does not know yet that steps end inside updates.
    assert timer.history()["step"].tolist() == timed_indices(every, 120 - (every > 1))


# Advice and refusals


def test_advises_to_pause_the_validation_of_a_copy(loop: Loop) -> None:
    ema = copy.deepcopy(loop.model).eval()
    with hooks(loop) as timer:
        for _ in range(4):
            for x in loop.batches(25):
                loop.train(x)
                timer.step()
            with torch.no_grad():
                for _ in range(150):
                    ema(torch.ones(1, 2))
    summary = timer.summary()
    advice = "wrap code that is not part of a step, such as a validation, in `with timer.paused()`"
    assert summary.verdict.endswith("mostly in a few steps, which may be evaluations")
    assert (summary.diagnosis.entry, summary.diagnosis.code) == ("GPU work", "GPU-bound")
    assert summary.diagnosis.time_breakdown is not None
    assert summary.diagnosis.time_breakdown["data"].speed_up is None
    assert summary.advice[0] == f"`data` is long in only a few steps: {advice}"


def test_warns_about_phase_on_a_generator(caplog: pytest.LogCaptureFixture) -> None:
    @phase("augment")
    def generate() -> Iterator[int]:
        yield 1

    assert [*generate()] == [1]
    assert "`with phase('augment')` inside" in caplog.text

    @phase("load")
    async def load() -> None: ...

    assert "load" in caplog.text


# Batches without work, and evaluations inside the loop


@pytest.mark.parametrize("how", ["continue", "filter"])
def test_batch_without_work_is_part_of_the_next_step(loop: Loop, how: str) -> None:
    with hooks(loop) as timer:
        batches = enumerate(timer.steps(loop.batches(24)))
        for number, x in filter(lambda item: how != "filter" or item[0] % 4 < 3, batches):
            if number % 4 == 3:
                continue
            loop.train(x)
    assert steps(timer)[1:] == [
        {**STEP_MS, "data": 1.0 + (number % 3 == 0)} for number in range(1, 18)
    ]


def test_batches_grouped_around_steps_are_one_step(loop: Loop) -> None:
    with hooks(loop) as timer:
        iterator = iter(timer.steps(loop.batches(24)))
        while group := [*itertools.islice(iterator, 4)]:
            for x in group:
                loop.micro_batch(x)
            loop.update()
    step = {name: 4 * time for name, time in STEP_MS.items()}
    assert steps(timer)[-5:] == [{**step, "optimizer": 2.0}] * 5


def test_replays_without_a_model_call_are_steps(loop: Loop) -> None:
    replay = graph_of(loop)
    with hooks(loop) as timer:
        for _ in timer.steps(loop.batches(24)):
            replay()
    assert total(timer)[1:] == [15.0] * 22  # The first could be that of a look-ahead.


def test_loop_whose_body_decides_to_evaluate_has_no_steps(loop: Loop) -> None:
    with hooks(loop) as timer:
        for _ in range(3):
            for trains, n in ((True, 5), (False, 3)):
                for x in timer.steps(loop.batches(n)):
                    loop.model.train(trains)
                    with torch.set_grad_enabled(trains):
                        if trains:
                            loop.train(x)
                        else:
                            loop.model(x)
    assert steps(timer) == [STEP_MS] * 15
    assert timer.history()["step"].tolist() == [*range(15)]


@pytest.mark.parametrize("how", ["step", "steps"])
def test_validation_of_all_models_of_a_container_is_in_no_step(gpu: FakeGPU, how: str) -> None:
    encoders: Any = nn.ModuleDict({"image": Layer(gpu, 2.0, 4.0), "text": Layer(gpu, 1.0, 2.0)})
    optimizer = Adder(encoders.parameters(), gpu, 2.0)
    with GPUPhaseHooks(encoders, optimizer, _clock=gpu, warmup_steps=0) as timer:
        loader = batches(gpu, 45, copy_ms=1.0)
        for number, x in enumerate(timer.steps(loader) if how == "steps" else loader, 1):
            (encoders["image"](x) * encoders["text"](x)).sum().backward()
            optimizer.step()
            if how == "step":
                timer.step()
            if number % 15 == 0:
                # The container itself is neither called nor set to eval mode.
                for encoder in encoders.values():
                    encoder.eval()
                with torch.no_grad():
                    for encoder in [*encoders.values()] * 6:
                        encoder(x)
                for encoder in encoders.values():
                    encoder.train()
    assert ms(timer, "forward") == [3.0] * 45
    assert ms(timer, "other") == [0.0] * 45


def test_warns_about_threads_that_train_in_turn(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def train(me: int) -> None:
        for x in batches(loop.gpu, 10):
            turns[me].acquire()
            loop.train(x)
            timer.step()
            turns[1 - me].release()

    with hooks(loop) as timer, ThreadPoolExecutor(2) as pool:
        assert [*pool.map(train, range(2))] == [None, None]
    assert "several threads train alternately" in caplog.text


# Warnings about steps that differ


@pytest.mark.parametrize("how", ["passed over", "evaluation", "step first"])
def test_warns_about_steps_before_the_first_backward(
    loop: Loop, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop) as timer:
        if how == "evaluation":
            loop.model.eval()
            with torch.no_grad():
                for x in timer.steps(loop.batches(3)):
                    loop.model(x)
            loop.model.train()
        loader = loop.batches(40)
        for number, x in enumerate(loader if how == "step first" else timer.steps(loader)):
            if how == "step first":
                timer.step()
            if how != "passed over" or number > 3:
                loop.train(x)
    [message] = caplog.messages
    n = 1 if how == "step first" else 3
    assert message.startswith(f"The first {n} timed steps have no backward. Call step() at the end")


def test_warns_about_training_of_another_model(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop) as timer:
        for item in (loop, Loop(loop.gpu), Loop(loop.gpu)):
            for x in timer.steps(loop.batches(24)):
                item.train(x)
    [message] = caplog.messages
    assert message.startswith("48 of 72 steps have no call of the model. Call step() once")
    assert "another model" in message


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", ["step", "steps"])
def test_advises_to_pause_an_evaluation_in_training_mode(loop: Loop, how: str, grad: bool) -> None:
    with hooks(loop) as timer:
        loader = loop.batches(100)
        for number, x in enumerate(loader if how == "step" else timer.steps(loader), 1):
            loop.train(x)
            if how == "step":
                timer.step()
            with torch.set_grad_enabled(grad):
                for _ in range(60 if number % 40 == 0 else 0):
                    loop.model(x)
    assert ms(timer, "forward").count(4.0) == 98
    advice = "`forward` is long in only a few steps: wrap code that is not part of a step"
    assert advice in str(timer.summary())


def test_batches_longer_in_all_phases_get_no_advice(gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(100)), 1):
            for _ in range(30 if number % 25 == 0 else 1):
                loop.micro_batch(x)
            loop.update()
    assert "few steps" not in str(timer.summary())


@pytest.mark.parametrize("every", [1, 10])
def test_warns_about_micro_batches_left_over_at_the_end_of_a_loop(
    loop: Loop, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop, accumulate_grad_batches=4, every_n_steps=every) as timer:
        for _ in range(20):
            for number, x in enumerate(timer.steps(loop.batches(10)), 1):
                loop.micro_batch(x)
                if number % 4 == 0:
                    loop.update()
    assert len(steps(timer)) == 40 // every
    [message] = caplog.messages
    assert message.startswith("A loop ends with 2 of 4 micro-batches, which are in no step. Pass")


@pytest.mark.parametrize(
    ("n", "is_eager", "message", "advice"),
    [
        (
            300,
            lambda number: number % 3 == 0,
            "Batches without a call of the model take ",
            "call step() at the end of the loop body",
        ),
        (
            53,
            lambda number: number < 3,
            "50 batches in a row have neither a call of the model nor an update",
            "",
        ),
    ],
    ids=["among other steps", "after other steps"],
)
def test_warns_about_graph_replays(
    loop: Loop,
    n: int,
    is_eager: Callable[[int], bool],
    message: str,
    advice: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replay = graph_of(loop)
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(n))):
            if is_eager(number):
                loop.train(x)
            else:
                replay()
    assert len(steps(timer)) == sum(map(is_eager, range(n)))
    [text] = caplog.messages
    assert text.startswith(message)
    assert advice in text
