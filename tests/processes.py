"""Python in separate processes, which must exit without an error."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning_gputime

PACKAGE = Path(lightning_gputime.__file__).parent.parent
ENVIRONMENT = {
    # In any folder, processes import the package under test.
    "PYTHONPATH": str(PACKAGE),
    "OMP_NUM_THREADS": "1",
    # A process that does not end prints the stacks of its threads.
    "PYTHONFAULTHANDLER": "1",
}


def start(*arguments: object, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start Python with these arguments."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT},
    )


def finish(*processes: subprocess.Popen[str], timeout_s: float = 200.0) -> list[str]:
    """Wait for processes, check their exit codes, and return the stdout of each."""
    deadline = time.monotonic() + timeout_s
    outputs = []
    try:
        for process in processes:
            try:
                outputs.append(process.communicate(timeout=max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)
                outputs.append(process.communicate(timeout=10.0))
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    texts = "\n".join(text for output in outputs for text in output)
    assert codes == [0] * len(processes), f"ended with {codes}:\n{texts}"
    return [printed for printed, _ in outputs]


def run(*arguments: object, cwd: Path | None = None) -> str:
    """Run Python with these arguments, and return its stdout."""
    [printed] = finish(start(*arguments, cwd=cwd))
    return printed
