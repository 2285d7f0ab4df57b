"""Counts what Python runs of this package in a step: exact, where times are not.

    python benchmarks/host_counts.py
    python benchmarks/host_counts.py --record   # the bounds that no step may exceed

`host_bounds.json` has what a step may cost; `tests/test_host_cost.py` holds each step against it.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from empty_step import new_clock, no_backward
from host_ways import HOOKS, QUIET, TIMER, in_lightning, in_plain_loop
from loops import be_quiet

import lightning_gputime

PACKAGE = os.path.dirname(lightning_gputime.__file__)
BOUNDS = Path(__file__).parent / "host_bounds.json"

STEPS = 400

Counts = dict[str, float]


class Counter:
    """Counts the instructions and the functions of the package, as a `Meter`."""

    def __init__(self) -> None:
        self.instructions = self.functions = 0

    def begin(self) -> None:
        sys.settrace(self)

    def end(self) -> None:
        sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Counts one event, as a function of `sys.settrace`."""
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "call":
            self.functions += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.instructions += 1
        return self

    def each(self) -> Counts:
        """Returns both of one step."""
        # Nothing of a step is rounded away: what is rounded is a share of what runs now and then.
        return {
            "functions": round(self.functions / STEPS, 1),
            "instructions": round(self.instructions / STEPS, 1),
        }


def count_all() -> dict[str, Counts]:
    """Returns what the package runs in a step of each kind, in both front ends."""
    found = {}
    with no_backward():
        for way in (HOOKS, HOOKS + QUIET):
            counter = Counter()
            in_plain_loop(way, new_clock(cuda=False), counter, STEPS)
            found[way] = counter.each()
        for way in (TIMER, TIMER + QUIET):
            counter = Counter()
            in_lightning(way, new_clock(cuda=False), counter, STEPS)
            found[way] = counter.each()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write them to host_bounds.json")
    be_quiet()
    record = parser.parse_args().record
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "step": count_all()}
    print(json.dumps(found, indent=2))
    if record:
        BOUNDS.write_text(json.dumps(found, indent=2) + "\n")
