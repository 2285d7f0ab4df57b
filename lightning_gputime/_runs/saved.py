"""Saving and loading runs: versioned JSON files of a few bytes per step and phase."""

import errno
import glob
import gzip
import io
import json
import os
import stat
import time
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

from lightning_gputime._messages import messages
from lightning_gputime._runs import schema
from lightning_gputime._runs.run import Run

_MAX_BYTES = 2**30  # Larger files are refused: a million steps take a tenth of this.
_MIN_LEFTOVER_AGE_S = 60.0  # Another process may still write a younger temporary file.
_IGNORED = (
    "%s was saved by lightning_gputime %s. This version ignores unknown fields: %s. Update"
    " lightning_gputime to read them."
)


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Write a run as JSON, compressed if the path ends in ".gz". Replace the file atomically."""
    data = json.dumps(schema.to_json(run), separators=(",", ":"), allow_nan=False).encode()
    if os.fspath(path).endswith(".gz"):
        # Level 1 takes a third of the time for 10 % more bytes. Without a timestamp, two files of
        # the same run are identical.
        data = gzip.compress(data, compresslevel=1, mtime=0)
    write(path, data)


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a file atomically, and keep its mode. An OSError names the file."""
    target = Path(os.path.expanduser(path)).resolve()
    # Write to the same folder, so that `os.replace` is atomic.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        if target.is_dir():
            raise OSError(errno.EISDIR, "it is a folder: pass the path of a file in it")
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file: pass the path of a file")
        is_new = not target.exists()
        mode = 0o666 if is_new else stat.S_IMODE(target.stat().st_mode)
        try:
            # Create the temporary file with the target's mode, so that no other users can ever read
            # it. Then undo the umask, which must only change the mode of a new target.
            with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
                if not is_new:
                    os.chmod(temporary, mode)
                file.write(content.encode() if isinstance(content, str) else content)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        message = f"Cannot write {target} ({error.strerror})"
        raise type(error)(error.errno, message) from error


def remove_leftovers(path: str) -> None:
    """Remove temporary files of processes that were killed in `write`. Never raise an OSError."""
    target = Path(path)
    with suppress(OSError):
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            if time.time() - leftover.stat().st_mtime > _MIN_LEFTOVER_AGE_S:
                leftover.unlink()


def load(path: str | os.PathLike[str]) -> Run:
    """Load a run that a timer's `save` has written. The file is JSON: loading it runs no code.

    Args:
        path: File to read.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, not a saved run, or has another version of the format.
    """
    name = os.path.expanduser(path)
    with open(name, "rb") as file:
        try:
            run, unknown = schema.from_json(_decompress(file), os.path.basename(name))
        except Exception as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            message = f"{name} is not a saved run: write one with timer.save(path) ({reason})"
            raise ValueError(message) from error
    if unknown:
        package = run.environment.package or "another version"
        messages.warning(_IGNORED, name, package, ", ".join(unknown))
    return run


def _decompress(file: io.BufferedReader) -> bytes:
    """Return the content of a file, compressed or not. Raise ValueError if it is over 1 GiB."""
    is_compressed = file.peek(2)[:2] == b"\x1f\x8b"
    data = (gzip.GzipFile(fileobj=file) if is_compressed else file).read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it unpacks to more than {_MAX_BYTES} bytes")
    return data
