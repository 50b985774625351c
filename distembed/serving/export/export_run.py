"""Exports a trained run: makes its programs, writes them with the meaning of their inputs, and compares their scores.

Memory: the trained model, its tables once more in their stored form, and once more during the comparison. Time: writing
and reading the tables, and scoring the compared rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distembed.base.checksums import checksum_of
from distembed.base.errors import UserError
from distembed.base.files import require_free_space, write_json
from distembed.base.names import one_of
from distembed.base.units import format_bytes
from distembed.base.version import __version__
from distembed.data.dataset.kept import keep_dataset
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import ITEM
from distembed.data.prepare.staging import staged_folder
from distembed.data.reader import Batch
from distembed.data.table.vocabulary import reserved_ids
from distembed.embedding import CompositionalEmbeddingConfig, assignment_checksums
from distembed.serving.export.feature_vectors import PlainFeature, plain_inputs
from distembed.serving.export.parity import (
    ParityCheck,
    RecommendedCheck,
    ScoreCheck,
    SplitRows,
    made_up_batch,
    tower_differences,
)
from distembed.serving.export.programs import BATCH, ProgramInputs, compile_network, require_compiler, save_program
from distembed.serving.export.raw_values import (
    Change,
    column_changes,
    write_sample,
    write_vocabularies,
)
from distembed.serving.export.recommenders import RecommendingModel
from distembed.serving.export.score_program import ScoredModel
from distembed.serving.export.table_groups import ExportStorage, Materialise, divide_tables
from distembed.serving.export.two_towers import Faiss, TowerModel, require_faiss, require_same_index
from distembed.serving.model_folder.manifest import (
    MANIFEST_NAME,
    ExportedFeature,
    ExportedNumber,
    ExportedProgram,
    ExportedSequence,
    ExportedTable,
    ExportedTower,
    ExportManifest,
    Parity,
    Precision,
)
from distembed.serving.model_folder.programs import Program, load_programs
from distembed.serving.model_folder.versions import numbering_versions
from distembed.serving.whole_model import WholeModel, load_whole_model
from distembed.tasks import NextItemConfig, RankingConfig, RetrievalConfig
from distembed.training.config import Config
from distembed.training.trained_run import TrainedRun

NETWORK = "network.pt2"
EXAMPLE_NAME = "serving_example.py"
"""A script that scores raw rows with torch alone; it is copied from this package into every exported folder."""
SAMPLE_ROWS = 256
_TASKS = ("click", "rating", "multi", "ranking", "next_item", "retrieval")

Exportable = ScoredModel | RecommendingModel | TowerModel


def exportable(trained: WholeModel, manifest: Manifest, num_best: int) -> Exportable:
    """Returns a trained model in the form from which its programs are made, by the kind of its task.

    ``num_best`` items are recommended to a row; other tasks do not use it. Models without programs are refused.
    """
    model, task = trained.module.model, trained.blueprint.config.task
    if isinstance(task, RetrievalConfig):
        return TowerModel.of(trained, reserved_ids(manifest, task.item_name), num_best)
    if not isinstance(task, NextItemConfig | RankingConfig):
        return ScoredModel.of(model, trained.task, manifest.schema)
    make = RecommendingModel.for_next_items if isinstance(task, NextItemConfig) else RecommendingModel.for_rankings
    return make(model, reserved_ids(manifest, ITEM), num_best, task.excludes_seen)


def parity_check(trained: WholeModel, model: Exportable, program: Program, precision: Precision) -> ParityCheck[Any]:
    """Returns the comparison of a program with the trained model."""
    if isinstance(model, ScoredModel):
        return ScoreCheck(trained, model, program, precision)
    return RecommendedCheck(trained, model, program, precision)


@dataclass(frozen=True)
class ExportOptions:
    """How a run is exported.

    Attributes:
        precision: How the numbers of its tables are stored.
        materialise: Which tables are stored as the vector of each id.
        server_bytes: Largest bytes of tables on one server; larger ones are divided into shards. None for no limit.
        overwrite: Whether to replace an exported model in the folder.
        metric_rows: The number of a split's first rows that are scored for the metric.
        num_best: Number of items that a model of recommendations returns for a row.
        compile: Whether to compile the program too, for the processor of this machine.
        faiss: The kind of FAISS index to write of a model of two towers; None for none.
    """

    precision: Precision = "fp32"
    materialise: Materialise = "auto"
    server_bytes: int | None = None
    overwrite: bool = False
    metric_rows: int = 200_000
    num_best: int = 10
    compile: bool = False
    faiss: Faiss | None = None

    def __post_init__(self) -> None:
        one_of("--precision", self.precision, ("fp32", "fp16", "int8"))
        one_of("--materialise", self.materialise, ("auto", "never", "always"))
        if self.compile:
            require_compiler()
        if self.faiss is not None:
            one_of("--faiss", self.faiss, ("flat", "hnsw"))
            require_faiss()


def export_run(run: TrainedRun, output: Path, options: ExportOptions, data: str | None = None) -> ExportManifest:
    """Writes the folder of an exported model, which appears whole or not at all.

    Args:
        run: The run.
        output: The folder.
        options: How it is exported.
        data: The dataset whose rows are scored for the comparison; the run's own unless given.

    Raises:
        UserError: The run's task or model has no programs, the folder exists, or a table does not fit a server.
        RunError: The scores differ from the trained model's, or the folder cannot be written.
    """
    one_of("task of an exported run", run.config.task.name, _TASKS)
    with (
        ExitStack() as numbering,
        staged_folder(output, overwrite=options.overwrite, kind="exported model", marker=MANIFEST_NAME) as folder,
    ):
        trained = load_whole_model(in_float32(run), torch.device("cpu"))
        rows = SplitRows.find(data or run.config.data.require_path())
        if isinstance(run.config.task, RetrievalConfig) and rows is not None:
            trained = trained.on_dataset(rows.dataset)  # whose catalogue is read
        model = exportable(trained, run.manifest, options.num_best)
        if options.faiss is not None and not isinstance(model, TowerModel):
            raise UserError("--faiss writes the vectors of items, which models of task.name=retrieval alone have.")
        storage = ExportStorage(options.precision, options.materialise)
        num_bytes = sum(map(storage.bytes, model.tables))
        if isinstance(model, TowerModel):
            num_bytes += model.added_bytes(storage, options.faiss)
        require_free_space(output, num_bytes, "its tables take so much")
        shards = _shards(model, storage, options.server_bytes)
        if shards and options.compile:
            raise UserError("--compile makes one program with all tables, and --server-memory divides them; give one.")
        programs = _save_programs(folder, model, storage, shards, trained)
        keep_dataset(folder, run.dataset, run.manifest, links=False)
        columns = _Columns.write(folder, run, model)
        sequences = () if isinstance(model, TowerModel) else model.sequences
        towers: Sequence[ExportedTower] = ()
        index = None
        if isinstance(model, TowerModel):
            towers = _save_towers(folder, model, storage, columns, trained)
            index = model.save_index(folder, options.faiss)
        manifest = ExportManifest(
            task=run.config.task.name,
            model=run.config.model.name,
            step=trained.step,
            precision=options.precision,
            network=programs[0],
            shards=programs[1:],
            features=columns.features(model.features, model.tables),
            numbers=columns.numbers(model.numbers),
            sequences=[ExportedSequence(each.name, each.beside, columns.changes[0][each.name]) for each in sequences],
            tables=_tables(model.tables, storage, shards),
            parity=Parity(0, 0.0),
            versions={"distembed": __version__, "torch": torch.__version__},
            checksums={},
            recommends=model.recommends,
            config_checksum=config_checksum(run.config),
            towers=towers,
            index=index,
        )
        check = parity_check(trained, model, load_programs(folder, manifest), options.precision)
        batch, parity = _compare(check, rows, options.metric_rows)
        described = (manifest.features, manifest.numbers, manifest.sequences)
        write_sample(folder, model.inputs(batch).tensors, check.outputs(batch), *described)
        shutil.copyfile(Path(__file__).with_name(EXAMPLE_NAME), folder / EXAMPLE_NAME)
        manifest = dataclasses.replace(manifest, parity=parity)
        if isinstance(model, TowerModel) and index is not None:
            require_same_index(model.index, folder, index)
            differences = tower_differences(trained, model, folder, batch, options.precision)
            pairs = zip(towers, differences, strict=True)
            towers = [dataclasses.replace(tower, largest_difference=largest) for tower, largest in pairs]
            manifest = dataclasses.replace(manifest, towers=towers)
        if options.compile:
            inputs = model.inputs(made_up_batch(trained.blueprint.batch_schema, 5))
            compiled = compile_network(folder, manifest.network, inputs)
            manifest = dataclasses.replace(manifest, compiled=compiled)
            check = parity_check(trained, model, load_programs(folder, manifest, compiled=True), options.precision)
            _, parity = _compare(check, rows, options.metric_rows)
            compiled = dataclasses.replace(compiled, largest_difference=parity.largest_difference)
            manifest = dataclasses.replace(manifest, compiled=compiled)
        parent = output.resolve().parent
        highest = numbering.enter_context(numbering_versions(parent))  # until the folder is in its place
        manifest = dataclasses.replace(manifest, checksums=_checksums(folder), sequence=highest + 1)
        write_json(folder / MANIFEST_NAME, manifest.to_json())
    return manifest


def config_checksum(config: Config) -> str:
    """Returns a checksum of the sections of a config, and of its files of assignments, that decide its programs."""
    decisive = [dataclasses.asdict(section) for section in (config.model, config.embedding, config.task)]
    if assignments := assignment_checksums(config.embedding):
        decisive.append(assignments)
    return checksum_of(json.dumps(decisive, sort_keys=True, default=str).encode())


def in_float32(run: TrainedRun) -> TrainedRun:
    """Returns a run whose networks compute in float32, the type of exported models."""
    train = dataclasses.replace(run.config.train, precision="fp32")
    return dataclasses.replace(run, config=dataclasses.replace(run.config, train=train))


def _shards(model: Exportable, storage: ExportStorage, server_bytes: int | None) -> list[list[str]]:
    """Returns the names of the tables of each shard; no shards where one server has room for all tables.

    Tables of models that recommend items cannot be divided: a :class:`UserError` where they exceed ``server_bytes``.
    """
    sizes = {table.name: storage.bytes(table) for table in model.tables}
    if server_bytes is None or sum(sizes.values()) <= server_bytes:
        return []
    if model.recommends is not None:
        raise UserError(
            f"the tables take {format_bytes(sum(sizes.values()))}, more than --server-memory, and those of a model "
            "that recommends items are not divided. Give more memory, or store them with --precision int8."
        )
    return divide_tables(sizes, server_bytes)


def _save_programs(
    folder: Path, model: Exportable, storage: ExportStorage, shards: Sequence[Sequence[str]], trained: WholeModel
) -> list[ExportedProgram]:
    """Saves the programs in ``folder`` and returns their descriptions: the network's first, then each shard's."""
    sizes = {table.name: storage.bytes(table) for table in model.tables}
    inputs = model.inputs(made_up_batch(trained.blueprint.batch_schema, 5))
    if not shards:
        save_program(model.whole_program(storage), inputs, folder / NETWORK)
        features = [feature.name for feature in model.features]
        return [ExportedProgram(NETWORK, list(inputs.tensors), model.outputs, features, sum(sizes.values()))]
    assert isinstance(model, ScoredModel), "other tables are not divided"
    network, programs = model.sharded_programs(shards, storage)
    saved = []
    vectors = []
    for number, (program, names) in enumerate(zip(programs, shards, strict=True)):
        file = f"tables/shard-{number:05d}.pt2"
        drawn = made_up_batch(trained.blueprint.batch_schema, 5)
        shard_inputs = plain_inputs(drawn, program.features, takes_numbers=False)
        save_program(program, shard_inputs, folder / file)
        with torch.no_grad():
            vectors.append(program(*shard_inputs.tensors.values()))
        features = [feature.name for feature in program.features]
        saved.append(
            ExportedProgram(file, list(shard_inputs.tensors), ["vectors"], features, sum(sizes[name] for name in names))
        )
    tensors = {"vectors": torch.cat(vectors, dim=1)}
    if "dense" in inputs.tensors:
        tensors["dense"] = inputs.tensors["dense"]
    save_program(network, ProgramInputs(tensors, {name: {0: BATCH} for name in tensors}), folder / NETWORK)
    return [ExportedProgram(NETWORK, list(tensors), model.outputs), *saved]


@dataclass(frozen=True)
class _Columns:
    """How raw values become the inputs of programs, as the manifest describes it.

    Attributes:
        vocabularies: The file of each feature's raw values.
        changes: The change of each number, and of each feature.
        num_ids: The number of ids of each feature.
    """

    vocabularies: Mapping[str, str]
    changes: tuple[Mapping[str, Change], Mapping[str, Change]]
    num_ids: Mapping[str, int]

    @classmethod
    def write(cls, folder: Path, run: TrainedRun, model: Exportable) -> _Columns:
        """Writes the vocabularies of all programs' features."""
        items = model.item_side.features if isinstance(model, TowerModel) else ()
        names = list(dict.fromkeys(each.name for each in (*model.features, *items)))
        vocabularies = write_vocabularies(folder, Path(run.dataset), run.manifest, names)
        num_ids = {name: table.ids_of(name).num_ids for table in model.tables for name in table.feature_names}
        if isinstance(model, TowerModel):  # whose vectors of items are fewer than ids
            num_ids |= {
                name: each.ids_of(name).num_ids for each in model.item_side.tables for name in each.feature_names
            }
        return cls(vocabularies, column_changes(run.manifest), num_ids)

    def features(
        self, features: Sequence[PlainFeature], tables: Sequence[CompositionalEmbeddingConfig]
    ) -> list[ExportedFeature]:
        by_name = {name: table for table in tables for name in table.feature_names}
        return [
            ExportedFeature(
                feature.name,
                by_name[feature.name].name,
                self.num_ids[feature.name],
                feature.is_list,
                self.vocabularies.get(feature.name),
                self.changes[1].get(feature.name, {}),
            )
            for feature in features
        ]

    def numbers(self, names: Sequence[str]) -> list[ExportedNumber]:
        return [ExportedNumber(name, self.changes[0][name]) for name in names]


def _save_towers(
    folder: Path, model: TowerModel, storage: ExportStorage, columns: _Columns, trained: WholeModel
) -> list[ExportedTower]:
    """Saves the programs of both towers, the user's first, and returns their descriptions."""
    batch, towers = made_up_batch(trained.blueprint.batch_schema, 5), []
    for side in (model.user, model.item_side):
        program = model.save_tower(folder, side, batch, storage)
        features, numbers = columns.features(side.features, side.tables), columns.numbers(side.tower.side.dense)
        towers.append(ExportedTower(program, features, numbers))
    return towers


def _tables(
    tables: Sequence[CompositionalEmbeddingConfig], storage: ExportStorage, shards: Sequence[Sequence[str]]
) -> list[ExportedTable]:
    shard_of_table = {name: number for number, names in enumerate(shards) for name in names}
    return [
        ExportedTable(table.name, storage.form(table), storage.bytes(table), shard_of_table.get(table.name, 0))
        for table in tables
    ]


def _compare(check: ParityCheck[Any], rows: SplitRows | None, metric_rows: int) -> tuple[Batch, Parity]:
    """Compares a program with the trained model on a sample, random without ``rows``, and by a metric on ``rows``."""
    batch = check.sample(rows, SAMPLE_ROWS)
    parity = check.on_sample(batch)
    if rows is None:
        return batch, parity
    metric, exported, trained = check.on_split(rows, metric_rows)
    return batch, dataclasses.replace(parity, metric=metric, exported=exported, trained=trained, split=rows.split)


def _checksums(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of a folder, by its path there."""
    checksums = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        with path.open("rb") as file:
            checksums[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return checksums
