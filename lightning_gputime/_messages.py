"""What the timer says to its user, under the package's name."""

import logging

_MAX_SHOWN = 60
"""A message shows this many characters of what was given."""

HOMES = (
    "GPUPhaseTimer is for the Trainer of Lightning, lightning_gputime.huggingface.PhaseTimeCallback"
    " for that of transformers, lightning_gputime.fabric.PhaseTimeCallback for Fabric, and"
    " GPUPhaseHooks for a loop of your own."
)
"""Which timer is whose."""

messages = logging.getLogger("lightning_gputime")


def _name_the_package(record: logging.LogRecord) -> bool:
    # Where logging is not configured, Python prints the message alone.
    if not messages.hasHandlers():
        record.msg = f"{messages.name}: {record.msg}"
    return True


messages.addFilter(_name_the_package)


def format_value(one: object) -> str:
    """Return what was given, or its type where it is long."""
    text = repr(one)
    return text if len(text) <= _MAX_SHOWN else f"a {type(one).__name__}"


class WarnOnce:
    """Log each warning once: a training loop must not fill the log."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, message: str, *args: object) -> None:
        """Log a warning unless one with this `message` was logged before."""
        if message not in self._told:
            self._told.add(message)
            messages.warning(message, *args)
