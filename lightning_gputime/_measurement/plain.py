"""Values as JSON has them."""

import math
from collections.abc import Mapping
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
