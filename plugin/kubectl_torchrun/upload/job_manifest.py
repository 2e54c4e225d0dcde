"""The TorchrunJob that `submit` creates."""

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.upload import user_manifest
from torchrun_api.contract.variable import literal
from torchrun_api.json import JsonObject, JsonValue
from torchrun_api.names import (
    MAX_JOB_NAME,
    UPLOAD_TOKEN_SHA256,
    WORKSPACE_BASE,
    WORKSPACE_SHA256,
)

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
CONDITIONS = ("Succeeded", "Running", "Finished")
_VARIABLE = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


class Request(NamedTuple):
    """A job to create. `nodes` and `gpus`: at most one is set; neither means one node."""

    name: str
    queue: str
    command: str
    nodes: int | None = None
    gpus: int | None = None
    image: str = ""
    env: tuple[tuple[str, str], ...] = ()
    development: bool = False
    after: tuple[tuple[str, str], ...] = ()  # names of jobs, each with a condition
    manifest: JsonObject | None = None  # of the user's file, in place of all but name and queue


def build(
    request: Request, namespace: str, sha256: str, base: str = "", token: str = ""
) -> JsonObject:
    """The TorchrunJob, with the digest of the only workspace that it accepts.

    token: the digest of its upload token. base: a job whose workspace may have files in common.
    Raises UsageProblem as `user_manifest.fill`.
    """
    if request.manifest is None:
        body = from_flags(request, namespace)
    else:
        body = user_manifest.fill(request.manifest, request.name, request.queue, namespace)
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    annotations = metadata.get("annotations")
    metadata["annotations"] = {
        **(annotations if isinstance(annotations, dict) else {}),
        WORKSPACE_SHA256: sha256,
        **({UPLOAD_TOKEN_SHA256: token} if token else {}),
        **({WORKSPACE_BASE: base} if base else {}),
    }
    return body


def from_flags(request: Request, namespace: str) -> JsonObject:
    """The TorchrunJob of the flags, with an uploaded workspace."""
    size: JsonObject = (
        {"numGPUs": request.gpus} if request.gpus else {"numNodes": request.nodes or 1}
    )
    spec: JsonObject = {"jobQueue": request.queue, **size, "command": request.command}
    if request.image:
        spec["image"] = request.image
    if request.env:
        env: list[JsonValue] = [
            {"name": name, "value": literal(value)} for name, value in request.env
        ]
        spec["env"] = env
    if request.development:
        spec["development"] = True
    if request.after:
        jobs: list[JsonValue] = [{"name": job, "condition": what} for job, what in request.after]
        spec["dependsOn"] = jobs
    spec["volumes"] = {"workspace": {"source": "zip"}}
    return {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "metadata": {"name": request.name, "namespace": namespace},
        "spec": spec,
    }


def generated_name(directory: str) -> str:
    """A job name with the name of its directory: `my-project-x7k2p`."""
    plain = unicodedata.normalize("NFKD", directory).encode("ascii", "ignore").decode().lower()
    stem = re.sub(r"[^a-z0-9]+", "-", plain).lstrip("-0123456789")
    stem = stem[: MAX_JOB_NAME - user_manifest.SUFFIX - 1].strip("-") or "run"
    return user_manifest.with_suffix(f"{stem}-")


def check_name(name: str) -> None:
    """Raises UsageProblem if the name is not valid for a job."""
    if len(name) > MAX_JOB_NAME:
        raise UsageProblem(
            f"--name {name} has {len(name)} characters. Use at most {MAX_JOB_NAME}, because the"
            " names of pods are longer."
        )
    if not _NAME.fullmatch(name):
        raise UsageProblem(
            f"--name {name!r} is not a valid job name. Use lowercase letters, digits and '-',"
            " starting with a letter and not ending with '-', for example my-run-2."
        )


def variables(pairs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`K=V` pairs as names and values. Raises UsageProblem for an invalid pair."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise UsageProblem(f"--env {pair!r} is not NAME=VALUE. Example: --env LR=0.1.")
        values[name] = value
    return tuple(values.items())


def dependencies(pairs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`JOB[=CONDITION]` as names and conditions. Raises UsageProblem for an invalid value."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, _, condition = pair.partition("=")
        condition = condition or CONDITIONS[0]
        if not _NAME.fullmatch(name) or condition not in CONDITIONS:
            raise UsageProblem(
                f"--after {pair!r} is not JOB or JOB=CONDITION. Valid conditions:"
                f" {', '.join(CONDITIONS)}. Example: --after pretrain=Running."
            )
        values[name] = condition
    return tuple(values.items())
