"""``distembed compress``: a trained run with its tables as codes, without training, as a run of no steps.

::

    RUN ----> full vectors, table by table ----> codes ----> OUT/codes/TABLE.parquet     a column of codes for each part
                                                    `------> OUT, by `convert`: codebooks fitted to the full vectors

The codes are assignments of the partition ``explicit``, so that all commands that take a run take OUT. Codebooks are
fitted once more to the codes of all parts together, which for ``residual`` lowers the distortion.

Memory holds one full table, its points in float64 and the distances of some points to the centroids.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.base.ranks import Ranks, choose_device, process_group
from distembed.base.units import format_bytes
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.staging import require_outside, staged_folder
from distembed.embedding.collections import embedding_modules
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.settings import TableConfig
from distembed.partitions import PARTITIONS
from distembed.serving.convert.code_sizes import Option, TableSizes, total_bytes
from distembed.serving.convert.models import full_table_names
from distembed.serving.convert.run_source import RunAsStock, id_occurrences
from distembed.serving.convert.run_start import write_converted
from distembed.serving.convert.table_codes import (
    SCHEMES,
    CodePoints,
    CodeShape,
    Scheme,
    candidate_shapes,
    quantise,
    shape_of_bits,
)
from distembed.serving.convert.tables import FitError, id_weights
from distembed.tasks import batch_schema
from distembed.training.build import Blueprint
from distembed.training.config import Config
from distembed.training.inference import evaluate_split, load_training_state
from distembed.training.resume import load_run_config
from distembed.training.run_folder.folder import RunFolder
from distembed.training.run_folder.record import read_json_object
from distembed.training.start import require_splits
from distembed.training.trained_run import TrainedRun

CODES = "codes"
"""The folder of the codes in a run, and the key of ``run.json`` that says how they were made."""
_KIND, _MARKER = "run of codes", "run.json"


@dataclass(frozen=True)
class CodeOptions:
    """How small a run becomes, and by which codes; one of the first three fields is given.

    Attributes:
        budget_bytes: The most bytes of all tables together, with their codes.
        bits_per_id: The bits of the codes of an id.
        max_loss: The most that the task's headline metric loses on the validation split.
        scheme: The scheme of all tables; ``auto`` chooses for each table.
        min_count: Ids that occur less often in training share their codes.
        seed: The seed of the first centroids.
        overwrite: Whether to replace a run of codes.
    """

    budget_bytes: int | None = None
    bits_per_id: int | None = None
    max_loss: float | None = None
    scheme: Scheme | Literal["auto"] = "auto"
    min_count: int = 6
    seed: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        given = [value for value in (self.budget_bytes, self.bits_per_id, self.max_loss) if value is not None]
        if len(given) != 1:
            raise UserError(
                f"{len(given)} of --budget, --bits-per-id and --max-loss are given; give one of them, such as "
                "--budget 1MB."
            )
        one_of("--scheme", self.scheme, ("auto", *SCHEMES))
        for option, value in (("--min-count", self.min_count), ("--seed", self.seed)):
            if value < 0:
                raise UserError(f"{option} is {value}; give 0 or more.")
        if self.max_loss is not None and not 0 <= self.max_loss < float("inf"):
            raise UserError(f"--max-loss is {self.max_loss}; give a loss of the metric of 0 or more, such as 0.001.")
        if self.bits_per_id is not None and not 1 <= self.bits_per_id <= 256:
            raise UserError(f"--bits-per-id is {self.bits_per_id}; give 1 to 256, such as 6 for 64 vectors a table.")


@dataclass(frozen=True)
class CodedRun:
    """A run of codes that was written.

    Attributes:
        errors: The distance of each table from the full one, and its bytes.
        shapes: The shape of each coded table's codes, by name; other tables are as they were.
        metric: Name of the validation metric, the run's value and the coded run's; None without ``max_loss``.
    """

    errors: Sequence[FitError]
    shapes: dict[str, CodeShape]
    metric: tuple[str, float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the run in plain values; a table's ``codes`` are its shape, or None where it is as it was."""
        shapes = {name: str(shape) for name, shape in self.shapes.items()}
        tables = [error.to_json() | {"codes": shapes.get(error.table)} for error in self.errors]
        metric = None if self.metric is None else dict(zip(("name", "before", "after"), self.metric, strict=True))
        return {"bytes": self.table_bytes, "compression": self.compression, "metric": metric, "tables": tables}

    @property
    def table_bytes(self) -> int:
        return sum(error.compositional_bytes for error in self.errors)

    @property
    def compression(self) -> float:
        """The bytes of full tables over the bytes of these."""
        return sum(error.full_bytes for error in self.errors) / self.table_bytes


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
    coder = _Coder(run, options)
    with staged_folder(output, overwrite=options.overwrite, kind=_KIND, marker=_MARKER) as folder:
        write = partial(coder.write, name=output.name)
        if options.max_loss is not None:
            return _largest_within_loss(coder, write, folder, options.max_loss, say)
        if options.bits_per_id is not None:
            return write(coder.options_of_bits(options.bits_per_id), folder)
        assert options.budget_bytes is not None
        return write(coder.sizes(options.budget_bytes).within(options.budget_bytes), folder)


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

    def __init__(self, run: TrainedRun, options: CodeOptions) -> None:
        self.run, self._options = run, options
        ranks = Ranks(0, 1, 1, torch.device("cpu"))
        blueprint = Blueprint.for_ranks(run.config, run.manifest.schema, ranks, {})
        self._source = RunAsStock(run.folder, run.config, blueprint, run.checkpoint_choice)
        tables = full_table_names(embedding_modules(blueprint.build_unsharded()))
        features = {own.name: own for own in batch_schema(run.config.task, run.manifest.schema).categorical}
        groups: dict[str, dict[str, CompositionalEmbeddingConfig]] = {}
        for full_name, (_, table) in tables.items():
            groups.setdefault(features[table.feature_names[0]].table_name, {})[full_name] = table
        self.groups = [_Group(name, own) for name, own in groups.items()]
        self._counts = id_occurrences(run.dataset, run.manifest, [table for _, table in tables.values()])
        self._device = choose_device("auto", 0)

    def sizes(self, budget_bytes: int | None = None) -> TableSizes:
        """Returns the sizes that the tables may have, by codes of every candidate shape and as they are.

        Codebooks above ``budget_bytes`` are not tried.
        """
        return TableSizes([list(self._options_of(group, budget_bytes)) for group in self.groups])

    def _options_of(self, group: _Group, budget_bytes: int | None) -> Iterator[Option]:
        yield Option(None, group.num_bytes, 0.0)
        if not group.is_codable:
            return
        points = self._points(group)
        most = min(group.num_bytes, budget_bytes or group.num_bytes)
        for shape in candidate_shapes(self._options.scheme, points.dim, len(points.weights)):
            if shape.num_centroids > 1 and points.codebook_bytes(shape) > most:
                continue
            coded = quantise(points, shape, self._options.seed)
            num_bytes = coded.num_bytes(points)
            if num_bytes < group.num_bytes:
                yield Option(shape, num_bytes, coded.distortion)

    def options_of_bits(self, bits: int) -> list[Option]:
        """Returns the option of each table with codes of so many bits; tables that would not shrink stay."""
        chosen = []
        for group in self.groups:
            option = Option(None, group.num_bytes, 0.0)
            if group.is_codable:
                points = self._points(group)
                shape = shape_of_bits(self._options.scheme, bits, points.dim)
                if shape is None:
                    raise UserError(
                        f"--bits-per-id is {bits}, which --scheme {self._options.scheme} does not divide into parts of "
                        f"up to 8 bits for vectors of {points.dim} numbers; give a multiple of 8, up to "
                        f"{8 * points.dim if self._options.scheme != 'one' else 8}, or another scheme."
                    )
                coded = quantise(points, shape, self._options.seed)
                if coded.num_bytes(points) < group.num_bytes:
                    option = Option(shape, coded.num_bytes(points), coded.distortion)
            chosen.append(option)
        return chosen

    def _points(self, group: _Group) -> CodePoints:
        """Returns the points of the full vectors of a setting's tables."""
        table = next(iter(group.tables.values()))
        counts = self._counts.get(table.name)
        weights = id_weights(table, counts).expand(table.num_embeddings)
        is_rare = torch.zeros(len(weights), dtype=torch.bool) if counts is None else counts < self._options.min_count
        vectors = [self._source[name] for name in group.tables]
        return CodePoints.of(vectors, weights, is_rare, self._device, table.bytes_per_number)

    def write(self, chosen: Sequence[Option], folder: Path, name: str) -> CodedRun:
        """Writes the run with an option for each table into an empty folder; ``name`` is the run's."""
        config, shapes, kept = self.run.config, dict[str, CodeShape](), list[str]()
        tables = dict(config.embedding.tables)
        for group, option in zip(self.groups, chosen, strict=True):
            if option.shape is None:
                kept += [table.name for table in group.tables.values()]
                continue
            file = folder / CODES / f"{group.name}.parquet"
            columns = self._write_codes(group, option.shape, file)
            tables[group.name] = _coded_settings(config, group.name, file, columns, option.shape)
            shapes |= {table.name: option.shape for table in group.tables.values()}
        if not shapes:
            raise UserError(
                f"codes make no table of {self.run.folder} smaller: its tables take "
                f"{format_bytes(total_bytes(chosen))} as they are; give a smaller --budget, or fewer --bits-per-id."
            )
        config = dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, tables=tables))
        options = {key: value for key, value in dataclasses.asdict(self._options).items() if value is not None}
        facts: dict[str, Any] = {"name": name, CODES: {"source": str(self.run.folder.absolute()), **options}}
        dataset, manifest = _dataset_of(self.run)
        errors = write_converted(self._source, config, dataset, manifest, folder, {}, kept, facts)
        return CodedRun(errors, shapes)

    def _write_codes(self, group: _Group, shape: CodeShape, file: Path) -> list[str]:
        """Writes the code of each id in each part as a column of a Parquet file, and returns the columns' names."""
        points = self._points(group)
        coded = quantise(points, shape, self._options.seed)
        columns = {
            f"p{part}": own[points.point_of_id].numpy().astype(np.min_scalar_type(num_rows - 1))
            for part, (own, num_rows) in enumerate(zip(coded.codes, coded.num_rows, strict=True))
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), file, compression="zstd")
        return list(columns)


def _dataset_of(run: TrainedRun) -> tuple[str, Manifest]:
    """Returns the run's whole dataset where it is here, which is easier to use than the part that the run keeps."""
    path = run.config.data.require_path()
    return (path, Manifest.load(path)) if Path(path).exists() else (run.dataset, run.manifest)


def _coded_settings(config: Config, name: str, file: Path, columns: list[str], shape: CodeShape) -> TableConfig:
    """Returns a table's settings with codes in the place of its scheme and composition."""
    settings = config.embedding.for_table(name)
    unset = dataclasses.asdict(PARTITIONS[settings.partition].settings())
    codes = {"partition": "explicit", "assignments": str(file), "columns": columns, "allow_collisions": True}
    composed = {"composition": shape.composition, "dims": None, "force": True}
    return dataclasses.replace(settings, **{**unset, **codes, **composed})


def _largest_within_loss(
    coder: _Coder, write: Callable[[Sequence[Option], Path], CodedRun], folder: Path, max_loss: float, say: Any
) -> CodedRun:
    """Writes the run of the fewest bytes whose metric loses at most ``max_loss``, found by bisection.

    The loss is taken to fall as bytes are added, which it does but for noise.
    """
    run, trial = coder.run, folder.with_name("trial")
    split = run.config.data.validation or "validation"
    dataset, _ = _dataset_of(run)
    require_splits(dataset, {"data.validation": split})
    sizes = coder.sizes()
    best: CodedRun | None = None
    with process_group("auto") as ranks:
        name, before, sign = _headline(run.folder, run.config, dataset, split, ranks, run.checkpoint_choice)
        say(f"{split}: {name} {before:.6f}")
        low, high = 0, sizes.num_steps + 1
        while low < high:
            middle = (low + high) // 2
            chosen = sizes.after(middle)
            if all(option.shape is None for option in chosen):
                low = middle + 1
                continue
            written = write(chosen, trial)
            _, after, _ = _headline(trial, load_run_config(trial), dataset, split, ranks)
            is_within = sign * (before - after) <= max_loss
            say(f"{format_bytes(written.table_bytes)}: {name} {after:.6f}{'' if is_within else ', too low a quality'}")
            if is_within:
                high, best = middle, dataclasses.replace(written, metric=(name, before, after))
                shutil.rmtree(folder)
                trial.rename(folder)
            else:
                low = middle + 1
                shutil.rmtree(trial)
    if best is None:
        raise UserError(
            f"--max-loss is {max_loss}, and all codes that were tried lose more of {name}; allow a larger loss, or "
            "let fewer ids share their codes by a smaller --min-count."
        )
    return best


def _headline(
    folder: Path, config: Config, dataset: str, split: str, ranks: Ranks, choice: str | None = None
) -> tuple[str, float, int]:
    """Returns the name and value of a run's headline metric on a split, and 1 if higher values are better, else -1."""
    state, _ = load_training_state(folder, dataset, config, ranks, choice)
    metric = state.task.headline
    if metric.better is None:
        raise UserError(
            f"--max-loss compares {metric.name!r}, of which neither higher nor lower is better; use --budget."
        )
    value = float(evaluate_split(state, dataset, split, ranks)[metric.name])
    return metric.name, value, 1 if metric.better == "higher" else -1
