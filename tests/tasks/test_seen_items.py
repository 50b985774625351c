"""Candidates of evaluations where users repeat items: explicit sets, and a process whose optimum is known."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Ranks
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import Manifest, create_manifest
from distembed.data.dataset.schema import ITEM, SPARSE_FEATURES, USER, CategoricalFeature, Schema
from distembed.data.reader.batch import Batch
from distembed.models.queries import Queries
from distembed.tasks import ClickConfig, NextItemConfig, NextItemTask, RankingConfig
from distembed.tasks.base import TaskContext
from distembed.tasks.catalogue import CatalogueRanking
from distembed.tasks.seen_items import decided_task, describe_seen_items
from tests.catalogue.fake_catalogue import FakeCatalogue

NUM_ITEMS, SAMPLED, CUTOFFS = 60, 20, [1, 3, 10]
Lists = list[list[int]]


def write(folder: Path, lists: Lists | None = None, pairs: Lists | None = None) -> Manifest:
    """Writes a training split of lists of items, or of pairs of a user and an item, in two row groups or more."""
    is_list = lists is not None
    rows = lists if lists is not None else [item for _, item in pairs or []]
    users = range(len(rows)) if is_list else [user for user, _ in pairs or []]
    items = pa.array(rows, pa.list_(pa.int32()) if is_list else pa.int32())
    folder.mkdir(parents=True, exist_ok=True)
    columns = {USER: pa.array(users, pa.int32()), ITEM: items}
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=max(1, len(rows) // 2))
    features = (
        CategoricalFeature(USER, len(rows) + 1),
        CategoricalFeature(ITEM, NUM_ITEMS, is_list, 3.0 if is_list else 1.0),
    )
    return create_manifest(folder, Schema(None, (), features), {"train": ["rows.parquet"]})


def started(folder: Path, num_users: int, exclude_seen: bool) -> NextItemTask:
    config = NextItemConfig(exclude_seen=exclude_seen, sampled_candidates=SAMPLED, cutoffs=CUTOFFS)
    task = config.build()
    assert isinstance(task, NextItemTask)
    manifest = write(folder, [[1, 2]])
    schema = Schema(None, (), (CategoricalFeature(USER, num_users), manifest.schema.categorical[1]))
    ranks = Ranks(rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    task.start(TaskContext(DataConfig(path=str(folder)), str(folder), schema, ranks, 3, {}))
    return task


def prepared(task: NextItemTask, histories: Lists) -> Batch:
    """Returns histories, the last item of which is to be predicted, as the task prepares them."""
    users, items = range(len(histories)), [item for row in histories for item in row]
    lengths = torch.tensor([*([1] * len(histories)), *map(len, histories)])
    features = KeyedJaggedTensor([USER, ITEM], torch.tensor([*users, *items]), lengths=lengths)
    return task.prepare_batch(Batch({SPARSE_FEATURES: features}, len(histories)), None)


def evaluated(task: NextItemTask, histories: Lists, scores: torch.Tensor) -> dict[str, torch.Tensor]:
    """Evaluates a model that gives these scores, ``[rows, items]``: its items are unit vectors, its queries scores."""
    catalogue: Any = FakeCatalogue(torch.eye(NUM_ITEMS), None, 17)
    return dict(task.evaluate(Queries(scores, catalogue), prepared(task, histories)))


def metrics(task: NextItemTask, outputs: dict[str, torch.Tensor]) -> dict[str, float]:
    return task.metrics({name: values.numpy() for name, values in outputs.items()})


def rank_metrics(rank: int | None) -> dict[str, float]:
    """Returns the metrics of a query whose target has this many candidates ahead of it; None for no candidate."""
    found = {f"hr@{k}": float(rank is not None and rank < k) for k in CUTOFFS}
    found |= {f"ndcg@{k}": 0.0 if rank is None or rank >= k else 1 / math.log2(rank + 2) for k in CUTOFFS}
    return found | {"mrr": 0.0 if rank is None else 1 / (rank + 1)}


def mean(rows: list[dict[str, float]], suffix: str = "") -> dict[str, float]:
    return {f"{name}{suffix}": float(np.mean([row[name] for row in rows])) for name in rows[0]}


@pytest.mark.parametrize("exclude_seen", [True, False])
def test_metrics_equal_loops_over_explicit_candidates(
    tmp_path: Path, exclude_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    histories = [rng.integers(0, rng.integers(2, NUM_ITEMS), rng.integers(2, 30)).tolist() for _ in range(80)]
    histories += [[5, 5], [7], [*range(NUM_ITEMS), 3], [*range(NUM_ITEMS - SAMPLED), NUM_ITEMS - 1]]
    scores = torch.from_numpy(rng.integers(0, 9, (len(histories), NUM_ITEMS)).astype(np.float32))  # many ties
    task = started(tmp_path, len(histories), exclude_seen)
    rank_among, drawn = CatalogueRanking.rank_among, []
    monkeypatch.setattr(
        CatalogueRanking, "rank_among", lambda *given: (drawn.extend(given[3].tolist()), rank_among(*given))[1]
    )
    outputs = evaluated(task, histories, scores)
    found = metrics(task, outputs)
    has_enough = ~outputs["sampled"].isnan().any(1)
    rows, sampled_rows, num_excluded = [], [], 0
    for row, (*history, target) in enumerate(histories):
        left = set(range(NUM_ITEMS)) - (set(history) if exclude_seen else set())
        num_excluded += target not in left
        own = scores[row]
        ahead = {item for item in left - {target} if own[item] >= own[target]}
        rows.append(rank_metrics(len(ahead) if target in left else None))
        best = sorted(left, key=lambda item: (-own[item], item))[: CUTOFFS[-1]]
        assert outputs["best"][row].tolist() == best + [-1] * (CUTOFFS[-1] - len(best))
        assert bool(has_enough[row]) == (len(left - {target}) >= SAMPLED)
        if has_enough[row]:
            assert set(drawn[row]) <= left - {target}
            num_ahead = sum(bool(own[item] >= own[target]) for item in drawn[row])
            sampled_rows.append(rank_metrics(num_ahead if target in left else None))
    assert 0 < num_excluded < len(histories) if exclude_seen else num_excluded == 0
    assert found["excluded_targets"] == num_excluded and found["exclude_seen"] is exclude_seen
    assert 0 < found["sampled_rows"] == len(sampled_rows) <= found["rows"] == len(histories)
    for name, value in (mean(rows) | mean(sampled_rows, f"_of_{SAMPLED + 1}")).items():
        assert found[name] == pytest.approx(value, abs=1e-6), name
    assert ("have fewer than" in task.describe(found)) == (len(sampled_rows) < len(histories))


class Process:
    """Users who have five items each and draw the next one from the four that are not the last."""

    def __init__(self, num_users: int) -> None:
        self.rng = np.random.default_rng(7)
        self.own = np.stack([self.rng.permutation(NUM_ITEMS)[:5] for _ in range(num_users)])
        self.histories = [self._history(own.tolist()) for own in self.own]

    def _history(self, own: list[int]) -> list[int]:
        items = list(own)  # each once, so that every target is a repeat
        for _ in range(10):
            items.append(int(self.rng.choice([item for item in own if item != items[-1]])))
        return items

    def optimum(self) -> dict[str, float]:
        """Returns the most that metrics can be on average: the four are in front, in any order."""
        return mean([rank_metrics(rank) for rank in range(4)])

    def sampled_optimum(self) -> dict[str, float]:
        """Returns it among uniform draws from all items but the target: only drawn ones of the four are in the way."""
        others = self.rng.integers(0, NUM_ITEMS - 1, (20_000, SAMPLED))
        num_own = [(row[:, None] == np.arange(3)).any(0).sum() for row in others]  # the first three are of the four
        return mean([rank_metrics(int(self.rng.integers(0, found + 1))) for found in num_own], f"_of_{SAMPLED + 1}")

    def scorers(self) -> dict[str, torch.Tensor]:
        """Returns scores of a model that knows the process, of some that exploit the rows, and of one that guesses."""
        noise = torch.from_numpy(self.rng.random((len(self.own), NUM_ITEMS)).astype(np.float32)) / 10
        owned = torch.zeros_like(noise).scatter_(1, torch.from_numpy(self.own), 1.0)
        last = torch.tensor([row[-2:-1] for row in self.histories])
        oracle = owned.scatter(1, last, 0.0) + noise
        return {"oracle": oracle, "seen first": owned + noise, "seen last": noise - owned, "guess": noise}


@pytest.mark.thorough
@pytest.mark.parametrize("exclude_seen", [True, False])
def test_no_scorer_is_above_the_optimum_of_a_process(tmp_path: Path, exclude_seen: bool) -> None:
    process = Process(3000)
    task = started(tmp_path, len(process.own), exclude_seen)
    limits = process.optimum() | process.sampled_optimum()
    for name, scores in process.scorers().items():
        found = metrics(task, evaluated(task, process.histories, scores))
        for metric, limit in limits.items():
            if exclude_seen:
                assert found[metric] == 0, (name, metric)  # each target is seen: all are misses
            else:
                assert found[metric] <= limit + 4 * math.sqrt(0.25 / 3000), (name, metric)
                if name == "oracle":
                    assert found[metric] >= limit - 4 * math.sqrt(0.25 / 3000), metric


LIST, PAIR = NextItemConfig(), RankingConfig()


@pytest.mark.parametrize(
    ("lists", "repeats", "items", "excluded"),
    [
        ([[1, 2, 3], [4, 5], [1, 2]], 0, 4, True),
        ([[1, 2, 1, 2], [4, 4], [5]], 3, 4, False),
        ([[2, 3], [2, 3], [2, 3]], 0, 3, True),  # of other users, or of windows of one
        ([[*range(50)], [*range(50)], [3, 4, 3]], 1, 100, True),
        ([[*range(50)], [*range(49)], [3, 4, 3]], 1, 99, False),
        ([[], []], 0, 0, True),
        ([], 0, 0, True),
    ],
)
def test_seen_items_stay_where_users_repeat_more_than_a_hundredth(
    tmp_path: Path, lists: Lists, repeats: int, items: int, excluded: bool
) -> None:
    task, record = decided_task(LIST, str(tmp_path), write(tmp_path, lists), "train")
    assert record == {"excluded": excluded, "decided_by": "auto", "repeats": repeats, "items": items}
    assert isinstance(task, NextItemConfig) and task.exclude_seen is excluded
    assert f"{repeats} of {items} training items are repeats" in describe_seen_items(record)
    pairs = [[user, item] for user, own in enumerate(lists) for item in own]
    _, record = decided_task(PAIR, str(tmp_path / "pairs"), write(tmp_path / "pairs", pairs=pairs), "train")
    assert record is not None and (record["repeats"], record["items"]) == (repeats, len(pairs))


def test_missing_and_unknown_users_repeat_nothing(tmp_path: Path) -> None:
    pairs = [[0, 5], [0, 5], [1, 6], [1, 6], [2, 5], [2, 5], [3, 5]]  # ids 0 and 1 are of many users
    manifest = dataclasses.replace(write(tmp_path, pairs=pairs), vocabularies={"user": "user.parquet"})
    _, record = decided_task(PAIR, str(tmp_path), manifest, "train")
    assert record is not None and (record["repeats"], record["items"]) == (1, 3)


def test_a_setting_and_a_dataset_without_duplicates_decide_without_reading(tmp_path: Path) -> None:
    manifest = write(tmp_path, [[1, 1, 1]])
    (tmp_path / "rows.parquet").unlink()
    for given in (True, False):
        task = NextItemConfig(exclude_seen=given)
        assert decided_task(task, str(tmp_path), manifest, "train") == (
            task,
            {"excluded": given, "decided_by": "config"},
        )
    prepared = dataclasses.replace(manifest, preparation={"duplicates": "first"})
    _, record = decided_task(LIST, str(tmp_path), prepared, "train")
    assert record == {"excluded": True, "decided_by": "auto", "repeats": 0}  # no items, which nobody has counted
    assert describe_seen_items(record).endswith("=true, by auto: the dataset was prepared without repeats)")
    assert decided_task(ClickConfig(), str(tmp_path), manifest, "train") == (ClickConfig(), None)
