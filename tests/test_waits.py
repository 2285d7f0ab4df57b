"""`<phase>/comm`: waits for other ranks, in the phase in which they are called."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining._backward as _backward
from fake_gpu import STEP_MS, FakeGPU, Layer, steps, work
from fake_lightning import Loader, MemoryLogger, Model, timer_of, trainer
from fake_loop import Loop, hooks
from fake_loop import train as train_loop
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
from processes import finish, start
from test_recorder import in_thread
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import AllreduceOptions, FakeWork
from torch.distributed import ProcessGroup, _functional_collectives
from torch.utils.checkpoint import checkpoint

from lightning_gputime import GPUPhaseHooks, phase


def launch_and_wait() -> None:
    launch().wait()


def all_reduce() -> Any:
    """Return the result of a collective, which is waited for at its first use."""
    world: Any = distributed.group.WORLD
    return _functional_collectives.all_reduce(torch.ones(2), "sum", world)


def launch_without_options() -> Any:
    # Before torch 2.8, no collective had options, which show if the caller waits immediately.
    return distributed.group.WORLD.allreduce([torch.ones(2)])  # type: ignore[union-attr]


COLLECTIVES: dict[str, Callable[[], object]] = {
    "synchronous": reduce,
    "work is waited for": launch_and_wait,
    "result is used": lambda: all_reduce().add(1),
    "result is waited for": lambda: all_reduce().wait(),
    "without options": lambda: launch_without_options().wait(),
}


@pytest.fixture(params=COLLECTIVES)
def collective(request: pytest.FixtureRequest, ranks: Ranks) -> Callable[[], None]:
    """Return a collective that takes `COMM_MS` and is waited for in one of several ways."""
    call = COLLECTIVES[request.param]

    def run() -> None:
        # Functional collectives are launched in C++, so count them here.
        ranks.pending += "result" in request.param
        call()
        assert ranks.pending == 0

    return run


@pytest.mark.parametrize(
    "place", ["data", "forward", "loss", "backward", "optimizer", "other", "update", "augment"]
)
def test_collective_is_comm_of_the_phase_in_which_it_is_called(
    collective: Callable[[], None], gpu: FakeGPU, place: str
) -> None:
    phase_of_place = "optimizer" if place == "update" else place
    assert train(Shared(gpu, place, collective)) == [waiting(phase_of_place)] * 3


class Contrastive(nn.Module):
    """A loss over the outputs of all ranks."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def forward(self, x: Tensor) -> Tensor:
        distributed.all_gather([torch.empty_like(x), torch.empty_like(x)], x.detach())
        return work(x, self.gpu, 0.5, 0.25).sum()


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_gathering_loss_module_waits_in_loss(ranks: Ranks, gpu: FakeGPU, scale: float) -> None:
    class Scaled(Loop):
        def loss(self, x: Tensor) -> Tensor:
            loss: Tensor = scale * self.model["criterion"](self.model["net"](x))
            return loss

    model = nn.ModuleDict({"net": Layer(gpu, 4.0, 7.75), "criterion": Contrastive(gpu)})
    assert train(Scaled(gpu, model)) == [waiting("loss")] * 3


def test_sub_phase_excludes_waits_for_other_ranks(ranks: Ranks, gpu: FakeGPU) -> None:
    class HasPart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = loop.model

        def forward(self, x: Tensor) -> Tensor:
            with phase("forward/part"):
                result: Tensor = self.part(x)
            return result

    loop = Shared(gpu, "forward")
    loop.model = HasPart()
    assert train(loop) == [{**waiting("forward"), "forward/part": 4.0}] * 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_wait_is_in_backward(ranks: Ranks, gpu: FakeGPU, use_reentrant: bool) -> None:
    class Checkpointed(Shared):
        def train(self, x: Tensor) -> None:
            x.requires_grad_()
            y = checkpoint(self.model, x, use_reentrant=use_reentrant)
            work(y, self.gpu, 0.5, 0.25).sum().backward()
            self.update()

    expected = {**waiting("forward"), "backward": 15.0, "backward/comm": COMM_MS, "other": 0.0}
    assert train(Checkpointed(gpu, "forward")) == [expected] * 3


def test_nested_wait_counts_once(
    ranks: Ranks, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast = ProcessGroup.broadcast

    def wait_inside(group: Any, *args: Any) -> Any:
        reduce()
        gpu.work(1.0)
        launch_and_wait()
        return broadcast(group, *args)

    monkeypatch.setattr(ProcessGroup, "broadcast", wait_inside)
    loop = Shared(gpu, "forward", lambda: distributed.broadcast(torch.ones(2), 0))
    assert train(loop) == [waiting("forward", 7.0)] * 3


@pytest.mark.parametrize("kind", [ProcessGroup, FakeWork])
def test_failed_collective_ends_its_wait(
    ranks: Ranks, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    def fail(*_: Any) -> None:
        gpu.work(0.0 if kind is FakeWork else COMM_MS)
        raise ConnectionError("of a rank")

    def reduce_and_fail() -> None:
        with pytest.raises(ConnectionError, match="of a rank"):
            reduce()

    monkeypatch.setattr(kind, "allreduce" if kind is ProcessGroup else "wait", fail)
    for place in ("forward", "backward", "loss"):
        assert train(Shared(gpu, place, reduce_and_fail)) == [waiting(place)] * 3


def test_reused_result_records_no_more_events(ranks: Ranks, gpu: FakeGPU) -> None:
    def marks(uses: int) -> int:
        def use() -> None:
            tensor = all_reduce()
            for _ in range(uses):
                tensor.add(1)

        timer = train_loop(Shared(gpu, "loss", use), 2, sync_ranks=False)
        timer.flush()
        assert timer.last_step is not None
        assert timer.last_step.timeline is not None
        return len(timer.last_step.timeline.names)

    assert marks(uses=1) == marks(uses=5)


def launch_synchronously() -> Any:
    """Launch a collective on the stream of the caller, which must still call `wait`."""
    options = AllreduceOptions()
    options.asyncOp = False
    return distributed.group.WORLD.allreduce([torch.ones(2)], options)  # type: ignore[union-attr]


def wait_in_a_named_phase(gpu: FakeGPU) -> None:
    with phase("augment"):
        gpu.work(1.0)
        reduce()
        with phase("inner"):
            reduce()
            gpu.work(2.0)
        gpu.work(4.0)


def work_between_launch_and_wait(gpu: FakeGPU) -> None:
    work = launch_without_options()
    gpu.work(1.0)
    work.wait()


def launch_that_nobody_waits_for(gpu: FakeGPU) -> None:
    with phase("augment"):
        launch_synchronously()
    gpu.work(1.0)
    launch_and_wait()


def collective_of_another_thread(gpu: FakeGPU) -> None:
    work = launch_synchronously()
    # Like a checkpoint that is written in the background.
    in_thread(lambda: distributed.barrier())
    work.wait()
    gpu.work(1.0)


WITH_WORK = {**waiting("loss"), "loss": STEP_MS["loss"] + 1.0 + COMM_MS}
AUGMENT = {"augment": COMM_MS, "augment/comm": COMM_MS}
IN_NAMED_PHASES = {"augment": 8.0, "augment/comm": 3.0, "inner": 5.0, "inner/comm": 3.0}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (wait_in_a_named_phase, {**OWN, **IN_NAMED_PHASES}),
        (work_between_launch_and_wait, WITH_WORK),
        (launch_that_nobody_waits_for, {**WITH_WORK, **AUGMENT}),
        (collective_of_another_thread, WITH_WORK),
    ],
)
def test_only_the_wait_of_the_caller_is_comm(
    ranks: Ranks, gpu: FakeGPU, call: Callable[[FakeGPU], None], expected: dict[str, float]
) -> None:
    assert train(Shared(gpu, "loss", lambda: call(gpu))) == [expected] * 3


def test_evaluation_under_lightning_has_separate_comm(ranks: Ranks, gpu: FakeGPU) -> None:
    class Validated(Model):
        def forward(self, x: Tensor) -> Tensor:
            reduce()
            return super().forward(x)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self(batch)

    timer, logger = timer_of(gpu, sync_ranks=False, log=["default", "comm"]), MemoryLogger()
    trainer(timer, logger=logger).fit(Validated(gpu), Loader(gpu, 3), Loader(gpu, 2))
    assert steps(timer) == [waiting("forward")] * 3
    metrics = {name: ms for _, found in logger.phase_times() for name, ms in found.items()}
    assert metrics["phase_time/val/forward_ms"] == 7.0
    assert metrics["phase_time/val/forward/comm_ms"] == COMM_MS


# Several streams: only waits of the timed stream count


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


def wait_on_side(streams: FakeStreams) -> None:
    reduce_on_side(streams)
    with streams.on(streams.side):
        launch().wait()
    streams.side.queued_ms = 0.0  # The timed stream does not wait for it.


def wait_for_side_and_for_a_copy(streams: FakeStreams) -> None:
    reduce_on_side(streams)
    streams.timed.wait_stream(streams.side)
    # Like a batch that is copied in advance.
    streams.copies.queued_ms += 2.0
    streams.timed.wait_stream(streams.copies)


def wait_on_untimed_streams(streams: FakeStreams) -> None:
    reduce_on_side(streams)
    streams.copies.wait_stream(streams.side)
    FSDP(streams.copies.wait_event, Event(streams.side))
    # Even a wait of the timed stream does not count if another stream is current.
    with streams.on(streams.copies):
        streams.timed.wait_stream(streams.side)
    streams.copies.queued_ms = 0.0


def wait_for_an_event_like_fsdp(streams: FakeStreams) -> None:
    with streams.on(streams.side):
        FSDP(distributed.all_reduce, torch.ones(2))
    FSDP(streams.timed.wait_event, Event(streams.side))


def wait_for_an_event_of_a_copy(streams: FakeStreams) -> None:
    with streams.on(streams.side):
        FSDP(distributed.all_reduce, torch.ones(2))
    streams.copies.queued_ms = COMM_MS
    streams.timed.wait_event(Event(streams.copies))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (wait_on_side, OWN),
        (wait_for_side_and_for_a_copy, {**WAITS, "loss": WAITS["loss"] + 2.0}),
        (wait_on_untimed_streams, OWN),
        (wait_for_an_event_like_fsdp, WAITS),
        (wait_for_an_event_of_a_copy, WAITS_FOR_NO_RANK),
    ],
)
def test_only_waits_of_the_timed_stream_for_collectives_are_comm(
    streams: FakeStreams,
    gpu: FakeGPU,
    call: Callable[[FakeStreams], None],
    expected: dict[str, float],
) -> None:
    assert in_loss(gpu, lambda: call(streams)) == expected


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


# Pipelines: a stage receives data for the next pass


PIPELINE = from_module("torch.distributed.pipelining.stage")
SCRIPT = Path(__file__).with_name("pipeline_run.py")
MANUAL = Path(__file__).parents[1] / "docs/how-to/trainers/megatron-torchtitan.md"


@pytest.mark.parametrize("place", ["data", "other", "forward", "loss", "backward", "optimizer"])
def test_pipeline_receive_is_comm_of_the_next_pass(ranks: Ranks, gpu: FakeGPU, place: str) -> None:
    loop = Shared(gpu, place, lambda: PIPELINE(launch().wait))
    next_pass = "forward" if place in ("data", "other", "forward") else "backward"
    assert train(loop) == [waiting(next_pass)] * 3


def test_autograd_grad_of_a_pipeline_is_backward(ranks: Ranks, gpu: FakeGPU) -> None:
    net = Layer(gpu, 4.0, 8.0)
    call = from_module(_backward.__name__)
    with GPUPhaseHooks(net, _clock=gpu, warmup_steps=0, sync_ranks=False) as timer:
        for is_pipeline in (True, False):
            x = torch.ones(1, 2, requires_grad=True)
            y = net(x).sum()
            grad = functools.partial(torch.autograd.grad, y, [x], retain_graph=True)
            call(grad) if is_pipeline else grad()
            y.backward()
            timer.step()
    of_pipeline, of_penalty = steps(timer)
    assert of_pipeline["backward"] == 16.0
    assert of_penalty["loss"] == 8.0


@pytest.mark.slow
def test_megatron_and_torchtitan_recipes_time_every_stage_and_its_lines(tmp_path: Path) -> None:
    ranks = finish(*(start(SCRIPT, MANUAL, tmp_path, rank) for rank in range(2)))
    # Two stages, two micro-batches of 4 and 8 ms, an update of 2 ms, and two batches of 1 ms.
    first = {"data": 2.0, "forward": 16.0, "loss": 0.0, "backward": 32.0, "optimizer": 2.0}
    first |= {"other": 0.0, "forward/comm": 0.0, "backward/comm": 0.0}
    # The last stage has the loss, of 0.5 and 0.25 ms. In Megatron, the loss between two model calls
    # is `forward`.
    last = first | {"loss": 1.0, "backward": 32.5}
    between = last | {"forward": 16.5, "loss": 0.5}
    found = [json.loads(printed) for printed in ranks]
    n = 14  # Of 20 steps, three are examined. They and the step after each are in no statistics.
    assert [[loops[name]["steps"] for name in ("megatron", "torchtitan")] for loops in found] == [
        [[first] * n, [first] * n],
        [[between] * n, [last] * n],
    ]
    lines = {"data": "batches", "forward": "Layer.forward"}
    for loops in found:
        # The recipe for Megatron marks a function as `backward`, whose lines are its own.
        of_megatron = {"backward": "backward_step", "optimizer": "MixedPrecision.step"}
        assert loops["megatron"]["lines"] == lines | of_megatron
        of_titan = {"backward": "Layer.forward", "optimizer": "Adder.step"}
        assert loops["torchtitan"]["lines"] == lines | of_titan
