"""Patches and hooks on objects of other libraries, and their removal.

A `Registration` is a hook. A `Subscription` listens to the calls of a function, which a
`FunctionPatch` replaces for all timers. `Attachments` owns the hooks and subscriptions of a timer.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from lightning_gputime._compat.torch_ import attributes_of, skip_in_compilation
from lightning_gputime._messages import messages

_MISSING = object()
# Files of this package that dynamo traces, because compiled code may contain calls to them. Dynamo
# skips all other files.
_TRACED = ("__init__.py", "_timer.py", "_instrumentation/traced.py")


@functools.cache
def apply_compile_skips() -> None:
    """Let compiled code call functions of this package without tracing into them.

    This has the effect of `torch.compiler.disable` without its cost per call. It imports dynamo,
    which takes a second, so it is called at the first patch, not at import.
    """
    package = Path(__file__).parent.parent
    skip_in_compilation({*package.rglob("*.py")} - {package / name for name in _TRACED})


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing. A listener or hook without an action."""


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Listener of a patched function. Any object with these two methods can be a listener."""

    on_call_start: Callable[..., bool | None]
    """Called with the arguments. Return False to skip `on_call_end` for this call."""
    on_call_end: Callable[..., None] = do_nothing
    """Called with the result, or with None if the call raised."""


Wrap = Callable[[Callable[..., Any], list[Any]], Callable[..., Any]]
"""Takes a function and a list of listeners. Returns the function that replaces it."""


def _object_of(function: Any) -> Any:
    return getattr(function, "__self__", function)  # The object of a bound method.


class FunctionPatch:
    """Replacement of `owner.name` while there are listeners. Several timers share it.

    If other code wraps the patch, the patch stays inside that wrapper, and does nothing without
    listeners. If that code restores the patch later, the next call removes it.

    Attributes:
        listeners: Objects with the methods of `Calls`, in the order of their calls.
        replacement: Object that replaces the function; None if it is the patch itself, because a
            reference to itself would keep the patch, and so its owner, alive.
        _read_name: Name by which the function is read: that of a property, until it is set and so
            stored in an attribute such as `_loss_function`.
        _original: Value in the `__dict__` of the owner, to restore: on a C++ class, `getattr`
            returns an object that does not bind. `_MISSING` if the owner itself has no such
            attribute. Then `restore_if_unused` deletes the patch, so that the method of its class
            is found again.
        _call: The original function, as a call on the owner finds it.
    """

    # Attributes are slots, because wrappers of other code copy `__dict__`.
    __slots__ = (
        *("__dict__", "__weakref__", "_call", "_name", "_original", "_owner", "_read_name"),
        *("listeners", "replacement"),
    )

    def __init__(self, owner: Any, name: str, wrap: Wrap | None = None) -> None:
        self.listeners: list[Any] = []
        self._owner, self._name = owner, name
        self._read_name = name if hasattr(owner, name) else name.removeprefix("_")
        self._original = vars(owner).get(name, _MISSING)
        self._call = getattr(owner, self._read_name)
        # Do not copy attributes: torch recognizes compiled functions by them.
        functools.update_wrapper(self, self._call, updated=())
        self.replacement: Any = None
        if wrap is not None:
            # If the owner is an instance, this must be picklable, such as a bound method.
            self.replacement = wrap(self._call, self.listeners)
        elif isinstance(owner, type):
            # Python binds only functions to the instances of a class.
            @functools.wraps(self._call, updated=())
            def method(*args: Any, **kwargs: Any) -> Any:
                return self(*args, **kwargs)

            # Other code may read attributes of the original function.
            vars(method).update(attributes_of(self._call))
            self.replacement = method
        _patches[id(_object_of(self._installed))] = self
        # Compiled code calls this package only through patches, so the first patch is early enough.
        apply_compile_skips()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        notified: list[Any] = []
        try:
            # Iterate over a copy, because a listener may be removed when it is notified.
            for listener in [*self.listeners]:
                # Append first: if Ctrl-C interrupts the listener, its `on_call_end` is called, too.
                notified.append(listener)
                try:
                    if listener.on_call_start(*args, **kwargs) is False:
                        notified.pop()
                except Exception as error:
                    notified.pop()
                    self._drop_listener(listener, error)
            if not self.listeners:
                self.restore_if_unused()
            result = self._call(*args, **kwargs)
            while notified:
                try:
                    notified[0].on_call_end(result)
                except Exception as error:
                    self._drop_listener(notified[0], error)
                del notified[0]
            return result
        except BaseException:
            # The call raised, or Ctrl-C interrupted a listener: notify the remaining listeners.
            while notified:
                try:
                    notified[0].on_call_end(None)
                except Exception as error:
                    self._drop_listener(notified[0], error)
                del notified[0]
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy of the owner, or its pickle, contain the original function.

        Return a function and arguments, with which pickle creates it.
        """
        is_method_of_class = self._original is _MISSING and self._read_name == self._name
        if is_method_of_class:
            return getattr, (self._owner, self._name)  # It is bound to the copy of the owner.
        # Take the value of the attribute, or of the property that stores its value there, from a
        # list: pickle needs a call.
        value = self._call if self._original is _MISSING else self._original
        return operator.itemgetter(0), ([value],)

    @property
    def __func__(self) -> Any:
        # Learning rate schedulers read this attribute of the function that they wrap.
        return self._call.__func__

    @property
    def _installed(self) -> Any:
        """The object that replaces the function."""
        return self if self.replacement is None else self.replacement

    @property
    def is_applied(self) -> bool:
        current = vars(self._owner).get(self._name)
        return current is self._installed

    def apply(self) -> bool:
        """Replace the function. Return False and do nothing if other code has replaced it."""
        if self.is_applied:
            return True
        owner, name = self._owner, self._name
        if vars(owner).get(name, _MISSING) is not self._original:
            return False
        has_class_changed = (
            self._original is _MISSING and getattr(owner, self._read_name) != self._call
        )
        if has_class_changed:
            return False
        self._set(self._installed)
        return True

    def restore_if_unused(self) -> None:
        """Restore the function if the patch has no listeners and is still in place."""
        if not self.listeners and self.is_applied:
            self._set(self._original)

    def remove_listener(self, listener: object) -> None:
        """Remove a listener. Restore the function if it was the last."""
        if listener in self.listeners:
            self.listeners.remove(listener)
        self.restore_if_unused()

    def _set(self, value: object) -> None:
        owner, name = self._owner, self._name
        if not isinstance(owner, type):
            # Avoid `setattr` and `delattr`, which a class may redefine. For example, a mock never
            # returns a deleted attribute again.
            if value is _MISSING:
                del vars(owner)[name]
            else:
                vars(owner)[name] = value
        elif value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    def _drop_listener(self, listener: Any, error: Exception) -> None:
        # Report the error of a listener instead of raising it in the training.
        self.remove_listener(listener)
        messages.warning("A phase is no longer timed, because its hook failed: %r", error)


_patches: WeakValueDictionary[int, FunctionPatch] = WeakValueDictionary()
"""Patches by the id of the object that replaces the function. A patch keeps that object alive."""


def patch_of(function: Any) -> FunctionPatch | None:
    """Return the patch that a function belongs to, or None."""
    return _patches.get(id(_object_of(function)))


class Subscription:
    """A listener of the calls of `owner.name`, from `attach` until `remove`.

    Args:
        owner: The class, module or object that has the function.
        name: Name of the function, which must be listed in `tests/register.py`.
        listener: An object with the methods of `Calls`, or any listener that `wrap` notifies.
        wrap: Creates the replacement of the function. The default notifies `Calls`.
    """

    def __init__(self, owner: Any, name: str, listener: Any, wrap: Wrap | None = None) -> None:
        self._owner, self._name, self._listener, self._wrap = owner, name, listener, wrap
        self.patch = self._find_patch()

    def attach(self) -> None:
        if not self.patch.apply():
            # Other code has replaced the function, and its replacement may not call the patch.
            self.patch.remove_listener(self._listener)
            self.patch = self._find_patch()
            self.patch.apply()  # It wraps that replacement.
        if self._listener not in self.patch.listeners:
            self.patch.listeners.append(self._listener)

    def remove(self) -> None:
        self.patch.remove_listener(self._listener)

    def _find_patch(self) -> FunctionPatch:
        """Return the patch that replaces the function now, or else a new patch."""
        applied = patch_of(vars(self._owner).get(self._name))
        return applied or FunctionPatch(self._owner, self._name, self._wrap)


class Registration:
    """A hook that `register`, a function of a library, adds. It returns a handle to remove it."""

    def __init__(self, register: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._register = functools.partial(register, *args, **kwargs)
        self._handles: list[Any] = []  # The handle while the hook is attached, else empty.

    def attach(self) -> None:
        if not self._handles:
            # `extend` and `starmap` run in C, so Ctrl-C cannot interrupt between the registration
            # and the storage of its handle.
            self._handles.extend(starmap(self._register, [()]))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class Attachment(Protocol):
    """A hook or patch on an object of another library. Both methods are safe to call twice."""

    def attach(self) -> None: ...

    def remove(self) -> None: ...


A = TypeVar("A", bound=Attachment)


class Attachments:
    """The hooks and patches of a timer, in the order in which they were attached.

    An attachment is stored before it is attached, and until after it is removed, so that `remove`
    finds it even if Ctrl-C interrupts either. All methods are safe to call twice.
    """

    def __init__(self) -> None:
        self._all: dict[Any, None] = {}

    def add(self, attachment: A) -> A:
        """Attach a hook or patch, to be removed later."""
        self._all[attachment] = None
        attachment.attach()
        return attachment

    def drop(self, attachment: Attachment) -> None:
        attachment.remove()
        self._all.pop(attachment, None)

    def suspend(self) -> None:
        """Remove all attachments, until `reattach`."""
        for attachment in self._all:
            try:
                attachment.remove()
            except Exception as error:  # Continue, to remove the others.
                messages.warning("A hook could not be removed: %r", error)

    def reattach(self) -> None:
        for attachment in self._all:
            attachment.attach()

    def remove(self) -> None:
        self.suspend()
        self._all.clear()
