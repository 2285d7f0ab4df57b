"""`comm`: marks where the timed stream waits for other ranks."""

from typing import Any

import torch
from torch import nn

from lightning_gputime._compat.torch_ import (
    BLOCKING,
    TENSOR_WAITS,
    WORK_WAITS,
    async_tensor,
    compiled_call,
    compiled_module,
    is_asynchronous,
    is_complete,
    launches,
    waits_for_stage,
    waits_in_torch,
)
from lightning_gputime._instrumentation.patching import Attachments, Calls, Subscription
from lightning_gputime._phases import RECEIVES, WAITS
from lightning_gputime._record.recorder import Recorder


class WaitBoundary:
    """`<phase>/comm`: the timed stream waits for other ranks, or runs their collective.

    A synchronous collective runs on the caller's stream, so all of it counts as a wait. An
    asynchronous collective runs on another stream, so only the time for which the timed stream
    waits for that stream counts. Collectives and waits on other streams do not delay the timed
    stream, and are ignored.
    """

    def __init__(self, recorder: Recorder, attachments: Attachments) -> None:
        self._recorder = recorder
        self._streams: Any = getattr(recorder.clock, "streams", None)
        self._timed: set[int] = set()  # Ids of the streams on which phases of this step began.
        # Ids of other streams with collectives or waits.
        self._communication_streams: set[int] = set()
        # True between a synchronous launch and the wait for its result, which follows immediately.
        self._is_launched = False
        self.note_stream()
        # Import here, because torch may be built without `torch.distributed`.
        from torch.distributed import ProcessGroup, Work

        waits = Calls(self._wait_begins, self._wait_ends)
        # All collectives that Python calls go through `ProcessGroup`. A patch of
        # `torch.distributed.all_reduce` would break compiled code, and miss imports by name.
        launched = Calls(self._launch_begins, self._launch_ends)
        patched: list[tuple[Any, tuple[str, ...], Calls]] = [
            (ProcessGroup, launches(ProcessGroup), launched),
            (ProcessGroup, BLOCKING, waits),
            *((kind, WORK_WAITS, waits) for kind in (Work, *Work.__subclasses__())),
        ]
        if (tensor := async_tensor()) is not None:
            first_uses = Calls(self._tensor_wait_begins, self._wait_ends)
            patched.append((tensor, TENSOR_WAITS, first_uses))
        if self._streams is not None and self._streams.kind is not None:
            stream_waits = Calls(self._stream_wait_begins, self._wait_ends)
            patched.append((self._streams.kind, ("wait_event", "wait_stream"), stream_waits))
        for owner, names, listener in patched:
            for name in names:
                if name in vars(owner):
                    attachments.add(Subscription(owner, name, listener))

    def step_ended(self) -> None:
        self._timed.clear()
        self.note_stream()

    def note_stream(self, *_: object) -> None:
        """Add the current stream to the timed streams. Call where a phase begins."""
        if self._streams is not None:
            self._timed.add(self._streams.current())

    # Listeners of the patched functions

    def _launch_begins(self, group: Any, *args: Any, **kwargs: Any) -> bool:
        if is_asynchronous(args, kwargs):
            self._note_communication()
            return False
        return self._begin()

    def _launch_ends(self, result: Any = None) -> None:
        if result is None:  # The call has raised, or returned nothing to wait for.
            self._recorder.end_wait()
        else:
            # A synchronous function now calls `result.wait()`, whose return ends the wait.
            self._is_launched = True

    def _wait_begins(self, *_: Any, **__: Any) -> bool:
        return self._begin(RECEIVES if waits_for_stage() else WAITS)

    def _wait_ends(self, result: Any = None) -> None:
        self._recorder.end_wait()

    def _tensor_wait_begins(self, tensor: Any, *_: Any, **__: Any) -> bool:
        # The first use of the result of an asynchronous collective waits for it.
        return not is_complete(tensor) and self._begin()

    def _stream_wait_begins(self, stream: Any, awaited: Any = None, *_: Any, **__: Any) -> bool:
        streams = self._streams
        if stream.stream_id not in self._timed or stream.stream_id != streams.current():
            return False
        # In user code, the awaited stream may be a copy stream, so count the wait only if that
        # stream has launched or awaited collectives. An event does not show its stream, so user
        # code that waits for an event does not count.
        is_communication = waits_in_torch() or (
            isinstance(awaited, streams.kind) and awaited.stream_id in self._communication_streams
        )
        return is_communication and self._begin()

    def _begin(self, label: str = WAITS) -> bool:
        if not self._note_communication():
            return False
        is_launched, self._is_launched = self._is_launched, False
        if is_launched and self._recorder.open.is_waiting:
            return True  # The launch has marked the start of this wait.
        return self._recorder.begin_wait(label)

    def _note_communication(self) -> bool:
        """Return True if the current collective or wait is in the timed thread and stream.

        If it is on another stream of the timed thread, remember that stream: a wait for it
        is communication.
        """
        # Check the thread first: a background thread, such as a checkpoint writer, may use the same
        # stream.
        if not self._recorder.is_here():
            return False
        if self._streams is None:
            return True
        current = self._streams.current()
        if current in self._timed:
            return True
        self._communication_streams.add(current)
        return False


def is_distributed() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def is_sharded(module: nn.Module) -> bool:
    # By FSDP. Compare names, because importing it is slow.
    names = {kind.__name__ for kind in type(module).__mro__}
    return not names.isdisjoint(("FSDPModule", "FullyShardedDataParallel"))


def hides_collectives(model: nn.Module) -> bool:
    """Return whether compiled code of a model runs collectives, which cannot be timed there.

    This finds SyncBatchNorm and tensor parallelism. FSDP runs its collectives outside.
    """
    compiled = [
        module if compiled_call(module) is not None else compiled_module(module)
        for module in (model, *nn.Module.modules(model))
    ]
    inside = [
        inner for module in compiled if module is not None for inner in nn.Module.modules(module)
    ]
    if any(isinstance(module, nn.SyncBatchNorm) for module in inside):
        return True
    # FSDP shards over one mesh dimension, whose ranks work on different batches: do not count it.
    # Tensor parallelism shards a parameter over ranks that work on the same batch.
    n_fsdp_dimensions = int(any(map(is_sharded, nn.Module.modules(model))))
    return any(
        sum(place.is_shard() for place in getattr(parameter, "placements", ())) > n_fsdp_dimensions
        for module in inside
        for parameter in nn.Module.parameters(module, recurse=False)
    )
