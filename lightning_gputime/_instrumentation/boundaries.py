"""Where one phase ends and the next begins: all boundaries of a loop together."""

from collections.abc import Callable

import torch

from lightning_gputime._compat.torch_ import report_missing_names, script_entry
from lightning_gputime._instrumentation.backward import BackwardBoundary
from lightning_gputime._instrumentation.comm import WaitBoundary, is_distributed
from lightning_gputime._instrumentation.compiled import hides_collectives, inside_compiled
from lightning_gputime._instrumentation.forward import ForwardBoundary, OnCall, time_inner_loss
from lightning_gputime._instrumentation.loop import Loop
from lightning_gputime._instrumentation.module_hooks import without_hooks
from lightning_gputime._instrumentation.modules import SubmoduleBoundary
from lightning_gputime._instrumentation.named import activate, deactivate
from lightning_gputime._instrumentation.optimizer import OptimizerBoundary
from lightning_gputime._instrumentation.patching import Attachments, Calls, Subscription, do_nothing
from lightning_gputime._record.recorder import Recorder

_HIDDEN = (
    "Collectives inside compiled code are not told from work: compile the parts between them, or"
    " take their time from an uncompiled run."
)


class Boundaries:
    """Put marks at the boundaries of a loop's steps, also by `phase`, until it is removed.

    They are put on by `attach`, also where that is interrupted: `remove` takes off what there is.

    Args:
        recorder: Takes the marks.
        loop: What the loop runs.
        on_call: Is called with the module of each outermost call of a model.
        exclude_ns: Is called with the host time of an evaluation in the open step (in nanoseconds).
    """

    def __init__(
        self,
        recorder: Recorder,
        loop: Loop,
        on_call: OnCall = None,
        exclude_ns: Callable[[int], object] = do_nothing,
    ) -> None:
        self._recorder = recorder
        self._loop, self._on_call, self._exclude_ns = loop, on_call, exclude_ns
        self._attachments = Attachments()
        # Those that count updates may stay on between timed steps.
        self._of_updates = Attachments()
        self._submodules: SubmoduleBoundary | None = None
        self.waits: WaitBoundary | None = None
        """Sees the waits for other ranks, if there are some."""

    def attach(self) -> None:
        own, recorder, loop = self._attachments, self._recorder, self._loop
        shared = is_distributed()
        report_missing_names(shared=shared)
        if shared:
            self.waits = WaitBoundary(recorder, own)
            if hides_collectives(loop.model):
                recorder.warn_once(_HIDDEN)
        self.optimizer = OptimizerBoundary(recorder, self._of_updates, loop)
        self.forward = ForwardBoundary(
            recorder, own, loop, self.optimizer, self.waits, self._on_call, self._exclude_ns
        )
        self.forward.time_generation()
        if loop.splits_loss:
            time_inner_loss(recorder, own, loop.model)
        # In compiled code a hook is not called, or makes torch compile anew at each call.
        if hidden := inside_compiled(loop.submodules, loop.model):
            recorder.warn_once(
                "These modules run inside compiled code, and are not timed apart: %s%s",
                ", ".join(hidden[:10]),
                f" and {len(hidden) - 10} others" if len(hidden) > 10 else "",
            )
        if seen := {name: one for name, one in loop.submodules.items() if name not in hidden}:
            self._submodules = SubmoduleBoundary(recorder, own, seen)
        self.optimizer.patch_zero_grad(own, loop)
        if loop.wrap_backward:
            BackwardBoundary(recorder, own, loop, self.forward, self.optimizer, shared=shared)
        # TorchScript compiles the hooks that a module has, and cannot compile ours. By this both
        # `torch.jit.script` and `torch.jit.trace` make their modules.
        calls = Calls(lambda *_, **__: self.suspend(keep_updates=True), lambda _: self.reattach())
        if entry := script_entry():
            own.add(Subscription(*entry, calls))
        own.add(Subscription(torch.nn.Module, "__getstate__", self, without_hooks))
        activate(recorder)

    @property
    def has_worked(self) -> bool:
        """Whether a model was called or an optimizer updated in the open step."""
        return self.forward.calls > 0 or self.optimizer.updates > 0

    @property
    def sees_no_modules(self) -> bool:
        """Whether there are modules to be seen as parts, and no call of any was seen."""
        return self._submodules is not None and not self._submodules.labels

    def step_ended(self, *, timed: bool = True, is_dropped: bool = False) -> bool:
        """End a step. Return whether there are optimizers, and none of them ran its update.

        Args:
            timed: Whether the step was timed.
            is_dropped: Whether it has not ended, and the next one takes its place.
        """
        optimizer = self.optimizer
        if optimizer.depth:
            optimizer.end_early()
        has_updated = optimizer.updates > 0
        self.forward.step_ended(timed, is_dropped=is_dropped)
        optimizer.reset()
        if self.waits is not None:
            self.waits.step_ended()
        if timed and self._submodules is not None:
            self._submodules.step_ended()
        return optimizer.has_any and not has_updated

    def suspend(self, *, keep_updates: bool = False) -> None:
        """Take everything off, until `reattach`. Call between two steps. Safe to call twice.

        What was found out about modules, losses and optimizers is remembered. With `keep_updates`
        updates of optimizers are still counted.
        """
        # `phase` still reaches the recorder: a phase may begin in a timed step and end in another.
        self._attachments.suspend()
        if not keep_updates:
            self._of_updates.suspend()
        if self._submodules is not None:
            self._submodules.step_ended()

    def reattach(self) -> None:
        self._attachments.reattach()
        self._of_updates.reattach()

    def remove(self) -> None:
        deactivate(self._recorder)
        self._attachments.remove()
        self._of_updates.remove()
        if self._submodules is not None:
            self._submodules.step_ended()
