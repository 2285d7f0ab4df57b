import importlib.util
import inspect
import itertools
import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
READMES = {
    path: (ROOT / path).read_text()
    for path in (
        "README.md",
        "benchmarks/README.md",
        "examples/README.md",
        "examples/experiments/README.md",
        "tests/README.md",
    )
}
ALL = "\n".join(READMES.values())

each_readme = pytest.mark.parametrize("path", READMES)


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        return DataLoader(data, batch_size=4)


def blocks(path: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", READMES[path], re.DOTALL)


def rows(path: str, header: str) -> list[list[str]]:
    """The cells of the table whose first line begins so, header and rule left out."""
    _, _, table = READMES[path].partition(f"\n{header}")
    lines = itertools.takewhile(lambda line: line.startswith("|"), table.splitlines()[2:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def run_blocks(path: str) -> dict[str, Any]:
    """Runs the blocks of Python in their order; returns the names that they leave."""
    net, model = nn.Linear(4, 1), Regression()
    names: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "net": net,
        "loader": model.train_dataloader(),
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
    }
    for block in blocks(path, "python"):
        exec(block, names)
    return names


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")
@pytest.mark.parametrize(
    ("path", "n", "tables", "text"),
    [
        ("README.md", 2, 2, ""),
        ("examples/README.md", 9, 0, "of the time is backward"),
        ("examples/experiments/README.md", 1, 1, ""),
        ("benchmarks/README.md", 0, 0, ""),
        ("tests/README.md", 0, 0, ""),
    ],
)
def test_the_code_blocks_run_in_order(
    path: str,
    n: int,
    tables: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(blocks(path, "python")) == n
    run_blocks(path)
    printed = capsys.readouterr().out
    assert printed.count("warm-up steps left out") == tables
    assert text in printed


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")
def test_the_line_of_each_question_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {**vars(lightning_gputime), "GPUPhaseTimer": GPUPhaseTimer, **run_blocks("README.md")}
    questions = rows("README.md", "| question |")
    assert len(questions) == 13
    for _, line, more in questions:
        exec(line.strip("`"), names)
        assert more.startswith("[")


@pytest.mark.filterwarnings("ignore")  # What jsonargparse warns of is its own.
@pytest.mark.skipif(
    importlib.util.find_spec("jsonargparse") is None,
    reason="LightningCLI needs jsonargparse",
)
def test_lightning_cli_takes_the_yaml_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    [config] = blocks("examples/README.md", "yaml")
    (tmp_path / "config.yaml").write_text(config)
    trainer = LightningCLI(Regression, args=["fit", "--config", "config.yaml"]).trainer
    [timer] = [one for one in trainer.callbacks if isinstance(one, GPUPhaseTimer)]  # type: ignore[attr-defined]  # has no hint
    assert timer.summary().steps == 16 - 5


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 1350


def test_the_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = " ".join([project["requires-python"], *project["dependencies"]])
    [line] = [line for line in README.splitlines() if line.startswith("Python ")]
    for name, version in re.findall(r"(\w+) ([\d.]+)\+", line):
        name = {"Python": "", "PyTorch": "torch", "Lightning": "lightning"}[name]
        assert f"{name}>={version}" in bounds, line
    assert line.endswith(project["license"])


def anchors(text: str) -> list[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@each_readme
def test_every_link_leads_somewhere(path: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(READMES[path]))
    assert links
    for link in links:
        file, _, anchor = link.partition("#")
        # An absolute address could not be checked here; there is none.
        target = (ROOT / path).parent / file if file else ROOT / path
        assert target.exists(), link
        assert ROOT in target.resolve().parents, link
        if anchor:
            assert anchors(target.read_text()).count(anchor) == 1, link


def test_every_readme_can_be_reached_from_the_first() -> None:
    reached, new = set(), {"README.md"}
    while new:
        path = new.pop()
        reached.add(path)
        links = re.findall(r"\]\(([^)\s#]*README\.md)", READMES[path])
        targets = [((ROOT / path).parent / link).resolve() for link in links]
        new |= {str(target.relative_to(ROOT.resolve())) for target in targets} - reached
    assert reached == set(READMES)


def test_every_picture_is_shown() -> None:
    pictures = {path.name for path in (ROOT / "examples/images").iterdir()}
    assert pictures == set(re.findall(r"!\[[^\]]+\]\([\w./]*images/(\w+\.png)\)", ALL))


@each_readme
def test_every_command_names_a_file_that_is_there(path: str) -> None:
    text = READMES[path]
    for file in re.findall(r"(?:examples|benchmarks|tests)/[\w/.]+\.(?:py|json|png|md)", text):
        assert (ROOT / file).is_file(), file
    for name, target in re.findall(r"\[`([\w.]+)`\]\(([^)\s#]+)", text):
        assert f"/{target}".endswith((f"/{name}", f"/{name}/README.md")), target


def test_every_test_that_is_named_is_there() -> None:
    names = re.findall(r"`(test_\w+)`", ALL)
    assert len(names) > 50
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert [name for name in names if f"def {name}(" not in tests] == []
    for file, word in re.findall(r"pytest (tests/\w+\.py) -k (\w+)", ALL):
        assert re.search(rf"def test_\w*{word}", (ROOT / file).read_text())


def test_every_room_of_the_package_that_is_named_is_there() -> None:
    [_, rooms] = READMES["tests/README.md"].split("**Where things are.**")
    rooms = rooms.partition("**Add a detector**")[0]
    names = re.findall(r"(?<![\w/])(?!test_)_?[a-z_]+(?:/|\.py)(?:\w+\.py)?", rooms)
    package = ROOT / "lightning_gputime"
    assert [name for name in names if not (package / name).exists()] == []
    for folder, parts in re.findall(r"^(_\w+/) .*: (.*)$", rooms, re.MULTILINE):
        for part in parts.split(", "):
            assert (package / folder / f"{part}.py").is_file(), part


def test_the_table_of_all_options_is_complete() -> None:
    options = rows("examples/README.md", "| option | default | |")
    names = [row[0] for row in options]
    callback, hooks = names.index("**`GPUPhaseTimer`**"), names.index("**`GPUPhaseHooks`**")
    for timer, own in (
        (GPUPhaseTimer, options[:hooks]),
        (GPUPhaseHooks, options[:callback] + options[hooks:]),
    ):
        stated = {
            name: default for names, default, _ in own for name in re.findall(r"`(\w+)`", names)
        }
        del stated[timer.__name__]
        arguments = inspect.signature(timer).parameters
        assert set(stated) == set(arguments)
        for name, default in stated.items():
            if default.startswith("`"):
                stated_default = eval(default.strip("`"))
                assert stated_default == arguments[name].default, name


def test_the_main_options_are_among_all_options() -> None:
    main = rows("README.md", "| option | default | |")
    assert len(main) == 9
    of_all = {row[0]: row[1] for row in rows("examples/README.md", "| option | default | |")}
    for name, default, _ in main:
        assert of_all[name] == default


WAYS = {
    "no timer, again": "no timer, again",
    "a callback that does nothing": "callback that does nothing",
    "five bare events, read one step late (the floor)": "five events",
    "the floor in a plain loop": "five events",
    "`GPUPhaseHooks()` in a plain loop": "GPUPhaseHooks()",
    "`GPUPhaseTimer()`": "GPUPhaseTimer()",
    "`GPUPhaseTimer(every_n_steps=10)` (2 of the 25 steps)": "GPUPhaseTimer(every_n_steps=10)",
    "`GPUPhaseTimer(lag=0)`": "GPUPhaseTimer(lag=0)",
    "Lightning's `SimpleProfiler`": "Lightning SimpleProfiler",
    "Lightning's `SimpleProfiler` (host clock: wrong numbers)": "Lightning SimpleProfiler",
    "Lightning's `ThroughputMonitor`": "Lightning ThroughputMonitor",
    "Lightning's `ThroughputMonitor` (no phases)": "Lightning ThroughputMonitor",
    "DeepSpeed's timers": "DeepSpeed timers",
    "TorchTNT's `Timer(cuda_sync=True)`": "TorchTNT Timer(cuda_sync=True)",
    "four `synchronize`": "four synchronize",
    "four `synchronize`, host clock": "four synchronize",
}


@pytest.mark.parametrize(
    ("path", "header", "models"),
    [
        ("README.md", "| | adds to", ["gpt12"]),
        (
            "benchmarks/README.md",
            "| in Lightning, where nothing else is said",
            ["gpt12", "resnet50", "gpt12 compiled", "gpt4", "mlp"],
        ),
    ],
)
def test_what_is_added_is_what_was_measured(path: str, header: str, models: list[str]) -> None:
    results = json.loads((ROOT / "benchmarks/results/overhead.json").read_text())["results"]
    table = rows(path, header)
    assert len(table) >= 6
    for label, *cells in table:
        loop = "plain" if "plain loop" in label else "lightning"
        for model, cell in zip(models, cells, strict=False):
            row = results[model][loop][WAYS[label]]
            assert cell == f"{(row['ratio'] - 1) * 100:+.2f} ± {row['error'] * 100:.2f} %", label


def test_the_picture_of_the_gpt_is_drawn_from_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    hero = runpy.run_path(str(ROOT / "examples/pictures.py"))["hero"]
    timer = hero(1, 64, batch=2, length=16, vocabulary=64, steps=12, directory=str(tmp_path))
    assert timer.summary().steps == 7
    assert (tmp_path / "hero.png").read_bytes().startswith(b"\x89PNG")


def test_the_ci_runs_the_command_for_the_tests() -> None:
    [command] = [line for line in README.splitlines() if "python -m pytest" in line]
    install, run = command.removeprefix("python -m ").split(" && python -m ")
    script = (ROOT / ".ci/run").read_text()
    assert install.replace("pip install", "pip install --quiet") in script
    assert run in script
