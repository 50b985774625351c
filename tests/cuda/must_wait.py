"""What a step has to wait for: the short list, with the reasons.

All of it is TorchRec's own, in the dist of ids, which TorchRec's pipelines run on a stream of their own a step ahead:
the host then waits for the ids of the next batch, not for the network of this one. Each entry is a function of
TorchRec's, and its reason; what distembed does itself must not wait at all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torchrec.sparse.jagged_tensor as jagged
from torchrec.distributed import embedding_sharding
from torchrec.distributed.dist_data import SplitsAllToAllAwaitable

WAITS = {
    "SplitsAllToAllAwaitable._wait_impl": (
        "how many ids come from each rank decides how large the tensors are that they are received in"
    ),
    "FusedKJTListSplitsAwaitable.__init__": (
        "in a pipeline TorchRec looks for overflows in what it is about to exchange; from release 1.8 on"
    ),
    "_maybe_compute_length_per_key": (
        "how many ids of each feature have come (KeyedJaggedTensor.sync), and, where ids are sent to the owners of "
        "their rows, how many go to each: nobody but the device knows it"
    ),
}
"""Functions of TorchRec's that wait, and why."""

COPIES = {
    "KJTAllToAllSplitsAwaitable.__init__": "numbers of ids for each rank, which the ranks exchange",
    "KJTAllToAllForward.__call__": "the same, in a pipeline",
    "_get_recat": "the order in which features are received, made for each batch",
    "KeyedJaggedTensor.permute": "the order of features, made once by our modules and for each batch by others",
    "KeyedJaggedTensor.dist_tensors": "numbers of bags, in variable batches",
    "bucketize_kjt_before_all2all": "sizes of blocks",
}
"""Functions of TorchRec's that copy a few numbers to the device, and which."""


def copied_by_torchrec(origin: str) -> bool:
    """Returns whether a copy to the device, made in a file and a function, is one of :data:`COPIES`."""
    where, name = origin.rsplit(" ", 1)
    return "/torchrec/" in where and name.split(".<locals>")[0] in COPIES


@contextmanager
def answered(num_ids: Callable[[str], int], waited: list[str]) -> Iterator[None]:
    """Within the block what TorchRec waits for is answered, as if all ranks had batches like this one.

    Args:
        num_ids: Returns the number of ids that a rank's batch has of a feature.
        waited: Gets the name of each function that waited.
    """
    sent: dict[int, list[list[int]]] = {}
    stock_init, stock_lengths = SplitsAllToAllAwaitable.__init__, jagged._maybe_compute_length_per_key

    def splits(awaitable: Any) -> list[list[int]]:
        waited.append("SplitsAllToAllAwaitable._wait_impl")
        return [[own[0]] * len(own) for own in sent.pop(id(awaitable))]

    def lengths(keys: Sequence[str], *others: Any, **named: Any) -> list[int]:
        given = named["length_per_key"] if "length_per_key" in named else others[3]
        values = named["values"] if "values" in named else others[6]
        if given is not None or values is None or values.device.type != "cuda":
            return stock_lengths(keys, *others, **named)
        waited.append("_maybe_compute_length_per_key")
        counts = [num_ids(key) for key in keys]
        whole, total = sum(counts), values.numel()
        assert whole == 0 or all(count * total % whole == 0 for count in counts), (keys, counts, total)
        return [count * total // whole if whole else 0 for count in counts]

    def init(awaitable: Any, input_tensors: Sequence[Any], *others: Any, **named: Any) -> None:
        sent[id(awaitable)] = [tensor.made_of for tensor in input_tensors]
        stock_init(awaitable, input_tensors, *others, **named)

    def sent_numbers(tensor: Any) -> list[int]:
        waited.append("FusedKJTListSplitsAwaitable.__init__")
        return list(tensor.made_of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_sharding, "_safe_tolist", sent_numbers, raising=False)
        patch.setattr(SplitsAllToAllAwaitable, "__init__", init)
        patch.setattr(SplitsAllToAllAwaitable, "_wait_impl", splits)
        patch.setattr(jagged, "_maybe_compute_length_per_key", lengths)
        yield
