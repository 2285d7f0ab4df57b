"""Internals of Lightning. Imports neither `lightning` nor `pytorch_lightning`: either may run."""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from lightning_gputime._compat import (
    Expected,
    Name,
    report,
    report_missing_of,
    version_of,
)
from lightning_gputime._phases import CALLBACKS, COPY, DATA, FETCH, is_metric, label_of_callback

TRAINING = {
    "lightning.pytorch.trainer.trainer": "fit",
    "pytorch_lightning.trainer.trainer": "fit",
}
"""Modules of the Trainer, and the name of the function that trains."""

_PACKAGES = ("lightning", "pytorch_lightning")

_EPOCH_LOOP = Name(
    "lightning.pytorch.loops.fit_loop._FitLoop.epoch_loop",
    "validations inside an epoch, and the step numbers of Lightning's loggers",
)
_LOOP = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"
_STEPS = Name(f"{_LOOP}._batches_that_stepped", "the step numbers of Lightning's loggers")
_VALIDATION = Name(f"{_LOOP}.val_loop", "the start of a validation inside an epoch")
_BROADCAST = Name(
    f"{_LOOP}._broadcast_sigterm_tensor", "the wait for other ranks before each batch", (DATA,)
)
_COMPILED_STEP = Name("lightning.pytorch.LightningModule._compiler_ctx", "a compiled training_step")
# Without this name, hooks that do nothing are called.
_CALL_HOOKS = Name("lightning.pytorch.trainer.call._call_callback_hooks")
_LIVE_METRICS = Name(
    "lightning.pytorch.Trainer.callback_metrics", "phase times in trainer.callback_metrics"
)


def report_missing_names(trainer: Any, model: Any) -> None:
    loop = _epoch_loop(trainer)
    if loop is None:
        report(_EPOCH_LOOP, library=_package_of(trainer))
    else:
        report_missing_of(loop, _STEPS, _VALIDATION)
        numbers = version_of(_package_of(trainer)).split(".")[:2]
        # Since 2.6 Lightning broadcasts a flag; see `sigterm_broadcast`.
        is_new = all(map(str.isdigit, numbers)) and [*map(int, numbers)] >= [2, 6]
        if trainer.world_size > 1 and is_new:
            report_missing_of(loop, _BROADCAST)
    # `publish` updates this dict in place, so each access must return the same dict.
    live = _LIVE_METRICS.of(trainer)
    if not isinstance(live, dict) or _LIVE_METRICS.of(trainer) is not live:
        report(_LIVE_METRICS, library=_package_of(trainer))
    report_missing_of(model, _COMPILED_STEP)


def _epoch_loop(trainer: Any) -> Any:
    return _EPOCH_LOOP.of(getattr(trainer, "fit_loop", None))


def _package_of(trainer: Any) -> str:
    roots = [kind.__module__.partition(".")[0] for kind in type(trainer).__mro__]
    return next((root for root in roots if root in _PACKAGES), _PACKAGES[0])


def step_counter(trainer: Any) -> Callable[[], int]:
    """Return a function that returns the number Lightning logs the current step under."""
    loop = _epoch_loop(trainer)
    if _STEPS.is_in(loop):
        return partial(getattr, loop, _STEPS.attribute)
    # The next best has already counted this step. It counts each optimizer that Lightning wraps, so
    # a batch with two of them counts twice, and a batch without any does not count.
    return lambda: max(trainer.global_step - 1, 0)


def is_step_compiled(model: Any) -> bool:
    return _COMPILED_STEP.of(model) is not None


def sigterm_broadcast(trainer: Any) -> tuple[Any, str] | None:
    """Return the object and the method name that wait for other ranks at each batch, or None.

    Since 2.6 Lightning broadcasts a SIGTERM flag in every batch, and reads it with `.item()`: a
    collective and a host wait.
    """
    loop = _epoch_loop(trainer)
    has_broadcast = trainer.world_size > 1 and _BROADCAST.is_in(loop)
    return (loop, _BROADCAST.attribute) if has_broadcast else None


def loop_entries(trainer: Any) -> dict[str, tuple[Any, str]]:
    """Return the objects and method names that run an epoch and a validation, and end a fit."""
    epoch, fit = _epoch_loop(trainer), getattr(trainer, "fit_loop", None)
    entries = {
        "epoch": (epoch, "run"),
        "validation": (_VALIDATION.of(epoch), "run"),
        "end": (fit, "on_run_end"),
    }
    return {name: entry for name, entry in entries.items() if hasattr(*entry)}


def publish(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Add metrics to `callback_metrics`, where other callbacks look for them."""
    # Update in one call, because each access collects all metrics.
    live = _LIVE_METRICS.of(trainer)
    if isinstance(live, dict):
        values = torch.tensor([*metrics.values()]).unbind()  # Faster than a call for each metric.
        live.update(zip(metrics, values, strict=True))


def is_idle(profiler: object) -> bool:
    """Return whether this is the default profiler of a Trainer, which does nothing."""
    return type(profiler).__name__ == "PassThroughProfiler" and "start" not in vars(profiler)


# Names of the actions that a Trainer reports to its profiler.

_FETCH_ACTION = "train_dataloader_next"
_COPY_ACTION = "batch_to_device"
_PER_BATCH = ("on_train_batch_start", "on_train_batch_end")
IN_STEP = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Hooks inside a step. A trainer calls them on the callbacks first, then on the module."""


def fetch_action(trainer: Any) -> str:
    """Return the name of the profiler's action in which the loop fetches a batch."""
    loop = _epoch_loop(trainer)
    name = _LOOP.rpartition(".")[2] if loop is None else type(loop).__name__
    return f"[{name}].{_FETCH_ACTION}"


def copy_action(trainer: Any) -> str:
    """Return the name of the profiler's action that copies a batch to the device."""
    return f"[Strategy]{type(trainer.strategy).__name__}.{_COPY_ACTION}"


def callback_action(callback: Any, hook: str) -> str:
    return f"[Callback]{callback.state_key}.{hook}"


def module_action(trainer: Any, module: Any, hook: str) -> str:
    """Return the name of the action that runs a hook of a LightningModule or datamodule."""
    # Compare with the trainer's module, because two packages define a LightningModule class.
    kind = "LightningModule" if module is trainer.lightning_module else "LightningDataModule"
    return f"[{kind}]{type(module).__name__}.{hook}"


def defines(owner: object, hook: str) -> bool:
    """Return whether a callback or module overrides a hook."""
    module = getattr(getattr(owner, hook, None), "__module__", None) or ""
    bases = (".callbacks.callback", ".core.hooks", ".core.module")
    return getattr(owner, hook, None) is not None and not module.endswith(bases)


def skips_absent_hooks(trainer: Any, callback: Any) -> bool:
    """Return whether a Trainer skips a hook of this callback that is None.

    Else it takes several us to call a hook that does nothing. False if the Trainer does not call
    the hooks itself, because the callback is part of another.
    """
    if not any(each is callback for each in trainer.callbacks):
        return False
    # Trainers call hooks with a function of the module next to theirs. Try it with a hook of None.
    modules = [kind.__module__ for kind in type(trainer).__mro__ if kind.__module__ in TRAINING]
    package = modules[0].rpartition(".")[0] if modules else ""
    call_hooks = _CALL_HOOKS.of(sys.modules.get(f"{package}.call"))
    trial = SimpleNamespace(callbacks=[SimpleNamespace(hook=None)], lightning_module=None)
    try:
        call_hooks(trial, "hook")  # Also raises if this version has no such function.
    except Exception:
        return False
    return True


LOGGER_METHODS = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize")
METRIC_METHODS = ("update", "compute")


def functions_to_name(trainer: Any, model: Any, timer_class: type) -> Iterator[Any]:
    """Yield functions that a Trainer calls, to name as the reason for time.

    These are hooks of callbacks except those of `timer_class`, and methods of loggers, metrics and
    optimizers.
    """
    yield from (trainer.save_checkpoint, model.log, trainer.strategy.batch_to_device)
    yield torch.nn.utils.clip_grad_norm_
    for callback in trainer.callbacks:
        if not isinstance(callback, timer_class):
            hooks = (name for name in dir(type(callback)) if name.startswith("on_"))
            yield from (getattr(callback, hook) for hook in hooks if defines(callback, hook))
    for logger in trainer.loggers:
        yield from (getattr(logger, method, None) for method in LOGGER_METHODS)
    for module in model.modules():
        if is_metric(module):
            yield from (getattr(module, method, None) for method in METRIC_METHODS)
    yield from (type(optimizer).step for optimizer in trainer.optimizers)


def expected_of(trainer: Any, callbacks: list[Any]) -> list[Expected]:
    """Return the labels that each step has if the trainer reports its actions and callback hooks.

    The self-check uses them to find out what cannot be measured with this version.
    """
    package = _package_of(trainer)
    reports = f"{package} {version_of(package)} reported no"
    labels = [
        label_of_callback(callback, hook)
        for callback in callbacks
        for hook in _PER_BATCH
        if defines(callback, hook)
    ]
    expected = [
        Expected(
            frozenset({FETCH}),
            "separate times of data/fetch and callbacks",
            f"{reports} `{_FETCH_ACTION}`",
            blurred=(DATA, CALLBACKS),
        ),
        Expected(
            frozenset({COPY}),
            "separate times of data/copy and data/fetch",
            f"{reports} `{_COPY_ACTION}`",
            blurred=(DATA,),
        ),
    ]
    if labels:
        expected.append(
            Expected(
                frozenset(labels),
                "separate times of callbacks and data",
                f"{reports} hook of a callback",
                blurred=(DATA, CALLBACKS),
            )
        )
    return expected
