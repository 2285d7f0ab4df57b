"""The waits for other ranks that are no call in Python: those of DDP, as marks."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gputime._boundaries.patching import Attachments, hook_before
from lightning_gputime._phases import BACKWARD, COMM
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._untraced import untraced

_JOINED = (
    "Ranks are not compared: the model was given to torch's Join, in which a rank without batches"
    " may wait for the others' collectives. To compare them, train without Join, on as many batches"
    " on each rank."
)


@untraced
class CommBoundary:
    """`backward/comm`: from the end of this rank's own work in a backward to the end of backward.

    And `forward/comm` (`other/comm` in Lightning), the broadcast of buffers at the begin of DDP.

    The autograd engine calls what was queued in a backward when its work is done, in the order in
    which it was queued. DDP queues its last wait there, from a hook on a parameter; this queues its
    mark from the first hook of all, on the loss. FSDP queues work of its own there, too, and its
    waits are calls, see `WaitBoundary`.

    Args:
        recorder: Gets the marks.
        model: What the loop calls.
    """

    def __init__(self, recorder: Recorder, attachments: Attachments, model: nn.Module) -> None:
        self._recorder = recorder
        self._synced = [
            module for module in model.modules() if isinstance(module, DistributedDataParallel)
        ]
        self._shards = any(map(is_sharded, model.modules()))
        # Hooks on the tensors of one backward.
        self._handles: list[Any] = []
        for module in self._synced:
            attachments.add(hook_before(module, self._enter_sync, first=False))
            attachments.add(hook_before(module.module, self._leave_sync))

    @property
    def has_joined(self) -> bool:
        """Whether `Join` was entered with a model: torch does not say when it is left."""
        configs = (getattr(module, "_join_config", None) for module in self._synced)
        has_joined = any(getattr(config, "enable", False) for config in configs)
        if has_joined:
            self._recorder.tell_once(_JOINED)
        return has_joined

    def begin(self, tensors: Any) -> None:
        """Must be called before a backward of `tensors`."""
        if self._shards:
            return
        if self._synced and not any(module.require_backward_grad_sync for module in self._synced):
            return  # a micro-batch inside `no_sync`
        if _is_autograd_compiled():
            return  # It would trace the hook.
        # Not over a generator, which the backward needs itself.
        for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                try:
                    self._handles.append(tensor.register_hook(self._queue))
                    _call_first(tensor, self._handles[-1].id)
                except Exception as error:
                    self._tell(error)

    def end(self) -> None:
        """Must be called after that backward."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter_sync(self, module: DistributedDataParallel, *_: Any) -> None:
        # DDP broadcasts the buffers before it calls what it wraps: ranks wait for rank zero.
        if module.will_sync_module_buffers():
            self._recorder.wait_begins()

    def _leave_sync(self, *values: Any) -> None:
        self._recorder.wait_ends()

    def _queue(self, _: Tensor) -> None:
        # Once a backward: the first of several losses is the one.
        if self._handles:
            self.end()
            try:
                torch.autograd.Variable._execution_engine.queue_callback(self._mark)
            except Exception as error:
                self._tell(error)

    def _tell(self, error: Exception) -> None:
        self._recorder.tell_once("The waits for other ranks are not timed: %r", error)

    def _mark(self) -> None:
        # Not called where a backward raises: `BackwardBoundary` marks its end in any case.
        self._recorder.mark_in_backward(f"{BACKWARD}/{COMM}")


def is_distributed() -> bool:
    """Tells whether this process trains together with others."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def is_sharded(module: nn.Module) -> bool:
    """Tells whether FSDP, of either kind, shards a module."""
    # By name: FSDP takes its time to import.
    names = {kind.__name__ for kind in type(module).__mro__}
    return not names.isdisjoint(("FSDPModule", "FullyShardedDataParallel"))


def is_tensor_parallel(model: nn.Module) -> bool:
    """Tells whether parameters are cut over ranks that work on the same batch."""
    # FSDP cuts one dimension of the ranks itself, and these have batches of their own.
    dimensions = int(any(map(is_sharded, model.modules())))
    return any(
        sum(one.is_shard() for one in getattr(parameter, "placements", ())) > dimensions
        for parameter in model.parameters()
    )


@untraced
def _is_autograd_compiled() -> bool:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(compiled, "compiled_autograd_enabled", False) is True


@untraced
def _call_first(tensor: Tensor, hook_id: int) -> None:
    """Moves a hook before the others: where the model returns the loss, FSDP2 has one on it."""
    hooks = tensor._backward_hooks
    if hooks is not None and len(hooks) > 1:
        # torch goes by the order of insertion, which `move_to_end` does not change.
        others = [(other, hook) for other, hook in hooks.items() if other != hook_id]
        for other, _ in others:
            del hooks[other]
        hooks.update(others)
