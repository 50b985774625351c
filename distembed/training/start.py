"""The start of a run, found without a model: its folder, whether it is resumed, plans, dataset and graphs.

A process that trains alone finds it before it loads torch, so that a missing folder is an error at once. Splits, labels
and metrics that would fail hours later are checked here too.
"""

import dataclasses
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distembed.base.errors import RunError, UserError
from distembed.base.files import require_folder
from distembed.checkpoints.store import checkpoint_names, checkpoint_place
from distembed.data.dataset.manifest import CREATED_ELSEWHERE, Manifest, Split
from distembed.data.dataset.mirror import dataset_folder
from distembed.data.dataset.row_groups import list_row_groups, require_whole_splits
from distembed.data.dataset.schema import ITEM, Schema
from distembed.data.table.vocabulary import MISSING_ID, reserved_ids
from distembed.embedding.settings import EmbeddingConfig
from distembed.graph.prepare.value_ids import require_same_ids
from distembed.planning.saved_plan import PlanInputs, SavedPlan, read_saved_plan
from distembed.sse import SSE
from distembed.sse.config import build_sse, graph_fingerprints
from distembed.tasks import MultiConfig, TaskConfig, batch_schema
from distembed.tasks.config import LabelTaskConfig
from distembed.tasks.next_item_config import NextItemConfig
from distembed.tasks.seen_items import SEEN_ITEMS, decided_task
from distembed.training.config import Config
from distembed.training.initial_run import InitialRun, find_initial_run, grown_config, recorded, resumed_config
from distembed.training.resume import load_run_plan, require_same_config, require_same_graphs
from distembed.training.run_folder.folder import default_run_folder, holds_run, require_new_or_resume
from distembed.training.run_folder.lock import DEAD_MACHINE_SECONDS
from distembed.training.run_folder.record import read_json_object

T = TypeVar("T")


@dataclass(frozen=True)
class RunOptions:
    """The options of a run beside its config.

    Attributes:
        run_dir: The run's folder; None for a folder in ``runs`` that is named after ``name`` and the time.
        name: The first part of that folder's name.
        resume: Whether to resume the folder's run from its newest checkpoint.
        resume_or_start: Whether to resume where the folder holds a run and to start a run where it does not. It then
            waits for another process that owns the folder, until that counts as dead.
        plan: A file of ``distembed plan --output`` that says where tables are placed. With ``resume_or_start`` it is
            applied only where its inputs are this run's, and a resumed run's own plan comes before it.
    """

    run_dir: Path | None = None
    name: str = "run"
    resume: bool = False
    resume_or_start: bool = False
    plan: Path | None = None

    def __post_init__(self) -> None:
        if (self.resume or self.resume_or_start) and self.run_dir is None:
            raise UserError("--resume needs --run-dir, the folder of the run to go on with.")


@dataclass(frozen=True)
class PlanChoice:
    """Saved plans to apply in place of a new one.

    Attributes:
        required: A plan that is applied in any case, and refused where its inputs differ.
        preferred: A plan that is applied where its inputs are the same; else tables are planned anew.
    """

    required: SavedPlan | None = None
    preferred: SavedPlan | None = None

    def for_inputs(self, inputs: PlanInputs) -> SavedPlan | None:
        """Returns the plan to apply for these inputs; None where tables are to be planned anew."""
        if self.required is not None or self.preferred is None:
            return self.required
        return None if self.reasons_to_replan(inputs) else self.preferred

    def reasons_to_replan(self, inputs: PlanInputs) -> list[str]:
        """Returns a line for each difference for which the preferred plan is not applied."""
        if self.required is not None or self.preferred is None:
            return []
        return self.preferred.plan_inputs.differences(inputs)


@dataclass(frozen=True)
class RunStart:
    """The start of a run.

    Attributes:
        config: The whole config, in which tables that continue another run's are as they have grown.
        folder: The run's folder.
        manifest: The manifest of its dataset.
        sse: The rule by which ids are replaced in training, by feature.
        run_id: Unique id of the run and its checkpoints.
        resume: Whether the run continues from its newest checkpoint, if there is one.
        plans: Saved plans to apply in place of a new one.
        wait_seconds: Seconds to wait for another process that trains into the folder.
        initial: The run whose weights training begins with; None for initial weights, and for a run that is resumed
            from a checkpoint of its own.
        init_from: The record of that run in ``run.json``, also of a resumed run; None for initial weights.
        seen_items: The record of ``task.exclude_seen`` in ``run.json``; None where the task excludes no items, and for
            a run that an earlier version started.
    """

    config: Config
    folder: Path
    manifest: Manifest
    sse: dict[str, SSE]
    run_id: str
    resume: bool = False
    plans: PlanChoice = PlanChoice()
    wait_seconds: float = 0.0
    initial: InitialRun | None = None
    init_from: Mapping[str, Any] | None = None
    seen_items: Mapping[str, Any] | None = None


class OnFirst(Protocol):
    """Calls a function on rank 0 alone, as :meth:`distembed.base.ranks.Collectives.on_first` does."""

    def __call__(self, function: Callable[[], T]) -> T:
        """Returns, or raises, the result or error of rank 0 on every rank; all ranks call it."""


def find_start(config: Config, options: RunOptions, on_first: OnFirst, say: Callable[[str], None]) -> RunStart:
    """Finds the start of a run, and refuses one that cannot be started; all ranks call it.

    A resumed run takes tables, decisions and id from its folder. A new run grows tables from ``train.init_from``,
    decides ``task.exclude_seen: auto`` and names the labels of a task of several. Nothing is written into the folder.

    Args:
        config: The whole config.
        options: The folder, whether to resume, and a plan.
        on_first: Calls a function on rank 0 for all ranks.
        say: Prints a line; called on rank 0 only.

    Raises:
        UserError: The folder, the dataset, a graph or a plan cannot be used, or the config of a resumed run differs.
    """
    # every rank takes the folder's name from rank 0, since the name has the time, and clocks differ
    folder = on_first(lambda: (options.run_dir or default_run_folder(options.name)).absolute())
    resume = options.resume or (options.resume_or_start and on_first(lambda: holds_run(folder)))
    config = on_first(lambda: _require_usable(folder, config, resume))
    plans = _choose_plans(config, options, folder, resume, on_first, say)
    dataset = config.data.require_path()
    on_first(lambda: require_trainable(config, dataset, resume))
    manifest = Manifest.load(dataset)
    initial = on_first(lambda: _find_initial_run(config, folder, manifest, resume))
    init_from = on_first(lambda: recorded(folder)) if resume else None
    if initial is not None and not resume:
        init_from = initial.record(config.embedding)
        config = grown_config(config, initial, manifest.schema)
    if resume:
        seen_items = on_first(lambda: recorded(folder, SEEN_ITEMS))
    else:
        task, seen_items = on_first(lambda: decided_task(config.task, dataset, manifest, config.data.train))
        if isinstance(task, MultiConfig):
            task = task.with_labels(manifest.schema)
        config = dataclasses.replace(config, task=task)
    sse = _replaced_ids(config, dataset, manifest)
    if resume:
        on_first(lambda: require_same_graphs(folder, graph_fingerprints(sse)))
    run_id = on_first(lambda: _run_id(folder, resume))
    wait_seconds = DEAD_MACHINE_SECONDS if options.resume_or_start else 0.0
    return RunStart(config, folder, manifest, sse, run_id, resume, plans, wait_seconds, initial, init_from, seen_items)


def find_start_alone(config: Config, options: RunOptions, say: Callable[[str], None]) -> RunStart | None:
    """Finds the start in a process that trains alone; returns None in one of several, which have to agree first."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return None
    return find_start(config, options, lambda function: function(), say)


def _run_id(folder: Path, resume: bool) -> str:
    """Returns the id of the resumed run, or a new one; runs of early versions had none."""
    recorded = read_json_object(folder / "run.json").get("id") if resume else None
    return recorded if isinstance(recorded, str) else uuid.uuid4().hex


def _require_usable(folder: Path, config: Config, resume: bool) -> Config:
    """Refuses a folder in which the run cannot start or resume; returns a resumed run's config with grown tables."""
    require_folder("--run-dir", folder)
    require_new_or_resume(folder, resume)
    if resume:
        config = resumed_config(config, folder)
        require_same_config(folder, config)
    return config


def _find_initial_run(config: Config, folder: Path, manifest: Manifest, resume: bool) -> InitialRun | None:
    """Returns the run of ``train.init_from``; None without one, or if the resumed run has checkpoints of its own.

    A run that was interrupted before its first checkpoint starts again with the checkpoint that it has recorded.
    """
    init_from = config.train.init_from
    if init_from is None or (resume and checkpoint_names(checkpoint_place(folder, config.train.checkpoint_dir))):
        return None
    begun_with = (recorded(folder) or {}) if resume else {}
    return find_initial_run(init_from, config.data.require_path(), manifest, begun_with.get("checkpoint"))


def _choose_plans(
    config: Config, options: RunOptions, folder: Path, resume: bool, on_first: OnFirst, say: Callable[[str], None]
) -> PlanChoice:
    """Returns the saved plans to apply: the plan of the options is required, the resumed run's plan is preferred.

    With ``resume_or_start`` no plan is required: the resumed run's plan is preferred, or else that of the options.
    """
    if options.plan is not None and not options.resume_or_start:
        return PlanChoice(required=read_saved_plan(options.plan))
    preferred = on_first(lambda: load_run_plan(folder, config, say)) if resume else None
    if preferred is None and options.plan is not None:
        preferred = read_saved_plan(options.plan)
    return PlanChoice(preferred=preferred)


def _replaced_ids(config: Config, dataset: str, manifest: Manifest) -> dict[str, SSE]:
    """Returns the rule by which ids are replaced, by feature; refuses a graph over other ids than its table's."""
    features = batch_schema(config.task, manifest.schema).categorical
    num_embeddings = {feature.name: feature.num_embeddings for feature in features}
    reserved = {feature.name: reserved_ids(manifest, feature.table_name) for feature in features}
    sse = build_sse(config.sse, num_embeddings, reserved)
    for feature in features:
        rule = sse.get(feature.name)
        if rule is not None and rule.graph is not None:
            require_same_ids(rule.graph, dataset, manifest, feature.table_name)
    return sse


_LOOKED_AT = 8
"""About how many row groups of a split :func:`require_labels` reads."""


def require_trainable(config: Config, dataset: str, resume: bool = False) -> None:
    """Makes sure that a config can be trained on its splits; a resumed run is not refused for its metrics.

    Raises:
        UserError: A split is missing or not whole, a label is not valid for the task, a truncated table's ids are not
            numbered by frequency, or evaluations are to be compared by a metric that the dataset does not define.
    """
    splits = config.data.splits()
    require_splits(dataset, splits)
    _require_frequent_first(config.embedding, Manifest.load(dataset))
    require_labels(config.task, dataset, [name for name in splits.values() if name is not None])
    if config.train.compares_evaluations and not resume:
        assert config.data.validation is not None
        require_defined_headline(config.task, Manifest.load(dataset), config.data.validation)


def _require_frequent_first(config: EmbeddingConfig, manifest: Manifest) -> None:
    """Refuses the partition ``truncated`` of hashed values and of bins, whose ids are in no order of frequency."""
    for feature in manifest.schema.categorical:
        settings = config.for_table(feature.name)
        is_truncated = settings.partition == "truncated" and (
            settings.force or feature.num_embeddings > settings.threshold
        )
        if is_truncated and feature.table is None and reserved_ids(manifest, feature.name) == (MISSING_ID,):
            raise UserError(
                f"embedding.tables.{feature.name}: partition is truncated, but the dataset has no vocabulary of "
                f"{feature.name!r}: its ids are hashes or bins, not numbered by falling frequency. Prepare the feature "
                "without hash_size, or use quotient_remainder or multi_hash."
            )


def require_splits(dataset: str, splits: Mapping[str, str | None]) -> None:
    """Makes sure that splits, by the setting or option that names them, are there with whole files.

    Raises:
        UserError: A split is missing, or one of its files is missing, cut short or damaged.
    """
    dataset_splits = Manifest.load(dataset).splits
    for setting, name in splits.items():
        if name is not None and name not in dataset_splits:
            optional = ", or to null for none" if setting in ("data.validation", "data.test") else ""
            raise UserError(
                f"{setting} is {name!r}, but the dataset {dataset} has no split of that name; it has "
                f"{', '.join(dataset_splits) or 'none'}. Set it to one of them{optional}."
            )
    require_whole_splits(dataset, dict.fromkeys(name for name in splits.values() if name is not None))


def require_labels(task: TaskConfig, dataset: str, splits: Sequence[str]) -> None:
    """Makes sure that the labels of splits are valid for a task, in a sample of row groups.

    Labels that ``distembed prepare`` has made 0 and 1 are not read here. In training the task checks all labels, as
    batches are read.

    Raises:
        UserError: A label is not valid for the task.
    """
    manifest = Manifest.load(dataset)
    label, is_binary = manifest.schema.label, manifest.schema.label_kind == "binary"
    is_known = is_binary and manifest.preparation.get("source") != CREATED_ELSEWHERE
    if label is None or is_known or not isinstance(task, LabelTaskConfig):
        return
    for name in dict.fromkeys(splits):
        groups = list_row_groups(dataset_folder(dataset), manifest, name)
        for group in groups[:: max(1, len(groups) // _LOOKED_AT)]:
            try:
                labels = pc.cast(group.read([label]).column(0), pa.float64()).to_numpy()
            except (UserError, RunError):
                continue  # the reader refuses or skips this row group in training
            task.check_labels(labels.astype(np.float32), f"the column {label!r} of {group}")


_COMPARED = "train.keep_best and train.stop_after_evaluations compare evaluations"


def require_defined_headline(
    task: TaskConfig, manifest: Manifest, name: str, compared: str = _COMPARED, remedy: str = "Leave both out"
) -> None:
    """Refuses to compare models by a task's headline metric where it is undefined on the validation split.

    For example, all rows have the same label. The reasons are read from the manifest.

    Args:
        task: The task.
        manifest: The dataset's manifest.
        name: The validation split.
        compared: Names the settings that compare, for the error.
        remedy: Says how to do without a comparison.

    Raises:
        UserError: The metric is undefined.
    """
    if isinstance(task, NextItemConfig) and task.headline_is_sampled:
        _require_enough_items(task, manifest, compared)
    split = manifest.splits[name]
    if split.num_rows == 0:
        fault = "has no rows"
    elif split.mean_weight == 0:
        fault = "has only rows of weight 0"
    elif isinstance(task, LabelTaskConfig) and task.needs_both_labels and split.label_rate in (0.0, 1.0):
        fault = f"has only rows whose label is {split.label_rate:g}"
    elif isinstance(task, MultiConfig) and (label_fault := _fault_of_label(task, split, manifest.schema)):
        fault = label_fault
    else:
        return
    raise UserError(
        f"{compared} by the task's headline metric, which is not defined where data.validation is {name!r}: it "
        f"{fault}. {remedy}, or name a split that defines it."
    )


def _fault_of_label(task: MultiConfig, split: Split, schema: Schema) -> str | None:
    """Returns why the headline metric's label does not define the metric on a split; None where it does."""
    label, needs_both = task.headline_label(schema)
    summary = split.label_summaries(schema)[label]
    is_after = label.name in task.labels and task.labels[label.name].after is not None
    # a label after another one is 0 in more rows than the summary counts
    if summary.num_rows == 0 and (needs_both or not is_after):
        return f"has no rows with the label {label.name!r}"
    if needs_both and (summary.mean == 0 or (summary.mean == 1 and not is_after)):
        return f"has only rows whose label {label.name!r} is {summary.mean:g}, of the rows that have it"
    return None


def _require_enough_items(task: NextItemConfig, manifest: Manifest, compared: str) -> None:
    """Refuses a headline metric that ranks each target among more other items than the dataset has."""
    items = next((feature for feature in manifest.schema.categorical if feature.name == ITEM), None)
    if items is None:
        return  # the task refuses the dataset
    num_other_items = max(items.num_embeddings - len(reserved_ids(manifest, ITEM)) - 1, 0)
    if task.sampled_candidates > num_other_items:
        raise UserError(
            f"{compared} by task.headline={task.headline!r}, which "
            f"ranks each target among task.sampled_candidates={task.sampled_candidates} other items, but this "
            f"dataset has {num_other_items} other items. Lower task.sampled_candidates to at most {num_other_items}, "
            f"or set task.headline to a metric among all items, such as 'ndcg@{task.cutoffs[-1]}'."
        )
