"""Saved runs: files, comparisons, results as JSON, and the environment of a run.

Everything that outlives a training run belongs here. Statistics of one run belong in
`_measurement`; tables and pages in `_output`.
"""

import os
from typing import Any


def check_save_path(path: Any) -> str | None:
    """Return the absolute path, because training may change the working directory."""
    # Here, because `run` checks its option without importing torch.
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise TypeError(f"save_path must be a path such as 'run.json.gz', or None, got {path!r}")
    text = os.fspath(path)
    target = os.path.abspath(os.path.expanduser(text))
    if os.path.isdir(target) or text.endswith((os.sep, "/")):
        file = os.path.join(text, "run.json.gz")
        raise ValueError(f"save_path must be a file such as {file!r}, got the folder {text!r}")
    return target
