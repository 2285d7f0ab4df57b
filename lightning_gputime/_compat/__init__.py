"""Wrappers around internals of other libraries, which no other folder uses.

Each private attribute is declared in this folder as a `Name`, with a fallback that disables the
features that need it. The self-check of a run finds out if Lightning has renamed its actions. Code
that only needs public interfaces belongs elsewhere. This module looks the names up, and reports
those that are missing.
"""

import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lightning_gputime._messages import messages

MISSING: Any = object()
"""Result of a lookup if the installed version of a library does not have the name."""


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """Something that cannot be measured in this process."""

    text: str  # A sentence for users, with the reason.
    blurred: tuple[str, ...] = ()  # Phases that are not separated. No verdict may use them.


@dataclass(frozen=True, slots=True)
class Expected:
    """Labels that appear in the steps of a trainer if its version works as this package expects."""

    labels: frozenset[str]  # At least one of these must appear.
    feature: str  # Measurement that is missing otherwise, for the report.
    otherwise: str  # Reason for the report, as in "lightning 2.7 reported no ...".
    blurred: tuple[str, ...] = ()  # Phases that are not separated without these labels.


@dataclass(frozen=True, slots=True)
class Name:
    """A private name of another library, and what is lost without it."""

    path: str  # The dotted name, module first, such as "torch._C._current_graph_task_id".
    feature: str = ""  # Measurement that is missing without it. Empty if a public name replaces it.
    blurred: tuple[str, ...] = ()  # Phases that cannot be separated without it.
    # Function that returns an object with the attribute, if the class lacks it.
    sample: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        NAMES[self.path] = self

    @property
    def library(self) -> str:
        return self.path.partition(".")[0]

    @property
    def attribute(self) -> str:
        return self.path.rpartition(".")[2]

    def find(self, default: Any = None) -> Any:
        """Return the object at the path, or `default` if this version does not have it."""
        found = look_up(self.path) if self.sample is None else read(self.sample(), self.attribute)
        return default if found is MISSING else found

    def of(self, owner: Any, default: Any = None) -> Any:
        found = read(owner, self.attribute)
        return default if found is MISSING else found

    def is_in(self, owner: Any) -> bool:
        return read(owner, self.attribute) is not MISSING


NAMES: dict[str, Name] = {}
"""All private names that the package uses, by path."""

_not_measured: dict[str, NotMeasured] = {}


def read(owner: Any, attribute: str) -> Any:
    return getattr(owner, attribute, MISSING)


def look_up(path: str) -> Any:
    """Return the object at a dotted path, or `MISSING`. Import the modules on the path."""
    owner, _, attribute = path.rpartition(".")
    try:
        return read(pkgutil.resolve_name(owner), attribute)
    except (AttributeError, ImportError):
        return MISSING


def version_of(library: str) -> str:
    """Return the version of an imported library, or the phrase "of this version"."""
    return str(getattr(sys.modules.get(library), "__version__", "of this version"))


def report(name: Name, *, library: str = "") -> None:
    """Record that a name is missing, and warn once. `library` defaults to the name's package."""
    if name.path in _not_measured or not name.feature:
        return
    library = library or name.library
    values = name.feature, library, version_of(library), name.attribute
    text = "not measured: {}, because {} {} has no {}".format(*values)
    _not_measured[name.path] = NotMeasured(text, name.blurred)
    messages.warning("Not measured: %s, because %s %s has no %s.", *values)


def report_missing(*names: Name) -> None:
    for name in names:
        if name.find(MISSING) is MISSING:
            report(name)


def report_missing_of(owner: Any, *names: Name) -> None:
    """Report the names that an object does not have."""
    # The same class exists in `lightning` and `pytorch_lightning`: name the package that is used.
    # Look at all base classes, because a user's subclass is in neither.
    roots = {kind.__module__.partition(".")[0] for kind in type(owner).__mro__}
    for name in names:
        if not name.is_in(owner):
            is_other = name.library not in roots and "pytorch_lightning" in roots
            report(name, library="pytorch_lightning" if is_other else "")


def not_measured(libraries: Iterable[str]) -> list[NotMeasured]:
    wanted = {*libraries}
    return [found for path, found in _not_measured.items() if path.partition(".")[0] in wanted]
