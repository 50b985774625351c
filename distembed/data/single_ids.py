"""A mark on a batch, set before it is on a GPU: no bag has more than one id.

Where it is known, composed vectors need no pooling. A GPU would have to be waited for to find it out, and each rank has
the bags of all others to look up; so it is said of the data, not found in a batch.
"""

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError

_MARK = "_distembed_has_single_ids"


def mark_single_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Says of a batch on the CPU, and so of all batches of all ranks, that no bag has more than one id; returns it.

    Sharded compositional tables on a GPU then compose each bag's id without pooling. They stop to do so as soon as any
    batch of a rank comes without the mark.

    Raises:
        UserError: A bag of this batch has more than one id.
    """
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
