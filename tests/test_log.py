"""Means of the steps since the last log, and their numbers."""

from collections.abc import Sequence
from typing import Any

import fake_loop
import pytest
from fake_gpu import raw

from lightning_gputime._measurement.means import MeanLog
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._output.loggers import LogWriter
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
    log.connect(Results(10, 0), is_sampled=False, is_logged=True)
    return log


def take(log: MeanLog, *steps: StepRecord) -> bool:
    return log.take(ReadSteps(steps, warmup=0))


def add(log: MeanLog, numbers: Sequence[int]) -> None:
    """Add steps one by one, each with a forward of as many ms as its number."""
    for number in numbers:
        take(log, raw(number, forward=float(number)))


def test_means_since_the_last_log_are_logged_in_one_call(logger: Logger) -> None:
    log = mean_log(2, logger)
    for step in range(4):
        take(log, raw(step, 1.0, forward=float(step), backward=2.0))
    means = {"p/backward_ms": 2.0, "p/host_wait_ms": 1.0}
    assert logger.calls == [
        (step, {**means, "p/forward_ms": step - 0.5, "p/step_ms": step + 1.5}) for step in (1, 3)
    ]


def test_absent_phase_is_neither_logged_nor_averaged_as_zero(logger: Logger) -> None:
    log = mean_log(3, logger)
    for step, phases in enumerate([{"ema": 4.0}, {"forward": 1.0}, {"ema": 6.0}]):
        take(log, raw(step, **phases))
    [(_, metrics)] = logger.calls
    assert metrics["p/ema_ms"] == 5.0
    assert metrics["p/forward_ms"] == 1.0
    assert "p/loss_ms" not in metrics


def test_remaining_steps_are_logged_under_the_newest_number(logger: Logger) -> None:
    log = mean_log(50, logger)
    log.log_means()
    assert logger.calls == []
    add(log, (50, 52))
    log.log_means()
    log.log_means()
    assert logger.logged() == [(52, 51.0)]


def test_skipped_log_number_is_logged_at_the_next_step(logger: Logger) -> None:
    add(mean_log(5, logger), (101, 103, 105, 107, 109, 111))
    assert logger.logged() == [(105, 103.0), (109, 108.0)]


def test_log_every_zero_steps_logs_nothing(logger: Logger) -> None:
    log = mean_log(0, logger)
    add(log, (0,))
    log.log_means()
    assert logger.calls == []


def test_failing_logger_warns_once_and_training_continues(
    logger: Logger, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Logger):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            raise OSError("disk full")

    add(mean_log(1, Full(), logger), range(3))
    assert [step for step, _ in logger.calls] == [0, 1, 2]
    assert caplog.messages == ["Cannot log phase times: OSError('disk full')"]


def test_logs_of_thousands_of_steps_do_not_recurse(logger: Logger) -> None:
    log = mean_log(2, logger)
    assert take(log, *[raw(step, forward=float(step)) for step in range(5001)])
    assert logger.logged() == [(step, step - 0.5) for step in range(1, 5000, 2)]
    log.log_means()
    assert logger.logged()[-1] == (5000, 5000.0)
