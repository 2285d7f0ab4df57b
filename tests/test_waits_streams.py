"""`<phase>/comm` with several streams: only waits of the timed stream count."""

from collections.abc import Callable

import pytest
import torch
from fake_gpu import FakeGPU
from fake_loop import hooks
from fake_ranks import (
    COMM_MS,
    OWN,
    Event,
    FakeStreams,
    Ranks,
    Shared,
    from_module,
    launch,
    phases,
    reduce,
    train,
    waiting,
)
from torch import distributed

FSDP = from_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")

WAITS = waiting("loss")
WAITS_FOR_NO_RANK = {**OWN, "loss": OWN["loss"] + COMM_MS}


@pytest.fixture
def streams(ranks: Ranks, gpu: FakeGPU) -> FakeStreams:
    return FakeStreams(gpu)


def in_loss(gpu: FakeGPU, call: Callable[[], object]) -> dict[str, float]:
    """Return the phases of steps that make a call in `loss`, which must all be equal."""
    first, *others = train(Shared(gpu, "loss", call))
    assert others == [first] * 2
    return first


def reduce_on_side(streams: FakeStreams) -> None:
    with streams.on(streams.side):
        reduce()


@pytest.mark.parametrize("how", [reduce, lambda: launch().wait()])
def test_collective_on_another_stream_is_not_a_wait(
    streams: FakeStreams, gpu: FakeGPU, how: Callable[[], object]
) -> None:
    def call() -> None:
        with streams.on(streams.side):
            how()
        # Nothing waits for the side stream.
        streams.side.queued_ms = 0.0

    assert in_loss(gpu, call) == OWN


def test_only_waits_for_collectives_are_counted(streams: FakeStreams, gpu: FakeGPU) -> None:
    def call() -> None:
        reduce_on_side(streams)
        streams.timed.wait_stream(streams.side)
        # Like a batch that is copied in advance.
        streams.copies.queued_ms += 2.0
        streams.timed.wait_stream(streams.copies)

    assert in_loss(gpu, call) == {**WAITS, "loss": WAITS["loss"] + 2.0}


def test_waits_of_untimed_streams_are_not_counted(streams: FakeStreams, gpu: FakeGPU) -> None:
    def call() -> None:
        reduce_on_side(streams)
        streams.copies.wait_stream(streams.side)
        FSDP(streams.copies.wait_event, Event(streams.side))
        # Even a wait of the timed stream does not count if another stream is current.
        with streams.on(streams.copies):
            streams.timed.wait_stream(streams.side)
        streams.copies.queued_ms = 0.0

    assert in_loss(gpu, call) == OWN


@pytest.mark.parametrize(("inside_torch", "expected"), [(True, WAITS), (False, WAITS_FOR_NO_RANK)])
def test_event_wait_is_counted_only_inside_torch(
    streams: FakeStreams, gpu: FakeGPU, inside_torch: bool, expected: dict[str, float]
) -> None:
    def call() -> None:
        # Like FSDP2, whose collectives run on separate streams.
        with streams.on(streams.side):
            FSDP(distributed.all_reduce, torch.ones(2))
        if inside_torch:
            FSDP(streams.timed.wait_event, Event(streams.side))
        else:
            streams.copies.queued_ms = COMM_MS
            streams.timed.wait_event(Event(streams.copies))

    assert in_loss(gpu, call) == expected


def test_loop_on_a_side_stream_is_timed_there(streams: FakeStreams, gpu: FakeGPU) -> None:
    streams.timed = streams.side
    with streams.on(streams.side):
        assert in_loss(gpu, reduce) == WAITS


def test_stream_that_is_no_longer_timed_has_no_comm(streams: FakeStreams, gpu: FakeGPU) -> None:
    loop, usual = Shared(gpu, ""), streams.timed
    with hooks(loop, sync_ranks=False) as timer:
        for number, x in enumerate(timer.steps(loop.batches(3))):
            streams.timed = streams.here = streams.side if number == 0 else usual
            loop.train(x)
            streams.timed = streams.here = usual
            reduce_on_side(streams)
            streams.side.queued_ms = 0.0
    assert phases(timer)[1:] == [OWN] * 2


def test_collective_launched_on_a_side_stream_is_a_wait(
    streams: FakeStreams, gpu: FakeGPU, ranks: Ranks
) -> None:
    def call() -> None:
        with streams.on(streams.side):
            launch()
        ranks.pending = 0
        streams.side.queued_ms = COMM_MS
        streams.timed.wait_stream(streams.side)

    assert in_loss(gpu, call) == WAITS


def test_device_without_a_stream_class_is_timed(streams: FakeStreams, gpu: FakeGPU) -> None:
    def call() -> None:
        reduce_on_side(streams)
        streams.timed.wait_stream(streams.side)

    streams.kind = None  # type: ignore[assignment]
    assert in_loss(gpu, call) == WAITS_FOR_NO_RANK
    assert in_loss(gpu, reduce) == WAITS
