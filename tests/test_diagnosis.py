"""The diagnosis: a pure function of a measurement and the set-up."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import FakeGPU, Layer
from fake_lightning import Model, SavingTrainer, trainer
from fake_loop import Loop, hooks
from torch import Tensor

from lightning_gputime import Cause, GPUPhaseTimer, SlowStep, load
from lightning_gputime._diagnosis.codes import CODES
from lightning_gputime._diagnosis.diagnose import diagnose
from lightning_gputime._diagnosis.diagnosis import Diagnosis
from lightning_gputime._diagnosis.repeated import repeated_calls
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


def measurement(
    phases_ms: Mapping[str, float],
    *,
    host_ms: Mapping[str, float] | None = None,
    wait_ms: float = 3.0,
    **facts: Any,
) -> Measurement:
    """100 steps on a GPU that sets the pace, unless the host waits less."""
    step_ms = sum(ms for name, ms in phases_ms.items() if "/" not in name)
    host_ms = {**phases_ms, **(host_ms or {})}
    rows = {
        name: PhaseStats(
            100, ms, ms, ms, ms, share=ms / step_ms, host_mean_ms=host_ms[name], p5_ms=ms
        )
        for name, ms in phases_ms.items()
    }
    step = PhaseStats(100, step_ms, step_ms, step_ms, step_ms, share=1.0, p5_ms=step_ms)
    return Measurement(rows, step, 100, host_wait_mean_ms=wait_ms, **facts)


def on_host(phases_ms: Mapping[str, float], **facts: Any) -> Measurement:
    return measurement(phases_ms, wait_ms=0.0, on_host_clock=True, **facts)


def fit(steps_s: float, **entries_s: float) -> dict[str, WallClockBreakdown]:
    named = {name.replace("_", " "): s for name, s in entries_s.items()}
    return {"wall_clock": WallClockBreakdown({"steps": steps_s, **named})}


def check(diagnosis: Diagnosis) -> Diagnosis:
    """Return a diagnosis whose time breakdown adds up."""
    breakdown = diagnosis.time_breakdown
    assert breakdown is not None
    assert sum(row.share for row in breakdown.rows) == pytest.approx(1, abs=1e-9)
    assert sum(row.seconds for row in breakdown.rows) == pytest.approx(breakdown.wall_s)
    assert all(row.speed_up is None or row.speed_up >= 1 for row in breakdown.rows)
    shares = [row.share for row in breakdown.rows]
    assert shares == sorted(shares, reverse=True)
    return diagnosis


@pytest.mark.parametrize(
    ("measured", "code", "grade", "entry", "speed_up"),
    [
        # Nothing can be removed: what limits the model's own work.
        (measurement(STEP), "GPU-bound", "balanced", "GPU work", None),
        (on_host(STEP), "compute-bound", "balanced", "CPU work", None),
        (measurement(STEP, wait_ms=0.1), "launch-bound", "bound", "GPU work", None),
        # From 20 % of the time on it is the bottleneck, from 5 % on worth a look.
        (on_host(STEP | {"data": 13.3}), "input-bound", "bound", "data", 2.0),
        (on_host(STEP | {"data": 3.4}), "input-bound", "bound", "data", 1.2556),
        (on_host(STEP | {"data": 3.2}), "input-bound", "worth a look", "data", 1.2406),
        (on_host(STEP | {"data": 0.5}), "compute-bound", "balanced", "CPU work", None),
        # The parts of `data` are separate entries, and the rest is named by what it is.
        (
            on_host(STEP | {"data": 13.3, "data/fetch": 13.3}),
            "input-bound",
            "bound",
            "data/fetch",
            2.0,
        ),
        (
            on_host(STEP | {"data": 13.3, "data/fetch": 0.3}),
            "input-bound",
            "bound",
            "data (transfer hooks)",
            1.9559,
        ),
        (
            measurement(STEP | {"data": 13.3, "data/fetch": 0.3, "data/copy": 13.0}),
            "copy-bound",
            "bound",
            "data/copy",
            1.9559,
        ),
        (on_host(STEP | {"callbacks": 13.7}), "callback-bound", "bound", "callbacks", 2.0),
        (on_host(STEP | {"other": 13.6}), "other-bound", "bound", "other", 2.0),
        (on_host(STEP | {"loss": 13.5}), "loss-bound", "bound", "loss", 2.0),
        (on_host(STEP | {"optimizer": 12.7}), "optimizer-bound", "bound", "optimizer", 2.0),
        (on_host(STEP | {"augment": 13.7}), "phase-bound", "bound", "augment", 2.0),
        # On a GPU the optimizer is work, and so is the loss.
        (measurement(STEP | {"optimizer": 12.7}), "GPU-bound", "balanced", "GPU work", None),
        (
            measurement(STEP | {"backward/comm": 5.0}),
            "communication-bound",
            "bound",
            "communication",
            1.5747,
        ),
        # Host time of a phase can be removed where the host sets the pace, whatever the GPU took.
        (
            measurement(STEP, host_ms={"other": 4.2}, wait_ms=0.0),
            "other-bound",
            "bound",
            "other",
            1.4421,
        ),
        # The whole fit.
        (
            on_host(STEP, **fit(10.0, validation=10.0)),
            "validation-bound",
            "bound",
            "validation",
            2.0,
        ),
        (
            on_host(STEP, **fit(10.0, epoch_ends=10.0)),
            "epoch-end-bound",
            "bound",
            "epoch ends",
            2.0,
        ),
        (on_host(STEP, **fit(10.0, paused=10.0)), "paused-bound", "bound", "paused", 2.0),
        (
            on_host(STEP, wall_clock=WallClockBreakdown({"steps": 10.0, "set-up": 10.0})),
            "startup-bound",
            "bound",
            "set-up",
            None,
        ),
    ],
)
def test_diagnosis_names_the_largest_removable_entry(
    measured: Measurement, code: str, grade: str, entry: str, speed_up: float | None
) -> None:
    found = check(diagnose(measured, LOADER))
    assert (found.code, found.grade, found.entry) == (code, grade, entry)
    assert found.time_breakdown is not None
    expected = pytest.approx(speed_up, abs=1e-4) if speed_up else None
    assert found.time_breakdown[entry].speed_up == expected
    assert found.headline.startswith(code) or grade == "worth a look"


def test_phase_that_is_long_in_a_single_step_is_no_bottleneck() -> None:
    def code_of(untimed_steps: int) -> str:
        measured = on_host(STEP | {"callbacks": 6.0}, untimed_steps=untimed_steps)
        rows = measured.rows
        longest = replace(rows["callbacks"], max_ms=550.0)
        return check(diagnose(replace(measured, rows={**rows, "callbacks": longest}), LOADER)).code

    # 600 ms in 100 steps, 550 of them in a single step: the others have 50 of 1420 ms.
    assert code_of(0) == "compute-bound"
    # 3,600 ms in 600 steps, of which 100 were timed.
    assert code_of(500) == "callback-bound"


def test_diagnosis_says_where_the_cpu_blocks() -> None:
    phases = {"data": 0.2, "forward": 4.0, "loss": 0.2, "backward": 8.0, "optimizer": 1.0}
    host = {"data": 0.2, "forward": 0.5, "loss": 9.9, "backward": 2.0, "optimizer": 0.8}
    found = check(diagnose(measurement(phases, host_ms=host, wait_ms=0.0), LOADER))
    assert found.code == "sync-bound"
    assert "`loss`" in found.headline
    assert found.advice[0].text == "remove .item() and prints from `loss`"


def test_speed_up_without_a_wait_is_the_time_in_which_the_gpu_idles() -> None:
    phases = {"forward": 4.5, "backward": 9.0, "other": 4.5}
    host = {"forward": 1.2, "backward": 3.6, "other": 13.2}
    found = check(diagnose(measurement(phases, host_ms=host, wait_ms=0.0), LOADER))
    assert (found.code, found.entry) == ("sync-bound", "other")
    assert found.headline.endswith("; without that the training is up to 1.33x as fast")
    assert found.advice[0].text == "remove .item() and prints from `other`"


@pytest.mark.parametrize(
    ("busy_ms", "speed_up"),
    [(None, 2.0), (10.0, 1.37)],  # No step gets shorter than the work of the GPU.
)
def test_speed_up_is_bounded_by_the_work_of_the_gpu(busy_ms: float | None, speed_up: float) -> None:
    found = measurement(STEP, host_ms={"other": 6.85}, wait_ms=0.0)
    if busy_ms is not None:
        rows = {**found.rows}
        rows["backward"] = replace(rows["backward"], gpu_busy_mean_ms=busy_ms)
        found = replace(found, rows=rows)
    breakdown = diagnose(found, LOADER).time_breakdown
    assert breakdown is not None
    assert breakdown["other"].speed_up == pytest.approx(speed_up)


LONG_FETCH = {"data": 80.0, "data/fetch": 80.0}


@pytest.mark.parametrize(
    ("setup", "phases", "expected"),
    [
        # Fetches take half of the step: one worker loads while the rest runs.
        (replace(LOADER, num_workers=0), {}, ["set num_workers=1 (now 0)"]),
        (replace(LOADER, num_workers=0), LONG_FETCH, ["set num_workers=7 (now 0)"]),
        (replace(LOADER, num_workers=0, cores=2), LONG_FETCH, ["set num_workers=2 (now 0)"]),
        (
            LOADER,
            {},
            [
                "use more workers (now num_workers=2; 16 CPU cores per rank)",
                "use faster transforms",
            ],
        ),
        (
            replace(LOADER, num_workers=15),
            {},
            [
                "use faster transforms: more workers would lack a CPU core (now num_workers=15;"
                " 16 CPU cores per rank)"
            ],
        ),
        (
            replace(LOADER, is_in_memory=True),
            {},
            ["index whole batches with dataset[indices]; the tensors are in memory"],
        ),
        (
            replace(LOADER, num_workers=None),
            {},
            ["use faster transforms, or workers that load in advance"],
        ),
        # Not the fetch: hooks between fetch and copy. The dataset does not matter.
        (
            replace(LOADER, is_in_memory=True),
            {"data/fetch": 0.2},
            [
                "on_before_batch_transfer, on_after_batch_transfer and transfer_batch_to_device"
                " take 11.8 ms of 25.3 ms per step: move their work into the dataset, so that the"
                " workers run it"
            ],
        ),
    ],
)
def test_advice_on_the_loader_follows_from_its_parts(
    setup: TrainingSetup, phases: dict[str, float], expected: list[str]
) -> None:
    measured = on_host(STEP | {"data": 12.0, "data/fetch": 12.0} | phases)
    found = check(diagnose(measured, setup))
    assert [advice.text for advice in found.advice][: len(expected)] == expected
    assert all(advice.code for advice in found.advice)


@pytest.mark.parametrize(
    ("measured", "setup", "codes"),
    [
        (
            measurement(STEP),
            replace(LOADER, precision="32-true", has_bf16=True),
            ["precision", "modules"],
        ),
        (measurement(STEP, wait_ms=0.0), LOADER, ["batch_size", "compile", "cuda_graphs"]),
        (
            on_host(STEP | {"callbacks": 13.7, "callbacks/EMA.on_train_batch_end": 13.0}),
            LOADER,
            ["callback", "modules"],
        ),
        (on_host(STEP, **fit(10.0, checkpoints=10.0)), LOADER, ["save_less", "modules"]),
        (on_host(STEP, **fit(10.0, validation=10.0)), LOADER, ["evaluate_less", "modules"]),
        (on_host(STEP | {"optimizer": 12.0}), replace(LOADER, unfused="Adam"), ["fused"]),
        (on_host(STEP | {"augment": 14.0}), LOADER, ["shorten", "modules"]),
        (
            measurement(STEP | {"other": 20.0}),
            replace(LOADER, pin_memory=False, is_own_loop=True),
            ["pin_memory", "name_phase"],
        ),
        (
            on_host(STEP | {"augment": 2.0}, blurred=("augment",), not_measured=("x",)),
            LOADER,
            ["modules"],
        ),
    ],
)
def test_advice_belongs_to_the_entries(
    measured: Measurement, setup: TrainingSetup, codes: list[str]
) -> None:
    found = [advice.code for advice in check(diagnose(measured, setup)).advice]
    assert found[: len(codes)] == codes


@pytest.mark.parametrize(
    ("error", "code", "grade", "headline", "speed_up"),
    [
        (0.05, "other-bound", "bound", "other-bound: `other` takes 25 % of the", 1.34),
        (0.2, "other-bound", "worth a look", "compute-bound, and worth a look: other-bound", 1.34),
        (0.3, "compute-bound", "unknown", "; unclear: `other` takes 25 % ± 30 %", None),
    ],
)
def test_an_uncertain_entry_is_no_verdict(
    error: float, code: str, grade: str, headline: str, speed_up: float | None
) -> None:
    measured = on_host(STEP | {"other": 4.6})
    other = replace(measured.rows["other"], share_error=error)
    diagnosis = check(diagnose(replace(measured, rows={**measured.rows, "other": other}), LOADER))
    assert (diagnosis.code, diagnosis.grade) == (code, grade)
    assert headline in diagnosis.headline
    assert diagnosis.time_breakdown is not None
    assert diagnosis.time_breakdown["other"].speed_up == pytest.approx(speed_up, abs=0.01)
    assert any(advice.code == "name_phase" for advice in diagnosis.advice) == bool(speed_up)


def test_advice_on_a_stretch_of_slow_steps_names_its_end() -> None:
    slowdown = Slowdown("stretch", 1000, 1.0, 0.1, 10.0, "forward", 9.0, 1500, lost_share=1.0)
    [first, *_] = diagnose(on_host(STEP, slowdown=slowdown), LOADER).advice
    assert first.text == (
        "find what takes longer in `forward` from step 1,000 to 1,500: without this the training is"
        " up to 100.00x as fast"
    )


def test_code_next_to_the_update_comes_before_a_fused_optimizer() -> None:
    clips = Culprit(
        "optimizer", "", 11.0, 100, 12.0, Source("train.py", 9, 11, "<module>"), kind=PLACE
    )
    measured = on_host(STEP | {"optimizer": 12.0}, culprits=(clips,))
    [first, *_] = diagnose(measured, replace(LOADER, unfused="Adam")).advice
    assert (first.code, first.text.startswith("train.py:9-11 takes")) == ("shorten", True)


def test_sampler_is_named_where_the_tensors_are_in_memory() -> None:
    draws = Culprit("data/fetch", "Balanced", 9.0, 100, 10.0, kind=SAMPLER)
    measured = on_host(STEP | {"data": 13.3, "data/fetch": 13.3}, culprits=(draws,))
    [first, *_] = diagnose(measured, replace(LOADER, num_workers=0, is_in_memory=True)).advice
    assert first.code == "sampler"


def test_callbacks_are_counted_without_checkpoints() -> None:
    # 100 steps take 1.77 s with 0.4 s in callbacks, of which checkpoints take 0.1 s at least.
    wall_clock = WallClockBreakdown({"steps": 1.67}, saves_in_steps_s=0.1)
    found = check(diagnose(on_host(STEP | {"callbacks": 4.0}, wall_clock=wall_clock), LOADER))
    assert found.time_breakdown is not None
    ms = 10 * found.time_breakdown["callbacks"].seconds
    assert ms == pytest.approx(3.0, abs=0.1)
    [text] = [advice.text for advice in found.advice if advice.code == "callbacks"]
    assert text.startswith(f"callbacks take {ms:.3g} ms of 17.7 ms per step: ")


@pytest.mark.parametrize(("p95_ms", "is_rare"), [(0.1, True), (9.0, False)])
def test_phase_that_is_long_in_many_steps_is_not_paused(p95_ms: float, is_rare: bool) -> None:
    measured = on_host(STEP)
    forward = replace(measured.rows["forward"], p50_ms=0.1, p95_ms=p95_ms)
    measured = replace(measured, rows={**measured.rows, "forward": forward})
    found = diagnose(measured, replace(LOADER, is_own_loop=True)).advice
    assert any(advice.code == "pause" for advice in found) == is_rare


def test_fused_optimizer_is_the_only_advice_on_the_update_itself() -> None:
    update = Culprit("optimizer", "Adam.step", 11.0, 100, 12.0, Source("train.py", 9, 9), "", PLACE)
    measured = on_host(STEP | {"optimizer": 12.0}, culprits=(update,))
    for unfused, codes in (("Adam", ["fused"]), ("", ["shorten"])):
        setup = replace(LOADER, unfused=unfused)
        found = diagnose(measured, setup).advice
        assert [advice.code for advice in found if advice.code != "modules"] == codes


LOOP, PENALTY = Source("train.py", 20, 24, "main"), Source("train.py", 9, 12, "penalty")


def places(**calls: int) -> tuple[Culprit, ...]:
    """Places in 20 located steps: the loop, and `penalty` with some calls per phase."""
    loop = {"data": 4.0, "forward": 4.0, "loss": 0.0, "backward": 8.0, "optimizer": 4.0}
    of_entry = {name: ms + 4.0 * (name in calls) for name, ms in loop.items()}
    found = [
        Culprit(name, "", ms, 20, of_entry[name], LOOP, kind=PLACE) for name, ms in loop.items()
    ]
    inside = [
        Culprit(name, "", 4.0, n, of_entry[name], PENALTY, kind=PLACE) for name, n in calls.items()
    ]
    return (*found, *inside)


@pytest.mark.parametrize(
    ("calls", "wait_ms", "text"),
    [
        (
            {"forward": 320, "backward": 320},
            0.1,
            "`penalty` (train.py:9-12) calls the model 16 times per batch, which takes 29 % of the"
            " step",
        ),
        ({"forward": 320}, 0.1, ""),  # 17 % of the step.
        ({"backward": 320, "loss": 320}, 0.1, ""),  # Hooks may interrupt a backward.
        ({"forward": 60, "backward": 60}, 0.1, ""),  # Three calls per batch.
        (
            {"forward": 80, "backward": 80},
            0.1,
            "`penalty` (train.py:9-12) calls the model 4 times per batch, which takes 29 % of the"
            " step",
        ),
        ({"forward": 320, "backward": 320}, 3.0, ""),  # GPU-bound.
    ],
)
def test_code_that_calls_the_model_many_times_is_named(
    calls: dict[str, int], wait_ms: float, text: str
) -> None:
    measured = measurement(STEP, wait_ms=wait_ms, culprits=places(**calls))
    found = check(diagnose(measured, LOADER))
    named = [advice for advice in found.advice if advice.code == "repeated_calls"]
    assert [advice.text for advice in named] == [f"{text}: process the whole batch in one call"] * (
        bool(text)
    )
    assert found.headline.endswith(f"; {text}") == bool(text)
    assert not text or found.advice[0] is named[0]


@pytest.mark.parametrize(("n", "where"), [(320, "train.py:22"), (60, "")])
def test_line_of_the_training_loop_that_calls_the_model_many_times_is_named(
    n: int, where: str
) -> None:
    # Other lines of the loop have their own time, and their own number of calls.
    line = Source("train.py", 22, 22, "main")
    rows = Culprit("forward", "", 12.0, n, 16.0, line, kind=PLACE)
    found = repeated_calls(measurement(STEP, culprits=(*places(), rows)))
    assert (found.where if found else "") == where
    assert found is None or found.share == pytest.approx(12.0 / 32.0)


@pytest.mark.parametrize(
    ("phase_change_ms", "lost_share", "is_first", "text"),
    [
        (
            9.0,
            0.4,
            True,
            "find what takes longer in `forward` since step 1,000: without this the training is up"
            " to 1.67x as fast",
        ),
        (
            2.0,
            0.11,
            False,
            "find what runs since step 1,000 and slows down all phases, such as another thread,"
            " another process or a GPU that throttles: without this the training is up to 1.12x as"
            " fast",
        ),
        (2.0, 0.09, False, ""),
    ],
)
def test_slowdown_has_advice_with_a_promise(
    phase_change_ms: float, lost_share: float, is_first: bool, text: str
) -> None:
    slowdown = Slowdown("jump", 1000, 1.0, 0.1, 10.0, "forward", phase_change_ms)
    slowdown = replace(slowdown, lost_share=lost_share)
    found = diagnose(on_host(STEP | {"data": 6.0}, slowdown=slowdown), LOADER).advice
    assert [advice.text for advice in found if advice.code == "slowdown"] == [text] * bool(text)
    assert (found[0].code == "slowdown") == is_first


def measured_with(entry: str) -> Measurement:
    """Return a measurement whose bottleneck is one entry of the time breakdown."""
    if entry in ("the slowest rank", "other ranks"):
        phase = "backward" if entry == "the slowest rank" else "data"
        ranks = RankSummary({}, (0, 1), 1, 6.0, phase)
        waits = {f"{phase}/comm": 8.0, phase: 12.0}
        return measurement(STEP | waits, ranks=ranks if phase == "backward" else None)
    if entry == "communication":
        return measurement(STEP | {"backward/comm": 5.0})
    if entry == "launch gaps":
        rows = measurement(STEP, wait_ms=0.0, probed_steps=9).rows
        busy = {name: replace(row, gpu_busy_mean_ms=row.mean_ms / 2) for name, row in rows.items()}
        return replace(measurement(STEP, wait_ms=0.0, probed_steps=9), rows=busy)
    if entry.startswith("slow steps: "):
        return on_host(STEP, slow=slow(0.4, **{entry.removeprefix("slow steps: "): 0.4}))
    if entry.startswith("data"):
        parts = {"data/fetch": 0.1, "data/copy": 0.1} | ({entry: 13.0} if "/" in entry else {})
        return on_host(STEP | {"data": 13.3} | (parts if entry != "data" else {}))
    if entry in (*STEP, "callbacks"):
        return on_host(STEP | {entry: 13.3})
    return on_host(STEP, wall_clock=WallClockBreakdown({"steps": 10.0, entry: 30.0}))


@pytest.mark.parametrize("entry", CODES)
def test_every_bottleneck_code_has_advice(entry: str) -> None:
    found = check(diagnose(measured_with(entry), LOADER))
    assert (found.code, found.grade, found.entry) == (CODES[entry], "bound", entry)
    assert found.time_breakdown is not None
    assert found.time_breakdown[entry].advice


@pytest.mark.parametrize("pin_memory", [None, False, True])
def test_copy_that_is_short_on_the_gpu_and_long_on_the_host_has_advice(
    pin_memory: bool | None,
) -> None:
    copies = STEP | {"data": 1.6, "data/fetch": 0.1, "data/copy": 1.5}
    measured = measurement(copies, host_ms={"data/copy": 9.0}, wait_ms=0.0)
    found = check(diagnose(measured, replace(LOADER, pin_memory=pin_memory)))
    assert (found.code, found.grade) == ("copy-bound", "bound")
    assert found.advice[0].code == ("pin_memory" if pin_memory is False else "smaller_copies")


def test_fetch_that_is_short_on_the_gpu_and_long_on_the_host_has_advice() -> None:
    measured = measurement(STEP, host_ms={"data": 9.0}, wait_ms=0.0)
    found = check(diagnose(measured, LOADER))
    assert (found.code, found.grade) == ("input-bound", "bound")
    assert found.advice[0].code == "num_workers"


def test_no_verdict_rests_on_phases_that_are_not_separated() -> None:
    measured = on_host(STEP | {"data": 20.0}, blurred=("data", "callbacks"))
    found = check(diagnose(measured, LOADER))
    assert (found.code, found.entry, found.headline, found.advice) == ("", "", "", ())
    assert found.time_breakdown is not None
    assert found.time_breakdown["data"].speed_up is None
    # A device that sets the pace does so whatever is missing.
    measured = measurement(STEP | {"data": 20.0}, wait_ms=9.0, blurred=("data", "callbacks"))
    found = check(diagnose(measured, LOADER))
    assert (found.code, found.entry) == ("GPU-bound", "GPU work")
    assert "nothing else" not in found.headline


def slow(share: float, **causes: float) -> SlowSummary:
    worst = SlowStep(7, 30.0, 14.0, "forward", (Cause("compilation", 9.0, 9.0, ""),), 7.0)
    unexplained = causes.pop("unexplained", 0.0)
    lost = {"forward": {**causes, "unexplained": unexplained}}
    return SlowSummary(10, 100, share, causes, unexplained, worst, lost)


def test_breakdown_adds_up_whatever_the_numbers_are() -> None:
    chance = random.Random(0)
    phases = ["data", "data/fetch", "data/comm", "callbacks", "forward", "backward/comm", "own"]
    for _ in range(300):
        chosen = ["backward", *chance.sample(phases, chance.randrange(len(phases)))]
        # A part is no longer than its phase, which may be missing.
        ms = {name: chance.random() for name in chosen if "/" not in name}
        ms |= {
            name: chance.random() * ms.setdefault(name.partition("/")[0], chance.random()) / 2
            for name in chosen
            if "/" in name
        }
        causes = {"unexplained": chance.random(), "off_cpu": chance.random()}
        lost = {name: causes for name in ms if chance.random() < 0.7}
        worst = SlowStep(3, 5.0, 1.0, "backward", (), chance.random(), 1.0, lost)
        entries_s = {name: chance.random() for name in ("set-up", "validation", "checkpoints")}
        measured = measurement(
            ms,
            host_ms={name: 2 * chance.random() for name in ms},
            wait_ms=chance.choice([0.0, chance.random()]),
            on_host_clock=chance.random() < 0.3,
            timing_share=chance.choice([None, 2 * chance.random()]),
            slow=chance.choice([None, SlowSummary(1, 100, 0.5, causes, 0.1, worst, lost)]),
            ranks=RankSummary({}, (0, 1), chance.choice([None, 0, 1]), chance.random(), chosen[-1]),
            **chance.choice([{}, fit(chance.random(), **entries_s)]),
        )
        breakdown = check(diagnose(measured, LOADER)).time_breakdown
        assert breakdown is not None
        assert all(row.seconds >= -1e-12 for row in breakdown.rows)


def test_unexplained_slow_steps_have_no_entry_and_no_verdict() -> None:
    measured = on_host(STEP | {"forward": 12.0}, slow=slow(0.3, unexplained=0.3))
    found = check(diagnose(measured, LOADER))
    assert found.code == "compute-bound"
    text = str(PhaseSummary(measured, LOADER))
    assert "step times vary: 90 % of the steps take" in text
    assert "unexplained" not in [row.name for row in found.time_breakdown.rows]  # type: ignore[union-attr]


def test_cause_of_slow_steps_is_an_entry() -> None:
    measured = on_host(STEP | {"forward": 12.0}, slow=slow(0.3, compilation=0.3))
    found = check(diagnose(measured, LOADER))
    assert (found.code, found.entry) == ("compile-bound", "slow steps: compilation")
    assert found.time_breakdown is not None
    assert found.time_breakdown[found.entry].speed_up == pytest.approx(1 / 0.7)


def test_long_steps_that_were_not_sampled_are_an_entry_without_verdict() -> None:
    measured = on_host(STEP)
    rows = {
        name: replace(row, share=0.6 * row.share, share_error=0.02)
        for name, row in measured.rows.items()
    }
    measured = replace(measured, rows=rows, not_sampled_steps=40, not_sampled_share=0.4)
    found = check(diagnose(measured, LOADER))
    assert found.time_breakdown is not None
    entry = found.time_breakdown["not sampled"]
    assert entry.share == pytest.approx(0.4)
    assert (entry.code, entry.speed_up) == ("", None)
    assert found.time_breakdown["CPU work"].error > 0.02
    assert "40 long steps (40 % of the time) were not sampled" in str(
        PhaseSummary(measured, LOADER)
    )


def test_costly_slowdown_is_in_the_headline() -> None:
    slowdown = Slowdown("jump", 500, 1.0, 0.1, 14.0, "forward", 14.0, lost_share=0.3)
    assert str(slowdown) in diagnose(on_host(STEP, slowdown=slowdown), LOADER).headline
    small = replace(slowdown, lost_share=0.05)
    measured = on_host(STEP, slowdown=small)
    assert str(small) not in diagnose(measured, LOADER).headline
    assert str(small) in str(PhaseSummary(measured, LOADER))


def test_slowest_rank_is_named() -> None:
    ranks = RankSummary({}, (0, 1), slowest_rank=1, phase="data", behind_median_ms=6.0)
    measured = measurement(STEP | {"backward": 14.0, "backward/comm": 7.0}, ranks=ranks)
    found = check(diagnose(measured, LOADER))
    assert (found.code, found.entry) == ("rank-bound", "the slowest rank")
    assert found.advice[0].text == "speed up rank 1 in `data`: all other ranks wait for it"


def test_suspected_rank_is_named_as_a_possible_cause_of_communication() -> None:
    ranks = RankSummary({}, (0, 1), None, 6.0, "forward", suspect=1, error_ms=2.0)
    measured = measurement(STEP | {"backward": 14.0, "backward/comm": 7.0}, ranks=ranks)
    found = check(diagnose(measured, LOADER))
    assert found.code == "communication-bound"
    assert found.headline.endswith("; rank 1 may be the cause")
    assert found.advice[0].text == (
        "rank 1 may cause this wait: it takes 6 ms ± 2 ms longer per step than the others,"
        " in `forward`; time more steps to be certain"
    )


@pytest.mark.parametrize(
    "facts",
    [{"is_warmup": True}, {"stage": "validation", "steps": 19}, {"steps": 0}],
)
def test_diagnosis_is_empty_if_too_little_was_measured(facts: dict[str, Any]) -> None:
    assert diagnose(replace(on_host(STEP | {"data": 20.0}), **facts), LOADER) == Diagnosis()


# Through the public API


class HostModel(Model):
    """A model whose step takes the host a known time, and the device none."""

    def __init__(self, gpu: FakeGPU, first_ms: float, step_ms: float) -> None:
        super().__init__(gpu)
        self.net = Layer(gpu, 0.0)
        self.first_ms, self.step_ms = first_ms, step_ms

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.gpu.host_work(self.step_ms if self.trainer.global_step else self.first_ms)
        return self(batch).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.gpu.host_work(50.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters())


class Planted(pl.Callback):
    """Takes the host a known time at each place of a fit."""

    def __init__(self, gpu: FakeGPU, steps: int, callback_ms: float, saves: list[int]) -> None:
        self.gpu, self.steps, self.callback_ms, self.saves = gpu, steps, callback_ms, saves

    def on_fit_start(self, *_: Any) -> None:
        self.gpu.host_work(7.0)

    def on_sanity_check_start(self, *_: Any) -> None:
        self.gpu.host_work(3.0)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # Time after the last step is not part of any step.
        if trainer.global_step < self.steps:
            self.gpu.host_work(self.callback_ms)
        if trainer.global_step in self.saves:
            trainer.save_checkpoint("none")

    def on_train_epoch_end(self, *_: Any) -> None:
        self.gpu.host_work(11.0)

    def on_train_end(self, *_: Any) -> None:
        self.gpu.host_work(13.0)


class Fetches:
    """A loader whose batches take the host a known time."""

    def __init__(self, gpu: FakeGPU, n: int, fetch_ms: float) -> None:
        self.gpu, self.n, self.fetch_ms = gpu, n, fetch_ms

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Any:
        for _ in range(self.n):
            self.gpu.host_work(self.fetch_ms)
            yield torch.ones(1, 2)


def planted(
    *, steps: int = 6, fetch_ms: float = 0.0, callback_ms: float = 0.0, saves: Any = (), **more: Any
) -> GPUPhaseTimer:
    """Run a fit of known times: a first step of 500 ms, and others of 60 ms."""
    gpu = FakeGPU()
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=1, **more)
    SavingTrainer.gpu = gpu
    work = Planted(gpu, steps, callback_ms, [*saves])
    trainer(timer, work, kind=SavingTrainer, num_sanity_val_steps=1).fit(
        HostModel(gpu, 500.0, 60.0), Fetches(gpu, steps, fetch_ms), Fetches(gpu, 2, 0.0)
    )
    breakdown = check(timer.summary().diagnosis).time_breakdown
    assert breakdown is not None
    assert breakdown.scope == "fit"
    assert breakdown.wall_s == pytest.approx(gpu.host_ns() / 1e9)
    return timer


AROUND = {"set-up": 7.0, "sanity check": 53.0, "validation": 100.0, "first step": 440.0}
AROUND |= {"epoch ends": 11.0, "tear-down": 13.0}


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        # The first step is also one of six steps.
        ({}, {"other": 360.0, "GPU work": 0.0}),
        ({"fetch_ms": 20.0}, {"data/fetch": 120.0, "other": 360.0, "GPU work": 0.0}),
        # No callback precedes the first step, which is taken to be like the others.
        (
            {"callback_ms": 10.0},
            {"callbacks": 60.0, "other": 360.0, "GPU work": 0.0, "first step": 430.0},
        ),
        # A checkpoint inside a step is not also a callback.
        (
            {"callback_ms": 10.0, "saves": [2, 4]},
            {
                "callbacks": 60.0,
                "checkpoints": 80.0,
                "other": 360.0,
                "GPU work": 0.0,
                "first step": 430.0,
            },
        ),
        ({"saves": [2]}, {"checkpoints": 40.0, "other": 360.0, "GPU work": 0.0}),
        ({"saves": [2, 6]}, {"checkpoints": 80.0, "other": 360.0, "GPU work": 0.0}),
    ],
)
def test_each_entry_of_a_fit_has_the_time_that_was_planted(
    plant: dict[str, Any], expected: dict[str, float]
) -> None:
    breakdown = planted(**plant).summary().time_breakdown
    assert breakdown is not None
    found = {row.name: 1e3 * row.seconds for row in breakdown.rows}
    assert found == pytest.approx({**AROUND, **expected}, abs=1e-6)


@pytest.mark.parametrize(
    ("plant", "name"),
    [({"fetch_ms": 60.0}, "data/fetch"), ({"saves": [1, 2, 3, 4, 5]}, "checkpoints")],
)
def test_removing_an_entry_gains_its_speed_up(plant: dict[str, Any], name: str) -> None:
    breakdown, without = (planted(**item).summary().time_breakdown for item in (plant, {}))
    assert breakdown is not None
    assert without is not None
    reached = breakdown.wall_s / without.wall_s
    assert breakdown[name].speed_up == pytest.approx(reached, rel=1e-6)


def test_saved_run_has_the_diagnosis_of_the_training(loop: Loop, tmp_path: Path) -> None:
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(8)):
            loop.train(x)
    timer.save(tmp_path / "run.json")
    summary, found = timer.summary(), load(tmp_path / "run.json").summary()
    assert summary.code
    assert found.diagnosis == summary.diagnosis
    assert str(found) == str(summary)
    assert summary.to_dict()["diagnosis"]["code"] == summary.code
