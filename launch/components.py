"""TorchX components: ``torchx run -s SCHEDULER distembed.train --config CONFIG --run_dir RUN -j 4x8``.

In a checkout, name the file: ``torchx run launch/components.py:train ...``. A component also has the fields of its
request as arguments: ``--image``, ``--cpu`` and so on. TorchX reads the types of arguments from the source, and knows
only types of ``typing``.
"""

# ruff: noqa: UP045

import inspect
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, Optional, Union, get_args

from docstring_parser import parse
from torchx import specs

from distembed.commands.shared import dataclass_parameters, flattened
from distembed.launch.apps.applications import benchmark_app, single_node_app, training_app
from distembed.launch.apps.request import ElasticRequest, NodeRequest


def _component(function: Callable[..., specs.AppDef]) -> Callable[..., specs.AppDef]:
    """Returns the function as a component of TorchX: each field of a dataclass argument becomes an argument itself.

    TorchX reads arguments from the signature, and descriptions from the docstring: both are rewritten so.
    """
    flat = flattened(function)
    signature = inspect.signature(flat)
    by_name = signature.parameters
    parameters = [argument.replace(annotation=_torchx_type(argument.annotation)) for argument in by_name.values()]
    vars(flat)["__signature__"] = signature.replace(parameters=parameters)
    lines = (inspect.getdoc(function) or "").splitlines()
    for name, group in dataclass_parameters(function).items():
        number = next(number for number, line in enumerate(lines) if line.startswith(f"    {name}: "))
        lines[number : number + 1] = _field_entries(group)
    flat.__doc__ = "\n".join(lines)
    return flat


def _torchx_type(annotation: Any) -> Any:
    """Returns ``Optional[X]`` in place of ``X | None``, which TorchX does not know."""
    return Union[get_args(annotation)] if isinstance(annotation, UnionType) else annotation  # noqa: UP007


def _field_entries(group: type) -> Iterator[str]:
    """Yields lines that describe the attributes of a dataclass and of its bases as arguments of a function."""
    for owner in reversed(group.__mro__[:-1]):
        for field in parse(inspect.cleandoc(owner.__doc__ or "")).params:
            yield f"    {field.arg_name}: {field.description}"


@_component
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
        overrides: Settings that replace the config's, like train.epochs=2, after a --.
        config: YAML file, as the nodes see it.
        run_dir: Run folder, which every node must see.
        j: [MIN:]NODESxPROCESSES; with MIN the job starts and continues with fewer nodes.
        plan: Place tables as this file of `distembed plan --output` says.
        name: Name of the job; that of the run folder unless given.
        request: Resources of the nodes and start of their ranks, each field as an argument of its own.
    """
    return training_app(config, overrides, run_dir=run_dir, j=j, plan=plan, name=name, request=request)


@_component
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
        arguments: More arguments of `distembed evaluate`, like --json, after a --.
        run_dir: Run folder.
        split: Split to evaluate on.
        j: Number of processes, or 1xPROCESSES.
        name: Name of the job; that of the run folder unless given.
        request: Resources of the node, each field as an argument of its own.
    """
    command = ["evaluate", run_dir, "--split", split, *arguments]
    return single_node_app("evaluate", command, j=j, name=name or run_dir, request=request)


@_component
def prepare(
    *arguments: str,
    output: str,
    kind: str = "criteo",
    name: Optional[str] = None,
    request: NodeRequest,
) -> specs.AppDef:
    """Turn raw files into a dataset on one node, or from there on a Ray or Spark cluster; an interrupted one resumes.

    Args:
        arguments: Files, and more arguments of `distembed prepare`, like --engine ray, after a --.
        output: Folder to make; with a cluster, one that all of its machines see.
        kind: Kind of the rows: criteo, table, graph and so on; the first two can run on a cluster.
        name: Name of the job; that of the output folder unless given.
        request: Resources of the node, each field as an argument of its own.
    """
    command = ["prepare", kind, *arguments, "--output", output]
    return single_node_app("prepare", command, name=name or output, request=request)


@_component
def bench(
    *arguments: str,
    benchmark: str = "train",
    name: Optional[str] = None,
    request: NodeRequest,
) -> specs.AppDef:
    """Run a benchmark of tools/ on one node, in a checkout of the repository.

    Args:
        arguments: Arguments of the benchmark, like --output times.json, after a --.
        benchmark: Which benchmark, the NAME of tools/bench_NAME.py.
        name: Name of the job; that of the benchmark unless given.
        request: Resources of the node, each field as an argument of its own.
    """
    return benchmark_app(benchmark, arguments, name=name, request=request)
