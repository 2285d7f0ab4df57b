"""Split forward and backward by module: which part of the model takes the time?

python examples/modules.py
"""

import torch
from quickstart import digits
from torch import nn
from torch.utils.data import DataLoader

from lightning_gputime import GPUPhaseHooks


def main(width: int = 256, epochs: int = 3) -> GPUPhaseHooks:
    """Train, and return the timer."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    body = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    net = nn.Sequential()
    net.add_module("body", body)
    net.add_module("head", nn.Linear(4 * width, 10))
    net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    loader = DataLoader(digits(), batch_size=256, shuffle=True)
    with GPUPhaseHooks(net, optimizer, modules=["body", "head"]) as timer:
        for _ in range(epochs):
            for images, labels in timer.steps(loader):
                logits = net(images.to(device))
                loss = nn.functional.cross_entropy(logits, labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    print(timer.summary())
    return timer


if __name__ == "__main__":
    main()
