"""torch.compile, which changes the numerics and makes the first step long."""

from collections.abc import Iterator

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._tuning.change import LIGHTNING, TRANSFORMERS, Change, Report


def propose(advice: Advice, report: Report) -> Iterator[Change]:
    if advice.code != "compile":
        return
    if LIGHTNING in report.sites:
        code, settings = "fit(torch.compile(model))", {"compile": True}
        yield Change(code, settings=settings, effect="numerics")
    elif TRANSFORMERS in report.sites:
        arguments = {"torch_compile": True}
        yield Change("torch_compile=True", TRANSFORMERS, arguments, effect="numerics")
