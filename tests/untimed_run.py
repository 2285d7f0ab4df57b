"""Train under DDP on a fake GPU, whose events take longer to record on rank 1.

python tests/untimed_run.py RANK FILE
"""

import gc
import json
import sys

import torch.distributed
from fake_gpu import Adder, CostlyGPU, Layer, batches
from torch.nn.parallel import DistributedDataParallel

from lightning_gputime import GPUPhaseHooks

STEPS = 500


def main(rank: int, file: str) -> None:
    """Print the final interval between timed steps, and the numbers of the timed steps."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2
    )
    gpu = CostlyGPU(20.0 * (1 + rank))
    net = DistributedDataParallel(Layer(gpu, 0.0))
    optimizer = Adder(net.parameters(), gpu, 0.0)
    timer = GPUPhaseHooks(net, optimizer, _clock=gpu, warmup_steps=0)
    with timer:
        for x in timer.steps(batches(gpu, STEPS, host_ms=2.0)):
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    timed = [int(step) for step in timer.history()["step"]]
    print(json.dumps([timer.summary().timed_every_n_steps, timed]))
    # If DDP is deleted after the process group, torch may wait forever for a thread of gloo.
    del net, optimizer, timer, x
    gc.collect()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
