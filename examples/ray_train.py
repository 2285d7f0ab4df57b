"""Time the phases on each Ray Train worker, and report them to Ray.

python -m pip install "ray[train]" && python examples/ray_train.py
"""

import tempfile
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import GPUPhaseHooks


def train(config: dict[str, Any]) -> None:
    """Train on one worker. Ray calls this with the dict `train_loop_config`."""
    model = prepare_model(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of = nn.CrossEntropyLoss()
    data = TensorDataset(torch.randn(1024, 64), torch.randint(10, (1024,)))
    loader = prepare_data_loader(DataLoader(data, batch_size=64))
    # Ray has already created the process group, so the timer compares ranks.
    with GPUPhaseHooks(model, optimizer, device=get_device()) as timer:
        for _ in range(config["max_epochs"]):
            for x, y in timer.steps(loader):
                loss = loss_of(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    metrics = {f"phase_time/{name}_ms": row.mean_ms for name, row in timer.summary().rows.items()}
    # All workers must report. Ray keeps the metrics and the checkpoint of the first worker.
    with tempfile.TemporaryDirectory() as folder:
        timer.save(f"{folder}/run.json.gz")
        is_first = ray.train.get_context().get_world_rank() == 0
        ray.train.report(metrics, Checkpoint.from_directory(folder) if is_first else None)
    if is_first:
        print(timer.summary())


def main(max_epochs: int = 2, workers: int = 2, storage: str | None = None) -> dict[str, Any]:
    """Train, and return the last metrics of the first worker."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"max_epochs": max_epochs},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=storage or tempfile.mkdtemp()),
    )
    return dict(trainer.fit().metrics or {})


if __name__ == "__main__":
    print(main())
