"""Plot stacked phases over steps, and the timeline of a step on the GPU and the host.

python examples/plot_phases.py run.json.gz
"""

import sys
from itertools import accumulate, pairwise
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from lightning_gputime import StepTimes, load


def top_phases(names: Any) -> list[str]:
    """Return the top-level phases among names such as `forward/comm_ms`."""
    known = [name for name in names if name not in ("step", "step_ms", "host_wait_ms")]
    return [name.removesuffix("_ms") for name in known if "/" not in name]


def plot_steps(history: Any, ax: Any) -> Any:
    """Plot the stacked phases of each step, from `timer.history()` or `load(path).history`."""
    phases = top_phases(history.dtype.names)
    # NaN means that a phase did not run.
    times = [np.nan_to_num(history[f"{name}_ms"]) for name in phases]
    ax.stackplot(history["step"], times, labels=phases, step="post")
    # Limit the y-axis: a slow first step would flatten all other steps.
    ax.set_ylim(0, 3 * np.median(history["step_ms"]))
    ax.set(xlabel="step", ylabel="time per step (ms)", title="Phases of each step")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
    return ax.figure


def plot_step(step: StepTimes, ax: Any) -> Any:
    """Plot the timeline of a step, such as `timer.last_step`, on the GPU and the host."""
    line = step.timeline
    assert line is not None
    phases = [name for name in step.phase_ms if "/" not in name]
    gpu_ms = [*accumulate(line.device_ms, initial=0.0)]
    host_ms = [(ns - line.host_ns[0]) / 1e6 for ns in line.host_ns]
    for lane, times_ms in enumerate((gpu_ms, host_ms)):
        for names, (start, end) in zip(line.names, pairwise(times_ms), strict=True):
            if names:
                color = f"C{phases.index(names[0])}"
                ax.barh(lane, end - start, left=start, color=color, label=names[0])
    ax.set_yticks((0, 1), ("GPU", "host"))
    ax.invert_yaxis()
    ax.set(xlabel="time since the step began (ms)", title=f"Step {step.step}")
    handles = dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    ax.legend(handles.values(), handles, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax.figure


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/plot_phases.py run.json.gz")
    run = load(sys.argv[1])
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    plot_steps(run.history[run.warmup_steps :], axes).savefig("steps.png", dpi=120)
