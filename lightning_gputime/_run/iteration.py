"""The loader of a loop, through which a timer sees each batch."""

from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Steps(Iterator[T]):
    """An iterator that is as long as the loader behind it: a progress bar has a total.

    Args:
        items: What it yields. A `for` runs over this itself, at no further cost.
        loader: What has the length, if anything.
    """

    def __init__(self, items: Generator[T, None, None], loader: Iterable[T]) -> None:
        self._items = items
        self._loader = loader

    def __iter__(self) -> Iterator[T]:
        return self._items

    def __next__(self) -> T:
        return next(self._items)

    def __len__(self) -> int:
        """Returns the length of the loader.

        Raises:
            TypeError: If it has none.
        """
        return len(self._loader)  # type: ignore[arg-type]  # says so itself

    def close(self) -> None:
        """Ends the loop, as `break` does."""
        self._items.close()
