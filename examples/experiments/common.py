"""Helpers of the experiments."""

import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

T = TypeVar("T")


def find_device() -> torch.device:
    """Return the accelerator of this machine, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def launch(main: Callable[..., object], **on_cpu: int) -> None:
    """Run an experiment, on a CPU with the sizes in `on_cpu`."""
    main(**(on_cpu if find_device().type == "cpu" else {}))


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def in_turn(
    ways: Mapping[str, Callable[[], T]], rounds: int, device: torch.device
) -> dict[str, list[tuple[T, float]]]:
    """Run each way once per round, in random order.

    Returns:
        Result and duration (in milliseconds) of each way in every round.
    """
    found: dict[str, list[tuple[T, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            synchronize(device)
            start = time.perf_counter()
            returned = ways[name]()
            synchronize(device)
            found[name].append((returned, (time.perf_counter() - start) * 1e3))
    return found


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Print a table of times in milliseconds."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    width = max(map(len, rows))
    print(f"\n{title} (ms)\n")
    print(" " * width, *(f"{name:>20}" for name in columns))
    for name, row in rows.items():
        cells = (f"{row[column]:20.4f}" if column in row else " " * 20 for column in columns)
        print(f"{name:{width}}", *cells)
