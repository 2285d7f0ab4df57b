"""Files that are there whole or not at all."""

import csv
import errno
import io
import os
import stat
import uuid
from pathlib import Path
from typing import Any

import numpy.typing as npt


def csv_text(table: npt.NDArray[Any]) -> str:
    """Returns a structured array as CSV: its fields, then a row each; empty where it is NaN."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(table.dtype.names or ())
    for row in table.tolist():
        writer.writerow("" if value != value else value for value in row)
    return text.getvalue()


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file, replacing what was there in one move; its mode stays.

    Raises:
        OSError: If it cannot be written; the message names the path.
    """
    path = os.path.expanduser(path)
    target = Path(path).resolve()
    try:
        mode = _mode(path)
        # Beside its target, so that the move is one, and nobody sees half a file.
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        # Not by `tempfile`, whose files are for their owner alone, whatever the umask.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            if mode is not None:
                os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise type(error)(
            error.errno, f"{target} cannot be written ({error.strerror}); the times are kept"
        ) from error


def _mode(path: str | os.PathLike[str]) -> int | None:
    """Returns the mode of a file; None if there is none yet.

    Raises:
        OSError: If it is a folder, a device or a pipe, which no file may replace.
    """
    try:
        found = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):
        number = errno.EISDIR if stat.S_ISDIR(found) else errno.EINVAL
        raise OSError(number, "it is no regular file")
    return stat.S_IMODE(found)
