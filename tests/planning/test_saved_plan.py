"""Saved plans are applied where their inputs are those of the run, and refused with every difference where not."""

import dataclasses
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.embedding import CompositionalEmbeddingConfig
from distembed.planning.apply_plan import apply_saved_plan
from distembed.planning.saved_plan import PlanInputs, read_saved_plan, saved_plan_as_json, table_plan_inputs
from distembed.sharding.placement import SHARDING_TYPES
from distembed.sharding.table_slice import unit_size
from tests.layouts import tables
from tests.saved_plans import LAYOUTS, MODULE, Json, apply_file, apply_plan, inputs_now, plan_file, planned, shards


def file_refusal(content: Json, now: PlanInputs | None = None) -> str:
    with pytest.raises(UserError) as caught:
        apply_file(content, now or inputs_now())
    return str(caught.value)


def refusal(plan: Json, **arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        apply_plan(plan, **arguments)
    return str(caught.value)


def change_table(name: str, **changes: Json) -> Json:
    """Returns the plan of four ranks, changed for one table."""
    plan = planned()
    plan[MODULE][name].update(changes)
    return plan


@pytest.mark.parametrize(("world_size", "device"), [(1, "cpu"), (2, "cuda"), (4, "cpu"), (9, "cuda")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_planned_is_applied_whole(layout: str, world_size: int, device: str) -> None:
    plan = planned(layout, world_size, device)
    assert apply_plan(plan, world_size, device) == plan
    # as the command writes it, among much else
    now = inputs_now(world_size, device)
    assert apply_file({"fits": True, **plan_file(plan, now), "remedies": []}, now) == plan


def test_a_plan_from_before_plans_were_searched_by_time_is_applied() -> None:
    # never written anew: such files are with the runs that were trained by them
    content = json.loads((Path(__file__).parents[1] / "golden" / "saved_plan.json").read_text())
    assert apply_file(content, inputs_now(4, "cuda")) == content["plan"]


def test_ranks_that_a_plan_names_have_to_be_there() -> None:
    for layout, world_size, message in (
        ("column_wise", 3, "but there are 3 ranks"),
        ("row_wise", 3, "divided into 3"),
        ("row_wise", 5, "divided into 5"),
        ("row_wise", 1, "divided into 1"),
        ("data_parallel", 3, "must be on [0, 1, 2]"),
        ("data_parallel", 5, "must be on [0, 1, 2, 3, 4]"),
        ("mixed", 3, "there are 3 ranks"),
        ("mixed", 5, "divided into 5"),
    ):
        assert message in refusal(planned(layout, 4), world_size=world_size)
    one = refusal(planned("row_wise", 4), world_size=1)
    assert all(re.search(rf"table '{name}' is planned row_wise in 4 .* divided into 1 ", one) for name in "abcde")
    named = refusal(change_table("c", ranks=[9], shards=shards((9, 0, 16), rows=unit_size(tables()[2])[0])))
    assert "table 'c' is planned table_wise on ranks [9], but there are 4 ranks" in named


def changed_table(name: str, **changes: Any) -> dict[str, Any]:
    made = table_plan_inputs(tables())
    return {"tables": {**made, name: dataclasses.replace(made[name], **changes)}}


def without_table(name: str) -> dict[str, Any]:
    return {"tables": {table: made for table, made in table_plan_inputs(tables()).items() if table != name}}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"world_size": 2}, "world_size: 4 in the plan, 2 now"),
        ({"device": "cuda"}, "device_kind: 'cpu' in the plan, 'cuda' now"),
        ({"batch_size": 1000}, "batch_size: 64 in the plan, 1000 now"),
        ({"sparse_optimizer": "adagrad"}, "sparse_optimizer: 'sgd' in the plan, 'adagrad' now"),
        ({"dense_optimizer": "sgd"}, "dense_optimizer: 'adam' in the plan, 'sgd' now"),
        ({"model": {"name": "dlrm", "bottom": [16], "top": [8]}}, "model.top: [16, 8] in the plan, [8] now"),
        ({"model": {"name": "dcn", "bottom": [16]}}, "model.name: 'dlrm' in the plan, 'dcn' now"),
        ({"model": {"name": "dlrm", "bottom": [16]}}, "model.top: [16, 8] in the plan, nothing now"),
        (changed_table("a", scheme="naive"), "scheme of table 'a': 'quotient_remainder' in the plan, 'naive' now"),
        (changed_table("a", rows=[26, 5]), "rows of table 'a': [26, 4] in the plan, [26, 5] now"),
        (changed_table("c", dims=[16, 7]), "dims of table 'c': [16, 181] in the plan, [16, 7] now"),
        (changed_table("a", composition="sum"), "composition of table 'a': 'product' in the plan, 'sum' now"),
        (changed_table("a", embedding_dim=8), "embedding_dim of table 'a': 16 in the plan, 8 now"),
        (changed_table("a", data_type="FP16"), "data_type of table 'a': 'FP32' in the plan, 'FP16' now"),
        (changed_table("e", pooling="sum"), "pooling of table 'e': 'mean' in the plan, 'sum' now"),
        (changed_table("a", feature_names=["a", "z"]), "feature_names of table 'a': ['a'] in the plan, ['a', 'z'] now"),
        (without_table("d"), "table 'd' is in the plan and not in the model"),
    ],
)
def test_a_plan_for_something_else_is_refused_with_both_values(changes: dict[str, Any], line: str) -> None:
    now, plan = inputs_now(**changes), planned()
    found = file_refusal(plan_file(plan, inputs_now()), now)
    assert f"\n  {line}" in found and "made for something else" in found, found
    # and what does not differ is not named
    assert found.count("\n") == (2 if "model.name" in found else 1)
    assert inputs_now().differences(inputs_now()) == now.differences(now) == []


def test_all_that_differs_is_listed_and_tables_that_differ_alike_share_a_line() -> None:
    summed = {name: dataclasses.replace(own, composition="sum") for name, own in table_plan_inputs(tables()).items()}
    now = inputs_now(1, batch_size=1000, sparse_optimizer="adagrad", tables={**summed, "new": summed["a"]})
    found = file_refusal(plan_file(planned(), inputs_now()), now)
    assert "--nodes 1 --gpus 1" in found
    assert found.splitlines()[1:] == [
        "  world_size: 4 in the plan, 1 now",
        "  local_world_size: 2 in the plan, 1 now",
        "  batch_size: 64 in the plan, 1000 now",
        "  sparse_optimizer: 'sgd' in the plan, 'adagrad' now",
        "  table 'new' is in the model and not in the plan",
        "  composition of tables 'a', 'd': 'product' in the plan, 'sum' now",
        "  composition of table 'b': 'concat' in the plan, 'sum' now",
        "  composition of table 'c': 'path_mlp' in the plan, 'sum' now",
    ]


def test_what_is_saved_is_read_and_a_plan_that_was_not_found_is_refused(tmp_path: Path) -> None:
    path, now = tmp_path / "saved.json", inputs_now()
    path.write_text(json.dumps(plan_file(planned(), now)))
    saved = read_saved_plan(path)
    plan = apply_saved_plan(saved, {MODULE: tables()}, now)
    path.write_text(json.dumps(saved_plan_as_json(now, plan)))
    assert read_saved_plan(path) == saved
    path.write_text(json.dumps(saved_plan_as_json(now, None)))
    with pytest.raises(UserError, match="holds no plan, as `distembed plan` writes where tables do not fit"):
        read_saved_plan(path)


def test_a_plan_that_does_not_say_what_it_was_made_for_is_refused() -> None:
    for content in (planned(), {"plan": planned()}, {"plan": planned(), "nodes": 2, "gpus": 2}):
        assert "made_for: Field required" in file_refusal(content)
    file = plan_file(planned(), inputs_now())
    for wrong in (0, -4, 2.5, "4", True, [4], None):
        damaged = {**file, "made_for": {**file["made_for"], "world_size": wrong}}
        assert "made_for.world_size: " in file_refusal(damaged)
    del file["made_for"]["tables"]["a"]["rows"], file["made_for"]["device_kind"], file["plan"][MODULE]["b"]["ranks"]
    found = file_refusal(file)
    for missing in ("made_for.device_kind", "made_for.tables.a.rows", "plan.model.embeddings.b.ranks"):
        assert f"{missing}: Field required" in found


ROWS_A, ROWS_B, ROWS_D = (unit_size(table)[0] for table in tables() if table.name in "abd")
GAP_IN_B = shards((0, 0, 2), (1, 2, 4), (2, 5, 7), (3, 7, ROWS_B), rows=ROWS_B, axis=0)
SWAPPED_B = shards((1, 0, 3), (0, 3, 6), (2, 6, 9), (3, 9, ROWS_B), rows=ROWS_B, axis=0)


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        # shards
        (
            "a",
            {"shards": shards((0, 0, 4), (1, 8, 16), rows=ROWS_A)},
            rf"in 2 shard\(s\) \[0:{ROWS_A} x 0:4, 0:{ROWS_A} x 8:16\]; its {ROWS_A} x 16 numbers are divided",
        ),
        ("a", {"shards": shards((0, 4, 16), rows=ROWS_A)}, "numbers are divided into"),
        ("a", {"shards": shards((0, 0, 12), (1, 8, 16), rows=ROWS_A)}, "numbers are divided into"),
        ("a", {"shards": shards((0, 0, 16), (1, 0, 16), rows=ROWS_A)}, "divided into 1"),
        ("a", {"shards": shards((0, 0, 0), (1, 0, 16), rows=ROWS_A)}, "divided into 1"),
        ("a", {"shards": shards(*((0, i, i + 2) for i in range(0, 16, 2)), rows=ROWS_A)}, "are divided into 4"),
        ("a", {"shards": shards((0, 0, 16), rows=ROWS_A + 1)}, rf"{ROWS_A + 1} x 0:16\]; its {ROWS_A} x 16"),
        ("a", {"shards": [], "ranks": []}, r"is planned column_wise in 0 shard\(s\)"),
        ("a", {"sharding_type": "table_wise"}, r"is planned table_wise in 4 shard\(s\)"),
        ("b", {"shards": GAP_IN_B}, "divided into 4"),
        ("b", {"shards": SWAPPED_B}, r"row_wise on ranks \[1, 0, 2, 3\]"),
        # ranks
        ("a", {"ranks": [0]}, r"is planned column_wise on ranks \[0\], but must be on \["),
        ("d", {"ranks": [0, 1]}, r"data_parallel on ranks \[0, 1\], but must be on \[0, 1, 2, 3\]"),
        ("d", {"ranks": [0, 1, 2, 2]}, r"data_parallel on ranks \[0, 1, 2, 2\], but must be on \[0, 1, 2, 3\]"),
        ("d", {"shards": shards((0, 0, 16), rows=ROWS_D)}, r"data_parallel in 1 shard\(s\)"),
        # kinds and kernels
        ("c", {"compute_kernel": "fused_uvm"}, "kernel 'fused_uvm', and the kernels of .* on cpu are fused, d"),
        ("c", {"compute_kernel": "fused_uvm_caching"}, "kernel 'fused_uvm_caching', and the kernels of .* are fused"),
        ("c", {"compute_kernel": "fuse"}, "kernel 'fuse', and the kernels of table_wise tables on cpu are fused, d"),
        ("d", {"compute_kernel": "fused"}, "kernel 'fused', and the kernels of data_parallel tables on cpu are dense"),
        ("a", {"sharding_type": "row"}, "is planned 'row', and can be placed table_wise, column_wise"),
        ("a", {"sharding_type": "virtual"}, "is planned 'virtual', and can be placed"),
        ("c", {"sharding_type": "column_wise", "shards": shards((0, 0, 8), (1, 8, 16), rows=27)}, "table 'c'"),
        # form
        ("a", {"ranks": [0.5]}, r"a.ranks.0: Input should be a valid integer.*got 0.5"),
        ("a", {"ranks": [-1]}, r"a.ranks.0: .*greater than or equal to 0; got -1"),
        ("a", {"shards": [{"rank": 0, "offset": [0, 0], "size": [-1, 16]}]}, r"size.0: .*got -1"),
        ("a", {"shards": [{"rank": 1, "offset": [0, 0]}]}, r"a.shards.0.size: Field required"),
        ("a", {"shards": [{"rank": 0, "offset": [0, 0], "size": [2**63, 16]}]}, "size.0: the number has 64 bits"),
    ],
)
def test_what_a_table_cannot_be_is_refused_with_its_name_and_value(
    table: str, changes: dict[str, Json], message: str
) -> None:
    if "shards" in changes and "ranks" not in changes and table != "d" and "rank" in str(changes["shards"]):
        changes = {**changes, "ranks": [shard["rank"] for shard in changes["shards"]]}
    found = refusal(change_table(table, **changes))
    assert re.search(rf"'{table}'|\.{table}\.", found) and "plan" in found
    assert re.search(message, found), found


def test_rows_are_divided_between_the_ranks_of_one_machine_in_order() -> None:
    for layout, name in (("table_row_wise", "c"), ("grid_shard", "a")):
        plan = planned(layout)
        own = plan[MODULE][name]
        own["shards"][0]["rank"], own["shards"][1]["rank"] = own["ranks"][1], own["ranks"][0]
        own["ranks"][:2] = own["ranks"][1::-1]
        expected = rf"{layout} on ranks \[\[{own['ranks'][0]}, {own['ranks'][1]}\].* all ranks of one node, in order"
        assert re.search(expected, refusal(plan))
        for change in (-1, 1):
            plan = planned(layout)
            plan[MODULE][name]["shards"][0]["size"][0] += change
            assert re.search(rf"'{name}' is planned {layout} in \d shard\(s\)", refusal(plan))


def test_kernels_follow_the_device_and_the_optimizer() -> None:
    cached = change_table("c", compute_kernel="fused_uvm_caching")
    assert apply_plan(cached, device="cuda") == cached
    fused, dense = planned("table_wise"), planned("table_wise")
    for placed in dense[MODULE].values():
        placed["compute_kernel"] = "dense"
    assert apply_plan(dense) == apply_plan(dense, fused=False) == dense
    found = refusal(fused, fused=False)
    assert found.count("with an optimizer that FBGEMM lacks are dense") == len(tables())


def test_sequences_are_not_placed_as_bags_only_are(tmp_path: Path) -> None:
    sequence = CompositionalEmbeddingConfig("s", 40, 16, ["s"])
    own = {"compute_kernel": "fused", "ranks": [0], "shards": shards((0, 0, 16), rows=40)}
    now = PlanInputs(1, 1, "cpu", 64, {}, "sgd", "sgd", table_plan_inputs([sequence]))

    def apply(kind: str) -> None:
        (tmp_path / "saved.json").write_text(
            json.dumps(plan_file({MODULE: {"s": {"sharding_type": kind, **own}}}, now))
        )
        apply_saved_plan(read_saved_plan(tmp_path / "saved.json"), {MODULE: [sequence]}, now)

    apply("table_wise")
    with pytest.raises(UserError, match="'s' is planned 'table_column_wise', and can be placed table_wise"):
        apply("table_column_wise")


def test_all_that_is_wrong_with_a_plan_is_listed_at_once() -> None:
    plan = planned()
    (module,) = plan.values()
    module["a"]["compute_kernel"] = "fused_uvm"
    module["b"]["shards"].pop()
    module["x"] = module.pop("c")
    module["d"]["ranks"] = [0, 5]
    module["e"]["sharding_type"] = "virtual"
    found = refusal(plan)
    for difference in (
        "table 'x' is in the plan and not in the model",
        "table 'a' is planned with compute kernel 'fused_uvm'",
        "table 'b' is planned row_wise in 3 shard(s)",
        "table 'b' is planned row_wise on ranks",
        "table 'c' is in the model and not in the plan",
        "table 'd' is planned data_parallel on ranks [0, 5], but must be on",
        "table 'e' is planned 'virtual'",
    ):
        assert difference in found
    malformed = planned()
    malformed[MODULE]["a"]["ranks"] = [-1, "0"]
    del malformed[MODULE]["b"]["shards"]
    found = refusal(malformed)
    assert found.count("\n") == 3 and "b.shards: Field required" in found
    assert f"module '{MODULE}' is in the model and not in the plan, which has 'other'" in refusal({"other": module})


def test_files_that_are_no_plan_are_refused(tmp_path: Path) -> None:
    texts = [b"", b"{", b"\xff", b"null", b"[]", b"{}", b"1", b'"plan"', b"NaN", b"[" * 100_000, b"9" * 5000]
    for content in (*texts, b'{"\\ud800": 1}'):
        assert "plan" in file_refusal(content)
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UserError, match="cannot be read"):
            read_saved_plan(path)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 20)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([*SHARDING_TYPES, "fused", "dense", "fused_uvm", "quant", *"abcde", 2**63, 10**400, -(2**70)])
)
json_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [MODULE, *"abcde", "sharding_type", "compute_kernel", "ranks", "shards", "rank", "offset", "size"]
                + ["plan", "made_for", "world_size", "model", "tables"]
            )
            | st.text(max_size=3),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


def places(value: Json) -> Iterator[tuple[Any, Any]]:
    """Every container within a value, with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from places(value[key])


@st.composite
def damaged(draw: Any) -> Json:
    """A file, some values of which are others or missing."""
    plan = plan_file(planned(draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([4, 4, 4, 2]))), inputs_now())
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(plan))
        if not found:
            break
        container, key = draw(st.sampled_from(found))
        change = draw(st.sampled_from(["delete", "replace", "nudge"]))
        if change == "delete":
            del container[key]
        elif change == "nudge" and type(container[key]) is int:
            container[key] += draw(st.sampled_from([-8, -4, -1, 1, 4, 8]))
        else:
            container[key] = draw(json_values)
    return plan


@st.composite
def moved(draw: Any) -> Json:
    """A file with a table's shards on other ranks, of other widths, or under another sharding type or kernel."""
    plan = planned(draw(st.sampled_from(LAYOUTS)))
    own = plan[MODULE][draw(st.sampled_from("abcde"))]
    own["sharding_type"] = draw(st.sampled_from([own["sharding_type"], *SHARDING_TYPES]))
    own["compute_kernel"] = draw(st.sampled_from(["fused", "dense"]))
    cuts = sorted(draw(st.sets(st.sampled_from([2, 4, 6, 8, 12]))))
    if draw(st.booleans()) and own["shards"]:
        rows = max(shard["offset"][0] + shard["size"][0] for shard in own["shards"])
        own["shards"] = shards(*((0, start, stop) for start, stop in pairwise([0, *cuts, 16])), rows=rows)
    for shard in own["shards"]:
        shard["rank"] = draw(st.integers(0, 4))
    own["ranks"] = [shard["rank"] for shard in own["shards"]] or own["ranks"]
    return plan_file(plan, inputs_now())


def places_every_number_once(plan: Json) -> bool:
    """Whether each number of every table lies in as many shards as it should."""
    if plan[MODULE].keys() != {table.name for table in tables()}:
        return False
    for table in tables():
        own = plan[MODULE][table.name]
        counts = np.zeros(unit_size(table), int)
        for shard in own["shards"]:
            (row, column), (rows, columns) = shard["offset"], shard["size"]
            counts[row : row + rows, column : column + columns] += 1
            if not 0 <= shard["rank"] < 4:
                return False
        if (counts != (0 if own["sharding_type"] == "data_parallel" else 1)).any():
            return False
    return True


@settings(max_examples=150)
@given(moved() | damaged() | json_values)
def test_a_damaged_plan_is_refused_or_still_places_every_number_once(content: Json) -> None:
    try:
        plan = apply_file(content, inputs_now())
    except UserError:
        return
    assert places_every_number_once(plan)


@settings(max_examples=80)
@given(st.binary(max_size=40), st.integers(0, 3000))
def test_a_plan_that_was_cut_or_overwritten_is_refused_or_whole(noise: bytes, where: int) -> None:
    content = json.dumps(plan_file(planned(), inputs_now())).encode()
    try:
        plan = apply_file(content[:where] + noise + content[where + len(noise) :], inputs_now())
    except UserError:
        return
    assert places_every_number_once(plan)
