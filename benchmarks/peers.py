"""Other ways of timing a training step, as callbacks, for `overhead.py`.

Each is used as its documentation says. A package that is not installed raises ImportError.
"""

import atexit
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from loops import Way


class Boundaries(pl.Callback):
    """Something that is told of the boundaries of a step, as a callback or in a plain loop."""

    def boundary(self, i: int) -> None:
        """Is called with 0 at the start of a step, and at the end of each phase."""

    def end_step(self) -> None:
        """Is called at the end of each step."""

    def way(self) -> Way:
        """Returns the same for a plain loop."""
        return Way(self.boundary, self.end_step)

    def on_train_batch_start(self, *_: Any) -> None:
        self.boundary(0)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.boundary(1)

    def on_before_backward(self, *_: Any) -> None:
        self.boundary(2)

    def on_after_backward(self, *_: Any) -> None:
        self.boundary(3)

    def on_train_batch_end(self, *_: Any) -> None:
        self.boundary(4)
        self.end_step()


def cuda_event() -> torch.Event:
    """Returns an event of the GPU that has a time."""
    return torch.Event(device="cuda", enable_timing=True)


class FiveEvents(Boundaries):
    """The floor: five bare events a step, read one step late."""

    def __init__(self, new_event: Callable[[], Any] = cuda_event) -> None:
        self._sets = [[new_event() for _ in range(5)] for _ in range(2)]
        self._step = 0

    def boundary(self, i: int) -> None:
        self._sets[self._step % 2][i].record()

    def end_step(self) -> None:
        self._step += 1
        if self._step > 1:
            events = self._sets[self._step % 2]
            events[-1].synchronize()
            for start, end in pairwise(events):
                start.elapsed_time(end)


class FourSynchronize(Boundaries):
    """The host's clock, after waiting for the device at each boundary."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def boundary(self, i: int) -> None:
        if i == 0:
            self.times = []
        else:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


class Spans(Boundaries):
    """Something that times named spans: forward with the loss, backward, and the update."""

    starts: ClassVar = {0: "forward", 2: "backward", 3: "optimizer"}
    stops: ClassVar = {1: "forward", 3: "backward", 4: "optimizer"}

    def start(self, name: str) -> None:
        """Begins a span."""

    def stop(self, name: str) -> None:
        """Ends it."""

    def boundary(self, i: int) -> None:
        if i in self.stops:
            self.stop(self.stops[i])
        if i in self.starts:
            self.start(self.starts[i])


class TorchTNT(Spans):
    """`torchtnt.utils.timer.Timer(cuda_sync=True)`."""

    def __init__(self) -> None:
        from torchtnt.utils.timer import Timer

        self._timer = Timer(cuda_sync=True)
        self._spans: dict[str, Any] = {}

    def start(self, name: str) -> None:
        self._spans[name] = self._timer.time(name)
        self._spans[name].__enter__()

    def stop(self, name: str) -> None:
        self._spans.pop(name).__exit__(None, None, None)


class DeepSpeed(Spans):
    """DeepSpeed's `SynchronizedWallClockTimer`, read at every step."""

    def __init__(self) -> None:
        from deepspeed.utils.timer import SynchronizedWallClockTimer

        self._timers = SynchronizedWallClockTimer()

    def start(self, name: str) -> None:
        self._timers(name).start()

    def stop(self, name: str) -> None:
        self._timers(name).stop()

    def end_step(self) -> None:
        for name in self.starts.values():
            self._timers(name).elapsed(reset=True)


@functools.cache
def traceml_server() -> None:
    """Starts TraceML's aggregator, without which its callback does nothing."""
    os.environ["TRACEML_ON_MISSING_AGGREGATOR"] = "raise"
    command = [sys.executable, "-m", "traceml_ai.launcher.cli", "serve"]
    logs = tempfile.mkdtemp()
    server = subprocess.Popen([*command, "--logs-dir", logs], stdout=subprocess.DEVNULL)
    atexit.register(server.terminate)


def traceml() -> pl.Callback:
    """TraceML's callback."""
    from traceml_ai.integrations import lightning

    traceml_server()
    lightning.init()
    callback: pl.Callback = lightning.TraceMLCallback()
    return callback


def alloc() -> pl.Callback:
    """Alloc's callback."""
    import alloc

    callback: pl.Callback = alloc.LightningCallback()
    return callback


def throughput_monitor() -> pl.Callback:
    """Lightning's `ThroughputMonitor`."""
    return pl.callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
