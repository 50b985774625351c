"""What is asked of each scheduler: compared with what was looked through once, and validated against their schemas.

After a change that is meant: ``python -m tests.launch.test_requests`` writes the files anew; read their difference.
"""

import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest
import yaml
from torchx import specs
from torchx.runner import get_runner
from torchx.specs import AppState

from distembed.base.errors import UserError
from distembed.launch.components import bench, evaluate, prepare, train
from distembed.launch.jobs.asking import require_package
from distembed.launch.schedulers.slurm.scheduler import SlurmScheduler
from tests.launch import volcano

GOLDEN = Path(__file__).parents[1] / "golden"
RUN = {"config": "/shared/config.yaml", "run_dir": "/shared/runs/first", "plan": "/shared/plan.json"}
NODE = {"cpu": 16, "gpu": 8, "memMB": 65536, "env": {"NCCL_SOCKET_IFNAME": "eth0,eth1"}}
BOX = {"image": "registry/distembed:1", "mounts": ["type=bind", "src=/data", "dst=/data", "readonly"]}
OPTIONS: dict[str, dict[str, Any]] = {
    "slurm": {"partition": "gpu", "time": "1-0", "log_dir": "/shared/runs/first/launch/logs"},
    "kubernetes": {"queue": "research"},
    "aws_batch": {"queue": "research", "user": "ada"},
}
# file name -> scheduler, arguments of `train`
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "launch_slurm.sh": ("slurm", {"j": "2x8", "max_retries": 1}),
    "launch_slurm_elastic.sh": ("slurm", {"j": "2:4x8"}),
    "launch_kubernetes.yaml": ("kubernetes", {**BOX, "j": "2x8", "max_retries": 1}),
    "launch_kubernetes_elastic.yaml": ("kubernetes", {**BOX, "j": "1:2x8", "max_retries": 1}),
    "launch_aws_batch.json": (
        "aws_batch",
        {**BOX, "j": "2x8", "max_retries": 1, "cpu": None, "gpu": None, "memMB": None, "h": "aws_p4d.24xlarge"},
    ),
}


def app(**arguments: Any) -> specs.AppDef:
    return train("train.epochs=2", "data.path=/data/a b$c", **{**RUN, **NODE, **arguments})


def dry_run(application: specs.AppDef, scheduler: str) -> Any:
    with get_runner() as runner:
        return runner.dryrun(application, scheduler, OPTIONS.get(scheduler, {})).request


def written(name: str) -> str:
    """The request of a case, as it is kept: without what differs each time."""
    scheduler, arguments = CASES[name]
    request = dry_run(app(**arguments), scheduler)
    if scheduler == "slurm":
        return re.sub(r"first-[a-z0-9]+/train", "first-ID/train", str(request))
    fields = request.job_def if scheduler == "aws_batch" else yaml.safe_load(str(request))
    # before the text is laid out: the id's length differs too
    fields = json.loads(re.sub(r"first-[a-z0-9]+", "first-ID", json.dumps(fields)))
    if scheduler == "aws_batch":
        return json.dumps(fields, indent=2) + "\n"
    return yaml.dump(fields, Dumper=Readable, width=1000)


class Readable(yaml.SafeDumper):
    """Writes texts of several lines as such."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Readable.add_representer(str, Readable.represent_text)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a Slurm is at hand makes no difference."""
    monkeypatch.setattr(SlurmScheduler, "_partition_memmb", lambda *_: None)


@pytest.mark.parametrize("name", CASES)
def test_requests_are_those_that_were_looked_through(name: str) -> None:
    assert written(name) == (GOLDEN / name).read_text()


def volcano_job(**arguments: Any) -> dict[str, Any]:
    return yaml.safe_load(str(dry_run(app(**{**BOX, **arguments}), "kubernetes")))


@pytest.mark.parametrize(
    ("j", "fewest", "max_retries"), [("1x1", 1, 0), ("2x8", 2, 2), ("1:3x8", 1, 2), ("2:4x1", 2, 0), ("3:3x2", 3, 2)]
)
def test_volcano_takes_the_job_and_kubernetes_its_pods(j: str, fewest: int, max_retries: int) -> None:
    job = volcano_job(j=j, max_retries=max_retries, name="2024 Über_run.7 " + "x" * 60)
    volcano.validate(job)
    for task in job["spec"]["tasks"]:
        pod = {"apiVersion": "v1", "kind": "Pod", **task["template"]}
        pod["metadata"] = {"name": "pod", **pod["metadata"]}
        kubernetes_validate.validate(pod, "1.30", strict=True)
    assert job["spec"]["minAvailable"] == fewest
    assert sum(task["minAvailable"] for task in job["spec"]["tasks"]) == fewest


def answers(policies: list[dict[str, Any]]) -> dict[str, str]:
    """What Volcano does about each exit code and event of a pod: the first policy that names it counts."""
    found: dict[str, str] = {}
    for policy in policies:
        named = [policy["exitCode"]] if "exitCode" in policy else policy.get("events", [policy.get("event")])
        for one in named:
            found.setdefault(str(one), policy["action"])
    by_code = [number for number, policy in enumerate(policies) if "exitCode" in policy]
    # a pod that failed has an exit code as well: of its policies the first counts
    assert by_code == list(range(len(by_code)))
    return found


def test_volcano_knows_no_exit_codes_of_commands_that_save_nothing() -> None:
    for max_retries, action in ((0, "TerminateJob"), (2, "RestartJob")):
        application = evaluate(run_dir="runs/first", image="x", max_retries=max_retries)
        job = yaml.safe_load(str(dry_run(application, "kubernetes")))
        volcano.validate(job)
        (task,) = job["spec"]["tasks"]
        assert answers(task["policies"]) == {"PodFailed": action, "PodEvicted": action}
        assert job["spec"]["maxRetry"] == max_retries


def test_what_volcano_does_about_a_lost_pod() -> None:
    def asked(j: str, max_retries: int) -> list[dict[str, str]]:
        return [answers(task["policies"]) for task in volcano_job(j=j, max_retries=max_retries)["spec"]["tasks"]]

    ends = dict.fromkeys(["2", "3", "70"], "TerminateJob")
    whole = {**ends, "75": "RestartJob", "PodEvicted": "RestartJob"}
    alone = {**ends, "75": "RestartTask", "PodEvicted": "RestartTask"}
    never = {**whole, "PodFailed": "TerminateJob"}
    again, alone_again = {**whole, "PodFailed": "RestartJob"}, {**alone, "PodFailed": "RestartTask"}
    assert asked("2x1", 0) == [never, never]
    assert asked("2x1", 1) == [again, again]
    assert asked("1:3x1", 0) == [never, alone, alone]
    assert asked("1:3x1", 1) == [again, alone_again, alone_again]
    # failures are counted by the nodes, for Volcano would count interruptions with them
    for max_retries in (0, 2):
        job = volcano_job(j="2x1", max_retries=max_retries)
        assert job["spec"]["maxRetry"] >= 100
        for task in job["spec"]["tasks"]:
            (container,) = task["template"]["spec"]["containers"]
            assert {"name": "DISTEMBED_MAX_RETRIES", "value": str(max_retries)} in container["env"]
    # else a job that is done would wait for pods that were never started
    assert volcano_job(j="1:3x1")["spec"]["policies"] == [{"event": "TaskCompleted", "action": "CompleteJob"}]
    assert "policies" not in volcano_job(j="3x1")["spec"]


def test_pods_outlive_the_time_that_ranks_have_to_save_their_state() -> None:
    job = volcano_job(j="2x1", grace_seconds=300)
    assert {task["template"]["spec"]["terminationGracePeriodSeconds"] for task in job["spec"]["tasks"]} == {330}
    assert "--grace 300" in str(job)


def test_nodes_meet_at_the_name_that_volcano_gives_to_the_first() -> None:
    first, second = (task["template"]["spec"]["containers"][0] for task in volcano_job(j="2x1")["spec"]["tasks"])
    assert {"name": "TORCHX_RANK0_HOST", "value": "localhost"} in first["env"]
    # the plugins svc and env call it so after the task train-0
    assert 'host="${VC_TRAIN_0_HOSTS:-localhost}"' in second["command"][-1]


class Api(BaseHTTPRequestHandler):
    """The part of Kubernetes's API that Volcano's jobs have to do with; keeps what it was asked."""

    asked: list[tuple[str, str, Any]] = []
    phase = ""

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.asked.append((self.command, self.path, json.loads(body) if body else None))
        code, answer = 200, {"metadata": {"name": "x"}, "status": {"state": {"phase": self.phase}}}
        if self.command == "POST":
            code, answer = 201, self.asked[-1][2]
        elif not self.phase:
            code, answer = 404, {"reason": "NotFound"}
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST = do_DELETE = answer


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Api]]:
    server = HTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    named = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "c", "namespace": "ml"}}
    users = [{"name": "c", "user": {}}]
    values = {"clusters": [named], "contexts": [context], "users": users, "current-context": "c"}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **values}))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    Api.asked, Api.phase = [], ""
    yield Api
    server.shutdown()
    server.server_close()


def test_a_job_is_submitted_asked_after_and_cancelled_on_kubernetes(api: type[Api]) -> None:
    jobs = "/apis/batch.volcano.sh/v1alpha1/namespaces/ml/jobs"
    with get_runner() as runner:
        handle = runner.run(app(j="2x1", **BOX), "kubernetes", {"queue": "research", "namespace": "ml"})
        method, path, body = api.asked[0]
        assert (method, path.partition("?")[0]) == ("POST", jobs)
        volcano.validate(body)
        name = body["metadata"]["name"]
        assert handle == f"kubernetes://torchx/ml:{name}"
        assert runner.status(handle) is None
        for api.phase, state in {
            "Running": AppState.RUNNING,
            "Completing": AppState.RUNNING,
            "Completed": AppState.SUCCEEDED,
        }.items():
            assert runner.status(handle).state == state
        api.phase = "Running"
        runner.cancel(handle)
    method, path, _ = api.asked[-1]
    assert (method, path.partition("?")[0]) == ("DELETE", f"{jobs}/{name}")


@pytest.mark.filterwarnings("ignore:Cannot determine resource instance type")
def test_aws_batch_knows_every_field_of_the_job() -> None:
    session, validate = pytest.importorskip("botocore.session"), pytest.importorskip("botocore.validate")
    operation = session.get_session().get_service_model("batch").operation_model("RegisterJobDefinition")
    definition = {"jobDefinitionName": "first", **dry_run(app(j="3x8", max_retries=2, **BOX), "aws_batch").job_def}
    found = validate.ParamValidator()
    assert not found.validate(definition, operation.input_shape).has_errors()
    assert found.validate({**definition, "colour": "red"}, operation.input_shape).has_errors()


@pytest.mark.filterwarnings("ignore:Cannot determine resource instance type")
def test_all_nodes_of_aws_batch_are_one_group() -> None:
    nodes = dry_run(app(j="3x8", **BOX), "aws_batch").job_def["nodeProperties"]
    assert (nodes["numNodes"], nodes["mainNode"]) == (3, 0)
    (group,) = nodes["nodeRangeProperties"]
    assert group["targetNodes"] == "0:2"
    # it is not set on the main node itself
    assert 'host="${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-localhost}"' in group["container"]["command"][-1]


@pytest.mark.parametrize("max_retries", [0, 1, 9])
def test_aws_batch_ends_a_job_by_its_exit_code_and_the_nodes_count_failures(max_retries: int) -> None:
    # the first start is no retry
    request = dry_run(evaluate(run_dir="runs/first", image="x", max_retries=max_retries), "aws_batch")
    assert request.job_def["retryStrategy"]["attempts"] == max_retries + 1
    definition = dry_run(app(max_retries=max_retries, **BOX), "aws_batch").job_def
    strategy = definition["retryStrategy"]
    # whatever matches none of them is tried again, an interruption (75) too
    assert {(one["onExitCode"], one["action"]) for one in strategy["evaluateOnExit"]} == {
        (code, "EXIT") for code in ("0", "2", "3", "70")
    }
    assert len(strategy["evaluateOnExit"]) <= 5 and strategy["attempts"] == 10
    (group,) = definition["nodeProperties"]["nodeRangeProperties"]
    environment = {one["name"]: one["value"] for one in group["container"]["environment"]}
    assert environment["DISTEMBED_MAX_RETRIES"] == str(max_retries)


def commands(application: specs.AppDef, scheduler: str) -> list[str]:
    """The script of each replica on a scheduler whose request holds them all."""
    request = dry_run(application, scheduler)
    if scheduler == "local_cwd":
        return [replica.args[-1] for replica in request.role_params["train"]]
    containers = request.containers if scheduler == "local_docker" else request.actors
    return [container.command[-1] for container in containers]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that TorchX imports from Ray, which takes half a minute to install, where it is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError:
        status = type("JobStatus", (), dict.fromkeys(("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"), ""))
        for name, names in {
            "ray": {"__spec__": object()},
            "ray.autoscaler": {"sdk": None},
            "ray.dashboard.modules.job.common": {"JobStatus": status},
            "ray.dashboard.modules.job.sdk": {"JobSubmissionClient": object},
        }.items():
            module = ModuleType(name)
            vars(module).update(names)
            monkeypatch.setitem(sys.modules, name, module)
        # it was imported without
        monkeypatch.delitem(sys.modules, "torchx.schedulers.ray_scheduler", raising=False)


@pytest.mark.parametrize("scheduler", ["local_cwd", "local_docker", "ray"])
@pytest.mark.usefixtures("ray")
def test_every_node_runs_the_same_command_but_for_its_number(scheduler: str, tmp_path: Path) -> None:
    image = {"local_docker": BOX["image"], "ray": str(tmp_path)}.get(scheduler, "")
    scripts = commands(app(j="1:3x2", image=image), scheduler)
    assert len(scripts) == 3
    (name,) = {re.search(r"--rdzv-id \"(.+?)\"", script)[1] for script in scripts}
    for k, script in enumerate(scripts):
        assert f'/launch/logs/"{name}"/node-"{k}"' in script
        assert 'host="${TORCHX_RANK0_HOST:-localhost}"' in script
        assert "--nnodes 1:3 --nproc-per-node 2" in script
    assert len({re.sub(r'"\d"', "", script) for script in scripts}) == 1


@pytest.mark.usefixtures("ray")
def test_on_ray_nodes_start_again_themselves(tmp_path: Path) -> None:
    for actor in dry_run(app(j="2x1", image=str(tmp_path), max_retries=2), "ray").actors:
        assert (actor.env["DISTEMBED_START_AGAIN"], actor.env["DISTEMBED_MAX_RETRIES"]) == ("1", "2")


def test_ray_that_is_missing_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distembed.launch.schedulers.ray.find_spec", lambda _: None)
    with get_runner() as runner, pytest.raises(ModuleNotFoundError, match="pip install"):
        runner.scheduler_run_opts("ray")


@pytest.mark.parametrize(
    ("scheduler", "package"), [("kubernetes", "kubernetes"), ("aws_batch", "boto3"), ("ray", "ray")]
)
def test_only_what_the_chosen_scheduler_needs_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, scheduler: str, package: str
) -> None:
    def nothing(name: str) -> None:
        """No package is installed."""

    monkeypatch.setattr("distembed.launch.jobs.asking.find_spec", nothing)
    message = f"--scheduler {scheduler} needs the package {package}, which is not installed: run "
    message += f"{sys.executable} -m pip install 'distembed[{scheduler}]'."
    with pytest.raises(UserError, match=re.escape(message)):
        require_package(scheduler, dry_run=False)
    for free in ("local_cwd", "local_docker", "slurm", "lsf"):
        require_package(free, dry_run=False)
    if scheduler == "aws_batch":  # what would be submitted is known without it
        require_package(scheduler, dry_run=True)


def test_docker_takes_the_names_of_containers() -> None:
    with get_runner() as runner:
        named = (app(j="2x1", image="x", name="-".join("a" * length)) for length in range(1, 33))
        requests = [runner.dryrun(one, "local_docker").request for one in named]
    for request in requests:
        names = [container.kwargs["name"] for container in request.containers]
        assert len(set(names)) == 2
        for container in request.containers:
            assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", container.kwargs["hostname"])
            assert container.kwargs["environment"]["TORCHX_RANK0_HOST"] == names[0]


@pytest.mark.filterwarnings("ignore:Cannot determine resource instance type")
@pytest.mark.parametrize(
    ("scheduler", "arguments", "reason"),
    [
        ("aws_batch", {**BOX, "j": "1:2x8"}, "ask for 2 nodes"),
        ("aws_batch", {**BOX, "max_retries": 10}, "allows 0 to 9"),
        ("lsf", {"j": "1:2x8"}, "ask for 2 nodes"),
        ("kubernetes", {}, "image is empty"),
        ("aws_batch", {}, "image is empty"),
        ("local_docker", {}, "image is empty"),
        ("slurm", BOX, "leave it out"),
        ("slurm", {"mounts": BOX["mounts"]}, "leave them out"),
        ("local_cwd", BOX, "leave it out"),
    ],
)
def test_what_a_scheduler_cannot_do_is_refused(scheduler: str, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        dry_run(app(**arguments), scheduler)


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes", "aws_batch", "local_docker"])
def test_components_of_one_node_are_taken_by_every_scheduler(scheduler: str) -> None:
    image = "" if scheduler == "slurm" else "x"
    for application in (
        evaluate(run_dir="runs/first", image=image, j="2"),
        prepare("day_0.gz", output="criteo", image=image),
        bench(image=image),
    ):
        assert "exec python " in str(dry_run(application, scheduler))


def main() -> None:
    """Writes the files anew."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(SlurmScheduler, "_partition_memmb", lambda *_: None)
        for name in CASES:
            (GOLDEN / name).write_text(written(name))


if __name__ == "__main__":
    main()
