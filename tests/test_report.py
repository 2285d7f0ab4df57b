"""`report`: the page of one run or of two."""

import html
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Command
from fake_gpu import raw
from fake_loop import run_of, with_facts
from test_compare import run, saved_to
from test_runs import timer_after

from lightning_gputime import Cause, Run, SlowStep, compare, load
from lightning_gputime._ledger.rows import LineRow, PhasePart
from lightning_gputime._measurement.history import list_top_phases
from lightning_gputime._measurement.wall_clock import WallClockBreakdown
from lightning_gputime._messages import unit_of
from lightning_gputime._output.page import page, phases_over_steps, thin_out, trend, with_gaps
from lightning_gputime._ranks.comparison import RankStats, RankSummary

pytest.importorskip("bokeh")
CHROMIUM = shutil.which("chromium")


EVIL = "</script><script>alert(1)</script>&\"'"


def full() -> Run:
    """Return a run with everything that a page can show, and with malicious names."""
    evil = run(1, more={f"x{EVIL}": 0.5})
    stats = RankStats(1.0, 2.0, 3.0, 1)
    summary = with_facts(
        evil.summary(),
        ranks=RankSummary({"forward": stats}, (0, 1), 1, 2.0, "forward", f"rank 1 {EVIL}"),
        wall_clock=WallClockBreakdown({"steps": 71.0, "validation": 20.0, EVIL: 9.0}),
        lines=(LineRow(f"f{EVIL}", f"{EVIL}.py", 7, phases={"forward": PhasePart(5.0)}),),
    )
    cause = Cause("garbage_collection", 75.5, 70.25, EVIL)
    slow = SlowStep(
        *(7, 90.5, 15.0, EVIL, (cause,), 5.25),
        phase_ms={"forward": 80.5, EVIL: 10.0},
        host_ms={"forward": 85.5, EVIL: 5.0},
    )
    return replace(
        evil,
        name=f"run {EVIL}",
        _summary=summary,
        environment=replace(evil.environment, commit=EVIL, options={EVIL: EVIL}),
        slow_steps=[slow],
        evaluations=[{"stage": EVIL, "step": 3, "forward_ms": 2.5}],
    )


def forward(steps: int, **options: Any) -> Run:
    """Return a run of steps that only have 1 ms of forward."""
    return run_of((raw(i, forward=1.0) for i in range(steps)), **options)


def page_of(*runs: Run) -> str:
    return page(runs, compare(*runs) if len(runs) == 2 else None)


def body_of(*runs: Run) -> str:
    """Return the page of runs without bokeh's code."""
    return page_of(*runs).rpartition("</head>\n<body>")[2]


def table_rows(body: str, kind: str) -> list[list[str]]:
    """Return the cells of the table with a class or a caption."""
    table = re.search(rf'<table class="{kind}">(.*?)</table>', body, re.S) or re.search(
        rf"<table>\s*<caption>{kind}(.*?)</table>", body, re.S
    )
    assert table is not None
    lines = re.findall(r"<tr.*?</tr>", table[1], re.S)
    cells = (re.findall(r"<t[hd].*?>(.*?)</t[hd]>", line, re.S) for line in lines)
    return [[re.sub(r"<[^>]*>", "", cell).strip() for cell in line] for line in cells]


def bars(body: str) -> list[tuple[str, float, float]]:
    """Return the name of each entry, and the start and length of its bar in percent."""
    found = re.findall(r'<i style="margin-left:([\d.]+)%;width:([\d.]+)%', body)
    names = [line[0] for line in table_rows(body, "fall")[1:]]
    return [(name, float(a), float(b)) for name, (a, b) in zip(names, found, strict=True)]


def test_page_shows_the_time_breakdown_as_a_waterfall() -> None:
    shown = full()
    breakdown = shown.summary().time_breakdown
    assert breakdown is not None
    found = bars(body_of(shown))
    assert len(found) == len(breakdown.rows) > 3
    end = 0.0
    for (_, start, length), row in zip(found, breakdown.rows, strict=True):
        assert start == pytest.approx(end, abs=1e-3)
        assert length == pytest.approx(100 * row.share, abs=1e-4)
        end = start + length
    assert end == pytest.approx(100.0, abs=1e-3)


def lane(html: str) -> dict[str, float]:
    """Return the length of each bar of a lane in percent, by its name."""
    found = re.findall(r'<i style="width:([\d.]+)%;background:[^"]+" title="(.*?): ', html)
    return {name: float(length) for length, name in found}


def test_page_shows_lanes_and_causes_of_a_slow_step() -> None:
    body = body_of(full())
    [opened] = re.findall(r'<details class="slow">(.*?)</details>', body, re.S)
    _, *found = opened.split('<div class="lane">')
    assert [re.findall("<span>(.*?)<", entry)[0] for entry in found] == ["GPU", "host", "mean"]
    evil = html.escape(EVIL).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
    assert lane(found[0]) == {"forward": 88.9503, evil: 11.0497}
    assert lane(found[1]) == {"forward": 94.4751, evil: 5.5249}
    mean_ms = full().summary().step.mean_ms
    assert sum(lane(found[2]).values()) == pytest.approx(100 * mean_ms / 90.5, abs=1e-3)
    causes = re.findall(r"<td.*?>(.*?)</td>", opened)
    assert causes == [
        *(f"garbage_collection ({evil})".replace("_", " "), "70.250 ms", "75.500 ms"),
        *("unexplained", "5.250 ms", ""),
    ]


def test_page_shows_shares_and_sub_phases_of_phases() -> None:
    modules = {f"forward/layer {i}": 0.25 for i in range(4)}
    body = body_of(run_of([raw(0, data=2.0, forward=1.0, **modules, backward=4.0)]))
    shares = re.findall(r'<td class=" share" style="background-size:(.*?) 70%">(.*?)</td>', body)
    assert all(length == cell for length, cell in shares)
    assert [cell for _, cell in shares] == ["25.0%", "25.0%", *["3.1%"] * 4, "50.0%"]
    groups = re.findall(r"<tbody>(.*?)</tbody>", body, re.S)
    parts = {re.sub("<.*?>", "", item).split()[0]: item.count('class="part"') for item in groups}
    assert parts == {"data": 0, "forward": 4, "backward": 0}
    assert [entry.count('<input type="checkbox" checked>') for entry in groups] == [0, 1, 0]


def test_page_begins_with_the_verdict_and_has_every_section() -> None:
    body = body_of(full())
    assert body.index('class="verdict"') < body.index("<h2>")
    for shown in (
        "Phases over steps",
        "Slowest steps",
        "70.2 ms garbage collection",
        "5.25 ms unexplained",
        "Evaluation",
        "Where the time went",
        "20.0%",
        "Environment",
        "H200",
    ):
        assert shown in body, shown
    # The verdict is shown once, the environment is folded, and the title names the run.
    verdict = re.search(r'class="verdict">(.*?)</p>', body)
    assert verdict is not None
    assert body.count(verdict[1]) == 1
    assert re.search(r"<h2>Environment</h2>\s*<div class=\"runs\">\s*<div>\s*<details", body)
    assert re.search(r"<h1>run .* · H200 · torch 2.13.0 · batch 32 · ", body)


def test_page_escapes_every_name_and_loads_nothing() -> None:
    text, body = page_of(full()), body_of(full())
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in body
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", body)
    assert len(text.encode()) < 3e6


def test_page_leaves_out_what_a_run_does_not_have() -> None:
    body = body_of(forward(4, warmup_steps=1))
    for absent in ("Slowest steps", "Evaluation", "of the fit"):
        assert absent not in body
    [entry] = table_rows(body, "fall")[1:]
    assert entry == ["forward", "3.00 ms", "100.0%", "", "host", ""]
    assert bars(body) == [("forward", 0.0, 100.0)]
    without_steps = body_of(forward(0))
    assert "no step was timed" in without_steps
    assert not {"Slowest steps", "Phases over steps"} & {*re.findall("<h2>(.*?)<", without_steps)}


def test_page_of_warm_up_is_labelled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    timer = timer_after(3, warmup_steps=5)
    timer.save(tmp_path / "run.json.gz")
    loaded = load(tmp_path / "run.json.gz")
    table = "over 3 steps of the warm-up; no other step was timed"
    assert table in str(loaded.summary())
    body = body_of(loaded)
    assert table in body
    assert '<p class="verdict">a step takes 15.6 ms, of the warm-up</p>' in body
    assert capfd.readouterr().err == ""


def test_page_shows_two_runs_side_by_side() -> None:
    body = body_of(run(1), run(2, more={"backward": 0.6}))
    assert "slower: backward 0.6" in body
    assert "Before and after" in body
    assert body.count("Time per step in ms over 1000 steps") == 2


def test_chart_of_many_steps_has_means_of_groups() -> None:
    timed = run_of(raw(i, forward=float(i % 3), data=1.0) for i in range(5000))
    columns, every = thin_out(timed.history)
    assert every == 3
    assert len(columns["step"]) == 1667
    assert columns["step"][:3].tolist() == [0, 3, 6]
    assert columns["forward_ms"][:2].tolist() == [1.0, 1.0]
    # The last point is the mean of the two remaining steps.
    assert columns["forward_ms"][-1] == 0.5


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return saved_to(tmp_path, run(1), run(2, device="B200"))


def test_report_without_bokeh_names_the_extra(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    for name in ("bokeh", "bokeh.embed"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install bokeh" in command("report", paths[0], "-o", tmp_path / "x.html", code=2).err
    assert not (tmp_path / "x.html").exists()


def test_report_command_writes_the_page(paths: list[str], tmp_path: Path, command: Command) -> None:
    out = tmp_path / "new" / "folder" / "page.html"
    assert command("report", paths[0], "-o", out).out == f"{out}\n"
    assert out.is_file()
    command("report", *paths, "-o", out, "--allow-mismatch")
    assert "device is H200 (before) and B200 (after)" in out.read_text()


@pytest.mark.parametrize(
    ("runs", "out", "message"),
    [
        ([0, 1], "page.html", "cannot be compared: device is H200"),
        ([0, 1, 0], "page.html", "report takes one run, or two, got 3"),
        ([0], "", " (it is a folder: pass the path of a file in it)\n"),
    ],
)
def test_report_refuses_runs_and_paths(
    runs: list[int], out: str, message: str, paths: list[str], tmp_path: Path, command: Command
) -> None:
    err = command("report", *(paths[i] for i in runs), "-o", tmp_path / out, code=2).err
    assert message in err


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="a real browser is not installed")
@pytest.mark.parametrize("several", [False, True])
def test_page_renders_in_a_browser_without_an_error(several: bool, tmp_path: Path) -> None:
    runs = [full(), replace(run(2), name="b")] if several else [full()]
    (tmp_path / "page.html").write_text(page_of(*runs))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += ["--v=0", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run(
        [str(CHROMIUM), *options, (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert len(re.findall(r'class="bk-Figure"', done.stdout)) == 2 * len(runs)
    console = re.findall(r"CONSOLE.*", done.stderr)
    assert [line for line in console if "[bokeh" not in line] == []
    assert any("document idle" in line for line in console)


def test_charts_show_phases_in_ms_or_percent() -> None:
    run_1 = run(1, n=30)
    assert list_top_phases(run_1.history) == ["data", "forward", "backward"]
    for in_percent, end in ((False, 22.0), (True, 100.0)):
        figure = phases_over_steps(run_1, thin_out(run_1.history)[0], 20.0, in_percent)
        [source] = {drawn.data_source for drawn in figure.renderers}
        phases: Any = sum(source.data[f"p{i}"] for i in range(3))
        step_ms = run_1.history["step_ms"]
        assert np.allclose(phases, 100.0 if in_percent else step_ms, atol=2e-4)
        assert np.allclose(phases, source.data["whole"], atol=2e-4)
        assert figure.y_range.end == pytest.approx(end)


def test_chart_shows_slow_steps_at_their_time_or_at_the_end_of_the_axis() -> None:
    steps_ms = {7: 19.0, 9: 90.0, 50: 90.0}  # Step 50 is outside the chart.
    slow = [SlowStep(n, ms, 15.0, "loss", (), ms - 15.0) for n, ms in steps_ms.items()]
    run_1 = replace(run(1, n=30), slow_steps=slow)
    *_, points = phases_over_steps(run_1, thin_out(run_1.history)[0], 20.0).renderers
    found: Any = points.data_source.data
    assert (found["step"], found["ms"]) == ([7, 9], [19.0, pytest.approx(21.2)])
    assert found["why"] == [str(slow[0]), str(slow[1])]


def test_chart_has_gaps_where_nothing_was_timed() -> None:
    steps = np.array([0, 1, 2, 3, 4, 50, 51, 52, 53, 54])
    columns = with_gaps({"step": steps, "step_ms": np.full(10, 2.0)})
    assert columns["step"].tolist() == [0, 1, 2, 3, 4, 5, 49, 50, 51, 52, 53, 54]
    assert columns["step_ms"].tolist() == [2.0] * 5 + [0.0] * 2 + [2.0] * 5
    # Untimed steps between the timing windows of a run are not a gap.
    sampled = {"step": np.arange(0, 100, 5), "step_ms": np.ones(20)}
    assert with_gaps(sampled)["step"].tolist() == sampled["step"].tolist()


def test_chart_has_a_trend_line_of_medians() -> None:
    times_ms = np.tile([1.0, 9.0, 2.0], 80)
    steps, medians_ms, size = trend({"step": np.arange(240), "step_ms": times_ms})
    assert size == 6
    assert medians_ms.tolist() == [2.0] * 40
    assert steps[:2].tolist() == [2.5, 8.5]


@pytest.mark.parametrize(
    ("longest_ms", "cells"),
    [(4486.1, ["4.49", "0.07"]), (44861.0, ["44.9", "0.1"]), (448.0, ["448", "69"])],
)
def test_column_has_one_unit_and_three_digits(longest_ms: float, cells: list[str]) -> None:
    unit = unit_of(longest_ms).fitted(longest_ms)
    assert [unit.cell(ms) for ms in (longest_ms, 69.2)] == cells
