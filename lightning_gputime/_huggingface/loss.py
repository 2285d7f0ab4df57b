"""The loss of a model of transformers, which is computed inside its `forward`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_gputime._boundaries.compiled import is_compiled


class LossFunction:
    """Stands in for what a model of transformers computes its loss by: it is the phase `loss`.

    Given labels, these models compute the loss inside `forward`.

    Args:
        model: The model; nothing is done if it has no such function, or runs it compiled.
        phase: Returns the context manager of a phase.
    """

    def __init__(self, model: nn.Module, phase: Callable[[str], Any]) -> None:
        self._phase = phase
        places = (one for one in model.modules() if is_compiled(one) or _has_loss_function(one))
        found: Any = next(places, None)
        self._model: Any = None if found is None or is_compiled(found) else found
        self._given = self._found = None
        self._is_removed = False
        if self._model is not None:
            # The model prefers this to what it finds for its class.
            self._given = self._found = vars(self._model).get("_loss_function")
            self._model.loss_function = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("loss"):
            return self._original()(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._original(),)  # No copy of the model is timed.

    def _original(self) -> Any:
        # Not before it is needed: transformers warns of a model that has none of its own.
        if self._found is None:
            # Another timer's may stand in its place.
            newest = vars(self._model).pop("_loss_function", None)
            try:
                self._found = self._model.loss_function
            finally:
                if newest is not None:
                    self._model.loss_function = newest
        return self._found

    def remove(self) -> None:
        """Takes it off. Safe to call twice."""
        self._is_removed = True
        if self._model is not None and vars(self._model).get("_loss_function") is self:
            del self._model._loss_function
            given = self._given
            while isinstance(given, LossFunction) and given._is_removed:
                given = given._given
            if given is not None:
                self._model.loss_function = given


def _has_loss_function(module: nn.Module) -> bool:
    place = getattr(type(module), "loss_function", None)
    return isinstance(place, property) and place.fset is not None


def _same(one: Any) -> Any:
    return one
