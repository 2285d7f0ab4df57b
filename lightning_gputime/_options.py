"""Options that all timers share. Invalid values raise an error that names the value and the fix."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from math import isfinite
from numbers import Number
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_type_hints

from lightning_gputime._measurement.observers import is_observer
from lightning_gputime._messages import format_value, suggest
from lightning_gputime._output.loggers import GROUPS
from lightning_gputime._phases import StepTimes

if TYPE_CHECKING:
    from lightning_gputime._record.clock import Clock  # Imports torch.

AUTO = "auto"
LOG_GROUPS = ("default", "all", "phases", "comm", "slow", "fit")  # Accepted values of `log=`.
SyncRanks = bool | Literal["log"]
T = TypeVar("T")


class TimerOptions(TypedDict, total=False):
    """The options that every timer takes, by name.

    Attributes:
        prefix: First part of the logged keys.
        log: Groups of values to log: "default", "all", or a list. "default" contains the phases,
            the step, `host_wait_ms`, items and FLOPs per second, and the values that
            `sync_ranks="log"` adds. A list can also contain "comm", "slow", "fit" (`GPUPhaseTimer`
            only) and, in place of "default", "phases". Metrics of
            `observers` are always logged.
        warmup_steps: Number of first steps to exclude from the summary.
        history_size: Number of newest steps in `history` and in percentiles.
        lines: Whether to time each line of your code in a few steps, to name the line that takes
            the time. Python reports lines by `sys.monitoring`, before 3.12 by `sys.settrace`.
        annotate: Whether to show the phases as ranges in torch.profiler and Nsight Systems.
        every_n_steps: Time 1 of every n steps. "auto" times every step if the GPU sets the pace.
            Otherwise it times the first 100 steps, then a few steps in each log interval or in each
            500 steps, so that timing adds about 1 % to the time. It also times every step for
            `annotate`, a log at each step, and `observers` that take steps. Statistics exclude the
            steps in which lines are timed, unless every step is timed for one of these reasons.
        sync_ranks: When to compare the ranks of a distributed run: at the end of each epoch and of
            training (True), at every log ("log"), or never (False).
        items: Items per batch: a number, or a function of the batch. The default is the first
            dimension of the batch's first tensor, if all tensors in the batch share it.
        flops: FLOPs of forward and backward per item, as a single number or as two (forward,
            backward). Torch's `FlopCounterMode` counts them.
        observers: Functions, torchmetrics metrics, and objects with methods of `StepObserver`.
            They get the `StepTimes` of each timed step when it is read.
            Objects may also get slow steps, add metrics to logs, and add a section to the summary.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an invalid value.
    """

    prefix: str
    log: str | Sequence[str]
    warmup_steps: int
    history_size: int
    lines: bool
    annotate: bool
    every_n_steps: int | Literal["auto"]
    sync_ranks: SyncRanks
    # Number types come first, because LightningCLI uses the first type that fits a value.
    items: float | Callable[[Any], float] | None
    flops: float | Sequence[float] | None
    observers: Sequence[Callable[[StepTimes], object] | Any]


class AllOptions(TimerOptions, total=False):
    """`TimerOptions` and the private options of tests and benchmarks, which no signature shows."""

    _clock: "Clock | None"  # Replaces the device's clock.
    # Number of ended steps that the GPU may still be running after the host has waited for it. With
    # 1, the GPU has work during that wait.
    _lag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`TimerOptions` with their defaults. A bad value raises TypeError or ValueError."""

    prefix: str = "phase_time"
    log: str | Sequence[str] = "default"
    warmup_steps: int = 5
    history_size: int = 10_000
    lines: bool = True
    annotate: bool = False
    every_n_steps: int | Literal["auto"] = "auto"
    sync_ranks: SyncRanks = True
    items: Any = None
    flops: Any = None
    observers: Sequence[Any] = ()
    _clock: "Clock | None" = None
    _lag: int = 1

    def __post_init__(self) -> None:
        for name, minimum, meaning in (
            ("warmup_steps", 0, "number of first steps to exclude from the summary"),
            ("history_size", 1, "number of newest steps to keep"),
            ("every_n_steps", 1, "or 'auto'; 1 of every n steps is timed"),
        ):
            value = getattr(self, name)
            if name != "every_n_steps" or value != AUTO:
                object.__setattr__(self, name, check_int(name, value, minimum, meaning))
        for name in ("items", "flops"):
            object.__setattr__(self, name, _to_number(getattr(self, name)))
        check_bool("annotate", self.annotate)
        check_bool("lines", self.lines)

        def require(
            option: str, is_valid: bool, expected: str, error: type[Exception] = TypeError
        ) -> None:
            if not is_valid:
                value = format_value(getattr(self, option))
                raise error(f"{option} must be {expected}, got {value}")

        items, flops, prefix, observers = self.items, self.flops, self.prefix, self.observers
        # The type of an option is checked before its value.
        require(
            "items",
            items is None or callable(items) or _is_positive(items),
            "the number of items in a batch, a function that returns it for a batch, or None for"
            " the size of the batch's first tensor",
        )
        are_two = _is_several(flops) and len(flops) == 2 and all(map(_is_positive, flops))
        require(
            "flops",
            flops is None or _is_positive(flops) or are_two,
            "None, or the FLOPs per item (per token if items= counts tokens), as one number or as"
            " two (forward, backward). torch's FlopCounterMode counts them",
        )
        require("prefix", isinstance(prefix, str), "a string such as 'phase_time'")
        require(
            "observers",
            _is_several(observers) and all(map(is_observer, observers)),
            "a list of functions that take a StepTimes, metrics, or objects with methods of"
            " StepObserver",
        )
        require(
            "prefix",
            prefix != "" and prefix == prefix.strip("/ "),
            "a key such as 'phase_time', without '/' or spaces at its ends",
            ValueError,
        )
        groups = self.log if _is_several(self.log) else [self.log]
        require(
            "log",
            all(group in LOG_GROUPS for group in groups),
            f"one of, or a list of, {', '.join(LOG_GROUPS)}",
            ValueError,
        )
        require(
            "sync_ranks",
            isinstance(self.sync_ranks, bool) or self.sync_ranks == "log",
            "True (compare the ranks at the end of each epoch), 'log' (at every log) or False",
            ValueError,
        )

    @property
    def timed_warmup_steps(self) -> int:
        return self.warmup_steps // (1 if self.every_n_steps == AUTO else int(self.every_n_steps))

    @property
    def asked_groups(self) -> list[str]:
        """Names in `log`: groups, "default" or "all"."""
        return [self.log] if isinstance(self.log, str) else [*self.log]

    @property
    def logged_groups(self) -> frozenset[str]:
        groups = {*self.asked_groups}
        if "all" in groups:
            return frozenset(GROUPS)
        if "default" in groups:
            groups |= {"phases", "host", "work"}
            if self.sync_ranks == "log":
                groups.add("ranks")
        if "phases" in groups:
            groups.add("step")
        return frozenset(groups - {"default"})


def flag_note(text: str) -> str:
    """Return how to write the first option in a text as a flag of `run`; empty without options."""
    # Options that the advice of summaries names.
    found = re.search(r"\b(every_n_steps|flops|items)=(\w*)", text)
    if found is None:
        return ""
    name, value = found.groups()
    flag = f"--{name.replace('_', '-')} {value or 'VALUE'}"
    return f"With run, write options as flags: {flag} for {name}={value}"


def takes_options(cls: type[T]) -> type[T]:
    """Complete a timer whose constructor ends in `**options: Unpack[AllOptions]`.

    Its signature and docstring then name each option, for `help()` and LightningCLI.
    """
    init: Any = cls.__init__
    *named, last = inspect.signature(init).parameters.values()
    hints = get_type_hints(TimerOptions)
    option = last.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    in_place_of_last = [
        option.replace(name=field.name, default=field.default, annotation=hints[field.name])
        for field in fields(Options)
        if field.name in hints
    ]
    signature = inspect.signature(init).replace(parameters=[*named, *in_place_of_last])
    _, *known = signature.parameters  # Without `self`.
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    _, *by_position = [p.name for p in signature.parameters.values() if p.kind is positional]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        if surplus := args[len(by_position) :]:
            call = ", ".join([*by_position, "option=value"])
            raise TypeError(
                f"{cls.__name__} takes its options by name, got {format_value(surplus[0])} by"
                f" position: write {cls.__name__}({call})"
            )
        # `AllOptions` has private options as well, which tests pass.
        for option in options.keys() - known - AllOptions.__annotations__.keys():
            fix = suggest(option, known)
            if option == "save_path":  # Only `GPUPhaseTimer` has it.
                fix = "call timer.save(path) after the training"
            raise TypeError(f"{cls.__name__} has no option {option}: {fix}")
        init(self, *args, **options)

    checked.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` looks for
    cls.__init__ = checked  # type: ignore[method-assign]  # has the same arguments
    documentation = inspect.getdoc(TimerOptions) or ""
    entries = documentation.partition("Attributes:\n")[2].replace("\n", "\n    ")
    cls.__doc__ = re.sub(r"    \*\*options: .*", lambda _: entries, cls.__doc__ or "")
    return cls


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {format_value(value)}")


def _to_number(value: Any) -> Any:
    """Convert a number of another type, such as "3e9" from YAML or a NumPy scalar, to int or float.

    Convert each element of a sequence. Return other values unchanged.
    """
    if _is_several(value):
        return [*map(_to_number, value)]
    if isinstance(value, str | Number) and not isinstance(value, int):
        with suppress(TypeError, ValueError):
            number = float(value)  # type: ignore[arg-type]  # raises
            return int(number) if number.is_integer() else number
    return value


def check_int(name: str, value: Any, minimum: int, meaning: str) -> int:
    """Return `value` as an int. Errors contain the `name` and the `meaning` of the option."""
    number = _to_number(value)
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{name} must be an integer ({meaning}), got {format_value(number)}")
    if number < minimum:
        raise ValueError(f"{name} must be {minimum} or more ({meaning}), got {number}")
    return number


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and isfinite(value) and value > 0


def _is_several(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
