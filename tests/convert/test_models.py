import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.serving.convert import StockCheckpoint, fit_table, from_stock, to_stock
from tests.ranks import run_on_ranks

SIZES = {"C1": 5, "C2": 400, "C3": 61}
DIM = 8


def stock_model(seed: int = 0) -> DLRM:
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(name=f"t_{f}", num_embeddings=n, embedding_dim=DIM, feature_names=[f])
        for f, n in SIZES.items()
    ]
    return DLRM(EmbeddingBagCollection(tables=tables), 3, [16, DIM], [16, 1])


def our_model(partition: str, composition: str = "product", seed: int = 1) -> DLRM:
    torch.manual_seed(seed)
    tables = [CompositionalEmbeddingBagConfig(f"t_{f}", n, DIM, [f], partition, composition) for f, n in SIZES.items()]
    return DLRM(CompositionalEmbeddingBagCollection(tables=tables), 3, [16, DIM], [16, 1])


def batch(seed: int = 0) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(n, (7,), generator=generator) for n in SIZES.values()]
    features = KeyedJaggedTensor(list(SIZES), torch.cat(ids), lengths=torch.ones(7 * len(SIZES), dtype=torch.int32))
    return torch.rand(7, 3, generator=generator), features


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def test_torchrecs_dlrm_there_and_back_is_exact_for_full_tables() -> None:
    stock, ours = stock_model(), our_model("naive")
    errors = from_stock(ours, stock.state_dict())
    assert [(error.table, error.variance_left) for error in errors] == [(f"t_{f}", 0.0) for f in SIZES]
    assert torch.equal(ours(*batch()), stock(*batch()))
    back = to_stock(ours)
    assert set(back) == set(stock.state_dict())
    assert all(same_bits(back[name], value) for name, value in stock.state_dict().items())


@pytest.mark.parametrize("composition", ["product", "sum", "concat"])
def test_networks_are_copied_tables_fitted_and_the_written_stock_model_gives_the_same(composition: str) -> None:
    stock, ours = stock_model(), our_model("quotient_remainder", composition)
    counts = {"t_C2": torch.arange(400)}
    from_stock(ours, stock.state_dict(), counts)
    for name, value in stock.state_dict().items():
        if ".embedding_bags." not in name:
            assert same_bits(ours.state_dict()[name], value)
    collection = ours.sparse_arch.embedding_bag_collection
    for table in collection.tables():
        full = stock.state_dict()[f"sparse_arch.embedding_bag_collection.embedding_bags.{table.name}.weight"]
        alone = fit_table(table, full, counts.get(table.name)).weights
        assert all(torch.equal(a, b) for a, b in zip(alone, collection.weights(table.name), strict=True))
    written = stock_model(seed=5)
    written.load_state_dict(to_stock(ours))
    assert torch.allclose(written(*batch()), ours(*batch()), atol=1e-6)


def test_sequences_are_converted_too() -> None:
    config = EmbeddingConfig(name="t", num_embeddings=40, embedding_dim=4, feature_names=["f"])
    stock = nn.ModuleDict({"e": EmbeddingCollection(tables=[config])})
    ours = nn.ModuleDict(
        {"e": CompositionalEmbeddingCollection([CompositionalEmbeddingConfig("t", 40, 4, ["f"], "naive")])}
    )
    from_stock(ours, stock.state_dict())
    assert same_bits(to_stock(ours)["e.embeddings.t.weight"], stock.state_dict()["e.embeddings.t.weight"])


def save_sharded(rank: int, world_size: int, folder: str) -> None:
    model = DistributedModelParallel(stock_model(), device=torch.device("cpu"))
    # the weights of the unsharded model, which ranks would draw anew
    given = stock_model().state_dict()
    for name, value in model.state_dict().items():
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.detach().copy_(given[name][row : row + rows, column : column + columns])
        else:
            value.copy_(given[name])
    dcp.save({"model": model.state_dict(), "step": 3}, checkpoint_id=folder)
    dist.barrier()


@pytest.mark.distributed
def test_a_sharded_models_checkpoint_is_read_as_users_write_it(tmp_path: Path) -> None:
    run_on_ranks(2, save_sharded, str(tmp_path / "saved"))
    ours = our_model("naive")
    from_stock(ours, tmp_path / "saved")
    back = to_stock(ours)
    assert all(same_bits(back[name], value) for name, value in stock_model().state_dict().items())


@pytest.mark.parametrize("nested", [False, True])
def test_a_file_of_torch_save_is_read_with_or_without_an_outer_dictionary(tmp_path: Path, nested: bool) -> None:
    state = stock_model().state_dict()
    torch.save({"model": state, "epoch": 2} if nested else state, tmp_path / "stock.pt")
    ours = our_model("naive")
    from_stock(ours, tmp_path / "stock.pt")
    assert all(same_bits(to_stock(ours)[name], value) for name, value in state.items())


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('executed')",)


def test_nothing_of_a_foreign_file_is_executed(tmp_path: Path) -> None:
    torch.save({"model": Harmful()}, tmp_path / "stock.pt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Harmful()))
    for name in ("stock.pt", "folder"):
        with pytest.raises(UserError, match="nothing of it was executed"):
            StockCheckpoint(tmp_path / name)
    for name in ("absent", "."):
        with pytest.raises(UserError, match="torch.distributed.checkpoint"):
            StockCheckpoint(tmp_path / name)


def test_names_that_do_not_match_are_told_with_the_nearest() -> None:
    state = stock_model().state_dict()
    ours = our_model("quotient_remainder")
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    table = "sparse_arch.embedding_bag_collection.embedding_bags.t_C3.weight"
    other = table.replace("t_C3", "t_C33")
    misnamed = {name.replace("t_C3.", "t_C33."): value for name, value in state.items()}
    with pytest.raises(UserError, match=rf"{table}, which may be {other} there"):
        from_stock(ours, misnamed)
    with pytest.raises(UserError, match=r"no place:\s+over_arch.extra.weight"):
        from_stock(ours, {**state, "over_arch.extra.weight": torch.zeros(1)})
    with pytest.raises(UserError, match=r"dense_arch.*\(16, 3\) in this model"):
        from_stock(ours, {name: value[:, :2] if value.shape == (16, 3) else value for name, value in state.items()})
    with pytest.raises(UserError, match=r"counts names table 't_C22'.*Did you mean 't_C2'"):
        from_stock(ours, state, {"t_C22": torch.ones(400)})
    with pytest.raises(UserError, match="names has 'spars_arch'"):
        from_stock(ours, state, names={"spars_arch": "x"})
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    errors = from_stock(ours, misnamed, names={table: other})
    assert len(errors) == 3


def test_modules_that_are_called_otherwise_are_named_by_their_beginning() -> None:
    state = {name.replace("over_arch", "top"): value for name, value in stock_model().state_dict().items()}
    ours = our_model("naive")
    from_stock(ours, state, names={"over_arch": "top"})
    assert torch.equal(ours(*batch()), stock_model()(*batch()))


@pytest.mark.parametrize("composition", ["feature", "path_linear"])
def test_what_cannot_be_converted_is_refused_by_name(composition: str) -> None:
    tables = [CompositionalEmbeddingBagConfig("t", 40, DIM, ["f"], "quotient_remainder", composition)]
    ours = nn.ModuleDict({"e": CompositionalEmbeddingBagCollection(tables)})
    with pytest.raises(UserError, match=f"table 't' has composition '{composition}'"):
        from_stock(ours, {"e.embedding_bags.t.weight": torch.zeros(40, DIM)})
    if composition == "feature":
        with pytest.raises(UserError, match="gives an id 2 vectors"):
            to_stock(ours)
    else:
        assert to_stock(ours)["e.embedding_bags.t.weight"].shape == (40, DIM)
