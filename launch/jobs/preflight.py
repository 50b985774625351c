"""Checks before a job is submitted: each returns a finding, and none of them submits anything."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from torchx import specs

from distembed.base.errors import RunError, UserError
from distembed.launch.apps.request import Shape
from distembed.launch.schedulers.slurm.queries import NodeRecord, list_nodes
from distembed.launch.schedulers.slurm.script import SlurmJob
from distembed.launch.schedulers.slurm.submission import expected_start
from distembed.reports.doctor import (
    Finding,
    check_trio_versions,
    chosen_device,
    installed_versions,
    name_trio,
    nvidia_smi_works,
)

if TYPE_CHECKING:
    from distembed.reports.plan.assessment import Assessment
    from distembed.training.config import Config


def check_trio() -> list[Finding]:
    """Checks the versions of torch, torchrec and FBGEMM here against the trio that was tested with this torch."""
    installed = installed_versions()
    return [name_trio(installed), *check_trio_versions(installed, chosen_device(installed, nvidia_smi_works()))]


def check_device(config: "Config", device_kind: str) -> Finding:
    """Checks that a job for nodes with GPUs trains on GPUs; ``device_kind`` is the nodes' kind."""
    if device_kind != "cuda":
        return Finding("device", "ok", config.train.device)
    if config.train.device == "cpu":
        return _wrong(
            "device",
            "train.device is cpu, and the job asks for nodes with GPUs, which would stand idle",
            "leave train.device out; or ask for nodes without GPUs",
        )
    return Finding("device", "ok", "cuda: a rank that cannot use its GPU fails")


def check_build(device_kind: str) -> Finding:
    """Checks that torch and FBGEMM in this environment, which the nodes share, are built for the nodes' devices."""
    build = chosen_device(installed_versions(), nvidia_smi_works())
    if device_kind == "cuda" and build == "cpu":
        return _wrong(
            "build",
            "the nodes have GPUs, and this environment, which they share, has the builds of torch and FBGEMM for CPUs",
            "`distembed doctor --fix --device cuda`; or name another interpreter by --python",
        )
    return Finding("build", "ok", f"for {build}")


def check_capacity(assessment: "Assessment", shape: Shape) -> Finding:
    """Checks that the plan fits; an elastic job is planned on the fewest nodes, where each rank holds most."""
    from distembed.base.units import format_bytes
    from distembed.reports.plan.tables import shortage_lines

    where = f"{assessment.cluster.nodes} x {assessment.cluster.ranks_per_node} {assessment.cluster.device.name}"
    if not assessment.fits:
        shortage = "; ".join(shortage_lines(assessment))
        return _wrong("plan", f"the model does not fit {where}: {shortage}", "`distembed plan` names remedies")
    fullest = max(rank.total_bytes for rank in assessment.ranks)
    fewest = ", the fewest nodes" if shape.elastic else ""
    rank_memory = f"{format_bytes(fullest)} of {format_bytes(assessment.cluster.rank_bytes)} a rank"
    return Finding("plan", "ok", f"fits {where}{fewest}: {rank_memory}")


def check_dataset(config: "Config", is_new: bool = True) -> Finding:
    """Checks that the dataset has all files of its manifest, and that the config can be trained on it.

    The checks of a resumed run apply unless ``is_new``. Files of a remote dataset are not looked at.
    """
    from distembed.data.dataset.manifest import Manifest
    from distembed.data.dataset.mirror import mirror_of
    from distembed.training.start import require_trainable

    try:
        path = Path(config.data.require_path())
        manifest = Manifest.load(path)
    except (UserError, RunError, OSError) as error:
        return _wrong("dataset", str(error))
    files = [file for split in manifest.splits.values() for file in split.files]
    is_remote = mirror_of(path) is not None
    missing = [file.path for file in files if not (is_remote or (path / file.path).is_file())]
    if missing:
        lacks = f"{path} lacks {len(missing)} of its {len(files)} files, {missing[0]} first"
        return _wrong("dataset", lacks, "prepare it again")
    try:
        require_trainable(config, str(path), resume=not is_new)
    except (UserError, RunError) as error:
        return _wrong("dataset", str(error))
    return Finding("dataset", "ok", f"{config.data.path}: {len(files)} file(s)")


def check_writable(subject: str, folder: Path) -> Finding:
    """Checks that files can be made in a folder, or in the nearest folder above it that exists."""
    existing = folder
    try:
        while not existing.exists():
            existing = existing.parent
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".distembed-"):
            pass
    except OSError as error:
        return _wrong(subject, f"nothing can be written to {folder}: {error.strerror or error}", "give another folder")
    return Finding(subject, "ok", str(folder))


def check_checkpoints(config: "Config", run_dir: Path, is_new: bool) -> Finding:
    """Checks that the place for checkpoints can be written, and holds none of another run if this run ``is_new``."""
    from distembed.checkpoints.store import CheckpointStore, checkpoint_place

    place = checkpoint_place(run_dir, config.train.checkpoint_dir)
    if "://" not in place and (unwritable := check_writable("checkpoints", Path(place))).status == "wrong":
        return unwritable
    try:
        names = CheckpointStore(place).names()
    except Exception as error:  # each storage's package has errors of its own
        return _wrong("checkpoints", f"train.checkpoint_dir {place} cannot be reached: {error}")
    if names and is_new:
        return _wrong("checkpoints", f"{place} holds {names[-1]} of another run", "give another train.checkpoint_dir")
    return Finding("checkpoints", "ok", place)


def check_mounts(config: "Config", run_dir: Path, mounts: Sequence[Any]) -> Finding:
    """Checks that TorchX's ``mounts`` show all files of a training, whose paths are absolute, to its containers."""
    from distembed.checkpoints.store import checkpoint_place
    from distembed.training.config import input_paths

    run_dir = run_dir.absolute()
    written_paths = [str(run_dir), checkpoint_place(run_dir, config.train.checkpoint_dir)]
    for mount in mounts:
        if isinstance(mount, specs.BindMount) and mount.src_path != mount.dst_path:
            return _wrong(
                "mounts",
                f"{mount.src_path} of the nodes is {mount.dst_path} in the containers, and paths must be the same",
                f"dst={mount.src_path}",
            )
    unseen = [path for path in input_paths(config) if not _is_mounted(path, mounts, to_write=False)]
    unseen += [path for path in written_paths if not _is_mounted(path, mounts, to_write=True)]
    if unseen:
        return _wrong(
            "mounts",
            f"containers cannot reach {', '.join(dict.fromkeys(unseen))}, or not write there",
            f"mount a folder that holds it under the same path: --mount type=bind,src={unseen[0]},dst={unseen[0]}",
        )
    return Finding("mounts", "ok", ", ".join(mount.dst_path for mount in mounts))


def _is_mounted(path: str, mounts: Sequence[Any], to_write: bool) -> bool:
    """Returns whether containers see a path under the same name, and can write there if they have to."""
    if "://" in path:
        return True
    pure_path = PurePosixPath(os.path.normpath(path))
    holding = [mount for mount in mounts if pure_path.is_relative_to(mount.dst_path)]
    # the innermost mount hides outer ones
    innermost = max(holding, key=lambda mount: len(PurePosixPath(mount.dst_path).parts), default=None)
    return innermost is not None and not (to_write and getattr(innermost, "read_only", False))


def check_image(image: str) -> Finding:
    """Checks that a container's image is named with its registry or owner."""
    if "/" in image:
        return Finding("image", "ok", image)
    return Finding(
        "image",
        "note",
        f"{image} names no registry: a node that pulls it asks a public one, where a stranger may own the name; push "
        "the image to a registry of yours, and name it by --image",
    )


def check_partition(shape: Shape, resource: specs.Resource, partition: str | None) -> Finding:
    """Checks that Slurm's partition has enough nodes of the size that the job needs, busy ones included.

    ``partition`` may name several, with commas between them; None is the cluster's default.
    """
    try:
        nodes = list_nodes()
    except (UserError, RunError) as error:
        return _wrong("partition", str(error))
    names = partition.split(",") if partition else sorted({node.partition for node in nodes if node.is_default})
    nodes_of = {name: [node for node in nodes if node.partition == name] for name in names}
    if not any(nodes_of.values()):
        partitions = ", ".join(sorted({node.partition for node in nodes})) or "none"
        which = f"{partition!r} is not there" if partition else "that is the default is not there"
        remedy = f"-o partition=NAME; there are {partitions}"
        return _wrong("partition", f"the partition {which}, or has no nodes", remedy)
    # a job takes all of its nodes from one partition
    numbers = {name: sum(_suffices(node, resource) for node in nodes_of[name]) for name in names}
    name = max(names, key=lambda name: numbers[name])
    if numbers[name] < shape.min_nodes:
        size = f"{resource.cpu} CPUs, {resource.memMB} MB and {resource.gpu} GPUs"
        best = max(nodes_of[name], key=lambda node: (node.is_up, node.gpus, node.cpus, node.memory_mb))
        return _wrong(
            "partition",
            f"{name} has {numbers[name]} node(s) of {size} or more that are up, and the job needs {shape.min_nodes}; "
            f"of its {len(nodes_of[name])} the largest has {best.cpus} CPUs, {best.memory_mb} MB and {best.gpus} GPUs",
            "ask for fewer nodes or less of each, or choose another partition",
        )
    return Finding("partition", "ok", f"{name}: {numbers[name]} node(s) such as the {shape.nodes} asked for")


def check_acceptance(request: SlurmJob) -> Finding:
    """Checks that Slurm would accept the job: the controller knows accounts, limits and features."""
    try:
        return Finding("submission", "ok", expected_start(request.command, request.script()))
    except (UserError, RunError) as error:
        return _wrong("submission", str(error))


def _suffices(node: NodeRecord, need: specs.Resource) -> bool:
    """Returns whether a node is up and large enough."""
    # a cluster that does not report the memory of its nodes reports 1 MB
    has_memory = node.memory_mb <= 1000 or node.memory_mb >= need.memMB
    return node.is_up and has_memory and node.cpus >= need.cpu and node.gpus >= need.gpu


def _wrong(subject: str, detail: str, remedy: str = "") -> Finding:
    return Finding(subject, "wrong", detail, remedy)
