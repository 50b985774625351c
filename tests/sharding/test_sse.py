"""Ids replaced in the input dist, on two ranks: what every slice and owner of a table sees, and when."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.reader.batch import Batch
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.embedding.config import perturbation
from distembed.sharding.shardings import SEQUENCE_SHARDING_TYPES
from distembed.sse import SSE, Graph, set_step, take_counts
from tests.ranks import run_on_ranks
from tests.sharding import test_pipelines as pipelines
from tests.sharding import test_sequences as sequences
from tests.sharding import test_sharded_equals_unsharded as bags

RATE = {"lr": 0.1}


def with_sse(tables: Sequence[Any], p0: float = 0.4) -> list[Any]:
    """The same tables, their ids replaced: along a ring in the first one, elsewhere by any but id 0."""
    rules: list[SSE] = []
    for i, table in enumerate(tables):
        ids = torch.arange(1, table.num_embeddings)
        ring = Graph.from_edges(table.num_embeddings, ids, ids.roll(1)) if i == 0 else None
        rules.append(
            SSE(p0, rho=1.0 if ring is None else 1e3, graph=ring, reserved=[0] if table.num_embeddings > 2 else [])
        )
    return [dataclasses.replace(table, sse=rule) for table, rule in zip(tables, rules, strict=True)]


def replaced(tables: Sequence[CompositionalEmbeddingConfig], features: KeyedJaggedTensor, rank: int, step: int) -> Any:
    """The batch as the rank's input dist is to see it: ids in their tables, replaced by the numbers of the step."""
    module = perturbation(tables, rank)
    set_step(module, step)
    own = {name: table.ids_of(name) for table in tables for name in table.feature_names}
    pieces = dict(zip(features.keys(), features.values().split(features.length_per_key()), strict=True))
    moved = torch.cat([ids % own[key].num_ids + own[key].first for key, ids in pieces.items()])
    moved = module(KeyedJaggedTensor(features.keys(), moved, lengths=features.lengths(), stride=features.stride()))
    # the ids of features again, as a batch has them
    pieces = dict(zip(features.keys(), moved.values().split(features.length_per_key()), strict=True))
    inside = torch.cat([ids - own[key].first for key, ids in pieces.items()])
    return KeyedJaggedTensor(features.keys(), inside, lengths=features.lengths(), stride=features.stride())


def check_bags(rank: int, world_size: int, sharding_type: str) -> None:
    """Training on two ranks is that of the unsharded model on batches replaced beforehand, of each rank by itself."""
    tables = with_sse(bags.tables())
    reference, unsharded = bags.Head("cpu"), bags.Head("meta")
    unsharded.embeddings = CompositionalEmbeddingBagCollection(tables, device="meta")
    model = bags.shard(unsharded, torch.optim.SGD, RATE, sharding_type)
    sparse = torch.optim.SGD(reference.embeddings.embedding_bags.parameters(), **RATE)
    dense = {key: weight for key, weight in model.named_parameters() if not key.startswith("embeddings.embedding_bags")}
    alone = list(model.parameters())
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        batches = [bags.draw(rows, "ragged", generator) for rows in (40, 25)]
        perturbed = [replaced(tables, batch, r, step) for r, batch in enumerate(batches)]
        assert all((a.values() != b.values()).any() for a, b in zip(batches, perturbed, strict=True))
        outputs = [reference(batch) for batch in perturbed]
        output, values = model(batches[rank])
        torch.testing.assert_close(values, outputs[rank][1])
        (output.square().sum() * world_size / 65).backward()
        (sum(one.square().sum() for one, _ in outputs) / 65).backward()
        sparse.step()
        for weight in alone:
            if weight.grad is not None:  # not fused: replicated, or the network's
                weight.data.sub_(weight.grad, alpha=RATE["lr"])
        for key, weight in reference.named_parameters():
            if key in dense:
                weight.data.sub_(weight.grad, alpha=RATE["lr"])
        reference.zero_grad()
        model.zero_grad()
    bags.check_weights(model, reference)
    check_counts(model)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batches[rank])[1], reference(batches[rank])[1])
    assert not any(seen for _, seen in take_counts(model).values())


def check_counts(model: nn.Module) -> None:
    """About 0.4 of the ids of all tables but those with a single id."""
    counts = take_counts(model)
    assert counts.pop("o")[0] == 0
    drawn, seen = (sum(count[i] for count in counts.values()) for i in (0, 1))
    assert abs(drawn - 0.4 * seen) < 5 * (0.24 * seen) ** 0.5


def check_sequences(rank: int, sharding_type: str) -> None:
    tables = with_sse(sequences.tables())
    reference, unsharded = sequences.Head("cpu"), sequences.Head("meta")
    unsharded.embeddings = CompositionalEmbeddingCollection(tables, device="meta", need_indices=True)
    model = sequences.shard(unsharded, torch.optim.SGD, RATE, sharding_type)
    generators = [torch.Generator().manual_seed(r) for r in range(2)]
    for step in range(2):
        batch = [sequences.draw([3, 0, 4, 1], generator) for generator in generators][rank]
        perturbed = replaced(tables, batch, rank, step)
        with torch.no_grad():
            (_, ragged), (_, expected) = model(batch), reference(perturbed)
            for key, jagged in expected.items():
                torch.testing.assert_close(ragged[key].values(), jagged.values())
                own = batch[key]  # the ids that an output names are the batch's own
                assert torch.equal(ragged[key].weights(), own.values())
    model.eval()
    with torch.no_grad():
        for key, jagged in reference(batch)[1].items():
            torch.testing.assert_close(model(batch)[1][key].values(), jagged.values())


def clicks(tables_on: str, world_size: int) -> Any:
    task = pipelines.task(tables_on, world_size)
    task.model.embeddings = CompositionalEmbeddingBagCollection(with_sse(bags.tables()), device=tables_on)
    return task


def check_pipelines(rank: int) -> None:
    """However far a pipeline works ahead, a batch is replaced by the numbers of its own step; none is in evaluation."""
    tables = with_sse(bags.tables())
    batches = pipelines.draw_batches("ragged")
    for_ranks = [
        [pipelines.rows_of_rank(b, r, split) for b, split in zip(batches, pipelines.SPLITS, strict=True)]
        for r in (0, 1)
    ]
    reference = pipelines.task("cpu", 1)
    expected = train_on_replaced(reference, tables, for_ranks)
    reference.eval()
    with torch.no_grad():
        _, (_, unsharded) = reference(for_ranks[rank][0])
    for make in pipelines.PIPELINES:
        model = pipelines.shard(clicks("meta", 2), "mixed")
        pipeline = make(model, pipelines.optimizer_of(model), pipelines.CPU)
        losses = pipelines.losses_of(pipelines.run(pipeline, for_ranks[rank]))
        assert losses == pytest.approx(expected, rel=1e-5)
        model.eval()
        with torch.no_grad():
            ((_, outputs),) = pipelines.run(pipeline, for_ranks[rank][:1])
        torch.testing.assert_close(outputs["logits"], unsharded["logits"])
    check_early_evaluation(for_ranks[rank])
    check_looked_up_early(for_ranks[rank])
    check_resumed(for_ranks[rank], expected)


def train_on_replaced(model: Any, tables: Sequence[Any], for_ranks: Sequence[Sequence[Batch]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=pipelines.RATE)
    losses = []
    for step, parts in enumerate(zip(*for_ranks, strict=True)):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for rank, batch in enumerate(parts):
            features = replaced(tables, batch["sparse_features"], rank, step)
            loss = loss + model(Batch({**batch.fields, "sparse_features": features}, batch.global_batch_size))[0]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_early_evaluation(own: Sequence[Batch]) -> None:
    """Batches that a pipeline has prepared in training are refused in evaluation, rather than scored with other ids."""
    model = pipelines.shard(clicks("meta", 2), "mixed")
    pipeline = pipelines.TrainPipelineSparseDist(model, pipelines.optimizer_of(model), pipelines.CPU)
    pipeline.progress(iter(own))
    model.eval()
    with torch.no_grad(), pytest.raises(UserError, match=r"evaluation mode.*until it is empty"):
        pipeline.progress(iter(own))


def check_looked_up_early(own: Sequence[Batch]) -> None:
    """The same where a pipeline looks the next batch up within the step before, and only waits for it later."""
    for model, module in ((clicks("meta", 2), "model.embeddings"), (with_sequences(), "embeddings")):
        sharded = (
            pipelines.shard(model, "mixed")
            if module.startswith("model")
            else sequences.shard(model, torch.optim.SGD, RATE, "table_wise")
        )
        embeddings = sharded.module.get_submodule(module)
        features = (
            own[2]["sparse_features"] if module.startswith("model") else sequences.draw([2, 1], torch.Generator())
        )
        context = embeddings.create_context()
        awaited = embeddings.compute_and_output_dist(context, embeddings.input_dist(context, features).wait().wait())
        sharded.eval()
        with pytest.raises(UserError, match="until it is empty"):
            awaited.wait()


def with_sequences() -> Any:
    model = sequences.Head("meta")
    model.embeddings = CompositionalEmbeddingCollection(with_sse(sequences.tables()), device="meta", need_indices=True)
    return model


def check_resumed(own: Sequence[Batch], expected: Sequence[float]) -> None:
    """Steps from the third on, of a model that has the weights of the whole run after two."""
    whole, resumed = (pipelines.shard(clicks("meta", 2), "mixed") for _ in range(2))
    pipeline = pipelines.TrainPipelineSparseDist(whole, pipelines.optimizer_of(whole), pipelines.CPU)
    pipelines.run(pipeline, own[:2])
    resumed.load_state_dict(dict(whole.state_dict()))
    set_step(resumed, 2)
    pipeline = pipelines.TrainPipelineSparseDist(resumed, pipelines.optimizer_of(resumed), pipelines.CPU)
    rest = pipelines.losses_of(pipelines.run(pipeline, own[2:]))
    assert rest == pytest.approx(expected[2:], rel=1e-5)


def check_layouts(rank: int, world_size: int, of_bags: list[str], of_sequences: list[str]) -> None:
    for sharding_type in of_bags:
        check_bags(rank, world_size, sharding_type)
    for sharding_type in of_sequences:
        check_sequences(rank, sharding_type)
    check_pipelines(rank)
    dist.barrier()


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("of_bags", "of_sequences"),
    [
        pytest.param(["column_wise", "row_wise"], ["row_wise"], id=""),
        pytest.param(bags.SHARDING_TYPES, SEQUENCE_SHARDING_TYPES, id="all", marks=pytest.mark.slow),
    ],
)
def test_ids_are_replaced_once_before_they_are_sent(of_bags: list[str], of_sequences: list[str]) -> None:
    run_on_ranks(2, check_layouts, of_bags, of_sequences)


def test_an_unsharded_collection_replaces_the_same_ids() -> None:
    tables = with_sse(bags.tables())
    plain = CompositionalEmbeddingBagCollection(bags.tables())
    module = CompositionalEmbeddingBagCollection(tables)
    assert module.state_dict().keys() == plain.state_dict().keys()
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        batch = bags.draw(30, "ragged", generator)
        before = batch.values().clone()
        torch.testing.assert_close(module(batch).values(), plain(replaced(tables, batch, 0, step)).values())
        assert torch.equal(batch.values(), before)
    module.eval()
    assert torch.equal(module(batch).values(), plain(batch).values())
