"""All functions of other libraries that a timer replaces while it is attached.

`docs/reference/replaced.md` shows this table to users. A test fails if the package replaces a
function that is not in it.
"""

from dataclasses import dataclass
from types import ModuleType

from torch.distributed import ProcessGroup

from lightning_gputime._compat.torch_ import BLOCKING, WORK_WAITS, launches

MODULE, CLASS, OBJECT = "module", "class", "object"


@dataclass(frozen=True, slots=True)
class Replaced:
    """A kind of replaced functions, in the words of the manual."""

    target: str
    kind: str  # Kinds of the owners of the functions: module, class or object, joined by commas.
    names: str  # Separated by spaces.
    why: str  # Reason why the timer does not use a hook instead.
    when: str = "while steps are timed"  # Time in which the functions are replaced.
    # Cost of a call between timed steps, if it is not 0.5 to 1 us, and other consequences.
    notes: str = ""


_IN_TRAINING = "all of the training"
_NO_HOOK = "no hook exists"
_COMPILED = "a hook of the module would be compiled"
_COLLECTIVES = (*launches(ProcessGroup), *BLOCKING, *WORK_WAITS)

REGISTER = (
    Replaced(
        "`torch.autograd._engine_run_backward`; `backward` of DeepSpeed's engine",
        f"{MODULE}, {OBJECT}",
        "_engine_run_backward backward",
        "hooks on gradients end too early, and `full_backward_pre_hook` starts late",
        when="while steps are timed, except evaluations",
    ),
    Replaced(
        "`zero_grad` of the loop's optimizers; `step` of those without hooks, or whose `step` is"
        " compiled; `step` of `GradScaler` if only updates end steps",
        f"{OBJECT}, {CLASS}",
        "zero_grad step",
        "no hook exists, or it would break the compiled graph",
    ),
    Replaced(
        "`_compiled_call_impl` of a module that was compiled in place; `training_step` of a"
        " LightningModule that was compiled as a whole",
        OBJECT,
        "_compiled_call_impl training_step",
        _COMPILED,
    ),
    Replaced(
        "`compile` of `torch` and of `torch.nn.Module`",
        f"{MODULE}, {CLASS}",
        "compile",
        "the hooks of a module must not be compiled",
        when=_IN_TRAINING,
    ),
    Replaced(
        "`torch.jit._recursive.create_script_module`, and `__getstate__` of `torch.nn.Module`",
        f"{MODULE}, {CLASS}",
        "create_script_module __getstate__",
        "TorchScript compiles hooks, and pickle writes them",
    ),
    Replaced(
        "the collectives of `torch.distributed.ProcessGroup`; the waits of `Work` and of"
        " `AsyncCollectiveTensor`; `wait_event` and `wait_stream` of the device's streams",
        CLASS,
        " ".join([*_COLLECTIVES, "trigger_wait", "wait_event", "wait_stream"]),
        "hooks on collectives come with torch 2.15, and do not show their end",
        "with several ranks",
        "a call costs 1 to 3 us",
    ),
    Replaced(
        "`start` of the Trainer's profiler",
        OBJECT,
        "start",
        "no callback is called at a fetch, or around other callbacks",
        when=_IN_TRAINING,
        notes="a call costs under 0.1 us",
    ),
    Replaced(
        "`save_checkpoint` of the Trainer, `run` of its loops over an epoch and a validation,"
        " `on_run_end` of its `fit_loop`, `describe` of its profiler, and the broadcast between"
        " ranks at each batch",
        OBJECT,
        "save_checkpoint run on_run_end describe _broadcast_sigterm_tensor",
        "the profiler has no action for them",
        when=f"{_IN_TRAINING}; `save_checkpoint` from `setup` on",
    ),
    Replaced(
        "`__iter__` of `torch.utils.data.DataLoader`; while it runs, the loop of pin-memory"
        " threads; with `lightning-gputime run`, `__next__` of its iterators",
        f"{CLASS}, {MODULE}",
        "__iter__ _pin_memory_loop __next__",
        "a loader does not show its stages",
        when=_IN_TRAINING,
    ),
    Replaced(
        "transformers' Trainer: methods that run an epoch, fetch, evaluate, log or save,"
        " `on_epoch_begin` of its callback handler, events of its callbacks;"
        " TRL: `_calculate_rewards`, `generate` of vLLM",
        OBJECT,
        "_calculate_rewards _evaluate _finalize_training _save_checkpoint compute_metrics evaluate"
        " evaluation_loop get_batch_samples log prediction_step on_epoch_begin on_epoch_end"
        " on_evaluate on_log on_save on_step_begin on_step_end on_substep_end on_optimizer_step"
        " on_pre_optimizer_step _run_epoch"
        " training_step",  # Before transformers 5, in place of `_run_epoch`.
        "no callback is called at a fetch, around other callbacks, at rewards, or an error",
        when=_IN_TRAINING,
    ),
    Replaced(
        "`train` of the Trainer's class in transformers",
        CLASS,
        "train",
        "no callback is called before the set-up, or after an error",
        when="while a timer exists",
    ),
    Replaced(
        "transformers' models: `generate`, `generate_batch`; in its Trainer `_loss_function`",
        f"{CLASS}, {OBJECT}",
        "generate generate_batch _loss_function",
        _NO_HOOK,
    ),
)
"""All kinds. A hook that is registered through an interface of a library replaces nothing."""


def find(owner: object, name: str) -> Replaced | None:
    """Return the entry for `owner.name`, if it is in the register."""
    kind = CLASS if isinstance(owner, type) else MODULE if isinstance(owner, ModuleType) else OBJECT
    found = (
        item for item in REGISTER if kind in item.kind.split(", ") and name in item.names.split()
    )
    return next(found, None)
