"""Requests scores from a server by many clients at once, and compares each score with the expected score.

The rows are a file of JSON lines, ``{"row": {"COLUMN": VALUE}, "score": 0.25}``. Requests draw rows from the file, over
connections that stay open. A share of the requests is malformed: a row has a text instead of a number or an object
instead of a text, or all rows lack a column. The answer then has to be 422 and name the column. The script imports only
the standard library, so that it starts quickly and takes little time from the server::

    python tools/serve_load.py 8000 rows.jsonl --clients 50 --requests 10000 --malformed 0.01 --number I1 --text C3

For a server that takes new versions of its model, ``score`` is a list with the scores of version 1, 2 and so on. An
answer is compared with the score of the version that it names.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Known:
    """A row as JSON, and its score."""

    row: dict[str, Any]
    text: str
    score: float | list[float]

    def expected(self, version: int) -> float:
        """Returns the score of a version, from 1 on."""
        return self.score[version - 1] if isinstance(self.score, list) else self.score


@dataclass
class Found:
    """The answers: seconds of each, number of scored rows, number of answers by status, and errors."""

    seconds: list[float] = field(default_factory=list)
    rows: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    versions: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Client:
    """One of the clients, with its own connection."""

    def __init__(self, arguments: argparse.Namespace, known: list[Known], number: int, found: Found) -> None:
        self._arguments, self._known, self._found = arguments, known, found
        self._draw = random.Random(f"{arguments.seed} {number}")

    async def work(self, requests: int, until: float) -> None:
        """Sends requests one after another, until a number of requests or a time."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._arguments.port)
        pause = self._arguments.clients / self._arguments.rate if self._arguments.rate else 0.0
        due = time.perf_counter() + self._draw.random() * pause
        while requests and time.perf_counter() < until:
            requests -= 1
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += pause
            rows = self._draw.choices(self._known, k=self._arguments.rows or self._draw.randint(1, 8))
            fault = self._draw.random() < self._arguments.malformed and self._fault(rows)
            body = (fault[0] if fault else "{" + f'"rows":[{",".join(each.text for each in rows)}]' + "}").encode()
            began = time.perf_counter()
            head = f"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
            writer.write(head.encode() + b"\r\n\r\n" + body)
            status, version, answer = await _answer(reader)
            self._found.seconds.append(time.perf_counter() - began)
            self._found.statuses[status] += 1
            self._found.versions[version] += 1
            self._judge(rows, fault[1] if fault else None, status, version, answer)
        writer.close()

    def _fault(self, rows: list[Known]) -> tuple[str, str]:
        """Returns a malformed body, and the column that the answer has to name."""
        values = [dict(each.row) for each in rows]
        place = self._draw.randrange(len(values))
        kind = self._draw.randrange(3)
        column = self._arguments.number if kind == 0 else self._arguments.text
        if kind == 0:
            values[place][column] = "much"
        elif kind == 1:
            values[place][column] = {"a": [1]}
        else:
            for row in values:
                del row[column]
        return json.dumps({"rows": values}), column

    def _judge(self, rows: list[Known], column: str | None, status: int, version: int, answer: bytes) -> None:
        if column is not None:
            if status != 422 or column.encode() not in answer:
                self._found.wrong.append(f"status {status} for a bad {column}: {answer[:200]!r}")
            return
        if status != 200:
            self._found.wrong.append(f"status {status}: {answer[:200]!r}")
            return
        scores = json.loads(answer)[self._arguments.score]
        self._found.rows += len(rows)
        differences = [abs(score - each.expected(version)) for score, each in zip(scores, rows, strict=True)]
        if max(differences) > self._arguments.tolerance:
            self._found.wrong.append(f"a score differs by {max(differences):g}")


async def _answer(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """Returns the status, the number of the version (1 where none is named), and the body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    version = head.lower().partition(b"distembed-version:")[2].partition(b"-")[0].strip()
    return int(head.split(b" ", 2)[1]), int(version or b"1"), await reader.readexactly(int(length))


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the clients and returns their results."""
    lines = Path(arguments.rows_file).read_text(encoding="utf-8").splitlines()
    values = [json.loads(line) for line in lines]
    known = [Known(each["row"], json.dumps(each["row"]), each["score"]) for each in values]
    found = Found()
    began = time.perf_counter()
    until = began + arguments.seconds if arguments.seconds else float("inf")
    share, rest = divmod(arguments.requests, arguments.clients)
    clients = [Client(arguments, known, number, found) for number in range(arguments.clients)]
    counts = [share + (number < rest) if arguments.requests else -1 for number in range(arguments.clients)]
    await asyncio.gather(*(client.work(count, until) for client, count in zip(clients, counts, strict=True)))
    seconds = time.perf_counter() - began
    quantiles = statistics.quantiles(found.seconds, n=100) if len(found.seconds) > 1 else found.seconds * 99
    return {
        "requests": len(found.seconds),
        "seconds": seconds,
        "rows_per_second": found.rows / seconds,
        "p50_ms": quantiles[49] * 1e3,
        "p99_ms": quantiles[98] * 1e3,
        "most_ms": max(found.seconds, default=0.0) * 1e3,
        "statuses": dict(found.statuses),
        "versions": len(found.versions),
        "wrong": len(found.wrong),
        "first_wrong": found.wrong[:5],
        "own_cpu_seconds": time.process_time(),
    }


def main() -> None:
    """Prints the clients' results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("rows_file")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--requests", type=int, default=0, help="number of requests of all clients; 0 for no limit")
    parser.add_argument("--seconds", type=float, default=0, help="time limit; 0 for none")
    parser.add_argument("--rate", type=float, default=0, help="requests a second of all clients; 0 for no pause")
    parser.add_argument("--rows", type=int, default=0, help="rows of a request; 0 draws 1 to 8")
    parser.add_argument("--malformed", type=float, default=0.0, help="share of requests that are malformed")
    parser.add_argument("--number", default="I1", help="a column of numbers")
    parser.add_argument("--text", default="C3", help="a column of texts")
    parser.add_argument("--score", default="prediction", help="list of the answer, of several labels the label's name")
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
