"""Captures of CUDA graphs. Recording an event would break a capture."""

from lightning_gputime._messages import WarnOnce
from lightning_gputime._record.clock import Clock

_CAPTURES = (
    "Phases inside a captured graph cannot be timed. Its replays count for the phase that launches"
    ' them: name that phase, as in `with phase("forward"): graph.replay()`.'
)


class Captures:
    """Detector of captures of graphs in the timed thread."""

    def __init__(self, clock: Clock, warn_once: WarnOnce) -> None:
        self._is_capturing, self._warn_once = clock.is_capturing, warn_once
        # Cheaper than `_is_capturing`, so every mark calls it first. May return True without a
        # capture.
        self.may_run = getattr(clock, "may_capture", clock.is_capturing)
        self.has_captured = False
        """True once a graph was captured. From then on, a step may be a replay without hooks."""

    def detect(self) -> bool:
        """Return True if a graph is being captured. If so, set `has_captured` and warn once."""
        if not self._is_capturing():
            return False
        self.has_captured = True
        self._warn_once(_CAPTURES)
        return True
