"""What a timer says, once, of a loop that it does not see, or that looks wrong."""

from lightning_gputime._boundaries.boundaries import Boundaries
from lightning_gputime._boundaries.comm import is_distributed
from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._messages import WarnOnce
from lightning_gputime._phases import BACKWARD, DATA, FORWARD, GRAD, LOSS, OPTIMIZER, OTHER, PHASES
from lightning_gputime._record.recorder import Recorder

ENOUGH = 20  # It judges after this many steps behind the warm-up.

_NO_FORWARD = (
    "No call of the model was seen: is it the module that the loop calls, such as what"
    ' torch.compile returned? If it must be another, name its time: `with phase("forward")`. Where'
    " a whole step is compiled nothing inside is seen: compile the model alone to time its phases."
)
_NO_BACKWARD = (
    'No backward was seen: name its time, `with phase("backward")`, or call loss.backward() in the'
    " thread of the loop, and outside of what is compiled."
)
_NO_UPDATE = (
    "No update of an optimizer was seen in %d steps: where it is none of torch's, name its time,"
    ' `with phase("optimizer")`.'
)
_NO_MODULES = (
    "None of the modules that `modules` means was called inside `forward`, and so none has a row:"
    " give modules that the model calls, none of a copy of it or inside scripted code."
)
_TOO_EARLY = (
    "The process group was created after the timer was attached: waits for other ranks are not told"
    " apart, and the ranks are not compared. Attach the timer after init_process_group()."
)
_ELSEWHERE = (
    "The model is called in another thread than the one that calls step() or iterates over"
    " steps(): only that one is timed, so do both in one."
)
_TWICE = (
    "%d of %d steps have no call of the model: is step() called more than once in a batch? Call it"
    " once, at the end of the loop's body, or only iterate over steps(); and leave batches out"
    " inside of it, as in timer.steps(filter(is_good, loader)). Or does the loop train another"
    " model there? Give each model a timer of its own."
)
_EARLY = (
    "The first %d timed steps have no backward: call step() last in the loop's body, leave batches"
    " out inside of steps(), as in timer.steps(filter(is_good, loader)), and put an evaluation"
    " before the training into `with timer.paused()`."
)
_UNSEEN = (
    "Batches on which the model is not called take %.3g ms of `other` a step: if they train in a"
    " way that is not seen, such as by a graph that was captured before attach(), call step() at"
    " the end of the body."
)
_METHOD = (
    "`%s` is %.3g ms a step, and `forward` little beside `backward`: where the loop calls a"
    " method of a module, such as model.features(x), and not the module, name its time:"
    ' `with phase("forward")`.'
)
_NO_OPTIMIZER = (
    "The model was trained, and the timer has no optimizer: zero_grad counts for what it follows,"
    " and evaluations for the steps. Write GPUPhaseHooks(model, optimizer)."
)
_EVALUATED = (
    "The model is called in eval mode with gradients on, too: where that is an evaluation, it"
    " counts for the steps. Put it under `torch.no_grad()`."
)
_ACCUMULATED = (
    "%d of %d steps have no update: if gradients accumulate, pass accumulate_grad_batches=%s, so"
    " that a step is one update."
)


class LoopDiagnostics:
    """Judges a loop by its sums, when the warm-up and some steps are over. That costs no step."""

    def __init__(
        self, results: Results, boundaries: Boundaries, recorder: Recorder, loop: Loop
    ) -> None:
        self._results, self._boundaries, self._recorder = results, boundaries, recorder
        # Whether gradients accumulate, as the user has said, and whether the loop is one's own.
        self._accumulates = loop.needs_updates
        self._is_own = loop.pause_evaluation is not False
        # Whether an optimizer of the model that updates is one that the user has not given.
        self._lacks_optimizer = loop.pause_evaluation is None
        self._warn_once = WarnOnce()
        self._is_over = self._has_trained = False
        # Until it is over: what batches take on which nothing was seen to be done, and which so
        # end no step; and steps before the first backward.
        self._idle_ms, self._early = 0.0, 0

    def steps_read(self, steps: ReadSteps) -> None:
        self._tell_of_optimizer()
        # Replays of a captured graph show nothing of what they do, which is said already.
        if self._is_over or self._recorder.has_captured:
            return
        for step in steps:
            marks = zip(step.labels, step.labels[1:], step.device_ms, strict=False)
            self._idle_ms += sum(ms for *both, ms in marks if both == [OTHER, DATA])
            self._has_trained |= BACKWARD in step.labels or GRAD in step.labels
            self._early += not self._has_trained
        if self._results.sums.step.n >= ENOUGH:
            self._is_over = True
            self._judge_few_steps()
            self._judge_many_steps()

    def end(self) -> None:
        """Judge at the end: say of few steps only what is certain."""
        ran = self._results.sums.phases
        self._tell_of_optimizer()
        if self._recorder.has_captured:
            return
        if not self._is_over:
            self._judge_few_steps(trains=BACKWARD in ran and OPTIMIZER in ran)
        elif self._is_own and BACKWARD in ran and FORWARD in ran:
            # Where the loop calls another part of the model, the first of these steps has no
            # `forward`.
            n = self._results.sums.step.n
            without = n - ran[FORWARD].n
            self._tell(20 * (without - self._early) >= n, _TWICE, without, n)

    def _tell_of_optimizer(self) -> None:
        if self._lacks_optimizer and self._boundaries.optimizer.has_any:
            self._warn_once(_NO_OPTIMIZER)

    def _judge_few_steps(self, *, trains: bool = True) -> None:
        self._tell(is_distributed() and self._boundaries.waits is None, _TOO_EARLY)
        message = _ELSEWHERE if self._recorder.was_elsewhere else _NO_FORWARD
        self._tell(trains and not self._boundaries.forward.was_ever_called, message)
        is_early = self._is_own and self._has_trained and self._early > 0
        self._tell(trains and is_early, _EARLY, self._early)

    def _judge_many_steps(self) -> None:
        sums, seen = self._results.sums, self._boundaries
        ran, n, skipped = sums.phases, sums.step.n, sums.skipped_updates
        trains = seen.optimizer.has_any
        with_forward = ran[FORWARD].n if FORWARD in ran else n
        # The number of steps may be odd.
        ms = {name: ran[name].device_ms if name in ran else 0.0 for name in PHASES}
        # A backward takes twice as long as its forward and loss, or three times with checkpoints.
        is_in_other = 0 < 5 * (ms[FORWARD] + ms[LOSS]) < ms[BACKWARD] < 5 * ms[OTHER]
        is_in_loss = FORWARD in ran and 50 * ms[FORWARD] < ms[BACKWARD] < 5 * ms[LOSS]
        place = OTHER if is_in_other else LOSS
        is_twice = 2 * (with_forward - 1) <= n - 1
        is_skipped = trains and not is_twice and 2 * skipped >= n - 1
        ends = '"auto": a step ends with the update'
        if not self._accumulates:
            ends = f"{round(n / max(n - skipped, 1))} (or {ends})"
        is_idle = 10 * self._idle_ms > sums.step.device_ms
        self._tell(FORWARD in ran and seen.sees_no_modules, _NO_MODULES)
        self._tell(trains and BACKWARD not in ran, _NO_BACKWARD)
        self._tell(trains and (is_in_other or is_in_loss), _METHOD, place, ms[place] / n)
        self._tell(self._is_own and is_idle, _UNSEEN, self._idle_ms / n)
        self._tell(self._is_own and seen.forward.is_evaluated, _EVALUATED)
        self._tell(is_twice, _TWICE, n - with_forward, n)
        self._tell(is_skipped and skipped == n, _NO_UPDATE, n)
        self._tell(is_skipped and skipped < n, _ACCUMULATED, skipped, n, ends)

    def _tell(self, is_so: bool, message: str, *values: float | str) -> None:
        if is_so:
            self._warn_once(message, *values)
