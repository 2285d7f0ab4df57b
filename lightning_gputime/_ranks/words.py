"""Sentences on the straggler. `RankSummary` has them; the advice is in `_diagnosis.advice`."""

from collections.abc import Sequence

from lightning_gputime._messages import duration, percent
from lightning_gputime._phases import BACKWARD


def straggler(last: int, stragglers: Sequence[int], excess_ms: float, where: str) -> str:
    """Return the sentence on the stragglers, which ends with `where`."""
    subject = f"rank {last} is"
    if len(stragglers) > 1:
        more = f" and {len(stragglers) - 8} more" if len(stragglers) > 8 else ""
        subject = f"ranks {', '.join(map(str, stragglers[:8]))}{more} are up to"
    return f"{subject} {duration(excess_ms)} per step slower than the median of the others, {where}"


# Ends of this sentence


def in_phase(phase: str, *, has_waits: bool) -> str:
    return f"in {phase} compute" if has_waits else f"in {phase}"


def in_line(line: str, pace: str, *, is_most: bool) -> str:
    """Return the place of an excess. `pace` is empty if the host sets the pace of all lines."""
    return f"{'in' if is_most else 'mostly in'} {line}{pace and f', {pace}-paced'}"


def every_line(factor: float, side: str, reason: str) -> str:
    return f"because its {side} needs {factor:.1f} times as long for every line: {reason}"


def core_wait(share: float, usual_share: float) -> str:
    others = f"(others {percent(usual_share)})"
    return f"it waits for a CPU core for {percent(share)} of the time {others}"


def more_content(unit: str, amount: float, usual_amount: float) -> str:
    """Return how much more the batches of a rank contain."""
    both = f"({amount:,.0f} and {usual_amount:,.0f} per step)"
    return f"{amount / usual_amount:.1f} times the {unit} of the others {both}"


# Notes


def wait(who: str, ms: float, line: str, phase: str) -> str:
    where = f"the backward of {line}" if phase.startswith(BACKWARD) else f"{line}, in {phase}"
    return f"{who} {duration(ms)} per step in {where}"


def same(n_stragglers: int, count: int, n: int, windows: str, cost_ms: float) -> str:
    """Return the note on stragglers that are last in `count` of `n` windows. So do the next two."""
    who = "the same rank is" if n_stragglers == 1 else "the same ranks are"
    return f"{who} last in {count} of {n} {windows}, {_cost(cost_ms)}"


def rotating(n_ranks: int, count: int, n: str, windows: str, cost_ms: float) -> str:
    who = f"the straggler changes: {n_ranks} ranks are last in turn"
    return f"{who} in {count} of {n} {windows}, {_cost(cost_ms)}"


def transient(rank: int, where: str, cost_ms: float) -> str:
    return f"rank {rank} is last only in {where}, {_cost(cost_ms)} over the run"


def _cost(ms: float) -> str:
    return f"which costs {duration(ms)} per step"
