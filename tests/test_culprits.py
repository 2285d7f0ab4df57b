"""Culprits: calls by name, stages of a loader, lines of user code."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import FakeGPU
from fake_lightning import Loader, MemoryLogger, Model, timer_of, trainer
from fake_loop import Loop, hooks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchmetrics import MeanMetric

from lightning_gputime import GPUPhaseHooks, PhaseSummary
from lightning_gputime._diagnosis.repeated import repeated_calls


class Photos(Dataset[Tensor]):
    def __init__(self, gpu: FakeGPU, ms: float = 0.0) -> None:
        self.gpu, self.ms = gpu, ms

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        self.gpu.host_work(self.ms)
        return torch.ones(2)


class Stream(IterableDataset[Tensor]):
    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu

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


LOADERS: dict[str, tuple[Callable[[FakeGPU], Any], dict[str, tuple[str, float]]]] = {
    "dataset": (
        lambda gpu: DataLoader(Photos(gpu, 4.0), batch_size=2),
        {"dataset": ("Photos.__getitem__", 8.0)},
    ),
    "collate": (
        lambda gpu: DataLoader(Photos(gpu), batch_size=2, collate_fn=collating(gpu, 6.0)),
        {"collate": ("pad", 6.0)},
    ),
    "sampler": (
        lambda gpu: DataLoader(Photos(gpu), batch_size=2, sampler=Hardest(gpu)),
        {"sampler": ("Hardest", 6.0)},
    ),
    "all": (
        lambda gpu: DataLoader(
            Photos(gpu, 1.0), batch_size=2, sampler=Hardest(gpu), collate_fn=collating(gpu, 4.0)
        ),
        {
            "sampler": ("Hardest", 6.0),
            "dataset": ("Photos.__getitem__", 2.0),
            "collate": ("pad", 4.0),
        },
    ),
    "iterable": (
        lambda gpu: DataLoader(Stream(gpu), batch_size=2),
        {"dataset": ("Stream.__iter__", 10.0)},
    ),
    "single items": (
        lambda gpu: DataLoader(Photos(gpu, 4.0), batch_size=None),
        {"dataset": ("Photos.__getitem__", 4.0)},
    ),
}


def stages(summary: PhaseSummary) -> dict[str, tuple[str, float]]:
    """Return name and time per batch (in milliseconds) of each stage that takes time."""
    return {
        culprit.kind: (culprit.name, 1e3 * culprit.seconds / culprit.calls)
        for culprit in summary.measurement.culprits
        if culprit.entry == "data/fetch" and culprit.seconds
    }


def assert_stages(summary: PhaseSummary, expected: dict[str, tuple[str, float]]) -> None:
    found = stages(summary)
    assert found.keys() == expected.keys()
    for kind, (name, ms) in expected.items():
        assert found[kind][0] == name
        assert found[kind][1] == pytest.approx(ms)


@pytest.mark.parametrize("case", LOADERS)
def test_loader_stages_have_the_time_that_was_planted(case: str, gpu: FakeGPU) -> None:
    make, expected = LOADERS[case]
    loop, loader = Loop(gpu), make(gpu)
    before = dict(vars(loader))
    with hooks(loop) as timer:
        for _ in range(2):
            for x in timer.steps(loader):
                assert vars(loader) == before
                loop.train(x)
    assert_stages(timer.summary(), expected)
    assert vars(loader) == before


@pytest.mark.parametrize("case", LOADERS)
def test_lightning_times_the_stages_of_its_loader(case: str, gpu: FakeGPU) -> None:
    make, expected = LOADERS[case]
    timer = timer_of(gpu)
    trainer(timer, max_epochs=2).fit(Model(gpu), make(gpu))
    assert_stages(timer.summary(), expected)


def test_order_of_batches_is_that_of_the_loader(gpu: FakeGPU) -> None:
    data = torch.arange(12.0)

    def order(timer: GPUPhaseHooks | None) -> list[float]:
        torch.manual_seed(3)
        loader: Any = DataLoader(data, batch_size=2, shuffle=True)  # type: ignore[arg-type]
        return [float(item) for x in (timer.steps(loader) if timer else loader) for item in x]

    with hooks(Loop(gpu)) as timer:
        timed = order(timer)
    assert timed == order(None)


def test_advice_names_the_stage_and_what_to_do(gpu: FakeGPU) -> None:
    loaders: dict[str, Any] = {
        "dataset": DataLoader(Photos(gpu, 40.0), batch_size=2),
        "collate": DataLoader(Photos(gpu), batch_size=2, collate_fn=collating(gpu, 80.0)),
        "sampler": DataLoader(Photos(gpu), batch_size=2, sampler=Hardest(gpu, 40.0)),
    }
    advice = {}
    for case, loader in loaders.items():
        loop = Loop(gpu)
        with hooks(loop) as timer:
            for _ in range(4):
                for x in timer.steps(loader):
                    loop.train(x)
        advice[case] = timer.summary().advice[0]
    line = Photos.__getitem__.__code__.co_firstlineno
    told = f"`Photos.__getitem__` (test_culprits.py:{line}) takes 66 ms of "
    assert advice["dataset"].startswith(told)
    assert "num_workers=" in advice["dataset"]
    assert "`pad` (" in advice["collate"]
    assert "num_workers=" in advice["collate"]
    assert "`Hardest` (" in advice["sampler"]
    assert "in the main process, even with workers" in advice["sampler"]


class Corpus(pl.LightningDataModule):
    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def prepare_data(self) -> None:
        self.gpu.host_work(70.0)

    def setup(self, stage: str) -> None:
        self.gpu.host_work(30.0)

    def train_dataloader(self) -> Any:
        return Loader(self.gpu, 4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.gpu.host_work(11.0)
        return batch


class Slow(Model):
    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)
        gpu_of_metric = gpu

        class Ranking(MeanMetric):
            def compute(self) -> Any:
                gpu_of_metric.host_work(40.0)
                return super().compute()

        self.ranking = Ranking()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for number in range(3):
            self.log(f"metric {number}", float(number))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gpu.host_work(5.0)

    def on_train_epoch_end(self) -> None:
        self.gpu.host_work(20.0)
        self.ranking.update(1.0)
        self.ranking.compute()


class Uploads(MemoryLogger):
    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.gpu.host_work(9.0)


class Histogram(pl.Callback):
    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.gpu.host_work(13.0)


CALLS = {
    ("data", "Corpus.on_after_batch_transfer", ""): (77.0, 7),
    ("first step", "Corpus.on_after_batch_transfer", ""): (11.0, 1),
    ("optimizer", "Slow.on_before_optimizer_step", ""): (35.0, 7),
    ("first step", "Slow.on_before_optimizer_step", ""): (5.0, 1),
    ("epoch ends", "Slow.on_train_epoch_end", ""): (120.0, 2),
    ("epoch ends", "ranking.compute", "Slow.on_train_epoch_end"): (80.0, 2),
    ("epoch ends", "Histogram.on_train_epoch_start", ""): (26.0, 2),
}
"""Milliseconds and number of calls, by entry, name and caller."""


def calls_of(summary: PhaseSummary) -> dict[tuple[str, str, str], tuple[float, int]]:
    return {
        (culprit.entry, culprit.name, culprit.caller): (1e3 * culprit.seconds, culprit.calls)
        for culprit in summary.measurement.culprits
        if culprit.kind == "call"
    }


def test_lightning_hooks_have_the_time_that_was_planted(gpu: FakeGPU) -> None:
    timer, model = timer_of(gpu), Slow(gpu)
    logger = Uploads(gpu)
    runner = trainer(timer, Histogram(gpu), logger=logger, max_epochs=2, log_every_n_steps=4)
    runner.fit(model, datamodule=Corpus(gpu))
    found = calls_of(timer.summary())
    assert CALLS.keys() <= found.keys()
    for key, (ms, n) in CALLS.items():
        assert found[key][0] == pytest.approx(ms), key
        assert found[key][1] == n, key
    logs = [calls for (_, name, _), (_, calls) in found.items() if name == "self.log"]
    assert sum(logs) == 8 * 4
    uploads = [ms for (_, name, _), (ms, _) in found.items() if name == "Uploads.log_metrics"]
    assert sum(uploads) >= 9.0
    # Nothing of it stays.
    assert not {"log", "on_before_optimizer_step", "on_train_epoch_end"} & vars(model).keys()
    assert "log_metrics" not in vars(logger)


@pytest.mark.slow
def test_set_up_hooks_have_the_time_that_was_planted(gpu: FakeGPU) -> None:
    timer = timer_of(gpu)
    trainer(timer).fit(Slow(gpu), datamodule=Corpus(gpu))
    found = calls_of(timer.summary())
    assert found["set-up", "Corpus.prepare_data", ""] == (pytest.approx(70.0), 1)  # type: ignore[comparison-overlap]
    assert found["set-up", "Corpus.setup", ""] == (pytest.approx(30.0), 1)  # type: ignore[comparison-overlap]


def test_advice_names_the_innermost_call(gpu: FakeGPU) -> None:
    timer = timer_of(gpu)
    runner = trainer(timer, max_epochs=8)
    runner.fit(Slow(gpu), Loader(gpu, 2))
    breakdown = timer.summary().time_breakdown
    assert breakdown is not None
    culprit = breakdown["epoch ends"].culprits[0]
    assert (culprit.name, culprit.caller) == ("Slow.on_train_epoch_end", "")
    assert culprit.share == pytest.approx(1.0)
    assert culprit.file == __file__
    assert culprit.line == Slow.on_train_epoch_end.__code__.co_firstlineno
    text = breakdown["epoch ends"].advice[0].text
    assert text.startswith(f"`{culprit.name}` (test_culprits.py:{culprit.line}) takes 480 ms in 8 ")


def train_by_helpers(loop: Loop, timer: GPUPhaseHooks, n: int) -> None:
    for _ in range(2):
        for x in timer.steps(loop.batches(n)):
            loop.gpu.host_work(1.0)  # before forward
            out = loop.model(x)
            loop.gpu.work(6.0)  # loss
            out.sum().backward()
            loop.gpu.work(5.0)  # clipping
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.gpu.work(7.0)  # after the update
        loop.gpu.host_work(30.0)  # between loops
        loop.gpu.host_work(1.0)


def line_of(text: str) -> int:
    """Return the line of `train_by_helpers` that has a comment."""
    code = train_by_helpers.__code__
    with open(__file__) as file:
        lines = [*enumerate(file, start=1)]
    [number] = [n for n, line in lines if n > code.co_firstlineno and line.endswith(f"# {text}\n")]
    return number


@pytest.mark.parametrize(
    ("entry", "comment", "last", "ms"),
    [
        ("loss", "loss", 1, 6.0),
        ("other", "after the update", 0, 7.0),
        ("optimizer", "clipping", 1, 5.0),
        ("between loops", "between loops", 1, 31.0),
    ],
)
def test_places_are_the_lines_of_the_code(
    entry: str, comment: str, last: int, ms: float, gpu: FakeGPU
) -> None:
    loop = Loop(gpu)
    with hooks(loop) as timer:
        train_by_helpers(loop, timer, 60)
    line = line_of(comment)
    found = {
        culprit.source: 1e3 * culprit.seconds / culprit.calls
        for culprit in timer.summary().measurement.culprits
        if culprit.entry == entry and culprit.kind == "place" and culprit.source is not None
    }
    [source] = [source for source in found if source.first_line <= line <= source.last_line]
    assert source.last_line == line + last
    assert source.function == "train_by_helpers"
    assert source.file == __file__
    assert found[source] == pytest.approx(ms, abs=1.0)


def test_other_is_split_into_its_parts(gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(60)):
            gpu.work(3.0)
            loop.train_on(x)
            gpu.work(1.0)
    assert (
        "`other` is about 75 % before forward and 25 % after the update, as measured in a few"
        in str(timer.summary())
    )


def test_copy_of_a_timer_keeps_the_culprits(gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    with hooks(loop) as timer:
        train_by_helpers(loop, timer, 30)
        copies = [copy.deepcopy(timer), pickle.loads(pickle.dumps(timer._results))]
    culprits = timer.summary().measurement.culprits
    assert culprits
    assert copies[1].measurement().culprits
    json = timer.summary().to_dict()
    assert json["culprits"][0]["entry"] == culprits[0].entry


class Synchronizing(FakeGPU):
    """A device whose host blocks in `other`, by a call that torch warns of."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda")


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modes that were set, the newest last."""
    found: list[Any] = ["default"]
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", found.append)
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: 0)
    return found


def block(gpu: FakeGPU, modes: list[Any]) -> None:
    if modes[-1] == "warn":
        warnings.warn("called a synchronizing CUDA operation (triggered internally)", stacklevel=1)
    gpu.now = max(gpu.now, gpu.free_at)
    gpu.host_work(4.0)


def train_blocked(loop: Loop, timer: GPUPhaseHooks, modes: list[Any]) -> None:
    for x in timer.steps(loop.batches(120)):
        loop.train(x)
        block(loop.gpu, modes)


def test_calls_that_wait_for_the_gpu_are_located(modes: list[Any]) -> None:
    loop = Loop(Synchronizing())
    show, rules = warnings.showwarning, [rule for rule in warnings.filters if rule[0] != "error"]
    with warnings.catch_warnings():
        warnings.filters[:] = rules  # type: ignore[index]
        with hooks(loop) as timer:
            train_blocked(loop, timer, modes)
        assert [*warnings.filters] == rules
    assert warnings.showwarning is show
    assert modes == ["default", "warn", "default"]
    line = block.__code__.co_firstlineno + 2
    summary = timer.summary()
    [found] = [known for known in summary.measurement.culprits if known.kind == "blocking"]
    assert (found.entry, found.calls) == ("other", 3)
    assert found.source is not None
    assert (found.source.function, found.source.first_line) == ("block", line)
    told = f"`block` (test_culprits.py:{line}) waits for the GPU in `other`, which takes the CPU "
    assert any(advice.startswith(told) for advice in summary.advice)


def test_blocking_calls_are_not_located_if_warnings_are_errors(modes: list[Any]) -> None:
    loop = Loop(Synchronizing())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hooks(loop) as timer:
            train_blocked(loop, timer, modes)
    assert modes == ["default"]


@pytest.mark.parametrize("options", [{}, {"modules": 1}])
@pytest.mark.parametrize("n", [1, 6])
def test_model_that_is_called_by_rows_is_named(
    n: int, options: dict[str, Any], gpu: FakeGPU
) -> None:
    loop = Loop(gpu)

    def by_rows(x: Tensor) -> Tensor:
        return torch.cat([loop.model(row) for row in x.repeat(n, 1, 1)])

    with hooks(loop, **options) as timer:
        for x in timer.steps(loop.batches(60)):
            by_rows(x).sum().backward()
            loop.optimizer.step()
    found = repeated_calls(timer.summary().measurement)
    if n == 1:
        assert found is None
    else:
        assert found is not None
        assert "test_culprits.py:" in found.where
        assert found.calls == n


@pytest.mark.parametrize(("where", "ms"), [("after", 7.0), ("before", 9.0)])
def test_other_in_a_called_function_is_named_by_its_lines(
    where: str, ms: float, gpu: FakeGPU
) -> None:
    loop = Loop(gpu)

    def train_on(x: Tensor) -> None:
        gpu.work(9.0 if where == "before" else 0.0)
        loop.model(x).sum().backward()
        loop.optimizer.step()
        gpu.work(7.0 if where == "after" else 0.0)

    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(60)):
            train_on(x)
    code = train_on.__code__
    places = [
        culprit
        for culprit in timer.summary().measurement.culprits
        if culprit.entry == "other" and culprit.kind == "place"
    ]
    longest = max(places, key=lambda culprit: culprit.seconds)
    assert longest.source is not None
    assert longest.source.function == "train_on"
    lines = range(longest.source.first_line, longest.source.last_line + 1)
    assert code.co_firstlineno + (1 if where == "before" else 4) in lines
    assert 1e3 * longest.seconds / longest.calls == pytest.approx(ms, abs=1.0)
