"""The options that all timers share, checked once: they fail at once, with value and fix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lightning_gputime._phases import check_name
from lightning_gputime._record.clock import Clock

SyncRanks = bool | Literal["log"]
Modules = Sequence[str] | Mapping[str, nn.Module]

_PROBES = "one step in so many is probed, and the one after it not timed; 0 for none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How steps are timed. The docstrings of `GPUPhaseTimer` and `GPUPhaseHooks` explain each.

    Raises:
        TypeError: If one has the wrong type.
        ValueError: If one has an impossible value.
    """

    prefix: str = "phase_time"
    lag: int = 1
    warmup_steps: int = 5
    history: int = 10_000
    modules: Modules = ()
    annotate: bool = False
    every_n_steps: int = 1
    probe_every_n_steps: int = 0
    max_overhead: float | None = None
    sync_ranks: SyncRanks = True
    on_step: Any = None
    on_slow_step: Any = None
    clock: Clock | None = None

    def __post_init__(self) -> None:
        check_int(
            "lag", self.lag, 0, "0 to have a step's times when it ends, 1 to keep the device busy"
        )
        check_int(
            "warmup_steps",
            self.warmup_steps,
            0,
            "the number of first steps to leave out of the summary",
        )
        check_int("history", self.history, 1, "the number of newest steps to keep")
        check_int("every_n_steps", self.every_n_steps, 1, "one step in so many is timed")
        check_int("probe_every_n_steps", self.probe_every_n_steps, 0, _PROBES)
        check_bools(annotate=self.annotate)
        _check_prefix(self.prefix)
        _check_probes(self.probe_every_n_steps)
        _check_max_overhead(self.max_overhead, self.every_n_steps)
        _check_sync_ranks(self.sync_ranks)
        _check_on_step(self.on_step)
        if self.on_slow_step is not None and not callable(self.on_slow_step):
            raise TypeError(
                f"on_slow_step must be a function of a SlowStep, got {self.on_slow_step!r}"
            )
        _check_clock(self.clock)
        _check_modules(self.modules)

    @property
    def timed_warmup_steps(self) -> int:
        """How many of the timed steps belong to the warm-up."""
        return self.warmup_steps // self.every_n_steps


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


def _check_prefix(prefix: Any) -> None:
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string such as 'phase_time', got {prefix!r}")
    if not prefix or prefix != prefix.strip("/ "):
        raise ValueError(
            f"prefix must be a key such as 'phase_time', without outer '/', got {prefix!r}"
        )


def _check_probes(every_n_steps: int) -> None:
    if 0 < every_n_steps < 3:
        raise ValueError(
            f"probe_every_n_steps must be 0 or 3 or more ({_PROBES}), got {every_n_steps}"
        )


def _check_max_overhead(most: Any, every_n_steps: int) -> None:
    if most is None:
        return
    meaning = "the part of the training's time that timing may take, such as 0.01"
    if not isinstance(most, int | float) or isinstance(most, bool):
        raise TypeError(f"max_overhead must be a number ({meaning}) or None, got {most!r}")
    if not 0 < most < 1:
        raise ValueError(f"max_overhead must be above 0 and below 1 ({meaning}), got {most}")
    if every_n_steps != 1:
        raise ValueError(
            "max_overhead decides how many steps are timed: leave every_n_steps out, got"
            f" {every_n_steps}"
        )


def _check_sync_ranks(sync_ranks: Any) -> None:
    if sync_ranks is not True and sync_ranks is not False and sync_ranks != "log":
        raise ValueError(
            "sync_ranks must be True (compare the ranks at the end of each epoch), 'log' (at every"
            f" log) or False, got {sync_ranks!r}"
        )


def _check_on_step(on_step: Any) -> None:
    if on_step is not None and not callable(on_step):
        raise TypeError(f"on_step must be a function of a StepTimes, or a metric, got {on_step!r}")


def _check_clock(clock: Any) -> None:
    methods = ("event", "host_ns", "is_capturing", "for_graphs")
    if clock is not None and not all(callable(getattr(clock, name, None)) for name in methods):
        raise TypeError(f"clock must have the methods {', '.join(methods)}, got {clock!r}")


def _check_modules(modules: Any) -> None:
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
    if isinstance(modules, Mapping):
        for name in names:
            try:
                check_name(name)
            except ValueError as error:
                raise ValueError(f"modules: {error}") from None
    if "comm" in names:
        raise ValueError(
            "modules must not name a module 'comm': 'backward/comm' is the wait for other ranks;"
            " give a mapping with another name"
        )
    if isinstance(modules, Mapping) and len({*map(id, modules.values())}) < len(modules):
        raise ValueError(f"modules must not name a module twice, got {names}")
