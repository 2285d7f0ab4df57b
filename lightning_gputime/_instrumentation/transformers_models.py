"""Boundaries inside models of transformers: generated text, and a loss inside `forward`."""

from threading import get_ident
from typing import Any

from torch import nn

from lightning_gputime._compat.torch_ import current_graph_task_id, is_compiled
from lightning_gputime._compat.transformers_ import (
    GENERATES,
    INNER_LOSS,
    check_inner_loss,
    generation_class,
    has_inner_loss,
    lacks_inner_loss,
)
from lightning_gputime._instrumentation.forward import ForwardBoundary
from lightning_gputime._instrumentation.loop import Loop
from lightning_gputime._instrumentation.named import NamedPhase
from lightning_gputime._instrumentation.patching import Attachments, Subscription
from lightning_gputime._phases import DATA, GENERATE, LOSS, OTHER
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.state import OPEN


class GenerationBoundary:
    """`generate`: the calls of the methods that generate text."""

    def __init__(
        self, recorder: Recorder, attachments: Attachments, loop: Loop, forward: ForwardBoundary
    ) -> None:
        self._recorder, self._batch, self._forward = recorder, loop.batch, forward
        self._label_after = OTHER  # Label that continues after the generation.
        owner = generation_class()
        for name in GENERATES:
            if hasattr(owner, name):
                attachments.add(Subscription(owner, name, self))

    def on_call_start(self, *_: Any, **__: Any) -> bool | None:
        recorder, batch = self._recorder, self._batch
        is_timed = recorder.state is OPEN and get_ident() == recorder.threads.timed
        if not is_timed or recorder.named.names:
            return False
        is_inside = self._forward.is_running or current_graph_task_id() != -1
        if not batch.is_open or batch.is_fetched or is_inside:
            return False
        label = recorder.label or OTHER
        # The first generation in a step ends `data`.
        self._label_after = OTHER if label.startswith(DATA) else label
        batch.close()  # Model calls inside are part of the generation.
        self._forward.generation_begins()
        recorder.mark(GENERATE)
        return None

    def on_call_end(self, _: Any) -> None:
        self._batch.open()
        self._recorder.mark(self._label_after)


def time_inner_loss(recorder: Recorder, attachments: Attachments, model: nn.Module) -> None:
    """Time the loss function that a transformers model calls in `forward`.

    A transformers model computes its loss if its inputs contain labels. It may be `model` itself
    or, for example in a LightningModule, a module inside it: use the first that is found.
    """
    for module in nn.Module.modules(model):
        if is_compiled(module):
            return  # Compiled code does not call the loss function.
        if has_inner_loss(module):
            # The class supports a loss, but this model may lack it.
            if not lacks_inner_loss(module):
                attachments.add(Subscription(module, INNER_LOSS, NamedPhase(LOSS, [recorder])))
                check_inner_loss(module, vars(module).get(INNER_LOSS))
            return
