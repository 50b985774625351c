"""The sharder: tells the planner what there is to place, and builds the sharded module from its answer."""

import torch
from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType

from distembed.embedding.bag_collection import CompositionalEmbeddingBagCollection
from distembed.sharding.bag_collection import ShardedCompositionalEmbeddingBagCollection


class CompositionalEmbeddingBagCollectionSharder(BaseEmbeddingSharder[CompositionalEmbeddingBagCollection]):
    """Places each compositional table as a whole, table-wise, in the memory of the device.

    Host memory (UVM) is never used unasked: the only kernel is ``fused``.
    """

    def shard(
        self,
        module: CompositionalEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCompositionalEmbeddingBagCollection:
        """Makes the sharded module; all ranks call it together."""
        return ShardedCompositionalEmbeddingBagCollection(
            module,
            params,
            env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )

    def shardable_parameters(self, module: CompositionalEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """One meta parameter a table, ``[rows of all partitions that hold vectors, embedding_dim]``.

        Functions of path-based tables are replicated: there is nothing to place.
        """
        return {table.name: _unit_of_placement(module, table.name) for table in module.tables()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Table-wise."""
        return [ShardingType.TABLE_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Fused lookup, backward and update in device memory."""
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def module_type(self) -> type[CompositionalEmbeddingBagCollection]:
        """The module that this sharder takes."""
        return CompositionalEmbeddingBagCollection

    @property
    def sharded_module_type(self) -> type[ShardedCompositionalEmbeddingBagCollection]:
        """The module that this sharder makes."""
        return ShardedCompositionalEmbeddingBagCollection


def _unit_of_placement(module: CompositionalEmbeddingBagCollection, name: str) -> nn.Parameter:
    (table,) = (table for table in module.tables() if table.name == name)
    looked_up = table.lookup_tables()
    weight = module.embedding_bags[looked_up[0].name].weight
    assert isinstance(weight, nn.Parameter)
    shape = (sum(part.num_rows for part in looked_up), table.embedding_dim)
    unit = nn.Parameter(torch.empty(shape, device="meta", dtype=weight.dtype))
    # the planner counts optimizer state from these attributes alone
    for attribute in ("_optimizer_classes", "_optimizer_kwargs"):
        if hasattr(weight, attribute):
            setattr(unit, attribute, getattr(weight, attribute))
    return unit
