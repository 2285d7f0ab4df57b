from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, work
from fake_lightning import Loader, MemoryLogger, Model, fit, timer_of, trainer
from fake_loop import Logger, Loop, hooks
from torch import Tensor, nn

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._diagnosis.codes import GAPS
from lightning_gputime._instrumentation import work as counting
from lightning_gputime._instrumentation.peaks import peaks_tflops, precision_of
from lightning_gputime._instrumentation.work import Items

STEP = sum(STEP_MS.values())
FIRST = "the first dimension of the batch's first tensor"
LINEAR = 2 * 8 * 64 * 32
"""FLOPs of a linear layer of 64 times 32 on a batch of 8."""


def rows(*sizes: int) -> list[Tensor]:
    return [torch.ones(size, 2) for size in sizes]


def train(loop: Loop, batches: Any, **options: Any) -> GPUPhaseHooks:
    with hooks(loop, **options) as timer:
        for x in timer.steps(batches):
            loop.train(x)
    return timer


class Net(nn.Module):
    """A linear layer of 64 times 32 that takes 2 ms forward, and 4 ms backward."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.linear = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return work(self.linear(x), self.gpu, 2.0, 4.0)


def learn(model: nn.Module, batches: Any, gpu: FakeGPU, **options: Any) -> GPUPhaseHooks:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"warmup_steps": 0, "flops": (LINEAR / 8, LINEAR / 8), **options}
    with GPUPhaseHooks(model, optimizer, _clock=gpu, **options) as timer:
        for x in timer.steps(batches):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return timer


def items_of(timer: Any) -> list[float]:
    timer.flush()
    return [step.items for step in timer._results._steps.newest]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(counting, "peaks_tflops", lambda name: {"fp32": 1e-4})


# Items


def test_items_are_the_size_of_the_first_tensor_by_default(
    loop: Loop,
) -> None:
    logger = Logger()
    timer = train(loop, loop.batches(4), logger=logger, log_every_n_steps=2)
    per_s = 1000 / STEP
    assert timer.summary().items_per_sec == per_s
    assert f"64 items per second, counted by {FIRST}" in str(timer.summary())
    assert [metrics["phase_time/items_per_sec"] for _, metrics in logger.calls] == [per_s] * 2


def test_step_of_several_micro_batches_has_the_items_of_all(loop: Loop) -> None:
    with hooks(loop, accumulate_grad_batches=2) as timer:
        for number, x in enumerate(timer.steps(rows(8, 4, 8, 4, 5))):
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


def test_steps_that_are_not_timed_or_are_probed_have_no_items(loop: Loop) -> None:
    asked = []

    def items(batch: Tensor) -> int:
        asked.append(len(batch))
        return 4

    timer = train(loop, loop.batches(40), items=items, every_n_steps=4)
    assert len(asked) == timer.summary().steps == 10
    assert timer.summary().items_per_sec == 4000 / STEP
    timer = train(loop, loop.batches(40), items=4, probe_every_n_steps=5)
    assert timer.summary().probed_steps > 4
    assert len(items_of(timer)) == timer.summary().steps < 36
    assert set(items_of(timer)) == {4.0}


def test_loop_that_calls_step_has_items_only_by_a_number(loop: Loop) -> None:
    for items, expected in ((None, None), (32, 32_000 / STEP)):
        with hooks(loop, items=items) as timer:
            for x in loop.batches(4):
                loop.train(x)
                timer.step()
        assert timer.summary().items_per_sec == expected
    assert ", counted by items=32" in str(timer.summary())


Pair = namedtuple("Pair", "x y")


class LongDict(UserDict[str, Tensor]):
    """As a TensorDict: its length is that of the batch."""

    def __len__(self) -> int:
        return len(self.data["x"])


class Graphs:
    """As a batch of PyG: no mapping, and nothing that tells a size."""

    x = torch.ones(30, 4)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.ones(8, 2), 8),
        ((torch.ones(8, 2), torch.ones(8)), 8),
        ([[torch.ones(8, 2), torch.ones(8, 3)], torch.ones(8)], 8),
        ({"input_ids": torch.ones(8, 16), "labels": torch.ones(8)}, 8),
        (UserDict(input_ids=torch.ones(8, 16)), 8),
        (LongDict(x=torch.ones(128, 16), y=torch.ones(128)), 128),
        (Pair(torch.ones(8, 2), torch.ones(8)), 8),
        ({"name": ["a"] * 8, "x": (None, torch.ones(8, 2)), "scale": torch.tensor(2.0)}, 8),
        ((torch.ones(8, 2, device="meta"), 3), 8),
        (([torch.ones(3, 9, 9), torch.ones(3, 7, 7)], [{"boxes": torch.ones(5, 4)}]), None),
        ((torch.ones(1, 100), torch.ones(9)), None),
        ((torch.ones(20, 8), torch.ones(8)), None),
        (Graphs(), None),
        (None, None),
        ("text", None),
        (torch.tensor(3.0), None),
        ([torch.ones(2)] * 100, None),
    ],
    ids=lambda item: type(item).__name__,
)
def test_batches_of_any_kind_have_a_size_or_nan(batch: Any, expected: int | None) -> None:
    items = Items(None)
    found = [items.of(batch) for _ in range(3)]
    assert found == [expected] * 3 if expected else all(entry != entry for entry in found)


def test_items_follow_a_changing_kind_of_batch() -> None:
    items = Items(None)
    x = torch.ones(8, 2)
    batches = [(x, x), {"x": x[:4]}, x[:3], ((x[:2], x[:2]), x[:2]), [x, x], None, (x[:5], x[:5])]
    assert [items.of(batch) for batch in batches[:5]] == [8, 4, 3, 2, 8]
    assert items.of(batches[5]) != items.of(batches[5])
    assert items.of(batches[6]) == 5


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (
            torch.ones((), device="meta"),
            "on meta, and reading it would make the host wait",
        ),
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
    asked = []

    def items(batch: Tensor) -> Any:
        asked.append(1)
        return returned

    timer = train(loop, loop.batches(3), items=items)
    assert caplog.text.count(why) == 1
    assert len(asked) == 1
    assert timer.summary().items_per_sec is None
    assert "items per second" not in str(timer.summary())
    assert timer.summary().steps == 3


def test_training_and_validation_have_their_own_items_under_lightning(gpu: FakeGPU) -> None:
    class Batches(Loader):
        def __iter__(self) -> Any:
            for x in super().__iter__():
                yield x.repeat(3, 1)

    logger = MemoryLogger()
    timer = timer_of(gpu, items=None)
    runner = trainer(timer, logger=logger, log_every_n_steps=2)
    runner.fit(Model(gpu), Loader(gpu, 4), Batches(gpu, 2))
    logged = {key: value for _, metrics in logger.calls for key, value in metrics.items()}
    assert logged["phase_time/items_per_sec"] == 1000 / STEP
    val_ms = logged["phase_time/val/step_ms"]
    assert logged["phase_time/val/items_per_sec"] == pytest.approx(3000 / val_ms)
    assert timer._evaluations.means[0]["items_per_sec"] == logged["phase_time/val/items_per_sec"]


def test_items_number_is_not_used_in_validation(gpu: FakeGPU) -> None:
    logger = MemoryLogger()
    timer = timer_of(gpu, items=100)
    trainer(timer, logger=logger).fit(Model(gpu), Loader(gpu, 4), Loader(gpu, 2))
    logged = {key: value for _, metrics in logger.calls for key, value in metrics.items()}
    assert timer.summary().items_per_sec == 100_000 / STEP
    assert logged["phase_time/val/items_per_sec"] < 1000


def test_failing_items_function_warns_once_for_all_evaluations(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(batch: Tensor) -> int:
        raise KeyError("ids")

    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, items=fails)
    trainer(timer, max_epochs=3).fit(Model(gpu), Loader(gpu, 2), Loader(gpu, 2))
    # Once of training, once of validation.
    told = "Items are no longer counted, because the function items= failed: KeyError('ids')"
    assert [record.getMessage() for record in caplog.records if "Items" in record.msg] == [told] * 2


def test_batch_that_lightning_skips_has_no_items(gpu: FakeGPU) -> None:
    class Skips(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    timer = fit(gpu, Skips(gpu), n=4, max_epochs=2)
    assert items_of(timer) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        (
            {"items": "eight"},
            TypeError,
            "items must be the number of items in a batch, .* got 'eight'",
        ),
        ({"items": True}, TypeError, "got True"),
        ({"items": 0}, TypeError, "got 0"),
        ({"flops": "model"}, TypeError, "flops must be the FLOPs of .* got 'model'"),
        ({"flops": (1e9, 2e9, 3e9)}, TypeError, "as two"),
        ({"flops": -1}, TypeError, "got -1"),
    ],
)
def test_items_and_flops_of_a_wrong_type_are_refused(
    loop: Loop, options: Any, error: Any, why: str
) -> None:
    with pytest.raises(error, match=why):
        hooks(loop, **options)
    with pytest.raises(error, match=why):
        GPUPhaseTimer(**options)


# FLOPs


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("items", "flops", "expected", "of_phases"),
    [
        (None, 1e6, 8e6, (None, None)),
        (None, (1e6, 3e6), 32e6, (8e6 / 2e-3, 24e6 / 4e-3)),
        (lambda batch: batch.numel(), 1e6, 512e6, (None, None)),
        (2, (1e6, 0.5e6), 3e6, (2e6 / 2e-3, 1e6 / 4e-3)),
    ],
    ids=["one", "two", "of what a function counts", "of a number"],
)
def test_flops_are_those_of_an_item(
    gpu: FakeGPU, items: Any, flops: Any, expected: float, of_phases: Any
) -> None:
    logger = Logger()
    options = {"items": items, "flops": flops, "logger": logger, "log_every_n_steps": 2}
    summary = learn(Net(gpu), [torch.ones(8, 64)] * 4, gpu, **options).summary()
    work = summary.work
    assert work is not None
    assert work.tflops == pytest.approx(expected / 6e-3 / 1e12)
    assert summary.mfu == pytest.approx(expected / 6e-3 / 1e12 / 1e-4)
    assert "(of 0.0001 dense fp32 TFLOP/s)" in str(summary)
    [_, (_, metrics)] = logger.calls
    assert metrics["phase_time/mfu"] == pytest.approx(summary.mfu)
    for name, per_s in zip(("forward", "backward"), of_phases, strict=True):
        tflops = None if per_s is None else pytest.approx(per_s / 1e12)
        assert summary.rows[name].tflops == tflops
        assert metrics.get(f"phase_time/{name}_tflops") == tflops
    assert summary.rows["other"].tflops is None


@pytest.mark.usefixtures("h200")
def test_steps_with_unknown_items_are_left_out(gpu: FakeGPU) -> None:
    # The third takes longer, and has two sizes: either could be the number of items.
    batches = [torch.ones(8, 64), torch.ones(8, 64), (torch.ones(8, 64), torch.ones(3, 64))]

    class Either(Net):
        def forward(self, batch: Any) -> Tensor:
            is_long = isinstance(batch, tuple)
            self.gpu.work(6.0 * is_long)
            return super().forward(batch[0] if is_long else batch)

    summary = learn(Either(gpu), batches, gpu, flops=(1e6, 2e6)).summary()
    assert summary.steps == 3
    assert summary.items_per_sec == pytest.approx(8 / 6e-3)
    assert summary.mfu == pytest.approx(24e6 / 6e-3 / 1e12 / 1e-4)


def test_unknown_peak_shows_the_rate_and_the_reason(gpu: FakeGPU) -> None:
    timer = learn(Net(gpu), [torch.ones(8, 64)] * 3, gpu, flops=1e9)
    assert timer.summary().mfu is None
    assert "1.33 TFLOP/s of the model's work" in str(timer.summary())
    assert "the fp32 peak of a CPU is unknown: there is no MFU" in str(timer.summary())


def precision_in(gpu: FakeGPU, model: nn.Module, call: Callable[[Any], Tensor]) -> str:
    """Return the precision that a timer finds in a loop with a call of a model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, flops=1e6, warmup_steps=0) as timer:
        for x in timer.steps([torch.ones(8, 64)] * 3):
            call(x).float().mean().backward()
            optimizer.step()
    work = timer.summary().work
    assert work is not None
    return work.precision


@pytest.mark.parametrize("is_on", [True, False])
def test_precision_is_that_of_autocast_in_the_call(gpu: FakeGPU, is_on: bool) -> None:
    model = Net(gpu)

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            result: Tensor = model(x)
            return result

    # It may be on around the loop, and off inside.
    with torch.autocast("cpu", torch.bfloat16, enabled=not is_on):
        assert precision_in(gpu, model, call) == ("bf16" if is_on else "fp32")


@pytest.mark.parametrize("wrapped", [False, True])
def test_precision_is_that_of_autocast_inside_of_the_model(gpu: FakeGPU, wrapped: bool) -> None:
    model: Any = nn.Linear(64, 32)
    # As Accelerate has it.
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__).__get__(model)
    called: Any = torch.compile(model, backend="eager") if wrapped else model
    assert precision_in(gpu, called, called) == "bf16"


@pytest.mark.parametrize(
    ("dtype", "precision", "note"),
    [
        (torch.bfloat16, "bf16", "the bf16 peak of a CPU is unknown: there is no MFU"),
        (torch.float32, "", "MFU is unknown: no model call showed its precision"),
    ],
)
def test_compiled_training_step_has_the_precision_of_its_parameters(
    gpu: FakeGPU, dtype: torch.dtype, precision: str, note: str
) -> None:
    class Task(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2, dtype=dtype)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch.to(dtype)).float().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    timer = timer_of(gpu, flops=1e6)
    task: Any = torch.compile(Task(), backend="eager")
    work = fit(gpu, task, n=4, timer=timer).summary().work
    assert work is not None
    assert work.precision == precision
    assert work.note.startswith(note)


def test_flops_without_items_warn_once(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with hooks(loop, flops=1e6) as timer:
        for x in loop.batches(5):
            loop.train(x)
            timer.step()
    told = "the number of items in a batch is unknown: pass items="
    assert [(record.name, told in record.getMessage()) for record in caplog.records] == [
        ("lightning_gputime", True)
    ]
    assert "pass items=" in str(timer.summary())


# The peak


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 836.0),
        ("NVIDIA H200 NVL", "tf32", None),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA A100-PCIE-40GB", "bf16", 312.0),
        ("NVIDIA GH200 480GB", "bf16", 989.0),
        ("NVIDIA H100 NVL", "bf16", 835.0),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("Tesla T4", "fp16", 65.0),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("Some GPU", "bf16", None),
        ("NVIDIA H200", "fp64", None),
    ],
)
def test_peak_is_the_dense_one_of_the_data_sheet(
    name: str, precision: str, expected: float | None
) -> None:
    assert peaks_tflops(name).get(precision) == expected


def test_tf32_is_that_of_convolutions_where_they_hold_most_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def precision(*parts: nn.Module) -> str:
        return precision_of(nn.Sequential(*parts), torch.float32, torch.device("cuda"))

    least = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: least[0])
    products, convolutions = nn.Linear(8, 8), nn.Conv2d(8, 8, 3)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert precision(products) == "fp32"
        # As torch has it by default.
        assert precision(products, convolutions) == "tf32"
        assert precision(nn.Conv2d(8, 8, 1), nn.Linear(64, 64)) == "fp32"
        torch.set_float32_matmul_precision("high")
        assert precision(products) == "tf32"
        least[0] = (7, 5)
        assert precision(products) == precision(convolutions) == "fp32"
    finally:
        torch.set_float32_matmul_precision(before)


# Time breakdown to the peak


@pytest.mark.usefixtures("h200")
def test_time_breakdown_to_the_peak_adds_up(gpu: FakeGPU) -> None:
    model = Net(gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: gpu.work(1.0))
    with GPUPhaseHooks(
        model, optimizer, _clock=gpu, flops=1e6 / 8, items=8, warmup_steps=0, probe_every_n_steps=5
    ) as timer:
        for _ in timer.steps(range(40)):
            gpu.work(1.0)
            gpu.host_work(10.0)  # The device runs dry.
            model(torch.ones(8, 64)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    summary = timer.summary()
    breakdown = summary.time_breakdown
    assert breakdown is not None
    assert sum(row.share for row in breakdown.rows) == pytest.approx(1.0, abs=1e-12)
    step_ms = summary.step.mean_ms
    # 1 ms in `other`, 6 in the model, 1 in the update; and the device runs dry for 2, in the first
    # step for 9.
    shares = {row.name: row.share for row in breakdown.rows}
    assert shares[GAPS] == pytest.approx((2.0 + 7.0 / summary.steps) / step_ms)
    assert breakdown.peak_share == summary.mfu
    assert breakdown.unknown == ""
    assert "  at peak FLOP/s  " in str(summary)


@pytest.mark.usefixtures("h200")
def test_rate_above_the_peak_has_no_mfu(gpu: FakeGPU) -> None:
    timer = learn(Net(gpu), [torch.ones(8, 64)] * 9, gpu, flops=1e9, probe_every_n_steps=4)
    breakdown = timer.summary().time_breakdown
    assert breakdown is not None
    assert breakdown.peak_share is None
    assert "which is impossible: check flops and the precision" in str(timer.summary())


@pytest.mark.usefixtures("h200")
def test_saved_run_and_its_page_have_the_work(gpu: FakeGPU, tmp_path: Any) -> None:
    from lightning_gputime._output.page import page

    timer = learn(Net(gpu), [torch.ones(8, 64)] * 40, gpu, probe_every_n_steps=5)
    timer.save(tmp_path / "run.json")
    run = lightning_gputime.load(tmp_path / "run.json")
    assert run.summary().work == timer.summary().work
    assert run.environment.options["flops"] == [LINEAR / 8, LINEAR / 8]
    shown = page([run])
    assert "at the peak" in shown
    assert f"counted by {FIRST}".replace("'", "&#x27;") in shown
    both = page([run, run], lightning_gputime.compare(run, run)).count("at the peak")
    assert both > shown.count("at the peak") >= 1
