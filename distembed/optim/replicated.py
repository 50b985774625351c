"""Optimizers of replicated weights, which update them within the backward pass, as FBGEMM updates its tables.

The placement of a table must not decide its optimizer. FBGEMM updates tables of one rank; torch's form of the optimizer
updates tables that all ranks have: data-parallel tables, and the small partitions of row-wise tables. Their states have
the names and shapes of FBGEMM's, so that the keys of a state dict do not depend on the plan::

    state.<path>.<collection>.<partition>.weight.<partition>.momentum1    [rows] or [rows, columns], on any plan

At the end of a backward pass the gradients are averaged over the ranks, in one piece for each dtype, and the weights
updated. Collections do so in the order of their construction, which all ranks share, and after
``DistributedDataParallel``, so that all ranks call collectives in one order.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_codegen_lookup_invokers.lookup_args import OptimizerArgs
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer

from distembed.base.errors import UserError
from distembed.optim.float_copies import state_dtype
from distembed.optim.kinds import OPTIMIZERS, NumberPer, OptimizerKind, fused_optimizer_name, stateless_name

_FUSED_LEARNING_RATE, _FUSED_EPS = 0.01, 1e-8
"""FBGEMM's defaults."""
_UNKNOWN_TO_TORCH = ("weight_decay", "momentum", "eta", "max_gradient", "gradient_clipping", "max_norm")
"""Settings of FBGEMM's updates that torch's form lacks or applies in another way."""


def fused_optimizer(fused_params: Mapping[str, Any], weight_name: str) -> tuple[str, dict[str, Any]]:
    """Returns the optimizer that FBGEMM's settings name: its key in ``OPTIMIZERS``, and torch's settings of it.

    Args:
        fused_params: FBGEMM's settings of a table.
        weight_name: A weight of the table that every rank has, for errors.

    Raises:
        UserError: torch has no form of the optimizer, or of one of its settings.
    """
    declared = fused_params.get("optimizer")
    name = stateless_name() if declared is None else fused_optimizer_name(declared)
    kind = None if name is None else OPTIMIZERS[name]
    if name is None or kind is None or kind.torch_class is None:
        raise UserError(
            f"{name or declared} is an optimizer that only FBGEMM has, but torch trains what every rank has, such as "
            f"{weight_name}; place its table table_wise or column_wise, or train it by another optimizer."
        )
    for setting in _UNKNOWN_TO_TORCH:
        if fused_params.get(setting):
            raise UserError(
                f"the optimizer of {weight_name} has {setting}={fused_params[setting]}, which only FBGEMM applies, but "
                "torch trains what every rank has; place its table table_wise or column_wise, or leave the setting out."
            )
    settings: dict[str, Any] = {"lr": fused_params.get("learning_rate", _FUSED_LEARNING_RATE)}
    if kind.has_eps:
        settings["eps"] = fused_params.get("eps", _FUSED_EPS)
    if kind.corrects_bias:
        settings["betas"] = (fused_params.get("beta1", 0.9), fused_params.get("beta2", 0.999))
    return name, settings


def frozen_settings(fused_params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns FBGEMM's settings of a table without its optimizer: SGD at a rate of 0, which keeps no state."""
    optimizer_settings = {*OptimizerArgs._fields, "counter_based_regularization", "cowclip_regularization"}
    table_settings = {setting: value for setting, value in fused_params.items() if setting not in optimizer_settings}
    return {**table_settings, "optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.0}


class ReplicatedOptimizer(FusedOptimizer):
    """Torch's form of a fused optimizer, which :class:`BackwardUpdates` steps; its own ``step`` sets the learning rate.

    Weights of half precision are trained in float32 and rounded to the nearest, as FBGEMM's are
    (:mod:`distembed.optim.float_copies`).

    Attributes:
        name: Name of the optimizer, a key of ``OPTIMIZERS``.
        live: Torch's states of each weight.
        has_gradients: Whether gradients have come since the last update: of a backward pass that is under way, or of
            one that failed.

    Args:
        name: Name of the optimizer.
        weights: The weights, by their names in the sharded module, which end in ``<partition>.weight``.
        settings: Torch's settings.
    """

    def __init__(self, name: str, weights: Mapping[str, nn.Parameter], settings: Mapping[str, Any]) -> None:
        self.name, kind = name, OPTIMIZERS[name]
        self.has_gradients = False
        self._inner = kind.make(weights.values(), **settings)
        self.live: dict[Tensor, dict[str, Tensor]] = {}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for key, weight in weights.items():
            weight_state = self._inner.state[weight]
            if not weight_state:
                weight_state.update(first_state(kind, weight, self._inner.param_groups[0]))
            self.live[weight], prefix = weight_state, key.split(".")[-2]
            by_row = [(state_name, per is NumberPer.ROW) for state_name, per in kind.states.items()]
            # FBGEMM calls every optimizer's first state momentum1
            state[weight] = {
                f"{prefix}.{state_name if index else 'momentum1'}": weight_state[state_name].view(-1)
                if is_row
                else weight_state[state_name]
                for index, (state_name, is_row) in enumerate(by_row)
            }
        super().__init__(weights, state, [{"params": list(weights.values()), "lr": settings["lr"]}])

    def update(self) -> None:
        """Updates the weights by their gradients."""
        self._inner.step()

    def step(self, closure: Any = None) -> None:
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Copies the learning rate to torch's optimizer, and clears gradients that a failed backward pass has left."""
        (settings,) = self.param_groups
        for group in self._inner.param_groups:
            group["lr"] = settings["lr"]
        if self.has_gradients:  # of a backward pass that failed: the next one would add to them
            for weight in self.live:
                if weight.grad is not None:
                    weight.grad.zero_()
            self.has_gradients = False

    def set_optimizer_step(self, step: int) -> None:
        """Sets the number of steps done, on which the bias correction of Adam and its kin depends."""
        for live in self.live.values():
            if "step" in live:
                live["step"].fill_(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Sets the learning rate (``lr``) or ``eps``, as FBGEMM's optimizers do."""
        for setting, value in params_dict.items():
            if setting not in ("lr", "eps"):
                raise NotImplementedError(f"Setting hyper-parameter {setting} is not supported")
            for group in (*self.param_groups, *self._inner.param_groups):
                if setting in group:
                    group[setting] = value


class _Waiting(dict[int, "BackwardUpdates"]):
    """The updates whose gradients have come in one backward pass, by their numbers.

    Autograd's callback alone holds a strong reference: when a pass fails, the object is freed with the pass.
    """


class BackwardUpdates:
    """Averages gradients of replicated weights at the end of each backward pass, and has the weights updated.

    With several ranks, gradients are views of one lasting buffer for each dtype, which is averaged; on one rank they
    are freed. All ranks make it with the same weights, and run the same backward passes.

    Args:
        optimizers: The optimizers, with the weights that they train.
        group: The ranks; None for one alone.
    """

    _numbers = itertools.count()  # in the order of construction, equal on all ranks: the order of collectives
    # by autograd's numbers of the running backward passes; one may run within another
    _waiting: "weakref.WeakValueDictionary[int, _Waiting]" = weakref.WeakValueDictionary()

    def __init__(self, optimizers: Sequence[ReplicatedOptimizer], group: dist.ProcessGroup | None) -> None:
        self._number = next(self._numbers)
        self._optimizers, self._group = optimizers, group
        self._weights: list[nn.Parameter] = [weight for optimizer in optimizers for weight in optimizer.params.values()]
        self._buffers: list[Tensor] = []
        self._gradients: dict[Tensor, Tensor] = {}
        for weight in self._weights:
            # the mark by which TorchRec's in_backward_optimizer_filter keeps a weight from other optimizers
            weight._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
            weight.register_post_accumulate_grad_hook(self._note)

    def _note(self, _weight: Tensor) -> None:
        """Notes that a gradient has come; the first one of a backward pass schedules the update at the pass's end."""
        task = torch._C._current_graph_task_id()
        waiting = self._waiting.get(task)
        if waiting is None:
            self._waiting[task] = waiting = _Waiting()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._update_all, waiting))
        waiting[self._number] = self
        for optimizer in self._optimizers:
            optimizer.has_gradients = True

    @staticmethod
    def _update_all(waiting: _Waiting) -> None:
        for _, updates in sorted(waiting.items()):
            updates._update()

    @torch.no_grad()
    def _update(self) -> None:
        # rank 0   [ grad a | grad b ]  \
        # rank 1   [ grad a | grad b ]   > one all-reduce of the mean a dtype -> update on every rank
        num_ranks = 1 if self._group is None else self._group.size()
        if num_ranks > 1:
            self._gather_gradients()
        for buffer in self._buffers:
            buffer.div_(num_ranks)  # first: a sum may be beyond half precision where the mean is not
            dist.all_reduce(buffer, group=self._group)
        for weight in self._weights:
            if not weight.requires_grad:  # frozen since it was sharded: a gradient of 0 would move it by its momentum
                weight.grad = None
        for optimizer in self._optimizers:
            optimizer.update()
            optimizer.has_gradients = False
        for buffer in self._buffers:
            buffer.zero_()
        for weight in self._weights if num_ranks == 1 else ():
            weight.grad = None

    def _gather_gradients(self) -> None:
        """Copies all gradients into the buffers; from then on the weights' gradients are views of the buffers."""
        if not self._buffers:
            for dtype in dict.fromkeys(weight.dtype for weight in self._weights):
                weights = [weight for weight in self._weights if weight.dtype == dtype]
                sizes = [weight.numel() for weight in weights]
                buffer = torch.zeros(sum(sizes), dtype=dtype, device=weights[0].device)
                self._buffers.append(buffer)
                slices = zip(weights, buffer.split(sizes), strict=True)
                self._gradients |= {weight: gradient.view_as(weight) for weight, gradient in slices}
        for weight, view in self._gradients.items():
            if weight.grad is None:  # no gradient in this pass; a failed pass may have left one in the buffer
                view.zero_()
            elif weight.grad is not view:
                view.copy_(weight.grad)
            weight.grad = view


def first_state(kind: OptimizerKind, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the states that torch makes at the first step, without a step: it may change weights at gradients of 0.

    Args:
        kind: The optimizer.
        parameter: The parameter.
        group: Torch's settings of the parameter.
    """
    device = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
    live = {"step": torch.zeros((), dtype=torch.float32, device=device)} if kind.counts_steps else {}
    for state, per in kind.states.items():
        value = kind.initial_values.get(state, 0.0)
        if per is NumberPer.PARAMETER:
            live[state] = torch.full((), value, dtype=torch.float32, device=device)
        elif per is NumberPer.ROW:
            live[state] = parameter.detach().new_full((len(parameter), 1), value, dtype=state_dtype(parameter))
        else:
            live[state] = torch.full_like(
                parameter, value, dtype=state_dtype(parameter), memory_format=torch.preserve_format
            )
    return live
