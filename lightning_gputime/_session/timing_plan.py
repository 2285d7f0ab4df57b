"""Choice of the steps that are timed or examined."""

from dataclasses import replace

from lightning_gputime._instrumentation.comm import is_distributed
from lightning_gputime._ledger.schedule import ExaminationSchedule
from lightning_gputime._measurement.results import Results
from lightning_gputime._options import AUTO, Options
from lightning_gputime._record.clock import Clock
from lightning_gputime._session.agreement import open_agreement
from lightning_gputime._session.schedule import Schedule, Windows
from lightning_gputime._session.state import EXAMINED, TIMED, UNTIMED, State
from lightning_gputime._session.timing_cost import TimingCost


class TimingPlan:
    """Choice of the state of each step, by the two schedules and `every_n_steps="auto"`.

    Args:
        options: Options of the timer.
        clock: Clock of the device.
        results: Durations of all steps; receives the chosen `n` if 1 of `n` steps is timed.
        log_every_n_steps: Number of steps between two logs; None if unknown, or without logs.
        each_timed_for: Option that requires that every step is timed; empty if none.
    """

    def __init__(
        self,
        options: Options,
        clock: Clock,
        results: Results,
        log_every_n_steps: int | None,
        each_timed_for: str,
    ) -> None:
        self._results = results
        self._next_long = results.untimed.next_long  # Predicts long steps, see `Schedule`.
        n = options.every_n_steps
        self.is_auto = n == AUTO and not each_timed_for
        """True if the cost of timing determines `n`, to time 1 of `n` steps."""
        if n == AUTO:
            results.update_facts(each_timed_for=each_timed_for)
        # Each rank would predict other long steps, but all ranks must time the same steps. So all
        # use the prediction of rank zero; see `decide`.
        next_long = (lambda: None) if is_distributed() else self._next_long
        self.schedule = Schedule(Windows(interval=1 if n == AUTO else int(n)), next_long)
        self.cost = TimingCost(clock.host_ns, log_every_n_steps)
        needs_agreement = self.is_auto and options.sync_ranks
        self._agreement = open_agreement() if needs_agreement else None
        self.examinations = ExaminationSchedule(self._next_long, is_distributed=is_distributed())
        if not options.lines:
            self.examinations.stop()
        self.times_all = not self.is_auto and self.schedule.windows.cover_all
        """True if every step is timed. Then examined steps count in all statistics."""

    def kind_at(self, index: int) -> State:
        """Return the state of the step of this index."""
        if index >= self.examinations.next_index:
            return EXAMINED
        return TIMED if self.schedule.next_timed(index) == index else UNTIMED

    def next_marked(self, index: int) -> int:
        """Return the index of the next step from `index` on that is timed or examined."""
        examined = max(self.examinations.next_index, index)
        return int(min(self.schedule.next_timed(index), examined))

    # every_n_steps="auto"

    @property
    def asks_ranks(self) -> bool:
        """True if a decision may wait for other ranks."""
        return self._agreement is not None

    def decide(self, index: int) -> None:
        """Choose the windows from the step of this index on. May wait for other ranks."""
        n = self.cost.decide()
        recurrence = None  # See `Windows`.
        if self._agreement is not None:
            wish = [n, *(self._next_long() or ())]
            n, *long_steps = self._agreement.agree(wish)
            if long_steps:
                recurrence = (long_steps[0], long_steps[1])
        windows = replace(self.cost.schedule_decision(n, index), recurrence=recurrence)
        if windows != self.schedule.windows:
            self.schedule.follow(windows, index)
        self._results.update_facts(
            timed_every_n_steps=n,
            timing_share=self.cost.share,
            added_share=self.cost.added_share(n),
        )
