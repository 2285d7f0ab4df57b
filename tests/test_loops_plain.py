"""Every plain PyTorch loop that the README's table names, with the exact times of every phase."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import AUTOGRAD
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, steps, work
from fake_loop import Logger, Loop, hooks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gputime import GPUPhaseHooks


def run(loop: Loop, step: Callable[[Tensor], None], n: int = 3, **options: Any) -> Any:
    with hooks(loop, **options) as timer:
        for x in timer.steps(loop.batches(n)):
            loop.gpu.work(0.125)
            step(x)
    return timer


def loss_of(loop: Loop, x: Tensor) -> Tensor:
    return work(loop.model(x), loop.gpu, 0.5, 0.25).sum()


@pytest.mark.parametrize("where", ["before forward", "before backward", "after step"])
def test_wherever_zero_grad_is_called(loop: Loop, where: str) -> None:
    def zero_grad(now: str) -> None:
        if now == where:
            loop.optimizer.zero_grad()
            loop.gpu.work(16.0)

    def step(x: Tensor) -> None:
        zero_grad("before forward")
        loss = loss_of(loop, x)
        zero_grad("before backward")
        loss.backward()
        loop.optimizer.step()
        zero_grad("after step")

    assert steps(run(loop, step)) == [{**STEP_MS, "other": 16.125}] * 3


def test_clipping_is_optimizer(loop: Loop) -> None:
    def step(x: Tensor) -> None:
        loss_of(loop, x).backward()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.gpu.work(3.0)
        loop.optimizer.step()

    assert steps(run(loop, step)) == [{**STEP_MS, "optimizer": 5.0, "other": 0.125}] * 3


def test_the_function_torch_autograd_backward(loop: Loop) -> None:
    def step(x: Tensor) -> None:
        torch.autograd.backward([loss_of(loop, x)])
        loop.optimizer.step()

    assert steps(run(loop, step)) == [STEP_MS] * 3


def test_a_grad_scaler_and_its_skipped_update(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    skipped: list[bool] = []

    def step(x: Tensor) -> None:
        loss = loss_of(loop, x)
        if len(skipped) == 1:
            loss = loss * float("inf")
        skipped.append(False)
        scaler.scale(loss).backward()
        scaler.unscale_(loop.optimizer)
        loop.gpu.work(1.0)
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()

    timer = run(loop, step, _lag=0)
    # Unscaling belongs to `optimizer` where an update follows, else to `other`.
    updated = {**STEP_MS, "optimizer": 3.0}
    without = {name: ms for name, ms in STEP_MS.items() if name != "optimizer"}
    assert steps(timer) == [updated, {**without, "other": 1.125}, updated]
    assert timer.summary().skipped_updates == 1


def test_lbfgs_with_a_closure(loop: Loop) -> None:
    optimizer = torch.optim.LBFGS(loop.model.parameters(), lr=0.0, max_iter=3)

    def step(x: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(loop, x)
            loss.backward()
            return loss

        optimizer.step(closure)

    with GPUPhaseHooks(loop.model, optimizer, _clock=loop.gpu) as timer:
        for x in timer.steps(loop.batches(3)):
            loop.gpu.work(0.125)
            step(x)
    twice = {name: 2 * STEP_MS[name] for name in ("forward", "loss", "backward")}
    assert steps(timer) == [{**STEP_MS, **twice, "optimizer": 0.0}] * 3
    assert timer.summary().skipped_updates == 0


def test_two_backwards_and_retain_graph(loop: Loop) -> None:
    def step(x: Tensor) -> None:
        loss = loss_of(loop, x)
        loss.backward(retain_graph=True)
        loop.gpu.work(1.0)  # between two backwards
        loss.backward()
        loop.optimizer.step()

    expected = {**STEP_MS, "backward": 16.0, "other": 1.125}
    assert steps(run(loop, step)) == [expected] * 3


def test_a_penalty_by_autograd_grad_is_loss(loop: Loop) -> None:
    def step(x: Tensor) -> None:
        loss = loss_of(loop, x)
        [grad, *_] = torch.autograd.grad(loss, [*loop.model.parameters()], retain_graph=True)
        (loss + 0 * grad.sum()).backward()
        loop.optimizer.step()

    assert steps(run(loop, step)) == [{**STEP_MS, "loss": 8.5}] * 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(loop: Loop, use_reentrant: bool) -> None:
    def step(x: Tensor) -> None:
        x.requires_grad_()
        out = checkpoint(loop.model, x, use_reentrant=use_reentrant)
        work(out, loop.gpu, 0.5, 0.25).sum().backward()
        loop.optimizer.step()

    assert steps(run(loop, step)) == [{**STEP_MS, "backward": 12.0}] * 3


def test_checkpointing_inside_autograd_grad_does_not_hide_the_next_forward(loop: Loop) -> None:
    def step(x: Tensor) -> None:
        x.requires_grad_()
        loss = work(checkpoint(loop.model, x, use_reentrant=False), loop.gpu, 0.5, 0.25).sum()
        torch.autograd.grad(loss, [x], retain_graph=True)
        loss.backward()
        loop.optimizer.step()

    # The penalty recomputes, too: 0.5 + 0.25 + 4 + 7.75 ms of loss.
    expected = {**STEP_MS, "loss": 12.5, "backward": 12.0}
    assert steps(run(loop, step)) == [expected] * 3


def test_a_gan_with_two_optimizers(gpu: FakeGPU) -> None:
    models = nn.ModuleList([Layer(gpu, 1.0, 2.0), Layer(gpu, 4.0, 8.0)])
    generator, critic = models
    optimizers = [Adder(model.parameters(), gpu, 0.5) for model in models]
    with GPUPhaseHooks(models, optimizers, _clock=gpu) as timer:
        for _ in timer.steps(range(3)):
            fake = generator(torch.ones(1, 2))
            critic(fake.detach()).sum().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            critic(fake).sum().backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
    nothing = {"data": 0.0, "loss": 0.0, "other": 0.0}
    expected = {"forward": 9.0, "backward": 18.0, "optimizer": 1.0, **nothing}
    assert steps(timer) == [expected] * 3


def test_an_extra_forward_without_grad_is_forward_and_a_teachers_is_not(loop: Loop) -> None:
    teacher = Layer(loop.gpu, 2.0)

    def step(x: Tensor) -> None:
        with torch.no_grad():
            teacher(x)
        loss_of(loop, x).backward()
        loop.optimizer.step()
        with torch.no_grad():
            loop.model(x)

    expected = {**STEP_MS, "other": 2.125, "forward": 8.0}
    assert steps(run(loop, step)) == [expected] * 3


def test_a_validation_at_the_end_of_the_body_belongs_to_no_step(loop: Loop) -> None:
    def step(x: Tensor) -> None:
        loop.train(x)
        loop.model.eval()
        with torch.no_grad():
            loop.model(x)
        loop.model.train()

    assert steps(run(loop, step)) == [{**STEP_MS, "other": 0.25}] * 3


def test_hooks_only_with_backward_named_by_hand(loop: Loop) -> None:
    before = AUTOGRAD._engine_run_backward
    with hooks(loop, wrap_backward=False) as timer:
        assert AUTOGRAD._engine_run_backward is before
        for x in timer.steps(loop.batches(3)):
            loop.gpu.work(0.125)
            loss = loss_of(loop, x)
            with timer.phase("backward"):
                loss.backward()
            loop.gpu.work(1.0)
            loop.optimizer.step()
    assert steps(timer) == [{**STEP_MS, "optimizer": 3.0}] * 3


def test_nested_and_sequential_timers_read_the_same(loop: Loop) -> None:
    with hooks(loop) as outer:
        for x in outer.steps(loop.batches(2)):
            loop.train(x)
        with hooks(loop) as inner:
            for x in outer.steps(inner.steps(loop.batches(3))):
                loop.train(x)
    assert steps(outer) == [STEP_MS] * 5
    assert steps(inner) == [STEP_MS] * 3


def time_two(gpu: FakeGPU, n: int, *options: dict[str, Any]) -> list[list[dict[str, float]]]:
    """Trains two models in turn, each with its timer, and returns the steps of both."""
    loops = [Loop(gpu) for _ in options]
    timers = [hooks(loop, **own).attach() for loop, own in zip(loops, options, strict=True)]
    for _ in range(n):
        for loop, timer in zip(loops, timers, strict=True):
            loop.train(torch.ones(1, 2))
            timer.step()
    for timer in timers:
        timer.remove()
    return [steps(timer) for timer in timers]


def test_two_timers_on_two_models_do_not_mix(gpu: FakeGPU) -> None:
    first, second = time_two(gpu, 3, {}, {})
    # The other's step is what lies between two steps of one's own.
    other = sum(STEP_MS.values()) - STEP_MS["data"] + 0.125
    alone = {**STEP_MS, "data": 0.125, "other": 0.0}
    assert first == [alone, *[{**alone, "data": other}] * 2]
    assert second == [{**alone, "data": other}] * 3


@pytest.mark.parametrize(
    "options",
    [
        ({}, {"every_n_steps": 4}),
        ({"every_n_steps": 4}, {}),
        ({"every_n_steps": 2}, {"every_n_steps": 2}),
        ({"every_n_steps": 3}, {"every_n_steps": 2}),
        ({}, {"probe_every_n_steps": 5}),
    ],
)
def test_two_timers_of_which_one_rests_do_not_mix(
    gpu: FakeGPU, options: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    for timed in time_two(gpu, 24, *options):
        assert len(timed) >= 6
        assert {one["backward"] for one in timed} == {STEP_MS["backward"]}


def test_data_parallel_is_refused_on_several_devices_alone(loop: Loop) -> None:
    parallel = nn.DataParallel(loop.model)
    # On one device it calls the module in the loop's thread.
    loop.model = parallel  # type: ignore[assignment]
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(2)):
            loop.train(x)
    assert steps(timer) == [STEP_MS] * 2
    parallel.device_ids = [0, 1]
    model = nn.Sequential(parallel)
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        GPUPhaseHooks(model)


def test_accumulation_with_a_scaler_that_skips(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    logger = Logger()
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1}
    with hooks(loop, accumulate_grad_batches=2, **options) as timer:
        for number, x in enumerate(timer.steps(loop.batches(6))):
            scaler.scale(loss_of(loop, x) * (float("inf") if number == 2 else 1.0)).backward()
            if number % 2:
                scaler.step(loop.optimizer)
                scaler.update()
                loop.optimizer.zero_grad()
    assert [one["forward"] for one in steps(timer)] == [8.0, 8.0, 8.0]
    assert timer.summary().skipped_updates == 1
    assert [step for step, _ in logger.calls] == [0, 1, 2]
