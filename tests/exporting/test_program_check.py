"""Crafted programs, of which many run code of their maker where torch.export.load loads them: distembed loads none."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distembed.base.errors import RunError, UserError
from distembed.serving.export.programs import BATCH, ProgramInputs, save_program
from distembed.serving.model_folder.program_check import require_plain_program
from distembed.serving.model_folder.programs import load_program
from tests.canary import Canary
from tests.versions import PROGRAMS_HOLD_OPAQUE_CONSTANTS

MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
SAMPLE_INPUTS = "data/sample_inputs/model.pt"
Records = dict[str, bytes]


class Doubled(nn.Module):
    """A program of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return (dense * self.weight).sum(1).view(dense.shape[0], 1).squeeze(1)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("program") / "network.pt2"
    save_program(Doubled(), ProgramInputs({"dense": torch.ones(3, 2)}, {"dense": {0: BATCH}}), file)
    return file


def torch_pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def edited(records: Records, name: str, edit: Callable[[Any], None]) -> None:
    """Edits a JSON record."""
    value = json.loads(records[name])
    edit(value)
    records[name] = json.dumps(value).encode()


def expression(canary: Path) -> str:
    return f"Integer.__add__.__globals__['__builtins__']['open']({str(canary)!r}, 'w').fileno()"


def sample_inputs(records: Records, canary: Path) -> None:
    records[SAMPLE_INPUTS] = torch_pickle(((Canary(canary),), {}))


def weight(records: Records, canary: Path) -> None:
    edited(records, WEIGHTS, lambda config: config["config"]["weight"].update(use_pickle=True))
    records["data/weights/weight_0"] = torch_pickle(Canary(canary))


def weights_as_before(records: Records, canary: Path) -> None:
    records["data/weights/model.pt"] = torch_pickle({"weight": Canary(canary)})


def opaque_constant(records: Records, canary: Path) -> None:
    payload = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    edited(records, CONSTANTS, lambda config: config["config"].update(it=payload))
    records["data/constants/opaque_obj_0"] = pickle.dumps(Canary(canary))


def evaluated_size(records: Records, canary: Path) -> None:
    def edit(model: Any) -> None:
        sizes = model["graph_module"]["graph"]["tensor_values"]["dense"]["sizes"]
        sizes[0]["as_expr"]["expr_str"] = expression(canary)

    edited(records, MODEL, edit)


def guard(records: Records, canary: Path) -> None:
    edited(records, MODEL, lambda model: model["guards_code"].append(f"open({str(canary)!r}, 'w')"))
    records[SAMPLE_INPUTS] = torch_pickle(((torch.ones(3, 2),), {}))  # without which guards are not made


def earlier_format(records: Records, canary: Path) -> None:
    model = records[MODEL]
    records.clear()
    records["version"] = b"8.0"
    records["serialized_exported_program.json"] = model
    for name in ("state_dict", "constants", "example_inputs"):
        records[f"serialized_{name}.pt"] = torch_pickle({"": Canary(canary)})


RUN_CODE = [sample_inputs, weight, weights_as_before, opaque_constant, evaluated_size, guard, earlier_format]


if not PROGRAMS_HOLD_OPAQUE_CONSTANTS:
    RUN_CODE.remove(opaque_constant)


GRAPH = ["graph_module", "graph"]
LAST_NODE = [*GRAPH, "nodes", -1]
SIGNATURE = ["graph_module", "signature", "input_specs", 0, "parameter"]
TREE = '[1, {"type": "collections.defaultdict", "context": "null", "children_spec": []}]'


def argument(**kind: Any) -> dict[str, Any]:
    return {"name": "", "arg": kind, "kind": 1}


OTHERS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "an operator of the system": (LAST_NODE, {"target": "torch.os.system", "inputs": [argument(as_string="touch x")]}),
    "the name of a variable": ([*LAST_NODE, "outputs", 0, "as_tensor"], {"name": "it = open('x'); it"}),
    "the name of a weight": (SIGNATURE, {"parameter_name": 'a", print("b'}),
    "a file as a tensor": (LAST_NODE, {"target": "torch.ops.aten.from_file.default"}),
    "an operator without kernels": (LAST_NODE, {"target": "torch.ops.aten.save.default"}),
    "an operator of a library": (LAST_NODE, {"target": "torch.ops.fbgemm.pack_segments.default"}),
    "an inner graph": (LAST_NODE, {"inputs": [argument(as_graph={"name": "it", "graph": {}})]}),
    "a class of inputs": (["graph_module", "module_call_graph", 0, "signature"], {"in_spec": TREE}),
    "notes": ([*LAST_NODE, "metadata"], {"stack_trace": "\nopen('x')"}),
}
"""Where in the model which values are others."""


def crafted(program: Path, file: Path, craft: Callable[[Records, Path], None], canary: Path) -> Path:
    """Writes a program with other records."""
    with zipfile.ZipFile(program) as archive:
        folder = archive.namelist()[0].split("/")[0]
        records = {name.removeprefix(f"{folder}/"): archive.read(name) for name in archive.namelist()}
    craft(records, canary)
    prefix = "" if "version" in records else f"{folder}/"
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in records.items():
            archive.writestr(f"{prefix}{name}", value)
    return file


@pytest.mark.parametrize("craft", RUN_CODE)
def test_code_that_torch_runs_is_not_run(craft: Callable[..., None], program: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    file = crafted(program, tmp_path / "network.pt2", craft, canary)
    with pytest.raises(UserError, match=r"network.pt2 is (not loaded: it has|no program)"):
        load_program(file)
    assert not canary.exists()
    try:
        torch.export.load(file).module()(torch.ones(3, 2))
    except Exception:  # what became of the program does not matter
        pass
    assert canary.exists(), "the guard is no longer needed, or this test no longer shows that it is"


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_written_is_not_loaded(name: str, program: Path, tmp_path: Path) -> None:
    path, values = OTHERS[name]

    def craft(records: Records, _: Path) -> None:
        edited(records, MODEL, lambda model: reduce(getitem, path, model).update(values))

    file = crafted(program, tmp_path / "network.pt2", craft, tmp_path)
    with pytest.raises(UserError, match="network.pt2 is not loaded: it has .* may run code"):
        require_plain_program(file)


def test_a_library_in_the_archive_is_not_loaded(program: Path, tmp_path: Path) -> None:
    def craft(records: Records, _: Path) -> None:
        records["data/aotinductor/model/library.so"] = b"\x7fELF"

    file = crafted(program, tmp_path / "network.pt2", craft, tmp_path)
    with pytest.raises(UserError, match="network.pt2 is not loaded: it has .* may run code"):
        require_plain_program(file)


def test_a_program_that_was_packed_again_is_the_same(program: Path, tmp_path: Path) -> None:
    again = load_program(crafted(program, tmp_path / "network.pt2", lambda *_: None, tmp_path))
    assert again(torch.ones(3, 2)).tolist() == [2, 2, 2]


def test_a_damaged_program_is_named(program: Path, tmp_path: Path) -> None:
    file = tmp_path / "network.pt2"
    for content in (b"", b"not a zip", program.read_bytes()[:-300]):
        file.write_bytes(content)
        with pytest.raises(UserError, match="network.pt2 is no program of torch.export, or it is damaged"):
            load_program(file)
    with pytest.raises(UserError, match="missing.pt2 is no program"):
        load_program(tmp_path / "missing.pt2")


def test_programs_hold_no_places_of_the_machine_that_wrote_them(program: Path) -> None:
    with zipfile.ZipFile(program) as archive:
        texts = b"".join(archive.read(name) for name in archive.namelist())
    assert b".py" not in texts and b"/" not in texts.replace(b"models/", b"")


class Unknown(nn.Module):
    """A model with an operator that torch alone has not."""

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return torch.ops.distembed_test.twice(dense)


def test_a_model_with_operators_of_its_own_is_not_exported(tmp_path: Path) -> None:
    @torch.library.custom_op("distembed_test::twice", mutates_args=())
    def twice(dense: torch.Tensor) -> torch.Tensor:
        return dense * 2

    twice.register_fake(torch.empty_like)
    inputs = ProgramInputs({"dense": torch.ones(3, 2)}, {"dense": {0: BATCH}})
    with pytest.raises(RunError, match="Unknown cannot be made a program.*distembed_test.twice"):
        save_program(Unknown(), inputs, tmp_path / "network.pt2")
