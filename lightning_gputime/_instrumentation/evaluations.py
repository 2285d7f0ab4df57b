"""Evaluations inside a training step: model calls in eval mode without grad."""

from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
from torch import nn

from lightning_gputime._instrumentation.loop import is_training
from lightning_gputime._instrumentation.optimizer import OptimizerBoundary
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_UPDATE,
    BACKWARD,
    DATA,
    EVALUATION,
    FORWARD,
    GENERATE,
    GRAD,
    INTERRUPTIONS,
    LOSS,
    OPTIMIZER,
    OTHER,
)
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.step_marks import is_fetch

_N_COMPARED_STEPS = 10
"""Number of previous steps that a step with evaluation calls is compared with."""

_MIN_STEPS_WITHOUT = 2
"""Calls are an exception if at least this many of these steps, and at least half of them, have no
calls."""

_MIN_MORE_CALLS = 2
"""Calls are also an exception if all compared steps with calls have equally many, and this step has
at least this many more."""


class EvaluationSearch:
    """Search for evaluations, which belong to no step, among calls without gradients.

    A teacher, a rollout and pseudo-labels also call a model in eval mode without grad. These rules
    apply if the model is in eval mode:

    - Calls under `torch.inference_mode` are an evaluation: autograd cannot use the results.
    - Calls after the last update of a step are an evaluation: nothing in the step uses the results.
    - Other calls are an evaluation if they are an exception: few steps have such calls, or this
      step has more of them than the others, which all have equally many.
    - Calls before the first work of a step are an evaluation if every step except the first has
      equally many. Such a loop evaluates after `step()`. If the calls were a part of each step, the
      first step would have them, too.

    The rules are applied when the step ends. Until then the calls have the label `EVALUATION`,
    which counts as `other` if no rule applies.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        optimizer: OptimizerBoundary,
        exclude_ns: Callable[[int], object],
    ) -> None:
        self._recorder, self._model, self._optimizer = recorder, model, optimizer
        self._exclude_ns = exclude_ns
        self.is_pending = False
        """True if the open step has evaluation calls that `settle` has not decided on."""
        # Index and number of calls of the newest steps with calls, and number of all such steps.
        self._counts: deque[tuple[int, int]] = deque(maxlen=_N_COMPARED_STEPS)
        self._n_steps_with = 0
        self._first_had_calls = False
        self.reset()

    def reset(self) -> None:
        """Forget the calls of the open step."""
        self.is_pending = False
        # Number of calls by their place: the number of training calls and updates before them.
        self._calls: Counter[tuple[int, int]] = Counter()
        self._places_after_backward: set[tuple[int, int]] = set()  # In a loop without optimizer.
        self._generations = 0
        self._is_inference = True  # True if all calls are under inference mode.

    def on_call_start(self, forwards: int, label: str = EVALUATION) -> None:
        """Mark an outermost call in eval mode without grad, after `forwards` training calls."""
        recorder = self._recorder
        if is_training(self._model):
            # Only a part of the model is in eval mode, so this is part of the step.
            if recorder.label == DATA:
                recorder.mark(OTHER)
            return
        place = self.count(forwards, label)
        if recorder.label == AFTER_BACKWARD and not self._optimizer.has_any:
            self._places_after_backward.add(place)
        if recorder.label in (DATA, OTHER, AFTER_BACKWARD, AFTER_UPDATE):
            recorder.mark(label)

    def count(self, forwards: int, label: str = EVALUATION) -> tuple[int, int]:
        """Count a call. Return its place in the step."""
        place = forwards, self._optimizer.updates
        self.is_pending = True
        self._is_inference &= torch.is_inference_mode_enabled()
        if label == GENERATE:
            self._generations += 1
        else:
            self._calls[place] += 1
        return place

    def settle(self, forwards: int, step: int) -> None:
        """Decide on the calls of a step that ends.

        Args:
            forwards: Number of its training calls.
            step: Index of the step, from 0.
        """
        # Calls after the last update, or after the last backward in a loop without an optimizer,
        # are certainly an evaluation. The rules decide on the calls before it, `inside` the step.
        end = forwards, self._optimizer.updates
        has_tail = end in self._calls and (end[1] > 0 or end in self._places_after_backward)
        n_tail = self._calls[end] if has_tail else 0
        n_inside = self._calls.total() + self._generations - n_tail
        labels = [EVALUATION, GENERATE] if self._generations else [EVALUATION]
        runs, ends_in_run = _runs_of(labels, self._recorder.open.labels)
        tail = [runs.pop()] if ends_in_run and has_tail else []
        if n_inside and not self._is_inference and not self._is_exception(n_inside, runs, step):
            runs = []
        for first, stop in [*tail, *reversed(runs)]:
            self._exclude_ns(self._recorder.exclude_evaluation(first, stop))
        self._remember(step, n_inside)
        self.reset()

    def has_calls_in(self, step: int) -> bool:
        """Return whether a recent step had calls before its last update."""
        return any(index == step for index, _ in self._counts)

    def _remember(self, step: int, n_inside: int) -> None:
        if self.has_calls_in(step):  # The step was settled before, and then continued.
            self._counts.pop()
            self._n_steps_with -= 1
        if n_inside:
            self._first_had_calls |= step == 0
            self._counts.append((step, n_inside))
            self._n_steps_with += 1

    def _is_exception(self, n_inside: int, runs: Sequence[tuple[int, int]], step: int) -> bool:
        """Return whether the calls in a step are an exception.

        Args:
            n_inside: Number of its calls before the last update.
            runs: First and last index of their marks, see `_runs_of`.
            step: Index of the step.
        """
        n_compared = min(step, _N_COMPARED_STEPS)
        counts = [n for index, n in self._counts if step - n_compared <= index < step]
        n_without = n_compared - len(counts)
        if n_without >= max(_MIN_STEPS_WITHOUT, n_compared / 2):
            return True  # Few steps have such calls.
        if len({*counts}) > 1:
            return False  # The number of calls varies between steps, as with rollouts.
        if n_compared == _N_COMPARED_STEPS and n_inside >= max(counts, default=0) + _MIN_MORE_CALLS:
            return True  # All steps have such calls, and this step has more.
        # If the loop evaluates after `step()`, each step but the first begins with an evaluation.
        # In a loop over `steps()`, each step begins with its batch, so this cannot occur.
        labels = self._recorder.open.labels
        is_first = len(runs) == 1 and is_fetch(labels[: runs[0][0]])
        only_first_without = step - self._n_steps_with == 1 and not self._first_had_calls
        return is_first and only_first_without and {*counts} <= {n_inside}


# Phases that separate two evaluations in a step.
_WORK = (FORWARD, LOSS, BACKWARD, GRAD, OPTIMIZER)


def _runs_of(searched: Sequence[str], labels: Sequence[str]) -> tuple[list[tuple[int, int]], bool]:
    """Return runs of marks, and True if no work of the step follows the last run.

    A run is given by the index of its first mark and the index after its last mark. Work of the
    step ends a run.

    Args:
        searched: Labels of the marks in a run.
        labels: Labels of all marks.
    """
    runs: list[tuple[int, int]] = []
    is_open = False
    for place, label in enumerate(labels):
        if label in searched:
            first = runs.pop()[0] if is_open else place
            runs.append((first, place + 1))
            is_open = True
        elif is_open and label in INTERRUPTIONS and runs[-1][1] == place:
            runs[-1] = runs[-1][0], place + 1
        elif label.partition("/")[0] in _WORK:
            is_open = False
    return runs, is_open
