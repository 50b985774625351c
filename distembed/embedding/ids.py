"""Checks that ids lie inside their tables, before they index anything."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.errors import UserError

_NO_LIMIT = 2**63 - 1


def check_ids(features: KeyedJaggedTensor, num_embeddings: Mapping[str, int]) -> None:
    """Raises if an id of a feature is below 0 or not below the feature's number of ids; other features may hold any.

    On the CPU the error is a :class:`UserError` that names feature, position and value. On a GPU the check runs
    asynchronously, so as not to stop the stream, and fails as a device-side assertion.
    """
    values = features.values()
    if values.numel() == 0:
        return
    lengths = features.length_per_key()
    limits = torch.tensor([num_embeddings.get(key, _NO_LIMIT) for key in features.keys()], device=values.device)
    if len(set(lengths)) == 1:
        outside = _outside(values.view(len(lengths), -1), limits.unsqueeze(1)).view(-1)
    else:
        counts = torch.tensor(lengths, device=values.device)
        outside = _outside(values, torch.repeat_interleave(limits, counts, output_size=values.numel()))
    if values.device.type != "cpu":
        torch._assert_async(~outside.any())
    elif outside.any():
        _raise_first(features, num_embeddings, int(outside.nonzero()[0]))


def _outside(values: Tensor, limits: Tensor) -> Tensor:
    return (values < 0) | (values >= limits)


def _raise_first(features: KeyedJaggedTensor, num_embeddings: Mapping[str, int], index: int) -> None:
    start = 0
    for key, length in zip(features.keys(), features.length_per_key(), strict=True):
        if index < start + length:
            raise UserError(
                f"feature {key!r}: the id at position {index - start} of the batch's {length} is "
                f"{int(features.values()[index])}; ids lie between 0 and {num_embeddings[key] - 1} "
                f"(num_embeddings={num_embeddings[key]}). Map unseen values to an out-of-vocabulary id, "
                "or make the table larger."
            )
        start += length
