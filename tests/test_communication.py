"""`backward/comm`: the part of backward in which a rank only waits for other ranks."""

from typing import Any

import pytest
import torch
from conftest import installed
from fake_gpu import STEP_MS, FakeGPU, Layer, steps, work
from fake_loop import Loop, hooks, train
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_gputime import GPUPhaseHooks


def wait_after_backward(layer: Any, gpu: FakeGPU) -> None:
    """Make backward end with a wait of 3 ms for other ranks, like DDP and FSDP2."""

    def queue(_: Any) -> None:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: gpu.work(3.0))

    layer.linear.weight.register_post_accumulate_grad_hook(queue)


STEP_WITH_WAIT = {**STEP_MS, "backward": STEP_MS["backward"] + 3.0, "backward/comm": 3.0}


def timer_on(net: nn.Module, gpu: FakeGPU, *optimizer: Any, **options: Any) -> GPUPhaseHooks:
    options = {"_clock": gpu, "warmup_steps": 0, "sync_ranks": False, **options}
    return GPUPhaseHooks(net, *optimizer, **options)


def parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap a module in DDP with an all-reduce that ends immediately."""

    def finish(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped = DistributedDataParallel(module, **options)
    wrapped.register_comm_hook(None, finish)
    return wrapped


def test_ddp_wait_is_separated_from_backward(two_ranks: None, gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    wait_after_backward(loop.model, gpu)
    assert steps(train(loop, 3, sync_ranks=False)) == [STEP_WITH_WAIT] * 3


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_ddp_has_zero_comm_without_wait(
    two_ranks: None, gpu: FakeGPU, options: dict[str, Any]
) -> None:
    loop = Loop(gpu)
    loop.model = parallel(loop.model, **options)
    # The timer checks for a wait after all work of backward.
    assert steps(train(loop, 3, sync_ranks=False)) == [{**STEP_MS, "backward/comm": 0.0}] * 3


def test_validation_of_a_module_inside_ddp_is_in_no_step(two_ranks: None, gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    model, loop.model = loop.model, parallel(loop.model)
    with hooks(loop, sync_ranks=False) as timer:
        for number, x in enumerate(timer.steps(loop.batches(40)), 1):
            loop.train(x)
            if number % 20 == 0:
                model.eval()
                with torch.no_grad():
                    for y in loop.batches(4):
                        model(y)
                model.train()
    step = {**STEP_MS, "backward/comm": 0.0}
    # The first validation batch is copied before the evaluation begins.
    assert steps(timer) == ([step] * 19 + [{**step, "other": 0.125 + 1.0}]) * 2


def test_broadcast_of_buffers_is_a_wait_in_forward(
    two_ranks: None, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(gpu)
    loop.model.register_buffer("mean", torch.zeros(2))  # DDP broadcasts it before each forward.
    loop.model = parallel(loop.model)
    monkeypatch.setattr(loop.model, "_sync_buffers", lambda: gpu.work(5.0))
    before = installed(*loop.model.modules())
    timer = train(loop, 3, sync_ranks=False)
    expected = {"forward": 9.0, "forward/comm": 5.0, "backward/comm": 0.0}
    assert steps(timer) == [{**STEP_MS, **expected}] * 3
    assert installed(*loop.model.modules()) == before


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_autograd_is_not_patched(two_ranks: None, gpu: FakeGPU, fullgraph: bool) -> None:
    from torch._dynamo import compiled_autograd
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    net = nn.Linear(2, 2)
    with timer_on(net, gpu) as timer:
        compiler = torch.compile(backend=counter, fullgraph=fullgraph)
        with compiled_autograd._enable(compiler):
            net(torch.ones(1, 2)).sum().backward()
        timer.step()
    assert counter.frame_count == 1
    assert "backward/comm" not in steps(timer)[0]


def test_micro_batches_inside_no_sync_have_no_comm(two_ranks: None, gpu: FakeGPU) -> None:
    net = parallel(Layer(gpu, 4.0, 8.0))
    optimizer = torch.optim.SGD(net.parameters())
    with timer_on(net, gpu, optimizer, accumulate_grad_batches=2) as timer:
        for _ in range(2):
            with net.no_sync():
                net(torch.ones(1, 2)).sum().backward()
            timer.step()
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            timer.step()
    times = timer.last_step
    assert times is not None
    assert times.timeline is not None
    assert sum("backward/comm" in names for names in times.timeline.names) == 1


def test_backward_of_several_losses_has_one_wait(two_ranks: None, gpu: FakeGPU) -> None:
    net, x = Layer(gpu, 4.0, 8.0), torch.ones(1, 2)
    wait_after_backward(net, gpu)
    with timer_on(net, gpu) as timer:
        for kind in (iter, list):
            losses: Any = [net(x).sum(), work(net(x), gpu, 0.0, 1.0).sum()]
            torch.autograd.backward(kind(losses))
            timer.step()
    of_iterator, of_list = steps(timer)
    assert of_iterator["backward"] == of_list["backward"] == 8.0 + (8.0 + 1.0) + 3.0
    assert of_iterator["backward/comm"] == of_list["backward/comm"] == 3.0
    assert not losses[0]._backward_hooks
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(1, 2).sum().backward()


def test_checkpointing_and_failed_backward_leave_no_hooks(two_ranks: None, gpu: FakeGPU) -> None:
    net = Layer(gpu, 4.0, 8.0)

    def fail(_: Tensor) -> None:
        raise RuntimeError("in a hook")

    with timer_on(net, gpu) as timer:
        loss = net(torch.ones(1, 2)).sum()
        handle = net.linear.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="in a hook"):
            loss.backward()
        handle.remove()
        assert not loss._backward_hooks
        timer.step()
        x = torch.ones(1, 2, requires_grad=True)
        checkpoint(net, x, use_reentrant=True).sum().backward()
        timer.step()
    # 4 ms of recomputed forward and 8 ms of backward. A hook that was left would add a wait.
    assert steps(timer)[1]["backward"] == 12.0
    assert steps(timer)[1]["backward/comm"] == 0.0
