"""Plugins: models and schemes in a file of one's own, known to every command and rank of a run that names the file."""

import dataclasses
import os
import pickle
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

import distembed
from distembed.base.errors import UserError
from distembed.base.lazy import NameTable
from distembed.composition import COMPOSITIONS
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding import EmbeddingConfig, build_tables
from distembed.embedding.build import grown_embedding
from distembed.models import MODELS
from distembed.partitions import PARTITIONS
from distembed.training.config import input_paths, load_config
from distembed.training.resume import load_run_config
from tests.processes import output_of, run_processes
from tests.small_runs import ROWS, config_values
from tests.small_runs import distembed as run_command

MODEL = """
from typing import Literal

import pydantic.dataclasses
import torch
from torch import nn

import {helper}
from distembed.composition import COMPOSITIONS, Sum
from distembed.models import MODELS, Model
from distembed.partitions import PARTITIONS, Partition
from distembed.partitions.settings import SchemeSettings


class Linear(Model):
    batch_fields = ("dense_features", "sparse_features")

    def __init__(self, inputs, hidden):
        super().__init__()
        self.embeddings, self.names = inputs.pooled_embeddings()
        num_numbers = inputs.num_dense + inputs.embedding_dim * len(self.names)
        self.network = nn.Sequential(nn.Linear(num_numbers, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense_features, sparse_features):
        vectors = self.embeddings(sparse_features)
        return self.network(torch.cat([dense_features, *(vectors[name] for name in self.names)], 1)).squeeze(1)


@pydantic.dataclasses.dataclass(frozen=True)
class LinearConfig:
    name: Literal["linear"] = "linear"
    hidden: int = {helper}.HIDDEN

    def build(self, inputs):
        return Linear(inputs, self.hidden)


MODELS["linear"] = LinearConfig


@pydantic.dataclasses.dataclass(frozen=True)
class StripedSettings(SchemeSettings):
    alternatives = (("stripe", "num_stripes"),)
    stripe: int = 5
    num_stripes: int | None = None


class Striped(Partition):
    name = "striped"
    settings = StripedSettings

    def __init__(self, num_embeddings, stripe=5, num_stripes=None):
        super().__init__(num_embeddings)
        self.stripe = stripe if num_stripes is None else -(-num_embeddings // num_stripes)
        self.num_rows = (-(-num_embeddings // self.stripe), self.stripe)

    @property
    def description(self):
        return f"p_1(x) = x // {{self.stripe}}, p_2(x) = x mod {{self.stripe}}"

    def rows(self, ids):
        return torch.stack([ids // self.stripe, ids % self.stripe])

    def colliding_ids(self):
        return None

    def _candidates(self, rows):
        return rows[0] * self.stripe + rows[1]

    def grown_settings(self, num_embeddings):
        return {{"stripe": self.stripe}}


@pydantic.dataclasses.dataclass(frozen=True)
class ScaledSettings(SchemeSettings):
    scales: list[float] | None = None


class Scaled(Sum):
    name = "scaled"
    settings = ScaledSettings

    def __init__(self, scales=None):
        self.scales = scales

    def compose(self, vectors):
        scales = self.scales or [1.0] * len(vectors)
        return sum(scale * vector for scale, vector in zip(scales, vectors))


PARTITIONS["striped"] = Striped
COMPOSITIONS["scaled"] = Scaled

if __name__ == "__main__":
    from distembed.commands.cli import main

    main()
"""


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plugin, a module that it imports, and nothing else."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "mine.py").write_text(MODEL.format(helper="sizes_of_mine"))
    (folder / "sizes_of_mine.py").write_text("HIDDEN = 7\n")
    return folder


@pytest.fixture(scope="module")
def run(code: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that was launched from another folder than the plugin's, which its config names."""
    values = {**config_values(dataset), "model": {"name": "linear"}, "plugins": ["mine.py"]}
    values["embedding"]["default"] |= {"partition": "striped", "stripe": 4, "composition": "scaled"}
    values["embedding"]["default"]["scales"] = [0.5, 2.0]
    values["embedding"]["tables"] = {"C2": {"num_stripes": 50}, "M": {"partition": "quotient_remainder", "force": True}}
    (code / "config.yaml").write_text(yaml.safe_dump(values))
    folder = tmp_path_factory.mktemp("elsewhere") / "run"
    run_command(
        "launch", code / "config.yaml", "train.max_steps=4", "-s", "local_cwd", "-j", "1x2", "--run-dir", folder
    )
    return folder


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_launched_run_is_evaluated_predicts_and_is_loaded(run: Path, code: Path, tmp_path: Path) -> None:
    """Each in a new process, in another working directory than the plugin's."""
    assert yaml.safe_load((run / "config.yaml").read_text())["plugins"] == [str(code / "mine.py")]
    evaluated = run_command("evaluate", run).stdout
    assert f"({ROWS['test']} rows)" in evaluated
    run_command("predict", run, "--output", tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet").column("prediction").to_pylist()
    assert len(scores) == ROWS["test"] and len(set(scores)) > 1
    run_processes(1, load_and_evaluate, run, evaluated)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_launched_run_is_opened_by_the_other_commands(run: Path, tmp_path: Path) -> None:
    run_command("materialise", run, "--output", tmp_path / "vectors", "--table", "C3")
    run_command("check", run)
    run_command("report", run, "--output", tmp_path / "report.html")
    run_command("convert", run, "embedding={default: {embedding_dim: 8}}", "--output", tmp_path / "full")
    run_command("resume", run)
    run_command("train", run / "config.yaml", "train.max_steps=6", "--run-dir", run, "--resume")


def load_and_evaluate(_: int, run: Path, said: str) -> None:
    assert "linear" not in MODELS
    found = distembed.load(run, checkpoint=4).evaluate("test")
    assert f"logloss {found['logloss']:.4f}" in said, (found, said)


@pytest.mark.thorough
@pytest.mark.distributed
def test_an_exported_model_needs_no_plugin(run: Path, tmp_path: Path) -> None:
    run_command("export", run, "--output", tmp_path / "model")
    output_of(run_without_distembed, tmp_path / "model" / "serving_example.py")


def run_without_distembed(example: Path) -> None:
    assert "linear" not in MODELS
    for name in [name for name in sys.modules if name.partition(".")[0] == "distembed"]:
        sys.modules[name] = None  # type: ignore[assignment] # its import fails
    runpy.run_path(str(example), run_name="__main__")


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Path]:
    """A file for a plugin; the names that it registers are gone after the test."""
    yield tmp_path / "plugin.py"
    tables: list[NameTable[Any]] = [MODELS, PARTITIONS, COMPOSITIONS]
    for names in tables:
        for name in names.added.copy():
            del names[name]


REGISTER = """
from dataclasses import dataclass
from distembed.models import MODELS

@dataclass(frozen=True)
class Config:
    name: str = "own"

MODELS["own"] = Config
"""
USE = ["model={name: own}"]


def test_a_path_starts_at_the_file_that_has_it_and_in_an_override_at_the_working_directory(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.write_text(REGISTER)
    (tmp_path / "base.yaml").write_text("plugins: [plugin.py]")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.yaml").write_text("extends: ../base.yaml")
    monkeypatch.chdir(tmp_path / "folder")
    config = load_config(Path("config.yaml"), USE)
    assert config.plugins == [str(plugin)]
    assert load_config(None, ["plugins=[../plugin.py]", *USE]) == config
    assert input_paths(config) == [str(plugin)], "what containers have to see"
    (tmp_path / "dumped.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "dumped.yaml") == config
    assert "plugins" not in load_config(None).to_yaml(), "the config of a run without any is as it was"


def test_a_plugin_is_imported_once_in_a_process(plugin: Path, tmp_path: Path) -> None:
    plugin.write_text(f"with open({str(tmp_path / 'imports')!r}, 'a') as file:\n    file.write('x')\n" + REGISTER)
    first = load_config(None, [f"plugins=[{plugin}]", *USE])
    os.symlink(plugin, tmp_path / "link.py")
    assert load_config(None, [f"plugins=[{tmp_path / 'link.py'}]", *USE]).model == first.model
    assert (tmp_path / "imports").read_text() == "x"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import torch\nimport no_such_module\n", "plugin.py, line 2: ModuleNotFoundError: No module named 'no_such"),
        ("\n\ndef f(:\n", "plugin.py, line 3: SyntaxError: invalid syntax"),
        ("def f():\n    raise KeyError('k')\n\nf()\n", "plugin.py, line 2: KeyError: 'k'"),
        (REGISTER.replace('"own"] =', '"dlrm"] ='), "plugin.py, line 9: the name 'dlrm' is registered already, by"),
    ],
)
def test_what_is_wrong_within_a_plugin_is_told_with_its_file_and_line(plugin: Path, text: str, error: str) -> None:
    plugin.write_text(text)
    dlrm = MODELS["dlrm"]
    with pytest.raises(UserError) as found:
        load_config(None, [f"plugins=[{plugin}]"])
    assert f"the overrides: the plugin {plugin} cannot be imported: {plugin.parent}/{error}" in str(found.value)
    assert MODELS["dlrm"] is dlrm
    plugin.write_text(REGISTER)
    assert load_config(None, [f"plugins=[{plugin}]", *USE]).model.name == "own", "once it is mended, it is imported"


def test_two_plugins_do_not_register_one_name(plugin: Path, tmp_path: Path) -> None:
    for path in (plugin, tmp_path / "other.py"):
        path.write_text(REGISTER)
    with pytest.raises(UserError, match=f"other.py, line 9: the name 'own' is registered already, by {plugin}"):
        load_config(None, [f"plugins=[{plugin}, {tmp_path}/other.py]", *USE])


@pytest.mark.parametrize(
    ("plugins", "error"),
    [
        ("[gone.py]", "the plugin {folder}/gone.py cannot be imported: there is no such file: put it back, or name"),
        ("[no.such]", "the plugin no.such cannot be imported: there is no module 'no.such' here: install its package,"),
        ("mine.py", "plugins: Input should be a valid array; got 'mine.py'"),
        ("[1]", "plugins.0: Input should be a valid string; got 1"),
        ("['']", "plugins.0: "),
        ("{a: b}", "plugins: Input should be a valid array"),
        ('["a\\0.py"]', "plugins.0: "),
    ],
)
def test_a_plugin_that_is_missing_is_told_with_the_file_that_names_it(plugins: str, error: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"plugins: {plugins}")
    with pytest.raises(UserError) as found:
        load_config(config)
    assert str(config) in str(found.value) and error.format(folder=tmp_path) in str(found.value)


def test_a_run_brings_no_code_along(plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its config names a file or a module in or near it, by any path, or extends a config that does."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / "theirs.py").write_text("raise SystemExit('executed')")
    os.symlink(run, tmp_path / "link")
    os.symlink(run / "theirs.py", tmp_path / "beside.py")
    for package in ("package/inner", "space/inner"):
        (run / package).mkdir(parents=True)
    for module in ("package/__init__.py", "package/inner/__init__.py", "package/inner/code.py", "space/inner/code.py"):
        (run / module).write_text("raise SystemExit('executed')")
    # a link to a harmless file executes compiled code that lies next to the link and is never compared with the file
    (run / "linked.py").symlink_to(tmp_path / "harmless.py")
    (tmp_path / "harmless.py").write_text("")
    (tmp_path / "beside").symlink_to(run / "package")
    (tmp_path / "around").mkdir()
    (tmp_path / "around" / "run").symlink_to(run)
    for folder in (run, tmp_path, tmp_path / "link"):
        monkeypatch.syspath_prepend(folder)
    modules = ["theirs", "package", "package.inner", "package.inner.code", "space", "space.inner.code", "linked"]
    # these have a parent package that is outside of the run
    modules += ["run", "run.theirs", "run.space.inner.code", "around.run.theirs", "beside", "beside.inner.code"]
    files = ["theirs.py", run / "theirs.py", tmp_path / "link" / "theirs.py", "../run/theirs.py", "../beside.py"]
    for path in files + modules:
        for file in ("config.yaml", "base.yaml"):
            (run / "config.yaml").write_text("extends: base.yaml")
            (run / file).write_text(f"plugins: [{path}]\ndata: {{path: x}}")
            with pytest.raises(UserError, match="may have come along with the run.*Read the file, move it out"):
                load_run_config(run)
    plugin.write_text(REGISTER)
    outside = tmp_path / "own_module_of_this_machine.py"
    outside.write_text("")
    (run / "config.yaml").write_text(f"plugins: [{plugin}, {outside.stem}, sys, json.tool]\ndata: {{path: x}}")
    assert load_run_config(run).plugins[1:] == [outside.stem, "sys", "json.tool"] and "own" in MODELS
    for missing in ("no_such_module", "sys.no", "json.no_such", ".theirs", "__main__.no"):
        (run / "config.yaml").write_text(f"plugins: [{missing}]\ndata: {{path: x}}")
        with pytest.raises(UserError, match=f"the plugin {re.escape(missing)} cannot be imported"):
            load_run_config(run)


@pytest.mark.thorough
def test_a_command_in_a_run_folder_executes_no_plugin_of_the_run(tmp_path: Path) -> None:
    """``python -m`` looks for modules in the working directory, which is the run here."""
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "theirs.py").write_text("raise SystemExit('executed')")
    (tmp_path / "config.yaml").write_text("plugins: [theirs]\ndata: {path: x}")
    arguments = [sys.executable, "-m", "distembed", "evaluate", "."]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and "theirs, which may have come along" in " ".join(done.stderr.split()), done.stderr


def test_mistakes_end_commands_with_2(plugin: Path, tmp_path: Path) -> None:
    """So does a script that calls main() whenever it is imported, as a job's ranks would."""
    (tmp_path / "config.yaml").write_text("plugins: [plugin.py]\nmodel: {name: own}")
    assert "there is no such file" in run_command("describe", tmp_path / "config.yaml", code=2).stderr
    plugin.write_text(REGISTER + "from distembed.commands.cli import main\nmain()\n")
    told = run_command("describe", tmp_path / "config.yaml", code=2).stderr
    assert f"the plugin {plugin} calls main() while it is imported" in " ".join(told.split())


@pytest.mark.distributed
def test_a_name_of_this_process_alone_is_not_launched(plugin: Path, tmp_path: Path, config: Path) -> None:
    plugin.write_text(REGISTER + "from distembed.commands.cli import main\nmain()\n")
    arguments = [sys.executable, plugin, "launch", config, *USE, "--run-dir", tmp_path / "run"]
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "'own' is registered in this process alone" in done.stderr and f"plugins=[{plugin}]" in done.stderr


LAUNCH = """
import sys
from distembed.training.config import load_config, require_plugins
from distembed.base.errors import UserError
for plugins in sys.argv[1:]:
    config = load_config(None, [f"plugins={plugins}", "model={name: own}"])
    try:
        require_plugins(config)
        print("accepted")
    except UserError as error:
        print(error)
"""


def test_each_name_has_to_be_registered_by_a_plugin(tmp_path: Path) -> None:
    """A plugin may be the script, or a module that the script has imported; that there are others is not enough."""
    (tmp_path / "other.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from package import models")
    (tmp_path / "package" / "models.py").write_text(REGISTER)
    script = tmp_path / "script.py"
    for registers, registering in (
        (REGISTER, ["[script.py]", "[other.py, script.py]"]),
        ("import package", ["[script.py]", "[package]", "[other.py, package.models]"]),
        ("", ["[package]", "[other.py, package]"]),
    ):
        script.write_text(registers + LAUNCH)
        others = ["[]", "[json]", "[other.py]"] if registers else []
        told = output_of(run_script, script, [*others, *registering]).splitlines()
        assert told[len(others) :] == ["accepted"] * len(registering), (registers, told)
        assert all("'own' is registered in this process alone" in each for each in told[: len(others)])
        if others:
            assert f"such as plugins=[{tmp_path}/other.py, {script}]." in told[2]


def run_script(script: Path, arguments: list[str]) -> None:
    os.chdir(script.parent)
    sys.path.insert(0, str(script.parent))
    sys.argv[1:] = arguments
    runpy.run_path(str(script), run_name="__main__")


def test_installed_packages_name_their_plugins_by_entry_points(tmp_path: Path) -> None:
    (tmp_path / "own_package.py").write_text(REGISTER)
    information = tmp_path / "own_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[distembed.base.plugins]\nown = own_package\n")
    run_processes(1, use_installed, tmp_path)
    (tmp_path / "own_package.py").write_text("import no_such_module")
    run_processes(1, use_broken, tmp_path)


def use_installed(_: int, folder: Path) -> None:
    sys.path.insert(0, str(folder))
    assert load_config(None, USE).model.name == "own"


def use_broken(_: int, folder: Path) -> None:
    sys.path.insert(0, str(folder))
    with pytest.raises(UserError, match="the installed package own-package.*own_package.py, line 1: ModuleNotFound"):
        load_config(None)


@pytest.fixture
def read(plugin: Path, tmp_path: Path) -> Callable[[str], EmbeddingConfig]:
    """Reads the section ``embedding`` with the schemes of :data:`MODEL`, and checks that it is read back."""
    plugin.write_text(MODEL.format(helper="sizes_of_mine"))
    (tmp_path / "sizes_of_mine.py").write_text("HIDDEN = 7\n")

    def read(text: str) -> EmbeddingConfig:
        config = load_config(None, [f"plugins=[{plugin}]", f"embedding={text}"])
        (tmp_path / "config.yaml").write_text(config.to_yaml())
        assert load_config(tmp_path / "config.yaml") == config == pickle.loads(pickle.dumps(config))
        return config.embedding

    return read


def rows(config: EmbeddingConfig) -> list[tuple[int, ...]]:
    features = [CategoricalFeature("small", 300), CategoricalFeature("large", 1000)]
    return [table.scheme.num_rows for table in build_tables(features, config)]


def test_own_schemes_have_settings_of_their_own(read: Callable[[str], EmbeddingConfig]) -> None:
    """They are keys beside the others, inherited, replaced by their alternatives, and ignored by other schemes."""
    assert rows(read("{default: {partition: striped}}")) == [(60, 5), (200, 5)]
    own = read("{default: {partition: striped, stripe: 10, collisions: 7}, tables: {large: {num_stripes: 20}}}")
    assert rows(own) == [(30, 10), (20, 50)]
    others = read("{default: {partition: striped, stripe: 10}, tables: {large: {partition: remainder, collisions: 8}}}")
    assert rows(others) == [(30, 10), (125,)]
    assert rows(read("{default: {stripe: 10}, tables: {large: {partition: striped}}}")) == [(300,), (100, 10)]
    scaled = read("{default: {partition: striped, composition: scaled, scales: [1.0, 3.0]}}")
    (table, _) = build_tables([CategoricalFeature("small", 300), CategoricalFeature("large", 1000)], scaled)
    assert table.combine.setting_values() == {"scales": (1.0, 3.0)}


def test_a_config_without_an_own_scheme_has_none_of_its_settings(read: Callable[[str], EmbeddingConfig]) -> None:
    with_plugin = read("{default: {partition: remainder}}")
    assert not {"stripe", "scales"} & set(dataclasses.asdict(with_plugin)["default"])
    assert load_config(None, ["embedding.default.partition=remainder"]).embedding == with_plugin


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{default: {partition: striped, stirpe: 3}}", "default.stirpe: unknown key; did you mean embedding.default.s"),
        ("{default: {}, tables: {large: {stirpe: 3}}}", "large.stirpe: unknown key; did you mean embedding.tables.l"),
        ("{default: {partition: striped, stripe: x}}", "embedding.default.stripe: Input should be a valid integer"),
        ("{default: {stripe: x}}", "embedding.default.stripe: Input should be a valid integer"),
        ("{default: {partition: stripped}}", "default.partition is 'stripped', which is not known. Did you mean"),
    ],
)
def test_mistakes_in_own_settings_are_told(read: Callable[[str], EmbeddingConfig], text: str, error: str) -> None:
    with pytest.raises(UserError, match="1 mistake in the overrides") as found:
        read(text)
    assert error in str(found.value)


@pytest.mark.parametrize(
    ("field", "frozen", "error"),
    [
        ("threshold: int = 3", True, "Own.threshold is a setting that every table has; rename it"),
        ("own: int", True, "Own.own has no default"),
        ("own: int = 3", False, "Own, the settings of a scheme, is no frozen dataclass; make it one"),
    ],
)
def test_a_settings_class_that_cannot_be_used_is_refused(plugin: Path, field: str, frozen: bool, error: str) -> None:
    plugin.write_text(
        "from dataclasses import dataclass\nfrom distembed.partitions import PARTITIONS, Naive\n"
        f"@dataclass(frozen={frozen})\nclass Own:\n    {field}\n"
        "class Mine(Naive):\n    name = 'mine'\n    settings = Own\nPARTITIONS['mine'] = Mine\n"
    )
    with pytest.raises(UserError, match=re.escape(f"embedding.default: {error}")):
        load_config(None, [f"plugins=[{plugin}]", "embedding.default.partition=mine"])


def test_tables_of_an_own_scheme_grow(read: Callable[[str], EmbeddingConfig]) -> None:
    config = read("{default: {partition: striped, num_stripes: 20}}")
    before, now = [CategoricalFeature("large", 1000)], [CategoricalFeature("large", 1020)]
    (table,) = build_tables(now, grown_embedding(config, before, config, now))
    assert table.scheme.num_rows == (21, 50), "stripes are of the length that they had"
