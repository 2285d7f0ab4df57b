"""Private names of Lightning. It imports none: there are two packages of that name."""

from typing import Any

from lightning_gputime._compat.names import Name
from lightning_gputime._phases import CALLBACKS, DATA, FORWARD, LOSS

STEP_COUNT = Name(
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._batches_that_stepped",
    "the step numbers of Lightning's loggers",
)
COMPILED_STEP = Name(
    "lightning.pytorch.LightningModule._compiler_ctx",
    "a training_step that is compiled as a whole",
    (FORWARD, LOSS),
)
BROADCAST = Name(
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor",
    "the wait for other ranks at each batch",
    (DATA, CALLBACKS),
)


def step_number(trainer: Any) -> int:
    """Return the number that Lightning logs the current step under."""
    # Not `global_step`, which counts two in a batch with two optimizers, and none of an optimizer
    # that Lightning does not wrap.
    number: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return number


def is_step_compiled(model: Any) -> bool:
    """Return whether the `training_step` of a LightningModule is compiled as a whole."""
    return COMPILED_STEP.of(model) is not None


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
    owner, name = trainer.fit_loop.epoch_loop, BROADCAST.attribute
    return (owner, name) if trainer.world_size > 1 and BROADCAST.is_in(owner) else None


def validation_entry(trainer: Any) -> tuple[Any, str]:
    """Return the object and its method that runs a validation."""
    return trainer.fit_loop.epoch_loop.val_loop, "run"


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
