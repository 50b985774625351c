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
    "list.yaml": "- 1\n",
    "tag.yaml": "train: !!python/object/apply:os.system ['touch canary']\n",
    "twice.yaml": "train: {seed: 1, seed: 2}\n",
    "surrogate.yaml": 'extends: config.yaml\ntrain: {checkpoint_dir: "a\\uD800b"}\n',
    "self.yaml": "extends: self.yaml\n",
    "empty.yaml": "",
}

# command, fragment of what is said, or several of which one is
SAMPLE = [
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
FURTHER = [
    # no command, or not such
    ("train", "CONFIG"),
    # configs
    ("describe nowhere.yaml", "nowhere.yaml"),
    ("describe data", "data"),
    ("describe noise.bin", "noise.bin"),
    ("train bomb.yaml --run-dir new", "bomb.yaml"),
    ("describe self.yaml", "self.yaml"),
    ("describe list.yaml", "list"),
    ("describe twice.yaml", "seed"),
    ("describe config.yaml train", "train"),
    ("describe config.yaml =3", "=3"),
    ("describe config.yaml train.epochs=zero", "train.epochs"),
    ("describe config.yaml train.epochs=0", "train.epochs"),
    ("describe config.yaml train.seed=99999999999", "train.seed"),
    ("describe config.yaml embedding.default.embedding_dim=-8", "embedding_dim"),
    ("describe config.yaml 'model.bottom=[1.5]'", "model.bottom"),
    ("describe config.yaml train.dense_optimizer.learning_rate=.nan", "learning_rate"),
    ("describe config.yaml 'data.path=a: ['", "data.path"),
    # plan
    ("plan config.yaml --gpus 0", "--gpus"),
    ("plan config.yaml --gpu h1000", "h1000"),
    ("plan config.yaml --memory plenty", "--memory"),
    ("plan config.yaml --gpus 2 --output taken.txt", "taken.txt"),
    ("plan config.yaml --gpus 2 --report plan.doc", "plan.doc"),
    ("plan config.yaml data.path=nowhere", "nowhere"),
    # train: what is told before the first step
    ("train config.yaml --run-dir new data.path=null", "data.path"),
    ("train config.yaml --run-dir new train.checkpoint_dir=nonsense://x", "nonsense"),
    ("train config.yaml --run-dir new train.checkpoint_dir=FOLDER/loop", "loop"),
    ("train config.yaml --run-dir new --plan noise.bin", "noise.bin"),
    ("train config.yaml --run-dir new --plan nowhere.json", "nowhere.json"),
    ("train config.yaml --run-dir data", "data"),
    ("train config.yaml --run-dir run --resume train.batch_size=7", "train.batch_size"),
    # what a run is used for
    ("evaluate nowhere", "nowhere"),
    ("evaluate data", "data"),
    ("evaluate taken.txt", "taken.txt"),
    ("evaluate run --data nowhere", "nowhere"),
    ("evaluate run --data taken.txt", "taken.txt"),
    ("evaluate halfrun", "halfrun"),
    ("predict run --output x.csv --split tset", "tset"),
    ("predict data --output x.csv", "data"),
    ("materialise run --output taken.txt --table C1", "taken.txt"),
    ("materialise run --output vectors --table C1 --ids nowhere.parquet", "nowhere.parquet"),
    ("materialise nowhere --output vectors", "nowhere"),
    ("report", "RUN"),
    ("report nowhere", "nowhere"),
    ("report data", "data"),
    ("report halfrun", "halfrun"),
    ("check nowhere", "nowhere"),
    ("check taken.txt", "taken.txt"),
    # prepare and synthesize
    ("synthesize taken.txt --rows 10", "taken.txt"),
    ("synthesize new.tsv --rows 0", "--rows"),
    ("synthesize new.tsv --rows many", "--rows"),
    ("synthesize nowhere/new.tsv --rows 10 --seed -1", "--seed"),
    ("prepare criteo", "INPUT"),
    ("prepare criteo nowhere.tsv --output new", "nowhere.tsv"),
    ("prepare criteo empty.yaml --output new", "empty.yaml"),
    ("prepare criteo noise.bin --output new", "noise.bin"),
    ("prepare criteo noise.gz --output new", "noise.gz"),
    ("prepare criteo one.tsv --output new", "no rows"),
    ("prepare criteo few.tsv --output data", "data"),
    ("prepare criteo few.tsv --output loop", "loop"),
    ("prepare criteo few.tsv --output new --hash-size 1", "--hash-size"),
    ("prepare criteo few.tsv --output new --hash-size 10 --hash-seed 99999999999999999999", "hash_seed|--hash-seed"),
    ("prepare criteo few.tsv --output new --memory-limit much", "--memory-limit"),
    ("prepare criteo few.tsv --output new --split thirds", "thirds"),
    ("prepare criteo few.tsv --output new --split 0.5,0.1,0.1", "0.5,0.1,0.1"),
    ("prepare criteo few.tsv --output new --max-rejected 2", "--max-rejected"),
    ("prepare criteo few.tsv --output new --threads 0", "--threads"),
    ("prepare graph nowhere.csv --output new --num-embeddings 10", "nowhere.csv"),
    ("prepare graph edges.csv --output new", "num_embeddings|--num-embeddings"),
    ("prepare graph edges.csv --output new --num-embeddings 0", "num_embeddings|--num-embeddings"),
    ("prepare graph edges.csv --output new --num-embeddings 5", "9"),
    ("prepare graph edges.csv --output new --num-embeddings 10 --source form", "form"),
    ("prepare graph edges.csv --output new --num-embeddings 10 --unknown keep", "keep"),
    ("prepare graph edges.csv --output new --data data --table C9", "C9"),
    ("prepare graph empty.yaml --output new --num-embeddings 10", "empty.yaml"),
    # jobs
    ("launch nowhere.yaml --dry-run", "nowhere.yaml"),
    ("launch config.yaml --dry-run -j 0x1", "0x1"),
    ("launch config.yaml --dry-run -j four", "four"),
    ("launch config.yaml --dry-run --env NAME", "NAME"),
    ("launch config.yaml --dry-run --mount nonsense", "nonsense"),
    ("launch config.yaml --dry-run --resource gpu_9_h900", "gpu_9_h900"),
    ("logs nowhere", "nowhere"),
    ("logs run --node -1", "--node"),
    ("cancel run", "run"),
    ("resume data", "data"),
]


def write_workspace(folder: Path, commands: Commands) -> None:
    write_dataset(folder / "data")
    values = config_values(Path("data"))
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    (folder / "noise.bin").write_bytes(bytes(range(256)) * 20)
    (folder / "noise.gz").write_bytes(bytes(range(256)) * 20)
    (folder / "one.tsv").write_text(ROW)
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
    (folder / "halfrun").mkdir()
    (folder / "halfrun" / "config.yaml").write_text("")
    (folder / "halfrun" / "run.json").write_text("{")
    shutil.copytree(folder / "run", folder / "emptied")
    shutil.rmtree(folder / "emptied" / "checkpoints")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    with made_workspace(tmp_path_factory, write_workspace) as made:
        yield made


@pytest.mark.parametrize(("command", "fragment"), SAMPLE, ids=[command for command, _ in SAMPLE])
def test_it_is_refused_in_a_sentence(workspace: Workspace, command: str, fragment: str) -> None:
    require_refused(workspace, command, fragment)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "fragment"), FURTHER, ids=[command for command, _ in FURTHER])
def test_so_are_further_ones(workspace: Workspace, command: str, fragment: str) -> None:
    require_refused(workspace, command, fragment)


def require_refused(workspace: Workspace, command: str, fragment: str) -> None:
    done = workspace.commands.run(*shlex.split(command.replace("FOLDER", str(workspace.folder))))
    changes = workspace.changes()
    assert done.code == 2, done
    assert "Traceback" not in done.output + done.errors, done.errors
    assert any(part in done.errors for part in fragment.split("|")), done.errors
    assert not set("╭│╰") & set(done.errors), done.errors
    assert re.match("(error|failed): ", done.errors), done.errors
    assert len(done.errors) < 2000, done.errors
    assert not changes
