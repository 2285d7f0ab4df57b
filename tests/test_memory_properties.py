"""What holds of the peaks of memory whatever is called in whatever order, on random sequences."""

from typing import Any

import pytest
import test_recorder_properties as properties
from fake_gpu import FakeAllocator, FakeEvent, FakeGPU

from lightning_gputime._memory import PhaseMemory, sampler
from lightning_gputime._phases import StepRecord, resolve_labels
from lightning_gputime._record import recorder
from lightning_gputime._record.recorder import Recorder

SEEDS = range(300)


class LoggingAllocator(FakeAllocator):
    """An allocator that keeps what was allocated after each change, and where marks lie there."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.log = [1]
        self.of_event = -1
        self.places: dict[int, int] = {}
        self.sampled: list[tuple[int, int]] = []
        super().__init__(gpu)
        super().alloc(1)

    def alloc(self, size: int) -> None:
        super().alloc(size)
        self.log.append(self.allocated)

    def note(self, sampled: tuple[int, int]) -> None:
        assert self.of_event == len(self.log) - 1, "not at a mark"
        self.sampled.append(sampled)  # So that no other one gets its identity.
        self.places[id(sampled)] = self.of_event


class Sampled(properties.Played):
    """Random operations on a recorder that samples the memory of every step."""

    def __init__(self, kind: str, seed: int) -> None:
        self.found: list[StepRecord] = []
        self.wrong: list[int] = []
        super().__init__(kind, seed)
        self.steps = [step._replace(memory=()) for step in self.steps]

    def new_recorder(self, **options: Any) -> Recorder:
        gpu = self.gpu
        self.allocator = allocator = LoggingAllocator(gpu)
        record = FakeEvent.record

        class Event(FakeEvent):
            def record(self) -> None:
                record(self)
                allocator.of_event = len(allocator.log) - 1

        read = sampler(allocator)

        def sample() -> tuple[int, int]:
            sampled = read()
            allocator.note(sampled)
            return sampled

        def emit(steps: list[StepRecord]) -> None:
            options["emit"](steps)
            self.check(steps)

        gpu.event = lambda: Event(gpu)  # type: ignore[method-assign]
        return Recorder(gpu, sample=sample, **{**options, "emit": emit})

    def work(self) -> None:
        super().work()
        for _ in range(len(self.calls) % 3):
            self.allocator.alloc((7 * len(self.allocator.log)) % 50)
            self.allocator.alloc(-self.allocator.allocated // 2)

    def check(self, steps: list[StepRecord]) -> None:
        """Compares what was read at the marks with what the allocator has done between them."""
        log = self.allocator.log
        for step in steps:
            kept = PhaseMemory()
            kept.steps_read([step])
            if not kept._window:
                continue
            self.found.append(step)
            places = [self.allocator.places[id(sampled)] for sampled in step.memory]
            expected: dict[str, int] = {}
            for of_mark, first, last in zip(
                resolve_labels(step.labels), places, places[1:], strict=False
            ):
                for name in of_mark:
                    expected[name] = max(expected.get(name, 0), *log[first : last + 1])
            if [(step.number, expected)] != [*kept._window] or kept._held != log[places[0]]:
                self.wrong.append(step.number)


@pytest.mark.parametrize("kind", properties.KINDS)
def test_peaks_are_what_the_allocator_did_and_times_are_as_without(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "lightning_gputime")
    monkeypatch.setattr(recorder, "SAMPLED_EVERY", 1)
    sampled = 0
    for seed in SEEDS:
        played = properties.play(kind, seed)
        one = Sampled(kind, seed)
        assert (one.raised, one.illegal, one.wrong) == ([], [], []), seed
        assert not one.gpu.capture_broken, seed
        if kind != "a device that fails":
            assert one.steps == played.steps, seed
        sampled += len(one.found)
    assert sampled > len(SEEDS) / 2
