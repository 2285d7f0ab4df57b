"""Phases that the user named and that are open: they have started, but not ended."""

from lightning_gputime._phases import DATA, EXCLUDED, FOLLOWED_BY


class NamedPhases:
    """Stack of open named phases, and the label of the time outside of them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Open phases, outermost first. `EXCLUDED` is a pause, which overrides all others."""
        self._n_outer = 0  # Number of open phases that started before the current step.
        self._base = DATA  # Label outside of the phases, which applies when the outermost ends.

    @property
    def label(self) -> str:
        """Label that the time is attributed to: the innermost phase, unless a pause is open."""
        if EXCLUDED in self.names:
            return EXCLUDED
        return self.names[-1] if self.names else self._base

    def enter(self, name: str, label: str) -> None:
        """Start a phase. `label` is the current label, used only for the outermost phase."""
        if not self.names:
            self._base = label
        self.names.append(name)

    def leave(self, name: str) -> bool:
        """End a phase if it is open. Return True if it was the innermost phase."""
        if name not in self.names:
            return False
        is_innermost = name == self.names[-1]
        # Phases may end out of order if a generator is suspended inside its phase.
        newest = max(i for i, open_name in enumerate(self.names) if open_name == name)
        del self.names[newest]
        self._n_outer = min(self._n_outer, len(self.names))
        if is_innermost and not self.names:
            # After a phase named "forward", the time is labeled as after the model's own forward.
            self._base = FOLLOWED_BY.get(name, self._base)
        return is_innermost

    def follow_with(self, label: str) -> None:
        """Use `label` when the outermost phase ends. In a pause, do nothing."""
        if EXCLUDED not in self.names:
            self._base = label

    def start_step(self, label: str) -> str:
        """Start a step. Return its first label: a phase that is still open, or else `label`."""
        self._base, self._n_outer = label, len(self.names)
        return self.label

    def end_fetch(self) -> None:
        """End phases that started in this step: a loader may have yielded a batch inside them."""
        del self.names[self._n_outer :]
