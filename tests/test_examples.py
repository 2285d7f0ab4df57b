"""The examples and the notebooks, run on the CPU."""

import csv
import json
import re
import runpy
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import notebook_run
import pytest
from fake_gpu import STEP_MS
from fake_loop import Loop, train
from matplotlib.figure import Figure
from processes import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_gputime import StepTimes, load

EXAMPLES = Path(__file__).parent.parent / "examples"
PHASES = ("data", "forward", "loss", "backward", "optimizer", "other")
NOTEBOOKS = ("where_does_my_step_go.ipynb", "plain_loop.ipynb")
NOTEBOOK_RUN = Path(__file__).parent / "notebook_run.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a script and returns its names."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: runpy.run_path(str(EXAMPLES / name))


@pytest.fixture
def example(script: Any) -> Any:
    """Return a function that runs the `main` of a script."""
    return lambda name, **options: script(name)["main"](**options)


def all_steps(timer: Any) -> int:
    """Return the number of all steps, timed or not."""
    measured = timer.summary().measurement
    return int(measured.warmup_steps + measured.steps + measured.untimed_steps)


def test_quickstart_example_logs_to_csv_and_tensorboard(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timer = example("quickstart.py", max_epochs=2, log_dir=str(tmp_path))
    assert all_steps(timer) == 48
    # The table was printed before the time of the fit was complete.
    breakdown, title, printed = str(timer.summary()).partition("Time per step")
    assert "Time breakdown of the fit" in breakdown
    assert f"{title}{printed}" in capsys.readouterr().out
    phases = (*PHASES, "callbacks")
    keys = [f"phase_time/{name}_ms" for name in (*phases, "step")]

    [path] = tmp_path.glob("csv/*/metrics.csv")
    rows = [row for row in csv.DictReader(path.read_text().splitlines()) if row[keys[0]]]
    assert [int(row["step"]) for row in rows] == [9, 19, 29, 39, 47]
    for row in rows:
        total = sum(float(row[f"phase_time/{name}_ms"]) for name in phases)
        assert total == pytest.approx(float(row["phase_time/step_ms"]), abs=0.008)

    [directory] = tmp_path.glob("tensorboard/*")
    events = EventAccumulator(str(directory))
    events.Reload()
    for key in (*keys, "phase_time_host/host_wait_ms"):
        assert [event.step for event in events.Scalars(key)] == [9, 19, 29, 39, 47]


@pytest.mark.parametrize(
    ("name", "options", "package", "n"),
    [
        ("plain_pytorch.py", {"max_epochs": 1}, "torch", 29),
        ("ignite_loop.py", {"max_epochs": 2}, "ignite", 32),
        ("huggingface.py", {"max_steps": 8}, "transformers", 8),
    ],
)
def test_example_times_every_phase(
    name: str,
    options: dict[str, int],
    package: str,
    n: int,
    example: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    timer = example(name, **options)
    assert all_steps(timer) == n
    rows = {row for row in timer.summary().rows if "/" not in row}
    assert rows - {"callbacks"} == {*PHASES}
    assert (timer.history()["backward_ms"] > 0).all()
    assert timer.summary().skipped_updates == 0
    assert str(timer.summary()) in capsys.readouterr().out


def test_custom_output_example_adds_a_line_and_a_metric(
    example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    timer = example("own_output.py", steps=30)
    longest = max(timer.history(), key=lambda step: step["step_ms"])
    line = f"longest: step {longest['step']}, {longest['step_ms']:.2f} ms"
    assert line in capsys.readouterr().out.splitlines()


def test_opentelemetry_example_exports_steps_as_spans(example: Any) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace import TracerProvider

    exporter, provider = memory.InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    timer = example("opentelemetry_spans.py", provider=provider, steps=30)
    spans = exporter.get_finished_spans()
    step_spans = [span for span in spans if span.parent is None]
    assert [span.name for span in step_spans] == [f"step {number}" for number in range(30)]
    names: dict[int, set[str]] = {span.context.span_id: set() for span in step_spans}
    for span in spans:
        if span.parent is not None:
            names[span.parent.span_id].add(span.name)
    assert [*names.values()] == [{*PHASES}] * 30
    spans_ms = [(span.end_time - span.start_time) / 1e6 for span in step_spans]
    assert spans_ms == pytest.approx(timer.history()["step_ms"].tolist(), abs=1e-4)


def test_server_example_serves_the_newest_step(script: Any) -> None:
    answers: list[dict[str, float]] = []
    names = script("serve_summary.py")
    server: Any = names["Server"](port=0)
    take = server.on_step

    def take_and_request(times: StepTimes) -> None:
        take(times)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}") as response:
            answers.append(json.loads(response.read()))

    server.on_step = take_and_request
    timer = names["main"](server, steps=50)
    newest = timer.history()[-1]
    assert answers[-1]["step"] == 49
    assert answers[-1]["step_ms"] == pytest.approx(newest["step_ms"])
    assert {*PHASES} <= {*answers[-1]}


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebook_contains_the_outputs_of_one_run(notebook: str) -> None:
    cells = json.loads((EXAMPLES / notebook).read_text())["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == [*range(1, len(counts) + 1)]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    kinds = {kind for output in outputs for kind in output.get("data", ())}
    assert {"text/html", "text/plain"} <= kinds
    assert "error" not in {output["output_type"] for output in outputs}


@pytest.mark.slow
def test_notebook_finds_slow_data_and_compares_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook_run.main(str(EXAMPLES / NOTEBOOKS[0]))
    printed = capsys.readouterr().out
    assert printed.startswith("input-bound: ")
    # The second on a machine that other processes keep busy.
    advice = r"set num_workers=\d+ \(now 0\), or make it faster|make it faster: workers would need"
    assert re.search(rf"per step: ({advice})", printed, re.M)
    assert re.search(r"data \(data/fetch\) [\d.]+ ± [\d.]+ ms faster", printed)


@pytest.mark.slow
def test_notebook_of_a_plain_loop_shows_why_steps_were_slow(tmp_path: Path) -> None:
    # In a new process, because the tests exclude most objects from garbage collections.
    printed = run(NOTEBOOK_RUN, EXAMPLES / NOTEBOOKS[1], cwd=tmp_path)
    assert re.search(r"^augment: [\d.]+ ms, 95th percentile [\d.]+ ms$", printed, re.M)
    table, _, slow_steps = printed.partition("the longest step is ")
    assert "\naugment " in table
    slow = re.findall(r"^step (\d+) took (.*)", slow_steps, re.M)[:3]
    assert len({number for number, _ in slow} & {"39", "79", "119", "159", "199"}) == 3
    assert all("garbage collection (generation 2)" in text for _, text in slow)


def test_pictures_script_saves_its_run(tmp_path: Path, script: Any) -> None:
    timer = script("pictures.py")["measure"](str(tmp_path), steps=12, width=2)
    run = load(tmp_path / "run.json.gz")
    assert str(run.summary()) == str(timer.summary())
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"run.json.gz", "steps.png", "step.png"}


def test_plot_shows_all_steps_and_the_lanes_of_the_last(loop: Loop, script: Any) -> None:
    names, timer = script("plot_phases.py"), train(loop, 4)
    all_steps, last_step = (Figure().add_subplot() for _ in range(2))
    assert names["plot_steps"](timer.history(), all_steps) is all_steps.figure
    legend = all_steps.get_legend_handles_labels()[1][::-1]
    assert legend == ["other", "optimizer", "backward", "loss", "forward", "data"]
    names["plot_step"](timer.last_step, last_step)
    assert [label.get_text() for label in last_step.get_yticklabels()] == ["GPU", "host"]
    bars: Any = last_step.patches
    gpu_lane = [bar.get_width() for bar in bars if bar.get_y() < 0]
    assert sorted(filter(None, gpu_lane)) == sorted(STEP_MS.values())


def test_perfetto_example_has_both_lanes_of_each_step(example: Any, tmp_path: Path) -> None:
    timer = example("perfetto_trace.py", path=str(tmp_path / "trace.json"), steps=60)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["GPU", "host"]
    for lane in (1, 2):
        slices = [event for event in events if event["ph"] == "X" and event["pid"] == lane]
        steps = [(s["ts"], s["ts"] + s["dur"]) for s in slices if "step " in s["name"]]
        assert len(steps) == 50  # Only the newest steps.
        assert all(step[1] <= following[0] for step, following in pairwise(steps))
        for name in PHASES:
            starts = [event["ts"] for event in slices if event["name"] == name]
            assert starts
            assert all(any(a <= start <= b for a, b in steps) for start in starts)
    backwards = [event for event in events if event["name"] == "backward"]
    gpu_us = [event["dur"] for event in backwards if event["pid"] == 1]
    assert sum(gpu_us) == pytest.approx(1e3 * timer.history()["backward_ms"][10:].sum(), rel=0.01)


def test_trace_example_keeps_traces_of_slow_steps(example: Any, tmp_path: Path) -> None:
    traces = example("trace_slow_steps.py", folder=str(tmp_path))
    assert 1 <= len(traces.kept) <= 3
    assert {*tmp_path.iterdir()} == {*traces.kept}
    for path in traces.kept:
        names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
        assert {f"ProfilerStep#{n}" for n in range(1, 31)} <= {*names}
        assert "aten::_linalg_svd" in names


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_tutorial_makes_one_change_after_another(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    example("tutorial.py", all_of_them=True, path=str(path), steps=12, width=2)
    results = json.loads(path.read_text())
    names = ["workers", "rare_checks", "large_batch", "bf16"]
    assert [result["changes"] for result in results] == [names[:n] for n in range(5)]
    assert [result["batch"] for result in results] == [32, 32, 32, 512, 512]
    assert [result["workers"] > 0 for result in results] == [False, True, True, True, True]
    # At first the callback checks in each step, then in 1 of 50.
    checks = [result["share"]["callbacks/AccuracyCurve.on_train_batch_end"] for result in results]
    assert checks[1] > 2 * checks[2] > 0
    printed = capsys.readouterr().out.splitlines()[-5:]
    assert all(result["verdict"] in line for result, line in zip(results, printed, strict=True))


def test_evaluation_example_logs_all_loops(example: Any, tmp_path: Path) -> None:
    metrics = example("evaluation.py", max_epochs=1, log_dir=str(tmp_path))
    for stage in ("", "val/", "test/"):
        assert metrics[f"phase_time/{stage}forward_ms"] > 0


@pytest.mark.filterwarnings("ignore")  # Ray warns.
def test_ray_example_times_its_workers(example: Any, tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch")
    metrics = example("ray_train.py", max_epochs=2, storage=str(tmp_path))
    assert all(metrics[f"phase_time/{name}_ms"] > 0 for name in PHASES)
    [saved] = tmp_path.rglob("run.json.gz")
    assert saved.stat().st_size


def test_prometheus_dashboard_queries_only_exported_metrics(example: Any) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    timer = example("prometheus_metrics.py", registry=registry, steps=30)
    served = client.generate_latest(registry).decode()
    rows = timer.summary().rows
    seconds = registry.get_sample_value("gputime_phase_seconds_total", {"phase": "backward"})
    assert seconds >= 0.9 * rows["backward"].n * rows["backward"].mean_ms / 1e3
    assert registry.get_sample_value("gputime_steps_total") == 30
    dashboard = json.loads((EXAMPLES / "grafana_dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"gputime_\w+", query)}
    assert named == {name for name in named if f"# TYPE {name} counter" in served}
    assert len(named) == 4
