"""Evaluations inside a training step: model calls in eval mode without grad."""

from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import nn

from lightning_gputime._instrumentation.loop import is_training
from lightning_gputime._instrumentation.optimizer import OptimizerBoundary
from lightning_gputime._measurement.wall_clock import EVALUATION as EVALUATION_ENTRY
from lightning_gputime._measurement.wall_clock import STEPS, WallClock
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
from lightning_gputime._record.pending_steps import is_fetch
from lightning_gputime._record.recorder import IDLE, Recorder

# Number of previous steps that a step with evaluation calls is compared with.
_N_COMPARED_STEPS = 10
# Place of a call in its step: the number of training calls, and of updates, before it.
_Place = tuple[int, int]
# Consecutive marks of a step: the index of the first mark, and the index after the last mark.
_Span = tuple[int, int]


class _UntimedSpans:
    """Spans of calls in an untimed step, which has no marks.

    A span lasts from the first call until other work of the step follows, on the host's clock.
    """

    def __init__(self, recorder: Recorder, wall_clock: WallClock) -> None:
        self._recorder, self._wall_clock = recorder, wall_clock
        self._open: tuple[_Place, int] | None = None  # Place and start of the open span.
        self._ended_ns: Counter[_Place] = Counter()  # Time of the ended spans at each place.

    def start(self, place: _Place) -> None:
        """Start a span, unless this call continues a span.

        As in timed steps, calls in a named phase, and between forward and the update, are never
        excluded.
        """
        forwards, updates = place
        may_be_excluded = not forwards or updates > 0
        if self._open is None and may_be_excluded and not self._recorder.named.names:
            self._open = place, self._steps_ns()

    def end(self) -> None:
        """End the open span, because other work of the step follows."""
        if self._open is not None:
            place, start_ns = self._open
            self._open = None
            self._ended_ns[place] += self._steps_ns() - start_ns

    def take(self) -> list[tuple[_Place, int]]:
        """Return the place and the time of all spans of the step that ends, and forget them."""
        self.end()
        spans = [*self._ended_ns.items()]
        self._ended_ns.clear()
        return spans

    def _steps_ns(self) -> int:
        # The cumulative time of all steps, which does not contain pauses.
        return self._wall_clock.steps_ns(self._recorder.clock.host_ns())


class EvaluationSearch:
    """Search for evaluations among calls without grad, and exclude their time from the steps.

    A teacher, a rollout and pseudo-labels also call a model in eval mode without grad, but are part
    of the step. These rules distinguish them if the entire trained model is in eval mode:

    - Calls under `torch.inference_mode` are an evaluation: autograd cannot use the results.
    - Calls after the last update of a step are an evaluation: nothing in the step uses the results.
    - Other calls are an evaluation if they are an exception: few steps have such calls, or the
      other steps all have equally many, and this step has more.
    - Calls before the first work of a step are an evaluation if every step except the first has
      equally many. Such a loop evaluates after `step()`. If the calls were a part of each step, the
      first step would have them, too.

    The rules are applied when the step ends. Until then the calls have the label `EVALUATION`,
    which counts as `other` if no rule applies.

    `optimizer` counts the updates of the open step. `wall_clock` excludes the time of evaluations
    from it.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        optimizer: OptimizerBoundary,
        wall_clock: WallClock,
    ) -> None:
        self._recorder, self._model, self._optimizer = recorder, model, optimizer
        self._wall_clock = wall_clock
        self.untimed_spans = _UntimedSpans(recorder, wall_clock)
        self.has_found = False
        """True once an evaluation was found inside a step."""
        self._was_at_start = False  # True if the newest timed step began with its inner calls.
        self.is_pending = False
        """True if the open step has calls in eval mode, so `exclude_evaluations` must be called."""
        # Only steps with inner calls, that is calls in eval mode before the last update: the newest
        # of these steps as (step index, number of inner calls), and the number of all of them.
        self._inner_calls: deque[tuple[int, int]] = deque(maxlen=_N_COMPARED_STEPS)
        self._n_steps_with_inner_calls = 0
        self._first_had_inner_calls = False
        self.reset()

    def reset(self) -> None:
        """Forget the calls of the open step."""
        self.is_pending = False
        self._calls: Counter[_Place] = Counter()  # Number of calls at each place.
        self._places_after_backward: set[_Place] = set()  # In a loop without optimizer.
        self._generations = 0  # Number of calls that generate text.
        self._is_inference = True  # True if all calls are under inference mode.
        self.untimed_spans.take()

    def on_call_start(self, forwards: int, label: str = EVALUATION) -> None:
        """Mark an outermost call in eval mode without grad, after `forwards` training calls."""
        recorder = self._recorder
        if is_training(self._model):
            # Only a part of the model is in eval mode, so this is part of the step.
            if recorder.label == DATA:
                recorder.mark(OTHER)
            return
        place = self.count(forwards, label)
        if recorder.state is IDLE:
            self.untimed_spans.start(place)
        if recorder.label == AFTER_BACKWARD and not self._optimizer.has_any:
            self._places_after_backward.add(place)
        if recorder.label in (DATA, OTHER, AFTER_BACKWARD, AFTER_UPDATE):
            recorder.mark(label)

    def count(self, forwards: int, label: str = EVALUATION) -> _Place:
        """Count a call in eval mode without grad. Return its place in the step."""
        place = forwards, self._optimizer.updates
        self.is_pending = True
        self._is_inference &= torch.is_inference_mode_enabled()
        if label == GENERATE:
            self._generations += 1
        else:
            self._calls[place] += 1
        return place

    def exclude_evaluations(self, forwards: int, step: int) -> None:
        """Exclude those calls of a step that are an evaluation. Call when the step ends.

        `forwards` is its number of training calls.
        """
        updates = self._optimizer.updates
        # Final calls follow the last update, or the last backward in a loop without an optimizer.
        # They are certainly an evaluation. The rules decide on all other calls, the inner calls.
        end = forwards, updates
        has_final = end in self._calls and (updates > 0 or end in self._places_after_backward)
        n_final = self._calls[end] if has_final else 0
        n_inner = self._calls.total() + self._generations - n_final
        labels = [EVALUATION, GENERATE] if self._generations else [EVALUATION]
        spans, ends_in_span = _spans_of(labels, self._recorder.open.labels)
        final_spans = [spans.pop()] if ends_in_span and has_final else []
        are_inner_excluded = (
            not n_inner or self._is_inference or self._is_exception(n_inner, spans, step)
        )
        inner_spans = spans if are_inner_excluded else []
        for first, stop in [*final_spans, *reversed(inner_spans)]:
            self.has_found = True
            self._wall_clock.shorten_step(self._recorder.exclude_evaluation(first, stop))
        for place, ns in self.untimed_spans.take():
            if are_inner_excluded or (has_final and place == end):
                self.has_found = True
                self._wall_clock.shorten_step(ns)
                # For a timed step, `StepReader` moves the time, once it has read the marks.
                self._wall_clock.move(STEPS, EVALUATION_ENTRY, ns / 1e6)
        if self.had_inner_calls(step):
            # The step was remembered when it seemed to end, but continued. Replace its number.
            self._inner_calls.pop()
            self._n_steps_with_inner_calls -= 1
        if n_inner:
            self._first_had_inner_calls |= step == 0
            self._inner_calls.append((step, n_inner))
            self._n_steps_with_inner_calls += 1
        self.reset()

    def had_inner_calls(self, step: int) -> bool:
        """Return whether a recent step had calls in eval mode before its last update."""
        return any(index == step for index, _ in self._inner_calls)

    def _is_exception(self, n_inner: int, spans: Sequence[_Span], step: int) -> bool:
        """Return whether the inner calls of a step are an exception, compared with earlier steps.

        `spans` are their marks. The index `step` is also the number of earlier steps.
        """
        n_compared = min(step, _N_COMPARED_STEPS)
        counts = [n for index, n in self._inner_calls if step - n_compared <= index < step]
        n_without = n_compared - len(counts)
        if n_without >= max(2, n_compared / 2):
            return True  # Few steps have such calls.
        if len({*counts}) > 1:
            return False  # The number of calls varies between steps, as with rollouts.
        if n_compared == _N_COMPARED_STEPS and n_inner >= max(counts, default=0) + 2:
            return True  # All steps have such calls, and this step has more.
        # If the loop evaluates after `step()`, each step but the first begins with an evaluation.
        # In a loop over `steps()`, each step begins with its batch, so this cannot occur.
        if self._recorder.state is not IDLE:
            labels = self._recorder.open.labels
            self._was_at_start = len(spans) == 1 and is_fetch(labels[: spans[0][0]])
        n_without_in_all = step - self._n_steps_with_inner_calls
        only_first_without = n_without_in_all == 1 and not self._first_had_inner_calls
        return self._was_at_start and only_first_without and {*counts} <= {n_inner}


def _spans_of(searched: Sequence[str], labels: Sequence[str]) -> tuple[list[_Span], bool]:
    """Return the spans of marks with a searched label, and True if the last span is open.

    A span lasts until work of the step follows; until then it is open. Other marks may lie inside.
    """
    spans: list[_Span] = []
    is_open = False
    for index, label in enumerate(labels):
        if label in searched:
            first = spans.pop()[0] if is_open else index
            spans.append((first, index + 1))
            is_open = True
        elif is_open and label in INTERRUPTIONS and spans[-1][1] == index:
            # A wait for other ranks right after a call is part of the evaluation.
            spans[-1] = spans[-1][0], index + 1
        elif label.partition("/")[0] in (FORWARD, LOSS, BACKWARD, GRAD, OPTIMIZER):
            is_open = False  # This phase separates two evaluations.
    return spans, is_open
