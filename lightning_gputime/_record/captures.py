"""Captures of CUDA graphs, during which no event may be recorded."""

from lightning_gputime._messages import WarnOnce
from lightning_gputime._record.clock import Clock

_CAPTURES = (
    "Phases inside a captured graph cannot be timed. Its replays count for the phase that launches"
    ' them: name it, as in `with phase("forward"): graph.replay()`.'
)


class Captures:
    """Captures of graphs in the timed thread."""

    def __init__(self, clock: Clock, warn_once: WarnOnce) -> None:
        self._is_capturing, self._warn_once = clock.is_capturing, warn_once
        # A cheaper check, which every mark calls first. It may return True without a capture.
        self.may_run = getattr(clock, "may_capture", clock.is_capturing)
        self.has_captured = False
        """True once a graph was captured. Its replay may run a step without calling any hook."""

    def note(self) -> bool:
        """Return True if a graph is being captured, and warn once."""
        if not self._is_capturing():
            return False
        self.has_captured = True
        self._warn_once(_CAPTURES)
        return True
