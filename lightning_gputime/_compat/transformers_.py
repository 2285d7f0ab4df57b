"""Private names of transformers, and of trainers that are made from its Trainer."""

import sys
from typing import Any

GENERATES = ("generate", "generate_batch")
"""The methods of a model that generate text."""


def generation_class() -> Any:
    """Return the class whose methods generate text, if it is imported; else None."""
    module = sys.modules.get("transformers.generation.utils")
    return getattr(module, "GenerationMixin", None)


INNER_LOSS = "_loss_function"
"""What the property `loss_function` of a model keeps."""


def has_inner_loss(model: Any) -> bool:
    """Return whether a model computes its loss by a function that can be replaced."""
    place = getattr(type(model), "loss_function", None)
    return isinstance(place, property) and place.fset is not None


def lacks_inner_loss(model: Any) -> bool:
    """Return whether the model has no such function: transformers would warn of the property."""
    return getattr(model, "loss_type", "") is None and not hasattr(model, INNER_LOSS)


SAVE = "_save_checkpoint"
"""The method by which a Trainer saves."""


def run_methods(trainer: Any) -> tuple[str, ...]:
    """Return the methods after which a Trainer may be done with a training."""
    # Before transformers 5 there is none for an epoch, and an error in another callback stays
    # unknown.
    runs = "_run_epoch" if hasattr(trainer, "_run_epoch") else "training_step"
    return runs, "_evaluate", "_finalize_training"


REWARDS = "_calculate_rewards"
"""The method by which TRL's Trainers compute rewards."""


def evaluation_prefix(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return how the metrics of an evaluation begin, by the arguments of `evaluation_loop`."""
    prefix: str = args[4] if len(args) > 4 else kwargs.get("metric_key_prefix", "eval")
    return prefix
