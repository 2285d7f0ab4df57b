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
from typing import Any

import lightning.pytorch as pl
import torch


def _cuda_event() -> torch.Event:
    return torch.Event(device="cuda", enable_timing=True)


class FiveEvents(pl.Callback):
    """The floor: five bare events a step, read one step late."""

    def __init__(self, new_event: Callable[[], Any] = _cuda_event) -> None:
        self._sets = [[new_event() for _ in range(5)] for _ in range(2)]
        self._step = 0

    def record(self, i: int) -> None:
        """Records the event of a boundary."""
        self._sets[self._step % 2][i].record()

    def read(self) -> None:
        """Ends the step, and reads the one before."""
        self._step += 1
        if self._step > 1:
            events = self._sets[self._step % 2]
            events[-1].synchronize()
            for start, end in pairwise(events):
                start.elapsed_time(end)

    def on_train_batch_start(self, *_: Any) -> None:
        self.record(0)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.record(1)

    def on_before_backward(self, *_: Any) -> None:
        self.record(2)

    def on_after_backward(self, *_: Any) -> None:
        self.record(3)

    def on_train_batch_end(self, *_: Any) -> None:
        self.record(4)
        self.read()


class FourSynchronize(pl.Callback):
    """The host's clock, after waiting for the device at each boundary."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.times = [time.perf_counter()]

    def synchronize(self) -> None:
        """Waits for the device, and takes the time."""
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def on_before_zero_grad(self, *_: Any) -> None:
        self.synchronize()

    def on_before_backward(self, *_: Any) -> None:
        self.synchronize()

    def on_after_backward(self, *_: Any) -> None:
        self.synchronize()

    def on_train_batch_end(self, *_: Any) -> None:
        self.synchronize()


class Spans(pl.Callback):
    """Something that times named spans: forward with the loss, backward, and the update."""

    def start(self, name: str) -> None:
        """Begins a span."""

    def stop(self, name: str) -> None:
        """Ends it."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.start("forward")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.stop("forward")

    def on_before_backward(self, *_: Any) -> None:
        self.start("backward")

    def on_after_backward(self, *_: Any) -> None:
        self.stop("backward")
        self.start("optimizer")

    def on_train_batch_end(self, *_: Any) -> None:
        self.stop("optimizer")


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

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        for name in ("forward", "backward", "optimizer"):
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
