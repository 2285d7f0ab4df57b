"""The files of traces: what a profiler writes, and what is kept of it."""

import gzip
import tempfile
from pathlib import Path
from typing import Any

import torch

from lightning_gputime._boundaries.comm import is_distributed

MOST_READ, MOST_BYTES = 500_000_000, 20_000_000
"""No window is read, and no trace is kept, that is larger."""


def exported(profile: Any) -> str:
    """Returns a trace as JSON; empty if it is too large."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        # What tools write into it, such as names of files, need not be UTF-8.
        return path.read_text(errors="replace") if path.stat().st_size <= MOST_READ else ""


def written(folder: Path, trace: str, number: int) -> str:
    """Writes the trace of one step.

    Args:
        folder: Where to, which need not be there.
        trace: What is written, packed.
        number: The number of the step.

    Returns:
        The path of the file; empty if the trace is too large.

    Raises:
        OSError: If it cannot be written; then there is no file.
    """
    content = gzip.compress(trace.encode(), 6)
    if len(content) > MOST_BYTES:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    rank = f"-rank-{torch.distributed.get_rank()}" if is_distributed() else ""
    # Of another fit, or another run, none is overwritten.
    for again in range(1, 1_000):
        path = folder / f"step-{number}{rank}{f'-{again}' * (again > 1)}.json.gz"
        try:
            with path.open("xb") as file:
                try:
                    file.write(content)
                    file.flush()
                except BaseException:  # Ctrl-C, too.
                    path.unlink()
                    raise
        except FileExistsError:
            continue
        return str(path)
    raise FileExistsError(f"{folder} has a thousand traces of step {number}")
