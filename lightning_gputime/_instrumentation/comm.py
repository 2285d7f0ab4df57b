"""`comm`: the waits of the timed stream for other ranks, as marks."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_gputime._compat.torch_ import (
    BLOCKING,
    TENSOR_WAITS,
    WORK_WAITS,
    async_tensor,
    is_asynchronous,
    is_complete,
    launches,
    waits_for_stage,
    waits_in_torch,
)
from lightning_gputime._instrumentation.patching import Attachments, Calls, Subscription
from lightning_gputime._phases import RECEIVES, WAITS
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.waits import begin_wait, end_wait, is_here


class WaitBoundary:
    """`<phase>/comm`: the timed stream waits for other ranks, or runs their collective.

    A collective that is waited for at once runs on the caller's stream: it is the wait itself.
    Others run on streams of their own: there the wait is where the timed stream is told of them.
    What is launched or waited for on another stream is none.
    """

    def __init__(self, recorder: Recorder, attachments: Attachments) -> None:
        self._recorder = recorder
        self._streams: Any = getattr(recorder.clock, "streams", None)
        self._timed: set[int] = set()
        # The streams beside it that ran collectives.
        self._beside: set[int] = set()
        # Whether the wait of a collective is still to come.
        self._is_launched = False
        self.note_stream()
        for owner, names, listener in self._places():
            for name in names:
                if name in vars(owner):
                    attachments.add(Subscription(owner, name, listener))

    def _places(self) -> Iterator[tuple[Any, tuple[str, ...], Calls]]:
        # Not at the top: torch can be built without it.
        from torch.distributed import ProcessGroup, Work

        waits = Calls(self._wait_begins, self._wait_ends)
        # All that is called in Python passes them; a patch of `torch.distributed.all_reduce` itself
        # would break compiled code, which knows that function, and miss those who imported it by
        # name.
        yield ProcessGroup, launches(ProcessGroup), Calls(self._launch_begins, self._launch_ends)
        yield ProcessGroup, BLOCKING, waits
        for kind in (Work, *Work.__subclasses__()):
            yield kind, WORK_WAITS, waits
        if (tensor := async_tensor()) is not None:
            used = Calls(self._tensor_wait_begins, self._wait_ends)
            yield tensor, TENSOR_WAITS, used
        if self._streams is not None and self._streams.kind is not None:
            told = Calls(self._stream_wait_begins, self._wait_ends)
            yield self._streams.kind, ("wait_event", "wait_stream"), told

    def step_ended(self) -> None:
        self._timed.clear()
        self.note_stream()

    def note_stream(self) -> None:
        """Take the current stream for timed. Call where a phase begins."""
        if self._streams is not None:
            self._timed.add(self._streams.current())

    # What the patched functions notify of

    def _launch_begins(self, group: Any, *args: Any, **kwargs: Any) -> bool:
        if is_asynchronous(args, kwargs):
            self._is_beside()
            return False
        return self._begin()

    def _launch_ends(self, result: Any = None) -> None:
        if result is None:
            end_wait(self._recorder)
        else:
            # The wait lasts until the collective is waited for.
            self._is_launched = True

    def _wait_begins(self, *_: Any, **__: Any) -> bool:
        return self._begin(RECEIVES if waits_for_stage() else WAITS)

    def _wait_ends(self, result: Any = None) -> None:
        end_wait(self._recorder)

    def _tensor_wait_begins(self, tensor: Any, *_: Any, **__: Any) -> bool:
        # The first use of what a collective computes waits.
        return not is_complete(tensor) and self._begin()

    def _stream_wait_begins(self, stream: Any, awaited: Any = None, *_: Any, **__: Any) -> bool:
        streams = self._streams
        if stream.stream_id not in self._timed or stream.stream_id != streams.current():
            return False
        # Of a loop's own streams it may be one for copies; an event does not tell of which it is.
        is_of_ranks = waits_in_torch() or (
            isinstance(awaited, streams.kind) and awaited.stream_id in self._beside
        )
        return is_of_ranks and self._begin()

    def _begin(self, label: str = WAITS) -> bool:
        """Mark the start of a wait, if it is one of the timed stream. Return whether it is."""
        if self._is_beside():
            return False
        is_launched, self._is_launched = self._is_launched, False
        if is_launched and self._recorder.open.is_waiting:
            return True
        return begin_wait(self._recorder, label)

    def _is_beside(self) -> bool:
        """Note a stream that runs a collective beside. Return whether it, or the thread, is."""
        # Others may write a checkpoint in the background: on a stream that has the same identity.
        if not is_here(self._recorder):
            return True
        if self._streams is None:
            return False
        current = self._streams.current()
        if current in self._timed:
            return False
        self._beside.add(current)
        return True


def is_distributed() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def is_sharded(module: nn.Module) -> bool:
    # By name: FSDP takes its time to import.
    names = {kind.__name__ for kind in type(module).__mro__}
    return not names.isdisjoint(("FSDPModule", "FullyShardedDataParallel"))


def is_cut(parameters: Iterable[nn.Parameter], model: nn.Module) -> bool:
    """Return whether any parameter is cut over ranks that work on the same batch."""
    # FSDP cuts one dimension of the ranks itself, and these have batches of their own.
    dimensions = int(any(map(is_sharded, nn.Module.modules(model))))
    return any(
        sum(one.is_shard() for one in getattr(parameter, "placements", ())) > dimensions
        for parameter in parameters
    )
