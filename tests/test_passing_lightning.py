"""Lightning fits in which steps pass of which the timer hears nothing but the ends of batches."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from fake_gpu import STEP_MS, FakeGPU
from fake_lightning import Loader, Model, fit, trainer
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

from lightning_gputime import GPUPhaseTimer

EVERY, N = 5, 23


class Hears(GPUPhaseTimer):
    """A timer that hears of all batches: a subclass may need its hook in each of them."""

    def on_train_batch_start(self, *args: Any) -> None:
        super().on_train_batch_start(*args)


class Accumulates(Model):
    """Updates by hand, after every second batch."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Skips(Model):
    """Leaves every seventh update out."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if args[1] % 7:
            super().optimizer_step(*args, **kwargs)
        else:
            args[-1]()


class Samples(pl.Callback):
    """Calls the model between the batches."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        if batch is not None:
            pl_module(batch)


class Validates(Model):
    """Also validates, for a while."""

    def val_dataloader(self) -> Any:
        return Loader(self.gpu, 2)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.gpu.host_work(3.0)


class Gaps(Model):
    """Makes each eighth batch None, on which Lightning does not train."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)
        self.fetched = 0

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor | None:
        self.fetched += 1
        return batch if self.fetched % 8 else None


class ValidatesInside(Validates):
    """Also runs a validation by itself, inside of a batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx % 10 == 7:
            validate(self.trainer)
        return super().training_step(batch, batch_idx)


def validate(trainer: Any) -> None:
    connector = trainer._logger_connector
    is_first, trainer.validating = connector._first_loop_iter, True
    trainer.fit_loop.epoch_loop.val_loop.run()
    connector._first_loop_iter, trainer.training = is_first, True


OPTIONS: list[tuple[type[Model], dict[str, Any]]] = [
    (Model, {}),
    (Model, {"max_epochs": 3}),
    (Model, {"max_epochs": 3, "accumulate_grad_batches": 2}),
    (Model, {"max_epochs": 2, "limit_train_batches": 7}),
    (Validates, {"max_epochs": 2, "val_check_interval": 4}),
    (Validates, {"check_val_every_n_epoch": None, "val_check_interval": 3, "max_epochs": 2}),
    (Accumulates, {"max_epochs": 2}),
    (Skips, {"max_epochs": 2}),
    (Gaps, {"max_epochs": 2}),
    (Gaps, {"max_epochs": 2, "accumulate_grad_batches": 2}),
    (ValidatesInside, {"max_epochs": 2}),
]


def found(
    gpu: FakeGPU, timer: GPUPhaseTimer, model: type[Model], callbacks: list[pl.Callback], **how: Any
) -> Any:
    """Trains, and returns all that the timer knows."""
    fit(gpu, model(gpu), N, timer=timer, callbacks=callbacks, **how)
    summary = timer.summary()
    assert summary.ledger is not None
    return timer.history().tolist(), str(summary), summary.ledger.entries_s


def timer_of(gpu: FakeGPU, kind: type[GPUPhaseTimer] = GPUPhaseTimer) -> GPUPhaseTimer:
    return kind(clock=gpu, summary=False, warmup_steps=0, every_n_steps=EVERY)


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize("callback", [None, Samples])
@pytest.mark.parametrize(("model", "how"), OPTIONS)
def test_it_knows_as_much_as_if_it_heard_of_all(
    model: type[Model], how: dict[str, Any], callback: Callable[[], pl.Callback] | None
) -> None:
    results = []
    for kind in (GPUPhaseTimer, Hears):
        gpu = FakeGPU()
        callbacks = [] if callback is None else [callback()]
        results.append(found(gpu, timer_of(gpu, kind), model, callbacks, **how))
    assert results[0] == results[1]
    assert len(results[0][0]) > 1


@pytest.mark.parametrize("n", range(16, 21))
def test_callbacks_before_it_find_the_means_where_an_epoch_ends(n: int) -> None:
    class Finds(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            means.append(float(trainer.callback_metrics["phase_time/optimizer_ms"]))

    gpu, means = FakeGPU(), list[float]()
    timer = timer_of(gpu)
    loop = trainer(Finds(), timer, max_epochs=2)
    loop.fit(Model(gpu), Loader(gpu, n))
    assert means == [2.0, 2.0]
    assert "on_advance_end" not in vars(loop.fit_loop)


def test_a_validation_before_it_at_the_end_of_a_batch_takes_no_step_away(gpu: FakeGPU) -> None:
    class Runs(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if args[-1] == 7:
                validate(trainer)

    timer = timer_of(gpu)
    trainer(Runs(), timer).fit(Validates(gpu), Loader(gpu, 20))
    assert timer.history()["step"].tolist() == [4, 9, 14, 19]


class Watch(pl.Callback):
    """Notes in which batches the timer hears of their start, and of what the trainer begins."""

    def __init__(self, watched: Callable[[], GPUPhaseTimer]) -> None:
        self.watched = watched
        self.heard: list[bool] = []
        self.in_copies: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        timer = self.watched()
        hears = timer.on_train_batch_start is not None
        assert hears == ("start" in vars(trainer.profiler))
        self.heard.append(hears)
        copies = copy.deepcopy(timer), pickle.loads(pickle.dumps(timer))
        self.in_copies += ["on_train_batch_start" in vars(one) for one in copies]


def test_it_hears_of_the_timed_steps_and_of_those_beside_them(gpu: FakeGPU) -> None:
    timer = timer_of(gpu)
    watch = Watch(lambda: timer)
    fit(gpu, Model(gpu), 20, timer=timer, callbacks=[watch])
    # The first, the one before each that is timed, that one, and the next, until that was read.
    assert [i for i, heard in enumerate(watch.heard) if heard] == [
        *(0, 3, 4, 5),
        *(8, 9, 10),
        *(13, 14, 15),
        *(18, 19),
    ]
    assert not any(watch.in_copies)
    assert "on_train_batch_start" not in vars(timer)


def test_where_all_steps_are_timed_it_hears_of_all(gpu: FakeGPU) -> None:
    timer = GPUPhaseTimer(clock=gpu, summary=False)
    watch = Watch(lambda: timer)
    fit(gpu, Model(gpu), 20, timer=timer, callbacks=[watch])
    assert all(watch.heard)


def test_the_hook_comes_back_after_an_error(gpu: FakeGPU) -> None:
    class Fails(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            if batch_idx == 2:
                assert vars(timer)["on_train_batch_start"] is None
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    timer = timer_of(gpu)
    model: Any = Fails(gpu)
    with pytest.raises(ZeroDivisionError):
        fit(gpu, model, timer=timer)
    assert "on_train_batch_start" not in vars(timer)
    assert "start" not in vars(model.trainer.profiler)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_another_profiler_makes_it_deaf_to_no_step(gpu: FakeGPU, at: int) -> None:
    class Swaps(Model):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == at:
                self.trainer.profiler = PassThroughProfiler()  # type: ignore[attr-defined]

    timer = timer_of(gpu)
    fit(gpu, Swaps(gpu), 20, timer=timer)
    assert timer.history()["step"].tolist() == [4, 9, 14, 19]


@pytest.mark.parametrize("at", range(1, 8))
def test_who_puts_something_in_front_of_the_profiler_meanwhile_takes_nothing_away(
    gpu: FakeGPU, at: int
) -> None:
    class Wraps(Model):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == at:
                profiler = self.trainer.profiler  # type: ignore[attr-defined]
                start = profiler.start

                def hears(name: str) -> None:
                    heard.append(name)
                    start(name)

                profiler.start = hears

    timer, heard = timer_of(gpu), list[str]()
    fit(gpu, Wraps(gpu), 20, timer=timer)
    assert heard.count("run_training_batch") == 20 - at
    assert timer.history()["step"].tolist() == [4, 9, 14, 19]
    # `data` has its parts in each.
    assert timer.history()["data/fetch_ms"].tolist() == [1.0] * 4


def test_a_second_timer_hears_while_the_first_does_not(gpu: FakeGPU) -> None:
    some, all_ = timer_of(gpu), GPUPhaseTimer(clock=gpu, summary=False, warmup_steps=0, prefix="b")
    fit(gpu, Model(gpu), 20, timer=some, callbacks=[all_])
    assert some.history()["step"].tolist() == [4, 9, 14, 19]
    assert all_.summary().steps == 20
    for timer in (some, all_):
        assert {*timer.history()["forward_ms"].tolist()} == {STEP_MS["forward"]}


def test_a_timer_that_is_removed_meanwhile_leaves_nothing(gpu: FakeGPU) -> None:
    class Gives(Model):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            if batch_idx == 7:
                timer.teardown(self.trainer, self, "fit")

    timer = timer_of(gpu)
    model = Gives(gpu)
    fit(gpu, model, 20, timer=timer)
    assert timer.history()["step"].tolist() == [4]
    assert "on_train_batch_start" not in vars(timer)


def test_a_function_that_removes_it_in_a_step_that_passes_leaves_nothing(gpu: FakeGPU) -> None:
    class Stalls(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            # It is known to be slow where the last step ends that passes.
            self.gpu.host_work(330.0 if batch_idx == 66 else 30.0)
            return super().training_step(batch, batch_idx)

    def removes(slow: Any) -> None:
        removed.append(slow.step)
        timer.teardown(model.trainer, model, "fit")

    removed: list[int] = []
    options: dict[str, Any] = {"every_n_steps": EVERY, "on_slow_step": removes}
    timer = GPUPhaseTimer(clock=gpu, summary=False, warmup_steps=0, **options)
    model: Any = Stalls(gpu)
    fit(gpu, model, 80, timer=timer)
    assert removed == [66]
    assert "start" not in vars(model.trainer.profiler)
    assert "on_train_batch_start" not in vars(timer)
