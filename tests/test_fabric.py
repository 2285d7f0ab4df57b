"""Loops with Lightning's Fabric, and the callback that is shipped for it."""

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from conftest import hooks_of
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, steps, work
from fake_loop import Logger, Loop
from lightning.fabric import Fabric
from lightning.fabric.wrappers import _FabricDataLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gputime._options import TimerOptions
from lightning_gputime._session.session import Session
from lightning_gputime.fabric import FabricPhaseTimer

LOADER_ITER = _FabricDataLoader.__iter__


@pytest.fixture
def timer(gpu: FakeGPU) -> Iterator[FabricPhaseTimer]:
    timer = FabricPhaseTimer(_clock=gpu, warmup_steps=0, log_every_n_steps=2)
    yield timer
    timer.remove()
    assert _FabricDataLoader.__iter__ is LOADER_ITER


def new_fabric(timer: FabricPhaseTimer, *loggers: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, callbacks=[timer], loggers=[*loggers])


def new_training(loop: Loop, timer: FabricPhaseTimer) -> tuple[Fabric, Any, Any]:
    """Returns a Fabric with the timer, and what it has made of the loop's model and optimizer."""
    fabric = new_fabric(timer)
    return (fabric, *fabric.setup(loop.model, loop.optimizer))


def new_loader(fabric: Fabric, gpu: FakeGPU, n: int) -> Any:
    def collate(rows: list[Tensor]) -> Tensor:
        gpu.work(1.0)
        return torch.ones(1, 2)

    data: Any = [torch.ones(2)] * n
    return fabric.setup_dataloaders(DataLoader(data, batch_size=1, collate_fn=collate))


def train(fabric: Fabric, gpu: FakeGPU, model: Any, optimizer: Any, x: Tensor) -> None:
    gpu.work(0.125)
    loss = work(model(x), gpu, 0.5).sum()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


STEP = {**STEP_MS, "backward": 7.75}


def test_a_loop_is_timed_from_setup_to_remove(loop: Loop, timer: FabricPhaseTimer) -> None:
    logger = Logger()
    fabric = new_fabric(timer, logger)
    before = hooks_of(loop.model)
    fabric.launch()
    model, optimizer = fabric.setup(loop.model, loop.optimizer)
    loader = new_loader(fabric, loop.gpu, 3)
    for _ in range(2):
        for x in loader:
            train(fabric, loop.gpu, model, optimizer, x)
        loop.gpu.work(100.0)  # It belongs to no step.
    timer.remove()
    assert steps(timer) == [STEP] * 6
    assert [step for step, _ in logger.calls] == [1, 3, 5]
    assert logger.calls[0][1]["phase_time/forward_ms"] == 4.0
    assert timer.summary().skipped_updates == 0
    assert hooks_of(loop.model) == before


def test_micro_batches_without_sync_are_one_step_across_epochs_too(
    loop: Loop, timer: FabricPhaseTimer
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    loader, count = new_loader(fabric, loop.gpu, 3), 0
    for _ in range(2):
        for x in loader:
            count += 1
            is_last = count % 2 == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(model(x).sum())
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        loop.gpu.work(100.0)
    timer.remove()
    assert timer.history()["step_ms"].tolist() == [2 * (1.0 + 4.0 + 7.75) + 2.0] * 3


def test_items_of_all_micro_batches_of_a_step_count_across_epochs_too(
    loop: Loop, timer: FabricPhaseTimer
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    loader, count = new_loader(fabric, loop.gpu, 3), 0
    for _ in range(2):
        for x in loader:
            count += 1
            fabric.backward(model(x).sum())
            if count % 2 == 0:
                optimizer.step()
    timer.remove()
    step_ms = 2 * (1.0 + 4.0 + 7.75) + 2.0
    assert timer.history()["step_ms"].tolist() == [step_ms] * 3
    assert timer.summary().items_per_sec == pytest.approx(2 * 1e3 / step_ms)


def test_two_models_and_two_optimizers_are_one_step_a_batch(
    gpu: FakeGPU, timer: FabricPhaseTimer
) -> None:
    fabric = new_fabric(timer)
    layers = [Layer(gpu, 4.0, 7.75), Layer(gpu, 2.0, 3.0)]
    pairs = [fabric.setup(one, Adder(one.parameters(), gpu, 2.0)) for one in layers]
    for x in new_loader(fabric, gpu, 3):
        for model, optimizer in pairs:
            train(fabric, gpu, model, optimizer, x)
    timer.remove()
    [step, *_] = found = steps(timer)
    assert found == [step] * 3
    assert (step["forward"], step["backward"], step["optimizer"]) == (6.0, 10.75, 4.0)
    assert step["data"] == 1.0


def test_a_loader_ends_the_steps_of_a_measurement_that_starts_in_its_loop(
    loop: Loop, timer: FabricPhaseTimer, caplog: pytest.LogCaptureFixture
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    for count, x in enumerate(new_loader(fabric, loop.gpu, 15)):
        train(fabric, loop.gpu, model, optimizer, x)
        if count == 1:
            fabric.setup(Layer(loop.gpu, 16.0, 0.0))
        elif count > 1:
            loop.gpu.work(1.0)
    timer.remove()
    after_update = {**STEP, "other": STEP["other"] + 1.0}
    assert steps(timer) == [after_update] * 13
    assert not caplog.text


@pytest.mark.parametrize("of_fabric", [True, False])
def test_loaders_are_followed_by_steps_in_every_epoch(
    of_fabric: bool, loop: Loop, timer: FabricPhaseTimer
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    own = new_loader(fabric, loop.gpu, 3)
    loader = timer.steps(own if of_fabric else own._dataloader)
    assert (len(loader), loader.dataset) == (3, own.dataset)
    for _ in range(2):
        for x in loader:
            train(fabric, loop.gpu, model, optimizer, x)
        loop.gpu.work(100.0)  # It belongs to no step.
    timer.remove()
    assert steps(timer) == [STEP] * 6


def test_another_loader_is_followed_by_steps(loop: Loop, timer: FabricPhaseTimer) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    for x in timer.steps(loop.batches(3)):
        train(fabric, loop.gpu, model, optimizer, x)
    timer.remove()
    assert steps(timer) == [STEP] * 3


@pytest.mark.parametrize("inside", [True, False])
def test_an_evaluation_belongs_to_no_step(
    loop: Loop, timer: FabricPhaseTimer, inside: bool
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    loader, others = (new_loader(fabric, loop.gpu, n) for n in (4, 3))

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            for x in others:
                model(x)
        model.train()

    evaluate()  # As a sanity check.
    for _ in range(2):
        for count, x in enumerate(loader):
            train(fabric, loop.gpu, model, optimizer, x)
            if inside and count % 2:
                evaluate()
        evaluate()
    timer.remove()
    assert steps(timer) == [STEP] * 8


def test_a_loop_that_is_left_has_its_last_step(loop: Loop, timer: FabricPhaseTimer) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    for count, x in enumerate(new_loader(fabric, loop.gpu, 9)):
        train(fabric, loop.gpu, model, optimizer, x)
        if count == 2:
            break
    timer.remove()
    assert len(steps(timer)) == 3


def test_losses_are_the_same_with_the_timer_and_without() -> None:
    losses: list[list[float]] = []
    for callbacks in ([], [timer := FabricPhaseTimer()]):
        torch.manual_seed(0)
        fabric = Fabric(
            accelerator="cpu", devices=1, callbacks=[*callbacks], precision="bf16-mixed"
        )
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
        data: Any = torch.randn(32, 8)
        losses.append([])
        for x in fabric.setup_dataloaders(DataLoader(data, batch_size=4)):
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses[-1].append(loss.item())
    timer.remove()
    assert losses[0] == losses[1]
    assert set(timer.summary().rows) >= {"data", "forward", "loss", "backward", "optimizer"}


def test_a_model_and_an_optimizer_are_set_up_apart(loop: Loop, timer: FabricPhaseTimer) -> None:
    fabric = new_fabric(timer)
    model = fabric.setup_module(loop.model)
    frozen = fabric.setup_module(Layer(loop.gpu, 16.0, 0.0).requires_grad_(False))
    optimizer: Any = fabric.setup_optimizers(loop.optimizer)
    # Fabric tells nobody of these.
    timer.on_after_setup(fabric, model, optimizer)
    timer.on_after_setup(fabric, frozen)
    for x in new_loader(fabric, loop.gpu, 2):
        loop.gpu.work(0.125)
        out = model(x)
        frozen(torch.ones(1, 2))
        loss = work(out, loop.gpu, 0.5).sum()
        optimizer.zero_grad()
        loop.gpu.work(0.25)
        fabric.backward(loss)
        optimizer.step()
    timer.remove()
    assert steps(timer) == [{**STEP, "loss": 16.5, "other": STEP["other"] + 0.25}] * 2
    assert timer.summary().skipped_updates == 0


def test_an_optimizer_that_fabric_has_not_set_up_is_refused(
    loop: Loop, timer: FabricPhaseTimer
) -> None:
    fabric = new_fabric(timer)
    with pytest.raises(TypeError, match=r"fabric\.setup_optimizers\(\.\.\.\) .* got"):
        timer.on_after_setup(fabric, loop.model, loop.optimizer)


def test_what_is_set_up_apart_and_not_told_is_said_once(
    loop: Loop, timer: FabricPhaseTimer, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = new_fabric(timer)
    model, optimizer = fabric.setup_module(loop.model), fabric.setup_optimizers(loop.optimizer)
    for x in new_loader(fabric, loop.gpu, 3):
        train(fabric, loop.gpu, model, optimizer, x)
    assert not steps(timer)
    assert caplog.text.count("call timer.on_after_setup(fabric, model, optimizer)") == 1


def test_nothing_is_held_where_remove_is_never_called(loop: Loop) -> None:
    def run() -> list[Any]:
        timer = FabricPhaseTimer(_clock=loop.gpu)
        fabric, model = new_fabric(timer), torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        net, optimizer = fabric.setup(model, optimizer)
        for x in new_loader(fabric, loop.gpu, 2):
            train(fabric, loop.gpu, net, optimizer, x)
        return [weakref.ref(timer), weakref.ref(model)]

    gc.collect()
    before = dict(vars(Fabric))
    lost, model = run()
    gc.collect()
    assert lost() is None
    assert _FabricDataLoader.__iter__ is LOADER_ITER
    assert before == dict(vars(Fabric))
    # The next timer takes off what is left on the model.
    timer = FabricPhaseTimer(_clock=loop.gpu)
    new_fabric(timer).setup(loop.model, loop.optimizer)
    timer.remove()
    gc.collect()
    assert model() is None


def test_an_error_in_the_loop_leaves_what_remove_takes_off(
    loop: Loop, timer: FabricPhaseTimer
) -> None:
    fabric = new_fabric(timer)
    before = hooks_of(loop.model)
    model, optimizer = fabric.setup(loop.model, loop.optimizer)

    def run() -> None:
        for count, x in enumerate(new_loader(fabric, loop.gpu, 9)):
            train(fabric, loop.gpu, model, optimizer, x)
            if count == 2:
                raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        run()
    timer.remove()
    timer.remove()
    assert hooks_of(loop.model) == before
    assert [one["forward"] for one in steps(timer)][:2] == [4.0, 4.0]


def test_it_can_be_pickled_and_copied_at_any_time(loop: Loop) -> None:
    timer = FabricPhaseTimer()
    fabric = new_fabric(timer)
    pickle.loads(pickle.dumps(timer))
    fabric.setup(loop.model, loop.optimizer)
    assert not pickle.loads(pickle.dumps(timer))._models
    assert not copy.deepcopy(timer)._session.is_attached
    timer.remove()


def test_a_wrong_module_name_fails_at_setup(loop: Loop) -> None:
    fabric = new_fabric(FabricPhaseTimer(modules=["nothing"]))
    with pytest.raises(ValueError, match="nothing"):
        fabric.setup(loop.model, loop.optimizer)
    with pytest.raises(ValueError, match="log_every_n_steps must be 1 or more"):
        FabricPhaseTimer(log_every_n_steps=0)


def test_a_model_without_updates_belongs_to_no_step(loop: Loop, timer: FabricPhaseTimer) -> None:
    fabric = new_fabric(timer)
    model = fabric.setup(loop.model)
    with torch.no_grad():
        for x in new_loader(fabric, loop.gpu, 2):
            model(x)
    timer.remove()
    assert not steps(timer)


def test_it_takes_the_options_of_all_timers_and_sees_the_batches(loop: Loop, gpu: FakeGPU) -> None:
    taken = {*inspect.signature(FabricPhaseTimer).parameters}
    assert {*TimerOptions.__annotations__} <= taken
    timer = FabricPhaseTimer(_clock=gpu, warmup_steps=0, items=len, flops=3e9)
    fabric, model, optimizer = new_training(loop, timer)
    for x in new_loader(fabric, gpu, 3):
        train(fabric, gpu, model, optimizer, x)
    timer.remove()
    assert timer.summary().items_per_sec == pytest.approx(1e3 / sum(STEP.values()))


def test_a_model_that_is_trained_in_eval_mode_is_timed(loop: Loop, timer: FabricPhaseTimer) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    model.eval()
    loader, others = (new_loader(fabric, loop.gpu, n) for n in (4, 3))
    for _ in range(2):
        for x in loader:
            train(fabric, loop.gpu, model, optimizer, x)
        with torch.no_grad():
            for x in others:
                model(x)
    timer.remove()
    assert steps(timer) == [STEP] * 8
    assert timer.summary().items_per_sec is not None


def test_an_evaluation_with_grad_belongs_to_no_step(loop: Loop, timer: FabricPhaseTimer) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    loader, others = (new_loader(fabric, loop.gpu, n) for n in (4, 3))
    for _ in range(2):
        for x in loader:
            train(fabric, loop.gpu, model, optimizer, x)
        model.eval()
        for x in others:
            model(x)
        model.train()
    timer.remove()
    assert steps(timer) == [STEP] * 8


@pytest.mark.parametrize("name", ["batch_begins", "end_step", "loop_ends"])
def test_an_error_of_the_timer_ends_the_timing_and_not_the_loop(
    loop: Loop,
    timer: FabricPhaseTimer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    before = hooks_of(loop.model)
    fabric, model, optimizer = new_training(loop, timer)
    monkeypatch.setattr(Session, name, lambda *_, **__: 1 / 0)
    trained = 0
    for x in new_loader(fabric, loop.gpu, 4):
        train(fabric, loop.gpu, model, optimizer, x)
        trained += 1
    assert trained == 4
    assert caplog.text.count("a hook failed: ZeroDivisionError") == 1
    assert hooks_of(loop.model) == before
    assert _FabricDataLoader.__iter__ is LOADER_ITER


# Loops that read loaders in ways of their own


def evaluate(loop: Loop, model: Any, loader: Any, how: str) -> None:
    model.train(how == "train")
    with torch.set_grad_enabled(how == "adversarial"):
        for x in loader:
            loop.gpu.work(16.0)
            out = model(x.requires_grad_(how == "adversarial"))
            if how == "adversarial":
                torch.autograd.grad(out.sum(), x)
    model.train()


@pytest.mark.parametrize("how", ["train", "adversarial"])
def test_an_evaluation_inside_an_epoch_belongs_to_no_step(
    loop: Loop, timer: FabricPhaseTimer, how: str
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    loader, others = (new_loader(fabric, loop.gpu, n) for n in (6, 3))
    for count, x in enumerate(loader):
        if count in (2, 4):
            evaluate(loop, model, others, how)
        train(fabric, loop.gpu, model, optimizer, x)
        if count % 2:
            evaluate(loop, model, others, how)
    timer.remove()
    *_, last = found = steps(timer)
    assert last == STEP
    # Nothing tells where an evaluation before the first call of the model has ended.
    assert all(one in (STEP, {**STEP, "other": 0.0}) for one in found), found


def look_ahead(loader: Any) -> Iterator[Any]:
    items = iter(loader)
    one = next(items)
    for following in items:
        yield one
        one = following
    yield one


def test_a_body_that_goes_on_after_a_loader_has_ended_is_no_fetch(
    loop: Loop, timer: FabricPhaseTimer
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    loader, others = (new_loader(fabric, loop.gpu, n) for n in (4, 3))
    for x, _ in zip(loader, cycle(others), strict=False):
        train(fabric, loop.gpu, model, optimizer, x)
    for x in look_ahead(loader):
        train(fabric, loop.gpu, model, optimizer, x)
    timer.remove()
    assert [one["other"] for one in steps(timer)] == [0.125] * 8
    # The second loader begins the first step: what the first one took before is in none.
    assert [one["data"] for one in steps(timer)] == [1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("look", ["statistics", "shapes", "zip"])
def test_batches_that_are_looked_at_alone_belong_to_no_step(
    loop: Loop, timer: FabricPhaseTimer, look: str
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    loader, shorter = (new_loader(fabric, loop.gpu, n) for n in (4, 3))
    for _ in range(2):
        if look == "statistics":
            sum(x.sum() for x in loader)
        elif look == "shapes":
            model(next(iter(loader)))
        else:
            list(zip(loader, shorter, strict=False))
        for x in loader:
            train(fabric, loop.gpu, model, optimizer, x)
    timer.remove()
    assert steps(timer) == [STEP] * 8


def test_a_model_that_thaws_after_its_setup_is_timed(loop: Loop, timer: FabricPhaseTimer) -> None:
    fabric = new_fabric(timer)
    loop.model.requires_grad_(False)
    model, optimizer = fabric.setup(loop.model, loop.optimizer)
    loop.model.requires_grad_(True)
    for x in new_loader(fabric, loop.gpu, 3):
        train(fabric, loop.gpu, model, optimizer, x)
    timer.remove()
    assert steps(timer) == [STEP] * 3


def test_a_body_that_says_train_after_an_evaluation_has_its_first_fetch(
    loop: Loop, timer: FabricPhaseTimer
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    loader = new_loader(fabric, loop.gpu, 3)
    for _ in range(3):
        for x in loader:
            model.train()
            train(fabric, loop.gpu, model, optimizer, x)
        model.eval()
        with torch.no_grad():
            for x in loader:
                model(x)
    timer.remove()
    assert steps(timer) == [STEP] * 9


# What is only said


def test_a_loop_that_reads_no_loader_has_no_step_which_is_told_once(
    loop: Loop, timer: FabricPhaseTimer, caplog: pytest.LogCaptureFixture
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    for x in [*new_loader(fabric, loop.gpu, 12)]:
        train(fabric, loop.gpu, model, optimizer, x)
    assert caplog.text.count("Write `for x in timer.steps(loader)`, or call timer.step()") == 1
    timer.remove()
    assert not steps(timer)
    assert caplog.text.count("No step has ended") == 1


def test_step_ends_a_step_where_no_loader_is_read(
    loop: Loop, timer: FabricPhaseTimer, caplog: pytest.LogCaptureFixture
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    for x in loop.batches(12):
        train(fabric, loop.gpu, model, optimizer, x)
        timer.step()
    timer.remove()
    # Nothing tells a fetch from what precedes the call of the model.
    without = {name: ms for name, ms in STEP.items() if name != "other"}
    assert steps(timer)[1:] == [{**without, "data": 1.125, "other": 0.0}] * 11
    assert not caplog.text


@pytest.mark.parametrize(("ahead", "found"), [(0, 36), (1, 36), (5, 3 * (12 - 5))])
def test_what_is_trained_on_after_its_loader_has_ended_is_in_no_step_but_for_one_batch(
    loop: Loop, timer: FabricPhaseTimer, ahead: int, found: int, caplog: pytest.LogCaptureFixture
) -> None:
    fabric, model, optimizer = new_training(loop, timer)
    loader = new_loader(fabric, loop.gpu, 12)
    for _ in range(3):
        queue: list[Tensor] = []
        for x in loader:
            queue.append(x)
            if len(queue) > ahead:
                train(fabric, loop.gpu, model, optimizer, queue.pop(0))
        for x in queue:
            train(fabric, loop.gpu, model, optimizer, x)
    timer.remove()
    assert len(steps(timer)) == found
    assert steps(timer)[0]["forward"] == steps(timer)[-1]["forward"] == STEP["forward"]
    assert "no loader" not in caplog.text
    assert caplog.text.count("The last 5 updates are in no step") == (ahead == 5)


def test_a_method_of_the_model_itself_is_told(
    gpu: FakeGPU, timer: FabricPhaseTimer, caplog: pytest.LogCaptureFixture
) -> None:
    class Encoder(Layer):
        def encode(self, x: Tensor) -> Tensor:
            return work(self.linear(x), gpu, 4.0, 7.75)

    net = Encoder(gpu, 4.0, 7.75)
    fabric = new_fabric(timer)
    model, optimizer = fabric.setup(net, Adder(net.parameters(), gpu, 2.0))
    model.mark_forward_method("encode")
    for x in new_loader(fabric, gpu, 30):
        fabric.backward(model.encode(x).sum())
        optimizer.step()
    timer.remove()
    assert caplog.text.count("`loss` is 4 ms a step, and `forward` little beside") == 1
    assert 'phase("forward")' in caplog.text
