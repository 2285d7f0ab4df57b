"""Choice of the steps that are timed or probed."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_gputime._instrumentation.comm import is_distributed
from lightning_gputime._measurement.results import Results
from lightning_gputime._options import AUTO, Options
from lightning_gputime._phases import StepRecord
from lightning_gputime._record.clock import Clock
from lightning_gputime._session.probe import Probe
from lightning_gputime._session.rank_comparer import open_exchange
from lightning_gputime._session.schedule import AutoSchedule, Plan, Schedule
from lightning_gputime._session.state import PROBED, TIMED, UNTIMED, State


class TimingPlan:
    """Choice of the state of each step, by the schedule, `every_n_steps="auto"` and probes.

    Args:
        options: Options of the timer.
        clock: Clock of the device, for probes.
        results: Durations of all steps; receives the chosen plan.
        log_every_n_steps: Number of steps between two logs; None if the trainer decides.
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
        self._results, self._host_ns = results, clock.host_ns
        self._next_long = results.untimed.next_long
        is_auto = options.every_n_steps == AUTO
        self._schedule = Schedule(
            Plan(interval=1 if is_auto else int(options.every_n_steps)),
            probe_every_n_steps=options.probe_every_n_steps,
            warmup_steps=options.warmup_steps,
            # Ranks must time the same steps, but would predict different long steps.
            **({} if is_distributed() else {"next_long": self._next_long}),
        )
        self.auto: AutoSchedule | None = None
        """Chooses `n` to time 1 of `n` steps; None if `n` is fixed."""
        if is_auto:
            results.update_facts(each_timed_for=each_timed_for)
            if not each_timed_for:
                self.auto = AutoSchedule(log_every_n_steps)
        self._agreement = open_exchange("agreement") if self.auto and options.sync_ranks else None
        self.probe = Probe(clock, results) if options.probe_every_n_steps else None
        self.times_all = self.auto is None and self._schedule.times_all
        """True if every step is timed, and none is probed."""
        self._span = (0, 0)  # Start (in nanoseconds) and first index of the current span.

    # The next step

    def kind_at(self, index: int) -> State:
        """Return `TIMED` or `UNTIMED` for the step of this index, ignoring probes."""
        return TIMED if self._schedule.is_timed(index) else UNTIMED

    def next_kind(self, kind: State, index: int) -> State:
        """Return the state of the step of this index, which follows a step of `kind`."""
        if kind is PROBED:
            return UNTIMED  # The host waited for the probe, so the queue is empty.
        probe = self.probe
        if probe is not None and self._schedule.is_probed(index) and probe.is_ready():
            return PROBED
        return self.kind_at(index)

    def next_timed(self, index: int) -> int:
        """Return the index of the next timed step, starting from `index`."""
        return self._schedule.next_timed(index)

    def is_usual(self, kind: State, index: int) -> bool:
        """Return True if neither the step of this index nor the step before it is probed."""
        return kind is not PROBED and not self._schedule.is_probed(index - 1)

    def is_warmup(self, index: int) -> bool:
        return index < self._schedule.warmup_steps

    @property
    def expected_long_steps(self) -> int:
        """Number of steps of the next timing window if it covers an expected long step; else 0."""
        return self._schedule.plan.window if self._schedule.expects_long else 0

    # every_n_steps="auto"

    def is_decision_due(self, index: int) -> bool:
        return self.auto is not None and index >= self.auto.due

    @property
    def asks_ranks(self) -> bool:
        """True if a decision may wait for other ranks."""
        return self._agreement is not None

    def decide(self, index: int) -> None:
        """Choose the plan from the step of this index on. May wait for other ranks."""
        if (auto := self.auto) is None:
            return
        n, recurrence = auto.decide(), None
        if self._agreement is not None:
            n, *agreed = self._agreement.agree([n, *(self._next_long() or ())])
            recurrence = (agreed[0], agreed[1]) if agreed else None
        plan = replace(auto.follow(n, index), recurrence=recurrence)
        if plan != self._schedule.plan:
            self._schedule.follow(plan, index)
        self._results.update_facts(
            timed_every_n_steps=n, timing_share=auto.share, added_share=auto.added_share(n)
        )

    def start_span(self, index: int) -> None:
        """Start measuring the host time of untimed steps, from the step of this index on."""
        self._span = self._host_ns(), index

    def end_span(self, index: int, *, is_untimed: bool = True) -> None:
        """Record the host time of the span that ends here, and start the next."""
        (start_ns, first), now_ns = self._span, self._host_ns()
        self._span = now_ns, index
        if self.auto is not None and is_untimed:
            self.auto.add_untimed(start_ns, now_ns, index - first)

    def time_switch(self, switch: Callable[[], None], index: int) -> None:
        """Attach or suspend hooks with `switch`, record the time it takes, and start a span."""
        start_ns = self._host_ns()
        switch()
        self.start_span(index)
        if self.auto is not None:
            self.auto.add_switch(self._span[0] - start_ns)

    # Steps that were read

    def add_timed(self, records: Sequence[StepRecord], since_ns: int) -> None:
        """Add steps whose reading took from `since_ns` until now."""
        if self.auto is not None:
            took_ns = self._host_ns() - since_ns
            self.auto.add_timed(records, took_ns)
            # Reading is part of the cost of timing, so exclude it from the current span.
            start_ns, first = self._span
            self._span = start_ns + took_ns, first
