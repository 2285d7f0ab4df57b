"""Ledger: which line of the user's code is the reason for each millisecond of a step.

In a few steps, the examined steps, each line of the user's code is a mark, too.

- `examiner` chooses the examined steps, and marks their lines. `_session.schedule` chooses the
  timed steps.
- `watch` follows the lines that run.
- `pace` compares the clocks of host and device, and decides which set the pace of a phase.
- `cells` divides an examined step into its times by place, phase and pace: host-paced, paced by
  the device, or idle.
- `rows` sums up these times by line or function, as shown to the user.
- `ledger` has the facts of a run: examined steps, the lines that ran outside of steps, the pace of
  all timed steps, and the rows.

This module has the places in the user's code, which all of them share: functions in the context of
their callers, and their lines.
"""

from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from lightning_gputime._compat.python_ import short_name

LINES, CALLS, NOTHING = 2, 1, 0
"""Detail with which a function is followed. With `CALLS`, its lines are not told apart; with
`NOTHING`, its time belongs to the line that calls it."""


class Operations(NamedTuple):
    """Number of differentiable operations that a line runs per step, and of some kinds."""

    all: int = 0
    convolutions: int = 0
    float32_products: int = 0  # Matrix products in float32, without autocast.


FunctionKey = tuple[str, str, int]
"""Identity of a function in any context: its file, its name and its first line."""


def key_of(code: CodeType) -> FunctionKey:
    return code.co_filename, short_name(code.co_qualname), code.co_firstlineno


class Line:
    """A line of a function, in the context of its callers.

    Attributes:
        function: The function; None for the root, which is outside of the user's code.
        number: Number of the line; 0 if the lines of the function are not told apart.
        calls: Functions that this line calls, by the id of their code.
    """

    __slots__ = ("calls", "function", "number")

    def __init__(self, function: "Function | None", number: int) -> None:
        self.function, self.number = function, number
        self.calls: dict[int, Function] = {}

    @property
    def path(self) -> list[tuple["Function", int]]:
        """Functions that lead to this line, the outermost first, each with its line on the way."""
        path = []
        line = self
        while line.function is not None:
            path.append((line.function, line.number))
            line = line.function.caller
        return path[::-1]


class Function:
    """A function, in the context of its callers.

    Attributes:
        code: Its code; None in a copy.
        caller: Line that calls it.
        file: Path of its file.
        name: Qualified name, without the functions around its definition.
        first_line: Line of its definition.
        is_library: True for a function of a library, whose lines are not followed.
        whole: Stands for the function where its lines are not told apart.
        lines: Its lines that have run, by their number.
    """

    __slots__ = ("caller", "code", "file", "first_line", "is_library", "lines", "name", "whole")

    def __init__(self, code: CodeType, caller: Line, detail: int) -> None:
        self.code: CodeType | None = code
        self.caller = caller
        self.file, self.name, self.first_line = key_of(code)
        self.is_library = detail == CALLS
        self.whole = Line(self, 0)
        self.lines: dict[int, Line] = {}

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # Code cannot be pickled.
        return None, {name: getattr(self, name) for name in self.__slots__} | {"code": None}

    @property
    def key(self) -> FunctionKey:
        return self.file, self.name, self.first_line

    def line_at(self, number: int) -> Line:
        line = self.lines.get(number)
        if line is None:
            line = self.lines[number] = Line(self, number)
        return line


def lines_in(file: str, first: int, last: int) -> str:
    """Return a range of lines of a file, such as "train.py:63-70"."""
    path = Path(file)
    # The cell of a notebook is a file such as /tmp/ipykernel_71/3747189239.py.
    name = "cell" if path.parent.name.startswith("ipykernel_") else path.name
    return f"{name}:{first}-{last}" if last > first else f"{name}:{first}"
