"""The timer for a loop with Lightning's Fabric."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_gputime._fabric import FabricTimer
from lightning_gputime._options import Options, SyncRanks, by_name
from lightning_gputime._record.clock import Clock
from lightning_gputime._results.slow import SlowStep


class PhaseTimeCallback(FabricTimer):
    """Logs how long the phases of each training step take, for `Fabric(callbacks=[...])`.

    It starts with `fabric.setup(model, optimizer)`, and times all models that are set up. One that
    is set up after an update starts a new measurement. The means go to `fabric.loggers`.

    A step ends where a loader of `fabric.setup_dataloaders` is asked for the next batch, if there
    was an update since the last: a batch with the updates of two optimizers (GAN) is one step, and
    so are micro-batches whose gradients accumulate. A loader that is read in eval mode or without
    grad is an evaluation, and belongs to no step. For any other loader say `steps(loader)`; else a
    step ends with the update of the optimizer that was seen last, and what follows is `data`.

    Args:
        prefix: First part of the logged keys.
        lag: How many ended steps the device may still be at work on.
        warmup_steps: How many of the first steps the summary leaves out.
        history: How many of the newest steps `history` returns, and percentiles are taken over.
        log_every_n_steps: How many steps are averaged into one log.
        modules: Modules of the first model that are sub-phases: a depth, "all", dotted names,
            patterns such as "layers.*", or a mapping.
        annotate: Whether to show the phases as ranges in torch.profiler and Nsight, too.
        every_n_steps: One step in so many is timed; in the others the hooks do nothing.
        probe_every_n_steps: One step in so many is probed for launch gaps; with 0 none is.
        sync_ranks: When the ranks are compared: at the end of each epoch; with "log" at every log.
        on_step: Is called with the times of every step, when they are read; or a metric.
        on_slow_step: Is called with each `SlowStep`, when it is read.
        clock: Takes the place of the device's clock, for tests and new kinds of device.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an impossible value.

    Example:
        >>> timer = PhaseTimeCallback()
        >>> fabric = Fabric(callbacks=[timer])
        >>> ...
        >>> timer.remove()
        >>> print(timer.summary())
    """

    @by_name(0, "write PhaseTimeCallback(warmup_steps=10)")
    def __init__(
        self,
        *,
        prefix: str = "phase_time",
        lag: int = 1,
        warmup_steps: int = 5,
        history: int = 10_000,
        log_every_n_steps: int = 50,
        modules: int | str | Sequence[str] | Mapping[str, nn.Module] = (),
        annotate: bool = False,
        every_n_steps: int = 1,
        probe_every_n_steps: int = 0,
        sync_ranks: SyncRanks = True,
        on_step: Any = None,
        on_slow_step: Callable[[SlowStep], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            Options(
                prefix=prefix,
                lag=lag,
                warmup_steps=warmup_steps,
                history=history,
                modules=modules,
                annotate=annotate,
                every_n_steps=every_n_steps,
                probe_every_n_steps=probe_every_n_steps,
                sync_ranks=sync_ranks,
                on_step=on_step,
                on_slow_step=on_slow_step,
                clock=clock,
            ),
            log_every_n_steps=log_every_n_steps,
        )
