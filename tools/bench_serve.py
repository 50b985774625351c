"""Compares ``distembed serve`` with a plain server of one run, and tests it under many requests at once (``--soak``).

The bench trains a DLRM of the paper's size on Criteo rows for 100 steps: 26 tables, quotient-remainder at 4 collisions.
``distembed serve`` serves the exported run. The peer (``tools/peers/plain_fastapi.py``) serves the trained run, one
request at a time. Both servers run at once and take turns. The clients are a separate process
(``tools/serve_load.py``), which compares every score::

    python tools/bench_serve.py criteo_kaggle_110k.tsv.gz --output bench_serve.json
    python tools/bench_serve.py criteo_kaggle_110k.tsv.gz --soak 10000    # also 50 clients, 1% of requests malformed
    python tools/bench_serve.py criteo_kaggle_110k.tsv.gz --deltas 50 --rounds 0    # 50 deltas under 200 requests/s
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_commands import bench_parser, read_lines, run_distembed

TOOLS = Path(__file__).parent
CONFIG = """
model: {name: dlrm, bottom: [512, 256, 64], top: [512, 256]}
embedding:
  default: {partition: quotient_remainder, collisions: 4, composition: product, embedding_dim: 16, threshold: 200}
train: {batch_size: 512, max_steps: 100, dense_optimizer: {name: adam}, sparse_optimizer: {name: adagrad}}
"""
NAMES = [*(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27))]
MEASURES = {
    "1 client, 1 row": ["--clients", "1", "--rows", "1"],
    "1 client, 64 rows": ["--clients", "1", "--rows", "64"],
    "8 clients, 64 rows": ["--clients", "8", "--rows", "64"],
    "50 clients, 1 row": ["--clients", "50", "--rows", "1"],
}


def make_model(folder: Path, criteo: Path) -> None:
    """Trains ``run`` on a file of Criteo rows, and exports it as ``model``."""
    (folder / "config.yaml").write_text(CONFIG)
    run_distembed("prepare", "criteo", criteo, "--output", folder / "dataset")
    run_distembed("train", folder / "config.yaml", f"data.path={folder / 'dataset'}", "--run-dir", folder / "run")
    run_distembed("export", folder / "run", "--output", folder / "model")


def write_rows(folder: Path, criteo: Path, num_rows: int) -> Path:
    """Writes rows with the trained run's scores."""
    import distembed

    rows = []
    for line in read_lines(criteo, num_rows):
        texts = zip(NAMES, line.decode().rstrip("\n").split("\t")[1:], strict=True)
        rows.append({name: (int(text) if name[0] == "I" else text) if text else None for name, text in texts})
    scores = distembed.load(folder / "run").predict(rows).tolist()
    written = (json.dumps({"row": row, "score": score}) for row, score in zip(rows, scores, strict=True))
    (folder / "rows.jsonl").write_text("\n".join(written) + "\n")
    return folder / "rows.jsonl"


@contextmanager
def started(port: int, *arguments: object) -> Iterator[int]:
    """Starts a server, waits until it listens, yields its process id, and ends it."""
    process = subprocess.Popen([sys.executable, *map(str, arguments), "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if process.poll() is not None:
                    raise SystemExit(f"{arguments} has ended") from None
                time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def load(port: int, rows: Path, *arguments: str) -> dict[str, Any]:
    """Runs the clients and returns their results."""
    asked = [sys.executable, str(TOOLS / "serve_load.py"), str(port), str(rows), *arguments]
    found: dict[str, Any] = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    return found


def memory_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def soak(port: int, pid: int, rows: Path, requests: int, clients: int) -> dict[str, Any]:
    """Sends many requests at once, 1% of them malformed; returns the clients' results and the server's memory."""
    options = ["--clients", str(clients), "--malformed", "0.01"]
    load(port, rows, *options, "--requests", str(requests // 10), "--seed", "1")  # fills the server's caches
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.2):
            samples.append(memory_bytes(pid))

    thread = threading.Thread(target=sample)
    before = memory_bytes(pid)
    thread.start()
    found = load(port, rows, *options, "--requests", str(requests))
    done.set()
    thread.join()
    after = memory_bytes(pid)
    mib = 1 << 20
    memory = {"before_mib": before / mib, "after_mib": after / mib, "most_mib": max([*samples, before, after]) / mib}
    return {**found, **memory, "growth_mib": (after - before) / mib}


def export_versions(folder: Path, num_deltas: int, rows: Path) -> None:
    """Trains a run with a checkpoint every two steps, exports the first one whole and the others as deltas.

    The file of rows then has a list of each row's scores, one by each version's checkpoint.
    """
    import distembed
    from distembed.serving.export.export_delta import export_delta
    from distembed.serving.export.export_run import ExportOptions, export_run
    from distembed.training.trained_run import find_trained_run

    run, kept = folder / "versions_run", num_deltas + 1
    settings = [f"train.max_steps={2 * kept}", "train.checkpoint_every=2", f"train.keep_checkpoints={kept}"]
    config = folder / "config.yaml"
    run_distembed("train", config, f"data.path={folder / 'dataset'}", *settings, "--run-dir", run)
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    scores = []
    for number in range(1, kept + 1):
        trained, output = find_trained_run(run, None, checkpoint=str(2 * number)), folder / "made" / f"{number:04d}"
        if number == 1:
            export_run(trained, output, ExportOptions())
        else:
            export_delta(trained, output, folder / "made" / f"{number - 1:04d}")
        scores.append(distembed.load(run, checkpoint=2 * number).predict([line["row"] for line in lines]).tolist())
    by_row = zip(lines, zip(*scores, strict=True), strict=True)
    rows.write_text("".join(json.dumps({**line, "score": list(each)}) + "\n" for line, each in by_row))


def take_deltas(port: int, pid: int, rows: Path, folder: Path, num_deltas: int, seconds: float) -> dict[str, Any]:
    """Publishes a delta every ``seconds`` under 200 requests/s; returns the clients' results and server's memory."""
    options = ["--clients", "20", "--rate", "200"]
    load(port, rows, *options, "--seconds", "5")
    samples: list[int] = []

    def publish() -> None:
        for number in range(2, num_deltas + 2):
            shutil.copytree(folder / "made" / f"{number:04d}", folder / "published" / f".{number}")
            (folder / "published" / f".{number}").rename(folder / "published" / f"{number:04d}")
            samples.append(memory_bytes(pid))
            time.sleep(seconds)

    thread = threading.Thread(target=publish)
    thread.start()
    found = load(port, rows, *options, "--seconds", str(num_deltas * seconds + 5))
    thread.join()
    samples.append(memory_bytes(pid))
    mib = 1 << 20
    return {**found, "before_mib": samples[0] / mib, "after_mib": samples[-1] / mib, "most_mib": max(samples) / mib}


def compare(servers: dict[str, tuple[int, int]], rows: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Returns the medians of each measure by server, given the servers' ports and processes; they take turns."""
    found: dict[str, Any] = {}
    for measure, options in MEASURES.items():
        taken: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for port, _ in servers.values():
            load(port, rows, *options, "--seconds", "0.5")
        for _ in range(rounds):
            for name, (port, pid) in servers.items():
                before = cpu_seconds(pid)
                own = load(port, rows, *options, "--seconds", str(seconds))
                own["cpu_ms_per_row"] = 1e3 * (cpu_seconds(pid) - before) / (own["rows_per_second"] * own["seconds"])
                taken[name].append(own)
        found[measure] = {
            name: {
                key: statistics.median(each[key] for each in all_rounds)
                for key in ("rows_per_second", "cpu_ms_per_row", "p50_ms", "p99_ms", "wrong")
            }
            for name, all_rounds in taken.items()
        }
        first, second = (found[measure][name] for name in servers)
        found[measure]["rows_per_second_ratio"] = first["rows_per_second"] / second["rows_per_second"]
        found[measure]["cpu_ratio"] = second["cpu_ms_per_row"] / first["cpu_ms_per_row"]
    return found


def main() -> None:
    """Prints the measures, and writes them."""
    parser = bench_parser(__doc__)
    parser.add_argument("criteo", type=Path, help="file of Criteo rows")
    parser.add_argument("--work", type=Path, help="folder that keeps the run and the model for later calls")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of one server's turn")
    parser.add_argument("--soak", type=int, default=0, help="requests of the soak test; 0 for none")
    parser.add_argument("--deltas", type=int, default=0, help="deltas that a server takes under load; 0 for none")
    parser.add_argument("--clients", type=int, default=50, help="clients of the soak test")
    parser.add_argument("--rows", type=int, default=4096, help="rows that requests are drawn from")
    parser.add_argument("--serve", default="", help="options of distembed serve, for example '--threads 2'")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.work or Path(temporary)).absolute()
        folder.mkdir(exist_ok=True)
        if not (folder / "model").exists():
            make_model(folder, arguments.criteo)
        rows = write_rows(folder, arguments.criteo, arguments.rows)
        own, peer = free_port(), free_port()
        options = arguments.serve.split()
        with started(own, "-m", "distembed", "serve", folder / "model", *options) as pid:
            found: dict[str, Any] = {}
            if arguments.rounds:
                with started(peer, TOOLS / "peers" / "plain_fastapi.py", folder / "run") as peer_pid:
                    servers = {"distembed serve": (own, pid), "plain FastAPI": (peer, peer_pid)}
                    found["compared"] = compare(servers, rows, arguments.rounds, arguments.seconds)
            if arguments.soak:
                found["soak"] = soak(own, pid, rows, arguments.soak, arguments.clients)
        if arguments.deltas:
            export_versions(folder, arguments.deltas, rows)
            published = folder / "published"
            published.mkdir()
            served = ["-m", "distembed", "serve", folder / "made" / "0001", "--deltas", published, *options]
            with started(own, *served) as pid:
                found["deltas"] = take_deltas(own, pid, rows, folder, arguments.deltas, 1.2)
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
