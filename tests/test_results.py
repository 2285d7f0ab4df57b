"""`Results`: the history and the summary of steps, and the table of a summary."""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from fake_gpu import raw
from fake_loop import Loop, hooks, with_facts
from rich.console import Console

from lightning_gputime import Environment, Run, StepTimes, load
from lightning_gputime._measurement.observers import Section
from lightning_gputime._measurement.results import Results
from lightning_gputime._output.summary import PhaseSummary, summary_of
from lightning_gputime._phases import StepRecord
from lightning_gputime._runs import saved


def filled(*steps: StepRecord, capacity: int = 100, warmup_steps: int = 0) -> Results:
    results = Results(capacity, warmup_steps)
    for step in steps:
        results.add([step])
    return results


def summarize(*steps: StepRecord, **options: Any) -> PhaseSummary:
    return summary_of(filled(*steps, **options))


def test_summary_has_the_statistics_of_each_phase_and_of_the_step() -> None:
    results = filled(raw(0, 1.0, forward=2.0, backward=6.0), raw(1, 3.0, forward=4.0, backward=8.0))
    summary = summary_of(results)
    forward = summary.rows["forward"]
    assert (forward.n, forward.mean_ms, forward.p50_ms, forward.max_ms) == (2, 3.0, 3.0, 4.0)
    assert forward.p95_ms == pytest.approx(3.9)
    assert not isinstance(forward.p50_ms, np.floating)
    assert forward.share == pytest.approx(6.0 / 20.0)
    assert forward.host_mean_ms == pytest.approx(3.0)
    assert (summary.step.n, summary.step.mean_ms, summary.step.max_ms) == (2, 10.0, 12.0)
    assert summary.step.host_mean_ms == pytest.approx(10.0)
    assert (summary.steps, summary.measurement.warmup_steps) == (2, 0)
    assert summary.measurement.host_wait_mean_ms == 2.0


@pytest.mark.parametrize(("every", "is_explained"), [(1, False), (2, True), (4, True)])
def test_table_explains_shares_of_phases_that_run_rarely(every: int, is_explained: bool) -> None:
    steps = [raw(i, forward=2.0, **{"optimizer": 8.0} if i % every == 0 else {}) for i in range(8)]
    summary = summarize(*steps)
    optimizer = summary.rows["optimizer"]
    assert (optimizer.mean_ms, optimizer.share) == (8.0, 8.0 / (8.0 + 2.0 * every))
    text = (
        "share: fraction of the time of all steps; other columns: only steps in which the phase ran"
    )
    assert (text in str(summary)) == is_explained


def test_run_shorter_than_the_warm_up_shows_the_warm_up() -> None:
    summary = summarize(raw(0, forward=1.0), warmup_steps=5)
    assert (summary.steps, summary.rows["forward"].mean_ms) == (1, 1.0)
    assert (summary.measurement.is_warmup, summary.time_breakdown) == (True, None)
    assert "over 1 step of the warm-up; no other step was timed" in str(summary)
    empty = summarize()
    assert (empty.steps, empty.rows, str(empty)) == (0, {}, "No step was timed.")
    assert math.isnan(empty.step.mean_ms)
    assert json.dumps(summary.to_dict(), allow_nan=False)


def test_table_of_a_summary_is_complete_and_aligned() -> None:
    step = {"other": 0.5, "backward": 5.0, "backward/comm": 1.0, "forward": 123.25, "data": 0.25}
    host_paced = {"forward": 0.0, "backward": 0.0, "backward/comm": 0.0, "other": 1.0}
    text = str(with_facts(summarize(raw(0, 1.5, **step)), host_paced=host_paced))
    assert text.splitlines() == [
        "GPU-bound: the GPU sets the pace for 99 % of the step; `forward` takes 123 ms of 130 ms"
        " per step (95 % of the timed steps)",
        "",
        "Time breakdown of the timed steps",
        "",
        "where     per step     time   share  forward  backward  pace",
        "------------------------------------------------------------",
        "forward     123 ms   123 ms   94.8%   123 ms             GPU",
        "backward      5 ms     5 ms    3.8%               5 ms   GPU",
        "3 others            1.75 ms    1.3%",
        "------------------------------------------------------------",
        "total       130 ms   130 ms  100.0%",
        "",
        "Not measured: MFU (pass flops=)",
        "",
        "Time per step in ms over 1 step",
        "",
        "phase        mean   share      p50      p95      max     host  steps  host-paced",
        "--------------------------------------------------------------------------------",
        "data        0.250    0.2%    0.250    0.250    0.250    0.250      1",
        "forward   123.250   94.8%  123.250  123.250  123.250  123.250      1          0%",
        "backward    6.000    4.6%    6.000    6.000    6.000    6.000      1          0%",
        "  comm      1.000    0.8%    1.000    1.000    1.000    1.000      1          0%",
        "other       0.500    0.4%    0.500    0.500    0.500    0.500      1        100%",
        "--------------------------------------------------------------------------------",
        "step      130.000  100.0%  130.000  130.000  130.000  130.000      1",
    ]


@pytest.mark.parametrize("on_host_clock", [True, False])
def test_steps_of_zero_time_have_no_verdict(on_host_clock: bool) -> None:
    results = Results(10, 0, on_host_clock=on_host_clock)
    results.add([raw(0, data=0.0, forward=0.0)])
    summary = summary_of(results)
    assert (summary.verdict, summary.advice, summary.time_breakdown) == ("", (), None)
    assert "nan" not in str(summary)


def test_notebook_and_rich_show_the_table() -> None:
    summary = with_facts(
        summarize(raw(0, 1.5, forward=2.0, other=0.25)), host_paced={"forward": 0.0}
    )
    html = summary._repr_html_()
    assert html.count("<tr>") == 4 + 4  # Lines of the time breakdown, and of the phases.
    left, right = "text-align:left", "text-align:right"
    assert f'<td style="{left}">forward</td><td style="{right}">2.000</td>' in html
    assert f'<th style="{left}">step</th><th style="{right}">2.250</th>' in html
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary)
    text = console.export_text()
    assert "forward" in text
    assert "GPU-bound" in html
    assert "GPU-bound" in text


def test_observer_sections_are_printed_and_saved(tmp_path: Path) -> None:
    results = filled(raw(0, forward=1.0))
    assert "sections" not in summary_of(results).to_dict()
    section = Section("energy", ("3 J a step",), {"joules": 3.0})
    summary = with_facts(summary_of(results), sections=(section,))
    assert str(summary).endswith("\n\n3 J a step")
    assert "<p>3 J a step</p>" in summary._repr_html_()
    saved.save(Run(Environment(), *results.history_and_warmup(), summary), tmp_path / "run.json")
    assert load(tmp_path / "run.json").summary().measurement.sections == (section,)


# Results of a timer


def test_pandas_accepts_the_history_and_a_failed_save_keeps_it(loop: Loop, tmp_path: Path) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(4))):
            if number == 2:
                with timer.phase("augment"):
                    loop.gpu.work(3.0)
            loop.train(x)
    with pytest.raises(FileNotFoundError, match=r"Cannot write .*"):
        timer.save(tmp_path / "missing" / "file")
    frame = pandas.DataFrame(timer.history()).set_index("step")
    assert frame.index.tolist() == [0, 1, 2, 3]
    assert frame["backward_ms"].tolist() == [8.0] * 4
    assert frame["augment_ms"].isna().tolist() == [True, True, False, True]


@pytest.mark.parametrize("bad_ms", [math.nan, math.inf, -math.inf])
def test_times_that_are_not_finite_are_null_in_json(bad_ms: float) -> None:
    step = raw(0, data=1.0, forward=2.0, backward=3.0)
    broken = step._replace(device_ms=(1.0, bad_ms, 3.0))
    results = Results(10, warmup_steps=0)
    results.add([broken, broken, step._replace(host_ns=[ns + 10**9 for ns in step.host_ns])])
    json.dumps(summary_of(results).to_dict(), allow_nan=False)


def test_pause_inside_a_step_has_no_phase_in_its_timeline(loop: Loop) -> None:
    newest: list[StepTimes] = []
    with hooks(loop, accumulate_grad_batches=2, observers=[newest.append]) as timer:
        for number, x in enumerate(timer.steps(loop.batches(2))):
            loop.micro_batch(x)
            if number == 0:
                timer._session.batch_ends()
                timer._session.recorder.pause()
                loop.gpu.work(50.0)
                timer._session.recorder.resume()
        loop.update()
    [line] = [step.timeline for step in newest if step.timeline]
    intervals = zip(line.names, line.device_ms, strict=True)
    assert [ms for names, ms in intervals if not names] == [50.0]
