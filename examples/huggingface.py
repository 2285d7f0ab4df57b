"""Time the phases of Hugging Face's Trainer on a tiny model with random weights.

python -m pip install -e ".[examples,huggingface]" && python examples/huggingface.py
"""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_gputime.huggingface import TransformersPhaseTimer


def main(max_steps: int = 50, output_dir: str = "trainer_output") -> TransformersPhaseTimer:
    """Train, and return the timer."""
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=64)
    tokens = torch.randint(0, 256, (256, 64))
    options: dict[str, Any] = {"report_to": ["tensorboard"], "save_strategy": "no"}
    if not torch.cuda.is_available():
        options["dataloader_pin_memory"] = False
    arguments = TrainingArguments(
        output_dir,
        max_steps=max_steps,
        logging_steps=10,
        gradient_accumulation_steps=2,
        disable_tqdm=True,
        **options,
    )
    timer = TransformersPhaseTimer()
    Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[timer],
    ).train()
    return timer


if __name__ == "__main__":
    main()
