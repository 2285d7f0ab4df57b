"""What a rank adds up and sends, to be set beside the others."""

from collections.abc import Iterable, Mapping

from lightning_gputime._phases import is_wait, of_one_callback
from lightning_gputime._results.noise import Noise
from lightning_gputime._results.sums import Sums

Totals = Mapping[str, tuple[float, int]]
"""What one rank adds up: for each phase, and for "step", the sum of its times (in milliseconds)
and the number of steps in which it ran. For `noise(scale)` that of changes, see `Noise`; for
`STAGE` that of the rank's place in a pipeline; for `ITEMS` and `ITEMS_TIME` that of its items, and
of the time of the steps whose items are known; for `host(phase)` that of the host's times."""

STEP = "step"
STAGE = "<stage>"
ITEMS = "<items>"
ITEMS_TIME = "<items time>"
_HOST = "<host>"
_NOISE = "<noise>"


def host(phase: str) -> str:
    """Returns the name that the host's time in a phase has, waits for other ranks left out."""
    return f"{_HOST}{phase}"


def noise(scale: int) -> str:
    """Returns the name of the changes at a scale."""
    return f"{_NOISE}{scale}"


def is_phase(name: str) -> bool:
    """Tells whether a name in totals is that of a phase."""
    return name != STEP and not name.startswith("<")


def totals_of(
    sums: Sums, changes: Noise | None = None, stage: int | None = None, *, with_host: bool = False
) -> Totals:
    """Returns the totals of a rank's steps.

    Args:
        sums: Over the steps.
        changes: Those of the steps, if they are known.
        stage: The rank's place in a pipeline, if it is one of those.
        with_host: Whether the host's times say something that the phases' own do not.
    """
    totals = {
        name: (phase.device_ms, phase.n)
        for name, phase in {**sums.phases, STEP: sums.step}.items()
        if not of_one_callback(name)
    }
    if with_host:
        totals |= _host_totals(sums)
    if changes is not None:
        totals |= {noise(scale): one for scale, one in changes.changes().items()}
    if sums.work.items_ms:
        totals[ITEMS] = (sums.work.items, sums.step.n)
        totals[ITEMS_TIME] = (sums.work.items_ms, sums.step.n)
    if stage is not None:
        totals[STAGE] = (float(stage * sums.step.n), sums.step.n)
    return totals


def _host_totals(sums: Sums) -> dict[str, tuple[float, int]]:
    of_phases = {name: one.host_ms for name, one in sums.phases.items() if "/" not in name}
    for name, one in sums.phases.items():
        if is_wait(name):
            of_phases[name.partition("/")[0]] -= one.host_ms
    return {host(name): (ms, sums.phases[name].n) for name, ms in of_phases.items()}


def since(now: Totals, before: Totals) -> Totals:
    """Returns what was added to a rank's totals since `before`."""
    return {
        name: (ms - before.get(name, (0.0, 0))[0], n - before.get(name, (0.0, 0))[1])
        for name, (ms, n) in now.items()
        if n > before.get(name, (0.0, 0))[1]
    }


def items_per_s(totals: Iterable[Totals]) -> float | None:
    """Returns the items of all ranks in a second; None where one does not know its own."""
    found = 0.0
    for one in totals:
        items, _ = one.get(ITEMS, (0.0, 0))
        ms, _ = one.get(ITEMS_TIME, (0.0, 0))
        if not ms:
            return None
        found += 1e3 * items / ms
    return found
