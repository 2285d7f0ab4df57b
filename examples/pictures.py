"""Draws where the time goes, and writes it to files: plots, a trace and a table.

    python -m pip install -e ".[examples,plot]"
    python examples/pictures.py

Open `trace.json` with https://ui.perfetto.dev or chrome://tracing.
"""

from pathlib import Path

import torch
from quickstart import ConvNet, digits
from torch import nn
from torch.utils.data import DataLoader

from lightning_gputime import GPUPhaseHooks


def main(width: int = 512, epochs: int = 10, directory: str = "pictures") -> GPUPhaseHooks:
    """Trains, writes the files, and returns the timer with what it measured."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = ConvNet(width).net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    loader = DataLoader(digits(), batch_size=512, shuffle=True)
    with GPUPhaseHooks(net, optimizer) as timer:
        for _ in range(epochs):
            for images, labels in timer.steps(loader):
                logits = net(images.to(device))
                loss = nn.functional.cross_entropy(logits, labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    print(timer.summary())

    files = Path(directory)
    files.mkdir(exist_ok=True)
    timer.plot()[0].savefig(files / "steps.png", dpi=120)
    newest = timer.history()["step"][-2]
    timer.plot(step=newest)[0].savefig(files / "step.png", dpi=120)
    timer.save_trace(files / "trace.json")
    timer.to_csv(files / "steps.csv")
    return timer


if __name__ == "__main__":
    main()
