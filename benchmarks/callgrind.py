"""Counts the processor's instructions that a step costs, under valgrind's callgrind.

They hardly depend on what else the machine does. All of the process is counted, torch and Lightning
included, and what a way adds to that without a timer is told. Needs `valgrind` (for example
`apt-get install valgrind`), and a torch for Linux on x86-64.

    python benchmarks/callgrind.py --out benchmarks/results/host_instructions.json
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from empty_step import new_clock, no_backward
from host_ways import IN_LIGHTNING, IN_PLAIN, Meter, in_lightning, in_plain_loop
from loops import NONE, be_quiet
from record import environment, new_parser, save

STEPS = 200

_INSIDE = "--inside"


class _Toggle:
    """Lets callgrind collect; each end writes one more dump."""

    def begin(self) -> None:
        torch._C._valgrind_toggle()

    def end(self) -> None:
        torch._C._valgrind_toggle_and_dump_stats()


def count_instructions() -> dict[str, dict[str, int]]:
    """Returns the instructions that each way adds to a step, in a plain loop and in Lightning.

    Raises:
        RuntimeError: If they cannot be counted here.
    """
    if shutil.which("valgrind") is None or not torch._C._valgrind_supported_platform():
        raise RuntimeError("--callgrind needs valgrind, and a torch that can talk to it")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        # What is imported is many times as much as what is counted.
        command += ["--instr-atstart=no", "--collect-atstart=no"]
        command += [sys.executable, __file__, _INSIDE]
        # So that hashes, and with them the paths through dicts, are the same each time.
        hashes = {"PYTHONHASHSEED": "0"}
        # In one thread: all threads are counted.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        ran = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | hashes | threads
        )
        if ran.returncode:
            raise RuntimeError(f"valgrind failed: {ran.stderr[-2000:]}")
        return _added(_dumps(out))


def _dumps(out: Path) -> list[int]:
    """Returns the instructions of each dump, in the order of the ways."""
    files = sorted(out.parent.glob(f"{out.name}.*"), key=lambda file: int(file.suffix[1:]))
    return [
        int(line.split()[1])
        for file in files
        for line in file.read_text().splitlines()
        if line.startswith("totals:")
    ]


def _added(dumps: list[int]) -> dict[str, dict[str, int]]:
    found, left = {}, iter(dumps)
    for loop, ways in (("plain", IN_PLAIN), ("lightning", IN_LIGHTNING)):
        each = {way: next(left) / STEPS for way in ways}
        found[loop] = {way: round(n - each[NONE]) for way, n in each.items() if way != NONE}
    return found


def _run_all(meter: Meter) -> None:
    """Runs all ways, inside valgrind."""
    on = ["callgrind_control", "--instr=on", str(os.getpid())]
    subprocess.run(on, check=True, capture_output=True)
    be_quiet()
    with no_backward():
        for way in IN_PLAIN:
            in_plain_loop(way, new_clock(cuda=False), meter, STEPS)
        for way in IN_LIGHTNING:
            in_lightning(way, new_clock(cuda=False), meter, STEPS)


if __name__ == "__main__":
    if _INSIDE in sys.argv:
        _run_all(_Toggle())
    else:
        out = new_parser(__doc__).parse_args().out
        found = count_instructions()
        print(json.dumps(found, indent=2))
        save(out, environment("machine", "python", "torch", "lightning", "command") | found)
