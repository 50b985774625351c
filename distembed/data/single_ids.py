"""A mark on a batch, set before it is on a GPU: no bag has more than one id.

Marked batches need no pooling of composed vectors. To find this out from a batch on a GPU, the host would wait for the
GPU, and each rank looks up the bags of all ranks. The reader therefore sets the mark while the batch is on the CPU.
"""

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError

_MARK = "_distembed_has_single_ids"


def mark_single_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Marks a batch on the CPU, and returns it; a UserError if a bag has two or more ids, or values end in padding.

    Only this batch is checked, but the mark is a promise for every rank's batch of the step, since lookups rely on it.
    """
    lengths = features.lengths()
    if len(lengths) and (most := int(lengths.max())) > 1:
        law = "mark_single_ids is for batches whose bags have at most one each. Leave others unmarked."
        raise UserError(f"a bag of the batch has {most} ids; {law}")
    if (num_values := features.values().numel()) != (num_ids := int(lengths.sum())):
        raise UserError(
            f"the batch has {num_values} values, and lengths of {num_ids} ids; cut values={num_values} to {num_ids}, "
            "as lookups of marked batches read all values as ids."
        )
    setattr(features, _MARK, True)
    return features


def has_single_ids(features: KeyedJaggedTensor) -> bool:
    """Returns whether a batch is marked."""
    return getattr(features, _MARK, False)


def carry_single_ids(before: KeyedJaggedTensor, after: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Copies the mark, or its absence, from a batch to another object with the same ids, and returns the latter."""
    setattr(after, _MARK, has_single_ids(before))
    return after
