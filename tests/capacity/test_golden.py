"""The whole JSON of plans, compared with what was looked through once by a person.

After a change that is meant: ``python -m tests.capacity.test_golden`` writes the files anew; read their difference.
"""

import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from distembed.commands import cli
from distembed.reports.plan import report
from distembed.reports.plan.remedies import find_remedies
from tests.small_runs import write_dataset

GOLDEN = Path(__file__).parents[1] / "golden"
CONFIG = {
    "model": {"bottom": [16], "top": [16]},
    "embedding": {
        "default": {"partition": "quotient_remainder", "embedding_dim": 8, "threshold": 10},
        "tables": {"C3": {"composition": "path_mlp", "hidden": [4]}},
    },
    "train": {
        "batch_size": 4096,
        "log_every": 10,
        "sparse_optimizer": {"name": "row_wise_adagrad"},
        "dense_optimizer": {"name": "adam"},
    },
    "plan": {
        "tables": {
            "C1": {"sharding_types": ["data_parallel"]},
            "C2": {"sharding_types": ["column_wise"], "min_partition": 4},
            "M": {"sharding_types": ["row_wise"]},
        }
    },
}
CASES = {
    "fits": ["--nodes", "2", "--gpus", "1", "--gpu", "l4-24gb"],
    "does_not_fit": ["--gpus", "1", "--memory", "80kB", "train.batch_size=64"],
    "host_memory": [
        *("embedding.tables.C3={}", "plan={host_memory: true}", "train.batch_size=64"),
        *("--gpus", "1", "--memory", "106kB", "--host-memory", "1MB"),
    ],
}


def plan(arguments: list[str], folder: Path) -> dict[str, Any]:
    """What the command writes as JSON."""
    config, printed = folder / "config.yaml", folder / "plan.json"
    data = {"path": str(write_dataset(folder / "dataset"))}
    config.write_text(yaml.safe_dump({**CONFIG, "data": data}))
    with printed.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        # not only where pytest's fixture has it so
        patch.setattr(report, "find_remedies", functools.partial(find_remedies, max_seconds=600))
        cli.app(["plan", str(config), *arguments, "--json"], standalone_mode=False)
    values: dict[str, Any] = json.loads(printed.read_text())
    return values


def alike(found: Any, expected: Any) -> bool:
    """Equal, numbers with a fraction but for rounding."""
    if isinstance(expected, dict):
        same_keys = isinstance(found, dict) and list(found) == list(expected)
        return same_keys and all(alike(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(alike, found, expected))
    return math.isclose(found, expected, rel_tol=1e-9) if isinstance(expected, float) else bool(found == expected)


@pytest.mark.parametrize("name", CASES)
def test_plans_are_what_they_were(name: str, tmp_path: Path) -> None:
    found, expected = plan(CASES[name], tmp_path), json.loads((GOLDEN / f"plan_{name}.json").read_text())
    assert alike(found, expected), json.dumps(found, indent=1)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case, case_arguments in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            values = plan(case_arguments, Path(temporary))
            (GOLDEN / f"plan_{case}.json").write_text(json.dumps(values, indent=1) + "\n")
