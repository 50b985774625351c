"""The ``data`` section of a config: a prepared dataset, or only the shape of one."""

import pydantic.dataclasses
from pydantic import ConfigDict

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import SCHEMAS, Schema
from distembed.errors import UserError
from distembed.names import one_of


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class DataConfig:
    """Where the rows are.

    Attributes:
        path: folder that ``distembed prepare`` made; relative to the working directory.
        schema: name of a known dataset's shape, to describe a model without the data; used where ``path`` is not set.
        train: split to train on.
        validation: split to evaluate on while training; null for none.
        test: split of the final evaluation; null for none.
    """

    path: str | None = None
    schema: str | None = None
    train: str = "train"
    validation: str | None = "validation"
    test: str | None = "test"

    def load_schema(self) -> Schema:
        """The features, from the dataset's manifest or from the named shape.

        Raises:
            UserError: where neither is given, or what is given is not there.
        """
        if self.path is not None:
            return Manifest.load(self.path).schema
        if self.schema is not None:
            return SCHEMAS[one_of("data.schema", self.schema, SCHEMAS)]
        raise UserError(
            "data.path is not set: give the folder that `distembed prepare` made, for example data.path=criteo "
            f"(or, to describe a model only, data.schema={next(iter(SCHEMAS))})."
        )

    def require_path(self) -> str:
        """``path``, where rows are needed."""
        if self.path is None:
            raise UserError(
                "data.path is not set: give the folder that `distembed prepare` made, for example data.path=criteo."
            )
        return self.path
