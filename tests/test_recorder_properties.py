"""Invariants of a recorder on random sequences of calls."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
from fake_gpu import FakeGPU

from lightning_gputime._phases import EXCLUDED, StepRecord
from lightning_gputime._record.recorder import Recorder

SEEDS = range(150)
"""A sequence each, of every kind. A failed test names the seeds that break it: `play(KIND, SEED)`
shows what was called, in `calls`."""

LABELS = [
    "data",
    "forward",
    "<after forward>",
    "backward",
    "<after backward>",
    "optimizer",
    "<after update>",
    "other",
]

LOOP = ["mark"] * 12 + ["end_step"] * 4 + ["work"] * 8
TURNS = ["enter_phase", "leave_phase", "pause", "resume", "drain", "begin", "stop"]
KINDS = {
    "a loop": LOOP,
    "all without graphs": [
        *LOOP,
        *TURNS,
        "flush",
        "end_untimed",
        "fill",
        "mark_instead",
        "mark_in_backward",
    ],
    "graphs": [*LOOP, *TURNS, "begin_or_end_capture", "replay"],
    "a device that fails": [*LOOP, *TURNS, "flush", "end_untimed", "mark_instead", "fail"],
}
"""Operations of each kind of sequence; repeated names are drawn more often."""

NEXT_STATE: Mapping[str, Mapping[str, str]] = {
    "begin": dict.fromkeys(["IDLE", "OPEN", "PAUSED", "LOST"], "OPEN"),
    "pause": {"OPEN": "PAUSED"},
    "resume": {"PAUSED": "OPEN"},
    "end_step": {"PAUSED": "OPEN", "LOST": "OPEN"},
    "stop": dict.fromkeys(["IDLE", "OPEN", "PAUSED", "LOST"], "IDLE"),
}
"""The state that an operation leads to from another. All else leaves the state as it is, but an
error, or a mark while a graph is captured, which lose the step."""


def is_in(recorder: Recorder, state: str) -> bool:
    """Tells whether a recorder is in a state, and shows it as one does."""
    if state == "IDLE":
        shows = recorder.threads.timed == -1 and recorder.label is None
    elif state == "OPEN":
        shows = recorder.threads.timed != -1 and recorder.label not in (None, EXCLUDED)
    else:
        label = EXCLUDED if state == "PAUSED" else None
        shows = recorder.threads.timed != -1 and recorder.label == label
    return shows and recorder.state.name == state


class FailingGPU(FakeGPU):
    """A fake GPU that fails with a given probability."""

    failures = 0

    def touch(self) -> None:
        super().touch()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("of the device")


class Played:
    """A recorder that runs random operations, with its observed state."""

    def __init__(self, kind: str, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(f"{kind} {seed}")
        self.gpu = FailingGPU()
        self.steps: list[StepRecord] = []
        self.recorder = self.new_recorder(
            lag=self.random.choice([0, 1, 2]),
            batch=self.random.choice([1, 3]),
            emit=self.steps.extend,
        )
        self.number = 0
        self.names: list[str] = []
        self.capture: AbstractContextManager[Callable[[], None]] | None = None
        self.replays: list[Callable[[], None]] = []
        self.calls: list[str] = []
        self.raised: list[str] = []
        self.state, self.illegal = "IDLE", list[str]()
        self.call("begin")
        for _ in range(self.random.randrange(10, 80)):
            self.call(self.random.choice(KINDS[kind]))
        if self.capture is not None:
            self.begin_or_end_capture()
        self.gpu.failures = 0
        self.call("flush")

    def new_recorder(self, **options: Any) -> Recorder:
        return Recorder(self.gpu, **options)

    def call(self, operation: str) -> None:
        """Calls one operation, and looks what came of it."""
        self.calls.append(operation)
        follow = [NEXT_STATE.get(operation, {}).get(self.state, self.state)]
        failures = self.gpu.failures
        try:
            getattr(self, operation)()
        except Exception as error:
            self.raised.append(f"{operation}: {error!r}")
        may_lose = self.gpu.failures < failures or self.capture is not None
        if may_lose and follow != ["IDLE"]:
            follow.append("LOST")
        seen = [state for state in reversed(follow) if is_in(self.recorder, state)]
        if not seen:
            self.illegal.append(f"{operation} in {self.state} led to no {' and no '.join(follow)}")
        self.state = (seen or follow)[0]

    # The operations

    def label(self) -> str:
        return self.random.choice(LABELS)

    def work(self) -> None:
        self.gpu.work(self.random.choice([0.25, 1, 4]), host_ms=self.random.choice([0, 0.5, 2]))

    def fail(self) -> None:
        self.gpu.failures += 1

    def begin(self) -> None:
        self.recorder.begin()

    def mark(self) -> None:
        self.recorder.mark(self.label())

    def mark_in_backward(self) -> None:
        self.recorder.mark_in_backward("backward/comm")

    def mark_instead(self) -> None:
        self.recorder.mark_instead("<after forward>", "loss")

    def enter_phase(self) -> None:
        self.names.append(self.random.choice(["a", "b", "backward"]))
        self.recorder.enter_phase(self.names[-1])

    def leave_phase(self) -> None:
        """Mostly the innermost phase; a generator may leave another phase."""
        if self.names:
            out_of_order = self.random.random() < 0.2
            last = self.random.randrange(len(self.names)) if out_of_order else -1
            self.recorder.leave_phase(self.names.pop(last))

    def pause(self) -> None:
        self.recorder.pause()

    def resume(self) -> None:
        self.recorder.resume(self.label())

    def end_step(self) -> None:
        self.recorder.end_step(
            self.number,
            skipped_update=self.random.random() < 0.1,
            read=self.random.random() < 0.1,
        )
        self.number += 1

    def end_untimed(self) -> None:
        self.recorder.pending.end_untimed(read=self.random.random() < 0.3)

    def stop(self) -> None:
        self.recorder.stop()

    def fill(self) -> None:
        self.recorder.start_probe(lambda: self.gpu.spin(3_000_000))

    def flush(self) -> None:
        self.recorder.pending.flush()

    def drain(self) -> None:
        self.recorder.pending.drain()

    def begin_or_end_capture(self) -> None:
        if self.capture is None:
            self.capture = self.gpu.capture()
            self.replays.append(self.capture.__enter__())
        else:
            self.capture.__exit__(None, None, None)
            self.capture = None

    def replay(self) -> None:
        if self.replays and self.capture is None:
            self.random.choice(self.replays)()


@cache
def play(kind: str, seed: int) -> Played:
    """Plays a sequence, once for all tests."""
    return Played(kind, seed)


@pytest.fixture(params=KINDS)
def sequences(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> list[Played]:
    caplog.set_level("CRITICAL", "lightning_gputime")  # A failed device is reported each time.
    return [play(request.param, seed) for seed in SEEDS]


def all_steps(sequences: list[Played]) -> Iterator[tuple[int, StepRecord]]:
    """The steps of all sequences, each with a different seed."""
    return ((sequence.seed, step) for sequence in sequences for step in sequence.steps)


def test_phases_add_up_to_every_step(sequences: list[Played]) -> None:
    wrong, checked = [], 0
    for seed, step in all_steps(sequences):
        times = step.times()
        intervals = zip(step.labels, step.device_ms, strict=True)
        timed_ms = sum(ms for label, ms in intervals if label != EXCLUDED)
        phases_ms = sum(ms for name, ms in times.phase_ms.items() if "/" not in name)
        wrong += [] if times.step_ms == phases_ms == timed_ms else [seed]
        checked += 1
    assert wrong == []
    assert checked > len(SEEDS)


def test_no_time_is_negative(sequences: list[Played]) -> None:
    steps = [*all_steps(sequences)]
    assert [seed for seed, step in steps if min(step.device_ms) < 0 or step.wait_ms < 0] == []
    assert [seed for seed, step in steps if [*step.host_ns] != sorted(step.host_ns)] == []


def test_steps_come_in_the_order_in_which_they_ended(sequences: list[Played]) -> None:
    numbers = {sequence.seed: [step.number for step in sequence.steps] for sequence in sequences}
    assert [seed for seed, found in numbers.items() if found != sorted({*found})] == []


def test_recorder_never_raises(sequences: list[Played]) -> None:
    assert {sequence.seed: sequence.raised for sequence in sequences if sequence.raised} == {}


def test_capture_is_never_broken(sequences: list[Played]) -> None:
    assert [sequence.seed for sequence in sequences if sequence.gpu.capture_broken] == []


def test_recorder_follows_its_transition_table(
    sequences: list[Played],
) -> None:
    assert {sequence.seed: sequence.illegal for sequence in sequences if sequence.illegal} == {}
