"""What the experiments share."""

import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

T = TypeVar("T")


def find_device() -> torch.device:
    """Returns the accelerator of this machine, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def launch(main: Callable[..., object], **on_cpu: int) -> None:
    """Runs an experiment; on the CPU, which is slower, in the size that is given for it."""
    main(**(on_cpu if find_device().type == "cpu" else {}))


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def in_turn(
    ways: Mapping[str, Callable[[], T]], rounds: int, device: torch.device
) -> dict[str, list[tuple[T, float]]]:
    """Runs each way once a round, in random order.

    Returns:
        For each way what it returned and how long it took (in milliseconds), in every round.
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
    """Prints a table: a line for each row, times in milliseconds."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    width = max(map(len, rows))
    print(f"\n{title} (ms)\n")
    print(" " * width, *(f"{name:>20}" for name in columns))
    for name, row in rows.items():
        cells = (f"{row[column]:20.4f}" if column in row else " " * 20 for column in columns)
        print(f"{name:{width}}", *cells)
