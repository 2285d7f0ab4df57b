"""The time in which a timer is not attached."""

from lightning_gputime._boundaries.named import NamedPhase, Paused


class Detached:
    """What a timer holds while it is not attached: it does nothing of what a loop tells it.

    Args:
        was_attached: Whether it was, so that a loop may still run that does not know of the end.
    """

    def __init__(self, was_attached: bool) -> None:
        self.was_attached = was_attached

    thread = -1
    is_attached = False
    has_updated = False
    ran_update = False
    sees_updates = False

    def loads(self, loader: object, in_data: bool) -> None: ...

    def loader_is_asked(self) -> None: ...

    def begin(self, number: int) -> None:
        """Does nothing, as all of these."""

    def fetch_begins(self) -> None: ...

    def part_begins(self, label: str) -> None: ...

    def part_began(self, label: str) -> None: ...

    def batch_begins(self) -> None: ...

    def takes(self, batch: object) -> None: ...

    def worked(self) -> None: ...

    def update_begins(self) -> None: ...

    def is_left(self, number: int) -> bool:
        """Tells that no step ended."""
        return False

    def batch_ends(self) -> None: ...

    def end_step(self, number: int) -> bool:
        """Tells that no step is timed."""
        return False

    def pause(self) -> None: ...

    def evaluation_begins(self) -> None: ...

    def resume(self) -> None: ...

    def publish(self) -> None: ...

    def compare_ranks(self) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...

    def lose(self) -> None: ...

    def flush(self) -> None: ...

    def drain(self) -> None: ...

    def phase(self, name: str) -> NamedPhase:
        """Returns a context manager that does nothing."""
        return NamedPhase(name, [])

    def paused(self) -> Paused:
        """Returns a context manager that does nothing."""
        return Paused([])


NEVER_ATTACHED, REMOVED = Detached(False), Detached(True)
