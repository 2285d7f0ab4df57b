"""`<phase>/comm`: waits for other ranks, in the phase in which they are called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, Layer, steps, work
from fake_lightning import Loader, MemoryLogger, Model, timer_of, trainer
from fake_loop import Loop
from fake_loop import train as train_loop
from fake_ranks import COMM_MS, OWN, Ranks, Shared, launch, reduce, train, waiting
from test_recorder import in_thread
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import AllreduceOptions, FakeWork
from torch.distributed import ProcessGroup, _functional_collectives
from torch.utils.checkpoint import checkpoint

from lightning_gputime import phase


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


def test_named_phase_continues_after_a_wait(ranks: Ranks, gpu: FakeGPU) -> None:
    def named() -> None:
        with phase("augment"):
            gpu.work(1.0)
            reduce()
            with phase("inner"):
                reduce()
                gpu.work(2.0)
            gpu.work(4.0)

    expected = {"augment": 8.0, "augment/comm": 3.0, "inner": 5.0, "inner/comm": 3.0}
    assert train(Shared(gpu, "loss", named)) == [{**OWN, **expected}] * 3


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


def test_work_between_launch_and_wait_is_not_comm(ranks: Ranks, gpu: FakeGPU) -> None:
    def overlap() -> None:
        work = launch_without_options()
        gpu.work(1.0)
        work.wait()

    expected = {**waiting("loss"), "loss": STEP_MS["loss"] + 1.0 + COMM_MS}
    assert train(Shared(gpu, "loss", overlap)) == [expected] * 3


def launch_synchronously() -> Any:
    """Launch a collective on the stream of the caller, which must still call `wait`."""
    options = AllreduceOptions()
    options.asyncOp = False
    return distributed.group.WORLD.allreduce([torch.ones(2)], options)  # type: ignore[union-attr]


def test_collective_without_a_wait_does_not_hide_the_next_wait(ranks: Ranks, gpu: FakeGPU) -> None:
    def named() -> None:
        with phase("augment"):
            launch_synchronously()
        gpu.work(1.0)
        launch_and_wait()

    expected = {**waiting("loss"), "loss": STEP_MS["loss"] + COMM_MS + 1.0}
    expected |= {"augment": COMM_MS, "augment/comm": COMM_MS}
    assert train(Shared(gpu, "loss", named)) == [expected] * 3


def test_collective_of_another_thread_does_not_end_a_wait(ranks: Ranks, gpu: FakeGPU) -> None:
    def wait_while_another_thread_waits() -> None:
        work = launch_synchronously()
        # Like a checkpoint that is written in the background.
        in_thread(lambda: distributed.barrier())
        work.wait()
        gpu.work(1.0)

    expected = {**waiting("loss"), "loss": STEP_MS["loss"] + COMM_MS + 1.0}
    assert train(Shared(gpu, "loss", wait_while_another_thread_waits)) == [expected] * 3


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
