"""The options of ``distembed plan --model``: someone's own model in the place of a config, and its step."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from distembed.base.errors import UserError

if TYPE_CHECKING:
    from distembed.planning.config import PlanConfig
    from distembed.reports.plan.plannable import Plannable

_IN_CONFIG = {
    "batch_size": "train.batch_size=NUMBER",
    "example": "its model's batches",
    "sparse_optimizer": "train.sparse_optimizer.name=NAME",
    "dense_optimizer": "train.dense_optimizer.name=NAME",
    "bf16": "train.precision=bf16",
}
"""What a config has in the place of each option."""


@dataclass(frozen=True)
class ModelOptions:
    """A model of one's own in the place of a config, and its step."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="In place of CONFIG: a function that returns a TorchRec model, or (model, sharders). Its tables take "
            "no memory, and no device has to be there; modules of the current folder are found.",
        ),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=2**31 - 1, help="With --model: rows of a step on all ranks.")
    ] = None
    example: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="With --model: a function that, given a number of rows, returns what the model is called with: a "
            "tuple of arguments, a dict of named ones, or the only one. Networks and ids of a row are counted by it.",
        ),
    ] = None
    ids_per_row: Annotated[
        str | None,
        typer.Option(
            metavar="FEATURE=NUMBER,...",
            help="Mean number of ids of a row, by feature: of --model, or of a config without a dataset.",
        ),
    ] = None
    sparse_optimizer: Annotated[
        str | None, typer.Option(help="With --model: optimizer of tables that declare none; sgd unless given.")
    ] = None
    dense_optimizer: Annotated[
        str | None, typer.Option(help="With --model: optimizer of the networks; adam unless given.")
    ] = None
    bf16: Annotated[bool, typer.Option("--bf16", help="With --model: networks compute in bf16.")] = False

    def require_none(self) -> None:
        """Refuses options that say of a model what a config says itself.

        Raises:
            UserError: One of them is given.
        """
        for name, instead in _IN_CONFIG.items():
            if getattr(self, name) not in (None, False):
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} goes with --model MODULE:FUNCTION; a config has {instead} instead.")

    def plannable(self, plan: "PlanConfig") -> "Plannable":
        """Makes the model; what can be said of mistakes without torch is said before torch is loaded.

        Args:
            plan: Ways in which tables may be placed.

        Raises:
            UserError: An option is missing or cannot be read, or a function cannot be called or makes no model that can
                be planned.
        """
        from distembed.reports.plan.own_options import OwnStep, find_function, parse_ids_per_row

        assert self.model is not None
        if self.batch_size is None:
            raise UserError("--model needs --batch-size as well: rows of a step on all ranks, such as 65536.")
        step = OwnStep(
            self.batch_size,
            {} if self.ids_per_row is None else parse_ids_per_row(self.ids_per_row),
            bf16=self.bf16,
            sparse_optimizer=self.sparse_optimizer,
            dense_optimizer=self.dense_optimizer or OwnStep.dense_optimizer,
        )
        function = find_function("--model", self.model)
        if self.example is not None:
            step = dataclasses.replace(step, example=find_function("--example", self.example))
        from distembed.reports.plan.own_model import OwnModel, make_own_model

        return OwnModel(make_own_model(function), step, plan)


def plan_settings(arguments: Sequence[str]) -> "PlanConfig":
    """Returns the section ``plan`` of ``plan.KEY=VALUE`` arguments, which are all that a model of one's own takes.

    Raises:
        UserError: An argument is a file or another setting, or a value is wrong.
    """
    for argument in arguments:
        if "=" not in argument:
            raise UserError(f"give CONFIG or --model, not both: {argument!r} is no plan.KEY=VALUE.")
        if not argument.startswith("plan."):
            raise UserError(
                f"{argument!r} is a setting of a config; with --model only those of plan are: plan.KEY=VALUE, beside "
                "options such as --batch-size."
            )
    from distembed.training.config import load_config

    return load_config(None, arguments).plan
