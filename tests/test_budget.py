"""`max_overhead`: no more steps are timed than the host can afford."""

import json
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import Adder, FakeEvent, FakeGPU, Layer
from fake_lightning import Model, fit
from fake_loop import Logger, Loop
from processes import finish, start
from torch import nn
from torch._C._distributed_c10d import HashStore

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._run import agreement, budget
from lightning_gputime._run.agreement import Agreement
from lightning_gputime._run.schedule import Schedule


class DearGPU(FakeGPU):
    """A fake GPU whose events cost the host a known time to record."""

    def __init__(self, record_us: float) -> None:
        super().__init__()
        self.record_ns = round(record_us * 1000)

    def event(self) -> FakeEvent:
        event = DearEvent(self)
        self.created += 1
        return event


class DearEvent(FakeEvent):
    def record(self) -> None:
        assert isinstance(self._gpu, DearGPU)
        self._gpu.now += self._gpu.record_ns
        super().record()


def train(
    gpu: FakeGPU, n: int, *, host_ms: float = 10.0, device_ms: float = 0.0, **options: Any
) -> GPUPhaseHooks:
    """Trains a loop whose steps take the host and the device known times."""
    model, x = Layer(gpu, 0.0), Loop(gpu)
    optimizer = Adder(model.parameters(), gpu, 0.0)
    timer = GPUPhaseHooks(model, optimizer, clock=gpu, warmup_steps=0, **options)
    every = options.get("accumulate_grad_batches", 1)
    with timer:
        for _ in range(n):
            for _ in range(every):
                for batch in x.batches(1):
                    gpu.work(device_ms - 1.0 if device_ms else 0.0, host_ms=host_ms)
                    model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(every):
                timer.step()
    return timer


def numbers(timer: GPUPhaseHooks) -> list[int]:
    return [int(step) for step in timer.history()["step"]]


def test_so_few_steps_are_timed_that_they_take_no_more_than_that_part() -> None:
    gpu = DearGPU(100.0)
    timer = train(gpu, 2000, max_overhead=0.01)
    # All of the first 64; then 0.6 ms for six marks, a quarter more for what is not seen, in steps
    # of 10.6 ms. A step that follows an untimed one has a mark more, and lasts 10 ms without marks.
    steps = numbers(timer)
    assert steps[:64] == [*range(64)]
    assert sum(64 <= step < 256 for step in steps) == (256 - 64) / 8
    assert sum(256 <= step < 256 + 9 * 190 for step in steps) == 190
    summary = timer.summary()
    assert (summary.one_in, summary.max_overhead) == (9, 0.01)
    assert "one step in 9 is timed to stay below 1 %" in str(summary)
    assert (len(steps) - 64) * 0.7 < 0.01 * 10.0 * (2000 - 64)


def test_what_cannot_be_kept_is_not_promised() -> None:
    summary = train(DearGPU(100.0), 600, max_overhead=1e-5).summary()
    assert "one step in 100 is timed, the fewest: it may take more than 0.001 %" in str(summary)
    assert "to stay below" not in str(summary)


class SlowClock(DearGPU):
    """As above; and each reading of the host's time takes a known time, too."""

    def __init__(self, record_us: float, read_us: float) -> None:
        super().__init__(record_us)
        self.read_ns = round(read_us * 1000)

    def host_ns(self) -> int:
        self.now += self.read_ns
        return self.now


@pytest.mark.parametrize(
    ("read_us", "share", "one_in"), [(3.0, 0, 10), (3.0, 6.5, 16), (9.0, 0, 11), (9.0, 6.5, 100)]
)
def test_what_hooks_cost_in_the_other_steps_is_part_of_it(
    monkeypatch: pytest.MonkeyPatch, read_us: float, share: float, one_in: int
) -> None:
    # Of the 100 us that may be taken of 10 ms, hooks take 6.5 times the end of a step that is not
    # timed. That is two readings of the clock: 61 us are left for timing if one takes 3 us, and
    # nothing if it takes 9.
    monkeypatch.setattr(budget, "_QUIET", share)
    summary = train(SlowClock(100.0, read_us), 2000, max_overhead=0.01).summary()
    assert summary.one_in == one_in
    assert ("one step in 100 is timed, the fewest" in str(summary)) == (one_in == 100)


def test_what_hooks_cost_is_free_where_the_host_waits_anyway() -> None:
    gpu = SlowClock(100.0, 9.0)
    timer = train(gpu, 600, host_ms=10.0, device_ms=15.0, max_overhead=0.01)
    assert numbers(timer) == [*range(600)]


def test_the_timed_steps_do_not_fall_on_the_same_places_of_a_pattern() -> None:
    timer = train(DearGPU(100.0), 256 + 900, max_overhead=0.01)
    steps = [step - 256 for step in numbers(timer) if step >= 256]
    assert {step % 9 for step in steps} == {*range(9)}
    assert all(0 < b - a < 2 * 9 for a, b in pairwise(steps))


@pytest.mark.parametrize("n", [1, 2, 3, 8, 100])
def test_an_elastic_plan_times_one_step_in_each_n(n: int) -> None:
    plan = Schedule(n, is_elastic=True, since=7)
    timed = [i for i in range(7, 7 + 20 * n) if plan.kind(i).name == "TIMED"]
    assert [(i - 7) // n for i in timed] == [*range(20)]
    for i in range(7, 7 + 19 * n):
        assert plan.next_timed(i) == next(one for one in timed if one >= i)
    assert not plan.is_plain


def test_where_the_device_sets_the_pace_every_step_is_timed() -> None:
    gpu = DearGPU(100.0)
    timer = train(gpu, 600, host_ms=10.0, device_ms=15.0, max_overhead=0.01)
    assert numbers(timer) == [*range(600)]
    assert "is timed to stay below" not in str(timer.summary())


def test_what_the_host_has_left_over_is_free() -> None:
    # Timing takes 0.6 ms, and the host waits for the device for 0.3 ms a step beside that.
    gpu = DearGPU(100.0)
    timer = train(gpu, 600, host_ms=10.0, device_ms=10.9, max_overhead=0.01)
    assert numbers(timer) == [*range(600)]


def test_without_a_lag_waits_are_no_spare_time() -> None:
    # Each timed step waits for what was launched last: 2 ms, of which marks take 0.5.
    timer = train(DearGPU(100.0), 1000, device_ms=3.0, max_overhead=0.01, lag=0)
    assert timer.summary().one_in == 26


def test_cheap_events_cost_no_step() -> None:
    assert numbers(train(DearGPU(1.0), 300, max_overhead=0.01)) == [*range(300)]


class DearToRead(DearGPU):
    """As above; and each interval that is read takes the host 0.1 ms."""

    def event(self) -> FakeEvent:
        event = EventDearToRead(self)
        self.created += 1
        return event


class EventDearToRead(DearEvent):
    def elapsed_time(self, end_event: FakeEvent) -> float:
        self._gpu.now += 100_000
        return super().elapsed_time(end_event)


def test_a_step_that_is_read_as_it_ends_costs_no_more_than_one_that_is_read_later() -> None:
    # 1.2 ms a step, a quarter more for what is not seen, in steps of 11.2 ms.
    for on_step in (None, lambda times: None):
        timer = train(DearToRead(100.0), 120, max_overhead=0.15, on_step=on_step)
        assert timer.summary().one_in == 1


def test_micro_batches_count_with_their_step() -> None:
    timer = train(DearGPU(100.0), 1000, host_ms=5.0, max_overhead=0.01, accumulate_grad_batches=2)
    assert 9 < timer.summary().one_in < 20
    assert len(numbers(timer)) < 64 + 1000 / 8


def test_a_run_that_is_resumed_begins_to_measure_again() -> None:
    timer = train(DearGPU(100.0), 300, max_overhead=0.01, first_step=1000)
    steps = numbers(timer)
    assert steps[:64] == [*range(1000, 1064)]
    assert timer.summary().one_in == 9


def test_nothing_changes_without_it() -> None:
    logger = Logger()
    timer = train(DearGPU(100.0), 200, logger=logger)
    assert numbers(timer) == [*range(200)]
    assert timer.summary().max_overhead is None
    assert not any("timed_share" in key for _, metrics in logger.calls for key in metrics)


def test_the_log_tells_which_part_of_the_steps_is_timed() -> None:
    logger = Logger()
    train(DearGPU(100.0), 400, max_overhead=0.01, logger=logger)
    shares = [metrics["phase_time/timed_share"] for _, metrics in logger.calls]
    assert shares[0] == 1.0
    assert shares[-1] == 1 / 9


def test_probed_steps_come_as_they_are_planned() -> None:
    gpu = DearGPU(100.0)
    timer = train(gpu, 600, device_ms=1.0, max_overhead=0.01, probe_every_n_steps=50)
    summary = timer.summary()
    assert summary.probed_steps == 600 / 50
    assert summary.one_in > 5


def test_it_holds_in_lightning() -> None:
    gpu = DearGPU(1000.0)

    class Slow(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.gpu.host_work(100.0)
            return super().training_step(batch, batch_idx)

    timer = GPUPhaseTimer(clock=gpu, summary=False, warmup_steps=0, max_overhead=0.05)
    fit(gpu, Slow(gpu), n=300, timer=timer)
    summary = timer.summary()
    assert 2 < summary.one_in <= 5
    assert summary.steps < 64 + 236 / 2


@pytest.fixture
def agreements(monkeypatch: pytest.MonkeyPatch) -> list[Agreement]:
    """Those of three ranks."""
    monkeypatch.setattr(agreement, "_runs", repeat(0))
    monkeypatch.setattr(agreement, "_LONGEST_S", 0.01)
    store = HashStore()
    return [Agreement(store, rank, 3) for rank in range(3)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_ranks_do_what_the_dearest_one_wishes(
    agreements: list[Agreement], order: tuple[int, ...]
) -> None:
    def turn(*wishes: int) -> list[int]:
        return [agreements[rank].agree(wishes[rank]) for rank in order]

    assert turn(1, 8, 3) == [1, 1, 1]
    assert turn(1, 2, 4) == [1, 1, 1]
    assert turn(9, 9, 9) == [8, 8, 8]
    assert turn(1, 1, 1) == [4, 4, 4]


def test_a_rank_without_a_timer_has_no_wish(agreements: list[Agreement]) -> None:
    zero, one, _ = agreements
    assert [one.agree(7), zero.agree(5)] == [1, 1]
    assert [[zero.agree(3), one.agree(2)] for _ in range(3)] == [[1, 1], [7, 7], [3, 3]]


def test_rank_zero_alone_does_what_it_wishes(agreements: list[Agreement]) -> None:
    assert [agreements[0].agree(7) for _ in range(4)] == [1, 1, 7, 7]


def test_a_rank_that_is_left_alone_says_so_once(
    agreements: list[Agreement], caplog: pytest.LogCaptureFixture
) -> None:
    assert [agreements[1].agree(7) for _ in range(5)] == [1] * 5
    assert len(caplog.messages) == 1
    assert "agree no more" in caplog.text
    assert "On this one all are: give" in caplog.text
    assert "or this one sync_ranks=False" in caplog.text


def test_a_wait_for_the_other_ranks_is_in_no_step(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = DearGPU(100.0)

    def agree(_: Agreement, wish: int) -> int:
        gpu.host_work(1000.0)
        return 1

    monkeypatch.setattr(Agreement, "agree", agree)
    timer = train(gpu, 300, max_overhead=0.01)
    assert timer.summary().steps == 300
    assert max(timer.history()["step_ms"]) < 20.0


def test_real_ranks_time_the_same_steps(tmp_path: Path) -> None:
    script = Path(__file__).parent / "budget_run.py"
    printed = finish(*(start(script, rank, tmp_path / "store") for rank in range(2)))
    (one_in, timed), other = map(json.loads, printed)
    assert other == [one_in, timed]
    # That of the dearer one; alone, the first would time about one in 10.
    assert 16 < one_in < 24
    # Two turns pass until it holds.
    assert timed[:256] == [*range(256)]
    assert len(timed) < 256 + (600 - 256) / 16 + 2


def test_ranks_that_share_nothing_decide_for_themselves(
    two_ranks: None, caplog: pytest.LogCaptureFixture
) -> None:
    # The store of these ranks cannot be used: then every step is timed.
    assert train(DearGPU(100.0), 300, max_overhead=0.01).summary().one_in == 1
    assert "agree no more" in caplog.text
    # A step of theirs has one mark more.
    alone = train(DearGPU(100.0), 300, max_overhead=0.01, sync_ranks=False)
    assert alone.summary().one_in == 10


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_overhead": 0}, ValueError, "above 0 and below 1"),
        ({"max_overhead": 1.0}, ValueError, "above 0 and below 1"),
        ({"max_overhead": float("nan")}, ValueError, "above 0 and below 1"),
        ({"max_overhead": "1%"}, TypeError, "must be a number"),
        ({"max_overhead": True}, TypeError, "must be a number"),
        ({"max_overhead": 0.01, "every_n_steps": 10}, ValueError, "leave every_n_steps out"),
    ],
)
def test_an_impossible_budget_says_what_to_give(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        GPUPhaseTimer(**options)
    with pytest.raises(error, match=message):
        GPUPhaseHooks(nn.Linear(1, 1), **options)
