"""All that reaches into Lightning; the only place with its private names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_gputime._boundaries.loop import Batch, Loop
from lightning_gputime._boundaries.optimizer import is_optimizer
from lightning_gputime._boundaries.patching import Calls, Subscription
from lightning_gputime._results.means import MeanLog


def loop_of(
    trainer: pl.Trainer, model: pl.LightningModule, submodules: Mapping[str, torch.nn.Module]
) -> Loop:
    """Describe the loop in which a trainer trains a model."""
    wrappers = [] if model.automatic_optimization else model.optimizers()
    return Loop(
        model,
        # Those in the style of Lookahead are none of torch's, and may never update by one inside.
        # For none at all Lightning has one that updates nothing.
        [
            one
            for one in trainer.optimizers
            if is_optimizer(one) and type(one).__name__ != "_MockOptimizer"
        ],
        optimizer_wrappers=wrappers if isinstance(wrappers, list) else [wrappers],
        wrapper=wrapper_of(trainer),
        compiled_step=getattr(model, "_compiler_ctx", None) is not None,
        submodules=submodules,
        batch=Batch(is_open=False),
        needs_updates=not model.automatic_optimization,
    )


def mean_log_of(trainer: pl.Trainer, prefix: str, row: Mapping[str, float]) -> MeanLog:
    """Return what logs means when and where a trainer logs."""
    every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]  # has no hint
    log = partial(publish, trainer)
    return MeanLog(prefix, every_n_steps, trainer.loggers, log, row=row)


def publish(trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
    """Let other callbacks find metrics."""
    # In one go: Lightning gathers them anew at each look.
    trainer.callback_metrics.update({key: torch.tensor(ms) for key, ms in metrics.items()})


def step_number(trainer: pl.Trainer) -> int:
    """Return the number that Lightning logs the current step under."""
    # Not `global_step`, which counts two in a batch with two optimizers, and none of an optimizer
    # that Lightning does not wrap.
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def ends_update(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether the trainer lets the optimizers run after this batch, as far as it can say."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def fetch_action(trainer: pl.Trainer) -> str:
    """Return the name of the action that fetches a batch."""
    return f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next"


def copy_action(trainer: pl.Trainer) -> str:
    """Return the name of the action that takes a batch to the device."""
    return f"[Strategy]{type(trainer.strategy).__name__}.batch_to_device"


def callback_action(callback: pl.Callback, hook: str) -> str:
    """Return the name of the action that calls a callback."""
    return f"[Callback]{callback.state_key}.{hook}"


def module_action(
    trainer: pl.Trainer, module: pl.LightningModule | pl.LightningDataModule, hook: str
) -> str:
    """Return the name of the action that calls a LightningModule, or its data."""
    # Not by its class: there are two packages of that name.
    kind = "LightningModule" if module is trainer.lightning_module else "LightningDataModule"
    return f"[{kind}]{type(module).__name__}.{hook}"


def defines(one: object, hook: str) -> bool:
    """Return whether a callback or module does something in a hook."""
    module = getattr(getattr(one, hook, None), "__module__", None) or ""
    return hasattr(one, hook) and not module.endswith((".callbacks.callback", ".core.hooks"))


def broadcasts_of(trainer: pl.Trainer) -> tuple[Any, str] | None:
    """Return the object and its method by which a trainer waits for other ranks at each batch.

    Since 2.6 it broadcasts there whether it was asked to end, and reads the answer with `.item()`:
    a collective, and a wait of the host, in every batch.
    """
    owner, name = trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"
    return (owner, name) if trainer.world_size > 1 and hasattr(owner, name) else None


def wrapper_of(trainer: pl.Trainer) -> torch.nn.Module | None:
    """Return the module that the strategy calls in place of the LightningModule, if it does."""
    # Under DDP, FSDP and DeepSpeed it runs the whole training step, loss included.
    model = trainer.strategy.model
    return None if model is trainer.lightning_module else model


def listen_to_actions(
    trainer: Any, calls: Mapping[str, Callable[[], object]], fail: Callable[[Exception], None]
) -> Subscription:
    """Call functions, by the name of the action, when a trainer starts certain actions.

    A Trainer notifies its profiler of all actions, even of one that does nothing, before it calls
    any callback: so the order of the callbacks does not matter. Errors go to `fail`.
    """
    profiler = trainer.profiler
    # Who has put something there since must be called, too.
    is_idle = type(profiler).__name__ == "PassThroughProfiler" and "start" not in vars(profiler)
    name = "start_alone" if is_idle else "start"
    return Subscription(
        profiler, "start", (calls, fail), lambda *known: getattr(_Dispatcher(*known), name)
    )


# A step has dozens of actions, of which a few are waited for: the others must cost next to nothing.
class _Dispatcher:
    """Stand in for a profiler's `start` by a method, which can be pickled as others can."""

    __slots__ = ("_call", "_listeners", "_patch")

    def __init__(self, call: Callable[[str], Any], listeners: list[Any]) -> None:
        self._call, self._listeners = call, listeners

    def __reduce__(self) -> tuple[Any, ...]:
        return _Dispatcher, (self._call, [])  # Nobody listens to the copy of a profiler.

    def start(self, action_name: str) -> Any:
        self.start_alone(action_name)
        return self._call(action_name)

    def start_alone(self, action_name: str) -> None:
        for calls, fail in self._listeners:
            if action_name in calls:
                try:
                    calls[action_name]()
                except Exception as error:
                    fail(error)


def call_at_start(owner: Any, name: str, call: Callable[[], object]) -> Subscription:
    """Call a function, without arguments, whenever `owner.name` is called."""

    def begins(*_: Any, **__: Any) -> bool:
        call()
        return False

    return Subscription(owner, name, Calls(begins))
