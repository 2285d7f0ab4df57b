"""What a timer puts on the objects of others, and takes off again: patches and hooks."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lightning_gputime._compat.torch_ import attributes_of, skip_in_compilation
from lightning_gputime._messages import messages

_MISSING = object()
# What compiled code may carry; torch.compile leaves the other files of the package alone.
_TRACED = (
    "__init__.py",
    "_timer.py",
    "_instrumentation/module_hooks.py",
    "_instrumentation/named.py",
)


@functools.cache
def apply_compile_skips() -> None:
    """Let compiled code call functions of this package without tracing into them.

    As `torch.compiler.disable`, but at no cost in the call. Call it before they may run, not at
    import: torch's compiler takes a second.
    """
    package = Path(__file__).parent.parent
    skip_in_compilation({*package.rglob("*.py")} - {package / name for name in _TRACED})


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, for a listener or a hook that has nothing to do."""


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """A listener of the calls of a patched function. Others may have the same two methods."""

    on_call_start: Callable[..., bool | None]
    """Return False if `on_call_end` is not wanted for this call."""
    on_call_end: Callable[..., None] = do_nothing
    """Is called with the result; with None if the call raised."""


Wrap = Callable[[Callable[..., Any], list[Any]], Callable[..., Any]]
"""Return what is called in place of a function, and notifies the listeners in a list."""


class FunctionPatch:
    """Replaces `owner.name` while it has listeners, which may be those of several timers.

    If other code replaces the patch meanwhile, it stays inside theirs and does nothing once its
    listeners are gone. If they put it back then, its next call takes it off.
    """

    # Apart from `__dict__`, which others copy to what they wrap around this one.
    __slots__ = (
        "__dict__",
        "_call",
        "_kept",
        "_name",
        "_owner",
        "_read",
        "listeners",
        "replacement",
    )

    def __init__(self, owner: Any, name: str, wrap: Wrap | None = None) -> None:
        self.listeners: list[Any] = []
        self._owner, self._name = owner, name
        # What a property keeps is on the object only once it was set.
        self._read = name if hasattr(owner, name) else name.removeprefix("_")
        # As it is kept: of a class in C++ `getattr` gives what binds no more; and a method of the
        # class must not stay behind on the object.
        self._kept = vars(owner).get(name, _MISSING)
        self._call = getattr(owner, self._read)
        # Without the attributes of a compiled function: torch would take this for that function.
        functools.update_wrapper(self, self._call, updated=())
        # None for itself: it must not hold itself, and so its owner, when it is taken off.
        self.replacement: Any = None
        if wrap is not None:
            # A function, or a method, which can be pickled as no function in a function can.
            self.replacement = wrap(self._call, self.listeners)
        elif isinstance(owner, type):
            self.replacement = self._as_method()
        if self.replacement is not None:
            getattr(self.replacement, "__self__", self.replacement)._patch = self  # for `_find`
        # Compiled code enters ours here, or by hooks of an optimizer, which is patched, too.
        apply_compile_skips()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        notified: list[Any] = []
        try:
            # Over a copy: a listener may be removed when it is notified.
            for listener in [*self.listeners]:
                notified.append(listener)
                try:
                    if listener.on_call_start(*args, **kwargs) is False:
                        notified.pop()
                except Exception as error:
                    notified.pop()
                    self._lose(listener, error)
            if not self.listeners:
                self.restore()
            result = self._call(*args, **kwargs)
            while notified:
                try:
                    notified[0].on_call_end(result)
                except Exception as error:
                    self._lose(notified[0], error)
                del notified[0]
            return result
        except BaseException:
            # The call raised, or Ctrl-C came between: notify those that were not notified yet.
            while notified:
                try:
                    notified[0].on_call_end(None)
                except Exception as error:
                    self._lose(notified[0], error)
                del notified[0]
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the owner gets a copy of what was kept, or the method of its own class; what a
        # property returned stays the same.
        if self._kept is _MISSING and self._read == self._name:
            return getattr, (self._owner, self._name)
        return operator.itemgetter(0), ([self._call if self._kept is _MISSING else self._kept],)

    @property
    def __func__(self) -> Any:
        # Learning rate schedulers ask for it.
        return self._call.__func__

    @property
    def is_applied(self) -> bool:
        return vars(self._owner).get(self._name) is (self.replacement or self)

    def apply(self) -> bool:
        """Replace the function, unless something else is in its place. Return whether it does."""
        if self.is_applied:
            return True
        owner, name = self._owner, self._name
        if vars(owner).get(name, _MISSING) is not self._kept:
            return False
        # The class may have another method by now.
        if self._kept is _MISSING and getattr(owner, self._read) != self._call:
            return False
        self._set(self.replacement or self)
        return True

    def restore(self) -> None:
        """Put back what was there, if nobody listens, and nothing else replaces the patch."""
        if not self.listeners and self.is_applied:
            self._set(self._kept)

    def remove_listener(self, listener: object) -> None:
        if listener in self.listeners:
            self.listeners.remove(listener)
        self.restore()

    def _set(self, value: object) -> None:
        owner, name = self._owner, self._name
        if not isinstance(owner, type):
            # Not by `setattr` and `delattr`, which an object may define: a mock, for one, gives a
            # deleted attribute never again.
            if value is _MISSING:
                del vars(owner)[name]
            else:
                vars(owner)[name] = value
        elif value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    def _as_method(self) -> Callable[..., Any]:
        # Python binds only functions to the instances of a class.
        @functools.wraps(self._call, updated=())
        def method(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        # Code of others may read an attribute of their function.
        vars(method).update(attributes_of(self._call))
        return method

    def _lose(self, listener: Any, error: Exception) -> None:
        """Notify a listener no more, because it raised: its error must not reach the training."""
        if listener in self.listeners:
            self.listeners.remove(listener)
        messages.warning("A phase is no longer timed, because its boundary failed: %r", error)


class Subscription:
    """A listener of the calls of `owner.name`, from `put_on` until `remove`.

    Args:
        owner: A class, a module or an object that has the function.
        name: The name of the function. It must be in `tests/register.py`.
        listener: Has the methods of `Calls`, or is what `wrap` notifies.
        wrap: Makes what is called in place of the function; by default that notifies `Calls`.
    """

    def __init__(self, owner: Any, name: str, listener: Any, wrap: Wrap | None = None) -> None:
        self._owner, self._name, self._listener, self._wrap = owner, name, listener, wrap
        self.patch = self._find()

    def put_on(self) -> None:
        if not self.patch.apply():
            # Something else replaced the function meanwhile, and may not call the patch inside it,
            # or may be called by it.
            self.patch.remove_listener(self._listener)
            self.patch = self._find()
            self.patch.apply()
        if self._listener not in self.patch.listeners:
            self.patch.listeners.append(self._listener)

    def remove(self) -> None:
        self.patch.remove_listener(self._listener)

    def _find(self) -> FunctionPatch:
        there = vars(self._owner).get(self._name)
        for one in (there, getattr(getattr(there, "__self__", there), "_patch", None)):
            if isinstance(one, FunctionPatch):
                return one
        return FunctionPatch(self._owner, self._name, self._wrap)


class Registration:
    """A hook by an interface that a library offers, which returns a handle to remove it."""

    def __init__(self, register: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._register = functools.partial(register, *args, **kwargs)
        self._handles: list[Any] = []  # At most one.

    def put_on(self) -> None:
        if not self._handles:
            # Called and kept in C: Ctrl-C cannot come between the two and lose the handle.
            self._handles.extend(starmap(self._register, [()]))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class Attachment(Protocol):
    """Something on an object of another library. Both methods are safe to call twice."""

    def put_on(self) -> None: ...

    def remove(self) -> None: ...


A = TypeVar("A", bound=Attachment)


class Attachments:
    """All that a timer has on the objects of others, in the order in which it was put on.

    An attachment is owned before it is put on, and until it is removed: whatever is interrupted in
    between, `remove` finds it. All methods are safe to call twice.
    """

    def __init__(self) -> None:
        self._all: dict[Any, None] = {}

    def add(self, attachment: A) -> A:
        """Put something on, to be removed later."""
        self._all[attachment] = None
        attachment.put_on()
        return attachment

    def drop(self, attachment: Attachment) -> None:
        attachment.remove()
        self._all.pop(attachment, None)

    def suspend(self) -> None:
        for attachment in self._all:
            try:
                attachment.remove()
            except Exception as error:  # The others must not stay.
                messages.warning("A hook could not be removed: %r", error)

    def reattach(self) -> None:
        for attachment in self._all:
            attachment.put_on()

    def remove(self) -> None:
        self.suspend()
        self._all.clear()
