"""Laws of the components: TorchX finds and accepts them, and each node runs what was asked for, to the letter."""

import json
import os
import pkgutil
import re
import socket
import stat
import subprocess
import sys
import threading
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchx import schedulers, specs
from torchx.specs import file_linter, finder
from torchx.specs.builders import materialize_appdef

from distembed.base.errors import UserError
from distembed.launch import components, resources
from distembed.launch.apps.request import NodeRequest, Shape, parse_shape
from distembed.launch.apps.roles import find_resource, job_name
from distembed.launch.components import bench, evaluate, prepare, train
from distembed.launch.nodes import run as node_run
from distembed.launch.nodes.run import await_host as wait
from distembed.planning.devices import DEVICES
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
FILE = ROOT / "launch" / "components.py"
NAMES = ["train", "evaluate", "prepare", "bench"]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@pytest.mark.parametrize("name", NAMES)
def test_torchx_accepts_it_by_path_and_by_name(name: str) -> None:
    assert file_linter.validate(str(FILE), name) == []
    assert finder.get_component(f"{FILE}:{name}").fn_name == name
    assert finder.get_component(f"distembed.{name}").fn is getattr(components, name)
    _, described = file_linter.get_fn_docstring(getattr(components, name))
    assert [key for key, text in described.items() if not text.strip()] == []


def test_torchx_keeps_what_it_has_itself() -> None:
    found = set(finder.get_components())
    assert {"dist.ddp", "dist.spmd", "utils.echo", "utils.python"} < found
    assert {name for name in found if name.startswith("distembed.")} == {f"distembed.{name}" for name in NAMES}
    assert set(schedulers.get_scheduler_factories()) == set(schedulers.DEFAULT_SCHEDULER_MODULES)
    for name in ("aws_p5.48xlarge", "gpu.small", "cpu.large"):
        assert specs.named_resources[name].cpu > 0


def test_the_schedulers_that_are_mended_are_ours() -> None:
    ours = {"local_cwd", "slurm", "kubernetes", "aws_batch", "ray"}
    groups = {point.name: point.value for point in entry_points(group="torchx.schedulers")}
    assert {name for name, place in groups.items() if place.startswith("distembed.launch.")} == ours
    factories = schedulers.get_scheduler_factories()
    for name in ours - {"ray"}:
        module = name.removesuffix("_cwd")
        assert type(factories[name]("test")).__module__.startswith(f"distembed.launch.schedulers.{module}")


def test_named_resources_are_those_that_are_registered() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    registered = project["entry-points"]["torchx.named_resources"]
    own = {name for name in vars(resources) if name.partition("_")[0] in ("cpu", "gpu", "aws", "gcp", "azure")}
    assert {value.partition(":")[2] for value in registered.values()} == own - {"gpu_name"}
    for name, place in registered.items():
        assert re.sub(r"[.-]", "_", name).lower() == place.removeprefix("distembed.launch.resources:").lower()
        node = pkgutil.resolve_name(place)()
        assert specs.named_resources[name] == node
        gpu = resources.gpu_name(node)
        assert gpu in DEVICES if node.gpu else gpu in {None, *DEVICES}
    # TorchX's own say which machine they are
    assert resources.gpu_name(specs.named_resources["aws_p5.48xlarge"]) == "h100-80gb"
    assert resources.gpu_name(specs.named_resources["gpu.small"]) is None


def test_torch_is_not_loaded_to_launch() -> None:
    program = (
        "import importlib, pkgutil, sys, distembed.launch as launch\n"
        "names = {module.name for module in pkgutil.walk_packages(launch.__path__, 'distembed.launch.')}\n"
        # the first plans, and the second runs on the nodes
        "names -= {'distembed.launch.jobs.start', 'distembed.launch.nodes.agent'}\n"
        "for name in names: importlib.import_module(name)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n", done.stderr


SHAPES = {"4x8": (4, 4, 8), "2:4x8": (2, 4, 8), "8": (1, 1, 8), "1x1": (1, 1, 1), "3:3x2": (3, 3, 2)}


@settings(max_examples=25)
@given(st.integers(1, 99), st.integers(0, 99), st.integers(1, 99))
def test_a_shape_is_read_as_it_is_written(least: int, more: int, processes: int) -> None:
    shape = Shape(least, least + more, processes)
    assert {j: parse_shape(j) for j in SHAPES} == {j: Shape(*numbers) for j, numbers in SHAPES.items()}
    assert parse_shape(str(shape)) == shape
    assert shape.elastic == (more > 0)


@pytest.mark.parametrize(
    "j", ["", "x", "4x", "x8", "0x1", "1x0", "0", "4:2x8", "0:2x1", "1:2", "-1x2", "2x2x2", "1.5x2"]
)
def test_another_shape_is_refused(j: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(j))):
        parse_shape(j)


@settings(max_examples=50)
@given(TEXT)
def test_names_of_jobs_are_labels_or_refused(text: str) -> None:
    try:
        name = job_name(text)
    except UserError:
        assert not re.search("[a-z]", text.lower())
        return
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= 32
    assert job_name(name) == name


def test_a_job_is_named_after_its_folder() -> None:
    assert train(config="c", run_dir="/shared/runs/2024_First.Try").name == "first-try"
    assert train(config="c", run_dir="runs/a", name="b").name == "b"
    assert bench(benchmark="sse").name == "bench-sse"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"j": "two"}, "j is 'two'"),
    ({"j": "1:2x1", "max_restarts": 0}, "max_restarts 1 or more"),
    ({"h": "gpu_8_h10"}, "Did you mean `gpu_8_h100`"),
    ({"h": "gpu_8_h100", "cpu": 4}, "and cpu=4 too"),
    ({"h": "gpu_8_h100", "j": "2x16"}, "give 2x8"),
    ({"gpu": 1, "cpu": 8, "memMB": 9000, "j": "1:4x2"}, "give 1:4x1"),
    ({"gpu": 1, "cpu": 8}, "gpu is 1 without cpu and memMB"),
    ({"cpu": 0}, "cpu is 0"),
    ({"cpu": "many"}, "cpu is 'many'; give a whole number"),
    ({"gpu": -1}, "gpu is -1"),
    ({"memMB": 0}, "memMB is 0"),
    ({"max_restarts": -1}, "max_restarts is -1"),
    ({"max_retries": -1}, "max_retries is -1"),
    ({"rdzv_port": 80}, "rdzv_port is 80"),
    ({"join_timeout": 0}, "join_timeout is 0"),
    ({"name": "42"}, "name is '42'"),
    ({"mounts": ["src=/data", "dst=/data"]}, "its type first"),
    ({"mounts": ["type=bind", "scr=/data"]}, "unknown mount option"),
    ({"mounts": ["type=bind", "dst=/data"]}, "src"),
]


@pytest.mark.parametrize(("arguments", "reason"), REFUSED)
def test_a_wrong_argument_is_refused_with_its_value(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=re.escape(reason)):
        train(**{"config": "c", "run_dir": "runs/first", **arguments})


def test_components_of_one_node_refuse_more() -> None:
    with pytest.raises(UserError, match="give 1x4"):
        evaluate(run_dir="runs/first", j="2x4")
    with pytest.raises(UserError, match="bench_NAME"):
        bench(benchmark="../x")


def test_threads_are_shared_out_among_processes() -> None:
    def threads(**arguments: Any) -> str:
        return train(config="c", run_dir="runs/a", **arguments).roles[0].env["OMP_NUM_THREADS"]

    assert threads(h="gpu_8_h100", j="2x8") == "12"
    assert threads(cpu=2, j="4") == "1"
    assert threads(cpu=64, env={"OMP_NUM_THREADS": "7"}) == "7"
    assert find_resource(NodeRequest()) == specs.Resource(cpu=2, gpu=0, memMB=4096)


def test_the_command_line_of_torchx_reaches_the_component() -> None:
    line = "--config c.yaml --run_dir runs/a -j 1:2x3 --env A=1,B=2 --max_retries 4 -- train.epochs=2 data.path=x"
    role = materialize_appdef(train, line.split()).roles[0]
    assert (role.min_replicas, role.num_replicas, role.max_retries, role.env["B"]) == (1, 2, 4, "2")
    assert "train c.yaml train.epochs=2 data.path=x --run-dir runs/a --resume-or-start" in role.args[-1]


@pytest.mark.parametrize("overrides", [[], ["train.device=auto", "train.epochs=2"], ["train.device=cuda"]])
@pytest.mark.parametrize("j", ["1x1", "2x8", "1:2x8"])
def test_nodes_with_gpus_train_on_them(j: str, overrides: list[str], tmp_path: Path) -> None:
    python = str(program(tmp_path))
    application = train(*overrides, config="c.yaml", run_dir=str(tmp_path), h="gpu_8_h100", j=j, python=python)
    script = application.roles[0].args[-1]
    assert script.count("train.device=") == script.count("train.device=cuda") == 1
    assert ("train.epochs=2" in script) == ("train.epochs=2" in overrides)
    on_processors = train(*overrides, config="c.yaml", run_dir=str(tmp_path), h="cpu_64", j=j, python=python)
    assert all(setting in on_processors.roles[0].args[-1] for setting in overrides)
    assert on_processors.roles[0].args[-1].count("train.device=") == sum("device" in each for each in overrides)
    with pytest.raises(UserError, match="train.device is cpu, and the job asks for nodes with GPUs"):
        train("train.device=cpu", config="c.yaml", run_dir=str(tmp_path), h="gpu_8_h100", j=j, python=python)


def program(folder: Path) -> Path:
    """An interpreter that notes each call's arguments and what it would write a failure to."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable} -S\nimport json, os, sys\n"
        f"with open({str(folder / 'calls')!r}, 'a') as calls:\n"
        "    print(json.dumps([sys.argv[1:], os.environ.get('TORCHELASTIC_ERROR_FILE')]), file=calls)\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run_node(app: specs.AppDef, folder: Path, replica: int, rank0: str | None) -> list[list[Any]]:
    """What the node's script calls; ``rank0`` is the host that the scheduler names as the first one."""
    values = macro_values(replica)
    script = values.apply(app.roles[0]).args[-1]
    (folder / "calls").unlink(missing_ok=True)
    environment = {**os.environ, **({"FIRST": rank0} if rank0 is not None else {})}
    subprocess.run(["bash", "-c", script], check=True, env=environment, cwd=folder, timeout=60)
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def macro_values(replica: int) -> Any:
    return specs.macros.Values(img_root="", app_id="app-1", replica_id=str(replica), rank0_env="FIRST")


@settings(max_examples=8)
@given(st.lists(TEXT, min_size=1, max_size=12))
def test_arguments_arrive_as_they_were_given(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("node")
    application = train(*texts, config="$HOME ${app_id}", run_dir=str(folder), name="a", python=str(program(folder)))
    ((arguments, _),) = run_node(application, folder, 0, None)
    expected = ["train", "$HOME ${app_id}", *texts, "--run-dir", str(folder), "--resume-or-start"]
    assert arguments[arguments.index("distembed") :] == ["distembed", *expected]


def test_nodes_meet_at_the_first_and_write_to_folders_of_their_own(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    application = train(
        config="c",
        run_dir=str(run),
        j="2:3x4",
        rdzv_port=4321,
        max_restarts=5,
        join_timeout=7,
        python=str(program(tmp_path)),
    )
    logs = [run / "launch" / "logs" / "app-1" / f"node-{k}" for k in range(2)]
    logs[1].mkdir(parents=True)
    (logs[1] / "error.json").write_text("of an earlier start")
    ((launcher, error_file),) = run_node(application, tmp_path, 0, "first.host")
    assert error_file == str(logs[0] / "error.json")
    options = " ".join(launcher)
    for option in (
        "--nnodes 2:3 --nproc-per-node 4 ",
        "--rdzv-backend c10d --rdzv-endpoint first.host:4321 --rdzv-id app-1 ",
        "--max-restarts 5 ",
        f"--tee 3 --log-dir {logs[0]} -m distembed train c ",
    ):
        assert option in options
    ((other, _),) = run_node(application, tmp_path, 1, "first.host")
    own = "distembed.launch.nodes.run --node 1 --starts {}/../starts --grace 120"
    own += " --host first.host --port 4321 --seconds 7 --elastic -- "
    assert own.format(logs[1]) in " ".join(other)
    of_this_node = {str(logs[0]): str(logs[1]), f"{logs[0]}/../starts": f"{logs[1]}/../starts"}
    number = launcher.index("--node") + 1
    assert (launcher[number], other[number]) == ("0", "1")
    launcher[number] = "1"
    assert [word.replace("is_host=0", "is_host=1") for word in other] == [
        of_this_node.get(word, word) for word in launcher
    ]
    assert any(word.endswith(",is_host=1") for word in launcher)
    assert not (logs[1] / "error.json").exists()


@pytest.mark.parametrize(
    ("j", "rank0", "endpoint"),
    [("2x1", None, "localhost:29500"), ("2x1", "", "localhost:29500"), ("1x2", "elsewhere", "localhost:0")],
)
def test_a_node_that_is_named_no_host_is_the_first_and_one_node_takes_any_port(
    tmp_path: Path, j: str, rank0: str | None, endpoint: str
) -> None:
    application = train(config="c", run_dir=str(tmp_path), name="a", j=j, python=str(program(tmp_path)))
    ((launcher, _),) = run_node(application, tmp_path, 0, rank0)
    assert launcher[launcher.index("--rdzv-endpoint") + 1] == endpoint


def test_kubernetes_sees_no_variables_of_its_own_in_the_scripts() -> None:
    apps = [train(config="c", run_dir="r", j="2x2"), evaluate(run_dir="r"), prepare(output="o"), bench()]
    for application in apps:
        assert "$(" not in application.roles[0].args[-1]


def test_single_nodes_run_one_command(tmp_path: Path) -> None:
    python = str(program(tmp_path))

    def arguments(application: specs.AppDef) -> list[str]:
        ((words, _),) = run_node(application, tmp_path, 0, None)
        return words

    assert arguments(evaluate("--json", run_dir="runs/a", split="validation", python=python)) == [
        *("-m", "distembed", "evaluate", "runs/a", "--split", "validation", "--json")
    ]
    spread = arguments(evaluate(run_dir="runs/a", j="2", python=python))
    assert spread[:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    assert spread[6:] == ["distembed", "evaluate", "runs/a", "--split", "test"]
    assert arguments(prepare("day_0.gz", "--split", "days", output="out", python=python)) == [
        *("-m", "distembed", "prepare", "criteo", "day_0.gz", "--split", "days", "--output", "out")
    ]
    cluster = arguments(prepare("rows.csv", "--engine", "ray", output="out", kind="table", python=python))
    assert cluster[2:] == ["prepare", "table", "rows.csv", "--engine", "ray", "--output", "out"]
    assert arguments(bench("--output", "x.json", python=python)) == ["tools/bench_train.py", "--output", "x.json"]


def test_this_machine_is_not_waited_for() -> None:
    assert wait("localhost", free_port(), 0) == ""


def test_a_name_that_resolves_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception | None] = [socket.gaierror(-2, "unknown"), socket.gaierror(-2, "unknown"), None]

    def connect(*_: Any, **__: Any) -> socket.socket:
        answer = answers.pop(0)
        if answer:
            raise answer
        return socket.socket()

    monkeypatch.setattr(node_run, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert wait("late", 1, 60) == ""
    assert answers == []


def test_a_port_that_opens_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.2", port))
        threading.Timer(0.05, server.listen).start()
        monkeypatch.setattr(node_run, "_POLL_SECONDS", 0.1)
        assert wait("127.0.0.2", port, 60) == ""


def test_waiting_is_bounded_and_says_what_was_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("raise_when_told", "ignore_signals"):  # this process goes on
        monkeypatch.setattr(node_run, name, lambda: None)
    for host, reason in {"no-such-node.invalid": "does not resolve", "127.0.0.2": "takes no connections"}.items():
        own = f"--node 1 --starts starts --seconds 0.1 --host {host} --port {free_port()} --"
        monkeypatch.setattr(sys, "argv", ["run", *own.split()])
        assert node_run.main() == 1
        told = capsys.readouterr().err
        assert reason in told and host in told
