"""The waits of the timed stream for other ranks, as marks."""

import sys
from collections.abc import Iterator
from typing import Any

import torch

from lightning_gputime._boundaries.callers import caller, stage_that_runs
from lightning_gputime._boundaries.patching import Attachments, Subscription, patch_function
from lightning_gputime._boundaries.register import BLOCKS, LAUNCHES, WORK_WAITS
from lightning_gputime._phases import RECEIVES, WAITS
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._untraced import untraced

# In a step; each takes two marks.
_MOST = 10_000

_TOO_MANY = "A step waits more than %d times for other ranks: the rest of it counts as work."

_DISTRIBUTED = "torch.distributed"
_PIPELINING = "torch.distributed.pipelining"
# Between the stand-in and whoever wants the collective, or the wait.
_BETWEEN = (
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
    "torch.cuda.streams",
)


@untraced
class WaitBoundary:
    """`<phase>/comm`: the timed stream waits for other ranks, or runs their collective.

    A collective that is waited for at once runs on the caller's stream: it is the wait itself.
    Others run on streams of their own: there the wait is where the timed stream is told of them.
    What is launched or waited for on another stream is none.

    Args:
        recorder: Gets the marks.
    """

    def __init__(self, recorder: Recorder, attachments: Attachments) -> None:
        self._recorder = recorder
        self._streams = recorder.streams
        self._timed: set[int] = set()
        # The streams beside it that ran collectives; and whether one of the user's own did, in
        # this step.
        self._beside: set[int] = set()
        self._has_own_beside = False
        self.stage: int | None = None
        """The stage of a pipeline that this rank runs, the first one of several."""
        self._looked_for_stage = False
        # How many waits the open step has.
        self._seen = 0
        self.has_futures = False
        """Whether somebody asked for the future of a collective in this step."""
        self._turn = 0
        # Whether the wait of a collective is still to come.
        self._is_launched = False
        self._subscriptions: list[Subscription] = []
        self.step_ended()
        for owner, names, listener in self._places():
            for name in names:
                if name in vars(owner):
                    one = attachments.add(patch_function(owner, name, listener))
                    self._subscriptions.append(one)

    def _places(self) -> Iterator[tuple[Any, tuple[str, ...], object]]:
        # Not at the top: torch can be built without it.
        from torch.distributed import ProcessGroup, Work

        waits = _Waits(self)
        # All that is called in Python passes them; a patch of `torch.distributed.all_reduce` itself
        # would break compiled code, which knows that function, and miss those who imported it by
        # name.
        yield ProcessGroup, LAUNCHES, _Launches(self)
        yield ProcessGroup, BLOCKS, waits
        for kind in (Work, *Work.__subclasses__()):
            yield kind, WORK_WAITS, waits
            yield kind, ("get_future",), _Futures(self)
        yield torch._C.Future, ("wait",), _FutureWaits(self)
        # Not the function that it calls: compiled code guards that one.
        if functional := sys.modules.get("torch.distributed._functional_collectives"):
            # DTensors call the second one where they must not be asynchronous.
            tensor = functional.AsyncCollectiveTensor
            yield tensor, ("trigger_wait", "wait"), _TensorWaits(self)
        if self._streams is not None and self._streams.kind is not None:
            kind = self._streams.kind
            yield kind, ("wait_event", "wait_stream"), _StreamWaits(self, kind.__module__)

    def step_ended(self) -> None:
        """Must be called at the end of each step."""
        self._timed.clear()
        self._has_own_beside = self.has_futures = False
        self._seen = 0
        self.note_stream()
        if self._subscriptions:
            # One at a time: who patches a class may put back what was there before us.
            self._turn = (self._turn + 1) % len(self._subscriptions)
            self._subscriptions[self._turn].reapply()

    def note_stream(self) -> None:
        """Takes the current stream for timed: must be called where a phase begins."""
        if self._streams is not None:
            self._timed.add(self._streams.current())

    def look_for_stage(self) -> None:
        """Must be told of a wait of a pipeline, in the thread that runs its schedule."""
        if not self._looked_for_stage:
            self._looked_for_stage = True
            self.stage = stage_that_runs()

    def begins(self, label: str = WAITS) -> bool:
        """Marks the begin of a wait, if it is one of the timed stream. Tells if it did."""
        if self.is_beside():
            return False
        is_launched, self._is_launched = self._is_launched, False
        if is_launched and self._recorder.is_waiting:
            return True
        if self._seen == _MOST:
            self._recorder.tell_once(_TOO_MANY, _MOST)
            return False
        begins = self._recorder.wait_begins(label)
        self._seen += begins
        return begins

    def ends(self) -> None:
        """Marks its end."""
        self._recorder.wait_ends()

    def is_launched(self) -> None:
        """Says that the wait that has begun lasts until the collective is waited for."""
        self._is_launched = True

    def is_beside(self) -> bool:
        """Tells whether this thread is not timed, or its stream, which runs a collective: noted."""
        # Others may write a checkpoint in the background: on a stream that has the same identity.
        if not self._recorder.is_here():
            return True
        if self._streams is None:
            return False
        current = self._streams.current()
        if current in self._timed:
            return False
        self._beside.add(current)
        self._has_own_beside |= not caller(*_BETWEEN).startswith(_DISTRIBUTED)
        return True

    def waits_for_others(self, stream: Any, awaited: Any) -> bool:
        """Tells whether a stream that is told to wait is the timed one, and waits for ranks."""
        streams = self._streams
        if streams is None:
            return False
        identity = streams.identity(stream)
        if identity not in self._timed or identity != streams.current():
            return False
        if caller(*_BETWEEN).startswith(_DISTRIBUTED):
            return True
        # Else it may wait for a copy, as loaders that fetch ahead do.
        if isinstance(awaited, streams.kind):
            return streams.identity(awaited) in self._beside
        return self._has_own_beside


@untraced
class _Launches:
    """Is told of collectives."""

    def __init__(self, boundary: WaitBoundary) -> None:
        self._boundary = boundary

    def call_begins(self, group: Any, *args: Any, **kwargs: Any) -> bool:
        options = args[-1] if args else kwargs.get("opts")
        if getattr(options, "asyncOp", True):
            # It runs on another stream. So do all before torch 2.8.
            self._boundary.is_beside()
            return False
        return self._boundary.begins()

    def call_ends(self, result: Any = None) -> None:
        if result is None:
            self._boundary.ends()
        else:
            self._boundary.is_launched()


@untraced
class _Waits:
    """Is told of waits for a collective."""

    def __init__(self, boundary: WaitBoundary) -> None:
        self._boundary = boundary

    def call_begins(self, *_: Any, **__: Any) -> bool:
        # Most loops have none, and need not look who waits.
        if _PIPELINING not in sys.modules or not caller(*_BETWEEN).startswith(_PIPELINING):
            return self._boundary.begins()
        self._boundary.look_for_stage()
        return self._boundary.begins(RECEIVES)

    def call_ends(self, result: Any = None) -> None:
        self._boundary.ends()


@untraced
class _Futures:
    """Is told who asks for the future of a collective."""

    def __init__(self, boundary: WaitBoundary) -> None:
        self._boundary = boundary

    def call_begins(self, *_: Any, **__: Any) -> bool:
        self._boundary.has_futures = True
        return False

    def call_ends(self, result: Any = None) -> None:
        """Is never told."""


@untraced
class _FutureWaits(_Waits):
    """Is told of waits for futures. Those of other things than collectives are none."""

    def call_begins(self, *_: Any, **__: Any) -> bool:
        return self._boundary.has_futures and super().call_begins()


@untraced
class _TensorWaits(_Waits):
    """Is told of uses of tensors that a collective computes; the first one waits."""

    def call_begins(self, tensor: Any, *_: Any, **__: Any) -> bool:
        return not tensor.completed and self._boundary.begins()


@untraced
class _StreamWaits(_Waits):
    """Is told of streams that are told to wait."""

    def __init__(self, boundary: WaitBoundary, module: str) -> None:
        super().__init__(boundary)
        self._module = module

    def call_begins(self, stream: Any, awaited: Any = None, *_: Any, **__: Any) -> bool:
        # `wait_stream` calls `wait_event`, and was told of which stream it waits for.
        if sys._getframe(3).f_globals.get("__name__") == self._module:
            return False
        return self._boundary.waits_for_others(stream, awaited) and self._boundary.begins()
