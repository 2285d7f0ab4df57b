"""Self-check: compare the first steps with the actions that each step of the loop must contain."""

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice, pairwise

import torch
from torch import nn

from lightning_gputime._compat.names import NotMeasured
from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._instrumentation.comm import is_distributed
from lightning_gputime._instrumentation.loop import Loop, Search, is_engine
from lightning_gputime._instrumentation.optimizer import parameters_of
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._messages import WarnOnce, messages
from lightning_gputime._options import AUTO, Options
from lightning_gputime._phases import (
    BACKWARD,
    DATA,
    EVALUATION,
    FETCH,
    FORWARD,
    GRAD,
    LOSS,
    OPTIMIZER,
    OTHER,
    PHASES,
    StepRecord,
)
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.step_marks import is_fetch

_FIRST_STEPS = 5  # Number of first steps to check, including the warm-up.
_MIN_FIRST_STEPS = 3  # With fewer, a trainer may have fetched all batches before the first step.
_MEAN_STEPS = 20  # Number of steps after the warm-up whose sums are checked.

# Messages on the first steps

_NOT_SEEN = "Not measured: %s, because %s in the first %d steps."
_WRONG_ORDER = (
    "In each of the first %d steps backward precedes forward: steps end inside a batch, so their"
    " phases belong to two batches. Call step() at the end of the loop body."
)
_WRONG_COUNT = (
    "The trainer counts %d steps, and the timer counts %d. Times per step are wrong, because a step"
    " of the timer is not an update of the trainer. Please report this."
)

# Messages on the sums of steps

_NO_FORWARD = (
    "No model call was recorded, so its time is in `other`. Pass the module that the loop"
    ' calls, such as the result of torch.compile, or wrap the call in `with phase("forward")`.'
    " Nothing inside a compiled training step can be timed: compile the model alone."
)
_NO_BACKWARD = (
    "No backward was recorded, so its time is in `other`. Call loss.backward() in the thread of the"
    ' loop and outside of compiled code, or wrap it in `with phase("backward")`.'
)
_NO_UPDATE = (
    "No update of an optimizer was recorded in %d steps, so its time is in `other`. If the"
    ' optimizer is not a torch optimizer, wrap the update in `with phase("optimizer")`.'
)
_NO_MODULES = (
    "None of the modules that `modules` selects was called inside `forward`, so they have no rows."
    " Select modules that the model calls, not modules of a copy or inside scripted code."
)
_TOO_EARLY = (
    "The process group was created after the timer was attached: waits for other ranks are not"
    " separated, and ranks are not compared. Attach the timer after init_process_group()."
)
_ELSEWHERE = (
    "The model is called in a different thread than step() or steps(), where it is not timed. Call"
    " the model in the thread that calls step() or iterates over steps()."
)
_BYPASSED = (
    "`%s` replaces __call__ of torch.nn.Module, so only modules inside it count as `forward`."
    ' Wrap its calls in `with phase("forward")`.'
)
_TWICE = (
    "%d of %d steps have no model call. Call step() once, at the end of the loop body, or"
    " only iterate over steps(). Filter batches before the loop sees them:"
    " timer.steps(filter(is_good, loader)). If those steps train another model, attach a timer to"
    " each model."
)
_EARLY = (
    "The first %d timed steps have no backward. Call step() at the end of the loop body. Filter"
    " batches before the loop sees them: timer.steps(filter(is_good, loader)). Put an evaluation"
    " before the training into `with timer.paused()`."
)
_MAY_EVALUATE = (
    "Before the training part of a step, the model runs in eval mode without gradients for %.3g ms."
    " That counts as `other`. If it is an evaluation, put it into `with timer.paused()` or iterate"
    " over timer.steps(loader)."
)
_UNSEEN = (
    "Batches without a model call take %.3g ms of `other` per step. If they train in a way the"
    " timer cannot see, such as a graph that was captured before attach(), call step() at the end"
    " of the loop body."
)
_METHOD = (
    "`%s` takes %.3g ms per step, and `forward` is short compared with `backward`. If the loop"
    " calls a method of the model, such as model.features(x), instead of the model, wrap the call"
    " in"
    ' `with phase("forward")`.'
)
_NO_OPTIMIZER = (
    "The model is trained, but the timer has no optimizer. zero_grad counts as the phase before it,"
    " and evaluations count as part of the steps. Pass the optimizer: GPUPhaseHooks(model,"
    " optimizer)."
)
_EVALUATED = (
    "The model is also called in eval mode with gradients enabled, which counts as part of the"
    " steps. If it is an evaluation, put it under `torch.no_grad()`."
)
_ACCUMULATED = (
    "%d of %d steps have no update. If you accumulate gradients, pass accumulate_grad_batches=%s,"
    " so that a step is one update."
)

# Messages before the first step

_OTHER_PARAMETERS = (
    "None of the parameters that %s updates belongs to the model: it was created for another model,"
    " or before the parameters were replaced. Its updates are timed anyway."
)
_SEVERAL_DEVICES = (
    "The model is on several devices: %s. Its phases are timed on %s; pass device= to choose"
    " another."
)

_NOT_MEASURED = {
    _NO_FORWARD: ("forward, because no model call was recorded", (FORWARD, OTHER)),
    _ELSEWHERE: ("forward, because the model is called in another thread", (FORWARD, OTHER)),
    _BYPASSED: ("forward, because the model is called without its hooks", (FORWARD, LOSS, OTHER)),
    _NO_BACKWARD: ("backward, because no backward was recorded", (BACKWARD, OTHER)),
    _MAY_EVALUATE: ("evaluations, because they may be a part of the steps", (OTHER,)),
    _NO_UPDATE: ("updates, because no update was recorded", (OPTIMIZER, OTHER)),
}
"""Quantity that is not measured and the phases that may contain it, by message."""


class _Stage(Enum):
    """Part of the self-check that runs next."""

    FIRST_STEPS = 0
    SUMS = 1
    DONE = 2


class SelfCheck:
    """Comparison of steps with the actions that their loop must contain.

    Each mismatch is reported once. The check reads the labels and numbers of the first steps, and
    sums over the first 20 steps after the warm-up. These are recorded anyway, so no step takes
    longer.
    """

    def __init__(
        self,
        results: Results,
        boundaries: Boundaries,
        recorder: Recorder,
        loop: Loop,
        options: Options,
    ) -> None:
        self._results, self._boundaries, self._recorder = results, boundaries, recorder
        self._loop = loop
        # "auto" also times all of the first steps.
        times_first = options.every_n_steps in (1, AUTO) and not options.probe_every_n_steps
        self._counts_steps = loop.counts_steps and times_first
        self._is_own_loop = loop.search is not Search.NEVER
        # The user has passed no optimizer, but an optimizer may update the model.
        self._lacks_optimizer = loop.search is Search.AFTER_BACKWARD
        self._warn_once = WarnOnce()
        self._stage = _Stage.FIRST_STEPS
        self._first: list[StepRecord] = []
        self._has_trained = False
        self._idle_ms = 0.0  # Time of batches that do not call the model or end a step.
        self._early = 0  # Number of steps before the first backward.
        self._maybe_evaluated_ms = 0.0  # Time of eval-mode calls before the training part.

    def steps_read(self, steps: ReadSteps) -> None:
        """Check the steps that were read, once there are enough."""
        if self._stage is _Stage.FIRST_STEPS:
            self._first += steps
            if len(self._first) >= _FIRST_STEPS:
                self._check_first_steps()
        if self._lacks_optimizer:
            self._check_optimizer()
        # The replay of a captured graph calls no hooks, as the recorder has already warned.
        if self._stage is _Stage.DONE or self._recorder.captures.has_captured:
            return
        for step in steps.measured:
            if EVALUATION in step.labels:
                self._maybe_evaluated_ms += _undecided_ms(step)
        for step in steps:
            self._idle_ms += _idle_ms(step)
            self._has_trained |= BACKWARD in step.labels or GRAD in step.labels
            self._early += not self._has_trained
        if self._results.sums.step.n >= _MEAN_STEPS:
            self._stage = _Stage.DONE
            self._check_few_steps()
            self._check_means()

    def end(self) -> None:
        """Run the remaining checks at the end of the training; only some if it was short."""
        if self._stage is _Stage.FIRST_STEPS and len(self._first) >= _MIN_FIRST_STEPS:
            self._check_first_steps()
        ran = self._results.sums.phases
        self._check_optimizer()
        if self._recorder.captures.has_captured:
            return
        if self._stage is not _Stage.DONE:
            self._check_few_steps(trains=BACKWARD in ran and OPTIMIZER in ran)
        elif self._is_own_loop and BACKWARD in ran and FORWARD in ran:
            # The steps before the first backward have already been reported.
            n = self._results.sums.step.n
            without = n - ran[FORWARD].n
            self._report(20 * (without - self._early) >= n, _TWICE, without, n)

    def _check_first_steps(self) -> None:
        """Check the actions in each of the first steps, their order, and the number of steps."""
        steps, self._first, self._stage = self._first, [], _Stage.SUMS
        n = len(steps)
        for expected in self._loop.expects:
            n_with = sum(not expected.labels.isdisjoint(step.labels) for step in steps)
            # Not all steps need it: a step may have fetched its batch in the step before.
            if 2 * n_with < n:
                self._note(
                    f"{expected.feature}, because {expected.otherwise} in the first {n} steps",
                    expected.blurred,
                )
                messages.warning(_NOT_SEEN, expected.feature, expected.otherwise, n)
        # The first step may start anywhere in the loop body.
        if all(_ends_inside_batch(step.labels) for step in steps[1:]):
            self._note("single batches, because backward precedes forward", (FORWARD, BACKWARD))
            self._report(True, _WRONG_ORDER, n)
        if self._counts_steps and (counted := self._steps_of_trainer(steps)) != n:
            self._note(f"single steps, because the trainer counts {counted}, and the timer {n}")
            self._report(True, _WRONG_COUNT, counted, n)

    def _steps_of_trainer(self, steps: Sequence[StepRecord]) -> int:
        """Return the number of steps that the trainer counts, without batches that it skips."""
        counted = 1
        for before, step in pairwise(steps):
            more = step.number - before.number
            # A skipped batch has no backward, so it has no update that the timer could miss.
            is_missed = _trained_batches(step.labels) >= more * self._loop.accumulate_grad_batches
            counted += more if is_missed else min(more, 1)
        return counted

    def _check_optimizer(self) -> None:
        self._report(self._lacks_optimizer and self._boundaries.optimizer.has_any, _NO_OPTIMIZER)

    def _check_few_steps(self, *, trains: bool = True) -> None:
        self._report(is_distributed() and self._boundaries.waits is None, _TOO_EARLY)
        message = _ELSEWHERE if self._recorder.threads.was_elsewhere else _NO_FORWARD
        self._report(trains and not self._boundaries.forward.was_ever_called, message)
        if (bypassed := self._boundaries.forward.find_bypassed()) is not None:
            self._report(True, _BYPASSED, type(bypassed).__name__)
        is_early = self._is_own_loop and self._has_trained and self._early > 0
        self._report(trains and is_early, _EARLY, self._early)

    def _check_means(self) -> None:
        """Check the sums over the first steps after the warm-up."""
        sums, seen = self._results.sums, self._boundaries
        ran, n, step_ms = sums.phases, sums.step.n, sums.step.device_ms
        trains = seen.optimizer.has_any
        self._report(FORWARD in ran and seen.sees_no_modules, _NO_MODULES)
        self._report(trains and BACKWARD not in ran, _NO_BACKWARD)
        # Backward usually takes 2 times as long as forward and loss, or 3 times with checkpointing.
        # If it takes over 5 times as long, `forward` misses work, which is then in another phase.
        ms = {name: ran[name].device_ms if name in ran else 0.0 for name in PHASES}
        is_in_other = 0 < 5 * (ms[FORWARD] + ms[LOSS]) < ms[BACKWARD] < 5 * ms[OTHER]
        is_in_loss = FORWARD in ran and 50 * ms[FORWARD] < ms[BACKWARD] < 5 * ms[LOSS]
        place = OTHER if is_in_other else LOSS
        self._report(trains and (is_in_other or is_in_loss), _METHOD, place, ms[place] / n)
        evaluated_ms, idle_ms = self._maybe_evaluated_ms, self._idle_ms
        self._report(evaluated_ms > 0.05 * step_ms, _MAY_EVALUATE, evaluated_ms / n)
        self._report(self._is_own_loop and idle_ms > 0.1 * step_ms, _UNSEEN, idle_ms / n)
        self._report(self._is_own_loop and seen.forward.is_evaluated, _EVALUATED)
        # Exclude the first step, which may be incomplete.
        with_forward, skipped = ran[FORWARD].n if FORWARD in ran else n, sums.skipped_updates
        is_twice = 2 * (with_forward - 1) <= n - 1
        self._report(is_twice, _TWICE, n - with_forward, n)
        if trains and not is_twice and 2 * skipped >= n - 1:
            ends = '"auto": a step ends with the update'
            if not self._loop.needs_updates:
                ends = f"{round(n / max(n - skipped, 1))} (or {ends})"
            self._report(skipped == n, _NO_UPDATE, n)
            self._report(skipped < n, _ACCUMULATED, skipped, n, ends)

    def _report(self, is_mismatch: bool, message: str, *values: float | str) -> None:
        if is_mismatch:
            self._warn_once(message, *values)
            if message in _NOT_MEASURED:
                self._note(*_NOT_MEASURED[message])

    def _note(self, text: str, blurred: tuple[str, ...] = ()) -> None:
        self._results.add_mismatch(NotMeasured(f"not measured: {text}", blurred))


def _idle_ms(step: StepRecord) -> float:
    """Return the time of batches that are fetched, but neither call the model nor end the step."""
    marks = zip(step.labels, step.labels[1:], step.device_ms, strict=False)
    # Skip a first `other`: that is code after the last update.
    inside = islice(marks, int(step.labels[0] == OTHER), None)
    return sum(ms for label, next_label, ms in inside if (label, next_label) == (OTHER, DATA))


def _undecided_ms(step: StepRecord) -> float:
    """Return the time of eval-mode calls at the start of a step, which may be an evaluation."""
    # In a loop over `steps()`, the step starts with its batch, and such calls belong to it.
    if not is_fetch(step.labels[: step.labels.index(EVALUATION)]):
        return 0.0
    labels_and_ms = zip(step.labels, step.device_ms, strict=True)
    return sum(ms for label, ms in labels_and_ms if label == EVALUATION)


def _ends_inside_batch(labels: tuple[str, ...]) -> bool:
    """Return True if a step starts with the backward of a batch and ends with the next forward."""
    if FORWARD not in labels or BACKWARD not in labels:
        return False
    last = {label: i for i, label in enumerate(labels)}
    starts_with_backward = labels.index(BACKWARD) < labels.index(FORWARD)
    return starts_with_backward and last[BACKWARD] < last[FORWARD]


def _trained_batches(labels: tuple[str, ...]) -> int:
    """Return the number of batches in a step that were fetched and had a backward."""
    n, is_fetched = 0, True
    for label in labels:
        if label == FETCH:
            is_fetched = True
        elif label == BACKWARD:
            n += is_fetched
            is_fetched = False
    return n


def warn_of_other_parameters(model: nn.Module, optimizers: Iterable[object]) -> None:
    """Warn about optimizers that update no parameter of the model."""
    if is_engine(model):
        return  # Its optimizer may update copies of parameter shards.
    own = set(model.parameters())
    # A wrapper, such as Megatron's, may also update copies.
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.Optimizer):
            updated = {*parameters_of(optimizer)}
            if own and updated and own.isdisjoint(updated):
                messages.warning(_OTHER_PARAMETERS, type(optimizer).__name__)


def warn_of_several_devices(model: nn.Module, timed: torch.device) -> None:
    """Warn that the phases of a model on several devices are timed on a single device."""
    sizes: dict[torch.device, int] = {}
    for parameter in model.parameters():
        if not isinstance(parameter, nn.UninitializedParameter):
            sizes[parameter.device] = sizes.get(parameter.device, 0) + parameter.numel()
    if len(sizes) > 1:
        where = ", ".join(f"{device} ({size:,} parameters)" for device, size in sizes.items())
        messages.warning(_SEVERAL_DEVICES, where, timed)
