"""All hooks and patches of one training loop."""

from collections.abc import Callable

import torch
from torch import nn

from lightning_gputime._compat.torch_ import report_missing_names, script_entry
from lightning_gputime._instrumentation.backward import (
    BackwardBoundary,
    WaitBoundary,
    hides_collectives,
)
from lightning_gputime._instrumentation.forward import (
    ForwardBoundary,
    GenerationBoundary,
    time_inner_loss,
)
from lightning_gputime._instrumentation.loop import Loop, is_distributed
from lightning_gputime._instrumentation.optimizer import OptimizerBoundary
from lightning_gputime._instrumentation.patching import Attachments, Calls, Subscription
from lightning_gputime._instrumentation.traced import activate, deactivate, without_hooks
from lightning_gputime._ledger.examiner import Examiner
from lightning_gputime._measurement.wall_clock import WallClock
from lightning_gputime._record.recorder import Recorder


class Boundaries:
    """Hooks and patches that mark the phases of a training loop, from `attach` until `remove`.

    If `attach` is interrupted, `remove` removes what was attached so far. `on_call` is called with
    the module of each model call in a timed step. `wall_clock` excludes evaluations from the open
    step. `examiner` marks the lines of forward in a backward.
    """

    def __init__(
        self,
        recorder: Recorder,
        loop: Loop,
        on_call: Callable[[nn.Module], None] | None = None,
        wall_clock: WallClock | None = None,
        examiner: Examiner | None = None,
    ) -> None:
        self._recorder, self._examiner = recorder, examiner
        self._loop, self._on_call, self._wall_clock = loop, on_call, wall_clock
        self._attachments = Attachments()  # All except those in the next two attributes.
        # If updates end the steps, these hooks count them while the others are suspended.
        self._update_hooks = Attachments()
        # Patches of `nn.Module` and of a base class of models. They are never suspended: each
        # change of a class empties Python's caches of the methods of all its subclasses, and since
        # 3.13 Python caches nothing after 1,000 changes.
        self._class_patches = Attachments()
        self.waits: WaitBoundary | None = None
        """Marks the waits for other ranks; None in a training on one rank."""

    def attach(self) -> None:
        attachments, recorder, loop = self._attachments, self._recorder, self._loop
        has_ranks = is_distributed()
        report_missing_names(shared=has_ranks)
        if has_ranks:
            self.waits = WaitBoundary(recorder, attachments, self._examiner)
            if hides_collectives(loop.model):
                recorder.warn_once(
                    "Collectives inside compiled code cannot be timed, so they count as"
                    " computation. Compile only the parts between them, or take their time from an"
                    " uncompiled run."
                )
        self.optimizer = OptimizerBoundary(recorder, self._update_hooks, loop)
        on_stream = None if self.waits is None else self.waits.note_stream
        on_calls = [call for call in (on_stream, self._on_call) if call is not None]
        wall_clock = self._wall_clock or WallClock(now_ns=None)
        self.forward = ForwardBoundary(
            recorder, attachments, loop, self.optimizer, wall_clock, on_calls
        )
        # Calls of `torch.compile` and `nn.Module.compile` during the training
        compilation = Calls(self.forward.compilation_begins, self.forward.compilation_ends)
        for owner in (torch, nn.Module):
            self._class_patches.add(Subscription(owner, "compile", compilation))
        GenerationBoundary(recorder, self._class_patches, loop, self.forward)
        if loop.splits_loss:
            time_inner_loss(recorder, attachments, loop.model)
        self.optimizer.patch_zero_grad(attachments, loop)
        if loop.wrap_backward:
            BackwardBoundary(
                recorder,
                attachments,
                loop,
                self.forward,
                self.optimizer,
                self._examiner,
                shared=has_ranks,
            )
        # TorchScript tries to compile the hooks of a module, and fails on ours. Suspend them while
        # `torch.jit.script` or `torch.jit.trace` creates a module.
        while_scripting = Calls(
            lambda *_, **__: self.suspend(keep_updates=True), lambda _: self.reattach()
        )
        if entry := script_entry():
            attachments.add(Subscription(*entry, while_scripting))
        getstate = Subscription(nn.Module, "__getstate__", self, without_hooks)
        self._class_patches.add(getstate)
        activate(recorder)

    @property
    def has_training_work(self) -> bool:
        """True if the open step contains a model call of the training, or an optimizer update."""
        return self.forward.calls > 0 or self.optimizer.updates > 0

    def step_ended(self, *, timed: bool = True, is_dropped: bool = False) -> bool:
        """End a step. Return True if the loop has optimizers but the step had no update.

        A step that `is_dropped` does not count, and the next step gets its index.
        """
        optimizer = self.optimizer
        if optimizer.running:
            optimizer.end_early()
        has_updated = optimizer.updates > 0
        self.forward.step_ended(timed, is_dropped=is_dropped)
        optimizer.reset()
        if self.waits is not None:
            self.waits.step_ended()
        return optimizer.has_any and not has_updated

    def suspend(self, *, keep_updates: bool = False) -> None:
        """Remove the hooks and patches between two steps, until `reattach` adds the same again.

        `_class_patches` stay. With `keep_updates`, the hooks that count optimizer updates also
        stay. Safe to call twice.
        """
        # Do not deactivate the recorder: a named phase of this step may end in a later step.
        self._attachments.suspend()
        if not keep_updates:
            self._update_hooks.suspend()

    def reattach(self) -> None:
        self._attachments.reattach()
        self._update_hooks.reattach()

    def remove(self) -> None:
        deactivate(self._recorder)
        for attachments in (self._attachments, self._update_hooks, self._class_patches):
            attachments.remove()
