"""Everything that a timer replaces in other libraries while it is attached.

`examples/README.md` shows this table to users, and a test fails on any patch that is not in it.
"""

from dataclasses import dataclass
from types import ModuleType

MODULE, CLASS, OBJECT = "module", "class", "object"


@dataclass(frozen=True, slots=True)
class Replaced:
    """One kind of function that is replaced.

    Attributes:
        what: What it is, for users.
        kind: What has it: a module, a class, or an object; several joined by commas.
        names: Its names.
        when: From when to when it is replaced.
        idle: What a call costs beyond the original's while no step is timed.
        others: What happens if another library replaces it, too.
        why: Why no hook does instead.
    """

    what: str
    kind: str
    names: frozenset[str]
    when: str
    idle: str
    others: str
    why: str


_TIMED = "while steps are timed"
_BOTH = "both are called, in any order"
_CALL = "0.5 to 1 us"

LAUNCHES = (
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "all_gather_single",
    "_allgather_base",
    "allgather_coalesced",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "alltoall_base",
    "alltoall",
    "barrier",
)
"""The methods of a process group that launch a collective."""

BLOCKS = ("monitored_barrier",)
"""Those that launch one, and wait on the host."""

WORK_WAITS = ("wait", "synchronize", "block_current_stream")
"""The methods by which a stream, or the host, waits for a collective."""

REGISTER = (
    Replaced(
        "`torch.autograd._engine_run_backward`, or `backward` where there is none",
        MODULE,
        frozenset({"_engine_run_backward", "backward"}),
        f"{_TIMED}; not in evaluations",
        _CALL,
        _BOTH,
        "a hook on a gradient ends too early, and `full_backward_pre_hook` begins late",
    ),
    Replaced(
        "`zero_grad` of the loop's optimizers; under Fabric, of their classes",
        f"{OBJECT}, {CLASS}",
        frozenset({"zero_grad"}),
        _TIMED,
        _CALL,
        _BOTH,
        "torch has no hook for it",
    ),
    Replaced(
        "`step` of an optimizer without hooks of its own, or whose `step` is compiled",
        OBJECT,
        frozenset({"step"}),
        _TIMED,
        _CALL,
        _BOTH,
        "there is no hook, or it would break the compiled graph",
    ),
    Replaced(
        "`_compiled_call_impl` of a module that was compiled in place",
        OBJECT,
        frozenset({"_compiled_call_impl"}),
        _TIMED,
        _CALL,
        "`compile()` called anew ends the timing of that module's calls",
        "a hook of the module would be compiled",
    ),
    Replaced(
        "`training_step` of a LightningModule that was compiled as a whole",
        OBJECT,
        frozenset({"training_step"}),
        _TIMED,
        _CALL,
        _BOTH,
        "a hook of the module would be compiled",
    ),
    Replaced(
        "the collectives of `torch.distributed.ProcessGroup`",
        CLASS,
        frozenset({*LAUNCHES, *BLOCKS}),
        f"{_TIMED}, with several ranks",
        "1 to 3 us",
        "both are called; if they put back the original, it is replaced again within some steps",
        "its hooks come with torch 2.15, and know no end",
    ),
    Replaced(
        "the waits of `torch.distributed.Work`, of futures and of `AsyncCollectiveTensor`",
        CLASS,
        frozenset({*WORK_WAITS, "get_future", "trigger_wait"}),
        f"{_TIMED}, with several ranks",
        "1 to 3 us",
        "as those of `ProcessGroup`",
        "there is no hook",
    ),
    Replaced(
        "`wait_event` and `wait_stream` of the device's streams",
        CLASS,
        frozenset({"wait_event", "wait_stream"}),
        f"{_TIMED}, with several ranks",
        "1 to 3 us",
        "as those of `ProcessGroup`",
        "there is no hook",
    ),
    Replaced(
        "`start` of the Trainer's profiler, and `stop` while a checkpoint is saved",
        OBJECT,
        frozenset({"start", "stop"}),
        "from `setup` to the end of the fit",
        "under 0.1 us an action",
        _BOTH,
        "no callback hears of the fetch of a batch, nor of other callbacks",
    ),
    Replaced(
        "`run` of the Trainer's validation loop, and the broadcast between ranks at each batch",
        OBJECT,
        frozenset({"run", "_broadcast_sigterm_tensor", "on_advance_end"}),
        "from the start to the end of training",
        _CALL,
        _BOTH,
        "no action of the profiler tells of them",
    ),
    Replaced(
        "`_run_epoch`, `evaluate` and three inner methods of the Trainer of transformers",
        OBJECT,
        frozenset(
            {
                "_run_epoch",
                "evaluate",
                "evaluation_loop",
                "get_batch_samples",
                "prediction_step",
                "training_step",  # before transformers 5, in place of `_run_epoch`
            }
        ),
        "from the start to the end of training; two of them in an evaluation that runs alone",
        _CALL,
        _BOTH,
        "no callback hears of a fetch, of where an evaluation begins, nor of an error",
    ),
    Replaced(
        "`__iter__` of the loaders of Fabric",
        CLASS,
        frozenset({"__iter__"}),
        "from `fabric.setup` to `timer.remove`",
        _CALL,
        _BOTH,
        "Fabric has no hook for it",
    ),
)
"""All kinds. Hooks by an interface that is offered for them are not replaced functions."""


def find(owner: object, name: str) -> Replaced | None:
    """Return the entry for `owner.name`, if it is in the register."""
    kind = CLASS if isinstance(owner, type) else MODULE if isinstance(owner, ModuleType) else OBJECT
    found = (one for one in REGISTER if kind in one.kind.split(", ") and name in one.names)
    return next(found, None)
