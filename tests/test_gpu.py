"""Tests on a real GPU: times, host waits, graphs, lines, pace and strategies."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_lightning import trainer
from processes import run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, PhaseSummary
from lightning_gputime._timer import Timer

pytestmark = pytest.mark.gpu

SPIN_CYCLES = 20_000_000  # About 10 ms.
ACTIVITIES = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]


class Spin(torch.autograd.Function):
    """The identity, which keeps the GPU busy in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_cycles: int, backward_cycles: int) -> Tensor:
        ctx.cycles = backward_cycles
        if forward_cycles:
            torch.cuda._sleep(forward_cycles)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.cycles:
            torch.cuda._sleep(ctx.cycles)
        return grads[0], None, None


class Net(pl.LightningModule):
    """A net that spins in one phase."""

    def __init__(self, spins_in: str = "") -> None:
        super().__init__()
        self.spins_in = spins_in
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 64))

    def spin(self, x: Tensor, phase: str, in_backward: bool = False) -> Tensor:
        """Return `x`. Spin if this is the phase to spin in, or in backward if that is."""
        forward = SPIN_CYCLES if self.spins_in == phase else 0
        backward = SPIN_CYCLES if in_backward and self.spins_in == "backward" else 0
        result: Tensor = Spin.apply(x, forward, backward)  # type: ignore[no-untyped-call]
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self.spin(self.net(x), "forward", in_backward=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.spin(batch[0], "other")
        return self.spin(self(x).pow(2).mean(), "loss")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.spin(torch.ones(1), "optimizer")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.spin(torch.ones(1), "data")
        return batch

    def on_train_batch_end(self, *_: Any) -> None:
        self.spin(torch.ones(1), "callbacks")


def fit(model: Net, *callbacks: pl.Callback, steps: int = 20) -> None:
    loader = DataLoader(TensorDataset(torch.ones(16 * steps, 64)), batch_size=16)
    trainer(*callbacks, accelerator="gpu", devices=1, max_steps=steps).fit(model, loader)


@pytest.mark.parametrize(
    "phase", ["data", "callbacks", "other", "forward", "loss", "backward", "optimizer"]
)
def test_spinning_kernel_is_found_only_in_its_phase(phase: str) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)
    start.record()
    torch.cuda._sleep(SPIN_CYCLES)
    end.record()
    end.synchronize()
    spin_ms = start.elapsed_time(end)

    timer = GPUPhaseTimer(print_summary=False)
    fit(Net(spins_in=phase), timer)
    rows = timer.summary().rows
    assert rows[phase].p50_ms == pytest.approx(spin_ms, rel=0.05, abs=0.3)
    # The other kernels are launched while the GPU spins.
    others = [row for name, row in rows.items() if name != phase and "/" not in name]
    assert sum(row.p50_ms for row in others) < 0.1 * spin_ms


def test_forward_agrees_with_events_by_hand() -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4096, 2048, device="cuda")
    by_events_ms = []
    with GPUPhaseHooks(model, optimizer, _lag=0) as timer:
        for _ in timer.steps(range(10)):
            # The host launches the forward while the GPU is busy, however slow it is.
            torch.cuda._sleep(50_000_000)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            out = model(x)
            events[1].record()
            out.pow(2).mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
            by_events_ms.append(events[0].elapsed_time(events[1]))
    assert timer.history()["forward_ms"].tolist() == pytest.approx(by_events_ms, rel=0.02, abs=0.02)


def synchronizations(*callbacks: pl.Callback) -> Counter[str]:
    """Return the calls that synchronize in 20 steps, by name."""

    class Profile(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            if args[-1] == 10:
                profiler.start()
            if args[-1] == 30:
                profiler.stop()

    profiler = torch.profiler.profile(activities=ACTIVITIES, acc_events=True)
    fit(Net(), Profile(), *callbacks, steps=40)
    events = profiler.events()
    assert events is not None
    return Counter(event.name for event in events if "Synchronize" in event.name)


def test_timer_adds_one_event_wait_per_step() -> None:
    without = synchronizations()
    with_timer = synchronizations(GPUPhaseTimer(print_summary=False))
    added = with_timer - without
    assert added.pop("cudaEventSynchronize", 0) <= 20
    assert not added


def all_steps(timer: Timer) -> int:
    """Return the number of all steps, timed or not."""
    found = timer.summary()
    return found.measurement.warmup_steps + found.steps + found.measurement.untimed_steps


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_loader_workers_can_be_forked_inside_the_loop() -> None:
    model = nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = TensorDataset(torch.randn(32, 8))
    loader = DataLoader(rows, 4, num_workers=2, multiprocessing_context="fork")
    with GPUPhaseHooks(model, optimizer) as timer:
        for _ in range(3):
            for (x,) in timer.steps(loader):
                model(x.cuda()).sum().backward()
                optimizer.step()
    assert all_steps(timer) == 24


def train(timed: bool) -> list[Tensor]:
    class KeepsLosses(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(outputs["loss"].detach().clone())

    losses: list[Tensor] = []
    pl.seed_everything(0)
    model = Net()
    fit(model, KeepsLosses(), *([GPUPhaseTimer(print_summary=False)] if timed else []))
    return [*losses, *(value.cpu() for value in model.state_dict().values())]


def test_losses_and_weights_are_bitwise_the_same_with_and_without_the_timer() -> None:
    assert all(map(torch.equal, train(timed=False), train(timed=True)))


def test_model_on_another_device_is_timed_on_that_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    model = nn.Linear(64, 64).to("cuda:1")
    x = torch.ones(16, 64, device="cuda:1")
    with GPUPhaseHooks(model, torch.optim.SGD(model.parameters()), _lag=0) as timer:
        for _ in timer.steps(range(5)):
            out = model(x)
            with torch.cuda.device("cuda:1"):
                torch.cuda._sleep(SPIN_CYCLES)
            out.sum().backward()
    assert len(timer.history()) == 5
    assert (timer.history()["loss_ms"] > 1.0).all()


class Wide(nn.Module):
    """A net whose kernels take longer than their launches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def rows(timer: GPUPhaseHooks) -> dict[str, float]:
    return {name: row.p50_ms for name, row in timer.summary().rows.items()}


def train_wide(model: nn.Module, x: Tensor, steps: int = 20) -> dict[str, float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with GPUPhaseHooks(model, optimizer) as timer:
        for _ in timer.steps(range(steps)):
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return rows(timer)


# torch warns if the tensors of a graph outlive its capture.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_module_captured_with_make_graphed_callables_is_timed() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    model: Any = Wide().cuda()
    eager = train_wide(model, x)
    captured: Any = torch.cuda.make_graphed_callables(model, (x,))
    graphed = train_wide(captured, x)
    assert set(graphed) == set(eager)
    for name in ("forward", "backward"):
        assert graphed[name] == pytest.approx(eager[name], rel=0.15)


def test_graph_replay_is_timed_in_its_phase() -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, 4096, device="cuda")
    model = Wide().cuda()
    eager = train_wide(model, x)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    graph = torch.cuda.CUDAGraph()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).pow(2).mean().backward()
        optimizer.step()

    with GPUPhaseHooks(model, optimizer, warmup_steps=8, lines=False) as timer:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
                timer.step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            step()
        timer.step()
        before = next(model.parameters()).detach().clone()
        for _ in range(20):
            with timer.phase("replay"):
                graph.replay()
            timer.step()
    assert not torch.equal(before, next(model.parameters()))
    work_ms = sum(eager[name] for name in ("forward", "loss", "backward", "optimizer"))
    assert rows(timer)["replay"] == pytest.approx(work_ms, rel=0.15, abs=0.1)
    assert timer.summary().skipped_updates == 0
    assert len(timer.history()) == 23


class Parts(nn.Module):
    """A model whose body has three of its four equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(3)))
        self.head = nn.Linear(4096, 4096)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x)  # type: ignore[no-any-return]  # modules have no types


def train_net(net: nn.Module, x: Tensor, *, reads_loss: bool = False) -> PhaseSummary:
    """Train with default options, and return the summary."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with GPUPhaseHooks(net, optimizer) as timer:
        for _ in timer.steps(range(60)):
            loss = net(x).pow(2).mean()
            if reads_loss:
                loss.item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return timer.summary()


def test_backward_is_split_by_line_of_forward_in_the_backward_thread() -> None:
    x = torch.randn(4096, 4096, device="cuda")  # Needs no gradient.
    lines = {row.line: row for row in train_net(Parts().cuda(), x).lines if not row.entry}
    first = Parts.forward.__code__.co_firstlineno
    body, head = lines[first + 1].phases, lines[first + 2].phases
    assert body["forward"].gpu_ms == pytest.approx(3 * head["forward"].gpu_ms, rel=0.2)
    # Backward of the body has five matrix products, because its input needs no gradient. The head
    # has two.
    assert body["backward"].gpu_ms == pytest.approx(2.5 * head["backward"].gpu_ms, rel=0.25)


def test_net_of_small_layers_is_paced_by_the_host() -> None:
    layers = [layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.ReLU())]
    summary = train_net(nn.Sequential(*layers).cuda(), torch.randn(64, 64, device="cuda"))
    paced = summary.measurement.host_paced
    assert min(paced["forward"], paced["backward"]) > 0.9
    assert summary.code in ("launch-bound", "host-bound")


@pytest.mark.parametrize("reads_loss", [False, True])
def test_net_of_large_layers_is_paced_by_the_gpu(reads_loss: bool) -> None:
    # The host waits in `.item()`, but the GPU idles only for the launch of the next kernel.
    net = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(4))).cuda()
    summary = train_net(net, torch.randn(8192, 8192, device="cuda"), reads_loss=reads_loss)
    paced = summary.measurement.host_paced
    assert max(paced["forward"], paced["backward"]) < 0.05
    assert summary.code == "GPU-bound"


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_net_compiled_with_reduce_overhead_is_timed() -> None:
    class Compiled(Net):
        def __init__(self) -> None:
            super().__init__()
            net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
            self.net: Any = torch.compile(net, mode="reduce-overhead")

    timer = GPUPhaseTimer(print_summary=False)
    fit(Compiled(), timer)
    phases = {"data", "callbacks", "other", "forward", "loss", "backward", "optimizer"}
    assert {name for name in timer.summary().rows if not name.startswith("data/")} == phases
    assert all_steps(timer) == 20


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp", "fsdp2", *(f"deepspeed_stage_{n}" for n in (1, 2, 3)), "zero1", "zero3"],
)
def test_strategies_are_timed_on_two_gpus(strategy: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    is_engine = strategy.startswith(("deepspeed", "zero"))
    if is_engine:
        pytest.importorskip("deepspeed")
    print(run(Path(__file__).parent / "gpu_run.py", strategy, tmp_path))
    of_loop = set() if strategy.startswith("zero") else {"callbacks"}
    for rank in range(2):
        measured = json.loads((tmp_path / f"rank{rank}.json").read_text())
        comm = measured.pop("backward/comm")
        phases = {name for name in measured if "/" not in name}
        assert phases == {"data", "other", "forward", "loss", "backward", "optimizer"} | of_loop
        if not strategy.startswith("zero"):
            assert {"data/fetch", "data/comm"} <= set(measured)
        assert measured["backward"] > measured["forward"] > 0.1
        assert 0 < comm < measured["backward"]
        assert measured["forward"] > 10 * measured["loss"]
        if is_engine:
            assert measured["other"] < 0.1 * sum(measured[name] for name in phases)


def test_updates_in_the_backward_thread_are_optimizer() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
    optimizers = {item: torch.optim.SGD([item], lr=1e-3) for item in model.parameters()}

    def update(parameter: Tensor) -> None:
        torch.cuda._sleep(SPIN_CYCLES // 20)
        optimizers[parameter].step()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    x = torch.randn(64, 1024, device="cuda")
    with GPUPhaseHooks(model, [*optimizers.values()], warmup_steps=2) as timer:
        for _ in timer.steps(range(10)):
            torch.cuda._sleep(SPIN_CYCLES)  # In `other`. Meanwhile the kernels below are launched.
            model(x).pow(2).mean().backward()
    summary = timer.summary()
    assert summary.skipped_updates == 0
    # The spins before each update count as backward.
    spins_ms = len(optimizers) * summary.rows["other"].p50_ms / 20
    assert summary.rows["backward"].p50_ms == pytest.approx(spins_ms, rel=0.1)
    assert 0.0 < summary.rows["optimizer"].p50_ms < 0.5 * spins_ms


def test_peak_memory_agrees_with_the_counters_of_torch() -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(8, 8, device="cuda")
    with GPUPhaseHooks(model, optimizer) as timer:
        for _ in timer.steps(range(3)):
            torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
            model(x).sum().backward()
            optimizer.step()
    found = timer.summary().memory
    assert found is not None
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    assert (found.allocated_mib * 2**20, found.reserved_mib * 2**20) == peaks
    assert found.device_mib * 2**20 == torch.cuda.get_device_properties(0).total_memory
