"""A TorchrunJob in a file of the user, to submit with a directory."""

import copy
import secrets
import sys
from pathlib import Path

from kubectl_torchrun.errors import UsageProblem, why
from torchrun_api.json import JsonObject

_VERSION, _KIND = "torchrun.ai/v1alpha1", "TorchrunJob"
# As in names that Kubernetes generates: no vowels (no words), no ambiguous letters.
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
SUFFIX = 5
# That PyYAML raises for the values of some scalars, and the encoder for keys and circles.
_INVALID_VALUES = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def read(file: str) -> JsonObject:
    """The only TorchrunJob of a YAML or JSON file; `-` is stdin.

    Raises UsageProblem for other content.
    """
    objects = documents(file)
    if len(objects) != 1:
        raise UsageProblem(f"--filename {file} has {len(objects)} objects. Use exactly one.")
    body = objects[0]
    if (body.get("apiVersion"), body.get("kind")) != (_VERSION, _KIND):
        raise UsageProblem(f"--filename {file} is not a {_KIND} of {_VERSION}.")
    for part in ("metadata", "spec"):
        if not isinstance(body.setdefault(part, {}), dict):
            raise UsageProblem(f"--filename {file}: {part} is not an object.")
    _check_source(file, _part(body, "spec"))
    return body


def documents(file: str) -> list[JsonObject]:
    """The objects of a YAML or JSON file; `-` is stdin. Raises UsageProblem for other content."""
    import msgspec
    import yaml

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        objects = [
            msgspec.json.decode(msgspec.json.encode(each))  # what JSON cannot express is an error
            for each in yaml.safe_load_all(text)
            if each is not None
        ]
    except (OSError, yaml.YAMLError, *_INVALID_VALUES) as error:
        raise UsageProblem(f"Cannot read --filename {file}: {_why(error)}") from error
    if not all(isinstance(each, dict) for each in objects):
        raise UsageProblem(f"--filename {file} is not a {_KIND} of {_VERSION}.")
    return objects


def _why(error: Exception) -> str:
    """The reason, with the place in the file if PyYAML knows it."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return why(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', '')}"


def name_of(body: JsonObject) -> str:
    """The job's name, one that begins with generateName, or "" without both."""
    metadata = _part(body, "metadata")
    prefix = str(metadata.get("generateName") or "")
    return str(metadata.get("name") or (with_suffix(prefix) if prefix else ""))


def with_suffix(prefix: str) -> str:
    """A name with a random end, as Kubernetes makes one from generateName."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(SUFFIX))


def queue_of(body: JsonObject) -> str:
    """The job's queue, "" without one."""
    return str(_part(body, "spec").get("jobQueue") or "")


def fill(body: JsonObject, name: str, queue: str, namespace: str) -> JsonObject:
    """The job with its name, queue and namespace, and a workspace that accepts an upload.

    Raises UsageProblem if it has another namespace.
    """
    body = copy.deepcopy(body)
    metadata, spec = _part(body, "metadata"), _part(body, "spec")
    own = metadata.get("namespace", namespace)
    if own != namespace:
        raise UsageProblem(
            f"The job has namespace {own}, but the current one is {namespace}. Add -n {own}."
        )
    metadata.pop("generateName", None)
    metadata.update(name=name, namespace=namespace)
    spec["jobQueue"] = queue
    workspace = _child(_child(spec, "volumes"), "workspace")
    workspace["source"] = "zip"
    return body


def _check_source(file: str, spec: JsonObject) -> None:
    volumes = spec.get("volumes")
    workspace = volumes.get("workspace") if isinstance(volumes, dict) else None
    source = workspace.get("source", "zip") if isinstance(workspace, dict) else "zip"
    if source != "zip":
        raise UsageProblem(
            f"--filename {file}: the workspace comes from {source} (volumes.workspace.source), so"
            f" there is nothing to upload. Use: kubectl create -f {file}"
        )


def _part(body: JsonObject, name: str) -> JsonObject:
    part = body[name]
    assert isinstance(part, dict)
    return part


def _child(parent: JsonObject, name: str) -> JsonObject:
    child = parent.get(name)
    if not isinstance(child, dict):
        child = parent[name] = {}
    return child
