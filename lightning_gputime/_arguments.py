"""Checks of what users pass in: they fail at once, with the value and the fix."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn


def check_options(
    prefix: str,
    lag: int,
    warmup_steps: int,
    history: int,
    annotate: Any,
    every_n_steps: int,
    probe_every_n_steps: int,
    sync_ranks: Any,
    on_step: Any,
    clock: Any,
) -> None:
    """Checks the options that both timers have.

    Raises:
        TypeError: If one has the wrong type.
        ValueError: If one has an impossible value.
    """
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string such as 'phase_time', got {prefix!r}")
    if not prefix or prefix != prefix.strip("/ "):
        raise ValueError(
            f"prefix must be a key such as 'phase_time', without outer '/', got {prefix!r}"
        )
    check_int("lag", lag, 0, "0 to have a step's times when it ends, 1 to keep the device busy")
    check_int(
        "warmup_steps", warmup_steps, 0, "the number of first steps to leave out of the summary"
    )
    check_int("history", history, 1, "the number of newest steps to keep")
    if sync_ranks is not True and sync_ranks is not False and sync_ranks != "log":
        raise ValueError(
            "sync_ranks must be True (compare the ranks at the end of each epoch), 'log' (at every"
            f" log) or False, got {sync_ranks!r}"
        )
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step must be a function of a StepTimes, or a metric, got {on_step!r}")
    check_int("every_n_steps", every_n_steps, 1, "one step in so many is timed")
    meaning = "one step in so many is probed, and the one after it not timed; 0 for none"
    check_int("probe_every_n_steps", probe_every_n_steps, 0, meaning)
    if 0 < probe_every_n_steps < 3:
        raise ValueError(
            f"probe_every_n_steps must be 0 or 3 or more ({meaning}), got {probe_every_n_steps}"
        )
    check_bools(annotate=annotate)
    methods = ("event", "host_ns", "is_capturing", "for_graphs")
    if clock is not None and not all(callable(getattr(clock, name, None)) for name in methods):
        raise TypeError(f"clock must have the methods {', '.join(methods)}, got {clock!r}")


def check_bools(**options: Any) -> None:
    """Checks options that are switches.

    Raises:
        TypeError: If one is neither True nor False.
    """
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_int(name: str, value: Any, least: int, meaning: str) -> None:
    """Checks an integer option.

    Raises:
        TypeError: If `value` is no integer.
        ValueError: If `value` is below `least`.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer ({meaning}), got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be {least} or more ({meaning}), got {value}")


def check_modules(modules: Any) -> Sequence[str] | Mapping[str, nn.Module]:
    """Returns `modules` if it names modules.

    Raises:
        TypeError: If it does not.
        ValueError: If it names one twice.
    """
    if isinstance(modules, Mapping):
        right = all(isinstance(module, nn.Module) for module in modules.values())
        names = list(modules)
    else:
        right = isinstance(modules, list | tuple)
        names = list(modules) if right else []
    if not right or not all(isinstance(name, str) and "/" not in name for name in names):
        raise TypeError(
            "modules must be a list of dotted names such as ['body', 'head.norm'], or a mapping"
            f" from names without '/' to modules, got {modules!r}"
        )
    if "comm" in names:
        raise ValueError(
            "modules must not name a module 'comm': 'backward/comm' is the wait for other ranks;"
            " give a mapping with another name"
        )
    if isinstance(modules, Mapping) and len({*map(id, modules.values())}) < len(modules):
        raise ValueError(f"modules must not name a module twice, got {names}")
    return cast("Sequence[str] | Mapping[str, nn.Module]", modules)
