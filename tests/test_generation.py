"""Text that a model of transformers generates inside a step, and what is made of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGPU, steps
from torch import Tensor, nn

transformers: Any = pytest.importorskip("transformers")

from lightning_gputime import GPUPhaseHooks, phase  # noqa: E402
from lightning_gputime.huggingface import TransformersPhaseTimer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    pytest.mark.usefixtures("one_thread"),
]

CALL_MS, TOKENS = 0.5, 4
GENERATE_MS = TOKENS * CALL_MS
KEYS = torch.zeros(1, 2, dtype=torch.long)


class Gpt(transformers.GPT2LMHeadModel):  # type: ignore[misc]  # has no types
    """A language model each of whose calls takes 0.5 ms on the fake GPU."""

    def __init__(self, gpu: FakeGPU) -> None:
        torch.manual_seed(0)
        sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 8, "n_positions": 16}
        super().__init__(transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes))
        self.gpu = gpu

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.gpu.work(CALL_MS)
        return super().forward(*args, **kwargs)


def generate(model: Any) -> Tensor:
    length = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    text: Tensor = model.generate(KEYS, do_sample=False, pad_token_id=0, **length)
    return text


class Around(nn.Module):
    """A model whose `forward` generates."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.inner = Gpt(gpu)

    def forward(self, keys: Tensor) -> Any:
        return self.inner(generate(self.inner))


def train(model: nn.Module, gpu: FakeGPU, rollout: Callable[[int], Any]) -> list[dict[str, float]]:
    """Trains for 24 steps, each of a rollout, 0.25 ms of other work, and one call of the model."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = dict(vars(transformers.GenerationMixin))
    with GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0) as timer:
        for number in timer.steps(range(24)):
            rollout(number)
            gpu.work(0.25)
            loss = model(KEYS).logits.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert dict(vars(transformers.GenerationMixin)) == before
    found = steps(timer)
    assert [sum(item.values()) for item in found] == timer.history()["step_ms"].tolist()
    return [{name: ms for name, ms in entry.items() if ms} for entry in found]


def eval_mode(model: nn.Module, calls: int = 1) -> None:
    model.eval()
    for _ in range(calls):
        generate(model)
    model.train()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_generation_in_each_step_is_generate(gpu: FakeGPU, mode: str) -> None:
    model = Gpt(gpu)
    found = train(model, gpu, lambda _: eval_mode(model) if mode == "eval" else generate(model))
    assert found == [{"generate": GENERATE_MS, "other": 0.25, "forward": CALL_MS}] * 24


def test_generation_inside_a_named_phase_belongs_to_that_phase(gpu: FakeGPU) -> None:
    model = Gpt(gpu)

    def rollout(_: int) -> None:
        with phase("rollout"):
            generate(model)

    found = train(model, gpu, rollout)
    # As after any model call inside it: the time until the next call is between two calls.
    assert found == [{"rollout": GENERATE_MS, "forward": CALL_MS + 0.25}] * 24


def test_generation_inside_a_model_call_is_forward(gpu: FakeGPU) -> None:
    found = train(Around(gpu), gpu, lambda _: None)
    assert found == [{"other": 0.25, "forward": GENERATE_MS + CALL_MS}] * 24


def test_generation_after_the_model_call_splits_the_loss(gpu: FakeGPU) -> None:
    model = Gpt(gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0) as timer:
        for _ in timer.steps(range(3)):
            logits = model(KEYS).logits
            gpu.work(0.25)
            generate(model)  # As a baseline that a reward is compared with.
            gpu.work(0.125)
            logits.sum().backward()
    rows = [{name: ms for name, ms in step.items() if ms} for step in steps(timer)]
    assert rows == [{"forward": CALL_MS, "loss": 0.375, "generate": GENERATE_MS}] * 3


def test_validation_that_generates_is_in_no_step(gpu: FakeGPU) -> None:
    model = Gpt(gpu)
    found = train(model, gpu, lambda number: eval_mode(model, 5) if number in (5, 20) else None)
    assert found == [{"other": 0.25, "forward": CALL_MS}] * 24


def test_generation_that_raises_ends_its_phase(gpu: FakeGPU) -> None:
    model = Gpt(gpu)

    def rollout(_: int) -> None:
        with pytest.raises(ValueError, match="max_new_tokens"):
            model.generate(KEYS, max_new_tokens=-1)

    assert train(model, gpu, rollout) == [{"other": 0.25, "forward": CALL_MS}] * 24


def test_untimed_steps_leave_the_generation_class_unpatched(gpu: FakeGPU) -> None:
    model, patched = Gpt(gpu), list[bool]()
    original = transformers.GenerationMixin.generate

    def rollout(number: int) -> None:
        patched.append(transformers.GenerationMixin.generate is not original)
        generate(model)

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with GPUPhaseHooks(
        model, optimizer, _clock=gpu, warmup_steps=0, sync_ranks=False, every_n_steps=50
    ) as timer:
        for number in timer.steps(range(150)):
            rollout(number)
            model(KEYS).logits.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step["generate"] for step in steps(timer)] == [GENERATE_MS] * 3
    assert not all(patched[30:])


class Engine:
    """An engine that generates in other processes, like vLLM."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu

    def generate(self) -> None:
        self.gpu.work(3.0)


@pytest.mark.parametrize("engine", [False, True])
def test_trainer_times_generation_and_rewards(gpu: FakeGPU, tmp_path: Path, engine: bool) -> None:
    class Trainer(transformers.Trainer):  # type: ignore[misc]  # has no types
        """As TRL's."""

        def log(self, *args: Any, **kwargs: Any) -> None:
            gpu.now = max(gpu.now, gpu.free_at)  # It has just read the loss.
            super().log(*args, **kwargs)

        def _calculate_rewards(self) -> None:
            gpu.work(1.0)

        def _prepare_inputs(self, inputs: Any) -> Any:
            generate(self.model) if not engine else self.vllm_generation.generate()
            self._calculate_rewards()
            gpu.work(0.25)
            return super()._prepare_inputs(inputs)

    model, timer = Gpt(gpu), TransformersPhaseTimer(_clock=gpu, warmup_steps=0, print_summary=False)
    row = {"input_ids": KEYS[0], "labels": KEYS[0]}
    trainer = Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path),
            max_steps=4,
            remove_unused_columns=False,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
        ),
        train_dataset=[row] * 20,
        eval_dataset=[row] * 8,
        callbacks=[timer],
    )
    trainer.vllm_generation = Engine(gpu)
    before = dict(vars(transformers.GenerationMixin))
    trainer.train()
    assert "_calculate_rewards" not in vars(trainer)
    assert "generate" not in vars(trainer.vllm_generation)
    assert dict(vars(transformers.GenerationMixin)) == before
    micro_batch = {"generate": 3.0 if engine else GENERATE_MS, "reward": 1.0, "forward": CALL_MS}
    found = [{name: ms for name, ms in step.items() if ms} for step in steps(timer)]
    assert found == [{**{name: 2 * ms for name, ms in micro_batch.items()}, "other": 0.5}] * 4
    assert [log["phase_time/reward_ms"] for log in trainer.state.log_history if "loss" in log] == [
        2.0
    ] * 4
    evaluations = timer._run().evaluations
    assert len(evaluations) == 2
    for evaluation in evaluations:
        assert evaluation["generate_ms"] == micro_batch["generate"]
        assert evaluation["reward_ms"] == 1.0
