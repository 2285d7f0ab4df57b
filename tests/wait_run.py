"""Train in one of two processes in many ways. Rank 1 is late; each writes its times.

python tests/wait_run.py DIRECTORY RANK
"""

import json
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from wait_fits import LATE_IN_FIT, fit
from wait_ways import PLACES, WAYS, Way, batches, train

from lightning_gputime import GPUPhaseHooks


def results_of(kind: type[Way], rank: int, timed: bool) -> list[Tensor]:
    """Return the gradients and weights at the end of a seeded run."""
    way = kind(rank)
    timer = GPUPhaseHooks(way.model, way.optimizer, warmup_steps=0, sync_ranks=False)
    if timed:
        timer.attach()
    left = []
    for x in batches(4, 0.0):
        way.run(x)
        way.optimizer.step()
        left += [full(parameter.grad) for parameter in way.model.parameters()]
        way.optimizer.zero_grad()
        if timed:
            timer.step()
    if timed:
        timer.remove()
        assert timer.summary().rows["forward/comm"].n
    return [*left, *map(full, way.model.parameters())]


def full(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().clone()


def places() -> list[dict[str, Any]]:
    kinds = (distributed.ProcessGroup, distributed.Work, torch._C.Future)
    return [dict(vars(kind)) for kind in kinds]


def main(directory: Path, rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    before = places()
    results: dict[str, Any] = {}
    for (name, kind), place in product(WAYS.items(), PLACES):
        distributed.barrier()
        results[f"{name} {place}"] = train(kind(rank), place)
    # Lightning then takes this for one of the processes of a cluster, and starts none.
    os.environ["LOCAL_RANK"] = str(rank)
    for place in LATE_IN_FIT:
        distributed.barrier()
        results[f"Lightning {place}"] = fit(rank, place)
    for name in ("FSDP2", "TP"):
        runs = [results_of(WAYS[name], rank, timed) for timed in (False, True)]
        results[f"{name} is bitwise"] = all(map(torch.equal, *runs))
    results["nothing is left"] = places() == before
    (directory / f"rank{rank}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
