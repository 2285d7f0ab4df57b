"""Everything that a timer replaces in other libraries while it is attached.

`examples/README.md` shows this table to users, and a test that patches what is not in it fails.
"""

from dataclasses import dataclass
from types import ModuleType

from torch.distributed import ProcessGroup

from lightning_gputime._boundaries.comm import BLOCKS, WORK_WAITS, launches

MODULE, CLASS, OBJECT = "module", "class", "object"


@dataclass(frozen=True, slots=True)
class Replaced:
    """One kind of function that is replaced, in the words of the manual."""

    what: str
    kind: str  # What has it: a module, a class or an object; several joined by commas.
    names: frozenset[str]
    why: str  # Why no hook does instead.
    when: str = "while steps are timed"
    idle: str = "0.5 to 1 us"  # What a call costs beyond the original's while no step is timed.
    others: str = "both are called, in any order"  # If another library replaces it, too.


_OF_RANKS = "while steps are timed, with several ranks"
_OF_RANKS_IDLE = "1 to 3 us"
_OF_RANKS_OTHERS = "both are called; what they put back is replaced when the timer is next put on"
_IN_TRAINING = "from the start to the end of training"
_NO_HOOK = "there is no hook"
_COMPILED = "a hook of the module would be compiled"

REGISTER = (
    Replaced(
        "`torch.autograd._engine_run_backward`, or `backward` where there is none; `backward` of"
        " DeepSpeed's engine, which then reduces gradients",
        f"{MODULE}, {OBJECT}",
        frozenset({"_engine_run_backward", "backward"}),
        "a hook on a gradient ends too early, and `full_backward_pre_hook` begins late",
        when="while steps are timed; not in evaluations",
    ),
    Replaced(
        "`zero_grad` of the loop's optimizers; under Fabric, of their classes",
        f"{OBJECT}, {CLASS}",
        frozenset({"zero_grad"}),
        _NO_HOOK,
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
        _COMPILED,
        others="`compile()` called anew ends the timing of that module's calls",
    ),
    Replaced(
        "`training_step` of a LightningModule that was compiled as a whole",
        OBJECT,
        frozenset({"training_step"}),
        _COMPILED,
    ),
    Replaced(
        "`torch.jit._recursive.create_script_module`, and `__getstate__` of `torch.nn.Module`",
        f"{MODULE}, {CLASS}",
        frozenset({"create_script_module", "__getstate__"}),
        "TorchScript compiles a module's hooks, and pickle writes them: both are done without ours",
    ),
    Replaced(
        "the collectives of `torch.distributed.ProcessGroup`",
        CLASS,
        frozenset({*launches(ProcessGroup), *BLOCKS}),
        "its hooks come with torch 2.15, and know no end",
        _OF_RANKS,
        _OF_RANKS_IDLE,
        _OF_RANKS_OTHERS,
    ),
    Replaced(
        "the waits of `torch.distributed.Work` and of `AsyncCollectiveTensor`; `wait_event` and"
        " `wait_stream` of the device's streams",
        CLASS,
        frozenset({*WORK_WAITS, "trigger_wait", "wait_event", "wait_stream"}),
        _NO_HOOK,
        _OF_RANKS,
        _OF_RANKS_IDLE,
        _OF_RANKS_OTHERS,
    ),
    Replaced(
        "`start` of the Trainer's profiler",
        OBJECT,
        frozenset({"start"}),
        "no callback hears of the fetch of a batch, nor of other callbacks",
        when=_IN_TRAINING,
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
        " `on_epoch_begin` of the handler of its callbacks; of TRL's `_calculate_rewards`, and"
        " `generate` of what runs vLLM for it",
        OBJECT,
        frozenset(
            {
                "_run_epoch",
                "_calculate_rewards",
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
        "no callback hears of a fetch, of where an evaluation begins, of rewards, nor of an error",
        when=_IN_TRAINING,
    ),
    Replaced(
        "`generate` and `generate_batch` of all models of transformers, where that is imported; in"
        " its Trainer, `_loss_function` of the model",
        f"{CLASS}, {OBJECT}",
        frozenset({"generate", "generate_batch", "_loss_function"}),
        _NO_HOOK,
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
