"""bfloat16 autocast, which changes the numerics and saves memory."""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._tuning.change import LIGHTNING, TRANSFORMERS, Change, Report

_ARGUMENTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    LIGHTNING: ('precision="bf16-mixed"', {"precision": "bf16-mixed"}),
    TRANSFORMERS: ("bf16=True", {"bf16": True}),
}


def propose(advice: Advice, report: Report) -> Iterator[Change]:
    if advice.code != "precision":
        return
    for target, (code, arguments) in _ARGUMENTS.items():
        if target in report.sites:
            yield Change(code, target, arguments, effect="numerics")
