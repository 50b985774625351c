"""Nodes that prepare together, as TorchX starts them on this machine."""

import sys
from pathlib import Path

import pytest
from torchx.runner import get_runner
from torchx.specs import AppState

from distembed.data.prepare import CriteoOptions, prepare_criteo
from tests.data import reference
from tests.data.reference import folder_bytes

COMPONENTS = Path(__file__).parents[2] / "launch" / "components.py"


@pytest.mark.distributed
def test_two_nodes_on_this_machine_prepare_what_one_process_does(tmp_path: Path) -> None:
    (tmp_path / "days").mkdir()
    for day in range(4):
        (tmp_path / "days" / f"day_{day}.tsv").write_bytes(reference.content(200, day))
    arguments = ["--output", str(tmp_path / "launched"), "-j", "2x2", "--python", sys.executable]
    arguments += ["--cpu", "1", "--memMB", "2000", "--", str(tmp_path / "days"), "--split", "days"]
    with get_runner() as runner:
        handle = runner.run_component(
            f"{COMPONENTS}:prepare", arguments, "local_cwd", {"log_dir": str(tmp_path / "logs")}
        )
        status = runner.wait(handle, wait_interval=0.2)
    printed = "".join(path.read_text() for path in (tmp_path / "logs").rglob("std*.log"))
    assert status.state == AppState.SUCCEEDED, printed
    prepare_criteo([tmp_path / "days"], tmp_path / "direct", CriteoOptions(split="days"))
    assert folder_bytes(tmp_path / "launched") == folder_bytes(tmp_path / "direct")
