"""The updates of optimizers, as marks."""

from typing import Any

from lightning_gputime._boundaries.attach import StandIn, listen
from lightning_gputime._phases import AFTER_BACKWARD, AFTER_UPDATE, OPTIMIZER, OTHER
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._untraced import untraced


@untraced
class OptimizerBoundary:
    """The end of `optimizer`, and its start where no backward precedes."""

    def __init__(self, recorder: Recorder, optimizer: Any) -> None:
        # Accelerate's wrapper is an Optimizer in name only: it lacks what its hooks would need.
        while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(
            optimizer, "optimizer"
        ):
            optimizer = optimizer.optimizer
        self._recorder = recorder
        self.depth = 0
        """How many calls of `step` are running; one that calls `super().step()` is two."""
        self.updates = 0
        """How many updates there were in this step."""
        self._stand_in: StandIn | None = None
        self._handles: list[Any] = []
        if hasattr(vars(optimizer).get("step"), "_torchdynamo_orig_callable"):
            # The step was compiled, hooks included: they would break its graph.
            self._stand_in = listen(optimizer, "step", self)
        else:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def step_ended(self) -> int:
        """Returns how many updates there were."""
        updates, self.updates = self.updates, 0
        self.depth = 0  # No post hook fires when `step` raises.
        return updates

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._stand_in is not None:
            self._stand_in.forget(self)

    def call_begins(self, closure: Any = None, **_: Any) -> bool:
        """Is told of a call of the compiled step."""
        self._before_step(None, (None, closure), {})
        return True

    def call_ends(self) -> None:
        """Is told of its end."""
        self._after_step()

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.depth += 1
        if self.depth == 1 and self._recorder.label != AFTER_BACKWARD:
            # With a closure, forward and backward are still to come.
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is None:
                self._recorder.mark(OPTIMIZER)

    def _after_step(self, *_: Any) -> None:
        if self.depth:
            self.depth -= 1
        if not self.depth:
            self.updates += 1
            self._recorder.mark(AFTER_UPDATE)


@untraced
class ZeroGradBoundary:
    """`zero_grad` ends `loss`: it is `other`. Torch has no hook for it."""

    def __init__(self, recorder: Recorder, optimizer: Any) -> None:
        self._recorder = recorder
        self._stand_in = listen(optimizer, "zero_grad", self)

    def call_begins(self, *_: Any, **__: Any) -> bool:
        """EndedStep the begin; what follows is `other`, too."""
        if self._recorder.label not in (OTHER, AFTER_UPDATE):
            self._recorder.mark(OTHER)
        return False

    def call_ends(self) -> None:
        """Is never told."""

    def remove(self) -> None:
        self._stand_in.forget(self)
