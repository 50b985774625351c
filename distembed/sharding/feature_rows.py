"""Maps the ids of several features to rows, without a wait: the constants are on the GPU before the second step.

A GPU that is handed a list, or asked for a number, stops the step until it has done all that came before. So numbers of
ids are kept on both sides, and the constants of the partitions are copied to the device once.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Int, Int64
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.partitions import Partition


class IdCounts:
    """How many ids each feature has: on the host, where shapes follow from it, and on the ids' device.

    Args:
        on_host: Number of ids of each feature.
        lengths: Lengths of all bags, feature after feature; as many bags of each.
    """

    def __init__(self, on_host: Sequence[int], lengths: Int[Tensor, " bags"]) -> None:
        self.on_host = on_host
        self._lengths = lengths

    @classmethod
    def of_batch(cls, features: KeyedJaggedTensor) -> "IdCounts":
        """Returns the numbers of ids of a batch, which TorchRec has brought to the host with the batch itself."""
        return cls(features.length_per_key(), features.lengths())

    @cached_property
    def on_device(self) -> Int64[Tensor, " features"]:
        """The same on the device of the ids."""
        if self._lengths.device.type == "cpu":
            return torch.tensor(self.on_host)
        return self._lengths.view(len(self.on_host), -1).sum(1)

    @property
    def total(self) -> int:
        """Number of ids of all features."""
        return sum(self.on_host)

    @property
    def is_uniform(self) -> bool:
        """Whether all features have equally many ids."""
        return len(set(self.on_host)) == 1

    def of_each_id(self, numbers: Int64[Tensor, "*k features"]) -> Int64[Tensor, "*k ids"]:
        """Returns each id's entry of numbers that there are for each feature."""
        return numbers.repeat_interleave(self.on_device, dim=-1, output_size=self.total)


class FeatureRows:
    """Maps ids to their rows in all partitions, for features whose tables have one scheme.

    Args:
        partitions: Scheme of each feature's table; all of one class, and with equally many partitions.
    """

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self._partitions = list(partitions)
        self._scheme = type(self._partitions[0])
        self._constants = self._scheme.constants(self._partitions)

    def __call__(self, ids: Int64[Tensor, " ids"], counts: IdCounts) -> Int64[Tensor, "k ids"]:
        """Returns the row of each id in each partition, contiguous."""
        # broadcasting may return rows with gaps, as of single ids; operators read an address and a number of elements
        return self._map(ids, counts).contiguous()

    def _map(self, ids: Int64[Tensor, " ids"], counts: IdCounts) -> Int64[Tensor, "k ids"]:
        if self._constants is None:
            return self._by_table(ids, counts)
        if self._constants.device != ids.device:
            self._constants = self._constants.to(ids.device)  # once
        if counts.is_uniform:
            by_feature = ids.view(len(self._partitions), -1)
            return self._scheme.rows_by_constants(by_feature, self._constants.unsqueeze(2)).flatten(1)
        if ids.device.type == "cpu":  # a division by one number takes less than one by a tensor
            return self._by_table(ids, counts)
        return self._scheme.rows_by_constants(ids, counts.of_each_id(self._constants))

    def _by_table(self, ids: Int64[Tensor, " ids"], counts: IdCounts) -> Int64[Tensor, "k ids"]:
        """Does the same table by table."""
        if counts.is_uniform:
            return self._scheme.rows_of_tables(self._partitions, ids.view(len(self._partitions), -1)).flatten(1)
        by_feature = zip(self._partitions, ids.split(list(counts.on_host)), strict=True)
        return torch.cat([partition.rows(own) for partition, own in by_feature], dim=1)
