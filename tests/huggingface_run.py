"""Train with Hugging Face's Trainer under torchrun on the CPU, and print the logged keys."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_gputime.huggingface import TransformersPhaseTimer


def main(folder: str) -> None:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=64)
    tokens = torch.randint(0, 256, (128, 64))
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            folder,
            max_steps=24,
            logging_steps=10,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo",
            dataloader_pin_memory=False,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[TransformersPhaseTimer(warmup_steps=10, log="all")],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(type(trainer.model_wrapped).__name__)
        print(*sorted({key for logs in trainer.state.log_history for key in logs}), sep="\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
