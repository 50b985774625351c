"""``distembed compress``: a trained run with its tables as codes, without training, as a run of no steps.

::

    RUN ----> full vectors, table by table ----> codes ----> OUT/codes/TABLE.parquet     a column of codes for each part
                                                    `------> OUT, by `convert`: codebooks fitted to the full vectors

The codes are assignments of the partition ``explicit``, so that all commands that take a run take OUT. Codebooks are
fitted once more to the codes of all parts together, which for ``residual`` lowers the distortion.

Memory holds two copies of the largest full table, of the checkpoint's and of the points, or of the points and of their
rests, and about 80 bytes an id: 1.95 GiB at most for ``residual`` codes of 10 million ids of 16 numbers (0.6 GiB).
Distances are computed in float64, for some points at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from distembed.base.errors import UserError
from distembed.base.files import write_json
from distembed.base.names import one_of
from distembed.base.ranks import Ranks, choose_device, process_group
from distembed.base.units import format_bytes
from distembed.data.dataset.kept import kept_dataset
from distembed.data.dataset.manifest import id_fingerprint
from distembed.data.prepare.staging import require_outside, staged_folder
from distembed.data.table.vocabulary import raw_values
from distembed.embedding.collections import embedding_modules
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.occurrences import id_occurrences
from distembed.embedding.settings import TableConfig
from distembed.partitions import PARTITIONS
from distembed.serving.convert.code_options import DATA_TYPES, CodedRun, CodeOption, CodeOptions
from distembed.serving.convert.code_search import LossSearch, Validation
from distembed.serving.convert.code_weights import IdWeights
from distembed.serving.convert.item_features import ItemFeatures
from distembed.serving.convert.models import full_table_names
from distembed.serving.convert.run_source import RunAsStock
from distembed.serving.convert.run_start import NewRun, write_converted
from distembed.serving.convert.table_codes import (
    PART_BITS,
    CodedPoints,
    CodePoints,
    CodeShape,
    candidate_shapes,
    nearest_bits,
    quantise,
    shape_of_bits,
)
from distembed.serving.convert.table_sizes import TableSizes, total_bytes
from distembed.tasks import batch_schema
from distembed.training.build import Blueprint
from distembed.training.kept_codes import CODES
from distembed.training.run_folder.folder import RunFolder
from distembed.training.run_folder.record import read_json_object
from distembed.training.trained_run import TrainedRun, whole_dataset

_KIND, _MARKER = "run of codes", "run.json"


def compress_to_codes(
    run: TrainedRun, output: Path, options: CodeOptions, say: Callable[[str], None] = lambda _: None
) -> CodedRun:
    """Writes a run with its tables as codes; the folder appears whole or not at all.

    Args:
        run: The run, of any partitions and compositions; tables that give several vectors an id stay as they are.
        output: The folder to write.
        options: The size and the scheme.
        say: Prints a line of progress.

    Raises:
        UserError: The run is of codes already, no codes keep the budget or the loss, the folder exists, or it is to be
            replaced and holds the run, its dataset, or a run that was trained.
        RunError: A file cannot be written.
    """
    made = read_json_object(run.folder / _MARKER).get(CODES)
    if made is not None:
        from_run = f", {made['source']}" if isinstance(made, dict) and "source" in made else ""
        raise UserError(f"{run.folder} is of codes already; compress the run that it was made of{from_run}.")
    require_outside([run.folder, run.config.data.require_path(), run.dataset], output)
    if options.overwrite:
        _require_replaceable(output)
    validation = None if options.max_loss is None else Validation.of(run)
    coder = _Coder(run, options, say)
    with staged_folder(output, overwrite=options.overwrite, kind=_KIND, marker=_MARKER) as folder:
        write = partial(coder.write, name=output.name)
        if validation is not None and options.max_loss is not None:
            search = LossSearch(validation, run.folder, coder.checkpoint_step, options.max_loss, say)
            with process_group("auto") as ranks:
                coded = search.smallest(coder.sizes(), write, folder, ranks)
            _record_metric(folder, coded)
            return coded
        if options.bits_per_id is not None:
            return write(coder.options_of_bits(options.bits_per_id), folder)
        assert options.budget_bytes is not None
        return write(coder.sizes(options.budget_bytes).within(options.budget_bytes), folder)


def _record_metric(folder: Path, coded: CodedRun) -> None:
    """Adds the metric before and after to ``run.json``, which is written before the codes are evaluated."""
    assert coded.metric is not None
    record = dict(read_json_object(folder / _MARKER))
    write_json(folder / _MARKER, record | {CODES: record[CODES] | {"metric": dataclasses.asdict(coded.metric)}})


def _require_replaceable(output: Path) -> None:
    """Refuses to replace a run that was trained, or is trained now; other folders are left to ``staged_folder``.

    Raises:
        UserError: The folder holds a run that ``distembed compress`` did not make, or another process trains into it.
    """
    if not (output / _MARKER).is_file():
        return
    if CODES not in read_json_object(output / _MARKER):
        raise UserError(
            f"{output} is a run that `distembed compress` did not make, so --overwrite does not replace it; name "
            "another output, or remove it yourself."
        )
    RunFolder(output).require_free()


@dataclass(frozen=True)
class _Group:
    """The tables of one setting of the config, which have common codes, by the name of their full weights."""

    name: str
    tables: dict[str, CompositionalEmbeddingConfig]

    @property
    def num_bytes(self) -> int:
        return sum(table.memory_bytes for table in self.tables.values())

    @property
    def is_codable(self) -> bool:
        return all(table.num_vectors == 1 for table in self.tables.values())


class _Coder:
    """The tables of a run, read as full tables, and written as codes."""

    def __init__(self, run: TrainedRun, options: CodeOptions, say: Callable[[str], None]) -> None:
        self.run, self._options, self._say = run, options, say
        ranks = Ranks(0, 1, 1, torch.device("cpu"))
        blueprint = Blueprint.for_ranks(run.config, run.manifest.schema, ranks, {})
        self._source = RunAsStock(run.folder, run.config, blueprint, run.checkpoint_choice)
        tables = full_table_names(embedding_modules(blueprint.build_unsharded()))
        schema = batch_schema(run.config.task, run.manifest.schema)
        features = {own.name: own for own in schema.categorical}
        groups: dict[str, dict[str, CompositionalEmbeddingConfig]] = {}
        for full_name, (_, table) in tables.items():
            own = features[table.feature_names[0]].table_name
            groups.setdefault(run.config.embedding.table_of(own), {})[full_name] = table
        self.groups = [_Group(name, own) for name, own in groups.items()]
        self._dataset, self._manifest = whole_dataset(run, run.config)
        own_tables = [table for _, table in tables.values()]
        self._counts = id_occurrences(self._dataset, self._manifest, schema, own_tables, run.config.data.train)
        self._weights = IdWeights(self._source, [own.tables for own in self.groups], self._counts, run.manifest)
        self._centroids: dict[tuple[str, CodeShape], list[torch.Tensor]] = {}
        self._device = choose_device(options.device, 0)
        self._features = {name: self._read_features(name, file) for name, file in options.features.items()}

    @property
    def checkpoint_step(self) -> str:
        """The step of the compressed checkpoint, as ``--checkpoint`` takes it."""
        return str(int(Path(self._source.checkpoint).name.split("-")[1]))  # step-00000120, or ...-interrupted

    def sizes(self, budget_bytes: int | None = None) -> TableSizes[CodeShape | None]:
        """Returns the sizes that the tables may have, by codes of every candidate shape and as they are.

        Codebooks above ``budget_bytes`` are not tried.
        """
        return TableSizes([list(self._options_of(group, budget_bytes)) for group in self.groups])

    def _options_of(self, group: _Group, budget_bytes: int | None) -> Iterator[CodeOption]:
        yield CodeOption(None, group.num_bytes, 0.0)
        if not group.is_codable:
            return
        points = self._points(group)
        most = min(group.num_bytes, budget_bytes or group.num_bytes)
        for shape in candidate_shapes(self._options.scheme, points.dim, len(points.weights)):
            if shape.num_centroids > 1 and points.codebook_bytes(shape) > most:
                continue
            coded = self._quantised(group, points, shape)
            num_bytes = coded.num_bytes(points)
            if num_bytes < group.num_bytes:
                yield CodeOption(shape, num_bytes, coded.distortion)

    def _read_features(self, table: str, file: Path) -> ItemFeatures:
        """Returns the features of a table's ids, or raises a :class:`UserError` where the table cannot have codes."""
        one_of("--features", table, [group.name for group in self.groups])
        group = next(own for own in self.groups if own.name == table)
        if not group.is_codable:
            raise UserError(f"--features names table {table!r}, which gives several vectors an id; name another table.")
        if table not in self._manifest.vocabularies:
            raise UserError(f"--features names table {table!r}, whose ids have no vocabulary of raw values.")
        values = raw_values(Path(self._dataset), self._manifest, table)
        found = ItemFeatures.read(file, table, values, self._options.seed)
        num_missing = len(values) - values.null_count - len(found.ids)
        self._say(
            f"{table}: {file} has features of {len(found.ids):,} of {len(values) - values.null_count:,} values"
            + (f"; the other {num_missing:,} share a row." if num_missing else ".")
        )
        return found

    def options_of_bits(self, bits: int) -> list[CodeOption]:
        """Returns the option of each table with codes of so many bits; tables that would not shrink stay."""
        chosen = []
        for group in self.groups:
            option = CodeOption(None, group.num_bytes, 0.0)
            if group.name in self._features:
                shape = self._shape_of_bits(bits, next(iter(group.tables.values())).embedding_dim)
                option = CodeOption(shape, 0, 0.0)  # the bytes are known of the written table
            elif group.is_codable and not self._features:
                points = self._points(group)
                coded = self._quantised(group, points, self._shape_of_bits(bits, points.dim))
                if coded.num_bytes(points) < group.num_bytes:
                    option = CodeOption(coded.shape, coded.num_bytes(points), coded.distortion)
            chosen.append(option)
        return chosen

    def _shape_of_bits(self, bits: int, dim: int) -> CodeShape:
        """Returns the shape of codes of so many bits, or raises a :class:`UserError` that names the nearest bits."""
        scheme = self._options.scheme
        if scheme == "auto" and self._features and bits > PART_BITS:
            scheme = "residual"  # a part of the features is no part of the vectors
        shape = shape_of_bits(scheme, bits, dim)
        if shape is None:
            nearest = " or ".join(map(str, nearest_bits(scheme, bits, dim)))
            raise UserError(
                f"--bits-per-id is {bits}, which --scheme {scheme} does not divide evenly into the fewest parts of up "
                f"to 8 bits for vectors of {dim} numbers; give {nearest}, or another scheme."
            )
        return shape

    def _quantised(self, group: _Group, points: CodePoints, shape: CodeShape) -> CodedPoints:
        """Returns the points in codes, with codebooks that are fitted once for each group and shape."""
        known = self._centroids.get((group.name, shape))
        if known is not None:
            return CodedPoints.by(points, shape, known, self._options.balance)
        coded = quantise(points, shape, self._options.seed, self._options.balance)
        self._centroids[group.name, shape] = [own.cpu() for own in coded.centroids]
        return coded

    def _points(self, group: _Group) -> CodePoints:
        """Returns the points of the full vectors of a setting's tables."""
        table = next(iter(group.tables.values()))
        counts, weights = self._counts.get(table.name), self._weights.of(group.tables)
        is_rare = torch.zeros(len(weights), dtype=torch.bool) if counts is None else counts < self._options.least_count
        vectors = [self._source[name] for name in group.tables]
        data_type = self._options.data_type
        bytes_per_number = table.bytes_per_number if data_type is None else DATA_TYPES[data_type]
        return CodePoints.of(vectors, weights, is_rare, self._device, bytes_per_number)

    def write(self, chosen: Sequence[CodeOption], folder: Path, name: str) -> CodedRun:
        """Writes the run with an option for each table into an empty folder; ``name`` is the run's."""
        config, shapes, kept = self.run.config, dict[str, CodeShape](), dict[str, str]()
        tables = dict(config.embedding.tables)
        for group, option in zip(self.groups, chosen, strict=True):
            if option.choice is None:
                kept |= {table.name: self._why_kept(group) for table in group.tables.values()}
                continue
            file = folder / CODES / f"{group.name}.parquet"
            columns = self._write_codes(group, option.choice, file)
            tables[group.name] = self._coded_settings(group.name, file, columns, option.choice)
            shapes |= {table.name: option.choice for table in group.tables.values()}
        if not shapes:
            raise self._no_codes(chosen)
        is_own = kept_dataset(self.run.folder) == Path(self.run.dataset)
        data = config.data if is_own else dataclasses.replace(config.data, path=self.run.dataset)
        config = dataclasses.replace(config, data=data, embedding=dataclasses.replace(config.embedding, tables=tables))
        facts = {"name": name, CODES: self._provenance(shapes, kept)}
        converted = write_converted(self._source, config, NewRun(folder, self._dataset, self._manifest, kept, facts))
        for error in converted.errors:
            if error.table in shapes and error.compositional_bytes > error.full_bytes:
                self._say(
                    f"{error.table}: its codes take {format_bytes(error.compositional_bytes)}, more than the full "
                    f"table's {format_bytes(error.full_bytes)}; give fewer --bits-per-id for a smaller table."
                )
        return CodedRun(converted.errors, shapes, kept, converted.without_states)

    def _provenance(self, shapes: Mapping[str, CodeShape], kept: Mapping[str, str]) -> dict[str, Any]:
        """Returns the origin of the codes for ``run.json``: the run, its checkpoint, the options and the result."""
        return {
            "source": str(self.run.folder.absolute()),
            "checkpoint": Path(self._source.checkpoint).name,
            "counts": {"dataset": self._dataset, "id_fingerprint": id_fingerprint(self._dataset, self._manifest)},
            "device": self._device.type,
            "threads": torch.get_num_threads(),
            **self._options.record(),
            "tables": {name: str(shape) for name, shape in shapes.items()},
            "kept": dict(kept),
        }

    def _why_kept(self, group: _Group) -> str:
        if not group.is_codable:
            return "several vectors an id"
        if self._features:
            return "no --features"
        return "no better codes" if self._options.bits_per_id is None else "codes are no smaller"

    def _no_codes(self, chosen: Sequence[CodeOption]) -> UserError:
        """Returns the error of options without any codes."""
        num_bytes = total_bytes(chosen)
        tables = f"the tables of {self.run.folder} take {num_bytes:,} ({format_bytes(num_bytes)}) as they are"
        if self._options.bits_per_id is not None:
            return UserError(
                f"--bits-per-id is {self._options.bits_per_id}, whose codes make no table smaller: {tables}; give "
                "fewer bits."
            )
        budget = self._options.budget_bytes
        assert budget is not None
        return UserError(f"--budget is {budget:,} bytes, for which no codes are needed: {tables}; give less.")

    def _write_codes(self, group: _Group, shape: CodeShape, file: Path) -> list[str]:
        """Writes the code of each id in each part as a column of a Parquet file, and returns the columns' names."""
        if group.name in self._features:
            weights, options = self._weights.of(group.tables), self._options
            codes = self._features[group.name].codes(shape, weights, options.seed, options.balance, self._device)
        else:
            points = self._points(group)
            codes = [own[points.point_of_id] for own in self._quantised(group, points, shape).codes]
        columns = {f"p{part}": own.numpy().astype(np.min_scalar_type(int(own.max()))) for part, own in enumerate(codes)}
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), file, compression="zstd")
        return list(columns)

    def _coded_settings(self, name: str, file: Path, columns: list[str], shape: CodeShape) -> TableConfig:
        """Returns a table's settings with codes in the place of its scheme and composition."""
        settings = self.run.config.embedding.for_table(name)
        unset = dataclasses.asdict(PARTITIONS[settings.partition].settings())
        codes = {"partition": "explicit", "assignments": str(file), "columns": columns, "allow_collisions": True}
        composed = {"composition": shape.composition, "dims": None, "force": True}
        data_type = self._options.data_type or settings.data_type
        return dataclasses.replace(settings, **{**unset, **codes, **composed, "data_type": data_type})
