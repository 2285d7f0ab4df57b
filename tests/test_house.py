"""The rooms of the package: what stands where, and who may know whom."""

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
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
FLOORS = [
    {"_messages", "_phases", "_untraced"},
    {"_guard", "_record"},
    {"_boundaries", "_results"},
    {"_options"},
    {"_causes", "_work"},
    {"_run", "_runs"},
    {"_readings"},
    {"_actions", "_lightning", "_timer"},
    {"_unused"},
    {"_books", "_evaluations", "_fabric", "_fit", "_huggingface", "_reports"},
    {"_plain", "_trainer"},
    {"callback", "fabric", "hooks", "huggingface", "metric"},
    {"__init__"},
    {"__main__"},
]
"""From the lowest to the highest; a room knows none above it, and none beside it."""

TOP = {
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "benchmarks",
    "examples",
    "lightning_gputime",
    "pyproject.toml",
    "tests",
}
"""What stands beside the dot files."""


def imports(module: str) -> set[str]:
    """What a module imports of the package, without its name; inside functions, too."""
    tree = ast.parse(MODULES[module].read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    own = {name.removeprefix("lightning_gputime.") for name in found}
    return {name for name in own if name in MODULES}


def floor(module: str) -> int:
    room = module.partition(".")[0]
    [number] = [number for number, rooms in enumerate(FLOORS) if room in rooms]
    return number


@pytest.mark.parametrize("module", MODULES)
def test_a_module_knows_its_own_room_and_the_floors_below(module: str) -> None:
    room = module.partition(".")[0]
    for other in imports(module):
        assert other.partition(".")[0] == room or floor(other) < floor(module), other


def test_no_modules_import_each_other_in_a_circle() -> None:
    order = TopologicalSorter({module: imports(module) for module in MODULES}).static_order()
    assert set(order) == {*MODULES}


def test_the_numbers_know_no_device() -> None:
    for module in MODULES:
        if module.startswith("_results."):
            text = MODULES[module].read_text()
            assert not re.search(r"^\s*(import|from) torch", text, re.MULTILINE), module
            of_record = {name for name in imports(module) if name.startswith("_record.")}
            assert of_record <= {"_record.steps"}, module


def test_only_one_module_has_lightnings_private_names() -> None:
    for module in MODULES:
        if module != "_lightning":
            text = MODULES[module].read_text()
            assert not re.search(r"(trainer|pl_module)(\.\w+)*\._[a-z]", text), module
            assert "import lightning" not in text or module == "_trainer", module


@pytest.mark.parametrize("module", MODULES)
def test_a_file_has_one_subject(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= 400


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_nothing_else_stands_at_the_top() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no checkout")
    top = {path.partition("/")[0] for path in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP
