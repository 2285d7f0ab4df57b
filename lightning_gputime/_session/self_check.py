"""The self-check: do the first steps have what each step of their loop must have?"""

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._compat.names import NotMeasured
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._messages import WarnOnce
from lightning_gputime._options import AUTO, Options
from lightning_gputime._phases import BACKWARD, FORWARD

_STEPS = 5  # Judged once so many steps were read; at the end of the training, after fewer.
_MIN_STEPS = 3  # A trainer may fetch all of fewer batches before the first step.

_NOT_SEEN = "Not measured: %s, because %s in the first %d steps."
_WRONG_ORDER = (
    "In each of the first %d steps backward precedes forward: steps end inside a batch, so their"
    " phases are those of two batches. Call step() last in the body of the loop."
)
_WRONG_COUNT = (
    "The trainer counts %d steps, and the timer has seen %d: its steps are not the trainer's"
    " updates, and times per step are wrong."
)


class SelfCheck:
    """Compares the first timed steps with what their loop says that each of them has.

    It reads the labels and numbers of steps that were read anyway, so no step takes longer.
    """

    def __init__(self, results: Results, loop: Loop, options: Options) -> None:
        self._results, self._expected = results, loop.expects
        # With "auto" the first steps are all timed.
        times_first = options.every_n_steps in (1, AUTO) and not options.probe_every_n_steps
        self._counts_steps = loop.counts_steps and times_first
        self._warn_once = WarnOnce()
        self._is_over = False
        self._seen: list[tuple[int, tuple[str, ...]]] = []  # Numbers and labels.

    def steps_read(self, steps: ReadSteps) -> None:
        if self._is_over:
            return
        self._seen += [(step.number, step.labels) for step in steps]
        if len(self._seen) >= _STEPS:
            self._judge()

    def end(self) -> None:
        """Judge at the end of the training, if that has not been done."""
        if not self._is_over and len(self._seen) >= _MIN_STEPS:
            self._judge()

    def _judge(self) -> None:
        self._is_over, seen, self._seen = True, self._seen, []
        n = len(seen)
        for expected in self._expected:
            # A fit may end with a step whose batch was fetched in the one before.
            if 2 * sum(expected.label in labels for _, labels in seen) < n:
                why = f"{expected.otherwise} in the first {n} steps"
                self._note(f"{expected.feature}, because {why}", *expected.blurred)
                self._warn_once(_NOT_SEEN, expected.feature, expected.otherwise, n)
        # The first one may have begun at any place.
        if all(_is_reversed(labels) for _, labels in seen[1:]):
            self._note("single batches, because backward precedes forward", FORWARD, BACKWARD)
            self._warn_once(_WRONG_ORDER, n)
        counted = seen[-1][0] - seen[0][0] + 1
        if self._counts_steps and counted != n:
            self._note(f"single steps, because the trainer counts {counted}, and {n} were seen")
            self._warn_once(_WRONG_COUNT, counted, n)

    def _note(self, text: str, *blurred: str) -> None:
        self._results.mismatches.append(NotMeasured(f"not measured: {text}", blurred))


def _is_reversed(labels: tuple[str, ...]) -> bool:
    """Return whether the first backward of a step comes before its first forward."""
    has_both = FORWARD in labels and BACKWARD in labels
    return has_both and labels.index(BACKWARD) < labels.index(FORWARD)
