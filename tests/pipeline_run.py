"""Run the manual's recipes for pipelines in one of two processes, on a fake GPU.

python tests/pipeline_run.py MANUAL DIRECTORY RANK

The loops imitate those of Megatron-LM and torchtitan, which need GPUs. Megatron has its own
schedule, a separate backward and no call of `zero_grad`; torchtitan has a schedule of torch.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from fake_gpu import Adder, FakeGPU, Layer, batches, steps, work
from fake_ranks import from_module
from torch import Tensor, distributed, nn
from torch.autograd.variable import Variable
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

import lightning_gputime._timer
from lightning_gputime import GPUPhaseHooks, phase

STEPS, MICRO_BATCHES, CHUNKS, WORLD = 20, 2, 2, 2
gpu = FakeGPU()

PACKAGE = "megatron.core.pipeline_parallel"
sys.modules[PACKAGE] = ModuleType(PACKAGE)
of_megatron = from_module(f"{PACKAGE}.p2p_communication")


def chunks() -> list[nn.Module]:
    """Return the stages of a rank: an interleaved schedule has several."""
    return [Layer(gpu, 4.0, 8.0) for _ in range(CHUNKS)]


def loss_of(output: Tensor, _: Tensor | None = None) -> Tensor:
    return work(output, gpu, 0.5, 0.25).sum()


class MixedPrecision:
    """An optimizer like Megatron's: it contains a torch optimizer, but is not an `Optimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self) -> None:
        raise AssertionError("Megatron does not call it.")

    def step(self) -> bool:
        self.optimizer.step()
        return True


def received(tag: int) -> Tensor:
    tensor = torch.empty(1, 2)
    of_megatron(distributed.recv, tensor, 1 - distributed.get_rank(), None, tag)
    return tensor.requires_grad_()


def backward_step(output: Tensor, gradient: Tensor | None) -> None:
    # Like Megatron, call the engine directly, because the output may already be freed.
    given = torch.ones_like(output) if gradient is None else gradient.detach()
    Variable._execution_engine.run_backward((output,), (given,), False, False, (), True, True)


class Megatron:
    """Replaces `megatron.core.pipeline_parallel.schedules` and `megatron.training.training`.

    Each stage runs all micro-batches in turn, forward and then backward.
    """

    def __init__(self) -> None:
        self.backward_step: Callable[..., None] = backward_step

    def train_step(
        self, forward: object, data: Iterator[Tensor], model: Any, optimizer: Any, *_: object
    ) -> str:
        for item in model:
            for parameter in item.parameters():
                parameter.grad = None
        rank, last = distributed.get_rank(), WORLD * CHUNKS - 1
        sent, passed = list[Any](), []
        inputs = [next(data) for _ in range(MICRO_BATCHES)]
        for number, chunk in enumerate(model):
            stage = number * WORLD + rank
            for i, given in enumerate(inputs):
                x = received(10 * stage + i) if stage else given
                y = loss_of(chunk(x)) if stage == last else chunk(x)
                passed.append((stage, i, x, y))
                if stage < last:
                    sent.append(distributed.isend(y.detach(), 1 - rank, tag=10 * (stage + 1) + i))
        for stage, i, x, y in reversed(passed):
            self.backward_step(y, received(100 + 10 * stage + i) if stage < last else None)
            if stage:
                sent.append(distributed.isend(x.grad, 1 - rank, tag=100 + 10 * (stage - 1) + i))
        for message in sent:
            of_megatron(message.wait)
        optimizer.step()
        return "its result"


def megatron(recipe: str) -> GPUPhaseHooks:
    both, model = Megatron(), chunks()
    parameters = (parameter for chunk in model for parameter in chunk.parameters())
    optimizer, data = MixedPrecision(Adder(parameters, gpu, 2.0)), batches(gpu, 99, copy_ms=1.0)
    exec(recipe, {**NAMES, "training": both, "schedules": both})
    for _ in range(STEPS):
        assert both.train_step(None, data, model, optimizer, None) == "its result"
    timer: GPUPhaseHooks
    [timer] = vars(both)["train_step"].__kwdefaults__["timers"]
    return timer


class Trainer:
    """A trainer like torchtitan's, whose steps first fetch all micro-batches."""

    def __init__(self) -> None:
        self.model_parts = chunks()
        self.optimizers = [Adder(item.parameters(), gpu, 1.0) for item in self.model_parts]
        self.rank, device = distributed.get_rank(), torch.device("cpu")
        example = torch.ones(1, 2, requires_grad=True)
        examples: dict[str, Any] = {"input_args": (example,), "output_args": example}
        stages: list[Any] = [
            PipelineStage(entry, number * WORLD + self.rank, WORLD * CHUNKS, device, **examples)
            for number, entry in enumerate(self.model_parts)
        ]
        self.schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss_of)

    def batch_generator(self, data: Iterator[Tensor]) -> Iterator[Tensor]:
        yield from data

    def train_step(self, data: Iterator[Tensor]) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        x = torch.cat([next(data) for _ in range(MICRO_BATCHES)])
        self.schedule.step(x) if self.rank == 0 else self.schedule.step(target=x)
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self) -> None:
        data = self.batch_generator(batches(gpu, 99, copy_ms=1.0))
        for _ in range(STEPS):
            self.train_step(data)


def torchtitan(recipe: str) -> GPUPhaseHooks:
    known: dict[str, Any] = {**NAMES, "Trainer": Trainer}
    exec(recipe, known)
    trainer = known["Timed"]()
    trainer.train()
    timer: GPUPhaseHooks = trainer.timer
    return timer


NAMES = {"GPUPhaseHooks": GPUPhaseHooks, "phase": phase, "torch": torch}


def main(manual: Path, directory: Path, rank: int) -> None:
    store = f"file://{directory}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    vars(lightning_gputime._timer)["clock_for"] = lambda *_, **__: gpu
    blocks = re.findall(r"```text\n(.*?)```", manual.read_text(), re.DOTALL)
    found = {}
    for loop, word in ((megatron, "training.train_step"), (torchtitan, "class Timed(Trainer)")):
        [recipe] = [block for block in blocks if word in block]
        assert len([line for line in recipe.splitlines() if line.strip()]) <= 10
        lines = [line for line in recipe.splitlines() if not line.startswith(("from ", "import "))]
        timer = loop("\n".join(lines))
        timer.remove()
        rows = [row for row in timer.summary().lines if not row.entry]
        longest: dict[str, str] = {}  # Line with most of the time of each phase.
        for name in ("data", "forward", "backward", "optimizer"):
            in_phase = [row for row in rows if name in row.phases]
            longest[name] = max(in_phase, key=lambda row: row.phases[name].ms).function
        found[loop.__name__] = {"steps": steps(timer), "lines": longest}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
