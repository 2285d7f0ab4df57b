"""Traces of slow steps with torch's own profiler, beside those of a user; run by a test.

Usage: trace_run.py WAY FOLDER [DEVICE]
"""

import gzip
import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._causes import capture

STEPS = 300
capture._COOL_DOWN = 20
DEVICE = sys.argv[3] if len(sys.argv) > 3 else "cpu"
ACTIVITIES = [ProfilerActivity.CPU]
if DEVICE == "cuda":
    ACTIVITIES.append(ProfilerActivity.CUDA)
Way = Callable[[int], Any]


def train(way: Way, folder: Path | None, n: int = STEPS) -> tuple[GPUPhaseHooks, list[float]]:
    """Trains with a sleep in every seventh step; `way` is called in each, before the forward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with GPUPhaseHooks(model, optimizer, warmup_steps=0, trace_slow_steps=folder) as timer:
        for number, x in enumerate(timer.steps([torch.randn(8, 16).to(DEVICE) for _ in range(n)])):
            with way(number) or nullcontext():
                loss = model(x).square().mean()
                if number % 7 == 6:
                    with record_function("asleep"):
                        time.sleep(0.02)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(float(loss.detach()))
    return timer, losses


def traces(folder: Path) -> int:
    """Checks each trace, and returns how many there are."""
    paths = [*folder.glob("*.json.gz")] if folder.exists() else []
    for path in paths:
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        steps = [name for name in ranges if name.startswith("step ")]
        assert steps == [path.name.removesuffix(".json.gz").replace("-", " ")], (path, ranges)
        assert "Optimizer.step#SGD.step" in ranges, (path, ranges)
        assert sum(event["name"] == "aten::linear" for event in events) == 2, path
    return len(paths)


def alone(folder: Path) -> None:
    """Losses are the same, and nothing stays."""
    _, without = train(lambda number: None, None)
    timer, losses = train(lambda number: None, folder)
    assert losses == without
    assert 2 <= traces(folder) <= 5, [*folder.iterdir()]
    traced = [slow for slow in timer.slowest(100) if slow.trace]
    assert len(traced) == traces(folder)
    # Others may be slow, too, where the machine is busy.
    assert sum(slow.step % 7 == 6 for slow in traced) >= 2, traced
    assert all(Path(slow.trace or "").exists() for slow in traced)
    assert timer.summary().steps < STEPS - 30
    with profile(activities=ACTIVITIES) as after:
        torch.ones(2) + 1
    assert any(event.name == "aten::add" for event in after.events())


class User:
    """A profiler of the user's, which the loop steps."""

    def __init__(self, **plan: int) -> None:
        self.ready = 0
        self.added = 0
        self.profile = profile(
            activities=ACTIVITIES, schedule=schedule(**plan), on_trace_ready=self._is_ready
        )

    def steps(self, number: int) -> None:
        self.profile.step()

    def _is_ready(self, one: Any) -> None:
        self.ready += 1
        self.added += sum(event.name == "aten::linear" for event in one.events())


def scheduled(folder: Path) -> None:
    """A profiler with a schedule, from before the loop on: its warm-ups and its runs."""
    for plan in (
        {"wait": 5, "warmup": 3, "active": 2},
        {"wait": 0, "warmup": 40, "active": 2},
        {"wait": 60, "warmup": 1, "active": 1},
    ):
        user = User(**plan)
        with user.profile:
            train(user.steps, folder)
        cycles = (STEPS + 1) // sum(plan.values())
        assert user.ready >= cycles - 1, (plan, user.ready)
        assert user.added >= (cycles - 1) * 2 * (plan["active"] - 1), (plan, user.added)
    traces(folder)


def begun_inside(folder: Path) -> None:
    """A profiler with a schedule that begins inside a window."""
    for begin in (30, 31, 40, 50):
        user = User(wait=1, warmup=2, active=3, repeat=1)

        def way(number: int, user: User = user, begin: int = begin) -> None:
            if number == begin:
                user.profile.start()
            elif begin < number < begin + 20:
                user.profile.step()
            elif number == begin + 20:
                user.profile.stop()

        train(way, folder, 100)
        assert (user.ready, user.added) == (1, 6), begin
    traces(folder)


def inside_and_around(folder: Path) -> None:
    """A profiler in some steps, also within a range that is open; then one around the loop."""
    found = []

    def way(number: int) -> Any:
        if number % 11 != 5:
            return None
        stack = ExitStack()
        for _ in range(200):
            stack.enter_context(record_function("around it"))
        found.append(stack.enter_context(profile(activities=ACTIVITIES)))
        return stack

    train(way, folder)
    for one in found:
        assert sum(event.name == "aten::linear" for event in one.events()) == 2
    kept = traces(folder)
    with profile(activities=ACTIVITIES) as around:
        train(lambda number: None, folder)
    assert traces(folder) == kept
    assert sum(event.name == "aten::linear" for event in around.events()) == 2 * STEPS


def nvtx(folder: Path) -> None:
    """Ranges for Nsight, in some steps."""

    def way(number: int) -> Any:
        return torch.autograd.profiler.emit_nvtx() if number % 11 == 5 else None

    train(way, folder)
    traces(folder)


def across_steps(folder: Path) -> None:
    """Ranges that are entered in one step and left in another, with windows between."""
    ranges: list[Any] = []

    def way(number: int) -> None:
        if number % 13 == 3:
            ranges.append(record_function(f"from {number} on"))
            ranges[-1].__enter__()
        if len(ranges) == 5:
            ranges.pop(0).__exit__(None, None, None)

    train(way, folder)
    for one in ranges:
        one.__exit__(None, None, None)
    assert traces(folder) <= 5


def beside_threads(folder: Path) -> None:
    """Threads that compute all the time, as those do that load data or save a model.

    They are not profiled: a profiler of all threads ends the process, in one of some fifty windows.
    """
    is_over = False

    def computes() -> None:
        a = torch.randn(4, 4)
        while not is_over:
            with record_function("beside"):
                a = (a @ a).tanh() + 1

    threads = [Thread(target=computes) for _ in range(2)]
    for thread in threads:
        thread.start()
    train(lambda number: None, folder)
    is_over = True
    for thread in threads:
        thread.join()
    assert traces(folder) >= 2
    for path in folder.iterdir():
        with gzip.open(path, "rt") as file:
            assert '"beside"' not in file.read(), path


def in_a_backward(folder: Path) -> None:
    """A profiler that begins inside a backward, where ours cannot end: it is refused."""
    errors = []

    def way(number: int) -> None:
        def begins(grad: Tensor) -> None:
            if torch.autograd.profiler._is_profiler_enabled:
                try:
                    profile(activities=ACTIVITIES).start()
                except RuntimeError as error:
                    errors.append(str(error))

        if number % 7 == 5:
            hooked.append(begins)

    hooked: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if hooked and output.requires_grad:
            output.register_hook(hooked.pop())

    with nn.modules.module.register_module_forward_hook(hook):
        train(way, folder)
    assert errors
    assert all("outside of a backward" in error for error in errors)
    assert traces(folder) >= 2


def removed_elsewhere(folder: Path) -> None:
    """A timer that another thread removes inside a window, while the loop computes on."""
    for _ in range(5):
        timers: list[GPUPhaseHooks] = []
        is_over = Event()

        def loops(timers: list[GPUPhaseHooks] = timers, is_over: Event = is_over) -> None:
            model = nn.Linear(16, 16)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            timers.append(
                GPUPhaseHooks(model, optimizer, warmup_steps=0, trace_slow_steps=folder).attach()
            )
            number = 0
            while not is_over.is_set():
                number += 1
                model(torch.randn(8, 16)).sum().backward()
                if number % 7 == 6:
                    time.sleep(0.02)
                optimizer.step()
                timers[0].step()

        thread = Thread(target=loops)
        thread.start()
        while not torch.autograd.profiler._is_profiler_enabled:
            time.sleep(0.001)
        timers[0].remove()
        assert not torch.autograd.profiler._is_profiler_enabled
        is_over.set()
        thread.join()
        with profile(activities=ACTIVITIES) as after:
            torch.ones(2) + 1
        assert any(event.name == "aten::add" for event in after.events())


def in_threads(folder: Path) -> None:
    """Another thread that profiles again and again."""
    is_over, done = False, 0
    import torch._dynamo  # Else both threads import it at once, which Python refuses.

    def profiles() -> None:
        nonlocal done
        while not is_over:
            with profile(activities=ACTIVITIES) as one:
                torch.ones(3).cos()
            assert any(event.name == "aten::cos" for event in one.events())
            done += 1
            time.sleep(0.03)

    thread = Thread(target=profiles)
    thread.start()
    train(lambda number: None, folder, 200)
    is_over = True
    thread.join()
    assert done > 3
    traces(folder)


def lightning(folder: Path) -> None:
    """Lightning's own use of the profiler, and then without it."""
    import lightning.pytorch as pl
    from lightning.pytorch.profilers import PyTorchProfiler
    from torch.utils.data import DataLoader

    from lightning_gputime import GPUPhaseTimer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx % 7 == 6:
                with record_function("asleep"):
                    time.sleep(0.02)
            loss: Tensor = self.layers(batch).square().mean()
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.layers(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(to: Path, **options: Any) -> None:
        data: Any = [torch.randn(16) for _ in range(800)]
        pl.Trainer(
            max_epochs=2,
            val_check_interval=45,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[GPUPhaseTimer(summary=False, trace_slow_steps=to)],
            **options,
        ).fit(Model(), DataLoader(data, batch_size=4), DataLoader(data[:8], batch_size=4))

    own = PyTorchProfiler(
        dirpath=folder, schedule=schedule(wait=20, warmup=10, active=3), record_module_names=False
    )
    fit(folder / "beside", profiler=own)
    fit(folder / "named", profiler="pytorch")
    fit(folder / "alone")
    traces(folder / "beside")
    traces(folder / "named")
    assert traces(folder / "alone") >= 2


def workers(folder: Path) -> None:
    """Processes that are forked off inside windows."""
    import multiprocessing

    context = multiprocessing.get_context("fork")

    def way(number: int) -> None:
        if number in (30, 45, 60, 75):
            process = context.Process(target=_in_child)
            process.start()
            process.join()
            assert process.exitcode == 0, process.exitcode

    train(way, folder)
    traces(folder)


def _in_child() -> None:
    assert not torch.autograd.profiler._is_profiler_enabled
    with profile(activities=ACTIVITIES) as one:
        torch.ones(3).cos()
    assert any(event.name == "aten::cos" for event in one.events())


def compiled(folder: Path) -> None:
    """Nothing is compiled again."""
    torch._dynamo.config.error_on_recompile = True
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    run = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GPUPhaseHooks(model, optimizer, warmup_steps=5, trace_slow_steps=folder) as timer:
        for number, x in enumerate(timer.steps([torch.randn(8, 16) for _ in range(STEPS)])):
            loss = run(x).square().mean()
            if number % 7 == 6:
                time.sleep(0.02)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len([*folder.iterdir()]) >= 2


WAYS = (
    alone,
    scheduled,
    begun_inside,
    inside_and_around,
    nvtx,
    across_steps,
    beside_threads,
    in_a_backward,
    removed_elsewhere,
    in_threads,
    lightning,
    workers,
    compiled,
)

if __name__ == "__main__":
    {way.__name__: way for way in WAYS}[sys.argv[1]](Path(sys.argv[2]))
