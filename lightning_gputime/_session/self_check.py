"""Self-check: compare the first steps with the actions that each step of the loop must contain."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import torch
from torch import nn

from lightning_gputime._compat import NotMeasured
from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._instrumentation.loop import (
    Loop,
    Search,
    is_distributed,
    is_engine,
    parameters_of,
)
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._messages import WarnOnce, messages
from lightning_gputime._options import AUTO, Options
from lightning_gputime._phases import (
    BACKWARD,
    DATA,
    FETCH,
    FORWARD,
    GRAD,
    LOSS,
    MAYBE_EVALUATION,
    OPTIMIZER,
    OTHER,
    PHASES,
    StepRecord,
)
from lightning_gputime._record.pending_steps import is_fetch
from lightning_gputime._record.recorder import Recorder

# Messages about the first steps

_ACTION_MISSING = "Not measured: %s, because %s in the first %d steps."
_BACKWARD_FIRST = (
    "In each of the first %d steps, backward precedes forward: steps end inside a batch, so the"
    " phases of a step belong to two batches. Call step() at the end of the loop body."
)
_COUNTS_DIFFER = (
    "The trainer counts %d steps, and the timer counts %d. Times per step are wrong, because a step"
    " of the timer is not an update of the trainer. Please report this."
)

# Messages about the sums of steps

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
_ATTACHED_TOO_EARLY = (
    "The process group was created after the timer was attached: waits for other ranks are not"
    " separated, and ranks are not compared. Attach the timer after init_process_group()."
)
_OTHER_THREAD = (
    "The model is called in a different thread than step() or steps(), where it is not timed. Call"
    " the model in the thread that calls step() or iterates over steps()."
)
_CALL_REPLACED = (
    "`%s` replaces __call__ of torch.nn.Module, so only modules inside it count as `forward`."
    ' Wrap its calls in `with phase("forward")`.'
)
_STEPS_WITHOUT_FORWARD = (
    "%d of %d steps have no model call. Call step() once, at the end of the loop body, or"
    " only iterate over steps(). Filter batches before the loop sees them:"
    " timer.steps(filter(is_good, loader)). If those steps train another model, attach a timer to"
    " each model."
)
_FIRST_STEPS_WITHOUT_BACKWARD = (
    "The first %d timed steps have no backward. Call step() at the end of the loop body. Filter"
    " batches before the loop sees them: timer.steps(filter(is_good, loader)). Put an evaluation"
    " before the training into `with timer.paused()`."
)
_MAY_EVALUATE = (
    "Before the training part of a step, the model runs in eval mode without gradients, for %.3g ms"
    " per step. That counts as `other`. If it is an evaluation, put it into `with timer.paused()`,"
    " or let the training loop iterate over timer.steps(loader)."
)
_BATCHES_WITHOUT_FORWARD = (
    "Batches without a model call take %.3g ms of `other` per step. If they do train the model, but"
    " in a way that the timer cannot detect, such as by a CUDA graph that was captured before"
    " attach(), call step() at the end of the loop body."
)
_FORWARD_MISSES_WORK = (
    "`%s` takes %.3g ms per step, and `forward` is short compared with `backward`. If the loop"
    " calls a method of the model, such as model.features(x), instead of the model, wrap the call"
    ' in `with phase("forward")`.'
)
_NO_OPTIMIZER = (
    "The model is trained, but the timer has no optimizer. zero_grad() counts as the phase before"
    " it, and evaluations count as part of the steps. Pass the optimizer: GPUPhaseHooks(model,"
    " optimizer)."
)
_EVAL_WITH_GRADIENTS = (
    "The model is also called in eval mode with gradients enabled, which counts as part of the"
    " steps. If it is an evaluation, put it under `torch.no_grad()`."
)
_STEPS_WITHOUT_UPDATE = (
    "%d of %d steps have no update. If you accumulate gradients, pass accumulate_grad_batches=%s,"
    " so that a step is one update."
)

# Messages before the first step

_OTHER_PARAMETERS = (
    "None of the parameters that %s updates belongs to the model: the optimizer was created for"
    " another model, or before the parameters were replaced. Its updates are timed anyway. Pass the"
    " optimizer of this model."
)
_SEVERAL_DEVICES = (
    "The model is on several devices: %s. Its phases are timed on %s only. Pass device= to choose"
    " another device."
)

_NOT_MEASURED = {
    _NO_FORWARD: ("forward, because no model call was recorded", (FORWARD, OTHER)),
    _OTHER_THREAD: ("forward, because the model is called in another thread", (FORWARD, OTHER)),
    _CALL_REPLACED: (
        "forward, because the model is called without its hooks",
        (FORWARD, LOSS, OTHER),
    ),
    _NO_BACKWARD: ("backward, because no backward was recorded", (BACKWARD, OTHER)),
    _MAY_EVALUATE: ("evaluations, because they may be a part of the steps", (OTHER,)),
    _NO_UPDATE: ("updates, because no update was recorded", (OPTIMIZER, OTHER)),
    _FORWARD_MISSES_WORK: (
        "forward, because the loop may call a method of the model",
        (FORWARD, LOSS, OTHER),
    ),
}
"""By message: the quantity that is not measured, and the phases that may contain its time."""


class SelfCheck:
    """Comparison of steps with the actions that their loop must contain.

    Each mismatch is reported once. The check reads the labels and numbers of the first 5 steps, and
    sums over the first 20 steps after the warm-up. Labels, numbers and sums are recorded anyway, so
    no step takes longer.
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
        self._counts_steps = loop.counts_steps and options.every_n_steps in (1, AUTO)
        # A trainer reports its evaluations.
        self._is_plain_loop = loop.search is not Search.NEVER
        # The user has passed no optimizer, but an optimizer may update the model.
        self._lacks_optimizer = loop.search is Search.AFTER_BACKWARD
        self._warn_once = WarnOnce()
        self._first_steps: list[StepRecord] | None = []  # None once they were checked.
        self._has_checked_sums = False
        # About all steps so far, except `_maybe_evaluated_ms`, which excludes the warm-up.
        self._has_trained = False  # True after the first backward.
        self._n_untrained = 0  # Number of steps before the first backward.
        self._idle_ms = 0.0  # Time of batches that do not call the model or end a step.
        self._maybe_evaluated_ms = 0.0  # Time of eval-mode calls before the training part.
        self._phases_ms: list[Mapping[str, float]] = []  # Of each step after the warm-up.

    def steps_read(self, steps: ReadSteps) -> None:
        """Check the steps that were read, once there are enough."""
        if self._first_steps is not None:
            self._first_steps += steps
            if len(self._first_steps) >= 5:
                self._check_first_steps(self._first_steps)
        if self._lacks_optimizer and self._boundaries.optimizer.has_any:
            self._warn_once(_NO_OPTIMIZER)
        # A captured graph calls no hooks when it is replayed, so checks by hooks would fail. The
        # recorder has already warned.
        if self._has_checked_sums or self._recorder.captures.has_captured:
            return
        for step in steps.measured:
            self._phases_ms.append(step.times().phase_ms)
            labels = step.labels
            if MAYBE_EVALUATION not in labels:
                continue
            # If `other` precedes eval-mode calls, as in a loop over `steps()`, they work on the
            # fetched batch, so they are not an evaluation.
            if is_fetch(labels[: labels.index(MAYBE_EVALUATION)]):
                marks = zip(labels, step.device_ms, strict=True)
                self._maybe_evaluated_ms += sum(
                    ms for label, ms in marks if label == MAYBE_EVALUATION
                )
        for step in steps:
            self._idle_ms += _ms_of_idle_batches(step)
            self._has_trained |= BACKWARD in step.labels or GRAD in step.labels
            if not self._has_trained:
                self._n_untrained += 1
        if self._results.sums.step.n >= 20:
            self._has_checked_sums = True
            self._check_calls()
            self._check_sums()

    def end(self) -> None:
        """Run the remaining checks at the end of the training, as far as it had enough steps."""
        # With fewer steps, a trainer may have fetched all batches before the first step.
        if self._first_steps is not None and len(self._first_steps) >= 3:
            self._check_first_steps(self._first_steps)
        ran = self._results.sums.phases
        if self._lacks_optimizer and self._boundaries.optimizer.has_any:
            self._warn_once(_NO_OPTIMIZER)
        if self._recorder.captures.has_captured:
            return
        if not self._has_checked_sums:
            self._check_calls(trains=BACKWARD in ran and OPTIMIZER in ran)
        elif self._is_plain_loop and BACKWARD in ran and FORWARD in ran:
            n = self._results.sums.step.n
            without_forward = n - ran[FORWARD].n
            # The steps before the first backward have already been reported.
            unreported = without_forward - self._n_untrained
            if unreported >= n / 20:
                self._report(_STEPS_WITHOUT_FORWARD, without_forward, n)

    def _check_first_steps(self, steps: Sequence[StepRecord]) -> None:
        """Check the actions in each of the first steps, their order, and the number of steps."""
        self._first_steps, n = None, len(steps)
        for expected in self._loop.expects:
            n_with = sum(not expected.labels.isdisjoint(step.labels) for step in steps)
            # Accept half of the steps: a step may have fetched its batch in the step before.
            if 2 * n_with < n:
                self._add_not_measured(
                    f"{expected.feature}, because {expected.otherwise} in the first {n} steps",
                    expected.blurred,
                )
                messages.warning(_ACTION_MISSING, expected.feature, expected.otherwise, n)
        # The first step may start anywhere in the loop body.
        if all(_ends_inside_batch(step.labels) for step in steps[1:]):
            self._add_not_measured(
                "single batches, because backward precedes forward", (FORWARD, BACKWARD)
            )
            self._warn_once(_BACKWARD_FIRST, n)
        if not self._counts_steps:
            return
        counted = 1  # Number of steps that the trainer counts, without batches that it skips.
        for before, step in pairwise(steps):
            added = step.number - before.number
            # The timer has missed updates only if there was enough backward for all of them.
            # Otherwise, the trainer has skipped batches: they have no backward and no update.
            n_batches = added * self._loop.accumulate_grad_batches
            has_missed_updates = _n_trained_batches(step.labels) >= n_batches
            counted += added if has_missed_updates else min(added, 1)
        if counted != n:
            self._add_not_measured(
                f"single steps, because the trainer counts {counted}, and the timer {n}"
            )
            self._warn_once(_COUNTS_DIFFER, counted, n)

    def _check_calls(self, *, trains: bool = True) -> None:
        """Run the checks for which a few steps are enough.

        Args:
            trains: False if the loop may be inference. Then run no check of a training.
        """
        forward = self._boundaries.forward
        if is_distributed() and self._boundaries.waits is None:
            self._report(_ATTACHED_TOO_EARLY)
        if trains and not forward.called_modules:
            was_elsewhere = self._recorder.threads.was_elsewhere
            self._report(_OTHER_THREAD if was_elsewhere else _NO_FORWARD)
        if (bypassed := forward.find_bypassed()) is not None:
            self._report(_CALL_REPLACED, type(bypassed).__name__)
        has_trained_late = self._is_plain_loop and self._has_trained and self._n_untrained > 0
        if trains and has_trained_late:
            self._report(_FIRST_STEPS_WITHOUT_BACKWARD, self._n_untrained)

    def _check_sums(self) -> None:
        """Check the sums over the first steps after the warm-up."""
        sums, forward = self._results.sums, self._boundaries.forward
        n, step_ms = sums.step.n, sums.step.device_ms
        trains = self._boundaries.optimizer.has_any
        if trains and BACKWARD not in sums.phases:
            self._report(_NO_BACKWARD)
        if trains:
            self._check_length_of_forward()
        self._phases_ms.clear()  # To free memory: they are not read any more.
        if self._maybe_evaluated_ms > 0.05 * step_ms:
            self._report(_MAY_EVALUATE, self._maybe_evaluated_ms / n)
        if self._is_plain_loop and self._idle_ms > 0.1 * step_ms:
            self._report(_BATCHES_WITHOUT_FORWARD, self._idle_ms / n)
        if self._is_plain_loop and forward.had_eval_calls_with_grad:
            self._report(_EVAL_WITH_GRADIENTS)
        with_forward = sums.phases[FORWARD].n if FORWARD in sums.phases else n
        # In at most half of the steps, without the first step, which may be incomplete.
        if with_forward - 1 <= (n - 1) / 2:
            self._report(_STEPS_WITHOUT_FORWARD, n - with_forward, n)
        elif trains and sums.skipped_updates >= (n - 1) / 2:
            self._report_missing_updates(sums.skipped_updates, n)

    def _check_length_of_forward(self) -> None:
        """Report that some work of `forward` is in another phase: in `other`, or in `loss`.

        Backward usually takes 2 times as long as forward and loss, or 3 times with checkpointing.
        If it takes over 5 times as long, some of their work is elsewhere.
        """
        # Use medians: in short steps, one hiccup exceeds the rest of 20 steps.
        ms = {name: median(phases.get(name, 0.0) for phases in self._phases_ms) for name in PHASES}
        if 0 < 5 * (ms[FORWARD] + ms[LOSS]) < ms[BACKWARD] < 5 * ms[OTHER]:
            self._report(_FORWARD_MISSES_WORK, OTHER, ms[OTHER])
        elif (
            FORWARD in self._results.sums.phases and 50 * ms[FORWARD] < ms[BACKWARD] < 5 * ms[LOSS]
        ):
            self._report(_FORWARD_MISSES_WORK, LOSS, ms[LOSS])

    def _report_missing_updates(self, n_skipped: float, n: float) -> None:
        """Report that `n_skipped` of `n` steps have no update, and how steps should be counted."""
        if n_skipped == n:
            self._report(_NO_UPDATE, n)
            return
        advice = '"auto": a step ends with the update'
        if not self._loop.needs_updates:
            advice = f"{round(n / (n - n_skipped))} (or {advice})"
        self._report(_STEPS_WITHOUT_UPDATE, n_skipped, n, advice)

    def _report(self, message: str, *values: float | str) -> None:
        """Warn once, and add what is not measured to the results."""
        self._warn_once(message, *values)
        if message in _NOT_MEASURED:
            self._add_not_measured(*_NOT_MEASURED[message])

    def _add_not_measured(self, text: str, blurred: tuple[str, ...] = ()) -> None:
        """Add a line to the results, and the phases that are not separated from each other."""
        self._results.add_not_measured(NotMeasured(f"not measured: {text}", blurred))


def _ms_of_idle_batches(step: StepRecord) -> float:
    """Return the time of batches that are fetched, but neither call the model nor end the step."""
    # If the step starts with `other`, that is code after the last update, not a batch.
    first = 1 if step.labels[0] == OTHER else 0
    intervals = zip(pairwise(step.labels[first:]), step.device_ms[first:], strict=False)
    # Such a batch is `other`, followed by `data` for the next batch.
    return sum(ms for labels, ms in intervals if labels == (OTHER, DATA))


def _ends_inside_batch(labels: tuple[str, ...]) -> bool:
    """Return True if a step starts with the backward of a batch and ends with the next forward."""
    if FORWARD not in labels or BACKWARD not in labels:
        return False
    last = {label: i for i, label in enumerate(labels)}
    starts_with_backward = labels.index(BACKWARD) < labels.index(FORWARD)
    return starts_with_backward and last[BACKWARD] < last[FORWARD]


def _n_trained_batches(labels: tuple[str, ...]) -> int:
    """Return the number of batches in a step that were fetched and had a backward."""
    n = 0
    is_new_batch = True  # False from the first backward of a batch until the next fetch.
    for label in labels:
        if label == FETCH:
            is_new_batch = True
        elif label == BACKWARD and is_new_batch:
            n += 1
            is_new_batch = False
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
