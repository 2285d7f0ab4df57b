"""Stages of a loader, and the code of the user that runs in and between the steps of a Trainer."""

import copy
import pickle
from collections.abc import Callable, Iterator
from time import perf_counter_ns, sleep
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import FakeGPU
from fake_lightning import Loader, MemoryLogger, Model, timer_of, trainer
from fake_loop import Loop, hooks
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler
from torchmetrics import MeanMetric

from lightning_gputime import GPUPhaseHooks, PhaseSummary


class OnGPU:
    """Base class of objects that take time on the host of a fake GPU."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu


class Photos(Dataset[Tensor]):
    def __init__(self, gpu: FakeGPU, ms: float = 0.0) -> None:
        self.gpu, self.ms = gpu, ms

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        self.gpu.host_work(self.ms)
        return torch.ones(2)


class Stream(OnGPU, IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(12):
            self.gpu.host_work(5.0)
            yield torch.ones(2)


class Hardest(Sampler[int]):
    def __init__(self, gpu: FakeGPU, ms: float = 3.0) -> None:
        self.gpu, self.ms = gpu, ms

    def __iter__(self) -> Iterator[int]:
        for index in range(12):
            self.gpu.host_work(self.ms)
            yield index

    def __len__(self) -> int:
        return 12


def collating(gpu: FakeGPU, ms: float) -> Callable[[Any], Tensor]:
    def pad(examples: list[Tensor]) -> Tensor:
        gpu.host_work(ms)
        return torch.stack(examples)

    return pad


PHOTOS, STREAM = "Photos.__getitem__", "Stream.__iter__"


def loaders(gpu: FakeGPU) -> dict[str, tuple[Any, dict[str, tuple[str, float]]]]:
    """Return loaders, and the name and ms per batch of each stage that takes time."""
    pairs: dict[str, Any] = {"batch_size": 2}
    hardest, pad = Hardest(gpu), collating(gpu, 4.0)
    all_slow = DataLoader(Photos(gpu, 1.0), sampler=hardest, collate_fn=pad, **pairs)
    all_stages = {"sampler": ("Hardest", 6.0), "dataset": (PHOTOS, 2.0), "collate": ("pad", 4.0)}
    return {
        "dataset": (DataLoader(Photos(gpu, 4.0), **pairs), {"dataset": (PHOTOS, 8.0)}),
        "collate": (DataLoader(Photos(gpu), collate_fn=pad, **pairs), {"collate": ("pad", 4.0)}),
        "sampler": (
            DataLoader(Photos(gpu), sampler=hardest, **pairs),
            {"sampler": ("Hardest", 6.0)},
        ),
        "batch sampler": (
            DataLoader(Photos(gpu), batch_sampler=BatchSampler(hardest, 2, drop_last=False)),
            {"sampler": ("Hardest", 6.0)},
        ),
        "all": (all_slow, all_stages),
        "iterable": (DataLoader(Stream(gpu), **pairs), {"dataset": (STREAM, 10.0)}),
        "single items": (DataLoader(Photos(gpu, 4.0), batch_size=None), {"dataset": (PHOTOS, 4.0)}),
    }


LOADERS = [*loaders(FakeGPU())]


def assert_stages(summary: PhaseSummary, expected: dict[str, tuple[str, float]]) -> None:
    """Check the name and ms per batch of each stage that takes time."""
    culprits = [
        culprit
        for culprit in summary.measurement.culprits
        if culprit.entry == "data/fetch" and culprit.seconds
    ]
    assert {culprit.kind: culprit.name for culprit in culprits} == {
        kind: name for kind, (name, _) in expected.items()
    }
    for culprit in culprits:
        assert 1e3 * culprit.seconds / culprit.calls == pytest.approx(expected[culprit.kind][1])


@pytest.mark.parametrize("name", LOADERS)
def test_loader_stages_of_a_plain_loop_have_exact_times(name: str, loop: Loop) -> None:
    loader, expected = loaders(loop.gpu)[name]
    before = dict(vars(loader))
    with hooks(loop) as timer:
        for _ in range(2):
            for x in timer.steps(loader):
                assert vars(loader) == before
                loop.train(x)
    assert_stages(timer.summary(), expected)
    assert vars(loader) == before


class Pairs:
    """A batch sampler whose length is unknown."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2, 3])

    def __len__(self) -> int:
        raise NotImplementedError


def test_batch_sampler_needs_no_length(loop: Loop) -> None:
    loader = DataLoader(Photos(loop.gpu, 4.0), batch_sampler=Pairs())
    with hooks(loop) as timer:
        for x in timer.steps(loader):
            loop.train(x)
    assert_stages(timer.summary(), {"dataset": (PHOTOS, 8.0)})


@pytest.mark.parametrize("name", LOADERS)
def test_loader_stages_under_lightning_have_exact_times(name: str, gpu: FakeGPU) -> None:
    loader, expected = loaders(gpu)[name]
    timer = timer_of(gpu)
    trainer(timer, max_epochs=2).fit(Model(gpu), loader)
    assert_stages(timer.summary(), expected)


def test_loader_without_workers_is_timed_by_the_clock_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock of the loop does not count its waits for a core: half of the time here."""
    monkeypatch.setattr(
        "lightning_gputime._timer.loop_time", lambda: lambda: perf_counter_ns() // 2
    )

    class Slow(Dataset[Tensor]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Tensor:
            sleep(0.002)
            return torch.ones(4)

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with GPUPhaseHooks(model, optimizer, device="cpu", lines=False, every_n_steps=1) as timer:
        for batch in timer.steps(DataLoader(Slow(), 2)):
            model(batch).sum().backward()
            optimizer.step()
    summary = timer.summary()
    (loader,) = [row for row in summary.measurement.culprits if "Slow" in row.name]
    assert 1e3 * loader.seconds / loader.calls <= summary.rows["data"].mean_ms * 1.5


def test_timed_loader_yields_the_same_batches(gpu: FakeGPU) -> None:
    data = torch.arange(12.0)

    def items(timer: GPUPhaseHooks | None) -> list[float]:
        torch.manual_seed(3)
        loader: Any = DataLoader(data, batch_size=2, shuffle=True)  # type: ignore[arg-type]
        return [float(item) for x in (timer.steps(loader) if timer else loader) for item in x]

    with hooks(Loop(gpu)) as timer:
        timed = items(timer)
    assert timed == items(None)


def test_advice_on_a_slow_dataset_names_its_method(loop: Loop) -> None:
    loader = DataLoader(Photos(loop.gpu, 40.0), batch_size=2)
    with hooks(loop) as timer:
        for _ in range(4):
            for x in timer.steps(loader):
                loop.train(x)
    line = Photos.__getitem__.__code__.co_firstlineno
    advice = timer.summary().advice[0]
    assert advice.startswith(f"`Photos.__getitem__` (test_culprits.py:{line}) takes 66 ms of ")
    assert "num_workers=" in advice


def test_copy_of_a_timer_keeps_the_culprits_and_the_lines(loop: Loop) -> None:
    with hooks(loop, lines=True) as timer:
        for _ in range(3):
            for x in timer.steps(DataLoader(Photos(loop.gpu, 4.0))):
                loop.gpu.host_work(9.0)
                loop.train(x)
        timer.summary()  # Reads the steps.
        copied = copy.deepcopy(timer)
        results = pickle.loads(pickle.dumps(timer._results))
    found = timer.summary().measurement
    in_steps = {str(row) for row in found.lines if not row.entry}
    assert found.culprits
    assert len(in_steps) > 3
    for measured in (copied.summary().measurement, results.measurement()):
        assert measured.culprits == found.culprits
        assert {str(row) for row in measured.lines if not row.entry} == in_steps
    assert timer.summary().to_dict()["culprits"][0]["entry"] == "data/fetch"


# Hooks of a Trainer


class Corpus(OnGPU, pl.LightningDataModule):
    def prepare_data(self) -> None:
        self.gpu.host_work(70.0)

    def setup(self, stage: str) -> None:
        self.gpu.host_work(30.0)

    def train_dataloader(self) -> Any:
        return Loader(self.gpu, 20)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.gpu.host_work(21.0)
        return batch


class Ranking(MeanMetric):
    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def compute(self) -> Any:
        self.gpu.host_work(40.0)
        return super().compute()


class Ranked(Model):
    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)
        self.ranking = Ranking(gpu)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gpu.host_work(25.0)

    def on_train_epoch_end(self) -> None:
        self.gpu.host_work(20.0)
        self.ranking.update(1.0)
        self.ranking.compute()


class Uploads(OnGPU, MemoryLogger):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.gpu.host_work(9.0)


class Histogram(OnGPU, pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.gpu.host_work(13.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.gpu.host_work(14.0)


def code_of(summary: PhaseSummary) -> dict[tuple[str, str], float]:
    """Return the ms of the user's code by entry and function; inside steps, by its phase."""
    return {
        (row.entry or row.main_phase, row.function): row.ms
        for row in summary.lines
        if row.file and not row.is_library
    }


def test_hooks_in_the_steps_of_a_trainer_are_named(gpu: FakeGPU) -> None:
    timer, logger = timer_of(gpu, lines=True), Uploads(gpu)
    runner = trainer(timer, Histogram(gpu), logger=logger, max_epochs=2, log_every_n_steps=1)
    runner.fit(Ranked(gpu), datamodule=Corpus(gpu))
    found = code_of(timer.summary())
    # The device works for 13 ms, in which it does not wait for the hook before the update.
    assert found["data", "Corpus.on_after_batch_transfer"] == pytest.approx(20.0)
    assert found["optimizer", "Ranked.on_before_optimizer_step"] == pytest.approx(12.375)
    assert found["callbacks/Histogram.on_train_batch_end", "Histogram.on_train_batch_end"] > 10.0
    assert found["callbacks", "Uploads.log_metrics"] > 8.0


BETWEEN_STEPS = {
    ("set-up", "Corpus.prepare_data"): 70.0,
    ("set-up", "Corpus.setup"): 30.0,
    # The start of the first epoch, both between the epochs, and the end of the last epoch.
    ("epoch ends", "Ranked.on_train_epoch_end"): 2 * 60.0 / 3,
    ("epoch ends", "Histogram.on_train_epoch_start"): 2 * 13.0 / 3,
}
"""Milliseconds per occurrence of an entry, by entry and function."""

ENTRIES = {entry for entry, _ in BETWEEN_STEPS}


def test_hooks_between_the_steps_of_a_trainer_have_exact_times(gpu: FakeGPU) -> None:
    class Small(Corpus):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    class Ranks(Ranked):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

    timer = timer_of(gpu, lines=True)
    trainer(timer, Histogram(gpu), max_epochs=2).fit(Ranks(gpu), datamodule=Small(gpu))
    found = {key: ms for key, ms in code_of(timer.summary()).items() if key[0] in ENTRIES}
    assert found == {key: pytest.approx(ms) for key, ms in BETWEEN_STEPS.items()}
    [advice] = (item for item in timer.summary().diagnosis.advice if item.code == "epoch_ends")
    assert advice.text.startswith("`Ranked.on_train_epoch_end` (test_culprits.py:")
