"""Pace and lines of examined steps, with exact times on the fake GPU."""

import asyncio
import functools
import gc
import importlib
import inspect
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from conformance import CASES, PLAIN, SAMPLED, TRANSFORMERS, Case
from conftest import hooks_of, installed
from fake_gpu import FakeGPU, batches, steps, work
from fake_loop import Loop, hooks
from fake_ranks import COMM_MS, reduce
from test_conformance import expected_steps, run_lightning, run_plain
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._ledger import examiner, watch

N = 40


class Net(nn.Module):
    """A model whose two lines take the device different times in both directions."""

    def __init__(self, gpu: FakeGPU, host_ms: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self._gpu, self._host_ms = gpu, host_ms

    def forward(self, x: Tensor) -> Tensor:
        x = self._launch(self.linear(x), 3.0, 6.0)
        return self._launch(x, 1.0, 2.0)

    def _launch(self, x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        self._gpu.host_work(self._host_ms)
        return work(x, self._gpu, forward_ms, backward_ms)


Body = Callable[[Loop, Tensor], None]


def train(body: Body, gpu: FakeGPU, *, model: Any = None, n: int = N, **options: Any) -> Any:
    """Return the summary of a timer of a loop that runs `body` on each batch."""
    loop = Loop(gpu, model or Net(gpu))
    with hooks(loop, **{"lines": True, "every_n_steps": 1, **options}) as timer:
        for loop.number, x in enumerate(timer.steps(batches(gpu, n, copy_ms=0.0))):
            body(loop, x)
    return timer.summary()


def wait(gpu: FakeGPU) -> None:
    """Block the host until the device has no work left, as `.item()` does."""
    gpu.now = max(gpu.now, gpu.free_at)


# Pace


def gpu_bound(loop: Loop, x: Tensor) -> None:
    loop.model(x).sum().backward()
    loop.update()


def blocking_copy(loop: Loop, x: Tensor) -> None:
    loop.model(x).sum().backward()
    loop.update()
    wait(loop.gpu)
    loop.gpu.host_work(0.75)


def waits_twice(loop: Loop, x: Tensor) -> None:
    out = loop.model(x)
    wait(loop.gpu)
    loop.gpu.host_work(0.5)
    out.sum().backward()
    loop.update()
    wait(loop.gpu)


def host_bound(loop: Loop, x: Tensor) -> None:
    loop.gpu.host_work(30.0)
    loop.model(x).sum().backward()
    loop.gpu.host_work(20.0)
    loop.update()


def accumulates(loop: Loop, x: Tensor) -> None:
    for _ in range(2):
        loop.model(x).sum().backward()
    loop.gpu.host_work(40.0)
    loop.update()


def alternates(loop: Loop, x: Tensor) -> None:
    loop.model(x).sum().backward()
    if loop.number % 2:
        loop.gpu.host_work(50.0)
    loop.update()


def replays_graph(loop: Loop, x: Tensor) -> None:
    loop.gpu.host_work(0.5)
    if not loop.other:
        with loop.gpu.capture() as replay:
            loop.gpu.work(9.0)
        loop.other = replay
    loop.other()
    loop.model(x).sum().backward()
    loop.update()


PACED = [
    (gpu_bound, {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}),
    # The device idles for 0.75 ms in each step, before the next forward.
    (blocking_copy, {"other": 1.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}),
    (waits_twice, {"loss": 1.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}),
    # Of 20 ms before the update, the device works for 12 ms and waits for 8.
    (host_bound, {"other": 1.0, "forward": 0.0, "optimizer": 0.8}),
    # The device works for 26 of 40 ms, and waits for 14 ms before the update.
    (accumulates, {"forward": 0.0, "backward": 0.0, "optimizer": 14 / 16}),
    (replays_graph, {"other": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}),
]


@pytest.mark.parametrize("drift", [0.0, 25e-6, -25e-6])
@pytest.mark.parametrize(("body", "host_paced"), PACED)
def test_pace_of_each_phase_is_exact(
    body: Body, host_paced: dict[str, float], drift: float, gpu: FakeGPU
) -> None:
    gpu.drift = drift
    summary = train(body, gpu)
    found = {name: summary.host_paced[name] for name in host_paced}
    # The steps after examined steps start with an idle device.
    assert found == pytest.approx(host_paced, abs=0.01)


def test_steps_that_alternate_have_the_mean_pace(gpu: FakeGPU) -> None:
    # Two steps take 52 ms, with the wait for the first, and the device works for 28.
    summary = train(alternates, gpu, n=400)
    idle_ms = summary.host_paced["optimizer"] * summary.rows["optimizer"].mean_ms
    assert idle_ms == pytest.approx(12.0, rel=0.01)


@pytest.mark.parametrize("every", [1, 7, "auto"])
def test_the_device_is_not_idle_behind_a_long_backlog(every: Any, gpu: FakeGPU) -> None:
    gpu.work(5_000.0)  # The host runs far ahead.
    summary = train(gpu_bound, gpu, n=200, every_n_steps=every)
    assert summary.host_paced == pytest.approx(
        {name: 0.0 if summary.rows[name].mean_ms else 1.0 for name in summary.host_paced}
    )
    assert summary.diagnosis.code == "GPU-bound"


def test_communication_that_the_device_waits_for_is_not_paced_by_the_host(
    gpu: FakeGPU, ranks: Any
) -> None:
    def body(loop: Loop, x: Tensor) -> None:
        loss = loop.model(x).sum()
        loss.backward()
        for parameter in loop.model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        loop.update()

    summary = train(body, gpu, sync_ranks=False)
    assert summary.host_paced["optimizer/comm"] == 0.0


def test_module_of_fully_shard_that_is_waited_for_has_a_line(
    gpu: FakeGPU, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    exec("def wait_for_unshard(self, wait):\n    wait()", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    group = SimpleNamespace(_module_fqn="blocks.7")

    def wait_for_module(*_: Any) -> None:
        vars(module)["wait_for_unshard"](group, reduce)

    model = Net(gpu)
    model.linear.register_forward_pre_hook(wait_for_module)
    model.linear.weight.register_hook(wait_for_module)
    summary = train(gpu_bound, gpu, model=model, sync_ranks=False)
    times = times_of(summary)
    of_module = {"forward/comm": (COMM_MS, 0.0), "backward/comm": (COMM_MS, 0.0)}
    assert times.pop("fully_shard of blocks.7") == of_module
    assert not any(name in of_module for phases in times.values() for name in phases)
    [row] = [row for row in summary.lines if row.function == "fully_shard of blocks.7"]
    assert str(row).startswith("`fully_shard of blocks.7` (called by wait_for_module ")


def test_the_host_waits_once_per_step_and_once_more_after_an_examined_step(gpu: FakeGPU) -> None:
    train(gpu_bound, gpu, n=30)
    # Steps 12, 15, 18 and 29 are examined; each wait is for one step.
    assert len(gpu.waits) <= 30


@pytest.mark.parametrize("is_waiting", [False, True])
def test_waits_for_the_gpu_are_not_work_of_the_host(gpu: FakeGPU, is_waiting: bool) -> None:
    def body(loop: Loop, x: Tensor) -> None:
        loop.gpu.host_work(2.0)
        gpu_bound(loop, x)
        if is_waiting:
            wait(loop.gpu)

    loop = Loop(gpu, Net(gpu))
    with hooks(loop, lines=True, every_n_steps=1) as timer:
        for x in timer.steps(batches(gpu, N, copy_ms=0.0)):
            body(loop, x)
    ledger = timer._results.ledger
    ledger.evaluate()
    # The GPU needs 14 ms, for which the timer waits, or the loop itself.
    assert ledger.busy_ms() == pytest.approx(2.0, abs=0.1)


# Lines


def test_function_that_is_ignored_while_another_runs_has_no_marks() -> None:
    marks, n_more = list[str](), [1]

    def often(_: int) -> None:
        pass

    def last() -> None:
        n_more[0] = 0  # Too many events: ignore the most frequent at the next.
        n_more[0] = 1

    def mark(line: Any, _: bool) -> None:
        marks.extend(function.code.co_name for function, _ in line.path)

    lines = watch.LineWatch(mark, lambda error: pytest.fail(repr(error)))
    lines.start(sys._getframe(), lambda _: n_more[0])
    try:
        [*map(often, range(200))]
        assert "often" in marks
        last()
        del marks[:]
        often(200)
    finally:
        lines.stop()
    assert "often" not in marks


def times_of(summary: Any, least_ms: float = 0.1) -> dict[str, dict[str, tuple[float, float]]]:
    """Return GPU-paced and host-paced time of the rows in steps, by function and phase."""
    return {
        row.function: {
            phase: (round(part.gpu_ms, 2), round(part.host_ms, 2))
            for phase, part in row.phases.items()
            if part.ms >= least_ms
        }
        for row in summary.lines
        if not row.entry and row.ms >= least_ms
    }


def line_of(function: Any, text: str) -> int:
    """Return the number of the line of a function with this text."""
    lines, first = inspect.getsourcelines(function)
    return next(first + i for i, line in enumerate(lines) if text in line)


def test_lines_of_forward_have_their_backward(gpu: FakeGPU) -> None:
    class Two(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = work(self.linear(x), self._gpu, 3.0, 6.0)
            return work(x, self._gpu, 1.0, 2.0)

    summary = train(gpu_bound, gpu, model=Two(gpu))
    rows = {row.line: row.phases for row in summary.lines if row.function == "Two.forward"}
    found = {
        line: {phase: part.gpu_ms for phase, part in phases.items()}
        for line, phases in rows.items()
    }
    assert found == {
        line_of(Two.forward, "3.0, 6.0"): pytest.approx({"forward": 3.0, "backward": 6.0}),
        line_of(Two.forward, "1.0, 2.0"): pytest.approx({"forward": 1.0, "backward": 2.0}),
    }


def test_the_headline_names_line_pace_and_gain(gpu: FakeGPU) -> None:
    summary = train(host_bound, gpu, n=400, every_n_steps="auto")
    number = line_of(host_bound, "30.0")
    assert summary.verdict == (
        f"host-bound: `host_bound` (test_ledger.py:{number}) keeps the GPU waiting for 28 ms of"
        " 50 ms per step (56 % of the training); without it the training is up to 2.27x as fast"
    )


def test_a_wait_counts_by_the_time_in_which_the_device_then_idles(gpu: FakeGPU) -> None:
    summary = train(blocking_copy, gpu, n=400, every_n_steps="auto")
    (row,) = (row for row in summary.lines if row.function == "wait" and not row.entry)
    # The wait itself takes the host 14 ms.
    assert (row.ms, row.idle_ms) == pytest.approx((0.75, 0.75), abs=1e-3)
    (advice,) = (item.text for item in summary.diagnosis.advice if item.code == "blocking_call")
    assert advice.endswith(
        "waits for the GPU, which then has no work for 0.75 ms of 14.8 ms per step: read the value"
        " less often, or later"
    )


@pytest.mark.parametrize("every_ms", [0.1, 0.0])
def test_line_whose_time_grows_is_named(gpu: FakeGPU, every_ms: float) -> None:
    def body(loop: Loop, x: Tensor) -> None:
        loop.gpu.host_work(5.0)
        loop.gpu.host_work(10.0 + every_ms * loop.number)
        loop.model(x).sum().backward()
        loop.update()

    summary = train(body, gpu, n=200, every_n_steps="auto")
    grown = {line.line: line for line in summary.lines if line.grew_to_ms}
    if not every_ms:
        assert not grown
        return
    (row,) = grown.values()
    assert row.line == line_of(body, "every_ms * loop.number")
    # From 11.5 ms in the steps 12, 15 and 18, in part of which the host may have waited.
    assert 5.0 < row.grew_from_ms < 12.0
    assert 20.0 < row.grew_to_ms < 30.0
    assert summary.diagnosis.advice[0].text.startswith(f"{row} grew from ")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ("batches", "a step has 4 backwards since then, and 1 before"),
        ("items", "a step has 8 items since then, and 2 before"),
        ("frozen", "backward computes gradients of 2 tensors since then, and 1 before"),
        ("nothing", ""),
    ],
)
def test_more_work_per_step_explains_a_slowdown(gpu: FakeGPU, changes: str, text: str) -> None:
    loop = Loop(gpu, Net(gpu))
    loop.model.linear.bias.requires_grad_(changes != "frozen")

    def next_batches() -> Iterator[Tensor]:
        for loop.number in range(800):
            is_late = loop.number >= 400
            x = torch.zeros(8 if changes == "items" and is_late else 2, 2)
            left = 4 if changes == "batches" and is_late else 1
            for loop.other in reversed(range(left)):  # Number of batches that follow in this step.
                yield x

    with hooks(loop, lines=True, accumulate_grad_batches="auto") as timer:
        for x in timer.steps(next_batches()):
            loop.model(x).sum().backward()
            if not loop.other:
                if loop.number >= 400:
                    gpu.work(30.0)
                    loop.model.linear.bias.requires_grad_(True)
                loop.update()
    summary = timer.summary()
    assert summary.slowdown is not None
    assert summary.measurement.work_change == text
    assert f": {text}\n" in str(summary) or not text
    assert ("steps got slower" in summary.verdict) == (not text)


@pytest.mark.parametrize(
    ("held", "named"),
    [
        ("", ""),
        ("head", "`backbone`"),
        ("head backbone.0", "`backbone.1`"),
        ("head backbone.0 backbone.1.weight", "`backbone.1.bias`"),
        ("head backbone", ""),
    ],
)
def test_gradients_that_no_optimizer_uses_are_named(gpu: FakeGPU, held: str, named: str) -> None:
    backbone = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.Sequential()
    model.add_module("backbone", backbone)
    model.add_module("head", nn.Linear(2, 2))
    kept = tuple(held.split())
    parameters = [value for name, value in model.named_parameters() if name.startswith(kept)]
    optimizer = torch.optim.SGD(parameters or [nn.Parameter(torch.zeros(1))], lr=0.0)

    def body(loop: Loop, x: Tensor) -> None:
        work(model(x), gpu, 1.0, 5.0).sum().backward()
        optimizer.step()

    loop = Loop(gpu, model)
    with GPUPhaseHooks(model, optimizer, lines=True, _clock=gpu) as timer:
        for x in timer.steps(batches(gpu, N, copy_ms=0.0)):
            body(loop, x)
    texts = [item.text for item in timer.summary().diagnosis.advice if "no optimizer" in item.text]
    assert texts == [
        f"backward computes gradients of {named}, which no optimizer has updated: call"
        " requires_grad_(False) on them before training"
    ] * bool(named)


call: Any = FakeGPU.host_work


def in_a_wrapper(function: Callable[[Any], float]) -> Callable[[Any], float]:
    @functools.wraps(function)
    def wrapper(kinds: Any) -> float:
        return function(kinds)

    return wrapper


class Kinds:
    """Code of many kinds that takes the host 20 ms."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu

    def busy(self, ms: float = 20.0) -> float:
        self.gpu.host_work(ms)
        return ms

    def parts(self) -> Iterator[int]:
        for i in range(4):
            self.gpu.host_work(5.0)
            yield i

    def descend(self, depth: int = 4) -> None:
        self.gpu.host_work(4.0)
        if depth:
            self.descend(depth - 1)

    async def answer(self) -> None:
        await asyncio.sleep(0)
        self.gpu.host_work(20.0)

    @in_a_wrapper
    def decorated(self) -> float:
        return self.busy()

    def __call__(self) -> float:
        return self.busy()

    def fails(self) -> None:
        self.gpu.host_work(20.0)
        raise ValueError

    def delegates(self) -> Iterator[int]:
        yield from self.parts()

    @property
    def value(self) -> float:
        return self.busy()


def catches(kinds: Kinds) -> None:
    with suppress(ValueError):
        kinds.fails()


def throws(kinds: Kinds) -> None:
    def waits() -> Iterator[None]:
        try:
            yield
        except ValueError:
            kinds.busy()

    generator = waits()
    next(generator)
    with pytest.raises(StopIteration):
        generator.throw(ValueError())  # type: ignore[attr-defined]


def in_a_thread(kinds: Kinds) -> None:
    thread = threading.Thread(target=kinds.parts)
    thread.start()
    thread.join()
    kinds.busy()


KINDS: list[tuple[str, Callable[[Kinds], object], str]] = [
    ("method", lambda kinds: kinds.busy(), "Kinds.busy"),
    ("generator", lambda kinds: sum(kinds.parts()), "Kinds.parts"),
    ("yield from", lambda kinds: [*kinds.delegates()], "Kinds.parts"),
    ("recursion", lambda kinds: kinds.descend(), "Kinds.descend"),
    ("async", lambda kinds: asyncio.run(kinds.answer()), "Kinds.answer"),
    ("decorator", lambda kinds: kinds.decorated(), "Kinds.busy"),
    ("callable object", lambda kinds: kinds(), "Kinds.busy"),
    ("property", lambda kinds: kinds.value, "Kinds.busy"),
    ("partial", lambda kinds: functools.partial(kinds.busy, 20.0)(), "Kinds.busy"),
    ("map, in C", lambda kinds: [*map(kinds.busy, (5.0, 15.0))], "Kinds.busy"),
    ("key function", lambda kinds: sorted((5.0, 15.0), key=kinds.busy), "Kinds.busy"),
    ("comprehension", lambda kinds: [call(kinds.gpu, 5.0) for _ in range(4)], "<lambda>"),
    ("generator expression", lambda kinds: any(call(kinds.gpu, 5.0) for _ in "abcd"), "<lambda>"),
    ("exception", catches, "Kinds.fails"),
    ("throw", throws, "Kinds.busy"),
    ("another thread runs", in_a_thread, "Kinds.busy"),
    ("exec", lambda kinds: exec("kinds.busy()", {"kinds": kinds}), "Kinds.busy"),
    ("eval of own work", lambda kinds: eval("k.gpu.host_work(20)", {"k": kinds}), "<lambda>"),
]


@pytest.mark.parametrize(
    ("run", "function"), [case[1:] for case in KINDS], ids=[c[0] for c in KINDS]
)
def test_code_of_any_kind_is_named(
    run: Callable[[Kinds], object], function: str, gpu: FakeGPU
) -> None:
    kinds = Kinds(gpu)

    def body(loop: Loop, x: Tensor) -> None:
        loop.model(x).sum().backward()
        run(kinds)
        loop.update()

    summary = train(body, gpu)
    (row,) = (row for row in summary.lines if not row.entry and row.host_ms > 1)
    assert row.function == function
    assert row.host_ms == pytest.approx(6.0, abs=0.5)
    assert row.path[-1].startswith(("body", "<lambda>", "Kinds", "catches", "waits", "in_a"))
    assert sys.gettrace() is None


SOURCE = """
def slow(gpu):
    gpu.host_work(1.0)
    gpu.host_work(20.0)
"""


@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("code.zip", "zipped_user_code.py:4"),
        ("ipykernel_71/37.py", "cell:4"),
        ("relative.py", "relative.py:4"),
        ("<stdin>", "<stdin>:4"),
    ],
)
def test_code_from_anywhere_is_named(
    file: str, where: str, gpu: FakeGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    if file == "code.zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("zipped_user_code.py", SOURCE)
        monkeypatch.syspath_prepend(str(tmp_path / file))
        scope = vars(importlib.import_module("zipped_user_code"))
    else:
        exec(compile(SOURCE, str(tmp_path / file) if "/" in file else file, "exec"), scope)

    def body(loop: Loop, x: Tensor) -> None:
        loop.model(x).sum().backward()
        scope["slow"](gpu)
        loop.update()

    summary = train(body, gpu)
    (row,) = (row for row in summary.lines if not row.entry and row.host_ms > 1)
    assert (row.function, row.where) == ("slow", where)


def test_modules_are_named_with_their_number(gpu: FakeGPU) -> None:
    class Block(Net):
        def forward(self, x: Tensor) -> Tensor:
            return work(self.linear(x), self._gpu, 3.0, 6.0)

    class Head(Net):
        def forward(self, x: Tensor) -> Tensor:
            return work(self.linear(x), self._gpu, 2.0, 4.0)

    model = nn.Sequential(Block(gpu), Block(gpu), Block(gpu), Head(gpu))
    summary = train(gpu_bound, gpu, model=model)
    assert {row.modules: round(row.ms, 2) for row in summary.lines if row.modules} == {
        "3 x Block": 27.0,
        "3": 6.0,
    }
    assert str(summary.lines[0]).startswith("`Block.forward` (3 x Block, test_ledger.py:")


class Block(Net):
    def forward(self, x: Tensor) -> Tensor:
        return work(self.linear(x), self._gpu, 3.0, 6.0)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


def test_recomputation_of_checkpointed_activations_is_a_row(gpu: FakeGPU) -> None:
    model = nn.Sequential(*[Checkpointed(gpu) for _ in range(4)])
    summary = train(gpu_bound, gpu, model=model)
    row = next(row for row in summary.lines if row.is_recomputed)
    number = line_of(Checkpointed.forward, "checkpoint(")
    assert str(row) == (
        f"recomputation of `Checkpointed.forward` (4 x Checkpointed, test_ledger.py:{number})"
    )
    assert (row.ms, row.main_phase) == (pytest.approx(12.0, rel=0.01), "backward")
    # A step takes 4 times 3 + 3 + 6 ms, and the update 2 ms.
    assert summary.verdict == (
        f"GPU-bound: {row} takes 12 ms of 50 ms per step (23 % of the training); without it the"
        " training is up to 1.31x as fast"
    )
    advice = summary.diagnosis.advice[0]
    assert advice.code == "recomputation"
    assert "turn activation checkpointing off there" in advice.text


class Encoder(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


class Decoder(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, x, use_reentrant=False)
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


def test_recomputation_of_a_function_is_divided_between_its_checkpoints(gpu: FakeGPU) -> None:
    model = nn.Sequential(Encoder(Block(gpu)), Decoder(Block(gpu)))
    summary = train(gpu_bound, gpu, model=model)
    rows = [row for row in summary.lines if row.is_recomputed]
    assert sorted((row.function, round(row.ms, 2)) for row in rows) == [
        ("Decoder.forward", 3.0),
        ("Decoder.forward", 3.0),
        ("Encoder.forward", 3.0),
    ]


def test_evaluation_inside_a_step_is_named_by_its_own_line(gpu: FakeGPU) -> None:
    def estimate(model: nn.Module, x: Tensor) -> None:
        with torch.no_grad():
            for _ in range(5):
                model(x)

    def body(loop: Loop, x: Tensor) -> None:
        gpu_bound(loop, x)
        estimate(loop.model, x)

    summary = train(body, gpu, model=nn.Sequential(Block(gpu), Block(gpu)))
    assert times_of(summary)["estimate"] == {"forward": (30.0, 0.0)}
    assert times_of(summary)["Block.forward"] == {"forward": (6.0, 0.0), "backward": (12.0, 0.0)}


def test_time_of_a_library_is_named_by_its_function(gpu: FakeGPU) -> None:
    summary = train(gpu_bound, gpu)
    number = line_of(gpu_bound, "update")
    row = next(row for row in summary.lines if row.function == "Adder.step")
    assert str(row) == f"`Adder.step` (called by gpu_bound (test_ledger.py:{number}))"
    assert times_of(summary)["Adder.step"] == {"optimizer": (2.0, 0.0)}


def test_code_outside_of_steps_is_named(gpu: FakeGPU) -> None:
    def evaluate() -> None:
        gpu.host_work(30.0)

    loop = Loop(gpu, Net(gpu))
    with hooks(loop, lines=True) as timer:
        for _ in range(3):
            for x in timer.steps([torch.ones(1, 2)] * 20):
                gpu_bound(loop, x)
            evaluate()
    between = [row for row in timer.summary().lines if row.entry == "between loops"]
    assert between[0].function == "evaluate"
    assert between[0].ms == pytest.approx(30.0)


def test_rows_say_how_often_they_run(gpu: FakeGPU) -> None:
    def body(loop: Loop, x: Tensor) -> None:
        loop.model(x).sum().backward()
        for _ in range(10):
            loop.gpu.host_work(2.0)
        loop.update()

    summary = train(body, gpu)
    row = next(row for row in summary.lines if row.function.endswith("body") and row.host_ms > 1)
    assert row.calls == 10


def test_short_lines_of_the_loop_are_one_row(gpu: FakeGPU) -> None:
    def body(loop: Loop, x: Tensor) -> None:
        loop.model(x).sum().backward()
        loop.gpu.work(0.1)
        loop.gpu.work(0.1)
        loop.gpu.work(0.1)
        loop.update()

    summary = train(body, gpu)
    (row,) = (row for row in summary.lines if row.is_rest)
    assert times_of(summary)[row.function] == {"optimizer": (0.3, 0.0)}


# Which steps


class SeesCalls(TorchFunctionMode):
    """A mode of the user, which is called in each call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_modes_of_the_user_see_no_call_of_the_timer(gpu: FakeGPU) -> None:
    def calls(*, timed: bool) -> list[Any]:
        model, criterion = nn.Linear(2, 2), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        timer = GPUPhaseHooks(model, optimizer, _clock=gpu, lines=True)
        with SeesCalls() as mode:
            if timed:
                timer.attach()
            mode.seen.clear()
            for x in timer.steps(batches(gpu, N)) if timed else batches(gpu, N):
                criterion(model(x), x).backward()
                optimizer.step()
                optimizer.zero_grad()
            seen = [*mode.seen]
            timer.remove()
        assert (timer.summary().measurement.examined_steps > 0) == timed
        return seen

    assert calls(timed=True) == calls(timed=False)


def test_without_lines_no_step_is_examined(gpu: FakeGPU) -> None:
    assert train(gpu_bound, gpu, lines=False).lines == ()


@pytest.mark.parametrize("n", [0, 3])
def test_deleted_timer_follows_no_code(gpu: FakeGPU, n: int) -> None:
    loop = Loop(gpu)
    timer = hooks(loop, lines=True).attach()
    for x in timer.steps(loop.batches(n)):
        loop.train(x)
    assert watch._running is not None  # Outside of steps.
    del timer
    gc.collect()
    assert watch._running is None
    hooks(loop).attach().remove()  # Removes the hooks of the deleted timer.


def test_another_tool_that_traces_is_left_alone(gpu: FakeGPU) -> None:
    if sys.version_info >= (3, 12):
        pytest.skip("lines come from sys.monitoring")

    def trace(*_: object) -> None:
        pass

    sys.settrace(trace)
    try:
        summary = train(host_bound, gpu)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(None)
    assert summary.lines == ()
    assert "not timed, because another tool, such as a debugger, traces the code" in str(summary)


# Nothing changes


EXAMINED = [
    pytest.param(case, front_end, id=f"{case.name}, {front_end}")
    for case in CASES
    for front_end in case.front_ends
    if front_end not in (SAMPLED, TRANSFORMERS)
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True", "ignore:`torch.jit")
@pytest.mark.parametrize(("case", "front_end"), EXAMINED)
def test_examined_steps_have_the_same_phases(
    case: Case, front_end: str, gpu: FakeGPU, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examiner, "_FIRST", (*range(2, 100),))
    loop = case.build(gpu)
    optimizers = loop.optimizers or [loop.optimizer]
    bare = hooks_of(loop.model), installed(*optimizers)
    run = run_plain if front_end in PLAIN else run_lightning
    timer: Any = run(case, loop, front_end, lines=True, every_n_steps=1)
    found = steps(timer)
    assert [{name: ms for name, ms in row.items() if ms} for row in found] == expected_steps(
        case, front_end
    )
    assert timer.summary().measurement.examined_steps or len(found) < 3
    assert (hooks_of(loop.model), installed(*optimizers)) == bare
    assert sys.gettrace() is None
