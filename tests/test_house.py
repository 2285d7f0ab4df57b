"""Direction of imports, and private names of other libraries."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from processes import run

import lightning_gputime

PACKAGE = Path(lightning_gputime.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}
FLOORS = """_messages _phases testing, _compat _output.table, _record, _ledger _measurement.sums,
    _attribution.__init__ _loader.__init__ _ranks, _measurement, _attribution _instrumentation,
    _diagnosis.__init__, _loader, _diagnosis, _output, _options,
    _causes, _ranks.exchange, _runs _session, _timer,
    callback hooks huggingface metric, _auto_instrumentation, _tuning, __init__, __main__"""
"""Packages and modules (rooms) by floor, lowest first. A room imports only from lower floors.

A feature is one folder, so it has several rooms: its facts are below the diagnosis, its advice
above the types of the diagnosis.
"""

FLOOR_OF = {room: n for n, rooms in enumerate(FLOORS.split(",")) for room in rooms.split()}


def room_of(module: str) -> str:
    return module if module in FLOOR_OF else module.partition(".")[0]


def imports(module: str) -> list[tuple[str, str]]:
    """Return the modules that a module imports, with a name from each, also inside functions."""
    found = []
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(str(node.module), alias.name) for alias in node.names]
    return found


def own_imports(module: str) -> set[str]:
    """Return the modules of the package that a module imports.

    A name that is imported from a package is defined in its `__init__`, unless it is a module. To
    import a module of another package runs the `__init__` of that package, too.
    """
    found = set()
    for package, name in imports(module):
        root, _, path = package.partition(".")
        if root == "lightning_gputime":
            paths = [".".join(filter(None, (path, *ends))) for ends in ([name], [], ["__init__"])]
            found.add(next(path for path in paths if path in MODULES))
            folder = path.partition(".")[0]
            package = f"{folder}.__init__"
            # Most packages have an empty `__init__`.
            if folder != module.partition(".")[0] and package in MODULES and imports(package):
                found.add(package)
    return found


def test_modules_import_only_from_lower_floors_without_cycles() -> None:
    assert {*map(room_of, MODULES)} <= {*FLOOR_OF}
    imported = {module: own_imports(module) for module in MODULES}
    rooms = [(room_of(a), room_of(b)) for a, others in imported.items() for b in others]
    assert [
        pair for pair in rooms if FLOOR_OF[pair[1]] >= FLOOR_OF[pair[0]] and len({*pair}) > 1
    ] == []
    # Raises CycleError if there is an import cycle.
    assert {*TopologicalSorter(imported).static_order()} == {*MODULES}
    assert imported["__main__"] >= {"__init__", "_auto_instrumentation.command"}


def test_type_checkers_see_each_public_name() -> None:
    """`__init__` has the names twice, because type checkers cannot follow its lazy imports."""
    names = lightning_gputime._NAMES.items()
    listed = {(f"lightning_gputime.{module}", name) for module, found in names for name in found}
    shown = {(module, name) for module, name in imports("__init__") if "gputime" in module}
    assert shown - {("lightning_gputime._messages", "suggest")} == listed


def test_lightning_is_imported_only_where_allowed() -> None:
    for module in set(MODULES) - {"callback", "_auto_instrumentation.lightning"}:
        assert "lightning" not in {name.partition(".")[0] for name, _ in imports(module)}, module


def test_commands_that_read_runs_import_no_torch() -> None:
    code = "import sys, lightning_gputime; from lightning_gputime import _options, compare, load;"
    assert run("-c", f"{code} print('torch' in sys.modules)") == "False\n"


# Private names of other libraries

PUBLIC = {
    *("compiler", "distributed", "nn", "nn.parallel", "accelerator", "cuda", "jit", "mps", "xpu"),
    *("autograd", "autograd.profiler", "cuda.nvtx", "version", "backends", "backends.cuda"),
    *("backends.cudnn", "nn.parameter", "nn.utils.parametrize", "optim", "optim.optimizer"),
    *("utils.data", "distributed.distributed_c10d", "compile"),
}
"""Documented modules of torch. Undocumented modules may move in any version."""

UNDOCUMENTED = {
    *("fit_loop", "epoch_loop", "val_loop", "batch_progress", "batch_to_device", "f_back"),
    *("callback_handler", "get_batch_samples", "evaluation_loop", "queue_callback", "f_code"),
    *("require_backward_grad_sync", "f_locals", "f_globals", "co_name", "co_filename", "__code__"),
}
"""Names of libraries and of frames that look public but are not documented."""

ALLOWED = {
    *("sys._getframe", "sys._current_frames", "super()._load_from_state_dict"),  # Documented.
    # The ledger follows the frames that Python reports to it, and knows code by its file.
    *(f"_ledger.watch {name}" for name in ("f_back", "f_code", "f_globals")),
    "testing _clock",  # The private option of all timers.
    "_ms",  # The end of keys.
    *(f"{module} co_filename" for module in ("_ledger.__init__", "_ledger.ledger", "_timer")),
}
OWN_OBJECTS = "self cls timer other options summary table losses kept one end_event run"


def names_in(tree: ast.AST) -> set[str]:
    """Return the names that code defines, or imports from the package."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.ImportFrom(module=str(module), names=aliases) if "gputime" in module:
                found |= {alias.name for alias in aliases}
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                found |= {str(getattr(text, "value", "")) for text in ast.walk(value)}
    return found


OWN = set().union(*map(names_in, MODULES.values()))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def is_hidden(path: str) -> bool:
    """Return True for an undocumented module of a library."""
    library, _, module = path.partition(".")
    if library == "torch":
        return module not in {"", *PUBLIC}
    is_library = library in ("lightning", "transformers", "accelerate", "deepspeed", "trl")
    return is_library and module not in ("", "pytorch")


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """Yield private attributes that are not this package's, or are of objects of others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value).rpartition(".")[2].strip("_")
            is_own = node.attr in OWN and owner in {*OWN_OBJECTS.split(), "super()", "summary()"}
            if not is_own and node.attr not in ("_make", "_replace"):  # Documented by Python.
                yield ast.unparse(node)


def names_of_others(tree: ast.AST) -> Iterator[str]:
    """Yield private and undocumented names of other libraries."""
    yield from private_attributes(tree)
    known = names_in(tree) | {*FLOOR_OF}
    docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    ends = {part for parts in texts for part in parts[1:]}  # Such as "_ms" of f"{phase}_ms".
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in UNDOCUMENTED:
                yield name
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases if is_hidden(alias.name))
            case ast.ImportFrom(module=str(module), names=aliases) if "gputime" not in module:
                yield from filter(is_hidden, [module])
                yield from (alias.name for alias in aliases if is_private(alias.name))
            case ast.Constant(value=str(text)) if node not in docs and node not in ends:
                if re.fullmatch(r"[.\w]+", text):  # Not a sentence.
                    names = {*text.split(".")}
                    yield from {*filter(is_private, names)} - known | names & UNDOCUMENTED


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name) != "_compat"])
def test_private_names_of_other_libraries_are_only_in_compat(module: str) -> None:
    found = names_of_others(MODULES[module])
    assert [name for name in found if not {name, f"{module} {name}"} & ALLOWED] == []


def test_compat_looks_up_each_private_name_by_its_declaration() -> None:
    # A direct access would raise if a version lacks the name.
    compat = [tree for module, tree in MODULES.items() if room_of(module) == "_compat"]
    assert {name for tree in compat for name in private_attributes(tree)} <= ALLOWED


def test_tables_of_states_name_cases_that_exist() -> None:
    files = [*Path(__file__).parent.glob("*.py")]
    tests = "".join(path.read_text() for path in files) + " ".join(path.stem for path in files)
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    rows = [line for source in sources for line in source.splitlines() if line.endswith(" |")]
    last_cells = [row.split("|")[-2] for row in rows]
    names = {name for cell in last_cells for name in re.findall(r"[a-z]+(?:_[a-z0-9]+)+", cell)}
    assert len(names) > 20
    assert [name for name in names if name not in tests] == []
