"""What a timer says, once, of a loop that it does not see, or that looks wrong."""

from lightning_gputime._boundaries.boundaries import Boundaries
from lightning_gputime._boundaries.comm import is_distributed
from lightning_gputime._messages import messages
from lightning_gputime._phases import BACKWARD, FORWARD, LOSS, OPTIMIZER, OTHER, PHASES
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._results.results import Results

Row = tuple[bool, str, tuple[float | str, ...]]
"""Whether a message holds, the message, and what is put into it."""

ENOUGH = 20
"""It judges after this many steps behind the warm-up."""

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
_UPDATED_ELSEWHERE = (
    "The optimizer runs its update in another thread than the loop, which has no phase `optimizer`"
    ' so: call its step() in that thread, or wait for it inside `with phase("optimizer")`.'
)
_TWICE = (
    "%d of %d steps have no call of the model: is step() called more than once in a batch? Call it"
    " once, at the end of the loop's body, or only iterate over steps()."
)
_METHOD = (
    "`other` is %.3g ms a step, and `forward` little beside `backward`: where the loop calls a"
    " method of a module, such as model.features(x), and not the module, name its time:"
    ' `with phase("forward")`.'
)
_ACCUMULATED = (
    "%d of %d steps have no update: if gradients accumulate, pass accumulate_grad_batches=%s, so"
    " that a step is one update."
)


class LoopDiagnostics:
    """Judges a loop by its sums, when the warm-up and some steps are over. That costs no step.

    Args:
        results: Have the sums.
        boundaries: Have seen the loop.
        recorder: Knows of other threads.
        accumulates: Whether the user has said that gradients accumulate.
    """

    def __init__(
        self, results: Results, boundaries: Boundaries, recorder: Recorder, *, accumulates: bool
    ) -> None:
        self._results, self._accumulates = results, accumulates
        self._boundaries, self._recorder = boundaries, recorder
        self._is_over = False

    def steps_read(self, _: object) -> None:
        """Judge once, when there are enough steps."""
        if not self._is_over and self._results.sums.step.n >= ENOUGH:
            self._is_over = True
            _tell(self._of_ranks(), self._of_forward(), *self._of_many_steps())

    def end(self) -> None:
        """Judge at the end: say of few steps only what is certain."""
        ran = self._results.sums.phases
        if not self._is_over:
            trains = BACKWARD in ran and OPTIMIZER in ran
            _tell(self._of_ranks(), *([self._of_forward()] if trains else []))

    def _of_ranks(self) -> Row:
        return is_distributed() and not self._boundaries.sees_waits, _TOO_EARLY, ()

    def _of_forward(self) -> Row:
        message = _ELSEWHERE if self._recorder.was_elsewhere else _NO_FORWARD
        return not self._boundaries.forward.was_ever_called, message, ()

    def _of_many_steps(self) -> list[Row]:
        sums, seen = self._results.sums, self._boundaries
        ran, n, skipped = sums.phases, sums.step.n, sums.skipped_updates
        trains = seen.optimizer.has_any
        with_forward = ran[FORWARD].n if FORWARD in ran else n
        # The number of steps may be odd.
        ms = {name: ran[name].device_ms if name in ran else 0.0 for name in PHASES}
        # A backward takes twice as long as its forward and loss, or three times with checkpoints.
        is_hidden = 0 < 5 * (ms[FORWARD] + ms[LOSS]) < ms[BACKWARD] < 5 * ms[OTHER]
        is_twice = 2 * (with_forward - 1) <= n - 1
        is_skipped = trains and not is_twice and 2 * skipped >= n - 1
        ends = '"auto": a step ends with the update'
        if not self._accumulates:
            ends = f"{round(n / max(n - skipped, 1))} (or {ends})"
        return [
            (FORWARD in ran and seen.sees_no_modules, _NO_MODULES, ()),
            (trains and BACKWARD not in ran, _NO_BACKWARD, ()),
            (trains and is_hidden, _METHOD, (ms[OTHER] / n,)),
            (is_twice, _TWICE, (n - with_forward, n)),
            (is_skipped and skipped == n, _NO_UPDATE, (n,)),
            (trains and OPTIMIZER not in ran and skipped < n, _UPDATED_ELSEWHERE, ()),
            (is_skipped and skipped < n, _ACCUMULATED, (skipped, n, ends)),
        ]


def _tell(*rows: Row) -> None:
    for is_so, message, values in rows:
        if is_so:
            messages.warning(message, *values)
