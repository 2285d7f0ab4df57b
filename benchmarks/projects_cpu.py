"""Programs for a CPU with two cores, with one planted problem each. Steps take 3 to 40 ms."""

import copy
import gc
import json
import math
import random
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import projects as base
import torch
import torch.nn.functional as F  # noqa: N812
from projects import COMPUTE, HOST, INPUT, LOSS_CODE, OUTSIDE, Classifier, Net, Run, Setup
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, TensorDataset


class SpectralLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        norm = torch.linalg.matrix_norm(self.weight, 2)
        return F.linear(x, self.weight / norm, self.bias)


def fit_digits(
    setup: Setup,
    *,
    layer: Callable[[int, int], nn.Module] = nn.Linear,
    module: type[Classifier] = Classifier,
    width: int = 192,
    **options: Any,
) -> Run:
    """Train an MLP on scikit-learn's digits."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
    sampler = RandomSampler(digits, replacement=True, num_samples=64 * setup.steps)
    layers = [layer(64, width), nn.ReLU(), layer(width, width), nn.ReLU()]
    classifier = module(nn.Sequential(*layers), width, setup.planted)
    batches = DataLoader(digits, batch_size=64, sampler=sampler)
    loaders = [DataLoader(digits, batch_size=256)] if "val_check_interval" in options else []
    return base.fit(setup, classifier, batches, *loaders, **options)


def jitter(photo: Any) -> Any:
    photo = (photo / 255.0) ** random.uniform(0.8, 1.25)
    return np.clip((photo - photo.mean()) * random.uniform(0.8, 1.25) + 0.5, 0, 1)


def jitter_then_resize(photo: Any) -> Any:
    return jitter(photo)[::8, ::8]


def resize_then_jitter(photo: Any) -> Any:
    return jitter(photo[::8, ::8])


def box_blur(photo: Any) -> Any:
    blurred = np.zeros(photo.shape)
    for y in range(-2, 3):
        for x in range(-2, 3):
            blurred += np.roll(photo, (y, x), (0, 1))
    return blurred[::8, ::8] / (25 * 255)


def pooled_blur(photo: Any) -> Any:
    pooled = F.avg_pool2d(torch.from_numpy(photo).movedim(-1, 0).float(), 5, 8, 2)
    return pooled.movedim(0, -1).numpy() / 255


class Photos(Dataset[Tensor]):
    def __init__(self, n: int, transform: Callable[[Any], Any]) -> None:
        self.n, self.transform = n, transform
        self.photos = np.random.default_rng(0).integers(256, size=(32, 112, 112, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.transform(self.photos[index % 32])).float().movedim(-1, 0)


def train_photos(setup: Setup, *, transform: Callable[[Any], Any], workers: int = 0) -> Run:
    """Train a ResNet on transformed photos."""
    model = base.ResNet(4, blocks=1)
    batches = DataLoader(Photos(16 * setup.steps, transform), 16, num_workers=workers)
    return base.train(setup, model, batches, lambda images: model(images).square().mean())


def texts() -> list[str]:
    return [" ".join(f"mot\u00e9{random.randrange(200)}," for _ in range(800)) for _ in range(32)]


WORD_IDS: dict[str, int] = {}


def tokenize(text: str) -> list[int]:
    plain = unicodedata.normalize("NFD", text.lower())
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    words = re.findall(r"\w+|[^\w\s]", plain)
    return [WORD_IDS.setdefault(word, len(WORD_IDS)) for word in words][:32]


def collate_texts(texts: list[str]) -> dict[str, Tensor]:
    tokens = torch.tensor([tokenize(text) for text in texts])
    return {"input_ids": tokens, "labels": tokens}


def tokenized_texts() -> list[dict[str, Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in map(torch.tensor, map(tokenize, texts()))]


class StepGuard(base.TrainerCallback):
    """Keeps a copy of the training state, to return to it if the loss is not finite."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.saved = copy.deepcopy(parts["model"]), copy.deepcopy(parts["optimizer"].state_dict())


class WeightHistograms(base.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        weights = [weight.detach().numpy() for weight in parts["model"].parameters()]
        self.histograms = [np.histogram(weight, bins=64) for weight in weights]


class BucketSampler(Sampler[list[int]]):
    """Batches of sentences of similar lengths."""

    def __init__(self, n: int, setup: Setup) -> None:
        self.lengths, self.setup = [random.randrange(64) for _ in range(n)], setup

    def __iter__(self) -> Iterator[list[int]]:
        order: list[int] = []
        for _ in range(self.setup.steps):
            if self.setup.planted or not order:
                order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], i % 7))
            start = random.randrange(len(order) - 16)
            yield order[start : start + 16]


def train_sentences(setup: Setup) -> Run:
    """Train a language model on batches of a sampler."""
    model, tokens = base.GPT(64, 64, 2), TensorDataset(torch.randint(64, (12_000, 32)))
    batches = DataLoader(tokens, batch_sampler=BucketSampler(len(tokens), setup))
    return base.train(setup, model, batches, lambda batch: model(batch[0]).logsumexp(-1).mean())


class SineGPT(base.GPT):
    """GPT with a sinusoidal positional encoding."""

    def encode_positions(self, length: int) -> Tensor:
        dim = self.positions.embedding_dim
        table = torch.zeros(length, dim)
        for position in range(length):
            for i in range(0, dim, 2):
                table[position, i] = math.sin(position / 10000 ** (i / dim))
                table[position, i + 1] = math.cos(position / 10000 ** (i / dim))
        return table


class CachedSineGPT(SineGPT):
    encode_positions = cache(SineGPT.encode_positions)


class CharRNN(Net):
    def one_hot(self, chars: Tensor) -> Tensor:
        encoded = torch.zeros(*chars.shape, 32)
        for i, row in enumerate(chars.tolist()):
            for j, char in enumerate(row):
                encoded[i, j, char] = 1.0
        return encoded

    def forward(self, x: Tensor) -> Any:
        chars = (x * 32).long()
        encoded = self.one_hot(chars) if self.planted else F.one_hot(chars, 32)  # line: one-hot
        return self.layer(encoded.float())[1]


class StatsPooling(Net):
    """Mean and deviation of encoded frames, for which the planted variant encodes twice."""

    def forward(self, x: Tensor) -> Tensor:
        frames = self.layer(x)[0]
        deviation = (self.layer(x)[0] if self.planted else frames).std(1)
        return torch.cat([frames.mean(1), deviation], 1)


class SlidingWindows(Net):
    def forward(self, x: Tensor) -> Any:
        if not self.planted:
            return self.layer(x.unfold(1, 64, 4))
        starts = range(0, x.shape[1] - 63, 4)
        return torch.stack([self.layer(x[:, start : start + 64]) for start in starts], 1)


class WeightNormRNN(Net):
    def weight(self) -> Any:
        return self.layer.weight / self.layer.weight.norm(dim=1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        state, weight = x[:, 0], self.weight()
        for frame in x.unbind(1):
            state = torch.tanh(frame + state @ (self.weight() if self.planted else weight))
        return state


class TreeNet(Net):
    """Encodes binary trees, given their leaves."""

    def encode(self, leaves: Tensor) -> Tensor:
        if len(leaves) == 1:
            return leaves[0]
        left, right = leaves.chunk(2)
        return torch.tanh(self.layer(torch.cat([self.encode(left), self.encode(right)])))

    def forward(self, x: Tensor) -> Tensor:
        if self.planted:
            return torch.stack([self.encode(leaves) for leaves in x])
        while x.shape[1] > 1:
            x = torch.tanh(self.layer(x.unflatten(1, (-1, 2)).flatten(2)))
        return x[:, 0]


class JsonLogger:
    """Logs losses and norms to a JSON file."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []

    def log(self, step: int, loss: Tensor, model: nn.Module, optimizer: Any) -> None:
        norms = {name: weight.norm().item() for name, weight in model.named_parameters()}
        self.history.append({"step": step, "loss": loss.item(), "norms": norms})
        with tempfile.TemporaryFile("w") as file:
            json.dump(self.history, file, indent=2)

    def log_line(self, *args: Any) -> None:
        self.history.clear()
        self.log(*args)


class ModelEMA:
    def __init__(self, model: nn.Module) -> None:
        self.average = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, step: int, loss: Tensor, model: nn.Module, optimizer: Any) -> None:
        average, weights = (copy.deepcopy(net.state_dict()) for net in (self.average, model))
        for name in average:
            average[name] = 0.999 * average[name] + 0.001 * weights[name]
        self.average.load_state_dict(average)

    @torch.no_grad()
    def update_in_place(self, step: int, loss: Tensor, model: nn.Module, optimizer: Any) -> None:
        for mean, weight in zip(self.average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 0.001)


class HandAdam(torch.optim.Optimizer):
    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            grad, state = weight.grad, self.state[weight]
            n = state["n"] = state.get("n", 0) + 1
            state["mean"] = 0.9 * state.get("mean", 0.0) + 0.1 * grad
            state["square"] = 0.999 * state.get("square", 0.0) + 0.001 * grad * grad
            deviation = (state["square"] / (1 - 0.999**n)).sqrt() + 1e-8
            weight.copy_(weight - 1e-4 * state["mean"] / (1 - 0.9**n) / deviation)


def corpus() -> list[Any]:
    return [{"words": [number], "label": [number % 2]} for number in range(15_000)]


def free_memory(*_: Any) -> None:
    gc.collect()


# The programs

cpu = partial(base.Project, "cpu")
removable = partial(cpu, is_removable=True)
on_digits = partial(cpu, packages=("sklearn",))
removable_on_digits = partial(on_digits, is_removable=True)
fit_images, train_net, train_denoiser = base.fit_images, base.train_net, base.train_denoiser
tune = partial(base.fine_tune, vocab=256, dim=64, layers=2, length=32)
gru, square = partial(nn.GRU, batch_first=True), partial(nn.Linear, 192, 192)
spectral_norm = nn.utils.parametrizations.spectral_norm
wide_denoiser = partial(train_denoiser, dim=384, depth=8, rows=8)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())


# fmt: off
PROJECTS = [
    removable_on_digits("lightning: SVD in forward", COMPUTE, ("SpectralLinear.forward",),
                        fit_digits, {"layer": SpectralLinear},
                        {"layer": lambda *sizes: spectral_norm(nn.Linear(*sizes))}),
    removable_on_digits("lightning: validation every 5 steps", OUTSIDE, ("validation",), fit_digits,
                        {"val_check_interval": 5}, {"val_check_interval": 100}),
    on_digits("lightning: MLP", COMPUTE, (), partial(fit_digits, width=2048)),
    cpu("lightning: gradients of a frozen backbone", COMPUTE,
        ("LinearProbe.forward", "Residual.forward"),
        partial(fit_images, module=base.LinearProbe, width=8, rows=16, side=16)),
    removable("plain: photos augmented before resizing", INPUT,
              ("jitter", "jitter_then_resize", "Photos.__getitem__"), train_photos,
              {"transform": jitter_then_resize}, {"transform": resize_then_jitter}),
    removable("plain: slow transform in one worker", INPUT,
              ("box_blur", "Photos.__getitem__", "num_workers"), partial(train_photos, workers=1),
              {"transform": box_blur}, {"transform": pooled_blur}),
    removable("transformers: texts tokenized in the collator", INPUT, ("tokenize", "collate_texts"),
              tune, {"rows": texts, "collate": collate_texts}, {"rows": tokenized_texts}),
    removable("transformers: copy of the training state", HOST, ("StepGuard.on_step_begin",),
              partial(tune, vocab=4096, dim=192, layers=4, length=8, batch_size=2, is_lora=True),
              {"callbacks": [StepGuard]}, packages=("peft",)),
    removable("transformers: histograms of the weights", HOST, ("WeightHistograms.on_step_end",),
              partial(tune, vocab=4096, batch_size=2), {"callbacks": [WeightHistograms]}),
    cpu("transformers: LoRA", COMPUTE, (), partial(tune, is_lora=True), packages=("peft",)),
    removable("plain: sampler that sorts for each batch", INPUT,
              ("BucketSampler.__iter__",), train_sentences),
    removable("plain: positional encoding in loops", LOSS_CODE, ("SineGPT.encode_positions",),
              partial(base.train_gpt, vocab=64, dim=64, layers=2, length=32), {"model": SineGPT},
              {"model": CachedSineGPT}),
    removable("plain: one-hot encoding in loops", LOSS_CODE, ("CharRNN.one_hot", "line:one-hot"),
              partial(train_net, net=CharRNN, shape=(32, 48), layer=partial(gru, 32, 48))),
    cpu("plain: encoder called twice", COMPUTE, ("StatsPooling.forward",),
        partial(train_net, net=StatsPooling, shape=(16, 40, 64), layer=partial(gru, 64, 64))),
    cpu("plain: window by window", COMPUTE, ("SlidingWindows.forward",),
        partial(train_net, net=SlidingWindows, shape=(4, 512), layer=mlp)),
    removable("plain: weight norm in each time step", COMPUTE,
              ("WeightNormRNN.weight", "WeightNormRNN.forward"),
              partial(train_net, net=WeightNormRNN, shape=(8, 32, 192), layer=square)),
    cpu("plain: recursion over trees", COMPUTE, ("TreeNet.encode",),
        partial(train_net, net=TreeNet, shape=(8, 16, 64), layer=partial(nn.Linear, 128, 64))),
    cpu("plain: recurrent net", COMPUTE, (),
        partial(train_net, net=base.RNN, shape=(16, 64, 64), layer=partial(gru, 64, 64))),
    removable("plain: JSON log rewritten in each step", HOST, ("JsonLogger.log",),
              partial(train_denoiser, dim=64, depth=12, rows=192),
              {"after": lambda _: JsonLogger().log}, {"after": lambda _: JsonLogger().log_line}),
    removable("plain: EMA of copies", HOST, ("ModelEMA.update",), wide_denoiser,
              {"after": lambda model: ModelEMA(model).update},
              {"after": lambda model: ModelEMA(model).update_in_place}),
    cpu("plain: Adam written by hand", LOSS_CODE, ("HandAdam.step",), wide_denoiser,
        {"optimizer": HandAdam}),
    removable("plain: garbage collected in each step", HOST, ("free_memory", "gc.collect"),
              partial(train_denoiser, dim=128, depth=8, rows=192),
              {"after": lambda _: partial(free_memory, corpus())},
              {"after": lambda _: partial(base.do_nothing, corpus())}),
    cpu("plain: diffusion", COMPUTE, (), partial(train_denoiser, dim=256, depth=6, rows=64)),
]
# fmt: on
