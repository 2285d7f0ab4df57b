"""The rooms of the package: what stands where, and which may import which."""

import ast
import re
import shutil
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_gputime

PACKAGE = Path(lightning_gputime.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""The text of each module, by its name inside the package."""

FLOORS = [
    "_messages _phases",
    "_record",
    "_memory",
    "_boundaries _results",
    "_options",
    "_causes _work",
    "_saved_runs _session",
    "_lightning _timer",
    "_fit _loop_timer",
    "callback fabric hooks huggingface metric",
    "_api _auto_instrumentation",
    "__init__",
    "__main__",
]
"""The rooms, from the lowest floor to the highest; none imports from above, nor from beside it."""

FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}

TOP = {
    "CITATION.cff",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "benchmarks",
    "docs",
    "examples",
    "lightning_gputime",
    "mkdocs.yml",
    "pyproject.toml",
    "tests",
}
"""What stands beside the dot files."""


def room_of(module: str) -> str:
    return module.partition(".")[0]


def imports(module: str) -> set[str]:
    """What a module imports of the package, without its name; inside functions, too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    own = {name.removeprefix("lightning_gputime.") for name in found}
    return {name for name in own if name in MODULES}


def test_modules_import_from_their_own_room_and_from_lower_floors_without_a_circle() -> None:
    assert {*map(room_of, MODULES)} <= {*FLOOR_OF}
    known = {module: imports(module) for module in MODULES}
    wrong = [
        f"{module} imports {other}"
        for module, others in known.items()
        for other in others
        if room_of(other) != room_of(module)
        and FLOOR_OF[room_of(other)] >= FLOOR_OF[room_of(module)]
    ]
    assert not wrong
    # Of a circle this raises CycleError, which names its modules.
    assert {*TopologicalSorter(known).static_order()} == {*MODULES}


def test_only_those_modules_name_the_device_and_lightning_that_may() -> None:
    for module, text in MODULES.items():
        if module.startswith("_results."):
            assert not re.search(r"^\s*(import|from) torch", text, re.MULTILINE), module
            assert not [name for name in imports(module) if name.startswith("_record.")], module
        if module != "_lightning":
            assert not re.search(r"(trainer|pl_module)(\.\w+)*\._[a-z]", text), module
            own = module in ("callback", "_auto_instrumentation.lightning")
            assert not re.search(r"import lightning\b", text) or own, module


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_nothing_else_stands_at_the_top() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no checkout")
    top = {path.partition("/")[0] for path in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP
