"""What both timers are made of: their common options, and the start of a measurement."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_gputime._annotate import Annotator
from lightning_gputime._arguments import check_options
from lightning_gputime._events import Clock, HostClock
from lightning_gputime._log import PhaseLog
from lightning_gputime._measurement import Measurement, SyncRanks
from lightning_gputime._phases import StepTimes
from lightning_gputime._probe import Probe
from lightning_gputime._readings import Readings
from lightning_gputime._recorder import Recorder
from lightning_gputime._results import Results
from lightning_gputime._session import Session


class Timer(Readings):
    """The part that both timers share of how steps are timed. Their docstrings have the options."""

    def __init__(
        self,
        *,
        prefix: str,
        lag: int,
        warmup_steps: int,
        history: int,
        annotate: bool,
        every_n_steps: int,
        probe_every_n_steps: int,
        sync_ranks: SyncRanks,
        on_step: Any,
        clock: Clock | None,
    ) -> None:
        check_options(
            prefix,
            lag,
            warmup_steps,
            history,
            annotate,
            every_n_steps,
            probe_every_n_steps,
            sync_ranks,
            on_step,
            clock,
        )
        self._prefix = prefix
        self._lag = lag
        # Of these steps every n-th is timed.
        self._warmup_steps = warmup_steps // every_n_steps
        self._every_n_steps = every_n_steps
        # In steps, of which `warmup_steps` are left alone.
        self._probing = (probe_every_n_steps, warmup_steps) if probe_every_n_steps else None
        self._history = history
        self._annotate = annotate
        self._sync_ranks: SyncRanks = sync_ranks
        self._on_step = on_step
        self._clock = clock
        self._results = Results(history, self._warmup_steps)
        self._session: Session | None = None

    def _start(
        self,
        clock: Clock,
        model: nn.Module,
        optimizers: Sequence[Any],
        phase_log: PhaseLog,
        on_step: Sequence[Callable[[StepTimes], object]] = (),
        **boundaries: Any,
    ) -> Session:
        """Starts a new measurement, and puts the hooks on; the options are those of `Boundaries`.

        Args:
            clock: Where events and host times come from.
            model: The model that is timed.
            optimizers: The optimizers whose updates are timed.
            phase_log: Gets every step.
            on_step: Are called with every step, besides the user's.
            boundaries: Those options.
        """
        probe = Probe(clock, *self._probing) if self._probing else None
        self._results = Results(
            self._history, self._warmup_steps, isinstance(clock, HostClock), probe
        )
        own = () if self._on_step is None else (self._on_step,)
        measurement = Measurement(
            self._results,
            phase_log,
            sync_ranks=self._sync_ranks,
            lag=self._lag,
            on_step=[*own, *on_step],
            probe=probe,
        )
        recorder = Recorder(
            clock,
            lag=self._lag,
            emit=measurement.add,
            batch=measurement.batch,
            annotate=Annotator() if self._annotate else None,
        )
        self._session = Session(
            recorder,
            model,
            optimizers,
            measurement=measurement,
            every_n_steps=self._every_n_steps,
            probe=probe,
            **boundaries,
        )
        return self._session
