"""Hostile TorchrunJobs and TorchrunQueues, drawn from the schemas of our CRDs.

Metadata always has valid types: the API server enforces that for any CRD.
"""

import random
import re
from functools import cache

from hostile.values import ANY, anywhere_else, changed
from torchrun_api import names
from torchrun_api.crd import open_api_schema
from torchrun_api.job import TorchrunJob
from torchrun_api.json import JsonObject, JsonValue, object_at
from torchrun_api.kinds import TORCHRUN_JOBS, TORCHRUN_QUEUES, Kind
from torchrun_api.queue import TorchrunQueue

QUEUE = "gpu"  # the valid queue
KINDS: dict[str, Kind[TorchrunJob] | Kind[TorchrunQueue]] = {
    "TorchrunJob": TORCHRUN_JOBS,
    "TorchrunQueue": TORCHRUN_QUEUES,
}
_TEXTS = (
    *("a", "train", QUEUE, "h-1", "h-2", "python train.py", "/app", "/", "/a/../b", "image:1"),
    *("https://git.example/a.git", "s3://bucket/path", "git@host:a/b.git", "file:///etc/passwd"),
    *("main", "../../x", "a.b", "A", "-", "1", "nvidia.com/gpu", "kai-scheduler", "volcano"),
    *("default", "trainer", "$(HOSTNAME)", "`id`", "a,b=c", "x" * 63, "x" * 253, "é", "💥", "\x00"),
)
_QUANTITIES = (
    *(0, 1, 8, 2**31, 2**63 - 1, 2**63, "0", "1", "500m", "1.0000000001", "10Gi", "1e3", "+5"),
    *("1e99", "9999999999999999999E", "0.0000000001n", ".5Ki", "1Ei", "8Ei", "-1", "1G i", ""),
)
# Names of v1 fields for pod templates, with valid and invalid values.
_POD_FIELDS = (
    *("metadata", "spec", "containers", "initContainers", "volumes", "env", "name", "image"),
    *("resources", "limits", "requests", "command", "args", "securityContext", "nodeSelector"),
    *("labels", "annotations", "affinity", "tolerations", "restartPolicy", "hostNetwork", "key"),
    *("privileged", "runAsUser", "capabilities", "volumeMounts", "mountPath", "hostPath", "path"),
    *("nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"),
    *("preferredDuringSchedulingIgnoredDuringExecution", "matchExpressions", "weight", "$patch"),
    *("terminationGracePeriodSeconds", "schedulerName", "subdomain", "", "operator", "values"),
)
_ANNOTATIONS = (
    *(
        names.WORKSPACE_BASE,
        names.START,
        names.REVISION,
        names.CAUSE,
        names.MACHINES_OFF,
        names.FENCE,
    ),
    *("torchrun.ai/workspace-sha256", "torchrun.ai/workspace-generation", "a"),
)
_LARGE = 2**20


def body(chance: random.Random, number: int, *, status: bool = True) -> JsonObject:
    """One object with a unique name; without `status`, as created by a user."""
    kind = "TorchrunJob" if chance.random() < 0.75 else "TorchrunQueue"
    schema = _schema(kind)
    spec = _spec(chance, kind, object_at(schema, "spec"))
    wrong = chance.choice((0, 0, 0, 1, 1, 2, 5))
    if kind == "TorchrunJob" and chance.random() < 0.7:
        spec["jobQueue"] = chance.choice((QUEUE, QUEUE, QUEUE, f"h-{number - 1}", "none"))
    drawn_body: JsonObject = {
        "apiVersion": KINDS[kind].api_version,
        "kind": kind,
        "metadata": _metadata(chance, number),
        "spec": changed(chance, spec, anywhere_else, wrong) if wrong and spec else spec,
    }
    if status and chance.random() < 0.3:
        drawn = _object(chance, object_at(schema, "status"), 0)
        odd = changed(chance, drawn, anywhere_else, chance.randint(0, 2)) if drawn else {}
        # The API server validates conditions, because they are merged by type.
        drawn_body["status"] = {name: value for name, value in odd.items() if name != "conditions"}
    if chance.random() < 0.02:
        drawn_body["spec"] = chance.choice(ANY)
    return drawn_body


def _spec(chance: random.Random, kind: str, schema: JsonObject) -> JsonObject:
    """A random spec, or a valid one with a few hostile fields, to reach more than the first check."""
    if chance.random() < 0.3:
        return _object(chance, schema, 0)
    properties = object_at(schema, "properties")
    few = chance.sample(sorted(properties), chance.randint(1, 3))
    good: JsonObject = {"image": "trainer:1"}
    if kind == "TorchrunJob":
        good = {"jobQueue": QUEUE, "command": "python train.py", "numNodes": chance.choice((1, 2))}
    return good | {name: _value(chance, object_at(properties, name), 1) for name in few}


def large(chance: random.Random, number: int) -> JsonObject:
    """A large object; etcd accepts requests of 1.5 MiB."""
    drawn = body(chance, number, status=False)
    meta = drawn["metadata"]
    assert isinstance(meta, dict)
    match chance.randrange(3):
        case 0:  # the limit of all annotations is 256 KiB
            meta["annotations"] = {f"a-{i}": "x" * 1000 for i in range(250)}
        case 1:
            drawn["spec"] = {"jobQueue": QUEUE, "numNodes": 1, "command": ["x" * 1000] * 1000}
        case _:
            drawn["spec"] = {"jobQueue": QUEUE, "numNodes": 1, "command": "x" * _LARGE}
    return drawn


@cache
def _schema(kind: str) -> JsonObject:
    return object_at(open_api_schema(KINDS[kind]), "properties")


def _metadata(chance: random.Random, number: int) -> JsonObject:
    name = f"h-{number}"
    if chance.random() < 0.1:
        name = chance.choice(
            (f"{name}.a.b", f"{number}-h", f"{name}-{'x' * 200}", f"{name}-sync-0")
        )
    meta: JsonObject = {"name": name}
    if chance.random() < 0.3:
        texts = [text for text in _TEXTS if "\x00" not in text]
        meta["annotations"] = {
            key: chance.choice((*texts, "9" * 400, "[" * 5000, "null", '{"a":1}'))
            for key in chance.sample(_ANNOTATIONS, chance.randint(1, 3))
        }
    return meta


def _value(chance: random.Random, schema: JsonObject, depth: int) -> JsonValue:
    """A value that usually matches the schema, often an extreme one."""
    if "enum" in schema:
        values = schema["enum"]
        assert isinstance(values, list)
        return chance.choice(values) if chance.random() < 0.98 else chance.choice(_TEXTS)
    if "x-kubernetes-int-or-string" in schema:
        return chance.choice(_QUANTITIES)
    match schema.get("type"):
        case "object" if "properties" in schema:
            return _object(chance, schema, depth)
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            values = object_at(schema, "additionalProperties")
            count = chance.choice((0, 1, 1, 2, 5))
            return {chance.choice(_TEXTS): _value(chance, values, depth + 1) for _ in range(count)}
        case "array":
            most = schema.get("maxItems", 30)
            assert isinstance(most, int)
            count = chance.choice((0, 1, 1, 2, 3, most))
            items = object_at(schema, "items")
            return [_value(chance, items, depth + 1) for _ in range(min(count, 64))]
        case "string":
            return _text(chance, schema)
        case "integer" | "number":
            return _number(chance, schema)
        case "boolean":
            return chance.random() < 0.5
        case _:
            return _embedded(chance, depth)


def _object(chance: random.Random, schema: JsonObject, depth: int) -> JsonObject:
    required = schema.get("required", [])
    assert isinstance(required, list)
    share = 0.3 if depth else 0.2
    return {
        name: _value(chance, each, depth + 1)
        for name, each in object_at(schema, "properties").items()
        if isinstance(each, dict)
        if chance.random() < (0.97 if name in required else share)
    }


def _text(chance: random.Random, schema: JsonObject) -> str:
    if schema.get("format") == "date-time":
        return chance.choice(
            ("2026-01-02T03:04:05Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z")
        )
    pattern = schema.get("pattern")
    fit = [text for text in _TEXTS if re.search(str(pattern), text)] if pattern else list(_TEXTS)
    longest = schema.get("maxLength")
    if chance.random() < 0.05 and isinstance(longest, int):
        return "x" * min(longest, 65536)
    return chance.choice(fit or list(_TEXTS))


def _number(chance: random.Random, schema: JsonObject) -> JsonValue:
    """Mostly small numbers; a quarter are the bounds."""
    low, high = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63 - 1)
    assert isinstance(low, int | float)
    if chance.random() < 0.25:
        return chance.choice((low, high))
    return low + chance.randint(0, 3) if low > -(2**62) else chance.randint(-1, 5)


def _embedded(chance: random.Random, depth: int) -> JsonValue:
    """Objects of Kubernetes, which schemas with unknown fields accept unchecked."""
    if depth > 7 or chance.random() < 0.25:
        return chance.choice((*_TEXTS, *_QUANTITIES, *ANY))
    if chance.random() < 0.35:
        return [_embedded(chance, depth + 1) for _ in range(chance.randint(0, 3))]
    fields = chance.sample(_POD_FIELDS, chance.randint(0, 5))
    drawn = {field: _embedded(chance, depth + 1) for field in fields}
    if chance.random() < 0.3:
        drawn["containers"] = [{"name": "trainer", **_as_object(_embedded(chance, depth + 2))}]
    return drawn


def _as_object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {"image": value}
