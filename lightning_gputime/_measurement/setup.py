"""Setup and environment of a training run, and settings that may cost time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CostlySetting:
    """Setting that may cost time; its cost is not measured."""

    name: str  # Such as "detect_anomaly".
    text: str  # Possible cost, and advice.
    entry: str = ""  # Entry of the time breakdown that includes the cost; empty for the model.
    # Attribute of a `LineRow` that shows that a line runs the operations that the setting slows
    # down, such as "convolves"; empty if the cost does not depend on operations.
    operation: str = ""


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """Setup of a training run. Unknown values are None."""

    is_own_loop: bool = False  # No trainer runs the loop.
    has_loader: bool = False  # The timer has read the settings of a loader.
    is_iterable: bool = False  # The dataset is an IterableDataset: each worker has a copy of it.
    is_in_memory: bool = False  # The dataset is a TensorDataset.
    num_workers: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    foreign_loader: str = ""  # Class of a loader whose stages cannot be timed.
    loader_prefix: str = ""  # Prefix of the loader's options, such as "dataloader_".
    cores: int | None = None  # CPU cores per rank.
    batch_size: int | None = None
    precision: str = ""  # Such as "32-true", if a trainer reports it.
    has_bf16: bool = False  # The device multiplies bfloat16 faster than float32.
    compiled: bool = False  # torch compiles at least a part of the model.
    unfused: str = ""  # Class of optimizers that could be fused but are not.
    costly_settings: tuple[CostlySetting, ...] = ()


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment of a run. Unknown values are empty or None.

    Attributes:
        device: Name of the GPU; without a GPU, of the CPU.
        device_type: Type of the device, such as "cuda" or "cpu".
        cuda: Version of CUDA that torch was built with.
        torch: Version of torch.
        lightning: Version of Lightning.
        package: Version of lightning_gputime.
        world_size: Number of processes that train together.
        rank: Rank of this process.
        precision: Precision of the trainer; in a plain loop, dtype of the parameters.
        compiled: True if torch compiles at least a part of the model.
        parameters: Number of parameters of the model.
        batch_size: Batch size of the loader.
        accumulate_grad_batches: Number of batches per step.
        commit: Git commit of the program.
        started: Start of the measurement (UTC, ISO 8601).
        options: Options of the timer that differ from their defaults, if JSON can store them.
    """

    device: str = ""
    device_type: str = ""
    cuda: str = ""
    torch: str = ""
    lightning: str = ""
    package: str = ""
    world_size: int = 1
    rank: int = 0
    precision: str = ""
    compiled: bool = False
    parameters: int = 0
    batch_size: int | None = None
    accumulate_grad_batches: int | None = None
    commit: str = ""
    started: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
