"""Captures of CUDA graphs, in which no event may be recorded."""

from lightning_gputime._messages import WarnOnce
from lightning_gputime._record.clock import Clock

_CAPTURES = (
    "Phases inside a captured graph cannot be timed. Its replays count for the phase that launches"
    ' them: name it, as in `with phase("forward"): graph.replay()`.'
)


class Captures:
    """The captures of graphs in the timed thread."""

    def __init__(self, clock: Clock, warn_once: WarnOnce) -> None:
        self._is_capturing, self._warn_once = clock.is_capturing, warn_once
        # Every mark calls this first: it is cheaper, and may be true without need.
        self.may_run = getattr(clock, "may_capture", clock.is_capturing)
        self.were_seen = False
        """True once a graph was captured: a replay may run a step without a call of a hook."""

    def note(self) -> bool:
        """Return whether a graph is being captured; if so, tell the user once."""
        if not self._is_capturing():
            return False
        self.were_seen = True
        self._warn_once(_CAPTURES)
        return True
