"""Text generation by a model of transformers inside a step, and its rewards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGPU, steps
from fake_loop import training_arguments
from torch import Tensor, nn

transformers: Any = pytest.importorskip("transformers")

from lightning_gputime import GPUPhaseHooks, phase  # noqa: E402
from lightning_gputime.huggingface import TransformersPhaseTimer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Transformers warns.
    pytest.mark.usefixtures("one_thread"),
]

CALL_MS, TOKENS = 0.5, 4  # Time of a model call, and tokens per generated text.
GENERATE_MS = TOKENS * CALL_MS
PROMPT = torch.zeros(1, 2, dtype=torch.long)


class Gpt(transformers.GPT2LMHeadModel):  # type: ignore[misc]  # has no types
    """A language model whose calls take 0.5 ms on the fake GPU."""

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
    text: Tensor = model.generate(PROMPT, do_sample=False, pad_token_id=0, **length)
    return text


class GeneratingModel(nn.Module):
    """A model whose `forward` generates."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu, self.inner = gpu, Gpt(gpu)

    def forward(self, prompt: Tensor) -> Any:
        return self.inner(generate(self.inner))


def phases(timer: Any) -> list[dict[str, float]]:
    """Return the phases that took time in each step."""
    return [{name: ms for name, ms in step.items() if ms} for step in steps(timer)]


def train(
    model: Any,
    rollout: Callable[[int], object] = lambda number: None,
    n: int = 24,
    after_forward: Callable[[], object] = lambda: None,
    **options: Any,
) -> list[dict[str, float]]:
    """Train on steps of a rollout, 0.25 ms of other work, and one call of the model."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = dict(vars(transformers.GenerationMixin))
    options = {"_clock": model.gpu, "warmup_steps": 0, "lines": False, **options}
    with GPUPhaseHooks(model, optimizer, **options) as timer:
        for number in timer.steps(range(n)):
            rollout(number)
            model.gpu.work(0.25)
            loss = model(PROMPT).logits.sum()
            after_forward()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert dict(vars(transformers.GenerationMixin)) == before
    found = phases(timer)
    assert [sum(step.values()) for step in found] == timer.history()["step_ms"].tolist()
    return found


@pytest.fixture
def model(gpu: FakeGPU) -> Gpt:
    return Gpt(gpu)


def generate_in_eval_mode(model: Gpt, calls: int = 1) -> None:
    model.eval()
    for _ in range(calls):
        generate(model)
    model.train()


STEP = {"other": 0.25, "forward": CALL_MS}


def generate_in_a_named_phase(model: Gpt) -> None:
    with phase("rollout"):
        generate(model)


def generate_and_raise(model: Gpt) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(PROMPT, max_new_tokens=-1)


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        (generate, {**STEP, "generate": GENERATE_MS}),
        (generate_in_eval_mode, {**STEP, "generate": GENERATE_MS}),
        # The named phase has a model call, so the time until the next call is `forward`.
        (generate_in_a_named_phase, {"rollout": GENERATE_MS, "forward": CALL_MS + 0.25}),
        (generate_and_raise, STEP),
    ],
)
def test_generation_in_each_step_is_generate_or_its_named_phase(
    model: Gpt, rollout: Callable[[Gpt], object], expected: dict[str, float]
) -> None:
    assert train(model, lambda _: rollout(model)) == [expected] * 24


def test_generation_inside_a_model_call_is_forward(gpu: FakeGPU) -> None:
    assert train(GeneratingModel(gpu)) == [{**STEP, "forward": GENERATE_MS + CALL_MS}] * 24


def test_generation_after_the_model_call_interrupts_the_loss(model: Gpt) -> None:
    def compute_baseline() -> None:
        model.gpu.work(0.5)
        generate(model)
        model.gpu.work(0.125)

    found = train(model, after_forward=compute_baseline)
    assert found == [{**STEP, "loss": 0.625, "generate": GENERATE_MS}] * 24


def test_validation_that_generates_is_in_no_step(model: Gpt) -> None:
    def validate(number: int) -> None:
        if number in (5, 20):
            generate_in_eval_mode(model, calls=5)

    assert train(model, validate) == [STEP] * 24


def test_generation_class_is_patched_once(model: Gpt) -> None:
    methods = set[object]()
    original = transformers.GenerationMixin.generate

    def rollout(_: int) -> None:
        methods.add(transformers.GenerationMixin.generate)
        generate(model)

    found = train(model, rollout, n=150, sync_ranks=False, every_n_steps=50)
    assert found == [{**STEP, "generate": GENERATE_MS}] * 3
    assert len(methods) == 1
    assert transformers.GenerationMixin.generate is original
    assert original not in methods


class Engine:
    """An engine that generates in other processes, like vLLM."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu

    def generate(self) -> None:
        self.gpu.work(3.0)


@pytest.mark.parametrize("has_vllm", [False, True])
def test_trainer_times_generation_and_rewards(model: Gpt, tmp_path: Path, has_vllm: bool) -> None:
    gpu = model.gpu

    class Trainer(transformers.Trainer):  # type: ignore[misc]  # has no types
        """A Trainer like TRL's."""

        def log(self, *args: Any, **kwargs: Any) -> None:
            gpu.now = max(gpu.now, gpu.free_at)  # Reading the loss has synchronized the host.
            super().log(*args, **kwargs)

        def _calculate_rewards(self) -> None:
            gpu.work(1.0)

        def _prepare_inputs(self, inputs: Any) -> Any:
            self.vllm_generation.generate() if has_vllm else generate(self.model)
            self._calculate_rewards()
            gpu.work(0.25)
            return super()._prepare_inputs(inputs)

    timer = TransformersPhaseTimer(_clock=gpu, warmup_steps=0, print_summary=False)
    row = {"input_ids": PROMPT[0], "labels": PROMPT[0]}
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "logging_steps": 1}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "remove_unused_columns": False}
    arguments = training_arguments(tmp_path, **options)
    data: dict[str, Any] = {"train_dataset": [row] * 20, "eval_dataset": [row] * 8}
    trainer = Trainer(model, arguments, **data, callbacks=[timer])
    trainer.vllm_generation = Engine(gpu)
    before = dict(vars(transformers.GenerationMixin))
    trainer.train()
    assert "_calculate_rewards" not in vars(trainer)
    assert "generate" not in vars(trainer.vllm_generation)
    assert dict(vars(transformers.GenerationMixin)) == before
    micro_batch = {"generate": 3.0 if has_vllm else GENERATE_MS, "reward": 1.0, "forward": CALL_MS}
    twice = {name: 2 * ms for name, ms in micro_batch.items()}
    assert phases(timer) == [{**twice, "other": 0.5}] * 4
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["phase_time/reward_ms"] for log in logs] == [2.0] * 4
    evaluations = timer._run().evaluations
    assert len(evaluations) == 2
    for evaluation in evaluations:
        assert evaluation["generate_ms"] == micro_batch["generate"]
        assert evaluation["reward_ms"] == 1.0
