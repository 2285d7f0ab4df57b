"""What a trainer tells its profiler: where it is, also between two batches."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning_gputime._boundaries.patching import Calls, Subscription, patch_function
from lightning_gputime._untraced import untraced


class Actions:
    """Calls functions when a trainer begins certain actions.

    A Trainer tells its profiler of all that it begins, also where that profiler does nothing, and
    before any callback is called: so the order of the callbacks does not matter.

    Args:
        profiler: The profiler of the trainer.
        calls: What is called, by the name of the action.
        fail: Is called with an error of such a call.
        is_idle: Whether the profiler does nothing when it is told.
    """

    def __init__(
        self,
        profiler: Any,
        calls: Mapping[str, Callable[[], object]],
        fail: Callable[[Exception], None],
        *,
        is_idle: bool,
    ) -> None:
        self.calls = calls
        self.fail = fail
        # Who has put something there since must be called, too.
        wrap = _dispatch_alone if is_idle and "start" not in vars(profiler) else _dispatch
        self._subscription = patch_function(profiler, "start", self, wrap)
        self._know_awaited()

    def put_on(self) -> None:
        """Put it on the profiler again. Safe to call twice."""
        self._subscription.put_on()
        self._know_awaited()

    def remove(self) -> None:
        """Take it off the profiler. Safe to call twice."""
        self._subscription.remove()
        self._know_awaited()

    def _know_awaited(self) -> None:
        patch = self._subscription.patch
        awaited = patch.replacement.__self__.awaited
        awaited.clear()
        for name in {name for one in patch.listeners for name in one.calls}:
            calls = [(one.calls[name], one.fail) for one in patch.listeners if name in one.calls]
            awaited[name] = _guarded(calls)


# A step has dozens of actions, of which a few are waited for: the others must cost next to nothing.


@untraced
class _Dispatcher:
    """Stand in for a profiler's `start` by a method, which can be pickled as others can."""

    __slots__ = ("_call", "_patch", "awaited")

    def __init__(self, call: Callable[[str], Any]) -> None:
        self._call = call
        self.awaited: dict[str, Callable[[], None]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Dispatcher, (self._call,)  # Nobody listens to the copy of a profiler.

    def start(self, action_name: str) -> Any:
        if action_name in self.awaited:
            self.awaited[action_name]()
        return self._call(action_name)

    def start_alone(self, action_name: str) -> None:
        if action_name in self.awaited:
            self.awaited[action_name]()


def _dispatch(call: Callable[..., Any], listeners: list[Actions]) -> Any:
    return _Dispatcher(call).start


def _dispatch_alone(call: Callable[..., Any], listeners: list[Actions]) -> Any:
    return _Dispatcher(call).start_alone


def _guarded(
    calls: list[tuple[Callable[[], object], Callable[[Exception], None]]],
) -> Callable[[], None]:
    """Return a function that calls each, and passes its error to what stands beside it."""

    @untraced
    def guarded() -> None:
        for call, fail in calls:
            try:
                call()
            except Exception as error:
                fail(error)

    return guarded


def call_at_start(
    owner: Any, name: str, call: Callable[[], object], fail: Callable[[Exception], None]
) -> Subscription:
    """Call a function, without arguments, whenever `owner.name` is called."""
    guarded = _guarded([(call, fail)])

    @untraced
    def begins(*_: Any, **__: Any) -> bool:
        guarded()
        return False

    return patch_function(owner, name, Calls(begins))
