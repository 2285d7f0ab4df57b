"""Programs for one GPU, with one planted problem each. Steps take 3 to 40 ms on an H100."""

import copy
import tempfile
from functools import partial
from typing import Any

import numpy as np
import projects as base
import torch
import torch.nn.functional as F  # noqa: N812
from projects import DEVICE, HOST, INPUT, LAUNCHES, OUTSIDE, Classifier, Net, Run, Setup
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


def accuracy_in_numpy(logits: Tensor, targets: Tensor) -> Any:
    guesses = logits.cpu().numpy().argmax(-1)
    return (guesses == targets.cpu().numpy()).mean()


def accuracy_on_device(logits: Tensor, targets: Tensor) -> Any:
    return (logits.argmax(-1) == targets).float().mean()


class BlockByHand(base.Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


class CheckpointedBlock(base.Block):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def release_memory(*_: Any) -> None:
    torch.cuda.empty_cache()


def save_checkpoint(step: int, loss: Tensor, model: Any, optimizer: Any) -> None:
    if step % 10 == 9:
        with tempfile.TemporaryFile() as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)


@torch.no_grad()
def estimate_loss(step: int, loss: Tensor, model: Any, optimizer: Any) -> Any:
    losses = []
    for _ in range(20 if step % 5 == 4 else 0):
        tokens = torch.randint(64, (16, 257), device=loss.device)
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
    return losses and np.mean(losses)


class GradientNorms(base.TrainerCallback):
    """Records statistics of each gradient."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.norms = {}
        for name, weight in parts["model"].named_parameters():
            g = weight.grad
            self.norms[name] = g.norm().item(), g.abs().max().item(), g.mean().item()


def one_hot_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    logits = outputs.logits.float()
    targets = F.one_hot(labels, logits.shape[-1]).float() * 0.9 + 0.1 / logits.shape[-1]
    return -(targets * logits.log_softmax(-1)).sum(-1).mean()


def smoothed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def pad_by_token(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tokens = torch.zeros(len(rows), max(len(row["input_ids"]) for row in rows)).long()
    for i, row in enumerate(rows):
        for j, token in enumerate(row["input_ids"].tolist()):
            tokens[i, j] = token
    return {"input_ids": tokens, "labels": tokens}


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tokens = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": tokens, "labels": tokens}


class LogsGradients(Classifier):
    """Classifier that keeps histograms of its gradients."""

    def on_after_backward(self) -> None:
        if self.planted or self.global_step % 100 == 0:
            grads = [weight.grad for weight in self.parameters() if weight.grad is not None]
            self.histograms = [np.histogram(grad.cpu().numpy(), bins=64) for grad in grads]


class Augments(Classifier):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        images, labels = batch
        return (base.augment_each if self.planted else base.augment_all)(images), labels


def train_patches(setup: Setup) -> Run:
    """Train a shallow network on batches in memory, which only the clean variant pins."""
    layers = [nn.Conv2d(3, 768, 16, stride=16), nn.GELU(), nn.Conv2d(768, 768, 1), nn.GELU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)).to(setup.device)
    images = torch.rand(setup.size(256, 2), 3, setup.size(224, 32), setup.size(224, 32))
    rows: Any = [images if setup.planted or setup.small else images.pin_memory()] * setup.steps

    def loss_of(images: Tensor) -> Any:
        images = images.to(setup.device, non_blocking=True)  # line: copy
        return model(images).square().mean()

    return base.train(setup, model, DataLoader(rows, batch_size=None), loss_of)


class EMA:
    """Averages of the weights at three rates."""

    def __init__(self, model: nn.Module) -> None:
        self.averages = {rate: copy.deepcopy(model) for rate in (0.99, 0.999, 0.9999)}

    @torch.no_grad()
    def update(self, step: int, loss: Tensor, model: nn.Module, optimizer: Any) -> None:
        for rate, average in self.averages.items():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(rate).add_(weight, alpha=1 - rate)

    @torch.no_grad()
    def update_all(self, step: int, loss: Tensor, model: nn.Module, optimizer: Any) -> None:
        for rate, average in self.averages.items():
            torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 1 - rate)


class SpeechEncoder(Net):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for frame in x.unbind(1):
            state = self.layer(frame, state)
        return state


class Factorization(Net):
    """Scores of pairs of a user and an item."""

    def forward(self, x: Tensor) -> Any:
        users, items = self.layer((x * self.layer.num_embeddings).long()).unbind(1)
        return (users * items).sum(1)


# The programs

gpu = partial(base.Project, "cuda")
removable = partial(gpu, is_removable=True)
train_gpt, fit_images, train_denoiser = base.train_gpt, base.fit_images, base.train_denoiser
tune = partial(base.fine_tune, vocab=4096, dim=512, layers=4, length=512)
small_gpt = partial(train_gpt, dim=256, layers=12)
large_llama = partial(tune, vocab=8192, dim=1024, layers=6, batch_size=16, length=1024)
gru = partial(nn.GRU, batch_first=True)
adam_loop = partial(torch.optim.AdamW, lr=1e-4, foreach=False)
adagrad = partial(torch.optim.Adagrad, lr=1e-3)
items = partial(nn.Embedding, 12_000_000 if torch.cuda.is_available() else 100, 64)
encode = partial(base.train_net, shape=(64, 100, 512))

# fmt: off
PROJECTS = [
    removable("plain: logits copied to NumPy", HOST, ("accuracy_in_numpy",),
              partial(train_gpt, vocab=2048), {"metric": accuracy_in_numpy},
              {"metric": accuracy_on_device}),
    gpu("plain: float32 without TF32", DEVICE, ("TF32", "matmul_precision", "Block.forward"),
        partial(train_gpt, layers=3), {"precision": "highest"}),
    gpu("plain: attention written out", DEVICE, ("BlockByHand.attend",),
        partial(train_gpt, layers=4, length=1024, has_autocast=True),
        {"model": partial(base.GPT, block=BlockByHand)}),
    gpu("plain: empty_cache in each step", LAUNCHES, ("release_memory", "empty_cache"), train_gpt,
        {"after": lambda _: release_memory}),
    gpu("plain: activations recomputed", DEVICE, ("CheckpointedBlock.forward",),
        train_gpt, {"model": partial(base.GPT, block=CheckpointedBlock)}),
    removable("plain: checkpoint every 10 steps", OUTSIDE, ("save_checkpoint",),
              partial(small_gpt, layers=4), {"after": lambda _: save_checkpoint}),
    removable("plain: evaluation every 5 steps", (*OUTSIDE, *DEVICE), ("estimate_loss",), train_gpt,
              {"after": lambda _: estimate_loss}),
    removable("plain: Adam one tensor at a time", LAUNCHES, ("line:update", "AdamW"), small_gpt,
              {"optimizer": adam_loop}),
    gpu("plain: GPT", DEVICE, (), train_gpt),
    removable("transformers: gradient norms by .item()", LAUNCHES,
              ("GradientNorms.on_pre_optimizer_step",), partial(tune, layers=12),
              {"callbacks": [GradientNorms]}),
    gpu("transformers: loss of one-hot targets", DEVICE, ("one_hot_loss",),
        partial(tune, vocab=32768, layers=2, length=1024), {"loss": one_hot_loss},
        {"loss": smoothed_loss}),
    removable("transformers: padding token by token", INPUT, ("pad_by_token",),
              partial(tune, batch_size=16), {"collate": pad_by_token}, {"collate": pad}),
    gpu("transformers: LoRA", DEVICE, (), partial(large_llama, is_lora=True), packages=("peft",)),
    removable("lightning: gradient histograms", HOST, ("LogsGradients.on_after_backward",),
              partial(fit_images, module=LogsGradients, width=32)),
    gpu("lightning: gradients of a frozen backbone", DEVICE,
        ("LinearProbe.forward", "Residual.forward"), partial(fit_images, module=base.LinearProbe)),
    removable("lightning: augmentation image by image", INPUT, ("augment_each",),
              partial(fit_images, module=Augments, rows=256)),
    gpu("lightning: anomaly detection left on", LAUNCHES, ("detect_anomaly",), fit_images,
        {"detect_anomaly": True}),
    gpu("lightning: ResNet", DEVICE, (), fit_images),
    gpu("plain: blocking copies of pageable batches", (*HOST, *INPUT), ("line:copy", "pin_memory"),
        train_patches),
    removable("plain: EMA in a Python loop", LAUNCHES, ("EMA.update",),
              partial(train_denoiser, dim=512, depth=96, rows=512),
              {"after": lambda model: EMA(model).update},
              {"after": lambda model: EMA(model).update_all}),
    gpu("plain: GRU cell in a loop over time", LAUNCHES, ("SpeechEncoder.forward",), encode,
        {"net": SpeechEncoder, "layer": partial(nn.GRUCell, 512, 512)},
        {"net": base.RNN, "layer": partial(gru, 512, 512)}),
    gpu("plain: dense gradients of an embedding", DEVICE, ("line:update", "Factorization.forward"),
        partial(base.train_net, net=Factorization, shape=(8192, 2), optimizer=adagrad),
        {"layer": items}, {"layer": partial(items, sparse=True)}),
    gpu("plain: diffusion", DEVICE, (), partial(train_denoiser, dim=2048, depth=8, rows=8192),
        {"after": lambda model: EMA(model).update_all}),
]
# fmt: on
