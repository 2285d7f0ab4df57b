"""The table in a notebook."""

import os
import sys
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


def test_pytest_is_not_a_notebook() -> None:
    assert not in_notebook()


def test_notebook_shows_the_table_as_html_when_training_ends(
    gpu: FakeGPU, shown: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fit(gpu, Model(gpu), n=6, timer=GPUPhaseTimer(_clock=gpu, warmup_steps=1))
    [table] = shown
    assert "<table>" in table._repr_html_()
    assert "Time per step" not in capsys.readouterr().out


def test_fork_of_a_notebook_is_no_notebook(
    shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_notebook()
    sys.modules["IPython"].kernel.session.pid = 1
    assert not in_notebook()


@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_ipython_on_a_terminal_is_not_a_notebook(
    shell: Any, shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
    assert not in_notebook()
    monkeypatch.delattr(sys.modules["IPython"], "get_ipython")
    assert not in_notebook()


def test_timer_shows_its_summary_as_html(loop: Loop) -> None:
    with hooks(loop) as timer:
        assert "No step was timed" in timer._repr_html_()
        for x in timer.steps(loop.batches(3)):
            loop.train(x)
    text = timer._repr_html_()
    assert "<strong>" in text
    assert ">backward</td>" in text
    assert "<code>" in text
