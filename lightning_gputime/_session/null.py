"""Session of a timer that is not attached. It ignores all events of the loop."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning_gputime._instrumentation.patching import Attachment
from lightning_gputime._phases import DATA
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.state import IDLE
from lightning_gputime._record.step_marks import StepMarks
from lightning_gputime._record.timed_thread import TimedThread
from lightning_gputime._session.state import ENDED, NEW, State


class NullRecorder:
    """Recorder of a timer that is not attached."""

    label: str | None = None
    state = IDLE

    def __init__(self) -> None:
        self.open, self.threads = StepMarks(), TimedThread()

    def mark(self, label: str) -> None: ...
    def mark_instead(self, of: str, label: str) -> None: ...
    def pause(self, *, now: bool = False) -> None: ...
    def resume(self, label: str = DATA) -> None: ...
    def warn_once(self, message: str, *values: object) -> None: ...


class NullUpdates:
    """Updates of a timer that is not attached."""

    updates = 0


class NullOpenStep:
    """Open step of a timer that is not attached."""

    has_updated = has_optimizer = has_trained = has_evaluated = False
    needs_updates = repeats_forward = False
    optimizer = NullUpdates()

    def batch_begins(self, batch: Any = None) -> None: ...
    def fetch_begins(self) -> None: ...
    def add_batches(self, batches: Iterable[Any]) -> None: ...
    def batch_ends(self, label: str = DATA) -> None: ...
    def update_begins(self) -> None: ...
    def wait_for_loop(self) -> None: ...
    def continue_in_loop(self) -> None: ...
    def leave_gradients(self) -> bool:
        return False

    def rely_on_updates(self) -> None: ...
    def has_idled(self, *, is_first: bool) -> bool:
        return False


class NullSteps:
    """Steps of a timer that is not attached."""

    ended_ns = 0
    times_all = False

    def __init__(self, state: State) -> None:
        self.state = state

    def begin(self) -> None: ...
    def end_step(self, number: int, label: str = DATA) -> bool:
        return True

    def first_step_ended(self) -> None: ...
    def leave(self, number: int) -> bool:
        return False

    def keep_hooks(self) -> None: ...


class NullSession:
    """Session of a timer that is not attached.

    Args:
        was_attached: True if the timer was attached before. Its loop may continue, untimed.
    """

    is_attached = False
    recorders: Sequence[Recorder] = ()

    def __init__(self, *, was_attached: bool) -> None:
        self.was_attached = was_attached
        self.recorder, self.open_step = NullRecorder(), NullOpenStep()
        self.steps = NullSteps(ENDED if was_attached else NEW)

    def __reduce__(self) -> str:
        # A copy is the same object, because `TimedThread` cannot be pickled.
        return "REMOVED" if self.was_attached else "NEVER_ATTACHED"

    def attach_until_end(self, attachment: Attachment) -> None: ...
    def set_loader(self, loader: object, in_data: bool = False) -> None: ...
    def start_epoch(self, first_step: int, epoch: int) -> None: ...
    def publish(self) -> None: ...
    def log_means(self) -> None: ...
    def compare_ranks(self) -> None: ...
    def call_own(self, function: Callable[[], None], name: str) -> None: ...
    def flush(self) -> None: ...
    def drain(self) -> None: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...
    def remove(self) -> None: ...
    def lose(self) -> None: ...


NEVER_ATTACHED = NullSession(was_attached=False)
REMOVED = NullSession(was_attached=True)
