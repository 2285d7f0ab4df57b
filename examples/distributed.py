"""Train under DistributedDataParallel with a straggler rank, which the table names.

torchrun --nproc-per-node 2 examples/distributed.py

On several nodes, start the same script with torchrun on each node.
"""

import os
import time

import numpy
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gputime import GPUPhaseHooks


class SlowNet(nn.Module):
    """Model whose forward is slow if `is_slow`."""

    def __init__(self, is_slow: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
        self.is_slow = is_slow

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions of shape (batch, 1) for `x` of shape (batch, 256)."""
        if self.is_slow:
            time.sleep(0.02)
        y: Tensor = self.layers(x)
        return y


def main(steps: int = 200) -> None:
    """Train on the GPUs of this machine, or on its CPU."""
    on_gpu = torch.cuda.is_available()
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank = torch.distributed.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    net = DistributedDataParallel(SlowNet(is_slow=rank == 1).to(device))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with GPUPhaseHooks(net, optimizer) as timer:
        for x in timer.steps(torch.randn(steps, 64, 256)):
            x = x.to(device)
            loss = (net(x) - x.sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        print(timer.summary())
    # Each rank has its own history.
    numpy.save(f"phase_times_rank{rank}.npy", timer.history())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
