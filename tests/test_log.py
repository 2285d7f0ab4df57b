from collections.abc import Mapping
from typing import Any

import pytest
from fake_gpu import raw

from lightning_gputime._measurement.means import MeanLog
from lightning_gputime._output.loggers import LogWriter


class Logger:
    def __init__(self, group_separator: str | None = None) -> None:
        self.calls: list[tuple[int, dict[str, float]]] = []
        if group_separator is not None:
            self.group_separator = group_separator

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append((step, metrics))


def test_the_mean_since_the_last_log_is_logged_every_n_steps_in_one_call() -> None:
    logger = Logger()
    log = MeanLog(2, LogWriter("phase_time", [logger]))
    for step in range(4):
        log.add([raw(step, 1.0, forward=float(step), backward=2.0)])
    assert logger.calls == [
        (
            step,
            {
                "phase_time/forward_ms": step - 0.5,
                "phase_time/backward_ms": 2.0,
                "phase_time/step_ms": step + 1.5,
                "phase_time/host_wait_ms": 1.0,
            },
        )
        for step in (1, 3)
    ]


def test_phase_that_did_not_run_is_not_logged_and_not_averaged_as_zero() -> None:
    logger = Logger()
    log = MeanLog(3, LogWriter("p", [logger]))
    for step, phases in enumerate([{"ema": 4.0}, {"forward": 1.0}, {"ema": 6.0}]):
        log.add([raw(step, **phases)])
    [(_, metrics)] = logger.calls
    assert metrics["p/ema_ms"] == 5.0
    assert metrics["p/forward_ms"] == 1.0
    assert "p/loss_ms" not in metrics


def test_remaining_steps_are_logged_under_the_newest_number() -> None:
    logger = Logger()
    log = MeanLog(50, LogWriter("p", [logger]))
    log.log_means()
    assert logger.calls == []
    log.add([raw(50, forward=1.0)])
    log.add([raw(51, forward=3.0)])
    log.log_means()
    log.log_means()
    assert [(step, metrics["p/forward_ms"]) for step, metrics in logger.calls] == [(51, 2.0)]


def test_skipped_log_number_is_logged_at_the_next_step() -> None:
    logger = Logger()
    log = MeanLog(5, LogWriter("p", [logger]))
    for step in (101, 103, 105, 107, 109, 111):
        log.add([raw(step, forward=1.0)])
    assert [step for step, _ in logger.calls] == [105, 109]


def test_every_logger_gets_its_own_separator_and_publish_the_slash() -> None:
    slash, dash, published = Logger(), Logger("-"), dict[str, float]()

    def publish(metrics: Mapping[str, float]) -> None:
        published.update(metrics)

    MeanLog(1, LogWriter("p", [slash, dash], publish)).add([raw(0, forward=1.0)])
    assert "p/forward_ms" in slash.calls[0][1]
    assert "p-forward_ms" in dash.calls[0][1]
    assert "p/forward_ms" in published


def test_log_every_zero_steps_logs_nothing() -> None:
    logger = Logger()
    log = MeanLog(0, LogWriter("p", [logger]))
    log.add([raw(0, forward=1.0)])
    log.log_means()
    assert logger.calls == []


def test_failing_logger_warns_once_and_training_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(Logger):
        def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
            raise OSError("disk full")

    other = Logger()
    log = MeanLog(1, LogWriter("p", [Full(), other]))
    for step in range(3):
        log.add([raw(step, forward=1.0)])
    assert [step for step, _ in other.calls] == [0, 1, 2]
    assert [record.message for record in caplog.records] == [
        "Cannot log phase times: OSError('disk full')"
    ]


def test_batch_may_hold_more_logs_than_the_recursion_limit() -> None:
    logger = Logger()
    log = MeanLog(2, LogWriter("p", [logger]))
    assert log.add([raw(step, forward=float(step)) for step in range(5001)])
    assert [(step, metrics["p/forward_ms"]) for step, metrics in logger.calls] == [
        (step, step - 0.5) for step in range(1, 5000, 2)
    ]
    log.log_means()
    assert logger.calls[-1][1]["p/forward_ms"] == 5000.0
