"""`tune`, which keeps the changes that alternating runs prove to be faster."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Command

from lightning_gputime.__main__ import _new_parser
from lightning_gputime._auto_instrumentation.tuned import LIGHTNING, LOADER, TRANSFORMERS
from lightning_gputime._diagnosis import Advice, Diagnosis, Entry, TimeBreakdown
from lightning_gputime._tuning import (
    Change,
    Parity,
    Report,
    Result,
    RunError,
    Script,
    SpeedUp,
    Tuning,
    propose,
)

REPORT = Report(
    sites={LOADER: ["train.py:7", "train.py:9"], "torch.optim:Adam": ["train.py:5"]},
    loader_site="train.py:9",
    loader={"num_workers": 2, "persistent_workers": False},
    losses=[1.0, 0.5],
    steps=100,
)
WORKERS = Advice("num_workers", "set num_workers=4", {"now": 2, "suggested": 4})
FUSED = Advice("fused", "use torch.optim.Adam(fused=True)", {"optimizer": "torch.optim.Adam"})
BF16 = Advice("precision", "set precision", {"now": "32-true", "suggested": "bf16-mixed"})


def setting(name: str) -> Advice:
    return Advice("costly_setting", name, {"setting": name})


PINNED = Advice("pin_memory", "", {"now": False, "suggested": True})
PRECISION, BENCHMARK = setting("float32_matmul_precision"), setting("cudnn.benchmark")
LOG, COMPILE = Advice("log_less", ""), Advice("compile", "")


@pytest.mark.parametrize(
    ("advice", "target", "codes"),
    [
        (WORKERS, LOADER, ["num_workers=4", "persistent_workers=True"]),
        (WORKERS, TRANSFORMERS, ["dataloader_num_workers=4", "dataloader_persistent_workers=True"]),
        (PINNED, "", ["pin_memory=True"]),
        (FUSED, "torch.optim:Adam", ["Adam(fused=True)"]),
        (FUSED, "torch.optim:SGD", []),
        (PRECISION, "", ['torch.set_float32_matmul_precision("high")']),
        (BENCHMARK, "", ["torch.backends.cudnn.benchmark = True"]),
        (setting("detect_anomaly"), "", []),
        (LOG, LIGHTNING, ["log_every_n_steps=50"]),
        (LOG, TRANSFORMERS, ["logging_steps=50"]),
        (LOG, "", []),
        (BF16, LIGHTNING, ['precision="bf16-mixed"']),
        (BF16, TRANSFORMERS, ["bf16=True"]),
        (COMPILE, LIGHTNING, ["fit(torch.compile(model))"]),
        (COMPILE, TRANSFORMERS, ["torch_compile=True"]),
        *((Advice("shorten", ""), target, []) for target in (LIGHTNING, TRANSFORMERS, LOADER)),
    ],
)
def test_tuning_proposes_changes_for_advice(advice: Advice, target: str, codes: list[str]) -> None:
    report = Report({target: ["train.py:1"]} if target else {}, loader=REPORT.loader)
    assert [change.code for change in propose(advice, report)] == codes


@pytest.mark.parametrize(("now", "more"), [(0, [4]), (2, [4]), (4, [6]), (6, [])])
def test_proposed_workers_are_limited_by_the_cores(
    now: int, more: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(6)})
    report = Report(loader={"num_workers": now, "persistent_workers": True})
    changes = propose(Advice("iterate_over_steps", ""), report)
    assert [change.arguments for change in changes] == [{"num_workers": n} for n in more]


def test_interval_of_a_speed_up_follows_from_the_pairs() -> None:
    found = SpeedUp.of([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    noisy = SpeedUp.of([2.0, 2.2, 1.8], [1.0, 1.0, 1.0])
    assert noisy.low < 1.0 < noisy.value < noisy.high
    assert SpeedUp.of([2.0], [1.0]) == SpeedUp(2.0, 0.0, math.inf)
    assert str(SpeedUp.of([2.0], [1.0])) == "2.00x"
    assert SpeedUp() == SpeedUp(1.0, 0.0, math.inf)


EXACT = Change("prefetch_factor=4", LOADER)
ROUNDED = Change("Adam(fused=True)", effect="rounding")


@pytest.mark.parametrize(
    ("before", "after", "change", "is_good", "text"),
    [
        ([[1.0, 0.5]] * 2, [[1.0, 0.5]] * 2, EXACT, True, "bitwise equal"),
        ([[1.0, 0.5]] * 2, [[1.0, 0.5001]] * 2, EXACT, False, "+0.01%"),
        ([[1.0, 0.5]], [[1.0, 0.5001]], EXACT, True, "+0.01%"),  # The script may set no seed.
        ([[1.0], [1.1], [1.0]], [[1.1], [1.2], [1.05]], EXACT, True, "+8.06%"),
        ([[1.0], [1.1], [1.0]], [[1.5], [1.6], [1.5]], EXACT, False, "+48.39%"),
        ([[1.0, 0.5]], [[1.0, 0.5001]], ROUNDED, True, "+0.01%"),
        ([[1.0, 0.5]] * 2, [[1.5, 1.0]] * 2, ROUNDED, False, "+66.67%"),
        ([[1.0, 0.5], [1.1, 0.5]], [[1.04, 0.5]], EXACT, True, "-0.65%"),  # As two baselines.
        ([[1.0, 0.5]], [[1.5, 1.0]], Change("bf16", effect="numerics"), True, "+66.67%"),
    ],
)
def test_losses_agree_as_far_as_the_change_allows(
    before: list[list[float]], after: list[list[float]], change: Change, is_good: bool, text: str
) -> None:
    parity = Parity.of(before, after)
    assert parity.is_good(change) == is_good
    assert str(parity) == text


class FakeScript(Script):
    """A script whose runs take a time that depends on the applied changes."""

    def __init__(
        self,
        advice: Sequence[Advice],
        seconds: Callable[[Sequence[str]], float],
        *,
        losses: Callable[[Sequence[str]], list[float]] = lambda codes: [1.0, 0.5],
        fails: Callable[[Sequence[str]], bool] = lambda codes: False,
        applies: bool = True,
    ) -> None:
        super().__init__(["train.py"], Path("runs"), 100)
        # The base class is frozen.
        fields = {"advice": advice, "seconds": seconds, "losses": losses, "fails": fails}
        vars(self).update(fields, applies=applies, sites=[])

    def run(self, number: int, changes: Sequence[Change], loader_site: str) -> Result:
        this: Any = self
        codes = [change.code for change in changes]
        this.sites.append(loader_site)
        if this.fails(codes):
            raise RunError("exit code 1: out of memory")
        rows = tuple(
            Entry(f"entry {i}", 1.0, 0.5, speed_up=3.0 - i / 10, advice=(advice,))
            for i, advice in enumerate(this.advice)
        )
        # Runs differ by 0.2 %, in a fixed order.
        seconds = this.seconds(codes) * (1 + 0.001 * (number % 3))
        entries_s = {"set-up": 5.0, "first step": 2.0, "steps": 0.9 * seconds}
        summary = SimpleNamespace(
            wall_clock=SimpleNamespace(entries_s={**entries_s, "validation": 0.1 * seconds}),
            diagnosis=Diagnosis(time_breakdown=TimeBreakdown(rows, 1.0, "training")),
            verdict="input-bound",
        )
        report = replace(
            REPORT,
            sites={**REPORT.sites, LIGHTNING: ["train.py:20"]},
            applied=codes if this.applies else [],
            losses=this.losses(codes),
        )
        run: Any = SimpleNamespace(summary=lambda: summary, measured=[], name="run")
        return Result(run, report)


def tuned(script: Script, *, budget_s: float = 1e9, allow_numerics: bool = False) -> Tuning:
    tuning = Tuning(script, budget_s, allow_numerics)
    tuning.run()
    return tuning


def outcomes(tuning: Tuning) -> dict[str, str]:
    return {trial["change"]: trial["outcome"] for trial in tuning.to_dict()["trials"]}


@pytest.fixture(autouse=True)
def _no_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gputime._tuning._changed_phase", lambda trial: "data -5 ms")


def test_tuning_combines_the_changes_that_pay_off() -> None:
    gains = {"num_workers=4": 2.0, "Adam(fused=True)": 1.25}
    script = FakeScript(
        [WORKERS, FUSED], lambda codes: 4.0 / math.prod(gains.get(code, 1.0) for code in codes)
    )
    tuning = tuned(script)
    assert outcomes(tuning) == {
        "num_workers=4": "kept",
        "persistent_workers=True": "rejected: not faster",
        "Adam(fused=True)": "kept",
    }
    assert tuning.speed_up == pytest.approx(2.5, rel=0.01)
    found = tuning.to_dict()
    assert found["is_complete"]
    assert found["trials"][0] == {
        "change": "num_workers=4",
        "where": "train.py:9",
        "entry": "entry 0",
        "promised": 3.0,
        "speed_up": pytest.approx(2.0, rel=0.01),
        "interval": [pytest.approx(2.0, rel=0.05)] * 2,
        "pairs": 3,
        "loss_drift": 0.0,
        "moved": "data -5 ms",
        "is_kept": True,
        "outcome": "kept",
        "effect": "random numbers",
    }
    for text in ("Changes tried on train.py, 100 steps per run", "num_workers=4", "train.py:9"):
        assert text in str(tuning)
    # The first run finds the training loader, and further runs change only this loader.
    assert script.sites[:2] == ["", "train.py:9"]  # type: ignore[attr-defined]


def test_tuning_without_advice_says_so() -> None:
    tuning = tuned(FakeScript([], lambda codes: 4.0))
    assert not tuning.trials
    assert "No advice on this training can be applied without editing the script" in str(tuning)


@pytest.mark.parametrize(
    ("options", "budget_s", "outcome"),
    [
        ({"losses": lambda codes: [1.0, 0.5 + len(codes)]}, 1e9, "rejected: the losses differ"),
        ({"fails": lambda codes: bool(codes)}, 1e9, "failed: exit code 1: out of memory"),
        ({"applies": False}, 1e9, "not applied: the script does not construct the object"),
        ({"seconds": lambda codes: 4.0 + len(codes)}, 1e9, "rejected: not faster"),
        ({"seconds": lambda codes: 4.0}, 1e9, "rejected: not faster"),
        ({}, 0.0, "not tried: the budget ended"),
    ],
)
def test_tuning_rejects_a_change_that_is_not_proved(
    options: dict[str, Any], budget_s: float, outcome: str
) -> None:
    defaults: dict[str, Any] = {"seconds": lambda codes: 4.0 / (1 + len(codes))}
    tuning = tuned(FakeScript([FUSED], **{**defaults, **options}), budget_s=budget_s)
    assert outcomes(tuning)["Adam(fused=True)"].startswith(outcome)
    assert (tuning.kept, tuning.speed_up) == ([], 1.0)


@pytest.mark.parametrize("failing_run", range(2, 8))
def test_pair_with_a_failed_run_counts_for_neither_side(failing_run: int) -> None:
    runs = itertools.count(1)
    script = FakeScript(
        [FUSED],
        lambda codes: 4.0 / (1 + len(codes)) * next(pace),
        fails=lambda codes: next(runs) == failing_run,
    )
    pace = itertools.cycle((1.0, 3.0, 1.0))  # Too noisy to decide after three pairs.
    trial = tuned(script).trials[0]
    assert trial.error == "failed: exit code 1: out of memory"
    # The first pair consists of runs 2 and 3.
    assert len(trial.before) == len(trial.after) == (failing_run - 2) // 2


def test_changes_of_numerics_need_an_option() -> None:
    script = FakeScript([BF16], lambda codes: 4.0 / (1 + len(codes)))
    assert outcomes(tuned(script)) == {'precision="bf16-mixed"': "needs --allow-numerics"}
    kept = tuned(script, allow_numerics=True)
    assert outcomes(kept) == {'precision="bf16-mixed"': "kept"}


def test_uncertain_change_leaves_half_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now, fused_s = SimpleNamespace(s=0.0), itertools.cycle((3.6, 4.6))
    monkeypatch.setattr(Tuning, "_left_s", lambda tuning: tuning.budget_s - now.s)

    def seconds(codes: Sequence[str]) -> float:
        now.s += 10.0
        # The first change is faster on average, but by less than the difference between runs.
        recurring_s = next(fused_s) if "Adam(fused=True)" in codes else 4.4
        return recurring_s / (1 + ("num_workers=4" in codes))

    tuning = tuned(FakeScript([FUSED, WORKERS], seconds), budget_s=400.0)
    found = {trial.change.code: len(trial.after) for trial in tuning.trials}
    assert outcomes(tuning)["Adam(fused=True)"] == "uncertain: the budget ended"
    assert 3 <= found["Adam(fused=True)"] <= 10
    assert outcomes(tuning)["num_workers=4"] == "kept"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1h", 3600), ("2", 120), ("0.5h", 1800)]
)
def test_budget_is_parsed_as_a_time(text: str, seconds: float) -> None:
    args = _new_parser().parse_args(["tune", "--budget", text, "train.py", "--lr", "1"])
    assert (args.budget, args.script) == (seconds, ["train.py", "--lr", "1"])


# Real scripts

SCRIPT = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 960
    def __getitem__(self, i):
        time.sleep(0.001)
        return torch.full((4,), float(i % 3)), torch.ones(1)
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for epoch in range(100):
    for x, y in DataLoader(Rows(), 16):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
open("ended", "w").close()
"""


@pytest.mark.slow
def test_workers_are_tried_on_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def left_s(tuning: Tuning) -> float:
        """Return the budget, which ends after one run with the change, and one without it."""
        return 0.0 if tuning.trials and tuning.trials[0].after else 1e9

    monkeypatch.setattr(Tuning, "_left_s", left_s)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    found = json.loads(command("tune", "--json", "--steps", 60, "-o", "runs", "train.py").out)
    first = found["trials"][0]
    assert first["change"].startswith("num_workers=")
    assert first["where"].startswith("train.py:")
    assert first["speed_up"] > 1.3
    assert first["loss_drift"] == 0.0
    assert first["promised"] > first["speed_up"]
    # The script is ended early, and not changed.
    assert not Path("ended").exists()
    assert Path("train.py").read_text() == SCRIPT
    assert {path.name for path in tmp_path.iterdir()} <= {"train.py", "runs"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "messages"),
    [
        (
            "raise RuntimeError('no data')",
            ["the script failed without any change: exit code 1", "RuntimeError: no data"],
        ),
        ("print(1)", ["trained no step that was timed"]),
    ],
)
def test_script_that_fails_is_reported(
    script: str,
    messages: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script)
    err = command("tune", "train.py", code=2).err
    assert [text for text in messages if text not in err] == []
