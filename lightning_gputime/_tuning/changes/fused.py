"""Fused optimizers: the same update in fewer kernels, with different rounding."""

from collections.abc import Iterator

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._tuning.change import Change, Report


def propose(advice: Advice, report: Report) -> Iterator[Change]:
    if advice.code == "fused":
        name = str(advice.parameters["optimizer"]).rpartition(".")[2]
        target = f"torch.optim:{name}"
        if target in report.sites:
            yield Change(f"{name}(fused=True)", target, {"fused": True}, effect="rounding")
