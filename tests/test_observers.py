"""Observers of users: calls are made as documented, and their errors do not end the timing."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from fake_loop import Logger, Loop, hooks
from fake_loop import train as train_loop

from lightning_gputime import StepTimes

CALLS = {"attach": 1, "on_step": 60, "on_slow_step": 1, "metrics": 2, "summary": 1, "remove": 1}
"""Number of calls of each method of an observer in `train`."""


class Recording:
    """Records the name of each method that is called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def attach(self) -> None:
        self.called.append("attach")

    def on_step(self, times: StepTimes) -> None:
        self.called.append("on_step")

    def on_slow_step(self, step: object) -> None:
        self.called.append("on_slow_step")

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        self.called.append("metrics")
        return {"recorded": 1.0}

    def summary(self) -> str:
        self.called.append("summary")
        return "recorded"

    def remove(self) -> None:
        self.called.append("remove")


def train(loop: Loop, observer: Recording) -> tuple[list[dict[str, float]], str]:
    """Train for 60 steps, one of them slow, and return the two logs and the summary."""
    logger = Logger()
    with hooks(loop, observers=[observer], logger=logger, log_every_n_steps=30) as timer:
        for number, x in enumerate(timer.steps(loop.batches(60))):
            loop.train(x)
            loop.gpu.work(20.0 * (number == 40))
    return [metrics for _, metrics in logger.calls], str(timer.summary())


def test_observer_methods_are_called_as_documented(loop: Loop) -> None:
    observer = Recording()
    logs, summary = train(loop, observer)
    assert Counter(observer.called) == CALLS
    assert [metrics["phase_time/recorded"] for metrics in logs] == [1.0, 1.0]
    assert "recorded" in summary.splitlines()


@pytest.mark.parametrize("every", [2, 5, 50])
def test_observer_metrics_include_the_newest_step_of_each_log(loop: Loop, every: int) -> None:
    class Newest:
        def on_step(self, times: StepTimes) -> None:
            self.number = times.step

        def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
            return {"newest": self.number}

    logger = Logger()
    train_loop(loop, 100, logger=logger, observers=[Newest()], log_every_n_steps=every)
    newest = [(step, metrics["phase_time/newest"]) for step, metrics in logger.calls]
    assert newest == [(step, step) for step in range(every - 1, 100, every)]


def fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("name", "method", "warning"),
    [
        *((name, fail, "ZeroDivisionError") for name in CALLS),
        ("metrics", lambda *_: None, ""),
        ("summary", lambda *_: None, ""),
        ("metrics", lambda *_: 3, "Recording.metrics() failed: TypeError"),
        (
            "summary",
            lambda *_: 3,
            "Recording.summary() failed: TypeError('return a str, a Section or None, not 3')",
        ),
    ],
)
def test_failing_observer_warns_and_changes_no_log(
    loop: Loop,
    name: str,
    method: Any,
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Recording, name, method)
    logs, summary = train(loop, Recording())
    assert [metrics["phase_time/step_ms"] for metrics in logs] == [15.625, 15.625 + 20.0 / 30]
    assert ("phase_time/recorded" in logs[0]) is (name != "metrics")
    assert ("recorded" in summary.splitlines()) is (name != "summary")
    assert warning in caplog.text
    assert bool(warning) is bool(caplog.records)
    assert (name if method is not fail else "fail") in caplog.text or not warning
