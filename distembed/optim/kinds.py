"""The table of optimizers: one row says all that the planner, the trainer, checkpoints and configs need to know of one.

A new optimizer is one more row. A script may add its own before it reads a config::

    from distembed.optim import OPTIMIZERS, NumberPer, OptimizerKind

    OPTIMIZERS["rmsprop"] = OptimizerKind(
        {"square_avg": NumberPer.WEIGHT}, torch.optim.RMSprop, {"momentum": 0, "centered": False}
    )

From then on ``rmsprop`` is a name for ``train.dense_optimizer`` and, since torch can train tables from their gradients,
for ``train.sparse_optimizer``; plans count its states to the byte, and checkpoints hold them under their names.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from distembed.base.lazy import NameTable, imported

if TYPE_CHECKING:
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torch import nn

OptimizerClass: TypeAlias = "type[torch.optim.Optimizer] | str | None"
"""The class of an optimizer, or where it is, ``"module:name"``, so that its name is known without torch; or None."""
_NUMBER_BYTES = 4  # states are float32, and so are torch's numbers of steps


class NumberPer(Enum):
    """The unit that has one number of a state: each weight, each row, or a parameter as a whole."""

    WEIGHT = "weight"
    ROW = "row"
    PARAMETER = "parameter"


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer: its states, and who computes it.

    Attributes:
        states: The unit that has one number of each state, by the state's name in torch. Where FBGEMM has the
            optimizer, its states follow in this order there. Numbers of steps are no states.
        torch_class: Torch's optimizer, or one of its form, or where it is. It is called with the parameters,
            ``settings``, ``lr`` and, for networks, ``weight_decay``, for tables ``eps`` if ``has_eps``. States of rows
            have the shape ``[rows, 1]``. None where torch has none, so that it trains neither networks nor
            tables that every rank has.
        settings: The arguments that make ``torch_class`` this optimizer; a live one is recognised by its class and
            these.
        initial_values: The first value of each state that does not begin at 0.
        counts_steps: Whether torch keeps the number of steps of each parameter, as a float32 named ``step``.
        corrects_bias: Whether updates depend on the number of steps done.
        has_eps: Whether a small number is added to a denominator.
        decouples_weight_decay: Whether its weight decay is all that sets it apart from another optimizer. Tables have
            no weight decay, so that it does not train them.
        fused_class: The class by which TorchRec knows FBGEMM's, which updates tables within the backward pass, or where
            that class is; None where FBGEMM has none, so that torch trains tables from their gradients.
        fused_needs_cuda: Whether FBGEMM has it on CUDA only.
    """

    states: Mapping[str, NumberPer]
    torch_class: OptimizerClass = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    initial_values: Mapping[str, float] = field(default_factory=dict)
    counts_steps: bool = True
    corrects_bias: bool = False
    has_eps: bool = True
    decouples_weight_decay: bool = False
    fused_class: OptimizerClass = None
    fused_needs_cuda: bool = False

    @property
    def has_weight_states(self) -> bool:
        """Whether it keeps a number for each weight."""
        return NumberPer.WEIGHT in self.states.values()

    @property
    def has_row_states(self) -> bool:
        """Whether it keeps a number for each row."""
        return NumberPer.ROW in self.states.values()

    @property
    def trains_networks(self) -> bool:
        """Whether networks can be trained by it: their biases have no rows."""
        return self.torch_class is not None and not self.has_row_states

    @property
    def trains_tables(self) -> bool:
        """Whether tables can be trained by it: fused by FBGEMM, or by torch where no state belongs to a row.

        TorchRec's ``dense`` kernel gives torch the weights of a table as one dimension, so that torch sees no rows.
        """
        return not self.decouples_weight_decay and (self.fused_class is not None or self.trains_networks)

    @property
    def is_fused_everywhere(self) -> bool:
        """Whether FBGEMM has it on CPUs and on CUDA."""
        return self.fused_class is not None and not self.fused_needs_cuda

    @property
    def row_state_bytes(self) -> int:
        """Bytes of the states that belong to one row as a whole."""
        return self._num_states(NumberPer.ROW) * _NUMBER_BYTES

    def fused_state_bytes(self, num_rows: int, num_weights: int) -> int:
        """Returns the bytes of the states that FBGEMM keeps for a parameter."""
        by_row, by_weight = self._num_states(NumberPer.ROW), self._num_states(NumberPer.WEIGHT)
        return (by_row * num_rows + by_weight * num_weights) * _NUMBER_BYTES

    def torch_state_bytes(self, num_rows: int, num_weights: int) -> int:
        """Returns the bytes of the states that torch keeps for a parameter, and of its number of steps."""
        single = self._num_states(NumberPer.PARAMETER) + self.counts_steps
        return self.fused_state_bytes(num_rows, num_weights) + single * _NUMBER_BYTES

    def _num_states(self, per: NumberPer) -> int:
        return list(self.states.values()).count(per)

    def make(
        self, parameters: "Iterable[nn.Parameter] | Iterable[dict[str, Any]]", **settings: Any
    ) -> "torch.optim.Optimizer":
        """Makes torch's optimizer of this kind, in torch's fused form where it has one for the parameters' devices.

        Weights of half precision are trained in float32 and rounded, and their states are float32.

        Args:
            parameters: The parameters to train, or torch's groups of them, which may have settings of their own.
            settings: ``lr`` and, where the kind has them, ``weight_decay``, ``eps`` or ``betas``.
        """
        from distembed.optim.float_copies import is_half, train_in_float32

        make: Any = imported(self.torch_class)
        assert make is not None
        given: list[Any] = list(parameters)
        members = [member for each in given for member in (each["params"] if isinstance(each, dict) else [each])]
        is_real = bool(members) and not any(member.is_meta for member in members)
        has_fused = is_real and all(_has_fused_form(make, member.device.type) for member in members)
        optimizer: torch.optim.Optimizer = make(
            given, **self.settings, **({"fused": True} if has_fused else {}), **settings
        )
        if any(map(is_half, members)):
            train_in_float32(optimizer)
        return optimizer


@cache
def _has_fused_form(make: Any, device_type: str) -> bool:
    """Returns whether torch's optimizer has a fused form for a kind of device, by a step on a parameter of size 0."""
    import torch

    if "fused" not in inspect.signature(make).parameters:
        return False
    parameter = torch.nn.Parameter(torch.empty(0, device=device_type))
    parameter.grad = torch.empty_like(parameter)
    try:
        make([parameter], fused=True).step()
    except RuntimeError as error:
        if "fused" not in str(error):
            raise
        return False
    return True


_ADAM = {"exp_avg": NumberPer.WEIGHT, "exp_avg_sq": NumberPer.WEIGHT}
_ROW_WISE_ADAGRAD = "torchrec.optim.rowwise_adagrad:RowWiseAdagrad"
_PARTIAL_ROW_WISE = {"exp_avg": NumberPer.WEIGHT, "exp_avg_sq": NumberPer.ROW}

OPTIMIZERS: NameTable[OptimizerKind] = NameTable(
    {
        "sgd": OptimizerKind(
            {}, "torch.optim:SGD", {"momentum": 0}, counts_steps=False, has_eps=False, fused_class="torch.optim:SGD"
        ),
        "adagrad": OptimizerKind({"sum": NumberPer.WEIGHT}, "torch.optim:Adagrad", fused_class="torch.optim:Adagrad"),
        "row_wise_adagrad": OptimizerKind({"sum": NumberPer.ROW}, _ROW_WISE_ADAGRAD, fused_class=_ROW_WISE_ADAGRAD),
        "adam": OptimizerKind(
            _ADAM,
            "torch.optim:Adam",
            {"amsgrad": False},
            corrects_bias=True,
            fused_class="torch.optim:Adam",
            fused_needs_cuda=True,
        ),
        "adamw": OptimizerKind(
            _ADAM, "torch.optim:AdamW", {"amsgrad": False}, corrects_bias=True, decouples_weight_decay=True
        ),
        "amsgrad": OptimizerKind(
            {**_ADAM, "max_exp_avg_sq": NumberPer.WEIGHT}, "torch.optim:Adam", {"amsgrad": True}, corrects_bias=True
        ),
        "partial_row_wise_adam": OptimizerKind(
            _PARTIAL_ROW_WISE,
            corrects_bias=True,
            fused_class="torchrec.optim:PartialRowWiseAdam",
            fused_needs_cuda=True,
        ),
        "lamb": OptimizerKind(_ADAM, corrects_bias=True, fused_class="torchrec.optim:LAMB", fused_needs_cuda=True),
        "partial_row_wise_lamb": OptimizerKind(
            _PARTIAL_ROW_WISE,
            corrects_bias=True,
            fused_class="torchrec.optim:PartialRowWiseLAMB",
            fused_needs_cuda=True,
        ),
    }
)
"""All optimizers by the names that configs, plans and checkpoints have for them."""


def dense_names() -> list[str]:
    """Returns the names of the optimizers that can train networks."""
    return [name for name, kind in OPTIMIZERS.items() if kind.trains_networks]


def sparse_names() -> list[str]:
    """Returns the names of the optimizers that can train tables."""
    return [name for name, kind in OPTIMIZERS.items() if kind.trains_tables]


def stateless_name() -> str:
    """Returns the name of the first optimizer that FBGEMM has on all devices and that keeps no states."""
    return next(name for name, kind in OPTIMIZERS.items() if kind.is_fused_everywhere and not kind.states)


def row_wise_name() -> str:
    """Returns the name of the first optimizer that FBGEMM has on all devices and whose states have one number a row."""
    return next(
        name
        for name, kind in OPTIMIZERS.items()
        if kind.is_fused_everywhere and kind.has_row_states and not kind.has_weight_states
    )


def torch_optimizer_name(optimizer: "torch.optim.Optimizer") -> str | None:
    """Returns the name of a live torch optimizer; None where no optimizer in the table has its class and settings.

    Of several matches the one with most settings is returned: it is the most specific.
    """
    matching = [
        name
        for name, kind in OPTIMIZERS.items()
        if type(optimizer) is imported(kind.torch_class) and kind.settings.items() <= optimizer.defaults.items()
    ]
    return max(matching, key=lambda name: len(OPTIMIZERS[name].settings), default=None)


def fused_optimizer_name(fused: "EmbOptimType") -> str | None:
    """Returns the name in ``OPTIMIZERS`` of one of FBGEMM's optimizers; None where the table does not have it."""
    return next((name for name, kind in OPTIMIZERS.items() if _computes(kind, fused)), None)


def fused_type(optimizer: "type[torch.optim.Optimizer]") -> "EmbOptimType | None":
    """Returns FBGEMM's enum value for an optimizer class, as TorchRec maps them; None where FBGEMM has none."""
    from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

    try:
        return optimizer_type_to_emb_opt_type(optimizer)
    except ValueError:
        return None


def _computes(kind: OptimizerKind, fused: "EmbOptimType") -> bool:
    """Returns whether FBGEMM's optimizer is this kind; ``exact_adagrad`` and ``adagrad`` count as one."""
    own_class = imported(kind.fused_class)
    own_type = None if own_class is None else fused_type(own_class)
    # TorchRec takes the forms whose names begin with `exact_`; the forms without it keep the same states
    return own_type is not None and own_type.value.removeprefix("exact_") == fused.value.removeprefix("exact_")
