"""The Trainer of Hugging Face's transformers, with `TransformersPhaseTimer`."""

import copy
import gc
import inspect
import itertools
import json
import pickle
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import hooks_of, is_patched
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, steps, work
from fake_lightning import Loader, Model
from fake_lightning import trainer as pl_trainer
from fake_loop import training_arguments
from processes import run
from torch import Tensor, nn

transformers: Any = pytest.importorskip("transformers")
accelerate: Any = pytest.importorskip("accelerate")

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, load  # noqa: E402
from lightning_gputime._messages import HOMES  # noqa: E402
from lightning_gputime.huggingface import TransformersPhaseTimer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Transformers warns.
    pytest.mark.usefixtures("one_thread"),
]

Make = Callable[..., Any]
Timer = TransformersPhaseTimer

since_5 = pytest.mark.skipif(
    int(version("transformers").partition(".")[0]) < 5, reason="transformers 4 trains otherwise"
)


class FakeNet(nn.Module):
    """A model that takes 4 ms in forward and 7.75 ms in backward."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu, self.body = gpu, Layer(gpu, 4.0, 7.75)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.body(x)
        return {"logits": out} if labels is None else {"loss": out.sum(), "logits": out}

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeNet":
        return FakeNet(self.gpu)


def at(event: str, call: Callable[[Any], object]) -> Any:
    """Return a callback that passes the Trainer's state to a function at an event."""

    def method(args: Any, state: Any, *_: Any, **__: Any) -> None:
        call(state)

    callback = transformers.TrainerCallback()
    setattr(callback, event, method)
    return callback


class Reporter(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
    """Records the logs of a Trainer, like the integrations of `report_to`."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.logs.append({"at": state.global_step, **logs})


def phases(log: dict[str, Any], prefix: str = "phase_time") -> dict[str, float]:
    """Return the logged ms of each phase, without the parts of `data`."""
    return {
        key.removeprefix(f"{prefix}/").removesuffix("_ms"): ms
        for key, ms in log.items()
        if key.startswith(f"{prefix}/") and key.endswith("_ms") and "data/" not in key
    }


def take_trainer_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of a Trainer from training arguments, and return them."""
    names = {"compute_loss_func", "compute_metrics", "optimizers"}
    names |= {"eval_dataset", "train_dataset", "trainer_class"}
    return {name: options.pop(name) for name in names & {*options}}


@pytest.fixture
def fake(gpu: FakeGPU, tmp_path: Path) -> Make:
    """Return a function that makes a Trainer on the fake GPU.

    A fetch takes 1 ms, a loss 0.5 ms and its backward 0.25 ms, an update 2 ms.
    """

    def collate(rows: list[Any]) -> Any:
        gpu.work(1.0)
        return {"x": torch.ones(1, 2), "labels": torch.ones(1, 2)}

    def loss_of(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
        return work(outputs["logits"], gpu, 0.5, 0.25).sum()

    def make(callbacks: list[Any], **options: Any) -> Any:
        model = FakeNet(gpu)
        adder = Adder(model.parameters(), gpu, 2.0)
        adder.param_groups[0]["lr"] = 1.0
        of_trainer = {
            "compute_loss_func": loss_of,
            "optimizers": (adder, None),
            "eval_dataset": [0] * 3,
            "train_dataset": [0] * 40,
            **take_trainer_options(options),
        }

        class ReadsLoss(of_trainer.pop("trainer_class", transformers.Trainer)):  # type: ignore[misc]  # has no types
            def log(self, *args: Any, **kwargs: Any) -> None:
                gpu.now = max(gpu.now, gpu.free_at)  # Reading the loss has synchronized the host.
                super().log(*args, **kwargs)

        arguments = training_arguments(tmp_path, **options)
        return ReadsLoss(model, arguments, data_collator=collate, callbacks=callbacks, **of_trainer)

    return make


@pytest.fixture
def timer(gpu: FakeGPU) -> TransformersPhaseTimer:
    return TransformersPhaseTimer(_clock=gpu, warmup_steps=0, print_summary=False)


@pytest.fixture
def host_timer() -> TransformersPhaseTimer:
    return TransformersPhaseTimer(warmup_steps=0, print_summary=False)


def step_numbers(timer: Timer) -> list[int]:
    steps: list[int] = timer.history()["step"].tolist()
    return steps


STEP = {**STEP_MS, "other": 0.0}
FIRST = {**STEP, "data": 2.0}  # Accelerate's loader prefetches one batch.


def test_timer_does_not_keep_the_model_alive(fake: Make, timer: Timer) -> None:
    gc.collect()
    gc.disable()
    try:
        trainer = fake([timer], eval_strategy="epoch")
        trainer.train()
        model = weakref.ref(trainer.model)
        del trainer
        assert model() is None
    finally:
        gc.enable()


@since_5
def test_micro_batches_are_one_step_even_at_the_end_of_an_epoch(fake: Make, gpu: FakeGPU) -> None:
    timer = Timer(_clock=gpu, warmup_steps=0, lines=False, print_summary=False)
    # Each epoch has 40 batches: 13 updates of three, and one of the last batch.
    fake([timer], gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=2).train()
    thrice = {**{name: 3 * ms for name, ms in STEP.items()}, "optimizer": 2.0}
    # The loader is exhausted one batch before the epoch ends.
    epoch = [{**thrice, "data": 4.0}, *[thrice] * 12, {**STEP, "data": 0.0}]
    assert steps(timer) == epoch * 2
    assert timer._results.series._later_epochs == [(15, 1)]


def test_phase_means_are_logged_with_the_loss(fake: Make, timer: Timer) -> None:
    reporter = Reporter()
    fake([reporter, timer], logging_steps=2, max_steps=5).train()
    two, four, last = reporter.logs
    assert [log["at"] for log in reporter.logs] == [2, 4, 5]
    assert "loss" in two
    mean = {**STEP, "callbacks": 0.0, "step": 15.5, "host_wait": phases(four)["host_wait"]}
    assert phases(four) == mean
    with_first = {"data": 1.5, "step": 16.0, "host_wait": phases(two)["host_wait"]}
    assert phases(two) == {**mean, **with_first}
    assert "train_runtime" in last
    assert phases(last)["step"] == 15.5


@pytest.mark.parametrize(
    ("strategy", "logged"), [("no", [80]), ("epoch", [40, 80]), ("steps", [1, 30, 60, 80])]
)
def test_every_step_is_in_one_logged_mean(
    fake: Make, timer: Timer, strategy: str, logged: list[int]
) -> None:
    reporter = Reporter()
    options = {"logging_strategy": strategy, "logging_first_step": strategy == "steps"}
    fake([timer, reporter], logging_steps=30, max_steps=-1, num_train_epochs=2, **options).train()
    means = [(log["at"], phases(log)["forward"]) for log in reporter.logs if phases(log)]
    assert means == [(number, 4.0) for number in logged]


def test_evaluations_belong_to_no_step_and_are_logged_separately(fake: Make, timer: Timer) -> None:
    reporter = Reporter()
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    trainer = fake([reporter, timer], logging_steps=2, **options)
    trainer.train()
    assert steps(timer) == [FIRST, STEP, STEP, STEP]
    logs = [log for log in reporter.logs if "eval_loss" in log]
    assert [log["at"] for log in logs] == [0, 2, 4]
    logged = [phases(log, "eval_phase_time") for log in logs]
    for log, found in zip(logs, logged, strict=True):
        # Without a backward the loss is `other`.
        assert found.items() >= {"data": 1.0, "forward": 4.0, "other": 0.5}.items()
        assert not phases(log)
    history = trainer.state.log_history
    # Checkpoints store the history as JSON.
    assert json.loads(json.dumps(history)) == history
    assert [item["step"] for item in history if phases(item)] == [2, 4]
    training = [phases(log) for log in reporter.logs if "loss" in log]
    assert [phases(item) for item in history if "loss" in item] == training
    # A model card has a column for each key of the entry with `eval_loss`, and readers take the
    # newest entry, so the phases are in a separate entry before it.
    results = [item for item in history if "eval_loss" in item]
    assert not any("phase_time" in key for item in results for key in item)
    before = [item for item, after in itertools.pairwise(history) if after in results]
    assert [phases(item, "eval_phase_time") for item in before] == logged
    assert [(item["step"], item["epoch"]) for item in before] == [
        (item["step"], item["epoch"]) for item in results
    ]


def test_results_of_train_and_evaluate_have_no_phases(fake: Make, timer: Timer) -> None:
    class Searching(transformers.Trainer):  # type: ignore[misc]  # has no types
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            # A hyperparameter search sums all values that `evaluate` returns.
            results.append(super().evaluate(*args, **kwargs))
            return results[-1]

    results: list[dict[str, float]] = []
    reporter = Reporter()
    options = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 3}
    trainer = fake([timer, reporter], trainer_class=Searching, **options)
    results.append(trainer.train().metrics)
    assert len([log for log in reporter.logs if phases(log) or phases(log, "eval_phase_time")]) == 4
    assert [len(result) > 0 for result in results] == [True] * 3
    assert not any("phase_time" in key for result in results for key in result)


def test_callbacks_before_an_evaluation_are_in_the_step(
    fake: Make, timer: Timer, gpu: FakeGPU
) -> None:
    def make_slow_loader(*args: Any) -> Any:
        gpu.work(100.0)  # Belongs to the evaluation.
        return make_loader(*args)

    works = at("on_step_end", lambda _: gpu.work(0.25))
    trainer = fake([timer, works], eval_strategy="steps", eval_steps=2)
    make_loader = trainer.get_eval_dataloader
    trainer.get_eval_dataloader = make_slow_loader
    trainer.train()
    assert timer.history()["callbacks_ms"].tolist()[1:] == [0.25] * 3


def test_evaluate_and_predict_are_timed_only_during_training(
    fake: Make, timer: Timer, tmp_path: Path
) -> None:
    def predict(state: Any) -> None:
        if state.global_step == 3:
            trainer.predict([0] * 2)

    reporter, options = Reporter(), {"compute_loss_func": None, "eval_strategy": "steps"}
    trainer = fake([reporter, timer, at("on_step_end", predict)], eval_steps=2, **options)
    before = hooks_of(trainer.model)
    trainer.train()
    results = trainer.evaluate()
    assert "eval_loss" in results
    assert not any("phase_time" in key for key in results)
    assert not phases(reporter.logs[-1], "eval_phase_time")
    timer.save(tmp_path / "run.json")
    evaluations = load(tmp_path / "run.json").evaluations
    assert [item["stage"] for item in evaluations] == ["eval", "test", "eval"]
    assert [item["forward_ms"] for item in evaluations] == [4.0] * 3
    assert hooks_of(trainer.model) == before


def test_evaluation_with_custom_prediction_step_is_timed(tmp_path: Path, host_timer: Timer) -> None:
    class Mine(transformers.Trainer):  # type: ignore[misc]  # has no types
        def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            # Like trainers that generate text, this does not call super().
            with torch.no_grad():
                return model(**self._prepare_inputs(inputs)).loss, None, None

    reporter = Reporter()
    train_gpt(
        [reporter, host_timer], tmp_path, trainer_class=Mine, eval_strategy="steps", eval_steps=4
    )
    [log] = [entry for entry in reporter.logs if "eval_loss" in entry]
    found = phases(log, "eval_phase_time")
    assert found["forward"] > 0
    assert found["data"] < found["step"]


PATCHED = {
    *("_evaluate", "_finalize_training", "_run_epoch", "_save_checkpoint", "evaluate"),
    *("evaluation_loop", "get_batch_samples", "log", "prediction_step"),
    *(() if hasattr(transformers.Trainer, "_run_epoch") else ("training_step",)),
} & {*dir(transformers.Trainer)}
"""Attributes that are replaced on a Trainer while it trains."""


ROWS = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 40


def gpt() -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)
    return transformers.GPT2LMHeadModel(config)


def gpt_trainer(callbacks: list[Any], path: Path, **options: Any) -> Any:
    """Return a Trainer of a small GPT."""
    data = {"train_dataset": ROWS, "eval_dataset": ROWS[:4]}
    of_trainer = data | take_trainer_options(options)
    trainer_class = of_trainer.pop("trainer_class", transformers.Trainer)
    arguments = training_arguments(path, **{"logging_steps": 1, **options})
    return trainer_class(gpt(), arguments, callbacks=callbacks, **of_trainer)


def train_gpt(callbacks: list[Any], path: Path, resume: str | None = None, **options: Any) -> Any:
    """Train a small GPT, from the checkpoint `resume` if given, and return its Trainer."""
    trainer = gpt_trainer(callbacks, path, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class CustomLoss(transformers.Trainer):  # type: ignore[misc]  # has no types
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing_factor": 0.1},
        {"trainer_class": CustomLoss},
        {"gradient_checkpointing": True, "max_grad_norm": 1.0},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"bf16": True, "max_grad_norm": 1.0},
        {"optim": "adafactor", "gradient_accumulation_steps": 2},
        {"dataloader_num_workers": 1},
        {"neftune_noise_alpha": 0.1},
    ],
    ids=str,
)
def test_model_of_transformers_has_all_phases(
    tmp_path: Path, host_timer: Timer, options: dict[str, Any]
) -> None:
    trainer = train_gpt([host_timer], tmp_path, **options)
    callbacks = {"callbacks", "callbacks/PrinterCallback.on_log"}
    assert set(host_timer.summary().rows) - {"data/fetch"} - callbacks == {*STEP}
    assert step_numbers(host_timer) == [1, 2, 3, 4]
    for row in host_timer.history():
        phases_ms = [row[f"{name}_ms"] for name in STEP]
        assert all(ms > 0 for ms in phases_ms)
        # The first step has no callbacks.
        callbacks_ms = np.nan_to_num(row["callbacks_ms"])
        assert sum(phases_ms) + callbacks_ms == pytest.approx(row["step_ms"])
    assert host_timer.summary().skipped_updates == 0
    assert "_loss_function" not in vars(trainer.model)


@pytest.mark.slow
def test_compiled_model_is_timed_and_not_recompiled(
    tmp_path: Path, host_timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # Transformers sets it permanently.
    torch._dynamo.reset()
    counters: Any = torch._dynamo.utils.counters
    counters.clear()
    compiles: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}
    train_gpt([], tmp_path, **compiles)
    graphs = counters["stats"]["unique_graphs"]
    trainer = train_gpt([host_timer], tmp_path, **compiles)
    # The loss is inside the compiled code.
    assert {"forward", "backward", "optimizer"} <= set(host_timer.summary().rows)
    assert 0 < counters["stats"]["unique_graphs"] == graphs
    assert "_loss_function" not in vars(trainer.model)
    torch._dynamo.reset()


def test_items_add_up_over_micro_batches_without_evaluations(fake: Make, gpu: FakeGPU) -> None:
    options: dict[str, Any] = {"items": lambda inputs: 5 * len(inputs["x"]), "flops": 2e9}
    timer = TransformersPhaseTimer(_clock=gpu, warmup_steps=0, print_summary=False, **options)
    reporter, micro_batches = Reporter(), {"gradient_accumulation_steps": 3, "max_steps": 4}
    evaluates = {"eval_strategy": "steps", "eval_steps": 4}
    fake([reporter, timer], logging_steps=2, **micro_batches, **evaluates).train()
    summary = timer.summary()
    assert summary.items_per_sec == pytest.approx(15.0 / summary.step.mean_ms * 1e3)
    [evaluation] = [entry for entry in reporter.logs if "eval_loss" in entry]
    for log, prefix, items in ((reporter.logs[0], "", 15.0), (evaluation, "eval_", 5.0)):
        expected = items / log[f"{prefix}phase_time/step_ms"] * 1e3
        assert log[f"{prefix}phase_time/items_per_sec"] == pytest.approx(expected)


def test_samples_collated_in_a_step_are_not_counted(tmp_path: Path, host_timer: Timer) -> None:
    class Trainer(CustomLoss):
        def _prepare_inputs(self, inputs: Any) -> Any:
            if isinstance(inputs, list):  # Like TRL's trainers that generate.
                inputs = transformers.default_data_collator(inputs)
            return super()._prepare_inputs(inputs)

    trainer = gpt_trainer([host_timer], tmp_path, trainer_class=Trainer)
    trainer.data_collator = list
    trainer.train()
    assert host_timer.summary().items_per_sec is None


@since_5
def test_resumed_training_continues_the_step_count(tmp_path: Path, host_timer: Timer) -> None:
    train_gpt([], tmp_path, save_strategy="steps", save_steps=2)
    train_gpt([host_timer], tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert step_numbers(host_timer) == [3, 4]


def test_callback_added_during_training_receives_phase_times(fake: Make, timer: Timer) -> None:
    def add(state: Any) -> None:
        if state.global_step == 2:
            trainer.add_callback(late)

    early, late = Reporter(), Reporter()
    trainer = fake([early, at("on_step_end", add)], logging_steps=1)
    trainer.add_callback(timer)
    trainer.train()
    assert [phases(log) != {} for log in early.logs] == [True] * 4 + [False]
    assert [phases(log) != {} for log in late.logs] == [True] * 3 + [False]
    trainer.remove_callback(timer)
    trainer.train()
    assert not phases(early.logs[-1])
    trainer.evaluate()
    assert not phases(early.logs[-1], "eval_phase_time")


class Custom(transformers.Trainer):  # type: ignore[misc]  # has no types
    """A Trainer that raises in the method `raises`, with helpers for a custom training loop."""

    raises = ""

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        if "train_runtime" in logs and self.raises == "log":
            raise RuntimeError("mine")

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.raises == "prediction_step":
            raise RuntimeError("mine")
        return super().prediction_step(*args, **kwargs)

    def begin(self) -> Any:
        """Begin a training, and return its loader."""
        loader = self.get_train_dataloader()
        self.create_optimizer()
        self.optimizer: Any = self.accelerator.prepare(self.optimizer)
        self.model_wrapped = self.model
        self.state.global_step = 0
        self.callback_handler.optimizer = self.optimizer
        self.call_event("on_train_begin")
        return loader

    def call_event(self, event: str) -> None:
        self.state.global_step += event == "on_step_end"
        getattr(self.callback_handler, event)(self.args, self.state, self.control)

    def update(self, batch: Any) -> None:
        self.training_step(self.model_wrapped, batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("place", "error", "steps_run", "steps_printed"),
    [
        ("", None, 4, 4),
        ("on_step_begin", KeyboardInterrupt, 3, 3),
        ("on_epoch_begin", RuntimeError, 0, 0),
        ("on_train_end", RuntimeError, 4, 4),  # The training was over, except for this callback.
        ("log", RuntimeError, 4, 0),
        ("prediction_step", RuntimeError, 0, 0),
        ("is_removed", None, 4, 0),
    ],
)
def test_training_that_ends_fails_or_is_interrupted_leaves_nothing_installed(
    tmp_path: Path,
    place: str,
    error: type[BaseException] | None,
    steps_run: int,
    steps_printed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def at_step_end(state: Any) -> None:
        patched.append({*vars(trainer)} & PATCHED)
        if place == "is_removed" and state.global_step == 2:
            trainer.remove_callback(timer)

    def fail(args: Any, state: Any, *_: Any, **__: Any) -> None:
        if error is not None and (place != "on_step_begin" or state.global_step == 3):
            raise error("mine")

    patched = list[set[str]]()
    callback, timer = at("on_step_end", at_step_end), TransformersPhaseTimer(warmup_steps=0)
    setattr(callback, place or "on_save", fail)
    gpt_trainer([], tmp_path)  # The first GPT adds attributes to classes.
    kinds = transformers.Trainer, transformers.trainer_callback.CallbackHandler, nn.Module
    classes = [dict(vars(kind)) for kind in kinds]
    trainer = gpt_trainer([timer, callback], tmp_path, trainer_class=Custom, eval_on_start=True)
    trainer.raises = place  # No effect unless it is one of the methods that check it.
    before, callbacks = hooks_of(trainer.model), [*trainer.callback_handler.callbacks]
    assert not {*vars(trainer)} & PATCHED
    with nullcontext() if error is None else pytest.raises(error, match="mine"):
        trainer.train()
    assert all(names == PATCHED for names in patched[:2])
    assert len(patched) == steps_run
    assert hooks_of(trainer.model) == before
    assert not {*vars(trainer)} & PATCHED
    assert "on_epoch_begin" not in vars(trainer.callback_handler)
    if place == "is_removed":
        callbacks.remove(timer)
    assert {*trainer.callback_handler.callbacks} == {*callbacks}
    assert trainer.callback_handler.callbacks.count(timer) == (place != "is_removed")
    assert [dict(vars(kind)) for kind in kinds] == classes
    tables = re.findall(r"Time per step(?: in ms over \d+ steps)?", capsys.readouterr().out)
    table = f"Time per step in ms over {steps_printed} steps"
    assert tables == ([table] if steps_printed else [])


def test_custom_loop_that_only_calls_on_step_end_is_timed(fake: Make, timer: Timer) -> None:
    class Trainer(Custom):
        def train(self) -> None:
            loader = iter(self.begin())
            for _ in range(3):
                batch = next(loader)
                with torch.no_grad():
                    self.model(batch["x"])  # A rollout.
                for _ in range(2):
                    self.update({**batch})
                self.call_event("on_step_end")
            self.evaluate()
            for _ in range(2):
                self.update(next(loader))
                self.call_event("on_step_end")
            self.call_event("on_train_end")

    fake([timer], trainer_class=Trainer).train()
    twice = {name: 2 * ms for name, ms in STEP.items()} | {"data": 1.0, "forward": 12.0}
    assert steps(timer) == [twice | {"data": 2.0}, twice, twice, STEP, STEP]
    assert step_numbers(timer) == [1, 2, 3, 4, 5]


def test_fetch_of_a_custom_loop_is_data_and_not_callbacks(fake: Make, timer: Timer) -> None:
    class Trainer(Custom):
        def train(self) -> None:
            loader = self.begin()
            self.call_event("on_epoch_begin")
            for _, batch in zip(range(3), loader, strict=False):
                self.call_event("on_step_begin")
                self.update(batch)
                self.call_event("on_step_end")
            self.call_event("on_epoch_end")
            self.call_event("on_train_end")

    fake([timer], trainer_class=Trainer).train()
    assert steps(timer) == [FIRST, STEP, STEP]
    assert "callbacks" not in timer.summary().rows


def test_batches_of_a_loop_that_reports_only_ends_are_open_in_each_epoch(
    fake: Make, timer: Timer
) -> None:
    class Trainer(Custom):
        def train(self) -> None:
            loader = self.begin()
            for epoch in range(3):
                self.state.epoch = float(epoch)
                self.call_event("on_epoch_begin")
                for _, batch in zip(range(2), loader, strict=False):
                    self.update(batch)
                    self.call_event("on_step_end")
                self.call_event("on_epoch_end")
            self.call_event("on_train_end")

    fake([timer], trainer_class=Trainer).train()
    # The first step shows that no start is reported.
    assert [row["forward"] for row in steps(timer)[1:]] == [STEP["forward"]] * 5


def test_timer_shared_by_nested_trainings_times_the_inner_one_and_warns(
    fake: Make, timer: Timer, caplog: pytest.LogCaptureFixture
) -> None:
    inner = fake([timer], max_steps=3)
    train_inner = at("on_step_end", lambda state: state.global_step == 2 and inner.train())
    fake([timer, train_inner]).train()
    assert step_numbers(timer) == [1, 2, 3]
    assert "trainer a separate timer" in caplog.text


@pytest.mark.slow
def test_two_ranks_are_compared_in_the_table_and_in_the_log(tmp_path: Path) -> None:
    script = Path(__file__).with_name("huggingface_run.py")
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    printed = run(*ranks, script, tmp_path)
    assert "DistributedDataParallel" in printed
    assert "min - max (rank)" in printed
    assert "\n  comm " in printed
    for name in ("backward/comm", "data/comm", "ranks/straggler"):
        assert f"phase_time/{name}" in printed


def test_trials_and_several_evaluation_sets_are_timed(tmp_path: Path, host_timer: Timer) -> None:
    reporter = Reporter()
    trainer = transformers.Trainer(
        model_init=lambda trial: gpt(),
        args=training_arguments(tmp_path, eval_strategy="epoch", max_steps=-1, num_train_epochs=2),
        train_dataset=ROWS[:4],
        eval_dataset={"first": ROWS[:4], "second": ROWS[:4]},
        callbacks=[reporter, host_timer],
    )
    for _ in range(2):
        reporter.logs.clear()
        trainer.train()
        for name in ("first", "second"):
            logs = [log for log in reporter.logs if f"eval_{name}_loss" in log]
            assert [entry["at"] for entry in logs] == [4, 8]
            assert all(phases(item, f"eval_{name}_phase_time")["forward"] > 0 for item in logs)
        assert step_numbers(host_timer) == [*range(1, 9)]


def test_retry_with_a_smaller_batch_size_starts_again(tmp_path: Path, host_timer: Timer) -> None:
    class TooLarge(transformers.Trainer):  # type: ignore[misc]  # has no types
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self._train_batch_size > 2 and self.state.global_step == 1:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    sizes: dict[str, Any] = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    train_gpt([host_timer], tmp_path, trainer_class=TooLarge, **sizes)
    assert step_numbers(host_timer) == [1, 2, 3, 4]


def test_copy_of_a_timed_model_keeps_its_loss(tmp_path: Path, host_timer: Timer) -> None:
    def duplicate(_: Any) -> None:
        copies.extend([copy.deepcopy(trainer.model), pickle.loads(pickle.dumps(trainer.model))])

    copies: list[Any] = []
    trainer = gpt_trainer([host_timer, at("on_step_end", duplicate)], tmp_path, max_steps=1)
    trainer.train()
    assert [model.loss_function for model in copies] == [trainer.model.loss_function] * 2


def test_timer_without_a_trainer_warns_once_and_times_nothing(
    fake: Make, timer: Timer, caplog: pytest.LogCaptureFixture
) -> None:
    class Forwards(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        """Passes events on to the timer, so that the timer is not a callback of the Trainer."""

        def __getattribute__(self, name: str) -> Any:
            owner = timer if name.startswith("on_") else super()
            return owner.__getattribute__(name)

    reporter = Reporter()
    trainer = fake([Forwards(), reporter], logging_steps=1, eval_strategy="steps", eval_steps=2)
    before = hooks_of(trainer.model)
    for _ in range(2):
        trainer.train()
    assert not len(timer.history())
    assert hooks_of(trainer.model) == before
    assert not any("phase_time" in key for log in reporter.logs for key in log)
    # SetFit's trainer does not derive from Trainer, and its model is not a module.
    for event in ("on_train_begin", "on_step_begin", "on_step_end", "on_train_end"):
        getattr(timer, event)(Mock(), Mock(), Mock(), model=object(), optimizer=None)
    assert caplog.text.count("No Trainer was found") == 1


def test_trainer_class_is_restored_and_stays_picklable(tmp_path: Path) -> None:
    class Mine(transformers.Trainer):  # type: ignore[misc]  # has no types
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super(self.__class__, self).train(*args, **kwargs)

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().prediction_step(*args, **kwargs)

        train.mark = "mine"  # type: ignore[attr-defined]  # on purpose

    def methods() -> list[Any]:
        names = ("train", "get_batch_samples", "evaluation_loop", "prediction_step")
        return [vars(cls).get(name) for cls in Mine.__mro__[:2] for name in names]

    gc.collect()
    before = methods()
    assert not any(map(is_patched, before))
    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    # All Trainers share this state. After a training it contains objects that cannot be pickled.
    accelerate.state.GradientState._reset_state()
    plain = gpt_trainer([timer], tmp_path)
    assert type(pickle.loads(pickle.dumps(plain))) is type(plain) is transformers.Trainer
    train = transformers.Trainer.train
    assert pickle.loads(pickle.dumps(train)) is copy.deepcopy(train) is train
    assert "resume_from_checkpoint" in inspect.signature(train).parameters
    trainer = train_gpt([timer], tmp_path, trainer_class=Mine, eval_strategy="steps", eval_steps=2)
    assert type(trainer) is Mine
    assert (vars(Mine.train)["mark"], Mine.train.__name__) == ("mine", "train")
    assert step_numbers(timer) == [1, 2, 3, 4]
    # Each evaluation counts once, although `prediction_step` calls that of its base class.
    timer.save(tmp_path / "run.json")
    evaluations = load(tmp_path / "run.json").evaluations
    assert [evaluation["stage"] for evaluation in evaluations] == ["eval", "eval"]
    trainer.remove_callback(timer)
    plain.remove_callback(timer)
    del plain, trainer, timer
    gc.collect()
    assert methods() == before


def test_transformers_advice_names_the_collator(fake: Make, timer: Timer, gpu: FakeGPU) -> None:
    trainer = fake([timer])
    collate = trainer.data_collator

    def slow_collate(batch: Any) -> Any:
        gpu.host_work(50.0)
        return collate(batch)

    trainer.data_collator = slow_collate
    trainer.train()
    summary = timer.summary()
    assert summary.verdict.startswith("input-bound")
    line = slow_collate.__code__.co_firstlineno
    assert re.fullmatch(
        rf"`slow_collate` \(test_huggingface.py:{line}\) takes [0-9.]+ ms of [0-9.]+ ms per step:"
        r" set dataloader_num_workers=\d \(now 0\), or make it faster",
        summary.advice[0],
    )


def test_each_callback_event_is_a_sub_phase(fake: Make, gpu: FakeGPU, timer: Timer) -> None:
    class Works(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gpu.work(0.25)

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            gpu.work(0.125)

        def on_log(self, *_: Any, **__: Any) -> None:
            gpu.work(0.5)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    works = cast("Any", Works())
    works.on_step_end = lambda *_, **__: gpu.work(1.0)  # Takes precedence over the method.
    fake([works, timer], logging_steps=1).train()
    row = timer.history()[1]
    assert {name: row[f"{name}_ms"] for name in timer.summary().rows if "callbacks" in name} == {
        "callbacks": 1.875,
        "callbacks/PrinterCallback.on_log": 0.0,
        "callbacks/Works.on_step_begin": 0.25,
        "callbacks/Works.on_pre_optimizer_step": 0.125,
        "callbacks/Works.on_step_end": 1.0,
        "callbacks/Works.on_log": 0.5,
    }
    assert {name: row[f"{name}_ms"] for name in STEP} == STEP
    assert [*vars(works)] == ["on_step_end"]


class Saves(transformers.Trainer):  # type: ignore[misc]  # has no types
    """A Trainer on the fake GPU whose checkpoints take 30 ms."""

    def _save_checkpoint(self, *_: Any, **__: Any) -> None:
        self.model.gpu.host_work(30.0)


@since_5
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_time_breakdown_covers_training_and_evaluations(
    fake: Make, gpu: FakeGPU, timer: Timer, strategy: str
) -> None:
    def compute(_: Any) -> dict[str, float]:
        gpu.host_work(100.0)
        return {}

    class Measures(Saves):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            begin = gpu.now
            found = super().evaluate(*args, **kwargs)
            evaluations_ms.append((gpu.now - begin) / 1e6)
            return found

    evaluations_ms = list[float]()
    begins = at("on_train_begin", lambda _: gpu.host_work(7.0))
    ends = at("on_train_end", lambda _: gpu.host_work(10.0))
    options: dict[str, Any] = {"eval_strategy": strategy, "save_strategy": strategy}
    options |= {"eval_steps": 2, "save_steps": 2, "eval_on_start": True, "logging_strategy": "no"}
    if strategy == "epoch":
        options |= {"max_steps": -1, "num_train_epochs": 2}
    options |= {"trainer_class": Measures, "train_dataset": [0] * 3, "compute_metrics": compute}
    trainer = fake([timer, begins, ends], **options)
    begin = gpu.now
    trainer.train()
    summary = timer.summary()
    assert summary.wall_clock is not None
    entries_ms = {name: round(1e3 * s, 6) for name, s in summary.wall_clock.entries_s.items()}
    assert entries_ms["set-up"] >= 7.0
    assert entries_ms["checkpoints"] == 60.0
    assert entries_ms["evaluation"] == pytest.approx(sum(evaluations_ms))
    assert min(evaluations_ms) > 100.0
    assert len(evaluations_ms) == 3
    assert entries_ms["tear-down"] >= 10.0
    assert sum(entries_ms.values()) == pytest.approx((gpu.now - begin) / 1e6)
    breakdown = summary.time_breakdown
    assert breakdown is not None
    assert breakdown.scope == "fit"
    assert breakdown.rows[0].name == "evaluation"
    assert summary.wall_clock.after_batches_s == pytest.approx(0.3)
    place = f"`compute` (test_huggingface.py:{compute.__code__.co_firstlineno + 1})"
    advice = f"{place} takes 300 ms of {sum(evaluations_ms):.0f} ms: make it faster"
    assert breakdown.rows[0].advice[0].text == advice
    assert breakdown["checkpoints"].share == pytest.approx(60.0 / sum(entries_ms.values()))


def test_checkpoint_has_one_name_in_breakdown_and_phases(fake: Make, timer: Timer) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "no", "max_steps": 6}
    fake([timer], trainer_class=Saves, **options).train()
    summary = timer.summary()
    assert summary.time_breakdown is not None
    # The checkpoint after the last step is in no step.
    assert summary.time_breakdown["checkpoints"].seconds == pytest.approx(0.09)
    assert summary.rows["callbacks/checkpoints"].n == 2
    # While the host saves, the GPU finishes the step, which takes 15.5 ms.
    assert timer.history()["callbacks/checkpoints_ms"].tolist()[2::2] == [30.0 - 15.5] * 2
    assert "\n  checkpoints " in str(summary)


@pytest.mark.slow
def test_missing_transformers_is_named_and_lightning_is_not_imported() -> None:
    code = """
import sys
sys.modules["transformers"] = None
try:
    import lightning_gputime.huggingface
except ImportError as error:
    print(error)
del sys.modules["transformers"]
import lightning_gputime.huggingface
print("lightning" in sys.modules)
"""
    missing, imported = run("-c", code).splitlines()
    assert "pip install transformers accelerate" in missing
    assert imported == "False"


def test_wrong_timer_error_names_the_right_timer(fake: Make, gpu: FakeGPU) -> None:
    model, of_transformers = nn.Linear(1, 1), cast("Any", TransformersPhaseTimer())
    for timer in (GPUPhaseTimer(), GPUPhaseHooks(model)):
        with pytest.raises(AttributeError) as error:
            fake([timer])
        assert HOMES in str(error.value)
    with pytest.raises(TypeError, match=r"huggingface\.TransformersPhaseTimer\(\)\]\)"):
        GPUPhaseHooks(fake([]))
    # Lightning before 2.6 refuses callbacks of other libraries with a ValueError.
    with pytest.raises((AttributeError, ValueError)) as refusal:
        pl_trainer(of_transformers).fit(Model(gpu), Loader(gpu, 1))
    assert isinstance(refusal.value, ValueError) or HOMES in str(refusal.value)


@since_5
@pytest.mark.parametrize("how", ["callbacks=", "add_callback"])
def test_wall_clock_of_each_training_has_set_up_and_tear_down(
    fake: Make, gpu: FakeGPU, timer: Timer, how: str
) -> None:
    class Slow(transformers.Trainer):  # type: ignore[misc]  # has no types
        def get_train_dataloader(self) -> Any:
            gpu.host_work(70.0)
            return super().get_train_dataloader()

    ends = at("on_train_end", lambda _: gpu.host_work(30.0))
    trainer = fake([ends] + [timer] * (how == "callbacks="), trainer_class=Slow)
    if how == "add_callback":
        trainer.add_callback(timer)
    for _ in range(2):
        begin = gpu.now
        trainer.train()
        wall_clock = timer.summary().wall_clock
        assert wall_clock is not None
        assert wall_clock.entries_s["set-up"] >= 0.07
        assert wall_clock.entries_s["tear-down"] >= 0.03
        assert sum(wall_clock.entries_s.values()) == pytest.approx((gpu.now - begin) / 1e9)
    trainer.remove_callback(timer)
    trainer.train()
    assert timer.summary().wall_clock == wall_clock


@pytest.mark.parametrize("how", [copy.deepcopy, lambda timer: pickle.loads(pickle.dumps(timer))])
def test_clone_of_an_attached_timer_is_detached(
    tmp_path: Path, host_timer: Timer, how: Callable[[Any], Any]
) -> None:
    def clone(state: Any) -> None:
        if state.global_step == 2:
            clones.append(how(host_timer))

    clones: list[Any] = []
    trainer = train_gpt([host_timer, at("on_step_end", clone)], tmp_path)
    [twin] = clones
    assert step_numbers(host_timer) == [1, 2, 3, 4]
    assert len(twin.history()) <= 2
    twin.on_step_end(trainer.args, trainer.state)  # Raises nothing, and times nothing.
    assert len(twin.history()) <= 2
    again = train_gpt([twin], tmp_path)
    assert again.state.global_step == 4
    assert step_numbers(twin) == [1, 2, 3, 4]


def test_training_without_on_train_end_is_cleaned_up(tmp_path: Path, host_timer: Timer) -> None:
    class Returns(Custom):
        def train(self) -> None:
            for batch in self.begin():
                self.call_event("on_step_begin")
                self.model(**batch)["loss"].backward()
                self.optimizer.step()
                self.call_event("on_step_end")

    trainer = gpt_trainer([host_timer], tmp_path, trainer_class=Returns)
    before = hooks_of(trainer.model)
    trainer.train()
    assert hooks_of(trainer.model) == before
    assert not {*vars(trainer)} & PATCHED
