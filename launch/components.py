"""TorchX components: ``torchx run -s SCHEDULER distembed.train --config CONFIG --run_dir RUN -j 4x8``.

Outside of an installed package the file itself will do: ``torchx run launch/components.py:train ...``. TorchX reads
the types of the arguments from the source and knows those of ``typing`` only.
"""

# ruff: noqa: UP006, UP035, UP045

from typing import Dict, List, Optional

from torchx import specs

from launch.apps.applications import Request, benchmark_app, single_node_app, training_app


def train(
    *overrides: str,
    config: str,
    run_dir: str,
    j: str = "1x1",
    plan: Optional[str] = None,
    name: Optional[str] = None,
    image: str = "",
    h: Optional[str] = None,
    cpu: Optional[int] = None,
    gpu: Optional[int] = None,
    memMB: Optional[int] = None,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_restarts: int = 3,
    max_retries: int = 0,
    rdzv_port: int = 29500,
    join_timeout: int = 600,
    last_call_timeout: int = 30,
    grace_seconds: int = 120,
    python: str = "python",
) -> specs.AppDef:
    """Train a model on one or many nodes; a run folder that has a checkpoint is gone on with.

    Args:
        overrides: settings that replace the config's, such as train.epochs=2, after a --
        config: YAML file, as the nodes see it
        run_dir: run folder, which every node must see
        j: [MIN:]NODESxPROCESSES; with MIN the job starts and goes on with fewer nodes
        plan: place tables as this file of `distembed plan --output` says
        name: name of the job; that of the run folder unless given
        image: container image that holds distembed; a folder on Ray
        h: named resource of a node, such as gpu_8_h100, in place of cpu, gpu and memMB
        cpu: CPUs of a node
        gpu: GPUs of a node
        memMB: memory of a node in MB
        env: environment variables, K1=V1,K2=V2
        mounts: mounts of a container, type=bind,src=/host,dst=/container[,readonly]
        max_restarts: how often processes that died are started again on the nodes that they run on
        max_retries: how often the whole job is started again
        rdzv_port: port of the first node at which nodes meet
        join_timeout: seconds that nodes wait for one another
        last_call_timeout: seconds that an elastic job waits for more nodes than it needs
        grace_seconds: seconds that processes have to save their state when the job is told to end
        python: interpreter on the nodes
    """
    return training_app(
        config,
        overrides,
        run_dir=run_dir,
        j=j,
        plan=plan,
        name=name,
        request=Request((h, cpu, gpu, memMB), image, env, mounts, max_retries),
        max_restarts=max_restarts,
        rdzv_port=rdzv_port,
        join_timeout=join_timeout,
        last_call_timeout=last_call_timeout,
        grace_seconds=grace_seconds,
        python=python,
    )


def evaluate(
    *arguments: str,
    run_dir: str,
    split: str = "test",
    j: str = "1x1",
    name: Optional[str] = None,
    image: str = "",
    h: Optional[str] = None,
    cpu: Optional[int] = None,
    gpu: Optional[int] = None,
    memMB: Optional[int] = None,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    python: str = "python",
) -> specs.AppDef:
    """Evaluate a run's newest checkpoint on one node.

    Args:
        arguments: more arguments of `distembed evaluate`, such as --json, after a --
        run_dir: run folder
        split: split to evaluate on
        j: processes, or 1xPROCESSES
        name: name of the job; that of the run folder unless given
        image: container image that holds distembed; a folder on Ray
        h: named resource of the node, in place of cpu, gpu and memMB
        cpu: CPUs of the node
        gpu: GPUs of the node
        memMB: memory of the node in MB
        env: environment variables, K1=V1,K2=V2
        mounts: mounts of a container, type=bind,src=/host,dst=/container[,readonly]
        max_retries: how often the job is started again
        python: interpreter on the node
    """
    return single_node_app(
        "evaluate",
        ["evaluate", run_dir, "--split", split, *arguments],
        j=j,
        name=name or run_dir,
        request=Request((h, cpu, gpu, memMB), image, env, mounts, max_retries),
        python=python,
    )


def prepare(
    *arguments: str,
    output: str,
    kind: str = "criteo",
    name: Optional[str] = None,
    image: str = "",
    h: Optional[str] = None,
    cpu: Optional[int] = None,
    gpu: Optional[int] = None,
    memMB: Optional[int] = None,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    python: str = "python",
) -> specs.AppDef:
    """Turn raw files into a dataset on one node.

    Args:
        arguments: files, and more arguments of `distembed prepare`, after a --
        output: folder to make
        kind: what is prepared, criteo or graph
        name: name of the job; that of the output folder unless given
        image: container image that holds distembed; a folder on Ray
        h: named resource of the node, in place of cpu, gpu and memMB
        cpu: CPUs of the node
        gpu: GPUs of the node
        memMB: memory of the node in MB
        env: environment variables, K1=V1,K2=V2
        mounts: mounts of a container, type=bind,src=/host,dst=/container[,readonly]
        max_retries: how often the job is started again
        python: interpreter on the node
    """
    return single_node_app(
        "prepare",
        ["prepare", kind, *arguments, "--output", output],
        name=name or output,
        request=Request((h, cpu, gpu, memMB), image, env, mounts, max_retries),
        python=python,
    )


def bench(
    *arguments: str,
    benchmark: str = "train",
    name: Optional[str] = None,
    image: str = "",
    h: Optional[str] = None,
    cpu: Optional[int] = None,
    gpu: Optional[int] = None,
    memMB: Optional[int] = None,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    python: str = "python",
) -> specs.AppDef:
    """Run a benchmark of tools/ on one node, in a checkout of the repository.

    Args:
        arguments: arguments of the benchmark, such as --output times.json, after a --
        benchmark: which one, the NAME of tools/bench_NAME.py
        name: name of the job; that of the benchmark unless given
        image: container image whose working directory is a checkout; a folder on Ray
        h: named resource of the node, in place of cpu, gpu and memMB
        cpu: CPUs of the node
        gpu: GPUs of the node
        memMB: memory of the node in MB
        env: environment variables, K1=V1,K2=V2
        mounts: mounts of a container, type=bind,src=/host,dst=/container[,readonly]
        max_retries: how often the job is started again
        python: interpreter on the node
    """
    return benchmark_app(
        benchmark,
        arguments,
        name=name,
        request=Request((h, cpu, gpu, memMB), image, env, mounts, max_retries),
        python=python,
    )
