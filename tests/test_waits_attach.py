"""Patches that time waits for other ranks: installing, removing, cost."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, batches, steps
from fake_loop import Loop, hooks
from fake_ranks import COMM_MS, FakeStreams, Ranks, phases, places, reduce
from test_compile import Count, compilations
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import FakeWork, HashStore
from torch.distributed import ProcessGroup, _functional_collectives

from lightning_gputime import GPUPhaseHooks

WAITING = {**STEP_MS, "loss": 3.5, "loss/comm": COMM_MS, "backward/comm": 0.0}


def train(timer: GPUPhaseHooks, loop: Loop, n: int = 2) -> None:
    for x in timer.steps(loop.batches(n)):
        loop.gpu.work(0.125)
        y = loop.model(x)
        reduce()
        loop.gpu.work(0.5)
        y.sum().backward()
        loop.gpu.work(0.25)
        loop.update()


IN_THIS_LOOP = {**WAITING, "backward": 7.75, "optimizer": 2.25}


def test_single_process_patches_no_class(gpu: FakeGPU, loop: Loop) -> None:
    FakeStreams(gpu)
    before = places()
    with hooks(loop) as timer:
        assert places() == before
        for x in timer.steps(loop.batches(2)):
            loop.train(x)
        assert places() == before
    assert places() == before


def test_world_of_one_patches_no_class(gpu: FakeGPU, loop: Loop) -> None:
    store = HashStore()
    distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        before = places()
        with hooks(loop):
            assert places() == before
    finally:
        distributed.destroy_process_group()


def test_classes_are_restored(ranks: Ranks, gpu: FakeGPU, loop: Loop) -> None:
    FakeStreams(gpu)
    before = places()
    timer = hooks(loop, sync_ranks=False).attach()
    assert all(now != then for now, then in zip(places(), before, strict=True) if "wait" in then)
    assert vars(ProcessGroup)["allreduce"] is not before[0]["allreduce"]
    train(timer, loop)
    timer.remove()
    assert places() == before
    assert phases(timer) == [IN_THIS_LOOP] * 2


@pytest.mark.parametrize("fails", ["current", "kind"])
def test_attach_that_fails_leaves_nothing(
    ranks: Ranks,
    loop: Loop,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: str,
) -> None:
    def current(_: FakeStreams) -> int:
        raise RuntimeError("no device")

    class Kind(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise RuntimeError("no device")

    FakeStreams(loop.gpu)
    value = current if fails == "current" else Kind("Stream", (), {"wait_event": reduce})
    monkeypatch.setattr(FakeStreams, fails, value)
    before = places()
    hooks(loop, sync_ranks=False).attach()
    assert (
        "Steps are no longer timed, because a hook failed: RuntimeError('no device')" in caplog.text
    )
    assert places() == before


@pytest.mark.parametrize("first", [0, 1])
def test_two_timers_come_off_in_either_order(ranks: Ranks, gpu: FakeGPU, first: int) -> None:
    loop, before = Loop(gpu), places()
    timers = [hooks(loop, sync_ranks=False).attach() for _ in range(2)]
    timers[first].remove()
    assert places() != before
    last = timers[1 - first]
    train(last, loop)
    last.remove()
    assert places() == before
    assert phases(last) == [IN_THIS_LOOP] * 2


class Patch:
    """A patch of somebody else, over whatever is there."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.calls = 0

    def on(self) -> None:
        self.under = vars(self.owner)[self.name]
        call = getattr(self.owner, self.name)

        def patched(*args: Any) -> Any:
            self.calls += 1
            return call(*args)

        setattr(self.owner, self.name, patched)

    def off(self) -> None:
        setattr(self.owner, self.name, self.under)


ORDERS = [
    order
    for order in itertools.permutations(("ours on", "ours off", "theirs on", "theirs off"))
    if order.index("ours on") < order.index("ours off")
    and order.index("theirs on") < order.index("theirs off")
]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
@pytest.mark.parametrize(("owner", "name"), [(ProcessGroup, "allreduce"), (FakeWork, "wait")])
def test_foreign_patch_may_come_and_go_at_any_time(
    ranks: Ranks, gpu: FakeGPU, owner: Any, name: str, order: tuple[str, ...], again: bool
) -> None:
    loop, before, theirs = Loop(gpu), places(), Patch(owner, name)
    timer = hooks(loop, sync_ranks=False)
    words = {
        "ours on": timer.attach,
        "ours off": timer.remove,
        "theirs on": theirs.on,
        "theirs off": theirs.off,
    }
    for word in order:
        words[word]()
        if word in ("ours on", "theirs on"):
            train(timer, loop) if timer._session.is_attached else reduce()
    if again:
        # Over what was put back, if that is ours.
        with hooks(loop, sync_ranks=False) as timer:
            train(timer, loop)
        assert phases(timer) == [IN_THIS_LOOP] * 2
    # A replacement that was restored without listeners is removed at its next call.
    reduce()
    assert places() == before
    assert theirs.calls > 0


def test_patch_kept_by_others_is_reused(ranks: Ranks, gpu: FakeGPU) -> None:
    loop, before, theirs = Loop(gpu), places(), Patch(ProcessGroup, "allreduce")
    with hooks(loop, sync_ranks=False):
        theirs.on()
    for _ in range(3):
        with hooks(loop, sync_ranks=False) as timer:
            train(timer, loop)
        assert phases(timer) == [IN_THIS_LOOP] * 2
    theirs.off()
    reduce()
    assert places() == before


def test_error_in_a_wait_ends_only_the_timing_of_waits(
    ranks: Ranks, loop: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    streams, before = FakeStreams(loop.gpu), places()
    with hooks(loop, sync_ranks=False) as timer:
        monkeypatch.setattr(streams, "here", None)
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "take", loop.gpu.work)
            reduce()
    del timer
    assert "boundary failed" in caplog.text
    assert places() == before


def reduced(x: Tensor) -> Tensor:
    world: Any = distributed.group.WORLD
    result: Tensor = _functional_collectives.all_reduce(x * 2, "sum", world)
    return result


def functional(x: Tensor) -> Tensor:
    return reduced(x) + 1


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    distributed.all_reduce(y)
    return y + 1


def awaited(x: Tensor) -> Tensor:
    y = x * 2
    work: Any = distributed.all_reduce(y, async_op=True)
    work.wait()
    return y + 1


def of_results(x: Tensor) -> Tensor:
    # The compiled function gets the pending result of a collective.
    return x + 1 if isinstance(x, _functional_collectives.AsyncCollectiveTensor) else x + 2


@pytest.mark.parametrize("collective", [functional, in_place, awaited, of_results])
@pytest.mark.parametrize("streams", [False, True])
def test_compiled_collectives_are_compiled_once(
    two_ranks: None, gpu: FakeGPU, collective: Callable[[Tensor], Tensor], streams: bool
) -> None:
    if streams:
        FakeStreams(gpu)

    def run(timed: bool, backend: Count) -> None:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        compiled = torch.compile(collective, backend=backend)
        options: dict[str, Any] = {"_clock": gpu, "warmup_steps": 0, "sync_ranks": False}
        for _ in range(10):
            timer = GPUPhaseHooks(net, optimizer, **options)
            loader: Iterator[Tensor] = batches(gpu, 3)
            for x in timer.attach().steps(loader) if timed else loader:
                y = net(x).detach()
                compiled(reduced(y) if collective is of_results else y)
                net(x).sum().backward()
                optimizer.step()
            if timed:
                timer.remove()
                assert len(steps(timer)) == 3
            compiled(torch.ones(1, 2))

    without = compilations(lambda backend: run(False, backend))
    assert without[0] >= 1
    assert compilations(lambda backend: run(True, backend)) == without
