"""What is known of how a training is set up."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CostlySetting:
    """A setting that is known to cost time; how much was not measured.

    Attributes:
        name: Name, such as "detect_anomaly".
        entry: Entry of the time breakdown that it inflates.
        text: What it may cost, and what to do.
    """

    name: str
    entry: str
    text: str


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """How a training is set up, as far as its timer knows. Unknown values are None."""

    is_own_loop: bool = False  # No trainer runs it.
    has_loader: bool = False
    is_iterable: bool = False  # Each worker has a copy of the dataset.
    is_in_memory: bool = False  # The dataset is a TensorDataset.
    num_workers: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    loader_prefix: str = ""  # Prefix of the loader's options, as in transformers.
    cores: int | None = None  # Per rank.
    batch_size: int | None = None
    precision: str = ""  # Such as "32-true", if a trainer shows it.
    has_bf16: bool = False  # The device multiplies bfloat16 faster than float32.
    compiled: bool = False  # At least a part of the model, by torch.
    unfused: str = ""  # The class of the optimizers that could be fused, and are not.
    has_parts: bool = True  # There are modules inside the model.
    classes: Mapping[str, str] = field(default_factory=dict)  # Class names of selected modules.
    costly_settings: tuple[CostlySetting, ...] = ()
