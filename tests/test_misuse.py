"""Errors and warnings about likely mistakes, with their fix."""

from re import escape
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import FakeGPU
from fake_lightning import Loader, Model, trainer
from fake_loop import Loop, hooks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, compare
from lightning_gputime._messages import HOMES

NET = nn.Linear(2, 1)
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)
LOADER = DataLoader(TensorDataset(torch.zeros(4, 2)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SGD, NET), "got the optimizer SGD: the arguments are swapped, write GPUPhaseHooks(model"),
        ((nn.Linear, SGD), "got the class Linear: pass an instance, such as Linear(...)"),
        ((LOADER, NET), "got a DataLoader: write GPUPhaseHooks(model, optimizer), and pass the"),
        (([NET, NET], SGD), "for several models give torch.nn.ModuleList([...])"),
        ((pl.Trainer, SGD), "got the class Trainer"),
        ((trainer(),), "GPUPhaseTimer()])"),
        ((NET, NET.parameters()), "got parameters: pass the optimizer that updates them"),
        ((NET, torch.optim.Adam), "got the class Adam: pass an instance, such as Adam(...)"),
        (
            (NET, torch.optim.lr_scheduler.StepLR(SGD, 1)),
            "got a StepLR: pass the inner optimizer, its attribute `optimizer`",
        ),
        ((NET, SimpleNamespace(base=SGD, step=None)), "its attribute `base`"),
        ((NET, LOADER), "and pass the loader to timer.steps(loader)"),
        ((NET, NET), "or a list of them, got Linear("),
        ((NET, [SGD, None]), "a list of them, got a list"),
        ((NET, {"a": SGD}), "or a list of them, got"),
        ((NET, "adam"), "got 'adam'"),
        (
            (NET, SGD, LOADER),
            "got a DataLoader by position: write GPUPhaseHooks(model, optimizers, option=value)",
        ),
        ((NET, SGD, SGD), "GPUPhaseHooks takes its options by name, got a SGD by"),
    ],
)
def test_wrong_arguments_raise_with_the_likely_mistake(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError, match=escape(message)):
        GPUPhaseHooks(*arguments)


def test_timer_of_another_front_end_raises_with_the_right_timer(gpu: FakeGPU) -> None:
    timer: Any = GPUPhaseHooks(NET, SGD)
    with pytest.raises(AttributeError, match=escape(HOMES)):
        trainer(timer).fit(Model(gpu), Loader(gpu, 1))


@pytest.mark.parametrize("name", ["foo", "__deepcopy__", "_fit_of_another"])
def test_missing_attribute_raises_the_usual_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"^'GPUPhaseHooks' object has no attribute '{name}'$"):
        getattr(GPUPhaseHooks(NET, SGD), name)


def test_option_by_position_raises_with_the_keyword() -> None:
    timer: Any = GPUPhaseTimer
    for value, name in ((nn.Sequential(NET, NET), "a Sequential"), ("run.json", "'run.json'")):
        with pytest.raises(TypeError) as error:
            timer(value)
        assert str(error.value) == (
            f"GPUPhaseTimer takes its options by name, got {name} by position: write"
            " GPUPhaseTimer(option=value)"
        )
    with pytest.raises(TypeError, match=r"a list of these, got a GPUPhaseHooks$"):
        compare(GPUPhaseHooks(NET, SGD), "run.json")  # type: ignore[arg-type]  # the mistake


def test_summary_without_training_names_the_reason(gpu: FakeGPU) -> None:
    timer = GPUPhaseTimer(_clock=gpu)
    message = (
        "No step was timed. Nothing was trained: pass the timer to Trainer(callbacks=[...]) and"
        " call fit()."
    )
    assert str(timer.summary()) == message
    trainer(timer, limit_train_batches=0).fit(Model(gpu), Loader(gpu, 1))
    assert str(timer.summary()) == message


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (SGD, "got the optimizer SGD, which goes to GPUPhaseHooks(model, optimizer)"),
        (NET, "got the model Linear, which goes to GPUPhaseHooks(model, optimizer)"),
        (nn.Sequential(NET), "got the model Sequential"),
        (100, "got 100, which has no items"),
        (DataLoader, "got <class 'torch.utils.data.dataloader.DataLoader'>"),
        (None, "got None"),
    ],
)
def test_steps_refuses_arguments_that_are_no_loader(loop: Loop, loader: Any, message: str) -> None:
    with hooks(loop) as timer:
        with pytest.raises(TypeError, match=escape(message)):
            timer.steps(loader)
        loop.train_all(timer.steps(loop.batches(2)))
    assert len(timer.history()) == 2


@pytest.mark.parametrize("loader", [LOADER, TensorDataset(torch.zeros(4, 2)), range(2), iter([1])])
def test_steps_takes_any_iterable(loop: Loop, loader: Any) -> None:
    with hooks(loop) as timer:
        timer.steps(loader)


def test_callback_as_context_manager_raises_with_the_hooks() -> None:
    timer: Any = GPUPhaseTimer()
    with pytest.raises(TypeError, match=r"write: with GPUPhaseHooks\(model, optimizer\)"), timer:
        pass


@pytest.mark.parametrize(
    ("timer", "option", "message"),
    [
        (GPUPhaseHooks, "optimizer", "has no option optimizer: did you mean optimizers?"),
        (GPUPhaseTimer, "warmup", "GPUPhaseTimer has no option warmup: did you mean warmup_steps?"),
        (GPUPhaseTimer, "save", "has no option save: did you mean save_path?"),
        (GPUPhaseTimer, "foo", "GPUPhaseTimer has no option foo: there is print_"),
    ],
)
def test_unknown_option_names_the_closest(timer: Any, option: str, message: str) -> None:
    with pytest.raises(TypeError, match=escape(message)):
        timer(**{option: 1})


class TimerSubclass(GPUPhaseTimer):
    pass


@pytest.mark.parametrize("kind", [GPUPhaseTimer, TimerSubclass])
def test_class_as_callback_raises_before_training(gpu: FakeGPU, kind: Any) -> None:
    class Prepares(Model):
        def prepare_data(self) -> None:
            gpu.host_work(70.0)

    message = "with parentheses, as in Trainer(callbacks=[GPUPhaseTimer()])"
    with pytest.raises(TypeError, match=escape(message)):
        trainer(kind).fit(Model(gpu), Loader(gpu, 1))
    # Lightning has set methods such as `log_dict` on the class. An instance must still work.
    timer = kind(_clock=gpu, print_summary=False)
    trainer(timer).fit(Prepares(gpu), Loader(gpu, 1))
    wall_clock = timer.summary().wall_clock
    assert wall_clock.entries_s["set-up"] == pytest.approx(0.07)
    assert not hasattr(kind, "log_dict")


def test_optimizer_of_another_model_warns(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    GPUPhaseHooks(loop.model, loop.optimizer, _clock=loop.gpu)
    assert not caplog.records
    image = nn.Parameter(torch.zeros(2))
    GPUPhaseHooks(NET, torch.optim.LBFGS([image]), _clock=loop.gpu)
    assert "None of the parameters that LBFGS updates belongs to the model" in caplog.text


def test_model_on_two_devices_warns_with_the_timed_device(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(3, 1, device="meta"))
    GPUPhaseHooks(model[0]).attach().remove()
    GPUPhaseHooks(model, device="cpu").attach().remove()
    assert "several devices" not in caplog.text
    GPUPhaseHooks(model).attach().remove()
    assert (
        "The model is on several devices: cpu (3 parameters), meta (4 parameters). Its phases are"
        " timed on cpu only. Pass device= to choose another device."
    ) in caplog.text
