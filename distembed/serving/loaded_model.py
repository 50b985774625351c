"""A trained run as a Python object: predictions, vectors, evaluations, and a description."""

from __future__ import annotations

import dataclasses
import html
import os
import threading
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.fx._symbolic_trace import is_fx_tracing

from distembed.base.errors import RunError, UserError
from distembed.base.names import one_of
from distembed.base.process import silenced_loggers
from distembed.base.ranks import choose_device
from distembed.base.units import format_bytes
from distembed.data.dataset.schema import ITEM, Schema
from distembed.data.prepare.table.inputs import find_inputs
from distembed.data.prepare.table.source import TableSource
from distembed.data.reader import Batch, BatchOrder, BatchReader
from distembed.data.remote import is_url
from distembed.embedding.collections import embedding_modules, table_configs
from distembed.embedding.composed_vectors import composed_chunks
from distembed.embedding.tables import CompositionalTables
from distembed.serving.item_search import ItemSearch, ItemTable
from distembed.serving.raw_predictions import RawInputs
from distembed.serving.requests import find_run_for_rows, row_decoder, seen_items_note
from distembed.serving.rows.decoder import RowDecoder, batches_of, decode_rows
from distembed.serving.rows.given import given_rows
from distembed.serving.rows.malformed import bad_rows, bad_rows_text
from distembed.serving.rows.table_rows import TableRowDecoder, features_read
from distembed.serving.whole_model import WholeModel, load_whole_model
from distembed.tasks import MultiConfig, MultiTask, RetrievalTask
from distembed.training.config import Config
from distembed.training.describe import describe
from distembed.training.inference import EVALUATION_BATCH_SIZE
from distembed.training.metric_rows import MetricRows
from distembed.training.prediction_columns import PredictionColumns, recommended_values
from distembed.training.trained_run import TrainedRun, find_trained_run

Predictions: TypeAlias = npt.NDArray[np.float32] | pa.Table
"""A number a row, or columns: a number for each label, or recommended items."""

_IDS_AT_ONCE = 1 << 16
_MOST_TABLES = 40
"""Tables that a notebook shows."""


@dataclasses.dataclass(frozen=True)
class _Source:
    """The arguments of :func:`load`; a pickled model is loaded again from them, by the path of its checkpoint."""

    run: Path
    data: str | None
    device: str
    choice: str | None = None
    checkpoint: str | None = None

    def load(self) -> LoadedModel:
        run = find_run_for_rows(self.run, self.data, self.choice)
        with silenced_loggers():
            is_fx_tracing()  # which logs a notice once a process, and else would in the first prediction
            model = load_whole_model(run, choose_device(self.device, 0), self.checkpoint)
        return LoadedModel(self, run, model)


def load(
    run: str | os.PathLike[str],
    *,
    data: str | os.PathLike[str] | None = None,
    device: str = "auto",
    checkpoint: str | int | None = None,
) -> LoadedModel:
    """Loads a trained run: its best or newest checkpoint, on one device, with its vocabularies.

    No process group is set up, and none that there is takes part::

        import distembed

        model = distembed.load("runs/qr")
        model.predict([{"site": "a.com", "price": 3.5}])  # click probabilities
        model.embed("site", ids=[2, 3])  # vectors [2, 16]
        model.evaluate("test")["auc"]

    Args:
        run: Folder of a run that ``distembed train`` made.
        data: Where the run's dataset is now, or another one whose ids mean the same, for :meth:`LoadedModel.evaluate`
            for the items that users have already, and for the items of two towers; nothing else needs the dataset.
        device: ``cpu``, ``cuda``, or ``auto`` for CUDA where it is available.
        checkpoint: ``best``, ``newest``, or the number of steps after which it was written; unless given, the best
            where the run keeps it, else the newest.

    Raises:
        UserError: The run, the checkpoint or the device does not exist.
        DamagedCheckpoint: The checkpoint is damaged.
    """
    choice = None if checkpoint is None else str(checkpoint)
    return _Source(Path(run).absolute(), None if data is None else os.fspath(data), device, choice).load()


class LoadedModel:
    """A run's model with the vocabularies of its ids, in this process; :func:`distembed.load` makes it.

    Several threads may predict at once. After a fork one thread predicts on the CPU, and a GPU is refused. Pickled, it
    is the run's folder, from which it is loaded again.

    Attributes:
        config: The run's config.
        schema: The columns that the model was trained on.
        checkpoint: Path or URL of the checkpoint with the weights.
        step: Number of training steps of the checkpoint.
    """

    def __init__(self, source: _Source, run: TrainedRun, model: WholeModel) -> None:
        self._source, self._run, self._model = source, run, model
        self.config: Config = run.config
        self.schema: Schema = run.manifest.schema
        self.checkpoint, self.step = model.checkpoint, model.step
        self._process = os.getpid()
        self._reading = threading.Lock()
        self._decoder: RowDecoder | None = None
        self._item_search: ItemSearch | None = None
        self._note = seen_items_note(run)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._model.blueprint.device

    def predict(self, rows: Any, *, malformed: Literal["refuse", "null"] = "refuse") -> Predictions:
        """Returns the task's prediction of each row: click probabilities or ratings [rows], or items for users.

        Of several labels it is an Arrow table with a column for each label, by its name: probabilities of labels of
        0 and 1, and predicted numbers.

        Recommended items are an Arrow table with a row for each row: ``user`` (where rows are users), ``item_1`` to
        ``item_k`` from the best on, as raw values, and ``score_1`` to ``score_k``. Items that users have in the
        splits before the test, or that are in a sequence, are left out where ``task.exclude_seen`` says so. Where the
        run's dataset is gone, the items of users are not known and not left out, and a warning says so once.

        Where a feature has one value a row, predictions equal the ones of ``distembed predict`` to the bit, for equal
        batches of up to 8,192 rows.

        Args:
            rows: Raw rows: a list of dictionaries, a dictionary of columns, a pandas DataFrame, or an Arrow table, with
                the columns of the table that the run's dataset was prepared from; labels and other columns are not
                looked at. Of rankings, ``user`` alone; of next items, ``item`` with lists. Or a batch of a
                :class:`~distembed.data.reader.BatchReader`, without targets.
            malformed: ``refuse`` raises an error for rows with a value that is not of its column's kind, or with a user
                or only items that the dataset lacks; ``null`` predicts NaN, or null, for them.

        Raises:
            UserError: The rows are none of these, lack a column, or are malformed.
        """
        self._require_usable()
        one_of("malformed", malformed, ("refuse", "null"))
        if self._note is not None:
            warnings.warn(self._note, stacklevel=2)
            self._note = None
        batches, is_good = self._decoded(rows, malformed)
        return self._answer(self._score(batches), is_good)

    def _decoded(
        self, rows: Any, malformed: Literal["refuse", "null"] = "refuse"
    ) -> tuple[Iterable[Batch], npt.NDArray[np.bool_] | None]:
        """Returns batches of the well-formed rows, and which rows are well-formed, None for all of a batch."""
        if isinstance(rows, Batch):
            return [rows], None
        raw = given_rows(rows, self._rows.columns)
        if not raw.num_lines:  # of no dictionaries the columns are not known
            return [], None
        decoded = decode_rows(self._rows.decode, raw)
        if decoded.rejected and malformed == "refuse":
            bad = bad_rows(raw, decoded.rejected, self._rows.columns)
            raise UserError(
                f"{len(bad)} of {raw.num_lines} rows are malformed: {bad_rows_text(bad)}. Mend them, or give "
                "malformed='null' for predictions of NaN."
            )
        return batches_of(self.schema, decoded.block, EVALUATION_BATCH_SIZE), decoded.is_good

    def _score(self, batches: Iterable[Batch]) -> list[Mapping[str, npt.NDArray[Any]]]:
        """Returns the task's predictions of each batch, by column; a batch has the dataset's columns, not prepared."""
        task = self._model.task
        if isinstance(task, RetrievalTask):
            self._search.scored()  # the task ranks the items' vectors, which the model computes once
        return [task.predictions(self._model.outputs(task.prediction_batch(batch))) for batch in batches]

    def _answer(
        self, predicted_chunks: Sequence[Mapping[str, npt.NDArray[Any]]], is_good: npt.NDArray[np.bool_] | None
    ) -> Predictions:
        """Joins predictions of the good rows into an array or a table with NaN or null for malformed rows.

        ``is_good`` says which rows are well-formed; None if all are.
        """
        task = self._model.task
        # a label of several may be named prediction too
        if task.scores == ("prediction",) and not task.id_columns and not isinstance(task, MultiTask):
            numbers = np.concatenate([np.empty(0, np.float32), *(chunk["prediction"] for chunk in predicted_chunks)])
            if is_good is None or is_good.all():
                return numbers
            predictions = np.full(len(is_good), np.nan, np.float32)
            predictions[is_good] = numbers
            return predictions
        columns = PredictionColumns(task, self._values if task.id_columns else {}, left_out=task.unknown_columns)
        table = pa.concat_tables([columns.schema.empty_table(), *(columns.table(chunk) for chunk in predicted_chunks)])
        if is_good is None:
            return table
        prediction_rows = np.cumsum(is_good) - 1  # the prediction's place of each good row
        return table.take(pa.array(prediction_rows, mask=~is_good))

    def recommend(self, rows: Any, k: int = 10) -> pa.Table:
        """Returns the best items of each row's user, by a model of two towers, as lists ``items`` and ``scores``.

        All items of the run's dataset are searched, without the items that the user has in the splits before the test
        where ``task.exclude_seen`` says so. Items are raw values, the best first; scores are inner products.

        Args:
            rows: Raw rows with the features of users, as :meth:`predict` takes them.
            k: Number of items of each row; a row has fewer where the catalogue has.

        Raises:
            UserError: The model is another one, its dataset is gone, or the rows are malformed.
        """
        self._require_usable()
        best, scores = self._search.recommend(self._decoded(rows)[0], k)
        return self._search.table(best, scores)

    def user_vectors(self, rows: Any) -> npt.NDArray[np.float32]:
        """Returns the vector of each row's user [rows, output_dim], by a model of two towers.

        Its inner product with an item's vector is the score: it is divided by the temperature. Arguments and errors
        are as of :meth:`recommend`.
        """
        self._require_usable()
        return self._search.user_vectors(self._decoded(rows)[0])

    def item_vectors(self) -> ItemTable:
        """Returns ids, raw values and vectors of all items of the run's dataset, by a model of two towers.

        Raises:
            UserError: The model is another one, or its dataset is gone.
        """
        self._require_usable()
        return self._search.items()

    @property
    def _search(self) -> ItemSearch:
        """The vectors of users and items, and the search for items."""
        with self._reading:
            if self._item_search is None:
                self._item_search = ItemSearch(self._model, self._values.get(ITEM))
            return self._item_search

    @cached_property
    def _values(self) -> Mapping[str, pa.Array]:
        """The raw values of users and items, by their ids."""
        return recommended_values(self._run.dataset, self._model.task)

    @property
    def _rows(self) -> RowDecoder:
        """Decodes raw rows; the vocabularies are read when they are first needed."""
        with self._reading:
            if self._decoder is None:
                self._decoder = row_decoder(self._run, self._model.module.model)
            return self._decoder

    def embed(
        self, table: str, *, ids: Iterable[int] | None = None, values: Sequence[Any] | None = None
    ) -> npt.NDArray[np.float32]:
        """Returns the composed vectors of ids, or of raw values, of a table [values, width].

        The width is the table's ``embedding_dim``, times the number of partitions where each gives a vector.

        Args:
            table: Name of a table, for example ``C3``, or of a feature of a unified table.
            ids: Ids as the dataset has them: the table's hash and policy apply as in training.
            values: Raw values as the table of rows has them, which the run's vocabulary or hash turns into ids; None is
                a missing value. Give these or ``ids``.

        Raises:
            UserError: The table does not exist, an id lies outside of it, or its features' raw values are not known.
        """
        self._require_usable()
        module, config, feature = self._table(table)
        if (ids is None) == (values is None):
            raise UserError("give either ids= or values=: the ids of the dataset, or raw values.")
        if ids is not None and not isinstance(ids, Iterable):
            raise UserError(f"ids is {ids!r}; give a list of ids, of a single one too.")
        if values is not None:
            ids = self._rows.ids_of(feature or config.feature_names[0], values)
        tensor_or_list = torch.from_numpy(ids) if isinstance(ids, np.ndarray) else ids
        composed = composed_chunks(config, module.weights(config.name), tensor_or_list, _IDS_AT_ONCE, feature)
        chunks = [vectors for _, vectors in composed]
        width = config.num_vectors * config.embedding_dim
        table_vectors: npt.NDArray[np.float32] = torch.cat([torch.empty(0, width), *chunks]).numpy()
        return table_vectors

    def _table(self, name: str) -> tuple[CompositionalTables[Any], Any, str | None]:
        """Returns the collection and config of a table, and the feature of a unified one; refuses an unknown name."""
        collections = embedding_modules(self._model.module.model).values()
        tables = {
            own: (module, table, feature)
            for module in collections
            for table in table_configs(module)
            for own, feature in table.vocabularies.items()
        }
        module, table, feature = tables[one_of("table", name, tables)]
        assert isinstance(module, CompositionalTables), "all models of distembed have such collections"
        return module, table, feature

    def evaluate(self, on: Any = "test", *, max_rejected: float = 0.01) -> dict[str, Any]:
        """Returns the metrics of a split of the run's dataset, or of raw rows with labels.

        Args:
            on: Name of a split, as ``distembed evaluate`` takes it; path or URL of files of raw rows; or raw rows as
                :meth:`predict` takes them. Raw rows of recommendations have no metrics.
            max_rejected: Largest share of malformed raw rows, which are left out, that is no error.

        Raises:
            UserError: The dataset is not there, or has no split of this name; or raw rows cannot be read, lack the
                label or another column, or too many are malformed, for example by a label out of its range.
        """
        self._require_usable()
        is_place = isinstance(on, str | os.PathLike) and (is_url(on) or Path(on).exists())
        splits = self._run.manifest.splits
        if not is_place and (isinstance(on, os.PathLike) or (isinstance(on, str) and _looks_like_file(on, splits))):
            raise UserError(f"evaluate takes a split, a file or rows, and there is no file {os.fspath(on)!r}.")
        if isinstance(on, str) and (on in splits or not is_place):
            return {"split": on, **self._evaluate_split(on)}
        if self._model.task.id_columns:
            raise UserError("raw rows of a model that recommends items have no metrics; give the name of a split.")
        config, manifest = self._model.blueprint.config.task, self._run.manifest
        labels = config.labels_to_read(manifest.schema) if isinstance(config, MultiConfig) else None
        features = features_read(manifest.schema, self._model.module.model.lists_read(manifest.schema))
        decoder = TableRowDecoder(Path(self._run.dataset), manifest, ("label", "weight"), features, labels)
        if is_place:
            source = TableSource(find_inputs([os.fspath(on)]), decoder.schema)
            blocks = [lines.block for lines in RawInputs(source, decoder, max_rejected=max_rejected).pieces()]
        else:
            raw = given_rows(on, decoder.columns)
            decoded = decode_rows(decoder.decode, raw)
            if len(decoded.rejected) > max_rejected * raw.num_lines:
                bad = bad_rows(raw, decoded.rejected, decoder.columns)
                raise UserError(f"{len(bad)} rows are malformed: {bad_rows_text(bad)}.")
            blocks = [decoded.block]
        task = self._model.task
        batches = (batch for block in blocks for batch in batches_of(self.schema, block, EVALUATION_BATCH_SIZE))
        return _metrics(self._model, (task.prediction_batch(batch) for batch in batches))

    def _evaluate_split(self, split: str) -> dict[str, float]:
        dataset = find_trained_run(self._run.folder, self._source.data, split).dataset
        model = self._model.on_dataset(dataset)
        with closing(_split_batches(model, dataset, split)) as batches:
            return _metrics(model, batches)

    def describe(self) -> dict[str, Any]:
        """Returns the model's run, task, tables, layers and parameters in plain values."""
        config = self._model.blueprint.config
        return {
            "run": str(self._source.run),
            "checkpoint": self.checkpoint,
            "step": self.step,
            "device": str(self.device),
            "precision": "bf16" if self._model.blueprint.bf16 else "fp32",
            "task": config.task.name,
            "model": config.model.name,
            "predicts": list(self._model.task.prediction_columns),
            **describe(config).as_json(),
        }

    def __repr__(self) -> str:
        facts = self.describe()
        return (
            f"<distembed {facts['model']} for {facts['task']}: {self._source.run}, step {self.step:,}, "
            f"{len(facts['tables'])} tables, {facts['parameters']:,} parameters, on {self.device}>"
        )

    def _repr_html_(self) -> str:
        """Returns a heading, facts, and a table of the embedding tables, for a notebook."""
        description = self.describe()
        heading = f"{description['model']} for {description['task']}: {description['parameters']:,} parameters"
        facts = ", ".join(f"{name} {description[name]}" for name in ("run", "step", "device", "precision"))
        rows = [_html_row("th", ("table", "ids", "rows of id x", "composition", "dimension", "size"))]
        for table in description["tables"][:_MOST_TABLES]:
            name, num_ids = table["name"], f"{table['num_embeddings']:,}"
            cells = (name, num_ids, table["partitions"], table["composition"] or "", table["dim"])
            rows.append(_html_row("td", (*cells, format_bytes(table["bytes"]))))
        left_out = len(description["tables"]) - _MOST_TABLES
        more = f"<p>and {left_out} more tables</p>" if left_out > 0 else ""
        return f"<p><b>{html.escape(heading)}</b><br>{html.escape(facts)}</p><table>{''.join(rows)}</table>{more}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _Source.load, (dataclasses.replace(self._source, checkpoint=self.checkpoint),)

    def _require_usable(self) -> None:
        """Adapts to a fork: refuses a model on a GPU by a :class:`RunError`, and sets torch to one thread."""
        if os.getpid() == self._process:
            return
        if self.device.type != "cpu":
            raise RunError(
                f"the model was loaded on {self.device} by another process, of which this one is a fork, and a GPU "
                "cannot be used after one; load it in this process, or start processes by spawn."
            )
        torch.set_num_threads(1)  # the threads of the process that was forked are not here, and would be waited for
        self._process = os.getpid()


def _looks_like_file(text: str, splits: Mapping[str, object]) -> bool:
    """Returns whether a text that names no split has a folder or a suffix, and so is meant as a file."""
    return text not in splits and (os.sep in text or bool(Path(text).suffix))


def _html_row(cell: str, values: Sequence[Any]) -> str:
    return "<tr>" + "".join(f"<{cell}>{html.escape(str(value))}</{cell}>" for value in values) + "</tr>"


def _metrics(model: WholeModel, batches: Iterable[Batch]) -> dict[str, float]:
    """Returns the task's metrics of all rows of prepared batches."""
    rows = MetricRows(model.task)
    for batch in batches:
        rows.add(model.outputs(batch))
    return model.task.metrics(rows.gathered(model.ranks))


def _split_batches(model: WholeModel, dataset: str, split: str) -> Generator[Batch, None, None]:
    """Yields prepared batches of an evaluation: made by the task, if it makes any, else the split's rows in order."""
    task_batches = model.task.evaluation_batches(split, EVALUATION_BATCH_SIZE)
    if task_batches is not None:
        yield from task_batches
        return
    with closing(BatchReader(dataset, split, BatchOrder(EVALUATION_BATCH_SIZE, shuffle=False))) as reader:
        for batch in reader:
            yield model.task.prepare_batch(batch, None)
