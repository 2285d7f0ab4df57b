"""Draws where the time goes, and writes it to files: plots, a table, and a GPT's step.

    python -m pip install -e ".[examples]"
    python examples/pictures.py [DIRECTORY]

`hero.png` is of a GPT of 12
layers in bfloat16 or, without a GPU, of a very small one.
"""

import argparse
import textwrap
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from plot_phases import plot_step, plot_steps
from quickstart import ConvNet, digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gputime import GPUPhaseHooks, StepTimes

TEXT, DIM, BACKGROUND, BAR = "#e6e6e6", "#8b949e", "#0d1117", "#21262d"
INCHES = 9.0
COLUMNS = 84
"""Characters in a line of the terminal."""


def main(width: int = 512, epochs: int = 10, directory: str = "pictures") -> GPUPhaseHooks:
    """Trains, writes the files, and returns the timer with what it measured."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = ConvNet(width).net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    loader = DataLoader(digits(), batch_size=512, shuffle=True)
    steps: list[StepTimes] = []
    with GPUPhaseHooks(net, optimizer, observers=[steps.append]) as timer:
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
    plot_steps(timer.history(), new_axes(4.0)).savefig(files / "steps.png", dpi=120)
    plot_step(steps[-2], new_axes(2.4)).savefig(files / "step.png", dpi=120)
    timer.to_csv(files / "steps.csv")
    return timer


def new_axes(height: float) -> Any:
    """Returns the axes of a new figure."""
    return Figure(figsize=(INCHES, height), layout="constrained").add_subplot()


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns hidden states of the shape of `x`, (batch, length, width)."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        mlp: Tensor = self.mlp(self.norm2(x))
        return x + mlp


class GPT(nn.Module):
    """A language model; predicts the next token."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits of shape (batch, length, vocabulary)."""
        logits: Tensor = self.head(self.blocks(self.tokens(x) + self.positions))
        return logits


def hero(
    layers: int = 12,
    width: int = 768,
    batch: int = 14,
    length: int = 512,
    vocabulary: int = 32768,
    steps: int = 255,
    directory: str = "pictures",
) -> GPUPhaseHooks:
    """Trains a GPT on random tokens, draws `hero.png`, and returns the timer."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = GPT(layers, width, vocabulary, length).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    # On the device, where a copy would make the host wait: then no step could be probed.
    tokens = torch.randint(0, vocabulary, (batch, length + 1), device=device)
    # A CPU has no queue that a probe could fill. Seldom, since the host waits for each probe.
    every = 50 if device.type == "cuda" else 0
    times: list[StepTimes] = []
    options: Any = {"probe_every_n_steps": every, "observers": [times.append]}
    with GPUPhaseHooks(net, optimizer, **options) as timer:
        for _ in timer.steps(range(steps)):
            logits = net(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    where = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    what = f"{layers}-layer GPT in bfloat16, {batch} x {length} tokens a step"
    figure = draw_terminal(timer, times, f"{what}, on {where}, torch {torch.__version__}")
    Path(directory).mkdir(exist_ok=True)
    figure.savefig(Path(directory) / "hero.png", dpi=200)
    return timer


def draw_terminal(timer: GPUPhaseHooks, steps: list[StepTimes], title: str) -> Figure:
    """Draws what bounds the training, what to do, the lanes of a usual step, and the table."""
    summary = timer.summary()
    lead, title, phases = str(summary).partition("Time per step")
    verdict, *losses = lead.splitlines()
    header, table, *sentences = f"{title}{phases}".split("\n\n")
    told = [line for sentence in sentences for line in textwrap.wrap(sentence, COLUMNS)]
    said = [(verdict, True), *((line, False) for line in [*losses[1:-1], *told])]
    rows = table.splitlines()
    height = 0.42 + 0.26 * len(said) + 1.95 + 0.2 * (len(rows) + 3)
    figure = Figure(figsize=(INCHES, height), facecolor=BACKGROUND)
    terminal = figure.add_axes((0, 0, 1, 1), xlim=(0, INCHES), ylim=(height, 0))
    terminal.axis("off")

    def write(x: float, y: float, text: str, colour: str = TEXT, **options: Any) -> None:
        options = {"family": "monospace", "size": 10.5, "va": "center", **options}
        terminal.text(x, y, text, color=colour, **options)

    terminal.axhspan(0, 0.32, color=BAR)
    for i, colour in enumerate(("#ff5f56", "#ffbd2e", "#27c93f")):
        terminal.plot(0.22 + 0.2 * i, 0.16, "o", color=colour, markersize=7)
    write(INCHES / 2, 0.16, title, DIM, size=8.5, ha="center")
    y = 0.56
    for line, is_verdict in said:
        colour, weight = ("#7ee787", "bold") if is_verdict else (TEXT, "normal")
        write(0.25, y, line, colour, weight=weight, size=11)
        y += 0.26

    lanes = figure.add_axes((0.075, 1 - (y + 1.4) / height, 0.9, 1.2 / height))
    colours = draw_lanes(lanes, steps[-summary.steps :], summary.on_host_clock)

    y += 2.0
    write(0.25, y, header, DIM)
    for row in rows:
        y += 0.2
        name = row.split()[0]
        if name in colours:
            write(0.25, y, "\N{BLACK SQUARE}", colours[name])
        write(0.45, y, row, DIM if row in (rows[0], rows[1], rows[-2]) else TEXT)
    return figure


def draw_lanes(ax: Any, steps: list[StepTimes], on_host_clock: bool) -> dict[str, Any]:
    """Draws the step of median length on dark axes; returns the colours of its phases."""
    step = sorted(steps, key=lambda one: one.step_ms)[len(steps) // 2]
    plot_step(step, ax)
    handles, names = ax.get_legend_handles_labels()
    ax.get_legend().remove()
    end = max(bar.get_x() + bar.get_width() for bar in ax.patches)
    colours = {}
    for (bar,), name in zip(handles, names, strict=True):
        colours[name] = bar.get_facecolor()
        if bar.get_width() > 0.1 * end:
            x, y = bar.get_center()
            ax.text(x, y, name, ha="center", va="center", family="monospace", size=9)
    ax.set_xlim(0, end)
    ax.set_title("")
    note = " (no GPU here: both lanes are the host's)" if on_host_clock else ""
    ax.set_xlabel(f"ms since step {step.step} began{note}", color=DIM, family="monospace", size=9)
    ax.set_facecolor(BACKGROUND)
    ax.spines[:].set_visible(False)
    ax.tick_params(colors=DIM, length=0, labelsize=9, labelfontfamily="monospace")
    ax.tick_params(axis="y", colors=TEXT, labelsize=11)
    return colours


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws where the time goes.")
    parser.add_argument("directory", nargs="?", default="pictures", help="where the files go")
    directory = parser.parse_args().directory
    if torch.cuda.is_available():
        main(directory=directory)
        hero(directory=directory)
    else:
        main(width=64, directory=directory)
        hero(2, 128, batch=4, length=64, vocabulary=512, steps=45, directory=directory)
