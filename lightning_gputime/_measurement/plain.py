"""Conversion to values that JSON can store."""

import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Convert `value` to JSON types, with None for NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
