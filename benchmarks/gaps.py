"""How much of a step is launch gaps: each model as it runs, and with a full queue.

python benchmarks/gaps.py --out benchmarks/results/gaps.json
"""

from typing import Any

import torch
from loops import train_step
from models import load
from record import environment, new_parser, save

from lightning_gputime import GPUPhaseHooks

STEPS = {"mlp": 300, "gpt4": 100, "gpt12": 60}


def measure(model: str) -> dict[str, Any]:
    """Returns the times of a step, and what is said of them."""
    task, batch = load(model, torch.device("cuda"))
    optimizer = task.configure_optimizers()
    with GPUPhaseHooks(task.net, optimizer, warmup_steps=10, probe_every_n_steps=5) as timer:
        for _ in timer.steps(range(STEPS[model])):
            train_step(task, optimizer, batch)
    summary = timer.summary()
    print(model, summary, sep="\n", flush=True)
    rows = {**summary.rows, "step": summary.step}
    return {
        "as_run_ms": {name: round(row.mean_ms, 4) for name, row in rows.items()},
        "busy_ms": {
            name: round(row.gpu_busy_mean_ms, 4)
            for name, row in rows.items()
            if row.gpu_busy_mean_ms is not None
        },
        "launch_gap_share": summary.launch_gap_share,
        "probed_steps": summary.probed_steps,
        "probe_failure": summary.probe_failure,
    }


if __name__ == "__main__":
    out = new_parser(__doc__).parse_args().out
    results = {model: measure(model) for model in STEPS}
    save(out, environment() | {"results": results})
