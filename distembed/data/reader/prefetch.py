"""Runs an iterator ahead in a thread of its own, over a bounded buffer.

``queue.Queue`` cannot be closed while a producer waits in ``put``; this buffer can, so that dropping the consumer ends
the thread at once. The thread holds no reference to the consumer, and its errors are raised where the consumer waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterates over items that a background thread makes ahead of the consumer.

    Args:
        make_items: Function that gives the items; it is called in the thread and must not refer to this object.
        capacity: Most items that wait for the consumer.
    """

    def __init__(self, make_items: Callable[[], Iterator[Item]], capacity: int) -> None:
        self._buffer: _Buffer[Item] = _Buffer(capacity)
        self._thread = threading.Thread(
            target=_produce, args=(make_items, self._buffer), name="distembed-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        """Returns this object, which can be iterated over once."""
        return self

    def __next__(self) -> Item:
        """Returns the next item, or raises what the thread raised."""
        return self._buffer.get()

    def close(self) -> None:
        """Ends the thread and drops the items that wait; it may be called any number of times."""
        self._buffer.close()
        if self._thread is not threading.current_thread():
            self._thread.join()


class _Buffer(Generic[Item]):
    """The items that wait for the consumer, and whether the producer or the consumer has finished."""

    def __init__(self, capacity: int) -> None:
        self._items: deque[Item] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()
        self._closed = False
        self._finished = False
        self._error: BaseException | None = None

    def put(self, item: Item) -> bool:
        """Adds an item once there is room; returns False where the consumer has closed the buffer."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def finish(self, error: BaseException | None) -> None:
        """Notes that no more items come, and the error that is the reason, if one is."""
        with self._changed:
            self._finished, self._error = True, error
            self._changed.notify_all()

    def get(self) -> Item:
        """Returns the next item once there is one.

        Raises:
            StopIteration: No more items come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished or self._closed)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Drops the items, and refuses more."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _produce(make_items: Callable[[], Iterator[Item]], buffer: _Buffer[Item]) -> None:
    """Puts all items into the buffer; the thread runs this."""
    error: BaseException | None = None
    try:
        for item in make_items():
            if not buffer.put(item):
                break
    except BaseException as caught:  # whatever it is, the consumer has to see it
        error = caught
    buffer.finish(error)
