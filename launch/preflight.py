"""What is checked before a job is submitted: each check gives a finding, and none of them submits anything."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchx import specs

from distembed.doctor import Finding, check_trio_versions, chosen_device, installed_versions, nvidia_smi_works
from distembed.errors import RunError, UserError
from launch.shape import Shape

if TYPE_CHECKING:
    from distembed.config import Config
    from distembed.fit import Fit


def check_trio() -> list[Finding]:
    """Whether the versions that distembed is tested with are installed here."""
    installed = installed_versions()
    return check_trio_versions(installed, chosen_device(installed, nvidia_smi_works()))


def check_fit(fit: "Fit", shape: Shape) -> Finding:
    """Whether the plan fits; an elastic job is checked on the fewest nodes, where each rank holds most."""
    from distembed.describe import format_bytes
    from distembed.plan_texts import shortage_lines

    where = f"{fit.cluster.nodes} x {fit.cluster.gpus} {fit.cluster.device.name}"
    if not fit.fits:
        shortage = "; ".join(shortage_lines(fit.as_json()))
        return _wrong("plan", f"the model does not fit {where}: {shortage}", "`distembed plan` names remedies")
    fullest = max(fit.rank_total(rank) for rank in range(fit.cluster.world_size))
    fewest = ", the fewest nodes" if shape.elastic else ""
    of_rank = f"{format_bytes(fullest)} of {format_bytes(fit.cluster.rank_bytes)} a rank"
    return Finding("plan", "ok", f"fits {where}{fewest}: {of_rank}")


def check_dataset(config: "Config") -> Finding:
    """Whether the dataset is there, whole as far as its manifest says."""
    from distembed.data.manifest import Manifest

    try:
        path = Path(config.data.require_path())
        manifest = Manifest.load(path)
    except (UserError, RunError) as error:
        return _wrong("dataset", str(error))
    files = [file for split in manifest.splits.values() for file in split.files]
    missing = [file.path for file in files if not (path / file.path).is_file()]
    if missing:
        lacks = f"{path} lacks {len(missing)} of its {len(files)} files, {missing[0]} first"
        return _wrong("dataset", lacks, "prepare it again")
    return Finding("dataset", "ok", f"{path}: {len(files)} file(s)")


def check_writable(what: str, folder: Path) -> Finding:
    """Whether files can be made in a folder, or in the one that it would be made in."""
    there = folder
    while not there.exists():
        there = there.parent
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".distembed-"):
            pass
    except OSError as error:
        return _wrong(what, f"nothing can be written to {folder}: {error.strerror or error}", "give another folder")
    return Finding(what, "ok", str(folder))


def check_checkpoints(config: "Config", run_dir: Path) -> Finding:
    """The same of the folder for checkpoints; what lies behind a URL is asked for its name alone."""
    place = config.train.checkpoint_dir
    if place is None:
        return Finding("checkpoints", "ok", f"in {run_dir}")
    if "://" not in place:
        return check_writable("checkpoints", Path(place))
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(place)
        filesystem.exists(root)
    except Exception as error:  # whatever the storage's package raises
        return _wrong("checkpoints", f"train.checkpoint_dir {place} cannot be reached: {error}")
    return Finding("checkpoints", "ok", place)


def check_partition(shape: Shape, role: specs.Role, options: Mapping[str, Any]) -> Finding:
    """Whether Slurm's partition has so many nodes of such a size, busy ones too."""
    partition = options.get("partition")
    command = ["sinfo", "--noheader", "--Node", "--format=%P|%N|%c|%m|%G|%T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return _wrong(
            "partition", "there is no sinfo on PATH", "run this where Slurm's commands are, or choose another -s"
        )
    if answer.returncode:
        return _wrong("partition", f"Slurm does not answer: {answer.stderr.strip()}")
    nodes = [_Node.read(line) for line in answer.stdout.splitlines()]
    name = partition or next((node.partition for node in nodes if node.is_default), "")
    own = {node.name: node for node in nodes if node.partition == name}
    if not own:
        known = ", ".join(sorted({node.partition for node in nodes})) or "none"
        return _wrong(
            "partition", f"the partition {partition!r} is not there, or has no nodes", f"choose one of {known}"
        )
    need = role.resource
    fit = [node for node in own.values() if node.has(need.cpu, need.memMB, need.gpu)]
    if len(fit) < shape.min_nodes:
        size = f"{need.cpu} CPUs, {need.memMB} MB and {need.gpu} GPUs"
        best = max(own.values(), key=lambda node: (node.gpus, node.cpus))
        return _wrong(
            "partition",
            f"{name} has {len(fit)} node(s) of {size} or more that are up, and the job needs {shape.min_nodes}; of its "
            f"{len(own)} the largest has {best.cpus} CPUs, {best.memory_mb} MB and {best.gpus} GPUs",
        )
    return Finding("partition", "ok", f"{name}: {len(fit)} node(s) such as the {shape.nodes} asked for")


def _wrong(what: str, detail: str, remedy: str = "") -> Finding:
    return Finding(what, "wrong", detail, remedy)


@dataclass(frozen=True)
class _Node:
    """A node as sinfo tells of it."""

    partition: str
    is_default: bool
    name: str
    cpus: int
    memory_mb: int
    gpus: int
    is_up: bool

    @classmethod
    def read(cls, line: str) -> "_Node":
        partition, name, cpus, memory, resources, state = line.split("|")
        gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)*:(\d+)", resources))
        is_up = not re.match(r"down|drain|fail|unknown|maint", state)
        is_default = partition.endswith("*")
        return cls(partition.rstrip("*"), is_default, name, _number(cpus), _number(memory), gpus, is_up)

    def has(self, cpus: float, memory_mb: int, gpus: int) -> bool:
        # a cluster that does not say how much memory its nodes have says 1 MB
        has_memory = self.memory_mb <= 1000 or self.memory_mb >= memory_mb
        return self.is_up and self.cpus >= cpus and has_memory and self.gpus >= gpus


def _number(text: str) -> int:
    """Sinfo writes "8+" for 8 or more."""
    return int(text.rstrip("+"))
