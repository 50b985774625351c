"""A saved plan that was damaged is refused, or still places every number of every table once."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.sharding.placement import SHARDING_TYPES
from distembed.sharding.table_slice import unit_size
from tests.layouts import tables
from tests.saved_plans import LAYOUTS, MODULE, Json, apply_file, inputs_now, plan_file, planned, shards

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


@settings(max_examples=400)
@given(moved() | damaged() | json_values)
def test_a_damaged_plan_is_refused_or_still_places_every_number_once(content: Json) -> None:
    try:
        plan = apply_file(content, inputs_now())
    except UserError:
        return
    assert places_every_number_once(plan)


@settings(max_examples=200)
@given(st.binary(max_size=40), st.integers(0, 3000))
def test_a_plan_that_was_cut_or_overwritten_is_refused_or_whole(noise: bytes, where: int) -> None:
    content = json.dumps(plan_file(planned(), inputs_now())).encode()
    try:
        plan = apply_file(content[:where] + noise + content[where + len(noise) :], inputs_now())
    except UserError:
        return
    assert places_every_number_once(plan)
