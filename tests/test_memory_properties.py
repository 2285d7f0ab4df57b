"""What holds of the peaks of memory whatever is called in whatever order, on random sequences."""

from collections.abc import Mapping
from typing import Any

import pytest
import test_recorder_properties as properties
from fake_gpu import FakeAllocator, FakeEvent, FakeGPU

from lightning_gputime._phases import settle
from lightning_gputime._record import metered
from lightning_gputime._record.memory import meter_for
from lightning_gputime._record.recorder import Recorder

SEEDS = range(300)


class LoggingAllocator(FakeAllocator):
    """An allocator that keeps what was allocated after each change, and where events lie there."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.log = [1]
        self.places: dict[FakeEvent, int] = {}
        super().__init__(gpu)
        super().alloc(1)

    def alloc(self, size: int) -> None:
        super().alloc(size)
        self.log.append(self.allocated)


class Metered(properties.Played):
    """Random operations on a recorder that samples the memory of every step."""

    def __init__(self, kind: str, seed: int) -> None:
        self.sampled: list[tuple[int, Mapping[str, int]]] = []
        self.wrong: list[int] = []
        super().__init__(kind, seed)
        meter = self.recorder.meter  # type: ignore[attr-defined]
        meter.memory.leave(meter)

    def new_recorder(self, **options: Any) -> Recorder:
        gpu = self.gpu
        self.allocator = allocator = LoggingAllocator(gpu)
        record = FakeEvent.record

        class Event(FakeEvent):
            def record(self) -> None:
                record(self)
                allocator.places[self] = len(allocator.log) - 1

        gpu.event = lambda: Event(gpu)  # type: ignore[method-assign]
        meter = meter_for(gpu)
        assert meter is not None
        return metered.MeteredRecorder(gpu, meter=meter, deliver=self.deliver, **options)

    def work(self) -> None:
        super().work()
        for _ in range(len(self.calls) % 3):
            self.allocator.alloc((7 * len(self.allocator.log)) % 50)
            self.allocator.alloc(-self.allocator.allocated // 2)

    def deliver(self, number: int, peaks: Mapping[str, int], held: int) -> None:
        """Compares what was read at the marks with what the allocator has done between them."""
        self.sampled.append((number, peaks))
        marks, log = self.recorder._open, self.allocator.log
        places = [self.allocator.places[event] for _, event, _ in marks]  # type: ignore[index]
        expected: dict[str, int] = {}
        names = settle(tuple(label for label, *_ in marks[:-1]))
        for of_mark, first, last in zip(names, places, places[1:], strict=False):
            for name in of_mark:
                expected[name] = max(expected.get(name, 0), *log[first : last + 1])
        if expected != peaks or held != log[places[0]]:
            self.wrong.append(number)


@pytest.mark.parametrize("kind", properties.KINDS)
def test_peaks_are_what_the_allocator_did_and_times_are_as_without(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "lightning_gputime")
    monkeypatch.setattr(metered, "EVERY", 1)
    sampled = 0
    for seed in SEEDS:
        played = properties.play(kind, seed)
        one = Metered(kind, seed)
        assert (one.raised, one.illegal, one.wrong) == ([], [], []), seed
        assert not one.gpu.capture_broken, seed
        if kind != "a device that fails":
            assert one.steps == played.steps, seed
        sampled += len(one.sampled)
    assert sampled > len(SEEDS) / 2
