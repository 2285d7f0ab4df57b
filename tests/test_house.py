"""Rules for the package: imports, and private names of other libraries."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import lightning.pytorch
import pytest
import torch
import transformers

import lightning_gputime

PACKAGE = Path(lightning_gputime.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""Syntax trees by the name of the module inside the package."""

FLOORS = [
    "_messages _phases",
    "_compat",
    "_record",
    "_ledger",
    "_measurement",
    "_instrumentation",
    "_diagnosis",
    "_output",
    "_options",
    "_loader",
    "_causes",
    "_runs _session",
    "_timer",
    "callback hooks huggingface metric",
    "_tuning",
    "_api _auto_instrumentation",
    "__init__",
    "__main__",
]
"""Packages and modules (rooms) by floor, lowest first. A room imports only from lower floors."""

FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}

TOP = {
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"),
    *("benchmarks", "docs", "examples", "lightning_gputime", "tests"),
    *("pyproject.toml", "zensical.toml"),
}
"""Files and folders at the top level, without dot files."""


def room_of(module: str) -> str:
    return module.partition(".")[0]


def imports(module: str) -> set[str]:
    """Return the modules and names that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(module: str) -> set[str]:
    """Return the modules of the package that a module imports.

    A name that is imported from a package is defined in its `__init__`, unless it is a module.
    """
    found = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(str(node.module), alias.name) for alias in node.names]
        else:
            continue
        for package, name in names:
            root, _, path = package.partition(".")
            if root == "lightning_gputime":
                paths = [
                    ".".join(filter(None, (path, *ends))) for ends in ([name], [], ["__init__"])
                ]
                found.add(next(path for path in paths if path in MODULES))
    return found


def test_modules_import_only_from_lower_floors_without_cycles() -> None:
    assert {*map(room_of, MODULES)} <= {*FLOOR_OF}
    imported = {module: own_imports(module) for module in MODULES}
    wrong = [
        f"{module} imports {other}"
        for module, others in imported.items()
        for other in others
        if room_of(other) != room_of(module)
        and FLOOR_OF[room_of(other)] >= FLOOR_OF[room_of(module)]
    ]
    assert not wrong
    # Raises CycleError if there is an import cycle.
    assert {*TopologicalSorter(imported).static_order()} == {*MODULES}


def test_imports_of_a_package_are_seen_in_its_init() -> None:
    assert own_imports("__main__") >= {"__init__", "_auto_instrumentation.command"}


def test_torch_and_lightning_are_imported_only_where_allowed() -> None:
    for module in MODULES:
        libraries = {name.partition(".")[0] for name in imports(module)}
        if module.startswith("_measurement."):
            assert "torch" not in libraries, module
            assert "_record" not in map(room_of, own_imports(module)), module
        if module not in ("callback", "_auto_instrumentation.lightning"):
            assert "lightning" not in libraries, module


# Names of other libraries. Each rule yields lines and names.

LIBRARIES = (
    "torch|functorch|lightning|pytorch_lightning|lightning_fabric|transformers|accelerate"
    "|deepspeed|trl|megatron"
)

PUBLIC_MODULES = {
    *("torch", "torch.compiler", "torch.distributed", "torch.nn", "torch.nn.parallel"),
    *("torch.accelerator", "torch.cuda", "torch.jit", "torch.mps", "torch.xpu"),
    *("torch.autograd", "torch.autograd.profiler", "torch.cuda.nvtx", "torch.version"),
    *("torch.backends", "torch.backends.cuda", "torch.backends.cudnn", "torch.nn.parameter"),
    *("torch.nn.utils.parametrize", "torch.optim", "torch.optim.optimizer", "torch.utils.data"),
    "torch.distributed.distributed_c10d",  # PrefixStore: types know it from there
    *("lightning.pytorch", "transformers"),
}
"""Documented modules of other libraries. Undocumented modules may move in any version."""

UNDOCUMENTED = {
    *("fit_loop", "epoch_loop", "val_loop", "batch_progress", "train_dataloader_next"),
    *("batch_to_device", "PassThroughProfiler"),
    *("callback_handler", "get_batch_samples", "evaluation_loop", "DEFAULT_CALLBACKS"),
    *("vllm_generation", "asyncOp", "trigger_wait", "AsyncCollectiveTensor", "queue_callback"),
    *("will_sync_module_buffers", "require_backward_grad_sync", "profile_hook_step"),
    *("create_script_module", "compile_subgraph_reason", "FORCE_SKIP_FILES", "callback_handler"),
}
"""Names that look public but are not documented."""

FRAMES = {"f_code", "f_locals", "f_globals", "f_back", "co_name", "co_filename", "__code__"}
"""Attributes with which code inspects its callers."""

ACTIONS = re.compile(r"\[(Callback|Strategy|LightningModule|LightningDataModule)\]")
"""Prefixes of actions that Lightning reports to its profiler."""

OWN_ENDINGS = {"_ms", "_mib", "_max_ms", "_min_ms", "_slowest_rank", "_share", "_ns"}
"""Endings of keys."""

LOOKUPS = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller", "Subscription"}
"""Functions that take the name of an attribute."""

PRIVATE_OF_OTHERS = {
    *("sys._getframe", "sys._current_frames"),  # Python documents them.
    "super()._load_from_state_dict",  # torch tells authors of modules to override it.
}

OF_NAMED_TUPLES = {"_make", "_replace"}
"""Methods that Python documents."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def names_in(tree: ast.AST) -> set[str]:
    """Return the names that code defines: functions, classes, variables, attributes and slots."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.ImportFrom(module=package, names=aliases):
                is_own = (package or "").startswith("lightning_gputime")
                found |= {alias.name for alias in aliases if is_own}
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                found |= {str(getattr(text, "value", "")) for text in ast.walk(value)}
    return found


OWN = {
    *(name for tree in MODULES.values() for name in names_in(tree)),
    *FLOOR_OF,
    *(part for module in MODULES for part in module.split(".")),
}
"""Names of this package."""


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield private attributes that are not this package's, or are of objects of others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            text = ast.unparse(node)
            is_documented = text in PRIVATE_OF_OTHERS or node.attr in OF_NAMED_TUPLES
            if not is_documented and not is_of_own_object(node):
                yield node.lineno, text


def is_of_own_object(node: ast.Attribute) -> bool:
    """Return whether a private attribute is one of this package, by its name and its object."""
    match node.value:
        case ast.Name(id=owner) | ast.Attribute(attr=owner):
            is_own = owner in OWN_OBJECTS
        case ast.Call(func=ast.Name(id="super")):
            is_own = True
        case other:
            is_own = ast.unparse(other) in OWN_OBJECTS
    return is_own and node.attr in OWN


OWN_OBJECTS = {
    *("self", "cls", "timer", "_timer", "other", "options", "_options", "summary", "_summary"),
    *("table", "losses", "kept", "one", "end_event", "run"),
    "self._read().summary()",
    "getattr(self.replacement, '__self__', self.replacement)",
}
"""Variables and attributes that hold objects of this package."""


def private_strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield strings that are, or contain, a private or an undocumented name."""
    nodes = [*ast.walk(tree)]
    # Index of a string among the parts of its f-string.
    index_in_f_string = {
        id(part): index
        for node in nodes
        if isinstance(node, ast.JoinedStr)
        for index, part in enumerate(node.values)
    }
    # Docstrings, and strings that document a name.
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    defined_here = names_in(tree) | {*FLOOR_OF} | OWN_ENDINGS
    looked_up = {
        id(argument)
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOOKUPS
        for argument in node.args
    }
    for node in nodes:
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in docs:
            continue
        text = node.value
        names = re.findall(r"\w+", text)
        hidden = [name for name in names if name in UNDOCUMENTED]
        hidden += ACTIONS.findall(text)
        is_module = re.fullmatch(rf"({LIBRARIES})(\.\w+)+\.?", text) is not None
        if is_module and text not in PUBLIC_MODULES | {"torch.compile"}:
            hidden.append(text)
        # Skip sentences: they mention private names, but do not access them.
        if re.fullmatch(r"[.\w]+", text) or id(node) in index_in_f_string:
            # The "_ms" of f"{phase}_ms" is the end of a name, not a private name.
            ends_a_name = index_in_f_string.get(id(node), 0) > 0 and text.startswith("_")
            complete = names[1:] if ends_a_name else names
            allowed = set() if id(node) in looked_up else defined_here
            hidden += [name for name in complete if is_private(name) and name not in allowed]
        yield from ((node.lineno, name) for name in hidden)


def undocumented_accesses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield undocumented attributes and modules, frames, and arguments taken by position."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in UNDOCUMENTED | FRAMES:
                yield node.lineno, name
            case ast.Attribute():
                path = ast.unparse(node)
                if re.match(rf"({LIBRARIES})\.", path) and is_module_of_other(path):
                    yield node.lineno, path
            case ast.Subscript(value=ast.Name(id="args"), slice=ast.Constant() | ast.UnaryOp()):
                yield node.lineno, ast.unparse(node)


def private_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield imports of undocumented modules, and of private names."""
    for node in ast.walk(tree):
        imported: list[tuple[str, list[str]]] = []
        match node:
            case ast.Import(names=aliases):
                imported = [(alias.name, []) for alias in aliases]
            case ast.ImportFrom(module=str(module), names=aliases):
                imported = [(module, [alias.name for alias in aliases])]
        for module, names in imported:
            if module.startswith("lightning_gputime"):
                continue
            hidden = [name for name in (module, *names) if is_private(name)]
            if re.match(rf"({LIBRARIES})(\.|$)", module):
                paths = [f"{module}.{name}" for name in names]
                hidden += [module] if module not in PUBLIC_MODULES else []
                hidden += [path for path in paths if is_module_of_other(path)]
            yield from ((node.lineno, name) for name in hidden)  # type: ignore[attr-defined]


LOADED = {*sys.modules} - {lightning.pytorch.__name__, torch.__name__, transformers.__name__}
"""Modules that can be reached as attributes of a library."""


def is_module_of_other(name: str) -> bool:
    """Return whether a name is a module of another library that it does not document."""
    return name not in PUBLIC_MODULES and name in LOADED


RULES = (private_attributes, private_strings, undocumented_accesses, private_imports)


def names_of_others(tree: ast.AST) -> list[tuple[int, str]]:
    return [found for rule in RULES for found in rule(tree)]


ALLOWED = {
    ("_instrumentation.optimizer", "args[1]"),  # torch documents the arguments of this hook.
    # It follows the frames that Python reports to it.
    *(("_ledger.watch", name) for name in ("f_back", "f_code", "f_globals")),
    # Code is known by its file.
    *((module, "co_filename") for module in ("_ledger.ledger", "_ledger.places", "_timer")),
    # `run` waits for this module, to add a timer to each Trainer.
    ("_auto_instrumentation.__init__", "transformers.trainer"),
    ("_auto_instrumentation.__init__", "transformers.training_args"),
    # The fields of a saved run, which is a dataclass of another module.
    ("_runs.saved", "_summary"),
}


def test_private_names_of_other_libraries_are_only_in_compat() -> None:
    found = [
        f"{module}:{line}: {name}"
        for module, tree in MODULES.items()
        if room_of(module) != "_compat"
        for line, name in names_of_others(tree)
        if (module, name) not in ALLOWED
    ]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "torch._C._current_graph_task_id()",
        "module._forward_hooks",
        "trainer._fit",  # This package has an attribute of that name.
        "trainer.fit_loop",
        "getattr(trainer, '_run_epoch')",
        "attrgetter('fit_loop.epoch_loop')",
        "f'{trainer}._run'",
        "f'[Callback]{key}.on_train_start'",
        "name == '[_TrainingEpochLoop].train_dataloader_next'",
        "import torch._dynamo",
        "from torch import _C",
        "from torch.jit import _recursive",
        "from lightning.fabric.wrappers import _unwrap_objects",
        "from lightning.pytorch.loops import fit_loop",
        "torch.utils.weak.WeakTensorKeyDictionary",
        "sys.modules['torch.distributed.c10d_logger']",
        "frame.f_code.co_name == 'wrapper'",
        "tensors = args[4]",
    ],
)
def test_search_finds_private_names_of_other_libraries(code: str) -> None:
    assert names_of_others(ast.parse(code))


def test_compat_looks_up_each_private_name_by_its_declaration() -> None:
    # A direct access would raise if a version lacks the name.
    found = [
        f"{module}:{line}: {name}"
        for module, tree in MODULES.items()
        if room_of(module) == "_compat"
        for line, name in private_attributes(tree)
    ]
    assert not found


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_repository_root_has_only_the_listed_files() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {path.partition("/")[0] for path in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP
