"""Observers of a user's own: they are told what is promised, and their errors stay theirs."""

from typing import Any

import pytest
from fake_loop import Logger, Loop, hooks


class Notes:
    """Notes what it is told, and raises in one of its methods."""

    def __init__(self, fails_in: str = "") -> None:
        self.told: list[str] = []
        self.fails_in = fails_in

    def _note(self, name: str) -> None:
        self.told.append(name)
        if name == self.fails_in:
            raise ZeroDivisionError

    def attach(self) -> None:
        self._note("attach")

    def step_ends(self, now_ns: int) -> None:
        self._note("step_ends")

    def steps_read(self, steps: Any) -> None:
        self._note("steps_read")

    def metrics(self, newest: int, *, keep: bool) -> dict[str, float]:
        self._note("metrics")
        return {"noted": 1.0}

    def summary(self) -> str:
        self._note("summary")
        return "noted"

    def remove(self) -> None:
        self._note("remove")


METHODS = ["attach", "step_ends", "steps_read", "metrics", "summary", "remove"]


def train(loop: Loop, notes: Notes) -> tuple[list[dict[str, float]], str]:
    logger = Logger()
    with hooks(loop, observers=[notes], logger=logger, log_every_n_steps=2) as timer:
        for x in timer.steps(loop.batches(4)):
            loop.train(x)
    return [metrics for _, metrics in logger.calls], str(timer.summary())


def test_an_observer_is_told_all_that_is_promised(loop: Loop) -> None:
    notes = Notes()
    logs, summary = train(loop, notes)
    assert {*notes.told} == {*METHODS}
    assert [notes.told.count(name) for name in ("attach", "step_ends", "remove")] == [1, 4, 1]
    assert [metrics["phase_time/noted"] for metrics in logs] == [1.0, 1.0]
    assert "noted" in summary.splitlines()


@pytest.mark.parametrize("every", [2, 5, 50])
def test_a_log_has_an_observers_metrics_of_the_same_steps(loop: Loop, every: int) -> None:
    class Newest:
        """Logs the number of the last step that it was given."""

        number = -1

        def steps_read(self, steps: Any) -> None:
            self.number = [*steps][-1].number

        def metrics(self, newest: int, *, keep: bool) -> dict[str, float]:
            return {"behind": newest - self.number}

    logger = Logger()
    options: dict[str, Any] = {"observers": [Newest()], "log_every_n_steps": every}
    with hooks(loop, logger=logger, **options) as timer:
        for x in timer.steps(loop.batches(100)):
            loop.train(x)
    behind = [metrics["phase_time/behind"] for _, metrics in logger.calls]
    assert len(behind) == 100 // every
    assert {*behind} == {0.0}


@pytest.mark.parametrize("name", METHODS)
def test_an_observer_that_raises_costs_nobody_else_anything(
    loop: Loop, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    logs, _ = train(loop, Notes(fails_in=name))
    assert [metrics["phase_time/step_ms"] for metrics in logs] == [15.625, 15.625]
    assert "ZeroDivisionError" in caplog.text
    assert f"Notes.{name}" in caplog.text
