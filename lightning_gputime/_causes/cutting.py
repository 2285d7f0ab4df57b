"""One step, cut out of the trace of many."""

import json
from collections.abc import Iterator
from typing import Any

# Events that torch.profiler takes of the device, by their categories.
_OF_DEVICE = frozenset(
    ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync", "overhead")
)


def cut(text: str, name: str, new_name: str) -> str:
    """Returns the trace of one step, with what the host did in it and what that let the device do.

    Args:
        text: A trace of torch.profiler, as JSON.
        name: The name of the range around the step.
        new_name: The name that it gets.

    Raises:
        ValueError: If there is no such range.
    """
    begin, end = _range(text, name)
    # What the host launched in it, and the ranges in it, which the device has, too.
    launched = {
        key
        for event in _events(text)
        if _is_of_host(event) and _begins_in(event, begin, end)
        for key in (_arg(event, "correlation"), _range_id(event))
    }
    kept = []
    for event in _events(text):
        if _belongs(event, begin, end, launched):
            if event.get("name") == name:
                event["name"] = new_name
            elif event.get("name", "").startswith(name.rpartition(" ")[0]):
                continue  # The range of another step, which ends or begins here.
            kept.append(event)
    head = text[: text.index('"traceEvents"')].rstrip().rstrip(",")
    events = ",\n".join(json.dumps(event) for event in kept)
    comma = "," if head != "{" else ""
    return f'{head}{comma}\n"traceEvents": [\n{events}\n]}}\n'


def _range(text: str, name: str) -> tuple[float, float]:
    for event in _events(text):
        if event.get("name") == name and event.get("cat") == "user_annotation":
            return event["ts"], event["ts"] + event["dur"]
    raise ValueError(f"the trace has no range {name!r}")


def _belongs(event: dict[str, Any], begin: float, end: float, launched: set[Any]) -> bool:
    kind = event.get("ph")
    if kind == "M":
        return True
    if event.get("cat") == "ac2g":  # An arrow from a launch to what it has launched.
        return event.get("id") in launched
    if event.get("cat") == "gpu_user_annotation":
        return _range_id(event) in launched
    if not _is_of_host(event) and (key := _arg(event, "correlation")) is not None:
        return key in launched
    return kind in ("X", "s", "f", "t", "i") and _begins_in(event, begin, end)


def _is_of_host(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") not in _OF_DEVICE


def _begins_in(event: dict[str, Any], begin: float, end: float) -> bool:
    # What began before, as the whole trace or a loop over steps, is none of the step's.
    return begin <= float(event.get("ts", -1.0)) < end


def _range_id(event: dict[str, Any]) -> Any:
    if event.get("cat") not in ("user_annotation", "gpu_user_annotation"):
        return None
    return "range", _arg(event, "External id")


def _arg(event: dict[str, Any], name: str) -> Any:
    return (event.get("args") or {}).get(name)


def _events(text: str) -> Iterator[dict[str, Any]]:
    # One by one: as objects, all of them would take ten times as much memory.
    decode = json.JSONDecoder().raw_decode
    at = text.index("[", text.index('"traceEvents"')) + 1
    while True:
        while text[at] in " \r\n\t,":
            at += 1
        if text[at] == "]":
            return
        event, at = decode(text, at)
        yield event
