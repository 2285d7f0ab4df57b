"""Train the model of quickstart.py in a plain PyTorch loop, and time its phases.

python examples/plain_pytorch.py
"""

import torch
from quickstart import ConvNet, digits
from torch import nn
from torch.utils.data import DataLoader

from lightning_gputime import GPUPhaseHooks


def main(max_epochs: int = 10) -> GPUPhaseHooks:
    """Train, and return the timer."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = ConvNet().net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    loader = DataLoader(digits(), batch_size=64, shuffle=True)
    with GPUPhaseHooks(net, optimizer) as timer:
        for _ in range(max_epochs):
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
