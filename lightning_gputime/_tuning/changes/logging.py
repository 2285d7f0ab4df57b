"""Logging less often: loggers get fewer values."""

from collections.abc import Iterator

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._tuning.change import LIGHTNING, TRANSFORMERS, Change, Report

_EVERY = 50  # Lightning's default.
_OPTIONS = {LIGHTNING: "log_every_n_steps", TRANSFORMERS: "logging_steps"}
_SETTINGS = ("log_every_n_steps", "logging_steps")


def propose(advice: Advice, report: Report) -> Iterator[Change]:
    is_logging = advice.code == "log_less"
    if not is_logging and advice.parameters.get("setting") not in _SETTINGS:
        return
    for target, option in _OPTIONS.items():
        if target in report.sites:
            code, arguments = f"{option}={_EVERY}", {option: _EVERY}
            yield Change(code, target, arguments)
