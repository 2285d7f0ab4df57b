"""Times the phases of Hugging Face's Trainer, on a tiny model with random weights.

python -m pip install transformers accelerate && python examples/huggingface.py
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from lightning_gputime import GPUPhaseHooks, phase


class PhaseTimes(TrainerCallback):
    """Times each update of the Trainer."""

    timer: GPUPhaseHooks

    def on_train_begin(self, *_: Any, **objects: Any) -> None:
        self.timer = GPUPhaseHooks(objects["model"], objects["optimizer"]).attach()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.timer.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.timer.remove()
        print(self.timer.summary())


def loss_of(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
    """Returns the loss; named, because the Trainer gives no other sign of it."""
    with phase("loss"):
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def main(max_steps: int = 50, output_dir: str = "trainer_output") -> GPUPhaseHooks:
    """Trains, and returns the timer with what it measured."""
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=64)
    tokens = torch.randint(0, 256, (256, 64))
    options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    if not torch.cuda.is_available():
        options["dataloader_pin_memory"] = False
    arguments = TrainingArguments(
        output_dir, max_steps=max_steps, gradient_accumulation_steps=2, **options
    )
    callback = PhaseTimes()
    Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        compute_loss_func=loss_of,
        callbacks=[callback],
    ).train()
    return callback.timer


if __name__ == "__main__":
    main()
