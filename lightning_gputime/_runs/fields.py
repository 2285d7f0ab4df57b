"""Frozen records read back from JSON: checked field by field, nothing executed."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def read(kind: type[T], value: Any, where: str) -> T:
    """Returns the record of a dataclass that was written as a JSON object.

    Fields that are missing take their default, and those that are not known are left out: so a
    record may get a field without a new version of the file. A number that is null is NaN.

    Args:
        kind: The dataclass.
        value: What stands in the JSON.
        where: What it is called in an error.

    Raises:
        ValueError: If something has another type than the dataclass says.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, not {value!r:.60}")
    hints = get_type_hints(kind)
    found = {}
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass, which no hint can say
        if field.name in value:
            found[field.name] = _read(hints[field.name], value[field.name], f"{where}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where} has no {field.name}")
    return kind(**found)


def number(value: int | float, where: str) -> float:
    """Returns a number that is finite.

    Raises:
        ValueError: If it is not, such as 1e999, or too large a whole one.
    """
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{where} must be a finite number, and is too large")
    return found


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        [hint] = [one for one in inner if one is not NoneType]
        return _read(hint, value, where)
    if is_dataclass(hint):
        return read(hint, value, where)  # type: ignore[arg-type]  # a class, not a record
    if hint is Any or (origin is Literal and value in inner):
        return value
    if hint is float:
        if value is None:
            return math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            return number(value, where)
    elif isinstance(hint, type):
        if type(value) is hint:
            return value
    elif origin is tuple and isinstance(value, list):
        return tuple(_read(inner[0], one, f"{where}[{i}]") for i, one in enumerate(value))
    elif origin is Mapping and isinstance(value, dict):
        return {key: _read(inner[1], one, f"{where}[{key!r:.60}]") for key, one in value.items()}
    name = getattr(hint, "__name__", hint)
    raise ValueError(f"{where} must be {name}, not {value!r:.60}")
