"""What Volcano accepts as a job: the fields of batch.volcano.sh/v1alpha1, and what its admission webhook looks at.

Written down from Volcano's custom resource definition and documentation; the pods within are Kubernetes's matter.
"""

import re
from typing import Any

import jsonschema

COUNT = {"type": "integer", "minimum": 0}
NAME = {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
QUEUE = {
    "type": "string",
    "maxLength": 253,
    "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
# A Service, which the plugin svc names after the job, wants a letter first.
SERVICE = {"type": "string", "maxLength": 63, "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}
EVENT = {"enum": ["*", "PodPending", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "TaskFailed"]}
# RestartTask does nothing in old releases, which is a retry less.
ACTION = {"enum": ["AbortJob", "RestartJob", "RestartTask", "RestartPod", "TerminateJob", "CompleteJob", "ResumeJob"]}


def fields(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def many(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


POLICY = {
    **fields(
        ["action"],
        action=ACTION,
        event=EVENT,
        events=many(EVENT),
        exitCode={"type": "integer"},
        timeout={"type": "string"},
    ),
    "oneOf": [{"required": ["event"]}, {"required": ["events"]}, {"required": ["exitCode"]}],
}
TASK = fields(
    ["name", "replicas", "template"],
    name=NAME,
    replicas=COUNT,
    minAvailable=COUNT,
    maxRetry=COUNT,
    policies=many(POLICY),
    template={"type": "object"},
    topologyPolicy={"enum": ["none", "best-effort", "restricted", "single-numa-node"]},
    dependsOn=fields([], name=many(NAME), iteration={"type": "string"}),
)
JOB = fields(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "batch.volcano.sh/v1alpha1"},
    kind={"const": "Job"},
    metadata=fields(["name"], name=SERVICE, namespace=NAME, labels={"type": "object"}, annotations={"type": "object"}),
    spec=fields(
        ["schedulerName", "tasks"],
        schedulerName={"type": "string", "maxLength": 63},
        minAvailable=COUNT,
        minSuccess={"type": "integer", "minimum": 1},
        maxRetry=COUNT,
        queue=QUEUE,
        priorityClassName=QUEUE,
        plugins={
            "type": "object",
            "propertyNames": {"enum": ["env", "svc", "ssh", "mpi", "pytorch", "tensorflow", "ray"]},
            "additionalProperties": many({"type": "string"}),
        },
        policies=many(POLICY),
        tasks={**many(TASK), "minItems": 1},
        ttlSecondsAfterFinished=COUNT,
        volumes=many({"type": "object"}),
    ),
)


def validate(job: dict[str, Any]) -> None:
    """Raises ``jsonschema.ValidationError`` or ``ValueError`` for a job that Volcano would not take as it is meant."""
    jsonschema.validate(job, JOB)
    spec = job["spec"]
    tasks = spec["tasks"]
    if len({task["name"] for task in tasks}) < len(tasks):
        raise ValueError("two tasks of one name")
    for task in tasks:
        if task.get("minAvailable", 0) > task["replicas"]:
            raise ValueError(f"task {task['name']} needs more than it has")
        for replica in range(task["replicas"]):
            if not re.fullmatch(SERVICE["pattern"], pod := f"{job['metadata']['name']}-{task['name']}-{replica}"):
                raise ValueError(f"no name of a pod: {pod}")
            if len(pod) > 63:
                raise ValueError(f"the name of a pod is too long for a host's: {pod}")
    if spec.get("minAvailable", 0) > sum(task["replicas"] for task in tasks):
        raise ValueError("the gang is larger than all tasks")
    for policies in [spec.get("policies", []), *(task.get("policies", []) for task in tasks)]:
        codes = [policy["exitCode"] for policy in policies if "exitCode" in policy]
        if len(set(codes)) < len(codes) or 0 in codes:
            raise ValueError(f"two policies for one exit code, or one for success: {codes}")
        by_event = [policy for policy in policies if "exitCode" not in policy]
        events = [event for policy in by_event for event in policy.get("events", [policy.get("event")])]
        if len(set(events)) < len(events) or ("*" in events and len(events) > 1):
            raise ValueError(f"two policies for one event: {events}")
