"""Hold a Trainer with the timer against Lightning's own thresholds of parity, on a GPU.

    python benchmarks/foreign lightning_parity CHECKOUT --out FILE

`tests/parity_pytorch` trains nets in a plain loop and in a Trainer, and asks for the same losses
(to 5 decimals), at most so many seconds more an epoch, and so much more memory. Its loops run here
in turns: plain, in a Trainer with a callback that does nothing, and with the timer. MNIST is made
data of the same size. What passes with nothing must pass with the timer.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from foreign.lightning_suite import write_entry_point

PACKAGES = ("lightning", "numpy")

MODELS = {"ParityModuleRNN": 0.05, "ParityModuleMNIST": 0.3}
"""The nets, and how many seconds more an epoch may take: as the tests say."""

MAX_MEMORY = 0.001
"""How much more memory it may take, as a part of the plain loop's."""

WAYS = ("plain", "nothing", "default", "all")


class _Digits(Dataset[tuple[torch.Tensor, int]]):
    """Random digits, as many as MNIST has."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._images = torch.rand((512, 1, 28, 28), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 60_000

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self._images[i % 512], i % 10


def _judge(found: dict[str, Any], plain: dict[str, Any], most_s: float, epochs: int) -> None:
    """Add to what one way has found how it stands beside the plain loop."""
    # The first run is left out, as the tests do: it is shorter, and warms up.
    of_plain = statistics.mean(plain["durations"][1:])
    more_s = (statistics.mean(found["durations"][1:]) - of_plain) / epochs
    of_plain = statistics.mean(plain["memory"])
    more_memory = (statistics.mean(found["memory"]) - of_plain) / of_plain
    pairs = zip(found["losses"], plain["losses"], strict=True)
    loss_difference = max(abs(one - other) for one, other in pairs)
    found |= {
        "more_s_an_epoch": more_s,
        "more_memory": more_memory,
        "loss_difference": loss_difference,
        "passes": {
            "time": more_s < most_s,
            "memory": more_memory < MAX_MEMORY,
            "losses": loss_difference < 1.5e-5,
        },
    }


def measure(checkout: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Return seconds, memory and losses of each way, and whether they pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--runs", type=int, default=6)
    options = parser.parse_args(arguments)
    sys.dont_write_bytecode = True
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_entry_point(Path(folder))
        sys.path[:0] = [folder, str(checkout / "tests")]
        models = import_module("tests_pytorch.helpers.advanced_models")
        models.MNIST = _Digits  # type: ignore[attr-defined]
        parity = import_module("parity_pytorch.test_basic_parity")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for name, most_s in MODELS.items():
            model = getattr(models, name)
            ways: dict[str, dict[str, Any]] = {}
            for run in range(options.runs):
                for way in WAYS:
                    os.environ["FOREIGN_CALLBACK"] = way
                    loop = parity.vanilla_loop if way == "plain" else parity.lightning_loop
                    # The loops take their number for the seed, and run one epoch for the first.
                    found = parity.measure_loops(
                        model,
                        way,
                        lambda cls, idx, run=run, loop=loop, **known: loop(cls, run, **known),
                        num_runs=1,
                        num_epochs=options.epochs,
                    )
                    for key, values in found.items():
                        ways.setdefault(way, {}).setdefault(key, []).extend(values)
            for way in WAYS[1:]:
                _judge(ways[way], ways["plain"], most_s, options.epochs)
            results[name] = ways
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
    return {"gpu": gpu, "epochs": options.epochs, "models": results}
