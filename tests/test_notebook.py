"""What a notebook shows: the table and the plots, each once."""

import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from fake_gpu import FakeGPU, raw
from fake_lightning import Model, fit
from fake_loop import Loop, hooks

from lightning_gputime import GPUPhaseTimer
from lightning_gputime._results import plot
from lightning_gputime._results.results import Results
from lightning_gputime._results.table import in_notebook


@pytest.fixture(autouse=True)
def _no_figures() -> Iterator[None]:
    plt.close("all")
    yield
    plt.close("all")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes this process the kernel of a notebook; has what it displays."""
    displayed: list[Any] = []
    kernel = SimpleNamespace(session=SimpleNamespace(pid=os.getpid()))
    ipython = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=kernel),
        display=SimpleNamespace(display=displayed.append),
        kernel=kernel,
        version_info=(9, 0),
    )
    # It would ask more of the shell than the fake has.
    monkeypatch.setattr(plt, "install_repl_displayhook", lambda: None)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return displayed


def test_this_is_no_notebook() -> None:
    assert not in_notebook()


def test_a_notebook_gets_the_table_as_html_when_training_ends(
    gpu: FakeGPU, shown: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fit(gpu, Model(gpu), n=6, timer=GPUPhaseTimer(_clock=gpu, warmup_steps=1))
    [table] = shown
    assert "<table>" in table._repr_html_()
    assert "Time per step" not in capsys.readouterr().out


def test_a_process_that_was_forked_from_a_notebook_prints(
    shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_notebook()
    sys.modules["IPython"].kernel.session.pid = 1
    assert not in_notebook()


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_ipython_on_a_terminal_is_no_notebook(
    shell: Any, shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
    assert not in_notebook()
    monkeypatch.delattr(sys.modules["IPython"], "get_ipython")
    assert not in_notebook()


def test_a_timer_shows_its_summary(loop: Loop) -> None:
    with hooks(loop) as timer:
        assert "No step was timed" in timer._repr_html_()
        for x in timer.steps(loop.batches(3)):
            loop.train(x)
    text = timer._repr_html_()
    assert "<strong>" in text
    assert ">backward</td>" in text
    assert "<code>" in text


def many(steps: int, warmup: int = 5, *, on_host_clock: bool = False) -> Results:
    results = Results(10_000, warmup, on_host_clock)
    slow = {17: 100.0}
    results.add([raw(i, 1.0, forward=slow.get(i % 100, 4.0), backward=8.0) for i in range(steps)])
    return results


def test_a_plot_on_axes_of_ones_own_is_shown_by_whose_they_are(shown: list[Any]) -> None:
    figure, ax = plt.subplots()
    assert plot.plot_steps(many(20), ax) == (figure, ax)
    assert plt.get_fignums() == [figure.number]


def test_a_plot_is_shown_by_pyplot() -> None:
    figure, _ = plot.plot_steps(many(20))
    assert plt.get_fignums() == [figure.number]


def test_many_steps_are_drawn_in_bins_with_their_medians_and_a_line() -> None:
    results = many(10_000)
    begin = time.process_time()
    figure, ax = plot.plot_steps(results)
    figure.savefig(io.BytesIO(), format="png")
    took = time.process_time() - begin
    # Each vertex twice, at the two sides of its bin.
    forward = np.unique(np.asarray(ax.collections[0].get_paths()[0].vertices)[:, 0])
    assert len(forward) <= 203
    assert (forward.min(), forward.max()) == (0, 10_000)
    heights = np.asarray(ax.collections[0].get_paths()[0].vertices)[:, 1]
    assert {*heights} == {0.0, 4.0}
    [line] = ax.lines
    assert {*np.asarray(line.get_ydata())} == {12.0}
    assert ax.get_title() == "Median phases of 50 steps each"
    legend = ax.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        "warm-up", "step, 95th\npercentile", "backward", "forward",
    ]  # fmt: skip
    assert took < 5  # Of a processor, which is about half a second.


@pytest.mark.parametrize(("steps", "warmup", "end"), [(20, 5, 5), (20, 50, 20), (600, 7, 7)])
def test_the_warm_up_is_shaded_and_shares_no_bin(steps: int, warmup: int, end: int) -> None:
    _, ax = plot.plot_steps(many(steps, warmup))
    [shade] = ax.patches
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == (0, end)
    edges = np.unique(np.asarray(ax.collections[0].get_paths()[0].vertices)[:, 0])
    assert end in edges


def test_without_a_gpu_no_lane_is_called_so(loop: Loop) -> None:
    results = many(3, on_host_clock=True)
    step = results.newest()[1]
    assert step.timeline is not None
    _, ax = plot.plot_step(results, 1)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["CPU", "host"]


def test_a_real_notebook_shows_each_once(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    root = Path(__file__).parent
    cells = [
        f"import sys; sys.path[:0] = [{str(root)!r}, {str(root.parent)!r}]\n"
        "from fake_gpu import FakeGPU\nfrom fake_lightning import Model, fit\n"
        "from lightning_gputime import GPUPhaseTimer\ngpu = FakeGPU()",
        "timer = fit(gpu, Model(gpu), n=9, timer=GPUPhaseTimer(_clock=gpu))",
        "timer",
        "figure, axes = timer.plot()",
        "figure, axes = timer.plot(step=6)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3")
    client.execute(cwd=str(tmp_path))
    kinds = [
        [
            next(iter({"text/html", "image/png"} & {*output["data"]}), "")
            for output in cell.outputs
            if "data" in output
        ]
        for cell in notebook.cells
    ]
    assert kinds == [[], ["text/html"], ["text/html"], ["image/png"], ["image/png"]]
