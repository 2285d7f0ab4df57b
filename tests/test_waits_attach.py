"""Patches that time waits for other ranks: installation, removal and errors."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_gpu import FakeGPU, batches, steps
from fake_loop import Loop, hooks
from fake_ranks import FakeStreams, Ranks, Shared, phases, places, reduce, waiting
from test_compile import Count, compilations
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import FakeWork, HashStore
from torch.distributed import ProcessGroup, _functional_collectives

from lightning_gputime import GPUPhaseHooks

EXPECTED = [waiting("loss")] * 2


@pytest.fixture
def loop(ranks: Ranks, gpu: FakeGPU) -> Iterator[Shared]:
    """Return a loop with a collective in its loss, and check that it leaves no patched class."""
    before = places()
    yield Shared(gpu, "loss")
    assert places() == before


def attached(loop: Shared) -> GPUPhaseHooks:
    return hooks(loop, sync_ranks=False).attach()


def train(timer: GPUPhaseHooks, loop: Shared) -> None:
    for x in timer.steps(loop.batches(2)):
        loop.train(x)


def train_with_new_timer(loop: Shared) -> None:
    """Train with a new timer, and check its times."""
    timer = attached(loop)
    train(timer, loop)
    timer.remove()
    assert phases(timer) == EXPECTED


def test_single_rank_patches_no_class(gpu: FakeGPU) -> None:
    distributed.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        before = places()
        with hooks(Loop(gpu)):
            assert places() == before
    finally:
        distributed.destroy_process_group()


def test_attached_timer_patches_all_classes(loop: Shared) -> None:
    FakeStreams(loop.gpu)
    before = places()
    timer = attached(loop)
    assert all(now != then for now, then in zip(places(), before, strict=True) if "wait" in then)
    assert vars(ProcessGroup)["allreduce"] is not before[0]["allreduce"]
    train(timer, loop)
    timer.remove()
    assert phases(timer) == EXPECTED


@pytest.mark.parametrize("fails", ["current", "kind"])
def test_attach_that_fails_leaves_no_patch(
    loop: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no device")

    FakeStreams(loop.gpu)
    kind: Any = type("Kind", (type,), {"__setattr__": fail})
    value = fail if fails == "current" else kind("Stream", (), {"wait_event": reduce})
    monkeypatch.setattr(FakeStreams, fails, value)
    attached(loop)
    message = "Steps are no longer timed, because a hook failed: RuntimeError('no device')"
    assert message in caplog.text


class Patch:
    """A patch by other code, on top of the current attribute."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.calls = 0

    def install(self) -> None:
        self.under = vars(self.owner)[self.name]
        call = getattr(self.owner, self.name)

        def patched(*args: Any) -> Any:
            self.calls += 1
            return call(*args)

        setattr(self.owner, self.name, patched)

    def remove(self) -> None:
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
def test_foreign_patch_may_be_installed_and_removed_at_any_time(
    loop: Shared, owner: Any, name: str, order: tuple[str, ...], again: bool
) -> None:
    theirs = Patch(owner, name)
    timer = hooks(loop, sync_ranks=False)
    actions = {
        "ours on": timer.attach,
        "ours off": timer.remove,
        "theirs on": theirs.install,
        "theirs off": theirs.remove,
    }
    for action in order:
        actions[action]()
        if action.endswith(" on"):
            train(timer, loop) if timer._session.is_attached else reduce()
    if again:
        # If their patch was removed last, its removal has restored ours.
        train_with_new_timer(loop)
    # Our patch that was restored after its removal removes itself when it is called.
    reduce()
    assert theirs.calls > 0


def test_patch_under_a_foreign_patch_is_reused(loop: Shared) -> None:
    theirs = Patch(ProcessGroup, "allreduce")
    with hooks(loop, sync_ranks=False):
        theirs.install()
    for _ in range(3):
        train_with_new_timer(loop)
    theirs.remove()
    reduce()


def test_error_in_a_wait_ends_only_the_timing_of_waits(
    ranks: Ranks, loop: Shared, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    streams = FakeStreams(loop.gpu)
    with hooks(loop, sync_ranks=False):
        monkeypatch.setattr(streams, "here", None)
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "take", loop.gpu.work)
            reduce()
    assert "its hook failed" in caplog.text


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


def add_to_result(x: Tensor) -> Tensor:
    # The compiled function receives the pending result of a collective.
    return x + 1 if isinstance(x, _functional_collectives.AsyncCollectiveTensor) else x + 2


@pytest.mark.parametrize("collective", [functional, in_place, add_to_result])
def test_compiled_collectives_are_compiled_once(
    two_ranks: None, gpu: FakeGPU, collective: Callable[[Tensor], Tensor]
) -> None:
    FakeStreams(gpu)

    def run(timed: bool, backend: Count) -> None:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        compiled = torch.compile(collective, backend=backend)
        options: dict[str, Any] = {"_clock": gpu, "warmup_steps": 0, "sync_ranks": False}
        for _ in range(10):
            timer = GPUPhaseHooks(net, optimizer, **options)
            for x in timer.attach().steps(batches(gpu, 3)) if timed else batches(gpu, 3):
                y = net(x).detach()
                compiled(reduced(y) if collective is add_to_result else y)
                net(x).sum().backward()
                optimizer.step()
            if timed:
                timer.remove()
                assert len(steps(timer)) == 3
            compiled(torch.ones(1, 2))

    without = compilations(lambda backend: run(False, backend))
    assert without[0] >= 1
    assert compilations(lambda backend: run(True, backend)) == without
