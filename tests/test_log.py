"""Means of the steps since the last log, and their numbers."""

from collections.abc import Sequence
from typing import Any

import fake_loop
import pytest
from fake_gpu import raw

from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._output.loggers import LogWriter, MeanLog
from lightning_gputime._phases import StepRecord


class Logger(fake_loop.Logger):
    def logged(self, name: str = "forward_ms") -> list[tuple[int, float]]:
        """Return the step number of each log, and its value of a metric."""
        return [(step, metrics[f"p/{name}"]) for step, metrics in self.calls]


@pytest.fixture
def logger() -> Logger:
    return Logger()


def mean_log(every_n_steps: int, *loggers: Any, publish: Any = None) -> MeanLog:
    log = MeanLog(every_n_steps, LogWriter("p", loggers, publish))
    log.set_source(Results(10, 0), is_sampled=False, is_logged=True)
    return log


def take(log: MeanLog, *steps: StepRecord) -> bool:
    return log.take(ReadSteps(steps, warmup=0))


def add(log: MeanLog, numbers: Sequence[int]) -> None:
    """Add steps one by one, each with a forward of as many ms as its number."""
    for number in numbers:
        take(log, raw(number, forward=float(number)))


@pytest.mark.parametrize(
    ("every", "numbers", "logged"),
    [
        (2, range(4), [(1, 0.5), (3, 2.5)]),
        (50, (50, 52), [(52, 51.0)]),  # The remaining steps are logged under the newest number.
        # A number that was skipped is logged at the next step.
        (5, (101, 103, 105, 107, 109), [(105, 103.0), (109, 108.0)]),
        (0, (0,), []),
    ],
)
def test_means_since_the_last_log_are_logged_in_one_call(
    logger: Logger, every: int, numbers: Sequence[int], logged: list[tuple[int, float]]
) -> None:
    log = mean_log(every, logger)
    log.log_means()
    add(log, numbers)
    log.log_means()
    log.log_means()
    assert logger.logged() == logged


def test_absent_phase_is_neither_logged_nor_averaged_as_zero(logger: Logger) -> None:
    log = mean_log(3, logger)
    for step, phases in enumerate([{"ema": 4.0}, {"forward": 1.0}, {"ema": 6.0}]):
        take(log, raw(step, **phases))
    [(_, metrics)] = logger.calls
    assert metrics["p/ema_ms"] == 5.0
    assert metrics["p/forward_ms"] == 1.0
    assert "p/loss_ms" not in metrics


def test_logs_of_thousands_of_steps_do_not_recurse(logger: Logger) -> None:
    log = mean_log(2, logger)
    assert take(log, *[raw(step, forward=float(step)) for step in range(5001)])
    assert logger.logged() == [(step, step - 0.5) for step in range(1, 5000, 2)]
    log.log_means()
    assert logger.logged()[-1] == (5000, 5000.0)
