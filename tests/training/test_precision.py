"""What a processor computes in by ``train.precision=auto``, in training and in what the doctor says."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.checkpoints.checkpoint import load_weights
from distembed.data.dataset.schema import Schema
from distembed.reports.doctor.facts import MachineFacts
from distembed.reports.doctor.findings import check_machine
from distembed.serving.model_folder.programs import load_programs
from distembed.serving.model_folder.reading import read_manifest, sample_inputs
from distembed.serving.whole_model import load_whole_model
from distembed.training import build
from distembed.training.build import Blueprint, used_precision
from distembed.training.config import Config, load_config
from distembed.training.describe import describe
from distembed.training.resume import require_same_config
from distembed.training.train_config import TrainConfig
from distembed.training.trained_run import find_trained_run
from tests.ranks import run_on_ranks
from tests.small_runs import call, distembed, losses, stopped_at, train_small

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 1, CPU)


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("Intel Xeon", {"avx512_bf16", "amx_bf16"}, "bf16"),
        ("Intel Xeon", {"avx512_bf16"}, "fp32"),
        ("AMD EPYC", {"avx512_bf16"}, "bf16"),
        ("AMD EPYC", {"avx2"}, "fp32"),
        ("Neoverse V2", {"bf16"}, "bf16"),
    ],
)
def test_bf16_is_taken_where_it_multiplies_faster(
    name: str, flags: set[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_flags = ("avx2", "avx512_bf16", "amx_bf16", "bf16")
    capabilities = {"l2_cache_size": 1, **{flag: flag in flags for flag in all_flags}}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(build, "is_intel_processor", lambda: name.startswith("Intel"))
    assert used_precision("auto", ALONE) == expected
    assert [used_precision(own, ALONE) for own in ("bf16", "fp32")] == ["bf16", "fp32"]

    machine = MachineFacts("Linux", 2, frozenset(flags), name.startswith("Intel"), 2**34, Path("."), 2**34)
    (found,) = [own for own in check_machine(machine) if own.subject == "processor bf16"]
    assert (found.status == "ok") == (expected == "bf16")


@pytest.mark.distributed
def test_ranks_compute_alike_on_unlike_processors() -> None:
    run_on_ranks(2, _require_one_precision)


def _require_one_precision(rank: int, world_size: int) -> None:
    ranks = Ranks(rank, world_size, world_size, CPU)
    for slow in ([], [0], [1], [0, 1]):
        build.multiplies_faster_in_bf16 = lambda flags, is_intel, slow=slow: rank not in slow
        for precision, computed in (("auto", "fp32" if slow else "bf16"), ("bf16", "bf16"), ("fp32", "fp32")):
            assert used_precision(precision, ranks) == computed
            config = Config(train=TrainConfig(precision=precision))
            blueprint = Blueprint.for_ranks(config, Schema("label", (), ()), ranks, {})
            assert (blueprint.precision, blueprint.bf16) == (computed, computed == "bf16")


FP16 = ["embedding.default.data_type=fp16"]
ADAGRAD = ["train.sparse_optimizer={name: row_wise_adagrad, learning_rate: 0.1, eps: 0.01}"]
AMSGRAD = ["train.sparse_optimizer={name: amsgrad, learning_rate: 0.05}"]
COMMS = ["train.quantized_comms={forward_precision: fp16, backward_precision: bf16}"]
REPLICATED = ["plan.sharding_types=[data_parallel]"]
SETTINGS = {
    "fp16": [*FP16, *ADAGRAD],
    "fp16, amsgrad": [*FP16, *AMSGRAD],
    "fp16, on every rank": [*FP16, *ADAGRAD, *REPLICATED],
    "bf16, on every rank": ["embedding.default.data_type=bf16", *ADAGRAD, *REPLICATED],
    "output_dtype": ["embedding.output_dtype=fp16"],
    "quantized_comms": COMMS,
}
DEFAULT = ("fp16", "output_dtype", "quantized_comms")
STEPS = "train.max_steps=8"
CHECKPOINTS = ["train.checkpoint_every=4", "train.keep_checkpoints=9"]
WEIGHTS = ["embedding_bags.C2__p0.weight", "embedding_bags.M__p1.weight", "bottom.layers.0.weight"]


def saved_weights(run: Path) -> list[Tensor]:
    return load_weights(run / "checkpoints" / "step-00000008", WEIGHTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Path:
    """A folder with the config, in which a run in float32 has taken one step."""
    folder = tmp_path_factory.mktemp("half")
    train_small(folder, dataset, 1)
    return folder


def train(folder: Path, run: Path, *overrides: object, ranks: int = 1) -> Path:
    arguments = ["train", folder / "config.yaml", STEPS, *CHECKPOINTS, *overrides, "--run-dir", run]
    if ranks > 1:
        distembed(*arguments, ranks=ranks)
    else:
        call(*arguments)
    return run


@pytest.fixture(scope="module")
def fp16_run(folder: Path) -> Path:
    return train(folder, folder / "fp16-run", *SETTINGS["fp16"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in SETTINGS]
)
def test_a_resumed_run_gives_the_weights_of_one_that_was_not_stopped(
    name: str, folder: Path, fp16_run: Path, tmp_path: Path
) -> None:
    whole = fp16_run if name == "fp16" else train(folder, tmp_path / "whole", *SETTINGS[name])
    part = train(folder, stopped_at(4, whole, tmp_path / "part"), *SETTINGS[name], "--resume")
    assert len(losses(whole)) == 8 and losses(part) == losses(whole)
    dtype = torch.float16 if "fp16" in name else torch.bfloat16 if "bf16" in name else torch.float32
    for weight, other in zip(saved_weights(part), saved_weights(whole), strict=True):
        assert weight.equal(other)
    assert [weight.dtype for weight in saved_weights(whole)] == [dtype, dtype, torch.float32]


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        (FP16, ["embedding.default.data_type: 'fp32' before, 'fp16' now"]),
        (["embedding.tables.C2.data_type=bf16"], ["embedding.tables.C2.data_type: None before, 'bf16' now"]),
        (["embedding.output_dtype=bf16"], ["embedding.output_dtype: 'fp32' before, 'bf16' now"]),
        (
            COMMS,
            [
                "train.quantized_comms.forward_precision: 'fp32' before, 'fp16' now",
                "train.quantized_comms.backward_precision: 'fp32' before, 'bf16' now",
            ],
        ),
    ],
)
def test_resuming_with_another_precision_is_refused_by_name(folder: Path, changed: list[str], lines: list[str]) -> None:
    run = folder / "run"
    with pytest.raises(UserError) as error:
        require_same_config(run, load_config(folder / "config.yaml", ["train.max_steps=1", *changed]))
    for line in lines:
        assert f"\n  {line}" in str(error.value)


def test_a_run_in_fp16_is_not_resumed_in_float32(folder: Path, fp16_run: Path) -> None:
    with pytest.raises(UserError, match="embedding.default.data_type: 'fp16' before, 'fp32' now"):
        train(folder, fp16_run, *ADAGRAD, "--resume")


@pytest.mark.thorough
def test_fp16_runs_are_described_reported_and_exported(fp16_run: Path, tmp_path: Path) -> None:
    described = describe(load_config(fp16_run / "config.yaml")).as_json()["tables"]
    assert [table["data_type"] for table in described] == ["fp16"] * 4
    assert [table["bytes"] for table in described] == [2 * table["parameters"] for table in described]
    call("report", fp16_run, "-o", tmp_path / "report")
    assert "fp16-run" in next(tmp_path.glob("report*")).read_text()
    call("export", fp16_run, "-o", tmp_path / "model")
    manifest = read_manifest(tmp_path / "model")
    program = load_programs(tmp_path / "model", manifest)
    sample = json.loads((tmp_path / "model" / "sample.json").read_text())
    with torch.inference_mode():
        exported = program(*sample_inputs(sample, manifest)).numpy()
    call("predict", fp16_run, "--output", tmp_path / "predictions.parquet")
    predicted = pq.read_table(tmp_path / "predictions.parquet")["prediction"].to_numpy()
    assert len(exported) == len(predicted) == 203
    assert np.abs(exported - predicted).max() <= 1e-6  # computed in float32 from the same fp16 numbers
    weights = load_whole_model(find_trained_run(fp16_run, None), torch.device("cpu")).module.named_parameters()
    own = {weight.dtype for name, weight in weights if "embedding_bags" in name}
    assert own == {torch.float16}


def test_a_run_in_fp16_is_gone_on_from_in_fp16_alone(folder: Path, fp16_run: Path, tmp_path: Path) -> None:
    """Its weights are those that the next run begins with, and what vectors are rounded to may be another thing."""
    next_run = tmp_path / "next"
    still = ["train.sparse_optimizer.learning_rate=1e-9", "train.dense_optimizer.learning_rate=1e-9"]
    begin = ["--init-from", fp16_run]
    train(folder, next_run, *SETTINGS["fp16"], *still, "embedding.output_dtype=bf16", *begin)
    config = load_config(next_run / "config.yaml").embedding
    assert (config.default.data_type, config.output_dtype) == ("fp16", "bf16")
    for weight, before in zip(saved_weights(next_run)[:2], saved_weights(fp16_run)[:2], strict=True):
        assert weight.dtype == torch.float16 and weight.equal(before)
    with pytest.raises(UserError, match="table 'C2': data_type was 'fp16' and is 'fp32'"):
        train(folder, tmp_path / "other", *ADAGRAD, *begin)
