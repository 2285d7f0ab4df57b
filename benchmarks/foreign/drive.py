"""Run one script of others in this process, with its timer, and trace some of its steps.

    python drive.py FOUND.json FIRST LAST SIZES SCRIPT [ARGUMENT...]

The script has a `GPUPhaseHooks`, written as any user would write it. From step FIRST to step LAST
torch.profiler runs, every step is timed, and FOUND.json gets the phases of each by the timer and by
the trace. With FIRST below 0 nothing is traced, and the timer has its defaults. SIZES, a JSON
object, says how many made items take the place of so many.
"""

import json
import os
import runpy
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import profile, record_function, supported_activities
from torch.utils.data import Dataset

import lightning_gputime
from foreign.phases_in_trace import phases_in_trace
from lightning_gputime import GPUPhaseHooks, StepTimes


class Traced(GPUPhaseHooks):
    """The timer of a script, with a profiler beside it."""

    first: ClassVar[int]
    until: ClassVar[int]
    trace: ClassVar[Path]
    timers: ClassVar[list["Traced"]] = []

    def __init__(self, model: nn.Module, optimizers: Any = None, **options: Any) -> None:
        self.found: dict[int, dict[str, float]] = {}
        self.profiler: Any = None
        self.timers.append(self)
        if self.first >= 0:
            options |= {"every_n_steps": 1, "observers": [self._keep]}
        super().__init__(model, optimizers, **options)
        if self.first >= 0:
            called = [*model.children()] if isinstance(model, nn.ModuleList) else [model]
            self.hooks = [hook for one in called for hook in shown(one)]

    def _keep(self, times: StepTimes) -> None:
        self.found[times.step] = dict(times.phase_ms)

    def steps(self, iterable: Any) -> Any:
        steps = super().steps(iterable)
        return steps if self.first < 0 else WithPoints(steps)

    def step(self) -> None:
        if self.profiler is not None:
            point(f"step {self._step + 1}")
        super().step()
        if self._step == self.first:
            self.profiler = profile(activities=supported_activities())
            self.profiler.start()
        elif self._step == self.until:
            self.end_trace()

    def end_trace(self) -> None:
        if self.profiler is not None:
            profiler, self.profiler = self.profiler, None
            profiler.stop()
            for hook in self.hooks:
                hook.remove()  # A script may write its model to a file.
            profiler.export_chrome_trace(str(self.trace))


class WithPoints:
    """A loader whose trace has a point where the body of the loop begins."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        for item in self._steps:
            point("body")
            yield item

    def __len__(self) -> int:
        return len(self._steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)


def point(name: str) -> None:
    """Leave a range of next to no length in the trace."""
    with record_function(f"foreign/{name}"):
        pass


def shown(module: nn.Module) -> list[Any]:
    """Leave a range in the trace for each call of a module; return the hooks that do."""
    ranges: list[record_function] = []

    def start(*_: Any) -> None:
        ranges.append(record_function("foreign/call"))
        ranges[-1].__enter__()

    def end(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    before = module.register_forward_pre_hook(start, prepend=True)
    return [before, module.register_forward_hook(end)]


def show_backward() -> None:
    """Leave a range in the trace for each run of autograd's engine, where `backward` begins."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def in_range(*args: Any, **options: Any) -> Any:
        with record_function("foreign/backward"):
            return engine(*args, **options)

    autograd._engine_run_backward = in_range


class Made(Dataset[Any]):
    """Made images, in place of a data set of torchvision."""

    sizes: ClassVar[dict[str, int]]

    def __init__(self, size: int, shape: tuple[int, ...], classes: int, transform: Any) -> None:
        self._size = self.sizes.get(str(size), size)
        self._shape, self._classes, self._transform = shape, classes, transform

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if index >= self._size:
            raise IndexError(index)
        made = torch.Generator().manual_seed(index)
        image = torch.rand(self._shape, generator=made)
        for step in getattr(self._transform, "transforms", [self._transform]):
            if type(step).__name__ != "ToTensor":
                image = step(image)
        return image, index % self._classes


def fake_data(
    size: int = 1000,
    image_size: tuple[int, ...] = (3, 224, 224),
    num_classes: int = 10,
    transform: Any = None,
) -> Made:
    """Return what takes the place of torchvision's FakeData."""
    return Made(size, image_size, num_classes, transform)


def mnist(root: str, *, train: bool = True, transform: Any = None, download: bool = False) -> Made:
    """Return what takes the place of torchvision's MNIST."""
    return Made(60000 if train else 10000, (1, 28, 28), 10, transform)


def make_data() -> None:
    """Let the data sets of torchvision be made; where it is missing, what scripts take of it."""
    try:
        import torchvision
        import torchvision.datasets
    except ImportError:
        torchvision = types.ModuleType("torchvision")
        for name in ("datasets", "transforms", "models", "utils"):
            module = types.ModuleType(f"torchvision.{name}")
            setattr(torchvision, name, module)
            sys.modules[f"torchvision.{name}"] = module
        sys.modules["torchvision"] = torchvision
        torchvision.transforms.Compose = lambda steps: types.SimpleNamespace(transforms=steps)
        torchvision.transforms.ToTensor = type("ToTensor", (), {})
        torchvision.transforms.Normalize = lambda mean, std: lambda x: (x - mean[0]) / std[0]
        torchvision.utils.save_image = lambda *_, **__: None
        torchvision.models.resnet18 = lambda: nn.Sequential(
            nn.Conv2d(3, 8, 7, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
            nn.Linear(128, 1000),
        )  # fmt: skip
    torchvision.datasets.FakeData = fake_data
    torchvision.datasets.MNIST = mnist


def main() -> None:
    """Run the script, and write what was found."""
    out, first, last, sizes, script, *arguments = sys.argv[1:]
    found = Path(out).with_suffix(f".{os.environ.get('RANK', '0')}.json")
    Traced.first, Traced.until = int(first), int(last)
    Traced.trace = found.with_suffix(".trace.json")
    Made.sizes = json.loads(sizes)
    make_data()
    lightning_gputime.GPUPhaseHooks = Traced  # type: ignore[misc]
    if Traced.first >= 0:
        show_backward()
    if "FOREIGN_DETERMINISTIC" in os.environ:
        torch.use_deterministic_algorithms(True, warn_only=True)
        # A script may set it to True: then the kernels are those that were the fastest this time.
        type(torch.backends.cudnn).benchmark = False  # type: ignore[attr-defined]
    updates: list[int] = []
    register_optimizer_step_post_hook(lambda *_: updates.append(time.perf_counter_ns()))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    result: dict[str, Any] = {"updates_ns": updates}
    if Traced.timers:
        timer = Traced.timers[-1]
        timer.end_trace()
        timer.flush()
        result |= {"summary": timer.summary().to_dict(), "table": str(timer.summary())}
        if Traced.trace.exists():
            events = json.loads(Traced.trace.read_text())["traceEvents"]
            marked = phases_in_trace(events, marked=True)
            own_stream = phases_in_trace(events, own_stream=True)
            result["steps"] = {
                step: {
                    "timer": timer.found[step],
                    "trace": phases,
                    "marked": marked[step],
                    "own_stream": own_stream[step],
                }
                for step, phases in phases_in_trace(events).items()
                if step in timer.found
            }
    found.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
