"""`generate`, and the `loss` inside `forward`, of models of transformers."""

import sys
from threading import get_ident
from typing import Any

from torch import nn

from lightning_gputime._boundaries.compiled import is_compiled
from lightning_gputime._boundaries.forward import ForwardBoundary
from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._boundaries.named import NamedPhase
from lightning_gputime._boundaries.patching import Attachments, patch_function
from lightning_gputime._compile_skip import skip_compile
from lightning_gputime._phases import DATA, LOSS, OTHER
from lightning_gputime._record.recorder import OPEN, Recorder


@skip_compile
class GenerationBoundary:
    """`generate`: from the call of a model's `generate` to its return, in the body of a step.

    Calls of the model inside are part of it. It covers all models of transformers.
    """

    def __init__(
        self, recorder: Recorder, attachments: Attachments, loop: Loop, forward: ForwardBoundary
    ) -> None:
        self._recorder, self._batch, self._forward = recorder, loop.batch, forward
        self._before = OTHER
        # Not imported here: a loop without it has no such model.
        if (module := sys.modules.get("transformers.generation.utils")) is not None:
            for name in ("generate", "generate_batch"):
                if hasattr(module.GenerationMixin, name):
                    attachments.add(patch_function(module.GenerationMixin, name, self))

    def on_call_start(self, *_: Any, **__: Any) -> bool:
        """Begin the phase, unless the call is part of something else, or of no step."""
        recorder, batch = self._recorder, self._batch
        if recorder.state is not OPEN or get_ident() != recorder.thread or recorder.is_named:
            return False
        if not batch.is_open or batch.is_fetched or self._forward.is_inside:
            return False
        label = recorder.label or OTHER
        self._before = OTHER if label.startswith(DATA) else label
        batch.is_open = False  # Calls inside are nobody's.
        self._forward.note_generation()
        return True

    def on_call_end(self, _: Any) -> None:
        """End the phase: time goes back to where it went before."""
        self._batch.is_open = True
        self._recorder.mark(self._before)


def time_inner_loss(recorder: Recorder, attachments: Attachments, model: nn.Module) -> None:
    """Time the loss function of the model of transformers that is called, or inside it.

    Given labels, such a model computes the loss inside `forward`.
    """
    for one in model.modules():
        if is_compiled(one):
            return  # Nothing inside is called as it stands there.
        place = getattr(type(one), "loss_function", None)
        if isinstance(place, property) and place.fset is not None:
            # Of a model that has none of its own transformers would warn.
            has_none = getattr(one, "loss_type", "") is None and not hasattr(one, "_loss_function")
            if not has_none:
                calls = NamedPhase(LOSS, [recorder]).around_calls()
                attachments.add(patch_function(one, "_loss_function", calls))
            return
