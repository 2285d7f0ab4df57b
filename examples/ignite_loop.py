"""Time the phases of PyTorch-Ignite's Engine.

python -m pip install pytorch-ignite && python examples/ignite_loop.py
"""

from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import GPUPhaseHooks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main(max_epochs: int = 2) -> GPUPhaseHooks:
    """Train, and return the timer."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of = nn.CrossEntropyLoss()
    data = TensorDataset(torch.randn(1024, 64), torch.randint(10, (1024,)))

    def train(engine: Engine, batch: list[Tensor]) -> float:
        x, y = (tensor.to(DEVICE, non_blocking=True) for tensor in batch)
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    trainer = Engine(train)
    timer = GPUPhaseHooks(model, optimizer)

    def evaluate() -> None:
        with timer.paused(), torch.inference_mode():
            loss_of(model(data.tensors[0].to(DEVICE)), data.tensors[1].to(DEVICE))

    trainer.add_event_handler(Events.ITERATION_COMPLETED, timer.step)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, evaluate)

    loader: Any = DataLoader(data, batch_size=64, shuffle=True)
    with timer:
        trainer.run(loader, max_epochs=max_epochs)
    print(timer.summary())
    return timer


if __name__ == "__main__":
    main()
