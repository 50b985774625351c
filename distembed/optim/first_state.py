"""The states that torch's optimizers make at their first step, made before it, so that they can be read and set."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from distembed.optim.float_copies import state_dtype
from distembed.optim.kinds import NumberPer, OptimizerKind


def first_state(kind: OptimizerKind, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the states that torch makes at the first step; a step with gradients of zero would also change weights.

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
