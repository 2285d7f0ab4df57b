"""The open step: its batches, its updates, and whether it has trained."""

from collections.abc import Iterable
from typing import Any

from lightning_gputime._compat.torch_ import has_compiled
from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._instrumentation.work import WorkCounter
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    AFTER_UPDATE,
    BACKWARD,
    BETWEEN,
    BETWEEN_BATCHES,
    DATA,
    EVALUATES,
    OTHER,
)
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.state import PAUSED
from lightning_gputime._session.state import EXAMINED, OFF, TIMED, State

_NO_BATCH = object()


class OpenStep:
    """The open step: its batches, its updates, and whether it has trained, as reported by hooks.

    Only the timed thread may use it, and only while the timer is attached.

    Args:
        needs_updates: True if a step ends with an update, whatever its number of batches.
    """

    def __init__(
        self, recorder: Recorder, boundaries: Boundaries, work: WorkCounter, *, needs_updates: bool
    ) -> None:
        self._recorder, self._boundaries, self._work = recorder, boundaries, work
        self.needs_updates = needs_updates

    def attach(self) -> None:
        """Look up the boundaries that `Boundaries.attach` has created."""
        self._forward, self.optimizer = self._boundaries.forward, self._boundaries.optimizer
        # An alias, because trainers call it in every step.
        self.update_begins = self.optimizer.update_begins

    # Batches

    def batch_begins(self, batch: Any = _NO_BATCH) -> None:
        """End the fetch of a batch, and any pause. Count the items of the batch."""
        recorder = self._recorder
        if recorder.named.names:
            recorder.named.end_fetch()
        if recorder.state is PAUSED:
            recorder.resume(OTHER)
        else:
            recorder.mark(OTHER)
        if batch is not _NO_BATCH:
            self._work.add_batch(batch)

    def fetch_begins(self) -> None:
        """End an evaluation before a fetch in an untimed step, in a loop without `steps()`."""
        self._forward.evaluation.untimed_spans.end()

    def add_batches(self, batches: Iterable[Any]) -> None:
        """Count the items of micro-batches that were fetched together."""
        for i, batch in enumerate(batches):
            if i:
                self._work.end_batch()
            self._work.add_batch(batch)

    def batch_ends(self, label: str = DATA) -> None:
        """End a micro-batch that does not end the step."""
        self._work.end_batch()
        recorder = self._recorder
        if recorder.state is PAUSED:  # A validation at the end of the loop body may have paused it.
            recorder.resume(label)
        else:
            recorder.mark(label)

    # Across loops

    def wait_for_loop(self) -> None:
        """End a loop inside the open step: its gradients wait for an update in the next loop."""
        self._recorder.mark_instead(DATA, BETWEEN)

    def continue_in_loop(self) -> None:
        """Continue the open step in another loop, without the time between the loops."""
        self._recorder.pause(since=BETWEEN)
        self._recorder.resume()

    def leave_gradients(self) -> bool:
        """Handle an exit from the loop inside a step that has not had its update.

        Return True if the step has gradients, so that another loop may run the update and end it.
        """
        if not self.needs_updates or BACKWARD not in self._recorder.open.phases:
            return False
        self.batch_ends(BETWEEN)
        return True

    # Updates

    @property
    def has_updated(self) -> bool:
        """True if an update was attempted in the open step, even if it was skipped."""
        return self.optimizer.has_updated

    @property
    def has_optimizer(self) -> bool:
        """True if the timer has hooks on at least one optimizer."""
        return self.optimizer.has_any

    @property
    def has_trained(self) -> bool:
        """True once a backward has run, in any step."""
        return self._forward.has_trained

    @property
    def repeats_forward(self) -> bool:
        """True once a backward has called a module, as activation checkpointing does."""
        return self._forward.repeats_forward

    def rely_on_updates(self) -> None:
        """From now on, end steps with updates: the trainer's count of batches was wrong."""
        self.needs_updates = True

    # Batches without training

    def has_idled(self, *, is_first: bool) -> bool:
        """Return True if the open step has certainly only fetched batches.

        Call it only while the hooks are attached. Return False if hooks may have missed training,
        for example in compiled code. From the second batch of a loop on, also return False until a
        backward has run.

        Args:
            is_first: True for the first batch of a loop.
        """
        recorder = self._recorder
        may_miss_calls = (
            has_compiled() or recorder.captures.has_captured or recorder.threads.was_elsewhere
        )
        if may_miss_calls or not self.has_optimizer:
            return False
        is_idle = (is_first or self.has_trained) and not self._boundaries.has_worked
        return is_idle and recorder.open.phases <= {*BETWEEN_BATCHES, OTHER, BETWEEN}

    @property
    def has_evaluated(self) -> bool:
        """True if the open step has only evaluated a model that was trained before."""
        if self._recorder.label not in EVALUATES or not self.has_trained:
            return False
        is_idle = not self._boundaries.has_worked
        return is_idle and self._recorder.open.phases <= {*BETWEEN_BATCHES, OTHER, *EVALUATES}

    # Exits

    def end_at_update(self, state: State, number: int, index: int, items: float) -> bool:
        """End the open step at its last update when the loop exits. Return True if it ended.

        The step does not end if a model was called after that update. In inference, it ends at the
        last model call. The host does not wait for the device, because the loop may have raised.
        See `Recorder.end_step` for the arguments.
        """
        recorder = self._recorder
        if state is OFF:
            return self.has_updated or not self.needs_updates
        if self._forward.evaluation.is_pending:  # Calls in eval mode that may be an evaluation.
            self._forward.exclude_evaluations()
        if state not in (TIMED, EXAMINED):
            return self.has_updated
        if self.has_optimizer:
            last = AFTER_UPDATE
        elif BACKWARD in recorder.open.phases:
            # The timer has no optimizer, so no hook has marked the update. It counts as `other`.
            recorder.mark_instead(AFTER_BACKWARD, OTHER)
            recorder.mark(AFTER_UPDATE)
            last = AFTER_UPDATE
        else:
            last = AFTER_FORWARD
        return recorder.end_at(last, number, index, items)
