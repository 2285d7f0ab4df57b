"""The table in a notebook."""

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import FakeGPU
from fake_lightning import Model, fit
from fake_loop import Loop, hooks

from lightning_gputime import GPUPhaseTimer
from lightning_gputime._output.table import in_notebook


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make this process the kernel of a notebook, and return the objects that it displays."""
    displayed: list[Any] = []
    kernel = SimpleNamespace(session=SimpleNamespace(pid=os.getpid()))
    ipython = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=kernel),
        display=SimpleNamespace(display=displayed.append),
        kernel=kernel,
        version_info=(9, 0),
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return displayed


def test_notebook_shows_the_table_as_html_when_training_ends(
    gpu: FakeGPU, shown: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fit(gpu, Model(gpu), n=6, timer=GPUPhaseTimer(_clock=gpu, warmup_steps=1))
    [table] = shown
    assert "<table>" in table._repr_html_()
    assert "Time per step" not in capsys.readouterr().out


def leave_the_process(ipython: Any) -> None:
    ipython.kernel.session.pid = 1


def run_on_a_terminal(ipython: Any) -> None:
    ipython.get_ipython = SimpleNamespace


def run_outside_of_a_shell(ipython: Any) -> None:
    ipython.get_ipython = lambda: None


def remove_the_shell(ipython: Any) -> None:
    del ipython.get_ipython


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(
    "change", [leave_the_process, run_on_a_terminal, run_outside_of_a_shell, remove_the_shell]
)
def test_fork_or_terminal_is_not_a_notebook(change: Callable[[Any], None]) -> None:
    assert in_notebook()
    change(sys.modules["IPython"])
    assert not in_notebook()


def test_timer_without_steps_shows_why_as_html(loop: Loop) -> None:
    with hooks(loop) as timer:
        assert "No step was timed" in timer._repr_html_()
