"""Programs that recommend items against a ranking by NumPy, of the trained model's own queries and item vectors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import COMPOSITIONS
from distembed.data.dataset.schema import ITEM, ITEM_NEGATIVE, ITEM_TARGET, USER
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.models import MF, Model
from distembed.models.gru import RecurrentStates
from distembed.models.hstu import PointwiseTransformer
from distembed.models.next_items import ItemCollections, NextItems, NextItemsWithNumbers, TokenVectors
from distembed.models.sasrec import CausalTransformer
from distembed.models.soft_one_hot import SoftOneHot
from distembed.partitions import PARTITIONS, KeyedHash
from distembed.serving.export import recommenders
from distembed.serving.export.feature_vectors import PlainFeature
from distembed.serving.export.programs import ANY, BATCH, ProgramInputs, save_program
from distembed.serving.export.recommenders import RecommendingModel
from distembed.serving.export.table_groups import ExportStorage, Materialise
from distembed.serving.model_folder.manifest import Precision
from distembed.serving.model_folder.programs import Program, load_program
from tests.exporting.test_programs import partition, rounded

NUM_ITEMS, NUM_USERS, DIM, MOST, BEST = 61, 23, 4, 5, 7
RESERVED = (0, 1)
LENGTHS = (3, 0, 1, MOST, 12, 58)
"""Items of the rows: none, one, more than the network sees, and all but three."""
MODELS = ("sasrec", "sasrec_untied", "hstu", "hstu_times", "gru", "gru_beside", "gru_numbers", "mf", "mf_lists")
ITEM_COMPOSITIONS = [name for name in COMPOSITIONS if name != "feature"]
"""An item has one vector."""


def table(name: str, size: int, scheme: str, composition: str, features: list[str], **more: Any) -> Any:
    own, combine = partition(scheme, size), COMPOSITIONS[composition]()
    return CompositionalEmbeddingConfig(name, size, DIM, features, own, combine, **more)


def collection(*tables: CompositionalEmbeddingConfig) -> nn.Module:
    return CompositionalEmbeddingCollection(tables)


def recommender(name: str, scheme: str = "quotient_remainder", composition: str = "product", **more: Any) -> Model:
    """Returns a model with weights that are drawn, all of which its scores depend on."""
    torch.manual_seed(len(name))
    items = table(ITEM, NUM_ITEMS, scheme, composition, [ITEM, ITEM_TARGET], **more)
    model: Model
    if name.startswith("mf"):
        users = table(USER, NUM_USERS, scheme, composition, [USER])
        items = table(ITEM, NUM_ITEMS, scheme, composition, [ITEM, ITEM_NEGATIVE], **more)
        if name == "mf":
            bags = [
                CompositionalEmbeddingBagConfig(
                    own.name, own.num_embeddings, DIM, own.feature_names, own.partition, own.composition
                )
                for own in (users, items)
            ]
            model = MF(CompositionalEmbeddingBagCollection(bags), True, bags[1])
        else:
            model = MF(collection(users, items), False, items, biases=False)
    else:
        kinds = table("kind", 9, "naive" if scheme == "naive" else "quotient_remainder", "sum", ["kind"])
        beside = [kinds] if name == "gru_beside" else []
        outputs = table("item_output", NUM_ITEMS, scheme, composition, [ITEM_TARGET], **more)
        if name == "sasrec_untied":
            alone = table(ITEM, NUM_ITEMS, scheme, composition, [ITEM], **more)
            collections = ItemCollections(collection(alone), collection(outputs), outputs, MOST)
        else:
            collections = ItemCollections(collection(items, *beside), None, items, MOST)
        states: nn.Module = RecurrentStates(DIM, 6, MOST, 2, 0.0)
        if name.startswith("sasrec"):
            states = CausalTransformer(DIM, MOST, 2, 2, 0.0)
        elif name.startswith("hstu"):
            states = PointwiseTransformer(DIM, MOST, 2, 2, 0.0, has_times=name == "hstu_times")
        names = [own.name for own in beside]
        if name == "gru_numbers":
            encode = SoftOneHot(2, 5, DIM, value_range=(0.0, 9.0))
            model = NextItemsWithNumbers(collections, states, TokenVectors(DIM, [], ["time", "price"], encode), True)
        elif name == "hstu_times":
            model = NextItemsWithNumbers(collections, states, TokenVectors(DIM), bias=True, times="time")
        else:
            model = NextItems(collections, states, TokenVectors(DIM, names), bias=True)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.7)
    return model.eval()


def exported(model: Model, num_best: int = BEST) -> RecommendingModel:
    make = RecommendingModel.for_rankings if isinstance(model, MF) else RecommendingModel.for_next_items
    return make(model, RESERVED, num_best)


def rows(lengths: tuple[int, ...] = LENGTHS) -> list[NDArray[np.int64]]:
    """Returns the items of each row, which are distinct."""
    rng = np.random.default_rng(1)
    return [2 + rng.permutation(NUM_ITEMS - 2)[:length] for length in lengths]


def numbers_of(items: list[NDArray[np.int64]]) -> dict[str, list[NDArray[np.float32]]]:
    """Returns numbers beside the items: times, whose gaps have many buckets, and prices, of which some are missing."""
    return {
        "time": [np.cumsum(2.0 ** (own % 11)).astype(np.float32) for own in items],
        "price": [np.where(own % 5 == 0, np.nan, own % 8).astype(np.float32) for own in items],
    }


def inputs(model: RecommendingModel, items: list[NDArray[np.int64]]) -> ProgramInputs:
    """Returns the inputs of a program: the items, users by their places, and of what is beside items a function."""
    lists: dict[str, list[NDArray[np.int64]]] = {
        ITEM: items,
        USER: [np.array([place % NUM_USERS]) for place in range(len(items))],
        "kind": [own % 9 for own in items],
    }
    chosen = [lists[feature.name] for feature in model.features]
    values = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(own for each in chosen for own in each)]))
    lengths = torch.tensor([[len(own) for own in each] for each in chosen], dtype=torch.int64)
    lengths = lengths.view(len(chosen), len(items))
    found = ProgramInputs({"values": values, "lengths": lengths}, {"values": {0: ANY}, "lengths": {1: BATCH}})
    if not model.sequences:
        return found
    numbers = [each for sequence in model.sequences for each in numbers_of(items)[sequence.name]]
    sequences = torch.from_numpy(np.concatenate([np.empty(0, np.float32), *numbers]))
    return ProgramInputs({**found.tensors, "sequences": sequences}, {**found.dynamic, "sequences": {0: ANY}})


@torch.no_grad()
def all_scores(model: Model, items: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Returns the scores of all items for each row by the model's own forward, and by products of NumPy."""
    if isinstance(model, MF):
        users, none = np.arange(len(items)) % NUM_USERS, np.zeros(len(items))
        every = {USER: users, ITEM: none, ITEM_NEGATIVE: none}
        ids = torch.from_numpy(np.concatenate(list(every.values()))).long()
        queries = model(KeyedJaggedTensor(list(every), ids, lengths=torch.ones(len(ids), dtype=torch.int32)))
    else:
        counts = np.array([len(own) for own in items])
        shown = {ITEM: items, "kind": [own % 9 for own in items], ITEM_TARGET: [np.array([2])] * len(items)}
        values = np.concatenate([own for each in shown.values() for own in each])
        lengths = np.concatenate([counts, counts, np.ones(len(items))])
        ids = KeyedJaggedTensor(list(shown), torch.from_numpy(values), lengths=torch.from_numpy(lengths).int())
        numbers = numbers_of(items)
        beside = torch.from_numpy(np.concatenate([each for lists in numbers.values() for each in lists]))
        queries = model(
            ids, KeyedJaggedTensor(list(numbers), beside, lengths=torch.from_numpy(np.tile(counts, 2)).int())
        )
    of_items = model.embeddings if getattr(model, "outputs", None) is None else model.outputs
    catalogue = queries.catalogue
    config = next(own for own in of_items.tables() if own.name == catalogue.table.name)
    partitions = config.scheme.rows(torch.arange(NUM_ITEMS))
    vectors = config.combine.embed(of_items.weights(config.name), partitions).double().numpy()
    scores = queries.vectors.double().numpy() @ vectors.T
    if catalogue.bias is not None:
        scores += catalogue.bias.double().numpy()
    return scores if queries.offsets is None else scores + queries.offsets.double().numpy()[:, None]


def require_best(found: Any, model: Model, items: list[NDArray[np.int64]], num_best: int = BEST) -> None:
    """Compares recommendations with a ranking of all scores, without reserved ids and the rows' own items."""
    best, best_scores = (each.numpy() for each in found)
    assert best.shape == best_scores.shape == (len(items), num_best)
    assert best.dtype == np.int64 and best_scores.dtype == np.float32
    scores = all_scores(model, items) if items else np.empty((0, NUM_ITEMS))
    for row, own in enumerate(items):
        scores[row, [*RESERVED, *own]] = -np.inf
        order = np.argsort(-scores[row], kind="stable")[:num_best]
        is_left = np.isfinite(scores[row, order])
        expected = np.where(is_left, order, -1)
        np.testing.assert_allclose(best_scores[row], scores[row, order], rtol=2e-6, atol=2e-6)
        # which of several with the last score are among the best is left open
        is_last = scores[row, order] <= scores[row, order[-1]] + 1e-5
        assert best[row][~is_last].tolist() == expected[~is_last].tolist(), row
        last = best[row][is_last & is_left]
        np.testing.assert_allclose(scores[row, last], scores[row, order][is_last & is_left], atol=1e-5)
        assert len({*last}) == len(last) and set(best[row][~is_left]) <= {-1}


def saved(model: RecommendingModel, storage: ExportStorage, folder: Path) -> Program:
    save_program(model.whole_program(storage), inputs(model, rows()), folder / "network.pt2")
    return load_program(folder / "network.pt2")


@torch.no_grad()
def recommended(program: Program, model: RecommendingModel, items: list[NDArray[np.int64]]) -> Any:
    return program(*inputs(model, items).tensors.values())


@pytest.mark.parametrize("composition", ITEM_COMPOSITIONS)
@pytest.mark.parametrize("scheme", PARTITIONS)
def test_each_scheme_and_composition_recommends_what_numpy_ranks_first(scheme: str, composition: str) -> None:
    """Each with one model; the slow tests save all of them."""
    place = list(PARTITIONS).index(scheme) + ITEM_COMPOSITIONS.index(composition)
    model = recommender(MODELS[place % len(MODELS)], scheme, composition)
    program = exported(model).whole_program(ExportStorage("fp32", "never"))
    require_best(recommended(program, exported(model), rows()), model, rows())


SAVED = {
    ("sasrec", "quotient_remainder", "product", "fp32", "never"),
    ("hstu_times", "mixed_radix", "sum", "fp32", "never"),
    ("mf_lists", "explicit", "concat", "fp16", "always"),
}
"""What is saved and loaded in each run of the tests."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")


FORMS: tuple[Materialise, ...] = ("never", "always")
CASES = {("gru_beside", "mixed_radix", "path_mlp", "int8", "never")}
CASES |= {(name, scheme, own, "fp32", "never") for name in MODELS for scheme in PARTITIONS for own in ITEM_COMPOSITIONS}
CASES |= {(name, "mixed_radix", "product", own, form) for name in MODELS for own in PRECISIONS for form in FORMS}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "scheme", "composition", "precision", "materialise"),
    [pytest.param(*case, marks=() if case in SAVED else pytest.mark.slow) for case in sorted(SAVED | CASES)],
)
def test_a_saved_program_recommends_as_the_model_with_rounded_tables(
    name: str, scheme: str, composition: str, precision: Precision, materialise: Materialise, tmp_path: Path
) -> None:
    model = recommender(name, scheme, composition)
    whole = exported(model)
    program = saved(whole, ExportStorage(precision, materialise), tmp_path)
    require_fitting_lengths(program, whole)
    if materialise == "never" or precision == "fp32":
        round_tables(model, precision)
    else:  # the rounded vectors of ids are those of a full table
        model = with_full_tables(name, model, precision)
    for lengths in ((), (0,), (1,), (9,), (0, 0), LENGTHS):
        require_best(recommended(program, whole, rows(lengths)), model, rows(lengths))


def require_fitting_lengths(program: Program, whole: RecommendingModel) -> None:
    values, lengths, *numbers = inputs(whole, rows()).tensors.values()
    with pytest.raises(RuntimeError, match="lengths say another number of ids than values has"):
        program(values[:-1], lengths, *numbers)
    for sequences in numbers:
        with pytest.raises(RuntimeError, match="sequences have not a number for each id beside them"):
            program(values, lengths, sequences[:-1])
    if USER in {feature.name for feature in whole.features}:
        assert whole.features == (PlainFeature(USER, is_list=False), PlainFeature(ITEM, is_list=True))
        lengths[0, 0] = 2
        with pytest.raises(RuntimeError, match="a feature with one id a row has rows with another number"):
            program(values, lengths)


def round_tables(model: Model, precision: Precision) -> None:
    """Rounds the weights that hold vectors; functions stay as they are."""
    for name, weight in model.named_parameters():
        if precision != "fp32" and name.startswith(("embeddings.embedding", "outputs.embedding")):
            weight.data = rounded(weight.data, precision)


def with_full_tables(name: str, model: Model, precision: Precision) -> Model:
    """Returns a model like this one, with full tables of the rounded vectors of all its ids."""
    full = recommender(name, "naive", "product")
    full.load_state_dict({**full.state_dict(), **{k: v for k, v in model.state_dict().items() if "embedding" not in k}})
    for target, source in zip(collections_of(full), collections_of(model), strict=True):
        for own in source.tables():
            vectors = own.combine.embed(source.weights(own.name), own.scheme.rows(torch.arange(own.num_embeddings)))
            target.weights(own.name)[0].data.copy_(rounded(vectors.detach(), precision))
    return full


def collections_of(model: Model) -> list[Any]:
    return [own for own in (model.embeddings, getattr(model, "outputs", None)) if own is not None]


@pytest.mark.parametrize("materialise", ["never", "always"])
@pytest.mark.parametrize("chunk", [1, 2, 20, NUM_ITEMS - 1, NUM_ITEMS])
def test_chunks_of_any_size_recommend_alike(
    monkeypatch: pytest.MonkeyPatch, chunk: int, materialise: Materialise
) -> None:
    monkeypatch.setattr(recommenders, "_LEAST_CHUNK", chunk)
    for name in ("sasrec", "mf"):
        model = recommender(name)
        program = exported(model).whole_program(ExportStorage("fp32", materialise))
        require_best(recommended(program, exported(model), rows()), model, rows())


def test_one_item_or_all_of_them_are_recommended() -> None:
    model = recommender("gru")
    for num_best in (1, NUM_ITEMS):
        whole = exported(model, num_best)
        program = whole.whole_program(ExportStorage())
        require_best(recommended(program, whole, rows()), model, rows(), num_best)
    for num_best in (0, NUM_ITEMS + 1):
        with pytest.raises(UserError, match=f"--num-best is {num_best}.* 1 to the {NUM_ITEMS} ids of items"):
            exported(model, num_best)


def test_of_equal_scores_the_lower_id_comes_first() -> None:
    model = recommender("mf_lists", "naive")
    for weight in model.embeddings.parameters():
        weight.data[:] = weight.data[5]
    items, scores = recommended(exported(model).whole_program(ExportStorage()), exported(model), [np.array([3, 5])])
    assert scores.unique().numel() == 1
    assert items[0].tolist() == sorted(items[0].tolist()) and not {0, 1, 3, 5} & set(items[0].tolist())


@pytest.mark.parametrize("materialise", ["never", "always"])
def test_ids_outside_of_the_table_are_unknown_items_and_leave_nothing_out(materialise: Materialise) -> None:
    model = recommender("sasrec")
    whole = exported(model)
    program = whole.whole_program(ExportStorage("fp32", materialise))
    known = [np.array([4, 7, 9])]
    wild = inputs(whole, known).tensors["values"].clone()
    unknown = [np.array([4, 1, 9])]  # each table's own unknown id
    for value in (-(2**63), -1, NUM_ITEMS, 2**63 - 1):
        wild[1] = value
        with torch.no_grad():
            found = program(wild, torch.tensor([[3]]))
        require_best(found, model, unknown)


def test_a_hash_of_ids_applies_to_histories_alone() -> None:
    """The items to choose from are the ids of the table, as the trainer ranks them."""
    model = recommender("gru", pre_hash=KeyedHash(3))
    program = exported(model).whole_program(ExportStorage())
    require_best(recommended(program, exported(model), rows()), model, rows())


def test_what_stands_beside_items_may_be_cut_to_what_the_network_sees() -> None:
    """The trainer's batches have it so, and all items of a row, which are not recommended."""
    whole = exported(recommender("gru_beside"))
    program, items = whole.whole_program(ExportStorage()), rows((3, 12, 0))
    kinds = [own[-MOST:] % 9 for own in items]
    values = torch.from_numpy(np.concatenate([*items, *kinds]))
    lengths = torch.tensor([[len(own) for own in each] for each in (items, kinds)])
    with torch.no_grad():
        found, full = program(values, lengths), recommended(program, whole, items)
    assert torch.equal(found[0], full[0]) and torch.equal(found[1], full[1])


def test_models_that_programs_do_not_know_are_refused() -> None:
    sasrec = recommender("sasrec")
    with pytest.raises(UserError, match=r"NextItems cannot be exported: programs that recommend .* made of mf alone"):
        RecommendingModel.for_rankings(sasrec, RESERVED, BEST)
    with pytest.raises(
        UserError, match=r"MF cannot be exported: programs that recommend .* sasrec, gru and hstu alone"
    ):
        RecommendingModel.for_next_items(recommender("mf"), RESERVED, BEST)
