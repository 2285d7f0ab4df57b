"""What is known of a Trainer of transformers, and what is put on it."""

import functools
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

try:
    from transformers import TrainerCallback as TrainerCallback
except ImportError as error:
    raise ImportError(
        "lightning_gputime.huggingface needs transformers and accelerate: python -m pip install"
        " 'lightning-gputime[huggingface]'"
    ) from error

from lightning_gputime._boundaries.loop import Batch, Loop

# They show what is logged: a line of ten more numbers would be no help.
_PRINTERS = ("NotebookProgressCallback", "PrinterCallback", "ProgressCallback")

# More lie not between a callback's hook and the method of the Trainer that calls it.
_FRAMES = 20


def trainer_of(callback: TrainerCallback) -> Any:
    """Returns the Trainer that calls a callback just now, or None."""
    # A callback is given everything but the Trainer, and the list of callbacks.
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            break
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None)
        if any(one is callback for one in getattr(handler, "callbacks", ())):
            return owner
        frame = frame.f_back
    return None


def loop_of(trainer: Any, submodules: Mapping[str, nn.Module]) -> Loop:
    """Describes the loop in which a Trainer trains its model."""
    return Loop(
        # As the Trainer calls it: DDP's wrapper, the compiled module, the sharded model.
        trainer.model_wrapped,
        [one for one in [trainer.optimizer] if isinstance(one, torch.optim.Optimizer)],
        submodules=submodules,
        batch=Batch(is_open=False),
    )


def known_of(trainer: Any) -> dict[str, Any]:
    """Returns what a Trainer knows of what it runs on, see `Environment`."""
    precision = getattr(trainer.accelerator, "mixed_precision", "no")
    return {
        "precision": None if precision == "no" else f"{precision}-mixed",
        "accumulate_grad_batches": trainer.args.gradient_accumulation_steps,
        "batch_size": trainer.args.per_device_train_batch_size,
    }


class Front(TrainerCallback):
    """Stands before all other callbacks, those that report included.

    Args:
        timer: Has the methods `_step_ends` and `_log_begins`.
    """

    def __init__(self, timer: Any) -> None:
        self.timer = timer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the step: what callbacks do is no part of it."""
        self.timer._step_ends(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Puts the phases beside the loss."""
        self.timer._log_begins(logs)


class Back(TrainerCallback):
    """Stands behind all callbacks that report, before those that print.

    Args:
        timer: Has the method `_log_ends`.
    """

    def __init__(self, timer: Any) -> None:
        self.timer = timer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Takes the phases out again."""
        # What is logged is also what `evaluate` returns: a search for hyperparameters adds it up.
        self.timer._log_ends(logs)


def stand_around(trainer: Any, timer: TrainerCallback) -> None:
    """Puts `Front` and `Back` into the callbacks of a Trainer. Safe to call twice."""
    handler = trainer.callback_handler
    if any(isinstance(one, Front) and one.timer is timer for one in handler.callbacks):
        return
    behind = len(handler.callbacks)
    while behind and type(handler.callbacks[behind - 1]).__name__ in _PRINTERS:
        behind -= 1
    # A new list: the Trainer may be on its way through the old one.
    before, after = handler.callbacks[:behind], handler.callbacks[behind:]
    handler.callbacks = [Front(timer), *before, Back(timer), *after]


def listen(trainer: Any, methods: Mapping[str, tuple[str, str]]) -> None:
    """Lets the timers among a Trainer's callbacks know of calls of its methods. Safe to call twice.

    Args:
        trainer: The Trainer.
        methods: For the name of a method of the Trainer's the names of two of the timer's: one that
            is called before it, with the Trainer and the arguments, and one that is called after
            it, with the error, if one was raised.
    """
    cls: Any = type(trainer)
    if "_tells" not in vars(cls):
        # Its class is one that tells. What stands on the object itself would hold the Trainer, and
        # its model with it, until the next garbage collection.
        trainer.__class__ = _telling(cls, tuple(methods.items()))


@functools.cache
def _telling(cls: Any, methods: tuple[tuple[str, tuple[str, str]], ...]) -> type:
    telling = type(cls.__name__, (cls,), {"_tells": True})
    for name in ("__doc__", "__module__", "__qualname__"):
        setattr(telling, name, getattr(cls, name))
    for name, (begins, ends) in methods:
        if hasattr(cls, name):
            setattr(telling, name, _told(getattr(cls, name), begins, ends))
    return telling


def _told(method: Callable[..., Any], begins: str, ends: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        timers = _timers_of(self)
        for timer in timers:
            getattr(timer, begins)(self, *args, **kwargs)
        error: BaseException | None = None
        try:
            return method(self, *args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            for timer in timers:
                getattr(timer, ends)(error)
            error = None  # Its traceback holds this frame.

    return told


def _timers_of(trainer: Any) -> list[Any]:
    """Returns the timers that are a Trainer's callbacks: one may have been removed."""
    callbacks = trainer.callback_handler.callbacks
    timers = [one.timer for one in callbacks if isinstance(one, Front)]
    return [timer for timer in timers if any(one is timer for one in callbacks)]
