"""The READMEs and the manual: code runs, links lead somewhere, tables and figures are right."""

import ast
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import lightning.pytorch as pl
import pytest
import torch
from test_diagnosis import fit, measurement, timed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, MemorySummary, SlowStep
from lightning_gputime.__main__ import _new_parser
from lightning_gputime._diagnosis import (
    CODES,
    COMPUTE_BOUND,
    GPU_BOUND,
    LAUNCH_BOUND,
    Case,
    Entry,
    TimeBreakdown,
    advice,
)
from lightning_gputime._diagnosis.diagnose import diagnose
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.measurement import TrainingSetup
from lightning_gputime._measurement.slow import CauseKind, SlowSummary
from lightning_gputime._options import Options
from lightning_gputime._output.loggers import GROUPS
from lightning_gputime.huggingface import TransformersPhaseTimer

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_gputime"
README = (ROOT / "README.md").read_text()
DOCS = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md"))]
PATHS = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/README.md"),
    *("examples/experiments/README.md", "tests/README.md", *DOCS),
)
READMES = {path: (ROOT / path).read_text() for path in PATHS}
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
    """Return the cells of the table whose header begins with a text, without the header."""
    _, _, table = READMES[path].partition(f"\n{header}")
    lines = itertools.takewhile(lambda line: line.startswith("|"), table.splitlines()[2:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def run_blocks(path: str) -> dict[str, Any]:
    """Run the Python blocks of a page in their order, and return the names that they define."""
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


class Page(NamedTuple):
    blocks: int  # Number of Python blocks.
    tables: int = 0  # Number of tables that the blocks print.
    text: str = ""  # Another text that they print.


PAGES = {
    "README.md": Page(2, tables=2),
    "docs/index.md": Page(2, tables=2),
    "examples/experiments/README.md": Page(1, tables=1),
    "docs/how-to/outputs.md": Page(2),
    "docs/how-to/slower-than-yesterday.md": Page(1, text=torch.__version__),
    "docs/how-to/split-a-step.md": Page(2),
    "docs/how-to/trainers/fabric.md": Page(1, tables=1),
    "docs/how-to/trainers/lightning.md": Page(2, tables=1, text="-bound"),
    "docs/how-to/trainers/plain-loop.md": Page(1, tables=1),
    "docs/how-to/validation-and-inference.md": Page(1),
    "docs/how-to/work-per-second.md": Page(1, text="None"),
    "docs/reference/results.md": Page(1, text="of the time is backward"),
}


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")
@pytest.mark.parametrize("path", PAGES)
def test_code_blocks_run_in_order(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGES[path]
    assert len(blocks(path, "python")) == page.blocks
    run_blocks(path)
    printed = capsys.readouterr().out
    assert printed.count("warm-up steps excluded") == page.tables
    assert page.text in printed


def test_every_code_block_is_run() -> None:
    tested = {*PAGES, "CONTRIBUTING.md"}  # test_recipes.py runs CONTRIBUTING.md.
    assert {path for path in READMES if blocks(path, "python")} == tested
    languages = set(re.findall(r"^ *```(.+)$", ALL, re.MULTILINE))
    assert languages == {"python", "sh", "text", "yaml"}


def test_shell_commands_parse() -> None:
    lines = [line for path in READMES for block in blocks(path, "sh") for line in block.split("\n")]
    commands = [row for row in map(shlex.split, lines) if row[:1] == ["lightning-gputime"]]
    assert len(commands) > 8
    for command in commands:
        _new_parser().parse_args(command[1:])


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")
def test_question_table_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {**vars(lightning_gputime), "GPUPhaseTimer": GPUPhaseTimer, **run_blocks("README.md")}
    questions = rows("docs/how-to/questions.md", "| question |")
    assert len(questions) == 12
    for _, line, more in questions:
        exec(line.strip("`"), names)
        assert more.startswith("[")


def test_readme_states_the_versions_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = " ".join([project["requires-python"], *project["dependencies"]])
    [line] = [line for line in README.splitlines() if line.startswith("Python ")]
    for name, version in re.findall(r"(\w+) ([\d.]+)\+", line):
        name = {"Python": "", "PyTorch": "torch", "Lightning": "lightning"}[name]
        assert f"{name}>={version}" in bounds, line
    assert line.endswith(project["license"])


def anchors(text: str) -> list[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@each_readme
def test_every_link_leads_somewhere(path: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(READMES[path]))
    assert links or path in DOCS
    for link in links:
        if path == "CHANGELOG.md" and link.startswith("https://"):
            continue
        # Absolute links cannot be checked, so only the changelog may contain them.
        file, _, anchor = link.partition("#")
        target = (ROOT / path).parent / file if file else ROOT / path
        assert target.exists(), link
        assert ROOT in target.resolve().parents, link
        if anchor:
            assert anchors(target.read_text()).count(anchor) == 1, link


def test_menu_of_the_manual_has_every_page() -> None:
    menu = re.findall(r'= "(\S+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(f"docs/{page}" for page in menu) == sorted(DOCS)
    home = READMES["docs/index.md"]
    assert [page for page in menu if f"]({page})" not in home] == ["index.md"]


@each_readme
def test_every_command_names_an_existing_file(path: str) -> None:
    text = READMES[path]
    for file in re.findall(r"(?:examples|benchmarks|tests)/[\w/.]+\.(?:py|json|png|md)", text):
        assert (ROOT / file).is_file(), file
    for name, target in re.findall(r"\[`([\w.]+)`\]\(([^)\s#]+)", text):
        assert f"/{target}".endswith((f"/{name}", f"/{name}/README.md")), target


def test_every_named_test_exists() -> None:
    names = re.findall(r"`(test_\w+)`", ALL)
    assert len(names) > 2
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert [name for name in names if f"def {name}(" not in tests] == []
    for file, word in re.findall(r"pytest (tests/\w+\.py) -k (\w+)", ALL):
        assert re.search(rf"def test_\w*{word}", (ROOT / file).read_text())


def test_every_folder_of_the_package_is_listed() -> None:
    [_, rooms] = READMES["tests/README.md"].split("## Where things are")
    rooms = rooms.partition("## The words")[0]
    listed = {*re.findall(r"(?<![\w/])(?!test_)(_?[a-z_]+(?:/|\.py))", rooms)}
    modules = {path.name for path in PACKAGE.glob("*.py")}
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/*.py")}
    assert listed == modules | folders


def test_table_of_all_options_is_complete() -> None:
    documented: dict[str, dict[str, str]] = {"": {}}
    owner = ""
    for names, default, _ in rows("docs/reference/options.md", "| option | default | |"):
        if names.startswith("**"):
            owner = names.strip("*`")
            documented[owner] = {}
        else:
            documented[owner] |= dict.fromkeys(re.findall(r"`(\w+)`", names), default)
    for timer in (GPUPhaseTimer, GPUPhaseHooks, TransformersPhaseTimer):
        defaults = documented[""] | documented[timer.__name__]
        arguments = inspect.signature(timer).parameters
        assert {*defaults} == {*arguments}
        for name, default in defaults.items():
            if default.startswith("`"):
                assert eval(default.strip("`")) == arguments[name].default, name


def test_tables_of_verdicts_groups_and_causes_are_complete() -> None:
    verdicts = {GPU_BOUND, LAUNCH_BOUND, COMPUTE_BOUND, *CODES.values()}
    assert len(verdicts) == 8
    text = READMES["docs/reference/verdicts.md"]
    assert {code for code in verdicts if f"`{code}`" not in text} == set()
    assert set(re.findall(r"`([\w-]+-bound)`", README)) <= verdicts
    groups = {row[0].strip("`"): row[1] for row in rows("docs/reference/keys.md", "| group |")}
    assert set(groups) == set(GROUPS)
    assert {name for name, when in groups.items() if when == "yes"} <= Options().logged_groups
    assert [name for name in groups if groups[name] == "no"] == ["comm", "slow", "fit"]
    causes = [row[0].strip("`") for row in rows("docs/how-to/slow-steps.md", "| cause |")]
    assert set(causes) == set(get_args(CauseKind))


def headline(
    step_ms: float,
    phases_ms: Mapping[str, float],
    *lines: LineRow,
    host_paced: float = 1.0,
    validation_s: float = 0.0,
) -> str:
    """Return the headline of a fit on a GPU whose remaining time is `forward`.

    In each phase, the host sets the pace for the fraction `host_paced`.
    """
    top_ms = sum(ms for name, ms in phases_ms.items() if "/" not in name)
    every_ms = {**phases_ms, "forward": step_ms - top_ms}
    outside_s = {"validation": validation_s} if validation_s else {}
    measured = measurement(
        every_ms,
        wait_ms=0.0,
        host_paced=dict.fromkeys(every_ms, host_paced),
        lines=lines,
        wall_clock=fit(outside_s, 0.1 * step_ms),
    )
    return diagnose(measured, TrainingSetup(has_loader=True)).headline


model_line = partial(timed, is_forward=True)
BLOCK = model_line(
    "Block.forward", "model.py:20", gpu={"forward": 3.0, "backward": 9.81}, modules="6 x Block"
)
REST = model_line("GPT.forward", "model.py:31", gpu={"forward": 1.83, "backward": 5.56})
LOADS = timed(
    "AugmentedDigits.__getitem__", "tutorial.py:45", host={"data/fetch": 15.3}, last_line=54
)
CHECKS = timed("AccuracyCurve.on_train_batch_end", "tutorial.py:92", host={"callbacks": 2.33})
CALLBACK = "callbacks/AccuracyCurve.on_train_batch_end"
MEMORY = MemorySummary(41_210.0, 47_104.0, 81_559.0)
SLOW = SlowSummary(
    n=3,
    steps=120,
    share=0.012,
    cause_shares={
        "the loader": 0.005,
        CALLBACK.partition("/")[2]: 0.002,
        "garbage collection": 0.002,
    },
    unexplained_share=0.003,
    worst=SlowStep(50, 48.0, 30.4, "callbacks", (), 0.0),
)
JUMP = Slowdown("jump", 2_500, 0.342, 0.012, 30.0, "forward", 10.0, since_epoch=3)


QUOTES = {
    "input-bound": headline(22.0, {"data": 15.4, "data/fetch": 15.3}, LOADS),
    "host-bound": headline(6.66, {"callbacks": 2.33}, CHECKS, host_paced=0.4),
    "communication-bound": headline(
        22.8, {"backward": 21.8, "backward/comm": 21.2}, host_paced=0.0
    ),
    "launch-bound": headline(4.69, {"backward": 3.05}),
    "gpu-bound": headline(20.2, {"backward": 15.37}, BLOCK, REST, host_paced=0.0),
    "overhead-bound": headline(10.0, {}, validation_s=2.13),
    "out-of-memory": MEMORY.sentences[0],
    "slow-steps": SLOW.sentences[0],
    "slow-steps#slowdown": str(JUMP),
}


@pytest.mark.parametrize("page", QUOTES)
def test_manual_quotes_sentences_that_are_printed(page: str) -> None:
    assert f"\n{QUOTES[page]}\n```" in READMES[f"docs/how-to/{page.partition('#')[0]}.md"]


def test_manual_quotes_the_advice() -> None:
    fetches = measurement({"data": 7.0, "data/fetch": 7.0, "other": 3.0})
    entry = Entry("data/fetch", 7.0, 0.7, phases_ms={"data": 7.0})
    breakdown = TimeBreakdown((entry,), 10.0, "fit")
    no_workers = Case(entry, breakdown, fetches, TrainingSetup(num_workers=0))
    load_faster = next(advice._load_faster(no_workers)).text
    small_batch = TrainingSetup(batch_size=32)
    launch_less = next(advice.advise_on_launches(fetches, small_batch)).text
    quotes = [("how-to/input-bound", load_faster), ("tutorial", load_faster)]
    for page, text in [*quotes, ("tutorial", launch_less)]:
        assert f"`{text}" in READMES[f"docs/{page}.md"].replace("`` ", "``").replace("``", "`")


WARNINGS = {"warning", "warn_once", "_warn_once"}


def texts(node: ast.AST | None, constants: dict[str, str]) -> list[str]:
    """Return the possible texts of an argument, up to the first value in an f-string."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return [text]
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return [constants[name]] if name in constants else []
        case ast.IfExp():
            return [*texts(node.body, constants), *texts(node.orelse, constants)]
    return []


def constants_of(tree: ast.Module) -> dict[str, str]:
    return {
        node.targets[0].id: text
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        for text in texts(node.value, {})
    }


def warnings_of_the_package() -> set[str]:
    """Return each warning that is logged, with "..." for its values."""
    found = set()
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    by_path = {path: constants_of(tree) for path, tree in trees.items()}
    # A warning may be imported from another module.
    imported = {name: text for constants in by_path.values() for name, text in constants.items()}
    for path, tree in trees.items():
        constants = imported | by_path[path]
        if path.stem == "self_check":  # Its warnings are in a table.
            found |= {text for text in by_path[path].values() if " " in text}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called in WARNINGS and node.args:
                    found |= {*texts(node.args[0], constants)}
    return {re.sub(r"(%(\.\d)?\w\.?)+", "...", text) for text in found if text}


def test_docs_list_every_warning() -> None:
    page = READMES["docs/reference/messages.md"]
    entries = re.findall(r"^(?:\| )?`([^`]+)`(?: \||(?: ·)?$)", page, re.MULTILINE)
    entries = [item.rstrip(".").rstrip() for item in entries]
    found = [text.replace("`", "") for text in warnings_of_the_package()]
    assert len(found) > 60
    assert [text for text in found if not text.startswith(tuple(entries))] == []
    assert [entry for entry in entries if not any(text.startswith(entry) for text in found)] == []


def measured(file: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{file}.json").read_text())["results"]


def test_readme_states_the_measured_cost_of_each_tool() -> None:
    ways = {
        "`GPUPhaseTimer()`": "GPUPhaseTimer()",
        "Lightning's `SimpleProfiler`": "Lightning SimpleProfiler",
        "Lightning's `ThroughputMonitor`": "Lightning ThroughputMonitor",
        "four `synchronize`": "four synchronize",
    }
    table = rows("README.md", "| | adds to")
    assert [label for label, *_ in table] == [*ways]
    for label, cell, _ in table:
        row = measured("overhead")["gpt12"][ways[label]]
        added = f"{(row['ratio'] - 1) * 100:+.2f} ± {row['error'] * 100:.2f} %"
        assert cell == added
        assert added in READMES["benchmarks/README.md"]


def test_manual_states_the_measured_cost_of_a_timed_step() -> None:
    for results in measured("cold_cost").values():
        for way in {*results} - {"step"}:
            added = f"{results[way]['us']:+.0f} ± {results[way]['error_us']:.0f} us"
            assert added in READMES["docs/explanation/cost.md"]
            assert added in READMES["benchmarks/README.md"]


def test_tutorial_states_the_measured_gains() -> None:
    results = json.loads((ROOT / "benchmarks/results/tutorial.json").read_text())
    page = READMES["docs/tutorial.md"]
    assert results[0]["device"] in page
    gain = results[-1]["images_per_sec"] / results[0]["images_per_sec"]
    for path in ("docs/tutorial.md", "docs/index.md", "README.md"):
        assert f"{gain:.1f} times as fast" in READMES[path]
    for n, result in enumerate(results):
        changes = ", ".join(map(str, range(1, n + 1))) or "as found"
        assert f"| {changes} | {result['images_per_sec']:,.0f} |" in page


@pytest.mark.parametrize("path", ["benchmarks/README.md", "docs/explanation/how-true.md"])
def test_manual_states_the_measured_accuracy(path: str) -> None:
    page = READMES[path]
    models = measured("accuracy").values()
    grown = [ms for model in models for ms in model["growth_of_spinning_phase_ms"].values()]
    others = [ms for model in models for ms in model["largest_change_of_others_ms"].values()]
    assert f"within {max(model['largest_difference_ms'] for model in models)} ms" in page
    assert f"{min(grown):.2f} to {max(grown):.2f} ms" in page
    assert f"{max(others):.3f} ms" in page
    ranks = json.loads((ROOT / "benchmarks/results/ranks.json").read_text())
    for key in ("named_rightly", "agree_with_trace"):
        assert "{} of {}".format(*ranks[key]) in page
    sampling = json.loads((ROOT / "benchmarks/results/sampling.json").read_text())
    loops = f"{sampling['within_3_points_or_error']} of {sampling['loops']} loops within 3 points"
    assert loops in page
    largest = f"largest error {sampling['max_off_points']:.1f} points"
    assert largest in READMES["benchmarks/README.md"]


def test_manual_has_the_figures_of_the_benchmarks() -> None:
    figures = [
        item for path in DOCS for item in re.findall(r"[\d.]+ ± [\d.]+ (?:%|us)", READMES[path])
    ]
    assert len(figures) > 8
    # The page on comparing runs has made-up figures.
    of_runs = re.findall(r"[\d.]+ ± [\d.]+ %", READMES["docs/how-to/slower-than-yesterday.md"])
    page = READMES["benchmarks/README.md"]
    assert [entry for entry in figures if entry not in page] == of_runs


def test_ci_runs_the_test_command_of_the_readme() -> None:
    [command] = [line for line in README.splitlines() if "python -m pytest" in line]
    install, run = command.removeprefix("python -m ").split(" && python -m ")
    script = (ROOT / ".ci/run").read_text()
    assert install.replace("pip install", "pip install --quiet") in script
    assert run in script


@pytest.mark.slow
def test_manual_builds_with_the_api_and_the_pictures(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    environment = {**os.environ, "GITHUB_REPOSITORY": "someone/timer", "GITHUB_REF_NAME": "v1.2.3"}
    command = [sys.executable, str(ROOT / ".ci/docs.py"), "build", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "reference/api/index.html").read_text()
    names = lightning_gputime.__all__
    assert [name for name in names if f'id="lightning_gputime.{name}"' not in api] == []
    assert {"overhead.png", "report.png"} <= {path.name for path in tmp_path.glob("images/*")}
    cost = (tmp_path / "explanation/cost/index.html").read_text()
    assert 'src="../../images/overhead.png"' in cost
    address = "https://github.com/someone/timer/blob/v1.2.3/benchmarks/results/overhead.json"
    assert f'href="{address}"' in cost
