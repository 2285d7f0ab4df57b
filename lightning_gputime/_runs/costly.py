"""Settings that may cost time, read from public attributes and environment variables."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gputime._compat.torch_ import is_checkpointed
from lightning_gputime._diagnosis.codes import COMMUNICATION
from lightning_gputime._instrumentation.loaders import attribute
from lightning_gputime._instrumentation.loop import Loop
from lightning_gputime._measurement.setup import CostlySetting, TrainingSetup
from lightning_gputime._measurement.threads import ThreadTimes
from lightning_gputime._measurement.units import percent
from lightning_gputime._measurement.wall_clock import FIRST_STEP
from lightning_gputime._phases import BACKWARD, CALLBACKS, FETCH
from lightning_gputime._runs.environment import Environment

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_FLOAT32 = ("float32", "32-true")  # Precisions without autocast, as far as the timer can tell.
_TF32_CAPABILITY = (8, 0)  # The first compute capability of CUDA with TF32.
_MIN_CORE_WAIT = 0.2  # Shorter waits for a CPU core, as a fraction of the time, are not reported.
_MAX_NAMES = 3  # Number of modules to name.
_MIN_THREAD = 0.3  # Other Python threads that run a smaller fraction of the time are ignored.


@dataclass(frozen=True, slots=True)
class CostlySettings:
    """Facts about a training with which `read` finds costly settings. Keeps no model alive.

    Attributes:
        environment: Environment of the training.
        logging: Option that makes the trainer log every step; empty if none.
        has_convolutions: True if the model has convolutions.
        repeats_forward: True if a part of the model uses gradient checkpointing.
        finds_unused: True if DDP searches for unused parameters.
        threads: CPU time of the Python threads; None if not measured.
        not_updated: Modules and parameters that have gradients, and that no optimizer has updated.
    """

    environment: Environment = field(default_factory=Environment)
    logging: str = ""
    has_convolutions: bool = False
    repeats_forward: bool = False
    finds_unused: bool = False
    threads: ThreadTimes | None = None
    not_updated: tuple[str, ...] = ()

    @classmethod
    def of(cls, environment: Environment, loop: Loop, threads: ThreadTimes | None = None) -> Self:
        """Return the facts about a loop."""
        modules = [*nn.Module.modules(loop.called)]
        return cls(
            environment=environment,
            logging=loop.every_step_log,
            has_convolutions=any(isinstance(module, _CONVOLUTIONS) for module in modules),
            repeats_forward=any(map(is_checkpointed, modules)),
            finds_unused=any(
                isinstance(module, DistributedDataParallel)
                and attribute(module, "find_unused_parameters") is True
                for module in modules
            ),
            threads=threads,
        )

    def read(self, setup: TrainingSetup) -> tuple[CostlySetting, ...]:
        """Return the settings that may cost time now.

        Never raise: after an error, return the settings found so far, because only advice is lost.
        """
        found: list[CostlySetting] = []
        with suppress(Exception):
            for setting in chain(
                self._of_training(setup),
                self._of_cores(setup.cores),
                self._of_threads(),
                self._of_torch(),
                self._of_variables(),
            ):
                found.append(setting)
        return tuple(found)

    def _of_training(self, setup: TrainingSetup) -> Iterator[CostlySetting]:
        if option := self.logging:
            text = f"{option}=1 may cost time in loggers: log every 50 steps, for example"
            yield CostlySetting(option, text, CALLBACKS)
        if self.repeats_forward:
            yield CostlySetting(
                "gradient_checkpointing",
                "gradient checkpointing may cost time in backward, which repeats parts of forward:"
                " turn it off if memory suffices",
            )
        if names := self.not_updated:
            shown = ", ".join(f"`{name}`" for name in names[:_MAX_NAMES])
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            yield CostlySetting(
                "unused_gradients",
                f"backward computes gradients of {shown}{more}, which no optimizer has updated:"
                " call requires_grad_(False) on them before training",
                BACKWARD,
            )
        if self.finds_unused:
            yield CostlySetting(
                "find_unused_parameters",
                "find_unused_parameters=True may cost time after forward, in a search of the"
                " autograd graph: set it to False if no parameter is unused",
            )
        # Only loaders of transformers have a prefix. They copy to the GPU inside the fetch. Copies
        # of other loaders are in `data/copy`, which has its own advice.
        if self._is_cuda and setup.pin_memory is False and setup.loader_prefix:
            option = f"{setup.loader_prefix}pin_memory"
            yield CostlySetting(
                option,
                f"{option}=False may cost time in copies to the GPU, which `{FETCH}` includes:"
                " set it to True",
                FETCH,
            )

    def _of_cores(self, cores: int | None) -> Iterator[CostlySetting]:
        if cores is None:
            return
        threads = torch.get_num_threads()
        # Only check the threads of torch on a CPU: with a GPU, few operations use them.
        if threads > cores and self.environment.device_type == "cpu":
            yield CostlySetting(
                "num_threads",
                f"{threads} threads of torch may cost time in every operation on {cores} CPU cores:"
                f" call torch.set_num_threads({cores}), or set OMP_NUM_THREADS={cores}",
            )
        # On a CPU, all times exclude these waits; see `LoopTime`.
        share = 0.0
        if self.threads is not None and self.environment.device_type != "cpu":
            share = self.threads.core_wait_share()
        if share >= _MIN_CORE_WAIT:
            yield CostlySetting(
                "busy_cores",
                f"busy CPU cores may cost time in all phases: the loop's thread waited"
                f" {percent(share)} of the time for one of {cores} CPU cores; run fewer threads,"
                " workers and other processes",
            )

    def _of_threads(self) -> Iterator[CostlySetting]:
        thread, share = ("", 0.0) if self.threads is None else self.threads.busiest_other()
        if share >= _MIN_THREAD:
            yield CostlySetting(
                "busy_thread",
                f"the Python thread `{thread}` may cost time in all phases: it ran"
                f" {percent(share)} of the time, and only one thread at a time runs Python code;"
                " move its work to a process",
            )

    def _of_torch(self) -> Iterator[CostlySetting]:
        if torch.is_anomaly_enabled():
            yield CostlySetting(
                "detect_anomaly",
                "detect_anomaly=True may cost time in forward and backward: turn it off after"
                " debugging",
            )
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        if is_deterministic:
            yield CostlySetting(
                "deterministic_algorithms",
                "deterministic algorithms may cost time in forward and backward: turn them off if"
                " results do not have to be bitwise reproducible",
            )
        if torch.version.debug:
            yield CostlySetting(
                "debug_build",
                "a debug build of torch may cost time in every operation: install a release build",
            )
        if not self._is_cuda:
            return
        cudnn = torch.backends.cudnn
        # The benchmark may choose a different algorithm in each run, so a training that must be
        # repeatable cannot use it.
        must_be_repeatable = is_deterministic or cudnn.deterministic
        if self.has_convolutions and cudnn.enabled and not (cudnn.benchmark or must_be_repeatable):
            yield CostlySetting(
                "cudnn.benchmark",
                "cudnn.benchmark=False may cost time in convolutions: set"
                " torch.backends.cudnn.benchmark = True if inputs have fixed shapes",
                operation="convolves",
            )
        if self.environment.precision in _FLOAT32 and _has_unused_tf32():
            yield CostlySetting(
                "float32_matmul_precision",
                'float32 matmul precision "highest" may cost time in matrix products outside of'
                ' autocast: torch.set_float32_matmul_precision("high") uses TF32',
                operation="multiplies_float32",
            )

    def _of_variables(self) -> Iterator[CostlySetting]:
        if self._is_cuda and _is_on("CUDA_LAUNCH_BLOCKING"):
            yield CostlySetting(
                "CUDA_LAUNCH_BLOCKING",
                "CUDA_LAUNCH_BLOCKING=1 may cost time in all phases, and distorts all times, as the"
                " CPU waits for each kernel: unset it and time again",
            )
        if _is_on("TORCH_LOGS"):
            # The compiler writes most of these logs, in the first step.
            entry = FIRST_STEP if self.environment.compiled else ""
            text = "TORCH_LOGS may cost time for each log of torch: unset it after debugging"
            yield CostlySetting("TORCH_LOGS", text, entry)
        if _is_on("TORCH_SHOW_CPP_STACKTRACES"):
            yield CostlySetting(
                "TORCH_SHOW_CPP_STACKTRACES",
                "TORCH_SHOW_CPP_STACKTRACES=1 may cost time for each error of torch, even if it is"
                " caught: unset it after debugging",
            )
        if self.environment.world_size == 1:
            return
        if _value("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
            yield CostlySetting(
                "TORCH_DISTRIBUTED_DEBUG",
                "TORCH_DISTRIBUTED_DEBUG=DETAIL may cost time in each collective, because it checks"
                " them: unset it after debugging",
                COMMUNICATION,
            )
        level = _value("NCCL_DEBUG")
        if self._is_cuda and level in ("INFO", "TRACE"):
            text = f"NCCL_DEBUG={level} may cost time in collectives: unset it after debugging"
            yield CostlySetting("NCCL_DEBUG", text, COMMUNICATION)

    @property
    def _is_cuda(self) -> bool:
        return self.environment.device_type == "cuda"


def merge(*readings: Iterable[CostlySetting]) -> tuple[CostlySetting, ...]:
    """Return the settings of several readings without duplicates."""
    return tuple({setting.name: setting for found in readings for setting in found}.values())


def _has_unused_tf32() -> bool:
    """Return True if the current GPU has TF32, but float32 matrix products do not use it."""
    if torch.version.hip or torch.cuda.get_device_capability() < _TF32_CAPABILITY:
        return False
    # torch 2.9 added this attribute. If it is set, `get_float32_matmul_precision` may raise.
    if attribute(torch.backends.cuda.matmul, "fp32_precision") == "tf32":
        return False
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        return True


def _value(variable: str) -> str:
    """Return an environment variable in upper case; empty if it is not set."""
    return os.environ.get(variable, "").strip().upper()


def _is_on(variable: str) -> bool:
    return _value(variable) not in ("", "0", "FALSE", "OFF")
