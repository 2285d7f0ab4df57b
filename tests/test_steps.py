"""Steps of plain loops of any shape, and the warnings where the end of a step is uncertain."""

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import pytest
import torch
from conftest import installed
from fake_gpu import STEP_MS, FakeGPU, Layer, batches, steps, work
from fake_loop import Loop, hooks, timed_indices
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, phase

Row = dict[str, float]
Body = Callable[..., object]

FETCH_MS = 7.0
APIS = ("steps", "step")
"""Methods that end steps: a loop iterates over `steps()` or calls `step()`."""

ROWS: dict[str, Row] = {"steps": STEP_MS, "step": {**STEP_MS, "data": 1.125, "other": 0.0}}
"""A standard step by API. With `step()`, all time before a model call is `data`."""


def times(api: str = "steps", **phases: float | None) -> Row:
    """Return a standard step in which some phases take another time, or are absent (None)."""
    return {name: ms for name, ms in {**ROWS[api], **phases}.items() if ms is not None}


def accumulated(n: int, api: str = "steps") -> Row:
    """Return a step of `n` micro-batches."""
    return {**{name: n * ms for name, ms in ROWS[api].items()}, "optimizer": 2.0}


@dataclass(frozen=True)
class Scene:
    """A loop, and the steps and warnings that a timer must report for it."""

    body: Body
    arguments: tuple[Any, ...]  # Further arguments of `body`.
    steps: list[Row]
    options: dict[str, Any]  # Options of the timer.
    messages: tuple[tuple[str, ...], ...] = ()  # Start of each warning, and texts inside it.
    numbers: list[int] | None = None  # Expected step numbers; None for 0, 1, 2, ...
    make: Callable[[FakeGPU], Loop] = Loop
    has_optimizer: bool = True  # False for a timer of the model alone.
    skipped_updates: int = 0


SCENES: dict[str, Scene] = {}
SCENE_FIELDS = {field.name for field in fields(Scene)}


def scene(
    rows: list[Row] | Callable[..., list[Row]],
    variants: dict[str, tuple[Any, ...]] | None = None,
    **settings: Any,
) -> Callable[[Body], Body]:
    """Add a function of a loop and its timer as one scene, or as several variants.

    Args:
        rows: Phases of each step, or a function of the variant's arguments that returns them.
        variants: Further arguments of the function, by the name of the variant.
        **settings: Fields of the scene, and options of the timer.
    """
    options = {name: settings.pop(name) for name in [*settings] if name not in SCENE_FIELDS}

    def add(body: Body) -> Body:
        for name, arguments in ({"": ()} if variants is None else variants).items():
            expected = rows(*arguments) if callable(rows) else rows
            text = ", ".join(f"{key}={value}" for key, value in options.items())
            key = ", ".join(filter(None, [body.__name__, name, text]))
            assert key not in SCENES
            SCENES[key] = Scene(body, arguments, expected, options, **settings)
        return body

    return add


EACH_API = {api: (api,) for api in APIS}


def each_batch(timer: GPUPhaseHooks, loader: Iterator[Tensor], api: str) -> Iterator[Tensor]:
    """Yield the batches of a loop that uses `steps()` or `step()`."""
    if api == "steps":
        yield from timer.steps(loader)
        return
    for x in loader:
        yield x
        timer.step()


def evaluate(loop: Loop, batches: Iterable[Tensor] | int = 1, ms: float = 0.0) -> None:
    """Call the model in eval mode without gradients, on batches or on a number of them."""
    if isinstance(batches, int):
        batches = [torch.ones(1, 2)] * batches
    loop.model.eval()
    with torch.no_grad():
        for x in batches:
            loop.model(x)
            loop.gpu.work(ms)
    loop.model.train()


# Loops that are left early, and calls of step()


def take(batches: Iterator[Tensor], n: int) -> Iterator[Tensor]:
    for number, x in enumerate(batches, 1):
        yield x
        if number == n:
            break


WAYS_TO_TAKE: dict[str, tuple[Callable[[Any, int], Any]]] = {
    "break": (take,),
    "islice": (islice,),
    "zip(range, steps)": (lambda steps, n: (x for _, x in zip(range(n), steps, strict=False)),),
    "zip(steps, range)": (lambda steps, n: (x for x, _ in zip(steps, range(n), strict=False)),),
    "next": (lambda steps, n: (next(steps) for _ in range(n)),),
}


@scene([STEP_MS] * 6, WAYS_TO_TAKE)
def loop_left_early(loop: Loop, timer: GPUPhaseHooks, take: Callable[[Any, int], Any]) -> None:
    for _ in range(2):
        loop.train_all(take(timer.steps(loop.batches(9)), 3))
        loop.gpu.work(99.0)


def train_and_call(loop: Loop, x: Tensor) -> None:
    loop.train(x)
    loop.model(x)


PARTS: dict[str, tuple[Callable[[Loop, Tensor], object]]] = {
    "nothing": (lambda loop, x: None,),
    "forward": (lambda loop, x: loop.model(x),),
    "backward": (Loop.micro_batch,),
    "next forward": (train_and_call,),
}


@scene([STEP_MS] * 2, PARTS)
def loop_left_before_its_update(
    loop: Loop, timer: GPUPhaseHooks, part: Callable[[Loop, Tensor], object]
) -> None:
    for number, x in enumerate(timer.steps(loop.batches(9))):
        if number == 2:
            part(loop, x)
            break
        loop.train(x)


INFERENCE = {"data": 1.0, "forward": 4.0, "other": 0.5}


@scene([INFERENCE] * 2, {"training mode": (True, 2), "eval mode": (False, 2)}, has_optimizer=False)
@scene(
    [INFERENCE, INFERENCE, {**INFERENCE, "other": 0.0}],
    {"left early": (True, 9)},
    has_optimizer=False,
)
def inference(loop: Loop, timer: GPUPhaseHooks, is_training: bool, n: int) -> None:
    loop.model.train(is_training)
    with torch.no_grad():
        for x in islice(timer.steps(loop.batches(n)), 3):
            loop.model(x)
            loop.gpu.work(0.5)


@scene([STEP_MS] * 4, {"": (1,)})
@scene([accumulated(2)] * 2, {"": (2,)}, accumulate_grad_batches=2)
def step_called_inside_steps(loop: Loop, timer: GPUPhaseHooks, accumulate: int) -> None:
    for number, x in enumerate(timer.steps(loop.batches(4)), 1):
        loop.micro_batch(x)
        if number % accumulate == 0:
            loop.update()
        timer.step()


@scene([STEP_MS] * 6)
def steps_around_steps(loop: Loop, timer: GPUPhaseHooks) -> None:
    for _ in timer.steps(range(2)):
        loop.train_all(timer.steps(loop.batches(2)))
        loop.gpu.work(99.0)
    loop.train_all(timer.steps(timer.steps(loop.batches(2))))


@scene([times(optimizer=None, other=2.125)] * 50, has_optimizer=False)
def update_by_hand(loop: Loop, timer: GPUPhaseHooks) -> None:
    for _ in range(2):
        for number, x in enumerate(timer.steps(loop.batches(40)), 1):
            loop.micro_batch(x)
            loop.gpu.work(2.0)
            if number % 10 == 0:
                evaluate(loop, 20)
            if number == 25:
                break
        loop.gpu.work(99.0)


@scene([STEP_MS])
def loaders_with_no_or_one_batch(loop: Loop, timer: GPUPhaseHooks) -> None:
    for n in (0, 1):
        loop.train_all(timer.steps(loop.batches(n)))


# Iterators


TASK_ORDERS = {"2 tasks": (2, False), "3 tasks": (3, False), "3 tasks at random": (3, True)}


@scene([STEP_MS] * 60, TASK_ORDERS)
@scene([STEP_MS] * 6, TASK_ORDERS, every_n_steps=10, numbers=timed_indices(10, 60))
def interleaved_iterators(loop: Loop, timer: GPUPhaseHooks, tasks: int, is_random: bool) -> None:
    order = [number % tasks for number in range(60)]
    if is_random:
        random.Random(1).shuffle(order)
    iterators = [iter(timer.steps(loop.batches(60))) for _ in range(tasks)]
    for task in order:
        loop.train(next(iterators[task]))


def prefetching(batches: Any) -> Iterator[Tensor]:
    """Yield batches, always fetching the next batch first, to recognize the last."""
    batches = iter(batches)
    batch = next(batches)
    for next_batch in batches:
        yield batch
        batch = next_batch
    yield batch


@scene(
    [times(data=2.0), STEP_MS, STEP_MS, times(data=0.0)] * 2, {"remove": (0.0,), "epoch": (100.0,)}
)
def prefetching_iterator(loop: Loop, timer: GPUPhaseHooks, after_ms: float) -> None:
    for _ in range(2):
        loop.train_all(prefetching(timer.steps(loop.batches(4))))
        loop.gpu.work(after_ms)


@scene([STEP_MS] * 10, messages=(("", "timer.steps(itertools.cycle(loader))"),))
def cycle_around_steps(loop: Loop, timer: GPUPhaseHooks) -> None:
    cycle = itertools.cycle(timer.steps(loop.batches(10)))
    for _ in range(25):
        loop.train(next(cycle))


@scene(lambda api: [ROWS[api]] * 12, EACH_API)
def validation_over_steps_inside_a_loop(loop: Loop, timer: GPUPhaseHooks, api: str) -> None:
    loader = loop.batches(12)
    for number, x in enumerate(timer.steps(loader) if api == "steps" else loader, 1):
        loop.train(x)
        if api == "step":
            timer.step()
        if number % 4 == 0:
            evaluate(loop, timer.steps(loop.batches(5)))


@scene([times(data=5.0)] * 6)
def model_call_in_the_loader_is_data(loop: Loop, timer: GPUPhaseHooks) -> None:
    def mining() -> Iterator[Tensor]:
        for x in loop.batches(6):
            with torch.no_grad():
                loop.model(x)
            yield x

    loop.train_all(timer.steps(mining()))


# Accumulation


EPOCHS = {"17 epochs of 3 batches": (17, 3), "5 epochs of 10 batches": (5, 10)}


@scene(lambda n, size: [accumulated(8)] * (n * size // 8), EPOCHS, accumulate_grad_batches="auto")
def accumulation_across_epochs(loop: Loop, timer: GPUPhaseHooks, n: int, size: int) -> None:
    number = 0
    for _ in range(n):
        for x in timer.steps(loop.batches(size)):
            loop.micro_batch(x)
            number += 1
            if number % 8 == 0:
                loop.update()
        loop.gpu.work(50.0)
        evaluate(loop, 3)


@scene([accumulated(4), accumulated(2)] * 2, accumulate_grad_batches="auto")
@scene([accumulated(4), accumulated(2)] * 2, accumulate_grad_batches=4)
def update_after_the_loop(loop: Loop, timer: GPUPhaseHooks) -> None:
    for _ in range(2):
        for number, x in enumerate(timer.steps(loop.batches(6)), 1):
            loop.micro_batch(x)
            if number % 4 == 0:
                loop.update()
        loop.update()
        loop.gpu.work(50.0)


def test_loops_left_early_count_all_steps_as_sampled_if_all_are_timed(loop: Loop) -> None:
    with hooks(loop, every_n_steps=1) as timer:
        for _ in range(3):
            for number, x in enumerate(timer.steps(loop.batches(10))):
                loop.train(x)
                if number == 6:
                    break
        loop.train_all(timer.steps(loop.batches(10)))
    summary = timer.summary()
    assert summary.steps == 31
    assert summary.measurement.untimed_steps == summary.measurement.not_sampled_steps == 0
    assert summary.step.mean_ms == 15.625


LEFT_OVER = (("A loop ended after 2 of the 4 micro-batches of a step.",),)


@scene([accumulated(4)] * 40, messages=LEFT_OVER, accumulate_grad_batches=4)
@scene(
    [accumulated(4)] * 4,
    messages=LEFT_OVER,
    numbers=timed_indices(10, 40),
    accumulate_grad_batches=4,
    every_n_steps=10,
)
def micro_batches_left_over_at_the_end_of_a_loop(loop: Loop, timer: GPUPhaseHooks) -> None:
    for _ in range(20):
        for number, x in enumerate(timer.steps(loop.batches(10)), 1):
            loop.micro_batch(x)
            if number % 4 == 0:
                loop.update()


# Unusual updates


IN_HOOK = {**accumulated(2), "data": 1.125, "other": 1.125}


@scene([IN_HOOK] * 120, accumulate_grad_batches="auto")
# The first step is not timed, so the timer does not know yet that steps end inside updates.
@scene(
    [{**accumulated(2), "data": 0.0, "other": 2.25}, *[IN_HOOK] * 3],
    accumulate_grad_batches="auto",
    every_n_steps=30,
    numbers=timed_indices(30, 119),
)
def step_called_in_an_optimizer_hook(loop: Loop, timer: GPUPhaseHooks) -> None:
    hook = loop.optimizer.register_step_post_hook(lambda *_: timer.step())
    for number, x in enumerate(loop.batches(240)):
        loop.micro_batch(x)
        if number % 2:
            loop.update()
    hook.remove()


@scene([accumulated(4)] * 3, accumulate_grad_batches="auto")
def accumulation_left_early(loop: Loop, timer: GPUPhaseHooks) -> None:
    number = 0
    for _ in range(4):
        for x in islice(timer.steps(loop.batches(9)), 3):
            loop.micro_batch(x)
            number += 1
            if number % 4 == 0:
                loop.update()
        loop.gpu.work(50.0)


# Batches without work, or with the work of another model


@scene(
    [*[STEP_MS] * 24, *[{"data": 1.0, "backward": 8.0, "other": 6.625}] * 48],
    messages=(("26 of 50 steps have no model call. Call step() once", "another model"),),
    skipped_updates=48,
)
def training_of_another_model(loop: Loop, timer: GPUPhaseHooks) -> None:
    for trained in (loop, Loop(loop.gpu), Loop(loop.gpu)):
        trained.train_all(timer.steps(loop.batches(24)))


@scene(
    [times(data=1.0 + (number > 0 and number % 3 == 0)) for number in range(18)],
    {"continue": (False,), "filter": (True,)},
)
def batch_without_work_is_part_of_the_next_step(
    loop: Loop, timer: GPUPhaseHooks, is_filtered: bool
) -> None:
    batches = enumerate(timer.steps(loop.batches(24)))
    for number, x in filter(lambda item: not is_filtered or item[0] % 4 < 3, batches):
        if number % 4 < 3:
            loop.train(x)


# A batch without work is a step before the first backward, and later a part of the next step.
@scene(
    [
        {"data": 2.0, "other": 0.0},
        {"data": 1.0, "other": 0.0},
        {**accumulated(4), "data": 1.0},
        *[accumulated(4)] * 5,
    ],
    messages=(("The first 2 timed steps have no backward.",),),
    skipped_updates=2,
)
def batches_grouped_around_steps(loop: Loop, timer: GPUPhaseHooks) -> None:
    iterator = iter(timer.steps(loop.batches(24)))
    while group := [*itertools.islice(iterator, 4)]:
        for x in group:
            loop.micro_batch(x)
        loop.update()


def graph_of(loop: Loop) -> Callable[[], None]:
    """Capture work of 14 ms, and return the function that replays it."""
    with loop.gpu.capture() as replay:
        loop.gpu.work(14.0)
    return replay


@scene(
    [STEP_MS, *[times(data=3.0, other=28.125)] * 99],
    {"among other steps": (300, 3)},
    messages=(("Batches without a model call take ", "call step() at the end of the loop body"),),
)
@scene(
    [STEP_MS] * 3,
    {"after other steps": (53, 0)},
    messages=(("50 batches in a row have neither a model call nor an update",),),
)
def graph_replays(loop: Loop, timer: GPUPhaseHooks, n: int, every: int) -> None:
    replay = graph_of(loop)
    for number, x in enumerate(timer.steps(loop.batches(n))):
        if number % every == 0 if every else number < 3:
            loop.train(x)
        else:
            replay()


FIRST_STEPS = "timed steps have no backward. Call step() at the end"


@scene(
    [{"data": 2.0, "other": 0.0}, *[{"data": 1.0, "other": 0.0}] * 2, *[STEP_MS] * 36],
    {"batches without work": (4,)},
    messages=((f"The first 3 {FIRST_STEPS}",),),
    skipped_updates=3,
)
@scene(
    [
        {"data": 1.0, "other": 4.0},
        *[{"data": 1.0, "forward": 4.0, "other": 0.0}] * 2,
        *[STEP_MS] * 40,
    ],
    {"evaluation": (0,)},
    messages=((f"The first 3 {FIRST_STEPS}",),),
    skipped_updates=3,
)
def steps_before_the_first_backward(loop: Loop, timer: GPUPhaseHooks, n: int) -> None:
    if not n:
        evaluate(loop, timer.steps(loop.batches(3)))
    for number, x in enumerate(timer.steps(loop.batches(40))):
        if number >= n:
            loop.train(x)


@scene(
    [{"data": 1.0}, *[times("step", data=0.125, other=1.0)] * 39],
    messages=((f"The first 1 {FIRST_STEPS}",),),
    skipped_updates=1,
)
def step_called_first(loop: Loop, timer: GPUPhaseHooks) -> None:
    for x in loop.batches(40):
        timer.step()
        loop.train(x)


# Evaluations


def rows_of_pseudo_labels(api: str, calls: int, every: int) -> list[Row]:
    """Return steps in which the evaluations are `other`, and only the fetch is `data`."""
    return [times(data=FETCH_MS, other=4.0 * calls + 0.125)] * 3


def each_evaluation(every: int) -> dict[str, tuple[str, int, int]]:
    return {f"{api}, {calls} calls": (api, calls, every) for api in APIS for calls in (1, 5)}


@scene(rows_of_pseudo_labels, each_evaluation(1))
@scene(rows_of_pseudo_labels, each_evaluation(20), every_n_steps=20, numbers=timed_indices(20, 60))
def pseudo_labels(loop: Loop, timer: GPUPhaseHooks, api: str, calls: int, every: int) -> None:
    """Train on pseudo labels, which the model computes in eval mode before each step."""
    for x in each_batch(timer, batches(loop.gpu, 3 * every, copy_ms=FETCH_MS), api):
        evaluate(loop, calls)
        loop.train(x)


class Encoded(nn.Module):
    """A head on a frozen encoder."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.encoder, self.head = Layer(gpu, 10.0), Layer(gpu, 4.0, 8.0)
        self.encoder.requires_grad_(False).eval()


@scene([times(other=50.0)] * 3, EACH_API, make=lambda gpu: Loop(gpu, Encoded(gpu)))
def frozen_encoder(loop: Loop, timer: GPUPhaseHooks, api: str) -> None:
    """Train a head on the output of a frozen encoder."""
    for x in each_batch(timer, loop.batches(3), api):
        with torch.no_grad():
            for _ in range(5):
                hidden = loop.model.encoder(x)
        work(loop.model.head(hidden), loop.gpu, 0.5).sum().backward()
        loop.optimizer.step()


# The fetch of the first validation batch counts as `other`, like any code of the loop body.
@scene([*[STEP_MS] * 19, times(other=1.125)] * 2)
def validation_every_few_steps(loop: Loop, timer: GPUPhaseHooks) -> None:
    for number, x in enumerate(timer.steps(loop.batches(40)), 1):
        loop.train(x)
        if number % 20 == 0:
            evaluate(loop, loop.batches(3))


@scene(lambda api: [accumulated(4, api)] * 40, EACH_API, accumulate_grad_batches=4)
def validation_inside_an_accumulation(loop: Loop, timer: GPUPhaseHooks, api: str) -> None:
    for number, x in enumerate(each_batch(timer, loop.batches(160), api), 1):
        loop.micro_batch(x)
        if number % 4 == 0:
            loop.update()
        if number % 50 == 0:  # Half of the times after a backward without an update.
            evaluate(loop, 6)


# After a validation, a step has no `data`.
@scene(
    lambda per_epoch, _: [
        times("step", data=1.125 if number == 0 or number % per_epoch else None)
        for number in range(60)
    ],
    {f"{n} steps per epoch, {k} batches": (n, k) for n in (1, 3, 20) for k in (1, 5)},
)
def validation_after_each_short_epoch(
    loop: Loop, timer: GPUPhaseHooks, per_epoch: int, n_validated: int
) -> None:
    for number, x in enumerate(loop.batches(60), 1):
        loop.train(x)
        timer.step()
        if number % per_epoch == 0:
            evaluate(loop, loop.batches(n_validated))


@scene(
    lambda is_before: [
        times(
            "step",
            optimizer=None,
            other=2.0,
            data=1.125 if is_before or not number or number % 6 else None,
        )
        for number in range(36)
    ],
    {"before step()": (True,), "after step()": (False,)},
    has_optimizer=False,
)
def validation_after_an_update_by_hand(loop: Loop, timer: GPUPhaseHooks, is_before: bool) -> None:
    for number, x in enumerate(loop.batches(36), 1):
        loop.micro_batch(x)
        loop.gpu.work(2.0)
        if number % 6 == 0 and is_before:
            evaluate(loop, 4)
        timer.step()
        if number % 6 == 0 and not is_before:
            evaluate(loop, 4)


@scene([STEP_MS] * 6)
def evaluation_in_the_body_of_steps(loop: Loop, timer: GPUPhaseHooks) -> None:
    for _ in range(2):
        loop.train_all(timer.steps(loop.batches(3)))
        for _ in timer.steps(loop.batches(2)):
            evaluate(loop)


# A new measurement does not continue the evaluation.
@scene([STEP_MS] * 3)
def timer_attached_again_in_an_evaluation(loop: Loop, timer: GPUPhaseHooks) -> None:
    loop.train_all(timer.steps(loop.batches(3)))
    loop.model.eval()
    with torch.no_grad():
        for _ in timer.steps(loop.batches(2)):
            timer.remove()
            timer.attach()
            break
    loop.model.train()
    loop.train_all(timer.steps(loop.batches(3)))


@scene([times(forward=8.0, loss=1.0, backward=16.0, optimizer=4.0, other=4.25)] * 12)
def pseudo_labels_between_two_updates(loop: Loop, timer: GPUPhaseHooks) -> None:
    for x in timer.steps(loop.batches(12)):
        loop.train(x)
        evaluate(loop)
        loop.train(x)


@scene(
    lambda api, place: [times(api, other=ROWS[api]["other"] + (place == "after"))] * 3,
    {f"{api}, {place}": (api, place) for api in APIS for place in ("before", "after")},
)
def pause(loop: Loop, timer: GPUPhaseHooks, api: str, place: str) -> None:
    def paused() -> None:
        with timer.paused(), timer.paused():
            loop.gpu.work(64.0)
            loop.train(torch.ones(1, 2))
            evaluate(loop, loop.batches(3))

    for x in each_batch(timer, loop.batches(3), api):
        if place == "before":
            paused()
        loop.train(x)
        if place == "after":
            paused()
            loop.gpu.work(1.0)


@scene([times(augment=3.0)] * 2)
def named_phase_around_a_pause(loop: Loop, timer: GPUPhaseHooks) -> None:
    for x in timer.steps(loop.batches(2)):
        with timer.phase("augment"):
            loop.gpu.work(1.0)
            with timer.paused(), timer.phase("unseen"):
                loop.gpu.work(64.0)
            loop.gpu.work(2.0)
        loop.train(x)


@scene([STEP_MS] * 4, numbers=[0, 1, 4, 5])
def steps_that_end_inside_a_pause(loop: Loop, timer: GPUPhaseHooks) -> None:
    for number in range(3):
        with timer.paused() if number == 1 else nullcontext():
            loop.train_all(timer.steps(loop.batches(2)))


for _every in (10, 50):

    @scene([STEP_MS] * 3, every_n_steps=_every, numbers=timed_indices(_every, 3 * _every))
    def evaluation_before_the_first_timed_step(
        loop: Loop, timer: GPUPhaseHooks, every: int = _every
    ) -> None:
        loop.train_all(timer.steps(loop.batches(every // 2)))
        evaluate(loop, timer.steps(loop.batches(5)))
        loop.train_all(timer.steps(loop.batches(3 * every - every // 2)))


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_steps_and_warnings_of_a_loop_are_those_of_its_scene(
    scene: Scene, gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    loop = scene.make(gpu)
    things = (*loop.model.modules(), loop.optimizer)
    bare = installed(*things)
    if not scene.has_optimizer:
        caplog.set_level("CRITICAL", "lightning_gputime")  # Hides a warning about this.
        loop.optimizer = None
    with hooks(loop, **scene.options) as timer:
        scene.body(loop, timer, *scene.arguments)
    assert steps(timer) == scene.steps
    numbers = [*range(len(scene.steps))] if scene.numbers is None else scene.numbers
    assert timer.history()["step"].tolist() == numbers
    assert timer.summary().skipped_updates == scene.skipped_updates
    assert installed(*things) == bare
    assert len(caplog.messages) == len(scene.messages)
    for message, parts in zip(caplog.messages, scene.messages, strict=True):
        assert message.startswith(parts[0])
        assert all(part in message for part in parts)


# Loops with other assertions


def phase_ms(timer: GPUPhaseHooks, name: str) -> list[float]:
    return [step.get(name, 0.0) for step in steps(timer)]


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("calls_step", [False, True])
def test_zeroth_order_training_in_eval_mode_is_timed_as_forward(
    loop: Loop, grad: Callable[..., Any], calls_step: bool
) -> None:
    loop.model.eval()
    with hooks(loop) as timer, grad():
        for x in timer.steps(loop.batches(12)):
            for _ in range(2):
                loop.gpu.work(0.5)  # Perturbs the weights.
                loop.model(x)
            if calls_step:
                loop.optimizer.step()
            else:
                loop.gpu.work(2.0)
    assert phase_ms(timer, "forward")[1:] == [8.5] * 11
    assert timer.history()["step_ms"].tolist()[1:] == [12.0] * 11


def test_phase_on_a_generator_or_coroutine_warns(caplog: pytest.LogCaptureFixture) -> None:
    @phase("augment")
    def generate() -> Iterator[int]:
        yield 1

    assert [*generate()] == [1]
    assert "`with phase('augment')` inside" in caplog.text

    @phase("load")
    async def load() -> None: ...

    assert "load" in caplog.text


def test_threads_that_train_alternately_warn(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def train(number: int) -> None:
        for x in batches(loop.gpu, 10):
            turns[number].acquire()
            loop.train(x)
            timer.step()
            turns[1 - number].release()

    with hooks(loop) as timer, ThreadPoolExecutor(2) as pool:
        assert [*pool.map(train, range(2))] == [None, None]
    assert "several threads train alternately" in caplog.text


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("api", APIS)
def test_evaluation_in_training_mode_gets_advice_to_pause(loop: Loop, api: str, grad: bool) -> None:
    with hooks(loop) as timer:
        loader = loop.batches(100)
        for number, x in enumerate(loader if api == "step" else timer.steps(loader), 1):
            loop.train(x)
            if api == "step":
                timer.step()
            with torch.set_grad_enabled(grad):
                for _ in range(60 if number % 40 == 0 else 0):
                    loop.model(x)
    assert phase_ms(timer, "forward").count(4.0) == 98  # Two of 100 steps have an evaluation.
    advice = "`forward` is long in only a few steps: wrap code that is not part of a step"
    assert advice in str(timer.summary())


@pytest.mark.parametrize("api", APIS)
def test_evaluations_inside_steps_are_an_entry_of_the_time_breakdown(loop: Loop, api: str) -> None:
    n = 60
    with hooks(loop) as timer:
        for x in each_batch(timer, loop.batches(n), api):
            loop.train(x)
            evaluate(loop, loop.batches(5))
    diagnosis = timer.summary().diagnosis
    assert diagnosis.time_breakdown is not None
    # 5 calls of 4 ms, and 4 of the 5 fetches of 1 ms. The last step is read after the loop.
    seconds = diagnosis.time_breakdown["evaluation"].seconds
    assert seconds == pytest.approx(0.024 * n, rel=0.02)
    assert (diagnosis.entry, diagnosis.code) == ("evaluation", "overhead-bound")


def test_eval_calls_before_each_step_warn(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with hooks(loop) as timer:
        for x in loop.batches(100):
            evaluate(loop, 2, 30.0)
            loop.train(x)
            timer.step()
    [record] = caplog.records
    assert record.getMessage() == (
        "Before the training part of a step, the model runs in eval mode without gradients, for"
        " 68.1 ms per step. That counts as `other`. If it is an evaluation, put it into `with"
        " timer.paused()`, or let the training loop iterate over timer.steps(loader)."
    )
    assert timer.summary().diagnosis.code == "GPU-bound"
    assert "not measured: evaluations, because they may be a part" in str(timer.summary())


@pytest.mark.parametrize("raises", [False, True])
def test_loader_that_raised_does_not_hide_later_evaluations(loop: Loop, raises: bool) -> None:
    def failing() -> Iterator[Tensor]:
        yield from loop.batches(2)
        if raises:
            raise OSError

    with hooks(loop) as timer:
        with suppress(OSError):
            loop.train_all(timer.steps(failing()))
        for x in loop.batches(6):
            loop.train(x)
            timer.step()
            evaluate(loop, 3)
    assert len(steps(timer)) == 8
    assert all(step.get("data", 0.0) <= 1.125 for step in steps(timer))
