"""The diagnosis, a pure function of a measurement and the training setup."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_loop import Loop, train

from lightning_gputime import Cause, SlowStep, load
from lightning_gputime._diagnosis.codes import CODES
from lightning_gputime._diagnosis.diagnose import diagnose
from lightning_gputime._diagnosis.diagnosis import Diagnosis, TimeBreakdown
from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.culprits import PLACE, SAMPLER, Culprit, Source
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.ranks import RankSummary
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.slow import SlowSummary
from lightning_gputime._measurement.stats import PhaseStats
from lightning_gputime._measurement.wall_clock import WallClockBreakdown
from lightning_gputime._output.summary import PhaseSummary

LOADER = TrainingSetup(has_loader=True, num_workers=2, pin_memory=True, cores=16)
STEP = {"data": 0.4, "forward": 4.0, "loss": 0.2, "backward": 8.0, "optimizer": 1.0, "other": 0.1}


def constant(ms: float, n: int = 100, **fields: Any) -> PhaseStats:
    """Return statistics of a phase that takes the same time in each of n steps."""
    return PhaseStats(n, mean_ms=ms, p50_ms=ms, p95_ms=ms, max_ms=ms, p5_ms=ms, **fields)


def measurement(
    phases_ms: Mapping[str, float],
    *,
    host_ms: Mapping[str, float] | None = None,
    wait_ms: float = 3.0,
    **facts: Any,
) -> Measurement:
    """Return a measurement of 100 steps, which are GPU-bound unless `wait_ms` is small."""
    step_ms = sum(ms for name, ms in phases_ms.items() if "/" not in name)
    host_ms = {**phases_ms, **(host_ms or {})}
    rows = {
        name: constant(ms, share=ms / step_ms, host_mean_ms=host_ms[name])
        for name, ms in phases_ms.items()
    }
    step = constant(step_ms, share=1.0)
    return Measurement(rows, step, 100, host_wait_mean_ms=wait_ms, **facts)


def on_gpu(other_ms: Mapping[str, float] | None = None, **facts: Any) -> Measurement:
    """Return a measurement on a GPU. `other_ms` replaces or adds the times of some phases."""
    return measurement({**STEP, **(other_ms or {})}, **facts)


def on_host(other_ms: Mapping[str, float] | None = None, **facts: Any) -> Measurement:
    """Return a measurement on a CPU. `other_ms` replaces or adds the times of some phases."""
    return on_gpu(other_ms, wait_ms=0.0, on_host_clock=True, **facts)


def with_row(measured: Measurement, name: str, **changes: Any) -> Measurement:
    """Return a measurement with other statistics of one phase."""
    row = replace(measured.rows[name], **changes)
    return replace(measured, rows={**measured.rows, name: row})


def fit(entries_s: Mapping[str, float], steps_s: float = 10.0) -> WallClockBreakdown:
    return WallClockBreakdown({"steps": steps_s, **entries_s})


def breakdown_of(diagnosis: Diagnosis) -> TimeBreakdown:
    """Check that the time breakdown of a diagnosis adds up and is sorted, and return it."""
    breakdown = diagnosis.time_breakdown
    assert breakdown is not None
    assert sum(row.share for row in breakdown.rows) == pytest.approx(1, abs=1e-9)
    assert sum(row.seconds for row in breakdown.rows) == pytest.approx(breakdown.wall_s)
    assert all(row.speed_up is None or row.speed_up >= 1 for row in breakdown.rows)
    shares = [row.share for row in breakdown.rows]
    assert shares == sorted(shares, reverse=True)
    return breakdown


def diagnosed(
    measured: Measurement, setup: TrainingSetup = LOADER
) -> tuple[Diagnosis, TimeBreakdown]:
    """Return the diagnosis of a measurement, and its time breakdown."""
    diagnosis = diagnose(measured, setup)
    return diagnosis, breakdown_of(diagnosis)


def texts(diagnosis: Diagnosis, code: str) -> list[str]:
    """Return the texts of the advice with a code."""
    return [advice.text for advice in diagnosis.advice if advice.code == code]


def slow_steps(share: float, **causes: float) -> SlowSummary:
    """Return slow steps that take a share of the time, by cause."""
    cause = Cause("compilation", host_ms=9.0, exposed_ms=9.0, detail="")
    worst = SlowStep(
        7, 30.0, baseline_ms=14.0, phase="forward", causes=(cause,), unexplained_ms=7.0
    )
    unexplained = causes.pop("unexplained", 0.0)
    lost_shares = {"forward": {**causes, "unexplained": unexplained}}
    return SlowSummary(10, 100, share, causes, unexplained, worst, lost_shares)


COPIES = {"data": 13.3, "data/fetch": 0.3, "data/copy": 13.0}
COMPILES = on_host({"forward": 12.0}, slow=slow_steps(0.3, compilation=0.3))
BOTTLENECKS = [
    (on_gpu(wait_ms=0.1), "launch-bound", "GPU work", None),
    # An entry is a bottleneck if it takes at least 20 % of the time.
    (on_host({"data": 13.3}), "input-bound", "data", 2.0),
    (on_host({"data": 3.4}), "input-bound", "data", 1.2556),
    # Parts of `data` are separate entries.
    (on_host({"data": 13.3, "data/fetch": 13.3}), "input-bound", "data/fetch", 2.0),
    (on_host({"data": 13.3, "data/fetch": 0.3}), "input-bound", "data (transfer hooks)", 1.9559),
    (on_gpu(COPIES), "copy-bound", "data/copy", 1.9559),
    (on_host({"callbacks": 13.7}), "callback-bound", "callbacks", 2.0),
    (on_host({"other": 13.6}), "other-bound", "other", 2.0),
    (on_host({"loss": 13.5}), "loss-bound", "loss", 2.0),
    (on_host({"optimizer": 12.7}), "optimizer-bound", "optimizer", 2.0),
    (on_host({"augment": 13.7}), "phase-bound", "augment", 2.0),
    (on_gpu({"backward/comm": 5.0}), "communication-bound", "communication", 1.5747),
    # In a launch-bound step host time can be removed, even if the GPU takes less.
    (on_gpu(host_ms={"other": 4.2}, wait_ms=0.0), "other-bound", "other", 1.4421),
    (on_host(wall_clock=fit({"validation": 10.0})), "validation-bound", "validation", 2.0),
    (on_host(wall_clock=fit({"epoch ends": 10.0})), "epoch-end-bound", "epoch ends", 2.0),
    (on_host(wall_clock=fit({"paused": 10.0})), "paused-bound", "paused", 2.0),
    (on_host(wall_clock=fit({"set-up": 10.0})), "startup-bound", "set-up", None),
    (COMPILES, "compile-bound", "slow steps: compilation", 1 / 0.7),
]
"""Measurements, with the code, the entry and the speed-up of their bottleneck."""


@pytest.mark.parametrize(
    ("measured", "code", "grade", "entry", "speed_up"),
    [
        *((measured, code, "bound", *rest) for measured, code, *rest in BOTTLENECKS),
        (on_host({"data": 3.2}), "input-bound", "worth a look", "data", 1.2406),
        # No entry is large enough to be worth removing.
        (on_gpu(), "GPU-bound", "balanced", "GPU work", None),
        (on_host(), "compute-bound", "balanced", "CPU work", None),
        (on_host({"data": 0.5}), "compute-bound", "balanced", "CPU work", None),
        # On a GPU the optimizer and the loss are part of the GPU work.
        (on_gpu({"optimizer": 12.7}), "GPU-bound", "balanced", "GPU work", None),
    ],
)
def test_diagnosis_names_the_largest_removable_entry(
    measured: Measurement, code: str, grade: str, entry: str, speed_up: float | None
) -> None:
    diagnosis, breakdown = diagnosed(measured)
    assert (diagnosis.code, diagnosis.grade, diagnosis.entry) == (code, grade, entry)
    expected = pytest.approx(speed_up, abs=1e-4) if speed_up else None
    assert breakdown[entry].speed_up == expected
    assert diagnosis.headline.startswith(code) or grade == "worth a look"


@pytest.mark.parametrize(
    ("untimed_steps", "code"),
    [
        # One step takes 550 of the 600 ms in 100 steps. The others take 50 of 1420 ms.
        (0, "compute-bound"),
        # 100 of 600 steps were timed, so callbacks take 3,600 ms in total, and 550 is little.
        (500, "callback-bound"),
    ],
)
def test_bottleneck_is_judged_without_the_longest_step_of_a_phase(
    untimed_steps: int, code: str
) -> None:
    measured = on_host({"callbacks": 6.0}, untimed_steps=untimed_steps)
    diagnosis, _ = diagnosed(with_row(measured, "callbacks", max_ms=550.0))
    assert diagnosis.code == code


BLOCKS_IN_LOSS = measurement(
    {"data": 0.2, "forward": 4.0, "loss": 0.2, "backward": 8.0, "optimizer": 1.0},
    host_ms={"forward": 0.5, "loss": 9.9, "backward": 2.0, "optimizer": 0.8},
    wait_ms=0.0,
)
BLOCKS_IN_OTHER = measurement(  # The GPU idles for 4.5 ms of 18 ms.
    {"forward": 4.5, "backward": 9.0, "other": 4.5},
    host_ms={"forward": 1.2, "backward": 3.6, "other": 13.2},
    wait_ms=0.0,
)


@pytest.mark.parametrize(
    ("measured", "phase", "entry", "end"),
    [
        (
            BLOCKS_IN_LOSS,
            "loss",
            "GPU work",
            ": the GPU lags the CPU by 9.7 of 13.4 ms per step",
        ),
        (BLOCKS_IN_OTHER, "other", "other", "without that the training is up to 1.33x as fast"),
    ],
)
def test_diagnosis_names_the_phase_in_which_the_cpu_blocks(
    measured: Measurement, phase: str, entry: str, end: str
) -> None:
    diagnosis, _ = diagnosed(measured)
    assert (diagnosis.code, diagnosis.entry) == ("sync-bound", entry)
    assert f"blocks on the GPU in `{phase}`: " in diagnosis.headline
    assert diagnosis.headline.endswith(end)
    assert diagnosis.advice[0].text == f"in `{phase}`, remove .item() and prints"


@pytest.mark.parametrize(
    ("busy_ms", "speed_up"),
    [(None, 2.0), (10.0, 1.37)],  # A step takes at least the GPU busy time.
)
def test_speed_up_is_limited_by_the_gpu_busy_time(busy_ms: float | None, speed_up: float) -> None:
    measured = on_gpu(host_ms={"other": 6.85}, wait_ms=0.0)
    if busy_ms is not None:
        measured = with_row(measured, "backward", gpu_busy_mean_ms=busy_ms)
    _, breakdown = diagnosed(measured)
    assert breakdown["other"].speed_up == pytest.approx(speed_up)


LONG_FETCH = {"data": 80.0, "data/fetch": 80.0}
MORE_WORKERS = [
    "use more workers (now num_workers=2; 16 CPU cores per rank)",
    "use faster transforms",
]
NO_CORE = (
    "use faster transforms: more workers would lack a CPU core (now num_workers=15; 16 CPU cores"
    " per rank)"
)
TRANSFER_HOOKS = (
    "on_before_batch_transfer, on_after_batch_transfer and transfer_batch_to_device take 11.8 ms of"
    " 25.3 ms per step: move their work into the dataset, so that the workers run it"
)
INDEX = "index whole batches with dataset[indices]; the tensors are in memory"


@pytest.mark.parametrize(
    ("setup", "phases", "expected"),
    [
        # Fetches take half of the step, so one worker keeps up with the other half.
        ({"num_workers": 0}, {}, ["set num_workers=1 (now 0)"]),
        ({"num_workers": 0}, LONG_FETCH, ["set num_workers=7 (now 0)"]),
        ({"num_workers": 0, "cores": 2}, LONG_FETCH, ["set num_workers=2 (now 0)"]),
        ({}, {}, MORE_WORKERS),
        ({"num_workers": 15}, {}, [NO_CORE]),
        ({"num_workers": None}, {}, ["use faster transforms, or workers that load in advance"]),
        ({"is_in_memory": True}, {}, [INDEX]),
        # The time is in transfer hooks, so the advice is not about the dataset.
        ({"is_in_memory": True}, {"data/fetch": 0.2}, [TRANSFER_HOOKS]),
    ],
)
def test_advice_on_the_loader_follows_from_setup_and_sub_phases(
    setup: dict[str, Any], phases: dict[str, float], expected: list[str]
) -> None:
    measured = on_host({"data": 12.0, "data/fetch": 12.0} | phases)
    diagnosis, _ = diagnosed(measured, replace(LOADER, **setup))
    assert [advice.text for advice in diagnosis.advice][: len(expected)] == expected
    assert all(advice.code for advice in diagnosis.advice)


FLOAT32 = {"precision": "32-true", "has_bf16": True}
EMA = {"callbacks": 13.7, "callbacks/EMA.on_train_batch_end": 13.0}
OWN_LOOP = {"pin_memory": False, "is_own_loop": True}


@pytest.mark.parametrize(
    ("measured", "setup", "codes"),
    [
        (on_gpu(), FLOAT32, ["precision", "modules"]),
        (on_gpu(wait_ms=0.0), {}, ["batch_size", "compile", "cuda_graphs"]),
        (on_host(EMA), {}, ["callback", "modules"]),
        (on_host(wall_clock=fit({"checkpoints": 10.0})), {}, ["save_less", "modules"]),
        (on_host(wall_clock=fit({"validation": 10.0})), {}, ["evaluate_less", "modules"]),
        (on_host({"optimizer": 12.0}), {"unfused": "Adam"}, ["fused"]),
        (on_host({"augment": 14.0}), {}, ["shorten", "modules"]),
        (on_gpu({"other": 20.0}), OWN_LOOP, ["pin_memory", "name_phase"]),
        (on_host({"augment": 2.0}, blurred=("augment",), not_measured=("x",)), {}, ["modules"]),
        (on_host({"data to tokens": 9.0}, blurred=("data",)), {}, ["shorten", "modules"]),
    ],
)
def test_bottleneck_has_the_advice_that_fits_the_setup(
    measured: Measurement, setup: dict[str, Any], codes: list[str]
) -> None:
    diagnosis, _ = diagnosed(measured, replace(LOADER, **setup))
    assert [advice.code for advice in diagnosis.advice][: len(codes)] == codes


@pytest.mark.parametrize(
    ("error", "code", "grade", "headline", "speed_up"),
    [
        (0.05, "other-bound", "bound", "other-bound: `other` takes 25 % ± 5 % of the", 1.34),
        (0.2, "other-bound", "worth a look", "compute-bound; worth a look: `other`", 1.34),
        (0.3, "compute-bound", "unknown", "; unclear: `other` takes 25 % ± 30 %", None),
    ],
)
def test_grade_of_an_entry_follows_from_its_uncertainty(
    error: float, code: str, grade: str, headline: str, speed_up: float | None
) -> None:
    diagnosis, breakdown = diagnosed(with_row(on_host({"other": 4.6}), "other", share_error=error))
    assert (diagnosis.code, diagnosis.grade) == (code, grade)
    assert headline in diagnosis.headline
    assert breakdown["other"].speed_up == pytest.approx(speed_up, abs=0.01)
    assert bool(texts(diagnosis, "name_phase")) == bool(speed_up)


def place(
    entry: str,
    name: str,
    source: Source,
    *,
    s: float = 11.0,
    n: int = 100,
    observed_s: float = 12.0,
) -> Culprit:
    """Return code that takes `s` seconds in n passes, of the `observed_s` seconds of its entry."""
    return Culprit(entry, name, s, n, observed_s, source, kind=PLACE)


FETCHES = {"data": 13.3, "data/fetch": 13.3}
CLIPPING = place("optimizer", "", Source("train.py", 9, 11, "<module>"))
UPDATE = place("optimizer", "Adam.step", Source("train.py", 9, 9))
COMMAND = place("other", "before forward", Source("/v/site-packages/trains/loop.py", 9, 11, "main"))
SCRIPT = replace(COMMAND, source=Source("train.py", 9, 11, "<module>"))
CELL = replace(COMMAND, source=Source("/tmp/ipykernel_71/3747.py", 9, 11, "main"))
SAMPLING = Culprit("data/fetch", "Balanced", seconds=9.0, calls=100, observed_s=10.0, kind=SAMPLER)


@pytest.mark.parametrize(
    ("culprit", "phases", "setup", "code", "text"),
    [
        (CLIPPING, {"optimizer": 12.0}, {"unfused": "Adam"}, "shorten", "train.py:9-11 takes"),
        (UPDATE, {"optimizer": 12.0}, {"unfused": "Adam"}, "fused", "use Adam(fused=True)"),
        (UPDATE, {"optimizer": 12.0}, {}, "shorten", "`Adam.step` (train.py:9) takes"),
        (COMMAND, {"other": 12.0}, {}, "shorten", "`main` (loop.py:9-11, before forward) takes"),
        (SCRIPT, {"other": 12.0}, {}, "shorten", "train.py:9-11 (before forward) takes"),
        (CELL, {"other": 12.0}, {}, "shorten", "`main` (cell:9-11, before forward) takes"),
        (SAMPLING, FETCHES, {"num_workers": 0, "is_in_memory": True}, "sampler", "`Balanced` "),
    ],
    ids=[
        "code next to the update",
        "update to fuse",
        "fused update",
        "training command of an installed package",
        "lines of a script",
        "cell of a notebook",
        "sampler of tensors in memory",
    ],
)
def test_advice_names_the_culprit_unless_the_update_can_be_fused(
    culprit: Culprit, phases: dict[str, float], setup: dict[str, Any], code: str, text: str
) -> None:
    measured = on_host(phases, culprits=(culprit,))
    advice = diagnose(measured, replace(LOADER, **setup)).advice
    assert [advised.code for advised in advice] == [code, "modules"]
    assert advice[0].text.startswith(text)


@pytest.mark.parametrize(
    ("calls", "seconds", "first_s", "is_reported"),
    [
        (95, 0.9, 0.0, True),
        (95, 0.9, 0.8, False),  # Most of the time is part of the first step.
        (5, 0.9, 0.0, False),  # Rare compilations are slow steps.
        (95, 0.1, 0.0, False),
    ],
)
def test_compilation_in_most_steps_is_reported(
    calls: int, seconds: float, first_s: float, is_reported: bool
) -> None:
    line = Source("train.py", 9, 9, "<module>")
    culprit = place("slow steps: compilation", "", line, s=seconds, n=calls, observed_s=seconds)
    clock = WallClockBreakdown({"steps": 1.37, "first step": first_s})
    diagnosis, breakdown = diagnosed(on_host(culprits=(culprit,), wall_clock=clock))
    text = "train.py:9 is recompiled: use batches of equal shape, or torch.compile(dynamic=True)"
    assert texts(diagnosis, "dynamic_shapes") == is_reported * [text]
    assert (diagnosis.code == "compile-bound") == is_reported
    if is_reported:
        assert breakdown[culprit.entry].seconds == pytest.approx(seconds)


def test_time_breakdown_contains_the_names_of_its_entries() -> None:
    _, breakdown = diagnosed(on_host({"forward": 12.0}))
    assert [*breakdown] == [row.name for row in breakdown.rows]
    assert "CPU work" in breakdown
    assert "validation" not in breakdown
    assert breakdown["validation"].share == 0.0


@pytest.mark.parametrize(
    ("name", "where", "todo"),
    [
        ("gc.collect", "`clean` (train.py:5, gc.collect)", "call it less often"),
        (
            "",
            "`clean` (train.py:5)",
            "create fewer objects there, such as lists of numbers, or call gc.disable(), and"
            " gc.collect() every n steps",
        ),
    ],
)
def test_advice_on_garbage_collection_depends_on_its_start(
    name: str, where: str, todo: str
) -> None:
    entry = "slow steps: garbage collection"
    culprit = place(entry, name, Source("train.py", 5, 5, "clean"), s=0.4, n=9, observed_s=0.4)
    m = on_host(slow=slow_steps(0.4, **{"garbage collection": 0.4}), culprits=(culprit,))
    diagnosis, _ = diagnosed(m)
    assert texts(diagnosis, "collect_less") == [
        f"most garbage collections start in {where}: {todo}"
    ]


def test_time_breakdown_of_a_fit_is_exact() -> None:
    # 100 steps of 16.7 ms and 1 ms in checkpoints, after a first step of 500 ms.
    entries_s = {"set-up": 0.007, "first step": 0.5, "validation": 0.1, "epoch ends": 0.011}
    wall_clock = WallClockBreakdown({"steps": 1.67, **entries_s}, saves_in_steps_s=0.1)
    diagnosis, breakdown = diagnosed(on_host({"callbacks": 4.0}, wall_clock=wall_clock))
    assert {row.name: 1e3 * row.seconds for row in breakdown.rows} == pytest.approx(
        {
            "CPU work": 101 * 13.3,
            "first step": 500 - 16.7,
            "callbacks": 101 * 3.0,  # Without checkpoints.
            "validation": 100,
            "data": 101 * 0.4,
            "epoch ends": 11,
            "set-up": 7,
        }
    )
    [text] = texts(diagnosis, "callbacks")
    assert text.startswith("callbacks take 3.03 ms of 17.7 ms per step: ")


@pytest.mark.parametrize(("p95_ms", "is_rare"), [(0.1, True), (9.0, False)])
def test_pause_is_advised_for_a_phase_long_in_few_steps(p95_ms: float, is_rare: bool) -> None:
    measured = with_row(on_host(), "forward", p50_ms=0.1, p95_ms=p95_ms)
    diagnosis = diagnose(measured, replace(LOADER, is_own_loop=True))
    assert bool(texts(diagnosis, "pause")) == is_rare


LOOP, PENALTY = Source("train.py", 20, 24, "main"), Source("train.py", 9, 12, "penalty")


def places(**calls: int) -> tuple[Culprit, ...]:
    """Return the code that ran in 20 steps: the loop, and `penalty` with its calls per phase."""
    loop_s = {"data": 4.0, "forward": 4.0, "loss": 0.0, "backward": 8.0, "optimizer": 4.0}
    all_s = {phase: s + 4.0 * (phase in calls) for phase, s in loop_s.items()}
    in_loop = (place(key, "", LOOP, s=loop_s[key], n=20, observed_s=all_s[key]) for key in loop_s)
    in_penalty = (
        place(phase, "", PENALTY, s=4.0, n=n, observed_s=all_s[phase]) for phase, n in calls.items()
    )
    return (*in_loop, *in_penalty)


@pytest.mark.parametrize(
    ("calls", "wait_ms", "per_batch"),
    [
        ({"forward": 320, "backward": 320}, 0.1, 16),
        ({"forward": 320}, 0.1, None),  # Only 17 % of the step.
        ({"backward": 320, "loss": 320}, 0.1, None),  # Perhaps hooks that interrupt a backward.
        ({"forward": 60, "backward": 60}, 0.1, None),  # Three calls per batch.
        ({"forward": 80, "backward": 80}, 0.1, 4),
        ({"forward": 320, "backward": 320}, 3.0, None),  # GPU-bound.
    ],
)
def test_code_that_calls_the_model_many_times_per_batch_is_named(
    calls: dict[str, int], wait_ms: float, per_batch: int | None
) -> None:
    diagnosis, _ = diagnosed(on_gpu(wait_ms=wait_ms, culprits=places(**calls)))
    if per_batch is None:
        assert texts(diagnosis, "repeated_calls") == []
        assert "calls the model" not in diagnosis.headline
    else:
        text = (
            f"`penalty` (train.py:9-12) calls the model {per_batch} times per batch, which takes"
            " 29 % of the step"
        )
        assert texts(diagnosis, "repeated_calls") == [
            f"{text}: process the whole batch in one call"
        ]
        assert diagnosis.headline.endswith(f"; {text}")
        assert diagnosis.advice[0].code == "repeated_calls"


@pytest.mark.parametrize(("n_without_grad", "has_grad"), [(0, True), (60, True), (1000, False)])
def test_repeated_calls_are_without_gradients_if_most_of_them_are(
    n_without_grad: int, has_grad: bool
) -> None:
    code = places(forward=320, backward=320)
    forward_s = next(found.observed_s or 0.0 for found in code if found.entry == "forward")
    without_grad = place(
        "forward", "without gradients", PENALTY, s=0.1, n=n_without_grad, observed_s=forward_s
    )
    diagnosis, _ = diagnosed(on_gpu(wait_ms=0.1, culprits=(without_grad, *code)))
    [text] = texts(diagnosis, "repeated_calls")
    assert text.endswith("process the whole batch in one call")
    assert ("without gradients" in text, "if this is an evaluation" in text) == (not has_grad,) * 2


STRETCH = {"kind": "stretch", "until_step": 1500}
FIND = "find what takes longer in `forward`"
THROTTLES = (
    "find what runs since step 1,000 and slows down all phases, such as another thread, another"
    " process or a GPU that throttles"
)


@pytest.mark.parametrize(
    ("changes", "lost_share", "is_first", "text", "speed_up"),
    [
        ({}, 0.4, True, f"{FIND} since step 1,000", "1.67"),
        ({"phase_change_ms": 2.0}, 0.11, False, THROTTLES, "1.12"),
        ({"phase_change_ms": 2.0}, 0.09, False, "", ""),
        (STRETCH, 1.0, True, f"{FIND} from step 1,000 to 1,500", "100.00"),
    ],
)
def test_slowdown_has_advice_with_a_speed_up(
    changes: dict[str, Any], lost_share: float, is_first: bool, text: str, speed_up: str
) -> None:
    slowdown = Slowdown("jump", 1000, 1.0, 0.1, 10.0, "forward", 9.0)
    slowdown = replace(slowdown, lost_share=lost_share, **changes)
    measured = on_host({"data": 6.0}, slowdown=slowdown)
    diagnosis, _ = diagnosed(measured)
    expected = f"{text}: without this the training is up to {speed_up}x as fast"
    assert texts(diagnosis, "slowdown") == [expected] * bool(text)
    assert (diagnosis.advice[0].code == "slowdown") == is_first
    assert (str(slowdown) in diagnosis.headline) == bool(text)
    assert str(slowdown) in str(PhaseSummary(measured, LOADER))


def measured_with(entry: str) -> Measurement:
    """Return a measurement whose bottleneck is one entry of the time breakdown."""
    if entry == "the slowest rank":
        ranks = RankSummary({}, (0, 1), slowest_rank=1, behind_median_ms=6.0, phase="backward")
        return on_gpu({"backward/comm": 8.0, "backward": 12.0}, ranks=ranks)
    if entry == "other ranks":
        return on_gpu({"data/comm": 8.0, "data": 12.0})
    if entry == "communication":
        return on_gpu({"backward/comm": 5.0})
    if entry == "launch gaps":
        measured = on_gpu(wait_ms=0.0, probed_steps=9)
        for name, row in measured.rows.items():
            measured = with_row(measured, name, gpu_busy_mean_ms=row.mean_ms / 2)
        return measured
    if entry.startswith("slow steps: "):
        return on_host(slow=slow_steps(0.4, **{entry.removeprefix("slow steps: "): 0.4}))
    if entry.startswith("data"):
        parts = {"data/fetch": 0.1, "data/copy": 0.1} | ({entry: 13.0} if "/" in entry else {})
        return on_host({"data": 13.3} | (parts if entry != "data" else {}))
    if entry in (*STEP, "callbacks"):
        return on_host({entry: 13.3})
    return on_host(wall_clock=fit({entry: 30.0}))


@pytest.mark.parametrize("entry", CODES)
def test_every_bottleneck_has_advice(entry: str) -> None:
    diagnosis, breakdown = diagnosed(measured_with(entry))
    assert (diagnosis.code, diagnosis.grade, diagnosis.entry) == (CODES[entry], "bound", entry)
    assert breakdown[entry].advice


SHORT_COPY = {"data": 1.6, "data/fetch": 0.1, "data/copy": 1.5}


@pytest.mark.parametrize(
    ("phases", "host", "pin_memory", "code", "advice"),
    [
        (SHORT_COPY, {"data/copy": 9.0}, None, "copy-bound", "smaller_copies"),
        (SHORT_COPY, {"data/copy": 9.0}, False, "copy-bound", "pin_memory"),
        (SHORT_COPY, {"data/copy": 9.0}, True, "copy-bound", "smaller_copies"),
        ({}, {"data": 9.0}, True, "input-bound", "num_workers"),
    ],
)
def test_data_that_is_short_on_the_gpu_and_long_on_the_host_has_advice(
    phases: dict[str, float],
    host: dict[str, float],
    pin_memory: bool | None,
    code: str,
    advice: str,
) -> None:
    measured = on_gpu(phases, host_ms=host, wait_ms=0.0)
    diagnosis, _ = diagnosed(measured, replace(LOADER, pin_memory=pin_memory))
    assert (diagnosis.code, diagnosis.grade, diagnosis.advice[0].code) == (code, "bound", advice)


def test_phases_that_are_not_separated_are_not_a_bottleneck() -> None:
    diagnosis, breakdown = diagnosed(on_host({"data": 20.0}, blurred=("data", "callbacks")))
    assert (diagnosis.code, diagnosis.entry, diagnosis.headline) == ("", "", "")
    assert diagnosis.advice == ()
    assert breakdown["data"].speed_up is None
    # GPU-bound training is recognized even if phases are not separated.
    measured = on_gpu({"data": 20.0}, wait_ms=9.0, blurred=("data", "callbacks"))
    diagnosis, _ = diagnosed(measured)
    assert (diagnosis.code, diagnosis.entry) == ("GPU-bound", "GPU work")
    assert "nothing else" not in diagnosis.headline


def test_time_breakdown_adds_up_for_random_measurements() -> None:
    chance = random.Random(0)
    phases = ["data", "data/fetch", "data/comm", "callbacks", "forward", "backward/comm", "own"]
    for _ in range(300):
        chosen = ["backward", *chance.sample(phases, chance.randrange(len(phases)))]
        # A sub-phase takes at most half of its phase, which is added if it was not chosen.
        ms = {name: chance.random() for name in chosen if "/" not in name}
        ms |= {
            name: chance.random() * ms.setdefault(name.partition("/")[0], chance.random()) / 2
            for name in chosen
            if "/" in name
        }
        causes = {"unexplained": chance.random(), "off_cpu": chance.random()}
        lost = {name: causes for name in ms if chance.random() < 0.7}
        worst = SlowStep(3, 5.0, 1.0, "backward", (), unexplained_ms=chance.random(), lost_ms=lost)
        entries_s = {name: chance.random() for name in ("set-up", "validation", "checkpoints")}
        measured = measurement(
            ms,
            host_ms={name: 2 * chance.random() for name in ms},
            wait_ms=chance.choice([0.0, chance.random()]),
            on_host_clock=chance.random() < 0.3,
            timing_share=chance.choice([None, 2 * chance.random()]),
            slow=chance.choice([None, SlowSummary(1, 100, 0.5, causes, 0.1, worst, lost)]),
            ranks=RankSummary({}, (0, 1), chance.choice([None, 0, 1]), chance.random(), chosen[-1]),
            wall_clock=chance.choice([None, fit(entries_s, chance.random())]),
        )
        _, breakdown = diagnosed(measured)
        assert all(row.seconds >= -1e-12 for row in breakdown.rows)


def test_unexplained_slow_steps_have_no_entry() -> None:
    measured = on_host({"forward": 12.0}, slow=slow_steps(0.3, unexplained=0.3))
    diagnosis, breakdown = diagnosed(measured)
    assert diagnosis.code == "compute-bound"
    assert "step times vary: 90 % of the steps take" in str(PhaseSummary(measured, LOADER))
    assert "unexplained" not in [row.name for row in breakdown.rows]


def test_long_steps_that_were_not_sampled_are_an_entry_without_speed_up() -> None:
    measured = on_host(not_sampled_steps=40, not_sampled_share=0.4)
    for name, row in measured.rows.items():
        measured = with_row(measured, name, share=0.6 * row.share, share_error=0.02)
    _, breakdown = diagnosed(measured)
    entry = breakdown["not sampled"]
    assert entry.share == pytest.approx(0.4)
    assert (entry.code, entry.speed_up) == ("", None)
    assert breakdown["CPU work"].error > 0.02
    text = str(PhaseSummary(measured, LOADER))
    assert "40 long steps (40 % of the time) were not sampled" in text


SLOWEST = RankSummary({}, (0, 1), slowest_rank=1, phase="data", behind_median_ms=6.0)
SUSPECT = replace(SLOWEST, slowest_rank=None, phase="forward", suspect=1, error_ms=2.0)
IS_SLOWEST = "speed up rank 1 in `data`: all other ranks wait for it"
IS_SUSPECT = (
    "rank 1 may cause this wait: it takes 6 ms ± 2 ms longer per step than the others, in"
    " `forward`; time more steps to be certain"
)


@pytest.mark.parametrize(
    ("ranks", "code", "entry", "end", "text"),
    [
        (SLOWEST, "rank-bound", "the slowest rank", "", IS_SLOWEST),
        (SUSPECT, "communication-bound", "communication", "; rank 1 may be the cause", IS_SUSPECT),
    ],
    ids=["slowest rank", "suspected rank"],
)
def test_slowest_or_suspected_rank_is_named(
    ranks: RankSummary, code: str, entry: str, end: str, text: str
) -> None:
    diagnosis, _ = diagnosed(on_gpu({"backward": 14.0, "backward/comm": 7.0}, ranks=ranks))
    assert (diagnosis.code, diagnosis.entry) == (code, entry)
    assert diagnosis.headline.endswith(end)
    assert diagnosis.advice[0].text == text


@pytest.mark.parametrize(
    "facts", [{"is_warmup": True}, {"stage": "validation", "steps": 19}, {"steps": 0}]
)
def test_diagnosis_is_empty_if_too_little_was_measured(facts: dict[str, Any]) -> None:
    assert diagnose(replace(on_host({"data": 20.0}), **facts), LOADER) == Diagnosis()


def test_saved_run_has_the_diagnosis_of_the_training(loop: Loop, tmp_path: Path) -> None:
    timer = train(loop, 8)
    timer.save(tmp_path / "run.json")
    summary, loaded = timer.summary(), load(tmp_path / "run.json").summary()
    assert loaded.diagnosis == summary.diagnosis
    assert str(loaded) == str(summary)
    assert summary.to_dict()["diagnosis"]["code"] == summary.code != ""
