"""The Trainer of Hugging Face's transformers, with the callback that is shipped for it."""

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
from fake_gpu import Adder, FakeGPU, Layer, steps, work
from fake_lightning import Loader, Model
from fake_lightning import trainer as pl_trainer
from processes import run
from torch import Tensor, nn

transformers: Any = pytest.importorskip("transformers")
accelerate: Any = pytest.importorskip("accelerate")

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer  # noqa: E402
from lightning_gputime._messages import HOMES  # noqa: E402
from lightning_gputime.huggingface import TransformersPhaseTimer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    pytest.mark.usefixtures("one_thread"),
]

Make = Callable[..., Any]

since_5 = pytest.mark.skipif(
    int(version("transformers").partition(".")[0]) < 5, reason="transformers 4 trains otherwise"
)


class FakeNet(nn.Module):
    """A model whose calls take a known time: 4 ms, and backward 7.75 ms."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu, self.body = gpu, Layer(gpu, 4.0, 7.75)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.body(x)
        return {"logits": out} if labels is None else {"loss": out.sum(), "logits": out}

    def __deepcopy__(self, memo: dict[int, Any]) -> "FakeNet":
        return FakeNet(self.gpu)


def options(tmp_path: Path, **others: Any) -> Any:
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": True,
        "max_grad_norm": 0.0,
        "logging_nan_inf_filter": False,
    }
    return transformers.TrainingArguments(str(tmp_path), **{**defaults, **others})


class Reporter(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
    """Keeps what the Trainer logs, as those of `report_to` do, before all the user's callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.logs.append({"at": state.global_step, **logs})


def phases(log: dict[str, Any], prefix: str = "phase_time") -> dict[str, float]:
    return {
        key.removeprefix(f"{prefix}/").removesuffix("_ms"): ms
        for key, ms in log.items()
        if key.startswith(f"{prefix}/") and key.endswith("_ms") and "data/" not in key
    }


@pytest.fixture
def fake(gpu: FakeGPU, tmp_path: Path) -> Make:
    """Makes a Trainer on the fake GPU: a fetch takes 1 ms, a loss 0.5 and 0.25, an update 2."""

    def collate(rows: list[Any]) -> Any:
        gpu.work(1.0)
        return {"x": torch.ones(1, 2), "labels": torch.ones(1, 2)}

    def loss_of(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
        return work(outputs["logits"], gpu, 0.5, 0.25).sum()

    def make(callbacks: list[Any], **others: Any) -> Any:
        model = FakeNet(gpu)
        adder = Adder(model.parameters(), gpu, 2.0)
        adder.param_groups[0]["lr"] = 1.0
        own = {
            "compute_loss_func": loss_of,
            "optimizers": (adder, None),
            "eval_dataset": [0] * 3,
            "train_dataset": [0] * 40,
            **{name: others.pop(name) for name in [*others] if name in OF_TRAINER},
        }

        class Waits(own.pop("trainer_class", transformers.Trainer)):  # type: ignore[misc]  # has no types
            def log(self, *args: Any, **kwargs: Any) -> None:
                gpu.now = max(gpu.now, gpu.free_at)  # It has just read the loss.
                super().log(*args, **kwargs)

        return Waits(
            model,
            options(tmp_path, **others),
            data_collator=collate,
            callbacks=callbacks,
            **own,
        )

    return make


OF_TRAINER = (
    *("compute_loss_func", "compute_metrics", "optimizers"),
    *("eval_dataset", "train_dataset", "trainer_class"),
)


@pytest.fixture
def timer(gpu: FakeGPU) -> TransformersPhaseTimer:
    return TransformersPhaseTimer(_clock=gpu, warmup_steps=0, print_summary=False)


STEP = {
    "data": 1.0,
    "forward": 4.0,
    "loss": 0.5,
    "backward": 8.0,
    "optimizer": 2.0,
    "other": 0.0,
}
# Accelerate's loader is one batch ahead.
FIRST = {**STEP, "data": 2.0}


def test_transformers_trainer_times_every_phase(fake: Make, timer: TransformersPhaseTimer) -> None:
    fake([timer]).train()
    assert steps(timer) == [FIRST, STEP, STEP, STEP]
    assert timer.history()["step"].tolist() == [1, 2, 3, 4]
    assert timer.summary().skipped_updates == 0


def test_kept_timer_does_not_keep_the_model_alive(
    fake: Make, timer: TransformersPhaseTimer
) -> None:
    def train() -> Any:
        trainer = fake([timer], eval_strategy="epoch")
        trainer.train()
        return trainer.model

    gc.collect()
    gc.disable()
    try:
        model = weakref.ref(train())
        assert model() is None
    finally:
        gc.enable()


@since_5
def test_micro_batches_are_one_step_also_at_the_end_of_an_epoch(
    fake: Make, timer: TransformersPhaseTimer
) -> None:
    # 40 batches: 13 updates of three, and one of the last batch, in each epoch.
    fake([timer], gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=2).train()
    thrice = {**{name: 3 * ms for name, ms in STEP.items()}, "optimizer": 2.0}
    found = steps(timer)
    assert len(found) == 28
    assert found[0] == {**thrice, "data": 4.0}
    assert found[1:12] == [thrice] * 11
    # The end of the loader was met one batch before.
    assert found[12] == thrice | {"data": 3.0}
    assert found[13] == STEP | {"data": 0.0}
    assert found[14] == found[0]
    assert timer._results.slowdowns.series._epoch == 1


def test_means_are_logged_with_the_loss(fake: Make, timer: TransformersPhaseTimer) -> None:
    reporter = Reporter()
    fake([reporter, timer], logging_steps=2, max_steps=5).train()
    two, four, last = reporter.logs
    assert [log["at"] for log in reporter.logs] == [2, 4, 5]
    assert "loss" in two
    mean = {**STEP, "data": 1.5, "callbacks": 0.0, "step": 16.0}
    assert {name: ms for name, ms in phases(two).items() if name != "host_wait"} == mean
    mean = {**STEP, "callbacks": 0.0, "step": 15.5}
    assert {name: ms for name, ms in phases(four).items() if name != "host_wait"} == mean
    assert "train_runtime" in last
    assert phases(last)["step"] == 15.5


@pytest.mark.parametrize("strategy", ["no", "epoch", "steps"])
def test_every_step_is_in_one_logged_mean(
    fake: Make, timer: TransformersPhaseTimer, strategy: str
) -> None:
    reporter = Reporter()
    trainer = fake(
        [timer, reporter],
        logging_strategy=strategy,
        logging_steps=30,
        logging_first_step=strategy == "steps",
        max_steps=-1,
        num_train_epochs=2,
    )
    trainer.train()
    logged = [log["at"] for log in reporter.logs if phases(log)]
    assert logged == {"no": [80], "epoch": [40, 80], "steps": [1, 30, 60, 80]}[strategy]
    assert all(phases(entry)["forward"] == 4.0 for entry in reporter.logs if phases(entry))


def test_evaluation_belongs_to_no_step_and_logs_its_own_means(
    fake: Make, timer: TransformersPhaseTimer
) -> None:
    reporter = Reporter()
    trainer = fake(
        [reporter, timer], eval_strategy="steps", eval_steps=2, eval_on_start=True, logging_steps=1
    )
    trainer.train()
    assert steps(timer) == [FIRST, STEP, STEP, STEP]
    logs = [log for log in reporter.logs if "eval_loss" in log]
    assert [entry["at"] for entry in logs] == [0, 2, 4]
    for item in logs:
        found = phases(item, "eval_phase_time")
        # The loss is `other`: no backward follows it. The loader of three batches is item ahead.
        assert {name: found[name] for name in ("data", "forward", "other")} == {
            "data": 1.0,
            "forward": 4.0,
            "other": 0.5,
        }
        assert not phases(item)


def test_callbacks_before_an_evaluation_belong_to_the_step(
    fake: Make, timer: TransformersPhaseTimer, gpu: FakeGPU
) -> None:
    class Works(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_step_end(self, *_: Any, **__: Any) -> None:
            gpu.work(0.25)

    trainer = fake([timer, Works()], eval_strategy="steps", eval_steps=2)
    make = trainer.get_eval_dataloader

    def make_for_long(*args: Any) -> Any:
        gpu.work(100.0)  # It is the evaluation's.
        return make(*args)

    trainer.get_eval_dataloader = make_for_long
    trainer.train()
    callbacks = timer.history()["callbacks_ms"].tolist()
    assert callbacks[1:] == [0.25] * 3


def test_evaluate_and_predict_are_timed_only_during_training(
    fake: Make, timer: TransformersPhaseTimer
) -> None:
    class Predicts(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 3:
                trainer.predict([0] * 2)

    reporter = Reporter()
    trainer = fake(
        [reporter, timer, Predicts()], compute_loss_func=None, eval_strategy="steps", eval_steps=2
    )
    before = hooks_of(trainer.model)
    trainer.train()
    assert [evaluation["stage"] for evaluation in timer._run().evaluations] == [
        "eval",
        "test",
        "eval",
    ]
    assert all(saved_run["forward_ms"] == 4.0 for saved_run in timer._run().evaluations)
    assert "eval_loss" in trainer.evaluate()
    assert not phases(reporter.logs[-1], "eval_phase_time")
    assert len(timer._run().evaluations) == 3
    assert hooks_of(trainer.model) == before


def test_custom_prediction_step_is_timed(tmp_path: Path) -> None:
    class Mine(transformers.Trainer):  # type: ignore[misc]  # has no types
        def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            with (
                torch.no_grad()
            ):  # Like trainers that generate text, it does not call the base class.
                return model(**self._prepare_inputs(inputs)).loss, None, None

    timer, reporter = TransformersPhaseTimer(print_summary=False), Reporter()
    new([reporter, timer], tmp_path, trainer_class=Mine, eval_strategy="steps", eval_steps=4)
    [log] = [entry for entry in reporter.logs if "eval_loss" in entry]
    found = phases(log, "eval_phase_time")
    assert found["forward"] > 0
    assert found["data"] < found["step"]


def test_trainer_results_have_no_phases(fake: Make, timer: TransformersPhaseTimer) -> None:
    # A search for hyperparameters adds up all that `evaluate` returns.
    trainer = fake([timer], eval_strategy="steps", eval_steps=2, logging_steps=2)
    returned = [trainer.train().metrics, trainer.evaluate()]
    assert not any("phase_time" in key for item in returned for key in item)


def test_phases_are_logged_with_the_loss_in_the_trainer_state(
    fake: Make, timer: TransformersPhaseTimer
) -> None:
    reporter = Reporter()
    trainer = fake([reporter, timer], eval_strategy="steps", eval_steps=2, logging_steps=2)
    trainer.train()
    history = trainer.state.log_history
    assert [item["step"] for item in history if phases(item)] == [2, 4]
    # It becomes part of each checkpoint.
    assert json.loads(json.dumps(history)) == history
    logged = [phases(log) for log in reporter.logs if "loss" in log]
    assert [phases(element) for element in history if "loss" in element] == logged
    # A model card makes a column of each key next to `eval_loss`.
    assert not any("phase_time" in key for log in history if "eval_loss" in log for key in log)
    # So the means of evaluations precede it: readers of the newest entry find their own.
    logged = [phases(entry, "eval_phase_time") for entry in reporter.logs if "eval_loss" in entry]
    pairs = [*itertools.pairwise(history)]
    found = [event for event, after in pairs if "eval_loss" in after]
    assert [phases(log, "eval_phase_time") for log in found] == logged
    assert all(logged)
    assert [(log["step"], log["epoch"]) for log in found] == [
        (after["step"], after["epoch"]) for _, after in pairs if "eval_loss" in after
    ]


PATCHED = {
    "_evaluate",
    "_finalize_training",
    "_run_epoch",
    "_save_checkpoint",
    "evaluate",
    "evaluation_loop",
    "get_batch_samples",
    "log",
    "prediction_step",
    *(() if hasattr(transformers.Trainer, "_run_epoch") else ("training_step",)),
} & {*dir(transformers.Trainer)}
"""Attributes that are replaced on a Trainer while it trains."""


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_trainer_is_patched_only_while_it_trains(
    tmp_path: Path, error: type[BaseException] | None
) -> None:
    class Looks(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            self.found: set[str] = {*vars(trainer)} & PATCHED
            if error is not None and state.global_step == 2:
                raise error

    kinds = transformers.Trainer, transformers.trainer_callback.CallbackHandler, nn.Module
    timer, looks = TransformersPhaseTimer(print_summary=False), Looks()
    new([], tmp_path, train=False)  # The first model adds attributes to classes, too.
    before = [dict(vars(kind)) for kind in kinds]
    trainer = new([timer, looks], tmp_path, train=False)
    assert not {*vars(trainer)} & PATCHED
    callbacks = {*trainer.callback_handler.callbacks}
    with nullcontext() if error is None else pytest.raises(error):
        trainer.train()
    assert looks.found == PATCHED
    assert not {*vars(trainer)} & PATCHED
    assert {*trainer.callback_handler.callbacks} == callbacks
    assert [dict(vars(kind)) for kind in kinds] == before


def gpt() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=32,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def new(callbacks: list[Any], path: Path, train: bool = True, **others: Any) -> Any:
    rows = torch.arange(16).repeat(40, 1)
    rows_to_evaluate = others.pop("eval_dataset", [{"input_ids": rows[0], "labels": rows[0]}] * 4)
    resume = others.pop("resume", None)
    own = {name: others.pop(name) for name in [*others] if name in OF_TRAINER}
    trainer = own.pop("trainer_class", transformers.Trainer)(
        others.pop("model", None) or gpt(),
        options(path, **{"logging_steps": 1, **others}),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        eval_dataset=rows_to_evaluate,
        callbacks=callbacks,
        **own,
    )
    if train:
        trainer.train(resume_from_checkpoint=resume)
    return trainer


ALL = {"data", "forward", "loss", "backward", "optimizer", "other"}


class OwnLoss(transformers.Trainer):  # type: ignore[misc]  # has no types
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"label_smoothing_factor": 0.1},
        {"trainer_class": OwnLoss},
        {"gradient_checkpointing": True, "max_grad_norm": 1.0},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"bf16": True, "max_grad_norm": 1.0},
        {"optim": "adafactor", "gradient_accumulation_steps": 2},
        {"dataloader_num_workers": 1},
        {"neftune_noise_alpha": 0.1},
    ],
    ids=str,
)
def test_model_of_transformers_has_all_phases(tmp_path: Path, others: dict[str, Any]) -> None:
    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    trainer = new([timer], tmp_path, **others)
    callbacks = {"callbacks", "callbacks/PrinterCallback.on_log"}
    assert set(timer.summary().rows) - {"data/fetch"} - callbacks == ALL
    assert [row["step"] for row in timer.history()] == [1, 2, 3, 4]
    for row in timer.history():
        # The first step has no callbacks.
        callbacks_ms = np.nan_to_num(row["callbacks_ms"])
        all_ms = sum(row[f"{name}_ms"] for name in ALL) + callbacks_ms
        assert all_ms == pytest.approx(row["step_ms"])
        assert all(row[f"{name}_ms"] > 0 for name in ALL)
    assert timer.summary().skipped_updates == 0
    assert "_loss_function" not in vars(trainer.model)


@pytest.mark.slow
def test_compiled_model_is_timed_and_not_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # Transformers changes it for good.
    torch._dynamo.reset()
    counters: Any = torch._dynamo.utils.counters
    counters.clear()
    compiles: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager"}
    new([], tmp_path, **compiles)
    graphs = counters["stats"]["unique_graphs"]
    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    trainer = new([timer], tmp_path, **compiles)
    # The loss is inside the compiled code.
    assert {"forward", "backward", "optimizer"} <= set(timer.summary().rows)
    assert 0 < counters["stats"]["unique_graphs"] == graphs
    assert "_loss_function" not in vars(trainer.model)
    torch._dynamo.reset()


def test_items_add_up_over_micro_batches_and_evaluations_are_separate(
    fake: Make, gpu: FakeGPU
) -> None:
    reporter = Reporter()
    timer = TransformersPhaseTimer(
        _clock=gpu,
        warmup_steps=0,
        print_summary=False,
        items=lambda inputs: 5 * len(inputs["x"]),
        flops=2e9,
    )
    trainer = fake(
        [reporter, timer],
        gradient_accumulation_steps=3,
        logging_steps=2,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=4,
    )
    trainer.train()
    summary = timer.summary()
    assert summary.items_per_sec == pytest.approx(15.0 / summary.step.mean_ms * 1e3)
    step_ms = reporter.logs[0]["phase_time/step_ms"]
    assert reporter.logs[0]["phase_time/items_per_sec"] == pytest.approx(15.0 / step_ms * 1e3)
    [log] = [entry for entry in reporter.logs if "eval_loss" in entry]
    step_ms = log["eval_phase_time/step_ms"]
    assert log["eval_phase_time/items_per_sec"] == pytest.approx(5.0 / step_ms * 1e3)


def test_rows_collated_inside_the_step_are_not_counted(gpu: FakeGPU, tmp_path: Path) -> None:
    class Trainer(OwnLoss):
        def _prepare_inputs(self, inputs: Any) -> Any:
            if isinstance(inputs, list):  # As TRL's that generate.
                inputs = transformers.default_data_collator(inputs)
            return super()._prepare_inputs(inputs)

    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    trainer = new([timer], tmp_path, train=False, trainer_class=Trainer)
    trainer.data_collator = list
    trainer.train()
    assert timer.summary().items_per_sec is None


@since_5
def test_resumed_training_continues_the_step_count(tmp_path: Path) -> None:
    new([], tmp_path, save_strategy="steps", save_steps=2, max_steps=4)
    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    new([timer], tmp_path, resume=str(tmp_path / "checkpoint-2"), max_steps=4)
    assert timer.history()["step"].tolist() == [3, 4]


def test_callback_added_before_training_reports(tmp_path: Path) -> None:
    timer, reporter = TransformersPhaseTimer(print_summary=False), Reporter()
    trainer = new([reporter], tmp_path, train=False)
    trainer.add_callback(timer)
    trainer.train()
    assert all(phases(log) for log in reporter.logs[:4])
    trainer.remove_callback(timer)
    trainer.train()
    assert not phases(reporter.logs[-1])
    trainer.evaluate()
    assert not phases(reporter.logs[-1], "eval_phase_time")


def test_callback_added_during_training_reports(fake: Make, timer: TransformersPhaseTimer) -> None:
    class Adds(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                trainer.add_callback(reporter)

    reporter = Reporter()
    trainer = fake([timer, Adds()], logging_steps=1)
    trainer.train()
    assert [phases(log) != {} for log in reporter.logs] == [True] * 3 + [False]


class Own(transformers.Trainer):  # type: ignore[misc]  # has no types
    """A Trainer whose training may raise, or whose loop is overridden."""

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
        loader = self.get_train_dataloader()
        self.create_optimizer()
        self.optimizer: Any = self.accelerator.prepare(self.optimizer)
        self.model_wrapped = self.model
        self.state.global_step = 0
        self.callback_handler.optimizer = self.optimizer
        self.tell("on_train_begin")
        return loader

    def tell(self, event: str) -> None:
        self.state.global_step += event == "on_step_end"
        getattr(self.callback_handler, event)(self.args, self.state, self.control)

    def update(self, batch: Any) -> None:
        self.training_step(self.model_wrapped, batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(
    "place", ["on_epoch_begin", "on_train_end", "log", "prediction_step", "is_removed"]
)
def test_failed_training_leaves_nothing(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if place == "is_removed" and state.global_step == 2:
                trainer.remove_callback(timer)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("mine")

    fails = Fails()
    setattr(fails, place, fail)
    timer = TransformersPhaseTimer(warmup_steps=0)
    trainer = new([timer, fails], tmp_path, False, trainer_class=Own, eval_on_start=True)
    trainer.raises = place
    before, callbacks = hooks_of(trainer.model), [*trainer.callback_handler.callbacks]
    with nullcontext() if place == "is_removed" else pytest.raises(RuntimeError, match="mine"):
        trainer.train()
    assert hooks_of(trainer.model) == before
    assert not {*vars(trainer)} & PATCHED
    assert "on_epoch_begin" not in vars(trainer.callback_handler)
    left = trainer.callback_handler.callbacks
    callbacks.remove(timer)
    assert [item for item in left if item is not timer] == callbacks
    assert left.count(timer) == (place != "is_removed")
    # The training was over, but for another callback.
    assert ("Time per step" in capsys.readouterr().out) == (place == "on_train_end")


def test_custom_loop_that_only_calls_on_step_end_is_timed(
    fake: Make, timer: TransformersPhaseTimer
) -> None:
    class Trainer(Own):
        def train(self) -> None:
            loader = iter(self.begin())
            for _ in range(3):
                batch = next(loader)
                with torch.no_grad():
                    self.model(batch["x"])  # A rollout.
                for _ in range(2):
                    self.update({**batch})
                self.tell("on_step_end")
            self.evaluate()
            for _ in range(2):
                self.update(next(loader))
                self.tell("on_step_end")
            self.tell("on_train_end")

    fake([timer], trainer_class=Trainer).train()
    both = {name: 2 * ms for name, ms in STEP.items()} | {"data": 1.0, "forward": 12.0}
    assert steps(timer) == [both | {"data": 2.0}, both, both, STEP, STEP]
    assert timer.history()["step"].tolist() == [1, 2, 3, 4, 5]


def test_unseen_fetch_is_not_callbacks(fake: Make, timer: TransformersPhaseTimer) -> None:
    class Trainer(Own):
        def train(self) -> None:
            loader = self.begin()
            self.tell("on_epoch_begin")
            for _, batch in zip(range(3), loader, strict=False):
                self.tell("on_step_begin")
                self.update(batch)
                self.tell("on_step_end")
            self.tell("on_epoch_end")
            self.tell("on_train_end")

    fake([timer], trainer_class=Trainer).train()
    assert steps(timer) == [FIRST, STEP, STEP]
    assert "callbacks" not in timer.summary().rows


def test_optimizer_that_is_not_a_torch_optimizer_is_timed(
    fake: Make, timer: TransformersPhaseTimer, gpu: FakeGPU
) -> None:
    class Mine:
        param_groups = ({"lr": 1.0},)

        def step(self) -> None:
            gpu.work(2.0)

    another = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    scheduler = torch.optim.lr_scheduler.LambdaLR(another, lambda _: 1.0)
    fake([timer], optimizers=(Mine(), scheduler)).train()
    assert steps(timer) == [FIRST, STEP, STEP, STEP]


def test_timer_of_nested_trainings_times_the_newest_and_warns(
    fake: Make, timer: TransformersPhaseTimer, caplog: pytest.LogCaptureFixture
) -> None:
    class Trains(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2:
                inner.train()

    inner = fake([timer], max_steps=3)
    fake([timer, Trains()]).train()
    assert timer.history()["step"].tolist() == [1, 2, 3]
    assert "trainer a separate timer" in caplog.text


def test_table_is_printed_after_ctrl_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupts(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        new([TransformersPhaseTimer(warmup_steps=0), Interrupts()], tmp_path)
    assert "Time per step in ms over 3 steps" in capsys.readouterr().out


def test_table_is_printed_once_with_a_progress_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = new([TransformersPhaseTimer(warmup_steps=0)], tmp_path, disable_tqdm=False)
    assert capsys.readouterr().out.count("Time per step in ms") == 1
    trainer.train()
    assert capsys.readouterr().out.count("Time per step in ms") == 1


@pytest.mark.slow
def test_two_ranks_are_compared_in_the_table_and_in_the_log(tmp_path: Path) -> None:
    script = Path(__file__).with_name("huggingface_run.py")
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    printed = run(*ranks, script, tmp_path)
    assert "DistributedDataParallel" in printed
    assert "min - max (rank)" in printed
    assert "\n  comm " in printed
    for name in ("backward/comm", "data/comm", "ranks/slowest_rank"):
        assert f"phase_time/{name}" in printed


def test_trials_and_several_evaluation_sets_are_timed(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 4
    timer, reporter = TransformersPhaseTimer(print_summary=False, warmup_steps=0), Reporter()
    trainer = transformers.Trainer(
        model_init=lambda trial: gpt(),
        args=options(tmp_path, eval_strategy="epoch", max_steps=-1, num_train_epochs=2),
        train_dataset=rows,
        eval_dataset={"one": rows, "two": rows},
        callbacks=[reporter, timer],
    )
    for _ in range(2):
        reporter.logs.clear()
        trainer.train()
        for name in ("one", "two"):
            logs = [log for log in reporter.logs if f"eval_{name}_loss" in log]
            assert [entry["at"] for entry in logs] == [4, 8]
            assert all(phases(item, f"eval_{name}_phase_time")["forward"] > 0 for item in logs)
        assert timer.history()["step"].tolist() == [*range(1, 9)]


def test_batch_size_that_is_too_large_starts_a_new_measurement(tmp_path: Path) -> None:
    class TooLarge(transformers.Trainer):  # type: ignore[misc]  # has no types
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self._train_batch_size > 2 and self.state.global_step == 1:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    new(
        [timer],
        tmp_path,
        trainer_class=TooLarge,
        auto_find_batch_size=True,
        per_device_train_batch_size=4,
    )
    assert timer.history()["step"].tolist() == [1, 2, 3, 4]


def test_copy_of_a_timed_model_keeps_its_own_loss(
    tmp_path: Path,
) -> None:
    found: list[Any] = []

    class Copies(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            found.append(copy.deepcopy(model))
            found.append(pickle.loads(pickle.dumps(model)))

    trainer = new([TransformersPhaseTimer(print_summary=False), Copies()], tmp_path, max_steps=1)
    for entry in found:
        assert entry.loss_function is trainer.model.loss_function


def test_timer_without_a_trainer_warns_once_and_times_nothing(
    fake: Make, timer: TransformersPhaseTimer, caplog: pytest.LogCaptureFixture
) -> None:
    class Among(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        """Passes on what it hears, so that the timer is no callback of the Trainer's."""

        def __getattribute__(self, name: str) -> Any:
            return (
                getattr(timer, name) if name.startswith("on_") else super().__getattribute__(name)
            )

    reporter = Reporter()
    trainer = fake([Among(), reporter], logging_steps=1, eval_strategy="steps", eval_steps=2)
    before = hooks_of(trainer.model)
    trainer.train()
    assert not len(timer.history())
    assert hooks_of(trainer.model) == before
    assert not any("phase_time" in key for log in reporter.logs for key in log)
    trainer.train()
    assert caplog.text.count("No Trainer was found") == 1


def test_trainer_class_is_restored(tmp_path: Path) -> None:
    class Mine(transformers.Trainer):  # type: ignore[misc]  # has no types
        def train(self, *args: Any, **kwargs: Any) -> Any:
            return super(self.__class__, self).train(*args, **kwargs)

        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().prediction_step(*args, **kwargs)

    def methods() -> list[Any]:
        names = ("train", "get_batch_samples", "evaluation_loop", "prediction_step")
        return [vars(cls).get(name) for cls in Mine.__mro__[:2] for name in names]

    gc.collect()
    before = methods()
    assert not any(map(is_patched, before))
    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    # Trainers share it; after a training it contains objects that cannot be pickled.
    accelerate.state.GradientState._reset_state()
    plain = new([timer], tmp_path, train=False)
    assert type(pickle.loads(pickle.dumps(plain))) is type(plain) is transformers.Trainer
    trainer = new([timer], tmp_path, trainer_class=Mine, eval_strategy="steps", eval_steps=2)
    assert type(trainer) is Mine
    assert timer.history()["step"].tolist() == [1, 2, 3, 4]
    # Each call is reported once, although a method calls that of its base class.
    assert [evaluation["stage"] for evaluation in timer._run().evaluations] == ["eval", "eval"]
    trainer.remove_callback(timer)
    plain.remove_callback(timer)
    del plain, trainer, timer
    gc.collect()
    assert methods() == before


def test_transformers_advice_names_the_collator(
    fake: Make, timer: TransformersPhaseTimer, gpu: FakeGPU
) -> None:
    trainer = fake([timer])
    collate = trainer.data_collator

    def slow(batch: Any) -> Any:
        gpu.host_work(50.0)
        return collate(batch)

    trainer.data_collator = slow
    trainer.train()
    summary = timer.summary()
    assert summary.verdict.startswith("input-bound")
    line = slow.__code__.co_firstlineno
    assert re.fullmatch(
        rf"`slow` \(test_huggingface.py:{line}\) takes [0-9.]+ ms of [0-9.]+ ms per step:"
        r" set dataloader_num_workers=\d \(now 0\), or make it faster",
        summary.advice[0],
    )


def test_each_callback_event_is_a_sub_phase(
    fake: Make, gpu: FakeGPU, timer: TransformersPhaseTimer
) -> None:
    class Works(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            gpu.work(0.25)

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            gpu.work(0.125)

    class Logs(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_log(self, *_: Any, **__: Any) -> None:
            gpu.work(0.5)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    works, logs = Works(), cast("Any", Logs())
    logs.on_step_end = lambda *_, **__: gpu.work(1.0)  # One on the object wins.
    trainer = fake([works, timer, logs], max_steps=3, logging_steps=1)
    trainer.train()
    row = timer.history()[1]
    found = {name: row[f"{name}_ms"] for name in timer.summary().rows if "callbacks" in name}
    assert found.pop("callbacks/PrinterCallback.on_log") == 0
    assert found == {
        "callbacks": 1.875,
        "callbacks/Works.on_step_begin": 0.25,
        "callbacks/Works.on_pre_optimizer_step": 0.125,
        "callbacks/Logs.on_step_end": 1.0,
        "callbacks/Logs.on_log": 0.5,
    }
    assert {name: row[f"{name}_ms"] for name in STEP} == STEP
    assert [*vars(logs)] == ["on_step_end"]
    assert not vars(works)


@since_5
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_time_breakdown_covers_training_and_evaluations(
    fake: Make, gpu: FakeGPU, timer: TransformersPhaseTimer, strategy: str, tmp_path: Path
) -> None:
    class Takes(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            gpu.host_work(7.0)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            gpu.host_work(10.0)

    def compute(_: Any) -> dict[str, float]:
        gpu.host_work(100.0)
        return {}

    class Saves(transformers.Trainer):  # type: ignore[misc]  # has no types
        def _save_checkpoint(self, *_: Any, **__: Any) -> None:
            gpu.host_work(30.0)

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            begin = gpu.now
            found = super().evaluate(*args, **kwargs)
            evaluations_ms.append((gpu.now - begin) / 1e6)
            return found

    evaluations_ms = list[float]()
    own = {"max_steps": -1, "num_train_epochs": 2} if strategy == "epoch" else {"max_steps": 4}
    trainer = fake(
        [timer, Takes()],
        trainer_class=Saves,
        train_dataset=[0] * 3,
        compute_metrics=compute,
        eval_strategy=strategy,
        eval_steps=2,
        save_strategy=strategy,
        save_steps=2,
        eval_on_start=True,
        logging_strategy="no",
        **own,
    )
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
    line = compute.__code__.co_firstlineno
    told = f"`compute` (test_huggingface.py:{line}) takes 300 ms of {sum(evaluations_ms):.0f} ms"
    assert breakdown.rows[0].advice[0].text == f"{told}: make it faster"
    assert breakdown["checkpoints"].share == pytest.approx(60.0 / sum(entries_ms.values()))


def test_checkpoint_has_one_name_in_the_breakdown_and_in_the_phases(
    fake: Make, timer: TransformersPhaseTimer, gpu: FakeGPU
) -> None:
    class Saves(transformers.Trainer):  # type: ignore[misc]  # has no types
        def _save_checkpoint(self, *_: Any, **__: Any) -> None:
            gpu.host_work(30.0)

    own = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "no", "max_steps": 6}
    fake([timer], trainer_class=Saves, **own).train()
    summary = timer.summary()
    assert summary.time_breakdown is not None
    # The call after the last step is in no step.
    assert summary.time_breakdown["checkpoints"].seconds == pytest.approx(0.09)
    assert summary.rows["callbacks/checkpoints"].n == 2
    # While the host saves, the GPU ends the step, which takes it 15.5 ms.
    assert timer.history()["callbacks/checkpoints_ms"].tolist()[2::2] == [30.0 - 15.5] * 2
    assert "\n  checkpoints " in str(summary)


@pytest.mark.slow
def test_missing_transformers_is_named_and_lightning_is_not_imported() -> None:
    assert "pip install transformers accelerate" in run(
        "-c",
        "import sys; sys.modules['transformers'] = None\n"
        "try: import lightning_gputime.huggingface\n"
        "except ImportError as error: print(error)",
    )
    imported = "import sys, lightning_gputime.huggingface; print('lightning' in sys.modules)"
    assert run("-c", imported).strip() == "False"


def test_wrong_timer_error_names_the_right_timer(fake: Make, gpu: FakeGPU) -> None:
    model, own = nn.Linear(1, 1), cast("Any", TransformersPhaseTimer())
    for timer in (GPUPhaseTimer(), GPUPhaseHooks(model)):
        with pytest.raises(AttributeError) as error:
            fake([timer])
        assert HOMES in str(error.value)
    with pytest.raises(TypeError, match=r"huggingface\.TransformersPhaseTimer\(\)\]\)"):
        GPUPhaseHooks(fake([]))
    # Before 2.6 Lightning itself refuses callbacks of other libraries.
    with pytest.raises((AttributeError, ValueError)) as refusal:
        pl_trainer(own).fit(Model(gpu), Loader(gpu, 1))
    assert isinstance(refusal.value, ValueError) or HOMES in str(refusal.value)


def test_model_that_is_not_a_module_warns_and_trains(
    timer: TransformersPhaseTimer, caplog: pytest.LogCaptureFixture
) -> None:
    class Runs:
        """A trainer that derives from no Trainer, and whose model is no module, as SetFit's."""

        def train(self) -> str:
            args, state, control = Mock(), Mock(), Mock()
            for event in ("on_train_begin", "on_step_begin", "on_step_end", "on_train_end"):
                getattr(timer, event)(args, state, control, model=object(), optimizer=None)
            return "trained"

    assert Runs().train() == "trained"
    assert "No Trainer was found" in caplog.text


@since_5
@pytest.mark.parametrize("how", ["callbacks=", "add_callback"])
def test_each_training_has_its_set_up_and_its_tear_down(
    fake: Make, gpu: FakeGPU, timer: TransformersPhaseTimer, how: str
) -> None:
    class Slow(transformers.Trainer):  # type: ignore[misc]  # has no types
        def get_train_dataloader(self) -> Any:
            gpu.host_work(70.0)
            return super().get_train_dataloader()

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_train_end(self, *_: Any, **__: Any) -> None:
            gpu.host_work(30.0)

    trainer = fake([Ends()] + [timer] * (how == "callbacks="), trainer_class=Slow)
    if how == "add_callback":
        trainer.add_callback(timer)
    for _ in range(2):
        begin = gpu.now
        trainer.train()
        wall_clock = timer.summary().wall_clock
        assert wall_clock is not None
        entries_s = wall_clock.entries_s
        assert entries_s["set-up"] >= 0.07
        assert entries_s["tear-down"] >= 0.03
        assert sum(entries_s.values()) == pytest.approx((gpu.now - begin) / 1e9)
    # A Trainer that the timer does not belong to is not its.
    trainer.remove_callback(timer)
    trainer.train()
    assert timer.summary().wall_clock == wall_clock


class WithMark(transformers.Trainer):  # type: ignore[misc]  # has no types
    """A Trainer whose `train` has an attribute."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        return super().train(*args, **kwargs)

    train.mark = "mine"  # type: ignore[attr-defined]  # on purpose


def test_train_method_keeps_its_identity_before_training(tmp_path: Path) -> None:
    timer = TransformersPhaseTimer(print_summary=False)
    trainer = new([timer], tmp_path, False, trainer_class=WithMark)
    for function in (WithMark.train, transformers.Trainer.train):
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is function
    assert vars(WithMark.train)["mark"] == "mine"
    assert (WithMark.train.__name__, WithMark.train.__qualname__) == ("train", "WithMark.train")
    assert "resume_from_checkpoint" in inspect.signature(transformers.Trainer.train).parameters
    trainer.remove_callback(timer)
    del timer, trainer
    gc.collect()
    assert not is_patched(WithMark.train)
    assert not is_patched(transformers.Trainer.train)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda timer: pickle.loads(pickle.dumps(timer))])
def test_copy_of_an_attached_timer_is_detached(tmp_path: Path, how: Callable[[Any], Any]) -> None:
    class Copies(transformers.TrainerCallback):  # type: ignore[misc]  # has no types
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2:
                copies.append(how(timer))

    copies: list[Any] = []
    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    trainer = new([timer, Copies()], tmp_path)
    [twin] = copies
    assert timer.history()["step"].tolist() == [1, 2, 3, 4]
    assert len(twin.history()) <= 2
    assert not twin._session.is_attached
    twin.on_step_end(trainer.args, trainer.state)  # Raises nothing, and times nothing.
    assert len(twin.history()) <= 2
    again = new([twin], tmp_path)
    assert again.state.global_step == 4
    assert twin.history()["step"].tolist() == [1, 2, 3, 4]


def test_later_patch_of_train_is_called(tmp_path: Path, monkeypatch: Any) -> None:
    class Inherits(transformers.Trainer):  # type: ignore[misc]  # has no types
        pass

    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    trainer = new([timer], tmp_path, False, trainer_class=Inherits)
    train, calls = transformers.Trainer.train, []

    def logged(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return train(self, *args, **kwargs)

    monkeypatch.setattr(transformers.Trainer, "train", logged)
    trainer.train()
    assert (calls, timer.summary().steps) == ([1], 4)


def test_training_without_on_train_end_leaves_nothing(tmp_path: Path) -> None:
    class Returns(Own):
        def train(self) -> None:
            for batch in self.begin():
                self.tell("on_step_begin")
                self.model(**batch)["loss"].backward()
                self.optimizer.step()
                self.tell("on_step_end")

    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    trainer = new([timer], tmp_path, False, trainer_class=Returns)
    before = hooks_of(trainer.model)
    trainer.train()
    assert hooks_of(trainer.model) == before
    assert not {*vars(trainer)} & PATCHED
