"""`forward`, `loss` and `generate`: marks at the calls of models and losses.

It also finds evaluations inside a training step: calls in eval mode without grad.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_gputime._compat.torch_ import (
    COMPILED_CALL,
    LOSSES,
    compiled_call,
    current_graph_task_id,
    is_compiled,
    modules_on_stack,
    without_function_modes,
)
from lightning_gputime._compat.transformers_ import (
    GENERATES,
    INNER_LOSS,
    check_inner_loss,
    generation_class,
    has_inner_loss,
)
from lightning_gputime._instrumentation.loop import Loop, Search, is_training
from lightning_gputime._instrumentation.optimizer import OptimizerBoundary
from lightning_gputime._instrumentation.patching import Attachment, Attachments, Calls, Subscription
from lightning_gputime._instrumentation.traced import NamedPhase, hook_after, hook_before
from lightning_gputime._measurement.wall_clock import EVALUATION, STEPS, WallClock
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    AFTER_UPDATE,
    BACKWARD,
    DATA,
    FORWARD,
    GENERATE,
    GRAD,
    INTERRUPTIONS,
    LOSS,
    MAYBE_EVALUATION,
    OPTIMIZER,
    OTHER,
    TRAINING_STEP,
    is_metric,
)
from lightning_gputime._record.pending_steps import is_fetch
from lightning_gputime._record.recorder import IDLE, OPEN, PAUSED, Recorder

_ACTIVE = Search.ACTIVE  # A global, because every model call looks it up.
# Number of previous steps that a step with evaluation calls is compared with.
_N_COMPARED_STEPS = 10
# Position of a call in its step: the number of training calls, and of updates, before it.
_Position = tuple[int, int]
# Consecutive marks of a step: the index of the first mark, and the index after the last mark.
_Span = tuple[int, int]


class ForwardBoundary:
    """`forward`: from the call of a module to its return, for outermost calls only.

    A loop may call the model, or only parts of it. At first all modules have hooks. When a step
    ends, modules that were only called by other modules lose their hooks, because hooks cost time.
    The model keeps its hooks.

    `on_calls` are called with the module of each outermost call in timed steps.

    Compiled code has no hooks, so if the training step is compiled, forward and loss are one phase,
    `training_step`.

    The state is the outermost call in `running`:

    | outermost call | event                          | next          | case or test             |
    |----------------|--------------------------------|---------------|--------------------------|
    | none           | call                           | training call | standard step            |
    | none           | call without grad in a fetch   | other call    | model_call_in_the_loader |
    | none           | call without grad in eval mode | other call    | validation_in_the_body   |
    | none           | wrapper call, then model call  | none          | wrapper_call_is_not      |
    | any            | call inside it                 | the same      | only_the_outermost_call  |
    | any            | return                         | none          | standard step            |
    | any            | exception: seen at next call   | the same      | model_call_that_raises   |

    Other calls exist only while `evaluation` searches for evaluations.
    """

    def __init__(
        self,
        recorder: Recorder,
        attachments: Attachments,
        loop: Loop,
        optimizer: OptimizerBoundary,
        wall_clock: WallClock,
        on_calls: list[Callable[[nn.Module], None]],
    ) -> None:
        self._recorder, self._attachments = recorder, attachments
        self._model, self._batch = loop.model, loop.batch
        self._on_calls, self._is_step_compiled = on_calls, loop.compiled_step
        self.evaluation = EvaluationSearch(recorder, loop, optimizer, wall_clock)

        # All steps so far. Sets of modules contain their ids.
        self._n_steps = 0  # Number of steps that have ended.
        self.has_trained = False
        """True once a backward has run."""
        self._was_in_training_mode = False  # True once the model was called in training mode.
        self.had_eval_calls_with_grad = False
        """True once the model was called in training mode, and then in eval mode with grad."""
        self.called_modules = set[int]()
        """Modules that the loop has called directly."""
        self._losses = set[int]()  # Modules that `_is_loss` has found to be losses.
        self._not_losses = set[int]()  # Called modules that are certainly no losses.

        # The open step.
        self.calls = 0
        """Number of training calls of the model or its parts in this step."""
        self._nested = set[int]()  # Modules that other modules have called.

        # The calls that are running.
        self.running: list[int] = []
        """Ids of modules with hooks whose calls have begun and not ended, outermost first."""
        # False if the outermost call is in eval mode without grad, or inside a fetch.
        self._is_training_call = True
        # True from the call of a wrapper, such as DDP, until it calls the model to run the training
        # step: that call is no model call.
        self._is_wrapper_called = False
        # Python's recursion limit before this class raised it, and the raised limit; None unless a
        # module was called inside its own call.
        self._limits: tuple[int, int] | None = None

        # The hooks.
        self._model_hooks = WeakSet[Attachment]()
        self._hooked: dict[int, list[Attachment]] = {}  # Those of each other module, by its id.
        self._hooks_all = False  # True until a step has shown which modules the loop calls.
        self._compiled: nn.Module | None = None  # Module that is being compiled.
        if loop.compiled_step:
            calls = Calls(
                lambda *_, **__: recorder.mark(TRAINING_STEP), lambda _: recorder.mark(OTHER)
            )
            attachments.add(Subscription(loop.model, TRAINING_STEP, calls))
            # Each step counts as a step with a call, so that its backward belongs to this model.
            self.calls = 1
            self.called_modules.add(id(loop.model))
            recorder.warn_once(
                "%s is compiled: forward and loss are one phase of that name.", TRAINING_STEP
            )
            return
        self._hook_model(loop.model)
        if loop.wrapper is not None:
            # The wrapper calls the model to run the training step, not to compute an output.
            attachments.add(hook_before(loop.wrapper, self._enter_wrapper))
        self._hook_inside()

    def find_bypassed(self) -> nn.Module | None:
        """Return a module whose class overrides `__call__`, so that its hooks are not called.

        Return None unless the loop seems to call a module inside it directly.
        """
        for module in self._model.modules():
            overrides_call = type(module).__call__ is not nn.Module.__call__
            if not overrides_call or id(module) in self.called_modules:
                continue
            if any(id(inner) in self.called_modules for inner in module.modules()):
                return module
        return None

    def backward_begins(self) -> None:
        """Note that the model is trained. Start the search for evaluations if it waits for that."""
        self.has_trained = True
        if self.evaluation.state is Search.AFTER_BACKWARD:
            self.evaluation.state = _ACTIVE

    def on_call_around_ddp(self, module: nn.Module) -> None:
        """Handle a call of the module inside DDP that bypasses DDP, as evaluations do."""
        may_be_evaluation = not (module.training or torch.is_grad_enabled())
        if self.evaluation.state is _ACTIVE and may_be_evaluation and not self.running:
            self.evaluation.on_call_start(self.calls)

    def generation_begins(self) -> None:
        """Handle a call that generates text, which may be an evaluation."""
        if self.evaluation.state is _ACTIVE and not is_training(self._model):
            self.evaluation.on_call_start(self.calls, GENERATE)

    def decide_evaluations(self) -> None:
        """Decide which calls of the step that ends now are an evaluation, and exclude them."""
        self.evaluation.exclude_evaluations(self.calls, self._n_steps)

    def step_ended(self, timed: bool, *, is_dropped: bool = False) -> None:
        """End a step. Decide which of its calls were evaluations, and what it shows about hooks.

        - If it had training calls, modules that only other modules call lose their hooks.
        - If it only had calls in eval mode, and nothing was trained so far, this is zeroth-order
          training: such calls are no evaluations.
        - If it was timed and had no call, all modules get hooks again.

        A step that `is_dropped` is not compared with others to find evaluations.
        """
        if self._is_step_compiled:
            return
        evaluation = self.evaluation
        self.running.clear()
        if self._limits is not None:
            self._restore_recursion_limit(*self._limits)
        if evaluation.undecided and is_dropped:
            evaluation.reset()
        elif evaluation.undecided:
            self.decide_evaluations()
        if self.calls:
            self.calls = 0
            self._hooks_all = False
            if self._nested:
                self._remove_hooks([*(self._hooked.keys() & self._nested) - self.called_modules])
                self._nested.clear()
        elif (
            evaluation.state is _ACTIVE
            and not (is_dropped or self.has_trained)
            and evaluation.had_inner_calls(self._n_steps)
        ):
            # Zeroth-order training: stop the search, and count calls in eval mode as training.
            evaluation.state = Search.AFTER_BACKWARD
        elif timed:
            self._hook_inside(everywhere=True)
            if not self._model_hooks:  # The training does not call what was compiled.
                self._hook_model(self._model)
        if not is_dropped:
            self._n_steps += 1

    # Modules with hooks

    def _hook_inside(self, *, everywhere: bool = False) -> None:
        """Add hooks to the modules inside the model, until `step_ended` has seen which are called.

        With `everywhere`, include modules whose hooks make torch use a slower implementation.
        """
        # Do not use torch's global module hooks: they run for every module of the process (with 500
        # modules a forward took 925 us instead of 297 us), and disable torch.compile.
        self._hooks_all = True
        for module in _modules_inside(self._model, everywhere, self._losses):
            if id(module) in self._hooked:
                continue
            if isinstance(module, LOSSES):
                self._hook_loss(module)
            else:
                self._hooked[id(module)] = self._hook(module)

    def _hook_model(self, model: nn.Module) -> None:
        # Weak, because hooks keep their module alive, and the timer must not keep the model alive.
        self._model_hooks = WeakSet(self._hook(model))

    def _hook(self, module: nn.Module) -> list[Attachment]:
        if compiled_call(module) is None:
            hooks = [hook_before(module, self._enter), hook_after(module, self._exit)]
            return [*map(self._attachments.add, hooks)]
        # `module.compile()` would trace a hook into the graph. Patch the compiled call instead: the
        # patch stays outside the graph, works with `fullgraph=True`, and runs at each call.
        calls = Calls(
            lambda *_, **__: self._enter(module), lambda result: self._exit(module, (), result)
        )
        return [self._attachments.add(Subscription(module, COMPILED_CALL, calls))]

    def compilation_begins(self, module: Any = None, *_: Any, model: Any = None, **__: Any) -> bool:
        """Remove the hooks of a module that is about to be compiled, and of all inside it.

        They would be compiled, too, and their removal would recompile the module. The arguments are
        those of `torch.compile(model)` or `module.compile()`.
        """
        module = model if module is None else module
        if not isinstance(module, nn.Module):
            return False
        inside = {id(each) for each in nn.Module.modules(module)}
        hooked = [key for key in self._hooked if key in inside]
        is_of_model = id(self._model) in inside
        if not hooked and not is_of_model:
            return False
        self._remove_hooks(hooked)
        if is_of_model:
            for hook in self._model_hooks:
                self._attachments.drop(hook)
            self._model_hooks = WeakSet()
        self._compiled = module
        return True

    def compilation_ends(self, result: Any) -> None:
        """Hook the compiled module, which `nn.Module.compile` has changed or `result` is."""
        module = result if isinstance(result, nn.Module) else self._compiled
        if module is self._model:
            self._hook_model(module)
        elif module is not None:
            self._hooked[id(module)] = self._hook(module)
        self._compiled = None

    def _hook_loss(self, module: nn.Module) -> None:
        hook = hook_before(module, self._enter_loss)
        self._hooked[id(module)] = [self._attachments.add(hook)]

    def _remove_hooks(self, keys: list[int]) -> None:
        for key in keys:
            for hook in self._hooked.pop(key, ()):
                self._attachments.drop(hook)

    # Hooks on modules

    def _enter_wrapper(self, *_: object) -> None:
        self._is_wrapper_called = True

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if not self._batch.is_open:
            return  # A callback or a validation of the trainer calls the model.
        recorder = self._recorder
        # Activation checkpointing calls modules again inside backward, on a GPU in another thread.
        # Ignore these calls: they are part of backward, and if checkpointing is not reentrant, no
        # hook runs at their end.
        if current_graph_task_id() != -1:
            return
        if get_ident() != recorder.threads.timed and not self._enter_untimed(module):
            return
        if (self.running or self._is_wrapper_called) and self._enter_inner(module):
            return
        self.running.append(id(module))
        searches = self.evaluation.state is _ACTIVE
        has_no_grad = searches and not torch.is_grad_enabled()
        # In a fetch, the loader may call the model to choose samples.
        is_in_fetch = has_no_grad and self._batch.is_fetching
        may_be_evaluation = has_no_grad and not module.training and not is_in_fetch
        self._is_training_call = not (is_in_fetch or may_be_evaluation)
        if may_be_evaluation:
            self.evaluation.on_call_start(self.calls)
        if not self._is_training_call:
            return
        # An excluded evaluation at the end of the recorded marks has paused the recorder.
        if searches and recorder.state is PAUSED:
            recorder.resume(FORWARD)
        if module is self._model:
            if module.training:
                self._was_in_training_mode = True
            # A model that was never in training mode may be trained in eval mode.
            elif self._was_in_training_mode and searches:
                self.had_eval_calls_with_grad = True
        self.calls += 1
        self.called_modules.add(id(module))
        recorder.mark(FORWARD)
        for call in self._on_calls:
            call(module)

    def _enter_untimed(self, module: nn.Module) -> bool:
        """Handle a call in an untimed step. Return True if `_enter` should handle it instead.

        It should until a step has shown which modules the loop calls (`_hooks_all`). Later, an
        outermost call is only counted, for other timers: `BackwardBoundary` looks for the model
        that a backward belongs to.
        """
        recorder, evaluation = self._recorder, self.evaluation
        if not recorder.threads.admit_untimed_call():
            return False
        may_be_evaluation = not (module.training or torch.is_grad_enabled())
        if evaluation.state is _ACTIVE and may_be_evaluation:
            evaluation.on_call_start(self.calls)
            return False
        if evaluation.undecided:
            evaluation.end_untimed_span()
        recorder.captures.detect()  # Later replays of a graph captured here call no hooks.
        if self._hooks_all:
            return True
        self.calls += 1
        return False

    def _enter_inner(self, module: nn.Module) -> bool:
        """Handle a call inside a running call of a module or the wrapper.

        Return False if it is an outermost call, because all calls before it have raised.
        """
        if self._is_wrapper_called and module is self._model:
            self._is_wrapper_called = False
            return True
        if not self.running:
            return False
        # Remove the calls that raised: their exit hooks did not run. If the module is not called
        # through `nn.Module.__call__`, the stack does not show its callers.
        on_stack = modules_on_stack()
        if id(module) in on_stack:
            callers = {*on_stack[on_stack.index(id(module)) + 1 :]}
            self.running[:] = [key for key in self.running if key in callers]
        if id(module) in self.running:
            self._raise_recursion_limit()
        if not self.running:
            return False
        self.running.append(id(module))
        self._nested.add(id(module))
        return True

    def _raise_recursion_limit(self) -> None:
        """Let a module call itself as deeply as without a timer.

        Torch calls modules with hooks in an inner function. So raise the limit by a frame for each
        running call, and by the frames of a hook, which are fewer than 50.
        """
        original = sys.getrecursionlimit() if self._limits is None else self._limits[0]
        raised = original + 50 + len(self.running)
        self._limits = original, raised
        sys.setrecursionlimit(raised)

    def _restore_recursion_limit(self, original: int, raised: int) -> None:
        """Restore the limit, unless other code has set it. Raise if the stack is still too deep."""
        if sys.getrecursionlimit() == raised:
            sys.setrecursionlimit(original)
        self._limits = None

    def _exit(self, module: nn.Module, _: Any = None, output: Any = None) -> None:
        """End a call. If it is the outermost training call, mark the end of `forward`.

        If the output shows that the module is a loss, the call was `loss` instead.
        """
        recorder, running = self._recorder, self.running
        if not running:
            return  # End of a training step that the wrapper runs: its start was not stored.
        is_timed = get_ident() == recorder.threads.timed
        if not (is_timed or (self._hooks_all and recorder.threads.admit_untimed_call())):
            return
        if current_graph_task_id() != -1:
            return  # Part of a backward; see `_enter`.
        key = id(module)
        # Remove this call, and calls inside it that raised, or all if its start was not stored.
        while running.pop() != key and running:
            pass
        if running:
            return  # An outer call continues.
        if self._limits is not None:
            self._restore_recursion_limit(*self._limits)
        if not self._is_training_call:
            return
        recorder.mark(AFTER_FORWARD)
        if key in self._not_losses:
            return
        with without_function_modes():
            is_loss = self._is_loss(module, output)
        if is_loss:
            # Its call was marked as `forward`, and its end by the last mark.
            recorder.open.relabel_before(FORWARD, LOSS)
            # Modules inside a loss are part of it.
            self._losses.add(key)
            self._remove_hooks([id(inner) for inner in nn.Module.modules(module)])
            self._hook_loss(module)

    def _is_loss(self, module: nn.Module, output: Any) -> bool:
        """Return whether a module is a loss, by its output. If it certainly is none, remember that.

        A loss of any class returns a scalar with gradients, and is called after another module. A
        model that returns its loss also returns such a scalar, but it is the first module called
        in a step, or it contains a module that the loop has called.
        """
        is_scalar = isinstance(output, Tensor) and output.dim() == 0
        inside = (id(inner) for inner in nn.Module.modules(module) if inner is not module)
        is_first_or_model = self.calls == 1 or module is self._model
        if not is_scalar or is_first_or_model or not self.called_modules.isdisjoint(inside):
            self._not_losses.add(id(module))
            return False
        # A scalar without gradients may be a loss, too. Then check its next call.
        return output.grad_fn is not None

    def _enter_loss(self, *_: Any) -> None:
        """Start `loss` at the call of a loss. What follows it is `loss`, too, until a boundary."""
        is_in_model_call = bool(self.running)
        is_in_backward = current_graph_task_id() != -1  # Checkpointing computes the loss again.
        if not is_in_model_call and not is_in_backward:
            # Since the model returned, the loop has prepared the loss, such as reshaped the output.
            self._recorder.mark_instead(LOSS, of=AFTER_FORWARD)


def _modules_inside(model: nn.Module, everywhere: bool, losses: set[int]) -> Iterator[nn.Module]:
    """Yield the modules inside a model whose hooks would be called, except ids in `losses`.

    With `everywhere`, include modules whose hooks make torch use a slower implementation.
    """
    # Hooks on children of a compiled module would be compiled, too. A scripted module does not call
    # its children in Python.
    if is_compiled(model) or isinstance(model, torch.jit.ScriptModule):
        return
    for child in nn.Module.children(model):
        # In eval mode, hooks disable the fast path of this layer. That would change the output of a
        # teacher model in the last bits.
        has_fast_path = isinstance(child, nn.TransformerEncoderLayer)
        is_excluded = isinstance(child, ParametrizationList) or is_metric(child)
        if is_excluded or id(child) in losses or (has_fast_path and not everywhere):
            continue
        yield child
        # Modules inside a loss are part of it.
        if not isinstance(child, LOSSES):
            yield from _modules_inside(child, everywhere, losses)


class GenerationBoundary:
    """`generate`: the calls of the methods of transformers models that generate text."""

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
            return False  # A named phase includes its generations.
        # A fetch, a model call and a backward include their generations.
        is_inside = self._forward.running or current_graph_task_id() != -1
        if not batch.is_open or batch.is_fetching or is_inside:
            return False
        label = recorder.label or OTHER
        # After `data`, the work on the batch begins: the time after the generation is `other`.
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
        has_loss = has_inner_loss(module)
        if has_loss is None:
            continue  # Not a transformers model. It may contain one.
        if has_loss:
            attachments.add(Subscription(module, INNER_LOSS, NamedPhase(LOSS, [recorder])))
            check_inner_loss(module)
        return


class EvaluationSearch:
    """Search for evaluations among calls without grad, and exclude their time from the steps.

    A teacher, a rollout and pseudo-labels also call a model in eval mode without grad, but are part
    of the step. These rules distinguish them if the entire trained model is in eval mode:

    - Calls under `torch.inference_mode` are an evaluation: autograd cannot use the results.
    - Calls after the last update of a step are an evaluation: nothing in the step uses the results.
    - Other calls are an evaluation if they are an exception: few steps have such calls, or the
      other steps all have equally many, and this step has more.
    - Calls before the first work of a step are an evaluation if every step except the first has
      equally many. Such a loop evaluates after `step()`. If the calls were a part of each step, the
      first step would have them, too.

    The rules are applied when the step ends. Until then the calls have the label
    `MAYBE_EVALUATION`, which counts as `other` if no rule applies.

    An untimed step has no marks. There, a span of calls lasts on the host's clock from the first
    call until other work of the step follows.

    "Undecided" is the state `ACTIVE` with calls in `undecided`. `NEVER` does not change.

    | `state`          | event                    | next             | case or test               |
    |------------------|--------------------------|------------------|----------------------------|
    | `AFTER_BACKWARD` | first backward           | `ACTIVE`         | update_by_hand             |
    | `ACTIVE`         | eval-mode call, no grad  | undecided        | rollouts                   |
    | undecided        | end of the step: decides | `ACTIVE`         | validation_in_the_body     |
    | undecided        | the step is dropped      | `ACTIVE`         | accumulation_across_epochs |
    | undecided        | end of an untrained step | `AFTER_BACKWARD` | zeroth_order_training      |

    An untrained step has no training call, and no backward has run so far.
    """

    def __init__(
        self, recorder: Recorder, loop: Loop, optimizer: OptimizerBoundary, wall_clock: WallClock
    ) -> None:
        self._recorder, self._model, self._optimizer = recorder, loop.model, optimizer
        self._wall_clock = wall_clock
        self.state = loop.search
        """See the docstring of the class, and `Search`."""
        self.has_found = False
        """True once an evaluation was found inside a step."""
        # Earlier steps. Inner calls are calls in eval mode before the last update of a step.
        self._begins_with_calls = False  # True if the newest timed step began with its inner calls.
        # Index and number of inner calls of the newest steps that have any.
        self._inner_calls: deque[tuple[int, int]] = deque(maxlen=_N_COMPARED_STEPS)
        self._n_steps_with_inner_calls = 0  # Of all steps.
        self._first_had_inner_calls = False
        self.reset()

    def reset(self) -> None:
        self.undecided: Counter[_Position | str] = Counter()
        """Calls of the open step on which its end decides: their number at each position. Those
        that generate text are counted at `GENERATE`."""
        self._positions_after_backward: set[_Position] = set()  # In a loop without optimizer.
        self._is_inference = True  # True if all calls are under inference mode.
        # Position and start (on the host) of the running untimed span.
        self._open_span: tuple[_Position, int] | None = None
        self._spans_ns: Counter[_Position] = Counter()  # Time of the ended untimed spans.

    def on_call_start(self, forwards: int, label: str = MAYBE_EVALUATION) -> None:
        """Mark an outermost call in eval mode without grad, after `forwards` training calls."""
        recorder = self._recorder
        if is_training(self._model):
            # Only a part of the model is in eval mode, so this is part of the step.
            if recorder.label == DATA:
                recorder.mark(OTHER)
            return
        position = forwards, self._optimizer.updates
        self.undecided[GENERATE if label == GENERATE else position] += 1
        self._is_inference &= torch.is_inference_mode_enabled()
        # As in timed steps, calls in a named phase, and between forward and the update, are never
        # excluded.
        may_exclude = not recorder.named.names and (not forwards or self._optimizer.updates > 0)
        if recorder.state is IDLE and self._open_span is None and may_exclude:
            start_ns = self._wall_clock.steps_ns(recorder.clock.host_ns())
            self._open_span = position, start_ns
        if recorder.label == AFTER_BACKWARD and not self._optimizer.has_any:
            self._positions_after_backward.add(position)
        if recorder.label in (DATA, OTHER, AFTER_BACKWARD, AFTER_UPDATE):
            recorder.mark(label)

    def end_untimed_span(self) -> None:
        """End the open span, if any, because other work of the step follows."""
        if self._open_span is not None:
            position, start_ns = self._open_span
            self._open_span = None
            now_ns = self._wall_clock.steps_ns(self._recorder.clock.host_ns())
            self._spans_ns[position] += now_ns - start_ns

    def exclude_evaluations(self, forwards: int, step: int) -> None:
        """Exclude those calls of a step that are an evaluation. Call when the step ends.

        Final calls follow the last update, or the last backward in a loop without an optimizer.
        They are certainly an evaluation. The rules decide on all other calls, the inner calls.

        Args:
            forwards: Number of training calls in the step.
            step: Index of the step.
        """
        updates = self._optimizer.updates
        end = forwards, updates
        has_final = end in self.undecided and (updates > 0 or end in self._positions_after_backward)
        n_final = self.undecided[end] if has_final else 0
        n_inner = self.undecided.total() - n_final
        # The calls of a timed step are spans of marks. An untimed step has none.
        labels = [MAYBE_EVALUATION, GENERATE] if GENERATE in self.undecided else [MAYBE_EVALUATION]
        spans, ends_in_span = _spans_of(labels, self._recorder.open.labels)
        final_spans = spans[-1:] if ends_in_span and has_final else []
        inner_spans = spans[: len(spans) - len(final_spans)]
        excludes_inner = (
            not n_inner or self._is_inference or self._is_exceptional(n_inner, inner_spans, step)
        )
        # From the last span to the first: for a span that is only preceded by a fetch,
        # `exclude_evaluation` also excludes this fetch. An earlier span that is already excluded
        # would no longer separate a later span from the fetch.
        for first, stop in reversed(spans if excludes_inner else final_spans):
            self.has_found = True
            self._wall_clock.shorten_step(self._recorder.exclude_evaluation(first, stop))
        # The calls of an untimed step are spans on the host's clock.
        self.end_untimed_span()  # The last may still be open.
        for position, ns in self._spans_ns.items():
            if excludes_inner or (has_final and position == end):
                self.has_found = True
                self._wall_clock.shorten_step(ns)
                # For a timed step, the session moves the time, once it has read the marks.
                self._wall_clock.move(STEPS, EVALUATION, ns / 1e6)
        # Remember the inner calls, to compare later steps with this step.
        if self.had_inner_calls(step):
            # The loop was left inside this step, which continued in another loop. So this is the
            # second decision on the step: forget the first.
            self._inner_calls.pop()
            self._n_steps_with_inner_calls -= 1
        if n_inner:
            self._first_had_inner_calls |= step == 0
            self._inner_calls.append((step, n_inner))
            self._n_steps_with_inner_calls += 1
        self.reset()

    def had_inner_calls(self, step: int) -> bool:
        """Return whether a recent step had calls in eval mode before its last update."""
        return any(index == step for index, _ in self._inner_calls)

    def _is_exceptional(self, n_inner: int, spans: Sequence[_Span], step: int) -> bool:
        """Return True if the inner calls of a step are an exception, compared with earlier steps.

        Args:
            n_inner: Number of the inner calls.
            spans: Their marks; empty in an untimed step.
            step: Index of the step, which is also the number of earlier steps.
        """
        n_compared = min(step, _N_COMPARED_STEPS)
        counts = [n for index, n in self._inner_calls if step - n_compared <= index < step]
        n_without = n_compared - len(counts)
        if n_without >= max(2, n_compared / 2):
            return True  # Few steps have such calls.
        if len({*counts}) > 1:
            return False  # The number of calls varies between steps, as with rollouts.
        if n_compared == _N_COMPARED_STEPS and n_inner >= max(counts, default=0) + 2:
            return True  # All steps have such calls, and this step has more.
        # If the loop evaluates after `step()`, each step but the first begins with an evaluation.
        # In a loop over `steps()`, each step begins with its batch, so this cannot occur.
        if self._recorder.state is not IDLE:  # An untimed step does not show it.
            labels = self._recorder.open.labels
            self._begins_with_calls = len(spans) == 1 and is_fetch(labels[: spans[0][0]])
        n_without_in_all = step - self._n_steps_with_inner_calls
        only_first_without = n_without_in_all == 1 and not self._first_had_inner_calls
        return self._begins_with_calls and only_first_without and {*counts} <= {n_inner}


def _spans_of(searched: Sequence[str], labels: Sequence[str]) -> tuple[list[_Span], bool]:
    """Return the spans of marks with a searched label, and True if the step ends inside the last.

    Work of the step separates two spans. Other marks may lie inside a span.
    """
    spans: list[_Span] = []
    is_open = False
    for index, label in enumerate(labels):
        if label in searched:
            first = spans.pop()[0] if is_open else index
            spans.append((first, index + 1))
            is_open = True
        elif is_open and label in INTERRUPTIONS and spans[-1][1] == index:
            # A wait for other ranks right after a call is part of the evaluation.
            spans[-1] = spans[-1][0], index + 1
        elif label.partition("/")[0] in (FORWARD, LOSS, BACKWARD, GRAD, OPTIMIZER):
            is_open = False  # This phase separates two evaluations.
    return spans, is_open
