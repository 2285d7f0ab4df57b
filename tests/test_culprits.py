"""Culprits: slow calls by name, stages of a loader, and lines of user code."""

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import FakeGPU
from fake_lightning import Loader, MemoryLogger, Model, fit, timer_of, trainer
from fake_loop import Loop, hooks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchmetrics import MeanMetric

from lightning_gputime import GPUPhaseHooks, PhaseSummary
from lightning_gputime._culprits.places import Frames, Passage, frames_here
from lightning_gputime._diagnosis.repeated import repeated_calls
from lightning_gputime._measurement.culprits import Source


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


class Corpus(OnGPU, pl.LightningDataModule):
    def prepare_data(self) -> None:
        self.gpu.host_work(70.0)

    def setup(self, stage: str) -> None:
        self.gpu.host_work(30.0)

    def train_dataloader(self) -> Any:
        return Loader(self.gpu, 4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.gpu.host_work(11.0)
        return batch


class SlowModel(Model):
    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__(gpu)

        class Ranking(MeanMetric):
            def compute(self) -> Any:
                gpu.host_work(40.0)
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


class Uploads(OnGPU, MemoryLogger):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.gpu.host_work(9.0)


class Histogram(OnGPU, pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.gpu.host_work(13.0)


CALLS = {
    ("data", "Corpus.on_after_batch_transfer", ""): (77.0, 7),
    ("first step", "Corpus.on_after_batch_transfer", ""): (11.0, 1),
    ("optimizer", "SlowModel.on_before_optimizer_step", ""): (35.0, 7),
    ("first step", "SlowModel.on_before_optimizer_step", ""): (5.0, 1),
    ("epoch ends", "SlowModel.on_train_epoch_end", ""): (120.0, 2),
    ("epoch ends", "ranking.compute", "SlowModel.on_train_epoch_end"): (80.0, 2),
    ("epoch ends", "Histogram.on_train_epoch_start", ""): (26.0, 2),
    ("set-up", "Corpus.prepare_data", ""): (70.0, 1),
    ("set-up", "Corpus.setup", ""): (30.0, 1),
}
"""Milliseconds and number of calls, by entry, name and caller."""


def calls_of(summary: PhaseSummary) -> dict[tuple[str, str, str], tuple[float, int]]:
    """Return the milliseconds and the number of calls, keyed like `CALLS`."""
    return {
        (culprit.entry, culprit.name, culprit.caller): (1e3 * culprit.seconds, culprit.calls)
        for culprit in summary.measurement.culprits
        if culprit.kind == "call"
    }


def test_calls_under_lightning_have_exact_times_and_counts(gpu: FakeGPU) -> None:
    timer, model, logger = timer_of(gpu), SlowModel(gpu), Uploads(gpu)
    runner = trainer(timer, Histogram(gpu), logger=logger, max_epochs=2, log_every_n_steps=4)
    runner.fit(model, datamodule=Corpus(gpu))
    found = calls_of(timer.summary())
    expected = {key: (pytest.approx(ms), n) for key, (ms, n) in CALLS.items()}
    assert {key: found.get(key) for key in CALLS} == expected, found  # type: ignore[comparison-overlap]
    logs = [calls for (_, name, _), (_, calls) in found.items() if name == "self.log"]
    assert sum(logs) == 8 * 4  # The loss and three metrics in each step.
    uploads = [ms for (_, name, _), (ms, _) in found.items() if name == "Uploads.log_metrics"]
    assert sum(uploads) >= 9.0
    assert not {"log", "on_before_optimizer_step", "on_train_epoch_end"} & vars(model).keys()
    assert "log_metrics" not in vars(logger)


def train_with_comments(loop: Loop, timer: GPUPhaseHooks, n: int) -> None:
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


def line_with(text: str) -> int:
    """Return the number of the line in `train_with_comments` that has this comment."""
    lines, first = inspect.getsourcelines(train_with_comments)
    [number] = [n for n, line in enumerate(lines, first) if line.endswith(f"# {text}\n")]
    return number


def places(timer: GPUPhaseHooks, entry: str) -> dict[Source, float]:
    """Return the ms per call of each place of an entry."""
    return {
        culprit.source: 1e3 * culprit.seconds / culprit.calls
        for culprit in timer.summary().measurement.culprits
        if culprit.entry == entry and culprit.kind == "place" and culprit.source is not None
    }


@pytest.mark.parametrize(
    ("entry", "comment", "further_lines", "ms"),
    [
        ("loss", "loss", 1, 6.0),
        ("other", "after the update", 0, 7.0),
        ("optimizer", "clipping", 1, 5.0),
        ("between loops", "between loops", 1, 31.0),
    ],
)
def test_places_have_exact_lines_and_times(
    entry: str, comment: str, further_lines: int, ms: float, loop: Loop
) -> None:
    with hooks(loop) as timer:
        train_with_comments(loop, timer, 60)
    line, found = line_with(comment), places(timer, entry)
    [source] = [source for source in found if source.first_line <= line <= source.last_line]
    assert source.last_line == line + further_lines
    assert (source.file, source.function) == (__file__, "train_with_comments")
    assert found[source] == pytest.approx(ms, abs=1.0)


def test_copy_of_a_timer_keeps_the_culprits(loop: Loop) -> None:
    with hooks(loop) as timer:
        train_with_comments(loop, timer, 30)
        copied = copy.deepcopy(timer)
        results = pickle.loads(pickle.dumps(timer._results))
    summary = timer.summary()
    assert summary.measurement.culprits
    assert copied.summary().measurement.culprits
    assert results.measurement().culprits
    assert summary.to_dict()["culprits"][0]["entry"] == summary.measurement.culprits[0].entry


def test_other_is_split_into_before_forward_and_after_the_update(loop: Loop) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(60)):
            loop.gpu.work(3.0)
            loop.train_on(x)
            loop.gpu.work(1.0)
    text = "`other` is about 75 % before forward and 25 % after the update, as measured in a few"
    assert text in str(timer.summary())


@pytest.fixture
def modes(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the modes that were set for torch's warnings about synchronizing calls."""
    modes: list[Any] = ["default"]
    gpu.device = torch.device("cuda")
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: 0)
    return modes


def block(gpu: FakeGPU, modes: list[Any]) -> None:
    """Wait for the GPU, and warn as torch does."""
    if modes[-1] == "warn":
        warnings.warn("called a synchronizing CUDA operation (triggered internally)", stacklevel=1)
    gpu.now = max(gpu.now, gpu.free_at)
    gpu.host_work(4.0)


def train_blocked(loop: Loop, modes: list[Any]) -> PhaseSummary:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(120)):
            loop.train(x)
            block(loop.gpu, modes)
    return timer.summary()


def test_lines_that_wait_for_the_gpu_are_named(modes: list[Any], loop: Loop) -> None:
    show, rules = warnings.showwarning, [rule for rule in warnings.filters if rule[0] != "error"]
    with warnings.catch_warnings():
        warnings.filters[:] = rules  # type: ignore[index]
        summary = train_blocked(loop, modes)
        assert [*warnings.filters] == rules
    assert warnings.showwarning is show
    assert modes == ["default", "warn", "default"]
    line = block.__code__.co_firstlineno + 3  # The line of its `warn`.
    [found] = [culprit for culprit in summary.measurement.culprits if culprit.kind == "blocking"]
    assert (found.entry, found.calls) == ("other", 3)
    assert found.source is not None
    assert (found.source.function, found.source.first_line) == ("block", line)
    text = f"`block` (test_culprits.py:{line}) waits for the GPU in `other`, which takes the CPU "
    assert any(advice.startswith(text) for advice in summary.advice)


def test_blocking_calls_are_ignored_if_warnings_are_errors(modes: list[Any], loop: Loop) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_blocked(loop, modes)
    assert modes == ["default"]


@pytest.mark.parametrize("options", [{}, {"modules": 1}])
@pytest.mark.parametrize("n", [1, 6])
def test_code_that_calls_the_model_by_row_is_named(
    n: int, options: dict[str, Any], loop: Loop
) -> None:
    def by_rows(x: Tensor) -> Tensor:
        return torch.cat([loop.model(row) for row in x.repeat(n, 1, 1)])

    with hooks(loop, **options) as timer:
        for x in timer.steps(loop.batches(60)):
            by_rows(x).sum().backward()
            loop.optimizer.step()
    found = repeated_calls(timer.summary().measurement)
    assert (found.calls if found else 1) == n
    assert found is None or "test_culprits.py:" in found.where


@pytest.mark.parametrize("ms", [30.0, 0.8])
def test_start_of_training_step_is_named_only_if_it_is_long(gpu: FakeGPU, ms: float) -> None:
    class Augments(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.gpu.work(ms)
            return super().training_step(batch, batch_idx)

    timer = fit(gpu, Augments(gpu), 60)
    first = Augments.training_step.__code__.co_firstlineno
    where = f"test_culprits.py:{first}-{first + 2}, before forward"
    text = f"other: `Augments.training_step` ({where}) takes {ms + 0.125:.3g} ms of"
    assert (text in str(timer.summary())) == (ms == 30.0)


def test_update_at_the_end_of_a_loop_body_is_not_followed_by_code() -> None:
    marks: list[Frames] = []

    def batches() -> Iterator[int]:
        for number in range(2):
            marks.append(frames_here()[1:])
            yield number

    def train() -> None:
        for batch in batches():
            assert batch < 2
            marks.append(frames_here())

    train()
    _, update, fetch, _ = marks
    assert Passage(update, fetch, enters_calls=True).source() is None


def test_code_between_two_runs_of_a_loop_is_named_by_its_lines() -> None:
    marks: list[Frames] = []

    class Marked:
        def __iter__(self) -> Iterator[int]:
            marks.append(frames_here()[1:])
            return self.batches()

        def batches(self) -> Iterator[int]:
            yield 0
            marks.append(frames_here()[1:])

    def train(n: int) -> None:
        for epoch in range(n):
            for batch in Marked():
                assert batch == 0
            best = epoch
            assert best >= 0

    train(2)
    _, end, start, _ = marks
    first_line = train.__code__.co_firstlineno
    place = Passage(end, start, enters_calls=True).source()
    assert place == Source(__file__, first_line + 4, first_line + 5, "train")


@pytest.mark.parametrize(
    ("before_ms", "after_ms", "line", "ms"), [(0.0, 7.0, 4, 7.0), (9.0, 0.0, 1, 9.0)]
)
def test_other_in_a_called_function_is_named_by_its_lines(
    before_ms: float, after_ms: float, line: int, ms: float, loop: Loop
) -> None:
    def train_on(x: Tensor) -> None:
        loop.gpu.work(before_ms)
        loop.model(x).sum().backward()
        loop.optimizer.step()
        loop.gpu.work(after_ms)

    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(60)):
            train_on(x)
    found = places(timer, "other")
    source = max(found, key=lambda source: found[source])
    assert source.function == "train_on"
    expected = train_on.__code__.co_firstlineno + line
    assert source.first_line <= expected <= source.last_line
    assert found[source] == pytest.approx(ms, abs=1.0)
