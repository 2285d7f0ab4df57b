"""A Trainer of Lightning as a timer sees it: its loop, its logs and its actions."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_gputime._compat import lightning_
from lightning_gputime._instrumentation.loop import Batch, Loop
from lightning_gputime._instrumentation.optimizer import is_optimizer, parameters_of
from lightning_gputime._instrumentation.patching import Calls, Subscription
from lightning_gputime._measurement.means import MeanLog
from lightning_gputime._options import Options
from lightning_gputime._output.loggers import LogWriter


def loop_of(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    submodules: Mapping[str, torch.nn.Module],
    own: type,
) -> Loop:
    """Describe the loop in which a trainer trains a model. Callbacks of class `own` are timers."""
    wrappers = [] if model.automatic_optimization else model.optimizers()
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # has no hint
    # A step that takes the iterator fetches by itself.
    fetches = "dataloader_iter" in signature(model.training_step).parameters
    others = [callback for callback in callbacks if not isinstance(callback, own)]
    return Loop(
        model,
        [optimizer for optimizer in trainer.optimizers if _updates(optimizer)],
        optimizer_wrappers=wrappers if isinstance(wrappers, list) else [wrappers],
        wrapper=wrapper_of(trainer),
        compiled_step=lightning_.is_step_compiled(model),
        trains_in_closure=model.automatic_optimization,
        submodules=submodules,
        batch=Batch(is_open=False),
        needs_updates=not model.automatic_optimization,
        expects=[] if fetches else lightning_.expected_of(trainer, others),
        # An `optimizer_step` of the model's may leave updates out, which the trainer counts.
        counts_steps=model.automatic_optimization
        and not lightning_.defines(model, "optimizer_step"),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        every_step_log="log_every_n_steps" if _logs_every_step(trainer) else "",
    )


def _logs_every_step(trainer: pl.Trainer) -> bool:
    every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]  # has no hint
    return every_n_steps == 1 and len(trainer.loggers) > 0


def _updates(optimizer: Any) -> bool:
    """Return whether an optimizer is a torch optimizer, or contains one, and has what to update.

    Lightning's placeholder for no optimizer has no groups, or one tensor without gradients.
    Optimizers in the style of Lookahead are not torch optimizers, and may never update by one
    inside.
    """
    if not is_optimizer(optimizer):
        return False
    groups = getattr(optimizer, "param_groups", None)
    parameters = parameters_of(optimizer)
    if not parameters:
        return groups is None or len(groups) > 0
    return any(getattr(parameter, "requires_grad", True) for parameter in parameters)


def log_writer_of(trainer: pl.Trainer, options: Options, row: Mapping[str, float]) -> LogWriter:
    """Return a writer to the loggers and the metrics of a trainer."""
    publish_to = partial(publish, trainer)
    groups = options.logged_groups
    return LogWriter(options.prefix, trainer.loggers, publish_to, groups=groups, row=row)


def mean_log_of(trainer: pl.Trainer, options: Options, row: Mapping[str, float]) -> MeanLog:
    """Return a log of means in the steps in which a trainer logs."""
    every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]  # has no hint
    return MeanLog(every_n_steps, log_writer_of(trainer, options, row))


def publish(trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
    """Let other callbacks find metrics."""
    lightning_.publish(trainer, {key: torch.tensor(ms) for key, ms in metrics.items()})


def ends_update(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether the trainer lets the optimizers run after this batch, as far as it can say."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def wrapper_of(trainer: pl.Trainer) -> torch.nn.Module | None:
    """Return the module that the strategy calls in place of the LightningModule, if it does."""
    # Under DDP, FSDP and DeepSpeed it runs the whole training step, loss included.
    model = trainer.strategy.model
    return None if model is trainer.lightning_module else model


class ActionListener:
    """Call functions when a trainer starts certain actions; an attachment.

    A Trainer notifies its profiler of every action, even of an action that does nothing, before it
    calls any callback. So the order of the callbacks does not matter.

    Args:
        profiler: Profiler of the trainer.
        calls: Functions by the name of the action.
        fail: Takes errors of the functions.
    """

    def __init__(
        self,
        profiler: Any,
        calls: Mapping[str, Callable[[], object]],
        fail: Callable[[Exception], None],
    ) -> None:
        # Another profiler, or a patch of other code, must be called as well.
        wrap = _ActionCalls if lightning_.is_idle(profiler) else _relay
        self._subscription = Subscription(profiler, "start", (calls, fail), wrap)

    def put_on(self) -> None:
        self._subscription.put_on()
        self.refresh()

    def remove(self) -> None:
        self._subscription.remove()

    def refresh(self) -> None:
        """Apply changes of the calls."""
        stand_in = self._subscription.patch.replacement
        getattr(stand_in, "__self__", stand_in).clear()


_MAX_IGNORED = 1000  # Names of actions may contain numbers.


class _ActionCalls(dict[str, None]):
    """The function `start` of an idle profiler, as a dict of the actions that nobody listens to.

    A step has dozens of actions, and few have a listener. Calling the dict looks an action up, in C
    and without a Python call. Only a missing action, which may have a listener, reaches Python.
    """

    __slots__ = ("_listeners",)

    def __init__(self, _: Callable[[str], Any] | None = None, listeners: Any = ()) -> None:
        super().__init__()
        self._listeners: list[Any] = listeners

    __call__ = dict.__getitem__

    def __missing__(self, action_name: str) -> None:
        is_ignored = True
        for calls, fail in self._listeners:
            if action_name in calls:
                is_ignored = False
                try:
                    calls[action_name]()
                except Exception as error:
                    fail(error)
        if is_ignored and len(self) < _MAX_IGNORED:
            self[action_name] = None

    def __bool__(self) -> bool:
        return True  # As functions are, also while it is empty.

    def __hash__(self) -> int:  # type: ignore[override]  # a function, not a value
        return id(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ActionCalls, ()  # Nobody listens to the copy of a profiler.


def _relay(call: Callable[[str], Any], listeners: list[Any]) -> Callable[[str], Any]:
    return _Relay(call, listeners).start


class _Relay:
    """Replacement for `start` of an active profiler. It can be pickled."""

    __slots__ = ("_actions", "_call")

    def __init__(self, call: Callable[[str], Any], listeners: list[Any]) -> None:
        self._call, self._actions = call, _ActionCalls(None, listeners)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Relay, (self._call, [])  # Nobody listens to the copy of a profiler.

    def clear(self) -> None:
        self._actions.clear()

    def start(self, action_name: str) -> Any:
        self._actions[action_name]
        return self._call(action_name)


def call_at_start(owner: Any, name: str, call: Callable[[], object]) -> Subscription:
    """Call a function, without arguments, whenever `owner.name` is called."""

    def begins(*_: Any, **__: Any) -> bool:
        call()
        return False

    return Subscription(owner, name, Calls(begins))
