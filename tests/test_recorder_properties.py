"""Invariants of a recorder on random sequences of calls."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from fake_gpu import FakeGPU

from lightning_gputime._phases import EXCLUDED, StepRecord
from lightning_gputime._record.pending_steps import LineMark, Wait
from lightning_gputime._record.recorder import Recorder

SEEDS = range(150)
"""Seeds of the sequences of each kind. A failed test names the seeds that break it: `Played(KIND,
SEED).calls` shows the operations."""

LABELS = ["data", "forward", "backward", "optimizer", "other"]
LABELS += ["<after forward>", "<after backward>", "<after update>"]

LOOP = ["mark"] * 12 + ["end_step"] * 4 + ["work"] * 8
CALLS = [*LOOP, "enter_phase", "leave_phase", "pause", "resume", "drain", "begin", "stop"]
MORE = ["flush", "end_untimed", "mark_instead"]
KINDS = {
    "a loop": LOOP,
    "all without graphs": [*CALLS, *MORE, "examine", "mark_in_backward"],
    "graphs": [*CALLS, "begin_or_end_capture", "replay"],
    "a device that fails": [*CALLS, *MORE, "fail"],
}
"""Operations from which each kind of sequence is drawn, repeated by their weight."""


class FailingGPU(FakeGPU):
    """A fake GPU that fails a given number of times."""

    failures = 0

    def touch(self) -> None:
        super().touch()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("device error")


class Played:
    """A recorder after a random sequence of operations, with its emitted steps and errors."""

    def __init__(self, kind: str, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(f"{kind} {seed}")
        self.gpu = FailingGPU()
        self.steps: list[StepRecord] = []
        lag, read_size = self.random.choice([0, 1, 2]), self.random.choice([1, 3])
        self.recorder = Recorder(self.gpu, lag=lag, read_size=read_size, emit=self.take)
        self.number = 0
        self.names: list[str] = []
        self.capture: AbstractContextManager[Callable[[], None]] | None = None
        self.replays: list[Callable[[], None]] = []
        self.calls: list[str] = []
        self.raised: list[str] = []
        self.call("begin")
        for _ in range(self.random.randrange(10, 80)):
            self.call(self.random.choice(KINDS[kind]))
        if self.capture is not None:
            self.begin_or_end_capture()
        self.gpu.failures = 0
        self.call("flush")

    def take(self, steps: list[StepRecord], since_ns: int) -> None:
        self.steps.extend(steps)

    def call(self, operation: str) -> None:
        """Call an operation, and store its error, such as a forbidden transition."""
        self.calls.append(operation)
        try:
            owners = [self, self.recorder.pending, self.recorder]
            next(getattr(owner, operation) for owner in owners if hasattr(owner, operation))()
        except Exception as error:
            self.raised.append(f"{operation}: {error!r}")

    # The operations

    def label(self) -> str:
        return self.random.choice(LABELS)

    def work(self) -> None:
        self.gpu.work(self.random.choice([0.25, 1, 4]), host_ms=self.random.choice([0, 0.5, 2]))

    def fail(self) -> None:
        self.gpu.failures += 1

    def mark(self) -> None:
        self.recorder.mark(self.label())

    def mark_in_backward(self) -> None:
        self.recorder.mark_in_backward("backward/comm")

    def mark_instead(self) -> None:
        self.recorder.mark_instead("loss", of="<after forward>")

    def enter_phase(self) -> None:
        self.names.append(self.random.choice(["a", "b", "backward"]))
        self.recorder.enter_phase(self.names[-1])

    def leave_phase(self) -> None:
        """Leave the innermost phase, or sometimes another phase, as a generator may do."""
        if self.names:
            out_of_order = self.random.random() < 0.2
            last = self.random.randrange(len(self.names)) if out_of_order else -1
            self.recorder.leave_phase(self.names.pop(last))

    def resume(self) -> None:
        self.recorder.resume(self.label())

    def end_step(self) -> None:
        self.recorder.end_step(
            self.number,
            skipped_update=self.random.random() < 0.1,
            read=self.random.random() < 0.1,
            wait=Wait.FOR_THIS_STEP if self.random.random() < 0.1 else Wait.FOR_EARLIER,
        )
        self.number += 1

    def end_untimed(self) -> None:
        self.recorder.pending.end_untimed(read=self.random.random() < 0.3)

    def examine(self) -> None:
        event = self.gpu.event()
        event.record()
        self.recorder.examine([LineMark(self.gpu.now, self.gpu.now, event, None, starts=True)])

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


def violations(played: Played) -> Iterator[str]:
    """Yield a description of each invariant that a sequence breaks."""
    yield from played.raised
    if played.gpu.capture_broken:
        yield "a capture is broken"
    numbers = [step.number for step in played.steps]
    if numbers != sorted({*numbers}):
        yield f"steps are not in order: {numbers}"
    for step in played.steps:
        times = step.times()
        intervals = zip(step.labels, step.device_ms, strict=True)
        timed_ms = sum(ms for label, ms in intervals if label != EXCLUDED)
        phases_ms = sum(ms for name, ms in times.phase_ms.items() if "/" not in name)
        if not times.step_ms == phases_ms == timed_ms:
            yield f"phases of step {step.number} do not add up"
        if min(step.device_ms) < 0 or step.wait_ms < 0:
            yield f"a time of step {step.number} is negative"
        if [*step.host_ns] != sorted(step.host_ns):
            yield f"marks of step {step.number} are not in order"


@pytest.mark.parametrize("kind", KINDS)
def test_recorder_keeps_its_invariants(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "lightning_gputime")  # A failed device is reported each time.
    sequences = {seed: Played(kind, seed) for seed in SEEDS}
    broken = {seed: [*violations(played)] for seed, played in sequences.items()}
    assert {seed: texts for seed, texts in broken.items() if texts} == {}
    assert sum(len(played.steps) for played in sequences.values()) > len(SEEDS)
