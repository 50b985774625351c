"""Commands that cannot be carried out: each ends with its exit code and a sentence that names what is wrong.

All of them are given in a folder that holds what :func:`write_workspace` lists; a refused command leaves the folder as
it was.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from distembed.base.checksums import KEY, with_checksum
from tests.robustness.commands import Commands, Workspace, made_workspace
from tests.small_runs import config_values, write_dataset

ROW = "1\t" + "\t".join(["7"] * 13) + "\t" + "\t".join(["0000abcd"] * 26) + "\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{two}: &{two} [{', '.join([f'*{one}'] * 9)}]\n" for one, two in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
CONFIGS = {
    "bomb.yaml": BOMB,
    "nested.yaml": "a: " + "[" * 5000,
    "nul.yaml": 'extends: "a\\0b.yaml"\n',
    "tag.yaml": "train: !!python/object/apply:os.system ['touch canary']\n",
    "surrogate.yaml": 'extends: config.yaml\ntrain: {checkpoint_dir: "a\\uD800b"}\n',
}

# command, fragment of what is said, or several of which one is
REFUSED = [
    ("trian", "trian"),
    ("describe config.yaml --jsn", "--jsn"),
    ("describe bomb.yaml", "bomb.yaml"),
    ("plan nested.yaml", "nested.yaml"),
    ("describe nul.yaml", "extends"),
    ("describe tag.yaml", "tag.yaml"),
    ("describe loop.yaml", "loop.yaml"),
    ("describe config.yaml train.batchsize=3", "train.batch_size"),
    ("plan config.yaml --nodes 100000 --gpus 100000", "100000"),
    ("plan config.yaml --gpus eight", "--gpus"),
    ("train config.yaml --run-dir new embedding.default.embedding_dim=1000000000", "embedding_dim"),
    ("train config.yaml --run-dir new train.batch_size=1000000000000", "train.batch_size"),
    ("train config.yaml --run-dir new data.path=huge", "2^62|4611686018427387904|4,611,686,018,427,387,904"),
    ("train config.yaml --run-dir new data.test=tset", "tset"),
    ("train config.yaml --run-dir new data.validation=vali", "vali"),
    ("train config.yaml --run-dir new data.path=cut", "test/part-0.parquet"),
    ("train config.yaml --run-dir new data.path=escaping", "manifest"),
    ("train surrogate.yaml --run-dir new", "train.checkpoint_dir"),
    ("train config.yaml --run-dir loop/new", "loop"),
    ("train config.yaml --run-dir run --resume train.seed=7", "train.seed"),
    ("evaluate run --data escaping", "manifest"),
    ("evaluate emptied", "checkpoint"),
    ("predict run --output taken.csv", "--overwrite"),
    ("predict run --output loop/x.csv", "loop"),
    ("materialise run --output loop --table C1", "loop"),
    ("report run --output taken.txt", "--overwrite"),
    ("report run --output loop", "loop"),
    ("check cut", "test/part-0.parquet"),
    ("check escaping", "manifest"),
    ("synthesize loop --rows 10", "loop"),
    ("prepare criteo /dev/null --output new", "/dev/null"),
    ("prepare criteo few.tsv --output loop/new", "loop"),
    ("prepare criteo few.tsv --output new --hash-size 99999999999999999999", "--hash-size"),
    ("prepare criteo few.tsv --output new --hash-size 9223372036854775808", "--hash-size"),
    ("prepare criteo few.tsv --output new --memory-limit 1KB", "--memory-limit"),
    ("prepare graph edges.csv --output new --data prepared --table C1", "vocabulary"),
    ("prepare graph /dev/null --output new --num-embeddings 10", "/dev/null"),
    ("launch bomb.yaml --dry-run", "bomb.yaml"),
    ("launch config.yaml --dry-run -s slrum", "slrum"),
    ("status nowhere", "nowhere"),
]


def write_workspace(folder: Path, commands: Commands) -> None:
    write_dataset(folder / "data")
    values = config_values(Path("data"))
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    (folder / "few.tsv").write_text(ROW * 50)
    (folder / "edges.csv").write_text("source,target\n1,2\n3,9\n")
    for name in ("taken.txt", "taken.csv"):
        (folder / name).write_text("mine")
    for name in ("loop", "loop.yaml"):
        (folder / name).symlink_to(name)
    # datasets that are not whole, or not as they should be
    write_dataset(folder / "huge", num_ids=2**62)
    for name in ("cut", "escaping"):
        shutil.copytree(folder / "data", folder / name)
    manifest = folder / "escaping" / "manifest.json"
    values = json.loads(manifest.read_text().replace("test/part-0.parquet", "../data/test/part-0.parquet"))
    values.pop(KEY)
    manifest.write_text(json.dumps(with_checksum(values)))
    part = folder / "cut" / "test" / "part-0.parquet"
    part.write_bytes(part.read_bytes()[:-100])
    assert commands.run("prepare", "criteo", "few.tsv", "--output", "prepared").code == 0
    (vocabularies,) = {path.parent for path in (folder / "prepared").rglob("C1.parquet")}
    shutil.rmtree(vocabularies)
    # runs
    trained = commands.run("train", "config.yaml", "train.max_steps=3", "--run-dir", "run")
    assert trained.code == 0, trained.errors
    shutil.copytree(folder / "run", folder / "emptied")
    shutil.rmtree(folder / "emptied" / "checkpoints")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    with made_workspace(tmp_path_factory, write_workspace) as made:
        yield made


@pytest.mark.parametrize(("command", "fragment"), REFUSED, ids=[command for command, _ in REFUSED])
def test_it_is_refused_in_a_sentence(workspace: Workspace, command: str, fragment: str) -> None:
    done = workspace.commands.run(*shlex.split(command))
    changes = workspace.changes()
    assert done.code == 2, done
    assert "Traceback" not in done.output + done.errors, done.errors
    assert any(part in done.errors for part in fragment.split("|")), done.errors
    assert not set("╭│╰") & set(done.errors), done.errors
    assert re.match("(error|failed): ", done.errors), done.errors
    assert len(done.errors) < 2000, done.errors
    assert not changes
