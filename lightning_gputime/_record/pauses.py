"""Marks on a timeline, with parts of it that belong to no step."""

from threading import get_ident

from lightning_gputime._phases import (
    BACKWARD,
    DATA,
    EXCLUDED,
    FORWARD,
    INTERRUPTIONS,
    LEFT,
    LOSS,
)
from lightning_gputime._record.marks import Marks
from lightning_gputime._record.state import OPEN, PAUSED
from lightning_gputime._untraced import untraced


@untraced
class Pauses(Marks):
    """Lets parts of the open step belong to no step: an evaluation's, or those left out by hand."""

    # How many pauses by hand are not over, and the label before them, if time had one.
    _holds = 0
    _held: str | None = None
    had_pause = False
    """Whether a pause began, or lasted, since `forget_pause`; at rest, too."""

    def forget_pause(self) -> None:
        """Forgets it, unless one lasts."""
        self.had_pause = self._holds > 0

    def pause(self) -> None:
        """Lets the time since the last mark, and until `resume`, belong to no step."""
        self.had_pause = True
        if self.state is OPEN and get_ident() == self.thread:
            self._rename(EXCLUDED)
            self.state = PAUSED
            self._tell_annotator(None)

    def pause_here(self) -> None:
        """Lets the time from here on, and until `resume`, belong to no step. Safe to call again."""
        # A pause takes all since the last mark, so that needs one here.
        self.mark(EXCLUDED)
        self.pause()

    def resume(self, label: str = DATA) -> None:
        """Ends a `pause`: from here on the time belongs to `label`."""
        if self.state is PAUSED and not self._holds and get_ident() == self.thread:
            self.state = OPEN
            self._record(self._first_label(label))

    def go_on(self, label: str) -> None:
        """Marks `label`, and ends a pause if there is one."""
        if self.state is PAUSED:
            self.resume(label)
        else:
            self.mark(label)

    def hold(self) -> None:
        """Begins a pause by hand, which lasts until `release`, whatever else begins or resumes."""
        if get_ident() != self._home:
            return
        self.had_pause = True
        self._holds += 1
        if self._holds == 1 and self.state is OPEN:
            self._held = self.label
            self._record(EXCLUDED, annotate=False)
            self._tell_annotator(None)
            # Once more: that mark may have failed.
            if self.state is OPEN:
                self.state = PAUSED

    def release(self) -> None:
        """Ends what `hold` began: time goes back to where it went before."""
        if get_ident() != self._home or not self._holds:
            return
        self._holds -= 1
        if not self._holds and self._held is not None:
            label, self._held = self._held, None
            if self.state is PAUSED:
                self.state = OPEN
                self._record(self._named[-1] if self._named else label)

    def exclude_since(self, label: str) -> None:
        """Lets the time from the first mark of `label` on, and until `resume`, belong to no step.

        If only the fetch was before, it was not that of this step, and belongs to none either.
        """
        if self.state is OPEN and get_ident() == self.thread:
            labels = [name for name, *_ in self._open]
            first = labels.index(label)
            self._exclude_from(
                0 if {*labels[:first]} <= {DATA, EXCLUDED, *INTERRUPTIONS} else first
            )
            self.state = PAUSED
            self._tell_annotator(None)

    def _cut_after(self, label: str) -> bool:
        """Lets what follows the last mark of `label` belong to no step, if it is no more work.

        Returns:
            Whether there is such a mark, and no model was called since, and no backward.
        """
        labels = [name for name, *_ in self._open]
        if label not in labels:
            return False
        last = len(labels) - 1 - labels[::-1].index(label)
        if {name.partition("/")[0] for name in labels[last:]} & {FORWARD, LOSS, BACKWARD}:
            return False
        self._exclude_from(last)
        # Excluded, too, but what came before led to an update.
        self._open[last] = (LEFT, *self._open[last][1:])
        return True

    def _exclude_from(self, first: int) -> None:
        self._open[first:] = [(EXCLUDED, event, ns) for _, event, ns in self._open[first:]]
        self.label = EXCLUDED
