"""Whether the inputs of a program belong together; a program itself does not look."""

from collections.abc import Sequence

from torch import Tensor

_BATCH_DIMS = {"lengths": 1, "dense": 0, "vectors": 0}


def require_same_rows(names: Sequence[str], inputs: Sequence[Tensor]) -> None:
    """Makes sure that all inputs have the same number of rows.

    Args:
        names: Names of the inputs, in their order.
        inputs: The inputs.

    Raises:
        ValueError: They have not.
    """
    rows = {name: own.shape[_BATCH_DIMS[name]] for name, own in zip(names, inputs, strict=True) if name in _BATCH_DIMS}
    if len(set(rows.values())) > 1:
        raise ValueError(f"the inputs have different numbers of rows: {rows}")
