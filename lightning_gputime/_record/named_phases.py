"""Open phases that the user named."""

from lightning_gputime._phases import DATA, EXCLUDED, FOLLOWED_BY


class NamedPhases:
    """Stack of open named phases, and the label that follows the outermost phase."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Open phases, outermost first. `EXCLUDED` is a pause, which overrides all others."""
        self._n_outer = 0  # Number of phases that started before the open step.
        self._base = DATA  # Label outside of the phases.

    @property
    def label(self) -> str:
        """Label that the time is attributed to."""
        if EXCLUDED in self.names:
            return EXCLUDED
        return self.names[-1] if self.names else self._base

    def enter(self, name: str, label: str) -> None:
        """Start a phase inside `label`."""
        if not self.names:
            self._base = label
        self.names.append(name)

    def leave(self, name: str) -> bool:
        """End a phase. Return True if it was the innermost."""
        if name not in self.names:
            return False
        is_inner = name == self.names[-1]
        # Phases may end out of order if a generator is suspended inside its phase.
        newest = max(i for i, open_name in enumerate(self.names) if open_name == name)
        del self.names[newest]
        self._n_outer = min(self._n_outer, len(self.names))
        if is_inner and not self.names:
            self._base = FOLLOWED_BY.get(name, self._base)
        return is_inner

    def follow_with(self, label: str) -> None:
        """Let `label` follow the outermost phase, except in a pause."""
        if EXCLUDED not in self.names:
            self._base = label

    def start_step(self, label: str) -> str:
        """Start a step. Return its first label: a phase that is still open, or else `label`."""
        self._base, self._n_outer = label, len(self.names)
        return self.label

    def end_fetch(self) -> None:
        """End phases that started during the fetch: a loader may yield a batch inside a phase."""
        del self.names[self._n_outer :]
