"""What bounds a training, judged by the statistics of its phases."""

from collections.abc import Mapping

from lightning_gputime._phases import CALLBACKS, COPY, DATA, FETCH, WAIT, is_wait
from lightning_gputime._results.stats import PhaseStats

Rows = Mapping[str, PhaseStats]

_HOLDS_UP = {
    DATA: "input-bound",
    FETCH: "input-bound",
    COPY: "copy-bound",
    CALLBACKS: "callback-bound",
    WAIT: "rank-bound",
}
"""What a training is called that waits in a part of `data`."""

# From this part of a step on something holds it up.
_HELD_UP = 0.3

# From this part of a step on, waits for other ranks are told.
_LONG_WAITS = 0.05

MANY_GAPS = 0.1
"""From this part of a step on, launch gaps are worth an advice."""


def held_up_between_batches(rows: Rows) -> str:
    """Names the part of `data` that is 30 % of the step or more, or `data` itself."""
    # Where the parts are known, the whole says nothing about the loader.
    shares = {name: row.share for name, row in rows.items() if name in _HOLDS_UP}
    if len(shares) > 1:
        shares.pop(DATA, None)
    name = max(shares, key=shares.__getitem__, default=DATA)
    share = shares.get(name, 0.0)
    return f"{_HOLDS_UP[name]}: {share:.0%} of the step is `{name}`" if share >= _HELD_UP else ""


def held_up_by_ranks(rows: Rows) -> str:
    """Says it if waits for other ranks are 30 % of the step or more."""
    waits = {name: row.share for name, row in rows.items() if is_wait(name)}
    share = sum(waits.values())
    if share < _HELD_UP:
        return ""
    most = max(waits, key=waits.__getitem__)
    return f"communication-bound: {share:.0%} of the step is waits, most of it `{most}`"


def pace(rows: Rows, step: PhaseStats, host_wait_ms: float, gap_share: float | None) -> str:
    """Says who sets the pace, the device or its host.

    Args:
        rows: The phases.
        step: Whole steps.
        host_wait_ms: How long the host waits for the device in a step (in milliseconds).
        gap_share: The part of the step in which the device waits for launches, if it is known.
    """
    waited = f"waited {host_wait_ms:.3g} of {step.mean_ms:.3g} ms a step"
    if host_wait_ms >= 0.1 * step.mean_ms:
        return f"GPU-bound: the host {waited} for the GPU"
    # What the device takes longer for than the host is queued behind the host. Where the host
    # takes longer, it works (a fetch) or waits inside the step (a copy, `.item()`).
    behind = {
        name: row.n * (row.mean_ms - row.host_mean_ms) / step.n
        for name, row in rows.items()
        if "/" not in name
    }
    ahead = sum(ms for ms in behind.values() if ms > 0)
    if ahead >= 0.2 * step.mean_ms:
        grounds = f"for {ahead:.3g} of {step.mean_ms:.3g} ms a step the GPU ran behind the host"
        late = [name for name, ms in behind.items() if -ms >= 0.05 * step.mean_ms]
        if not late:
            return f"GPU-bound: {grounds}"
        named = ", ".join(f"`{_part(name, rows)}`" for name in late)
        return f"mixed: {grounds}, which worked or waited in {named}"
    if gap_share is not None and gap_share < MANY_GAPS:
        return "GPU-bound: the GPU hardly waited for launches"
    return f"launch-bound: the GPU waited for the host, which {waited} for the GPU"


def _part(name: str, rows: Rows) -> str:
    """Returns the part of `data` in which the host was for most of it; else the name."""
    parts = [part for part in rows if name == DATA and part in _HOLDS_UP and part != DATA]
    took = {part: rows[part].n * rows[part].host_mean_ms for part in parts}
    longest = max(took, key=took.__getitem__, default=name)
    return longest if 2 * took.get(longest, 0.0) >= rows[name].n * rows[name].host_mean_ms else name


def wait_sentence(rows: Rows, step: PhaseStats) -> str:
    """Says how long waits for other ranks are, and where, from 5 % of the step on."""
    waits = {name: row.share * step.mean_ms for name, row in rows.items() if is_wait(name)}
    all_ms = sum(waits.values())
    if all_ms < _LONG_WAITS * step.mean_ms or not waits:
        return ""
    longest = sorted(waits, key=lambda name: -waits[name])
    parts = [f"`{name}` {waits[name]:.3g}" for name in longest if 10 * waits[name] >= all_ms]
    # Only a trainer tells of the parts of `data`.
    asks = FETCH in rows and waits.get(WAIT, 0.0) >= _LONG_WAITS * step.mean_ms
    # Nobody but Lightning tells the copies apart.
    lightning = "Lightning asks all ranks before each batch"
    who = lightning if COPY in rows else "the Trainer asks all ranks before each step"
    why = f", in which {who}" if asks else ""
    return (
        f"{all_ms:.3g} of {step.mean_ms:.3g} ms a step are waits for other ranks and their"
        f" collectives: {', '.join(parts)}{why}"
    )
