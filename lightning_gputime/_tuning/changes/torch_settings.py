"""Global torch settings that select faster kernels, with different rounding."""

from collections.abc import Iterator

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._tuning.change import Change, Report

_CODES = {
    "float32_matmul_precision": ('torch.set_float32_matmul_precision("high")', "high"),
    "cudnn.benchmark": ("torch.backends.cudnn.benchmark = True", True),
}


def propose(advice: Advice, report: Report) -> Iterator[Change]:
    setting = advice.parameters.get("setting") if advice.code == "costly_setting" else None
    if setting in _CODES:
        code, value = _CODES[setting]
        yield Change(code, settings={setting: value}, effect="rounding")
