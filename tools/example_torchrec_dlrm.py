"""TorchRec's own DLRM and DLRM_DCN with compositional tables: three changed lines of a TorchRec script.

::

    python tools/example_torchrec_dlrm.py
    torchrun --nproc-per-node 2 tools/example_torchrec_dlrm.py

Each comment "instead of" names the class that a TorchRec script has there. The data are random: every item is clicked
either always or never, which only the item's embedding can learn. The script prints the loss of the global batch, which
is equal on 1, 2 and 4 ranks.
"""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.partitions import QuotientRemainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder

NUM_IDS = {"item": 2_000, "shop": 300, "words": 1_000}
DIM, NUM_DENSE, GLOBAL_BATCH, NUM_STEPS = 16, 4, 256, 40
ADAGRAD = {"lr": 0.05, "eps": 1e-8}


def make_model(name: str = "dlrm", device: torch.device | str = "meta") -> DLRMTrain:
    """Returns the model ``dlrm`` or ``dlrm_dcn``, with its tables on the device."""
    tables = [
        CompositionalEmbeddingBagConfig(  # instead of EmbeddingBagConfig
            name=f"t_{feature}",
            num_embeddings=num_ids,
            embedding_dim=DIM,
            feature_names=[feature],
            partition=QuotientRemainder(num_ids, collisions=4),  # a quarter of the rows, and 4 more
        )
        for feature, num_ids in NUM_IDS.items()
    ]
    collection = CompositionalEmbeddingBagCollection(tables=tables, device=device)  # instead of EmbeddingBagCollection
    torch.manual_seed(0)
    if name == "dlrm":
        return DLRMTrain(DLRM(collection, NUM_DENSE, [32, DIM], [32, 1]))
    return DLRMTrain(DLRM_DCN(collection, NUM_DENSE, [32, DIM], [32, 1], dcn_num_layers=2, dcn_low_rank_dim=8))


def shard(model: nn.Module, plan: ShardingPlan | None = None) -> DistributedModelParallel:
    """Returns the model sharded by a plan, TorchRec's planner's unless given; all ranks call it.

    The backward pass updates the tables.
    """
    tables = model.model.sparse_arch.embedding_bag_collection.embedding_bags
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), dict(ADAGRAD))  # a copy: TorchRec changes it
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=plan,
        sharders=[CompositionalEmbeddingBagCollectionSharder()],  # instead of EmbeddingBagCollectionSharder
    )


def random_batches(rank: int, world_size: int) -> Iterator[Batch]:
    """Yields this rank's rows of every global batch: one item, one shop, and 0 to 5 words each."""
    generator = torch.Generator().manual_seed(0)
    taste = torch.randn(NUM_IDS["item"], generator=generator)
    start, stop = (GLOBAL_BATCH * r // world_size for r in (rank, rank + 1))
    for _ in range(NUM_STEPS):
        dense = torch.rand(GLOBAL_BATCH, NUM_DENSE, generator=generator)
        bags = {}
        for feature, num_ids in NUM_IDS.items():
            longest = 5 if feature == "words" else 1
            lengths = torch.randint(0 if longest > 1 else 1, longest + 1, (GLOBAL_BATCH,), generator=generator)
            # products of two uniform numbers, so that most ids are small
            uniform = torch.rand(2, int(lengths.sum()), generator=generator).prod(dim=0)
            bags[feature] = (uniform * num_ids).long().split(lengths.tolist())
        labels = taste[torch.cat(bags["item"])] > 0
        local = [bag for feature_bags in bags.values() for bag in feature_bags[start:stop]]
        features = KeyedJaggedTensor(
            keys=list(bags), values=torch.cat(local), lengths=torch.tensor([len(bag) for bag in local])
        )
        yield Batch(dense[start:stop], features, labels[start:stop])


def train(model: DistributedModelParallel) -> list[float]:
    """Trains the model and returns the losses of the global batches; all ranks call it."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, **ADAGRAD),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    losses = []
    for batch in random_batches(dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        global_loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(global_loss)
        losses.append(global_loss.item())
    return losses


def main() -> None:
    """Trains both models on the launched ranks."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in ("dlrm", "dlrm_dcn"):
        losses = train(shard(make_model(name, device="meta")))
        if dist.get_rank() == 0:
            for step in range(0, NUM_STEPS, 5):
                print(f"{name} step {step} loss {losses[step]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
