"""Runs an iterator ahead in a thread of its own, over a bounded buffer.

``queue.Queue`` cannot be closed while a producer waits in ``put``; this buffer can, so that dropping the consumer ends
the thread at once. The thread's errors are raised where the consumer waits.
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
        make_items: Function that gives the items; it is called in the thread.
        capacity: Most items that wait for the consumer.
    """

    def __init__(self, make_items: Callable[[], Iterator[Item]], capacity: int) -> None:
        self._items: deque[Item] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()
        self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(make_items,), name="distembed-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        """Returns this object, which can be iterated over once."""
        return self

    def __next__(self) -> Item:
        """Returns the next item, or raises what the thread raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_over)
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            raise self._error or StopIteration

    def close(self) -> None:
        """Ends the thread and drops the items that wait; it may be called any number of times."""
        with self._changed:
            self._is_over = True
            self._items.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, make_items: Callable[[], Iterator[Item]]) -> None:
        """Puts all items into the buffer; the thread runs this."""
        try:
            for item in make_items():
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over or len(self._items) < self._capacity)
                    if self._is_over:
                        break
                    self._items.append(item)
                    self._changed.notify_all()
        except BaseException as error:  # the consumer has to see it
            self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
