"""The streams of a device: which one is timed, and which one is told to wait."""

from typing import Any

import torch

from lightning_gputime._untraced import untraced


@untraced
class Streams:
    """The streams of an accelerator.

    Args:
        device: The accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self.kind: Any = getattr(torch.get_device_module(device), "Stream", None)
        """The class of streams: its `wait_event` and `wait_stream` let a stream wait for others."""

    def current(self) -> int:
        """Returns the identity of the calling thread's current stream."""
        return torch.accelerator.current_stream(self._index).stream_id

    def identity(self, stream: Any) -> int:
        """Returns the identity of a stream."""
        identity: int = stream.stream_id
        return identity
