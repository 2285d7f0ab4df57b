"""`backward` and `comm`: marks at runs of the autograd engine, and at waits for other ranks."""

from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gputime._compat.torch_ import (
    BLOCKING,
    CAN_QUEUE,
    TENSOR_WAITS,
    WORK_WAITS,
    async_tensor,
    backward_entry,
    compiled_call,
    compiled_module,
    creates_graph,
    is_asynchronous,
    is_autograd_compiled,
    is_called_by_distributed,
    is_complete,
    launches,
    queue_after_backward,
    runs_for_pipeline,
    syncs_buffers,
    syncs_gradients,
    waits_for_pipeline_stage,
)
from lightning_gputime._instrumentation.forward import ForwardBoundary
from lightning_gputime._instrumentation.loop import Loop, is_engine, is_sharded
from lightning_gputime._instrumentation.optimizer import OptimizerBoundary
from lightning_gputime._instrumentation.patching import Attachments, Calls, Subscription
from lightning_gputime._instrumentation.traced import hook_before
from lightning_gputime._ledger.examiner import Examiner
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_GRAD,
    BACKWARD,
    COMM,
    FORWARD,
    GRAD,
    OPTIMIZER,
    RECEIVES,
    WAITS,
)
from lightning_gputime._record.recorder import Recorder


class BackwardBoundary:
    """`backward`: the calls of `torch.autograd.backward` and `torch.autograd.grad`.

    Both call the same function to run the engine, so a patch of that function sees all calls:
    `loss.backward()`, `scaler.scale(loss).backward()`, `fabric.backward(loss)`, direct calls, and
    calls of a `backward` that was imported by name.

    With several ranks, DDP adds two waits:

    - `forward/comm` (`other/comm` in Lightning): DDP broadcasts buffers before the model call.
    - `backward/comm`: from the end of this rank's computation to the end of backward. At the end of
      a backward, the engine runs queued callbacks in order. DDP queues its last wait in a hook on a
      parameter. Our hook on the loss runs earlier, so it queues its mark before that wait.

    FSDP does not need the second mark, because `WaitBoundary` marks the calls in which it waits.
    """

    def __init__(
        self,
        recorder: Recorder,
        attachments: Attachments,
        loop: Loop,
        forward: ForwardBoundary,
        optimizer: OptimizerBoundary,
        examiner: Examiner | None,
        *,
        shared: bool,
    ) -> None:
        self._recorder, self._examiner = recorder, examiner
        self._batch, called = loop.batch, loop.called
        self._forward, self._optimizer = forward, optimizer
        # Label that follows the running backward or `grad`; None while neither runs.
        self._label_after: str | None = None
        self._patch = attachments.add(Subscription(*backward_entry(), self)).patch
        if is_engine(called):
            # The engine of DeepSpeed reduces gradients after torch's backward.
            attachments.add(Subscription(called, "backward", self))
        inside = [*nn.Module.modules(called)] if shared else []
        self._marks_comm = shared and CAN_QUEUE and not any(map(is_sharded, inside))
        self._ddp_modules = [
            module for module in inside if isinstance(module, DistributedDataParallel)
        ]
        self._was_ddp_called = False  # True from a call of DDP until it calls the module inside.
        self._handles: list[Any] = []  # Hooks on the losses of the running backward.
        for module in self._ddp_modules:
            attachments.add(hook_before(module, self._enter_ddp, first=False))
            attachments.add(hook_before(module.module, self._enter_inside_ddp))

    def on_call_start(
        self, tensors: Any = None, *args: Any, accumulate_grad: bool = True, **kwargs: Any
    ) -> bool:
        """Mark the start. Return False for a backward inside a backward or of another timer."""
        recorder = self._recorder
        if self._label_after is not None:
            return False  # Reentrant checkpointing runs a backward inside the marked backward.
        if get_ident() != recorder.threads.timed:
            if not self._forward.has_trained:
                self._note_untimed_backward()
            return False
        if not self._batch.is_open:
            return False  # A callback of the trainer runs this backward.
        label = recorder.label
        # `torch.autograd.grad` does not accumulate gradients. It is a backward only in a pipeline
        # stage, which calls it for the gradients of its inputs, and later for those of its weights.
        if not accumulate_grad and not runs_for_pipeline():
            if self._is_inner_grad(label):
                return False
            self._label_after = AFTER_GRAD
            recorder.mark(GRAD)  # Its phase depends on the next label.
        else:
            if not self._forward.calls and self._was_other_model_called():
                return False  # The backward of another timer's model.
            if not self._forward.has_trained:
                self._forward.backward_begins()
            # After a backward inside a model call, that call continues.
            self._label_after = FORWARD if label == FORWARD else AFTER_BACKWARD
            # Mark around the call, in the calling thread. When the call returns, the caller's
            # stream waits for all work of the engine, including communication of DDP and FSDP. A
            # gradient hook would run before that. A `full_backward_pre_hook` runs too late, and
            # costs 15 us.
            recorder.mark(BACKWARD)
            if self._marks_comm:
                self._hook_loss_tensors(tensors)
        if self._examiner is not None and self._examiner.is_on:
            self._examiner.backward_begins(tensors, creates_graph=creates_graph(args, kwargs))
        return True

    def _note_untimed_backward(self) -> None:
        """Note that the loop trains, if this backward is in an untimed step of the loop."""
        threads = self._recorder.threads
        is_in_untimed_step = threads.timed == -1 and get_ident() == threads.home
        if not (is_in_untimed_step and self._batch.is_open and self._optimizer.has_any):
            return
        is_of_model = self._forward.calls > 0 or not self._was_other_model_called()
        if is_of_model:
            # From now on, model calls in eval mode without gradients may be an evaluation.
            self._forward.backward_begins()

    def _is_inner_grad(self, label: str | None) -> bool:
        """Return True if a call of `torch.autograd.grad` is part of the phase that is running."""
        if label == FORWARD:
            return True  # The model needs it for its output.
        if not self._forward.calls:
            return True  # No model was called: a compiler traces, for example.
        # An update needs it, for example for a Hessian-vector product.
        return bool(self._optimizer.running) and label in (AFTER_BACKWARD, OPTIMIZER)

    def on_call_end(self, result: Any = None) -> None:
        if self._handles:
            self._remove_hooks()
        label = self._label_after or AFTER_BACKWARD  # None if Ctrl-C has interrupted the start.
        self._label_after = None
        # After a backward in the closure of an update, the update continues.
        is_in_update = bool(self._optimizer.running) and label == AFTER_BACKWARD
        self._recorder.mark(OPTIMIZER if is_in_update else label)
        if self._examiner is not None and self._examiner.is_on:
            self._examiner.backward_ends()

    def _was_other_model_called(self) -> bool:
        """Return True if another timer's model was called in this step. Ours must not have been."""
        listeners = self._patch.listeners
        boundaries = [other for other in listeners if isinstance(other, BackwardBoundary)]
        return any(other._forward.calls for other in boundaries)

    def _enter_ddp(self, module: DistributedDataParallel, *_: Any) -> None:
        self._was_ddp_called = True
        # DDP broadcasts buffers before it calls the module: ranks wait for rank 0.
        if syncs_buffers(module):
            self._recorder.begin_wait()

    def _enter_inside_ddp(self, module: nn.Module, *_: Any) -> None:
        # A call of the module that bypasses DDP may be an evaluation.
        if not self._was_ddp_called:
            self._forward.on_call_around_ddp(module)
        self._was_ddp_called = False
        self._recorder.end_wait()

    def _hook_loss_tensors(self, tensors: Any) -> None:
        """Hook the losses, to mark the wait at the end of a backward that syncs gradients."""
        if self._ddp_modules and not any(map(syncs_gradients, self._ddp_modules)):
            return  # A micro-batch inside `no_sync`.
        if is_autograd_compiled():
            return  # Compiled autograd would trace the hook.
        # Do not iterate over a generator, because the backward would find it empty.
        for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self._handles.append(tensor.register_hook(self._queue_mark))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _queue_mark(self, _: Tensor) -> None:
        """Let the engine mark the start of the wait at the end of this backward."""
        if not self._handles:
            return  # Another loss of this backward has queued the mark.
        self._remove_hooks()
        try:
            # Not called if the backward raises. Then `on_call_end` alone ends the phase.
            mark = partial(self._recorder.mark_in_backward, f"{BACKWARD}/{COMM}")
            queue_after_backward(mark)
        except Exception as error:
            self._recorder.warn_once(
                "The waits for other ranks are not timed, so in backward they count as"
                " computation: %r",
                error,
            )


class WaitBoundary:
    """`<phase>/comm`: the timed stream waits for other ranks, or runs their collective.

    A synchronous collective runs on the caller's stream, so all of it counts as a wait. An
    asynchronous collective runs on another stream, so only the time for which the timed stream
    waits for that stream counts. Collectives and waits on other streams do not delay the timed
    stream, and are ignored.
    """

    def __init__(
        self, recorder: Recorder, attachments: Attachments, examiner: Examiner | None
    ) -> None:
        self._recorder, self._examiner = recorder, examiner
        self._streams: Any = getattr(recorder.clock, "streams", None)
        self._timed_ids: set[int] = set()  # Ids of the streams on which phases of this step began.
        # Ids of other streams with collectives or waits. A wait for them is communication.
        self._communication_ids: set[int] = set()
        # True between a synchronous launch and the wait for its result, which follows immediately.
        self._awaits_launch = False
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
        """Forget the streams of the step; the next starts on the current stream."""
        self._timed_ids.clear()
        self.note_stream()

    def note_stream(self, *_: object) -> None:
        """Add the current stream to the timed streams. Call where a phase begins."""
        if self._streams is not None:
            self._timed_ids.add(self._streams.current())

    # Listeners of the patched functions

    def _launch_begins(self, group: Any, *args: Any, **kwargs: Any) -> bool:
        if is_asynchronous(args, kwargs):
            # Not a wait, but later waits for its stream are communication.
            if self._recorder.is_here() and not self._is_on_timed_stream():
                self._communication_ids.add(self._streams.current())
            return False
        return self._begin()

    def _launch_ends(self, result: Any = None) -> None:
        if result is None:  # The call has raised, or returned nothing to wait for.
            self._wait_ends()
        else:
            # A synchronous function now calls `result.wait()`, whose return ends the wait.
            self._awaits_launch = True

    def _wait_begins(self, *_: Any, **__: Any) -> bool:
        return self._begin(RECEIVES if waits_for_pipeline_stage() else WAITS)

    def _wait_ends(self, result: Any = None) -> None:
        if self._examiner is not None and self._examiner.is_on and self._recorder.is_here():
            self._examiner.wait_ends()
        self._recorder.end_wait()

    def _tensor_wait_begins(self, tensor: Any, *_: Any, **__: Any) -> bool:
        # The first use of the result of an asynchronous collective waits for it.
        return not is_complete(tensor) and self._begin()

    def _stream_wait_begins(self, stream: Any, awaited: Any = None, *_: Any, **__: Any) -> bool:
        streams = self._streams
        if stream.stream_id not in self._timed_ids or stream.stream_id != streams.current():
            return False
        if is_called_by_distributed():
            return self._begin()
        # In user code, the awaited stream may be a copy stream, so count the wait only if that
        # stream has launched or awaited collectives. An event does not show its stream, so user
        # code that waits for an event does not count.
        is_stream = isinstance(awaited, streams.kind)
        is_communication = is_stream and awaited.stream_id in self._communication_ids
        return is_communication and self._begin()

    def _begin(self, label: str = WAITS) -> bool:
        """Start a wait, if it delays the timed stream. Return True if its end must be marked."""
        # Check the thread first: a background thread, such as a checkpoint writer, may use the same
        # stream.
        if not self._recorder.is_here():
            return False
        if not self._is_on_timed_stream():
            self._communication_ids.add(self._streams.current())
            return False
        awaits_launch, self._awaits_launch = self._awaits_launch, False
        if awaits_launch and self._recorder.open.is_waiting:
            return True  # The launch has marked the start of this wait.
        if not self._recorder.begin_wait(label):
            return False
        if self._examiner is not None and self._examiner.is_on:
            self._examiner.wait_begins()
        return True

    def _is_on_timed_stream(self) -> bool:
        return self._streams is None or self._streams.current() in self._timed_ids


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
