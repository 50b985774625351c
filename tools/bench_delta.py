"""Compares a delta with the whole export of one checkpoint: bytes, seconds and processor time, by precision.

The run has both checkpoints. Each round exports the later one whole and as a delta since the earlier one, precision
after precision, in one process that has exported once before::

    distembed prepare criteo criteo_kaggle_110k.tsv.gz --output big --hash-size 200000
    distembed train config.yaml data.path=big train.max_steps=122 train.checkpoint_every=100 train.keep_checkpoints=9 \
        --run-dir run
    python tools/bench_delta.py run 100 122 --output bench_delta.json
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_commands import bench_parser, told, write_output

from distembed.serving.export.export_delta import export_delta
from distembed.serving.export.export_run import ExportOptions, export_run
from distembed.serving.model_folder.manifest import Precision
from distembed.training.trained_run import find_trained_run

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Returns the value of a call, and its seconds: of the clock, and of the processor in all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = work()
    return value, {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def main() -> None:
    """Prints the medians by precision, and writes them."""
    parser = bench_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("earlier", help="number of steps of the checkpoint that is the base")
    parser.add_argument("later", help="number of steps of the other checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    base, run = (find_trained_run(options.run, None, checkpoint=step) for step in (options.earlier, options.later))
    taken: dict[str, dict[str, list[dict[str, float]]]] = {name: {"delta": [], "whole": []} for name in PRECISIONS}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.run.parent) as temporary:
        for precision in PRECISIONS:
            export_run(base, Path(temporary) / precision / "1", ExportOptions(precision=precision))
        for number in told(range(options.rounds), "rounds"):
            for precision in PRECISIONS:
                output = Path(temporary) / f"{number}" / precision
                since = Path(temporary) / precision / "1"
                _, whole = timed(lambda: export_run(run, output / "1", ExportOptions(precision=precision)))  # noqa: B023
                written, delta = timed(lambda: export_delta(run, output / "changed" / "2", since))  # noqa: B023
                taken[precision]["whole"].append(whole)
                taken[precision]["delta"].append(delta)
                rows = sum(weight.num_rows or 0 for weight in written.manifest.weights)
                found[precision] = {"rows": rows, "bytes": written.num_bytes, "whole_bytes": written.whole_bytes}
    for precision in PRECISIONS:
        for measure in ("seconds", "cpu_seconds"):
            own = {kind: [each[measure] for each in rounds] for kind, rounds in taken[precision].items()}
            found[precision] |= {f"{kind}_{measure}": statistics.median(values) for kind, values in own.items()}
            found[precision][f"{measure}_share"] = statistics.median(
                delta / whole for delta, whole in zip(own["delta"], own["whole"], strict=True)
            )
        print(precision, found[precision])
    write_output(options, found)


if __name__ == "__main__":
    main()
