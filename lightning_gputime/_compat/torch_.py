"""Internal and undocumented names of torch."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from traceback import walk_stack
from types import CodeType, ModuleType, SimpleNamespace, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_gputime._compat import MISSING, Name, look_up, report, report_missing
from lightning_gputime._compat.python_ import calling_module, calls_on_stack, code_of
from lightning_gputime._phases import BACKWARD, COMM, FORWARD, LOSS, OTHER

# Autograd

GRAPH_TASK = Name(
    "torch._C._current_graph_task_id",
    "calls of modules inside backward, as with activation checkpointing",
    (FORWARD, LOSS, BACKWARD),
)
current_graph_task_id: Callable[[], int] = GRAPH_TASK.find(lambda: -1)
"""Return the id of the running backward, or -1."""

_ENGINE = Name(
    "torch.autograd._engine_run_backward",
    "torch.autograd.grad, and a backward that was imported by name",
)


def backward_entry() -> tuple[Any, str]:
    """Return the module and the name of the function that runs the autograd engine.

    torch looks it up as a global at each call, so a patch sees all calls. The fallback is
    `torch.autograd.backward`, whose patch only sees calls of `Tensor.backward`.
    """
    name = _ENGINE.attribute if _ENGINE.is_in(torch.autograd) else "backward"
    return torch.autograd, name


def runs_for_pipeline() -> bool:
    schedule = "torch.distributed.pipelining._backward"
    return schedule in sys.modules and calling_module("torch.autograd") == schedule


_QUEUE = Name(
    "torch.autograd.Variable._execution_engine",
    "waits for other ranks at the end of backward",
    (BACKWARD, f"{BACKWARD}/{COMM}"),
)
CAN_QUEUE = hasattr(_QUEUE.find(), "queue_callback")
"""True if `queue_after_backward` works in this version of torch."""
queue_after_backward: Callable[[Callable[[], object]], object] = getattr(
    _QUEUE.find(), "queue_callback", bool
)
"""Call a function at the end of the running backward. Without `CAN_QUEUE`, do nothing."""


def creates_graph(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return the argument `create_graph` of a backward, as torch passes it to its engine."""
    # By position: grad_tensors, retain_graph and create_graph.
    return bool(kwargs.get("create_graph", args[2] if len(args) > 2 else False))


def is_autograd_compiled() -> bool:
    # It would trace hooks on tensors.
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(compiled, "compiled_autograd_enabled", False) is True


_SEQUENCE = Name("torch._C._autograd._get_sequence_nr", "the time of backward by line of forward")
_NODE_SEQUENCE = Name("torch.autograd.graph.Node._sequence_nr")
_NODE_METADATA = Name("torch.autograd.graph.Node._input_metadata")
_MAX_SEQUENCE = 1 << 62  # Nodes that accumulate gradients have larger numbers.

CHECKPOINT = code_of(checkpoint)
"""Code of the function that checkpoints activations."""

next_sequence: Callable[[], int] = _SEQUENCE.find(int)
"""Return the number of the next autograd node that this thread creates. It does not advance."""


class GraphNode(NamedTuple):
    """Node of an autograd graph, which an operation in forward has created."""

    sequence: int  # Counted by the thread that ran forward.
    node: Any

    @property
    def kind(self) -> str:
        """Name of the operation, such as "AddmmBackward0"."""
        return str(self.node.name())

    @property
    def is_float32(self) -> bool:
        """True if the gradient of its result is in float32."""
        metadata = _NODE_METADATA.of(self.node)
        return bool(metadata) and metadata[0].dtype is torch.float32


def graph_nodes(tensors: Iterable[Any], max_nodes: int) -> list[GraphNode]:
    """Return the nodes of the graph behind some tensors, newest first; empty if it is too large."""
    roots = (getattr(tensor, "grad_fn", None) for tensor in tensors)
    waiting = [node for node in roots if node is not None]
    seen = {*waiting}
    found = []
    # A large graph has thousands of nodes: look each up as few times as possible.
    name = _NODE_SEQUENCE.attribute
    for node in waiting:  # The loop appends to this list.
        sequence = getattr(node, name)()
        if sequence < _MAX_SEQUENCE:
            found.append(GraphNode(sequence, node))
            for inner, _ in node.next_functions:
                if inner is not None and inner not in seen:
                    seen.add(inner)
                    waiting.append(inner)
        if len(seen) > max_nodes:
            return []
    found.sort(key=itemgetter(0), reverse=True)
    return found


# Modules

_CALL_CODE = getattr(nn.Module.__call__, "__code__", None)


def modules_on_stack() -> list[int]:
    """Return the ids of the modules that are running, innermost first."""
    return [id(variables.get("self")) for variables in calls_on_stack(_CALL_CODE)]


LOSSES = tuple(
    kind for name, kind in vars(nn).items() if isinstance(kind, type) and name.endswith("Loss")
)
"""The classes of torch's losses."""

_HOOKS = tuple(
    Name(f"torch.nn.Module.{name}", "which hooks to leave out of copied models", sample=nn.Identity)
    for name in ("_forward_pre_hooks", "_forward_hooks")
)


def hooks_of_calls(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield for both kinds of hooks: attribute, attribute of the `with_kwargs` flags, hooks."""
    for name in _HOOKS:
        yield name.attribute, f"{name.attribute}_with_kwargs", name.of(module)


_COMPILED_MODULE = Name(
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod", "the modules inside a compiled model"
)
_COMPILED_CALL = Name(
    "torch.nn.Module._compiled_call_impl", "modules that were compiled in place", (FORWARD,)
)
COMPILED_CALL = _COMPILED_CALL.attribute


def compiled_call(module: nn.Module) -> Any:
    return _COMPILED_CALL.of(module)


def without_wrappers(name: str) -> str:
    """Return the name of a module without the compiled modules around it."""
    return ".".join(part for part in name.split(".") if part != _COMPILED_MODULE.attribute)


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the original of a module that `torch.compile` returned, else None."""
    inner = _COMPILED_MODULE.of(module)
    if isinstance(inner, nn.Module):
        return inner
    if type(module).__module__.startswith("torch._dynamo."):
        report(_COMPILED_MODULE)
    return None


# Names of classes, because these packages may be missing and are slow to import. An attribute
# `module` alone is not enough: user classes may have it.
_USER_MODEL_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.parallel.data_parallel.DataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    "torch.optim.swa_utils.AveragedModel",
    "deepspeed.runtime.engine.DeepSpeedEngine",
    "lightning.fabric.wrappers._FabricModule",
    "lightning_fabric.wrappers._FabricModule",
}


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's model inside wrappers, such as those of DDP and of `torch.compile`."""
    while True:
        inner = compiled_module(module)
        kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__}
        if inner is None and kinds & _USER_MODEL_WRAPPERS:
            inner = getattr(module, "module", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was returned by `torch.compile` or compiled in place."""
    is_result = type(module).__module__.startswith("torch._dynamo.")
    return is_result or compiled_module(module) is not None or compiled_call(module) is not None


# Optimizers

_STEP_WRAPPER = Name(
    "torch.optim.Optimizer.profile_hook_step", "steps that end inside a hook of an optimizer"
)


# Code of the function in which torch wraps the `step` of every optimizer class: wrap any function.
# Without the wrapper, `bool` returns an object without code.
_STEP_CODE = getattr(_STEP_WRAPPER.find(bool)(lambda optimizer: None), "__code__", None)


def steps_on_stack() -> int | None:
    """Return the number of running `step` calls of optimizers with hooks; None if unknown."""
    return None if _STEP_CODE is None else sum(1 for _ in calls_on_stack(_STEP_CODE))


def has_step_hooks(optimizer: Any) -> bool:
    """Return True if an optimizer supports step hooks.

    A custom optimizer that does not call `super().__init__()` does not support them.
    """
    try:
        optimizer.register_step_post_hook(bool).remove()
    except (AttributeError, TypeError):
        return False
    return True


def is_step_compiled(optimizer: Any) -> bool:
    # Its code object is defined in a file of dynamo.
    code = getattr(vars(optimizer).get("step"), "__code__", None)
    return "torch/_dynamo/" in getattr(code, "co_filename", "").replace("\\", "/")


# Compilation

_SKIPPED = Name(
    "torch._dynamo.trace_rules.FORCE_SKIP_FILES", "compiled code that calls functions of the timer"
)


def attributes_of(function: Any) -> dict[str, Any]:
    """Return a function's attributes without those by which dynamo identifies it."""
    attributes = getattr(function, "__dict__", {})
    return {name: attributes[name] for name in attributes if not name.startswith("_torchdynamo")}


def skip_in_compilation(files: set[Path]) -> None:
    """Let compiled code call functions in some files without tracing into them."""
    skipped = _SKIPPED.find(MISSING)
    if isinstance(skipped, set):
        skipped.update(file.as_posix() for file in files)
    else:
        report(_SKIPPED)


_COUNTERS = Name("torch._dynamo.utils.counters", "untimed steps without the cost of hooks")


def has_compiled() -> bool:
    """Return whether torch.compile was used in this process. Compiled code guards module hooks."""
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
    """Return the lists of callbacks at the start and end of a compilation; None without dynamo.

    It does not import dynamo: nothing is compiled before other code imports it.
    """
    module = sys.modules.get("torch._dynamo.callback")
    if module is None:
        return None
    handler = _COMPILE_CALLBACKS.of(module)
    starts = getattr(handler, "start_callbacks", None)
    ends = getattr(handler, "end_callbacks", None)
    if starts is None or ends is None:
        report(_COMPILE_CALLBACKS)
        return None
    return starts, ends


def is_compiled_graph(module: nn.Module) -> bool:
    """Return whether a module is the graph of a compiled optimizer."""
    return "compile_subgraph_reason" in vars(module)


_SCRIPT = Name(
    "torch.jit._recursive.create_script_module",
    "models that TorchScript compiles while a timer is attached",
)


def script_entry() -> tuple[Any, str] | None:
    """Return the module and the name of the function that creates TorchScript modules."""
    owner = look_up(_SCRIPT.path.rpartition(".")[0])
    return (owner, _SCRIPT.attribute) if _SCRIPT.is_in(owner) else None


_AUTOCAST = Name(
    "torch.autocast._enabled",
    "the precision inside an autocast, for the MFU",
    sample=partial(torch.autocast, "cpu"),
)


def enables_autocast(autocast: torch.autocast) -> bool:
    """Return False for an autocast that was created with `enabled=False`, else True."""
    enabled = _AUTOCAST.of(autocast)
    if enabled is None:
        report(_AUTOCAST)
    return enabled is not False


# Collectives

_WAITS = tuple(f"{phase}/{COMM}" for phase in (FORWARD, BACKWARD, OTHER))
_COLLECTIVE = Name(
    "torch.distributed.ProcessGroup.allreduce",
    "waits for other ranks in collectives",
    (FORWARD, BACKWARD, OTHER, *_WAITS),
)
_WAIT = Name(
    "torch.distributed.Work.wait",
    "waits for collectives that run on another stream",
    (FORWARD, BACKWARD, OTHER, *_WAITS),
)

_COLLECTIVES = ("all", "reduce", "gather", "scatter", "broadcast", "barrier")
"""Prefixes of the process group methods that launch a collective."""

BLOCKING = ("monitored_barrier",)
"""Process group methods that launch a collective and block the host."""

WORK_WAITS = ("wait", "synchronize", "block_current_stream")
"""Methods of `Work` that make a stream or the host wait for a collective."""


def launches(group: type) -> tuple[str, ...]:
    """Return the methods of a process group class that launch a collective."""
    return tuple(name for name in vars(group) if name.lstrip("_").startswith(_COLLECTIVES))


def is_asynchronous(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a collective with these launch arguments runs on another stream.

    Before torch 2.8 every collective does.
    """
    options = kwargs.get("opts", args[-1] if args else None)
    return bool(getattr(options, "asyncOp", True))


_ASYNC_TENSOR = Name(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "waits for functional collectives, as in tensor parallelism",
)
# Both methods call one function, which compiled code guards: patch the methods instead. DTensor
# calls `wait` for a synchronous redistribution.
TENSOR_WAITS = ("trigger_wait", "wait")
"""Methods that the first use of an asynchronous tensor calls to wait."""


def async_tensor() -> Any:
    """Return the class of the results of functional collectives, or None if not imported."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is None:
        return None
    if not _ASYNC_TENSOR.is_in(functional):
        report(_ASYNC_TENSOR)
    return _ASYNC_TENSOR.of(functional)


def is_complete(tensor: Any) -> bool:
    return bool(getattr(tensor, "completed", False))


_PIPELINES = ("torch.distributed.pipelining", "megatron.core.pipeline_parallel")
# Modules that pass a call from the user's code to a patched function.
_BETWEEN = (
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
    "torch.cuda.streams",
)


def waits_for_pipeline_stage() -> bool:
    """Return True if the patched wait that runs now is for data from another pipeline stage."""
    # Check the imports first, because walking the stack is slow.
    has_pipeline = not sys.modules.keys().isdisjoint(_PIPELINES)
    return has_pipeline and calling_module(*_BETWEEN).startswith(_PIPELINES)


def is_called_by_distributed() -> bool:
    """Return True if code of `torch.distributed` has called the patched function that runs now."""
    return calling_module(*_BETWEEN).startswith("torch.distributed")


_SHARDED = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
# Without it, waits count for the line that calls the module.
_SHARDED_NAME = Name(f"{_SHARDED}.FSDPParamGroup._module_fqn")


def sharded_module() -> tuple[CodeType, str] | None:
    """Return the running function of `fully_shard` and the name of its module; None if none runs.

    The name of the root module is empty.
    """
    if _SHARDED not in sys.modules:
        return None
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_globals.get("__name__") == _SHARDED and "self" in frame.f_locals:
            name = _SHARDED_NAME.of(frame.f_locals["self"])
            return None if name is None else (frame.f_code, str(name))
    return None


_SYNCS_BUFFERS = Name(
    "torch.nn.parallel.DistributedDataParallel.will_sync_module_buffers",
    "waits for DDP to broadcast buffers",
    (FORWARD, OTHER),
)
_SYNCS_GRADS = Name("torch.nn.parallel.DistributedDataParallel.require_backward_grad_sync")


def syncs_buffers(module: nn.Module) -> bool:
    """Return whether DDP broadcasts its buffers in the current call."""
    will_sync = _SYNCS_BUFFERS.of(module)
    return callable(will_sync) and bool(will_sync())


def syncs_gradients(module: nn.Module) -> bool:
    """Return whether DDP's next backward synchronizes gradients, which it skips in `no_sync`."""
    return bool(_SYNCS_GRADS.of(module, True))


_STORE = Name("torch.distributed.distributed_c10d._get_default_store", "the straggler (sync_ranks)")


def default_store() -> Any:
    """Return the store of the default process group, or None."""
    get = _STORE.find()
    if get is None:
        report(_STORE)
    return None if get is None else get()


# Devices

_RAW_STREAM = Name("torch._C._cuda_getCurrentRawStream")  # The public function is slower.


def raw_stream() -> Callable[[int], int] | None:
    """Return a function that returns the id of a device's current stream, or None."""
    found: Callable[[int], int] | None = _RAW_STREAM.find()
    return found


_SPIN = Name("torch.cuda._sleep", "the clock of the GPU")


def spin_kernel() -> Callable[[int], None] | None:
    """Return a function that launches a kernel of so many clock cycles, or None."""
    if torch.version.hip is not None:  # It counts a constant clock there.
        return None
    report_missing(_SPIN)
    found: Callable[[int], None] | None = _SPIN.find()
    return found


LOADER_WORKER = "pt_data_worker"
"""Name of the processes of a loader's workers since torch 2.6; before, that of Python."""
_ITERATOR = Name("torch.utils.data.dataloader._BaseDataLoaderIter", "the fetches of a plain loop")


def loader_next() -> tuple[type, str] | None:
    """Return the class and the method that fetch a batch, to patch them; None if they are gone."""
    report_missing(_ITERATOR)
    kind = _ITERATOR.find()
    return None if kind is None else (kind, "__next__")


def dataset_of_iterator(iterator: object) -> object:
    """Return the dataset of a loader's iterator; None if the iterator does not expose it."""
    return getattr(iterator, "_dataset", None)


def settings_of_iterator(iterator: object) -> SimpleNamespace:
    """Return the settings of a loader's iterator, under the names of the loader's attributes."""
    names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    found = {name: getattr(iterator, f"_{name}", None) for name in names}
    found["batch_size"] = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    with suppress(TypeError):  # Some datasets, such as a list, have no weak references.
        # A proxy, so that the settings do not keep the dataset alive.
        found["dataset"] = weakref.proxy(dataset_of_iterator(iterator))
    return SimpleNamespace(**found)


# At attach


def report_missing_names(*, shared: bool) -> None:
    """Report the features that cannot be measured. `shared`: the training has several ranks."""
    report_missing(GRAPH_TASK, _ENGINE, _SEQUENCE, _COMPILED_CALL, *_HOOKS, _STEP_WRAPPER, _SCRIPT)
    if shared:
        report_missing(_QUEUE, _COLLECTIVE, _WAIT, _SYNCS_BUFFERS)


# Modes of the user that see each call of torch

_FUNCTION_MODES = Name("torch._C._len_torch_function_stack")
function_modes: Callable[[], int] = _FUNCTION_MODES.find(int)
"""Return the number of active modes, of class `TorchFunctionMode`."""

_WITHOUT_MODES = Name("torch._C.DisableTorchFunction")


def without_function_modes() -> AbstractContextManager[Any]:
    """Hide calls of torch from the user's modes."""
    found: AbstractContextManager[Any] = _WITHOUT_MODES.find(nullcontext)()
    return found


# Workers of a DataLoader, and the thread that pins their batches

FETCHERS = (
    Name("torch.utils.data._utils.fetch._MapDatasetFetcher", "the stages of a loader's workers"),
    Name("torch.utils.data._utils.fetch._IterableDatasetFetcher"),
)


def fetcher_classes() -> list[type]:
    """Return the classes whose method `fetch` makes a batch, in a worker or in the main process."""
    return [kind for name in FETCHERS if (kind := name.find()) is not None]


_WORKER_ERROR = Name("torch.utils.data._utils.worker.ExceptionWrapper")


def leave_out_of_errors(folder: str) -> None:
    """In a worker, leave the code in a folder out of the tracebacks that it sends to the loop."""
    wrapper = _WORKER_ERROR.find()
    if wrapper is None:
        return

    def without_folder(found: TracebackType | None) -> TracebackType | None:
        if found is None:
            return None
        inner = without_folder(found.tb_next)
        if found.tb_frame.f_code.co_filename.startswith(folder):
            return inner
        return TracebackType(inner, found.tb_frame, found.tb_lasti, found.tb_lineno)

    def wrap(exc_info: Any = None, where: str = "in background") -> Any:
        kind, error, found = exc_info or sys.exc_info()
        return wrapper((kind, error, without_folder(found)), where)

    module, _, name = _WORKER_ERROR.path.rpartition(".")
    setattr(look_up(module), name, wrap)


PIN_LOOP = Name("torch.utils.data._utils.pin_memory._pin_memory_loop", "the pin-memory thread")


def pin_loop() -> tuple[ModuleType, str] | None:
    """Return the module and the name of the function that a pin-memory thread runs."""
    report_missing(PIN_LOOP)
    module, _, name = PIN_LOOP.path.rpartition(".")
    return None if PIN_LOOP.find() is None else (look_up(module), name)
