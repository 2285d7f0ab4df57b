"""Nothing stays: a register lists all that a timer replaces, and it is restored at the end."""

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
from fake_loop import Loop
from register import REGISTER
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

MANUAL = Path(__file__).parent.parent / "docs/reference/replaced.md"

LIBRARIES = {
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
    "transformers",
}

CHANGING: set[tuple[str, str]] = set()
"""Attributes that change by themselves."""

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


# Snapshots


Attributes = dict[str, object]


def snapshot() -> dict[str, Attributes]:
    """Returns all attributes of all modules and classes of the libraries, themselves."""
    found: dict[str, Attributes] = {"gc": {"callbacks": [*gc.callbacks]}}
    for name, module in [*sys.modules.items()]:
        if isinstance(module, ModuleType) and name.partition(".")[0] in LIBRARIES:
            found[name] = dict(vars(module))
            for word in found[name].values():
                if isinstance(word, type) and word.__module__.partition(".")[0] in LIBRARIES:
                    key = f"{word.__module__}.{word.__qualname__} {id(word)}"
                    found.setdefault(key, dict(vars(word)))
    return found


def is_plain(value: object) -> bool:
    """Tells counters, flags and names, which libraries set as they are used."""
    return value is None or isinstance(value, bool | int | float | str | ModuleType)


def changes(before: dict[str, Attributes], after: dict[str, Attributes]) -> list[str]:
    found = []
    for owner, attributes in before.items():
        now = after.get(owner, {})
        for name in attributes.keys() | now.keys():
            was, value = attributes.get(name), now.get(name)
            same = was == value if owner == "gc" else was is value
            changes_by_itself = (owner.partition(" ")[0], name) in CHANGING
            if not same and not changes_by_itself and not (is_plain(was) and is_plain(value)):
                found.append(f"{owner}.{name}: {was!r} -> {value!r}")
    return found


def is_ours(value: object) -> bool:
    module = getattr(type(value), "__module__", "") or ""
    if isinstance(value, FunctionType):
        return "lightning_gputime" in value.__code__.co_filename.split(os.sep)
    return module.startswith("lightning_gputime.")


def left_on(*things: Any) -> list[str]:
    """Return objects of the package that are attributes of objects, or in their collections."""
    found = []
    for thing in things:
        for name, value in vars(thing).items():
            inside = [*value.values()] if isinstance(value, dict) else [value]
            if any(is_ours(span) for span in inside):
                found.append(f"{type(thing).__name__}.{name}")
    return found


# The loops: each trains for some steps, and calls `at` in the midst of them.


At = Callable[[], object]


class Run:
    """One training with or without a timer."""

    def __init__(self, front: str, at: At, tmp_path: Path) -> None:
        self.front, self.at, self.tmp_path = front, at, tmp_path
        self.gpu = FakeGPU()
        self.things: list[Any] = []

    def timer(self) -> Any:
        if self.front == "hooks":
            self.loop = Loop(self.gpu)
            return GPUPhaseHooks(self.loop.model, self.loop.optimizer, _clock=self.gpu)
        if self.front == "huggingface":
            from lightning_gputime.huggingface import TransformersPhaseTimer

            return TransformersPhaseTimer(_clock=self.gpu)
        return GPUPhaseTimer(_clock=self.gpu, print_summary=False)

    def train(self, timer: Any) -> None:
        getattr(self, f"_{self.front}")(timer)

    def _hooks(self, timer: GPUPhaseHooks | None) -> None:
        loop = self.loop if timer else Loop(self.gpu)
        self.things = [loop.model, loop.optimizer]
        try:
            if timer is not None:
                timer.attach()
            for i, x in enumerate(timer.steps(loop.batches(4)) if timer else loop.batches(4)):
                loop.train(x)
                if i == 2:
                    self.at()
        finally:
            if timer is not None:
                timer.remove()

    def _lightning(self, timer: GPUPhaseTimer | None) -> None:
        at = self.at

        class Calls(pl.Callback):
            def on_train_batch_end(self, *args: Any) -> None:
                if args[-1] == 2:
                    at()

        model = Model(self.gpu)
        runner = trainer(*([timer] if timer else []), Calls())
        profiler: Any = runner.profiler  # type: ignore[attr-defined]  # has no hint
        self.things = [*model.modules(), runner, profiler, runner.fit_loop]
        self.things += [runner.fit_loop.epoch_loop, runner.fit_loop.epoch_loop.val_loop]
        runner.fit(model, Loader(self.gpu, 4), Loader(self.gpu, 2))
        self.things += runner.optimizers

    def _huggingface(self, timer: Any) -> None:
        import transformers

        at = self.at

        class Calls(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == 2:
                    at()

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Linear(2, 2)

            def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
                out = self.body(x)
                return {"loss": out.sum(), "logits": out}

        args = transformers.TrainingArguments(
            str(self.tmp_path),
            max_steps=4,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        example = {"x": torch.ones(2), "labels": torch.ones(2)}
        model = Net()
        callbacks = [timer, Calls()] if timer else [Calls()]
        runner = transformers.Trainer(model, args, train_dataset=[example] * 8, callbacks=callbacks)
        self.things = [*model.modules(), runner]
        runner.train()
        if runner.optimizer is not None:
            self.things.append(runner.optimizer)


def fork() -> None:
    """Forks off a process that computes something, and ends."""
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


FRONTS = ("hooks", "lightning", "huggingface")
ENDS: dict[str, At] = {
    "it ends": lambda: None,
    "it raises": fail,
    "Ctrl-C": interrupt,
    "it forks": fork,
    "it is pickled": lambda: None,
    "it is abandoned": lambda: None,
}


@pytest.fixture(scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lets libraries import, and keep, what they do without a timer."""
    for front in FRONTS:
        if front == "huggingface":
            pytest.importorskip("transformers")
            import_module("lightning_gputime.huggingface")
        for end in (lambda: None, fail):
            with contextlib.suppress(UserError):
                Run(front, end, tmp_path_factory.mktemp("warm")).train(None)
    with GPUPhaseHooks(nn.Linear(2, 2)):  # Imports torch's compiler.
        pass


def changes_but_train(before: Any) -> list[str]:
    """Return what has changed, but for `train` of transformers' Trainer.

    It is patched while a timer exists. That it is restored then is a test of trainer subclasses.
    """
    return [change for change in changes(before, snapshot()) if ".train: " not in change]


@pytest.mark.slow
@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("front", FRONTS)
def test_training_leaves_nothing_behind(front: str, end: str, tmp_path: Path) -> None:
    run = Run(front, ENDS[end], tmp_path)
    before = snapshot()
    timer = run.timer()
    assert changes_but_train(before) == []
    if end == "it is pickled" and front != "hooks":
        timer = pickle.loads(pickle.dumps(timer))
    if end == "it is abandoned" and front == "hooks":
        timer.attach()
        run.things = [run.loop.model, run.loop.optimizer]
        del timer
        gc.collect()
        # The next one takes its hooks off.
        with GPUPhaseHooks(nn.Linear(2, 2)):
            pass
    else:
        with contextlib.suppress(UserError, KeyboardInterrupt, SystemExit):
            run.train(timer)
        del timer
    assert left_on(*run.things) == []
    assert changes_but_train(before) == []


# References


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Lets Python collect no garbage: what goes is held by nobody."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def train_by_hooks() -> list[Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with GPUPhaseHooks(model, optimizer) as timer:
        for x in timer.steps([torch.ones(1, 2)] * 3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model, optimizer]


@pytest.mark.usefixtures("no_garbage")
def test_model_is_freed_after_its_timer_is_removed() -> None:
    held = [*map(weakref.ref, train_by_hooks())]
    assert [item() for item in held] == [None, None]


@pytest.mark.usefixtures("no_garbage")
def test_kept_callback_holds_no_model(gpu: FakeGPU) -> None:
    class Looks(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            session: Any = timer._session
            held.extend(map(weakref.ref, (session, session._boundaries, timer._fit)))

        def on_validation_batch_end(self, *_: Any) -> None:
            evaluation, *_ = getattr(timer._evaluations, "_running")  # noqa: B009
            held.extend(map(weakref.ref, (evaluation, evaluation.boundaries)))

    held = list[Any]()
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False)
    looks, model = Looks(), Model(gpu)
    owner = trainer(looks, timer)
    owner.fit(model, Loader(gpu, 3), Loader(gpu, 2))
    assert held
    assert {item() for item in held} == {None}
    # A trainer refers to itself.
    seen = weakref.ref(model)
    del owner, looks, model
    gc.collect()
    assert seen() is None


# The register


def table() -> str:
    """Returns the register as the manual shows it."""
    rows = [
        f"| {item.target} | {item.when} | {item.why} |"
        f" {'; '.join(filter(None, [item.idle, item.others]))} |"
        for item in REGISTER
    ]
    return "\n".join(["| replaced | when | why | else |", "| --- | --- | --- | --- |", *rows])


def test_docs_list_every_replaced_function() -> None:
    assert table() in MANUAL.read_text(), f"docs/reference/replaced.md should have:\n{table()}"
    assert len(REGISTER) <= 13
