"""Direction of imports, and private names of other libraries."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import lightning.pytorch  # noqa: F401 - fills sys.modules
import pytest
import transformers  # noqa: F401 - fills sys.modules

import lightning_gputime

PACKAGE = Path(lightning_gputime.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}
FLOORS = """_messages _phases _measurement.units testing, _compat, _record, _ledger,
    _loader.__init__, _measurement, _instrumentation, _diagnosis.__init__ _output.table, _loader,
    _diagnosis, _output, _options, _causes, _runs _session, _timer,
    callback hooks huggingface metric, _api _auto_instrumentation, _tuning, __init__, __main__"""
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

    A name that is imported from a package is defined in its `__init__`, unless it is a module.
    """
    found = set()
    for package, name in imports(module):
        root, _, path = package.partition(".")
        if root == "lightning_gputime":
            paths = [".".join(filter(None, (path, *ends))) for ends in ([name], [], ["__init__"])]
            found.add(next(path for path in paths if path in MODULES))
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


def test_torch_and_lightning_are_imported_only_where_allowed() -> None:
    for module in MODULES:
        libraries = {name.partition(".")[0] for name, _ in imports(module)}
        assert "torch" not in libraries or not module.startswith("_measurement."), module
        if module not in ("callback", "_auto_instrumentation.lightning"):
            assert "lightning" not in libraries, module


LIBRARIES = (
    r"(torch|functorch|(pytorch_)?lightning(_fabric)?|transformers|accelerate|deepspeed|trl)\.\w"
)
PUBLIC = {
    *("compiler", "distributed", "nn", "nn.parallel", "accelerator", "cuda", "jit", "mps", "xpu"),
    *("autograd", "autograd.profiler", "cuda.nvtx", "version", "backends", "backends.cuda"),
    *("backends.cudnn", "nn.parameter", "nn.utils.parametrize", "optim", "optim.optimizer"),
    *("utils.data", "distributed.distributed_c10d", "compile"),
}
"""Documented modules of torch. Undocumented modules may move in any version."""

UNDOCUMENTED = {
    *("fit_loop", "epoch_loop", "val_loop", "batch_progress", "train_dataloader_next"),
    *("batch_to_device", "PassThroughProfiler", "callback_handler", "get_batch_samples"),
    *("evaluation_loop", "DEFAULT_CALLBACKS", "vllm_generation", "asyncOp", "trigger_wait"),
    *("AsyncCollectiveTensor", "queue_callback", "will_sync_module_buffers", "FORCE_SKIP_FILES"),
    *("require_backward_grad_sync", "profile_hook_step", "create_script_module"),
    *("compile_subgraph_reason", "f_code", "f_locals", "f_globals", "f_back", "co_name"),
    *("co_filename", "__code__"),
}
"""Names of libraries and of frames that look public but are not documented."""

ALLOWED = {
    *("sys._getframe", "sys._current_frames", "super()._load_from_state_dict"),  # Documented.
    *("_ms", "_mib", "_max_ms", "_min_ms", "_slowest_rank", "_share", "_ns"),  # Ends of keys.
    # The ledger follows the frames that Python reports to it, and knows code by its file.
    *(f"_ledger.watch {name}" for name in ("f_back", "f_code", "f_globals")),
    "testing _clock",  # The private option of all timers.
    *(f"{module} co_filename" for module in ("_ledger.ledger", "_ledger.places", "_timer")),
    "_instrumentation.optimizer args[1]",  # torch documents the arguments of this hook.
    *(f"_auto_instrumentation.__init__ transformers.train{end}" for end in ("er", "ing_args")),
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


OWN = {name for tree in MODULES.values() for name in names_in(tree)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def is_hidden_module(path: str) -> bool:
    library, _, module = path.rstrip(".").partition(".")
    is_public = module in PUBLIC if library == "torch" else path == "lightning.pytorch"
    return re.match(LIBRARIES, path) is not None and not is_public


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """Yield private attributes that are not this package's, or are of objects of others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value).rpartition(".")[2].strip("_")
            is_own = node.attr in OWN and owner in {*OWN_OBJECTS.split(), "super()", "summary()"}
            if not is_own and node.attr not in ("_make", "_replace"):  # Documented by Python.
                yield ast.unparse(node)


def names_of_others(tree: ast.AST) -> Iterator[str]:
    """Yield private and undocumented names of other libraries, and arguments by position."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    defined_here = names_in(tree) | {*FLOOR_OF}
    strings = [node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    later_parts = {id(part) for parts in strings for part in parts[1:]}
    yield from private_attributes(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                text = ast.unparse(node)
                if name in UNDOCUMENTED or (text in sys.modules and is_hidden_module(text)):
                    yield name if name in UNDOCUMENTED else text
            case ast.Subscript(value=ast.Name(id="args"), slice=ast.Constant() | ast.UnaryOp()):
                yield ast.unparse(node)
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases if is_hidden_module(alias.name))
            case ast.ImportFrom(module=str(module), names=aliases) if "gputime" not in module:
                paths = [f"{module}.{alias.name}" for alias in aliases]
                yield from filter(is_hidden_module, [module, *({*paths} & {*sys.modules})])
                yield from (path for path in paths if any(map(is_private, path.split("."))))
            case ast.Constant(value=str(text)) if id(node) not in docs:
                # The "_ms" of f"{phase}_ms" is the end of a name, not a private name.
                names = re.findall(
                    r"\w+", re.sub(r"^_\w+", "", text) if id(node) in later_parts else text
                )
                yield from (name for name in names if name in UNDOCUMENTED)
                yield from re.findall(r"\[(?:Callback|Strategy|Lightning\w+)\]", text)
                if re.fullmatch(r"[.\w]+", text):  # Not a sentence, which only mentions names.
                    yield from (
                        name for name in names if is_private(name) and name not in defined_here
                    )
                    yield from filter(is_hidden_module, [text])


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name) != "_compat"])
def test_private_names_of_other_libraries_are_only_in_compat(module: str) -> None:
    found = names_of_others(MODULES[module])
    assert [name for name in found if not {name, f"{module} {name}"} & ALLOWED] == []


def test_compat_looks_up_each_private_name_by_its_declaration() -> None:
    # A direct access would raise if a version lacks the name.
    found = {
        name for m in MODULES if room_of(m) == "_compat" for name in private_attributes(MODULES[m])
    }
    assert found <= ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        *("torch._C._current_graph_task_id()", "module._forward_hooks", "trainer.fit_loop"),
        *("trainer._fit", "getattr(trainer, '_run_epoch')", "attrgetter('fit_loop.epoch_loop')"),
        *("f'{trainer}._run'", "f'[Callback]{key}.on_train_start'", "import torch._dynamo"),
        *("from torch import _C", "from torch.jit import _recursive", "tensors = args[4]"),
        *("from lightning.fabric.wrappers import _unwrap_objects", "frame.f_code.co_name == 'a'"),
        *("from lightning.pytorch.loops import fit_loop", "torch.utils.weak.WeakTensorRefKey"),
        "sys.modules['torch.distributed.c10d_logger']",
    ],
)
def test_search_finds_private_names_of_other_libraries(code: str) -> None:
    assert [*names_of_others(ast.parse(code))]
