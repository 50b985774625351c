"""The command: exit codes, and inputs that are odd but right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distembed.base.errors import UserError
from distembed.base.units import parse_bytes
from tests.in_process import in_this_process

COMMANDS = """
    prepare criteo, prepare table, prepare schema, prepare graph, prepare attributes, prepare ratings,
    prepare sequences, synthesize, configs, describe, plan, train, sweep, evaluate, predict, materialise, report, doctor
"""
ROW = "1\t" + "\t".join(["7"] * 13) + "\t" + "\t".join(["0000abcd"] * 26) + "\n"


def distembed(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = in_this_process(*arguments, code=code)
    assert "Traceback" not in done.stderr
    return done


def test_every_command_has_an_example() -> None:
    for command in COMMANDS.split(","):
        shown = " ".join(distembed(*command.split(), "--help").stdout.split())
        assert f"Example: distembed {command.strip()}" in shown


def test_the_installed_configs_are_listed_and_copied(tmp_path: Path) -> None:
    configs = Path(__file__).parents[1] / "configs"
    texts = {str(file.relative_to(configs)): file.read_text() for file in configs.rglob("*.yaml")}
    texts = {name: text for name, text in texts.items() if not name.startswith("papers/")}
    assert {line.split()[0] for line in distembed("configs").stdout.splitlines()} == texts.keys()
    (tmp_path / ".new.preparing").mkdir()  # of a copy that was killed
    distembed("configs", "--output", tmp_path / "new")
    assert os.listdir(tmp_path) == ["new"]
    assert {
        str(file.relative_to(tmp_path / "new")): file.read_text() for file in (tmp_path / "new").rglob("*.yaml")
    } == (texts)
    assert f"--output {tmp_path / 'new'} exists" in distembed("configs", "--output", tmp_path / "new", code=2).stderr


@pytest.mark.parametrize(("missing", "command"), [("torch", "plan"), ("torchrec", "plan"), ("torchx", "launch")])
def test_a_missing_member_of_the_trio_is_named_with_the_command_that_installs_it(missing: str, command: str) -> None:
    program = """
import sys
missing = sys.argv.pop(1)
class Missing:
    def find_spec(name, *_):
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
from distembed.commands.cli import main
main()
"""
    config = Path(__file__).parents[1] / "configs" / "mlperf_dlrm_dcnv2.yaml"
    words = [sys.executable, "-c", program, missing, command, config]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode in (1, 2) and len(done.stderr.splitlines()) == 1, done.stderr
    assert missing in done.stderr and "`distembed doctor --fix`" in done.stderr


@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_files_too_small_for_three_splits_are_prepared_all_the_same(tmp_path: Path, num_rows: int) -> None:
    (tmp_path / "few.tsv").write_text(ROW * num_rows)
    done = distembed("prepare", "criteo", tmp_path / "few.tsv", "--output", tmp_path / "out")
    assert sum(int(line.split()[1]) for line in done.stdout.splitlines() if " rows, label rate" in line) == num_rows


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("2GB", 2 * 10**9), ("2 GiB", 2**31), ("0.5kb", 500)])
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_bytes("--memory-limit", text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "1XB", "nan", "inf", "1e999"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--memory-limit"):
        parse_bytes("--memory-limit", text)
