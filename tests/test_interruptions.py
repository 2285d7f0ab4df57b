"""Ctrl-C at any line of the package leaves no hooks, and does not change the training."""

import gc
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import FakeGPU
from fake_lightning import trainer
from fake_loop import Logger, training_arguments
from test_nothing_stays import left_on
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, phase
from lightning_gputime._instrumentation import traced
from lightning_gputime._ledger import schedule, watch
from lightning_gputime._session import session

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

PACKAGE = str(Path(lightning_gputime.__file__).parent)
DATA = [torch.full((2, 2), float(i + 1)) for i in range(4)]
AUTOGRAD: Any = torch.autograd
MONITORING: Any = getattr(sys, "monitoring", None)


class Interrupter:
    """Counts the executed lines of the package, and raises KeyboardInterrupt at one of them.

    With `of_calls`, count starts and ends of calls instead, which leaves the trace function alone.
    """

    def __init__(self, at: int | None = None, *, of_calls: bool = False) -> None:
        self.lines, self.place, self._at = 0, "", at
        self._of_calls = of_calls

    def __enter__(self) -> "Interrupter":
        if self._of_calls:
            sys.setprofile(self._profile_call)
        else:
            sys.settrace(self._trace_call)
        return self

    def __exit__(self, *_: object) -> None:
        if self._of_calls:
            sys.setprofile(None)
        else:
            sys.settrace(None)

    def _profile_call(self, frame: FrameType, event: str, arg: object) -> None:
        if self._trace_call(frame, event, arg) is not None:
            self.lines += 1
            if self.lines == self._at:
                sys.setprofile(None)
                self.place = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
                raise KeyboardInterrupt

    def _trace_call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        # Python ignores errors in finalizers.
        is_ours = code.co_filename.startswith(PACKAGE) and code.co_name != "__del__"
        return self._trace_line if is_ours else None

    def _trace_line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                sys.settrace(None)
                self.place = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace_line


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(2, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        out = self.body(x)
        return out if labels is None else {"loss": out.sum(), "logits": out}


@dataclass
class Training:
    """A training with or without a timer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Callable[[], object]
    patched: list[Any] = field(default_factory=list)  # Other objects that a timer may patch.


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


def lightning(has_timer: bool, tmp_path: Path) -> Training:
    model = Module()
    options: dict[str, Any] = {"print_summary": False, "save_path": tmp_path / "run.json"}
    callbacks = [GPUPhaseTimer(_clock=FakeGPU(), **options)] if has_timer else []
    owner = trainer(*callbacks, log_every_n_steps=1)
    loop: Any = owner.fit_loop
    parts = [owner, loop, loop.epoch_loop, loop.epoch_loop.val_loop, owner.strategy]
    patched = [*parts, owner.profiler]  # type: ignore[attr-defined]  # has no hint
    data: Any = DATA
    loaders: Any = [DataLoader(batches, batch_size=None) for batches in (data, data[:2])]
    return Training(model, model.optimizer, lambda: owner.fit(model, *loaders), patched)


def huggingface(has_timer: bool, tmp_path: Path) -> Training:
    import transformers

    from lightning_gputime.huggingface import TransformersPhaseTimer

    evaluates = {"eval_strategy": "steps", "eval_steps": 2}
    args = training_arguments(tmp_path, max_steps=3, logging_steps=1, **evaluates)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = [{"x": torch.ones(2), "labels": torch.ones(2)}] * 8
    timer = TransformersPhaseTimer(_clock=FakeGPU(), print_summary=False)
    owner: Any = transformers.Trainer(
        model, args, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer, None),
        callbacks=[timer] * has_timer,
    )  # fmt: skip
    owner.remove_callback(transformers.PrinterCallback)
    others = [callback for callback in owner.callback_handler.callbacks if callback is not timer]
    patched = [owner, owner.callback_handler, *others]
    return Training(model, optimizer, owner.train, patched)


_NOT_ITERATED = "Please call `iter(combined_loader)` first."

CASES: dict[str, tuple[int, Callable[[bool, Path], Training]]] = {
    "steps": (300, plain(iterate_with_evaluations, logger=Logger(), log_every_n_steps=1)),
    "step": (300, plain(step_by_hand, every_n_steps=2, observers=[print])),
    "accumulated": (250, plain(leave_loops, accumulate_grad_batches="auto")),
    "examined": (300, plain(examine, every_n_steps=1)),
    "off": (100, plain(train_for_long, every_n_steps=30)),
    "lightning": (150, lightning),
    "huggingface": (60, huggingface),
}
"""Trainings, and the number of lines at which each is interrupted."""


def first_line_of(function: Callable[..., object]) -> str:
    """Return the place of a function's first line, before its `try`."""
    code = function.__code__
    line = min(line for *_, line in code.co_lines() if line and line > code.co_firstlineno)
    return f"{code.co_filename.removeprefix(PACKAGE)}:{line}"


ENDS = {first_line_of(end) for end in (GPUPhaseHooks.__exit__, GPUPhaseHooks.remove)}
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
        monkeypatch.setattr(schedule, "_FIRST", (*range(2, 100),))
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
        found = left_on(*training.model.modules(), training.optimizer, *training.patched)
        if shared() != before:
            found.append("something on torch or Python")
        if state_of(training.model) not in states:
            found.append("other weights")
        # If an interruption comes while iterators are created, Lightning itself raises.
        is_of_lightning = isinstance(ended, RuntimeError) and _NOT_ITERATED in str(ended)
        if not (is_of_lightning or isinstance(ended, KeyboardInterrupt | SystemExit | None)):
            found.append(f"{ended!r} raised")
        if found and interrupter.place not in ENDS:
            wrong.append((at, interrupter.place, found))
    assert wrong == []
