"""Private names of torch."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_gputime._compat.names import Name
from lightning_gputime._phases import BACKWARD, COMM, FORWARD, LOSS

# Autograd

GRAPH_TASK = Name(
    "torch._C._current_graph_task_id",
    "calls inside of backward, as activation checkpointing makes them",
    (FORWARD, LOSS, BACKWARD),
)
current_graph_task_id: Callable[[], int] = GRAPH_TASK.find(lambda: -1)
"""Return a number of 0 or more inside of a backward, else -1."""

_ENGINE = Name(
    "torch.autograd._engine_run_backward",
    "torch.autograd.grad, and a backward that a module has imported by its name",
)


def backward_entry() -> tuple[Any, str]:
    """Return the module and the name of the function that runs the autograd engine.

    It is a global of its module, and looked up at each call: so a patch sees all calls. In its
    place `torch.autograd.backward` sees those of `Tensor.backward`.
    """
    name = _ENGINE.attribute if _ENGINE.is_in(torch.autograd) else "backward"
    return torch.autograd, name


_QUEUE = Name(
    "torch.autograd.Variable._execution_engine",
    "waits for other ranks at the end of backward",
    (BACKWARD, f"{BACKWARD}/{COMM}"),
)
CAN_QUEUE = hasattr(_QUEUE.find(), "queue_callback")
queue_after_backward: Callable[[Callable[[], object]], object] = getattr(
    _QUEUE.find(), "queue_callback", bool
)
"""Call a function when the running backward has done its own work; with `CAN_QUEUE` only."""


def is_autograd_compiled() -> bool:
    """Return whether the autograd engine is being compiled: it would trace hooks on tensors."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(compiled, "compiled_autograd_enabled", False) is True


# Modules

CALL_CODE = getattr(nn.Module.__call__, "__code__", None)
"""The code of the function that every call of a module passes through."""

LOSSES = tuple(
    one for name, one in vars(nn.modules.loss).items() if name in nn.modules.loss.__all__
)
"""The classes of torch's losses."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def hooks_of_calls(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the hooks on the calls of a module: name, name of what tells their kind, hooks."""
    for name in _HOOKS:
        yield name, f"{name}_with_kwargs", vars(module).get(name)


WRAPPER_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The names of a module inside what torch puts around it, and calls with it."""

_COMPILED_CALL = Name(
    "torch.nn.Module._compiled_call_impl", "modules that were compiled in place", (FORWARD,)
)
COMPILED_CALL = _COMPILED_CALL.attribute


def compiled_call(module: nn.Module) -> Any:
    """Return what a module calls that was compiled in place; None of any other."""
    return _COMPILED_CALL.of(module)


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside what `torch.compile` returned; None of any other."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


# Optimizers

# Every call of `step` passes through it: torch puts it around the method of each class.
_STEP_CODE = Optimizer.profile_hook_step(lambda self: None).__code__


def steps_on_stack() -> int:
    """Return how many calls of `step` of optimizers with hooks are running."""
    return sum(frame.f_code is _STEP_CODE for frame, _ in walk_stack(sys._getframe()))


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether an optimizer has hooks: one without `super().__init__()` has none."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def is_step_compiled(optimizer: Any) -> bool:
    return hasattr(vars(optimizer).get("step"), "_torchdynamo_orig_callable")


# Compilation

_SKIPPED = Name(
    "torch._dynamo.trace_rules.FORCE_SKIP_FILES",
    "nothing less, but compiled code may trace functions of the timer",
)


def skip_in_compilation(files: set[Path]) -> None:
    """Let compiled code call functions in some files without tracing into them."""
    skipped: set[str] = _SKIPPED.find(set())
    skipped.update(file.as_posix() for file in files)


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"] or dynamo.counters["frames"])


def compile_callbacks() -> tuple[list[Any], list[Any]] | None:
    """Return the lists of what is called when a compilation starts and ends; None without dynamo.

    It does not import dynamo: until other code has, nothing is compiled.
    """
    module = sys.modules.get("torch._dynamo.callback")
    handler = getattr(module, "callback_handler", None)
    return None if handler is None else (handler.start_callbacks, handler.end_callbacks)


def script_entry() -> tuple[Any, str] | None:
    """Return the module and name of the function by which TorchScript makes its modules."""
    name = "create_script_module"
    return (torch.jit._recursive, name) if hasattr(torch.jit._recursive, name) else None


def is_autocast_on(autocast: torch.autocast) -> bool:
    return bool(getattr(autocast, "_enabled", True))


# Collectives


def async_tensor() -> Any:
    """Return the class of what a functional collective returns, if that is imported; else None."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    return None if functional is None else functional.AsyncCollectiveTensor


PIPELINE_BACKWARD = "torch.distributed.pipelining._backward"
"""The module that asks for gradients on behalf of a schedule."""


def default_store() -> Any:
    """Return the store of the default process group."""
    c10d: Any = torch.distributed.distributed_c10d
    return c10d._get_default_store()


# Devices


def raw_stream() -> Callable[[int], int] | None:
    """Return a function that returns the number of a device's current stream, or None."""
    return getattr(torch._C, "_cuda_getCurrentRawStream", None)


def spin_function(module: Any) -> Callable[[int], object] | None:
    """Return the function of a device module that keeps the device busy for some cycles."""
    return getattr(module, "_sleep", None)


def memory_counters(kind: str) -> tuple[Callable[[int], Any], Callable[[int], Any]] | None:
    """Return functions that read and reset the counters of a device's memory, or None."""
    # These take half as long as the public ones: 10 us the read, 2 us the reset.
    for names in (
        ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats"),
        (f"_{kind}_memoryStats", f"_{kind}_resetPeakMemoryStats"),
    ):
        found = [getattr(torch._C, name, None) for name in names]
        if all(found):
            return found[0], found[1]  # type: ignore[return-value]  # by `all`
    return None
