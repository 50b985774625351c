"""Functions that make models and batches, as users of ``distembed plan --model`` have them in files of their own."""

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.partitions import QuotientRemainder

SIZES = {"item": 500, "shop": 90, "words": 240}
LENGTHS = {"item": 1, "shop": 1, "words": 3}
"""Number of ids of every row."""
DIM, NUM_DENSE = 8, 4


def fill_by_row(weight: Tensor) -> None:
    """The same numbers in each column, so that all shards of a table are filled alike."""
    if weight.numel():
        weight.data.copy_(torch.linspace(0, 1, len(weight)).unsqueeze(1).expand_as(weight))


def stock_bags(device: str | None = None, prefix: str = "t", sizes: dict[str, int] = SIZES) -> EmbeddingBagCollection:
    fill = None if device is None else fill_by_row
    configs: list[Any] = [
        EmbeddingBagConfig(size, DIM, f"{prefix}_{name}", feature_names=[name], init_fn=fill)
        for name, size in sizes.items()
    ]
    return EmbeddingBagCollection(tables=configs, device=None if device is None else torch.device(device))


def own_bags(device: str | None = None, prefix: str = "t") -> CompositionalEmbeddingBagCollection:
    make = CompositionalEmbeddingBagConfig
    tables = [make(f"{prefix}_{n}", s, DIM, [n], QuotientRemainder(s, collisions=4)) for n, s in SIZES.items()]
    return CompositionalEmbeddingBagCollection(tables, device=device)


def dlrm(device: str | None = None) -> DLRMTrain:
    bags = stock_bags(device)
    torch.manual_seed(0)
    return DLRMTrain(DLRM(bags, NUM_DENSE, [16, DIM], [16, 1]))


def dcn(device: str | None = None) -> DLRMTrain:
    bags = own_bags(device)
    torch.manual_seed(0)
    return DLRMTrain(DLRM_DCN(bags, NUM_DENSE, [16, DIM], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=4))


class Both(nn.Module):
    """Tables of TorchRec's and compositional ones, of the same features."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.stock, self.own = stock_bags(device, "stock"), own_bags(device, "own")
        torch.manual_seed(0)
        self.over = nn.Linear(NUM_DENSE + 2 * len(SIZES) * DIM, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        vectors = [bags(batch.sparse_features).to_dict()[name] for bags in (self.stock, self.own) for name in SIZES]
        logits = self.over(torch.cat([batch.dense_features, *vectors], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


def both(device: str | None = None) -> Both:
    return Both(device)


def batch(num_rows: int) -> Batch:
    generator = torch.Generator().manual_seed(num_rows)
    ids = [torch.randint(0, size, (num_rows * LENGTHS[name],), generator=generator) for name, size in SIZES.items()]
    lengths = [torch.full((num_rows,), LENGTHS[name]) for name in SIZES]
    features = KeyedJaggedTensor(list(SIZES), torch.cat(ids), lengths=torch.cat(lengths))
    dense = torch.rand(num_rows, NUM_DENSE, generator=generator)
    return Batch(dense, features, torch.randint(0, 2, (num_rows,), generator=generator).float())


def huge() -> DLRMTrain:
    """Tables of 10 TB, placed and moved as if there were a GPU."""
    bags = stock_bags("cuda", sizes={name: 10**11 for name in SIZES})
    return DLRMTrain(DLRM(bags, NUM_DENSE, [16, DIM], [16, 1], dense_device=torch.device("cuda"))).to("cuda")


def large() -> DLRMTrain:
    """Tables of 0.6 GB."""
    return DLRMTrain(DLRM(stock_bags(sizes={name: 6 * 10**6 for name in SIZES}), NUM_DENSE, [16, DIM], [16, 1]))


def collection() -> EmbeddingBagCollection:
    return stock_bags()


def sequences() -> nn.Module:
    config = EmbeddingConfig(name="history", num_embeddings=100, embedding_dim=DIM, feature_names=["item"])
    return nn.ModuleDict({"history": EmbeddingCollection(tables=[config])})


def declared() -> nn.Module:
    made = dlrm()
    apply_optimizer_in_backward(torch.optim.Adagrad, made.model.sparse_arch.parameters(), {"lr": 0.1})
    return made


def declared_apart() -> nn.Module:
    made = dlrm()
    bags = made.model.sparse_arch.embedding_bag_collection.embedding_bags
    apply_optimizer_in_backward(torch.optim.Adagrad, bags["t_item"].parameters(), {"lr": 0.1})
    apply_optimizer_in_backward(torch.optim.SGD, bags["t_shop"].parameters(), {"lr": 0.1})
    return made


def with_sharders() -> tuple[nn.Module, list[Any]]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    return dlrm(), [EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.ADAM})]


def noisy() -> nn.Module:
    print("loading")
    return dlrm()


def nothing() -> None:
    pass


def layers() -> nn.Module:
    return nn.Linear(2, 2)


def broken() -> nn.Module:
    raise KeyError("rows")


def ends() -> nn.Module:
    raise SystemExit(3)


def looks() -> nn.Module:
    return nn.Linear(int(torch.rand(1).item() * 9), 2)


def needs(rows: int) -> nn.Module:
    return dlrm()


def twice() -> nn.Module:
    return nn.ModuleList([stock_bags(), stock_bags()])


def processed() -> nn.Module:
    weighted = EmbeddingBagCollection(tables=stock_bags()._embedding_bag_configs, is_weighted=True)
    positions = PositionWeightedModuleCollection(dict.fromkeys(SIZES, 10))
    return nn.ModuleDict({"bags": FeatureProcessedEmbeddingBagCollection(weighted, positions)})


class _OwnBags(EmbeddingBagCollection):
    pass


def unsharded() -> nn.Module:
    return nn.ModuleDict({"bags": _OwnBags(tables=stock_bags()._embedding_bag_configs)})


def wrong_sharders() -> tuple[nn.Module, list[Any]]:
    return dlrm(), [nn.Linear]


def short_batch(num_rows: int) -> Batch:
    return batch(num_rows - 1)


def no_batch(num_rows: int) -> tuple[int, int]:
    return 1, 2


instance = nn.Linear(2, 2)
