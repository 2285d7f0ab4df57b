"""DeepSpeed's engine, whose optimizer is not a torch optimizer."""

from typing import Any

import lightning.pytorch as pl
import pytest
from fake_gpu import STEP_MS, Adder, FakeGPU, steps, work
from fake_lightning import Loader, Model, timer_of, trainer
from fake_loop import Loop
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks

UNSCALE_MS, GATHER_MS = 0.5, 1.5
"""Time of an update before and after the update of the inner optimizer."""

REDUCE_MS = 0.75
"""Time to reduce the gradients after torch's backward."""


class Zero:
    """An optimizer like DeepSpeed's, which wraps a torch optimizer of a copy of the weights."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.optimizer = Adder(nn.Linear(2, 2).parameters(), gpu, 2.0)
        self.gpu = gpu
        self.state: dict[Any, Any] = {}
        self.overflows = False

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.gpu.work(UNSCALE_MS)
        if not self.overflows:
            self.optimizer.step()
            self.gpu.work(GATHER_MS)

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


class Engine(nn.Module):
    """A model like DeepSpeed's engine: it runs backward and, in 1 of `every` calls, the update."""

    def __init__(self, module: nn.Module, optimizer: Any, every: int = 1) -> None:
        super().__init__()
        self.module, self.optimizer, self._every = module, optimizer, every
        self._batches = 0

    def gradient_accumulation_steps(self) -> int:
        return self._every

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self._batches + 1) % self._every == 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x)
        return result

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        if isinstance(self.optimizer, Zero):
            self.optimizer.gpu.work(REDUCE_MS)

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._batches += 1


def train(loop: Loop, engine: Engine, n: int, *given: Any, overflows_at: int = -1) -> GPUPhaseHooks:
    """Train the engine with a timer that is given these optimizers."""
    with GPUPhaseHooks(engine, *given, _clock=loop.gpu, warmup_steps=0, lines=False) as timer:
        for number, x in enumerate(timer.steps(loop.batches(n))):
            engine.optimizer.overflows = number == overflows_at
            loop.gpu.work(0.125)
            engine.backward(work(engine(x), loop.gpu, 0.5, 0.25).sum())
            engine.step()
    return timer


STEP = {
    **STEP_MS,
    "backward": STEP_MS["backward"] + REDUCE_MS,
    "optimizer": UNSCALE_MS + 2.0 + GATHER_MS,
}
# The timer does not know the wrapper of the given optimizer.
WITH_INNER_OPTIMIZER = {**STEP, "optimizer": UNSCALE_MS + 2.0, "other": 0.125 + GATHER_MS}


@pytest.mark.parametrize(
    ("gives", "expected"),
    [("engine", STEP), ("optimizer", STEP), ("inner optimizer", WITH_INNER_OPTIMIZER)],
)
def test_deepspeed_engine_is_timed_with_its_optimizer(
    loop: Loop, gives: str, expected: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    zero = Zero(loop.gpu)
    given: dict[str, list[Any]] = {"optimizer": [zero], "inner optimizer": [zero.optimizer]}
    timer = train(loop, Engine(loop.model, zero), 30, *given.get(gives, []))
    assert steps(timer) == [expected] * 30
    assert not caplog.records
    assert "step" not in vars(zero)


def test_deepspeed_engine_sets_the_accumulation(loop: Loop) -> None:
    timer = train(loop, Engine(loop.model, Zero(loop.gpu), every=3), 9)
    accumulated = {name: 3 * ms for name, ms in STEP.items()}
    assert steps(timer) == [{**accumulated, "optimizer": STEP["optimizer"]}] * 3


def test_deepspeed_overflow_is_a_skipped_update(loop: Loop) -> None:
    timer = train(loop, Engine(loop.model, Zero(loop.gpu)), 4, overflows_at=1)
    skipped = {**STEP, "other": STEP["other"] + UNSCALE_MS}
    del skipped["optimizer"]
    assert steps(timer) == [STEP, skipped, STEP, STEP]
    assert timer.summary().skipped_updates == 1


def test_deepspeed_engine_with_a_torch_optimizer_is_timed(loop: Loop) -> None:
    assert steps(train(loop, Engine(loop.model, loop.optimizer), 3)) == [STEP_MS] * 3


def test_deepspeed_update_under_lightning_is_optimizer(gpu: FakeGPU) -> None:
    class UpdatesByEngine(Model):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            optimizer_closure()
            zero.step()  # Like DeepSpeed's engine.

    class WrapOptimizer(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.strategy._optimizers = [zero]  # type: ignore[list-item]

    zero = Zero(gpu)
    timer = timer_of(gpu)
    trainer(WrapOptimizer(), timer).fit(UpdatesByEngine(gpu), Loader(gpu, 3))
    assert steps(timer) == [{**STEP, "backward": STEP_MS["backward"]}] * 3
