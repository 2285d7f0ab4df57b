"""Private names of torch."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import CodeType
from typing import Any

import torch
from torch import nn

from lightning_gputime._compat.names import MISSING, Name, report, report_missing
from lightning_gputime._phases import BACKWARD, COMM, FORWARD, LOSS

# Autograd

GRAPH_TASK = Name(
    "torch._C._current_graph_task_id",
    "calls of modules inside backward, as with activation checkpointing",
    (FORWARD, LOSS, BACKWARD),
)
current_graph_task_id: Callable[[], int] = GRAPH_TASK.find(lambda: -1)
"""Return a number of 0 or more inside of a backward, else -1."""

_ENGINE = Name(
    "torch.autograd._engine_run_backward",
    "torch.autograd.grad, and a backward that was imported by name",
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

_HOOKS = tuple(
    Name(
        f"torch.nn.Module.{name}", "copies of a model without the timer's hooks", sample=nn.Identity
    )
    for name in ("_forward_pre_hooks", "_forward_hooks")
)


def hooks_of_calls(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the hooks on the calls of a module: their attribute, that of their kinds, the hooks."""
    for name in _HOOKS:
        yield name.attribute, f"{name.attribute}_with_kwargs", name.of(module)


WRAPPER_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The names of a module inside what torch puts around it, and calls with it."""

_COMPILED_MODULE = Name(
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod", "the modules inside a compiled model"
)
_COMPILED_CALL = Name(
    "torch.nn.Module._compiled_call_impl", "modules that were compiled in place", (FORWARD,)
)
COMPILED_CALL = _COMPILED_CALL.attribute


def compiled_call(module: nn.Module) -> Any:
    """Return what a module calls that was compiled in place; None of any other."""
    return _COMPILED_CALL.of(module)


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside what `torch.compile` returned; None of any other."""
    inner = _COMPILED_MODULE.of(module)
    if isinstance(inner, nn.Module):
        return inner
    if type(module).__module__.startswith("torch._dynamo."):
        report(_COMPILED_MODULE)
    return None


# By name, because most of these packages may not be installed, and importing them is slow. A class
# of the user's may have an attribute `module`, too, which is none of these.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.parallel.data_parallel.DataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "torch.optim.swa_utils.AveragedModel",
    "deepspeed.runtime.engine.DeepSpeedEngine",
    "lightning.fabric.wrappers._FabricModule",
    "lightning_fabric.wrappers._FabricModule",
}


def is_instance_of(module: nn.Module, *paths: str) -> bool:
    """Return whether a module is of a class, or of one derived from it, by their dotted names."""
    return any(f"{kind.__module__}.{kind.__name__}" in paths for kind in type(module).__mro__)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's model inside wrappers, such as those of DDP and of `torch.compile`."""
    while True:
        inner = compiled_module(module)
        if inner is None and is_instance_of(module, *_WRAPPERS):
            inner = getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is the result of `torch.compile`, or was compiled in place."""
    is_result = type(module).__module__.startswith("torch._dynamo.")
    return is_result or compiled_module(module) is not None or compiled_call(module) is not None


# Optimizers

_STEP_WRAPPER = Name(
    "torch.optim.Optimizer.profile_hook_step", "updates that end a step in their own hook"
)


def _code_of_step() -> CodeType | None:
    # Torch puts this function around `step` of each class: every call passes through it.
    wrap = _STEP_WRAPPER.find()
    return None if wrap is None else getattr(wrap(lambda optimizer: None), "__code__", None)


_STEP_CODE = _code_of_step()


def steps_on_stack() -> int | None:
    """Return how many calls of `step` of optimizers with hooks are running; None if unknown."""
    if _STEP_CODE is None:
        return None
    return sum(frame.f_code is _STEP_CODE for frame, _ in walk_stack(sys._getframe()))


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether an optimizer has hooks: one without `super().__init__()` has none."""
    try:
        optimizer.register_step_post_hook(bool).remove()
    except (AttributeError, TypeError):
        return False
    return True


def is_step_compiled(optimizer: Any) -> bool:
    # What torch.compile returns is a function of dynamo's.
    code = getattr(vars(optimizer).get("step"), "__code__", None)
    return "torch/_dynamo/" in getattr(code, "co_filename", "").replace("\\", "/")


# Compilation

_SKIPPED = Name(
    "torch._dynamo.trace_rules.FORCE_SKIP_FILES", "compiled code that calls functions of the timer"
)


def skip_in_compilation(files: set[Path]) -> None:
    """Let compiled code call functions in some files without tracing into them."""
    skipped = _SKIPPED.find(MISSING)
    if isinstance(skipped, set):
        skipped.update(file.as_posix() for file in files)
    else:
        report(_SKIPPED)


_COUNTERS = Name(
    "torch._dynamo.utils.counters", "untimed steps without hooks: they stay on, as in compiled code"
)


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process: its code guards hooks."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return False
    counters = _COUNTERS.of(dynamo)
    if counters is None:
        report(_COUNTERS)
        return True
    return bool(counters["stats"] or counters["frames"])


_COMPILE_CALLBACKS = Name(
    "torch._dynamo.callback.callback_handler", "compilation as a cause of slow steps"
)


def compile_callbacks() -> tuple[list[Any], list[Any]] | None:
    """Return the lists of what is called when a compilation starts and ends; None without dynamo.

    It does not import dynamo: until other code has, nothing is compiled.
    """
    module = sys.modules.get("torch._dynamo.callback")
    if module is None:
        return None
    handler = _COMPILE_CALLBACKS.of(module)
    starts, ends = (
        getattr(handler, "start_callbacks", None),
        getattr(handler, "end_callbacks", None),
    )
    if starts is None or ends is None:
        report(_COMPILE_CALLBACKS)
        return None
    return starts, ends


_SCRIPT = Name(
    "torch.jit._recursive.create_script_module", "models that TorchScript compiles while timed"
)


def script_entry() -> tuple[Any, str] | None:
    """Return the module and name of the function by which TorchScript makes its modules."""
    return None if _SCRIPT.find() is None else (torch.jit._recursive, _SCRIPT.attribute)


_AUTOCAST = Name(
    "torch.autocast._enabled",
    "whether an autocast around forward is on, for the MFU",
    sample=partial(torch.autocast, "cpu"),
)


def is_autocast_on(autocast: torch.autocast) -> bool:
    is_on = _AUTOCAST.of(autocast)
    if is_on is None:
        report(_AUTOCAST)
    return is_on is not False


# Collectives


_ASYNC_TENSOR = Name(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "waits for functional collectives, as of tensor parallelism",
)


def async_tensor() -> Any:
    """Return the class of what a functional collective returns, if that is imported; else None."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is None:
        return None
    if not _ASYNC_TENSOR.is_in(functional):
        report(_ASYNC_TENSOR)
    return _ASYNC_TENSOR.of(functional)


PIPELINE_BACKWARD = "torch.distributed.pipelining._backward"
"""The module that asks for gradients on behalf of a schedule."""


_STORE = Name(
    "torch.distributed.distributed_c10d._get_default_store", "the slowest rank (sync_ranks)"
)


def default_store() -> Any:
    """Return the store of the default process group, or None."""
    get = _STORE.find()
    if get is None:
        report(_STORE)
    return None if get is None else get()


# Devices


_RAW_STREAM = Name("torch._C._cuda_getCurrentRawStream")  # Else it takes longer to ask.
_SLEEP = Name("torch.cuda._sleep")  # Else the reason is told that no step is probed.


def raw_stream() -> Callable[[int], int] | None:
    """Return a function that returns the number of a device's current stream, or None."""
    found: Callable[[int], int] | None = _RAW_STREAM.find()
    return found


def spin_function(module: Any) -> Callable[[int], object] | None:
    """Return the function of a device module that keeps the device busy for some cycles."""
    found: Callable[[int], object] | None = _SLEEP.of(module)
    return found


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


# At attach


def report_missing_names(*, shared: bool) -> None:
    """Report what cannot be measured; `shared` says that there are several ranks."""
    report_missing(GRAPH_TASK, _ENGINE, _COMPILED_CALL, *_HOOKS, _STEP_WRAPPER, _SCRIPT)
    if shared:
        report_missing(_QUEUE)
