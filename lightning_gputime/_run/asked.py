"""What a user asks of a timer at work, from any thread."""

from threading import Thread, get_ident

from lightning_gputime._boundaries.named import NamedPhase, Paused
from lightning_gputime._record.recorder import Recorder


class Asked:
    """The part of a session that a user may call, beside a loop that runs in another thread, too.

    Args:
        recorder: That of the session.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.thread = -1
        """The thread that is timed; -1 before the first step."""
        # The same, to ask whether it still lives: while it does, no other thread may read.
        self._runner: Thread | None = None

    def phase(self, name: str) -> NamedPhase:
        """Returns the context manager of a phase that is named by hand."""
        return NamedPhase(name, [self._recorder])

    def paused(self) -> Paused:
        """Returns the context manager of a pause by hand."""
        return Paused([self._recorder])

    def flush(self) -> None:
        """Waits for the steps that have ended, and reads them; not beside the thread that runs."""
        if self._may_read():
            self._recorder.flush()

    def drain(self) -> None:
        """Reads what the device has finished, without a wait; not beside the thread that runs."""
        if self._may_read():
            self._recorder.drain()

    def _may_read(self) -> bool:
        """Tells whether steps can be read here: else two threads would, in no order."""
        if get_ident() == self.thread:
            return True
        return self._runner is None or not self._runner.is_alive()
