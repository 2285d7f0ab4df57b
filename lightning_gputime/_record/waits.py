"""Waits for other ranks, which interrupt a phase."""

from threading import get_ident

from lightning_gputime._compat.torch_ import current_graph_task_id
from lightning_gputime._phases import COMM, CONTINUES, WAITS
from lightning_gputime._record.recorder import IN_BACKWARD, Recorder
from lightning_gputime._record.state import OPEN


def begin_wait(recorder: Recorder, label: str = WAITS) -> bool:
    """Start a wait for other ranks, which interrupts the current phase until `end_wait`.

    The wait is part of that phase, even if the phase is relabeled later. With the label `RECEIVES`,
    it is part of the next phase. Return False and do nothing if no step is timed in this thread, or
    during another wait.
    """
    if recorder.state is not OPEN or not is_here(recorder) or recorder.open.is_waiting:
        return False
    if recorder.label is None or recorder.label.endswith(f"/{COMM}"):
        return False  # The current phase, such as `data/comm`, is itself a wait.
    recorder.interrupt(label)
    return True


def end_wait(recorder: Recorder) -> None:
    """End a wait. The interrupted phase continues."""
    if recorder.state is OPEN and is_here(recorder) and recorder.open.is_waiting:
        recorder.interrupt(CONTINUES)


def is_here(recorder: Recorder) -> bool:
    """Return True if this thread is timed, or runs a backward pass for the timed thread."""
    if get_ident() == recorder.threads.timed:
        return True
    return current_graph_task_id() != -1 and (recorder.label or "").startswith(IN_BACKWARD)
