"""Figures and tables of papers as sweeps: their YAML files, their datasets, and the runs of each.

::

    configs/papers/datasets.yaml        raw files, and the commands that prepare them
    configs/papers/PAPER/paper.yaml     a paper, and why some of its figures are not run
    configs/papers/PAPER/ITEM.yaml      a figure or a table: a config, variants of it, metrics, a plot

A variant is the item's config with settings, as ``distembed train`` takes them. ``of: NAME`` adds its settings to those
of another variant, which it is then compared with. ``{dataset}`` in a setting stands for the prepared folder.
"""

import gzip
import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic.dataclasses
from annotated_types import Len
from pydantic import TypeAdapter

from distembed.base.errors import RunError, UserError
from distembed.base.files import CONFIGS, read_json, read_regular_file, write_json
from distembed.base.names import STRICT, one_of
from distembed.base.process import PARENT_VARIABLE
from distembed.base.validation import MAX_BYTES, parse_yaml, validated
from distembed.training.config import Config, load_config
from distembed.training.run_folder.lock import owned
from distembed.training.sweeps.axes import SEED, NamedRun, value_names
from distembed.training.sweeps.sweep import PlannedRun, plan_run, require_no_mistakes

PAPERS = CONFIGS / "papers"
"""The folder of the papers in the installed package."""
CHECKSUMS = "raw.json"
"""File beside a prepared dataset: the SHA-256 of the raw files that it is made of."""
_PAPER, _DATASETS = "paper.yaml", "datasets.yaml"
_MOST_WAIT_SECONDS = 86_400.0


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Dataset:
    """Raw files, and how a dataset is made of them.

    Attributes:
        files: SHA-256 of each raw file's contents, uncompressed, by its name; empty where it is not known.
        source: Where the files, or the full data, are to be had.
        commands: Arguments of ``distembed``; the last one is the output, ``{dataset}/NAME``. Inputs are in the folder
            ``{raw}``, or outputs of earlier commands.
    """

    files: dict[str, str]
    source: str
    commands: list[str]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Variant:
    """A line of a table, or a curve.

    Attributes:
        settings: Settings in addition to the item's own and to the settings of ``of``.
        of: The variant that it extends, and that it is compared with.
        config: A config in place of the item's.
        reported: The paper's figures.
    """

    settings: list[str] = field(default_factory=list)
    of: str | None = None
    config: str | None = None
    reported: str = ""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Plot:
    """The axes of an item's plot.

    Attributes:
        x: The variants' names, their numbers of parameters in tables, or the rows read in training.
        y: A metric.
    """

    x: Literal["variant", "parameters", "rows"]
    y: str


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Item:
    """A figure or a table of a paper.

    Attributes:
        title: Its subject.
        dataset: Name of its dataset.
        config: Its config, relative to its file, or else to the project's configs.
        metrics: The metrics of its table; variants are compared by the first.
        plot: The axes of its plot.
        variants: Its lines, by name.
        settings: Settings of all variants.
        reported: The paper's report, in a sentence; empty for an experiment that is not of the paper.
        remark: How the item differs from the paper's.
    """

    title: str
    dataset: str
    config: str
    metrics: Annotated[list[str], Len(1)]
    plot: Plot
    variants: Annotated[dict[str, Variant], Len(1)]
    settings: list[str] = field(default_factory=list)
    reported: str = ""
    remark: str = ""

    def lineage(self, name: str) -> list[Variant]:
        """Returns a variant after the ones that it extends, the first of them first.

        Raises:
            UserError: ``of`` names no variant, or the variants extend one another in a circle.
        """
        found: dict[str, Variant] = {}
        following: str | None = name
        while following is not None:
            if following in found:
                raise UserError(f"variants.{name}.of: the variants {', '.join(found)} extend one another in a circle.")
            found[following] = self.variants[one_of(f"variants.{name}.of", following, self.variants)]
            following = found[following].of
        return list(found.values())[::-1]

    def outputs(self) -> set[str]:
        """Returns the names of the outputs of its dataset that its variants read."""
        settings = [*self.settings, *(setting for variant in self.variants.values() for setting in variant.settings)]
        return {"data", *_outputs(settings)}


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class Paper:
    """A paper: its title, where it is, and, by figure, the reason why it is not run here."""

    title: str
    url: str
    not_run: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Listed:
    """A line of the list of figures and tables: one to run, or one with the reason why it is not run.

    An experiment that is not of the paper says so in its title.
    """

    name: str
    title: str
    reason: str | None


def load_item(name: str, folder: Path = PAPERS) -> Item:
    """Reads a figure or a table.

    Args:
        name: ``PAPER/ITEM``.
        folder: The folder of the papers.

    Raises:
        UserError: There is none of the name, it is one that is not run here, or its file is wrong.
    """
    listed = {line.name: line for line in list_items(folder)}
    found = listed[one_of("NAME", name, listed)]
    if found.reason is not None:
        raise UserError(f"{name} is not run here: {found.reason}")
    item: Item = _read(folder / f"{name}.yaml", Item)
    for variant in item.variants:
        item.lineage(variant)
    if item.plot.y not in item.metrics:
        raise UserError(f"{folder / name}.yaml: plot.y is {item.plot.y!r}; give one of {', '.join(item.metrics)}.")
    return item


def list_items(folder: Path = PAPERS) -> list[Listed]:
    """Returns the items of the papers, and the figures that are not run, paper by paper."""
    if not folder.is_dir():
        raise UserError(f"--papers {folder} is no folder; leave --papers out for the project's own items.")
    lines = []
    for file in sorted(folder.glob(f"*/{_PAPER}")):
        own = file.parent.name
        items = [path for path in file.parent.glob("*.yaml") if path != file]
        lines += [
            *(Listed(f"{own}/{path.stem}", _title(_read(path, Item)), None) for path in items),
            *(Listed(f"{own}/{name}", "", reason) for name, reason in _read(file, Paper).not_run.items()),
        ]
    return sorted(lines, key=lambda line: line.name)


def _title(item: Item) -> str:
    return item.title if item.reported else f"{item.title} (not of the paper)"


def load_dataset(name: str, folder: Path = PAPERS) -> Dataset:
    """Returns a dataset by its name: one of the folder's own, or one of the project's."""
    files = [file / _DATASETS for file in (PAPERS, folder) if (file / _DATASETS).exists()]
    datasets: dict[str, Dataset] = {
        name: found for file in files for name, found in _read(file, dict[str, Dataset]).items()
    }
    return datasets[one_of("dataset", name, datasets)]


def prepare_dataset(
    dataset: Dataset, outputs: set[str], raw: Path, folder: Path, say: Callable[[str], None], any_data: bool = False
) -> dict[str, str]:
    """Runs the commands that make missing outputs, and returns the SHA-256 of each raw file.

    One process at a time prepares a folder. The checksums of its raw files are kept in it.

    Args:
        dataset: The dataset.
        outputs: Names of the outputs to make; the outputs that their commands read are made too.
        raw: Folder of the raw files.
        folder: Folder of the outputs.
        say: Prints a line.
        any_data: Whether raw files may have other checksums than the dataset's.

    Raises:
        UserError: Raw files are missing, or have other checksums than the dataset's or than earlier outputs' raw files.
        RunError: A command failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with owned(folder, _MOST_WAIT_SECONDS, say):
        known = folder / CHECKSUMS
        found: dict[str, str] = read_json(known, f"remove {folder}") if known.exists() else {}
        if commands := _missing_commands(dataset, outputs, folder):
            missing = [name for name in dataset.files if not (raw / name).exists()]
            if missing:
                raise UserError(f"--data {raw} has no {', '.join(missing)}. {dataset.source}")
            checksums = {name: _checksum(raw / name) for name in dataset.files}
            if found not in ({}, checksums):
                raise UserError(f"{folder} was made of other files than those in --data {raw}; remove it first.")
            found = checksums
        wrong = [
            f"{name} has the SHA-256 {found[name]}, and the file of the tables in configs/papers has {expected}"
            for name, expected in dataset.files.items()
            if expected and found.get(name, expected) != expected
        ]
        if wrong and not any_data:
            raise UserError(f"{'; '.join(wrong)}. {dataset.source} Or add --any-data.")
        if commands:
            write_json(known, found)
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        for words in commands:
            line = [word.format(raw=raw, dataset=folder) for word in words]
            say(f"distembed {shlex.join(line)}")
            code = subprocess.run([sys.executable, "-m", "distembed", *line], env=environment).returncode
            if code != 0:
                raise RunError(f"distembed {shlex.join(line)} ended with exit code {code}; its output says why.")
        return found


def variant_config(item: Item, file: Path, variant: str, dataset: Path, seed: int) -> Config:
    """Returns the config of a variant with a seed.

    Args:
        item: The item.
        file: Its file, to which the paths of configs are relative.
        variant: The variant's name.
        dataset: The folder of the prepared dataset.
        seed: The seed.

    Raises:
        UserError: The config is wrong.
    """
    lineage = item.lineage(variant)
    config = next((each.config for each in lineage[::-1] if each.config), item.config)
    settings = [*item.settings, *(setting for each in lineage for setting in each.settings)]
    settings = [setting.replace("{dataset}", str(dataset.absolute())) for setting in settings]
    data = f"data.path={dataset.absolute() / 'data'}"
    own = file.parent / config
    return load_config(own if own.exists() else CONFIGS / config, [data, *settings, f"{SEED}={seed}"])


def plan_item(item: Item, file: Path, dataset: Path, folder: Path, num_seeds: int) -> list[PlannedRun]:
    """Returns the runs of an item in ``folder``: each variant with seed 0, then each with seed 1, and so on.

    Runs of higher seeds are returned if they have finished.

    Raises:
        UserError: Some runs cannot be started; the error lists all mistakes.
    """
    recipes = dict(zip(item.variants, value_names([f"variant={each}" for each in item.variants]), strict=True))
    runs, mistakes = [], dict[str, list[str]]()
    found = [re.fullmatch(r".*,seed=(\d{1,3})", path.name) for path in folder.glob("*,seed=*")]
    for seed in range(max(num_seeds, *(int(match[1]) + 1 for match in found if match), 0)):
        for variant, recipe in recipes.items():
            run = NamedRun(f"{recipe},seed={seed}", recipe, (f"variant={recipe}", f"{SEED}={seed}"), ())
            try:
                planned = plan_run(run, variant_config(item, file, variant, dataset, seed), folder)
                runs += [planned] if seed < num_seeds or planned.state == "finished" else []
            except UserError as error:
                mistakes.setdefault(str(error), []).append(run.name)
    require_no_mistakes(mistakes)
    return runs


def _missing_commands(dataset: Dataset, outputs: set[str], folder: Path) -> list[list[str]]:
    """Returns the commands, split into words, of the outputs that are not there, and of their missing inputs."""
    needed, commands = {*outputs}, list[list[str]]()
    for words in map(shlex.split, dataset.commands[::-1]):
        (output,) = _outputs(words[-1:])
        if output in needed and not (folder / output).exists():
            commands.insert(0, words)
            needed |= _outputs(words[:-1])
    return commands


def _outputs(texts: Iterable[str]) -> set[str]:
    """Returns each NAME that ``{dataset}/NAME`` names in the texts."""
    return {name for text in texts for name in re.findall(r"\{dataset\}/([\w.-]+)", text)}


def _checksum(file: Path) -> str:
    """Returns the SHA-256 of a file's contents, of a .gz file without its compression."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _read(path: Path, kind: Any) -> Any:
    """Returns the contents of a YAML file as a dataclass."""
    values = parse_yaml(read_regular_file(path, MAX_BYTES).decode(), str(path))
    if not isinstance(values, Mapping):
        raise UserError(f"{path} holds a {type(values).__name__}; it must hold keys such as `title:`.")
    return validated(TypeAdapter(kind), kind, values, str(path))
