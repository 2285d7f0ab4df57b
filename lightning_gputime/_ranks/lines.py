"""Lines of code of the ranks: the line that is slower on one rank, and the line of the waits."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gputime._phases import is_wait
from lightning_gputime._ranks.totals import MAX_LINES, LineTime

# A host or a GPU that needs this multiple of the time is slower: the speed of equal ones differs by
# less, as clocks do.
MIN_FACTOR = 1.15


class LineExcess(NamedTuple):
    """A line of a rank, the time by which it exceeds that of the others, and the phase of most."""

    line: LineTime
    ms: float
    phase: str


def longest_excess(
    own: Sequence[LineTime], others: Sequence[Sequence[LineTime]], min_excess_ms: float
) -> LineExcess | None:
    """Return the line in which a rank exceeds the median of the other ranks the most.

    Return None if it is less than `min_excess_ms`, or not more than the errors. The excess in which
    the host sets the pace is at most that of the host's own time: the others may do that work while
    they wait.

    Example: the host sets the pace for 9 ms of a line, and of 1 ms on the other ranks. If it is
    busy for 10 ms on all ranks, the others do 8 ms of the line while they wait, and its excess is
    min(9 - 1, 10 - 10) = 0 ms.
    """
    longest = None
    for line in own:
        phases = [name for name in line.phases_ms if not is_wait(name)]
        by_rank_ms = [_usual_ms(line, own, lines, phases) for lines in others]
        usual_ms = map(statistics.median, zip(*by_rank_ms, strict=True))
        host_ms, gpu_ms, busy_ms, *phases_ms = map(
            float.__sub__, _sums_of([line], phases), usual_ms
        )
        ms = min(min(host_ms, max(busy_ms, 0.0)) + gpu_ms, line.local_ms)
        if ms > max(longest.ms if longest is not None else 0.0, line.error_ms):
            _, phase = max(zip(phases_ms, phases, strict=True))
            longest = LineExcess(line, ms, phase)
    return longest if longest is not None and longest.ms >= min_excess_ms else None


def _usual_ms(
    line: LineTime, own: Sequence[LineTime], lines: Sequence[LineTime], phases: Sequence[str]
) -> list[float]:
    """Return the times of a line on another rank, whose rows may be divided in another way.

    Args:
        line: A line of the rank that is compared.
        own: All lines of this rank.
        lines: All lines of the other rank.
        phases: Phases to return the times of. See `_sums_of`.
    """
    same = [other for other in lines if other.text == line.text]
    if not same:
        # A row without its line numbers may be the same code, unless this rank has it, too.
        texts = {each.text for each in own}
        named = [other for other in lines if other.function == line.function]
        same = [other for other in named if other.text not in texts]
    if same:
        return _sums_of(same, phases)
    # Its time may be part of the line that calls it. Example: `outer` takes 10 ms there and 4 ms
    # here, so 6 ms of it are `inner`, which has a line here only.
    callers = _sums_of([other for other in lines if other.function == line.caller], phases)
    own_callers = _sums_of([each for each in own if each.function == line.caller], phases)
    host_ms, gpu_ms, busy_ms, *phases_ms = map(float.__sub__, callers, own_callers)
    # If not all lines were sent, it is at most as long as the shortest of them.
    shortest_ms = lines[-1].longest_ms if len(lines) == MAX_LINES else 0.0
    paced_ms = max(host_ms, shortest_ms), max(gpu_ms, 0.0), max(busy_ms, shortest_ms)
    return [*paced_ms, *(max(ms, 0.0) for ms in phases_ms)]


def _sums_of(lines: Sequence[LineTime], phases: Sequence[str]) -> list[float]:
    """Return the sums of `host_ms`, `gpu_ms` and `busy_ms`, and of the times in phases."""
    sums_ms = [0.0] * (3 + len(phases))
    for line in lines:
        of_phases = (line.phases_ms.get(name, 0.0) for name in phases)
        each_ms = line.host_ms, line.gpu_ms, line.busy_ms, *of_phases
        sums_ms = [sum_ms + ms for sum_ms, ms in zip(sums_ms, each_ms, strict=True)]
    return sums_ms


def common_factor(
    own: Sequence[LineTime],
    others: Sequence[Sequence[LineTime]],
    min_excess_ms: float,
    *,
    is_host: bool,
) -> float | None:
    """Return the multiple of the others' time that a rank needs for every line.

    Return None if it does not differ, if it is not the same for all lines, or if it explains less
    than `min_excess_ms`. With `is_host`, compare the time of the host, else that of the GPU.

    Example: lines of 9, 2 and 1 ms take 11.25, 2.5 and 1.25 ms on this rank. The factor is
    15 / 12 = 1.25, and explains 0.25 * 12 = 3 ms.
    """

    def by_text(lines: Sequence[LineTime]) -> dict[str, float]:
        return {line.text: line.busy_ms if is_host else line.gpu_ms for line in lines}

    others_ms = [*map(by_text, others)]
    both_ms = [
        (ms, statistics.median(each_ms.get(text, 0.0) for each_ms in others_ms))
        for text, ms in by_text(own).items()
    ]
    usual_ms = sum(usual for _, usual in both_ms)
    # The ratio of a short line is uncertain. Two lines may differ by the same factor by chance.
    both_ms = [(ms, usual) for ms, usual in both_ms if usual > 0 and usual >= 0.05 * usual_ms]
    if len(both_ms) < 3:
        return None
    factor = sum(ms for ms, _ in both_ms) / sum(usual for _, usual in both_ms)
    more = factor - 1
    is_uniform = all(1 + 0.5 * more <= ms / usual <= 1 + 2 * more for ms, usual in both_ms)
    explains = more * usual_ms >= min_excess_ms
    return factor if factor >= MIN_FACTOR and is_uniform and explains else None


def longest_wait(waiting: Sequence[Sequence[LineTime]]) -> tuple[str, str, float]:
    """Return the line and the phase in which ranks wait for others the longest.

    Args:
        waiting: Lines of each rank that waits.

    Returns:
        The text of the line, the phase, and the median of the ranks' waits (in milliseconds), which
        is 0.0 for a line that does not wait on most of the ranks.
    """
    by_rank = [
        {
            (line.text, name.rpartition("/")[0]): ms
            for line in lines
            for name, ms in line.phases_ms.items()
            if is_wait(name)
        }
        for lines in waiting
    ]
    usual_ms = {
        place: statistics.median(waits_ms.get(place, 0.0) for waits_ms in by_rank)
        for place in dict.fromkeys(place for waits_ms in by_rank for place in waits_ms)
    }
    if not usual_ms:
        return "", "", 0.0
    text, phase = max(usual_ms, key=usual_ms.__getitem__)
    return text, phase, usual_ms[text, phase]
