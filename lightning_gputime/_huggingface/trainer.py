"""What is known of a Trainer of transformers, and what is put on it."""

import functools
import sys
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

try:
    from transformers import TrainerCallback
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


class Around:
    """What a method of a Trainer is replaced by, on that Trainer alone.

    A copy of the Trainer has the method itself. The Trainer lives no longer because of it.

    Args:
        trainer: The Trainer.
        name: The name of its method.
        timer: Is told of each call.
        begins: The name of the timer's method that is called first, with the Trainer and what the
            Trainer's method is called with.
        ends: That of the one which is called last, with the error, if one was raised.
    """

    def __init__(self, trainer: Any, name: str, timer: Any, begins: str, ends: str) -> None:
        self._trainer, self._name = weakref.ref(trainer), name
        self.timer, self._begins, self._ends = timer, begins, ends
        self.inner = vars(trainer).get(name)
        """What somebody else, or another timer, has replaced the method by."""

    @classmethod
    def put(cls, trainer: Any, name: str, timer: Any, begins: str, ends: str) -> None:
        """Puts one on a Trainer. Safe to call twice; does nothing if it has no such method."""
        one = vars(trainer).get(name)
        while isinstance(one, cls) and one.timer is not timer:
            one = one.inner
        if not isinstance(one, cls) and hasattr(trainer, name):
            setattr(trainer, name, cls(trainer, name, timer, begins, ends))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        getattr(self.timer, self._begins)(self._trainer(), *args, **kwargs)
        error: BaseException | None = None
        try:
            return self._method()(*args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            getattr(self.timer, self._ends)(error)
            error = None  # Its traceback holds this frame.

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._method(),)

    def _method(self) -> Any:
        if self.inner is not None:
            return self.inner
        trainer = self._trainer()
        return functools.partial(getattr(type(trainer), self._name), trainer)


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


def has_callback(trainer: Any, callback: TrainerCallback) -> bool:
    """Tells whether a Trainer has a callback: it may have been removed."""
    return any(one is callback for one in trainer.callback_handler.callbacks)


def _same(one: Any) -> Any:
    return one
