"""`forward`: the calls of models as marks, and what of them is `loss` or `generate`."""

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_gputime._compat.torch_ import (
    LOSSES,
    current_graph_task_id,
    is_compiled,
    modules_on_stack,
)
from lightning_gputime._compat.transformers_ import (
    GENERATES,
    INNER_LOSS,
    check_inner_loss,
    generation_class,
    has_inner_loss,
    lacks_inner_loss,
)
from lightning_gputime._instrumentation.comm import WaitBoundary
from lightning_gputime._instrumentation.compiled import around_calls
from lightning_gputime._instrumentation.loop import Loop, is_training
from lightning_gputime._instrumentation.module_hooks import hook_before
from lightning_gputime._instrumentation.named import NamedPhase
from lightning_gputime._instrumentation.optimizer import OptimizerBoundary
from lightning_gputime._instrumentation.patching import Attachments, Calls, Subscription, do_nothing
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    AFTER_UPDATE,
    BACKWARD,
    DATA,
    EVALUATION,
    FORWARD,
    GENERATE,
    GRAD,
    INTERRUPTIONS,
    LOSS,
    OPTIMIZER,
    OTHER,
    TRAINING_STEP,
    is_metric,
)
from lightning_gputime._record.open_step import is_fetch
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.state import OPEN, PAUSED

OnCall = Callable[[nn.Module], None] | None
"""What to call with the module of each outermost call, in steps that are timed."""

# Calls in eval mode are compared with those of the _STEPS newest steps. They are an exception if at
# least _LEAST_WITHOUT of these, and half of all, have none; or if all have _MORE fewer.
_STEPS, _LEAST_WITHOUT, _MORE = 10, 2, 2


class ForwardBoundary:
    """`forward`: from the call of a module to its return, outermost calls only.

    Which modules a loop calls is found out: at first all of them have hooks, the model and what is
    inside. Those that are only called by others lose theirs when the step ends.
    """

    def __init__(
        self,
        recorder: Recorder,
        attachments: Attachments,
        loop: Loop,
        optimizer: OptimizerBoundary,
        waits: WaitBoundary | None = None,
        on_call: OnCall = None,
        exclude_ns: Callable[[int], object] = do_nothing,
    ) -> None:
        self._recorder = recorder
        self._attachments = attachments
        self._model = loop.model
        self._waits = waits
        self._on_call = on_call
        self._pause_evaluation = bool(loop.pause_evaluation)
        self._may_train = loop.pause_evaluation is not False
        self._trains = bool(loop.optimizers)
        self._batch = loop.batch
        # The ids of modules whose calls have begun and not ended, the outermost first.
        self._running: list[int] = []
        self._room = _StackRoom()
        self.calls = 0
        """How often the model, or a part of it, was called in this step."""
        self.was_ever_called = False
        self.has_trained = False
        """Whether a backward was seen."""
        self.is_trained = self.is_evaluated = False
        """Whether the model was called in training mode, then in eval mode, with gradients on."""
        self._redirected = False
        self._evaluates = False
        self._before_generation = OTHER
        # Whether it is not known yet which modules the loop calls; found out at rest, too.
        self._discovers = False
        # The ids of the modules that are losses, and of those that are none.
        self._losses: set[int] = set()
        self._others: set[int] = set()
        # Number of calls in eval mode without grad that may be part of the open step, the same of
        # the newest steps, and the number of all steps that had none.
        self._evaluated = 0
        self._evaluated_before: deque[int] = deque(maxlen=_STEPS)
        self._steps_without = 0
        self.evaluation = _EvaluationSearch(recorder, loop.model, optimizer, exclude_ns)
        self._hooked: dict[int, list[Any]] = {}
        # Those that were called by others in this step, and those that ever were by the loop.
        self._nested: set[int] = set()
        self._alone: set[int] = set()
        self._is_compiled_step = loop.compiled_step
        if loop.compiled_step:
            self._time_training_step()
            return
        self._time(loop.model)
        if loop.wrapper is not None:
            attachments.add(hook_before(loop.wrapper, self._redirect))
        self._discover()

    def find_bypassed(self) -> nn.Module | None:
        """Return a module that was called without its hooks, because its class has a `__call__`.

        Then the loop seems to call the modules inside it.
        """
        for module in self._model.modules():
            if type(module).__call__ is nn.Module.__call__ or id(module) in self._alone:
                continue
            if any(id(inner) in self._alone for inner in module.modules()):
                return module
        return None

    def note_backward(self) -> None:
        """Note that the model is trained: what is in eval mode without grad is an evaluation."""
        self.has_trained, self._pause_evaluation = True, self._may_train

    def on_inner_call(self, module: nn.Module) -> None:
        """Note a call of what DDP wraps, but not by DDP: it may be an evaluation."""
        is_evaluation = not (module.training or torch.is_grad_enabled())
        if self._pause_evaluation and is_evaluation and not self._running:
            self.evaluation.on_call_start(self.calls)

    def time_generation(self) -> None:
        calls, owner = Calls(self._generate_begins, self._generate_ends), generation_class()
        for name in GENERATES:
            if hasattr(owner, name):
                self._attachments.add(Subscription(owner, name, calls))

    def _generate_begins(self, *_: Any, **__: Any) -> bool | None:
        recorder, batch = self._recorder, self._batch
        if (
            recorder.state is not OPEN
            or get_ident() != recorder.threads.timed
            or recorder.named.names
        ):
            return False
        is_inside = self._running or current_graph_task_id() != -1
        if not batch.is_open or batch.is_fetched or is_inside:
            return False
        label = recorder.label or OTHER
        self._before_generation = OTHER if label.startswith(DATA) else label
        batch.is_open = False  # Calls inside are part of it.
        if self._pause_evaluation and not is_training(self._model):
            self.evaluation.on_call_start(self.calls, GENERATE)
        recorder.mark(GENERATE)
        return None

    def _generate_ends(self, _: Any) -> None:
        self._batch.is_open = True
        self._recorder.mark(self._before_generation)

    def _judge(self, module: nn.Module, output: Any) -> None:
        """Find out, once, whether a module whose call has just ended is a loss, of any class.

        It is if it was called after another one, and returns a scalar to train on. A model that
        returns its own loss is none: nothing is called before it.
        """
        if self.calls == 1 or not isinstance(output, Tensor) or output.dim():
            self._others.add(id(module))
        elif output.grad_fn is not None:
            self._losses.add(id(module))
            self._recorder.open.rename_before(FORWARD, LOSS)
            # What is inside a loss is part of it.
            self._forget([id(one) for one in nn.Module.modules(module)])
            if module is not self._model:
                self._time_loss(module)

    def settle_evaluations(self) -> None:
        """Decide on the calls in eval mode of the step that ends."""
        self._evaluated = self.evaluation.settle(
            self.calls, self._evaluated_before, self._steps_without
        )

    def step_ended(self, timed: bool, *, is_dropped: bool = False) -> None:
        """Take the hooks off modules that the calls of others cover: they would cost time.

        They come back when a step that is timed has no `forward` without them. A step that
        `is_dropped` says nothing of others.
        """
        if self._is_compiled_step:
            return
        self._running.clear()
        if self._room.is_made:
            self._room.end()
        evaluation, evaluated = self.evaluation, 0
        if is_dropped:
            if evaluation.is_pending:
                self._evaluated = 0
                evaluation.drop()
        else:
            if evaluation.is_pending:
                self.settle_evaluations()
            evaluated, self._evaluated = self._evaluated, 0
            self._evaluated_before.append(evaluated)
            self._steps_without += not evaluated
        if self.calls:
            self.was_ever_called = True
            self._discovers = False
            self.calls = 0
            if self._nested:
                self._forget([*(self._hooked.keys() & self._nested) - self._alone])
                self._nested.clear()
        elif self._pause_evaluation and not self.has_trained and evaluated:
            # A training without backward, such as of zeroth order, in eval mode: these are its own.
            self._pause_evaluation = self._evaluates = False
        elif timed:
            self._discover(everywhere=True)

    def _time_training_step(self) -> None:
        """Take a `training_step` that was compiled whole for one phase: nothing inside is seen."""
        mark = self._recorder.mark
        calls = Calls(lambda *_, **__: mark(TRAINING_STEP), lambda _: mark(OTHER))
        self._attachments.add(Subscription(self._model, TRAINING_STEP, calls))
        # As if the model were called in every step: a backward is always taken for its own.
        self.calls, self.was_ever_called = 1, True
        self._recorder.warn_once(
            "%s is compiled: forward and loss are one phase of that name.", TRAINING_STEP
        )

    def _time(self, module: nn.Module) -> list[Any]:
        hooks = around_calls(module, self._enter, self._exit)
        return [*map(self._attachments.add, hooks)]

    def _time_loss(self, module: nn.Module) -> None:
        hook = hook_before(module, self._enter_loss)
        self._hooked[id(module)] = [self._attachments.add(hook)]

    def _discover(self, *, everywhere: bool = False) -> None:
        # Not by torch's hooks for all modules: these run on every module of the process (with 500
        # of them a forward took the host 925 us, not 297), and with them torch silently compiles
        # nothing.
        self._discovers = True
        for module in _inside(self._model, everywhere, self._losses):
            if id(module) in self._hooked:
                continue
            if isinstance(module, LOSSES):
                self._time_loss(module)
            else:
                self._hooked[id(module)] = self._time(module)

    def _forget(self, keys: list[int]) -> None:
        for key in keys:
            for hook in self._hooked.pop(key, ()):
                self._attachments.drop(hook)

    def _redirect(self, module: nn.Module, *_: Any) -> None:
        self._redirected = True

    def _enter(self, module: nn.Module, *_: Any) -> None:
        if not self._batch.is_open:
            return
        recorder = self._recorder
        if get_ident() != recorder.threads.timed:
            if not recorder.threads.is_idle_here():
                return
            if self._trains and not (module.training or torch.is_grad_enabled()):
                if not is_training(self._model):
                    self.evaluation.count(self.calls)
                return
            recorder.captures.note()
            if not self._discovers:
                self.calls += 1  # Another timer may ask whose backward follows.
                return
        # Activation checkpointing runs modules again inside backward; that is backward's time. The
        # non-reentrant kind tells of no end: a count of open calls would never be zero again.
        if current_graph_task_id() != -1:
            return
        if self._redirected and module is self._model:
            # The wrapper calls the model to run the whole training step, not to compute an output.
            self._redirected = False
            return
        key = id(module)
        running = self._running
        if running:
            # No hook tells of a call that raised.
            running[:] = _callers_among(running, module)
            if key in running:
                self._room.make(len(running))
        running.append(key)
        if len(running) > 1:
            self._nested.add(key)
            return
        if self._pause_evaluation:
            if self._batch.is_fetched and not torch.is_grad_enabled():
                self._evaluates = True  # A loader may call the model, to choose what is hard.
                return
            self._evaluates = not (module.training or torch.is_grad_enabled())
            if self._evaluates:
                self.evaluation.on_call_start(self.calls)
                return
            if recorder.state is PAUSED:
                recorder.resume(FORWARD)
        if module is self._model:
            if module.training:
                self.is_trained = True
            elif self._pause_evaluation and self.is_trained:
                self.is_evaluated = True
        self.calls += 1
        self._alone.add(key)
        recorder.mark(FORWARD)
        if self._waits is not None:
            self._waits.note_stream()
        if self._on_call is not None:
            self._on_call(module)

    def _exit(self, module: nn.Module, _: Any = None, output: Any = None) -> None:
        # Without one running this is the return of a redirected training step.
        if not self._running:
            return
        recorder = self._recorder
        is_here = get_ident() == recorder.threads.timed
        if not (is_here or (self._discovers and recorder.threads.is_idle_here())):
            return
        if current_graph_task_id() != -1:
            return
        running, key = self._running, id(module)
        while running.pop() != key and running:
            pass  # Calls inside this one that raised.
        if not running and self._room.is_made:
            self._room.end()
        if not running and not self._evaluates:
            recorder.mark(AFTER_FORWARD)
            if key not in self._others:
                self._judge(module, output)

    def _enter_loss(self, module: nn.Module, *_: Any) -> None:
        # A loss that the model computes inside its own call is part of that call.
        if not self._running and current_graph_task_id() == -1:
            self._recorder.mark_instead(AFTER_FORWARD, LOSS)


class _StackRoom:
    """Room on Python's stack for the hooks of modules that call themselves.

    A call of a module with hooks takes one frame more, so a recursion would end earlier.
    """

    _HOOK_FRAMES = 50  # More than one hook takes.

    def __init__(self) -> None:
        self._before = self._limit = 0
        self.is_made = False
        """True while the limit is raised."""

    def make(self, depth: int) -> None:
        """Raise the recursion limit for hooked calls that are `depth` deep."""
        if not self.is_made:
            self.is_made, self._before = True, sys.getrecursionlimit()
        self._limit = self._before + self._HOOK_FRAMES + depth
        sys.setrecursionlimit(self._limit)

    def end(self) -> None:
        """Restore the limit, unless somebody else has set it."""
        if sys.getrecursionlimit() == self._limit:
            sys.setrecursionlimit(self._before)  # Raises where the stack is still too deep.
        self.is_made = False


class _EvaluationSearch:
    """Tell an evaluation, which belongs to no step, from a part of the step that needs no grad.

    A teacher, a rollout and pseudo-labels call the model in eval mode without grad, too. The rules,
    where the model as a whole is in eval mode:

    - Calls under `torch.inference_mode` are an evaluation: nothing can be trained on the results.
    - Calls after the last update of a step are an evaluation: nothing in the step uses them.
    - Other calls are an evaluation where they are the exception: few steps have them, or this step
      has many more than all others, which are alike.
    - Calls before the first work of a step are an evaluation if each step but the first has as
      many: a loop that evaluates after `step()`. A part of the step would be in the first one, too.

    All this is known when the step ends; until then the calls have the label `EVALUATION`. Calls
    that no rule decides on keep it, and count as `other`.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        optimizer: OptimizerBoundary,
        exclude_ns: Callable[[int], object],
    ) -> None:
        self._recorder, self._model, self._optimizer = recorder, model, optimizer
        self._exclude_ns = exclude_ns
        self.is_pending = False
        """True once the open step has such calls."""
        self._had_first = False  # True if the first step had some.
        self._reset()

    def _reset(self) -> None:
        self.is_pending = False
        # Number of calls by place: the training calls and updates of the step before them. And the
        # places after a backward without an optimizer.
        self._calls: Counter[tuple[int, int]] = Counter()
        self._by_hand: set[tuple[int, int]] = set()
        self._generations = 0
        self._is_inference = True  # All of them.

    def on_call_start(self, forwards: int, label: str = EVALUATION) -> None:
        """Mark an outermost call in eval mode without grad. `forwards` counts training calls."""
        recorder = self._recorder
        if is_training(self._model):
            # A part of it alone. The fetch is over.
            if recorder.label == DATA:
                recorder.mark(OTHER)
            return
        place = self.count(forwards, label)
        if recorder.label == AFTER_BACKWARD and not self._optimizer.has_any:
            self._by_hand.add(place)
        if recorder.label in (DATA, OTHER, AFTER_BACKWARD, AFTER_UPDATE):
            recorder.mark(label)

    def count(self, forwards: int, label: str = EVALUATION) -> tuple[int, int]:
        """Count a call. Return its place in the step."""
        place = forwards, self._optimizer.updates
        self.is_pending = True
        self._is_inference &= torch.is_inference_mode_enabled()
        if label == GENERATE:
            self._generations += 1
        else:
            self._calls[place] += 1
        return place

    def settle(self, forwards: int, before: Sequence[int], steps_without: int) -> int:
        """Decide on the calls of a step that ends. Return how many are not after its last update.

        Args:
            forwards: Number of its training calls.
            before: What this returned for the newest steps.
            steps_without: Number of all steps before for which this was 0.
        """
        place = forwards, self._optimizer.updates
        is_behind = place in self._calls and (place[1] > 0 or place in self._by_hand)
        behind = self._calls[place] if is_behind else 0
        inside = self._calls.total() + self._generations - behind
        labels = [EVALUATION, GENERATE] if self._generations else [EVALUATION]
        runs, is_open = _runs_of(labels, self._recorder.open.labels)
        last = [runs.pop()] if is_open and is_behind else []
        is_certain = not inside or self._is_inference
        if not (is_certain or self._is_exception(inside, runs, before, steps_without)):
            runs = []
        for first, stop in [*last, *reversed(runs)]:
            self._exclude_ns(self._recorder.exclude_evaluation(first, stop))
        if inside and not steps_without:
            self._had_first = True
        self._reset()
        return inside

    def drop(self) -> None:
        """Forget the calls of a step that is dropped."""
        self._reset()

    def _is_exception(
        self,
        inside: int,
        runs: Sequence[tuple[int, int]],
        before: Sequence[int],
        steps_without: int,
    ) -> bool:
        """Return whether a step is an exception: `inside` calls, in these `runs` of its marks."""
        counts = {calls for calls in before if calls}
        without = before.count(0)
        if without >= max(_LEAST_WITHOUT, len(before) / 2):
            return True
        if len(counts) > 1:
            return False  # Each step has them, now more and now fewer, such as a rollout.
        if len(before) == _STEPS and inside >= max(counts, default=0) + _MORE:
            return True
        # In a loop over `steps()` the step begins with its batch, which is `other`.
        labels = self._recorder.open.labels
        is_first = len(runs) == 1 and is_fetch(labels[: runs[0][0]])
        return is_first and steps_without == 1 and not self._had_first and counts <= {inside}


# Work after which an evaluation is another one.
_WORK = (FORWARD, LOSS, BACKWARD, GRAD, OPTIMIZER)


def _runs_of(names: Sequence[str], labels: Sequence[str]) -> tuple[list[tuple[int, int]], bool]:
    """Return where marks of some labels begin and end, without work in between.

    Also return whether the last run has no work behind it.
    """
    runs: list[tuple[int, int]] = []
    is_open = False
    for place, label in enumerate(labels):
        if label in names:
            first = runs.pop()[0] if is_open else place
            runs.append((first, place + 1))
            is_open = True
        elif is_open and label in INTERRUPTIONS and runs[-1][1] == place:
            runs[-1] = runs[-1][0], place + 1
        elif label.partition("/")[0] in _WORK:
            is_open = False
    return runs, is_open


def _callers_among(ids: Sequence[int], module: nn.Module) -> list[int]:
    """Return those of some modules, by their ids, that are running while `module` is called."""
    # By the stack: after a call that raised, some ids are of modules that no longer run.
    called = modules_on_stack()
    if id(module) not in called:
        return list(ids)  # It is not called as others are.
    outer = {*called[called.index(id(module)) + 1 :]}
    return [one for one in ids if one in outer]


def _inside(model: nn.Module, everywhere: bool, losses: set[int]) -> Iterator[nn.Module]:
    """Yield the modules inside whose calls hooks can see, without those inside `losses`.

    With `everywhere` also those whose hooks make torch compute in another way.
    """
    # A compiled module is called outside the compiled code, its children inside. What is inside a
    # scripted one is no call of Python's.
    if is_compiled(model) or isinstance(model, torch.jit.ScriptModule):
        return
    for child in nn.Module.children(model):
        # With a hook on it, or inside, such a layer leaves its fast path in eval mode: a teacher's
        # outputs would be others, in their last bits.
        has_fast_path = isinstance(child, nn.TransformerEncoderLayer)
        is_no_call = isinstance(child, ParametrizationList) or is_metric(child)
        if is_no_call or id(child) in losses or (has_fast_path and not everywhere):
            continue
        yield child
        # What a loss calls is part of it.
        if not isinstance(child, LOSSES):
            yield from _inside(child, everywhere, losses)


def time_inner_loss(recorder: Recorder, attachments: Attachments, model: nn.Module) -> None:
    """Time the loss function of the model of transformers that is called, or inside it.

    Given labels, such a model computes the loss inside `forward`.
    """
    for one in nn.Module.modules(model):
        if is_compiled(one):
            return  # Nothing inside is called as it stands there.
        if has_inner_loss(one):
            if not lacks_inner_loss(one):
                attachments.add(Subscription(one, INNER_LOSS, NamedPhase(LOSS, [recorder])))
                check_inner_loss(one, vars(one).get(INNER_LOSS))
            return
