"""Where the wall clock went: nothing is missing, nothing counts twice, each says what it costs."""

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import Adder, FakeGPU, Layer, raw
from fake_lightning import Model, SavingTrainer, trainer
from fake_loop import Loop, evidence
from test_slow_steps import collect, train
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, load
from lightning_gputime._measurement.advice import TrainingSetup, find_losses
from lightning_gputime._measurement.ranks import RankSummary
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.slow import Cause, SlowStep
from lightning_gputime._measurement.summary import PhaseSummary
from lightning_gputime._measurement.sums import WorkSummary
from lightning_gputime._measurement.wall_time import (
    BETWEEN_LOOPS,
    CHECKPOINTS,
    EVALUATION,
    PAUSED,
    SET_UP,
    STEPS,
    VALIDATION,
    Loss,
    Losses,
    WallTimeBreakdown,
)


def losses_of(summary: PhaseSummary) -> Losses:
    """The losses of a summary, which add up to its wall clock."""
    losses = summary.losses
    assert losses is not None
    assert all(row.share > 0 for row in losses.rows)
    assert sum(row.share for row in (*losses.rows, losses.work)) == pytest.approx(1, abs=1e-12)
    assert [row.share for row in losses.rows] == sorted(
        (row.share for row in losses.rows), reverse=True
    )
    return losses


def found_ms(losses: Losses) -> dict[str, float]:
    """The time of each entry (in milliseconds), to a nanosecond."""
    rows = (*losses.rows, losses.work)
    return {row.name: round(1e3 * row.share * losses.wall_s, 6) for row in rows}


# A whole fit


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
        # What follows the last step is in none.
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
    """Run a fit with known losses: a first step of 500 ms, and others of 60 ms of work."""
    gpu = FakeGPU()
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=1, **more)
    SavingTrainer.gpu = gpu
    work = Planted(gpu, steps, callback_ms, [*saves])
    trainer(timer, work, kind=SavingTrainer, num_sanity_val_steps=1).fit(
        HostModel(gpu, 500.0, 60.0),
        Fetches(gpu, steps, fetch_ms),
        Fetches(gpu, 2, 0.0),
    )
    losses = losses_of(timer.summary())
    assert losses.is_fit
    assert losses.wall_s == pytest.approx(gpu.host_ns() / 1e9, abs=1e-9)
    return timer


AROUND = {"set-up": 7.0, "sanity check": 53.0, "validation": 100.0, "first step": 440.0}
AROUND |= {"epoch ends": 11.0, "the rest": 13.0}


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        # Of the first step what is usual is no loss: it is one of six.
        ({}, {"GPU work": 360.0}),
        ({"fetch_ms": 20.0}, {"data/fetch": 120.0, "GPU work": 360.0}),
        # There is no callback before the first step, which is taken to be like the others.
        ({"callback_ms": 10.0}, {"callbacks": 60.0, "GPU work": 360.0, "first step": 430.0}),
        # A checkpoint inside a step is no callback, too.
        (
            {"callback_ms": 10.0, "saves": [2, 4]},
            {"callbacks": 60.0, "checkpoints": 80.0, "GPU work": 360.0, "first step": 430.0},
        ),
        ({"saves": [2]}, {"checkpoints": 40.0, "GPU work": 360.0}),
        # After the last step it is in none, and in the fit.
        ({"saves": [2, 6]}, {"checkpoints": 80.0, "GPU work": 360.0}),
    ],
)
def test_each_loss_of_a_fit_has_the_time_that_was_planted(
    plant: dict[str, Any], expected: dict[str, float]
) -> None:
    summary = planted(**plant).summary()
    found = found_ms(losses_of(summary))
    assert found == pytest.approx({**AROUND, **expected}, abs=1e-6)
    # In the table of phases checkpoints are a part of `callbacks`: the same time has one name.
    saves = [step for step in plant.get("saves", ()) if step < 6]
    rows = [one for name, one in summary.rows.items() if name == "callbacks/checkpoints"]
    assert [(row.n, row.mean_ms) for row in rows] == [(len(saves), 40.0)] * bool(saves)
    assert ("\n  checkpoints " in str(summary)) == bool(saves)


@pytest.mark.parametrize(
    ("plant", "name", "advice"),
    [
        ({"fetch_ms": 60.0}, "data/fetch", "cheaper transforms, or workers that load ahead"),
        (
            {"callback_ms": 30.0},
            "callbacks",
            "run `Planted.on_train_batch_end` less often, or make it cheaper (30 ms per step)",
        ),
        (
            {"saves": [1, 2, 3, 4, 5]},
            "checkpoints",
            "save less often: every_n_train_steps (Lightning), save_steps (transformers)",
        ),
        (
            {},
            "validation",
            # Its callbacks may take the time, however few batches it has.
            "validate less often: check_val_every_n_epoch or val_check_interval;"
            ' its phases are logged under "val/"',
        ),
    ],
)
def test_to_take_a_loss_away_brings_what_was_promised(
    plant: dict[str, Any], name: str, advice: str
) -> None:
    losses = losses_of(planted(**plant).summary())
    [loss] = [row for row in losses.rows if row.name == name]
    assert loss.advice[0] == advice
    if plant:
        without = losses_of(planted().summary())
        # There are five callbacks, and six steps.
        outside_s = 0.03 if name == "callbacks" else 0.0
        got = losses.wall_s / (without.wall_s - outside_s)
        assert got == pytest.approx(loss.at_most, rel=1e-6)


def test_a_fit_that_is_looked_at_in_its_first_steps_has_the_losses_of_the_steps() -> None:
    gpu, seen = FakeGPU(), []
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0, _lag=0)
    look = pl.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: seen.append(timer.summary().losses)
    )
    trainer(timer, look).fit(HostModel(gpu, 50.0, 50.0), Fetches(gpu, 3, 0.0))
    assert [losses is not None and losses.is_fit for losses in seen] == [False, True, True]


def test_losses_are_saved_with_the_run_and_read_back(tmp_path: Path) -> None:
    timer = planted(fetch_ms=20.0, save_path=tmp_path / "run.json")
    assert load(tmp_path / "run.json").summary().losses == timer.summary().losses


# A step


def made(setup: TrainingSetup = TrainingSetup(), **changes: Any) -> Losses:  # noqa: B008 - frozen
    """The losses of steps of 100 ms, of which 40 are no work of the GPU."""
    results = Results(100, 0)
    phases = {"data/fetch": 10.0, "data/copy": 5.0, "data/comm": 3.0, "data": 2.0}
    phases |= {"callbacks": 8.0, "callbacks/comm": 2.0, "forward": 20.0, "backward": 40.0}
    results.add([raw(i, 0.0, **phases, **{"backward/comm": 10.0}) for i in range(20)])
    summary = replace(results.summary(), **changes)
    return losses_of(replace(summary, losses=find_losses(summary, setup)))


OF_STEP = {"data/fetch": 10.0, "data/copy": 5.0, "data": 2.0, "callbacks": 8.0}
OF_STEP |= {"communication": 15.0, "GPU work": 60.0}


def slow_steps(*steps: SlowStep) -> Any:
    """What slow steps cost a run of 20 steps of 100 ms."""
    results = Results(100, 0)
    results.slow.add(evidence(*steps), is_known=True)
    return results.slow.summary(20, 2000.0)


GARBAGE, LOADER = Cause("garbage_collection", 30.0, 30.0, ""), Cause("dataloader", 30.0, 30.0, "")
COLLECTED = {"garbage collection": 30.0}
IN_FORWARD = SlowStep(7, 130.0, 100.0, "forward", (GARBAGE,), 0.0, 30.0, {"forward": COLLECTED})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        # Garbage was collected in the model for 30 of 2,000 ms, which is 1.5 of 100.
        (
            {"slow": slow_steps(IN_FORWARD)},
            {"GPU work": 58.5, "slow steps: garbage collection": 1.5},
        ),
        # A slow fetch is the loader's in a slow step, too.
        (
            {"slow": slow_steps(SlowStep(7, 130.0, 100.0, "data/fetch", (LOADER,), 0.0, 30.0, {}))},
            {},
        ),
        # Both in one step, and 10 ms that nobody knows of.
        (
            {
                "slow": slow_steps(
                    SlowStep(
                        7, 170.0, 100.0, "data/fetch", (GARBAGE, LOADER), 10.0, 60.0,
                        {"data/fetch": COLLECTED, "loss": {"unexplained": 10.0}},
                    )
                )
            },
            {
                "data/fetch": 8.5,
                "GPU work": 59.5,
                "slow steps: garbage collection": 1.5,
                "slow steps: unexplained": 0.5,
            },
        ),
        # What the slow rank is behind by is a part of the wait for it.
        (
            {"ranks": RankSummary({}, (0, 1), 1, 6.0, "forward")},
            {"communication": 9.0, "the slowest rank": 6.0},
        ),
        # This is rank 0, which does not wait for itself.
        (
            {"ranks": RankSummary({}, (0, 1), 0, 6.0, "data/fetch")},
            {"data/fetch": 4.0, "the slowest rank": 6.0},
        ),
        (
            {"ranks": RankSummary({}, (0, 1), 0, 6.0, "forward")},
            {"GPU work": 54.0, "the slowest rank": 6.0},
        ),
        ({"ranks": RankSummary({}, (0, 1), None, 6.0, "forward")}, {}),
        # More than there is of it.
        (
            {"ranks": RankSummary({}, (0, 1), 1, 40.0, "forward")},
            {"communication": None, "the slowest rank": 15.0},
        ),
        # One step in 8 is timed, of which that takes a tenth.
        (
            {"timing_share": 0.1, "timed_every_n_steps": 8},
            {"GPU work": 58.75, "timing itself": 1.25},
        ),
        ({"timing_share": 0.1}, {"GPU work": 50.0, "timing itself": 10.0}),
        ({"on_host_clock": True}, {"GPU work": None, "CPU work": 60.0}),
    ],
)  # fmt: skip
def test_no_time_of_a_step_is_in_two_losses(
    changes: dict[str, Any], expected: dict[str, float | None]
) -> None:
    found = {name: ms / 20 for name, ms in found_ms(made(**changes)).items()}
    whole = {name: ms for name, ms in {**OF_STEP, **expected}.items() if ms is not None}
    assert found == pytest.approx(whole, abs=1e-6)


def test_launch_gaps_are_no_work_and_hold_no_excess_of_slow_steps() -> None:
    results = Results(100, 0)
    results.add([raw(i, 0.0, forward=20.0, loss=5.0, backward=30.0) for i in range(20)])
    results.add_probed(raw(20, forward=8.0, loss=5.0, backward=12.0))
    assert found_ms(losses_of(results.summary())) == {"launch gaps": 600.0, "GPU work": 500.0}
    # Of the gaps by the means of all steps, 55 ms were in one slow step.
    slow = SlowStep(7, 110.0, 55.0, "forward", (), 55.0, 55.0, {"forward": {"unexplained": 55.0}})
    results.slow.add(evidence(slow), is_known=True)
    assert found_ms(losses_of(results.summary())) == pytest.approx(
        {"launch gaps": 545.0, "slow steps: unexplained": 55.0, "GPU work": 500.0}
    )


def test_a_collection_on_the_device_is_lost_where_it_was_and_once(loop: Loop) -> None:
    late = {20: lambda: collect(loop.gpu, 40.0), 30: lambda: loop.gpu.host_work(80.0)}
    fetch = {40: lambda: loop.gpu.host_work(70.0)}
    summary = train(loop, fetch, late).summary()
    # The host had a lead of 16.625 ms in the fetch, and of 21.25 in the loss.
    assert found_ms(losses_of(summary)) == {
        "data": 60 * 1.0 + 70.0 - 16.625,
        "slow steps: unexplained": 80.0 - 21.25,
        "slow steps: garbage collection": 40.0 - 21.25,
        "GPU work": 60 * 14.625,
    }


def test_whatever_the_numbers_are_nothing_is_lost_or_below_zero() -> None:
    chance = random.Random(0)
    phases = ["data", "data/fetch", "data/comm", "callbacks", "forward", "backward/comm", "own"]
    for _ in range(200):
        results = Results(100, 0, on_host_clock=chance.random() < 0.2)
        chosen = ["backward", *chance.sample(phases, chance.randrange(len(phases)))]
        for i in range(5):
            results.add([raw(i, 0.0, **{name: chance.random() for name in chosen})])
        if chance.random() < 0.5:
            results.add_probed(raw(5, **{name: chance.random() for name in chosen}))
        lost = {
            name: {"unexplained": 2 * chance.random(), "off_cpu": chance.random()}
            for name in chosen
            if chance.random() < 0.7
        }
        slow = SlowStep(3, 5.0, 1.0, "backward", (), chance.random(), 1.0, lost)
        results.slow.add(evidence(*[slow] * chance.randrange(3)), is_known=True)
        results.timing_share = chance.choice([None, 2 * chance.random()])
        results.ranks = RankSummary(
            {}, (0, 1), chance.choice([None, 0, 1]), chance.random(), chance.choice(chosen)
        )
        losses_of(results.summary())


# What it says


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            "launch gaps (set probe_every_n_steps=100); work at the peak (set flops=)",
        ),
        ({"probed_steps": 1}, 'work at the peak (set flops=)'),
        ({"work": WorkSummary(mfu=0.4)}, "launch gaps (set probe_every_n_steps=100)"),
        ({"work": WorkSummary(mfu=0.4), "probed_steps": 1}, ""),
        # The option would not help.
        (
            {"probe_failure": "no step can be probed: ..."},
            'launch gaps (no step can be probed); work at the peak (set flops=)',
        ),
        # A machine without a GPU has neither.
        ({"on_host_clock": True}, ""),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_one_line_with_what_it_needs(
    changes: dict[str, Any], expected: str
) -> None:
    losses = made(**changes)
    assert losses.unknown == expected
    lines = [line for line in str(losses).splitlines() if line.startswith("Not measured: ")]
    assert lines == ([f"Not measured: {expected}"] if expected else [])


def test_of_an_evaluation_no_option_is_asked_for() -> None:
    results = Results(10, 0)
    results.add([raw(0, forward=4.0)])
    assert "Not measured" in str(results.summary())
    assert "Not measured" not in str(replace(results.summary(), stage="validation"))


def test_the_part_at_the_peak_is_that_of_the_steps_in_the_fit() -> None:
    timer = planted()
    summary = replace(timer.summary(), work=WorkSummary(mfu=0.5))
    losses = find_losses(summary, TrainingSetup())
    assert losses is not None
    # Of 984 ms 360 were steps.
    assert losses.peak_share == pytest.approx(0.5 * 360 / 984)


def test_the_table_has_a_line_for_each_loss_with_at_most_and_what_to_do() -> None:
    rows = (
        Loss("data/fetch", 0.31, ("num_workers=4 (now 0)",)),
        Loss("first step", 0.2),
        Loss("slow steps: garbage collection", 0.0909, ("gc.freeze() after the set-up", "b" * 60)),
        Loss("callbacks", 0.0041),
        Loss("set-up", 0.005),
    )
    losses = Losses(rows, Loss("GPU work", 0.39), 12.0, is_fit=True, peak_share=0.2, unknown="x")
    assert str(losses).splitlines() == [
        "of the fit                       share  without it, at most  what to do",
        "-" * 121,
        "data/fetch                       31.0%         1.45x faster  num_workers=4 (now 0)",
        "first step                       20.0%          2.4 s, once",
        "slow steps: garbage collection    9.1%         1.10x faster  gc.freeze() after the set-up",
        f"{'':61}{'b' * 60}",
        "2 more, below 1 % each            0.9%",
        "GPU work                         39.0%",
        "  at the peak                    20.0%",
        "-" * 121,
        "12 s                            100.0%",
        "",
        "Not measured: x",
    ]
    # In a terminal of 80 columns each piece of advice is still there.
    assert losses._table().text(80).splitlines() == [
        "of the fit                       share  what to do",
        "-" * 80,
        "data/fetch                       31.0%  num_workers=4 (now 0)",
        "first step                       20.0%",
        "slow steps: garbage collection    9.1%  gc.freeze() after the set-up",
        f"{'':40}{'b' * 40}",
        f"{'':40}  {'b' * 20}",
        "2 more, below 1 % each            0.9%",
        "GPU work                         39.0%",
        "  at the peak                    20.0%",
        "-" * 80,
        "12 s                            100.0%",
        "",
        "Not measured: x",
    ]


def test_advice_is_about_what_takes_longest_first() -> None:
    rows = (Loss("data", 0.3, ("a", "b")), Loss("callbacks", 0.1, ("c", "a")))
    assert Losses(rows, Loss("GPU work", 0.6, ("w",)), 1.0, is_fit=False).advice == (
        "w",
        "a",
        "b",
        "c",
    )
    assert Losses(rows, Loss("GPU work", 0.2, ("w",)), 1.0, is_fit=False).advice[-2:] == ("w", "c")


def test_from_5_percent_on_a_loss_is_worth_an_advice() -> None:
    assert {row.name: bool(row.advice) for row in made().rows} == {
        "communication": True,
        "data/fetch": True,
        "callbacks": False,  # No number says which of them it is.
        "data/copy": False,
        "data": False,
    }


def test_the_largest_module_inside_is_named_with_its_class(gpu: FakeGPU) -> None:
    class Body(Model):
        def __init__(self) -> None:
            super().__init__(gpu)
            layers = Layer(gpu, 1.0, 2.0), nn.ReLU(), Layer(gpu, 4.0, 40.0)
            self.body = nn.Sequential(*layers)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.body(x)
            return result

    timer = GPUPhaseTimer(
        _clock=gpu, print_summary=False, warmup_steps=0, modules=("body", "body.*")
    )
    trainer(timer).fit(Body(), Fetches(gpu, 12, 0.0))
    assert "look at `body.2 Layer` in `backward`, 80 % of the step" in timer.summary().advice


# Plain loops


class TakesHost:
    """A plain loop whose steps take the host 5 ms, the first one 50, and a fetch 1."""

    def __init__(self) -> None:
        self.gpu = FakeGPU()
        self.net = Layer(self.gpu, 0.0)
        self.optimizer = Adder(self.net.parameters(), self.gpu, 0.0)
        self.timer = GPUPhaseHooks(self.net, self.optimizer, _clock=self.gpu, warmup_steps=0)
        self.ms = 50.0

    def batches(self, n: int = 4) -> Iterator[Tensor]:
        for _ in range(n):
            self.gpu.host_work(1.0)
            yield torch.ones(1, 2)

    def step(self, x: Tensor) -> None:
        self.gpu.host_work(self.ms)
        self.ms = 5.0
        self.net(x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, n: int = 4) -> None:
        for x in self.timer.steps(self.batches(n)):
            self.step(x)


FIRST_OF_LOOPS = {"first step": 51.0, "steps": 66.0}  # Of three loops with four steps each.


def between(loop: TakesHost) -> None:
    for _ in range(3):
        loop.train()
        loop.gpu.host_work(20.0)


def leaves(loop: TakesHost) -> None:
    for _ in range(3):
        for i, x in enumerate(loop.timer.steps(loop.batches(99))):
            loop.step(x)
            if i == 3:
                break
        loop.gpu.host_work(20.0)


def raises(loop: TakesHost) -> None:
    def fails() -> Iterator[Tensor]:
        yield from loop.batches()
        raise RuntimeError("mine")

    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            for x in loop.timer.steps(fails()):
                loop.step(x)
        loop.gpu.host_work(20.0)


def pauses(loop: TakesHost) -> None:
    for i, x in enumerate(loop.timer.steps(loop.batches(12))):
        loop.step(x)
        if i % 4 == 3:
            with loop.timer.paused(), loop.timer.paused():
                loop.gpu.host_work(20.0)


def pauses_around_a_loop(loop: TakesHost) -> None:
    for _ in range(2):
        loop.train(6)
        with loop.timer.paused():
            loop.gpu.host_work(12.0)
            for _ in loop.timer.steps(range(4)):
                loop.gpu.host_work(7.0)


def evaluates(loop: TakesHost) -> None:
    for i, x in enumerate(loop.timer.steps(loop.batches(12))):
        loop.step(x)
        if i in (4, 8):
            loop.net.eval()
            with torch.no_grad():
                for y in loop.timer.steps(loop.batches(2)):
                    loop.gpu.host_work(19.0)
                    loop.net(y)
            loop.net.train()


def once(loop: TakesHost) -> None:
    loop.gpu.host_work(30.0)
    loop.train(12)
    loop.gpu.host_work(30.0)


@pytest.mark.parametrize(
    ("run", "outside"),
    [
        (between, {"between loops": 40.0}),  # What is behind the last loop belongs to none.
        (leaves, {"between loops": 40.0}),
        (raises, {"between loops": 40.0}),
        (pauses, {"paused": 60.0}),
        (pauses_around_a_loop, {"paused": 80.0}),
        (evaluates, {"evaluation": 80.0}),
        (once, {}),
    ],
)
def test_what_lies_outside_of_the_steps_of_plain_loops_is_a_loss(
    run: Callable[[TakesHost], None], outside: dict[str, float]
) -> None:
    loop = TakesHost()
    with loop.timer:
        run(loop)
    summary = loop.timer.summary()
    losses = losses_of(summary)
    assert not losses.is_fit
    if not outside:
        assert summary.wall_time is None
        assert losses.wall_s == pytest.approx(51e-3 + 11 * 6e-3)
        assert "of the timed steps" in str(losses)
        return
    assert summary.wall_time is not None
    entries_ms = {name: round(1e3 * s, 6) for name, s in summary.wall_time.entries_s.items()}
    assert entries_ms == FIRST_OF_LOOPS | outside
    found = found_ms(losses)
    assert {name: found[name] for name in outside} == outside
    assert losses.wall_s == pytest.approx(sum(entries_ms.values()) / 1e3)
    assert "of the loops" in str(losses)


def test_a_measurement_that_is_over_has_the_losses_of_its_own_loops() -> None:
    loop = TakesHost()
    with loop.timer:
        between(loop)
    loop.train()  # It goes on, untimed.
    with loop.timer:
        loop.ms = 50.0
        between(loop)
        copy = pickle.loads(pickle.dumps(loop.timer.summary()))
        loop.gpu.host_work(1000.0)
        assert losses_of(loop.timer.summary()) == copy.losses
    assert found_ms(losses_of(loop.timer.summary()))["between loops"] == 40.0


# The verdict where no step bounds the training


@pytest.mark.parametrize(("spent_s", "is_named"), [(9.0, False), (11.0, True), (29.0, True)])
def test_without_a_gpu_the_verdict_names_the_largest_gain(spent_s: float, is_named: bool) -> None:
    results = Results(100, 0, on_host_clock=True)
    results.add([raw(i, forward=40.0, backward=60.0) for i in range(10)])
    spent = {SET_UP: 30.0, EVALUATION: spent_s, STEPS: 70.0 - spent_s}
    summary = replace(results.summary(), wall_time=WallTimeBreakdown(spent))
    summary = replace(summary, losses=find_losses(summary, TrainingSetup()))
    gain = f"; the most to gain is in `evaluation`: at most {100 / (100 - spent_s):.2f}x faster"
    longest = "longest phase: 60 % of the step is `backward`"
    assert summary.verdict == longest + gain * is_named


@pytest.mark.parametrize(
    ("entries_s", "is_own_loop", "verdict"),
    [
        ({VALIDATION: 31.0}, False, "validation-bound: 31 % of the fit is `validation`"),
        ({EVALUATION: 31.0}, False, "evaluation-bound: 31 % of the fit is `evaluation`"),
        ({CHECKPOINTS: 31.0}, False, "checkpoint-bound: 31 % of the fit is `checkpoints`"),
        ({BETWEEN_LOOPS: 31.0}, True, "outside of steps: 31 % of the loops is `between loops`"),
        ({PAUSED: 31.0}, True, "outside of steps: 31 % of the loops is `paused`"),
        # Once, less than 30 %, and less than a loss of the steps.
        ({SET_UP: 60.0}, False, "input-bound: 40 % of the step is `data/fetch`"),
        ({VALIDATION: 29.0}, False, "input-bound: 40 % of the step is `data/fetch`"),
        ({VALIDATION: 31.0, "fetch": 1}, False, "input-bound: 80 % of the step is `data/fetch`"),
    ],
)
def test_the_verdict_is_on_what_lies_outside_of_the_steps_where_that_is_dearest(
    entries_s: dict[str, float], is_own_loop: bool, verdict: str
) -> None:
    fetch_ms = 80.0 if entries_s.pop("fetch", 0) else 40.0
    results = Results(100, 0)
    phases = {"data/fetch": fetch_ms, "forward": 100.0 - fetch_ms}
    results.add([raw(i, **phases) for i in range(10)])
    summary = results.summary()
    spent = {**entries_s, STEPS: 100.0 - sum(entries_s.values())}
    summary = replace(summary, wall_time=WallTimeBreakdown(spent))
    losses = find_losses(summary, TrainingSetup(is_own_loop=is_own_loop))
    assert replace(summary, losses=losses).verdict == verdict
