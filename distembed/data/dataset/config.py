"""The ``data`` section of a config: a prepared dataset, or only the shape of one."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic import Field, field_validator, model_validator

from distembed.base.errors import UserError
from distembed.base.machine import usable_cores
from distembed.base.names import STRICT, one_of
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import DEFAULT_CACHE_BYTES, dataset_folder
from distembed.data.dataset.periods import PeriodKind
from distembed.data.dataset.schema import SCHEMAS, Schema
from distembed.data.remote import is_url

_MOST_THREADS = 4
_MOST_IDS = 2**31  # more ids than any row has
COUNTS_REFUSED = "a dataset (data.path) knows how many ids its rows have, so that plans need no"
"""Beginning of the error for counts of ids that are given together with a dataset; the setting's name follows."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class StreamConfig:
    """Raw rows to train on as they arrive, in place of the training split; see :mod:`distembed.data.stream`.

    Attributes:
        source: Folder or URL in which files of rows appear, or ``kafka://HOST:PORT/TOPIC`` with JSON objects.
        until_idle: Seconds without rows after which training ends; null to wait for ever.
        max_rows: Number of well-formed rows after which training ends; null for no limit.
        max_rejected: Largest share of malformed rows, counted from the first row on; null for no limit.
        max_bad_files: Largest number of files that cannot be read; null for no limit.
        poll_seconds: Seconds between two looks at a source that has no rows.
        metrics_by: ``day`` or ``hour`` for metrics by the times of rows, in UTC; null for none.
        kafka_properties: File of ``NAME=VALUE`` lines for librdkafka, such as ``sasl.password``; null for none.
    """

    source: Annotated[str, Field(min_length=1)]
    until_idle: Annotated[float, Field(gt=0)] | None = None
    max_rows: Annotated[int, Field(gt=0, lt=2**62)] | None = None
    max_rejected: Annotated[float, Field(ge=0, le=1)] | None = None
    max_bad_files: Annotated[int, Field(ge=0)] | None = None
    poll_seconds: Annotated[float, Field(gt=0)] = 1.0
    metrics_by: PeriodKind | None = None
    kafka_properties: str | None = None


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Where the rows are.

    Attributes:
        path: Folder that ``distembed prepare`` made, relative to the working directory, or its URL, for example
            ``s3://bucket/criteo``.
        schema: Name of a known dataset's shape, to describe a model without the data; used where ``path`` is not set.
        ids_per_row: Mean number of ids of a row, for ``schema``: by feature, 1 for features that are not named; a list,
            in the schema's order; or one number for all features. A dataset has its own counts.
        train: Split to train on.
        validation: Split to evaluate on while training; null for none.
        test: Split of the final evaluation; null for none.
        decode_threads: Threads of each rank that decode rows ahead of the batches; null for as many as there are
            processors for, at most 4, and for 4 where rows come from a URL. Rows and their order stay the same.
        skip_unreadable: Number of row groups of the training split that may be unreadable, damaged or out of reach;
            rows of other row groups take their place. Evaluations and predictions need all rows.
        cache_dir: Folder on this machine for fetched files; null for ``~/.cache/distembed``.
        cache_bytes: Most bytes of row groups in it; the least recently used are removed.
        stream: Raw rows that keep arriving, to train on in place of ``train``; null to train on ``train``.
    """

    path: str | None = None
    schema: str | None = None
    ids_per_row: float | list[float] | dict[str, float] | None = None
    train: str = "train"
    validation: str | None = "validation"
    test: str | None = "test"
    decode_threads: Annotated[int, Field(ge=0)] | None = None
    skip_unreadable: Annotated[int, Field(ge=0)] = 0
    cache_dir: str | None = None
    cache_bytes: Annotated[int, Field(ge=0)] = DEFAULT_CACHE_BYTES
    stream: StreamConfig | None = None

    @field_validator("ids_per_row", mode="before")
    @classmethod
    def _are_counts(cls, values: Any) -> Any:
        numbers = values.values() if isinstance(values, Mapping) else values if isinstance(values, list) else [values]
        for number in numbers if values is not None else ():
            if type(number) not in (int, float) or not 0 < number < _MOST_IDS:
                raise ValueError(
                    f"ids_per_row has {number!r}; give a number above 0 and below 2**31, a list with one for each "
                    "feature, or {FEATURE: NUMBER}"
                )
        return values

    @model_validator(mode="after")
    def _has_one_source_of_counts(self) -> "DataConfig":
        if self.path is not None and self.ids_per_row is not None:
            raise ValueError(f"{COUNTS_REFUSED} ids_per_row; set data.ids_per_row=null, or leave data.path out")
        return self

    def threads_of_rank(self, local_world_size: int) -> int:
        """Returns the number of threads in which a rank decodes rows ahead."""
        if self.decode_threads is not None:
            return self.decode_threads
        if self.path is not None and is_url(self.path):
            return _MOST_THREADS  # which mostly wait
        # one processor of a rank computes, and a thread decodes 2.7 million rows of Criteo a second
        return max(0, min(usable_cores() // local_world_size - 1, _MOST_THREADS))

    def load_schema(self) -> Schema:
        """Returns the columns, from the dataset's manifest, or from the named shape with ``ids_per_row`` applied."""
        if self.path is None and self.schema is not None:
            return self._with_ids_per_row(SCHEMAS[one_of("data.schema", self.schema, SCHEMAS)])
        return Manifest.load(
            self.require_path(f" (or, to describe a model only, data.schema={next(iter(SCHEMAS))})")
        ).schema

    def _with_ids_per_row(self, schema: Schema) -> Schema:
        """Returns a named shape with the counts of ``ids_per_row``; a feature of another count than 1 is multi-hot."""
        ids_per_row, names = self.ids_per_row, schema.categorical_names
        if ids_per_row is None:
            return schema
        if isinstance(ids_per_row, list):
            if len(ids_per_row) != len(names):
                raise UserError(
                    f"data.ids_per_row has {len(ids_per_row)} numbers, and data.schema={self.schema} has {len(names)} "
                    f"categorical features ({names[0]}, ..., {names[-1]}); give a number for each, or FEATURE: NUMBER."
                )
            means = dict(zip(names, ids_per_row, strict=True))
        elif isinstance(ids_per_row, Mapping):
            means = {one_of("feature of data.ids_per_row", name, names): mean for name, mean in ids_per_row.items()}
        else:
            means = dict.fromkeys(names, ids_per_row)
        features = list(schema.categorical)
        for index, feature in enumerate(features):
            if (mean := means.get(feature.name)) is not None:
                multi_hot = feature.multi_hot or mean != 1
                features[index] = dataclasses.replace(feature, multi_hot=multi_hot, mean_ids_per_row=mean)
        return dataclasses.replace(schema, categorical=tuple(features))

    def splits(self) -> dict[str, str | None]:
        """Returns the split that each setting names."""
        return {"data.train": self.train, "data.validation": self.validation, "data.test": self.test}

    def require_path(self, alternative: str = "") -> str:
        """Returns the folder of the dataset, or of its copy where ``path`` is a URL; it must be set."""
        if self.path is None:
            example = f"for example data.path=criteo{alternative}."
            raise UserError(f"data.path is not set: give the folder that `distembed prepare` made, {example}")
        return self.local_folder(self.path)

    def local_folder(self, dataset: str) -> str:
        """Returns the folder of a dataset, be it a path or a URL, with this section's cache."""
        return str(dataset_folder(dataset, self.cache_dir, self.cache_bytes)) if is_url(dataset) else dataset
