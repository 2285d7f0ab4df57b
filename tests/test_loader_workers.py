"""Stages of DataLoader workers: exact on a fake clock, and in real processes."""

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import FakeGPU, batches
from fake_lightning import trainer
from fake_loop import Loop, hooks
from lightning.pytorch import LightningModule
from test_diagnosis import constant, timed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate
from torch.utils.data._utils import pin_memory
from worker_data import FailingSamples, Numbers, Repeated, announce

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._compat.torch_ import fetcher_classes
from lightning_gputime._diagnosis import Diagnosis
from lightning_gputime._diagnosis.diagnose import diagnose
from lightning_gputime._loader import (
    Culprit,
    CulpritSums,
    LoaderStage,
    LoaderTimes,
    WorkerTimes,
    describe_slowdown,
    stages,
)
from lightning_gputime._loader.advice import loader_table
from lightning_gputime._loader.stages import (
    LoaderWorkers,
    StagedLoaders,
    WorkerTimer,
)
from lightning_gputime._measurement.measurement import Measurement, TrainingSetup
from lightning_gputime._measurement.sums import PhaseStats

# The loop of a worker, in this process and on a fake clock


class Clock(FakeGPU):
    """A clock of the host that only tests advance."""

    __call__, pass_ms = FakeGPU.host_ns, FakeGPU.host_work

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000


class OnClock:
    """A dataset whose samples take time on a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock


class Photos(OnClock, Dataset[Tensor]):
    """Samples that take 1 ms each, or 50 ms for sample 42."""

    def __getitem__(self, index: int) -> Tensor:
        self.clock.pass_ms(50.0 if index == 42 else 1.0)
        return torch.full((3,), float(index))


class BatchedPhotos(Photos):
    """Batches that take 6 ms each."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.clock.pass_ms(6.0)
        return [torch.ones(3) for _ in indices]


class Stream(OnClock, IterableDataset[Tensor]):
    """A stream of 40 samples that take 1 ms each."""

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(40):
            self.clock.pass_ms(1.0)
            yield torch.arange(3.0) + index


def two_workers(now_ns: Callable[[], int] = time.perf_counter_ns) -> LoaderWorkers:
    return LoaderWorkers(
        2, LoaderStage("dataset", "Photos"), LoaderStage("collate", "pad"), now_ns=now_ns
    )


MakeBatches = Callable[..., None]
TimesOf = Callable[..., LoaderTimes]


@pytest.fixture
def make_batches(monkeypatch: pytest.MonkeyPatch) -> MakeBatches:
    """Return a function that makes batches of four samples as a worker does, and times them."""

    def make_batches(
        row: Any, dataset: Any, batches: int = 10, batch_type: Any = list, lines: Any = None
    ) -> None:
        clock = dataset.clock

        def collate(samples: Any) -> Any:
            clock.pass_ms(2.0)
            return default_collate(samples)

        monkeypatch.setattr(stages, "get_worker_info", lambda: SimpleNamespace(dataset=dataset))
        timer = WorkerTimer(memoryview(row), clock(), clock, lambda: 0, lines=lines)
        clock.pass_ms(20.0)  # The worker starts.
        map_style, iterable = fetcher_classes()
        kind: Any = iterable if isinstance(dataset, IterableDataset) else map_style
        fetcher = kind(dataset, True, collate, False)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "fetch", stages.timed_fetch(kind, timer))
            for start in range(0, 4 * batches, 4):
                fetcher.fetch(batch_type(range(start, start + 4)))
                clock.pass_ms(3.0)  # The worker waits.
        assert timer.fetcher is fetcher

    return make_batches


@pytest.fixture
def times_of(make_batches: MakeBatches) -> TimesOf:
    """Return a function that makes batches as a worker does, and returns their times."""

    def times_of(*arguments: Any, **options: Any) -> LoaderTimes:
        loader = two_workers()
        # Worker 0 has made no batch yet.
        make_batches(loader._times.numpy()[1], *arguments, **options)
        times = loader.times()
        assert times is not None
        return times

    return times_of


@pytest.mark.parametrize(
    ("kind", "batch_type", "dataset_ms"),
    [(Photos, list, 4.0), (Photos, iter, 4.0), (BatchedPhotos, list, 6.0), (Stream, list, 4.0)],
)
def test_worker_stages_have_exact_times(
    times_of: TimesOf, kind: Any, batch_type: Any, dataset_ms: float
) -> None:
    times = times_of(kind(Clock()), batch_type=batch_type)
    # The worker waits 9 times for 3 ms.
    expected = WorkerTimes(10, dataset_ms, collate_ms=2.0, wait_ms=2.7, newest_ms=dataset_ms + 2.0)
    assert times.workers == (WITHOUT_BATCH, expected)
    assert (times.starts, times.startup_s) == (1, (22 + dataset_ms) / 1e3)
    assert (times.lock_share, times.repeats) == (None, False)


def test_lines_of_workers_have_exact_times_even_if_workers_start_again(
    make_batches: MakeBatches,
) -> None:
    loader = two_workers()
    for kind in (BatchedPhotos, Photos):
        for row, lines in zip(loader._times.numpy(), loader._lines.numpy(), strict=True):
            make_batches(row, kind(Clock()), lines=memoryview(lines))
    line = Photos.__getitem__.__code__.co_firstlineno + 1
    found = [(row.function, row.line, row.ms, row.entry) for row in loader.lines()]
    assert found[0] == ("Photos.__getitem__", line, 4.0, "workers")
    assert [(function, ms) for function, _, ms, _ in found[1:]] == [("collate", 2.0)]


@pytest.mark.parametrize("batch_type", [list, np.array, torch.tensor])
def test_slowest_sample_of_a_worker_is_found(times_of: TimesOf, batch_type: Any) -> None:
    times = times_of(Photos(Clock()), 20, batch_type=batch_type)
    assert (times.slowest_index, times.slowest_ms, times.slowest_worker) == (42, 55.0, 1)
    assert times.long_batches == 1
    assert times.long_share == pytest.approx(55.0 / (19 * 6.0 + 55.0))
    with pytest.raises(StopIteration):
        times_of(Stream(Clock()), 11)


@pytest.mark.parametrize(
    "convert", [Tensor.bfloat16, Tensor.bool, partial(Tensor.to, device="meta")]
)
def test_worker_times_samples_of_any_dtype_and_device(
    times_of: TimesOf, convert: Callable[[Tensor], Tensor]
) -> None:
    class Converted(Photos):
        def __getitem__(self, index: int) -> Tensor:
            return convert(super().__getitem__(index))

    assert times_of(Converted(Clock())).batches == 10


# The advice

WORKER = WorkerTimes(batches=100, dataset_ms=18.0, collate_ms=2.0, wait_ms=0.1)
TIMES = LoaderTimes(
    dataset="Photos.__getitem__",
    collate="pad",
    workers=(WORKER, WORKER),
    cpu_share=0.5,
    run_delay_share=0.0,
    lock_share=0.0,
    startup_s=0.1,
    starts=1,
    long_batches=0,
    long_share=0.0,
    slowest_ms=25.0,
    slowest_worker=0,
    slowest_index=7,
    repeats=False,
)
PACE = "2 workers deliver a batch every 10 ms, and the rest of the step takes 5 ms"
KEEP_UP = f"set num_workers=5 (now 2; 16 CPU cores) to keep up: at present, {PACE}"
WITHOUT_CORES = f"set num_workers=5 (now 2) to keep up: at present, {PACE}"
SHORTEN = f"set num_workers=3 (now 2; 4 CPU cores) to shorten the wait: at present, {PACE}"
FASTER = "make `{}` faster: {} workers cannot help on {} CPU cores"
SLOW_WORKER = (
    "check what worker 1 reads: a batch takes 60 ms there, and 20 ms in the others; 1 of every 3"
    " batches comes from it"
)
RARE = (
    "make rare slow samples faster: 1 of 100 batches takes 40 % of the workers' time; the slowest"
    " took 2 s in worker 0, because of sample 18,211"
)
SMALLER = "return smaller batches, such as uint8 in place of float32: "
RECEIVE = "workers wait 80 % of the time, because the main process receives batches too slowly"
RECEIVE_93, RECEIVE_95 = (RECEIVE.replace("80 %", share) for share in ("93 %", "95 %"))
PIN = "the pin-memory thread copies one batch at a time, in 9 ms, so more workers cannot help"
LOCK = (
    "remove the lock that workers share in `Photos.__getitem__`: they wait for it 60 % of their"
    " time, and more workers cannot help"
)
NO_CORE = "workers wait 70 % of their time for one of 4 CPU cores"
FEWER_WORKERS = f"set num_workers=3 (now 8): {NO_CORE}"
FREE_CORES = f"free CPU cores, or make `Photos.__getitem__` faster: {NO_CORE}"
RESTARTS = "workers started 4 times, and the first batch took 1 s each time"
STARTS = f"set persistent_workers=True: {RESTARTS}"
KEEP = (
    "loop over the loader (`for batch in loader`), or keep its iterator: `iter(loader)` runs for"
    " each batch; "
)
SHARD = (
    "give each worker its part of the IterableDataset, by torch.utils.data.get_worker_info(): all 2"
    " workers yield the same batches, so that each sample is used 2 times"
)
AHEAD = replace(WORKER, batches=200)
OFTEN = "workers started 190 times, and the first batch took 100 ms each time"
CREATE = f"create the DataLoader once, not in each epoch: {RESTARTS}"
INDEX = "index whole batches with dataset[indices]; the tensors are in memory"
COLLATING = replace(WORKER, dataset_ms=2.0, collate_ms=18.0)
IDLE = replace(WORKER, wait_ms=80.0)
LONG_BATCHES = {"long_batches": 2, "long_share": 0.4, "slowest_ms": 2000.0, "slowest_index": 18_211}
WITHOUT_BATCH = WorkerTimes(batches=0, dataset_ms=0.0, collate_ms=0.0, wait_ms=0.0)
SLOW = replace(WORKER, dataset_ms=58.0)
QUICK, UNEVEN = (replace(WORKER, dataset_ms=ms, collate_ms=0.0, wait_ms=10.0) for ms in (0.5, 1.0))


def diagnosed(
    times: LoaderTimes, wait_ms: float, step_ms: float, facts: Any = None, **setup: Any
) -> Diagnosis:
    """Return the diagnosis of 200 steps, in each of which the loop waits for a batch."""
    rows = {"data": constant(wait_ms, n=200, share=0.5)}
    step = PhaseStats(200, mean_ms=step_ms)
    measured = Measurement(rows, step, 200, loaders=(times,), **(facts or {}))
    return diagnose(measured, TrainingSetup(has_loader=True, num_workers=2, **setup))


@pytest.mark.parametrize(
    ("facts", "cores", "texts"),
    [
        ({}, 16, [KEEP_UP]),
        ({}, None, [WITHOUT_CORES]),
        ({"cpu_share": 1.0}, 4, [SHORTEN, FASTER.format("Photos.__getitem__", "more than 3", 4)]),
        ({"cpu_share": 1.0}, 2, [FASTER.format("Photos.__getitem__", "more", 2)]),
        ({"workers": (COLLATING,) * 2, "cpu_share": 1.0}, 2, [FASTER.format("pad", "more", 2)]),
        ({"workers": (WORKER, SLOW, WORKER)}, 16, [SLOW_WORKER]),
        ({"workers": (WITHOUT_BATCH, SLOW, WORKER)}, 16, [SLOW_WORKER]),
        (LONG_BATCHES, 16, [RARE]),
        # The loop waits much longer than the workers take for these batches.
        ({"workers": (QUICK, UNEVEN)}, 16, [f"{SMALLER}{RECEIVE_93}"]),
        ({"workers": (QUICK, QUICK), **LONG_BATCHES}, 16, [f"{SMALLER}{RECEIVE_95}"]),
        ({"workers": (IDLE,) * 2}, 16, [f"{SMALLER}{RECEIVE}"]),
        ({"workers": (IDLE,) * 2, "pin_ms": 9.0}, 16, [f"set pin_memory=False, or {SMALLER}{PIN}"]),
        ({"pin_ms": 3.0}, 16, [KEEP_UP]),
        ({"lock_share": 0.6}, 16, [LOCK]),
        ({"workers": (WORKER,) * 8, "run_delay_share": 0.7}, 4, [FEWER_WORKERS]),
        ({"run_delay_share": 0.7}, 4, [FREE_CORES]),
        ({"starts": 4, "startup_s": 1.0}, 16, [STARTS]),
        # Workers make 400 batches, of which the loop reads 200. Then all 200 batches are read.
        ({"workers": (AHEAD,) * 2, "starts": 190}, 16, [KEEP + OFTEN]),
        ({"starts": 190}, 16, [f"set persistent_workers=True: {OFTEN}"]),
        ({"repeats": True}, 16, [SHARD, KEEP_UP]),
        ({"startup_s": 3.0}, 16, [KEEP_UP]),  # A single start delays only the first step.
    ],
)
def test_advice_on_a_loader_follows_from_its_workers(
    facts: dict[str, Any], cores: int | None, texts: list[str]
) -> None:
    found = diagnosed(replace(TIMES, **facts), 5.0, 10.0, cores=cores)
    assert [advice.text for advice in found.advice] == texts


@pytest.mark.parametrize(
    ("facts", "below", "above", "code"),
    [
        (lambda share: LONG_BATCHES | {"long_share": share}, 0.18, 0.22, "slow_samples"),
        (lambda share: {"lock_share": share}, 0.18, 0.22, "worker_lock"),
        (lambda share: {"run_delay_share": share}, 0.45, 0.55, "busy_cores"),
        (lambda ms: {"pin_ms": ms}, 7.5, 8.5, "pin_memory"),  # A step takes 10 ms.
        # A batch takes 20 ms.
        (lambda ms: {"workers": (replace(WORKER, wait_ms=ms),) * 2}, 18.0, 22.0, "hand_over"),
        (
            lambda ms: {"workers": (WORKER, replace(WORKER, dataset_ms=ms), WORKER)},
            26.0,
            30.0,
            "slow_worker",
        ),
        # The loop waits for 1 s in all.
        (lambda s: {"starts": 2, "startup_s": s}, 0.25, 0.35, "persistent_workers"),
    ],
)
def test_cause_of_a_wait_for_workers_is_named_from_each_threshold_on(
    facts: Callable[[float], dict[str, Any]], below: float, above: float, code: str
) -> None:
    for value in (below, above):
        found = diagnosed(replace(TIMES, **facts(value)), 5.0, 10.0, cores=4)
        assert (code in [advice.code for advice in found.advice]) == (value == above)


@pytest.mark.parametrize(
    ("setup", "text"),
    [
        ({"persistent_workers": False}, STARTS),
        ({"persistent_workers": True}, CREATE),  # A new loader starts new workers.
        ({"is_in_memory": True}, f"set num_workers=0 (now 2): {RESTARTS}; {INDEX}"),
    ],
)
def test_advice_on_workers_that_start_again(setup: dict[str, Any], text: str) -> None:
    times = replace(TIMES, starts=4, startup_s=1.0)
    collate = Culprit("data/fetch", "pad", 1.8, calls=200, share=0.9, kind="collate")
    found = diagnosed(times, 20.0, 40.0, {"culprits": (collate,)}, **setup)
    assert found.advice[0].text == text


@pytest.mark.parametrize(
    ("ms", "code", "place"),
    [
        (15.0, "`Photos.crop` (data.py:7)", ", most of it at `Photos.crop` (data.py:7)"),
        (8.0, "`Photos.__getitem__`", ""),  # Only 40 % of a batch.
    ],
)
def test_line_with_most_of_the_time_of_a_batch_is_named(ms: float, code: str, place: str) -> None:
    others = {"pad": 0.4 * (20.0 - ms), "Photos.flip": 0.6 * (20.0 - ms)}
    lines = [
        timed(function, "data.py:7", host={"workers": part}, entry="workers")
        for function, part in {"Photos.crop": ms, **others}.items()
    ]
    lines.sort(key=lambda line: -line.ms)
    times = replace(TIMES, cpu_share=1.0)
    found = diagnosed(times, 20.0, 40.0, {"lines": (*lines,)}, cores=2)
    assert f" 20 ms of 40 ms per step (50 % of the timed steps){place}; " in found.headline
    assert [item.text for item in found.advice] == [f"make {code} faster"]


@pytest.mark.parametrize(
    ("newest_ms", "text"),
    [
        ((20.0, 20.0), ""),
        ((20.0, 60.0), "worker 1 now takes 60 ms per batch, compared with 20 ms on average"),
        (
            (50.0, 60.0),
            "all workers now take up to 60 ms per batch, compared with 20 ms on average",
        ),
    ],
)
def test_slowdown_names_the_slower_workers(newest_ms: tuple[float, float], text: str) -> None:
    idle = replace(WORKER, batches=0)
    workers = (*(replace(WORKER, newest_ms=ms) for ms in newest_ms), idle)
    assert describe_slowdown([replace(TIMES, workers=workers)]) == text


def test_advice_on_a_foreign_loader_says_that_stages_are_not_measured(loop: Loop) -> None:
    class Pipeline:
        def __iter__(self) -> Iterator[Tensor]:
            return batches(loop.gpu, 30, host_ms=40.0)

    with hooks(loop) as timer:
        for batch in timer.steps(Pipeline()):
            loop.train(batch)
    [text] = timer.summary().advice
    assert text == (
        "use faster transforms, or workers that load in advance; stages of `Pipeline` are not"
        ' measured, because it is not a torch DataLoader: put `with phase("data/decode")` around'
        " a part to time it"
    )


def test_table_shows_the_stages_of_a_loader() -> None:
    rows = {"data": constant(6.0, n=40, share=0.5)}
    workers = WORKER, replace(WORKER, dataset_ms=20.0, wait_ms=0.5)
    times = replace(TIMES, workers=workers, pin_ms=1.5)
    measured = Measurement(rows, PhaseStats(40, 12.0), 200, loaders=(times,))
    table = loader_table(measured, TrainingSetup(num_workers=2))
    assert table is not None
    assert table.title == "DataLoader with 2 workers: stages in a worker"
    assert table.lines == [
        ("loader", "per batch", "share", "slowest worker"),
        ("Photos.__getitem__", "19 ms", "89 %", "20 ms (1)"),
        ("pad", "2 ms", "9.4 %", "2 ms (0)"),
        ("waiting for work", "0.3 ms", "1.4 %", "0.5 ms (1)"),
        ("batch", "21.3 ms", "100 %", ""),
    ]
    assert table.sentences == [
        "A batch takes 21 ms in a worker; 2 workers deliver a batch every 10.5 ms, and the rest of"
        " the step takes 6 ms. So the loop waits 6 ms per batch, and 15 ms overlap with training."
        " The pin-memory thread takes 1.5 ms"
    ]
    seconds = {"dataset": ("Photos.__getitem__", 0.9), "collate": ("pad", 0.1)}
    culprits = (
        Culprit("data/fetch", name, s, calls=100, kind=kind) for kind, (name, s) in seconds.items()
    )
    table = loader_table(Measurement(culprits=(*culprits,)), TrainingSetup(num_workers=0))
    assert table is not None
    names, times_ms, shares = zip(*table.lines, strict=True)
    assert names == ("loader", "Photos.__getitem__", "pad", "batch")
    assert times_ms[1:] == ("9 ms", "1 ms", "10 ms")
    assert shares[1:] == ("90 %", "10 %", "100 %")


# Real workers


def test_pin_memory_thread_is_timed_and_its_function_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pin(batches: Any, pinned: Any, device_id: int, done: Any, device: Any) -> None:
        while not done.is_set():
            with suppress(queue.Empty):
                batch = batches.get(timeout=0.1)
                time.sleep(0.02)
                with suppress(queue.Full):
                    pinned.put(batch, timeout=0.1)

    # A CPU has no pinned memory, so replace the function that pins.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(pin_memory, "_pin_memory_loop", pin)
    _, times = train(DataLoader(Numbers(), 4, num_workers=1, pin_memory=True))
    assert pin_memory._pin_memory_loop is pin
    assert times.batches == 24
    assert times.pin_ms is not None
    assert times.pin_ms >= 20.0


def test_pin_times_are_exact_and_a_full_queue_counts_once() -> None:
    clock = Clock()

    class Queue:
        is_full = True

        def get(self) -> str:
            clock.pass_ms(50.0)  # The wait for a batch is not counted.
            return "batch"

        def put(self, batch: str) -> None:
            clock.pass_ms(7.0)
            if self.is_full:
                self.is_full = False
                raise queue.Full

    def loop(batches: Any, pinned: Any) -> None:
        for ms in (2.0, 4.0):
            batch = batches.get()
            clock.pass_ms(ms)
            with suppress(queue.Full):
                pinned.put(batch)
                continue
            pinned.put(batch)

    workers = two_workers(clock)
    assert workers.pin_ms is None
    workers.timed_pin_loop(loop)(Queue(), Queue())
    assert workers.pin_ms == 3.0


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_timers_of_a_loader_blame_the_same_code_and_restore_it(num_workers: int) -> None:
    loader = DataLoader(Numbers(), 4, num_workers=num_workers, worker_init_fn=announce)
    before = dict(vars(loader))
    sums = [CulpritSums(), CulpritSums()]
    timers = [StagedLoaders(bool, time.perf_counter_ns, each.add_loader) for each in sums]
    for timer in timers:
        timer.attach()
    batches = [*loader]
    for timer in timers:
        timer.remove()
    assert vars(loader) == before
    names = [{(code.name, code.calls) for code in each.summary()} for each in sums]
    assert names[0] == names[1] >= {("Numbers.__getitem__", len(batches))}


@pytest.mark.gpu
def test_real_pin_memory_thread_is_timed() -> None:
    images = TensorDataset(torch.zeros(64, 1 << 18))  # 8 MiB per batch
    loader = DataLoader(images, 8, num_workers=1, pin_memory=True)
    model = nn.Linear(1 << 18, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with GPUPhaseHooks(model, optimizer) as timer:
        for (batch,) in timer.steps(loader):
            assert batch.is_pinned()
            optimizer.zero_grad()
            model(batch.cuda()).sum().backward()
            optimizer.step()
    (times,) = timer.summary().measurement.loaders
    assert times.pin_ms is not None
    assert 0.1 < times.pin_ms < 1000.0


def train(loader: DataLoader[Tensor], *, is_timed: bool = True) -> tuple[list[Tensor], Any]:
    """Return the batches and weights of a training, and the times of its loader."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    timer = GPUPhaseHooks(model, optimizer)
    found = []
    with timer if is_timed else nullcontext():
        for _ in range(2):
            for batch in timer.steps(loader) if is_timed else loader:
                found.append(batch)
                optimizer.zero_grad()
                model(batch[..., :4]).sum().backward()
                optimizer.step()
    (times,) = timer.summary().measurement.loaders if is_timed else (None,)
    return [*found, *model.state_dict().values()], times


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "persistent"),
    [("fork", False), ("fork", True), ("spawn", True), ("forkserver", True)],
)
def test_training_is_bitwise_the_same_with_timed_workers(context: str, persistent: bool) -> None:
    options: dict[str, Any] = {"multiprocessing_context": context, "persistent_workers": persistent}
    options |= {"shuffle": True, "num_workers": 2, "worker_init_fn": announce}
    loader = DataLoader(Numbers(), 4, **options)
    timed, times = train(loader)
    # Forked workers start faster, and draw the same numbers.
    options["multiprocessing_context"] = "fork"
    untimed, _ = train(DataLoader(Numbers(), 4, **options), is_timed=False)
    assert all(torch.equal(*pair) for pair in zip(timed, untimed, strict=True))
    assert loader.worker_init_fn is announce
    assert [worker.batches for worker in times.workers] == [12, 12]
    assert times.dataset == "Numbers.__getitem__"
    assert times.starts == (1 if persistent else 2)
    assert not times.repeats


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_error_of_a_worker_reads_as_without_a_timer(
    context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The loader waits for this time, by default 5 s, if its worker does not end.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)

    def error_of(*, timed: bool) -> str:
        loader = DataLoader(FailingSamples(), 2, num_workers=1, multiprocessing_context=context)
        model = nn.Linear(2, 2)
        timer = GPUPhaseHooks(model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            for x in timer.attach().steps(loader) if timed else loader:
                model(x).sum().backward()
        except ValueError as error:
            return str(error)
        finally:
            timer.remove()
        return ""

    expected = error_of(timed=False)
    assert expected.endswith("ValueError: bad sample\n")
    assert error_of(timed=True) == expected


@pytest.mark.slow
def test_workers_of_several_loaders_are_timed_separately() -> None:
    class Plain(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.net(batch["numbers"]).mean() + batch["repeated"].mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    loaders = {
        "numbers": DataLoader(Numbers(), 4, num_workers=2),
        "repeated": DataLoader(Repeated(), 5, num_workers=1),
    }
    timer = GPUPhaseTimer(print_summary=False)
    trainer(timer, max_epochs=1).fit(Plain(), loaders)
    found = {times.dataset: times for times in timer.summary().measurement.loaders}
    workers = {name: len(times.workers) for name, times in found.items()}
    assert workers == {"Numbers.__getitem__": 2, "Repeated.__iter__": 1}
    assert found["Numbers.__getitem__"].batches == 12


def test_worker_shares_are_fractions_of_the_observed_or_elapsed_time() -> None:
    loader = two_workers()
    row: Any = loader._times[1]
    row[stages.BATCHES] = 10
    row[stages.CPU_NS], row[stages.RUN_DELAY_NS] = 150, 100
    row[stages.OBSERVED_NS], row[stages.ELAPSED_NS] = 200, 400  # Idle for half of the time.
    times = loader.times()
    assert times is not None
    assert (times.cpu_share, times.run_delay_share) == (0.75, 0.25)
