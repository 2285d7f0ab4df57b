"""Slow steps and their causes, with exact times on the fake GPU."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest
from fake_gpu import FakeGPU
from fake_loop import Logger, Loop, evidence, hooks
from torch import Tensor

from lightning_gputime import Cause, GPUPhaseHooks, SlowStep, _causes, phase
from lightning_gputime._measurement.slow import SlowEvidence, SlowLog

STEPS, SLOW = 60, 40  # Number of steps, and the slow step.
LEAD_MS = 15.625
"""The host starts a step while the device still has all of the previous step to run."""
TO_BACKWARD_MS = 5.625
"""Time of a step before its backward."""


def collect(gpu: FakeGPU, ms: float) -> None:
    """Simulate a garbage collection of some ms for the timer's callbacks."""
    callbacks = [
        callback
        for callback in gc.callbacks
        if type(getattr(callback, "__self__", None)).__module__.startswith("lightning_gputime")
    ]
    for callback in callbacks:
        callback("start", {"generation": 2})
    gpu.host_work(ms)
    for callback in callbacks:
        callback("stop", {"generation": 2})


Delays = dict[int, Callable[[], None]]


def train(
    loop: Loop, in_loss: Delays | None = None, in_fetch: Delays | None = None, **options: Any
) -> GPUPhaseHooks:
    """Train with standard steps, some of which have a delay after the model or in the fetch."""

    def fetch() -> Iterator[Tensor]:
        for number, x in enumerate(loop.batches(STEPS)):
            (in_fetch or {}).get(number, lambda: None)()
            yield x

    with hooks(loop, **options) as timer:
        for number, x in enumerate(timer.steps(fetch())):
            loop.gpu.work(0.125)
            loss = loop.loss(x)
            (in_loss or {}).get(number, lambda: None)()
            loss.backward()
            loop.update()
    return timer


def collections(loop: Loop, ms_by_step: dict[int, float]) -> Delays:
    """Return garbage collections of some ms as delays of steps."""
    return {step: partial(collect, loop.gpu, ms) for step, ms in ms_by_step.items()}


def only_slow_step(timer: GPUPhaseHooks) -> SlowStep:
    """Return the only slow step, after checking that its causes add up."""
    [slow] = timer.slow_steps()
    explained_ms = sum(cause.exposed_ms for cause in slow.causes)
    assert slow.excess_ms == pytest.approx(explained_ms + slow.unexplained_ms)
    return slow


def host_causes(slow: SlowStep) -> list[tuple[str, float, str]]:
    return [(cause.kind, cause.host_ms, cause.detail) for cause in slow.causes]


@pytest.mark.parametrize(("lag", "ahead_ms"), [(1, LEAD_MS + TO_BACKWARD_MS), (0, TO_BACKWARD_MS)])
def test_collection_delays_the_gpu_by_what_exceeds_the_lead_of_the_host(
    loop: Loop, lag: int, ahead_ms: float
) -> None:
    timer = train(loop, collections(loop, {SLOW: 40.0}), _lag=lag)
    slow = only_slow_step(timer)
    assert (slow.step, slow.phase, slow.unexplained_ms) == (SLOW, "loss", 0.0)
    assert slow.baseline_ms == 15.625
    assert slow.step_ms == 15.625 + 40.0 - ahead_ms
    assert slow.causes == (Cause("garbage_collection", 40.0, 40.0 - ahead_ms, "generation 2"),)
    # The times by phase are in the order of a step, without sub-phases.
    order = ["data", "forward", "loss", "backward", "optimizer", "other"]
    assert [*slow.phase_ms] == [*slow.host_ms] == order
    assert sum(slow.phase_ms.values()) == slow.step_ms
    assert (slow.phase_ms["loss"], slow.host_ms["loss"]) == (0.5 + 40.0 - ahead_ms, 40.0)


@pytest.mark.parametrize(
    ("step_ms", "varies_ms", "excess_ms", "is_slow"),
    [
        # Each of the three thresholds, if the other two are lower.
        (15.0, 0.0, 1.4, False),
        (15.0, 0.0, 1.6, True),  # 10 % of the median.
        (15.0, 2.0, 9.5, False),
        (15.0, 2.0, 10.5, True),  # Five times the median absolute deviation.
        (1.0, 0.0, 0.45, False),
        (1.0, 0.0, 0.55, True),  # 0.5 ms.
    ],
)
def test_step_is_slow_from_three_thresholds_on(
    loop: Loop, step_ms: float, varies_ms: float, excess_ms: float, is_slow: bool
) -> None:
    with hooks(loop) as timer:
        for number in timer.steps(range(STEPS)):
            more_ms = excess_ms if number == SLOW else varies_ms * (number % 3 - 1)
            loop.gpu.work(step_ms + more_ms)
    assert any(slow.step > 20 for slow in timer.slow_steps()) == is_slow  # Not the first.


def test_reading_events_makes_no_step_slow(loop: Loop) -> None:
    gpu, gpu.read_ms = loop.gpu, 0.1  # 17.5 ms for 25 steps
    with hooks(loop, warmup_steps=5) as timer:
        for x in timer.steps(loop.batches(120)):
            gpu.host_work(20.0)
            loop.train(x)
    assert timer.history()["step_ms"][26:].max() > 30.0
    assert len(timer.slow_steps()) == 0


def test_causes_share_the_exposed_time_without_counting_any_twice(loop: Loop) -> None:
    def both() -> None:
        collect(loop.gpu, 10.0)
        loop.gpu.host_work(30.0)

    slow = only_slow_step(train(loop, in_fetch={SLOW: both}))
    exposed_ms = 40.0 - LEAD_MS - 1.0
    assert [(cause.kind, cause.host_ms, cause.exposed_ms) for cause in slow.causes] == [
        ("dataloader", 30.0, exposed_ms * 0.75),
        ("garbage_collection", 10.0, exposed_ms * 0.25),
    ]


def test_slow_gpu_work_has_no_cause(loop: Loop) -> None:
    def delay() -> None:
        loop.gpu.work(30.0)
        collect(loop.gpu, 15.0)  # Ends while the device is still busy.

    slow = only_slow_step(train(loop, {SLOW: delay}))
    assert slow.causes == ()
    assert slow.unexplained_ms == slow.excess_ms == 30.0


def test_compilation_is_a_cause(loop: Loop) -> None:
    from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

    def recompile() -> None:
        arguments = CallbackArgs(CallbackTrigger.LAZY_BACKWARD, "0/1")
        callback_handler.run_start_callbacks(arguments)
        loop.gpu.host_work(100.0)
        callback_handler.run_end_callbacks(arguments)
        loop.gpu.host_work(20.0)  # Loading the new code.

    before = [*callback_handler.start_callbacks], [*callback_handler.end_callbacks]
    # A reset of dynamo removes the callbacks. The timer adds them again when it reads steps.
    slow = only_slow_step(train(loop, {2: callback_handler.clear, 55: recompile}))
    exposed_ms = 120.0 - LEAD_MS - TO_BACKWARD_MS
    assert slow.causes == (Cause("compilation", 120.0, exposed_ms, "of a backward graph"),)
    assert (callback_handler.start_callbacks, callback_handler.end_callbacks) == before


def test_slow_log_is_a_cause(loop: Loop) -> None:
    class Slow(Logger):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            loop.gpu.host_work(50.0)

    logger = Slow()
    slow = only_slow_step(train(loop, logger=logger, log_every_n_steps=45))
    assert host_causes(slow) == [("callback", 50.0, "the timer's logging")]
    assert slow.unexplained_ms == 0.0
    assert "log_metrics" not in vars(logger)


def test_named_phase_is_a_cause(loop: Loop) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(loop.batches(STEPS))):
            loop.train(x)
            with phase("save"):
                loop.gpu.host_work(60.0 if number == SLOW else 0.0)
    slow = only_slow_step(timer)
    assert host_causes(slow) == [("callback", 60.0, "phase save")]
    assert (slow.phase, slow.unexplained_ms) == ("save", 0.0)


def test_steps_after_the_warm_up_can_be_slow(loop: Loop) -> None:
    timer = train(loop, collections(loop, {2: 100.0, 6: 100.0}), warmup_steps=5)
    assert [slow.step for slow in timer.slow_steps()] == [6]


def test_baseline_follows_a_lasting_change_of_the_step_time(loop: Loop) -> None:
    longer = {number: lambda: loop.gpu.work(10.0) for number in range(20, STEPS)}
    found = [slow.step for slow in train(loop, longer).slow_steps(100)]
    # At the reading of the 50th step, the median includes 30 longer steps and 20 others.
    assert sorted(found) == [*range(20, 50)]


def test_slowest_steps_come_first_and_print_as_sentences(loop: Loop) -> None:
    timer = train(loop, collections(loop, {20: 40.0, 30: 80.0}))
    assert [str(slow) for slow in timer.slow_steps()] == [
        "step 30 took 74.4 ms (baseline 15.6 ms), +58.8 ms: 58.8 ms garbage collection"
        " (generation 2); most of it in `loss`",
        "step 20 took 34.4 ms (baseline 15.6 ms), +18.8 ms: 18.8 ms garbage collection"
        " (generation 2); most of it in `loss`",
    ]
    assert [slow.step for slow in timer.slow_steps(1)] == [30]


def test_summary_shows_the_cost_of_slow_steps_and_the_worst_step(loop: Loop) -> None:
    late = {**collections(loop, {20: 40.0}), 30: lambda: loop.gpu.host_work(80.0)}
    summary = train(loop, late).summary()
    all_ms = 60 * 15.625 + 18.75 + 58.75
    assert summary.step.mean_ms * 60 == pytest.approx(all_ms)
    assert summary.slow is not None
    assert summary.slow.share == pytest.approx(77.5 / all_ms)
    assert summary.slow.cause_shares == {"garbage collection": pytest.approx(18.75 / all_ms)}
    assert str(summary).splitlines()[-3:] == [
        "2 of 60 steps were slow, and cost 7.6 % of the time; causes: 24 % garbage collection,"
        " 76 % unexplained",
        "",
        "largest excess: step 30 took 74.4 ms (baseline 15.6 ms), +58.8 ms: 58.8 ms unexplained;"
        " most of it in `loss`",
    ]
    assert summary.to_dict()["slow"]["n"] == 2


VARY = "took longer than their baseline (step times vary"


@pytest.mark.parametrize(
    ("late", "n", "expected"),
    [
        (range(3, STEPS, 4), 15, "15 of 60 steps were slow, and cost 48 % of the time; causes: "),
        (range(2, STEPS, 3), 20, f"20 of 60 steps {VARY}"),
        (range(32, STEPS), 28, f"28 of 60 steps {VARY}"),
    ],
)
def test_long_steps_are_called_slow_up_to_a_quarter_of_all_steps(
    loop: Loop, late: range, n: int, expected: str
) -> None:
    timer = train(loop, {step: lambda: loop.gpu.host_work(80.0) for step in late})
    assert expected in str(timer.summary())
    # Even if they are not called slow, the steps are listed.
    assert "largest excess: step" in str(timer.summary())
    assert len(timer.slow_steps(STEPS)) == n


def test_excess_is_logged_in_total_and_by_cause(loop: Loop) -> None:
    logger = Logger()
    late = {**collections(loop, {25: 40.0}), 33: lambda: loop.gpu.host_work(40.0)}
    train(loop, late, logger=logger, log="all", log_every_n_steps=20)
    logged = [{key: ms for key, ms in row.items() if "slow" in key} for _, row in logger.calls]
    total, by_cause = "phase_time/slow_excess_ms", "phase_time/slow/garbage_collection_ms"
    assert [step for step, _ in logger.calls] == [19, 39, 59]
    assert logged == [
        {total: 0.0},
        {total: 37.5 / 20, by_cause: 18.75 / 20},
        {total: 0.0, by_cause: 0.0},
    ]


def slow_step(number: int, excess_ms: float, *causes: Cause) -> SlowStep:
    left_ms = excess_ms - sum(cause.exposed_ms for cause in causes)
    return SlowStep(number, 10.0 + excess_ms, 10.0, "loss", causes, left_ms)


def test_slow_log_bounds_its_memory_between_logs() -> None:
    log = SlowLog()
    log.follow()
    for number in range(5_000):
        causes = [Cause("garbage_collection", 2.0, 2.0, "")] if number % 2 else []
        log.add(evidence(slow_step(number, 10.0, *causes)), has_baseline=True)
    assert len(log._pending) <= 1_000
    sums = {"slow_excess": 5.0, "slow/garbage_collection": 0.5}
    assert log.metrics(4_999, 10_000, keep=True) == log.metrics(4_999, 10_000) == sums
    assert log.metrics(5_000, 10) == dict.fromkeys(sums, 0.0)


def test_slow_steps_are_explained_once_and_only_on_request(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained: list[int] = []
    explain = _causes.explain

    def counted(step: Any, *args: Any) -> SlowStep:
        explained.append(step.number)
        return explain(step, *args)

    monkeypatch.setattr(_causes, "explain", counted)
    delays = collections(loop, {n: 40.0 + n % 3 for n in range(3, STEPS, 4)})
    timer = train(loop, delays, logger=Logger(), log_every_n_steps=10)
    assert explained == []
    assert [slow.step for slow in timer.slow_steps(3)] == explained == [11, 23, 35]
    assert timer.summary().slow is not None
    assert len(timer.slow_steps(STEPS)) == 15
    assert sorted(explained) == [*range(3, STEPS, 4)]


def test_slow_log_bounds_its_evidence_on_a_noisy_host() -> None:
    log, chance, explained = SlowLog(), Random(0), []

    def explain(number: int, excess_ms: float) -> SlowStep:
        explained.append(number)
        # Two thirds of the steps have a cause, independent of their length.
        causes = [Cause("garbage_collection", excess_ms, excess_ms, "")] if number % 3 else []
        return slow_step(number, excess_ms, *causes)

    excesses_ms = [chance.expovariate(1.0) for _ in range(50_000)]
    for number, ms in enumerate(excesses_ms):
        log.add([SlowEvidence(ms, partial(explain, number, ms))], has_baseline=True)
        assert len(log._kept.steps) <= 2_000
    assert explained == []
    largest = sorted(range(50_000), key=excesses_ms.__getitem__, reverse=True)
    assert [slow.step for slow in log.slow_steps(1_000)] == largest[:1_000]
    summary = log.summary(steps=200_000, all_ms=2e6)
    assert summary is not None
    assert len(explained) == len({*explained}) <= 2_000
    assert summary.n == 50_000
    assert summary.share == pytest.approx(sum(excesses_ms) / 2e6)
    # The shares are estimates from the steps that were kept.
    shares = summary.cause_shares["garbage collection"], summary.unexplained_share
    assert sum(shares) == pytest.approx(summary.share)
    assert shares[0] / summary.share == pytest.approx(2 / 3, abs=0.05)
    # The log keeps only sums of the steps that were explained so far. Later steps are added.
    for number in range(1_000):
        log.add(evidence(explain(number, 1e3)), has_baseline=True)
    summary = log.summary(steps=204_000, all_ms=2e6)
    assert summary is not None
    assert summary.n == 51_000
    assert summary.share == pytest.approx((sum(excesses_ms) + 1e6) / 2e6)


def test_detector_that_fails_on_request_leaves_steps_without_causes(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(attribution: Any) -> None:
        raise ValueError("odd")

    with hooks(loop) as timer:
        session: Any = timer._session
        session._analyzer.collectors.append(lambda steps, baseline: fail)
        for number, x in enumerate(timer.steps(loop.batches(STEPS))):
            loop.micro_batch(x)
            if number in (SLOW, SLOW + 2):
                collect(loop.gpu, 100.0)
            loop.update()
    assert caplog.messages == []
    found = [(slow.step, slow.causes) for slow in timer.slow_steps()]
    assert sorted(found) == [(SLOW, ()), (SLOW + 2, ())]
    assert caplog.messages == ["Slow steps are no longer explained: ValueError('odd')"]


def test_failing_detector_ends_only_the_search_for_causes(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    before = [*gc.callbacks]
    with hooks(loop) as timer:
        session: Any = timer._session
        session._analyzer.collectors[0] = None
        for number, x in enumerate(timer.steps(loop.batches(STEPS))):
            loop.micro_batch(x)
            if number in (SLOW, 55):
                loop.gpu.host_work(100.0)
            loop.update()
        assert gc.callbacks == before
    assert timer.summary().steps == STEPS
    # The steps that the detector was given are lost. Later slow steps have no cause.
    assert [(slow.step, slow.causes) for slow in timer.slow_steps()] == [(55, ())]
    [message] = caplog.messages
    assert message.startswith("Slow steps are no longer explained: TypeError(")


@pytest.mark.parametrize("every", [1, 5, 20])
def test_slow_step_found_after_its_log_is_in_no_other_log(loop: Loop, every: int) -> None:
    logger = Logger()
    late = {3: lambda: loop.gpu.host_work(400.0)}
    timer = train(loop, in_fetch=late, logger=logger, log=["slow"], log_every_n_steps=every)
    excess_ms = {slow.step: slow.excess_ms for slow in timer.slow_steps()}[3]
    # The first slow steps are found after ten steps, when earlier logs are already written.
    logged = {step: metrics.get("phase_time/slow_excess_ms", 0.0) for step, metrics in logger.calls}
    assert max(logged.values()) == (pytest.approx(excess_ms / 20) if every == 20 else 0.0)
