"""A training with a timer restores all that it replaces, also if it fails or Ctrl-C ends it."""

import contextlib
import gc
import itertools
import os
import pickle
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import FakeGPU
from fake_lightning import Loader, Model, callback, trainer
from fake_loop import Logger, Loop, train, training_arguments
from register import REGISTER
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, phase
from lightning_gputime._instrumentation import traced
from lightning_gputime._ledger import examiner, watch
from lightning_gputime._session import session

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


# Trainings


Call = Callable[[], object]
DATA = [torch.full((2, 2), float(i + 1)) for i in range(4)]


def do_nothing() -> None:
    pass


@dataclass
class Training:
    """A training with or without a timer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Call
    patched: list[Any] = field(default_factory=list)  # Other objects that a timer may patch.

    def left(self) -> list[str]:
        return left_on(*self.model.modules(), self.optimizer, *self.patched)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(2, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        out = self.body(x)
        return out if labels is None else {"loss": out.sum(), "logits": out}


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).sum()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer


def lightning(timers: list[Any], _: Path, call: Call = do_nothing) -> Training:
    """Return a fit that calls a function after the third of its four batches."""
    calls = callback(on_train_batch_end=lambda *args: call() if args[-1] == 2 else None)
    model, owner = Module(), trainer(*timers, calls, log_every_n_steps=1)
    loop: Any = owner.fit_loop
    parts = [owner, loop, loop.epoch_loop, loop.epoch_loop.val_loop, owner.strategy]
    patched = [*parts, owner.profiler]  # type: ignore[attr-defined]  # has no hint
    data: Any = DATA
    loaders: Any = [DataLoader(batches, batch_size=None) for batches in (data, data[:2])]
    return Training(model, model.optimizer, lambda: owner.fit(model, *loaders), patched)


def huggingface(timers: list[Any], path: Path, call: Call = do_nothing) -> Training:
    """Return a training of three steps that calls a function after the second."""
    import transformers

    class CallsBetweenSteps(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2:
                call()

    evaluates = {"eval_strategy": "steps", "eval_steps": 2}
    args = training_arguments(path, max_steps=3, logging_steps=1, **evaluates)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = [{"x": torch.ones(2), "labels": torch.ones(2)}] * 8
    owner: Any = transformers.Trainer(
        model, args, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer, None),
        callbacks=[*timers, CallsBetweenSteps()],
    )  # fmt: skip
    owner.remove_callback(transformers.PrinterCallback)
    others = [found for found in owner.callback_handler.callbacks if found not in timers]
    return Training(model, optimizer, owner.train, [owner, owner.callback_handler, *others])


# Ends of a training


HOOKS, LIGHTNING, HUGGING_FACE = FRONTS = ("hooks", "lightning", "huggingface")


def timer_and_training(front: str, call: Call, path: Path) -> tuple[Any, Callable[[Any], Training]]:
    """Return a timer, and a function that makes a training with it, or without it from None."""
    if front == HOOKS:
        loop = Loop(FakeGPU())

        def run(timer: GPUPhaseHooks | None) -> None:
            with timer or contextlib.nullcontext():
                batches = loop.batches(4)
                for number, x in enumerate(timer.steps(batches) if timer else batches):
                    loop.train(x)
                    if number == 2:
                        call()

        hooks = GPUPhaseHooks(loop.model, loop.optimizer, _clock=loop.gpu)
        return hooks, lambda timer: Training(loop.model, loop.optimizer, partial(run, timer))
    if front == LIGHTNING:
        timer: Any = GPUPhaseTimer(_clock=FakeGPU(), print_summary=False)
        return timer, lambda timer: lightning([timer] if timer else [], path, call)
    from lightning_gputime.huggingface import TransformersPhaseTimer

    timer = TransformersPhaseTimer(_clock=FakeGPU())
    return timer, lambda timer: huggingface([timer] if timer else [], path, call)


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
    "training ends": do_nothing,
    "training raises": fail,
    "Ctrl-C": interrupt,
    "training forks": fork,
    "timer is pickled": do_nothing,
    "attached timer is deleted": do_nothing,
}


@pytest.fixture(scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Train without a timer, so that libraries import modules and set attributes."""
    pytest.importorskip("transformers")
    import_module("lightning_gputime.huggingface")
    for front in FRONTS:
        for end in (do_nothing, fail):
            with contextlib.suppress(UserError):
                timer_and_training(front, end, tmp_path_factory.mktemp("warm"))[1](None).run()
    with GPUPhaseHooks(nn.Linear(2, 2)):  # Imports torch's compiler.
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("front", FRONTS)
def test_training_leaves_libraries_unchanged(front: str, end: str, tmp_path: Path) -> None:
    before = snapshot()
    timer, make = timer_and_training(front, ENDS[end], tmp_path)
    assert changes_since(before) == []
    if end == "timer is pickled" and front != HOOKS:
        timer = pickle.loads(pickle.dumps(timer))
    training = make(timer)
    if end == "attached timer is deleted" and front == HOOKS:
        timer.attach()
        training = make(None)
        del timer
        gc.collect()
        # The next timer removes its hooks.
        with GPUPhaseHooks(nn.Linear(2, 2)):
            pass
    else:
        with contextlib.suppress(UserError, KeyboardInterrupt, SystemExit):
            training.run()
        del timer
    assert training.left() == []
    del make
    training.run = do_nothing  # It refers to the timer.
    assert changes_since(before) == []


# Ctrl-C at any line of the package


PACKAGE = str(Path(lightning_gputime.__file__).parent)
AUTOGRAD: Any = torch.autograd
MONITORING: Any = getattr(sys, "monitoring", None)


class Interrupter:
    """Counts the executed lines of the package, and raises KeyboardInterrupt at one of them.

    With `of_calls`, count starts and ends of calls instead, which leaves the trace function alone.
    """

    def __init__(self, at: int | None = None, *, of_calls: bool = False) -> None:
        self.lines, self.place, self._at = 0, "", at
        self._set = sys.setprofile if of_calls else sys.settrace
        self._call: Any = self._profile_call if of_calls else self._trace_call

    def __enter__(self) -> "Interrupter":
        self._set(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        self._set(None)

    def _profile_call(self, frame: FrameType, event: str, arg: object) -> None:
        if self._trace_call(frame, event, arg) is not None:
            self._count(frame)

    def _trace_call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        # Python ignores errors in finalizers.
        is_ours = code.co_filename.startswith(PACKAGE) and code.co_name != "__del__"
        return self._trace_line if is_ours else None

    def _trace_line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self._count(frame)
        return self._trace_line

    def _count(self, frame: FrameType) -> None:
        self.lines += 1
        if self.lines == self._at:
            self._set(None)
            self.place = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
            raise KeyboardInterrupt


def plain(use: Callable[..., None], **options: Any) -> Callable[[bool, Path], Training]:
    """Return a function that makes a training with a plain loop."""

    def make(has_timer: bool, _: Path) -> Training:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        timer: Any = MagicMock(steps=lambda loader: loader)  # Does nothing.
        if has_timer:
            timer = GPUPhaseHooks(model, optimizer, _clock=FakeGPU(), warmup_steps=0, **options)

        def update(x: Tensor) -> None:
            optimizer.zero_grad()
            with phase("name"):
                loss = model(x).sum()
            loss.backward()
            optimizer.step()

        return Training(model, optimizer, lambda: use(timer, update, model))

    return make


def iterate_with_evaluations(timer: Any, update: Any, model: nn.Module) -> None:
    with timer:
        for _ in range(2):
            for x in timer.steps(DATA[:2]):
                update(x)
            model.eval()
            with torch.no_grad():
                for x in timer.steps(DATA[:2]):
                    model(x)
            model.train()
            with timer.paused():
                model(DATA[0])
        timer.summary()


def step_by_hand(timer: Any, update: Any, model: nn.Module) -> None:
    try:
        timer.attach()
        for x in DATA:
            update(x)
            timer.step()
    finally:
        timer.remove()


def leave_loops(timer: Any, update: Any, model: nn.Module) -> None:
    with timer:
        for n in (1, 2):
            for x in itertools.islice(timer.steps(DATA), n):
                model(x).sum().backward()
        for x in timer.steps(DATA):
            update(x)
            break


def train_for_long(timer: Any, update: Any, model: nn.Module) -> None:
    with timer:
        for x in timer.steps(DATA * 8):
            update(x)


def examine(timer: Any, update: Any, model: nn.Module) -> None:
    with timer:
        for x in timer.steps(DATA * 2):
            update(x)
        for x in timer.steps(DATA[:3]):
            update(x)


def timed_lightning(has_timer: bool, path: Path) -> Training:
    options: dict[str, Any] = {"print_summary": False, "save_path": path / "run.json"}
    return lightning([GPUPhaseTimer(_clock=FakeGPU(), **options)] if has_timer else [], path)


def timed_huggingface(has_timer: bool, path: Path) -> Training:
    from lightning_gputime.huggingface import TransformersPhaseTimer

    timer = TransformersPhaseTimer(_clock=FakeGPU(), print_summary=False)
    return huggingface([timer] if has_timer else [], path)


_NOT_ITERATED = "Please call `iter(combined_loader)` first."

CASES: dict[str, tuple[int, Callable[[bool, Path], Training]]] = {
    "steps": (300, plain(iterate_with_evaluations, logger=Logger(), log_every_n_steps=1)),
    "step": (300, plain(step_by_hand, every_n_steps=2, observers=[print])),
    "accumulated": (250, plain(leave_loops, accumulate_grad_batches="auto")),
    "examined": (300, plain(examine, every_n_steps=1)),
    "off": (100, plain(train_for_long, every_n_steps=30)),
    "lightning": (150, timed_lightning),
    "huggingface": (60, timed_huggingface),
}
"""Trainings, and the number of lines at which each is interrupted."""


def first_line_of(function: Callable[..., object]) -> str:
    """Return the place of a function's first line, before its `try`."""
    code = function.__code__
    line = min(line for *_, line in code.co_lines() if line and line > code.co_firstlineno)
    return f"{code.co_filename.removeprefix(PACKAGE)}:{line}"


ATTACHED = {first_line_of(end) for end in (GPUPhaseHooks.__exit__, GPUPhaseHooks.remove)}
"""Places where an interrupt leaves the timer attached, so that a user has to remove it again."""


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)  # After an interruption Lightning ignores the signal.


def state_of(model: nn.Module) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def shared() -> list[Any]:
    """Return the places where timers change torch and Python, and their lists of active timers."""
    return [
        AUTOGRAD._engine_run_backward,
        vars(nn.Module).get("__getstate__"),
        [*torch_optimizer._global_optimizer_pre_hooks],
        [*torch_optimizer._global_optimizer_post_hooks],
        [*gc.callbacks],
        [*session._attached],
        [*traced._active],
        vars(DataLoader)["__iter__"],
        watch._running,
        [MONITORING.get_tool(number) for number in range(6)] if MONITORING else [],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_interrupt_at_any_line_leaves_no_hooks(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "examined":
        monkeypatch.setattr(examiner, "_FIRST", (*range(2, 100),))
    # On Python 3.11, lines are followed with the trace function.
    interrupter_at = partial(Interrupter, of_calls=case == "examined" and MONITORING is None)
    if case == "huggingface":
        pytest.importorskip("transformers")
    n, make = CASES[case]
    untimed = make(False, tmp_path)
    states = {state_of(untimed.model)}
    untimed.optimizer.register_step_post_hook(lambda *_: states.add(state_of(untimed.model)))
    untimed.run()
    make(True, tmp_path).run()  # Now libraries have imported their modules and filled caches.
    with interrupter_at() as counter:
        make(True, tmp_path).run()
    before, wrong = shared(), []
    for at in range(1, counter.lines + 1, max(counter.lines // n, 1)):
        training = make(True, tmp_path)
        ended: BaseException | None = None
        with interrupter_at(at) as interrupter:
            try:
                training.run()
            except BaseException as error:
                ended = error
        found = training.left()
        if shared() != before:
            found.append("something on torch or Python")
        if state_of(training.model) not in states:
            found.append("other weights")
        # If an interruption comes while iterators are created, Lightning itself raises.
        is_of_lightning = isinstance(ended, RuntimeError) and _NOT_ITERATED in str(ended)
        if not (is_of_lightning or isinstance(ended, KeyboardInterrupt | SystemExit | None)):
            found.append(f"{ended!r} raised")
        if found and interrupter.place not in ATTACHED:
            wrong.append((at, interrupter.place, found))
    assert wrong == []


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
