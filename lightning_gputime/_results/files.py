"""Write files that are there whole or not at all."""

import errno
import math
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Return `value` in types that JSON has words for, with None for a number that is none."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a file in one move; its mode stays. Raise an OSError that names it."""
    target = Path(os.path.expanduser(path)).resolve()
    # Beside its target, so that the move is one, and nobody sees half a file.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        if target.is_dir():
            raise OSError(errno.EISDIR, "it is a folder: pass the path of a file in it")
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is no regular file: pass the path of one")
        try:
            # Not by `tempfile`, whose files are for their owner alone, whatever the umask.
            with temporary.open("xb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            if target.exists():
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        message = f"Cannot write {target} ({error.strerror})"
        raise type(error)(error.errno, message) from error
