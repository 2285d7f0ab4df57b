"""The runs of the autograd engine, and the waits for other ranks at their ends, as marks."""

from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gputime._compat.torch_ import (
    CAN_QUEUE,
    backward_entry,
    is_autograd_compiled,
    queue_after_backward,
    runs_for_pipeline,
    syncs_buffers,
    syncs_gradients,
)
from lightning_gputime._instrumentation.comm import is_sharded
from lightning_gputime._instrumentation.forward import ForwardBoundary
from lightning_gputime._instrumentation.loop import Loop, is_engine
from lightning_gputime._instrumentation.module_hooks import hook_before
from lightning_gputime._instrumentation.optimizer import OptimizerBoundary
from lightning_gputime._instrumentation.patching import Attachments, Subscription
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
from lightning_gputime._record.waits import begin_wait, end_wait


class BackwardBoundary:
    """`backward`: the calls of `torch.autograd.backward` and `torch.autograd.grad`.

    Both run the engine by one function, which they look up at each call, so this one place sees
    `loss.backward()`, `scaler.scale(loss).backward()`, `fabric.backward(loss)`, direct calls, and
    those of a `backward` that was imported by name.

    With several ranks also `backward/comm`: from the end of this rank's own work to the end of
    backward; and `forward/comm` (`other/comm` in Lightning), the broadcast of buffers at the begin
    of DDP. The engine calls what was queued in a backward when its work is done, in the order in
    which it was queued. DDP queues its last wait there, from a hook on a parameter; this queues its
    mark from the first hook of all, on the loss. FSDP queues work of its own there, too, and its
    waits are calls, see `WaitBoundary`.
    """

    def __init__(
        self,
        recorder: Recorder,
        attachments: Attachments,
        loop: Loop,
        model: ForwardBoundary,
        optimizer: OptimizerBoundary,
        *,
        shared: bool,
    ) -> None:
        self._recorder = recorder
        self._batch, called = loop.batch, loop.called
        self._model = model
        self._optimizer = optimizer
        self._returns_to: str | None = None
        self._patch = attachments.add(Subscription(*backward_entry(), self)).patch
        if is_engine(called):
            # After the backward of torch's it reduces the gradients.
            attachments.add(Subscription(called, "backward", self))
        inside = [*nn.Module.modules(called)] if shared else []
        self._marks_comm = shared and CAN_QUEUE and not any(map(is_sharded, inside))
        self._synced = [module for module in inside if isinstance(module, DistributedDataParallel)]
        self._is_sync_called = False
        # Hooks on the tensors of one backward.
        self._handles: list[Any] = []
        for module in self._synced:
            attachments.add(hook_before(module, self._enter_sync, first=False))
            attachments.add(hook_before(module.module, self._leave_sync))

    def on_call_start(
        self, tensors: Any = None, *_: Any, accumulate_grad: bool = True, **__: Any
    ) -> bool:
        """Mark the start, but not of a backward inside a backward, nor of another timer's."""
        recorder = self._recorder
        # Checkpointing the reentrant way runs a whole backward inside the one that is marked.
        if self._returns_to is not None or get_ident() != recorder.threads.timed:
            if recorder.threads.timed == -1 and not self._model.has_trained:
                self._note_untimed_backward()
            return False
        if not self._batch.is_open:
            return False
        # A pipeline may take the gradients of its inputs first, and those of its weights later.
        if not accumulate_grad and not runs_for_pipeline():
            return self._grad_begins()
        if not self._model.calls and self._is_anothers():
            return False
        if not self._model.has_trained:
            self._model.backward_begins()
        self._returns_to = FORWARD if recorder.label == FORWARD else AFTER_BACKWARD
        # Around the call, in the thread that calls: when it returns, its stream waits for all that
        # the engine has launched, DDP's and FSDP's communication included. A hook on a gradient
        # would end too early, and a `full_backward_pre_hook` begins late and costs 15 us.
        recorder.mark(BACKWARD)
        if self._marks_comm:
            self._hook_losses(tensors)
        return True

    def _note_untimed_backward(self) -> None:
        # A loop in eval mode that follows is an evaluation also before the first timed step.
        is_here = get_ident() == self._recorder.threads.home and self._batch.is_open
        is_own = self._model.calls > 0 or not self._is_anothers()
        if is_here and is_own and self._optimizer.has_any:
            self._model.backward_begins()

    def _grad_begins(self) -> bool:
        """Mark the start of `torch.autograd.grad`; what follows tells what it is."""
        # A model may need it for its output, and compilers for what they compile.
        label = self._recorder.label
        if not self._model.calls or label == FORWARD:
            return False
        # An update may need one, too, such as the product of a Hessian and a vector.
        if self._optimizer.depth and label in (AFTER_BACKWARD, OPTIMIZER):
            return False
        self._returns_to = AFTER_GRAD
        self._recorder.mark(GRAD)
        return True

    def on_call_end(self, result: Any = None) -> None:
        if self._handles:
            self._remove_hooks()
        label, self._returns_to = self._returns_to or AFTER_BACKWARD, None
        # In a closure it belongs to the update. But after a gradient alone the loss may go on.
        is_in_update = self._optimizer.depth > 0 and label != AFTER_GRAD
        self._recorder.mark(OPTIMIZER if is_in_update else label)

    def _is_anothers(self) -> bool:
        # Two timers on two models, such as a GAN's: the one is meant whose model was called.
        others = [one for one in self._patch.listeners if isinstance(one, BackwardBoundary)]
        return any(other._model.calls for other in others)

    def _enter_sync(self, module: DistributedDataParallel, *_: Any) -> None:
        self._is_sync_called = True
        # DDP broadcasts the buffers before it calls what it wraps: ranks wait for rank zero.
        if syncs_buffers(module):
            begin_wait(self._recorder)

    def _leave_sync(self, module: nn.Module, *_: Any) -> None:
        # What DDP wraps is called without it by evaluations.
        if not self._is_sync_called:
            self._model.on_inner_call(module)
        self._is_sync_called = False
        end_wait(self._recorder)

    def _hook_losses(self, tensors: Any) -> None:
        if self._synced and not any(map(syncs_gradients, self._synced)):
            return  # a micro-batch inside `no_sync`
        if is_autograd_compiled():
            return  # It would trace the hook.
        # Not over a generator, which the backward needs itself.
        for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self._handles.append(tensor.register_hook(self._queue))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _queue(self, _: Tensor) -> None:
        # Once a backward: the first of several losses is the one.
        if self._handles:
            self._remove_hooks()
            try:
                queue_after_backward(self._mark_comm)
            except Exception as error:
                self._recorder.warn_once("The waits for other ranks are not timed: %r", error)

    def _mark_comm(self) -> None:
        # Not called where a backward raises: its end is marked in any case.
        self._recorder.mark_in_backward(f"{BACKWARD}/{COMM}")
