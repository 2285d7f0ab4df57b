"""Programs in the style of real repositories with one planted problem each, and their loops.

`projects_gpu.py` and `projects_cpu.py` list the programs, and `answers.py` runs them. Each
trains with `train` (a plain loop), `fit` (Lightning) or `fine_tune` (transformers). No program
sleeps: a problem is real work that a competent engineer would remove.
"""

import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, PhaseSummary
from lightning_gputime._record.clock import loop_time

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl  # type: ignore[no-redef]
try:
    import transformers
    from transformers import TrainerCallback as TrainerCallback

    from lightning_gputime.huggingface import TransformersPhaseTimer
except ImportError:  # Programs that need transformers are skipped.
    TrainerCallback = object  # type: ignore[assignment, misc]

STEPS, SMALL_STEPS = 200, 30
FIRST_STEP = 20
"""First step of the steady state, in which the wall clock is measured."""

HOST, DEVICE, COMPUTE = ("host-bound",), ("GPU-bound",), ("compute-bound",)
INPUT, OUTSIDE = ("input-bound",), ("overhead-bound", "host-bound")
LAUNCHES = ("host-bound", "launch-bound")
"""Codes of code that launches many small kernels."""
LOSS_CODE = ("host-bound", "compute-bound")
"""Codes of loss and update code on a CPU, which is next to the model or part of its work."""
PACES = {"host-bound": "host", "launch-bound": "host", "input-bound": "host", "GPU-bound": "GPU"}
"""Paces of a GPU program, by verdict code."""
AdamW = partial(torch.optim.AdamW, lr=1e-4, fused=True)


@dataclass(frozen=True)
class Run:
    """Result of a program: the summary of its timer, and the wall-clock time per step (in seconds).

    The latter is that of the steady state, and includes validations and the like between steps.
    """

    summary: PhaseSummary | None
    wall_s: float


@dataclass(frozen=True)
class Setup:
    """Variant of a program; `small` means tiny sizes, to test programs for a GPU on a CPU."""

    planted: bool
    device: str
    timed: bool = True
    small: bool = False

    @property
    def steps(self) -> int:
        return SMALL_STEPS if self.small else STEPS

    def size(self, full: int, small: int) -> int:
        return min(full, small) if self.small else full


@dataclass(frozen=True)
class Project:
    """A program with a planted problem, and the answers that are expected of the timer.

    `name` starts with the front end. `device` is "cpu" or "cuda", for which the sizes are chosen.
    `program` trains, given a variant and the parts `planted` or `clean`.

    A culprit is the name of a function ("Class.method" or "function"), an option, or a marker
    "line:<tag>" of the line that ends with `# line: <tag>`. A control has none, because nothing is
    planted. `codes` are the accepted verdict codes. A problem is removable if the clean program
    takes almost no time for it.
    """

    device: str
    name: str
    codes: tuple[str, ...]
    culprits: tuple[str, ...]
    program: Callable[..., Run]
    planted: Mapping[str, Any] = field(default_factory=dict)
    clean: Mapping[str, Any] = field(default_factory=dict)
    is_removable: bool = False
    packages: tuple[str, ...] = ()

    @property
    def paces(self) -> set[str]:
        """Accepted paces, "host" or "GPU". Empty on a CPU, where the host sets every pace."""
        return {PACES[code] for code in self.codes if code in PACES and self.device == "cuda"}

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed."""
        needed = {*self.packages, self.name.split(":")[0]} - {"plain", "lightning"}
        return [name for name in needed if find_spec(name) is None]

    def run(self, *, planted: bool, device: str, timed: bool = True, small: bool = False) -> Run:
        """Train once, with fixed seeds and the default settings."""
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        torch.set_float32_matmul_precision("high")
        gc.freeze()  # Otherwise, each collection traverses all imported objects.
        setup = Setup(planted, device, timed, small)
        try:
            return self.program(setup, **(self.planted if planted else self.clean))
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


# Loops


def do_nothing(*_: Any) -> None:
    """Part of a loop that a program does not have."""


class Stopwatch(pl.Callback, TrainerCallback):
    """Measures the steady state, as a callback of Lightning and transformers or by hand."""

    def __init__(self, device: str) -> None:
        self.device, self.step, self.start_s, self.wall_s = device, 0, 0.0, 0.0
        # Other processes may use the CPU.
        self.host_ns = loop_time() if device == "cpu" else time.perf_counter_ns

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return self.host_ns() / 1e9

    def tick(self, step: int) -> None:
        self.step = step
        if step == FIRST_STEP:
            self.start_s = self.now()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.tick(batch_idx)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tick(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.wall_s = (self.now() - self.start_s) / (self.step + 1 - FIRST_STEP)


def train(
    setup: Setup,
    model: nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[Any], Tensor],
    *,
    optimizer: Callable[[Any], Any] = AdamW,
    after: Callable[[nn.Module], Callable[[int, Tensor, Any, Any], Any]] = lambda _: do_nothing,
) -> Run:
    """Train in a plain loop; `after(model)` returns a function that is called after each step."""
    updates, after_step = optimizer(model.parameters()), after(model)
    timer = GPUPhaseHooks(model, updates) if setup.timed else None
    watch = Stopwatch(setup.device)
    with timer or nullcontext():
        for step, batch in enumerate(timer.steps(batches) if timer else batches):
            watch.tick(step)
            loss = loss_of(batch)
            updates.zero_grad()
            loss.backward()
            updates.step()  # line: update
            after_step(step, loss, model, updates)
        watch.on_train_end()
    return Run(timer.summary() if timer else None, watch.wall_s)


def fit(setup: Setup, module: pl.LightningModule, *loaders: Any, **options: Any) -> Run:
    """Train with Lightning."""
    timer, watch = GPUPhaseTimer() if setup.timed else None, Stopwatch(setup.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="gpu" if setup.device == "cuda" else "cpu",
            devices=1,
            max_epochs=1,
            callbacks=[timer, watch] if timer else [watch],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **options,
        )
        trainer.fit(module, *loaders)
    return Run(timer.summary() if timer else None, watch.wall_s)


def fine_tune(
    setup: Setup,
    *,
    vocab: int,
    dim: int,
    layers: int,
    length: int,
    batch_size: int = 8,
    is_lora: bool = False,
    rows: Callable[[], Any] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    callbacks: Sequence[type[Any]] = (),
    loss: Callable[..., Tensor] | None = None,
) -> Run:
    """Fine-tune a Llama with transformers, on random tokens unless `rows` are given."""
    vocab, layers, length = setup.size(vocab, 64), setup.size(layers, 1), setup.size(length, 16)
    tokens = torch.randint(vocab, (64, length))
    timer = TransformersPhaseTimer() if setup.timed else None
    watch = Stopwatch(setup.device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=setup.steps,
            per_device_train_batch_size=setup.size(batch_size, 2),
            use_cpu=setup.device == "cpu",
            dataloader_pin_memory=setup.device == "cuda",
            remove_unused_columns=False,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
        )
        trainer = transformers.Trainer(
            llama(vocab, setup.size(dim, 64), layers, is_lora),
            arguments,
            train_dataset=rows() if rows else [{"input_ids": x, "labels": x} for x in tokens],
            data_collator=collate,
            compute_loss_func=loss,
            callbacks=[*filter(None, [timer, watch]), *(callback() for callback in callbacks)],
        )
        trainer.train()
    return Run(timer.summary() if timer else None, watch.wall_s)


def repeated(setup: Setup, *batch: Tensor) -> DataLoader[Any]:
    """Return a loader that yields the same batch in each step. It is on the device already."""
    rows: Any = [[part.to(setup.device) for part in batch]] * setup.steps
    return DataLoader(rows, batch_size=None)


# Models, and programs that train them


class Block(nn.Module):
    """Layer of a GPT."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(dim), nn.LayerNorm(dim), max(dim // 64, 1)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Any:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(*qkv).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Language model, after nanoGPT. Returns logits of shape (batch, length, vocab)."""

    def __init__(self, vocab: int, dim: int, layers: int, block: type[Block] = Block) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(1024, dim)
        self.blocks = nn.Sequential(*(block(dim) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def encode_positions(self, length: int) -> Tensor:
        return self.positions.weight[:length]

    def forward(self, tokens: Tensor) -> Any:
        x = self.tokens(tokens) + self.encode_positions(tokens.shape[1])
        return self.head(self.norm(self.blocks(x)))


def train_gpt(
    setup: Setup,
    *,
    vocab: int = 8192,
    dim: int = 768,
    layers: int = 6,
    length: int = 512,
    model: Callable[..., GPT] = GPT,
    metric: Callable[[Tensor, Tensor], Any] = do_nothing,
    precision: str = "high",
    has_autocast: bool = False,
    **parts: Any,
) -> Run:
    """Train a GPT in a plain loop that computes a metric in each step."""
    torch.set_float32_matmul_precision(precision)
    vocab, rows = setup.size(vocab, 64), setup.size(16, 2)
    gpt = model(vocab, setup.size(dim, 16), setup.size(layers, 2)).to(setup.device)
    tokens, history = torch.randint(vocab, (rows, setup.size(length, 16))), []

    def loss_of(batch: Any) -> Tensor:
        tokens, targets = batch
        with torch.autocast(setup.device, torch.bfloat16, enabled=has_autocast):
            logits = gpt(tokens)
            history.append(metric(logits.detach(), targets))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return train(setup, gpt, repeated(setup, tokens, tokens.roll(-1, 1)), loss_of, **parts)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


class ResNet(nn.Sequential):
    """Features of images: three stages of residual blocks, each twice as wide as the previous."""

    def __init__(self, width: int, blocks: int = 2) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for stage in range(3):
            layers += [Residual(width << stage) for _ in range(blocks)]
            layers += [nn.Conv2d(width << stage, width << (stage + 1), 2, stride=2)] * (stage < 2)
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Classifier(pl.LightningModule):
    """Linear classifier of the features of a network."""

    def __init__(self, net: nn.Module, features: int, planted: bool) -> None:
        super().__init__()
        self.net: Any = net
        self.head, self.planted = nn.Linear(features, 10), planted

    def forward(self, x: Tensor) -> Any:
        return self.head(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", Classifier.training_step(self, batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters())


class LinearProbe(Classifier):
    """Classifier whose backbone should not get gradients, because only the head is updated."""

    def forward(self, x: Tensor) -> Any:
        with torch.set_grad_enabled(self.planted):
            features = self.net(x)  # line: backbone
        return self.head(features)

    def configure_optimizers(self) -> Any:
        return AdamW(self.head.parameters())


def fit_images(
    setup: Setup,
    *,
    module: type[Classifier] = Classifier,
    width: int = 64,
    blocks: int = 2,
    rows: int = 512,
    side: int = 32,
    **options: Any,
) -> Run:
    """Train a ResNet on small images with Lightning."""
    width, n, side = setup.size(width, 16), setup.size(rows, 4), setup.size(side, 8)
    classifier = module(ResNet(width, setup.size(blocks, 1)), 4 * width, setup.planted)
    batches = repeated(setup, torch.rand(n, 3, side, side), torch.randint(10, (n,)))
    return fit(setup, classifier, batches, **options)


def augment_each(images: Tensor) -> Tensor:
    augmented = []
    for image in images:
        flip, scale, shift = torch.rand(3).tolist()
        image = (image.flip(-1) if flip < 0.5 else image) * (0.8 + 0.4 * scale) + 0.1 * shift
        augmented.append((image - image.mean()) / image.std().clamp(min=1e-3))
    return torch.stack(augmented)


def augment_all(images: Tensor) -> Tensor:
    flip, scale, shift = torch.rand(3, len(images), 1, 1, 1, device=images.device)
    images = torch.where(flip < 0.5, images.flip(-1), images) * (0.8 + 0.4 * scale) + 0.1 * shift
    std, mean = torch.std_mean(images, (1, 2, 3), keepdim=True)
    return (images - mean) / std.clamp(min=1e-3)


class Denoiser(nn.Module):
    """Noise prediction of a diffusion model: a residual MLP."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.time, self.out = nn.Linear(1, dim), nn.Linear(dim, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))

    def forward(self, x: Tensor, t: Tensor) -> Any:
        x = x + self.time(t)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.out(x)


def train_denoiser(setup: Setup, *, dim: int, depth: int, rows: int, **parts: Any) -> Run:
    """Train a diffusion model in a plain loop."""
    dim, rows = setup.size(dim, 16), setup.size(rows, 4)
    model = Denoiser(dim, setup.size(depth, 2)).to(setup.device)

    def loss_of(batch: Any) -> Tensor:
        (x,) = batch
        t, noise = torch.rand(len(x), 1, device=x.device), torch.randn_like(x)
        return F.mse_loss(model(torch.lerp(x, noise, t), t), noise)

    return train(setup, model, repeated(setup, torch.rand(rows, dim)), loss_of, **parts)


class Net(nn.Module):
    """Base of networks around one layer."""

    def __init__(self, layer: nn.Module, planted: bool) -> None:
        super().__init__()
        self.layer: Any = layer
        self.planted = planted


class RNN(Net):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x)[1]


def train_net(
    setup: Setup,
    *,
    net: type[Net],
    layer: Callable[[], nn.Module],
    shape: Sequence[int],
    **parts: Any,
) -> Run:
    """Train a network on inputs of a shape, in a plain loop."""
    with torch.device(setup.device):
        model = net(layer(), setup.planted)
    inputs = torch.rand(*(setup.size(n, 8) for n in shape[:-1]), shape[-1])
    batches = repeated(setup, inputs)
    return train(setup, model, batches, lambda batch: model(batch[0]).square().mean(), **parts)


def llama(vocab: int, dim: int, layers: int, is_lora: bool) -> Any:
    """Return a small Llama, trained as it is or by LoRA of the queries and values."""
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=3 * dim,
        num_hidden_layers=layers,
        num_attention_heads=dim // 64,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    if not is_lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
