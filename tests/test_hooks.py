"""`GPUPhaseHooks`: attach and remove, step() and steps(), options, and what is logged."""

import copy
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, Adder, FakeGPU, batches, steps
from fake_loop import Logger, Loop, hooks, timed_indices, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import GPUPhaseHooks, PhaseTimeMetric


def test_last_step_and_history_have_the_resolved_steps(loop: Loop) -> None:
    with hooks(loop) as timer:
        before = timer.last_step
        loop.train_all(timer.steps(loop.batches(2)))
        assert (before, len(timer.history())) == (None, 1)
        timer.flush()
    assert len(timer.history()) == 2
    assert timer.last_step is not None
    assert timer.last_step.phase_ms == STEP_MS


def test_phase_of_a_timer_does_not_affect_other_timers(loop: Loop) -> None:
    with hooks(loop) as first, hooks(loop) as second:
        for x in first.steps(second.steps(loop.batches(2))):
            with first.phase("augment"):
                loop.gpu.work(3.0)
            loop.train(x)
    assert steps(first)[0] == {**STEP_MS, "augment": 3.0}
    assert steps(second)[0] == {**STEP_MS, "other": 3.125}


def test_means_are_logged_to_every_logger_with_their_step(loop: Loop) -> None:
    first, second = Logger(), Logger()
    train(loop, 5, logger=[first, second], log_every_n_steps=2, prefix="gpu")
    # The host does no work, so it waits for all work of the GPU.
    totals = {name: sum(STEP_MS.values()) for name in ("step", "host_wait")}
    means = {f"gpu/{name}_ms": ms for name, ms in {**STEP_MS, **totals}.items()}
    means |= {"gpu/items_per_sec": 1000 / sum(STEP_MS.values()), "gpu/estimated": 0}
    assert first.calls == second.calls == [(step, means) for step in (1, 3, 4)]


def test_attach_and_remove_are_idempotent(loop: Loop, is_bare: Callable[[], bool]) -> None:
    timer = hooks(loop)
    timer.remove()
    assert timer.attach() is timer.attach()
    assert not is_bare()
    timer.remove()
    timer.remove()
    assert is_bare()


def test_failed_attach_leaves_no_hooks_and_the_loop_continues(
    loop: Loop,
    is_bare: Callable[[], bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(
        "lightning_gputime._instrumentation.boundaries.BackwardBoundary", lambda *_, **__: 1 / 0
    )
    timer = hooks(loop).attach()
    assert "Steps are no longer timed" in caplog.text
    assert is_bare()
    for x in timer.steps(loop.batches(2)):
        loop.train(x)
        timer.step()
    timer.remove()
    assert len(timer.history()) == 0


@pytest.mark.usefixtures("is_bare")
def test_exception_in_the_loop_is_raised_and_leaves_no_hooks(loop: Loop) -> None:
    timer = hooks(loop)

    def fail() -> None:
        with timer:
            for x in timer.steps(loop.batches(5)):
                loop.train(x)
                loop.gpu.host_work(100.0)
                if timer.last_step is not None:
                    raise KeyError

    with pytest.raises(KeyError):
        fail()
    # The loop raised after the update of the second step, and the host never waited.
    assert len(timer.history()) == 2
    assert loop.gpu.waits == []


def test_copies_and_pickles_of_an_attached_timer_are_detached(loop: Loop) -> None:
    model = nn.Linear(2, 2)
    with GPUPhaseHooks(model, torch.optim.SGD(model.parameters())) as timer:
        for twin in (pickle.loads(pickle.dumps(timer)), copy.deepcopy(timer)):
            with pytest.raises(RuntimeError, match="needs an attached timer"):
                twin.step()
            with twin:
                twin.step()
            assert twin.history()["step"].tolist() == [0]


def test_model_on_the_cpu_is_timed_on_the_host_clock_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(2, 2)
    with GPUPhaseHooks(model, torch.optim.SGD(model.parameters())) as timer:
        for x in timer.steps([torch.ones(1, 2)] * 3):
            model(x).sum().backward()
    assert len(timer.history()) == 3
    assert (timer.history()["backward_ms"] > 0.0).all()
    assert [record.message for record in caplog.records] == [
        "The model is on the CPU: its phases are timed on the host's clock."
    ]


@pytest.mark.parametrize("call", ["step", "steps"])
def test_step_and_steps_require_attach(loop: Loop, call: str) -> None:
    timer = hooks(loop)
    message = rf"{call}\(\) needs an attached timer\. .* call attach\(\)"
    with pytest.raises(RuntimeError, match=message):
        list(timer.steps([1])) if call == "steps" else timer.step()
    with timer.phase("augment"):
        pass
    timer.flush()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet"}, "model must be a torch.nn.Module, got 'resnet'"),
        ({"optimizers": 0.1}, "optimizers must be None, a torch.optim.Optimizer .* got 0.1"),
        ({"optimizers": [None]}, r"optimizers must be .* got \[None\]"),
        ({"warmup_steps": True}, "warmup_steps must be an integer .* got True"),
        ({"warmup_steps": "5.5"}, "warmup_steps must be an integer .* got 5.5"),
        ({"warmup_steps": -1}, "warmup_steps must be 0 or more .* got -1"),
        ({"history_size": 0}, "history_size must be 1 or more .* got 0"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches must be 1 or more .* got 0"),
        ({"accumulate_grad_batches": "all"}, "accumulate_grad_batches must be an int.* got 'all'"),
        ({"accumulate_grad_batches": "auto"}, "must be a number if .* got 'auto'"),
        ({"every_n_steps": 0}, "every_n_steps must be 1 or more"),
        ({"first_step": -1}, "first_step must be 0 or more .* got -1"),
        ({"log_every_n_steps": 0}, "log_every_n_steps must be 1 or more .* got 0"),
        ({"log": "phase"}, "log must be one of, or a list of, default, all, phases, .*'phase'"),
        ({"log": ["all", "steps"]}, r"log must be .* phases, comm, .* got \['all', 'steps'\]"),
        ({"prefix": 3}, "prefix must be a string .* got 3"),
        ({"prefix": ""}, "prefix must be a key .* got ''"),
        ({"prefix": "/"}, "prefix must be a key .* got '/'"),
        ({"device": "gpu"}, "device 'gpu' is unknown"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be timed here"),
        ({"lines": 1}, "lines must be True or False, got 1"),
        ({"annotate": "yes"}, "annotate must be True or False, got 'yes'"),
        ({"sync_ranks": 1}, "sync_ranks must be True .* got 1"),
        ({"observers": print}, "observers must be a list of functions .* got <built-in"),
        ({"observers": [3]}, r"observers must be a list of functions .* got \[3\]"),
        ({"observers": [PhaseTimeMetric]}, "observers must be .* objects with methods of Step"),
        ({"logger": "csv"}, "logger must have a method log_metrics.* got 'csv'"),
    ],
)
def test_hooks_refuse_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        GPUPhaseHooks(**{"model": nn.Linear(1, 1), **options})


def test_warning_if_no_step_ends(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    with hooks(loop):
        loop.train_all(loop.batches(3))
    assert "No step has ended: iterate over steps(loader), or call step()" in caplog.text


def calls_in_a_step(gpu: FakeGPU, modules: int, after_steps: int = 100, **options: Any) -> float:
    """Return the mean number of package functions called per step.

    Steps are read 50 at a time, so 100 steps have their share of it.
    """
    layers = (nn.Sequential(nn.Identity()) for _ in range(modules))
    model = nn.Sequential(nn.Linear(2, 2), *layers)
    optimizer = Adder(model.parameters(), gpu, 2.0)
    package = "/lightning_gputime/"
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        file = frame.f_code.co_filename
        calls += event == "call" and package in file and not file.endswith("testing.py")

    with GPUPhaseHooks(model, optimizer, _clock=gpu, **options) as timer:
        for i, x in enumerate(timer.steps(batches(gpu, after_steps + 100))):
            if i == after_steps:
                sys.setprofile(count)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sys.setprofile(None)
    return calls / 100


def test_calls_per_step_grow_neither_with_modules_nor_with_steps(gpu: FakeGPU) -> None:
    cost = calls_in_a_step(gpu, 10, lines=False)
    assert 0 < cost < 100
    assert calls_in_a_step(gpu, 100, lines=False) == pytest.approx(cost, abs=1.0)
    assert calls_in_a_step(gpu, 10, after_steps=2000, lines=False) == pytest.approx(cost, abs=1.0)
    assert calls_in_a_step(gpu, 10) < cost + 10.0  # 2 steps are examined.


@pytest.mark.parametrize("lag", [0, 1])
def test_every_n_steps_times_1_of_n_steps(gpu: FakeGPU, loop: Loop, lag: int) -> None:
    logger = Logger()
    options = {"_lag": lag, "logger": logger, "log_every_n_steps": 10}
    timer = train(loop, 32, every_n_steps=5, **options)
    assert timer.history()["step"].tolist() == timed_indices(5, 32)
    assert steps(timer) == [STEP_MS] * 7
    assert [step for step, _ in logger.calls] == [9, 19, 29, 31]
    assert len(gpu.waits) <= 7
    assert gpu.created < 25
    assert timer.summary().skipped_updates == 0


def test_untimed_steps_record_no_event(gpu: FakeGPU, loop: Loop) -> None:
    with hooks(loop, every_n_steps=10**6) as timer:
        loop.train_all(timer.steps(loop.batches(300)))
        assert gpu.created == 0
        assert gpu.waits == []
        assert timer.last_step is None


def test_warm_up_counts_untimed_steps(loop: Loop) -> None:
    timer = train(loop, 30, every_n_steps=5, warmup_steps=12)
    measured = timer.summary().measurement
    assert (measured.steps, measured.warmup_steps) == (4, 2)  # Warm-up: 3 and 7.


def train_or_replay(loop: Loop, number: int, replays: list[Callable[[], None]]) -> None:
    """Train in the first steps, capture a graph in the fourth, and replay it from then on."""
    if number < 3:
        loop.train(torch.ones(1, 2))
    elif number == 3:
        with loop.gpu.capture() as replay:
            loop.train(torch.ones(1, 2))
        replays.append(replay)
    else:
        replays[0]()


CAPTURED = "Phases inside a captured graph cannot be timed. Its replays"


@pytest.mark.parametrize("options", [{}, {"every_n_steps": 10}])
@pytest.mark.parametrize("is_named", [True, False])
def test_graph_replay_belongs_to_its_launching_phase(
    loop: Loop, options: dict[str, Any], is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    replays: list[Callable[[], None]] = []
    with hooks(loop, **options) as timer:
        for number in range(40):
            loop.gpu.work(1.0)
            with timer.phase("replay") if is_named and replays else nullcontext():
                train_or_replay(loop, number, replays)
            timer.step()
    assert not loop.gpu.capture_broken
    graph_ms = sum(STEP_MS.values()) - STEP_MS["data"]
    named = {"data": 1.0, "replay": graph_ms}
    assert steps(timer)[-1] == (named if is_named else {"other": 1.0 + graph_ms})
    # Unnamed replays cannot be separated from fetches, so the loader is not blamed.
    assert is_named or "input-bound" not in timer.summary().verdict
    assert timer.summary().skipped_updates == 0
    assert caplog.text.count(CAPTURED) == 1
    # With `steps()`, batches that replay a graph are steps.
    caplog.clear()
    replays.clear()
    with hooks(loop, **options) as timer:
        for number, _ in enumerate(timer.steps(loop.batches(60))):
            train_or_replay(loop, number, replays)
    # The step of the capture has no marks, so it is not in the history.
    assert timer.history()["step"].tolist()[-2:] == ([44, 52] if options else [58, 59])
    assert sum(steps(timer)[-1].values()) == sum(STEP_MS.values())
    assert [record.message.startswith(CAPTURED) for record in caplog.records] == [True]


def test_step_numbers_continue_across_epochs(loop: Loop) -> None:
    logger = Logger()
    timer = hooks(loop, first_step=1000, logger=logger, log_every_n_steps=2)
    for _ in range(2):  # A timer that is attached again starts again at its first step.
        with timer:
            for _ in range(2):
                loop.train_all(timer.steps(loop.batches(3)))
        assert timer.history()["step"].tolist() == [1000, 1001, 1002, 1003, 1004, 1005]
    assert [step for step, _ in logger.calls] == [1001, 1003, 1005] * 2


@pytest.mark.parametrize("where", ["observer", "loop"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_after_remove_does_nothing(loop: Loop, where: str, accumulate: int) -> None:
    def remove(_: object) -> None:
        timer.remove()

    options: dict[str, Any] = {"observers": [remove]} if where == "observer" else {}
    timer = hooks(loop, _lag=0, accumulate_grad_batches=accumulate, **options).attach()
    trained = 0
    for number, x in enumerate(loop.batches(6)):
        loop.train(x)
        timer.step()
        trained += 1
        if number == 0 and where == "loop":
            timer.remove()
    for x in timer.steps(loop.batches(2)):
        loop.train(x)
        trained += 1
    assert trained == 8
    # Only the first step is timed. In a loop without `steps()`, the 0.125 ms of other work before
    # the model are `data`.
    assert steps(timer) == [{**STEP_MS, "data": 1.125, "other": 0.0}]


def test_observer_may_remove_the_timer_at_an_examined_step(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    def remove(step: Any) -> None:
        if step.step == 12:  # The first examined step.
            timer.remove()

    timer = hooks(loop, lines=True, observers=[remove])
    with timer:
        loop.train_all(timer.steps(loop.batches(20)))
    assert timer.history()["step"].tolist() == [*range(13)]
    assert not caplog.messages


class Epochs(DataLoader[Any]):
    """A loader with `set_epoch` whose fetches take 1 ms."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(TensorDataset(torch.ones(3, 2)), batch_size=1)
        self.gpu, self.epoch = gpu, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return batches(self.gpu, 3, copy_ms=1.0)


def test_timed_loader_can_be_reused_and_has_the_attributes_of_its_loader(loop: Loop) -> None:
    epochs = Epochs(loop.gpu)
    with hooks(loop, warmup_steps=0) as timer:
        loader = timer.steps(epochs)
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert (len(loader), epochs.epoch) == (3, epoch)
            loop.train_all(loader)
            loop.gpu.work(100.0)  # Belongs to no step.
        assert loader.sampler is epochs.sampler
        assert copy.copy(loader).batch_size == 1
        with pytest.raises(AttributeError, match="no attribute 'samplers'"):
            _ = loader.samplers
        with pytest.raises(TypeError, match="has no len"):
            len(timer.steps(iter(epochs)))
    assert timer.history()["step"].tolist() == [*range(9)]
    assert steps(timer) == [STEP_MS] * 9


def test_data_parallel_is_refused_only_on_several_devices(loop: Loop) -> None:
    # On one device it calls the module in the loop's thread.
    loop.model = nn.DataParallel(loop.model)
    assert steps(train(loop, 2)) == [STEP_MS] * 2
    loop.model.device_ids = [0, 1]
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        GPUPhaseHooks(nn.Sequential(loop.model))
