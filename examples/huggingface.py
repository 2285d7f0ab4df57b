"""Times the phases of Hugging Face's Trainer, through a callback of ten lines.

Trains a tiny language model with random weights, so nothing is downloaded:

    python -m pip install transformers accelerate
    python examples/huggingface.py
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from lightning_gputime import GPUPhaseHooks, phase


class PhaseTimes(TrainerCallback):
    """Attaches a timer while the Trainer trains; a step is one update, however it accumulates."""

    timer: GPUPhaseHooks

    def on_train_begin(self, *_: Any, **objects: Any) -> None:
        """Attaches the timer."""
        self.timer = GPUPhaseHooks(objects["model"], objects["optimizer"]).attach()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Ends a step."""
        self.timer.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Takes the timer off."""
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
    callback = PhaseTimes()
    Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir,
            max_steps=max_steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        compute_loss_func=loss_of,
        callbacks=[callback],
    ).train()
    return callback.timer


if __name__ == "__main__":
    main()
