"""Internals of transformers and TRL trainers."""

import sys
from collections.abc import Iterator, Mapping
from inspect import isfunction
from typing import Any

import torch

from lightning_gputime._compat import (
    MISSING,
    Expected,
    Name,
    read,
    report,
    report_missing,
    report_missing_of,
    version_of,
)
from lightning_gputime._phases import CALLBACKS, DATA, FETCH, FORWARD, LOSS

MODULE = "transformers.trainer"
TRAINING = {MODULE: "train"}
"""The module of the Trainer, and its function that trains."""

GENERATES = ("generate", "generate_batch")
"""The methods of a model that generate text."""

_DEFAULTS = Name(f"{MODULE}.DEFAULT_CALLBACKS", "Trainers without a timer, under run")


def default_callbacks() -> list[Any]:
    """Return the list of the callbacks that every new Trainer gets."""
    report_missing(_DEFAULTS)
    found: list[Any] = _DEFAULTS.find([])
    return found


def generation_class() -> Any:
    """Return the class whose methods generate text, if it is imported, else None."""
    module = sys.modules.get("transformers.generation.utils")
    return getattr(module, "GenerationMixin", None)


_INNER_LOSS = Name(
    "transformers.PreTrainedModel._loss_function",
    "separate times of forward and of the loss that a model computes inside it",
    (FORWARD, LOSS),
)
INNER_LOSS = _INNER_LOSS.attribute
"""Attribute in which the property `loss_function` of a model stores its value."""


def has_inner_loss(model: Any) -> bool | None:
    """Return True if the loss function of a model can be set, and False if the model has none.

    Return None if its class has no settable property `loss_function`.
    """
    found = getattr(type(model), "loss_function", None)
    if not isinstance(found, property) or found.fset is None:
        return None
    # Reading the property of a model without a loss function would warn.
    return getattr(model, "loss_type", "") is not None or hasattr(model, INNER_LOSS)


def check_inner_loss(model: Any) -> None:
    """Report that the loss cannot be separated if a model ignores the function that was set."""
    if read(model, "loss_function") is not vars(model).get(INNER_LOSS):
        report(_INNER_LOSS)


_TRAINER = "transformers.Trainer"
_SAVE = Name(f"{_TRAINER}._save_checkpoint", "checkpoints")
_EVALUATE = Name(f"{_TRAINER}._evaluate", "the end of a training in an evaluation that fails")
_FETCH = Name(
    f"{_TRAINER}.get_batch_samples", "separate times of data/fetch and callbacks", (DATA, CALLBACKS)
)
_LOOP = Name(f"{_TRAINER}.evaluation_loop", "the phases of evaluations")
_PREDICT = Name(f"{_TRAINER}.prediction_step", "the batches of evaluations")
# Versions up to 5.0 have neither. An error in another callback then goes unnoticed.
_EPOCH = Name(f"{_TRAINER}._run_epoch")
_END = Name(f"{_TRAINER}._finalize_training")
_HANDLER = Name(
    f"{_TRAINER}.callback_handler", "separate times of callbacks and steps", (DATA, CALLBACKS)
)
_GRPO = "trl.trainer.grpo_trainer.GRPOTrainer"
_REWARDS = Name(f"{_GRPO}._calculate_rewards", "rewards")
_ENGINE = Name(f"{_GRPO}.vllm_generation", "generation with vLLM")


def report_missing_names(trainer: Any) -> None:
    report_missing_of(trainer, _SAVE, _EVALUATE, _FETCH, _LOOP, _PREDICT, _HANDLER)
    if hasattr(trainer, "reward_funcs"):
        report_missing_of(trainer, _REWARDS)
        if getattr(trainer, "use_vllm", False):
            report_missing_of(trainer, _ENGINE)


def expected_of(trainer: Any) -> list[Expected]:
    """Return the labels that each step of a Trainer must have, and what to report otherwise."""
    if not _FETCH.is_in(trainer):
        return []  # `report_missing_names` has reported it.
    reason = f"transformers {version_of('transformers')} did not call `{_FETCH.attribute}`"
    return [Expected(frozenset({FETCH}), _FETCH.feature, reason, _FETCH.blurred)]


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the Trainer's list of callbacks itself, not a copy."""
    found: list[Any] = getattr(_HANDLER.of(trainer), "callbacks", [])
    return found


def put_callback_after(trainer: Any, callback: object, predecessor: object) -> None:
    """Move a callback right after `predecessor`, or to the front if that is not in the list."""
    handler, callbacks = _HANDLER.of(trainer), callbacks_of(trainer)
    others = [other for other in callbacks if other is not callback]
    if len(others) < len(callbacks):
        positions = [i for i, other in enumerate(others) if other is predecessor]
        index = positions[0] + 1 if positions else 0
        # Assign a new list, because the Trainer may be iterating over it.
        handler.callbacks = [*others[:index], callback, *others[index:]]


def epoch_start(trainer: Any) -> tuple[Any, str] | None:
    """Return the object and the method name that notify callbacks of an epoch, or None."""
    handler = _HANDLER.of(trainer)
    return (handler, "on_epoch_begin") if hasattr(handler, "on_epoch_begin") else None


def generation_engine(trainer: Any) -> tuple[Any, str] | None:
    """Return the object and the method name that generate text in other processes, or None."""
    engine = _ENGINE.of(trainer)
    return (engine, "generate") if hasattr(engine, "generate") else None


def patches(trainer: Any, calls: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names of a Trainer's methods to patch, with their listeners.

    Args:
        trainer: The Trainer.
        calls: Listeners, by the action of the method: "epoch", "fetch", "evaluate" (the call of a
            user or of the Trainer), "evaluation" (its loop over batches), "prediction", "log",
            "rewards", and "end" for methods whose return or error may end the training: the last
            method of the training, and the evaluation by the Trainer itself, whose error is not
            seen otherwise.
    """
    # Before transformers had a method per epoch, its first call in an epoch is `training_step`.
    epoch = _EPOCH.attribute if _EPOCH.is_in(trainer) else "training_step"
    names = {
        _FETCH.attribute: calls["fetch"],
        "evaluate": calls["evaluate"],
        _LOOP.attribute: calls["evaluation"],
        _PREDICT.attribute: calls["prediction"],
        "log": calls["log"],
        _REWARDS.attribute: calls["rewards"],
        epoch: calls["epoch"],
        _EVALUATE.attribute: calls["end"],
        _END.attribute: calls["end"],
    }
    return ((name, call) for name, call in names.items() if read(trainer, name) is not MISSING)


def functions_to_name(trainer: Any) -> Iterator[Any]:
    """Yield functions that a Trainer calls, to name as the reason for time.

    These are events of callbacks, methods of the Trainer and its accelerator, and updates.
    """
    for callback in callbacks_of(trainer):
        for name in dir(type(callback)):
            if name.startswith("on_") and _is_overridden_by_user(callback, name):
                yield getattr(callback, name)
    for owner in (trainer, trainer.accelerator):
        for kind in type(owner).__mro__:
            yield from filter(isfunction, vars(kind).values())
    yield torch.nn.utils.clip_grad_norm_
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    yield getattr(type(optimizer), "step", None)


def _is_overridden_by_user(owner: object, method: str) -> bool:
    """Return True if a class outside transformers' trainer modules defines the method."""
    for kind in type(owner).__mro__:
        if method in vars(kind):
            return kind.__module__ not in (MODULE, f"{MODULE}_callback")
    return False


def save_method(trainer: Any) -> str | None:
    return _SAVE.attribute if _SAVE.is_in(trainer) else None
