"""Name the slow ranks of the three jobs of ByteDance-Seed/StragglerAnalysis.

    python benchmarks/foreign straggler_analysis CHECKOUT --out ...

Each job is a trace of pipeline and data parallel training, with one line for each operation of each
rank, and the answer of a simulation. A rank works where it computes or updates. The rest of its
step is its wait: it communicates, or runs nothing that was traced.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_gputime._measurement.ranks import BatchMeans, RankTotals, compare

PACKAGES = ("pandas", "pyarrow")

_WORK = {"forward-compute": "forward", "backward-compute": "backward", "optimizer": "optimizer"}


def measure(checkout: Path, _: Sequence[str]) -> dict[str, Any]:
    """Compare the ranks of each job."""
    return {"jobs": {name: _job(checkout / "data", name) for name in ("AR", "ST", "SE")}}


def _job(data: Path, name: str) -> dict[str, Any]:
    import pandas

    trace = pandas.read_parquet(data / f"trace-{name}.parquet")
    ranks = compare({int(rank): _totals(ops) for rank, ops in trace.groupby("rank")})
    assert ranks is not None
    last_stage = trace["rank"][trace["stage"] == trace["stage"].max()].unique()
    return {
        "ranks": trace["rank"].nunique(),
        "stages": trace["stage"].nunique(),
        "steps": trace["step"].nunique(),
        # What is won without the slowest 3 % of the workers, and without the last stage.
        "their_share_of_workers": _expected(data, "mw", name),
        "their_share_of_last_stage": _expected(data, "ms", name),
        "sentence": ranks.sentence,
        "n_slow": len(ranks.slow),
        "are_the_last_stage": [*ranks.slow] == sorted(last_stage),
        "behind_median_ms": round(ranks.behind_median_ms, 1),
        "step_ms": round(ranks.rows["step"].mean_ms, 1),
    }


def _expected(data: Path, metric: str, name: str) -> float:
    found = json.loads((data / f"{metric}-{name}.json").read_text())
    return round(float(found[metric.capitalize()]), 3)


def _totals(ops: Any) -> RankTotals:
    """Return the totals of a rank from its operations."""
    local, sums, steps = BatchMeans(), dict.fromkeys(("step", *_WORK.values()), 0.0), 0
    for _, of_step in ops.groupby("step"):
        took = of_step["duration"].groupby(of_step["optype"]).sum()
        work_ms = {phase: 1e3 * float(took[kind]) for kind, phase in _WORK.items()}
        end = (of_step["start_ts"] + of_step["duration"]).max()
        sums["step"] += 1e3 * float(end - of_step["start_ts"].min())
        for phase, ms in work_ms.items():
            sums[phase] += ms
        local.take(sum(work_ms.values()))
        steps += 1
    # Where it waits is not asked for.
    wait_ms = sums["step"] - sum(sums[phase] for phase in _WORK.values())
    sums |= {"backward": sums["backward"] + wait_ms, "backward/comm": wait_ms}
    phases = {name: (ms, steps) for name, ms in sums.items()}
    return RankTotals(phases, deviation_ms=local.deviation_ms)
