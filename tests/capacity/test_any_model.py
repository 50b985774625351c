"""``distembed plan --model``: models of one's own, of TorchRec's tables, of compositional ones and of both."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.base.units import format_bytes
from distembed.commands import cli
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.embedding import EmbeddingConfig, TableConfig
from distembed.embedding.collections import embedding_modules
from distembed.models import DCNConfig, ModelInputs
from distembed.optim.optimizers import table_parameters
from distembed.planning import load_plan
from distembed.planning.networks import ExampleBatch, OnDevice, estimate_network, estimate_own_networks
from distembed.sharding import default_sharders
from distembed.tasks import ClickTask
from tests.capacity import commands, own_models
from tests.ranks import run_on_ranks

MODELS = ("dlrm", "dcn", "both")
BATCH_SIZE = 64


def plan(model: str, *options: object) -> tuple[int, dict[str, Any]]:
    rows = () if "--batch-size" in options else ("--batch-size", BATCH_SIZE)
    return commands.plan("--model", f"tests.capacity.own_models:{model}", commands.EARLY, *options, *rows)


def example(name: str = "batch") -> tuple[str, str]:
    return "--example", f"tests.capacity.own_models:{name}"


def num_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@pytest.mark.parametrize("name", MODELS)
def test_tables_networks_and_ids_are_those_of_the_model(name: str) -> None:
    code, planned = plan(name, *example(), "--gpus", 2)
    assert code == 0 and planned["fits"] and not planned["notes"]
    real: nn.Module = getattr(own_models, name)("cpu")
    sizes = {table["name"]: table["num_embeddings"] for table in planned["tables"]}
    prefixes = ("stock", "own") if name == "both" else ("t",)
    assert sizes == {f"{prefix}_{key}": size for prefix in prefixes for key, size in own_models.SIZES.items()}
    ids = {table["name"].split("_")[1]: table["ids_per_row"] for table in planned["tables"]}
    assert ids == own_models.LENGTHS
    vectors = {id(parameter) for parameter in table_parameters(real)}
    networks = [parameter for parameter in real.parameters() if id(parameter) not in vectors]
    for rank in planned["ranks"]:
        assert rank["memory"]["network_weights"] == num_bytes([*networks, *real.buffers()])
        # two states of adam, and a number of steps for each parameter
        assert rank["memory"]["network_optimizer_state"] == 2 * num_bytes(networks) + 4 * len(networks)
        assert rank["milliseconds"]["networks"] > 0
    assert planned["made_for"]["model"] == {"function": f"tests.capacity.own_models:{name}"}


@pytest.mark.parametrize(("name", "states"), [("sgd", 0), ("adagrad", 8), ("row_wise_adagrad", 1), ("adam", 16)])
def test_stock_tables_show_weights_and_states_apart(
    name: str, states: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, of every row so many numbers, in the text, in the JSON and on the page."""
    monkeypatch.setenv("COLUMNS", "200")
    num_rows = sum(own_models.SIZES.values())
    weights, kept = 4 * own_models.DIM * num_rows, 4 * states * num_rows
    report = tmp_path / "plan.html"
    options = ("--gpus", 1, "--sparse-optimizer", name, "plan.sharding_types=[table_wise]")
    _, planned = plan("dlrm", *options, "--report", report)
    (rank,) = planned["ranks"]
    assert (rank["memory"]["table_weights"], rank["memory"]["table_optimizer_state"]) == (weights, kept)
    assert rank["total"] == sum(rank["memory"].values())
    assert {key: own["weights"] for key, own in rank["tables"].items()} == {
        f"t_{key}": 4 * own_models.DIM * size for key, size in own_models.SIZES.items()
    }
    shown = [format_bytes(weights), format_bytes(kept)]
    for cell in shown:
        assert f">{cell}</td>" in report.read_text(encoding="utf-8")
    line = ["plan", "--model", "tests.capacity.own_models:dlrm", "--batch-size", "64", *map(str, options)]
    cli.app(line, standalone_mode=False)
    text = capsys.readouterr().out.split("memory by rank")[1]
    (printed,) = [row for row in text.split("time by rank")[0].splitlines() if row.split()[:1] == ["0"]]
    assert " ".join(shown) in " ".join(printed.split())


def test_tables_with_other_optimizers_than_the_largest_are_named() -> None:
    """One declares Adagrad, one SGD, and one has the option's."""
    for option, named in ((("--sparse-optimizer", "adagrad"), ["t_shop"]), ((), ["t_shop", "t_words"])):
        _, planned = plan("declared_apart", *example(), "--gpus", 1, *option)
        (note,) = [note for note in planned["notes"] if "counted with the states of adagrad" in note]
        assert [name for name in ("t_item", "t_shop", "t_words") if name in note] == named
    _, planned = plan("declared", *example(), "--gpus", 1)
    assert not planned["notes"]


def test_a_step_takes_what_it_takes_in_a_config() -> None:
    """Of the same networks, with collections of ours."""
    features = tuple(CategoricalFeature(name, size) for name, size in own_models.SIZES.items())
    schema, settings = Schema("label", ("I1", "I2"), features), EmbeddingConfig(default=TableConfig(embedding_dim=8))
    inputs, config, num_rows = ModelInputs.from_config(schema, settings), DCNConfig(deep=[16]), 32

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.task = config.build(inputs), ClickTask()

        def forward(self, **fields: Any) -> Any:
            outputs = self.model(*[fields[name] for name in self.model.batch_fields])
            loss, _ = self.task.step(outputs, fields)  # type: ignore[arg-type]
            return loss, outputs.detach()

    made = own_models.batch(num_rows)
    ids = made.sparse_features
    one_id_each = type(ids)(
        ids.keys(), ids.values()[: 3 * num_rows], lengths=torch.ones(3 * num_rows, dtype=torch.int32)
    )
    fields = {"dense_features": made.dense_features[:, :2], "sparse_features": one_id_each, "labels": made.labels}
    for world_size in (1, 2):
        expected = estimate_network(config, inputs, ClickTask(), num_rows, "adam", False, world_size)
        batch, averages = ExampleBatch(fields, num_rows), world_size > 1
        found, unknown = estimate_own_networks(Trained(), batch, "adam", False, averages)
        assert not unknown and expected.peak > 0
        assert (found.peak, found.flops, found.parameters) == (expected.peak, expected.flops, expected.parameters)
        assert (found.gradients, found.optimizer_state) == (expected.gradients, expected.optimizer_state)


def test_a_model_is_as_it_was_after_its_networks_are_counted() -> None:
    with OnDevice("meta"):
        model = own_models.both()
    before = dict(model.named_modules()), dict(model.named_parameters())
    estimate_own_networks(model, ExampleBatch(own_models.batch(8), 8), "adam", True, True)
    assert dict(model.named_modules()).keys() == before[0].keys() and list(embedding_modules(model)) == ["stock", "own"]
    for name, parameter in model.named_parameters():
        assert parameter is before[1][name] and parameter.is_meta and parameter.grad is None


class Odd(nn.Module):
    """Tensors that are no parameters, a weight in two places, one that is not trained, and a device that is nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.scale = own_models.stock_bags(), torch.rand(own_models.DIM)
        self.first, self.second = nn.Linear(own_models.DIM, own_models.DIM), nn.Linear(own_models.DIM, own_models.DIM)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.device = torch.device("cuda")

    def forward(self, features: Any) -> dict[str, Any]:
        vectors = self.bags(features).to_dict()["item"] * self.scale.to(self.device)
        return {"vectors": self.second(self.first(vectors)) + torch.ones(own_models.DIM, device=self.device)}


def test_networks_of_any_form_are_counted() -> None:
    with OnDevice("meta"):
        model = Odd()
    batch = ExampleBatch({"features": own_models.batch(16).sparse_features}, 16)
    found, unknown = estimate_own_networks(model, batch, "sgd", False, True)
    dim = own_models.DIM
    assert not unknown and found.parameters == 4 * (dim * dim + 2 * dim) and found.gradients == 4 * (dim * dim + dim)
    assert found.flops == 16 * dim * dim * 2 * 6 and found.peak >= 4 * 16 * dim
    lazy = nn.ModuleDict({"bags": own_models.stock_bags("meta"), "over": nn.LazyLinear(3)})
    found, unknown = estimate_own_networks(lazy, None, "sgd", False, True)
    assert not found.is_step_known and "uninitialized" in unknown


def test_tables_of_any_size_and_on_any_device_take_no_memory() -> None:
    code, planned = plan("huge", "--nodes", 32, "plan.sharding_types=[row_wise]")
    assert code == 0 and sum(table["bytes_of_one_copy"] for table in planned["tables"]) == 3 * 10**11 * 8 * 4
    for function in (own_models.stock_bags, own_models.own_bags, own_models.dcn):
        for device in (None, "cpu", "cuda", "meta"):
            with OnDevice("meta"), torch.device("cpu"):
                assert all(parameter.is_meta for parameter in function(device).cuda().float().cpu().parameters())


@pytest.mark.parametrize(
    ("model", "options", "sparse"),
    [
        ("dlrm", [], "sgd"),
        ("dlrm", ["--sparse-optimizer", "row_wise_adagrad"], "row_wise_adagrad"),
        ("declared", [], "adagrad"),
        ("with_sharders", [], "adam"),
        ("both", ["--sparse-optimizer", "adagrad"], "adagrad"),
    ],
)
def test_the_optimizer_is_what_tables_declare_or_else_an_option(model: str, options: list[str], sparse: str) -> None:
    _, planned = plan(model, *options, "--gpus", 1)
    assert planned["made_for"]["sparse_optimizer"] == sparse
    per_row = {"sgd": 0, "row_wise_adagrad": 4, "adagrad": 32, "adam": 64}[sparse]
    tables = [table for table in planned["tables"] if table["scheme"] == "naive"]
    for table in tables:
        assert table["bytes_of_one_copy"] == table["num_embeddings"] * (32 + per_row)
    assert tables


def test_what_is_not_known_is_said_and_a_share_kept_free() -> None:
    for options, why in (([], "no --example"), (example("no_batch"), "TypeError: .*forward")):
        _, planned = plan("dlrm", *options)
        (step, ids) = planned["notes"]
        assert pytest.approx(0.15) == planned["reserve"] and why.split(".*")[0] in step
        assert "one id of item, shop, words" in ids
        assert planned["ranks"][0]["memory"]["network_weights"] > 0
    _, planned = plan("dlrm", "--ids-per-row", "words=2.5,item=1", "plan.reserve=0.2")
    assert [table["ids_per_row"] for table in planned["tables"]] == [1, 1, 2.5]
    assert planned["notes"][1].startswith("a row is taken to have one id of shop:")
    assert planned["reserve"] == pytest.approx(0.3)


@pytest.mark.parametrize(("model", "tables"), [("collection", 3), ("sequences", 1), ("noisy", 3)])
def test_collections_alone_are_models_too(model: str, tables: int) -> None:
    code, planned = plan(model, "--gpus", 2, "plan.sharding_types=[table_wise]")
    assert code == 0 and [table["sharding_type"] for table in planned["tables"]] == ["table_wise"] * tables
    assert {table["why"] for table in planned["tables"]} == {"of table_wise, as plan.sharding_types has it"}


@pytest.mark.thorough
def test_each_remedy_holds_as_it_is_typed() -> None:
    typed = ["--gpus", 1, "--memory", "1GB", "--sparse-optimizer", "adagrad", "plan.sharding_types=[table_wise]"]
    code, planned = plan("large", *typed)
    assert code == 3 and not planned["fits"]
    kinds = {remedy.split()[0] for remedy in planned["remedies"]}
    assert {"--gpus", "--nodes", "--memory"} <= kinds and not any("=" in remedy for remedy in kinds)
    for remedy in planned["remedies"]:
        assert plan("large", *typed, *shlex.split(remedy))[0] == 0, remedy
    typed = ["--gpus", 1, "--memory", "1GB", *example(), "--batch-size", 2**21]
    code, planned = plan("dlrm", *typed)
    (smaller,) = [remedy for remedy in planned["remedies"] if remedy.startswith("--batch-size")]
    assert code == 3 and plan("dlrm", *typed, *shlex.split(smaller))[0] == 0


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nothing", "returns None; return a torch.nn.Module"),
        ("layers", "without embedding tables to place"),
        ("broken", r"fails with KeyError: 'rows' \(.*own_models.py, line \d+\)\.$"),
        ("ends", "fails with SystemExit: 3"),
        ("looks", r"fails with RuntimeError: Tensor.item\(\) cannot be called on meta tensors"),
        ("needs", "called without arguments, and cannot be: missing a required argument: 'rows'"),
        ("twice", "'t_item' is in 0 and in 1; give tables of different collections different names"),
        ("processed", "'bags', a FeatureProcessedEmbeddingBagCollection, which cannot be planned"),
        ("unsharded", "'bags', a _OwnBags, and no sharder takes it"),
        ("wrong_sharders", "returns a type among the sharders"),
        ("instance", "is a Linear and no function"),
        ("dlmr", "has no 'dlmr'; did you mean 'dlrm'"),
        ("Both.nothing", "has no 'Both.nothing'"),
    ],
)
def test_what_cannot_be_planned_is_told_in_a_sentence(model: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        plan(model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch-size", 8, *example("short_batch")], "the example batch of 1 rows has 0 rows|of 1 rows"),
        (["--ids-per-row", "wrods=2"], "--ids-per-row is 'wrods', which is not known. Did you mean 'words'"),
        (["--ids-per-row", "words=2,words=3"], "names 'words' twice"),
        (["--ids-per-row", "words=-1"], "has 'words=-1'"),
        (["--sparse-optimizer", "adam", "--gpu", "cpu-256gb"], "'adam' of the tables on CUDA only"),
        (["plan.tables={nowhere: {min_partition: 4}}"], "nowhere"),
    ],
)
def test_options_that_do_not_go_with_the_model_are_told(options: list[Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan("dlrm", *options)
    with pytest.raises(UserError, match=r"every table of the model declares its optimizer \(adagrad\)"):
        plan("declared", "--sparse-optimizer", "sgd")


def check_saved_plan(rank: int, world_size: int, folder: Path) -> None:
    ranks = Ranks(rank, world_size, world_size, torch.device("cpu"))
    for name in MODELS:
        model = getattr(own_models, name)("meta")
        apply_optimizer_in_backward(torch.optim.SGD, table_parameters(model), {"lr": 0.1})
        sharders = default_sharders()
        saved = load_plan(folder / f"{name}.json", model, sharders, ranks, BATCH_SIZE)
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        sharded = DistributedModelParallel(model, env=env, device=ranks.device, plan=saved, sharders=sharders)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(sharded.named_parameters())), lambda own: torch.optim.SGD(own, lr=0.1)
        )
        optimizer, batch = CombinedOptimizer([sharded.fused_optimizer, dense]), own_models.batch(BATCH_SIZE + rank)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss, _ = sharded(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        expected, _ = getattr(own_models, name)("cpu")(batch)
        assert losses[0] == pytest.approx(float(expected), rel=1e-5)
        assert losses[2] < losses[0]


@pytest.mark.distributed
def test_a_saved_plan_is_applied_to_the_model_and_trains(tmp_path: Path) -> None:
    types = {"dlrm": "[table_wise]", "dcn": "[row_wise]", "both": "[column_wise]"}
    for name in MODELS:
        options = ["--gpus", 2, "--gpu", "cpu-256gb", f"plan.sharding_types={types[name]}", "plan.min_partition=4"]
        assert plan(name, *options, "--output", tmp_path / f"{name}.json")[0] == 0
    run_on_ranks(2, check_saved_plan, tmp_path)


def test_a_plan_for_something_else_is_refused_with_every_difference(tmp_path: Path) -> None:
    file = tmp_path / "dlrm.json"
    plan("dlrm", "--gpus", 2, "--gpu", "cpu-256gb", "--output", file)
    model, sharders = own_models.dlrm("meta"), default_sharders()
    ranks = Ranks(0, 2, 2, torch.device("cpu"))
    assert list(load_plan(file, model, sharders, ranks, BATCH_SIZE).plan) == [
        "model.sparse_arch.embedding_bag_collection"
    ]
    with pytest.raises(UserError) as raised:
        load_plan(file, own_models.dcn("meta"), sharders, Ranks(0, 4, 2, ranks.device), 7, "adagrad")
    for difference in ("world_size: 2 in the plan, 4 now", "batch_size: 64", "sparse_optimizer: 'sgd'", "scheme of"):
        assert difference in str(raised.value)
    assert "`distembed plan --model tests.capacity.own_models:dlrm --batch-size 7 --nodes 2" in str(raised.value)
    moved = nn.ModuleDict({"inner": own_models.dlrm("meta")})
    with pytest.raises(UserError, match="module 'inner.model.sparse_arch.embedding_bag_collection' is in the model"):
        load_plan(file, moved, sharders, ranks, BATCH_SIZE)
