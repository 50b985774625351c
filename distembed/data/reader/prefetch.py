"""Runs an iterator ahead in a thread of its own, over a bounded buffer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterates over items that a background thread makes ahead of the consumer.

    Args:
        make_items: Function that gives the items.
        capacity: Most items that wait for the consumer.
    """

    def __init__(self, make_items: Callable[[], Iterator[Item]], capacity: int) -> None:
        self._thread = ThreadPoolExecutor(1, "distembed-prefetch")
        self._make_next = make_items().__next__
        self._items: deque[Future[Item]] = deque(self._thread.submit(self._make_next) for _ in range(capacity))

    def __iter__(self) -> Iterator[Item]:
        """Returns this object, which can be iterated over once."""
        return self

    def __next__(self) -> Item:
        """Returns the next item, or raises what the thread raised: at the end StopIteration, any number of times."""
        if not self._items:
            raise StopIteration
        item = self._items[0].result()
        self._items.popleft()
        self._items.append(self._thread.submit(self._make_next))
        return item

    def close(self) -> None:
        """Ends the thread and drops the items that wait; it may be called any number of times."""
        with suppress(RuntimeError):  # the garbage collector may call this in the thread itself
            self._thread.shutdown(cancel_futures=True)
        self._items.clear()
        self._make_next = iter(()).__next__  # drops the iterator with what it holds
