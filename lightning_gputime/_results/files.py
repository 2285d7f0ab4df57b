"""Write files that are there whole or not at all."""

import errno
import glob
import math
import os
import stat
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_OLD_S = 3600.0  # No writer takes as long (in seconds).


def plain(value: Any) -> Any:
    """Return `value` in types that JSON has words for, with None for a number that is none."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def write(
    path: str | os.PathLike[str], content: str | bytes, *, kept: str = "; the times are kept"
) -> None:
    """Replace a file in one move; its mode stays. An OSError names it, and ends with `kept`."""
    target = Path(os.path.expanduser(path)).resolve()
    # Beside its target, so that the move is one, and nobody sees half a file.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        mode = _mode(target)
        # Not by `tempfile`, whose files are for their owner alone, whatever the umask.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            if mode is not None:
                os.chmod(temporary, mode)
            os.replace(temporary, target)
            _clean_up_beside(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        message = f"Cannot write {target} ({error.strerror}){kept}"
        raise type(error)(error.errno, message) from error


def _clean_up_beside(target: Path) -> None:
    """Remove what writers of a file left that were killed; one that still writes is younger."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _OLD_S:
                left.unlink()


def _mode(path: Path) -> int | None:
    """Return the mode of a file, None if there is none yet. Raise if no file may replace it."""
    try:
        found = path.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found):
        raise OSError(errno.EISDIR, "it is a folder: pass the path of a file in it")
    if not stat.S_ISREG(found):
        raise OSError(errno.EINVAL, "it is no regular file: pass the path of one")
    return stat.S_IMODE(found)
