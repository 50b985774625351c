"""Files from whoever made them execute nothing, whichever command reads them: a canary file shows whether one did.

Each file that a command reads is replaced by ones that run code when they are unpickled, built from a tag, or loaded by
torch or NumPy as they come. :mod:`tests.checkpoints.test_torch_format` has checkpoints of torch's own format.
"""

import io
import pickle
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.canary import Canary
from tests.robustness.commands import Commands, Workspace, made_workspace
from tests.small_runs import config_values, write_dataset

CANARY = Path("canary")
CHECKPOINT = "run/checkpoints/step-00000003"
WITH_GRAPH = "'sse.tables={C2: {p0: 0.1, rho: 2, graph: graph}}'"


def saved_by_torch(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def saved_by_numpy(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, np.array([Canary(CANARY)], dtype=object), allow_pickle=True)
    return file.getvalue()


TAG = "!!python/object/apply:os.system ['touch canary']"
CONTENTS: dict[str, Callable[[], bytes]] = {
    "pickle": lambda: pickle.dumps(Canary(CANARY)),
    "pickle in text": lambda: pickle.dumps(Canary(CANARY), protocol=0),
    "torch": lambda: saved_by_torch(Canary(CANARY)),
    "npy": lambda: saved_by_numpy(np.save),
    "npz": lambda: saved_by_numpy(np.savez),
    "tag": lambda: f"train: {{seed: {TAG}}}\n".encode(),
    "bare tag": lambda: f"{TAG}\n".encode(),
    "nested": lambda: b"[" * 5000,
    "nested objects": lambda: b'{"a":' * 5000,
    "bomb": lambda: "\n".join(
        ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    ).encode(),
}

USES_OF_RUN = [
    "evaluate run",
    "predict run --output new.csv",
    "materialise run --output new --table C1",
    "train config.yaml train.max_steps=3 train.checkpoint_every=2 --run-dir run --resume",
    "check run",
]
USES_OF_DATA = [
    "train config.yaml --run-dir new",
    "evaluate run",
    "predict run --output new.csv --split test",
    "check data",
]
USES_OF_MANIFEST = [
    *USES_OF_DATA,
    "describe config.yaml",
    "plan config.yaml --gpus 1",
    "launch config.yaml --dry-run",
    "prepare graph edges.csv --output new --data data --table C2",
    "materialise run --output new --table C1",
]
USES_OF_GRAPH = [f"train config.yaml {WITH_GRAPH} --run-dir new", "check graph"]
# file -> commands that read it, each of which has to refuse it
READ_BY = {
    "config.yaml": ["describe config.yaml", "plan config.yaml", "train config.yaml", "launch config.yaml --dry-run"],
    "extended.yaml": ["describe extending.yaml", "train extending.yaml --run-dir new"],
    "plan.json": ["train config.yaml --run-dir new --plan plan.json"],
    "run/config.yaml": USES_OF_RUN,
    "run/run.json": [*USES_OF_RUN, "report run --output new.html"],
    "run/plan.json": ["train config.yaml train.max_steps=3 --run-dir run --resume"],
    f"{CHECKPOINT}/progress.json": USES_OF_RUN,
    f"{CHECKPOINT}/index.json": USES_OF_RUN,
    f"{CHECKPOINT}/rank-0.blocks": USES_OF_RUN,
    "data/manifest.json": USES_OF_MANIFEST,
    "data/test/part-0.parquet": USES_OF_DATA,
    "graph/graph.json": USES_OF_GRAPH,
    "graph/starts.bin": USES_OF_GRAPH,
    "graph/neighbors.bin": USES_OF_GRAPH,
    "ids.parquet": ["materialise run --output new --table C1 --ids ids.parquet"],
    "edges.csv": ["prepare graph edges.csv --output new --num-embeddings 400"],
    "criteo.tsv": ["prepare criteo criteo.tsv --output new"],
}
# file -> commands that read it and can do without, so that they may succeed
GLANCED_AT_BY = {
    "run/metrics.jsonl": ["report run --output new.html", "status run", *USES_OF_RUN],
    "run/evaluation.json": ["report run --output new.html", *USES_OF_RUN],
    "run/launch/job.json": ["status run", "logs run", "cancel run", "resume run --dry-run"],
    "run/.lock": USES_OF_RUN,
}


def write_workspace(folder: Path, commands: Commands) -> None:
    write_dataset(folder / "data")
    (folder / "config.yaml").write_text(yaml.safe_dump(config_values(Path("data"))))
    shutil.copy(folder / "config.yaml", folder / "extended.yaml")
    (folder / "extending.yaml").write_text("extends: extended.yaml\n")
    (folder / "edges.csv").write_text("source,target\n1,2\n3,9\n")
    for command in (
        "train config.yaml train.max_steps=3 --run-dir run",
        "plan config.yaml --gpus 1 --output plan.json",
        "prepare graph edges.csv --num-embeddings 400 --output graph",
    ):
        done = commands.run(*shlex.split(command))
        assert done.code == 0, done
    (folder / "run" / "launch").mkdir()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    with made_workspace(tmp_path_factory, write_workspace) as made:
        yield made


def require_refused(workspace: Workspace, command: str, codes: tuple[int, ...]) -> None:
    done = workspace.commands.run(*shlex.split(command))
    assert not (workspace.folder / CANARY).exists(), f"{command} has executed what a file says: {done}"
    assert "Traceback" not in done.output + done.errors, done.errors
    assert done.code in codes, f"{command}: {done}"
    assert len(done.errors) < 3000, done.errors


def replace_and_require(workspace: Workspace, file: str, content: str, commands: Sequence[str]) -> None:
    try:
        for command in commands:
            (workspace.folder / file).write_bytes(CONTENTS[content]())
            require_refused(workspace, command, (1, 2) if file in READ_BY else (0, 1, 2))
            workspace.restore()
    finally:
        workspace.restore()


@pytest.mark.parametrize("file", READ_BY)
def test_a_file_that_is_replaced_executes_nothing(workspace: Workspace, file: str) -> None:
    replace_and_require(workspace, file, "tag" if file.endswith("yaml") else "pickle", READ_BY[file][:1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("file", [*READ_BY, *GLANCED_AT_BY])
def test_whatever_it_is_replaced_by_no_command_executes_it(workspace: Workspace, file: str, content: str) -> None:
    replace_and_require(workspace, file, content, {**READ_BY, **GLANCED_AT_BY}[file])
