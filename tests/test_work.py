import logging
import random
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_gpu import STEP_MS, FakeGPU, work
from fake_lightning import Loader, MemoryLogger, Model, fit, trainer
from fake_loop import Logger, Loop, hooks
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._results.advice import GAPS, GPU_WORK
from lightning_gputime._work import peaks
from lightning_gputime._work import work as counting
from lightning_gputime._work.peaks import dtype_of_call, peak_tflops, precision_of
from lightning_gputime._work.work import Items

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
    options = {"warmup_steps": 0, "flops": "count", **options}
    with GPUPhaseHooks(model, optimizer, _clock=gpu, **options) as timer:
        for x in timer.steps(batches):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return timer


def loads(timer: Any) -> list[tuple[float, ...]]:
    timer.flush()
    return [step.work_counts for step in timer._results._newest]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(peaks, "peak_tflops", lambda name, precision: 1e-4)


# Items


def test_the_items_of_a_batch_are_the_size_of_its_first_tensor_and_the_table_says_so(
    loop: Loop,
) -> None:
    logger = Logger()
    timer = train(loop, loop.batches(4), logger=logger, log_every_n_steps=2)
    per_s = 1000 / STEP
    assert timer.summary().items_per_sec == per_s
    assert f"64 items per second, counted by {FIRST}" in str(timer.summary())
    assert [metrics["phase_time/items_per_sec"] for _, metrics in logger.calls] == [per_s] * 2


def test_unequal_batches_count_as_they_are(loop: Loop) -> None:
    timer = train(loop, rows(8, 8, 3))
    assert [items for (items,) in loads(timer)] == [8, 8, 3]
    step_ms = timer.history()["step_ms"].sum()
    assert timer.summary().items_per_sec == pytest.approx(19 / step_ms * 1000)


def test_a_step_of_several_micro_batches_has_the_items_of_all(loop: Loop) -> None:
    with hooks(loop, accumulate_grad_batches=2) as timer:
        for number, x in enumerate(timer.steps(rows(8, 4, 8, 4, 5))):
            loop.micro_batch(x)
            if number % 2 or number == 4:
                loop.update()
    assert loads(timer) == [(12.0,), (12.0,), (5.0,)]


def test_what_a_pause_takes_is_no_time_of_the_items(loop: Loop) -> None:
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
    assert len(loads(timer)) == timer.summary().steps < 36
    assert set(loads(timer)) == {(4.0,)}


def test_a_loop_that_calls_step_has_items_only_by_a_number(loop: Loop) -> None:
    for items, expected in ((None, None), (32, 32_000 / STEP)):
        with hooks(loop, items=items) as timer:
            for x in loop.batches(4):
                loop.train(x)
                timer.step()
        assert timer.summary().items_per_sec == expected
    assert ", counted by items=32" in str(timer.summary())


def test_a_loop_that_is_left_has_the_items_of_its_last_step(loop: Loop) -> None:
    with hooks(loop) as timer:
        for number, x in enumerate(timer.steps(rows(8, 8, 6, 8))):
            loop.train(x)
            if number == 2:
                break
    assert loads(timer) == [(8.0,), (8.0,), (6.0,)]


def test_an_epoch_that_is_broken_off_leaves_no_items_to_the_next(loop: Loop) -> None:
    with hooks(loop, accumulate_grad_batches=2) as timer:
        for _ in range(2):
            for number, x in enumerate(timer.steps(rows(8, 4, 2))):
                loop.micro_batch(x)
                if number % 2:
                    loop.update()
    assert loads(timer) == [(12.0,), (12.0,)]


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
    ids=lambda one: type(one).__name__,
)
def test_batches_of_any_kind_have_their_size_or_none(batch: Any, expected: int | None) -> None:
    items = Items(None)
    found = [items.of(batch) for _ in range(3)]
    assert found == [expected] * 3 if expected else all(one != one for one in found)


def test_a_loop_whose_batches_change_their_kind_is_followed() -> None:
    items = Items(None)
    x = torch.ones(8, 2)
    batches = [(x, x), {"x": x[:4]}, x[:3], ((x[:2], x[:2]), x[:2]), [x, x], None, (x[:5], x[:5])]
    assert [items.of(batch) for batch in batches[:5]] == [8, 4, 3, 2, 8]
    assert items.of(batches[5]) != items.of(batches[5])
    assert items.of(batches[6]) == 5


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (torch.ones((), device="meta"), "a tensor on meta, and to read it the host would wait"),
        ("8", "must return a number, got '8'"),
        (None, "must return a number, got None"),
        (True, "must return a number, got True"),
        (-1, "must return a finite number of 0 or more, got -1"),
        (float("nan"), "must return a finite number"),
    ],
)
def test_a_function_that_tells_no_number_is_told_of_once_and_asked_no_more(
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


def test_a_function_that_raises_ends_no_training(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    timer = train(loop, loop.batches(3), items=lambda batch: batch["x"])
    assert timer.summary().steps == 3
    assert caplog.text.count("because items failed") == 1


def test_steps_whose_items_are_not_known_are_left_out(loop: Loop) -> None:
    sizes = iter([4, 4, float("nan"), 4])
    timer = train(loop, loop.batches(4))
    for record, size in zip(timer._results._newest, sizes, strict=True):
        assert record.work_counts == (1.0,)
        timer._results.sums.add_work([(size,)], [10.0], {})
    assert timer._results.sums.items == 4 + 12
    assert timer._results.sums.items_ms == 4 * STEP + 30


def test_training_and_validation_have_their_own_items_under_lightning(gpu: FakeGPU) -> None:
    class Batches(Loader):
        def __iter__(self) -> Any:
            for x in super().__iter__():
                yield x.repeat(3, 1)

    logger = MemoryLogger()
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0, items=None)
    runner = trainer(timer, logger=logger, log_every_n_steps=2)
    runner.fit(Model(gpu), Loader(gpu, 4), Batches(gpu, 2))
    logged = {key: value for _, metrics in logger.calls for key, value in metrics.items()}
    assert logged["phase_time/items_per_sec"] == 1000 / STEP
    val_ms = logged["phase_time/val/step_ms"]
    assert logged["phase_time/val/items_per_sec"] == pytest.approx(3000 / val_ms)
    assert timer._evaluations.means[0]["items_per_sec"] == logged["phase_time/val/items_per_sec"]


def test_a_number_of_items_is_not_taken_for_validation(gpu: FakeGPU) -> None:
    logger = MemoryLogger()
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0, items=100)
    trainer(timer, logger=logger).fit(Model(gpu), Loader(gpu, 4), Loader(gpu, 2))
    logged = {key: value for _, metrics in logger.calls for key, value in metrics.items()}
    assert timer.summary().items_per_sec == 100_000 / STEP
    assert logged["phase_time/val/items_per_sec"] < 1000


def test_a_batch_that_lightning_skips_has_no_items(gpu: FakeGPU) -> None:
    class Skips(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    timer = fit(gpu, Skips(gpu), n=4, max_epochs=2)
    assert loads(timer) == [(1.0,)] * 4


def test_accumulated_batches_are_added_up_under_lightning(gpu: FakeGPU) -> None:
    timer = fit(gpu, Model(gpu), n=5, accumulate_grad_batches=2)
    assert loads(timer) == [(2.0,), (2.0,), (1.0,)]


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"items": "eight"}, TypeError, "items must be a function of the batch, .* got 'eight'"),
        ({"items": True}, TypeError, "got True"),
        ({"items": 0}, TypeError, "got 0"),
        ({"flops": "model"}, TypeError, "flops must be 'count', .* got 'model'"),
        ({"flops": (1e9, 2e9, 3e9)}, TypeError, "as two"),
        ({"flops": -1}, TypeError, "got -1"),
    ],
)
def test_wrong_options_fail_at_once(loop: Loop, options: Any, error: Any, why: str) -> None:
    with pytest.raises(error, match=why):
        hooks(loop, **options)
    with pytest.raises(error, match=why):
        GPUPhaseTimer(**options)


# FLOPs


def test_flops_are_those_of_the_formula_and_known_after_the_first_step(gpu: FakeGPU) -> None:
    timer = learn(Net(gpu), [torch.ones(8, 64)] * 4, gpu)
    [first, *others] = loads(timer)
    assert first[0] == 8
    assert all(one != one for one in first[1:])
    # The input needs no gradient: backward has that of the weight alone.
    assert others == [(8, 2 * LINEAR, LINEAR, LINEAR)] * 3
    summary = timer.summary()
    assert summary.rows["forward"].tflops == LINEAR / 2e-3 / 1e12
    assert summary.rows["backward"].tflops == LINEAR / 4e-3 / 1e12
    assert summary.rows["other"].tflops is None
    assert summary.mfu is None
    assert "no fp32 peak is known of a CPU: there is no MFU" in str(summary)


@pytest.mark.usefixtures("h200")
def test_mfu_is_held_against_the_peak_and_logged(gpu: FakeGPU) -> None:
    logger = Logger()
    timer = learn(Net(gpu), [torch.ones(8, 64)] * 4, gpu, logger=logger, log_every_n_steps=2)
    rate = 2 * LINEAR / 6e-3 / 1e12
    assert timer.summary().mfu == pytest.approx(rate / 1e-4)
    work = timer.summary().work
    assert work is not None
    assert work.hfu == work.mfu
    [_, (_, metrics)] = logger.calls
    assert metrics["phase_time/mfu"] == pytest.approx(rate / 1e-4)
    assert metrics["phase_time/forward_tflops"] == LINEAR / 2e-3 / 1e12
    assert "phase_time/hfu" not in metrics


def test_calls_of_several_shapes_are_counted_each_and_added_up(gpu: FakeGPU) -> None:
    batches = [torch.ones(n, 64) for n in (8, 4, 8, 4, 8, 4)]
    timer = learn(Net(gpu), batches, gpu, accumulate_grad_batches=1)
    assert [load[2] for load in loads(timer)][2:] == [LINEAR, LINEAR / 2] * 2
    timer = learn(Net(gpu), batches, gpu, accumulate_grad_batches="auto")
    assert [load[2] for load in loads(timer)][2:] == [LINEAR, LINEAR / 2] * 2


def test_steps_of_shapes_beyond_the_bound_are_not_known_and_that_is_said(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    bound = counting._MAX_CALLS
    batches = [torch.ones(n, 64) for n in [*range(1, bound + 4), 8]]
    timer = learn(Net(gpu), batches, gpu)
    flops = [load[2] for load in loads(timer)]
    assert [str(one) for one in flops[bound:-1]] == ["nan"] * 3
    assert flops[-1] == LINEAR
    assert caplog.text.count(f"in more than {bound} ways") == 1
    assert "pass flops=" in str(timer.summary())


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_is_told_apart(gpu: FakeGPU, reentrant: bool) -> None:
    class Again(Net):
        def __init__(self, gpu: FakeGPU) -> None:
            super().__init__(gpu)
            self.first = nn.Linear(64, 64)
            self.last = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(self.first(x))
            result: Tensor = checkpoint(self.last, x, use_reentrant=reentrant)
            return result

    timer = learn(Again(gpu), [torch.ones(8, 64)] * 4, gpu)
    forward = 2 * LINEAR + LINEAR + 2 * LINEAR
    model = 3 * forward - 2 * LINEAR  # No gradient of the batch.
    # The kind that is not reentrant stops where it has all that it needs: before the last layer.
    again = 2 * LINEAR if reentrant else LINEAR
    assert loads(timer)[-1] == (8, model, forward, model - forward + again)
    work = timer.summary().work
    assert work is not None
    assert work.mfu is not None
    assert work.hfu == pytest.approx(work.mfu * (model + again) / model)
    assert "(includes recomputation)" in str(timer.summary())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", ["no", "wrapped", "in place", "inside"])
def test_a_gpt_is_counted_to_the_formula_compiled_or_not(gpu: FakeGPU, compiled: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(4, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            result: Tensor = self.proj(y.transpose(1, 2).reshape(4, 16, 32))
            return result

    net: Any = nn.Sequential(nn.Embedding(50, 32), Attention(), Attention(), nn.Linear(32, 50))
    if compiled == "wrapped":
        net = torch.compile(net, backend="eager")
    elif compiled == "in place":
        net.compile(backend="eager")
    elif compiled == "inside":
        net[1] = torch.compile(net[1], backend="eager")
    timer = learn(net, [torch.ones(4, 16, dtype=torch.long)] * 3, gpu)
    tokens, parameters = 4 * 16, 2 * (32 * 96 + 32 * 32) + 32 * 50
    # Per token 6 for each parameter of a matmul, and 12 times layers, length and width, as if
    # attention saw all: so MFU is commonly counted.
    model = (6 * parameters + 12 * 2 * 16 * 32) * tokens
    scores = 2 * 2 * 16 * 32 * tokens
    assert loads(timer)[-1] == (4, model, model / 3, model * 2 / 3 + scores)


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_with_fewer_heads_of_keys_is_counted(gpu: FakeGPU, heads: int) -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 16 * n) for n in (4, heads, heads))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                of(x).unflatten(-1, (-1, 16)).transpose(1, 2) for of in (self.q, self.k, self.v)
            )
            return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    timer = learn(Grouped(), [torch.ones(2, 8, 64)] * 3, gpu)
    scores, linear = 2 * 2 * 4 * 8 * 8 * 16, 2 * 2 * 8 * 64 * 16 * (4 + 2 * heads)
    assert loads(timer)[-1][1:3] == (2 * linear + 6 * scores, linear + 2 * scores)


def test_counting_changes_nothing_in_the_model_the_losses_or_random_numbers(gpu: FakeGPU) -> None:
    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.5))
            self.calls, self.seen = 0, list[float]()
            self.cache: Any = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(random.random() + np.random.rand())
            if self.training:
                self.cache = torch.rand(32)
            result: Tensor = self.net(x) * self.cache
            return result

    def run(**options: Any) -> Any:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        model = Restless()
        told = []
        model.net.register_forward_hook(lambda *_: told.append(1))
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with GPUPhaseHooks(model, optimizer, _clock=FakeGPU(), **options) as timer:
            for _ in timer.steps(range(5)):
                loss = model(torch.rand(8, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        state = {name: one.tolist() for name, one in model.state_dict().items()}
        assert type(model.cache) is Tensor
        return (
            loads(timer)[-1],
            losses,
            state,
            model.calls,
            model.seen,
            len(told),
            vars(model).keys(),
        )

    counted, *found = run(flops="count")
    _, *expected = run()
    assert found == expected
    assert counted[1:] == (2 * LINEAR, LINEAR, LINEAR)


class Watch(TorchFunctionMode):
    """Notes which tensors a user's own modes and hooks around the loop get to see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def see(self, tensor: Tensor) -> Tensor:
        self.seen.append(type(tensor).__name__)
        return tensor

    def hook(self, module: nn.Module, _: Any, output: Tensor) -> None:
        self.see(output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "linear":
            self.see(args[0])
        return func(*args, **(kwargs or {}))


def test_nobody_around_the_loop_hears_of_what_is_counted(gpu: FakeGPU) -> None:
    def run(**options: Any) -> Any:
        watch = Watch()
        with watch, torch.device("cpu"):
            timer = learn(Net(gpu), [torch.ones(8, 64)] * 3, gpu, **options)
        return loads(timer)[-1], watch.seen

    counted, *found = run()
    _, *expected = run(flops=None)
    assert found == expected
    assert counted == (8, 2 * LINEAR, LINEAR, LINEAR)


@pytest.mark.parametrize("kind", ["modules", "saved tensors", "counter"])
def test_hooks_around_the_loop_see_no_fake_and_are_told_of(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def run(**options: Any) -> Any:
        watch, flops = Watch(), FlopCounterMode(display=False)
        with ExitStack() as stack:
            if kind == "modules":
                handle = nn.modules.module.register_module_forward_hook(watch.hook)
                stack.callback(handle.remove)
            else:
                hooks = saved_tensors_hooks(watch.see, watch.see)
                stack.enter_context(hooks if kind == "saved tensors" else flops)
            timer = learn(Net(gpu), [torch.ones(8, 64)] * 3, gpu, **options)
        return timer.summary().steps, flops.get_total_flops(), watch.seen

    assert run() == run(flops=None)
    assert caplog.text.count("cannot be counted (there are hooks on") == 1


def test_a_loop_that_looks_for_nan_is_not_counted_and_told_why(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.autograd.set_detect_anomaly(True):
        timer = learn(Net(gpu), [torch.ones(8, 64)] * 3, gpu)
        assert torch.is_anomaly_check_nan_enabled()
    assert loads(timer)[-1] == (8,)
    assert caplog.text.count("cannot be counted (detect_anomaly") == 1
    assert "pass flops=" in caplog.text


BANK: list[Tensor] = []


class OutsideBank(Net):
    """It keeps tensors outside of itself: a copy of it does, too."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        BANK.append(result.detach())
        return result + torch.stack(BANK[-2:]).mean()


def test_a_forward_that_keeps_tensors_outside_of_the_model_finds_no_fake_there(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    BANK.clear()
    timer = learn(OutsideBank(gpu), [torch.ones(8, 64)] * 4, gpu)
    assert [type(one) for one in BANK] == [Tensor] * 4
    assert timer.summary().steps == 4
    assert loads(timer)[-1] == (8,)
    assert caplog.text.count("its forward may keep tensors outside of the model: BANK") == 1
    assert "pass flops=" in str(timer.summary())
    BANK.clear()


def test_a_bank_inside_of_the_model_is_copied(gpu: FakeGPU) -> None:
    class Bank(Net):
        def __init__(self) -> None:
            super().__init__(gpu)
            self.bank: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            self.bank.append(result)
            return result

    model = Bank()
    timer = learn(model, [torch.ones(8, 64)] * 4, gpu)
    assert [type(one) for one in model.bank] == [Tensor] * 4
    assert loads(timer)[-1] == (8, 2 * LINEAR, LINEAR, LINEAR)


def test_a_generator_that_the_forward_seeds_goes_on_where_the_loop_left_it(gpu: FakeGPU) -> None:
    class Seeds(Net):
        def __init__(self) -> None:
            super().__init__(gpu)
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            self.generator.manual_seed(0)
            return super().forward(x + torch.rand(64, generator=self.generator))

    def run(**options: Any) -> list[float]:
        model, drawn = Seeds(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with GPUPhaseHooks(model, optimizer, _clock=FakeGPU(), **options) as timer:
            for x in timer.steps([torch.ones(8, 64)] * 3):
                drawn.append(torch.rand((), generator=model.generator).item())
                model(x).mean().backward()
                optimizer.step()
        return drawn

    assert run(flops="count") == run()


@pytest.mark.parametrize("trains", [False, True])
def test_inference_that_is_recorded_for_a_backward_has_none(gpu: FakeGPU, trains: bool) -> None:
    model = Net(gpu)
    with GPUPhaseHooks(model, _clock=gpu, flops="count") as timer:
        for x in timer.steps([torch.ones(8, 64)] * 3):
            loss = model(x).mean()
            if trains:
                loss.backward()
    backward = LINEAR if trains else 0
    assert loads(timer)[-1] == (8, LINEAR + backward, LINEAR, backward)


def test_a_gradient_that_the_forward_computes_is_counted(gpu: FakeGPU) -> None:
    class Forces(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            energy = super().forward(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force

    timer = learn(Forces(gpu), [torch.ones(8, 64)] * 3, gpu)
    # The product and its gradient by the batch; in backward, that of the gradient by both of its
    # factors, and that of the product by the weight and by the batch, which needs one here.
    assert loads(timer)[-1] == (8, 6 * LINEAR, 2 * LINEAR, 4 * LINEAR)


def test_a_product_of_complex_numbers_is_four_and_their_sum_two(gpu: FakeGPU) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 32, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.weight).abs()

    timer = learn(Waves(), [torch.ones(8, 64)] * 3, gpu)
    assert loads(timer)[-1] == (8, 8 * LINEAR, 4 * LINEAR, 4 * LINEAR)


def test_norms_and_interpolation_are_no_products_that_lack_a_formula(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.normalize(self.linear(x))[None]
            x = nn.functional.interpolate(x, size=64, mode="linear")[None]
            return nn.functional.interpolate(x, size=(16, 16), mode="bilinear")

    timer = learn(Scales(), [torch.ones(8, 64)] * 3, gpu)
    assert loads(timer)[-1] == (8, 2 * LINEAR, LINEAR, LINEAR)
    assert "formula" not in caplog.text


def test_autocast_that_is_off_inside_the_loop_is_seen(gpu: FakeGPU) -> None:
    model = Net(gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        GPUPhaseHooks(model, optimizer, _clock=gpu, flops="count", warmup_steps=0) as timer,
    ):
        for x in timer.steps([torch.ones(8, 64)] * 3):
            with torch.autocast("cpu", enabled=False):
                model(x).mean().backward()
            optimizer.step()
    assert timer.summary().work.precision == "fp32"  # type: ignore[union-attr]


def test_beyond_the_bound_no_shape_is_looked_at_for_long(gpu: FakeGPU) -> None:
    asked = []

    class Asked(Net):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            asked.append(1)
            return super().parameters(recurse)

    model = Asked(gpu)
    learn(model, [torch.ones(n, 64) for n in range(1, counting._MAX_CALLS + 2)], gpu)
    before = len(asked)
    asked.clear()
    learn(model, [torch.ones(n, 64) for n in range(1, 40)], gpu)
    assert len(asked) == before


def test_a_tensor_that_is_not_plain_is_called_by_its_name(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    class Image(Tensor):
        pass

    learn(Net(gpu), [torch.ones(8, 64).as_subclass(Image)] * 3, gpu)
    assert caplog.text.count("it takes a Image, which is no plain tensor") == 1


def test_a_frozen_part_and_a_call_without_grad_have_no_backward(gpu: FakeGPU) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.Linear(64, 64), nn.Linear(64, 32)
            self.encoder.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.encoder(x))
            return result

    timer = learn(Frozen(), [torch.ones(8, 64)] * 3, gpu)
    assert loads(timer)[-1] == (8, 4 * LINEAR, 3 * LINEAR, LINEAR)


class KeepsItself(nn.Module):
    """A copy of it leads to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 32), nn.BatchNorm1d(32)
        self.run: Callable[[Tensor], Tensor] = lambda x: self.norm(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.run(x)
        return result


class PartlyScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.jit.script(nn.Linear(64, 32)), nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.linear(x))
        return result


@pytest.mark.parametrize(
    ("kind", "why"), [(KeepsItself, "a lambda does that has kept self"), (PartlyScripted, "script")]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_whose_copy_leads_to_itself_is_left_alone(
    caplog: pytest.LogCaptureFixture, kind: Any, why: str
) -> None:
    def run(**options: Any) -> Any:
        torch.manual_seed(1)
        model, batches = kind(), [torch.rand(8, 64) for _ in range(4)]
        learn(model, batches, FakeGPU(), **options)
        return {name: one.tolist() for name, one in model.state_dict().items()}

    assert run(flops="count") == run(flops=None)
    assert why in caplog.text


def test_what_is_trained_of_the_model_is_that_of_the_call(gpu: FakeGPU) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.judge = nn.Linear(64, 64), nn.Linear(64, 64)

    model, square = Pair(), 2 * LINEAR
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, flops="count", warmup_steps=0) as timer:
        for x in timer.steps([torch.ones(8, 64)] * 3):
            made = model.maker(x)
            model.judge.requires_grad_(False)
            model.judge(made).mean().backward()
            model.judge.requires_grad_(True)
            model.judge(made.detach()).mean().backward()
            optimizer.step()
    # Maker: its weight. Judge: the gradient of what is made, then its weight.
    assert loads(timer)[-1] == (8, 6 * square, 3 * square, 3 * square)


def test_what_is_trained_later_is_counted_anew(gpu: FakeGPU) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, flops="count", warmup_steps=0) as timer:
        for number, x in enumerate(timer.steps([torch.ones(8, 64)] * 6)):
            if number == 3:
                model[0].requires_grad_(True)
            model(x).mean().backward()
            optimizer.step()
    backward = [load[3] / LINEAR / 2 for load in loads(timer)]
    assert backward[1:3] == [1, 1]
    assert backward[4:] == [3, 3]
    assert str(backward[3]) == "nan"


def test_an_argument_that_chooses_what_is_computed_is_part_of_the_call(gpu: FakeGPU) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor, mode: str) -> Tensor:
            result: Tensor = self.last(x) if mode == "short" else self.last(self.first(x))
            return result

    model = Chooses()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, flops="count", warmup_steps=0) as timer:
        for x in timer.steps([torch.ones(8, 64)] * 3):
            (model(x, "short").mean() + model(x, "long").mean()).backward()
            optimizer.step()
    assert loads(timer)[-1][2] == LINEAR + 3 * LINEAR


def test_strings_inside_of_a_batch_choose_nothing(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    class Named(Net):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch["x"])

    batches = [{"x": torch.ones(8, 64), "file": [f"{n}.png"] * 8} for n in range(12)]
    timer = learn(Named(gpu), batches, gpu)
    assert {load[1:] for load in loads(timer)[1:]} == {(2 * LINEAR, LINEAR, LINEAR)}
    assert "shapes" not in caplog.text


def test_autocast_inside_of_the_call_is_seen(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(peaks, "peak_tflops", lambda name, precision: seen.append(precision))
    for flops in ("count", 1e6):
        model: Any = nn.Linear(64, 32)
        # As Accelerate has it.
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__).__get__(model)
        learn(model, [torch.ones(8, 64)] * 3, gpu, flops=flops)
    assert seen == ["bf16", "bf16"]


def test_flops_of_an_item_without_items_are_said_once(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    with hooks(loop, flops=1e6) as timer:
        for x in loop.batches(5):
            loop.train(x)
            timer.step()
    assert caplog.text.count("how many items a batch has is not known: pass items=") == 1
    assert "pass items=" in str(timer.summary())


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_no_other_rank_is_asked_while_flops_are_counted(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    class Asks(Net):
        def forward(self, x: Tensor) -> Tensor:
            dist.barrier()
            return super().forward(x)

    timer = learn(Asks(gpu), [torch.ones(8, 64)] * 3, gpu)
    assert loads(timer)[-1] == (8,)
    assert "its forward communicates with other ranks, by c10d.barrier" in caplog.text


def test_a_compiled_forward_is_not_compiled_for_fakes(gpu: FakeGPU) -> None:
    graphs = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 32)

        @torch.compile(backend=compiler)
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.linear(x)
            return result

    timer = learn(Compiled(), [torch.ones(8, 64)] * 3, gpu)
    assert loads(timer)[-1] == (8, 2 * LINEAR, LINEAR, LINEAR)
    assert len(graphs) == 1


def test_autocast_is_that_of_the_call(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = Net(gpu), []
    monkeypatch.setattr(peaks, "peak_tflops", lambda name, precision: seen.append(precision))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, flops="count", warmup_steps=0) as timer:
        for x in timer.steps([torch.ones(8, 64)] * 3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().mean()
            loss.backward()
            optimizer.step()
    assert seen == ["bf16"]
    assert loads(timer)[-1] == (8, 2 * LINEAR, LINEAR, LINEAR)


class Depends(Net):
    """What it computes depends on its data."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) if x.sum() > 0 else x
        return result


class Takes(Net):
    """It takes something that is no tensor."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(x.x[:8].repeat(1, 16)[:8])


@pytest.mark.parametrize(
    ("kind", "batch", "why"),
    [
        (Depends, torch.ones(8, 64), "DataDependentOutputException"),
        (Takes, Graphs(), "it takes a Graphs, which is no plain tensor"),
    ],
)
def test_what_cannot_be_counted_is_said_once_with_the_fix(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture, kind: Any, batch: Any, why: str
) -> None:
    timer = learn(kind(gpu), [batch] * 4, gpu)
    assert caplog.text.count("cannot be counted") == 1
    assert why in caplog.text
    assert "pass flops=" in caplog.text
    assert "pass flops=" in str(timer.summary())
    assert timer.summary().rows["forward"].tflops is None
    assert timer.summary().steps == 4


def test_an_operator_without_a_formula_is_named(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    @torch.library.custom_op("work_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)

    class Custom(Net):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(x) + twice(x.detach()).mean()
            return result

    timer = learn(Custom(gpu), [torch.ones(8, 64)] * 3, gpu)
    assert loads(timer)[-1][2] == LINEAR
    assert caplog.text.count("No formula tells the FLOPs of work_test::twice") == 1


def test_recurrent_layers_have_no_formula_and_that_is_said(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    class Recurrent(Net):
        def __init__(self, gpu: FakeGPU) -> None:
            super().__init__(gpu)
            self.rnn = nn.LSTM(64, 64, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.rnn(x[:, None])[0][:, 0])

    learn(Recurrent(gpu), [torch.ones(8, 64)] * 3, gpu)
    assert caplog.text.count("No formula tells the FLOPs of aten::") == 1


def test_a_weight_that_a_hook_computes_has_its_gradient(gpu: FakeGPU) -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        model = nn.utils.weight_norm(nn.Linear(64, 32))
    timer = learn(model, [torch.ones(8, 64)] * 3, gpu)
    assert loads(timer)[-1] == (8, 2 * LINEAR, LINEAR, LINEAR)


def test_a_model_with_a_data_set_is_counted_and_the_data_are_not_copied(gpu: FakeGPU) -> None:
    class Data(torch.utils.data.Dataset[Any]):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("the data are copied")

    model: Any = Net(gpu)
    model.data = Data()
    timer = learn(model, [torch.ones(8, 64)] * 3, gpu)
    assert loads(timer)[-1] == (8, 2 * LINEAR, LINEAR, LINEAR)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_on_a_gpu_is_counted_to_the_formula(dtype: torch.dtype) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(128, 384)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(4, 64, 3, 2, 64).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    model = Attention().to("cuda", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    allocated = torch.cuda.memory_allocated()
    with GPUPhaseHooks(model, optimizer, flops="count", warmup_steps=0) as timer:
        for x in timer.steps([torch.randn(4, 64, 128, device="cuda", dtype=dtype)] * 3):
            model(x).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    linear, scores = 2 * 4 * 64 * 128 * 384, 2 * 4 * 2 * 64 * 64 * 64
    forward = linear + 2 * scores
    [items, model_flops, ran_forward, ran_backward] = loads(timer)[-1]
    assert items == 4
    assert ran_forward == forward
    assert model_flops == 2 * linear + 6 * scores
    assert ran_backward - (linear + 4 * scores) in (0, scores)
    del x
    assert torch.cuda.memory_allocated() - allocated < 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_dropout_on_a_gpu_is_counted_and_loses_no_random_number(
    reentrant: bool,
) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 32)

        def part(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.last(x).relu(), 0.5)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.part, self.first(x), use_reentrant=reentrant)
            return result

    def run(**options: Any) -> tuple[list[float], list[tuple[float, ...]]]:
        torch.manual_seed(0)
        model = Again().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with GPUPhaseHooks(model, optimizer, **options) as timer:
            for x in timer.steps([torch.ones(8, 64, device="cuda")] * 4):
                loss = model(x).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, loads(timer)

    (losses, counted), (expected, _) = run(flops="count"), run()
    assert losses == expected
    assert counted[-1] == (8, 7 * LINEAR, 3 * LINEAR, 5 * LINEAR)


def test_a_real_kernel_never_runs_on_what_stands_for_a_batch(gpu: FakeGPU) -> None:
    ran = []

    @torch.library.custom_op("work_test::real", mutates_args=())
    def real(x: Tensor) -> Tensor:
        ran.append(1)
        return x.clone()

    class Real(Net):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(x) + real(x.detach()).mean()
            return result

    learn(Real(gpu), [torch.ones(8, 64)] * 3, gpu)
    assert len(ran) == 3


def test_a_step_without_a_call_of_the_model_has_unknown_flops(gpu: FakeGPU) -> None:
    model = Net(gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, flops="count", warmup_steps=0) as timer:
        for number, x in enumerate(timer.steps([torch.ones(8, 64)] * 5)):
            if number != 3:
                model(x).mean().backward()
            optimizer.step()
    known = [load[1] == load[1] for load in loads(timer)]
    assert known == [False, True, True, False, True]


def test_several_calls_in_a_step_are_added_up(gpu: FakeGPU) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(64, 32), nn.Linear(32, 64)

    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, flops="count", warmup_steps=0) as timer:
        for x in timer.steps([torch.ones(8, 64)] * 3):
            model.decoder(model.encoder(x)).mean().backward()
            optimizer.step()
    # The decoder's input needs a gradient, the encoder's does not.
    assert loads(timer)[-1] == (8, 5 * LINEAR, 2 * LINEAR, 3 * LINEAR)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("items", "flops", "expected", "has_phases"),
    [
        (None, 1e6, 8e6, False),
        (None, (1e6, 3e6), 32e6, True),
        (lambda batch: batch.numel(), 1e6, 512e6, False),
    ],
    ids=["one", "two", "of what a function counts"],
)
def test_flops_that_are_told_are_those_of_an_item(
    gpu: FakeGPU, items: Any, flops: Any, expected: float, has_phases: bool
) -> None:
    timer = learn(Net(gpu), [torch.ones(8, 64)] * 3, gpu, items=items, flops=flops)
    summary = timer.summary()
    assert summary.mfu == pytest.approx(expected / 6e-3 / 1e12 / 1e-4)
    assert (summary.rows["forward"].tflops is not None) == has_phases
    assert summary.work is not None
    assert (summary.work.hfu is not None) == has_phases
    if has_phases:
        assert summary.rows["backward"].tflops == pytest.approx(24e6 / 4e-3 / 1e12)


@pytest.mark.usefixtures("h200")
def test_what_rounding_leaves_is_nothing_that_is_computed_again(loop: Loop) -> None:
    for nth in range(3, 20):
        option = (1.1e9 / nth, 2.3e9 / 7)
        summary = train(loop, rows(*range(1, 8), *range(1, 8)), flops=option).summary()
        assert summary.work is not None
        assert summary.work.hfu == summary.work.mfu
        assert "again" not in str(summary)


def test_the_flops_of_a_lightning_module_are_counted(gpu: FakeGPU) -> None:
    class Task(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(gpu)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch.repeat(8, 32)).mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0, flops="count")
    timer = fit(gpu, Task(), n=4, timer=timer)
    assert loads(timer)[1:] == [(1, 2 * LINEAR, LINEAR, LINEAR)] * 3


def test_nothing_is_counted_hooked_or_imported_while_flops_are_off(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "count_flops", None)
    timer = learn(Net(gpu), [torch.ones(8, 64)] * 3, gpu, flops=None)
    assert loads(timer) == [(8,)] * 3
    work = timer.summary().work
    assert work is not None
    assert work.note == ""


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
def test_the_peak_is_the_dense_one_of_the_data_sheet(
    name: str, precision: str, expected: float | None
) -> None:
    assert peak_tflops(name, precision) == expected


def test_the_precision_is_that_of_autocast_or_of_the_parameters() -> None:
    def precision(model: nn.Module) -> str:
        return precision_of(model, dtype_of_call(model, cpu), cpu)

    cpu, net = torch.device("cpu"), cast("Any", nn.Linear(2, 2))
    assert precision(net) == "fp32"
    with torch.autocast("cpu", torch.bfloat16):
        assert precision(net) == "bf16"
    net.forward = torch.autocast("cpu", torch.bfloat16)(net.forward)
    assert precision(net) == "bf16"
    assert precision(nn.Linear(2, 2).bfloat16()) == "bf16"


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


# What is lost


@pytest.mark.usefixtures("h200")
def test_what_the_peak_is_lost_to_adds_up_exactly(gpu: FakeGPU) -> None:
    model = Net(gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: gpu.work(1.0))
    with GPUPhaseHooks(
        model, optimizer, _clock=gpu, flops="count", warmup_steps=0, probe_every_n_steps=5
    ) as timer:
        for _ in timer.steps(range(40)):
            gpu.work(1.0)
            gpu.host_work(10.0)  # The device runs dry.
            model(torch.ones(8, 64)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    summary = timer.summary()
    losses = summary.losses
    assert losses is not None
    assert sum(row.share for row in (*losses.rows, losses.work)) == pytest.approx(1.0, abs=1e-12)
    step_ms = summary.step.mean_ms
    # 1 ms in `other`, 6 in the model, 1 in the update; and the device runs dry for 2, in the first
    # step for 9.
    assert losses[GPU_WORK] == pytest.approx(8.0 / step_ms)
    assert losses[GAPS] == pytest.approx(2.0 / step_ms)
    assert losses["slow steps: unexplained"] == pytest.approx(7.0 / summary.steps / step_ms)
    assert losses.peak_share == summary.mfu
    assert losses.unknown == ""
    assert "  at the peak  " in str(losses)


@pytest.mark.usefixtures("h200")
def test_more_than_the_peak_is_no_mfu_and_has_no_rest(gpu: FakeGPU) -> None:
    timer = learn(Net(gpu), [torch.ones(8, 64)] * 9, gpu, flops=1e9, probe_every_n_steps=4)
    losses = timer.summary().losses
    assert losses is not None
    assert losses.peak_share is None
    assert "which is impossible: check flops and the precision" in str(timer.summary())


@pytest.mark.usefixtures("h200")
def test_a_saved_run_has_its_work_and_its_page_shows_it(gpu: FakeGPU, tmp_path: Any) -> None:
    from lightning_gputime._saved_runs.page import page

    timer = learn(Net(gpu), [torch.ones(8, 64)] * 40, gpu, probe_every_n_steps=5)
    timer.save(tmp_path / "run.json")
    run = lightning_gputime.load(tmp_path / "run.json")
    assert run.summary().work == timer.summary().work
    assert run.environment.options["flops"] == "count"
    shown = page([run])
    assert "at the peak" in shown
    assert f"counted by {FIRST}".replace("'", "&#x27;") in shown
    both = page([run, run], lightning_gputime.compare(run, run)).count("at the peak")
    assert both > shown.count("at the peak") >= 1


def test_messages_about_work_name_the_package(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    learn(Depends(gpu), [torch.ones(8, 64)] * 2, gpu)
    assert {record.name for record in caplog.records if record.levelno >= logging.WARNING} == {
        "lightning_gputime"
    }
