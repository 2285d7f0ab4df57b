"""Items and FLOPs per second, the MFU, and what they need: batch sizes, precision and peak."""

import math
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, work
from fake_lightning import Loader, MemoryLogger, Model, fit, timer_of, trainer
from fake_loop import Logger, Loop, hooks, train
from torch import Tensor, nn

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._instrumentation import work as counting
from lightning_gputime._instrumentation.work import Items, peaks_tflops, precision_of
from lightning_gputime._output.page import page

STEP = sum(STEP_MS.values())
DEFAULT_COUNT = "the first dimension of the batch's first tensor"
LINEAR_FLOPS = 2 * 64 * 32
"""FLOPs per item of a linear layer of 64 times 32."""


class Net(nn.Module):
    """A linear layer of 64 times 32 that takes 2 ms in forward and 4 ms in backward."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.linear = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return work(self.linear(x), self.gpu, 2.0, 4.0)


def train_net(model: nn.Module, batches: Any, gpu: FakeGPU, **options: Any) -> GPUPhaseHooks:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"warmup_steps": 0, "flops": (LINEAR_FLOPS, LINEAR_FLOPS), **options}
    with GPUPhaseHooks(model, optimizer, _clock=gpu, **options) as timer:
        for x in timer.steps(batches):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return timer


def train_calling_step(loop: Loop, n: int, **options: Any) -> GPUPhaseHooks:
    with hooks(loop, **options) as timer:
        for x in loop.batches(n):
            loop.train(x)
            timer.step()
    return timer


def items_of(timer: Any) -> list[float]:
    timer.flush()
    return [step.items for step in timer._results._steps.newest]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the device is an H200 with a peak of 100 MFLOP/s."""
    monkeypatch.setattr(counting, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(counting, "peaks_tflops", lambda name: {"fp32": 1e-4})


# Items


def test_default_items_are_the_first_dimension_of_the_first_tensor(loop: Loop) -> None:
    logger = Logger()
    timer = train(loop, 4, logger=logger, log_every_n_steps=2)
    per_s = 1000 / STEP
    assert timer.summary().items_per_sec == per_s
    assert f"64 items per second, counted by {DEFAULT_COUNT}" in str(timer.summary())
    assert [metrics["phase_time/items_per_sec"] for _, metrics in logger.calls] == [per_s] * 2


def test_items_of_micro_batches_add_up_in_a_step(loop: Loop) -> None:
    with hooks(loop, accumulate_grad_batches=2) as timer:
        for number, x in enumerate(timer.steps([torch.ones(size, 2) for size in (8, 4, 8, 4, 5)])):
            loop.micro_batch(x)
            if number % 2 or number == 4:
                loop.update()
    assert items_of(timer) == [12, 12, 5]


def test_pause_does_not_lower_the_item_rate(loop: Loop) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(4)):
            loop.train(x)
            with timer.paused():
                loop.gpu.work(100.0)
    assert timer.summary().items_per_sec == 1000 / STEP


def test_items_are_counted_neither_in_untimed_nor_in_examined_steps(loop: Loop) -> None:
    counted = []

    def items(batch: Tensor) -> int:
        counted.append(len(batch))
        return 4

    timer = train(loop, 40, items=items, every_n_steps=4)
    assert len(counted) == timer.summary().steps == 10
    assert timer.summary().items_per_sec == 4000 / STEP
    timer = train(loop, 40, items=4, lines=True)
    assert timer.summary().measurement.examined_steps == 4
    assert len(items_of(timer)) == timer.summary().steps == 32
    assert set(items_of(timer)) == {4.0}


def test_loop_that_calls_step_needs_a_number_of_items(loop: Loop) -> None:
    for items, expected in ((None, None), (32, 32_000 / STEP)):
        timer = train_calling_step(loop, 4, items=items)
        assert timer.summary().items_per_sec == expected
    assert ", counted by items=32" in str(timer.summary())


class SizedDict(UserDict[str, Tensor]):
    """A dict like TensorDict, whose length is the batch size."""

    def __len__(self) -> int:
        return len(self.data["x"])


class Graphs:
    """A batch like those of PyG: not a mapping, and without a batch size."""

    x = torch.ones(30, 4)


Pair = namedtuple("Pair", "x y")
X, Y = torch.ones(8, 2), torch.ones(8)
SIZED_8 = [
    *(X, (X, Y), [[X, torch.ones(8, 3)], Y], {"input_ids": torch.ones(8, 16), "labels": Y}),
    *(UserDict(input_ids=torch.ones(8, 16)), SizedDict(x=torch.ones(8, 16), y=Y), Pair(X, Y)),
    {"name": ["a"] * 8, "x": (None, X), "scale": torch.tensor(2.0)},
    (torch.ones(8, 2, device="meta"), 3),
]
WITHOUT_SIZE = [
    (([torch.ones(3, 9, 9), torch.ones(3, 7, 7)], [{"boxes": torch.ones(5, 4)}])),
    *((torch.ones(1, 100), torch.ones(9)), (torch.ones(20, 8), Y), [torch.ones(2)] * 100),
    *(Graphs(), None, "text", torch.tensor(3.0)),
]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [*((batch, 8) for batch in SIZED_8), *((batch, math.nan) for batch in WITHOUT_SIZE)],
    ids=lambda item: type(item).__name__,
)
def test_items_of_a_batch_are_its_size_or_nan(batch: Any, expected: float) -> None:
    items = Items(None)
    # The structure of batches may change.
    found = [items.of(each) for each in (batch, batch, {"other": X[:5]}, batch)]
    assert found == pytest.approx([expected, expected, 5, expected], abs=0.0, nan_ok=True)


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (torch.ones((), device="meta"), "on meta, and reading it would make the host wait"),
        ("8", "must return a number, got '8'"),
        (None, "must return a number, got None"),
        (True, "must return a number, got True"),
        (-1, "must return a finite number of 0 or more, got -1"),
        (float("nan"), "must return a finite number"),
    ],
)
def test_items_function_without_a_number_warns_once(
    loop: Loop, caplog: pytest.LogCaptureFixture, returned: Any, why: str
) -> None:
    counted = []

    def items(batch: Tensor) -> Any:
        counted.append(1)
        return returned

    timer = train(loop, 3, items=items)
    assert caplog.text.count(why) == 1
    assert len(counted) == 1
    assert timer.summary().items_per_sec is None
    assert "items per second" not in str(timer.summary())
    assert timer.summary().steps == 3


@pytest.mark.parametrize(("items", "per_step"), [(None, 1), (100, 100)])
def test_training_and_validation_have_separate_items_under_lightning(
    gpu: FakeGPU, items: int | None, per_step: int
) -> None:
    class Batches(Loader):
        def __iter__(self) -> Any:
            for x in super().__iter__():
                yield x.repeat(3, 1)

    logger = MemoryLogger()
    timer = timer_of(gpu, items=items)
    runner = trainer(timer, logger=logger, log_every_n_steps=2)
    runner.fit(Model(gpu), Loader(gpu, 4), Batches(gpu, 2))
    logged = {key: value for _, metrics in logger.calls for key, value in metrics.items()}
    assert timer.summary().items_per_sec == 1000 * per_step / STEP
    assert logged["phase_time/items_per_sec"] == 1000 * per_step / STEP
    # A fixed number of items is not used in validation, whose batches have another size.
    val_per_sec = 3000 / logged["phase_time/val/step_ms"]
    assert logged["phase_time/val/items_per_sec"] == pytest.approx(val_per_sec)
    assert timer._evaluations.means[0]["items_per_sec"] == logged["phase_time/val/items_per_sec"]


def test_failing_items_function_warns_once_for_all_evaluations(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(batch: Tensor) -> int:
        raise KeyError("ids")

    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, items=fail)
    trainer(timer, max_epochs=3).fit(Model(gpu), Loader(gpu, 2), Loader(gpu, 2))
    # One warning for training, one for validation.
    text = "Items are no longer counted, because the function items= failed: KeyError('ids')"
    assert [message for message in caplog.messages if "Items" in message] == [text] * 2


def test_items_of_a_batch_that_lightning_skips_are_not_counted(gpu: FakeGPU) -> None:
    class Skips(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    timer = fit(gpu, Skips(gpu), n=4, max_epochs=2)
    assert items_of(timer) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"items": "eight"}, "items must be the number of items in a batch, .* got 'eight'"),
        ({"items": True}, "got True"),
        ({"items": 0}, "got 0"),
        ({"flops": "model"}, "flops must be None, or the FLOPs per .* got 'model'"),
        ({"flops": (1e9, 2e9, 3e9)}, "as two"),
        ({"flops": -1}, "got -1"),
    ],
)
def test_items_and_flops_of_a_wrong_type_are_refused(loop: Loop, options: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        hooks(loop, **options)
    with pytest.raises(TypeError, match=why):
        GPUPhaseTimer(**options)


# FLOPs


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("items", "flops", "step_flops", "phases_flop_per_s"),
    [
        (None, 1e6, 8e6, (None, None)),
        (None, (1e6, 3e6), 32e6, (8e6 / 2e-3, 24e6 / 4e-3)),
        (lambda batch: batch.numel(), 1e6, 512e6, (None, None)),
        (2, (1e6, 0.5e6), 3e6, (2e6 / 2e-3, 1e6 / 4e-3)),
    ],
    ids=["in total", "forward and backward", "items by a function", "items by a number"],
)
def test_flops_per_item_give_mfu_and_tflops(
    gpu: FakeGPU, items: Any, flops: Any, step_flops: float, phases_flop_per_s: Any
) -> None:
    logger = Logger()
    options = {"items": items, "flops": flops, "logger": logger, "log_every_n_steps": 2}
    summary = train_net(Net(gpu), [torch.ones(8, 64)] * 4, gpu, **options).summary()
    work = summary.work
    assert work is not None
    assert work.tflops == pytest.approx(step_flops / 6e-3 / 1e12)
    assert summary.mfu == pytest.approx(step_flops / 6e-3 / 1e12 / 1e-4)
    assert "(of 0.0001 dense fp32 TFLOP/s)" in str(summary)
    [_, (_, metrics)] = logger.calls
    assert metrics["phase_time/mfu"] == pytest.approx(summary.mfu)
    for name, per_s in zip(("forward", "backward"), phases_flop_per_s, strict=True):
        tflops = None if per_s is None else pytest.approx(per_s / 1e12)
        assert summary.rows[name].tflops == tflops
        assert metrics.get(f"phase_time/{name}_tflops") == tflops
    assert summary.rows["other"].tflops is None


@pytest.mark.usefixtures("h200")
def test_rates_leave_out_steps_with_unknown_items(gpu: FakeGPU) -> None:
    class PairNet(Net):
        def forward(self, batch: Any) -> Tensor:
            is_pair = isinstance(batch, tuple)
            self.gpu.work(6.0 * is_pair)
            return super().forward(batch[0] if is_pair else batch)

    # The third batch takes longer, and its items are unknown: its tensors have different sizes.
    batches = [torch.ones(8, 64), torch.ones(8, 64), (torch.ones(8, 64), torch.ones(3, 64))]
    summary = train_net(PairNet(gpu), batches, gpu, flops=(1e6, 2e6)).summary()
    assert summary.steps == 3
    assert summary.items_per_sec == pytest.approx(8 / 6e-3)
    assert summary.mfu == pytest.approx(24e6 / 6e-3 / 1e12 / 1e-4)


def test_unknown_peak_shows_the_rate_and_the_reason(gpu: FakeGPU) -> None:
    timer = train_net(Net(gpu), [torch.ones(8, 64)] * 3, gpu, flops=1e9)
    assert timer.summary().mfu is None
    assert "1.33 TFLOP/s of the model's work" in str(timer.summary())
    assert "the fp32 peak of a CPU is unknown, so the MFU is unavailable" in str(timer.summary())


def precision_in(gpu: FakeGPU, model: nn.Module, call: Callable[[Any], Any]) -> str:
    """Return the precision that a timer detects in a loop that calls a model by `call`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, flops=1e6, warmup_steps=0) as timer:
        for x in timer.steps([torch.ones(8, 64)] * 3):
            call(x).float().mean().backward()
            optimizer.step()
    work = timer.summary().work
    assert work is not None
    return work.precision


@pytest.mark.parametrize(
    ("calls", "precision"),
    [([True] * 3, "bf16"), ([False] * 3, "fp32"), ([True, False, False], "bf16")],
    ids=["autocast", "no autocast", "autocast in the first call"],
)
def test_precision_follows_autocast_around_the_first_call(
    gpu: FakeGPU, calls: list[bool], precision: str
) -> None:
    model, is_on = Net(gpu), iter(calls)

    def call(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=next(is_on)):
            return model(x)

    # The loop has the opposite setting around it.
    with torch.autocast("cpu", torch.bfloat16, enabled=not calls[0]):
        assert precision_in(gpu, model, call) == precision


@pytest.mark.parametrize("is_compiled", [False, True])
def test_precision_follows_autocast_inside_the_model(gpu: FakeGPU, is_compiled: bool) -> None:
    model: Any = nn.Linear(64, 32)
    # Accelerate replaces `forward` like this.
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__).__get__(model)
    called: Any = torch.compile(model, backend="eager") if is_compiled else model
    assert precision_in(gpu, called, called) == "bf16"


@pytest.mark.parametrize(
    ("dtype", "precision", "note"),
    [
        (torch.bfloat16, "bf16", "the bf16 peak of a CPU is unknown, so the MFU is unavailable"),
        (
            torch.float32,
            "",
            "MFU is unknown, because the precision of the model could not be detected",
        ),
    ],
)
def test_compiled_training_step_has_the_precision_of_its_parameters(
    gpu: FakeGPU, dtype: torch.dtype, precision: str, note: str
) -> None:
    class Task(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.net.linear(batch.to(dtype)).float().mean()

    task: Any = torch.compile(Task(gpu).to(dtype), backend="eager")
    work = fit(gpu, task, n=4, timer=timer_of(gpu, flops=1e6)).summary().work
    assert work is not None
    assert work.precision == precision
    assert work.note.startswith(note)


def test_flops_without_items_warn_once(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    timer = train_calling_step(loop, 5, flops=1e6)
    [record] = caplog.records
    assert record.name == "lightning_gputime"
    assert "the number of items in a batch is unknown: pass items=" in record.getMessage()
    assert "pass items=" in str(timer.summary())


# The peak


PEAKS = """
    989.4   bf16  NVIDIA H200
    836.0   bf16  NVIDIA H200 NVL
    None    tf32  NVIDIA H200 NVL
    494.7   tf32  NVIDIA H100 80GB HBM3
    756.0   bf16  NVIDIA H100 PCIe
    312.0   bf16  NVIDIA A100-SXM4-80GB
    19.5    fp32  NVIDIA A100 80GB PCIe
    312.0   bf16  NVIDIA A100-PCIE-40GB
    989.0   bf16  NVIDIA GH200 480GB
    835.0   bf16  NVIDIA H100 NVL
    None    bf16  NVIDIA GeForce RTX 3090 Ti
    125.0   bf16  NVIDIA A10
    None    bf16  NVIDIA A10G
    121.0   bf16  NVIDIA L4
    362.0   bf16  NVIDIA L40S
    65.0    fp16  Tesla T4
    None    bf16  Tesla T4
    125.0   fp16  Tesla V100-SXM2-16GB
    165.2   bf16  NVIDIA GeForce RTX 4090
    None    bf16  NVIDIA GeForce RTX 4090 Laptop GPU
    2250.0  bf16  NVIDIA B200
    2500.0  bf16  NVIDIA GB200
    1307.4  bf16  AMD Instinct MI300X
    None    bf16  NVIDIA H100 80GB HBM3 MIG 1g.10gb
    None    bf16  Some GPU
    None    fp64  NVIDIA H200
"""


@pytest.mark.parametrize("row", PEAKS.strip().splitlines())
def test_peak_flops_are_the_dense_peaks_of_the_data_sheets(row: str) -> None:
    expected, precision, name = row.split(maxsplit=2)
    assert str(peaks_tflops(name).get(precision)) == expected


def test_precision_is_tf32_if_convolutions_have_most_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def precision(*parts: nn.Module) -> str:
        return precision_of(nn.Sequential(*parts), torch.float32, torch.device("cuda"))

    capability = Mock(return_value=(8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    linear, convolution = nn.Linear(8, 8), nn.Conv2d(8, 8, 3)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert precision(linear) == "fp32"
        # By default torch allows TF32 in convolutions, but not in matrix products.
        assert precision(linear, convolution) == "tf32"
        assert precision(nn.Conv2d(8, 8, 1), nn.Linear(64, 64)) == "fp32"
        torch.set_float32_matmul_precision("high")
        assert precision(linear) == "tf32"
        capability.return_value = (7, 5)
        assert precision(linear) == precision(convolution) == "fp32"
    finally:
        torch.set_float32_matmul_precision(before)


# Time breakdown to the peak


@pytest.mark.usefixtures("h200")
def test_time_breakdown_to_the_peak_adds_up(gpu: FakeGPU) -> None:
    model = Net(gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: gpu.work(1.0))
    options: dict[str, Any] = {"flops": 1e6 / 8, "items": 8, "warmup_steps": 0, "lines": False}
    with GPUPhaseHooks(model, optimizer, _clock=gpu, **options) as timer:
        for _ in timer.steps(range(40)):
            gpu.work(1.0)
            gpu.host_work(10.0)  # Meanwhile the device becomes idle.
            model(torch.ones(8, 64)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    summary = timer.summary()
    breakdown = summary.time_breakdown
    assert breakdown is not None
    assert sum(row.share for row in breakdown.rows) == pytest.approx(1.0, abs=1e-12)
    assert summary.mfu is not None
    assert breakdown.peak_share == summary.mfu * breakdown.steps_share
    assert breakdown.unknown == ""
    assert "  at peak FLOP/s  " in str(summary)


@pytest.mark.usefixtures("h200")
def test_rate_above_the_peak_has_no_mfu(gpu: FakeGPU) -> None:
    timer = train_net(Net(gpu), [torch.ones(8, 64)] * 9, gpu, flops=1e9)
    breakdown = timer.summary().time_breakdown
    assert breakdown is not None
    assert breakdown.peak_share is None
    assert "which is impossible: check flops and the precision" in str(timer.summary())


@pytest.mark.usefixtures("h200")
def test_saved_run_and_its_page_keep_items_and_flops(gpu: FakeGPU, tmp_path: Any) -> None:
    timer = train_net(Net(gpu), [torch.ones(8, 64)] * 40, gpu)
    timer.save(tmp_path / "run.json")
    run = lightning_gputime.load(tmp_path / "run.json")
    assert run.summary().work == timer.summary().work
    assert run.environment.options["flops"] == [LINEAR_FLOPS, LINEAR_FLOPS]
    shown = page([run])
    assert "at the peak" in shown
    assert f"counted by {DEFAULT_COUNT}".replace("'", "&#x27;") in shown
    n_of_two = page([run, run], lightning_gputime.compare(run, run)).count("at the peak")
    assert n_of_two > shown.count("at the peak") >= 1
