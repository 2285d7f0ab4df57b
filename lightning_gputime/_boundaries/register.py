"""Everything that a timer replaces in other libraries while it is attached.

`examples/README.md` shows this table to users, and a test fails on any patch that is not in it.
"""

from dataclasses import dataclass
from types import ModuleType

MODULE, CLASS, OBJECT = "module", "class", "object"


@dataclass(frozen=True, slots=True)
class Replaced:
    """One kind of function that is replaced."""

    what: str
    """What it is, for users."""
    kind: str
    """What has it: a module, a class, or an object; several joined by commas."""
    names: frozenset[str]
    why: str
    """Why no hook does instead."""
    when: str = "while steps are timed"
    idle: str = "0.5 to 1 us"
    """What a call costs beyond the original's while no step is timed."""
    others: str = "both are called, in any order"
    """What happens if another library replaces it, too."""


_OF_RANKS = "while steps are timed, with several ranks"
_OF_RANKS_IDLE = "1 to 3 us"

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
        "a hook on a gradient ends too early, and `full_backward_pre_hook` begins late",
        when="while steps are timed; not in evaluations",
    ),
    Replaced(
        "`zero_grad` of the loop's optimizers; under Fabric, of their classes",
        f"{OBJECT}, {CLASS}",
        frozenset({"zero_grad"}),
        "torch has no hook for it",
    ),
    Replaced(
        "`step` of an optimizer without hooks of its own, or whose `step` is compiled",
        OBJECT,
        frozenset({"step"}),
        "there is no hook, or it would break the compiled graph",
    ),
    Replaced(
        "`_compiled_call_impl` of a module that was compiled in place",
        OBJECT,
        frozenset({"_compiled_call_impl"}),
        "a hook of the module would be compiled",
        others="`compile()` called anew ends the timing of that module's calls",
    ),
    Replaced(
        "`training_step` of a LightningModule that was compiled as a whole",
        OBJECT,
        frozenset({"training_step"}),
        "a hook of the module would be compiled",
    ),
    Replaced(
        "`torch.jit._recursive.create_script_module`",
        MODULE,
        frozenset({"create_script_module"}),
        "TorchScript compiles a module's hooks, so ours are off while a module is scripted",
    ),
    Replaced(
        "the collectives of `torch.distributed.ProcessGroup`",
        CLASS,
        frozenset({*LAUNCHES, *BLOCKS}),
        "its hooks come with torch 2.15, and know no end",
        when=_OF_RANKS,
        idle=_OF_RANKS_IDLE,
        others="both are called; what they put back is replaced when the timer is next off and on",
    ),
    Replaced(
        "the waits of `torch.distributed.Work` and of `AsyncCollectiveTensor`",
        CLASS,
        frozenset({*WORK_WAITS, "trigger_wait"}),
        "there is no hook",
        when=_OF_RANKS,
        idle=_OF_RANKS_IDLE,
        others="as those of `ProcessGroup`",
    ),
    Replaced(
        "`wait_event` and `wait_stream` of the device's streams",
        CLASS,
        frozenset({"wait_event", "wait_stream"}),
        "there is no hook",
        when=_OF_RANKS,
        idle=_OF_RANKS_IDLE,
        others="as those of `ProcessGroup`",
    ),
    Replaced(
        "`start` of the Trainer's profiler",
        OBJECT,
        frozenset({"start"}),
        "no callback hears of the fetch of a batch, nor of other callbacks",
        when="from the start to the end of training",
        idle="under 0.1 us an action",
    ),
    Replaced(
        "`save_checkpoint` of the Trainer, `run` of its validation loop, and the broadcast between"
        " ranks at each batch",
        OBJECT,
        frozenset({"save_checkpoint", "run", "_broadcast_sigterm_tensor"}),
        "no action of the profiler tells of them, or of their end",
        when="from the start to the end of training; `save_checkpoint` from `setup` on",
    ),
    Replaced(
        "`_run_epoch`, `evaluate`, five inner methods of the Trainer of transformers, and"
        " `on_epoch_begin` of the handler of its callbacks",
        OBJECT,
        frozenset(
            {
                "_run_epoch",
                "_evaluate",
                "_finalize_training",
                "evaluate",
                "on_epoch_begin",
                "evaluation_loop",
                "get_batch_samples",
                "prediction_step",
                "training_step",  # before transformers 5, in place of `_run_epoch`
            }
        ),
        "no callback hears of a fetch, of where an evaluation begins, nor of an error",
        when="from the start to the end of training",
    ),
    Replaced(
        "`__iter__` of the loaders of Fabric",
        CLASS,
        frozenset({"__iter__"}),
        "Fabric has no hook for it",
        when="from `fabric.setup` to `timer.remove`",
    ),
)
"""All kinds. Hooks by an interface that is offered for them are not replaced functions."""


def find(owner: object, name: str) -> Replaced | None:
    """Return the entry for `owner.name`, if it is in the register."""
    kind = CLASS if isinstance(owner, type) else MODULE if isinstance(owner, ModuleType) else OBJECT
    found = (one for one in REGISTER if kind in one.kind.split(", ") and name in one.names)
    return next(found, None)
