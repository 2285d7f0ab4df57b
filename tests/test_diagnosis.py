"""The diagnosis, a pure function of a measurement and the training setup."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from lightning_gputime import Cause, SlowStep
from lightning_gputime._attribution import OUTSIDE_CODES, OutsideCause, OutsideSummary
from lightning_gputime._diagnosis import CODES, Diagnosis, TimeBreakdown
from lightning_gputime._diagnosis.diagnose import diagnose
from lightning_gputime._ledger.rows import LineRow, PhasePart
from lightning_gputime._loader import SAMPLER, Culprit, Source
from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.measurement import Measurement, TrainingSetup
from lightning_gputime._measurement.memory import MemorySummary
from lightning_gputime._measurement.slow import SlowSummary
from lightning_gputime._measurement.sums import PhaseStats
from lightning_gputime._measurement.wall_clock import WallClockBreakdown
from lightning_gputime._output.summary import PhaseSummary
from lightning_gputime._ranks.comparison import RankSummary

LOADER = TrainingSetup(has_loader=True, num_workers=2, pin_memory=True, cores=16)
STEP = {"data": 0.4, "forward": 4.0, "loss": 0.2, "backward": 8.0, "optimizer": 1.0, "other": 0.1}


def constant(ms: float, n: int = 100, **fields: Any) -> PhaseStats:
    """Return statistics of a phase that takes the same time in each of n steps."""
    return PhaseStats(n, mean_ms=ms, p50_ms=ms, p95_ms=ms, max_ms=ms, p5_ms=ms, **fields)


def measurement(
    phases_ms: Mapping[str, float], *, wait_ms: float = 3.0, **facts: Any
) -> Measurement:
    """Return a measurement of 100 steps, in which the host waits for the GPU for `wait_ms`."""
    step_ms = sum(ms for name, ms in phases_ms.items() if "/" not in name)
    rows = {
        name: constant(ms, share=ms / step_ms, host_mean_ms=ms) for name, ms in phases_ms.items()
    }
    step = constant(step_ms, share=1.0)
    return Measurement(rows, step, 100, host_wait_mean_ms=wait_ms, **facts)


def on_gpu(
    other_ms: Mapping[str, float] | None = None, *lines: LineRow, waits_in: str = "", **facts: Any
) -> Measurement:
    """Return a measurement on a GPU, which waits for the host in the phases `waits_in`.

    `other_ms` replaces or adds the times of some phases.
    """
    phases_ms = {**STEP, **(other_ms or {})}
    host_paced = {name: float(name in waits_in.split()) for name in phases_ms}
    return measurement(phases_ms, host_paced=host_paced, lines=lines, **facts)


def on_host(
    other_ms: Mapping[str, float] | None = None, *lines: LineRow, **facts: Any
) -> Measurement:
    """Return a measurement on a CPU. `other_ms` replaces or adds the times of some phases."""
    facts = {"wait_ms": 0.0, "on_host_clock": True, "lines": lines, **facts}
    return measurement({**STEP, **(other_ms or {})}, **facts)


def timed(
    function: str,
    where: str = "train.py:12",
    *,
    gpu: Mapping[str, float] | None = None,
    host: Mapping[str, float] | None = None,
    idle: Mapping[str, float] | None = None,
    **fields: Any,
) -> LineRow:
    """Return a line with its ms by phase: paced by the GPU, by the host, or idle after a wait."""
    file, _, number = where.partition(":")
    gpu, host, idle = gpu or {}, host or {}, idle or {}
    phases = {
        name: PhasePart(
            gpu.get(name, 0.0), host.get(name, 0.0) + idle.get(name, 0.0), idle.get(name, 0.0)
        )
        for name in {**gpu, **host, **idle}
    }
    return LineRow(function, file, int(number or 0), phases=phases, **fields)


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


MODEL = "forward backward optimizer"
ATTENTION = timed("Attention.forward", "model.py:25", gpu={"forward": 3.5, "backward": 7.0})
MLP = timed("MLP.forward", "model.py:40", gpu={"forward": 0.5, "backward": 1.0})
DECODE = timed("Net.decode", "model.py:30", host={"forward": 3.5, "backward": 7.0}, calls=96.0)
# Lines at which the host launches many operations.
LSTM = replace(DECODE, function="LSTM.forward", is_forward=True, operations=400)
BLOCKS = [
    timed("Block.forward", f"model.py:{line}", host={"forward": 0.5, "backward": 1.0})
    for line in range(50, 58)
]
BLOCKS = [replace(line, is_forward=True, operations=10) for line in BLOCKS]
SEARCHES = [replace(line, operations=0) for line in BLOCKS]
EMA = timed("EMA.update", "ema.py:9", host={"callbacks": 13.7})
EMA_ON_GPU = timed("EMA.update", "ema.py:9", gpu={"callbacks": 3.0})
TOPK = timed("topk", "train.py:52", host={"other": 13.6})
NORMS = timed("norms", "train.py:53", host={"other": 1.0}, idle={"forward": 4.0}, calls=6.0)
CLIPPING = timed("clip_rows", "train.py:9", host={"optimizer": 12.0})
UPDATE = timed("Adam.step", "", host={"optimizer": 12.0}, is_library=True, path=("main (t.py:9)",))
COPIES = {"data": 13.3, "data/fetch": 0.3, "data/copy": 13.0}


@pytest.mark.parametrize(
    ("measured", "code", "entry", "speed_up"),
    [
        # An entry is a bottleneck if it takes at least 20 % of the time.
        (on_host({"data": 13.3}), "input-bound", "data", 2.0),
        (on_host({"data": 3.4}), "input-bound", "data", 1.2556),
        # Parts of `data` are separate entries.
        (on_host({"data": 13.3, "data/fetch": 13.3}), "input-bound", "data/fetch", 2.0),
        (
            on_host({"data": 13.3, "data/fetch": 0.3}),
            "input-bound",
            "data (transfer hooks)",
            1.9559,
        ),
        (on_gpu(COPIES), "input-bound", "data/copy", 1.9559),
        (on_host({"callbacks": 13.7}), "host-bound", "callbacks", 2.0),
        (on_host({"loss": 13.5}), "host-bound", "loss", 2.0),
        (on_host({"augment": 13.7}), "host-bound", "augment", 2.0),
        (on_gpu({"other": 13.6}, waits_in="other"), "host-bound", "other", 2.0),
        # Code between backward and the update is not the model's work.
        (on_host({"optimizer": 12.0}, CLIPPING), "host-bound", "clip_rows (train.py:9)", 1.9449),
        (on_gpu({"backward/comm": 5.0}), "communication-bound", "communication", 1.5747),
        (on_gpu({"data": 5.4, "data/comm": 5.0}), "straggler-bound", "other ranks", 1.365),
        (on_gpu(waits_in=MODEL, wait_ms=0.0), "launch-bound", "", None),
        (on_gpu(None, DECODE, MLP), "host-bound", "Net.decode (model.py:30)", 4.2812),
        (
            on_host({"forward": 12.0}, slow=slow_steps(0.3, compilation=0.3)),
            "host-bound",
            "slow steps: compilation",
            1 / 0.7,
        ),
        (on_host(wall_clock=fit({"validation": 10.0})), "overhead-bound", "validation", 2.0),
        (on_host(wall_clock=fit({"set-up": 10.0})), "overhead-bound", "set-up", None),
    ],
)
def test_diagnosis_names_the_largest_removable_entry(
    measured: Measurement, code: str, entry: str, speed_up: float | None
) -> None:
    diagnosis, breakdown = diagnosed(measured)
    assert (diagnosis.code, diagnosis.grade, diagnosis.entry) == (code, "bound", entry)
    expected = pytest.approx(speed_up, abs=1e-4) if speed_up else None
    assert breakdown[entry].speed_up == expected
    assert diagnosis.headline.startswith(f"{code}: ")


@pytest.mark.parametrize(
    ("measured", "code", "entry", "grade"),
    [
        (on_gpu(), "GPU-bound", "backward", "balanced"),
        (on_gpu(None, ATTENTION, MLP), "GPU-bound", "Attention.forward (model.py:25)", "balanced"),
        (on_gpu({"optimizer": 12.7}), "GPU-bound", "optimizer", "balanced"),
        (on_host(), "compute-bound", "backward", "balanced"),
        (on_host({"data": 0.5}), "compute-bound", "backward", "balanced"),
        (on_host({"optimizer": 12.0}, UPDATE), "compute-bound", str(UPDATE), "balanced"),
        (on_host({"data": 3.2}), "compute-bound", "backward", "worth a look"),
        # The GPU waits for launches for less than 30 % of the step.
        (on_gpu(waits_in="forward"), "GPU-bound", "backward", "balanced"),
        # The host does more than launching operations, and no line takes 20 %.
        (on_gpu(None, *SEARCHES), "host-bound", "optimizer", "worth a look"),
    ],
)
def test_work_of_the_model_is_the_bottleneck_if_nothing_else_is(
    measured: Measurement, code: str, entry: str, grade: str
) -> None:
    diagnosis, _ = diagnosed(measured)
    assert (diagnosis.code, diagnosis.grade) == (code, grade)
    assert diagnosis.entry == entry.replace("`", "")


@pytest.mark.parametrize(
    ("measured", "headline"),
    [
        (
            on_gpu({"other": 13.6}, TOPK),
            "host-bound: `topk` (train.py:52) keeps the GPU waiting for 13.6 ms of 27.2 ms per step"
            " (50 % of the timed steps); without it the training is up to 2.00x as fast",
        ),
        (
            on_gpu({"forward": 8.0, "other": 1.0}, NORMS, wait_ms=0.0),
            "host-bound: `norms` (train.py:53) keeps the GPU waiting for 9 ms of 18.6 ms per step"
            " (48 % of the timed steps); without it the training is up to 1.94x as fast",
        ),
        (
            on_host({"callbacks": 13.7}, EMA),
            "host-bound: `EMA.update` (ema.py:9) takes 13.7 ms of 27.4 ms per step (50 % of the"
            " timed steps); without it the training is up to 2.00x as fast",
        ),
        (
            on_gpu(None, *BLOCKS, waits_in="optimizer"),
            "launch-bound: the GPU waits for launches for 95 % of the step (29 % in forward, 58 %"
            " in backward, 7.3 % in optimizer), at many lines",
        ),
        (
            on_gpu(None, LSTM, MLP),
            "launch-bound: the GPU waits for launches for 77 % of the step (26 % in forward, 51 %"
            " in backward), most of it at `LSTM.forward` (model.py:30)",
        ),
        (
            on_gpu(
                {"callbacks": 1.0},
                ATTENTION,
                MLP,
                replace(EMA, phases={"callbacks": PhasePart(0.0, 1.0)}),
            ),
            "GPU-bound: the GPU sets the pace for 93 % of the step; `Attention.forward`"
            " (model.py:25) takes 10.5 ms of 14.7 ms per step (71 % of the timed steps); without it"
            " the training is up to 1.26x as fast; worth a look: `EMA.update` (ema.py:9) keeps the"
            " GPU waiting for 1 ms of 14.7 ms per step (6.8 % of the timed steps); without it the"
            " training is up to 1.07x as fast (host-bound)",
        ),
        (
            on_host(
                None,
                timed("Corpus.setup", host={"set-up": 900.0}, entry="set-up"),
                timed("F1.compute", "metrics.py:7", host={"validation": 900.0}, entry="validation"),
                wall_clock=fit({"set-up": 10.0, "validation": 3.0}),
            ),
            "overhead-bound: `set-up` takes 10 s, 43 % of the fit, and occurs once; apart from"
            " that, overhead-bound: `validation` takes 13 % of the fit, most of it at `F1.compute`"
            " (metrics.py:7); without it the training is up to 1.15x as fast",
        ),
        (
            on_host(
                {"data": 13.3, "data/fetch": 13.3},
                timed("Photos.__getitem__", "data.py:7", host={"data/fetch": 9.0}),
                timed("pad", "data.py:20", host={"data/fetch": 3.0}),
            ),
            "input-bound: `data/fetch` takes 13.3 ms of 26.6 ms per step (50 % of the timed steps),"
            " most of it at `Photos.__getitem__` (data.py:7); without it the training is up to"
            " 2.00x as fast",
        ),
    ],
)
def test_headline_names_line_time_and_gain(measured: Measurement, headline: str) -> None:
    diagnosis, _ = diagnosed(measured)
    assert diagnosis.headline == headline
    assert headline.startswith(f"{diagnosis.code}: ")
    assert not diagnosis.entry or diagnosis.entry in headline.replace("`", "")


@pytest.mark.parametrize(
    ("untimed_steps", "code"),
    [
        # One step takes 550 of the 600 ms in 100 steps. The others take 50 of 1420 ms.
        (0, "compute-bound"),
        # 100 of 600 steps were timed, so callbacks take 3,600 ms in total, and 550 is little.
        (500, "host-bound"),
    ],
)
def test_bottleneck_is_judged_without_the_longest_step_of_a_phase(
    untimed_steps: int, code: str
) -> None:
    measured = on_host({"callbacks": 6.0}, untimed_steps=untimed_steps)
    diagnosis, _ = diagnosed(with_row(measured, "callbacks", max_ms=550.0))
    assert diagnosis.code == code


@pytest.mark.parametrize(
    ("wait_ms", "busy_ms", "speed_up"),
    [
        (13.0, 0.0, 4.2812),  # The host waits longer than the GPU takes for the line.
        (3.0, 0.0, 1.2804),  # Without the line, the host needs 10.7 of 13.7 ms.
        (3.0, 2.0, 1.5747),  # Two more ms of the host are part of the line.
        (1.0, 0.0, 4.2812),  # Below 10 % of the step, the host's time is unknown.
    ],
)
def test_promise_is_limited_by_the_time_of_the_host(
    wait_ms: float, busy_ms: float, speed_up: float
) -> None:
    line = replace(ATTENTION, busy_ms=busy_ms)
    _, breakdown = diagnosed(on_gpu(None, line, MLP, wait_ms=wait_ms))
    found = breakdown["Attention.forward (model.py:25)"].speed_up
    assert found == pytest.approx(speed_up, abs=1e-4)


def test_time_is_divided_by_the_code_that_is_its_reason() -> None:
    # The GPU idles in forward, because `norms` has waited for it.
    norms = timed("norms", host={"other": 2.0}, idle={"forward": 1.0})
    net = timed("Net.forward", "net.py:3", gpu={"forward": 2.0, "backward": 4.0})
    unknown = timed("", "", gpu={"forward": 1.0})  # In no examined step.
    _, breakdown = diagnosed(on_gpu({"other": 2.0}, norms, net, unknown))
    assert [(row.name, row.pace) for row in breakdown.rows] == [
        ("Net.forward (net.py:3)", "GPU"),
        ("norms (train.py:12)", "host"),
        ("forward (not examined)", "GPU"),
        ("optimizer", "GPU"),
        ("data", "GPU"),
        ("loss", "GPU"),
    ]
    model, waits, *rest = (dict(row.phases_ms) for row in breakdown.rows)
    assert model == pytest.approx({"backward": 8.0, "forward": 2.0})
    assert waits == pytest.approx({"forward": 1.0, "other": 2.0})
    assert [sum(ms.values()) for ms in rest] == pytest.approx([1.0, 1.0, 0.4, 0.2])


def test_entry_that_stays_whole_has_only_its_own_time() -> None:
    # One line fetches a batch and calls the model.
    line = timed("main", host={"data": 12.0, "forward": 4.0})
    _, breakdown = diagnosed(on_host({"data": 12.0}, line))
    assert dict(breakdown["data"].phases_ms) == pytest.approx({"data": 12.0})
    assert dict(breakdown["main (train.py:12)"].phases_ms) == pytest.approx({"forward": 4.0})


# Advice

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
    assert [advice.text for advice in diagnosis.advice] == expected
    assert all(advice.code for advice in diagnosis.advice)


FLOAT32 = {"precision": "32-true", "has_bf16": True}
OWN_LOOP = {"pin_memory": False, "is_own_loop": True}
ADAM = {"unfused": "Adam"}
LAUNCHES = ["batch_size", "compile", "cuda_graphs"]


@pytest.mark.parametrize(
    ("measured", "setup", "codes"),
    [
        (on_gpu(None, ATTENTION, MLP), FLOAT32, ["speed_up", "precision"]),
        (on_gpu(None, *BLOCKS, waits_in="optimizer"), {}, LAUNCHES),
        (on_gpu({"optimizer": 2.0}, *BLOCKS, waits_in="optimizer"), ADAM, [*LAUNCHES, "fused"]),
        (on_gpu(waits_in=MODEL), {}, LAUNCHES),
        (on_host({"callbacks": 13.7}, EMA), {}, ["callback"]),
        # Code that the GPU sets the pace of is advised on, too, if it is not the model's.
        (on_gpu({"callbacks": 3.0}, ATTENTION, MLP, EMA_ON_GPU), {}, ["speed_up", "callback"]),
        (on_host(wall_clock=fit({"checkpoints": 10.0})), {}, ["save_less"]),
        (on_host(wall_clock=fit({"validation": 10.0})), {}, ["evaluate_less"]),
        (on_host({"optimizer": 12.0}), ADAM, ["fused"]),
        (on_host({"optimizer": 12.0}, UPDATE), ADAM, ["fused"]),
        (on_host({"optimizer": 12.0}, UPDATE), {}, []),
        (on_host({"optimizer": 12.0}, CLIPPING), ADAM, ["shorten"]),
        (on_host({"augment": 14.0}), {}, ["shorten"]),
        (on_host({"other": 14.0}), {}, ["name_phase"]),
        (
            on_gpu({"other": 13.6}, replace(TOPK, phases={"other": PhasePart(13.6)})),
            OWN_LOOP,
            ["shorten", "pin_memory"],
        ),
        (on_host({"augment": 2.0}, blurred=("augment",), not_measured=("x",)), {}, []),
        (on_host({"data to tokens": 9.0}, blurred=("data",)), {}, ["shorten"]),
        (on_gpu(COPIES), {}, ["smaller_copies"]),
        (on_gpu(COPIES), {"pin_memory": False}, ["pin_memory"]),
        (on_gpu({**COPIES, "other": 10.0}, waits_in="other"), {}, ["smaller_copies", "name_phase"]),
    ],
)
def test_bottleneck_has_the_advice_that_fits_the_setup(
    measured: Measurement, setup: dict[str, Any], codes: list[str]
) -> None:
    diagnosis, _ = diagnosed(measured, replace(LOADER, **setup))
    assert [advice.code for advice in diagnosis.advice] == codes


FETCHES = {"data": 13.3, "data/fetch": 13.3}
SAMPLING = Culprit("data/fetch", "Balanced", seconds=9.0, calls=100, share=0.9, kind=SAMPLER)


@pytest.mark.parametrize(
    ("measured", "setup", "text"),
    [
        (
            on_gpu({"other": 13.6}, TOPK),
            {},
            "`topk` (train.py:52) keeps the GPU waiting for 13.6 ms of 27.2 ms per step: make it"
            " faster, run it less often, or move it to another process",
        ),
        (
            on_gpu({"forward": 4.0, "other": 1.0}, NORMS),
            {},
            "`norms` (train.py:53) waits for the GPU, 6 times per step, which then has no work for"
            " 4 ms of 14.6 ms per step: read the value less often, or later",
        ),
        (
            on_gpu(None, replace(ATTENTION, modules="8 x Attention", calls=8.0), MLP),
            {},
            "`Attention.forward` (8 x Attention, model.py:25) takes 10.5 ms of 13.7 ms per step on"
            " the GPU (7 ms in backward, 3.5 ms in forward), 8 times per step: make it faster",
        ),
        (
            on_gpu(None, replace(ATTENTION, is_recomputed=True), MLP),
            {},
            "recomputation of `Attention.forward` (model.py:25) takes 10.5 ms of 13.7 ms per step:"
            " turn activation checkpointing off there, if the memory is large enough",
        ),
        (
            on_host({"callbacks": 13.7}, EMA),
            {},
            "`EMA.update` (ema.py:9) takes 13.7 ms of 27.4 ms per step: run it less often, or make"
            " it faster",
        ),
        (
            on_host({"callbacks": 13.7}, replace(EMA, function="Uploads.log_metrics")),
            {},
            "`Uploads.log_metrics` (ema.py:9) takes 13.7 ms of 27.4 ms per step: log fewer values,"
            " or less often",
        ),
        (
            on_host({"other": 13.6}, replace(TOPK, function="<module>", last_line=54)),
            {},
            "`train.py:52-54` takes 13.6 ms of 27.2 ms per step: make it faster, or run it less"
            " often",
        ),
        (
            on_host({"other": 13.6}, lines_unavailable="pdb traces"),
            {},
            "`other` takes 13.6 ms of 27.2 ms per step, at unknown lines (pdb traces): name its"
            ' parts with phase("name")',
        ),
        (
            on_host({"augment": 13.7}, timed("Jitter", "data.py:9", host={"augment": 9.0})),
            {},
            "`augment` takes 13.7 ms of 27.4 ms per step, most of it at `Jitter` (data.py:9): run"
            " it less often, or make it faster",
        ),
        (
            on_host(FETCHES, culprits=(SAMPLING,)),
            {"num_workers": 0, "is_in_memory": True},
            "`Balanced` takes 12 ms of 26.6 ms per step: make it faster; it runs in the main"
            " process, even with workers",
        ),
        (
            on_host(
                FETCHES,
                timed("Photos.__getitem__", "data.py:7", host={"data/fetch": 9.0}, calls=8.0),
            ),
            {"num_workers": 0},
            "`Photos.__getitem__` (data.py:7) takes 9 ms of 26.6 ms per step: set num_workers=2"
            " (now 0), or make it faster",
        ),
        (
            on_host(
                None,
                timed("Net.on_train_epoch_end", host={"epoch ends": 900.0}, entry="epoch ends"),
                wall_clock=fit({"epoch ends": 10.0}),
            ),
            {},
            "`Net.on_train_epoch_end` (train.py:12) takes 10 s: make it faster, or run it in fewer"
            " epochs",
        ),
    ],
)
def test_advice_names_the_code_and_what_to_do(
    measured: Measurement, setup: dict[str, Any], text: str
) -> None:
    assert diagnose(measured, replace(LOADER, **setup)).advice[0].text == text


def collected_in_one_place(share: float) -> Measurement:
    entry, line = "slow steps: garbage collection", Source("train.py", 5, 5, "clean")
    culprit = Culprit(entry, "", seconds=0.4, calls=9, share=share, source=line)
    return on_host(slow=slow_steps(0.4, **{"garbage collection": 0.4}), culprits=(culprit,))


def compiled_in_slow_steps(calls: float) -> Measurement:
    culprit = Culprit("slow steps: compilation", "", seconds=0.4, calls=int(calls), share=1.0)
    return on_host(slow=slow_steps(0.4, compilation=0.4), culprits=(culprit,))


def loaded_by_three_lines(ms: float) -> Measurement:
    first, *others = (
        timed(name, "data.py:7", host={"data/fetch": ms if name == "read" else (13.3 - ms) / 2})
        for name in ("read", "crop", "pad")
    )
    return on_host(FETCHES, first, *others)


@pytest.mark.parametrize(
    ("make", "below", "above", "sign"),
    [
        (lambda ms: on_host({"augment": ms}), 0.62, 0.8, "shorten"),  # 4 %, 6 % of the step.
        (lambda ms: on_host({"optimizer": ms}), 1.2, 1.6, "fused"),  # 9 %, 11 %.
        (
            lambda ms: on_host({"other": ms}, timed("f", is_library=True, host={"other": ms})),
            1.3,
            1.7,
            "shorten",
        ),
        (lambda s: on_host(wall_clock=fit({"set-up": s})), 4.0, 6.0, "set_up"),
        (
            lambda s: on_host(wall_clock=replace(fit({"validation": 10.0}), after_batches_s=s)),
            2.5,
            3.5,
            "metrics",
        ),
        (collected_in_one_place, 0.2, 0.3, "collect_less"),
        (compiled_in_slow_steps, 4, 6, "host-bound"),
        (loaded_by_three_lines, 6.0, 7.3, "most of it at"),
        (
            lambda n: on_gpu(None, *(replace(line, operations=int(n)) for line in BLOCKS)),
            4,
            6,
            "launch-bound",
        ),
        (
            lambda free: on_gpu(waits_in=MODEL, memory=MemorySummary(1 - free, 1 - free, 1.0)),
            0.15,
            0.25,
            "batch_size",
        ),
    ],
)
def test_diagnosis_changes_at_each_threshold(
    make: Callable[[float], Measurement], below: float, above: float, sign: str
) -> None:
    for value in (below, above):
        diagnosis, _ = diagnosed(make(value), replace(LOADER, unfused="Adam"))
        found = [diagnosis.headline, *(advice.code for advice in diagnosis.advice)]
        assert any(sign in text for text in found) == (value == above)


@pytest.mark.parametrize(
    ("error", "code", "grade", "headline", "speed_up"),
    [
        (0.06, "host-bound", "bound", "(25 % ± 6 % of the timed steps)", 1.34),
        (0.2, "compute-bound", "worth a look", "; worth a look: `topk` (train.py:52)", 1.34),
        (
            0.3,
            "compute-bound",
            "unknown",
            "; unclear: `topk (train.py:52)` takes 25 % ± 30 %",
            None,
        ),
    ],
)
@pytest.mark.parametrize("is_of_phase", [True, False])
def test_grade_of_an_entry_follows_from_its_uncertainty(
    error: float, code: str, grade: str, headline: str, speed_up: float | None, is_of_phase: bool
) -> None:
    of_line = 0.0 if is_of_phase else error
    line = timed("topk", "train.py:52", host={"other": 4.6}, error_ms=18.2 * of_line)
    measured = on_host({"other": 4.6}, line)
    if is_of_phase:
        measured = with_row(measured, "other", share_error=error)
    diagnosis, breakdown = diagnosed(measured)
    assert (diagnosis.code, diagnosis.grade) == (code, grade)
    assert headline in diagnosis.headline
    assert breakdown["topk (train.py:52)"].speed_up == pytest.approx(speed_up, abs=0.01)
    assert bool(texts(diagnosis, "shorten")) == bool(speed_up)


@pytest.mark.parametrize(
    ("calls", "seconds", "first_s", "is_reported"),
    [
        (95, 0.9, 0.0, True),
        (95, 0.9, 0.8, False),  # Most of the time is part of the first step.
        (9, 0.9, 0.0, False),  # Rare compilations are slow steps.
        (11, 0.9, 0.0, True),
        (95, 0.24, 0.0, False),
        (95, 0.3, 0.0, True),
    ],
)
def test_compilation_in_most_steps_is_reported(
    calls: int, seconds: float, first_s: float, is_reported: bool
) -> None:
    line = Source("train.py", 9, 9, "<module>")
    culprit = Culprit("slow steps: compilation", "", seconds, calls, share=1.0, source=line)
    clock = WallClockBreakdown({"steps": 1.37, "first step": first_s})
    diagnosis, breakdown = diagnosed(on_host(culprits=(culprit,), wall_clock=clock))
    text = "`train.py:9` is recompiled: use batches of equal shape, or torch.compile(dynamic=True)"
    assert texts(diagnosis, "dynamic_shapes") == is_reported * [text]
    assert (diagnosis.entry == culprit.entry) == is_reported
    if is_reported:
        assert breakdown[culprit.entry].seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "where", "todo"),
    [
        ("gc.collect", "`gc.collect` (train.py:5)", "call it less often"),
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
    entry, line = "slow steps: garbage collection", Source("train.py", 5, 5, "clean")
    culprit = Culprit(entry, name, seconds=0.4, calls=9, share=1.0, source=line)
    m = on_host(slow=slow_steps(0.4, **{"garbage collection": 0.4}), culprits=(culprit,))
    diagnosis, _ = diagnosed(m)
    assert texts(diagnosis, "collect_less") == [
        f"most garbage collections start in {where}: {todo}"
    ]


SAVES = OutsideCause("thread", "thread `save`", "train.py:3", 0.9, 0.8, 1.0, 0.1)


@pytest.mark.parametrize(
    ("p95_ms", "outside", "is_advised"),
    [
        (0.1, None, True),
        (9.0, None, False),
        (0.1, OutsideSummary(9, 100, 0.5, (SAVES,)), False),
        (0.1, OutsideSummary(9, 100, 0.5, blocking=SAVES), False),
        (0.1, OutsideSummary(9, 100, 0.5), True),
    ],
)
def test_pause_is_advised_for_a_phase_long_in_few_steps_without_another_cause(
    p95_ms: float, outside: OutsideSummary | None, is_advised: bool
) -> None:
    host = on_host({"other": 8.0}, outside=outside)
    measured = with_row(host, "other", p50_ms=0.1, p95_ms=p95_ms)
    diagnosis = diagnose(measured, replace(LOADER, is_own_loop=True))
    assert bool(texts(diagnosis, "pause")) == is_advised


# The loader takes 27 %, then 69 % of the time.
@pytest.mark.parametrize(("loader_ms", "n_first"), [(5.0, 1), (30.0, 0)])
def test_advice_on_causes_outside_is_ordered_by_their_share(loader_ms: float, n_first: int) -> None:
    causes = tuple(
        replace(SAVES, kind=kind, name=kind, share=share)
        for kind, share in (("process", 0.26), ("thread", 0.6), ("pressure", 0.04))
    )
    outside = OutsideSummary(9, 100, 0.5, causes, core_wait_share=0.2)
    host = on_host({"data": loader_ms, "data/fetch": loader_ms}, outside=outside)
    diagnosis, _ = diagnosed(host, LOADER)
    codes = [advice.code for advice in diagnosis.advice]
    ordered = ["busy_thread", "busy_cores", "other_process", "shared_machine"]
    assert [code for code in codes if code in OUTSIDE_CODES] == ordered
    assert codes[:n_first] == ordered[:n_first]
    assert codes[n_first] == "cheaper_transforms"


STRETCH = {"kind": "stretch", "until_step": 1500}
FIND = "find what takes longer in `forward`"
IN_ALL_PHASES = "find what slows down all phases since step 1,000"


@pytest.mark.parametrize(
    ("changes", "lost_share", "is_first", "text", "speed_up"),
    [
        ({}, 0.4, True, f"{FIND} since step 1,000", "1.67"),
        ({"phase_change_ms": 2.0}, 0.11, False, IN_ALL_PHASES, "1.12"),
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


def test_line_that_has_grown_explains_a_slowdown() -> None:
    line = timed("Bank.forward", "bank.py:4", host={"forward": 5.0}, is_forward=True)
    grown = replace(line, grew_from_ms=1.6, grew_to_ms=14.6)
    slowdown = Slowdown("drift", 1000, 1.0, 0.1, 10.0, "forward", 9.0)
    m = on_host({"forward": 8.0}, grown, slowdown=replace(slowdown, lost_share=0.4))
    diagnosis, _ = diagnosed(m)
    growth = "`Bank.forward` (bank.py:4) grew from 1.6 ms to 14.6 ms per step"
    assert diagnosis.advice[0].text == (
        f"{growth}: keep the data that it processes from growing; without this the training is up"
        " to 1.67x as fast"
    )
    assert not texts(diagnosis, "growth")
    diagnosis, _ = diagnosed(replace(m, slowdown=None))
    assert texts(diagnosis, "growth") == [f"{growth}: keep the data that it processes from growing"]


@pytest.mark.parametrize(
    ("least_share", "slowdown", "grade"),
    [
        (0.25, None, "bound"),
        (0.1, None, "worth a look"),
        (0.02, None, "unknown"),
        (0.02, Slowdown("jump", 1000, 1.0, 0.1, 10.0, "forward", 9.0), "bound"),
    ],
)
def test_verdict_holds_in_both_halves_of_the_run(
    least_share: float, slowdown: Slowdown | None, grade: str
) -> None:
    m = on_host({"data/fetch": 6.0, "data": 6.0}, slowdown=slowdown)
    diagnosis, _ = diagnosed(replace(m, least_shares={"data": least_share}))
    assert diagnosis.grade == grade
    doubt = f"unclear: `data/fetch` takes {m.share('data'):.0%}, but".replace("%", " %")
    assert (doubt in diagnosis.headline) == (grade == "unknown")


def measured_with(entry: str) -> Measurement:
    """Return a measurement whose bottleneck is one entry of the time breakdown."""
    if entry == "the straggler":
        ranks = RankSummary({}, (0, 1), straggler=1, excess_ms=6.0, phase="backward")
        return on_gpu({"backward/comm": 8.0, "backward": 12.0}, ranks=ranks)
    if entry == "other ranks":
        return on_gpu({"data/comm": 8.0, "data": 12.0})
    if entry == "communication":
        return on_gpu({"backward/comm": 5.0})
    if entry.startswith("slow steps: "):
        return on_host(slow=slow_steps(0.4, **{entry.removeprefix("slow steps: "): 0.4}))
    if entry.startswith("data"):
        parts = {"data/fetch": 0.1, "data/copy": 0.1} | ({entry: 13.0} if "/" in entry else {})
        return on_host({"data": 13.3} | (parts if entry != "data" else {}))
    return on_host(wall_clock=fit({entry: 30.0}))


@pytest.mark.parametrize("entry", CODES)
def test_every_bottleneck_has_advice(entry: str) -> None:
    diagnosis, breakdown = diagnosed(measured_with(entry))
    assert (diagnosis.code, diagnosis.grade, diagnosis.entry) == (CODES[entry], "bound", entry)
    assert breakdown[entry].advice


STRAGGLER = RankSummary({}, (0, 1), straggler=1, phase="data", excess_ms=6.0)
SUSPECT = replace(STRAGGLER, straggler=None, phase="forward", suspect=1, error_ms=2.0)
IS_STRAGGLER = "speed up rank 1 in `data`: all other ranks wait for it"
MORE_TOKENS = replace(STRAGGLER, batch="1.6 times the tokens of the others (16 and 10 per step)")
IS_UNBALANCED = f"balance the batches: rank 1, for which the others wait, has {MORE_TOKENS.batch}"
IS_SUSPECT = (
    "rank 1 may cause this wait: it takes 6 ms ± 2 ms longer per step than the others, in"
    " `forward`; time more steps to be certain"
)


@pytest.mark.parametrize(
    ("ranks", "code", "entry", "end", "text"),
    [
        (STRAGGLER, "straggler-bound", "the straggler", "", IS_STRAGGLER),
        (MORE_TOKENS, "straggler-bound", "the straggler", "", IS_UNBALANCED),
        (SUSPECT, "communication-bound", "communication", "; rank 1 may be the cause", IS_SUSPECT),
    ],
    ids=["straggler", "more tokens", "suspected straggler"],
)
def test_straggler_or_suspected_straggler_is_named(
    ranks: RankSummary, code: str, entry: str, end: str, text: str
) -> None:
    diagnosis, _ = diagnosed(on_gpu({"backward": 14.0, "backward/comm": 7.0}, ranks=ranks))
    assert (diagnosis.code, diagnosis.entry) == (code, entry)
    assert diagnosis.headline.endswith(end)
    assert diagnosis.advice[0].text == text


# Without a bottleneck


def test_phases_that_are_not_separated_are_not_a_bottleneck() -> None:
    diagnosis, breakdown = diagnosed(on_host({"data": 20.0}, blurred=("data", "callbacks")))
    assert (diagnosis.code, diagnosis.grade, diagnosis.entry) == ("", "unknown", "")
    assert (diagnosis.headline, diagnosis.advice) == ("", ())
    assert breakdown["data"].speed_up is None
    # GPU-bound training is recognized even if phases are not separated.
    diagnosis, _ = diagnosed(on_gpu({"data": 20.0}, blurred=("data", "callbacks")))
    assert diagnosis.code == "GPU-bound"
    assert "`data`" not in diagnosis.headline


PAUSE = (
    "`data` is long in only a few steps: wrap code that is not part of a step, such as validation,"
    " in `with timer.paused()`"
)


@pytest.mark.parametrize(
    ("data_ms", "code", "end"),
    [
        (20.0, "", "unclear: `data` takes 60 % of the timed steps"),
        (2.0, "compute-bound", "; unclear: `data` takes 13 % of the timed steps"),
    ],
)
def test_data_that_may_be_evaluations_is_unclear(data_ms: float, code: str, end: str) -> None:
    measured = with_row(on_host({"data": data_ms}), "data", p50_ms=0.1)
    diagnosis, _ = diagnosed(measured, TrainingSetup(is_own_loop=True))
    assert diagnosis.code == code
    assert diagnosis.headline.endswith(f"{end}, mostly in a few steps, which may be evaluations")
    assert diagnosis.advice[0].text == PAUSE


@pytest.mark.parametrize(
    "facts", [{"is_warmup": True}, {"stage": "validation", "steps": 19}, {"steps": 0}]
)
def test_diagnosis_is_empty_if_too_little_was_measured(facts: dict[str, Any]) -> None:
    assert diagnose(replace(on_host({"data": 20.0}), **facts), LOADER) == Diagnosis()


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
    assert breakdown["backward"].error == pytest.approx(0.02)
    text = str(PhaseSummary(measured, LOADER))
    assert "40 long steps (40 % of the time) were not sampled" in text


# The time breakdown


def test_time_breakdown_of_a_fit_is_exact() -> None:
    # 100 steps of 16.7 ms and 1 ms in checkpoints, after a first step of 500 ms.
    entries_s = {"set-up": 0.007, "first step": 0.5, "validation": 0.1, "epoch ends": 0.011}
    wall_clock = WallClockBreakdown({"steps": 1.67, **entries_s}, saves_in_steps_s=0.1)
    _, breakdown = diagnosed(on_host({"callbacks": 4.0}, EMA, wall_clock=wall_clock))
    assert {row.name: 1e3 * row.seconds for row in breakdown.rows} == pytest.approx(
        {
            "backward": 101 * 8.0,
            "first step": 500 - 16.7,
            "forward": 101 * 4.0,
            "EMA.update (ema.py:9)": 101 * 3.0,  # Without checkpoints.
            "optimizer": 101 * 1.0,
            "validation": 100,
            "data": 101 * 0.4,
            "loss": 101 * 0.2,
            "epoch ends": 11,
            "other": 101 * 0.1,
            "set-up": 7,
        }
    )
    assert breakdown["EMA.update (ema.py:9)"].ms_per_step == pytest.approx(3.0)
    assert [*breakdown] == [row.name for row in breakdown.rows]
    assert "forward" in breakdown
    assert "paused" not in breakdown
    assert breakdown["paused"].share == 0.0


def random_lines(chance: random.Random, phases: list[str]) -> tuple[LineRow, ...]:
    """Return up to five lines with random times in some phases."""
    lines = []
    for number in range(chance.randrange(6)):
        parts = {}
        for name in chance.sample(phases, chance.randrange(len(phases) + 1)):
            host_ms = chance.choice([0.0, chance.random()])
            parts[name] = PhasePart(chance.random(), host_ms, chance.random() * host_ms)
        lines.append(LineRow(chance.choice(["", "main"]), "train.py", number, phases=parts))
    return tuple(lines)


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
        causes = {"unexplained": chance.random(), "allocator": chance.random()}
        lost = {name: causes for name in ms if chance.random() < 0.7}
        worst = SlowStep(3, 5.0, 1.0, "backward", (), unexplained_ms=chance.random(), lost_ms=lost)
        entries_s = {name: chance.random() for name in ("set-up", "validation", "checkpoints")}
        measured = measurement(
            ms,
            wait_ms=chance.choice([0.0, chance.random()]),
            host_paced={name: chance.random() for name in ms},
            lines=random_lines(chance, [*ms]),
            on_host_clock=chance.random() < 0.3,
            timing_share=chance.choice([None, 2 * chance.random()]),
            slow=chance.choice([None, SlowSummary(1, 100, 0.5, causes, 0.1, worst, lost)]),
            ranks=RankSummary({}, (0, 1), chance.choice([None, 0, 1]), chance.random(), chosen[-1]),
            wall_clock=chance.choice([None, fit(entries_s, chance.random())]),
        )
        _, breakdown = diagnosed(measured)
        assert all(row.seconds >= -1e-12 for row in breakdown.rows)
        assert all(0 <= row.host_share <= row.share + 1e-9 for row in breakdown.rows)
