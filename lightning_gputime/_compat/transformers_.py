"""Private names of transformers, and of trainers that are made from its Trainer."""

import sys
from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

from lightning_gputime._compat.names import MISSING, Name, read, report, report_missing_of
from lightning_gputime._phases import CALLBACKS, DATA, FORWARD, LOSS

GENERATES = ("generate", "generate_batch")
"""The methods of a model that generate text."""


def generation_class() -> Any:
    """Return the class whose methods generate text, if it is imported; else None."""
    module = sys.modules.get("transformers.generation.utils")
    return getattr(module, "GenerationMixin", None)


_INNER_LOSS = Name(
    "transformers.PreTrainedModel._loss_function",
    "the loss apart from forward, where the model computes it",
    (FORWARD, LOSS),
)
INNER_LOSS = _INNER_LOSS.attribute
"""What the property `loss_function` of a model keeps."""


def has_inner_loss(model: Any) -> bool:
    """Return whether a model computes its loss by a function that can be replaced."""
    place = getattr(type(model), "loss_function", None)
    return isinstance(place, property) and place.fset is not None


def check_inner_loss(model: Any, called: object) -> None:
    """Report it if the model calls another loss function than the one that was put there."""
    if read(model, "loss_function") is not called:
        report(_INNER_LOSS)


def lacks_inner_loss(model: Any) -> bool:
    """Return whether the model has no such function: transformers would warn of the property."""
    return getattr(model, "loss_type", "") is None and not hasattr(model, INNER_LOSS)


_TRAINER = "transformers.Trainer"
_SAVE = Name(f"{_TRAINER}._save_checkpoint", "checkpoints")
_EVALUATE = Name(f"{_TRAINER}._evaluate", "the end of a training in an evaluation that fails")
_FETCH = Name(
    f"{_TRAINER}.get_batch_samples", "the fetch of batches apart from callbacks", (DATA, CALLBACKS)
)
_LOOP = Name(f"{_TRAINER}.evaluation_loop", "the phases of evaluations")
_PREDICT = Name(f"{_TRAINER}.prediction_step", "the batches of evaluations")
# Before transformers 5 there are none, and an error in another callback stays unknown.
_EPOCH = Name(f"{_TRAINER}._run_epoch")
_END = Name(f"{_TRAINER}._finalize_training")
_REWARDS = Name("trl.trainer.grpo_trainer.GRPOTrainer._calculate_rewards", "rewards")


def report_missing_names(trainer: Any) -> None:
    """Report what of a Trainer cannot be measured."""
    report_missing_of(trainer, _SAVE, _EVALUATE, _FETCH, _LOOP, _PREDICT)
    if hasattr(trainer, "reward_funcs"):
        report_missing_of(trainer, _REWARDS)


def patches(run: Any, calls: Mapping[str, Any], trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the methods of a Trainer to listen to, with their listeners.

    `run` listens to those after which a training may be over, `calls` are the others by what they
    do: "fetch", "evaluate", "evaluation", "prediction", "log", "rewards".
    """
    epoch = _EPOCH.attribute if _EPOCH.is_in(trainer) else "training_step"
    names = {
        _FETCH.attribute: calls["fetch"],
        "evaluate": calls["evaluate"],
        _LOOP.attribute: calls["evaluation"],
        _PREDICT.attribute: calls["prediction"],
        "log": calls["log"],
        _REWARDS.attribute: calls["rewards"],
        epoch: run,
        _EVALUATE.attribute: run,
        _END.attribute: run,
    }
    return ((name, call) for name, call in names.items() if read(trainer, name) is not MISSING)


def save_method(trainer: Any) -> str | None:
    """Return the name of the method by which a Trainer saves, or None."""
    return _SAVE.attribute if _SAVE.is_in(trainer) else None


def evaluation_prefix(trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return how the metrics of an evaluation begin, by the arguments of `evaluation_loop`."""
    try:
        # Of the class: on the object it is the timer's.
        given = signature(type(trainer).evaluation_loop).bind_partial(trainer, *args, **kwargs)
        return str(given.arguments.get("metric_key_prefix", "eval"))
    except (AttributeError, TypeError, ValueError):
        return str(kwargs.get("metric_key_prefix", "eval"))
