"""`lightning_gputime run` adds timers to scripts without a timer."""

import copy
import errno
import importlib.util
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from itertools import count, permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from conftest import Command
from fake_loop import Loop, train
from processes import ENVIRONMENT, PACKAGE

from lightning_gputime import GPUPhaseTimer, PhaseSummary, TimerOptions, __main__, load
from lightning_gputime import _auto_instrumentation as auto
from lightning_gputime._auto_instrumentation import adding
from lightning_gputime._auto_instrumentation import lightning as auto_lightning
from lightning_gputime._auto_instrumentation.command import SWITCHES, VALUES, find_program
from lightning_gputime._auto_instrumentation.environment import BEGAN, VARIABLE, options
from lightning_gputime._auto_instrumentation.plain import _models_of
from lightning_gputime._loader import STAGES
from lightning_gputime._runs.saved import LiveFile
from lightning_gputime._session.session import NEVER_ATTACHED

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
ANOTHER_LOOP = """
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
LOADER = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(4)
class Doubled(DataLoader):
    def __iter__(self):
        for x in super().__iter__():
            yield 2 * x
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader, validation = DataLoader(Slow(), 2), DataLoader([*torch.ones(8, 4)], 2)
for _ in range(2):
    for x in loader:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.008)
    net.eval()
    with torch.no_grad():
        for x in validation:
            net(x)
    net.train()
"""
"""Fetching a batch takes 4 ms, and the code after the update 8 ms."""
WITHOUT_MODULE = """
import torch
weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(30):
    weight.square().mean().backward()
    optimizer.step()
"""
TWO_LOOPS = TWO_MODELS + ANOTHER_LOOP
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
"""Three trainings in a row, each of a new model."""
SHORT_FOLDS = f"{FOLDS}train(4, 30, adversary=True)\ntrain(5, 8)\ntrain(6, 2)\ntrain(7, 30)"
NO_UPDATE = "import torch"
ONE_UPDATE = PLAIN.replace("range(30)", "range(1)")
NO_BACKWARD = PLAIN.replace(
    "net(torch.ones(2, 4)).square().mean().backward()",
    "net.requires_grad_(False)[0].weight.grad = torch.ones(4, 4)",
)
LATE_RANK = """
import time, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
distributed.init_process_group("gloo")
net = DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(60):
    if distributed.get_rank() == 1:
        time.sleep(0.02)
    net(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
"""
OWN_TIMER = "from lightning_gputime import GPUPhaseHooks\n" + PLAIN.replace(
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
print([type(callback).__name__ for callback in trainer.callbacks])
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
TWO_FITS = LIGHTNING.replace("trainer = pl", "for _ in range(2):\n  trainer = pl").replace(
    "trainer.fit", "  trainer.fit"
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
REPEATED_FOLDS = f"{FOLDS}for _ in range(50): train(2, 5)"
LIGHTNING_THEN_PLAIN = f"{TWO_FITS}{FABRIC}\n{PLAIN}"
IS_IMPORTED = "\nimport sys\nprint('lightning_gputime._timer' in sys.modules)"
EVERY_TRAINER = (
    f"{LIGHTNING}{LIGHTNING.replace('lightning.pytorch', 'pytorch_lightning')}"
    f"{FABRIC}{FABRIC.replace('lightning.fabric', 'lightning_fabric')}{IS_IMPORTED}"
)
TRANSFORMERS = """
import torch, transformers
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)
    def forward(self, x):
        return {"loss": self.net(x).square().mean()}
CALLBACKS = []
len([*torch.utils.data.DataLoader([0, 1])])  # No timer is attached yet.
transformers.Trainer(
    Net(),
    transformers.TrainingArguments("out", max_steps=30, per_device_train_batch_size=2,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=10),
    train_dataset=[{"x": torch.ones(4)}] * 60,
    callbacks=CALLBACKS,
).train()
"""


RUN = ("-m", "lightning_gputime", "run")
SAVED = (*RUN, "--save-path", "run.json")


class Runner:
    """Runs Python in the folder of a script train.py, as if the package were installed."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        (self.folder / "train.py").write_text(script)
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, script: str, *arguments: str, code: int = 0) -> tuple[str, str]:
        """Check the exit code, and return stdout and stderr."""
        process = self.start(script, *arguments)
        out, err = process.communicate(timeout=200)
        assert process.returncode == code, err
        return out, err

    def summary(self) -> PhaseSummary:
        return load(self.folder / "run.json").summary()


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    # Register the entry points even if the package is not installed.
    metadata = tmp_path / "site" / "of_this_test-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: of-this-test\nVersion: 1\n")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    points = ""
    for group, functions in project["entry-points"].items():
        if "lightning-gputime" not in entry_points(group=group).names:
            points += f"[{group}]\nlightning-gputime = {functions['lightning-gputime']}\n"
    (metadata / "entry_points.txt").write_text(points)
    path = os.pathsep.join([str(PACKAGE), str(metadata.parent)])
    return Runner(tmp_path, {**os.environ, **ENVIRONMENT, "PYTHONPATH": path})


def test_command_line_has_the_options_that_all_timers_have() -> None:
    shared = {*TimerOptions.__annotations__, "save_path"}
    assert {*SWITCHES, *VALUES} == shared - {"observers"}
    assert {*SWITCHES, *VALUES} <= {*inspect.signature(GPUPhaseTimer).parameters}


def test_run_passes_arguments_to_the_program_and_options_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchrun").mkdir()  # A folder with the name of the command.
    monkeypatch.chdir(tmp_path)
    for variable in (VARIABLE, "PYTHONPATH", BEGAN):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    started = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: started.append(arguments))
    monkeypatch.setattr(shutil, "which", lambda _: sys.executable)
    __main__.main(["run", "--save-path", "1,2.json", "--", "torchrun", "--", "--lag", "-m"])
    assert started[0] == ["torchrun", "--", "--lag", "-m"]
    assert json.loads(os.environ[VARIABLE])["save_path"] == str(tmp_path / "1,2.json")


def write_executable(path: Path, text: str | bytes) -> None:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("name", "text", "is_executable", "is_python"),
    [
        ("train.py", "", False, True),
        ("train.py", "#!/bin/python3 -I", True, True),  # Python is named by the command itself.
        ("train", "import torch", False, True),
        ("package/__main__.py", "", False, True),
        ("train", f"#!{sys.executable}", True, False),
        ("launch.sh", "#!/bin/sh\npython train.py", True, False),
        ("trainer.x86_64", b"\x7fELF\0", True, False),
    ],
)
def test_find_program_distinguishes_python_scripts_from_programs(
    name: str, text: str | bytes, is_executable: bool, is_python: bool, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write_executable(path, text)
    if not is_executable:
        path.chmod(0o644)
    if path.name == "__main__.py":
        path = path.parent
    assert find_program([str(path), "-I"]) == (None if is_python else str(path))
    # A pipe, and "-" for stdin, have a Python script, too.
    os.mkfifo(tmp_path / "pipe")
    assert [find_program([found]) for found in (str(tmp_path / "pipe"), "-")] == [None, None]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.py", "no such script or command: 'missing.py'"),
        ("plain.sh", "plain.sh is neither a Python script nor executable. Name the program that"),
        ("./no_shebang.sh", "no_shebang.sh cannot be executed (Exec format error): name the"),
        (
            "python -I train.py",
            "flags -E, -I and -S prevent the timer from starting: remove them from 'python",
        ),
        (f"{sys.executable} -uS -m x", "prevent the timer from starting"),
        ("env -i A=1 python3.12 -Xutf8 -BE x.py", "prevent the timer from starting"),
        ("./isolated --flag", "prevent the timer from starting: remove them from 'python3 -I "),
        ("./old/python train.py", "./old/python has no lightning_gputime, so nothing would be"),
        ("./of_old", "/old/python has no lightning_gputime"),
        ("--history-size x plain.py", "history_size must be an integer"),
        ("--lines x plain.py", "lines must be True or False"),
        ("", "no script is given"),
        ("--lags 1 plain.py", "--lags"),
    ],
)
def test_run_refuses_commands_that_it_cannot_time(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.sh").write_text("#!/bin/sh")
    (tmp_path / "plain.py").touch()
    write_executable(tmp_path / "no_shebang.sh", "python train.py")
    (tmp_path / "old").mkdir()
    for python in ("old/python", "python", "python3", "python3.12"):
        write_executable(tmp_path / python, "#!/bin/sh\nexit 1")  # Without the package.
    write_executable(tmp_path / "isolated", "#!/usr/bin/env -S python3 -I\n")
    write_executable(tmp_path / "of_old", f"#!{tmp_path}/old/python\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def execute(*_: object) -> None:
        raise OSError(errno.ENOEXEC, os.strerror(errno.ENOEXEC))

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for variable in (VARIABLE, "PYTHONPATH", BEGAN):
        monkeypatch.setenv(variable, "")
    # Exit with 2, because `bench` reads 1 as slower.
    assert message in command("run", *name.split(), code=2).err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", {}), ("true", {}), ('{"flops": 1}', {"flops": 1}), ("0", None), ('{"flops":', None)],
)
def test_environment_variable_sets_the_options(
    text: str, expected: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert options() == expected
    assert ("as JSON; no timer is added" in caplog.text) == (text == '{"flops":')


def test_refused_option_warns(caplog: pytest.LogCaptureFixture) -> None:
    script = LIGHTNING.replace("CALLBACKS = []", "")
    names: dict[str, Any] = {"CALLBACKS": [auto_lightning.TrainerAdder({"lagg": 1})]}
    exec(script, names)
    assert names["trainer"].global_step == 30
    assert "no option lagg" in caplog.text


LIBRARIES = ("transformers", "datasets", "pytorch_lightning", "lightning_fabric", "accelerate")
STUBS = {
    "torch": "",
    # Like the real modules, most of which look for torch before they import it.
    "transformers": "importlib.util.find_spec('stub_torch')",
    "transformers/trainer": "import stub_torch, stub_accelerate",
    "datasets": "importlib.util.find_spec('stub_torch'), importlib.util.find_spec('stub_torch')",
    "pytorch_lightning": "import stub_lightning_fabric, stub_torch",
    "lightning_fabric": "assert importlib.util.find_spec('stub_torch'); import stub_torch",
    "accelerate": "importlib.util.find_spec('stub_transformers'); import stub_torch",
}
Watch = tuple[auto._WatchingFinder, list[str]]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Add `stub_torch` etc. to Python's path. Return a finder, and the imports that it noticed."""
    for name, text in STUBS.items():
        path = tmp_path / f"stub_{name}"
        path = path.with_suffix(".py") if "/" in name else path / "__init__.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import importlib.util\n{text}\nis_done = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    noticed: list[str] = []

    def notice(name: str) -> None:
        assert sys.modules[name].is_done
        noticed.append(name)

    names = ("stub_torch", "stub_transformers.trainer")
    yield auto._WatchingFinder({name: partial(notice, name) for name in names}), noticed
    for name in [name for name in sys.modules if name.startswith("stub_")]:
        del sys.modules[name]


@pytest.mark.parametrize("first", [*permutations(("torch", *LIBRARIES), 2)], ids="-".join)
def test_imports_are_noticed_in_any_order(
    first: tuple[str, str], watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder, noticed = watch
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    for name in (*first, "torch", *LIBRARIES):
        importlib.import_module(f"stub_{name}")
    assert noticed == ["stub_torch"]
    importlib.import_module("stub_transformers.trainer")
    assert noticed == ["stub_torch", "stub_transformers.trainer"]
    # The finder leaves no trace on the module.
    loader = sys.modules["stub_torch"].__loader__
    assert type(loader) is SourceFileLoader
    assert "exec_module" not in vars(loader)


def test_watched_import_is_noticed_once_it_has_succeeded(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    finder, noticed = watch
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    spec: Any = importlib.util.find_spec("stub_torch")
    assert copy.copy(spec.loader).get_source("stub_torch")
    source = Path(spec.origin)
    text = source.read_text()
    source.write_text("raise KeyError(3)")
    with pytest.raises(KeyError, match="3"):
        importlib.import_module("stub_torch")
    assert not noticed
    source.write_text(text)
    # A lazy import runs the module when one of its attributes is first used.
    spec = importlib.util.find_spec("stub_torch")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules["stub_torch"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not noticed
    assert module.is_done
    assert noticed == ["stub_torch"]


def test_import_that_bypasses_the_finder_is_reported(
    watch: Watch, caplog: pytest.LogCaptureFixture
) -> None:
    finder, _ = watch
    auto._report_unwatched(finder, os.getpid())
    importlib.import_module("stub_torch")  # Bypasses the finder, which is not in sys.meta_path.
    auto._report_unwatched(finder, os.getpid() + 1)  # As if in a process that the script forked.
    assert not caplog.text
    auto._report_unwatched(finder, os.getpid())
    assert "No step is timed: another import hook imported stub_torch before" in caplog.text


def test_table_of_run_names_the_flag_of_an_advised_option(
    loop: Loop, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "With run, write options as flags: --flops VALUE for flops="
    timer = train(loop, 30)
    print_now = adding.finish_at_exit(timer, {})
    assert print_now is not None
    print_now()
    assert capsys.readouterr().err.endswith(f"\n\n{note}\n")
    assert "Not measured: MFU (pass flops=)" in str(timer.summary())
    assert note not in str(timer.summary())


def test_each_timer_of_a_script_saves_to_a_separate_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adding, "_file_numbers", count(1))
    monkeypatch.setattr(os, "getpid", lambda: 7)
    wanted = {"save_path": "runs.d/run.json.gz"}
    assert adding.path_to_save({}) is None
    assert adding.path_to_save(wanted) == "runs.d/run.json.gz"
    assert adding.path_to_save(wanted) == "runs.d/run-2.json.gz"
    monkeypatch.setattr(adding, "parent_process", lambda: "one")
    assert adding.path_to_save(wanted) == "runs.d/run-7-3.json.gz"
    monkeypatch.setenv("RANK", "0")
    assert adding.path_to_save(wanted) == "runs.d/run-4.json.gz"


def test_file_that_another_process_of_the_same_run_saved_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, other_path = tmp_path / "run.json.gz", tmp_path / f"run-{os.getpid()}.json.gz"
    timer = Mock(spec=["last_step", "save"], _session=NEVER_ATTACHED, _is_aborted=False)
    timer._live_file = LiveFile()
    monkeypatch.setattr(adding, "_began_s", 2000.0)  # Time at which `run` began.
    path.touch()
    os.utime(path, (1000.0, 1000.0))  # An earlier run saved this file: it is replaced.
    adding._print_and_save(timer, str(path), prints=False)
    os.utime(path, (2000.0, 2000.0))  # As if a child process had saved the file since.
    adding._print_and_save(timer, str(path), prints=False)
    assert timer.save.mock_calls == [call(str(path)), call(str(other_path))]
    assert f"has already saved {path}. This process saves to {other_path}" in caplog.text
    monkeypatch.setattr(adding, "_file_numbers", count(1))
    assert adding.path_to_save({"save_path": str(path)}) == str(other_path)


def test_model_of_an_optimizer_is_found_among_unusual_modules() -> None:
    class WithoutInit(torch.nn.Module):
        def __init__(self) -> None:
            pass

    class Tree(torch.nn.Linear):
        children = parameters = None  # type: ignore[assignment]  # hides methods of nn.Module

    kept = [WithoutInit(), tree := Tree(4, 4)]
    assert _models_of(torch.optim.SGD([tree.weight])) == kept[1:]


@pytest.mark.slow
def test_run_keeps_output_and_exit_code_of_a_script(run: Runner) -> None:
    script, arguments = f"{PLAIN}\n{FORK}\nraise ValueError('a')\n", ("train.py", "--lag", "a")
    # The user has a sitecustomize that imports a watched module and then fails.
    (run.folder / "sitecustomize.py").write_text("import torch, missing")
    run.environment["PYTHONPATH"] += f"{os.pathsep}{run.folder}"
    out, err = run(script, *arguments, code=1)
    assert out == "arguments ['--lag', 'a'] __main__\n"
    assert "No module named 'missing'" in err
    options = ("--history-size", "9", "--lines", "False")
    timed_out, timed_err = run(script, *RUN, *options, *arguments, code=1)
    assert timed_out == out
    error, _, rest = err.partition("Traceback")
    assert error in timed_err
    assert rest in timed_err
    assert timed_err.count("over 23 steps") == 1


@pytest.mark.slow
def test_run_reports_options_after_the_script(run: Runner) -> None:
    script = "import torch, argparse; argparse.ArgumentParser().parse_args()"
    _, err = run(script, *RUN, "train.py", "--lines=False", "--lag", code=2)
    assert err.endswith("Options of run must precede the script: --lines\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "samples"),
    [
        ("in loader", 40),
        ("in DataLoader(Slow(), 2)", 40),
        ("in map(torch.cat, zip(DataLoader(Slow(), 1), DataLoader(Slow(), 1)))", 20),
    ],
    ids=["made once", "made in each epoch", "made of two"],
)
def test_run_times_the_loader_of_a_plain_loop(loop: str, samples: int, run: Runner) -> None:
    script = LOADER.replace("in loader", loop).replace("return 40", f"return {samples}")
    _, err = run(script, *SAVED, "--warmup-steps", "0", "--lines", "False", "train.py")
    summary = run.summary()
    assert summary.steps == 38  # The first 2 of 40 updates start the timer.
    # A busy machine makes both longer.
    assert 4.0 <= summary.rows["data"].p50_ms < summary.rows["other"].p50_ms
    assert summary.rows["other"].p50_ms >= 8.0
    assert summary.wall_clock is not None
    assert "evaluation" in summary.wall_clock.entries_s
    advice = next(advice for advice in summary.advice if advice.startswith("`Slow.__getitem__`"))
    # The second on a machine that other processes keep busy.
    found = ("set num_workers=1 (now 0)", "make it faster: workers would need CPU cores")
    assert any(text in advice for text in found)
    assert advice.startswith("`Slow.__getitem__` (train.py:7)")
    assert "without a model call" not in err


ONE_EPOCH_OF_A_SUBCLASS = (
    LOADER.replace("range(2)", "range(1)")
    .replace("in loader", "in Doubled(Slow(), 2, num_workers=1)")
    .replace("net(x).square", "assert x.unique().tolist() == [2.0]; net(x).square")
)
A_LOADER_PER_EPOCH = LOADER.replace(
    "    for x in loader",
    "    loader = DataLoader(Slow(), 2, num_workers=1, persistent_workers=True)\n"
    "    for x in loader",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "batches", "starts"), [(ONE_EPOCH_OF_A_SUBCLASS, 20, 1), (A_LOADER_PER_EPOCH, 40, 2)]
)
def test_run_times_the_workers_of_the_first_and_of_later_epochs(
    script: str, batches: int, starts: int, run: Runner
) -> None:
    run(script, *SAVED, "--warmup-steps", "0", "train.py")
    (times,) = run.summary().measurement.loaders
    assert (times.dataset, times.batches, times.starts) == ("Slow.__getitem__", batches, starts)
    assert times.mean("dataset_ms") >= 4.0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_run_names_a_loop_that_makes_an_iterator_for_each_batch(workers: int, run: Runner) -> None:
    loader = f"DataLoader(Slow(), 2, num_workers={workers})"
    loop = f"loader = {loader}\n    for x in (next(iter(loader)) for _ in range(20))"
    run(LOADER.replace("for x in loader", loop), *SAVED, "--warmup-steps", "0", "train.py")
    advice = next(text for text in run.summary().advice if "iter(loader)" in text)
    assert advice.startswith("loop over the loader (`for batch in loader`), or keep its iterator")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "steps", "message"),
    [
        pytest.param(PLAIN, 28, "Other optimizers and evaluations are not timed", id="plain"),
        pytest.param(ACCUMULATES, 17, "One update has 2 calls of backward: time", id="accumulates"),
        pytest.param(TWO_LOOPS, 17, "trains Linear", id="two models"),
        pytest.param(
            WITHOUT_MODULE, 0, "no module has parameters that SGD updates", id="no module"
        ),
        pytest.param(NO_UPDATE, 0, "no update by a torch optimizer was found", id="no update"),
        pytest.param(ONE_UPDATE, 0, "no second update by a torch optimizer", id="one update"),
        pytest.param(NO_BACKWARD, 0, "no backward between the updates of", id="no backward"),
        pytest.param(OWN_TIMER, 0, "The script has a timer", id="own timer"),
        pytest.param(TRANSFORMERS, 30, "", id="transformers"),
    ],
)
def test_script_gets_one_timer(script: str, steps: int, message: str, run: Runner) -> None:
    if script is TRANSFORMERS:
        pytest.importorskip("transformers")
    has_option = script in (PLAIN, TRANSFORMERS)
    options = ["--warmup-steps", "0", "--lines", "False"] if has_option else []
    out, err = run(script, *SAVED, *options, "train.py")
    assert message in err
    assert "If no step ends" not in err
    assert "Time per step" not in out
    assert err.count("Time per step") == (2 if script is TWO_LOOPS else steps > 0)
    assert err.count("No step is timed") == (
        script in (WITHOUT_MODULE, NO_UPDATE, ONE_UPDATE, NO_BACKWARD)
    )
    is_saved = (run.folder / "run.json").exists()
    assert is_saved == (steps > 0 or script is OWN_TIMER)
    if steps:
        summary = run.summary()
        assert summary.steps == summary.rows["backward"].n == steps
        stages = [found.kind for found in summary.measurement.culprits if found.kind in STAGES]
        assert len(stages) == len({*stages})


FIRST_FOLDS = {"": 23, "-2": 21, "-3": 21}
"""Steps by saved run, of 30 updates: the first 2 (then 4) start the timer, and 5 are warm-up."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "steps", "missed"),
    [
        (SHORT_FOLDS, {**FIRST_FOLDS, "-4": 22, "-6": 23}, "Some training loops are not shown"),
        (REPEATED_FOLDS, FIRST_FOLDS, "Some training loops are not shown"),
        (TAKES_TURNS, {"": 3, "-2": 51}, ""),
        (LIGHTNING_THEN_PLAIN, {"": 25, "-2": 25, "-3": 23, "-4": 21}, ""),
    ],
    ids=["short folds", "many short loops", "alternating optimizers", "one after another"],
)
def test_each_training_of_a_process_is_shown_or_counted(
    script: str, steps: dict[str, int], missed: str, run: Runner
) -> None:
    _, err = run(script, *SAVED, "--lines", "False", "train.py")
    runs = {path.stem.removeprefix("run"): load(path) for path in run.folder.glob("run*.json")}
    assert {name: saved_run.summary().steps for name, saved_run in runs.items()} == steps
    assert err.count("Time per step") == len(steps)
    assert ("are not shown" in err) == bool(missed)
    assert missed in err


@pytest.mark.slow
def test_trainer_without_its_callback_is_reported(run: Runner) -> None:
    script = LIGHTNING.replace("trainer.fit", "trainer.callbacks.clear()\ntrainer.fit")
    _, err = run(script, *RUN, "train.py")
    assert "No step is timed: the Trainer of lightning.pytorch did not call the callback" in err
    assert "Time per step" not in err


def test_each_fit_of_a_trainer_saves_to_a_separate_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adding, "_file_numbers", count(1))
    wanted = {"save_path": str(tmp_path / "run.json"), "warmup_steps": 0, "lines": False}
    callbacks = [auto_lightning.TrainerAdder(wanted)]
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
    [(LIGHTNING, "lightning_gputime.GPUPhaseTimer"), (TRANSFORMERS, "TransformersPhaseTimer")],
)
def test_trainer_with_a_timer_gets_no_second_timer(script: str, timer: str, run: Runner) -> None:
    imports = "import lightning_gputime"
    if script is TRANSFORMERS:
        pytest.importorskip("transformers")
        imports = f"from lightning_gputime.huggingface import {timer}"
    script = script.replace("CALLBACKS = []", f"CALLBACKS = [{timer}(lines=False)]")
    out, err = run(f"{imports}\n{script}", *SAVED, "train.py")
    assert out.count("Time per step") == 1
    assert "The script has a timer" in err
    assert run.summary().steps > 20


FAILS = "    if number == 20:\n        raise KeyError('in the middle')\n"
TIMER = "__import__('lightning_gputime').GPUPhaseHooks(net, optimizer)"
WITHOUT_TIMER = PLAIN.replace("for _ in", "for number in") + FAILS
ATTACHED = WITHOUT_TIMER.replace("for number", f"timer = {TIMER}.attach()\nfor number").replace(
    "optimizer.step()", "optimizer.step(); timer.step()"
)
IN_WITH = WITHOUT_TIMER.replace(
    "for number in range(30)", f"with {TIMER} as timer:\n  for number in timer.steps(range(30))"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [WITHOUT_TIMER, ATTACHED, IN_WITH], ids=["no timer", "attach", "with"]
)
def test_failed_script_prints_the_table_and_saves_the_file(script: str, run: Runner) -> None:
    _, err = run(script, *SAVED, "train.py", code=1)
    assert err.index("KeyError") < err.index("Time per step")
    assert err.count("Time per step") == 1
    assert f"The run up to the error is saved in {run.folder / 'run.json'}" in err
    assert run.summary().steps >= 9


@pytest.mark.slow
def test_plain_loop_is_timed_after_any_imports(run: Runner) -> None:
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    imports = "\n".join(f"import {name}" for name in reversed(LIBRARIES))
    _, err = run(f"{imports}\n{PLAIN}", *RUN, "train.py")
    assert err.count("over 17 of 23 steps") == 1
    assert "another import hook" not in err


OLD_PYTHONS = ("python2.7", "python3.6", "python3.8", "python3.9", "python3.10", "python3.13")


@pytest.mark.slow
@pytest.mark.parametrize("name", OLD_PYTHONS)
def test_python_without_the_package_ignores_the_variable(name: str, tmp_path: Path) -> None:
    found = [shutil.which(name), *Path.home().glob(f".pyenv/versions/*/bin/{name}")]
    python = next((path for path in found if path and ".pyenv/shims" not in str(path)), None)
    if python is None:
        pytest.skip(f"needs {name}")
    site = PACKAGE / "lightning_gputime" / "_auto_instrumentation" / "site"
    (tmp_path / "sitecustomize.py").write_text("print('hidden')")
    for path, expected in (f"{site}", "trained\n"), (f"{site}:{tmp_path}", "hidden\ntrained\n"):
        variables = {VARIABLE: "1", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [python, "-c", "print('trained')"],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "script", "timers"), [("1", EVERY_TRAINER, 4), ("0", LIGHTNING + IS_IMPORTED, 0)]
)
def test_environment_variable_adds_timers_to_lightning_and_fabric(
    value: str, script: str, timers: int, run: Runner
) -> None:
    run.environment["LIGHTNING_GPUTIME"] = value
    out, err = run(script, "train.py")
    assert err.count("Time per step") == timers
    assert err.count("steps (5 warm-up steps excluded)") == timers
    # Without a timer only the entry point is imported.
    assert out.endswith(f"{timers > 0}\n")


@pytest.mark.slow
def test_interrupt_reaches_the_script(run: Runner) -> None:
    script = f"{PLAIN}\nprint('ready', flush=True)\nimport time\ntime.sleep(60)\n"
    process = run.start(script, *RUN, "train.py")
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "\nKeyboardInterrupt\n" in err
    assert not out
    assert "over 17 of 23 steps" in err


@pytest.mark.slow
def test_ranks_of_a_plain_loop_are_compared_and_only_rank_zero_prints_and_saves(
    run: Runner,
) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    _, err = run(LATE_RANK, *SAVED, "-m", *launcher)
    assert err.count("Time per step") == err.count("Timing the loop") == 1
    assert "No step is timed" not in err
    assert [path.name for path in run.folder.glob("run*.json")] == ["run.json"]
    assert "straggler-bound: `the straggler` takes" in err
    # The line that sleeps.
    assert "speed up rank 1 in `train.py:10`: all other ranks wait for it" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code", "expected", "message"),
    [
        (
            ["-I"],
            2,
            "",
            "Python's flags -E, -I and -S prevent the timer from starting: remove them",
        ),
        (["-O", "-X", "utf8", "-Werror::UserWarning"], 0, "1 1 ['error::UserWarning']\n", ""),
    ],
)
def test_run_passes_python_flags_on_or_refuses_them(
    flags: list[str], code: int, expected: str, message: str, run: Runner
) -> None:
    script = "import sys\nprint(sys.flags.optimize, sys.flags.utf8_mode, sys.warnoptions)"
    # These flags ignore PYTHONPATH, so the process must set its path itself.
    paths = [str(PACKAGE), *filter(None, sys.path)]
    starts = f"import sys; sys.path[:] = {paths}; from lightning_gputime.__main__ import main;"
    starts += "sys.argv[0] = 'run'; sys.exit(main(['run', 'train.py']))"
    out, err = run(script, *flags, "-c", starts, code=code)
    assert out == expected
    assert message in err
