"""Causes of slow steps outside of the loop's code, as found by `_attribution`."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_gputime._measurement.units import percent

_MIN_ADVICE_SHARE = 0.02  # Causes of a smaller fraction of the time get no advice.


@dataclass(frozen=True, slots=True)
class OutsideCause:
    """Something next to the loop, or in the batch, that coincides with slow steps.

    It does so more often than by chance, with a probability of at most 1 % for any false cause.

    Attributes:
        kind: "thread", "process", "batch", "pressure" (on a resource of the machine) or "pages"
            (swapped, or read for page faults).
        name: Name for sentences, such as "thread `save`".
        place: Function with file and line, process id, or further evidence; may be empty.
        share: Fraction of the excess that code in the loop does not explain, from 0 to 1.
        low: Lower end of the 95 % interval of `share`.
        high: Upper end of that interval.
        exposed: Fraction of all steps during which it happened.
    """

    kind: str
    name: str
    place: str
    share: float
    low: float
    high: float
    exposed: float

    @property
    def percent(self) -> str:
        """The share with its interval."""
        return f"{percent(self.share)} ({100 * self.low:.0f} to {100 * self.high:.0f} %)"

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


@dataclass(frozen=True, slots=True)
class OutsideSummary:
    """Slow steps that code in the loop does not explain, and what coincides with them."""

    n: int  # Number of these steps.
    steps: int  # Number of steps that were searched, timed or not.
    share: float  # Excess as a fraction of the time of these steps, from 0 to 1.
    causes: tuple[OutsideCause, ...] = ()
    not_checked: tuple[str, ...] = ()  # Sources of causes that this system does not have.
    # Another Python thread that runs in most steps, slow or not, while the loop is blocked. Its
    # share is the smaller of both, as a fraction of the time of all steps.
    blocking: OutsideCause | None = None

    @property
    def sentences(self) -> tuple[str, ...]:
        """What coincides with slow steps, and which thread may block all steps."""
        blocking = ""
        if self.blocking is not None:
            blocking = (
                f"the loop was blocked for {percent(self.blocking.share)} of the time or more while"
                f" {self.blocking} ran: only one thread at a time runs Python code"
            )
        return blocking, self._coincidence

    @property
    def _coincidence(self) -> str:
        if not self.causes:
            if self.share < 0.05 or not self.not_checked:
                return ""
            return f"causes of slow steps that were not checked: {', '.join(self.not_checked)}"
        parts = [f"{cause.percent} with {cause}" for cause in self.causes]
        return (
            f"{self.n:,} of {self.steps:,} steps were slow without a cause in the loop's code"
            f" ({percent(self.share)} of the time); this coincides to {', '.join(parts)}"
        )


def advice_on(summary: OutsideSummary | None) -> Iterator[tuple[str, str]]:
    """Yield code and text of the advice on causes outside of the loop."""
    if summary is not None and summary.blocking is not None:
        percentage = f"{100 * summary.blocking.share:.0f} %"
        because = f"the loop was blocked for {percentage} of the time or more while it ran"
        yield "busy_thread", f"move the work of {summary.blocking} to a process: {because}"
    for cause in summary.causes if summary is not None else ():
        if summary is None or cause.share * summary.share < _MIN_ADVICE_SHARE:
            continue
        because = f"it coincides with {cause.percent} of the unexplained excess of slow steps"
        if cause.kind == "thread":
            yield "busy_thread", f"move the work of {cause} to a process, or shorten it: {because}"
        elif cause.kind == "process":
            yield "other_process", f"move {cause} to other cores or another machine: {because}"
        elif cause.kind == "batch":
            how = "group batches by length"
            how += ", or pack sequences" if cause.place else ""
            yield "batch_size", f"{how}: {cause} explain {cause.percent} of the unexplained excess"
        else:
            yield "shared_machine", f"find what causes {cause.name}: {because}"
