"""What a dataset's bytes depend on besides its rows, whatever the kind of rows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distembed.data.prepare.split import SplitRule
from distembed.errors import UserError


@dataclass(frozen=True)
class PrepareOptions:
    """What a dataset's bytes depend on besides the rows and the layout of their columns.

    Raises:
        UserError: An option is out of its range.
    """

    split: str = "0.8,0.1,0.1"  # how rows are divided (:class:`~distembed.data.prepare.split.SplitRule`)
    max_rejected: float = 0.01  # largest share of malformed rows that is no error; ``rejected.tsv`` lists them
    # a dataset, by folder or URL, or a run, whose ids and learnt transforms are applied; None learns new ones
    vocabulary: str | os.PathLike[str] | None = None
    grow: bool = False  # whether values that ``vocabulary`` lacks get ids behind those that are there
    recorded: Mapping[str, Any] = field(default_factory=dict)  # in the manifest, before what was learnt

    @property
    def rule(self) -> SplitRule:
        """How rows are divided."""
        return SplitRule.parse(self.split)

    def __post_init__(self) -> None:
        if not 0 <= self.max_rejected <= 1:
            raise UserError(
                f"max_rejected (--max-rejected) is {self.max_rejected}: it is a share of the rows, between 0 and 1"
            )
        if self.grow and self.vocabulary is None:
            raise UserError("grow (--grow) is given without vocabulary (--vocabulary), the dataset or run to grow")
        if not self.rule.trains and (self.vocabulary is None or self.grow):
            remedy = "leave out --grow" if self.grow else "name a dataset or a run with vocabulary (--vocabulary)"
            raise UserError(
                f"split (--split) is {self.split!r}, so that no row trains, and ids are learnt on rows that train: "
                f"{remedy}, or give a split such as '0.8,0.1,0.1'"
            )
