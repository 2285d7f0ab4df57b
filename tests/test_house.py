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
    "_compat",
    "_record",
    "_memory",
    "_boundaries _measurement",
    "_options",
    "_causes _work",
    "_saved_runs _session",
    "_lightning _timer",
    "_fit _loop_timer",
    "callback hooks huggingface metric",
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
        if module.startswith("_measurement."):
            assert not re.search(r"^\s*(import|from) torch", text, re.MULTILINE), module
            assert not [name for name in imports(module) if name.startswith("_record.")], module
        if module not in ("callback", "_lightning", "_auto_instrumentation.lightning"):
            assert not re.search(r"import lightning\b", text), module


def names_in(module: str) -> set[str]:
    """The names that a module defines: of functions, classes, variables, attributes and slots."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module])):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.ImportFrom(module=package, names=aliases):
                is_own = (package or "").startswith("lightning_gputime")
                found |= {alias.name for alias in aliases if is_own}
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(module: str) -> list[str]:
    """The private names in a module, of attributes, imports and strings, and their lines."""
    found = []
    tree = ast.parse(MODULES[module])
    in_f_strings = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Attribute(value=ast.Name(id="sys"), attr="_getframe"):
                pass  # Python documents it.
            case ast.Attribute(attr=name):
                names = [name]
            case ast.Import(names=aliases):
                names = [part for alias in aliases for part in alias.name.split(".")]
            case ast.ImportFrom(module=package, names=aliases):
                if not (package or "").startswith("lightning_gputime"):
                    names = (package or "").split(".") + [alias.name for alias in aliases]
            case ast.Constant(value=str(text)) if id(node) not in in_f_strings:
                # What is no name or path, such as a sentence, is no attribute of anything.
                names = text.split(".") if re.fullmatch(r"\w+(\.\w+)*", text) else []
        found += [(name, node.lineno) for name in names if is_private(name)]  # type: ignore[attr-defined]
    return [f"{module}:{line}: {name}" for name, line in found if name not in OWN]


OWN = {
    *(name for module in MODULES for name in names_in(module)),
    *FLOOR_OF,
    *("_ms", "_mib", "_max_ms", "_min_ms", "_slowest_rank", "_share", "_ns"),  # endings of keys
    "_replace",  # of named tuples, documented
}
"""Private names that are the package's own."""


def test_private_names_of_other_libraries_are_in_compat_alone() -> None:
    others = [module for module in MODULES if room_of(module) != "_compat"]
    found = [text for module in others for text in private_names(module)]
    assert not found
    assert any(private_names("_compat.torch_"))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_nothing_else_stands_at_the_top() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no checkout")
    top = {path.partition("/")[0] for path in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP
