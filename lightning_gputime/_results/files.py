"""Files that are there whole or not at all."""

import csv
import io
import os
import tempfile
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
    """Writes a file, replacing what was there in one move.

    Raises:
        OSError: If it cannot be written; the message names the path.
    """
    target = Path(path).resolve()
    try:
        # Beside its target, so that the move is one, and nobody sees half a file.
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise type(error)(
            error.errno, f"{target} cannot be written ({error.strerror}); the times are kept"
        ) from error
