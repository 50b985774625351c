"""Compiled programs: they score as the trained model does, for any number of rows, and are code that is asked for."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import distembed
from distembed.base.errors import RunError, UserError
from distembed.composition import COMPOSITIONS
from distembed.serving.export.export_run import ExportOptions, export_run
from distembed.serving.export.feature_vectors import plain_inputs
from distembed.serving.export.parity import made_up_batch
from distembed.serving.export.programs import ProgramInputs, compile_program, require_running, save_program
from distembed.serving.export.table_groups import ExportStorage, Materialise
from distembed.serving.model_folder.compiled import CompiledNetwork, load_compiled, processor_name
from distembed.serving.model_folder.manifest import CompiledProgram, ExportedProgram, ExportManifest, Parity, Precision
from distembed.serving.model_folder.programs import load_programs
from distembed.serving.model_folder.reading import read_manifest, require_unchanged
from distembed.training.trained_run import find_trained_run
from tests.exporting.test_programs import click_model, require_equal_scores, round_tables, schema, scored, tables
from tests.exporting.test_recommenders import LENGTHS, exported, inputs, recommended, recommender, require_best, rows
from tests.exporting.test_recommenders import round_tables as round_items
from tests.server.exported_models import exported as exported_folder
from tests.server.exported_models import json_rows, trained_run
from tests.server.processes import serving
from tests.small_runs import distembed as command
from tests.small_runs import train_small, write_dataset

PROCESSOR = processor_name(), torch.backends.cpu.get_cpu_capability()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("composition", "precision", "materialise"),
    [
        *((name, "fp32", "never") for name in COMPOSITIONS),
        ("product", "int8", "never"),
        ("path_mlp", "fp16", "never"),
        ("concat", "int8", "always"),
    ],
)
def test_compiled_scores_are_those_of_the_model(
    composition: str, precision: Precision, materialise: Materialise, tmp_path: Path
) -> None:
    """Tables of each scheme, lists of each pooling, hashes and id policies, in one program."""
    configs = [own for own in tables(composition) if not own.name.endswith("_67")]
    model = click_model("dcn" if composition == "sum" else "dlrm", configs)
    whole = scored(model)
    storage = ExportStorage(precision, materialise)
    sample = whole.inputs(made_up_batch(schema(whole.tables), 5))
    save_program(whole.whole_program(storage), sample, tmp_path / "network.pt2")
    compile_program(tmp_path / "network.pt2", sample, tmp_path / "compiled.pt2")
    program = CompiledNetwork(tmp_path / "compiled.pt2", {"values": None, "lengths": len(whole.features), "dense": 2})
    if materialise == "never":
        round_tables(model, precision)
        require_equal_scores(program, model, whole)
        return
    expected = whole.whole_program(storage)
    for num_rows in (0, 1, 33):
        own = whole.inputs(made_up_batch(schema(whole.tables), num_rows)).tensors.values()
        with torch.no_grad():
            torch.testing.assert_close(program(*own), expected(*own), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "scheme", "composition", "precision"),
    [
        ("sasrec", "quotient_remainder", "product", "fp32"),
        ("sasrec_untied", "chinese_remainder", "path_mlp", "fp32"),
        ("gru_beside", "mixed_radix", "sum", "int8"),
        ("gru", "naive", "product", "fp16"),
        ("mf", "explicit", "concat", "fp32"),
        ("mf_lists", "remainder", "path_linear", "int8"),
    ],
)
def test_compiled_recommendations_are_those_of_the_model(
    name: str, scheme: str, composition: str, precision: Precision, tmp_path: Path
) -> None:
    model = recommender(name, scheme, composition)
    whole, sample = exported(model), inputs(exported(model), rows())
    save_program(whole.whole_program(ExportStorage(precision, "never")), sample, tmp_path / "network.pt2")
    compile_program(tmp_path / "network.pt2", sample, tmp_path / "compiled.pt2")
    program = CompiledNetwork(tmp_path / "compiled.pt2", {"values": None, "lengths": len(whole.features)})
    round_items(model, precision)
    for lengths in ((), (0,), (1,), (9,), (0, 0), LENGTHS):
        require_best(recommended(program, whole, rows(lengths)), model, rows(lengths))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return train_small(folder, write_dataset(folder / "data"), 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_exported_compiled_and_loaded_where_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    made = export_run(find_trained_run(run, None), folder, ExportOptions(compile=True))
    manifest = read_manifest(folder)
    require_unchanged(folder, manifest)
    assert manifest.compiled == made.compiled and made.compiled is not None
    assert made.compiled.file in manifest.checksums and made.compiled.largest_difference <= 1e-6
    assert (made.compiled.processor, made.compiled.instructions) == PROCESSOR
    plain, compiled = load_programs(folder, manifest), load_programs(folder, manifest, compiled=True)
    batch = made_up_batch(find_trained_run(run, None).manifest.schema, 33)
    own = list(plain_inputs(batch, manifest.features, takes_numbers=True).tensors.values())
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*own), plain(*own), atol=1e-6, rtol=0)
    values, lengths, dense = own
    strided = [values, lengths.T.contiguous().T, dense.T.contiguous().T]
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*strided), plain(*own), atol=1e-6, rtol=0)
    for wrong, text in (
        ((values, lengths[:-1], dense), r"lengths is torch.int64 \[3, 33\], and the program takes .* \[4, any\]"),
        ((values, lengths, dense[:, :1]), r"dense is torch.float32 \[33, 1\], and the program takes .* \[any, 2\]"),
        ((values.int(), lengths, dense), "values is torch.int32"),
        ((values, lengths, dense[:-1]), "the inputs have different numbers of rows"),
    ):
        with pytest.raises(ValueError, match=text):
            compiled(*wrong)
    with pytest.raises(RuntimeError, match="lengths say another number of ids than values has"):
        compiled(values[:-1], lengths, dense)
    other = dataclasses.replace(manifest, compiled=dataclasses.replace(made.compiled, processor="Another 9000"))
    with pytest.raises(UserError, match="was compiled for the processor Another 9000, and this is .*; export the run"):
        load_compiled(folder, other)
    with pytest.raises(UserError, match="was compiled for the torch 1.0, and this is"):
        load_compiled(folder, dataclasses.replace(manifest, versions={"torch": "1.0"}))


def test_without_a_compiler_nothing_is_exported() -> None:
    message = "--compile needs a C.. compiler, and there is neither one that CXX names nor g"
    with torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++")}), pytest.raises(UserError, match=message):
        ExportOptions(compile=True)
    ExportOptions(compile=True)


@pytest.mark.slow
def test_divided_tables_are_not_compiled(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="--compile makes one program with all tables, and --server-memory divides them"
    ):
        export_run(find_trained_run(run, None), tmp_path / "model", ExportOptions(server_bytes=10_000, compile=True))
    assert not (tmp_path / "model").exists()


def test_what_is_no_program_is_not_compiled(tmp_path: Path) -> None:
    (tmp_path / "network.pt2").write_bytes(b"no program")
    sample = ProgramInputs({"values": torch.zeros(2, dtype=torch.int64)}, {})
    with pytest.raises(UserError, match="is no program of torch.export"):
        compile_program(tmp_path / "network.pt2", sample, tmp_path / "compiled" / "network.pt2")


@pytest.mark.slow
def test_code_that_does_not_run_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "compiled.pt2").write_bytes(b"no code")
    sample = ProgramInputs(
        {"values": torch.ones(2, dtype=torch.int64), "lengths": torch.ones(1, 2, dtype=torch.int64)}, {}
    )
    with pytest.raises(RunError, match=r"what AOTInductor compiled does not run \(.+\), so that nothing was written"):
        require_running(tmp_path / "compiled.pt2", sample)


def test_a_folder_without_a_compiled_program_says_so(tmp_path: Path) -> None:
    network = ExportedProgram("network.pt2", ["values", "lengths"], ["prediction"])
    manifest = ExportManifest("click", "dlrm", 1, "fp32", network, [], [], [], Parity(0, 0.0), {"torch": "2"}, {})
    with pytest.raises(UserError, match="has no compiled program; export the run with --compile"):
        load_programs(tmp_path, manifest, compiled=True)
    there = CompiledProgram("compiled/network.pt2", *PROCESSOR, 0.0)
    broken = dataclasses.replace(manifest, compiled=there, versions={"torch": torch.__version__})
    with pytest.raises(
        UserError, match="compiled/network.pt2 cannot be loaded: .*; export the run with --compile on this"
    ):
        load_programs(tmp_path, broken, compiled=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_compiled_program_is_served_where_that_is_asked_for(tmp_path: Path) -> None:
    run = trained_run(tmp_path)
    plain = exported_folder(run, tmp_path / "plain")
    done = command("serve", plain, "--port", 0, "--compiled", code=2)
    assert "has no compiled program; export the run with --compile" in done.stderr.replace("\n", " ")
    model = exported_folder(run, tmp_path / "model", compile=True)
    rows = json_rows(40)
    expected = distembed.load(run).predict(rows)
    with serving(model, tmp_path / "compiled", "--compiled") as server:
        status, answer = server.ask({"rows": rows})
        assert status == 200
        np.testing.assert_allclose(answer["prediction"], expected, atol=1e-6)
    code = model / "compiled" / "network.pt2"
    code.write_bytes(code.read_bytes()[:-1] + b"?")
    done = command("serve", model, "--port", 0, "--compiled", code=2)
    assert "is damaged: its checksum differs from the recorded one" in done.stderr.replace("\n", " ")
