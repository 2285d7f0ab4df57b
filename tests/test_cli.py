"""Options of the callback in LightningCLI, in files and on the command line."""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml  # type: ignore[import-untyped]  # Lightning installs it without types
from torch.utils.data import DataLoader

from lightning_gputime import GPUPhaseTimer, PhaseTimeMetric, StepTimes

pytest.importorskip("jsonargparse")
from lightning.pytorch.cli import LightningCLI  # needs jsonargparse

# Ignore warnings of jsonargparse and Lightning.
pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS = [*inspect.signature(GPUPhaseTimer).parameters]
OBSERVED: list[int] = []


def observe(times: StepTimes) -> None:
    OBSERVED.append(times.step)


def count(batch: torch.Tensor) -> float:
    return len(batch)


class Observer:
    """An observer that a config file names by its class."""

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        return {}


VALUES: dict[str, list[tuple[str, Any]]] = {
    "prefix": [("times", "times"), ("a/b", "a/b")],
    "log": [("all", "all"), ("[default, slow]", ["default", "slow"])],
    "warmup_steps": [("1", 1)],
    "history_size": [("7", 7)],
    "print_summary": [("false", False)],
    "lines": [("false", False)],
    "annotate": [("true", True)],
    "every_n_steps": [("2", 2), ("auto", "auto")],
    "sync_ranks": [("true", True), ("false", False), ("log", "log")],
    "items": [("8", 8), ("test_cli.count", count), ("null", None)],
    "flops": [("1e9", 1e9), ("[1, 2]", [1, 2]), ("null", None)],
    "save_path": [("run.json.gz", "run.json.gz"), ("null", None)],
    "observers": [
        ("[test_cli.observe]", [observe]),
        ("[{class_path: test_cli.Observer}]", [Observer]),
        ("[{class_path: lightning_gputime.PhaseTimeMetric}]", [PhaseTimeMetric]),
        ("[]", []),
    ],
}
"""Texts in a config file, and the values that the timer gets, by option."""

WRONG = {
    **dict.fromkeys(["warmup_steps", "history_size", "every_n_steps"], "often"),
    **dict.fromkeys(["print_summary", "lines", "annotate"], "3"),
    **dict.fromkeys(["items", "flops"], "often"),
    **dict.fromkeys(["prefix", "save_path"], "[1]"),
    "observers": "3",
    "log": "3",
    "sync_ranks": "sometimes",
}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return DataLoader([*torch.ones(8, 2)], 2)  # type: ignore[arg-type]  # a list works, too


class StoringTimer(GPUPhaseTimer):
    """A timer that stores its options as they were given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.options = options


class WithTimer(LightningCLI):
    """A CLI with options of the timer, like in the manual."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_lightning_class_args(GPUPhaseTimer, "timer")


def write(options: dict[str, str], kind: str = "test_cli.StoringTimer") -> str:
    """Write a file with options of the timer, and return its name."""
    trainer = "accelerator: cpu, max_epochs: 1, logger: false, enable_checkpointing: false"
    given = ", ".join(f"{name}: {value}" for name, value in options.items())
    callback = f"{{class_path: {kind}, init_args: {{{given}}}}}"
    Path("config.yaml").write_text(f"trainer: {{{trainer}, callbacks: [{callback}]}}\n")
    return "config.yaml"


def make(*args: str, cli: type[LightningCLI] = LightningCLI, **options: Any) -> Any:
    """Return the timer of a LightningCLI with these arguments."""
    made: Any = cli(Net, args=[*args], save_config_callback=None, **options)
    callbacks = made.trainer.callbacks
    [timer] = [callback for callback in callbacks if isinstance(callback, GPUPhaseTimer)]
    return timer


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_cli_tables_cover_every_option() -> None:
    assert sorted(VALUES) == sorted(OPTIONS)
    assert {*WRONG} == {*OPTIONS}


@pytest.mark.parametrize(
    ("name", "text", "value"), [(name, *item) for name, values in VALUES.items() for item in values]
)
def test_cli_config_file_takes_every_option(name: str, text: str, value: Any) -> None:
    given = make("--config", write({name: text}), run=False).options[name]
    if value in ([Observer], [PhaseTimeMetric]):
        [given], [value] = given, value
    assert isinstance(given, value) if isinstance(value, type) else given == value


@pytest.mark.parametrize(("name", "text"), WRONG.items())
def test_cli_error_names_option(capsys: pytest.CaptureFixture[str], name: str, text: str) -> None:
    with pytest.raises(SystemExit):
        make("--config", write({name: text}), run=False)
    message = capsys.readouterr().err
    assert f'Parser key "{name}":' in message
    assert text.strip("[]") in message


def test_cli_reports_an_impossible_value_as_the_timer_does() -> None:
    with pytest.raises(ValueError, match=r"history_size must be 1 or more .* got -1"):
        make("--config", write({"history_size": "-1"}), run=False)


def test_cli_fit_runs_with_all_options_from_one_file() -> None:
    OBSERVED.clear()
    options = {name: values[0][0] for name, values in VALUES.items()}
    timer = make("fit", "--config", write(options, "lightning_gputime.GPUPhaseTimer"))
    assert timer.history()["step"].tolist() == OBSERVED == [1, 2]
    assert Path("run.json.gz").is_file()


def test_cli_printed_config_recreates_the_timer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exits:
        make("fit", "--timer.history_size", "9", "--print_config", cli=WithTimer)
    assert exits.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert [*printed["timer"]] == OPTIONS
    parameters = inspect.signature(GPUPhaseTimer).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert printed["timer"] == {**defaults, "history_size": 9, "observers": []}
    printed["trainer"] |= {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    shown = {name: printed[name] for name in ("trainer", "timer")}
    Path("printed.yaml").write_text(yaml.safe_dump(shown))
    timer = make("--config", "printed.yaml", cli=WithTimer, run=False)
    assert timer._options.history_size == 9


QUIET = ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]


def test_cli_config_of_the_docs_runs() -> None:
    manual = (Path(__file__).parent.parent / "docs/how-to/trainers/lightning.md").read_text()
    [text] = re.findall(r"```yaml\n(.*?)```", manual, re.DOTALL)
    Path("config.yaml").write_text(text)
    timer = make("fit", "--config", "config.yaml", *QUIET)
    assert timer.history()["step"].tolist() == [0, 1, 2, 3]
    [metric, function] = timer._options.observers
    assert isinstance(metric, PhaseTimeMetric)
    assert function is print
