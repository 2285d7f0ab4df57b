"""Private names of Lightning. It imports none: there are two packages of that name."""

from collections.abc import Callable
from typing import Any

from lightning_gputime._compat.names import Name, report_missing_of

_LOOP = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"
_STEPS = Name(f"{_LOOP}._batches_that_stepped", "the step numbers of Lightning's loggers")
_VALIDATION = Name(f"{_LOOP}.val_loop", "the start of a validation inside an epoch")
# Before 2.6 there is none, and nothing to be measured.
_BROADCAST = Name(f"{_LOOP}._broadcast_sigterm_tensor")
_COMPILED_STEP = Name(
    "lightning.pytorch.LightningModule._compiler_ctx", "a training_step that is compiled as a whole"
)


def report_missing_names(trainer: Any, model: Any) -> None:
    """Report what of a trainer cannot be measured."""
    report_missing_of(trainer.fit_loop.epoch_loop, _STEPS, _VALIDATION)
    report_missing_of(model, _COMPILED_STEP)


def step_counter(trainer: Any) -> Callable[[], int]:
    """Return a function that returns the number that Lightning logs the current step under."""
    # Not `global_step`, which counts two in a batch with two optimizers, and none of an optimizer
    # that Lightning does not wrap.
    loop = trainer.fit_loop.epoch_loop
    if _STEPS.is_in(loop):
        return lambda: loop._batches_that_stepped
    return lambda: loop.batch_progress.total.completed // trainer.accumulate_grad_batches


def is_step_compiled(model: Any) -> bool:
    """Return whether the `training_step` of a LightningModule is compiled as a whole."""
    return _COMPILED_STEP.of(model) is not None


def is_placeholder(optimizer: object) -> bool:
    """Return whether it is what Lightning has in place of no optimizer, and updates nothing."""
    # By the module of its class, whose name is private.
    package, _, module = type(optimizer).__module__.partition(".")
    return package in ("lightning", "pytorch_lightning") and module.endswith("core.optimizer")


def sigterm_broadcast(trainer: Any) -> tuple[Any, str] | None:
    """Return the object and its method by which a trainer waits for other ranks at each batch.

    Since 2.6 it broadcasts there whether it was asked to end, and reads the answer with `.item()`:
    a collective, and a wait of the host, in every batch.
    """
    owner, name = trainer.fit_loop.epoch_loop, _BROADCAST.attribute
    return (owner, name) if trainer.world_size > 1 and _BROADCAST.is_in(owner) else None


def validation_entry(trainer: Any) -> tuple[Any, str] | None:
    """Return the object and its method that runs a validation, or None."""
    loop = _VALIDATION.of(trainer.fit_loop.epoch_loop)
    return (loop, "run") if hasattr(loop, "run") else None


def is_idle(profiler: object) -> bool:
    """Return whether it is the profiler of a Trainer that was given none, and does nothing."""
    return type(profiler).__name__ == "PassThroughProfiler" and "start" not in vars(profiler)


# The names of actions, of which a Trainer notifies its profiler before it begins them


def fetch_action(trainer: Any) -> str:
    """Return the name of the action that fetches a batch."""
    return f"[{type(trainer.fit_loop.epoch_loop).__name__}].train_dataloader_next"


def copy_action(trainer: Any) -> str:
    """Return the name of the action that takes a batch to the device."""
    return f"[Strategy]{type(trainer.strategy).__name__}.batch_to_device"


def callback_action(callback: Any, hook: str) -> str:
    """Return the name of the action that calls a callback."""
    return f"[Callback]{callback.state_key}.{hook}"


def module_action(trainer: Any, module: Any, hook: str) -> str:
    """Return the name of the action that calls a LightningModule, or its data."""
    # Not by its class: there are two packages of that name.
    kind = "LightningModule" if module is trainer.lightning_module else "LightningDataModule"
    return f"[{kind}]{type(module).__name__}.{hook}"


def defines(one: object, hook: str) -> bool:
    """Return whether a callback or module does something in a hook."""
    module = getattr(getattr(one, hook, None), "__module__", None) or ""
    return hasattr(one, hook) and not module.endswith((".callbacks.callback", ".core.hooks"))
