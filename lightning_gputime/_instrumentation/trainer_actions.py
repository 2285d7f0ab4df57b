"""Actions of Lightning's Trainer, such as the call of a callback.

The Trainer reports each action to its profiler when the action starts.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from lightning_gputime._compat import lightning_
from lightning_gputime._instrumentation.patching import Attachments, Calls, Subscription
from lightning_gputime._measurement.wall_clock import EPOCH_ENDS, TEAR_DOWN, WallClock
from lightning_gputime._phases import CALLBACKS, COPY, DATA, WAIT, label_of_callback
from lightning_gputime._record.recorder import Recorder

_EPOCH_START = "on_train_epoch_start"


class FitActions:
    """Notification of a fit about the Trainer's actions and loops.

    Callbacks of the class of `timer` are not timed. `fail` is called with errors of the functions
    that run in every batch.
    """

    def __init__(
        self,
        trainer: Any,
        model: Any,
        wall_clock: WallClock,
        timer: Any,
        fail: Callable[[Exception], None],
    ) -> None:
        self._trainer, self._model, self._timer = trainer, model, timer
        self._wall_clock = wall_clock
        self._recorder: Recorder  # Set by `listen`.
        # Functions to call when an action starts, by the name of the action.
        self._calls: dict[str, Callable[[], object]] = {}
        self._listener = _ActionListener(trainer.profiler, self._calls, fail)
        self._attachments = Attachments()  # Inside steps; removed while no step is timed.
        self._loops = Attachments()  # Around whole loops of the trainer, at no cost per step.
        self._loop_entries = lightning_.loop_entries(trainer)
        self.reports_validations = "validation" in self._loop_entries
        """True if the Trainer reports the exact start and end of its validations."""
        self._callback = ""  # Phase name of the callback that was called last inside a step.

    def listen(self, fit: Any, recorder: Recorder) -> None:
        """Notify a fit (`callback.Fit`) of actions until `remove`.

        Some actions only start a phase: they put a mark into `recorder`, without the fit.
        """
        trainer, self._recorder, wall_clock = self._trainer, recorder, self._wall_clock
        self._calls.update(self._actions(fit))
        self._attachments.add(self._listener)
        calls = {
            "validation": Calls(fit.start_validation, fit.end_validation),
            "epoch": Calls(fit.start_epoch, fit.end_epoch),
            "end": Calls(lambda *_, **__: wall_clock.switch_to(TEAR_DOWN)),
        }
        for name, (owner, method) in self._loop_entries.items():
            self._loops.add(Subscription(owner, method, calls[name]))
        # Lightning broadcasts a flag on every batch. Exclude that wait from the loader's time.
        if entry := lightning_.sigterm_broadcast(trainer):

            def start_wait(*_: Any, **__: Any) -> bool:
                recorder.mark(WAIT)
                return False

            self._attachments.add(Subscription(*entry, Calls(start_wait)))

    def refresh(self, fit: Any) -> None:
        """Look up the names of actions again, because a callback's `state_key` may have changed."""
        self._calls.update(self._actions(fit))
        self._listener.refresh()

    def suspend(self) -> None:
        """Stop the notification about actions while no step is timed."""
        self._attachments.suspend()

    def resume(self) -> None:
        self._attachments.reattach()

    def remove(self) -> None:
        self._attachments.remove()
        self._loops.remove()
        self._calls.clear()  # They refer to the fit.

    def _actions(self, fit: Any) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the names of actions, and the function to call when each starts.

        If an action is yielded twice, the later function replaces the earlier.
        """
        trainer, model, mark = self._trainer, self._model, self._recorder.mark

        def model_action(hook: str) -> str:
            return lightning_.module_action(trainer, model, hook)

        # The data of a step.
        yield lightning_.fetch_action(trainer), fit.start_fetch
        yield lightning_.copy_action(trainer), partial(mark, COPY)
        for module in filter(None, (model, trainer.datamodule)):
            for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
                if lightning_.defines(module, hook):
                    yield lightning_.module_action(trainer, module, hook), partial(mark, DATA)

        # The start of an update. A hook of our callback would take 2 us, so use the action of the
        # model, whose hook is called after those of the callbacks.
        yield model_action("on_before_optimizer_step"), fit.start_update

        # The callbacks. A Trainer does not report the end of a callback: it ends when the next
        # begins, and the last of a hook when the same hook of the model begins.
        after_callbacks: dict[str, Callable[[], object]] = {
            "on_train_batch_start": fit.start_step,
            "on_train_batch_end": partial(mark, CALLBACKS),
            **dict.fromkeys(lightning_.IN_STEP, self._leave_callback),
            "on_before_optimizer_step": partial(self._leave_callback_and_start_update, fit),
        }
        others = [other for other in trainer.callbacks if not isinstance(other, type(self._timer))]
        for hook, continue_step in after_callbacks.items():
            start = self._enter_callback if hook in lightning_.IN_STEP else fit.start_callback
            for callback in others:
                if lightning_.defines(callback, hook):
                    label = label_of_callback(callback, hook)
                    yield lightning_.callback_action(callback, hook), partial(start, label)
                    yield model_action(hook), continue_step

        # The hooks at the start of the first epoch end the entry `set-up`.
        start_epoch = partial(self._wall_clock.switch_to, EPOCH_ENDS)
        for callback in trainer.callbacks:
            yield lightning_.callback_action(callback, _EPOCH_START), start_epoch
        yield model_action(_EPOCH_START), start_epoch

        # Lightning clears gradients just before a validation, unless they accumulate. Exclude the
        # time from there on.
        yield model_action("on_validation_model_zero_grad"), partial(self._recorder.pause, now=True)

    def _enter_callback(self, label: str) -> None:
        self._leave_callback()  # The trainer does not report the end of the callback before.
        self._callback = label
        self._recorder.enter_phase(label)

    def _leave_callback(self) -> None:
        self._recorder.leave_phase(self._callback)

    def _leave_callback_and_start_update(self, fit: Any) -> None:
        self._leave_callback()
        fit.start_update()


class _ActionListener(Subscription):
    """Attachment that calls functions when a trainer starts certain actions.

    A Trainer notifies its profiler before every action, such as the call of one callback, even if
    the action does nothing. So the order of the callbacks does not matter.

    Args:
        profiler: Profiler of the Trainer.
        calls: Functions to call, by the name of the action.
        fail: Called with their errors.
    """

    def __init__(
        self,
        profiler: Any,
        calls: Mapping[str, Callable[[], object]],
        fail: Callable[[Exception], None],
    ) -> None:
        # An idle profiler needs no call. Any other, or a patch by other code, must also be called.
        wrap = _ActionCalls if lightning_.is_idle(profiler) else _RelayedActionCalls
        super().__init__(profiler, "start", (calls, fail), wrap)

    def attach(self) -> None:
        super().attach()
        self.refresh()

    def refresh(self) -> None:
        """Make changes of `calls` take effect: forget which actions had no listener."""
        self.patch.replacement.clear()


class _ActionCalls(dict[str, None]):
    """Replacement of `start` of an idle profiler, which does nothing: calls the listeners instead.

    It is a dict of the actions without a listener. A step has dozens of actions, and few have a
    listener. Calling the dict looks up an action in C, without a Python call. Only a missing
    action, which may have a listener, runs Python code.

    Args:
        original: The replaced function.
        listeners: Pairs `(calls, fail)`, one of each `_ActionListener`.
    """

    __slots__ = ("_listeners", "_original")

    def __init__(self, original: Callable[[str], Any], listeners: Any = ()) -> None:
        super().__init__()
        self._original = original
        self._listeners: list[Any] = listeners

    __call__ = dict.__getitem__

    def __missing__(self, action_name: str) -> None:
        """Call the listeners of an action. If there are none, remember that."""
        has_listener = False
        for calls, fail in [*self._listeners]:  # A copy, because `fail` may remove one.
            if action_name in calls:
                has_listener = True
                try:
                    calls[action_name]()
                except Exception as error:
                    fail(error)
        # Limit the actions to remember, because their names may contain numbers.
        if not has_listener and len(self) < 1000:
            self[action_name] = None

    def __bool__(self) -> bool:
        return True  # A function is truthy, but an empty dict is not.

    def __hash__(self) -> int:  # type: ignore[override]  # a function, not a value
        return id(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._original,)  # Nobody listens to the copy of a profiler.


class _RelayedActionCalls(_ActionCalls):
    """Replacement of `start` of an active profiler: calls the listeners, then the profiler."""

    __slots__ = ()

    def __call__(self, action_name: str) -> Any:
        self[action_name]  # Its `__missing__` calls the listeners.
        return self._original(action_name)
