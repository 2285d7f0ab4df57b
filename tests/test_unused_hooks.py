"""Hooks of every batch that the timer does not need: Lightning does not call them."""

import copy
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
from fake_gpu import FakeGPU
from fake_lightning import Model, fit

from lightning_gputime import GPUPhaseTimer

UNUSED = {
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
}


class Watch(pl.Callback):
    """Remembers which hooks of a timer are not called, and what copies of it have."""

    def __init__(self, timer: GPUPhaseTimer) -> None:
        self.timer = timer
        self.not_called: set[str] = set()
        self.in_copies: set[str] = set()

    def on_train_batch_end(self, *_: Any) -> None:
        self.not_called |= {name for name in UNUSED if getattr(self.timer, name) is None}
        for one in (copy.deepcopy(self.timer), pickle.loads(pickle.dumps(self.timer))):
            self.in_copies |= UNUSED & vars(one).keys()


def test_hooks_that_do_nothing_are_left_out_while_it_trains(gpu: FakeGPU) -> None:
    timer = GPUPhaseTimer(clock=gpu, summary=False)
    watch = Watch(timer)
    fit(gpu, Model(gpu), timer=timer, callbacks=[watch])
    assert watch.not_called == UNUSED
    assert not watch.in_copies
    assert not UNUSED & vars(timer).keys()


def test_they_come_back_after_an_error(gpu: FakeGPU) -> None:
    class Fails(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

    timer = GPUPhaseTimer(clock=gpu, summary=False)
    with pytest.raises(ZeroDivisionError):
        fit(gpu, Fails(gpu), timer=timer)
    assert not UNUSED & vars(timer).keys()


def test_a_subclass_that_uses_one_keeps_it(gpu: FakeGPU) -> None:
    class Mine(GPUPhaseTimer):
        calls = 0

        def on_after_backward(self, *_: Any) -> None:
            self.calls += 1
            super().on_after_backward(*_)

    timer = Mine(clock=gpu, summary=False)
    fit(gpu, Model(gpu), timer=timer, n=3)
    assert timer.calls == 3


def test_a_timer_inside_another_callback_has_all_hooks(gpu: FakeGPU) -> None:
    def passes(name: str) -> Any:
        return lambda *args, **kwargs: getattr(inner, name)(*args, **kwargs)

    class Passes(pl.Callback):
        def __init__(self) -> None:
            hooks = [name for name in dir(pl.Callback) if name.startswith("on_")]
            vars(self).update({name: passes(name) for name in ("setup", "teardown", *hooks)})

    inner = GPUPhaseTimer(clock=gpu, summary=False, warmup_steps=0)
    fit(gpu, Model(gpu), callbacks=[Passes()], n=4)
    assert inner.summary().steps == 4


@pytest.mark.parametrize("of", [lambda timer: timer, lambda timer: [timer]])
def test_a_timer_has_all_hooks_that_another_callback_passes_on(gpu: FakeGPU, of: Any) -> None:
    class Calls(pl.Callback):
        def __init__(self, timer: GPUPhaseTimer) -> None:
            self.others = of(timer)

        def on_after_backward(self, *args: Any) -> None:
            for one in self.others if isinstance(self.others, list) else [self.others]:
                one.on_after_backward(*args)

    timer = GPUPhaseTimer(clock=gpu, summary=False, warmup_steps=0)
    fit(gpu, Model(gpu), timer=timer, callbacks=[Calls(timer)], n=3)
    assert timer.summary().steps == 3


def test_an_update_is_seen_where_a_subclass_has_that_hook_for_itself(gpu: FakeGPU) -> None:
    class Mine(GPUPhaseTimer):
        def on_before_optimizer_step(self, *_: Any) -> None:
            pass

    class Skips(Model):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            plugin: Any = self.trainer.precision_plugin
            plugin._wrap_closure(self, self.optimizers(), args[-1])

    timer = Mine(clock=gpu, summary=False, warmup_steps=0)
    fit(gpu, Skips(gpu), timer=timer, n=3)
    assert timer.summary().steps == 3
    assert timer.summary().skipped_updates == 3
