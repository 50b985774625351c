"""TorchX components: ``torchx run -s SCHEDULER distembed.train --config CONFIG --run_dir RUN -j 4x8``.

Outside of an installed package the file itself will do: ``torchx run launch/components.py:train ...``. A component also
has the fields of its request as arguments: ``--image``, ``--cpu`` and so on. TorchX reads the types of the others from
the source, and knows those of ``typing`` only.
"""

# ruff: noqa: UP045

from typing import Optional

from torchx import specs

from launch.apps.applications import benchmark_app, single_node_app, training_app
from launch.apps.component import component
from launch.apps.request import ElasticRequest, NodeRequest


@component
def train(
    *overrides: str,
    config: str,
    run_dir: str,
    j: str = "1x1",
    plan: Optional[str] = None,
    name: Optional[str] = None,
    request: ElasticRequest,
) -> specs.AppDef:
    """Train a model on one or many nodes; a run folder that has a checkpoint is resumed.

    Args:
        overrides: Settings that replace the config's, such as train.epochs=2, after a --.
        config: YAML file, as the nodes see it.
        run_dir: Run folder, which every node must see.
        j: [MIN:]NODESxPROCESSES; with MIN the job starts and continues with fewer nodes.
        plan: Place tables as this file of `distembed plan --output` says.
        name: Name of the job; that of the run folder unless given.
        request: What is asked of the nodes and of their ranks, each field as an argument of its own.
    """
    return training_app(config, overrides, run_dir=run_dir, j=j, plan=plan, name=name, request=request)


@component
def evaluate(
    *arguments: str,
    run_dir: str,
    split: str = "test",
    j: str = "1x1",
    name: Optional[str] = None,
    request: NodeRequest,
) -> specs.AppDef:
    """Evaluate a run's newest checkpoint on one node.

    Args:
        arguments: More arguments of `distembed evaluate`, such as --json, after a --.
        run_dir: Run folder.
        split: Split to evaluate on.
        j: Number of processes, or 1xPROCESSES.
        name: Name of the job; that of the run folder unless given.
        request: What is asked of the node, each field as an argument of its own.
    """
    command = ["evaluate", run_dir, "--split", split, *arguments]
    return single_node_app("evaluate", command, j=j, name=name or run_dir, request=request)


@component
def prepare(
    *arguments: str,
    output: str,
    kind: str = "criteo",
    name: Optional[str] = None,
    request: NodeRequest,
) -> specs.AppDef:
    """Turn raw files into a dataset on one node, or from there on a Ray or Spark cluster; an interrupted one resumes.

    Args:
        arguments: Files, and more arguments of `distembed prepare`, such as --engine ray, after a --.
        output: Folder to make; with a cluster, one that all of its machines see.
        kind: What is prepared, such as criteo, table or graph; the first two can run on a cluster.
        name: Name of the job; that of the output folder unless given.
        request: What is asked of the node, each field as an argument of its own.
    """
    command = ["prepare", kind, *arguments, "--output", output]
    return single_node_app("prepare", command, name=name or output, request=request)


@component
def bench(
    *arguments: str,
    benchmark: str = "train",
    name: Optional[str] = None,
    request: NodeRequest,
) -> specs.AppDef:
    """Run a benchmark of tools/ on one node, in a checkout of the repository.

    Args:
        arguments: Arguments of the benchmark, such as --output times.json, after a --.
        benchmark: Which benchmark, the NAME of tools/bench_NAME.py.
        name: Name of the job; that of the benchmark unless given.
        request: What is asked of the node, each field as an argument of its own.
    """
    return benchmark_app(benchmark, arguments, name=name, request=request)
