"""What to do next is said where the numbers back it, and only there."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import FakeGPU, raw
from fake_lightning import Model, fit, trainer
from fake_loop import Loop, evidence, hooks
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from lightning_gputime import Cause, GPUPhaseTimer, SlowStep, load
from lightning_gputime._boundaries import loop as boundaries
from lightning_gputime._measurement import advice as advices
from lightning_gputime._measurement.advice import TrainingSetup, find_losses
from lightning_gputime._measurement.ranks import RankSummary
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.wall_time import WallTimeBreakdown
from lightning_gputime._saved_runs.environment import (
    Environment,
    _unfused,
    cores_of_rank,
    known_of_loader,
    setup_of,
)

CORES = 16
WORKERS = TrainingSetup(has_loader=True, num_workers=2, pin_memory=False, cores=CORES)
BY_INDEX = "index whole batches, by dataset[indices]: its tensors are in memory already"
CHEAPER = "cheaper transforms, or workers that load ahead"


def advice(setup: TrainingSetup, *, wait_ms: float = 0.0, **phases: float) -> tuple[str, ...]:
    results = Results(100, 0)
    results.setup = setup
    results.add([raw(i, wait_ms, **phases) for i in range(3)])
    return results.summary().advice


def fetching(**phases: float) -> dict[str, float]:
    return {"data/fetch": 8.0, "forward": 4.0, "backward": 8.0, **phases}


@pytest.mark.parametrize(
    ("setup", "phases", "expected"),
    [
        (replace(WORKERS, num_workers=0), fetching(), ["num_workers=4 (now 0)"]),
        (replace(WORKERS, num_workers=0, cores=2), fetching(), ["num_workers=2 (now 0)"]),
        (
            WORKERS,
            fetching(),
            ["more workers (num_workers=2; 16 CPU cores per rank)", "cheaper transforms"],
        ),
        (
            replace(WORKERS, num_workers=16),
            fetching(),
            ["cheaper transforms: the CPU cores are busy (num_workers=16; 16 CPU cores per rank)"],
        ),
        (TrainingSetup(has_loader=True), fetching(), [CHEAPER]),
        # Below 10 % of the step workers cost about as much as they save.
        (replace(WORKERS, num_workers=0), {"data/fetch": 1.9, "callbacks": 18.0}, []),
        (
            replace(WORKERS, num_workers=0),
            {"data/fetch": 2.1, "callbacks": 18.0},
            ["num_workers=4 (now 0)"],
        ),
        (
            replace(WORKERS, num_workers=0, is_iterable=True),
            fetching(),
            ["num_workers=4 (now 0); give each its own part of the IterableDataset"],
        ),
        (replace(WORKERS, num_workers=0, is_in_memory=True), fetching(), [BY_INDEX]),
        (
            TrainingSetup(),
            {"data": 8.0, "forward": 4.0},
            [
                "iterate over timer.steps(loader): without it, `data` may also hold your own code",
                CHEAPER,
            ],
        ),
        # Pinned memory helps the copy: it is told where that is long.
        (
            replace(WORKERS, num_workers=0),
            fetching(**{"data/copy": 3.0}),
            ["num_workers=4 (now 0)", "pin_memory=True (now False)"],
        ),
        (
            replace(WORKERS, num_workers=0, pin_memory=True),
            fetching(**{"data/copy": 3.0}),
            ["num_workers=4 (now 0)"],
        ),
        (WORKERS, {"data/copy": 8.0, "forward": 8.0}, ["pin_memory=True (now False)"]),
        (
            replace(WORKERS, pin_memory=True),
            {"data/copy": 8.0, "forward": 8.0},
            ["copy smaller types (uint8, bfloat16), and convert them on the device"],
        ),
        (
            WORKERS,
            {"callbacks": 2.0, "callbacks/Save.on_train_batch_end": 6.0, "forward": 8.0},
            ["run `Save.on_train_batch_end` less often, or make it cheaper (6 ms per step)"],
        ),
        # Nothing says which of them it is.
        (WORKERS, {"callbacks": 8.0, "forward": 8.0}, []),
    ],
)  # fmt: skip
def test_what_holds_up_the_loader_is_advised_against(
    setup: TrainingSetup, phases: dict[str, float], expected: list[str]
) -> None:
    assert advice(setup, **phases) == tuple(expected)


def test_few_long_fetches_are_advised_against_by_what_is_off() -> None:
    uneven = replace(WORKERS, persistent_workers=False, prefetch_factor=2)
    for setup, expected in (
        (uneven, 4),
        (replace(uneven, persistent_workers=True), 3),
        (replace(uneven, num_workers=0), 1),
    ):
        results = Results(100, 0)
        results.setup = setup
        steps = [{"data/fetch": 90.0 * (i % 10 == 0), "forward": 5.0} for i in range(50)]
        results.add([raw(i, 0.0, **step) for i, step in enumerate(steps)])
        assert len(results.summary().advice) == expected
    assert not any("prefetch" in one for one in advice(uneven, **fetching()))


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (
            TrainingSetup(precision="32-true", has_bf16=True),
            [
                'precision="bf16-mixed" (now "32-true")',
                "split `backward`, 50 % of the step, by module: modules=2",
            ],
        ),
        (
            TrainingSetup(precision="bf16-mixed", has_bf16=True, unfused="AdamW"),
            [
                "AdamW(fused=True): `optimizer` is 25 % of the step",
                "split `backward`, 50 % of the step, by module: modules=2",
            ],
        ),
        (
            TrainingSetup(precision="32-true"),
            ["split `backward`, 50 % of the step, by module: modules=2"],
        ),
        (TrainingSetup(precision="32-true", has_parts=False), []),
    ],
)
def test_a_busy_gpu_is_advised_less_work(setup: TrainingSetup, expected: list[str]) -> None:
    phases = {"forward": 4.0, "backward": 8.0, "optimizer": 4.0}
    assert advice(setup, wait_ms=8.0, **phases) == tuple(expected)


@pytest.mark.parametrize(("inside", "has_parts"), [(1, True), (0, False)])
def test_a_model_without_modules_inside_is_known(inside: int, has_parts: bool) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(inside)))
    setup = setup_of(Environment(), boundaries.Loop(model), told_precision=False)
    assert setup.has_parts == has_parts


def test_where_modules_are_told_the_longest_is_named() -> None:
    phases = {"forward": 4.0, "backward/body": 9.0, "backward/head": 1.0, "backward/comm": 2.0}
    less = "more work between collectives: larger batches, or accumulation under no_sync()"
    found = advice(TrainingSetup(), wait_ms=8.0, **phases)
    assert found == ("look at `body` in `backward`, 56 % of the step", less)


@pytest.mark.parametrize(
    ("of_body", "named"),
    [
        ({"backward/body/body.0": 2.0, "backward/body/body.3": 7.0}, "body.3 MaxPool2d"),
        # None of many small ones is: what they are in, is.
        ({f"backward/body/body.{i}": 0.9 for i in range(10)}, "body Sequential"),
    ],
)
def test_the_largest_module_inside_is_named_with_its_class(
    of_body: dict[str, float], named: str
) -> None:
    setup = TrainingSetup(classes={"body": "Sequential", "body.3": "MaxPool2d"})
    [found] = advice(setup, wait_ms=8.0, forward=4.0, **of_body)
    share = 9.0 if named.endswith("l") else 7.0
    total = 4.0 + 9.0
    assert found == f"look at `{named}` in `backward`, {100 * share / total:.0f} % of the step"


def test_launches_are_advised_against_by_batch_compilation_and_graphs() -> None:
    known = TrainingSetup(batch_size=16, compiled=True)
    assert advice(known, forward=16.0) == (
        "a larger batch (now 16)",
        'torch.compile(mode="reduce-overhead")',
        "CUDA graphs",
    )


def test_where_the_gaps_are_known_no_probe_is_advised() -> None:
    results = Results(100, 0)
    results.add([raw(i, 0.0, forward=16.0) for i in range(3)])
    results.add_probed(raw(4, forward=4.0))
    summary = results.summary()
    assert summary.advice == ("a larger batch", "torch.compile", "CUDA graphs")
    assert summary.losses is not None
    assert str(summary.losses).splitlines() == [
        "of the timed steps   share  without it, at most  what to do",
        "---------------------------------------------------------------",
        "launch gaps          75.0%         4.00x faster  a larger batch",
        "                                                 torch.compile",
        "                                                 CUDA graphs",
        "GPU work             25.0%",
        "---------------------------------------------------------------",
        "48 ms               100.0%",
        "",
        "Not measured: work at the peak (set flops=)",
    ]


@pytest.mark.parametrize(("other_ms", "share"), [(1.7, 0), (1.8, 10), (16.0, 50)])
@pytest.mark.parametrize("on_host_clock", [False, True])
def test_a_long_other_is_to_be_named(other_ms: float, share: int, on_host_clock: bool) -> None:
    results = Results(100, 0, on_host_clock)
    results.setup = TrainingSetup(has_parts=False)
    results.add([raw(i, 8.0, forward=5.0, backward=11.0, other=other_ms) for i in range(3)])
    losses = results.summary().losses
    assert losses is not None
    what = "code outside of the model, the loss, backward and the update"
    told = f'`other`, {share} % of the step, is {what}: name it, with phase("name")'
    assert losses.work.advice == ((told,) if share else ())


def test_a_phase_of_your_own_is_a_loss_to_run_less_often() -> None:
    results = Results(100, 0, True)
    results.add([raw(i, 0.01, forward=4.0, **{"write a file": 6.0}) for i in range(3)])
    losses = results.summary().losses
    assert losses is not None
    assert losses["write a file"] == pytest.approx(0.6)
    assert losses["CPU work"] == pytest.approx(0.4)
    assert [row.advice for row in losses.rows] == [("run it less often, or make it cheaper",)]
    assert losses.work.advice == ("split `forward`, 40 % of the step, by module: modules=2",)


@pytest.mark.parametrize("name", ["evaluation", "checkpoints", "first step", "steps", "mine"])
def test_a_phase_of_your_own_may_be_named_as_an_entry_is(name: str) -> None:
    results = Results(100, 0, True)
    results.add([raw(i, forward=4.0, **{name: 6.0}) for i in range(3)])
    entries_s = {"set-up": 2.0, "first step": 1.0, "evaluation": 3.0, "checkpoints": 1.0}
    wall_time = WallTimeBreakdown({**entries_s, "steps": 5.0})
    losses = find_losses(replace(results.summary(), wall_time=wall_time), TrainingSetup())
    assert losses is not None
    # A step takes 10 ms: so long is the first step one as the others.
    steps_s, first_s = 5.01, 0.99
    entries_s["first step"] = first_s
    assert losses.wall_s == pytest.approx(12.0)
    assert losses[name] == pytest.approx((0.6 * steps_s + entries_s.get(name, 0.0)) / 12.0)
    assert losses["CPU work"] == pytest.approx(0.4 * steps_s / 12.0)


def test_the_longest_part_of_a_phase_of_your_own_is_named() -> None:
    results = Results(100, 0, True)
    steps = {"forward": 4.0, "mine": 1.0, "mine/a": 2.0, "mine/b": 3.0}
    results.add([raw(i, 0.01, **steps) for i in range(3)])
    losses = results.summary().losses
    assert losses is not None
    assert losses["mine"] == pytest.approx(0.6)
    assert losses.rows[0].advice == ("look at `b` in `mine`, 30 % of the step",)


@pytest.mark.parametrize(("n", "said"), [(0, ["`other`, 20 %"]), (1, ["`other`, 20 %"]), (2, [])])
def test_an_other_that_is_long_in_slow_steps_alone_is_theirs(n: int, said: list[str]) -> None:
    results = Results(100, 0, True)
    results.add([raw(i, 0.01, forward=8.0, other=2.0) for i in range(3)])
    slow = SlowStep(1, 19.0, 10.0, "other", (), 9.0, lost_ms={"other": {"unexplained": 3.0}})
    results.slow.add(evidence(*[slow] * n), is_known=True)
    told = [one for one in results.summary().advice if "with phase" in one]
    assert [one[:13] for one in told] == said


def test_what_the_host_is_to_do_in_other_is_said_once() -> None:
    device, host = {"other": 0.1, "forward": 9.0}, {"other": 6.1, "forward": 3.0}
    results = Results(100, 0)
    results.add([raw(0, 0.01, **device)._replace(host_ns=raw(0, **host).host_ns)])
    [told] = results.summary().advice
    assert told == "remove .item(), prints and copies from unpinned memory from `other`"


def test_a_held_up_host_is_told_what_it_should_not_do_where() -> None:
    device = {"forward": 3.0, "loss": 0.1, "backward": 6.0}
    host = {"forward": 1.0, "loss": 6.1, "backward": 2.0}
    results = Results(100, 0)
    results.add([raw(0, 0.01, **device)._replace(host_ns=raw(0, **host).host_ns)])
    [told] = results.summary().advice
    assert told == "remove .item(), prints and copies from unpinned memory from `loss`"
    results.setup = TrainingSetup(pin_memory=True)
    assert results.summary().advice == ("remove .item() and prints from `loss`",)


def test_a_plain_loop_whose_loader_holds_it_up_is_told_of_workers() -> None:
    device, host = {"data": 0.1, "forward": 9.0}, {"data": 6.1, "forward": 3.0}
    results = Results(100, 0)
    results.add([raw(0, 0.01, **device)._replace(host_ns=raw(0, **host).host_ns)])
    assert results.summary().verdict.startswith("mixed")
    results.setup = replace(WORKERS, num_workers=0)
    assert results.summary().advice == ("num_workers=4 (now 0)",)


def test_without_a_device_nothing_is_advised_on_copies() -> None:
    results = Results(100, 0, on_host_clock=True)
    results.setup = replace(WORKERS, num_workers=0)
    results.add([raw(0, 0.0, **fetching(**{"data/copy": 3.0}))])
    assert results.summary().advice == ("num_workers=4 (now 0)",)
    copies = Results(100, 0, on_host_clock=True)
    copies.setup = WORKERS
    copies.add([raw(0, 0.0, **{"data/copy": 8.0, "forward": 8.0})])
    assert copies.summary().advice == ()


@pytest.mark.parametrize(
    ("workers", "cores", "off_cpu_ms", "is_busy"),
    [
        (14, 16, 0.0, False),
        (15, 16, 0.0, True),  # The loop needs one, too.
        (1, 2, 0.0, True),
        (2, None, 0.0, False),
        # Others had the processor for less than 5 % of 20 ms, or for as much.
        (2, 16, 0.9, False),
        (2, 16, 1.0, True),
    ],
)
def test_more_workers_are_advised_where_a_core_is_free(
    workers: int, cores: int | None, off_cpu_ms: float, is_busy: bool
) -> None:
    results = Results(100, 0)
    results.add([raw(0, 0.0, **fetching())])
    results.setup = replace(WORKERS, num_workers=workers, cores=cores, pin_memory=True)
    lost = (Cause("off_cpu", off_cpu_ms, off_cpu_ms, "others had the processor"),)
    results.slow.add(
        evidence(SlowStep(0, 20.0, 20.0 - off_cpu_ms, "loss", lost, 0.0)), is_known=True
    )
    first = results.summary().advice[0]
    assert first.startswith("cheaper transforms: the CPU cores are busy" if is_busy else "more w")


def test_ranks_on_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [cores_of_rank(ranks) for ranks in (1, 4, 8, 32)] == [64, 16, 8, 8]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cores_of_rank(32) == 32


def test_what_a_dataset_is_made_of_is_known() -> None:
    there = TensorDataset(torch.zeros(8, 2))
    known = known_of_loader(DataLoader(Subset(there, [0, 1])))
    assert (known["is_in_memory"], known["is_iterable"]) == (True, False)
    known = known_of_loader([loader(), DataLoader(Endless())])
    assert (known["is_in_memory"], known["is_iterable"]) == (True, True)
    other: Any = [1, 2]
    assert not known_of_loader(DataLoader(other))["is_in_memory"]


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.zeros(8, 2))


def test_the_loader_of_an_evaluation_is_known(gpu: FakeGPU) -> None:
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False)
    data: Any = torch.zeros(8, 2)
    trainer(timer).validate(Model(gpu), DataLoader(data, batch_size=4), verbose=False)
    setup = timer._evaluations.results["val"].setup
    assert (setup.has_loader, setup.num_workers, setup.batch_size) == (True, 0, 4)


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    results = Results(100, 0)
    results.add([raw(0, 0.0, forward=4.0, **{"backward/comm": 8.0})])
    less = "more work between collectives: larger batches, or accumulation under no_sync()"
    assert results.summary().advice == (less,)
    results.ranks = RankSummary({}, (0, 1), 1, 5.0, "forward")
    # Of the 8 ms they wait 5 for rank 1.
    assert results.summary().advice == (
        "start with rank 1, in `forward`: the other ranks wait for it",
        less,
    )


@pytest.mark.parametrize(("n", "is_judged"), [(19, False), (20, True)])
def test_of_a_short_evaluation_nothing_is_judged(n: int, is_judged: bool) -> None:
    results = Results(100, 0, on_host_clock=True)
    results.add([raw(i, 0.0, forward=1.0, other=4.0) for i in range(n)])
    summary = results.summary("validation")
    assert (bool(summary.verdict), summary.losses is not None) == (is_judged, is_judged)
    after = "`other`, 80 % of the step, is code after the model: metrics, self.log: name it"
    assert any(one.startswith(after) for one in summary.advice) == is_judged
    assert results.summary().verdict


@pytest.mark.parametrize(("workers", "who"), [(0, ""), (2, "workers, "), (None, "workers, ")])
def test_no_worker_is_blamed_where_there_is_none(workers: int | None, who: str) -> None:
    told = f"use fewer {who}threads and other processes than CPU cores"
    summary = Results(100, 0).summary()
    advise = advices._ABOUT["slow steps: off-CPU"]
    assert callable(advise)
    assert [*advise(summary, replace(WORKERS, num_workers=workers))] == [told]


def test_slow_steps_without_a_cause_are_shown_by_the_timer() -> None:
    results = Results(100, 0)
    results.add([raw(i, 0.0, forward=90.0 if i == 10 else 10.0) for i in range(30)])
    slow = SlowStep(10, 90.0, 10.0, "forward", (), 80.0, lost_ms={"forward": {"unexplained": 80.0}})
    results.slow.add(evidence(slow), is_known=True)
    assert "see timer.slow_steps()" in results.summary().advice


def test_nothing_is_advised_where_nothing_was_timed_or_only_the_warm_up() -> None:
    results = Results(100, 5)
    assert results.summary().advice == ()
    results.add([raw(0, 0.0, forward=4.0)])
    assert results.summary().losses is None


def loader(**options: Any) -> Any:
    return DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4, **options)


def test_a_plain_loops_loader_is_known_by_what_it_says(loop: Loop) -> None:
    with hooks(loop) as timer:
        for _ in timer.steps(loader()):
            loop.gpu.host_work(50.0)
            loop.train(torch.zeros(1, 2))
    setup = timer._results.setup
    assert (setup.num_workers, setup.pin_memory, setup.persistent_workers) == (0, False, False)
    assert (setup.batch_size, setup.prefetch_factor, setup.has_loader) == (4, None, True)


@pytest.mark.parametrize(
    ("loaders", "workers", "pinned"),
    [
        ({"a": loader(), "b": loader()}, 0, False),
        ([loader(), loader(num_workers=2)], None, False),
        ([torch.zeros(1)] * 3, None, None),
        ([torch.zeros(1)] * 1000, None, None),
        ((), None, None),
        (loader(num_workers=2), 2, False),
    ],
)
def test_of_several_loaders_what_all_say_is_known(
    loaders: Any, workers: int | None, pinned: bool | None
) -> None:
    known = known_of_loader(loaders)
    assert (known["num_workers"], known["pin_memory"]) == (workers, pinned)


class Odd:
    """A loader of a user's own, with an attribute that raises."""

    num_workers = "many"

    @property
    def pin_memory(self) -> bool:
        raise RuntimeError("not yet")

    def __iter__(self) -> Any:
        return iter([torch.zeros(1, 2)] * 3)


def test_of_any_other_loader_nothing_is_known_and_nothing_fails(loop: Loop) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(Odd()):
            loop.train(x)
    setup = timer._results.setup
    assert (setup.num_workers, setup.pin_memory, setup.has_loader) == (None, None, True)
    assert timer.summary().steps == 3


def test_under_lightning_the_precision_is_told_by_the_trainer(gpu: FakeGPU) -> None:
    timer = fit(gpu, Model(gpu))
    assert timer._results.setup.precision == "32-true"
    assert not timer._results.setup.has_bf16


def test_advice_is_saved_with_the_run_and_read_back(loop: Loop, tmp_path: Any) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(8)):
            loop.train(x)
    timer.save(tmp_path / "run.json")
    summary = timer.summary()
    assert summary.advice
    found = load(tmp_path / "run.json").summary()
    assert (found.advice, found.verdict) == (summary.advice, summary.verdict)
    assert summary.to_dict()["verdict"] == summary.verdict
    assert summary.to_dict()["advice"] == summary.advice


def test_an_optimizer_that_cannot_be_fused_is_not_advised_to_be() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    assert _unfused([torch.optim.AdamW(parameters)]) == "AdamW"
    assert _unfused([torch.optim.AdamW(parameters, fused=True)]) == ""
    assert _unfused([torch.optim.LBFGS(parameters)]) == ""
    assert _unfused([]) == ""
    assert _unfused([SimpleNamespace(param_groups=["none of torch's"])]) == ""
