"""A register lists all functions that a timer replaces, and trainings restore them."""

import contextlib
import gc
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import FakeGPU
from fake_lightning import Loader, Model, trainer
from fake_loop import Loop, train, training_arguments
from register import REGISTER
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

MANUAL = Path(__file__).parent.parent / "docs/reference/replaced.md"

LIBRARIES = {
    *("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics"),
    "transformers",
}

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


# Snapshots


Attributes = dict[str, object]


def is_of_libraries(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def snapshot() -> dict[str, Attributes]:
    """Return the attributes of each module and class of the libraries."""
    found: dict[str, Attributes] = {"gc": {str(id(call)): call for call in gc.callbacks}}
    for name, module in [*sys.modules.items()]:
        if isinstance(module, ModuleType) and is_of_libraries(name):
            found[name] = dict(vars(module))
            for kind in found[name].values():
                if isinstance(kind, type) and is_of_libraries(kind.__module__):
                    key = f"{kind.__module__}.{kind.__qualname__} {id(kind)}"
                    found.setdefault(key, dict(vars(kind)))
    return found


def is_plain(value: object) -> bool:
    """Return whether a value is a counter, a flag or a name, which libraries may set."""
    return value is None or isinstance(value, bool | int | float | str | ModuleType)


def changes_since(before: dict[str, Attributes]) -> list[str]:
    """Return the attributes that have changed, except `train` of transformers' Trainer.

    `train` stays patched while a timer exists, which the tests of trainer subclasses cover.
    """
    found, after = [], snapshot()
    for owner, attributes in before.items():
        now = after.get(owner, {})
        for name in (attributes.keys() | now.keys()) - {"train"}:
            was, value = attributes.get(name), now.get(name)
            if was is not value and not (is_plain(was) and is_plain(value)):
                found.append(f"{owner}.{name}: {was!r} -> {value!r}")
    return found


def is_ours(value: object) -> bool:
    module = getattr(type(value), "__module__", "") or ""
    if isinstance(value, FunctionType):
        return "lightning_gputime" in value.__code__.co_filename.split(os.sep)
    return module.startswith("lightning_gputime.") and module != "lightning_gputime.testing"


def left_on(*things: Any) -> list[str]:
    """Return objects of the package that are attributes of objects, or in their collections."""
    found = []
    for thing in things:
        for name, value in vars(thing).items():
            inside = [*value.values()] if isinstance(value, dict) else [value]
            if any(map(is_ours, inside)):
                found.append(f"{type(thing).__name__}.{name}")
    return found


# Trainings, each of which calls a function between two of its steps


Call = Callable[[], object]
HOOKS, LIGHTNING, HUGGING_FACE = FRONTS = ("hooks", "lightning", "huggingface")


class Run:
    """One training with or without a timer."""

    def __init__(self, front: str, call: Call, tmp_path: Path) -> None:
        self.front, self.call, self.tmp_path = front, call, tmp_path
        self.gpu = FakeGPU()
        self.loop = Loop(self.gpu)
        # Objects on which a timer may set attributes.
        self.things: list[Any] = [self.loop.model, self.loop.optimizer]

    def timer(self) -> Any:
        if self.front == HOOKS:
            return GPUPhaseHooks(self.loop.model, self.loop.optimizer, _clock=self.gpu)
        if self.front == HUGGING_FACE:
            from lightning_gputime.huggingface import TransformersPhaseTimer

            return TransformersPhaseTimer(_clock=self.gpu)
        return GPUPhaseTimer(_clock=self.gpu, print_summary=False)

    def train(self, timer: Any) -> None:
        if self.front == HOOKS:
            self.train_by_hooks(timer)
        elif self.front == LIGHTNING:
            self.train_by_lightning(timer)
        else:
            self.train_by_transformers(timer)

    def train_by_hooks(self, timer: GPUPhaseHooks | None) -> None:
        with timer or contextlib.nullcontext():
            batches = self.loop.batches(4)
            for i, x in enumerate(timer.steps(batches) if timer else batches):
                self.loop.train(x)
                if i == 2:
                    self.call()

    def train_by_lightning(self, timer: GPUPhaseTimer | None) -> None:
        call = self.call

        class CallsBetweenSteps(pl.Callback):
            def on_train_batch_end(self, *args: Any) -> None:
                if args[-1] == 2:
                    call()

        model = Model(self.gpu)
        runner = trainer(*([timer] if timer else []), CallsBetweenSteps())
        profiler: Any = runner.profiler  # type: ignore[attr-defined]  # has no hint
        self.things = [*model.modules(), runner, profiler, runner.fit_loop]
        self.things += [runner.fit_loop.epoch_loop, runner.fit_loop.epoch_loop.val_loop]
        runner.fit(model, Loader(self.gpu, 4), Loader(self.gpu, 2))
        self.things += runner.optimizers

    def train_by_transformers(self, timer: Any) -> None:
        import transformers

        call = self.call

        class CallsBetweenSteps(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 2:
                    call()

        class Net(nn.Linear):
            def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
                out = super().forward(x)
                return {"loss": out.sum(), "logits": out}

        row = {"x": torch.ones(2), "labels": torch.ones(2)}
        arguments = training_arguments(self.tmp_path)
        callbacks = [timer, CallsBetweenSteps()] if timer else [CallsBetweenSteps()]
        runner = transformers.Trainer(
            Net(2, 2), arguments, train_dataset=[row] * 8, callbacks=callbacks
        )
        self.things = [runner.model, runner]
        runner.train()
        self.things.append(runner.optimizer)


def fork() -> None:
    """Fork a process that runs forward and backward, and wait until it ends."""
    child = os.fork()
    if not child:
        try:
            nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


class UserError(Exception):
    """An error of user code."""


def fail() -> None:
    raise UserError


def interrupt() -> None:
    raise KeyboardInterrupt


ENDS: dict[str, Call] = {
    "training ends": lambda: None,
    "training raises": fail,
    "Ctrl-C": interrupt,
    "training forks": fork,
    "timer is pickled": lambda: None,
    "attached timer is deleted": lambda: None,
}


@pytest.fixture(scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Train without a timer, so that libraries import modules and set attributes."""
    pytest.importorskip("transformers")
    import_module("lightning_gputime.huggingface")
    for front in FRONTS:
        for end in (lambda: None, fail):
            with contextlib.suppress(UserError):
                Run(front, end, tmp_path_factory.mktemp("warm")).train(None)
    with GPUPhaseHooks(nn.Linear(2, 2)):  # Imports torch's compiler.
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("front", FRONTS)
def test_training_leaves_libraries_unchanged(front: str, end: str, tmp_path: Path) -> None:
    run = Run(front, ENDS[end], tmp_path)
    before = snapshot()
    timer = run.timer()
    assert changes_since(before) == []
    if end == "timer is pickled" and front != HOOKS:
        timer = pickle.loads(pickle.dumps(timer))
    if end == "attached timer is deleted" and front == HOOKS:
        timer.attach()
        del timer
        gc.collect()
        # The next timer removes its hooks.
        with GPUPhaseHooks(nn.Linear(2, 2)):
            pass
    else:
        with contextlib.suppress(UserError, KeyboardInterrupt, SystemExit):
            run.train(timer)
        del timer
    assert left_on(*run.things) == []
    assert changes_since(before) == []


# References


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Disable garbage collection, so that reference cycles keep objects alive."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage")
def test_model_is_freed_after_its_timer_is_removed(gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    train(loop, 3)
    references = [weakref.ref(loop.model), weakref.ref(loop.optimizer)]
    del loop
    assert [reference() for reference in references] == [None, None]


@pytest.mark.usefixtures("no_garbage")
def test_callback_does_not_keep_the_model_alive(gpu: FakeGPU) -> None:
    class CollectsReferences(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            session: Any = timer._session
            references.extend(map(weakref.ref, (session, session._boundaries, timer._fit)))

        def on_validation_batch_end(self, *_: Any) -> None:
            evaluation: Any = timer._evaluations._running
            references.extend(map(weakref.ref, (evaluation, evaluation.boundaries)))

    references = list[Any]()
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False)
    collector, model = CollectsReferences(), Model(gpu)
    owner = trainer(collector, timer)
    owner.fit(model, Loader(gpu, 3), Loader(gpu, 2))
    assert {reference() for reference in references} == {None}
    # A trainer is part of a reference cycle.
    model_reference = weakref.ref(model)
    del owner, collector, model
    gc.collect()
    assert model_reference() is None


# The register


def test_docs_list_every_replaced_function() -> None:
    rows = [f"| {item.target} | {item.when} | {item.why} | {item.notes} |" for item in REGISTER]
    titles = "| patched | when | why no hook is used | notes |"
    table = "\n".join([titles, "| --- | --- | --- | --- |", *rows])
    assert table in MANUAL.read_text(), f"docs/reference/replaced.md should have:\n{table}"
    assert len(REGISTER) <= 12, "replace no more functions: use a hook"
