"""What is known of a Trainer of transformers, and who stands behind its callbacks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

try:
    from transformers import Trainer as Trainer
    from transformers import TrainerCallback as TrainerCallback
except ImportError as error:
    raise ImportError(
        "lightning_gputime.huggingface needs transformers and accelerate: python -m pip install"
        " transformers accelerate"
    ) from error

from lightning_gputime._boundaries.loop import Batch, Loop

# They show what is logged: a line of ten more numbers would be no help.
_PRINTERS = ("NotebookProgressCallback", "PrinterCallback", "ProgressCallback")


def loop_of(
    trainer: Any, model: nn.Module, optimizer: Any, submodules: Mapping[str, nn.Module]
) -> Loop:
    """Describes the loop in which a Trainer trains, or one that nothing else is known of."""
    return Loop(
        # As the Trainer calls it: DDP's wrapper, the compiled module, the sharded model.
        model if trainer is None else trainer.model_wrapped,
        [one for one in [optimizer] if isinstance(one, torch.optim.Optimizer)],
        pause_evaluation=trainer is None,
        submodules=submodules,
        batch=Batch(is_open=trainer is None),
    )


def known_of(trainer: Any, args: Any) -> dict[str, Any]:
    """Returns what a Trainer knows of what it runs on, see `Environment`."""
    known = {
        "accumulate_grad_batches": args.gradient_accumulation_steps,
        "batch_size": args.per_device_train_batch_size,
    }
    if trainer is not None:
        precision = getattr(trainer.accelerator, "mixed_precision", "no")
        known["precision"] = None if precision == "no" else f"{precision}-mixed"
    return known


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
    """Puts a timer before all callbacks of its Trainer, and `Back` behind. Safe to call twice."""
    handler = trainer.callback_handler
    others = [
        one
        for one in handler.callbacks
        if one is not timer and not (isinstance(one, Back) and one.timer is timer)
    ]
    printers = [one for one in others if type(one).__name__ in _PRINTERS]
    reporters = [one for one in others if type(one).__name__ not in _PRINTERS]
    # A new list: the Trainer may be on its way through the old one.
    handler.callbacks = [timer, *reporters, Back(timer), *printers]
