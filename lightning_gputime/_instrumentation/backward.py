"""`backward`: marks at the runs of the autograd engine, and at the waits of DDP."""

from functools import partial
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gputime._compat.torch_ import (
    CAN_QUEUE,
    backward_entry,
    creates_graph,
    is_autograd_compiled,
    queue_after_backward,
    runs_for_pipeline,
    syncs_buffers,
    syncs_gradients,
)
from lightning_gputime._instrumentation.comm import is_sharded
from lightning_gputime._instrumentation.forward import ForwardBoundary
from lightning_gputime._instrumentation.loop import Loop, is_engine
from lightning_gputime._instrumentation.optimizer import OptimizerBoundary
from lightning_gputime._instrumentation.patching import Attachments, Subscription
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
        # Reentrant checkpointing runs an inner backward inside the marked backward.
        is_inner = self._label_after is not None
        if is_inner or get_ident() != recorder.threads.timed:
            is_step_untimed = recorder.threads.timed == -1
            if is_step_untimed and not self._forward.has_trained:
                # This backward shows that the loop trains. So from now on, model calls in eval mode
                # without gradients may be an evaluation.
                is_in_loop = get_ident() == recorder.threads.home and self._batch.is_open
                is_of_model = self._forward.calls > 0 or not self._was_other_model_called()
                if is_in_loop and is_of_model and self._optimizer.has_any:
                    self._forward.backward_begins()
            return False
        if not self._batch.is_open:
            return False
        label = recorder.label
        # `torch.autograd.grad` does not accumulate gradients. It is a backward only in a pipeline
        # stage, which calls it for the gradients of its inputs, and later for those of its weights.
        if not accumulate_grad and not runs_for_pipeline():
            # Ignore a gradient inside a model call, which the model needs for its output, and a
            # gradient without a model call, such as a compiler's.
            if not self._forward.calls or label == FORWARD:
                return False
            # Ignore a gradient inside an update, for example for a Hessian-vector product.
            if self._optimizer.depth and label in (AFTER_BACKWARD, OPTIMIZER):
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

    def on_call_end(self, result: Any = None) -> None:
        if self._handles:
            self._remove_hooks()
        label = self._label_after or AFTER_BACKWARD
        self._label_after = None
        # After a backward in the closure of an update, the update continues.
        is_in_update = self._optimizer.depth > 0 and label == AFTER_BACKWARD
        self._recorder.mark(OPTIMIZER if is_in_update else label)
        if self._examiner is not None and self._examiner.is_on:
            self._examiner.backward_ends()

    def _was_other_model_called(self) -> bool:
        # True if another timer's model was called. Only valid if ours was not called.
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
            self._forward.on_inner_call(module)
        self._was_ddp_called = False
        self._recorder.end_wait()

    def _hook_loss_tensors(self, tensors: Any) -> None:
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
        # Queue once per backward, at the first loss.
        if self._handles:
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
