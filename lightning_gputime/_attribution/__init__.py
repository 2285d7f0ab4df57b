"""Causes of slow steps outside of the loop's code: the machine, the batch and the GPU's clock.

- `surroundings` joins the times of steps with the others, for one session. It has the content of
  the batches, too.
- `machine` reads threads, processes and the system, and measures the clock of the GPU.
- `overlap` tests which of these candidates coincide with slow steps.

Here are the causes that were found, with their sentences and their advice.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_gputime._messages import percent

OUTSIDE_CODES = ("busy_cores", "busy_thread", "other_process", "group_batches", "shared_machine")
"""Codes of the advice. Its text names the cause."""
_FREE_CORES = "run fewer threads, workers and other processes"
MIN_ADVICE_SHARE = 0.02
"""Causes of a smaller fraction of the time get no advice. Chosen: removing one gains under 2 %."""


@dataclass(frozen=True, slots=True)
class OutsideCause:
    """Something next to the loop, or in the batch, that coincides with slow steps.

    It does so more often than by chance, with a probability of at most 1 % for any false cause.

    Attributes:
        kind: "thread", "process", "GPU process", "batch", "core" (waits of the loop's thread for a
            CPU core), "pressure" (on a resource of the machine) or "pages" (swapped, or read for
            page faults).
        name: Name for sentences, such as "thread `save`".
        place: File and line of a thread, or id of a process; may be empty.
        share: Fraction of the excess that code in the loop does not explain, from 0 to 1.
        low: Lower end of the 95 % interval of `share`.
        high: Upper end of that interval.
        exposed: Fraction of all steps during which it happened.
        padding: Of batches: fraction of the tokens that are padding; 0 if it is small or unknown.
    """

    kind: str
    name: str
    place: str
    share: float
    low: float
    high: float
    exposed: float
    padding: float = 0.0

    @property
    def percent(self) -> str:
        """The share with its interval."""
        return f"{percent(self.share)} ({100 * self.low:.0f} to {100 * self.high:.0f} %)"

    def __str__(self) -> str:
        padding = f"{percent(self.padding)} of the tokens are padding" if self.padding else ""
        details = self.place or padding
        return f"{self.name} ({details})" if details else self.name


@dataclass(frozen=True, slots=True)
class OutsideSummary:
    """Slow steps that code in the loop does not explain, and what coincides with them."""

    n: int  # Number of these steps.
    steps: int  # Number of steps that were searched, timed or not.
    share: float  # Excess as a fraction of the time of these steps, from 0 to 1.
    causes: tuple[OutsideCause, ...] = ()
    not_checked: tuple[str, ...] = ()  # Sources of causes that this system does not have.
    # Another Python thread that runs in most steps, slow or not. Its share is the largest fraction
    # of the time of all steps for which it may have blocked the loop.
    blocking: OutsideCause | None = None
    # Fraction of the time in which the loop's thread waited for a CPU core; 0 if small, and without
    # an accelerator, where times exclude these waits.
    core_wait_share: float = 0.0

    @property
    def explained(self) -> float:
        """Fraction of the excess that coincides with the causes."""
        return sum(cause.share for cause in self.causes)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentences on the causes of slow steps, and on what may slow down all steps."""
        found = []
        if self.blocking is not None:
            found.append(
                f"{self.blocking} may block the loop for up to {percent(self.blocking.share)} of"
                " the time: only one thread at a time runs Python code"
            )
        if self.causes:
            parts = [f"{cause.percent} with {cause}" for cause in self.causes]
            found.append(
                f"{self.n:,} of {self.steps:,} steps were slow without a cause in the loop's code"
                f" ({percent(self.share)} of the time); this coincides to {', '.join(parts)}"
            )
        elif self.share >= 0.05 and self.not_checked:
            found.append(f"causes of slow steps not checked: {', '.join(self.not_checked)}")
        return tuple(found)


def advice_on(summary: OutsideSummary | None) -> Iterator[tuple[float, str, str]]:
    """Yield the advice on causes outside of the loop: fraction of the time, code and text."""
    if summary is None:
        return
    if summary.core_wait_share:
        share = summary.core_wait_share
        because = f"the loop's thread waited {percent(share)} of the time for a CPU core"
        yield share, "busy_cores", f"{_FREE_CORES}: {because}"
    if summary.blocking is not None:
        share = summary.blocking.share
        because = f"it may block the loop for up to {percent(share)} of the time"
        yield share, "busy_thread", f"move the work of {summary.blocking} to a process: {because}"
    for cause in summary.causes:
        share = cause.share * summary.share
        if share < MIN_ADVICE_SHARE:
            continue
        because = f"it coincides with {cause.percent} of the unexplained excess of slow steps"
        if cause.kind == "thread":
            code, how = "busy_thread", f"move the work of {cause} to a process, or shorten it"
        elif cause.kind == "process":
            code, how = "other_process", f"move {cause} to other cores or another machine"
        elif cause.kind == "GPU process":
            code, how = "other_process", f"move {cause} to another GPU"
        elif cause.kind == "core":
            code, how = "busy_cores", _FREE_CORES
            because = f"{cause} coincide with {cause.percent} of the unexplained excess"
        elif cause.kind == "batch":
            code, how = "group_batches", "group batches by length"
            how += ", or pack sequences" if cause.padding else ""
            because = f"{cause} explain {cause.percent} of the unexplained excess"
        else:
            code, how = "shared_machine", f"find what causes {cause.name}"
        yield share, code, f"{how}: {because}"
