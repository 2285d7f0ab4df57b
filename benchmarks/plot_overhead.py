"""Draws what `overhead.py` measured: the added time per step of each way, in Lightning.

python benchmarks/plot_overhead.py benchmarks/results/overhead.json examples/images/overhead.png
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

# Where the GPU is the bottleneck: elsewhere the host's noise is larger than most of the bars.
MODELS = {"gpt12": ("12-layer GPT", "#0072B2"), "resnet50": ("ResNet-50", "#E69F00")}
# With `lag=0` the timer waits for each step when it ends: no option lets it.
LEFT_OUT = ("no timer", "callback that does nothing", "GPUPhaseTimer(lag=0)")
OWN = "GPUPhaseTimer"


def main(source: Path, target: Path) -> None:
    """Draws the figure."""
    found = json.loads(source.read_text())
    rows = {model: found["results"][model]["lightning"] for model in MODELS}
    # What was not installed is in the file as a word.
    ways = [way for way, row in rows["gpt12"].items() if isinstance(row, dict)]
    ways = [way for way in ways if way not in LEFT_OUT]
    ways.sort(key=lambda way: max(rows[model][way]["ratio"] for model in MODELS))
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    ax = figure.add_subplot()
    for i, (model, (label, colour)) in enumerate(MODELS.items()):
        percent = [(rows[model][way]["ratio"] - 1) * 100 for way in ways]
        places = [y + 0.2 - 0.4 * i for y in range(len(ways))]
        errors = [rows[model][way]["error"] * 100 for way in ways]
        step_ms = rows[model]["no timer"]["quartiles_ms"][1]
        bars = ax.barh(
            places,
            percent,
            0.38,
            xerr=errors,
            error_kw={"lw": 0.8, "ecolor": "0.4"},
            color=colour,
            label=f"{label}, {step_ms:.1f} ms",
        )
        ax.bar_label(bars, [f"{value:+.2f} %" for value in percent], padding=3, fontsize=8)
    ax.set_yticks(range(len(ways)), ways)
    for place, way in enumerate(ways):
        if way.startswith(OWN):
            ax.axhspan(place - 0.45, place + 0.45, color="#009E73", alpha=0.15, lw=0)
    ax.margins(x=0.12)
    ax.set(xlabel="added time per step (%)", title=f"What timing a step costs on an {found['gpu']}")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower right")
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    mpl.use("agg")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    main(**vars(parser.parse_args()))
