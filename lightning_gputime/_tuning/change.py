"""A change to a training, and what a run reports."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_gputime._diagnosis.diagnosis import Advice

Effect = Literal["none", "rounding", "random numbers", "numerics"]

LOADER = "torch.utils.data:DataLoader"
LIGHTNING = "lightning.pytorch:Trainer"
TRANSFORMERS = "transformers:TrainingArguments"


@dataclass(frozen=True, slots=True)
class Change:
    """A change that can be applied without editing the script.

    Attributes:
        code: Text to write into the script, such as "num_workers=4".
        target: Class that gets the arguments, as "module:Class"; empty for none.
        arguments: Keyword arguments that replace those of the script.
        settings: Global settings of torch, by name.
        effect: Effect on the losses, which decides how far the mean loss may move. "none": no
            further than between runs without the change. "rounding": twice as far, or by 0.1 %.
            "random numbers": also by 3 standard errors. "numerics": any distance, so the change is
            tried only with `--allow-numerics`.
    """

    code: str
    target: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    effect: Effect = "none"


@dataclass(frozen=True, slots=True)
class Report:
    """Observations of the script's process in one run.

    Attributes:
        sites: Places where objects of each target were constructed, as "file:line".
        loader_site: Place where the training loader was constructed; empty if unknown.
        loader: Options of that loader; empty if unknown.
        applied: Codes of the changes that were applied.
        losses: Scalars on which backward was called, in order.
        steps: Number of updates of the first optimizer.
    """

    sites: Mapping[str, list[str]] = field(default_factory=dict)
    loader_site: str = ""
    loader: Mapping[str, Any] = field(default_factory=dict)
    applied: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    steps: int = 0

    def where(self, change: Change) -> str:
        """Return the place in the script where a change belongs; empty if it can go anywhere."""
        if change.target == LOADER and self.loader_site:
            return self.loader_site
        return next(iter(self.sites.get(change.target, ())), "")


Proposal = Callable[[Advice, Report], Iterator[Change]]
"""Function that returns the changes that a piece of advice on a run suggests."""
