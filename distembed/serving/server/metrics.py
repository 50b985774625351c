"""What a server counts, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

METRICS_TYPE = CONTENT_TYPE_LATEST
"""Content type of what is read."""
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


class ServerMetrics:
    """Counts of one server.

    Args:
        waiting: Returns the number of requests that wait.

    Attributes:
        requests: Requests by their status code.
        rows: Rows that were scored.
        bad_rows: Rows that could not be.
        seconds: Seconds from a whole request to its answer.
        batch_rows: Rows that were scored together.
    """

    def __init__(self, waiting: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)  # memory, processor time, open files
        self.requests = Counter("distembed_requests", "Requests by status code.", ["status"], registry=self._registry)
        self.rows = Counter("distembed_rows", "Rows that were scored.", registry=self._registry)
        self.bad_rows = Counter("distembed_bad_rows", "Rows that could not be scored.", registry=self._registry)
        self.seconds = Histogram(
            "distembed_request_seconds",
            "Seconds from a whole request to its answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.batch_rows = Histogram(
            "distembed_batch_rows", "Rows that were scored together.", buckets=_ROWS, registry=self._registry
        )
        queue = Gauge("distembed_waiting_requests", "Requests that wait to be scored.", registry=self._registry)
        queue.set_function(waiting)

    def text(self) -> bytes:
        """Returns all counts in Prometheus's text format."""
        found: bytes = generate_latest(self._registry)
        return found
