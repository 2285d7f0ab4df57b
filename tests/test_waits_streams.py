"""`<phase>/comm` where there are several streams: only the timed one waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, work
from fake_loop import Loop, hooks
from fake_ranks import (
    COMM_MS,
    Event,
    FakeStream,
    FakeStreams,
    Ranks,
    from_module,
    launch,
    phases,
    reduce,
)
from torch import distributed

OWN = {**STEP_MS, "backward/comm": 0.0}
FSDP = from_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")


@pytest.fixture
def streams(ranks: Ranks, gpu: FakeGPU) -> FakeStreams:
    return FakeStreams(gpu)


def train(gpu: FakeGPU, before_backward: Callable[[], object], n: int = 3) -> Any:
    """Trains the standard loop, with a call in what is then `loss`."""
    loop = Loop(gpu)
    with hooks(loop, sync_ranks=False) as timer:
        for x in timer.steps(loop.batches(n)):
            gpu.work(0.125)
            y = loop.model(x)
            before_backward()
            work(y, gpu, 0.5, 0.25).sum().backward()
            loop.update()
    return phases(timer)


def waiting(comm_ms: float, other_ms: float = 0.0) -> dict[str, float]:
    """A standard step whose loss waits for other ranks, and for what is no rank."""
    return {**OWN, "loss": STEP_MS["loss"] + comm_ms + other_ms, "loss/comm": comm_ms}


NOBODY = {**OWN, "loss": STEP_MS["loss"] + COMM_MS}


@pytest.mark.parametrize("how", [reduce, lambda: launch().wait()])
def test_collective_on_another_stream_is_not_a_wait(
    streams: FakeStreams, gpu: FakeGPU, how: Callable[[], object]
) -> None:
    def beside() -> None:
        with streams.on(streams.side):
            how()
        # Nobody waits for it.
        streams.side.queued_ms = 0.0

    assert train(gpu, beside) == [OWN] * 3


def test_waiting_for_a_stream_with_a_collective_is_a_wait(
    streams: FakeStreams, gpu: FakeGPU
) -> None:
    def beside() -> None:
        with streams.on(streams.side):
            reduce()
        streams.timed.wait_stream(streams.side)

    assert train(gpu, beside) == [waiting(COMM_MS)] * 3


def test_copies_are_not_counted_as_communication(streams: FakeStreams, gpu: FakeGPU) -> None:
    def fetch_ahead() -> None:
        with streams.on(streams.side):
            reduce()
        streams.timed.wait_stream(streams.side)
        streams.copies.queued_ms += 2.0
        streams.timed.wait_stream(streams.copies)

    assert train(gpu, fetch_ahead) == [waiting(COMM_MS, 2.0)] * 3


def test_untimed_stream_has_no_waits(streams: FakeStreams, gpu: FakeGPU) -> None:
    def beside() -> None:
        with streams.on(streams.side):
            reduce()
        streams.copies.wait_stream(streams.side)
        FSDP(streams.copies.wait_event, Event(streams.side))
        # The timed stream is reported, and it is still not counted.
        with streams.on(streams.copies):
            streams.timed.wait_stream(streams.side)
        streams.copies.queued_ms = 0.0

    assert train(gpu, beside) == [OWN] * 3


def test_event_wait_inside_torch_is_a_wait(streams: FakeStreams, gpu: FakeGPU) -> None:
    def unshard() -> None:
        # As FSDP2, whose collectives run on separate streams.
        with streams.on(streams.side):
            FSDP(distributed.all_reduce, torch.ones(2))
        FSDP(streams.timed.wait_event, Event(streams.side))

    assert train(gpu, unshard) == [waiting(COMM_MS)] * 3


def test_event_wait_of_the_loop_is_not_a_wait(streams: FakeStreams, gpu: FakeGPU) -> None:
    def beside() -> None:
        with streams.on(streams.side):
            FSDP(distributed.all_reduce, torch.ones(2))
        streams.copies.queued_ms = COMM_MS
        streams.timed.wait_event(Event(streams.copies))

    assert train(gpu, beside) == [NOBODY] * 3


def test_loop_on_a_side_stream_is_timed_there(streams: FakeStreams, gpu: FakeGPU) -> None:
    streams.timed = streams.side
    loop = Loop(gpu)
    with hooks(loop, sync_ranks=False) as timer, streams.on(streams.side):
        for x in timer.steps(loop.batches(3)):
            gpu.work(0.125)
            y = loop.model(x)
            reduce()
            work(y, gpu, 0.5, 0.25).sum().backward()
            loop.update()
    assert phases(timer) == [waiting(COMM_MS)] * 3


def test_formerly_timed_stream_is_a_side_stream(streams: FakeStreams, gpu: FakeGPU) -> None:
    loop, usual = Loop(gpu), streams.timed
    with hooks(loop, sync_ranks=False) as timer:
        for number, x in enumerate(timer.steps(loop.batches(3))):
            streams.timed = streams.here = streams.side if number == 0 else usual
            loop.train(x)
            streams.timed = streams.here = usual
            with streams.on(streams.side):
                reduce()
            streams.side.queued_ms = 0.0
    assert phases(timer)[1:] == [OWN] * 2


def test_collective_launched_on_a_side_stream_is_a_wait(
    streams: FakeStreams, gpu: FakeGPU, ranks: Ranks
) -> None:
    def beside() -> None:
        with streams.on(streams.side):
            launch()
        ranks.behind = 0
        streams.side.queued_ms = COMM_MS
        streams.timed.wait_stream(streams.side)

    assert train(gpu, beside) == [waiting(COMM_MS)] * 3


def test_clock_without_streams_times_every_wait(ranks: Ranks, gpu: FakeGPU) -> None:
    assert train(gpu, reduce) == [waiting(COMM_MS)] * 3
    with FakeStreams(gpu).on(FakeStream(gpu, 9)):
        gpu.streams = None
        assert train(gpu, lambda: launch().wait()) == [waiting(COMM_MS)] * 3


def test_device_whose_streams_have_no_class_is_timed(streams: FakeStreams, gpu: FakeGPU) -> None:
    streams.kind = None  # type: ignore[assignment]

    def beside() -> None:
        with streams.on(streams.side):
            reduce()
        streams.timed.wait_stream(streams.side)

    assert train(gpu, beside) == [NOBODY] * 3
    assert train(gpu, reduce) == [waiting(COMM_MS)] * 3
