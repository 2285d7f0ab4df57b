"""`forward` and `loss`: marks at the calls of models and losses."""

from collections.abc import Callable
from enum import Enum
from threading import get_ident
from typing import Any

import torch
from torch import nn

from lightning_gputime._compat.torch_ import current_graph_task_id
from lightning_gputime._instrumentation.call_stack import CallStack
from lightning_gputime._instrumentation.called_modules import CalledModules, Handlers
from lightning_gputime._instrumentation.comm import WaitBoundary
from lightning_gputime._instrumentation.evaluations import EvaluationSearch
from lightning_gputime._instrumentation.loop import Loop, Search, is_training
from lightning_gputime._instrumentation.module_hooks import hook_before
from lightning_gputime._instrumentation.optimizer import OptimizerBoundary
from lightning_gputime._instrumentation.patching import Attachments, Calls, Subscription
from lightning_gputime._measurement.wall_clock import WallClock
from lightning_gputime._phases import (
    AFTER_FORWARD,
    FORWARD,
    GENERATE,
    LOSS,
    OTHER,
    TRAINING_STEP,
)
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.state import PAUSED

OnCall = Callable[[nn.Module], None] | None
"""Function to call with the module of each outermost call in timed steps, or None."""


class _Modes(Enum):
    """Modes in which the loop has called the model with gradients."""

    NONE = 0
    TRAINING = 1
    TRAINING_THEN_EVAL = 2


_ACTIVE = Search.ACTIVE  # A global, because every model call looks it up.


class ForwardBoundary:
    """`forward`: from the call of a module to its return, for outermost calls only.

    `waits` notes the stream of each call. `wall_clock` excludes evaluations from the open step.
    """

    def __init__(
        self,
        recorder: Recorder,
        loop: Loop,
        optimizer: OptimizerBoundary,
        waits: WaitBoundary | None = None,
        on_call: OnCall = None,
        wall_clock: WallClock | None = None,
    ) -> None:
        self._recorder, self._model, self._batch = recorder, loop.model, loop.batch
        self._has_optimizers = bool(loop.optimizers)
        on_stream = None if waits is None else waits.note_stream
        self._on_calls = [call for call in (on_stream, on_call) if call is not None]
        self._evaluation_search = loop.search
        wall_clock = wall_clock or WallClock(now_ns=None)
        self.evaluation = EvaluationSearch(recorder, loop.model, optimizer, wall_clock)
        # True if the running outermost call is in eval mode without grad, or inside a fetch.
        self._is_no_training_call = False
        self._modes = _Modes.NONE
        self.calls = 0
        """Number of training calls of the model or its parts in this step."""
        self.was_ever_called = False
        self.has_trained = False
        """True once a backward has run."""
        self._steps = 0  # Number of steps that have ended.
        self._stack = CallStack()

    def attach(self, attachments: Attachments, loop: Loop) -> None:
        self._modules = CalledModules(loop.model, attachments)
        self._modules.hook_model(self._handlers)
        if loop.wrapper is not None:
            # The wrapper calls the model to run the training step, not to compute an output.
            attachments.add(hook_before(loop.wrapper, self._stack.redirect))
        self._modules.search(self._handlers)

    @property
    def _handlers(self) -> Handlers:
        return Handlers(self._enter, self._exit, self._enter_loss)

    @property
    def is_running(self) -> bool:
        """True while a module with hooks is being called."""
        return bool(self._stack.running)

    @property
    def repeats_forward(self) -> bool:
        """True once a module was called inside a backward, as activation checkpointing does."""
        return self._stack.was_in_backward

    @property
    def is_evaluated(self) -> bool:
        """True once the model was called in training mode, and then in eval mode with grad."""
        return self._modes is _Modes.TRAINING_THEN_EVAL

    def find_bypassed(self) -> nn.Module | None:
        """Return a module whose class overrides `__call__`, so that its hooks are not called."""
        return self._modules.find_bypassed()

    def backward_begins(self) -> None:
        """Note that the model is trained. Start the search for evaluations if it waits for that."""
        self.has_trained = True
        if self._evaluation_search is Search.AFTER_BACKWARD:
            self._evaluation_search = _ACTIVE

    def on_inner_call(self, module: nn.Module) -> None:
        """Handle a call of the module inside DDP that bypasses DDP, as evaluations do."""
        is_evaluation = not (module.training or torch.is_grad_enabled())
        if self._evaluation_search is _ACTIVE and is_evaluation and not self._stack.running:
            self.evaluation.on_call_start(self.calls)

    def generation_begins(self) -> None:
        """Handle a call that generates text, which may be an evaluation."""
        if self._evaluation_search is _ACTIVE and not is_training(self._model):
            self.evaluation.on_call_start(self.calls, GENERATE)

    def exclude_evaluations(self) -> None:
        """Exclude the evaluations in the step that ends."""
        self.evaluation.exclude_evaluations(self.calls, self._steps)

    def step_ended(self, timed: bool, *, is_dropped: bool = False) -> None:
        """End a step. If it had calls, remove the hooks of modules that only other modules call.

        If a timed step had no call, hook all modules again. To find evaluations, a step that
        `is_dropped` is not compared with others.
        """
        stack, evaluation = self._stack, self.evaluation
        if stack.running or stack.is_recursive:
            stack.clear()
        if evaluation.is_pending:
            if is_dropped:
                evaluation.reset()
            else:
                self.exclude_evaluations()
        modules = self._modules
        if self.calls:
            self.was_ever_called = True
            self.calls = 0
            if modules.is_searching or modules.nested:
                modules.end_search()
        elif self._trains_without_backward(is_dropped):
            # These calls are not evaluations: stop the search, and count the calls as training.
            self._evaluation_search = Search.AFTER_BACKWARD
            self._is_no_training_call = False
        elif timed:
            modules.search(self._handlers, everywhere=True)
        if not is_dropped:
            self._steps += 1

    def _trains_without_backward(self, is_dropped: bool) -> bool:
        """Return whether training is zeroth-order: calls in eval mode, and never a backward."""
        had_calls = not is_dropped and self.evaluation.had_inner_calls(self._steps)
        return self._evaluation_search is _ACTIVE and not self.has_trained and had_calls

    # Hooks on modules

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if not self._batch.is_open:
            return
        recorder, stack = self._recorder, self._stack
        # Activation checkpointing calls modules again inside backward, on a GPU in another thread.
        # Ignore these calls: they are part of backward, and if checkpointing is not reentrant, no
        # hook runs at their end.
        if current_graph_task_id() != -1:
            stack.note_backward()
            return
        is_ignored = get_ident() != recorder.threads.timed and not self._enter_untimed(module)
        if is_ignored:
            return
        is_inner = (stack.running or stack.is_redirected) and self._enter_inner(module)
        if is_inner:
            return
        stack.running.append(id(module))
        self._is_no_training_call = False
        searches = self._evaluation_search is _ACTIVE
        if searches and not torch.is_grad_enabled():
            self._is_no_training_call = self._enter_without_grad(module)
            if self._is_no_training_call:
                return
        # An excluded evaluation at the end of the recorded marks has paused the recorder.
        if searches and recorder.state is PAUSED:
            recorder.resume(FORWARD)
        if module is self._model:
            if module.training and self._modes is _Modes.NONE:
                self._modes = _Modes.TRAINING
            # A model that was never in training mode may be trained in eval mode.
            elif not module.training and self._modes is _Modes.TRAINING and searches:
                self._modes = _Modes.TRAINING_THEN_EVAL
        self.calls += 1
        self._modules.called.add(id(module))
        recorder.mark(FORWARD)
        for call in self._on_calls:
            call(module)

    def _enter_untimed(self, module: nn.Module) -> bool:
        """Count an untimed call. Return True if the search for called modules needs its hooks."""
        recorder = self._recorder
        if not recorder.threads.is_idle_here():
            return False
        if self._has_optimizers and not (module.training or torch.is_grad_enabled()):
            # Later steps are compared with this step to find evaluations.
            if not is_training(self._model):
                place = self.evaluation.count(self.calls)
                if self._evaluation_search is _ACTIVE:
                    self.evaluation.untimed_spans.start(place)
            return False
        if self.evaluation.is_pending:
            self.evaluation.untimed_spans.end()
        recorder.captures.detect()  # Later replays of a graph captured here call no hooks.
        if self._modules.is_searching:
            return True
        self.calls += 1  # Another timer may ask which model a backward belongs to.
        return False

    def _enter_inner(self, module: nn.Module) -> bool:
        """Handle a call inside a running call of a module or the wrapper.

        Return False if it is an outermost call, because all calls before it have raised.
        """
        stack = self._stack
        if stack.is_redirected and module is self._model:
            stack.end_redirect()
            return True
        if stack.running:
            stack.remove_ended(module)
        if stack.running:
            stack.running.append(id(module))
            self._modules.nested.add(id(module))
            return True
        return False

    def _enter_without_grad(self, module: nn.Module) -> bool:
        """Handle an outermost call without grad. Return False if it is a training call."""
        if self._batch.is_fetched:
            return True  # The loader calls the model, for example to choose samples.
        if module.training:
            return False
        self.evaluation.on_call_start(self.calls)
        return True

    def _exit(self, module: nn.Module, _: Any = None, output: Any = None) -> None:
        stack, recorder = self._stack, self._recorder
        running = stack.running
        if not running:
            return  # End of a training step that the wrapper runs: its start was not stored.
        is_timed = get_ident() == recorder.threads.timed
        if not (is_timed or (self._modules.is_searching and recorder.threads.is_idle_here())):
            return
        if current_graph_task_id() != -1:
            return
        key = id(module)
        # Remove this call, and calls inside it that raised.
        while running.pop() != key and running:
            pass
        if running:
            return
        if stack.is_recursive:
            stack.end_recursion()
        if not self._is_no_training_call:
            recorder.mark(AFTER_FORWARD)
            if key not in self._modules.not_losses:
                self._relabel_if_loss(module, output)

    def _relabel_if_loss(self, module: nn.Module, output: Any) -> None:
        is_first = self.calls == 1
        is_loss = self._modules.hook_if_loss(module, output, self._handlers, is_first=is_first)
        if is_loss:
            # Its call was marked as `forward`, and its end by the last mark.
            self._recorder.open.rename_before(FORWARD, LOSS)

    def _enter_loss(self, module: nn.Module, *_: Any) -> None:
        # A loss inside a model call is part of that call.
        if not self._stack.running and current_graph_task_id() == -1:
            self._recorder.mark_instead(AFTER_FORWARD, LOSS)


class CompiledStepBoundary(ForwardBoundary):
    """`training_step`: forward and loss in one phase, because compiled code has no hooks."""

    def attach(self, attachments: Attachments, loop: Loop) -> None:
        mark = self._recorder.mark
        calls = Calls(lambda *_, **__: mark(TRAINING_STEP), lambda _: mark(OTHER))
        attachments.add(Subscription(loop.model, TRAINING_STEP, calls))
        # Each step counts as a step with a call, so that its backward is attributed to this model.
        self.calls = 1
        self.was_ever_called = True
        self._recorder.warn_once(
            "%s is compiled: forward and loss are one phase of that name.", TRAINING_STEP
        )

    def find_bypassed(self) -> nn.Module | None:
        return None

    def step_ended(self, timed: bool, *, is_dropped: bool = False) -> None:
        pass
