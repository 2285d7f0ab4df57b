"""Setup of a training run: loader, precision, compilation, and settings that may cost time."""

from dataclasses import dataclass


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
