"""What is certainly an evaluation, among the calls of a model in eval mode without grad."""

from collections import deque

import torch
from torch import nn

from lightning_gputime._phases import AFTER_BACKWARD, AFTER_UPDATE, DATA, EVALUATION, OTHER
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._untraced import untraced

# In so many steps before it all that have calls have as many; an evaluation has so many more.
_STEPS, _MORE = 10, 2


@untraced
class EvaluationBoundary:
    """Tells a validation, which belongs to no step, from a part of the step that needs no grad.

    A frozen encoder, a teacher and pseudo-labels are called in eval mode without grad, too, but in
    every step, and alike. So it is a validation if the model as a whole is in eval mode, and is
    called more often than in the steps before, which are alike in that; or under
    `torch.inference_mode`, whose results cannot be trained on. What is not certain is `other`.

    Args:
        recorder: Gets the marks.
        model: The whole model.
    """

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self._recorder = recorder
        self._model = model
        # Which step is open, of all that were seen; how many such calls it has, and in which step
        # they were counted.
        self._seen = self._step = self._calls = 0
        # Both of the last steps that had some.
        self._before: deque[tuple[int, int]] = deque(maxlen=_STEPS)

    def call_begins(self) -> None:
        """Must be told of each outermost call in eval mode without grad."""
        recorder = self._recorder
        if self._model.training:
            # A part of it alone. The fetch is over.
            if recorder.label == DATA:
                recorder.mark(OTHER)
            return
        is_certain = self.count() or torch.is_inference_mode_enabled()
        if recorder.label in (DATA, OTHER, AFTER_BACKWARD, AFTER_UPDATE):
            recorder.mark(EVALUATION)
        if is_certain and recorder.label == EVALUATION:
            recorder.pause(since=EVALUATION)

    def count_steps(self, n: int = 1) -> None:
        """Count steps that have ended, or were dropped."""
        self._seen += n

    def count(self) -> bool:
        """Counts such a call, in a step that is timed or not.

        Returns:
            Whether the open step has certainly more of them than those before.
        """
        step = self._seen
        if step != self._step:
            self._before.append((self._step, self._calls))
            self._step, self._calls = step, 0
        self._calls += 1
        counts = {calls for at, calls in self._before if at >= step - _STEPS}
        if len(counts) > 1:
            return False  # Each step has them, now more and now fewer: a rollout, a generation.
        usual = max(counts, default=0)
        # With no step before it nothing is known of what a step has.
        return self._recorder.pending.ended > 0 and self._calls >= usual + _MORE
