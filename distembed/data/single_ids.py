"""A mark on a batch, set before it is on a GPU: no bag has more than one id.

Marked batches need no pooling of composed vectors. To find this out from a batch on a GPU, the host would wait for the
GPU, and each rank looks up the bags of all ranks. The reader therefore sets the mark while the batch is on the CPU.
"""

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError

_MARK = "_distembed_has_single_ids"


def mark_single_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Marks a batch on the CPU, and returns it; the mark promises that no bag of any rank's batches has two ids."""
    lengths = features.lengths()
    if len(lengths) and (most := int(lengths.max())) > 1:
        law = "mark_single_ids is for batches whose bags have at most one each. Leave others unmarked."
        raise UserError(f"a bag of the batch has {most} ids; {law}")
    setattr(features, _MARK, True)
    return features


def has_single_ids(features: KeyedJaggedTensor) -> bool:
    """Returns whether a batch is marked."""
    return getattr(features, _MARK, False)


def carry_single_ids(before: KeyedJaggedTensor, after: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Marks a copy of a batch as the batch is, and returns it."""
    setattr(after, _MARK, has_single_ids(before))
    return after
