"""Joins requests that wait into batches, which threads score; the queue is bounded, and who has gone is left out.

A thread that is free takes what there is at once. While all are busy requests gather, so that batches grow with the
load and a single request on an idle server waits for nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from distembed.serving.server.scoring import Answer, Request


class QueueFull(Exception):
    """As many requests wait as may."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A request that waits, and where its answer goes."""

    request: Request
    answer: asyncio.Future[Answer]


class Batcher:
    """Scores requests in batches; all of its methods are called within one event loop.

    Args:
        score: Scores requests, in a thread.
        threads: Number of threads.
        most_rows: Rows of a batch from which on no request is added.
        most_waiting: Most requests that may wait.
        wait_seconds: Seconds that a free thread waits for more requests.
        on_batch: Called with the number of rows of each batch.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Request]], list[Answer]],
        threads: int,
        most_rows: int,
        most_waiting: int,
        wait_seconds: float,
        on_batch: Callable[[int], None],
    ) -> None:
        self._score, self._on_batch = score, on_batch
        self._most_rows, self._most_waiting, self._wait_seconds = most_rows, most_waiting, wait_seconds
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="score")
        self._free = threads
        self._queue: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    async def answer(self, request: Request) -> Answer:
        """Returns the answer to a request; cancelled, the request is left out.

        Raises:
            QueueFull: As many requests wait as may.
        """
        if len(self._queue) >= self._most_waiting:
            raise QueueFull
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        if self._free:
            self._start_thread()
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
            raise

    def close(self) -> None:
        """Ends the threads, once they have scored what they have."""
        self._pool.shutdown()

    def _start_thread(self) -> None:
        self._free -= 1
        task = asyncio.get_running_loop().create_task(self._score_what_waits())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _score_what_waits(self) -> None:
        """Scores batch after batch until nothing waits."""
        try:
            while self._queue:
                if self._wait_seconds and self._rows_waiting() < self._most_rows:
                    await asyncio.sleep(self._wait_seconds)
                batch = self._take()
                if batch:
                    await self._score_batch(batch)
        finally:
            self._free += 1

    def _rows_waiting(self) -> int:
        return sum(waiting.request.num_rows for waiting in self._queue)

    def _take(self) -> list[_Waiting]:
        """Takes the requests of the next batch: one at least, whatever its size."""
        batch: list[_Waiting] = []
        rows = 0
        while self._queue and (not batch or rows + self._queue[0].request.num_rows <= self._most_rows):
            waiting = self._queue.popleft()
            if not waiting.answer.done():
                batch.append(waiting)
                rows += waiting.request.num_rows
        return batch

    async def _score_batch(self, batch: Sequence[_Waiting]) -> None:
        """Scores requests together; where that fails, each alone, so that one of them does not fail the others."""
        requests = [waiting.request for waiting in batch]
        self._on_batch(sum(request.num_rows for request in requests))
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._pool, self._score, requests)
        except Exception as error:
            if len(batch) > 1:
                for waiting in batch:
                    if not waiting.answer.done():
                        await self._score_batch([waiting])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(answer)
