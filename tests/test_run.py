"""`lightning_gputime run`: scripts without a timer, each in a separate process."""

import copy
import importlib.util
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import zipapp
from collections.abc import Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from itertools import count, permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from processes import ENVIRONMENT, PACKAGE

from lightning_gputime import GPUPhaseTimer, TimerOptions, __main__, load
from lightning_gputime import _auto_instrumentation as auto
from lightning_gputime._auto_instrumentation import BEGAN, VARIABLE, adding, options, program
from lightning_gputime._auto_instrumentation import lightning as auto_lightning
from lightning_gputime._auto_instrumentation.command import SWITCHES, VALUES
from lightning_gputime._auto_instrumentation.plain import _models_of
from lightning_gputime._session.null import NEVER_ATTACHED

GROUPS = {
    "lightning.pytorch.callbacks_factory": "trainer_callbacks",
    "lightning.fabric.callbacks_factory": "fabric_callbacks",
    "pytorch_lightning.callbacks_factory": "trainer_callbacks",
    "lightning_fabric.callbacks_factory": "fabric_callbacks",
}

PLAIN = """
import sys, torch
from torch import nn
print("arguments", sys.argv[1:], __name__)
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(30):
    optimizer.zero_grad()
    net(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
"""
TWO_MODELS = """
import torch
from torch import nn
first, second = nn.Linear(4, 4), nn.Linear(4, 4)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
for _ in range(30):
    second(first(torch.ones(2, 4))).square().mean().backward()
    optimizer.step()
"""
THEN_ANOTHER_LOOP = """
import gc, weakref
models = [weakref.ref(first), weakref.ref(second)]
del first, second, optimizer
net = nn.Linear(4, 4)
other = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(60):
    net(torch.ones(2, 4)).square().mean().backward()
    other.step()
gc.collect()
assert [model() for model in models] == [None, None]
"""
UNSEEN = """
import torch
weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(30):
    weight.square().mean().backward()
    optimizer.step()
"""
ACCUMULATES = PLAIN.replace("optimizer.step()", "optimizer.step() if number % 2 else None").replace(
    "for _ in range(30)", "for number in range(60)"
)
FOLDS = """
import torch
from torch import nn
def train(layers, updates, adversary=False):
    net, other = nn.Sequential(*map(nn.Linear, [4] * layers, [4] * layers)), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if adversary:
        another = torch.optim.Adam(other.parameters())
    for _ in range(updates):
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        if adversary:
            other(torch.ones(2, 4)).square().mean().backward()
            another.step()
for layers in range(3):
    train(layers + 1, 30)
"""
"""Trainings one after the other, each with a new model."""
SHORT_FOLDS = f"{FOLDS}train(4, 30, adversary=True)\ntrain(5, 8)\ntrain(6, 2)\ntrain(7, 30)"
NO_UPDATE = "import torch"
ONE_UPDATE = PLAIN.replace("range(30)", "range(1)")
WITH_TIMER = "from lightning_gputime import GPUPhaseHooks\n" + PLAIN.replace(
    "for _ in range(30):", "for _ in GPUPhaseHooks(net, optimizer).attach().steps([0] * 30):"
)
FORK = """
import os
sys.stdout.flush()
if not (child := os.fork()):
    sys.exit()
os.waitpid(child, 0)
"""
LIGHTNING = """
import torch
import lightning.pytorch as pl
class Task(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)
    def training_step(self, batch, _):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
CALLBACKS = []
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, callbacks=CALLBACKS)
trainer.fit(Task(), torch.utils.data.DataLoader(torch.ones(60, 4), 2))
"""
FABRIC = """
import torch
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu")
net = torch.nn.Linear(4, 4)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
for batch in fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.ones(60, 4), 2)):
    fabric.backward(net(batch).square().mean())
    optimizer.step()
"""
TWO_FITS = (
    LIGHTNING.replace("lightning.pytorch", "pytorch_lightning")
    .replace("trainer = pl", "for _ in range(2):\n  trainer = pl")
    .replace("trainer.fit", "  trainer.fit")
)
TAKES_TURNS = """
import torch
nets = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
for turn in range(12):
    for _ in range(10):
        nets[turn % 2](torch.ones(2, 4)).square().mean().backward()
        optimizers[turn % 2].step()
"""
MANY_SHORT = f"{FOLDS}for _ in range(50): train(2, 5)"
LIGHTNING_THEN_PLAIN = f"{LIGHTNING}\n{PLAIN}"
TRANSFORMERS = """
import torch, transformers
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)
    def forward(self, x):
        return {"loss": self.net(x).square().mean()}
CALLBACKS = []
transformers.Trainer(
    Net(),
    transformers.TrainingArguments("out", max_steps=30, per_device_train_batch_size=2,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=10),
    train_dataset=[{"x": torch.ones(4)}] * 60,
    callbacks=CALLBACKS,
).train()
"""

RUN = ("-m", "lightning_gputime", "run")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return environment variables with which the package has its entry points."""
    info = tmp_path / "site" / "of_this_test-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: of-this-test\nVersion: 1\n")
    points = ""
    for group, function in GROUPS.items():
        if "lightning-gputime" not in entry_points(group=group).names:
            points += f"[{group}]\nlightning-gputime = {auto.__name__}:{function}\n"
    (info / "entry_points.txt").write_text(points)
    path = os.pathsep.join([str(PACKAGE), str(info.parent)])
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}


def start(
    script: str, folder: Path, environment: dict[str, str], *arguments: str
) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(script)
    command, pipe = [sys.executable, *arguments], subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def run(
    script: str, folder: Path, environment: dict[str, str], *arguments: str
) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error."""
    process = start(script, folder, environment, *arguments)
    printed, errors = process.communicate(timeout=200)
    return process.returncode, printed, errors


def test_command_line_has_the_options_that_all_timers_have() -> None:
    shared = {*TimerOptions.__annotations__, "save_path"}
    assert {*SWITCHES, *VALUES} == shared - {"observers"}
    assert {*SWITCHES, *VALUES} <= {*inspect.signature(GPUPhaseTimer).parameters}


def test_command_passes_a_script_and_its_arguments_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchrun").mkdir()  # Not the command of that name.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv(BEGAN, "")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    started = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: started.append(arguments))
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/torchrun")
    __main__.main(["run", "--save-path", "1,2.json", "torchrun", "--", "--lag", "-m"])
    assert started[0] == ["torchrun", "--", "--lag", "-m"]
    assert json.loads(os.environ[VARIABLE])["save_path"] == str(tmp_path / "1,2.json")


def executable(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("name", "text", "mode", "is_python"),
    [
        ("train.py", "", 0o644, True),
        ("train.py", "#!/bin/python3 -I", 0o755, True),  # The command names the interpreter.
        ("train", "import torch", 0o644, True),
        ("train", "import torch", 0o755, True),  # No shell runs it without a first line.
        ("train", "#!/usr/bin/env -S python3.12 -u", 0o644, True),
        ("train", f"#!{sys.executable}", 0o755, False),
        ("launch.sh", "#!/bin/sh\npython train.py", 0o755, False),
        ("trainer.x86_64", b"\x7fELF\0", 0o755, False),
    ],
)
def test_files_are_python_or_programs(
    name: str, text: str | bytes, mode: int, is_python: bool, tmp_path: Path
) -> None:
    path = executable(tmp_path / name, text)
    path.chmod(mode)
    assert program.find_program([str(path), "-I"]) == (None if is_python else str(path))


def test_folders_archives_and_pipes_are_python(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    zipapp.create_archive(tmp_path / "package", tmp_path / "archive")
    os.mkfifo(tmp_path / "pipe")
    for name in ("package", "archive", "pipe"):
        assert program.find_program([str(tmp_path / name)]) is None
    assert program.find_program(["-"]) is None


NO_PACKAGE = "#!/bin/sh\nexit 1"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("missing.py", "there is no script or command 'missing.py'"),
        ("plain.sh", "plain.sh is not a Python script, and cannot be executed: write run bash"),
        ("./no_first_line.sh", "line.sh is not a Python script, and cannot be executed"),
        ("python -I train.py", "flags -E, -I and -S keep the timer out: leave them out of 'python"),
        (f"{sys.executable} -uS -m x", "keep the timer out"),
        ("env -i A=1 python3.12 -Xutf8 -X a -E x.py", "keep the timer out"),
        ("./isolated --flag", "keep the timer out: leave them out of 'python3 -I "),
        ("./old/python train.py", "./old/python has no lightning_gputime, so nothing would be"),
        ("./of_old", "/old/python has no lightning_gputime"),
    ],
)
def test_run_refuses_commands_that_it_cannot_time(
    command: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.sh").write_text("#!/bin/sh")
    executable(tmp_path / "no_first_line.sh", "python train.py")
    (tmp_path / "old").mkdir()
    old = executable(tmp_path / "old" / "python", NO_PACKAGE)
    for name in ("python", "python3", "python3.12"):
        executable(tmp_path / name, NO_PACKAGE)
    executable(tmp_path / "isolated", "#!/usr/bin/env -S python3 -I\n")
    executable(tmp_path / "of_old", f"#!{old}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it was started"))
    # 2: a bench must not take it for 1, which means slower.
    assert __main__.main(["run", *command.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("-c -I", ""),
        ("-m -I", ""),
        ("-uc -I", "u"),
        ("-W error -O train.py -I", "O"),
        ("-Werror -X dev -Es", "Es"),
        ("--check-hash-based-pycs -B", "B"),
        ("-V", "V"),
        ("- -I", ""),
    ],
)
def test_flags_of_python_end_at_the_script(command: str, flags: str) -> None:
    assert program._flags(command.split()) == flags


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", {}), ("true", {}), ('{"flops": 1}', {"flops": 1}), ("0", None), ('{"flops":', None)],
)
def test_environment_variable_sets_the_options(
    text: str,
    expected: dict[str, int] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert options() == expected
    assert ("as JSON; no timer is added" in caplog.text) == (text == '{"flops":')


@pytest.mark.parametrize(
    ("option", "message"), [("lagg", "no option lagg"), ("modules", "no module")]
)
def test_refused_option_warns_and_training_continues(
    option: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    known: dict[str, Any] = {"CALLBACKS": [auto_lightning.TrainerAdder({option: "missing"})]}
    exec(LIGHTNING.replace("CALLBACKS = []", ""), known)
    assert known["trainer"].global_step == 30
    assert message in caplog.text


LIBRARIES = ("transformers", "datasets", "pytorch_lightning", "lightning_fabric", "accelerate")
STUBS = {
    "torch": "",
    # First lines of the real packages: most look for torch before they import it.
    "transformers": "importlib.util.find_spec('stub_torch')",
    "transformers/trainer": "import stub_torch, stub_accelerate",
    "datasets": "importlib.util.find_spec('stub_torch'), importlib.util.find_spec('stub_torch')",
    "pytorch_lightning": "import stub_lightning_fabric, stub_torch",
    "lightning_fabric": "assert importlib.util.find_spec('stub_torch'); import stub_torch",
    "accelerate": "importlib.util.find_spec('stub_transformers'); import stub_torch",
}


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Adds `stub_torch` and the like to Python's path. Returns the functions that were called."""
    for name, text in STUBS.items():
        path = tmp_path / f"stub_{name}"
        path = path.with_suffix(".py") if "/" in name else path / "__init__.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import importlib.util\n{text}\nis_done = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    called: list[str] = []
    yield called
    forget_stubs()


def forget_stubs() -> None:
    for name in [name for name in sys.modules if name.startswith("stub_")]:
        del sys.modules[name]


def watch(called: list[str]) -> auto._WatchingFinder:
    def call(name: str) -> None:
        assert sys.modules[name].is_done
        called.append(name)

    names = ("stub_torch", "stub_transformers.trainer")
    return auto._WatchingFinder({name: partial(call, name) for name in names})


def test_watched_modules_are_noticed_in_every_order_of_imports(
    stubs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for order in permutations(("torch", *LIBRARIES)):
        forget_stubs()
        stubs.clear()
        finder = watch(stubs)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "meta_path", [finder, *sys.meta_path])
            for name in order:
                importlib.import_module(f"stub_{name}")
            assert stubs == ["stub_torch"], order
            importlib.import_module("stub_transformers.trainer")
        assert stubs == ["stub_torch", "stub_transformers.trainer"], order
        # The module is as without the finder.
        loader = sys.modules["stub_torch"].__spec__.loader  # type: ignore[union-attr]
        assert type(loader) is SourceFileLoader
        assert sys.modules["stub_torch"].__loader__ is loader


def test_watched_module_may_fail_or_be_loaded_late(
    stubs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find() -> Any:
        spec = importlib.util.find_spec("stub_torch")
        assert spec is not None
        return spec

    monkeypatch.setattr(sys, "meta_path", [watch(stubs), *sys.meta_path])
    spec = find()
    assert copy.copy(spec.loader).get_source("stub_torch")
    source = Path(spec.origin)
    text = source.read_text()
    source.write_text("raise KeyError(3)")
    with pytest.raises(KeyError, match="3"):
        importlib.import_module("stub_torch")
    assert not stubs
    source.write_text(text)
    # A lazy loader runs the module at the first access to a name in it.
    spec = find()
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules["stub_torch"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not stubs
    assert module.is_done
    assert stubs == ["stub_torch"]


def test_import_past_the_finder_is_reported(
    stubs: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    finder = watch(stubs)
    auto._report_unwatched(finder, os.getpid())
    importlib.import_module("stub_torch")  # The finder is not asked.
    auto._report_unwatched(finder, os.getpid() + 1)  # A process that the script has forked.
    assert not caplog.text
    auto._report_unwatched(finder, os.getpid())
    assert "No step is timed: another import hook imported stub_torch before" in caplog.text


def test_each_timer_of_a_script_saves_to_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adding, "_numbers", count(1))
    monkeypatch.setattr(os, "getpid", lambda: 7)
    options = {"save_path": "runs.d/run.json.gz"}
    assert adding.path_to_save({}) is None
    assert adding.path_to_save(options) == "runs.d/run.json.gz"
    assert adding.path_to_save(options) == "runs.d/run-2.json.gz"
    monkeypatch.setattr(adding, "parent_process", lambda: "parent")
    assert adding.path_to_save(options) == "runs.d/run-7-3.json.gz"
    monkeypatch.setenv("RANK", "0")
    assert adding.path_to_save(options) == "runs.d/run-4.json.gz"


def test_file_of_another_process_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, other_path = tmp_path / "run.json.gz", tmp_path / f"run-{os.getpid()}.json.gz"
    first, second = (Mock(_session=NEVER_ATTACHED, _is_aborted=False) for _ in range(2))
    path.write_text("of an earlier run")
    os.utime(path, (1000.0, 1000.0))
    monkeypatch.setattr(adding, "_began", 2000.0)
    adding._end(first, str(path), prints=False)
    first.save.assert_called_once_with(str(path))
    # A child started by `subprocess` does not know this process.
    os.utime(path, (2000.0, 2000.0))
    adding._end(second, str(path), prints=False)
    second.save.assert_called_once_with(str(other_path))
    assert f"has saved {path}: this one saves to {other_path}" in caplog.text
    monkeypatch.setattr(adding, "_numbers", count(1))
    assert adding.path_to_save({"save_path": str(path)}) == str(other_path)


def test_models_are_found_next_to_odd_modules() -> None:
    class WithoutInit(torch.nn.Module):
        def __init__(self) -> None:
            pass

    class Tree(torch.nn.Linear):
        children = parameters = None  # type: ignore[assignment]  # names that it uses otherwise

    kept = [WithoutInit(), tree := Tree(4, 4)]
    assert _models_of(torch.optim.SGD([tree.weight])) == kept[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(7)", 7), ("raise ValueError('of the script')", 1)]
)
def test_run_keeps_output_and_exit_code_of_a_script(
    end: str, code: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    script, command = f"{PLAIN}\n{FORK}\n{end}\n", ("train.py", "--lag", "a")
    # The user's sitecustomize imports a watched module, and fails.
    (tmp_path / "sitecustomize.py").write_text("import torch, missing")
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    alone = run(script, tmp_path, environment, *command)
    timed = run(script, tmp_path, environment, *RUN, "--history-size", "9", *command)
    assert alone[0] == timed[0] == code
    assert alone[1] == "arguments ['--lag', 'a'] __main__\n"
    assert timed[1] == alone[1]
    assert "No module named 'missing'" in alone[2]
    error, _, rest = alone[2].partition("Traceback")
    assert error in timed[2]
    assert rest in timed[2]
    assert timed[2].count("over 23 steps") == 1


SEVERAL = TWO_MODELS + THEN_ANOTHER_LOOP
LOSES_CALLBACK = LIGHTNING.replace("trainer.fit", "trainer.callbacks.clear()\ntrainer.fit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "steps", "message"),
    [
        pytest.param(PLAIN, 28, "Other optimizers of the loop and evaluations are", id="plain"),
        pytest.param(ACCUMULATES, 23, "One update has 2 calls of backward: what", id="accumulates"),
        pytest.param(SEVERAL, 23, "trains Linear", id="two models"),
        pytest.param(UNSEEN, 0, "that SGD updates no module has any", id="no module"),
        pytest.param(NO_UPDATE, 0, "no update by a torch optimizer was found", id="no update"),
        pytest.param(ONE_UPDATE, 0, "no second update by a torch optimizer", id="one update"),
        pytest.param(WITH_TIMER, 0, "The script has a timer", id="has a timer"),
        pytest.param(LOSES_CALLBACK, 0, "the Trainer of lightning.pytorch did not", id="callback"),
        pytest.param(LIGHTNING, 30, "", id="Lightning"),
        pytest.param(TWO_FITS, 25, "", id="pytorch_lightning"),
        pytest.param(FABRIC, 28, "", id="Fabric"),
        pytest.param(TRANSFORMERS, 30, "", id="transformers"),
    ],
)
def test_script_gets_one_timer(
    script: str, steps: int, message: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    if script is TRANSFORMERS:
        pytest.importorskip("transformers")
    flags = ["--save-path", "run.json.gz"]
    if script in (PLAIN, LIGHTNING, FABRIC, TRANSFORMERS):
        # In each front end once: to check an option, the command itself imports torch.
        flags += ["--warmup-steps", "0"]
    code, printed, errors = run(script, tmp_path, environment, *RUN, *flags, "train.py")
    assert code == 0, errors
    assert message in errors
    assert "If no step ends" not in errors
    assert "Time per step" not in printed
    assert errors.count("Time per step") == (2 if script in (TWO_FITS, SEVERAL) else steps > 0)
    no_steps = (UNSEEN, NO_UPDATE, ONE_UPDATE, LOSES_CALLBACK)
    assert errors.count("No step is timed") == (script in no_steps)
    path = tmp_path / "run.json.gz"
    assert path.exists() == (steps > 0 or script is WITH_TIMER)
    if steps:
        summary = load(path).summary()
        assert summary.steps == summary.rows["backward"].n == steps


# The first two updates are in no step, then the first four; five steps are warm-up.
IN_FOLDS = {"": 23, "-2": 21, "-3": 21}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "steps", "missed"),
    [
        pytest.param(FOLDS, IN_FOLDS, "", id="folds"),
        pytest.param(SHORT_FOLDS, IN_FOLDS | {"-4": 22, "-6": 23}, "2 more", id="short folds"),
        pytest.param(MANY_SHORT, IN_FOLDS, "50 more", id="many short loops"),
        pytest.param(TAKES_TURNS, {"": 3, "-2": 51}, "", id="two optimizers in turns"),
        pytest.param(LIGHTNING_THEN_PLAIN, {"": 25, "-2": 23}, "", id="Lightning, then plain"),
    ],
)
def test_each_training_of_a_process_is_shown_or_counted(
    script: str, steps: dict[str, int], missed: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    command = (*RUN, "--save-path", "run.json", "train.py")
    code, _, errors = run(script, tmp_path, environment, *command)
    assert code == 0, errors
    runs = {path.stem.removeprefix("run"): load(path) for path in tmp_path.glob("run*.json")}
    assert {name: saved_run.summary().steps for name, saved_run in runs.items()} == steps
    assert errors.count("Time per step") == len(steps)
    assert ("not shown:" in errors) == bool(missed)
    assert missed == "" or f"{missed} trainings are not shown" in errors


def test_each_fit_of_a_trainer_saves_to_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adding, "_numbers", count(1))
    options = {"save_path": str(tmp_path / "run.json"), "warmup_steps": 0}
    callbacks = [auto_lightning.TrainerAdder(options)]
    script = LIGHTNING.replace("CALLBACKS = []", "").replace("max_epochs=1", "max_steps=20")
    exec(
        f"{script}\ntrainer.fit_loop.epoch_loop.max_steps = trainer.fit_loop.max_epochs = 30\n"
        "trainer.fit(Task(), torch.utils.data.DataLoader(torch.ones(60, 4), 2))",
        {"CALLBACKS": callbacks},
    )
    capsys.readouterr()
    runs = [load(tmp_path / name).summary().steps for name in ("run.json", "run-2.json")]
    assert runs == [20, 10]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "timer"),
    [
        (LIGHTNING, "__import__('lightning_gputime').GPUPhaseTimer()"),
        (TRANSFORMERS, "huggingface.TransformersPhaseTimer()"),
    ],
)
def test_trainer_with_a_timer_gets_no_other(
    script: str, timer: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    if script is TRANSFORMERS:
        pytest.importorskip("transformers")
        script = f"from lightning_gputime import huggingface\n{script}"
    script = script.replace("CALLBACKS = []", f"CALLBACKS = [{timer}]")
    path = tmp_path / "run.json"
    command = (*RUN, "--save-path", str(path), "train.py")
    code, printed, errors = run(script, tmp_path, environment, *command)
    assert code == 0, errors
    assert printed.count("Time per step") == 1
    assert "The script has a timer" in errors
    assert load(path).summary().steps > 20


FAILS = PLAIN.replace("for _ in range(30)", "TIMER\nfor number in STEPS") + (
    "    if number == 20:\n        raise KeyError('in the middle')\n"
)
TIMER = "timer = __import__('lightning_gputime').GPUPhaseHooks(net, optimizer)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("timer", "steps"),
    [
        pytest.param("", "range(30)", id="no timer"),
        pytest.param(f"{TIMER}.attach()", "timer.steps(range(30))", id="attach"),
        pytest.param(f"{TIMER}\nwith timer:\n  ", "timer.steps(range(30))", id="with"),
    ],
)
def test_exception_ends_with_the_table_and_the_file(
    timer: str, steps: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    path = tmp_path / "run.json"
    script = FAILS.replace("TIMER\n", timer if "with" in timer else f"{timer}\n")
    command = (*RUN, "--save-path", str(path), "train.py")
    code, _, errors = run(script.replace("STEPS", steps), tmp_path, environment, *command)
    assert code == 1
    assert errors.index("KeyError") < errors.index("Time per step")
    assert errors.count("Time per step") == 1
    assert f"The run up to the error is saved in {path}" in errors
    assert load(path).summary().steps >= 14


@pytest.mark.slow
@pytest.mark.parametrize("order", [("torch", *LIBRARIES), tuple(reversed(LIBRARIES))])
def test_plain_loop_is_timed_after_any_imports(
    order: tuple[str, ...], tmp_path: Path, environment: dict[str, str]
) -> None:
    for name in order:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    script = "".join(f"import {name}\n" for name in order) + PLAIN
    code, _, errors = run(script, tmp_path, environment, *RUN, "train.py")
    assert code == 0, errors
    assert errors.count("over 23 steps") == 1
    assert "another import hook" not in errors


OLD_PYTHONS = ("python2.7", "python3.6", "python3.8", "python3.9", "python3.10", "python3.13")


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD_PYTHONS)
def test_python_without_the_package_starts_normally(name: str, tmp_path: Path) -> None:
    found = [shutil.which(name), *Path.home().glob(f".pyenv/versions/*/bin/{name}")]
    pythons = [str(path) for path in found if path and ".pyenv/shims" not in str(path)]
    if not pythons:
        pytest.skip(f"needs {name}")
    site = PACKAGE / "lightning_gputime" / "_auto_instrumentation" / "site"
    (tmp_path / "sitecustomize.py").write_text("print('hidden')")
    for folders, printed in ([site], "trained\n"), ([site, tmp_path], "hidden\ntrained\n"):
        environment = {
            **os.environ,
            VARIABLE: "1",
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            [pythons[0], "-c", "print('trained')"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(LIGHTNING, id="lightning.pytorch"),
        pytest.param(TWO_FITS, id="pytorch_lightning"),
        pytest.param(FABRIC, id="lightning.fabric"),
        pytest.param(FABRIC.replace("lightning.fabric", "lightning_fabric"), id="lightning_fabric"),
    ],
)
@pytest.mark.parametrize("value", ["1", "0"])
def test_variable_is_enough_for_trainer_and_fabric(
    value: str, script: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    script = f"{script}\nimport sys\nprint('lightning_gputime._timer' in sys.modules)"
    environment["LIGHTNING_GPUTIME"] = value
    code, printed, errors = run(script, tmp_path, environment, "train.py")
    assert code == 0, errors
    title = "over 23 steps (5 warm-up steps excluded)" if "fabric" in script else "Time per step"
    assert errors.count(title) == int(value) * (1 + ("for _ in range(2)" in script))
    # Without a timer, only the entry point is imported.
    assert printed.endswith(f"{value == '1'}\n")


@pytest.mark.slow
def test_interrupt_reaches_the_script(tmp_path: Path, environment: dict[str, str]) -> None:
    script = f"{PLAIN}\nprint('ready', flush=True)\nimport time\ntime.sleep(60)\n"
    process = start(script, tmp_path, environment, *RUN, "train.py")
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "\nKeyboardInterrupt\n" in errors
    assert not printed
    assert "over 23 steps" in errors


@pytest.mark.slow
def test_first_rank_prints_and_saves(tmp_path: Path, environment: dict[str, str]) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    # Only ranks that have joined a process group are known as ranks.
    script = f"import torch\ntorch.distributed.init_process_group('gloo')\n{PLAIN}"
    command = (*RUN, "--save-path", "run.json", "-m", *launcher)
    code, _, errors = run(script, tmp_path, environment, *command)
    assert code == 0, errors
    assert errors.count("Time per step") == errors.count("Timing the loop") == 1
    assert "No step is timed" not in errors
    assert [path.name for path in tmp_path.glob("run*.json")] == ["run.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--history-size x train.py", "history_size must be an integer"),
        ("--modules a/b train.py", "modules must"),
        ("", "no script is given"),
        ("--lags 1 train.py", "--lags"),
        # The script itself refuses the option.
        ("train.py --modules=2 --lag", "Options of run stand before the script: --modules\n"),
    ],
)
def test_run_refuses_wrong_options(
    command: str, message: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    script = f"import torch, argparse; argparse.ArgumentParser().parse_args()\n{PLAIN}"
    code, printed, errors = run(script, tmp_path, environment, *RUN, *command.split())
    assert code == 2
    assert message in errors
    assert not printed


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-I"], ["-O", "-X", "utf8", "-Werror::UserWarning"]])
def test_flags_of_python_are_passed_on_or_refused(
    flags: list[str], tmp_path: Path, environment: dict[str, str]
) -> None:
    script = "import sys\nprint(sys.flags.optimize, sys.flags.utf8_mode, sys.warnoptions)"
    # With these flags a process finds the package by its own path alone.
    paths = [str(PACKAGE), *filter(None, sys.path)]
    starts = f"import sys; sys.path[:] = {paths}; from lightning_gputime.__main__ import main;"
    starts += "sys.argv[0] = 'run'; sys.exit(main(['run', 'train.py']))"
    code, printed, errors = run(script, tmp_path, environment, *flags, "-c", starts)
    if flags[0] == "-O":
        assert (code, printed) == (0, "1 1 ['error::UserWarning']\n"), errors
    else:
        assert (code, printed) == (2, "")
        assert "Python's flags -E, -I and -S keep the timer out: leave them out" in errors
