"""``distembed plan --smallest``: held against trying one size after another."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from distembed.base.errors import UserError
from distembed.commands import cli
from distembed.planning.devices import Cluster
from distembed.reports.plan import remedies, report
from distembed.reports.plan.assessment import Assessment, assess_capacity, is_fitting
from distembed.reports.plan.plannable import ConfiguredModel, Plannable
from distembed.reports.plan.remedies import Remedies, find_smallest
from distembed.training.config import load_config
from tests.capacity import commands
from tests.capacity.commands import EARLY, KAGGLE, NAIVE, cluster


def sizes(gpus: int, nodes: int) -> list[tuple[int, int]]:
    """All up to so many nodes, from small to large."""
    return [*((1, own) for own in range(1, gpus + 1)), *((own, gpus) for own in range(2, nodes + 1))]


def plan(*arguments: object) -> tuple[int, dict[str, Any]]:
    return commands.plan(KAGGLE, EARLY, *arguments)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("memory", "gpus", "device", "settings"),
    [
        ("80GiB", 4, "h100-80gb", []),
        ("1500MB", 4, "h100-80gb", [NAIVE]),
        ("1500MB", 1, "h100-80gb", [NAIVE]),
        ("2500MB", 2, "cpu-256gb", [NAIVE]),
        ("1500MB", 3, "h100-80gb", [NAIVE, "plan.sharding_types=[table_wise]"]),
    ],
)
def test_it_is_the_first_that_fits_of_all_tried_in_turn(
    memory: str, gpus: int, device: str, settings: list[str]
) -> None:
    config, there_is = load_config(KAGGLE, [EARLY, *settings]), cluster(memory, gpus=gpus, device=device)
    fitting = (
        size
        for size in sizes(gpus, 9)
        if is_fitting(ConfiguredModel(config), dataclasses.replace(there_is, nodes=size[0], ranks_per_node=size[1]))
    )
    found = find_smallest(ConfiguredModel(config), there_is)
    assert found.assessment is not None and found.assessment.fits
    own = found.assessment.cluster
    assert (own.nodes, own.ranks_per_node) == next(fitting)
    assert found.is_proven and not found.num_untried
    assert (found.one_less is None) == (own.world_size == 1)


def test_the_command_prints_the_plan_and_why_one_less_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    options = (NAIVE, "--memory", "1500MB")
    code, planned = plan(*options, "--gpus", 4, "--smallest")
    found, one_less = planned["smallest"]["found"], planned["smallest"]["one_less"]
    assert code == 0 and planned["fits"] and found == {"nodes": planned["nodes"], "gpus": planned["gpus"]}
    assert len(planned["ranks"]) == found["nodes"] * found["gpus"] == one_less["nodes"] * one_less["gpus"] + 1
    assert plan(*options, "--nodes", found["nodes"], "--gpus", found["gpus"])[1]["plan"] == planned["plan"]
    code, refused = plan(*options, "--nodes", one_less["nodes"], "--gpus", one_less["gpus"])
    assert code == 3 and not refused["fits"] and "smallest" not in refused
    demand = planned["smallest"]["shortage"][0]
    assert "the largest (" in demand and f"on {one_less['nodes'] * one_less['gpus']} rank(s)" in demand
    assert cli.app(["plan", str(KAGGLE), EARLY, *options, "--gpus", "4", "--smallest"], standalone_mode=False) in (
        None,
        0,
    )
    printed = capsys.readouterr().out
    assert f"smallest: {found['nodes']} x {found['gpus']} " in printed
    assert f"one less, {one_less['nodes']} x {one_less['gpus']} " in printed and demand in printed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "memory", "named"),
    [
        ([NAIVE, "plan.sharding_types=[data_parallel]"], "700MB", "table 'C3' needs"),
        (["model.top=[4096, 4096]"], "150MB", "network_weights"),
    ],
)
def test_where_no_number_of_devices_helps_it_says_so(
    settings: list[str], memory: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replicated table, or networks, larger than a device: each rank has all of it, however many there are."""
    monkeypatch.setattr(report, "find_remedies", lambda *_: Remedies())  # which have tests of their own
    code, planned = plan(*settings, "--memory", memory, "--gpus", 2, "--smallest")
    found = planned["smallest"]
    assert code == 3 and not planned["fits"] and found["found"] is None and found["proven"]
    assert named in " ".join(found["shortage"]), found
    assert (planned["nodes"], planned["gpus"]) == (1, 2)
    searched = find_smallest(ConfiguredModel(load_config(KAGGLE, settings)), cluster(memory, gpus=2))
    text = "\n".join(searched.lines)
    assert "no number of devices up to 4,096 helps" in text and "larger devices (--gpu)" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "2"], "--smallest finds the number of nodes, and --nodes is 2"),
        (["--compress", "new.yaml"], "--compress compresses tables for a given number of GPUs"),
        (["plan.tables={nope: {min_partition: 4}}"], "nope"),
        (["plan.host_memory=true"], "--host-memory"),
    ],
)
def test_what_contradicts_it_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan("--smallest", "--gpus", 2, "--memory", "700MB", *options)


class Counted:
    """Outcomes of a law in place of plans; says how often it was asked."""

    def __init__(self, fits: Callable[[int], bool], first: Assessment) -> None:
        self.fits, self.first, self.asked = fits, first, list[int]()

    def __call__(self, plannable: Plannable, own: Cluster) -> Assessment:
        if own.world_size not in self.asked:
            self.asked.append(own.world_size)
        # a plan that fits, and one of which there is none
        changes: dict[str, Any] = {"cluster": own}
        changes |= {} if self.fits(own.world_size) else {"ranks": (), "plan": None, "planner_error": "no room"}
        return dataclasses.replace(self.first, **changes)


@pytest.fixture(scope="module")
def small_plan() -> Assessment:
    found = assess_capacity(load_config(KAGGLE, []), cluster("80GiB"))
    assert found.fits
    return found


def search(
    monkeypatch: pytest.MonkeyPatch, first: Assessment, gpus: int, fits: Callable[[int], bool]
) -> tuple[remedies.Smallest, Counted]:
    counted = Counted(fits, first)
    monkeypatch.setattr(remedies, "is_fitting", lambda plannable, own: counted(plannable, own).fits)
    monkeypatch.setattr(remedies, "assess", counted)
    monkeypatch.setattr(remedies, "require_room", lambda request: None)
    return find_smallest(ConfiguredModel(load_config(KAGGLE, [])), cluster("80GiB", gpus=gpus)), counted


@pytest.mark.thorough
@pytest.mark.parametrize("gpus", [1, 3, 8, 64])
def test_where_more_devices_are_never_worse_it_is_the_least(
    gpus: int, monkeypatch: pytest.MonkeyPatch, small_plan: Assessment
) -> None:
    every = [nodes * own for nodes, own in sizes(gpus, 4096 // gpus)]
    for least in (*range(1, 13), 100, 777, every[-1]):
        found, counted = search(monkeypatch, small_plan, gpus, lambda ranks, least=least: ranks >= least)  # type: ignore[misc]
        assert found.assessment is not None
        expected = next(ranks for ranks in every if ranks >= least)
        assert found.assessment.cluster.world_size == expected
        assert len(counted.asked) == len(set(counted.asked)) <= 35
        smaller = [ranks for ranks in every if ranks < expected]
        assert found.num_untried == len(set(smaller) - set(counted.asked))
        assert found.is_proven == (found.num_untried == 0)
        if smaller:
            assert found.one_less is not None and found.one_less.world_size == smaller[-1]


@pytest.mark.thorough
def test_where_it_is_uneven_the_answer_fits_and_sizes_below_do_not(
    monkeypatch: pytest.MonkeyPatch, small_plan: Assessment
) -> None:
    """Up to eight sizes the answer is exact whatever fits; beyond, those that might be smaller are counted."""
    for seed in range(21):

        def fits(ranks: int, seed: int = seed) -> bool:
            is_lucky = ranks > 10 * (seed % 7) and (ranks * 2654435761 + seed * 97) % 101 < 30
            return ranks > 300 or is_lucky

        every = list(range(1, 4097))
        found, counted = search(monkeypatch, small_plan, 1, fits)
        assert found.assessment is not None
        answer = found.assessment.cluster.world_size
        assert fits(answer)
        assert not any(fits(ranks) for ranks in range(max(1, answer - 3), answer))
        assert found.num_untried == len(set(every[: answer - 1]) - set(counted.asked))
        if answer <= 8:
            assert answer == next(filter(fits, every)) and found.is_proven


def test_where_nothing_fits_it_is_not_called_proven(monkeypatch: pytest.MonkeyPatch, small_plan: Assessment) -> None:
    found, counted = search(monkeypatch, small_plan, 8, lambda ranks: False)
    assert found.assessment is None and not found.is_proven and max(counted.asked) == 4096
    assert len(counted.asked) < 30 and "was found to fit" in found.lines[0]
