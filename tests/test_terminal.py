"""The output on a terminal when training ends, and the width of tables."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import raw
from fake_loop import run_of, with_facts
from processes import run

from lightning_gputime import compare
from lightning_gputime._measurement.results import Results
from lightning_gputime._messages import duration, unit_of
from lightning_gputime._output.summary import PhaseSummary, summary_of
from lightning_gputime._output.table import Table, show
from lightning_gputime._ranks.comparison import RankStats, RankSummary

TERMINAL_RUN = Path(__file__).parent / "terminal_run.py"
NUMBER = re.compile(r"\d+(\.\d+)?%?")


def summary_of_ranks(scale: float = 1.0) -> PhaseSummary:
    """Return a summary whose table is too wide for 80 columns."""
    results = Results(10, warmup_steps=0)
    phases = dict.fromkeys(("data", "forward", "backward", "optimizer"), 22.375 * scale)
    results.add([raw(i, 4.0 * scale, **phases, **{"backward/comm": scale}) for i in range(4)])
    row = RankStats(21.125 * scale, 22.5 * scale, 1322.75 * scale, 11)
    names = [*phases, "backward/comm", "step"]
    ranks = RankSummary(dict.fromkeys(names, row), (0, 1), 1, 5.0, "forward", sentence="a " * 90)
    return with_facts(summary_of(results), ranks=ranks, host_paced=dict.fromkeys(phases, 0.5))


def on_console(table: Any, width: int) -> list[str]:
    """Return the lines that rich prints on a terminal of this width."""
    from rich.console import Console

    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(table)
    file: Any = console.file
    return [line.rstrip() for line in file.getvalue().splitlines()]


def header(lines: list[str]) -> list[str]:
    [found] = [line for line in lines if line.startswith("phase ")]
    return re.split(r"\s{2,}", found)


BARS = [("tqdm", "with"), ("rich", "with"), ("tqdm", "without")]
"""Progress bars, with rich installed and without."""


@pytest.fixture(scope="module")
def terminals() -> dict[str, list[str]]:
    """Return the lines that each terminal shows after a training."""
    pytest.importorskip("pyte")
    cases = [f"{bar},{columns},{rich}" for bar, rich in BARS for columns in (80, 120)]
    shown: dict[str, list[str]] = json.loads(run(TERMINAL_RUN, *cases))
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(("bar", "rich"), BARS)
def test_terminal_shows_the_whole_table_when_training_ends(
    bar: str, rich: str, columns: int, terminals: dict[str, list[str]]
) -> None:
    lines = terminals[f"{bar},{columns},{rich}"]
    first = next(i for i, line in enumerate(lines) if line.startswith("Time per step in"))
    # The bottleneck depends on how busy the machine is, and its line may be wrapped.
    assert any(re.match(r"[\w-]+-(bound|contention)", line) for line in lines[:first])
    rows = {"data", "callbacks", "copy", "fetch", "forward", "loss", "backward", "optimizer"}
    shown = [line.split() for line in lines[first + 1 :]]
    assert {cells[0] for cells in shown if len(cells) == 7} >= {*rows, "other", "step", "phase"}
    step_rows = [cells for cells in shown if cells[:1] == ["step"] and len(cells) == 7]
    assert all(NUMBER.fullmatch(cell) for cells in step_rows for cell in cells[1:])
    assert any(line.startswith("Time breakdown of the fit") for line in lines[:first])
    # The lane of the mean step is made of coloured spaces, with the names below.
    lane = lines.index("CPU")
    assert lines[lane + 1].split()[:3] == ["data", "callbacks", "forward"]
    assert lane < first
    # The progress bar continues below the table.
    assert sum("Time per step in" in line for line in lines) == 1
    assert lines[-1] == "training is over"
    assert sum("40/40" in line for line in lines) >= 1


BAR = re.compile(r"\x1b\[48;5;(\d+)m( *)\x1b\[0m")
INPUT = {"data": 10.0, "forward": 4.0, "own loss": 1.0, "backward": 4.0, "other": 1.0}


def lanes_of(text: str) -> dict[str, list[tuple[str, int]]]:
    """Return the colours of each lane of a text, and their widths in columns."""
    found = (re.match(rf"(\w+) +(?={BAR.pattern})", line) for line in text.splitlines())
    lanes = (entry for entry in found if entry is not None)
    return {item[1]: [(c, len(s)) for c, s in BAR.findall(item.string) if s] for item in lanes}


@pytest.mark.parametrize("on_host_clock", [False, True])
def test_terminal_with_colours_shows_lanes_of_the_mean_step(on_host_clock: bool) -> None:
    summary = run_of([raw(0, **INPUT)], on_host_clock=on_host_clock).summary()
    width = 40 + len("CPU  " if on_host_clock else "host  ")
    text = summary._table().text(width, in_colour=True)
    # The order is that of the table, in which the user's phases are last.
    lane = [("178", 20), ("25", 8), ("74", 8), ("145", 2), ("97", 2)]
    assert lanes_of(text) == ({"CPU": lane} if on_host_clock else {"GPU": lane, "host": lane})
    # Lanes are drawn below the verdict. Everything else is the same as without colours.
    verdict, drawn, *others = text.split("\n\n")
    assert " ".join(verdict.split()) == summary.verdict
    assert "\n\n".join([verdict, *others]) == summary._table().text(width)
    squares = [line for line in drawn.splitlines() if not re.match("[a-zA-Z]", line)]
    legend = BAR.sub(r"\1", "\n".join(squares))
    assert legend == "178 data  25 forward  74 backward  145 other\n97 own loss"


@pytest.mark.parametrize("with_rich", [True, False])
@pytest.mark.parametrize(
    ("variables", "has_lanes"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, True),
        ({"TERM": "xterm"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
    ],
)
def test_lanes_are_drawn_on_terminals_that_have_the_colours(
    variables: dict[str, str], has_lanes: bool, with_rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    for name in ("TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream: Any = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", stream)
    if with_rich:
        monkeypatch.setattr("rich.get_console", lambda: Console(file=stream, width=80))
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    show(run_of([raw(0, **INPUT)]).summary())
    assert [*lanes_of(stream.getvalue())] == (["GPU", "host"] if has_lanes else [])
    assert ("\x1b[48" in stream.getvalue()) is has_lanes


@pytest.mark.parametrize("width", [24, 40, 60, 80, 100])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_narrow_table_drops_columns_in_order_and_cuts_no_number(width: int, scale: float) -> None:
    summary = summary_of_ranks(scale)
    wide = header(str(summary).splitlines())
    table = summary._table()
    plain, rich = table.text(width).splitlines(), on_console(summary, width)
    for lines in (plain, rich):
        left_out = [name for name in wide if name not in header(lines)]
        drops = [name for name in table.drops if name in wide]
        assert {*left_out} == {*drops[: len(left_out)]}
        assert not any("…" in line for line in lines)
    cells = {cell for line in str(summary).splitlines() for cell in re.split(r"\s{2,}", line)}
    body = plain[next(i for i, line in enumerate(plain) if line.startswith("phase ")) :]
    rows = [line for line in body if line.startswith(("data", "forward", "step"))]
    assert len(rows) == 3
    assert all(cell in cells for row in rows for cell in re.split(r"\s{2,}", row))
    if width >= 40:
        assert max(map(len, plain)) <= width
    assert max(map(len, rich)) <= width


LONG_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"


@pytest.mark.parametrize("with_rich", [True, False])
def test_table_fits_long_names_and_aligns_wide_characters(with_rich: bool) -> None:
    phases = {f"forward/{LONG_NAME}": 2.5, "日本語": 1.5}
    summary = run_of([raw(0, forward=4.0, **phases)]).summary()
    table = summary._table()
    lines = on_console(summary, 80) if with_rich else table.text(80).splitlines()
    assert header(lines) == ["phase", "mean", "share"]
    assert max(map(len, lines)) <= 80
    [first] = [line for line in lines if line.startswith("  base_model")]
    assert first.split()[:2] == [LONG_NAME, "2.500"]
    # Each of these characters is two columns wide.
    [wide] = [line for line in lines if line.startswith("日本語") and "1.500" in line]
    assert wide.index("1.500") + 3 == first.index("2.500")


def test_table_of_ranks_fits_into_80_columns() -> None:
    names = ["phase", "mean", "share", "p50", "p95", "max", "host", "steps", "host-paced"]
    assert header(str(summary_of_ranks()).splitlines()) == [*names, "min - max (rank)"]
    names = ["phase", "mean", "share", "p50", "p95", "host-paced", "min - max (rank)"]
    assert header(summary_of_ranks()._table().text(80).splitlines()) == names


@pytest.mark.parametrize(
    ("ms", "title", "cell", "words"),
    [
        (0.05, "Time per step in us", "50.0", "50 us"),
        (0.5, "Time per step in ms", "0.500", "0.5 ms"),
        (999.5, "Time per step in ms", "999.500", "1000 ms"),
        (22_375.0, "Time per step in s", "22.3750", "22.4 s"),
    ],
)
def test_unit_of_the_table_suits_the_step(ms: float, title: str, cell: str, words: str) -> None:
    summary = run_of([raw(0, ms / 2, forward=ms)]).summary()
    text = str(summary)
    assert f"\n{title} over 1 step" in text
    assert f" {cell} " in text
    assert duration(ms) == words
    assert f"of {words} per step" in text
    assert summary.step.mean_ms == pytest.approx(ms)
    assert unit_of(5.0).of(123_456.0) == "123456 ms"  # Without an exponent.


def test_sentences_wrap_between_words_only_on_a_terminal() -> None:
    name = "input-bound"
    table = Table("t", [("phase", "mean"), ("a", "1"), ("step", "1")], [f"{name} " * 12])
    assert f"{name} " * 11 + name in table.text()
    wrapped = table.text(30).splitlines()
    assert max(map(len, wrapped)) <= 30
    assert sum(line.split() == [name] * 2 for line in wrapped) == 6


def test_table_without_rich_has_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")  # Ignore the developer's terminal.
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show(summary_of_ranks())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    show(summary_of_ranks())
    assert header(capsys.readouterr().out.splitlines())[-2:] == ["host-paced", "min - max (rank)"]


@pytest.mark.parametrize(("width", "name"), [(80, "layers.0.attention.output"), (45, "body")])
def test_narrow_comparison_leaves_out_columns_and_cuts_no_number(width: int, name: str) -> None:
    timed = run_of(raw(i, forward=4000.0, **{f"forward/{name}": 100.0}) for i in range(48))
    found = compare(timed, timed)
    for lines in (on_console(found, width), found._table().text(width).splitlines()):
        assert max(map(len, lines)) <= width
        assert any(name in line for line in lines)
        [step] = [line.split() for line in lines if line.startswith("step ")]
        assert (*step[1:3], step[-1]) == ("4.1000", "4.1000", "+0.0%")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_table_is_escaped_on_ascii_output(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(output, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    show(run_of([raw(0, **{"é": 1.0})]).summary())
    output.flush()
    written = output.buffer.getvalue()
    assert rb"\xe9 " in written
    assert (b"\x1b[48;5;" in written) is is_terminal
    assert rb"\xa0" not in written
    monkeypatch.setattr("sys.stdout", None)  # The process has no output.
    show(summary_of_ranks())
