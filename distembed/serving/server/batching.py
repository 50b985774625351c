"""Joins waiting requests into batches, which threads score; the queue is bounded.

A free thread takes all waiting requests at once. While all threads are busy requests gather, so that batches grow with
the load, and a single request on an idle server does not wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from distembed.serving.server.scoring import RowRequest, Scores

T = TypeVar("T")


@dataclass(frozen=True)
class ServerSettings:
    """How a server works.

    Attributes:
        threads: Threads that score.
        most_batch_rows: Rows after which a batch takes no further request, and most rows of the program's input.
        most_waiting: Requests that may wait; more are refused (429).
        wait_seconds: Seconds that a free thread waits for more requests.
        timeout_seconds: Seconds after which a waiting request is given up (503), or an incomplete one (408).
        most_body_bytes: Bytes of the largest body (413).
        most_rows: Most rows of a request (413).
    """

    threads: int = 1
    most_batch_rows: int = 1024
    most_waiting: int = 256
    wait_seconds: float = 0.0
    timeout_seconds: float = 30.0
    most_body_bytes: int = 16 << 20
    most_rows: int = 65536


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A request in the queue and the future of its answer, which is done early where the request is cancelled."""

    request: RowRequest
    answer: asyncio.Future[Scores]


class Batcher:
    """Scores requests in batches, in a pool of threads; all of its methods are called within one event loop.

    ``score`` returns the scores of each request of a batch; ``on_batch`` is given the number of rows of each batch.
    """

    def __init__(
        self,
        score: Callable[[Sequence[RowRequest]], list[Scores]],
        settings: ServerSettings,
        on_batch: Callable[[int], None],
    ) -> None:
        self._score, self._settings, self._on_batch = score, settings, on_batch
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="score")
        self._free = settings.threads
        self._queue: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scoring = 0
        self._may_score, self._is_idle = asyncio.Event(), asyncio.Event()
        self._may_score.set()
        self._is_idle.set()

    @property
    def num_waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    async def answer(self, request: RowRequest) -> Scores:
        """Queues a request and returns its scores; a full queue raises asyncio.QueueFull; cancelling dequeues it."""
        if len(self._queue) >= self._settings.most_waiting:
            raise asyncio.QueueFull
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        if self._free:
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._score_queue())
            self._tasks.add(task)  # the event loop itself keeps no reference to a task
            task.add_done_callback(self._tasks.discard)
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
            raise

    async def between_batches(self, change: Callable[[], T]) -> T:
        """Calls ``change`` in a thread while no batch is being scored, and returns its value; requests wait meanwhile.

        One call at a time is allowed.
        """
        self._may_score.clear()
        try:
            await self._is_idle.wait()
            return await asyncio.to_thread(change)
        finally:
            self._may_score.set()

    def close(self) -> None:
        """Waits for the batches that are being scored, and ends the threads."""
        self._pool.shutdown()

    async def _score_queue(self) -> None:
        """Scores batch after batch, with one thread of the pool at a time, until the queue is empty."""
        try:
            while self._queue:
                rows = sum(waiting.request.num_rows for waiting in self._queue)
                if self._settings.wait_seconds and rows < self._settings.most_batch_rows:
                    await asyncio.sleep(self._settings.wait_seconds)
                batch = self._take()
                if batch:
                    await self._score_batch(batch)
        finally:
            self._free += 1

    def _take(self) -> list[_Waiting]:
        """Takes the oldest requests of together at most ``most_batch_rows`` rows; the first one may be larger."""
        batch: list[_Waiting] = []
        rows = 0
        while self._queue and (not batch or rows + self._queue[0].request.num_rows <= self._settings.most_batch_rows):
            batch.append(self._queue.popleft())
            rows += batch[-1].request.num_rows
        return batch

    async def _score_batch(self, batch: Sequence[_Waiting]) -> None:
        """Scores requests together; where that fails, scores each alone, so that a fault fails one request only."""
        requests = [waiting.request for waiting in batch]
        self._on_batch(sum(request.num_rows for request in requests))
        try:
            answers = await self._score_in_pool(requests)
        except Exception as error:
            left = [waiting for waiting in batch if not waiting.answer.done()]
            if len(batch) == 1 and left:
                left[0].answer.set_exception(error)
            elif len(batch) > 1:
                for waiting in left:
                    await self._score_batch([waiting])
            return
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(answer)

    async def _score_in_pool(self, requests: Sequence[RowRequest]) -> list[Scores]:
        while not self._may_score.is_set():  # a change may begin before this task runs again
            await self._may_score.wait()
        self._scoring += 1
        self._is_idle.clear()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._score, requests)
        finally:
            self._scoring -= 1
            if not self._scoring:
                self._is_idle.set()
