"""Train with Hugging Face's Trainer under torchrun on the CPU, and print the logged keys."""

import sys
from pathlib import Path

import torch
from fake_loop import training_arguments
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from lightning_gputime.huggingface import TransformersPhaseTimer


def main(folder: Path) -> None:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=64)
    tokens = torch.randint(0, 256, (128, 64))
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = Trainer(
        GPT2LMHeadModel(config),
        training_arguments(folder, max_steps=24, logging_steps=10, ddp_backend="gloo", **batches),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[TransformersPhaseTimer(warmup_steps=10, log="all")],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(type(trainer.model_wrapped).__name__)
        print(*sorted({key for logs in trainer.state.log_history for key in logs}), sep="\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
