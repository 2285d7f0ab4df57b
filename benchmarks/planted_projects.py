"""Small projects with one known bottleneck each, for `answers.py`.

There is a program for each front end: `fit` (Lightning), `train` (a plain loop) and `fine_tune`
(transformers). A `Plant` lists the parts that make a program slow, and the parts that replace them
in the clean run. On a CPU, most work is sleep, so that a busy machine gives equal results.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate
from torchmetrics import MeanMetric
from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, PhaseSummary, phase
from lightning_gputime.huggingface import TransformersPhaseTimer

STEPS = 240
BATCH_SIZE, LARGE_BATCH = 4, 512
WIDTH = 32
WORK_S = 0.0012
"""Seconds that a model sleeps in forward, and again in backward."""
SHORT_WORK_S, LONG_WORK_S = 0.0003, 0.008
"""`WORK_S` of projects with a periodic bottleneck, and of projects without a bottleneck."""
SLOW_S = 0.0025
"""Seconds that a part sleeps if it is slow in every step."""
ONCE_S, OFTEN_S = 1.2, 0.3
"""Seconds that a part sleeps if it is slow once in a run, or in each of the three epochs."""


@dataclass(frozen=True)
class Run:
    """A training run: the summary of its timer, and its wall-clock time (in seconds)."""

    summary: PhaseSummary
    wall_s: float


@dataclass(frozen=True)
class Plant:
    """A bottleneck, and the answers that are expected of the timer.

    Attributes:
        name: Front end and kind, such as "lightning: slow sampler".
        program: Trains with the given parts.
        codes: Accepted verdict codes.
        entries: Accepted entries of the time breakdown, including their sub-rows. Empty for any.
        culprits: The output must contain at least one of these words: a hook, class or function, or
            a marker of `planted_projects.py` ("line:<code>") whose line the output must name.
        planted: Parts of the slow run.
        clean: Parts of the run after the bottleneck is removed.
        needs_gpu: True if the bottleneck exists only on a GPU.
        has_slowdown: True if the steps get slower during the run.
        is_balanced: True for a control, which must not get the grade "bound".
        is_once: True if no speed-up is required: the bottleneck occurs once per run, or consists of
            launch gaps, which only probes measure.
        grade: Grade of the diagnosis.
    """

    name: str
    program: Callable[..., Run]
    codes: tuple[str, ...]
    entries: tuple[str, ...] = ()
    culprits: tuple[str, ...] = ()
    planted: Mapping[str, Any] = field(default_factory=dict)
    clean: Mapping[str, Any] = field(default_factory=dict)
    needs_gpu: bool = False
    has_slowdown: bool = False
    is_balanced: bool = False
    is_once: bool = False
    grade: str = "bound"


# Data and models


def do_nothing(*_: Any) -> None:
    """Placeholder for a part that a project does not have."""


def be_slow(*_: Any) -> None:
    """Take as long as a slow part of a step."""
    time.sleep(SLOW_S)


def be_slow_once(*_: Any) -> None:
    """Take as long as a part that is slow once in a run."""
    time.sleep(ONCE_S)


def be_slow_at_times(*_: Any) -> None:
    """Take as long as a part that is slow in each epoch."""
    time.sleep(OFTEN_S)


def every(n: int, seconds: float, offset: int = 0) -> Callable[[int], None]:
    """Return a function that sleeps in 1 of every `n` steps."""
    return lambda step: time.sleep(seconds) if step % n == offset % n else None


def from_step(first: int, seconds: float) -> Callable[[int], None]:
    """Return a function that sleeps in all steps from `first` on."""
    return lambda step: time.sleep(seconds) if step >= first else None


class Photos(Dataset[Tensor]):
    """Images in memory; `decode` is called with the index of the batch."""

    def __init__(self, n: int, decode: Callable[[int], None] = do_nothing) -> None:
        self.n, self.decode = n, decode
        self.image = torch.ones(WIDTH)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        if index % BATCH_SIZE == 0:
            self.decode(index // BATCH_SIZE)
        return self.image


def in_batches(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """Return the default loader."""
    return DataLoader(dataset, batch_size=BATCH_SIZE, **options)


def pad_batch(examples: list[Any]) -> Any:
    """Collate slowly."""
    time.sleep(SLOW_S)
    return default_collate(examples)


class HardestFirst(Sampler[int]):
    """Sampler that is slow for each batch."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        for index in range(self.n):
            if index % BATCH_SIZE == 0:
                time.sleep(SLOW_S)
            yield index

    def __len__(self) -> int:
        return self.n


class Work(torch.autograd.Function):
    """Identity that sleeps in forward and in backward, for a time that load cannot change."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Sleep."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Sleep."""
        time.sleep(ctx.seconds)
        return grad, None


class Net(nn.Module):
    """Linear layers, followed by a fixed sleep in forward and in backward."""

    def __init__(self, layers: int = 2, work_s: float = WORK_S, first_s: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.work_s, self.first_s = work_s, first_s

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (batch, WIDTH)."""
        time.sleep(self.first_s)  # Simulates compilation in the first call.
        self.first_s = 0.0
        features: Tensor = Work.apply(self.layers(x), self.work_s)  # type: ignore[no-untyped-call]
        return features


class Hoarding(Net):
    """Net with many Python objects, which the garbage collector has to traverse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = [[number] for number in range(300_000)]


class Recompiling(Net):
    """Compiled net that recompiles, because some batches have new lengths."""

    def __init__(self, lengths: int) -> None:
        super().__init__(layers=4)
        torch._dynamo.reset()
        self.layers = torch.compile(self.layers, dynamic=False, backend="eager")  # type: ignore[assignment]
        self.lengths, self.calls = lengths, 0

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (length of the batch, WIDTH)."""
        self.calls += 1
        length = min(self.calls // 40, self.lengths)
        return super().forward(torch.cat([x, x, x])[: len(x) + length])


def mean_square(features: Tensor) -> Tensor:
    """Return the loss."""
    return features.square().mean()


def pairwise_loss(features: Tensor) -> Tensor:
    """Return the loss, slowly."""
    time.sleep(SLOW_S)
    return mean_square(features)


def adam_loop(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that updates one tensor at a time."""
    return torch.optim.Adam(parameters, lr=1e-3, foreach=False)


def lookahead(parameters: Any) -> Any:
    """Return an optimizer with a slow update."""
    return slow(torch.optim.SGD, "Lookahead", hook="step")(parameters, lr=1e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return the default optimizer."""
    return torch.optim.SGD(parameters, lr=1e-3)


def slow(base: type[Any], name: str = "", *, seconds: float = SLOW_S, hook: str) -> type[Any]:
    """Return a subclass with a slow hook that also calls the overridden hook."""

    def take_time(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return getattr(super(made, self), hook)(*args, **kwargs)

    made = type(name or base.__name__, (base,), {hook: take_time})
    return made


# Lightning


class Module(pl.LightningModule):
    """A LightningModule; subclasses override one hook each."""

    def __init__(
        self,
        net: Callable[[], nn.Module] = Net,
        loss: Callable[[Tensor], Tensor] = mean_square,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    ) -> None:
        super().__init__()
        self.net, self.loss, self.new_optimizer = net(), loss, optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        features = self.net(batch)
        loss = self.loss(features)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> Any:
        return self.new_optimizer(self.parameters())


class LogsManyMetrics(Module):
    """Logs 30 metrics in each step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for number in range(30):
            self.log(f"metric_{number}", float(number))
        return loss


class AugmentsInPhase(Module):
    """Augments in a user-defined phase."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with phase("augment"):
            time.sleep(SLOW_S)
        return super().training_step(batch, batch_idx)


class Schedules(Module):
    """Has a learning rate scheduler that is slow in each step."""

    def configure_optimizers(self) -> Any:
        optimizer = self.new_optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ValidatesSlowly(Module):
    """Computes a ranking metric at the end of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.ranking = slow(MeanMetric, "RankingMetric", hook="compute", seconds=0.2)()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.ranking.update(self.net(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("ranking", self.ranking.compute())
        self.ranking.reset()


class CollectsGarbage(Module):
    """Calls the garbage collector "to save memory"."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx % 10 == 9:
            gc.collect()
        return super().training_step(batch, batch_idx)


class GradientHistogram(pl.Callback):
    """Is slow in 1 of 100 steps."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % 100 == 0:
            time.sleep(0.3)


class LossCurve(pl.Callback):
    """Keeps all losses and reads all of them in each step, so that steps get slower."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        time.sleep(1e-5 * trainer.global_step)


class EMA(pl.Callback):
    """Averages the weights five times over, one tensor at a time."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for weight in module.parameters():
                for _round in range(5):
                    weight.data.mul_(0.999).add_(weight.data, alpha=0.001)


class Corpus(pl.LightningDataModule):
    """DataModule whose subclasses prepare its files first."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return in_batches(Photos(STEPS * BATCH_SIZE))


def fit(
    *,
    module: Callable[[], pl.LightningModule] = Module,
    decode: Callable[[int], None] = do_nothing,
    dataset: Callable[[int, Any], Dataset[Any]] = Photos,
    loader: Callable[[Dataset[Any]], Any] = in_batches,
    datamodule: Callable[[], pl.LightningDataModule] | None = None,
    callbacks: Callable[[str], Sequence[pl.Callback]] = lambda _: (),
    steps: int = STEPS,
    validation_steps: int = 0,
    accelerator: str = "cpu",
    is_timer_last: bool = False,
    **options: Any,
) -> Run:
    """Train with Lightning for `steps` per epoch."""
    timer, model = GPUPhaseTimer(), module()
    quiet = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    loaders: dict[str, Any] = {"train_dataloaders": loader(dataset(steps * BATCH_SIZE, decode))}
    if validation_steps:
        data = Photos(validation_steps * BATCH_SIZE)
        loaders["val_dataloaders"] = DataLoader(data, batch_size=BATCH_SIZE)
    if datamodule is not None:
        loaders = {"datamodule": datamodule()}
    with tempfile.TemporaryDirectory() as folder:
        others = [*callbacks(folder)]
        trainer = pl.Trainer(
            accelerator=accelerator,
            devices=1,
            callbacks=[*others, timer] if is_timer_last else [timer, *others],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **{"max_epochs": 1, **quiet, **options},
        )
        start_s = time.perf_counter()
        trainer.fit(model, **loaders)
        wall_s = time.perf_counter() - start_s
    return Run(timer.summary(), wall_s)


# Plain loops


def print_predictions(step: int, loss: Tensor) -> None:
    """Print many numbers to the null device."""
    with open("/dev/null", "w") as nowhere:
        print(np.random.default_rng(step).normal(size=(50, 50)).tolist(), loss, file=nowhere)


def collect_garbage(step: int, loss: Tensor) -> None:
    """Call the garbage collector "to save memory"."""
    if step % 10 == 9:
        gc.collect()


def evaluate(timer: GPUPhaseHooks, net: nn.Module, is_timed: bool = False) -> None:
    """Evaluate without gradients, over `timer.steps` if `is_timed`."""
    net.eval()
    batches = [torch.ones(BATCH_SIZE, WIDTH)] * 60
    with torch.no_grad():
        for batch in timer.steps(batches) if is_timed else batches:
            net(batch)
            time.sleep(SLOW_S)
    net.train()


def upload_paused(timer: GPUPhaseHooks, net: nn.Module) -> None:
    """Upload the weights while the timer is paused."""
    with timer.paused():
        time.sleep(OFTEN_S)


def train(
    *,
    net: Callable[[], nn.Module] = Net,
    decode: Callable[[int], None] = do_nothing,
    loader: Callable[[Dataset[Any]], Any] = in_batches,
    dataset: Callable[[int, Any], Dataset[Any]] = Photos,
    prepare: Callable[[int], None] = do_nothing,
    criterion: Callable[[Tensor], Tensor] = mean_square,
    clip: Callable[[nn.Module], None] = do_nothing,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    scheduler: Callable[[], None] = do_nothing,
    after_step: Callable[[int, Tensor], None] = do_nothing,
    after_epoch: Callable[[GPUPhaseHooks, nn.Module], None] = do_nothing,
    before_training: Callable[[], None] = do_nothing,
    augment: Callable[[], None] = do_nothing,
    epochs: int = 1,
    steps: int = STEPS,
    device: str = "cpu",
) -> Run:
    """Train in a plain loop for `steps` per epoch."""
    model = net().to(device)
    updates = optimizer(model.parameters())
    batches = loader(dataset(steps * BATCH_SIZE, decode))
    step = 0
    start_s = time.perf_counter()
    with GPUPhaseHooks(model, updates) as timer:
        before_training()
        for _ in range(epochs):
            for batch in timer.steps(batches):
                if augment is not do_nothing:
                    with timer.phase("augment"):
                        augment()
                prepare(step)
                features = model(as_tensor(batch).to(device, non_blocking=True))
                loss = criterion(features)
                updates.zero_grad()
                loss.backward()
                clip(model)
                updates.step()
                scheduler()
                after_step(step, loss)
                step += 1
            after_epoch(timer, model)
    wall_s = time.perf_counter() - start_s
    return Run(timer.summary(), wall_s)


def as_tensor(batch: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the images of a batch."""
    return batch if isinstance(batch, Tensor) else batch[0]


def table_of_images(n: int, _: Any) -> Dataset[Any]:
    """Return a dataset of tensors for large batches."""
    return TensorDataset(torch.ones(n // BATCH_SIZE * LARGE_BATCH, WIDTH))


class WholeBatches:
    """Loader that reads whole batches from a TensorDataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset) // LARGE_BATCH

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.dataset), LARGE_BATCH):
            yield self.dataset[start : start + LARGE_BATCH]


# transformers


class Texts(Photos):
    """Examples in the format of transformers models."""

    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index), "labels": torch.zeros(WIDTH)}


class Head(nn.Module):
    """Model that returns its loss, like transformers models."""

    def __init__(self, layers: int = 2, work_s: float = WORK_S) -> None:
        super().__init__()
        self.net = Net(layers, work_s)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and logits."""
        logits = self.net(x)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def rank_metrics(found: Any) -> dict[str, float]:
    """Compute metrics, slowly."""
    time.sleep(0.25)
    return {"quality": 1.0}


class PairwiseTrainer(Trainer):
    """A Trainer with a slow custom loss."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return pairwise_loss(model(**inputs)["logits"])


def fine_tune(
    *,
    trainer: type[Trainer] = Trainer,
    decode: Callable[[int], None] = do_nothing,
    collate: Callable[[list[Any]], Any] = default_collate,
    callbacks: Callable[[], Sequence[TrainerCallback]] = lambda: (),
    metrics: Callable[[Any], dict[str, float]] | None = None,
    evaluation_steps: int = 10,
    steps: int = STEPS,
    work_s: float = WORK_S,
    epochs: int = 1,
    **options: Any,
) -> Run:
    """Train with transformers for `steps` per epoch."""
    timer = TransformersPhaseTimer()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=BATCH_SIZE,
            num_train_epochs=epochs,
            use_cpu=True,
            disable_tqdm=True,
            **{"save_strategy": "no", "report_to": [], **options},
        )
        runner = trainer(
            Head(work_s=work_s),
            arguments,
            train_dataset=Texts(steps * BATCH_SIZE, decode),
            eval_dataset=Texts(evaluation_steps * BATCH_SIZE),
            data_collator=collate,
            compute_metrics=metrics,
            callbacks=[timer, *callbacks()],
        )
        start_s = time.perf_counter()
        runner.train()
        wall_s = time.perf_counter() - start_s
    return Run(timer.summary(), wall_s)


# On a GPU


class GPUNet(nn.Module):
    """Matrix products: about 12 ms per step on an H100, or many small layers."""

    def __init__(self, layers: int = 24, width: int = 1024, rows: int = 4096) -> None:
        super().__init__()
        self.width, self.rows = width, rows
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of shape (rows, width)."""
        return self.layers(x[: self.rows, : self.width])  # type: ignore[no-any-return]


small_net = partial(GPUNet, layers=100, width=64, rows=64)


def graphed(net: Callable[[], GPUNet]) -> nn.Module:
    """Return a net as one CUDA graph."""
    model = net().cuda()
    sample = (torch.ones(4096, 1024, device="cuda"),)
    return torch.cuda.make_graphed_callables(model, sample)  # type: ignore[return-value]


class Images(Dataset[Tensor]):
    """Large batches, pinned or not."""

    def __init__(
        self, n: int, _: Any, rows: int = 4096, is_pinned: bool = True, load_s: float = 0.0
    ) -> None:
        self.n, self.load_s = n // BATCH_SIZE, load_s
        images = torch.ones(rows, 1024)
        self.images = images.pin_memory() if is_pinned else images

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.load_s)
        return self.images


HIDDEN_S = 0.004
"""Seconds of work on the host in each step, while the GPU is busy."""


def hide(step: int, loss: Tensor) -> None:
    """Work on the host."""
    time.sleep(HIDDEN_S)


def to_float(step: int, loss: Tensor) -> None:
    """Read the loss in each step, then work on the host."""
    loss.item()
    time.sleep(HIDDEN_S)


class ReadsLoss(pl.Callback):
    """Reads the loss in each step, then works on the host."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        to_float(0, outputs["loss"])


def loss_by_row(features: Tensor) -> Tensor:
    """Compute the loss in a loop over rows, which launches kernels of a few microseconds."""
    return torch.stack([row.square().mean() for row in features[:200]]).mean()


def loss_at_once(features: Tensor) -> Tensor:
    """Compute the same loss in three kernels."""
    return features[:200].square().mean(1).mean()


ONE_BY_ONE = {"dataset": Images, "loader": partial(DataLoader, batch_size=None)}
ON_DEVICE = {"device": "cuda", "net": GPUNet, **ONE_BY_ONE}
FIT_ON_DEVICE = {"accelerator": "gpu", "module": partial(Module, GPUNet), **ONE_BY_ONE}


# The plants

Parts = dict[str, Any]


def answer(code: str, *entries: str, **more: Any) -> Parts:
    """Return the expected codes (separated by spaces) and entries, and other fields of `Plant`."""
    return {"codes": tuple(code.split()), "entries": entries, **more}


CALLBACKS = answer("callback-bound", "callbacks")
INPUT = answer("input-bound", "data/fetch", "data")
TRANSFER = answer("input-bound", "data")
EPOCH_END = answer("epoch-end-bound", "epoch ends")
OPTIMIZER = answer("optimizer-bound", "optimizer")
LOSS = answer("loss-bound", "loss")
OTHER = answer("other-bound", "other")
CHECKPOINTS = answer("checkpoint-bound", "checkpoints")
VALIDATION = answer("validation-bound", "validation")
EVALUATION = answer("evaluation-bound", "evaluation")
BETWEEN = answer("between-loops-bound", "between loops")
SET_UP = answer("startup-bound", "set-up", "prepare data", is_once=True)
FIRST_STEP = answer("startup-bound", "first step", is_once=True)
GARBAGE = answer("gc-bound other-bound")
COMPUTE = answer("compute-bound", grade="balanced", is_balanced=True)
GPU = answer("GPU-bound", grade="balanced", is_balanced=True, needs_gpu=True)


def planting(front_end: str, program: Callable[..., Run]) -> Callable[..., Plant]:
    """Return a function that creates plants for a front end."""

    def plant(
        name: str,
        expected: Parts,
        culprits: str = "",
        *,
        clean: Parts | None = None,
        both: Parts | None = None,
        **planted: Any,
    ) -> Plant:
        return Plant(
            f"{front_end}: {name}",
            program,
            culprits=tuple(culprits.split("|")) if culprits else (),
            planted={**(both or {}), **planted},
            clean={**(both or {}), **(clean or {})},
            **expected,
        )

    return plant


lightning = planting("lightning", fit)
plain = planting("plain", train)
hugging_face = planting("transformers", fine_tune)


def by_difficulty(dataset: Dataset[Any]) -> DataLoader[Any]:
    """Return a loader with a slow sampler."""
    return in_batches(dataset, sampler=HardestFirst(len(dataset)))  # type: ignore[arg-type]


def using(*classes: type[Any]) -> Callable[..., list[Any]]:
    """Return a function that makes the callbacks of a run."""
    return lambda *_: [callback() for callback in classes]


def callback(name: str, hook: str, seconds: float = SLOW_S) -> Parts:
    """Return a callback of Lightning with a slow hook, as a part of `fit`."""
    return {"callbacks": using(slow(pl.Callback, name, hook=hook, seconds=seconds))}


def hf_callback(name: str, hook: str, seconds: float = SLOW_S) -> Parts:
    """Return a callback of transformers with a slow event, as a part of `fine_tune`."""
    return {"callbacks": using(slow(TrainerCallback, name, hook=hook, seconds=seconds))}


def module(hook: str) -> type[Any]:
    """Return a LightningModule with a slow hook."""
    return slow(Module, hook=hook)


def checkpoints(folder: str) -> list[pl.Callback]:
    """Return callbacks that save a checkpoint every ten steps, as slowly as for a large model."""
    large = slow(pl.Callback, "LargeModel", hook="on_save_checkpoint", seconds=0.04)
    return [ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=1), large()]


def logger(seconds: float) -> pl.loggers.Logger:
    """Return a logger that takes some time for each log."""
    made: pl.loggers.Logger = slow(
        pl.loggers.logger.DummyLogger, "SlowLogger", hook="log_metrics", seconds=seconds
    )()
    return made


SHORT_NET, LONG_NET = partial(Net, work_s=SHORT_WORK_S), partial(Net, work_s=LONG_WORK_S)
SHORT_RUN, LONG_RUN = {"net": SHORT_NET, "steps": 1000}, {"net": LONG_NET}
# Lightning's overhead takes as long as the shortest net.
SHORT_FIT, LONG_FIT = (
    {"steps": 600},
    {"module": partial(Module, partial(Net, work_s=0.02)), "steps": 120},
)
MANY_WEIGHTS = partial(Net, layers=50)
EPOCHS = {"epochs": 3, "steps": 100}
FIT_EPOCHS = {"max_epochs": 3, "steps": 100}
FETCH = "Photos|__getitem__"
UPDATES = "line:after_step(step"
ENDS = "line:after_epoch(timer"

# fmt: off
LIGHTNING = [
    lightning("slow __getitem__", INPUT, FETCH, decode=be_slow),
    lightning("slow collate", INPUT, "pad_batch", loader=partial(in_batches, collate_fn=pad_batch)),
    lightning("slow sampler", INPUT, "HardestFirst", loader=by_difficulty),
    lightning("fetch at (i + 1) % 50", INPUT, FETCH, decode=every(50, 0.15, -1), both=SHORT_FIT),
    lightning("augmentation after the transfer", TRANSFER, "on_after_batch_transfer",
              module=module("on_after_batch_transfer")),
    lightning("augmentation before the transfer", TRANSFER, "on_before_batch_transfer",
              module=module("on_before_batch_transfer")),
    lightning("logger every 50 steps", CALLBACKS, "SlowLogger",
              logger=logger(0.15), clean={"logger": logger(0.0)}, both=SHORT_FIT),
    lightning("logger in each step", CALLBACKS, "SlowLogger",
              logger=logger(SLOW_S), log_every_n_steps=1, clean={"logger": logger(0.0)}),
    lightning("self.log of many metrics", answer("loss-bound callback-bound", "loss", "callbacks"),
              "self.log", module=LogsManyMetrics),
    lightning("callback at batch start", CALLBACKS, "WarmupMonitor",
              **callback("WarmupMonitor", "on_train_batch_start")),
    lightning("callback at batch end", CALLBACKS, "ActivationStats",
              **callback("ActivationStats", "on_train_batch_end")),
    lightning("callback every 100 steps", CALLBACKS, "GradientHistogram",
              callbacks=using(GradientHistogram), both=SHORT_FIT),
    lightning("EMA before the timer", CALLBACKS, "EMA", callbacks=using(EMA),
              both={"module": partial(Module, MANY_WEIGHTS), "is_timer_last": True}),
    lightning("callback that gets slower", {**CALLBACKS, "has_slowdown": True}, "LossCurve",
              callbacks=using(LossCurve), both=SHORT_FIT),
    lightning("slow end of epochs", EPOCH_END, "ConfusionMatrix", both=FIT_EPOCHS,
              **callback("ConfusionMatrix", "on_train_epoch_end", OFTEN_S)),
    lightning("slow start of epochs", EPOCH_END, "Reshuffle", both=FIT_EPOCHS,
              **callback("Reshuffle", "on_train_epoch_start", OFTEN_S)),
    lightning("validation too often", VALIDATION, val_check_interval=20,
              clean={"limit_val_batches": 0}, both={"validation_steps": 20}),
    lightning("slow metric in validation", VALIDATION,
              "ranking|RankingMetric|on_validation_epoch_end", module=ValidatesSlowly,
              both={"validation_steps": 2, "val_check_interval": 60}),
    lightning("checkpoint every 10 steps", CHECKPOINTS, "ModelCheckpoint",
              callbacks=checkpoints, enable_checkpointing=True),
    lightning("slow prepare_data", SET_UP, "Corpus", clean={"datamodule": Corpus},
              datamodule=slow(Corpus, hook="prepare_data", seconds=ONCE_S)),
    lightning("slow setup", SET_UP, "Corpus", clean={"datamodule": Corpus},
              datamodule=slow(Corpus, hook="setup", seconds=ONCE_S)),
    lightning("slow first step", FIRST_STEP, module=partial(Module, partial(Net, first_s=ONCE_S))),
    lightning("slow on_before_optimizer_step", OPTIMIZER, "on_before_optimizer_step",
              module=module("on_before_optimizer_step")),
    lightning("clipping by hand", OPTIMIZER, "configure_gradient_clipping",
              module=module("configure_gradient_clipping")),
    lightning("slow scheduler", OTHER, "lr_scheduler_step", both={"module": Schedules},
              module=slow(Schedules, hook="lr_scheduler_step")),
    lightning("slow loss", LOSS, "pairwise_loss|line:self.loss(features)",
              module=partial(Module, loss=pairwise_loss)),
    lightning("garbage collected", answer("gc-bound other-bound compute-bound"),
              "CollectsGarbage|line:gc.collect()", module=partial(CollectsGarbage, Hoarding),
              clean={"module": partial(Module, Hoarding)}),
    lightning("named phase", answer("phase-bound", "augment"), "augment", module=AugmentsInPhase),
    lightning("balanced", COMPUTE, both=LONG_FIT),
]

PLAIN = [
    plain("slow __getitem__", INPUT, FETCH, decode=be_slow),
    plain("TensorDataset item by item", INPUT, "TensorDataset", both={"dataset": table_of_images},
          loader=partial(DataLoader, batch_size=LARGE_BATCH), clean={"loader": WholeBatches}),
    plain("fetch at i % 10", INPUT, FETCH, decode=every(10, 0.008), both=SHORT_RUN),
    plain("fetch at i % 50", INPUT, FETCH, decode=every(50, 0.04), both=SHORT_RUN),
    plain("fetch at (i + 1) % 50", INPUT, FETCH, decode=every(50, 0.04, -1), both=SHORT_RUN),
    plain("fetch that jumps", {**INPUT, "has_slowdown": True}, FETCH,
          decode=from_step(400, 0.0015), both=SHORT_RUN),
    plain("one worker is too few", INPUT, "num_workers", decode=lambda _: time.sleep(0.006),
          loader=partial(in_batches, num_workers=1), both={"steps": 400}),
    plain("slow loss", LOSS, "pairwise_loss|line:criterion(features)", criterion=pairwise_loss),
    plain("code before forward", OTHER, "be_slow|line:prepare(step)", prepare=be_slow),
    plain("code after the update", OTHER, f"be_slow|{UPDATES}", after_step=be_slow),
    plain("prints in each step", OTHER, f"print_predictions|{UPDATES}",
          after_step=print_predictions),
    plain("slow scheduler", OTHER, "be_slow|line:scheduler()", scheduler=be_slow),
    plain("clipping by hand", OPTIMIZER, "be_slow|line:clip(model)", clip=be_slow),
    plain("slow optimizer", OPTIMIZER, "Lookahead", optimizer=lookahead),
    plain("optimizer by single tensors", OPTIMIZER, "Adam", optimizer=adam_loop,
          both={"net": MANY_WEIGHTS}),
    plain("evaluation between epochs", answer("evaluation-bound between-loops-bound"),
          f"evaluate|{ENDS}", after_epoch=evaluate, both=EPOCHS),
    plain("evaluation over timer.steps", EVALUATION, f"evaluate|{ENDS}",
          after_epoch=partial(evaluate, is_timed=True), both=EPOCHS),
    plain("upload between epochs", BETWEEN, f"be_slow_at_times|{ENDS}",
          after_epoch=be_slow_at_times, both=EPOCHS),
    plain("paused code", answer("paused-bound", "paused"), f"upload_paused|{ENDS}",
          after_epoch=upload_paused, both=EPOCHS),
    plain("slow start", SET_UP, before_training=be_slow_once),
    plain("slow first step", FIRST_STEP, net=partial(Net, first_s=ONCE_S)),
    plain("garbage collected", GARBAGE, "collect_garbage|line:gc.collect()",
          after_step=collect_garbage, both={"net": Hoarding}),
    plain("recompilation", answer("compile-bound"), "line:self.layers(x)",
          net=partial(Recompiling, 6), clean={"net": partial(Recompiling, 0)}),
    plain("named phase", answer("phase-bound", "augment"), "augment", augment=be_slow),
    plain("a tenth after the update", {**OTHER, "grade": "worth a look"}, UPDATES,
          after_step=lambda *_: time.sleep(0.0018), both=LONG_RUN),
    plain("balanced", COMPUTE, both=LONG_RUN),
]

TRANSFORMERS = [
    hugging_face("slow dataset", INPUT, "Texts|__getitem__", decode=be_slow),
    hugging_face("slow collator", INPUT, "pad_batch", collate=pad_batch),
    hugging_face("fetch at (i + 1) % 50", INPUT, "Texts|__getitem__",
                 decode=every(50, 0.2, -1), both={"steps": 400}),
    hugging_face("slow callback", CALLBACKS, "TokenCounter",
                 **hf_callback("TokenCounter", "on_step_end")),
    hugging_face("slow reporter in each step", CALLBACKS, "Reporter", logging_steps=1,
                 **hf_callback("Reporter", "on_log")),
    hugging_face("evaluation too often", EVALUATION, eval_strategy="steps",
                 eval_steps=30, both={"evaluation_steps": 30}),
    hugging_face("slow compute_metrics", EVALUATION, "rank_metrics|compute_metrics",
                 metrics=rank_metrics,
                 both={"eval_strategy": "steps", "eval_steps": 60, "evaluation_steps": 2}),
    hugging_face("checkpoint every 20 steps", CHECKPOINTS, save_strategy="steps", save_steps=20,
                 both={"trainer": slow(Trainer, hook="save_model", seconds=0.06)}),
    hugging_face("slow compute_loss", LOSS, "compute_loss", trainer=PairwiseTrainer),
    hugging_face("slow end of epochs", EPOCH_END, "SampleGenerator", both=EPOCHS,
                 **hf_callback("SampleGenerator", "on_epoch_end", OFTEN_S)),
    hugging_face("slow on_train_begin", SET_UP, "TokenizesFirst",
                 **hf_callback("TokenizesFirst", "on_train_begin", ONCE_S)),
    hugging_face("balanced", COMPUTE, both={"work_s": LONG_WORK_S}),
]

ON_GPU = [
    plain(".item() in each step", answer("sync-bound", needs_gpu=True), "line:loss.item()",
          after_step=to_float, clean={"after_step": hide}, both=ON_DEVICE),
    lightning(".item() in a callback", answer("sync-bound callback-bound", needs_gpu=True),
              "ReadsLoss", callbacks=using(ReadsLoss),
              clean=callback("Prepares", "on_train_batch_end", HIDDEN_S), both=FIT_ON_DEVICE),
    plain("small kernels", answer("launch-bound", needs_gpu=True, is_once=True), "launch",
          net=small_net, clean={"net": partial(graphed, small_net)}, both=ON_DEVICE),
    plain("loss by rows", answer("launch-bound loss-bound", needs_gpu=True), "loss",
          criterion=loss_by_row, clean={"criterion": loss_at_once},
          both={**ON_DEVICE, "net": partial(GPUNet, layers=4)}),
    # In a plain loop, the copy is part of the loop body.
    plain("unpinned copies",
          answer("copy-bound other-bound", "data/copy", "other", needs_gpu=True), "pin_memory",
          dataset=partial(Images, rows=32768, is_pinned=False),
          clean={"dataset": partial(Images, rows=32768)}, both=ON_DEVICE),
    plain("slow fetch", {**INPUT, "needs_gpu": True}, "Images",
          dataset=partial(Images, load_s=0.02), both=ON_DEVICE),
    lightning("slow callback", {**CALLBACKS, "needs_gpu": True}, "Statistics", both=FIT_ON_DEVICE,
              **callback("Statistics", "on_train_batch_end", 0.02)),
    plain("balanced on a GPU", GPU, both=ON_DEVICE),
    # Train so long that a tear-down of 0.2 s takes less than 5 %.
    lightning("balanced on a GPU", GPU, both={**FIT_ON_DEVICE, "steps": 480}),
]
# fmt: on

PLANTS = [*LIGHTNING, *PLAIN, *TRANSFORMERS, *ON_GPU]
