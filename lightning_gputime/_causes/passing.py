"""Steps that are not timed, by the host's clock: which of them took long."""

from collections.abc import Callable, Sequence
from math import inf

from lightning_gputime._causes.inquiry import Inquiry
from lightning_gputime._causes.usual import AROUND, limit_of, median
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._results.slow import Passed, SlowStep
from lightning_gputime._untraced import untraced


@untraced
class Passing:
    """Takes the host's time of each step that is not timed, and tells of those that took long.

    Only where the host sets the pace, as those that are timed show: where the device does, the host
    runs ahead of it, and how long it takes for a step says nothing of the step. No step is judged
    of which a part belongs to none.

    Args:
        recorder: Rests meanwhile, and knows whether a part of the step belongs to none.
        inquiry: Knows the pace, and why steps were slow.
        now_ns: Returns the host's time (in nanoseconds).
        deliver: Is called with each slow step.
    """

    def __init__(
        self,
        recorder: Recorder,
        inquiry: Inquiry,
        now_ns: Callable[[], int],
        deliver: Callable[[Sequence[SlowStep]], object],
    ) -> None:
        self._recorder = recorder
        self._inquiry = inquiry
        self._now_ns = now_ns
        self._deliver = deliver
        self.passed = Passed()
        """The steps that were judged."""
        # When the open step began; None if its end is not looked at.
        self._begun_ns: int | None = None
        # One that took long, and is judged when the next has ended: its number, begin and end.
        self._suspect: tuple[int, int, int] | None = None
        # What they took since it was last looked what is usual.
        self._each_ns: list[int] = []
        # What is usual, and from which time on a step is slow: never where none is judged.
        self._usual_ns = 0.0
        self._limit_ns = inf

    def step_begins(self) -> None:
        """Must be called where a step begins that is not timed, if the one before was."""
        self._recorder.forget_pause()  # That was the other's.
        self._begun_ns = now = self._now_ns()
        if self._suspect is not None:
            self._judge(now - self._suspect[2])

    def leave(self) -> None:
        """Must be called where a loop begins: the end of its first step is not looked at."""
        self._begun_ns = self._suspect = None

    def step_ends(self, number: int) -> None:
        """Must be called where a step ends that is not timed; the next may not be either.

        Args:
            number: The number that it would be logged under.
        """
        # Each of them pays for this.
        begun, self._begun_ns = self._begun_ns, self._now_ns()
        end = self._begun_ns
        if self._recorder.had_pause or begun is None:
            self._recorder.forget_pause()
            self._suspect = None
            return
        took = end - begun
        self._each_ns.append(took)
        if self._suspect is not None:
            self._judge(took)
        if self._limit_ns != inf:
            self.passed.n += 1
            self.passed.ns += took
            if took > self._limit_ns:
                self._suspect = number, begun, end
        if len(self._each_ns) >= AROUND:
            self._look_anew()

    def _judge(self, next_ns: int) -> None:
        """Judges the one that took long.

        Args:
            next_ns: What the step after it took.
        """
        suspect, self._suspect = self._suspect, None
        # A full queue of launches holds the host up as if it set the pace. What it then waits for
        # the device, it makes up for in the next step.
        is_made_up_for = next_ns < 2 * self._usual_ns - self._limit_ns
        if suspect is None or is_made_up_for:
            return
        number, *host_ns = suspect
        slow = self._inquiry.judge_passed(
            number, host_ns, self._usual_ns, self._limit_ns, self._recorder
        )
        if slow:
            self._deliver(slow)
        # To explain it took a while, and a function of the user's any time.
        self._begun_ns = self._now_ns()

    def _look_anew(self) -> None:
        self._limit_ns = inf
        if self._inquiry.host_sets_pace:
            self._usual_ns = median(self._each_ns)
            self._limit_ns = limit_of(self._each_ns, self._usual_ns, 1e6)
        self._each_ns.clear()
