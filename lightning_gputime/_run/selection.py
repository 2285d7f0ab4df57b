"""Which steps of a run are timed, and how, while it runs."""

from lightning_gputime._boundaries.boundaries import Boundaries
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._run.probe import Probe
from lightning_gputime._run.schedule import LEFT_OUT, PROBED, SKIPPED, TIMED, Kind, Schedule


class Selection:
    """Lets each step be what is planned for it, if it can be.

    Args:
        schedule: What is planned for each step, by its index.
        probe: Takes the steps that are probed, if any are.
        recorder: Rests in the steps that are not timed.
        boundaries: Are told where each step ends, timed or not.
        has_others: Whether other ranks may probe a step that this one does not.
        waits_before_batch: Whether the host waits for the device before each batch: what keeps that
            busy must begin behind.
    """

    def __init__(
        self,
        schedule: Schedule,
        probe: Probe | None,
        recorder: Recorder,
        boundaries: Boundaries,
        *,
        has_others: bool,
        waits_before_batch: bool = False,
    ) -> None:
        self._schedule = schedule
        self._probe = probe
        self._recorder = recorder
        self._boundaries = boundaries
        self._has_others = has_others
        self._waits_before_batch = waits_before_batch
        # Whether the first batch of the open step has not begun.
        self._is_early = False
        # Of all steps; numbers may leave some out, or repeat.
        self._index = 0
        # What the open step is.
        self._kind = SKIPPED

    @property
    def is_timing(self) -> bool:
        """Whether the open step is timed, and not probed."""
        return self._kind is TIMED

    def begin(self) -> None:
        """Begins a step in the calling thread; what is open is dropped."""
        # Only at the end of a step is one probed: the fetch of an epoch's first batch takes any
        # time. So no other rank does it either.
        self._kind = self._schedule.kind_unprobed(self._index)
        if self._kind is TIMED:
            self._recorder.begin()
        else:
            self._recorder.rest()
        self._is_early = False
        if self._probe is not None:
            self._probe.step_begins()

    def leave_step(self) -> None:
        """Counts the open step, in which the loop was left, and begins the next."""
        self._index += 1
        if not self._schedule.is_plain:
            self.begin_next()

    def end_step(self, number: int, reads: bool) -> None:
        """Ends the open step; `begin_next` must follow.

        Args:
            number: The number that it is logged under.
            reads: Whether the finished steps must be read now.
        """
        kind = self._kind
        if self._probe is not None:
            usual = kind in (TIMED, SKIPPED) and self._index >= self._schedule.warmup_steps
            # Before all else: reading and logging are no part of the launches.
            self._probe.step_ends(usual=usual)
        is_timed = kind in (TIMED, PROBED)
        skipped_update = self._boundaries.step_ended(timed=is_timed)
        if is_timed:
            self._recorder.end_step(number, skipped_update, reads)
        else:
            self._recorder.end_untimed(reads)
        self._index += 1

    def begin_next(self) -> None:
        """Begins a step; where the last one was timed, its last mark is the first of this one."""
        kind, self._kind = self._kind, self._next_kind()
        if self._kind in (SKIPPED, LEFT_OUT):
            self._recorder.rest()
        elif kind in (SKIPPED, LEFT_OUT):
            self._recorder.begin()
        if self._waits_before_batch:
            self._is_early = self._probe is not None
        else:
            self._fill_queue()

    def batch_begins(self) -> None:
        """Must be called where a batch begins."""
        if self._is_early:
            self._is_early = False
            self._fill_queue()

    def _fill_queue(self) -> None:
        if self._probe is not None:
            if self._kind is PROBED:
                self._recorder.start_probe(self._probe.keep_busy)
            self._probe.step_begins()

    def _next_kind(self) -> Kind:
        """Returns what becomes of the step that begins: what is planned, if it can be."""
        kind = self._schedule.kind(self._index)
        if kind is PROBED and self._probe is not None and not self._probe.is_ready():
            # Where other ranks may probe this step, it waits for them, and is not like the others.
            return LEFT_OUT if self._has_others else self._schedule.kind_unprobed(self._index)
        # The one before was not probed after all: this one starts with a queue as usual.
        if kind is LEFT_OUT and self._kind not in (PROBED, LEFT_OUT):
            return self._schedule.kind_unprobed(self._index)
        return kind
